"""Attacks on packing by rule: modules that save what no code may round.

Each row is the forward of a block that is packed by rule. It runs with packing on and off, and
against the plain module. A row is a function of the block's input ``[B, T, C]``, which it may use
as it is (``x``) or shifted by a parameter (``block.gain``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lq_lightning.activations import quantize_activations
from lq_lightning.activations.measure import SavedTensors

BATCH, LENGTH, WIDTH, HEADS = 4, 32, 64, 8
INF = float("inf")


class Block(nn.Module):
    """Not recognized, as it has a parameter of its own."""

    def __init__(self, row: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(-0.1, 0.1, WIDTH))
        self.parts = nn.ModuleList(parts)
        self.row = row

    def forward(self, x: Tensor) -> Tensor:
        return self.row(self, x + self.gain, *self.parts)


def heads(h: Tensor) -> Tensor:
    return h.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def attend(h: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(heads(h), heads(h.sin()), heads(h), mask)


def causal(value: float) -> Tensor:
    return torch.full((LENGTH, LENGTH), value).triu(1)


class Lookup(torch.autograd.Function):
    """Holds its indices as floats."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = table.shape[0]
        return table[index.long()]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        rows = index.long().clamp(0, ctx.rows - 1).reshape(-1)
        dy = dy.reshape(-1, dy.shape[-1])
        return dy.new_zeros(ctx.rows, dy.shape[-1]).index_add(0, rows, dy), None


def lookup(block: Block, h: Tensor) -> Tensor:
    index = torch.arange(BATCH * LENGTH * WIDTH // 4).view(-1, 32).float() % 100
    looked_up: Tensor = Lookup.apply(h.flatten(0, 1), index)
    return looked_up


def dropped(block: Block, h: Tensor) -> Tensor:
    keep = (torch.rand_like(h) < 0.9).to(h.dtype) / 0.9
    return h * keep


def filled(block: Block, h: Tensor) -> Tensor:
    """Next to the fill, all scores of a group would be rounded to zero."""
    scores = h.masked_fill(torch.arange(WIDTH) % 7 == 0, -1e9)
    return (scores * (block.gain + 1)).clamp(min=-10)


def clamped(h: Tensor) -> Tensor:
    bounds = (0.1, 6e4), (None, 0.3), (-6e4, None), (0.3, 0.301), (-float("inf"), 0.7)
    return sum((h.clamp(low, high) for low, high in bounds), F.hardtanh(h, -6e4, 6e4)).float()


# By name: a function, and modules that it is called with. Nothing that these save may be rounded.
# Operators that are in no list, such as `exp`, stand for all of them.
EXACT: dict[str, tuple[Any, ...]] = {
    "mask of -inf": (lambda b, h: attend(h, causal(-INF)),),
    "log-sum-exp": (lambda b, h: attend(h),),
    "statistics of a batch norm": (
        lambda b, h, norm: norm(h.reshape(2, -1, 4) * torch.logspace(-2, 2, 1024)[:, None]),
        lambda: nn.BatchNorm1d(1024),
    ),
    "statistics of a group norm": (
        lambda b, h, norm: norm(h.reshape(-1, 64, 2) * torch.logspace(-2, 2, 64)[:, None]),
        lambda: nn.GroupNorm(32, 64),
    ),
    "indices as floats": (lookup,),
    "dropout by hand": (dropped,),
    "log_softmax": (lambda b, h: (8 * h).log_softmax(-1)[..., :4].exp(),),
    "saturated tanh": (lambda b, h: (9 + h).tanh(),),
    "division by small numbers": (lambda b, h: 1e-3 / (h.abs() + 1e-3),),
    "exp": (lambda b, h: (4 * h).exp().clamp(max=1.0),),
    "small power": (lambda b, h: (h.abs() + 1e-3).pow(0.3),),
    # one bit per value, from which the derivative is exact
    "leaky relu": (lambda b, h: F.leaky_relu(h),),
    "clamp": (lambda b, h: h.clamp(-1, 1) + h.clamp(max=0.3) + h.relu().clamp_min(0),),
    "clamp in bf16": (lambda b, h: clamped(h.bfloat16()),),
    "clamp in fp16": (lambda b, h: clamped(h.half()),),
    "clamp by a tensor": (lambda b, h: h.clamp(max=b.gain.detach() * 10),),
    "hard sigmoid at its ends": (lambda b, h: F.hardtanh(3 * h, 0.0, 1.0),),
}
# These save what bears it, beside what does not.
ROUNDED: dict[str, tuple[Any, ...]] = {
    "product": (lambda b, h: torch.sin(h @ h.transpose(1, 2) / WIDTH),),
    "written-out attention": (
        lambda b, h: (h @ h.transpose(1, 2) / 8 + causal(-INF)).softmax(-1) @ h.sin(),
    ),
    "convolution": (
        lambda b, h, conv, norm: norm(conv(F.gelu(h).transpose(1, 2))).relu(),
        lambda: nn.Conv1d(WIDTH, 2 * WIDTH, 3, bias=False),
        lambda: nn.BatchNorm1d(2 * WIDTH),
    ),
    "gelu cut off": (lambda b, h: F.gelu(h.clamp(max=0.5)),),
    "gate": (lambda b, h: F.silu(h) * h.roll(1, -1),),
    "written-out root mean square": (
        lambda b, h: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5),
    ),
    "layer norm of means": (lambda b, h: F.layer_norm(h + 100, (WIDTH,)),),
    "layer norm of rows that differ": (
        lambda b, h: F.layer_norm(h * torch.logspace(-3, 1, LENGTH)[:, None], (WIDTH,), eps=1e-12),
    ),
    "group norm of means": (
        lambda b, h, norm: norm(F.gelu(h).mT + 100 * torch.arange(WIDTH)[:, None] // 8),
        lambda: nn.GroupNorm(8, WIDTH),
    ),
    "batch norm of means": (
        lambda b, h, norm: norm(F.gelu(h).mT + 100 * torch.arange(WIDTH)[:, None]),
        lambda: nn.BatchNorm1d(WIDTH),
    ),
    "batch norm that evaluates": (
        lambda b, h: F.batch_norm(
            F.gelu(h).mT, torch.zeros(WIDTH), torch.full((WIDTH,), 0.25), b.gain + 1
        ),
    ),
    "filled scores beside others": (lambda b, h: filled(b, h) + F.softplus(h),),
}


def gradients(model: nn.Module, x: Tensor) -> tuple[list[Tensor], dict[str, int]]:
    """Gradients of all leaves, and the bytes that were saved as floats and as codes."""
    torch.manual_seed(1)
    leaves = [x, *model.parameters()]
    with SavedTensors(model) as saved:
        output = model(x)
    factors = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad((output * factors).sum(), leaves)
    nbytes = {"floats": 0, "codes": 0}
    for storage in saved.storages:
        nbytes["codes" if storage.dtype == torch.uint8 else "floats"] += storage.nbytes
    return list(found), nbytes


def run(row: Callable[..., Tensor], *parts: Callable[[], nn.Module]) -> tuple[float, Any, Any]:
    """The largest relative error of a gradient, and bytes that are saved without and with codes."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(row, *(part() for part in parts)))
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    plain, before = gradients(model, x)
    assert all(gradient.isfinite().all() for gradient in plain), "a row has to be defined"
    with pytest.warns(UserWarning, match="packed by rule"):
        handle = quantize_activations(model)
    coded, after = gradients(model, x)
    handle.remove()
    removed, _ = gradients(model, x)
    assert all(map(torch.equal, removed, plain))
    pairs = zip(coded, plain, strict=True)
    return max(float((c - p).norm() / p.norm()) for c, p in pairs), before, after


@pytest.mark.parametrize("name", EXACT)
def test_what_may_not_be_rounded_is_kept_exactly(name: str) -> None:
    error, _, _ = run(*EXACT[name])
    assert error == 0.0


@pytest.mark.parametrize("name", ROUNDED)
def test_what_bears_it_is_rounded(name: str) -> None:
    error, before, after = run(*ROUNDED[name])
    assert 0 < error < 0.025
    assert after["codes"] > 0
    assert after["floats"] + after["codes"] < 0.8 * before["floats"]


class _Temperature(nn.Module):
    """Multiplies masked scores, which holds the mask's values for backward."""

    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.keys = nn.Linear(WIDTH, WIDTH)
        self.factor = nn.Parameter(torch.full((LENGTH,), 1.5))
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ self.keys(x).transpose(1, 2)
        weights: Tensor = (self.mask(scores) * self.factor).softmax(-1) @ x
        return weights


def _assigned(scores: Tensor) -> Tensor:
    scores = scores.clone()
    scores[..., 20:] = -1e9
    return scores


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "added": lambda s: s + causal(-1e9),
    "filled and viewed": lambda s: s.masked_fill(causal(1.0) > 0, -1e9).view(2, -1, LENGTH, LENGTH),
    "filled and scaled": lambda s: s.masked_fill(causal(1.0) > 0, -1e9) * 0.5,
    "joined": lambda s: torch.cat([s[..., :20], s.new_full((*s.shape[:-1], 12), -1e9)], -1),
    "assigned": _assigned,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_other_operators_move_are_kept_exactly(name: str) -> None:
    torch.manual_seed(0)
    mask = MASKS[name]
    module = _Temperature(lambda s: mask(s).reshape(s.shape))
    block = nn.ModuleList([module])
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    dy = torch.randn(BATCH, LENGTH, WIDTH)

    def gradient() -> Tensor:
        return torch.autograd.grad(module(x), module.factor, dy)[0]

    exact = gradient()
    with pytest.warns(UserWarning, match="packed by rule"):
        quantize_activations(block)
    assert float((gradient() - exact).norm()) < 0.02 * float(exact.norm())
