"""Modules made of operators at random: norms, functions, MLPs, with something more somewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

WIDTH, INNER = 32, 32
Steps = tuple[tuple[str, str, float], ...]  # condition, operator, constant


class Doubled(torch.autograd.Function):
    """The input, with twice its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 2 * dy


def _without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 1.0


# Takes the module, a value, the module's input, and a constant.
OPERATORS: dict[str, Callable[[Any, Tensor, Tensor, float], Tensor]] = {
    "times one": lambda m, t, x, c: t * 1.0,
    "plus zero": lambda m, t, x, c: t + 0.0,
    "times": lambda m, t, x, c: t * c,
    "divided": lambda m, t, x, c: t / c,
    "times and divided": lambda m, t, x, c: t * c / c,
    "plus": lambda m, t, x, c: t + c,
    "negative": lambda m, t, x, c: -t,
    "negative twice": lambda m, t, x, c: t.neg().neg(),
    "at most": lambda m, t, x, c: t.clamp(max=c),
    "at least": lambda m, t, x, c: t.clamp(min=-c),
    "at least zero": lambda m, t, x, c: t.clamp(min=0),
    "far clamp": lambda m, t, x, c: t.clamp(-1e4, 1e4),
    "hardtanh": lambda m, t, x, c: F.hardtanh(t, -c, c),
    "relu": lambda m, t, x, c: F.relu(t),
    "relu6": lambda m, t, x, c: F.relu6(t),
    "gelu": lambda m, t, x, c: F.gelu(t),
    "silu": lambda m, t, x, c: F.silu(t),
    "tanh": lambda m, t, x, c: torch.tanh(t),
    "sigmoid": lambda m, t, x, c: torch.sigmoid(t),
    "leaky": lambda m, t, x, c: F.leaky_relu(t, 0.1),
    "gain": lambda m, t, x, c: t * m.gain,
    "gains": lambda m, t, x, c: t * m.gains,
    "buffer": lambda m, t, x, c: t * m.buffer,
    "residual": lambda m, t, x, c: t + c * x,
    "product": lambda m, t, x, c: t * x,
    "square": lambda m, t, x, c: t * t.abs(),
    "less its mean": lambda m, t, x, c: t - t.mean(-1, keepdim=True),
    "less the mean of tokens": lambda m, t, x, c: t - t.mean(0, keepdim=True),
    "normalized": lambda m, t, x, c: F.layer_norm(t, t.shape[-1:]),
    "detached": lambda m, t, x, c: t.detach(),
    "half detached": lambda m, t, x, c: t + (c * t).detach(),
    "data": lambda m, t, x, c: t.data,
    "without gradients": lambda m, t, x, c: t + _without_gradients(t),
    "doubled gradient": lambda m, t, x, c: Doubled.apply(t),
    "float": lambda m, t, x, c: t.float().to(x.dtype),
    "bf16": lambda m, t, x, c: t.bfloat16().to(x.dtype),
    "contiguous": lambda m, t, x, c: t.contiguous().clone(),
    "views": lambda m, t, x, c: t.flatten().view(t.shape),
    "transposed": lambda m, t, x, c: t.transpose(0, -2).contiguous().transpose(0, -2),
    "flipped": lambda m, t, x, c: t.flip(-1),
    "halves": lambda m, t, x, c: torch.cat(t.chunk(2, -1)[::-1], -1),
    "no dropout": lambda m, t, x, c: F.dropout(t, 0.0, m.training),
    "resting dropout": lambda m, t, x, c: m.drop(t),
    "child": lambda m, t, x, c: m.child(t),
    "in place": lambda m, t, x, c: (t * 1.0).mul_(c),
    "counted": lambda m, t, x, c: _counted(m, t, c),
}
CONDITIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "": lambda m, x: True,
    "training": lambda m, x: m.training,
    "evaluation": lambda m, x: not m.training,
    "3-D": lambda m, x: x.dim() == 3,
    "4-D": lambda m, x: x.dim() == 4,
    "rows": lambda m, x: x.shape[0] > 3,
    "values": lambda m, x: x.numel() > 256,
    "large": lambda m, x: x.max() > 2.0,
    "item": lambda m, x: x.min().item() < -2.0,
    "dtype": lambda m, x: x.dtype == torch.float32,
    "gradient": lambda m, x: x.requires_grad,
    "attribute": lambda m, x: m.flag,
}


def _counted(module: Any, t: Tensor, c: float) -> Tensor:
    module.calls += 1
    return t * c if module.calls % 2 else t


class Made(nn.Module):
    """Base: does the steps that belong to a place."""

    def __init__(self) -> None:
        super().__init__()
        self.flag, self.calls = True, 0
        self.steps: tuple[tuple[str, Steps], ...] = ()

    def own(self, steps: tuple[tuple[str, Steps], ...]) -> None:
        """Take steps, and get what they need."""
        self.steps = steps
        used = {name for _, each in steps for _, name, _ in each}
        if "gain" in used:
            self.gain = nn.Parameter(torch.tensor(1.3))
        if "gains" in used:
            self.gains = nn.Parameter(torch.full((WIDTH,), 1.3))
        if "buffer" in used:
            self.register_buffer("buffer", torch.tensor(1.3))
        if "resting dropout" in used:
            self.drop = nn.Dropout(0.0)
        if "child" in used:
            self.child = nn.Hardswish() if self.flag else nn.Identity()

    def at(self, place: str, t: Tensor, x: Tensor) -> Tensor:
        for where, steps in self.steps:
            if where == place:
                for condition, name, constant in steps:
                    if CONDITIONS[condition](self, x):
                        t = OPERATORS[name](self, t, x, constant)
        return t


class MadeNorm(Made):
    """A norm in one of several spellings."""

    places = ("in", "statistics", "normalized", "out")

    def __init__(self, spelling: int) -> None:
        super().__init__()
        self.spelling, self.eps = spelling, 1e-5
        self.weight = nn.Parameter(1.0 + 0.3 * torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        t = self.at("in", x, x)
        if self.spelling == 0:
            y = F.layer_norm(t, (WIDTH,), self.weight, None, self.eps)
            return self.at("out", self.at("normalized", y, x), x)
        if self.spelling == 1:
            y = F.rms_norm(t, (WIDTH,), self.weight, self.eps)
            return self.at("out", self.at("normalized", y, x), x)
        if self.spelling == 2:
            wide = t.float()
            scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
            y = (wide * self.at("statistics", scale, scale)).to(x.dtype)
            return self.at("out", self.weight * self.at("normalized", y, x), x)
        if self.spelling == 3:
            centered = t - t.mean(-1, keepdim=True)
            scale = (centered * centered).mean(-1, keepdim=True) + self.eps
            y = centered / self.at("statistics", scale, scale).sqrt()
            return self.at("out", self.at("normalized", y, x) * self.weight, x)
        scale = (t.square().mean(dim=-1, keepdim=True) + self.eps) ** -0.5
        y = t * self.at("statistics", scale, scale)
        return self.at("out", self.at("normalized", y, x) * (1 + self.weight), x)


def activate(t: Tensor, spelling: int) -> Tensor:
    """One of the activation functions, in one of several spellings."""
    if spelling < 4:
        return (F.silu, F.gelu, F.relu, torch.tanh)[spelling](t)
    if spelling == 4:
        return F.gelu(t, approximate="tanh")
    if spelling == 5:
        return t * torch.sigmoid(1.702 * t)
    if spelling == 6:
        return F.relu(t).square()
    if spelling == 7:
        return 0.5 * t * (1.0 + torch.tanh(0.7978845608 * (t + 0.044715 * t.pow(3))))
    if spelling == 8:
        return t * torch.sigmoid(t)
    return t * 0.5 * (1.0 + torch.erf(t * 0.5**0.5))


class MadeGELU(Made):
    """An activation function."""

    places = ("in", "out")

    def __init__(self, spelling: int) -> None:
        super().__init__()
        self.spelling = spelling

    def forward(self, x: Tensor) -> Tensor:
        return self.at("out", activate(self.at("in", x, x), self.spelling), x)


class MadeMLP(Made):
    """A gated MLP, from two projections or from halves of one, or a plain one."""

    places = ("in", "gate", "act", "up", "product", "out")

    def __init__(self, spelling: int) -> None:
        super().__init__()
        self.kind, self.spelling = spelling % 3, spelling // 3
        width = 2 * INNER if self.kind == 1 else INNER
        self.first = nn.Linear(WIDTH, width)
        if self.kind == 0:
            self.second = nn.Linear(WIDTH, INNER)
        self.last = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        t = self.at("in", x, x)
        gate = self.first(t)
        if self.kind == 1:
            gate, up = gate.chunk(2, dim=-1)
        elif self.kind == 0:
            up = self.second(t)
        inner = self.at("act", activate(self.at("gate", gate, x), self.spelling), x)
        if self.kind < 2:
            inner = inner * self.at("up", up, x)
        return self.at("out", self.last(self.at("product", inner, x)), x)


KINDS: tuple[tuple[type[Any], int], ...] = ((MadeNorm, 5), (MadeGELU, 10), (MadeMLP, 30))


class Block(nn.Module):
    """Modules between linear layers, with residuals around some."""

    def __init__(self, parts: list[nn.Module], residual: bool) -> None:
        super().__init__()
        self.first, self.parts = nn.Linear(WIDTH, WIDTH), nn.ModuleList(parts)
        self.last, self.residual = nn.Linear(WIDTH, WIDTH), residual

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in self.parts:
            x = x + part(x) if self.residual else part(x)
        return self.last(x)


@dataclass(frozen=True)
class Plan:
    """Recipe of a block: kind, spelling and steps of each part."""

    parts: tuple[tuple[int, int, tuple[tuple[str, Steps], ...]], ...]
    residual: bool
    shape: tuple[int, ...]
    scale: float
    training: bool
    later: tuple[str, Steps] | None  # done to the first part once codes are installed

    def build(self) -> Block:
        torch.manual_seed(1)
        parts = []
        for kind, spelling, steps in self.parts:
            part = KINDS[kind][0](spelling)
            part.own(steps)
            parts.append(part)
        return Block(parts, self.residual).train(self.training)

    def change(self, block: Block) -> None:
        """Add the steps that come later."""
        if self.later is not None:
            part: Any = block.parts[0]
            part.steps = (*part.steps, self.later)


# One operator with a condition; those that need something of the module cannot come later.
def _steps(names: list[str]) -> st.SearchStrategy[Steps]:
    one = st.tuples(
        st.sampled_from(["", *CONDITIONS]),
        st.sampled_from(names),
        st.sampled_from([0.5, 1.0, 2.0, 3.0]),
    )
    return one.map(lambda step: (step,))


_FREE = [
    name
    for name in OPERATORS
    if name not in {"gain", "gains", "buffer", "resting dropout", "child"}
]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Blocks of one or two parts, with none, one or two changes each."""
    parts = []
    for _ in range(draw(st.sampled_from([1, 1, 2]))):
        kind = draw(st.integers(0, len(KINDS) - 1))
        places = st.sampled_from(KINDS[kind][0].places)
        changes = draw(st.lists(st.tuples(places, _steps(list(OPERATORS))), max_size=2))
        parts.append((kind, draw(st.integers(0, KINDS[kind][1] - 1)), tuple(changes)))
    place = st.sampled_from(KINDS[parts[0][0]][0].places)
    return Plan(
        parts=tuple(parts),
        residual=draw(st.booleans()),
        shape=draw(st.sampled_from([(8, WIDTH), (4, 3, WIDTH), (2, 2, 3, WIDTH)])),
        scale=draw(st.sampled_from([0.1, 1.0, 4.0])),
        training=draw(st.booleans()),
        later=draw(st.none() | st.none() | st.tuples(place, _steps(_FREE))),
    )
