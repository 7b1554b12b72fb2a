"""Compute and waiting time of a rank's GPU in a step, read from a profile of `step_time.py`.

A trace holds two steps of one rank. The second is read: it lasts from the end of the first step's
last kernel on the compute stream to the end of its own, so that what the host enqueued early and
what other streams still do for the last step are counted as in a long run.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]


class Span(NamedTuple):
    """A time interval in microseconds."""

    start: float
    end: float


class StepTimes(NamedTuple):
    """Milliseconds of a step.

    Attributes:
        step_ms: Duration of the step.
        compute_ms: Time in which the compute stream runs a kernel.
        exposed_ms: The rest of the step, in which the GPU waits for communication or the host.
    """

    step_ms: float
    compute_ms: float
    exposed_ms: float


def load(path: Path) -> dict[str, Any]:
    """Read a Chrome trace, `.json` or `.json.gz`."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    trace: dict[str, Any] = json.loads(content)
    return trace


def read_step(trace: dict[str, Any]) -> StepTimes:
    """Time the second step of a Chrome trace of CPU and CUDA activities, marked by `step` ranges.

    Raises:
        ValueError: The trace has fewer than two steps, or no GPU work in them.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    marked = [e for e in events if e.get("cat") == "user_annotation" and e["name"] == "step"]
    steps = sorted(_span(event) for event in marked)
    if len(steps) < 2:
        raise ValueError(
            f"the trace marks {len(steps)} `step` ranges; two are needed: record it with "
            "`step_time.py --trace FOLDER`"
        )
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    computing = _on_compute_stream(events)
    ends = []
    for step in steps[:2]:
        own = [
            _span(e).end
            for e in computing
            if step.start <= launched.get(e["args"].get("correlation"), -1.0) <= step.end
        ]
        ends.append(max(own, default=float("nan")))
    if not ends[0] < ends[1]:
        raise ValueError(
            "the trace shows no GPU work in its steps: record it on CUDA devices with "
            "`step_time.py --trace FOLDER`"
        )
    inside = (Span(max(s.start, ends[0]), min(s.end, ends[1])) for s in map(_span, computing))
    busy = _length(span for span in inside if span.start < span.end)
    length = ends[1] - ends[0]
    return StepTimes(length / 1e3, busy / 1e3, (length - busy) / 1e3)


def _span(event: Event) -> Span:
    return Span(event["ts"], event["ts"] + event["dur"])


def _on_compute_stream(events: list[Event]) -> list[Event]:
    """Return the work of the stream with the most time in kernels that are not collectives."""
    on_gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    time: Counter[int] = Counter()
    for event in on_gpu:
        if event["cat"] == "kernel" and not event["name"].startswith("nccl"):
            time[event["args"]["stream"]] += event["dur"]
    stream = time.most_common(1)[0][0] if time else -1
    return [e for e in on_gpu if e["args"]["stream"] == stream]


def _length(spans: Iterable[Span]) -> float:
    """Microseconds that are in any of the spans."""
    length, reached = 0.0, float("-inf")
    for span in sorted(spans):
        length += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return length
