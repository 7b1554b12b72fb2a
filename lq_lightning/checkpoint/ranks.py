"""Ranks that write or read a checkpoint together, and every collective they need for it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from lq_lightning.foundation.agreement import first_other, gather_objects

T = TypeVar("T")

# Errors that keep their class on other ranks; everything else arrives as a RuntimeError.
_KINDS = (
    *(FileNotFoundError, OSError, KeyError, ValueError, TypeError),
    *(pickle.UnpicklingError, NotImplementedError),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroup:
    """Ranks that exchange objects, not tensors.

    Attributes:
        group: Process group; ``None`` is the world, or this process if there is no group.
        alone: This process only, whatever process group there is.
    """

    group: dist.ProcessGroup | None = None
    alone: bool = False

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.alone or not dist.is_initialized() else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Number of this rank within the group."""
        return 0 if self.size == 1 else dist.get_rank(self.group)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes, renames and removes."""
        return self.rank == 0

    def broadcast(self, value: T) -> T:
        """Return the first rank's value on all ranks."""
        if self.size == 1:
            return value
        values = [value]
        source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        dist.broadcast_object_list(values, src=source, group=self.group)
        return values[0]

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order."""
        if self.size == 1:
            return [value]
        return gather_objects(value, self.group)

    def first_other(self, value: T) -> tuple[T, T, int] | None:
        """Return the first rank's value, another rank's that differs and its number, or None."""
        return None if self.size == 1 else first_other(value, self.group)

    def together(self, work: Callable[[], T]) -> T:
        """Run ``work``, which has no collectives, on every rank; all raise if one fails.

        Other ranks raise an error of the same class if that is a usual one, else a RuntimeError.
        """
        if self.size == 1:
            return work()
        error: Exception | None = None
        try:
            result = work()
        except Exception as exception:  # all ranks raise it below
            error = exception
        kind = next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)
        report = None if error is None else (kind, _message(error))
        reports = self.all_gather(report)
        if error is not None:
            raise error
        for failed, other in enumerate(reports):
            if other is not None:
                raise other[0](f"{other[1]} (seen by rank {failed})")
        return result


def _message(error: Exception) -> str:
    text = error.args[0] if isinstance(error, KeyError) and error.args else error  # not its repr
    return str(text) or repr(error)


ALONE = RankGroup(alone=True)
