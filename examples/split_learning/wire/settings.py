"""How much and how long a peer may take."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

# What a peer may ask for as its own idle time, which decides how often it is sent a sign of life.
SHORTEST_IDLE_S = 0.1
LONGEST_IDLE_S = 86_400.0
SMALLEST_HEADER_NBYTES = 4096  # the handshake needs that much


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a message may hold. All are checked before anything is allocated.

    A server holds at most ``max_clients * body_nbytes`` for messages that are on their way.

    Attributes:
        header_nbytes: of the JSON header: kind, fields, and names, dtypes and shapes of tensors.
        body_nbytes: of all tensors of a message together.
        tensors: number of tensors in a message.
        dims: number of dimensions of a tensor.
        depth: of lists and dictionaries inside each other, in the header.
        items: values in the header, those of shapes included.
    """

    header_nbytes: int = 256 * 1024
    body_nbytes: int = 256 * 1024**2
    tensors: int = 1024
    dims: int = 8
    depth: int = 16
    items: int = 16_384

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for values out of their range."""
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ValueError(f"`{field.name}={value!r}` must be an integer of at least 1.")
        if self.header_nbytes < SMALLEST_HEADER_NBYTES:
            raise ValueError(
                f"`header_nbytes={self.header_nbytes}` must be at least {SMALLEST_HEADER_NBYTES}: "
                "the handshake needs that much."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """How long a peer may take, in seconds.

    A message that has begun must keep up ``slowest_rate`` on average after the first ``stall_s``,
    and may never pause for ``stall_s``: one that trickles a byte per second is cut, one of 200 MB
    over 10 Mb/s is not.

    Attributes:
        connect_s: to reach the server.
        handshake_s: for the whole handshake. A stranger is held no longer than this.
        idle_s: between two messages without any byte. The other side sends a sign of life three
            times as often, also while it computes.
        wait_s: for a message to begin, whatever signs of life come.
        stall_s: within a message without any byte, in either direction.
        slowest_rate: bytes per second.
        linger_s: to wait, at the end, for the peer to have read the last message.
    """

    connect_s: float = 10.0
    handshake_s: float = 10.0
    idle_s: float = 60.0
    wait_s: float = 3600.0
    stall_s: float = 60.0
    slowest_rate: float = 20_000.0
    linger_s: float = 2.0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for values out of their range."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise ValueError(f"`{field.name}={value!r}` must be a number above 0.")
        if not SHORTEST_IDLE_S <= self.idle_s <= LONGEST_IDLE_S:
            raise ValueError(
                f"`idle_s={self.idle_s}` must be between {SHORTEST_IDLE_S} and {LONGEST_IDLE_S}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """How often and how soon to connect again after what passes by itself.

    The pause before attempt n is ``first_s * factor ** (n - 1)``, at most ``longest_s``, and of
    that a random share of at least one half, so that clients of a restarted server do not all come
    at once.

    Attributes:
        attempts: to connect, the first included, before giving up.
        first_s: the first pause.
        factor: of every pause to the one before.
        longest_s: the longest pause.
    """

    attempts: int = 10
    first_s: float = 0.5
    factor: float = 2.0
    longest_s: float = 30.0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for values out of their range."""
        if type(self.attempts) is not int or self.attempts < 1:
            raise ValueError(f"`attempts={self.attempts!r}` must be an integer of at least 1.")
        if not (0 <= self.first_s <= self.longest_s < math.inf and 1 <= self.factor < math.inf):
            raise ValueError(
                f"`first_s={self.first_s}`, `longest_s={self.longest_s}`, `factor={self.factor}`: "
                "pauses must be at least 0 and the first not above the longest, the factor at "
                "least 1."
            )

    def pause_s(self, failures: int, share: float) -> float:
        """Return the pause after so many failures (1 or more); ``share`` is within 0 and 1."""
        longest = self.first_s
        for _ in range(failures - 1):  # a power of the factor could overflow
            longest = min(self.longest_s, longest * self.factor)
            if longest == self.longest_s:
                break
        return longest * (0.5 + 0.5 * share)
