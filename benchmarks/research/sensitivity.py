"""Whose gradients must be exact: train a small GPT with codes for some kinds of parameters alone.

One process emulates two nodes: each computes a gradient, what crosses the network is encoded as
`quantized_fsdp` encodes it, everything else stays in full precision. Two runs from weights that
differ by a thousandth end 0.002% apart here, so that small costs show, unlike in long runs::

    python benchmarks/research/kernel_text.py linux-source-6.12 tokens_2048 --megabytes 60 \\
        --vocab-size 2048 --sample-megabytes 15
    python benchmarks/research/sensitivity.py --tokens tokens_2048 --json sensitivity.json

The vocabulary is so large against a batch that most tokens are rare in it, as in large models.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lq_lightning.codecs import derive_seed
from lq_lightning.data_parallel import GradientQuantization

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ablation_report import (
    BASELINE,
    LOSS_HEADER,
    PERTURBED,
    Outcome,
    Outcomes,
    loss_rows,
    to_json,
    to_outcomes,
)
from common import table, write_report
from corpus import read_tokens, tokens_folder
from gpt import GPT, GPTConfig
from update_error import BETAS, NODES, Link

KINDS = ("embedding", "head", "blocks")
CURVE_STEPS = 50
VAL_BATCH = 32


def _bits(bits: int = 4, **fields: Any) -> GradientQuantization:
    return GradientQuantization(inter_bits=bits, vocabulary_bits=None, **fields)


def _all(bits: int = 4, **fields: Any) -> dict[str, GradientQuantization]:
    return dict.fromkeys(KINDS, _bits(bits, **fields))


def _by_kind(edges: int, blocks: int) -> dict[str, GradientQuantization]:
    """Bits of embedding and head, and of blocks."""
    bits = {"embedding": edges, "head": edges, "blocks": blocks}
    return {kind: _bits(of_kind) for kind, of_kind in bits.items()}


# What is encoded, by kind of parameter; other kinds are exact.
VARIANTS: dict[str, dict[str, GradientQuantization]] = {
    BASELINE: {},
    PERTURBED: {},
    "4 bits": _all(),
    "4 bits stochastic": _all(rounding="stochastic"),
    "4 bits (embedding and head 8)": _by_kind(8, 4),
    "3 bits": _all(3),
    "2 bits": _all(2),
    "2 bits (embedding and head 8)": _by_kind(8, 2),
    **{f"2 bits ({kind} alone)": {kind: _bits(2)} for kind in KINDS},
}


def kind_of(name: str) -> str:
    """Kind of a parameter of the GPT: ``"embedding"``, ``"head"`` or ``"blocks"``."""
    return {"tokens.weight": "embedding", "head.weight": "head"}.get(name, "blocks")


def batches(blocks: np.ndarray, batch: int, seed: int) -> Iterator[list[Tensor]]:
    """Yield ``[batch, T + 1]`` tokens of each node, every block once in an epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(blocks), generator=generator)
        for rows in order.split(NODES * batch):
            if len(rows) == NODES * batch:
                yield list(_take(blocks, rows.tolist()).split(batch))


def _take(blocks: np.ndarray, rows: list[int]) -> Tensor:
    return torch.from_numpy(blocks[rows].astype("int64"))


def _loss(model: GPT, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return loss


def train(args: argparse.Namespace, name: str, seed: int) -> Outcome:
    """Train a variant from scratch and validate it."""
    start = time.perf_counter()
    corpus = read_tokens(args.tokens, args.seq)
    torch.manual_seed(seed)
    config = GPTConfig(
        layers=args.layers,
        hidden=args.hidden,
        heads=args.heads,
        seq=args.seq,
        vocab=corpus.vocab,
    )
    model = GPT(config)
    model.initialize()
    parameters = dict(model.named_parameters())
    if name == PERTURBED:
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.mul_(1 + 1e-3 * torch.randn_like(parameter))
    codecs = VARIANTS[name]
    links = {
        (node, n): Link(codecs[kind_of(n)], node, derive_seed(seed, index, node))
        for index, (n, p) in enumerate(parameters.items())
        for node in range(NODES)
        if p.ndim > 1 and kind_of(n) in codecs
    }
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=args.lr, betas=BETAS, weight_decay=0.1, fused=True
    )
    data = batches(corpus.train, args.batch, seed)
    total, curve = 0.0, []
    for step in range(args.steps):
        of_node = []
        for tokens in next(data):
            optimizer.zero_grad()
            loss = _loss(model, tokens)
            loss.backward()
            total += float(loss.detach()) / NODES
            of_node.append({n: p.grad for n, p in parameters.items() if p.grad is not None})
        for n, parameter in parameters.items():
            sent = [gradients[n] for gradients in of_node]
            if (0, n) in links:
                sent = [links[node, n].send(gradient) for node, gradient in enumerate(sent)]
            parameter.grad = torch.stack(sent).mean(0)
        nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        warm = min(1.0, (step + 1) / max(1, args.steps // 10))
        decay = 0.1 + 0.45 * (1 + math.cos(math.pi * step / args.steps))
        optimizer.param_groups[0]["lr"] = args.lr * warm * decay
        optimizer.step()
        if (step + 1) % CURVE_STEPS == 0:
            curve.append((step + 1, total / CURVE_STEPS))
            total = 0.0
    train_s = time.perf_counter() - start
    return Outcome(seed, _validate(model, corpus.val, args), train_s, tuple(curve))


@torch.no_grad()
def _validate(model: GPT, blocks: np.ndarray, args: argparse.Namespace) -> float:
    count = min(args.val_blocks, len(blocks)) // VAL_BATCH * VAL_BATCH
    if count == 0:
        raise ValueError(f"{len(blocks)} validation blocks: {VAL_BATCH} are needed, take more text")
    losses = [
        float(_loss(model, _take(blocks, list(range(first, first + VAL_BATCH)))))
        for first in range(0, count, VAL_BATCH)
    ]
    return sum(losses) / len(losses)


def _run(job: tuple[argparse.Namespace, str, int]) -> tuple[str, Outcome]:
    torch.set_num_threads(1)
    args, name, seed = job
    return name, train(args, name, seed)


def _sorted(outcomes: Outcomes) -> Outcomes:
    """Order variants and seeds as they were asked for, whichever run ended first."""
    return {
        name: sorted(outcomes[name], key=lambda outcome: outcome.seed)
        for name in VARIANTS
        if name in outcomes
    }


def main() -> None:
    """Train the variants, print a table, write JSON after every run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("layers", 4), ("hidden", 128), ("heads", 4), ("seq", 128), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=1.5e-3, help="peak; warms up, then a cosine")
    parser.add_argument("--val-blocks", type=int, default=2048)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated names")
    parser.add_argument("--seeds", default="0", help="such as 0,1")
    parser.add_argument("--tokens", type=tokens_folder, required=True, help="by kernel_text.py")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, a thread each")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    names = args.variants.split(",")
    unknown = sorted(set(names) - set(VARIANTS))
    if unknown:
        parser.error(f"unknown variants {unknown}: choose among {', '.join(VARIANTS)}")
    jobs = [(args, name, int(seed)) for seed in args.seeds.split(",") for name in names]
    outcomes: Outcomes = {}
    sizes = ("layers", "hidden", "heads", "seq", "batch", "steps", "lr", "val_blocks")
    setup = {key: getattr(args, key) for key in sizes}
    codecs = {
        name: {kind: asdict(codec) for kind, codec in VARIANTS[name].items()} for name in names
    }
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.processes) as pool:
        for name, outcome in pool.imap_unordered(_run, jobs):
            outcomes.setdefault(name, []).append(outcome)
            print(f"{name}:{outcome.seed} {outcome.val_loss:.5f} in {outcome.train_s:.0f} s")
            results = {"setup": setup, "nodes": NODES, "codecs": codecs}
            results["variants"] = to_json(_sorted(outcomes))
            write_report(args.json, "sensitivity", results)
    print(table(loss_rows(to_outcomes(results, [BASELINE])), LOSS_HEADER))


if __name__ == "__main__":
    main()
