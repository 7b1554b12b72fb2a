"""Handle on a model's quantized collectives: exchanges after steps, state, drift, measurements."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lq_lightning._compat.tensors import local_tensor
from lq_lightning._compat.torch import all_gather_flat
from lq_lightning.data_parallel.all_gather import WeightDifferenceAllGather
from lq_lightning.data_parallel.plan import CommunicationPlan
from lq_lightning.data_parallel.reduce_scatter import TwoLevelReduceScatter
from lq_lightning.data_parallel.replica import StaleReplicaConsensus
from lq_lightning.data_parallel.unit import Traffic, UnitContext
from lq_lightning.foundation import streams
from lq_lightning.foundation.reporting import QuantizationReport
from lq_lightning.foundation.streams import CommPipeline
from lq_lightning.foundation.topology import Topology
from lq_lightning.kernels.checksum import checksums

_STATE_VERSION = 2


class QuantizationErrors(NamedTuple):
    """Sums behind the relative L2 errors of this rank since the last call.

    The relative error over ranks is ``sqrt(sum(squared_error) / sum(squared_norm))``.
    """

    weights_squared_error: float
    weights_squared_norm: float
    gradients_squared_error: float
    gradients_squared_norm: float


class UnitCollectives(NamedTuple):
    """The collectives of one FSDP2 unit; None where FSDP2's own are left."""

    gather: WeightDifferenceAllGather | None
    scatter: TwoLevelReduceScatter | None


class ExchangeSchedule:
    """Exchanges weight differences right after an optimizer step.

    On CUDA the work has three streams of its own (see [Note: streams]), so that the network is busy
    from the end of the optimizer step on, whatever forward computes; a gather waits for its own
    unit only. While one bucket of units is on the network, the one before it is decoded and the
    next one encoded. On a CPU the exchanges are complete when :meth:`run` returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: torch.cuda.Stream | None = None
        self._later = CommPipeline()

    def run(self, buckets: Iterable[Sequence[WeightDifferenceAllGather]]) -> None:
        """Exchange the differences of units, bucket by bucket. Every rank must call this."""
        if not streams.has_streams(self._device):
            for first, *others in buckets:
                exchange = first.start_exchange(others)
                if exchange is not None:
                    first.finish_exchange(exchange, first.send_exchange(exchange))
            return
        if self._first is None:
            self._first = streams.new_stream()
        self._first.wait_stream(streams.current_stream())
        try:
            with streams.on_stream(self._first):
                try:
                    for first, *others in buckets:
                        self._run_one(first, others)
                finally:
                    self._later.join()
        except BaseException:  # pending exchanges still write to replicas that are refreshed next
            self.join()
            raise

    def _run_one(
        self, first: WeightDifferenceAllGather, others: Sequence[WeightDifferenceAllGather]
    ) -> None:
        self._later.make_room()
        exchange = first.start_exchange(others)
        if exchange is not None:
            self._later.submit(
                exchange.messages,
                lambda: first.send_exchange(exchange),
                lambda received: first.finish_exchange(exchange, received),
            )

    def join(self) -> None:
        """Let the current stream wait until all exchanges are done."""
        # the first stream has waited for the others, also after an error
        if self._first is not None:
            streams.current_stream().wait_stream(self._first)


class QuantizedCommunication:
    """Handle on the quantized collectives of one model; made by ``quantize_communication``.

    Attributes:
        plan: Wire format of every parameter.
        topology: Ranks and nodes.
        group: Ranks that shard the model, which are not always all of them.
    """

    def __init__(
        self,
        units: list[UnitCollectives],
        context: UnitContext,
        plan: CommunicationPlan,
        device: torch.device,
        consensus: StaleReplicaConsensus | None,
    ) -> None:
        self._units = units
        self._consensus = consensus  # None without differences
        self._context = context
        self.plan = plan
        self.topology = context.topology
        self.group = context.groups.every
        self._exchanges = ExchangeSchedule(device)
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    # --- steps ------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps seen so far."""
        return self._context.step

    def register_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange weights after each of this optimizer's steps. Idempotent."""
        if optimizer in self._optimizers:
            return
        self._optimizers.add(optimizer)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda opt, *unused: self.note_optimizer_step(opt))

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Wait for the exchanges, which read the main weights, before an update changes these.

        A closure is wrapped: its forward and backward, which run first, need not wait.
        """
        position = next((i for i, value in enumerate(args[1:], 1) if callable(value)), None)
        closure = kwargs.get("closure") if position is None else args[position]
        if closure is None:
            self._exchanges.join()
            return args, kwargs

        def joined() -> Any:
            result = closure()
            self._exchanges.join()
            return result

        if position is None:
            return args, {**kwargs, "closure": joined}
        return (*args[:position], joined, *args[position + 1 :]), kwargs

    def join(self) -> None:
        """Let the current CUDA stream wait for all pending exchanges and reductions."""
        self._exchanges.join()
        self._context.reductions.join()

    def recover(self) -> None:
        """Clean up after a forward or backward that failed; every rank that goes on calls it.

        Waits for all pending exchanges and reductions.
        """
        for unit in self._units:  # first, so that nothing is reduced any more
            if unit.scatter is not None:
                unit.scatter.recover()
        self.join()

    def note_optimizer_step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Exchange the weights, which ``optimizer`` has updated on every rank.

        Units without any of its parameters are left alone; None exchanges all.
        """
        self._context.step += 1
        stepped = None
        if optimizer is not None:
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        begun: set[int] = set()
        try:
            self._exchanges.run(self._buckets_to_exchange(stepped, begun))
        finally:  # after an error other units' changes count as updates, which refresh replicas
            if self._consensus is not None:
                self._consensus.note_step(lambda replica: id(replica) in begun)

    def invalidate(self, written: Iterable[nn.Parameter] | None = None) -> None:
        """Let the next gathers refresh the replicas in full precision. Every rank must call this.

        With ``written``, those of units that hold one of these sharded parameters.

        Updates are noticed without it, but some only one forward pass later: those of the shards of
        some ranks, and on GPUs those that no version counter counts, such as
        ``parameter.data.copy_(value)``. ``parameter.data = value`` is lost whatever follows: it
        replaces a tensor that FSDP2 does not compute with, and the next forward pass raises an
        error.
        """
        ids = None if written is None else {id(parameter) for parameter in written}
        for gather in self._difference_gathers():
            if gather.holds_any(ids):
                gather.replica.invalidate()

    def _buckets_to_exchange(
        self, stepped: set[int] | None, begun: set[int]
    ) -> Iterator[Sequence[WeightDifferenceAllGather]]:
        """Yield units to exchange together, the same on all ranks; note them in ``begun``."""
        for _, sharing in groupby(self._difference_gathers(), lambda gather: id(gather.memory)):
            gathers = [gather for gather in sharing if gather.holds_any(stepped)]
            begun.update(id(gather.replica) for gather in gathers)
            if gathers and gathers[0].exchanges_alike(gathers[1:]):
                yield gathers
            else:
                yield from ([gather] for gather in gathers)

    @property
    def external_weight_updates(self) -> dict[str, int]:
        """Number of updates by anything but an optimizer step, by name of the unit.

        The same on every rank; each costs a full-precision gather.
        """
        return {} if self._consensus is None else self._consensus.counts

    @property
    def outside_writes(self) -> dict[str, int]:
        """Deprecated name of :attr:`external_weight_updates`."""
        warnings.warn(
            "`outside_writes` is now called `external_weight_updates`; the old name will be "
            "removed in the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.external_weight_updates

    def _difference_gathers(self) -> list[WeightDifferenceAllGather]:
        return [u.gather for u in self._units if u.gather is not None]

    # --- drift ------------------------------------------------------------------------------

    def check_replicas(self, on_drift: Literal["resync", "raise"] = "resync") -> list[str]:
        """Compare the replicas of all ranks of ``group`` by checksum. All of them must call this.

        Drifted units are refreshed in full precision at their next gather.

        Args:
            on_drift: ``"raise"`` also raises an error.

        Returns:
            Names of the units that differ, the same list on every rank.

        Raises:
            RuntimeError: A unit differs and ``on_drift="raise"``.
            ValueError: ``on_drift`` is something else.
        """
        if on_drift not in ("resync", "raise"):
            raise ValueError(f"`on_drift={on_drift!r}` is not supported: 'resync' or 'raise'.")
        drifted = _drifted(self._difference_gathers(), self.topology, self.group)
        for gather in drifted:
            gather.replica.invalidate()
        names = [gather.unit.name for gather in drifted]
        if names and on_drift == "raise":
            raise RuntimeError(
                f"the weight replicas of {len(names)} unit(s) differ between ranks after "
                f"optimizer step {self.step}, first `{names[0]}`. Something wrote to them "
                "on some ranks only; `on_drift='resync'` would refresh them in full precision "
                "and go on."
            )
        return names

    # --- state ------------------------------------------------------------------------------

    def replica_state_dict(self) -> dict[str, DTensor]:
        """Each rank's slot of the replicas as DTensors sharded like the parameters, by name.

        Every rank must call this. Stale replicas, as before the first gather, are left out. Every
        rank computes with these values, which are not the main weights: a run that resumes with
        them continues exactly.
        """
        if self._consensus is not None:
            self._consensus.settle(self.step)
        slots: dict[str, DTensor] = {}
        for gather in self._difference_gathers():
            slots.update(gather.replica_slots())
        return slots

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers that a checkpoint needs besides :meth:`replica_state_dict`."""
        return {"version": _STATE_VERSION, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any], replica: Mapping[str, Tensor]) -> None:
        """Continue from a checkpoint: the next gathers restore the saved replicas.

        Call after the main weights are loaded. Units whose parameters are not all in ``replica``
        start from the main weights in full precision.

        Args:
            state: Result of :meth:`state_dict`.
            replica: Result of :meth:`replica_state_dict`, possibly resharded; DTensors with this
                world's sharding, or this rank's local shards as plain tensors.

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
            names = gather.unit.names
            slots = {n: local_tensor(replica[n]) for n in names if n in replica}
            if len(slots) == len(names):
                gather.restore(slots)
            else:
                gather.replica.invalidate()
        if self._consensus is not None:
            self._consensus.note()

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

    @property
    def replica_nbytes(self) -> int:
        """Bytes of this rank's replicas of the weights."""
        held = [g.replica.values for g in self._difference_gathers()]
        storages = [values.untyped_storage() for values in held if values is not None]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def quantization_report(self) -> QuantizationReport:
        """Traffic of this rank, errors since the last report, and external weight updates."""
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
            totals={"outside_writes": sum(self.external_weight_updates.values())},
            errors={"weights_error": errors[:2], "gradients_error": errors[2:]},
        )

    def measure_quantization_errors(self, measure: bool) -> None:
        """Set :attr:`measure_errors`."""
        self.measure_errors = measure


def _drifted(
    gathers: Sequence[WeightDifferenceAllGather], topology: Topology, group: dist.ProcessGroup
) -> list[WeightDifferenceAllGather]:
    """Units whose replicas differ between ranks; each rank of the group has to call this."""
    values = {gather: gather.replica.fresh_values() for gather in gathers}
    known = {gather: found for gather, found in values.items() if found is not None}
    if not known:
        return []
    mine = checksums([*known.values()])
    every = mine.new_empty(topology.world_size, mine.numel())
    all_gather_flat(every.view(-1), mine, group)
    drifted = []
    for column, gather in zip(every.unbind(1), known, strict=True):
        # ranks of a node that shares a replica hold different slots of it
        rows = topology.num_nodes if gather.shared_by_node else topology.world_size
        by_row = column.reshape(rows, -1)
        if (by_row != by_row[:1]).any():
            drifted.append(gather)
    return drifted
