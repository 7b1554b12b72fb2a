"""The callback on one device: gates train beside the model, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lq_testing.lightning_models import Losses, TinyModule, loader, trainer
from lq_testing.models import TinyLM, batch
from torch import Tensor, nn

from lq_lightning import AdaptiveBits

pytestmark = pytest.mark.filterwarnings("ignore:AdaptiveBits. the mean is")

FAST: dict[str, Any] = {"start_bits": 5.0, "learning_rate": 0.03, "beta": 1.0}


class Spy(pl.Callback):
    """Looks at gates, hooks and metrics while a run goes on."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.hooked = 0
        self.keys: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.keys = list(module.state_dict())

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})
        self.hooked = hooks_in(module)


def hooks_in(module: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


def model(optimizer: str = "adamw", **options: Any) -> TinyModule:
    torch.manual_seed(0)
    return TinyModule(optimizer, **options)


def fit(
    module: pl.LightningModule, root: Any, bits: AdaptiveBits | None, **options: Any
) -> tuple[pl.Trainer, list[float]]:
    losses = Losses()
    callbacks = [losses, *([] if bits is None else [bits]), *options.pop("callbacks", [])]
    resume = options.pop("ckpt_path", None)
    run = trainer("auto", str(root), devices=1, callbacks=callbacks, **options)
    run.fit(module, loader(), loader(8), ckpt_path=resume)
    return run, losses.values


def test_bits_come_down_and_the_model_is_given_back(tmp_path: Path) -> None:
    bits, spy, module = AdaptiveBits(**FAST), Spy(), model()
    run, losses = fit(module, tmp_path, bits, callbacks=[spy], max_epochs=8)
    _, exact = fit(model(), tmp_path, None, max_epochs=8)
    assert losses != exact
    assert losses[-1] < 0.2
    assert spy.hooked == 2
    assert hooks_in(module) == 0
    assert spy.keys == list(module.state_dict()) == list(model().state_dict())
    assert "configure_model" not in module.__dict__
    trained = bits.gates["net.head:input"].state.clone()
    run.optimizers[0].step()  # of the user's own from here on
    torch.testing.assert_close(bits.gates["net.head:input"].state, trained, rtol=0, atol=0)
    means = [metrics["adaptive_bits/mean"] for metrics in spy.metrics]
    assert means[0] < 5.0
    assert all(abs(mean - 4) <= 0.1 + 1e-3 for mean in means[-20:])
    last = spy.metrics[-1]
    assert set(last) >= {"adaptive_bits/net.blocks.0.input", "adaptive_bits/net.head.input"}
    assert last["adaptive_bits/effective"] > last["adaptive_bits/mean"]
    gates = bits.gates
    assert list(gates) == ["net.blocks.0:input", "net.head:input"]
    widths = torch.cat([gate.widths for gate in gates.values()]).double()
    assert abs(float(widths.mean()) - means[-1]) < 0.05
    assert len(widths.unique()) > 1


def test_a_target_that_was_not_reached_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"4.87 bits after 2 steps .* target of 4. Raise `beta`"):
        fit(model(), tmp_path, AdaptiveBits(**FAST), max_steps=2)
    with pytest.warns(UserWarning, match=r"Train on, or give fewer `reach_in_steps`, which are 9"):
        fit(model(), tmp_path, AdaptiveBits(**FAST, reach_in_steps=9), max_steps=2)
    bits = AdaptiveBits(**FAST, reach_in_steps=3)
    fit(model(), tmp_path, bits, max_steps=3)
    assert bits.optimizer is not None
    assert bits.optimizer.reached


def test_trained_widths_can_be_attached_again(tmp_path: Path) -> None:
    bits, module = AdaptiveBits(**FAST), model()
    with pytest.raises(RuntimeError, match=r"attach` needs trained widths"):
        bits.attach(module)
    saved = ModelCheckpoint(tmp_path, filename="last")
    run, _ = fit(module, tmp_path, bits, callbacks=[saved], enable_checkpointing=True)
    quantized = run.callback_metrics["val"]
    (plain,) = run.validate(module, loader(8), verbose=False)
    assert plain["val"] != quantized
    attached = bits.attach(module)
    (again,) = run.validate(module, loader(8), verbose=False)
    assert again["val"] == quantized
    attached.remove()
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    used = AdaptiveBits(**FAST)
    fit(model(), tmp_path, used, max_steps=1)
    for loaded in (AdaptiveBits(**FAST), used):  # which then has what was loaded, not its own
        loaded.load_state_dict(checkpoint["callbacks"]["AdaptiveBits"])
        attached = loaded.attach(module)
        (again,) = run.validate(module, loader(8), verbose=False)
        assert again["val"] == quantized
        attached.remove()


def same(one: Any, other: Any) -> bool:
    """Whether gates, what their optimizer knows, and the model are equal to the bit."""
    gates = [{k: v["state"] for k, v in run[0]["gates"].items()} for run in (one, other)]
    torch.testing.assert_close(*gates, rtol=0, atol=0)
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=0)
    rest = [{k: v for k, v in run[0].items() if k != "gates"} for run in (one, other)]
    return rest[0] == rest[1]


def test_resuming_is_exact_to_the_bit(tmp_path: Path) -> None:
    def run(folder: str, steps: int, resume: str | None = None) -> tuple[Any, Any, Any]:
        saved = ModelCheckpoint(
            tmp_path / folder, every_n_train_steps=8, save_top_k=-1, filename="{step}"
        )
        bits, module = AdaptiveBits(**FAST), model()
        options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [saved]}
        options |= {"max_epochs": -1, "max_steps": steps, "ckpt_path": resume}
        _, losses = fit(module, tmp_path, bits, **options)
        return bits.state_dict(), module.state_dict(), losses

    whole = run("whole", 32)
    assert whole[0]["reached"]
    run("half", 8)
    resumed = run("rest", 32, f"{tmp_path}/half/step=8.ckpt")
    assert same(resumed, whole)
    assert resumed[2] == whole[2][8:]
    settled = run("late", 32, f"{tmp_path}/whole/step=24.ckpt")
    assert same(settled, whole)


def test_a_second_fit_of_the_model_goes_on(tmp_path: Path) -> None:
    bits, module = AdaptiveBits(**FAST), model()
    fit(module, tmp_path, bits, max_steps=4)
    before = bits.gates["net.head:input"].q.clone()
    fit(module, tmp_path, bits, max_steps=0)
    torch.testing.assert_close(bits.gates["net.head:input"].q, before, rtol=0, atol=0)
    fit(model(), tmp_path, bits, max_steps=1)
    assert bits.optimizer is not None
    assert bits.optimizer.mean > 4.8  # of another model from the beginning


class Late(TinyModule):
    """Makes its layers where Lightning sets torch's default device and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            self.net = TinyLM()


def test_gates_are_made_anywhere(tmp_path: Path) -> None:
    """In ``configure_model``, and by the first tensor of a sanity check without gradients."""
    states = []
    for module, checks in ((model(), 0), (Late(), 2)):
        bits = AdaptiveBits(**FAST)
        run = trainer("auto", str(tmp_path), 1, callbacks=[bits], num_sanity_val_steps=checks)
        run.fit(module, loader(), loader(8))
        states.append([gate.state for gate in bits.gates.values()])
    torch.testing.assert_close(*states, rtol=0, atol=0)


class Gradients(pl.Callback):
    """What reaches the gates."""

    def __init__(self, bits: AdaptiveBits) -> None:
        self.bits, self.seen = bits, []

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.seen.append([gate.grad for gate in self.bits.gates.values()])


class Same(TinyModule):
    """Computes the same loss on all micro-batches."""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch(0, 0))
        return loss


def test_accumulated_gradients_are_the_mean_and_step_once(tmp_path: Path) -> None:
    results = []
    for windows in (1, 3):
        bits = AdaptiveBits(**FAST)
        seen = Gradients(bits)
        torch.manual_seed(0)
        options: dict[str, Any] = {"accumulate_grad_batches": windows, "max_steps": 2}
        run = trainer("auto", str(tmp_path), 1, callbacks=[seen, bits], **options)
        run.fit(Same("sgd"), loader())
        assert len(seen.seen) == 2
        results.append(seen.seen)
        state = bits.state_dict()["gates"]["net.head:input"]["state"]
        assert state[3].tolist() == [2.0] * 24  # Adam's steps
        assert state[4].tolist() == [32.0 * windows] * 24
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-7)


class Manual(TinyModule):
    """Manual optimization in the order of the documentation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, tokens: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.net(tokens)
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)


def test_manual_optimization_trains_the_same_gates(tmp_path: Path) -> None:
    states = []
    for kind in (TinyModule, Manual):
        bits = AdaptiveBits(**FAST)
        torch.manual_seed(0)
        run = trainer("auto", str(tmp_path), 1, callbacks=[bits])
        run.fit(kind(), loader())
        states.append(bits.state_dict()["gates"])
    assert states[0]["net.head:input"]["state"][3].tolist() == [8.0] * 24
    for one, other in zip(states[0].values(), states[1].values(), strict=True):
        torch.testing.assert_close(one["state"], other["state"], rtol=0, atol=0)
