"""Stop all ranks at the same batch after SIGTERM, without waiting for the device before each."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lq_lightning._compat import note_sigterm, replace_stop_check

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

    Args:
        device: Where the ranks of the default process group keep their tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._requested = False
        self._pending: Callable[[], bool] | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def install(self, trainer: Trainer) -> None:
        """Replace the signal handler and the check of the run that the Trainer is setting up."""

        def notify(signum: int, frame: FrameType | None) -> None:
            launcher = trainer.strategy.launcher
            if launcher is not None and not self._requested:
                launcher.kill(signum)
            self._requested = True  # a handler may run anywhere, so it starts no collective
            if trainer.state.fn != TrainerFn.FITTING:
                note_sigterm(trainer)

        def check() -> None:
            if self._agreed():
                note_sigterm(trainer)
                trainer.strategy.barrier("SIGTERM")
                raise SIGTERMException

        replace_stop_check(trainer, notify, check)

    def _agreed(self) -> bool:
        if self._stream is None:
            return self._reduce_on_cpu()
        previous, self._pending = self._pending, self._start_reduction(self._stream)
        return previous is not None and previous()

    def _reduce_on_cpu(self) -> bool:
        flag = torch.tensor([self._requested], dtype=torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def _start_reduction(self, stream: torch.cuda.Stream) -> Callable[[], bool]:
        result = torch.empty(1, dtype=torch.int32, pin_memory=True)
        with torch.cuda.stream(stream):
            flag = torch.full((1,), int(self._requested), dtype=torch.int32, device=self._device)
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            result.copy_(flag, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)

        def read() -> bool:
            done.synchronize()
            return bool(result.item())

        return read
