"""Checkpoints of tensor-parallel ranks: any sizes, whole files, pretrained weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lq_testing.lightning_models import PLAIN, SMALL, Losses, run_trainer, trainer
from lq_testing.tensor_models import WIDTH, ParallelLM, ParallelModule, batch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils.data import DataLoader

from lq_lightning import (
    GradientQuantization,
    QuantizedFSDPStrategy,
    WeightQuantization,
    load_pretrained,
)
from lq_lightning.checkpoint.consolidate import consolidate_checkpoint
from lq_lightning.checkpoint.folder import ShardedCheckpoint, read_metadata

HIDDEN = 50  # 25 for each of two tensor-parallel ranks, so 13 and 12 for two data-parallel ones


class Uneven(ParallelModule):
    """Tied embedding, and shards of several sizes, some of them empty."""

    def __init__(self, parallel: bool = True, pretrained: str | None = None) -> None:
        super().__init__(True if parallel else None)
        self.pretrained = pretrained
        self._make()

    def _make(self) -> None:
        self.net = ParallelLM()
        for block in self.net.blocks:
            block.mlp.up, block.mlp.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.net.tiny = nn.Parameter(torch.ones(3))
        self.net.register_buffer("seen", torch.zeros(2))
        self.net.head.weight = self.net.embedding.weight

    def configure_model(self) -> None:
        if self.pretrained is not None:
            with torch.device("meta"):
                self._make()
            load_pretrained(self.net, self.pretrained)
        super().configure_model()
        self.net.head.weight = self.net.embedding.weight  # each was cut by itself

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        self.net.seen += 1
        return super().training_step(tokens, batch_idx) + self.net.tiny.square().sum()


class Saves(Callback):
    """Saves what a run starts from."""

    def __init__(self, path: str | None) -> None:
        self.path = path

    def on_train_start(self, run: pl.Trainer, module: pl.LightningModule) -> None:
        if self.path is not None:
            run.save_checkpoint(self.path)


class SavesFirst(Saves):
    """Saves after the first epoch."""

    def on_train_start(self, *args: Any) -> None:
        pass

    def on_train_epoch_end(self, run: pl.Trainer, module: pl.LightningModule) -> None:
        if run.current_epoch == 0:
            run.save_checkpoint(f"{self.path}")


def _fit(
    root: str,
    use: Any,
    devices: int,
    start: str | None = None,
    save: str | None = None,
    module: Uneven | None = None,
    **options: Any,
) -> tuple[pl.Trainer, list[float]]:
    losses = Losses()
    module = module or Uneven(isinstance(use, QuantizedFSDPStrategy) and use._tensor.size > 1)
    module.lr = 1e-2 if start is None else 0.5  # everything comes from the checkpoint
    callbacks = [losses, Saves(save and f"{root}/{save}"), *options.pop("callbacks", ())]
    options = {"use_distributed_sampler": False, **options}
    run = trainer(use, root, devices=devices, callbacks=callbacks, **options)
    data = DataLoader([batch(i, size=1)[0] for i in range(16)], batch_size=4)
    run.fit(module, data, ckpt_path=start and f"{root}/{start}")
    return run, losses.values


RUNS = {  # tensor-parallel ranks, single file?, checkpoint to start from
    4: [(2, False, "one"), (1, False, "4a"), (2, True, "4b"), (1, True, "4c")],
    2: [(2, False, "4a"), (1, False, "2a"), (2, True, "2b")],
}


def _train(rank: int, world: int, root: str) -> list[list[float]]:
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch.distributed.tensor._redistribute").addHandler(handler)
    found = []
    for (size, full, start), name in zip(RUNS[world], "abcd", strict=False):
        use = QuantizedFSDPStrategy(
            tensor_parallel_size=size, save_distributed_checkpoint=not full, **PLAIN
        )
        _, losses = _fit(root, use, world, f"{start}.ckpt", f"{world}{name}.ckpt", max_epochs=2)
        found.append(losses)
    if world == 4:
        use = QuantizedFSDPStrategy(tensor_parallel_size=2, **PLAIN)
        module = Uneven(pretrained=f"{root}/one.safetensors")
        _fit(root, use, world, None, "pretrained.ckpt", module, max_steps=1)
        for name in ("4a", "4c"):
            module, use = Uneven(), QuantizedFSDPStrategy(tensor_parallel_size=2, **PLAIN)
            module.net.blocks[1].mlp.up = nn.Linear(WIDTH, HIDDEN + 2)
            with pytest.raises(RuntimeError, match=r"net.blocks.1.mlp.up.weight.*50, 16"):
                _fit(root, use, world, f"{name}.ckpt", module=module)
    assert not warned
    return found


def _tensors(content: Any) -> dict[str, Tensor]:
    (states,) = content["optimizer_states"]
    found = {f"weight {name}": t for name, t in content["state_dict"].items()}
    for position, entry in states["state"].items():
        name = states["parameter_names"][position]
        found |= {f"{key} {name}": t for key, t in entry.items()}
    return found


def _is_written_once(path: Path) -> None:
    """Files hold each element of the model once, and nothing else, whoever has it."""
    described = read_metadata(path, True)
    for key, entry in described.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            assert sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel(), key
    known = sum(item.length for item in described.storage_data.values())
    assert sum(file.stat().st_size for file in path.glob("*.distcp")) == known


def test_checkpoints_of_all_sizes_hold_and_restore_the_same(tmp_path: Path) -> None:
    root = str(tmp_path)
    first, _ = _fit(root, "auto", 1)
    first.save_checkpoint(f"{root}/plain.ckpt")
    _, losses = _fit(root, "auto", 1, "plain.ckpt", max_epochs=2)
    # ours holds the names of states
    own = QuantizedFSDPStrategy()
    assert _fit(root, own, 1, "plain.ckpt", "one.ckpt", max_epochs=2)[1] == losses
    expected = _tensors(torch.load(f"{root}/one.ckpt", weights_only=True))
    assert len(expected) > 60
    consolidate_checkpoint(f"{root}/one.ckpt", f"{root}/one.safetensors", "safetensors", "net.")
    for world, runs in RUNS.items():
        for found in run_trainer(_train, world, root):
            for values in found:
                torch.testing.assert_close(values, losses, rtol=1e-5, atol=1e-6)
        for (_, full, _), name in zip(runs, "abcd", strict=False):
            path = one = tmp_path / f"{world}{name}.ckpt"
            assert path.is_dir() is not full
            if not full:
                one = tmp_path / "joined.ckpt"
                consolidate_checkpoint(path, one)
            tensors = _tensors(torch.load(one, weights_only=True))
            assert tensors.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(tensors[key], value), (path.name, key)
        _is_written_once(tmp_path / f"{world}a.ckpt")
        assert _fit(root, "auto", 1, "joined.ckpt", max_epochs=2)[1] == losses
    consolidate_checkpoint(tmp_path / "pretrained.ckpt", tmp_path / "joined.ckpt")
    started = _tensors(torch.load(tmp_path / "joined.ckpt", weights_only=True))
    wrong = [key for key in expected if "weight net" in key and "seen" not in key]
    wrong = [key for key in wrong if not torch.equal(started[key], expected[key])]
    assert not wrong


STOCHASTIC: dict[str, Any] = {
    **SMALL,
    "weights": WeightQuantization(rounding="stochastic"),
    "gradients": GradientQuantization(rounding="stochastic"),
}
SAME = (  # single file?, options of the strategy
    (False, {**STOCHASTIC, "replica": "node", "node_size": 2}),
    (True, STOCHASTIC),
    (False, {**STOCHASTIC, "node_size": 2, "local_steps": 2}),
)


def _continue(rank: int, world: int, root: str) -> None:
    for number, (full, options) in enumerate(SAME):

        def strategy(size: int, full: bool, options: Any) -> QuantizedFSDPStrategy:
            return QuantizedFSDPStrategy(
                tensor_parallel_size=size, save_distributed_checkpoint=not full, **options
            )

        more = {"max_epochs": 2, "use_distributed_sampler": True}
        saves = SavesFirst(f"{root}/{number}/first.ckpt")
        _, losses = _fit(root, strategy(2, full, options), world, callbacks=[saves], **more)
        path = f"{number}/first.ckpt"
        _, again = _fit(root, strategy(2, full, options), world, path, **more)
        assert again == losses[2:], number
        if not full:  # at other sizes: held until the next exchange, and saved again
            other = strategy(1, False, options)
            _fit(root, other, world, path, f"{number}/other.ckpt", **more)


def _content(path: Path) -> dict[str, Any]:
    """Everything in the data files of a folder."""
    source = ShardedCheckpoint(path)
    described = {key: source.tensor(key) for key in source.paths}
    flat = {
        key: found and torch.empty(found[0], dtype=found[1]) for key, found in described.items()
    }
    source.load(flat)
    return flat


def test_runs_go_on_exactly_on_the_same_ranks(tmp_path: Path) -> None:
    run_trainer(_continue, 4, str(tmp_path))
    for number, kinds in ((0, {"replica"}), (2, {"velocity", "node_1"})):
        first, other = (_content(tmp_path / str(number) / f"{n}.ckpt") for n in ("first", "other"))
        assert {key.split(".")[0] for key in first} > {"state_dict", "optimizer_0", *kinds}
        assert first.keys() == other.keys()
        same = {
            k: torch.equal(v, other[k]) if isinstance(v, Tensor) else v == other[k]
            for k, v in first.items()
        }
        assert all(same.values()), same
