"""The Triton kernels produce the bits of the torch reference."""

from __future__ import annotations

import pytest
import torch
from lq_testing.codec_data import awkward_rows
from lq_testing.interpreter import skip_old_interpreter

from lq_lightning.kernels.dequantize import reference as dequantize_reference
from lq_lightning.kernels.message import CODES, FLOAT_CODES, MessageFormat
from lq_lightning.kernels.quantize import reference as quantize_reference
from lq_lightning.kernels.requantize import reference as requantize_reference

# the interpreter computes with numpy, which warns where IEEE arithmetic is silent
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    skip_old_interpreter,
]

KINDS = [(code, True) for code in CODES] + [
    (code, False) for code in CODES if code not in FLOAT_CODES
]


def make_format(code: str = "int4", **changes: object) -> MessageFormat:
    fields: dict[str, object] = {
        "code": code,
        "group_size": 64,
        "symmetric": True,
        "hadamard_size": 0,
        "stochastic": False,
        "scale_dtype": "float32",
    }
    return MessageFormat(**{**fields, **changes})  # type: ignore[arg-type]


def assert_same_floats(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits, except that any NaN equals any NaN."""
    actual = actual.cpu()
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.isnan(), expected.isnan())
    integer = torch.int32 if expected.dtype == torch.float32 else torch.int16
    both = [value.contiguous().nan_to_num(nan=0.0).view(integer) for value in (actual, expected)]
    assert torch.equal(*both)


def check_quantize(
    x: torch.Tensor,
    fmt: MessageFormat,
    device: torch.device,
    reference: torch.Tensor | None = None,
    seed: int = 3,
) -> torch.Tensor:
    from lq_lightning.kernels.quantize.triton_kernels import launch_quantize

    shape = (x.shape[0], fmt.layout(x.shape[1]).nbytes)
    expected = torch.full(shape, 0xFF, dtype=torch.uint8)
    quantize_reference.quantize(x, reference, fmt, seed, expected)
    actual = torch.full(shape, 0xFF, dtype=torch.uint8, device=device)
    other = None if reference is None else reference.to(device)
    launch_quantize(x.to(device), other, fmt, seed, actual)
    assert torch.equal(actual.cpu(), expected)
    return expected


def check_dequantize(
    message: torch.Tensor,
    numel: int,
    fmt: MessageFormat,
    device: torch.device,
    *,
    scale: float = 1.0,
    base: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    from lq_lightning.kernels.dequantize.triton_kernels import launch_dequantize

    add = base is not None
    expected = torch.full((message.shape[1], numel), float("nan"), dtype=dtype)
    if base is not None:
        expected = base.clone()
    actual = expected.to(device, copy=True)
    dequantize_reference.dequantize(message, numel, fmt, scale, add, expected)
    launch_dequantize(message.to(device), numel, fmt, scale, add, actual)
    assert_same_floats(actual, expected)
    return expected


def check_requantize(
    message: torch.Tensor,
    numel: int,
    source: MessageFormat,
    target: MessageFormat,
    device: torch.device,
    seed: int = 5,
) -> None:
    from lq_lightning.kernels.requantize.triton_kernels import launch_requantize

    shape = (message.shape[1], target.layout(numel).nbytes)
    expected = torch.full(shape, 0xFF, dtype=torch.uint8)
    requantize_reference.requantize(message, numel, source, target, seed, expected)
    actual = torch.full(shape, 0xFF, dtype=torch.uint8, device=device)
    launch_requantize(message.to(device), numel, source, target, seed, actual)
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize(
    ("hadamard_size", "stochastic", "scale_dtype"),
    [(0, False, "float32"), (32, True, "bfloat16"), (0, True, "float16")],
    ids=["nearest-fp32", "hadamard-stochastic-bf16", "stochastic-fp16"],
)
@pytest.mark.parametrize(("code", "symmetric"), KINDS)
def test_every_code(
    code: str,
    symmetric: bool,
    hadamard_size: int,
    stochastic: bool,
    scale_dtype: str,
    device: torch.device,
) -> None:
    fmt = make_format(
        code,
        symmetric=symmetric,
        hadamard_size=hadamard_size,
        stochastic=stochastic,
        scale_dtype=scale_dtype,
    )
    x = awkward_rows(2, 4096 + 1001, 64)
    message = check_quantize(x, fmt, device)
    check_dequantize(message[None], x.shape[1], fmt, device)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("hadamard_size", [16, 32, 64, 128])
def test_every_hadamard_size(hadamard_size: int, symmetric: bool, device: torch.device) -> None:
    fmt = make_format("int8", group_size=128, symmetric=symmetric, hadamard_size=hadamard_size)
    x = awkward_rows(1, 4096 + 333, 128)
    message = check_quantize(x, fmt, device)
    check_dequantize(message[None], x.shape[1], fmt, device)


@pytest.mark.parametrize("group_size", [2**k for k in range(4, 13)])
def test_every_group_size(group_size: int, device: torch.device) -> None:
    fmt = make_format("int5", group_size=group_size, symmetric=False, scale_dtype="bfloat16")
    x = awkward_rows(1, 3 * 4096 + 77, group_size)
    message = check_quantize(x, fmt, device)
    check_dequantize(message[None], x.shape[1], fmt, device)


@pytest.mark.parametrize("numel", [0, 1, 2, 7, 8, 9, 16, 63, 65, 1000, 4095, 4096, 4097, 8192])
def test_every_size(numel: int, device: torch.device) -> None:
    fmt = make_format(
        "int7", symmetric=False, hadamard_size=16, stochastic=True, scale_dtype="float16"
    )
    x = awkward_rows(3, numel, 64)
    message = check_quantize(x, fmt, device)
    check_dequantize(message[None], numel, fmt, device)
    check_requantize(message[:, None], numel, fmt, make_format("int3"), device)


def test_no_rows(device: torch.device) -> None:
    message = check_quantize(torch.zeros(0, 100), make_format(), device)
    check_dequantize(message[None], 100, make_format(), device)
    check_requantize(message[None], 100, make_format(), make_format("int8"), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reference_dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_input_dtypes_and_difference(
    dtype: torch.dtype, reference_dtype: torch.dtype | None, device: torch.device
) -> None:
    fmt = make_format("int4", group_size=2048)
    x = awkward_rows(2, 5000, 64).to(dtype)
    reference = None
    if reference_dtype is not None:
        reference = (x.float() + 1e-2 * torch.randn(2, 5000)).to(reference_dtype)
    check_quantize(x, fmt, device, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("add", [False, True])
def test_output_dtypes_and_add(dtype: torch.dtype, add: bool, device: torch.device) -> None:
    fmt = make_format("int4", hadamard_size=32)
    message = check_quantize(torch.randn(2, 5001), fmt, device)
    base = torch.randn(2, 5001).to(dtype) if add else None
    check_dequantize(message[None], 5001, fmt, device, base=base, dtype=dtype)


@pytest.mark.parametrize("num_messages", [1, 2, 3, 8])
@pytest.mark.parametrize("code", ["int8", "int6", "fp8_e5m2"])
def test_reduce(code: str, num_messages: int, device: torch.device) -> None:
    fmt = make_format(code, group_size=128, hadamard_size=32, stochastic=True)
    x = awkward_rows(num_messages, 4500, 128)
    message = check_quantize(x, fmt, device).view(num_messages, 1, -1)
    check_dequantize(message, 4500, fmt, device, scale=1 / 3)


@pytest.mark.parametrize(
    ("source_size", "target_size"), [(32, 32), (0, 0), (0, 32), (64, 0), (16, 128)]
)
@pytest.mark.parametrize("stochastic", [True, False])
def test_requantize(
    source_size: int, target_size: int, stochastic: bool, device: torch.device
) -> None:
    source = make_format("int8", symmetric=False, hadamard_size=source_size, scale_dtype="float16")
    target = make_format("int4", group_size=128, hadamard_size=target_size, stochastic=stochastic)
    message = check_quantize(awkward_rows(2, 4321, 64), source, device).view(2, 1, -1)
    check_requantize(message, 4321, source, target, device)


def test_requantize_equals_decode_then_encode(device: torch.device) -> None:
    source, target = make_format("int8", symmetric=False), make_format("int4", symmetric=False)
    message = check_quantize(torch.randn(4, 1001), source, device).view(2, 2, -1)
    decoded = check_dequantize(message, 1001, source, device)
    expected = check_quantize(decoded, target, device)
    actual = torch.empty_like(expected)
    requantize_reference.requantize(message, 1001, source, target, 0, actual)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 + 12345, -(2**63)])
def test_seeds(seed: int, device: torch.device) -> None:
    check_quantize(torch.randn(3, 700), make_format("int3", stochastic=True), device, seed=seed)


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_strided_rows(offset: int, device: torch.device) -> None:
    from lq_lightning.kernels.dequantize.triton_kernels import launch_dequantize
    from lq_lightning.kernels.quantize.triton_kernels import launch_quantize

    fmt = make_format("int6", hadamard_size=16)
    nbytes = fmt.layout(4200).nbytes
    wide = torch.randn(3, 4300)
    expected = torch.full((3, nbytes), 0xFF, dtype=torch.uint8)
    quantize_reference.quantize(wide[:, offset : offset + 4200], None, fmt, 0, expected)
    rows = torch.full((3, nbytes + 48), 0xAB, dtype=torch.uint8, device=device)
    on_device = wide.to(device)[:, offset : offset + 4200]
    launch_quantize(on_device, None, fmt, 0, rows[:, 16 : 16 + nbytes])
    assert torch.equal(rows[:, 16 : 16 + nbytes].cpu(), expected)
    assert (rows[:, :16] == 0xAB).all()
    assert (rows[:, 16 + nbytes :] == 0xAB).all()

    target = torch.full((3, 4300), 7.0)
    decoded = target.to(device, copy=True)
    dequantize_reference.dequantize(
        expected[None], 4200, fmt, 1.0, False, target[:, offset : offset + 4200]
    )
    launch_dequantize(
        rows[None, :, 16 : 16 + nbytes], 4200, fmt, 1.0, False, decoded[:, offset : offset + 4200]
    )
    assert_same_floats(decoded, target)


def test_strided_messages(device: torch.device) -> None:
    fmt = make_format("int4", group_size=128)
    wide = check_quantize(torch.randn(6, 900), fmt, device).view(2, 3, -1)
    check_dequantize(wide.transpose(0, 1), 900, fmt, device)
    check_requantize(wide.transpose(0, 1), 900, fmt, fmt, device)
