"""What could be done otherwise in a run: single changes of options, as users would write them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, get_args

from lq_lightning.data_parallel import WeightQuantization
from lq_lightning.optim import OptimizerQuantization
from lq_lightning.planning.run_options import Cluster, RunOptions

Memory = Literal["less", "more", "either"]
Topic = Literal[
    "activations",
    "optimizer states",
    "checkpointing",
    "replica",
    "weights",
    "micro-batches",
    "gradient sums",
    "tensor parallelism",
    "pipeline",
    "bf16 weights",
    "local steps",
    "codes",
    "gradients",
    "strategy",
]
SMALLEST_FIRST: tuple[Topic, ...] = get_args(Topic)  # what saves most at least cost comes first
FASTEST_FIRST: tuple[Topic, ...] = (
    *("strategy", "codes", "local steps", "activations", "pipeline", "replica"),
    *("tensor parallelism", "checkpointing", "optimizer states", "micro-batches"),
    *("gradient sums", "bf16 weights"),
)
FAST_RECIPES = ("fp8-4bit", "coat")  # with FP8 products
_RECIPES = ("agoq", "fp8-4bit", "coat", "auto")
_SIZES = (2, 4, 8)
_SLOW_BYTES_PER_S = 125e6  # 1 Gb/s, below which local steps pay (docs/local_steps.md)
# Options that only one of the strategies has, or that mean something else there.
_NOT_SHARED = (
    *("schedule", "num_microbatches", "stages_per_rank", "split", "trunk", "tied_gradients"),
    *("count_targets", "reshard_after_forward"),
)


class Link(Protocol):
    """A network link; that of a ``Machine`` is one."""

    @property
    def bytes_per_s(self) -> float: ...  # noqa: D102


class Machine(Cluster, Protocol):
    """What of a machine decides about alternatives."""

    @property
    def between_nodes(self) -> Link: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What a model lets one choose.

    Attributes:
        layers: Equal layers in its list; 0 if it has no list, or layers differ.
        can_checkpoint: Whether it has ``gradient_checkpointing_enable()``.
        can_cut_layers: Whether it has a plan for tensor parallelism.
    """

    layers: int = 0
    can_checkpoint: bool = False
    can_cut_layers: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Change:
    """One change of a run.

    Attributes:
        label: How a user writes it.
        topic: What it is about.
        choices: Options that change.
        memory: Whether it needs less memory than before or more; ``"either"`` may be both.
    """

    label: str
    topic: Topic
    choices: Mapping[str, Any]
    memory: Memory = "less"

    def goes_with(self, other: Change) -> bool:
        """Whether both can be made at once."""
        alike = self.topic == other.topic != "codes"
        return not alike and not self.choices.keys() & other.choices.keys()


def changes_of(options: RunOptions, machine: Machine, model: Model) -> tuple[Change, ...]:
    """Enumerate single changes of a run, in a fixed order."""
    found = [*_kept(options, model), *_accumulation(options, machine)]
    if machine.nodes * machine.gpus_per_node > 1:
        if options.is_ours:
            found += _exchange(options, machine)
            found += _layouts(options, machine, model)
        else:
            choices = {"strategy": "quantized_fsdp"}
            found.append(
                Change(label='strategy="quantized_fsdp"', topic="strategy", choices=choices)
            )
    return tuple(found)


def in_turn(changes: Iterable[Change], topics: Sequence[Topic]) -> list[Change]:
    """Put the first change of each topic before the second of any: not all may be tried.

    Topics that are not named come last.
    """
    numbers: Counter[Topic] = Counter()
    places = []
    for change in changes:
        last = change.topic not in topics
        rank = len(topics) if last else topics.index(change.topic)
        places.append((last, numbers[change.topic], rank, change))
        numbers[change.topic] += 1
    return [place[-1] for place in sorted(places, key=lambda place: place[:3])]


def _kept(options: RunOptions, model: Model) -> Iterator[Change]:
    for name in _RECIPES:
        if options.recipe is None or (isinstance(options.recipe, str) and options.recipe != name):
            yield Change(
                label=f'ActivationQuantization("{name}")',
                topic="activations",
                choices={"recipe": name, "budget": None, "adapt": None},
                memory="less" if options.recipe is None else "either",
            )
    if options.recipe is not None:
        choices: dict[str, Any] = {"recipe": None, "budget": None, "adapt": None}
        yield Change(
            label="no ActivationQuantization", topic="activations", choices=choices, memory="more"
        )
    if model.can_checkpoint and not options.checkpointing:
        choices = {"checkpointing": True}
        label = "gradient_checkpointing_enable()"
        yield Change(label=label, topic="checkpointing", choices=choices)
    if options.optimizer_state == "none":
        label = 'QuantizedPrecision(optimizer_state="expanded_fp8")'
        choices = {"optimizer_state": "expanded_fp8"}
        yield Change(label=label, topic="optimizer states", choices=choices)
    if options.precision != "bf16-true":
        states = OptimizerQuantization(stochastic_rounding=True)
        yield Change(
            label='"bf16-true" with stochastic rounding and 8-bit states',
            topic="bf16 weights",
            choices={"precision": "bf16-true", "optimizer_state": states},
        )


def _accumulation(options: RunOptions, machine: Machine) -> Iterator[Change]:
    if not options.accumulates:
        return
    several = machine.nodes * machine.gpus_per_node > 1
    if options.is_ours and options.strategy != "quantized_pipeline" and several:
        now = options.reduce_every_microbatch
        yield Change(
            label=f"reduce_every_microbatch={not now}",
            topic="micro-batches",
            choices={"reduce_every_microbatch": not now},
            memory="more" if now else "less",
        )
    if options.gradient_buffer == "none":
        label = 'QuantizedPrecision(gradient_buffer="int8")'
        choices = {"gradient_buffer": "int8"}
        yield Change(label=label, topic="gradient sums", choices=choices)


def _exchange(options: RunOptions, machine: Machine) -> Iterator[Change]:
    weights, gradients = options.collectives(machine)
    topology = options.topology(machine)
    if topology.world_size == 1:
        return
    fast = topology.num_nodes == 1 and machine.nvlink  # the link is no bottleneck
    if weights is not None:
        choices: dict[str, Any] = {"weights": "none"}
        yield Change(label='weights="none"', topic="weights", choices=choices)
        if weights.method == "qWD" and topology.node_size > 1:
            yield _other_replica(options, weights)
    elif not fast:
        choices = {"weights": "qWD"}
        yield Change(label='weights="qWD"', topic="codes", choices=choices, memory="more")
    if gradients is not None or not fast:
        topic: Topic
        name, topic = ("TLq-HS", "codes") if gradients is None else ("none", "gradients")
        choices = {"gradients": name}
        label = f'gradients="{name}"'
        yield Change(label=label, topic=topic, choices=choices, memory="either")
    if options.strategy == "quantized_pipeline" or machine.nodes == 1:
        return
    if options.local_steps is not None:
        yield Change(label="local_steps=None", topic="local steps", choices={"local_steps": None})
    elif machine.between_nodes.bytes_per_s <= _SLOW_BYTES_PER_S:
        yield Change(
            label="local_steps=32",
            topic="local steps",
            choices={"local_steps": 32},
            memory="more",
        )


def _other_replica(options: RunOptions, weights: WeightQuantization) -> Change:
    name: Literal["full", "node"] = "node" if weights.replica == "full" else "full"
    choices: dict[str, Any] = {"replica": name}
    if isinstance(options.weights, WeightQuantization):  # which brings its own
        choices = {"weights": replace(options.weights, replica=name)}
    memory: Memory = "less" if name == "node" else "more"
    return Change(label=f'replica="{name}"', topic="replica", choices=choices, memory=memory)


def _layouts(options: RunOptions, machine: Machine, model: Model) -> Iterator[Change]:
    ranks, per_node = machine.nodes * machine.gpus_per_node, machine.gpus_per_node
    for size in (1, *_SIZES) if model.can_cut_layers else ():
        stages = options.stages(machine)
        fits = per_node % size == 0 and ranks % (size * stages) == 0
        if fits and size != options.tensor_parallel_size:
            yield Change(
                label=f"tensor_parallel_size={size}" + ', tensor_parallel="auto"' * (size > 1),
                topic="tensor parallelism",
                choices={
                    "tensor_parallel_size": size,
                    "tensor_parallel": "auto" if size > 1 else None,
                },
                memory="either",
            )
    others = {k: v for k, v in options.others.items() if k not in _NOT_SHARED}
    pipeline = options.strategy == "quantized_pipeline"
    sizes = sorted({*_SIZES, machine.nodes}, key=lambda size: (size != machine.nodes, size))
    for size in sizes:
        whole = ranks % (size * options.tensor_parallel_size) == 0
        if (
            1 < size <= model.layers
            and whole
            and not (pipeline and size == options.stages(machine))
        ):
            yield Change(
                label=f"QuantizedPipelineStrategy(pipeline_size={size})",
                topic="pipeline",
                choices={
                    "strategy": "quantized_pipeline",
                    "pipeline_size": size,
                    "local_steps": None,
                    "accumulates": True,
                    "others": options.others if pipeline else others,
                },
                memory="either",
            )
    if pipeline:
        choices = {"strategy": "quantized_fsdp", "pipeline_size": 1, "others": others}
        yield Change(
            label='strategy="quantized_fsdp"', topic="pipeline", choices=choices, memory="either"
        )
