"""Training steps for a small language model, as tables: a new attack is one more row."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lq_testing.models import VOCAB, WIDTH, Block


class SideBlock(Block):
    """A block that takes more than the hidden state, and returns more if it is asked to."""

    def forward(self, x: Tensor, scale: Any = None, more: bool = False) -> Any:
        if isinstance(scale, SimpleNamespace):
            scale = scale.value
        y = super().forward(x if scale is None else x * scale)
        return (y, y.mean()) if more else y


class SideModel(nn.Module):
    """Embedding, norm and dropout in front of the blocks, and things that a step may write to."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.embed_norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(SideBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("running", torch.zeros(WIDTH))
        self.kept: Any = None

    def front(self, tokens: Tensor) -> Tensor:
        return self.drop(self.embed_norm(self.embed(tokens)))

    def layers(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x: Tensor, tokens: Tensor, weight: Tensor | float = 1.0) -> Tensor:
        losses = F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten(), reduction="none")
        return (losses.view_as(tokens) * weight).mean()


Program = Callable[[SideModel, Tensor], Tensor]


# --- values of earlier stages, made into values that look like others ------------------------


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.mul(x.nan_to_num(), 2, out=out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@torch.jit.script
def _scripted(x: Tensor) -> Tensor:
    return torch.nan_to_num(x).square() + 1


@torch.compile(backend="eager")
def compiled_weight(x: Tensor) -> Tensor:
    return torch.nan_to_num(x).square() + 1


def _weighted(weigh: Callable[[Tensor], Tensor]) -> Program:
    """A loss whose weight per token is made of the embeddings."""

    def step(model: SideModel, tokens: Tensor) -> Tensor:
        x = model.front(tokens)
        weight = weigh(x)
        return model.loss(model.layers(x), tokens, weight)

    return step


def _foreach(x: Tensor) -> Tensor:
    (one, _) = torch._foreach_add([x.nan_to_num(), torch.ones_like(x)], 1.0)
    return one.mean(-1)


def _foreach_in_place(x: Tensor) -> Tensor:
    weights = [torch.ones(x.shape[:2])]
    torch._foreach_copy_(weights, [x[..., 0].detach().nan_to_num()])
    return weights[0]


def _partly_overwritten(x: Tensor) -> Tensor:
    scratch = x.detach() * 1
    scratch[:, :1].zero_()
    return scratch.nan_to_num().mean(-1)


def _in_place(x: Tensor) -> Tensor:
    weight = torch.ones(x.shape[:2])
    weight[:, 1:].masked_fill_(x[:, 1:, 0] > 0, 0.5)
    return weight


def _attended(x: Tensor) -> Tensor:
    q = x.detach().nan_to_num()
    return F.scaled_dot_product_attention(q, q, torch.ones_like(q)).mean(-1)


def _without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        return 1 + x.detach().square().mean(-1).nan_to_num()


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "where": lambda x: torch.where(x[..., 0] > 0, 1.0, 0.5),
    "nan_to_num": lambda x: x.mean(-1).nan_to_num() + 1,
    "argmax": lambda x: x.argmax(-1).float(),
    "max": lambda x: x.max(-1).indices.float(),
    "sort": lambda x: x.argsort(-1)[..., 0].float(),
    "isnan": lambda x: x.isnan().any(-1).float() + 1,
    "comparison": lambda x: (x.mean(-1) > 0).float() + 1,
    "equality": lambda x: (x != x).float().mean(-1) + 1,
    "detached": _without_gradient,
    "clamp": lambda x: x.mean(-1).fmax(torch.ones(())),
    "cast": lambda x: x.mean(-1).nan_to_num().long().float() + 1,
    "in place": _in_place,
    "filled": lambda x: x.masked_fill(x.isnan(), 1.0).mean(-1),
    "attention": _attended,
    "foreach": _foreach,
    "foreach in place": _foreach_in_place,
    "partly overwritten": _partly_overwritten,
    "function": lambda x: _Double.apply(x).mean(-1) + 1,
    "scripted": lambda x: _scripted(x).mean(-1),
    "compiled": lambda x: compiled_weight(x).mean(-1),
    "vmap": lambda x: torch.func.vmap(lambda row: row.nan_to_num() + 1)(x).mean(-1),
    "checkpoint": lambda x: checkpoint(lambda y: y.nan_to_num(), x, use_reentrant=False).mean(-1),
    "gathered rows": lambda x: torch.ones(WIDTH)[x[..., 0].nan_to_num().long().clamp(0, 3)],
    "sparse": lambda x: x.nan_to_num().mean(-1).to_sparse().to_dense() + 1,
    "complex": lambda x: torch.complex(x, x).abs().nan_to_num().mean(-1),
    "half": lambda x: x.bfloat16().nan_to_num().float().mean(-1),
    "written": lambda x: torch.ones(x.shape[:2]).copy_(x[..., 0].nan_to_num()),
    "scattered": lambda x: torch.ones(x.shape[:2]).scatter_(
        1, x[:, :1].argmax(-1).clamp(0, 3), 2.0
    ),
    "out": lambda x: torch.nan_to_num(x.detach().mean(-1), out=torch.empty(x.shape[:2])),
}


def _bool(model: SideModel, tokens: Tensor) -> Tensor:
    x = model.front(tokens)
    factor = 2.0 if bool(x.sum() > 0) else 1.0
    return model.loss(model.layers(x), tokens, factor)


def _reads(read: Callable[[Tensor], float]) -> Program:
    def step(model: SideModel, tokens: Tensor) -> Tensor:
        x = model.front(tokens)
        factor = read(x.detach())
        return model.loss(model.layers(x), tokens, 1.0 if factor != factor else factor)

    return step


READS: dict[str, Program] = {
    "bool": _bool,
    "item": _reads(lambda x: x.mean().item()),
    "float": _reads(lambda x: float(x.mean())),
    "int": _reads(lambda x: int(x.argmax()) + 1.0),
    "index": _reads(lambda x: [1.0, 2.0, 3.0][x.nan_to_num().long().sum().clamp(0, 2)]),
    "tolist": _reads(lambda x: x.flatten().tolist()[0]),
    "numpy": _reads(lambda x: float(x.numpy().mean())),
    "asarray": _reads(lambda x: float(np.asarray(x).mean())),
    "one_hot": _reads(lambda x: F.one_hot(x.argmax(-1)).shape[-1] / WIDTH),
    "nonzero": _reads(lambda x: len((x > 0).nonzero()) + 1.0),
    "masked_select": _reads(lambda x: x.masked_select(x > 0).numel() + 1.0),
    "boolean rows": _reads(lambda x: len(x[x[..., 0] > 0]) + 1.0),
    "unique": _reads(lambda x: len(x.nan_to_num().unique()) + 1.0),
    "equal": _reads(lambda x: 2.0 if torch.equal(x, x) else 1.0),
    "allclose": _reads(lambda x: 2.0 if torch.allclose(x, x) else 1.0),
    "in": _reads(lambda x: 2.0 if 0.5 in x else 1.0),
    "iterated": _reads(lambda x: sum(1.0 for value in x[0, :, 0] if value > 0) + 1),
    "format": _reads(lambda x: 1.0 if f"{x.mean():.1f}".startswith("0") else 2.0),
}


# --- what else survives a part ----------------------------------------------------------------


def _to_layer(scale: Callable[[Tensor], Any], positional: bool = False, last: int = 2) -> Program:
    def step(model: SideModel, tokens: Tensor) -> Tensor:
        x = embedded = model.front(tokens)
        for index, block in enumerate(model.blocks):
            given = scale(embedded) if index == last else None
            x = block(x, given) if positional else block(x, scale=given)
        return model.loss(x, tokens)

    return step


def _between(change: Callable[[Tensor, Tensor], Tensor], at: int) -> Program:
    """Change the hidden state in front of the block ``at`` by the embeddings."""

    def step(model: SideModel, tokens: Tensor) -> Tensor:
        x = embedded = model.front(tokens)
        for index, block in enumerate(model.blocks):
            x = block(change(x, embedded) if index == at else x)
        return model.loss(x, tokens)

    return step


def _of_first_block(model: SideModel, tokens: Tensor) -> Tensor:
    """Floats instead of tokens, so that nothing in front of the blocks is missing."""
    x = tokens.float().unsqueeze(-1).expand(-1, -1, WIDTH) / VOCAB
    y = model.blocks[0](x)
    weight = 1 + y.square().mean(-1).nan_to_num()
    for block in model.blocks[1:]:
        y = block(y)
    return model.loss(y, tokens, weight)


def _of_norm(model: SideModel, tokens: Tensor) -> Tensor:
    x = tokens.float().unsqueeze(-1).expand(-1, -1, WIDTH) / VOCAB
    x = model.embed_norm(x)
    return model.loss(model.layers(x), tokens, 1 + x[..., 0])


def _extras(model: SideModel, tokens: Tensor) -> Tensor:
    x, total = model.front(tokens), torch.zeros(())
    for block in model.blocks:
        x, extra = block(x, more=True)
        total = total + extra.nan_to_num()
    return model.loss(x, tokens) + total


def _buffer(model: SideModel, tokens: Tensor) -> Tensor:
    x = model.front(tokens)
    with torch.no_grad():
        model.running.lerp_(x.nan_to_num().mean((0, 1)), 0.1)
    return model.loss(model.layers(x), tokens)


def _attribute(model: SideModel, tokens: Tensor) -> Tensor:
    x = model.front(tokens)
    model.kept = {"all": [x.detach().nan_to_num()]}
    return model.loss(model.layers(x), tokens)


def _weight_of_embedding(model: SideModel, tokens: Tensor) -> Tensor:
    norm = model.embed.weight.norm().nan_to_num()
    return model.loss(model.layers(model.front(tokens)), tokens) + norm


def _returned(model: SideModel, tokens: Tensor) -> Any:
    x = model.front(tokens)
    return {"loss": model.loss(model.layers(x), tokens), "codes": x.argmax(-1)}


SURVIVES: dict[str, tuple[Program, str]] = {
    "named argument": (_to_layer(lambda x: (x > 0).float() + 1), "`blocks.2` takes `scale` beside"),
    "argument": (_to_layer(lambda x: (x > 0).float() + 1, True, 1), "`blocks.1` takes argument 2"),
    "argument in an object": (
        _to_layer(lambda x: SimpleNamespace(value=(x > 0).float() + 1)),
        "`blocks.2` takes `scale` beside",
    ),
    "in front of the first own": (
        _between(lambda x, e: x + e.nan_to_num(), 1),
        "the hidden state in front of `blocks.1`",
    ),
    "in front of a later one": (
        _between(lambda x, e: x.add_((e > 0).float()), 2),
        "the hidden state in front of `blocks.2`",
    ),
    "extra of a layer": (_extras, "what the step returns depends on `blocks.0`"),
    "layer without embeddings": (_of_first_block, "what the step returns depends on `blocks.0`"),
    "norm of the batch": (_of_norm, "what the step returns depends on `embed_norm`"),
    "buffer": (_buffer, "what the step keeps as `running`"),
    "attribute": (_attribute, "what the step keeps as `kept`"),
    "weight": (_weight_of_embedding, "what the step returns depends on `embed`"),
    "beside the loss": (_returned, "what the step returns depends on `embed"),
}


# --- what is allowed --------------------------------------------------------------------------


def _filled(x: Tensor) -> Tensor:
    mask = x.new_empty(x.shape[1], x.shape[1]).fill_(-1.0)
    return mask.triu_(1).mean(0).expand(x.shape[:2]) + 2


def _reused(model: SideModel, tokens: Tensor) -> Tensor:
    """Overwrites the memory of the embeddings with what does not depend on them."""
    x = model.front(tokens)
    scratch = x.detach() * 2
    scratch.copy_(torch.ones_like(scratch))
    return model.loss(model.layers(x), tokens, 1 + scratch.mean().item())


def _masked(model: SideModel, tokens: Tensor) -> Tensor:
    """Control flow and statistics of the batch, and the hidden state behind the layers."""
    lengths = (tokens > 2).sum(1)
    weight = torch.where(tokens > 2, 1.0, 0.5) * lengths.max().item()
    x = model.layers(model.front(tokens))
    entropy = model.head(x).softmax(-1).max(-1).values
    if bool(entropy.isnan().any()):
        raise AssertionError("the hidden state behind the layers is that of all layers")
    return model.loss(x, tokens, weight * (1 + entropy.detach()))


def _changed_in_front(model: SideModel, tokens: Tensor) -> Tensor:
    x = model.front(tokens)
    x = x.masked_fill((tokens < 2).unsqueeze(-1), 0.0)
    x = 1 * torch.where((tokens > 20).unsqueeze(-1), x, 2 * x)
    x[:, 0] = x[:, 0].detach().nan_to_num().clamp(-1, 1)
    return model.loss(model.layers(x), tokens)


ALLOWED: dict[str, Program] = {
    "like": _weighted(lambda x: torch.zeros_like(x[..., 0]) + torch.full_like(x[..., 1], 2.0)),
    "new": _weighted(lambda x: x.new_ones(x.shape[:2]) + x.new_zeros(1)),
    "filled": _weighted(_filled),
    "shape and dtype": _weighted(
        lambda x: torch.arange(x.shape[1], dtype=x.dtype, device=x.device) / x.size(-1)
    ),
    "cast to it": _weighted(lambda x: torch.arange(x.shape[1]).to(x).expand_as(x[..., 0])),
    "reused memory": _reused,
    "of the batch and behind the layers": _masked,
    "changed in front": _changed_in_front,
    "argument": _to_layer(lambda x: torch.ones_like(x) * 2),
    "scaled between layers": _between(lambda x, _: 1.5 * x, 1),
    "scaled between the last layers": _between(lambda x, _: x * torch.full_like(x, 0.5), 2),
    "changed in place between layers": _between(lambda x, _: x.mul_(1.5).add_(1), 1),
    "changed in place between the last": _between(lambda x, _: x.add_(0.5), 2),
}
