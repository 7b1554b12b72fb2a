"""Orthogonalized updates of matrices, each by one of the ranks that hold its pieces.

[Note: rounds]

Newton-Schulz iterations need whole matrices. Each matrix has an owner among the ranks that hold its
pieces. The pieces of its update travel there once, in bf16 or as codes, and the pieces of the
result travel back: 4 bytes per parameter in bf16, of which a rank keeps its own. Owners are chosen
so that all have about as much to compute.

Matrices are handled in rounds, so that no rank owns more than 64 MiB of updates in one, or one
matrix that is larger. A round holds the pieces of this rank, the matrices that it owns, and
up to three times as much while these are multiplied; while that goes on, the pieces of the next
round are on their way.

A mesh of several axes (FSDP2 and tensor parallelism) takes one exchange per axis, the last axis
first. All ranks derive the same rounds from shapes and placements, and take part in the same
exchanges in the same order, provided that they have gradients of the same parameters.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lq_lightning._compat.tensors import ShardGrid, pieces_of_ranks, shard_grid
from lq_lightning._compat.torch import copy_all
from lq_lightning.codecs import CodecSpec, decode, encode
from lq_lightning.kernels.optimizer_step import PreparedTensor

_ALIGNED = 8  # elements, so that the kernel reads and writes 16 bytes at once
_ROW = 4096  # elements of a message of a codec

Key = tuple[int, tuple[int, ...]]
"""A piece: number of its matrix, and coordinates of the rank that holds it."""
Pieces = tuple[tuple[Key, ...], ...]
"""Those of each rank of a group, in the order in which they are sent."""
Views = dict[Key, Tensor]


def learning_rate_ratio(shape: Sequence[int], adjust: str | None) -> float:
    """Factor of the learning rate of a matrix, as ``adjust_lr_fn`` of ``torch.optim.Muon`` says."""
    rows, columns = shape
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def orthogonalize(
    x_NAB: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Move the singular values of matrices toward one.

    Args:
        x_NAB: ``[N, A, B]`` bf16, overwritten.
        coefficients: Of ``x``, its third and its fifth power.
        steps: Iterations.
        eps: Smallest norm to divide by.

    Returns:
        ``[N, A, B]`` bf16, each as ``torch.optim.Muon`` computes it.
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


class Hop(NamedTuple):
    """One exchange: the pieces that go to each rank of a group, and those that come from each."""

    group: dist.ProcessGroup
    sent: Pieces
    received: Pieces

    @property
    def back(self) -> Hop:
        """The exchange that returns everything."""
        return Hop(self.group, self.received, self.sent)


@dataclass(slots=True, eq=False)
class Round:
    """Matrices whose updates are orthogonalized together.

    Attributes:
        matrices: Numbers of the matrices.
        owned: Those that this rank computes.
        pieces: Index of each piece in its matrix.
        hops: Exchanges from the ranks that hold pieces to the owners.
        local: Pieces of this rank, by the rank to which they go.
        codec: Of pieces on their way; None sends bf16.
        prepared: What the kernel knows of the updates, by matrix, for the next step.
    """

    matrices: tuple[int, ...]
    owned: tuple[int, ...]
    pieces: dict[Key, tuple[slice, ...]]
    hops: list[Hop]
    local: Pieces
    codec: CodecSpec | None
    prepared: dict[int, PreparedTensor] = field(default_factory=dict)
    _shapes: dict[Key, tuple[int, int]] = field(init=False)
    _known: dict[int, list[int]] = field(default_factory=dict)  # sizes, by the id of pieces

    def __post_init__(self) -> None:
        """Compute what each step needs."""
        self._shapes = {
            key: (rows.stop - rows.start, columns.stop - columns.start)
            for key, (rows, columns) in self.pieces.items()
        }

    def buffer(self, sides: Pieces, device: torch.device) -> tuple[Tensor, Views]:
        """A buffer of zeros for the pieces of each rank, and the pieces in it."""
        flat = torch.zeros(sum(self._sizes(sides)), dtype=torch.bfloat16, device=device)
        return flat, self._views(flat, sides)

    def gathered(self, flat: Tensor) -> Generator[None, None, Views]:
        """Bring the pieces of a buffer of ``local`` to the owners.

        Yields when each exchange has begun, and returns the pieces of the matrices that are owned.
        """
        return (yield from self._travel(flat, self.local, self.hops))

    def scattered(self, flat: Tensor) -> Generator[None, None, Views]:
        """Bring the pieces of a buffer of ``collected`` to the ranks that hold them."""
        hops = [hop.back for hop in reversed(self.hops)]
        return (yield from self._travel(flat, self.collected, hops))

    @property
    def collected(self) -> Pieces:
        """Pieces of the matrices that this rank owns, by the rank from which they come."""
        return self.hops[-1].received if self.hops else self.local

    def _travel(
        self, flat: Tensor, sides: Pieces, hops: Sequence[Hop]
    ) -> Generator[None, None, Views]:
        views = self._views(flat, sides)
        for number, hop in enumerate(hops):
            if number:
                flat, onward = self.buffer(hop.sent, flat.device)
                copy_all(tuple(onward.values()), tuple(views[key] for key in onward))
            received = yield from self._exchanged(flat, hop)
            views = self._views(received, hop.received)
        return views

    def _exchanged(self, flat: Tensor, hop: Hop) -> Generator[None, None, Tensor]:
        arriving, leaving, codec = self._sizes(hop.received), self._sizes(hop.sent), self.codec
        if codec is not None:
            flat = encode(codec, flat.view(-1, _ROW)).view(-1)
            nbytes = codec.nbytes(_ROW)
            arriving = [size // _ROW * nbytes for size in arriving]
            leaving = [size // _ROW * nbytes for size in leaving]
        received = flat.new_empty(sum(arriving))
        work = dist.all_to_all_single(
            received, flat, arriving, leaving, group=hop.group, async_op=True
        )
        yield
        work.wait()
        if codec is None:
            return received
        rows = received.view(-1, codec.nbytes(_ROW))
        return decode(codec, rows, _ROW, dtype=torch.bfloat16).view(-1)

    def _views(self, flat: Tensor, sides: Pieces) -> Views:
        views, start = {}, 0
        for keys, size in zip(sides, self._sizes(sides), strict=True):
            at = start
            for key in keys:
                rows, columns = shape = self._shapes[key]
                views[key] = flat[at : at + rows * columns].view(shape)
                at += _rounded(rows * columns, _ALIGNED)
            start += size
        return views

    def _sizes(self, sides: Pieces) -> list[int]:
        sizes = self._known.get(id(sides))
        if sizes is None:
            step = _ALIGNED if self.codec is None else _ROW
            rooms = {
                key: _rounded(math.prod(shape), _ALIGNED) for key, shape in self._shapes.items()
            }
            sizes = [_rounded(sum(rooms[key] for key in keys), step) for keys in sides]
            self._known[id(sides)] = sizes
        return sizes

    def orthogonalize(
        self,
        views: Views,
        shapes: Sequence[torch.Size],
        groups: Sequence[Mapping[str, Any]],
        device: torch.device,
    ) -> Tensor:
        """Orthogonalize the matrices that this rank owns.

        Args:
            views: Their pieces.
            shapes: Shape of each matrix of all rounds.
            groups: Parameter group of each.
            device: Device of the rank, which may own none.

        Returns:
            A buffer of ``collected``.
        """
        flat, results = self.buffer(self.collected, device)
        alike: dict[Any, list[int]] = defaultdict(list)
        for number in self.owned:
            group = groups[number]
            options = (tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"])
            alike[shapes[number], options].append(number)
        for (shape, options), numbers in alike.items():
            if not shape.numel():
                continue
            whole = flat.new_empty(len(numbers), *shape)
            rows = {number: row for row, number in enumerate(numbers)}
            keys = [key for key in views if key[0] in rows]
            places = [(rows[key[0]], self.pieces[key]) for key in keys]
            parts = tuple(whole[row][piece] for row, piece in places)
            copy_all(parts, tuple(views[key] for key in keys))
            whole = orthogonalize(whole, *options)
            parts = tuple(whole[row][piece] for row, piece in places)
            copy_all(tuple(results[key] for key in keys), parts)
        return flat


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
        pieces = {n: pieces_of_ranks(params[n]) for n in numbers}
        ranks = list(pieces[numbers[0]])
        load, held = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
        owners: dict[int, tuple[int, ...]] = {}
        for number in sorted(numbers, key=lambda n: (-_cost(params[n]), tuple(params[n].shape), n)):
            owner = min(ranks, key=lambda rank: load[rank])
            nbytes = 2 * params[number].numel()
            if held[owner] and held[owner] + nbytes > most:
                rounds.append(_round(grid, owners, pieces, codec))
                owners, held = {}, dict.fromkeys(ranks, 0)
            owners[number] = owner
            load[owner] += _cost(params[number])
            held[owner] += nbytes
        rounds.append(_round(grid, owners, pieces, codec))
    return rounds


def _cost(param: Tensor) -> int:
    """Multiplications of an iteration."""
    short, long = sorted(param.shape)
    return short * short * (2 * long + short)


def _round(
    grid: ShardGrid,
    owners: Mapping[int, tuple[int, ...]],
    pieces: Mapping[int, Mapping[tuple[int, ...], tuple[slice, ...]]],
    codec: CodecSpec | None,
) -> Round:
    own, hops = grid.own, []
    ranks = list(pieces[next(iter(owners))])
    for axis in reversed(range(len(own))):
        # Owners along the axes behind this one have the pieces of all ranks along these.
        held = [n for n, owner in owners.items() if owner[axis + 1 :] == own[axis + 1 :]]

        hops.append(
            Hop(
                grid.mesh.get_group(grid.axes[axis]),  # type: ignore[union-attr]  # it has axes
                *_exchanged(axis, own, grid.sizes[axis], held, owners, ranks),
            )
        )
    return Round(
        matrices=tuple(owners),
        owned=tuple(n for n, owner in owners.items() if owner == own),
        pieces={(n, rank): pieces[n][rank] for n in owners for rank in ranks},
        hops=hops,
        local=hops[0].sent if hops else (tuple((n, own) for n in owners),),
        codec=codec,
    )


def _exchanged(
    axis: int,
    own: tuple[int, ...],
    size: int,
    held: Sequence[int],
    owners: Mapping[int, tuple[int, ...]],
    ranks: Sequence[tuple[int, ...]],
) -> list[Pieces]:
    """Pieces that this rank sends to each rank along an axis, and those that it receives."""

    def pieces(owner: int, source: int) -> tuple[Key, ...]:
        at = (*own[:axis], source)
        numbers = [n for n in held if owners[n][axis] == owner]
        return tuple((n, rank) for n in numbers for rank in ranks if rank[: axis + 1] == at)

    sent = tuple(pieces(peer, own[axis]) for peer in range(size))
    return [sent, tuple(pieces(own[axis], peer) for peer in range(size))]
