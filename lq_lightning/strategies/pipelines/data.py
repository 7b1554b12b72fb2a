"""Batches of a pipeline: all of its ranks have to draw the same ones."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, RandomSampler

from lq_lightning.strategies.pipelines.ranks import PipelineRanks

__all__ = ["draw_alike"]


def draw_alike(loader: object, ranks: PipelineRanks) -> None:
    """Let the ranks of a pipeline shuffle alike where no ``DistributedSampler`` does.

    torch shuffles with the default random generator, which stages use differently (dropout in
    other layers). All ranks of the pipeline call this in one order.

    Args:
        loader: Left alone unless it is a ``DataLoader`` that draws from the default generator.
        ranks: Of the run.
    """
    if not isinstance(loader, DataLoader):
        return
    seed = torch.empty((), dtype=torch.int64).random_()
    dist.broadcast(seed, group=ranks.control_group, group_src=0)
    generator = torch.Generator().manual_seed(int(seed))
    if loader.generator is None:
        loader.generator = generator  # of workers' seeds
    if isinstance(loader.sampler, RandomSampler) and loader.sampler.generator is None:
        loader.sampler.generator = generator
