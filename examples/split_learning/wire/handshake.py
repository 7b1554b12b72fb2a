"""The first four frames: who the other side is, and whether it works as this one does.

::

    client                                     server
    HELLO     nonce, authentication?    ->
                                        <-     CHALLENGE  nonce, authentication?
    TERMS     versions, configuration   ->                (tagged: the client knows the secret)
                                        <-     WELCOME    the same (tagged: so does the server)

or REJECTED (without a tag, where the two have no common key) or REFUSED in the place of the last.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lq_lightning import __version__

from . import plain
from .authentication import Authentication, Seal, Secret, is_nonce, new_nonce
from .errors import (
    AuthenticationFailed,
    MalformedFrame,
    Refused,
    ServerBusy,
    TamperedFrame,
    VersionDiffers,
    WireError,
    printable,
)
from .frames import FrameType
from .settings import LONGEST_IDLE_S, SHORTEST_IDLE_S, SMALLEST_HEADER_NBYTES, Deadlines, Limits
from .stream import Frame, Receiver, Sender
from .tensors import BYTE_ORDER

# What a stranger may send before it has shown that it knows the secret.
_HELLO_LIMITS = Limits(header_nbytes=4096, body_nbytes=1, items=64, depth=4)
_MOST_DIFFERENCES = 10
_MOST_REASON = 1800  # in JSON, with all characters escaped, less than the smallest header
_KINDS: dict[str, type[WireError]] = {
    "authentication": AuthenticationFailed,
    "busy": ServerBusy,
    "version": VersionDiffers,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What a side is and how it works.

    Attributes:
        configuration: plain data that has to be equal on both sides.
        package: version of lq-lightning; has to be equal.
        byte_order: of tensors; has to be equal.
        body_nbytes: of the largest message that this side takes.
        header_nbytes: of the largest header that it takes.
        idle_s: how long this side waits for a sign of life.
    """

    configuration: dict[str, Any] = field(default_factory=dict)
    package: str = __version__
    byte_order: str = BYTE_ORDER
    body_nbytes: int
    header_nbytes: int
    idle_s: float

    def differences(self, client: Terms) -> list[str]:
        """Return what differs between these terms, the server's, and a client's, for people."""
        own, others = (
            {**side.configuration, "package": side.package, "byte_order": side.byte_order}
            for side in (self, client)
        )
        return [printable(line, 300) for line in _differences(own, others, "")]


def _differences(server: Any, client: Any, where: str) -> Iterator[str]:
    if isinstance(server, dict) and isinstance(client, dict):
        for key in sorted(server.keys() | client.keys()):
            path = f"{where}.{key}" if where else key
            if key in server and key in client:
                yield from _differences(server[key], client[key], path)
            else:
                ours = _show(server[key]) if key in server else "not given"
                theirs = _show(client[key]) if key in client else "not given"
                yield f"`{path}`: server {ours}, client {theirs}"
    elif plain.canonical(server) != plain.canonical(client):
        yield f"`{where}`: server {_show(server)}, client {_show(client)}"


def _show(value: Any) -> str:
    return printable(repr(value), 120)


def own_terms(configuration: Mapping[str, Any], limits: Limits, deadlines: Deadlines) -> Terms:
    """Return the terms of this side.

    Raises:
        UnsendableMessage: a configuration that is not plain data.
        ValueError: one that names what is compared anyway.
    """
    reserved = {"package", "byte_order"} & configuration.keys()
    if reserved:
        raise ValueError(f"The configuration names {sorted(reserved)}, which is compared anyway.")
    terms = Terms(
        configuration=dict(configuration),
        body_nbytes=limits.body_nbytes,
        header_nbytes=limits.header_nbytes,
        idle_s=deadlines.idle_s,
    )
    plain.dump(_as_header(terms), limits)
    return terms


def greet(
    sender: Sender, receiver: Receiver, secret: Authentication, terms: Terms, until: float
) -> Terms:
    """Do the client's part and return the server's terms.

    Raises:
        AuthenticationFailed: the two do not share the secret.
        Refused: the server's reason.
        WireError: all other kinds.
    """
    wanted, nonce = isinstance(secret, Secret), new_nonce()
    hello = _send(sender, FrameType.HELLO, {"authentication": wanted, "nonce": nonce}, until)
    challenge = _answer(receiver, FrameType.CHALLENGE, until, _HELLO_LIMITS)
    if challenge.header.get("authentication") is not wanted:
        raise AuthenticationFailed(_one_sided(wanted, "this client", "the server"))
    if not is_nonce(challenge.header.get("nonce")) or challenge.header["nonce"] == nonce:
        raise MalformedFrame("A server without a nonce of its own.")
    if isinstance(secret, Secret):
        to_server, to_client = secret.session_keys(hello + challenge.raw)
        sender.seal, receiver.seal = Seal(to_server), Seal(to_client)
    _send(sender, FrameType.TERMS, _as_header(terms), until)
    try:
        welcome = _answer(receiver, FrameType.WELCOME, until)
    except TamperedFrame as error:
        raise AuthenticationFailed(
            "The server does not know the shared secret, or its answer was changed on its way. "
            "Check address and port, and that both sides have the same secret."
        ) from error
    return _from_header(welcome.header)


def receive_terms(
    sender: Sender, receiver: Receiver, secret: Authentication, until: float
) -> Terms:
    """Do the server's part up to the client's terms, and return them.

    A client that fails is told why before the error is raised.

    Raises:
        AuthenticationFailed: the client does not know the secret.
        WireError: all other kinds.
    """
    try:
        return _authenticate(sender, receiver, secret, until)
    except AuthenticationFailed as error:
        reject(sender, "authentication", str(error), until)
        raise
    except VersionDiffers:
        reject(sender, "version", "another protocol version", until)  # whose prefix tells which
        raise
    except MalformedFrame:
        reject(sender, "malformed", "the handshake is malformed", until)
        raise


def _authenticate(
    sender: Sender, receiver: Receiver, secret: Authentication, until: float
) -> Terms:
    wanted, nonce = isinstance(secret, Secret), new_nonce()
    hello = _expect(receiver, FrameType.HELLO, until, _HELLO_LIMITS)
    if hello.header.get("authentication") is not wanted:
        raise AuthenticationFailed(_one_sided(wanted, "the server", "the client"))
    if not is_nonce(hello.header.get("nonce")):
        raise MalformedFrame("A client without a nonce.")
    header = {"authentication": wanted, "nonce": nonce}
    challenge = _send(sender, FrameType.CHALLENGE, header, until)
    if isinstance(secret, Secret):
        to_server, to_client = secret.session_keys(hello.raw + challenge)
        sender.seal, receiver.seal = Seal(to_client), Seal(to_server)
    try:
        terms = _from_header(_expect(receiver, FrameType.TERMS, until).header)
    except TamperedFrame as error:
        raise AuthenticationFailed(
            "The client does not know the shared secret. Give both sides the same."
        ) from error
    return terms


def compare(sender: Sender, own: Terms, client: Terms, until: float) -> None:
    """Raise ``Refused`` where a client works otherwise, after it was told what differs."""
    differences = own.differences(client)
    if differences:
        shown = "; ".join(differences[:_MOST_DIFFERENCES])
        more = len(differences) - _MOST_DIFFERENCES
        reason = f"Client and server differ: {shown}{f'; and {more} more' if more > 0 else ''}."
        refuse(sender, "configuration", f"{reason} Start both with the same.", until)
        raise Refused(reason)


def welcome(sender: Sender, own: Terms, until: float) -> None:
    """Tell a client that it is served."""
    _send(sender, FrameType.WELCOME, _as_header(own), until)


def refuse(sender: Sender, code: str, reason: str, until: float) -> None:
    """Tell an authenticated client why it cannot be served."""
    reason = printable(reason, _MOST_REASON)
    _send(sender, FrameType.REFUSED, {"code": code, "reason": reason}, until)


def reject(sender: Sender, code: str, reason: str, until: float) -> None:
    """Tell a stranger why it cannot be served."""
    _send(sender, FrameType.REJECTED, {"code": code, "reason": reason}, until)


def _one_sided(wanted: bool, here: str, there: str) -> str:
    with_it, without = (here, there) if wanted else (there, here)
    return (
        f"Of the two, {with_it} has a shared secret and {without} has none. Give both the same "
        "secret, or start both with --no-authentication."
    )


def _send(sender: Sender, kind: FrameType, header: Mapping[str, Any], until: float) -> bytes:
    return sender.send(kind, plain.dump(header, sender.limits), until=until).raw


def _expect(
    receiver: Receiver, kind: FrameType, until: float, limits: Limits | None = None
) -> Frame:
    frame = receiver.receive(within_s=until - time.monotonic(), until=until, limits=limits)
    return _of_type(frame, kind)


def _answer(
    receiver: Receiver, kind: FrameType, until: float, limits: Limits | None = None
) -> Frame:
    """Wait for a server's frame, or raise its reason for giving another."""
    frame = receiver.receive(within_s=until - time.monotonic(), until=until, limits=limits)
    if frame.type in (FrameType.REFUSED, FrameType.REJECTED):
        code, reason = frame.header.get("code"), printable(frame.header.get("reason"), _MOST_REASON)
        told = "" if frame.type is FrameType.REFUSED else " (an answer that anybody could give)"
        raise _KINDS.get(str(code), Refused)(f"The server refused{told}: {reason}")
    return _of_type(frame, kind)


def _of_type(frame: Frame, kind: FrameType) -> Frame:
    if frame.type is not kind:
        raise MalformedFrame(f"{frame.type.name} came in the handshake where {kind.name} is next.")
    return frame


def _as_header(terms: Terms) -> dict[str, Any]:
    return {name: getattr(terms, name) for name in _TYPES}


_TYPES: dict[str, tuple[type, ...]] = {
    "configuration": (dict,),
    "package": (str,),
    "byte_order": (str,),
    "body_nbytes": (int,),
    "header_nbytes": (int,),
    "idle_s": (int, float),
}


def _from_header(header: Mapping[str, Any]) -> Terms:
    wrong = [name for name, types in _TYPES.items() if type(header.get(name)) not in types]
    if wrong or header.keys() != _TYPES.keys():
        raise MalformedFrame(f"Terms that lack {wrong} or say more than they should.")
    terms = Terms(**header)
    # A peer's own numbers decide how much it is sent and how often.
    sizes = terms.body_nbytes >= 1 and terms.header_nbytes >= SMALLEST_HEADER_NBYTES
    if not sizes or not SHORTEST_IDLE_S <= terms.idle_s <= LONGEST_IDLE_S:
        raise MalformedFrame("Terms with sizes or times out of their range.")
    return terms
