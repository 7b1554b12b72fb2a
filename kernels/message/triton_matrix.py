"""Messages of matrices as Triton device functions; see ``matrix.py``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def encoded_columns(
    message_ptr,
    message_stride,
    row,
    rows,
    numel,
    FLAT: tl.constexpr,
    MULTIPLE: tl.constexpr = 16,
):
    """Where row ``row`` (int64) of a ``[rows, numel]`` matrix lies in its message.

    ``FLAT`` is ``matrix.is_flat``. For ``encode_tile`` and ``decode_tile``, which take columns of
    an encoded row. ``MULTIPLE`` is the group size, of which flat rows have a multiple.

    Returns:
        The address of the encoded row, its column where the row of the matrix begins, and how many
        values the encoded row has; int64.
    """
    row_ptr = message_ptr
    first = tl.cast(0, tl.int64)
    length = tl.cast(numel, tl.int64)
    if FLAT:
        # for the compiler, which takes larger words where it knows that they are aligned
        first = tl.multiple_of(row * numel, MULTIPLE)
        length = length * rows
    else:
        row_ptr += row * message_stride
    return row_ptr, first, length
