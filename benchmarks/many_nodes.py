"""What the host does for one unit on 2, 8, 32 and 128 nodes, in one process without a network.

One rank of each world exists; its collectives move nothing (torch's "fake" backend). A model that
FSDP2 shards takes training steps, in which everything that torch dispatches is counted: launches of
our kernels, collectives, views, other operators, and the bytes of new tensors. Then the collectives
of one unit are called by themselves: an exchange of weight differences, a reduction of gradients,
and a gather that reads the replica (outside of a forward pass, so with a vote on outside writes:
its only collective unless a node shares the replica); and the hook of DDP that averages a bucket in
8 bits. Our kernels are replaced by nothing, and for
`us` buffers have no memory (torch's "meta" device), so that this is what the host does around them:
thread time, the least of many calls. Launching a kernel takes as long for any number of nodes.
Examples::

    python benchmarks/many_nodes.py --json benchmarks/results/many_nodes.json
    python benchmarks/many_nodes.py --nodes 2,32 --gpus 1 --replica node
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from common import table, write_report
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from lq_lightning._compat.fsdp2 import PackedGradients
from lq_lightning.codecs import functional
from lq_lightning.data_parallel import (
    GradientQuantization,
    QuantizedAllReduce,
    QuantizedCommunication,
    Topology,
    WeightQuantization,
    quantize_communication,
    replica,
)

OPERATORS = ("quantize_out", "dequantize_out", "requantize_out")
UNITS = 4
BUCKET_NUMEL = 1 << 22  # a multiple of the slots of all ranks, else its end is encoded apart


@dataclass(slots=True)
class Counts:
    """What one stretch of the program had the host do.

    Attributes:
        kernels: Launches of kernels of this package.
        collectives: Collectives.
        views: Operators that return views.
        others: Other operators of torch.
        new_bytes: Of tensors that were made.
    """

    kernels: int = 0
    collectives: int = 0
    views: int = 0
    others: int = 0
    new_bytes: int = 0


class Counter(TorchDispatchMode):
    """Counts what torch dispatches while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count one operator and run it."""
        result = func(*args, **(kwargs or {}))
        aliases = [r.alias_info for r in func._schema.returns]
        if func.namespace == "c10d":
            self.counts.collectives += 1
        elif func.namespace == "lq_lightning":
            self.counts.kernels += 1
        elif any(alias is not None and not alias.is_write for alias in aliases):
            self.counts.views += 1
        else:
            self.counts.others += 1
        made = result if isinstance(result, (tuple, list)) else [result]
        if func.namespace != "c10d" and not any(aliases):
            self.counts.new_bytes += sum(t.nbytes for t in made if isinstance(t, Tensor))
        return result

    def of(self, call: Callable[[], object]) -> Counts:
        """Return the counts of one call."""
        self.counts = Counts()
        with self:
            call()
        counts, self.counts = self.counts, Counts()
        return counts

    def kernel(self, *_: object) -> None:
        """Take the place of a kernel."""
        self.counts.kernels += 1

    def checksums(self, tensors: Sequence[Tensor]) -> Tensor:
        """Take the place of the kernel that reads all shards at once."""
        self.counts.kernels += 1
        return torch.zeros(len(tensors), dtype=torch.int64)


class Block(nn.Module):
    """Two linear layers behind a norm: what a unit has of large and of small tensors.

    What of it travels in full precision is no multiple of 16 bytes on any number of ranks up to
    1024. Otherwise two operators that write zeros behind it come and go with that number.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., width]`` to the same."""
        down: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + self.gain * down


@dataclass(frozen=True, slots=True)
class Variant:
    """Which collectives are quantized.

    Attributes:
        name: For the report.
        weights: Of gathers; None is FSDP2's own.
        gradients: Of reductions; None is FSDP2's own.
    """

    name: str
    weights: WeightQuantization | None
    gradients: GradientQuantization | None


@dataclass(slots=True)
class Row:
    """One line of the report.

    Attributes:
        variant: Its name.
        nodes: In the world.
        part: A whole training step, or one collective of one unit.
        counts: Of that.
        us: Host time; 0 where it was not measured.
        setup_ms: Time of installing the collectives in the whole model.
    """

    variant: str
    nodes: int
    part: str
    counts: Counts
    us: float
    setup_ms: float


def build(width: int, nodes: int, gpus: int, variant: Variant) -> tuple[Any, Any, Any, float]:
    """Make a model of ``UNITS`` blocks for a world, its optimizer and its collectives."""
    model = nn.Sequential(*[Block(width) for _ in range(UNITS)])
    mesh = init_device_mesh("cpu", (nodes * gpus,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    start = time.perf_counter()
    communication = quantize_communication(
        model,
        weights=variant.weights,
        gradients=variant.gradients,
        topology=Topology.of(mesh, node_size=gpus),
    )
    setup_ms = (time.perf_counter() - start) * 1e3
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    communication.register_optimizer(optimizer)
    return model, optimizer, communication, setup_ms


def count_step(model: Any, optimizer: Any, width: int, counter: Counter) -> Counts:
    """Count all that a training step dispatches, after two that make what is made once."""

    def step() -> None:
        model(torch.zeros(2, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    return counter.of(step)


def unit_calls(
    communication: QuantizedCommunication, hook: QuantizedAllReduce, device: str
) -> dict[str, Callable[[], object]]:
    """Return the collectives of the first block, by name, to be called again and again.

    Args:
        communication: What has the block.
        hook: Of DDP.
        device: Of the buffers. On "meta" there is nothing in them to work on.
    """
    unit = communication._units[1]  # the root comes first
    gather: Any = unit.gather
    scatter: Any = unit.scatter
    world, group = communication.topology.world_size, communication.group
    params = scatter.unit.params()
    numel = sum(p.padded_shard_numel for p in params)
    slots, output = torch.empty(world * numel, device=device), torch.empty(numel, device=device)
    gathered = torch.empty(world * numel, device=device)
    gather.replica.values = gather.replica.values.to(device)
    gather.replica.own = gather.replica.values.view(-1, numel)[0]
    packed = PackedGradients(tuple(range(len(params))), False)

    def reduce() -> None:
        scatter.expect(packed)
        scatter(output, slots, group, dist.ReduceOp.AVG)

    def exchange() -> None:
        started = gather.start_exchange()
        gather.finish_exchange(started, gather.send_exchange(started))

    def read() -> None:
        rank = communication.topology.rank
        gather(gathered, gathered[rank * numel : (rank + 1) * numel], group)

    bucket = torch.empty(BUCKET_NUMEL, device=device)
    return {
        "reduction": reduce,
        "exchange": exchange,
        "gather": read,
        "DDP's bucket": lambda: hook.average_(bucket),
    }


def measure(
    width: int, nodes: int, gpus: int, rank: int, variant: Variant, repeats: int
) -> list[Row]:
    """Count and time one variant in one world."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=nodes * gpus)
    counter = Counter()
    try:
        with (
            mock.patch.multiple(functional, **dict.fromkeys(OPERATORS, counter.kernel)),
            mock.patch.object(replica, "checksums", counter.checksums),
        ):
            model, optimizer, communication, setup_ms = build(width, nodes, gpus, variant)
            counts = count_step(model, optimizer, width, counter)
            rows = [Row(variant.name, nodes, "step", counts, 0.0, setup_ms)]
            if variant.weights is None or variant.gradients is None:
                return rows
            hook = QuantizedAllReduce(node_size=gpus)
            for part, call in unit_calls(communication, hook, "cpu").items():
                call()  # the first one makes groups
                row = Row(variant.name, nodes, part, counter.of(call), 0.0, setup_ms)
                rows.append(row)
            calls = unit_calls(communication, hook, "meta")
            for row in rows[1:]:
                if row.part != "gather" or variant.weights.replica == "full":  # which moves nothing
                    row.us = least_us(calls[row.part], repeats)
            return rows
    finally:
        dist.destroy_process_group()


def least_us(call: Callable[[], object], repeats: int) -> float:
    """Return the least thread time of a call, which what else the machine does cannot add to."""
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        call()
        best = min(best, time.thread_time() - start)
    return best * 1e6


def main() -> None:
    """Run all worlds and variants that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", default="2,8,32,128")
    parser.add_argument("--gpus", type=int, default=8, help="ranks of one node")
    parser.add_argument("--rank", type=int, help="of the world; by default one in its middle")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--replica", choices=("full", "node"), default="full")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", help="file for the report")
    args = parser.parse_args()
    torch.set_num_threads(1)
    weights = WeightQuantization(replica=args.replica)
    quantized = Variant("quantized", weights, GradientQuantization())
    rows: list[Row] = []
    for variant in (Variant("fsdp2", None, None), quantized):
        for nodes in map(int, args.nodes.split(",")):
            rank = nodes * args.gpus // 2 if args.rank is None else args.rank
            rows += measure(args.width, nodes, args.gpus, rank, variant, args.repeats)
    header = ["variant, part", "nodes", "kernels", "collectives", "views", "others", "new MB", "us"]
    lines = [
        [
            f"{row.variant}, {row.part}",
            *(row.nodes, row.counts.kernels, row.counts.collectives, row.counts.views),
            *(
                row.counts.others,
                f"{row.counts.new_bytes / 1e6:.2f}",
                f"{row.us:.0f}" if row.us else "-",
            ),
        ]
        for row in sorted(rows, key=lambda row: (row.variant, row.part))
    ]
    print(table(lines, header))
    setup = {row.nodes: row.setup_ms for row in rows if row.part == "step"}
    print("installed in ms, by nodes:", {n: round(ms, 1) for n, ms in setup.items()})
    write_report(args.json, "many_nodes", {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
