"""What could be done otherwise in a run: single changes of options, as users would write them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal

from lq_lightning.data_parallel import WeightQuantization
from lq_lightning.optim import OptimizerQuantization
from lq_lightning.planning.machine import Machine
from lq_lightning.planning.run_options import RunOptions

# Topics of changes. What saves most at least cost comes first.
SMALLEST_FIRST = (
    *("activations", "optimizer states", "checkpointing", "replica", "weights", "micro-batches"),
    *("gradient sums", "tensor parallelism", "pipeline", "bf16 weights", "local steps", "codes"),
    *("gradients", "strategy"),
)
# Layouts take the longest to simulate, and where codes are on, they rarely slow a step: both last.
FASTEST_FIRST = (
    *("strategy", "codes", "local steps", "activations", "replica", "checkpointing"),
    *("optimizer states", "micro-batches", "gradient sums", "bf16 weights"),
)
FAST_RECIPES = ("fp8-4bit", "coat")  # with FP8 products
_RECIPES = ("agoq", *FAST_RECIPES)  # "auto" begins as "agoq", at the same price
_SIZES = (2, 4, 8)
_SLOW_BYTES_PER_S = 125e6  # 1 Gb/s, below which local steps pay (docs/local_steps.md)
# Options that only one of the strategies has, or that mean something else there.
_NOT_SHARED = (
    *("schedule", "num_microbatches", "stages_per_rank", "split", "trunk", "tied_gradients"),
    *("count_targets", "reshard_after_forward"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What a model lets one choose.

    ``layers`` are those of its list: 0 if it has no single one. It can checkpoint by
    ``gradient_checkpointing_enable()``, and cut layers by a plan for tensor parallelism.
    """

    layers: int = 0
    can_checkpoint: bool = False
    can_cut_layers: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """One change of a run: how a user writes it, what it is about, and options that change.

    With ``grows`` it surely needs more memory than before.
    """

    label: str
    topic: str
    choices: Mapping[str, Any]
    grows: bool = False

    def goes_with(self, other: Change) -> bool:
        """Whether both can be made at once."""
        alike = self.topic == other.topic != "codes"
        return not alike and not self.choices.keys() & other.choices.keys()


def made(options: RunOptions, changes: Iterable[Change]) -> RunOptions:
    """Return the options of a run with changes."""
    return replace(options, **{k: v for change in changes for k, v in change.choices.items()})


def all_matter(changes: Sequence[Change], options: RunOptions, machine: Machine) -> bool:
    """Whether a run with these changes can be made, and is another one without any of them."""
    try:
        whole = made(options, changes).in_force(machine)
        rests = [made(options, (c for c in changes if c is not out)) for out in changes]
        return all(rest.in_force(machine) != whole for rest in rests)
    except ValueError:  # ranks that a layout does not divide
        return False


def changes_of(options: RunOptions, machine: Machine, model: Model) -> tuple[Change, ...]:
    """Enumerate single changes of a run that do something, in a fixed order."""
    found = [*_kept(options, model)]
    if machine.nodes * machine.gpus_per_node > 1:
        if options.is_ours:
            found += [*_exchange(options, machine), *_layouts(options, machine, model)]
        else:
            choices = {"strategy": "quantized_fsdp", "all_reduce": False}
            found.append(Change('strategy="quantized_fsdp"', "strategy", choices))
    return tuple(change for change in found if all_matter([change], options, machine))


def in_turn(changes: Sequence[Change], topics: Iterable[str]) -> list[Change]:
    """Put the first change of each topic before the second of any: not all may be tried.

    Topics that are not named come last.
    """
    named = dict.fromkeys(topics)
    found: list[Change] = []
    for names in (named, dict.fromkeys(c.topic for c in changes if c.topic not in named)):
        turns = zip_longest(*([c for c in changes if c.topic == name] for name in names))
        found += [change for turn in turns for change in turn if change is not None]
    return found


# These may propose what a run has anyway, or ranks that no layout divides: `changes_of` drops it.


def _kept(options: RunOptions, model: Model) -> Iterator[Change]:
    recipe = options.recipe
    for name in _RECIPES:
        if recipe is None or (isinstance(recipe, str) and recipe != name):
            label, choices = f'ActivationQuantization("{name}")', _codes(name)
            yield Change(label, "activations", choices)
    yield Change("no ActivationQuantization", "activations", _codes(None), grows=True)
    if model.can_checkpoint:
        yield Change("gradient_checkpointing_enable()", "checkpointing", {"checkpointing": True})
    if options.optimizer_state == "none":
        label = 'QuantizedPrecision(optimizer_state="expanded_fp8")'
        yield Change(label, "optimizer states", {"optimizer_state": "expanded_fp8"})
    if options.precision != "bf16-true":
        states = OptimizerQuantization(stochastic_rounding=True)
        choices = {"precision": "bf16-true", "optimizer_state": states}
        label = '"bf16-true" with stochastic rounding and 8-bit states'
        yield Change(label, "bf16 weights", choices)
    if options.gradient_buffer == "none":
        label = 'QuantizedPrecision(gradient_buffer="int8")'
        yield Change(label, "gradient sums", {"gradient_buffer": "int8"})


def _codes(recipe: str | None) -> dict[str, Any]:
    return {"recipe": recipe, "budget": None, "adapt": None}


def _exchange(options: RunOptions, machine: Machine) -> Iterator[Change]:
    if options.strategy != "quantized_pipeline":
        name, now = "reduce_every_microbatch", options.reduce_every_microbatch
        yield Change(f"{name}={not now}", "micro-batches", {name: not now}, grows=now)
    weights, gradients = options.collectives(machine)
    topology = options.topology(machine)
    fast = topology.num_nodes == 1 and machine.nvlink  # the link is no bottleneck
    if weights is not None:
        yield Change('weights="none"', "weights", {"weights": "none"})
        yield _other_replica(options, weights)
    elif not fast:
        yield Change('weights="qWD"', "codes", {"weights": "qWD"}, grows=True)
    if gradients is not None:
        yield Change('gradients="none"', "gradients", {"gradients": "none"})
    elif not fast:
        yield Change('gradients="TLq-HS"', "codes", {"gradients": "TLq-HS"})
    if options.local_steps is not None:
        yield Change("local_steps=None", "local steps", {"local_steps": None})
    elif machine.between_nodes.bytes_per_s <= _SLOW_BYTES_PER_S:
        yield Change("local_steps=32", "local steps", {"local_steps": 32}, grows=True)


def _other_replica(options: RunOptions, weights: WeightQuantization) -> Change:
    name: Literal["full", "node"] = "node" if weights.replica == "full" else "full"
    choices: dict[str, Any] = {"replica": name}
    if isinstance(options.weights, WeightQuantization):  # which brings its own
        choices = {"weights": replace(options.weights, replica=name)}
    return Change(f'replica="{name}"', "replica", choices, grows=name == "full")


def _layouts(options: RunOptions, machine: Machine, model: Model) -> Iterator[Change]:
    choices: dict[str, Any]
    for size in (1, *_SIZES) if model.can_cut_layers else ():
        if machine.gpus_per_node % size == 0 and size != options.tensor_parallel_size:
            auto = "auto" if size > 1 else None
            choices = {"tensor_parallel_size": size, "tensor_parallel": auto}
            label = f"tensor_parallel_size={size}" + ', tensor_parallel="auto"' * (size > 1)
            yield Change(label, "tensor parallelism", choices)
    others = {k: v for k, v in options.others.items() if k not in _NOT_SHARED}
    pipeline = options.strategy == "quantized_pipeline"
    for size in sorted({*_SIZES, machine.nodes}, key=lambda size: (size != machine.nodes, size)):
        if 1 < size <= model.layers and not (pipeline and size == options.stages(machine)):
            choices = {
                "strategy": "quantized_pipeline",
                "pipeline_size": size,
                "local_steps": None,
                "accumulates": True,
                "others": options.others if pipeline else others,
            }
            label = f"QuantizedPipelineStrategy(pipeline_size={size})"
            yield Change(label, "pipeline", choices)
    if pipeline:
        choices = {"strategy": "quantized_fsdp", "pipeline_size": 1, "others": others}
        yield Change('strategy="quantized_fsdp"', "strategy", choices)
