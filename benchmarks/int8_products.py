"""Times of INT8 products and of their operands, beside those of bf16 and FP8, on a Hopper GPU.

    python benchmarks/int8_products.py --json outputs/int8_products.json

Of each shape ``[M, K] x [N, K]`` (projections of Llama-3-8B on 8192 tokens) it prints the product
in bf16 and FP8 (cuBLASLt, one scale per tensor), in INT8 with every tile, of which the table
(``kernels/int8/triton_kernels.py``) should name the fastest, and without and with second terms;
then what makes the operands. Milliseconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.common import time_cuda_calls, write_report
from lq_lightning._compat.float8 import scaled_mm
from lq_lightning.kernels.float8 import float8_cast, float8_quantize
from lq_lightning.kernels.int8 import int8_matmul, int8_quantize
from lq_lightning.kernels.int8.triton_kernels import (
    ProductTile,
    choose_product_tile,
    launch_descriptors,
)

SHAPES = ((8192, 14336, 4096), (8192, 4096, 14336), (8192, 4096, 4096), (8192, 1024, 4096))
TILES = [
    ProductTile(*sizes, specialized)
    for sizes in (
        (256, 128, 128, 8, 3),
        (128, 256, 128, 8, 3),
        (128, 128, 128, 8, 4),
        (128, 128, 128, 4, 4),
    )
    for specialized in (False, True)
]


def milliseconds(call: Callable[[], object]) -> float:
    """Return the median time of a call."""
    return time_cuda_calls([call] * 4, repeats=9) * 1e3


def product_times(M: int, N: int, K: int) -> dict[str, float]:
    """Return the times of a shape by what was timed."""
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
    (a, _, a_scale, amax), (b, _, b_scale, _) = (
        float8_quantize(part, True, False) for part in (x, w)
    )
    times = {"bf16": milliseconds(lambda: x @ w.t())}
    times["FP8"] = milliseconds(
        lambda: scaled_mm(a, b, a_scale, b_scale, x.dtype, fast_accumulation=True)
    )
    times["cast to FP8"] = milliseconds(lambda: float8_cast(x, amax, True, False))
    times["quantize to FP8"] = milliseconds(lambda: float8_quantize(x, True, False))
    for name, amax_too, length in (("INT8", False, 4096), ("INT8 and amax", True, 0)):
        times[f"quantize to {name}"] = milliseconds(
            lambda amax_too=amax_too, length=length: int8_quantize(x, 128, amax_too, length)
        )
    w_q, w_scale = int8_quantize(w, 128, False, 0)[:2]
    for length in (0, 4096, 512):
        q, scale, second, _ = int8_quantize(x, 128, False, length)
        call = lambda q=q, scale=scale, second=second, length=length: int8_matmul(  # noqa: E731
            q, scale, w_q, w_scale, second, length, x.dtype
        )
        times[f"INT8, sequences of {length}"] = milliseconds(call)
    out = torch.empty(M, N, device="cuda", dtype=x.dtype)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    chosen = choose_product_tile(M, N, K, processors)
    for tile in TILES:
        name = f"INT8 {tuple(tile)}{' (chosen)' if tile == chosen else ''}"
        try:
            times[name] = milliseconds(
                lambda tile=tile: launch_descriptors(q, scale, w_q, w_scale, out, tile, processors)
            )
        except Exception as error:  # tiles that do not fit end in many ways
            print(f"{name}: {type(error).__name__} {str(error)[:100]}")
    return times


def main() -> int:
    """Time, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the report")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU")
        return 2
    report: list[dict[str, Any]] = []
    for shape in SHAPES:
        times = product_times(*shape)
        print(f"{shape}", *(f"  {name:44} {time:.3f}" for name, time in times.items()), sep="\n")
        report.append({"shape": shape, "ms": times})
    write_report(arguments.json, "int8_products", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
