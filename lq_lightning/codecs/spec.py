"""Codecs: their specification, and encoding and decoding of rows on CPU and CUDA.

A message is one encoded row: ``[codes | scales | minima if asymmetric]``, each section padded to
16 bytes. Rows are independent of each other, so a matrix of rows can be cut and sent anywhere.
The spec does not travel with the bytes. CPU and CUDA produce the same bits. Short rows that travel
together waste less space when they are encoded as one; see ``flatten_rows``.

If anything in a group is not finite, the whole group decodes to NaN. Finite values never do, except
where sums of a transform overflow; see ``hadamard_size`` of ``CodecSpec``. Groups within 2% of the
largest value of fp32, beyond 65504 with scales of half precision, or asymmetric and as wide as fp32
decode to values that are too small by a factor.

Rows may have any stride, or two: wherever ``[R, N]`` is said, ``[P, Q, N]`` are R = P * Q rows in
that order, and one call covers both dimensions, whatever lies between.

Shape legend: K messages to sum, R rows, N values, B = ``spec.nbytes(N)`` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from lq_lightning.foundation.checks import check_choice
from lq_lightning.kernels.message import (
    CODES,
    MessageFormat,
    accumulate_,
    dequantize,
    dequantize_out,
    quantize,
    quantize_out,
    relaunch_accumulate,
    relaunch_dequantize,
    relaunch_quantize,
    relaunch_requantize,
    requantize,
    requantize_out,
)
from lq_lightning.kernels.message.operators import check_float, check_rows

# Entries of the table of codes, in its order; see `lq_lightning.kernels.message.format`.
Code = Literal[
    "int2",
    "int3",
    "int4",
    "int5",
    "int6",
    "int7",
    "int8",
    "nf4",
    "fp8_e4m3",
]
# Codes that options take beside integers of so many bits.
FloatingCode = Literal["nf4", "fp8_e4m3"]
Rounding = Literal["nearest", "stochastic"]
ScaleDtype = Literal["float32", "bfloat16", "float16"]

GROUP_SIZES: tuple[int | str, ...] = (*(2**k for k in range(4, 13)), "row")
HADAMARD_SIZES: tuple[int, ...] = (0, 16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecSpec:
    """How a row of values becomes bytes; both ends of an exchange need the same spec.

    Attributes:
        code: format of one value. Integer codes are scaled to the largest magnitude of a group
            (symmetric) or to its range (asymmetric); ``fp8_e4m3`` to the largest finite value;
            ``nf4``, 16 levels that follow the normal distribution (QLoRA, appendix E), to 1.
        group_size: consecutive elements that share a scale: a power of two from 16 to 4096, or
            ``"row"`` for one scale per row, which takes a second pass over the values to encode.
        symmetric: store no minimum. All but integer codes are always symmetric.
        hadamard_size: apply a Walsh-Hadamard transform to this many consecutive elements before
            quantization and undo it after, which spreads outliers; 0 for none, else 16, 32, 64 or
            128, at most ``group_size``. Its sums can overflow fp32 for values beyond
            ``3.4e38 / hadamard_size``; the group then counts as not finite.
        rounding: ``"nearest"`` (ties to even) or ``"stochastic"`` (needs a seed), which is unbiased
            up to the resolution of its noise: the expectation is off by at most ``2**(b - 17)`` of
            the distance between codes for integer codes of b bits and ``2**-8`` for FP8 E4M3, with
            a sign that depends on the value. ``nf4`` is rounded to nearest only.
        scale_dtype: storage of scales and minima. Scales are rounded up and minima down, so no
            value is clipped. With ``"float16"``, groups whose scale exceeds 65504 shrink.

    Raises:
        ValueError: a value or a combination that is not listed above.
    """

    code: Code
    group_size: int | Literal["row"]
    symmetric: bool = True
    hadamard_size: int = 0
    rounding: Rounding = "nearest"
    scale_dtype: ScaleDtype = "float32"

    def __post_init__(self) -> None:
        """Check every field and their combination."""
        check_choice("CodecSpec", "code", self.code, get_args(Code))
        check_choice("CodecSpec", "group_size", self.group_size, GROUP_SIZES)
        check_choice("CodecSpec", "hadamard_size", self.hadamard_size, HADAMARD_SIZES)
        check_choice("CodecSpec", "rounding", self.rounding, get_args(Rounding))
        check_choice("CodecSpec", "scale_dtype", self.scale_dtype, get_args(ScaleDtype))
        if not isinstance(self.symmetric, bool):
            raise ValueError(
                f"CodecSpec(symmetric={self.symmetric!r}) is not supported; allowed: True, False."
            )
        if self.group_size != "row" and self.hadamard_size > self.group_size:
            raise ValueError(
                f"CodecSpec(hadamard_size={self.hadamard_size}, group_size={self.group_size}): "
                "the transform must divide the group. Use a hadamard_size of at most group_size."
            )
        code = CODES[self.code]
        if not self.symmetric and code.kind != "integer":
            raise ValueError(
                f"CodecSpec(code={self.code!r}, symmetric=False): only integer codes can be "
                "asymmetric; the levels of others lie on both sides of zero. Use symmetric=True, "
                f"or code='int{code.bits}' with symmetric=False."
            )
        if self.rounding == "stochastic" and code.kind == "table":
            raise ValueError(
                f"CodecSpec(code={self.code!r}, rounding='stochastic') is not supported: the "
                "levels of a table are not equally spaced, and the nearest is taken. Use "
                f"rounding='nearest', or code='int{code.bits}'."
            )

    @property
    def message_format(self) -> MessageFormat:
        """The spec as the kernels take it."""
        return MessageFormat(
            code=self.code,
            group_size=0 if self.group_size == "row" else self.group_size,
            symmetric=self.symmetric,
            hadamard_size=self.hadamard_size,
            stochastic=self.rounding == "stochastic",
            scale_dtype=self.scale_dtype,
        )

    @property
    def block_multiple(self) -> int:
        """Columns at whose multiples a row may be cut into rows of the same codes and scales.

        Except for the noise of stochastic rounding, and for ``group_size="row"``, where every part
        has a scale of its own.
        """
        return self.message_format.block_multiple

    def nbytes(self, numel: int) -> int:
        """Return the bytes of an encoded row of ``numel`` values, a multiple of 16.

        Raises:
            ValueError: ``numel`` is negative.
        """
        if numel < 0:
            raise ValueError(f"numel={numel} must be at least 0. Pass the length of a row.")
        nbytes: int = self.message_format.layout(numel).nbytes
        return nbytes

    def bits_per_element(self, numel: int) -> float:
        """Return the bits per value of a row of ``numel`` values, scales included.

        Raises:
            ValueError: ``numel`` is not positive.
        """
        if numel < 1:
            raise ValueError(f"numel={numel} must be at least 1. Pass the length of a row.")
        return 8 * self.nbytes(numel) / numel


def named_codec(code: str, group_size: int, **options: Any) -> CodecSpec:
    """Return the codec of a code that options name, with bf16 scales.

    Args:
        code: as for ``CodecSpec``.
        group_size: as for ``CodecSpec``.
        options: other fields of ``CodecSpec``.

    Raises:
        ValueError: as ``CodecSpec``.
    """
    fields: dict[str, Any] = {"scale_dtype": "bfloat16", **options}
    return CodecSpec(code=cast(Code, code), group_size=group_size, **fields)


@lru_cache(maxsize=1024)
def _cached_format_text(spec: CodecSpec) -> str:
    return str(spec.message_format)


def _format_text(spec: CodecSpec) -> str:
    """Return the format as operators take it."""
    # Traces cannot look into the cache, which saves a tenth of the host time of a call.
    if torch.compiler.is_compiling():
        return str(spec.message_format)
    return _cached_format_text(spec)


def _may_relaunch(tensor: Tensor) -> bool:
    """Whether a cached launch may replace the checks and the dispatcher.

    They take most of the host time of a call. Traces and subclasses have to see the operator.
    """
    return type(tensor) is Tensor and tensor.is_cuda and not torch.compiler.is_compiling()


def _check_shape(name: str, value: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; expected {shape}.")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}; expected {device}, where the input is.")


def _check_messages(name: str, buf: Tensor, dims: int, nested: bool = False) -> None:
    if buf.dtype != torch.uint8 or buf.dim() not in (dims, dims + nested):
        expected = "[R, B]" if dims == 2 else "[K, R, B]"
        raise ValueError(
            f"{name} is {buf.dtype} with {buf.dim()} dimensions; expected uint8 {expected} as "
            "returned by encode."
        )
    if dims == 3 and buf.shape[0] == 0:
        raise ValueError(f"{name} has no messages to sum; the first dimension must be at least 1.")


def _rows_kept(rows: int, skip: int | None, out: Tensor | None) -> int:
    """Number of rows without ``skip``, which needs ``out``."""
    if skip is None:
        return rows
    if out is None or not 0 <= skip < rows:
        raise ValueError(f"skip={skip} needs `out`, and is one of the {rows} rows, from 0 on.")
    return rows - 1


def _seed_value(spec: CodecSpec, seed: int | None) -> int:
    if spec.rounding == "nearest":
        return 0
    if seed is None:
        raise ValueError(
            "seed=None with rounding='stochastic'; pass an integer, e.g. "
            "derive_seed(base, step, rank, unit)."
        )
    # Two's complement, since operators take signed 64-bit integers.
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def flatten_rows(spec: CodecSpec, x_RN: Tensor) -> Tensor:
    """View rows as one, to be encoded and decoded as one message, without padding between rows.

    With a hidden size of 1600, asymmetric INT4 codes with groups of 64 and bf16 minima take 4.64
    bits per value in messages of their own, 4.50 in one. No group crosses rows, so codes and scales
    are the same, except for the noise of stochastic rounding, which depends on the position. With
    ``group_size="row"`` all rows share one scale.

    Args:
        spec: the codec.
        x_RN: ``[R, N]`` contiguous; N a multiple of the group size, and of the transform.

    Returns:
        ``[1, R * N]``, a view: pass it to ``encode``, and as ``out`` of ``decode``.

    Raises:
        ValueError: another shape or stride, or a group that would cross rows.
    """
    if x_RN.dim() != 2 or not x_RN.is_contiguous():
        raise ValueError(
            f"x_RN has shape {tuple(x_RN.shape)} and stride {x_RN.stride()}; expected [R, N], "
            "contiguous. Pass x.contiguous(), or encode the rows as they are."
        )
    multiple = max(1, spec.hadamard_size if spec.group_size == "row" else spec.group_size)
    if x_RN.shape[1] % multiple:
        raise ValueError(
            f"x_RN has rows of {x_RN.shape[1]} values, not a multiple of {multiple}, so groups "
            "would cross rows. Choose a group_size and a hadamard_size that divide the rows, or "
            "encode the rows as they are."
        )
    return x_RN.view(1, -1)


def encode(
    spec: CodecSpec,
    x_RN: Tensor,
    *,
    seed: int | None = None,
    reference: Tensor | None = None,
    out: Tensor | None = None,
    skip: int | None = None,
) -> Tensor:
    """Encode rows into self-contained byte messages.

    Args:
        spec: the codec.
        x_RN: ``[R, N]`` fp32, bf16 or fp16, any row stride, last dimension contiguous. With ``out``
            it may be ``[P, Q, N]``.
        seed: needed for stochastic rounding, ignored otherwise. The same seed rounds every row
            and column differently; use a new one for every exchange.
        reference: ``[R, N]``; encodes ``x_RN - reference``, taken in fp32.
        out: ``[R, B]`` uint8, or ``[P, Q, B]``, to write to; rows must start at multiples of 16
            bytes.
        skip: a row of ``x_RN``, then ``[R + 1, N]``, to leave out; only with ``out``, and without
            ``reference``.

    Returns:
        ``[R, B]`` uint8: ``out``, or a new tensor. The same bits on CPU and CUDA, from values and
        seed alone.

    Raises:
        ValueError: a shape, dtype, device, stride or alignment other than above, or no seed.

    Error: per element at most half a scale for nearest rounding to integers without transform, one
    scale for stochastic rounding; with transform, the same in the transformed domain.
    """
    value, fmt = _seed_value(spec, seed), _format_text(spec)
    if (
        out is not None
        and _may_relaunch(x_RN)
        and relaunch_quantize(x_RN, reference, fmt, value, out, skip)
    ):
        return out
    check_float("x_RN", x_RN.dtype)
    nested = x_RN.dim() == 3 and out is not None and skip is None
    if x_RN.dim() != 2 and not nested:
        raise ValueError(
            f"x_RN has {x_RN.dim()} dimensions; expected 2, or 3 with `out` and without `skip`. "
            "Use x.view(1, -1)."
        )
    rows = _rows_kept(x_RN.shape[0], skip, out)
    if reference is not None:
        check_float("reference", reference.dtype)
        _check_shape("reference", reference, tuple(x_RN.shape), x_RN.device)
        if skip is not None:
            raise ValueError(f"skip={skip} has no effect on `reference`; leave one of them out.")
        reference = reference.detach()
    if out is None:
        encoded: Tensor = quantize(x_RN.detach(), reference, fmt, value)
        return encoded
    _check_messages("out", out, 2, nested=nested)
    shape = (rows, *x_RN.shape[1:-1], spec.nbytes(x_RN.shape[-1]))
    _check_shape("out", out, shape, x_RN.device)
    quantize_out(x_RN.detach(), reference, fmt, value, out, skip)
    return out


def _decode(
    spec: CodecSpec,
    buf: Tensor,
    dims: int,
    numel: int,
    scale: float,
    out: Tensor | None,
    add: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Decode ``[R, B]`` or, with 3 ``dims``, sum ``[K, R, B]``."""
    fmt = _format_text(spec)
    buf_KRB = buf.unsqueeze(0) if dims == 2 else buf
    if (
        out is not None
        and _may_relaunch(out)
        and relaunch_dequantize(buf_KRB, numel, fmt, scale, add, out)
    ):
        return out
    name = "buf_RB" if dims == 2 else "buf_KRB"
    _check_messages(name, buf, dims, nested=dims == 2 and out is not None)
    if out is None:
        if add:
            raise ValueError("add=True needs out=: the tensor that the values are added to.")
        check_float("dtype", dtype)
        decoded: Tensor = dequantize(buf_KRB, numel, fmt, scale, dtype)
        return decoded
    check_float("out", out.dtype)
    _check_shape("out", out, (*buf_KRB.shape[1:-1], numel), buf_KRB.device)
    dequantize_out(buf_KRB, numel, fmt, scale, add, out.detach())
    return out


def decode(
    spec: CodecSpec,
    buf_RB: Tensor,
    numel: int,
    *,
    scale: float = 1.0,
    out: Tensor | None = None,
    add: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Decode rows.

    Args:
        spec: the codec that encoded them.
        buf_RB: ``[R, B]`` uint8, any row stride that is a multiple of 16 bytes. With ``out`` it may
            be ``[P, Q, B]``.
        numel: N, the values in a row.
        scale: factor of the values, e.g. -1 with ``add`` to subtract them.
        out: ``[R, N]``, or ``[P, Q, N]``, to write to, any row stride.
        add: add to ``out``: in fp32, then rounded once to the dtype of ``out``.
        dtype: dtype of a new result, when ``out`` is not given.

    Returns:
        ``[R, N]``: ``out``, or a new tensor.

    Raises:
        ValueError: a shape, dtype, device, stride or alignment other than above.
    """
    return _decode(spec, buf_RB, 2, numel, scale, out, add, dtype)


def decode_reduce(
    spec: CodecSpec,
    buf_KRB: Tensor,
    numel: int,
    *,
    scale: float = 1.0,
    out: Tensor | None = None,
    add: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Decode K messages per row and sum them: fp32, in index order, then one inverse transform.

    ``buf_KRB`` is ``[K, R, B]`` uint8, with strides that are multiples of 16 bytes; ``scale`` is
    the factor of the sum, e.g. 1/K for a mean. Everything else is as for ``decode``.
    """
    return _decode(spec, buf_KRB, 3, numel, scale, out, add, dtype)


def decode_reduce_encode(
    spec_in: CodecSpec,
    buf_KRB: Tensor,
    numel: int,
    spec_out: CodecSpec,
    *,
    seed: int | None = None,
    out: Tensor | None = None,
    skip: int | None = None,
) -> Tensor:
    """Decode K messages per row, sum them as ``decode_reduce`` does, and encode the sum.

    With equal ``hadamard_size`` in both specs the sum never leaves the transformed domain: there is
    no inverse and no forward transform.

    Args:
        spec_in: the codec of the messages.
        buf_KRB: ``[K, R, B]`` uint8, strides multiples of 16 bytes.
        numel: N, the values in a row.
        spec_out: the codec of the result.
        seed: needed when ``spec_out`` rounds stochastically.
        out: ``[R, spec_out.nbytes(N)]`` uint8 to write to.
        skip: a row of ``buf_KRB``, then ``[K, R + 1, B]``, to leave out; only with ``out``.

    Returns:
        ``[R, spec_out.nbytes(N)]`` uint8: ``out``, or a new tensor.

    Raises:
        ValueError: a shape, dtype, device, stride or alignment other than above, or no seed.
    """
    value = _seed_value(spec_out, seed)
    source, target = _format_text(spec_in), _format_text(spec_out)
    if (
        out is not None
        and _may_relaunch(buf_KRB)
        and relaunch_requantize(buf_KRB, numel, source, target, value, out, skip)
    ):
        return out
    _check_messages("buf_KRB", buf_KRB, 3)
    rows = _rows_kept(buf_KRB.shape[1], skip, out)
    if out is None:
        encoded: Tensor = requantize(buf_KRB, numel, source, target, value)
        return encoded
    _check_messages("out", out, 2)
    _check_shape("out", out, (rows, spec_out.nbytes(numel)), buf_KRB.device)
    requantize_out(buf_KRB, numel, source, target, value, out, skip)
    return out


def accumulate(spec: CodecSpec, buf_RB: Tensor, x_RN: Tensor, *, seed: int | None = None) -> Tensor:
    """Add values to encoded rows in place: decode, add and encode in one pass.

    Both are added in fp32. With a transform the sum stays in the transformed domain.

    Args:
        spec: the codec of the rows.
        buf_RB: ``[R, B]`` uint8, as for ``decode``; overwritten.
        x_RN: ``[R, N]`` fp32, bf16 or fp16, any row stride, last dimension contiguous.
        seed: needed for stochastic rounding; a new one for every call.

    Returns:
        ``buf_RB``.

    Raises:
        ValueError: as ``encode``.
    """
    value, fmt = _seed_value(spec, seed), _format_text(spec)
    if (
        _may_relaunch(buf_RB)
        and _may_relaunch(x_RN)
        and relaunch_accumulate(buf_RB, x_RN, fmt, value)
    ):
        return buf_RB
    check_float("x_RN", x_RN.dtype)
    if x_RN.dim() != 2:
        raise ValueError(f"x_RN has {x_RN.dim()} dimensions; expected 2. Use x.view(1, -1).")
    check_rows("x_RN", x_RN)
    numel = x_RN.shape[1]
    _check_messages("buf_RB", buf_RB, 2)
    _check_shape("buf_RB", buf_RB, (x_RN.shape[0], spec.nbytes(numel)), x_RN.device)
    if spec.group_size == "row":  # the new scale is known after all of the row was added
        total = x_RN.detach().to(torch.float32, copy=True)
        decode(spec, buf_RB, numel, out=total, add=True)
        return encode(spec, total, seed=seed, out=buf_RB)
    accumulate_(buf_RB, x_RN.detach(), fmt, value)
    return buf_RB


_MASK_64 = (1 << 64) - 1


def _mix(value: int) -> int:
    """Mix 64 bits (the output function of SplitMix64; Steele, Lea and Flood, OOPSLA 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK_64
    return value ^ (value >> 31)


def derive_seed(*parts: int) -> int:
    """Mix integers into one seed.

    Args:
        *parts: any integers, e.g. base seed, step, rank, index of the unit. Order matters, and so
            does their number.

    Returns:
        A seed in ``[0, 2**63)``; equal parts give equal seeds on every machine.
    """
    if not parts:
        return 0
    return _absorb(_absorb_all(len(parts), parts[:-1]), parts[-1]) >> 1


@lru_cache(maxsize=256)
def _absorb_all(state: int, parts: tuple[int, ...]) -> int:
    """Absorb what many seeds in a row have in common."""
    for part in parts:
        state = _absorb(state, part)
    return state


def _absorb(state: int, part: int) -> int:
    remaining = part
    while True:
        state = _mix((state + 0x9E3779B97F4A7C15 & _MASK_64) ^ (remaining & _MASK_64))
        remaining >>= 64
        if remaining in (0, -1):
            break
    return _mix(state ^ 0xD1B54A32D192ED03) if part < 0 else state
