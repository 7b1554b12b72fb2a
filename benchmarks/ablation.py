"""Validation loss of full precision against each quantized part, on one small model.

The ablation of SDP4Bit (table 1 and figure 5) in one command and one table::

    python benchmarks/ablation.py                          # 4 CPU ranks as 2 nodes of 2
    python benchmarks/ablation.py --preset small --json ablation.json     # on 4 GPUs
    python benchmarks/ablation.py --preset gpt_125m --tokens kernel_tokens --json ablation.json
    python benchmarks/ablation.py --merge ablation_*.json --figure ablation.png

``SDP4Bit`` is the paper's: integers of 4 bits between nodes throughout, and weight differences in
groups of 2048. ``default`` is what the library does unless told otherwise.

Variants named ``AdamW ...`` quantize the optimizer's states (COAT). ``full precision perturbed``
quantizes nothing and starts from weights that are 0.1% off: so far chance alone takes a run.

With the same seed every variant sees the same model, data, order and learning rates; several seeds
show how much of a difference is noise. Text: the standard library of the running Python, as bytes,
or what ``research/kernel_text.py`` prepared. Keep a run below one or two passes over it: on
repeated text quantization noise acts as regularization. The losses are those of the weights that
the ranks compute with. The report is written after every run, so an interrupted one keeps what it
finished.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from ablation_data import Data, batches, inputs_and_targets, learning_rate_factor, load, perturb
from ablation_report import (
    Outcome,
    Outcomes,
    draw,
    merged,
    summary,
    to_json,
    to_outcomes,
    write_merged,
    write_outcomes,
)
from ablation_variants import PRESETS, VARIANTS, Preset, Variant
from corpus import tokens_folder
from gpt import GPT, GPTConfig
from job import add_group_arguments, process_group
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lq_lightning.data_parallel import QuantizedCommunication, Topology, quantize_communication
from lq_lightning.optim import quantize_optimizer

CURVE_STEPS = 50  # the training loss is kept as means over this many steps


def config_of(preset: Preset, vocab: int) -> GPTConfig:
    """Return the model of a preset."""
    return GPTConfig(
        layers=preset.layers,
        hidden=preset.hidden,
        heads=preset.heads,
        seq=preset.seq,
        vocab=vocab,
    )


def build(
    preset: Preset,
    variant: Variant,
    seed: int,
    vocab: int,
    args: argparse.Namespace,
    device: torch.device,
) -> tuple[nn.Module, QuantizedCommunication]:
    """Make the sharded model with the given collectives."""
    torch.manual_seed(seed)
    with device:
        model = GPT(config_of(preset, vocab))
    model.initialize()
    if variant.perturbation:
        perturb(model, variant.perturbation)
    if args.compile:
        model.compile_parts()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    topology = Topology(
        world_size=dist.get_world_size(), rank=dist.get_rank(), node_size=args.node_size
    )
    communication = quantize_communication(
        model,
        weights=variant.weights,
        gradients=variant.gradients,
        topology=topology,
        seed=seed,
    )
    return model, communication


def train(
    variant: Variant,
    data: Data,
    args: argparse.Namespace,
    seed: int,
    device: torch.device,
) -> Outcome:
    """Train one variant from scratch and validate it; nothing waits for the device in between."""
    preset: Preset = args.sizes
    start = time.perf_counter()
    model, communication = build(preset, variant, seed, data.vocab, args, device)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=preset.lr,
        betas=(0.9, args.beta2),
        weight_decay=0.1,
        fused=device.type == "cuda",
    )
    if variant.states is not None:
        quantize_optimizer(optimizer, variant.states, module=model)
    communication.register_optimizer(optimizer)
    factor = learning_rate_factor(preset.steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    rows = batches(data.train, preset.batch, seed, dist.get_rank(), dist.get_world_size())
    total, means = torch.zeros((), device=device), []
    for step in range(1, (args.stop_after or preset.steps) + 1):
        loss = model(*next(rows))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += loss.detach()
        if step % CURVE_STEPS == 0:
            means.append(total / CURVE_STEPS)
            total = torch.zeros_like(total)
    curve = _mean_over_ranks(means)
    train_s = time.perf_counter() - start
    return Outcome(seed, validate(model, data.val, preset), train_s, curve)


def _mean_over_ranks(means: list[Tensor]) -> tuple[tuple[int, float], ...]:
    if not means:
        return ()
    stacked = torch.stack(means)
    dist.all_reduce(stacked)
    losses = (stacked / dist.get_world_size()).tolist()
    return tuple((CURVE_STEPS * (index + 1), loss) for index, loss in enumerate(losses))


@torch.no_grad()
def validate(model: nn.Module, blocks: Tensor, preset: Preset) -> float:
    """Return the mean loss over the first validation blocks, split over the ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    count = min(preset.val_blocks, len(blocks)) // (world * preset.batch) * (world * preset.batch)
    if count == 0:
        raise ValueError(
            f"{len(blocks)} validation blocks do not fill one batch on each of {world} ranks: "
            "lower the preset's batch or use fewer ranks"
        )
    total = torch.zeros((), device=blocks.device, dtype=torch.float64)
    for rows in blocks[rank:count:world].split(preset.batch):
        total += model(*inputs_and_targets(rows)).double() * len(rows)
    dist.all_reduce(total)
    return float(total) / count


def run(args: argparse.Namespace, device: torch.device) -> None:
    """Train every variant on the ranks of this process group and report on rank 0."""
    start = time.perf_counter()
    if args.compile is None:
        args.compile = device.type == "cuda" and args.sizes.compile
    data = load(args.tokens, args.text, args.sizes.seq, device)
    first = dist.get_rank() == 0
    if first:
        print(f"data on the device after {time.perf_counter() - start:.1f} s", flush=True)
    outcomes: Outcomes = {}
    longest = 0.0
    for done, (name, seed) in enumerate(args.runs):
        elapsed = time.perf_counter() - start
        if args.time_budget and done and _on_rank_0(elapsed + longest, device) > args.time_budget:
            left = ",".join(f"{name}:{seed}" for name, seed in args.runs[done:])
            if first:
                print(f'no time for --runs "{left}"', flush=True)
            break
        outcome = train(VARIANTS[name], data, args, seed, device)
        gc.collect()  # hooks and modules refer to each other; free the model before the next one
        longest = max(longest, time.perf_counter() - start - elapsed)
        outcomes.setdefault(name, []).append(outcome)
        if first:
            report(args, outcomes, data)
            loss = f"{name}:{seed} {outcome.val_loss:.5f}"
            print(f"{loss} in {outcome.train_s:.1f} s, {device_memory(device)}", flush=True)
    if first:
        print(summary(outcomes))


def _on_rank_0(value: float, device: torch.device) -> float:
    """Return rank 0's value on every rank, so that all decide alike."""
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    dist.broadcast(shared, 0)
    return float(shared)


def device_memory(device: torch.device) -> str:
    """Say how much memory of the device the runs took so far."""
    if device.type != "cuda":
        return "on a CPU"
    return f"peak {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB"


def report(args: argparse.Namespace, outcomes: Outcomes, data: Data) -> None:
    """Write the report of the runs so far."""
    preset: Preset = args.sizes
    world = dist.get_world_size()
    tokens = (args.stop_after or preset.steps) * preset.batch * preset.seq * world
    settings = {
        "beta2": args.beta2,
        "stop_after": args.stop_after,
        "compiled": args.compile,
        "world_size": world,
        "node_size": args.node_size,
    }
    write_outcomes(args.json, "ablation", preset, data, tokens, outcomes, settings)


def show_merged(args: argparse.Namespace) -> None:
    """Show several reports as one; write and draw it if asked to."""
    results = merged(args.merge)
    outcomes = to_outcomes(results, list(VARIANTS))
    results["variants"] = to_json(outcomes)
    print(summary(outcomes))
    if args.json:
        write_merged(args.merge, "ablation", results, args.json)
    if args.figure:
        draw(outcomes, args.figure)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--steps", type=int, help="optimizer steps, instead of the preset's")
    parser.add_argument("--batch", type=int, help="sequences of a rank, instead of the preset's")
    parser.add_argument("--lr", type=float, help="peak learning rate, instead of the preset's")
    parser.add_argument("--beta2", type=float, default=0.95, help="of AdamW (default: 0.95)")
    parser.add_argument(
        "--stop-after",
        type=int,
        help="steps after which to validate and stop, on the same schedule",
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--node-size", type=int, default=2, help="ranks per emulated node")
    parser.add_argument("--seeds", default="0,1", help="seeds of every variant (default: 0,1)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated names")
    parser.add_argument(
        "--runs", help='instead of both, in this order: "full precision:0,SDP4Bit:0,qW:1"'
    )
    parser.add_argument(
        "--time-budget", type=float, help="seconds after which no run starts that would not end"
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile blocks and loss (default: on GPUs, if the preset says so)",
    )
    parser.add_argument("--text", type=Path, help="folder with .py files (default: the stdlib)")
    parser.add_argument("--tokens", type=tokens_folder, help="that research/kernel_text.py wrote")
    parser.add_argument("--merge", type=Path, nargs="+", help="show these reports as one; no run")
    parser.add_argument("--figure", type=Path, help="with --merge: image to draw")
    add_group_arguments(parser)
    parser.add_argument("--json", type=Path, help="where to write the report")
    args = parser.parse_args()
    given = {name: getattr(args, name) for name in ("steps", "batch", "lr") if getattr(args, name)}
    args.sizes = Preset(**(asdict(PRESETS[args.preset]) | given))
    chosen = [
        (name, int(seed)) for name in args.variants.split(",") for seed in args.seeds.split(",")
    ]
    if args.runs:
        named = [run.rpartition(":") for run in args.runs.split(",")]
        if not all(name and seed.isdecimal() for name, _, seed in named):
            parser.error(f"--runs {args.runs!r} is not of the form 'NAME:SEED,NAME:SEED'")
        chosen = [(name, int(seed)) for name, _, seed in named]
    args.runs = chosen
    unknown = sorted({name for name, _ in chosen} - set(VARIANTS))
    if unknown:
        parser.error(f"unknown variants {unknown}: choose among {', '.join(VARIANTS)}")
    return args


def main() -> None:
    """Start the ranks, or be one."""
    args = parse_arguments()
    if args.merge:
        show_merged(args)
        return
    if "RANK" in os.environ:
        with process_group(args) as device:
            run(args, device)
        return
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", str(args.ranks), __file__, *sys.argv[1:]]
    raise SystemExit(subprocess.run(launch, check=False).returncode)


if __name__ == "__main__":
    main()
