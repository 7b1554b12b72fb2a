"""The collectives of ``quantized_fsdp`` without ranks: one process computes what all would send.

For S independent trainings at once, each with W ranks. Slots, groups, order of sums and codecs are
those of ``lq_lightning.data_parallel`` (``reduce_scatter.py``, ``all_gather.py``): with the
same gradients, every rank of a real job has these weights, bit for bit.

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
from emulated_codes import Code, LibraryCode
from torch import Tensor

from lq_lightning.codecs import CodecSpec
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
    """How what one collective sends is encoded.

    Attributes:
        inter: Between nodes; of weight differences everywhere.
        intra: Within a node, of gradients; None as between nodes.
        vocabulary: As ``inter``, for embeddings and heads; None as all others.
    """

    inter: Code
    intra: Code | None = None
    vocabulary: Code | None = None

    def of(self, level: str) -> tuple[Code, Code]:
        """Codes of most parameters, and of the vocabulary."""
        if level == "intra" and self.intra is not None:
            return self.intra, self.intra
        return self.inter, self.vocabulary or self.inter


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What one step quantizes; nothing by default.

    Attributes:
        weights: Codes of weight differences; None gathers weights in full precision.
        gradients: Codes of gradients; None reduces them in full precision.
        exact: Regular expression of parameters that travel in full precision all the same.
        optimizer: What the optimizer computes from exact gradients instead, to tell why a loss
            moves: the ``"norm"`` that clips, or AdamW's ``"first"`` or ``"second"`` moments.
    """

    weights: Codes | None = None
    gradients: Codes | None = None
    exact: str | None = None
    optimizer: Literal["norm", "first", "second"] | None = None


class Unit:
    """One FSDP2 unit: where its parameters lie in the slots of W ranks.

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
        """Layout of the messages of one level.

        Args:
            codes: In use.
            level: ``"intra"`` or ``"inter"``.
            first: The first level of the topology, which decides what is worth encoding.
            dtype: Of what is not encoded.
            exact: Which parameters are not.
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
        kept = keep_small_runs_exact(segments, _specs(codes, first), dtype.itemsize)
        runs = merge_over_small_gaps(segment_runs(kept))
        return MessageLayout(runs, _specs(codes, level), dtype)


def _specs(codes: Codes, level: str) -> list[CodecSpec]:
    return [code.spec for code in codes.of(level)]


@lru_cache(maxsize=32)
def _others(count: int, device: torch.device) -> Tensor:
    """Return ``[count - 1, count]``: row k holds the k-th other than each column."""
    rows = [[k + (k >= own) for own in range(count)] for k in range(count - 1)]
    return torch.tensor(rows, dtype=torch.int64, device=device)


@dataclass
class EmulatedUnit:
    """The replica of one unit.

    Attributes:
        unit: Its parameters.
        nodes: N.
        node_size: L.
        dtype: Of the weights that the ranks compute with.
        replica: ``[S, W, n]``, those weights; None before the first refresh.
    """

    unit: Unit
    nodes: int
    node_size: int
    dtype: torch.dtype
    replica: Tensor | None = None

    # --- weights ----------------------------------------------------------------------------

    def refresh(self, masters: Mapping[str, Tensor]) -> None:
        """Gather the main weights in full precision."""
        self.replica = self.unit.pack(masters).to(self.dtype)

    def exchange(self, masters: Mapping[str, Tensor], codes: Codes, exact: str | None) -> None:
        """Add to the replica how the main weights differ from it, decoded."""
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
            code, where = codes.of("inter")[run.codec], slice(run.start, run.stop)
            message = code.encode(main[:, where], replica[:, where])
            code.reduce(message[None], replica[:, where], add=True)
        if kept is not None:
            layout.write_exact(kept, replica)

    # --- gradients --------------------------------------------------------------------------

    def mean(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Mean of ``[S, W, *shape]`` gradients in full precision, as slots ``[S, W, n]`` fp32."""
        slots = self.unit.pack(gradients).float()
        return slots.sum(dim=1) / slots.shape[1]

    def reduce(self, gradients: Mapping[str, Tensor], codes: Codes, exact: str | None) -> Tensor:
        """Mean of ``[S, W, *shape]`` gradients as each rank gets it: slots ``[S, W, n]`` fp32."""
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
            else:  # what a rank keeps is not encoded: `out` holds it
                self._between_nodes(part, target, codes, run)
        for run, values in zip(layout.exact_runs, exact_mean, strict=True):
            out[..., run.start : run.stop] = values
        return out

    def _by_node(self, slots: Tensor) -> Tensor:
        """View ``[S, W, W, k]`` as ``[S, N, L, N, L, k]``."""
        shape = (self.nodes, self.node_size)
        return slots.unflatten(2, shape).unflatten(1, shape)

    def _exact_mean(self, slots: Tensor, layout: MessageLayout) -> list[Tensor]:
        """Means ``[S, W, k]`` of what travels in full precision, for each of its runs."""
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
        """Add what other ranks send, each a node: slots ``[S, W, W, k]``, out ``[S * W, k]``."""
        code = codes.of("inter")[run.codec]
        trainings, world = slots.shape[:2]
        receivers = torch.arange(world, device=slots.device)
        sent = code.encode(slots.flatten(0, 2)).unflatten(0, (trainings, world, world))
        received = sent[:, _others(world, slots.device), receivers]  # [S, K, W, B]
        code.reduce(received.transpose(0, 1).flatten(1, 2), out, 1.0 / world, add=True)

    def _two_levels(self, slots: Tensor, out: Tensor, codes: Codes, run: Run) -> None:
        """Reduce slots ``[S, W, W, k]`` within nodes and between them to ``[S * W, k]``."""
        intra, inter = codes.of("intra")[run.codec], codes.of("inter")[run.codec]
        scale, numel = 1.0 / slots.shape[1], slots.shape[-1]
        sent = self._by_node(intra.encode(slots.flatten(0, 2)).unflatten(0, slots.shape[:3]))
        sent = sent.movedim(2, 0)  # [L, S, N, N, L, B]: the sum is over the first
        node = torch.arange(self.nodes, device=slots.device)
        intra.reduce(sent[:, :, node, node].flatten(1, 3), out, scale)
        if self.nodes == 1:
            return
        received = sent[:, :, _others(self.nodes, slots.device), node]  # [L, S, K, N, L, B]
        received = received.movedim(2, 1).flatten(1, 4)  # [L, K * S * W, B]
        encoded = intra.reduce_encode(received, numel, inter)
        inter.reduce(encoded.unflatten(0, (self.nodes - 1, -1)), out, scale, add=True)


class EmulatedRanks:
    """S trainings of one shape, each of W ranks.

    Args:
        units: Of the model, by name; see ``stacked_models.units``.
        node_size: L.
        dtype: Of the weights that the ranks compute with.
    """

    def __init__(self, units: Mapping[str, Unit], nodes: int, node_size: int, dtype: torch.dtype):
        self.world_size, self.dtype = nodes * node_size, dtype
        self.units = {n: EmulatedUnit(unit, nodes, node_size, dtype) for n, unit in units.items()}

    def weights(self) -> Tensors:
        """The weights ``[S, *shape]`` that all ranks compute with."""
        found: Tensors = {}
        for unit in self.units.values():
            if unit.replica is None:
                raise RuntimeError("there are no weights before the first `publish`")
            found |= unit.unit.unpack(unit.replica)
        return found

    @torch.no_grad()
    def publish(self, masters: Mapping[str, Tensor], plan: Plan) -> None:
        """Bring the main weights ``[S, *shape]`` fp32 to all ranks."""
        for unit in self.units.values():
            if plan.weights is None:
                unit.refresh(masters)
            else:
                unit.exchange(masters, plan.weights, plan.exact)

    @torch.no_grad()
    def reduce(self, gradients: Mapping[str, Tensor], plan: Plan) -> Tensors:
        """Means ``[S, *shape]`` fp32 of each rank's gradients ``[S, W, *shape]``."""
        found: Tensors = {}
        for unit in self.units.values():
            if plan.gradients is None:
                slots = unit.mean(gradients)
            else:
                slots = unit.reduce(gradients, plan.gradients, plan.exact)
            found |= unit.unit.unpack(slots)
        return found


def library_codes(inter: CodecSpec, intra: CodecSpec | None = None, **more: object) -> Codes:
    """Return codes of the library by their specifications."""
    within = None if intra is None else LibraryCode(intra)
    return Codes(inter=LibraryCode(inter), intra=within, **more)  # type: ignore[arg-type]
