"""Errors of codes in one training of a small GPT: sums, group sizes, formats of Adam's moments.

`sums` are relative L2 errors of gradient sums after 1, 4, 16 and 64 micro-batches, each of which is
added to the decoded sum, as in AGoQ (§5). `groups` is SDP4Bit's table 3: bits with scales, and the
relative L2 error of gradients, of weights against those that ranks should have, and of these in
units of a step's change, where differences are sent (`qWD`) and where the weights themselves would
be (the paper's `qW`, which no option does). `moments` is COAT's table 1: the squared error of
m / sqrt(v), in percent of its square, by the formats of m (rows) and v (columns); formats of this
library beside the paper's, emulated here. Losses are those of `loss_study.py`::

    python benchmarks/code_errors.py --json code_errors.json
    python benchmarks/code_errors.py --tables moments --steps 150

The GPT trains on the standard library of the running Python as bytes; with ``--tiny`` it is smaller
and sees random ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from common import argument_parser, choices, table, write_report
from corpus import standard_library
from gpt import GPT, GPTConfig
from torch import Tensor

from lq_lightning.codecs import CodecSpec, decode, derive_seed, encode
from lq_lightning.data_parallel import GradientQuantization, WeightQuantization
from lq_lightning.kernels.optimizer_step.formats import state_format
from lq_lightning.optim.state import decoded, encoded

Row = dict[str, Any]
Training = Iterator[tuple[GPT, torch.optim.Optimizer]]


def training(tiny: bool) -> Training:
    """Yield a small GPT with the gradients of one batch after another, and its optimizer."""
    sizes = (
        {"layers": 1, "hidden": 64, "heads": 2}
        if tiny
        else {"layers": 3, "hidden": 192, "heads": 6}
    )
    config = GPTConfig(**sizes, seq=128, vocab=264)
    torch.manual_seed(0)
    model = GPT(config)
    model.reset_local_shards(0)
    blocks = torch.randint(256, (1024, config.seq))
    if not tiny:
        blocks = torch.from_numpy(standard_library(config.seq - 1).train.astype("int64"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for rows in torch.randperm(len(blocks)).split(4):
        optimizer.zero_grad()
        model(blocks[rows]).backward()
        yield model, optimizer


def through(spec: CodecSpec, x: Tensor, seed: int | None = None) -> Tensor:
    """Encode and decode a vector."""
    return decode(spec, encode(spec, x.view(1, -1), seed=seed), x.numel()).view(-1)


def matrices(model: torch.nn.Module, of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return something of all matrices of the blocks as one vector, fp32."""
    blocks = [p for name, p in model.named_parameters() if p.ndim > 1 and "blocks" in name]
    return torch.cat([of(p).detach().flatten().float() for p in blocks])


def relative(found: Tensor, exact: Tensor, norm: Tensor | None = None) -> float:
    """Return the L2 distance, relative to a vector."""
    return float((found - exact).norm() / (exact if norm is None else norm).norm())


# --- sums -----------------------------------------------------------------------------------------

CHECKPOINTS = (1, 4, 16, 64)
_SHORT: dict[str, Any] = {"scale_dtype": "bfloat16"}
SUMS: dict[str, CodecSpec | None] = {
    "int8-g32-fp32-scales": CodecSpec(code="int8", group_size=32, scale_dtype="float32"),
    "int8-g128": CodecSpec(code="int8", group_size=128, **_SHORT),
    "int8-g16-stochastic": CodecSpec(code="int8", group_size=16, rounding="stochastic", **_SHORT),
    "fp8-e4m3-g128": CodecSpec(code="fp8_e4m3", group_size=128, **_SHORT),
    "bfloat16": None,
}


def sums(steps: int, tiny: bool) -> list[Row]:
    """Add gradients at a training's final weights in every code side by side."""
    rows: dict[str, Row] = {name: {"code": name} for name in SUMS}
    exact, found = torch.zeros(()).double(), dict.fromkeys(SUMS, torch.zeros(()))
    for step, (model, optimizer) in enumerate(training(tiny), start=1 - steps):
        if step < 1:
            optimizer.step()
            continue
        gradient = matrices(model, lambda p: p.grad)  # type: ignore[arg-type, return-value]
        exact = exact + gradient
        for name, spec in SUMS.items():
            whole = found[name] + gradient
            seed = derive_seed(0, step)
            found[name] = whole.bfloat16().float() if spec is None else through(spec, whole, seed)
            if step in CHECKPOINTS:
                rows[name][f"after_{step}"] = relative(found[name], exact)
        if step == CHECKPOINTS[-1]:
            break
    return list(rows.values())


# --- groups ---------------------------------------------------------------------------------------

GRADIENTS = {
    f"{name}, groups of {size}": GradientQuantization(method=name, group_size=size)  # type: ignore[arg-type]
    for name, sizes in (("TLq-HS", (64, 128, 512)), ("TLq", (128,)), ("ULq", (128,)))
    for size in sizes
}
WEIGHTS = {
    "qWD, groups of 128, NF4": WeightQuantization(),
    **{
        f"{what}, groups of {size}": WeightQuantization(code="int", group_size=size)
        for what, sizes in (("qWD", (1024, 2048)), ("qW", (32, 128, 2048)))
        for size in sizes
    },
}


def groups(steps: int, tiny: bool) -> list[Row]:
    """Follow the last ten steps of a training in every code; return the errors at their end."""
    replicas: dict[str, Tensor] = {}
    rows: list[Row] = []
    ranks: list[Tensor] = []  # gradients of the last two batches, as of two ranks of a node
    for step, (model, optimizer) in enumerate(training(tiny)):
        gradient = matrices(model, lambda p: p.grad)  # type: ignore[arg-type, return-value]
        ranks = [*ranks[-1:], gradient]
        before = matrices(model, lambda p: p)
        optimizer.step()
        weights = matrices(model, lambda p: p)
        for name, config in WEIGHTS.items() if step > steps - 10 else ():
            differs = name.startswith("qWD")
            base = replicas.get(name, before) if differs else torch.zeros_like(before)
            replicas[name] = base + through(config.codec(), weights - base)
        if step == steps:
            break
    for name, scheme in GRADIENTS.items():
        intra, inter = scheme.codec("intra"), scheme.codec("inter")
        summed = through(inter, sum((through(intra, g) for g in ranks), torch.zeros(())))
        error = relative(summed, sum(ranks, torch.zeros(())))
        rows.append({"code": name, "bits": inter.bits_per_element(1 << 20), "error": error})
    for name, config in WEIGHTS.items():
        row = {"code": name, "bits": config.codec().bits_per_element(1 << 20)}
        row["error"] = relative(replicas[name], weights)
        rows.append(row | {"error_in_steps": relative(replicas[name], weights, weights - before)})
    return rows


# --- moments --------------------------------------------------------------------------------------


def emulated_fp8(dtype: torch.dtype, expand: bool, x: Tensor, signed: bool) -> Tensor:
    """Round to FP8 in groups of 128, by COAT's formulas, with or without range expansion."""
    runs = x.double().view(-1, 128)
    sizes = runs.abs()
    largest, limits = sizes.amax(1, keepdim=True), torch.finfo(dtype)
    power = torch.ones_like(largest)
    if expand:
        smallest = sizes.masked_fill(sizes == 0, math.inf).amin(1, keepdim=True)
        span = math.log2(limits.max) - math.log2(limits.smallest_normal * limits.eps)
        power = span / (largest / smallest).log2().clamp_min(1.0)
    scaled = (sizes / largest).nan_to_num() ** power * limits.max
    rounded = (scaled.float().to(dtype).double() / limits.max) ** (1 / power) * largest
    return (rounded * runs.sign()).float().view(-1)


def own_format(name: str, x: Tensor, signed: bool) -> Tensor:
    """Store and read as this library's optimizers do."""
    param, fmt = x.view(-1, 128), state_format(name, signed)
    return decoded(encoded(param, "m", param, fmt), "m", param, fmt).view(-1)


MOMENTS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "fp32": lambda x, signed: x,
    "E4M3": partial(emulated_fp8, torch.float8_e4m3fn, False),
    "E4M3+Expand": partial(emulated_fp8, torch.float8_e4m3fn, True),
    "E5M2": partial(emulated_fp8, torch.float8_e5m2, False),
    "E5M2+Expand": partial(emulated_fp8, torch.float8_e5m2, True),
    **{name: partial(own_format, name) for name in ("expanded_fp8", "dynamic8")},
}


def moments(steps: int, tiny: bool) -> list[Row]:
    """Compare Adam's update after some steps for every pair of formats."""
    model, optimizer = next(batches := training(tiny))
    for _ in range(steps):
        optimizer.step()
        next(batches)
    first = matrices(model, lambda p: optimizer.state[p]["exp_avg"])
    second = matrices(model, lambda p: optimizer.state[p]["exp_avg_sq"])

    def update(m: Tensor, v: Tensor) -> Tensor:
        return m.double() / (v.double().sqrt() + 1e-8)

    exact = update(first, second)
    firsts = {name: code(first, True) for name, code in MOMENTS.items()}
    seconds = {name: code(second, False) for name, code in MOMENTS.items()}
    return [
        {"first": a, "second": b, "squared_error": float((update(m, v) - exact).square().mean())}
        | {"relative_squared_error": relative(update(m, v), exact) ** 2}
        for a, m in firsts.items()
        for b, v in seconds.items()
    ]


def show(name: str, rows: list[Row]) -> str:
    """Lay out the rows of one table."""
    if name != "moments":
        heads = list(rows[-1])
        cells = [
            [f"{r[h]:.4g}" if isinstance(r.get(h), float) else r.get(h, "-") for h in heads]
            for r in rows
        ]
        return table(cells, heads)
    by_first: dict[str, list[object]] = {}
    for row in rows:
        share = f"{100 * row['relative_squared_error']:.3g}"
        by_first.setdefault(row["first"], [row["first"]]).append(share)
    return table(list(by_first.values()), ["m \\ v, error %", *MOMENTS])


TABLES = {"sums": sums, "groups": groups, "moments": moments}


def main() -> None:
    """Measure, print, write JSON."""
    parser = argument_parser(__doc__)
    parser.add_argument("--tables", default=",".join(TABLES), help=", ".join(TABLES))
    parser.add_argument("--steps", type=int, default=150, help="of training")
    parser.add_argument("--tiny", action="store_true", help="for a test")
    args = parser.parse_args()
    rows: list[Row] = []
    for name in choices(parser, "tables", args.tables, TABLES):
        found = TABLES[name](args.steps, args.tiny)
        print(f"\n{show(name, found)}", flush=True)
        rows += [{"table": name} | row for row in found]
        write_report(args.json, "code_errors", {"steps": args.steps, "rows": rows})


if __name__ == "__main__":
    main()
