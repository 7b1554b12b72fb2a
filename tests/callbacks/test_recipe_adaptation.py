"""The callback adapts a recipe in the first batch: it changes nothing else, and resumes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lq_testing.lightning_models import Losses, trainer
from lq_testing.small_llama import VOCAB, SmallLlama
from torch import Tensor
from torch.utils.data import DataLoader

from lq_lightning import ActivationPolicy, ActivationQuantization, QuantizedFSDPStrategy
from lq_lightning.activations.sites import sites_of
from lq_lightning.callbacks import activation_quantization


class Module(pl.LightningModule):
    def __init__(self, outliers: bool = True, automatic: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.steps = SmallLlama(2), 0
        self.automatic_optimization = automatic
        mlp = self.net.blocks[1].mlp
        with torch.no_grad():
            mlp.up_proj.weight[::128] *= 1.0 + 99.0 * outliers
            mlp.down_proj.weight[:, ::128] /= 1.0 + 99.0 * outliers

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.steps += 1
        loss: Tensor = self.net(batch)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Widths(pl.Callback):
    """Bits of all sites, before each batch and before each optimizer step."""

    def __init__(self) -> None:
        self.batches: list[dict[str, int]] = []
        self.steps: list[dict[str, int]] = []

    def widths(self, module: pl.LightningModule) -> dict[str, int]:
        sites = [s for m in module.modules() for s in sites_of(m) if s.codec is not None]
        return {s.name: int(s.codec.code[-1]) for s in sites if s.codec is not None}

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *unused: Any) -> None:
        self.batches.append(self.widths(module))

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, *unused: Any) -> None:
        self.steps.append(self.widths(module))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    name = "lq_lightning.callbacks.activation_quantization.rank_zero_info"
    monkeypatch.setattr(name, messages.append)
    return messages


def fit(
    root: Path, module: Module, adapt: Any = None, recipe: Any = "auto", **options: Any
) -> tuple[Widths, list[float], pl.Trainer]:
    generator = torch.Generator().manual_seed(1)
    data = [torch.randint(VOCAB, (32,), generator=generator) for _ in range(8)]
    losses, widths = Losses(), Widths()
    callbacks = [ActivationQuantization(recipe, adapt=adapt), widths, *options.pop("callbacks", [])]
    if module.automatic_optimization:
        callbacks.append(losses)
    resume, strategy = options.pop("ckpt_path", None), options.pop("strategy", "auto")
    run = trainer(strategy, str(root), 1, callbacks=callbacks, **options)
    run.fit(module, DataLoader(data, batch_size=2), ckpt_path=resume)  # type: ignore[arg-type]
    return widths, losses.values, run


def changed(widths: dict[str, int]) -> set[str]:
    return {name for name, bits in widths.items() if bits != 4}


def test_outliers_get_more_bits_before_the_first_step_and_nothing_runs_twice(
    tmp_path: Path, said: list[str]
) -> None:
    module = Module()
    widths, losses, _ = fit(tmp_path, module)
    assert [changed(w) for w in widths.batches] == [set(), *[{"net.blocks.1.mlp"}] * 3]
    assert widths.steps == widths.batches[1:2] * 4
    assert module.steps == 4
    assert int(module.net.calls) == 4
    assert "net.blocks.1.mlp: 4 -> " in "\n".join(said)
    assert "more bits at 1 of 7:" in "\n".join(said)
    _, static, _ = fit(tmp_path, Module(), adapt=False)
    assert losses[0] == static[0]
    assert losses[2] != static[2]


def test_a_model_without_outliers_trains_bit_for_bit_as_without(
    tmp_path: Path, said: list[str]
) -> None:
    runs = []
    for adapt in (None, False):
        module = Module(outliers=False)
        _, losses, _ = fit(tmp_path, module, adapt)
        runs.append((losses, [p.tolist() for p in module.parameters()]))
        assert ("Expected relative error" in "\n".join(said)) == (adapt is None)
        said.clear()
    assert runs[0] == runs[1]
    widths, _, _ = fit(tmp_path, Module(outliers=False), adapt=0.01)
    assert changed(widths.batches[1])


def test_a_resumed_run_goes_on_with_the_choice(tmp_path: Path, said: list[str]) -> None:
    saved = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    options = {"callbacks": [saved], "enable_checkpointing": True, "max_epochs": 2}
    whole = Module()
    widths, _, run = fit(tmp_path, whole, **options)
    run.save_checkpoint(tmp_path / "after.ckpt")
    said.clear()
    resumed = Module()
    again, _, _ = fit(tmp_path, resumed, max_epochs=2, ckpt_path=f"{tmp_path}/step=4.ckpt")
    assert again.batches == widths.batches[4:]
    assert "as the checkpoint says" in "\n".join(said)
    assert "Expected" not in "\n".join(said)
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)
    state = torch.load(tmp_path / "after.ckpt", weights_only=True)["activation_quantization"]
    assert state["bits"] == {"net.blocks.1.mlp": widths.batches[1]["net.blocks.1.mlp"]}
    other, _, _ = fit(
        tmp_path, Module(), adapt=0.5, max_epochs=2, ckpt_path=f"{tmp_path}/step=4.ckpt"
    )
    assert not changed(other.batches[1])  # another bound: measured anew


class Overflows(Module):
    """As with a gradient scaler, which skips the step, until its scale is small enough."""

    def __init__(self, batches: int) -> None:
        super().__init__(automatic=False)
        self.batches = batches

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.steps >= self.batches:
            return super().training_step(batch, batch_idx)
        self.steps += 1
        if self.steps == 1:
            return None
        (self.net(batch) * torch.inf).backward()
        self.zero_grad()
        return None


def test_a_batch_that_shows_nothing_is_followed_by_another(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    widths, _, _ = fit(tmp_path, Overflows(2))
    assert [bool(changed(w)) for w in widths.batches] == [False, False, False, True]
    assert "not measured" not in "\n".join(said)
    monkeypatch.setattr(activation_quantization, "_TRIES", 2)
    widths, _, _ = fit(tmp_path, Overflows(2))
    assert not any(map(changed, widths.batches))
    assert "gradients are not finite" in said[-1]


def test_manual_optimization_accumulation_and_a_second_fit(tmp_path: Path) -> None:
    widths, _, _ = fit(tmp_path, Module(automatic=False))
    assert [bool(changed(w)) for w in widths.batches] == [False, True, True, True]
    assert [bool(changed(w)) for w in widths.steps] == [False, True, True, True]
    module = Module()
    widths, _, run = fit(tmp_path, module, accumulate_grad_batches=2)
    assert [bool(changed(w)) for w in widths.batches] == [False, True, True, True]
    run.fit_loop.max_epochs = 2
    run.fit(module, DataLoader([torch.ones(32, dtype=torch.long)] * 4, batch_size=2))  # type: ignore[arg-type]
    assert not changed(widths.batches[4])


def test_compiled_units_run_eagerly_while_they_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: list[str]
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    expected = fit(tmp_path, Module())[1]
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.utils.counters.clear()
    strategy = QuantizedFSDPStrategy(weights="none", gradients="none", compile_units=True)
    widths, losses, _ = fit(tmp_path, Module(), strategy=strategy)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert changed(widths.batches[1]) == {"net.blocks.1.mlp"}
    assert losses == pytest.approx(expected, rel=1e-5)
    assert torch._dynamo.config.recompile_limit == limit


def test_refusals(tmp_path: Path) -> None:
    for adapt in (0, -1.0, float("nan"), "yes"):
        with pytest.raises(ValueError, match=r"adapt=.* is not supported: give True, False"):
            ActivationQuantization(adapt=adapt)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a budget chooses all codes itself"):
        ActivationQuantization(budget="1GiB", adapt=True)
    for recipe in ("agoq", ActivationPolicy()):  # only "auto" adapts unless told to
        widths, _, _ = fit(tmp_path, Module(), recipe=recipe)
        assert widths.batches[0] == widths.batches[1]
