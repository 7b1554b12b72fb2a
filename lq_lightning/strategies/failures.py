"""Failing ranks and stop signals: all ranks stop, and the error says why."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from enum import IntEnum
from itertools import count
from pathlib import Path
from types import FrameType, TracebackType

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.distributed.fsdp import FSDPModule

from lq_lightning._compat.lightning import (
    is_between_steps,
    note_sigterm,
    replace_stop_check,
    requeue_checkpoint_path,
    trainer_of,
)
from lq_lightning._compat.torch import leave_note, meet, read_note, set_timeouts, store_has_ended
from lq_lightning.checkpoint.files import is_local, replace_link
from lq_lightning.foundation.groups import distrust_groups, note_failed_run
from lq_lightning.strategies.restarts import is_requeue_name, requeue, slurm_job

# how long ranks may fail one after the other and still save together: a slow batch
_TOGETHER = timedelta(seconds=60)
_failures = count()
_UNHANDLED = None, signal.SIG_DFL, signal.SIG_IGN
# how long to look for another rank's note of its failure, once a collective has failed
_LISTEN = timedelta(seconds=1)
# how long a rank whose error is another's waits before it ends, so that the other can print
_LET_CAUSE_PRINT = timedelta(seconds=2)
_CAUSE = "stopped because"
_LINE = "_lq_line"  # of an error, in place of its traceback
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


class Timeouts:
    """Lets ranks wait longer for each other in the start of a run than in its steps.

    Args:
        start: Until the first training batch is done; None leaves the choice to torch.
        steps: From then on.
    """

    def __init__(self, start: timedelta | None, steps: timedelta | None) -> None:
        self.start, self._steps = start, steps
        self._batches = 0

    def begin_run(self) -> None:
        """Wait as at the start in groups that a run before has made."""
        self._batches = 0
        self._set(self.start)

    def start_batch(self) -> None:
        """Wait as in steps from the second batch on."""
        self._batches += 1
        if self._batches == 2:
            self._set(self._steps)

    def _set(self, timeout: timedelta | None) -> None:
        differ = None not in (self.start, self._steps) and self.start != self._steps
        if differ and timeout is not None and dist.is_initialized():
            set_timeouts(timeout)


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
        self._requeue_after: SIGTERMException | None = None
        self._superseded: str | Path | None = None
        self.training_began = False
        self.why_not_saved: str | None = None

    def begin_run(self) -> None:
        """Forget the run before; all ranks call it equally often."""
        global _runs
        _runs += 1
        self._stop_signal, self.training_began, self.why_not_saved = None, False, None
        self._requeue_after = self._superseded = None

    def heed_stop_signal(self, trainer: Trainer, meet: Callable[[], bool] | None) -> None:
        """Let all ranks stop together after a signal; ``meet`` as in :class:`StopSignal`."""
        self._stop_signal = StopSignal(trainer, self._strategy.root_device, meet)

    def training_begins(self) -> None:
        """Note that there is something to continue from here on."""
        self.training_began = True
        if self._stop_signal is not None:
            self._stop_signal.begin()

    def training_ends(self) -> None:
        """Stop all ranks after a signal that no batch followed."""
        if self._stop_signal is not None:
            self._stop_signal.finish()

    def explained(self) -> AbstractContextManager[None]:
        """Turn a backend's connection errors inside into a :class:`LostRankError`."""
        return explain_lost_rank(self._strategy.global_rank, self._strategy.world_size)

    def tell_others(self, error: BaseException) -> str | None:
        """Leave a note of this error for ranks that will lose contact; nobody waits for it.

        Returns:
            The note of a rank that has failed before this one.
        """
        if self._strategy.world_size == 1 or isinstance(error, LostRankError):
            return None
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        rank = self._strategy.global_rank
        own = f"rank {rank} failed: {type(error).__name__}: {text}"
        first = leave_note(_note(), own)
        return None if first == own else first

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
            found = _lost_rank_error(exception, rank, world_size)
            _leave_traceback_to_cause(found)
            raise found from exception
        is_sharded = isinstance(self._strategy.model, FSDPModule)
        if is_sharded:
            _explain_sharded_use(exception)
        first = self.tell_others(exception)
        if first is not None and f"failed: {type(exception).__name__}:" in first:
            _print_one_line(exception, f"rank {rank} of {world_size} failed as another: {first}")
        _leave_traceback_to_cause(exception)
        stop = self._stop_signal
        if stop is not None and stop.requeues and isinstance(exception, SIGTERMException):
            self._save_for_requeue()
            self._requeue_after = exception

    def _save_for_requeue(self) -> None:
        """Save what the next start continues from; all ranks call it, after the callbacks.

        ``OnExceptionCheckpoint`` has done so: ``ckpt_path="last"`` and none at all find its file.
        Otherwise the checkpoint goes where Lightning looks under SLURM without ``ckpt_path``, and
        gets a name that ``"last"`` finds beside the files of ``ModelCheckpoint(save_last=True)``.
        """
        trainer = trainer_of(self._strategy.lightning_module)  # type: ignore[arg-type]
        if trainer is None:
            raise AssertionError("a run that is stopped has a Trainer")
        path = self._strategy.broadcast(requeue_checkpoint_path(trainer))
        folder, before = os.path.split(trainer.ckpt_path or "")
        if folder == os.path.dirname(path) and is_requeue_name(before):
            self._superseded = trainer.ckpt_path  # Lightning would prefer it to other checkpoints
        if any(isinstance(callback, OnExceptionCheckpoint) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            return
        trainer.save_checkpoint(path)
        links = trainer.is_global_zero and is_local(path) and self.why_not_saved is None
        for callback in trainer.checkpoint_callbacks if links else ():
            if isinstance(callback, ModelCheckpoint) and callback.save_last and callback.dirpath:
                name = f"{callback.CHECKPOINT_NAME_LAST}-requeued{callback.FILE_EXTENSION}"
                replace_link(Path(callback.dirpath, name), Path(path))

    def requeue(self) -> None:
        """Requeue the job of a run that was stopped for it, once saves are complete."""
        stopped_by, self._requeue_after = self._requeue_after, None
        if stopped_by is None or self.why_not_saved is not None or self._strategy.global_rank != 0:
            return
        if self._superseded is not None:
            self._strategy.remove_checkpoint(self._superseded)
        job = slurm_job()
        refusal = requeue(job)
        if refusal is None:
            rank_zero_info(f"SLURM job {job} is requeued")
            return
        stopped_by.code = 1  # else SLURM takes the job for complete
        rank_zero_warn(
            f"SLURM did not requeue job {job}: {refusal}. The checkpoint is complete: submit the "
            "job again. SLURM requeues batch jobs (`sbatch`) alone, and none with `--no-requeue`."
        )


def _leave_traceback_to_cause(error: BaseException) -> None:
    """Print no traceback if the error says which rank has the cause."""
    if isinstance(error, LostRankError) and _CAUSE in str(error):
        _print_one_line(error, str(error))


def _print_one_line(error: BaseException, text: str) -> None:
    """Let Python print lines in place of the traceback of an error that ends the process.

    The rank with the cause prints its own. A launcher stops it when this one ends, hence the wait.
    Hooks of others hear of the error all the same, and nothing here keeps it, with its tensors.
    """
    original = sys.excepthook
    error.__dict__[_LINE] = text.splitlines()[0]

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        line = value.__dict__.pop(_LINE, None)
        if line is None:
            original(kind, value, trace)
            return
        if line in str(value):
            value.args = (line,)
        else:  # its own text may be of another cause
            sys.stderr.write(f"{line}\n")
        value.__cause__, value.__suppress_context__ = None, True
        original(kind, value.with_traceback(None), None)
        sys.stderr.flush()
        time.sleep(_LET_CAUSE_PRINT.total_seconds())

    sys.excepthook = hook


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
        return LostRankError(f"rank {rank} of {world_size} {_CAUSE} {told}")
    if store_has_ended():
        return LostRankError(
            f"rank {rank} of {world_size} {_CAUSE} rank 0 (or the launcher) has ended. Look for "
            f"its error: {str(error).splitlines()[0]}"
        )
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


class _Request(IntEnum):
    """What a rank's signals ask for; of all ranks the greatest counts."""

    NONE = 0
    STOP = 1
    REQUEUE = 2


class StopSignal:
    """Lets all ranks stop before the same training batch once any of them has received a signal.

    That is SIGTERM, or the signal before the time limit of a SLURM job, after which the job is
    requeued. A requeued run continues bit for bit, so it stops only between optimizer steps, and a
    run that has reached its end is not requeued.

    Lightning broadcasts a flag of rank 0 before every batch and waits for all work of the device to
    read it (its issue 21487): nothing is left to overlap with the next batch, and a signal on
    another rank stops only that one. Here the flags of all ranks are reduced on a CUDA stream of
    their own, and the reduction read before a batch was started before the previous one, so the
    device keeps a batch of work. A signal takes effect one or two batches later; on a CPU, where
    the reduction is read at once, before the next batch. A validation within training is finished
    first. Where ranks do not meet before every batch, the flags are read at once where they do.

    While a run trains, ``trainer.received_sigterm`` becomes true only when all ranks know.

    Attributes:
        requeues: Whether the run stops for its job to be requeued.

    Args:
        trainer: Its signal handlers and check are replaced for the run that it is setting up.
        device: Device of the default process group.
        meet: Whether all ranks may wait for each other before the next batch, the same on all.
    """

    def __init__(
        self, trainer: Trainer, device: torch.device, meet: Callable[[], bool] | None = None
    ) -> None:
        self._trainer = trainer
        self._meet = meet
        self._device = device
        self._shared = dist.is_initialized() and dist.get_world_size() > 1
        self._requested = _Request.NONE
        self._agreed_on: int = _Request.NONE
        self.requeues = False
        self._pending: Callable[[], int] | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and self._shared:
            # high priority: the host waits for this, so it must not queue behind a matrix product
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._in_use = replace_stop_check(trainer, self._notify, self._notify_requeue, self._check)
        if not self._in_use:
            rank_zero_warn(
                "this version of Lightning has no check for SIGTERM that could be replaced: a "
                "signal on one rank may leave the others waiting for it."
            )
        if (signum := _requeue_signal(trainer)) and signal.getsignal(signum) not in _UNHANDLED:
            rank_zero_warn(
                f"this process has a handler of {signum.name} already, which stays: the signal "
                "does not stop training, and the SLURM job is not requeued."
            )

    def begin(self) -> None:
        """Listen where Lightning does not: under torchrun, or where the signal is ignored."""
        signum = _requeue_signal(self._trainer) if self._in_use else None
        in_main = threading.current_thread() is threading.main_thread()
        if signum and in_main and signal.getsignal(signum) in _UNHANDLED:
            signal.signal(signum, self._notify_requeue)  # Lightning restores what was before

    def _notify(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal; a handler may run anywhere, so it starts no collective."""
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self._requested:
            launcher.kill(signum)
        self._requested = max(self._requested, _Request.STOP)
        if self._trainer.state.fn != TrainerFn.FITTING:
            rank = self._trainer.global_rank
            rank_zero_info(f"[rank: {rank}] Received SIGTERM: {signum}")
            note_sigterm(self._trainer)

    def _notify_requeue(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal; SLURM sends it to all tasks, and to processes that they forked."""
        self._requested = _Request.REQUEUE

    def _check(self) -> None:
        if self._meet is not None and not self._meet():
            return
        self._agreed_on = max(self._agreed_on, self._agreed())
        if self._agreed_on == _Request.STOP or (
            self._agreed_on and is_between_steps(self._trainer)
        ):
            self._stop()

    def finish(self) -> None:
        """Heed a signal that came after the last check of a run; all ranks call this."""
        if self._in_use:
            self._agreed_on = max(self._agreed_on, self._start()())
        if self._agreed_on == _Request.STOP:
            self._stop()
        elif self._agreed_on:
            rank_zero_info("training has reached its end, so the SLURM job is not requeued")

    def _stop(self) -> None:
        """Stop as all ranks have agreed; a signal that comes now changes nothing any more."""
        note_sigterm(self._trainer)
        own = torch.tensor([int(self._requested)], device=self._device)
        flags = [own]
        if self._shared:
            flags = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(flags, own)
        signalled = ", ".join(str(rank) for rank, flag in enumerate(flags) if flag)
        name, then = "SIGTERM", ""
        self.requeues = self._agreed_on == _Request.REQUEUE
        if self.requeues:
            signum = _requeue_signal(self._trainer)
            name, then = signum.name if signum else "a signal", ", save, and the job is requeued"
        rank_zero_info(
            f"Received {name} (rank {signalled} of {len(flags)}): all ranks stop after optimizer "
            f"step {self._trainer.global_step}{then}"
        )
        self._trainer.strategy.barrier("SIGTERM")
        raise SIGTERMException

    def _agreed(self) -> int:
        """What to do before this batch, the same on every rank."""
        if self._stream is None or self._meet is not None:
            return self._start()()
        previous, self._pending = self._pending, self._start()
        return _Request.NONE if previous is None else previous()

    def _start(self) -> Callable[[], int]:
        """Start a reduction of all flags; calling the result waits for it."""
        if self._stream is None:
            flag = torch.tensor([int(self._requested)], dtype=torch.int32)
            if self._shared:
                dist.all_reduce(flag, dist.ReduceOp.MAX)
            return lambda: int(flag.item())
        result = torch.empty(1, dtype=torch.int32, pin_memory=True)
        # on this stream alone, so that the copy waits for the reduction and for nothing of the step
        with torch.cuda.stream(self._stream):
            flag = torch.full((1,), int(self._requested), dtype=torch.int32, device=self._device)
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            result.copy_(flag, non_blocking=True)
            # blocking: the host sleeps in `synchronize` instead of spinning
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self._stream)

        def read() -> int:
            done.synchronize()
            return int(result.item())

        return read


def _requeue_signal(trainer: Trainer) -> signal.Signals | None:
    """The signal before the time limit of a SLURM job; None where it is left alone."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if not isinstance(environment, SLURMEnvironment):
        in_job = dist.is_torchelastic_launched() and "SLURM_JOB_ID" in os.environ
        return signal.SIGUSR1 if in_job else None
    asked = environment.requeue_signal if environment.auto_requeue else None
    return None if asked is None else signal.Signals(asked)
