"""Random numbers in training steps, as tables: a new attack is one more row."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lq_testing.lightning_models import TinyModule
from lq_testing.models import VOCAB, WIDTH, Block

MASKED = VOCAB - 1


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


class DrawingBlock(Block):
    """A block that draws from all generators, each another amount, and keeps what it drew."""

    place = 0
    checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[float, ...]] = []
        self.generator = random.Random(self.place)  # of no concern to other stages

    def inside(self, x: Tensor) -> Tensor:
        drawn = [torch.rand(self.place + 1, dtype=torch.float64).sum().item()]
        if not self.checkpointed:  # checkpointing puts back torch's generators alone
            for _ in range(self.place + 1):
                drawn[1:] = [np.random.randn(), random.gauss(0, 1)]
        self.drawn.append(tuple(drawn))
        return F.dropout(super().forward(x * (1 + 0.1 * sum(drawn))), 0.2, self.training)

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.inside, x, use_reentrant=False)
        return self.inside(x)


class WordDropout(nn.Embedding):
    """An embedding that leaves out words: it draws on the first stage alone."""

    def forward(self, tokens: Tensor) -> Tensor:
        kept = torch.rand(tokens.shape) < 0.8
        return super().forward(tokens) * kept.unsqueeze(-1) * (1 + 0.1 * np.random.randn())


class DrawingModel(nn.Module):
    """Dropout in front of, in, between and behind blocks that draw unequal amounts."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed, self.drop = WordDropout(VOCAB, WIDTH), nn.Dropout(0.2)
        self.blocks = nn.ModuleList(DrawingBlock() for _ in range(layers))
        for place, block in enumerate(self.blocks):
            block.place = place
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, around: bool = False, between: float = 0.0) -> Tensor:
        x = self.drop(self.embed(tokens))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if around else block(x)
            x = F.dropout(x, between, self.training)
        return self.head(self.drop(x))


def loss_of(logits: Tensor, tokens: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
    return (losses.view_as(tokens) * weight).mean()


Program = Callable[[DrawingModel, Tensor], Tensor]


def _masked(mask_of: Callable[[Tensor], Tensor], **options: Any) -> Program:
    """A masked LM: the mask decides the inputs in front and the labels behind."""

    def step(model: DrawingModel, tokens: Tensor) -> Tensor:
        mask = mask_of(tokens)
        logits = model(tokens.masked_fill(mask, MASKED), **options)
        return loss_of(logits, tokens, mask.float())

    return step


def _mask_behind(model: DrawingModel, tokens: Tensor) -> Tensor:
    """Numbers that only the last stage needs."""
    logits = model(tokens)
    return loss_of(logits, tokens, torch.rand(tokens.shape) * np.random.rand() * random.random())


def _noise(model: DrawingModel, tokens: Tensor) -> Tensor:
    """Diffusion: noise goes in, and is what the model has to find."""
    time = torch.rand(len(tokens), 1, 1)
    noise = torch.randn(*tokens.shape, WIDTH)
    x = (1 - time) * model.embed(tokens) + time * noise
    for block in model.blocks:
        x = block(x)
    return (model.head(x) - noise.mean(-1, keepdim=True)).square().mean()


def _mixup(model: DrawingModel, tokens: Tensor) -> Tensor:
    share = np.random.beta(0.4, 0.4)
    order = torch.randperm(len(tokens))
    x = model.embed(tokens)
    x = share * x + (1 - share) * x[order]
    for block in model.blocks:
        x = block(x)
    logits = model.head(x)
    return share * loss_of(logits, tokens) + (1 - share) * loss_of(logits, tokens[order])


def _dropped_tokens(model: DrawingModel, tokens: Tensor) -> Tensor:
    kept = torch.tensor(sorted(random.sample(range(tokens.shape[1]), 5)))
    tokens = tokens[:, kept]
    return loss_of(model(tokens), tokens)


def _drawn_behind_embedding(model: DrawingModel, tokens: Tensor) -> Tensor:
    x = model.drop(model.embed(tokens))
    weight = torch.rand(tokens.shape) + random.random()
    for block in model.blocks:
        x = block(x)
    return loss_of(model.head(x), tokens, weight)


def _numpy_normal(model: DrawingModel, tokens: Tensor) -> Tensor:
    """numpy keeps the second of two normal numbers for the next call."""
    weight = 2 + np.random.randn()
    logits = model(tokens)
    return loss_of(logits, tokens, weight + np.random.randn() + random.gauss(0, 1))


def _normal_between(model: DrawingModel, tokens: Tensor) -> Tensor:
    x = model.embed(tokens) * np.random.randn()
    for block in model.blocks:
        x = block(x) * (1 + 0.1 * np.random.randn())
    return loss_of(model.head(x), tokens)


def _unlike(tokens: Tensor) -> Tensor:
    return torch.from_numpy(np.random.rand(*tokens.shape)) < 0.5


PROGRAMS: dict[str, Program] = {
    "dropout": lambda model, tokens: loss_of(model(tokens), tokens),
    "dropout between": lambda model, tokens: loss_of(model(tokens, between=0.3), tokens),
    "checkpointed calls": lambda model, tokens: loss_of(model(tokens, around=True), tokens),
    "mask of torch": _masked(lambda tokens: torch.rand(tokens.shape) < 0.5),
    "mask of numpy": _masked(_unlike),
    "mask of random": _masked(
        lambda tokens: torch.tensor([[random.random() < 0.5 for _ in row] for row in tokens])
    ),
    "mask and checkpointed calls": _masked(_unlike, around=True, between=0.1),
    "numbers behind the layers": _mask_behind,
    "numbers behind the embedding": _drawn_behind_embedding,
    "noise": _noise,
    "mixup": _mixup,
    "dropped tokens": _dropped_tokens,
    "normal numbers": _numpy_normal,
    "normal numbers between": _normal_between,
}


# --- in a Trainer -----------------------------------------------------------------------------

# What a step may draw; all but the last few are continuous, and differ from draw to draw.
DRAWS: dict[str, Callable[[Any], float]] = {
    "torch": lambda module: torch.rand((), dtype=torch.float64).item(),
    "normal": lambda module: torch.randn((), dtype=torch.float64).item(),
    "numpy": lambda module: np.random.rand(),
    "numpy normal": lambda module: np.random.randn(),
    "beta": lambda module: np.random.beta(0.4, 0.4),
    "random": lambda module: random.random(),
    "gauss": lambda module: random.gauss(0, 1),
    "own of torch": lambda module: torch.rand(
        (), generator=module.torch_generator, dtype=torch.float64
    ).item(),
    "own of numpy": lambda module: module.numpy_generator.random(),
    "own of old numpy": lambda module: module.numpy_state.randn(),
    "own of Python": lambda module: module.python_generator.random(),
    "permutation": lambda module: float(torch.randperm(1000)[0]),
    "shuffled": lambda module: float(np.random.permutation(1000)[0]),
}


class DrawingModule(TinyModule):
    """Keeps what it draws in front of, between and behind the layers, by epoch and micro-batch."""

    def __init__(self, layers: int = 4, own_seed: int = 3) -> None:
        super().__init__(layers=1)
        self.net = DrawingModel(layers)
        self.torch_generator = torch.Generator().manual_seed(own_seed)
        self.numpy_generator = np.random.default_rng(own_seed)
        self.numpy_state = np.random.RandomState(own_seed)
        self.python_generator = random.Random(own_seed)
        self.drawn: dict[tuple[Any, ...], list[float]] = {}
        self.shuffled: list[list[int]] = []

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        place = (self.trainer.global_step, self.training, *tokens[0, :4].tolist())
        self._draw("in front", place)
        x = self.net.drop(self.net.embed(tokens))
        for index, block in enumerate(self.net.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
            self._draw(f"behind {index}", place)
        return loss_of(self.net.head(self.net.drop(x)), tokens)

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        self.log("val", self.training_step(tokens, batch_idx))

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.shuffled.append([*batch[:, 0].tolist(), random.random(), np.random.rand()])

    def _draw(self, where: str, place: tuple[Any, ...]) -> None:
        self.drawn[(where, *place)] = [draw(self) for draw in DRAWS.values()]

    def in_layers(self) -> list[tuple[int, tuple[float, ...]]]:
        """Return the draws of own layers, each with its place."""
        return [
            (block.place, numbers)
            for block in self.net.blocks
            if isinstance(block, DrawingBlock)
            for numbers in block.drawn
        ]


class DrawsOnFirstStage(TinyModule):
    """Draws more where the embedding is."""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        if isinstance(self.net.embed, nn.Embedding):
            random.random()
        loss: Tensor = self.net(tokens)
        return loss


class NothingToLearn(TinyModule):
    """A masked LM on independent tokens: what is not seen cannot be told."""

    def __init__(self) -> None:
        super().__init__(layers=1, lr=1e-2)
        self.net = DrawingModel(2)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        mask = torch.rand(tokens.shape) < 0.5
        losses = loss_of(self.net(tokens.masked_fill(mask, MASKED)), tokens, mask.float())
        return losses / mask.float().mean()
