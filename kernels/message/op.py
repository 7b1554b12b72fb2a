"""The operators ``quantize``, ``dequantize`` and ``requantize`` of ``lq_lightning``.

Those that end with ``_out`` write to a tensor that they are given. ``repeat_*`` do again what such
a one did for tensors with the same ``facts``, without the dispatcher; False if it never did.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from . import rows as cpu
from .format import parse_format
from .launch_cache import facts, find_call, keep_call
from .operators import check_message, check_rows, count_write, define_operator
from .reference import seed_words


def _repeat(key: Hashable, *tensors: Tensor | None, **words: tuple[int, int]) -> bool:
    """Launch again what was kept for a key; the last tensor is written."""
    call = find_call(key)
    if call is None:
        return False
    call.launch(*tensors, **words)
    if tensors[-1] is not None:
        count_write(tensors[-1])
    return True


def _quantize_key(
    x: Tensor, reference: Tensor | None, format: str, out: Tensor, skip: int | None
) -> Hashable:
    return "quantize", facts(x), facts(reference), format, facts(out), skip


def repeat_quantize(
    x: Tensor, reference: Tensor | None, format: str, seed: int, out: Tensor, skip: int | None
) -> bool:
    """Repeat ``quantize_out``."""
    key = _quantize_key(x, reference, format, out, skip)
    return _repeat(key, x, reference, out, words=seed_words(seed))


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
        keep_call(_quantize_key(x, reference, format, out, skip), (), launch)
    else:
        cpu.quantize(x, reference, fmt, seed, out, skip)
    count_write(out)


def _new_message(rows: int, numel: int, format: str, device: torch.device) -> Tensor:
    nbytes = parse_format(format).layout(numel).nbytes
    return torch.empty(rows, nbytes, dtype=torch.uint8, device=device)


def _fake_quantize(x: Tensor, reference: Tensor | None, format: str, seed: int) -> Tensor:
    return _new_message(x.shape[0], x.shape[1], format, x.device)


def _quantize(x: Tensor, reference: Tensor | None, format: str, seed: int) -> Tensor:
    """Encode ``x`` (minus ``reference``) into new rows; arguments as for ``quantize_out``."""
    out = _fake_quantize(x, reference, format, seed)
    _quantize_out(x, reference, format, seed, out)
    return out


def _dequantize_key(
    message: Tensor, numel: int, format: str, scale: float, add: bool, out: Tensor
) -> Hashable:
    return "dequantize", facts(message), numel, format, scale, add, facts(out)


def repeat_dequantize(
    message: Tensor, numel: int, format: str, scale: float, add: bool, out: Tensor
) -> bool:
    """Repeat ``dequantize_out``."""
    return _repeat(_dequantize_key(message, numel, format, scale, add, out), message, out)


def _dequantize_out(
    message: Tensor, numel: int, format: str, scale: float, add: bool, out: Tensor
) -> None:
    """Decode messages, sum them and write or add ``scale`` times the sum to ``out``.

    Args:
        message: ``[K, R, nbytes]`` or ``[K, P, Q, nbytes]`` uint8.
        numel: values in a row.
        format: a ``MessageFormat`` as a string.
        scale: factor of the sum.
        add: add to ``out`` in fp32, rounded once, instead of overwriting it.
        out: ``[R, numel]`` or ``[P, Q, numel]`` fp32, bf16 or fp16, last dimension contiguous.
    """
    if repeat_dequantize(message, numel, format, scale, add, out):
        return
    fmt = parse_format(format)
    check_message("message", message, fmt.layout(numel).nbytes)
    check_rows("out", out)
    if message.is_cuda:
        from .triton_kernels import launch_dequantize

        launch = launch_dequantize(message, numel, fmt, scale, add, out)
        keep_call(_dequantize_key(message, numel, format, scale, add, out), (), launch)
    else:
        cpu.dequantize(message, numel, fmt, scale, add, out)
    count_write(out)


def _fake_dequantize(
    message: Tensor, numel: int, format: str, scale: float, dtype: torch.dtype
) -> Tensor:
    return torch.empty(message.shape[1], numel, dtype=dtype, device=message.device)


def _dequantize(
    message: Tensor, numel: int, format: str, scale: float, dtype: torch.dtype
) -> Tensor:
    """Decode and sum messages into a new ``[R, numel]`` tensor; see ``dequantize_out``."""
    out = _fake_dequantize(message, numel, format, scale, dtype)
    _dequantize_out(message, numel, format, scale, False, out)
    return out


def _requantize_key(
    message: Tensor, numel: int, source: str, target: str, out: Tensor, skip: int | None
) -> Hashable:
    return "requantize", facts(message), numel, source, target, facts(out), skip


def repeat_requantize(
    message: Tensor,
    numel: int,
    source: str,
    target: str,
    seed: int,
    out: Tensor,
    skip: int | None,
) -> bool:
    """Repeat ``requantize_out``."""
    key = _requantize_key(message, numel, source, target, out, skip)
    return _repeat(key, message, out, words=seed_words(seed))


def _requantize_out(
    message: Tensor,
    numel: int,
    source: str,
    target: str,
    seed: int,
    out: Tensor,
    skip: int | None = None,
) -> None:
    """Sum messages of format ``source`` and encode the sum in format ``target``.

    Args:
        message: ``[K, R, nbytes]`` uint8.
        numel: values in a row.
        source: format of ``message``, a ``MessageFormat`` as a string.
        target: format of ``out``.
        seed: for stochastic rounding in ``target``.
        out: ``[R, nbytes]`` uint8.
        skip: row of ``message``, then ``[K, R + 1, nbytes]``, to leave out.
    """
    if repeat_requantize(message, numel, source, target, seed, out, skip):
        return
    source_format, target_format = parse_format(source), parse_format(target)
    check_message("message", message, source_format.layout(numel).nbytes)
    check_message("out", out, target_format.layout(numel).nbytes)
    if message.is_cuda:
        from .triton_kernels import launch_requantize

        launch = launch_requantize(message, numel, source_format, target_format, seed, out, skip)
        keep_call(_requantize_key(message, numel, source, target, out, skip), (), launch)
    else:
        cpu.requantize(message, numel, source_format, target_format, seed, out, skip)
    count_write(out)


def _fake_requantize(message: Tensor, numel: int, source: str, target: str, seed: int) -> Tensor:
    return _new_message(message.shape[1], numel, target, message.device)


def _requantize(message: Tensor, numel: int, source: str, target: str, seed: int) -> Tensor:
    """Sum and encode into new rows; arguments as for ``requantize_out``."""
    out = _fake_requantize(message, numel, source, target, seed)
    _requantize_out(message, numel, source, target, seed, out)
    return out


quantize_out = define_operator(
    "quantize_out(Tensor x, Tensor? reference, str format, int seed, Tensor(a!) out, "
    "int? skip=None) -> ()",
    _quantize_out,
)
quantize = define_operator(
    "quantize(Tensor x, Tensor? reference, str format, int seed) -> Tensor",
    _quantize,
    _fake_quantize,
)
dequantize_out = define_operator(
    "dequantize_out(Tensor message, int numel, str format, float scale, bool add, Tensor(a!) out)"
    " -> ()",
    _dequantize_out,
)
dequantize = define_operator(
    "dequantize(Tensor message, SymInt numel, str format, float scale, ScalarType dtype) -> Tensor",
    _dequantize,
    _fake_dequantize,
)
requantize_out = define_operator(
    "requantize_out(Tensor message, int numel, str source, str target, int seed, Tensor(a!) out, "
    "int? skip=None) -> ()",
    _requantize_out,
)
requantize = define_operator(
    "requantize(Tensor message, int numel, str source, str target, int seed) -> Tensor",
    _requantize,
    _fake_requantize,
)
