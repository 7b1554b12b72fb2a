"""Pipelines over gloo: links of their own, and agreement between ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing import run_ranks
from lq_testing.pipeline_toys import Boundary, make_engine, make_gated, make_layers

from lq_lightning.codecs import CodecSpec
from lq_lightning.codecs.mixed import WidthTable
from lq_lightning.pipeline.boundary import make_boundary_codec
from lq_lightning.pipeline.boundary_widths import BoundaryWidths, MixedCodec
from lq_lightning.pipeline.engine import PipelineEngine, batch_digest, batch_signature
from lq_lightning.pipeline.execution import ProcessGroupLinks


def _engine(size: int, codec: Any = "none") -> PipelineEngine:
    codecs = (make_boundary_codec(codec), make_boundary_codec(codec, backward=True))
    return make_engine("1f1b", 4, make_layers(size), size, codecs, _world(size), _world(size))


def _ways_of_their_own(rank: int, size: int) -> list[tuple[int, int]]:
    ways = [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2), (0, 3)]
    links = ProcessGroupLinks(_world(size), torch.device("cpu"), ways, own_groups=True)
    mine = [way for way in ways if rank in way]
    groups = {way: links._groups[way] for way in mine}
    assert set(links._groups) == set(mine)
    assert len({id(group) for group in groups.values()}) == len(mine)
    for way, group in groups.items():
        assert dist.get_process_group_ranks(group) == sorted(way)
    # Everything at once, each way in its own order.
    received = {way: torch.empty(2, dtype=torch.uint8) for way in mine if way[1] == rank}
    works = [links.receive(buffer, way[0]) for way, buffer in received.items()]
    for way in reversed(mine):
        if way[0] == rank:
            works.append(links.send(torch.tensor(way, dtype=torch.uint8), way[1]))
    for work in works:
        work.wait()
    return [tuple(buffer.tolist()) for buffer in received.values()]


def test_each_way_can_have_a_group_of_its_own() -> None:
    received = run_ranks(_ways_of_their_own, 4)
    assert received == [[(1, 0)], [(0, 1), (2, 1)], [(1, 2), (3, 2)], [(2, 3), (0, 3)]]


def _world(size: int) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(list(range(size)))
    return group


def _disagree(rank: int, size: int) -> list[str]:
    engine = _engine(size)
    data = torch.arange(8).view(4, 2)
    odd = rank == 1
    calls: list[dict[str, Any]] = [
        {"batch": data[:, :1] if odd else data, "training": True},
        {"batch": data.float() if odd else data, "training": True},
        {"batch": data + odd, "training": True},
        {"batch": data, "training": odd},
        {"batch": data, "training": True, "num_microbatches": 3 if odd else 2},
        {"batch": data, "training": True, "samples": torch.arange(4) + odd},
    ]
    heard = []
    for call in calls:
        with pytest.raises(RuntimeError, match="ranks of one pipeline differ") as error:
            engine.agree(**call)
        heard.append(str(error.value))
    engine.agree(data, training=True)  # and nobody is left behind
    spec = CodecSpec(code="int4", group_size=32 if odd else 64, rounding="stochastic")
    for codec in ("int8" if odd else "int4", spec):
        with pytest.raises(RuntimeError, match="differ") as error:
            _engine(size, codec)
        heard.append(str(error.value))
    codecs, group = (MixedCodec(), MixedCodec()), _world(size)
    _, widths = make_gated("1f1b", 4, make_layers(size), size, codecs, group, group)
    _check_joined(rank, widths)
    with pytest.raises(RuntimeError, match="differ") as error:
        widths.begin(lambda channels: WidthTable([8]), {0: WidthTable([4 + odd])}, {})
    return [*heard, str(error.value)]


def _check_joined(rank: int, widths: BoundaryWidths) -> None:
    """All three ranks are those of the pipeline, and those with the same stages."""
    gradients = torch.tensor([float(rank), 10.0 * rank])
    assert widths.average(gradients).tolist() == [1.0, 10.0]
    assert widths.total(gradients).tolist() == [3.0, 30.0]
    assert gradients.tolist() == [rank, 10 * rank]
    assert widths.average(torch.zeros(2, 0)).shape == (2, 0)
    joined = widths.gather({each.name: (rank, each.index) for each in widths.sent})
    assert list(joined.items()) == [("layer 0", (0, 0)), ("layer 1", (1, 1))]


def test_differences_raise_on_every_rank_with_the_values() -> None:
    ranks = run_ranks(_disagree, 3)
    assert ranks[0] == ranks[1] == ranks[2]
    shape, dtype, content, mode, count, samples, codecs, options, widths = ranks[0]
    assert "batch: int64[4, 2] on ranks 0, 2, batch: int64[4, 1] on rank 1" in shape
    assert "float32[4, 2] on rank 1" in dtype
    assert "the digest of the batch is" in content
    assert "int64" not in content
    assert "the step is evaluation on ranks 0, 2, training on rank 1" in mode
    assert "micro-batches is 2 on ranks 0, 2, 3 on rank 1" in count
    assert "samples' identities" in samples
    assert "backward_codec is int4 on ranks 0, 2, int8 on rank 1; forward_codec is" in codecs
    assert "differ: options of backward_codec is CodecSpec(" in options
    assert "the digest of the widths of boundary 0 is" in widths


def test_signatures_and_digests_tell_batches_apart() -> None:
    batch = {"x": torch.zeros(2, 3), "y": (torch.ones(2, dtype=torch.bool), "text", None)}
    assert batch_signature(batch) == (
        "batch['x']: float32[2, 3]; batch['y'][0]: bool[2]; batch['y'][1]: str; "
        "batch['y'][2]: NoneType"
    )
    other = {"x": torch.zeros(2, 3), "y": (torch.ones(2, dtype=torch.bool), "texts", None)}
    assert batch_signature(other) == batch_signature(batch)
    assert batch_digest(other) != batch_digest(batch)
    assert batch_signature(Boundary((2, 3))).startswith("batch.shape[0]: int; batch.shape[1]: int")
    assert batch_digest(Boundary((2, 3))) != batch_digest(Boundary((3, 2)))
    strided = torch.arange(6).view(2, 3)
    assert batch_digest([strided.t().contiguous().t()]) == batch_digest([strided])
    assert batch_digest([torch.tensor(1.0)]) != batch_digest([torch.tensor(2.0)])
    assert batch_digest([torch.zeros(0)]) == batch_digest([])
