"""Casts to FP8 and rebuilds straight from codes: the reference, and what the operators refuse."""

from __future__ import annotations

import pytest
import torch

from lq_lightning.kernels.activation import activation_dequantize, activation_quantize
from lq_lightning.kernels.float8 import (
    activation_dequantize_float8,
    dequantize_float8,
    float8_cast,
    float8_quantize,
    norm_dequantize_float8,
)
from lq_lightning.kernels.float8.reference import MAX_VALUE, MIN_SCALE
from lq_lightning.kernels.message import parse_format
from lq_lightning.kernels.message.matrix import decode_matrix, encode_matrix
from lq_lightning.kernels.norm import KINDS, norm_dequantize, norm_quantize

E4M3 = torch.float8_e4m3fn
FOUR = "int4/64/asymmetric/32/nearest/bfloat16"
EIGHT = "fp8_e4m3/16/symmetric/0/nearest/bfloat16"
FIVE = "int5/16/asymmetric/0/nearest/float16"
SIX = "int6/64/asymmetric/16/nearest/float32"
INF, NAN = float("inf"), float("nan")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Half the distance between neighbours, relative to a normal value.
HALF_STEP = 2.0**-4
SMALLEST = 2.0**-9


def bits(q: torch.Tensor) -> torch.Tensor:
    return q.view(torch.uint8)


def check_padding(q: torch.Tensor, columns: int) -> torch.Tensor:
    """Check that rows end in zeros at a multiple of 16; return what is before."""
    assert q.is_contiguous()
    assert q.shape[1] == -(-columns // 16) * 16
    assert not bits(q)[:, columns:].any()
    return q[:, :columns]


@pytest.mark.parametrize("shape", [(5, 37), (16, 16), (1, 1), (0, 8), (8, 0)])
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16])
def test_cast(shape: tuple[int, int], wide: torch.dtype) -> None:
    x = (3 * torch.randn(shape)).to(wide)
    q, q_t, scale, amax = float8_quantize(x, True, True)
    assert (q.dtype, q_t.dtype, scale.dtype) == (E4M3, E4M3, torch.float32)
    inside = check_padding(q, shape[1])
    assert torch.equal(bits(check_padding(q_t, shape[0])), bits(inside).t())
    if x.numel() == 0:
        assert amax.item() == 0.0
        return
    assert amax.item() == x.abs().max().item()
    assert torch.equal(scale, amax / torch.tensor([MAX_VALUE]))
    error = (inside.double() * scale.double() - x.double()).abs()
    step = torch.maximum(x.double().abs() * HALF_STEP, SMALLEST * scale.double() / 2)
    assert (error <= step * (1 + 1e-6)).all()
    assert (bits(inside).long() & 0x7F).max() == 0x7E


def test_only_what_is_asked_for() -> None:
    x, amax = torch.randn(5, 7), torch.ones(1)
    both = float8_cast(x, amax, True, True)
    for rows in (False, True):
        for columns in (False, True):
            q, q_t, scale = float8_cast(x, amax, rows, columns)
            assert scale == both[2]
            for asked, part, whole in ((rows, q, both[0]), (columns, q_t, both[1])):
                assert part.dtype == E4M3
                assert torch.equal(bits(part), bits(whole)) if asked else part.shape == (0, 0)


@pytest.mark.parametrize("asked", [(True, False), (False, True)])
@pytest.mark.parametrize("device", DEVICES)
def test_quantize_is_a_cast_by_the_largest_magnitude(device: str, asked: tuple[bool, bool]) -> None:
    for x in (torch.randn(5, 40, device=device), torch.full((3, 16), NAN, device=device)):
        *cast, amax = float8_quantize(x, *asked)
        assert torch.equal(amax.nan_to_num(-1.0), x.abs().amax().view(1).nan_to_num(-1.0))
        for actual, expected in zip(cast, float8_cast(x, amax, *asked), strict=True):
            assert torch.equal(bits(actual), bits(expected))


def test_values_beyond_amax_are_clipped_and_those_that_are_not_finite_are_not() -> None:
    x = torch.tensor([[1.0, 2.0, -3.0, 1e30, INF, -INF, NAN, -0.0]])
    q, _, scale = float8_cast(x, torch.ones(1), True, False)
    assert bits(q)[0, :8].tolist() == [0x7E, 0x7E, 0xFE, 0x7E, 0x7F, 0x7F, 0x7F, 0x80]
    assert torch.equal(scale, torch.ones(1) / torch.tensor([MAX_VALUE]))


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_amax_that_is_not_finite(value: float) -> None:
    x = torch.randn(3, 20)
    x[2, 19] = value
    q, _, scale, amax = float8_quantize(x, True, False)
    assert torch.equal(amax, torch.tensor([abs(value)])) or (value != value and amax.isnan())
    assert (q[:, :20].float() * scale).isnan().all()


def test_zeros_and_tiny_values() -> None:
    q, _, scale = float8_cast(torch.zeros(2, 16), torch.zeros(1), True, False)
    assert not bits(q).any()
    assert scale.item() == MIN_SCALE
    for largest in (448 * MIN_SCALE, 2.0**-149):
        x = torch.full((1, 16), largest)
        q, _, scale, _ = float8_quantize(x, True, False)
        assert scale.item() == MIN_SCALE
        assert q.float().eq(448.0 if largest > 1e-30 else 0.0).all()


def test_rows_of_a_larger_matrix() -> None:
    wide = torch.randn(6, 50)
    x = wide[:, 3:40]
    x[0, 0], wide[0, 49] = 9.0, 100.0
    assert float8_quantize(x, False, False)[3].item() == 9.0
    for ours, theirs in zip(
        float8_cast(x, torch.ones(1), True, True),
        float8_cast(x.contiguous(), torch.ones(1), True, True),
        strict=True,
    ):
        assert torch.equal(bits(ours), bits(theirs))


def check_rebuild(q_t: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> None:
    """``q_t`` holds fp32 ``y`` within half a step, and what the multiplications round."""
    assert q_t.dtype == E4M3
    decoded = check_padding(q_t, y.shape[0]).t().float() * scale
    step = torch.maximum(y.abs() * HALF_STEP, SMALLEST * scale / 2)
    assert ((decoded - y).abs() <= step * (1 + 1e-5)).all()


@pytest.mark.parametrize("format", [FOUR, EIGHT, FIVE, SIX])
@pytest.mark.parametrize("shape", [(13, 64), (32, 70), (0, 64)])
def test_rebuild_of_codes(shape: tuple[int, int], format: str) -> None:
    fmt = parse_format(format)
    message = encode_matrix(torch.randn(shape), fmt)
    y = decode_matrix(message, *shape, fmt)
    scale = float8_quantize(y, False, False)[2]
    check_rebuild(dequantize_float8(message, *shape, format, scale), y, scale)


@pytest.mark.parametrize("with_weight", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rebuild_of_norms(kind: str, with_weight: bool) -> None:
    x, numel = torch.randn(21, 64) + 0.5, 64
    weight = 1 + 0.2 * torch.randn(numel).bfloat16() if with_weight else None
    bias = torch.randn(numel) if with_weight and kind == "layer" else None
    _, rstd, message, amax = norm_quantize(x, weight, bias, 1e-5, kind, FOUR, torch.float32, True)
    scale = float8_cast(x, amax, False, False)[2]
    arguments = (message, rstd, weight, bias, numel, kind, FOUR)
    y = norm_dequantize(*arguments, torch.float32, torch.float32)
    # 4-bit codes reach beyond the exact output's largest value, which decides the scale.
    y = y.clamp(-amax, amax)
    check_rebuild(norm_dequantize_float8(*arguments, scale), y, scale)


@pytest.mark.parametrize("gated", [False, True])
def test_rebuild_of_activations(gated: bool) -> None:
    x, up = torch.randn(17, 64), torch.randn(17, 64) if gated else None
    _, message, up_message, amax = activation_quantize(x, up, "silu", FOUR, True)
    scale = float8_cast(x, amax, False, False)[2]
    arguments = (message, up_message, 17, 64, "silu", FOUR)
    y = activation_dequantize(*arguments, torch.float32).clamp(-amax, amax)
    check_rebuild(activation_dequantize_float8(*arguments, scale), y, scale)


def test_codes_of_groups_that_are_not_finite_are_nan() -> None:
    x = torch.randn(4, 128)
    x[1, 70] = INF
    message = encode_matrix(x, parse_format(FOUR))
    q_t = dequantize_float8(message, 4, 128, FOUR, torch.ones(1))
    assert torch.equal(q_t.t().float().isnan().nonzero()[:, 0].unique(), torch.tensor([1]))
    assert (bits(q_t)[64:128, 1] == 0x7F).all()
    assert q_t[:64].float().isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    x = torch.randn(5, 64, device=device)
    amax, weight = x.abs().amax().view(1), torch.ones(64, device=device)
    for rows, columns in ((True, True), (False, True), (True, False), (False, False)):
        torch.library.opcheck(float8_cast, (x[:, :50], amax, rows, columns))
        torch.library.opcheck(float8_quantize, (x[:, :50], rows, columns))
    _, rstd, message, _ = norm_quantize(x, weight, None, 1e-5, "rms", FOUR, x.dtype, False)
    torch.library.opcheck(dequantize_float8, (message, 5, 64, FOUR, amax))
    norm = (message, rstd, weight, None, 64, "rms", FOUR, amax)
    torch.library.opcheck(norm_dequantize_float8, norm)
    empty = message.new_empty(0, 0)
    for up in (message, empty):
        torch.library.opcheck(
            activation_dequantize_float8, (message, up, 5, 64, "silu", FOUR, amax)
        )


def test_wrong_arguments_are_refused() -> None:
    x, one = torch.randn(4, 64), torch.ones(1)
    message = encode_matrix(x, parse_format(FOUR))
    with pytest.raises(ValueError, match=r"x is torch.float32 \(4,\); it must be a matrix"):
        float8_quantize(x[:, 0], True, True)
    with pytest.raises(ValueError, match=r"x has stride 2 .*Pass x.contiguous"):
        float8_cast(x[:, ::2], one, True, True)
    with pytest.raises(ValueError, match=r"x has stride 2 .*Pass x.contiguous"):
        float8_quantize(x[:, ::2], True, True)
    with pytest.raises(ValueError, match="amax is torch.float64"):
        float8_cast(x, one.double(), True, True)
    with pytest.raises(ValueError, match=r"scale is torch.float32 \(2,\)"):
        dequantize_float8(message, 4, 64, FOUR, torch.ones(2))
    with pytest.raises(ValueError, match="this format and numel need 192"):
        dequantize_float8(message, 5, 64, FOUR, one)
    with pytest.raises(NotImplementedError, match="one scale per row"):
        dequantize_float8(message, 4, 64, FOUR.replace("/64/", "/row/"), one)
    rstd = torch.ones(4, 1)
    with pytest.raises(ValueError, match="kind='batch' is not a kind"):
        norm_dequantize_float8(message, rstd, None, None, 64, "batch", FOUR, one)
    with pytest.raises(ValueError, match="rstd is"):
        norm_dequantize_float8(message, rstd[:, 0], None, None, 64, "layer", FOUR, one)
    with pytest.raises(ValueError, match="weight is torch.float32"):
        norm_dequantize_float8(message, rstd, x[0, 1:], None, 64, "rms", FOUR, one)
    meta = torch.empty(0, 0, dtype=torch.uint8, device="meta")
    with pytest.raises(NotImplementedError, match="a matrix of 8388608 rows, 64 values apart"):
        dequantize_float8(meta, 2**23, 64, FOUR, one.to("meta"))
    with pytest.raises(ValueError, match="activation='mish' is not supported"):
        activation_dequantize_float8(message, message, 4, 64, "mish", FOUR, one)
