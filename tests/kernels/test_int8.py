"""INT8 products: the reference is close to the exact product, the kernels have its bits."""

from __future__ import annotations

import pytest
import torch
from lq_testing.interpreter import skip_old_interpreter

from lq_lightning.kernels.int8 import hadamard_size_of, int8_matmul, int8_quantize
from lq_lightning.kernels.int8.triton_kernels import ProductTile

# the interpreter computes with numpy, which warns where IEEE arithmetic is silent
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
INF, NAN = float("inf"), float("nan")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SMALL = ProductTile(64, 64, 64, 4, 3)


def operand(rows: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of normal values, two of them with an outlier a thousand times as large."""
    x = torch.randn(rows, numel)
    x[1:3] *= 0.1
    x[1:3, numel // 3] = 100.0
    return x.to(dtype)


def quantized(
    x: torch.Tensor, w: torch.Tensor, length: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """What a product takes."""
    size = hadamard_size_of(x.shape[1])
    q, scale, second, _ = int8_quantize(x, size, False, length)
    return q, scale, *int8_quantize(w, size, False, 0)[:2], second, length


def errors(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Of each row of ``x @ w.t()``, relative to products of independent rows."""
    sizes = x.double().norm(dim=1)[:, None] * w.double().norm(dim=1) / x.shape[1] ** 0.5
    return ((y.double().cpu() - x.double() @ w.double().t()) / sizes).square().mean(1).sqrt()


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("numel", "size"), [(576, 64), (4096, 128), (40, 8), (37, 1), (0, 128)])
def test_size_of_the_transform(numel: int, size: int) -> None:
    assert hadamard_size_of(numel) == size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [256, 96, 37])
@pytest.mark.parametrize("device", DEVICES)
def test_product_is_near_the_exact_one(device: str, numel: int, dtype: torch.dtype) -> None:
    x, w = operand(9, numel, dtype), torch.randn(24, numel).to(dtype)
    w[3] *= 50.0
    y = int8_matmul(*quantized(x.to(device), w.to(device), 3), dtype)
    assert (y.dtype, y.shape) == (dtype, (9, 24))
    assert errors(y, x, w).max() < 0.03


@pytest.mark.parametrize("length", [0, 2, 5, 20])
@pytest.mark.parametrize("device", DEVICES)
def test_second_terms_of_first_rows(device: str, length: int) -> None:
    x, w = operand(20, 96), torch.eye(96)  # which INT8 represents
    x[8] = x[1]
    tensors = quantized(x.to(device), w.to(device), length)
    assert tensors[4].shape == (20 // length * 4 if length else 0, 96)
    difference = int8_matmul(*tensors, torch.float32).cpu() - x
    difference[:, 32] = 0.0
    error = difference.norm(dim=1) / x.index_fill(1, torch.tensor([32]), 0.0).norm(dim=1)
    twice = [row for row in range(20) if length and row % length < 4]
    once = [row for row in range(20) if row not in twice]
    assert (error[twice] < 0.003).all()
    assert (error[once] > 0.003).all()
    assert (error[[row for row in (1, 2, 8) if row in once]] > 0.3).all()


@pytest.mark.parametrize("device", DEVICES)
def test_zeros_and_values_that_are_not_finite(device: str) -> None:
    x, w = torch.randn(5, 64, device=device), torch.randn(6, 64, device=device)
    x[0] = 0.0
    x[1, 9], x[2, 3], w[4, 63] = NAN, -INF, INF
    x[3] = 1e-38
    size = hadamard_size_of(64)
    q, scale, _, largest = int8_quantize(x, size, True, 5)
    assert scale.isnan().tolist() == [False, True, True, False, False]
    assert largest.isnan().item()
    assert int8_quantize(x[2:], size, True, 0)[3].item() == INF
    y = int8_matmul(*quantized(x, w, 5), torch.bfloat16)
    expected = torch.zeros(5, 6, dtype=torch.bool)
    expected[1:3] = expected[:, 4] = True
    assert torch.equal(y.isnan().cpu(), expected)
    assert not y[0, :4].any()
    assert not q[:4].any()


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    x = operand(6, 48).to(device)[:, :40]
    for amax, length in ((False, 0), (True, 6)):  # shorter sequences leave second terms undefined
        torch.library.opcheck(int8_quantize, (x, 8, amax, length))
        torch.library.opcheck(int8_matmul, (*quantized(x, x, length), torch.float16))


def test_wrong_arguments_are_refused() -> None:
    x = torch.randn(4, 48)
    with pytest.raises(ValueError, match="hadamard_size=32 does not fit rows of 48 values"):
        int8_quantize(x, 32, False, 0)
    with pytest.raises(ValueError, match="hadamard_size=256 does not fit"):
        int8_quantize(torch.randn(2, 256), 256, False, 0)
    with pytest.raises(ValueError, match="length=3 is not that of sequences which make up 4 rows"):
        int8_quantize(x, 16, False, 3)
    with pytest.raises(ValueError, match=r"x has stride 2 .*Pass x.contiguous"):
        int8_quantize(x[:, ::2], 1, False, 0)
    with pytest.raises(NotImplementedError, match="too long for the int32 sums"):
        int8_quantize(torch.zeros(1, 133152), 32, False, 0)
    q, scale, w, w_scale, second, length = quantized(x, x, 2)
    with pytest.raises(ValueError, match="w is torch.int8 .*they must be a contiguous int8 matrix"):
        int8_matmul(q, scale, w, w_scale[1:], second, length, x.dtype)
    with pytest.raises(ValueError, match="do not fit each other"):
        int8_matmul(q, scale, w, w_scale, second[1:], length, x.dtype)
    with pytest.raises(ValueError, match="do not fit each other"):
        int8_matmul(q, scale, w[:, :16].contiguous(), w_scale, second, length, x.dtype)
    with pytest.raises(ValueError, match="length=-2 is not that"):
        int8_matmul(q, scale, w, w_scale, second, -2, x.dtype)
    with pytest.raises(ValueError, match="dtype=torch.int8 is not supported"):
        int8_matmul(q, scale, w, w_scale, second, length, torch.int8)


@skip_old_interpreter
@pytest.mark.parametrize(
    ("shape", "dtype", "block"),
    [
        ((6, 1152), torch.float32, 512),
        ((6, 640), torch.bfloat16, 16384),
        ((6, 37), torch.float16, 16384),
        ((6, 48), torch.bfloat16, 16384),
        ((0, 32), torch.float32, 16384),
    ],
)
def test_kernels_have_the_bits_of_the_reference(
    shape: tuple[int, int], dtype: torch.dtype, block: int, device: torch.device
) -> None:
    from lq_lightning.kernels.int8.triton_kernels import launch_quantize

    rows, numel = shape
    x = operand(rows + 2, numel + 3, dtype)[:rows, 3:]
    if rows:
        x[0], x[1, 5], x[2, 1], x[3, 2] = 0.0, NAN, INF, 3000.0
    size = hadamard_size_of(numel)
    for length in (2, 6, 0):
        expected = int8_quantize(x, size, True, length)
        actual = [torch.full_like(part, 85, device=device) for part in expected]
        for part in actual[2][2 * (length == 2) :: 4], actual[2][3 * (length == 2) :: 4]:
            part.zero_()  # of sequences of two, no row has the third and fourth
        launch_quantize((x.to(device), *actual), size, length, block=block)
        for part, truth in zip(actual, expected, strict=True):
            assert_same(part, truth)
        check_products(expected, length, dtype, device)


def check_products(
    operand: tuple[torch.Tensor, ...],
    length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    from lq_lightning.kernels.int8.triton_kernels import launch_products

    q, scale, second, _ = operand
    x = torch.randn(80, q.shape[1])
    w, w_scale = int8_quantize(x, 1, False, 0)[:2]
    y = int8_matmul(q, scale, w, w_scale, second, length, dtype)
    out = torch.full_like(y, 7.0, device=device)
    moved = (part.to(device) for part in (q, scale, w, w_scale, second))
    launch_products((*moved, out), length, tile=SMALL)
    assert_same(out, y)


@skip_old_interpreter
@pytest.mark.parametrize("specialized", [False, True])
def test_kernel_by_descriptors(specialized: bool, device: torch.device) -> None:
    from lq_lightning.kernels.int8.triton_kernels import launch_descriptors

    if device.type == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("made for Hopper")
    tile = SMALL._replace(rows=128, columns=128, warps=8, specialized=specialized)
    for rows, columns, numel in ((5, 24, 48), (260, 136, 208)):
        tensors = quantized(torch.randn(rows, numel), torch.randn(columns, numel))
        for dtype in (torch.bfloat16, torch.float32):
            y = int8_matmul(*tensors, dtype)
            out = torch.full_like(y, 7.0, device=device)
            launch_descriptors(*(part.to(device) for part in tensors[:4]), out, tile, 3)
            if device.type == "cpu" and dtype == torch.bfloat16:  # the interpreter truncates
                torch.testing.assert_close(out, y)
            else:
                assert_same(out, y)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 1024, 4096), (512, 4096, 14336), (100, 24, 30000)])
def test_large_products(shape: tuple[int, int, int]) -> None:
    rows, columns, numel = shape
    x, w = operand(rows, numel, torch.bfloat16), torch.randn(columns, numel).bfloat16()
    tensors = quantized(x.cuda(), w.cuda(), rows // 2)
    y = int8_matmul(*tensors, torch.bfloat16)
    again = int8_matmul(*tensors, torch.bfloat16)
    assert torch.equal(y, again)
    some = [0, 1, 2, rows // 2, rows - 1]
    assert errors(y[some], x[some], w).max() < 0.03
