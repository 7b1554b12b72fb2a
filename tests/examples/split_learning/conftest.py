"""No connection is left open."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    """Every test must end its connections: their threads end with them."""
    before = set(threading.enumerate())
    yield
    until = time.monotonic() + 5
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < until, left
        time.sleep(0.005)
