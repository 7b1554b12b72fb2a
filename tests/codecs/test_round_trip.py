"""Encode then decode: error bounds derived from the format, and what must be exact."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lq_testing.codec_data import FP32_MAX, codec_specs

from lq_lightning.codecs import CodecSpec, decode, encode
from lq_lightning.kernels.message import CODES
from lq_lightning.kernels.message import reference as blocks

# Relative error of the few fp32 operations on the way (each 2**-24).
SLOP = 2.0**-20


def stored_scales(spec: CodecSpec, message: torch.Tensor, numel: int) -> torch.Tensor:
    """Return ``[R, numel]``: the scale that each element was encoded with."""
    fmt = spec.message_format
    layout = fmt.layout(numel)
    scale = blocks.load_scales(message, layout.scale_offset, layout.num_groups, fmt)
    size = numel if spec.group_size == "row" else spec.group_size
    return scale.repeat_interleave(size, dim=1)[:, :numel]


def error_bound(spec: CodecSpec, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the largest error per element of a codec without transform."""
    steps = 1.0 if spec.rounding == "stochastic" else 0.5
    magnitude = x.abs()
    code = CODES[spec.code]
    if code.kind == "float":
        smallest = 2.0 ** (code.min_exponent - code.mantissa_bits)
        # One unit in the last place of |x|, never below that of the subnormals.
        unit = torch.maximum(2.0**-code.mantissa_bits * magnitude, smallest * scale)
        return steps * unit * (1 + SLOP) + SLOP * magnitude
    if code.kind == "table":
        widest = max(b - a for a, b in zip(code.levels[:-1], code.levels[1:], strict=True))
        return steps * widest * scale * (1 + SLOP) + SLOP * magnitude + 2.0**-126
    levels = 2.0**code.bits
    bound = scale * (steps + levels * SLOP) + SLOP * magnitude
    # A group is stored as zeros (or as its minimum) when its scale would be subnormal.
    return torch.where(scale == 0, levels * 2.0**-126 + SLOP * magnitude, bound)


def rows_of(seed: int, rows: int, numel: int, exponent: int, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, numel, generator=generator)
    heavy = torch.exp(spread * torch.randn(rows, numel, generator=generator))
    return x * heavy * 2.0**exponent


@settings(max_examples=150, deadline=None)
@given(
    codec_specs(),
    st.integers(0, 2**31),
    st.integers(1, 3),
    st.integers(1, 700),
    st.integers(-30, 10),
    st.floats(0, 3),
)
def test_error_is_bounded(
    spec: CodecSpec, seed: int, rows: int, numel: int, exponent: int, spread: float
) -> None:
    spec = dataclasses.replace(spec, hadamard_size=0)
    x = rows_of(seed, rows, numel, exponent, spread)
    message = encode(spec, x, seed=seed)
    error = (decode(spec, message, numel) - x).abs()
    scale = stored_scales(spec, message, numel)
    bound = error_bound(spec, x, scale)
    if not spec.symmetric:
        # The minimum may be as far as the largest magnitude of the group.
        bound = bound + SLOP * x.abs().amax()
    assert scale.isfinite().all()
    # Beyond that, groups shrink, which adds to the error: those whose minimum no fp16 holds, too.
    limit = 0.9 * 65504.0 * (spec.message_format.max_level if spec.symmetric else 1.0)
    assert (error <= bound).all() or (spec.scale_dtype == "float16" and x.abs().amax() > limit)


@settings(max_examples=80, deadline=None)
@given(
    codec_specs(), st.integers(0, 2**31), st.integers(1, 700), st.sampled_from([16, 32, 64, 128])
)
def test_transformed_error_is_bounded(spec: CodecSpec, seed: int, numel: int, size: int) -> None:
    group_size = spec.group_size if spec.group_size == "row" else max(spec.group_size, size)
    spec = dataclasses.replace(
        spec, hadamard_size=size, group_size=group_size, scale_dtype="float32"
    )
    x = rows_of(seed, 1, numel, 0, 1.0)
    message = encode(spec, x, seed=seed)
    error = decode(spec, message, numel) - x
    # In the transformed domain every element errs by at most `steps` units; the inverse keeps the
    # L2 norm up to sqrt(size) * inverse_norm.
    padded = -(-numel // size) * size
    steps = 1.0 if spec.rounding == "stochastic" else 0.5
    scale = stored_scales(spec, message, padded).view(-1, size)
    unit = scale
    code = CODES[spec.code]
    if code.kind == "float":
        unit = scale * code.max_value * 2.0**-code.mantissa_bits
    inverse_norm = spec.message_format.inverse_norm
    bound = steps * unit[:, 0] * size * inverse_norm
    blocks_of_error = torch.nn.functional.pad(error, (0, padded - numel)).view(-1, size)
    slop = 1e-5 * x.abs().amax() * size**0.5
    assert (blocks_of_error.norm(dim=1) <= bound * (1 + 1e-4) + slop).all()


@pytest.mark.parametrize(
    ("code", "rounding"),
    [(code, "nearest") for code in CODES]
    + [(code, "stochastic") for code, entry in CODES.items() if entry.kind != "table"],
)
def test_representable_values_are_kept(code: str, rounding: str) -> None:
    """Values on the grid of their scale come back exactly, whatever the rounding."""
    spec = CodecSpec(code=code, group_size=256, rounding=rounding)  # type: ignore[arg-type]
    entry = CODES[code]
    if entry.kind == "float":
        x = blocks.dequantize_codes(
            torch.arange(2**entry.bits, dtype=torch.uint8), spec.message_format
        )
        x = x[x.abs() <= entry.max_value]  # others are what FP8 has for infinities and NaN
        x = torch.cat([x, torch.zeros(256 - x.numel())])[None]
    elif entry.kind == "table":
        x = torch.tensor(entry.levels).repeat(16)[None]
    else:
        largest = 2 ** (int(code[3:]) - 1) - 1
        x = (torch.arange(256) % (2 * largest + 1) - largest).float()[None] * 0.25
    x = x.repeat(1, 20)
    assert torch.equal(decode(spec, encode(spec, x, seed=1), x.shape[1]), x)


@pytest.mark.parametrize("code", [c for c, entry in CODES.items() if entry.kind == "integer"])
def test_asymmetric_ends_are_kept(code: str) -> None:
    """The minimum is exact with an fp32 scale, and a constant group is exact."""
    spec = CodecSpec(code=code, group_size=64, symmetric=False)  # type: ignore[arg-type]
    x = torch.rand(1, 640) + 3.0
    x[:, 64:128] = 1.7
    decoded = decode(spec, encode(spec, x), 640)
    groups, decoded_groups = x.view(10, 64), decoded.view(10, 64)
    assert torch.equal(groups.amin(1), decoded_groups.amin(1))
    assert torch.equal(groups[1], decoded_groups[1])


@settings(max_examples=40, deadline=None)
@given(codec_specs(), st.integers(0, 600))
def test_zeros_decode_to_exact_zeros(spec: CodecSpec, numel: int) -> None:
    x = torch.zeros(2, numel)
    x[1] = -0.0
    decoded = decode(spec, encode(spec, x, seed=9), numel)
    assert torch.equal(decoded, torch.zeros(2, numel))
    # Floating-point codes have a negative zero, which torch's casts keep too.
    if CODES[spec.code].kind != "float":
        assert not decoded.signbit().any()


@settings(max_examples=60, deadline=None)
@given(
    codec_specs(),
    st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    st.integers(0, 999),
)
def test_one_bad_value_poisons_its_group_alone(
    spec: CodecSpec, value: float, position: int
) -> None:
    clean = torch.randn(2, 1000)
    dirty = clean.clone()
    dirty[1, position] = value
    expected = decode(spec, encode(spec, clean, seed=4), 1000)
    actual = decode(spec, encode(spec, dirty, seed=4), 1000)
    size = 1000 if spec.group_size == "row" else spec.group_size
    start = position // size * size
    inside = torch.zeros(2, 1000, dtype=torch.bool)
    inside[1, start : start + size] = True
    assert actual[inside].isnan().all()
    assert torch.equal(actual[~inside], expected[~inside])


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_subnormal_groups(scale_dtype: str, symmetric: bool) -> None:
    """Groups too small for a normal fp32 scale become zeros, not NaN."""
    spec = CodecSpec(
        code="int8",
        group_size=16,
        symmetric=symmetric,
        scale_dtype=scale_dtype,  # type: ignore[arg-type]
    )
    x = torch.randn(1, 160) * 1e-40
    decoded = decode(spec, encode(spec, x), 160)
    assert decoded.isfinite().all()
    if scale_dtype == "float32":
        assert ((decoded - x).abs() <= 2 * x.abs().amax()).all()


def test_asymmetric_padding_does_not_widen_the_range() -> None:
    spec = CodecSpec(code="int4", group_size=64, symmetric=False)
    x = torch.rand(1, 67) + 100.0
    decoded = decode(spec, encode(spec, x), 67)
    assert ((decoded - x).abs() <= 0.5 / 15 + 1e-4).all()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("hadamard_size", [0, 16])
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
def test_finite_values_stay_finite(code: str, hadamard_size: int, scale_dtype: str) -> None:
    """Up to the largest of fp32, without a transform and before its sums overflow."""
    spec = CodecSpec(
        code=code,  # type: ignore[arg-type]
        group_size=16,
        hadamard_size=hadamard_size,
        scale_dtype=scale_dtype,  # type: ignore[arg-type]
    )
    magnitudes = torch.exp2(torch.arange(110, 129).double()) * (1 - 2.0**-24)
    x = magnitudes.to(torch.float32).clamp(max=FP32_MAX / max(1, hadamard_size))
    x = x[:, None] * torch.cat([torch.ones(19, 1), torch.rand(19, 15) * 2 - 1], dim=1)
    decoded = decode(spec, encode(spec, x), 16)
    assert decoded.isfinite().all()
    # Little more than the same groups lose where nothing is close to a limit.
    small = x * 2.0**-100
    relative = ((decoded - x) / x[:, :1]).abs().amax()
    usual = ((decode(spec, encode(spec, small), 16) - small) / small[:, :1]).abs().amax()
    assert relative <= usual + 2.0**-7


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float16"])
def test_wide_asymmetric_groups_shrink(bits: int, scale_dtype: str) -> None:
    """Where the range, or a half-precision minimum, overflows: a power of two of the group."""
    spec = CodecSpec(
        code=f"int{bits}",  # type: ignore[arg-type]
        group_size=16,
        symmetric=False,
        scale_dtype=scale_dtype,  # type: ignore[arg-type]
    )
    x = torch.linspace(-1, 1, 16)[None] * FP32_MAX
    decoded = decode(spec, encode(spec, x), 16)
    factor = 2.0 ** (13 - 127 if scale_dtype == "float16" else -2)
    step = 2 * factor * FP32_MAX / (2**bits - 1)
    assert ((decoded.double() - factor * x.double()).abs() <= step * (0.5 + 0.01 * 2**bits)).all()
    bounded = x.clamp(-FP32_MAX / 4, FP32_MAX / 4)
    if scale_dtype != "float16":
        error = (decode(spec, encode(spec, bounded), 16) - bounded).abs().amax()
        assert error <= FP32_MAX / 2 / (2**bits - 1) * (0.5 + 0.01 * 2**bits)


def test_symmetric_groups_beyond_a_half_precision_scale_shrink() -> None:
    spec = CodecSpec(code="int8", group_size=16, scale_dtype="float16")
    x = torch.linspace(-1, 1, 16)[None] * 1e30
    decoded = decode(spec, encode(spec, x), 16)
    torch.testing.assert_close(decoded, x * (127 * 65504 / 1e30), rtol=0, atol=65504 * 0.51)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("code", ["int4", "nf4"])
def test_groups_of_huge_values_are_still_poisoned(code: str, bad: float) -> None:
    x = torch.full((1, 32), FP32_MAX)
    x[0, 3] = bad
    for symmetric in (True, False) if code == "int4" else (True,):
        spec = CodecSpec(code=code, group_size=16, symmetric=symmetric)  # type: ignore[arg-type]
        decoded = decode(spec, encode(spec, x), 32)
        assert decoded[0, :16].isnan().all()
        assert decoded[0, 16:].isfinite().all()


def test_sums_of_a_transform_that_overflow_poison_their_group() -> None:
    x = torch.full((1, 64), FP32_MAX / 4)
    x[0, 32:] = FP32_MAX / 32
    spec = CodecSpec(code="int8", group_size=32, hadamard_size=32)
    decoded = decode(spec, encode(spec, x), 64)
    assert decoded[0, :32].isnan().all()
    torch.testing.assert_close(decoded[0, 32:], x[0, 32:])
