"""One optimizer step on quantized states: decode -> update -> encode, one pass over memory."""

from lq_lightning.kernels.optimizer_step.op import FLOAT_DTYPES, PreparedTensor, prepare

from .formats import (
    FORMATS,
    GROUP_SIZE,
    NUM_SCALARS,
    RULES,
    StateFormat,
    groups_per_row,
    row_length,
    state_format,
)
from .op import optimizer_step

__all__ = [
    "FLOAT_DTYPES",
    "FORMATS",
    "GROUP_SIZE",
    "NUM_SCALARS",
    "RULES",
    "PreparedTensor",
    "StateFormat",
    "groups_per_row",
    "optimizer_step",
    "prepare",
    "row_length",
    "state_format",
]
