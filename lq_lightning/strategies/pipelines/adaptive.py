"""Boundaries in learned widths: finds the callback that learns them, and connects it."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch.callbacks import Callback

from lq_lightning.pipeline.boundary_widths import BoundaryWidths, LearnsWidths, boundaries_between
from lq_lightning.pipeline.mixed import MixedCodec
from lq_lightning.pipeline.plan import PipelinePlan
from lq_lightning.strategies.pipelines.options import PipelineOptions
from lq_lightning.strategies.pipelines.ranks import PipelineRanks
from lq_lightning.strategies.pipelines.run import PipelineRun

__all__ = ["check_learner", "connect_learner"]


def check_learner(owner: str, options: PipelineOptions, callbacks: Iterable[Callback]) -> None:
    """Check that widths are learned if, and only if, hidden states travel in them.

    Raises:
        ValueError: Either of both is missing.
    """
    learner = _learner(callbacks)
    travels = options.forward_codec == "amaq"
    if travels and learner is None:
        raise ValueError(
            f'`{owner}(forward_codec="amaq")` sends hidden states in widths that `AdaptiveBits` '
            "learns, but there is none in the Trainer: add `lq_lightning.AdaptiveBits()` to its "
            'callbacks, or choose another codec, such as "tah5".'
        )
    if learner is not None and not travels:
        name = type(learner).__name__
        raise ValueError(
            f"`{name}` learns the widths of what crosses the boundaries of stages, but `{owner}"
            f"(forward_codec={options.forward_codec!r})` sends that otherwise: set "
            f'forward_codec="amaq", or remove `{name}`.'
        )


def connect_learner(
    callbacks: Iterable[Callback],
    run: PipelineRun,
    options: PipelineOptions,
    ranks: PipelineRanks,
    plan: PipelinePlan,
) -> None:
    """Give the boundaries to the callback that learns their widths, if there is one.

    All ranks of the run call this together.
    """
    learner, codec = _learner(callbacks), run.codecs[0]
    if learner is None or not isinstance(codec, MixedCodec):
        return
    names = [f"{layers[-1]}:output" for layers in plan.stages[:-1]]
    learner.connect_boundaries(
        BoundaryWidths(
            boundaries_between(options.schedule, names, ranks.size),
            run.engine,
            codec,
            ranks.control_group,
            ranks.stage_control_group,
        ),
        run.module,
    )


def _learner(callbacks: Iterable[Callback]) -> LearnsWidths | None:
    return next((each for each in callbacks if isinstance(each, LearnsWidths)), None)
