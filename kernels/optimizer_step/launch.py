"""Launch the Triton kernel of the optimizer step on many tensors at once.

A table on the device, rebuilt for every launch since gradients move, holds pointers and scalars of
every tensor. A second one, which depends on the shapes alone, says which tensor a program works on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.message.launch import on_device
from lq_lightning.kernels.message.reference import seed_words

from .formats import (
    GROUP_SIZE,
    StateFormat,
    codebook,
    exponent_table,
    groups_per_row,
    row_length,
)
from .reference import State
from .triton_kernels import TABLE_WIDTH, optimizer_step_kernel

# Entries of a row of the table: pointers of parameter, gradient and (codes, scale, exponent) twice;
# number of groups, first program, length and groups of a row, first element, seed; then the
# scalars, two fp32 each.
_TABLE_POINTERS = 8
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
# A program is one warp, which works on this many groups, so many at a time.
GROUPS_PER_PROGRAM = 64
GROUPS_AT_ONCE = 2


@lru_cache(maxsize=64)
def _programs(groups: tuple[int, ...], per_program: int, device: torch.device) -> Tensor:
    """Tensor of each program, int32; and with it how many programs there are."""
    counts = torch.tensor([-(-count // per_program) for count in groups])
    tensors = torch.arange(len(groups), dtype=torch.int32)
    return tensors.repeat_interleave(counts).to(device)


def _table(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[State]],
    scalars: Tensor,
    seeds: Sequence[int],
    offsets: Sequence[int],
    per_program: int,
) -> tuple[Tensor, tuple[int, ...]]:
    """Pointers and scalars of every tensor, ``[N, 18]`` int64 on the host; groups of every one."""
    rows, groups, first_program = [], [], 0
    for param, grad, entry, seed, offset in zip(params, grads, states, seeds, offsets, strict=True):
        length = row_length(param.shape)
        row_groups = groups_per_row(length)
        count = param.shape[0] * row_groups
        addresses = [param.data_ptr(), grad.data_ptr()]
        for state in entry:
            parts = (state.codes, state.scale, state.exponent)
            addresses += [0 if part is None else part.data_ptr() for part in parts]
        addresses += [0] * (_TABLE_POINTERS - len(addresses))
        low, high = seed_words(seed)
        words = [
            count,
            first_program,
            length,
            row_groups,
            offset,
            (high << 32) | (low & 0xFFFFFFFF),
        ]
        rows.append(addresses + words)
        groups.append(count)
        first_program += -(-count // per_program)
    pointers = torch.tensor(rows, dtype=torch.int64)
    table = torch.cat([pointers, scalars.contiguous().view(torch.int64)], dim=1)
    if table.shape[1] != TABLE_WIDTH:
        raise AssertionError(f"the table has {table.shape[1]} columns")
    return table, tuple(groups)


def _is_aligned(param: Tensor, grad: Tensor, states: Sequence[State]) -> bool:
    tensors = [param, grad, *(state.codes for state in states)]
    return row_length(param.shape) % GROUP_SIZE == 0 and all(
        t.data_ptr() % 16 == 0 for t in tensors
    )


def launch_optimizer_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[State]],
    scalars: Tensor,
    seeds: Sequence[int],
    offsets: Sequence[int],
    rule: str,
    formats: Sequence[StateFormat],
    stochastic: bool,
    per_program: int = GROUPS_PER_PROGRAM,
    at_once: int = GROUPS_AT_ONCE,
) -> None:
    """Launch the kernel on all tensors, those with rows of whole groups apart from the others.

    Args as for ``reference.step``, with one entry per tensor; ``scalars`` is ``[N, 8]`` fp32 on the
    host. All tensors are on one device; parameters share a dtype, gradients too.
    """
    if params and params[0].device.type == "cpu":
        per_program = at_once = 1  # Triton's interpreter gains nothing from more
    kept = [index for index, param in enumerate(params) if param.numel()]
    aligned = [_is_aligned(params[i], grads[i], states[i]) for i in kept]
    for whole in (True, False):
        chosen = [index for index, is_whole in zip(kept, aligned, strict=True) if is_whole == whole]
        if not chosen:
            continue
        device = params[chosen[0]].device
        table, groups = _table(
            [params[i] for i in chosen],
            [grads[i] for i in chosen],
            [states[i] for i in chosen],
            scalars[chosen],
            [seeds[i] for i in chosen],
            [offsets[i] for i in chosen],
            per_program,
        )
        if device.type == "cuda":
            table = table.pin_memory().to(device, non_blocking=True)
        programs = _programs(groups, per_program, device)
        first, second = formats[0], formats[-1]
        books = [
            codebook(fmt, device) if fmt.quantized else (table, table) for fmt in (first, second)
        ]
        with on_device(params[chosen[0]]):
            optimizer_step_kernel[(len(programs),)](
                table,
                table.view(torch.float32),
                programs,
                *books[0],
                *books[1],
                exponent_table(device),
                RULE=rule,
                FIRST=first,
                SECOND=second,
                P_DTYPE=_DTYPES[params[chosen[0]].dtype],
                G_DTYPE=_DTYPES[grads[chosen[0]].dtype],
                STOCHASTIC=stochastic and params[chosen[0]].dtype == torch.bfloat16,
                ALIGNED=whole,
                GROUPS=per_program,
                UNROLL=at_once,
                num_warps=1,
                enable_fp_fusion=False,
            )
