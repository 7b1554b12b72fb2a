"""Times read from a Chrome trace whose right answer is known."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

COMPUTE, OUTER, REDUCE, COPIES = 7, 15, 17, 18
GATHER, SCATTER = "ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_SendRecv"
# Name, stream, start, end and time of launch in microseconds. The second step lasts from 1000 to
# 2000 and computes for 600 of it.
KERNELS = [
    ("gemm", COMPUTE, 100, 1000, 10),
    (GATHER, OUTER, 960, 1100, 86),  # in flight when the second step starts
    ("gemm", COMPUTE, 1120, 1420, 110),
    ("direct_copy", COPIES, 1300, 1310, 111),
    ("flash", COMPUTE, 1420, 1670, 150),
    (SCATTER, REDUCE, 1500, 1900, 151),
    ("multi_tensor_apply", COMPUTE, 1950, 2000, 190),
]


@pytest.fixture
def timeline(load: Any) -> ModuleType:
    return load("step_time")


def _event(category: str, name: str, start: float, end: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "args": args}


def _trace(kernels: list[tuple[str, int, int, int, int]]) -> dict[str, Any]:
    events = [_event("user_annotation", "step", start, start + 90) for start in (0, 100)]
    for number, (name, stream, start, end, launched) in enumerate(kernels):
        events.append(_event("cuda_runtime", "launch", launched, launched + 1, correlation=number))
        events.append(_event("kernel", name, start, end, correlation=number, stream=stream))
    return {"traceEvents": events}


def test_times_of_the_second_step(timeline: ModuleType) -> None:
    assert timeline.read_step(_trace(KERNELS)) == pytest.approx((0.6, 0.4))


def test_unusable_traces_say_why(timeline: ModuleType) -> None:
    with pytest.raises(ValueError, match="marks 0 `step` ranges"):
        timeline.read_step({"traceEvents": []})
    with pytest.raises(ValueError, match="no GPU work"):
        timeline.read_step(_trace([]))
