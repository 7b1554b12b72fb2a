"""Times read from a Chrome trace whose right answer is known."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import pytest

MAIN, AUTOGRAD = 1, 2


@pytest.fixture
def timeline(load: Any) -> ModuleType:
    return load("timeline")


class Recording:
    """Writes events as the profiler does, times in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)

    def host(self, name: str, start: float, end: float) -> None:
        self._add(name, "user_annotation", start, end, MAIN)

    def gpu(
        self,
        name: str,
        stream: int,
        start: float,
        end: float,
        *,
        launched: float,
        thread: int = MAIN,
        ranks: list[int] | None = None,
    ) -> None:
        correlation = next(self._numbers)
        self._add("launch", "cuda_runtime", launched, launched + 1, thread, correlation=correlation)
        more: dict[str, Any] = {"correlation": correlation, "stream": stream}
        if ranks is not None:
            more["Process Group Ranks"] = str(ranks)
        self._add(name, "kernel", start, end, stream, **more)

    def _add(
        self, name: str, category: str, start: float, end: float, thread: int, **args: object
    ) -> None:
        event = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start}
        self.events.append(event | {"tid": thread, "args": args})

    @property
    def trace(self) -> dict[str, Any]:
        return {"traceEvents": self.events}


def recorded() -> dict[str, Any]:
    """Two steps; the second lasts from 1000 to 2000 and computes for 600 of it."""
    run = Recording()
    compute, outer, inner, reduce, copies = 7, 15, 16, 17, 18
    run.host("step", 0, 90)
    run.gpu("gemm", compute, 100, 1000, launched=10)
    run.host("step", 100, 200)
    run.host("Optimizer.step#AdamW.step", 180, 199)
    # in flight when the second step starts: counts from 1000 on
    run.gpu("quantize_rows_kernel", outer, 940, 960, launched=85)
    run.gpu("ncclDevKernel_AllGather_RING_LL", outer, 960, 1100, launched=86, ranks=[0, 2])
    run.gpu("ncclDevKernel_AllGather_RING_LL", inner, 1100, 1120, launched=87, ranks=[0, 1])
    run.gpu("dequantize_rows_kernel", inner, 1120, 1130, launched=88)
    run.gpu("gemm", compute, 1120, 1420, launched=110)
    run.gpu("direct_copy", copies, 1300, 1310, launched=111)
    run.gpu("flash", compute, 1420, 1670, launched=150, thread=AUTOGRAD)
    run.gpu(
        "ncclDevKernel_SendRecv", reduce, 1500, 1900, launched=151, thread=AUTOGRAD, ranks=[0, 2]
    )
    run.gpu(
        "ncclDevKernel_SendRecv", reduce, 1900, 1920, launched=152, thread=AUTOGRAD, ranks=[0, 1]
    )
    run.gpu("multi_tensor_apply", compute, 1950, 2000, launched=190)
    return run.trace


def test_times_of_the_second_step(timeline: ModuleType) -> None:
    assert timeline.read_step(recorded()) == pytest.approx((1.0, 0.6, 0.4))


def test_unusable_traces_say_why(timeline: ModuleType) -> None:
    with pytest.raises(ValueError, match="marks 0 `step` ranges"):
        timeline.read_step({"traceEvents": []})
    run = Recording()
    run.host("step", 0, 1)
    run.host("step", 1, 2)
    with pytest.raises(ValueError, match="no GPU work"):
        timeline.read_step(run.trace)
