"""Device memory of a simulated rank: how much, for what, and when it is most.

Every allocation of the trace is replayed by a model of PyTorch's allocator and belongs to one kind.
What the allocator does not see is added as it was measured on H200s, with its error.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from lq_lightning.planning.allocator import MIB, CachingAllocator
from lq_lightning.planning.costs import short_name
from lq_lightning.planning.machine import Machine
from lq_lightning.planning.timing import SURE
from lq_lightning.planning.trace import (
    SHARDED,
    Allocate,
    Collective,
    Event,
    Free,
    Mark,
    Operator,
    Storage,
    Trace,
)

Kind = Literal[
    "weights",
    "master weights",
    "replica",
    "optimizer states",
    "gradient sums",
    "gradients",
    "saved activations",
    "logits and loss",
    "gather buffers",
    "pipeline buffers",
    "temporary",
    "CUDA and NCCL",
    "fragmentation",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

_WORKSPACE_NBYTES = 32 * MIB
"""Of cuBLAS, which each thread keeps per stream. PyTorch takes 32 MiB on Hopper and later, 8.1 MiB
before. Autograd runs backward on a thread of its own."""
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_int_mm", "linear", "convolution")
# NCCL 2.28 on H200s, as `plan_accuracy.json` shows: of its kernels and their stacks; of a
# communicator over NVLink, and of one that nothing uses; per peer in an all-to-all over NVLink; of
# a network without RDMA, whose buffers are the host's, and of exchanges over it; of the neighbours
# in a pipeline. Other versions and networks differ.
_NCCL_NBYTES, _RING_NBYTES, _UNUSED_NBYTES = 615 * MIB, 484 * MIB, 190 * MIB
_PEER_NBYTES, _NETWORK_NBYTES, _EXCHANGE_NBYTES = 384 * MIB, 230 * MIB, 460 * MIB
_NEIGHBOURS_NBYTES = 930 * MIB
_NCCL_ERROR, _CONTEXT_ERROR = 0.25, 0.1
_ALLOCATED_ERROR = 0.015
"""Of the peak of allocated bytes: temporary memory within kernels, moments of frees."""
_RESERVED_ERROR = 0.055
"""Of what the allocator reserves, where streams and sizes of blocks meet otherwise than here."""
_OWNED: dict[str, Kind] = {
    "optimizer state": "optimizer states",
    "buffer": "weights",
    "bucket": "gather buffers",
}
_AFTER = {"batch": "forward", "backward": "backward", "optimizer": "optimizer", "stepped": "other"}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPeak:
    """Device memory of one rank where it is most.

    Attributes:
        rank: The rank, which stands for all of its stage.
        stage: Place in its pipeline, 0 without one.
        allocated_nbytes: As ``torch.cuda.max_memory_allocated`` would return over the whole run.
        reserved_nbytes: As ``torch.cuda.max_memory_reserved`` would.
        device_nbytes: With what the allocator does not see: as ``nvidia-smi`` would show.
        low_nbytes: Lower end of the interval of :attr:`device_nbytes`.
        high_nbytes: Its upper end.
        kinds: Bytes by kind at the peak of allocated bytes. Their sum is :attr:`device_nbytes`;
            without ``"CUDA and NCCL"`` and ``"fragmentation"`` it is :attr:`allocated_nbytes`.
        when: The moment of the peak in words.
        most: Allocated bytes by kind where these are most within the last step; of gradients, those
            that are there for the optimizer.
        allocated_interval: Interval of :attr:`allocated_nbytes`.
    """

    rank: int
    stage: int
    allocated_nbytes: int
    reserved_nbytes: int
    device_nbytes: int
    low_nbytes: int
    high_nbytes: int
    kinds: Mapping[str, int]
    when: str
    most: Mapping[str, int]
    allocated_interval: tuple[int, int]


def peak_memory(trace: Trace, machine: Machine, stage: int = 0) -> MemoryPeak:
    """Return the peak of device memory of a simulated rank of a pipeline's stage."""
    replay = _Replay(trace)
    allocated, reserved = replay.allocator.max_allocated, replay.allocator.reserved
    constant, error = _outside_allocator(trace, machine)
    parts: dict[str, int] = {kind: replay.at_peak.get(kind, 0) for kind in KINDS}
    parts |= {"CUDA and NCCL": constant, "fragmentation": reserved - allocated}
    error = int(SURE * math.hypot(error, _RESERVED_ERROR * reserved))
    less = int(_ALLOCATED_ERROR * allocated) + _WORKSPACE_NBYTES
    return MemoryPeak(
        rank=trace.rank,
        stage=stage,
        allocated_nbytes=allocated,
        reserved_nbytes=reserved,
        device_nbytes=reserved + constant,
        low_nbytes=max(allocated, reserved + constant - error),
        high_nbytes=reserved + constant + error,
        kinds=parts,
        when=replay.when,
        most=dict(replay.most),
        allocated_interval=(allocated - less, allocated + less),
    )


def _outside_allocator(trace: Trace, machine: Machine) -> tuple[int, int]:
    """Return bytes of CUDA's context and NCCL's communicators, and their error."""
    rings: set[tuple[int, int]] = set()
    exchanges: set[tuple[int, int]] = set()
    nccl = _NCCL_NBYTES
    for event in trace.events:
        if isinstance(event, Collective) and event.ranks > 1:
            kinds = exchanges if event.kind == "all_to_all" else rings
            kinds.add((event.ranks, event.nodes))
    if any(ranks > nodes for ranks, nodes in rings | exchanges):  # that of all ranks, and another
        nccl += _UNUSED_NBYTES + _RING_NBYTES
    for ranks, nodes in rings | exchanges:
        nccl += _RING_NBYTES if ranks > nodes else _NETWORK_NBYTES
    for ranks, nodes in exchanges:
        nccl += machine.nvlink * _PEER_NBYTES * (ranks // nodes - 1)
        nccl += (nodes > 1) * _EXCHANGE_NBYTES
    if any(isinstance(e, Collective) and e.kind in ("send", "recv") for e in trace.events):
        nccl += _NEIGHBOURS_NBYTES
    operators = (event for event in trace.events if isinstance(event, Operator))
    if any((e.name, e.phase) == (SHARDED, "forward") for e in operators):  # tensor parallelism
        nccl += _RING_NBYTES
    context = machine.gpu.context_nbytes
    return context + nccl, int(_CONTEXT_ERROR * context + _NCCL_ERROR * nccl)


class _Replay:
    """Runs a trace through an allocator and keeps bytes by kind at the peak and in the last step.

    ``when`` says when the peak was: a step (from 0, -1 before training), micro-batch (from 1) and
    action of a pipeline.
    """

    def __init__(self, trace: Trace) -> None:
        self.allocator, kinds = CachingAllocator(), Classification(trace)
        self.at_peak: dict[str, int] = {}
        self.most: Counter[str] = Counter()
        self._step, self._batch, self._phase = -1, 0, "setup"
        self._action: tuple[str, int, int] | None = None
        self.when = self._words(None, "")
        self._peak, self._now = -1, Counter[str]()
        self._workspaces: set[tuple[bool, int]] = set()
        sizes: dict[Storage, int] = {}
        start = len(trace.events) - len(trace.last_steps())
        events = zip(trace.events, _on_device(trace.events), strict=True)
        for index, (original, event) in enumerate(events):
            self._move(original)
            if index == start:
                self.most = self._now.copy()
                del self.most["gradients"]
            block = self.allocator.apply(event)
            if block is not None and isinstance(event, Allocate):
                sizes[event.storage] = block.nbytes
                self._add(kinds.of(event.storage), block.nbytes, event.storage)
            elif isinstance(event, Free):
                self._now[kinds.of(event.storage)] -= sizes.pop(event.storage)
            elif isinstance(event, Operator):
                self._add_workspace(event)
            elif event == Mark("optimizer", trace.steps - 1):
                self.most["gradients"] = self._now["gradients"]

    def _move(self, event: Event) -> None:
        """Note where in a run an event is."""
        if isinstance(event, Mark):
            if event.name == "batch":
                self._batch = self._batch + 1 if event.step == self._step else 1
                self._step = event.step
            self._phase, self._action = _AFTER.get(event.name, self._phase), None
        elif isinstance(event, (Operator, Collective)):
            self._phase, self._action = event.phase, event.action

    def _words(self, storage: Storage | None, kind: str) -> str:
        """Say in words when a storage of this kind was allocated."""
        phase, doing = self._phase, ""
        if storage is not None:
            phase = storage.phase
            if kind == "logits and loss":
                doing = ", in the loss"
            elif storage.operator:
                doing = f", while `{storage.operator.removesuffix('.default')}` ran"
        if self._step < 0:
            return f"before the first step{doing}"
        step = f"step {self._step + 1}{doing}"
        if phase not in ("forward", "backward"):
            return f"{'optimizer' if phase == 'optimizer' else 'around'} {step}"
        batch, stage = self._batch, ""
        if self._action is not None:
            batch, stage = self._action[2] + 1, f" on stage {self._action[1]}"
        return f"{phase} of micro-batch {batch}{stage} in {step}"

    def _add(self, kind: str, nbytes: int, storage: Storage | None = None) -> None:
        self._now[kind] += nbytes
        if kind != "gradients":
            self.most[kind] = max(self.most[kind], self._now[kind])
        if self.allocator.allocated > self._peak:
            self._peak, self.at_peak = self.allocator.allocated, dict(self._now)
            self.when = self._words(storage, kind)

    def _add_workspace(self, product: Operator) -> None:
        """Allocate what cuBLAS keeps from the first product of a thread on a stream."""
        if short_name(product) in _PRODUCTS:
            user = product.phase == "backward", product.stream
            if user not in self._workspaces:
                self._workspaces.add(user)
                block = self.allocator.allocate(_WORKSPACE_NBYTES, product.stream)
                self._add("temporary", block.nbytes)


def _on_device(events: list[Event]) -> list[Event]:
    """Let what modules hold begin where they are placed; all else of before was the host's."""
    marks = (
        i for i, event in enumerate(events) if isinstance(event, Mark) and event.name == "placed"
    )
    fit = next(marks, 0)
    made = [event for event in events[:fit] if isinstance(event, Allocate)]
    hosts = {event.storage for event in made if event.storage.owner not in ("parameter", "buffer")}
    start = [event for event in made if event.storage not in hosts]
    nothing = Mark("placed", 0)  # in place of what is dropped, so that numbers of events stay
    rest = [
        nothing if isinstance(event, Free) and event.storage in hosts else event
        for event in events[fit:]
    ]
    return [*[nothing] * (fit - len(start)), *start, *rest]


class Classification:
    """Tells for what a storage is, by its owner, source, moment and life."""

    def __init__(self, trace: Trace) -> None:
        self._known: dict[Storage, Kind] = {}
        self._weights: set[tuple[int, ...]] = set()
        self._vocabulary: set[int] = set()
        self._reduced: set[Storage] = set()
        self._forwards: list[tuple[int, int]] = []  # event and step of each batch
        self._updates: list[int] = []
        self._ends: dict[int, str] = {}
        flops: Counter[torch.dtype] = Counter()
        embeddings: set[int] = set()
        last: dict[int, Storage] = {}
        phase = "setup"
        for index, event in enumerate(trace.events):
            if isinstance(event, Operator):
                phase = event.phase
                flops[event.dtype] += event.flops
                self._see_shapes(event, embeddings)
            elif isinstance(event, Allocate):
                phase = event.storage.phase
                last[event.storage.nbytes] = event.storage
            elif isinstance(event, Free):
                self._ends[index] = phase
            elif isinstance(event, Collective):
                if event.kind == "reduce_scatter" and event.nbytes in last:
                    self._reduced.add(last[event.nbytes])
            elif isinstance(event, Mark):
                if event.name == "batch":
                    self._forwards.append((index, event.step))
                elif event.name == "optimizer":
                    self._updates.append(index)
        self._vocabulary |= {max(embeddings, default=0)}
        self._low = bool(flops.total()) and flops.most_common(1)[0][0] != torch.float32

    def _see_shapes(self, event: Operator, embeddings: set[int]) -> None:
        """Learn shapes of weights and the size of the vocabulary."""
        matrices = [shape for shape in event.shapes if len(shape) == 2]
        if "log_softmax" in event.name:
            self._vocabulary |= {shape[-1] for shape in event.shapes[:1] if shape}
        elif event.phase != "forward" or not matrices:
            return
        elif "embedding" in event.name:
            embeddings.add(matrices[0][0])
            self._weights.add(matrices[0])
        elif event.flops and short_name(event) in _PRODUCTS:
            self._weights.add(matrices[-1][::-1])  # a layer multiplies by its weight's transpose

    def of(self, storage: Storage) -> Kind:
        """Return the kind of a storage."""
        if storage not in self._known:
            owned = _OWNED.get(storage.owner)
            if storage.owner == "parameter":
                master = self._low and storage.dtype == torch.float32
                owned = "master weights" if master else "weights"
            self._known[storage] = owned or self._of_package(storage) or self._of_user(storage)
        return self._known[storage]

    def _of_user(self, storage: Storage) -> Kind:
        """Return the kind of a storage by its moment and life."""
        if storage.owner == "gradient":
            return "gradient sums" if self._spans_batches(storage) else "gradients"
        if storage.phase == "forward":
            if storage.operator.startswith("aten._to_copy") and storage.shape in self._weights:
                return "weights"  # cast by autocast
            if self._is_logits(storage):
                return "logits and loss"
            died = storage.died
            saved = died is not None and self._ends.get(died) == "backward"
            return "saved activations" if saved else "temporary"
        if storage.phase == "backward":
            if storage.shape in self._weights or self._updated(storage):
                return "gradient sums" if self._spans_batches(storage) else "gradients"
            if self._is_logits(storage):
                return "logits and loss"
        return "temporary"

    def _of_package(self, storage: Storage) -> Kind | None:
        """Return the kind of a storage by the file that allocated it."""
        source = storage.source
        if "/fsdp/" in source and not source.endswith("/_fsdp_common.py"):
            backward, spans = storage.phase == "backward", self._spans_batches(storage)
            if storage in self._reduced or backward and (spans or self._updated(storage)):
                return "gradient sums" if spans else "gradients"
            return "gather buffers"
        if "/gradient_buffer" in source:
            return "gradient sums"
        if "/data_parallel/" in source:
            if source.endswith("/replica.py") and self._long(storage):
                return "replica"
            if source.endswith(("/reduce_scatter.py", "/all_reduce.py")):
                return "gradient sums" if self._spans_batches(storage) else "gradients"
            return "gather buffers"
        if "/pipeline" in source:
            return "pipeline buffers"
        return None

    def _is_logits(self, storage: Storage) -> bool:
        return len(storage.shape) > 1 and storage.shape[-1] in self._vocabulary

    def _updated(self, storage: Storage) -> bool:
        """Tell whether a storage of backward is there when the optimizer steps."""
        place = bisect_right(self._updates, storage.born)
        return place < len(self._updates) and _lives_at(storage, self._updates[place])

    def _spans_batches(self, storage: Storage) -> bool:
        """Tell whether it lives on in a later micro-batch of the same step."""
        place = bisect_right(self._forwards, (storage.born, 1 << 60))
        if not 0 < place < len(self._forwards):
            return False
        index, step = self._forwards[place]
        return step == self._forwards[place - 1][1] and _lives_at(storage, index)

    def _long(self, storage: Storage) -> bool:
        """Tell whether it outlives a step, or is made before the first one and stays."""
        later = [index for index in self._updates if index > storage.born]
        return storage.died is None or len(later) > 1 and storage.died > later[1]


def _lives_at(storage: Storage, index: int) -> bool:
    return storage.died is None or storage.died > index


def of_host_memory(traces: Sequence[Trace], gpus_per_node: int) -> tuple[str, ...]:
    """Say how much host memory a run pins; how much a machine has is not known."""
    most = max(trace.host_nbytes for trace in traces) / 2**30
    on_node = f", {most * gpus_per_node:.1f} GiB per node" if gpus_per_node > 1 else ""
    said = f"`offload` pins up to {most:.1f} GiB of host memory per rank{on_node}."
    return (said,) if most else ()
