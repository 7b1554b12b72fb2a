"""Frames over a socket: one sender and one receiver, which may work at the same time.

Each has a socket object of its own for the one connection: their time limits differ.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from . import plain, tensors
from .authentication import RunningTag, Seal
from .errors import PeerLost, PeerSilent
from .frames import PREFIX_NBYTES, FrameType, Prefix, parse_prefix
from .pace import Pace
from .settings import Deadlines, Limits

# Bytes that are tagged and handed to the kernel at once: it sends them while the next are tagged.
CHUNK_NBYTES = 512 * 1024
_MOST_BUFFERS = 64  # of one system call


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that was checked."""

    type: FrameType
    header: dict[str, Any]
    raw: bytes  # prefix and header as they came
    nbytes: int
    tensors: dict[str, Tensor] = field(default_factory=dict)


class Sent(NamedTuple):
    """A frame that left: its prefix and header, and all its bytes."""

    raw: bytes
    nbytes: int


class Sender:
    """Sends frames. Only one thread at a time may: ``lock`` is held meanwhile.

    Attributes:
        seal: what tags the frames; none before the handshake.
        limits: of the other side, once it has told them.
        socket: its own object for the connection.
        lock: held while a frame is sent.
        nbytes: sent up to now.
        torn: whether a frame was begun that did not get out whole, so that no other may follow.
    """

    def __init__(self, connected: socket.socket, limits: Limits, deadlines: Deadlines) -> None:
        self.seal = Seal()
        self.limits = limits
        self.lock = threading.RLock()
        self.nbytes = 0
        self.torn = False
        self.socket = connected
        self._deadlines = deadlines
        self._sequence = 0

    def send(
        self,
        kind: FrameType,
        header: bytes,
        body: Sequence[memoryview] = (),
        until: float = math.inf,
    ) -> Sent:
        """Send a frame.

        Args:
            kind: its type.
            header: JSON.
            body: the bytes of its tensors.
            until: when, on the monotonic clock, it has to be gone.

        Raises:
            PeerStalled: the other side takes nothing.
            PeerLost: the connection is broken.
        """
        body = [view for view in body if len(view)]
        with self.lock:
            if self.torn:
                raise PeerLost("A message was cut off while it was sent. Connect again.")
            nbytes = sum(map(len, body))
            raw = Prefix(kind, self._sequence, len(header), nbytes).pack() + header
            self._sequence += 1
            seal = Seal() if kind is FrameType.REJECTED else self.seal
            pace = Pace("The other side took", self._deadlines, until)
            done, self.torn = 0, True
            for buffers in _in_chunks(raw, body, seal.start()):
                done = self._send_all(buffers, pace, done)
            self.nbytes += done
            self.torn = False
        return Sent(raw, done)

    def _send_all(self, buffers: list[memoryview], pace: Pace, done: int) -> int:
        while buffers:
            self.socket.settimeout(pace.left_s(done))
            try:
                sent = self.socket.sendmsg(buffers)
            except TimeoutError:
                raise pace.stalled(done) from None
            except OSError as error:
                raise _lost(error) from error
            done += sent
            while buffers and sent >= len(buffers[0]):
                sent -= len(buffers.pop(0))
            if sent:
                buffers[0] = buffers[0][sent:]
        return done


def _in_chunks(
    raw: bytes, body: Sequence[memoryview], tag: RunningTag
) -> Iterator[list[memoryview]]:
    """Yield what is to be sent next, just tagged; the receiver has checked the rest meanwhile."""
    tag.update(raw)
    chunk, room = [memoryview(raw), memoryview(tag.digest())], CHUNK_NBYTES
    for view in body:
        while len(view):
            part, view = view[:room], view[room:]
            tag.update(part)
            chunk.append(part)
            room -= len(part)
            if not room or len(chunk) == _MOST_BUFFERS:
                yield [piece for piece in chunk if len(piece)]
                chunk, room = [], CHUNK_NBYTES
    if body:
        chunk.append(memoryview(tag.digest()))
    yield [piece for piece in chunk if len(piece)]


class Receiver:
    """Receives frames. Only one thread at a time may: ``lock`` is held meanwhile.

    Attributes:
        seal: what checks the frames; none before the handshake.
        limits: of this side.
        socket: its own object for the connection.
        lock: held while a frame is received.
        nbytes: received up to now, in whole frames.
    """

    def __init__(self, connected: socket.socket, limits: Limits, deadlines: Deadlines) -> None:
        self.seal = Seal()
        self.limits = limits
        self.lock = threading.RLock()
        self.nbytes = 0
        self.socket = connected
        self._deadlines = deadlines
        self._sequence = 0

    def receive(
        self, *, within_s: float, until: float = math.inf, limits: Limits | None = None
    ) -> Frame:
        """Wait for a frame and return it.

        Args:
            within_s: how long its first byte may take.
            until: when, on the monotonic clock, it has to be there.
            limits: in the place of those of this side.

        Raises:
            WireError: all of its kinds, but for ``Refused``, ``PeerEnded`` and ``PeerFailed``.
        """
        limits = limits or self.limits
        with self.lock:
            encoded = bytearray(PREFIX_NBYTES)
            view = memoryview(encoded)
            first = self._first(view, within_s)
            pace = Pace("The other side sent", self._deadlines, until)
            done = self._fill(view[first:], pace, first)
            prefix = parse_prefix(encoded, self._sequence, limits)
            # No tag proves a rejection: it may come to a client's handshake, where it is called
            # what it is, and is refused everywhere else.
            seal = Seal() if prefix.type is FrameType.REJECTED else self.seal
            running = seal.start()
            rest = bytearray(prefix.header_nbytes + seal.nbytes)
            done = self._fill(memoryview(rest), pace, done)
            raw = bytes(encoded + rest[: prefix.header_nbytes])
            running.update(raw)
            running.check(rest[prefix.header_nbytes :])
            self._sequence += 1
            header = plain.load(raw[PREFIX_NBYTES:], limits)
            if prefix.type is not FrameType.MESSAGE:
                self.nbytes += done
                return Frame(prefix.type, header, raw, done)
            parsed = tensors.parse(header.get("tensors"), prefix.body_nbytes, limits)
            received = tensors.allocate(parsed)
            for tensor in received.values():
                done = self._fill(tensors.as_bytes(tensor), pace, done, running)
            if prefix.body_nbytes:
                tag = bytearray(seal.nbytes)
                done = self._fill(memoryview(tag), pace, done)
                running.check(tag)
            tensors.check_values(received)
            self.nbytes += done
            return Frame(prefix.type, header, raw, done, received)

    def _first(self, view: memoryview, within_s: float) -> int:
        """Receive the beginning of a frame; return its bytes."""
        if within_s <= 0:
            raise PeerSilent("The other side sent nothing in the time it had.")
        self.socket.settimeout(within_s)
        try:
            received = self.socket.recv_into(view)
        except TimeoutError:
            raise PeerSilent(
                f"The other side sent nothing for {within_s:.1f} s. Check the network and the "
                "other side; `Deadlines.idle_s` and `handshake_s` allow more time."
            ) from None
        except OSError as error:
            raise _lost(error) from error
        if not received:
            raise PeerLost("The other side closed the connection without a word.")
        return received

    def _fill(
        self, view: memoryview, pace: Pace, done: int, running: RunningTag | None = None
    ) -> int:
        """Receive all of ``view``; return the bytes of the frame up to here."""
        while len(view):
            self.socket.settimeout(pace.left_s(done))
            try:
                received = self.socket.recv_into(view[:CHUNK_NBYTES])
            except TimeoutError:
                raise pace.stalled(done) from None
            except OSError as error:
                raise _lost(error) from error
            if not received:
                raise PeerLost(
                    f"The other side closed the connection after {done} bytes of a message."
                )
            if running is not None:
                running.update(view[:received])
            view = view[received:]
            done += received
        return done


def _lost(error: OSError) -> PeerLost:
    return PeerLost(f"The connection broke: {error}.")


def open_stream(
    connected: socket.socket, limits: Limits, deadlines: Deadlines
) -> tuple[Sender, Receiver]:
    """Return both directions of a connection, each with a socket object of its own."""
    try:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return Sender(connected.dup(), limits, deadlines), Receiver(connected, limits, deadlines)
    except OSError as error:  # the other side is gone already
        connected.close()
        raise _lost(error) from error


def shut(connected: socket.socket) -> None:
    """End both directions, which also wakes a thread that waits in either."""
    try:
        connected.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other side was faster
        return


def linger(connected: socket.socket, seconds: float) -> None:
    """Let the other side read what was sent last, before the socket is closed.

    Closing a socket with unread bytes resets the connection, and the other side would lose what it
    has not read. So end the own direction and throw away what still comes, until it ends too.
    """
    until = time.monotonic() + seconds
    waste = bytearray(64 * 1024)
    try:
        connected.shutdown(socket.SHUT_WR)
        while (left := until - time.monotonic()) > 0:
            connected.settimeout(left)
            if not connected.recv_into(waste):
                return
    except OSError:  # it is gone, or too slow: nothing more can be done for it
        return
