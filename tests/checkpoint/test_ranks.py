"""Checkpoints of ranks that hold different parts of a model, and errors that all ranks raise."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing import run_ranks
from lq_testing.damage import flip_bit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lq_lightning.checkpoint import state
from lq_lightning.checkpoint.consolidate import consolidate_checkpoint
from lq_lightning.checkpoint.files import incomplete_name
from lq_lightning.checkpoint.folder import ShardedCheckpoint, save_sharded_checkpoint
from lq_lightning.checkpoint.ranks import ALONE, RankGroup
from lq_lightning.checkpoint.single_file import AtomicCheckpointIO, load_full_checkpoint
from lq_lightning.foundation.agreement import broadcast_module_states

WORLD = RankGroup()


def _fails_on(rank: int, who: int, error: Exception) -> str:
    """What a rank raises when one fails."""

    def work() -> None:
        if rank == who:
            raise error

    with pytest.raises(type(error)) as raised:
        WORLD.together(work)
    return str(raised.value)


def _errors(rank: int) -> None:
    for error in (ValueError("a.ckpt"), FileNotFoundError("a.ckpt"), pickle.UnpicklingError("a")):
        text = _fails_on(rank, 2, error)
        assert text.startswith(str(error))
        assert ("(seen by rank 2)" in text) == (rank != 2)
    assert _fails_on(rank, 0, KeyError("a.ckpt")).startswith("'a.ckpt")

    class Unknown(RuntimeError):
        """Cannot travel: its class has no name elsewhere."""

    def work() -> int:
        if rank == 1:
            raise Unknown("no")
        return rank

    with pytest.raises(RuntimeError, match="no"):
        WORLD.together(work)
    assert WORLD.together(lambda: rank) == rank
    assert ALONE.together(lambda: rank) == rank
    assert (ALONE.size, ALONE.rank, ALONE.broadcast(rank)) == (1, 0, rank)


class _Stage(nn.Module):
    def __init__(self, index: int, mesh: Any, seed: int, size: int = 6) -> None:
        super().__init__()
        whole = torch.randn(size, 2, generator=torch.Generator().manual_seed(seed + index))
        self.register_parameter(
            f"w{index}", nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        )
        self.register_buffer("count", torch.tensor([float(index * 10 + dist.get_rank())]))


def _adam(stage: _Stage) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.25)
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def _stages(rank: int, root: str) -> None:
    """Two stages of two ranks each write one directory, and read it again."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    index, shards = mesh.get_local_rank("stage"), RankGroup(group=mesh["shard"].get_group())
    assert (shards.size, shards.rank, shards.is_first) == (2, rank % 2, rank % 2 == 0)
    assert shards.broadcast(rank) == index * 2
    assert shards.all_gather(rank) == [index * 2, index * 2 + 1]
    stage = _Stage(index, mesh["shard"], seed=0)
    broadcast_module_states(stage, parameters=False, group=shards.group)
    assert stage.count.item() == index * 10 + index * 2
    del stage.count  # one name on two stages
    optimizer = _adam(stage)
    named = state.optimizer_state_by_name(stage, optimizer)
    stored = {
        "state_dict": stage.state_dict(),
        "optimizer_0": state.merge_parameter_groups(named, WORLD),
    }
    if index == 1:
        stored["replica"] = {"w1": stage.w1.detach() * 2}
    path = Path(root, "a.ckpt")
    save_sharded_checkpoint(stored, {"step": 1}, path, WORLD)

    checkpoint = ShardedCheckpoint(path, ranks=WORLD)
    assert checkpoint.read_meta() == {"step": 1}
    other = _Stage(index, mesh["shard"], seed=5)
    del other.count
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    state.load_sharded_model(other, checkpoint, strict=True)
    state.load_sharded_optimizer(other, fresh, checkpoint, ("optimizer_0",), strict=True)
    name = f"w{index}"
    assert torch.equal(getattr(other, name).to_local(), getattr(stage, name).to_local())
    for key, value in optimizer.state_dict()["state"][0].items():
        loaded = fresh.state_dict()["state"][0][key]
        assert type(loaded) is type(value)
        local = [v.to_local() if isinstance(v, DTensor) else v for v in (loaded, value)]
        assert torch.equal(*local), key
    assert fresh.param_groups[0]["lr"] == 0.25
    replica = state.load_sharded_like(other, checkpoint, "replica")
    assert list(replica) == (["w1"] if index == 1 else [])

    # a misfit of one stage is raised by all ranks, and so is damage that one rank has found
    wrong = _Stage(index, mesh["shard"], seed=5, size=8 if index == 1 else 6)
    del wrong.count
    with pytest.raises(RuntimeError, match=r"`w1`: \(6, 2\) stored, \(8, 2\) in the model"):
        state.load_sharded_model(wrong, checkpoint, strict=True)
    dist.barrier()
    if rank == 0:
        flip_bit(path / "__3_0.distcp", 1000)
    dist.barrier()
    with pytest.raises(ValueError, match=r"a.ckpt` is damaged: __3_0.distcp holds other bytes"):
        ShardedCheckpoint(path, ranks=WORLD)
    if rank == 0:
        flip_bit(path / "__3_0.distcp", 1000)

    # one stage alone: no other rank takes part
    if index == 0:
        own = Path(root, "stage.ckpt")
        save_sharded_checkpoint({"state_dict": stage.state_dict()}, {}, own, shards)
        state.load_sharded_model(other, ShardedCheckpoint(own, ranks=shards), strict=True)
    assert all(WORLD.all_gather(True))


def _writes_fail(rank: int, root: str) -> None:
    path = Path(root, "full.ckpt")
    value = _Unwritable() if rank == 1 else 1
    with pytest.raises(RuntimeError, match=r"rank 1 could not write .*full.ckpt`.*no space"):
        save_sharded_checkpoint({f"a{rank}": value}, {}, path, WORLD)
    with pytest.raises(RuntimeError, match=r"rank 0 could not write .*full.ckpt`.*no space"):
        save_sharded_checkpoint({"a": 1}, {"b": _Unwritable()}, path, WORLD)
    dist.barrier()
    assert not path.exists()
    assert not incomplete_name(path).exists()


class _Unwritable:
    def __reduce__(self) -> Any:
        raise OSError("no space")


def _share_a_file(rank: int, root: str) -> None:
    """Each rank looks at some records; all raise what one finds."""
    path = Path(root, "one.ckpt")
    if rank == 0:
        tensors = {f"w{i}": torch.full((4, 64), float(i + 1)) for i in range(6)}
        AtomicCheckpointIO().save_checkpoint({"state_dict": tensors}, path)
        damaged = path.read_bytes().index(torch.full((8,), 5.0).numpy().tobytes())
        flip_bit(path, damaged + 8)
    dist.barrier()
    with pytest.raises(ValueError, match=r"one.ckpt` is damaged: record archive/data/4"):
        load_full_checkpoint(path, None, WORLD)
    dist.barrier()
    with pytest.raises(FileNotFoundError, match=r"absent"):
        load_full_checkpoint(path if rank == 3 else path.parent / "absent", None, WORLD)


def _on_four_ranks(rank: int, world_size: int, root: str) -> None:
    _errors(rank)
    _stages(rank, root)
    _writes_fail(rank, root)
    _share_a_file(rank, root)


def test_groups_of_ranks(tmp_path: Path) -> None:
    run_ranks(_on_four_ranks, 4, str(tmp_path))
    consolidate_checkpoint(tmp_path / "a.ckpt", tmp_path / "out.ckpt")
    whole = torch.load(tmp_path / "out.ckpt", weights_only=True)
    assert {n: tuple(w.shape) for n, w in whole["state_dict"].items()} == {
        "w0": (6, 2),
        "w1": (6, 2),
    }
    optimizer = whole["optimizer_states"][0]
    assert optimizer["param_groups"][0]["params"] == [0, 1]
    assert optimizer["state"].keys() == {0, 1}


def test_groups_with_other_hyperparameters_stay_apart() -> None:
    class _Ranks(RankGroup):
        def all_gather(self, value: Any) -> Any:
            other = [{"lr": 1.0, "params": ["c"]}, {"lr": 9.0, "params": ["d"]}]
            return [value, other]

    groups = [{"lr": 1.0, "params": ["a"]}, {"lr": 2.0, "params": ["b"]}]
    merged = state.merge_parameter_groups({"state": {}, "param_groups": groups}, _Ranks())
    assert merged["param_groups"] == [
        {"lr": 1.0, "params": ["a", "c"]},
        {"lr": 2.0, "params": ["b"]},
        {"lr": 9.0, "params": ["d"]},
    ]
    assert groups[0]["params"] == ["a"]
