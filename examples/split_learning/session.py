"""A client's session on the server: its state, and the answers to its messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lq_lightning.adaptive import adaptive_quantize
from lq_lightning.codecs.mixed import Ranges, WidthTable

from . import protocol
from .frozen import FrozenModel
from .sites import EMBEDDED, HIDDEN, open_sites
from .wire.common import UnexpectedMessage
from .wire.messages import Message


class SentGate:
    """The server's part of a client's gate, in place of a ``BitGate`` in ``adaptive_quantize``.

    It has the widths that the client has sent, and sums up the terms of their gradient.
    """

    def __init__(self, name: str, ranges: Ranges) -> None:
        self.name = name
        self.ranges = ranges
        self.anchor = torch.zeros((), requires_grad=True)
        self.widths: WidthTable | None = None
        self._sums: Tensor | None = None
        self._values = 0

    def table(self) -> WidthTable:
        """Return the widths, which ``expect`` has checked."""
        if self.widths is None:
            raise ValueError(f"There are no widths for `{self.name}`.")
        return self.widths

    def expect(self, channels: int) -> None:
        """Check the number of channels."""
        if self.widths is None or self.widths.channels != channels:
            raise ValueError(f"There are no widths of {channels} channels for `{self.name}`.")

    def accumulate(self, sums: Tensor, values: int) -> None:
        """Add the sums of a backward pass."""
        self._sums = sums if self._sums is None else self._sums + sums
        self._values += values

    def take(self) -> tuple[Tensor, int]:
        """Return and reset both sums of ``BitGate.accumulate``, float32 on the CPU, and a count."""
        if self._sums is None:
            raise RuntimeError(f"No gradient has reached `{self.name}`.")
        taken = self._sums.float().cpu(), self._values
        self._sums, self._values = None, 0
        return taken


class Session:
    """Answers the messages of one client.

    Later batches depend only on state that the client has sent, so a client that was away sends it
    again and goes on as if nothing had happened.
    """

    def __init__(self, model: FrozenModel) -> None:
        self._model = model
        shapes = model.shapes
        self._sites = open_sites(shapes, model.settings)
        self._lines = {name: shape.num_lines for name, shape in shapes.items()}
        amaq = model.settings.codec == "amaq"
        self._gate = SentGate(HIDDEN, shapes[HIDDEN].ranges) if amaq and HIDDEN in shapes else None
        self._adapters: dict[str, Tensor] | None = None
        # Output and leaves of a forward pass that waits for its gradient.
        self._pending: tuple[Tensor, dict[str, Tensor]] | None = None
        self._answers: dict[str, Callable[[Message], Iterable[Message]]]
        self._answers = {protocol.ADAPTERS: self._take_adapters}
        if amaq:
            self._answers[protocol.WIDTHS] = self._take_widths
        if model.settings.everything:
            self._answers[protocol.EMBEDDED] = self._answer_embedded
            self._answers[protocol.HIDDEN_GRADIENT] = self._answer_gradient
        else:
            self._answers[protocol.TOKENS] = self._answer_tokens

    def answer(self, message: Message) -> Iterable[Message]:
        """Return the answers to a message."""
        if message.kind not in self._answers:
            raise UnexpectedMessage(
                f"The client sent {message.kind!r} where {' or '.join(self._answers)} was expected."
            )
        return self._answers[message.kind](message)

    def _take_widths(self, message: Message) -> Iterable[Message]:
        for name, lines in self._lines.items():
            with _told():
                table = WidthTable.unpack(message.tensor(name), lines)
            self._sites[name].set_widths(table)
            if name == HIDDEN and self._gate is not None:
                self._gate.widths = table
        return ()

    def _take_adapters(self, message: Message) -> Iterable[Message]:
        one = torch.zeros(1, dtype=torch.int64)  # one sample, for AQ-SGD
        with _told():
            self._adapters = {
                name: self._sites[name].decode(
                    self._payload(message, name), (1, *shape), samples=one
                )[0]
                for name, shape in self._model.packing.shapes.items()
            }
        return ()

    def _current_adapters(self) -> dict[str, Tensor]:
        if self._adapters is None:
            raise UnexpectedMessage("A batch came before any adapters.")
        return self._adapters

    def _answer_tokens(self, message: Message) -> Iterable[Message]:
        training = message.field("training", bool)
        ids = message.tensor("ids", dtype=torch.int32, shape=[None, None])
        labels = ids
        if "labels" in message.tensors:
            labels = message.tensor("labels", dtype=torch.int32, shape=ids.shape)
        with _told():
            self._model.check_batch(*ids.shape)
            self._model.check_ids(ids)
            self._model.check_ids(labels, least=-100)
        batch = {"input_ids": ids.long(), "labels": labels.long()}
        mask = _mask(message, ids.shape)
        if mask is not None:
            batch["attention_mask"] = mask
        loss, gradients = self._model.loss(self._current_adapters(), batch, training)
        yield Message(protocol.LOSS, tensors={"loss": loss})
        if training:
            yield self._gradients(gradients)

    def _answer_embedded(self, message: Message) -> Iterable[Message]:
        model, training = self._model, message.field("training", bool)
        ids = message.tensor("samples", dtype=torch.int64, shape=[None])
        shape = (len(ids), message.field("tokens", int), model.hidden_size)
        known: dict[str, Any] = {"training": training, "samples": ids}
        with _told():
            model.check_batch(*shape[:2])
            embedded = self._sites[EMBEDDED].decode(
                self._payload(message, EMBEDDED), shape, **known
            )
        mask = _mask(message, shape[:2])
        # A step that the client has given up, as for a loss that is not finite, ends here.
        self._pending = None
        hidden, leaves = model.forward(self._current_adapters(), embedded, mask, training)
        if training and self._gate is not None:
            payload, arrives = self._sites[HIDDEN].encode_and_round(hidden)
            hidden = adaptive_quantize(hidden, self._gate, arrives=arrives)
        else:
            payload = self._sites[HIDDEN].encode(hidden, **known)
        if training:
            self._pending = hidden, leaves
        yield Message(protocol.HIDDEN, tensors={HIDDEN: payload})

    def _answer_gradient(self, message: Message) -> Iterable[Message]:
        pending, self._pending = self._pending, None
        if pending is None:
            raise UnexpectedMessage("A gradient came for which there is no forward pass.")
        hidden, leaves = pending
        with _told():
            payload = self._payload(message, HIDDEN)
            gradient = self._sites[HIDDEN].decode_gradient(payload, hidden.shape)
        gradients = self._model.backward(hidden, gradient, leaves)
        embedded = gradients.pop(EMBEDDED, None)
        yield self._gradients(gradients)
        if embedded is not None:
            payload = self._sites[EMBEDDED].encode_gradient(embedded)
            yield Message(protocol.EMBEDDED_GRADIENT, tensors={EMBEDDED: payload})
        if self._gate is not None:
            sums, values = self._gate.take()
            yield Message(protocol.GATE_SUMS, {"values": values}, {HIDDEN: sums})

    def _payload(self, message: Message, name: str) -> Tensor:
        payload = message.tensor(name, dtype=torch.uint8, shape=[None])
        return payload.to(self._model.device)  # is decoded there

    def _gradients(self, gradients: dict[str, Tensor]) -> Message:
        payloads = {
            name: self._sites[name].encode_gradient(value) for name, value in gradients.items()
        }
        return Message(protocol.ADAPTER_GRADIENTS, tensors=payloads)


@contextmanager
def _told() -> Iterator[None]:
    """Tell the client why its message is wrong; texts of other errors are not told."""
    try:
        yield
    except ValueError as error:
        raise UnexpectedMessage(str(error)) from error


def _mask(message: Message, shape: Any) -> Tensor | None:
    if "mask" not in message.tensors:
        return None
    return message.tensor("mask", dtype=torch.bool, shape=list(shape)).long()
