"""What can go wrong between two peers, one class for each, with what to do about it.

``WireError`` covers all that another machine or the network can cause; it is what a server logs
before it goes on. ``UnsendableMessage``, ``SecretError`` and ``AddressError`` are mistakes of the
own program.
"""

from __future__ import annotations

MOST_SHOWN = 600


def printable(text: object, most: int = MOST_SHOWN) -> str:
    """Return a peer's text fit for a log or a terminal: short, in printable ASCII, on one line."""
    shown = "".join(c if " " <= c <= "~" else ascii(c)[1:-1] for c in str(text)[: most + 1])
    return shown if len(shown) <= most else shown[:most] + "..."


class SecretError(ValueError):
    """There is no shared secret, or one that protects nothing."""


class AddressError(ValueError):
    """An address that no machine can have, or a name that none has."""


class UnsendableMessage(ValueError):
    """A message that may not be sent; nothing of it was, and the connection still works."""


class WireError(RuntimeError):
    """The connection cannot be used any longer."""


class PeerLost(WireError):
    """The connection broke: the network, or the other process ended without a word."""


class PeerStalled(PeerLost):
    """The other side sent or took nothing, or too little, for too long."""


class PeerSilent(PeerStalled):
    """Not even the beginning of a message came."""


class PeerEnded(WireError):
    """The other side ended the connection in good order."""


class PeerFailed(WireError):
    """The other side met an error, told it and ended the connection."""


class MalformedFrame(WireError):
    """Bytes that are no message of this protocol."""


class TooLarge(MalformedFrame):
    """A message above a limit; nothing was allocated for it."""


class TamperedFrame(MalformedFrame):
    """A message that was changed, or whose sender does not know the session's key."""


class ReplayedFrame(MalformedFrame):
    """A message that is not the next one: repeated, left out, or in another order."""


class UnexpectedMessage(WireError):
    """A message of another kind, or with other fields or tensors, than the program waits for."""


class AuthenticationFailed(WireError):
    """The two sides do not share a secret."""


class Refused(WireError):
    """The server does not take this client as it is."""


class VersionDiffers(Refused):
    """The two sides speak different versions of the protocol."""


class ServerBusy(Refused):
    """The server has as many clients as it takes; a later attempt may succeed."""


# What passes by itself: the network comes back, a server is started again or has room again.
TRANSIENT = (PeerLost, PeerEnded, ServerBusy)
