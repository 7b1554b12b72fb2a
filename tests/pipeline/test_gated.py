"""Boundaries in learned widths over gloo: both ends, their tables, and what they agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing import run_ranks
from lq_testing.pipeline_toys import BATCH, WIDTH, Boundary, make_gated, make_layers
from torch import Tensor

from lq_lightning.codecs.mixed import WidthTable, round_trip_mixed
from lq_lightning.pipeline.boundary_widths import BoundaryWidths
from lq_lightning.pipeline.engine import PipelineEngine
from lq_lightning.pipeline.message import Message
from lq_lightning.pipeline.mixed import MixedCodec

Key = tuple[int, bool, int]


class Recording(MixedCodec):
    """Keeps what goes in and what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.encoded: dict[Key, tuple[Tensor, WidthTable, Tensor]] = {}
        self.decoded: dict[Key, Tensor] = {}

    def encode(self, x: Tensor, message: Message) -> Tensor:
        payload = super().encode(x, message)
        table = self.table(message.boundary, WIDTH)
        key = (message.boundary, message.backward, message.microbatch)
        self.encoded[key] = (x.clone(), table, payload.clone())
        return payload

    def decode(
        self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, message: Message
    ) -> Tensor:
        values = super().decode(payload, shape, dtype, message)
        self.decoded[message.boundary, message.backward, message.microbatch] = values.clone()
        return values


def _pipeline(
    schedule: str, per_rank: int, group: dist.ProcessGroup, replicas: dist.ProcessGroup
) -> tuple[PipelineEngine, Recording, BoundaryWidths]:
    num_stages, codec = dist.get_world_size(group) * per_rank, Recording()
    layers = make_layers(num_stages)
    engine, gated = make_gated(schedule, 4, layers, num_stages, (codec, codec), group, replicas)
    return engine, codec, gated


def _table(boundary: int, step: int) -> WidthTable:
    generator = torch.Generator().manual_seed(10 * step + boundary)
    return WidthTable(torch.randint(1, 17, (WIDTH,), generator=generator))


def _start(lines: int) -> WidthTable:
    return WidthTable([8] * lines)


def _steps(rank: int, size: int, schedule: str, per_rank: int) -> Any:
    """What both ends have seen in three steps and an evaluation after each."""
    everyone, alone = dist.new_group(list(range(size))), None
    for each in range(size):
        group = dist.new_group([each])
        alone = group if each == rank else alone
    assert alone is not None
    engine, codec, gated = _pipeline(schedule, per_rank, everyone, alone)
    gated.begin(_start, {}, {})
    found = []
    for step in range(3):
        sent = engine.traffic.table_bytes
        if step:
            gated.exchange({each.index: _table(each.index, step) for each in gated.sent}, WIDTH)
        sent = engine.traffic.table_bytes - sent
        assert sent == (step > 0) * len(gated.sent) * WIDTH // 2
        for run in (engine.step, engine.evaluate):
            codec.encoded, codec.decoded = {}, {}
            run(Boundary())
            found.append((codec.encoded, codec.decoded))
    engine.close()
    return found, [each.index for each in gated.sent]


@pytest.mark.parametrize(
    ("schedule", "size", "per_rank", "sent"),
    [
        ("zbv", 2, 2, [[0], [2]]),
        ("interleaved_1f1b", 2, 2, [[0, 2], [1]]),
        ("1f1b", 4, 1, [[0], [1], [2], []]),
    ],
)
def test_both_ends_have_the_same_widths(
    schedule: str, size: int, per_rank: int, sent: list[list[int]]
) -> None:
    ranks = run_ranks(_steps, size, schedule, per_rank)
    assert [indices for _, indices in ranks] == sent
    boundaries = {index for indices in sent for index in indices}
    for run in range(6):
        encoded = {key: value for found, _ in ranks for key, value in found[run][0].items()}
        decoded = {key: value for found, _ in ranks for key, value in found[run][1].items()}
        ways = (False, True) if run % 2 == 0 else (False,)  # evaluation has no gradients
        keys = {(b, way, m) for b in boundaries for way in ways for m in range(4)}
        assert encoded.keys() == decoded.keys() == keys
        for (boundary, way, microbatch), (x, table, payload) in encoded.items():
            step = run // 2
            wanted = _table(boundary, step) if step else _start(WIDTH)
            assert table == wanted
            assert payload.numel() == wanted.nbytes(BATCH)
            values = decoded[boundary, way, microbatch]
            assert torch.equal(values, round_trip_mixed(x, wanted, "full" if way else "fitted"))


def _agree(rank: int, size: int) -> list[str]:
    """Two pipelines of two ranks: what is summed, averaged and gathered, and differences."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])]
    group, replicas = pairs[rank % 2], pairs[2 + rank // 2]
    _, codec, gated = _pipeline("interleaved_1f1b", 2, group, replicas)
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
