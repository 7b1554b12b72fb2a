"""The operators ``float8_cast`` and ``float8_quantize``, and ``*dequantize_float8``.

What FP8 matrix products need: a cast with one scale per tensor, of the rows and of the columns of a
matrix in one pass over memory, and rebuilds of saved activations straight from their codes to the
transposed operand of a weight gradient.

Shape legend: R rows, N columns; T tokens, the rows of a matrix in a message (``message.matrix``).
``round16(n)`` is the next multiple of 16, which cuBLASLt demands of operands; what is appended is
zero. Rebuilds take a message of a ``[T, N]`` matrix and its ``format``, one of
``matrix.parse_matrix_format``, and ``scale``, fp32 ``[1]``, the factor that decodes E4M3 of the
exact values; they return ``[N, round16(T)]`` E4M3, contiguous, clipped to the largest value.

Arguments of another shape, dtype, stride or value raise ``ValueError``; formats with one scale per
row, and a side of more than ``2**22`` on a GPU, ``NotImplementedError``.

Values are those of the reference, bit for bit, except behind an exponential or erf: there the codes
differ by one at most. Rebuilds differ from a cast of what ``dequantize``, ``norm_dequantize`` and
``activation_dequantize`` return by the rounding of fp32, and by that to 16 bits, which they spare.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lq_lightning.kernels.activation.op import check_activation, check_messages, check_values, gated
from lq_lightning.kernels.activation.reference import value_and_derivative
from lq_lightning.kernels.float8 import reference as cpu
from lq_lightning.kernels.message import round_up
from lq_lightning.kernels.message.matrix import check_matrix, parse_matrix_format
from lq_lightning.kernels.message.operators import Launched, cached_operator
from lq_lightning.kernels.norm.op import check_kind, check_parameter, check_rstd
from lq_lightning.kernels.norm.reference import factor_of

# Of a matrix on a GPU, so that offsets in a tile fit 32 bits, and tiles the grid.
_MAX_SIDE = 1 << 22


def check_sides(rows: int, row_length: int) -> None:
    """Raise ``NotImplementedError`` for a matrix that the kernels cannot address."""
    if rows > _MAX_SIDE or row_length > _MAX_SIDE:
        raise NotImplementedError(
            f"a matrix of {rows} rows, {row_length} values apart, is too large for the kernels of "
            f"FP8 operands; both must be at most {_MAX_SIDE}. Pass it in parts."
        )


def check_cast(x: Tensor) -> None:
    """Raise unless ``x`` can be cast: ``ValueError``, or as ``check_sides``."""
    check_values("x", x)
    if x.is_cuda:
        check_sides(x.shape[0], max(x.shape[1], x.stride(0) if x.shape[0] > 1 else 0))


def check_number(name: str, number: Tensor) -> None:
    """Raise ``ValueError`` unless ``number`` is fp32 of one element."""
    if number.dtype != torch.float32 or number.numel() != 1:
        raise ValueError(
            f"{name} is {number.dtype} {tuple(number.shape)}; it must be float32 of one element, "
            "as float8_quantize returns it."
        )


def _empty_transposed(message: Tensor, rows: int, numel: int) -> Tensor:
    check_sides(rows, numel)
    return message.new_empty(numel, round_up(rows, cpu.ROW_MULTIPLE), dtype=cpu.E4M3)


def _fake_float8_cast(
    x: Tensor, amax: Tensor, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor]:
    R, N = x.shape
    q_shape = (R, round_up(N, cpu.ROW_MULTIPLE)) if rows else (0, 0)
    q_t_shape = (N, round_up(R, cpu.ROW_MULTIPLE)) if columns else (0, 0)
    q, q_t = (x.new_empty(shape, dtype=cpu.E4M3) for shape in (q_shape, q_t_shape))
    return q, q_t, x.new_empty(1, dtype=torch.float32)


@cached_operator(
    "float8_cast(Tensor x, Tensor amax, bool rows, bool columns)"
    " -> (Tensor q, Tensor q_t, Tensor scale)",
    _fake_float8_cast,
)
def float8_cast(
    x: Tensor, amax: Tensor, rows: bool, columns: bool
) -> tuple[Tensor, ...] | Launched:
    """Cast a matrix to E4M3 with one scale, reading it once.

    The scale is ``amax / 448``, at least ``2**-96``. If ``amax`` is infinite or NaN, so is the
    scale, and every product with it is NaN.

    Args:
        x: ``[R, N]`` fp32, bf16 or fp16, last dimension contiguous.
        amax: fp32 ``[1]``, the largest magnitude of ``x``. Values beyond it are clipped to it.
        rows: whether to return ``q``.
        columns: whether to return ``q_t``.

    Returns:
        ``q`` ``[R, round16(N)]``; ``q_t`` ``[N, round16(R)]``, transposed; both contiguous, and
        ``[0, 0]`` where not asked for; fp32 ``[1]``, the factor of decoding.
    """
    check_cast(x)
    check_number("amax", amax)
    q, q_t, scale = _fake_float8_cast(x, amax, rows, columns)
    if x.is_cuda:
        from lq_lightning.kernels.float8.triton_kernels import launch_cast

        return Launched((q, q_t, scale), launch_cast(x, amax, q, q_t, scale))
    scale = cpu.scale_of(amax.view(1))
    if rows or columns:
        cast = cpu.cast(x, scale)
        q = cpu.padded_rows(cast) if rows else q
        q_t = cpu.transposed(cast) if columns else q_t
    return q, q_t, scale


def _fake_float8_quantize(
    x: Tensor, rows: bool, columns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    amax = x.new_empty(1, dtype=torch.float32)
    return *_fake_float8_cast(x, amax, rows, columns), amax


@cached_operator(
    "float8_quantize(Tensor x, bool rows, bool columns)"
    " -> (Tensor q, Tensor q_t, Tensor scale, Tensor amax)",
    _fake_float8_quantize,
)
def float8_quantize(x: Tensor, rows: bool, columns: bool) -> tuple[Tensor, ...] | Launched:
    """Find the largest magnitude of a matrix and cast it as ``float8_cast`` does.

    Returns its results, and fp32 ``[1]``, the largest magnitude: NaN if a value is, 0 without
    values.
    """
    check_cast(x)
    if not x.is_cuda:
        amax = cpu.amax(x)
        return *float8_cast(x, amax, rows, columns), amax
    from lq_lightning.kernels.float8.triton_kernels import launch_quantize

    results = _fake_float8_quantize(x, rows, columns)
    results[3].zero_()
    return Launched(results, launch_quantize(x, *results), zeroed=3)


@cached_operator(
    "dequantize_float8(Tensor message, SymInt rows, int numel, str format, Tensor scale) -> Tensor",
    lambda message, rows, numel, format, scale: _empty_transposed(message, rows, numel),
)
def dequantize_float8(
    message: Tensor, rows: int, numel: int, format: str, scale: Tensor
) -> Tensor | Launched:
    """Decode a ``[rows, numel]`` matrix to transposed E4M3."""
    fmt = parse_matrix_format(format)
    check_matrix("message", message, rows, numel, fmt)
    check_number("scale", scale)
    if not message.is_cuda:
        values = cpu.decode(message, rows, numel, fmt, scale.reciprocal())
        return cpu.transposed(cpu.round_to_float8(values))
    from lq_lightning.kernels.float8.triton_kernels import launch_rebuild

    out, nothing = _empty_transposed(message, rows, numel), (None,) * 4
    launch = launch_rebuild(message, *nothing, scale, out, rows=rows, fmt=fmt)
    return Launched((out,), lambda message, *rest: launch(message, *nothing, *rest))


@cached_operator(
    "norm_dequantize_float8(Tensor message, Tensor rstd, Tensor? weight, Tensor? bias, int numel,"
    " str kind, str format, Tensor scale) -> Tensor",
    lambda message, rstd, weight, bias, numel, *rest: _empty_transposed(
        message, rstd.shape[0], numel
    ),
)
def norm_dequantize_float8(
    message: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    numel: int,
    kind: str,
    format: str,
    scale: Tensor,
) -> Tensor | Launched:
    """Rebuild the output of a norm from its encoded input, as transposed E4M3.

    Arguments are those of ``norm_dequantize``. In fp32 up to E4M3: the kind "rms_cast" is rebuilt
    as "rms". Weight and bias are multiplied by the inverse scale before they are applied.
    """
    fmt = parse_matrix_format(format)
    rows = rstd.shape[0]
    check_kind(kind, bias)
    check_rstd(rstd, rows)
    check_matrix("message", message, rows, numel, fmt)
    check_parameter("weight", weight, numel)
    check_parameter("bias", bias, numel)
    check_number("scale", scale)
    if not message.is_cuda:
        inverse = scale.reciprocal()
        values = cpu.decode(message, rows, numel, fmt) * rstd
        values = values * (inverse if weight is None else factor_of(weight, kind) * inverse)
        if bias is not None:
            values = values + bias.float() * inverse
        return cpu.transposed(cpu.round_to_float8(values))
    from lq_lightning.kernels.float8.triton_kernels import launch_rebuild

    out = _empty_transposed(message, rows, numel)
    tensors = (message, None, rstd, weight, bias, scale, out)
    launch = launch_rebuild(*tensors, rows=rows, fmt=fmt, norm=kind)
    return Launched((out,), lambda message, *rest: launch(message, None, *rest))


@cached_operator(
    "activation_dequantize_float8(Tensor message, Tensor up_message, SymInt rows, int numel,"
    " str activation, str format, Tensor scale) -> Tensor",
    lambda message, up_message, rows, numel, *rest: _empty_transposed(message, rows, numel),
)
def activation_dequantize_float8(
    message: Tensor,
    up_message: Tensor,
    rows: int,
    numel: int,
    activation: str,
    format: str,
    scale: Tensor,
) -> Tensor | Launched:
    """Apply an activation function to decoded inputs, in fp32, to transposed E4M3.

    Arguments are those of ``activation_dequantize``.
    """
    fmt = parse_matrix_format(format)
    check_activation(activation)
    check_messages(message, up_message, rows, numel, fmt)
    check_number("scale", scale)
    up = gated(up_message)
    if not message.is_cuda:
        inverse = scale.reciprocal()
        y = value_and_derivative(cpu.decode(message, rows, numel, fmt), activation)[0]
        y = y * (inverse if up is None else cpu.decode(up, rows, numel, fmt, inverse))
        return cpu.transposed(cpu.round_to_float8(y))
    from lq_lightning.kernels.float8.triton_kernels import launch_rebuild

    out, nothing = _empty_transposed(message, rows, numel), (None,) * 3
    tensors = (message, up, *nothing, scale, out)
    launch = launch_rebuild(*tensors, rows=rows, fmt=fmt, activation=activation)
    return Launched((out,), lambda message, up, *rest: launch(message, up, *nothing, *rest))
