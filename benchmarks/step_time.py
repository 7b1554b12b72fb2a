"""Time training steps of a GPT with plain FSDP2 and with quantized communication, in one run.

Raw torch, no Lightning; every variant gets the same model, data and optimizer. Examples::

    torchrun --nproc-per-node 4 benchmarks/step_time.py --json step_time.json
    torchrun --nproc-per-node 2 benchmarks/step_time.py --tiny
    benchmarks/nodes.sh -r 10gbit -n 2 -g 2 benchmarks/step_time.py --node-size 2

The default model has 1.41e9 parameters. Parameters travel in bf16 and gradients in fp32, FSDP2's
usual mixed-precision policy; `fsdp2-bf16-reduce` also reduces in bf16.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from common import table, write_report
from gpt import GPT, GPTConfig
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lq_lightning.data_parallel import (
    GradientQuantization,
    QuantizedCommunication,
    Topology,
    Traffic,
    WeightQuantization,
    quantize_communication,
)
from lq_lightning.data_parallel.traffic import ring_bytes

TINY = {"layers": 2, "hidden": 64, "heads": 2, "seq": 64, "vocab": 256}


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """What one timed configuration communicates, and how."""

    weights: WeightQuantization | None = None
    gradients: GradientQuantization | None = None
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    communicate: bool = True  # False: each rank trains its own unsharded copy


VARIANTS = {
    "fsdp2": Variant(),
    "fsdp2-bf16-reduce": Variant(reduce_dtype="bfloat16"),
    "quantized": Variant(weights=WeightQuantization(), gradients=GradientQuantization()),
    "quantized-node": Variant(
        weights=WeightQuantization(replica="node"), gradients=GradientQuantization()
    ),
    "weights-only": Variant(weights=WeightQuantization()),
    "gradients-only": Variant(gradients=GradientQuantization()),
    "no-communication": Variant(communicate=False),
}
DEFAULT_VARIANTS = [name for name in VARIANTS if name != "no-communication"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Measurements of one variant.

    Attributes:
        step_ms: Median over steps of the slowest rank's time.
        step_ms_min: Fastest step.
        step_ms_max: Slowest step.
        tokens_per_s: Tokens of all ranks per second, at the median.
        peak_memory_gib: Largest allocated device memory of any rank (NaN on a CPU).
        sent_bytes: Bytes that one rank sends in one step, counted by the collectives (mean over
            ranks).
        sent_inter_bytes: The part of them that leaves the node.
        interface_bytes: Bytes that this node's interface really sent in one step, with protocol
            overhead, over all ranks of the node; NaN without `nodes.sh`.
        first_loss: Loss of the first step.
        last_loss: Loss of the last step; a variant that trains differently shows here.
    """

    step_ms: float
    step_ms_min: float
    step_ms_max: float
    tokens_per_s: float
    peak_memory_gib: float
    sent_bytes: float
    sent_inter_bytes: float
    interface_bytes: float
    first_loss: float
    last_loss: float


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", default=",".join(DEFAULT_VARIANTS), help=", ".join(VARIANTS))
    parser.add_argument("--node-size", type=int, help="ranks per node (default: all on one node)")
    for name, value in asdict(GPTConfig()).items():
        parser.add_argument(f"--{name}", type=int, help=f"default {value}")
    parser.add_argument("--micro-batch", type=int, help="sequences per rank and step (default 8)")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can run")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each variant")
    parser.add_argument("--warmup", type=int, default=3, help="steps before timing starts")
    parser.add_argument("--cpu", action="store_true", help="gloo on the CPU even if there are GPUs")
    parser.add_argument("--keep-gathered", action="store_true", help="no reshard after forward")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one collective")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--trace", type=Path, help="folder for a profile of two steps per variant")
    args = parser.parse_args()
    args.variants = args.variants.split(",")
    unknown = [name for name in args.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"unknown variants {unknown}: choose among {', '.join(VARIANTS)}")
    given = {name: getattr(args, name) for name in asdict(GPTConfig())}
    given = {name: value for name, value in given.items() if value is not None}
    args.config = GPTConfig(**((TINY if args.tiny else {}) | given))
    args.micro_batch = args.micro_batch or (2 if args.tiny else 8)
    return args


class Job:
    """One variant on one rank: the sharded model, its optimizer and its data."""

    def __init__(self, variant: Variant, args: argparse.Namespace, device: torch.device) -> None:
        self.device = device
        rank, world_size = dist.get_rank(), dist.get_world_size()
        with torch.device("meta"):
            self.model = GPT(args.config)
        shards = world_size if variant.communicate else 1
        mesh = init_device_mesh(
            device.type, (world_size // shards, shards), mesh_dim_names=("i", "s")
        )
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, variant.reduce_dtype)
        )
        options: dict[str, Any] = {"mesh": mesh["s"], "mp_policy": policy}
        for block in self.model.blocks:
            fully_shard(block, **options, reshard_after_forward=not args.keep_gathered)
        fully_shard(self.model, **options)
        self.model.to_empty(device=device)
        self.model.reset_local_shards(seed=rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.topology = Topology(
            world_size=world_size, rank=rank, node_size=args.node_size or world_size
        )
        self.communication: QuantizedCommunication | None = None
        if variant.weights is not None or variant.gradients is not None:
            self.communication = quantize_communication(
                self.model,
                weights=variant.weights,
                gradients=variant.gradients,
                topology=self.topology,
            )
            self.communication.register_optimizer(self.optimizer)
        generator = torch.Generator().manual_seed(rank)
        shape = (4, args.micro_batch, args.config.seq)
        self.data = torch.randint(args.config.vocab, shape, generator=generator).to(device)
        self.steps = 0

    def step(self) -> Tensor:
        """Train one step; return the loss, still on the device."""
        loss: Tensor = self.model(self.data[self.steps % len(self.data)])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return loss.detach()


def time_steps(job: Job, count: int) -> tuple[list[float], list[Tensor]]:
    """Take ``count`` steps; return the seconds of each on this rank, and the losses.

    On CUDA the times lie between events on the stream, so the host runs ahead as in training.
    """
    losses: list[Tensor] = []
    if job.device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        torch.cuda.synchronize()
        marks[0].record()
        for mark in marks[1:]:
            losses.append(job.step())
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)], losses
    times = [time.perf_counter()]
    for _ in range(count):
        losses.append(job.step())
        times.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(times)], losses


def profile_steps(job: Job, path: Path) -> None:
    """Profile two steps on every rank and write rank 0's as a Chrome trace.

    Each step is marked by a `step` range, so that ``benchmarks/trace.py`` can find it.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if job.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(2):
            with torch.profiler.record_function("step"):
                job.step()
        if job.device.type == "cuda":
            torch.cuda.synchronize()
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path))
    dist.barrier()


def plain_bytes(job: Job, variant: Variant, args: argparse.Namespace) -> tuple[float, float]:
    """Bytes that one rank sends per step in FSDP2's own collectives, within and between nodes.

    A block is gathered in forward and in backward, the root's own parameters once; a ring sends
    each rank's slot to all others.
    """
    if not variant.communicate:
        return 0.0, 0.0
    gathers = 1 if args.keep_gathered else 2
    in_blocks = sum(p.numel() for p in job.model.blocks.parameters())
    in_root = sum(p.numel() for p in job.model.parameters()) - in_blocks
    nbytes = 0
    if variant.weights is None:
        nbytes += 2 * (gathers * in_blocks + in_root)
    if variant.gradients is None:
        nbytes += getattr(torch, variant.reduce_dtype).itemsize * (in_blocks + in_root)
    return ring_bytes(nbytes // dist.get_world_size(), job.topology)


def interface_bytes() -> float:
    """Bytes that this node's emulated interface has sent so far; NaN outside `nodes.sh`."""
    name = os.environ.get("LQ_NODE_INTERFACE")
    path = Path(f"/sys/class/net/{name}/statistics/tx_bytes")
    return float(path.read_text()) if name and path.exists() else float("nan")


def over_ranks(values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    """Reduce each of the values over all ranks."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op)
    return [float(value) for value in tensor]


def measure(name: str, args: argparse.Namespace, device: torch.device) -> Result:
    """Build the variant, warm it up, time it and take it down again."""
    variant = VARIANTS[name]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    job = Job(variant, args, device)
    _, first = time_steps(job, args.warmup)
    before = job.communication.traffic() if job.communication else Traffic()
    dist.barrier()
    sent_before = interface_bytes()
    times, losses = time_steps(job, args.steps)
    dist.barrier()
    on_interface = (interface_bytes() - sent_before) / args.steps
    after = job.communication.traffic() if job.communication else Traffic()
    traffic = after.since(before)
    intra, inter = plain_bytes(job, variant, args)
    intra += (traffic.weights_intra + traffic.gradients_intra) / args.steps
    inter += (traffic.weights_inter + traffic.gradients_inter) / args.steps
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")

    if args.trace:
        profile_steps(job, args.trace / f"{name}.json.gz")
    slowest = over_ranks(times, dist.ReduceOp.MAX)
    (peak,) = over_ranks([peak], dist.ReduceOp.MAX)
    means = [intra + inter, inter, on_interface, float((first or losses)[0]), float(losses[-1])]
    means = [v / dist.get_world_size() for v in over_ranks(means, dist.ReduceOp.SUM)]
    median = statistics.median(slowest)
    tokens = dist.get_world_size() * args.micro_batch * args.config.seq
    return Result(
        step_ms=1e3 * median,
        step_ms_min=1e3 * min(slowest),
        step_ms_max=1e3 * max(slowest),
        tokens_per_s=tokens / median,
        peak_memory_gib=peak,
        sent_bytes=means[0],
        sent_inter_bytes=means[1],
        interface_bytes=means[2],
        first_loss=means[3],
        last_loss=means[4],
    )


def setup(args: argparse.Namespace) -> dict[str, Any]:
    """Describe what is run."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(args.config).parameters())
    return {
        "model": asdict(args.config) | {"parameters": parameters},
        "micro_batch": args.micro_batch,
        "world_size": dist.get_world_size(),
        "node_size": args.node_size or dist.get_world_size(),
        "backend": dist.get_backend(),
        "emulated_rate": os.environ.get("LQ_EMULATED_RATE", "not emulated"),
        "steps": args.steps,
        "warmup": args.warmup,
        "reshard_after_forward": not args.keep_gathered,
    }


def without_nan(values: dict[str, float]) -> dict[str, float | None]:
    """Replace NaN by None, which JSON can hold."""
    return {name: None if math.isnan(value) else value for name, value in values.items()}


def lay_out(results: dict[str, Result]) -> str:
    """Return the results as a table; speedups are relative to the first variant."""
    base = next(iter(results.values())).step_ms
    header = ["variant", "ms/step", "speedup", "tokens/s", "peak GiB"]
    header += ["MB sent", "MB between nodes", "MB on the wire", "last loss"]
    rows = [
        [
            name,
            f"{r.step_ms:.1f}",
            f"{base / r.step_ms:.2f}x",
            f"{r.tokens_per_s:.0f}",
            *(f"{v:.2f}" for v in (r.peak_memory_gib, r.sent_bytes / 1e6)),
            *(f"{v / 1e6:.2f}" for v in (r.sent_inter_bytes, r.interface_bytes)),
            f"{r.last_loss:.4f}",
        ]
        for name, r in results.items()
    ]
    note = "MB per step: sent and between nodes by one rank, on the wire by one node's interface"
    return f"{table(rows, header)}\n{note}"


def main() -> None:
    """Run every variant and report on rank 0."""
    args = parse_arguments()
    cuda = torch.cuda.is_available() and not args.cpu
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    )
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=args.timeout))
    lead = dist.get_rank() == 0
    described = setup(args)
    if lead:
        print(json.dumps(described), flush=True)
    results: dict[str, Result] = {}
    for name in args.variants:
        results[name] = measure(name, args, device)
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        if lead:
            print(f"{name}: {results[name].step_ms:.1f} ms/step", flush=True)
    if lead:
        print(lay_out(results))
        measured = {name: without_nan(asdict(result)) for name, result in results.items()}
        write_report(args.json, "step_time", {"setup": described, "variants": measured})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
