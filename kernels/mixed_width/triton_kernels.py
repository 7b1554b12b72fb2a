"""Triton kernels that pack and unpack messages of mixed widths, bit-identical to ``reference.py``.

A program works on ``LINES`` neighbouring lines and several times ``WORDS`` words of 8 tokens. Every
thread has all 8 tokens of a word, so values are read along lines and words written along tokens
with nothing but words moving between threads. What differs between lines is data: widths, places
and shifts, ``[LINES, 1]``. Tables and numbers of tokens compile nothing anew, since there is no
constant of either. Pointers are those of ``triton_rounding.py``; compile in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lq_lightning.kernels.message.launch import INT_TO_FLOAT, on_device
from lq_lightning.kernels.message.triton_blocks import round_output, select_bytes
from lq_lightning.kernels.message.triton_codes import add_plane, pairs_of_word, plane_of_pairs
from lq_lightning.kernels.message.triton_rounding import scales_of_bits
from lq_lightning.kernels.mixed_width.format import (
    SCALES,
    TOKENS_PER_WORD,
    MixedLayout,
    mixed_layout,
)
from lq_lightning.kernels.mixed_width.triton_rounding import (
    PLACE_ROW,
    WIDTH_ROW,
    bf16_bits,
    clipped_code_bits,
    largest_code,
    line_row,
    mixed_moment_kernel,
    mixed_range_kernel,
    mixed_round_trip_kernel,
    mixed_scale_kernel,
    section,
    value_of_code,
)

# Rows of `format.width_rows` for the planes.
_BF16_ROW, _BYTE_ROW, _FOUR_ROW, _TWO_ROW, _ONE_ROW = map(tl.constexpr, range(3, 8))


@triton.jit
def _wide_place(rows_ptr, ROW: tl.constexpr, line, lines, word, words):
    """Places of words ``[LINES, WORDS]`` in a plane of whole bytes, for the few lines with one."""
    return line_row(rows_ptr, ROW, line, lines).to(tl.int64) * words + word


@triton.jit
def _load_token(x_ptr, word, INDEX: tl.constexpr, tokens, inside, stride_token):
    """Token ``INDEX`` of words ``[LINES, WORDS]``; beyond the last token again that."""
    token = tl.minimum(word * 8 + INDEX, tokens - 1).to(tl.int64)
    return tl.load(x_ptr + token * stride_token, inside, 0.0).to(tl.float32)


@triton.jit
def _load_pair(source, INDEX: tl.constexpr, factors, SCALES: tl.constexpr, FITTED: tl.constexpr):
    """Codes of tokens ``INDEX`` and ``INDEX + 4`` in the halves of int32.

    ``source`` are arguments of ``_load_token``.
    """
    x_ptr, word, tokens, inside, stride_token = source
    low = _load_token(x_ptr, word, INDEX, tokens, inside, stride_token)
    high = _load_token(x_ptr, word, INDEX + 4, tokens, inside, stride_token)
    low = clipped_code_bits(low, factors, SCALES, FITTED)
    high = clipped_code_bits(high, factors, SCALES, FITTED)
    return select_bytes(low, high, 0x5410)


@triton.jit
def _kept(count, WIDTH: tl.constexpr):
    """Bits of ``count`` codes of ``WIDTH`` bits, of at most 8: ones in int32."""
    return tl.where(count >= 32 // WIDTH, -1, (1 << (tl.minimum(count, 31) * WIDTH)) - 1)


@triton.jit
def _store_bytes(message_ptr, offset, pairs, valid, keep, at, stored):
    """Write codes of 8 bits, two words of int32 each."""
    a, b, c, d = pairs
    low = select_bytes(a, b, 0x6240)  # codes 0, 1, 4, 5
    high = select_bytes(c, d, 0x6240)  # codes 2, 3, 6, 7
    target = section(message_ptr, offset, tl.int32) + at * 2
    first = select_bytes(low, high, 0x5410) & keep
    tl.store(target, first & _kept(tl.minimum(valid, 4), 8), stored)
    second = select_bytes(low, high, 0x7632) & keep
    tl.store(target + 1, second & _kept(tl.maximum(valid - 4, 0), 8), stored)


@triton.jit
def _store_raw(x_ptr, word, tokens, stride_token, message_ptr, offset, at, stored):
    """Write values as bf16, two tokens a word."""
    target = section(message_ptr, offset, tl.int32) + at * 4
    for index in tl.static_range(4):
        token = word * 8 + 2 * index
        low = bf16_bits(_load_token(x_ptr, word, 2 * index, tokens, stored, stride_token))
        high = bf16_bits(_load_token(x_ptr, word, 2 * index + 1, tokens, stored, stride_token))
        low = tl.where(token < tokens, low, 0)
        high = tl.where(token + 1 < tokens, high, 0)
        tl.store(target + index, low | (high << 16), stored)


@triton.jit(do_not_specialize=["tokens", "words", "steps"])
def mixed_quantize_kernel(
    x_ptr,
    rows_ptr,
    factors_ptr,
    message_ptr,
    tokens,
    words,
    lines,
    stride_token,
    stride_line,
    steps,
    sections,
    LINES: tl.constexpr,
    WORDS: tl.constexpr,
    SCALES: tl.constexpr,
    FITTED: tl.constexpr,
):
    """Scale -> round -> cut into planes; scales and the ends of sections are written already."""
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = (line < lines)[:, None]
    width = line_row(rows_ptr, WIDTH_ROW, line, lines)
    any_raw = tl.max(tl.max(width, axis=1), axis=0) == 16
    any_bytes = tl.max(tl.max(width & 8, axis=1), axis=0) == 8
    fours_at = line_row(rows_ptr, _FOUR_ROW, line, lines) * words
    twos_at = line_row(rows_ptr, _TWO_ROW, line, lines) * words
    ones_at = line_row(rows_ptr, _ONE_ROW, line, lines) * words
    scale = line_row(factors_ptr, 0, line, lines)
    keep = tl.where(scale == scale, -1, 0)
    minimum = line_row(factors_ptr, 1, line, lines)
    norm = line_row(factors_ptr, 2, line, lines)
    inverse = line_row(factors_ptr, 3, line, lines)
    factors = (minimum, norm, inverse, largest_code(width))
    x_ptr += line[:, None].to(tl.int64) * stride_line
    for step in range(steps):
        word = ((tl.program_id(1) * steps + step) * WORDS + tl.arange(0, WORDS))[None, :]
        source = (x_ptr, word, tokens, inside, stride_token)
        a = _load_pair(source, 0, factors, SCALES, FITTED)
        b = _load_pair(source, 1, factors, SCALES, FITTED)
        c = _load_pair(source, 2, factors, SCALES, FITTED)
        d = _load_pair(source, 3, factors, SCALES, FITTED)
        valid = tl.maximum(tl.minimum(tokens - word * 8, 8), 0)
        there = inside & (word < words)
        plane = plane_of_pairs(a, b, c, d, 0, 4) & keep & _kept(valid, 4)
        target = section(message_ptr, sections[2], tl.int32)
        tl.store(target + (fours_at + word), plane, there & (width & 4 != 0))
        shift = width & 4
        plane = plane_of_pairs(a >> shift, b >> shift, c >> shift, d >> shift, 0, 2)
        plane = plane.to(tl.int32) & keep & _kept(valid, 2)
        target = section(message_ptr, sections[3], tl.int16)
        tl.store(target + (twos_at + word), plane.to(tl.int16), there & (width & 2 != 0))
        shift = width & 6
        plane = plane_of_pairs(a >> shift, b >> shift, c >> shift, d >> shift, 0, 1)
        plane = plane.to(tl.int32) & keep & _kept(valid, 1)
        target = section(message_ptr, sections[4], tl.int8)
        tl.store(target + (ones_at + word), plane.to(tl.int8), there & (width & 1 != 0))
        if any_bytes:
            stored = there & (width == 8)
            at = _wide_place(rows_ptr, _BYTE_ROW, line, lines, word, words)
            _store_bytes(message_ptr, sections[1], (a, b, c, d), valid, keep, at, stored)
        if any_raw:
            stored = there & (width == 16)
            at = _wide_place(rows_ptr, _BF16_ROW, line, lines, word, words)
            _store_raw(x_ptr, word, tokens, stride_token, message_ptr, sections[0], at, stored)


@triton.jit
def _load_scale(message_ptr, offset, place, coded, SCALES: tl.constexpr):
    """Scales or minima ``[LINES, 1]`` as fp32; 0 in lines without."""
    bits = tl.load(section(message_ptr, offset, tl.int16) + place, coded, 0)
    return scales_of_bits(bits, SCALES)


@triton.jit
def _load_bytes(message_ptr, offset, at, stored):
    """Codes of 8 bits as pairs; undoes ``_store_bytes``."""
    source = section(message_ptr, offset, tl.int32) + at * 2
    first = tl.load(source, stored, 0)
    second = tl.load(source + 1, stored, 0)
    return (
        select_bytes(first, second, 0x0400) & 0xFF00FF,
        select_bytes(first, second, 0x0501) & 0xFF00FF,
        select_bytes(first, second, 0x0602) & 0xFF00FF,
        select_bytes(first, second, 0x0703) & 0xFF00FF,
    )


@triton.jit
def _store_token(out_ptr, value, word, INDEX: tl.constexpr, tokens, lines, inside, raw):
    """Write token ``INDEX`` of words; ``raw`` says where those of lines that are bf16 lie."""
    any_raw, message_ptr, offset, rows_ptr, line, words, stored = raw
    if any_raw:
        at = _wide_place(rows_ptr, _BF16_ROW, line, lines, word, words) * 8 + INDEX
        bits = tl.load(section(message_ptr, offset, tl.int16) + at, stored, 0).to(tl.int32) << 16
        value = tl.where(stored, bits.to(tl.float32, bitcast=True), value)
    token = word * 8 + INDEX
    result = round_output(value, out_ptr.dtype.element_ty)
    tl.store(out_ptr + token.to(tl.int64) * lines, result, inside & (token < tokens))


@triton.jit
def _store_pair(
    out_ptr, pairs, word, INDEX: tl.constexpr, tokens, lines, inside, raw, int_to_float, factors
):
    """Write tokens ``INDEX`` and ``INDEX + 4`` of words."""
    scale, minimum = factors
    low = value_of_code(pairs, False, int_to_float, scale, minimum)
    _store_token(out_ptr, low, word, INDEX, tokens, lines, inside, raw)
    high = value_of_code(pairs, True, int_to_float, scale, minimum)
    _store_token(out_ptr, high, word, INDEX + 4, tokens, lines, inside, raw)


@triton.jit(do_not_specialize=["tokens", "words", "steps", "int_to_float"])
def mixed_dequantize_kernel(
    message_ptr,
    rows_ptr,
    out_ptr,
    tokens,
    words,
    lines,
    steps,
    int_to_float,
    sections,
    LINES: tl.constexpr,
    WORDS: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Put planes together -> scale."""
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = (line < lines)[:, None]
    width = line_row(rows_ptr, WIDTH_ROW, line, lines)
    any_raw = tl.max(tl.max(width, axis=1), axis=0) == 16
    any_bytes = tl.max(tl.max(width & 8, axis=1), axis=0) == 8
    fours_at = line_row(rows_ptr, _FOUR_ROW, line, lines) * words
    twos_at = line_row(rows_ptr, _TWO_ROW, line, lines) * words
    ones_at = line_row(rows_ptr, _ONE_ROW, line, lines) * words
    place = line_row(rows_ptr, PLACE_ROW, line, lines)
    coded = inside & (width <= 8)
    scale = _load_scale(message_ptr, sections[5], place, coded, SCALES)
    minimum = _load_scale(message_ptr, sections[6], place, coded, SCALES)
    factors = (scale, minimum)
    out_ptr += line[:, None]
    for step in range(steps):
        word = ((tl.program_id(1) * steps + step) * WORDS + tl.arange(0, WORDS))[None, :]
        there = inside & (word < words)
        source = section(message_ptr, sections[2], tl.int32) + (fours_at + word)
        pairs = pairs_of_word(tl.load(source, there & (width & 4 != 0), 0), 4)
        source = section(message_ptr, sections[3], tl.int16) + (twos_at + word)
        pairs = add_plane(pairs, tl.load(source, there & (width & 2 != 0), 0), 2, width & 4)
        source = section(message_ptr, sections[4], tl.int8) + (ones_at + word)
        pairs = add_plane(pairs, tl.load(source, there & (width & 1 != 0), 0), 1, width & 6)
        a, b, c, d = pairs
        if any_bytes:
            at = _wide_place(rows_ptr, _BYTE_ROW, line, lines, word, words)
            e, f, g, h = _load_bytes(message_ptr, sections[1], at, there & (width == 8))
            a, b, c, d = a | e, b | f, c | g, d | h
        raw = (any_raw, message_ptr, sections[0], rows_ptr, line, words, there & (width == 16))
        _store_pair(out_ptr, a, word, 0, tokens, lines, inside, raw, int_to_float, factors)
        _store_pair(out_ptr, b, word, 1, tokens, lines, inside, raw, int_to_float, factors)
        _store_pair(out_ptr, c, word, 2, tokens, lines, inside, raw, int_to_float, factors)
        _store_pair(out_ptr, d, word, 3, tokens, lines, inside, raw, int_to_float, factors)


# Parts of a line whose extremes are found apart, at most.
_MAX_PARTS = 32
# Tiles whose squares a thread adds up in 32 bits.
_EXACT_STEPS = 4096
# Programs from which on a GPU is busy; fewer take shorter parts of a line.
_ENOUGH_PROGRAMS = 1024


class Tile(NamedTuple):
    """Work of one program; it changes the speed, not the bits.

    Attributes:
        lines: neighbouring lines, a power of two.
        tokens: at once, a power of two from 8.
        warps: threads of a program, in units of 32.
    """

    lines: int
    tokens: int
    warps: int


RANGE_TILE = Tile(64, 64, 4)
MOMENT_TILE = Tile(64, 64, 4)
QUANTIZE_TILE = Tile(64, 128, 4)
DEQUANTIZE_TILE = Tile(64, 128, 4)
ROUND_TRIP_TILE = Tile(64, 64, 4)


def _grid(tile: Tile, tokens: int, lines: int, most: int) -> tuple[tuple[int, int], int]:
    """Return the grid of a launch, of at most ``most`` parts, and the tiles of each part."""
    across, tiles = triton.cdiv(lines, tile.lines), triton.cdiv(tokens, tile.tokens)
    parts = min(tiles, max(1, triton.cdiv(_ENOUGH_PROGRAMS, across)), most)
    steps = triton.cdiv(tiles, parts)
    return (across, triton.cdiv(tiles, steps)), steps


def sections(layout: MixedLayout) -> tuple[int, ...]:
    """Return where planes, scales and minima begin."""
    return (*layout.plane_offsets, layout.scale_offset, layout.minimum_offset)


def launch_scaling(
    x: Tensor, rows: Tensor, fitted: bool, out: Tensor, layout: MixedLayout | None
) -> Tensor:
    """Return ``[4, N]`` fp32 factors of lines; with a layout, write all but planes to ``out``."""
    tokens, lines = x.shape
    grid, steps = _grid(RANGE_TILE, tokens, lines, _MAX_PARTS)
    ranges = torch.empty(grid[1], 2, lines, dtype=torch.int32, device=x.device)
    mixed_range_kernel[grid](
        *(x, ranges, tokens, lines, *x.stride(), steps),
        LINES=RANGE_TILE.lines,
        TOKENS=RANGE_TILE.tokens,
        num_warps=RANGE_TILE.warps,
    )
    moments, moment_parts = ranges, 0  # what is not there is not read
    if fitted:
        grid, steps = _grid(MOMENT_TILE, tokens, lines, _MAX_PARTS)
        moment_parts = grid[1]
        moments = torch.empty(moment_parts, 2, lines, dtype=torch.int64, device=x.device)
        mixed_moment_kernel[grid](
            *(x, ranges, moments, tokens, lines, *x.stride(), len(ranges), steps),
            LINES=MOMENT_TILE.lines,
            TOKENS=MOMENT_TILE.tokens,
            PARTS=_MAX_PARTS,
            EXACT_STEPS=_EXACT_STEPS,
            SCALES=SCALES,
            num_warps=MOMENT_TILE.warps,
            enable_fp_fusion=False,
        )
    factors = torch.empty(4, lines, dtype=torch.float32, device=x.device)
    words, used, starts = 0, (0,) * 6, (0,) * 7
    if layout is not None:
        words, starts = layout.padded_tokens // TOKENS_PER_WORD, sections(layout)
        used = (*layout.plane_lines, layout.coded_lines)
    mixed_scale_kernel[(triton.cdiv(lines, 32),)](
        *(ranges, moments, rows, factors, out, tokens, lines, len(ranges), moment_parts),
        *(words, *used, starts),
        LINES=32,
        PARTS=_MAX_PARTS,
        SCALES=SCALES,
        FITTED=fitted,
        STORE=layout is not None,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return factors


def launch_mixed_quantize(
    x: Tensor,
    rows: Tensor,
    counts: Sequence[int],
    fitted: bool,
    out: Tensor,
    rounded: Tensor | None = None,
    tile: Tile = QUANTIZE_TILE,
) -> None:
    """Encode; arguments as for ``reference.quantize``."""
    tokens = x.shape[0]
    if tokens == 0:
        return
    layout = mixed_layout(counts, tokens)
    with on_device(x):
        factors = launch_scaling(x, rows, fitted, out, layout)
        launch_pack(x, rows, factors, layout, fitted, out, tile)
        if rounded is not None:
            _launch_round(x, rows, factors, fitted, rounded)


def launch_pack(
    x: Tensor,
    rows: Tensor,
    factors: Tensor,
    layout: MixedLayout,
    fitted: bool,
    out: Tensor,
    tile: Tile,
) -> None:
    """Write the planes, all that ``launch_scaling`` leaves of a message."""
    tokens, lines = x.shape
    words = layout.padded_tokens // TOKENS_PER_WORD
    grid, steps = _grid(tile, tokens, lines, tokens)
    mixed_quantize_kernel[grid](
        *(x, rows, factors, out, tokens, words, lines, *x.stride(), steps, sections(layout)),
        LINES=tile.lines,
        WORDS=tile.tokens // TOKENS_PER_WORD,
        SCALES=SCALES,
        FITTED=fitted,
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )


def launch_mixed_dequantize(
    message: Tensor, rows: Tensor, counts: Sequence[int], out: Tensor, tile: Tile = DEQUANTIZE_TILE
) -> None:
    """Decode; arguments as for ``reference.dequantize``."""
    tokens, lines = out.shape
    if tokens == 0:
        return
    layout = mixed_layout(counts, tokens)
    words = layout.padded_tokens // TOKENS_PER_WORD
    grid, steps = _grid(tile, tokens, lines, tokens)
    with on_device(message):
        mixed_dequantize_kernel[grid](
            *(message, rows, out, tokens, words, lines, steps, INT_TO_FLOAT, sections(layout)),
            LINES=tile.lines,
            WORDS=tile.tokens // TOKENS_PER_WORD,
            SCALES=SCALES,
            num_warps=tile.warps,
            enable_fp_fusion=False,
        )


def launch_mixed_round_trip(x: Tensor, rows: Tensor, fitted: bool, out: Tensor) -> None:
    """Round values as a message does; arguments as for ``reference.round_trip``."""
    if x.shape[0] == 0:
        return
    with on_device(x):
        factors = launch_scaling(x, rows, fitted, rows, None)
        _launch_round(x, rows, factors, fitted, out)


def _launch_round(x: Tensor, rows: Tensor, factors: Tensor, fitted: bool, out: Tensor) -> None:
    """Write what arrives of values that ``launch_scaling`` has the factors of."""
    tokens, lines = x.shape
    tile = ROUND_TRIP_TILE
    mixed_round_trip_kernel[triton.cdiv(lines, tile.lines), triton.cdiv(tokens, tile.tokens)](
        *(x, rows, factors, out, tokens, lines, *x.stride(), INT_TO_FLOAT),
        LINES=tile.lines,
        TOKENS=tile.tokens,
        SCALES=SCALES,
        FITTED=fitted,
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )
