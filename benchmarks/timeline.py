"""Where the time of a training step goes, read from a profile of `step_time.py --trace`.

    python benchmarks/timeline.py quantized_10gbit.json.gz --node-size 2 --pictures outputs

A trace holds two steps of one rank. The second is read: it lasts from the end of the first step's
last kernel on the compute stream to the end of its own, so that what the host enqueued early and
what other streams still do for the last step are counted as in a long run.

*Compute* is the time in which the compute stream runs a kernel, *exposed* is the rest of the step:
the time in which the GPU waits for communication, or for the host. An NCCL kernel lasts from its
launch until its bytes have arrived, which includes waiting for the other ranks.
"""

from __future__ import annotations

import argparse
import bisect
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from common import table, write_report

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


def lanes(step: Step) -> dict[int, str]:
    """Name every stream by what runs on it, the compute stream first; each name differs."""
    seen: dict[int, Counter[str]] = defaultdict(Counter)
    for work in step.work:
        seen[work.stream].update([work.activity, work.carries])
    streams = [step.compute_stream, *sorted(set(seen) - {step.compute_stream})]
    names = {stream: _lane(seen[stream]) for stream in streams[1:]}
    names = {step.compute_stream: "compute"} | names
    for parts in (_scopes, _number):
        times = Counter(names.values())
        shared = [stream for stream, name in names.items() if times[name] > 1]
        for index, stream in enumerate(shared):
            names[stream] += parts(seen[stream], index)
    return names


def _lane(seen: Counter[str]) -> str:
    if seen["weights"] and seen["gradients"]:
        return "collectives"
    if seen["weights"]:
        return "weight exchange" if seen["quantize"] else "weight gather"
    if seen["gradients"]:
        return "gradient reduce"
    return "quantize" if seen["quantize"] else "copies"


def _scopes(seen: Counter[str], _: int) -> str:
    scopes = [scope for scope in (BETWEEN, WITHIN) if seen[scope]]
    return f"\n{' and '.join(scopes)}" if scopes else ""


def _number(_: Counter[str], index: int) -> str:
    return f" {index + 1}"


COLORS = {
    "forward": "#5b8ff9",
    "backward": "#2f54c8",
    "optimizer": "#13254f",
    BETWEEN: "#e8684a",
    WITHIN: "#f6bd16",
    ANYWHERE: "#e8684a",
    "quantize": "#7a4fc1",
    "copy": "#9aa5b1",
    "exposed": "#d43d51",
}


def draw(step: Step, path: Path, title: str, zoom: tuple[float, float] | None = None) -> None:
    """Draw the step as a timeline, one lane per stream.

    Args:
        step: What to draw.
        path: PNG to write.
        title: Shown above.
        zoom: Start and end, in milliseconds, of a second picture below.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    names = lanes(step)
    views = [(0.0, step.length / 1e3), *([zoom] if zoom else [])]
    height = 0.9 + (0.9 + 0.36 * (len(names) + 1)) * len(views)
    figure = Figure(figsize=(10, height), layout="constrained", dpi=100)
    FigureCanvasAgg(figure)
    for axes, (start, end) in zip(
        figure.subplots(len(views), 1, squeeze=False)[:, 0], views, strict=True
    ):
        _draw_lanes(axes, step, names, (end - start) / 1500)
        axes.set_xlim(start, end)
        axes.set_xlabel("ms")
    used = [a for a in ACTIVITIES if any(w.activity == a for w in step.work)] + ["exposed"]
    handles = [Patch(color=COLORS[name], label=name) for name in used]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        **{"fontsize": 9, "handlelength": 1.2, "handletextpad": 0.4, "columnspacing": 1.2},
    )
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_lanes(axes: Any, step: Step, names: dict[int, str], thinnest: float) -> None:
    """Draw bars; those closer than ``thinnest`` milliseconds are joined."""
    for row, stream in enumerate(names):
        for activity in ACTIVITIES:
            bars = _bars(step.spans(stream=stream, activity=activity), thinnest)
            axes.broken_barh(bars, (row - 0.4, 0.8), color=COLORS[activity], linewidth=0)
    idle, last = [], 0.0
    for span in [*step.compute, Span(step.length, step.length)]:
        idle.append(Span(last, span.start))
        last = span.end
    bars = _bars([s for s in idle if s.end - s.start > 50], thinnest)
    axes.broken_barh(bars, (len(names) - 0.4, 0.8), color=COLORS["exposed"], linewidth=0)
    axes.set_yticks(range(len(names) + 1), [*names.values(), "exposed"])
    axes.invert_yaxis()
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _bars(spans: list[Span], thinnest: float) -> list[tuple[float, float]]:
    widened = union(Span(s.start, max(s.end, s.start + 1e3 * thinnest)) for s in spans)
    return [(s.start / 1e3, (s.end - s.start) / 1e3) for s in widened]


def describe(name: str, times: dict[str, Any]) -> str:
    """Lay out the times of one trace."""
    rows = [
        ["step", f"{times['step_ms']:.1f}", ""],
        ["compute", f"{times['compute_ms']:.1f}", ""],
        ["exposed", f"{times['exposed_ms']:.1f}", ""],
        ["  communicating", f"{times['exposed_communicating_ms']:.1f}", ""],
        ["  nothing runs", f"{times['exposed_idle_ms']:.1f}", ""],
        ["network", f"{times['network_ms']:.1f}", f"{times['network_overlapped']:.0%}"],
    ]
    rows += [
        [f"  {kind}", f"{t['ms']:.1f}", f"{t['overlapped']:.0%}"]
        for kind, t in times["kinds"].items()
    ]
    return table(rows, [name, "ms", "overlapped"])


def _zoom(text: str) -> tuple[float, float]:
    start, _, end = text.partition(":")
    return float(start), float(end)


def main() -> None:
    """Read traces, print their times, write them and draw one picture each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, nargs="+", help="Chrome traces, .json or .json.gz")
    parser.add_argument("--node-size", type=int, help="ranks per node")
    parser.add_argument("--json", type=Path, help="write the times here")
    parser.add_argument("--pictures", type=Path, help="folder for one PNG per trace")
    parser.add_argument("--zoom", type=_zoom, help="START:END in ms, drawn below the whole step")
    args = parser.parse_args()
    results = {}
    for path in args.traces:
        trace = load(path)
        step = read_step(trace, args.node_size)
        name = path.name.removesuffix(".gz").removesuffix(".json")
        times = summarize(step)
        gpu = (trace.get("deviceProperties") or [{}])[0].get("name")
        ranks = trace.get("distributedInfo", {}).get("world_size")
        commit = trace.get("commit", "unknown")
        results[name] = {"gpu": gpu, "world_size": ranks, "commit": commit} | times
        print(describe(name, times))
        if args.pictures:
            picture = args.pictures / f"{name}.png"
            title = f"{name.replace('_', ', ')}: one step of rank 0, {times['step_ms']:.0f} ms"
            draw(step, picture, title, args.zoom)
            print(f"wrote {picture}, {picture.stat().st_size / 1e3:.0f} kB")
    if args.json:
        write_report(args.json, "trace", {"node_size": args.node_size, "traces": results})


if __name__ == "__main__":
    main()
