"""An ablation on a Llama of one GPU: runs of variants, reports of them, and their options.

All variants of a seed see the same model, data and learning rates. What two runs that should end
alike differ by comes mostly from the first steps: with ``--trunk-steps`` all variants of a seed
share these, in full precision, and differ (or are perturbed) from there on.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from ablation_data import Data, load
from ablation_report import (
    Outcome,
    Outcomes,
    draw,
    merged,
    to_json,
    to_outcomes,
    write_merged,
    write_outcomes,
)
from corpus import tokens_folder
from llama_training import CURVE_STEPS, PRESETS, Preset, Training
from torch import Tensor

SIZES = ("steps", "batch", "micro_batch", "val_blocks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Changes of one run; none by default.

    Attributes:
        perturbation: Relative deviation of normal noise on the weights that training starts from.
    """

    perturbation: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """A kind of ablation.

    Attributes:
        name: Name in its reports.
        variants: Variants by name.
        applied: Returns the context in which a variant trains; it prepares the model, and compiles
            it if asked to. What it yields are fields of the outcome, complete after the context.
        summary: Lays out outcomes for a terminal.
        afterwards: Returns more details of a run, or None; its losses are written by then.
    """

    name: str
    variants: Mapping[str, Any]
    applied: Callable[
        [Any, Training, bool, argparse.Namespace], AbstractContextManager[dict[str, Any]]
    ]
    summary: Callable[[Outcomes], str]
    afterwards: Callable[[Any, Training, Data, argparse.Namespace], dict[str, Any] | None] = (
        lambda variant, training, data, args: None
    )


# --- runs -----------------------------------------------------------------------------------------


def trunk_of(args: argparse.Namespace, data: Data, seed: int, compiled: bool) -> Path | None:
    """Return the file with the common start of all runs of a seed, made if it is missing."""
    if not args.trunk_steps:
        return None
    path: Path = args.trunk / f"trunk_{args.preset}_{seed}_{args.trunk_steps}.pt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        training = Training(data, args.sizes, seed)
        if compiled:
            training.model.compile_parts(fullgraph=True)
        training.run(args.trunk_steps)
        training.save(path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
    return path


def _synchronize(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _curve(values: list[Tensor], first: int) -> tuple[tuple[int, float], ...]:
    means = torch.stack(values).tolist() if values else []
    done = first // CURVE_STEPS
    return tuple((CURVE_STEPS * (done + index), mean) for index, mean in enumerate(means, 1))


def train(
    study: Study,
    variant: Variant,
    data: Data,
    seed: int,
    compiled: bool,
    trunk: Path | None,
    args: argparse.Namespace,
) -> tuple[Outcome, Training]:
    """Train one variant, from scratch or from the common trunk, and validate it."""
    preset: Preset = args.sizes
    device = data.train.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    training = Training(data, preset, seed)
    if trunk is not None:
        training.resume(trunk)
    if variant.perturbation:
        training.perturb(variant.perturbation)
    training.weights.publish()
    with study.applied(variant, training, compiled, args) as found:
        left = preset.steps - training.step
        first = training.step
        # Compiles; ends where a mean does, unless the run is shorter.
        head = training.run(min(CURVE_STEPS - first % CURVE_STEPS, max(1, left - 1)))
        timed_from, timed_step = _synchronize(device), training.step
        tail = training.run(preset.steps - training.step)
        end = _synchronize(device)
        val_loss = training.validate()
    losses, norms = (one + other for one, other in zip(head, tail, strict=True))
    steps = preset.steps - timed_step
    cuda = device.type == "cuda"
    outcome = Outcome(
        seed=seed,
        val_loss=val_loss,
        train_s=end - start,
        curve=_curve(losses, first),
        grad_norms=_curve(norms, first),
        tokens_per_s=steps * preset.batch * preset.seq / (end - timed_from) if steps else None,
        peak_gib=torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None,
        **found,
    )
    return outcome, training


def run(study: Study, args: argparse.Namespace) -> None:
    """Train every variant on this process's device and report."""
    start = time.perf_counter()
    cuda = torch.cuda.is_available() and not args.cpu
    device = torch.device("cuda" if cuda else "cpu")
    compiled = cuda if args.compile is None else args.compile
    data = load(args.tokens, args.text, args.sizes.seq, device)
    print(f"data on the device after {time.perf_counter() - start:.1f} s", flush=True)
    outcomes: Outcomes = {}
    longest = 0.0
    for done, (name, seed) in enumerate(args.runs):
        elapsed = time.perf_counter() - start
        if args.time_budget and done and elapsed + longest > args.time_budget:
            left = ",".join(f"{name}:{seed}" for name, seed in args.runs[done:])
            print(f'no time for --runs "{left}"', flush=True)
            break
        trunk = trunk_of(args, data, seed, compiled)
        variant = study.variants[name]
        outcome, training = train(study, variant, data, seed, compiled, trunk, args)
        torch.compiler.reset()
        outcomes.setdefault(name, []).append(outcome)
        report(study, args, data, outcomes, compiled)
        if (more := study.afterwards(variant, training, data, args)) is not None:
            outcomes[name][-1] = replace(outcome, details=(outcome.details or {}) | more)
            report(study, args, data, outcomes, compiled)
        del training
        gc.collect()  # patched modules refer to themselves; free the model before the next one
        longest = max(longest, time.perf_counter() - start - elapsed)
        print(
            f"{name}:{seed} {outcome.val_loss:.5f} in {outcome.train_s:.1f} s, "
            f"{outcome.tokens_per_s or 0:.0f} tokens/s, peak {outcome.peak_gib or 0.0:.1f} GiB",
            flush=True,
        )
    print(study.summary(outcomes))


# --- reports --------------------------------------------------------------------------------------


def report(
    study: Study, args: argparse.Namespace, data: Data, outcomes: Outcomes, compiled: bool
) -> None:
    """Write the report of the runs so far."""
    preset: Preset = args.sizes
    tokens = preset.steps * preset.batch * preset.seq
    settings = {
        "compiled": compiled,
        "transformers": transformers.__version__,
        "trunk_steps": args.trunk_steps,
    }
    write_outcomes(args.json, study.name, preset, data, tokens, outcomes, settings)


def show_merged(study: Study, args: argparse.Namespace) -> None:
    """Show several reports as one; write it if asked to."""
    results = merged(args.merge)
    outcomes = to_outcomes(results, list(study.variants))
    results["variants"] = to_json(outcomes)
    print(study.summary(outcomes))
    if args.json:
        write_merged(args.merge, study.name, results, args.json)
    if args.figure:
        draw(outcomes, args.figure)


# --- options --------------------------------------------------------------------------------------


def parser_of(study: Study, description: str | None, preset: str) -> argparse.ArgumentParser:
    """Return the options that all studies have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default=preset)
    for name in SIZES:
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, help="instead of the preset's")
    every = ",".join(f"{name}:0" for name in study.variants)
    parser.add_argument("--runs", default=every, help=", ".join(study.variants))
    parser.add_argument("--seeds", help="0,1,2: then --runs are names alone")
    parser.add_argument(
        "--time-budget", type=float, help="seconds after which no run starts that would not end"
    )
    parser.add_argument(
        "--trunk-steps",
        type=int,
        default=0,
        help="first steps, in full precision, that all runs of a seed share: a multiple of 50",
    )
    parser.add_argument("--trunk", type=Path, help="folder of these starts")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="on GPUs: yes")
    parser.add_argument("--text", type=Path, help="folder with .py files (default: the stdlib)")
    parser.add_argument("--tokens", type=tokens_folder, help="that research/kernel_text.py wrote")
    parser.add_argument("--merge", type=Path, nargs="+", help="show these reports as one; no run")
    parser.add_argument("--figure", type=Path, help="with --merge: image to draw")
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    parser.add_argument("--json", type=Path, help="where to write the report")
    return parser


def read_arguments(study: Study, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line and check what options mean together."""
    args = parser.parse_args()
    given = {name: getattr(args, name) for name in SIZES if getattr(args, name)}
    args.sizes = replace(PRESETS[args.preset], **given)
    runs = args.runs.split(",")
    if args.seeds:
        runs = [f"{name}:{seed}" for seed in args.seeds.split(",") for name in runs]
    named = [run.rpartition(":") for run in runs]
    if not all(name in study.variants and seed.isdecimal() for name, _, seed in named):
        names = ", ".join(study.variants)
        parser.error(f"--runs {args.runs!r}: give NAME:SEED,NAME:SEED with names of {names}")
    if args.trunk_steps % CURVE_STEPS or args.trunk_steps and not args.trunk:
        parser.error(f"--trunk-steps takes a multiple of {CURVE_STEPS}, and --trunk")
    args.runs = [(name, int(seed)) for name, _, seed in named]
    return args


def start(study: Study, args: argparse.Namespace) -> int:
    """Run, or show what ran; return the exit code."""
    (show_merged if args.merge else run)(study, args)
    return 0
