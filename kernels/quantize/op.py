"""The operators ``lq_lightning::quantize`` and ``lq_lightning::quantize_out``."""

from __future__ import annotations

import torch
from torch import Tensor

from lq_lightning.kernels.message import parse_format
from lq_lightning.kernels.message.checks import check_message, check_rows

from . import reference as cpu


def _check(x: Tensor, reference: Tensor | None, out: Tensor, nbytes: int) -> None:
    check_rows("x", x)
    if reference is not None:
        check_rows("reference", reference)
    check_message("out", out, nbytes)


@torch.library.custom_op(
    "lq_lightning::quantize_out",
    mutates_args=("out",),
    device_types="cpu",
    schema="(Tensor x, Tensor? reference, str format, int seed, Tensor(a!) out) -> ()",
)
def quantize_out(x: Tensor, reference: Tensor | None, format: str, seed: int, out: Tensor) -> None:
    """Encode ``x`` (minus ``reference``) into ``out``.

    Args:
        x: ``[R, N]`` fp32, bf16 or fp16, last dimension contiguous.
        reference: ``[R, N]`` or None.
        format: a ``MessageFormat`` as a string.
        seed: for stochastic rounding.
        out: ``[R, nbytes]`` uint8.
    """
    fmt = parse_format(format)
    _check(x, reference, out, fmt.layout(x.shape[1]).nbytes)
    cpu.quantize(x, reference, fmt, seed, out)


@quantize_out.register_kernel("cuda")
def _(x: Tensor, reference: Tensor | None, format: str, seed: int, out: Tensor) -> None:
    from .triton_kernels import launch_quantize

    fmt = parse_format(format)
    _check(x, reference, out, fmt.layout(x.shape[1]).nbytes)
    launch_quantize(x, reference, fmt, seed, out)


@quantize_out.register_fake
def _(x: Tensor, reference: Tensor | None, format: str, seed: int, out: Tensor) -> None:
    return None


@torch.library.custom_op(
    "lq_lightning::quantize",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema="(Tensor x, Tensor? reference, str format, int seed) -> Tensor",
)
def quantize(x: Tensor, reference: Tensor | None, format: str, seed: int) -> Tensor:
    """Encode ``x`` (minus ``reference``) into new rows; arguments as for ``quantize_out``."""
    nbytes = parse_format(format).layout(x.shape[1]).nbytes
    out = torch.empty(x.shape[0], nbytes, dtype=torch.uint8, device=x.device)
    quantize_out(x, reference, format, seed, out)
    return out


@quantize.register_fake
def _(x: Tensor, reference: Tensor | None, format: str, seed: int) -> Tensor:
    nbytes = parse_format(format).layout(x.shape[1]).nbytes
    return x.new_empty(x.shape[0], nbytes, dtype=torch.uint8)
