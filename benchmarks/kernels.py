"""Speed of every codec operator against a device-to-device copy of the same run.

First every operator is compared with the CPU reference, bit by bit, on random data; if one
differs, no speed is printed and the exit code is 1. Then each is timed (median over graph replays,
buffers rotated through more than the L2 cache). GB/s counts each byte read once and written once.
Beside the copy of 2 GiB, which short kernels cannot reach, stands one as short as each:
``torch.neg`` that reads and writes as many bytes, timed likewise.

    python benchmarks/kernels.py --out outputs/kernels.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton

from benchmarks.common import copy_bandwidth, table, time_cuda_calls, write_report
from lq_lightning.codecs import CodecSpec, decode, decode_reduce, decode_reduce_encode, encode
from lq_lightning.data_parallel import WeightQuantization

GRADIENT_8 = CodecSpec(code="int8", group_size=128, hadamard_size=32)
PLAIN_8 = CodecSpec(code="int8", group_size=128)
GRADIENT_4 = CodecSpec(code="int4", group_size=128, hadamard_size=32)
STOCHASTIC_8 = replace(GRADIENT_8, rounding="stochastic")
STOCHASTIC_4 = replace(GRADIENT_4, rounding="stochastic")
WEIGHTS = {
    "int4/2048": CodecSpec(code="int4", group_size=2048),
    "nf4/128": WeightQuantization().codec(),
}
NF4 = CodecSpec(code="nf4", group_size=128)
SEED = 1234
WORKING_SET_NBYTES = 1 << 29


@dataclass(frozen=True)
class Case:
    """One operator and variant.

    Attributes:
        name: shown in the table.
        run: launches it on a set of buffers.
        buffers: makes the set for ``(rows of one message, numel, device)``.
        floats: bytes per element of the float tensor that the size of a run refers to.
        every_size: time all sizes, not only the reference size.
    """

    name: str
    run: Callable[[dict[str, torch.Tensor]], torch.Tensor]
    buffers: Callable[[int, int], dict[str, torch.Tensor]]
    floats: int
    every_size: bool = True


def _floats(rows: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, numel, dtype=dtype, device="cuda")


def _message(spec: CodecSpec, count: int, rows: int, numel: int) -> torch.Tensor:
    messages = torch.empty(count, rows, spec.nbytes(numel), dtype=torch.uint8, device="cuda")
    for message in messages:
        encode(spec, _floats(rows, numel, torch.bfloat16), seed=SEED, out=message)
    return messages


def _encoded(spec: CodecSpec, rows: int, numel: int) -> torch.Tensor:
    return torch.empty(rows, spec.nbytes(numel), dtype=torch.uint8, device="cuda")


def encode_case(
    label: str, spec: CodecSpec, dtype: torch.dtype, difference: bool = False, **options: bool
) -> Case:
    """Quantize, optionally the difference to a second tensor."""

    def buffers(rows: int, numel: int) -> dict[str, torch.Tensor]:
        made = {"x": _floats(rows, numel, dtype), "out": _encoded(spec, rows, numel)}
        if difference:
            noise = _floats(rows, numel, torch.bfloat16)
            made["reference"] = (made["x"] + 1e-2 * noise).bfloat16()
        return made

    def run(made: dict[str, torch.Tensor]) -> torch.Tensor:
        return encode(spec, made["x"], seed=SEED, reference=made.get("reference"), out=made["out"])

    return Case(label, run, buffers, dtype.itemsize, **options)


def decode_case(
    label: str, spec: CodecSpec, dtype: torch.dtype, add: bool = False, **options: bool
) -> Case:
    """Dequantize one message per row, optionally adding to the output."""

    def buffers(rows: int, numel: int) -> dict[str, torch.Tensor]:
        return {"message": _message(spec, 1, rows, numel)[0], "out": _floats(rows, numel, dtype)}

    def run(made: dict[str, torch.Tensor]) -> torch.Tensor:
        numel = made["out"].shape[1]
        return decode(spec, made["message"], numel, out=made["out"], add=add)

    return Case(label, run, buffers, dtype.itemsize, **options)


def reduce_case(
    label: str, spec: CodecSpec, count: int, dtype: torch.dtype = torch.float32, **options: bool
) -> Case:
    """Dequantize and sum ``count`` messages."""

    def buffers(rows: int, numel: int) -> dict[str, torch.Tensor]:
        out = _floats(rows, numel, dtype)
        return {"messages": _message(spec, count, rows, numel), "out": out}

    def run(made: dict[str, torch.Tensor]) -> torch.Tensor:
        numel = made["out"].shape[1]
        return decode_reduce(spec, made["messages"], numel, scale=1 / count, out=made["out"])

    return Case(label, run, buffers, dtype.itemsize, **options)


def requantize_case(
    label: str, source: CodecSpec, target: CodecSpec, count: int, **options: bool
) -> Case:
    """Dequantize, sum and quantize again."""

    def buffers(rows: int, numel: int) -> dict[str, torch.Tensor]:
        return {
            "messages": _message(source, count, rows, numel),
            "out": _encoded(target, rows, numel),
            "numel": torch.tensor(numel),
        }

    def run(made: dict[str, torch.Tensor]) -> torch.Tensor:
        numel = int(made["numel"])
        return decode_reduce_encode(
            source, made["messages"], numel, target, seed=SEED, out=made["out"]
        )

    return Case(label, run, buffers, 4, **options)


def cases() -> list[Case]:
    """Return every operator and variant."""
    fp32, bf16 = torch.float32, torch.bfloat16
    chosen = [
        encode_case("hadamard+quantize int8 fp32", GRADIENT_8, fp32),
        encode_case("hadamard+quantize int4 fp32", GRADIENT_4, fp32),
        encode_case("hadamard+quantize int8 bf16", GRADIENT_8, bf16),
        encode_case("quantize int8 fp32", PLAIN_8, fp32),
        encode_case("quantize int8 bf16", PLAIN_8, bf16),
        decode_case("dequantize int8 fp32", PLAIN_8, fp32),
        decode_case("dequantize+inverse int8 fp32", GRADIENT_8, fp32),
        decode_case("dequantize+inverse int4 bf16", GRADIENT_4, bf16),
        decode_case("dequantize+inverse+add int4 fp32", GRADIENT_4, fp32, True),
        reduce_case("dequantize+reduce 4x int8 fp32", GRADIENT_8, 4),
        reduce_case("dequantize+reduce 8x int8 fp32", GRADIENT_8, 8),
        reduce_case("dequantize+reduce 4x int4 fp32", GRADIENT_4, 4),
        requantize_case("dequantize+reduce+requantize 4x int8", GRADIENT_8, GRADIENT_4, 4),
        requantize_case("dequantize+reduce+requantize 8x int8", GRADIENT_8, GRADIENT_4, 8),
    ]
    for label, spec in WEIGHTS.items():
        chosen += [
            encode_case(f"quantize {label} bf16", spec, bf16),
            encode_case(f"difference+quantize {label} bf16-bf16", spec, bf16, True),
            encode_case(f"difference+quantize {label} fp32-bf16", spec, fp32, True),
            decode_case(f"dequantize {label} bf16", spec, bf16),
            decode_case(f"dequantize+add {label} bf16", spec, bf16, True),
        ]
    noisy, once = "stochastic", {"every_size": False}
    chosen += [
        encode_case(f"hadamard+quantize int8 fp32 {noisy}", STOCHASTIC_8, fp32, **once),
        encode_case(f"hadamard+quantize int4 fp32 {noisy}", STOCHASTIC_4, fp32, **once),
        encode_case(f"hadamard+quantize int8 bf16 {noisy}", STOCHASTIC_8, bf16, **once),
        requantize_case(
            f"dequantize+reduce+requantize 4x int8 {noisy}", GRADIENT_8, STOCHASTIC_4, 4, **once
        ),
        reduce_case("dequantize+reduce 32x int8 fp32", GRADIENT_8, 32, **once),
        requantize_case(
            "dequantize+reduce+requantize 32x int8", GRADIENT_8, GRADIENT_4, 32, **once
        ),
        requantize_case("dequantize+reduce+requantize 4x nf4", NF4, NF4, 4, **once),
    ]
    for label, spec in variants().items():
        chosen.append(encode_case(f"quantize {label} bf16", spec, bf16, every_size=False))
        chosen.append(decode_case(f"dequantize {label} bf16", spec, bf16, every_size=False))
    return chosen


def variants() -> dict[str, CodecSpec]:
    """Return the codecs that are timed at one size, by what the table calls them."""
    return {
        "int2": CodecSpec(code="int2", group_size=128),
        "int3": CodecSpec(code="int3", group_size=128),
        "int5": CodecSpec(code="int5", group_size=128),
        "int6": CodecSpec(code="int6", group_size=128),
        "int7": CodecSpec(code="int7", group_size=128),
        "fp4_e2m1": CodecSpec(code="fp4_e2m1", group_size=128),
        "nf4": NF4,
        "fp8_e4m3": CodecSpec(code="fp8_e4m3", group_size=128),
        "fp8_e5m2 stochastic": CodecSpec(code="fp8_e5m2", group_size=128, rounding="stochastic"),
        "int4 asymmetric, bf16 scale": CodecSpec(
            code="int4", group_size=128, symmetric=False, scale_dtype="bfloat16"
        ),
        "int8 h128, fp16 scale": CodecSpec(
            code="int8", group_size=128, hadamard_size=128, scale_dtype="float16"
        ),
        "int8 h64": CodecSpec(code="int8", group_size=128, hadamard_size=64),
        "int4 group 16": CodecSpec(code="int4", group_size=16),
        "int8 group row": CodecSpec(code="int8", group_size="row"),
        "fp8_e4m3 group row": CodecSpec(code="fp8_e4m3", group_size="row"),
    }


def differing(case: Case) -> int:
    """Return how many bytes of what the operator writes differ from the CPU reference."""
    made = case.buffers(2, 300_016)
    copies = {name: tensor.cpu() for name, tensor in made.items()}
    actual, expected = case.run(made), case.run(copies)
    pairs = [(actual, expected), *((made[name], copies[name]) for name in made if name != "numel")]
    return sum(int((a.cpu().view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs)


@triton.jit
def empty_kernel(a, b, c, d, e, f, g, h, i, j):
    """Do nothing, with about as many arguments as the operators."""


def empty_launch() -> float:
    """Return the seconds of a launch that does nothing: the floor of what ``measure`` can show."""
    x = torch.zeros(16, device="cuda")
    call = lambda: empty_kernel[(1,)](x, x, x, 0, 0, 0, 1, 16, 5, 7)  # noqa: E731
    return time_cuda_calls([call] * 64)


def one_element_copy() -> float:
    """Return the seconds of the smallest kernel that reads and writes memory."""
    x, y = torch.zeros(16, device="cuda"), torch.zeros(16, device="cuda")
    return time_cuda_calls([lambda: torch.neg(x, out=y)] * 64)


def buffer_sets(nbytes: int) -> int:
    """Return how many sets of so many bytes are more than the L2 cache holds."""
    return max(1, min(64, -(-WORKING_SET_NBYTES // nbytes)))


@cache
def equal_copy(nbytes: int) -> float:
    """Return the seconds of an elementwise kernel that reads and writes so many bytes in all."""
    shape = (buffer_sets(nbytes), 2, nbytes // 8)
    calls = [lambda x=x: torch.neg(x[0], out=x[1]) for x in torch.zeros(shape, device="cuda")]
    return time_cuda_calls(calls, repeats=15)


def measure(case: Case, size_nbytes: int, copy_rate: float) -> dict[str, object]:
    """Time a case with a float tensor of ``size_nbytes``."""
    numel = size_nbytes // case.floats
    first = case.buffers(1, numel)
    moved = sum(tensor.nbytes for tensor in first.values() if tensor.is_cuda)
    if "add" in case.name:
        moved += first["out"].nbytes
    if "group row" in case.name and "x" in first:  # read once for the scale, once for the codes
        moved += first["x"].nbytes
    sets = [first, *[case.buffers(1, numel) for _ in range(buffer_sets(moved) - 1)]]
    seconds = time_cuda_calls([lambda made=made: case.run(made) for made in sets], repeats=15)
    return {
        "op": case.name,
        "size_mb": size_nbytes / 2**20,
        "numel": numel,
        "bytes_moved": moved,
        "bytes_per_value": moved / numel,
        "time_us": seconds * 1e6,
        "ns_per_1000_values": seconds * 1e12 / numel,
        "gb_per_s": moved / seconds / 1e9,
        "share_of_copy": moved / seconds / copy_rate,
        "share_of_equal_copy": equal_copy(moved) / seconds,
    }


def host_time_per_call(case: Case) -> float:
    """Return the seconds that one call keeps the host busy, whatever the size."""
    made = case.buffers(1, 4096)
    case.run(made)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        case.run(made)
    seconds = (time.perf_counter() - start) / 200
    torch.cuda.synchronize()
    return seconds


def main() -> int:
    """Check, time, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON report to write")
    parser.add_argument("--sizes-mb", type=int, nargs="+", default=[1, 16, 64, 256, 1024, 2048])
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU")
        return 2
    torch.manual_seed(0)
    chosen = [case for case in cases() if arguments.only in case.name]
    wrong = {case.name: count for case in chosen if (count := differing(case))}
    if wrong:
        print("differs from the reference, so no speed is shown (bytes that differ):")
        print("\n".join(f"  {name}: {count}" for name, count in wrong.items()))
        return 1
    print(f"{len(chosen)} operators equal their reference bit for bit")
    copy_rate = copy_bandwidth()
    print(f"device-to-device copy: {copy_rate / 1e9:.0f} GB/s read+written (2 GiB copied)")
    empty, smallest = empty_launch() * 1e6, one_element_copy() * 1e6
    print(f"empty launch: {empty:.2f} us; smallest kernel that reads and writes: {smallest:.2f} us")
    results = []
    for case in chosen:
        sizes = arguments.sizes_mb if case.every_size else [256]
        results += [measure(case, size << 20, copy_rate) for size in sizes]
    rows = [
        (
            r["op"],
            f"{r['size_mb']:.0f}",
            f"{r['time_us']:.1f}",
            f"{r['bytes_per_value']:.2f}",
            f"{r['ns_per_1000_values']:.2f}",
            f"{r['gb_per_s']:.0f}",
            f"{r['share_of_copy']:.0%}",
            f"{r['share_of_equal_copy']:.0%}",
        )
        for r in results
    ]
    heads = ["op", "MB", "us", "B/value", "ns/1000", "GB/s", "of copy", "of an equal copy"]
    print(table(rows, heads))
    host = {case.name: host_time_per_call(case) * 1e6 for case in chosen if case.every_size}
    print(f"host time per call: {min(host.values()):.0f} to {max(host.values()):.0f} us")
    report = {
        "copy_gb_per_s": copy_rate / 1e9,
        "empty_launch_us": empty,
        "smallest_kernel_us": smallest,
        "host_us_per_call": host,
        "cases": results,
    }
    write_report(arguments.out, "kernels", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
