"""Choose the tiles of the Triton kernels by measurement and write them to the table.

For every kind of operator and size class, all candidates are timed; the fastest is kept. Run it on
the GPU that the table is for, then check and measure with ``kernels.py``:

    python benchmarks/tune_kernels.py --write --out outputs/tiles.json
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.common import REPOSITORY, time_cuda_calls, write_report
from benchmarks.kernels import (
    GRADIENT_4,
    GRADIENT_8,
    WEIGHTS,
    WORKING_SET_NBYTES,
    Case,
    decode_case,
    encode_case,
    reduce_case,
    requantize_case,
)
from lq_lightning.codecs import CodecSpec
from lq_lightning.kernels.activation import (
    activation_backward,
    activation_dequantize,
    activation_quantize,
)
from lq_lightning.kernels.activation import triton_kernels as activation_launch
from lq_lightning.kernels.message import launch
from lq_lightning.kernels.message import triton_kernels as dequantize_kernels
from lq_lightning.kernels.message import triton_kernels as quantize_kernels
from lq_lightning.kernels.message import triton_kernels as requantize_kernels
from lq_lightning.kernels.message.launch import TILES, Tile
from lq_lightning.kernels.message.operators import clear_cached_calls

TABLE = REPOSITORY / "kernels" / "message" / "launch.py"
PLAIN_4 = CodecSpec(code="int4", group_size=128)
SIZES_MB = (1, 64, 1024)
SMALL = [(256, 8, 1), (512, 16, 1), (1024, 8, 4), (1024, 16, 2), (2048, 16, 4)]
LARGE = [
    (1024, 8, 4),
    (1024, 16, 1),
    (1024, 16, 2),
    (1024, 32, 1),
    (2048, 32, 1),
    (2048, 32, 2),
]
# How many tiles one program may take, by size class.
TILES_PER_PROGRAM = ((1,), (1, 2, 4), (1, 2, 4, 8, 16))


def activation_case(operator: str, hadamard_size: int) -> Case:
    """Return a gated activation function: quantize, dequantize or backward."""
    fmt = f"int4/128/asymmetric/{hadamard_size}/nearest/bfloat16"

    def buffers(rows: int, numel: int) -> dict[str, torch.Tensor]:
        x, up = (torch.randn(rows, numel, device="cuda").bfloat16() for _ in range(2))
        if operator == "quantize":
            return {"x": x, "up": up}
        _, message, up_message, _ = activation_quantize(x, up, "silu", fmt, False)
        made = {"message": message, "up_message": up_message}
        return made | ({"dy": x} if operator == "backward" else {"like": x[:0]})

    def run(made: dict[str, torch.Tensor]) -> torch.Tensor:
        if operator == "quantize":
            results = activation_quantize(made["x"], made["up"], "silu", fmt, False)
        else:
            messages = made["message"], made["up_message"]
            if operator == "backward":
                results = activation_backward(*messages, made["dy"], "silu", fmt, False)
            else:
                numel = made["like"].shape[1]
                arguments = (*messages, 1, numel, "silu", fmt, torch.bfloat16)
                results = (activation_dequantize(*arguments),)
        # kept, so that calls on other buffers write to other memory
        made.update({f"result {index}": result for index, result in enumerate(results)})
        return results[0]

    return Case("", run, buffers, 2)


def kinds() -> dict[str, Case]:
    """Return a representative operator for every key of the table."""
    chosen = {}
    for bits, dtype in ((16, torch.bfloat16), (32, torch.float32)):
        for suffix, spec in (("", WEIGHTS["nf4/128"]), (" hadamard", GRADIENT_8)):
            for name, difference in (("quantize", False), ("difference", True)):
                key = f"{name} {bits}{suffix}"
                chosen[key] = encode_case(key, spec, dtype, difference)
        chosen[f"dequantize {bits}"] = decode_case("", PLAIN_4, dtype)
        chosen[f"dequantize {bits} add"] = decode_case("", PLAIN_4, dtype, True)
        gradient = GRADIENT_4 if bits == 16 else GRADIENT_8
        chosen[f"dequantize {bits} hadamard"] = decode_case("", gradient, dtype)
        chosen[f"reduce {bits}"] = reduce_case("", GRADIENT_8, 4, dtype)
    for operator in ("quantize", "dequantize", "backward"):
        chosen[f"activation {operator}"] = activation_case(operator, 0)
        chosen[f"activation {operator} hadamard"] = activation_case(operator, 128)
    chosen["requantize"] = requantize_case("", GRADIENT_8, GRADIENT_4, 4)
    chosen["requantize many"] = requantize_case("", GRADIENT_8, GRADIENT_4, 8)
    return chosen


def candidates(kind: str, size_class: int) -> list[Tile]:
    """Return the tiles to try; those that quantize large groups have to hold one."""
    shapes = SMALL if size_class == 0 else LARGE
    if kind in ("quantize 16", "quantize 32", "difference 16", "difference 32"):
        shapes = [(2048, 8, 8), (2048, 16, 4), (2048, 16, 2), (2048, 32, 2), (2048, 32, 1)]
    if kind.startswith("activation") and size_class > 0:
        shapes = [*LARGE, (512, 16, 1), (512, 16, 2), (2048, 16, 4), (2048, 64, 1)]
    return [Tile(*shape, tiles) for shape in shapes for tiles in TILES_PER_PROGRAM[size_class]]


def force(tile: Tile | None) -> None:
    """Make every launch use ``tile``; None for the choice of the table."""
    clear_cached_calls()
    for module in (
        quantize_kernels,
        dequantize_kernels,
        requantize_kernels,
        activation_launch,
    ):
        choose = launch.choose_tile if tile is None else lambda *_: tile
        module.choose_tile = choose  # type: ignore[attr-defined]


def compile_tile(kind: str, tile: Tile) -> None:
    """Compile into the cache on disk, from where the measuring process loads it."""
    case = kinds()[kind]
    force(None)
    made = case.buffers(1, 8192)
    force(tile)
    case.run(made)
    torch.cuda.synchronize()


def measure(case: Case, size_mb: int, tiles: list[Tile]) -> dict[Tile, float]:
    """Return the microseconds of every tile."""
    force(None)
    numel = (size_mb << 20) // case.floats
    first = case.buffers(1, numel)
    moved = sum(tensor.nbytes for tensor in first.values() if tensor.is_cuda)
    count = max(1, min(64, -(-WORKING_SET_NBYTES // moved)))
    sets = [first, *[case.buffers(1, numel) for _ in range(count - 1)]]
    times = {}
    for tile in tiles:
        force(tile)
        calls = [lambda made=made: case.run(made) for made in sets]
        times[tile] = time_cuda_calls(calls, repeats=11) * 1e6
    force(None)
    return times


def write_table(best: dict[str, list[Tile]]) -> None:
    """Replace entries of the table in the source."""
    best = {kind: [Tile(*tile) for tile in tiles] for kind, tiles in TILES.items()} | best
    source = TABLE.read_text()
    head = source[: source.index("TILES: dict")]
    lines = ["TILES: dict[str, tuple[tuple[int, int, int, int], ...]] = {"]
    for kind in sorted(best):
        lines.append(f'    "{kind}": ({", ".join(str(tuple(tile)) for tile in best[kind])}),')
    TABLE.write_text(head + "\n".join(lines) + "\n}\n")


def main() -> int:
    """Compile, time, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON report of all times")
    parser.add_argument("--write", action="store_true", help=f"update {TABLE.name}")
    parser.add_argument("--only", default="", help="kinds whose names begin so; others stay")
    parser.add_argument("--processes", type=int, default=8, help="compile in so many processes")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU")
        return 2
    chosen = {kind: case for kind, case in kinds().items() if kind.startswith(arguments.only)}
    if not chosen:
        parser.error(f"--only {arguments.only!r}: kinds are {', '.join(kinds())}")
    shapes = {
        (kind, tile._replace(tiles=1))
        for kind in chosen
        for size_class in range(len(SIZES_MB))
        for tile in candidates(kind, size_class)
    }
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        pool.starmap(compile_tile, sorted(shapes), chunksize=1)
    best: dict[str, list[Tile]] = {kind: [] for kind in chosen}
    rows = []
    for kind, case in chosen.items():
        for size_class, size_mb in enumerate(SIZES_MB):
            times = measure(case, size_mb, candidates(kind, size_class))
            fastest = min(times, key=lambda tile: times[tile])
            best[kind].append(fastest)
            rows += [
                {"kind": kind, "size_mb": size_mb, "tile": tile, "us": t}
                for tile, t in times.items()
            ]
            print(f"{kind} {size_mb} MB: {tuple(fastest)} {times[fastest]:.1f} us")
    if arguments.write:
        write_table(best)
    write_report(arguments.out, "tune_kernels", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
