"""Boundaries in learned widths over gloo: what a pipeline sums, gathers and agrees on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from lq_testing import run_ranks
from lq_testing.pipeline_toys import WIDTH, make_gated, make_layers

from lq_lightning.codecs.mixed import WidthTable
from lq_lightning.pipeline.boundary_widths import BoundaryWidths, MixedCodec


def _pipeline(
    schedule: str, per_rank: int, group: dist.ProcessGroup, replicas: dist.ProcessGroup
) -> tuple[MixedCodec, BoundaryWidths]:
    num_stages, codec = dist.get_world_size(group) * per_rank, MixedCodec()
    layers = make_layers(num_stages)
    _, gated = make_gated(schedule, 4, layers, num_stages, (codec, codec), group, replicas)
    return codec, gated


def _table(boundary: int, step: int) -> WidthTable:
    generator = torch.Generator().manual_seed(10 * step + boundary)
    return WidthTable(torch.randint(1, 17, (WIDTH,), generator=generator))


def _start(lines: int) -> WidthTable:
    return WidthTable([8] * lines)


def _agree(rank: int, size: int) -> list[str]:
    """Two pipelines of two ranks: what is summed, averaged and gathered, and differences."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])]
    group, replicas = pairs[rank % 2], pairs[2 + rank // 2]
    codec, gated = _pipeline("interleaved_1f1b", 2, group, replicas)
    place = rank // 2
    total = gated.total(torch.tensor([float(rank), 1.0]))
    assert total.tolist() == [2.0 + 2 * (rank % 2), 2.0]
    gradients = torch.tensor([[float(rank), 10.0 * rank]])
    mean = 0.5 + 2 * place
    assert gated.average(gradients).tolist() == [[mean, 10 * mean]]
    assert gradients.tolist() == [[rank, 10 * rank]]
    assert gated.average(torch.zeros(2, 0)).shape == (2, 0)
    part = {each.name: torch.tensor([rank, each.index]) for each in reversed(gated.sent)}
    joined = gated.gather(part)
    assert list(joined) == ["layer 0", "layer 1", "layer 2"]
    senders = [rank % 2, 2 + rank % 2, rank % 2]
    assert [joined[name].tolist() for name in joined] == [
        [sender, index] for index, sender in enumerate(senders)
    ]
    heard = []
    tables = {0: _table(0, 1)}
    gated.begin(_start, tables, {"target": "4"})
    assert dict(codec.tables) == tables  # on all ranks, whoever sends
    for given, target in (({0: _table(0, 1 + place)}, 4), (tables, 4 - place)):
        with pytest.raises(RuntimeError) as caught:
            gated.begin(_start, given, {"target": str(target)})
        heard.append(str(caught.value))
    return heard


def test_what_a_pipeline_agrees_on() -> None:
    for table, target in run_ranks(_agree, 4):
        assert "the digest of the widths of boundary 0 is" in table
        assert "target is 4 on rank 0, 3 on rank 1" in target
        assert target.endswith("Give all ranks the same options and the same checkpoint.")
