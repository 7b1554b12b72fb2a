"""Launch the Triton kernel of the optimizer step on many tensors at once.

A table on the device, written for every launch, holds pointers and scalars of every tensor. Most of
it depends on the prepared tensors alone and is kept on the host; gradients move. A second table,
which depends on the shapes alone, says which tensor a program works on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.message.launch import on_device
from lq_lightning.kernels.message.reference import packed_seed_words

from .formats import StateFormat, level_pairs
from .prepared import ALIGNMENT, PreparedTensor
from .triton_kernels import TABLE_WIDTH, optimizer_step_kernel

# Columns of the table: pointers of parameter, gradient and (codes, scale, exponent) twice; number
# of groups, first program, length and groups of a row, first group in the whole parameter, seed;
# then the scalars, two fp32 each.
_GRADIENT, _FIRST_GROUP, _SEED, _SCALARS = 1, 12, 13, 14
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
# A program is one warp, which works on this many groups.
GROUPS_PER_PROGRAM = 64


@lru_cache(maxsize=64)
def _programs(groups: tuple[int, ...], per_program: int, device: torch.device) -> Tensor:
    """Tensor of each program, int32; and with it how many programs there are."""
    counts = torch.tensor([-(-count // per_program) for count in groups], device="cpu")
    tensors = torch.arange(len(groups), dtype=torch.int32, device="cpu")
    return tensors.repeat_interleave(counts).to(device)


@lru_cache(maxsize=64)
def _fixed_columns(
    prepared: tuple[PreparedTensor, ...], per_program: int
) -> tuple[Tensor, tuple[int, ...]]:
    """The table without gradients, seeds and scalars, on the host; groups of every tensor."""
    rows, groups, first_program = [], [], 0
    for item in prepared:
        count = item.shape[0] * item.row_groups
        words = (count, first_program, item.length, item.row_groups)
        row = (*item.pointers, *words)
        rows.append((*row, *[0] * (TABLE_WIDTH - len(row))))
        groups.append(count)
        first_program += -(-count // per_program)
    return torch.tensor(rows, dtype=torch.int64, device="cpu"), tuple(groups)


def _groups_at_once(formats: Sequence[StateFormat], rounded: bool) -> int:
    """How many groups a program works on at a time; what was fastest on an H200.

    More leave less to compute per group, and take more registers: with 8 groups and levels of
    codebooks they are spilled, which takes twice as long.
    """
    if len(formats) == 1 or not all(fmt.expanded for fmt in formats):
        return 2
    return 8 if rounded else 4


def _signed(seed: int) -> int:
    return seed - (1 << 64) if seed >> 63 else seed


def _table(
    fixed: Tensor,
    addresses: Sequence[int],
    scalars: Tensor,
    seeds: Sequence[int],
    first_groups: Sequence[int],
    device: torch.device,
) -> Tensor:
    """Pointers and scalars of every tensor, ``[N, 18]`` int64 on ``device``."""
    columns = {_GRADIENT: torch.tensor(addresses, dtype=torch.int64, device="cpu")}
    if seeds:
        words = torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64, device="cpu")
        columns[_SEED] = packed_seed_words(words)
        columns[_FIRST_GROUP] = torch.tensor(first_groups, dtype=torch.int64, device="cpu")
    table = torch.empty(
        fixed.shape, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
    )
    table.copy_(fixed)
    for index, column in columns.items():
        table[:, index] = column
    table.view(torch.float32)[:, 2 * _SCALARS :] = scalars
    return table.to(device, non_blocking=True)


def launch_optimizer_step(
    prepared: Sequence[PreparedTensor],
    grads: Sequence[Tensor],
    scalars: Tensor,
    seeds: Sequence[int],
    first_groups: Sequence[int],
    rule: str,
    stochastic: bool,
    per_program: int = GROUPS_PER_PROGRAM,
    at_once: int | None = None,
) -> None:
    """Launch the kernel on all tensors, those with rows of whole groups apart from the others.

    Args as for ``optimizer_step``, which has checked them, but for the last ones:
        per_program: groups that a program works on.
        at_once: how many of them at a time, a power of two up to 32; what was fastest by default.
    """
    kind = prepared[0].kind
    rounded = stochastic and kind.dtype == torch.bfloat16
    at_once = at_once or _groups_at_once(kind.formats, rounded)
    if per_program % at_once:
        raise ValueError(f"{per_program=} must be a multiple of {at_once=}.")
    addresses = [grad.data_ptr() for grad in grads]
    kept: dict[bool, list[int]] = {True: [], False: []}
    for index, item in enumerate(prepared):
        if item.row_groups and item.shape[0]:
            # gradients move, and those of FSDP2 are views into a common buffer
            kept[item.aligned and addresses[index] % ALIGNMENT == 0].append(index)
    for whole, chosen in kept.items():
        if not chosen:
            continue
        fixed, groups = _fixed_columns(tuple([prepared[i] for i in chosen]), per_program)
        table = _table(
            fixed,
            [addresses[i] for i in chosen],
            scalars if len(chosen) == len(prepared) else scalars[chosen],
            [seeds[i] for i in chosen] if seeds else (),
            [first_groups[i] for i in chosen] if seeds else (),
            kind.device,
        )
        programs = _programs(groups, per_program, kind.device)
        first, second = kind.formats[0], kind.formats[-1]
        books = [
            level_pairs(fmt, kind.device) if fmt.spacing == "dynamic" else table
            for fmt in (first, second)
        ]
        with on_device(grads[chosen[0]]):
            optimizer_step_kernel[(len(programs),)](
                table,
                table.view(torch.float32),
                programs,
                *books,
                RULE=rule,
                FIRST=first,
                SECOND=second,
                P_DTYPE=_DTYPES[kind.dtype],
                G_DTYPE=_DTYPES[grads[chosen[0]].dtype],
                STOCHASTIC=rounded,
                ALIGNED=whole,
                GROUPS=per_program,
                AT_ONCE=at_once,
                num_warps=1,
                enable_fp_fusion=False,
            )
