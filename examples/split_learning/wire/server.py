"""The server's end: a thread per client, and nothing that one client does stops the others."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

import grpc

from .common import (
    METHOD,
    SERVICE,
    TERMS_KEY,
    Address,
    AuthenticationFailed,
    CertificateError,
    Deadlines,
    Limits,
    PeerLost,
    PeerStalled,
    Refused,
    WireError,
    deadline,
    difference,
    own_terms,
    printable,
    read_terms,
    show_address,
)
from .identity import Identity, Revoked
from .messages import Message, Traffic, encode, read_message, stream_nbytes

logger = logging.getLogger(__name__)
Answer = Callable[[Message], Iterable[Message]]
_LONGEST_REASON = 1800  # gRPC sends it as metadata, of at most 8 KiB
_CODES: dict[type[WireError], grpc.StatusCode] = {
    AuthenticationFailed: grpc.StatusCode.PERMISSION_DENIED,
    Refused: grpc.StatusCode.FAILED_PRECONDITION,
}


class Server:
    """Answers the messages of several clients, each in a thread of its own.

    Args:
        address: Host and port to listen on; port 0 takes a free one, which ``address`` then has.
        identity: Identity of the server, or ``NO_AUTHENTICATION``.
        open_session: Called for every client; returns a function that answers its messages.
        configuration: Plain data that must be equal to every client's.
        revoked: List of certificates that are refused; needed with an identity.
        limits: Limits on received messages.
        deadlines: Deadlines for all that clients do.
        max_clients: Clients served at the same time; others are told that the server is busy.

    Raises:
        ValueError: no list of revoked certificates, or less than one client.
        OSError: the address cannot be listened on.
    """

    def __init__(
        self,
        address: Address,
        identity: Identity | None,
        open_session: Callable[[], Answer],
        configuration: Mapping[str, Any] | None = None,
        *,
        revoked: Revoked | None = None,
        limits: Limits | None = None,
        deadlines: Deadlines | None = None,
        max_clients: int = 8,
    ) -> None:
        if max_clients < 1:
            raise ValueError(f"`max_clients={max_clients}` must be at least 1.")
        if identity is not None and revoked is None:
            raise ValueError("A server with a certificate needs a list of revoked ones.")
        self._open_session = open_session
        self._revoked = revoked
        self._limits = limits or Limits()
        self._deadlines = deadlines or Deadlines()
        self._terms = own_terms(configuration or {}, self._limits)
        self._threads = ThreadPoolExecutor(max_clients, thread_name_prefix="client")
        self._server = grpc.server(
            self._threads,
            options=[
                *self._deadlines.channel_options(),
                ("grpc.so_reuseport", 0),  # two servers would share the clients of one port
                ("grpc.http2.max_ping_strikes", 0),  # clients choose how often they ping
                ("grpc.server_handshake_timeout_ms", round(1000 * self._deadlines.connect_s)),
                ("grpc.max_connection_idle_ms", round(1000 * self._deadlines.idle_s)),
            ],
            maximum_concurrent_rpcs=max_clients,
        )
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    SERVICE, {METHOD: grpc.stream_stream_rpc_method_handler(self._serve)}
                ),
            )
        )
        self.address: Address = (address[0], self._listen(address, identity))

    def _listen(self, address: Address, identity: Identity | None) -> int:
        try:
            if identity is not None:
                credentials = identity.server_credentials()
                port: int = self._server.add_secure_port(show_address(address), credentials)
                return port
            port = self._server.add_insecure_port(show_address(address))
        except RuntimeError as error:
            raise OSError(str(error).partition(";")[0]) from error
        logger.warning(
            "No authentication and no encryption: every program that reaches %s is served. Use "
            "certificates where others can.",
            show_address((address[0], port)),
        )
        return port

    def serve_forever(self) -> None:
        """Serve clients until another thread calls ``stop``, or Ctrl-C raises; then call it too."""
        self._server.start()
        self._server.wait_for_termination()

    def stop(self) -> None:
        """Cut all connections and listen no more; clients connect again once there is a server."""
        self._server.stop(None).wait()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Server:
        """Serve clients in threads."""
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End all connections."""
        self.stop()

    def _serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Yield the pieces of all answers to a client: gRPC's handler of a stream."""
        shown, traffic = _shown(context, "a client"), Traffic()
        try:
            shown = _shown(context, self._identify(context))
            yield from self._answer(requests, context, shown, traffic)
            logger.info(
                "%s: ended; %d bytes received, %d sent.",
                shown,
                *(sum(c.nbytes for c in way.values()) for way in (traffic.received, traffic.sent)),
            )
            return
        except WireError as error:
            logger.warning("%s: %s: %s", shown, type(error).__name__, error)
            code = _CODES.get(type(error), grpc.StatusCode.INVALID_ARGUMENT)
            reason = printable(error, _LONGEST_REASON)
        except GeneratorExit:  # from gRPC, which could not send what was yielded last
            logger.warning("%s: the connection broke, or it took no answer in time.", shown)
            raise
        except Exception as error:  # its text may say what is nobody else's business
            logger.exception("%s: served no longer, as this server met an error.", shown)
            code, reason = grpc.StatusCode.INTERNAL, type(error).__name__
        context.abort(code, reason)

    def _identify(self, context: grpc.ServicerContext) -> str:
        """Return the name in a client's certificate, which TLS has verified."""
        if self._revoked is None:
            return "a client"
        try:
            return self._revoked.check(context.auth_context())
        except CertificateError as error:
            logger.error("All clients are refused: %s", error)
            raise AuthenticationFailed("The server cannot read its list.") from error

    def _answer(
        self,
        requests: Iterator[bytes],
        context: grpc.ServicerContext,
        shown: str,
        traffic: Traffic,
    ) -> Iterator[bytes]:
        told, compared, largest = read_terms(context.invocation_metadata())
        _, own, _ = read_terms([(TERMS_KEY, self._terms)])
        if differing := difference(own, compared):
            raise Refused(f"{differing} Start both with the same.")
        context.send_initial_metadata(((TERMS_KEY, self._terms),))
        traffic.received["handshake"].add(len(told))
        traffic.sent["handshake"].add(len(self._terms))
        logger.info("%s: connected.", shown)

        def next_piece(first: bool) -> bytes | None:
            seconds, piece = self._deadlines.wait_s if first else self._deadlines.stall_s, None
            with deadline(context.cancel, seconds) as passed, contextlib.suppress(grpc.RpcError):
                piece = next(requests, None)
            if passed.is_set():
                raise PeerStalled(f"It sent nothing for {seconds:.1f} s.")
            if piece is None:  # a client that ends sends an empty piece
                raise PeerLost("The connection broke.")
            return piece

        answer = self._open_session()
        while (received := read_message(next_piece, self._limits, traffic)) is not None:
            self._identify(context)  # again: it may have been revoked meanwhile
            for message in answer(received):
                pieces = encode(message, largest)
                for piece in pieces:
                    with deadline(context.cancel, self._deadlines.stall_s):
                        yield bytes(piece)
                nbytes = stream_nbytes(sum(map(len, pieces)), len(pieces))
                traffic.sent[message.kind].add(nbytes, message.tensor_nbytes)


def _shown(context: grpc.ServicerContext, name: str) -> str:
    return f"{name} ({unquote(context.peer()).partition(':')[2]})"
