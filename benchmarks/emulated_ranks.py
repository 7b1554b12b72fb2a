"""The collectives of ``quantized_fsdp`` without ranks: one process computes every message.

For S independent trainings at once, each on W ranks. Slots, groups, order of sums and codecs are
those of ``lq_lightning.data_parallel`` (``reduce_scatter.py``, ``all_gather.py``): with the same
gradients every rank of a real job has these weights, bit for bit.

Shape legend: S trainings, W ranks as N nodes of L, n elements of a rank's slot, K messages to sum.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from emulated_stages import Stages
from torch import Tensor

from lq_lightning.codecs import CodecSpec, decode_reduce, decode_reduce_encode, encode
from lq_lightning.data_parallel import LocalSteps
from lq_lightning.data_parallel.unit import (
    MessageLayout,
    Run,
    Segment,
    full_precision_reason,
    keep_small_runs_exact,
    merge_over_small_gaps,
    segment_runs,
)

Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Codes:
    """Codecs of one collective, which round to nearest: real ranks draw noise of their own.

    Attributes:
        inter: Between nodes; of weight differences everywhere.
        intra: Within a node, of gradients; None as between nodes.
        vocabulary: Instead of ``inter`` for embeddings and heads; None as all others.
    """

    inter: CodecSpec
    intra: CodecSpec | None = None
    vocabulary: CodecSpec | None = None

    def __post_init__(self) -> None:
        """Refuse rounding that depends on the rank and on the place of a row."""
        for spec in (self.inter, self.intra, self.vocabulary):
            if spec is not None and spec.rounding != "nearest":
                raise ValueError(f"{spec} rounds at random: emulated ranks round to nearest only")

    def of(self, level: str) -> list[CodecSpec]:
        """Return the codecs of most parameters, and of the vocabulary."""
        if level == "intra" and self.intra is not None:
            return [self.intra, self.intra]
        return [self.inter, self.vocabulary or self.inter]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Codes of weight differences and gradients; None sends them in full precision.

    Attributes:
        exact: Regular expression of parameters that travel in full precision all the same.
        optimizer: ``"adamw"``, or for matrices ``"muon"`` (torch's) or ``"muon8"``.
        local: Let nodes train alone; weights and gradients are then in full precision.
        stages: Codecs of hidden states and their gradients between the blocks of each rank.
    """

    weights: Codes | None = None
    gradients: Codes | None = None
    exact: str | None = None
    optimizer: Literal["adamw", "muon", "muon8"] = "adamw"
    local: LocalSteps | None = None
    stages: Stages | None = None


class Unit:
    """One FSDP2 unit: the places of its parameters in the slots of W ranks.

    Args:
        parameters: Names and shapes, in FSDP2's order.
        world_size: W.
        vocabulary: Names of embeddings and heads.
        min_quantized_numel: As in the library.
    """

    def __init__(
        self,
        parameters: Mapping[str, tuple[int, ...]],
        world_size: int,
        vocabulary: Sequence[str] = (),
        min_quantized_numel: int = 4096,
    ) -> None:
        self.shapes = dict(parameters)
        self._world, self._least = world_size, min_quantized_numel
        self._vocabulary = frozenset(vocabulary)
        self._layouts: dict[tuple[Any, ...], MessageLayout] = {}
        self._rows = {name: -(-shape[0] // world_size) for name, shape in self.shapes.items()}
        self.sizes = [rows * math.prod(self.shapes[n][1:]) for n, rows in self._rows.items()]

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the slots ``[..., W, n]`` of ``[..., *shape]`` parameters, shards padded."""
        slots = []
        for (name, shape), size in zip(self.shapes.items(), self.sizes, strict=True):
            tensor = tensors[name]
            lead = tensor.shape[: tensor.dim() - len(shape)]
            flat = tensor.reshape(*lead, -1)
            missing = self._world * size - flat.shape[-1]
            if missing:
                flat = torch.nn.functional.pad(flat, (0, missing))
            slots.append(flat.unflatten(-1, (self._world, size)))
        return torch.cat(slots, dim=-1)

    def unpack(self, slots: Tensor) -> Tensors:
        """Return the parameters ``[..., *shape]`` of slots ``[..., W, n]``."""
        found = {}
        parts = slots.split(self.sizes, dim=-1)
        for (name, shape), part in zip(self.shapes.items(), parts, strict=True):
            flat = part.flatten(-2)[..., : math.prod(shape)]
            found[name] = flat.unflatten(-1, shape)
        return found

    def layout(
        self, codes: Codes, level: str, *, first: str, dtype: torch.dtype, exact: str | None
    ) -> MessageLayout:
        """Return the layout of one level's messages.

        Args:
            codes: Codes in use.
            level: ``"intra"`` or ``"inter"``.
            first: First level of the topology, which decides which runs are worth encoding.
            dtype: Dtype of full-precision values.
            exact: See ``Plan``.
        """
        key = (codes, level, first, dtype, exact)
        if key not in self._layouts:
            self._layouts[key] = self._layout(*key)
        return self._layouts[key]

    def _layout(
        self, codes: Codes, level: str, first: str, dtype: torch.dtype, exact: str | None
    ) -> MessageLayout:
        segments, start = [], 0
        for (name, shape), size in zip(self.shapes.items(), self.sizes, strict=True):
            numel = math.prod(shape)
            reason = full_precision_reason(len(shape), numel, dtype, self._least)
            if exact and re.search(exact, name):
                reason = "by the plan"
            travel = "full" if reason else "quantized"
            codec = int(codes.vocabulary is not None and name in self._vocabulary)
            segments.append(Segment(name, start, size, travel, reason, codec))  # type: ignore[arg-type]
            start += size
        kept = keep_small_runs_exact(segments, codes.of(first), dtype.itemsize)
        runs = merge_over_small_gaps(segment_runs(kept))
        return MessageLayout(runs, codes.of(level), dtype)


def _sum(
    spec: CodecSpec, messages_KRB: Tensor, out_RN: Tensor, scale: float = 1.0, add: bool = False
) -> None:
    """Write or add ``scale`` times the sum of messages."""
    decode_reduce(spec, messages_KRB, out_RN.shape[1], scale=scale, out=out_RN, add=add)


@lru_cache(maxsize=32)
def _others(count: int, device: torch.device) -> Tensor:
    """Return ``[count - 1, count]``: row k holds the k-th other than each column."""
    rows = [[k + (k >= own) for own in range(count)] for k in range(count - 1)]
    return torch.tensor(rows, dtype=torch.int64, device=device)


@dataclass
class EmulatedUnit:
    """The replica of one unit.

    Attributes:
        unit: Parameters.
        nodes: N.
        node_size: L.
        dtype: Dtype of the weights that the ranks compute with.
        replica: These weights, ``[S, W, n]``; None before the first refresh.
    """

    unit: Unit
    nodes: int
    node_size: int
    dtype: torch.dtype
    replica: Tensor | None = None

    # --- weights ----------------------------------------------------------------------------

    def refresh(self, masters: Mapping[str, Tensor]) -> None:
        """Gather the master weights in full precision."""
        self.replica = self.unit.pack(masters).to(self.dtype)

    def exchange(self, masters: Mapping[str, Tensor], codes: Codes, exact: str | None) -> None:
        """Add the decoded differences of the master weights to the replica."""
        if self.replica is None:
            self.refresh(masters)
            return
        layout = self.unit.layout(codes, "inter", first="inter", dtype=self.dtype, exact=exact)
        main = self.unit.pack(masters).to(self.dtype).flatten(0, 1)
        replica = self.replica.flatten(0, 1)
        kept = layout.read_exact(main) if layout.exact_runs else None
        for run in layout.exact_runs:  # encoded as zeros where they lie in gaps
            main[:, run.start : run.stop] = 0
            replica[:, run.start : run.stop] = 0
        for _, run in layout.quantized:
            spec, where = codes.of("inter")[run.codec], slice(run.start, run.stop)
            message = encode(spec, main[:, where], reference=replica[:, where])
            _sum(spec, message[None], replica[:, where], add=True)
        if kept is not None:
            layout.write_exact(kept, replica)

    # --- gradients --------------------------------------------------------------------------

    def mean(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the mean of ``[S, W, *shape]`` gradients in full precision, ``[S, W, n]`` fp32."""
        slots = self.unit.pack(gradients).float()
        return slots.sum(dim=1) / slots.shape[1]

    def reduce(self, gradients: Mapping[str, Tensor], codes: Codes, exact: str | None) -> Tensor:
        """Return the mean of ``[S, W, *shape]`` gradients at each rank, ``[S, W, n]`` fp32."""
        slots = self.unit.pack(gradients).float()  # [S, W of the sender, W of the receiver, n]
        first = "inter" if self.node_size == 1 else "intra"
        layout = self.unit.layout(codes, "intra", first=first, dtype=torch.float32, exact=exact)
        exact_mean = self._exact_mean(slots, layout)
        for run in layout.exact_runs:
            slots[..., run.start : run.stop] = 0
        rank = torch.arange(slots.shape[1], device=slots.device)
        out = slots[:, rank, rank] * (1.0 / len(rank))
        for _, run in layout.quantized:
            part = slots[..., run.start : run.stop]
            target = out.flatten(0, 1)[:, run.start : run.stop]
            if self.node_size > 1:
                self._two_levels(part, target, codes, run)
            else:  # `out` holds the own part, which is not encoded
                self._between_nodes(part, target, codes, run)
        for run, values in zip(layout.exact_runs, exact_mean, strict=True):
            out[..., run.start : run.stop] = values
        return out

    def _by_node(self, slots: Tensor) -> Tensor:
        """View ``[S, W, W, k]`` as ``[S, N, L, N, L, k]``."""
        shape = (self.nodes, self.node_size)
        return slots.unflatten(2, shape).unflatten(1, shape)

    def _exact_mean(self, slots: Tensor, layout: MessageLayout) -> list[Tensor]:
        """Return the means ``[S, W, k]`` of every run in full precision."""
        found = []
        scale = 1.0 / slots.shape[1]
        for run in layout.exact_runs:
            parts = self._by_node(slots[..., run.start : run.stop])
            sums = parts.movedim(2, 0).contiguous().sum(dim=0)  # in order: the first axis is summed
            index = torch.arange(self.nodes, device=slots.device)
            mean = sums[:, index, index] * scale
            if self.nodes > 1:
                others = sums[:, _others(self.nodes, slots.device), index]  # [S, K, N, L, k]
                mean = others.movedim(1, 0).contiguous().sum(dim=0) * scale + mean
            found.append(mean.flatten(1, 2))
        return found

    def _between_nodes(self, slots: Tensor, out: Tensor, codes: Codes, run: Run) -> None:
        """Add the messages of other one-rank nodes: slots ``[S, W, W, k]``, out ``[S * W, k]``."""
        spec = codes.of("inter")[run.codec]
        trainings, world = slots.shape[:2]
        receivers = torch.arange(world, device=slots.device)
        sent = encode(spec, slots.flatten(0, 2)).unflatten(0, (trainings, world, world))
        received = sent[:, _others(world, slots.device), receivers]  # [S, K, W, B]
        _sum(spec, received.transpose(0, 1).flatten(1, 2), out, 1.0 / world, add=True)

    def _two_levels(self, slots: Tensor, out: Tensor, codes: Codes, run: Run) -> None:
        """Reduce slots ``[S, W, W, k]`` within nodes and between them to ``[S * W, k]``."""
        intra, inter = codes.of("intra")[run.codec], codes.of("inter")[run.codec]
        scale, numel = 1.0 / slots.shape[1], slots.shape[-1]
        sent = self._by_node(encode(intra, slots.flatten(0, 2)).unflatten(0, slots.shape[:3]))
        sent = sent.movedim(2, 0)  # [L, S, N, N, L, B]: the sum is over the first
        node = torch.arange(self.nodes, device=slots.device)
        _sum(intra, sent[:, :, node, node].flatten(1, 3), out, scale)
        if self.nodes == 1:
            return
        received = sent[:, :, _others(self.nodes, slots.device), node]  # [L, S, K, N, L, B]
        received = received.movedim(2, 1).flatten(1, 4)  # [L, K * S * W, B]
        encoded = decode_reduce_encode(intra, received, numel, inter)
        _sum(inter, encoded.unflatten(0, (self.nodes - 1, -1)), out, scale, add=True)


class EmulatedRanks:
    """S trainings of one shape, each of W ranks.

    Args:
        units: Units of the model, by name.
        nodes: N.
        node_size: L.
        dtype: Dtype of the weights that the ranks compute with.
    """

    def __init__(self, units: Mapping[str, Unit], nodes: int, node_size: int, dtype: torch.dtype):
        self.world_size, self.dtype = nodes * node_size, dtype
        self.units = {n: EmulatedUnit(unit, nodes, node_size, dtype) for n, unit in units.items()}

    def weights(self) -> Tensors:
        """Return the weights ``[S, *shape]`` that all ranks compute with."""
        found: Tensors = {}
        for unit in self.units.values():
            if unit.replica is None:
                raise RuntimeError("there are no weights before the first `publish`")
            found |= unit.unit.unpack(unit.replica)
        return found

    @torch.no_grad()
    def publish(self, masters: Mapping[str, Tensor], plan: Plan) -> None:
        """Bring the fp32 master weights ``[S, *shape]`` to all ranks."""
        for unit in self.units.values():
            if plan.weights is None:
                unit.refresh(masters)
            else:
                unit.exchange(masters, plan.weights, plan.exact)

    @torch.no_grad()
    def reduce(self, gradients: Mapping[str, Tensor], plan: Plan) -> Tensors:
        """Return the fp32 means ``[S, *shape]`` of all ranks' gradients ``[S, W, *shape]``."""
        found: Tensors = {}
        for unit in self.units.values():
            if plan.gradients is None:
                slots = unit.mean(gradients)
            else:
                slots = unit.reduce(gradients, plan.gradients, plan.exact)
            found |= unit.unit.unpack(slots)
        return found
