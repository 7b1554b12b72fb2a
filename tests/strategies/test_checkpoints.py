"""Saving, resuming, consolidating; item numbers as in `test_training.py`."""

from __future__ import annotations

import functools
import os
import pickle
import shutil
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.tuner import Tuner
from lq_testing import RankError, run_ranks
from lq_testing.lightning_models import Losses, TinyModule, loader, quiet, trainer
from lq_testing.models import LoRABlock
from torch import Tensor
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from lq_lightning import QuantizedFSDPStrategy
from lq_lightning.checkpoint.consolidate import consolidate_checkpoint, main
from lq_lightning.checkpoint.folder import ShardedCheckpoint
from lq_lightning.checkpoint.single_file import (
    AtomicCheckpointIO,
    load_full_checkpoint,
)
from lq_lightning.data_parallel import GradientQuantization

PLAIN = {"weights": "none", "gradients": "none"}
SMALL = {"min_quantized_numel": 64}
FEEDBACK = GradientQuantization(rounding="nearest", error_feedback=True)

run_trainer = functools.partial(run_ranks, backend=None, torchrun=True, timeout=120.0)


def _strategy(full: bool = False, **options: Any) -> QuantizedFSDPStrategy:
    return QuantizedFSDPStrategy(**{**SMALL, **options}, save_distributed_checkpoint=not full)


def _module(**options: Any) -> TinyModule:
    torch.manual_seed(0)
    return TinyModule(**options)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _weights(module: pl.LightningModule) -> dict[str, Tensor]:
    return {n: _whole(p).detach().clone() for n, p in module.named_parameters()}


def _moments(run: pl.Trainer) -> list[Tensor]:
    states = run.optimizers[0].state.values()
    return [_whole(v).clone() for state in states for v in state.values()]


def _fit(root: str, module: TinyModule, strategy: Any, **options: Any) -> tuple[Any, list[float]]:
    losses = Losses()
    fit = {"ckpt_path": options.pop("ckpt_path", None)}
    if "weights_only" in options:
        fit["weights_only"] = options.pop("weights_only")
    run = trainer(strategy, root, callbacks=[losses, *options.pop("callbacks", [])], **options)
    run.fit(module, loader(), **fit)
    return run, losses.values


# --- exact resume on the same world size --------------------------------------------------------


def _resume_exactly(rank: int, world_size: int, root: str) -> None:
    for full in (False, True):
        for index, (precision, options) in enumerate(
            (
                ("bf16-mixed", SMALL),
                ("32-true", {**SMALL, "replica": "node", "node_size": 1}),
                ("bf16-true", PLAIN),
                ("32-true", {**SMALL, "gradients": FEEDBACK, "node_size": 1}),
            )
        ):
            folder = f"{root}/{full}-{index}"
            saves = ModelCheckpoint(folder, every_n_epochs=1, save_top_k=-1, save_last="link")
            _, losses = _fit(
                root,
                _module(),
                _strategy(full, **options),
                callbacks=[saves],
                max_epochs=2,
                enable_checkpointing=True,
                precision=precision,
            )
            first = str(next(Path(folder).glob("epoch=0*")))
            assert os.path.isdir(first) is not full
            other = TinyModule(lr=0.5)  # everything must come from the checkpoint
            run, resumed = _fit(
                root,
                other,
                _strategy(full, **options),
                ckpt_path=first,
                max_epochs=2,
                precision=precision,
            )
            assert resumed == losses[4:]
            assert run.optimizers[0].param_groups[0]["lr"] == 1e-2
            if run.strategy.communication is not None:
                assert run.strategy.communication.step == 8
            last = Path(folder, "last.ckpt")
            assert last.is_symlink()
            assert last.exists()


def test_resume_is_bit_exact_on_the_same_world_size(tmp_path: Path) -> None:
    run_trainer(_resume_exactly, 2, str(tmp_path))


def _resume_tied(rank: int, world_size: int, root: str) -> None:
    for full in (False, True):
        saves = ModelCheckpoint(f"{root}/{full}", every_n_epochs=1, save_top_k=-1)
        options = {"callbacks": [saves], "max_epochs": 2, "enable_checkpointing": True}
        _, losses = _fit(root, _module(tied=True), _strategy(full), **options)
        path = str(next(Path(f"{root}/{full}").glob("epoch=0*")))
        other = TinyModule(tied=True)
        run, resumed = _fit(root, other, _strategy(full), ckpt_path=path, max_epochs=2)
        assert resumed == losses[4:]
        assert run.strategy.communication.outside_writes == {}


def test_tied_weights_resume_with_their_replica(tmp_path: Path) -> None:
    run_trainer(_resume_tied, 2, str(tmp_path))


# --- other world sizes, other strategies --------------------------------------------------------


def _save_both(rank: int, world_size: int, root: str) -> None:
    for full in (False, True):
        module = _module()
        run, _ = _fit(root, module, _strategy(full))
        run.save_checkpoint(f"{root}/full{full}.ckpt")
        weights, moments = _weights(module), _moments(run)
        if rank == 0:
            torch.save((weights, moments), f"{root}/expected{full}.pt")
        dist.barrier()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`fullTrue.ckpt` (a file), `fullFalse.ckpt` (a directory), and what they must hold."""
    folder: Path = tmp_path_factory.mktemp("saved")
    run_trainer(_save_both, 2, str(folder))
    return folder


class _StateAtStart(pl.Callback):
    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.moments: list[Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights, self.moments = _weights(pl_module), _moments(trainer)


def _resume_elsewhere(rank: int, world_size: int, root: str) -> None:
    for full in (False, True):
        seen = _StateAtStart()
        run, losses = _fit(
            root,
            TinyModule(),
            _strategy(full),
            devices=world_size,
            callbacks=[seen],
            ckpt_path=f"{root}/full{full}.ckpt",
            max_epochs=2,
        )
        weights, moments = torch.load(f"{root}/expected{full}.pt")
        for name, value in weights.items():
            assert torch.equal(seen.weights[name], value), name
        assert all(torch.equal(a, b) for a, b in zip(seen.moments, moments, strict=True))
        assert run.global_step == 4 + 8 // world_size
        assert losses[0] < 3.0


def test_resume_on_1_2_and_4_ranks(saved: Path) -> None:
    run_trainer(_resume_elsewhere, 4, str(saved))
    run_trainer(_resume_elsewhere, 1, str(saved))


def _stock_single(root: str) -> None:
    module = _module()
    run, _ = _fit(root, module, "auto", devices=1)
    run.save_checkpoint(f"{root}/fullTrue.ckpt")
    torch.save((_weights(module), _moments(run)), f"{root}/expectedTrue.pt")


class _HandSharded(TinyModule):
    def configure_model(self) -> None:
        for block in self.net.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])
        register_fsdp_forward_method(self, "training_step")


def _stock_sharded(rank: int, world_size: int, root: str) -> None:
    torch.manual_seed(0)
    module = _HandSharded()
    stock = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    run, _ = _fit(root, module, stock)
    run.save_checkpoint(f"{root}/fullFalse.ckpt")
    expected = (_weights(module), _moments(run))
    if rank == 0:
        torch.save(expected, f"{root}/expectedFalse.pt")
    dist.barrier()


def test_checkpoints_of_stock_strategies_load(tmp_path: Path) -> None:
    """A file of one device and a directory of ModelParallelStrategy continue on two ranks."""
    root = str(tmp_path)
    run_trainer(_stock_sharded, 2, root)
    quiet()
    _stock_single(root)
    # the single-device run took 8 steps an epoch
    run_trainer(_resume_stock, 2, root)


def _resume_stock(rank: int, world_size: int, root: str) -> None:
    for full in (False, True):
        seen = _StateAtStart()
        path = f"{root}/full{full}.ckpt"
        _fit(root, TinyModule(), _strategy(), callbacks=[seen], ckpt_path=path, max_epochs=2)
        weights, moments = torch.load(f"{root}/expected{full}.pt")
        assert all(torch.equal(seen.weights[name], value) for name, value in weights.items())
        assert all(torch.equal(a, b) for a, b in zip(seen.moments, moments, strict=True))


def test_full_checkpoint_needs_nothing_of_this_package(saved: Path) -> None:
    root = str(saved)
    path = f"{root}/fullTrue.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    weights, _ = torch.load(f"{root}/expectedTrue.pt")
    assert all(torch.equal(checkpoint["state_dict"][n], w) for n, w in weights.items())
    assert checkpoint["lq_lightning"]["communication"]["step"] == 4
    loaded = TinyModule.load_from_checkpoint(path)
    assert all(torch.equal(p, weights[n]) for n, p in loaded.named_parameters())
    quiet()
    run, _ = _fit(root, TinyModule(), "auto", devices=1, ckpt_path=path, max_epochs=2)
    assert run.global_step == 12


# --- items 7 to 10 ------------------------------------------------------------------------------


class _Note:
    """Something that `weights_only=True` refuses."""


class _WithNote(TinyModule):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = _Note()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert type(checkpoint["note"]).__name__ == "_Note"


class _AdapterOnly(TinyModule):
    """Saves and loads only what is trained, the usual way for adapters."""

    def __init__(self) -> None:
        super().__init__(block=LoRABlock)
        self.strict_loading = False

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if "lora" in name}


def _items_7_to_10(rank: int, world_size: int, root: str) -> None:
    for full in (False, True):
        folder = f"{root}/{full}"
        # item 7: weights_only of the user arrives, the default explains itself
        run, _ = _fit(root, _WithNote(), _strategy(full))
        run.save_checkpoint(f"{folder}/note.ckpt")
        path = f"{folder}/note.ckpt"
        with pytest.raises(pickle.UnpicklingError, match=r"`weights_only=False` to `trainer.fit`"):
            _fit(root, _WithNote(), _strategy(full), ckpt_path=path, max_epochs=2)
        run, _ = _fit(
            root, _WithNote(), _strategy(full), ckpt_path=path, weights_only=False, max_epochs=2
        )
        assert run.global_step == 8
        # item 8: test and validate a weights-only checkpoint after fit
        module = _module()
        saves = ModelCheckpoint(folder, save_weights_only=True, filename="weights")
        run, _ = _fit(root, module, _strategy(full), callbacks=[saves], enable_checkpointing=True)
        trained = _weights(module)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        assert run.test(ckpt_path="best", dataloaders=loader(8), verbose=False)[0]["val"] < 3.0
        assert all(torch.equal(trained[n], w) for n, w in _weights(module).items())
        with pytest.raises(KeyError, match="contains only the model"):
            _fit(root, _module(), _strategy(full), ckpt_path=f"{folder}/weights.ckpt")
        # item 9: an optimizer without state
        run, _ = _fit(root, _module(optimizer="sgd"), _strategy(full))
        run.save_checkpoint(f"{folder}/sgd.ckpt")
        run, losses = _fit(
            root,
            TinyModule(optimizer="sgd"),
            _strategy(full),
            ckpt_path=f"{folder}/sgd.ckpt",
            max_epochs=2,
        )
        assert run.global_step == 8
        # item 10: strict_loading=False; strict errors name the keys
        adapters = _AdapterOnly()
        run, _ = _fit(root, adapters, _strategy(full))
        run.save_checkpoint(f"{folder}/adapters.ckpt")
        trained = _weights(adapters)
        other = _AdapterOnly()
        run.test(other, loader(8), ckpt_path=f"{folder}/adapters.ckpt", verbose=False)
        loaded = _weights(other)
        assert all(torch.equal(loaded[n], w) for n, w in trained.items() if "lora" in n)
        assert not torch.equal(loaded["net.embed.weight"], trained["net.embed.weight"])
        with pytest.raises(RuntimeError, match=r"(?s)net.embed.weight"):
            run.test(TinyModule(block=LoRABlock), loader(8), ckpt_path=f"{folder}/adapters.ckpt")
        with pytest.raises(RuntimeError, match="blocks.2"):
            run.test(TinyModule(layers=3), loader(8), ckpt_path=f"{folder}/sgd.ckpt")


def test_items_7_8_9_10(tmp_path: Path) -> None:
    run_trainer(_items_7_to_10, 2, str(tmp_path))


# --- CheckpointIO, LR finder --------------------------------------------------------------------


class _CountingIO(TorchCheckpointIO):
    def __init__(self) -> None:
        self.saved = self.loaded = 0

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.saved += 1
        super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        self.loaded += 1
        return super().load_checkpoint(*args, **kwargs)


def _checkpoint_io(rank: int, world_size: int, root: str) -> None:
    custom = _CountingIO()
    run, _ = _fit(root, _module(), _strategy(full=True), plugins=[custom])
    run.save_checkpoint(f"{root}/custom.ckpt")
    assert custom.saved == (rank == 0)
    run.test(_module(), loader(8), ckpt_path=f"{root}/custom.ckpt", verbose=False)
    assert custom.loaded == 1
    with pytest.raises(ValueError, match="`_CountingIO` is not used for sharded checkpoints"):
        _fit(root, _module(), _strategy(), plugins=[_CountingIO()])
    saves = ModelCheckpoint(f"{root}/async", save_last=True)
    _fit(
        root,
        _module(),
        _strategy(full=True),
        plugins=[AsyncCheckpointIO()],
        callbacks=[saves],
        enable_checkpointing=True,
    )
    dist.barrier()  # `teardown` on rank 0 has waited for the thread
    assert torch.load(f"{root}/async/last.ckpt", weights_only=True)["global_step"] == 4
    run, _ = _fit(root, _module(), _strategy())
    with pytest.raises(ValueError, match="file system that all ranks see"):
        run.save_checkpoint("memory://x.ckpt")
    with pytest.raises(RuntimeError, match="rank 0 could not write"):
        run.save_checkpoint("/dev/null/impossible.ckpt")
    # item 12: the learning rate finder
    module = _module()
    before = _weights(module)
    run = trainer(_strategy(), root)
    found = Tuner(run).lr_find(module, loader(64), num_training=5, update_attr=False)
    assert len(found.results["lr"]) >= 5
    assert all(torch.equal(before[n], w) for n, w in _weights(module).items())


def test_item_12_checkpoint_io_and_learning_rate_finder(tmp_path: Path) -> None:
    run_trainer(_checkpoint_io, 2, str(tmp_path))


# --- killed while saving ------------------------------------------------------------------------


def _killed_while_saving(rank: int, world_size: int, root: str, full: bool) -> None:
    from lq_lightning.checkpoint import files, folder

    run, _ = _fit(root, _module(), _strategy(full, **PLAIN))
    run.save_checkpoint(f"{root}/last.ckpt")
    dist.barrier()
    if rank == 0:  # right before the name is given

        def die(*args: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        files.move_into_place = folder.move_into_place = die  # type: ignore[assignment]
    run.fit_loop.max_epochs = 2
    run.fit(run.lightning_module, loader())
    run.save_checkpoint(f"{root}/last.ckpt")


@pytest.mark.parametrize("full", [False, True])
def test_a_run_killed_while_saving_leaves_the_previous_checkpoint(
    tmp_path: Path, full: bool
) -> None:
    with pytest.raises(RankError, match="SIGKILL"):
        run_trainer(_killed_while_saving, 2, str(tmp_path), full)
    names = [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")]
    assert names == ["last.ckpt"]
    path = tmp_path / "last.ckpt"
    if full:
        assert load_full_checkpoint(path, None)["global_step"] == 4
    else:
        assert ShardedCheckpoint(path).read_meta()["global_step"] == 4
    assert len(list(tmp_path.iterdir())) == 2  # and one hidden leftover, reused by the next save


def test_incomplete_checkpoints_are_refused(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    full, sharded = tmp_path / "fullTrue.ckpt", tmp_path / "fullFalse.ckpt"
    content = full.read_bytes()
    full.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="no complete checkpoint file"):
        load_full_checkpoint(full, None)
    shard = next(sharded.glob("__1_*"))
    data = shard.read_bytes()
    shard.write_bytes(data[:100])
    with pytest.raises(ValueError, match=r"__1_0.distcp is 100 of at least \d+ bytes long"):
        ShardedCheckpoint(sharded)
    shard.unlink()
    with pytest.raises(ValueError, match="__1_0.distcp is missing"):
        ShardedCheckpoint(sharded)
    (sharded / "meta.pt").unlink()
    with pytest.raises(ValueError, match="meta.pt missing"):
        ShardedCheckpoint(sharded)
    with pytest.raises(FileNotFoundError, match="absent"):
        ShardedCheckpoint(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="absent"):
        load_full_checkpoint(tmp_path / "absent", None)


def test_atomic_checkpoint_io(tmp_path: Path) -> None:
    io, path = AtomicCheckpointIO(), tmp_path / "sub" / "a.ckpt"
    io.save_checkpoint({"x": 1}, path)
    assert io.load_checkpoint(path) == {"x": 1}
    path.unlink()
    path.mkdir()  # a directory of that name is replaced
    (path / "old").touch()
    io.save_checkpoint({"x": 2}, path)
    assert io.load_checkpoint(path) == {"x": 2}
    link = tmp_path / "sub" / "last.ckpt"
    link.symlink_to("a.ckpt")
    io.save_checkpoint({"x": 3}, link)  # the link is replaced, not what it points to
    assert io.load_checkpoint(path) == {"x": 2}
    folder = tmp_path / "sub" / "dir.ckpt"
    folder.mkdir()
    (folder / "shard").touch()
    io.remove_checkpoint(folder)
    io.remove_checkpoint(link)
    assert [p.name for p in (tmp_path / "sub").iterdir()] == ["a.ckpt"]

    class Unpicklable:
        def __reduce__(self) -> Any:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        io.save_checkpoint({"x": Unpicklable()}, path)
    assert io.load_checkpoint(path) == {"x": 2}


# --- item 11: consolidation ---------------------------------------------------------------------


def test_item_11_consolidation(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(tmp_path)
    sharded = saved / "fullFalse.ckpt"
    weights, _ = torch.load(saved / "expectedFalse.pt")
    one = tmp_path / "one.ckpt"
    main([str(sharded), str(one)])
    loaded = TinyModule.load_from_checkpoint(one)
    assert all(torch.equal(p, weights[n]) for n, p in loaded.named_parameters())
    checkpoint = torch.load(one, weights_only=True)
    direct = torch.load(saved / "fullTrue.ckpt", weights_only=True)
    assert checkpoint["optimizer_states"][0].keys() == direct["optimizer_states"][0].keys()
    assert checkpoint["lq_lightning"]["tensors"].keys() == weights.keys()
    quiet()
    run, _ = _fit(root, TinyModule(), "auto", devices=1, ckpt_path=str(one), max_epochs=2)
    assert run.global_step == 12

    load_file = pytest.importorskip("safetensors.torch").load_file
    out = tmp_path / "model.safetensors"
    main([str(sharded), str(out), "--format", "safetensors", "--prefix", "net."])
    assert all(torch.equal(t, weights[f"net.{n}"]) for n, t in load_file(out).items())
    loaded.net.load_state_dict(load_file(out))
    consolidate_checkpoint(one, tmp_path / "b.safetensors", "safetensors")
    assert load_file(tmp_path / "b.safetensors").keys() == weights.keys()
    for arguments, message in (
        (["absent", "x"], "Checkpoint file not found"),
        ([str(sharded), str(sharded)], "choose another name"),
        ([str(sharded), "x", "--prefix", "net."], "format='safetensors'` only"),
        ([str(sharded), "x", "--format", "safetensors", "--prefix", "m."], r"start with ['net.']"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="format='zip'"):
        consolidate_checkpoint(one, "x", "zip")  # type: ignore[arg-type]


def test_safetensors_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    torch.save({"state_dict": {"a": torch.ones(1)}}, tmp_path / "a.ckpt")
    with pytest.raises(ModuleNotFoundError, match="pip install safetensors"):
        consolidate_checkpoint(tmp_path / "a.ckpt", tmp_path / "b", "safetensors")
