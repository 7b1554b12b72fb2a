"""Addresses, limits on size and time, and how often a client tries to connect."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from .errors import AddressError

Address = tuple[str, int]


def parse_address(text: str) -> Address:
    """Return host and port of ``host:port`` or ``[IPv6 address]:port``.

    Raises:
        AddressError: text of another form.
    """
    host, separator, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        separator = ""
    if not (separator and host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise AddressError(
            f"{text!r} is no address: write host:port, such as 192.0.2.7:5600 or [2001:db8::7]:5600"
        )
    return host, int(port)


def show_address(address: Address) -> str:
    """Return an address as ``parse_address`` reads it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_positive(settings: Any) -> None:
    for field in fields(settings):
        if not 0 < getattr(settings, field.name) < math.inf:
            raise ValueError(f"`{field.name}={getattr(settings, field.name)}` must be above 0.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits on a received message, all checked before its tensors are allocated.

    Attributes:
        nbytes: size of the whole message. A server holds about twice that per client.
        tensors: number of tensors.
        dims: number of dimensions of a tensor.
    """

    nbytes: int = 256 * 1024**2
    tensors: int = 1024
    dims: int = 8

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for values that are not above 0."""
        _check_positive(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """How long the other side may take, in seconds.

    Attributes:
        connect_s: to connect, TLS and the comparison of configurations included.
        idle_s: without an answer to a keepalive ping, which either side sends three times as often,
            also while it computes.
        wait_s: until the next message begins, however many pings are answered.
        stall_s: for each half MiB of a message, in either direction.
    """

    connect_s: float = 20.0
    idle_s: float = 60.0
    wait_s: float = 3600.0
    stall_s: float = 60.0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for values that are not above 0."""
        _check_positive(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """How often and how soon to connect again after a transient error.

    The pause before attempt n is ``first_s * factor ** (n - 1)``, at most ``longest_s``, and of
    that a random share of at least one half, so that clients of a restarted server do not all come
    at once.

    Attributes:
        attempts: to connect, the first included, before giving up.
        first_s: the first pause.
        factor: ratio of a pause to the one before.
        longest_s: the longest pause.
    """

    attempts: int = 10
    first_s: float = 0.5
    factor: float = 2.0
    longest_s: float = 30.0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for values out of their range."""
        if self.attempts < 1:
            raise ValueError(f"`attempts={self.attempts!r}` must be at least 1.")
        if not (0 <= self.first_s <= self.longest_s < math.inf and 1 <= self.factor < math.inf):
            raise ValueError(
                f"`first_s={self.first_s}`, `longest_s={self.longest_s}`, `factor={self.factor}`: "
                "pauses must be at least 0 and the first not above the longest, the factor at "
                "least 1."
            )

    def pause_s(self, failures: int, share: float) -> float:
        """Return the pause after so many failures (1 or more); ``share`` is within 0 and 1."""
        exponent = min(failures - 1, 64)  # a larger power could overflow
        return min(self.longest_s, self.first_s * self.factor**exponent) * (0.5 + 0.5 * share)
