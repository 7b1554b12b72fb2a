"""Checkpoints of torch.distributed.checkpoint: names that are private or differ by version."""

from __future__ import annotations

from typing import Any

_METADATA = "torch.distributed.checkpoint.metadata"
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"

# Everything that a `.metadata` file refers to, written by torch 2.0 to 2.15, apart from dtypes,
# layouts and paths. None of them does anything but hold values.
METADATA_CLASSES = frozenset(
    {
        (_METADATA, "BytesStorageMetadata"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        (_SHARDED_TENSOR, "MEM_FORMAT_ENCODING"),  # of FSDP1
        (_SHARDED_TENSOR, "TensorProperties"),
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    }
)

# The function that gives a layout by its name in a pickle.
LAYOUT_BY_NAME = ("torch.serialization", "_get_layout")


def unflatten_checkpoint(flat: dict[str, Any], paths: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Rebuild the nested dictionary whose leaves a distributed checkpoint has under flat keys."""
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict  # slow to import

    nested: dict[str, Any] = unflatten_state_dict(flat, paths)
    return nested
