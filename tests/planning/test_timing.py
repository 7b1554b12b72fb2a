"""Replays of hand-written traces, whose times are known by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from lq_lightning.pipeline.schedules import Program, training_program
from lq_lightning.planning import costs, timing
from lq_lightning.planning.costs import (
    BETWEEN,
    BUBBLE,
    CODECS,
    COMPUTE,
    HOST_LATE,
    OPTIMIZER,
    WITHIN,
)
from lq_lightning.planning.machine import GPUS, Link, Machine
from lq_lightning.planning.timing import StepTime
from lq_lightning.planning.trace import (
    COMPUTING,
    HOST,
    SHARDED,
    Collective,
    Event,
    Mark,
    Operator,
    Record,
    Trace,
    Wait,
)

SIDE, NETWORK, OTHER = 1, 2, 3
# a second of copying, of a link within a node, and of one between nodes
SECOND, WITHIN_SECOND, BETWEEN_SECOND = 10**12, 10**9, 10**8


@pytest.fixture(autouse=True)
def whole_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let operators take their bytes, and the host no time."""
    monkeypatch.setattr(costs, "LAUNCH_S", 0.0)
    monkeypatch.setattr(costs, "POINTWISE", 1.0)
    monkeypatch.setattr(timing, "SHARED", 0.0)


def machine(operator_s: float = 0.0, error: float = 0.0) -> Machine:
    gpu = replace(
        GPUS["H200"],
        copy_bytes_per_s=float(SECOND),
        operator_s=operator_s,
        error=error,
        operator_error=error,
    )
    return Machine(
        gpu=gpu,
        gpus_per_node=2,
        nodes=2,
        within_node=Link(bytes_per_s=float(WITHIN_SECOND), latency_s=0.0, error=error),
        between_nodes=Link(bytes_per_s=float(BETWEEN_SECOND), latency_s=0.0, error=error),
        nvlink=False,
        source="",
    )


def work(
    seconds: float, stream: int = COMPUTING, name: str = "aten.gelu.default", **changes: object
) -> Operator:
    values: dict[str, object] = {
        "phase": "forward",
        "flops": 0,
        "action": None,
    } | changes
    return Operator(
        name=name,
        stream=stream,
        read_nbytes=round(seconds * SECOND),
        written_nbytes=0,
        dtype=torch.bfloat16,
        shapes=(),
        **values,  # type: ignore[arg-type]
    )


def message(seconds: float, level: str, stream: int = NETWORK, **changes: object) -> Collective:
    """An all-gather of two ranks of a node, or of one in each of two nodes (which share it)."""
    rate = WITHIN_SECOND if level == WITHIN else BETWEEN_SECOND // 2
    values: dict[str, object] = {"kind": "all_gather", "phase": "forward"} | changes
    nbytes, nodes = round(seconds * rate), 1 if level == WITHIN else 2
    return Collective(nbytes=nbytes, ranks=2, nodes=nodes, stream=stream, **values)  # type: ignore[arg-type]


def trace_of(step: Sequence[Event], steps: int = 3, **changes: int) -> Trace:
    """Repeat a step; events keep their numbers, as later ones replace those before."""
    events: list[Event] = []
    for index in range(steps):
        events += [Mark("batch", index), *step, Mark("stepped", index + 1)]
    sizes = {"world_size": 4, "gpus_per_node": 2} | changes
    return Trace(rank=0, steps=steps, events=events, **sizes)


def step_time(
    traces: Trace | Sequence[Trace], where: Machine, schedule: Program | None = None
) -> StepTime:
    return timing.step_time([traces] if isinstance(traces, Trace) else traces, where, schedule)


def timed(step: Sequence[Event], **changes: int) -> StepTime:
    found = step_time(trace_of(step, **changes), machine())
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    return found


# --- streams --------------------------------------------------------------------------------------


def test_a_stream_does_one_after_another_and_parts_are_told_apart() -> None:
    codec = work(1.0, name="lq_lightning.quantize.default")
    codec = replace(codec, read_nbytes=round(0.96 * SECOND))
    found = timed([work(2.0), codec, work(4.0, phase="optimizer")])
    assert found.seconds == pytest.approx(7.0)
    assert found.parts[COMPUTE] == pytest.approx(2.0)
    assert found.parts[CODECS] == pytest.approx(1.0)
    assert found.parts[OPTIMIZER] == pytest.approx(4.0)


def test_streams_run_beside_each_other() -> None:
    found = timed([work(3.0, SIDE), work(2.0)])
    assert found.seconds == pytest.approx(2.0)


def test_a_wait_orders_streams() -> None:
    found = timed(
        [
            work(3.0, SIDE, "lq_lightning.quantize.default"),
            Record(SIDE, 1),
            work(1.0),
            Wait(COMPUTING, 1),
        ]
    )
    late = 3.0 / 0.96 - 1.0
    assert found.seconds == pytest.approx(1.0 + late)
    assert found.parts[CODECS] == pytest.approx(late)


def test_an_event_is_what_the_stream_had_done_when_it_was_recorded() -> None:
    step = [work(1.0, SIDE), Record(SIDE, 1), work(5.0, SIDE), Wait(COMPUTING, 1), work(1.0)]
    found = timed([Record(COMPUTING, 2), Wait(SIDE, 2), *step, Record(SIDE, 3), Wait(COMPUTING, 3)])
    assert found.seconds == pytest.approx(6.0)
    assert timed([Record(COMPUTING, 2), Wait(SIDE, 2), *step]).seconds == pytest.approx(6.0)


def test_work_beside_computation_slows_it_by_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SHARED", 0.5)
    join = [Record(COMPUTING, 1), Wait(SIDE, 1)]
    found = timed([*join, work(0.96, SIDE, "lq_lightning.quantize.default"), work(4.0)])
    assert found.seconds == pytest.approx(4.5)
    assert (found.parts[COMPUTE], found.parts[CODECS]) == pytest.approx((4.0, 0.5))


# --- communication --------------------------------------------------------------------------------


def exchange(seconds: float, level: str, hidden: float) -> list[Event]:
    """A message behind what came before, with some computation beside it."""
    join: list[Event] = [Record(COMPUTING, 1), Wait(NETWORK, 1)]
    return [*join, message(seconds, level), Record(NETWORK, 2), work(hidden), Wait(COMPUTING, 2)]


@pytest.mark.parametrize("level", [WITHIN, BETWEEN])
def test_of_a_message_the_rest_is_exposed_at_its_level(level: str) -> None:
    found = timed([*exchange(5.0, level, 2.0), work(1.0)])
    assert found.parts[level] == pytest.approx(3.0)
    assert found.parts[COMPUTE] == pytest.approx(3.0)
    assert timed([*exchange(5.0, level, 6.0), work(1.0)]).parts[level] == 0


def test_levels_have_channels_of_their_own_and_messages_of_one_queue() -> None:
    join: list[Event] = [Record(COMPUTING, 1), Wait(NETWORK, 1), Wait(OTHER, 1)]
    ends: list[Event] = [
        Record(NETWORK, 2),
        Record(OTHER, 3),
        Wait(COMPUTING, 2),
        Wait(COMPUTING, 3),
    ]

    def both(first: str, second: str) -> StepTime:
        return timed([*join, message(2.0, first), message(3.0, second, OTHER), *ends])

    assert both(WITHIN, BETWEEN).seconds == pytest.approx(3.0)
    assert both(WITHIN, BETWEEN).parts[BETWEEN] == pytest.approx(3.0)
    assert both(BETWEEN, BETWEEN).seconds == pytest.approx(5.0)
    assert both(WITHIN, WITHIN).parts[WITHIN] == pytest.approx(5.0)


def test_a_message_on_the_computing_stream_is_exposed() -> None:
    found = timed([work(1.0), message(2.0, WITHIN, COMPUTING), work(1.0)])
    assert found.parts[WITHIN] == pytest.approx(2.0)
    assert found.seconds == pytest.approx(4.0)


def test_what_one_step_starts_the_next_one_waits_for() -> None:
    events: list[Event] = []
    for index in range(3):
        if index:
            events.append(Wait(COMPUTING, index - 1))  # of what ended the step before
        events += [Mark("batch", index), work(1.0), Record(COMPUTING, 10 + index)]
        events += [Wait(NETWORK, 10 + index), message(4.0, BETWEEN), Record(NETWORK, index)]
        events += [Mark("stepped", index + 1)]
    found = step_time(Trace(0, 4, 2, steps=3, events=events), machine())
    assert found.seconds == pytest.approx(5.0)
    assert found.parts[BETWEEN] == pytest.approx(4.0)


def test_bytes_of_a_step_are_those_of_its_node() -> None:
    found = timed(exchange(1.0, BETWEEN, 0.0))
    assert found.sent_between_nbytes == BETWEEN_SECOND
    assert found.sent_within_nbytes == 0
    assert timed(exchange(1.0, WITHIN, 0.0)).sent_within_nbytes == 2 * WITHIN_SECOND


def test_micro_batches_are_one_step() -> None:
    events: list[Event] = []
    for index in range(6):
        events += [Mark("batch", index // 2), work(1.0), Mark("stepped", (index + 1) // 2)]
    found = step_time(Trace(0, 1, 1, steps=3, microbatches=2, events=events), machine())
    assert found.seconds == pytest.approx(2.0)


# --- host -----------------------------------------------------------------------------------------


def test_a_late_host_leaves_the_device_idle() -> None:
    step = [work(0.001) for _ in range(10)]
    found = step_time(trace_of(step), machine(operator_s=0.5))
    calls = 10 * timing.OPERATOR_CALLS + timing.BATCH_CALLS
    assert found.seconds == pytest.approx(0.5 * calls)
    assert found.parts[HOST_LATE] == pytest.approx(found.seconds - 0.01)


def test_a_host_that_waits_issues_nothing() -> None:
    waits: list[Event] = [work(3.0), Record(COMPUTING, 1), Wait(HOST, 1), work(0.001)]
    issue = timing.BATCH_CALLS + 2 * timing.OPERATOR_CALLS + 2 * timing.EVENT_CALLS
    late = step_time(trace_of(waits), machine(operator_s=0.001))
    free = step_time(trace_of([waits[0], waits[1], waits[3]]), machine(operator_s=0.001))
    assert free.seconds == pytest.approx(3.001)
    assert late.seconds == pytest.approx(3.001 + 0.001 * issue, rel=0.01)


def test_events_that_no_python_records_take_the_host_no_time() -> None:
    events: list[Event] = [Record(COMPUTING, 1, False), Wait(SIDE, 1, False), work(0.001)]
    found = step_time(trace_of(events), machine(operator_s=0.5))
    calls = timing.OPERATOR_CALLS + timing.BATCH_CALLS
    assert found.seconds == pytest.approx(0.5 * calls)


def test_operators_on_dtensors_and_compiled_ones_take_the_host_longer() -> None:
    idle = work(0.0, name="aten.empty_like.default")
    step = [work(0.001, name="aten.mm.default", flops=1), idle, work(0.0, name=SHARDED), idle]
    calls = 3 * timing.OPERATOR_CALLS + timing.SHARDED_CALLS + timing.BATCH_CALLS
    assert step_time(trace_of(step), machine(operator_s=0.5)).seconds == pytest.approx(0.5 * calls)
    compiled = replace(trace_of(step), compiled=True)  # what only allocates is there no more
    calls = timing.COMPILED_CALLS + timing.SHARDED_CALLS + timing.BATCH_CALLS
    assert step_time(compiled, machine(operator_s=0.5)).seconds == pytest.approx(0.5 * calls)


# --- intervals and networks -----------------------------------------------------------------------


def test_intervals_are_errors_in_quadrature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        timing,
        "ERRORS",
        costs.Slower(
            **dict.fromkeys(("products", "memory", "host", "within_node", "between_nodes"), 0.0)
        ),
    )
    found = step_time(trace_of([work(3.0), message(4.0, WITHIN, COMPUTING)]), machine(error=0.1))
    assert found.high_s == pytest.approx(7.0 + timing.SURE * 0.5)
    assert found.low_s == pytest.approx(7.0 - timing.SURE * 0.5 / 1.1)


def test_hidden_messages_widen_the_interval_only_upwards() -> None:
    trace = trace_of(exchange(1.0, BETWEEN, 1.0))
    found = step_time(trace, machine(error=0.2))
    assert found.high_s - found.seconds > 1.2 * (found.seconds - found.low_s)
    assert timing.expected_seconds([trace], machine()) == found.seconds


def test_a_step_that_two_things_bound_alike_may_be_faster() -> None:
    both = step_time(trace_of(exchange(1.0, BETWEEN, 1.0)), machine(error=0.2))
    assert both.low_s < 0.95 * both.seconds


def test_refuses_traces_without_steps() -> None:
    with pytest.raises(ValueError, match="has no step"):
        step_time(Trace(0, 1, 1), machine())


# --- pipelines ------------------------------------------------------------------------------------


def stage_trace(
    rank: int, places: int, microbatches: int, send_s: float = 0.0, **sizes: int
) -> Trace:
    """Forward passes of one second, backward passes of two, and messages between them."""
    step: list[Event] = []
    for action in training_program("1f1b", places, microbatches).orders[rank]:
        forward = action.kind == "F"
        step.append(work(1.0 if forward else 2.0, action=tuple(action)))
        if rank != (places - 1 if forward else 0):
            step.append(message(2 * send_s, BETWEEN, kind="send", action=tuple(action)))
    return trace_of(step, **sizes)


@pytest.mark.parametrize(("places", "microbatches"), [(2, 4), (4, 8), (8, 8)])
def test_bubble_of_1f1b_is_one_less_than_its_ranks_over_its_microbatches(
    places: int, microbatches: int
) -> None:
    traces = [stage_trace(rank, places, microbatches) for rank in range(places)]
    found = step_time(traces, machine(), training_program("1f1b", places, microbatches))
    ideal = 3.0 * microbatches
    assert found.parts[COMPUTE] == pytest.approx(ideal)
    assert found.parts[BUBBLE] / ideal == pytest.approx((places - 1) / microbatches)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)


def test_messages_between_stages_are_exposed_where_ranks_wait_for_them() -> None:
    program = training_program("1f1b", 2, 4)
    slow = [stage_trace(r, 2, 4, send_s=1.0, world_size=2, gpus_per_node=1) for r in range(2)]
    found = step_time(slow, machine(), program)
    free = step_time([stage_trace(r, 2, 4) for r in range(2)], machine(), program)
    assert found.seconds > free.seconds
    assert found.parts[BETWEEN] > 0
    assert sum(found.parts.values()) == pytest.approx(found.seconds)


def test_eager_1f1b_hides_the_messages_that_1f1b_waits_for() -> None:
    times = {}
    for schedule in ("1f1b", "eager_1f1b"):
        program = training_program(schedule, 2, 16)
        traces = [
            trace_of(
                [
                    event
                    for action in program.orders[rank]
                    for event in (
                        work(1.0, action=tuple(action)),
                        message(0.5, BETWEEN, kind="send", action=tuple(action)),
                    )
                ],
                world_size=2,
                gpus_per_node=1,
            )
            for rank in range(2)
        ]
        times[schedule] = step_time(traces, machine(), program).seconds
    assert times["eager_1f1b"] < times["1f1b"]


def test_updates_of_weights_count_once_per_step() -> None:
    program = training_program("1f1b", 2, 4)
    traces = [stage_trace(rank, 2, 4) for rank in range(2)]
    plain = step_time(traces, machine(), program)
    for trace in traces:
        marks = [
            i for i, e in enumerate(trace.events) if isinstance(e, Mark) and e.name == "stepped"
        ]
        for index in reversed(marks):
            trace.events.insert(index, work(5.0, phase="optimizer"))
    updated = step_time(traces, machine(), program)
    assert updated.parts[OPTIMIZER] == pytest.approx(5.0)
    assert updated.seconds == pytest.approx(plain.seconds + 5.0)
