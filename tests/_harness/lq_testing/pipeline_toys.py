"""Small stages, and ranks of a pipeline as threads of one process over links that take time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lq_lightning.pipeline.boundary import make_boundary_codec
from lq_lightning.pipeline.boundary_widths import (
    BoundaryWidths,
    CodedBoundary,
    MixedCodec,
    boundaries_between,
)
from lq_lightning.pipeline.engine import PipelineEngine
from lq_lightning.pipeline.message import BoundaryCodec
from lq_lightning.pipeline.schedules import stages_of_rank

WIDTH = 8
BATCH = 2  # samples of a micro-batch


class Layer(nn.Module):
    """A residual block with a norm, two linear layers and a shared scale."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class ToyStage(nn.Module):
    """Some of the layers; the last one computes a loss in training, a dict in evaluation."""

    index = 0

    def __init__(self, layers: nn.ModuleList, first: bool, last: bool, data: Tensor) -> None:
        super().__init__()
        self.layers = layers
        self.first = first
        self.last = last
        self.data = data  # [micro-batches, BATCH, WIDTH]

    def forward(self, hidden: Tensor | None = None) -> Any:
        assert (hidden is None) == self.first
        x = self.data[self.index] if hidden is None else hidden
        for layer in self.layers:
            x = layer(x)
        if not self.last:
            return x
        loss = (x - self.data[self.index].flip(-1)).square().mean()
        return loss if torch.is_grad_enabled() else {"loss": loss, "index": self.index, "x": x}


@dataclass
class Boundary:
    shape: tuple[int, ...] = (BATCH, WIDTH)
    dtype: torch.dtype = torch.float32


def make_layers(count: int) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Layer() for _ in range(count))


def make_data(num_microbatches: int) -> Tensor:
    return torch.randn(num_microbatches, BATCH, WIDTH, generator=torch.Generator().manual_seed(1))


def make_stages(layers: nn.ModuleList, num_stages: int, data: Tensor) -> list[ToyStage]:
    each = len(layers) // num_stages
    return [
        ToyStage(layers[i * each : (i + 1) * each], i == 0, i == num_stages - 1, data)
        for i in range(num_stages)
    ]


def make_engine(
    schedule: str,
    num_microbatches: int,
    layers: nn.ModuleList,
    num_stages: int,
    codecs: tuple[BoundaryCodec, BoundaryCodec],
    group: dist.ProcessGroup,
    control_group: dist.ProcessGroup,
) -> PipelineEngine:
    """The engine of this rank of a process group."""
    stages = make_stages(layers, num_stages, make_data(num_microbatches))
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return PipelineEngine(
        {index: stages[index] for index in stages_of_rank(schedule, rank, num_stages, size)},
        *(num_stages, group, control_group, torch.device("cpu"), schedule, num_microbatches),
        *codecs,
    )


def make_boundaries(schedule: str, size: int, num_stages: int) -> list[CodedBoundary]:
    """The boundaries between ranks; that behind stage 0 has the name "layer 0"."""
    return boundaries_between(schedule, [f"layer {i}" for i in range(num_stages - 1)], size)


def make_gated(
    schedule: str,
    num_microbatches: int,
    layers: nn.ModuleList,
    num_stages: int,
    codecs: tuple[MixedCodec, BoundaryCodec],
    group: dist.ProcessGroup,
    replicas: dist.ProcessGroup,
) -> tuple[PipelineEngine, BoundaryWidths]:
    """The same, and its boundaries in learned widths."""
    engine = make_engine(schedule, num_microbatches, layers, num_stages, codecs, group, group)
    boundaries = make_boundaries(schedule, dist.get_world_size(group), num_stages)
    return engine, BoundaryWidths(boundaries, engine, codecs[0], group, replicas)


class ThreadWork:
    """A transfer between threads.

    Attributes:
        at: when it started to be possible for its rank, then when it ended, on the rank's clock.
    """

    def __init__(self, links: ThreadLinks) -> None:
        self.done = threading.Event()
        self.at = links.clock
        self._links = links

    def wait(self) -> None:
        if not self.done.wait(timeout=20):
            raise TimeoutError("nobody sent or received")
        self._links.clock = max(self._links.clock, self.at)

    def is_completed(self) -> bool:
        return self.done.is_set() and self.at <= self._links.clock


@dataclass
class Way:
    """One way between two ranks: a thread that carries messages one after another.

    Time is counted, not spent: a transfer starts when both ranks are ready for it and the one
    before has ended.
    """

    bytes_per_s: float
    sends: Queue[tuple[Tensor, ThreadWork] | None] = field(default_factory=Queue)
    receives: Queue[tuple[Tensor, ThreadWork]] = field(default_factory=Queue)
    sizes: list[int] = field(default_factory=list)
    free_at: float = 0.0

    def carry(self) -> None:
        while (sent := self.sends.get()) is not None:
            payload, departure = sent
            buffer, arrival = self.receives.get(timeout=20)
            assert buffer.numel() == payload.numel()
            start = max(departure.at, arrival.at, self.free_at)
            self.free_at = start + payload.numel() / self.bytes_per_s
            with torch.inference_mode():  # as gloo, whatever tensors they are
                buffer.copy_(payload)
            self.sizes.append(payload.numel())
            for work in (arrival, departure):
                work.at = self.free_at
                work.done.set()


class ThreadLinks:
    """Links of one rank among threads, with a clock of its own."""

    def __init__(self, rank: int, size: int, ways: dict[tuple[int, int], Way]) -> None:
        self.rank, self.size, self._ways = rank, size, ways
        self.occupy_device = False
        self.clock = 0.0
        self.works: list[ThreadWork] = []

    def synchronize(self) -> None:
        """Wait for all transfers that were started, as for a whole device."""
        for work in self.works:
            work.wait()

    def send(self, payload: Tensor, peer: int) -> ThreadWork:
        work = ThreadWork(self)
        self.works.append(work)
        self._ways[self.rank, peer].sends.put((payload, work))
        return work

    def receive(self, payload: Tensor, peer: int) -> ThreadWork:
        work = ThreadWork(self)
        self.works.append(work)
        self._ways[peer, self.rank].receives.put((payload, work))
        return work


@dataclass
class Toy:
    """A pipeline of threads.

    Attributes:
        engines: by rank.
        layers: of the whole model; gradients are theirs.
        ways: between ranks.
    """

    engines: list[PipelineEngine]
    layers: nn.ModuleList
    ways: dict[tuple[int, int], Way]

    def run(self, each: Callable[[PipelineEngine], Any]) -> list[Any]:
        """Call a function on every rank at once; raise what a rank raised."""
        results: list[Any] = [None] * len(self.engines)

        def call(rank: int) -> None:
            try:
                results[rank] = each(self.engines[rank])
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=call, args=(r,)) for r in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def close(self) -> None:
        """Stop the threads of the links."""
        for way in self.ways.values():
            way.sends.put(None)


def make_toy(
    schedule: str,
    size: int,
    num_microbatches: int,
    stages_per_rank: int = 1,
    *,
    layers: nn.ModuleList | None = None,
    codecs: Callable[[], tuple[BoundaryCodec, BoundaryCodec]] | None = None,
    bytes_per_s: float = float("inf"),
) -> Toy:
    """Make the ranks of a pipeline; ``size=1`` has all stages on one rank."""
    num_stages = size * stages_per_rank
    layers = make_layers(2 * num_stages) if layers is None else layers
    stages = make_stages(layers, num_stages, make_data(num_microbatches))
    ways = {(a, b): Way(bytes_per_s) for a in range(size) for b in range(size) if a != b}
    engines = []
    for rank in range(size):
        forward, backward = (
            (make_boundary_codec("none"), make_boundary_codec("none", True))
            if codecs is None
            else codecs()
        )
        mine = stages_of_rank(schedule, rank, num_stages, size)
        engines.append(
            PipelineEngine(
                {index: stages[index] for index in mine},
                num_stages,
                None,
                None,
                torch.device("cpu"),
                schedule,
                num_microbatches,
                forward,
                backward,
                ThreadLinks(rank, size, ways),
            )
        )
    for way in ways.values():
        threading.Thread(target=way.carry, daemon=True).start()
    return Toy(engines, layers, ways)
