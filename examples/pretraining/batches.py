"""Batches of blocks in an order that can be resumed anywhere.

The order of an epoch is one permutation of all blocks, drawn from the seed and the epoch. A step
takes the next ``world_size * batch_size`` blocks of it and each rank its own part, so the samples
of a step depend neither on how many ranks share them nor on the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pretraining.corpus import Blocks


class BlockBatches(IterableDataset[Tensor]):
    """``len()`` batches of blocks, starting anywhere in the order and crossing into new epochs.

    Args:
        blocks: The samples.
        batch_size: Blocks per batch on this rank.
        rank: This rank.
        world_size: Number of ranks that share each step.
        seed: Seed of the order; ``None`` goes by number.

    Raises:
        ValueError: there are not enough blocks for one step.
    """

    def __init__(
        self,
        blocks: Blocks,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int | None = None,
    ) -> None:
        self.blocks = blocks
        self.share = slice(rank * batch_size, (rank + 1) * batch_size)
        self.step_size = world_size * batch_size
        self.seed = seed
        self.epoch, self.samples = 0, 0  # where iteration starts
        if len(blocks) < self.step_size:
            raise ValueError(
                f"{len(blocks)} blocks are not enough for one step of {world_size} ranks with "
                f"`--data.batch_size={batch_size}`. Lower the batch size or `--data.block_size`, "
                "hold out a larger share of the files, or give more text."
            )

    def __len__(self) -> int:
        """Return how many steps an epoch has."""
        return len(self.blocks) // self.step_size

    def advance(self, epoch: int, samples: int) -> tuple[int, int]:
        """Return the start of the step at ``samples`` of ``epoch``, which may be a new epoch's."""
        return (epoch, samples) if samples + self.step_size <= len(self.blocks) else (epoch + 1, 0)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield ``[batch_size, block_size + 1]`` int64 tensors; workers take turns."""
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        epoch, samples = self.epoch, self.samples
        for step in range(len(self)):
            before = epoch
            epoch, samples = self.advance(epoch, samples)
            if step == 0 or epoch != before:
                order = self._order(epoch)
            if step % stride == first:
                chosen = order[samples : samples + self.step_size][self.share]
                yield torch.from_numpy(self.blocks[chosen].astype(np.int64))
            samples += self.step_size

    def _order(self, epoch: int) -> np.ndarray:
        if self.seed is None:
            return np.arange(len(self.blocks))
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.blocks))


class ResumableLoader(DataLoader[Tensor]):
    """A DataLoader that knows how far training got and continues there.

    Lightning stores ``state_dict()`` in every checkpoint by itself.

    Args:
        batches: The training batches.
        num_workers: Processes that read ahead.
        identity: What must be equal for the order to mean the same, stored with the position.
    """

    def __init__(
        self, batches: BlockBatches, *, num_workers: int, identity: dict[str, Any]
    ) -> None:
        pin = torch.cuda.is_available()
        super().__init__(batches, batch_size=None, num_workers=num_workers, pin_memory=pin)
        self._batches = batches
        self._identity = identity

    def __iter__(self) -> Iterator[Tensor]:
        """Yield batches and count each as soon as it is handed out."""
        order = self._batches
        for batch in super().__iter__():
            order.epoch, order.samples = order.advance(order.epoch, order.samples)
            order.samples += order.step_size
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch that was handed out."""
        position = {"epoch": self._batches.epoch, "samples": self._batches.samples}
        return {**self._identity, **position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` returned on any number of ranks.

        Raises:
            ValueError: the checkpoint's position belongs to other data or another order.
        """
        stored = {name: state.get(name) for name in self._identity}
        if stored != self._identity:
            raise ValueError(
                f"The checkpoint stopped inside {stored}, but this run reads {self._identity}. "
                "Resume with the same `--data` options, or start this data from its beginning "
                "with `--data.restart=true`."
            )
        self._batches.epoch, self._batches.samples = state["epoch"], state["samples"]
