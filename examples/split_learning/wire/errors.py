"""Errors between client and server; their texts say what to do.

``WireError`` covers all that another machine or the network can cause. ``UnsendableMessage``,
``CertificateError`` and ``AddressError`` are mistakes of the program or the person that starts it.
"""

from __future__ import annotations


def printable(text: object, longest: int = 600) -> str:
    """Return a peer's text fit for a log or a terminal: short, printable ASCII, on one line."""
    shown = "".join(c if " " <= c <= "~" else ascii(c)[1:-1] for c in str(text)[: longest + 1])
    return shown if len(shown) <= longest else shown[:longest] + "..."


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
