"""The frame that everything travels in.

======== ========================================= ==================================
bytes    what                                      when it is checked
======== ========================================= ==================================
28       prefix: magic, version, type, zero,       first; sizes before anything
         sequence number, sizes of the next two    else is read
any      header: JSON                              its tag before it is parsed
32       tag of prefix and header                  before the body is read
any      body: the tensors, one after the other    sizes against the header's shapes
32       tag of all before it; only with a body    before a tensor is handed out
======== ========================================= ==================================

Without authentication there are no tags. Numbers are little-endian. Magic and version stand where
they are in every version, so that one side can always tell the other what differs.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from .errors import MalformedFrame, ReplayedFrame, TooLarge, VersionDiffers
from .settings import Limits

MAGIC = b"LQsl"
VERSION = 1
_PREFIX = struct.Struct("<4sBBHQIQ")
PREFIX_NBYTES = _PREFIX.size


class FrameType(IntEnum):
    """What a frame is for. Only ``MESSAGE`` carries tensors."""

    HELLO = 1  # client: nonce
    CHALLENGE = 2  # server: nonce
    TERMS = 3  # client: versions, configuration
    WELCOME = 4  # server: the same of its own
    REFUSED = 5  # server: why not
    REJECTED = 6  # server: why not, never tagged, as there is no common key
    MESSAGE = 7
    ALIVE = 8
    FAILED = 9  # the sender met an error and ends the connection
    END = 10


class Prefix(NamedTuple):
    """The fixed part of a frame."""

    type: FrameType
    sequence: int
    header_nbytes: int
    body_nbytes: int

    def pack(self) -> bytes:
        """Return its bytes."""
        return _PREFIX.pack(MAGIC, VERSION, self.type, 0, *self[1:])


def parse_prefix(encoded: bytes | bytearray, sequence: int, limits: Limits) -> Prefix:
    """Check the fixed part of a frame.

    Args:
        encoded: ``PREFIX_NBYTES`` bytes.
        sequence: number that the next frame has.
        limits: for its sizes.

    Raises:
        MalformedFrame: no frame of this protocol.
        VersionDiffers: one of another version.
        ReplayedFrame: not the next one.
        TooLarge: above a limit.
    """
    magic, version, kind, zero, number, header_nbytes, body_nbytes = _PREFIX.unpack(encoded)
    if magic != MAGIC:
        raise MalformedFrame(
            f"The other side speaks another protocol: it sent {bytes(encoded[:8])!r}. Check "
            "address and port."
        )
    if version != VERSION:
        raise VersionDiffers(
            f"`protocol`: {VERSION} here, {version} on the other side. Install the same version "
            "of this example and of lq-lightning on both."
        )
    if zero or kind not in FrameType.__members__.values():
        raise MalformedFrame(f"A frame of the unknown type {kind}.")
    if number != sequence:
        raise ReplayedFrame(
            f"Frame {number} came where frame {sequence} is next: repeated, left out or out of "
            "order. Somebody interferes with the connection: use a tunnel (SSH, WireGuard, a VPN)."
        )
    most = limits.body_nbytes if kind == FrameType.MESSAGE else 0
    if header_nbytes > limits.header_nbytes or body_nbytes > most:
        raise TooLarge(
            f"A frame with a header of {header_nbytes} bytes and tensors of {body_nbytes}; "
            f"allowed: {limits.header_nbytes} and {most}. Raise `Limits` on both sides if that is "
            "wanted."
        )
    return Prefix(FrameType(kind), number, header_nbytes, body_nbytes)
