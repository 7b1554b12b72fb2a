"""Error of Adam's update direction m / sqrt(v) when both moments are codes, by pair of formats.

The comparison of COAT's table 1, in two tables: for the formats of the library, and for those of
the paper, E4M3 and E5M2 with and without its expansion, which plain torch stands for here. Both
moments come from plain AdamW: from a checkpoint, or from gradients drawn here (Student t with 3
degrees of freedom, scales that differ by row and column). They are encoded and decoded once; the
mean squared error is that of m / (sqrt(v) + eps) over all elements. Second moments that become zero
while they were not are counted.

    python benchmarks/research/optimizer_error.py --out outputs/optimizer_error.json
    python benchmarks/research/optimizer_error.py --checkpoint last.ckpt
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.common import table, write_report
from lq_lightning.kernels.optimizer_step import GROUP_SIZE, state_format
from lq_lightning.optim.state import decoded, encoded

MIN_NUMEL = 4096
BETAS = (0.9, 0.95)


# --- formats --------------------------------------------------------------------------------------


def library_round_trip(values: Tensor, signed: bool, name: str) -> Tensor:
    """What a format of the library makes of ``values``."""
    fmt = state_format(name, signed)
    return decoded(encoded(values, "x", values, fmt), "x", values, fmt)


def coat_round_trip(values: Tensor, signed: bool, dtype: torch.dtype, expand: bool) -> Tensor:
    """What COAT's FP8 makes of ``values``, as its section 4 writes it.

    Flat groups of 128 with a scale in full precision. The expansion raises magnitudes to
    ``k = log(range of the format) / log(max / min of the group)``, not rounded, where the range is
    the largest over the smallest subnormal number; the centre that COAT divides by cancels out.
    Differs in: zeros do not count for the minimum, and a group whose values are all equal has
    ``k = 1``, where the formula divides by zero.
    """
    info = torch.finfo(dtype)
    groups = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % GROUP_SIZE))
    groups = groups.view(-1, GROUP_SIZE).double()
    magnitudes = groups.abs()
    largest = magnitudes.amax(1, keepdim=True)
    largest = largest.where(largest > 0, 1.0)
    power = torch.ones_like(largest)
    if expand:
        smallest = magnitudes.where(magnitudes > 0, torch.inf).amin(1, keepdim=True)
        octaves = torch.log2(largest / smallest)
        code_octaves = math.log2(info.max / (info.smallest_normal * info.eps))
        power = torch.where(octaves > 0, code_octaves / octaves, 1.0)
    codes = ((magnitudes / largest) ** power * info.max).float().to(dtype)
    result = (codes.double() / info.max) ** (1 / power) * largest * groups.sign()
    return result.flatten()[: values.numel()].view_as(values).float()


RoundTrip = Callable[[Tensor, bool], Tensor]
LIBRARY: dict[str, RoundTrip] = {
    name: partial(library_round_trip, name=name)
    for name in ("expanded_fp8", "dynamic8", "fp8", "int8", "float32")
}
COAT: dict[str, RoundTrip] = {
    f"{name}+Expand" if expand else name: partial(coat_round_trip, dtype=dtype, expand=expand)
    for name, dtype in (("E4M3", torch.float8_e4m3fn), ("E5M2", torch.float8_e5m2))
    for expand in (False, True)
}


# --- moments --------------------------------------------------------------------------------------


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


# --- measurement ----------------------------------------------------------------------------------


def errors(
    pairs: list[tuple[Tensor, Tensor]], formats: dict[str, RoundTrip], eps: float
) -> list[dict[str, Any]]:
    """Mean squared errors by pair of formats, and the share of second moments that became zero."""
    squares = {(first, second): 0.0 for second in formats for first in formats}
    lost = dict.fromkeys(formats, 0)
    for m, v in pairs:
        exact = m / (v.sqrt() + eps)
        firsts = {name: round_trip(m, signed=True) for name, round_trip in formats.items()}
        for second, round_trip in formats.items():
            q = round_trip(v, signed=False)
            lost[second] += int(((q == 0) & (v > 0)).sum())
            divisor = q.sqrt() + eps
            for first, coded in firsts.items():
                error = (coded / divisor - exact).double()
                squares[first, second] += float(error.square().sum())
    numel = sum(m.numel() for m, _ in pairs)
    return [
        {"first": first, "second": second, "mse": total / numel, "lost": lost[second] / numel}
        for (first, second), total in squares.items()
    ]


def show(results: list[dict[str, Any]]) -> str:
    """Lay out the errors, first moments by row as in COAT; the last row is what became zero."""
    by_pair = {(r["first"], r["second"]): r for r in results}
    names = list(dict.fromkeys(first for first, _ in by_pair))
    rows = [[m, *(f"{by_pair[m, v]['mse']:.3g}" for v in names)] for m in names]
    rows.append(["v lost", *(f"{100 * by_pair[names[0], v]['lost']:.2g}%" for v in names)])
    return table(rows, ["m \\ v", *names])


def main() -> int:
    """Measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON report to write")
    parser.add_argument("--checkpoint", type=Path, help="take the moments from here")
    parser.add_argument("--steps", type=int, default=100, help="of drawn gradients")
    parser.add_argument("--eps", type=float, default=1e-8)
    arguments = parser.parse_args()
    if arguments.checkpoint is None:
        pairs = drawn_moments(arguments.steps, *BETAS)
        source: dict[str, Any] = {"checkpoint": None, "steps": arguments.steps, "betas": BETAS}
    else:
        pairs = saved_moments(arguments.checkpoint)
        source = {"checkpoint": arguments.checkpoint.name}
    source |= {"matrices": len(pairs), "numel": sum(m.numel() for m, _ in pairs)}
    library, paper = (errors(pairs, formats, arguments.eps) for formats in (LIBRARY, COAT))
    print(f"{show(library)}\n\nFormats of COAT's table 1:\n{show(paper)}")
    results = {"moments": source, "eps": arguments.eps, "library": library, "coat": paper}
    write_report(arguments.out, "optimizer_error", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
