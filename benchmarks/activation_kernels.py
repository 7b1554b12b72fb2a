"""Speed of the kernels for saved activations against a device-to-device copy of the same run.

First every operator is compared with the CPU reference: bytes of messages and flags bit by bit,
values within a few units in the last place (sums over a row take another order on a GPU). If one
differs, no speed is printed and the exit code is 1. Then each is timed (median over graph replays,
buffers rotated through more than the L2 cache). GB/s counts each byte read once and written once.

    python benchmarks/activation_kernels.py --out outputs/activation_kernels.json

To add operators, write a function that returns cases and name it in ``FAMILIES``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.common import copy_bandwidth, table, time_cuda_calls, write_report
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
from lq_lightning.kernels.norm import norm_backward, norm_dequantize, norm_quantize

WORKING_SET_NBYTES = 1 << 29
BF16 = torch.bfloat16
EPS = 1e-5
# Formats of messages, by what the table calls them.
FORMATS = {
    "int4": "int4/128/asymmetric/0/nearest/bfloat16",
    "int4 h128": "int4/128/asymmetric/128/nearest/bfloat16",
    "nf4": "nf4/128/symmetric/0/nearest/bfloat16",
    "int8": "int8/128/symmetric/0/nearest/bfloat16",
    "fp8_e4m3/16": "fp8_e4m3/16/symmetric/0/nearest/bfloat16",
}

Buffers = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One operator and variant.

    Attributes:
        name: shown in the table.
        buffers: makes what the operator reads for ``(rows, columns)``: tensors on the GPU, all of
            which count as read. A tensor on "meta" just has a shape.
        run: calls the operator on such buffers, on any device; returns all that it writes.
        tolerance: units in the last place that fp32 results may be off by, of the largest magnitude
            in their row: for sums. Results of 16 bits may be off by one.
        ignored: indices of results that are not compared and not counted.
        codes: how many codes FP8 results may be off by.
        shapes: rows and columns to time, unless others are asked for.
    """

    name: str
    buffers: Callable[[int, int], Buffers]
    run: Callable[[Buffers], tuple[Tensor, ...]]
    tolerance: float = 16.0
    ignored: tuple[int, ...] = ()
    codes: int = 0
    shapes: tuple[tuple[int, int], ...] = ((8192, 4096), (32768, 4096))


def values(rows: int, columns: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return normal values on the GPU."""
    return torch.randn(rows, columns, dtype=dtype, device="cuda")


# --- norms ----------------------------------------------------------------------------------------


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


# --- activation functions -------------------------------------------------------------------------

# Of Llama-3-8B and of Llama-2-7B.
MLP_SHAPES = ((8192, 14336), (8192, 11008))


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

    Its inputs are ``halves`` of one tensor, as a projection for both makes them, or two tensors.
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
        return made | ({"dy": x} if operator == "backward" else {"shape": x.new_empty(0, *x.shape)})

    def run(made: Buffers) -> tuple[Tensor, ...]:
        if operator == "quantize":
            return activation_quantize(made["x"], made.get("up"), activation, fmt, amax)  # type: ignore[no-any-return]
        messages = made["message"], made["up_message"]
        if operator == "rebuild":
            shape = made["shape"].shape[1:]
            return (activation_dequantize(*messages, *shape, activation, fmt, BF16),)
        return activation_backward(*messages, made["dy"], activation, fmt, amax)  # type: ignore[no-any-return]

    parts = [activation, operator, "" if gated else "plain", label]
    parts += ["amax" if amax else "", "halves" if halves else ""]
    # a value that is off by a unit of bf16 may be the largest
    tolerance = 2.0**16 if amax else 16.0
    name = " ".join(part for part in parts if part)
    return Case(name, buffers, run, tolerance, shapes=MLP_SHAPES)


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


# --- FP8 operands of matrix products --------------------------------------------------------------


def cast_case(rows: bool, columns: bool) -> Case:
    """Return a case of the cast: of rows, of columns, or of both."""

    def buffers(*shape: int) -> Buffers:
        return {"x": values(*shape), "amax": torch.full((1,), 4.0, device="cuda")}

    def run(made: Buffers) -> tuple[Tensor, ...]:
        return float8_cast(made["x"], made["amax"], rows, columns)  # type: ignore[no-any-return]

    which = " and ".join(["rows"] * rows + ["columns"] * columns)
    shapes = ((8192, 4096), (8192, 14336))
    return Case(f"float8 cast e4m3fn {which}", buffers, run, shapes=shapes)


def rebuild_case(source: str, label: str) -> Case:
    """Return a case of a transposed operand from codes: of a norm, of SwiGLU, or as it is."""
    fmt = FORMATS[label]

    def buffers(rows: int, columns: int) -> Buffers:
        made = {"scale": torch.full((1,), 0.02, device="cuda")}
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
    """Return largest magnitudes, casts and rebuilds."""
    chosen = [cast_case(*asked) for asked in ((True, False), (False, True), (True, True))]
    for source in ("codes", "norm", "swiglu"):
        chosen += [rebuild_case(source, label) for label in FORMATS]
    return chosen


FAMILIES: list[Callable[[], list[Case]]] = [norm_cases, activation_cases, float8_cases]


# --- measuring ------------------------------------------------------------------------------------


def differs(case: Case, rows: int = 3001, columns: int = 1024) -> str:
    """Return how the operator differs from the CPU reference; empty if it agrees."""
    made = case.buffers(rows, columns)
    found = case.run(made)
    expected = case.run({name: t if t.is_meta else t.cpu() for name, t in made.items()})
    for index, (actual, exact) in enumerate(zip(found, expected, strict=True)):
        if index in case.ignored or exact.numel() == 0:
            continue
        if exact.itemsize == 1 and exact.is_floating_point():
            apart = (_ranks(actual.cpu()) - _ranks(exact)).abs()
            if apart.max() > case.codes:
                return f"result {index}: {int((apart > case.codes).sum())} FP8 codes"
        elif exact.dtype == torch.uint8:
            wrong = int((actual.cpu() != exact).sum())
            if wrong:
                return f"result {index}: {wrong} of {exact.numel()} bytes"
        else:
            wide = exact.float()
            unit = wide.abs().amax(-1, keepdim=True) * torch.finfo(exact.dtype).eps
            error = float(((actual.cpu().float() - wide).abs() / unit).max())
            if not error <= (case.tolerance if exact.dtype == torch.float32 else 1.0):
                return f"result {index}: {error:.1f} units in the last place of its row"
    return ""


def _ranks(codes: Tensor) -> Tensor:
    """Number FP8 codes in the order of their values."""
    code = codes.view(torch.uint8).to(torch.int16)
    return torch.where(code < 128, code, 128 - code)


def rotating_calls(case: Case, rows: int, columns: int) -> tuple[list[Callable[[], None]], int]:
    """Return calls on different memory, more than the cache holds, and the bytes that one moves."""
    first = case.buffers(rows, columns)
    written = [out for index, out in enumerate(case.run(first)) if index not in case.ignored]
    read = [tensor for tensor in first.values() if not tensor.is_meta]
    moved = sum(tensor.nbytes for tensor in (*read, *written))
    count = max(1, min(64, -(-WORKING_SET_NBYTES // moved)))
    sets = [first, *[case.buffers(rows, columns) for _ in range(count - 1)]]
    kept: dict[int, tuple[Tensor, ...]] = {}

    def call(index: int) -> None:
        kept[index] = case.run(sets[index])  # kept, so that calls write to different memory

    return [lambda index=index: call(index) for index in range(count)], moved  # type: ignore[misc]


def measure(case: Case, rows: int, columns: int, copy_rate: float) -> dict[str, Any]:
    """Time a case with a matrix of ``rows`` times ``columns``."""
    calls, moved = rotating_calls(case, rows, columns)
    seconds = time_cuda_calls(calls, repeats=15)
    return {
        "op": case.name,
        "rows": rows,
        "columns": columns,
        "bytes_moved": moved,
        "bytes_per_value": moved / (rows * columns),
        "time_us": seconds * 1e6,
        "gb_per_s": moved / seconds / 1e9,
        "share_of_copy": moved / seconds / copy_rate,
    }


def _shape(text: str) -> tuple[int, int]:
    rows, columns = text.split("x")
    return int(rows), int(columns)


def main() -> int:
    """Check, time, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON report to write")
    parser.add_argument("--shapes", type=_shape, nargs="+", metavar="TxN")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU")
        return 2
    torch.manual_seed(0)
    chosen = [case for family in FAMILIES for case in family() if arguments.only in case.name]
    wrong = {case.name: found for case in chosen if (found := differs(case))}
    if wrong:
        print("differs from the reference, so no speed is shown:")
        print("\n".join(f"  {name}: {found}" for name, found in wrong.items()))
        return 1
    print(f"{len(chosen)} operators agree with their reference")
    copy_rate = copy_bandwidth()
    print(f"device-to-device copy: {copy_rate / 1e9:.0f} GB/s read+written (2 GiB copied)")
    results = [
        measure(case, *shape, copy_rate)
        for case in chosen
        for shape in arguments.shapes or case.shapes
    ]
    rows = [
        (
            r["op"],
            f"{r['rows']}x{r['columns']}",
            f"{r['time_us']:.1f}",
            f"{r['bytes_per_value']:.2f}",
            f"{r['gb_per_s']:.0f}",
            f"{r['share_of_copy']:.0%}",
        )
        for r in results
    ]
    print(table(rows, ["op", "shape", "us", "B/value", "GB/s", "of copy"]))
    report = {"copy_gb_per_s": copy_rate / 1e9, "cases": results}
    write_report(arguments.out, "activation_kernels", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
