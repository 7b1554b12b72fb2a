"""Triton kernel of the optimizer step, bit-identical to ``reference.py``.

One launch updates many tensors. A program is one warp, which works on a few groups of elements
at once, as ``triton_codes.py`` says.

A table on the device, written for every launch, holds pointers and scalars of every tensor. Most of
it depends on the prepared tensors alone and is kept on the host; gradients move. A second table,
which depends on the shapes alone, says which tensor a program works on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.message.launch import on_device
from lq_lightning.kernels.message.reference import packed_seed_words
from lq_lightning.kernels.message.triton_blocks import round_output
from lq_lightning.kernels.optimizer_step.formats import GROUP_SIZE, StateFormat, level_pairs
from lq_lightning.kernels.optimizer_step.op import ALIGNMENT, PreparedTensor
from lq_lightning.kernels.optimizer_step.triton_codes import (
    decode_groups,
    element_noise,
    encode_groups,
    group_noise,
    groups_of_lanes,
    inner_columns,
    lane_columns,
    nearby_levels,
)

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_NAN = tl.constexpr(0x7FC00000)
_SMALLEST_SQUARE = tl.constexpr(2.0**-100)  # 0f0D800000 below
# Of a row of the table, its length, and where the scalars begin, in fp32 words.
TABLE_WIDTH = 18
_TABLE_WIDTH = tl.constexpr(TABLE_WIDTH)
_SCALARS_AT = tl.constexpr(28)


@triton.jit
def _sqrt(x):
    """Correctly rounded square root of ``max(x, 2**-100)``, NaN for infinity; without branches."""
    if _INTERPRETED:
        x = tl.where(x < _SMALLEST_SQUARE, _SMALLEST_SQUARE, x)
        y = tl.where(x < float("inf"), tl.sqrt(x), float("nan"))
    else:
        y = tl.inline_asm_elementwise(
            """{
            .reg .f32 x, y, n, h;
            max.NaN.f32 x, $1, 0f0D800000;
            rsqrt.approx.ftz.f32 h, x;
            mul.f32 y, x, h;
            mul.f32 h, h, 0f3F000000;
            neg.f32 n, y;
            fma.rn.f32 n, n, y, x;
            fma.rn.f32 $0, n, h, y;
            }""",
            *("=f,f", [x], tl.float32, True, 1),
        )
    return y


@triton.jit
def _reciprocal(x):
    """Correctly rounded 1/x for normal results, without branches."""
    if _INTERPRETED:
        y = tl.div_rn(1.0, x)
    else:
        y = tl.inline_asm_elementwise(
            """{
            .reg .f32 y, n;
            rcp.approx.ftz.f32 y, $1;
            neg.f32 n, $1;
            fma.rn.f32 n, n, y, 0f3F800000;
            fma.rn.f32 $0, n, y, y;
            }""",
            *("=f,f", [x], tl.float32, True, 1),
        )
    return y


@triton.jit
def round_stochastically(x, noise):
    """Round fp32, the result of arithmetic, to bf16; ``reference.round_stochastically``."""
    # Infinities stay what they are, since noise is below their last bit. The NaN that arithmetic
    # makes, 0x7FFFFFFF, becomes one that noise cannot carry beyond NaN.
    bits = tl.minimum(x.to(tl.int32, bitcast=True), _NAN)
    bits += (noise >> 16).to(tl.int32, bitcast=True)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _update(p, g, first, second, s, RULE: tl.constexpr):
    """New parameter and states; ``reference.update``. ``s`` holds the scalars."""
    if RULE == "lion":
        mixed = first * s[0] + g * s[1]
        direction = tl.where(mixed > 0.0, 1.0, tl.where(mixed < 0.0, -1.0, mixed))
        p = p * s[6] - direction * s[7]
        first = first * s[2] + g * s[3]
    elif RULE == "sgd" or RULE == "nesterov":
        g = g + p * s[6]
        first = first * s[0] + g * s[1]
        direction = g * s[2] + first * s[0] if RULE == "nesterov" else first
        p = p - direction * s[7]
    else:
        if RULE == "adam":
            g = g + p * s[6]
        first = first * s[0] + g * s[1]
        second = second * s[2] + (g * g) * s[3]
        step = first * _reciprocal(_sqrt(second) + s[4]) * s[7]
        p = p - step if RULE == "adam" else p * s[6] - step
    return p, first, second


@triton.jit
def _load_four(source):
    return tl.load(source), tl.load(source + 1), tl.load(source + 2), tl.load(source + 3)


@triton.jit
def _pointer(table, INDEX: tl.constexpr, DTYPE: tl.constexpr, ALIGNMENT: tl.constexpr):
    address = tl.load(table + INDEX)
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), ALIGNMENT)


@triton.jit
def _state_pointers(table, INDEX: tl.constexpr, FORMAT: tl.constexpr, ALIGNMENT: tl.constexpr):
    DTYPE: tl.constexpr = tl.uint8 if FORMAT.quantized else tl.float32
    return (
        _pointer(table, INDEX, DTYPE, ALIGNMENT),
        _pointer(table, INDEX + 1, tl.uint16, 1),
        _pointer(table, INDEX + 2, tl.uint8, 1),
    )


@triton.jit
def _load_state(pointers, group, offsets, exists, FORMAT: tl.constexpr):
    """Codes (or values), scale and exponent as they are stored."""
    codes = tl.load(pointers[0] + offsets, exists)
    scale = group
    exponent = group
    if FORMAT.quantized:
        scale = tl.load(pointers[1] + group)
        if FORMAT.expanded:
            exponent = tl.load(pointers[2] + group)
    return codes, scale, exponent


@triton.jit
def _widened(x):
    """fp32 of fp32 or bf16."""
    if x.dtype.is_bf16() and not _INTERPRETED:
        # of two in a register, which the compiler would take apart first
        y = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
            *("=r,=r,r", [x], tl.float32, True, 2),
        )
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def _decode_state(stored, levels, FORMAT: tl.constexpr):
    values = stored[0]
    if FORMAT.quantized:
        values = decode_groups(stored[0], stored[1], stored[2], levels, FORMAT)
    return values


@triton.jit
def _encode_state(x, old, exists, levels, word, STREAM: tl.constexpr, FORMAT: tl.constexpr):
    if FORMAT.quantized:
        x = tl.where(exists, x, 0.0)
        noise = element_noise(word, STREAM, x.shape[1], FORMAT.group_size)
        stored = encode_groups(x, old, levels, noise, FORMAT)
    else:
        stored = (x, 0, 0)
    return stored


@triton.jit
def _store_state(stored, pointers, group, offsets, mask, inside, FORMAT: tl.constexpr):
    tl.store(pointers[0] + offsets, stored[0], mask)
    if FORMAT.quantized:
        # every lane of a group writes the same
        tl.store(pointers[1] + group, tl.broadcast_to(stored[1], group.shape), inside)
        if FORMAT.expanded:
            tl.store(pointers[2] + group, tl.broadcast_to(stored[2], group.shape), inside)


@triton.jit
def _locate(
    group,
    length,
    row_groups,
    ALIGNED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Offsets of the elements of groups, and which of them exist."""
    column = lane_columns(AT_ONCE)
    inner = inner_columns(AT_ONCE, GROUP)
    if ALIGNED:
        offsets = group.to(tl.int64) * GROUP + column + inner
        exists = tl.full(group.shape, True, tl.int1)  # a constant: loads take no mask
    else:
        start = (group % row_groups).to(tl.int64) * GROUP
        offsets = (group // row_groups).to(tl.int64) * length + start + column + inner
        exists = column + inner < length - start
    return offsets, exists


@triton.jit
def optimizer_step_kernel(
    table_ptr,
    scalars_ptr,
    tensor_of_program_ptr,
    first_levels_ptr,
    second_levels_ptr,
    RULE: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    P_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ALIGNED: tl.constexpr,
    GROUPS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Update ``GROUPS`` groups of one tensor, ``AT_ONCE`` at a time: decode -> update -> encode."""
    program = tl.program_id(0)
    tensor = tl.load(tensor_of_program_ptr + program)
    table = table_ptr + tensor * _TABLE_WIDTH
    scalars = scalars_ptr + tensor * (2 * _TABLE_WIDTH) + _SCALARS_AT
    TWO: tl.constexpr = RULE == "adamw" or RULE == "adam"
    ALIGNMENT: tl.constexpr = 16 if ALIGNED else 1
    GROUP: tl.constexpr = FIRST.group_size
    p_ptr = _pointer(table, 0, P_DTYPE, ALIGNMENT)
    g_ptr = _pointer(table, 1, G_DTYPE, ALIGNMENT)
    m_ptrs = _state_pointers(table, 2, FIRST, ALIGNMENT)
    v_ptrs = _state_pointers(table, 5, SECOND, ALIGNMENT)
    num_groups = tl.load(table + 8).to(tl.int32)
    first_group = (program - tl.load(table + 9).to(tl.int32)) * GROUPS
    length = tl.load(table + 10)
    row_groups = tl.load(table + 11).to(tl.int32)
    s = _load_four(scalars) + _load_four(scalars + 4)
    noise_group = tl.load(table + 12)
    seed = tl.load(table + 13)
    seed_a, seed_b = seed.to(tl.int32), (seed >> 32).to(tl.int32)
    limit = tl.minimum(first_group + GROUPS, num_groups)
    first_levels = nearby_levels(first_levels_ptr, FIRST)
    second_levels = nearby_levels(second_levels_ptr, SECOND) if TWO else first_levels
    for start in range(first_group, limit, AT_ONCE):
        group = start + groups_of_lanes(AT_ONCE)
        inside = group < limit
        # After the last group the same one again, which is not stored twice.
        group = tl.minimum(group, limit - 1)
        offsets, exists = _locate(group, length, row_groups, ALIGNED, AT_ONCE, GROUP)
        mask = inside & exists
        # All loads, so that they are on their way together.
        m = _load_state(m_ptrs, group, offsets, exists, FIRST)
        v = _load_state(v_ptrs, group, offsets, exists, SECOND) if TWO else m
        p = _widened(tl.load(p_ptr + offsets, exists))
        g = _widened(tl.load(g_ptr + offsets, exists))
        m = _decode_state(m, first_levels, FIRST)
        v = _decode_state(v, second_levels, SECOND) if TWO else m
        old_m, old_v = m, v
        p, m, v = _update(p, g, m, v, s, RULE)
        word = group_noise(seed_a, seed_b, noise_group + group)
        if STOCHASTIC:
            p = round_stochastically(p, element_noise(word, 0, AT_ONCE, GROUP))
        else:
            p = round_output(p, P_DTYPE)
        tl.store(p_ptr + offsets, p, mask)
        m = _encode_state(m, old_m, exists, first_levels, word, 1, FIRST)
        _store_state(m, m_ptrs, group, offsets, mask, inside, FIRST)
        if TWO:
            v = _encode_state(v, old_v, exists, second_levels, word, 2, SECOND)
            _store_state(v, v_ptrs, group, offsets, mask, inside, SECOND)


# Columns of the table: pointers of parameter, gradient and (codes, scale, exponent) twice; number
# of groups, first program, length and groups of a row, first group in the whole parameter, seed;
# then the scalars, two fp32 each.
_GRADIENT, _FIRST_GROUP, _SEED, _SCALARS = 1, 12, 13, 14
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
# A program is one warp, which works on this many groups of 128 elements, or more shorter ones.
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
    """Number of groups a program works on at a time; the fastest on an H200.

    More leave less to compute per group, and take more registers: with 8 groups and levels of a
    codebook they are spilled, which takes twice as long.
    """
    if formats[0].even:
        return 8
    if len(formats) == 1 or not all(fmt.expanded for fmt in formats):
        return 2
    return 8 if rounded else 4


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
        signed = [seed - (1 << 64) if seed >> 63 else seed for seed in seeds]
        words = torch.tensor(signed, dtype=torch.int64, device="cpu")
        columns[_SEED] = packed_seed_words(words)
        columns[_FIRST_GROUP] = torch.tensor(first_groups, dtype=torch.int64, device="cpu")
    table = torch.empty_like(fixed, pin_memory=device.type == "cuda").copy_(fixed)
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
    per_program: int | None = None,
    at_once: int | None = None,
) -> None:
    """Launch the kernel on all tensors, those with rows of whole groups apart from the others.

    Arguments are those of ``optimizer_step``, which has checked them. A program works on
    ``per_program`` groups, ``at_once`` at a time: a power of two up to 32, so many that they have
    at least 128 elements. By default both are the fastest.
    """
    kind = prepared[0].kind
    rounded = stochastic and kind.dtype == torch.bfloat16
    at_once = at_once or _groups_at_once(kind.formats, rounded)
    per_program = per_program or GROUPS_PER_PROGRAM * GROUP_SIZE // kind.formats[0].group_size
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
            level_pairs(fmt, kind.device) if fmt.has_codebook else table for fmt in (first, second)
        ]
        with on_device(grads[chosen[0]]):
            optimizer_step_kernel[(len(programs),)](
                *(table, table.view(torch.float32), programs, *books),
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
