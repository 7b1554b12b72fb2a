"""Addresses as people write them, and whether strangers can reach them."""

from __future__ import annotations

import ipaddress
import socket

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
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach a listening socket of this numeric address."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def listen(address: Address, backlog: int = 64) -> socket.socket:
    """Return a listening socket; port 0 takes a free one.

    Raises:
        OSError: the address is no address of this machine, or the port is taken.
    """
    family, *_, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(resolved)
        listening.listen(backlog)
    except OSError:
        listening.close()
        raise
    return listening
