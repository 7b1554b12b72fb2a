"""The client's side: reach a server, at once or when it is there (again)."""

from __future__ import annotations

import logging
import random
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from . import handshake
from .addresses import Address, show_address
from .authentication import Authentication, NoAuthentication, Secret
from .connection import Connection
from .errors import TRANSIENT, AddressError, PeerLost, SecretError, WireError
from .settings import Deadlines, Limits, Retry
from .stream import linger, open_stream

logger = logging.getLogger(__name__)


def connect(
    address: Address,
    secret: Authentication,
    configuration: Mapping[str, Any] | None = None,
    *,
    limits: Limits | None = None,
    deadlines: Deadlines | None = None,
    retry: Retry | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> Connection:
    """Connect to a server and shake hands.

    Args:
        address: host and port.
        secret: what the server has too; ``NO_AUTHENTICATION`` if it runs without.
        configuration: plain data that must be equal to the server's.
        limits: of what is received.
        deadlines: of all that the server does.
        retry: how often to try while the server cannot be reached or is busy; None tries once.
        sleep: waits between attempts.

    Raises:
        SecretError: neither a secret nor ``NO_AUTHENTICATION``.
        AuthenticationFailed: the server does not know the secret, or says that the client does not.
        Refused: the server's reason, with what differs.
        PeerLost: it cannot be reached.
        WireError: all other kinds.
    """
    check_secret(secret)
    limits, deadlines = limits or Limits(), deadlines or Deadlines()
    terms = handshake.own_terms(configuration or {}, limits, deadlines)
    retry = retry or Retry(attempts=1)
    for failures in range(1, retry.attempts + 1):
        try:
            return _connect_once(address, secret, terms, limits, deadlines)
        except TRANSIENT as error:
            if failures == retry.attempts:
                raise
            _pause(retry, failures, error, sleep)
    raise AssertionError("an attempt returns or raises")


def check_secret(secret: object) -> None:
    """Raise ``SecretError`` for what is no secret: going without has to be said."""
    if not isinstance(secret, (Secret, NoAuthentication)):
        raise SecretError(
            f"The secret is {type(secret).__name__}: take `load_secret()`, or `NO_AUTHENTICATION` "
            "where nobody else can reach the port."
        )


def _connect_once(
    address: Address,
    secret: Authentication,
    terms: handshake.Terms,
    limits: Limits,
    deadlines: Deadlines,
) -> Connection:
    connected = _reach(address, deadlines)
    sender, receiver = open_stream(connected, limits, deadlines)
    try:
        until = time.monotonic() + deadlines.handshake_s
        peer = handshake.greet(sender, receiver, secret, terms, until)
        return Connection(
            sender, receiver, address=show_address(address), peer=peer, deadlines=deadlines
        )
    except BaseException:
        linger(receiver.socket, 0.0)
        sender.socket.close()
        receiver.socket.close()
        raise


def _reach(address: Address, deadlines: Deadlines) -> socket.socket:
    shown = show_address(address)
    try:
        return socket.create_connection(address, timeout=deadlines.connect_s)
    except socket.gaierror as error:
        if error.errno != socket.EAI_AGAIN:
            raise AddressError(
                f"There is no host {address[0]!r}: {error}. Check the name."
            ) from error
        raise PeerLost(f"The name of {shown} cannot be looked up: {error}.") from error
    except OSError as error:
        raise PeerLost(
            f"The server {shown} cannot be reached: {error}. Check that it runs, its address and "
            "port, and firewalls."
        ) from error


def _pause(retry: Retry, failures: int, error: WireError, sleep: Callable[[float], object]) -> None:
    seconds = retry.pause_s(failures, random.random())
    logger.warning("%s Attempt %d of %d in %.1f s.", error, failures + 1, retry.attempts, seconds)
    sleep(seconds)
