"""The callback on one device and on two ranks: it trains as without, and leaves nothing behind."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from lq_testing.activation_models import INT8, Inside, Module, backward, close, codes, fit, snapshot
from lq_testing.lightning_models import Losses, loader, trainer
from lq_testing.models import WIDTH
from torch import Tensor, nn

from lq_lightning import (
    ActivationPolicy,
    ActivationQuantization,
    QuantizationMonitor,
    QuantizedFSDPStrategy,
    QuantizedPrecision,
)
from lq_lightning.callbacks.model_setup import AfterConfigureModel

# --- one device ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["__init__", "setup", "configure_model"])
def test_trains_as_without_and_gives_the_model_back(where: str, tmp_path: Path) -> None:
    _, expected = fit(Module(), tmp_path)
    module, inside, losses = Module(where), Inside(), Losses()
    before = snapshot(module)
    quantization = ActivationQuantization(INT8)
    options = {"devices": 1, "num_sanity_val_steps": 1}
    run = trainer("auto", str(tmp_path), callbacks=[inside, losses, quantization], **options)
    assert quantization.handle is None
    run.fit(module, loader(), loader(8))
    assert quantization.handle is None
    assert losses.values != expected
    assert close(losses.values, expected)
    assert "net.blocks.1.mlp" in inside.names
    assert inside.codes > 0
    if where == "__init__":
        assert snapshot(module) == before
    assert "configure_model" not in module.__dict__
    assert (inside.repr, inside.keys) == (repr(module), list(module.state_dict()))
    assert codes(lambda: backward(module)) == 0
    for stage in (run.validate, run.test, run.predict):  # of a stage the callback keeps out
        assert codes(lambda stage=stage: stage(module, loader(8))) == 0  # type: ignore[misc]
        assert "configure_model" not in module.__dict__
    inside.codes = 0
    run.fit_loop.max_epochs = 2
    run.fit(module, loader())
    assert inside.codes > 0
    assert codes(lambda: backward(module)) == 0


def test_nothing_that_users_draw_changes(tmp_path: Path) -> None:
    """Codes of 8 bits change losses a little; other random numbers would change them a lot."""
    drawn = []
    for recipe in (None, "agoq"):
        torch.manual_seed(5)
        fit(Module(), tmp_path, recipe, max_steps=1)
        drawn.append(torch.rand(3))
    torch.testing.assert_close(*drawn, rtol=0, atol=0)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_is_undone_when_fit_fails(error: BaseException, tmp_path: Path) -> None:
    module = Module()
    before = snapshot(module)
    with pytest.raises((ValueError, SystemExit)):
        fit(module, tmp_path, INT8, callbacks=[Inside(error)])
    assert snapshot(module) == before


class Broken(Module):
    """Fails while the run is set up."""

    def __init__(self, name: str) -> None:
        super().__init__()

        def fail(*args: Any, **kwargs: Any) -> None:
            raise ValueError("mine")

        setattr(self, name, fail)


@pytest.mark.parametrize("name", ["setup", "configure_model", "configure_optimizers"])
def test_is_undone_when_setup_fails(name: str, tmp_path: Path) -> None:
    module = Broken(name)
    before = snapshot(module)
    with pytest.raises(ValueError, match="mine"):
        fit(module, tmp_path, INT8)
    assert snapshot(module) == before


def test_resuming_gives_the_same_run(tmp_path: Path) -> None:
    def run(folder: str, recipe: Any, steps: int, resume: str | None = None) -> Any:
        module = Module()
        saved = ModelCheckpoint(tmp_path / folder, every_n_train_steps=4, filename="{step}")
        callbacks = [saved] if recipe is None else [saved, ActivationQuantization(recipe)]
        options = {"enable_checkpointing": True, "callbacks": callbacks, "max_epochs": -1}
        run = trainer("auto", str(tmp_path), devices=1, max_steps=steps, **options)
        run.fit(module, loader(16), ckpt_path=resume)
        return module.state_dict()

    whole = run("whole", "agoq", 8)
    run("half", "agoq", 4)
    resumed = run("rest", "agoq", 8, f"{tmp_path}/half/step=4.ckpt")
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    run("plain", None, 4)  # one does not need the other
    run("rest", "agoq", 5, f"{tmp_path}/plain/step=4.ckpt")
    run("rest", None, 5, f"{tmp_path}/half/step=4.ckpt")


def test_everything_together(tmp_path: Path) -> None:
    """8-bit states and gradient sums, clipping, accumulation, a monitor, mixed precision."""
    seen: list[dict[str, float]] = []

    class Spy(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *unused: object) -> None:
            seen.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    curves = []
    policy = ActivationPolicy(norm="int8", activation="int4", linear="int8")
    for recipe in (None, policy):
        monitor = QuantizationMonitor(every_n_steps=2)
        _, losses = fit(
            Module(),
            tmp_path,
            recipe,
            callbacks=[Spy(), monitor] if recipe else [],
            plugins=[QuantizedPrecision("bf16-mixed")],
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            log_every_n_steps=1,
            logger=False,
        )
        curves.append(losses)
    assert close(*curves, tolerance=0.02)
    values = {k: v for k, v in seen[-1].items() if k.startswith("quant/")}
    assert 4 < values["quant/bits_per_saved_value"] < 9
    assert values["quant/bytes_saved"] > 0
    # int8 against int4, of values of one kind each
    assert 1e-4 < values["quant/saved_norm_error"] < 0.02
    assert 0.02 < values["quant/saved_activation_error"] < 0.2
    assert 1e-4 < values["quant/saved_linear_error"] < 0.02


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("recipe", ["agoq", "coat", "fp8-4bit"])
def test_recipes_train_in_all_precisions(recipe: str, precision: Any, tmp_path: Path) -> None:
    _, expected = fit(Module(), tmp_path, precision=precision)
    _, losses = fit(Module(), tmp_path, recipe, precision=precision)
    assert close(losses, expected, tolerance=0.05)


class TanhGELU(nn.Module):
    """Rounds differently than torch's own where it computes in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        inner = 2**0.5 / torch.pi**0.5 * (x + 0.044715 * x.pow(3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class ActivationBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 64), TanhGELU(), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


def test_recognizes_what_is_made_in_bf16(tmp_path: Path) -> None:
    """Inside of `configure_model`, bf16 is torch's default dtype."""
    inside = Inside()
    module = Module("configure_model", ActivationBlock)
    fit(module, tmp_path, INT8, precision="bf16-true", callbacks=[inside])
    assert "net.blocks.0.act" in inside.names


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:  # type: ignore[override]
        optimizer, loss = self.optimizers(), self.net(tokens)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}  # type: ignore[return-value]


def test_manual_optimization_and_tuner(tmp_path: Path) -> None:
    _, expected = fit(Manual(), tmp_path)
    _, losses = fit(Manual(), tmp_path, INT8)
    assert close(losses, expected)
    run = trainer("auto", str(tmp_path), devices=1, callbacks=[ActivationQuantization()])
    module = Module()
    before = snapshot(module)
    Tuner(run).lr_find(module, loader(64), num_training=5, update_attr=False)
    assert snapshot(module) == before


def test_compiled_units_are_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Units that contain sites, and units that are sites: code captured with them, then without."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    _, expected = fit(Module(), tmp_path)
    for units in (["GatedBlock"], ["MLP", "RMSNorm"]):
        module, inside = Module(), Inside()
        for number in (1, 2):  # the second fit finds compiled units
            strategy = QuantizedFSDPStrategy(compile_units=True, units=units)
            _, losses = fit(module, tmp_path, INT8, strategy, callbacks=[inside])
            assert inside.codes > 0
            assert codes(lambda module=module: backward(module)) == 0  # type: ignore[misc]
            assert number == 2 or close(losses, expected)
            unit = module.net.blocks[0] if units == ["GatedBlock"] else module.net.blocks[0].mlp
            assert hasattr(unit.forward, "_torchdynamo_orig_callable")
    copied = copy.deepcopy(module.net.blocks[0].norm)
    assert copied(torch.ones(2, WIDTH)).shape == (2, WIDTH)


def test_copy_of_a_module_that_waits_for_its_layers_is_left_alone() -> None:
    """Such as that of a callback which averages weights, in its ``setup``."""
    module, seen = Module("configure_model"), list[pl.LightningModule]()
    AfterConfigureModel(module, seen.append)
    copied = copy.deepcopy(module)
    copied.configure_model()
    assert "configure_model" not in vars(copied)
    assert not seen
    module.configure_model()
    assert seen == [module]


# --- Hugging Face -------------------------------------------------------------------------------


class HuggingFace(pl.LightningModule):
    def __init__(self, checkpointing: bool = False, lora: bool = False) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 31}
        self.net = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
        if lora:
            from peft import LoraConfig, get_peft_model

            self.net = get_peft_model(self.net, LoraConfig(target_modules=["q_proj", "up_proj"]))
        if checkpointing:
            self.net.gradient_checkpointing_enable({"use_reentrant": False})
            self.net.enable_input_require_grads()
        self.net.train()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return self.net(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-3)


@pytest.mark.uninitialized_memory_ok  # transformers fills what it allocates later
@pytest.mark.parametrize("lora", [False, True])
def test_hugging_face_with_checkpointing_and_lora(lora: bool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    if lora:
        pytest.importorskip("peft")
    run = functools.partial(fit, root=tmp_path, limit_val_batches=0)
    _, expected = run(HuggingFace(lora=lora))
    _, losses = run(HuggingFace(lora=lora), recipe=INT8)
    _, again = run(HuggingFace(checkpointing=True, lora=lora), recipe=INT8)
    assert close(losses, expected)
    assert close(again, expected)
    assert again != losses, "a checkpoint keeps codes"
