"""Pipelines over gloo: what ranks agree on, and steps that are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing import run_ranks
from lq_testing.pipeline_toys import Boundary, make_data, make_engine, make_layers, make_stages
from torch import Tensor

from lq_lightning.pipeline.boundary import TAHQuantization, make_boundary_codec
from lq_lightning.pipeline.engine import PipelineEngine, batch_digest, batch_signature
from lq_lightning.pipeline.execution import ProcessGroupLinks


def _engine(
    size: int, schedule: str, count: int, per_rank: int, codec: Any = "none"
) -> PipelineEngine:
    num_stages = size * per_rank
    return make_engine(
        *(schedule, count, make_layers(num_stages), num_stages),
        (make_boundary_codec(codec), make_boundary_codec(codec, backward=True)),
        dist.new_group(list(range(size))),
        dist.new_group(list(range(size)), backend="gloo"),
    )


def _steps(rank: int, size: int) -> list[tuple[list[float], dict[int, list[Tensor]]]]:
    results = []
    for schedule, count, per_rank in (("1f1b", 5, 1), ("zero_bubble", 4, 2), ("zbv", 4, 2)):
        engine = _engine(size, schedule, count, per_rank)
        batch = {"x": make_data(count), "names": ["a"]}
        with torch.inference_mode():
            engine.agree(batch, training=False)
            engine.evaluate(Boundary())
        for _ in range(2):
            engine.agree(batch, training=True, samples=torch.arange(4))
            boundary = engine.share(Boundary() if rank == 0 else None)
            losses = engine.step(boundary)
        gradients = {
            index: [p.grad for p in stage.module.parameters() if p.grad is not None]
            for index, stage in engine._stages.items()
        }
        engine.close()
        results.append(([loss.item() for loss in losses], gradients))
    return results


def test_steps_over_gloo_are_those_of_one_process() -> None:
    ranks = run_ranks(_steps, 2)
    for index, (count, layers) in enumerate([(5, 2), (4, 4), (4, 4)]):
        (whole,) = make_stages(make_layers(layers), 1, make_data(count))
        expected = []
        for microbatch in range(count):
            whole.index = microbatch
            loss = whole()
            (2 * loss).backward()
            expected.append(loss.item())
        found = {stage: g for rank in ranks for stage, g in rank[index][1].items()}
        assert [rank[index][0] for rank in ranks if rank[index][0]] == [expected]
        gradients = [gradient for stage in sorted(found) for gradient in found[stage]]
        for mine, parameter in zip(gradients, whole.parameters(), strict=True):
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-5, atol=1e-7)


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
    engine = _engine(size, "1f1b", 4, 1)
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
    for codec in ("int8" if odd else "int4", TAHQuantization(tile_size=32 if odd else 64)):
        with pytest.raises(RuntimeError, match="differ") as error:
            _engine(size, "1f1b", 4, 1, codec=codec)
        heard.append(str(error.value))
    return heard


def test_differences_raise_on_every_rank_with_the_values() -> None:
    ranks = run_ranks(_disagree, 3)
    assert ranks[0] == ranks[1] == ranks[2]
    shape, dtype, content, mode, count, samples, codecs, options = ranks[0]
    assert "batch: int64[4, 2] on ranks 0, 2, batch: int64[4, 1] on rank 1" in shape
    assert "float32[4, 2] on rank 1" in dtype
    assert "the digest of the batch is" in content
    assert "int64" not in content
    assert "the step is evaluation on ranks 0, 2, training on rank 1" in mode
    assert "micro-batches is 2 on ranks 0, 2, 3 on rank 1" in count
    assert "samples' identities" in samples
    assert "backward_codec is int4 on ranks 0, 2, int8 on rank 1; forward_codec is" in codecs
    assert "differ: options of backward_codec is TAHQuantization(" in options


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
