"""Batches of a pipeline: all of its ranks have to draw the same ones."""

from __future__ import annotations

import os
from functools import partial

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader, RandomSampler

from lq_lightning.strategies.pipelines.ranks import PipelineRanks

__all__ = ["draw_alike"]


def draw_alike(loader: object, ranks: PipelineRanks) -> None:
    """Let the ranks of a pipeline shuffle alike where no ``DistributedSampler`` does.

    torch shuffles with the default random generator, which stages use differently (dropout in
    other layers), and with ``seed_everything(..., workers=True)`` Lightning seeds workers by their
    rank. All ranks of the pipeline call this in one order.

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
    if loader.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", "0")):
        replica = ranks.stage_group.rank()
        loader.worker_init_fn = partial(pl_worker_init_function, rank=replica)
    if isinstance(loader.sampler, RandomSampler) and loader.sampler.generator is None:
        loader.sampler.generator = generator
