"""Names and kinds of a model's parameters."""

from __future__ import annotations

from torch import nn

__all__ = ["clean_name", "embeddings"]


def clean_name(name: str) -> str:
    """A parameter name without what ``torch.compile`` and activation checkpointing insert."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def embeddings(module: nn.Module) -> list[nn.Embedding | nn.EmbeddingBag]:
    """Every ``nn.Embedding`` and ``nn.EmbeddingBag`` of a model, once."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return [child for child in module.modules() if isinstance(child, kinds)]
