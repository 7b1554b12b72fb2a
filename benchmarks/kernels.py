"""Speed of the kernels against a device-to-device copy of the same run.

First every operator is compared with its CPU reference on random data: bytes and rounded values bit
by bit, sums and 16-bit results within their rounding. If one differs, no speed is printed and the
exit code is 1. Then each is timed: the median over replays of a CUDA graph whose calls rotate
through more buffers than the L2 cache holds. GB/s counts each byte read once and written once.
Short kernels cannot reach the copy of 2 GiB, so ``of an equal copy`` compares with ``torch.neg``
that reads and writes as many bytes, timed likewise.

    python benchmarks/kernels.py --out outputs/kernels.json
    python benchmarks/kernels.py --only "norm backward" --shapes 8192x4096

To add operators, write a function that returns cases and name it in ``FAMILIES``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
from common import (
    argument_parser,
    copy_bandwidth,
    needs_gpu,
    table,
    time_cuda_calls,
    write_report,
)
from torch import Tensor

from lq_lightning.codecs import (
    CodecSpec,
    accumulate,
    decode,
    decode_reduce,
    decode_reduce_encode,
    encode,
)
from lq_lightning.data_parallel import WeightQuantization
from lq_lightning.data_parallel.gradient_buffer import INT8
from lq_lightning.kernels.activation import (
    activation_backward,
    activation_dequantize,
    activation_quantize,
)
from lq_lightning.kernels.float8 import (
    activation_dequantize_float8,
    dequantize_float8,
    float8_cast,
    norm_dequantize_float8,
)
from lq_lightning.kernels.mixed_width import (
    mixed_dequantize,
    mixed_quantize,
    mixed_round_trip,
    width_counts,
    width_rows,
)
from lq_lightning.kernels.norm import norm_backward, norm_dequantize, norm_quantize
from lq_lightning.kernels.tah import tah_dequantize, tah_quantize

DEVICE = "cuda"
WORKING_SET_NBYTES = 1 << 29
SIZES_MB = (1, 16, 64, 256, 1024, 2048)  # of the float tensor of a codec's operator
BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-5

Buffers = dict[str, Tensor]
Shape = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """One operator and variant.

    Attributes:
        name: Shown in the table.
        buffers: Makes the tensors of a call for ``(rows, columns)`` on the GPU. All but ``out`` are
            read. A tensor on "meta" only has a shape.
        run: Calls the operator on such buffers, on any device; returns its results.
        tolerance: Largest error of fp32 sums, in units in the last place of a row's largest
            magnitude; 16-bit results may be off by one. None: bit for bit.
        compared: Whether the GPU has to agree with the CPU.
        codes: Largest distance of FP8 results, in codes.
        itemsize: Bytes per element of the float tensor.
        shapes: Rows and columns to time.
        checked: Rows and columns to compare with the reference.
        reads_twice: Whether ``x`` is read for a scale of the whole row, then for the codes.
        adds: Whether ``out`` is read, too.
    """

    name: str
    buffers: Callable[[int, int], Buffers]
    run: Callable[[Buffers], tuple[Tensor, ...]]
    tolerance: float | None = 16.0
    compared: bool = True
    codes: int = 0
    itemsize: int = 2
    shapes: tuple[Shape, ...] = ((8192, 4096), (32768, 4096))
    checked: Shape = (3001, 1024)
    reads_twice: bool = False
    adds: bool = False


def values(rows: int, columns: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return normal values on the GPU."""
    return torch.randn(rows, columns, dtype=dtype, device=DEVICE)


# --- codecs ---------------------------------------------------------------------------------------

SEED = 1234


def codec(code: str, hadamard: int = 0, group: int | str = 128, **options: Any) -> CodecSpec:
    """Return a codec by the fields that differ here."""
    return CodecSpec(code=code, group_size=group, hadamard_size=hadamard, **options)  # type: ignore[arg-type]


GRADIENT_8, GRADIENT_4, PLAIN_8 = codec("int8", 32), codec("int4", 32), codec("int8")
NF4 = codec("nf4")
WEIGHTS = {"int4/2048": codec("int4", group=2048), "nf4/128": WeightQuantization().codec()}
# Timed at one size, by the name in the table.
OTHERS = {
    **{f"int{bits}": codec(f"int{bits}") for bits in (2, 3, 5, 6, 7)},
    **{code: codec(code) for code in ("nf4", "fp8_e4m3")},
    "int4 asymmetric, bf16 scale": codec("int4", symmetric=False, scale_dtype="bfloat16"),
    "int8 h128, fp16 scale": codec("int8", 128, scale_dtype="float16"),
    "int8 h64": codec("int8", 64),
    "int4 group 16": codec("int4", group=16),
    **{f"int4 h32 group {n}": codec("int4", 32, n) for n in (64, 512)},
    **{f"int4 group {n}": codec("int4", group=n) for n in (32, 1024)},
    "int8 group row": codec("int8", group="row"),
    "fp8_e4m3 group row": codec("fp8_e4m3", group="row"),
}


def _messages(spec: CodecSpec, count: int, rows: int, numel: int) -> Tensor:
    messages = torch.empty(count, rows, spec.nbytes(numel), dtype=torch.uint8, device=DEVICE)
    for message in messages:
        encode(spec, values(rows, numel), seed=SEED, out=message)
    return messages


def _encoded(spec: CodecSpec, rows: int, numel: int) -> Tensor:
    return torch.empty(rows, spec.nbytes(numel), dtype=torch.uint8, device=DEVICE)


def _codec_case(
    name: str,
    dtype: torch.dtype,
    buffers: Callable[[int, int], Buffers],
    run: Callable[[Buffers], Tensor],
    once: bool,
    **options: bool,
) -> Case:
    """Return a case of one row of 1 MB to 2 GB, or of 256 MB only."""
    sizes = tuple((1, (mb << 20) // dtype.itemsize) for mb in ((256,) if once else SIZES_MB))
    kept = {"tolerance": None, "itemsize": dtype.itemsize, "checked": (2, 300_016)}
    return Case(name, buffers, lambda made: (run(made),), shapes=sizes, **kept, **options)  # type: ignore[arg-type]


def encode_case(
    name: str, spec: CodecSpec, dtype: torch.dtype, difference: bool = False, once: bool = False
) -> Case:
    """Quantize, optionally the difference to a second tensor."""

    def buffers(rows: int, numel: int) -> Buffers:
        made = {"x": values(rows, numel, dtype), "out": _encoded(spec, rows, numel)}
        if difference:
            made["reference"] = (made["x"] + 1e-2 * values(rows, numel)).bfloat16()
        return made

    def run(made: Buffers) -> Tensor:
        return encode(spec, made["x"], seed=SEED, reference=made.get("reference"), out=made["out"])

    by_row = spec.group_size == "row"
    return _codec_case(name, dtype, buffers, run, once, reads_twice=by_row)


def decode_case(
    name: str, spec: CodecSpec, dtype: torch.dtype, add: bool = False, once: bool = False
) -> Case:
    """Dequantize one message per row, optionally adding to the output."""

    def buffers(rows: int, numel: int) -> Buffers:
        message = _messages(spec, 1, rows, numel)[0]
        return {"message": message, "out": values(rows, numel, dtype)}

    def run(made: Buffers) -> Tensor:
        return decode(spec, made["message"], made["out"].shape[1], out=made["out"], add=add)

    return _codec_case(name, dtype, buffers, run, once, adds=add)


def reduce_case(name: str, spec: CodecSpec, count: int, once: bool = False) -> Case:
    """Dequantize and sum ``count`` messages."""

    def buffers(rows: int, numel: int) -> Buffers:
        return {"messages": _messages(spec, count, rows, numel), "out": values(rows, numel, FP32)}

    def run(made: Buffers) -> Tensor:
        out = made["out"]
        return decode_reduce(spec, made["messages"], out.shape[1], scale=1 / count, out=out)

    return _codec_case(name, FP32, buffers, run, once)


def requantize_case(
    name: str, source: CodecSpec, target: CodecSpec, count: int, once: bool = False
) -> Case:
    """Dequantize, sum and quantize again."""

    def buffers(rows: int, numel: int) -> Buffers:
        made = {"messages": _messages(source, count, rows, numel)}
        made["shape"] = torch.empty(rows, numel, device="meta")
        return made | {"out": _encoded(target, rows, numel)}

    def run(made: Buffers) -> Tensor:
        numel, out = made["shape"].shape[1], made["out"]
        return decode_reduce_encode(source, made["messages"], numel, target, seed=SEED, out=out)

    return _codec_case(name, FP32, buffers, run, once)


def codec_cases() -> list[Case]:
    """Return encoding, decoding and sums of messages."""
    h8, h4 = GRADIENT_8, GRADIENT_4
    chosen = []
    for label, spec, dtype in (
        ("int8 fp32", h8, FP32),
        ("int4 fp32", h4, FP32),
        ("int8 bf16", h8, BF16),
    ):
        chosen.append(encode_case(f"hadamard+quantize {label}", spec, dtype))
        spec = replace(spec, rounding="stochastic")
        chosen.append(encode_case(f"hadamard+quantize {label} stochastic", spec, dtype, once=True))
    chosen += [
        encode_case("quantize int8 fp32", PLAIN_8, FP32),
        encode_case("quantize int8 bf16", PLAIN_8, BF16),
        decode_case("dequantize int8 fp32", PLAIN_8, FP32),
        decode_case("dequantize+inverse int8 fp32", h8, FP32),
        decode_case("dequantize+inverse int4 bf16", h4, BF16),
        decode_case("dequantize+inverse+add int4 fp32", h4, FP32, True),
        reduce_case("dequantize+reduce 4x int4 fp32", h4, 4),
    ]
    for count in (4, 8, 32):
        name = f"dequantize+reduce+requantize {count}x int8"
        chosen.append(reduce_case(f"dequantize+reduce {count}x int8 fp32", h8, count, count == 32))
        chosen.append(requantize_case(name, h8, h4, count, once=count == 32))
    noisy, name = replace(h4, rounding="stochastic"), "dequantize+reduce+requantize 4x"
    chosen.append(requantize_case(f"{name} int8 stochastic", h8, noisy, 4, once=True))
    chosen.append(requantize_case(f"{name} nf4", NF4, NF4, 4, once=True))
    for label, spec in WEIGHTS.items():
        chosen += [
            encode_case(f"quantize {label} bf16", spec, BF16),
            encode_case(f"difference+quantize {label} bf16-bf16", spec, BF16, True),
            encode_case(f"difference+quantize {label} fp32-bf16", spec, FP32, True),
            decode_case(f"dequantize {label} bf16", spec, BF16),
            decode_case(f"dequantize+add {label} bf16", spec, BF16, True),
        ]
    for label, spec in OTHERS.items():
        chosen.append(encode_case(f"quantize {label} bf16", spec, BF16, once=True))
        chosen.append(decode_case(f"dequantize {label} bf16", spec, BF16, once=True))
    return chosen


def accumulate_cases() -> list[Case]:
    """Return 8-bit gradient sums: add a gradient, read and add to another."""

    def buffers(rows: int, numel: int) -> Buffers:
        return {"codes": _messages(INT8, 1, rows, numel)[0], "x": values(rows, numel, FP32)}

    def add(made: Buffers) -> tuple[Tensor, ...]:
        return (accumulate(INT8, made["codes"], made["x"]),)

    def read(made: Buffers) -> tuple[Tensor, ...]:
        x = made["x"]
        return (decode(INT8, made["codes"], x.shape[1], out=x, add=True),)

    shapes = tuple((1, 1 << exponent) for exponent in (20, 24, 26))
    kept: dict[str, Any] = {"tolerance": None, "itemsize": 4, "shapes": shapes}
    kept["checked"] = (1, (1 << 20) + 777)
    runs = {"accumulate": add, "accumulate, read and add": read}
    return [Case(name, buffers, run, **kept) for name, run in runs.items()]


# --- saved activations ----------------------------------------------------------------------------

# Formats of messages, by the name in the table.
FORMATS = {
    "int4": "int4/128/asymmetric/0/nearest/bfloat16",
    "int4 h128": "int4/128/asymmetric/128/nearest/bfloat16",
    "nf4": "nf4/128/symmetric/0/nearest/bfloat16",
    "int8": "int8/128/symmetric/0/nearest/bfloat16",
    "fp8_e4m3/16": "fp8_e4m3/16/symmetric/0/nearest/bfloat16",
}


def norm_case(operator: str, kind: str, label: str, amax: bool = False) -> Case:
    """Return a case of an operator (quantize, rebuild, backward) and a key of ``FORMATS``."""
    fmt = FORMATS[label]

    def buffers(rows: int, columns: int) -> Buffers:
        made = {"x": values(rows, columns), "weight": values(1, columns)[0]}
        if kind == "layer":
            made["bias"] = values(1, columns)[0]
        if operator == "quantize":
            return made
        arguments = (made.pop("x"), made["weight"], made.get("bias"), EPS, kind, fmt, BF16, False)
        _, made["rstd"], made["message"], _ = norm_quantize(*arguments)
        if operator == "backward":
            made["dy"] = values(rows, columns)
            made.pop("bias", None)
        return made

    def run(made: Buffers) -> tuple[Tensor, ...]:
        weight, bias = made["weight"], made.get("bias")
        if operator == "quantize":
            return norm_quantize(made["x"], weight, bias, EPS, kind, fmt, BF16, amax)  # type: ignore[no-any-return]
        message, rstd = made["message"], made["rstd"]
        if operator == "rebuild":
            columns = weight.numel()
            return (norm_dequantize(message, rstd, weight, bias, columns, kind, fmt, BF16, BF16),)
        return norm_backward(message, rstd, made["dy"], weight, kind, fmt, BF16, True)  # type: ignore[no-any-return]

    return Case(f"norm {operator} {kind} {label}{' amax' if amax else ''}", buffers, run)


def norm_cases() -> list[Case]:
    """Return norms forward, rebuilt and backward."""
    chosen = []
    for operator in ("quantize", "rebuild", "backward"):
        chosen += [norm_case(operator, "rms_cast", label) for label in FORMATS]
        chosen.append(norm_case(operator, "layer", "int4 h128"))
    return [*chosen, norm_case("quantize", "rms_cast", "int4 h128", amax=True)]


def activation_case(
    operator: str,
    label: str,
    activation: str = "silu",
    *,
    gated: bool = True,
    amax: bool = False,
    halves: bool = False,
) -> Case:
    """Return a case of an operator (quantize, rebuild, backward) and a key of ``FORMATS``.

    The inputs are ``halves`` of one tensor, as one projection for both makes them, or two tensors.
    """
    fmt = FORMATS[label]

    def buffers(rows: int, columns: int) -> Buffers:
        x, up = values(rows, 2 * columns).chunk(2, dim=1)
        if not halves:
            x, up = x.contiguous(), up.contiguous()
        if operator == "quantize":
            return {"x": x, "up": up} if gated else {"x": x}
        results = activation_quantize(x, up if gated else None, activation, fmt, False)
        made = {"message": results[1], "up_message": results[2]}
        return made | ({"dy": x} if operator == "backward" else {"shape": x.to("meta")})

    def run(made: Buffers) -> tuple[Tensor, ...]:
        if operator == "quantize":
            return activation_quantize(made["x"], made.get("up"), activation, fmt, amax)  # type: ignore[no-any-return]
        messages = made["message"], made["up_message"]
        if operator == "rebuild":
            return (activation_dequantize(*messages, *made["shape"].shape, activation, fmt, BF16),)
        return activation_backward(*messages, made["dy"], activation, fmt, amax)  # type: ignore[no-any-return]

    parts = [activation, operator, "" if gated else "plain", label]
    parts += ["amax" if amax else "", "halves" if halves else ""]
    # A value that is off by a unit of bf16 may be the largest.
    tolerance = 2.0**16 if amax else 16.0
    shapes = ((8192, 14336), (8192, 11008))  # of Llama-3-8B and Llama-2-7B
    return Case(" ".join(filter(None, parts)), buffers, run, tolerance, shapes=shapes)


def activation_cases() -> list[Case]:
    """Return gated and plain activation functions forward, rebuilt and backward."""
    operators = ("quantize", "rebuild", "backward")
    chosen = [activation_case(name, label) for name in operators for label in FORMATS]
    for operator in operators:
        chosen.append(activation_case(operator, "int4 h128", "gelu", gated=False))
        chosen.append(activation_case(operator, "int4", "relu2", gated=False))
    for operator in ("quantize", "backward"):
        chosen.append(activation_case(operator, "int4 h128", amax=True))
        chosen.append(activation_case(operator, "int4 h128", halves=True))
    return chosen


def cast_case(rows: bool, columns: bool) -> Case:
    """Return a case of the cast to FP8: of rows, of columns, or of both."""

    def buffers(*shape: int) -> Buffers:
        return {"x": values(*shape), "amax": torch.full((1,), 4.0, device=DEVICE)}

    def run(made: Buffers) -> tuple[Tensor, ...]:
        return float8_cast(made["x"], made["amax"], rows, columns)  # type: ignore[no-any-return]

    which = " and ".join(["rows"] * rows + ["columns"] * columns)
    shapes = ((8192, 4096), (8192, 14336))
    return Case(f"float8 cast e4m3fn {which}", buffers, run, shapes=shapes)


def rebuild_case(source: str, label: str) -> Case:
    """Return a case of a transposed FP8 operand from codes: of a norm, of SwiGLU, or as it is."""
    fmt = FORMATS[label]

    def buffers(rows: int, columns: int) -> Buffers:
        made = {"scale": torch.full((1,), 0.02, device=DEVICE)}
        if source == "swiglu":
            pair = values(rows, columns), values(rows, columns)
            _, made["message"], made["up"], _ = activation_quantize(*pair, "silu", fmt, False)
        else:
            weight = values(1, columns)[0]
            arguments = (weight, None, EPS, "rms", fmt, BF16, False)
            _, rstd, made["message"], _ = norm_quantize(values(rows, columns), *arguments)
            made |= {"rstd": rstd, "weight": weight} if source == "norm" else {}
        made["shape"] = torch.empty(rows, columns, device="meta")
        return made

    def run(made: Buffers) -> tuple[Tensor, ...]:
        (rows, columns), message, scale = made["shape"].shape, made["message"], made["scale"]
        if source == "swiglu":
            up = made["up"]
            return (activation_dequantize_float8(message, up, rows, columns, "silu", fmt, scale),)
        if source == "norm":
            norm = (made["rstd"], made["weight"], None, columns, "rms", fmt)
            return (norm_dequantize_float8(message, *norm, scale),)
        return (dequantize_float8(message, rows, columns, fmt, scale),)

    gated = source == "swiglu"
    shapes = ((8192, 14336),) if gated else ((8192, 4096), (32768, 4096))
    return Case(f"float8 rebuild {source} {label}", buffers, run, codes=int(gated), shapes=shapes)


def float8_cases() -> list[Case]:
    """Return casts and rebuilds of FP8 operands."""
    chosen = [cast_case(*asked) for asked in ((True, False), (False, True), (True, True))]
    for source in ("codes", "norm", "swiglu"):
        chosen += [rebuild_case(source, label) for label in FORMATS]
    return chosen


# --- boundaries of pipelines and split learning ---------------------------------------------------

TAH_FORMATS = {"tah": "tah/64/4/1/5/hadamard", "tah5": "tah/64/5/0/hadamard"}
WIDTHS = (1, 2, 2, 3, 4, 5, 7, 8)  # of lines in turn, 4 on average


def tah_case(label: str, dtype: torch.dtype, outliers: bool, decoding: bool) -> Case:
    """Return a case of TAH-Quant: outliers let nearly all tiles be transformed."""
    fmt = TAH_FORMATS[label]

    def buffers(rows: int, columns: int) -> Buffers:
        x = values(rows, columns, dtype)[None]
        if outliers:
            x[..., 3::64] *= 30
        return {"message": tah_quantize(x, fmt), "shape": x.to("meta")} if decoding else {"x": x}

    def run(made: Buffers) -> tuple[Tensor, ...]:
        if decoding:
            return (tah_dequantize(made["message"], *made["shape"].shape, fmt, dtype),)
        return (tah_quantize(made["x"], fmt),)

    name = f"{label} {'decode' if decoding else 'encode'} {'fp32' if dtype == FP32 else 'bf16'}"
    return Case(
        name + " outliers" * outliers,
        buffers,
        run,
        tolerance=None,
        compared=decoding or label != "tah",  # tokens of nearly equal entropy may change places
        itemsize=dtype.itemsize,
        shapes=((1024, 1600), (4096, 4096)),
        checked=(501, 1920),
    )


def mixed_case(operator: str, dtype: torch.dtype, fitted: bool) -> Case:
    """Return a case of messages whose channels have widths of their own."""

    def buffers(rows: int, columns: int) -> Buffers:
        widths = torch.tensor(WIDTHS).repeat(-(-columns // 8))[:columns]
        widths = widths[torch.randperm(columns)]
        made = {"x": values(rows, columns, dtype), "rows": width_rows(widths).to(DEVICE)}
        made["counts"] = torch.tensor(width_counts(widths))  # stays on the host
        if operator == "decode":
            made["shape"] = made["x"].to("meta")
            message = mixed_quantize(made.pop("x"), made["rows"], width_counts(widths), fitted)
            made["message"] = message
        return made

    def run(made: Buffers) -> tuple[Tensor, ...]:
        rows, counts = made["rows"], made["counts"].tolist()
        if operator == "decode":
            tokens = made["shape"].shape[0]
            return (mixed_dequantize(made["message"], rows, counts, tokens, dtype),)
        if operator == "encode":
            return (mixed_quantize(made["x"], rows, counts, fitted),)
        return (mixed_round_trip(made["x"], rows, fitted),)

    name = f"mixed {operator} {'fp32' if dtype == FP32 else 'bf16'}{' fitted' * fitted}"
    shapes = ((1024, 4096), (4096, 4096))
    kept: dict[str, Any] = {"shapes": shapes, "checked": (1501, 600), "itemsize": dtype.itemsize}
    return Case(name, buffers, run, tolerance=None, **kept)


def boundary_cases() -> list[Case]:
    """Return TAH-Quant and mixed widths, both ways."""
    yes_no = (False, True)
    chosen = [
        tah_case(label, dtype, outliers, decoding)
        for label in TAH_FORMATS
        for decoding in yes_no
        for dtype in (BF16, FP32)
        for outliers in yes_no
    ]
    for operator in ("encode", "decode", "round trip"):
        for dtype in (BF16, FP32):
            chosen += [
                mixed_case(operator, dtype, f) for f in yes_no if not (f and operator == "decode")
            ]
    return chosen


FAMILIES: list[Callable[[], list[Case]]] = [
    codec_cases,
    accumulate_cases,
    norm_cases,
    activation_cases,
    float8_cases,
    boundary_cases,
]


# --- measuring ------------------------------------------------------------------------------------


def differs(case: Case) -> str:
    """Return how the operator differs from the CPU reference; empty if it agrees."""
    made = case.buffers(*case.checked)
    copies = {name: t if t.is_meta else t.cpu() for name, t in made.items()}
    for index, (found, exact) in enumerate(zip(case.run(made), case.run(copies), strict=True)):
        actual = found.cpu()
        if exact.numel() == 0:
            continue
        if exact.dtype == torch.uint8 or case.tolerance is None:
            wrong = int((actual.view(torch.uint8) != exact.view(torch.uint8)).sum())
            if wrong:
                return f"result {index}: {wrong} of {exact.nbytes} bytes"
        elif exact.itemsize == 1:
            apart = (_ranks(actual) - _ranks(exact)).abs()
            if apart.max() > case.codes:
                return f"result {index}: {int((apart > case.codes).sum())} FP8 codes"
        else:
            wide = exact.float()
            unit = wide.abs().amax(-1, keepdim=True) * torch.finfo(exact.dtype).eps
            error = float(((actual.float() - wide).abs() / unit).max())
            if not error <= (case.tolerance if exact.dtype == FP32 else 1.0):
                return f"result {index}: {error:.1f} units in the last place of its row"
    return ""


def _ranks(codes: Tensor) -> Tensor:
    """Number FP8 codes in the order of their values."""
    code = codes.view(torch.uint8).to(torch.int16)
    return torch.where(code < 128, code, 128 - code)


def buffer_sets(nbytes: int) -> int:
    """Return how many sets of so many bytes are more than the L2 cache holds."""
    return max(1, min(64, -(-WORKING_SET_NBYTES // nbytes)))


@cache
def equal_copy(nbytes: int) -> float:
    """Return the seconds of an elementwise kernel that reads and writes so many bytes in all."""
    shape = (buffer_sets(nbytes), 2, nbytes // 8)
    calls = [lambda x=x: torch.neg(x[0], out=x[1]) for x in torch.zeros(shape, device=DEVICE)]
    return time_cuda_calls(calls, repeats=15)


def measure(case: Case, shape: Shape, copy_rate: float) -> dict[str, Any]:
    """Time a case on matrices of one shape."""
    first = case.buffers(*shape)
    written = sum(out.nbytes for out in case.run(first))
    read = sum(t.nbytes for n, t in first.items() if not t.is_meta and (n != "out" or case.adds))
    moved = read + written + (first["x"].nbytes if case.reads_twice else 0)
    sets = [first, *[case.buffers(*shape) for _ in range(buffer_sets(moved) - 1)]]
    kept: dict[int, tuple[Tensor, ...]] = {}  # results, so that calls write to different memory
    calls = [
        lambda index=index, made=made: kept.update({index: case.run(made)})
        for index, made in enumerate(sets)
    ]
    seconds = time_cuda_calls(calls, repeats=15)
    numel = shape[0] * shape[1]
    return {
        "op": case.name,
        "rows": shape[0],
        "columns": shape[1],
        "size_mb": numel * case.itemsize / 2**20,
        "bytes_moved": moved,
        "bytes_per_value": moved / numel,
        "time_us": seconds * 1e6,
        "ns_per_1000_values": seconds * 1e12 / numel,
        "gb_per_s": moved / seconds / 1e9,
        "share_of_copy": moved / seconds / copy_rate,
        "share_of_equal_copy": equal_copy(moved) / seconds,
    }


@triton.jit
def empty_kernel(a, b, c, d, e, f, g, h, i, j):
    """Do nothing, with about as many arguments as the operators."""


def floors() -> dict[str, float]:
    """Return microseconds of a launch that does nothing, and of the smallest read and write."""
    x, y = torch.zeros(16, device=DEVICE), torch.zeros(16, device=DEVICE)
    calls: dict[str, Callable[[], object]] = {
        "empty_launch_us": lambda: empty_kernel[(1,)](x, x, x, 0, 0, 0, 1, 16, 5, 7),
        "smallest_kernel_us": lambda: torch.neg(x, out=y),
    }
    return {name: 1e6 * time_cuda_calls([call] * 64) for name, call in calls.items()}


def _shape(text: str) -> Shape:
    rows, columns = text.split("x")
    return int(rows), int(columns)


def main() -> int:
    """Check, time, print and write; return the exit code."""
    parser = argument_parser(__doc__, "--out")
    parser.add_argument("--shapes", type=_shape, nargs="+", metavar="TxN", help="for all cases")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    args = parser.parse_args()
    if needs_gpu():
        return 2
    torch.manual_seed(0)
    chosen = [case for family in FAMILIES for case in family() if args.only in case.name]
    wrong = {case.name: found for case in chosen if case.compared and (found := differs(case))}
    if wrong:
        print("differs from the reference, so no speed is shown:")
        print("\n".join(f"  {name}: {found}" for name, found in wrong.items()))
        return 1
    print(f"{len(chosen)} operators agree with their reference")
    copy_rate, report = copy_bandwidth(), floors()
    results = [
        measure(case, shape, copy_rate) for case in chosen for shape in args.shapes or case.shapes
    ]
    rows = [
        (
            r["op"],
            f"{r['rows']}x{r['columns']}",
            f"{r['time_us']:.1f}",
            f"{r['bytes_per_value']:.2f}",
            f"{r['ns_per_1000_values']:.2f}",
            f"{r['gb_per_s']:.0f}",
            f"{r['share_of_copy']:.0%}",
            f"{r['share_of_equal_copy']:.0%}",
        )
        for r in results
    ]
    heads = ["op", "shape", "us", "B/value", "ns/1000", "GB/s", "of copy", "of an equal copy"]
    print(table(rows, heads))
    floor = {"copy_gb_per_s": copy_rate / 1e9, **report}
    write_report(args.out, "kernels", floor | {"cases": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
