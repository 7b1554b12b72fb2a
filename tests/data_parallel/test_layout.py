from __future__ import annotations

import torch

from lq_lightning.codecs import CodecSpec
from lq_lightning.data_parallel.config import Topology
from lq_lightning.data_parallel.layout import MessageLayout, Run, Segment, segment_runs
from lq_lightning.data_parallel.traffic import ErrorSums, ring_bytes


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


def test_parts_do_not_overlap_and_fill_the_message() -> None:
    spec = CodecSpec(code="int4", group_size=16)
    runs = [Run(0, 33, True), Run(33, 5, False), Run(40, 16, True)]
    layout = MessageLayout.of(runs, spec, torch.float32)
    assert layout.nbytes % 16 == 0
    assert layout.numel == 54
    assert layout.quantized_numel == 49
    messages = torch.zeros(3, layout.nbytes, dtype=torch.uint8)
    for index in range(3):
        layout.part(messages, index).view(torch.uint8).add_(1)
    assert messages.max() == 1
    assert layout.part(messages, 1).shape == (3, 5)
    assert layout.part(messages, 1).dtype == torch.float32


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
