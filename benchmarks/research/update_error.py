"""What quantized communication does to the update of Adam, without the noise of a training run.

A small GPT trains in full precision on two emulated nodes. After ``--warmup`` steps the gradients
of both are also sent as `quantized_fsdp` sends them between nodes, in every scheme, and each scheme
keeps Adam's moments of what arrives. All see the same gradients, so what differs in the end between
their updates ``m / sqrt(v)`` and that of full precision is the scheme's doing alone. Likewise for
weights: gradients of the same batches are computed with the weights that arrive in each scheme::

    python benchmarks/research/update_error.py --json update_error.json
    python benchmarks/research/update_error.py --tokens kernel_tokens --json update_error.json

Text: the standard library of the running Python, as bytes, or what ``kernel_text.py`` made.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lq_lightning.codecs import decode, derive_seed, encode
from lq_lightning.data_parallel import GradientQuantization, WeightQuantization

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import table, write_report
from corpus import read_tokens, standard_library, tokens_folder
from gpt import GPT, GPTConfig

NODES = 2
BETAS = (0.9, 0.95)
LR = 6e-4
SCHEMES = {
    "stochastic": GradientQuantization(rounding="stochastic"),
    "nearest": GradientQuantization(),
    "nearest, groups of 32": GradientQuantization(group_size=32),
    "stochastic, no Hadamard": GradientQuantization(method="TLq", rounding="stochastic"),
    "nearest, no Hadamard": GradientQuantization(method="TLq"),
    **{f"nearest, {bits} bits": GradientQuantization(inter_bits=bits) for bits in (6, 3, 2)},
}
WEIGHT_SCHEMES = {
    "bf16": None,
    "qWD": WeightQuantization(),
    "qW": WeightQuantization(method="qW"),
}


@dataclass(slots=True)
class Moments:
    """Adam's moments of one tensor."""

    first: Tensor
    second: Tensor
    steps: int = 0

    def add(self, gradient: Tensor) -> None:
        """Take another gradient in."""
        self.steps += 1
        self.first.lerp_(gradient, 1 - BETAS[0])
        self.second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])

    def update(self) -> Tensor:
        """Return the direction in which Adam would go."""
        first = self.first / (1 - BETAS[0] ** self.steps)
        second = self.second / (1 - BETAS[1] ** self.steps)
        return first / (second.sqrt() + 1e-8)


class Link:
    """One node's messages of one tensor in one scheme; its own slot of the tensor stays exact.

    Args:
        config: The scheme.
        node: Number of the node.
        seed: Of stochastic rounding.
    """

    def __init__(self, config: GradientQuantization, node: int, seed: int) -> None:
        self._spec, self._seed, self._calls = config.codec("inter"), seed, 0
        self._others = [other for other in range(NODES) if other != node]

    def send(self, gradient: Tensor) -> Tensor:
        """Return what arrives of a gradient."""
        arrived = gradient.reshape(NODES, -1).clone()
        values = arrived[self._others]
        self._calls += 1
        seed = derive_seed(self._seed, self._calls)
        message = encode(self._spec, values, seed=seed)
        arrived[self._others] = decode(self._spec, message, values.shape[1])
        return arrived.view_as(gradient)


class Replica:
    """The weights of one tensor that a rank computes with in one scheme, in bf16.

    Args:
        config: The scheme; None rounds to bf16 alone, as plain FSDP2 does.
    """

    def __init__(self, config: WeightQuantization | None) -> None:
        self._config = config
        self._held: Tensor | None = None

    def receive(self, weight: Tensor) -> Tensor:
        """Take in the weights after an optimizer step; return what they arrive as, in fp32."""
        row = weight.detach().reshape(1, -1)
        if self._config is None or (self._held is None and self._config.method == "qWD"):
            self._held = row.bfloat16()
        elif self._config.method == "qWD":
            spec = self._config.codec()
            message = encode(spec, row, reference=self._held)
            decode(spec, message, row.shape[1], out=self._held, add=True)
        else:
            spec = self._config.codec()
            self._held = decode(spec, encode(spec, row), row.shape[1]).bfloat16()
        return self._held.float().view_as(weight)


def batches(args: argparse.Namespace, device: torch.device) -> tuple[int, Iterator[Tensor]]:
    """Return the size of the vocabulary, and an endless run of ``[B, T + 1]`` tokens."""
    corpus = read_tokens(args.tokens, args.seq) if args.tokens else standard_library(args.seq)

    def draw() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(0)
        while True:
            rows = torch.randint(len(corpus.train), (args.batch,), generator=generator)
            yield torch.from_numpy(corpus.train[rows.numpy()].astype("int64")).to(device)

    return corpus.vocab, draw()


def build(args: argparse.Namespace, vocab: int, device: torch.device) -> GPT:
    """Return the initialized model."""
    torch.manual_seed(0)
    config = GPTConfig(
        layers=args.layers, hidden=args.hidden, heads=args.heads, seq=args.seq, vocab=vocab
    )
    model = GPT(config).to(device)
    model.initialize()
    return model


def run(
    args: argparse.Namespace, device: torch.device
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Train, follow every scheme, and return what it did to the updates of the middle block.

    Returns:
        By scheme, of gradients and of weights.
    """
    vocab, rows = batches(args, device)
    model = build(args, vocab, device)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=LR, betas=BETAS, weight_decay=0.1)
    prefix = f"blocks.{args.layers // 2}."
    watched = [n for n, p in parameters.items() if n.startswith(prefix) and p.ndim > 1]
    keys = list(itertools.product([None, *SCHEMES, *WEIGHT_SCHEMES], watched))
    moments = {
        key: Moments(*(torch.zeros_like(parameters[key[1]]) for _ in range(2))) for key in keys
    }
    links = {
        (scheme, name, node): Link(config, node, derive_seed(index, node))
        for scheme, config in SCHEMES.items()
        for index, name in enumerate(watched)
        for node in range(NODES)
    }
    replicas = {
        scheme: {n: Replica(config if p.ndim > 1 else None) for n, p in parameters.items()}
        for scheme, config in WEIGHT_SCHEMES.items()
    }
    for step in range(args.warmup + args.steps):
        tokens = [next(rows) for _ in range(NODES)]
        of_node = [_gradients(model, t) for t in tokens]
        if step >= args.warmup:
            for scheme, name in itertools.product([None, *SCHEMES], watched):
                sent = [g[name] for g in of_node]
                if scheme is not None:
                    sent = [links[scheme, name, n].send(g) for n, g in enumerate(sent)]
                moments[scheme, name].add(torch.stack(sent).mean(0))
            for scheme, of_name in replicas.items():
                with _weights(model, of_name):
                    there = [_gradients(model, t) for t in tokens]
                for name in watched:
                    moments[scheme, name].add(_mean(there, name))
        for name, parameter in parameters.items():
            parameter.grad = _mean(of_node, name)
        nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / 40)
        optimizer.step()
    gradients, weights = (
        {scheme: _compare(scheme, moments, watched) for scheme in schemes}
        for schemes in (SCHEMES, WEIGHT_SCHEMES)
    )
    return gradients, weights


@contextmanager
def _weights(model: GPT, replicas: dict[str, Replica]) -> Iterator[None]:
    """Let the model have the weights that arrive, for a while."""
    exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(replicas[name].receive(parameter))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(exact[name])


def _gradients(model: GPT, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _mean(gradients: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([of_node[name] for of_node in gradients]).mean(0)


def _compare(
    scheme: str, moments: dict[tuple[str | None, str], Moments], names: list[str]
) -> dict[str, float]:
    """Return errors over all watched tensors together."""
    exact = [moments[None, name] for name in names]
    sent = [moments[scheme, name] for name in names]
    update = torch.cat([m.update().flatten() for m in exact])
    other = torch.cat([m.update().flatten() for m in sent])
    projection = float(other @ update / (update @ update))
    ratio = torch.cat([(b.second / a.second).flatten() for a, b in zip(exact, sent, strict=True)])
    return {
        "error": float((other - update).norm() / update.norm()),
        "projection": projection,
        "noise": float((other - projection * update).norm() / (projection * update).norm()),
        "second_moment": float(ratio[ratio.isfinite()].median()),
    }


def main() -> None:
    """Run, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("layers", 4), ("hidden", 384), ("heads", 6), ("seq", 256), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--warmup", type=int, default=120, help="steps before the schemes start")
    parser.add_argument("--steps", type=int, default=50, help="steps that they take part in")
    parser.add_argument("--tokens", type=tokens_folder, help="folder that kernel_text.py wrote")
    parser.add_argument("--cpu", action="store_true", help="even if there is a GPU")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    cuda = torch.cuda.is_available() and not args.cpu
    schemes, weights = run(args, torch.device("cuda" if cuda else "cpu"))
    names = ["error", "projection", "noise", "second_moment"]
    for label, of in (("gradients", schemes), ("weights", weights)):
        cells = [[s, *(f"{row[n]:.4f}" for n in names)] for s, row in of.items()]
        print(table(cells, [label, *names]))
    setup = {k: getattr(args, k) for k in ("layers", "hidden", "seq", "batch", "warmup", "steps")}
    configs = {
        scheme: asdict(config)
        for scheme, config in (SCHEMES | WEIGHT_SCHEMES).items()
        if config is not None
    }
    results = {"setup": setup, "nodes": NODES, "configs": configs}
    results |= {"schemes": schemes, "weights": weights}
    write_report(args.json, "update_error", results)


if __name__ == "__main__":
    main()
