"""Weight replicas: their memory and state, and agreement over ranks on which of them are stale.

An external update of the main weights (by anything but an optimizer step) makes the replica of its
unit stale, and the next gather has to refresh it, which is a collective. But a rank sees only
updates of its own shards, and a program may write to the shards of some ranks alone. So ranks vote
at the start of every forward pass, in one max-reduction of three bytes per unit: whether any rank
has seen an update, whether any rank has not, and whether the shard has changed on any rank without
an update that could be seen.

- Nobody waits for a vote when it starts. Its result is read at the start of the next pass, when it
  has long arrived, so it costs nothing but the call, also on a slow network. A unit that some rank
  has seen an update of is stale from then on: the update takes effect one pass late.
- A rank that has seen an update waits for the vote at once. Where all ranks have seen one, all of
  them wait and all know, and the unit is stale in this very pass. So an update on every rank (such
  as averaged weights that are swapped in) takes effect at once. A rank that has seen none need not
  wait: not all have seen one.

A rank sees an update by version counters, at once. What these miss (:class:`ShardChecksums`) it
sees by reading its shards. On a CPU that is at once, too. On a GPU the host would have to wait for
the device, which it does where such updates are likely: in the first steps, when training turns to
evaluation and back, and for good once ranks have found one. Elsewhere only the device knows: its
byte is the third one, and the update takes effect one pass late.

*Invariant:* a gather issues a collective only because of what all ranks know: the course of the
program, and votes that all of them have read. What one rank sees decides nothing but its next vote
and when it reads that.

All ranks run equally many passes, as FSDP2 requires anyway. A vote carries the number of the
optimizer step, so that ranks that disagree on it raise an error, and votes have a process group of
their own, so that they are compared with each other even then.

Nothing is decided between a forward pass and its backward, so both use the same weights. A gather
outside of any pass, such as that of ``module.unshard()``, has a vote of its own.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lq_lightning._compat.fsdp2 import (
    GroupParam,
    ShardIdentity,
    data_was_assigned,
    same_addresses,
    shard_identity,
    shard_memory,
    write_fingerprint,
)
from lq_lightning.foundation import streams
from lq_lightning.foundation.streams import MaxReduction
from lq_lightning.kernels.checksum import checksums

_FIRST_STEPS = 2
_MAX_MASKS = 16


# --- the replica of a unit ----------------------------------------------------------------------


class Freshness(enum.Enum):
    """Work that the next gather owes a replica."""

    STALE = "refresh it from the main weights"
    RESTORED = "refresh it from a checkpoint's slots"
    FRESH = "read it"


class ReplicaMemory:
    """Memory for the replicas of ``units`` units of one shape, so that one operator updates all."""

    def __init__(self, units: int) -> None:
        self._units = units
        self.rows: Tensor | None = None  # [units, slots * n], from the first refresh on
        self._allocated: torch.cuda.Event | None = None  # None on a device without streams

    def row(self, index: int, numel: int, like: Tensor) -> Tensor:
        """Return the memory of one unit: ``numel`` elements of the dtype and device of ``like``.

        Units that were given memory of another dtype keep it.
        """
        rows = self.rows
        if rows is None or rows.dtype != like.dtype:
            self.rows = rows = like.new_empty(self._units, numel)
            if streams.has_streams(rows.device):
                self._allocated = streams.current_stream().record_event()
        elif self._allocated is not None:  # before that, it may hold what its stream still reads
            streams.current_stream().wait_event(self._allocated)
        return rows[index]

    def holds(self, replicas: Sequence[Replica]) -> bool:
        """Whether the rows are the memory of exactly these replicas."""
        if self.rows is None or len(replicas) != len(self.rows):
            return False
        return all(r.values is not None and r.rows is self.rows for r in replicas)


class Replica:
    """The weights that a unit is computed with, equal on all ranks.

    Its state says what may be done with it:

    ================== ========== ========== ==========
    event              STALE      RESTORED   FRESH
    ================== ========== ========== ==========
    invalidate         STALE      STALE      STALE
    restore            RESTORED   RESTORED   RESTORED
    begin_refresh      STALE      STALE
    begin_exchange     STALE      STALE      STALE
    complete           FRESH
    ================== ========== ========== ==========

    It starts as STALE, without memory. A refresh or an exchange makes it STALE before anything is
    written and FRESH when everything is: an error in between costs a refresh and never leaves
    weights that are half old. Every rank has to cause the same events in the same order, because
    what a gather does, and with it the order of collectives, follows from the state alone.
    """

    def __init__(self, memory: ReplicaMemory, index: int) -> None:
        self._memory, self._row = memory, index
        self.state = Freshness.STALE
        self.values: Tensor | None = None  # [slots * n], a slot for each rank or for each node
        self.rows: Tensor | None = None  # the tensor that `values` is a row of
        self.own: Tensor | None = None  # [n], this rank's slot: a view of `values`
        self.own_index = 0  # number of that slot
        self._saved: Tensor | None = None  # [n], iff RESTORED
        # event of the last complete write; None on a device without streams
        self.written: torch.cuda.Event | None = None

    @property
    def slot(self) -> Tensor | None:
        """This rank's slot as it is or will be restored, ``[n]``; None if it is stale."""
        if self.state is Freshness.RESTORED:
            return self._saved
        return self.own if self.state is Freshness.FRESH else None

    def invalidate(self) -> None:
        """Let the next gather refresh the replica from the main weights."""
        self.state = Freshness.STALE
        self._saved = None

    def restore(self, saved: Tensor) -> None:
        """Let the next gather refresh the replica from saved slots, of which this rank's is given.

        The memory stays: exchanges on other streams may still use it.
        """
        self.state = Freshness.RESTORED
        self._saved = saved

    def begin_refresh(self, slot: Tensor, num_slots: int, index: int) -> tuple[Tensor, Tensor]:
        """Write this rank's own slot, for a gather of all slots that :meth:`complete` follows.

        ``slot`` has this rank's main weights, ``[n]``, always in the same gather dtype. Returns
        ``(values, own)``, of which only the latter is written.
        """
        source = slot if self._saved is None else self._saved
        self.invalidate()
        self.wait()
        if self.values is None or self.own is None:
            self.values = self._memory.row(self._row, num_slots * slot.numel(), slot)
            self.rows = self._memory.rows
            self.own, self.own_index = self.values.view(num_slots, -1)[index], index
        self.own.copy_(source)
        streams.record_use(source)  # allocated on another stream, by FSDP2 or before the restore
        return self.values, self.own

    def begin_exchange(self) -> bool:
        """Note that the main weights were updated; return whether to add their difference.

        The replica is STALE until :meth:`complete` is called; without it the next gather refreshes
        it.
        """
        exchanges = self.state is Freshness.FRESH
        self.invalidate()
        return exchanges

    def complete(self) -> None:
        """Note that all writes of a refresh or an exchange are queued on the current stream."""
        if self.values is None:
            raise AssertionError("there is no replica to complete")
        if streams.has_streams(self.values.device):
            self.written = streams.current_stream().record_event()
        self.state = Freshness.FRESH

    def complete_with(self, other: Replica) -> None:
        """Become FRESH with the event that ``other`` has just recorded."""
        self.written, self.state = other.written, Freshness.FRESH

    def wait(self) -> None:
        """Let the current stream wait until the last complete write is done."""
        if self.written is not None:
            streams.current_stream().wait_event(self.written)

    def fresh_values(self) -> Tensor | None:
        """Values for the current stream, which waits for the last write; None if not FRESH."""
        if self.state is not Freshness.FRESH:
            return None
        self.wait()
        return self.values


# --- external updates ---------------------------------------------------------------------------


class ShardWatch:
    """Version counters and addresses of this rank's shards of one unit, which show most updates."""

    def __init__(self, names: Sequence[str], params: Callable[[], list[GroupParam]]) -> None:
        self._names = tuple(names)
        self.params = params
        self._known: tuple[tuple[int, ...], ...] = ()
        self._frozen_written = False
        self._identities: list[ShardIdentity] = []
        self._identities_checked = False
        self.note()

    def note(self) -> None:
        """Take the present weights as known."""
        params = self.params()
        self._known = write_fingerprint(params)
        self._identities = [shard_identity(p) for p in params]
        self._identities_checked = False
        self._frozen_written = False

    def note_step(self) -> None:
        """Take the present trained weights as known: the next difference contains their change.

        Frozen ones are in no difference, so an update of them remains to be reported. Raises as
        :meth:`take` does.
        """
        before, written = self._known, self._frozen_written
        self._note_checked()
        trained = [p.requires_grad for p in self.params()]
        self._frozen_written = written or any(
            a != b and not t for a, b, t in zip(before, self._known, trained, strict=True)
        )

    def take(self) -> bool:
        """Whether a weight was written since it was last known; takes the present ones as known.

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


class ShardChecksums:
    """Checksums of all shards of this rank, which show every update.

    Version counters miss what ``torch._foreach_*`` and fused optimizers do to a DTensor, writes
    through ``.data`` and NumPy, and kernels of other libraries. On a GPU nothing here waits for the
    device; results belong to the current stream.
    """

    def __init__(self) -> None:
        self._units: list[Callable[[], list[GroupParam]]] = []
        self._known: Tensor | None = None  # [parameters] int64
        self._masks: dict[tuple[bool, ...], Tensor] = {}
        self._index: Tensor | None = None  # [parameters]: the unit of each

    def add(self, params: Callable[[], list[GroupParam]]) -> None:
        """Also read the shards of this unit."""
        self._units.append(params)
        self._known = self._index = None

    def take(self) -> Tensor:
        """Return which units have changed since the last call, ``[units]`` uint8, 0 or 1."""
        known, now = self._known, self._sums()
        self._known = now
        if known is None:
            return now.new_zeros(len(self._units), dtype=torch.uint8)
        streams.record_use(known)
        if self._index is None:
            sizes = torch.tensor([len(params()) for params in self._units], device="cpu")
            index = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)
            self._index = index.to(now.device)
        changed = now.new_zeros(len(self._units)).index_add_(0, self._index, (now != known).long())
        return changed.clamp_(max=1).to(torch.uint8)

    def note(self) -> None:
        """Take all present shards as known."""
        self._known = self._sums()

    def note_trained(self, stepped: Sequence[bool]) -> None:
        """Take the present trained parameters of units that have ``stepped`` as known."""
        known = self._known
        if known is None:
            return
        units = zip(self._units, stepped, strict=True)
        key = tuple([s and p.requires_grad for params, s in units for p in params()])
        if key not in self._masks:
            if len(self._masks) == _MAX_MASKS:
                self._masks.clear()
            self._masks[key] = torch.tensor(key, device="cpu").to(known.device)
        streams.record_use(known)
        self._known = torch.where(self._masks[key], self._sums(), known)

    def _sums(self) -> Tensor:
        return checksums([m for params in self._units for m in shard_memory(params())])


class StaleReplicaConsensus:
    """Votes of all ranks on which replicas external updates have made stale; see above.

    ``group`` has all ranks and is used for nothing else; ``forward_number`` numbers forward passes,
    see ``ForwardCounter``; ``module`` is the model, which knows training from evaluation.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        forward_number: Callable[[], int | None],
        module: nn.Module,
    ) -> None:
        self._group, self._device = group, device
        self._module = module
        self._checksums = ShardChecksums()
        self._waits = not streams.has_streams(device)  # for checksums, at every vote
        self._trained: bool | None = None  # at the last vote
        self._first_step: int | None = None
        self._reduction = MaxReduction(device)
        self._forward_number = forward_number
        self._units: list[tuple[str, Replica, ShardWatch]] = []
        self._voted_in: int | None = None
        self._pending: Callable[[], list[int]] | None = None
        # number of times that each unit was found updated, equal on every rank
        self.counts: dict[str, int] = {}

    def add(self, name: str, replica: Replica, watch: ShardWatch) -> None:
        """Vote on this unit too, from the next vote on."""
        self._units.append((name, replica, watch))
        self._checksums.add(watch.params)

    def note(self) -> None:
        """Take the present weights as known: replicas were restored from a checkpoint."""
        self._checksums.note()

    def note_step(self, stepped: Callable[[Replica], bool]) -> None:
        """Take the present trained weights of units that have stepped as known."""
        self._checksums.note_trained([stepped(replica) for _, replica, _ in self._units])

    def before_gather(self, step: int) -> None:
        """Vote if this gather, in no backward, is the first of a forward pass or outside of any.

        Raises:
            RuntimeError: Ranks have voted at different steps, or see ``ShardWatch.take``.
        """
        number = self._forward_number()
        if number is not None and number == self._voted_in:
            return
        self._voted_in = number
        # updates that all ranks have seen took effect in that pass already
        self._apply(self._pending, by_all=False)
        training = self._module.training
        if self._first_step is None:
            self._first_step = step
        early = step - self._first_step < _FIRST_STEPS
        likely = early or number is None or self._trained != training
        self._trained = training
        seen, hidden = self._look(wait=self._waits or likely)
        self._pending = self._start(seen, hidden, step)
        if any(seen):
            self._apply(self._pending, by_all=True)

    def settle(self, step: int) -> None:
        """Vote, wait, and let replicas that are stale on one rank be stale on all. All call it."""
        self._apply(self._pending, by_all=False)
        self._pending = None
        seen, hidden = self._look(wait=True)
        vote = [a or b for a, b in zip(seen, self._stale(), strict=True)]
        self._apply(self._start(vote, hidden, step), by_all=None)

    def _stale(self) -> list[bool]:
        return [replica.state is Freshness.STALE for _, replica, _ in self._units]

    def _look(self, wait: bool) -> tuple[list[bool], Tensor | None]:
        """Return which units were updated on this rank, and unless ``wait``, other changed units.

        Units whose replica is stale do not count.
        """
        seen, stale = [watch.take() for _, _, watch in self._units], self._stale()
        hidden = self._checksums.take()
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

    def _apply(self, vote: Callable[[], list[int]] | None, by_all: bool | None) -> None:
        """Make replicas stale whose weights all ranks, only some, or (None) any have updated."""
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
            applies = (some or late) and (by_all is None or by_all == everyone)
            if applies and replica.state is not Freshness.STALE:
                replica.invalidate()
                self.counts[name] = self.counts.get(name, 0) + 1
