"""Counts of what was sent and received, by kind of message."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(slots=True)
class Count:
    """Messages of one kind in one direction.

    Attributes:
        messages: how many.
        nbytes: all their bytes above TCP: prefix, header, tensors and tags.
        tensor_nbytes: the bytes of their tensors alone.
    """

    messages: int = 0
    nbytes: int = 0
    tensor_nbytes: int = 0


class Traffic:
    """What went over one connection, or over several together.

    Besides the kinds of the program there are ``handshake``, ``alive`` (signs of life) and ``end``.

    Attributes:
        sent: counts by kind.
        received: counts by kind.
    """

    def __init__(self) -> None:
        self.sent: dict[str, Count] = {}
        self.received: dict[str, Count] = {}
        self._lock = threading.Lock()

    def add_sent(self, kind: str, nbytes: int, tensor_nbytes: int = 0) -> None:
        """Count a message that left."""
        with self._lock:
            _add(self.sent, kind, Count(1, nbytes, tensor_nbytes))

    def add_received(self, kind: str, nbytes: int, tensor_nbytes: int = 0) -> None:
        """Count a message that came."""
        with self._lock:
            _add(self.received, kind, Count(1, nbytes, tensor_nbytes))

    def merge(self, other: Traffic) -> None:
        """Add all that another counted up to now."""
        with self._lock, other._lock:
            for own, others in ((self.sent, other.sent), (self.received, other.received)):
                for kind, count in others.items():
                    _add(own, kind, count)

    @property
    def sent_nbytes(self) -> int:
        """All bytes sent."""
        with self._lock:
            return sum(count.nbytes for count in self.sent.values())

    @property
    def received_nbytes(self) -> int:
        """All bytes received."""
        with self._lock:
            return sum(count.nbytes for count in self.received.values())


def _add(counts: dict[str, Count], kind: str, count: Count) -> None:
    known = counts.setdefault(kind, Count())
    known.messages += count.messages
    known.nbytes += count.nbytes
    known.tensor_nbytes += count.tensor_nbytes
