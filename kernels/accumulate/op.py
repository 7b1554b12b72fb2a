"""The operators ``lq_lightning::accumulate_`` and ``lq_lightning::read_accumulated_``."""

from __future__ import annotations

import torch
from torch import Tensor

from lq_lightning.kernels.accumulate.reference import buffer_layout
from lq_lightning.kernels.message.operators import count_write, define_operator

from . import reference as cpu


def _check(values: Tensor, buffer: Tensor) -> None:
    if values.dim() != 1 or not values.is_contiguous():
        raise ValueError(
            f"the values have shape {tuple(values.shape)} and stride {values.stride()}; expected "
            "one contiguous dimension. Pass values.flatten()."
        )
    nbytes = buffer_layout(values.numel()).nbytes
    if buffer.dtype != torch.uint8 or tuple(buffer.shape) != (nbytes,):
        raise ValueError(
            f"the buffer is {buffer.dtype} {tuple(buffer.shape)}; {values.numel()} values need "
            f"uint8 ({nbytes},). Allocate buffer_layout(numel).nbytes bytes."
        )
    if not buffer.is_contiguous() or (nbytes and buffer.data_ptr() % 16):
        raise ValueError(
            f"the buffer starts at address {buffer.data_ptr():#x} with stride {buffer.stride()}; "
            "it must be contiguous and start at a multiple of 16 bytes. Allocate it on its own."
        )


def _accumulate(buffer: Tensor, values: Tensor, empty: bool) -> None:
    """Add values to the sum in a buffer: decoded, added and scaled in fp32, encoded to nearest.

    Where anything in a group of 32 is not finite, the whole group is NaN from then on.

    Args:
        buffer: ``[buffer_layout(N).nbytes]`` uint8.
        values: ``[N]`` fp32, bf16 or fp16.
        empty: Whether to ignore what the buffer holds, which is then the first term of a sum.
    """
    _check(values, buffer)
    if buffer.is_cuda:
        from .triton_kernels import launch_accumulate

        launch_accumulate(buffer, values, empty)
    else:
        cpu.accumulate_(buffer, values, empty)
    count_write(buffer)


def _read_accumulated(buffer: Tensor, out: Tensor, add: bool) -> None:
    """Write the sum in a buffer to ``out``, or add it in fp32, rounded once.

    Args:
        buffer: ``[buffer_layout(N).nbytes]`` uint8.
        out: ``[N]`` fp32, bf16 or fp16.
        add: Whether to add to ``out`` instead of overwriting it.
    """
    _check(out, buffer)
    if buffer.is_cuda:
        from .triton_kernels import launch_read_accumulated

        launch_read_accumulated(buffer, out, add)
    else:
        cpu.read_accumulated_(buffer, out, add)
    count_write(out)


def _fake(first: Tensor, second: Tensor, flag: bool) -> None:
    return None


accumulate_ = define_operator(
    "accumulate_(Tensor(a!) buffer, Tensor values, bool empty) -> ()", _accumulate, _fake
)
read_accumulated_ = define_operator(
    "read_accumulated_(Tensor buffer, Tensor(a!) out, bool add) -> ()", _read_accumulated, _fake
)
