"""FSDP2's gathers of a unit, where what they would gather is in memory already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState


class GatheredWeights(NamedTuple):
    """Result that a gather of a unit would have.

    Attributes:
        values: ``[world * n]``; FSDP2 copies from it on the computing stream.
        written: When it is there; None on a device without streams.
    """

    values: Tensor
    written: torch.cuda.Event | None


def serve_gathers(group: Any, read: Callable[[], GatheredWeights | None]) -> None:
    """Let a group's gathers take what ``read`` returns, and nothing that an earlier call said.

    FSDP2 would cast and copy this rank's shards into a new buffer on one stream and call its custom
    all-gather on another, which takes the host longer than copying out. The sizes that it copies by
    are those of the group's first gather, which is always its own, as is every one of parameters
    with hooks for gathers (``fsdp_pre_all_gather``).

    Args:
        group: FSDP2's parameter group.
        read: Called where FSDP2 would gather over all shards; None lets it.
    """
    original = getattr(group.unshard, "by_fsdp2", group.unshard)
    known: Any = None  # FSDP2's own result, without its tensors

    def unshard(async_op: bool = False) -> None:
        nonlocal known
        if known is not None and _would_gather(group):
            found = read()
            if found is not None:
                group._all_gather_result = known._replace(
                    all_gather_output=found.values, all_gather_event=found.written
                )
                return
        original(async_op)
        result = group._all_gather_result
        if known is None and result is not None and group.is_sharded and not _has_hooks(group):
            known = result._replace(
                all_gather_output=None, all_gather_event=None, all_gather_work=None
            )

    unshard.by_fsdp2 = original  # type: ignore[attr-defined]
    group.unshard = unshard


def _would_gather(group: Any) -> bool:
    """Mirror the conditions of ``FSDPParamGroup.unshard``, for a gather over all shards."""
    in_pre_backward = group._training_state == TrainingState.PRE_BACKWARD
    return (
        group._all_gather_result is None
        and group.is_sharded
        and (group.unshard_in_backward or not in_pre_backward)
    )


def _has_hooks(group: Any) -> bool:
    return any(hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in group.fsdp_params)
