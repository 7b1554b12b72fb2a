"""Work of a program of the norm kernels.

The speed depends on it, the bits of ``dweight`` and ``dbias`` (their order of summation) too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lq_lightning.kernels.message import MessageFormat
from lq_lightning.kernels.message.matrix import is_flat

MAX_NUMEL = 32768
# Short rows share a tile of so many values.
_SHARED_BLOCK = 1024
_MIN_BLOCK = 256
# Padding behind the codes of narrow planes, in values, that the last tile of a message writes.
_MAX_PADDING = 112


class Schedule(NamedTuple):
    """Distribution of the tiles of a launch over the GPU.

    Attributes:
        run: consecutive elements that one thread owns, a power of two from 8.
        warps: threads of a program, in units of 32.
        programs: number in a launch; each takes tiles in turns. Also the number of partial sums of
            ``dweight``.
        stages: loads of so many tiles are on their way at once in a program; backward knows 1 or 2.
        registers: most per thread, 0 for the compiler's choice. 65536 divided by this and by
            ``32 * warps`` is the number of programs that an SM of an H200 runs at once.
    """

    run: int
    warps: int
    programs: int
    stages: int
    registers: int = 0


# By operator and block, as `benchmarks/tune_norm.py` in commit ac819df chose them on an H200.
SCHEDULES: dict[str, dict[int, Schedule]] = {
    "backward": {
        1024: Schedule(16, 2, 1056, 2, 128),
        2048: Schedule(16, 4, 528, 2, 128),
        4096: Schedule(16, 8, 264, 2, 128),
        8192: Schedule(16, 16, 132, 2, 128),
        16384: Schedule(32, 16, 132, 1, 128),
        32768: Schedule(32, 32, 132, 1, 64),
    },
    "forward": {
        1024: Schedule(32, 1, 2112, 3, 128),
        2048: Schedule(32, 2, 1056, 3, 128),
        4096: Schedule(32, 4, 2112, 1, 128),
        8192: Schedule(32, 8, 264, 3, 128),
        16384: Schedule(32, 16, 132, 3, 128),
        32768: Schedule(32, 32, 132, 1, 64),
    },
    "rebuild": {
        1024: Schedule(32, 1, 4224, 1, 0),
        2048: Schedule(32, 2, 4224, 1, 0),
    },
}


class Geometry(NamedTuple):
    """Division of rows into tiles.

    Attributes:
        block: elements of a tile, a power of two, a multiple of the group size.
        rows: rows of a matrix in a tile. If more than one, they fill it: ``block = rows * N``.
        full: Whether all elements of all tiles are those of a row.
        flat: Whether the matrix is one encoded row.
    """

    block: int
    rows: int
    full: bool
    flat: bool


def _power_of_two(numel: int) -> int:
    return 1 << (numel - 1).bit_length()


def whole_rows(fmt: MessageFormat, rows: int, numel: int, *strided: Tensor) -> Geometry:
    """Return tiles that hold whole rows of a ``[rows, numel]`` matrix.

    Rows of ``strided`` matrices may lie apart, and then do not share tiles.

    Raises:
        NotImplementedError: more than ``MAX_NUMEL`` columns.
    """
    if numel > MAX_NUMEL:
        raise NotImplementedError(
            f"rows of {numel} values; norms on a GPU take at most {MAX_NUMEL}. Leave this module "
            "out of the policy."
        )
    flat = is_flat(fmt, numel)
    dense = all(x.is_contiguous() for x in strided)
    if flat and dense and numel < _SHARED_BLOCK and numel == _power_of_two(numel):
        shared = _SHARED_BLOCK // numel
        return Geometry(_SHARED_BLOCK, shared, rows % shared == 0, flat)
    padding = _MAX_PADDING if len(fmt.planes) > 1 or fmt.bits == 2 else 0
    reach = numel if numel % 128 == 0 else numel + padding
    block = max(_power_of_two(reach), fmt.group_size, _MIN_BLOCK)
    return Geometry(block, 1, block == numel, flat)


def parts_of_rows(fmt: MessageFormat, rows: int, numel: int) -> Geometry:
    """Return tiles of at most 2048 elements that may be parts of rows; see ``whole_rows``."""
    flat = is_flat(fmt, numel)
    if flat and numel < _SHARED_BLOCK and numel == _power_of_two(numel):
        return whole_rows(fmt, rows, numel)
    block = max(min(_power_of_two(numel), 2048 if numel % 2048 == 0 else 1024), _MIN_BLOCK)
    block = max(block, fmt.hadamard_size)
    return Geometry(block, 1, numel % block == 0, flat)


def choose_schedule(kind: str, block: int, device: torch.device) -> Schedule:
    """Return the schedule of a launch: from the table, or that of the nearest block in it."""
    if device.type != "cuda":  # Triton's interpreter takes as long for any, but several programs
        return Schedule(16, 4, 2, 1)
    table = SCHEDULES[kind]
    return table[min(max(block, min(table)), max(table))]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Constants of a kernel: what a program computes, and the tiles that it works on.

    Attributes:
        stages: pipeline stages, from the schedule.
        weight: whether there is a weight.
        bias: whether there is a bias.
        amax: whether the largest magnitude of the output is found, too.
        parameters: whether gradients of the parameters are wanted.
    """

    block: int
    rows: int
    full: bool
    flat: bool
    run: int
    stages: int
    format: MessageFormat
    kind: str
    weight: bool
    bias: bool
    amax: bool
    parameters: bool


def constants(
    tile: Geometry,
    schedule: Schedule,
    fmt: MessageFormat,
    kind: str,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    amax: bool = False,
    parameters: bool = False,
) -> dict[str, object]:
    """Return the constants of a kernel and the options of the compiler."""
    run, stages, used = schedule.run, schedule.stages, (weight is not None, bias is not None)
    limit = {"maxnreg": schedule.registers} if schedule.registers else {}
    return limit | {
        "R": Recipe(*tile, run, stages, fmt, kind, *used, amax, parameters),
        "num_warps": schedule.warps,
        "enable_fp_fusion": False,
    }
