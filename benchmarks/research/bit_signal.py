"""What gradients say of bit widths, and how fast bits come down: AMAQ's gates by themselves.

    python benchmarks/research/bit_signal.py trunk.pt --preset llama_2m --json bit_signal.json

``trunk.pt`` is the shared start of a study (``--trunk`` of ``llama_study.py``), read with the same
text. First all lines of all sites get the same width, and gradients of bits are measured over steps
without an update: "signal" is the mean over steps by the deviation from step to step, the median of
channels (without any signal it would be 0.67 by the root of the steps), "of the site" that of the
sum over channels; "fisher" the same of the empirical Fisher information times squared errors, and
"ratio" what gradients times errors sum up to by what Fisher information times squared errors do.

Then the library's gates are trained on draws of normal values of these means and deviations, which
change with bits as errors squared and errors do. "alone" is without them: there Adam makes the
steps depend on the learning rate only.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from ablation_data import load
from adaptive_bits import sites_of
from adaptive_gates import AdaptiveOptions, Gate
from common import table, write_report
from corpus import tokens_folder
from llama import PRESETS
from llama_training import Training
from torch import Tensor

from lq_lightning.adaptive import AdaptiveBitsConfig, BitGate, GateOptimizer, attach_quantizers

WIDTHS = (3, 4, 6)
BETAS = (0.003, 0.01, 0.02, 0.03, 0.1, 0.3, 1.0)
RATES = (0.003, 0.01, 0.03)
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Effects:
    """What steps of a site say of its lines at one width.

    Attributes:
        width: Of all lines.
        sums: ``[steps, 2, lines]``: gradients times errors, and what the Fisher information
            expects these to be.
    """

    width: int
    sums: Tensor

    @property
    def noise(self) -> Tensor:
        """Deviation of the first from step to step, ``[lines]``."""
        return self.sums[:, 0].std(0)

    def row(self, site: str) -> Row:
        """Return what a report says of them."""
        mean, deviation = self.sums.mean(0), self.sums.std(0)
        of_site = self.sums.sum(2)
        signals = (mean.abs() / deviation).median(1).values.tolist()
        of_sites = (of_site.mean(0) / of_site.std(0)).tolist()
        return {
            "site": site,
            "width": self.width,
            "signal": signals[0],
            "signal_of_the_site": of_sites[0],
            "fisher": signals[1],
            "fisher_of_the_site": of_sites[1],
            "ratio": float(of_site[:, 0].mean() / of_site[:, 1].mean()),
        }


def measure(training: Training, which: str, width: int, steps: int) -> dict[str, Effects]:
    """Return what steps without an update say, by site."""
    model, size = training.model, training.preset
    options = AdaptiveOptions(start=float(width))
    sites = sites_of(model, which)
    device = training.weights.masters[0].device
    gates = {name: Gate(options, size.hidden, device) for name in sites}
    handle = attach_quantizers(model, {sites[name]: gate.quantize for name, gate in gates.items()})
    found: dict[str, list[Tensor]] = {name: [] for name in gates}
    for _ in range(steps):
        model(*next(training.rows)).backward()
        model.zero_grad()
        for name, gate in gates.items():
            found[name].append(gate.effects.clone())
            gate.effects.zero_()
    handle.remove()
    return {name: Effects(width, torch.stack(sums).cpu()) for name, sums in found.items()}


def steps_to_target(
    config: AdaptiveBitsConfig, effects: list[Effects], heard: bool, most: int
) -> tuple[int | None, float]:
    """Train gates on draws.

    Args:
        config: Of the gates.
        effects: Of each site, at one width.
        heard: Whether the loss says anything.
        most: Steps.

    Returns:
        Steps to the target, None if it is not reached, and the deviation of all bits at the end.
    """
    generator = torch.Generator().manual_seed(0)
    gates = {
        str(index): BitGate(config, of.sums.shape[2], name=str(index))
        for index, of in enumerate(effects)
    }
    optimizer = GateOptimizer(gates, config)
    reached = None
    for step in range(1, most + 1):
        for gate, of in zip(gates.values(), effects, strict=True):
            finer = torch.exp2(of.width - gate.widths.float())
            mean = of.sums[:, 0].mean() * finer.square()
            noise = of.noise * finer * torch.randn(len(finer), generator=generator)
            sums = (mean + noise) * heard
            gate.accumulate(torch.stack([sums, torch.zeros_like(sums)]), 1)
        optimizer.step()
        if optimizer.reached:
            reached = step
            break
    bits = torch.cat([gate.bits() for gate in gates.values()])
    return reached, float(bits.std())


def speeds(effects: list[Effects], most: int) -> list[Row]:
    """Return the steps to the targets of the presets, for values of beta and learning rates."""
    rows = []
    for target, rate in itertools.product((4.0, 3.0), RATES):
        # Full ranges, whose errors halve with each bit, as the draws' do.
        config = AdaptiveBitsConfig.preset(target, learning_rate=rate, ranges="full")
        alone = steps_to_target(config, effects, False, most)[0]
        for beta in BETAS:
            steps, spread = steps_to_target(replace(config, beta=beta), effects, True, most)
            named = {"target": target, "learning_rate": rate, "beta": beta}
            rows.append(named | {"steps": steps, "alone": alone, "deviation_of_bits": spread})
    return rows


def show(rows: list[Row]) -> str:
    """Lay out rows for a terminal."""
    shown = [
        [f"{value:.3g}" if isinstance(value, float) else value for value in row.values()]
        for row in rows
    ]
    return table(shown, list(rows[0]))


def main() -> int:
    """Measure and report; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", type=Path)
    parser.add_argument("--preset", choices=PRESETS, default="llama_125m")
    parser.add_argument("--batch", type=int, help="instead of the preset's, in one micro-batch")
    parser.add_argument("--steps", type=int, default=24, help="to measure (default: 24)")
    parser.add_argument("--most", type=int, default=3000, help="steps of gates (default: 3000)")
    parser.add_argument("--text", type=Path, help="folder with .py files (default: the stdlib)")
    parser.add_argument("--tokens", type=tokens_folder, help="that research/kernel_text.py wrote")
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    parser.add_argument("--json", type=Path, help="where to write the report")
    args = parser.parse_args()
    preset = PRESETS[args.preset]
    preset = replace(preset, batch=args.batch or preset.batch)
    cuda = torch.cuda.is_available() and not args.cpu
    data = load(args.tokens, args.text, preset.seq, torch.device("cuda" if cuda else "cpu"))
    training = Training(data, preset, seed=0)
    training.begin_from(args.weights)
    training.weights.publish()
    measured = {
        which: [measure(training, which, width, args.steps) for width in WIDTHS]
        for which in ("boundaries", "layers")
    }
    signals = [of.row(site) for by_site in measured["layers"] for site, of in by_site.items()]
    print(show(signals))
    at_four = measured["boundaries"][WIDTHS.index(4)]
    speed = speeds(list(at_four.values()), args.most)
    print(show(speed))
    print(f"noise alone gives a signal of {0.67 / math.sqrt(args.steps):.2f}")
    if args.json:
        settings = {"preset": args.preset, "batch": preset.batch, "steps": args.steps}
        write_report(args.json, "bit_signal", settings | {"signals": signals, "speeds": speed})
    return 0


if __name__ == "__main__":
    sys.exit(main())
