"""Tables of papers, planned: SDP4Bit's table 2 and figure 7, AGoQ's 2, 8, 14, COAT's 7.

    python benchmarks/plan_papers.py --json papers.json         # minutes on two cores, no GPU
    python benchmarks/plan_papers.py --only COAT --row "7B, 4 GPUs"

Only shapes are needed, so that runs on 128 GPUs are simulated here. No number is fitted: clusters
have the rates that the papers name, and the shares of them that were measured elsewhere.
``overlap`` is the step as it would run here. ``serial`` adds up communication and computation of
the same plan, as in Megatron without overlap.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from common import argument_parser, choices, table, write_report
from planned_runs import Run

from lq_lightning import GradientQuantization, WeightQuantization

GB = 1e9
# Megatron's distributed optimizer: gathered once per step, gradients reduced in fp32.
MEGATRON = {"weights": "none", "gradients": "none", "reshard_after_forward": False}
SDP4BIT = {
    "weights": WeightQuantization(code="int", group_size=2048),
    "gradients": GradientQuantization(vocabulary_bits=None),
}
FSDP = {"weights": "none", "gradients": "none"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Nodes of a paper: GPUs as in the package's table but for products in bf16, and links.

    ``bf16`` is operations per second of large products, ``within`` bytes per second of a GPU to
    others in its node, ``between`` of a node to others.
    """

    gpu: str
    per_node: int
    bf16: float
    within: float
    between: float
    nvlink: bool = True

    def machine(self, gpus: int) -> Any:
        """Return as many nodes as have these GPUs."""
        from lq_lightning.planning.machine import GPUS, Link, Machine

        known = GPUS[self.gpu]
        share = self.bf16 / known.products["bfloat16"]
        gpu = replace(known, products={name: share * r for name, r in known.products.items()})
        nodes = max(1, gpus // self.per_node)
        return Machine(
            gpu=gpu,
            gpus_per_node=min(gpus, self.per_node),
            nodes=nodes,
            within_node=Link(bytes_per_s=self.within, latency_s=10e-6, error=0.1),
            between_nodes=Link(bytes_per_s=self.between, latency_s=20e-6, error=0.1),
            nvlink=self.nvlink,
            source="a paper's cluster",
        )


CLUSTERS = {
    "A100": Cluster(gpu="A100-40", per_node=4, bf16=212e12, within=237e9, between=12.5e9),
    # NVLink of 400 GB/s, 8 links of InfiniBand of 3.2 Tb/s in all
    "H800": Cluster(gpu="H100", per_node=8, bf16=672e12, within=158e9, between=360e9),
    # A6000 of PCIe 4, 200 Gb/s InfiniBand; products and all-gathers of AGoQ's table 5
    "A6000": Cluster(
        gpu="L40S", per_node=8, bf16=125e12, within=17.3e9, between=22.5e9, nvlink=False
    ),
    "H100": Cluster(gpu="H100", per_node=8, bf16=672e12, within=338e9, between=360e9),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A number of a paper, what to plan for it, and what of the plans it is.

    ``reads_time`` is whether overlap changes it.
    """

    table: str
    name: str
    value: float
    unit: str
    cluster: str
    runs: tuple[Run, ...]
    of: Callable[..., float]
    reads_time: bool = False


# --- plans ----------------------------------------------------------------------------------------


@dataclass
class Simulated:
    """A run as simulated, from which machines are read quickly."""

    run: Run
    simulation: Any

    def allocated(self, machine: Any) -> float:
        """Peak bytes of the largest rank."""
        return max(peak.allocated_nbytes for peak in self.simulation.memory(machine))

    def kind(self, name: str, machine: Any) -> float:
        """Bytes of a kind of memory, where it is most within the last step."""
        return float(self.simulation.memory(machine)[0].most.get(name, 0))

    def seconds(self, machine: Any, reading: str) -> float:
        """Time of a step with overlap, or of all its parts one after another."""
        step = self.simulation.step_time(machine)
        if reading == "overlap":
            return float(step.seconds)
        own = [seconds for name, seconds in step.parts.items() if not name.startswith("exposed")]
        within = step.sent_within_nbytes / machine.gpus_per_node / machine.within_node.bytes_per_s
        between = step.sent_between_nbytes / machine.between_nodes.bytes_per_s
        return float(sum(own) + within + between)


@cache
def simulated(key: str) -> Simulated:
    """Simulate a run, once; ``key`` is its JSON and cluster."""
    from lq_lightning.planning.config import python_program
    from lq_lightning.planning.plan import Simulations

    run, cluster = _RUNS[key]
    began = time.perf_counter()
    found = Simulations(
        run=python_program(run.module, run.trainer()),
        batch=next(iter(run.data(1))),
        origin="the table",
        machine=CLUSTERS[cluster].machine(run.gpus),
    )()
    print(f"  {time.perf_counter() - began:.0f} s: {run}", file=sys.stderr, flush=True)
    return Simulated(run, found)


_RUNS: dict[str, tuple[Run, str]] = {}


def plans(row: Row) -> list[Simulated]:
    """Return the simulated runs of a row."""
    found = []
    for run in row.runs:
        key = f"{row.cluster} {run}"
        _RUNS[key] = run, row.cluster
        found.append(simulated(key))
    return found


# --- rows -----------------------------------------------------------------------------------------


def _ratio(machine: Any, reading: str, plain: Simulated, coded: Simulated) -> float:
    return plain.seconds(machine, reading) / coded.seconds(machine, reading)


def _milliseconds(machine: Any, reading: str, run: Simulated) -> float:
    return 1e3 * run.seconds(machine, reading)


def _allocated(unit: float) -> Callable[..., float]:
    return lambda machine, reading, run: run.allocated(machine) / unit


def _kind(name: str) -> Callable[..., float]:
    return lambda machine, reading, run: run.kind(name, machine) / GB


def _speed(machine: Any, reading: str, run: Simulated) -> float:
    return run.run.tokens / run.run.gpus / run.seconds(machine, reading)


def sdp4bit() -> Iterator[Row]:
    """Speedups of table 2, and means of figure 7, whose points are only drawn."""
    speedups = {
        "A100": {"1.3B": 2.39, "2.7B": 2.43, "6.7B": 3.44, "13B": 2.68, "18B": 2.92},
        "H800": {"1.3B": 1.53, "2.7B": 1.63, "6.7B": 2.97, "13B": 3.85, "18B": 4.08},
    }

    def runs(size: str, cluster: str, gpus: int) -> tuple[Run, Run]:
        parts = {"6.7B": (4, 1), "13B": (4, 2), "18B": (4, 2)}.get(size, (1, 1))
        if cluster == "H800" and parts[1] == 2:
            parts = 8, 1
        nodes = gpus // CLUSTERS[cluster].per_node
        own = {"model": f"GPT-{size}", "gpus": gpus, "nodes": nodes, "seq": 2048}
        own |= {"tensor_parallel": parts[0], "stages": parts[1], "precision": "bf16-mixed"}
        exact = {} if parts[1] == 1 else {"forward_codec": "bf16", "backward_codec": "bf16"}
        return Run(**own, options=MEGATRON | exact), Run(**own, options=SDP4BIT | exact)

    for cluster, sizes in speedups.items():
        for size, value in sizes.items():
            gpus = 16 * CLUSTERS[cluster].per_node
            yield Row(
                table="SDP4Bit 2", name=f"{size}, {gpus} {cluster}", value=value, unit="x",
                cluster=cluster, runs=runs(size, cluster, gpus), of=_ratio, reads_time=True,
            )  # fmt: skip
    means = {("6.7B", "A100"): 3.40, ("13B", "A100"): 2.49, ("6.7B", "H800"): 3.08}
    means |= {("13B", "H800"): 3.73}
    for (size, cluster), value in means.items():
        counts = [n for n in (16, 32, 64, 128) if n <= 16 * CLUSTERS[cluster].per_node][-3:]
        pairs = [runs(size, cluster, gpus) for gpus in counts]
        yield Row(
            table="SDP4Bit figure 7", name=f"{size}, mean of {counts} {cluster}", value=value,
            unit="x", cluster=cluster, runs=sum(pairs, ()), of=_mean_ratio, reads_time=True,
        )  # fmt: skip


def _mean_ratio(machine: Any, reading: str, *runs: Simulated) -> float:
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return statistics.mean(_ratio(machine, reading, *pair) for pair in pairs)


def agoq() -> Iterator[Row]:
    """Time of table 2, memory of tables 8 and 14."""
    full = {"precision": "bf16-mixed", "options": MEGATRON}
    coded = {"recipe": "agoq", "states": "dynamic8", "sums": "int8"}
    times = {
        32: (3, 37635, 36568), 40: (4, 51922, 45590), 48: (6, 67932, 57047), 56: (8, 88200, 69544),
        64: (8, 104444, 82519), 72: (10, 128085, 97615), 80: (10, 149667, 111422),
    }  # fmt: skip
    for k, (again, plain, quick) in times.items():
        own = {"model": "Llama-2-13B", "gpus": 64, "nodes": 8, "tensor_parallel": 8, "stages": 4}
        own |= {"seq": k << 10, "microbatches": 8}
        options = MEGATRON | {"forward_codec": "bf16", "backward_codec": "bf16"}
        base = Run(**own, recomputed=again, options=options)
        ours = Run(**own, **coded | {"sums": "none"}, options=options | {"gradients": "QuanGrad"})
        common = {"table": "AGoQ 2", "cluster": "A6000", "of": _milliseconds, "reads_time": True}
        yield Row(name=f"{k}K Megatron-LM", value=plain, unit="ms", runs=(base,), **common)
        yield Row(name=f"{k}K AGoQ", value=quick, unit="ms", runs=(ours,), **common)
    own = {"model": "Llama-2-13B", "gpus": 8, "tensor_parallel": 8, "seq": 12 << 10} | full
    own |= {"microbatches": 2}
    for name, value, codes in (
        ("Megatron-LM", 46.1, {}),
        ("O", 37.7, {"states": "dynamic8"}),
        ("O+G", 35.3, {"states": "dynamic8", "sums": "int8"}),
        ("A+O+G", 22.3, coded),
    ):
        yield Row(
            table="AGoQ 8", name=name, value=value, unit="GB", cluster="A6000",
            runs=(Run(**own | codes),), of=_allocated(GB),
        )  # fmt: skip
    for k, layers, plain, less in ((32, 36, 48606, 16594), (64, 16, 46681, 19267)):
        own = {"model": "Llama-3-8B", "layers": layers, "gpus": 8, "tensor_parallel": 8} | full
        for name, value, codes in (("baseline", plain, {}), ("AGoQ", less, coded)):
            run = Run(**own | codes, seq=k << 10, microbatches=2)
            yield Row(
                table="AGoQ 14", name=f"{k}K, {layers} layers, {name}", value=value, unit="MB",
                cluster="A6000", runs=(run,), of=_allocated(2.0**20),
            )  # fmt: skip


def coat() -> Iterator[Row]:
    """Memory of table 7, in total and by kind, and tokens per second and GPU."""
    memory = [  # model, GPUs, sequences; states, activations and all in GB: BF16, and COAT
        ("Llama-2-7B", 2, 2, None, (6.5, 16.9, 52.8)),
        ("Llama-2-7B", 4, 2, (13.1, 25.8, 55.1), (3.2, 16.9, 35.6)),
        ("Llama-2-7B", 8, 2, (6.5, 25.8, 41.2), (1.6, 16.9, 27.0)),
        ("Llama-2-13B", 4, 1, (25.1, 20.1, 76.1), (6.3, 13.2, 49.1)),
        ("Llama-2-13B", 8, 1, (12.6, 20.1, 49.4), (3.1, 13.2, 32.5)),
        ("Llama-30B", 8, 1, None, (7.8, 24.2, 70.5)),
    ]
    codes = {"recipe": "coat", "states": "expanded_fp8"}
    for model, gpus, batch, *both in memory:
        for name, values, how in zip(("BF16", "COAT"), both, ({}, codes), strict=True):
            if values is None:
                continue
            run = Run(model=model, gpus=gpus, batch=batch, options=FSDP, **how)
            kinds = ("optimizer states", "saved activations", "all")
            for kind, value in zip(kinds, values, strict=True):
                yield Row(
                    table="COAT 7", name=f"{model}, {gpus} GPUs, {name}: {kind}", value=value,
                    unit="GB", cluster="H100", runs=(run,),
                    of=_allocated(GB) if kind == "all" else _kind(kind),
                )  # fmt: skip
    speeds = [
        ("Llama-2-7B", 2, (1, 6130), (4, 11351)), ("Llama-2-7B", 4, (2, 7730), (4, 11257)),
        ("Llama-2-7B", 8, (4, 8238), (8, 11241)), ("Llama-2-13B", 4, (1, 2345), (2, 5295)),
        ("Llama-2-13B", 8, (2, 3907), (4, 5650)),
    ]  # fmt: skip
    for model, gpus, *both in speeds:
        for name, (batch, value), how in zip(("BF16", "COAT"), both, ({}, codes), strict=True):
            run = Run(model=model, gpus=gpus, batch=batch, options=FSDP, **how)
            yield Row(
                table="COAT 7 speed", name=f"{model}, {gpus} GPUs, {name}", value=value,
                unit="tokens/s", cluster="H100", runs=(run,), of=_speed, reads_time=True,
            )  # fmt: skip


TABLES: dict[str, Callable[[], Iterator[Row]]] = {"SDP4Bit": sdp4bit, "AGoQ": agoq, "COAT": coat}


# --- results --------------------------------------------------------------------------------------


def compare(row: Row) -> dict[str, Any]:
    """Return what is planned for a row, beside its value."""
    found: dict[str, Any] = {"table": row.table, "row": row.name, "unit": row.unit}
    found["paper"] = row.value
    machine = CLUSTERS[row.cluster].machine(row.runs[0].gpus)
    for reading in ("overlap", "serial") if row.reads_time else ("overlap",):
        planned = row.of(machine, reading, *plans(row))
        name = reading if row.reads_time else "planned"
        found |= {name: planned, f"{name}_off": planned / row.value - 1}
    return found


def shown(rows: list[Mapping[str, Any]]) -> str:
    """Return rows as a table."""

    def number(row: Mapping[str, Any], name: str) -> str:
        return f"{row[name]:,.2f} ({100 * row[name + '_off']:+.1f}%)" if name in row else ""

    cells = [
        [f"{r['table']}: {r['row']}", f"{r['paper']:,g} {r['unit']}",
         number(r, "planned") or number(r, "overlap"), number(r, "serial")]
        for r in rows if "error" not in r
    ]  # fmt: skip
    failed = [f"{r['table']}: {r['row']}: {r['error']}" for r in rows if "error" in r]
    return "\n".join([table(cells, ["", "paper", "planned", "one after another"]), *failed])


def main() -> None:
    """Plan the rows of the tables."""
    parser = argument_parser(__doc__)
    parser.add_argument("--only", default=",".join(TABLES), help="papers")
    parser.add_argument("--row", default="", help="rows whose table and name contain this")
    args = parser.parse_args()
    rows: list[Mapping[str, Any]] = []
    for paper in choices(parser, "papers", args.only, TABLES):
        for row in TABLES[paper]():
            if args.row not in f"{row.table}: {row.name}":
                continue
            try:
                rows.append(compare(row))
            except (ValueError, NotImplementedError, RuntimeError) as error:
                rows.append({"table": row.table, "row": row.name, "error": str(error)[-500:]})
            print(shown(rows[-1:]), flush=True)
            clusters = {name: asdict(cluster) for name, cluster in CLUSTERS.items()}
            write_report(args.json, "plan_papers", {"clusters": clusters, "rows": rows})
    print(shown(rows))


if __name__ == "__main__":
    main()
