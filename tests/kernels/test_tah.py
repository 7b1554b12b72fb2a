"""TAH-Quant on a CPU: what the messages say, and what is decoded from them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lq_lightning.codecs import CodecSpec, decode, encode
from lq_lightning.kernels.message.reference import load_scales
from lq_lightning.kernels.tah import (
    TAHFormat,
    parse_tah_format,
    reference,
    tah_dequantize,
    tah_quantize,
)
from lq_lightning.kernels.tah.format import TILE_SIZES
from lq_lightning.kernels.tah.reference import find_outliers, lowest

FIFTH = Fraction(1, 5)


def tah(tile: int = 64, share: Fraction = FIFTH, hadamard: bool = True, bits: int = 4) -> TAHFormat:
    return TAHFormat(tile, bits, share, hadamard)


def alike(bits: int, tile: int = 64, **options: Any) -> TAHFormat:
    return tah(tile, share=Fraction(0), bits=bits, **options)


def round_trip(x: Tensor, fmt: TAHFormat) -> Tensor:
    return tah_dequantize(tah_quantize(x, str(fmt)), *x.shape, str(fmt), x.dtype)


def error(x: Tensor, fmt: TAHFormat) -> float:
    return float((round_trip(x, fmt) - x).norm() / x.norm())


def int4_tokens(message: Tensor, fmt: TAHFormat, shape: torch.Size) -> Tensor:
    """Which tokens are INT4, read bit by bit."""
    tokens = fmt.layout(*shape).tokens
    bits = [int(message[token // 8]) >> (token % 8) & 1 for token in range(tokens)]
    return torch.tensor(bits, dtype=torch.bool)


mixed = st.builds(
    tah,
    st.sampled_from(TILE_SIZES),
    st.sampled_from([FIFTH, Fraction(1, 3), Fraction(8, 9)]),
    st.booleans(),
)
formats = mixed | st.builds(
    alike,
    st.integers(2, 8),
    st.sampled_from(TILE_SIZES),
    hadamard=st.booleans(),
)


@given(formats, st.integers(0, 3), st.integers(0, 12), st.integers(1, 5), st.integers(0, 99))
def test_size_depends_on_the_shape_alone(
    fmt: TAHFormat, sequences: int, tokens: int, tiles: int, seed: int
) -> None:
    assert parse_tah_format(str(fmt)) == fmt
    x = torch.randn(sequences, tokens, tiles * fmt.tile, generator=torch.manual_seed(seed))
    x.view(-1)[::37] *= 1000
    layout = fmt.layout(*x.shape)
    message = tah_quantize(x, str(fmt))
    zeros = tah_quantize(torch.zeros_like(x), str(fmt))
    assert message.shape == zeros.shape == (layout.nbytes,)
    # sections without overlap, each from a multiple of 16 bytes, with zeros between them
    starts = [0, *layout.low_planes, *layout.high_planes, layout.scale_offset]
    starts += [layout.minimum_offset, layout.outlier_offset, *layout.pivot_planes, layout.nbytes]
    for start, end, used in zip(starts, starts[1:], layout.used, strict=False):
        assert start % 16 == 0
        assert start + used <= end < start + used + 16
        assert not message[start + used : end].any()
    decoded = tah_dequantize(message, *x.shape, str(fmt), torch.float32)
    assert decoded.shape == x.shape
    assert decoded.isfinite().all()


def test_bits_of_the_paper() -> None:
    """4.411 bits per value with 1600 channels and tiles of 64; 4.114 with 4096 and 128."""
    values = 1024 * 1600
    nbytes = tah().layout(1, 1024, 1600).nbytes
    low = 204
    parts = [values // 2 - low * 200, 4 * values // 64, values // 64 * 7 // 8, 1024 // 8]
    assert nbytes == sum(parts)
    assert 8 * nbytes / values < 4.411
    assert 8 * tah(128).layout(1, 1024, 4096).nbytes / (1024 * 4096) < 4.114


@pytest.mark.parametrize("bits", range(2, 9))
def test_tokens_alike_begin_like_an_encoded_row(bits: int) -> None:
    """Codes, scales and minima are those of a plain code where no tile is transformed."""
    x = torch.randn(2, 9, 128)
    fmt = alike(bits, 32, hadamard=False)
    spec = CodecSpec(code=f"int{bits}", group_size=32, symmetric=False, scale_dtype="bfloat16")
    assert torch.equal(tah_quantize(x, str(fmt)), encode(spec, x.view(1, -1)).view(-1))
    decoded = decode(spec, encode(spec, x.view(1, -1)), x.numel(), dtype=x.dtype)
    assert torch.equal(round_trip(x, fmt), decoded.view_as(x))


@pytest.mark.parametrize(("tokens", "low"), [(4, 0), (5, 1), (10, 2), (20, 4), (1000, 200)])
def test_number_of_int3_tokens(tokens: int, low: int) -> None:
    """With floats, ``int(tokens * (1 - 0.8))`` is 0, 1, 3 and 199 from 5 tokens on."""
    fmt = tah(8)
    layout = fmt.layout(2, tokens, 8)
    assert layout.low_per_sequence == low
    assert layout.low_tokens == 2 * low
    x = torch.randn(2, tokens, 8)
    if low:
        message = tah_quantize(x, str(fmt))
        chosen = int4_tokens(message, fmt, x.shape).view(2, tokens)
        assert chosen.sum(1).tolist() == [tokens - low] * 2


def test_lowest_entropies_of_every_sequence_are_int3() -> None:
    # sequences of which one is spikier than the other: ranked apart
    power = torch.tensor([1.0, 3.0]).view(2, 1, 1)
    sharper = torch.linspace(1, 2, 20)[torch.randperm(20)].view(1, 20, 1)
    x = torch.randn(2, 20, 64).abs() ** (power * sharper)
    fmt = tah(16)
    chosen = int4_tokens(tah_quantize(x, str(fmt)), fmt, x.shape).view(2, -1)
    p = x.double() / x.double().sum(-1, keepdim=True)
    entropies = -(p * p.log()).sum(-1)
    order = entropies.argsort(dim=1)
    count = order.shape[1] // 5
    assert not chosen.gather(1, order[:, :count]).any()
    assert chosen.gather(1, order[:, count:]).all()


def test_entropy_is_that_of_any_multiple() -> None:
    x = torch.randn(1, 40, 128)
    fmt = tah(32)
    expected = reference.statistics_of(x, fmt).entropies
    p = x[0].double().abs()
    p = p / p.sum(-1, keepdim=True)
    torch.testing.assert_close(expected.double(), -(p * p.log()).sum(-1), rtol=1e-6, atol=1e-6)
    for factor in (1e-30, 1e30):
        found = reference.statistics_of(x * factor, fmt).entropies
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_entropy_of_one_value_is_not_negative() -> None:
    x = torch.diag_embed(torch.randn(1, 64))
    found = reference.statistics_of(x, tah()).entropies
    assert (found >= 0).all()
    assert (found < 1e-6).all()


def test_tokens_without_entropy_come_first() -> None:
    x = torch.randn(1, 10, 64)
    x[0, 7] = 0.0
    x[0, 3, 5] = float("nan")
    found = reference.statistics_of(x, tah())
    assert found.entropies[[3, 7]].tolist() == [0.0, 0.0]
    assert (found.entropies[[0, 1, 2, 4, 5, 6, 8, 9]] > 1.0).all()
    assert (~int4_tokens(tah_quantize(x, str(tah())), tah(), x.shape)).nonzero().view(
        -1
    ).tolist() == [3, 7]


def test_of_equal_entropies_the_first_are_lowest() -> None:
    entropy = torch.tensor([[2.0, 1.0, 2.0, 2.0, 0.5], [3.0, 3.0, 3.0, 3.0, 3.0]])
    expected = [[True, True, False, False, True], [True, True, True, False, False]]
    assert lowest(entropy, 3).tolist() == expected


@pytest.mark.parametrize("tile", TILE_SIZES)
def test_outliers_are_more_than_twice_the_second(tile: int) -> None:
    x = torch.ones(8, tile)
    x[0, tile - 1] = -2.0  # not more
    x[1, tile // 2] = -2.001
    x[2, 0] = 5.0
    x[3, 1], x[3, 2] = 5.0, -5.0  # two
    x[4] = 0.0
    x[5, 3] = float("inf")
    x[6, 3], x[6, 4] = 7.0, float("nan")
    x[7, 1] = 3e38  # its transform would not be finite
    found, pivot = find_outliers(x.abs())
    assert found.tolist() == [1, 2]
    assert pivot.tolist() == [tile // 2, 0]


@pytest.mark.parametrize("tile", TILE_SIZES)
@pytest.mark.parametrize("bits", [None, 5])
def test_error_is_half_a_scale(tile: int, bits: int | None) -> None:
    """Per value without transform, and of tiles with one in the transformed domain."""
    fmt = tah(tile) if bits is None else alike(bits, tile)
    x = torch.randn(2, 13, 2 * tile) * torch.logspace(-2, 2, 13).view(1, 13, 1)
    x.view(-1, tile)[::3, tile // 3] = -2000.0
    message = tah_quantize(x, str(fmt))
    layout = fmt.layout(*x.shape)
    scale = load_scales(message[None], layout.scale_offset, layout.tiles, fmt.codes(4)).view(-1, 1)
    outliers, pivots = reference.load_outliers(message, layout, fmt)
    assert outliers[::3].all()
    # the same scales as of INT3 or INT4
    decoded = tah_dequantize(message, *x.shape, str(fmt), torch.float32).view(-1, tile)
    error = decoded - x.view(-1, tile)
    bound = scale * 0.5001 + 1e-6 * x.view(-1, tile).abs().amax(-1, keepdim=True)
    assert (error.abs() <= bound)[~outliers].all()
    reference.transform_(error, outliers, pivots, fmt)
    assert (error.abs() <= bound)[outliers].all()
    width = x.view(-1, tile).amax(-1) - x.view(-1, tile).amin(-1)
    levels = torch.tensor(31.0)
    if layout.adaptive:
        chosen = int4_tokens(message, fmt, x.shape).repeat_interleave(layout.channels // tile)
        levels = torch.where(chosen, 15.0, 7.0)
    plain = ~outliers
    ratio = (scale.view(-1) * levels / width)[plain]
    assert ((ratio >= 1.0) & (ratio < 1.04)).all()


def test_two_outlier_channels() -> None:
    """The swap makes of an outlier a constant, which the minimum absorbs."""
    x = torch.randn(1, 100, 1600)
    x[..., 5] *= 100
    x[..., 700] *= 100
    assert error(x, tah()) < 0.384 * error(x, tah(hadamard=False))
    # of the values without the outliers, which a plain code of as many bits loses
    other = torch.ones(1600, dtype=torch.bool)
    other[[5, 700]] = False
    for fmt, low, high in ((alike(5), 0.03, 0.08), (alike(5, hadamard=False), 0.25, 0.5)):
        wrong = (round_trip(x, fmt) - x)[..., other].norm() / x[..., other].norm()
        assert low < wrong < high
    # without outliers nothing changes
    x = torch.randn(1, 100, 64).clamp(-2, 2)
    x[..., 0], x[..., 1] = 2, -2
    assert torch.equal(round_trip(x, tah()), round_trip(x, tah(hadamard=False)))


@pytest.mark.parametrize("fmt", [tah(), tah(16), tah(128), alike(5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_breaks_its_tile_alone(fmt: TAHFormat, dtype: torch.dtype) -> None:
    x = torch.randn(2, 6, 256).to(dtype)
    broken = x.clone()
    broken[0, 2, 5] = float("nan")
    broken[1, 4, -1] = float("-inf")
    expected = torch.zeros(x.numel() // fmt.tile, dtype=torch.bool)
    expected[(2 * 256 + 5) // fmt.tile] = True
    expected[(11 * 256 - 1) // fmt.tile] = True
    decoded = round_trip(broken, fmt).view(-1, fmt.tile)
    assert torch.equal(decoded.isnan().any(-1), expected)
    assert torch.equal(decoded.isnan().all(-1), expected)
    near = (decoded - x.view(-1, fmt.tile)).abs()[~expected]
    assert near.max() < 0.6


@pytest.mark.parametrize("size", [1e5, -1e5, 1e30, 3e38])
def test_spikes(size: float) -> None:
    """A spike stays one, at the resolution of the minimum, and nothing overflows."""
    x = torch.randn(1, 10, 64)
    x[0, :, 17] = size
    decoded = round_trip(x, tah())
    assert decoded.isfinite().all()
    assert (decoded[..., 17] / size - 1).abs().max() < 0.08
    assert decoded.abs().argmax(-1).unique().tolist() == [17]


def test_16_bit_inputs_and_results() -> None:
    x = torch.randn(2, 9, 64)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = x.to(dtype)
        assert torch.equal(
            tah_quantize(rounded, str(tah())), tah_quantize(rounded.float(), str(tah()))
        )
        wide = round_trip(rounded.float(), tah())
        assert torch.equal(round_trip(rounded, tah()), wide.to(dtype))


def test_many_parts_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 17, 96)
    x[..., ::40] *= 9
    for fmt in (tah(32), tah(8), alike(5, 32)):
        message = tah_quantize(x, str(fmt))
        decoded = tah_dequantize(message, *x.shape, str(fmt), torch.float32)
        with monkeypatch.context() as context:
            context.setattr(reference, "_PART_NUMEL", 200)
            assert torch.equal(tah_quantize(x, str(fmt)), message)
            again = tah_dequantize(message, *x.shape, str(fmt), torch.float32)
        assert torch.equal(again, decoded)


def test_errors_name_value_and_remedy() -> None:
    x = torch.randn(1, 10, 64)
    with pytest.raises(ValueError, match=r"float64; allowed: .*x.float\(\)"):
        tah_quantize(x.double(), str(tah()))
    with pytest.raises(ValueError, match=r"expected contiguous .*x.contiguous\(\)"):
        tah_quantize(x.mT, str(tah()))
    with pytest.raises(ValueError, match="100 channels are not whole tiles of 64"):
        tah_quantize(torch.randn(1, 2, 100), str(tah()))
    with pytest.raises(ValueError, match="is not a format of TAH-Quant"):
        tah_quantize(x, "tah/64")
    with pytest.raises(ValueError, match="is not a format of TAH-Quant"):
        tah_quantize(x, "tah/48/4/1/5/hadamard")
    for text in ("tah/64/9/0/hadamard", "tah/64/5/1/5/hadamard", "tah/64/4/0/swap"):
        with pytest.raises(ValueError, match="is not a format of TAH-Quant"):
            tah_quantize(x, text)
    with pytest.raises(ValueError, match=r"has rows of \d+ bytes"):
        tah_dequantize(tah_quantize(x, str(tah())), 1, 11, 64, str(tah()), x.dtype)


def test_operators_can_be_traced() -> None:
    x = torch.randn(2, 10, 64)
    message = tah_quantize(x, str(tah()))
    torch.library.opcheck(tah_quantize, (x, str(tah())))
    torch.library.opcheck(tah_dequantize, (message, 2, 10, 64, str(tah()), torch.bfloat16))
