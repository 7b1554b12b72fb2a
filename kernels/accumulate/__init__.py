"""Accumulate: unpack -> add -> scale -> pack, for gradient sums kept in 8-bit codes."""

from lq_lightning.kernels.accumulate.reference import BufferLayout, buffer_layout

from .op import accumulate_, read_accumulated_

__all__ = ["BufferLayout", "accumulate_", "buffer_layout", "read_accumulated_"]
