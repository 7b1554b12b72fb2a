"""How much of what is saved moves to the host: all, a share, an amount, or what the link hides."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lq_lightning.foundation.checks import is_number, size_in_bytes

from .host_memory import free_host_memory, host_memory

_WARM = 3  # forward passes before one is measured: the first ones compile, and pin memory
_OF_LINK = 0.9  # of its measured rate is counted on
_OF_DEVICE = 0.95  # of its memory may be allocated
RESIDENT = 2  # blocks whose saved tensors are on the device at a time, in either direction
_PROBE_NBYTES = 1 << 26


class Share:
    """Decides which storages move, evenly over a forward pass.

    Args:
        amount: As ``Offload`` takes it.

    Raises:
        ValueError: Another amount.
    """

    def __init__(self, amount: str | float) -> None:
        self.amount = amount
        self.fraction = 1.0
        self.limit_nbytes: int | None = None
        size = size_in_bytes(amount) if isinstance(amount, str) else None
        if is_number(amount) and 0 < amount <= 1:
            self.fraction = float(amount)
        elif is_number(amount) and 1 < amount < float("inf"):
            self.limit_nbytes = int(amount * 2**30)
        elif size:
            self.limit_nbytes = size
        elif amount != "auto":
            raise ValueError(
                f"`offload={amount!r}` is not supported: give 'auto', a share of what is saved up "
                "to 1.0, or host memory per rank: a number of GiB above 1, or a string such as "
                "'40GiB'."
            )
        self.is_open = amount == "auto"  # until it is decided; on a GPU
        self.moved = self.seen = 0  # in this forward pass
        self._passes = 0
        self._span: list[torch.cuda.Event] = []
        self._copies: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def takes(self, nbytes: int, used_nbytes: int) -> bool:
        """Return whether a storage moves, with so many bytes on the host already."""
        self.seen += nbytes
        if self.limit_nbytes is not None and used_nbytes + nbytes > self.limit_nbytes:
            return False
        if self.moved + nbytes > self.fraction * self.seen:
            return False
        self.moved += nbytes
        return True

    def begin_forward(self) -> None:
        """Note that the first block of a forward pass is called."""
        self.moved = self.seen = 0
        self._passes += 1
        if self.is_open:
            self._span, self._copies = [_mark()], []

    def end_block(self) -> None:
        """Note that a block has run."""
        if self.is_open:
            self._span[1:] = [_mark()]

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure a copy on the current stream, for ``"auto"``."""
        start = _mark() if self.is_open else None
        yield
        if start is not None:
            self._copies.append((start, _mark()))

    def decide(self, device: torch.device) -> str:
        """After a step: choose what ``"auto"`` moves from now on; say so, or return "".

        So much that copies take as long as the forward pass that hides them; more, where what is
        left would not fit into the device's memory. Ranks may differ.
        """
        if not self.is_open or self._passes < _WARM or not self._copies:
            return ""
        torch.cuda.synchronize(device)
        forward_s = self._span[0].elapsed_time(self._span[1]) / 1e3
        copies_s = sum(a.elapsed_time(b) for a, b in self._copies) / 1e3
        total = torch.cuda.get_device_properties(device).total_memory
        room = max(0.0, _OF_DEVICE * total - torch.cuda.max_memory_allocated(device))
        hidden, moved = _OF_LINK * forward_s / max(copies_s, 1e-9), max(1, self.moved)
        self.fraction = min(1.0, max(hidden, 1.0 - room / moved, 1 / 64))
        self.is_open, self._copies = False, []
        return (
            f"{self.fraction:.0%} of saved activations move to the host: {moved / 2**30:.2f} GiB "
            f"took {copies_s * 1e3:.0f} ms, at {moved / copies_s / 1e9:.1f} GB/s, beside a forward "
            f"of {forward_s * 1e3:.0f} ms."
        )


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def hidden_nbytes(model: nn.Module, forward_s: float, ranks: int) -> int:
    """Return the bytes that a forward pass of so many seconds hides, if the host has room."""
    device = next(model.parameters()).device
    host = host_memory(_PROBE_NBYTES, pin=device.type == "cuda")
    source, best = torch.zeros_like(host, device=device), float("inf")
    for _ in range(4):
        began = time.perf_counter()
        host.copy_(source)  # waits for the device
        best = min(best, time.perf_counter() - began)
    rate = _PROBE_NBYTES / best
    return min(int(_OF_LINK * rate * forward_s), free_host_memory(ranks)[0])
