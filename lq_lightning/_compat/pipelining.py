"""Orders of computation of torch's pipeline schedules.

Only the lists are taken from ``torch.distributed.pipelining``: what a schedule computes, in which
order, on which rank. They are the same in torch 2.11 to 2.15, where stages, runtimes and their
private attributes differ.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import torch

TorchSchedule = Literal["interleaved_1f1b", "zero_bubble", "zbv"]


def schedule_actions(
    schedule: TorchSchedule, pipeline_size: int, num_microbatches: int, stages_per_rank: int
) -> list[list[tuple[str, int, int]]]:
    """Return what each rank computes, in order, without a process group.

    Args:
        schedule: one of torch's schedules with several stages per rank.
        pipeline_size: ranks of the pipeline.
        num_microbatches: micro-batches of a step.
        stages_per_rank: stages on each rank.

    Returns:
        By rank, tuples of ``"F"`` (forward), ``"B"`` (backward), ``"I"`` (backward for inputs
        only) or ``"W"`` (backward for weights only), the stage, and the micro-batch.
    """
    # Imported here: it imports torch's compiler, which takes seconds.
    from torch.distributed.pipelining import schedules

    classes: dict[TorchSchedule, Any] = {
        "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
        "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
        "zbv": schedules.ScheduleZBVZeroBubble,
    }
    # What the constructors read of stages before they have made the lists.
    stages = [
        SimpleNamespace(
            num_stages=pipeline_size * stages_per_rank,
            group_size=pipeline_size,
            group_rank=0,
            stage_index=chunk * pipeline_size,
            is_first=chunk == 0,
            is_last=False,
            submod=torch.nn.Identity(),
        )
        for chunk in range(stages_per_rank)
    ]
    made = classes[schedule](stages, num_microbatches, scale_grads=False)
    return [
        [
            (action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in made.pipeline_order[rank]
            if action is not None
        ]
        for rank in range(pipeline_size)
    ]
