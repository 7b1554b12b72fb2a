"""Gates of the boundaries between pipeline stages: what ``AdaptiveBits`` does there.

A gate lives on the rank that sends the hidden states of its boundary. That rank has both factors of
its gradient: what it encoded, and the gradient of what the next rank decoded, which comes back over
the boundary. Nothing is added to the graph of a stage, so that frozen stages, checkpointed layers
and backward passes in two halves make no difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lq_lightning.adaptive import AdaptiveBitsConfig, BitGate, GateOptimizer, adaptive_quantize
from lq_lightning.codecs.mixed import WidthTable
from lq_lightning.pipeline.boundary_widths import BoundaryWidths
from lq_lightning.pipeline.message import BoundaryMeta, Message

from .gate_placement import GatePlacement

__all__ = ["PipelineGates"]


class PipelineGates:
    """The gates of a pipeline's boundaries; all ranks make one and call its methods together.

    A listener of the pipeline: ``starts``, ``encode`` and ``returned`` are for its engine.

    Args:
        config: options of all gates.
        boundaries: boundaries of the run, whose starting widths are set here.
        state: gates of all boundaries, of any number of stages; None to start. Boundaries that
            are gone are dropped, new ones start at the mean, each with a warning.

    Attributes:
        optimizer: optimizer of the gates of the boundaries that this rank sends over.

    Raises:
        ValueError: on all ranks: ``state`` has gates that mean something else.
        RuntimeError: on all ranks: ranks have other options, or another ``state``.
    """

    def __init__(
        self,
        config: AdaptiveBitsConfig,
        boundaries: BoundaryWidths,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._config, self._boundaries = config, boundaries
        self._channels: int | None = None  # of hidden states, once they are known
        gates = self._gates_of_all()
        if state is not None:
            state = _for_boundaries(state, tuple(gates), config)
            # On every rank those of all boundaries, so that no rank finds an error alone.
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

    # --- in a step of the pipeline ----------------------------------------------------------------

    def starts(self, boundary: BoundaryMeta) -> None:
        """Note how many channels hidden states have, on all ranks."""
        if self._channels is None:
            self._channels = boundary.shape[-1]
        for gate in self._gates.values():
            gate.expect(boundary.shape[-1])

    def encode(self, message: Message, hidden: Tensor) -> Tensor:
        """Return the payload.

        Keep what the gate's gradient needs: two bytes per value, until ``returned``.
        """
        payload, arrives = self._boundaries.encode(message, hidden)
        sent = adaptive_quantize(hidden, self._gates[message.boundary], arrives=arrives)
        self._edges[message.boundary, message.microbatch] = get_gradient_edge(sent)
        return payload

    def returned(self, message: Message, gradient: Tensor) -> None:
        """Add to the gate's gradient."""
        edge = self._edges.pop((message.boundary, message.microbatch))
        torch.autograd.backward((edge,), (gradient,))

    # --- between steps ----------------------------------------------------------------------------

    @property
    def placement(self) -> GatePlacement:
        """The gates of this rank, and what joins them with those of others."""
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
        """Hear of no more steps. Messages keep their widths."""
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
    """Return the state of gates with entries for these boundaries, and say what was changed."""
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
