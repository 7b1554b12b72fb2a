"""The handle on a model's quantized collectives: its steps, its state, what it measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lq_lightning._compat.tensors import local_tensor
from lq_lightning.data_parallel.all_gather import QuantizedAllGather
from lq_lightning.data_parallel.drift import invalidate_drifted
from lq_lightning.data_parallel.exchange import ExchangeSchedule
from lq_lightning.data_parallel.optimizer_hooks import OptimizerHooks
from lq_lightning.data_parallel.outside_writes import WriteVotes
from lq_lightning.data_parallel.plan import CommunicationPlan
from lq_lightning.data_parallel.reduce_scatter import TwoLevelReduceScatter
from lq_lightning.data_parallel.unit import UnitContext
from lq_lightning.data_parallel.weight_difference import WeightDifferenceAllGather
from lq_lightning.foundation.reporting import QuantizationReport
from lq_lightning.foundation.traffic import Traffic

__all__ = ["QuantizationErrors", "QuantizedCommunication", "QuantizedUnit"]

_STATE_VERSION = 2


class QuantizationErrors(NamedTuple):
    """Sums behind the relative L2 errors of this rank since they were last asked for.

    The relative error over ranks is ``sqrt(sum(squared_error) / sum(squared_norm))``.
    """

    weights_squared_error: float
    weights_squared_norm: float
    gradients_squared_error: float
    gradients_squared_norm: float


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedUnit:
    """The collectives of one FSDP2 unit; None where FSDP2's own are left.

    Attributes:
        name: Of the unit.
        gather: Of the weights.
        scatter: Of the gradients.
    """

    name: str
    gather: QuantizedAllGather | None
    scatter: TwoLevelReduceScatter | None


class QuantizedCommunication:
    """Handle on the quantized collectives of one model; made by ``quantize_communication``.

    Attributes:
        plan: How every parameter travels.
        topology: Ranks and nodes.
        group: The ranks that shard the model, which is not always all of them.
    """

    def __init__(
        self,
        units: list[QuantizedUnit],
        context: UnitContext,
        plan: CommunicationPlan,
        device: torch.device,
        votes: WriteVotes | None,
    ) -> None:
        self._units = units
        self._votes = votes  # None without differences
        self._context = context
        self.plan = plan
        self.topology = context.topology
        self.group = context.group
        self._exchanges = ExchangeSchedule(device)
        # updates change the main weights, which the exchanges read on their own streams
        self._hooks = OptimizerHooks(lambda: self._exchanges.join(), self.note_optimizer_step)

    # --- steps ------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps seen so far."""
        return self._context.step

    def register_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange weights after each of this optimizer's steps. Idempotent."""
        self._hooks.register(optimizer)

    def join(self) -> None:
        """Let the current CUDA stream wait for everything on its way."""
        self._exchanges.join()
        self._context.reductions.join()

    def recover(self) -> None:
        """Leave nothing of a forward or backward that failed; call it on every rank that goes on.

        Out of memory, for example. Waits for everything on its way.
        """
        for unit in self._units:  # first, so that nothing is reduced any more
            if unit.scatter is not None:
                unit.scatter.recover()
        self.join()

    def note_optimizer_step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Say that the weights were updated by an optimizer on every rank; exchanges them.

        Args:
            optimizer: The one that stepped; units without any of its parameters are left alone.
        """
        self._context.step += 1
        stepped = None
        if optimizer is not None:
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        begun: set[int] = set()
        try:
            self._exchanges.run(self._stacks_to_exchange(stepped, begun))
        finally:  # after an error the others' changes count as writes, which refresh replicas
            if self._votes is not None:
                self._votes.note_step(lambda replica: id(replica) in begun)

    def invalidate(self) -> None:
        """Let the next gathers refresh the replicas in full precision. Every rank must call this.

        For writes that must take effect in the next forward pass and might in the one after: to the
        shards of some ranks only, and on GPUs those that no version counter counts, as
        ``parameter.data.copy_(value)``. Others are noticed. ``parameter.data = value`` is lost
        whatever follows: it replaces a tensor that FSDP2 does not compute with, and the next
        forward pass raises an error.
        """
        for gather in self._difference_gathers():
            gather.replica.invalidate()

    def _stacks_to_exchange(
        self, stepped: set[int] | None, begun: set[int]
    ) -> Iterator[Sequence[WeightDifferenceAllGather]]:
        """Yield what is exchanged together; what decides that is the same on every rank.

        Replicas (``id``) are added to ``begun`` when their turn comes.
        """
        for _, stack in groupby(self._difference_gathers(), lambda gather: id(gather.memory)):
            gathers = [gather for gather in stack if gather.holds_any(stepped)]
            begun.update(id(gather.replica) for gather in gathers)
            if gathers and gathers[0].exchanges_alike(gathers[1:]):
                yield gathers
            else:
                yield from ([gather] for gather in gathers)

    @property
    def outside_writes(self) -> dict[str, int]:
        """Names of units whose weights something other than an optimizer step has written.

        With the number of times, the same on every rank; each costs a full-precision gather.
        """
        return {} if self._votes is None else self._votes.counts

    def _difference_gathers(self) -> list[WeightDifferenceAllGather]:
        gathers = [u.gather for u in self._units]
        return [g for g in gathers if isinstance(g, WeightDifferenceAllGather)]

    # --- drift ------------------------------------------------------------------------------

    def check_replicas(self, on_drift: Literal["resync", "raise"] = "resync") -> list[str]:
        """Compare the replicas of all ranks of ``group`` by checksum. All of them must call this.

        Args:
            on_drift: ``"resync"`` refreshes drifted units in full precision at their next gather.

        Returns:
            Names of the units that differ, the same list on every rank.

        Raises:
            RuntimeError: A unit differs and ``on_drift="raise"``.
            ValueError: ``on_drift`` is something else.
        """
        if on_drift not in ("resync", "raise"):
            raise ValueError(f"`on_drift={on_drift!r}` is not supported: 'resync' or 'raise'.")
        drifted = invalidate_drifted(self._difference_gathers(), self.topology, self.group)
        if drifted and on_drift == "raise":
            raise RuntimeError(
                f"the weight replicas of {len(drifted)} unit(s) differ between ranks after "
                f"optimizer step {self.step}, first `{drifted[0]}`. Something wrote to them "
                "on some ranks only; `on_drift='resync'` would refresh them in full precision "
                "and go on."
            )
        return drifted

    # --- state ------------------------------------------------------------------------------

    def replica_state_dict(self) -> dict[str, DTensor]:
        """Each rank's slot of the replicas as DTensors sharded like the parameters, by name.

        Every rank must call this. Without those that the next gather refreshes anyway, as before
        the first one. The values are not the main weights: they are what every rank computes with,
        so saving them lets a resumed run continue exactly.
        """
        if self._votes is not None:
            self._votes.settle(self.step)
        slots: dict[str, DTensor] = {}
        for gather in self._difference_gathers():
            slots.update(gather.replica_slots())
        return slots

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides :meth:`replica_state_dict`: plain numbers."""
        return {"version": _STATE_VERSION, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any], replica: Mapping[str, Tensor]) -> None:
        """Continue from a checkpoint: the next gathers restore the saved replicas.

        Call after the main weights are loaded. Units whose parameters are not all in ``replica``
        start from the main weights in full precision.

        Args:
            state: What :meth:`state_dict` returned.
            replica: What :meth:`replica_state_dict` returned, possibly resharded; DTensors with
                this world's sharding, or this rank's local shards as plain tensors.

        Raises:
            ValueError: ``state`` was written by a newer version of this package.
        """
        version = state.get("version")
        if version != _STATE_VERSION:
            raise ValueError(
                f"the checkpoint's communication state has version {version!r}, this package "
                f"reads version {_STATE_VERSION}. Load it with the package version that wrote "
                "it, or drop the `quantized_fsdp` entry to start from the main weights."
            )
        self._context.step = int(state["step"])
        for gather in self._difference_gathers():
            slots = {n: local_tensor(replica[n]) for n in gather.names if n in replica}
            if len(slots) == len(gather.names):
                gather.restore(slots)
            else:
                gather.replica.invalidate()
        if self._votes is not None:
            self._votes.note()

    # --- measurements -----------------------------------------------------------------------

    @property
    def measure_errors(self) -> bool:
        """Whether quantization errors are summed up; costs extra passes and an exact reduction."""
        return self._context.measure_errors

    @measure_errors.setter
    def measure_errors(self, value: bool) -> None:
        self._context.measure_errors = value

    def errors(self) -> QuantizationErrors:
        """Error sums since the last call; zeros where nothing was measured."""
        if self._context.weight_errors.squared_error is not None:
            self._exchanges.join()  # which sum them up
        weights = self._context.weight_errors.pop()
        gradients = self._context.gradient_errors.pop()
        return QuantizationErrors(*weights, *gradients)

    def traffic(self) -> Traffic:
        """A snapshot of this rank's byte counters."""
        return self._context.traffic.snapshot()

    def quantization_report(self) -> QuantizationReport:
        """Traffic of this rank, errors since the last report, and outside writes."""
        sent, errors = self._context.traffic, self.errors()
        return QuantizationReport(
            counts={
                "bytes_weights_intra": sent.weights_intra,
                "bytes_weights_inter": sent.weights_inter,
                "bytes_gradients_intra": sent.gradients_intra,
                "bytes_gradients_inter": sent.gradients_inter,
            },
            ratios={
                "compression": (sent.baseline, sent.sent),
                "bits_per_weight": (8 * sent.weights_messages, sent.weights_elements),
                "bits_per_gradient": (8 * sent.gradients_messages, sent.gradients_elements),
            },
            totals={"outside_writes": sum(self.outside_writes.values())},
            errors={"weights_error": errors[:2], "gradients_error": errors[2:]},
        )

    def measure_quantization_errors(self, measure: bool) -> None:
        """Set :attr:`measure_errors`."""
        self.measure_errors = measure
