"""The operators ``float8_cast`` and ``float8_quantize``, and ``*dequantize_float8``.

What FP8 matrix products need: a cast with one scale per tensor, of the rows and of the columns of a
matrix in one pass over memory, and rebuilds of saved activations straight from their codes to the
transposed operand of a weight gradient.

Shape legend: R rows, N columns; T tokens, the rows of a matrix in a message (``message.matrix``).
``round16(n)`` is the next multiple of 16, which cuBLASLt demands of operands; what is appended is
zero.

Values are those of the reference, bit for bit, except behind an exponential or erf: there the codes
differ by one at most. Rebuilds differ from a cast of what ``dequantize``, ``norm_dequantize`` and
``activation_dequantize`` return by the rounding of fp32, and by that to 16 bits, which they spare.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lq_lightning.kernels.activation.op import check_activation, check_messages, gated
from lq_lightning.kernels.message import round_up
from lq_lightning.kernels.message.calls import facts, find_call, keep_call
from lq_lightning.kernels.message.matrix import check_matrix, parse_matrix_format
from lq_lightning.kernels.message.operators import define_operator
from lq_lightning.kernels.norm.op import check_kind, check_parameter, check_rstd

from . import reference as cpu
from .checks import check_cast, check_number, check_sides

_E4M3 = torch.float8_e4m3fn


def _float8_cast(
    x: Tensor, amax: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast a matrix to FP8 with one scale, reading it once.

    The scale is ``amax / 448`` (E4M3) or ``amax / 57344`` (E5M2), at least ``2**-96``. If ``amax``
    is infinite or NaN, so is the scale, and every product with it is NaN.

    Args:
        x: ``[R, N]`` fp32, bf16 or fp16, last dimension contiguous.
        amax: fp32 ``[1]``, the largest magnitude of ``x``. Values beyond it are clipped to it.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        rows: whether to return ``q``.
        columns: whether to return ``q_t``.

    Returns:
        ``q`` ``[R, round16(N)]``; ``q_t`` ``[N, round16(R)]``, transposed; both contiguous, and
        ``[0, 0]`` where not asked for; fp32 ``[1]``, the factor of decoding.

    Raises:
        ValueError: another shape, dtype or stride.
        NotImplementedError: a side of more than ``2**22`` on a GPU.
    """
    key = ("float8_cast", facts(x), facts(amax), dtype, rows, columns)
    call = find_call(key)
    if call is not None:
        q, q_t, scale = call.repeat(x, amax)
        return q, q_t, scale
    check_cast(x, dtype)
    check_number("amax", amax)
    q, q_t, scale = _fake_float8_cast(x, amax, dtype, rows, columns)
    if x.is_cuda:
        from .triton_kernels import launch_cast

        keep_call(key, (q, q_t, scale), launch_cast(x, amax, q, q_t, scale))
        return q, q_t, scale
    scale = cpu.scale_of(amax.view(1), dtype)
    if rows or columns:
        cast = cpu.cast(x, scale, dtype)
        q = cpu.padded_rows(cast) if rows else q
        q_t = cpu.transposed(cast) if columns else q_t
    return q, q_t, scale


def _float8_quantize(
    x: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the largest magnitude of a matrix and cast it as ``float8_cast`` does.

    Args:
        x: as of ``float8_cast``.
        dtype: as of ``float8_cast``.
        rows: whether to return ``q``.
        columns: whether to return ``q_t``.

    Returns:
        ``q``, ``q_t`` and the factor of decoding of ``float8_cast``; fp32 ``[1]``, the largest
        magnitude: NaN if a value is, 0 without values.

    Raises:
        ValueError: another shape, dtype or stride.
        NotImplementedError: a side of more than ``2**22`` on a GPU.
    """
    key = ("float8_quantize", facts(x), dtype, rows, columns)
    call = find_call(key)
    if call is not None:
        q, q_t, scale, amax = call.repeat(x)
        return q, q_t, scale, amax
    check_cast(x, dtype)
    if not x.is_cuda:
        amax = cpu.amax(x)
        return *_float8_cast(x, amax, dtype, rows, columns), amax
    from .triton_kernels import launch_quantize

    results = _fake_float8_quantize(x, dtype, rows, columns)
    results[3].zero_()
    keep_call(key, results, launch_quantize(x, *results), zeroed=3)
    return results


def _dequantize_float8(
    message: Tensor, rows: int, numel: int, format: str, scale: Tensor
) -> Tensor:
    """Decode a matrix to transposed E4M3, clipped to the largest value.

    Args:
        message: ``[R, nbytes]`` uint8 of a ``[T, N]`` matrix.
        rows: T.
        numel: N.
        format: that of the message, one of ``matrix.parse_matrix_format``.
        scale: fp32 ``[1]``, the factor of decoding E4M3, of ``float8_cast``.

    Returns:
        ``[N, round16(T)]`` E4M3, contiguous.

    Raises:
        ValueError: an argument has another shape, dtype, stride or value.
        NotImplementedError: a format with one scale per row; a side of more than ``2**22``.
    """
    key = ("dequantize_float8", facts(message), rows, numel, format, facts(scale))
    call = find_call(key)
    if call is not None:
        return call.repeat(message, scale)[0]
    fmt = parse_matrix_format(format)
    check_matrix("message", message, rows, numel, fmt)
    check_number("scale", scale)
    if not message.is_cuda:
        return cpu.dequantize(message, rows, numel, fmt, scale)
    from .triton_rebuild import launch_dequantize

    out = _empty_transposed(message, rows, numel)
    keep_call(key, [out], launch_dequantize(message, rows, fmt, scale, out))
    return out


def _norm_dequantize_float8(
    message: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    numel: int,
    kind: str,
    format: str,
    scale: Tensor,
) -> Tensor:
    """Rebuild the output of a norm from its encoded input, as transposed E4M3.

    In fp32 up to E4M3: the kind "rms_cast" is rebuilt as "rms".

    Args:
        message: ``[R, nbytes]`` uint8 of the ``[T, N]`` input.
        rstd: of ``norm_quantize``.
        weight: ``[N]`` or None.
        bias: ``[N]`` or None; for "layer".
        numel: N.
        kind: of norm, see ``norm_quantize``.
        format: that of the message.
        scale: fp32 ``[1]``, the factor of decoding E4M3: of the exact output.

    Returns:
        ``[N, round16(T)]`` E4M3, contiguous, clipped to the largest value.

    Raises:
        ValueError: an argument has another shape, dtype, stride or value.
        NotImplementedError: a format with one scale per row; a side of more than ``2**22``.
    """
    tensors = (message, rstd, weight, bias, scale)
    key = ("norm_dequantize_float8", *map(facts, tensors), numel, kind, format)
    call = find_call(key)
    if call is not None:
        return call.repeat(*tensors)[0]
    fmt = parse_matrix_format(format)
    rows = rstd.shape[0]
    check_kind(kind, bias)
    check_rstd(rstd, rows)
    check_matrix("message", message, rows, numel, fmt)
    check_parameter("weight", weight, numel)
    check_parameter("bias", bias, numel)
    check_number("scale", scale)
    if not message.is_cuda:
        return cpu.norm_dequantize(message, rstd, weight, bias, numel, kind, fmt, scale)
    from .triton_rebuild import launch_norm_dequantize

    out = _empty_transposed(message, rows, numel)
    launch = launch_norm_dequantize(message, rstd, weight, bias, kind, fmt, scale, out)
    keep_call(key, [out], launch)
    return out


def _activation_dequantize_float8(
    message: Tensor,
    up_message: Tensor,
    rows: int,
    numel: int,
    activation: str,
    format: str,
    scale: Tensor,
) -> Tensor:
    """Apply an activation function to decoded inputs, in fp32, to transposed E4M3.

    Args:
        message: ``[R, nbytes]`` uint8 of ``x``.
        up_message: ``[R, nbytes]`` of ``up``, ``[0, 0]`` for a plain function.
        rows: T.
        numel: N.
        activation: see ``activation_quantize``.
        format: what the messages were encoded with.
        scale: fp32 ``[1]``, the factor of decoding E4M3: of the exact output.

    Returns:
        ``[N, round16(T)]`` E4M3, contiguous, clipped to the largest value.

    Raises:
        ValueError: an argument has another shape, dtype, stride or value.
        NotImplementedError: a format with one scale per row; a side of more than ``2**22``.
    """
    tensors = (message, up_message, scale)
    key = ("activation_dequantize_float8", *map(facts, tensors), rows, numel, activation, format)
    call = find_call(key)
    if call is not None:
        return call.repeat(*tensors)[0]
    fmt = parse_matrix_format(format)
    check_activation(activation)
    check_messages(message, up_message, rows, numel, fmt)
    check_number("scale", scale)
    up = gated(up_message)
    if not message.is_cuda:
        return cpu.activation_dequantize(message, up, rows, numel, activation, fmt, scale)
    from .triton_rebuild import launch_activation_dequantize

    out = _empty_transposed(message, rows, numel)
    launch = launch_activation_dequantize(message, up, rows, activation, fmt, scale, out)
    keep_call(key, [out], launch)
    return out


def _empty_transposed(message: Tensor, rows: int, numel: int) -> Tensor:
    check_sides(rows, numel)
    return message.new_empty(numel, round_up(rows, cpu.ROW_MULTIPLE), dtype=_E4M3)


def _fake_float8_cast(
    x: Tensor, amax: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    R, N = x.shape
    q_shape = (R, round_up(N, cpu.ROW_MULTIPLE)) if rows else (0, 0)
    q_t_shape = (N, round_up(R, cpu.ROW_MULTIPLE)) if columns else (0, 0)
    scale = x.new_empty(1, dtype=torch.float32)
    return x.new_empty(q_shape, dtype=dtype), x.new_empty(q_t_shape, dtype=dtype), scale


def _fake_float8_quantize(
    x: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    amax = x.new_empty(1, dtype=torch.float32)
    return *_fake_float8_cast(x, amax, dtype, rows, columns), amax


def _fake_dequantize_float8(
    message: Tensor, rows: int, numel: int, format: str, scale: Tensor
) -> Tensor:
    return _empty_transposed(message, rows, numel)


def _fake_norm_dequantize_float8(
    message: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    numel: int,
    kind: str,
    format: str,
    scale: Tensor,
) -> Tensor:
    return _empty_transposed(message, rstd.shape[0], numel)


def _fake_activation_dequantize_float8(
    message: Tensor,
    up_message: Tensor,
    rows: int,
    numel: int,
    activation: str,
    format: str,
    scale: Tensor,
) -> Tensor:
    return _empty_transposed(message, rows, numel)


float8_cast = define_operator(
    "float8_cast(Tensor x, Tensor amax, ScalarType dtype, bool rows, bool columns)"
    " -> (Tensor q, Tensor q_t, Tensor scale)",
    _float8_cast,
    _fake_float8_cast,
)
float8_quantize = define_operator(
    "float8_quantize(Tensor x, ScalarType dtype, bool rows, bool columns)"
    " -> (Tensor q, Tensor q_t, Tensor scale, Tensor amax)",
    _float8_quantize,
    _fake_float8_quantize,
)
dequantize_float8 = define_operator(
    "dequantize_float8(Tensor message, SymInt rows, int numel, str format, Tensor scale) -> Tensor",
    _dequantize_float8,
    _fake_dequantize_float8,
)
norm_dequantize_float8 = define_operator(
    "norm_dequantize_float8(Tensor message, Tensor rstd, Tensor? weight, Tensor? bias, int numel,"
    " str kind, str format, Tensor scale) -> Tensor",
    _norm_dequantize_float8,
    _fake_norm_dequantize_float8,
)
activation_dequantize_float8 = define_operator(
    "activation_dequantize_float8(Tensor message, Tensor up_message, SymInt rows, int numel,"
    " str activation, str format, Tensor scale) -> Tensor",
    _activation_dequantize_float8,
    _fake_activation_dequantize_float8,
)
