from __future__ import annotations

import pytest
import torch

from lq_lightning.codecs import CodecSpec
from lq_lightning.data_parallel.unit import (
    ErrorSums,
    MessageLayout,
    Run,
    Segment,
    keep_small_runs_exact,
    merge_over_small_gaps,
    ring_bytes,
    segment_runs,
)
from lq_lightning.foundation.topology import Topology


def test_neighbours_that_travel_alike_share_a_run() -> None:
    segments = [
        Segment("a", 0, 100, "quantized"),
        Segment("b", 100, 50, "quantized"),
        Segment("c", 150, 7, "full", "1-D"),
        Segment("d", 157, 30, "skipped", "frozen"),
        Segment("e", 187, 0, "full", "1-D"),
        Segment("f", 187, 20, "quantized"),
        Segment("g", 207, 20, "skipped", "frozen"),
        Segment("h", 227, 20, "quantized"),
    ]
    runs = [Run(0, 150, True), Run(150, 7, False), Run(187, 20, True), Run(227, 20, True)]
    assert segment_runs(segments) == runs


def runs_of(segments: str) -> list[Run]:
    """Absorbing runs of segments such as ``q100 f3 s5``: how each travels, and its elements."""
    found, start = [], 0
    travels = {"q": "quantized", "f": "full", "s": "skipped"}
    for text in segments.split():
        numel = int(text[1:])
        found.append(Segment(text, start, numel, travels[text[0]]))  # type: ignore[arg-type]
        start += numel
    return merge_over_small_gaps(segment_runs(found))


def test_a_few_full_precision_elements_do_not_part_a_run() -> None:
    absorbed = (Run(1003, 20, False), Run(2023, 11, False))
    runs = [Run(0, 3, False), Run(3, 2040, True, absorbed), Run(2043, 5, False)]
    assert runs_of("f3 q1000 f20 q1000 f8 f3 q9 f5") == runs


def test_what_is_absorbed_is_at_most_a_64th_of_the_run() -> None:
    assert len(runs_of("q1160 f20 q100")) == 1
    assert len(runs_of("q1160 f21 q100")) == 3
    assert len(runs_of("q1160 f20 q100 f1 q1")) == 3, "two gaps share what is allowed"
    assert len(runs_of("q1160 f20 q100 f1 q63")) == 1


def test_a_gap_that_is_too_large_at_first_is_small_for_a_longer_run() -> None:
    runs = runs_of("q30 f2 q60 f2 q500")
    assert [run.numel for run in runs] == [594]
    assert runs[0].gap_numel == 4


@pytest.mark.parametrize("gap", ["s2", "f2 s2", "s2 f2", "f2 s2 f2"])
def test_skipped_segments_part_runs(gap: str) -> None:
    runs = runs_of(f"q1000 {gap} q1000")
    assert all(not run.gaps for run in runs)
    assert [run.quantized for run in runs] == [True, *[False] * gap.count("f"), True]


def test_runs_that_codes_do_not_make_smaller_are_found_before_absorption() -> None:
    spec = CodecSpec(code="int4", group_size=16)
    segments = [
        Segment("a", 0, 1000, "quantized"),
        Segment("b", 1000, 2, "full", "1-D"),
        Segment("c", 1002, 3, "quantized"),
        Segment("d", 1005, 2, "full", "1-D"),
        Segment("e", 1007, 1000, "quantized"),
    ]
    kept = keep_small_runs_exact(segments, [spec], 4)
    assert [s.wire_format for s in kept] == ["quantized", "full", "full", "full", "quantized"]
    assert merge_over_small_gaps(segment_runs(kept)) == [Run(0, 2007, True, (Run(1000, 7, False),))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_parts_do_not_overlap_and_fill_the_message(dtype: torch.dtype) -> None:
    spec = CodecSpec(code="int4", group_size=16)
    absorbed = Run(50, 3, False)
    runs = [Run(0, 33, True), Run(33, 5, False), Run(40, 216, True, (absorbed,))]
    layout = MessageLayout(runs, [spec], dtype)
    assert layout.nbytes % 16 == 0
    assert layout.numel == 254
    assert layout.exact_runs == [Run(33, 5, False), absorbed]
    assert layout.gap_indices == [1]
    messages = layout.allocate(3, device=torch.device("cpu"))
    end = layout.codes_nbytes + 8 * dtype.itemsize
    assert not messages[:, end:].any()
    messages[:, :end] = 0
    for index in (0, 2):
        part = layout.part(messages, index)
        assert part.shape == (3, spec.nbytes(runs[index].numel))
        part.add_(1)
    exact = layout.exact(messages)
    assert exact.shape == (3, 8)
    assert exact.dtype == dtype
    assert exact.data_ptr() % 16 == messages.data_ptr() % 16
    exact.view(torch.uint8).add_(1)
    assert (messages[:, :end] == 1).all()
    assert not messages[:, end:].any()
    assert layout.nbytes - end < 16


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_exact_values_travel_beside_zeros(shape: tuple[int, ...]) -> None:
    runs = [Run(2, 3, False), Run(5, 30, True, (Run(8, 2, False), Run(20, 1, False)))]
    layout = MessageLayout(runs, [CodecSpec(code="int4", group_size=16)], torch.float32)
    slots = torch.arange(1.0, 41).repeat(*shape, 1)
    slots[..., 8] = float("nan")
    before, reference = slots.clone(), torch.full_like(slots, float("inf"))
    messages = layout.allocate(*shape, device=slots.device)
    layout.exact_to_messages(slots, messages, reference)
    exact, absorbed = [2, 3, 4, 8, 9, 20], [8, 9, 20]
    rest = [column for column in range(40) if column not in absorbed]
    torch.testing.assert_close(layout.exact(messages), before[..., exact], equal_nan=True)
    for values in (slots, reference):
        assert not values[..., absorbed].any()
    assert torch.equal(slots[..., rest], before[..., rest])
    assert reference[..., rest].isinf().all()

    target = torch.full_like(slots, -1)
    layout.exact_to_slots(messages, target)
    torch.testing.assert_close(target[..., exact], before[..., exact], equal_nan=True)
    assert (target[..., [c for c in range(40) if c not in exact]] == -1).all()
    torch.testing.assert_close(layout.read_exact(target), before[..., exact], equal_nan=True)


def test_ring_bytes_add_up() -> None:
    assert ring_bytes(10, Topology(world_size=4, rank=0, node_size=4)) == (30, 0)
    assert ring_bytes(10, Topology(world_size=4, rank=0, node_size=1)) == (0, 30)
    intra, inter = ring_bytes(10, Topology(world_size=8, rank=0, node_size=4))
    assert (intra, inter) == (60, 10)


def test_error_sums() -> None:
    sums = ErrorSums()
    assert sums.pop() == (0.0, 0.0)
    sums.add(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0]))
    sums.add(torch.tensor([0.0]), torch.tensor([2.0]))
    assert sums.pop() == (5.0, 9.0)
    assert sums.pop() == (0.0, 0.0)
