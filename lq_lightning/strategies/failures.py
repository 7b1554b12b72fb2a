"""Failing ranks and stop signals: all ranks stop, and the error says why."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from itertools import count
from types import FrameType

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.distributed.fsdp import FSDPModule

from lq_lightning._compat.lightning import note_sigterm, replace_stop_check, trainer_of
from lq_lightning._compat.torch import leave_note, meet, read_note
from lq_lightning.foundation.groups import distrust_groups, note_failed_run

# how long ranks may fail one after the other and still save together: a slow batch
_TOGETHER = timedelta(seconds=60)
_failures = count()
# how long to look for another rank's note of its failure, once a collective has failed
_LISTEN = timedelta(seconds=1)
_runs = 0

# words of gloo, TCPStore and NCCL for a peer that is gone
_LOST = re.compile(
    r"connection (closed|reset|refused|was likely closed)|broken pipe|timed out waiting"
    r"|application timeout caused pair closure|failed to recv, got 0 bytes|remote process exited"
    r"|ncclremoteerror|ncclsystemerror|watchdog caught collective operation timeout"
    r"|nccl communicator was aborted|wait timeout|socket timeout|heartbeat",
    re.IGNORECASE,
)

# torch's words for an operation that does not take DTensors, or not along with other tensors
_SHARDED = re.compile(
    r"mixed torch\.Tensor and DTensor|does not have a sharding strategy|sharding propagation failed"
    r"|in-place operations that require placement changes|unevenly sharded tensor",
    re.IGNORECASE,
)


class LostRankError(RuntimeError):
    """A collective failed because another rank died, stopped answering or ended its run."""


class Failures:
    """Handles failing ranks and stop signals of a strategy.

    Attributes:
        training_began: Whether there is anything to continue from.
        why_not_saved: Reason why this failing rank cannot write a checkpoint with the others; None
            if it can, or has not failed.
    """

    def __init__(self, strategy: ModelParallelStrategy) -> None:
        self._strategy = strategy
        self._stop_signal: StopSignal | None = None
        self.training_began = False
        self.why_not_saved: str | None = None

    def begin_run(self) -> None:
        """Forget the run before; all ranks call it equally often."""
        global _runs
        _runs += 1
        self._stop_signal, self.training_began, self.why_not_saved = None, False, None

    def heed_stop_signal(self, trainer: Trainer, meet: Callable[[], bool] | None) -> None:
        """Let all ranks stop together after SIGTERM; ``meet`` as in :class:`StopSignal`."""
        self._stop_signal = StopSignal(trainer, self._strategy.root_device, meet)

    def training_ends(self) -> None:
        """Stop all ranks after a signal that no batch followed."""
        if self._stop_signal is not None:
            self._stop_signal.finish()

    def explained(self) -> AbstractContextManager[None]:
        """Turn a backend's connection errors inside into a :class:`LostRankError`."""
        return explain_lost_rank(self._strategy.global_rank, self._strategy.world_size)

    def tell_others(self, error: BaseException) -> None:
        """Leave a note of this error for ranks that will lose contact; nobody waits for it."""
        if self._strategy.world_size > 1 and not isinstance(error, LostRankError):
            text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
            rank = self._strategy.global_rank
            leave_note(_note(), f"rank {rank} failed: {type(error).__name__}: {text}")

    def can_save(self, module: LightningModule) -> bool:
        """Whether all ranks are here to save; each save asks before its first collective.

        ``OnExceptionCheckpoint`` saves on every rank that fails, perhaps on one alone.
        """
        trainer = trainer_of(module)
        if trainer is None or not (trainer.state.fn == TrainerFn.FITTING and trainer.interrupted):
            self.why_not_saved = None
        elif self.why_not_saved is None:  # else another callback has waited for the others
            self.why_not_saved = _why_not_saved(trainer.global_step, self.training_began)
        return self.why_not_saved is None

    def warn_not_saved(self, filepath: object) -> None:
        """Say why a checkpoint is not written."""
        warnings.warn(
            f"rank {self._strategy.global_rank}: `{filepath}` is not saved: {self.why_not_saved}. "
            "What is there stays.",
            stacklevel=3,
        )

    def explain(self, exception: BaseException) -> None:
        """Say which rank failed and whether another is the cause, or explain a use of shards."""
        rank, world_size = self._strategy.global_rank, self._strategy.world_size
        explained = isinstance(exception, LostRankError)
        if explained or is_lost_rank(exception):
            distrust_groups()
        else:
            note_failed_run()
        if world_size > 1 and is_lost_rank(exception) and not explained:
            raise _lost_rank_error(exception, rank, world_size) from exception
        is_sharded = isinstance(self._strategy.model, FSDPModule)
        if is_sharded:
            _explain_sharded_use(exception)
        self.tell_others(exception)


def is_lost_rank(error: BaseException) -> bool:
    """Whether a collective failed because of another rank, judging by the backend's message."""
    ours = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )
    return ours and bool(_LOST.search(str(error)))


def _note() -> str:
    return f"lq_lightning/run {_runs} failed"


def _lost_rank_error(error: BaseException, rank: int, world_size: int) -> LostRankError:
    """An error that names the cause instead of the socket that noticed it."""
    told = read_note(_note(), _LISTEN)
    if told is not None:
        return LostRankError(f"rank {rank} of {world_size} stopped because {told}")
    return LostRankError(
        f"rank {rank} of {world_size} lost contact with another rank, which died, got stuck "
        f"or ran out of batches: {str(error).splitlines()[0]}\n"
        "Look for the first error in the output of the other ranks (a Python exception, 'Killed' "
        "for out of memory, or a signal). If there is none, one has ended before the others: give "
        "every rank equally many batches."
    )


@contextmanager
def explain_lost_rank(rank: int, world_size: int) -> Iterator[None]:
    """Turn a backend's connection errors into a :class:`LostRankError`."""
    try:
        yield
    except LostRankError:
        raise
    except RuntimeError as error:
        if world_size > 1 and is_lost_rank(error):
            raise _lost_rank_error(error, rank, world_size) from error
        raise


def _why_not_saved(global_step: int, training_began: bool) -> str | None:
    """Reason why a failing rank has no checkpoint to save; None if it has one.

    All ranks save together. One that fails alone would wait for others that wait for it in a step,
    and its error would not be seen before the timeout. Ranks at different steps have no common
    state.
    """
    if not training_began:
        return "the run failed before training began, so that there is nothing to continue from"
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    error, attempt = sys.exc_info()[1], next(_failures)
    if error is not None and (isinstance(error, LostRankError) or is_lost_rank(error)):
        return "another rank has gone or has ended its run, and all are needed for a checkpoint"
    place = f"{type(error).__name__} at step {global_step}"
    if meet(f"lq_lightning/failure {attempt}: {place}", _TOGETHER):
        return None
    return (
        f"this rank failed ({type(error).__name__}: {error}), but not all ranks did so at step "
        f"{global_step} within {_TOGETHER.total_seconds():.0f} s, and all are needed for a "
        "checkpoint"
    )


def is_refused_for_shards(error: BaseException) -> bool:
    """Whether torch has no form of an operation for sharded tensors, judging by its message."""
    return isinstance(error, (RuntimeError, NotImplementedError)) and bool(
        _SHARDED.search(str(error))
    )


def _explain_sharded_use(error: BaseException) -> None:
    if not is_refused_for_shards(error):
        return
    error.args = (
        "an operation got a parameter, gradient or optimizer state that is sharded over the ranks "
        "(a DTensor) and cannot handle it. Parameters are whole inside of modules; outside of the "
        "step methods they are shards, and in `training_step` those of units are: call modules "
        "(`self.net(x)`) instead of using the weights of one directly, on all ranks; read a whole "
        "parameter with `p.full_tensor()`, or use those that belong to no unit inside of `with "
        "self.trainer.strategy.root_forward():`. If an optimizer's step is what failed, it does "
        f"not work on shards: take another one, such as AdamW. torch says: {error}",
    )


class StopSignal:
    """Lets all ranks stop before the same training batch once any of them has received SIGTERM.

    Lightning broadcasts a flag of rank 0 before every batch and waits for all work of the device to
    read it (its issue 21487): nothing is left to overlap with the next batch, and a signal on
    another rank stops only that one. Here the flags of all ranks are reduced on a CUDA stream of
    their own, and the reduction read before a batch was started before the previous one, so the
    device keeps a batch of work. A signal takes effect one or two batches later; on a CPU, where
    the reduction is read at once, before the next batch. A validation within training is finished
    first. Where ranks do not meet before every batch, the flags are read at once where they do.

    While a run trains, ``trainer.received_sigterm`` becomes true only when all ranks know.

    Args:
        trainer: Its signal handler and check are replaced for the run that it is setting up.
        device: Device of the default process group.
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
            # high priority: the host waits for this, so it must not queue behind a matrix product
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._in_use = replace_stop_check(trainer, self._notify, self._check)
        if not self._in_use:
            rank_zero_warn(
                "this version of Lightning has no check for SIGTERM that could be replaced: a "
                "signal on one rank may leave the others waiting for it."
            )

    def _notify(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal; a handler may run anywhere, so it starts no collective."""
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
        """Heed a signal that came after the last check of a run; all ranks call this."""
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
        """Whether to stop before this batch, the same on every rank."""
        if self._stream is None or self._meet is not None:
            return self._start()()
        previous, self._pending = self._pending, self._start()
        return previous is not None and previous()

    def _start(self) -> Callable[[], bool]:
        """Start a reduction of all flags; calling the result waits for it."""
        if self._stream is None:
            flag = torch.tensor([self._requested], dtype=torch.int32)
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            return lambda: bool(flag.item())
        result = torch.empty(1, dtype=torch.int32, pin_memory=True)
        # on this stream alone, so that the copy waits for the reduction and for nothing of the step
        with torch.cuda.stream(self._stream):
            flag = torch.full((1,), int(self._requested), dtype=torch.int32, device=self._device)
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            result.copy_(flag, non_blocking=True)
            # blocking: the host sleeps in `synchronize` instead of spinning
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self._stream)

        def read() -> bool:
            done.synchronize()
            return bool(result.item())

        return read
