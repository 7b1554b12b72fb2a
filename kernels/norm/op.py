"""The operators ``lq_lightning::norm_quantize``, ``norm_dequantize`` and ``norm_backward``.

Kinds of norm, with ``x_hat = centred * rstd``, where ``centred`` is ``x``, or ``x - mean`` for
"layer", and ``rstd`` the reciprocal root of the mean of its squares:

* "layer": ``x_hat * weight + bias``;
* "rms": ``x_hat * weight``, all in fp32, as ``torch.nn.RMSNorm``;
* "rms_cast": the same with ``x_hat`` rounded to the dtype of ``x`` before the weight, as the Llama
  of Hugging Face;
* "rms_offset": ``x_hat * (1 + weight)``, all in fp32, as Gemma.

What is encoded is ``centred``, computed in fp32. A mean that only "layer" removes would otherwise
widen the groups of a symmetric code, and be one huge value per block of a Hadamard transform.

Shape legend: T tokens, N features, R encoded rows of the message (``message/matrix.py``). ``x`` and
``dy`` are ``[T, N]`` fp32, bf16 or fp16, last dimension contiguous; ``weight`` and ``bias`` ``[N]``
or None (no bias but for "layer"); ``rstd`` fp32 ``[T, 1]``, of the exact ``x``; ``message``
``[R, nbytes]`` uint8 of a ``format`` of ``matrix.parse_matrix_format``. All else raises
``ValueError``; ``NotImplementedError``: one scale per row, or rows too long for the GPU kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lq_lightning.kernels.message.matrix import (
    check_matrix,
    decode_matrix,
    empty_message,
    encode_matrix,
    parse_matrix_format,
)
from lq_lightning.kernels.message.operators import Launched, cached_operator, check_rows

from . import reference as cpu

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_kind(kind: str, bias: Tensor | None = None) -> None:
    """Raise ``ValueError`` unless ``kind`` is one of ``reference.KINDS`` and has a given bias."""
    if kind not in cpu.KINDS:
        raise ValueError(f"kind={kind!r} is not a kind of norm; choose one of {cpu.KINDS}")
    if bias is not None and kind != "layer":
        raise ValueError(f"kind={kind!r} has no bias; pass bias=None")


def _check_matrix_of_floats(name: str, x: Tensor) -> None:
    if x.dim() != 2 or x.dtype not in _FLOATS or x.shape[1] == 0:
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)}; expected fp32, bf16 or fp16 [T, N] with N > 0. "
            f"Pass {name}.flatten(0, -2)."
        )
    check_rows(name, x)


def check_parameter(name: str, parameter: Tensor | None, numel: int) -> None:
    """Raise ``ValueError`` unless ``parameter`` is None or has one value per column."""
    if parameter is None:
        return
    if parameter.dtype not in _FLOATS or tuple(parameter.shape) != (numel,):
        raise ValueError(
            f"{name} is {parameter.dtype} {tuple(parameter.shape)}; expected fp32, bf16 or fp16 "
            f"({numel},), the columns of the input"
        )
    check_rows(name, parameter)


def check_rstd(rstd: Tensor, rows: int) -> None:
    """Raise ``ValueError`` unless ``rstd`` has one fp32 value for each of ``rows`` rows."""
    if rstd.dtype != torch.float32 or tuple(rstd.shape) != (rows, 1) or not rstd.is_contiguous():
        raise ValueError(
            f"rstd is {rstd.dtype} {tuple(rstd.shape)} with strides {rstd.stride()}; expected "
            f"contiguous torch.float32 {(rows, 1)}, as norm_quantize returned it"
        )


def _fake_norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    format: str,
    dtype: torch.dtype,
    amax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, numel = x.shape
    return (
        x.new_empty(rows, numel, dtype=dtype),
        x.new_empty(rows, 1, dtype=torch.float32),
        empty_message(parse_matrix_format(format), rows, numel, x.device),
        x.new_empty(int(amax), dtype=torch.float32),
    )


@cached_operator(
    "norm_quantize(Tensor x, Tensor? weight, Tensor? bias, float eps, str kind, str format,"
    " ScalarType dtype, bool amax) -> (Tensor y, Tensor rstd, Tensor message, Tensor amax_y)",
    _fake_norm_quantize,
)
def norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    format: str,
    dtype: torch.dtype,
    amax: bool,
) -> tuple[Tensor, ...] | Launched:
    """Normalise rows and encode their input, for "layer" without its mean, reading it once.

    On a GPU, ``y`` is within one ulp of a CPU's for a dtype of 16 bits, and of a few for fp32: the
    order of the sums over a row differs. The message has the same bits, for "layer" where both find
    the same means. ``dtype`` is that of ``y``.

    Returns:
        ``y``; ``rstd``; the message of ``centred``; fp32 ``[1]``, the largest magnitude of ``y`` as
        it was rounded (NaN if it has one), or ``[0]``.
    """
    fmt = parse_matrix_format(format)
    check_kind(kind, bias)
    _check_matrix_of_floats("x", x)
    check_parameter("weight", weight, x.shape[1])
    check_parameter("bias", bias, x.shape[1])
    if not x.is_cuda:
        centred = cpu.centre(x, kind)
        rstd = cpu.reciprocal_deviation(centred, eps)
        y = cpu.normalize(centred, rstd, weight, bias, kind, x.dtype).to(dtype)
        largest = torch.zeros(int(amax), dtype=torch.float32)
        if amax and y.numel():
            largest = y.abs().amax().to(torch.float32).view(1)
        return y, rstd, encode_matrix(centred, fmt), largest
    from .triton_kernels import launch_norm_quantize

    made = _fake_norm_quantize(x, weight, bias, eps, kind, format, dtype, amax)
    made[3].zero_()
    launch = launch_norm_quantize((x, weight, bias, *made), eps, kind, fmt)
    return Launched(made, launch, zeroed=3 if amax else None)


@cached_operator(
    "norm_dequantize(Tensor message, Tensor rstd, Tensor? weight, Tensor? bias, int numel,"
    " str kind, str format, ScalarType dtype, ScalarType x_dtype) -> Tensor",
    lambda message, rstd, weight, bias, numel, kind, format, dtype, x_dtype: rstd.new_empty(
        rstd.shape[0], numel, dtype=dtype
    ),
)
def norm_dequantize(
    message: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    numel: int,
    kind: str,
    format: str,
    dtype: torch.dtype,
    x_dtype: torch.dtype,
) -> Tensor | Launched:
    """Rebuild ``[T, N]`` outputs of ``dtype`` from a message; bits are those of the reference.

    ``x_dtype`` is what the input had; "rms_cast" rounds to it.
    """
    fmt = parse_matrix_format(format)
    check_kind(kind, bias)
    check_rstd(rstd, rstd.shape[0])
    check_matrix("message", message, rstd.shape[0], numel, fmt)
    check_parameter("weight", weight, numel)
    check_parameter("bias", bias, numel)
    if not message.is_cuda:
        centred = decode_matrix(message, rstd.shape[0], numel, fmt)
        return cpu.normalize(centred, rstd, weight, bias, kind, x_dtype).to(dtype)
    from .triton_kernels import launch_norm_dequantize

    y = rstd.new_empty(rstd.shape[0], numel, dtype=dtype)
    tensors = (message, rstd, weight, bias, y)
    return Launched((y,), launch_norm_dequantize(tensors, kind, fmt, x_dtype))


def _fake_norm_backward(
    message: Tensor,
    rstd: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    kind: str,
    format: str,
    dtype: torch.dtype,
    parameters: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    numel = dy.shape[1] if parameters else 0
    return (
        dy.new_empty(dy.shape, dtype=dtype),
        dy.new_empty(numel, dtype=torch.float32),
        dy.new_empty(numel if kind == "layer" else 0, dtype=torch.float32),
    )


@cached_operator(
    "norm_backward(Tensor message, Tensor rstd, Tensor dy, Tensor? weight, str kind, str format,"
    " ScalarType dtype, bool parameters) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _fake_norm_backward,
)
def norm_backward(
    message: Tensor,
    rstd: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    kind: str,
    format: str,
    dtype: torch.dtype,
    parameters: bool,
) -> tuple[Tensor, ...] | Launched:
    """Gradients of a norm from its encoded input, computed in fp32 and rounded once.

    Those of the parameters are sums over tokens in a fixed order: equal bits for equal inputs on
    one kind of device. The reference takes another order; both are off by the rounding of fp32.

    Returns:
        ``dx`` ``[T, N]`` of ``dtype``; ``dweight`` fp32 ``[N]``, or ``[0]`` without ``parameters``;
        ``dbias`` fp32 ``[N]``, or ``[0]`` without ``parameters`` and for RMS kinds.
    """
    fmt = parse_matrix_format(format)
    check_kind(kind)
    _check_matrix_of_floats("dy", dy)
    rows, numel = dy.shape
    check_rstd(rstd, rows)
    check_matrix("message", message, rows, numel, fmt)
    check_parameter("weight", weight, numel)
    if not dy.is_cuda:
        x_hat = decode_matrix(message, rows, numel, fmt) * rstd
        wide = dy.to(torch.float32)
        gradient = wide if weight is None else wide * cpu.factor_of(weight, kind)
        along = (gradient * x_hat).sum(-1, keepdim=True) / numel
        dx = gradient - x_hat * along
        if kind == "layer":
            dx = dx - gradient.sum(-1, keepdim=True) / numel
        dweight = (wide * x_hat).sum(0) if parameters else wide.new_empty(0)
        dbias = wide.sum(0) if parameters and kind == "layer" else wide.new_empty(0)
        return (dx * rstd).to(dtype), dweight, dbias
    from .triton_kernels import launch_norm_backward

    made = _fake_norm_backward(message, rstd, dy, weight, kind, format, dtype, parameters)
    return Launched(made, launch_norm_backward((message, rstd, dy, weight, *made), kind, fmt))
