"""How far quantized communication moves the loss, to a few hundredths of a percent, on one GPU.

Many short trainings of models of a million parameters run in lockstep in one process, each on
emulated ranks (``emulated_ranks.py``): messages are encoded, summed and decoded exactly as between
real ones, and forward reads the replica of decoded differences::

    python benchmarks/loss_study.py --preset llama_1m --seeds 0-63 --json llama.json
    python benchmarks/loss_study.py --preset gpt_1m --seeds 0-63 --variants "full precision;both"
    python benchmarks/loss_study.py --merge llama*.json

``both`` is the library's default. All variants of a seed see the same weights, batches and learning
rates. With ``--starts N`` each seed runs N times, the others from weights that are 0.1% off: in
full precision this shows how far chance alone takes a run (``full precision perturbed``), and every
variant is compared with the mean of all full-precision runs of its seed. Standard errors are over
seeds. Text: the standard library of the running Python, or tokens that ``corpus.py`` prepared.

Models of 110M parameters, on several GPUs, each with its own seeds::

    python benchmarks/loss_study.py --preset llama_110m --tokens python_tokens --nodes 2 \\
        --node-size 1 --seeds 0-7 --lanes 2 --starts 1 --trunk-steps 100 --compile blocks \\
        --processes 2 --variants "full precision;full precision perturbed;both" --json llama.json

There the spread between equal runs hides small changes. So all runs of a seed continue from one
trunk: weights and moments after some steps in full precision. Naming ``full precision perturbed``
trains it once for each seed, while ``--starts 2`` runs all variants twice. ``--details`` shows each
pair, and when its training losses part.

Variants of ``2 stages`` and ``8 stages`` code hidden states and their gradients between blocks
(``emulated_stages.py``), ``klt 2`` in two bits. Validation is without codes; the report's details
also have the loss with them, and bits and errors of every boundary.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from common import argument_parser, choices, free_memory, synchronize, table, write_report
from corpus import Corpus, load, tokens_folder
from emulated_nodes import bits_per_step
from emulated_ranks import Plan
from loss_variants import BASELINE, PERTURBED, PRESETS, VARIANTS, VOCABULARY_CODE, Preset
from stacked_models import losses, losses_of_compiled_blocks
from stacked_training import Lane, StackedTraining
from table import LOSS_HEADER, Run, Runs, loss_details, loss_rows
from torch import Tensor

CURVE_STEPS = 25  # the training loss is kept as means over this many steps
WARM_STEPS = 5  # not timed
SAME = ("preset", "world_size", "node_size", "corpus_tokens", "trunk_steps", "vocabulary_code")
FORWARDS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "": lambda: losses,
    "whole": lambda: torch.compile(losses, fullgraph=True, dynamic=False),
    "blocks": lambda: losses_of_compiled_blocks,
}


def train(
    name: str,
    lanes: list[Lane],
    corpus: Corpus,
    args: argparse.Namespace,
    trunk: StackedTraining | None,
) -> list[Run]:
    """Train one variant of several lanes, from scratch or from a trunk, and validate it."""
    began = time.perf_counter()
    if name == PERTURBED:
        lanes = [replace(lane, start=lane.start + 1) for lane in lanes]
    training = start(lanes, corpus, args, trunk, VARIANTS[name])
    first, kept = training.step, take_steps(training, name, training.preset.steps)
    training.meet()
    found = training.validate().tolist()
    main = found
    if VARIANTS[name].weights is not None:  # else ranks have the master weights
        masters = {name: master.detach() for name, master in training.masters.items()}
        main = training.validate(masters).tolist()
    if training.stages:
        sent = training.validate(in_stages=True).tolist()
    curves, norms = _in_parts(kept, first), _in_parts(torch.stack(training.norms), first)
    seconds = (time.perf_counter() - began) / len(lanes)
    return [
        {
            "seed": lane.seed,
            "val_loss": found[row],
            "train_s": seconds,
            "curve": curves[row],
            "grad_norms": norms[row],
            "details": {"loss_of_main_weights": main[row]}
            | (training.stages.details(row, sent[row]) if training.stages else {}),
        }
        for row, lane in enumerate(lanes)
    ]


def start(
    lanes: list[Lane],
    corpus: Corpus,
    args: argparse.Namespace,
    trunk: StackedTraining | None = None,
    plan: Plan = VARIANTS[BASELINE],
) -> StackedTraining:
    """Return trainings that have not begun, or that continue a trunk."""
    sizes = (args.sizes, lanes, args.nodes, args.node_size, args.forward)
    modes = (plan.optimizer, plan.local, plan.stages)
    return StackedTraining(corpus, args.device, *sizes, trunk, *modes)


def take_steps(training: StackedTraining, name: str, last: int) -> Tensor:
    """Train up to a step and return the losses, ``[steps, S]``; show how long a step takes."""
    kept, first, warm = [], training.step, min(training.step + WARM_STEPS, last)
    began = 0.0
    while training.step < last:
        if training.step == warm:
            began = _now()
        kept.append(training.take_step(VARIANTS[name]))
    if last > warm:
        took = (_now() - began) / (last - warm) / len(training.lanes)
        print(f"  steps {first}-{last}: {1e3 * took:.1f} ms a step and run", flush=True)
    return torch.stack(kept)


def _now() -> float:
    synchronize()
    return time.perf_counter()


def _in_parts(values: Tensor, first: int) -> list[list[tuple[int, float]]]:
    """Return the means of ``[steps, S]`` over some steps as pairs of last step and value."""
    size = min(CURVE_STEPS, len(values))
    reduced = values.unfold(0, size, size).mean(-1)
    ends = [first + size * (index + 1) for index in range(len(reduced))]
    return [list(zip(ends, row, strict=True)) for row in reduced.T.tolist()]


def run(args: argparse.Namespace) -> None:
    """Train every variant on this process's device and report."""
    cuda = torch.cuda.is_available() and not args.cpu
    args.device = torch.device("cuda" if cuda else "cpu")
    args.forward = FORWARDS[args.compile]()
    corpus = load(args.tokens, args.text, args.sizes.seq, args.sizes.vocab)
    every = [Lane(seed, number) for number in range(args.starts) for seed in args.seeds]
    size = args.lanes or (64 if cuda else 4)
    runs: Runs = {}
    # All variants of some seeds before the next seeds: an interrupted study has pairs.
    for lanes in (every[index : index + size] for index in range(0, len(every), size)):
        trunk = None  # its memory is free before the next one takes as much
        free_memory()
        if args.trunk_steps:
            trunk = start([replace(lane, start=0) for lane in lanes], corpus, args)
            take_steps(trunk, BASELINE, args.trunk_steps)
        for name in args.variants:
            began = time.perf_counter()
            for lane, found in zip(lanes, train(name, lanes, corpus, args, trunk), strict=True):
                perturbed = name == BASELINE and lane.start > 0
                runs.setdefault(PERTURBED if perturbed else name, []).append(found)
            report(args, runs, corpus)
            print(f"{name}: {len(lanes)} runs in {time.perf_counter() - began:.1f} s", flush=True)
    print(summary(runs, args))


def in_order(runs: Runs) -> Runs:
    """Sort runs as variants are listed, full precision first."""
    names = dict.fromkeys([BASELINE, PERTURBED, *VARIANTS, *runs])
    return {name: runs[name] for name in names if name in runs}


def summary(runs: Runs, args: argparse.Namespace) -> str:
    """Lay out the losses for a terminal."""
    runs = in_order(runs)
    return table(loss_rows(runs), LOSS_HEADER) + (loss_details(runs) if args.details else "")


def report(args: argparse.Namespace, runs: Runs, corpus: Corpus) -> None:
    """Write the report of the runs so far."""
    preset: Preset = args.sizes
    world = args.nodes * args.node_size
    tokens = preset.steps * preset.batch * preset.seq * world
    results = {
        "preset": asdict(preset),
        "world_size": world,
        "node_size": args.node_size,
        "compiled": args.compile,
        "trunk_steps": args.trunk_steps,
        "vocabulary_code": VOCABULARY_CODE,
        "vocab": corpus.vocab,
        "corpus_tokens": corpus.num_tokens,
        "train_tokens": tokens,
        "train_passes": round(tokens / (corpus.train.shape[0] * preset.seq), 3),
        "bits_per_step": {
            name: bits_per_step(local)
            for name in runs
            if (local := VARIANTS[name].local) is not None
        },
        "val_tokens": min(preset.val_blocks, len(corpus.val)) * preset.seq,
        "variants": in_order(runs),
    }
    write_report(args.json, "loss_study", results)


def show_merged(args: argparse.Namespace) -> None:
    """Show several reports as one, and write it if asked to; repeated runs of a seed all count.

    Raises:
        ValueError: The reports are of different presets, worlds or texts.
    """
    reports = [json.loads(path.read_text()) for path in args.merge]
    joined, runs = reports[0]["results"], {}
    for path, results in zip(args.merge, (report["results"] for report in reports), strict=True):
        for key in SAME:
            if results.get(key) != joined.get(key):
                raise ValueError(
                    f"`{key}` is {results.get(key)} in {path} but {joined.get(key)} in "
                    f"{args.merge[0]}: only reports of equal runs can be joined"
                )
        for name, found in results["variants"].items():
            known = runs.setdefault(name, [])
            known += [run for run in found if run not in known]
    runs = in_order({name: sorted(of, key=lambda run: run["seed"]) for name, of in runs.items()})
    print(summary(runs, args))
    if args.json:
        environments = [e for r in reports for e in r.get("environments") or [r["environment"]]]
        written: dict[str, Any] = {"benchmark": "loss_study", "environments": environments}
        written["results"] = joined | {"variants": runs}
        args.json.write_text(json.dumps(written, indent=2) + "\n")


def seeds_of(text: str) -> list[int]:
    """Read ``0-63`` or ``0,5,7``."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form 0-63 or 0,5,7")
        if dash and int(last) < int(first):
            raise argparse.ArgumentTypeError(f"{part!r} has no seeds: give {last}-{first}")
        found += range(int(first), int(last or first) + 1)
    return found


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argument_parser(__doc__)
    option = parser.add_argument
    option("--preset", choices=PRESETS, default="llama_1m")
    for name in ("steps", "batch", "val-blocks", "passes"):
        option(f"--{name}", type=int, help="instead of the preset's")
    option("--lr", type=float, help="peak learning rate, instead of the preset's")
    option("--dtype", choices=("bfloat16", "float32"), help="of the ranks' weights")
    option("--nodes", type=int, default=2, help="emulated nodes (default: 2)")
    option("--node-size", type=int, default=2, help="ranks of a node (default: 2)")
    option("--text", type=Path, help="folder with .py files (default: the standard library)")
    option("--tokens", type=tokens_folder, help="folder that corpus.py wrote")
    option("--cpu", action="store_true", help="even where there is a GPU")
    option("--compile", choices=FORWARDS, default="", help="the model, or one block for all")
    option("--seeds", type=seeds_of, default="0-15", help="0-63 or 0,5,7")
    option("--starts", type=int, default=2, help="runs of each seed (default: 2)")
    option("--lanes", type=int, help="runs in lockstep (64 on a GPU, else 4)")
    option("--variants", help="separated by `;` (default: all): " + "; ".join(VARIANTS))
    option("--trunk-steps", type=int, default=0, help="in full precision, shared by a seed's runs")
    option("--details", action="store_true", help="also show pairs and curves")
    option("--processes", type=int, default=1, help="share the seeds, in turn on each GPU")
    option("--merge", type=Path, nargs="+", help="show these reports as one; no run")
    args = parser.parse_args()
    names = ("steps", "batch", "val_blocks", "passes", "lr", "dtype")
    given = {name: getattr(args, name) for name in names if getattr(args, name)}
    args.sizes = replace(PRESETS[args.preset], **given)
    named = args.variants or ";".join(name for name in VARIANTS if name != PERTURBED)
    args.variants = choices(parser, "variants", named, VARIANTS, ";")
    if BASELINE not in args.variants and not args.json and not args.merge:
        parser.error(
            f"--variants has nothing to compare with: add {BASELINE!r}, or write a report with "
            "--json and --merge it with one that has it"
        )
    if args.trunk_steps >= args.sizes.steps:
        parser.error(f"--trunk-steps {args.trunk_steps}: runs end after {args.sizes.steps} steps")
    if args.compile == "whole" and any(VARIANTS[name].stages for name in args.variants):
        parser.error("--compile whole has no place for boundaries of stages: choose blocks")
    if args.processes > 1 and not args.json:
        parser.error("--processes joins reports: add --json")
    return args


def run_processes(args: argparse.Namespace) -> list[Path]:
    """Train in several processes, each with a share of the seeds; return their reports.

    Raises:
        RuntimeError: No process wrote a report.
    """
    gpus = 0 if args.cpu else torch.cuda.device_count()
    children = []
    for index in range(min(args.processes, len(args.seeds))):
        seeds = args.seeds[index :: args.processes]
        path = args.json.with_suffix(f".{index}.json")
        path.unlink(missing_ok=True)
        more = ["--processes", "1", "--json", str(path), "--seeds", ",".join(map(str, seeds))]
        env = dict(os.environ)
        if gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            names = visible if visible != [""] else [str(gpu) for gpu in range(gpus)]
            env["CUDA_VISIBLE_DEVICES"] = names[index % gpus]
        child = subprocess.Popen([sys.executable, *sys.argv, *more], env=env)
        children.append((path, child))
    codes = [child.wait() for _, child in children]
    if any(codes):
        print(f"processes ended with {codes}: reports hold what they finished", file=sys.stderr)
    written = [path for path, _ in children if path.exists()]
    if not written:
        raise RuntimeError(f"no process wrote a report; they ended with {codes}")
    return written


def main() -> None:
    """Train, or show finished runs."""
    args = parse_arguments()
    if args.processes > 1 and not args.merge:
        args.merge = run_processes(args)
    (show_merged if args.merge else run)(args)


if __name__ == "__main__":
    main()
