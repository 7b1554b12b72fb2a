"""What runs of an ablation share: tokens on a device, batches of them, learning rates, noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from corpus import Corpus, read_tokens, standard_library
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Data:
    """What all runs read, on the device of this rank.

    Attributes:
        train: ``[blocks, seq + 1]`` tokens, in the smallest integer type that holds them.
        val: Likewise.
        vocab: Size of the vocabulary.
        num_tokens: Tokens per split.
    """

    train: Tensor
    val: Tensor
    vocab: int
    num_tokens: dict[str, int]


def load(
    tokens: Path | None, text: Path | None, seq: int, device: torch.device, words: int = 0
) -> Data:
    """Read prepared tokens if there are any, else Python files as bytes, or as so many words."""
    corpus = read_tokens(tokens, seq) if tokens else standard_library(seq, text, words)
    return on_device(corpus, device)


def on_device(corpus: Corpus, device: torch.device) -> Data:
    """Move a corpus to a device."""
    dtype = np.int16 if corpus.vocab <= 2**15 else np.int32
    train, val = (torch.from_numpy(b.astype(dtype)).to(device) for b in (corpus.train, corpus.val))
    return Data(train, val, corpus.vocab, corpus.num_tokens)


def batches(
    blocks: Tensor, batch: int, seed: int, rank: int = 0, world: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a rank's inputs and targets: a shuffled pass over all blocks, then another."""
    generator = torch.Generator().manual_seed(seed)
    if len(blocks) < world * batch:
        raise ValueError(
            f"{len(blocks)} training blocks do not fill one batch on each of {world} ranks: "
            "give more text or lower the preset's batch"
        )
    while True:
        order = torch.randperm(len(blocks), generator=generator)[rank::world].to(blocks.device)
        for rows in order.split(batch):
            if len(rows) == batch:
                yield inputs_and_targets(blocks[rows])


def inputs_and_targets(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the model reads and what follows, both int64."""
    rows = rows.long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def learning_rate_factor(
    steps: int, warmup: int = 0, decay: str = "cosine", floor: float = 0.1
) -> Callable[[int], float]:
    """Return what the peak is scaled by at each step.

    Args:
        steps: Of the run.
        warmup: Steps of the linear rise; 0 for a tenth of the run.
        decay: ``"cosine"`` falls from the first step; ``"linear"`` from the end of the rise.
        floor: What the factor ends at.
    """
    rise = warmup or max(1, steps // 10)

    def factor(step: int) -> float:
        if decay == "linear":
            left = min(1.0, max(0.0, (steps - step) / max(1, steps - rise)))
        else:
            left = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        return min(1.0, (step + 1) / rise) * (floor + (1 - floor) * left)

    return factor


@torch.no_grad()
def perturb(model: nn.Module, deviation: float) -> None:
    """Scale every weight by ``1 + deviation * normal``, alike on all ranks that have one seed."""
    for weight in model.parameters():
        weight.mul_(1 + deviation * torch.randn_like(weight))
