"""Checkpoints of tensor-parallel ranks: any sizes, whole files, pretrained weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lq_testing.lightning_models import EXACT, PLAIN, SMALL, Losses, run_trainer, trainer
from lq_testing.tensor_models import ParallelLM, ParallelModule, batch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils.data import DataLoader

from lq_lightning import (
    GradientQuantization,
    OptimizerQuantization,
    QuantizedFSDPStrategy,
    QuantizedPipelineStrategy,
    QuantizedPrecision,
    load_pretrained,
)
from lq_lightning.checkpoint.consolidate import consolidate_checkpoint
from lq_lightning.checkpoint.folder import ShardedCheckpoint, read_metadata

load_file = pytest.importorskip("safetensors.torch").load_file
WIDTH = 32
HIDDEN = 82  # 41 for each of two tensor-parallel ranks, so 21 and 20 for two data-parallel ones


class Uneven(ParallelModule):
    """Tied embedding, and shards of several sizes, some of them empty.

    Args:
        size: Tensor-parallel ranks.
        split: Is cut into stages, which have nothing but the layers.
        pretrained: A file to start from.
    """

    def __init__(self, size: int, split: bool, pretrained: str | None = None) -> None:
        super().__init__(True if size > 1 else None)
        self.split, self.pretrained = split, pretrained
        self._make()

    def _make(self) -> None:
        self.net = ParallelLM(width=WIDTH)
        for block in self.net.blocks:
            block.mlp.up, block.mlp.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        if not self.split:
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
        loss = super().training_step(tokens, batch_idx)
        if self.split:
            return loss
        self.net.seen += 1
        return loss + self.net.tiny.square().sum()


def _llama() -> Any:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**shape, **heads, tie_word_embeddings=True)
    return transformers.AutoModelForCausalLM.from_config(config)


class Llama(Uneven):
    """Is filled from the file of a model of Hugging Face, and cut by its plan."""

    def _make(self) -> None:
        self.net = None

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.net = _llama()
        load_pretrained(self.net, self.pretrained)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return self.net(input_ids=tokens, labels=tokens).loss


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
    split: bool = False,
    **options: Any,
) -> tuple[pl.Trainer, list[float]]:
    losses = Losses()
    module = module or Uneven(1 if use == "auto" else use._tensor.size, split)
    module.lr = 1e-2 if start is None else 0.5  # everything comes from the checkpoint
    callbacks = [losses, Saves(save and f"{root}/{save}"), *options.pop("callbacks", ())]
    options = {"use_distributed_sampler": False, **options}
    run = trainer(use, root, devices=devices, callbacks=callbacks, **options)
    samples = 16 if options["use_distributed_sampler"] else 8  # two steps of each rank
    data = DataLoader([batch(i, size=1)[0] for i in range(samples)], batch_size=4)
    run.fit(module, data, ckpt_path=start and f"{root}/{start}")
    return run, losses.values


# Ranks along the pipeline and tensor-parallel ones, single file?, checkpoint to start from.
RUNS = {
    False: {
        4: [(1, 2, False, "one"), (1, 1, False, "4a"), (1, 2, True, "4b"), (1, 1, True, "4c")],
        2: [(1, 2, False, "4a")],
    },
    True: {
        8: [(2, 2, False, "one"), (2, 2, True, "8a")],
        4: [(2, 1, False, "8a"), (2, 2, True, "4a"), (1, 2, False, "4b")],
    },
}


def _strategy(pipeline: int, size: int, full: bool, **options: Any) -> Any:
    options = {**PLAIN, **options, "save_distributed_checkpoint": not full}
    if pipeline == 1:
        return QuantizedFSDPStrategy(tensor_parallel_size=size, **options)
    return QuantizedPipelineStrategy(
        pipeline_size=pipeline, tensor_parallel_size=size, **EXACT, **options
    )


def _train(rank: int, world: int, root: str, split: bool) -> list[list[float]]:
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch.distributed.tensor._redistribute").addHandler(handler)
    found = []
    for (pipeline, size, full, start), name in zip(RUNS[split][world], "abcd", strict=False):
        use, paths = _strategy(pipeline, size, full), (f"{start}.ckpt", f"{world}{name}.ckpt")
        found.append(_fit(root, use, world, *paths, split=split, max_epochs=2)[1])
    if world == 4:
        pipeline = 2 if split else 1
        module = Uneven(2, split, pretrained=f"{root}/one.safetensors")
        use = _strategy(pipeline, 2, False)
        _fit(root, use, world, None, "pretrained.ckpt", module, max_steps=1)
        for name in ("4a", "4b" if split else "4c"):
            module = Uneven(2, split)
            module.net.blocks[1].mlp.up = nn.Linear(WIDTH, HIDDEN + 4)
            with pytest.raises(RuntimeError, match=r"net.blocks.1.mlp.up.weight.*82, 32"):
                _fit(root, _strategy(pipeline, 2, False), world, f"{name}.ckpt", module=module)
    if world == 2:
        use = _strategy(1, 2, False, tensor_parallel="auto")
        module = Llama(2, split, pretrained=f"{root}/llama")
        _fit(root, use, world, None, "llama.ckpt", module, max_steps=1)
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


@pytest.mark.parametrize("split", [False, True])
def test_checkpoints_of_all_sizes_hold_and_restore_the_same(tmp_path: Path, split: bool) -> None:
    root = str(tmp_path)
    more: Any = {"split": split, "max_epochs": 2}
    first, _ = _fit(root, "auto", 1, split=split)
    first.save_checkpoint(f"{root}/plain.ckpt")
    _, losses = _fit(root, "auto", 1, "plain.ckpt", **more)
    # ours holds the names of states
    own = _strategy(1, 1, False)
    assert _fit(root, own, 1, "plain.ckpt", "one.ckpt", **more)[1] == losses
    expected = _tensors(torch.load(f"{root}/one.ckpt", weights_only=True))
    assert len(expected) > 60
    consolidate_checkpoint(f"{root}/one.ckpt", f"{root}/one.safetensors", "safetensors", "net.")
    llama = _llama()
    llama.save_pretrained(f"{root}/llama")
    for world, runs in RUNS[split].items():
        for found in run_trainer(_train, world, root, split):
            for values in found:
                torch.testing.assert_close(values, losses, rtol=1e-5, atol=1e-6)
        for (_, _, full, _), name in zip(runs, "abcd", strict=False):
            path = one = tmp_path / f"{world}{name}.ckpt"
            assert path.is_dir() is not full
            if not full:
                one = tmp_path / "joined.ckpt"
                consolidate_checkpoint(path, one)
                _is_written_once(path)
            tensors = _tensors(torch.load(one, weights_only=True))
            assert tensors.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(tensors[key], value), (path.name, key)
            assert _fit(root, "auto", 1, one.name, **more)[1] == losses
    consolidate_checkpoint(tmp_path / "pretrained.ckpt", tmp_path / "joined.ckpt")
    started = _tensors(torch.load(tmp_path / "joined.ckpt", weights_only=True))
    weights = [key for key in expected if key.startswith("weight ") and "seen" not in key]
    assert all(torch.equal(started[key], expected[key]) for key in weights)
    if not split:
        consolidate_checkpoint(tmp_path / "llama.ckpt", one, "safetensors", "net.")
        saved, names = load_file(one), load_file(tmp_path / "llama" / "model.safetensors")
        assert saved.keys() == names.keys()
        assert all(torch.equal(value, names[name]) for name, value in saved.items())


STOCHASTIC: dict[str, Any] = {
    **SMALL,
    "weights": "qWD",
    "gradients": GradientQuantization(rounding="stochastic"),
}
SAME = (  # single file?, coded states?, options of the strategy
    (False, False, {**STOCHASTIC, "replica": "node", "node_size": 2}),
    (True, True, STOCHASTIC),
    (False, True, {**STOCHASTIC, "node_size": 2, "local_steps": 2}),
)


def _continue(rank: int, world: int, root: str) -> None:
    for number, (full, coded, options) in enumerate(SAME):
        codes = QuantizedPrecision("32-true", OptimizerQuantization(min_numel=64))
        more: Any = {"max_epochs": 2, "use_distributed_sampler": True}
        more["plugins"] = [codes] if coded else []
        path = f"{number}/first.ckpt"
        saves = SavesFirst(f"{root}/{path}")
        use = _strategy(1, 2, full, **options)
        run, losses = _fit(root, use, world, callbacks=[saves], **more)
        kept = [key for state in run.optimizers[0].state.values() for key in state]
        assert any("codes" in key for key in kept) == coded
        assert _fit(root, _strategy(1, 2, full, **options), world, path, **more)[1] == losses[2:]
        if not full:  # at other sizes: held until the next exchange, and saved again
            _fit(
                root, _strategy(1, 1, False, **options), world, path, f"{number}/other.ckpt", **more
            )


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
        # rows that tensor-parallel ranks cut have codes of their own there
        cut = {key for key in first if "down.weight.exp_avg" in key and SAME[number][1]}
        for key, value in first.items():
            again = other[key]
            equal = torch.equal(value, again) if isinstance(value, Tensor) else value == again
            assert equal or key in cut, key
