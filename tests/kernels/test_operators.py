"""The operators as torch sees them: schema, fake implementations, tracing, checks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from lq_lightning.kernels.activation import activation_backward, activation_quantize
from lq_lightning.kernels.float8 import float8_quantize
from lq_lightning.kernels.message import (
    accumulate_,
    dequantize,
    dequantize_out,
    parse_format,
    quantize,
    quantize_out,
    requantize,
    requantize_out,
)
from lq_lightning.kernels.mixed_width import (
    mixed_dequantize,
    mixed_quantize,
    width_counts,
    width_rows,
)
from lq_lightning.kernels.norm import norm_backward, norm_quantize
from lq_lightning.kernels.tah import tah_dequantize, tah_quantize

EIGHT = "int8/128/symmetric/32/stochastic/float32"
FOUR = "int4/64/asymmetric/32/nearest/bfloat16"
ROW = "nf4/row/symmetric/0/nearest/bfloat16"
TAH = "tah/64/4/1/2/hadamard"
WIDTHS = torch.arange(256) % 16 + 1
ROWS, COUNTS = width_rows(WIDTHS), width_counts(WIDTHS)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("numel", [1000, 0])
def test_opcheck(device: str, numel: int) -> None:
    x = torch.randn(3, numel, device=device)
    message = quantize(x, None, EIGHT, 7)
    torch.library.opcheck(quantize, (x, None, EIGHT, 7))
    torch.library.opcheck(quantize, (x, x.bfloat16(), FOUR, 0))
    torch.library.opcheck(quantize, (x, None, ROW, 0))
    torch.library.opcheck(quantize_out, (x, None, EIGHT, 7, torch.zeros_like(message)))
    messages = message[:, None]
    torch.library.opcheck(dequantize, (messages, numel, EIGHT, 0.5, torch.bfloat16))
    torch.library.opcheck(dequantize_out, (messages, numel, EIGHT, 0.5, True, x[:1].clone()))
    torch.library.opcheck(requantize, (messages, numel, EIGHT, FOUR, 0))
    out = requantize(messages, numel, EIGHT, FOUR, 0)
    torch.library.opcheck(requantize_out, (messages, numel, EIGHT, FOUR, 0, out))
    torch.library.opcheck(accumulate_, (message.clone(), x, EIGHT, 0))


def _results() -> list[Tensor]:
    x = torch.arange(-256, 256, dtype=torch.float32).view(2, 256) * 1.01
    weight = torch.ones(256, dtype=torch.float32)
    flat = FOUR.replace("/32/", "/0/")
    message = quantize(x, None, EIGHT, 7)
    normed = norm_quantize(x, weight, None, 1e-6, "rms", flat, torch.float32, True)
    acted = activation_quantize(x, x, "silu", flat, True)
    return [
        message,
        requantize(message[:, None], 256, EIGHT, FOUR, 0),
        dequantize(message[:, None], 256, EIGHT, 1.0, torch.float32),
        *normed,
        *norm_backward(normed[2], normed[1], x, weight, "rms", flat, torch.float32, True),
        *acted,
        *activation_backward(acted[1], acted[2], x, "silu", flat, True),
        *float8_quantize(x, True, True),
        (tokens := tah_quantize(x[None], TAH)),
        tah_dequantize(tokens, 1, 2, 256, TAH, torch.float32),
        (mixed := mixed_quantize(x, ROWS, COUNTS, True)),
        mixed_dequantize(mixed, ROWS, COUNTS, 2, torch.float32),
    ]


def test_default_dtype_has_no_effect() -> None:
    """Lightning's bf16-true sets it while a model runs."""
    expected = _results()
    torch.set_default_dtype(torch.bfloat16)
    for one, other in zip(_results(), expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert [one.dtype for one in _results()] == [one.dtype for one in expected]


@pytest.mark.parametrize("text", ["", "int9/64/symmetric/0/nearest/float32", "int4/64"])
def test_bad_format_string(text: str) -> None:
    with pytest.raises(ValueError, match="is not a message format"):
        parse_format(text)


def test_inner_stride_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x has stride 2 .*Pass x.contiguous"):
        quantize(torch.randn(4, 64)[:, ::2], None, FOUR, 0)


def test_misaligned_rows_are_refused() -> None:
    message = quantize(torch.randn(2, 256), None, FOUR, 0)
    wide = torch.zeros(2, message.shape[1] + 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="must start at a multiple of 16 bytes"):
        dequantize(wide[None, :, : message.shape[1]], 256, FOUR, 1.0, torch.float32)
    flat = torch.zeros(message.numel() + 16, dtype=torch.uint8)[1:]
    with pytest.raises(ValueError, match="must start at a multiple of 16 bytes"):
        dequantize(flat[: message.numel()].view(1, 2, -1), 256, FOUR, 1.0, torch.float32)


def test_wrong_row_length_is_refused() -> None:
    message = quantize(torch.randn(2, 256), None, FOUR, 0)
    with pytest.raises(ValueError, match=r"this format and numel need \d+"):
        dequantize(message[None], 4000, FOUR, 1.0, torch.float32)
