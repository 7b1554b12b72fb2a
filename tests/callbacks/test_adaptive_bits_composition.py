"""The callback beside what else a run may use: precision, compilation, loggers, other callbacks."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy
from lightning.pytorch.tuner import Tuner
from lq_testing.activation_models import Module
from lq_testing.lightning_models import Losses, TinyModule, loader, trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lq_lightning import (
    ActivationQuantization,
    AdaptiveBits,
    MemoryBudget,
    QuantizedAdamW,
    QuantizedFSDPStrategy,
)

pytestmark = pytest.mark.filterwarnings("ignore:AdaptiveBits. the mean is")

FAST: dict[str, Any] = {"start_bits": 5.0, "learning_rate": 0.03, "beta": 1.0}
HEAD = "net.head:input"


def train(
    module: pl.LightningModule, root: Path, **options: Any
) -> tuple[AdaptiveBits, list[float]]:
    bits, losses = AdaptiveBits(**{**FAST, **options.pop("bits", {})}), Losses()
    callbacks = [bits, losses, *options.pop("callbacks", [])]
    run = trainer("auto", str(root), 1, callbacks=callbacks, **options)
    run.fit(module, loader(), loader(8))
    return bits, losses.values


def model(kind: Any = TinyModule, *args: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(*args, **options)


def states(bits: AdaptiveBits) -> dict[str, Tensor]:
    return {site: gate.state for site, gate in bits.gates.items()}


def equal(one: AdaptiveBits, other: AdaptiveBits, **tolerance: float) -> None:
    given = tolerance or {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(states(one), states(other), **given)


# --- precision, skipped steps ---------------------------------------------------------------------


class Scaled(MixedPrecision):
    """Loss scaling on a CPU, with fp32 inside."""

    def __init__(self, scale: float) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        super().__init__("16-mixed", "cpu", scaler)

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast("cpu", enabled=False)


def test_scaled_losses_train_the_same_gates(tmp_path: Path) -> None:
    plain, _ = train(model(), tmp_path)
    scaled, _ = train(model(), tmp_path, plugins=[Scaled(256.0)])
    equal(scaled, plain, rtol=1e-5, atol=1e-8)


class Overflows(TinyModule):
    """Has infinite gradients in the second step."""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(tokens)
        return loss * float("inf") if batch_idx == 1 else loss


@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
def test_steps_that_the_scaler_leaves_out_do_not_move_gates(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = model(Overflows, "sgd")
    if optimizer == "fused":  # skips inside of its step
        make = lambda: torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)  # noqa: E731
        monkeypatch.setattr(module, "configure_optimizers", make)
    bits, _ = train(module, tmp_path, plugins=[Scaled(256.0)], max_steps=4)
    for state in states(bits).values():
        assert state[3].tolist() == [3.0] * 24  # Adam's steps
        assert state.isfinite().all()
    assert bits.optimizer is not None
    assert bits.optimizer.skipped_lines == 0


def test_searching_a_learning_rate_leaves_no_trace(tmp_path: Path) -> None:
    bits = AdaptiveBits(**FAST)
    run = trainer("auto", str(tmp_path), 1, callbacks=[bits])
    module = model()
    Tuner(run).lr_find(module, loader(), num_training=4, update_attr=False)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    run.fit(module, loader())
    expected, _ = train(model(), tmp_path, limit_val_batches=0)
    equal(bits, expected)


def test_gradients_that_are_not_finite_are_named(tmp_path: Path) -> None:
    module = model(Overflows, "sgd")
    with pytest.warns(UserWarning, match="gradients of 48 gates are infinite or NaN"):
        bits, _ = train(module, tmp_path, max_steps=2)
    assert bits.metrics()["adaptive_bits/skipped_lines"] == 48.0
    assert all(state.isfinite().all() for state in states(bits).values())


class NoLoss(TinyModule):
    def training_step(self, tokens: Tensor, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(tokens, batch_idx)


class Small(TinyModule):
    def configure_optimizers(self) -> Any:
        return QuantizedAdamW(self.parameters(), lr=1e-3)


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None")
@pytest.mark.parametrize(
    ("kind", "skips", "steps"), [(NoLoss, False, 3), (Overflows, True, 3), (Small, False, 4)]
)
def test_gates_step_when_the_optimizer_of_the_model_does(
    kind: type[TinyModule], skips: bool, steps: int, tmp_path: Path
) -> None:
    """Not in batches without a loss or steps that the strategy leaves out."""
    strategy = QuantizedFSDPStrategy(skip_nonfinite_steps=True) if skips else "auto"
    bits = AdaptiveBits(**FAST)
    run = trainer(strategy, str(tmp_path), 1, callbacks=[bits], max_steps=4)
    warned = pytest.warns(UserWarning, match="optimizer step skipped") if skips else nullcontext()
    with warned:
        run.fit(model(kind), loader())
    assert states(bits)[HEAD][3].tolist() == [float(steps)] * 24


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_half_precision_trains(precision: Any, tmp_path: Path) -> None:
    bits, losses = train(model(), tmp_path, precision=precision, max_epochs=4)
    assert losses[-1] < losses[0]
    assert states(bits)[HEAD].dtype == torch.float32
    assert bits.optimizer is not None
    assert bits.optimizer.mean < 5.0


# --- what else runs a model -----------------------------------------------------------------------


class Checkpointed(TinyModule):
    """Recomputes its blocks in backward."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__("sgd")
        self.reentrant = reentrant

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        net, x = self.net, self.net.embed(tokens)
        for block in net.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        logits = net.head(x).flatten(0, 1)
        return nn.functional.cross_entropy(logits, tokens.flatten())


def test_checkpointed_blocks_count_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"bits": {"sites": "layers"}, "limit_val_batches": 0}
    plain, _ = train(model(Checkpointed), tmp_path, **options)
    assert states(plain)["net.blocks.1:output"][4].tolist() == [32.0] * 24
    for reentrant in (True, False):
        other, _ = train(model(Checkpointed, reentrant), tmp_path, **options)
        equal(other, plain)


class Silent(TinyModule):
    """Logs nothing, which dynamo cannot trace."""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(tokens)
        return loss

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        self.net(tokens)


def test_compiled_models_train_the_same_gates(tmp_path: Path) -> None:
    plain, losses = train(model(Silent), tmp_path, bits={"sites": "layers"})
    compiled = torch.compile(model(Silent), backend="eager")
    other, found = train(compiled, tmp_path, bits={"sites": "layers"})  # type: ignore[arg-type]
    assert found == pytest.approx(losses, rel=1e-5)
    equal(other, plain, rtol=1e-3, atol=1e-5)


class Frozen(TinyModule):
    """Adapters only: nothing in front of them needs a gradient."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.requires_grad_(False)
        self.net.blocks[1].requires_grad_(True)


def test_frozen_parts_and_a_users_sgd(tmp_path: Path) -> None:
    bits, _ = train(model(Frozen), tmp_path)
    assert (states(bits)["net.blocks.0:input"][2] > 0).all()  # squares of gradients


def test_saved_activations_as_codes_beside_it(tmp_path: Path) -> None:
    plain, expected = train(model(Module), tmp_path)
    other, losses = train(model(Module), tmp_path, callbacks=[ActivationQuantization("agoq")])
    assert losses == pytest.approx(expected, rel=0.05)
    assert losses != expected
    assert states(other)[HEAD][3].tolist() == [8.0] * 24
    budget = ActivationQuantization(budget=MemoryBudget("1GiB"))
    other, losses = train(model(Module), tmp_path, callbacks=[budget])
    assert losses == pytest.approx(expected, rel=0.05)
    # passes that measure the model are no part of the first step
    assert states(other)[HEAD][3].tolist() == [8.0] * 24
    assert states(other)[HEAD][4].tolist() == [32.0] * 24


class Measures(pl.Callback):
    """Takes gradients in front of a step, whose ``zero_grad`` drops them."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, tokens: Tensor, index: int
    ) -> None:
        module.net(tokens).backward()  # type: ignore[operator, union-attr]


def test_gradients_of_before_a_step_are_dropped(tmp_path: Path) -> None:
    equal(train(model(), tmp_path, callbacks=[Measures()])[0], train(model(), tmp_path)[0])


class Evaluates(TinyModule):
    """Takes gradients in validation, in the middle of an accumulation."""

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        if self.gradients:
            with torch.inference_mode(False), torch.enable_grad():
                torch.autograd.grad(self.net(tokens.clone()), self.net.embed.weight)

    gradients = True


def test_evaluation_has_the_same_widths_and_counts_nothing(tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "val_check_interval": 1}
    runs = []
    for gradients in (True, False):
        module = model(Evaluates, "sgd")
        module.gradients = gradients
        runs.append(train(module, tmp_path, inference_mode=False, **options)[0])
    equal(*runs)
    seen = []

    class Widths(pl.Callback):
        def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            seen.append(bits.gates[HEAD].widths)

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            seen.append(bits.gates[HEAD].widths)

    bits = AdaptiveBits(**FAST)
    run = trainer("auto", str(tmp_path), 1, callbacks=[bits, Widths()])
    run.fit(model(), loader(), loader(4))
    assert seen[-1].tolist() == seen[-2].tolist() != seen[0].tolist()


# --- loggers --------------------------------------------------------------------------------------


def test_loggers_get_a_picture_or_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    board = TensorBoardLogger(tmp_path)
    board.experiment.add_figure = lambda *a, **k: drawn.append((a, k))  # type: ignore[method-assign]
    table = CSVLogger(tmp_path)
    options: dict[str, Any] = {"histogram_every_n_steps": 3}
    train(model(), tmp_path, bits=options, logger=[board, table], log_every_n_steps=1)
    assert [(a[0], k["global_step"]) for a, k in drawn] == [
        ("adaptive_bits/histogram", 3),
        ("adaptive_bits/histogram", 6),
    ]
    axes = drawn[-1][0][1].axes[0]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert [label.split(" (mean ")[0] for label in labels] == ["net.blocks.0:input", HEAD]
    shown = Path(table.log_dir, "metrics.csv").read_text()
    for name in ("mean", "effective", "net.head.input", "p05", "p50", "p95"):
        assert f"adaptive_bits/{name}" in shown.splitlines()[0]


def test_without_matplotlib_there_are_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    board = TensorBoardLogger(tmp_path)
    logged: list[dict[str, float]] = []
    monkeypatch.setattr(board, "log_metrics", lambda metrics, step=None: logged.append(metrics))
    train(model(), tmp_path, bits={"histogram_every_n_steps": 4}, logger=board)
    percentiles = [m for m in logged if "adaptive_bits/p05" in m]
    assert len(percentiles) == 2
    values = list(percentiles[-1].values())
    assert values == sorted(values)
    assert 3 < values[0] < 5


# --- what is refused ------------------------------------------------------------------------------


class TwoOptimizers(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=1e-3) for _ in range(2)]


class Keeps(TinyModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net  # type: ignore[assignment]
        self.save_hyperparameters()


class Unused(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 3).requires_grad_(False)


class Other(AdaptiveBits):
    """Which Lightning takes for another callback."""


class AddsOther(TinyModule):
    def configure_callbacks(self) -> Any:
        return [AdaptiveBits(), Other()]


def test_refusals_before_the_first_step(tmp_path: Path) -> None:
    def refused(
        match: str, module: Any = None, kind: type[Exception] = ValueError, **options: Any
    ) -> None:
        module = model() if module is None else module
        with pytest.raises(kind, match=match):
            train(module, tmp_path, **options)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
        assert "configure_model" not in module.__dict__

    # As docs/troubleshooting.md has it.
    refused("2 `AdaptiveBits`, but all sites share one mean", callbacks=[Other()])
    refused("2 `AdaptiveBits`, but all sites share one mean", callbacks=[AdaptiveBits()])
    refused("two `AdaptiveBits` in the Trainer", AddsOther())
    refused("configure_optimizers` returns 2", TwoOptimizers())
    refused(r"`TinyModule` has no module of that name.*boundaries", bits={"sites": ["net.blok.*"]})
    refused(r"holds the module `net`.*ignore=\['net'\]", Keeps(TinyModule().net))
    refused("does not encode fp64", precision="64-true")
    refused(
        r"nothing passed the site `extra:output` in the first step",
        Unused(),
        RuntimeError,
        bits={"sites": ["boundaries", "extra"]},
    )
    refused(
        r"site `net.embed:input` has a tensor of torch.int64", bits={"sites": "net.embed:input"}
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"target": 20.0}, r"`AdaptiveBits\(target=20.0"),
        ({"target": 1}, "target=1.* above `min_bits=1` and below `max_bits=8`: .* reach neither"),
        ({"target": "four"}, r"`AdaptiveBits\(target='four'\)` must be a number"),
        ({"target": True}, "target=True.* must be a number"),
        ({"beta": "much"}, r"`AdaptiveBits\(beta='much'\)` must be 0 or more"),
        ({"target": 7.0, "start_bits": 6.0}, r"start_bits=6, target=7"),
        ({"histogram_every_n_steps": -1}, "histogram_every_n_steps=-1"),
    ],
)
def test_refuses_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        AdaptiveBits(**options)


class Foreign:
    """A strategy of the separate package, as far as it matters."""

    __module__ = "pytorch_lightning.strategies.single_device"


def test_refuses_strategies_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        callbacks: Any = ()
        precision = "32-true"

        def __init__(self, strategy: Any, device: str = "cpu", **facts: Any) -> None:
            self.strategy = strategy.__new__(strategy)
            monkeypatch.setattr(strategy, "root_device", torch.device(device), raising=False)
            for name, value in facts.items():
                monkeypatch.setattr(strategy, name, value, raising=False)

    for fake, match in (
        (Fake(FSDPStrategy), "does not work with `FSDPStrategy`"),
        (Fake(DeepSpeedStrategy), "does not work with `DeepSpeedStrategy`"),
        (Fake(Foreign), "`pytorch_lightning`: import Trainer and LightningModule from lightning"),
        (Fake(SingleDeviceStrategy, "mps"), "device 'mps'"),
        (Fake(QuantizedFSDPStrategy, nodes_train_alone=True), "with `local_steps` nodes take"),
    ):
        with pytest.raises(ValueError, match=match):
            AdaptiveBits().setup(fake, model(), "fit")  # type: ignore[arg-type]


def test_checkpoints_of_other_gates_are_refused(tmp_path: Path) -> None:
    one, _ = train(model(), tmp_path, max_steps=1)
    other, _ = train(model(), tmp_path, bits={"sites": "layers"}, max_steps=1)
    other._placement = object()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="the saved gates are `net.blocks.0:input`"):
        other.load_state_dict(one.state_dict())
    AdaptiveBits().load_state_dict({})
