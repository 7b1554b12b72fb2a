"""Stochastic rounding: unbiased, reproducible, independent of who computes what; seeds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lq_lightning.codecs import CodecSpec, decode, derive_seed, encode
from lq_lightning.kernels.message import CODES
from lq_lightning.kernels.message import reference as blocks


@pytest.mark.parametrize("code", [c for c, entry in CODES.items() if entry.kind != "table"])
@pytest.mark.parametrize("fraction", [0.01, 0.37, 0.993])
def test_unbiased(code: str, fraction: float) -> None:
    """The mean over many elements is the value: five standard errors plus the noise's grid."""
    spec = CodecSpec(code=code, group_size=128, rounding="stochastic")  # type: ignore[arg-type]
    entry = CODES[code]
    if entry.kind == "float":
        low = 2.0 ** math.floor(math.log2(entry.max_value / 3))  # any normal code will do
        largest, step = entry.max_value, low * 2.0**-entry.mantissa_bits
    else:
        largest, low, step = 2.0 ** (entry.bits - 1) - 1, 0.0, 1.0
    value = low + fraction * step
    count = 1 << 17
    x = torch.full((2, count), value)
    x[1] *= -1
    x[:, ::128] = largest
    decoded = decode(spec, encode(spec, x, seed=11), count)
    grid = 2.0 ** -(spec.message_format.fraction_bits + 1)
    for kept in (decoded[0][x[0] != largest], -decoded[1][x[1] != largest]):
        assert set(kept.unique().tolist()) <= {low, low + step}
        deviation = step * (fraction * (1 - fraction) / kept.numel()) ** 0.5
        assert abs(kept.double().mean().item() - value) <= 5 * deviation + step * grid


@pytest.mark.parametrize("bits", [7, 8, 9, 12, 16])
def test_noise_is_uniform_and_uncorrelated(bits: int) -> None:
    rows, count = 8, 1 << 15
    noise = (blocks.rounding_noise(123, 0, rows, 0, count, bits).double() + 0.5) / 2**bits - 0.5
    assert noise.abs().max() < 0.5
    histogram = torch.histc(noise.float(), bins=64, min=-0.5, max=0.5)
    expected = rows * count / 64
    chi_square = ((histogram - expected) ** 2 / expected).sum().item()
    assert chi_square < 63 + 5 * (2 * 63) ** 0.5
    limit = 5 * (1 / 12) / count**0.5
    centred = noise - noise.mean(dim=1, keepdim=True)
    covariance = centred @ centred.T / count
    assert (covariance - covariance.diag().diag()).abs().max() < limit
    for lag in (1, 2, 3, 64, 128):
        assert (centred[:, lag:] * centred[:, :-lag]).mean(dim=1).abs().max() < limit
    other = blocks.rounding_noise(124, 0, rows, 0, count, bits).double()
    assert ((other - other.mean()) / 2**bits * centred).mean(dim=1).abs().max() < limit


def test_depends_on_position_not_on_the_cut() -> None:
    spec = CodecSpec(code="int4", group_size=128, hadamard_size=32, rounding="stochastic")
    x = torch.randn(5, 70_000)
    whole = encode(spec, x, seed=1)
    assert torch.equal(encode(spec, x[:1], seed=1), whole[:1])
    narrow = encode(spec, x[:, :1280], seed=1)
    assert torch.equal(narrow[:, :640], whole[:, :640])


def test_rows_and_seeds_differ() -> None:
    spec = CodecSpec(code="int4", group_size=128, rounding="stochastic")
    x = torch.randn(1, 4096).expand(3, -1).contiguous()
    first, second = encode(spec, x, seed=1), encode(spec, x, seed=2)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, second)
    assert torch.equal(first, encode(spec, x, seed=1))
    assert torch.equal(encode(spec, x, seed=2**64 + 1), first)
    with pytest.raises(ValueError, match="seed=None with rounding='stochastic'"):
        encode(spec, x)
    nearest = CodecSpec(code="int4", group_size=128)
    assert torch.equal(encode(nearest, x, seed=1), encode(nearest, x))


@given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=4))
def test_derived_seeds_are_63_bits(parts: list[int]) -> None:
    seed = derive_seed(*parts)
    assert 0 <= seed < 2**63


def test_derived_seeds_depend_on_order_number_and_value() -> None:
    tuples = [(a, b) for a in range(-8, 40) for b in range(-8, 40)]
    seeds = {derive_seed(*parts) for parts in tuples}
    seeds |= {derive_seed(a) for a in range(-8, 40)} | {derive_seed(), derive_seed(0, 0, 0)}
    assert len(seeds) == len(tuples) + 48 + 2
    assert derive_seed(1) != derive_seed(1 + 2**64)


def test_derived_seed_is_stable() -> None:
    """Checkpoints and ranks of different machines rely on this value."""
    assert derive_seed(1, 2, 3) == 1355775664812041193
    bits = sum(bin(derive_seed(n) ^ derive_seed(n + 1)).count("1") for n in range(256)) / 256
    assert 29 < bits < 34


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("code", [c for c, entry in CODES.items() if entry.kind == "integer"])
def test_noise_never_leaves_the_code(code: str, symmetric: bool) -> None:
    """The ends of 2**15 groups of all magnitudes stay the ends, up to fp32 rounding."""
    spec = CodecSpec(
        code=code,  # type: ignore[arg-type]
        group_size=16,
        symmetric=symmetric,
        rounding="stochastic",
    )
    groups = 1 << 15
    ends = torch.randn(groups, 1) * torch.exp2(torch.randint(-60, 60, (groups, 1)).float())
    x = torch.cat([ends.expand(-1, 8), -ends.expand(-1, 8)], dim=1).reshape(1, -1)
    decoded = decode(spec, encode(spec, x, seed=1), x.shape[1])
    assert ((decoded - x).abs() <= 2.0**-20 * x.abs()).all()
