"""Stop all ranks at the same batch after SIGTERM, without waiting for the device before each."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lq_lightning._compat.lightning import note_sigterm, replace_stop_check

__all__ = ["StopSignal"]


class StopSignal:
    """Lets all ranks stop before the same training batch once any of them has received SIGTERM.

    Lightning broadcasts a flag of rank 0 before every batch and waits until the device has computed
    everything to read it (its issue 21487): nothing is left to overlap the next batch with, and a
    signal on another rank only stops that one. Here the flags of all ranks are reduced on a CUDA
    stream of their own, and what is read before a batch is the reduction that was started before
    the previous one, so the device keeps a batch of work. A signal takes effect one or two batches
    later; on a CPU, where the reduction is read at once, before the next batch. A validation within
    training is finished first.

    Where ranks do not meet before every batch, the flags are read at once where they do.

    While a run trains, ``trainer.received_sigterm`` becomes true only when all ranks know.

    Args:
        trainer: Whose signal handler and check are replaced, for the run that it is setting up.
        device: Where the ranks of the default process group keep their tensors.
        meet: Whether all ranks may wait for each other before the next batch, the same on all.
    """

    def __init__(
        self, trainer: Trainer, device: torch.device, meet: Callable[[], bool] | None = None
    ) -> None:
        self._trainer = trainer
        self._meet = meet
        self._device = device
        self._requested = False
        self._pending: Callable[[], bool] | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # High priority: the host waits for this, so it must not queue behind a matrix product.
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._in_use = replace_stop_check(trainer, self._notify, self._check)
        if not self._in_use:
            rank_zero_warn(
                "this version of Lightning has no check for SIGTERM that could be replaced: a "
                "signal on one rank may leave the others waiting for it."
            )

    def _notify(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal. A handler may run anywhere, so it starts no collective."""
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self._requested:
            launcher.kill(signum)
        self._requested = True
        if self._trainer.state.fn != TrainerFn.FITTING:
            rank_zero_info(f"[rank: {dist.get_rank()}] Received SIGTERM: {signum}")
            note_sigterm(self._trainer)

    def _check(self) -> None:
        if (self._meet is None or self._meet()) and self._agreed():
            self._stop()

    def finish(self) -> None:
        """Heed a signal that came after the last check of a run. All ranks call this.

        Raises:
            SIGTERMException: On all ranks.
        """
        if self._in_use and self._start()():
            self._stop()

    def _stop(self) -> None:
        note_sigterm(self._trainer)
        own = torch.tensor([int(self._requested)], device=self._device)
        flags = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(flags, own)
        signalled = ", ".join(str(rank) for rank, flag in enumerate(flags) if flag)
        rank_zero_info(
            f"Received SIGTERM (rank {signalled} of {len(flags)}): all ranks stop after optimizer "
            f"step {self._trainer.global_step}"
        )
        self._trainer.strategy.barrier("SIGTERM")
        raise SIGTERMException

    def _agreed(self) -> bool:
        """Return whether to stop before this batch, the same on every rank."""
        if self._stream is None or self._meet is not None:
            return self._start()()
        previous, self._pending = self._pending, self._start()
        return previous is not None and previous()

    def _start(self) -> Callable[[], bool]:
        """Start a reduction of all flags; the result waits for it."""
        if self._stream is None:
            flag = torch.tensor([self._requested], dtype=torch.int32)
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            return lambda: bool(flag.item())
        result = torch.empty(1, dtype=torch.int32, pin_memory=True)
        with torch.cuda.stream(self._stream):
            flag = torch.full((1,), int(self._requested), dtype=torch.int32, device=self._device)
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            result.copy_(flag, non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self._stream)

        def read() -> bool:
            done.synchronize()
            return bool(result.item())

        return read
