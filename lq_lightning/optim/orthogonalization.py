"""Orthogonalized updates of matrices, each by one of the ranks that hold its pieces.

[Note: rounds] Each matrix has an owner, to which the pieces of its update travel, and from which
those of the result return. Matrices are handled in rounds, of which a rank holds its pieces, the
matrices that it owns, and up to three times as much while these are multiplied; meanwhile the
pieces of the next round are on their way. All ranks derive the same rounds from shapes and
placements, and take part in the same exchanges in the same order, provided that they have gradients
of the same parameters, in the same order. Replicas multiply the same batches of matrices, hence get
the same bits.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lq_lightning._compat.tensors import ShardGrid, piece_of_rank, shard_grid
from lq_lightning._compat.torch import copy_all
from lq_lightning.codecs import CodecSpec, decode, encode

_ALIGNED = 8  # elements, so that the kernel reads and writes 16 bytes at once
_ROW = 4096  # elements of a message of a codec

Rank = tuple[int, ...]
"""Coordinates along the axes that cut a matrix."""
Key = tuple[int, Rank]
"""A piece: number of its matrix, and the rank that holds it."""
Kind = tuple[torch.Size, tuple[Any, ...]]
"""Shape of a matrix, and options of :func:`orthogonalize`."""
Views = dict[Key, Tensor]
Index = dict[Key, tuple[slice, ...]]


def learning_rate_ratio(shape: Sequence[int], adjust: str | None) -> float:
    """Factor of the learning rate of a matrix, as ``adjust_lr_fn`` of ``torch.optim.Muon`` says."""
    rows, columns = shape
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def orthogonalize(
    x_NAB: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Move the singular values of bf16 matrices, which are overwritten, toward one.

    ``coefficients`` are of ``x``, its third and its fifth power, ``eps`` is the smallest norm to
    divide by. Each matrix becomes what ``torch.optim.Muon`` computes.
    """
    a, b, c = coefficients
    upright = x_NAB.shape[1] > x_NAB.shape[2]
    x = x_NAB.mT if upright else x_NAB
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.mT.contiguous() if upright else x  # to be cut in few launches


class Pieces:
    """Pieces of each rank of a group, as they lie in the flat bf16 buffer of an exchange."""

    def __init__(self, keys_of_ranks: Sequence[Sequence[Key]], index: Index, step: int) -> None:
        self.sizes: list[int] = []  # elements of each rank
        self.places: dict[Key, tuple[int, int, int]] = {}  # first element, rows, columns
        first = 0
        for keys in keys_of_ranks:
            at = first
            for key in keys:
                rows, columns = (part.stop - part.start for part in index[key])
                self.places[key] = (at, rows, columns)
                at += _rounded(rows * columns, _ALIGNED)
            self.sizes.append(_rounded(at - first, step))
            first += self.sizes[-1]

    def buffer(self, device: torch.device) -> tuple[Tensor, Views]:
        """A buffer of zeros, and the pieces in it."""
        flat = torch.zeros(sum(self.sizes), dtype=torch.bfloat16, device=device)
        return flat, self.views(flat)

    def views(self, flat: Tensor) -> Views:
        """The pieces in a buffer."""
        return {
            key: flat[at : at + rows * columns].view(rows, columns)
            for key, (at, rows, columns) in self.places.items()
        }


class Hop(NamedTuple):
    """One exchange: the pieces that go to each rank of a group, and those that come from each."""

    group: dist.ProcessGroup
    sent: Pieces
    received: Pieces


@dataclass(slots=True, eq=False)
class Round:
    """Matrices whose updates are orthogonalized together.

    Attributes:
        owned: Numbers of those that this rank computes.
        index: Of each piece in its matrix.
        local: Pieces of this rank.
        hops: Exchanges from the ranks that hold pieces to the owners.
        codec: Of pieces on their way; None sends bf16.
    """

    owned: list[int]
    index: Index
    local: Pieces
    hops: list[Hop]
    codec: CodecSpec | None

    def updated(self, flat: Tensor, kinds: Sequence[Kind]) -> Generator[None, None, Views]:
        """Orthogonalize all matrices of the round; yields when each exchange has begun.

        Args:
            flat: A buffer of ``local``.
            kinds: Of the matrices of all rounds.

        Returns:
            The pieces of ``local`` in the results.
        """
        views = yield from self._travel(flat, self.local, self.hops)
        collected = self.hops[-1].received if self.hops else self.local
        flat, results = collected.buffer(flat.device)
        self._orthogonalize(views, results, kinds)
        del views, results
        back = [Hop(hop.group, hop.received, hop.sent) for hop in reversed(self.hops)]
        return (yield from self._travel(flat, collected, back))

    def _travel(
        self, flat: Tensor, pieces: Pieces, hops: Sequence[Hop]
    ) -> Generator[None, None, Views]:
        views = pieces.views(flat)
        for number, hop in enumerate(hops):
            if number:
                flat, onward = hop.sent.buffer(flat.device)
                copy_all(tuple(onward.values()), tuple(views[key] for key in onward))
            flat = yield from self._exchanged(flat, hop)
            views = hop.received.views(flat)
        return views

    def _exchanged(self, flat: Tensor, hop: Hop) -> Generator[None, None, Tensor]:
        arriving, leaving, codec = hop.received.sizes, hop.sent.sizes, self.codec
        if codec is not None:
            flat = encode(codec, flat.view(-1, _ROW)).view(-1)
            nbytes = codec.nbytes(_ROW)
            arriving, leaving = ([n // _ROW * nbytes for n in s] for s in (arriving, leaving))
        received = flat.new_empty(sum(arriving))
        work = dist.all_to_all_single(
            received, flat, arriving, leaving, group=hop.group, async_op=True
        )
        yield
        work.wait()  # `flat` lives until here
        if codec is None:
            return received
        rows = received.view(-1, codec.nbytes(_ROW))
        return decode(codec, rows, _ROW, dtype=torch.bfloat16).view(-1)

    def _orthogonalize(self, views: Views, results: Views, kinds: Sequence[Kind]) -> None:
        alike: dict[Kind, list[int]] = defaultdict(list)
        for number in self.owned:
            if kinds[number][0].numel():
                alike[kinds[number]].append(number)
        for (shape, options), numbers in alike.items():
            rows = {number: row for row, number in enumerate(numbers)}
            keys = [key for key in views if key[0] in rows]
            whole = views[keys[0]].new_empty(len(numbers), *shape)
            parts = tuple(whole[rows[key[0]]][self.index[key]] for key in keys)
            copy_all(parts, tuple(views[key] for key in keys))
            whole = orthogonalize(whole, *options)
            parts = tuple(whole[rows[key[0]]][self.index[key]] for key in keys)
            copy_all(tuple(results[key] for key in keys), parts)


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step


def plan_rounds(params: Sequence[Tensor], most: int, codec: CodecSpec | None = None) -> list[Round]:
    """Choose owners and rounds of matrices.

    Args:
        params: Matrices, whole or sharded; the same on all ranks.
        most: Bytes of updates in bf16 that a rank may own in a round, unless one matrix is larger.
        codec: Of pieces on their way; None sends bf16.

    Raises:
        NotImplementedError: A rank's part of a matrix is no contiguous block.
    """
    by_grid: dict[ShardGrid, list[int]] = defaultdict(list)
    for number, param in enumerate(params):
        by_grid[shard_grid(param)].append(number)
    rounds: list[Round] = []
    for grid, numbers in by_grid.items():
        ranks = list(itertools.product(*map(range, grid.sizes)))
        load, held = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
        owners: dict[int, Rank] = {}
        for number in sorted(numbers, key=lambda n: (-_cost(params[n]), tuple(params[n].shape), n)):
            owner, nbytes = min(ranks, key=load.__getitem__), 2 * params[number].numel()
            if held[owner] and held[owner] + nbytes > most:
                rounds.append(_round(grid, owners, params, codec))
                owners, held = {}, dict.fromkeys(ranks, 0)
            owners[number] = owner
            load[owner] += _cost(params[number])
            held[owner] += nbytes
        rounds.append(_round(grid, owners, params, codec))
    return rounds


def _cost(param: Tensor) -> int:
    """Multiplications of an iteration."""
    short, long = sorted(param.shape)
    return short * short * (2 * long + short)


def _round(
    grid: ShardGrid, owners: Mapping[int, Rank], params: Sequence[Tensor], codec: CodecSpec | None
) -> Round:
    own, index, hops = grid.own, {}, []
    step = _ALIGNED if codec is None else _ROW

    def pieces(keys_of_ranks: Sequence[Sequence[Key]]) -> Pieces:
        for key in itertools.chain.from_iterable(keys_of_ranks):
            index[key] = piece_of_rank(params[key[0]], key[1])
        return Pieces(keys_of_ranks, index, step)

    for axis in reversed(range(len(own))):
        # Owners along the axes behind this one have the pieces of all ranks along these.
        held = [n for n, owner in owners.items() if owner[axis + 1 :] == own[axis + 1 :]]
        behind = list(itertools.product(*map(range, grid.sizes[axis + 1 :])))
        sent: list[list[Key]] = [[] for _ in range(grid.sizes[axis])]
        for n in held:
            sent[owners[n][axis]] += [(n, own[: axis + 1] + rest) for rest in behind]
        received = [
            [(n, (*own[:axis], peer, *rank[axis + 1 :])) for n, rank in sent[own[axis]]]
            for peer in range(grid.sizes[axis])
        ]
        group = grid.mesh.get_group(grid.axes[axis])  # type: ignore[union-attr]  # it has axes
        hops.append(Hop(group, pieces(sent), pieces(received)))
    return Round(
        owned=[n for n, owner in owners.items() if owner == own],
        index=index,
        local=hops[0].sent if hops else pieces([[(n, own) for n in owners]]),
        hops=hops,
        codec=codec,
    )
