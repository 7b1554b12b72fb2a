"""What both ends of a gRPC stream share: its options, its deadlines and what is compared first."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lq_lightning import __version__

from .errors import MalformedMessage, printable
from .messages import PIECE_NBYTES, load_json
from .settings import Deadlines, Limits

PROTOCOL = 2
SERVICE, METHOD = "lq.SplitLearning", "Connect"
TERMS_KEY = "terms-bin"  # of the metadata in which either side tells its terms
_TERMS_NBYTES = 6000  # gRPC refuses metadata above 8 KiB
_OWN = ("protocol", "package")


def channel_options(deadlines: Deadlines) -> list[tuple[str, int]]:
    """Return the gRPC options of either end: bounded messages, and pings that a peer must answer.

    gRPC sends and answers pings on a thread of its own, also while Python computes.
    """
    ping_s, left_s = deadlines.idle_s / 3, deadlines.idle_s * 2 / 3
    return [
        ("grpc.max_receive_message_length", PIECE_NBYTES),
        ("grpc.keepalive_time_ms", round(1000 * ping_s)),
        ("grpc.keepalive_timeout_ms", round(1000 * left_s)),
        ("grpc.http2.ping_timeout_ms", round(1000 * left_s)),
        ("grpc.http2.max_pings_without_data", 0),
    ]


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


def own_terms(configuration: Mapping[str, Any], limits: Limits) -> bytes:
    """Return what this side tells the other at the beginning, as JSON.

    Raises:
        ValueError: a configuration that is no plain data, too long, or names what is compared
            anyway.
    """
    if taken := [name for name in _OWN if name in configuration]:
        raise ValueError(f"The configuration names {taken}, which is compared anyway.")
    compared = {"protocol": PROTOCOL, "package": __version__, **configuration}
    terms = json.dumps({"compared": compared, "nbytes": limits.nbytes}, allow_nan=False).encode()
    if len(terms) > _TERMS_NBYTES:
        raise ValueError(f"A configuration of {len(terms)} bytes; allowed: {_TERMS_NBYTES}.")
    return terms


def read_terms(metadata: Iterable[tuple[str, Any]]) -> tuple[bytes, dict[str, Any], int]:
    """Return a peer's terms: as they came, what is compared, and the size of message it takes.

    Raises:
        MalformedMessage: it has told none.
    """
    found = [value for key, value in metadata if key == TERMS_KEY]
    terms = load_json(found[0]) if len(found) == 1 else {}
    compared, nbytes = terms.get("compared"), terms.get("nbytes")
    if not isinstance(compared, dict) or type(nbytes) is not int or nbytes < 1:
        raise MalformedMessage("The other side does not say how it is configured.")
    return found[0], compared, nbytes


def difference(server: Mapping[str, Any], client: Mapping[str, Any]) -> str | None:
    """Return in which options two sides differ, or None."""
    names = sorted(server.keys() | client.keys(), key=lambda name: (name not in _OWN, name))
    found = [
        f"`{name}`: server {_shown(server, name)}, client {_shown(client, name)}"
        for name in names
        if _shown(server, name) != _shown(client, name)
    ]
    if not found:
        return None
    more = f"; and {len(found) - 10} more" if len(found) > 10 else ""
    return f"Client and server differ: {'; '.join(found[:10])}{more}."


def _shown(options: Mapping[str, Any], name: str) -> str:
    return printable(repr(options[name]), 120) if name in options else "not given"
