"""Speed of TAH-Quant: kernels against a device-to-device copy, or codecs of boundaries on a CPU.

First the kernels are compared with the CPU reference: entropies within the rounding of sums, ranks,
bytes of messages and decoded values bit by bit. If something differs, no speed is printed and the
exit code is 1. Then each is timed (median over graph replays, buffers rotated through more than the
L2 cache). GB/s counts each byte read once and written once; the whole of the encoding reads values
twice and is shown for the time it takes.

    python benchmarks/tah_kernels.py --out outputs/tah_kernels.json
    python benchmarks/tah_kernels.py --cpu --threads 2

With ``--cpu`` nothing but the codecs of boundaries is timed, as they are called between stages.
"""

from __future__ import annotations

import argparse
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
from lq_lightning.kernels.tah import TAHFormat, parse_tah_format, reference
from lq_lightning.kernels.tah.reference import lowest
from lq_lightning.pipeline.boundary import Message, make_boundary_codec

WORKING_SET_NBYTES = 1 << 29
FORMATS = {
    "tah": "tah/64/4/1/5/hadamard",
    "tah 32": "tah/32/4/1/5/hadamard",
    "tah 128": "tah/128/4/1/5/hadamard",
    "tah int4": "tah/64/4/0/hadamard",
    "tah5": "tah/64/5/0/hadamard",
    "tah5 128": "tah/128/5/0/hadamard",
    "tah no hadamard": "tah/64/4/1/5/none",
}
SHAPES = ((1, 1024, 1600), (1, 4096, 4096), (4, 4096, 4096))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# How many of the tiles of 64 are transformed: 1 in 1000, 1 in 5, nearly all.
DATA = ("normal", "heavy-tailed", "outliers")


def values(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Return random values of a kind of ``DATA``."""
    if kind == "heavy-tailed":
        x = torch.distributions.StudentT(torch.tensor(2.5, device=device)).sample(shape)
    else:
        x = torch.randn(shape, device=device)
    if kind == "outliers":
        x[..., 3::64] *= 30
    return x.to(dtype)


# --- kernels on a GPU -----------------------------------------------------------------------------


def differs(fmt: TAHFormat, kind: str, dtype: torch.dtype) -> str:
    """Return how the kernels differ from the CPU reference; empty if they agree."""
    from lq_lightning.kernels.tah import triton_kernels as launch

    x = values(kind, (3, 501, 1920), dtype, "cpu")
    layout = fmt.layout(*x.shape)
    found = reference.statistics_of(x, fmt)
    expected = torch.empty(layout.nbytes, dtype=torch.uint8)
    reference.quantize(x, fmt, expected)
    decoded = torch.empty_like(x)
    reference.dequantize(expected, fmt, decoded)
    moved, message = x.cuda(), torch.full_like(expected, 0xAB, device="cuda")
    places = message
    if layout.adaptive:
        error = (launch.launch_entropies(moved, fmt).cpu() - found.entropies).abs().max()
        if not error < 1e-4:
            return f"entropies are off by {float(error):.2e}"
        exact = found.entropies.cuda()
        places = launch.launch_places(exact, message, layout, x.shape[0], rank=True)
        low = lowest(found.entropies.view(x.shape[0], -1), layout.low_per_sequence).view(-1)
        if not torch.equal(places.cpu() < 0, low):
            return "other tokens are INT3"
        launch.launch_bits(places, message)
    launch.launch_encode(moved, places, fmt, message)
    wrong = int((message.cpu() != expected).sum())
    if wrong:
        return f"{wrong} of {expected.numel()} bytes"
    out = torch.empty_like(moved)
    launch.launch_tah_dequantize(message, fmt, out)
    wrong = int((out.cpu() != decoded).sum())
    return f"{wrong} of {x.numel()} decoded values" if wrong else ""


def kernel_calls(
    fmt: TAHFormat, x: Tensor, tile: tuple[int, int, int] | None
) -> dict[str, tuple[Callable[[], object], int]]:
    """Return calls on one tensor by name, with the bytes that each moves."""
    from lq_lightning.kernels.tah import triton_kernels as launch

    layout = fmt.layout(*x.shape)
    chosen = None if tile is None else launch.Tile(*tile)
    message = torch.empty(layout.nbytes, dtype=torch.uint8, device=x.device)
    launch.launch_tah_quantize(x, fmt, message)
    out = torch.empty_like(x)
    calls: dict[str, tuple[Callable[[], object], int]] = {}
    places = message
    if layout.adaptive:
        entropies = launch.launch_entropies(x, fmt)
        places = launch.launch_places(entropies, message, layout, x.shape[0], rank=True)
        calls["entropies"] = lambda: launch.launch_entropies(x, fmt), x.nbytes + entropies.nbytes
        calls["ranks"] = (
            lambda: launch.launch_places(entropies, message, layout, x.shape[0], rank=True),
            entropies.nbytes + places.nbytes,
        )
    moved = x.nbytes + message.nbytes
    calls["transform and pack"] = (
        lambda: launch.launch_encode(x, places, fmt, message, chosen),
        moved,
    )
    calls["encode, all"] = lambda: launch.launch_tah_quantize(x, fmt, message, chosen), moved
    calls["decode, all"] = lambda: launch.launch_tah_dequantize(message, fmt, out, chosen), moved
    return calls


def measure_kernels(
    label: str,
    kind: str,
    dtype: str,
    shape: tuple[int, int, int],
    copy_rate: float,
    tile: tuple[int, int, int] | None,
) -> list[dict[str, Any]]:
    """Time the kernels of a format."""
    fmt = parse_tah_format(FORMATS[label])
    nbytes = shape[0] * shape[1] * shape[2] * DTYPES[dtype].itemsize
    count = max(1, min(64, -(-WORKING_SET_NBYTES // nbytes)))
    sets = [
        kernel_calls(fmt, values(kind, shape, DTYPES[dtype], "cuda"), tile) for _ in range(count)
    ]
    case = {"format": label, "data": kind, "dtype": dtype, "shape": shape}
    return [case | row for row in kernel_speeds(sets, copy_rate)]


def run_kernels(arguments: argparse.Namespace) -> int:
    """Compare and time on a GPU; the report is complete after each format."""
    copy_rate = copy_bandwidth()
    print(f"copy: {copy_rate / 1e9:.0f} GB/s")
    results: list[dict[str, Any]] = []
    code = 0
    for label in (label for label in FORMATS if arguments.only in label):
        wrong = [
            f"  {label}, {kind}, {dtype}: {found}"
            for kind in DATA
            for dtype in DTYPES.values()
            if (found := differs(parse_tah_format(FORMATS[label]), kind, dtype))
        ]
        if wrong:
            print("differs from the reference, so no speed is shown:", *wrong, sep="\n")
            code = 1
            continue
        rows = [
            row
            for shape in arguments.shapes or SHAPES
            if shape[2] % parse_tah_format(FORMATS[label]).tile == 0
            for kind in (DATA if label in ("tah", "tah5") else DATA[:1])
            for dtype in DTYPES
            for row in measure_kernels(label, kind, dtype, shape, copy_rate, arguments.tile)
        ]
        shown = [row | {"shape": by_x(row["shape"])} for row in rows]
        print(speed_table(shown, ("format", "data", "dtype", "shape")), flush=True)
        results += rows
        report = {"copy_gb_per_s": copy_rate / 1e9, "ops": results}
        write_report(arguments.out, "tah_kernels", report)
    return code


# --- codecs on a CPU ------------------------------------------------------------------------------


def measure_codec(name: str, kind: str, x: Tensor) -> dict[str, Any]:
    """Time both ways of a codec of boundaries."""
    codec = make_boundary_codec(name)
    message = Message(boundary=0, backward=False, microbatch=0)
    encode, decode = [], []
    payload = codec.encode(x, message)
    for _ in range(30):
        start = time.perf_counter()
        payload = codec.encode(x, message)
        middle = time.perf_counter()
        decoded = codec.decode(payload, x.shape, x.dtype, message)
        decode.append(time.perf_counter() - middle)
        encode.append(middle - start)
    error = (decoded.float() - x.float()).norm() / x.float().norm()
    return {
        "codec": name,
        "data": kind,
        "dtype": str(x.dtype).split(".")[-1],
        "shape": tuple(x.shape),
        "bits_per_value": 8 * payload.numel() / x.numel(),
        "relative_error": float(error),
        "encode_ms": statistics.median(encode) * 1e3,
        "decode_ms": statistics.median(decode) * 1e3,
    }


def run_codecs(arguments: argparse.Namespace) -> int:
    """Time on a CPU."""
    torch.set_num_threads(arguments.threads)
    results = []
    for shape in arguments.shapes or SHAPES[:1]:
        for name in ("none", "bf16", "fp8", "int4", "int5", "int6", "tah", "tah5"):
            for kind in DATA if name.startswith("tah") else DATA[:1]:
                for dtype in DTYPES.values():
                    results.append(measure_codec(name, kind, values(kind, shape, dtype, "cpu")))
    header = ["codec", "data", "dtype", "bits", "error", "encode ms", "decode ms", "both ms"]
    rows = [
        [
            row["codec"],
            row["data"],
            row["dtype"],
            f"{row['bits_per_value']:.3f}",
            f"{row['relative_error']:.4f}",
            f"{row['encode_ms']:.2f}",
            f"{row['decode_ms']:.2f}",
            f"{row['encode_ms'] + row['decode_ms']:.2f}",
        ]
        for row in results
    ]
    print(table(rows, header))
    write_report(arguments.out, "tah_codecs", {"threads": arguments.threads, "codecs": results})
    return 0


def main() -> int:
    """Check, time, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON report to write")
    parser.add_argument("--shapes", type=dimensions, nargs="+", metavar="BxSxN")
    parser.add_argument("--only", default="", help="run the formats whose name contains this")
    parser.add_argument("--tile", type=dimensions, metavar="BLOCKxRUNxWARPS", help="of the kernels")
    parser.add_argument("--cpu", action="store_true", help="time codecs of boundaries on a CPU")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.cpu:
        return run_codecs(arguments)
    if not torch.cuda.is_available():
        print("without --cpu this benchmark needs a CUDA GPU")
        return 2
    return run_kernels(arguments)


if __name__ == "__main__":
    sys.exit(main())
