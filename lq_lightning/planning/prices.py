"""What the choices of a run cost in loss, as far as it was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, get_args

from lq_lightning.activations.policy import RECIPES
from lq_lightning.data_parallel import GradientQuantization, LocalSteps
from lq_lightning.optim import OptimizerQuantization
from lq_lightning.planning.losses import LOSSES, STUDIES, Kind, Loss, show
from lq_lightning.planning.machine import Machine
from lq_lightning.planning.run_options import RunOptions

WHAT_STUDIES_CANNOT_SEE = (
    "Measured on models of 0.1 to 361 million parameters, over 301 million tokens at most, on two "
    "nodes or fewer: larger models, longer runs and other data may lose more or less."
)
_SAME_SIZE = 4.0  # studies of models so many times smaller than the largest do not count
_STAGES = (2, 4, 8)  # that were measured; between them the next larger number stands for one


@dataclass(frozen=True, slots=True)
class Cost:
    """Change of the validation loss by what was quantized together, and its standard error.

    The error is None where it is not known, as of one run. ``losses`` are the studies' results that
    it is the mean of.
    """

    quantized: tuple[str, ...]
    percent: float
    error_percent: float | None
    losses: tuple[Loss, ...]


@dataclass(frozen=True, slots=True)
class Price:
    """What the codes of a run cost in loss.

    ``percent`` is the change of the validation loss by all that was measured: 0 where nothing is
    rounded, None where nothing of what is rounded was measured. The standard error is None where
    one of the parts has none. ``unmeasured`` is rounded at a price that is not known.
    """

    percent: float | None
    error_percent: float | None
    unmeasured: tuple[str, ...]
    costs: tuple[Cost, ...]

    def __str__(self) -> str:
        """Such as ``+0.04 ± 0.01%``."""
        if self.percent is None:
            return "not measured"
        if not self.costs:
            return "0%"
        told = f"{show(self.percent, self.error_percent, 2)}%"
        if self.error_percent is None:
            told += ", error not known"
        if self.unmeasured:
            told += f"; not measured: {', '.join(self.unmeasured)}"
        return told


# --- what a run rounds ----------------------------------------------------------------------------


def quantized_parts(options: RunOptions, cluster: Machine) -> tuple[str, ...]:
    """Name all that a run rounds, as the table of losses does."""
    return tuple(chain(_exchanged(options, cluster), _kept(options), _stages(options, cluster)))


def _exchanged(options: RunOptions, cluster: Machine) -> Iterator[str]:
    weights, gradients = options.collectives(cluster)
    if weights is not None:
        codec = weights.codec()
        yield f"differences {codec.code}/{codec.group_size}"
    if gradients is not None:
        yield _gradients(gradients, "inter" in options.topology(cluster).levels)
        if options.accumulates and options.reduce_every_microbatch:
            yield "gradients rounded in every micro-batch"
    if options.all_reduce:
        yield "all-reduce in 8 bits"
    if options.local_steps is not None and cluster.nodes > 1:
        steps = options.local_steps
        steps = steps if isinstance(steps, LocalSteps) else LocalSteps(every=steps)
        bits = "fp32" if steps.bits is None else f"{steps.bits} bits"
        usual = LocalSteps(outer_lr=steps.outer_lr, outer_momentum=steps.outer_momentum)
        outer = f", outer {steps.outer_lr:g} and {steps.outer_momentum:g}"
        outer = "" if usual == LocalSteps() else outer
        outer += f", {steps.fragments} fragments" if steps.fragments > 1 else ""
        outer += f", merged after {steps.delay}" if steps.delay else ""
        outer += ", errors fed back" if steps.error_feedback else ""
        yield f"local steps {steps.every} in {bits}{outer}"


def _gradients(config: GradientQuantization, between_nodes: bool) -> str:
    codec, words = config.codec("inter"), config.codec("inter", vocabulary=True)
    if not between_nodes:
        inside = config.codec("intra")
        return f"gradients {config.method} {inside.code}/{inside.group_size} within a node"
    usual = GradientQuantization()
    told = f"gradients {config.method} {codec.code}/{codec.group_size}"
    if words != codec:
        told += f", vocabulary {words.code}"
    if config.method != "QuanGrad" and config.intra_bits != usual.intra_bits:
        told += f", {config.intra_bits} bits within nodes"
    if config.method == "TLq-HS" and config.hadamard_size != usual.hadamard_size:
        told += f", transform of {config.hadamard_size}"
    return told + (", stochastic" if config.rounding == "stochastic" else "")


def _kept(options: RunOptions) -> Iterator[str]:
    if options.precision == "bf16-true":
        yield "bf16 weights" + (", stochastic" if options.stochastic_rounding else " and states")
    if options.recipe is not None:
        yield f"activations {_recipe(options)}"
    states = options.optimizer_state
    if isinstance(states, OptimizerQuantization):
        moments = dict.fromkeys((states.first_moment, states.second_moment))
        if set(moments) != {"float32"}:
            words = ", embeddings too" if states.quantize_embeddings else ""
            yield f"states {'/'.join(moments)}{words}"
    elif states != "none":
        yield f"states {states}"
    buffer = options.gradient_buffer
    if buffer != "none" and options.accumulates:
        yield f"gradient sums {buffer if isinstance(buffer, str) else buffer.code}"
    if options.learned_bits:
        yield "learned bits"


def _recipe(options: RunOptions) -> str:
    if options.budget is not None:
        return f"within {options.budget}"
    found = options.recipe
    if isinstance(found, str):
        adapted = options.adapt if options.adapt is not None else found == "auto"
        return found if adapted == (found == "auto") else f"{found}, adapt={options.adapt}"
    for name, policy in RECIPES.items():
        if found == policy:
            return name
        if found == replace(policy, matmul="int8_forward"):
            return f"{name}, INT8 forward"
    return "by an ActivationPolicy"


def _stages(options: RunOptions, cluster: Machine) -> Iterator[str]:
    stages = options.stages(cluster)
    codecs = [_codec(each) for each in (options.forward_codec, options.backward_codec)]
    if options.strategy == "quantized_pipeline" and stages > 1 and codecs != ["none", "none"]:
        stages *= options.others.get("stages_per_rank", 1)
        stages = next((n for n in _STAGES if n >= stages), stages)
        yield f"boundaries {'/'.join(codecs)}, {stages} stages"


def _codec(codec: Any) -> str:
    return codec if isinstance(codec, str) else type(codec).__name__


# --- what that costs ------------------------------------------------------------------------------


def price_of(options: RunOptions, cluster: Machine) -> Price:
    """Price the codes of a run."""
    return price(quantized_parts(options, cluster))


def price(parts: Iterable[str]) -> Price:
    """Price what is rounded, as :func:`quantized_parts` names it.

    What was measured together counts as one; other prices are added, their errors in quadrature.
    Fine-tuning counts for what no study of pretraining has.
    """
    left, costs = dict.fromkeys(parts), []
    for kind in get_args(Kind):
        losses = [loss for loss in LOSSES if STUDIES[loss.study].kind == kind]
        together = dict.fromkeys(loss.quantized for loss in losses)
        for quantized in sorted(together, key=len, reverse=True):
            if all(part in left for part in quantized):
                costs.append(mean_of([loss for loss in losses if loss.quantized == quantized]))
                left = {part: None for part in left if part not in quantized}
    return _sum(costs, (), tuple(left))


def added_price(price: Price, before: Price) -> Price:
    """What a price has beyond another one: parts that only that one has come off."""
    more = [cost for cost in price.costs if cost not in before.costs]
    less = [cost for cost in before.costs if cost not in price.costs]
    return _sum(more, less, tuple(x for x in price.unmeasured if x not in before.unmeasured))


def _sum(more: Sequence[Cost], less: Sequence[Cost], unmeasured: tuple[str, ...]) -> Price:
    costs = (*more, *less)
    errors = [cost.error_percent for cost in costs if cost.error_percent is not None]
    if unmeasured and not costs:
        return Price(None, None, unmeasured, ())
    percent = math.fsum(x.percent for x in more) - math.fsum(x.percent for x in less)
    error = math.hypot(*errors) if len(errors) == len(costs) else None
    return Price(percent, error, unmeasured, costs)


def mean_of(losses: list[Loss]) -> Cost:
    """Mean of the largest models' results, by their errors, which grow if the results disagree."""
    largest = max(STUDIES[loss.study].parameters for loss in losses)
    losses = [x for x in losses if STUDIES[x.study].parameters * _SAME_SIZE >= largest]
    losses = [x for x in losses if x.error_percent is not None] or losses
    found = [(x.percent, x.error_percent) for x in losses if x.error_percent is not None]
    mean, error = math.fsum(x.percent for x in losses) / len(losses), None
    if found:
        weight = math.fsum(error**-2 for _, error in found)
        mean = math.fsum(percent * error**-2 for percent, error in found) / weight
        misfit = math.fsum(((percent - mean) / error) ** 2 for percent, error in found)
        error = math.sqrt(max(1.0, misfit / max(1, len(found) - 1)) / weight)
    return Cost(losses[0].quantized, mean, error, tuple(losses))
