"""Error of 8-bit gradient accumulation: which code keeps the sum over micro-batches closest.

After each micro-batch the stored sum is decoded, the new gradient is added in fp32 and the result
is encoded again, as in AGoQ (§5). Reported is the relative L2 error against the fp32 sum after 1,
4, 16 and 64 micro-batches. The last requantization of a window can be left out, since the sum goes
on to the reduction: `delivered` is the error then. `slope` is the projection of the stored sum on
the exact one; below 1, small gradients get lost on the way. Examples::

    python benchmarks/gradient_buffer.py --json gradient_buffer.json
    python benchmarks/gradient_buffer.py --data gaussian --schemes int8-g16,int8-g32-fp32-scales

Data: `gpt` are the gradients of a small GPT on the standard library of the running Python as bytes,
after some training; `gaussian` are independent samples. More schemes and data: commit 5b07bc7.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import table, write_report
from gpt import GPT, GPTConfig
from torch import Tensor

from lq_lightning.codecs import CodecSpec, decode, derive_seed, encode

CHECKPOINTS = (1, 4, 16, 64)
DATA = ("gpt", "gaussian")

Quantizer = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, slots=True)
class Scheme:
    """A format of the running sum.

    Attributes:
        nbytes: Bytes per parameter, scales included.
        quantize: Maps an fp32 vector and a seed to what would be read back from the buffer.
    """

    nbytes: float
    quantize: Quantizer


@dataclass(frozen=True, slots=True)
class Result:
    """Errors of one scheme on one kind of data; the lists follow ``CHECKPOINTS``.

    Attributes:
        stored: Relative L2 error of what the buffer holds.
        delivered: Relative L2 error of the sum when the last gradient is not stored again.
        slope: Projection of the stored sum on the exact one.
    """

    stored: list[float]
    delivered: list[float]
    slope: list[float]


# --- schemes --------------------------------------------------------------------------------------


def codec_scheme(code: str, group_size: int, **options: Any) -> Scheme:
    """A codec of the library, with bf16 scales unless ``options`` say otherwise."""
    spec = CodecSpec(
        **{"code": code, "group_size": group_size, "scale_dtype": "bfloat16"} | options
    )

    def quantize(x: Tensor, seed: int) -> Tensor:
        return decode(spec, encode(spec, x.view(1, -1), seed=seed), x.numel()).view(-1)

    return Scheme(spec.bits_per_element(1 << 20) / 8, quantize)


SCHEMES: dict[str, Scheme] = {
    "fp8-e4m3-g128": codec_scheme("fp8_e4m3", 128),
    **{f"int8-g{size}": codec_scheme("int8", size) for size in (16, 32, 64, 128)},
    "int8-g16-stochastic": codec_scheme("int8", 16, rounding="stochastic"),
    "int8-g128-hadamard128": codec_scheme("int8", 128, hadamard_size=128),
    "int8-g32-fp32-scales": codec_scheme("int8", 32, scale_dtype="float32"),  # the default
    "bfloat16": Scheme(2.0, lambda x, seed: x.bfloat16().float()),
}


# --- data -----------------------------------------------------------------------------------------


def gaussian(numel: int) -> Iterator[list[Tensor]]:
    """Yield ``[numel]`` gradients of micro-batches without end."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield [torch.randn(numel, generator=generator)]


def text_batches(config: GPTConfig, batch: int) -> Iterator[Tensor]:
    """Yield ``[batch, seq]`` random pieces of the Python standard library, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    data = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    generator = random.Random(0)
    while True:
        starts = [generator.randrange(len(data) - config.seq) for _ in range(batch)]
        yield torch.stack([data[s : s + config.seq] for s in starts]).long()


def gpt_gradients(train_steps: int) -> Iterator[list[Tensor]]:
    """Train a small GPT, then yield the gradients of micro-batches at its final weights."""
    config = GPTConfig(layers=3, hidden=192, heads=6, seq=128, vocab=256)
    torch.manual_seed(0)
    model = GPT(config)
    model.reset_local_shards(0)
    data = text_batches(config, batch=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(train_steps):
        optimizer.zero_grad()
        model(next(data)).backward()
        optimizer.step()
    while True:
        optimizer.zero_grad()
        model(next(data)).backward()
        yield [p.grad.flatten() for p in model.parameters() if p.grad is not None and p.ndim > 1]


# --- measurement ----------------------------------------------------------------------------------


class Accumulator:
    """The running sums of one scheme over the tensors of a model."""

    def __init__(self, scheme: Scheme, index: int) -> None:
        self._scheme, self._index = scheme, index
        self._sums: list[Tensor] | None = None
        self.stored: list[float] = []
        self.delivered: list[float] = []
        self.slope: list[float] = []

    def add(self, gradients: list[Tensor], exact: list[Tensor], step: int) -> None:
        """Add the gradients of micro-batch ``step`` (from 1) and measure where that is asked."""
        old = self._sums or [torch.zeros_like(g) for g in gradients]
        exact_in = [s + g for s, g in zip(old, gradients, strict=True)]
        self._sums = [
            self._scheme.quantize(s, derive_seed(self._index, step, i))
            for i, s in enumerate(exact_in)
        ]
        if step in CHECKPOINTS:
            norm = sum(float(e.double().square().sum()) for e in exact)
            self.stored.append(_distance(self._sums, exact) / norm**0.5)
            self.delivered.append(_distance(exact_in, exact) / norm**0.5)
            dots = zip(self._sums, exact, strict=True)
            self.slope.append(sum(float(s.double() @ e.double()) for s, e in dots) / norm)


def _distance(sums: list[Tensor], exact: list[Tensor]) -> float:
    pairs = zip(sums, exact, strict=True)
    return float(sum(float((s - e).double().square().sum()) for s, e in pairs)) ** 0.5


def measure(kind: str, schemes: dict[str, Scheme], args: argparse.Namespace) -> dict[str, Result]:
    """Accumulate one kind of data in every scheme side by side."""
    accumulators = {name: Accumulator(s, i) for i, (name, s) in enumerate(schemes.items())}
    exact: list[Tensor] | None = None
    source = gpt_gradients(args.train_steps) if kind == "gpt" else gaussian(args.numel)
    for step in range(1, max(CHECKPOINTS) + 1):
        gradients = next(source)
        if exact is None:
            exact = [torch.zeros_like(g, dtype=torch.float64) for g in gradients]
        for total, gradient in zip(exact, gradients, strict=True):
            total += gradient
        for accumulator in accumulators.values():
            accumulator.add(gradients, exact, step)
    return {name: Result(a.stored, a.delivered, a.slope) for name, a in accumulators.items()}


def main() -> None:
    """Measure, print one table per kind of data, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemes", default=",".join(SCHEMES), help=", ".join(SCHEMES))
    parser.add_argument("--data", default=",".join(DATA), help=", ".join(DATA))
    parser.add_argument("--numel", type=int, default=1 << 16, help="elements of synthetic data")
    parser.add_argument("--train-steps", type=int, default=150, help="before gradients are taken")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    schemes = {name: SCHEMES[name] for name in args.schemes.split(",")}
    results = {}
    for kind in args.data.split(","):
        results[kind] = measure(kind, schemes, args)
        rows = [
            [name, f"{schemes[name].nbytes:.3f}"]
            + [f"{100 * e:.2f}" for e in result.stored]
            + [f"{100 * result.delivered[CHECKPOINTS.index(16)]:.2f}", f"{result.slope[-1]:.4f}"]
            for name, result in results[kind].items()
        ]
        header = ["scheme", "bytes", *(f"{n} mb, %" for n in CHECKPOINTS), "16 delivered", "slope"]
        print(f"\n{kind}\n{table(rows, header)}", flush=True)
    write_report(
        args.json,
        "gradient_buffer",
        {
            "microbatches": CHECKPOINTS,
            "nbytes_per_parameter": {name: s.nbytes for name, s in schemes.items()},
            "errors": {
                kind: {name: asdict(r) for name, r in by_scheme.items()}
                for kind, by_scheme in results.items()
            },
        },
    )


if __name__ == "__main__":
    main()
