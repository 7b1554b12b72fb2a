"""Writes to the main weights by anything but an optimizer step: seen by one rank, heeded by all.

A write makes the replica of its unit stale, and the next gather has to refresh it, which is a
collective. But a rank sees only the writes to its own shards, and a program may write to those of
some ranks alone. So ranks vote at the start of every forward pass, in one reduction of three
bytes per unit to their maxima: whether any rank has seen a write to it, whether any rank has not,
and whether its shard has changed on any rank without a write that could be seen.

- Nobody waits for a vote when it starts. Its result is read at the start of the next pass, when it
  has long been there, so that it costs nothing but the call, also on a slow network. A unit that
  some rank has seen a write to is stale from then on: the write takes effect one pass late.
- A rank that has seen a write waits for the vote at once. Where all ranks have seen one, all of
  them wait and all know, and the unit is stale in this very pass. So a write that every rank makes
  (averaged weights that are swapped in, say) takes effect at once; who has seen none need not wait,
  as not all have.

A rank sees a write by version counters, at once. What these do not count (``ShardContents``) it
sees by reading its shards. On a CPU that is at once, too. On a GPU the host would have to wait for
the device, which it does where such writes are likely: in the first steps, when training turns to
evaluation and back, and for good once ranks have found one. Elsewhere the device alone knows, its
byte is the third one, and the write takes effect one pass late.

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
from torch import Tensor

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
from lq_lightning.data_parallel.shard_contents import ShardContents
from lq_lightning.foundation import streams
from lq_lightning.foundation.agreement import MaxReduction

__all__ = ["WriteVotes", "WriteWatch"]

_FIRST_STEPS = 2


class WriteWatch:
    """Sees writes to this rank's shards of one unit.

    Args:
        names: Fully qualified names of the parameters.
        params: Function that describes them as they are now.

    Attributes:
        params: See above.
    """

    def __init__(self, names: Sequence[str], params: Callable[[], list[GroupParam]]) -> None:
        self._names = tuple(names)
        self.params = params
        self._known: tuple[tuple[int, ...], ...] = ()
        self._frozen_written = False
        self._identities: list[ShardIdentity] = []
        self._identities_checked = False
        self.note()

    def note(self) -> None:
        """Take the weights as they are now for known."""
        params = self.params()
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
        trained = [p.requires_grad for p in self.params()]
        self._frozen_written = written or any(
            a != b and not t for a, b, t in zip(before, self._known, trained, strict=True)
        )

    def take(self) -> bool:
        """Whether anything was written since it was last known, which it is from now on.

        Raises:
            RuntimeError: The ``.data`` of a parameter was assigned.
        """
        if write_fingerprint(self.params()) == self._known:
            written, self._frozen_written = self._frozen_written, False
            return written
        self._note_checked()
        return True

    def _note_checked(self) -> None:
        fingerprint = write_fingerprint(self.params())
        if self._identities_checked and same_addresses(fingerprint, self._known):
            self._known, self._frozen_written = fingerprint, False  # written in place
            return
        known = self._identities
        self.note()
        for name, param, identity in zip(self._names, self.params(), known, strict=True):
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
        is_training: Whether the model trains now, and is not evaluated.

    Attributes:
        counts: How often a unit was found to be written, by name; the same on every rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        forward_number: Callable[[], int | None],
        is_training: Callable[[], bool],
    ) -> None:
        self._group, self._device = group, device
        self._is_training = is_training
        self._contents = ShardContents()
        self._waits = not streams.has_streams(device)  # for contents, at every vote
        self._trained: bool | None = None  # at the last vote
        self._first_step: int | None = None
        self._reduction = MaxReduction(device)
        self._forward_number = forward_number
        self._units: list[tuple[str, Replica, WriteWatch]] = []
        self._voted_in: int | None = None
        self._pending: Callable[[], list[int]] | None = None
        self.counts: dict[str, int] = {}

    def add(self, name: str, replica: Replica, watch: WriteWatch) -> None:
        """Vote on this unit too, from the next time on."""
        self._units.append((name, replica, watch))
        self._contents.add(watch.params)

    def note(self) -> None:
        """Take the weights as they are now for known: replicas were restored from a checkpoint."""
        self._contents.note()

    def note_step(self, stepped: Callable[[Replica], bool]) -> None:
        """Take trained weights as they are now for known, those of units that have stepped."""
        self._contents.note_trained([stepped(replica) for _, replica, _ in self._units])

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
            training = self._is_training()
            early = self._is_early(step)
            likely = early or number is None or self._trained != training
            self._trained = training
            seen, hidden = self._look(wait=self._waits or likely)
            self._pending = self._start(seen, hidden, step)
            if any(seen):
                self._heed(self._pending, by_all=True)

    def settle(self, step: int) -> None:
        """Vote and wait for it: a replica not in use on one rank is not on any. All call this.

        Args:
            step: Optimizer steps taken so far.
        """
        self._heed(self._pending, by_all=False)
        self._pending = None
        seen, hidden = self._look(wait=True)
        vote = [a or b for a, b in zip(seen, self._stale(), strict=True)]
        self._heed(self._start(vote, hidden, step), by_all=None)

    def _is_early(self, step: int) -> bool:
        if self._first_step is None:
            self._first_step = step
        return step - self._first_step < _FIRST_STEPS

    def _stale(self) -> list[bool]:
        return [replica.state is Freshness.STALE for _, replica, _ in self._units]

    def _look(self, wait: bool) -> tuple[list[bool], Tensor | None]:
        """Return which units were written on this rank, and unless ``wait``, other changed units.

        Units whose replica is stale do not count.
        """
        seen, stale = [watch.take() for _, _, watch in self._units], self._stale()
        hidden = self._contents.take()
        explained = [s or o for s, o in zip(seen, stale, strict=True)]
        unknown = not wait and hidden.device.type == self._device.type  # shards may be offloaded
        if not unknown:
            found = [bool(h) and not e for h, e in zip(hidden.tolist(), explained, strict=True)]
            self._waits |= any(found)
            seen = [s or f for s, f in zip(seen, found, strict=True)]
        elif any(explained):
            hidden *= torch.tensor([not e for e in explained], device="cpu").to(hidden.device)
        written = [s and not o for s, o in zip(seen, stale, strict=True)]
        return written, hidden if unknown else None

    def _start(self, seen: list[bool], hidden: Tensor | None, step: int) -> Callable[[], list[int]]:
        mine = [*map(int, seen), step % 256]
        others = [*(1 - written for written in mine[:-1]), 255 - mine[-1]]
        if hidden is None:
            return self._reduction.start([*mine, *others, *[0] * len(seen)], self._group)
        return self._reduction.start([*mine, *others], self._group, hidden)

    def _heed(self, vote: Callable[[], list[int]] | None, by_all: bool | None) -> None:
        """Let replicas be stale whose weights were written by all ranks, by some, or (None) any."""
        if vote is None:
            return
        result, units = vote(), len(self._units)
        *seen, latest = result[: units + 1]
        *not_seen, earliest = result[units + 1 : 2 * (units + 1)]
        hidden = result[2 * (units + 1) :]
        if latest + earliest != 255:
            raise RuntimeError(
                "ranks have run different numbers of forward passes between optimizer steps, or "
                "some ran out of batches. All collectives of FSDP2 need the same number on every "
                "rank, in evaluation too: give every rank equally many batches."
            )
        self._waits |= any(hidden)
        for (name, replica, _), some, not_all, late in zip(
            self._units, seen, not_seen, hidden, strict=True
        ):
            everyone = some and not not_all
            heeded = (some or late) and (by_all is None or by_all == everyone)
            if heeded and replica.state is not Freshness.STALE:
                replica.invalidate()
                self.counts[name] = self.counts.get(name, 0) + 1
