"""How far quantized communication moves the loss, to a few hundredths of a percent, on one GPU.

Many short trainings of models of a million parameters run in lockstep in one process, each on
emulated ranks (``emulated_ranks.py``): what ranks send is encoded, summed and decoded exactly as
between real ones, and forward reads the replica of decoded differences::

    python benchmarks/loss_study.py --preset llama_1m --seeds 0-63 --json llama.json
    python benchmarks/loss_study.py --preset gpt_1m --seeds 0-63 --variants "full precision;both"
    python benchmarks/loss_study.py --merge llama*.json

``both`` is the library's default. All variants of a seed see the same weights, batches and learning
rates. With ``--starts N`` each seed runs N times, the others from weights that are 0.1% off: in
full precision this shows how far chance alone takes a run (``full precision perturbed``), and every
variant is compared with the mean of all full-precision runs of its seed. Standard errors are over
seeds. Text: the standard library of the running Python, or what ``research/kernel_text.py``
prepared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from ablation_data import Data, load
from ablation_report import (
    Outcome,
    Outcomes,
    merged,
    to_json,
    to_outcomes,
    write_merged,
    write_outcomes,
)
from corpus import tokens_folder
from loss_report import summary
from loss_variants import BASELINE, PERTURBED, PRESETS, VARIANTS, VOCABULARY_CODE, Preset
from stacked_models import losses
from stacked_training import Lane, StackedTraining
from torch import Tensor

CURVE_STEPS = 50  # the training loss is kept as means over this many steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """What is compared.

    Attributes:
        benchmark: Name of the reports.
        description: Of the command.
        known: Variants by name; each has ``at``, the plan of a step.
        make: Starts the trainings of a variant, from it and the arguments of ``StackedTraining``.
        summary: Lays out outcomes for a terminal, given the options.
        settings: What else reports say; only those that say the same can be joined.
    """

    benchmark: str
    description: str
    known: Mapping[str, Any]
    make: Callable[..., StackedTraining]
    summary: Callable[[Outcomes, argparse.Namespace], str]
    settings: Mapping[str, Any] = field(default_factory=dict)


def train(name: str, lanes: list[Lane], data: Data, args: argparse.Namespace) -> list[Outcome]:
    """Train one variant of several lanes from scratch and validate it."""
    preset: Preset = args.sizes
    start = time.perf_counter()
    variant = args.known[name]
    training: StackedTraining = args.make(
        variant, data, preset, lanes, args.nodes, args.node_size, args.forward
    )
    kept: list[Tensor] = [training.take_step(variant.at(step)) for step in range(preset.steps)]
    found = training.validate().tolist()
    curves = torch.stack(kept).unfold(0, min(CURVE_STEPS, len(kept)), CURVE_STEPS).mean(-1)
    seconds = (time.perf_counter() - start) / len(lanes)
    ends = [min(CURVE_STEPS * (index + 1), len(kept)) for index in range(len(curves))]
    return [
        Outcome(lane.seed, loss, seconds, tuple(zip(ends, curve, strict=True)))
        for lane, loss, curve in zip(lanes, found, curves.T.tolist(), strict=True)
    ]


def add(outcomes: Outcomes, name: str, lanes: list[Lane], found: list[Outcome]) -> None:
    """File outcomes under their names: full precision from other weights has one of its own."""
    for lane, outcome in zip(lanes, found, strict=True):
        perturbed = name == BASELINE and lane.start > 0
        outcomes.setdefault(PERTURBED if perturbed else name, []).append(outcome)


def run(args: argparse.Namespace) -> None:
    """Train every variant on this process's device and report."""
    start = time.perf_counter()
    cuda = torch.cuda.is_available() and not args.cpu
    device = torch.device("cuda" if cuda else "cpu")
    data = load(args.tokens, args.text, args.sizes.seq, device, args.sizes.vocab)
    args.forward = losses
    if args.compile:
        args.forward = torch.compile(losses, fullgraph=True, dynamic=False)
    print(f"data on the device after {time.perf_counter() - start:.1f} s", flush=True)
    every = [Lane(seed, number) for number in range(args.starts) for seed in args.seeds]
    size = args.lanes or (64 if cuda else 4)
    parts = [every[index : index + size] for index in range(0, len(every), size)]
    # All variants of some seeds before the next seeds: an interrupted study has pairs.
    todo = [(name, lanes) for lanes in parts for name in args.variants]
    outcomes: Outcomes = {}
    longest = 0.0
    for done, (name, lanes) in enumerate(todo):
        elapsed = time.perf_counter() - start
        if args.time_budget and done and elapsed + longest > args.time_budget:
            print(f"no time for {len(todo) - done} of {len(todo)} parts, next: {name}", flush=True)
            break
        add(outcomes, name, lanes, train(name, lanes, data, args))
        took = time.perf_counter() - start - elapsed
        longest = max(longest, took)
        report(args, outcomes, data)
        print(f"{name}: {len(lanes)} runs in {took:.1f} s{_memory(device)}", flush=True)
    print(args.summary(in_order(outcomes, args.known), args))


def in_order(outcomes: Outcomes, known: Iterable[str]) -> Outcomes:
    """Sort outcomes as variants are listed, full precision first."""
    names = [BASELINE, PERTURBED, *(name for name in known if name != BASELINE)]
    return {name: outcomes[name] for name in names if name in outcomes}


def _memory(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return f", peak {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB"


def report(args: argparse.Namespace, outcomes: Outcomes, data: Data) -> None:
    """Write the report of the runs so far."""
    preset: Preset = args.sizes
    tokens = preset.steps * preset.batch * preset.seq * args.nodes * args.node_size
    settings: dict[str, Any] = {
        "world_size": args.nodes * args.node_size,
        "node_size": args.node_size,
        "compiled": args.compile,
        **args.settings,
    }
    ordered = in_order(outcomes, args.known)
    write_outcomes(args.json, args.benchmark, preset, data, tokens, ordered, settings)


def show_merged(args: argparse.Namespace) -> None:
    """Show several reports as one; write it if asked to."""
    results = merged(args.merge)
    outcomes = in_order(to_outcomes(results, [BASELINE, PERTURBED, *args.known]), args.known)
    results["variants"] = to_json(outcomes)
    print(args.summary(outcomes, args))
    if args.json:
        write_merged(args.merge, args.benchmark, results, args.json)


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


def sizes_parser(description: str) -> argparse.ArgumentParser:
    """Return the options of everything that trains in lockstep."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--preset", choices=PRESETS, default="llama_1m")
    for name in ("steps", "batch", "val-blocks"):
        parser.add_argument(f"--{name}", type=int, help="instead of the preset's")
    parser.add_argument("--lr", type=float, help="peak learning rate, instead of the preset's")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the ranks' weights")
    parser.add_argument("--nodes", type=int, default=2, help="emulated nodes (default: 2)")
    parser.add_argument("--node-size", type=int, default=2, help="ranks of one (default: 2)")
    parser.add_argument("--text", type=Path, help="folder with .py files (default: the stdlib)")
    parser.add_argument("--tokens", type=tokens_folder, help="that research/kernel_text.py wrote")
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    parser.add_argument("--compile", action="store_true", help="compile forward and loss")
    return parser


def sizes_of(args: argparse.Namespace) -> Preset:
    """Return the preset with what options change."""
    names = ("steps", "batch", "val_blocks", "lr", "dtype")
    given = {name: getattr(args, name) for name in names if getattr(args, name)}
    return replace(PRESETS[args.preset], **given)


def parse_arguments(study: Study) -> argparse.Namespace:
    """Read the command line; what the study consists of is put among the options."""
    known = study.known
    parser = sizes_parser(study.description)
    parser.add_argument("--seeds", type=seeds_of, default="0-15", help="0-63 or 0,5,7")
    parser.add_argument("--starts", type=int, default=2, help="runs of each seed (default: 2)")
    parser.add_argument("--lanes", type=int, help="runs in lockstep (64 on a GPU, else 4)")
    parser.add_argument(
        "--variants", default=";".join(known), help="separated by `;`: " + "; ".join(known)
    )
    parser.add_argument(
        "--time-budget", type=float, help="seconds after which no part starts that would not end"
    )
    parser.add_argument("--merge", type=Path, nargs="+", help="show these reports as one; no run")
    parser.add_argument("--json", type=Path, help="where to write the report")
    args = parser.parse_args()
    args.sizes = sizes_of(args)
    args.variants = args.variants.split(";")
    unknown = sorted(set(args.variants) - set(known))
    if unknown:
        parser.error(f"unknown variants {unknown}: choose among {'; '.join(known)}")
    if BASELINE not in args.variants and not args.json and not args.merge:
        parser.error(
            f"--variants has nothing to compare with: add {BASELINE!r}, or write a report with "
            "--json and --merge it with one that has it"
        )
    vars(args).update({field.name: getattr(study, field.name) for field in fields(study)})
    return args


def main(study: Study) -> None:
    """Train, or show what ran."""
    args = parse_arguments(study)
    (show_merged if args.merge else run)(args)


if __name__ == "__main__":
    main(
        Study(
            benchmark="loss_study",
            description=__doc__.splitlines()[0],
            known=VARIANTS,
            make=lambda variant, *rest: StackedTraining(*rest),
            summary=lambda outcomes, args: summary(outcomes),
            settings={"vocabulary_code": VOCABULARY_CODE},
        )
    )
