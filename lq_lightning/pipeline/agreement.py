"""Ranks of a pipeline compare what they are about to do, before anything is sent.

Messages carry neither shape nor dtype. A rank with another batch would be given a payload of
another size, which gloo truncates without a word, or would train on samples of which the last
stage has other labels.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lq_lightning.foundation.agreement import gather_objects

__all__ = ["Agreement", "batch_digest", "batch_signature"]

T = TypeVar("T")


class Agreement:
    """Comparisons between the ranks of a pipeline, each one exchange of 8 bytes per rank.

    Every rank must call the methods in one order. No call waits longer than the timeout of the
    group.

    Args:
        group: the ranks of the pipeline, over gloo.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def check(self, facts: Mapping[str, str], remedy: str) -> None:
        """Compare facts with those of the other ranks.

        Args:
            facts: what must be the same, by name.
            remedy: how to make it so, a sentence.

        Raises:
            RuntimeError: on every rank if any two differ, with the values that do.
        """
        text = repr(sorted(facts.items())).encode()
        digest = int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)
        mine = torch.tensor([digest], dtype=torch.int64)
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(gathered, mine, group=self._group)
        if all(torch.equal(each, mine) for each in gathered):
            return
        # All ranks were given the same digests, so that all of them come here.
        everyone = gather_objects(dict(facts), self._group)
        raise RuntimeError(f"{_differences(everyone)} {remedy}")

    def share(self, value: T | None, source: int) -> T:
        """Return the value of one rank on all of them.

        Args:
            value: any object on rank ``source`` of the group; ignored on the others.
            source: number of the rank within the group.
        """
        box: list[Any] = [value]
        ranks = dist.get_process_group_ranks(self._group)
        dist.broadcast_object_list(box, src=ranks[source], group=self._group)
        result: T = box[0]
        return result


def batch_signature(batch: object) -> str:
    """Return the structure of a batch with shapes and dtypes, without contents.

    Args:
        batch: tensors, in mappings, lists, tuples and dataclasses; anything else counts by its
            type.
    """
    return "; ".join(
        f"{path}: {_name(leaf.dtype)}{list(leaf.shape)}"
        if isinstance(leaf, Tensor)
        else f"{path}: {type(leaf).__name__}"
        for path, leaf in _leaves(batch, "batch")
    )


def batch_digest(batch: object) -> str:
    """Return a short digest of the contents of a batch: tensors, strings and numbers.

    Tensors on a GPU are copied to the host, which waits for it.
    """
    digest = hashlib.sha256()
    for _, leaf in _leaves(batch, "batch"):
        if isinstance(leaf, Tensor):
            content = leaf.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(content.numpy().tobytes())
        elif isinstance(leaf, (str, bytes, bool, int, float, complex)):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()[:12]


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _differences(everyone: list[dict[str, str]]) -> str:
    names = sorted({name for facts in everyone for name in facts})
    found = []
    for name in names:
        ranks: dict[str | None, list[int]] = {}
        for rank, facts in enumerate(everyone):
            ranks.setdefault(facts.get(name), []).append(rank)
        if len(ranks) > 1:
            values = ", ".join(f"{value} on {_ranks(who)}" for value, who in ranks.items())
            found.append(f"{name} is {values}")
    return f"ranks of one pipeline differ: {'; '.join(found)}."


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
