"""The norm operators: values and gradients of torch's norms, special values, checks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lq_lightning.kernels.message import parse_format
from lq_lightning.kernels.message.matrix import decode_matrix, encode_matrix
from lq_lightning.kernels.norm import KINDS, norm_backward, norm_dequantize, norm_quantize

FOUR = "int4/64/asymmetric/32/nearest/bfloat16"
EIGHT = "int8/64/symmetric/0/nearest/float32"
NARROW = "fp8_e4m3/16/symmetric/0/nearest/bfloat16"
EPS = 1e-5
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def layer(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def rms(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, EPS)


def rms_cast(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """As in the Llama of Hugging Face."""
    wide = x.float()
    y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
    return y if weight is None else weight * y


def rms_offset(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """As in the Gemma of Hugging Face."""
    wide = x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (y if weight is None else y * (1.0 + weight.float())).type_as(x)


NORMS: dict[str, Callable[[Tensor, Tensor | None, Tensor | None], Tensor]] = {
    "layer": layer,
    "rms": rms,
    "rms_cast": rms_cast,
    "rms_offset": rms_offset,
}


def parameters_of(
    kind: str, numel: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias."""
    return torch.randn(numel).to(dtype), torch.randn(numel).to(dtype) if kind == "layer" else None


def ulps(dtype: torch.dtype) -> dict[str, float]:
    """One unit in the last place; for fp32 a few, since sums over rows take another order."""
    eps = torch.finfo(dtype).eps
    return {"rtol": eps if dtype != torch.float32 else 8 * eps, "atol": 8 * 2.0**-23}


def exact_rows(kind: str, rows: int, numel: int) -> Tensor:
    """Integers that INT8 with groups of 64 holds exactly: less their mean, if "layer"."""
    x = torch.randint(-60, 60, (rows, numel)).float()
    x[:, ::64] = 127.0
    pairs = numel // 2 * 2
    x[:, 1:pairs:2] = -x[:, :pairs:2]
    x[:, pairs:] = 0.0
    return x + 9.0 * (kind == "layer")


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_is_that_of_torch(kind: str, dtype: torch.dtype, weighted: bool) -> None:
    x = (torch.randn(5, 192) * 3 + 1).to(dtype)
    weight, bias = parameters_of(kind, 192, dtype) if weighted else (None, None)
    y, rstd, message, amax = norm_quantize(x, weight, bias, EPS, kind, FOUR, dtype, True)
    torch.testing.assert_close(y, NORMS[kind](x, weight, bias), **ulps(dtype))
    encoded = x.float() - x.float().mean(-1, keepdim=True) if kind == "layer" else x
    assert torch.equal(message, encode_matrix(encoded, parse_format(FOUR)))
    assert torch.equal(amax, y.abs().max().float().view(1))
    deviation = (
        x.float().std(-1, correction=0) if kind == "layer" else x.float().norm(dim=1) / 192**0.5
    )
    torch.testing.assert_close(rstd[:, 0], 1 / (deviation**2 + EPS).sqrt())


@pytest.mark.parametrize("kind", KINDS)
def test_rebuilding_normalises_the_decoded_input_by_the_exact_statistics(kind: str) -> None:
    x = torch.randn(7, 128).bfloat16()
    weight, bias = parameters_of(kind, 128)
    y, rstd, message, _ = norm_quantize(x, weight, bias, EPS, kind, FOUR, torch.float32, False)
    rebuilt = norm_dequantize(
        message, rstd, weight, bias, 128, kind, FOUR, torch.float32, torch.bfloat16
    )
    assert 0.05 < float((rebuilt - y).norm() / y.norm()) < 0.15
    # of an input that the code holds exactly, it is the output
    if kind == "layer":
        exact, fmt = exact_rows(kind, 7, 128), EIGHT
    else:
        exact, fmt = decode_matrix(message, 7, 128, parse_format(FOUR)), FOUR
    y, exact_rstd, exact_message, _ = norm_quantize(
        exact, weight, bias, EPS, kind, fmt, torch.float32, False
    )
    rebuilt = norm_dequantize(
        *(exact_message, exact_rstd, weight, bias, 128, kind, fmt, torch.float32, torch.float32)
    )
    assert torch.equal(rebuilt, y)
    if kind == "rms_cast":
        cast = norm_dequantize(
            message, rstd, None, None, 128, kind, FOUR, torch.float32, torch.bfloat16
        )
        assert torch.equal(cast, cast.bfloat16().float())


@pytest.mark.parametrize("numel", [128, 197])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_autograd(kind: str, weighted: bool, numel: int) -> None:
    x = exact_rows(kind, 6, numel).requires_grad_()
    weight, bias = parameters_of(kind, numel) if weighted else (None, None)
    leaves = [leaf.requires_grad_() for leaf in (weight, bias) if leaf is not None]
    y, rstd, message, _ = norm_quantize(
        x.detach(), weight, bias, EPS, kind, EIGHT, torch.float32, False
    )
    dy = torch.randn(6, numel)
    expected = torch.autograd.grad(NORMS[kind](x, weight, bias), [x, *leaves], dy)
    dx, dweight, dbias = norm_backward(message, rstd, dy, weight, kind, EIGHT, torch.float32, True)
    torch.testing.assert_close(dx, expected[0], rtol=1e-4, atol=1e-6)
    if weighted:
        torch.testing.assert_close(dweight, expected[1], rtol=1e-4, atol=1e-5)
        if kind == "layer":
            torch.testing.assert_close(dbias, expected[2], rtol=1e-5, atol=1e-5)
    assert dweight.shape == (numel,)
    assert dbias.shape == ((numel,) if kind == "layer" else (0,))
    narrow = norm_backward(message, rstd, dy, weight, kind, EIGHT, torch.bfloat16, False)
    assert torch.equal(narrow[0], dx.bfloat16())
    assert narrow[1].numel() == narrow[2].numel() == 0


@pytest.mark.parametrize("fmt", [FOUR, EIGHT, NARROW])
@pytest.mark.parametrize("mean", [3.0, 10.0, 100.0, 1000.0])
def test_the_mean_of_a_row_costs_a_layer_norm_nothing(mean: float, fmt: str) -> None:
    """Errors of the gradients are those of the same rows without a mean, as it sees neither."""
    weight, bias = parameters_of("layer", 256)
    # multiples of 1/64: with the mean and without, fp32 holds the same rows
    rows, dy = (torch.randn(64, 256) * 64).round() / 64, torch.randn(64, 256)

    def errors(x: Tensor) -> list[float]:
        leaves = [x.double().requires_grad_(), weight.double().requires_grad_()]
        exact_y = layer(*leaves, bias.double())
        exact = [*torch.autograd.grad(exact_y, leaves, dy.double()), exact_y.detach()]
        _, rstd, message, _ = norm_quantize(x, weight, bias, EPS, "layer", fmt, x.dtype, False)
        gradients = norm_backward(message, rstd, dy, weight, "layer", fmt, x.dtype, True)[:2]
        y = norm_dequantize(message, rstd, weight, bias, 256, "layer", fmt, x.dtype, x.dtype)
        pairs = zip([*gradients, y], exact, strict=True)
        return [float((found - value).norm() / value.norm()) for found, value in pairs]

    expected = errors(rows)
    assert max(expected) < 0.12
    assert errors(rows + mean) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("numel", [1, 96, 128, 197])
def test_constant_rows_are_exact(numel: int, device: str) -> None:
    """``x - mean`` is 0, so that the output is the bias and dx what a deviation of eps leaves."""
    x = torch.tensor([0.0, -3.0, 1000.0, 2.0**20]).bfloat16()[:, None].repeat(1, numel)
    weight, bias = (p.to(device) for p in parameters_of("layer", numel))
    x, dy = x.to(device), torch.randn(4, numel).to(device)
    leaves = [p.clone().requires_grad_() for p in (x.double(), weight.double(), bias.double())]
    expected = torch.autograd.grad(layer(*leaves), leaves, dy.double())
    for fmt in (FOUR, NARROW):
        arguments = (x, weight, bias, EPS, "layer", fmt, torch.float32, False)
        y, rstd, message, _ = norm_quantize(*arguments)
        rebuilt = norm_dequantize(
            *(message, rstd, weight, bias, numel, "layer", fmt, torch.float32, x.dtype)
        )
        for values in (y, rebuilt):
            assert torch.equal(values, bias.expand_as(values))
        found = norm_backward(message, rstd, dy, weight, "layer", fmt, torch.float32, True)
        for gradient, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient.double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_so_in_its_row(kind: str, bad: float) -> None:
    x = torch.randn(3, 128)
    x[1, 70] = bad
    weight, bias = parameters_of(kind, 128)
    y, rstd, message, amax = norm_quantize(x, weight, bias, EPS, kind, FOUR, x.dtype, True)
    assert amax.isnan().all()
    rebuilt = norm_dequantize(message, rstd, weight, bias, 128, kind, FOUR, x.dtype, x.dtype)
    dx, dweight, _ = norm_backward(
        message, rstd, torch.randn(3, 128), weight, kind, FOUR, x.dtype, True
    )
    assert dweight.isnan().any()
    for values in (y, rebuilt, dx):
        assert values[1].isnan().any()
        assert values[[0, 2]].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows: int, kind: str) -> None:
    x = torch.randn(rows, 64)
    weight, bias = parameters_of(kind, 64)
    y, rstd, message, amax = norm_quantize(x, weight, bias, EPS, kind, FOUR, x.dtype, True)
    assert y.shape == (rows, 64)
    assert rstd.shape == (rows, 1)
    assert torch.equal(amax, y.abs().amax().view(1) if rows else torch.zeros(1))
    dx, dweight, _ = norm_backward(message, rstd, y, weight, kind, FOUR, x.dtype, True)
    assert dx.shape == (rows, 64)
    assert dweight.shape == (64,)
    assert bool(dweight.any()) == bool(rows)
    rebuilt = norm_dequantize(message, rstd, weight, bias, 64, kind, FOUR, x.dtype, x.dtype)
    assert rebuilt.shape == (rows, 64)


def test_largest_magnitude_is_that_of_the_rounded_output() -> None:
    x = torch.tensor([[1.0, 1.0, 1.0, -1.0]]).repeat(1, 16)
    weight = torch.full((64,), 0.3)
    y, _, _, amax = norm_quantize(x, weight, None, 0.0, "rms", FOUR, torch.bfloat16, True)
    assert float(amax) == float(torch.tensor(0.3).bfloat16()) == float(y[0, 0])
    weight[5] = 1e6
    assert norm_quantize(x, weight, None, 0.0, "rms", FOUR, torch.float16, True)[3].isinf()
    assert norm_quantize(x, weight, None, 0.0, "rms", FOUR, torch.float16, False)[3].shape == (0,)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("numel", "fmt"), [(64, FOUR), (100, NARROW)])
@pytest.mark.parametrize("kind", ["layer", "rms_cast"])
def test_operators_are_well_formed(kind: str, numel: int, fmt: str, device: str) -> None:
    x = torch.randn(6, 2 * numel, device=device)[::2, :numel].bfloat16()
    weight, bias = (p if p is None else p.to(device) for p in parameters_of(kind, numel))
    arguments = (x, weight, bias, EPS, kind, fmt, torch.bfloat16, True)
    torch.library.opcheck(norm_quantize, arguments)
    y, rstd, message, _ = norm_quantize(*arguments)
    rebuild = (message, rstd, weight, bias, numel, kind, fmt, torch.float16, x.dtype)
    torch.library.opcheck(norm_dequantize, rebuild)
    for parameters in (True, False):
        torch.library.opcheck(
            norm_backward, (message, rstd, y, weight, kind, fmt, torch.float32, parameters)
        )


def test_wrong_arguments_are_refused() -> None:
    x, weight = torch.randn(3, 64), torch.ones(64)

    def forward(**changes: object) -> object:
        arguments = {
            "x": x,
            "weight": weight,
            "bias": None,
            "eps": EPS,
            "kind": "rms",
            "format": FOUR,
            "dtype": x.dtype,
            "amax": False,
        }
        return norm_quantize(*(arguments | changes).values())

    with pytest.raises(ValueError, match="kind='batch' is not a kind of norm"):
        forward(kind="batch")
    with pytest.raises(ValueError, match="kind='rms' has no bias"):
        forward(bias=weight)
    with pytest.raises(ValueError, match=r"weight is torch.float32 \(32,\); expected .* \(64,\)"):
        forward(weight=weight[:32])
    with pytest.raises(ValueError, match=r"x has stride 2"):
        forward(x=torch.randn(3, 128)[:, ::2])
    with pytest.raises(ValueError, match=r"x is torch.float32 \(3, 4, 64\).*flatten"):
        forward(x=torch.randn(3, 4, 64))
    with pytest.raises(ValueError, match="no seed"):
        forward(format=FOUR.replace("nearest", "stochastic"))
    with pytest.raises(NotImplementedError, match="one scale per row"):
        forward(format="int8/row/symmetric/0/nearest/float32")
    _, rstd, message, _ = norm_quantize(x, weight, None, EPS, "rms", FOUR, x.dtype, False)
    with pytest.raises(ValueError, match=r"rstd is torch.float32 \(3, 2\).* \(3, 1\)"):
        norm_backward(message, rstd.expand(3, 2), x, weight, "layer", FOUR, x.dtype, True)
    with pytest.raises(ValueError, match="this format and numel need"):
        norm_backward(message, rstd[:2], x[:2], weight, "rms", FOUR, x.dtype, True)
    with pytest.raises(ValueError, match="message is"):
        norm_dequantize(message, rstd, None, None, 60, "rms", FOUR, x.dtype, x.dtype)
