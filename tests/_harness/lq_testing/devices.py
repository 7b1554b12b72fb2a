"""Where the tensors of a rank live."""

from __future__ import annotations

import torch
import torch.distributed as dist


def device() -> torch.device:
    """This rank's device: its GPU under NCCL, else the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
