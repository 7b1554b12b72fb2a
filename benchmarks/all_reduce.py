"""Time the 8-bit all-reduce against NCCL's own in fp32 and bf16, in one run.

Each path averages a bucket of fp32 gradients, as a DDP hook does: `quantized` with
`QuantizedAllReduce`, `fp32` with one all-reduce, `bf16` casts to bf16, reduces and casts back.
Before a size is timed, the quantized result is compared with the fp32 one and between ranks.
Examples::

    benchmarks/nodes.sh -r 10gbit -n 2 -g 2 benchmarks/all_reduce.py --node-size 2
    torchrun --nproc-per-node 4 benchmarks/all_reduce.py --json all_reduce.json
    torchrun --nproc-per-node 2 benchmarks/all_reduce.py --cpu --sizes 64K,1M

`parts_ms` splits `quantized` as AGoQ's table 4 does: all-to-all, codes (quantize, sum, dequantize)
and all-gather. `--scatter` takes sizes of reduce-scatters to time, too, as in SDP4Bit's table 4:
NCCL's in fp32, the paper's two levels (TLq-HS) with the transform in the codec's kernels or before
and after them, its ablations, and what QuanGrad sends.

Each size and path gets up to `--seconds` of measurement, at least two timed calls. Times are those
of the slowest rank. `crossover_nbytes` in the report is the smallest size from which on the
quantized path is never slower than fp32: the threshold for `min_nbytes`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import cache, partial
from typing import Any
from unittest import mock

import network
import torch
import torch.distributed as dist
from common import argument_parser, synchronize, table, write_report
from job import Clock, add_group_arguments, over_ranks, process_group
from torch import Tensor

from lq_lightning._compat.torch import reduce_scatter_flat
from lq_lightning.data_parallel import (
    GradientQuantization,
    QuantizedAllReduce,
    Topology,
    all_reduce,
)
from lq_lightning.data_parallel.reduce_scatter import LevelLayouts, TwoLevelReduceScatter
from lq_lightning.data_parallel.unit import MessageLayout, Run, Unit, UnitContext
from lq_lightning.foundation.groups import RankGroups

Row = dict[str, Any]

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
SIZES = "64K,256K,1M,4M,16M,64M,256M,1G"
MAX_ERROR, FP32 = 0.02, torch.float32


def parse_size(text: str) -> int:
    """Read a number of bytes such as ``64K``, ``1M`` or ``1G``."""
    unit = UNITS.get(text[-1].upper())
    return int(text) if unit is None else int(text[:-1]) * unit


def average_fp32(x: Tensor) -> None:
    """Average in place with one all-reduce."""
    dist.all_reduce(x.div_(dist.get_world_size()))


def average_bf16(x: Tensor) -> None:
    """Average in place with one all-reduce of bf16."""
    half = x.div(dist.get_world_size()).bfloat16()
    dist.all_reduce(half)
    x.copy_(half)


def time_call(call: Callable[[], None]) -> float:
    """Return the seconds that the slowest rank takes from a common start."""
    dist.barrier()
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return over_ranks([time.perf_counter() - start], dist.ReduceOp.MAX)[0]


def measure(call: Callable[[], None], budget_s: float) -> list[float]:
    """Return the times of at least two calls, or as many, up to 30, as the budget allows."""
    first = time_call(call)
    if first < budget_s / 3:  # else a warm-up call costs too much and matters too little
        first = time_call(call)
    count = max(2, min(30, int(budget_s / first)))
    return [time_call(call) for _ in range(count)]


def check(x: Tensor, reduce: QuantizedAllReduce) -> float:
    """Return the relative error of the quantized mean; every rank must have the same bits.

    Raises:
        AssertionError: Ranks differ, or the error is too large.
    """
    exact, quantized = x.clone(), x.clone()
    average_fp32(exact)
    reduce.average_(quantized)
    error = float((quantized - exact).norm() / exact.norm())
    bits = quantized.view(torch.int32)
    sums = torch.stack([bits.sum(dtype=torch.int64), (bits >> 7).sum(dtype=torch.int64)])
    low, high = sums.clone(), sums.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    if not torch.equal(low, high):
        raise AssertionError(f"{x.numel()} elements: ranks hold different means")
    if not error < MAX_ERROR:
        raise AssertionError(f"{x.numel()} elements: relative error {error}")
    return error


# --- parts ----------------------------------------------------------------------------------------

PARTS = {
    "all_to_all": ("_all_to_all",),
    "codes": ("encode", "decode_reduce_encode", "decode_reduce"),
    "all_gather": ("_all_gather",),
}


@contextmanager
def timed_parts(clock: Clock, order: list[str]) -> Iterator[None]:
    """Mark the clock before and after each part of a quantized all-reduce, and keep the order."""

    def timed(part: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        clock.mark()
        found = call(*arguments, **options)
        clock.mark()
        order.extend((part, "rest"))
        return found

    with ExitStack() as stack:
        for part, names in PARTS.items():
            for name in names:
                wrapper = partial(timed, part, getattr(all_reduce, name))
                stack.enter_context(mock.patch.object(all_reduce, name, wrapper))
        yield


def measure_parts(x: Tensor, reduce: QuantizedAllReduce, calls: int) -> dict[str, float]:
    """Return the milliseconds of each part on the slowest rank, the least of some calls."""
    found = dict.fromkeys(PARTS, float("inf"))
    for _ in range(calls):
        clock, order = Clock(x.device), list[str]()
        dist.barrier()
        with timed_parts(clock, order):
            reduce.average_(x)
        spent = dict.fromkeys([*PARTS, "rest"], 0.0)
        for part, seconds in zip(order, clock.take(), strict=False):
            spent[part] += 1e3 * seconds
        found = {part: min(found[part], spent[part]) for part in PARTS}
    return dict(zip(found, over_ranks(list(found.values()), dist.ReduceOp.MAX), strict=True))


# --- reduce-scatter -------------------------------------------------------------------------------

METHODS = {
    "TLq-HS": GradientQuantization(),
    "TLq-HS, transform apart": GradientQuantization(method="TLq"),
    "TLq": GradientQuantization(method="TLq"),
    "ULq": GradientQuantization(method="ULq"),
    "QuanGrad": GradientQuantization(method="QuanGrad"),
}


@cache
def _hadamard(device: torch.device) -> Tensor:
    h = torch.ones(1, 1, device=device)
    for _ in range(5):
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h / 32**0.5


def transform(x: Tensor) -> None:
    """Replace runs of 32 values by their Hadamard transform, whose inverse is the same."""
    runs = x.view(-1, 32)
    runs.copy_(runs @ _hadamard(x.device))


def scatter_of(
    name: str, topology: Topology, device: torch.device
) -> Callable[[Tensor, Tensor], None]:
    """Return what reduces ``[W * n]`` gradients to the ``[n]`` of this rank; spoils its input."""
    if dist.group.WORLD is None:
        raise AssertionError("there is a default process group")
    groups = RankGroups.of(topology, dist.group.WORLD, device)
    context = UnitContext(topology, groups, 0, frozenset(), 1)
    unit = Unit(name="all", index=0, params=list, names=(), context=context)
    config, apart = METHODS[name], name.endswith("apart")
    scatter = TwoLevelReduceScatter(config, unit)

    def call(gradients: Tensor, out: Tensor) -> None:
        runs = [Run(0, out.numel(), True)]
        levels = (MessageLayout(runs, [config.codec(kind)], FP32) for kind in ("intra", "inter"))
        if apart:
            transform(gradients)
        slots, scale = gradients.view(1, -1), 1 / topology.world_size
        scatter._reduce(slots, [out], LevelLayouts(*levels), scale, False)
        if apart:
            transform(out)

    return call


def measure_scatter(nbytes: int, args: argparse.Namespace, device: torch.device) -> Row:
    """Time reduce-scatters of one size, of values with outliers, and compare their results."""
    world, rank = dist.get_world_size(), dist.get_rank()
    topology = Topology(world_size=world, rank=rank, node_size=args.node_size or world)
    generator = torch.Generator(device).manual_seed(rank)
    numel = nbytes // 4 // world // 128 * 128
    x = torch.randn(world * numel, device=device, generator=generator).pow_(3)
    exact, out = (torch.empty(numel, device=device) for _ in range(2))
    row: Row = {"nbytes": nbytes, "ms": {}, "relative_error": {}}

    def plain() -> None:
        reduce_scatter_flat(exact, x, dist.group.WORLD)

    row["ms"]["fp32"] = 1e3 * statistics.median(measure(plain, args.seconds))
    exact /= world
    for name in METHODS:
        call, spoiled = scatter_of(name, topology, device), x.clone()
        call(spoiled, out)
        sums = [float((out - exact).double().square().sum()), float(exact.double().square().sum())]
        error, norm = over_ranks(sums, dist.ReduceOp.SUM)
        row["relative_error"][name] = (error / norm) ** 0.5
        times = measure(partial(call, spoiled, out), args.seconds)
        row["ms"][name] = 1e3 * statistics.median(times)
    return row


def scatter_table(rows: list[Row]) -> str:
    """Lay out reduce-scatters."""
    cells = [
        [
            f"{row['nbytes'] / 2**20:g} MiB, {name}",
            f"{ms:.3f}",
            f"{row['ms']['fp32'] / ms:.2f}",
            f"{100 * row['relative_error'].get(name, 0):.2f}",
        ]
        for row in rows
        for name, ms in row["ms"].items()
    ]
    return table(cells, ["reduce-scatter", "ms", "speedup", "error %"])


# --- all-reduce -----------------------------------------------------------------------------------


def measure_size(nbytes: int, args: argparse.Namespace, device: torch.device) -> Row:
    """Check and time all paths for one size."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    x = torch.randn(nbytes // 4, device=device, generator=generator)
    reduce = args.reduce
    error = check(x, reduce)
    paths = {
        "fp32": lambda: average_fp32(x),
        "bf16": lambda: average_bf16(x),
        "quantized": lambda: reduce.average_(x),
    }
    times = {name: measure(call, args.seconds) for name, call in paths.items()}
    ms = {name: 1e3 * statistics.median(t) for name, t in times.items()}
    return {
        "nbytes": nbytes,
        "ms": ms,
        "parts_ms": measure_parts(
            x, reduce, max(2, min(5, int(args.seconds / min(times["quantized"]))))
        ),
        "ms_min": {name: 1e3 * min(t) for name, t in times.items()},
        "calls": {name: len(t) for name, t in times.items()},
        "relative_error": error,
        "speedup": ms["fp32"] / ms["quantized"],
    }


def crossover(rows: list[Row]) -> int | None:
    """Return the smallest size from which on the quantized path is never slower; None if none."""
    found = None
    for row in sorted(rows, key=lambda row: row["nbytes"], reverse=True):
        if row["speedup"] < 1:
            break
        found = row["nbytes"]
    return found


def main() -> None:
    """Measure, print tables on rank 0, write JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("--sizes", default=SIZES, help=f"bytes of fp32 (default {SIZES})")
    parser.add_argument("--scatter", default="", help="bytes of fp32 of reduce-scatters")
    parser.add_argument("--node-size", type=int, help="ranks per node (default: by host)")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each size and path")
    parser.add_argument("--rates", default="", help="network rates, set in turn; needs nodes.sh")
    add_group_arguments(parser)
    args = parser.parse_args()
    kinds = {measure_size: args.sizes, measure_scatter: args.scatter}
    with process_group(args) as device:
        args.reduce = QuantizedAllReduce(min_nbytes=0, node_size=args.node_size)
        found: dict[str, list[list[Row]]] = {}
        for rate in args.rates.split(",") if args.rates else [""]:
            if rate:
                network.set_rate(rate)
            label = rate or os.environ.get("LQ_EMULATED_RATE", "not emulated")
            found[label] = [
                [
                    measured(parse_size(text), args, device)
                    for text in filter(None, sizes.split(","))
                ]
                for measured, sizes in kinds.items()
            ]
            if dist.get_rank() == 0:
                print(f"network: {label}\n{reduce_table(found[label][0])}")
                print(scatter_table(found[label][1]), flush=True)
                report(found, args)


def reduce_table(rows: list[Row]) -> str:
    """Lay out all-reduces."""
    cells = [
        [
            f"{row['nbytes'] / 2**20:g} MiB",
            *(f"{row['ms'][name]:.3f}" for name in ("fp32", "bf16", "quantized")),
            *(f"{row['parts_ms'][name]:.3f}" for name in PARTS),
            f"{row['speedup']:.2f}",
            f"{row['ms']['bf16'] / row['ms']['quantized']:.2f}",
            f"{100 * row['relative_error']:.2f}",
        ]
        for row in rows
    ]
    header = ["size", "fp32 ms", "bf16 ms", "8-bit ms", *PARTS, "vs fp32", "vs bf16", "error %"]
    return table(cells, header)


def report(found: dict[str, list[list[Row]]], args: argparse.Namespace) -> None:
    """Write the JSON file."""
    codec = args.reduce.codec
    rows = [
        {"rate": rate, "kind": kind} | row
        for rate, kinds in found.items()
        for kind, of_kind in zip(("all-reduce", "reduce-scatter"), kinds, strict=True)
        for row in of_kind
    ]
    write_report(
        args.json,
        "all_reduce",
        {
            "world_size": dist.get_world_size(),
            "node_size": args.node_size,
            "backend": dist.get_backend(),
            "codec": asdict(codec),
            "bits_per_element": codec.bits_per_element(1 << 20),
            "crossover_nbytes": {rate: crossover(kinds[0]) for rate, kinds in found.items()},
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
