"""FP8 matrix products: the reference, any shape, what is refused, what a trace sees."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lq_lightning._compat import float8
from lq_lightning._compat.float8 import float8_matmul_available, scaled_mm
from lq_lightning.kernels.float8 import float8_quantize

E4M3 = torch.float8_e4m3fn
SHAPES = [(32, 64, 16), (33, 50, 7), (1, 1, 1), (48, 15, 100)]
gpu = pytest.mark.gpu


def operand(
    rows: int, columns: int, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, their cast without padding, and its scale."""
    x = torch.randn(rows, columns, device=device)
    q, _, scale, _ = float8_quantize(x, True, False)
    return x, q[:, :columns].contiguous(), scale


def decoded(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return q.double() * scale.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_decoded_operands(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    M, K, N = shape
    (_, a, scale_a), (_, b, scale_b) = operand(M, K), operand(N, K)
    product = scaled_mm(a, b, scale_a, scale_b, dtype, fast_accumulation=False)
    expected = decoded(a, scale_a) @ decoded(b, scale_b).t()
    assert product.dtype == dtype
    assert product.is_contiguous()
    resolution = torch.finfo(dtype).eps + K * torch.finfo(torch.float32).eps
    bound = resolution * (decoded(a, scale_a).abs() @ decoded(b, scale_b).abs().t())
    assert ((product.double() - expected).abs() <= bound + torch.finfo(dtype).tiny).all()


def test_products_are_close_to_full_precision() -> None:
    """The error of E4M3, uniform in [-1/16, 1/16] of a value, is 3.6% at most; two add up."""
    (x, a, scale_a), (w, b, scale_b) = operand(64, 256), operand(96, 256)
    expected = x.double() @ w.double().t()
    product = scaled_mm(a, b, scale_a, scale_b, torch.float32, fast_accumulation=True)
    assert (product - expected).norm() / expected.norm() < 0.036 * 2**0.5


def test_padding_of_casts_changes_nothing() -> None:
    x, w = torch.randn(21, 37), torch.randn(19, 37)
    q, _, scale, _ = float8_quantize(x, True, False)
    b, _, scale_b, _ = float8_quantize(w, True, False)
    assert q.shape == (21, 48)
    padded = scaled_mm(q, b, scale, scale_b, torch.float32, fast_accumulation=False)
    cut = [part[:, :37].contiguous() for part in (q, b)]
    alone = scaled_mm(*cut, scale, scale_b, torch.float32, fast_accumulation=False)
    torch.testing.assert_close(padded, alone)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite_reach_every_product(value: float) -> None:
    x = torch.zeros(3, 16)
    x[1, 2] = value
    q, _, scale, _ = float8_quantize(x, True, False)
    _, b, scale_b = operand(4, 16)
    assert scaled_mm(q, b, scale, scale_b, torch.float32, fast_accumulation=False).isnan().all()


def test_wrong_operands_are_refused() -> None:
    one = torch.ones(1)
    a, b = torch.zeros(4, 16, dtype=E4M3), torch.zeros(4, 32, dtype=E4M3)
    for other in (torch.bfloat16, torch.float8_e5m2):
        with pytest.raises(
            ValueError, match=f"operands are {other} and .* must be torch.float8_e4"
        ):
            scaled_mm(a.to(other), b, one, one, torch.float32, fast_accumulation=False)
    with pytest.raises(ValueError, match=r"\[4, 16\] and \[4, 32\]; they must be"):
        scaled_mm(a, b, one, one, torch.float32, fast_accumulation=False)
    with pytest.raises(ValueError, match="dtype=torch.float64 is not supported"):
        scaled_mm(a, b[:, :16], one, one, torch.float64, fast_accumulation=False)


def test_what_a_device_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert float8_matmul_available(torch.device("cpu")) is None
    assert "not for mps" in (float8_matmul_available(torch.device("mps")) or "")
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    for capability, able in (((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        reason = float8_matmul_available(cuda)
        assert (reason is None) == able
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "8.9 (Ada, Hopper) or newer; this A100 has 8.0" in (float8_matmul_available(cuda) or "")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "not for ROCm" in (float8_matmul_available(cuda) or "")


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (0, 16, 16), (16, 0, 16), (16, 16, 0)])
def test_operands_on_cuda_have_the_shapes_that_torch_demands(
    shape: tuple[int, int, int], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: torch checks fake operands as it checks real ones."""
    monkeypatch.setattr(float8, "float8_matmul_available", lambda device: None)
    M, K, N = shape
    with FakeTensorMode():
        a = torch.empty(M, K, dtype=E4M3, device="cuda")
        b = torch.empty(N, K, dtype=E4M3, device="cuda")
        one = torch.ones(1, device="cuda")
        product = scaled_mm(a, b, one, one, torch.bfloat16, fast_accumulation=fast)
    assert product.shape == (M, N)
    assert product.is_contiguous()
    assert product.dtype == torch.bfloat16


def test_a_linear_is_one_graph() -> None:
    """Forward and both gradients of ``x @ w.T``, from casts to products, without a break."""

    def linear(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        x_rows, x_columns, x_scale, _ = float8_quantize(x, True, True)
        w_rows, w_columns, w_scale, _ = float8_quantize(w, True, True)
        dy_rows, dy_columns, dy_scale, _ = float8_quantize(dy, True, True)
        products = (
            (x_rows, w_rows, x_scale, w_scale),
            (dy_rows, w_columns, dy_scale, w_scale),
            (dy_columns, x_columns, dy_scale, x_scale),
        )
        return [scaled_mm(*p, torch.float32, fast_accumulation=False) for p in products]

    x, w, dy = torch.randn(20, 40), torch.randn(24, 40), torch.randn(20, 24)
    y, dx, dw = torch.compile(linear, fullgraph=True, backend="aot_eager")(x, w, dy)
    exact = (x @ w.t(), dy @ w, dy.t() @ x)
    for product, truth, bound in zip((y, dx, dw), exact, (0.06, 0.1, 0.1), strict=True):
        assert product.shape == truth.shape
        assert (product - truth).norm() < bound * truth.norm()


@gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (0, 16, 16), (16, 0, 16), (512, 1024, 768)])
def test_products_on_a_gpu(shape: tuple[int, int, int], compiled: bool) -> None:
    M, K, N = shape
    multiply = torch.compile(scaled_mm, dynamic=False) if compiled else scaled_mm
    a, b = operand(M, K, "cuda"), operand(N, K, "cuda")
    for dtype in (torch.float32, torch.bfloat16):
        for fast in (False, True):
            product = multiply(a[1], b[1], a[2], b[2], dtype, fast_accumulation=fast)
            reference = scaled_mm(
                *(part.cpu() for part in (a[1], b[1], a[2], b[2])),
                torch.float32,
                fast_accumulation=fast,
            )
            size = decoded(a[1], a[2]).abs() @ decoded(b[1], b[2]).abs().t()
            # 13 bits or more of the largest sum so far
            bound = size.cpu() * (2.0**-12 if fast else 2.0**-14) + reference.abs() * 2.0**-8
            assert ((product.cpu() - reference).abs() <= bound).all()
