"""Codes of messages between emulated ranks: the library's, and some that it does not have.

What the library lacks is computed on decoded values: a message is what its receiver would decode,
still in the transformed domain, and takes the bytes of a ``CodecSpec`` with as many bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from lq_lightning.codecs import CodecSpec, decode_reduce, decode_reduce_encode, encode


@dataclass(frozen=True, slots=True)
class LibraryCode:
    """A codec of the library.

    Attributes:
        spec: The codec; it rounds to nearest.
    """

    spec: CodecSpec

    def __post_init__(self) -> None:
        """Refuse rounding that depends on the rank and on where a row lies."""
        if self.spec.rounding != "nearest":
            raise ValueError(f"{self.spec} rounds at random: emulated ranks round to nearest only")

    def encode(self, values_RN: Tensor, reference_RN: Tensor | None = None) -> Tensor:
        """Return ``[R, B]`` uint8 messages of values, minus a reference."""
        return encode(self.spec, values_RN, reference=reference_RN)

    def reduce(
        self, messages: Tensor, out_RN: Tensor, scale: float = 1.0, add: bool = False
    ) -> None:
        """Write or add ``scale`` times the sum of ``[K, R, B]`` messages over K."""
        numel = out_RN.shape[1]
        decode_reduce(self.spec, messages, numel, scale=scale, out=out_RN, add=add)

    def reduce_encode(self, messages: Tensor, numel: int, target: Code) -> Tensor:
        """Encode the sum of ``[K, R, B]`` messages over K by another code."""
        if isinstance(target, ValueCode):
            values = decode_reduce(self.spec, messages, numel)
            return target.encode(values)
        return decode_reduce_encode(self.spec, messages, numel, target.spec)


@dataclass(frozen=True, slots=True)
class ValueCode:
    """What is computed on decoded values.

    Attributes:
        spec: A codec with as many bits, and the same groups and transform.
    """

    spec: CodecSpec

    def encode(self, values_RN: Tensor, reference_RN: Tensor | None = None) -> Tensor:
        """Return what receivers decode, transformed: ``[R, N']`` fp32 with whole groups."""
        values = values_RN.float()
        if reference_RN is not None:
            values = values - reference_RN.float()
        group = int(self.spec.group_size)
        values = F.pad(values, (0, -values.shape[1] % group))
        transformed = hadamard(values, self.spec.hadamard_size)
        return self.lossy(transformed.unflatten(1, (-1, group))).flatten(1)

    def lossy(self, groups: Tensor) -> Tensor:
        """Return what is left of ``[R, groups, size]``."""
        raise NotImplementedError

    def reduce(
        self, messages: Tensor, out_RN: Tensor, scale: float = 1.0, add: bool = False
    ) -> None:
        """Write or add ``scale`` times the sum of ``[K, R, N']`` messages over K."""
        numel = out_RN.shape[1]
        values = hadamard(messages.sum(dim=0), self.spec.hadamard_size)[:, :numel] * scale
        out_RN.copy_(values + out_RN.float() if add else values)

    def reduce_encode(self, messages: Tensor, numel: int, target: Code) -> Tensor:
        """Encode the sum of ``[K, R, N']`` messages over K by another code."""
        values = hadamard(messages.sum(dim=0), self.spec.hadamard_size)[:, :numel]
        return target.encode(values)


@dataclass(frozen=True, slots=True)
class NoiseCode(ValueCode):
    """Nothing is rounded: normal noise as large as the error of a code, which depends on nothing.

    What it does to a training is what any error of that size does.

    Attributes:
        deviation: Of the noise, as a share of the root mean square of a group.
    """

    deviation: float = 0.0

    def lossy(self, groups: Tensor) -> Tensor:
        """Add the noise."""
        size = groups.square().mean(-1, keepdim=True).sqrt() * self.deviation
        return groups + size * torch.randn_like(groups)


@dataclass(frozen=True, slots=True)
class StochasticCode(ValueCode):
    """Integers between which a value is rounded at random, so that its mean is the value."""

    def lossy(self, groups: Tensor) -> Tensor:
        """Round."""
        top = 2 ** (_bits_of(self.spec) - 1) - 1
        scale = _positive(groups.abs().amax(-1, keepdim=True) / top)
        rounded = (groups / scale + torch.rand_like(groups)).floor().clamp(-top, top)
        return rounded * scale


@dataclass(frozen=True, slots=True)
class FittedCode(ValueCode):
    """Levels of one group whose scale is chosen by its error, not by its largest magnitude.

    Attributes:
        levels: That a scaled value is rounded to, ascending within [-1, 1]; empty for ``2**bits``
            equally spaced ones between a group's own minimum and maximum.
        factors: Candidates for the scale, as shares of the largest magnitude (or of the range);
            that with the least squared error is taken.
        cap: Share of a group's norm that its error may have; a group beyond it travels in 8 bits.
    """

    levels: tuple[float, ...] = ()
    factors: tuple[float, ...] = (1.0,)
    cap: float = math.inf

    def lossy(self, groups: Tensor) -> Tensor:
        """Round with the best of the scales."""
        best = self._round(groups, self.factors[0])
        if len(self.factors) > 1:
            least = (best - groups).square().sum(-1, keepdim=True)
            for factor in self.factors[1:]:
                found = self._round(groups, factor)
                error = (found - groups).square().sum(-1, keepdim=True)
                best = torch.where(error < least, found, best)
                least = torch.minimum(error, least)
        if self.cap < math.inf:
            lost = (best - groups).norm(dim=-1, keepdim=True)
            beyond = lost > self.cap * groups.norm(dim=-1, keepdim=True)
            best = torch.where(beyond, _round_to_int8(groups), best)
        return best

    def _round(self, groups: Tensor, factor: float) -> Tensor:
        if not self.levels:
            low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
            middle, half = (low + high) / 2, (high - low) / 2 * factor
            steps = 2 ** _bits_of(self.spec) - 1
            low, width = middle - half, _positive(2 * half / steps)
            return ((groups - low) / width).round().clamp(0, steps) * width + low
        levels = groups.new_tensor(self.levels)
        scale = _positive(groups.abs().amax(-1, keepdim=True) * factor)
        borders = (levels[1:] + levels[:-1]) / 2
        return levels[torch.bucketize(groups / scale, borders)] * scale


Code = LibraryCode | ValueCode


def _bits_of(spec: CodecSpec) -> int:
    return int(spec.code.removeprefix("int"))


def _positive(scale: Tensor) -> Tensor:
    """Let groups of zeros, or of one value, be divided by something."""
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _round_to_int8(groups: Tensor) -> Tensor:
    scale = _positive(groups.abs().amax(-1, keepdim=True) / 127)
    return (groups / scale).round() * scale


@lru_cache(maxsize=16)
def _hadamard_matrix(order: int, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < order:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(order)


def hadamard(values_RN: Tensor, order: int) -> Tensor:
    """Transform every ``order`` neighbours, orthonormally: twice is not at all. 0 for nothing."""
    if order == 0:
        return values_RN
    matrix = _hadamard_matrix(order, values_RN.device)
    return (values_RN.unflatten(1, (-1, order)) @ matrix).flatten(1)


@cache
def normal_levels(bits: int) -> tuple[float, ...]:
    """Return the levels that lose least of a normal value (Lloyd, Max), scaled to 1.

    Symmetric without a level at zero. Scaled to the largest magnitude of a group they lose more
    than the factors of ``FittedCode`` make of them.
    """
    grid = torch.linspace(-5, 5, 20001, dtype=torch.float64)
    density = torch.exp(-grid.square() / 2)
    levels = torch.linspace(-2.5, 2.5, 2**bits, dtype=torch.float64)
    for _ in range(400):
        cell = torch.bucketize(grid, (levels[1:] + levels[:-1]) / 2)
        mass = torch.zeros_like(levels).index_add_(0, cell, density)
        moment = torch.zeros_like(levels).index_add_(0, cell, density * grid)
        levels = moment / mass
    levels = (levels - levels.flip(0)) / 2
    return tuple((levels / levels[-1]).tolist())


def integer_levels(bits: int) -> tuple[float, ...]:
    """Return the levels of a symmetric integer code."""
    top = 2 ** (bits - 1) - 1
    return tuple(level / top for level in range(-top, top + 1))
