"""What slow networks are given instead of every gradient, on emulated nodes: thin matrices, codes
and what they left out, and steps that nodes take alone.

Between nodes weights are replicated, as under DDP: what travels is averaged by an all-reduce, which
sends each value ``2 (N - 1) / N`` times. Within a node gradients are averaged in full precision.

Shape legend: S trainings, W ranks as N nodes of L, a x b a matrix, K messages (N, or 1 where only
their mean counts).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ablation_data import Data
from emulated_codes import LibraryCode
from emulated_ranks import Plan, Tensors
from loss_variants import Preset
from stacked_training import Lane, StackedTraining, order_of
from torch import Tensor

MIN_NUMEL = 4096  # smaller parameters travel in full precision
_MIN_RATE = 2  # as torch's PowerSGD: fewer values than a half, or all of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """What nodes send of a gradient; what they leave out is added to the next one.

    Attributes:
        rank: Of PowerSGD's two thin matrices (Vogels et al., 2019); 0 for none.
        factors: Code of their columns; None sends fp32.
        code: Of what those leave out; None sends none of it.
        turns: In each step one of so many parameters sends its remainder, in turn.
        start: Steps in full precision before that.
    """

    rank: int = 0
    factors: LibraryCode | None = None
    code: LibraryCode | None = None
    turns: int = 1
    start: int = 0

    def compresses(self, shape: Sequence[int]) -> bool:
        """Whether a parameter has thin matrices."""
        if self.rank == 0 or len(shape) < 2:
            return False
        rank = min(self.rank, *shape)
        return sum(shape) * rank * _MIN_RATE < math.prod(shape)

    def encodes(self, shape: Sequence[int]) -> bool:
        """Whether the remainder of a parameter is sent."""
        return self.code is not None and len(shape) > 1 and math.prod(shape) >= MIN_NUMEL

    def bits(self, shapes: Mapping[str, Sequence[int]], nodes: int) -> float:
        """Bits that a node sends per parameter of the model and step, behind ``start``."""
        sent = 0.0
        for shape in shapes.values():
            numel = math.prod(shape)
            if self.compresses(shape):
                thin = sum(shape) * min(self.rank, *shape)
                sent += thin * (self.factors.spec.bits_per_element(thin) if self.factors else 32)
            if self.encodes(shape) and self.code is not None:
                sent += self.code.spec.bits_per_element(numel) * numel / self.turns
            elif not self.compresses(shape):
                sent += 32 * numel
        total = sum(math.prod(shape) for shape in shapes.values())
        return 2 * (nodes - 1) / nodes * sent / total


class Reducer:
    """Averages gradients of S trainings over their nodes and keeps what it left out.

    Args:
        config: What is sent.
        nodes: N.

    Attributes:
        factors: Thin right matrices ``[S, b, rank]`` of the step before, by parameter; drawn at
            the first step.
    """

    def __init__(self, config: Reduction, nodes: int) -> None:
        self.config, self._nodes, self._step = config, nodes, 0
        self.factors: Tensors = {}
        self._lost: Tensors = {}  # [S, K, a, b], by each node
        self._lost_sums: Tensors = {}  # [S, a, b], by the owners of sums, which they encode again

    @torch.no_grad()
    def reduce(self, gradients: Mapping[str, Tensor]) -> Tensors:
        """Return means ``[S, *shape]`` fp32 of ``[S, W, *shape]`` gradients."""
        step, config = self._step, self.config
        self._step += 1
        found = {}
        for index, (name, gradient) in enumerate(gradients.items()):
            shape = gradient.shape[2:]
            thin, coded = config.compresses(shape), config.encodes(shape)
            if step < config.start or not (thin or coded):
                found[name] = gradient.float().mean(dim=1)
                continue
            # Without codes all is linear, and only the mean over nodes counts.
            nodes = self._nodes if coded or config.factors else 1
            own = gradient.float().unflatten(1, (nodes, -1)).mean(dim=2)
            turn = coded and (step + index) % config.turns == 0
            found[name] = self._reduce(name, own, thin, turn)
        return found

    def _reduce(self, name: str, own: Tensor, thin: bool, turn: bool) -> Tensor:
        """Reduce ``[S, K, a, b]`` to ``[S, a, b]``; ``own`` is overwritten."""
        if name in self._lost:
            own += self._lost[name]
        total = torch.zeros_like(own[:, 0])
        if thin:
            left, right, sent = self._factorize(name, own)
            total += left @ right.mT
            own -= left[:, None] @ sent.mT
        if turn:
            kept = self._lost_sums.get(name)
            mean, lost = coded_mean(self._code(), own, kept)
            total += mean
            self._lost_sums[name] = lost
        self._lost[name] = own
        return total

    def _code(self) -> LibraryCode:
        if self.config.code is None:
            raise AssertionError("a remainder is sent in a code")
        return self.config.code

    def _factorize(self, name: str, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Find thin matrices of the mean of ``[S, K, a, b]``.

        Returns:
            The left one ``[S, a, r]``, the right one ``[S, b, r]``, and each node's share of the
            right one, ``[S, K, b, r]``, of which it is the mean.
        """
        rank = min(self.config.rank, *own.shape[2:])
        if name not in self.factors:
            generator = torch.Generator().manual_seed(own[0, 0].numel())
            drawn = torch.randn(rank, own.shape[3], generator=generator).mT.to(own.device)
            self.factors[name] = drawn.expand(len(own), -1, -1)
        start = torch.linalg.qr(self.factors[name])[0]
        left = torch.linalg.qr(self._mean_of_columns(own @ start[:, None])[0])[0]
        self.factors[name], sent = self._mean_of_columns(own.mT @ left[:, None])
        return left, self.factors[name], sent

    def _mean_of_columns(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Average ``[S, K, a, r]`` over K; return also each node's share of what has arrived."""
        code = self.config.factors
        if code is None:
            return own.mean(dim=1), own
        # Columns are of very different norms, so none shares a scale. What is sent is subtracted.
        columns = own.mT.clone(memory_format=torch.contiguous_format)
        mean, lost = coded_mean(code, columns)
        return mean.mT, own - columns.mT - lost[:, None].mT


def coded_mean(code: LibraryCode, own: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Average in codes as ``QuantizedAllReduce`` does: encode, sum in fp32, encode the sum.

    Args:
        code: Of both.
        own: ``[S, K, ...]`` fp32, a value of each node; what its message lacks remains in it.
        kept: ``[S, ...]``, what messages of sums lacked before; None for nothing.

    Returns:
        The mean ``[S, ...]``, and what its message lacks.
    """
    trainings, nodes, shape = len(own), own.shape[1], own.shape[2:]
    rows = own.reshape(trainings * nodes, -1)
    sent = code.encode(rows)
    code.reduce(sent[None], rows, -1.0, add=True)
    own.copy_(rows.view_as(own))
    mean = rows.new_empty(trainings, rows.shape[1])
    each = sent.unflatten(0, (trainings, nodes)).transpose(0, 1).contiguous()
    code.reduce(each, mean, 1.0 / nodes)
    if kept is not None:
        mean += kept.flatten(1)
    found = torch.empty_like(mean)
    code.reduce(code.encode(mean)[None], found)
    return found.unflatten(1, shape), (mean - found).unflatten(1, shape)


class ReducedTraining(StackedTraining):
    """Trainings whose gradients a :class:`Reducer` averages.

    Args:
        reduction: What it sends.
        base: Arguments of the base, the fourth of which is N.
    """

    def __init__(self, reduction: Reduction, *base: Any) -> None:
        super().__init__(*base)
        self.reducer = Reducer(reduction, nodes=base[3])

    def take_step(self, plan: Plan) -> Tensor:
        """Train on the next batches; return the mean loss of each training, ``[S]``."""
        found, gradients = self.backward()
        self.update(self.reducer.reduce(gradients), plan)
        return found


# --- steps that nodes take alone ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSteps:
    """Nodes train alone and exchange how far they went (DiLoCo, Douillard et al., 2023).

    Attributes:
        every: Steps between two exchanges.
        code: Of the differences; None sends fp32.
        lr: Of the outer SGD, whose gradient is the mean difference.
        momentum: Of the outer SGD, Nesterov's.
        late: Steps that nodes go on with while differences travel, fewer than ``every``.
    """

    every: int
    code: LibraryCode | None = None
    lr: float = 0.7
    momentum: float = 0.6
    late: int = 0

    def bits(self, shapes: Mapping[str, Sequence[int]], nodes: int) -> float:
        """Bits that a node sends per parameter of the model and step."""
        code = Reduction(code=self.code) if self.code is not None else Reduction()
        return code.bits(shapes, nodes) / self.every


class LocalTraining(StackedTraining):
    """S trainings of N nodes each, which have weights and an optimizer of their own.

    Args:
        local: When and how they exchange.
        data: What is read.
        preset: Sizes; ``steps`` is a multiple of ``local.every``, so that a run ends with one set
            of weights.
        lanes: The S trainings.
        more: N, and what else the base takes.

    Raises:
        ValueError: The run would end between two exchanges.
    """

    def __init__(
        self, local: LocalSteps, data: Data, preset: Preset, lanes: Sequence[Lane], *more: Any
    ) -> None:
        nodes, *rest = more
        if preset.steps % local.every:
            raise ValueError(
                f"{preset.steps} steps end between two exchanges of every {local.every}: give a "
                "multiple"
            )
        self._local, self._nodes = local, nodes
        each = [lane for lane in lanes for _ in range(nodes)]
        super().__init__(data, preset, each, 1, *rest)
        self._anchors = {n: w.detach()[::nodes].clone() for n, w in self.masters.items()}
        self._velocity = {n: torch.zeros_like(w) for n, w in self._anchors.items()}
        self._sent: dict[str, tuple[Tensor, Tensor]] = {}

    def read_order(self, blocks: int) -> Tensor:
        """Return what each node's ranks read: its share of what the ranks of one training do."""
        world = self._nodes * self.world_size
        orders = [
            order_of(blocks, self.preset, lane.seed, world).unflatten(1, (self._nodes, -1))
            for lane in self.lanes[:: self._nodes]
        ]
        return torch.stack(orders, dim=1).flatten(1, 2)

    def take_step(self, plan: Plan) -> Tensor:
        """Train on the next batches; return the mean loss of each training, ``[S]``."""
        found = super().take_step(plan)
        behind = self.step % self._local.every
        if behind == 0:
            self._send()
        if behind == self._local.late and self._sent:
            self._arrive()
        return found.unflatten(0, (-1, self._nodes)).mean(dim=1)

    def validate(self) -> Tensor:
        """Mean loss of each training, ``[S]`` fp64; its nodes have the same weights."""
        if self._sent:
            self._arrive()
        return super().validate()[:: self._nodes]

    @torch.no_grad()
    def _send(self) -> None:
        for name, master in self.masters.items():
            own = self._anchors[name][:, None] - master.unflatten(0, (-1, self._nodes))
            self._sent[name] = self._mean(own), master.detach().clone()

    @torch.no_grad()
    def _arrive(self) -> None:
        """Take the outer step; what nodes have learned since they sent stays."""
        for name, (mean, then) in self._sent.items():
            anchor, velocity = self._anchors[name], self._velocity[name]
            velocity.mul_(self._local.momentum).add_(mean)
            anchor -= self._local.lr * (mean + self._local.momentum * velocity)
            since = self.masters[name] - then  # zero, exactly, where nothing is late
            self.masters[name].copy_(anchor.repeat_interleave(self._nodes, dim=0) + since)
        self._sent.clear()
        self.ranks.publish(self.masters, Plan())

    def _mean(self, own: Tensor) -> Tensor:
        """Average ``[S, N, ...]`` over N, in codes where the parameter has some."""
        code = self._local.code
        if code is None or not Reduction(code=code).encodes(own.shape[2:]):
            return own.mean(dim=1)
        return coded_mean(code, own)[0]
