"""The operators ``activation_quantize``, ``activation_dequantize`` and ``activation_backward``.

A gated function is ``act(x) * up``, a plain one ``act(x)``. Codes are those of ``quantize``, bit
for bit: of ``x`` and ``up``, but of ``max(x, 0)`` for ``relu`` and ``relu2`` in formats without a
transform, and for ``relu`` such that its derivative is exact (``reference.encoded_input``). Values
are computed in fp32 and rounded once. For ``relu`` and ``relu2`` they are the same on every device;
for the others the GPU's differ from the reference by the errors of its exponential, at most one
unit in the last place of bf16 and fp16, except where the function itself cancels to nearly zero.

Shape legend: T rows, N columns, R encoded rows of a message (see ``message.matrix``). ``x``, ``up``
and ``dy`` are ``[T, N]`` fp32, bf16 or fp16, last dimension contiguous; ``message`` and
``up_message`` ``[R, nbytes]`` uint8 of a ``format`` of ``matrix.parse_matrix_format``, the latter
``[0, 0]`` for a plain function. All else raises ``ValueError``; ``NotImplementedError``: one scale
per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message.matrix import (
    check_matrix,
    decode_matrix,
    empty_message,
    encode_matrix,
    parse_matrix_format,
)
from lq_lightning.kernels.message.operators import Launched, cached_operator, check_rows

from . import reference as cpu

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_activation(activation: str) -> None:
    """Raise ``ValueError`` unless ``activation`` is one of ``reference.ACTIVATIONS``."""
    if activation not in cpu.ACTIVATIONS:
        raise ValueError(
            f"activation={activation!r} is not supported; allowed: {', '.join(cpu.ACTIVATIONS)}."
        )


def gated(up_message: Tensor) -> Tensor | None:
    """Return the message of the second factor, None for the ``[0, 0]`` of a plain function."""
    return None if up_message.shape[0] == 0 and up_message.shape[1] == 0 else up_message


def check_values(name: str, values: Tensor) -> None:
    """Raise ``ValueError`` unless ``values`` is a matrix of floats with contiguous rows."""
    if values.dim() != 2 or values.dtype not in _DTYPES:
        raise ValueError(
            f"{name} is {values.dtype} {tuple(values.shape)}; it must be a matrix of float32, "
            f"bfloat16 or float16. Flatten all but the last dimension of {name}."
        )
    check_rows(name, values)


def check_messages(
    message: Tensor, up_message: Tensor, rows: int, numel: int, fmt: MessageFormat
) -> None:
    """Raise ``ValueError`` unless both messages are those of ``[rows, numel]`` matrices."""
    check_matrix("message", message, rows, numel, fmt)
    up = gated(up_message)
    if up is not None:
        check_matrix("up_message", up, rows, numel, fmt)
        if up.device != message.device:
            raise ValueError(
                f"message is on {message.device}, up_message on {up.device}; both must be on one."
            )


def _fake_quantize(
    x: Tensor, up: Tensor | None, activation: str, format: str, amax: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    fmt = parse_matrix_format(format)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    message = empty_message(fmt, x.shape[0], x.shape[1], x.device)
    nothing = torch.empty(0, 0, dtype=torch.uint8, device=x.device)
    up_message = nothing if up is None else torch.empty_like(message)
    return y, message, up_message, torch.zeros(int(amax), dtype=torch.float32, device=x.device)


@cached_operator(
    "activation_quantize(Tensor x, Tensor? up, str activation, str format, bool amax)"
    " -> (Tensor y, Tensor message, Tensor up_message, Tensor amax)",
    _fake_quantize,
)
def activation_quantize(
    x: Tensor, up: Tensor | None, activation: str, format: str, amax: bool
) -> tuple[Tensor, ...] | Launched:
    """Apply an activation function and encode its inputs, in one pass over memory.

    ``up`` has the shape, dtype and device of ``x``, with strides of its own; None for a plain
    function. ``amax`` asks for the largest magnitude.

    Returns:
        ``y``, ``[T, N]`` contiguous, of the dtype of ``x``; messages of ``x``, or of what matters
        of it, and of ``up``; fp32 ``[1]``, ``max(abs(y))`` of the rounded ``y``, NaN if one is, or
        ``[0]`` if not asked for.
    """
    fmt = parse_matrix_format(format)
    check_activation(activation)
    check_values("x", x)
    if up is not None:
        check_values("up", up)
        if up.shape != x.shape or up.dtype != x.dtype or up.device != x.device:
            raise ValueError(
                f"up is {up.dtype} {tuple(up.shape)} on {up.device}, x is {x.dtype} "
                f"{tuple(x.shape)} on {x.device}; both must have the same shape, dtype and device."
            )
    if not x.is_cuda:
        value = cpu.value_and_derivative(x.float(), activation)[0]
        y = (value if up is None else value * up.float()).to(x.dtype)
        message = encode_matrix(cpu.encoded_input(x.float(), activation, fmt), fmt)
        nothing = torch.empty(0, 0, dtype=torch.uint8)
        largest = cpu.amax(y) if amax else torch.empty(0, dtype=torch.float32)
        return y, message, nothing if up is None else encode_matrix(up, fmt), largest
    from lq_lightning.kernels.activation.triton_kernels import launch

    results = _fake_quantize(x, up, activation, format, amax)
    launched = launch("quantize", (x, up, *results), activation, fmt)
    return Launched(results, launched, zeroed=3 if amax else None)


@cached_operator(
    "activation_dequantize(Tensor message, Tensor up_message, SymInt rows, int numel,"
    " str activation, str format, ScalarType dtype) -> Tensor",
    lambda message, up_message, rows, numel, activation, format, dtype: message.new_empty(
        rows, numel, dtype=dtype
    ),
)
def activation_dequantize(
    message: Tensor,
    up_message: Tensor,
    rows: int,
    numel: int,
    activation: str,
    format: str,
    dtype: torch.dtype,
) -> Tensor | Launched:
    """Apply an activation function to decoded inputs: ``[rows, numel]`` of ``dtype``."""
    fmt = parse_matrix_format(format)
    check_activation(activation)
    check_messages(message, up_message, rows, numel, fmt)
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype} is not supported; use one of {_DTYPES}.")
    up = gated(up_message)
    if not message.is_cuda:
        value = cpu.value_and_derivative(decode_matrix(message, rows, numel, fmt), activation)[0]
        if up is not None:
            value = value * decode_matrix(up, rows, numel, fmt)
        return value.to(dtype)
    from lq_lightning.kernels.activation.triton_kernels import launch

    y = message.new_empty(rows, numel, dtype=dtype)
    return Launched((y,), launch("dequantize", (message, up, y), activation, fmt))


def _fake_backward(
    message: Tensor, up_message: Tensor, dy: Tensor, activation: str, format: str, amax: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
    dup = dx.new_empty(0, 0) if gated(up_message) is None else torch.empty_like(dx)
    return dx, dup, torch.zeros(2 * int(amax), dtype=torch.float32, device=dy.device)


@cached_operator(
    "activation_backward(Tensor message, Tensor up_message, Tensor dy, str activation, str format,"
    " bool amax) -> (Tensor dx, Tensor dup, Tensor amax)",
    _fake_backward,
)
def activation_backward(
    message: Tensor, up_message: Tensor, dy: Tensor, activation: str, format: str, amax: bool
) -> tuple[Tensor, ...] | Launched:
    """Differentiate an activation function at decoded inputs.

    Returns:
        ``dx`` and ``dup``, ``[T, N]`` contiguous, of the dtype of ``dy`` (``dup`` ``[0, 0]`` for a
        plain function); fp32 ``[2]``, the largest magnitudes of both as rounded (0 without
        ``dup``), NaN if one is, or ``[0]`` if ``amax`` is False.
    """
    fmt = parse_matrix_format(format)
    check_activation(activation)
    check_values("dy", dy)
    check_messages(message, up_message, dy.shape[0], dy.shape[1], fmt)
    if dy.device != message.device:
        raise ValueError(f"message is on {message.device}, dy on {dy.device}; both must be on one.")
    up = gated(up_message)
    if not dy.is_cuda:
        (rows, numel), wide, dup = dy.shape, dy.float(), dy.new_empty(0, 0)
        x = decode_matrix(message, rows, numel, fmt)
        value, derivative = cpu.value_and_derivative(x, activation)
        if up is not None:
            dup = (wide * value).to(dy.dtype)
            wide = wide * decode_matrix(up, rows, numel, fmt)
        dx = (wide * derivative).to(dy.dtype)
        largest = [cpu.amax(dx), cpu.amax(dup)] if amax else [torch.empty(0, dtype=torch.float32)]
        return dx, dup, torch.cat(largest)
    from lq_lightning.kernels.activation.triton_kernels import launch

    results = _fake_backward(message, up_message, dy, activation, format, amax)
    launched = launch("backward", (message, up, dy, *results), activation, fmt)
    return Launched(results, launched, zeroed=2 if amax else None)
