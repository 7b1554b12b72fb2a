"""What a simulated rank does, in the order in which its host would call it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

Phase = Literal["setup", "forward", "backward", "optimizer", "other"]
"""Part of a step. ``"other"`` is what happens between optimizer step and the next forward."""

CollectiveKind = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "recv"
]
COMPUTING, HOST = 0, -1
"""The stream on which users' code runs, and the host where it waits for a stream."""
SHARDED = "sharded.dispatch"
"""Name of an operator on DTensors, which is host time alone; those on their parts follow."""


@dataclass(slots=True, eq=False)
class Storage:
    """One allocation of device memory.

    Attributes:
        nbytes: Bytes that were asked for.
        stream: Stream whose memory it is.
        phase: Part of the step in which it was allocated.
        operator: Operator that allocated it, such as ``"aten.mm.default"``.
        source: File that called it, the innermost of this package or of FSDP2, such as
            ``"lq_lightning/data_parallel/replica.py"``; empty for other code.
        shape: Shape of its first tensor.
        dtype: Dtype of its first tensor.
        owner: What holds it when training ends: ``"parameter"``, ``"gradient"``,
            ``"optimizer state"``, ``"buffer"``, a ``"bucket"`` of DDP; empty for all others.
        born: Index of its :class:`Allocate` in the events.
        died: Index of its :class:`Free`; None if it lives to the end.
        used_on: Other streams that the allocator was told of (``Tensor.record_stream``).
    """

    nbytes: int
    stream: int
    phase: Phase
    operator: str
    source: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: str = ""
    born: int = -1
    died: int | None = None
    used_on: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator on the device, except for collectives.

    Attributes:
        name: Such as ``"aten.mm.default"`` or ``"lq_lightning.quantize_out.default"``.
        stream: Stream on which it runs.
        phase: Part of the step.
        flops: Floating point operations of products and attention, two per multiply-add; else 0.
        read_nbytes: Bytes of its distinct input tensors.
        written_nbytes: Bytes of its results and of tensors that it changes.
        dtype: Dtype of the first operand, or of the result where there is none.
        shapes: Shapes of all tensor operands.
        action: Pipeline action that runs, such as ``("F", 0, 3)``: kind, stage and micro-batch.
        options: Its arguments that are strings, such as the format of a code.
    """

    name: str
    stream: int
    phase: Phase
    flops: int
    read_nbytes: int
    written_nbytes: int
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    action: tuple[str, int, int] | None = None
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Collective:
    """One message of this rank.

    Attributes:
        kind: What is exchanged how.
        nbytes: Bytes of this rank's input; of the output for ``"recv"``. Of an all-to-all in
            uneven parts, those of even parts that send others as much.
        ranks: Ranks that take part.
        nodes: Nodes that they are on.
        stream: Stream that waits for it.
        phase: Part of the step.
        action: As in :class:`Operator`.
    """

    kind: CollectiveKind
    nbytes: int
    ranks: int
    nodes: int
    stream: int
    phase: Phase
    action: tuple[str, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """``stream`` notes that it reached this point, as event number ``event``.

    It takes the host less where not ``by_python``.
    """

    stream: int
    event: int
    by_python: bool = True


@dataclass(frozen=True, slots=True)
class Wait:
    """``stream`` waits for an event, :data:`HOST` where the host does; see :class:`Record`."""

    stream: int
    event: int
    by_python: bool = True


@dataclass(frozen=True, slots=True)
class Allocate:
    """Memory is allocated."""

    storage: Storage


@dataclass(frozen=True, slots=True)
class Free:
    """Memory is freed: on its stream, later work may use it again at once."""

    storage: Storage


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of the run: ``"batch"``, ``"backward"``, ``"optimizer"``, ``"stepped"``, ``"end"``.

    ``"placed"`` ends the setup: until then modules were on the host. ``step`` counts optimizer
    steps that were done before.
    """

    name: str
    step: int


Event = Operator | Collective | Record | Wait | Allocate | Free | Mark


@dataclass(slots=True)
class Trace:
    """Everything that one simulated rank does from ``setup`` to its last training step.

    Attributes:
        rank: Number of the rank.
        world_size: Ranks of the run.
        gpus_per_node: Ranks of a node.
        steps: Optimizer steps; the last one stands for all later ones.
        microbatches: Micro-batches of a step.
        tokens: What the first embedding of a micro-batch looks up; without one, elements of the
            batch's largest integer tensor, or its samples.
        events: All events in the order of the host's calls.
        compiled: Whether blocks are compiled, so that their pointwise operators run together.
        host_nbytes: Pinned host memory of offloaded activations.
        told: What a rank of the first pipeline stage has told the others: shapes of hidden states.
    """

    rank: int
    world_size: int
    gpus_per_node: int
    steps: int = 0
    microbatches: int = 1
    tokens: int = 0
    events: list[Event] = field(default_factory=list)
    compiled: bool = False
    host_nbytes: int = 0
    told: list[object] = field(default_factory=list)

    def last_steps(self, count: int = 1) -> list[Event]:
        """Events of the last optimizer steps: from their first batch to the end."""
        first = self.steps - count
        for index, event in enumerate(self.events):
            if isinstance(event, Mark) and event.name == "batch" and event.step >= first:
                return self.events[index:]
        return []
