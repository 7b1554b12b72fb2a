"""Validation loss with saved activations as codes against bf16, on a Llama of one GPU.

    python benchmarks/activation_ablation.py --preset smoke --cpu --no-compile
    python benchmarks/activation_ablation.py --preset llama_125m --tokens kernel_tokens \\
        --runs "full precision:0,agoq:0" --json activations_0.json          # one GPU, or more of
    python benchmarks/activation_ablation.py --merge activations_*.json     # these, and then this

Hugging Face's Llama (RMSNorm, SwiGLU) with bf16 weights and fp32 copies of them in AdamW; each
layer and the loss are compiled on a GPU. ``full precision perturbed`` quantizes nothing and starts
from weights that are 0.1% off. ``uniform 4 bits`` has the codes of ``agoq``, and 4 bits also for
the inputs of all other linear layers and for queries, keys and values. With the same seed all
variants see the same model, data and learning rates. What two runs that should end alike differ by
comes mostly from the first steps: with ``--trunk-steps`` all variants of a seed share these, in
full precision, and differ (or are perturbed) from there on. Text as in ``ablation.py``. The report,
with gradient norms as in AGoQ's table 15, is written after every run.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers
from ablation_data import Data, batches, inputs_and_targets, learning_rate_factor, load
from ablation_report import (
    BASELINE,
    PERTURBED,
    Outcome,
    Outcomes,
    merged,
    to_json,
    to_outcomes,
    write_merged,
)
from activation_report import summary
from coded_attention import coded_attention
from common import write_report
from corpus import tokens_folder
from llama import PRESETS, LanguageModel, MasterWeights, Preset
from torch import Tensor, nn

from lq_lightning.activations import ActivationPolicy, quantize_activations
from lq_lightning.activations.policy import CODECS, RECIPES

CURVE_STEPS = 50  # losses and gradient norms are kept as means over this many steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """What one run keeps as codes; nothing by default.

    Attributes:
        policy: Of norms, activation functions and linear layers.
        attention: Name of the codec of queries, keys and values.
        perturbation: Relative deviation of normal noise on the weights that training starts from.
    """

    policy: ActivationPolicy | None = None
    attention: str | None = None
    perturbation: float = 0.0


VARIANTS = {
    BASELINE: Variant(),
    PERTURBED: Variant(perturbation=1e-3),
    **{name: Variant(policy=policy) for name, policy in RECIPES.items()},
    # FP8 products without codes, and the codes of the paper.
    "float8": Variant(policy=ActivationPolicy(norm=None, activation=None, matmul="float8")),
    "agoq fp4_e2m1": Variant(policy=ActivationPolicy(norm="fp4_e2m1", activation="fp4_e2m1")),
    "uniform 4 bits": Variant(policy=replace(RECIPES["agoq"], linear="int4"), attention="int4"),
}


# --- runs -----------------------------------------------------------------------------------------


def micro_batches(inputs: Tensor, targets: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut a batch into equal parts."""
    return zip(inputs.split(size), targets.split(size), strict=True)


def keeping(variant: Variant) -> AbstractContextManager[None]:
    """Return the context in which a variant's attention runs."""
    return coded_attention(CODECS[variant.attention]) if variant.attention else nullcontext()


def _synchronize(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _curve(values: list[Tensor], first: int) -> tuple[tuple[int, float], ...]:
    means = torch.stack(values).tolist() if values else []
    done = first // CURVE_STEPS
    return tuple((CURVE_STEPS * (done + index), mean) for index, mean in enumerate(means, 1))


class Training:
    """A run in progress.

    Args:
        data: What is read.
        preset: Sizes.
        seed: Of weights and of the order of the data.
    """

    def __init__(self, data: Data, preset: Preset, seed: int) -> None:
        torch.manual_seed(seed)
        with data.train.device:
            self.model = LanguageModel(preset, data.vocab)
        self.preset, self.seed, self.step = preset, seed, 0
        self.weights = MasterWeights(self.model)
        self.optimizer = torch.optim.AdamW(
            self.weights.masters, lr=preset.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        factor = learning_rate_factor(preset.steps)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self.rows = batches(data.train, preset.batch, seed)

    def run(self, steps: int) -> tuple[list[Tensor], list[Tensor]]:
        """Take steps; return means of loss and gradient norm over every ``CURVE_STEPS`` of them."""
        sums = torch.zeros(2, device=self.weights.masters[0].device)
        means: list[Tensor] = []
        share = self.preset.micro_batch / self.preset.batch
        for _ in range(steps):
            for part in micro_batches(*next(self.rows), self.preset.micro_batch):
                loss = self.model(*part)
                loss.backward()
                self.weights.collect(share)
                sums[0] += loss.detach() * share
            sums[1] += nn.utils.clip_grad_norm_(self.weights.masters, 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.weights.publish()
            self.step += 1
            if self.step % CURVE_STEPS == 0:
                means.append(sums / CURVE_STEPS)
                sums = torch.zeros_like(sums)
        return [mean[0] for mean in means], [mean[1] for mean in means]

    def save(self, path: Path) -> None:
        """Write what ``resume`` reads."""
        state = {
            "step": self.step,
            "masters": [master.detach() for master in self.weights.masters],
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }
        torch.save(state, path)

    def resume(self, path: Path) -> None:
        """Continue where a run with the same data and seed was saved."""
        device = self.weights.masters[0].device
        state = torch.load(path, map_location=device, weights_only=True)
        with torch.no_grad():
            for master, saved in zip(self.weights.masters, state["masters"], strict=True):
                master.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        for _ in range(state["step"]):
            next(self.rows)
        self.step = state["step"]

    def perturb(self, deviation: float) -> None:
        """Scale every weight by ``1 + deviation * normal``."""
        with torch.no_grad():
            for master in self.weights.masters:
                master.mul_(1 + deviation * torch.randn_like(master))


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


def train(
    variant: Variant, data: Data, preset: Preset, seed: int, compiled: bool, trunk: Path | None
) -> Outcome:
    """Train one variant, from scratch or from the common trunk, and validate it."""
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
    if variant.policy is not None:
        quantize_activations(training.model, variant.policy)
    if compiled:
        training.model.compile_parts(fullgraph=variant.attention is None)
    left = preset.steps - training.step
    first = training.step
    # Compiles; ends where a mean does, unless the run is shorter.
    head = training.run(min(CURVE_STEPS - first % CURVE_STEPS, max(1, left - 1)))
    timed_from, timed_step = _synchronize(device), training.step
    tail = training.run(preset.steps - training.step)
    end = _synchronize(device)
    losses, norms = (one + other for one, other in zip(head, tail, strict=True))
    steps = preset.steps - timed_step
    cuda = device.type == "cuda"
    return Outcome(
        seed=seed,
        val_loss=validate(training.model, data.val, preset),
        train_s=end - start,
        curve=_curve(losses, first),
        grad_norms=_curve(norms, first),
        tokens_per_s=steps * preset.batch * preset.seq / (end - timed_from) if steps else None,
        peak_gib=torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None,
    )


@torch.no_grad()
def validate(model: nn.Module, blocks: Tensor, preset: Preset) -> float:
    """Return the mean loss over the first validation blocks."""
    count = min(preset.val_blocks, len(blocks)) // preset.micro_batch * preset.micro_batch
    if count == 0:
        raise ValueError(
            f"{len(blocks)} validation blocks do not fill one micro-batch of "
            f"{preset.micro_batch}: give more text or lower the preset's micro_batch"
        )
    total = torch.zeros((), device=blocks.device, dtype=torch.float64)
    for rows in blocks[:count].split(preset.micro_batch):
        total += model(*inputs_and_targets(rows)).double() * len(rows)
    return float(total) / count


def run(args: argparse.Namespace) -> None:
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
        variant = VARIANTS[name]
        trunk = trunk_of(args, data, seed, compiled)
        with keeping(variant):
            outcome = train(variant, data, args.sizes, seed, compiled, trunk)
        torch.compiler.reset()
        gc.collect()  # patched modules refer to themselves; free the model before the next one
        longest = max(longest, time.perf_counter() - start - elapsed)
        outcomes.setdefault(name, []).append(outcome)
        report(args, outcomes, data, compiled)
        print(
            f"{name}:{seed} {outcome.val_loss:.5f} in {outcome.train_s:.1f} s, "
            f"{outcome.tokens_per_s:.0f} tokens/s, peak {outcome.peak_gib or 0.0:.1f} GiB",
            flush=True,
        )
    print(summary(outcomes))


def report(args: argparse.Namespace, outcomes: Outcomes, data: Data, compiled: bool) -> None:
    """Write the report with everything needed to repeat it; a file that exists is replaced."""
    if not args.json:
        return
    preset: Preset = args.sizes
    tokens = preset.steps * preset.batch * preset.seq
    results = {
        "preset": asdict(preset),
        "compiled": compiled,
        "transformers": transformers.__version__,
        "trunk_steps": args.trunk_steps,
        "vocab": data.vocab,
        "corpus_tokens": data.num_tokens,
        "train_tokens": tokens,
        "train_passes": round(tokens / (data.train.shape[0] * preset.seq), 3),
        "val_tokens": min(preset.val_blocks, len(data.val)) * preset.seq,
        "variants": to_json(outcomes),
    }
    scratch = args.json.with_suffix(".part")
    write_report(scratch, "activation_ablation", results)
    scratch.replace(args.json)


def show_merged(args: argparse.Namespace) -> None:
    """Show several reports as one; write it if asked to."""
    results = merged(args.merge)
    outcomes = to_outcomes(results, list(VARIANTS))
    results["variants"] = to_json(outcomes)
    print(summary(outcomes))
    if args.json:
        write_merged(args.merge, "activation_ablation", results, args.json)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="llama_125m")
    for name in ("steps", "batch", "micro_batch"):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, help="instead of the preset's")
    names = ", ".join(VARIANTS)
    parser.add_argument("--runs", default=",".join(f"{name}:0" for name in VARIANTS), help=names)
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
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    parser.add_argument("--json", type=Path, help="where to write the report")
    args = parser.parse_args()
    given = {n: getattr(args, n) for n in ("steps", "batch", "micro_batch") if getattr(args, n)}
    args.sizes = replace(PRESETS[args.preset], **given)
    named = [run.rpartition(":") for run in args.runs.split(",")]
    if not all(name in VARIANTS and seed.isdecimal() for name, _, seed in named):
        parser.error(f"--runs {args.runs!r}: give NAME:SEED,NAME:SEED with names of {names}")
    if args.trunk_steps % CURVE_STEPS or args.trunk_steps and not args.trunk:
        parser.error("--trunk-steps takes a multiple of 50, and --trunk")
    args.runs = [(name, int(seed)) for name, _, seed in named]
    return args


def main() -> int:
    """Run, or show what ran; return the exit code."""
    args = parse_arguments()
    (show_merged if args.merge else run)(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
