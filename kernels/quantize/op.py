"""The operators ``lq_lightning::quantize`` and ``lq_lightning::quantize_out``."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from lq_lightning.kernels.message import parse_format
from lq_lightning.kernels.message.calls import facts, find_call, keep_call
from lq_lightning.kernels.message.checks import check_message, check_rows
from lq_lightning.kernels.message.noise import seed_words
from lq_lightning.kernels.message.operators import count_write, define_operator

from . import reference as cpu


def repeat_quantize(
    x: Tensor, reference: Tensor | None, format: str, seed: int, out: Tensor, skip: int | None
) -> bool:
    """Do again what ``quantize_out`` did for tensors with the same ``facts``; False if never."""
    call = find_call(_key(x, reference, format, out, skip))
    if call is None:
        return False
    call.launch(x, reference, out, words=seed_words(seed))
    count_write(out)
    return True


def _key(
    x: Tensor, reference: Tensor | None, format: str, out: Tensor, skip: int | None
) -> Hashable:
    return "quantize", facts(x), facts(reference), format, facts(out), skip


def _quantize_out(
    x: Tensor,
    reference: Tensor | None,
    format: str,
    seed: int,
    out: Tensor,
    skip: int | None = None,
) -> None:
    """Encode ``x`` (minus ``reference``) into ``out``.

    Args:
        x: ``[R, N]`` or ``[P, Q, N]`` fp32, bf16 or fp16, last dimension contiguous.
        reference: as ``x``, or None.
        format: a ``MessageFormat`` as a string.
        seed: for stochastic rounding.
        out: ``[R, nbytes]`` or ``[P, Q, nbytes]`` uint8.
        skip: row of ``x``, then ``[R + 1, N]``, to leave out.
    """
    if repeat_quantize(x, reference, format, seed, out, skip):
        return
    fmt = parse_format(format)
    check_rows("x", x)
    if reference is not None:
        check_rows("reference", reference)
    check_message("out", out, fmt.layout(x.shape[-1]).nbytes)
    if x.is_cuda:
        from .triton_kernels import launch_quantize

        launch = launch_quantize(x, reference, fmt, seed, out, skip)
        keep_call(_key(x, reference, format, out, skip), (), launch)
    else:
        cpu.quantize(x, reference, fmt, seed, out, skip)
    count_write(out)


def _quantize(x: Tensor, reference: Tensor | None, format: str, seed: int) -> Tensor:
    """Encode ``x`` (minus ``reference``) into new rows; arguments as for ``quantize_out``."""
    out = _fake_quantize(x, reference, format, seed)
    _quantize_out(x, reference, format, seed, out)
    return out


def _fake_quantize_out(
    x: Tensor,
    reference: Tensor | None,
    format: str,
    seed: int,
    out: Tensor,
    skip: int | None = None,
) -> None:
    return None


def _fake_quantize(x: Tensor, reference: Tensor | None, format: str, seed: int) -> Tensor:
    nbytes = parse_format(format).layout(x.shape[1]).nbytes
    return torch.empty(x.shape[0], nbytes, dtype=torch.uint8, device=x.device)


quantize_out = define_operator(
    "quantize_out(Tensor x, Tensor? reference, str format, int seed, Tensor(a!) out, "
    "int? skip=None) -> ()",
    _quantize_out,
    _fake_quantize_out,
)
quantize = define_operator(
    "quantize(Tensor x, Tensor? reference, str format, int seed) -> Tensor",
    _quantize,
    _fake_quantize,
)
