"""Error of codecs of stage boundaries on hidden states and gradients of trained models, by depth.

    python benchmarks/research/trained_models.py outputs/models
    python benchmarks/research/boundary_error.py outputs/models/llama_0600.pt --out error.json

A boundary is behind every layer but the last. ``hidden`` and ``gradient`` are ``|y - x| / |x|`` of
what crosses it, a mean over boundaries and batches, at the true bits per value. ``outliers`` is
that of all other values where two channels of hidden states are so many times larger, as in large
models and not in these; ``first token`` has them in the first token of each sequence alone, and is
the error of that token. ``all weights`` is the error of the gradient of all weights when every
boundary is coded, hidden states alone or gradients alone, and ``bias`` that of its mean over
batches (TAH-Quant, assumption 4: below 0.4 and 0.1); ``loss`` is the change of the loss.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from activation_error import load, relative, rounded, show, whole_gradients
from coded_boundaries import Codec, CodedBoundaries
from common import write_report
from corpus import standard_library
from pipeline_ablation import groups
from torch import Tensor, nn
from trained_models import SEQ, batch, blocks_of, loss_of

from lq_lightning.pipeline.boundary import Message, TAHQuantization

OUTLIER_CHANNELS = (13, 141)  # in tiles of their own, up to 128 channels
OUTLIER_SIZE = 100.0

CODECS: dict[str, Codec] = {
    "tah": TAHQuantization(),
    "tah without hadamard": TAHQuantization(hadamard=False),
    "tah all int4": TAHQuantization(int4_share=1.0),
    "tah all int3": TAHQuantization(int4_share=0.0),
    "tah tile 8": TAHQuantization(tile_size=8),
    "tah tile 32": TAHQuantization(tile_size=32),
    "tah tile 128": TAHQuantization(tile_size=128),
    "tah tile 128 all int4": TAHQuantization(tile_size=128, int4_share=1.0),
    "tah5": TAHQuantization(bits=5),
    "tah5 tile 128": TAHQuantization(bits=5, tile_size=128),
    "int3 tile 64": groups("int3", 64),
    "int4 tile 32": groups("int4", 32),
    "int4 tile 64": groups("int4", 64),
    "int4 tile 128": groups("int4", 128),
    "int4 tile 64 hadamard 64": groups("int4", 64, 64),
    "int4 tile 128 hadamard 128": groups("int4", 128, 128),
    "nf4 tile 32": groups("nf4", 32),
    "nf4 tile 64": groups("nf4", 64),
    "nf4 tile 64 hadamard 64": groups("nf4", 64, 64),
    "nf4 tile 128": groups("nf4", 128),
    "nf4 tile 128 hadamard 128": groups("nf4", 128, 128),
    "fp4 tile 32": groups("fp4_e2m1", 32),
    "int5 tile 64": groups("int5", 64),
    "int5 tile 128": groups("int5", 128),
    "int6 tile 32": groups("int6", 32),
    "int6 tile 64": groups("int6", 64),
    "int6 tile 128": groups("int6", 128),
    "int8 tile 64": groups("int8", 64),
    "fp8 tile 64": groups("fp8_e4m3", 64),
}

Row = dict[str, Any]
Crossing = tuple[Tensor, Tensor]  # hidden state and gradient, [B, S, N] both


def crossings(model: nn.Module, inputs_BS: Tensor, targets_BS: Tensor) -> list[Crossing]:
    """Return what crosses the boundary behind every block but the last."""
    seen: list[Tensor] = []

    def record(_: nn.Module, arguments: Any, output: Tensor) -> None:
        output.retain_grad()
        seen.append(output)

    handles = [block.register_forward_hook(record) for block in list(blocks_of(model))[:-1]]
    model.zero_grad()
    loss_of(model, inputs_BS, targets_BS).backward()
    for handle in handles:
        handle.remove()
    found = []
    for hidden in seen:
        if hidden.grad is None:
            raise AssertionError("no gradient reached a hidden state")
        found.append((hidden.detach(), hidden.grad))
    return found


def sent(codec: Codec, x: Tensor) -> tuple[Tensor, float]:
    """Return what arrives, and the bits per value."""
    boundaries = CodedBoundaries(codec, "none")
    message = Message(boundary=0, backward=False, microbatch=0)
    return boundaries.send(x, message), boundaries.bits_per_value()[0]


def with_outliers(hidden: Tensor, tokens: slice) -> Tensor:
    """Return hidden states of which a few channels are much larger in some tokens."""
    hidden = hidden.clone()
    hidden[:, tokens, list(OUTLIER_CHANNELS)] *= OUTLIER_SIZE
    return hidden


def rest(x: Tensor) -> Tensor:
    """Return the values of all other channels."""
    kept = torch.ones(x.shape[-1], dtype=torch.bool)
    kept[list(OUTLIER_CHANNELS)] = False
    return x[..., kept]


def errors(codec: Codec, captured: Sequence[Sequence[Crossing]]) -> Row:
    """Return the errors of all tensors of all batches, and those of hidden states by depth."""
    every: dict[str, list[float]] = {"hidden": [], "gradient": [], "outliers": [], "first": []}
    by_depth: list[list[float]] = [[] for _ in captured[0]]
    for of_batch in captured:
        for depth, (hidden, gradient) in enumerate(of_batch):
            by_depth[depth].append(relative(sent(codec, hidden)[0], hidden))
            every["gradient"].append(relative(sent(codec, gradient)[0], gradient))
            larger = with_outliers(hidden, slice(None))
            every["outliers"].append(relative(rest(sent(codec, larger)[0]), rest(larger)))
            larger = with_outliers(hidden, slice(1))
            first = rest(sent(codec, larger)[0])[:, 0]
            every["first"].append(relative(first, rest(larger)[:, 0]))
    every["hidden"] = [error for errors in by_depth for error in errors]
    means = {name: statistics.mean(values) for name, values in every.items()}
    depths = [statistics.mean(values) for values in by_depth]
    return {"bits": sent(codec, captured[0][0][0])[1]} | means | {"by depth": depths}


@contextmanager
def coded(model: nn.Module, forward: Codec, backward: Codec) -> Iterator[None]:
    """Code all boundaries of a model."""
    blocks = blocks_of(model)
    plain = list(blocks)
    CodedBoundaries(forward, backward).install(blocks, range(len(blocks) - 1))
    try:
        yield
    finally:
        for index, block in enumerate(plain):
            blocks[index] = block


@torch.no_grad()
def losses(model: nn.Module, data: Any, count: int, size: int) -> list[float]:
    """Return the loss of each batch."""
    rows = [slice(index * size, (index + 1) * size) for index in range(count)]
    return [float(loss_of(model, *batch(data, of_batch))) for of_batch in rows]


def whole_model(model: nn.Module, data: Any, names: Sequence[str], count: int, size: int) -> Row:
    """Return by codec the errors of the gradient of all weights, and the change of the loss."""
    true, loss = whole_gradients(model, data, count, size), losses(model, data, count, size)
    mean = torch.stack(true).mean(0)
    found: Row = {}
    for name in names:
        row: dict[str, float] = {}
        for which, codecs in (
            ("hidden", (CODECS[name], "none")),
            ("gradient", ("none", CODECS[name])),
        ):
            with coded(model, *codecs):
                gradients = whole_gradients(model, data, count, size)
                if which == "hidden":
                    now = losses(model, data, count, size)
                    row["loss %"] = 100 * (statistics.mean(now) / statistics.mean(loss) - 1)
            row[f"{which}: all weights"] = statistics.mean(map(relative, gradients, true))
            row[f"{which}: bias"] = relative(torch.stack(gradients).mean(0), mean)
        found[name] = row
    return found


def measure(path: Path, args: argparse.Namespace) -> list[Row]:
    """Measure one model; print and return a row per codec."""
    corpus = standard_library(SEQ, args.text)
    model = load(path, corpus.vocab)
    slices = [slice(i * args.batch, (i + 1) * args.batch) for i in range(args.batches)]
    captured = [crossings(model, *batch(corpus.val, rows)) for rows in slices]
    whole: Mapping[str, Row] = whole_model(model, corpus.val, args.codecs, args.batches, args.batch)
    rows = [
        {"model": path.stem, "codec": name} | errors(CODECS[name], captured) | whole[name]
        for name in args.codecs
    ]
    shown = [{key: value for key, value in row.items() if key != "by depth"} for row in rows]
    print(f"{path.stem}:\n{show(shown)}\n", flush=True)
    return rows


def main() -> int:
    """Measure, print and write; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--codecs", default=",".join(CODECS), help=f"of {', '.join(CODECS)}")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="sequences in a batch")
    parser.add_argument("--text", type=Path, help="folder with .py files (default: the stdlib)")
    parser.add_argument("--out", type=Path, help="JSON report to write")
    args = parser.parse_args()
    args.codecs = args.codecs.split(",")
    unknown = sorted(set(args.codecs) - set(CODECS))
    if unknown:
        parser.error(f"unknown codecs {unknown}: choose among {', '.join(CODECS)}")
    rows = [row for path in args.models for row in measure(path, args)]
    write_report(args.out, "boundary_error", rounded({"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
