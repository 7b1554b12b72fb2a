"""Time training steps of a GPT with plain FSDP2 and with quantized communication, in one run.

Examples::

    torchrun --nproc-per-node 4 benchmarks/step_time.py --json step_time.json
    torchrun --nproc-per-node 2 benchmarks/step_time.py --tiny
    benchmarks/nodes.sh -n 2 -g 2 benchmarks/step_time.py --node-size 2 \\
        --rates none,25gbit,10gbit --budget 6 --trace traces --json step_time_{rate}.json
    benchmarks/nodes.sh -n 2 -g 2 benchmarks/step_time.py --node-size 2 --tensor-parallel 2

The default model has 1.42e9 parameters. Parameters travel in bf16 and gradients in fp32, FSDP2's
usual mixed-precision policy; `fsdp2-bf16-reduce` also reduces in bf16.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import network
import torch
import torch.distributed as dist
from common import argument_parser, choices, free_memory, git_commit, table, write_report
from gpt import GPT
from job import (
    VARIANTS,
    Job,
    Variant,
    add_model_arguments,
    model_config,
    over_ranks,
    process_group,
    time_steps,
    without_nan,
)
from torch import Tensor

from lq_lightning.data_parallel import Traffic, embedding_params
from lq_lightning.data_parallel.unit import ring_bytes

DEFAULT_VARIANTS = [
    name
    for name, v in VARIANTS.items()
    if v.communicate and v.ddp is None and not v.every and v.optimizer == "adamw"
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Measurements of one variant; NaN where something was not measured.

    Attributes:
        step_ms: Median over steps of the slowest rank's time.
        step_ms_mean: Mean of these times, for steps that differ in their exchanges.
        step_ms_min: Fastest step.
        step_ms_max: Slowest step.
        steps: Number of timed steps.
        compute_ms: Time that the compute stream of rank 0 is busy in one profiled step.
        exposed_ms: Rest of that step, in which it waits for communication or the host.
        tokens_per_s: Tokens of all ranks per second, at the median.
        peak_memory_gib: Largest allocated device memory of any rank.
        sent_bytes: Bytes that a rank's collectives send in one step (mean over ranks).
        sent_inter_bytes: The part that leaves the node.
        formula_inter_bytes: The same by arithmetic: parameters times bits.
        interface_bytes: Bytes on this node's interface in one step, with protocol overhead, over
            all ranks of the node; only with `nodes.sh`.
        first_loss: Loss of the first step.
        last_loss: Loss of the last timed step; a variant that trains differently shows here.
        last_step: Number of steps until then, which differs between variants with ``--budget``.
    """

    step_ms: float
    step_ms_mean: float
    step_ms_min: float
    step_ms_max: float
    steps: int
    compute_ms: float
    exposed_ms: float
    tokens_per_s: float
    peak_memory_gib: float
    sent_bytes: float
    sent_inter_bytes: float
    formula_inter_bytes: float
    interface_bytes: float
    first_loss: float
    last_loss: float
    last_step: int


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--variants", default=",".join(DEFAULT_VARIANTS), help=", ".join(VARIANTS))
    add_model_arguments(parser)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each variant")
    parser.add_argument("--warmup", type=int, default=3, help="steps before timing starts")
    parser.add_argument(
        "--budget",
        type=float,
        default=math.inf,
        help="seconds for the timed steps of one variant: fewer steps (but two) and no profile "
        "where they take longer",
    )
    parser.add_argument(
        "--rates",
        help="network rates to measure each variant at, such as none,25gbit, whose names replace "
        "{rate} in --json; needs nodes.sh",
    )
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile each block and the loss"
    )
    parser.add_argument(
        "--trace", type=Path, help="profile each variant too, and put the traces into this folder"
    )
    args = parser.parse_args()
    args.variants = choices(parser, "variants", args.variants, VARIANTS)
    args.rates = args.rates.split(",") if args.rates else [None]
    if len(args.rates) > 1 and args.json and "{rate}" not in args.json.name:
        parser.error(f"--json {args.json} is one file for {len(args.rates)} rates: put {{rate}} in")
    if args.tensor_parallel > 1 and any(VARIANTS[name].ddp for name in args.variants):
        parser.error("DDP's variants have no --tensor-parallel")
    if args.cpu and any(VARIANTS[name].ddp == "powersgd" for name in args.variants):
        # Its callbacks wait for each other in gloo's two threads, and hang with several buckets.
        parser.error("torch's PowerSGD can hang on CPUs: leave its variant out, or use GPUs")
    args.config = model_config(args)
    args.micro_batch = args.micro_batch or (2 if args.tiny else 8)
    return args


def profile_steps(job: Job, path: Path) -> tuple[float, float]:
    """Profile two steps on rank 0, marked by `step` ranges, and write them as a Chrome trace.

    Returns:
        ``read_step`` of the trace; NaN on other ranks and on a CPU.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    cuda = job.device.type == "cuda"
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profile = None
    if dist.get_rank() == 0:
        profile = torch.profiler.profile(activities=activities)
    with profile or nullcontext():
        for _ in range(2):
            with torch.profiler.record_function("step"):
                job.step()
        if cuda:
            torch.cuda.synchronize()
        if profile is not None:
            profile.add_metadata("commit", git_commit())
    times = (math.nan, math.nan)
    if profile is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path))
        if cuda:
            times = read_step(json.loads(gzip.decompress(path.read_bytes())))
    dist.barrier()
    return times


def read_step(trace: dict[str, Any]) -> tuple[float, float]:
    """Return the milliseconds that a GPU computed and waited in the second step of a trace.

    The step lasts from the end of the first step's last kernel on the compute stream to the end of
    its own: work that the host enqueued early, or that other streams still do for the last step,
    counts as in a long run.

    Raises:
        ValueError: The trace has fewer than two `step` ranges, or no GPU work in them.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    marked = [e for e in events if e.get("cat") == "user_annotation" and e["name"] == "step"]
    steps = sorted(_span(event) for event in marked)
    if len(steps) < 2:
        raise ValueError(f"the trace marks {len(steps)} `step` ranges; two are needed")
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    computing = _on_compute_stream(events)
    ends = []
    for step in steps[:2]:
        own = [
            _span(e)[1]
            for e in computing
            if step[0] <= launched.get(e["args"].get("correlation"), -1.0) <= step[1]
        ]
        ends.append(max(own, default=float("nan")))
    if not ends[0] < ends[1]:
        raise ValueError("the trace shows no GPU work in its steps: record it on CUDA devices")
    busy, reached = 0.0, ends[0]
    for start, end in sorted(map(_span, computing)):
        busy += max(0.0, min(end, ends[1]) - max(start, reached))
        reached = max(reached, end)
    return busy / 1e3, (ends[1] - ends[0] - busy) / 1e3


def _span(event: dict[str, Any]) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def _on_compute_stream(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the work of the stream with the most time in kernels that are not collectives."""
    on_gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    time: Counter[int] = Counter()
    for event in on_gpu:
        if event["cat"] == "kernel" and not event["name"].startswith("nccl"):
            time[event["args"]["stream"]] += event["dur"]
    stream = time.most_common(1)[0][0] if time else -1
    return [e for e in on_gpu if e["args"]["stream"] == stream]


def plain_bytes(job: Job, variant: Variant) -> tuple[float, float]:
    """Bytes that one rank sends per step in FSDP2's own collectives, within and between nodes.

    A block is gathered in forward and in backward, the root's own parameters once; a ring sends
    each rank's slot to all others.
    """
    if variant.ddp is not None or variant.every:  # counted by the interface only
        return math.nan, math.nan
    if not variant.communicate:
        return 0.0, 0.0
    in_blocks = sum(map(job.own_numel, job.model.blocks.parameters()))
    in_root = sum(map(job.own_numel, job.model.parameters())) - in_blocks
    nbytes = 0
    if variant.weights is None:
        nbytes += 2 * (2 * in_blocks + in_root)
    if variant.gradients is None:
        nbytes += getattr(torch, variant.reduce_dtype).itemsize * (in_blocks + in_root)
    return ring_bytes(nbytes // job.topology.world_size, job.topology)


def formula_bytes(job: Job, variant: Variant) -> float:
    """Bytes that one rank should send to other nodes per step: parameters times bits.

    Of each parameter (of a rank's tensor-parallel part) each data-parallel rank owns one share,
    which it sends to every other node: as a weight, and as a gradient that its node has summed.
    """
    plain = plain_bytes(job, variant)[1]
    words = {id(parameter) for parameter in embedding_params(job.model)}
    bits = 0.0
    for parameter in job.model.parameters():
        coded, numel = parameter.ndim > 1, job.own_numel(parameter)
        if variant.weights is not None:
            bits += numel * (variant.weights.codec().bits_per_element(1 << 20) if coded else 16)
        if variant.gradients is not None:
            codec = variant.gradients.codec("inter", vocabulary=id(parameter) in words)
            bits += numel * (codec.bits_per_element(1 << 20) if coded else 32)
    return plain + (job.topology.num_nodes - 1) * bits / 8 / job.topology.world_size


def measure(
    name: str, args: argparse.Namespace, device: torch.device
) -> Iterator[tuple[str | None, Result]]:
    """Build the variant, warm it up, and yield each rate with what was measured at it."""
    variant = VARIANTS[name]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if args.rates[0] is not None:
        network.set_rate(args.rates[0])
    job = Job(
        variant,
        args.config,
        micro_batch=args.micro_batch,
        node_size=args.node_size or dist.get_world_size(),
        device=device,
        tensor_parallel=args.tensor_parallel,
        compile_blocks=args.compile,
    )
    settle, losses = time_steps(job, args.warmup)
    for index, rate in enumerate(args.rates):
        if index > 0:
            network.set_rate(rate)
            settle, _ = time_steps(job, 1)
        (step_s,) = over_ranks(settle[-1:] or [0.0], dist.ReduceOp.MAX)
        count = args.steps
        if step_s * count > args.budget:
            count = max(2, int(args.budget / step_s))
        trace = None
        if args.trace and 2 * step_s <= args.budget:
            label = "" if rate is None else f"_{network.file_label(rate)}"
            trace = args.trace / f"{name}{label}.json.gz"
        yield rate, measure_steps(job, variant, count, losses[:1], trace)


def measure_steps(
    job: Job, variant: Variant, count: int, first: list[Tensor], trace: Path | None
) -> Result:
    """Time ``count`` steps of a warm job, and then profile two if there is a file for them."""
    before = job.communication.traffic() if job.communication else Traffic()
    dist.barrier()
    sent_before = network.sent_bytes()
    times, losses = time_steps(job, count)
    dist.barrier()
    on_interface = (network.sent_bytes() - sent_before) / count
    after = job.communication.traffic() if job.communication else Traffic()
    last_step = job.steps
    traffic = after.since(before)
    intra, inter = plain_bytes(job, variant)
    intra += (traffic.weights_intra + traffic.gradients_intra) / count
    inter += (traffic.weights_inter + traffic.gradients_inter) / count
    cuda = job.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else math.nan
    compute_ms, exposed_ms = profile_steps(job, trace) if trace else (math.nan, math.nan)

    slowest = over_ranks(times, dist.ReduceOp.MAX)
    (peak,) = over_ranks([peak], dist.ReduceOp.MAX)
    means = [intra + inter, inter, on_interface, float((first or losses)[0]), float(losses[-1])]
    means = [v / dist.get_world_size() for v in over_ranks(means, dist.ReduceOp.SUM)]
    median = statistics.median(slowest)
    tokens = job.topology.world_size * job.data[0].numel()
    return Result(
        step_ms=1e3 * median,
        step_ms_mean=1e3 * statistics.fmean(slowest),
        step_ms_min=1e3 * min(slowest),
        step_ms_max=1e3 * max(slowest),
        steps=count,
        compute_ms=compute_ms,
        exposed_ms=exposed_ms,
        tokens_per_s=tokens / median,
        peak_memory_gib=peak,
        sent_bytes=means[0],
        sent_inter_bytes=means[1],
        formula_inter_bytes=formula_bytes(job, variant),
        interface_bytes=means[2],
        first_loss=means[3],
        last_loss=means[4],
        last_step=last_step,
    )


def setup(args: argparse.Namespace, rate: str | None, link_gbit_per_s: float) -> dict[str, Any]:
    """Describe the setup for the report."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(args.config).parameters())
    return {
        "model": asdict(args.config) | {"parameters": parameters},
        "micro_batch": args.micro_batch,
        "world_size": dist.get_world_size(),
        "node_size": args.node_size or dist.get_world_size(),
        "tensor_parallel": args.tensor_parallel,
        "backend": dist.get_backend(),
        "emulated_rate": rate or os.environ.get("LQ_EMULATED_RATE", "not emulated"),
        "link_gbit_per_s": None if math.isnan(link_gbit_per_s) else link_gbit_per_s,
        "steps": args.steps,
        "warmup": args.warmup,
        "compile": args.compile,
    }


def lay_out(results: dict[str, Result]) -> str:
    """Return the results as a table; speedups are relative to the first variant."""
    base = next(iter(results.values())).step_ms
    header = ["variant", "ms/step", "speedup", "exposed ms", "tokens/s", "peak GiB"]
    header += ["MB sent", "MB between nodes", "by formula", "MB on the wire", "last loss"]
    rows = [
        [
            name,
            f"{r.step_ms:.1f}",
            f"{base / r.step_ms:.2f}x",
            f"{r.exposed_ms:.1f}",
            f"{r.tokens_per_s:.0f}",
            *(f"{v:.2f}" for v in (r.peak_memory_gib, r.sent_bytes / 1e6)),
            *(f"{v / 1e6:.2f}" for v in (r.sent_inter_bytes, r.formula_inter_bytes)),
            f"{r.interface_bytes / 1e6:.2f}",
            f"{r.last_loss:.4f}",
        ]
        for name, r in results.items()
    ]
    note = "MB per step: sent and between nodes by one rank, on the wire by one node's interface"
    return f"{table(rows, header)}\n{note}"


def write(args: argparse.Namespace, setup: dict[str, Any], results: dict[str, Result]) -> None:
    """Write the results of one rate."""
    path = args.json
    if path is not None:
        label = network.file_label(setup["emulated_rate"]).replace(" ", "_")
        path = path.with_name(path.name.replace("{rate}", label))
    measured = {name: without_nan(asdict(result)) for name, result in results.items()}
    write_report(path, "step_time", {"setup": setup, "variants": measured})


def measure_links(args: argparse.Namespace, device: torch.device) -> dict[str | None, float]:
    """Return the measured Gb/s of the network at each rate; NaN without rates."""
    links = dict.fromkeys(args.rates, math.nan)
    if args.rates == [None]:
        return links
    group = network.peers(args.node_size or dist.get_world_size(), device)
    for rate in args.rates:
        network.set_rate(rate)
        links[rate] = network.link_gbit_per_s(group, device, (8 if args.tiny else 64) << 20)
    return links


def run(args: argparse.Namespace, device: torch.device) -> None:
    """Measure every variant at every rate; rank 0 prints, and writes after each variant."""
    lead = dist.get_rank() == 0
    links = measure_links(args, device)
    described = {rate: setup(args, rate, links[rate]) for rate in args.rates}
    if lead:
        print(json.dumps(list(described.values())), flush=True)
    results: dict[str | None, dict[str, Result]] = {rate: {} for rate in args.rates}
    for name in args.variants:
        for rate, result in measure(name, args, device):
            results[rate][name] = result
            if lead:
                write(args, described[rate], results[rate])
                at = "" if rate is None else f" at {rate}"
                print(f"{name}{at}: {result.step_ms:.1f} ms/step", flush=True)
        free_memory()
    if lead:
        for rate in args.rates:
            print(f"network: {described[rate]['emulated_rate']}\n{lay_out(results[rate])}")


def main() -> None:
    """Join the process group and measure."""
    args = parse_arguments()
    with process_group(args) as device:
        run(args, device)


if __name__ == "__main__":
    main()
