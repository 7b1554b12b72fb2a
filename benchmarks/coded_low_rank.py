"""PowerSGD whose thin matrices travel in 8 bits: a prototype of a hook for DDP."""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with classes.

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lq_lightning.data_parallel import GradientQuantization, QuantizedAllReduce

_MIN_RATE = 2  # as torch's hook: fewer values than a half, or all of them
_RIDGE = 1e-13  # of the mean square of a matrix, so that one of lower rank has a factorization


@dataclass(slots=True)
class _Kept:
    """What a bucket keeps from step to step.

    Attributes:
        lost: ``[N]``, what this rank's messages have lacked.
        rights: ``[rank, b]`` for each matrix, those of the step before.
    """

    lost: Tensor
    rights: list[Tensor]


class CodedLowRank:
    """State of :func:`coded_low_rank_hook`.

    As torch's PowerSGD (Vogels et al., 2019) with warm start and error feedback, but the columns of
    thin matrices travel in 8 bits, are made orthonormal by Cholesky's factorization of their
    products in fp64, and all of that runs on a stream of its own without waiting for the device.
    Before step ``start`` whole gradients travel in 8 bits.

    Args:
        rank: Of the thin matrices.
        start: The first step of low rank; 2 or more, since DDP rebuilds its buckets before that.
        node_size: Ranks of a node.
    """

    def __init__(self, rank: int, start: int, node_size: int) -> None:
        codec = GradientQuantization(inter_bits=8).codec("inter")
        self._rank, self._start, self._steps = rank, start, 0
        self._reduce = QuantizedAllReduce(
            codec=codec, min_nbytes=0, min_quantized_numel=512, node_size=node_size
        )
        self._kept: dict[int, _Kept] = {}
        self._stream: torch.cuda.Stream | None = None

    def start(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """Start to average a bucket; the future holds it."""
        whole = self._steps < self._start
        self._steps += bucket.is_last()
        buffer = bucket.buffer()
        if whole:
            return self._reduce.average_async(buffer, [p.shape for p in bucket.parameters()])
        if not buffer.is_cuda:
            self._average(bucket.index(), buffer, bucket.gradients())
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done
        if self._stream is None:
            self._stream = torch.cuda.Stream(buffer.device, priority=-1)
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device])
        with torch.cuda.stream(self._stream):
            self._average(bucket.index(), buffer, bucket.gradients())
            future.set_result(buffer)
        return future

    @torch.no_grad()
    def _average(self, index: int, buffer: Tensor, gradients: list[Tensor]) -> None:
        """Replace gradients, which are views of ``buffer``, by what ranks know of their mean."""
        thin = [g.view(len(g), -1) for g in gradients if self._compresses(g)]
        rest = [g for g in gradients if not self._compresses(g)]
        if index not in self._kept:
            self._kept[index] = _Kept(torch.zeros_like(buffer), [self._draw(g) for g in thin])
        kept = self._kept[index]
        buffer.add_(kept.lost)
        kept.lost.copy_(buffer)
        lefts = self._mean([s @ g.mT for s, g in zip(orthonormal(kept.rights), thin, strict=True)])
        lefts = orthonormal(lefts)
        own = [left @ g for left, g in zip(lefts, thin, strict=True)]
        kept.rights = self._mean(own)
        start = buffer.storage_offset()
        for left, mine, right, g in zip(lefts, own, kept.rights, thin, strict=True):
            first = g.storage_offset() - start
            lost = kept.lost[first : first + g.numel()].view_as(g)
            lost.addmm_(left.mT, mine, alpha=-1.0)
            torch.mm(left.mT, right, out=g)
        if rest:
            joined = torch.cat([g.flatten() for g in rest]).div_(dist.get_world_size())
            dist.all_reduce(joined)
            for g, mean in zip(rest, joined.split([g.numel() for g in rest]), strict=True):
                g.copy_(mean.view_as(g))
                first = g.storage_offset() - start
                kept.lost[first : first + g.numel()] = 0

    def _compresses(self, gradient: Tensor) -> bool:
        if gradient.dim() < 2:
            return False
        rows, columns = len(gradient), gradient[0].numel()
        rank = min(self._rank, rows, columns)
        return (rows + columns) * rank * _MIN_RATE < gradient.numel()

    def _draw(self, gradient: Tensor) -> Tensor:
        """Return what all ranks draw alike, ``[rank, b]``."""
        generator = torch.Generator().manual_seed(gradient.numel())
        rank = min(self._rank, *gradient.shape)
        return torch.randn(rank, gradient.shape[1], generator=generator).to(gradient)

    def _mean(self, own: list[Tensor]) -> list[Tensor]:
        """Average matrices over all ranks in 8 bits; each row has scales of its own."""
        if not own:
            return []
        joined = torch.cat([x.flatten() for x in own])
        self._reduce.average_bucket_(joined, [x.shape for x in own])
        ends = [0, *accumulate(x.numel() for x in own)]
        return [joined[a:b].view_as(x) for (a, b), x in zip(pairwise(ends), own, strict=True)]


def orthonormal(rows: list[Tensor]) -> list[Tensor]:
    """Make the rows of each ``[r, n]`` orthonormal; the span stays, rows of rank 0 vanish.

    Never waits for the device. Rows that depend on each other end shorter than 1.
    """
    if not rows:
        return []
    exact = [x.double() for x in rows]
    products = torch.stack([x @ x.mT for x in exact])
    squares = products.diagonal(dim1=1, dim2=2)
    squares += _RIDGE * squares.mean(dim=1, keepdim=True) + torch.finfo(torch.float64).tiny
    factors = torch.linalg.cholesky_ex(products)[0]
    found = [
        torch.linalg.solve_triangular(f, x, upper=False)
        for f, x in zip(factors, exact, strict=True)
    ]
    return [y.to(x.dtype) for y, x in zip(found, rows, strict=True)]


def coded_low_rank_hook(
    state: CodedLowRank,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket by thin matrices in 8 bits: a communication hook of DDP."""
    return state.start(bucket)
