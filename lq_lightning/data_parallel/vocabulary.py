"""Which parameters belong to a vocabulary: embeddings, and heads that predict its tokens."""

from __future__ import annotations

from torch import nn

from lq_lightning.foundation.parameters import embeddings

__all__ = ["vocabulary_weights"]


def vocabulary_weights(module: nn.Module) -> list[nn.Parameter]:
    """Weights of embeddings, and of what looks like a head.

    A head is a 2-D parameter whose longer side is as long as the largest embedding has rows, under
    any name, as are an adapter (LoRA) of a head or an embedding and a head stored transposed. A
    matrix of another purpose and of that shape (an MLP four times as wide as the model, where the
    vocabulary is so small) is taken for one, too; a head of another length than that embedding
    (padded alone, or beside a table of more positions than there are tokens) is not found.

    Args:
        module: The model, of which each weight is whole or a DTensor.

    Returns:
        Each parameter once, in the order of ``module.parameters()``; none without an embedding.
    """
    tables = {id(table.weight): table for table in embeddings(module)}
    if not tables:
        return []
    rows = max(table.num_embeddings for table in tables.values())
    return [
        parameter
        for parameter in module.parameters()
        if id(parameter) in tables
        or (parameter.ndim == 2 and max(parameter.shape) == rows > min(parameter.shape))
    ]
