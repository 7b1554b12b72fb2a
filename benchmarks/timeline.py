"""Where the time of a training step goes, read from a profile of `step_time.py --trace`.

`research/draw_timeline.py` prints the times of a trace and draws it.

A trace holds two steps of one rank. The second is read: it lasts from the end of the first step's
last kernel on the compute stream to the end of its own, so that what the host enqueued early and
what other streams still do for the last step are counted as in a long run.

*Compute* is the time in which the compute stream runs a kernel, *exposed* is the rest of the step:
the time in which the GPU waits for communication, or for the host. An NCCL kernel lasts from its
launch until its bytes have arrived, which includes waiting for the other ranks.
"""

from __future__ import annotations

import bisect
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

BETWEEN, WITHIN, ANYWHERE = "between nodes", "within a node", "collective"
NETWORK = (BETWEEN, WITHIN, ANYWHERE)
ACTIVITIES = ("forward", "backward", "optimizer", *NETWORK, "quantize", "copy")
_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_QUANTIZE = ("quantize_rows", "requantize", "dequantize", "hadamard")


class Span(NamedTuple):
    """A time interval in microseconds."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel, copy or fill on the GPU.

    Attributes:
        span: When it ran, from the start of the step.
        stream: Number of the CUDA stream.
        activity: One of `ACTIVITIES`.
        carries: What a collective moves.
    """

    span: Span
    stream: int
    activity: str
    carries: Literal["", "weights", "gradients"] = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank.

    Attributes:
        length: In microseconds.
        compute_stream: Number of the stream that computes.
        work: Everything that ran on the GPU, cut to the step.
    """

    length: float
    compute_stream: int
    work: list[Work]

    def spans(self, **wanted: object) -> list[Span]:
        """Return the joined spans of the work whose attributes have these values."""
        chosen = (w for w in self.work if all(getattr(w, k) == v for k, v in wanted.items()))
        return union(w.span for w in chosen)

    @property
    def compute(self) -> list[Span]:
        """When the compute stream is busy."""
        return self.spans(stream=self.compute_stream)

    @property
    def others(self) -> list[Span]:
        """When any other stream is busy."""
        return union(w.span for w in self.work if w.stream != self.compute_stream)


def union(spans: Iterable[Span]) -> list[Span]:
    """Join overlapping and touching spans; the result is sorted."""
    joined: list[Span] = []
    for span in sorted(spans):
        if joined and span.start <= joined[-1].end:
            joined[-1] = Span(joined[-1].start, max(joined[-1].end, span.end))
        else:
            joined.append(span)
    return joined


def total(spans: Iterable[Span]) -> float:
    """Length of disjoint spans in microseconds."""
    return sum(span.end - span.start for span in spans)


def overlap(first: Sequence[Span], second: Sequence[Span]) -> float:
    """Microseconds in both of two sorted lists of disjoint spans."""
    shared, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        a, b = first[i], second[j]
        shared += max(0.0, min(a.end, b.end) - max(a.start, b.start))
        if a.end < b.end:
            i += 1
        else:
            j += 1
    return shared


def load(path: Path) -> dict[str, Any]:
    """Read a Chrome trace, `.json` or `.json.gz`."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    trace: dict[str, Any] = json.loads(content)
    return trace


def read_step(trace: dict[str, Any], node_size: int | None = None) -> Step:
    """Find the second step of a trace.

    Args:
        trace: Chrome trace of `torch.profiler` with CPU and CUDA activities, in which `step` ranges
            mark two or more steps.
        node_size: Ranks of one node, to tell collectives between nodes from those within one; None
            leaves them together.

    Raises:
        ValueError: The trace has fewer than two steps, or no GPU work in them.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    steps = _host_ranges(events, lambda name: name == "step")
    if len(steps) < 2:
        raise ValueError(
            f"the trace marks {len(steps)} `step` ranges; two are needed: record it with "
            "`step_time.py --trace FOLDER`"
        )
    launches = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    on_gpu = [e for e in events if e.get("cat") in _GPU_CATEGORIES]
    compute_stream = _compute_stream(on_gpu)
    ends = []
    for step in steps[:2]:
        ends.append(
            max(
                (
                    e["ts"] + e["dur"]
                    for e in on_gpu
                    if e["args"]["stream"] == compute_stream
                    and _launched_in(step, launches.get(e["args"].get("correlation")))
                ),
                default=float("nan"),
            )
        )
    if not ends[0] < ends[1]:
        raise ValueError(
            "the trace shows no GPU work in its steps: record it on CUDA devices with "
            "`step_time.py --trace FOLDER`"
        )
    window = Span(*ends)
    phases = _Phases(steps[1], events, launches)
    work = []
    for event in on_gpu:
        start = max(event["ts"], window.start) - window.start
        end = min(event["ts"] + event["dur"], window.end) - window.start
        if start < end:
            stream = event["args"]["stream"]
            activity, carries = _activity(event, node_size)
            if stream == compute_stream:
                activity = phases.of(event)
            work.append(Work(Span(start, end), stream, activity, carries))
    return Step(window.end - window.start, compute_stream, work)


class _Host(NamedTuple):
    """A range on a thread of the host."""

    start: float
    end: float
    thread: object


def _host_ranges(events: list[dict[str, Any]], matches: Any) -> list[_Host]:
    return sorted(
        _Host(e["ts"], e["ts"] + e["dur"], e["tid"])
        for e in events
        if e.get("cat") == "user_annotation" and matches(e["name"])
    )


def _launched_in(step: _Host, launch: dict[str, Any] | None) -> bool:
    return launch is not None and step.start <= launch["ts"] <= step.end


class _Phases:
    """Tells what launched a kernel: autograd runs backward on a thread of its own."""

    def __init__(
        self, step: _Host, events: list[dict[str, Any]], launches: dict[int, dict[str, Any]]
    ) -> None:
        self._thread = step.thread
        self._launches = launches
        self._optimizer = _host_ranges(events, lambda name: name.startswith("Optimizer.step"))
        self._starts = [r.start for r in self._optimizer]

    def of(self, event: dict[str, Any]) -> str:
        """Forward, backward or optimizer."""
        launch = self._launches.get(event["args"].get("correlation"))
        if launch is None:
            return "forward"
        index = bisect.bisect(self._starts, launch["ts"]) - 1
        if index >= 0 and launch["ts"] <= self._optimizer[index].end:
            return "optimizer"
        return "forward" if launch["tid"] == self._thread else "backward"


def _compute_stream(on_gpu: list[dict[str, Any]]) -> int:
    """Return the stream with the most time in kernels that are no collectives."""
    time: Counter[int] = Counter()
    for event in on_gpu:
        if event["cat"] == "kernel" and not event["name"].startswith("nccl"):
            time[event["args"]["stream"]] += event["dur"]
    return time.most_common(1)[0][0] if time else -1


def _activity(
    event: dict[str, Any], node_size: int | None
) -> tuple[str, Literal["", "weights", "gradients"]]:
    name = event["name"]
    if name.startswith("nccl"):
        return _scope(event["args"], node_size), "weights" if "AllGather" in name else "gradients"
    if any(part in name for part in _QUANTIZE):
        return "quantize", ""
    return "copy", ""


def _scope(arguments: dict[str, Any], node_size: int | None) -> str:
    """Whether a collective leaves the node, by the ranks that its kernel names."""
    try:
        ranks = json.loads(arguments["Process Group Ranks"])
    except (KeyError, ValueError):  # not recorded, or shortened
        return ANYWHERE
    if node_size is None:
        return ANYWHERE
    return BETWEEN if len({rank // node_size for rank in ranks}) > 1 else WITHIN


def summarize(step: Step) -> dict[str, Any]:
    """Return the times of a step in milliseconds.

    Returns:
        ``step_ms``; ``compute_ms``; ``exposed_ms``, their difference, and the parts of it in which
        another stream was busy (``exposed_communicating_ms``) or nothing was (``exposed_idle_ms``);
        ``network_ms``, any collective running, and the share of it that overlaps compute
        (``network_overlapped``); ``kinds``, the same two for each kind of collective, for quantize
        kernels and for copies beside the compute stream.
    """
    compute = step.compute
    exposed = step.length - total(compute)
    communicating = total(step.others) - overlap(step.others, compute)
    kinds: dict[str, list[Span]] = {}
    for scope in NETWORK:
        for carries in ("weights", "gradients"):
            kinds[f"{carries} {scope}"] = step.spans(activity=scope, carries=carries)
    for activity in ("quantize", "copy"):
        kinds[activity] = step.spans(activity=activity)
    network = union(w.span for w in step.work if w.carries)
    return {
        "step_ms": step.length / 1e3,
        "compute_ms": total(compute) / 1e3,
        "exposed_ms": exposed / 1e3,
        "exposed_communicating_ms": communicating / 1e3,
        "exposed_idle_ms": (exposed - communicating) / 1e3,
        **_times("network", network, compute),
        "kinds": {
            name: _times("", spans, compute) for name, spans in kinds.items() if total(spans)
        },
    }


def _times(name: str, spans: list[Span], compute: list[Span]) -> dict[str, float]:
    prefix = f"{name}_" if name else ""
    length = total(spans)
    shared = overlap(spans, compute) / length if length else 0.0
    return {f"{prefix}ms": length / 1e3, f"{prefix}overlapped": shared}
