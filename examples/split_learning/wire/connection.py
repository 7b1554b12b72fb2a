"""A connection after the handshake: messages in both directions, until one side ends it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any

from torch import Tensor

from . import message, plain, tensors
from .errors import (
    MalformedFrame,
    PeerEnded,
    PeerFailed,
    PeerLost,
    PeerSilent,
    UnexpectedMessage,
    UnsendableMessage,
    WireError,
    printable,
)
from .frames import FrameType
from .handshake import Terms
from .message import Message
from .settings import Deadlines
from .stream import Frame, Receiver, Sender, linger, shut
from .traffic import Traffic

logger = logging.getLogger(__name__)


class Connection:
    """Messages to and from one peer. ``connect`` and ``Server`` make it.

    One thread may send while another receives. After any ``WireError`` nothing can be sent or
    received any more. Use it in a ``with`` statement: leaving it ends the connection in good order,
    or tells the other side that this one failed.

    Args:
        sender: after the handshake; its socket is closed with the connection.
        receiver: after the handshake; likewise.
        address: of the other side, for people.
        peer: what the other side said of itself.
        deadlines: of this side.

    Attributes:
        address: of the other side, for people.
        peer: what the other side said of itself.
        traffic: counts by kind and direction.
    """

    def __init__(
        self,
        sender: Sender,
        receiver: Receiver,
        *,
        address: str,
        peer: Terms,
        deadlines: Deadlines,
    ) -> None:
        self.address = address
        self.peer = peer
        self.traffic = Traffic()
        self.traffic.add_sent("handshake", sender.nbytes)
        self.traffic.add_received("handshake", receiver.nbytes)
        self._sender = sender
        self._receiver = receiver
        self._deadlines = deadlines
        self._error: WireError | None = None
        self._over = threading.Event()
        self._closing = threading.Lock()
        self._poster: ThreadPoolExecutor | None = None
        sender.limits = replace(
            sender.limits, body_nbytes=peer.body_nbytes, header_nbytes=peer.header_nbytes
        )
        self._pulse = threading.Thread(
            target=self._stay_alive, args=(peer.idle_s / 3,), name=f"alive {address}", daemon=True
        )
        self._pulse.start()

    # --- messages ---------------------------------------------------------------------------------

    def send(
        self,
        kind: str,
        fields: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Send a message; returns when the kernel has all of it.

        Args:
            kind: what it is: lower-case letters, digits and underscores.
            fields: plain data: dictionaries, lists, strings, numbers, booleans and None.
            tensors: by name; other than dense ones of common dtypes are refused.

        Raises:
            UnsendableMessage: nothing was sent.
            WireError: the connection is broken.
        """
        prepared = self._prepare(kind, fields or {}, tensors or {})
        if self._poster is not None:  # behind what was posted
            self._submit(self._poster, prepared).result()
        else:
            self._send(*prepared)

    def post(
        self,
        kind: str,
        fields: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> Future[None]:
        """Send a message in the background, in the order of calls, and return at once.

        Two peers that send large messages to each other at the same time must post them: each
        waits for the other to receive.

        Tensors must not be changed before the future is done. Its ``result()`` raises what
        ``send`` would; a broken connection also shows in the next call.

        Raises:
            UnsendableMessage: nothing was sent.
        """
        prepared = self._prepare(kind, fields or {}, tensors or {})
        if self._poster is None:
            self._poster = ThreadPoolExecutor(1, thread_name_prefix=f"post {self.address}")
        return self._submit(self._poster, prepared)

    def receive(self, *kinds: str, wait_s: float | None = None) -> Message:
        """Wait for the next message, which must be of one of these kinds.

        Args:
            kinds: allowed ones; none at all allows every kind.
            wait_s: how long it may take to begin; None takes that of the deadlines.

        Raises:
            UnexpectedMessage: it is of another kind.
            PeerEnded: the other side ended the connection.
            PeerFailed: it failed; the text says why.
            WireError: all other kinds.
        """
        wait_s = self._deadlines.wait_s if wait_s is None else wait_s
        until = time.monotonic() + wait_s
        try:
            with self._receiver.lock:
                self._check()
                frame = self._next_frame(until, wait_s)
                received = message.parse(frame.header, frame.tensors)
                if kinds and received.kind not in kinds:
                    raise UnexpectedMessage(
                        f"The other side sent {received.kind!r} where {' or '.join(kinds)} was "
                        "expected. Start both sides with the same version and options."
                    )
                nbytes = sum(one.nbytes for one in received.tensors.values())
                self.traffic.add_received(received.kind, frame.nbytes, nbytes)
                return received
        except WireError as error:
            raise self._first_error(error) from None

    def messages(self, *kinds: str) -> Iterator[Message]:
        """Yield messages as ``receive`` returns them, until the other side ends the connection."""
        while True:
            try:
                received = self.receive(*kinds)
            except PeerEnded:
                return
            yield received

    # --- end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the connection in good order: what was sent arrives. Calling it again does nothing.

        Another thread that waits for a message gets ``PeerEnded``.
        """
        self._finish(FrameType.END, {})

    def fail(self, reason: str, *, passing: bool = False) -> None:
        """End the connection and tell the other side why.

        Args:
            reason: for people.
            passing: whether another connection may do better: the other side then gets
                ``PeerLost``, else ``PeerFailed``.
        """
        self._finish(FrameType.FAILED, {"reason": printable(reason), "passing": passing})

    def __enter__(self) -> Connection:
        """Return the connection."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the connection, in good order or with the reason why not."""
        if error is None or isinstance(error, PeerEnded):
            self.close()
        else:  # texts of other errors may say what is nobody else's business
            reason = str(error) if isinstance(error, WireError) else type(error).__name__
            self.fail(reason, passing=isinstance(error, PeerLost))

    def _finish(self, kind: FrameType, header: Mapping[str, Any]) -> None:
        with self._closing:
            if self._over.is_set():
                return
            self._over.set()
        if self._poster is not None:
            self._poster.shutdown(
                wait=kind is FrameType.END, cancel_futures=kind is not FrameType.END
            )
        self._first_error(PeerEnded("This side has closed the connection."))
        self._say_last(kind, header)
        linger(self._receiver.socket, self._deadlines.linger_s)
        shut(self._receiver.socket)
        if threading.current_thread() is not self._pulse:
            self._pulse.join()
        # Whoever still sends or receives was woken by the shutdown, and must be out of the socket
        # before its number can be that of another.
        with self._sender.lock:
            self._sender.socket.close()
        with self._receiver.lock:
            self._receiver.socket.close()

    def _say_last(self, kind: FrameType, header: Mapping[str, Any]) -> None:
        """Send the last frame, unless a message is in the way that the other side does not take."""
        if not self._sender.lock.acquire(timeout=self._deadlines.linger_s):
            return
        try:
            until = time.monotonic() + self._deadlines.linger_s
            encoded = plain.dump(header, self._sender.limits)
            self.traffic.add_sent("end", self._sender.send(kind, encoded, until=until).nbytes)
        except WireError as error:  # the other side is gone already, or has half a message
            logger.debug("%s did not get the last word: %s", self.address, error)
        finally:
            self._sender.lock.release()

    # --- parts ------------------------------------------------------------------------------------

    def _prepare(
        self, kind: str, fields: Mapping[str, Any], given: Mapping[str, Tensor]
    ) -> tuple[str, bytes, list[Tensor]]:
        """Check a message and make it ready to be sent."""
        if not message.is_kind(kind):
            raise UnsendableMessage(
                f"A message of the kind {kind!r:.100}: use up to 64 lower-case letters, digits "
                "and _, and neither handshake nor alive nor end."
            )
        limits = self._sender.limits
        described = tensors.describe(given, limits)
        header = {"kind": kind, "fields": dict(fields), "tensors": described}
        encoded = plain.dump(header, limits)
        return kind, encoded, [tensors.on_cpu(tensor) for tensor in given.values()]

    def _submit(
        self, poster: ThreadPoolExecutor, prepared: tuple[str, bytes, list[Tensor]]
    ) -> Future[None]:
        try:
            return poster.submit(self._send, *prepared)
        except RuntimeError:  # it was shut down, together with the connection
            self._check()
            raise

    def _send(self, kind: str, header: bytes, prepared: list[Tensor]) -> None:
        body = [tensors.as_bytes(tensor) for tensor in prepared]
        try:
            with self._sender.lock:
                self._check()
                sent = self._sender.send(FrameType.MESSAGE, header, body)
        except WireError as error:
            raise self._cut(self._last_word() or error) from None
        self.traffic.add_sent(kind, sent.nbytes, sum(map(len, body)))

    def _next_frame(self, until: float, wait_s: float, over: float = math.inf) -> Frame:
        """Return the next message's frame.

        Args:
            until: when, on the monotonic clock, it must have begun.
            wait_s: how long that was, for the error.
            over: when it must have come.
        """
        while True:
            left = until - time.monotonic()
            if left <= 0:
                raise PeerSilent(
                    f"The other side sent no message for {wait_s:.1f} s, if perhaps signs of life. "
                    "Look what keeps it busy; `Deadlines.wait_s` allows more time."
                )
            idle_s = self._deadlines.idle_s
            try:
                frame = self._receiver.receive(within_s=min(left, idle_s), until=over)
            except PeerSilent:
                if left > idle_s:
                    raise
                continue
            if frame.type is FrameType.MESSAGE:
                return frame
            self.traffic.add_received(
                "alive" if frame.type is FrameType.ALIVE else "end", frame.nbytes
            )
            if frame.type is FrameType.END:
                raise PeerEnded("The other side ended the connection.")
            if frame.type is FrameType.FAILED:
                reason = printable(frame.header.get("reason"))
                kind = PeerLost if frame.header.get("passing") is True else PeerFailed
                raise kind(f"The other side ended the connection: {reason}")
            if frame.type is not FrameType.ALIVE:
                raise MalformedFrame(f"{frame.type.name} came after the handshake.")

    def _last_word(self) -> WireError | None:
        """Return why the other side takes nothing any more, if it said so."""
        if self._over.is_set() or not self._receiver.lock.acquire(blocking=False):
            return None  # or the thread that receives sees it
        try:
            until = time.monotonic() + self._deadlines.linger_s / 4
            while True:
                self._next_frame(until, 0.0, over=until)
        except WireError as error:
            told = isinstance(error, (PeerFailed, PeerEnded))
            return error if told else None
        finally:
            self._receiver.lock.release()

    def _stay_alive(self, every_s: float) -> None:
        while not self._over.wait(every_s):
            if not self._sender.lock.acquire(blocking=False):
                continue  # a message is on its way, which is a sign of life
            try:
                if self._error is not None:
                    return
                self.traffic.add_sent("alive", self._sender.send(FrameType.ALIVE, b"{}").nbytes)
            except WireError as error:
                self._cut(error)
                return
            finally:
                self._sender.lock.release()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _first_error(self, error: WireError) -> WireError:
        """Remember what ended the connection; what it brings about in other threads is no news."""
        with self._closing:
            self._error = self._error or error
            return self._error

    def _cut(self, error: WireError) -> WireError:
        """End both directions after sending failed: a thread that receives would wait in vain."""
        first = self._first_error(error)
        shut(self._receiver.socket)
        return first
