"""Models that only some of the ranks shard, such as the stages of a pipeline."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing import run_ranks
from lq_testing.devices import device
from lq_testing.fsdp2 import (
    QWD,
    TLQ_HS,
    UnitReduction,
    build,
    pretend_ranks,
    replicas,
    same_on_all_ranks,
    shard,
    train,
)
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from lq_lightning._compat.torch import group_timeout, inherit_timeout
from lq_lightning.data_parallel import QuantizedCommunication, Topology, quantize_communication

WIDTHS = ((32, 48, 16), (48, 24, 40, 16))  # of the layers of either stage: two units, three units
STEPS = (2, 3)


def _stage(
    mesh: DeviceMesh, stage: int, node_size: int
) -> tuple[nn.Module, QuantizedCommunication]:
    torch.manual_seed(stage)
    widths = WIDTHS[stage]
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)))
    layers = list(model.to(device()))
    return model, shard(model, layers, mesh, node_size, weights=QWD, gradients=TLQ_HS)


def _train_stage(mesh: DeviceMesh, stage: int, node_size: int) -> tuple[list[Tensor], list[Any]]:
    """Weights and traffic after a training whose length depends on the stage."""
    model, communication = _stage(mesh, stage, node_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    communication.register_optimizer(optimizer)
    generator = torch.Generator().manual_seed(mesh.get_local_rank())
    for _ in range(STEPS[stage]):
        x = torch.randn(4, WIDTHS[stage][0], generator=generator).to(device())
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert communication.check_replicas(on_drift="raise") == []
    assert communication.external_weight_updates == {}
    values = replicas(model)
    assert same_on_all_ranks(values, mesh.get_group())
    counted = communication.traffic()
    assert (counted.gradients_inter > 0) == (node_size == 1)
    assert (counted.gradients_intra > 0) == (node_size == 2)
    whole = [p.full_tensor().detach() for p in model.parameters()]
    return [t.cpu() for t in (*whole, *values)], [counted.sent, counted.baseline]


def _pipeline(rank: int, world: int) -> list[Any]:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("pp", "dp"))
    inherit_timeout(mesh)
    stage = mesh.get_local_rank("pp")
    found = [_train_stage(mesh["dp"], stage, node_size) for node_size in (1, 2)]
    if stage == 1:  # one that the other stage does not have
        model, communication = _stage(mesh["dp"], stage, 1)
        replicas(model)
        if mesh.get_local_rank("dp") == 1:
            gather: Any = communication._units[0].gather
            gather.replica.values[0] += 1.0
        assert communication.check_replicas() == ["0"]
        for group in communication._context.groups[1:]:
            timeout = group_timeout(group, device())
            assert timeout == group_timeout(dist.group.WORLD, device())
            assert timeout is not None
            assert timeout < timedelta(minutes=30)  # torch's own
            assert dist.get_backend(group) == dist.get_backend()
    return found


def _alone(rank: int, world: int) -> list[list[Any]]:
    mesh = init_device_mesh(device().type, (2,))
    return [[_train_stage(mesh, stage, node_size) for node_size in (1, 2)] for stage in (0, 1)]


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu(4))])
def test_a_stage_of_a_pipeline_trains_as_if_it_were_alone(backend: str) -> None:
    every = run_ranks(_pipeline, 4, backend=backend)
    for rank, alone in enumerate(run_ranks(_alone, 2, backend=backend)):
        for stage in (0, 1):
            for here, there in zip(every[2 * stage + rank], alone[stage], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(here[0], there[0], strict=True))
                assert here[1] == there[1], "bytes"


def test_stages_have_noise_of_their_own() -> None:
    seeds = set()
    for rank in (0, 1):
        pretend_ranks(2, rank)
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
        seeds.add(_stage(mesh["dp"], 0, 1)[1]._context.seed)
        dist.destroy_process_group()
    assert len(seeds) == 2


def _mesh_of_nodes(rank: int, world: int) -> None:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("node", "local"))
    assert Topology.of(mesh) == Topology(world_size=4, rank=rank, node_size=2)
    with pytest.raises(ValueError, match="node_size=4` contradicts the mesh"):
        Topology.of(mesh, node_size=4)
    options: dict[str, Any] = {"weights": QWD, "gradients": TLQ_HS}
    expected = train(*build(**options, node_size=2)[:2], 3)

    model, _, _ = build()
    made: list[QuantizedCommunication] = []
    for _ in range(2):  # as two stages on the same ranks
        made.append(
            quantize_communication(
                model, **options, topology=Topology.of(mesh), min_quantized_numel=256, seed=7
            )
        )
        context = made[-1]._context
        assert context.groups.intra is mesh.get_group("local")
        assert context.groups.inter is mesh.get_group("node")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    made[1].register_optimizer(optimizer)
    assert train(model, optimizer, 3) == expected

    swapped = DeviceMesh(device().type, [[0, 2], [1, 3]], mesh_dim_names=("node", "local"))
    error = r"has the ranks \[\[0, 2\], \[1, 3\]\], but the model is sharded over \[0, 1, 2, 3\]"
    if rank in (0, 3):  # the others notice their number first
        with pytest.raises(ValueError, match=error):
            quantize_communication(model, **options, topology=Topology.of(swapped))


def test_a_mesh_of_nodes_brings_its_groups() -> None:
    run_ranks(_mesh_of_nodes, 4)


def test_other_ranks_are_refused() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        Topology.of()
    pretend_ranks(2, rank=1)
    cube = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match="a mesh of 3 axes"):
        Topology.of(cube)
    with pytest.raises(ValueError, match="rank 1 does not belong to it"):
        Topology.of(DeviceMesh("cpu", [0]))
    with pytest.raises(ValueError, match=r"has the shape \(1, 2\).*need \(2, 1\)"):
        Topology(world_size=2, rank=1, node_size=1, mesh=cube["b", "c"])
    both = init_device_mesh("cpu", (2,))
    lonely = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[0], mesh=both)
    fully_shard(model[1], mesh=lonely)
    options: dict[str, Any] = {"weights": QWD, "gradients": None}
    with pytest.raises(ValueError, match=r"`0` .* \[0, 1\], but `1` over \[1\]"):
        quantize_communication(model, **options, topology=Topology.of(both))
    with pytest.raises(ValueError, match="this is number 1 of 2 ranks"):
        quantize_communication(model[0], **options, topology=Topology.of(lonely))
    assert quantize_communication(model[0], **options, topology=Topology.of()).group.size() == 2


@pytest.mark.parametrize("node_size", [1, 2, 4])
def test_fake_tensors_can_be_sharded_and_quantized(node_size: int) -> None:
    """As memory trackers do, which run a training without data."""
    pretend_ranks(4, rank=2)
    mesh = init_device_mesh("cpu", (4,))
    with FakeTensorMode():
        model = nn.Linear(64, 64, bias=False)
        communication = shard(model, (), mesh, node_size, gradients=TLQ_HS, min_quantized_numel=1)
        assert communication._context.groups.inter.size() == 4 // node_size
        model(torch.randn(2, 64)).sum().backward()
        assert communication.traffic().reductions == 1
    assert UnitReduction(communication).numel == 1024
