"""A gated model in a LightningModule, and what tests ask of a run whose activations are codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lq_lightning import ActivationPolicy, ActivationQuantization
from lq_testing.lightning_models import Losses, TinyModule, loader, trainer
from lq_testing.models import WIDTH, TinyLM, batch

INT8 = ActivationPolicy(norm="int8", activation="int8")


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, 8 * WIDTH, bias=False)
        self.up_proj = nn.Linear(WIDTH, 8 * WIDTH, bias=False)
        self.down_proj = nn.Linear(8 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class GatedBlock(nn.Module):
    """Llama's half of a layer: a norm and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Module(TinyModule):
    """Two gated blocks, made where `where` says."""

    def __init__(self, where: str = "__init__", block: type[nn.Module] = GatedBlock) -> None:
        super().__init__(lr=1e-2)
        self.where, self.block = where, block
        del self.net
        self.make("__init__")

    def make(self, here: str) -> None:
        if here == self.where:
            torch.manual_seed(0)
            self.net = TinyLM(self.block)  # type: ignore[arg-type]
            self.where = ""

    def setup(self, stage: str) -> None:
        self.make("setup")

    def configure_model(self) -> None:
        self.make("configure_model")


def codes(function: Callable[[], Any]) -> int:
    """Count our operators that a function runs, in compiled code too."""
    with torch.autograd.profiler.profile() as profile:
        function()
    ours = ("lq_lightning::norm", "lq_lightning::activation")  # others encode messages
    return sum(e.count for e in profile.key_averages() if e.key.startswith(ours))


def backward(module: Any) -> None:
    """A pass in training mode, with gradients."""
    module.train()
    with torch.enable_grad():
        module.net(batch(0, 0)).backward()
    module.zero_grad()


def snapshot(module: nn.Module) -> Any:
    """All that the callback could leave behind."""
    modules = {name: (type(m), dict(m.__dict__)) for name, m in module.named_modules() if name}
    for _, attributes in modules.values():
        for name in ("_parameters", "_buffers", "training"):
            attributes.pop(name)
    own = module.__dict__.get("configure_model")
    return modules, own, repr(module), list(module.state_dict())


class Inside(pl.Callback):
    """Looks at the model while it trains, and may end that."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error, self.names, self.codes = error, [], 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.repr, self.keys = repr(pl_module), list(pl_module.state_dict())
        sites = {n: m.__dict__.get("_lq_site") for n, m in pl_module.named_modules()}
        self.names = [name for name, site in sites.items() if site is not None and site.codec]
        self.codes = codes(lambda: backward(pl_module))
        if self.error is not None:
            raise self.error


def fit(
    module: pl.LightningModule,
    root: Any,
    recipe: Any = None,
    strategy: Any = "auto",
    devices: int = 1,
    **options: Any,
) -> tuple[pl.Trainer, list[float]]:
    losses = Losses()
    callbacks = [losses, *options.pop("callbacks", [])]
    if recipe is not None:
        callbacks.append(ActivationQuantization(recipe))
    run = trainer(strategy, str(root), devices, callbacks=callbacks, **options)
    run.fit(module, loader(), loader(8))
    return run, losses.values


def close(losses: list[float], expected: list[float], tolerance: float = 2e-3) -> bool:
    assert len(losses) == len(expected) > 3
    return all(abs(a / b - 1) < tolerance for a, b in zip(losses, expected, strict=True))
