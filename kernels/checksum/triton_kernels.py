"""The Triton kernel of checksums, for many tensors in one launch.

A table on the device says where the tensors are and which of the programs work on each. It is
written anew only when they have moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.checksum.op import BLOCK, INTEGERS, column_factors
from lq_lightning.kernels.message.launch import on_device

_DTYPES = {torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32}
# Of a tensor, that one program adds up: 64 KB of fp32.
ROWS_PER_PROGRAM = 16


@triton.jit
def checksum_kernel(
    table_ptr,
    programs_ptr,
    factors_ptr,
    out_ptr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add up some rows of one tensor: unpack -> multiply -> add."""
    program = tl.program_id(0)
    tensor = tl.load(programs_ptr + program)
    source = tl.load(table_ptr + tensor * 4).to(tl.pointer_type(DTYPE))
    numel = tl.load(table_ptr + tensor * 4 + 1)
    first_program = tl.load(table_ptr + tensor * 4 + 2)
    target = tl.load(table_ptr + tensor * 4 + 3)
    first_row = (program - first_program) * ROWS
    column = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), dtype=tl.int64)
    for step in range(ROWS):
        row = first_row + step
        index = row * BLOCK + column
        bits = tl.load(source + index, index < numel, 0)
        sums += bits.to(tl.int64) * (2 * row + 1)
    total = tl.sum(sums * tl.load(factors_ptr + column), axis=0)
    tl.atomic_add(out_ptr + target, total)  # of integers: the order does not matter


@lru_cache(maxsize=8)
def _tables(
    places: tuple[tuple[int, int, int], ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """The table, ``[N, 4]`` int64, and the tensor of each program, int64."""
    rows, counts, first = [], [], 0
    for address, numel, target in places:
        count = triton.cdiv(numel, BLOCK * ROWS_PER_PROGRAM)
        rows.append((address, numel, first, target))
        counts.append(count)
        first += count
    tensors = torch.arange(len(places), device="cpu")
    programs = tensors.repeat_interleave(torch.tensor(counts, device="cpu"))
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    return table.to(device), programs.to(device)


def launch_checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Launch the kernel; arguments as for ``checksums``."""
    device = tensors[0].device
    places: dict[torch.dtype, list[tuple[int, int, int]]] = {}
    for target, tensor in enumerate(tensors):
        if numel := tensor.numel():
            integers = INTEGERS[tensor.itemsize]
            numel *= tensor.itemsize // integers.itemsize
            places.setdefault(integers, []).append((tensor.data_ptr(), numel, target))
    out = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    for integers, found in places.items():
        table, programs = _tables(tuple(found), device)
        if device.type == "cuda":  # they may leave the cache while the kernel reads them
            stream = torch.cuda.current_stream(device)
            table.record_stream(stream)
            programs.record_stream(stream)
        with on_device(tensors[0]):
            checksum_kernel[(len(programs),)](
                table,
                programs,
                column_factors(device),
                out,
                DTYPE=_DTYPES[integers],
                BLOCK=BLOCK,
                ROWS=ROWS_PER_PROGRAM,
                num_warps=4,
            )
    return out
