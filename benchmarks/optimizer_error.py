"""Error of Adam's update direction m / sqrt(v) when both moments are codes, by pair of formats.

The comparison of COAT's table 1. Both moments come from plain AdamW: from a checkpoint, or from
gradients drawn here (Student t with 3 degrees of freedom, scales that differ by row and column).
They are encoded and decoded once; the mean squared error is that of m / (sqrt(v) + eps) over all
elements. Second moments that become zero while they were not are counted.

    python benchmarks/optimizer_error.py --out outputs/optimizer_error.json
    python benchmarks/optimizer_error.py --checkpoint last.ckpt
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.common import table, write_report
from lq_lightning.kernels.optimizer_step import state_format
from lq_lightning.optim.state import decoded, encoded

FORMATS = ("expanded_fp8", "dynamic8", "fp8", "int8", "float32")
MIN_NUMEL = 4096


def drawn_moments(steps: int, beta1: float, beta2: float) -> list[tuple[Tensor, Tensor]]:
    """Moments of 1024x1024 parameters, corrected for their bias."""
    generator = torch.Generator().manual_seed(0)
    shape = (1024, 1024)
    scale = torch.exp(torch.randn(shape[0], 1, generator=generator)) * 1e-4
    scale = scale * torch.exp(torch.randn(1, shape[1], generator=generator))
    m, v = torch.zeros(shape), torch.zeros(shape)
    for _ in range(steps):
        normal = torch.randn(shape, generator=generator)
        chi = sum(torch.randn(shape, generator=generator).square() for _ in range(3))
        g = scale * normal / (torch.as_tensor(chi) / 3).sqrt()
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g.square()
    return [(m / (1 - beta1**steps), v / (1 - beta2**steps))]


def saved_moments(path: Path) -> list[tuple[Tensor, Tensor]]:
    """Moments of the matrices in a checkpoint of Lightning, or in an optimizer's state dict."""
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    states = checkpoint.get("optimizer_states", [checkpoint])
    pairs = []
    for state in states:
        for entry in state["state"].values():
            m, v = entry.get("exp_avg"), entry.get("exp_avg_sq")
            if m is not None and v is not None and m.dim() > 1 and m.numel() >= MIN_NUMEL:
                pairs.append((m.float(), v.float()))
    if not pairs:
        raise SystemExit(f"{path} has no fp32 moments of matrices; save it with AdamW")
    return pairs


def _round_trip(values: Tensor, name: str, signed: bool) -> Tensor:
    fmt = state_format(name, signed)
    return decoded(encoded(values, "x", values, fmt), "x", values, fmt)


def errors(pairs: list[tuple[Tensor, Tensor]], eps: float) -> list[dict[str, Any]]:
    """Mean squared errors by pair of formats, and the share of second moments that became zero."""
    results = []
    for second in FORMATS:
        vs = [_round_trip(v, second, signed=False) for _, v in pairs]
        lost = sum(int(((q == 0) & (v > 0)).sum()) for q, (_, v) in zip(vs, pairs, strict=True))
        for first in FORMATS:
            total = 0.0
            for q, (m, v) in zip(vs, pairs, strict=True):
                exact = m / (v.sqrt() + eps)
                coded = _round_trip(m, first, signed=True) / (q.sqrt() + eps)
                total += float((coded - exact).double().square().sum())
            numel = sum(m.numel() for m, _ in pairs)
            results.append(
                {"first": first, "second": second, "mse": total / numel, "lost": lost / numel}
            )
    return results


def main() -> int:
    """Measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON report to write")
    parser.add_argument("--checkpoint", type=Path, help="take the moments from here")
    parser.add_argument("--steps", type=int, default=100, help="of drawn gradients")
    parser.add_argument("--eps", type=float, default=1e-8)
    arguments = parser.parse_args()
    if arguments.checkpoint is None:
        pairs = drawn_moments(arguments.steps, 0.9, 0.95)
    else:
        pairs = saved_moments(arguments.checkpoint)
    results = errors(pairs, arguments.eps)
    by_pair = {(r["first"], r["second"]): r for r in results}
    rows = [
        [
            second,
            *(f"{by_pair[first, second]['mse']:.3g}" for first in FORMATS),
            f"{by_pair[FORMATS[0], second]['lost']:.2%}",
        ]
        for second in FORMATS
    ]
    print(table(rows, ["v \\ m", *FORMATS, "v lost"]))
    write_report(arguments.out, "optimizer_error", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
