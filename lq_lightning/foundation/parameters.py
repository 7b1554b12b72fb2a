"""Names and kinds of a model's parameters, and recognition of their copies."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_EMBEDDING_PARAMS = "_lq_embedding_params"  # in modules: their parameters that are
# Copies in another dtype or layout, as autocast makes them before a matrix product.
_COPIES = ("ToCopyBackward", "TBackward", "TransposeBackward", "ViewBackward", "PermuteBackward")


def clean_name(name: str) -> str:
    """Return a parameter name without the parts that compiling and checkpointing insert."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def tied_names(module: nn.Module) -> dict[str, str]:
    """Map every further name of a tied parameter to its first; all by :func:`clean_name`."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for raw, parameter in module.named_parameters(remove_duplicate=False):
        name = clean_name(raw)
        if first.setdefault(id(parameter), name) != name:
            ties[name] = first[id(parameter)]
    return ties


def embeddings(module: nn.Module) -> list[nn.Embedding | nn.EmbeddingBag]:
    """Return every ``nn.Embedding`` and ``nn.EmbeddingBag`` of a model, once."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return [child for child in module.modules() if isinstance(child, kinds)]


def embedding_params(module: nn.Module) -> list[nn.Parameter]:
    """Weights of embeddings, and of matrices that look like an output head.

    A head is a 2-D parameter whose longer side is as long as the largest embedding has rows, under
    any name, as are an adapter (LoRA) of a head or an embedding and a head stored transposed. A
    matrix of another purpose and of that shape (an MLP four times as wide as the model, where the
    vocabulary is so small) is taken for one, too; a head of another length than that embedding
    (padded alone, or beside a table of more positions than there are tokens) is not found.

    Args:
        module: The model, of which each weight is whole or a DTensor.

    Returns:
        Each parameter once, in the order of ``module.parameters()``; none without an embedding.
        After :func:`mark_embedding_params`, those that were marked.
    """
    tables = {id(table.weight): table for table in embeddings(module)}
    marked = {
        id(getattr(child, name, None))
        for child in module.modules()
        for name in child.__dict__.get(_EMBEDDING_PARAMS, ())
    }
    # beside marks, the largest table left may be another than that of the words
    rows = 0 if marked else max((table.num_embeddings for table in tables.values()), default=0)
    return [
        parameter
        for parameter in module.parameters()
        if id(parameter) in tables.keys() | marked
        or (parameter.ndim == 2 and max(parameter.shape) == rows > min(parameter.shape))
    ]


def mark_embedding_params(module: nn.Module) -> None:
    """Let :func:`embedding_params` find the same ones after parts of the module are taken away."""
    found = {id(parameter) for parameter in embedding_params(module)}
    for child in module.modules():
        names = [name for name, own in child.named_parameters(recurse=False) if id(own) in found]
        if names:
            child.__dict__[_EMBEDDING_PARAMS] = names


def is_copy_of_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter in another dtype or layout, by its graph."""
    node: Any = tensor.grad_fn
    while node is not None:
        name = type(node).__name__
        if name == "AccumulateGrad":
            return isinstance(node.variable, nn.Parameter)
        if not name.startswith(_COPIES) or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    return False


def shares_memory_within(tensor: Tensor) -> bool:
    """Whether several elements of a tensor are one place in memory, as after ``expand``."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 1 + sum((size - 1) * stride for size, stride in steps)
