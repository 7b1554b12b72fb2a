"""The client's end of the protocol: questions to the server, asked again after a failure.

With AMAQ all gates are the client's, with their optimizer, so that one mean is held over all sites
and a checkpoint of the client has everything. For the hidden states, which the server sends, the
server sums up gradient times quantization error per channel, and the client turns that into the
gradient of its gate: one float32 per channel and batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lq_lightning.adaptive import AdaptiveBitsConfig, BitGate, GateOptimizer
from lq_lightning.codecs.mixed import WidthTable

from . import protocol
from .adapters import PackedAdapters
from .settings import SplitSettings
from .sites import EMBEDDED, HIDDEN, SiteShape, open_sites
from .wire.client import Connection
from .wire.common import TRANSIENT
from .wire.messages import Message, Traffic

_T = TypeVar("_T")
_MOST_FAILURES = 5  # of one request, each after a successful handshake


class ClientGates:
    """The gates of all sites, and their training.

    ``changes`` are other values of ``AdaptiveBitsConfig`` than its preset for the bits.
    """

    def __init__(
        self, shapes: Mapping[str, SiteShape], settings: SplitSettings, **changes: Any
    ) -> None:
        config = AdaptiveBitsConfig.preset(settings.bits, **changes)
        self.gates = {
            name: BitGate(config, shape.num_lines, name=name, ranges=shape.ranges)
            for name, shape in shapes.items()
        }
        self.optimizer = GateOptimizer(self.gates, config)

    def tables(self) -> dict[str, WidthTable]:
        """Return the widths of all sites."""
        return {name: gate.table() for name, gate in self.gates.items()}


class ServerLink:
    """Asks the server for losses, hidden states and gradients.

    If the connection breaks, it connects anew and asks again: answers depend only on the messages
    that it sends. With AQ-SGD they depend on caches at both ends, and the error is raised.

    Args:
        connect: Returns a new connection, or raises an error that is final.
        shapes: Shapes of the sites.
        matrices: Shapes of the adapters as they cross.
        settings: Settings of both ends.
        gates: Gates of all sites; None without AMAQ.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        shapes: Mapping[str, SiteShape],
        matrices: Mapping[str, tuple[int, int]],
        settings: SplitSettings,
        gates: ClientGates | None,
    ) -> None:
        self._connect = connect
        self._shapes = dict(shapes)
        self._matrix_shapes = dict(matrices)
        self._settings = settings
        self.gates = gates
        self.sites = open_sites(shapes, settings)
        self.reconnections = 0
        self._past = Traffic()
        self._connection: Connection | None = None
        self._widths: Message | None = None
        self._adapters: Message | None = None
        self._encoded = -1  # which adapters were encoded last
        self._embedded: Message | None = None
        self._told: dict[str, Message] = {}  # state that this connection's server has, by kind

    @property
    def traffic(self) -> Traffic:
        """Counts of all connections together."""
        counted = Traffic()
        counted.merge(self._past)
        if self._connection is not None:
            counted.merge(self._connection.traffic)
        return counted

    def close(self) -> None:
        """End the connection; the next question opens another, to which all is sent again."""
        self._disconnect()
        self._encoded = -1
        self._widths = self._adapters = self._embedded = None
        if self._settings.codec == "aq_sgd":
            self.sites = open_sites(self._shapes, self._settings)

    def prepare(self, packed: PackedAdapters, learning: bool) -> dict[str, Tensor]:
        """Encode widths and adapters for the next questions, unless they were encoded last.

        Return the adapters as the server decodes them where gates learn from this batch
        (``learning``), else nothing.
        """
        if self.gates is not None:
            tables = self.gates.tables()
            widths = {name: table.pack() for name, table in tables.items()}
            if self._widths is None or not _equal(self._widths.tensors, widths):
                self._widths = Message(protocol.WIDTHS, tensors=widths)
                for name, table in tables.items():
                    self.sites[name].set_widths(table)
                self._encoded = -1
        if self._adapters is None or self._encoded != packed.changes:
            return self._encode_adapters(packed, learning)
        if not learning:
            return {}
        return {
            name: self.sites[name].decode(payload.to(packed.matrices[name].device), (1, *shape))[0]
            for (name, shape), payload in zip(
                self._matrix_shapes.items(), self._adapters.tensors.values(), strict=True
            )
        }

    def encode(
        self,
        embedded: Tensor,
        mask: Tensor | None,
        samples: Tensor,
        training: bool,
        learning: bool,
    ) -> tuple[Message, Tensor | None]:
        """Return the message of `forward`, and with ``learning`` the input as it is decoded.

        Args:
            embedded: Input of the trunk, ``[B, T, H]``.
            mask: ``[B, T]`` bool, False for padding.
            samples: ``[B]`` int64, which tell samples apart.
            training: Whether `backward` follows.
            learning: Whether gates learn from this batch.
        """
        site, arrives = self.sites[EMBEDDED], None
        if learning:
            payload, arrives = site.encode_and_round(embedded)
        else:
            payload = site.encode(embedded, training=training, samples=samples)
        tensors = {EMBEDDED: payload, "samples": samples}
        if mask is not None:
            tensors["mask"] = mask
        fields = {"training": training, "tokens": embedded.shape[1]}
        return Message(protocol.EMBEDDED, fields, tensors), arrives

    def loss(
        self, batch: Mapping[str, Tensor], training: bool, device: torch.device
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a batch, and in training the gradients of the adapters.

        ``batch`` has ``ids`` and maybe ``labels``, ``[B, T]`` int32, and ``mask``, bool.
        """

        def ask(connection: Connection) -> tuple[Tensor, dict[str, Tensor]]:
            connection.send(Message(protocol.TOKENS, {"training": training}, dict(batch)))
            loss = connection.receive(protocol.LOSS).tensor("loss", shape=[])
            return loss, self._receive_gradients(connection, device) if training else {}

        return self._ask(ask)

    def forward(self, sent: Message, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return the hidden states ``[B, T, H]`` behind the trunk for a message of `encode`."""
        self._embedded = sent

        def ask(connection: Connection) -> Message:
            connection.send(sent)
            return connection.receive(protocol.HIDDEN)

        payload = _payload(self._ask(ask), HIDDEN, device)
        training, samples = sent.fields["training"], sent.tensors["samples"]
        return self.sites[HIDDEN].decode(payload, shape, training=training, samples=samples)

    def backward(self, gradient: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return gradients of the last `forward`: of its input, if used, and of the adapters."""
        sent, self._embedded = self._embedded, None
        if sent is None:
            raise RuntimeError(
                "A backward pass for which the server has nothing: it keeps the last forward pass "
                "of training only, for one backward pass. Let each follow the other."
            )
        payload = self.sites[HIDDEN].encode_gradient(gradient)
        first = self._connection

        def ask(connection: Connection) -> tuple[Tensor | None, dict[str, Tensor]]:
            if connection is not first:  # this server has to run the forward pass first
                connection.send(sent)
                connection.receive(protocol.HIDDEN)
            connection.send(Message(protocol.HIDDEN_GRADIENT, tensors={HIDDEN: payload}))
            gradients = self._receive_gradients(connection, gradient.device)
            embedded = None
            if self._settings.input_gradient:
                received = connection.receive(protocol.EMBEDDED_GRADIENT)
                embedded = self.sites[EMBEDDED].decode_gradient(
                    _payload(received, EMBEDDED, gradient.device), gradient.shape
                )
            if self.gates is not None:
                received = connection.receive(protocol.GATE_SUMS)
                lines = self._shapes[HIDDEN].num_lines
                sums = received.tensor(HIDDEN, dtype=torch.float32, shape=[2, lines])
                self.gates.gates[HIDDEN].accumulate(sums, received.field("values", int))
            return embedded, gradients

        return self._ask(ask)

    def _encode_adapters(self, packed: PackedAdapters, learning: bool) -> dict[str, Tensor]:
        payloads, arriving = {}, {}
        one = torch.zeros(1, dtype=torch.int64)  # one sample, for AQ-SGD
        for name, value in packed.matrices.items():
            if learning:
                payloads[name], arrives = self.sites[name].encode_and_round(value[None])
                arriving[name] = arrives[0]
            else:
                payloads[name] = self.sites[name].encode(value[None], samples=one)
        self._adapters = Message(protocol.ADAPTERS, tensors=payloads)
        self._encoded = packed.changes
        return arriving

    def _ask(self, question: Callable[[Connection], _T]) -> _T:
        """Return the answer to a question, asked again over a new connection if need be."""
        failures = 0
        while True:
            if self._connection is None:  # errors are final: `connect` has its own attempts
                self._connection = self._connect()
            try:
                for known in (self._widths, self._adapters):
                    if known is not None and self._told.get(known.kind) is not known:
                        self._connection.send(known)
                        self._told[known.kind] = known
                return question(self._connection)
            except TRANSIENT as error:
                failures += 1
                self._disconnect()
                if self._settings.codec == "aq_sgd":
                    raise type(error)(
                        f"{error} AQ-SGD has lost what both ends kept: start the client again, and "
                        "it goes on from its last checkpoint."
                    ) from error
                if failures > _MOST_FAILURES:
                    raise
                self.reconnections += 1

    def _disconnect(self) -> None:
        connection, self._connection, self._told = self._connection, None, {}
        if connection is not None:
            connection.close()
            self._past.merge(connection.traffic)

    def _receive_gradients(self, connection: Connection, device: torch.device) -> dict[str, Tensor]:
        received = connection.receive(protocol.ADAPTER_GRADIENTS)
        return {
            name: self.sites[name].decode_gradient(_payload(received, name, device), shape)
            for name, shape in self._matrix_shapes.items()
        }


def _payload(message: Message, name: str, device: torch.device) -> Tensor:
    return message.tensor(name, dtype=torch.uint8, shape=[None]).to(device)


def _equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())
