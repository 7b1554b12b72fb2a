"""Messages of tensors and plain data between a server and its clients, over gRPC with mutual TLS.

Each side has a certificate of one authority (``certificates.py``). A server answers messages; a
client connects, sends and receives::

    def open_session():                               # on the server, for every client
        def answer(message):
            x = message.tensor("x", dtype=torch.float32, shape=(None, 512))
            yield Message("output", {"step": message.field("step", int)}, {"y": model(x)})
        return answer

    identity, revoked = load_identity("server.pem", "server"), Revoked("revoked.txt")
    server = Server(("0.0.0.0", 5600), identity, open_session, {"model": "tiny"}, revoked=revoked)
    server.serve_forever()

    identity = load_identity("alice.pem", "client")
    with connect(("192.0.2.7", 5600), identity, {"model": "tiny"}, retry=Retry()) as connection:
        connection.send(Message("batch", {"step": 0}, {"x": x}))
        y = connection.receive("output").tensor("y")

TLS encrypts and authenticates everything with keys that no later theft of a certificate reveals.
A message is a safetensors file in pieces of half a MiB: nothing is unpickled, and sizes, counts and
shapes are checked before tensors are allocated. Time is bounded in every state. Not protected from:
wrong values of a peer with a certificate, and floods of a port that strangers can reach.
"""

import importlib.util
import os

# TLS 1.3 has suites of its own. Of TLS 1.2 this leaves one that needs an RSA certificate, and ours
# have ECDSA keys: an older version cannot be negotiated. gRPC reads it when it is first imported.
os.environ.setdefault("GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES128-GCM-SHA256")


def require(package: str) -> None:
    """Raise ``ModuleNotFoundError``, with a remedy, when a package is missing."""
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"Split learning needs the package `{package}`, at both ends: "
            "`pip install '.[examples,hf]'` in the checkout."
        )


require("grpc")
require("cryptography")
