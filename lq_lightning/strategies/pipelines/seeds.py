"""Seeds of the batches of a pipeline: from them come the random numbers of a step."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lq_lightning.pipeline.random_numbers import mixed_seed

__all__ = ["BatchSeeds"]


class BatchSeeds:
    """Seeds that are the same on all stages of a pipeline, and differ between batches and replicas.

    They are functions of the seed of the run and of where training is, both of which checkpoints
    hold, so that a resumed run goes on with the numbers of the one that was interrupted.

    Args:
        replica: Index of this pipeline among the replicas.

    Attributes:
        of_run: Seed that all ranks share; set before the first batch.
    """

    def __init__(self, replica: int) -> None:
        self.of_run = 0
        self._replica = replica
        self._evaluating: tuple[object, ...] = ()
        self._evaluated = 0

    def next(self, trainer: Trainer, step: str, training: bool) -> int:
        """Return the seed of the batch that comes now; call it once for each.

        Args:
            trainer: Of the run.
            step: Name of the module's method.
            training: Whether it is a batch of training.
        """
        place: tuple[object, ...]
        if training:
            place = (trainer.current_epoch, trainer.fit_loop.batch_idx)
        else:
            evaluating = (step, trainer.sanity_checking, trainer.global_step)
            self._evaluated = self._evaluated + 1 if evaluating == self._evaluating else 0
            self._evaluating = evaluating
            place = (*evaluating, self._evaluated)
        return mixed_seed(self.of_run, self._replica, training, *place)
