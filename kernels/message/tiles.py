"""Tiles of the Triton kernels by operator and size, as ``benchmarks/tune_kernels.py`` chose them.

A tile is ``(block, run, warps, tiles)``, see ``launch.Tile``. Measured on an NVIDIA H200.
"""

from __future__ import annotations

# Values of all rows together from which on the second and the third tile of an operator are used.
SIZES = (1 << 21, 1 << 26)

# The number in a name is that of the bits of a value that is read or written.
TILES: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "activation backward": ((1024, 16, 2, 1), (1024, 32, 1, 1), (1024, 32, 1, 1)),
    "activation backward hadamard": ((1024, 16, 2, 1), (1024, 32, 1, 1), (1024, 32, 1, 1)),
    "activation dequantize": ((1024, 16, 2, 1), (1024, 32, 1, 1), (1024, 32, 1, 1)),
    "activation dequantize hadamard": ((1024, 16, 2, 1), (1024, 32, 1, 1), (1024, 32, 1, 1)),
    "activation quantize": ((1024, 16, 2, 1), (1024, 32, 1, 1), (1024, 32, 1, 1)),
    "activation quantize hadamard": ((1024, 16, 2, 1), (1024, 32, 1, 1), (1024, 32, 1, 1)),
    "dequantize 16": ((1024, 16, 2, 1), (2048, 32, 1, 1), (1024, 16, 1, 1)),
    "dequantize 16 add": ((1024, 8, 4, 1), (1024, 8, 4, 1), (1024, 8, 4, 1)),
    "dequantize 16 hadamard": ((1024, 16, 2, 1), (2048, 32, 1, 1), (2048, 32, 1, 1)),
    "dequantize 32": ((1024, 8, 4, 1), (1024, 16, 2, 1), (1024, 8, 4, 1)),
    "dequantize 32 add": ((1024, 8, 4, 1), (1024, 8, 4, 1), (1024, 8, 4, 1)),
    "dequantize 32 hadamard": ((512, 16, 1, 1), (2048, 32, 2, 1), (1024, 8, 4, 1)),
    "difference 16": ((2048, 16, 4, 1), (2048, 16, 4, 1), (2048, 16, 4, 1)),
    "difference 16 hadamard": ((1024, 16, 2, 1), (1024, 16, 2, 1), (2048, 32, 2, 1)),
    "difference 32": ((2048, 16, 4, 1), (2048, 8, 8, 1), (2048, 8, 8, 1)),
    "difference 32 hadamard": ((256, 8, 1, 1), (1024, 16, 2, 1), (1024, 8, 4, 2)),
    "quantize 16": ((2048, 16, 4, 1), (2048, 16, 2, 1), (2048, 32, 1, 1)),
    "quantize 16 hadamard": ((2048, 16, 4, 1), (2048, 32, 2, 2), (1024, 32, 1, 4)),
    "quantize 32": ((2048, 16, 4, 1), (2048, 16, 4, 1), (2048, 16, 2, 1)),
    "quantize 32 hadamard": ((1024, 8, 4, 1), (1024, 16, 2, 1), (1024, 16, 2, 1)),
    "reduce 16": ((256, 8, 1, 1), (1024, 32, 1, 2), (2048, 32, 1, 1)),
    "reduce 32": ((512, 16, 1, 1), (1024, 32, 1, 1), (1024, 32, 1, 1)),
    "requantize": ((256, 8, 1, 1), (1024, 32, 1, 2), (2048, 32, 2, 4)),
    "requantize many": ((256, 8, 1, 1), (2048, 32, 1, 2), (2048, 32, 1, 1)),
}
