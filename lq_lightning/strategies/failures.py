"""Say which kind of failure it was when another rank has gone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

__all__ = ["LostRankError", "explain_lost_rank", "is_lost_rank"]

# gloo, TCPStore and NCCL words for "the other side is not there any more"
_LOST = re.compile(
    r"connection (closed|reset|refused|was likely closed)|broken pipe|timed out waiting"
    r"|application timeout caused pair closure|failed to recv, got 0 bytes|remote process exited"
    r"|ncclremoteerror|ncclsystemerror|watchdog caught collective operation timeout"
    r"|nccl communicator was aborted|wait timeout|socket timeout|heartbeat",
    re.IGNORECASE,
)


class LostRankError(RuntimeError):
    """A collective failed because another rank died or stopped answering."""


def is_lost_rank(error: BaseException) -> bool:
    """Whether a collective failed because of another rank, judging by the backend's message."""
    ours = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )
    return ours and bool(_LOST.search(str(error)))


def lost_rank_error(error: BaseException, rank: int, world_size: int) -> LostRankError:
    """An error that names what happened instead of the socket that noticed it."""
    return LostRankError(
        f"rank {rank} of {world_size} lost contact with another rank, which died or got stuck: "
        f"{str(error).splitlines()[0]}\n"
        "Look for the first error in the output of the other ranks (a Python exception, 'Killed' "
        "for out of memory, or a signal). This rank is not the cause."
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
