"""Speed of messages of mixed widths: kernels against a device-to-device copy, or a codec on a CPU.

First the kernels are compared with the CPU reference bit by bit: messages, decoded values, values
rounded without packing. If something differs, no speed is printed and the exit code is 1. Then each
is timed (median over graph replays, buffers rotated through more than the L2 cache). GB/s counts
each byte read once and written once; the whole of the encoding and the round trip read values twice
and are shown for the time they take.

    python benchmarks/mixed_kernels.py --out outputs/mixed_kernels.json
    python benchmarks/mixed_kernels.py --cpu --threads 2

With ``--cpu`` encoding, decoding, the round trip, and encoding that also returns what arrives
("both") are timed beside int4 in groups of 64, as they are called at a boundary. Tables have widths
from 1 to 8, 4 on average, in random order.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.common import (
    by_x,
    copy_bandwidth,
    dimensions,
    kernel_speeds,
    speed_table,
    table,
    write_report,
)
from lq_lightning.codecs import (
    CodecSpec,
    WidthTable,
    decode_mixed,
    encode_and_round_mixed,
    encode_mixed,
    round_trip_mixed,
)
from lq_lightning.codecs.mixed import RANGES
from lq_lightning.kernels.mixed_width import mixed_layout, reference, width_counts, width_rows
from lq_lightning.pipeline.boundary import GroupCodec
from lq_lightning.pipeline.message import Message

WORKING_SET_NBYTES = 1 << 29
SHAPES = ((1024, 4096), (4096, 1024), (4096, 4096), (16384, 4096))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Of lines in turn, 4 on average; the second as from a preset that allows bf16.
WIDTHS = {"1 to 8": (1, 2, 2, 3, 4, 5, 7, 8), "1 to 16": (1, 1, 2, 2, 2, 4, 7, 13)}


def widths_of(kind: str, lines: int) -> Tensor:
    """Return ``[lines]`` widths of a kind of ``WIDTHS``, in random order."""
    widths = torch.tensor(WIDTHS[kind]).repeat(-(-lines // 8))[:lines]
    return widths[torch.randperm(lines)]


# --- kernels on a GPU -----------------------------------------------------------------------------


def differs(kind: str, dtype: torch.dtype, transposed: bool, fitted: bool) -> str:
    """Return how the kernels differ from the CPU reference; empty if they agree."""
    from lq_lightning.kernels.mixed_width import triton_kernels as launch

    x = torch.randn(1501, 600).mul_(torch.randn(600).exp()).to(dtype)
    x[7, 3], x[9, 5] = float("nan"), float("inf")
    widths = widths_of(kind, 600)
    rows, counts = width_rows(widths), width_counts(widths)
    expected = torch.empty(mixed_layout(counts, 1501).nbytes, dtype=torch.uint8)
    reference.quantize(x, rows, counts, fitted, expected)
    decoded, rounded = torch.empty_like(x), torch.empty_like(x)
    reference.dequantize(expected, rows, counts, decoded)
    reference.round_trip(x, rows, fitted, rounded)
    moved, there = x.cuda(), rows.cuda()
    if transposed:
        moved = moved.t().contiguous().t()
    message = torch.full_like(expected, 0xAB, device="cuda")
    both = torch.empty_like(x, device="cuda")
    launch.launch_mixed_quantize(moved, there, counts, fitted, message, both)
    wrong = int((message.cpu() != expected).sum())
    if wrong:
        return f"{wrong} of {expected.numel()} bytes"
    for name, truth in (("decoded", decoded), ("rounded", rounded), ("encoded", rounded)):
        out = both if name == "encoded" else torch.empty_like(x, device="cuda")
        if name == "decoded":
            launch.launch_mixed_dequantize(message, there, counts, out)
        elif name == "rounded":
            launch.launch_mixed_round_trip(moved, there, fitted, out)
        same = (out.cpu() == truth) | (out.cpu().isnan() & truth.isnan())
        if not same.all():
            return f"{int((~same).sum())} of {x.numel()} {name} values"
    return ""


def kernel_calls(
    kind: str, x: Tensor, tile: tuple[int, int, int] | None
) -> dict[str, tuple[Callable[[], object], int]]:
    """Return calls on one tensor by name, with the bytes that each moves."""
    from lq_lightning.kernels.mixed_width import triton_kernels as launch

    widths = widths_of(kind, x.shape[1])
    rows, counts = width_rows(widths).cuda(), width_counts(widths)
    layout = mixed_layout(counts, x.shape[0])
    message = torch.empty(layout.nbytes, dtype=torch.uint8, device="cuda")
    out = torch.empty(x.shape, dtype=x.dtype, device="cuda")
    factors = launch.launch_scaling(x, rows, False, message, layout)
    encode = launch.QUANTIZE_TILE if tile is None else launch.Tile(*tile)
    decode = launch.DEQUANTIZE_TILE if tile is None else launch.Tile(*tile)
    launch.launch_mixed_quantize(x, rows, counts, False, message)
    moved = x.nbytes + message.nbytes
    return {
        "extremes and scales": (
            lambda: launch.launch_scaling(x, rows, False, message, layout),
            x.nbytes,
        ),
        "pack": (
            lambda: launch.launch_pack(x, rows, factors, layout, False, message, encode),
            moved,
        ),
        "encode, all": (
            lambda: launch.launch_mixed_quantize(x, rows, counts, False, message, tile=encode),
            moved,
        ),
        "encode, fitted": (
            lambda: launch.launch_mixed_quantize(x, rows, counts, True, message, tile=encode),
            moved,
        ),
        "decode": (
            lambda: launch.launch_mixed_dequantize(message, rows, counts, out, decode),
            moved,
        ),
        "encode and round trip, fitted": (
            lambda: launch.launch_mixed_quantize(x, rows, counts, True, message, out),
            moved + x.nbytes,
        ),
        "round trip, all": (
            lambda: launch.launch_mixed_round_trip(x, rows, False, out),
            2 * x.nbytes,
        ),
        "round trip, fitted": (
            lambda: launch.launch_mixed_round_trip(x, rows, True, out),
            2 * x.nbytes,
        ),
    }


def measure_kernels(
    kind: str,
    dtype: str,
    shape: tuple[int, int],
    transposed: bool,
    copy_rate: float,
    tile: tuple[int, int, int] | None,
) -> list[dict[str, Any]]:
    """Time the kernels on values of one shape."""
    nbytes = shape[0] * shape[1] * DTYPES[dtype].itemsize
    sets = []
    for _ in range(max(1, min(64, -(-WORKING_SET_NBYTES // nbytes)))):
        x = torch.randn(shape, device="cuda").to(DTYPES[dtype])
        sets.append(kernel_calls(kind, x.t().contiguous().t() if transposed else x, tile))
    case = {"widths": kind, "dtype": dtype, "shape": shape, "transposed": transposed}
    return [case | row for row in kernel_speeds(sets, copy_rate)]


def run_kernels(arguments: argparse.Namespace) -> int:
    """Compare and time on a GPU."""
    cases = [(k, d, t) for k in WIDTHS for d in DTYPES for t in (False, True)]
    wrong = {
        (*case, fitted): differs(case[0], DTYPES[case[1]], case[2], fitted)
        for case in cases
        for fitted in (False, True)
    }
    if any(wrong.values()):
        print("differs from the reference, so no speed is shown:")
        print("\n".join(f"  {case}: {found}" for case, found in wrong.items() if found))
        return 1
    copy_rate = copy_bandwidth()
    results = []
    for shape in arguments.shapes or SHAPES:
        for kind, dtype, transposed in cases:
            results += measure_kernels(kind, dtype, shape, transposed, copy_rate, arguments.tile)
    shown = [
        row | {"shape": by_x(row["shape"]) + " transposed" * row["transposed"]} for row in results
    ]
    print(f"copy: {copy_rate / 1e9:.0f} GB/s")
    print(speed_table(shown, ("widths", "dtype", "shape")))
    write_report(arguments.out, "mixed_kernels", {"copy_gb_per_s": copy_rate / 1e9, "ops": results})
    return 0


# --- on a CPU -------------------------------------------------------------------------------------


def _time(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the median of the milliseconds that a call takes, and its result."""
    times, result = [], call()
    for _ in range(20):
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3, result


def measure_cpu(x: Tensor) -> list[dict[str, Any]]:
    """Time both codecs on ``[T, N]`` values."""
    tokens, lines = x.shape
    rows = []
    for kind, ranges in itertools.product(WIDTHS, RANGES):
        widths = WidthTable(widths_of(kind, lines))
        given = (x, widths, ranges)
        encode_ms, payload = _time(lambda g=given: encode_mixed(*g))
        decode_ms, _ = _time(lambda p=payload, w=widths: decode_mixed(p, w, tokens, x.dtype))
        round_trip_ms, _ = _time(lambda g=given: round_trip_mixed(*g))
        both_ms, _ = _time(lambda g=given: encode_and_round_mixed(*g))
        times = encode_ms, decode_ms, round_trip_ms, both_ms
        rows.append((f"mixed, {kind}, {ranges}", widths.effective_bits(tokens), *times))
    codec = GroupCodec("int4", CodecSpec(code="int4", group_size=64, scale_dtype="bfloat16"))
    message = Message(boundary=0, backward=False, microbatch=0)
    encode_ms, payload = _time(lambda: codec.encode(x, message))
    decode_ms, _ = _time(lambda: codec.decode(payload, x.shape, x.dtype, message))
    rows.append(
        ("int4, groups of 64", codec.bits_per_value(x.shape, x.dtype), encode_ms, decode_ms)
    )
    names = ("codec", "bits_per_value", "encode_ms", "decode_ms", "round_trip_ms", "both_ms")
    about = {"dtype": str(x.dtype).split(".")[-1], "shape": tuple(x.shape)}
    return [{**dict(zip(names, row, strict=False)), **about} for row in rows]


def run_cpu(arguments: argparse.Namespace) -> int:
    """Time on a CPU."""
    torch.set_num_threads(arguments.threads)
    results = []
    for shape in arguments.shapes or SHAPES[:2]:
        for dtype in DTYPES.values():
            results += measure_cpu(torch.randn(shape).to(dtype))
    times = ("encode", "decode", "round_trip", "both")
    header = [
        "codec",
        "dtype",
        "shape",
        "bits",
        *(f"{name.replace('_', ' ')} ms" for name in times),
    ]
    rows = [
        [
            row["codec"],
            row["dtype"],
            by_x(row["shape"]),
            f"{row['bits_per_value']:.3f}",
            *(f"{row[f'{name}_ms']:.2f}" if f"{name}_ms" in row else "" for name in times),
        ]
        for row in results
    ]
    print(table(rows, header))
    write_report(arguments.out, "mixed_codec", {"threads": arguments.threads, "codecs": results})
    return 0


def main() -> int:
    """Check, time, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON report to write")
    parser.add_argument("--shapes", type=dimensions, nargs="+", metavar="TxN")
    parser.add_argument(
        "--tile", type=dimensions, metavar="LINESxTOKENSxWARPS", help="of the kernels"
    )
    parser.add_argument("--cpu", action="store_true", help="time the codec on a CPU")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.cpu:
        return run_cpu(arguments)
    if not torch.cuda.is_available():
        print("without --cpu this benchmark needs a CUDA GPU")
        return 2
    return run_kernels(arguments)


if __name__ == "__main__":
    sys.exit(main())
