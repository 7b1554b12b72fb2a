"""Activation functions on codes: the operators, the reference and the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from lq_testing.codec_data import awkward_rows
from lq_testing.interpreter import skip_old_interpreter
from torch import Tensor

from lq_lightning.kernels.activation import (
    ACTIVATIONS,
    activation_backward,
    activation_dequantize,
    activation_quantize,
    reference,
)
from lq_lightning.kernels.message import parse_format, quantize
from lq_lightning.kernels.message.launch import Tile
from lq_lightning.kernels.message.matrix import decode_matrix, matrix_shape

FOUR = "int4/128/asymmetric/128/nearest/bfloat16"
PLAIN_FOUR = "int4/128/asymmetric/0/nearest/bfloat16"
EIGHT = "int8/64/symmetric/32/nearest/float32"
NORMAL = "nf4/64/symmetric/0/nearest/bfloat16"
FLOAT_EIGHT = "fp8_e4m3/16/symmetric/0/nearest/bfloat16"
PLAIN_EIGHT = "int8/128/symmetric/0/nearest/bfloat16"
FIVE = "int5/64/asymmetric/0/nearest/float32"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
in_triton = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    skip_old_interpreter,
]


def halves(rows: int, numel: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Two inputs of which each is half of every row of one tensor."""
    x, up = torch.randn(rows, 2 * numel).mul_(3).to(dtype).chunk(2, dim=1)
    # without rows, opcheck cannot copy such a view
    return (x, up) if rows else (x.new_empty(x.shape), up.new_empty(up.shape))


def place(x: Tensor | None, device: torch.device | str) -> Tensor | None:
    """Copy to a device with the strides kept."""
    if x is None:
        return None
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


def same(actual: Tensor, expected: Tensor, scale: Tensor | float = 1.0) -> None:
    """Within a unit in the last place, and ``2**-20`` of ``scale``; NaN and infinities alike."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    actual, info = actual.cpu(), torch.finfo(expected.dtype)
    finite = expected.isfinite()
    torch.testing.assert_close(
        torch.where(finite, 0, actual), torch.where(finite, 0, expected), equal_nan=True
    )
    a, e = actual.double(), expected.double()
    unit = torch.ldexp(torch.full_like(e, info.eps / 2), torch.frexp(e).exponent)
    allowed = unit.clamp_min(info.smallest_normal * info.eps) + 2.0**-20 * torch.as_tensor(scale)
    assert ((a - e).abs() <= allowed)[finite].all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "numel"), [(3, 256), (3, 77), (0, 256), (0, 77), (1, 128)])
def test_opcheck(device: str, rows: int, numel: int) -> None:
    x, up = (t.to(device) for t in halves(rows, numel, torch.bfloat16))
    for other, fmt in ((up, FOUR), (None, NORMAL)):
        _, message, up_message, _ = activation_quantize(x, other, "silu", fmt, True)
        assert up_message.shape == (message.shape if other is not None else (0, 0))
        torch.library.opcheck(activation_quantize, (x, other, "silu", fmt, rows > 1))
        sizes = (rows, numel, "gelu", fmt, torch.float16)
        torch.library.opcheck(activation_dequantize, (message, up_message, *sizes))
        torch.library.opcheck(activation_backward, (message, up_message, x, "relu", fmt, rows > 1))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_functions_are_those_of_torch(activation: str) -> None:
    inf = float("inf")
    x = torch.cat([torch.linspace(-12, 12, 4801), torch.tensor([-300.0, 300.0, -inf, inf])])
    x.requires_grad_(True)
    expected = TORCH[activation](x)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    value, derivative = reference.value_and_derivative(x.detach(), activation)
    if activation == "gelu":  # of which torch makes NaN on CPUs, not on GPUs
        expected = torch.where(x == inf, inf, expected)
    torch.testing.assert_close(value, expected, rtol=2e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(derivative, slope, rtol=2e-6, atol=2e-6, equal_nan=True)
    nothing = torch.tensor([float("nan")])
    assert all(t.isnan().all() for t in reference.value_and_derivative(nothing, activation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_at_the_decoded_inputs(
    activation: str, gated: bool, dtype: torch.dtype
) -> None:
    x, up = halves(3, 77, dtype)
    dy = torch.randn(3, 77).to(dtype)
    fmt = parse_format(EIGHT)
    other = up if gated else None
    y, message, up_message, amax = activation_quantize(x, other, activation, EIGHT, True)
    exact = TORCH[activation](x.float()) * (up.float() if gated else 1.0)
    same(y, exact.to(dtype), 4.0)
    assert amax == y.abs().max()

    inputs = [decode_matrix(message, 3, 77, fmt).requires_grad_(True)]
    if gated:
        inputs.append(decode_matrix(up_message, 3, 77, fmt).requires_grad_(True))
    rebuilt = TORCH[activation](inputs[0]) * (inputs[1] if gated else 1.0)
    arguments = (message, up_message, 3, 77, activation, EIGHT, dtype)
    same(activation_dequantize(*arguments), rebuilt.detach().to(dtype), 4.0)

    expected = [g.to(dtype) for g in torch.autograd.grad(rebuilt, inputs, dy.float())]
    dx, dup, largest = activation_backward(message, up_message, dy, activation, EIGHT, True)
    same(dx, expected[0], 50.0)
    if gated:
        same(dup, expected[1], 50.0)
    else:
        assert dup.shape == (0, 0)
    assert largest.tolist() == [float(dx.abs().max()), float(dup.abs().max()) if gated else 0.0]


@pytest.mark.parametrize("numel", [256, 250])
def test_codes_are_those_of_quantize(numel: int) -> None:
    x, up = halves(5, numel, torch.bfloat16)
    _, message, up_message, amax = activation_quantize(x, up, "silu", FOUR, False)
    assert amax.shape == (0,)
    shape = matrix_shape(parse_format(FOUR), 5, numel)
    assert shape[0] == (1 if numel == 256 else 5)
    for made, values in ((message, x), (up_message, up)):
        assert torch.equal(made, quantize(values.reshape(shape), None, FOUR, 0))


@pytest.mark.parametrize(
    "text",
    [PLAIN_FOUR, NORMAL, FLOAT_EIGHT, PLAIN_EIGHT, FIVE],
)
@pytest.mark.parametrize("numel", [256, 250])
def test_derivative_of_relu_is_exact(text: str, numel: int) -> None:
    """Also of values that are nothing beside the largest of their group, and of negative groups."""
    fmt, x = parse_format(text), torch.randn(16, numel) * torch.randn(numel).exp()
    x[:4] *= 1e-20
    x[4, :128], x[5, :128], x[6, :128] = -1.0, 0.0, 1.0
    x[7, 1], x[8, 1], x[9, 0] = 1e-6, -0.0, 1e20
    up, dy = torch.randn(16, numel), torch.randn(16, numel)
    for other in (None, up):
        _, message, up_message, _ = activation_quantize(x, other, "relu", text, False)
        dx, _, _ = activation_backward(message, up_message, dy, "relu", text, False)
        known = 1.0 if other is None else decode_matrix(up_message, 16, numel, fmt)
        assert torch.equal(dx, torch.where(x > 0.0, dy * known, 0.0))


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("scales", ["bfloat16", "float16", "float32"])
def test_codes_of_relu_are_of_the_positive_part(activation: str, scales: str) -> None:
    """All levels are for what is positive: half a level is lost at most, up to rounded scales."""
    x = torch.randn(64, 512)
    text = f"int4/128/asymmetric/0/nearest/{scales}"
    y, message, nothing, _ = activation_quantize(x, None, activation, text, False)
    rebuilt = activation_dequantize(message, nothing, 64, 512, activation, text, torch.float32)
    if activation == "relu2":
        y, rebuilt = y.sqrt(), rebuilt.sqrt()
    level = y.view(-1, 128).amax(-1, keepdim=True) / 14.5
    assert ((rebuilt - y).view(-1, 128).abs() <= 0.52 * level).all()


def test_rounded_once() -> None:
    """fp32 all through: bf16 functions of torch round the value before it is multiplied."""
    x, up = halves(8, 256, torch.bfloat16)
    y = activation_quantize(x, up, "silu", FOUR, False)[0]
    assert torch.equal(y, (F.silu(x.float()) * up.float()).bfloat16())
    assert not torch.equal(y, F.silu(x) * up)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_infinity_stay(activation: str) -> None:
    x, up = halves(4, 128)
    x[0, 3], x[1, 5], up[2, 7] = float("nan"), float("inf"), float("-inf")
    y, message, up_message, amax = activation_quantize(x, up, activation, EIGHT, True)
    assert y[0, 3].isnan()
    assert not y[[1, 2], [5, 7]].isfinite().any()
    assert amax.isnan()
    rebuilt = activation_dequantize(message, up_message, 4, 128, activation, EIGHT, torch.float32)
    dy = torch.ones(4, 128)
    dx, dup, largest = activation_backward(message, up_message, dy, activation, EIGHT, True)
    lost = torch.zeros(4, 128, dtype=torch.bool)
    lost[:3, :64] = True
    assert torch.equal(rebuilt.isnan(), lost)
    assert torch.equal(dx.isnan(), lost)
    lost[2] = False
    assert torch.equal(dup.isnan(), lost)
    assert largest.isnan().all()


def test_what_is_refused() -> None:
    x, up = halves(2, 128)
    _, message, up_message, _ = activation_quantize(x, up, "silu", FOUR, False)
    with pytest.raises(ValueError, match=r"activation='tanh' is not supported; allowed: silu, "):
        activation_quantize(x, up, "tanh", FOUR, False)
    with pytest.raises(ValueError, match=r"up is torch.float32 \(2, 64\).*same shape, dtype"):
        activation_quantize(x, up[:, :64], "silu", FOUR, False)
    with pytest.raises(ValueError, match=r"up is torch.float16"):
        activation_quantize(x, up.half(), "silu", FOUR, False)
    with pytest.raises(ValueError, match=r"x is torch.float32 \(2, 1, 128\).*Flatten"):
        activation_quantize(x[:, None], None, "silu", FOUR, False)
    with pytest.raises(ValueError, match=r"x is torch.float64 .*float32, bfloat16 or float16"):
        activation_quantize(x.double(), None, "silu", FOUR, False)
    with pytest.raises(ValueError, match=r"up has stride 2 .*Pass up.contiguous"):
        activation_quantize(x[:, :64], up[:, ::2], "silu", FOUR, False)
    with pytest.raises(NotImplementedError, match="one scale per row"):
        activation_quantize(x, up, "silu", "int8/row/symmetric/0/nearest/float32", False)
    with pytest.raises(ValueError, match="rounds stochastically"):
        activation_quantize(x, up, "silu", FOUR.replace("nearest", "stochastic"), False)
    with pytest.raises(ValueError, match=r"^message (is|has)"):
        activation_dequantize(message, up_message, 3, 128, "silu", FOUR, torch.float32)
    with pytest.raises(ValueError, match=r"^up_message (is|has)"):
        activation_dequantize(message, up_message[:, :32], 2, 128, "silu", FOUR, torch.float32)
    with pytest.raises(ValueError, match=r"dtype=torch.int8 is not supported"):
        activation_dequantize(message, up_message, 2, 128, "silu", FOUR, torch.int8)
    with pytest.raises(ValueError, match=r"dy is torch.float64"):
        activation_backward(message, up_message, x.double(), "silu", FOUR, False)
    with pytest.raises(ValueError, match=r"^message (is|has)"):
        activation_backward(message, up_message, x[:1], "silu", FOUR, False)


def check_triton(
    x: Tensor,
    up: Tensor | None,
    dy: Tensor,
    activation: str,
    text: str,
    device: torch.device,
    tile: Tile | None = None,
) -> None:
    """Compare the kernels with the reference: equal codes, values within their tolerance."""
    from lq_lightning.kernels.activation import op, triton_kernels

    fmt, dtype, shape = parse_format(text), dy.dtype, x.shape
    to = lambda t: place(t, device)  # noqa: E731
    expected = activation_quantize(x, up, activation, text, True)
    made = op._fake_quantize(to(x), to(up), activation, text, True)
    triton_kernels.launch("quantize", (to(x), to(up), *made), activation, fmt, tile)
    assert torch.equal(made[1].cpu(), expected[1])
    assert torch.equal(made[2].cpu(), expected[2])
    factor = 1.0 if up is None else up.double().nan_to_num(0, 0, 0)
    same(made[0], expected[0], (factor * x.double().nan_to_num(0, 0, 0)).abs())
    largest = made[0].abs().amax().float() if made[0].numel() else torch.zeros(())
    assert torch.equal(made[3].cpu().nan_to_num(-1)[0], largest.cpu().nan_to_num(-1))

    messages = [None if m.shape == (0, 0) else m for m in expected[1:3]]
    rebuilt = activation_dequantize(*expected[1:3], *shape, activation, text, dtype)
    rows, numel = shape
    arguments = (*(to(m) for m in expected[1:3]), rows, numel, activation, text, dtype)
    y = to(torch.empty(shape, dtype=dtype))
    triton_kernels.launch("dequantize", (*map(to, messages), y), activation, fmt, tile)
    x = decode_matrix(expected[1], rows, numel, fmt).double().nan_to_num()
    factor = 1.0
    if up is not None:
        factor = decode_matrix(expected[2], rows, numel, fmt).double().nan_to_num()
    same(y, rebuilt, (x * factor).abs())

    gradients = activation_backward(*expected[1:3], dy, activation, text, True)
    out = op._fake_backward(*arguments[:2], to(dy), activation, text, True)
    tensors = (*map(to, messages), to(dy), *out)
    triton_kernels.launch("backward", tensors, activation, fmt, tile)
    slope = (dy.double() * factor).abs()
    same(out[0], gradients[0], slope if activation != "relu2" else slope * x.abs())
    if up is not None:
        same(out[1], gradients[1], (dy.double() * x).abs())
    for found, values in zip(out[2], out[:2], strict=True):
        largest = values.abs().amax().float() if values.numel() else torch.zeros(())
        assert torch.equal(found.cpu().nan_to_num(-1), largest.cpu().nan_to_num(-1))


class TestTriton:
    pytestmark = in_triton

    @pytest.mark.parametrize("gated", [False, True])
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_every_function(self, activation: str, gated: bool, device: torch.device) -> None:
        """Flat, in one row: more than a tile and an incomplete one."""
        index = 2 * ACTIVATIONS.index(activation) + gated
        dtype = DTYPES[index % 3]
        text = (FOUR, EIGHT, NORMAL, FLOAT_EIGHT)[index % 4]
        x, up, dy = (torch.randn(5, 256).mul_(4).to(dtype) for _ in range(3))
        check_triton(x, up if gated else None, dy, activation, text, device)

    @pytest.mark.parametrize("activation", ["relu", "relu2"])
    @pytest.mark.parametrize(
        ("text", "numel"), [(PLAIN_FOUR, 1152), (FIVE, 1033), (PLAIN_EIGHT, 1033)]
    )
    def test_positive_parts(
        self, activation: str, text: str, numel: int, device: torch.device
    ) -> None:
        """Of what is rounded to even too; beyond a row nothing is encoded."""
        x = torch.randn(3, numel).mul_(4).round_().div_(4)
        x[0, :128], x[1, :128] = -1.0, 0.0
        check_triton(x, None, torch.randn(3, numel), activation, text, device)

    @pytest.mark.parametrize(
        ("text", "numel"),
        [(FOUR, 1152), (PLAIN_FOUR, 1033), (NORMAL, 1152), (FLOAT_EIGHT, 1033)],
    )
    def test_halves_of_one_tensor(self, text: str, numel: int, device: torch.device) -> None:
        """Rows of inputs apart: rows of a flat message, and one message per row."""
        x, up = halves(3, numel, torch.bfloat16)
        dy = torch.randn(3, numel + 8).bfloat16()[:, 8:]
        check_triton(x, up, dy, "silu", text, device)

    @pytest.mark.parametrize("rows", [0, 1, 2])
    @pytest.mark.parametrize("numel", [0, 1, 7, 16, 1024])
    def test_sizes(self, rows: int, numel: int, device: torch.device) -> None:
        x, up = halves(rows, numel)
        check_triton(x, up, torch.randn(rows, numel), "relu", FLOAT_EIGHT, device)

    @pytest.mark.parametrize("text", [PLAIN_FOUR, EIGHT, NORMAL])
    def test_awkward_values(self, text: str, device: torch.device) -> None:
        """NaN, infinities and huge values, where a tile ends before them and where they stand."""
        x = awkward_rows(2, 1536, 128)
        up, dy = torch.randn(2, 1536), torch.randn(2, 1536)
        check_triton(x, up, dy, "relu", text, device)
        check_triton(up.bfloat16(), x.bfloat16(), dy.bfloat16(), "silu", text, device)

    def test_rows_that_share_a_tile_are_apart(self, device: torch.device) -> None:
        """Tiles reach into the codes of the next row, whose scales are NaN."""
        x, up = halves(2, 128)
        x[1, 0], up[1, 0] = float("nan"), float("nan")
        dy = torch.randn(2, 136)[:, :128]
        check_triton(x, up, dy, "relu", FOUR, device)

    @pytest.mark.parametrize("tile", [Tile(256, 8, 1, 3), Tile(2048, 32, 2, 1)])
    def test_tiles_change_nothing(self, tile: Tile, device: torch.device) -> None:
        x, up = halves(3, 1280, torch.float16)
        check_triton(x, up, torch.randn(3, 1280).half(), "gelu_tanh", EIGHT, device, tile)

    def test_groups_larger_than_a_tile(self, device: torch.device) -> None:
        text = "int5/4096/asymmetric/16/nearest/float32"
        x, up = torch.randn(1, 4096), torch.randn(1, 4096)
        check_triton(x, up, torch.randn(1, 4096), "relu2", text, device)

    @pytest.mark.gpu
    def test_operators_launch_the_kernels(self) -> None:
        x, up = (place(t, "cuda") for t in halves(3, 256, torch.bfloat16))
        y, *messages, amax = activation_quantize(x, up, "relu", FOUR, True)
        expected = activation_quantize(x.cpu(), up.cpu(), "relu", FOUR, True)
        for made, truth in zip((y, *messages, amax), expected, strict=True):
            assert torch.equal(made.cpu(), truth)
        rebuilt = activation_dequantize(*messages, 3, 256, "relu", FOUR, torch.float32)
        truth = activation_dequantize(
            *(m.cpu() for m in messages), 3, 256, "relu", FOUR, torch.float32
        )
        assert torch.equal(rebuilt.cpu(), truth)
        found = activation_backward(*messages, x, "relu", FOUR, True)
        known = activation_backward(*(m.cpu() for m in messages), x.cpu(), "relu", FOUR, True)
        for made, truth in zip(found, known, strict=True):
            assert torch.equal(made.cpu(), truth)

    @pytest.mark.gpu
    @pytest.mark.uninitialized_memory_ok
    def test_more_than_2_to_the_31_values(self) -> None:
        rows, numel = 2**17 + 3, 2**14 + 128
        x = torch.empty(rows, numel, dtype=torch.bfloat16, device="cuda").normal_()
        y, message, _, _ = activation_quantize(x, None, "relu", PLAIN_FOUR, False)
        expected = activation_quantize(x[-3:].cpu(), None, "relu", PLAIN_FOUR, False)
        assert torch.equal(y[-3:].cpu(), expected[0])
        fmt = parse_format(PLAIN_FOUR)
        codes = message[0, (rows - 3) * numel // 2 : rows * numel // 2]
        assert torch.equal(codes.cpu(), expected[1][0, : 3 * numel // 2])
        del y
        sizes = (rows, numel, "relu", PLAIN_FOUR, torch.bfloat16)
        rebuilt = activation_dequantize(message, message[:0, :0], *sizes)
        decoded = decode_matrix(expected[1], 3, numel, fmt)
        assert torch.equal(rebuilt[-3:].cpu(), decoded.relu().bfloat16())
