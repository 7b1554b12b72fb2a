"""Messages of tensors and plain data between two machines that do not trust the network.

Standard library only, over TCP. A server listens and calls a handler for each client, in a thread
of its own; a client connects; both then have a ``Connection``::

    def serve(connection):                            # on the server
        for message in connection.messages("batch"):
            x = message.tensor("x", dtype=torch.float32, shape=(None, 512))
            connection.send("output", {"step": message.field("step", int)}, {"y": model(x)})

    secret = load_secret("secret.txt")
    Server(("0.0.0.0", 5600), secret, serve, {"model": "tiny"}).serve_forever()

    with connect(("192.0.2.7", 5600), secret, {"model": "tiny"}, retry=Retry()) as connection:
        connection.send("batch", {"step": 0}, {"x": x})
        y = connection.receive("output").tensor("y")

What it protects from:

- Strangers. Server and client prove to each other that they know the shared secret, with fresh
  nonces. A stranger gets a few kB read and ten seconds of a thread.
- Tampering, replay, reordering, truncation. Every message has an HMAC-SHA256 tag under a key of its
  session and direction, which covers its sequence number; headers are parsed, and tensors handed
  out, only after their tags were checked.
- Mistaken or hostile peers that know the secret. Nothing is unpickled or evaluated: a message is
  JSON and raw bytes of an allowed dtype. Sizes, counts and depth are bounded before anything is
  allocated, and time is bounded in every state.

What it does not:

- It does not encrypt. Whoever is on the way can read activations, gradients, labels and the
  configuration. For secrecy run it through a tunnel: ``ssh -L``, WireGuard or another VPN.
- A secret that can be guessed: a recorded handshake lets it be tried offline. Take 32 random bytes.
- Floods: who can reach the port can keep others from being served. Let a firewall admit clients.
- Wrong values from a peer that knows the secret. Its tensors may hold anything, NaN too.
"""

from .addresses import Address, parse_address, show_address
from .authentication import NO_AUTHENTICATION, Authentication, Secret, load_secret
from .client import connect
from .connection import Connection
from .errors import (
    AddressError,
    AuthenticationFailed,
    MalformedFrame,
    PeerEnded,
    PeerFailed,
    PeerLost,
    PeerSilent,
    PeerStalled,
    Refused,
    ReplayedFrame,
    SecretError,
    ServerBusy,
    TamperedFrame,
    TooLarge,
    UnexpectedMessage,
    UnsendableMessage,
    VersionDiffers,
    WireError,
)
from .message import Message
from .options import add_secret_options, chosen_secret
from .server import Server
from .settings import Deadlines, Limits, Retry
from .traffic import Count, Traffic

__all__ = [
    "NO_AUTHENTICATION",
    "Address",
    "AddressError",
    "Authentication",
    "AuthenticationFailed",
    "Connection",
    "Count",
    "Deadlines",
    "Limits",
    "MalformedFrame",
    "Message",
    "PeerEnded",
    "PeerFailed",
    "PeerLost",
    "PeerSilent",
    "PeerStalled",
    "Refused",
    "ReplayedFrame",
    "Retry",
    "Secret",
    "SecretError",
    "Server",
    "ServerBusy",
    "TamperedFrame",
    "TooLarge",
    "Traffic",
    "UnexpectedMessage",
    "UnsendableMessage",
    "VersionDiffers",
    "WireError",
    "add_secret_options",
    "chosen_secret",
    "connect",
    "load_secret",
    "parse_address",
    "show_address",
]
