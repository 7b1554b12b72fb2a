"""The loss of what sends less than 4 bits per parameter, on many emulated trainings.

PowerSGD, 2 bits, thin matrices with a remainder in codes, and steps that nodes take alone, each
against full precision from the same seeds, as in ``loss_study.py``, whose options these are::

    python benchmarks/fewer_bytes.py --preset gpt_tiny --steps 512 --seeds 0-15 --json fewer.json
    python benchmarks/fewer_bytes.py --merge fewer*.json

``bits`` is what one node sends per parameter and step, counted from the codes and shapes of the
model. Thin matrices of the same rank are a larger share of a narrow model: compare variants
at equal bits, not at equal ranks. Milliseconds are arithmetic, no measurement: what a model of
163M parameters needs that computes 58 ms and sends these bits with nothing hidden.
"""

from __future__ import annotations

import argparse
import re
import statistics
from dataclasses import dataclass, field
from typing import Any

from ablation_report import BASELINE, PERTURBED, Outcomes
from common import table
from emulated_alternatives import LocalSteps, LocalTraining, ReducedTraining, Reduction
from emulated_codes import LibraryCode
from emulated_ranks import Codes, Plan
from loss_report import changes, mean_and_error
from loss_study import Study, main
from loss_variants import LONG_GROUPS, Preset, Variant, with_bits
from stacked_models import Sizes, shapes
from stacked_training import StackedTraining

from lq_lightning.data_parallel import GradientQuantization

PARAMETERS, COMPUTE_MS = 163_026_432, 58.0  # GPT of 125M with embedding and head, two H200s
BYTES = 264  # words of a vocabulary of bytes
RATES = {"1 Gb/s": 1e9, "100 Mb/s": 1e8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """What nodes exchange instead of codes of every gradient.

    Attributes:
        how: That exchange.
        plan: Of weights and of what nodes do within.
    """

    how: Reduction | LocalSteps
    plan: Plan = field(default_factory=Plan)

    def at(self, step: int) -> Plan:
        """Return the plan of a step."""
        return self.plan


def start(variant: Variant | Alternative, *base: Any) -> StackedTraining:
    """Start the trainings of a variant."""
    if isinstance(variant, Variant):
        return StackedTraining(*base)
    if isinstance(variant.how, Reduction):
        return ReducedTraining(variant.how, *base)
    return LocalTraining(variant.how, *base)


def _code(bits: int) -> LibraryCode:
    return LibraryCode(GradientQuantization(inter_bits=bits).codec("inter"))


def _local(every: int, **changes: Any) -> Alternative:
    return Alternative(how=LocalSteps(every=every, **changes))


# Embeddings and heads as all others, and differences in groups of 2048, as in the reports of docs/:
# methods are compared by their bits.
VARIANTS: dict[str, Variant | Alternative] = {BASELINE: Variant()}
VARIANTS |= {"both": with_bits(4, 4, LONG_GROUPS), "2 bits": with_bits(2, 2, LONG_GROUPS)}
VARIANTS |= {
    f"PowerSGD {rank}{f' from {start}' * bool(start)}": Alternative(
        how=Reduction(rank=rank, start=start)
    )
    for start in (0, 50)
    for rank in (1, 2, 4)
}
VARIANTS |= {
    f"PowerSGD {rank} in {b} bits": Alternative(how=Reduction(rank=rank, factors=_code(b)))
    for rank in (1, 2, 4, 8)
    for b in (8, 6, 4)
}
# All-reduces in codes between nodes, with what they left out, also of sums.
VARIANTS |= {f"{b}-bit all-reduce": Alternative(how=Reduction(code=_code(b))) for b in (2, 4)}
VARIANTS |= {
    f"PowerSGD 1, rest in 4 bits every {n}": Alternative(
        how=Reduction(rank=1, code=_code(4), turns=n)
    )
    for n in (8, 32)
}
VARIANTS["PowerSGD 1, rest in 2 bits"] = Alternative(how=Reduction(rank=1, code=_code(2)))
VARIANTS |= {f"4 bits every {n}": _local(n, code=_code(4)) for n in (4, 8, 16, 32, 64)}
# What of that is due to codes, and to the outer step.
VARIANTS |= {"fp32 every 32": _local(32), "2 bits every 32": _local(32, code=_code(2))}
VARIANTS |= {
    f"4 bits every {n}, {late} late": _local(n, code=_code(4), late=late)
    for n, late in ((16, 4), (16, 12), (32, 4), (32, 16), (64, 16), (64, 48))
}
VARIANTS |= {
    f"4 bits every {n}, outer {lr:g} and {momentum:g}": _local(
        n, code=_code(4), lr=lr, momentum=momentum
    )
    for n in (8, 16, 32)
    for lr, momentum in ((1.0, 0.0), (0.7, 0.9), (0.7, 0.3), (1.0, 0.3), (0.5, 0.6))
}


def sharded_bits(plan: Plan, nodes: int) -> float:
    """Bits that a node sends per parameter and step where each owns a share of the weights.

    Of codes that are the same for all parameters.
    """

    def of(codes: Codes | None, exact: float) -> float:
        return exact if codes is None else codes.inter.spec.bits_per_element(1 << 20)

    return (nodes - 1) / nodes * (of(plan.gradients, 32) + of(plan.weights, 16))


# Of reports from when the library had error feedback, which does not change the bits.
_FEEDBACK = re.compile(" with(out)? feedback$")


def bits(name: str, sizes: Sizes, vocab: int, nodes: int) -> float:
    """Bits that a node sends per parameter and step."""
    if name == PERTURBED:
        name = BASELINE
    variant = VARIANTS[_FEEDBACK.sub("", name)]
    if isinstance(variant, Variant):
        return sharded_bits(variant.plan, nodes)
    return variant.how.bits(shapes(sizes, vocab), nodes)


HEADER = ("variant", "seeds", "bits", *(f"ms at {rate}" for rate in RATES))
HEADER += ("validation loss", "against full precision", "std error", "worst")


def rows(outcomes: Outcomes, sizes: Sizes, vocab: int, nodes: int) -> list[list[str]]:
    """Return the rows below :data:`HEADER`, most bits first."""
    found = []
    for name, runs in outcomes.items():
        by_seed = changes(outcomes, name)
        gap = ["-"] * 3
        if by_seed and name != BASELINE:
            mean, error = mean_and_error(by_seed)
            worst = max(statistics.mean(values) for values in by_seed.values())
            gap = [f"{mean:+.2f}%", f"{error:.2f}%", f"{worst:+.2f}%"]
        sent = bits(name, sizes, vocab, nodes)
        times = [COMPUTE_MS + 1e3 * sent * PARAMETERS / rate for rate in RATES.values()]
        loss = f"{statistics.mean(run.val_loss for run in runs):.4f}"
        row = [name, str(len(by_seed) or len(runs)), f"{sent:.3f}", *(f"{t:.0f}" for t in times)]
        found.append((sent, [*row, loss, *gap]))
    return [row for _, row in sorted(found, key=lambda each: -each[0])]


def summary(outcomes: Outcomes, args: argparse.Namespace) -> str:
    """Lay out gaps and bits for a terminal."""
    sizes: Preset = args.sizes
    return table(rows(outcomes, sizes, sizes.vocab or BYTES, args.nodes), HEADER)


if __name__ == "__main__":
    main(
        Study(
            benchmark="fewer_bytes",
            description=__doc__.splitlines()[0],
            known=VARIANTS,
            make=start,
            summary=summary,
        )
    )
