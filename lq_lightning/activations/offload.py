"""Saved activations that leave the device in forward and come back, ahead of need, in backward.

[Note: offload]

*What moves.* Hooks of saved tensors are in effect around the call of each block, outside of
compiled code: that is the one place that everything passes, codes of our functions, what compiled
code saves, and inputs of checkpointed regions. Storages move, whole and once, however many views of
them are saved. Weights and buffers stay, as does what the caller of a block holds anyway (tensors
that need no gradient, such as masks and rotary tables), what outlived a block before, small
tensors, tensor subclasses and small parts of large storages.

*Writes.* A tensor that changes after it was saved is an error when it is read, as in torch. Writes
that no version counter shows are found by sums of the source's parts, taken when it is saved and
again when it is let go, ``window`` blocks later, in every pass. If they differ, the copy may be of
either state, and an optimizer step after its use in backward is refused. What is read while its
source is held needs no check. Two reads of what moves cost a fiftieth of its copy each. The host
reads the results on the stream of copies out, so it waits for the forward pass only. Not seen: a
write that is undone before the source is let go, or keeps all sums; and one after that, to what
something else still holds.

*How.* One stream copies out, one copies in. The source of a copy is held until the stream that it
came from has been told to wait for the copy; only then may the allocator hand its memory out again.
``record_stream`` would free it when the host next allocates after the copy has run, as late as that
may be, so that peaks would depend on the host's luck. Before a block saves, the copies of the block
``window`` before it are waited for; where backward enters a block, the copies of the blocks before
it start, in the order of forward reversed. So no more than ``window`` blocks are resident in either
direction. A copy that is late is waited for; a block that was not expected is fetched when it is
read. What is read while its source is still held is not copied back.

*Lifetimes.* A host buffer belongs to the saved tensors of its storage, and is given back with the
last of them, however the graph ends: after backward, a second one (``retain_graph``), or an error.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lq_lightning._compat.modules import unwrap_call, wrap_call
from lq_lightning._compat.saved_tensors import (
    has_storage,
    hooks_are_free,
    is_freed,
    shows_its_memory,
    storage_key,
    storage_reference,
    version_now,
)
from lq_lightning._compat.torch import backward_id
from lq_lightning.foundation import streams
from lq_lightning.foundation.nested import tensors_in

from .hooks import WeightStorages, around_checkpoint_function
from .host_memory import Extent, HostPool, free_host_memory, gib
from .offload_share import RESIDENT, Share
from .recompute import find_recompute_units, whole_blocks

_MIN_NBYTES = 1 << 16
_LARGE_STORAGE = 8  # times the saved part of it: such a storage serves others as well


@dataclass(eq=False)
class _Group:
    """What one call of a block saved; ``previous`` is the call before it in the same forward."""

    name: str
    module: nn.Module
    has_units: bool  # of FSDP2, inside
    held: set[int]  # storages that the caller holds
    previous: Any
    records: dict[int, _Record] = field(default_factory=dict)
    _weights: tuple[Any, WeightStorages] | None = None

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor is a weight; FSDP2 swaps weights while a module runs."""
        first = next(self.module.parameters(), None)
        if self._weights is None or first is not self._weights[0] or self.has_units:
            self._weights = first, WeightStorages(self.module)
        return self._weights[1].holds(tensor)


class _Record:
    """A storage on its way: ``source`` on the device, ``extents`` on the host, ``value`` again on
    the device; ``users`` are the saved tensors that are parts of it.
    """

    value: Tensor | None = None
    sums: Tensor | None = None  # of the source when it was saved
    compared: tuple[str, Tensor] | None = None  # the block's name; has the source changed since?
    # copies out and back are done; the stream that the source came from, and the value goes to
    copied: Any = None
    arrived: Any = None
    home: Any = None
    users = taken = 0

    def __init__(self, tensor: Tensor, flat: Tensor, extents: tuple[Extent, ...]) -> None:
        self.key, self.reference = storage_key(tensor), storage_reference(tensor)
        self.source: Tensor | None = flat
        self.writes = version_now(flat)  # of what is read on the device
        self.nbytes, self.extents = flat.numel(), extents
        self.versions, self.version = _counter(tensor), version_now(tensor)

    def is_copy_of(self, tensor: Tensor) -> bool:
        """Whether nothing has changed since; tensors of one storage may have several counters."""
        return version_now(tensor) == version_now(self.versions) == self.version

    def let_go(self) -> None:
        """Give the memory of the source back, once its copy is done."""
        if self.copied is not None:
            self.home.wait_event(self.copied)
        self.source = None

    def drop_value(self) -> None:
        if self.value is not None and self.arrived is not None:
            self.home.wait_event(self.arrived)  # it is written until then
        self.value, self.taken = None, 0


class _Kept:
    """A saved tensor that stays: detached, for an output would refer to the node that owns it."""

    def __init__(self, tensor: Tensor) -> None:
        plain = type(tensor) is Tensor or tensor.grad_fn is not None
        self.tensor, self.version = tensor.detach() if plain else tensor, version_now(tensor)


class _Moved:
    """A saved tensor that is a view of a moved storage."""

    def __init__(
        self, tensor: Tensor, record: _Record, group: _Group, dead: deque[_Record]
    ) -> None:
        self.record, self.group, self.dead = record, group, dead
        self.dtype = tensor.dtype
        self.view = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        self.versions, self.version = _counter(tensor), version_now(tensor)
        record.users += 1

    def __del__(self) -> None:
        self.dead.append(self.record)  # in any thread, at any time: taken note of later


def _counter(tensor: Tensor) -> Tensor:
    """An empty tensor that shares the version counter of another, and none of its memory."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def _check_version(tensor: Tensor, version: int) -> None:
    if version_now(tensor) != version:
        raise RuntimeError(
            "One of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a {tensor.dtype} tensor saved in an offloaded block is at version "
            f"{version_now(tensor)}; expected version {version} instead."
        )


def _sums(flat: Tensor) -> Tensor:
    """Add up the bits of equal parts, which other values change, and values in other places."""
    words = flat.view(torch.int64) if flat.numel() % 8 == 0 else flat
    return words.view(math.gcd(words.numel(), 1024), -1).sum(1, dtype=torch.int64)


def _is_fake(tensor: Tensor) -> bool:
    return type(tensor).__name__ == "FakeTensor"  # without importing what a simulation needs


def find_blocks(model: nn.Module) -> list[str]:
    """Return the names of the repeated blocks of a model."""
    return whole_blocks(find_recompute_units(model))


class Offload:
    """Moves what the blocks of a model save to host memory, until it is removed.

    Args:
        model: Has repeated blocks; as it trains: on its device, sharded, its blocks compiled.
        amount: ``"auto"``, a share of the saved bytes up to 1, or host memory of this rank: a
            number above 1 in GiB, or a string such as ``"40GiB"``.
        device: Where the model computes; by default where its weights are.
        ranks: Ranks of this node, which share its memory.
        blocks: Names by ``find_blocks`` of the whole model, of which a stage has some.
        window: Calls of blocks that are resident in either direction.
        min_nbytes: Smaller storages stay.
        slab_nbytes: Pinned memory grows by so much, a power of two.

    Raises:
        ValueError: Another amount, or a model without repeated blocks.
        RuntimeError: More host memory than there is.
    """

    def __init__(
        self,
        model: nn.Module,
        amount: str | float = "auto",
        *,
        device: torch.device | None = None,
        ranks: int = 1,
        blocks: Sequence[str] | None = None,
        window: int = RESIDENT,
        min_nbytes: int = _MIN_NBYTES,
        slab_nbytes: int = 1 << 29,
    ) -> None:
        self.share = Share(amount)
        self._ranks, self._window, self._min_nbytes = ranks, window, min_nbytes
        names = find_blocks(model) if blocks is None else blocks
        modules = dict(model.named_modules())
        self._units = {n: m for n in names if (m := modules.get(n)) and [*m.parameters()]}
        if not self._units:
            raise ValueError(
                f"`offload={amount!r}` moves what the repeated blocks of a model save, but "
                f"`{type(model).__name__}` has none (several modules of one class in a ModuleList, "
                "ModuleDict or Sequential). Remove `offload`, or, where each block is wrapped by "
                "`torch.compile(block)`, call `block.compile()` instead."
            )
        if any(isinstance(module, nn.DataParallel) for module in model.modules()):
            raise ValueError(
                f"`offload={amount!r}` does not work in `nn.DataParallel`, whose replicas would "
                "call the blocks of the first: use the strategy 'ddp', or remove `offload`."
            )
        first = next(next(iter(self._units.values())).parameters())
        self._device = device or first.device
        self._is_simulated = any(map(_is_fake, model.parameters()))
        limit = self.share.limit_nbytes
        if limit is not None:
            self._check_host(limit)
        on_gpu = self._device.type == "cuda"
        self.share.is_open &= on_gpu
        self.pool = HostPool(pin=on_gpu, may_grow=self._check_host, slab_nbytes=slab_nbytes)
        self.enabled = True
        self.skipped = "no block was called by itself: compile the blocks, not the whole model"
        self.moved_nbytes = self.seen_nbytes = 0  # since the start
        self._is_counted = False
        self._group: _Group | None = None
        self._last: Any = None  # the newest group of this forward that moves, as a weak reference
        self._last_index = -1
        self._is_forward = False  # and nothing has read what was saved since its first block
        self._records: dict[int, _Record] = {}
        # Storages that others hold anyway: they need not move again. References keep keys unique.
        self._outliving: dict[int, StorageWeakRef] = {}
        self._leaving: deque[_Group] = deque()
        self._resident: deque[_Group] = deque()
        self._dead: deque[_Record] = deque()
        self._streams: tuple[Any, ...] = ()  # out, in
        self._compared: list[tuple[str, Tensor]] = []  # whose copies backward has read
        for index, (name, unit) in enumerate(self._units.items()):
            wrap_call(unit, self._caller(index, name, unit))
            around_checkpoint_function(unit, self._caller(index, name, unit))
        self._before_steps = register_optimizer_step_pre_hook(lambda *_: self.check_writes())

    # --- forward ---------------------------------------------------------------------------------

    def _caller(self, index: int, name: str, unit: nn.Module) -> Callable[..., Any]:
        inside = (each for each in unit.modules() if each is not unit)
        has_units = any(isinstance(each, FSDPModule) for each in inside)

        def call(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not self.enabled or not torch.is_grad_enabled() or backward_id() != -1:
                return run(*args, **kwargs)
            if not hooks_are_free():  # a checkpointed region, which drops all, or others'
                if self._group is None:
                    self.skipped = "other hooks of saved tensors are in effect around the blocks"
                return run(*args, **kwargs)
            previous = self._begin(index)
            inputs = [t for t in tensors_in((args, kwargs)) if not t.requires_grad]
            held = {storage_key(t) for t in inputs if has_storage(t)}
            group = _Group(name, unit, has_units, held, previous)
            self._group, self._last, self._last_index = group, weakref.ref(group), index
            self._is_forward = True
            try:
                with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                    return run(*args, **kwargs)
            finally:
                self._end(group)

        return call

    def _begin(self, index: int) -> Any:
        """Let go of what is beyond the window; return the call before in this forward, if any."""
        self._bury()
        while len(self._leaving) >= self._window:
            self._let_go(self._leaving.popleft())
        if index > self._last_index and self._is_forward:
            return self._last
        self.share.begin_forward()
        self._outliving = {k: r for k, r in self._outliving.items() if not is_freed(r)}
        return None

    def _end(self, group: _Group) -> None:
        self._group = None
        if group.records:
            self._leaving.append(group)
        elif self._last is not None and self._last() is group:
            self._last = group.previous  # backward has nothing to fetch for it
        self.share.end_block()
        moved = sum(record.nbytes for record in group.records.values())
        if moved and not self._is_counted:
            self._is_counted = True
            needed = moved * len(self._units)
            limit = self.share.limit_nbytes
            self._check_host(needed if limit is None else min(limit, needed), group.name)

    def _pack(self, tensor: Tensor) -> Any:
        group = self._group
        if group is None or not self._is_movable(tensor):
            return _Kept(tensor)
        key = storage_key(tensor)
        record = self._records.get(key)
        if record is not None and record.is_copy_of(tensor):
            moved = _Moved(tensor, record, group, self._dead)
        else:
            if key in group.held or key in self._outliving or group.owns(tensor):
                return _Kept(tensor)
            nbytes = tensor.untyped_storage().nbytes()
            self.seen_nbytes += nbytes
            if not self.share.takes(nbytes, self.pool.used_nbytes):
                return _Kept(tensor)
            moved = self._send(tensor, group)
            self._records[key] = moved.record
            self.moved_nbytes += nbytes
        group.records[id(moved.record)] = moved.record
        return moved

    def _is_movable(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor and not (self._is_simulated and _is_fake(tensor)):
            return False  # weights, and layouts of others
        if not has_storage(tensor) or tensor.device != self._device:
            return False
        nbytes = tensor.untyped_storage().nbytes()
        if not self._min_nbytes <= nbytes <= _LARGE_STORAGE * tensor.nbytes:
            return False
        return shows_its_memory(tensor)

    @torch.no_grad()
    def _send(self, tensor: Tensor, group: _Group) -> _Moved:
        storage = tensor.untyped_storage()
        if self._is_simulated:  # only memory of the device is followed
            values = storage.nbytes() // tensor.dtype.itemsize
            flat = tensor.data.as_strided((values,), (1,), 0).view(torch.uint8)
            extents = self.pool.take(storage.nbytes(), lambda event: None)
            return _Moved(tensor, _Record(tensor, flat, extents), group, self._dead)
        flat = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        out = self._stream(0)
        wait = (lambda event: None) if out is None else out.wait_event
        record = _Record(tensor, flat, self.pool.take(flat.numel(), wait))
        keep = _Moved(tensor, record, group, self._dead)  # gives the buffer back after an error
        record.sums = _sums(flat)
        host = self.pool.parts(record.extents, record.nbytes)
        parts = torch.split(flat, [part.numel() for part in host])
        if out is None:
            _copy(host, parts)
            return keep
        record.home = streams.current_stream()
        out.wait_stream(record.home)
        try:
            with streams.on_stream(out), self.share.timed():
                _copy(host, parts)
        finally:
            record.copied = out.record_event()
        return keep

    def _let_go(self, group: _Group) -> None:
        """Give the memory of sources back, once they are compared and their copies are done."""
        for record in group.records.values():
            source = record.source
            if source is None:
                continue
            if source.untyped_storage().nbytes() != record.nbytes:
                raise RuntimeError(
                    f"A tensor saved in `{group.name}` was resized by something else before its "
                    "copy to the host was done: remove `offload`, which cannot move such memory."
                )
            if record.sums is not None and record.users:
                home = record.home
                with nullcontext() if home is None else streams.on_stream(home):
                    record.compared = group.name, (_sums(source) != record.sums).any()
                if home is not None:
                    self._stream(0).wait_stream(home)  # where the host reads it
            record.sums = source = None
            record.let_go()
            self._note_outliving(record)

    def _note_outliving(self, record: _Record) -> None:
        if not is_freed(record.reference):
            self._outliving[record.key] = record.reference

    def check_writes(self) -> None:
        """Raise if backward has read a copy of what was written to after it was saved."""
        if not self._compared:
            return
        out = self._stream(0)
        with nullcontext() if out is None else streams.on_stream(out):
            if bool(torch.stack([differs for _, differs in self._compared]).any()):
                name = next(name for name, differs in self._compared if differs)
                raise RuntimeError(  # and again, if that is caught
                    f"A tensor that `{name}` saved for backward was written to afterwards, by it "
                    "or a block behind it, past autograd's version counters (`.data`, or a kernel "
                    "of another library). Its copy on the host may be of either state: remove "
                    "`offload`, or write to a copy."
                )
        self._compared.clear()

    # --- backward --------------------------------------------------------------------------------

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Kept):
            _check_version(packed.tensor, packed.version)
            return packed.tensor
        moved: _Moved = packed
        _check_version(moved.versions, moved.version)
        self._last, self._is_forward = None, False  # what is called next is another forward's
        self._bury()
        record = moved.record
        with torch.no_grad():
            self._enter(moved.group)
            self._bring(record)
            flat: Any = record.source if record.source is not None else record.value
            if record.source is None and record.arrived is not None:
                reader = streams.current_stream()
                reader.wait_event(record.arrived)
                if reader != record.home:
                    streams.record_use(flat)
            _check_version(flat, record.writes)  # by the backward of another that read it
            whole = flat[: flat.numel() // moved.dtype.itemsize * moved.dtype.itemsize]
            part: Tensor = whole.view(moved.dtype).as_strided(*moved.view).detach()
        if record.compared is not None:
            self._compared.append(record.compared)
            record.compared = None
        record.taken += 1
        if record.taken >= record.users:  # whoever reads it holds it now
            record.value, record.taken = None, 0
        return part

    def _enter(self, group: _Group) -> None:
        """Start the copies of a block and of those that backward reads next."""
        if self._resident and self._resident[-1] is group:
            return
        wanted: list[_Group] = []
        nearest: _Group | None = group
        while nearest is not None and len(wanted) < self._window:
            wanted.append(nearest)
            nearest = nearest.previous() if nearest.previous is not None else None
        kept = {key for each in wanted for key in each.records}
        for old in [g for g in self._resident if g not in wanted]:
            self._resident.remove(old)
            for key, record in old.records.items():
                if key not in kept:
                    record.drop_value()
        for each in wanted:
            if each not in self._resident:
                self._resident.append(each)
                for record in each.records.values():
                    self._bring(record)
        self._resident.remove(group)
        self._resident.append(group)

    def _bring(self, record: _Record) -> None:
        if record.source is not None or record.value is not None or not record.users:
            return
        with nullcontext() if record.home is None else streams.on_stream(record.home):
            value = torch.empty(record.nbytes, dtype=torch.uint8, device=self._device)
        host = [] if self._is_simulated else self.pool.parts(record.extents, record.nbytes)
        parts = torch.split(value, [part.numel() for part in host]) if host else []
        into = self._stream(1)
        if into is None:
            _copy(parts, host)
        else:
            into.wait_stream(record.home)  # the memory may be in use until here
            into.wait_event(record.copied)  # the host may not have it all yet
            try:
                with streams.on_stream(into):
                    _copy(parts, host)
            except BaseException:
                record.home.wait_stream(into)
                raise
            record.arrived = into.record_event()
        record.value, record.writes = value, version_now(value)

    def _bury(self) -> None:
        """Give back what no saved tensor refers to any more."""
        while self._dead:
            record = self._dead.popleft()
            record.users -= 1
            if record.users:
                continue
            if record.source is not None:
                record.let_go()
                self._note_outliving(record)
            record.drop_value()
            if self._records.get(record.key) is record:
                del self._records[record.key]
            if record.extents:
                self.pool.give(record.extents, record.arrived or record.copied)

    # --- all of it -------------------------------------------------------------------------------

    def _stream(self, index: int) -> Any:
        if not self._streams and not self._is_simulated and streams.has_streams(self._device):
            self._streams = streams.new_stream(), streams.new_stream()
        return self._streams[index] if self._streams else None

    def _check_host(self, nbytes: int, block: str = "") -> None:
        share, counted = free_host_memory(self._ranks)
        if nbytes > share and not self._is_simulated:
            blocks = f"{len(self._units)} blocks like `{block}` save" if block else "it needs"
            raise RuntimeError(
                f"`offload={self.share.amount!r}`: {blocks} {gib(nbytes)} of host memory for this "
                f"rank, but it may take {gib(share)} ({counted}). Give a smaller share or amount, "
                f"such as '{max(1, share >> 30)}GiB', a smaller micro-batch, or fewer ranks."
            )

    def check(self) -> None:
        """Raise ``RuntimeError`` if blocks write to what they saved, or if nothing was moved."""
        self.check_writes()
        if not self.moved_nbytes and self.enabled:
            reason = self.skipped
            if self._last_index >= 0:
                reason = f"they save nothing of {gib(self._min_nbytes)} or more beside weights"
            raise RuntimeError(
                f"`offload={self.share.amount!r}` moved nothing of what {len(self._units)} blocks "
                f"save: {reason}. Change that, or remove `offload`."
            )

    def settle(self) -> None:
        """Give back what is not needed between steps."""
        self._bury()
        self._leaving = deque(g for g in self._leaving if any(r.users for r in g.records.values()))

    def remove(self) -> None:
        """Give the blocks their calls back; idempotent. Graphs that exist stay valid."""
        self.enabled = False
        self._before_steps.remove()
        for unit in self._units.values():
            around_checkpoint_function(unit, None)
            unwrap_call(unit)
        self.settle()
        self.pool.release()


def _copy(targets: Any, sources: Any) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
