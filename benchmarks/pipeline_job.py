"""A model in parts, each trained by a rank through the pipeline engine, and the time of codecs."""

from __future__ import annotations

import itertools
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lq_lightning.pipeline.boundary import BoundaryCodec, Message
from lq_lightning.pipeline.engine import PipelineEngine
from lq_lightning.pipeline.execution import Links
from lq_lightning.pipeline.message import BoundaryMeta
from lq_lightning.pipeline.partition import StageModule, keep_stages
from lq_lightning.pipeline.plan import plan_stages
from lq_lightning.pipeline.schedules import stages_of_rank


class Stopwatch:
    """Adds up how long pieces of work take, on CUDA on the stream.

    Args:
        device: Where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what is done inside of the ``with`` block."""
        if self._cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((start, end))
            return
        begun = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - begun

    def take(self) -> float:
        """Return the seconds since the last call, which the device must have finished."""
        seconds = self._seconds + sum(a.elapsed_time(b) for a, b in self._events) / 1e3
        self._seconds = 0.0
        self._events.clear()
        return seconds


class StepTimes:
    """Times between marks, on CUDA on the stream, so that the host runs ahead as in training.

    Args:
        device: Of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """End a step, and begin the next."""
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def median(self) -> float:
        """Return the median seconds of the steps, which the device must have finished."""
        pairs = itertools.pairwise(self._marks)
        if self._cuda:
            return statistics.median(a.elapsed_time(b) / 1e3 for a, b in pairs)
        return statistics.median(b - a for a, b in pairs)


class TimedCodec(BoundaryCodec):
    """Another codec, whose calls are timed.

    Args:
        codec: That does the work.
        device: Where it is done.
    """

    def __init__(self, codec: BoundaryCodec, device: torch.device) -> None:
        self.codec, self.name = codec, codec.name
        self.encoding, self.decoding = Stopwatch(device), Stopwatch(device)

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """As that of the codec."""
        self.codec.check(shape, dtype)

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype, message: Message) -> int:
        """As that of the codec."""
        return self.codec.nbytes(shape, dtype, message)

    def encode(self, x: Tensor, message: Message) -> Tensor:
        """As that of the codec, timed."""
        with self.encoding.running():
            return self.codec.encode(x, message)

    def decode(
        self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, message: Message
    ) -> Tensor:
        """As that of the codec, timed."""
        with self.decoding.running():
            return self.codec.decode(payload, shape, dtype, message)

    def bits_per_value(self, shape: Sequence[int], dtype: torch.dtype) -> float:
        """As that of the codec."""
        return self.codec.bits_per_value(shape, dtype)

    def close(self) -> None:
        """As that of the codec."""
        self.codec.close()


class Part:
    """What a rank holds of a model: its stages in a schedule.

    The whole model is built on the device, then all but the stages is freed. Every rank of the
    default process group is one of the pipeline.

    Args:
        build: Returns the whole model.
        call: Returns the loss of a micro-batch, given the model and the micro-batch.
        schedule: Name of the schedule.
        stages_per_rank: Stages on each rank.
        num_microbatches: Of a step.
        device: Of this rank.
        compiled: Compile the layers, each by itself.
        seed: Of the weights, which do not depend on the number of stages.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        call: Callable[[nn.Module, Tensor], Tensor],
        *,
        schedule: str,
        stages_per_rank: int,
        num_microbatches: int,
        device: torch.device,
        compiled: bool = False,
        seed: int = 0,
    ) -> None:
        self.device, self.schedule = device, schedule
        self.num_microbatches = num_microbatches
        self.num_stages = stages_per_rank * dist.get_world_size()
        self._call, self._seed = call, seed
        with device:
            self.module = build()
        self.plan = plan_stages(self.module, self.num_stages)
        mine = stages_of_rank(schedule, dist.get_rank(), self.num_stages, dist.get_world_size())
        keep_stages(self.module, self.plan, mine)
        if compiled:
            for name in itertools.chain.from_iterable(self.plan.stages[index] for index in mine):
                self.module.get_submodule(name).compile(dynamic=False)
        self.stages = {index: StageModule(self.module, index, self._run) for index in mine}
        self._batch: Tensor | None = None
        self._boundary: BoundaryMeta | None = None
        self.draw_weights()

    @torch.no_grad()
    def draw_weights(self) -> None:
        """Set the weights as at the start of training; each has a generator of its own."""
        for name, parameter in self.module.named_parameters():
            generator = torch.Generator(self.device)
            generator.manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)

    def engine(
        self,
        forward_codec: BoundaryCodec,
        backward_codec: BoundaryCodec,
        control_group: dist.ProcessGroup | None,
        links: Links | None = None,
    ) -> PipelineEngine:
        """Return an engine that drives the stages; every rank must ask for one."""
        return PipelineEngine(
            self.stages,
            self.num_stages,
            dist.group.WORLD,
            control_group,
            self.device,
            self.schedule,
            self.num_microbatches,
            forward_codec,
            backward_codec,
            links,
        )

    def step(
        self, engine: PipelineEngine, batch: Tensor, samples: Tensor | None = None
    ) -> list[Tensor]:
        """Add to the gradients; return the losses of the micro-batches on the last stage's rank.

        Args:
            engine: Of this part.
            batch: ``[B, ...]`` on the CPU, the same on all ranks.
            samples: ``[B]`` int64 identities of the samples.
        """
        engine.agree(batch, training=True, samples=samples)
        shape = (self.num_microbatches, -1, *batch.shape[1:])
        self._batch = batch.to(self.device, non_blocking=True).view(shape)
        if self._boundary is None:
            own = self.stages[0].probe(0) if 0 in self.stages else None
            self._boundary = engine.share(own)
            for stage in self.stages.values():
                stage.set_boundary(self._boundary)
        return engine.step(self._boundary, samples)

    @property
    def boundary(self) -> BoundaryMeta:
        """What crosses the boundaries; known after the first step."""
        if self._boundary is None:
            raise RuntimeError("no step was taken yet")
        return self._boundary

    def _run(self, index: int) -> Tensor:
        if self._batch is None:
            raise RuntimeError("no batch was given yet")
        return self._call(self.module, self._batch[index]) / self.num_microbatches


def finish(device: torch.device, control_group: dist.ProcessGroup) -> None:
    """Wait until all ranks have done what they were given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier(control_group)


def everyone(value: Any) -> list[Any]:
    """Return what each rank gives."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
