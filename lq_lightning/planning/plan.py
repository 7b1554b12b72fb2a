"""``lq_lightning.plan``: memory, time, bytes and loss of a run, from steps that are simulated."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from traceback import walk_tb
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lq_lightning.callbacks import StageBitCompensation
from lq_lightning.callbacks.model_setup import AfterConfigureModel
from lq_lightning.foundation.nested import from_plain
from lq_lightning.pipeline.schedules import Program as Orders
from lq_lightning.pipeline.schedules import stages_of_rank, training_program
from lq_lightning.planning.alternatives import (
    Choice,
    Outcome,
    Search,
    layers_of,
)
from lq_lightning.planning.changes import Model
from lq_lightning.planning.config import (
    BATCH_REMEDY,
    OneBatch,
    Program,
    describe,
    find_batch,
    python_program,
)
from lq_lightning.planning.machine import Machine, make_machine
from lq_lightning.planning.memory import MemoryPeak, of_host_memory, peak_memory
from lq_lightning.planning.prices import Price, price_of
from lq_lightning.planning.recorder import SimulationError
from lq_lightning.planning.run_options import RunOptions, checkpointing_of
from lq_lightning.planning.simulation import (
    Build,
    Overrides,
    UserRun,
    simulate_fit,
)
from lq_lightning.planning.timing import StepTime, expected_seconds, step_time
from lq_lightning.planning.trace import Collective, Operator, Trace
from lq_lightning.strategies.quantized_pipeline import PipelineLayout

_MOST_STAGES = 4  # of more that are alike, the first, the middle and the last are simulated
_DEFAULT_GPUS = 8
_SHOWN, _REMEDIES = 6, 3
_SEARCH_S = 120.0  # of this process, for what else would work


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How many ranks have data of their own, share each layer, and follow along the pipeline."""

    data_parallel: int
    tensor_parallel: int
    pipeline: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run needs: memory, time, bytes and loss, each with its uncertainty.

    Attributes:
        name: The run.
        machine: Where it runs.
        layout: How ranks share it.
        memory: Peak of a rank of each stage, or of the first, one of those between, and the last.
        step: Time of an optimizer step, and bytes that a node sends in it.
        microbatches: Forward passes of a step and rank.
        tokens_per_step: Tokens, or samples of a model without any, of all ranks.
        tokens: Of the whole run; None where its end is not known.
        price: Loss against full precision.
        alternatives: Options that fit, the fastest first.
        remedies: Changes by which a run fits that does not, the cheapest first.
        batch: Shapes of a batch of one rank, and where they are from.
        notes: What could not be tried, and what is not as it was asked for.
    """

    name: str
    machine: Machine
    layout: Layout
    memory: tuple[MemoryPeak, ...]
    step: StepTime
    microbatches: int
    tokens_per_step: int
    tokens: int | None
    price: Price
    alternatives: tuple[Choice, ...] = ()
    remedies: tuple[Choice, ...] = ()
    batch: str = ""
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.machine.world_size

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory that it is most likely to need."""
        return all(peak.device_nbytes <= self.machine.gpu.memory_nbytes for peak in self.memory)

    @property
    def surely_fits(self) -> bool:
        """Whether the upper ends of the intervals fit as well."""
        return all(peak.high_nbytes <= self.machine.gpu.memory_nbytes for peak in self.memory)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks per second."""
        return self.tokens_per_step / self.step.seconds

    @property
    def run_s(self) -> float | None:
        """Seconds of the whole run."""
        return None if self.tokens is None else self.tokens / self.tokens_per_s

    @property
    def gpu_hours(self) -> float | None:
        """Hours of all GPUs together."""
        return None if self.run_s is None else self.run_s * self.world_size / 3600

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the plan as JSON, with what follows from it, and write it to ``path``."""
        derived = ("world_size", "fits", "surely_fits", "tokens_per_s", "run_s", "gpu_hours")
        content = asdict(self) | {name: getattr(self, name) for name in derived}
        text = json.dumps(content, indent=1, allow_nan=False)
        if path is not None:
            Path(path).write_text(text + "\n")
        return text

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what :meth:`to_json` returned."""
        read: Plan = from_plain(cls, json.loads(text))
        return read

    def __str__(self) -> str:
        """Return a report of lines of up to 100 columns."""
        from lq_lightning.planning.report import lines_of

        return "\n".join(lines_of(self))


# --- simulation -----------------------------------------------------------------------------------


def plan(
    module: LightningModule | Callable[[], LightningModule],
    *,
    trainer: Mapping[str, Any] | None = None,
    data: Any = None,
    batch: Any = None,
    gpu: str | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    network: str | float | None = None,
    profile: str | Path | None = None,
    tokens: float | None = None,
    alternatives: bool = True,
) -> Plan:
    """Simulate a few steps of a run on any machine, and return what it needs.

    Nothing is allocated, computed or downloaded: ``Trainer.fit`` runs on tensors without memory as
    one rank of each stage, with the real strategy, plugins, callbacks and optimizer.

    Args:
        module: The LightningModule, or a function that makes one.
        trainer: Arguments of the Trainer, such as ``strategy``, ``plugins``, ``callbacks``,
            ``precision``, ``accumulate_grad_batches``; devices and nodes are those below.
        data: Training data as ``fit`` takes them, for the shapes of a batch.
        batch: A batch of one rank instead, or its shapes: ``"input_ids:int64[4,1024]"``.
        gpu: Name of the GPU, such as ``"H100"``.
        nodes: Number of nodes; by default those of ``trainer``.
        gpus_per_node: GPUs of a node; by default the devices of ``trainer``, else 8.
        network: Rate of each node's link to the others, such as ``"25gbit"``.
        profile: JSON file that ``lq-lightning doctor`` wrote on such a machine.
        tokens: Tokens of the whole run; by default those of ``max_steps``.
        alternatives: Also simulate what else would work.

    Raises:
        ValueError: an argument cannot be used, the model cannot be built, or a layout does not
            divide the ranks.
    """
    run = python_program(module, trainer or {}, data)
    machine: dict[str, Any] = {"gpu": gpu, "nodes": nodes, "gpus_per_node": gpus_per_node}
    machine |= {"network": network, "profile": profile}
    return plan_run(run, machine, batch=batch, tokens=tokens, alternatives=alternatives)


def plan_run(
    run: Program,
    machine: Mapping[str, Any],
    *,
    batch: Any = None,
    tokens: float | None = None,
    alternatives: bool = True,
) -> Plan:
    """Plan a run; ``machine`` are arguments of :func:`make_machine`.

    Raises:
        ValueError: as :func:`plan`.
    """
    own, module, data = run.look()
    place = make_machine(**_with_layout(machine, own))
    batch, origin = find_batch(module, data, run.keeps_data, batch)
    simulations = Simulations(run=run, batch=batch, origin=origin, machine=place)
    simulated = simulations()
    if not (step := simulated.step_time(place)).seconds:
        raise ValueError(
            f"{run.name} cannot be planned: its model is so small that nothing of it is simulated "
            "(no weight has 4 KiB). Give it the sizes of the real run."
        )
    per_step = simulated.tokens_per_step
    if tokens is None and own.get("max_steps", -1) > 0:
        tokens = own["max_steps"] * per_step
    notes = of_host_memory(simulated.traces, place.gpus_per_node)
    if simulated.options.learned_bits:
        notes += ("`AdaptiveBits` is planned with the bits that it starts with.",)
    if len(simulated.places) < simulated.layout.pipeline:
        others = f"1 to {simulated.layout.pipeline - 2}"
        notes += (f"Ranks {others} of the pipeline are planned as rank {simulated.places[1]} is.",)
    result = Plan(
        name=run.name,
        machine=place,
        layout=simulated.layout,
        memory=simulated.memory(place),
        step=step,
        microbatches=simulated.microbatches,
        tokens_per_step=per_step,
        tokens=None if tokens is None else int(tokens),
        price=price_of(simulated.options, place),
        batch=f"{describe(batch)} from {origin}",
        notes=notes,
    )
    return _with_alternatives(result, simulated, simulations) if alternatives else result


def _with_alternatives(plan: Plan, simulated: Simulation, simulations: Simulations) -> Plan:
    """Add what else would work."""
    search = Search(
        simulated.options,
        simulations.evaluate,
        plan.machine,
        simulated.model,
        base=simulated.outcome(plan.machine),
        base_s=simulated.took_s,
        time_limit_s=_SEARCH_S,
    )
    found = search.ranked() if plan.fits else search.remedies()
    notes = plan.notes
    if not found.fitting:
        notes += (f"None of {len(found.too_large) - 1} other choices that were tried fits.",)
    if found.left_out:
        notes += (f"There was no time to try {'; '.join(found.left_out)}.",)
    return replace(
        plan,
        alternatives=found.fitting[:_SHOWN] if plan.fits else (),
        remedies=() if plan.fits else found.fitting[:_REMEDIES],
        notes=notes,
    )


def _with_layout(machine: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the nodes and devices that the Trainer has."""
    given = {name: value for name, value in machine.items() if value is not None}
    if "profile" in given:
        return given
    devices = own.get("devices", "auto")
    count = len(devices) if isinstance(devices, (list, tuple)) else devices
    count = int(count) if str(count).isdigit() else _DEFAULT_GPUS
    return {"nodes": own.get("num_nodes", 1), "gpus_per_node": count, **given}


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """A run as some of its ranks do it, of which each stands at a place in the pipeline.

    ``pipeline`` is as one of them sees it, None without one; ``model`` is what the model lets one
    choose. It took ``took_s`` seconds to simulate.
    """

    places: tuple[int, ...]
    traces: tuple[Trace, ...]
    layout: Layout
    pipeline: PipelineLayout | None
    options: RunOptions
    model: Model
    took_s: float

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks."""
        trace = self.traces[0]
        return trace.tokens * trace.microbatches * self.layout.data_parallel

    @property
    def microbatches(self) -> int:
        """Forward passes of a step and rank."""
        cut = {e.action[2] for e in self.traces[0].events if isinstance(e, Operator) and e.action}
        return self.traces[0].microbatches * max(1, len(cut))

    def memory(self, machine: Machine) -> tuple[MemoryPeak, ...]:
        """Peaks of the ranks."""
        stages = zip(self.traces, self.places, strict=True)
        return tuple(peak_memory(trace, machine, place) for trace, place in stages)

    def _replayed(self, machine: Machine) -> tuple[list[Trace], Machine, Orders | None]:
        """Traces of all places in the pipeline, where they run, and in which order."""
        if self.pipeline is None:
            return [self.traces[0]], machine, None
        line = self.pipeline
        count = self.microbatches // self.traces[0].microbatches
        program = training_program(line.schedule, line.pipeline_size, count, line.stages_per_rank)
        return [self.trace_at(place) for place in range(line.pipeline_size)], machine, program

    def step_time(self, machine: Machine) -> StepTime:
        """Time of a step."""
        return step_time(*self._replayed(machine))

    def outcome(self, machine: Machine) -> Outcome:
        """Memory of the fullest rank, and time, both without intervals."""
        seconds = expected_seconds(*self._replayed(machine))
        return Outcome(
            device_nbytes=max(peak.device_nbytes for peak in self.memory(machine)),
            seconds=seconds,
            tokens_per_s=self.tokens_per_step / seconds,
        )

    def trace_at(self, place: int) -> Trace:
        """Trace of a place in the pipeline: its own, or that of the middle as if it were there."""
        if place in self.places:
            return self.traces[self.places.index(place)]
        if self.pipeline is None:
            raise AssertionError("without a pipeline there is one place")
        line, size = self.pipeline, self.pipeline.pipeline_size
        stages = [
            stages_of_rank(line.schedule, each, size * line.stages_per_rank, size)
            for each in (self.places[1], place)
        ]
        moved = dict(zip(*stages, strict=True))

        def move(event: Any) -> Any:
            if not isinstance(event, (Operator, Collective)) or event.action is None:
                return event
            kind, stage, microbatch = event.action
            return replace(event, action=(kind, moved[stage], microbatch))

        return replace(self.traces[1], events=[move(event) for event in self.traces[1].events])


def equal_between_ends(line: PipelineLayout) -> bool:
    """Whether all ranks but the first and the last have stages with as many parameters."""
    size, stages = line.pipeline_size, len(line.numels)
    ranks = [stages_of_rank(line.schedule, rank, stages, size) for rank in range(1, size - 1)]
    return len({tuple(line.numels[stage] for stage in held) for held in ranks}) <= 1


class _Observer(Callback):
    """Notes what is known of a run between its start and its end."""

    options: RunOptions

    def __init__(self) -> None:
        self.pipeline: PipelineLayout | None = None
        self.replicas = 1
        self.model = Model()
        self.alike = True  # stages between the first and the last, as far as it is known

    def see(self, run: UserRun) -> None:
        """Look at a run that has not begun."""
        self.options = RunOptions.of(run[0], run[1])
        AfterConfigureModel(run[1], self._see_model)

    def _see_model(self, module: LightningModule) -> None:
        plans, layers = ("tensor_parallel_plan", "base_model_tp_plan"), layers_of(module)
        self.alike &= len(set(layers)) == 1
        parts = [part for m in module.modules() for part in (m, getattr(m, "config", None))]
        self.model = Model(
            layers=len(layers),
            can_checkpoint=checkpointing_of(module) is not None,
            can_cut_layers=any(getattr(part, name, None) for part in parts for name in plans),
        )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.pipeline = line = getattr(trainer.strategy, "pipeline", None)
        if line is not None:
            callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
            bits_differ = any(isinstance(each, StageBitCompensation) for each in callbacks)
            self.alike &= equal_between_ends(line) and not bits_differ
        shares = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        self.replicas = int(shares.get("num_replicas", 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulations:
    """Simulates a run on a machine, with its own options or others.

    ``batch`` is that of a rank; ``origin`` says where its shapes are from.
    """

    run: Program
    batch: Any
    origin: str
    machine: Machine

    def __call__(self, options: RunOptions | None = None) -> Simulation:
        """Simulate one rank of each stage, or of the first, the middle and the last of many.

        The middle stands for all others only where their layers and numbers of parameters are
        equal and no ``StageBitCompensation`` gives them other bits.

        Args:
            options: In place of the user's.

        Raises:
            ValueError: the run cannot be simulated.
        """
        began = time.process_time()
        run = self.run if options is None else self.run.with_change(options.change)
        observer = _Observer()
        traces = [self._trace(run, observer, 0)]
        pipeline, world_size = observer.pipeline, self.machine.world_size
        size = 1 if pipeline is None else pipeline.pipeline_size
        some = size > _MOST_STAGES and observer.alike
        places = (0, size // 2, size - 1) if some else tuple(range(size))
        ranks = tuple(place * (world_size // size) for place in places)
        options, model, replicas = observer.options, observer.model, observer.replicas
        traces += [self._trace(run, observer, rank, traces[0]) for rank in ranks[1:]]
        return Simulation(
            places=places,
            traces=tuple(traces),
            layout=Layout(
                data_parallel=replicas,
                tensor_parallel=max(1, world_size // (size * replicas)),
                pipeline=size,
            ),
            pipeline=pipeline,
            options=options,
            model=model,
            took_s=time.process_time() - began,
        )

    def evaluate(self, options: RunOptions) -> Outcome:
        """Memory and time of the run with other options."""
        return self(options).outcome(self.machine)

    def _trace(
        self, build: Build, observer: _Observer, rank: int, first: Trace | None = None
    ) -> Trace:
        def observed(overrides: Overrides) -> UserRun:
            callbacks = [*overrides["callbacks"], observer]
            trainer, module, _ = build({**overrides, "callbacks": callbacks})
            observer.see((trainer, module, None))
            return trainer, module, OneBatch(self.batch)

        steps = 2 if self.machine.world_size == 1 else 3  # nothing is on its way from step to step
        try:
            return simulate_fit(observed, self.machine, rank, steps=steps, first=first)
        except (ValueError, NotImplementedError):
            raise  # in words of ours, or of the user's
        except SimulationError as error:
            raise ValueError(f"{self.run.name} cannot be simulated: {error}") from error
        except Exception as error:
            functions = {frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)}
            in_step = "training_step" in functions
            said = (
                f"{self.run.name} cannot be simulated: its {'training step' if in_step else 'fit'} "
                f"raises {type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}."
            )
            if in_step:
                where = f"{self.origin}: {describe(self.batch)}"
                said += f" The batch was taken from {where}. {BATCH_REMEDY}"
            raise ValueError(said) from error
