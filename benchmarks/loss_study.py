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

Models of 110M parameters, on several GPUs, each with its own seeds::

    python benchmarks/loss_study.py --preset llama_110m --tokens python_tokens --nodes 2 \\
        --node-size 1 --seeds 0-7 --lanes 2 --starts 1 --trunk-steps 100 --compile blocks \\
        --processes 2 --variants "full precision;full precision perturbed;both" --json llama.json

There the spread between equal runs is the enemy. All runs of a seed go on from one trunk: weights
and moments after so many steps in full precision. Naming ``full precision perturbed`` trains it
once for each seed, while ``--starts 2`` does all variants twice. ``--details`` shows each pair,
when its training losses part, gradient norms and clipping.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
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
from loss_report import details, summary
from loss_variants import BASELINE, PERTURBED, PRESETS, VARIANTS, VOCABULARY_CODE, Preset
from stacked_models import losses, losses_of_compiled_blocks
from stacked_training import CLIP, Lane, StackedTraining
from torch import Tensor

CURVE_STEPS = 25  # the training loss is kept as means over this many steps
PARTS = 10  # of a run, whose gradient norms are kept
WARM_STEPS = 5  # that are not timed


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


def train(
    name: str,
    lanes: list[Lane],
    data: Data,
    args: argparse.Namespace,
    trunk: StackedTraining | None = None,
) -> list[Outcome]:
    """Train one variant of several lanes, from scratch or from a trunk, and validate it."""
    start = time.perf_counter()
    variant = args.known[name]
    if name == PERTURBED:
        lanes = [replace(lane, start=lane.start + 1) for lane in lanes]
    sizes = (data, args.sizes, lanes, args.nodes, args.node_size, args.forward)
    training: StackedTraining = args.make(variant, *sizes, *([trunk] if trunk else []))
    first, kept = training.step, take_steps(training, variant, args.stop_after)
    found = training.validate().tolist()
    ends = {"loss_of_main_weights": found}
    if variant.at(args.stop_after - 1).weights is not None:  # else ranks have the main weights
        main = {name: master.detach() for name, master in training.masters.items()}
        ends["loss_of_main_weights"] = training.validate(main).tolist()
    if training.average is not None:
        ends["loss_of_average"] = training.validate(training.average).tolist()
    curves = _in_parts(kept, CURVE_STEPS, first)
    norms = torch.stack(training.norms).view(len(kept), len(lanes), -1).mean(-1)
    size = max(1, len(kept) // PARTS)
    parts = {
        "grad_norms": _in_parts(norms, size, first),
        "largest_norms": _in_parts(norms, size, first, torch.amax),
        "clipped": _in_parts((norms > CLIP).float(), size, first),
    }
    seconds = (time.perf_counter() - start) / len(lanes)
    return [
        Outcome(
            lane.seed,
            found[row],
            seconds,
            curves[row],
            parts["grad_norms"][row],
            details={n: parts[n][row] for n in ("largest_norms", "clipped")}
            | {n: values[row] for n, values in ends.items()},
        )
        for row, lane in enumerate(lanes)
    ]


def take_steps(training: StackedTraining, variant: Any, last: int) -> Tensor:
    """Train up to a step and return the losses, ``[steps, S]``; show how long a step takes."""
    device, kept = training.data.train.device, []
    first, warm = training.step, min(training.step + WARM_STEPS, last)
    start = 0.0
    while training.step < last:
        if training.step == warm:
            _wait(device)
            start = time.perf_counter()
        kept.append(training.take_step(variant.at(training.step)))
    _wait(device)
    if last > warm:
        took = (time.perf_counter() - start) / (last - warm) / len(training.lanes)
        print(f"  steps {first}-{last}: {1e3 * took:.1f} ms a step and run", flush=True)
    return torch.stack(kept)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _in_parts(
    values: Tensor, size: int, first: int, how: Callable[..., Tensor] = torch.mean
) -> list[tuple[tuple[int, float], ...]]:
    """Reduce ``[steps, S]`` over every ``size`` steps to pairs of last step and value, for each."""
    size = min(size, len(values))
    reduced = how(values.unfold(0, size, size), dim=-1)
    ends = [first + size * (index + 1) for index in range(len(reduced))]
    return [tuple(zip(ends, row, strict=True)) for row in reduced.T.tolist()]


def grow_trunk(lanes: list[Lane], data: Data, args: argparse.Namespace) -> StackedTraining | None:
    """Train what all variants of some seeds go on from, in full precision."""
    if not args.trunk_steps:
        return None
    seeds = [replace(lane, start=0) for lane in lanes]
    trunk = StackedTraining(data, args.sizes, seeds, args.nodes, args.node_size, args.forward)
    take_steps(trunk, args.known[BASELINE], args.trunk_steps)
    return trunk


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
    args.forward = FORWARDS[args.compile]()
    print(f"data on the device after {time.perf_counter() - start:.1f} s", flush=True)
    every = [Lane(seed, number) for number in range(args.starts) for seed in args.seeds]
    size = args.lanes or (64 if cuda else 4)
    parts = [every[index : index + size] for index in range(0, len(every), size)]
    # All variants of some seeds before the next seeds: an interrupted study has pairs.
    todo = [(name, lanes) for lanes in parts for name in args.variants]
    outcomes: Outcomes = {}
    longest, trunk, of = 0.0, None, None
    for done, (name, lanes) in enumerate(todo):
        elapsed = time.perf_counter() - start
        if args.time_budget and done and elapsed + longest > args.time_budget:
            print(f"no time for {len(todo) - done} of {len(todo)} parts, next: {name}", flush=True)
            break
        if of is not lanes:
            trunk = None  # its memory is free before the next one takes as much
            trunk, of = grow_trunk(lanes, data, args), lanes
        add(outcomes, name, lanes, train(name, lanes, data, args, trunk))
        took = time.perf_counter() - start - elapsed
        longest = took if done < 2 else max(longest, took)  # the first one compiles
        report(args, outcomes, data)
        print(f"{name}: {len(lanes)} runs in {took:.1f} s{_memory(device)}", flush=True)
    print(args.summary(in_order(outcomes, args.known), args))


def in_order(outcomes: Outcomes, known: Iterable[str]) -> Outcomes:
    """Sort outcomes as variants are listed, full precision first."""
    names = [BASELINE, PERTURBED, *(name for name in known if name != BASELINE)]
    return {name: outcomes[name] for name in dict.fromkeys(names) if name in outcomes}


def _memory(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return f", peak {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB"


def report(args: argparse.Namespace, outcomes: Outcomes, data: Data) -> None:
    """Write the report of the runs so far."""
    preset: Preset = args.sizes
    tokens = args.stop_after * preset.batch * preset.seq * args.nodes * args.node_size
    settings: dict[str, Any] = {
        "world_size": args.nodes * args.node_size,
        "node_size": args.node_size,
        "compiled": args.compile,
        "trunk_steps": args.trunk_steps,
        "stop_after": args.stop_after,
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


FORWARDS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "": lambda: losses,
    "whole": lambda: torch.compile(losses, fullgraph=True, dynamic=False),
    "blocks": lambda: losses_of_compiled_blocks,
}


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
    parser.add_argument("--average", type=float, help="share of the run whose weights are averaged")
    parser.add_argument("--lr", type=float, help="peak learning rate, instead of the preset's")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the ranks' weights")
    parser.add_argument("--nodes", type=int, default=2, help="emulated nodes (default: 2)")
    parser.add_argument("--node-size", type=int, default=2, help="ranks of one (default: 2)")
    parser.add_argument("--text", type=Path, help="folder with .py files (default: the stdlib)")
    parser.add_argument("--tokens", type=tokens_folder, help="that research/kernel_text.py wrote")
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    parser.add_argument(
        "--compile",
        choices=FORWARDS,
        nargs="?",
        const="whole",
        default="",
        help="compile forward and loss as a whole, or one block for all (starts sooner)",
    )
    return parser


def sizes_of(args: argparse.Namespace) -> Preset:
    """Return the preset with what options change."""
    names = ("steps", "batch", "val_blocks", "lr", "dtype", "average")
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
        "--variants",
        default=";".join(name for name in known if name != PERTURBED),
        help="separated by `;`: " + "; ".join(known),
    )
    parser.add_argument(
        "--time-budget", type=float, help="seconds after which no part starts that would not end"
    )
    parser.add_argument(
        "--trunk-steps", type=int, default=0, help="in full precision, which runs of a seed share"
    )
    parser.add_argument("--stop-after", type=int, help="steps, before the schedule ends")
    parser.add_argument("--details", action="store_true", help="also show pairs and curves")
    parser.add_argument(
        "--processes", type=int, default=1, help="that share the seeds, in turn on each GPU"
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
    args.stop_after = args.stop_after or args.sizes.steps
    if not args.trunk_steps < args.stop_after <= args.sizes.steps:
        parser.error(
            f"steps end at {args.sizes.steps}, --stop-after {args.stop_after} and --trunk-steps "
            f"{args.trunk_steps}: the trunk has to end before the runs, and these with the steps"
        )
    if args.processes > 1 and not args.json:
        parser.error("--processes joins reports: add --json")
    vars(args).update({field.name: getattr(study, field.name) for field in fields(study)})
    return args


def main(study: Study) -> None:
    """Train, or show what ran."""
    args = parse_arguments(study)
    if args.processes > 1 and not args.merge:
        args.merge = run_processes(args)
    (show_merged if args.merge else run)(args)


def run_processes(args: argparse.Namespace) -> list[Path]:
    """Train in several processes, each with a share of the seeds; return their reports.

    Raises:
        RuntimeError: none of them wrote a report.
    """
    gpus = 0 if args.cpu else torch.cuda.device_count()
    children = []
    for index in range(args.processes):
        seeds = args.seeds[index :: args.processes]
        if not seeds:
            continue
        report = args.json.with_suffix(f".{index}.json")
        report.unlink(missing_ok=True)
        more = ["--processes", "1", "--json", str(report), "--seeds", ",".join(map(str, seeds))]
        env = dict(os.environ)
        if gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            names = visible if visible != [""] else [str(gpu) for gpu in range(gpus)]
            env["CUDA_VISIBLE_DEVICES"] = names[index % gpus]
        child = subprocess.Popen([sys.executable, *sys.argv, *more], env=env)
        children.append((report, child))
    codes = [child.wait() for _, child in children]
    if any(codes):
        print(f"processes ended with {codes}: reports hold what they finished", file=sys.stderr)
    written = [report for report, _ in children if report.exists()]
    if not written:
        raise RuntimeError(f"no process wrote a report; they ended with {codes}")
    return written


if __name__ == "__main__":
    main(
        Study(
            benchmark="loss_study",
            description=__doc__.splitlines()[0],
            known=VARIANTS,
            make=lambda variant, *rest: StackedTraining(*rest),
            summary=lambda outcomes, args: summary(outcomes) + details(outcomes) * args.details,
            settings={"vocabulary_code": VOCABULARY_CODE},
        )
    )
