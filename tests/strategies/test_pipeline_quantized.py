"""Pipelines with everything in few bits: boundaries, stages, optimizer states, activations."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lq_testing.lightning_models import Losses, Tokens, run_trainer, trainer
from lq_testing.small_llama import SmallLlama
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lq_lightning import (
    ActivationPolicy,
    ActivationQuantization,
    QuantizationMonitor,
    QuantizedMuon,
    QuantizedPipelineStrategy,
    QuantizedPrecision,
    StageBitCompensation,
    muon_groups,
)

FOUR_BITS = ActivationPolicy(norm="int4_hadamard", activation="int4")


class Llama(pl.LightningModule):
    """Tied weights, so that an embedding is the head of another stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = SmallLlama(layers=4, width=64)
        self.net.embedding.weight.data.mul_(0.02)  # else tied weights know the answer
        self.net.head.weight = self.net.embedding.weight

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(tokens)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Tied(pl.Callback):
    """Compares the two copies of the tied weight after every step."""

    def __init__(self) -> None:
        self.largest = 0.0

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        (own,) = [p for n, p in module.named_parameters() if "embedding" in n or "head" in n]
        local = own.to_local() if isinstance(own, DTensor) else own
        other = local.detach().clone()
        ranks = trainer.strategy.device_mesh.get_group("pipeline")
        dist.broadcast(other, group=ranks, group_src=0)
        self.largest = max(self.largest, (local - other).abs().max().item())


class Freed(pl.Callback):
    """Layers of other stages are free when training starts, not when Python looks for cycles."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        gc.disable()
        self.layers = [weakref.ref(m) for m in module.modules() if isinstance(m, nn.Linear)]

    def on_train_start(self, trainer: Any, module: Any) -> None:
        alive = [id(m) for layer in self.layers if (m := layer()) is not None]
        gc.enable()  # may collect at once
        assert 0 < len(alive) < len(self.layers)
        assert set(alive) <= {id(m) for m in module.modules()}


def _run(root: str, world_size: int, precision: Any, callbacks: list[Any], **options: Any) -> Any:
    losses, tied = Losses(), Tied()
    run = trainer(
        QuantizedPipelineStrategy(min_quantized_numel=64, num_microbatches=4, **options),
        root,
        devices=world_size,
        callbacks=[losses, tied, *callbacks],
        plugins=[] if precision is None else [precision],
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
    )
    run.fit(Llama(), DataLoader(Tokens(32), batch_size=8, shuffle=True))
    assert tied.largest == 0.0
    head, tail = losses.values[:2], losses.values[-2:]  # epochs of the same batches
    assert sum(tail) < 0.9 * sum(head), losses.values
    return run, losses.values


def _two(rank: int, world_size: int, root: str) -> Any:
    found = []
    precision = QuantizedPrecision("bf16-mixed")
    compensation = StageBitCompensation(bits=4)
    callbacks = [ActivationQuantization(FOUR_BITS), compensation, Freed()]
    run, losses = _run(root, world_size, precision, callbacks)
    assert compensation.stage_bits == (4, 8)
    report = run.strategy.quantization_report()
    found.append((losses, report))
    run, losses = _run(root, world_size, None, [], forward_codec="aq_sgd")
    found.append((losses, run.strategy.quantization_report()))
    run.save_checkpoint(f"{root}/samples.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for codec in ("aq_sgd", "int4"):  # loads, and has nothing left to train
            again = QuantizedPipelineStrategy(num_microbatches=4, forward_codec=codec)  # type: ignore[arg-type]
            again = trainer(again, root, devices=world_size, max_epochs=3)
            again.fit(
                Llama(), DataLoader(Tokens(32), batch_size=8), ckpt_path=f"{root}/samples.ckpt"
            )
    warned = [w for w in caught if "full precision once again" in str(w.message)]
    assert len(warned) == (1 if rank == 0 else 0)
    return found


def test_two_stages_in_few_bits(tmp_path: Path) -> None:
    first, last = run_trainer(_two, 2, str(tmp_path))
    for (losses, report), (others, report_of_last) in zip(first, last, strict=True):
        assert losses == others
        assert report.names == report_of_last.names
        assert report.counts["bytes_boundary_forward"] > 0
        assert report.counts["bytes_boundary_backward"] == 0
        assert report_of_last.counts["bytes_boundary_backward"] > 0
    bits, values = first[0][1].ratios["bits_per_hidden_value"]
    assert 6.0 < bits / values < 7.0  # a bit of the mean: messages have 16 tokens
    bits, values = last[0][1].ratios["bits_per_hidden_gradient"]
    assert 5.5 <= bits / values < 6.0
    tied = first[0][1].counts["bytes_tied_gradients"] / 6  # optimizer steps
    assert tied == 64 * 64 * (1 + 2 / 128)


class MuonLlama(Llama):
    """Its head is another parameter than its embedding, which the last stage does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.net = SmallLlama(layers=4, width=48)

    def configure_optimizers(self) -> Any:
        return QuantizedMuon(muon_groups(self), lr=3e-3, adjust_lr_fn="match_rms_adamw")


def _muon(rank: int, world_size: int, root: str) -> Any:
    exact = {"forward_codec": "none", "backward_codec": "none"}
    strategy = QuantizedPipelineStrategy(num_microbatches=4, pipeline_size=2, **exact)  # type: ignore[arg-type]
    losses = Losses()
    run = trainer(strategy, root, devices=world_size, callbacks=[losses], max_epochs=3)
    run.fit(MuonLlama(), DataLoader(Tokens(32), batch_size=8))
    muon, adamw = run.optimizers[0].param_groups
    vectors = {name for name in adamw["param_names"] if "norm" in name}
    return losses.values, set(adamw["param_names"]) - vectors, len(muon["params"])


def test_stages_know_embeddings_and_heads(tmp_path: Path) -> None:
    found = run_trainer(_muon, 4, str(tmp_path))
    for rank, (losses, words, matrices) in enumerate(found):  # replicas of a stage side by side
        assert words == ({"net.embedding.weight"} if rank < 2 else {"net.head.weight"})
        assert matrices == 2 * 7
        assert losses[-1] < 0.95 * losses[0]


def _four(rank: int, world_size: int, root: str) -> Any:
    callbacks = [ActivationQuantization(FOUR_BITS), QuantizationMonitor(every_n_steps=2)]
    precision, options = QuantizedPrecision("bf16-mixed"), {"schedule": "zero_bubble"}
    run, losses = _run(root, world_size, precision, callbacks, pipeline_size=2, **options)
    return losses, run.strategy.communication.plan.summary(), run.strategy.quantization_report()


def test_replicas_of_stages_in_few_bits(tmp_path: Path) -> None:
    found = run_trainer(_four, 4, str(tmp_path))
    assert found[0][0] == found[2][0]
    assert found[1][0] == found[3][0]
    for _, plan, report in found:
        assert "4-bit" in plan
        assert report.counts["bytes_gradients_intra"] > 0
        assert "bytes_boundary_forward" in report.counts
