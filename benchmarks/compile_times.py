"""How long Triton takes to compile the kernels of communication, by number of messages; no GPU.

Compiles for Hopper (sm_90) with Triton's own compiler and assembler, into an empty cache, what a
first step on so many nodes or ranks of a node would compile: `cpu s` is processor time, that of
processes Triton starts included. A kernel of which an earlier line needs the same variant takes no
time. Values, and the number of rows, are no part of a variant. Example::

    python benchmarks/compile_times.py --messages 2,8,32,128,1000
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

import no_gpu
import torch
from common import table, write_report
from torch import Tensor
from triton.runtime.jit import JITFunction

from lq_lightning.codecs import CodecSpec
from lq_lightning.data_parallel import GradientQuantization, WeightQuantization
from lq_lightning.kernels.message.launch import TILES, UNROLLED_MESSAGES, Tile
from lq_lightning.kernels.message.triton_kernels import (
    launch_dequantize,
    launch_quantize,
    launch_requantize,
)

NUMEL = 1 << 16


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report.

    Attributes:
        kernel: And its formats.
        messages: That are summed.
        cpu_s: Processor time of the compiler; 0 if the variant was there.
        wall_s: Time by the clock, which other work on the machine adds to.
    """

    kernel: str
    messages: int
    cpu_s: float
    wall_s: float


def rows_of(spec: CodecSpec, *shape: int) -> Tensor:
    """Return zeros as messages."""
    return torch.zeros(*shape, spec.nbytes(NUMEL), dtype=torch.uint8)


def tile_of(kind: str, group_size: int = 1) -> Tile:
    """Return the tile of a large launch on an H200; ``message.launch.choose_tile``."""
    tile = Tile(*TILES[kind][-1])
    factor = max(1, group_size // tile.block)
    return Tile(tile.block * factor, tile.run, tile.warps * factor, max(1, tile.tiles // factor))


def cases(messages: int) -> dict[str, Callable[[], None]]:
    """Return launches of every kernel whose number of messages or rows nodes and ranks decide."""
    gradients = GradientQuantization()
    intra, inter = gradients.codec("intra"), gradients.codec("inter")
    words = gradients.codec("inter", vocabulary=True)
    weights = WeightQuantization().codec()
    noisy = replace(inter, rounding="stochastic")
    values, bf16 = torch.zeros(1, NUMEL), torch.zeros(messages, NUMEL, dtype=torch.bfloat16)
    summed = "reduce 32" if messages > 1 else "dequantize 32 hadamard"
    again = "requantize" if messages <= UNROLLED_MESSAGES else "requantize many"

    def encode(spec: CodecSpec) -> None:
        out, tile = rows_of(spec, messages), tile_of("quantize 32 hadamard", spec.block_multiple)
        x = values.expand(messages, -1)
        launch_quantize(x, None, spec.message_format, 7, out, tile=tile)

    def difference() -> None:
        out, tile = rows_of(weights, 1), tile_of("difference 16", weights.block_multiple)
        launch_quantize(bf16[:1], bf16[:1], weights.message_format, 7, out, tile=tile)

    def reduce(spec: CodecSpec, add: bool) -> None:
        of, tile = rows_of(spec, messages, 1), tile_of(summed)
        launch_dequantize(of, NUMEL, spec.message_format, 1.0, add, values, tile=tile)

    def requantize(target: CodecSpec) -> None:
        of, out, tile = rows_of(intra, messages, 1), rows_of(target, 1), tile_of(again, 128)
        formats = intra.message_format, target.message_format
        launch_requantize(of, NUMEL, *formats, 7, out, tile=tile)

    def decode() -> None:
        of, tile = rows_of(weights, 1, messages), tile_of("dequantize 16 add")
        launch_dequantize(of, NUMEL, weights.message_format, 1.0, True, bf16, tile=tile)

    return {
        "encode gradients, 8 bits": lambda: encode(intra),
        "encode gradients, 4 bits": lambda: encode(inter),
        "encode weight differences": difference,
        "decode and add weight differences": decode,
        "sum gradients, 8 bits": lambda: reduce(intra, False),
        "sum and add gradients, 4 bits": lambda: reduce(inter, True),
        "sum and encode": lambda: requantize(inter),
        "sum and encode, stochastic": lambda: requantize(noisy),
        "encode gradients of embeddings": lambda: encode(words),
        "sum and add gradients of embeddings": lambda: reduce(words, True),
        "sum and encode those of embeddings": lambda: requantize(words),
    }


def main() -> None:
    """Compile everything that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", default="2,8,32,128,1000")
    parser.add_argument("--only", default="", help="kernels with this in their name")
    parser.add_argument("--json", help="file for the report")
    args = parser.parse_args()
    no_gpu.use()
    launch: Any = JITFunction.run
    compiled: list[Any] = []

    def run(self: Any, *values: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(launch(self, *values, grid=grid, warmup=True, **options))

    JITFunction.run = run
    rows, known = [], set()
    for messages in map(int, args.messages.split(",")):
        for kernel, case in cases(messages).items():
            if args.only not in kernel:
                continue
            wall, cpu = time.perf_counter(), sum(os.times()[:4])
            case()
            wall, cpu = time.perf_counter() - wall, sum(os.times()[:4]) - cpu
            new = id(compiled[-1]) not in known
            known.add(id(compiled[-1]))
            rows.append(Row(kernel, messages, new * cpu, new * wall))
    lines = [
        [row.kernel, row.messages, *(f"{s:.1f}" if s else "-" for s in (row.cpu_s, row.wall_s))]
        for row in sorted(rows, key=lambda row: row.kernel)
    ]
    print(table(lines, ["kernel", "messages", "cpu s", "s"]))
    write_report(args.json, "compile_times", {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
