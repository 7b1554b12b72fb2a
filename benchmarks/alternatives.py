"""Alternatives on a slow network: time, bytes, memory, and loss at equal time.

DDP with its hooks (bf16, PowerSGD, our 8 bits), FSDP2 and ``quantized_fsdp`` at its defaults, all
in one launch, and ``quantized_fsdp`` with ``local_steps``::

    benchmarks/nodes.sh -b auto -n 2 -g 1 benchmarks/alternatives.py --tokens kernel_tokens \\
        --json alternatives.json
    benchmarks/nodes.sh -b auto -n 2 -g 1 benchmarks/alternatives.py --tiny --cpu --text benchmarks
    python benchmarks/alternatives.py --merge a.json b.json --json alternatives.json

Bytes are those that an interface has sent. A cell whose steps would take longer than ``--limit`` is
arithmetic, marked by ``~``: bytes over rate plus the milliseconds of an unlimited network, as if
nothing were hidden; it stands beside every measurement.

Losses come from one run of each method on two ranks, from the same weights, batches and learning
rates, which are constant between the first tenth and the last fifth of the steps, so that a run can
be read at any time before that. The steps of a run and the speed of a network give its time there.
PowerSGD averages its first tenth in fp32, as torch's documentation suggests, and takes the time of
plain DDP for that. ``METHOD@STEP`` begins at another step, 2 at the least. ``--rows`` says what to
measure and in which order; the report is written after every row.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import network
import step_time
import torch
import torch.distributed as dist
from ablation import config_of, validate
from ablation_data import Data, batches, load
from ablation_report import write_merged
from ablation_variants import PRESETS, Preset
from alternatives_report import arithmetic_ms, joined, show
from common import write_report
from corpus import tokens_folder
from gpt import GPT, GPTConfig
from job import (
    TINY,
    VARIANTS,
    Job,
    add_group_arguments,
    choices,
    over_ranks,
    process_group,
    without_nan,
)
from torch import Tensor, nn

SIZES: dict[str, dict[str, int]] = {
    "125m": {"layers": 12, "hidden": 768, "heads": 12, "seq": 1024},
    "1.4b": {},
    "tiny": TINY,
}
MICRO_BATCH = {"125m": 16, "1.4b": 8, "tiny": 2}
METHODS = ("quantized", "ddp-powersgd-32", "ddp-powersgd-8", "local-32", "ddp-bf16")
METHODS += ("ddp-8-bit", "fsdp2", "ddp")
LOSSES = ("ddp-bf16", "quantized", "ddp-powersgd-32", "ddp-powersgd-8", "local-32")
LOSSES += ("ddp-powersgd-8@2", "ddp-powersgd-32@2", "ddp-8-bit", "fsdp2")
# Most wanted first. "loss" is the run of 125M parameters.
ROWS = [f"{size}:{name}" for size in ("125m", "1.4b") for name in METHODS]
ROWS += [f"loss:{name}" for name in LOSSES]
# DDP refuses its hook for bf16 on a CPU; at this size a rank of 32 saves nothing.
TINY_ROWS = [f"tiny:{name.replace('-32', '-8')}" for name in METHODS if name != "ddp-bf16"]
TINY_ROWS += [f"loss:{name.replace('-32', '-8')}" for name in LOSSES if name != "ddp-bf16"]
TINY_ROWS += ["loss:ddp"]
# The variant that runs before the first step of low rank.
FIRST: dict[str | None, str] = {"powersgd": "ddp"}
RATES = "none,10gbit,1gbit,100mbit"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", help="SIZE:METHOD or loss:METHOD, in this order")
    parser.add_argument("--rates", default=RATES, help=f"from the fastest on (default: {RATES})")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can run")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a cell")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--budget", type=float, default=6.0, help="seconds; then two steps do")
    parser.add_argument("--limit", type=float, default=25.0, help="seconds that a cell may take")
    parser.add_argument(
        "--micro-batch",
        type=int,
        help="sequences per rank in timed steps (125m: 16, 1.4b: 8): half where two share a GPU",
    )
    parser.add_argument("--loss-steps", type=int, help="of a run (640, tiny: 64)")
    parser.add_argument("--points", type=int, help="validations of a run (10, tiny: 2)")
    parser.add_argument("--lr", type=float, help="of the runs, instead of the preset's")
    parser.add_argument("--seed", type=int, default=0, help="of the runs")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile each block and the loss"
    )
    parser.add_argument("--node-size", type=int, default=1, help="ranks per node (default: 1)")
    parser.add_argument("--text", type=Path, help="folder with .py files (default: the stdlib)")
    parser.add_argument("--tokens", type=tokens_folder, help="that research/kernel_text.py wrote")
    parser.add_argument("--merge", type=Path, nargs="+", help="show these reports as one; no run")
    parser.add_argument("--json", type=Path, help="where to write the report")
    add_group_arguments(parser)
    args = parser.parse_args()
    args.rates = args.rates.split(",")
    if args.rates[0] != network.UNLIMITED:
        parser.error(f"--rates {','.join(args.rates)}: the first has to be {network.UNLIMITED}")
    if network.interface() is None:
        args.rates = [None]
    given = args.rows or ",".join(dict.fromkeys(TINY_ROWS if args.tiny else ROWS))
    rows = [row.partition(":") for row in given.split(",")]
    choices(parser, "sizes", ",".join(kind for kind, *_ in rows), ("loss", *SIZES))
    choices(parser, "methods", ",".join(name.split("@")[0] for *_, name in rows), VARIANTS)
    args.rows = [(kind, name) for kind, _, name in rows]
    args.loss_steps = args.loss_steps or (64 if args.tiny else 640)
    args.points = args.points or (2 if args.tiny else 10)
    if args.loss_steps % args.points:
        parser.error(f"--points {args.points} do not divide --loss-steps {args.loss_steps}")
    preset = PRESETS["smoke" if args.tiny else "gpt_125m"]
    args.preset = replace(
        preset,
        steps=args.loss_steps,
        batch=preset.batch if args.tiny else MICRO_BATCH["125m"],
        lr=args.lr or preset.lr,
        val_blocks=min(preset.val_blocks, 256),
    )
    return args


# --- speeds ---------------------------------------------------------------------------------------


def measure(size: str, name: str, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Time a method at every rate, from the fastest on; collective."""
    every = VARIANTS[name].every
    options = vars(args) | {
        "config": GPTConfig(**SIZES[size]),
        "micro_batch": args.micro_batch or MICRO_BATCH[size],
        "keep_gathered": False,
        "trace": None,
    }
    if every:  # one exchange in each measurement, and one before, which compiles kernels
        options |= {"steps": every, "warmup": every, "budget": math.inf}
    found = step_time.measure(name, argparse.Namespace(**options), device)
    _, free = next(found)  # without a limit: what the arithmetic starts from
    counted = free.interface_bytes
    sent = free.sent_inter_bytes if math.isnan(counted) else counted
    row: dict[str, Any] = {"size": size, "method": name, "cells": {}}
    row |= without_nan({"sent_bytes": sent, "peak_memory_gib": free.peak_memory_gib})
    for index, rate in enumerate(args.rates):
        predicted_ms = arithmetic_ms(sent, free.step_ms_mean, rate)
        # One step to settle and two to time, or one and all between two exchanges.
        steps = every + 1 if every else 3
        measured = index == 0 or predicted_ms * steps / 1e3 <= args.limit
        result = next(found)[1] if measured and index > 0 else free
        cell: dict[str, Any] = without_nan({"arithmetic_ms": predicted_ms})
        own_ms = result.step_ms_mean if every else result.step_ms
        cell |= {"step_ms": own_ms, "steps": result.steps} if measured else {"step_ms": None}
        row["cells"][rate or network.UNLIMITED] = cell
    found.close()
    return row


# --- losses ---------------------------------------------------------------------------------------


def learning_rate_factor(step: int, steps: int) -> float:
    """Return what the peak is scaled by: a rise over a tenth, a fall to a tenth over a fifth."""
    left = (steps - step) / (0.2 * steps)
    return min(1.0, (step + 1) / max(1, steps // 10)) * min(1.0, 0.1 + 0.9 * left)


def loss_vocab(args: argparse.Namespace, data: Data) -> int:
    """Words of the model that is trained: as many as where it is timed, even if no text has all."""
    sizes = SIZES["tiny" if args.tiny else "125m"]
    return max(data.vocab, GPTConfig(**sizes).vocab)


def train(name: str, data: Data, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train a method from scratch, validating on the way; collective."""
    preset: Preset = args.preset
    begin = time.perf_counter()
    method, _, given = name.partition("@")
    variant = replace(VARIANTS[method], start=int(given or max(2, preset.steps // 10)))
    job = Job(
        variant,
        config_of(preset, loss_vocab(args, data)),
        micro_batch=preset.batch,
        node_size=args.node_size,
        device=device,
        compile_blocks=args.compile,
        seed=args.seed,
    )
    for group in job.optimizer.param_groups:
        group.update(lr=preset.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        job.optimizer, lambda step: learning_rate_factor(step, preset.steps)
    )
    rows = batches(data.train, preset.batch, args.seed, dist.get_rank(), dist.get_world_size())
    points, means = [], []
    every = preset.steps // args.points
    total = torch.zeros((), device=device)
    for step in range(1, preset.steps + 1):
        loss = job.loss_of(job.called, *next(rows))
        loss.backward()
        nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        job.update()
        schedule.step()
        total += loss.detach()
        if step % every == 0 and job.local is not None and job.local.steps:
            job.local.outer_step()
        if step % every == 0:
            points.append((step, _validation_loss(job, data.val, preset)))
            means.append(float(total) / every)
            total = torch.zeros_like(total)
    training = [v / dist.get_world_size() for v in over_ranks(means, dist.ReduceOp.SUM)]
    return {
        "points": points,
        "training": training,
        "method": method,
        "start": variant.start if variant.ddp in FIRST else 0,
        "first": FIRST.get(variant.ddp),
        "train_s": time.perf_counter() - begin,
    }


def _validation_loss(job: Job, blocks: Tensor, preset: Preset) -> float:
    def model(*inputs: Tensor) -> Tensor:
        return job.loss_of(job.model, *inputs)

    return validate(model, blocks, preset)


# --- both -----------------------------------------------------------------------------------------


def setup(args: argparse.Namespace, data: Data | None) -> dict[str, Any]:
    """Describe what is run; what has to be equal for reports to be joined."""
    parameters = {}
    for size in sorted({kind for kind, _ in args.rows} - {"loss"}):
        with torch.device("meta"):
            model = GPT(GPTConfig(**SIZES[size]))
        parameters[size] = sum(p.numel() for p in model.parameters())
    found = {
        "world_size": dist.get_world_size(),
        "node_size": args.node_size,
        "compile": args.compile,
        "rates": [rate or network.UNLIMITED for rate in args.rates],
        "parameters": parameters,
        "micro_batch": {size: args.micro_batch or MICRO_BATCH[size] for size in parameters},
    }
    if data is not None:
        found["losses"] = {
            **asdict(args.preset),
            "seed": args.seed,
            "vocab": loss_vocab(args, data),
            "tokens": data.num_tokens,
            "train_tokens": args.preset.steps
            * args.preset.batch
            * args.preset.seq
            * dist.get_world_size(),
        }
    return found


def run(args: argparse.Namespace, device: torch.device) -> None:
    """Measure all rows; rank 0 prints, and writes after each."""
    lead, begin = dist.get_rank() == 0, time.perf_counter()
    data = None
    if any(kind == "loss" for kind, _ in args.rows):
        data = load(args.tokens, args.text, args.preset.seq, device)
    results: dict[str, Any] = {"setup": setup(args, data), "rows": [], "losses": {}}
    for kind, name in args.rows:
        if kind != "loss":
            row = measure(kind, name, args, device)
            results["rows"].append(row)
            said = ", ".join(f"{rate} {c['step_ms']}" for rate, c in row["cells"].items())
        elif data is not None:
            if args.rates != [None]:
                network.set_rate(network.UNLIMITED)
            found = train(name, data, args, device)
            results["losses"][name] = found
            said = f"{found['points'][-1][1]:.4f} in {found['train_s']:.0f} s"
        if lead:
            write_report(args.json, "alternatives", results)
            print(f"{kind}:{name}: {said} ({time.perf_counter() - begin:.0f} s)", flush=True)
        gc.collect()  # hooks and modules refer to each other
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    if lead:
        print(show(results))


def main() -> None:
    """Measure as a rank, or show several reports as one."""
    args = parse_arguments()
    if args.merge:
        results = joined([json.loads(path.read_text())["results"] for path in args.merge])
        print(show(results))
        if args.json:
            write_merged(args.merge, "alternatives", results, args.json)
        return
    with process_group(args) as device:
        run(args, device)


if __name__ == "__main__":
    main()
