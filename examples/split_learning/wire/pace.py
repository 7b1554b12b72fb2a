"""How fast bytes have to come: what cuts a peer that stalls or trickles."""

from __future__ import annotations

import math
import time

from .errors import PeerStalled
from .settings import Deadlines


class Pace:
    """The time that a frame may take from its first byte on.

    Args:
        what: begins the error's text, such as "the other side sent".
        deadlines: the longest pause and the slowest rate.
        until: time (of ``time.monotonic``) when all has to be over.
    """

    def __init__(self, what: str, deadlines: Deadlines, until: float = math.inf) -> None:
        self._what = what
        self._deadlines = deadlines
        self._until = until
        self._start = time.monotonic()

    def left_s(self, done: int) -> float:
        """Return how long the next byte may take after ``done`` bytes.

        Raises:
            PeerStalled: there is no time left.
        """
        now = time.monotonic()
        due = self._start + self._deadlines.stall_s + done / self._deadlines.slowest_rate
        left = min(self._deadlines.stall_s, due - now, self._until - now)
        if left <= 0:
            raise self.stalled(done)
        return left

    def stalled(self, done: int) -> PeerStalled:
        """Return the error of a peer that is too slow."""
        took = time.monotonic() - self._start
        return PeerStalled(
            f"{self._what} only {done} bytes of a message in {took:.1f} s. Check the network and "
            "the other side; `Deadlines.stall_s`, `slowest_rate` and `handshake_s` allow more "
            "time."
        )
