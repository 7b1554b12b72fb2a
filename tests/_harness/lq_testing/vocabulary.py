"""A model of which most weights belong to a vocabulary, with quantized reductions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from lq_lightning.data_parallel import (
    GradientQuantization,
    QuantizedCommunication,
    Topology,
    quantize_communication,
)
from lq_testing.devices import device

COARSE = GradientQuantization(inter_bits=2, vocabulary_bits=None)
FINE = GradientQuantization(inter_bits=2, vocabulary_bits=8)
VOCAB, WIDTH, POSITIONS = 200, 48, 48


class VocabularyModel(nn.Module):
    """An embedding of tokens and one of positions, two matrices with norms, a head."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.a = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.positions = nn.Embedding(POSITIONS, WIDTH)  # as square as the other matrices
        self.b = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.a(self.tokens(tokens) + self.positions(positions)).tanh())
        logits = self.head(self.b(x).tanh())
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(1).flatten())


def build_vocabulary(
    config: GradientQuantization | None,
    node_size: int,
    *,
    apart: bool = False,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    min_quantized_numel: int = 256,
) -> tuple[VocabularyModel, QuantizedCommunication]:
    """One unit over all ranks, or with ``apart`` three."""
    torch.manual_seed(0)
    model = VocabularyModel(tied=tied).to(device())
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    if apart:  # units of the vocabulary alone
        for child in (model.tokens, model.head):
            fully_shard(child, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    communication = quantize_communication(
        model,
        weights=None,
        gradients=config,
        topology=Topology.of(node_size=node_size),
        min_quantized_numel=min_quantized_numel,
    )
    return model, communication
