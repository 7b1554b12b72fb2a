"""Copies to a device that the host does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["send_to"]


def send_to(values: Tensor, device: torch.device) -> Tensor:
    """Return values of the host on a device, for the current stream of that.

    A plain ``to`` lets the host wait until the device has done all work of the stream.

    Args:
        values: On the CPU, any shape and dtype.
        device: Where they are needed.

    Returns:
        ``values`` itself if ``device`` is the CPU, else a copy.
    """
    if device.type != "cuda":
        return values.to(device)
    # The allocator of pinned memory keeps it until the copy is done.
    return values.pin_memory().to(device, non_blocking=True)
