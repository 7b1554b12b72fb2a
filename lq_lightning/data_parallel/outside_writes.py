"""Writes to the main weights by anything but an optimizer step: seen by one rank, heeded by all.

A write makes the replica of its unit stale, and the next gather has to refresh it, which is a
collective. But a rank sees only the writes to its own shards, and a program may write to those of
some ranks alone. So ranks vote at the start of every forward pass, in one reduction of two bytes
per unit to their maxima: whether any rank has seen a write to it, and whether any rank has not.

- Nobody waits for a vote when it starts. Its result is read at the start of the next pass, when it
  has long been there, so that it costs nothing but the call, also on a slow network. A unit that
  some rank has seen a write to is stale from then on: the write takes effect one pass late.
- A rank that has seen a write waits for the vote at once. Where all ranks have seen one, all of
  them wait and all know, and the unit is stale in this very pass. So a write that every rank makes
  (averaged weights that are swapped in, say) takes effect at once; who has seen none need not wait,
  as not all have.

*Invariant:* a gather issues a collective only for what all ranks know: the course of the program
and votes that all of them have read. What one rank sees decides on nothing but its next vote and on
when that is read.

That every rank runs equally many passes is what FSDP2 needs anyway. A vote carries the number of
the optimizer step, so that ranks that do not agree on it are told so, and votes have a process
group of their own, so that they are compared with each other even then.

Within a forward pass and its backward nothing is decided anew, so both use the same weights. A
gather outside of any pass, as of ``module.unshard()``, has a vote of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from lq_lightning._compat.fsdp2 import (
    GroupParam,
    ShardIdentity,
    data_was_assigned,
    same_addresses,
    shard_identity,
    write_fingerprint,
)
from lq_lightning._compat.torch import backward_id
from lq_lightning.data_parallel.replica import Freshness, Replica
from lq_lightning.foundation.agreement import MaxReduction

__all__ = ["WriteVotes", "WriteWatch"]


class WriteWatch:
    """Sees writes to this rank's shards of one unit.

    Args:
        names: Fully qualified names of the parameters.
        params: Function that describes them as they are now.
    """

    def __init__(self, names: Sequence[str], params: Callable[[], list[GroupParam]]) -> None:
        self._names = tuple(names)
        self._params = params
        self._known: tuple[tuple[int, ...], ...] = ()
        self._frozen_written = False
        self._identities: list[ShardIdentity] = []
        self._identities_checked = False
        self.note()

    def note(self) -> None:
        """Take the weights as they are now for known."""
        params = self._params()
        self._known = write_fingerprint(params)
        self._identities = [shard_identity(p) for p in params]
        self._identities_checked = False
        self._frozen_written = False

    def note_step(self) -> None:
        """Take trained weights as they are now for known: the next difference has their change.

        Frozen ones are in no difference, so a write to them remains to be reported.

        Raises:
            RuntimeError: The ``.data`` of a parameter was assigned.
        """
        before, written = self._known, self._frozen_written
        self._note_checked()
        trained = [p.requires_grad for p in self._params()]
        self._frozen_written = written or any(
            a != b and not t for a, b, t in zip(before, self._known, trained, strict=True)
        )

    def take(self) -> bool:
        """Whether anything was written since it was last known, which it is from now on.

        Raises:
            RuntimeError: The ``.data`` of a parameter was assigned.
        """
        if write_fingerprint(self._params()) == self._known:
            written, self._frozen_written = self._frozen_written, False
            return written
        self._note_checked()
        return True

    def _note_checked(self) -> None:
        fingerprint = write_fingerprint(self._params())
        if self._identities_checked and same_addresses(fingerprint, self._known):
            self._known, self._frozen_written = fingerprint, False  # written in place
            return
        known = self._identities
        self.note()
        for name, param, identity in zip(self._names, self._params(), known, strict=True):
            if data_was_assigned(param, identity):
                raise RuntimeError(
                    f"`.data` of the parameter `{name}` was assigned, which has no effect on a "
                    "model sharded by FSDP2: it computes with the memory that it gave the shard. "
                    "Write into the parameter instead: "
                    "`with torch.no_grad(): parameter.copy_(value)`."
                )
        self._identities_checked = True


class WriteVotes:
    """Lets all ranks agree which replicas outside writes have made stale; see above.

    Args:
        group: All ranks, in a group that is used for nothing else.
        device: Where they keep their tensors.
        forward_number: Function that numbers forward passes, see ``ForwardCounter``.

    Attributes:
        counts: How often a unit was found to be written, by name; the same on every rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        forward_number: Callable[[], int | None],
    ) -> None:
        self._group = group
        self._reduction = MaxReduction(device)
        self._forward_number = forward_number
        self._units: list[tuple[str, Replica, WriteWatch]] = []
        self._voted_in: int | None = None
        self._pending: Callable[[], list[int]] | None = None
        self.counts: dict[str, int] = {}

    def add(self, name: str, replica: Replica, watch: WriteWatch) -> None:
        """Vote on this unit too, from the next time on."""
        self._units.append((name, replica, watch))

    def before_gather(self, step: int) -> None:
        """Vote if this gather is the first one of a forward pass, or outside of any.

        Args:
            step: Optimizer steps taken so far.

        Raises:
            RuntimeError: Ranks have voted at different steps, or see ``WriteWatch.take``.
        """
        if backward_id() != -1:
            return
        number = self._forward_number()
        if number is None or number != self._voted_in:
            self._voted_in = number
            self._heed(self._pending, by_all=False)  # of those by all, every rank knows already
            seen = [self._sees(*unit) for unit in self._units]
            self._pending = self._start(seen, step)
            if any(seen):
                self._heed(self._pending, by_all=True)

    def settle(self, step: int) -> None:
        """Vote and wait for it: a replica not in use on one rank is not on any. All call this.

        Args:
            step: Optimizer steps taken so far.
        """
        self._heed(self._pending, by_all=False)
        self._pending = None
        seen = [self._sees(*unit) for unit in self._units]
        stale = [replica.state is Freshness.STALE for _, replica, _ in self._units]
        vote = [a or b for a, b in zip(seen, stale, strict=True)]
        self._heed(self._start(vote, step), by_all=None)

    @staticmethod
    def _sees(name: str, replica: Replica, watch: WriteWatch) -> bool:
        written = watch.take()
        return written and replica.state is not Freshness.STALE

    def _start(self, seen: list[bool], step: int) -> Callable[[], list[int]]:
        mine = [*map(int, seen), step % 256]
        others = [*(1 - written for written in mine[:-1]), 255 - mine[-1]]
        return self._reduction.start([*mine, *others], self._group)

    def _heed(self, vote: Callable[[], list[int]] | None, by_all: bool | None) -> None:
        """Let replicas be stale whose weights were written by all ranks, by some, or (None) any."""
        if vote is None:
            return
        result = vote()
        half = len(result) // 2
        *seen, latest = result[:half]
        *not_seen, earliest = result[half:]
        if latest + earliest != 255:
            raise RuntimeError(
                "ranks have run different numbers of forward passes between optimizer steps, or "
                "some ran out of batches. All collectives of FSDP2 need the same number on every "
                "rank, in evaluation too: give every rank equally many batches."
            )
        for (name, replica, _), some, not_all in zip(self._units, seen, not_seen, strict=True):
            heeded = some and (by_all is None or by_all == (not not_all))
            if heeded and replica.state is not Freshness.STALE:
                replica.invalidate()
                self.counts[name] = self.counts.get(name, 0) + 1
