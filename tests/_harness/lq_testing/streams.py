"""Find races between CUDA streams without a GPU.

:func:`recorded_streams` gives the code under test streams and events that only keep vector clocks.
Everything runs at once on the CPU, so results are right whatever the code forgets to wait for;
instead, every operator is recorded with the stream that was current, and two uses of one memory on
two streams, one of them a write, of which neither waited for the other are a :class:`Race`. So is
memory that is given back to the stream it was allocated on while another stream may still use it.

A collective counts as work of the stream that it was called on, as with NCCL where ``async_op`` is
False.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lq_lightning.foundation import streams

__all__ = ["Event", "Race", "Recorder", "Stream", "on_own_stream", "recorded_streams", "replaced"]

# They take a tensor for its shape, dtype and device, not for its values.
_ALLOCATIONS = {"aten::new_empty", "aten::new_empty_strided", "aten::empty_like", "aten::new_zeros"}
_OWN_FRAMES = ("lq_testing/streams.py", "_python_dispatch.py", "torch/_ops.py", "_compile.py")


@dataclass(frozen=True, slots=True)
class Race:
    """Two uses of one memory that nothing orders.

    Attributes:
        kind: ``"read-write"``, ``"write-write"`` or ``"freed too early"``.
        first: The earlier use, as ``operator at file:line (stream)``.
        second: The later use, or what lets go of the memory.
    """

    kind: str
    first: str
    second: str


@dataclass(slots=True)
class Event:
    """A point of a stream: what had run before it."""

    clock: dict[int, int]
    streams: list[Stream]  # all there are

    def synchronize(self) -> None:
        """Let the host wait, and so everything that it gives to any stream from now on."""
        for stream in self.streams:
            stream.wait_event(self)


class Stream:
    """A queue of work; its clock says how much of every stream had run before its next work."""

    def __init__(self, streams: list[Stream]) -> None:
        streams.append(self)
        self.number = len(streams)
        self._streams = streams
        self.clock: dict[int, int] = {self.number: 0}

    def wait_event(self, event: Event) -> None:
        """Let what comes next run after the event."""
        for number, time in event.clock.items():
            self.clock[number] = max(self.clock.get(number, 0), time)

    def wait_stream(self, other: Stream) -> None:
        """Let what comes next run after everything that ``other`` has so far."""
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """The point that the stream has reached."""
        return Event(dict(self.clock), self._streams)

    def has_seen(self, use: _Use) -> bool:
        """Whether the next work of this stream runs after ``use``."""
        return self.clock.get(use.stream, 0) >= use.time


@dataclass(frozen=True, slots=True)
class _Use:
    stream: int
    time: int
    what: str


@dataclass(slots=True)
class _Memory:
    """Uses of one storage that later work must be ordered after."""

    reference: StorageWeakRef
    home: Stream
    write: _Use | None = None
    reads: dict[int, _Use] = field(default_factory=dict)
    users: dict[int, _Use] = field(default_factory=dict)  # last use on every stream
    recorded: set[int] = field(default_factory=set)  # streams whose uses the allocator waits for


class Recorder(TorchDispatchMode):
    """Records operators by stream; made by :func:`recorded_streams`.

    Attributes:
        races: What was found so far.
        current: The stream that work goes to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.races: list[Race] = []
        self._streams: list[Stream] = []
        self.current = self.new_stream()
        self._memory: dict[int, _Memory] = {}

    def new_stream(self) -> Stream:
        """Another stream."""
        return Stream(self._streams)

    @contextlib.contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        """Make ``stream`` the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def record_use(self, tensor: Tensor) -> None:
        """Keep the tensor's memory until its uses on the current stream are done."""
        memory = self._memory.get(tensor.untyped_storage()._cdata)
        if memory is not None:
            memory.recorded.add(self.current.number)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._notice_freed()
        read, written = _uses(func, args, kwargs)
        result = func(*args, **kwargs)
        if not _is_view(func):
            # results in new memory are written; views of an argument are neither read nor written
            known = {t.untyped_storage()._cdata for t in (*written, *read)}
            fresh = _tensors(result)
            written += [t for t in fresh if t.untyped_storage()._cdata not in known]
            self._record(func, read, written)
        if func._schema.name == "aten::_local_scalar_dense":  # the host waits for the value
            self.current.record_event().synchronize()
        return result

    def _record(self, func: Any, read: list[Tensor], written: list[Tensor]) -> None:
        stream = self.current
        stream.clock[stream.number] += 1
        use = _Use(stream.number, stream.clock[stream.number], f"{func} at {_where()}")
        for tensor in read:
            memory = self._of(tensor)
            self._check("read-write", memory.write, use)
            memory.reads[stream.number] = memory.users[stream.number] = use
        for tensor in written:
            memory = self._of(tensor)
            self._check("write-write", memory.write, use)
            for earlier in memory.reads.values():
                self._check("read-write", earlier, use)
            memory.write, memory.reads = use, {}
            memory.users[stream.number] = use

    def _check(self, kind: str, earlier: _Use | None, use: _Use) -> None:
        if earlier is not None and not self.current.has_seen(earlier):
            self._report(kind, earlier, f"{use.what} (stream {use.stream})")

    def _report(self, kind: str, earlier: _Use, second: str) -> None:
        race = Race(kind, f"{earlier.what} (stream {earlier.stream})", second)
        if race not in self.races:
            self.races.append(race)

    def _of(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None or memory.reference.expired():
            memory = _Memory(StorageWeakRef(storage), self.current)
            self._memory[storage._cdata] = memory
        return memory

    def _notice_freed(self) -> None:
        """Memory that is gone may be handed out again to the stream it came from."""
        # A weak reference to a storage is its address, so the keys are asked: for every operator,
        # `StorageWeakRef.expired` of all that is alive takes twice as long as the test itself.
        for key in list(filter(torch.UntypedStorage._expired, self._memory)):
            memory = self._memory.pop(key)
            for use in memory.users.values():
                kept = use.stream == memory.home.number or use.stream in memory.recorded
                if not kept and not memory.home.has_seen(use):
                    self._report("freed too early", use, f"stream {memory.home.number} reuses it")


def _uses(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that an operator reads, and those among its arguments that it writes."""
    uses: tuple[list[Tensor], list[Tensor]] = ([], [])
    for index, (name, writes) in enumerate(_arguments(func)):
        value = args[index] if index < len(args) else kwargs.get(name)
        uses[writes].extend(_tensors(value))
    return uses


@functools.cache
def _arguments(func: Any) -> list[tuple[str, bool]]:
    """Names of what an operator takes, and whether it writes to that; none of what allocates."""
    if func._schema.name in _ALLOCATIONS:
        return []
    if func.namespace == "c10d":  # its schemas do not say what is written: outputs come first
        return [(a.name, index == 0) for index, a in enumerate(func._schema.arguments)]
    return [(a.name, a.is_write) for a in func._schema.arguments]


def _tensors(tree: Any) -> list[Tensor]:
    """Tensors with memory; of those of a subclass such as DTensor, what they wrap."""
    leaves = tree_leaves(tree) if isinstance(tree, (list, tuple, dict)) else [tree]
    leaves = [getattr(leaf, "_local_tensor", leaf) for leaf in leaves]
    return [leaf for leaf in leaves if _has_data(leaf)]


def _has_data(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta and value.numel() > 0


@functools.cache
def _is_view(func: Any) -> bool:
    schema = func._schema
    aliased = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return aliased and not any(a.alias_info and a.alias_info.is_write for a in schema.arguments)


def _where() -> str:
    frame: Any = sys._getframe(1)  # `traceback` would look for every file on the disk
    for _ in range(24):
        name = frame.f_code.co_filename
        if "lq_lightning" in name and not name.endswith(_OWN_FRAMES):
            return f"{name.rpartition('lq_lightning/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
        if frame is None:
            break
    return "?"


@contextlib.contextmanager
def recorded_streams() -> Iterator[Recorder]:
    """Let the package see CUDA streams on every device, and record what runs on them."""
    recorder = Recorder()
    with contextlib.ExitStack() as stack:
        for name, value in {
            "has_streams": lambda device: True,
            "current_stream": lambda: recorder.current,
            "new_stream": recorder.new_stream,
            "on_stream": recorder.on_stream,
            "record_use": recorder.record_use,
        }.items():
            stack.enter_context(replaced(streams, name, value))
        stack.enter_context(recorder)
        yield recorder


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object or class another attribute within the context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def on_own_stream(recorder: Recorder, call: Callable[..., Any]) -> Callable[..., Any]:
    """Run a collective as FSDP2 does: on a stream that waits for backward, which waits for it."""
    own = recorder.new_stream()

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        caller = recorder.current
        own.wait_stream(caller)
        with recorder.on_stream(own):
            result = call(*args, **kwargs)
        caller.wait_event(own.record_event())
        return result

    return wrapped
