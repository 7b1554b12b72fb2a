"""The Triton kernels of FP8 operands produce the bits of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lq_testing.codec_data import awkward_rows
from lq_testing.interpreter import skip_old_interpreter

from lq_lightning.kernels.float8 import (
    activation_dequantize_float8,
    dequantize_float8,
    norm_dequantize_float8,
    reference,
)
from lq_lightning.kernels.float8.triton_kernels import CastTile, RebuildTile
from lq_lightning.kernels.message import CODES, MessageFormat
from lq_lightning.kernels.message.matrix import encode_matrix
from lq_lightning.kernels.norm import KINDS

# the interpreter computes with numpy, which warns where IEEE arithmetic is silent
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    skip_old_interpreter,
]
E4M3 = torch.float8_e4m3fn
INF, NAN = float("inf"), float("nan")
KINDS_OF_CODES = [(code, True) for code in CODES] + [
    (code, False) for code, entry in CODES.items() if entry.kind == "integer"
]
SCALES = ("float32", "bfloat16", "float16")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_format(code: str = "int4", **changes: object) -> MessageFormat:
    fields: dict[str, object] = {
        "code": code,
        "group_size": 128,
        "symmetric": False,
        "hadamard_size": 0,
        "stochastic": False,
        "scale_dtype": "bfloat16",
    }
    return MessageFormat(**{**fields, **changes})  # type: ignore[arg-type]


def assert_same_bytes(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert torch.equal(actual.cpu().view(torch.uint8), expected.view(torch.uint8))


def check_cast(
    x: torch.Tensor,
    amax: torch.Tensor,
    device: torch.device,
    rows: bool = True,
    columns: bool = True,
    tile: CastTile | None = None,
) -> None:
    from lq_lightning.kernels.float8.triton_kernels import launch_cast

    scale = reference.scale_of(amax)
    cast = reference.cast(x, scale)
    nothing = torch.empty(0, 0, dtype=E4M3)
    expected = [
        reference.padded_rows(cast) if rows else nothing,
        reference.transposed(cast) if columns else nothing,
    ]
    actual = [torch.empty_like(part, device=device) for part in expected]
    for part in actual:
        part.view(torch.uint8).fill_(0x55)
    found = torch.full((1,), 7.0, device=device)
    launch_cast(x.to(device), amax.to(device), *actual, found, tile=tile)
    torch.testing.assert_close(found.cpu(), scale, rtol=0, atol=0, equal_nan=True)
    for part, truth in zip(actual, expected, strict=True):
        assert_same_bytes(part, truth)


def test_every_value_of_bf16(device: torch.device) -> None:
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    for amax in (reference.MAX_VALUE, 3.0, 1e-30):
        check_cast(x, torch.tensor([amax]), device)


def test_values_around_ties(device: torch.device) -> None:
    """All codes, the middles between neighbours, and fp32's neighbours of those."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(E4M3).float()
    codes = codes[codes.isfinite()].sort().values
    middles = (codes[1:] + codes[:-1]) / 2
    wide = torch.cat([codes, middles]).view(torch.int32)
    x = torch.cat([wide, wide - 1, wide + 1]).view(torch.float32)
    x = x.nan_to_num(1.0)[None].expand(5, -1).contiguous()
    check_cast(x, torch.tensor([reference.MAX_VALUE]), device)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (1, 1), (16, 16), (128, 256), (130, 143)])
@pytest.mark.parametrize("index", range(3))
def test_cast_of_any_shape(shape: tuple[int, int], index: int, device: torch.device) -> None:
    x = torch.randn(shape).to(DTYPES[index])
    check_cast(x, torch.tensor([3.0]), device)


@pytest.mark.parametrize(("rows", "columns"), [(True, False), (False, True), (False, False)])
def test_cast_of_rows_or_columns(rows: bool, columns: bool, device: torch.device) -> None:
    check_cast(torch.randn(37, 50), torch.tensor([2.0]), device, rows, columns)


@pytest.mark.parametrize("amax", [0.0, 1e-40, 1e-28, 3e38, INF, NAN])
def test_cast_with_awkward_scales(amax: float, device: torch.device) -> None:
    x = torch.randn(20, 40)
    x[3, :4] = torch.tensor([INF, -INF, NAN, -0.0])
    check_cast(x, torch.tensor([amax]), device)


def test_cast_of_rows_of_a_larger_matrix(device: torch.device) -> None:
    wide = torch.randn(200, 300)
    for offset in (1, 16):
        check_cast(wide[:, offset : offset + 200], torch.tensor([2.0]), device)


@pytest.mark.parametrize("shape", [(1, 1), (3, 16384 + 5), (7, 100), (0, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_amax(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    from lq_lightning.kernels.float8.triton_kernels import launch_amax

    def check(x: torch.Tensor) -> None:
        out = torch.zeros(1, device=device)
        launch_amax(x.to(device), out)
        torch.testing.assert_close(out.cpu(), reference.amax(x), rtol=0, atol=0, equal_nan=True)

    x = torch.randn(shape).to(dtype)
    check(x)
    if x.numel():
        check(x[:, : shape[1] // 2 + 1])
        for value in (-9.0, -INF, NAN):
            x[-1, -1] = value
            check(x)


def rebuild(*tensors: torch.Tensor | None, **options: Any) -> None:
    """Launch the kernel on the device of the last tensor, its result."""
    from lq_lightning.kernels.float8.triton_kernels import launch_rebuild

    device = tensors[-1].device  # type: ignore[union-attr]
    launch_rebuild(*(None if t is None else t.to(device) for t in tensors), **options)


def check_dequantize(
    x: torch.Tensor,
    fmt: MessageFormat,
    device: torch.device,
    scale: float = 0.01,
    tile: RebuildTile | None = None,
) -> None:
    message, factor = encode_matrix(x, fmt), torch.tensor([scale])
    expected = dequantize_float8(message, *x.shape, str(fmt), factor)
    actual = torch.empty_like(expected, device=device)
    actual.view(torch.uint8).fill_(0x55)
    rebuild(message, None, None, None, None, factor, actual, rows=x.shape[0], fmt=fmt, tile=tile)
    assert_same_bytes(actual, expected)


@pytest.mark.parametrize("index", range(len(KINDS_OF_CODES)), ids=lambda i: str(KINDS_OF_CODES[i]))
def test_rebuild_of_every_code(index: int, device: torch.device) -> None:
    """As one row and row by row, with whole tiles and without; the rest takes turns."""
    code, symmetric = KINDS_OF_CODES[index]
    for turn, (rows, numel) in enumerate(((128, 128), (19, 192), (130, 77))):
        fmt = make_format(
            code,
            group_size=(128, 64, 16)[turn],
            symmetric=symmetric,
            hadamard_size=(0, 32, 16)[(index + turn) % 3],
            scale_dtype=SCALES[(index + turn) % 3],
        )
        check_dequantize(awkward_rows(rows, numel, 64), fmt, device)


@pytest.mark.parametrize("group_size", [16, 256])
@pytest.mark.parametrize("hadamard_size", [0, 16, 128])
def test_rebuild_of_groups_and_transforms(
    group_size: int, hadamard_size: int, device: torch.device
) -> None:
    fmt = make_format(group_size=max(group_size, hadamard_size), hadamard_size=hadamard_size)
    for numel in (256, 172):
        check_dequantize(torch.randn(9, numel), fmt, device)


@pytest.mark.parametrize("shape", [(0, 128), (1, 1), (16, 48), (257, 100)])
def test_rebuild_of_any_shape(shape: tuple[int, int], device: torch.device) -> None:
    check_dequantize(torch.randn(shape), make_format("nf4", symmetric=True, group_size=16), device)


def test_rebuild_clips_and_keeps_what_is_not_finite(device: torch.device) -> None:
    x = torch.randn(40, 128)
    x[3, 5], x[17] = NAN, 1e30
    for scale in (1e-5, INF, NAN):
        check_dequantize(x, make_format(), device, scale)


@pytest.mark.parametrize("hadamard_size", [0, 64])
def test_tiles_change_no_bits(hadamard_size: int, device: torch.device) -> None:
    x = torch.randn(70, 300)
    fmt = make_format(group_size=64, hadamard_size=hadamard_size)
    for tile in (RebuildTile(64, 256, 16, 4), RebuildTile(256, 128, 64, 4)):
        check_dequantize(x, fmt, device, tile=tile)
    check_cast(x, torch.tensor([2.0]), device, tile=CastTile(64, 32, 4))


def test_messages_with_gaps(device: torch.device) -> None:
    fmt, scale = make_format(), torch.tensor([0.02])
    message = encode_matrix(torch.randn(9, 100), fmt)
    wide = torch.full((9, message.shape[1] + 32), 0xAB, dtype=torch.uint8)
    wide[:, 16:-16] = message
    expected = activation_dequantize_float8(message, message, 9, 100, "relu", str(fmt), scale)
    actual = torch.empty_like(expected, device=device)
    moved, gaps = message.to(device), wide.to(device)[:, 16:-16]
    for pair in ((gaps, moved), (moved, gaps)):
        actual.view(torch.uint8).fill_(0x55)
        rebuild(*pair, None, None, None, scale, actual, rows=9, fmt=fmt, activation="relu")
        assert_same_bytes(actual, expected)


@pytest.mark.parametrize("with_weight", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rebuild_of_norms(kind: str, with_weight: bool, device: torch.device) -> None:
    from lq_lightning.kernels.norm.reference import centre, reciprocal_deviation

    usual = make_format(hadamard_size=0 if with_weight else 128)
    for rows, numel, fmt in ((128, 128, usual), (45, 200, usual)):
        x = torch.randn(rows, numel) + 0.3
        x[5, 9] = INF
        weight = torch.randn(numel).to(DTYPES[KINDS.index(kind) % 3]) if with_weight else None
        bias = torch.randn(numel).bfloat16() if with_weight and kind == "layer" else None
        centred = centre(x, kind)
        rstd = reciprocal_deviation(centred, 1e-5)
        message, scale = encode_matrix(centred, fmt), torch.tensor([0.01])
        parameters = [weight, bias]
        expected = norm_dequantize_float8(message, rstd, *parameters, numel, kind, str(fmt), scale)
        actual = torch.empty_like(expected, device=device)
        tensors = (message, None, rstd, *parameters, scale, actual)
        rebuild(*tensors, rows=rows, fmt=fmt, norm=kind)
        assert_same_bytes(actual, expected)


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
@pytest.mark.parametrize("gated", [False, True])
def test_rebuild_of_activations(gated: bool, activation: str, device: torch.device) -> None:
    usual, transformed = make_format(), make_format(hadamard_size=64)
    for rows, numel, fmt in ((128, 128, usual), (45, 200, transformed)):
        x, up = 3 * torch.randn(rows, numel), torch.randn(rows, numel)
        x[1, 1] = NAN
        message, scale = encode_matrix(x, fmt), torch.tensor([0.02])
        second = encode_matrix(up, fmt) if gated else None
        nothing = torch.empty(0, 0, dtype=torch.uint8)
        expected = activation_dequantize_float8(
            *(message, nothing if second is None else second),
            *(rows, numel, activation, str(fmt), scale),
        )
        actual = torch.empty_like(expected, device=device)
        tensors = (message, second, None, None, None, scale, actual)
        rebuild(*tensors, rows=rows, fmt=fmt, activation=activation)
        codes = [part.cpu().view(torch.uint8).to(torch.int16) for part in (actual, expected)]
        apart = (codes[0] - codes[1]).abs()
        if activation == "relu":
            assert not apart.any()
        assert apart.max() <= 1
        assert (apart > 0).float().mean() < 1e-3
