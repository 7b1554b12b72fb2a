"""Size of Adam's updates with coded states beside fp32's, after many steps, by format and beta2.

A second moment changes by the part 1 - beta2 of itself in a step. Where codes are further apart and
rounded to the nearest, it does not change at all, and updates drift away from those of fp32 over
thousands of steps, unnoticed by any comparison of single steps. Here QuantizedAdamW and torch's
AdamW see the same gradients, normal ones of scales that differ by element (lognormal, sigma 1), in
two cases: their scale stays, or falls to a tenth half-way. The ratios are those of the mean
magnitudes, and of the norms, of the updates of the last tenth of the steps.

    python benchmarks/optimizer_drift.py --out outputs/optimizer_drift.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from benchmarks.common import table, write_report
from lq_lightning.optim import OptimizerQuantization, QuantizedAdamW

FORMATS = ("expanded_fp8", "dynamic8", "fp8", "int8")
BETAS = (0.95, 0.99, 0.999, 0.9999)
SAMPLES = 20  # steps, evenly spaced over the last tenth


def gradients(shape: tuple[int, int], steps: int, falls: bool, sigma: float) -> Iterator[Tensor]:
    """Normal gradients of fixed scales, lognormal with ``sigma``."""
    generator = torch.Generator().manual_seed(1)
    scale = torch.exp(sigma * torch.randn(shape, generator=generator))
    for step in range(steps):
        fallen = 0.1 if falls and step >= steps // 2 else 1.0
        yield fallen * scale * torch.randn(shape, generator=generator)


def update_ratios(
    name: str,
    beta2: float,
    steps: int,
    falls: bool,
    *,
    rows: int = 64,
    sigma: float = 1.0,
    device: str = "cpu",
) -> tuple[float, float]:
    """Compare the updates of coded states with those of fp32 states.

    Args:
        name: format of both moments.
        beta2: of both optimizers; beta1 is 0.9.
        steps: to take.
        falls: whether gradients fall to a tenth half-way.
        rows: of 128 parameters.
        sigma: of the logarithms of the scales of gradients.
        device: where.

    Returns:
        Ratios of the mean magnitudes and of the norms of updates.
    """
    config = OptimizerQuantization(first_moment=name, second_moment=name, min_numel=0)  # type: ignore[arg-type]
    params = [nn.Parameter(torch.zeros(rows, 128, device=device)) for _ in range(2)]
    options: dict[str, Any] = {"lr": 1.0, "betas": (0.9, beta2), "weight_decay": 0.0}
    optimizers = [
        QuantizedAdamW([params[0]], quantization=config, **options),
        torch.optim.AdamW([params[1]], **options),
    ]
    means, squares = [0.0, 0.0], [0.0, 0.0]
    every = max(1, steps // 10 // SAMPLES)
    for step, grad in enumerate(gradients((rows, 128), steps, falls, sigma), 1):
        measured = step > steps - every * SAMPLES and step % every == 0
        for index, (param, optimizer) in enumerate(zip(params, optimizers, strict=True)):
            param.grad = grad.to(device)
            with torch.no_grad():
                param.zero_()  # what a step leaves is its update
            optimizer.step()
            if measured:
                means[index] += float(param.detach().abs().mean())
                squares[index] += float(param.detach().square().mean())
    return means[0] / means[1], (squares[0] / squares[1]) ** 0.5


def main() -> int:
    """Measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON report to write")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    results = []
    for name in arguments.formats:
        for falls in (False, True):
            for beta2 in BETAS:
                mean, norm = update_ratios(
                    name,
                    beta2,
                    arguments.steps,
                    falls,
                    sigma=arguments.sigma,
                    device=arguments.device,
                )
                found = {"format": name, "falls": falls, "beta2": beta2, "mean": mean, "norm": norm}
                results.append(found)
    headers = ["format", "gradients", *(f"beta2 {beta2}" for beta2 in BETAS)]
    cells = {(r["format"], r["falls"], r["beta2"]): r for r in results}
    rows = []
    for name in arguments.formats:
        for falls in (False, True):
            each = [cells[name, falls, beta2] for beta2 in BETAS]
            ratios = [f"{r['mean']:.3f} {r['norm']:.3f}" for r in each]
            rows.append([name, "fall" if falls else "stay", *ratios])
    print(table(rows, headers))
    report = {"steps": arguments.steps, "sigma": arguments.sigma, "cases": results}
    write_report(arguments.out, "optimizer_drift", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
