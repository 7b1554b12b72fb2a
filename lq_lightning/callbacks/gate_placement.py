"""Which gates a rank holds, where they act, and with which ranks they are shared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lq_lightning.adaptive import BitGate, GateOptimizer, attach, find_sites
from lq_lightning.foundation.agreement import gather_objects

__all__ = ["GatePlacement", "Removable", "measured_bits", "place_in_model"]


class Removable(Protocol):
    """What undoes something."""

    def remove(self) -> None:
        """Undo it; idempotent."""


def _nothing() -> None:
    """After a step of gates that nobody else needs to know."""


def _same(optimizer: GateOptimizer) -> GateOptimizer:
    """After a run in which every rank has held all gates."""
    return optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class GatePlacement:
    """The gates of this rank, at work.

    Attributes:
        gates: By name; the same names in the same order on all ranks that ``average`` joins.
        attached: Takes them out of the model.
        device: Where gradients are averaged.
        average: Averages a float32 tensor on ``device``, in place or not, over the ranks that hold
            replicas of these gates. None: there are none.
        total: Sums a float64 tensor on the CPU over ranks that hold other gates of one mean. None:
            there are none.
        gather: Returns what each rank that ``average`` joins passes to it, a picklable object.
        after_step: Called after widths have changed, on all ranks.
        names: Of all gates that share the mean, in one order on all ranks; empty: those of
            ``gates``.
        join: Joins entries by name of all ranks that ``total`` joins, on all of them.
        finish: Called when the run has ended, on all ranks: from what trained the gates of this
            rank makes what holds all of them.
        backward_in_step: Backward passes are run by ``training_step``, before ``zero_grad``.
    """

    gates: Mapping[str, BitGate]
    attached: Removable
    device: torch.device
    average: Callable[[Tensor], Tensor] | None = None
    total: Callable[[Tensor], Tensor] | None = None
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    after_step: Callable[[], None] = _nothing
    names: tuple[str, ...] = ()
    join: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    finish: Callable[[GateOptimizer], GateOptimizer] = _same
    backward_in_step: bool = False

    @property
    def sites(self) -> tuple[str, ...]:
        """Of all gates that share the mean."""
        return self.names or tuple(self.gates)

    def joined(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a ``GateOptimizer`` with the gates of all ranks; they call it all."""
        skipped = torch.tensor([float(state["skipped_lines"])], dtype=torch.float64)
        if self.total is not None:
            skipped = self.total(skipped)
        return {**state, "gates": self.join(state["gates"]), "skipped_lines": int(skipped)}

    def check_channels(self) -> None:
        """Raise on all ranks unless all gates know their channels, the same everywhere.

        Raises:
            RuntimeError: A site was not run yet, or differs between ranks.
        """
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

    Args:
        optimizer: Of the gates of this rank.
        placement: Of these; None outside of a run.
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
    """Hold gates for a whole model on every rank, at sites in it.

    Gradients are averaged over all ranks: those that compute the same hidden states, as with tensor
    parallelism, have the same ones.

    Args:
        trainer: Of any strategy without a pipeline.
        module: Complete, and not sharded yet.
        sites: For ``find_sites``.
        make_gate: Makes the gate of a site.

    Raises:
        ValueError: A site does not exist.
    """
    gates = {site: make_gate(site) for site in find_sites(module, sites)}
    attached = attach(module, gates)
    device = trainer.strategy.root_device
    if trainer.world_size == 1:
        return GatePlacement(gates=gates, attached=attached, device=device)
    return GatePlacement(
        gates=gates, attached=attached, device=device, average=_average, gather=gather_objects
    )


def _average(values: Tensor) -> Tensor:
    """One collective for the gates of all sites."""
    dist.all_reduce(values)
    return values / dist.get_world_size()
