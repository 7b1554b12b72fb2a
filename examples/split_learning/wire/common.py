"""Errors, addresses, limits, deadlines, and the configuration that both ends compare first.

``WireError`` covers all that another machine or the network can cause. ``UnsendableMessage``,
``CertificateError`` and ``AddressError`` are mistakes of the program or the person that starts it.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from lq_lightning import __version__

Address = tuple[str, int]
PIECE_NBYTES = 512 * 1024  # of a gRPC message, at most
PROTOCOL = 2
SERVICE, METHOD = "lq.SplitLearning", "Connect"
TERMS_KEY = "terms-bin"  # metadata entry in which either side sends its terms
_TERMS_NBYTES = 6000  # gRPC refuses metadata above 8 KiB
_OWN = ("protocol", "package")


class CertificateError(ValueError):
    """A certificate that is missing, that others may read, or that is not for this program."""


class AddressError(ValueError):
    """An address that no machine can have, or a name that none has."""


class UnsendableMessage(ValueError):
    """A message that the other side does not take; nothing was sent."""


class WireError(RuntimeError):
    """The connection cannot be used any longer."""


class PeerLost(WireError):
    """The connection broke: the network failed, or the other process ended."""


class PeerStalled(PeerLost):
    """The other side sent or took nothing for too long."""


class PeerFailed(WireError):
    """The server met an error and said so."""


class MalformedMessage(WireError):
    """Bytes that are not a message of this protocol."""


class TooLarge(MalformedMessage):
    """A message above a limit; nothing was allocated for it."""


class UnexpectedMessage(WireError):
    """A message of another kind, or with other fields or tensors, than the program waits for."""


class AuthenticationFailed(WireError):
    """One side does not accept the other's certificate."""


class Refused(WireError):
    """The server does not take this client as it is configured."""


class ServerBusy(Refused):
    """The server has as many clients as it takes; a later attempt may succeed."""


# Errors that pass: the network comes back, a server is started again or has room again.
TRANSIENT = (PeerLost, ServerBusy)


def printable(text: object, longest: int = 600) -> str:
    """Return a peer's text fit for a log or a terminal: short, printable ASCII, on one line."""
    shown = "".join(c if " " <= c <= "~" else ascii(c)[1:-1] for c in str(text)[: longest + 1])
    return shown if len(shown) <= longest else shown[:longest] + "..."


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


class _Positive:
    """Base of dataclasses whose fields are all finite and above 0."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Check the values."""
        for field in fields(self):  # type: ignore[arg-type]
            if not 0 < getattr(self, field.name) < math.inf:
                raise ValueError(f"`{field.name}={getattr(self, field.name)}` must be above 0.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits(_Positive):
    """Limits on a received message, all checked before its tensors are allocated.

    Attributes:
        nbytes: Size of the whole message. A server holds about twice that per client.
        tensors: Number of tensors.
        dims: Number of dimensions of a tensor.
    """

    nbytes: int = 256 * 1024**2
    tensors: int = 1024
    dims: int = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines(_Positive):
    """How long the other side may take, in seconds.

    Attributes:
        connect_s: To connect, TLS and the comparison of configurations included.
        idle_s: Without an answer to a keepalive ping, which either side sends three times as often,
            also while it computes.
        wait_s: Until the next message begins, however many pings are answered.
        stall_s: For each half MiB of a message, in either direction.
    """

    connect_s: float = 20.0
    idle_s: float = 60.0
    wait_s: float = 3600.0
    stall_s: float = 60.0

    def channel_options(self) -> list[tuple[str, int]]:
        """Return the gRPC options of either end: bounded messages, and pings to be answered.

        gRPC sends and answers pings on a thread of its own, also while Python computes.
        """
        ping_ms, left_ms = round(1000 * self.idle_s / 3), round(2000 * self.idle_s / 3)
        return [
            ("grpc.max_receive_message_length", PIECE_NBYTES),
            ("grpc.keepalive_time_ms", ping_ms),
            ("grpc.keepalive_timeout_ms", left_ms),
            ("grpc.http2.ping_timeout_ms", left_ms),
            ("grpc.http2.max_pings_without_data", 0),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """How often and how soon to connect again after a transient error.

    The pause doubles from ``first_s`` up to ``longest_s``. A random share of at least one half is
    taken of it, so that clients of a restarted server do not all come at once.

    Attributes:
        attempts: Attempts to connect, the first included, before giving up.
    """

    attempts: int = 10
    first_s: float = 0.5
    longest_s: float = 30.0

    def __post_init__(self) -> None:
        """Check the values."""
        if self.attempts < 1:
            raise ValueError(f"`attempts={self.attempts!r}` must be at least 1.")
        if not 0 <= self.first_s <= self.longest_s < math.inf:
            raise ValueError(
                f"`first_s={self.first_s}`, `longest_s={self.longest_s}`: pauses must be at least "
                "0, and the first not above the longest."
            )

    def pause_s(self, failures: int, share: float) -> float:
        """Return the pause after so many failures (1 or more); ``share`` is within 0 and 1."""
        exponent = min(failures - 1, 64)  # a larger power could overflow
        return min(self.longest_s, self.first_s * 2.0**exponent) * (0.5 + 0.5 * share)


@contextlib.contextmanager
def deadline(cancel: Callable[[], object], seconds: float) -> Iterator[threading.Event]:
    """Cancel a call that is still busy after some seconds; the event is set if that was done."""
    passed = threading.Event()

    def end() -> None:
        passed.set()
        cancel()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield passed
    finally:
        timer.cancel()


def load_json(encoded: bytes | str) -> dict[str, Any]:
    """Return the JSON object that a peer has sent."""
    try:
        data = json.loads(encoded, parse_constant=_refuse_constant)
        json.dumps(data, ensure_ascii=False).encode()  # no halves of surrogate pairs
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"A header is no plain JSON: {error}.") from error
    if not isinstance(data, dict):
        raise MalformedMessage(f"A header is a {type(data).__name__}, not an object.")
    return data


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def own_terms(configuration: Mapping[str, Any], limits: Limits) -> bytes:
    """Return what this side tells the other at the beginning, as JSON."""
    if taken := [name for name in _OWN if name in configuration]:
        raise ValueError(f"The configuration names {taken}, which is compared anyway.")
    compared = {"protocol": PROTOCOL, "package": __version__, **configuration}
    terms = json.dumps({"compared": compared, "nbytes": limits.nbytes}, allow_nan=False).encode()
    if len(terms) > _TERMS_NBYTES:
        raise ValueError(f"A configuration of {len(terms)} bytes; allowed: {_TERMS_NBYTES}.")
    return terms


def read_terms(metadata: Iterable[tuple[str, Any]]) -> tuple[bytes, dict[str, Any], int]:
    """Return a peer's terms: as they came, what is compared, and the size of message it takes."""
    found = [value for key, value in metadata if key == TERMS_KEY]
    terms = load_json(found[0]) if len(found) == 1 else {}
    compared, nbytes = terms.get("compared"), terms.get("nbytes")
    if not isinstance(compared, dict) or type(nbytes) is not int or nbytes < 1:
        raise MalformedMessage("The other side does not say how it is configured.")
    return found[0], compared, nbytes


def difference(server: Mapping[str, Any], client: Mapping[str, Any]) -> str | None:
    """Return in which options two sides differ, or None."""

    def shown(options: Mapping[str, Any], name: str) -> str:
        return printable(repr(options[name]), 120) if name in options else "not given"

    names = sorted(server.keys() | client.keys(), key=lambda name: (name not in _OWN, name))
    found = [
        f"`{name}`: server {shown(server, name)}, client {shown(client, name)}"
        for name in names
        if shown(server, name) != shown(client, name)
    ]
    if not found:
        return None
    more = f"; and {len(found) - 10} more" if len(found) > 10 else ""
    return f"Client and server differ: {'; '.join(found[:10])}{more}."
