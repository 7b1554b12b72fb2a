"""Runs that continue from a checkpoint, on the same and on other numbers of ranks."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lq_testing.checkpoints import StateAtStart, fit, module, moments, strategy, weights
from lq_testing.lightning_models import PLAIN, SMALL, TinyModule, quiet, run_trainer
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

# single file?, precision, options of the strategy, of the module
EXACT = (
    (False, "bf16-mixed", SMALL, {}),
    (False, "32-true", {**SMALL, "replica": "node", "node_size": 1}, {"tied": True}),
    (True, "bf16-mixed", {**SMALL, "replica": "node", "node_size": 1}, {}),
    (True, "bf16-true", PLAIN, {}),
    (True, "32-true", {**SMALL, "node_size": 1}, {"tied": True}),
)


def _resume_exactly(rank: int, world_size: int, root: str) -> None:
    for index, (full, precision, options, model) in enumerate(EXACT):
        folder = f"{root}/{index}"
        saves = ModelCheckpoint(folder, every_n_epochs=1, save_top_k=-1, save_last="link")
        _, losses = fit(
            root,
            module(**model),
            strategy(full, **options),
            callbacks=[saves],
            max_epochs=2,
            enable_checkpointing=True,
            precision=precision,
        )
        first = str(next(Path(folder).glob("epoch=0*")))
        assert os.path.isdir(first) is not full
        other = TinyModule(lr=0.5, **model)  # everything must come from the checkpoint
        run, resumed = fit(
            root,
            other,
            strategy(full, **options),
            ckpt_path=first,
            max_epochs=2,
            precision=precision,
        )
        assert resumed == losses[4:], (full, precision)
        assert run.optimizers[0].param_groups[0]["lr"] == 1e-2
        if run.strategy.communication is not None:
            assert run.strategy.communication.step == 8
            assert run.strategy.communication.external_weight_updates == {}
        last = Path(folder, "last.ckpt")
        assert last.is_symlink()
        assert last.exists()


def _resume_elsewhere(rank: int, world_size: int, root: str) -> None:
    for full in (False, True):
        seen = StateAtStart()
        run, losses = fit(
            root,
            TinyModule(),
            strategy(full),
            devices=world_size,
            callbacks=[seen],
            ckpt_path=f"{root}/full{full}.ckpt",
            max_epochs=2,
        )
        expected, expected_moments = torch.load(f"{root}/expected{full}.pt")
        for name, value in expected.items():
            assert torch.equal(seen.weights[name], value), name
        assert all(torch.equal(a, b) for a, b in zip(seen.moments, expected_moments, strict=True))
        assert run.global_step == 4 + 8 // world_size
        assert losses[0] < 3.0


def test_checkpoints_of_two_ranks_resume_on_four_and_on_one(saved: Path) -> None:
    run_trainer(_resume_elsewhere, 4, str(saved))
    _resume_elsewhere(0, 1, str(saved))


class _HandSharded(TinyModule):
    def configure_model(self) -> None:
        for block in self.net.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])
        register_fsdp_forward_method(self, "training_step")


def _save_stock(rank: int, world_size: int, root: str) -> None:
    torch.manual_seed(0)
    model = _HandSharded()
    stock = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    run, _ = fit(root, model, stock)
    run.save_checkpoint(f"{root}/fullFalse.ckpt")
    expected = (weights(model), moments(run))
    if rank == 0:
        torch.save(expected, f"{root}/expectedFalse.pt")
    dist.barrier()
    for full in (False, True):  # also the file of one device
        seen = StateAtStart()
        path = f"{root}/full{full}.ckpt"
        fit(root, TinyModule(), strategy(), callbacks=[seen], ckpt_path=path, max_epochs=2)
        expected, expected_moments = torch.load(f"{root}/expected{full}.pt")
        assert all(torch.equal(seen.weights[name], value) for name, value in expected.items())
        assert all(torch.equal(a, b) for a, b in zip(seen.moments, expected_moments, strict=True))


def _on_two_ranks(rank: int, world_size: int, root: str) -> None:
    _save_stock(rank, world_size, root)
    _resume_exactly(rank, world_size, root)


def test_runs_and_checkpoints_of_stock_strategies_resume_on_two_ranks(tmp_path: Path) -> None:
    root = str(tmp_path)
    quiet()
    model = module()
    run, _ = fit(root, model, "auto", devices=1)  # 8 steps an epoch
    run.save_checkpoint(f"{root}/fullTrue.ckpt")
    torch.save((weights(model), moments(run)), f"{root}/expectedTrue.pt")
    run_trainer(_on_two_ranks, 2, root)


def test_full_checkpoint_needs_nothing_of_this_package(saved: Path) -> None:
    root = str(saved)
    path = f"{root}/fullTrue.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    expected, _ = torch.load(f"{root}/expectedTrue.pt")
    assert all(torch.equal(checkpoint["state_dict"][n], w) for n, w in expected.items())
    assert checkpoint["lq_lightning"]["communication"]["step"] == 4
    loaded = TinyModule.load_from_checkpoint(path)
    assert all(torch.equal(p, expected[n]) for n, p in loaded.named_parameters())
    quiet()
    run, _ = fit(root, TinyModule(), "auto", devices=1, ckpt_path=path, max_epochs=2)
    assert run.global_step == 12
