"""Pipeline stages without stages: hidden states and their gradients pass through codecs.

Shape legend: M models, n tokens, C width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lq_lightning.codecs import named_codec
from lq_lightning.pipeline.boundary import make_boundary_codec
from lq_lightning.pipeline.message import CenteredCodec, GroupCodec, Message

EXACT = 10  # messages that a transform learns from before its first basis, sent as they are
REFRESH = 50  # messages that share a basis
_OF_MEAN, _OF_MOMENTS = 0.5, 0.05  # weight of the last message in averages
_TOP = 8  # bits of a coefficient at most
_CELLS, _REACH = 1 << 13, 6.0  # cells of the table of levels, and where it ends
_LEAST = 1e-30  # scale of a token of zeros


@dataclass(frozen=True, slots=True)
class Stages:
    """A pipeline.

    Attributes:
        number: Stages, of equally many blocks or one more; no more than blocks.
        forward: Codec of hidden states: one of the library's without a memory, or the bits per
            value of a ``Transform``. Behind a name may stand ``uncentered``, or behind that of
            integers their rounding, for codes of the values as they are.
        backward: Codec of gradients.
    """

    number: int
    forward: str | float
    backward: str | float


class Transform:
    """Transform coding in an eigenbasis that the sender tracks, with Lloyd-Max quantizers.

    The sender tracks the mean of rows, and the covariance of what is left of each, divided by its
    root mean square. Once in ``REFRESH`` messages, at first in ``EXACT``, it sends eigenvectors and
    the deviations of coefficients; both ends share out bits by deviations, the next bit to the
    coefficient whose error it lowers most. Besides codes a message has the mean of those before it
    and a scale for each token. All but codes have 16 bits. M models have M codecs.

    Attributes:
        bits: Per value of a late message, all of the above counted; 0 before the first basis.
    """

    def __init__(self, budget: float) -> None:
        self.bits, self._budget, self._messages = 0.0, budget, 0
        self._mean: Any = 0.0
        self._moments: Any = 0.0
        self._shared: tuple[Tensor, ...] = ()

    def send(self, x: Tensor, learn: bool) -> Tensor:
        """Return ``[M, ..., C]`` as it is decoded; rows with NaN stay NaN."""
        exact = x.flatten(1, -2).float()
        decoded = x
        with _tensor_cores():
            mean = exact.mean(1, keepdim=True)
            known = self._mean.bfloat16().float() if self._shared else mean
            rows = exact - known
            scales = rows.square().mean(-1, keepdim=True).sqrt().clamp(min=_LEAST)
            scales = scales.bfloat16().float()
            rows /= scales
            if self._shared:
                decoded = (self._decode(rows, scales) + known).to(x.dtype).view_as(x)
            if learn:
                self._learn(mean.nan_to_num_(0.0, 0.0, 0.0), rows.nan_to_num_(0.0, 0.0, 0.0))
        return decoded

    def _decode(self, rows: Tensor, scales: Tensor) -> Tensor:
        basis, deviations, table = self._shared
        cells = (rows @ basis).div_(deviations).mul_(_CELLS / (2 * _REACH)).add_(_CELLS / 2)
        cells = cells.nan_to_num_(0.0).clamp_(0, _CELLS - 1).to(torch.int32).add_(table)
        values = _levels(rows.device).take(cells.long()).mul_(deviations)
        return (values @ basis.mT).mul_(scales)  # which still have NaN

    def _learn(self, mean: Tensor, rows: Tensor) -> None:
        self._messages += 1
        first, moments = 1 / self._messages, rows.mT @ rows / rows.shape[1]
        self._mean = self._mean + max(first, _OF_MEAN) * (mean - self._mean)
        self._moments = self._moments + max(first, _OF_MOMENTS) * (moments - self._moments)
        if self._messages % (EXACT if self._messages < REFRESH else REFRESH) == 0:
            self._share(rows.shape[1])

    def _share(self, tokens: int) -> None:
        """Send what both ends need for the next messages."""
        powers, basis = torch.linalg.eigh(self._moments)
        deviations = powers.clamp(min=_LEAST).sqrt().bfloat16().float()
        width = basis.shape[-1]
        beside = 16 / width + 16 / tokens + 16 * (width + 1) / (REFRESH * tokens)
        bits = share_bits(deviations.square(), int((self._budget - beside) * width))
        self.bits = beside + bits.float().mean().item()
        table = (bits * _CELLS).int()
        self._shared = (basis.bfloat16().float(), deviations[:, None], table[:, None])


def share_bits(variances: Tensor, total: int) -> Tensor:
    """Return the bits of every coefficient with the least error, ``[M, C]`` int64.

    Args:
        variances: Of coefficients, ``[M, C]``.
        total: Sum of the bits of one model.

    Raises:
        ValueError: There are none to share, or more than 8 for each.
    """
    models, width = variances.shape
    if not 0 < total <= _TOP * width:
        raise ValueError(
            f"{total} bits for {width} coefficients, besides scales and eigenvectors: choose bits "
            f"per value that leave 1 to {_TOP * width}, or larger batches"
        )
    errors = torch.tensor([lloyd_max(bits)[1] for bits in range(_TOP + 1)])
    gains = variances[..., None] * (errors[:-1] - errors[1:]).to(variances)  # each bit gains less
    best = gains.flatten(1).topk(total).indices // _TOP
    return torch.zeros_like(variances, dtype=torch.int64).scatter_add_(
        1, best, torch.ones_like(best)
    )


@cache
def lloyd_max(bits: int) -> tuple[Tensor, float]:
    """Return the levels of the best quantizer of a unit normal, and its squared error."""
    values = torch.special.ndtri((torch.arange(400_001).double() + 0.5) / 400_001)
    sums = torch.cat((values.new_zeros(1), values.cumsum(0)))
    levels = 1.5 * torch.special.ndtri((torch.arange(1 << bits).double() + 0.5) / 2**bits)
    for _ in range(200):
        inner = torch.searchsorted(values, (levels[1:] + levels[:-1]) / 2)
        ends = torch.tensor([0, *inner.tolist(), len(values)])
        levels = sums[ends].diff() / ends.diff()
    nearest = levels[torch.bucketize(values, (levels[1:] + levels[:-1]) / 2)]
    return levels.float(), (values - nearest).square().mean().item()


@cache
def _levels(device: torch.device) -> Tensor:
    """Return the level of every cell, those of 0 bits first, ``[9 * cells]``."""
    cells = ((torch.arange(_CELLS) + 0.5) / _CELLS * 2 - 1) * _REACH
    each = [lloyd_max(bits)[0] for bits in range(_TOP + 1)]
    rows = [levels[torch.bucketize(cells, (levels[1:] + levels[:-1]) / 2)] for levels in each]
    return torch.cat(rows).to(device)


@contextmanager
def _tensor_cores() -> Iterator[None]:
    """Multiply fp32 as TF32: bf16 has no more digits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Library:
    """A codec of the library without a memory."""

    def __init__(self, kind: str, boundary: int, backward: bool) -> None:
        name, _, how = kind.partition(" ")
        self.bits, self._codec = 0.0, make_boundary_codec(name, backward)
        if how in ("nearest", "stochastic"):
            self._codec = GroupCodec(name, named_codec(name, 64, symmetric=False, rounding=how))
        elif how and isinstance(self._codec, CenteredCodec):
            self._codec = self._codec.codes
        self._facts = Message(boundary=boundary, backward=backward, microbatch=0, seed=0)

    def send(self, x: Tensor, learn: bool) -> Tensor:
        self._codec.check(x.shape, x.dtype)
        self.bits = self._codec.bits_per_value(x.shape, x.dtype)
        self._facts = replace(self._facts, seed=(self._facts.seed or 0) + 1)  # noise of its own
        return self._codec.decode(self._codec.encode(x, self._facts), x.shape, x.dtype, self._facts)


class _Direction:
    """A codec of one direction of one boundary, and the error of a message in training."""

    def __init__(self, kind: str | float, boundary: int, backward: bool) -> None:
        self.codec = (
            _Library(kind, boundary, backward) if isinstance(kind, str) else Transform(kind)
        )
        self._messages, self.error = 0, torch.empty(0)  # [M]

    def send(self, x: Tensor, learn: bool) -> Tensor:
        decoded = self.codec.send(x, learn)
        self._messages += learn
        if learn and self._messages % REFRESH == EXACT + 1:
            rows = x.flatten(1, -2).float()
            wrong, spread = decoded.view_as(rows) - rows, rows - rows.mean(1, keepdim=True)
            self.error = wrong.flatten(1).norm(dim=1) / spread.flatten(1).norm(dim=1)
        return decoded


class EmulatedStages:
    """The boundaries of a pipeline.

    Attributes:
        boundaries: Forward and backward, by the index of the block before them.
    """

    def __init__(self, plan: Stages, layers: int) -> None:
        count = min(plan.number, layers)
        self.boundaries = {
            layers * n // count - 1: (
                _Direction(plan.forward, n - 1, False),
                _Direction(plan.backward, n - 1, True),
            )
            for n in range(1, count)
        }

    def after(self, block: int, x: Tensor) -> Tensor:
        """Return the hidden state ``[M, ..., C]`` that is read behind a block."""
        sent: Tensor = _Send.apply(x, *self.boundaries[block]) if block in self.boundaries else x
        return sent

    def details(self, model: int, loss: float) -> dict[str, Any]:
        """Return a loss in stages and, forward and backward, bits and errors of each boundary.

        An error is that of message 11 of the last 50, relative to the spread around the mean.
        """
        each = list(self.boundaries.values())
        return {
            "loss_in_stages": loss,
            "boundary_bits": [[way.codec.bits for way in ways] for ways in each],
            "boundary_errors": [[way.error.tolist()[model:][:1] for way in ways] for ways in each],
        }


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: _Direction, backward: _Direction) -> Tensor:
        ctx.way = backward
        return forward.send(x, ctx.needs_input_grad[0]).view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.way.send(grad.contiguous(), True), None, None
