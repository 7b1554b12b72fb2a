"""What kind of failure it was: of all ranks, of another one, or shards were used as if whole."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count

import torch.distributed as dist

from lq_lightning._compat.torch import leave_note, meet, read_note

__all__ = [
    "LostRankError",
    "begin_run",
    "explain_lost_rank",
    "explain_sharded_use",
    "is_lost_rank",
    "is_refused_for_shards",
    "lost_rank_error",
    "tell_others",
    "why_not_saved",
]

# How long ranks may fail one after the other and still save together: a slow batch.
_TOGETHER = timedelta(seconds=60)
_failures = count()
# How long to look for what another rank says of its failure, once a collective has failed.
_LISTEN = timedelta(seconds=1)
_runs = 0

# gloo, TCPStore and NCCL words for "the other side is not there any more"
_LOST = re.compile(
    r"connection (closed|reset|refused|was likely closed)|broken pipe|timed out waiting"
    r"|application timeout caused pair closure|failed to recv, got 0 bytes|remote process exited"
    r"|ncclremoteerror|ncclsystemerror|watchdog caught collective operation timeout"
    r"|nccl communicator was aborted|wait timeout|socket timeout|heartbeat",
    re.IGNORECASE,
)

# torch's words for an operation that does not take DTensors, or not together with other tensors
_SHARDED = re.compile(
    r"mixed torch\.Tensor and DTensor|does not have a sharding strategy|sharding propagation failed"
    r"|in-place operations that require placement changes|unevenly sharded tensor",
    re.IGNORECASE,
)


class LostRankError(RuntimeError):
    """A collective failed because another rank died, stopped answering or ended its run."""


def is_lost_rank(error: BaseException) -> bool:
    """Whether a collective failed because of another rank, judging by the backend's message."""
    ours = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )
    return ours and bool(_LOST.search(str(error)))


def begin_run() -> None:
    """Forget errors of runs before; all ranks call it equally often."""
    global _runs
    _runs += 1


def tell_others(error: BaseException, rank: int) -> None:
    """Let ranks that will lose contact with this one know its error. Nobody waits for them."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    leave_note(_note(), f"rank {rank} failed: {type(error).__name__}: {text}")


def _note() -> str:
    return f"lq_lightning/run {_runs} failed"


def lost_rank_error(error: BaseException, rank: int, world_size: int) -> LostRankError:
    """An error that names what happened instead of the socket that noticed it."""
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
    """Turn a backend's connection errors into a :class:`LostRankError`.

    Raises:
        LostRankError: A collective inside the context lost its peer.
    """
    try:
        yield
    except LostRankError:
        raise
    except RuntimeError as error:
        if world_size > 1 and is_lost_rank(error):
            raise lost_rank_error(error, rank, world_size) from error
        raise


def why_not_saved(global_step: int, training_began: bool) -> str | None:
    """Find out, on a rank that fails, why there is no checkpoint to save; None if there is.

    All ranks save together. One that fails alone would wait for others that wait for it in a step,
    until the timeout of the run, and the error would not be seen before.

    Args:
        global_step: Of the run; ranks at different ones have no common state.
        training_began: Whether there is anything to continue from.
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


def explain_sharded_use(error: BaseException) -> None:
    """Put what to do in front of torch's message about an operation on sharded parameters."""
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
