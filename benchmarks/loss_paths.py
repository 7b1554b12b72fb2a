"""When and by which tensor quantization pushes a training off its path.

Full precision, full precision from other weights, and one variant of ``loss_study.py`` train side
by side on the same batches. At every step and for every tensor this records::

    gradient   error of the reduced gradient, against the mean of the same gradients
    worst      share of that error which lies in the worst group of 128 (of the whole tensor's)
    weights    error of what ranks compute with, against the main weights
    moved      how far the main weights moved in this step, likewise relative to them
    apart      distance of the main weights from those of full precision
    chance     likewise, of full precision from other weights

all as norms relative to the tensor's, and for every seed the losses of the three::

    python benchmarks/loss_paths.py --preset llama_1m --seeds 0-63 --variant both --json paths.json

The table compares seeds whose training ends 0.3% or more above full precision with all others, in
four phases; ``--raw`` keeps everything. Norms of a tensor are over all of its elements.
"""

from __future__ import annotations

import argparse
import re
import statistics
from pathlib import Path
from typing import Any

import torch
from ablation_data import load
from common import table, write_report
from emulated_ranks import Plan, Tensors
from loss_report import TAIL_PERCENT
from loss_study import seeds_of, sizes_of, sizes_parser
from loss_variants import VARIANTS
from stacked_models import losses
from stacked_training import Lane, StackedTraining
from torch import Tensor

MEASURES = ("gradient", "worst", "weights", "moved", "apart", "chance")
GROUP = 128
WINDOW = 10  # steps that losses are averaged over
HEADER = ("phase", "tensors", *(f"{name} {kind}" for name in MEASURES for kind in ("tail", "rest")))
_INDEX = re.compile(r"\.\d+\.")


def norms(tensor: Tensor) -> Tensor:
    """Return the norm of each training's ``[S, ...]``, ``[S]``."""
    return tensor.flatten(1).norm(dim=1)


def ratio(error: Tensor, of: Tensor) -> Tensor:
    """Return the relative norm of an error for each training; 0 of nothing."""
    return norms(error) / norms(of).clamp(min=1e-30)


def worst_group(error: Tensor) -> Tensor:
    """Return which share of a squared error lies in its worst group, ``[S]``."""
    squares = error.flatten(1).square()
    padded = torch.nn.functional.pad(squares, (0, -squares.shape[1] % GROUP))
    groups = padded.unflatten(1, (-1, GROUP)).sum(dim=2)
    return groups.amax(dim=1) / groups.sum(dim=1).clamp(min=1e-30)


class Paths:
    """Three trainings of each seed side by side.

    Args:
        args: Of the command line.
        variant: Name of what is quantized.
        device: Where to train.

    Attributes:
        found: Lists of ``[tensors, S]`` by measure, and of losses ``[3, S]``, one per step.
    """

    def __init__(self, args: argparse.Namespace, variant: str, device: torch.device) -> None:
        sizes = args.sizes
        data = load(args.tokens, args.text, sizes.seq, device, sizes.vocab)
        forward = torch.compile(losses, fullgraph=True, dynamic=False) if args.compile else losses

        def start(number: int) -> StackedTraining:
            lanes = [Lane(seed, number) for seed in args.seeds]
            return StackedTraining(data, sizes, lanes, args.nodes, args.node_size, forward)

        self.exact, self.other, self.quantized = start(0), start(1), start(0)
        self.variant = VARIANTS[variant]
        self.names = list(self.exact.masters)
        self.found: dict[str, list[Tensor]] = {name: [] for name in (*MEASURES, "loss")}

    @torch.no_grad()
    def _record(self, measure: str, of: Any) -> None:
        self.found[measure].append(torch.stack([of(name) for name in self.names]).cpu())

    def take_step(self) -> None:
        """Train all three on the next batches and record."""
        run, plan = self.quantized, self.variant.at(self.quantized.step)
        seen = [self.exact.take_step(Plan()), self.other.take_step(Plan())]
        loss, gradients = run.backward()
        self.found["loss"].append(torch.stack([*seen, loss]).cpu())
        reduced, mean = run.ranks.reduce(gradients, plan), run.ranks.reduce(gradients, Plan())
        self._record("gradient", lambda n: ratio(reduced[n] - mean[n], mean[n]))
        self._record("worst", lambda n: worst_group(reduced[n] - mean[n]))
        before: Tensors = {name: value.detach().clone() for name, value in run.masters.items()}
        run.update(reduced, plan)
        masters, held = run.masters, run.ranks.weights()
        self._record("moved", lambda n: ratio(masters[n] - before[n], before[n]))
        self._record("weights", lambda n: ratio(held[n].float() - masters[n], masters[n]))
        exact, other = self.exact.masters, self.other.masters
        self._record("apart", lambda n: ratio(masters[n] - exact[n], exact[n]))
        self._record("chance", lambda n: ratio(other[n] - exact[n], exact[n]))

    def run(self) -> dict[str, Tensor]:
        """Train to the end; return ``[steps, tensors, S]`` by measure, and losses."""
        for _ in range(self.exact.preset.steps):
            self.take_step()
        ends = [t.validate().cpu() for t in (self.exact, self.other, self.quantized)]
        return {n: torch.stack(of) for n, of in self.found.items()} | {"ends": torch.stack(ends)}


def phases(steps: int) -> list[tuple[int, int]]:
    """Return first and last step of a tenth, a fifth, a half and the whole of a run."""
    ends = [0, steps // 10, steps // 5, steps // 2, steps]
    return [pair for pair in zip(ends, ends[1:], strict=False) if pair[0] < pair[1]]


def rows(found: dict[str, Tensor], names: list[str]) -> list[list[str]]:
    """Return the rows below :data:`HEADER`: means over steps, layers and seeds."""
    kinds: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        kinds.setdefault(_INDEX.sub(".*.", name), []).append(index)
    late = tail(found["ends"])
    lines = []
    for first, last in phases(len(found["loss"])):
        for kind, indices in kinds.items():
            line = [f"{first}-{last}", kind]
            for measure in MEASURES:
                part = found[measure][first:last][:, indices].mean(dim=(0, 1))
                line += [_mean(part[late]), _mean(part[~late])]
            lines.append(line)
    return lines


def tail(ends: Tensor) -> Tensor:
    """Return which seeds end far above full precision, ``[S]`` bool, from losses ``[3, S]``."""
    exact = ends[:2].mean(dim=0)
    return 100 * (ends[2] / exact - 1) > TAIL_PERCENT


def _mean(values: Tensor) -> str:
    return f"{float(values.mean()):.4f}" if len(values) else "-"


def departures(found: dict[str, Tensor], seeds: list[int]) -> list[list[str]]:
    """Return for each seed where its training loss leaves that of full precision, and its ends.

    The first step after which the means over ``WINDOW`` steps stay above those of both runs in full
    precision; ``-`` if the last does not.
    """
    means = found["loss"].unfold(0, min(WINDOW, len(found["loss"])), 1).mean(-1)  # [steps, 3, S]
    above = means[:, 2] > means[:, :2].amax(dim=1)
    lines = []
    for row, seed in enumerate(seeds):
        under = (~above[:, row]).nonzero()
        first = int(under[-1]) + 1 if len(under) else 0
        exact = float(found["ends"][0, row])
        change = [f"{100 * (float(e) / exact - 1):+.3f}%" for e in found["ends"][1:, row]]
        lines.append([str(seed), str(first) if first < len(above) else "-", *change])
    return lines


def main() -> None:
    """Train and compare."""
    parser = sizes_parser(__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=seeds_of, default="0-15", help="0-63 or 0,5,7")
    parser.add_argument("--variant", choices=VARIANTS, default="both")
    parser.add_argument("--raw", type=Path, help="where to keep all tensors (torch.save)")
    parser.add_argument("--json", type=Path, help="where to write the tables")
    args = parser.parse_args()
    args.sizes = sizes_of(args)
    cuda = torch.cuda.is_available() and not args.cpu
    paths = Paths(args, args.variant, torch.device("cuda" if cuda else "cpu"))
    found = paths.run()
    lines, left = rows(found, paths.names), departures(found, args.seeds)
    print(table(lines, HEADER))
    print(table(left, ("seed", "leaves after", "perturbed", args.variant)))
    gaps = [100 * (float(q / e) - 1) for e, _, q in found["ends"].T]
    print(
        f"mean {statistics.mean(gaps):+.3f}%, {int(tail(found['ends']).sum())} of {len(gaps)} late"
    )
    if args.raw:
        kept = {n: value.half() if n in MEASURES else value for n, value in found.items()}
        torch.save({"names": paths.names, "seeds": args.seeds, **kept}, args.raw)
    results = {"variant": args.variant, "header": HEADER, "rows": lines, "seeds": left}
    write_report(args.json, "loss_paths", results)


if __name__ == "__main__":
    main()
