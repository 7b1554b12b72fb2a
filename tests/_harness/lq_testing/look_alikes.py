"""Modules that look like what has codes, and compute something else: one row each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

WIDTH = 64
Forward = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A module to attack with.

    Attributes:
        build: makes it, fp32.
        shape: of its input.
        dtype: of its input and parameters.
        scale: of its input.
        after: changes it once codes are installed.
        training: in which mode it runs.
        calls: how often it runs; outputs are added.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (2, 16, WIDTH)
    dtype: torch.dtype = torch.float32
    scale: float = 2.0
    after: Callable[[nn.Module], Any] | None = None
    training: bool = True
    calls: int = 1


def made(name: str, forward: Forward, **attributes: Any) -> nn.Module:
    """A module of a class of that name; parameters, buffers and children among its attributes."""

    def __init__(self: nn.Module) -> None:
        nn.Module.__init__(self)
        for key, value in attributes.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(key, value)
            else:
                setattr(self, key, value)

    made: nn.Module = type(name, (nn.Module,), {"__init__": __init__, "forward": forward})()
    return made


def parameter(*shape: int, around: float = 1.0) -> nn.Parameter:
    return nn.Parameter(around + 0.3 * torch.randn(*shape))


def normalized(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class Doubled(torch.autograd.Function):
    """The input itself, with twice the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * dy


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class GlobalState:
    calls = 0


def _norm(forward: Forward, **attributes: Any) -> Callable[[], nn.Module]:
    return lambda: made(
        "LookAlikeNorm", forward, weight=parameter(WIDTH), eps=1e-6,
        **{k: v() if callable(v) and not isinstance(v, nn.Module) else v
           for k, v in attributes.items()},
    )  # fmt: skip


def _counting_norm(self: Any, x: Tensor) -> Tensor:
    self.calls = self.calls + 1
    return normalized(x) * self.weight * (1 + self.calls % 2)


def _caching_norm(self: Any, x: Tensor) -> Tensor:
    y = normalized(x) * self.weight + (self.cache[-1] if self.cache else 0.0)
    self.cache.append(y.detach())
    return y


def _stateful_norm(self: Any, x: Tensor) -> Tensor:
    self.running.mul_(0.9).add_(x.detach().mean())
    return normalized(x) * self.weight


def _hooked_norm(self: Any, x: Tensor) -> Tensor:
    y = normalized(x) * self.weight
    if y.requires_grad:
        y.register_hook(lambda g: 2 * g)
    return y


def _global_norm(self: Any, x: Tensor) -> Tensor:
    GlobalState.calls += 1
    return normalized(x) * self.weight * (1.0 + GlobalState.calls % 2)


def _no_grad_norm(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
    return x * scale * self.weight


def _swallowing_norm(self: Any, x: Tensor) -> Tensor:
    try:
        large = bool(x.abs().max() > 3)
    except Exception:
        large = False
    return normalized(x) * self.weight * (2.0 if large else 1.0)


def _branching(factor: float = 1.5) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = normalized(x) * self.weight
        return factor * y if self.test(self, x) else y

    return forward


def _norms() -> Iterator[tuple[str, Row]]:
    simple: dict[str, Forward] = {
        "clamped output": lambda self, x: (normalized(x) * self.weight).clamp(-2, 2),
        "clamped input": lambda self, x: normalized(x.clamp(-1, 1)) * self.weight,
        "bounded input": lambda self, x: normalized(x.clamp(max=3.0)) * self.weight,
        "over tokens": lambda self, x: (
            x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.eps) * self.weight
        ),
        "over all": lambda self, x: x * torch.rsqrt(x.pow(2).mean() + self.eps) * self.weight,
        "absolute weight": lambda self, x: normalized(x) * (self.weight - 1).abs(),
        "square of the weight": lambda self, x: normalized(x) * self.weight.square(),
        "frozen weight": lambda self, x: normalized(x) * self.weight.detach(),
        "weight's data": lambda self, x: normalized(x) * self.weight.data,
        "scaled": lambda self, x: normalized(x) * self.weight * 8.0,
        "detached scale": lambda self, x: (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps).detach() * self.weight
        ),
        "scale without gradients": _no_grad_norm,
        "doubled gradient": lambda self, x: Doubled.apply(normalized(x)) * self.weight,
        "doubled gradient of the input": lambda self, x: normalized(Doubled.apply(x)) * self.weight,
        "hook on its output": _hooked_norm,
        "eps outside": lambda self, x: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 0.3),
        "eps of the dtype": lambda self, x: normalized(x, torch.finfo(x.dtype).eps) * self.weight,
        "sum": lambda self, x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps),
        "absolute mean": lambda self, x: x / (x.abs().mean(-1, keepdim=True) + self.eps),
        "unbiased": lambda self, x: (
            (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + self.eps).sqrt()
        ),
        "half of a row": lambda self, x: (
            x * torch.rsqrt(x[..., :32].pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        ),
        "heads": lambda self, x: normalized(x.unflatten(-1, (4, 16))).flatten(-2) * self.weight,
        "reversed": lambda self, x: normalized(x.flip(-1)) * self.weight,
        "shifted": lambda self, x: normalized(x.roll(1, -1)) * self.weight,
        "residual": lambda self, x: x + normalized(x) * self.weight,
        "twice": lambda self, x: normalized(normalized(x) * self.weight),
        "dropout": lambda self, x: F.dropout(normalized(x) * self.weight, 0.3, self.training),
        "noise": lambda self, x: normalized(x) * self.weight + 0.1 * torch.randn_like(x),
        "tanh": lambda self, x: torch.tanh(x) * self.weight,
        "rounded": lambda self, x: normalized(x).half().float().mul(8).round().div(8) * self.weight,
        "first rows": lambda self, x: F.pad(normalized(x[:, :8]), (0, 0, 0, 8)) * self.weight,
        "weight of the mean": lambda self, x: normalized(x) * self.weight.mean(),
        "softmax of the weight": lambda self, x: normalized(x) * 64 * self.weight.softmax(-1),
        "of a global": _global_norm,
        "swallows errors": _swallowing_norm,
        "by NumPy": lambda self, x: normalized(x) * self.weight * (1 + np.random.rand()),
        "by chance": lambda self, x: normalized(x) * self.weight * (1 + random.random()),
        "to the power": lambda self, x: (
            x * (x.pow(2).mean(-1, keepdim=True) + self.eps) ** -0.25 * self.weight
        ),
    }
    for name, forward in simple.items():
        yield f"norm: {name}", Row(build=_norm(forward))
    branches: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, Any]]] = {
        "3-D": (lambda self, x: x.dim() == 3, {}),
        "4-D": (lambda self, x: x.ndim == 4, {"shape": (2, 2, 8, WIDTH)}),
        "many rows": (lambda self, x: x.shape[1] > 8, {}),
        "many rows by size": (lambda self, x: x.size(1) > 8, {}),
        "many values": (lambda self, x: x.numel() > 512, {}),
        "length": (lambda self, x: len(x) == 2, {}),
        "large values": (lambda self, x: x.abs().max() > 3, {}),
        "large values as a number": (lambda self, x: x.abs().max().item() > 3, {}),
        "large values by NumPy": (lambda self, x: x.detach().numpy().max() > 3, {}),
        "large values in a list": (lambda self, x: max(x.flatten().tolist()) > 3, {}),
        "stride": (lambda self, x: x.is_contiguous(), {}),
        "needs a gradient": (lambda self, x: x.requires_grad, {}),
        "gradients on": (lambda self, x: torch.is_grad_enabled(), {}),
        "training": (lambda self, x: self.training, {}),
        "evaluation": (lambda self, x: not self.training, {"training": False}),
        "bf16": (lambda self, x: x.dtype == torch.bfloat16, {"dtype": torch.bfloat16}),
        "5-D in evaluation": (
            lambda self, x: x.dim() == 5 and not self.training,
            {"shape": (2, 1, 2, 8, WIDTH), "training": False},
        ),
        "6-D": (lambda self, x: x.dim() == 6, {"shape": (1, 2, 1, 2, 8, WIDTH)}),
        "1-D": (lambda self, x: x.dim() == 1, {"shape": (WIDTH,)}),
    }
    for name, (test, options) in branches.items():

        def build(test: Any = test) -> nn.Module:
            return _norm(_branching(), test=lambda: staticmethod(test).__func__)()

        yield f"norm: branch on {name}", Row(build=build, **options)
    more: dict[str, Row] = {
        "counts calls": Row(build=_norm(_counting_norm, calls=0), calls=2),
        "keeps its output": Row(build=_norm(_caching_norm, cache=list), calls=2),
        "object that counts": Row(build=_norm(_growing_norm, grows=Grows), calls=2),
        "object with a list": Row(build=_norm(_listing_norm, grows=Grows), calls=2),
        "method of a list": Row(build=_norm(_appending_norm, add=lambda: [].append), calls=2),
        "device": Row(
            build=_norm(
                lambda self, x: (
                    normalized(x) * self.weight * (2.0 if x.device.type == "cpu" else 1.0)
                )
            )
        ),
        "statistics": Row(build=_norm(_stateful_norm, running=lambda: torch.zeros(()))),
        "scalar gain": Row(
            build=_norm(
                lambda self, x: normalized(x) * self.weight * self.gain, gain=lambda: parameter(1)
            )
        ),
        "gain in a buffer": Row(
            build=_norm(
                lambda self, x: normalized(x) * self.weight * self.gain,
                gain=lambda: torch.tensor(2.0),
            )
        ),
        "learnable eps": Row(
            build=lambda: made(
                "EpsNorm",
                lambda self, x: normalized(x, self.eps),
                eps=nn.Parameter(torch.tensor(0.1)),
            )
        ),
        "weight of one": Row(
            build=lambda: made(
                "ScaleNorm",
                lambda self, x: normalized(x) * self.weight,
                weight=parameter(1),
                eps=1e-6,
            )
        ),
        "weight of rows": Row(
            build=lambda: made(
                "RowsNorm",
                lambda self, x: normalized(x) * self.weight,
                weight=parameter(16, 1),
                eps=1e-6,
            )
        ),
        "weight with two dimensions": Row(
            build=lambda: made(
                "TwoNorm",
                lambda self, x: normalized(x) * self.weight,
                weight=parameter(1, WIDTH),
                eps=1e-6,
            )
        ),
        "weight in place of bias": Row(
            build=lambda: made(
                "BiasNorm",
                lambda self, x: normalized(x) + self.weight,
                weight=parameter(WIDTH),
                eps=1e-6,
            )
        ),
        "weight added to bias": Row(
            build=lambda: made(
                "AddNorm",
                lambda self, x: normalized(x) * (1 + self.weight) + self.bias + 1,
                weight=parameter(WIDTH),
                bias=parameter(WIDTH),
                eps=1e-6,
            )
        ),
        "one group, channels wide": Row(
            build=lambda: nn.GroupNorm(1, WIDTH), shape=(2, WIDTH, WIDTH)
        ),
        "a group each, channels wide": Row(
            build=lambda: nn.GroupNorm(WIDTH, WIDTH), shape=(2, WIDTH, WIDTH)
        ),
        "one group, images": Row(build=lambda: nn.GroupNorm(1, WIDTH), shape=(1, WIDTH, 2, WIDTH)),
        "one group, rows": Row(build=lambda: nn.GroupNorm(1, WIDTH), shape=(32, WIDTH)),
        "batch": Row(build=lambda: nn.BatchNorm1d(WIDTH), shape=(32, WIDTH)),
        "instances": Row(build=lambda: nn.InstanceNorm1d(16, affine=True)),
        "local response": Row(build=lambda: nn.LocalResponseNorm(2)),
        "several dimensions": Row(build=lambda: nn.LayerNorm((16, WIDTH))),
        "parametrized": Row(build=_parametrized_norm),
        "hooked": Row(build=lambda: hooked(nn.LayerNorm(WIDTH))),
        "hooked before": Row(build=lambda: hooked_before(nn.LayerNorm(WIDTH))),
        "hooked gradient": Row(build=lambda: hooked_backward(nn.LayerNorm(WIDTH))),
        "forward of the instance": Row(build=_instance_norm),
        "later eps": Row(
            build=lambda: nn.LayerNorm(WIDTH), after=lambda module: setattr(module, "eps", 3.0)
        ),
        "later forward": Row(
            build=lambda: type(
                "PatchedNorm",
                (nn.LayerNorm,),
                {"forward": lambda self, x: nn.LayerNorm.forward(self, x)},
            )(WIDTH),
            after=lambda module: setattr(type(module), "forward", lambda self, x: 3 * x),
        ),
        "later hook": Row(build=lambda: nn.RMSNorm(WIDTH), after=hooked),
        "changed settings": Row(
            build=_norm(
                lambda self, x: normalized(x, self.config.eps) * self.weight,
                config=lambda: Config(eps=1e-6),
            ),
            after=lambda module: setattr(module.config, "eps", 3.0),
        ),
    }
    for name, row in more.items():
        yield f"norm: {name}", row


class Grows:
    """Settings that are none."""

    def __init__(self) -> None:
        self.items: list[float] = []

    def add(self) -> int:
        self.items.append(1.0)
        return len(self.items)


def _growing_norm(self: Any, x: Tensor) -> Tensor:
    return normalized(x) * self.weight * (1 + self.grows.add() % 2)


def _listing_norm(self: Any, x: Tensor) -> Tensor:
    self.grows.items.append(1.0)
    return normalized(x) * self.weight * (1 + len(self.grows.items) % 2)


def _appending_norm(self: Any, x: Tensor) -> Tensor:
    self.add(1.0)
    return normalized(x) * self.weight


class Config:
    """Settings, as models have them."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, y: 1.5 * y)
    return module


def hooked_before(module: nn.Module) -> nn.Module:
    module.register_forward_pre_hook(lambda module, args: (args[0] + 1.0,))
    return module


def hooked_backward(module: nn.Module) -> nn.Module:
    module.register_full_backward_hook(lambda module, dx, dy: tuple(2 * g for g in dx))
    return module


def _parametrized_norm() -> nn.Module:
    norm = nn.LayerNorm(WIDTH)
    parametrize.register_parametrization(norm, "weight", Twice())
    return norm


def _instance_norm() -> nn.Module:
    norm = nn.LayerNorm(WIDTH)
    own = norm.forward
    norm.forward = lambda x: 2 * own(x)  # type: ignore[method-assign]
    return norm


def _alike(function: Forward, **attributes: Any) -> Callable[[], nn.Module]:
    return lambda: made(
        "LookAlikeGELU", function,
        **{k: v() if callable(v) and not isinstance(v, nn.Module) else v
           for k, v in attributes.items()},
    )  # fmt: skip


def _attribute(function: Callable[..., Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        holder = made("Holder", lambda self, x: self.activation(x) + 0.0 * x)
        holder.activation = function  # type: ignore[assignment]
        return holder

    return build


def _closure_of(value: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.gelu(x) * value


def _inplace_kept(self: Any, x: Tensor) -> Tensor:
    y = x * 1.0
    z = self.activation(y)
    return y + z


def _activations() -> Iterator[tuple[str, Row]]:
    forwards: dict[str, Forward] = {
        "clamped GELU": lambda self, x: F.gelu(x).clamp(max=1.0),
        "GELU clamped far away": lambda self, x: F.gelu(x.clamp(max=7.0)),
        "clipped GELU": lambda self, x: torch.clip(F.gelu(x), -10, 2),
        "clamped SiLU": lambda self, x: F.silu(x.clamp(-3, 3)),
        "scaled": lambda self, x: 1.1 * F.gelu(x),
        "of a scaled input": lambda self, x: F.gelu(1.1 * x),
        "another coefficient": lambda self, x: x * torch.sigmoid(1.6 * x),
        "detached gate": lambda self, x: x * torch.sigmoid(x).detach(),
        "detached input": lambda self, x: x.detach() * torch.sigmoid(x),
        "data of the gate": lambda self, x: x * torch.sigmoid(x).data,
        "doubled gradient": lambda self, x: F.gelu(Doubled.apply(x)),
        "in training": lambda self, x: F.gelu(x) * (2.0 if self.training else 1.0),
        "by size": lambda self, x: F.gelu(x) * (2.0 if x.numel() > 512 else 1.0),
        "by width": lambda self, x: F.gelu(x) * (2.0 if x.shape[-1] == WIDTH else 1.0),
        "by dimensions": lambda self, x: F.gelu(x) * (2.0 if x.dim() == 3 else 1.0),
        "by values": lambda self, x: F.gelu(x) if x.max() < 3 else F.relu(x),
        "softplus": lambda self, x: x * torch.tanh(F.softplus(x)),
        "leaky": lambda self, x: F.leaky_relu(x, 0.2),
        "of some channels": lambda self, x: torch.cat([F.gelu(x[..., :48]), x[..., 48:]], -1),
        "along a row": lambda self, x: F.gelu(x).cumsum(-1) / WIDTH,
        "mean": lambda self, x: F.gelu(x) - F.gelu(x).mean(-1, keepdim=True),
        "without gradients": lambda self, x: x + (F.gelu(x) - x).detach(),
        "squared ReLU, bounded": lambda self, x: F.relu6(x).square(),
        "cubed ReLU": lambda self, x: F.relu(x).pow(3),
        "ReLU above one": lambda self, x: F.relu(x - 1),
        "threshold": lambda self, x: F.threshold(x, 0.1, 0.0),
        "dropout": lambda self, x: F.dropout(F.gelu(x), 0.2, self.training),
    }
    for name, forward in forwards.items():
        yield f"activation: {name}", Row(build=_alike(forward))
    beta = {"beta": lambda: parameter(1)}
    modules: dict[str, Row] = {
        "ReLU6": Row(build=nn.ReLU6, scale=6.0),
        "in place": Row(build=lambda: made("Holder", _inplace_kept, activation=nn.ReLU(True))),
        "in place by a function": Row(
            build=lambda: made("Holder", _inplace_kept, activation=_static(torch.relu_))
        ),
        "leaky module": Row(build=nn.LeakyReLU),
        "Swish with a slope": Row(
            build=_alike(lambda self, x: x * torch.sigmoid(self.beta * x), **beta)
        ),
        "buffer": Row(
            build=_alike(lambda self, x: F.gelu(x) * self.gain, gain=lambda: torch.tensor(1.5))
        ),
        "buffer of one": Row(
            build=_alike(lambda self, x: F.gelu(x) * self.gain, gain=lambda: torch.tensor(1.0)),
            after=lambda module: module.gain.fill_(3.0),
        ),
        "later gain": Row(
            build=_alike(lambda self, x: F.gelu(x) * self.gain, gain=1.0),
            after=lambda module: setattr(module, "gain", 2.0),
        ),
        "later limit": Row(
            build=_alike(
                lambda self, x: (
                    F.gelu(x) if self.limit is None else F.gelu(x).clamp(max=self.limit)
                ),
                limit=None,
            ),
            after=lambda module: setattr(module, "limit", 0.5),
        ),
        "limit that the class gets": Row(
            build=_alike(lambda self, x: F.gelu(x).clamp(max=getattr(self, "limit", 9.0)))
        ),
        "limit by `hasattr`": Row(
            build=_alike(
                lambda self, x: F.gelu(x).clamp(max=0.5) if hasattr(self, "limit") else F.gelu(x)
            ),
            after=lambda module: setattr(module, "limit", 0.5),
        ),
        "approximate, later": Row(
            build=nn.GELU, after=lambda module: setattr(module, "approximate", "tanh")
        ),
        "hooked": Row(build=lambda: hooked(nn.GELU())),
        "hooked gradient": Row(build=lambda: hooked_backward(nn.SiLU())),
        "child with a hook": Row(
            build=lambda: made("WrapsGELU", lambda self, x: self.act(x), act=hooked(nn.GELU()))
        ),
        "child with a later hook": Row(
            build=lambda: made("WrapsGELU", lambda self, x: self.act(x), act=nn.GELU()),
            after=lambda module: hooked(module.act),
        ),
        "child changed later": Row(
            build=lambda: made("WrapsGELU", lambda self, x: self.act(x), act=nn.GELU()),
            after=lambda module: setattr(module, "act", nn.ReLU6()),
        ),
        "child that counts": Row(
            build=lambda: made(
                "WrapsGELU", lambda self, x: self.act(x), act=made("Counter", _counting, calls=0)
            ),
            calls=2,
        ),
        "called by a class of its own": Row(build=lambda: _Calling()),
        "function: relu6": Row(build=_attribute(F.relu6), scale=6.0),
        "function: hardswish": Row(build=_attribute(F.hardswish)),
        "function: closure over a tensor": Row(build=_attribute(_closure_of(torch.tensor(2.0)))),
        "function: closure over a number": Row(build=_attribute(_closure_of(2.0))),
        "function: closure over a list": Row(
            build=lambda: _attribute(_closure_of_list())(),
            after=lambda module: module.activation.numbers.append(3.0),
        ),
        "function: clamped": Row(build=_attribute(lambda x: F.gelu(x).clamp(max=1.0))),
        "function: by size": Row(
            build=_attribute(lambda x: F.gelu(x) * (2.0 if x.shape[0] == 2 else 1.0))
        ),
        "function: set later": Row(
            build=_attribute(F.gelu), after=lambda module: setattr(module, "activation", F.relu6)
        ),
        "function: default tensor": Row(build=_attribute(partial(_gained, gain=torch.tensor(1.5)))),
    }
    for name, row in modules.items():
        yield f"activation: {name}", row


def _gained(x: Tensor, gain: Tensor) -> Tensor:
    return F.gelu(x) * gain


def _static(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _closure_of_list() -> Any:
    numbers = [1.0]

    def function(x: Tensor) -> Tensor:
        return F.gelu(x) * sum(numbers)

    function.numbers = numbers  # type: ignore[attr-defined]
    return function


def _counting(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return F.gelu(x) * (1 + self.calls % 2)


class _Calling(nn.GELU):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


ROWS: dict[str, Row] = dict([*_norms(), *_activations()])
