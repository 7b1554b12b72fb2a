"""Orders of computation: complete, without deadlock, and micro-batches kept at their peaks."""

from __future__ import annotations

import itertools

import pytest

from lq_lightning.pipeline.schedules import (
    SCHEDULES,
    Action,
    Program,
    check_schedule,
    compensated_bits,
    evaluation_program,
    in_flight,
    stages_of_rank,
    training_program,
)

TRAINING = [
    ("gpipe", 3, 2, 1),
    ("1f1b", 4, 7, 1),
    ("eager_1f1b", 4, 6, 1),
    ("interleaved_1f1b", 4, 8, 2),
    ("zero_bubble", 4, 8, 1),
    ("zero_bubble", 2, 6, 3),
    ("zbv", 4, 8, 2),
]


@pytest.mark.parametrize("case", TRAINING, ids=str)
def test_training_computes_everything_once(case: tuple[str, int, int, int]) -> None:
    program = training_program(*case)
    actions = list(itertools.chain(*program.orders))
    assert len(actions) == len(set(actions))
    for stage in range(program.num_stages):
        for index in range(program.num_microbatches):
            kinds = {a.kind for a in actions if a[1:] == (stage, index)}
            assert kinds in ({"F", "B"}, {"F", "I", "W"})
    for rank, order in enumerate(program.orders):
        mine = stages_of_rank(case[0], rank, program.num_stages, case[1])
        assert {action.stage for action in order} == set(mine)
        assert {program.rank_of(stage) for stage in mine} == {rank}


@pytest.mark.parametrize("case", TRAINING, ids=str)
def test_messages_are_those_between_stages_of_different_ranks(
    case: tuple[str, int, int, int],
) -> None:
    program = training_program(*case)
    size = case[1]
    keys = [
        (a, b, key) for a in range(size) for b in range(size) for key, _ in program.messages(a, b)
    ]
    crossing = [
        boundary
        for boundary in range(program.num_stages - 1)
        if program.rank_of(boundary) != program.rank_of(boundary + 1)
    ]
    assert len(keys) == len(set(keys)) == 2 * len(crossing) * program.num_microbatches
    for source, target, key in keys:
        ends = (program.rank_of(key.boundary), program.rank_of(key.boundary + 1))
        assert (target, source) == ends if key.backward else (source, target) == ends


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [1, 3, 8])
def test_evaluation_takes_any_number_of_microbatches(schedule: str, count: int) -> None:
    stages_per_rank = 2 if schedule in ("interleaved_1f1b", "zero_bubble", "zbv") else 1
    program = evaluation_program(schedule, 4, count, stages_per_rank)
    actions = list(itertools.chain(*program.orders))
    assert sorted(actions) == [
        Action("F", s, m) for s in range(4 * stages_per_rank) for m in range(count)
    ]


def test_messages_have_turns() -> None:
    # Mostly one computation before they are needed.
    program, gpipe = training_program("1f1b", 2, 3), training_program("gpipe", 2, 3)
    assert [turn for _, turn in gpipe.messages(0, 1)] == [0, 0, 1]
    assert [turn for _, turn in gpipe.messages(1, 0)] == [3, 3, 4]
    assert [turn for _, turn in program.messages(1, 0)] == [2, 3, 5]


def test_orders_in_which_ranks_wait_for_each_other_are_found() -> None:
    orders = [[Action("F", 0, 0), Action("B", 0, 0)], [Action("B", 1, 0), Action("F", 1, 0)]]
    with pytest.raises(AssertionError, match="wait for each other"):
        Program("1f1b", 2, 1, orders)


def test_v_goes_there_and_back() -> None:
    assert [stages_of_rank("zbv", r, 8, 4) for r in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert stages_of_rank("zero_bubble", 1, 8, 4) == (1, 5)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (("1f1c", 2, 4, 1), "choose one of 'gpipe'"),
        (("1f1b", 4, 3, 1), "num_microbatches=3` is too few.*num_microbatches=4"),
        (("zbv", 2, 1, 2), "too few"),
        (("1f1b", 2, 4, 2), "one stage on each rank"),
        (("zbv", 2, 4, 1), "stages_per_rank=2"),
        (("interleaved_1f1b", 4, 9, 2), "multiple of the ranks, 8 or 12"),
        (("zero_bubble", 4, 11, 2), "multiple of the ranks, 8 or 12"),
    ],
    ids=str,
)
def test_refuses_what_a_schedule_does_not_have(
    case: tuple[str, int, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_schedule(*case)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (("gpipe", 2, 5, 1), [5, 5]),
        (("1f1b", 4, 8, 1), [4, 3, 2, 1]),
        (("1f1b", 4, 4, 1), [4, 3, 2, 1]),
        (("eager_1f1b", 4, 12, 1), [10, 7, 4, 1]),
        (("eager_1f1b", 4, 8, 1), [8, 7, 4, 1]),
        (("interleaved_1f1b", 4, 16, 2), [11, 9, 7, 5]),
        (("interleaved_1f1b", 4, 4, 2), [8, 8, 7, 5]),
        (("zero_bubble", 4, 8, 1), [4, 3, 2, 1]),
    ],
    ids=str,
)
def test_microbatches_kept(case: tuple[str, int, int, int], expected: list[int]) -> None:
    assert in_flight(*case) == tuple(expected)


def test_bits_of_the_paper() -> None:
    assert compensated_bits([11, 9, 7, 5]) == (4, 4, 6, 8)
    assert compensated_bits([11, 9, 7, 5], rounding="nearest") == (4, 5, 6, 8)
    assert compensated_bits([11, 9, 7, 5], cap=7) == (4, 4, 6, 7)
    assert compensated_bits([4, 3, 2, 1]) == (4, 5, 8, 8)
    assert compensated_bits([3, 2, 1], bits=2) == (2, 3, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 1}, "bits=1"),
        ({"cap": 9}, "cap=9"),
        ({"bits": 6, "cap": 5}, "cap=6"),
        ({"rounding": "up"}, "rounding='up'"),
    ],
    ids=str,
)
def test_refuses_bits_that_do_not_exist(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compensated_bits([2, 1], **options)  # type: ignore[arg-type]
