"""Choose the tiles of the FP8 kernels by measurement and write them to their table.

For every kind of kernel all candidates are timed, on the formats that it is for; the fastest in the
sum is kept. Run it on the GPU that the table is for, then check and measure with
``activation_kernels.py``:

    python benchmarks/tune_float8.py --write --out outputs/float8_tiles.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.activation_kernels import (
    FORMATS,
    Case,
    cast_case,
    rebuild_case,
    rotating_calls,
)
from benchmarks.common import REPOSITORY, time_cuda_calls, write_report
from lq_lightning.kernels.float8 import triton_kernels, triton_rebuild
from lq_lightning.kernels.float8.triton_kernels import (
    CAST_TILE,
    REBUILD_TILES,
    CastTile,
    RebuildTile,
    rebuild_kind,
)
from lq_lightning.kernels.message import parse_format
from lq_lightning.kernels.message.operators import clear_cached_calls

TABLE = REPOSITORY / "kernels" / "float8" / "triton_kernels.py"
SOURCES = {"codes": "codes", "norm": "norm", "activation": "swiglu"}
LABELS = ("int4", "int4 h128", "nf4", "fp8_e4m3/16", "int8 h128")
SHAPE = (8192, 4096)

Tile = CastTile | RebuildTile


def cases() -> dict[str, list[Case]]:
    """Return what every kind of kernel is timed on, by its key in the table."""
    FORMATS.setdefault("int8 h128", "int8/128/symmetric/128/nearest/bfloat16")
    chosen = {"cast": [cast_case(True, False), cast_case(True, True)]}
    for source, name in SOURCES.items():
        for label in LABELS:
            kind = rebuild_kind(source, parse_format(FORMATS[label]))
            chosen.setdefault(kind, []).append(rebuild_case(name, label))
    return chosen


def candidates(kind: str) -> Iterator[Tile]:
    """Yield the tiles to try."""
    if kind == "cast":
        for rows in (64, 128, 256):
            for columns in (64, 128, 256):
                for warps in (2, 4, 8, 16):
                    if 16 <= rows * columns // (32 * warps) <= 128:
                        yield CastTile(rows, columns, warps)
        return
    for rows in (64, 128, 256, 512):
        for columns in (128, 256):
            for run in (64, 128) if "levels" in kind else (16, 32, 64):
                warps = rows * columns // (4 * 32 * run)
                if 1 <= warps <= 8:
                    yield RebuildTile(rows, columns, run, warps)


def force(kind: str, tile: Tile) -> None:
    """Make every launch of a kind of kernel use ``tile``."""
    clear_cached_calls()
    if isinstance(tile, CastTile):
        triton_kernels.CAST_TILE = tile
    else:
        triton_rebuild.REBUILD_TILES[kind] = tile


def compile_tile(kind: str, tile: Tile) -> None:
    """Compile into the cache on disk, from where the measuring process loads it."""
    force(kind, tile)
    for case in cases()[kind]:
        case.run(case.buffers(SHAPE[0] // 4, SHAPE[1]))  # divisible by as much, so the same kernel
    torch.cuda.synchronize()


def tune(kind: str) -> list[dict[str, Any]]:
    """Return the times of all candidates in microseconds, the fastest first."""
    times: dict[Tile, list[float]] = {tile: [] for tile in candidates(kind)}
    for case in cases()[kind]:
        calls, _ = rotating_calls(case, *SHAPE)
        for tile, found in times.items():
            force(kind, tile)
            found.append(time_cuda_calls(calls, repeats=9) * 1e6)
    order = sorted(times, key=lambda tile: sum(times[tile]))
    return [{"kind": kind, "tile": tile, "us": times[tile]} for tile in order]


def write_table(best: dict[str, Tile]) -> None:
    """Replace the tiles in the source."""
    source = TABLE.read_text()
    for kind, tile in best.items():
        name = type(tile).__name__
        key = "CAST_TILE = " if kind == "cast" else f'    "{kind}": '
        start = source.index(f"\n{key}{name}(") + 1
        end = source.index(")", start) + 1
        source = f"{source[:start]}{key}{name}({', '.join(map(str, tile))}){source[end:]}"
    TABLE.write_text(source)


def _chosen(text: str | None) -> Callable[[str], bool]:
    return lambda kind: text is None or text in kind


def main() -> int:
    """Compile, time, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON report of all times")
    parser.add_argument("--write", action="store_true", help=f"update {TABLE.name}")
    parser.add_argument("--only", help="tune the kinds whose name contains this; others stay")
    parser.add_argument("--processes", type=int, default=8, help="compile in so many processes")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU")
        return 2
    kinds = list(filter(_chosen(arguments.only), ("cast", *REBUILD_TILES)))
    best: dict[str, Tile] = {"cast": CAST_TILE, **REBUILD_TILES}
    pairs = [(kind, tile) for kind in kinds for tile in candidates(kind)]
    context = get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
        list(pool.map(compile_tile, *zip(*pairs, strict=True)))
    report = []
    for kind in kinds:
        rows = tune(kind)
        best[kind] = rows[0]["tile"]
        report += rows
        for row in rows[:4]:
            shown = ", ".join(f"{us:.1f}" for us in row["us"])
            print(f"{kind}: {tuple(row['tile'])} {shown} us", flush=True)
    if arguments.write:
        write_table(best)
    write_report(arguments.out, "tune_float8", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
