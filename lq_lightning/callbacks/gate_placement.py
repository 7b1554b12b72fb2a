"""Places of the gates of ``AdaptiveBits``: in a whole model, or at pipeline boundaries.

In a pipeline a gate lives on the rank that sends the hidden states of its boundary. That rank has
both factors of its gradient: what it encoded, and the gradient of what the next rank decoded, which
comes back over the boundary. Nothing is added to the graph of a stage, so that frozen stages,
checkpointed layers and backward passes in two halves make no difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lq_lightning.adaptive import (
    AdaptiveBitsConfig,
    BitGate,
    GateOptimizer,
    adaptive_quantize,
    attach,
    find_sites,
)
from lq_lightning.codecs.mixed import WidthTable
from lq_lightning.foundation.agreement import gather_objects
from lq_lightning.pipeline.boundary_widths import BoundaryWidths
from lq_lightning.pipeline.message import BoundaryMeta, Message


class Removable(Protocol):
    """A handle that undoes something."""

    def remove(self) -> None:
        """Undo it; idempotent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatePlacement:
    """The gates of this rank, at work, and their joins with other ranks."""

    # By name; the same names in the same order on all ranks that `average` joins.
    gates: Mapping[str, BitGate]
    attached: Removable  # takes them out of the model
    device: torch.device  # on which gradients are averaged
    # Averages a float32 tensor on `device` over ranks that hold replicas of these gates, and sums a
    # float64 tensor on the CPU over ranks that hold other gates of one mean; None if none do.
    average: Callable[[Tensor], Tensor] | None = None
    total: Callable[[Tensor], Tensor] | None = None
    # Returns the argument, a picklable object, of each rank that `average` joins.
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    after_step: Callable[[], None] = lambda: None  # called after widths have changed, on all ranks
    # Of all gates that share the mean, in one order on all ranks; empty: `gates`.
    names: tuple[str, ...] = ()
    # Joins entries by name of all ranks that `total` joins, on all of them.
    join: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    # Called on all ranks at the end: makes an optimizer of all gates from this rank's.
    finish: Callable[[GateOptimizer], GateOptimizer] = lambda optimizer: optimizer
    backward_in_step: bool = False  # `training_step` runs backward passes, before `zero_grad`

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of all gates that share the mean."""
        return self.names or tuple(self.gates)

    def joined(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a ``GateOptimizer`` with the gates of all ranks; collective."""
        skipped = torch.tensor([float(state["skipped_lines"])], dtype=torch.float64)
        if self.total is not None:
            skipped = self.total(skipped)
        return {**state, "gates": self.join(state["gates"]), "skipped_lines": int(skipped)}

    def check_channels(self) -> None:
        """Raise ``RuntimeError`` on all ranks unless gates know the same channels everywhere."""
        channels = self.gather({name: gate.channels for name, gate in self.gates.items()})
        for name in dict.fromkeys(name for rank in channels for name in rank):
            found = [rank.get(name) for rank in channels]
            if None in found:
                where = "" if len(found) == 1 else f" on rank {found.index(None)}"
                raise RuntimeError(
                    f"nothing passed the site `{name}` in the first step{where}: every step must "
                    "run each site, on every rank. Choose other sites."
                )
            if len(set(found)) > 1:
                raise RuntimeError(
                    f"the site `{name}` has different numbers of channels on the ranks: {found}. "
                    "Choose sites whose hidden states are whole on every rank."
                )


def measured_bits(optimizer: GateOptimizer, placement: GatePlacement | None) -> dict[str, float]:
    """Return what ``AdaptiveBits.metrics`` says of all gates, the same on all ranks.

    ``placement`` is None outside of a run.
    """
    names = tuple(optimizer.gates) if placement is None else placement.sites
    sums = torch.zeros(len(names) + 1, 4, dtype=torch.float64)
    for row, name in zip(sums, names, strict=False):
        gate = optimizer.gates.get(name)
        if gate is not None and gate.channels is not None:
            weights = gate.values if gate.values.any() else torch.ones_like(gate.values)
            row[0], row[1] = gate.bits().double() @ weights.double(), weights.sum()
            if not math.isnan(effective := gate.effective_bits()):
                row[2], row[3] = effective * gate.values.sum(), gate.values.sum()
    sums[-1, 0] = optimizer.skipped_lines
    if placement is not None and placement.total is not None:
        sums = placement.total(sums)
    skipped = float(sums[-1, 0])
    bits, weights, nbits, values = sums[:-1].unbind(1)
    found = {"mean": optimizer.mean}
    if values.sum():
        found["effective"] = float(nbits.sum() / values.sum())
    found |= {
        name.replace(":", "."): float(bits[place] / weights[place])
        for place, name in enumerate(names)
        if weights[place]
    }
    if skipped:
        found["skipped_lines"] = skipped
    return found


def place_in_model(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    sites: Sequence[str],
    make_gate: Callable[[str], BitGate],
) -> GatePlacement:
    """Hold gates for a whole model on every rank, at sites in it, before it is sharded.

    Gradients are averaged over all ranks: those that compute the same hidden states, as with tensor
    parallelism, have the same ones. Raises ``ValueError`` if a site does not exist.
    """
    gates = {site: make_gate(site) for site in find_sites(module, sites)}
    device = trainer.strategy.root_device
    alone = GatePlacement(gates=gates, attached=attach(module, gates), device=device)
    if trainer.world_size == 1:
        return alone
    return replace(alone, average=_average, gather=gather_objects)


def _average(values: Tensor) -> Tensor:
    """One collective for the gates of all sites."""
    dist.all_reduce(values)
    return values / dist.get_world_size()


class PipelineGates:
    """The gates of a pipeline's boundaries; all ranks make one and call its methods together.

    A listener of the pipeline: ``starts``, ``encode`` and ``returned`` are for its engine.
    ``state`` holds the gates of all boundaries, of any number of stages: boundaries that no longer
    exist are dropped, new ones begin at the mean, each with a warning. Errors are raised on all
    ranks: ``ValueError`` if ``state`` has gates that mean something else, ``RuntimeError`` if ranks
    have other options or another ``state``. ``optimizer`` has the gates of the boundaries that this
    rank sends over, by name.
    """

    def __init__(
        self,
        config: AdaptiveBitsConfig,
        boundaries: BoundaryWidths,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._config, self._boundaries = config, boundaries
        self._channels: int | None = None  # of hidden states, once known
        gates = self._gates_of_all()
        if state is not None:
            state = _for_boundaries(state, tuple(gates), config)
            # Every rank loads the gates of all boundaries, so that all ranks raise the same error.
            GateOptimizer(gates, config).load_state_dict(state)
        own = {each.name: gates[each.name] for each in boundaries.sent}
        self.optimizer = GateOptimizer(
            own, config, average=boundaries.average, total=boundaries.total
        )
        if state is not None:
            entries = {name: entry for name, entry in state["gates"].items() if name in own}
            skipped = state["skipped_lines"] if boundaries.is_first else 0  # a sum over ranks
            self.optimizer.load_state_dict({**state, "gates": entries, "skipped_lines": skipped})
        self._gates = {each.index: gates[each.name] for each in boundaries.sent}
        self._edges: dict[tuple[int, int], GradientEdge] = {}

        def start(count: int) -> WidthTable:
            return BitGate(config, count).table()

        known = {each.index: gates[each.name] for each in boundaries.all}
        boundaries.begin(
            start,
            {index: gate.table() for index, gate in known.items() if gate.channels is not None},
            {"`AdaptiveBits`": repr(config)},
        )
        boundaries.listen(self)

    def _gates_of_all(self) -> dict[str, BitGate]:
        """New gates of all boundaries, by name."""
        return {each.name: BitGate(self._config, name=each.name) for each in self._boundaries.all}

    def starts(self, boundary: BoundaryMeta) -> None:
        """Note how many channels hidden states have, on all ranks."""
        if self._channels is None:
            self._channels = boundary.shape[-1]
        for gate in self._gates.values():
            gate.expect(boundary.shape[-1])

    def encode(self, message: Message, hidden: Tensor) -> Tensor:
        """Return the payload, and keep two bytes per value for the gradient until ``returned``."""
        payload, arrives = self._boundaries.encode(message, hidden)
        sent = adaptive_quantize(hidden, self._gates[message.boundary], arrives=arrives)
        self._edges[message.boundary, message.microbatch] = get_gradient_edge(sent)
        return payload

    def returned(self, message: Message, gradient: Tensor) -> None:
        """Add to the gate's gradient."""
        edge = self._edges.pop((message.boundary, message.microbatch))
        torch.autograd.backward((edge,), (gradient,))

    @property
    def placement(self) -> GatePlacement:
        """The gates of this rank, with their joins."""
        return GatePlacement(
            gates=self.optimizer.gates,
            attached=self,
            device=torch.device("cpu"),
            average=self._boundaries.average,
            total=self._boundaries.total,
            after_step=self._exchange,
            names=tuple(each.name for each in self._boundaries.all),
            join=self._boundaries.gather,
            finish=self._finish,
            backward_in_step=True,
        )

    def remove(self) -> None:
        """Stop listening. Messages keep their widths."""
        self._boundaries.listen(None)
        self._edges.clear()

    def _exchange(self) -> None:
        if self._channels is None:
            raise AssertionError("gates change after a step of the pipeline")
        tables = {index: gate.table() for index, gate in self._gates.items()}
        self._boundaries.exchange(tables, self._channels)

    def _finish(self, own: GateOptimizer) -> GateOptimizer:
        whole = GateOptimizer(self._gates_of_all(), own.config)
        whole.load_state_dict(self.placement.joined(own.state_dict()))
        return whole


def _for_boundaries(
    state: Mapping[str, Any], names: Sequence[str], config: AdaptiveBitsConfig
) -> dict[str, Any]:
    """Return the state of gates with entries for these boundaries; warn of changes."""
    GateOptimizer({}, config, total=torch.clone).load_state_dict({**state, "gates": {}})  # or raise
    saved: dict[str, Any] = dict(state["gates"])
    if not saved:
        return dict(state)
    dropped = [name for name in saved if name not in names]
    new = [name for name in names if name not in saved]
    if dropped:
        rank_zero_warn(
            f"AdaptiveBits: widths of {', '.join(map(repr, dropped))} are dropped, where no "
            "boundary between two ranks is any more."
        )
    if new:
        mean = config.start_bits if state["mean"] is None else float(state["mean"])
        rank_zero_warn(
            f"AdaptiveBits: widths of {', '.join(map(repr, new))}, where no boundary was, begin at "
            f"the mean of the saved ones, {mean:.2f} bits."
        )
        like = next(iter(saved.values()))["state"]
        first = torch.zeros_like(like)
        first[0] = replace(config, target=mean, start_bits=mean).start
        saved |= {name: {"per": "channel", "state": first.clone()} for name in new}
    return {**state, "gates": {name: saved[name] for name in names}}
