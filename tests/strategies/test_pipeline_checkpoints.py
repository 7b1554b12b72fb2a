"""Checkpoints of pipelines: any number of stages, other strategies, plain Lightning."""

from __future__ import annotations

import unittest.mock
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lq_testing.lightning_models import PLAIN, Losses, TinyModule, loader, run_trainer, trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from lq_lightning import QuantizedFSDPStrategy, QuantizedPipelineStrategy
from lq_lightning.checkpoint.consolidate import consolidate_checkpoint
from lq_lightning.pipeline.message import CastCodec, Message

EXACT = {"forward_codec": "none", "backward_codec": "none", "weights": "none", "gradients": "none"}


class Grouped(TinyModule):
    """Two parameter groups, as most training code has them, and tied weights."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        super().__init__(layers=4, tied=True, **options)

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim < 2]
        if dist.is_initialized() and dist.get_rank() % 2:  # as a `set` of names would have them
            matrices.reverse()
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others}]
        return torch.optim.AdamW(groups, lr=1e-2)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


class StateByName(pl.Callback):
    """Weights and moments that a run starts with, by the name of the parameter.

    Args:
        saves: Where to save after the first epoch; then it is the state there that is kept.
    """

    def __init__(self, saves: str | None) -> None:
        self.saves = saves
        self.values: dict[str, Tensor] = {}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.values = state_by_name(trainer, module)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.saves is not None and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.saves)
            self.values = state_by_name(trainer, module)


def state_by_name(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Tensor]:
    values = {}
    (optimizer,) = trainer.optimizers
    for name, parameter in module.named_parameters():
        values[name] = _whole(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            values[f"{name} {key}"] = _whole(torch.as_tensor(value))
    return values


def _fit(root: str, strategy: Any, devices: int, path: Any = None, saves: Any = None) -> Any:
    losses, start = Losses(), StateByName(saves)
    run = trainer(
        strategy,
        root,
        devices=devices,
        callbacks=[losses, start],
        use_distributed_sampler=False,
        max_epochs=2,
    )
    run.fit(Grouped(), loader(24, batch_size=8), ckpt_path=path)
    return run, losses.values, start.values


def _save(rank: int, world_size: int, root: str, options: dict[str, Any]) -> Any:
    """A run that is resumed goes on as the one that was not interrupted."""
    for full in (False, True):
        path, kind = f"{root}/full{full}.ckpt", {"save_distributed_checkpoint": not full}
        again, strategy = (QuantizedPipelineStrategy(**options, **kind) for _ in range(2))
        _, whole, state = _fit(root, strategy, world_size, saves=path)
        run, losses, start = _fit(root, again, world_size, path)
        run.save_checkpoint(f"{root}/end{full}.ckpt")  # where no run is under way
        assert losses == whole[3:]
        assert state.keys() == start.keys()
        assert all(torch.equal(state[name], start[name]) for name in state)
    return whole, state


def _seeds_of_noise(rank: int, world_size: int, root: str) -> Any:
    """Seeds of what this rank sent: gradients of a run and of one that goes on, and to validate."""
    found: list[list[int]] = []
    encode = CastCodec.encode

    def noted(codec: CastCodec, x: Tensor, message: Message) -> Tensor:
        if message.backward or not message.training:
            found[-1].append(message.seed)
        return encode(codec, x, message)

    path = f"{root}/noisy.ckpt"
    with unittest.mock.patch.object(CastCodec, "encode", noted):
        for saves, start in ((path, None), (None, path)):
            found.append([])
            strategy = QuantizedPipelineStrategy(pipeline_size=2, **EXACT)
            run = _fit(root, strategy, world_size, start, saves)[0]
        found.append([])
        run.validate(Grouped(), loader(8, batch_size=8), verbose=False)
    return found


def test_noise_of_gradients_differs_by_batch_and_replica(tmp_path: Path) -> None:
    """Stage 1 is on ranks 2 and 3, and sends the gradients of 8 micro-batches."""
    first, second, (one, again, _), (other, *_) = run_trainer(_seeds_of_noise, 4, str(tmp_path))
    assert first[:2] == second[:2] == [[], []]
    assert [len(each[2]) for each in (first, second)] == [8, 8]
    assert None not in {*first[2], *second[2]}
    assert len({*first[2], *second[2]}) == 2
    batches = one[::8]
    assert len({*batches, *other}) == 12
    assert one == [seed for seed in batches for _ in range(8)]
    assert again == one[24:]  # of the second epoch


def _start(rank: int, world_size: int, root: str, loads: list[tuple[str, str]]) -> Any:
    """Losses of the second epoch, and what it starts with, by strategy and checkpoint."""
    make = {
        "alone": lambda: QuantizedPipelineStrategy(),
        "lightning": lambda: "auto",
        "fsdp": lambda: QuantizedFSDPStrategy(**PLAIN),
        "interleaved": lambda: QuantizedPipelineStrategy(
            schedule="interleaved_1f1b", stages_per_rank=2, **EXACT
        ),
        "four": lambda: QuantizedPipelineStrategy(**EXACT),  # the outer two hold the tied weights
        "replicas": lambda: QuantizedPipelineStrategy(pipeline_size=2, **EXACT),
    }
    found = []
    for kind, name in loads:
        run, losses, start = _fit(root, make[kind](), world_size, f"{root}/{name}.ckpt")
        if kind == "interleaved":
            run.save_checkpoint(f"{root}/interleaved.ckpt")
        found.append((losses, start))
    return found


def _compare(start: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in start.items():
        if name.startswith("net.head"):
            name = name.replace("net.head", "net.embed")
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_checkpoints_of_two_stages(tmp_path: Path) -> None:
    root = str(tmp_path)
    (losses, first), (others, last) = run_trainer(_save, 2, root, EXACT)
    assert losses == others
    state = {**last, **first}
    consolidate_checkpoint(f"{root}/fullFalse.ckpt", f"{root}/joined.ckpt")
    for name, steps in (("full", 3), ("end", 6)):
        saved = torch.load(f"{root}/{name}True.ckpt", weights_only=True)
        assert list(saved["state_dict"]) == list(Grouped().state_dict())
        assert saved["global_step"] == steps
    loads = {
        1: [("alone", "fullFalse"), ("lightning", "fullTrue"), ("lightning", "joined")],
        2: [("fsdp", "fullFalse"), ("interleaved", "fullTrue")],
        4: [("replicas", "fullFalse"), ("four", "fullTrue")],
    }
    for world_size, wanted in loads.items():
        ranks = run_trainer(_start, world_size, root, wanted)
        for found in ranks:
            for own_losses, start in found:
                torch.testing.assert_close(own_losses, losses[3:], rtol=1e-5, atol=1e-6)
                _compare(start, state)
        assert {n for _, start in ranks[0] for n in start} >= first.keys()
    _order_is_that_of_one_process(tmp_path)


def _order_is_that_of_one_process(folder: Path) -> None:
    """Plain Lightning loads optimizer states by position, whatever stages a rank has."""
    consolidate_checkpoint(folder / "interleaved.ckpt", folder / "one.ckpt")
    saved = torch.load(folder / "one.ckpt", weights_only=True)["optimizer_states"][0]
    model = Grouped()
    names = {p: name for name, p in model.named_parameters()}
    groups = model.configure_optimizers().param_groups
    assert saved["parameter_names"] == [names[p] for group in groups for p in group["params"]]


def test_checkpoints_of_replicas(tmp_path: Path) -> None:
    """Two stages of two ranks; the replica that weight differences refer to is saved, too."""
    root = str(tmp_path)
    options = {**EXACT, "pipeline_size": 2, "weights": "qWD", "min_quantized_numel": 64}
    found = run_trainer(_save, 4, root, options)
    state = {**found[3][1], **found[0][1]}
    loads = [("fsdp", "fullTrue"), ("interleaved", "fullFalse")]
    for starts in run_trainer(_start, 2, root, loads):
        for _, start in starts:
            _compare(start, state)
