"""Codes of optimizer states: what they keep on average, what they never do, Triton's codes."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from lq_testing.interpreter import skip_old_interpreter
from torch import Tensor

from lq_lightning.kernels.optimizer_step.formats import (
    FORMATS,
    StateFormat,
    level_pairs,
    state_format,
)
from lq_lightning.kernels.optimizer_step.reference import (
    decode_groups,
    encode_groups,
    rounding_noise,
)
from lq_lightning.kernels.optimizer_step.triton_codes import (
    encode_groups as encode_groups_in_triton,
)
from lq_lightning.kernels.optimizer_step.triton_codes import (
    groups_of_lanes,
    inner_columns,
    lane_columns,
    nearby_levels,
)

QUANTIZED = [name for name in FORMATS if name not in ("float32", "int8")]
SIGNED_AND_UNSIGNED = [(name, signed) for name in QUANTIZED for signed in (True, False)]
EVERY = [*SIGNED_AND_UNSIGNED, ("int8", True)]
CPU = torch.device("cpu")


def round_trip(x: Tensor, fmt: StateFormat, seed: int | None = 0) -> Tensor:
    """Decoded codes of ``[R, 128]``, unchanged but for noise; the nearest without a seed."""
    groups = x.reshape(-1, fmt.group_size).contiguous()
    noise = None
    if seed is not None:
        noise = rounding_noise(seed, 0, len(groups), 1, CPU, fmt.group_size)
    return decode_groups(*encode_groups(groups, fmt, noise, groups), fmt).view_as(x)


def wide(octaves: float) -> Tensor:
    """A group whose second half spans one octave below 1, and its first that many octaves."""
    low = torch.exp2(-octaves * torch.linspace(1, 0.1, 64))
    return torch.cat([low, torch.exp2(-torch.linspace(0.01, 1, 64))])


# --- on average -----------------------------------------------------------------------------------


@pytest.mark.parametrize("octaves", [0.5, 6.0, 15.0, 30.0])
@pytest.mark.parametrize("name", [*QUANTIZED, "int8"])
def test_signed_codes_keep_the_mean(name: str, octaves: float) -> None:
    fmt = state_format(name, signed=True)
    x = wide(octaves) * (1 - 2 * (torch.arange(128) % 2))
    found = round_trip(x.expand(1 << 13, -1), fmt)
    mean, low, high = found.double().mean(0), found.amin(0), found.amax(0)
    gap = (high - low).maximum(x.abs() / 128)
    kept = low * high > 0  # the codebook makes less than half its smallest level zero
    if name != "dynamic8":
        kept[:] = True
    error = ((mean - x) / gap)[kept]
    assert error.abs().max() < 0.03  # 5 standard deviations of half a gap
    assert error.mean().abs() < 0.004


@pytest.mark.parametrize("octaves", [0.5, 6.0, 15.0, 60.0])
@pytest.mark.parametrize("name", QUANTIZED)
def test_unsigned_codes_keep_the_mean_of_the_logarithm(name: str, octaves: float) -> None:
    """Without the skew of the noise it would be lower by a sixtieth of a gap, with 60 octaves."""
    fmt = state_format(name, signed=False)
    x = wide(octaves)
    found = round_trip(x.expand(1 << 13, -1), fmt)
    low, high = found.amin(0), found.amax(0)
    inner = slice(64, None)  # an octave, evenly
    error = (found.double().log().mean(0) - x.double().log())[inner]
    gap = (high.double() / low).log()[inner].mean()
    assert error.mean().abs() < 0.004 * gap


def test_levels_of_second_moments_stay() -> None:
    """Whatever the noise, and whatever the scale as long as the range asks for no fewer bits."""
    fmt = state_format("expanded_fp8", signed=False)
    x = 1 + torch.rand(64, 128)
    once = round_trip(x, fmt, seed=1)
    for seed in range(2, 6):
        assert torch.equal(round_trip(once, fmt, seed), once)
    larger = once.clone()
    larger[:, 0] *= 1.7  # moves the scale
    assert torch.equal(round_trip(larger, fmt, seed=6)[:, 1:], once[:, 1:])


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0, 2.0])
def test_error_of_one_rounding(sigma: float) -> None:
    """About that of COAT's powers of E4M3: 1.4, 1.65, 2.0 and 2.9% where scales differ so much."""
    scale = torch.exp(sigma * torch.randn(256, 128))
    x = scale * torch.randn(256, 128)
    error = (round_trip(x, state_format("expanded_fp8", signed=True), None) - x) / scale
    bound = {0.0: 0.014, 0.5: 0.019, 1.0: 0.025, 2.0: 0.04}[sigma]
    assert bound / 2 < error.square().mean().sqrt() < bound


def test_even_levels_have_the_least_error_of_noise() -> None:
    """Two fifths of other formats where values change; by chance it is 1.4 times as large."""
    x = torch.randn(256, 128)
    errors = [
        (round_trip(x, state_format(name, signed=True)) - x).square().mean().sqrt().item()
        for name in ("expanded_fp8", "dynamic8", "int8")
    ]
    fmt, groups = state_format("int8", signed=True), x.view(-1, 32)
    noise = rounding_noise(0, 0, len(groups), 1, CPU, 32)
    changed = decode_groups(*encode_groups(groups, fmt, noise, torch.zeros_like(groups)), fmt)
    error = (changed - groups).square().mean().sqrt()
    assert 0.0052 < error < 0.0057 < 0.4 * min(errors[:2])
    assert 1.35 < errors[2] / error < 1.45


def test_a_momentum_without_gradients_ends() -> None:
    """Also where the largest of its group stays, and every step is less than a level."""
    fmt = state_format("int8", signed=True)
    x = torch.linspace(-1, 1, 32)[None]
    x[0, 0] = 1
    for step in range(2400):
        old = x.clone()
        x[0, 1:] *= 0.99
        noise = rounding_noise(step, 0, 1, 1, CPU, 32)
        x = decode_groups(*encode_groups(x, fmt, noise, old), fmt)
    assert torch.equal(x.nonzero(), torch.tensor([[0, 0]]))


def test_int8_is_signed() -> None:
    with pytest.raises(ValueError, match="'int8' has signs"):
        state_format("int8", signed=False)


# --- what never happens ---------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [4.0, 8.0, 12.0, 16.0, 20.0])
@pytest.mark.parametrize("name", QUANTIZED)
def test_second_moments_are_never_lost(name: str, sigma: float) -> None:
    """Nothing but zero becomes zero, and nothing becomes less than the level below it."""
    fmt = state_format(name, signed=False)
    x = torch.exp(sigma * torch.randn(256, 128)).clamp(2.0**-120, 2.0**120)
    found = round_trip(x, fmt)
    if name == "expanded_fp8":
        assert (found > 0.79 * x).all()  # two mantissa bits
    else:
        assert (found > 0.36 * x).all()
    x[:, ::2] = 0
    assert torch.equal(round_trip(x, fmt) == 0, x == 0)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("value", [1.0, 3.0e-7, 2.9, 2.0**-126, 6.0e37])
def test_constant_groups_and_single_elements(value: float, signed: bool) -> None:
    fmt = state_format("expanded_fp8", signed)
    constant = torch.full((2, 128), value)
    single = torch.zeros(2, 128)
    single[:, 5] = -value if signed else value
    for x in (constant, single):
        _, _, exponent = encode_groups(x, fmt)
        assert exponent is not None
        assert (exponent == 7).all()
        torch.testing.assert_close(round_trip(x, fmt), x, rtol=1 / 64, atol=0)


@pytest.mark.parametrize(("name", "signed"), EVERY)
def test_zeros_and_broken_groups(name: str, signed: bool) -> None:
    fmt = state_format(name, signed)
    size = fmt.group_size
    x = torch.randn(5, size)
    x = x if signed else x.abs()
    x[0] = 0
    x[1] = 1e-39
    x[2, 3] = float("nan")
    x[3, -4] = float("inf")
    x[4, 0] = 1.0e38  # beyond 2**126
    noise = rounding_noise(0, 0, 5, 1, CPU, size)
    codes, scale, exponent = encode_groups(x, fmt, noise, x)
    decoded = decode_groups(codes, scale, exponent, fmt)
    assert torch.equal(decoded[:2], torch.zeros(2, size))
    assert torch.equal(scale[:2], torch.zeros(2, dtype=torch.bfloat16))
    assert decoded[2:].isnan().all()


@pytest.mark.parametrize("seed", [None, 0])
def test_second_moments_at_the_ends_of_a_range(seed: int | None) -> None:
    """The smallest value of a group has a level on either side, however far it is from the largest.

    Up to 64 octaves. Without slack in the choice of the mantissa bits, groups that just fill the
    codes would have to raise it to the smallest level.
    """
    fmt = state_format("expanded_fp8", signed=False)
    for mantissa_bits in range(3, 8):
        unit = 1 << (23 - mantissa_bits)
        spans = (torch.linspace(240, 260, 401) * unit).int()
        for largest in (0x3F800000, 0x3F800001, 0x3FFFFFFF):
            x = (largest - spans)[:, None].repeat(1, 128)
            x[:, ::2] = largest
            x = x.view(torch.float32)
            _, _, exponent = encode_groups(x, fmt)
            assert exponent is not None
            assert set(exponent.tolist()) == {mantissa_bits, mantissa_bits - 1}
            gap = torch.exp2(-exponent.float())[:, None]
            assert ((round_trip(x, fmt, seed) / x - 1).abs() <= gap).all()


# --- noise ----------------------------------------------------------------------------------------


def test_noise_depends_on_position_only() -> None:
    whole = rounding_noise(5, 0, 8, 1, CPU)
    assert torch.equal(whole[3:], rounding_noise(5, 3, 5, 1, CPU))
    streams = torch.stack([rounding_noise(5, 0, 4096, stream, CPU) for stream in range(3)])
    uniform = streams.view(3, -1).double() / 2**32
    assert (uniform.mean(1) - 0.5).abs().max() < 0.002
    assert torch.equal(torch.corrcoef(uniform).abs() > 0.02, torch.eye(3, dtype=torch.bool))
    others = torch.stack([rounding_noise(seed, 7, 1, 1, CPU)[0, 0] for seed in range(4096)])
    assert abs(others.double().mean() / 2**32 - 0.5) < 0.03
    lag = torch.corrcoef(torch.stack([others[1:], others[:-1]]).double())[0, 1]
    assert abs(lag) < 0.08


# --- Triton ---------------------------------------------------------------------------------------


@triton.jit
def encode_kernel(
    x_ptr,
    old_ptr,
    noise_ptr,
    codes_ptr,
    scale_ptr,
    exponent_ptr,
    levels_ptr,
    FORMAT: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    group = tl.program_id(0) * AT_ONCE + groups_of_lanes(AT_ONCE)
    GROUP: tl.constexpr = FORMAT.group_size
    offsets = group * GROUP + lane_columns(AT_ONCE) + inner_columns(AT_ONCE, GROUP)
    x, old = tl.load(x_ptr + offsets), tl.load(old_ptr + offsets)
    noise = tl.load(noise_ptr + offsets).to(tl.uint32)
    levels = nearby_levels(levels_ptr, FORMAT)
    codes, scale, exponent = encode_groups_in_triton(x, old, levels, noise, FORMAT)
    tl.store(codes_ptr + offsets, codes)
    tl.store(scale_ptr + group, tl.broadcast_to(scale, group.shape))
    tl.store(exponent_ptr + group, tl.broadcast_to(exponent, group.shape))


def encode(
    x: Tensor, old: Tensor, noise: Tensor, fmt: StateFormat, at_once: int = 4
) -> tuple[Tensor, Tensor, Tensor | None]:
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(len(x), dtype=torch.bfloat16, device=x.device)
    exponent = torch.empty(len(x), dtype=torch.uint8, device=x.device)
    levels = level_pairs(fmt, x.device) if fmt.has_codebook else x
    encode_kernel[(len(x) // at_once,)](
        *(x, old, noise, codes, scale.view(torch.uint16), exponent, levels),
        FORMAT=fmt,
        AT_ONCE=at_once,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return codes, scale, exponent if fmt.expanded else None


def near_levels(fmt: StateFormat, groups: int, device: torch.device) -> Tensor:
    """``[groups, S]``: in turn values a few roundings from levels, and of any magnitude.

    Groups have many scales and ranges. Values include zeros, subnormal ones and the largest of each
    group.
    """
    generator = torch.Generator(device).manual_seed(0)
    shape = (groups, fmt.group_size)

    def draw() -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    scale = torch.exp2(200 * draw()[:, :1] - 100).bfloat16().float()
    wide = scale * 10 ** (-(0.3 + 20 * draw()[:, :1] ** 3) * draw())
    levels = decode_groups(*encode_groups(wide, fmt), fmt)
    near = (levels.abs().view(torch.int32) + (7 * draw()).int() - 3).clamp(min=0)
    x = torch.where(
        (torch.arange(groups, device=device) % 2 == 0)[:, None], near.view(torch.float32), wide
    )
    x[:, 1] = scale[:, 0]
    x[::3, 2:5] = torch.tensor([0.0, 1e-39, 2.0**-126], device=device)
    return torch.where(draw() < 0.5, -x, x) if fmt.signed else x


def check(name: str, signed: bool, groups: int, device: torch.device) -> None:
    fmt = state_format(name, signed)
    x = near_levels(fmt, groups, device)
    x[5, 7], x[6, 7], x[7] = float("nan"), float("inf"), 0.0
    noise = rounding_noise(1, 0, groups, 1, device, fmt.group_size)
    noise[:, 3::8], noise[:, 4::8] = 0, 0xFFFFFFFF
    old = x * (1 + 0.02 * torch.randn_like(x))  # changes of less than a level, and of more
    actual, expected = encode(x, old, noise, fmt), encode_groups(x, fmt, noise, old)
    wrong = (actual[0] != expected[0]).nonzero()
    assert len(wrong) == 0, (len(wrong), wrong[0], x[tuple(wrong[0])].item())
    assert torch.equal(actual[1].isnan(), expected[1].isnan())
    assert torch.equal(actual[1].nan_to_num(), expected[1].nan_to_num())
    if fmt.expanded:
        assert expected[2] is not None
        assert torch.equal(actual[2], expected[2])
        assert set(expected[2].tolist()) >= {2, 3, 4, 5, 7}


@skip_old_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "signed"), EVERY)
def test_codes_near_levels(name: str, signed: bool, device: torch.device) -> None:
    check(name, signed, 64, device)


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("name", "signed"), EVERY)
def test_many_codes_near_levels(name: str, signed: bool) -> None:
    check(name, signed, 1 << 16, torch.device("cuda"))
