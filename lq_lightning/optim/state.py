"""The tensors that stand for one optimizer state of one parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lq_lightning._compat.tensors import like_rows, local_tensor, shard_rows
from lq_lightning.kernels.optimizer_step import StateFormat, groups_per_row, row_length
from lq_lightning.kernels.optimizer_step.formats import MOST_MANTISSA_BITS
from lq_lightning.kernels.optimizer_step.reference import State, decode_state, encode_state

CODES, SCALE, EXPONENT = "_codes", "_scale", "_exponent"
STEP = "step"


def zero_state(param: Tensor, name: str, fmt: StateFormat) -> dict[str, Tensor]:
    """Allocate a state of zeros.

    Args:
        param: ``[D, ...]``, a DTensor or not.
        name: of the state, such as ``exp_avg``.
        fmt: its format.

    Returns:
        ``{name}_codes`` uint8 with the shape of the parameter, ``{name}_scale`` bf16 and, for
        ``expanded_fp8``, ``{name}_exponent`` uint8 with shape ``[D, groups of a row]``; for
        ``float32`` just ``{name}``. All are placed like the parameter.
    """
    local = local_tensor(param)
    if not fmt.quantized:
        values = torch.zeros(local.shape, dtype=torch.float32, device=local.device)
        return {name: _placed(values, param)}
    shape = (local.shape[0], groups_per_row(row_length(param.shape)))
    codes = torch.zeros(local.shape, dtype=torch.uint8, device=local.device)
    scale = torch.zeros(shape, dtype=torch.bfloat16, device=local.device)
    entry = {name + CODES: codes, name + SCALE: scale}
    if fmt.expanded:
        entry[name + EXPONENT] = torch.full(
            shape, MOST_MANTISSA_BITS, dtype=torch.uint8, device=local.device
        )
    return {key: _placed(value, param) for key, value in entry.items()}


def _placed(local: Tensor, param: Tensor) -> Tensor:
    return local if param.dim() == 0 else like_rows(local, param)


def part_names(name: str, fmt: StateFormat) -> list[str]:
    """Keys of an entry for the codes, scale and exponent of a state, as far as it has them."""
    if not fmt.quantized:
        return [name]
    parts = (CODES, SCALE, EXPONENT) if fmt.expanded else (CODES, SCALE)
    return [name + part for part in parts]


def local_state(entry: Mapping[str, Any], name: str, fmt: StateFormat) -> State:
    """This rank's tensors of a state, as the kernels take them."""
    if not fmt.quantized:
        return State(local_tensor(entry[name]), None, None)
    exponent = local_tensor(entry[name + EXPONENT]) if fmt.expanded else None
    return State(local_tensor(entry[name + CODES]), local_tensor(entry[name + SCALE]), exponent)


def is_quantized(entry: Mapping[str, Any], name: str) -> bool:
    """Whether a parameter's entry holds codes of a state."""
    return name + CODES in entry


def decoded(entry: Mapping[str, Any], name: str, param: Tensor, fmt: StateFormat) -> Tensor:
    """The values of a state in fp32, placed like the parameter."""
    return _placed(decode_state(local_state(entry, name, fmt), fmt), param)


def encoded(values: Tensor, name: str, param: Tensor, fmt: StateFormat) -> dict[str, Tensor]:
    """The state that holds ``values``, which are placed like the parameter, or whole."""
    entry = zero_state(param, name, fmt)
    placed = adopted(values, param, torch.float32, param.shape)
    encode_state(local_tensor(placed).contiguous(), local_state(entry, name, fmt), fmt)
    return entry


def part_shape(param: Tensor, part: str) -> torch.Size:
    """Return the shape of ``CODES``, ``SCALE`` or ``EXPONENT`` of a whole state."""
    if part == CODES:
        return param.shape
    return torch.Size((param.shape[0], groups_per_row(row_length(param.shape))))


def adopted(value: Tensor, param: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Bring a tensor of a checkpoint to the parameter's device and sharding.

    Args:
        value: placed like the parameter, or whole.
        param: ``[D, ...]``.
        dtype: that it must have already, unless both are floating-point.
        shape: that it must have, before sharding.

    Raises:
        ValueError: another shape; or another dtype, unless both are floating-point.
    """
    if value.shape != shape:
        raise ValueError(
            f"a saved optimizer state of shape {tuple(value.shape)} does not fit a parameter of "
            f"shape {tuple(param.shape)}. Load it into the model that it was saved from."
        )
    both_floating = value.dtype.is_floating_point and dtype.is_floating_point
    if value.dtype != dtype and not both_floating:
        raise ValueError(
            f"a saved optimizer state is {value.dtype}, expected {dtype}: it was cast on the way. "
            "Load it with the `load_state_dict` of the quantized optimizer."
        )
    value = value.to(dtype=dtype)
    if not isinstance(value, DTensor) and param.dim() > 0:
        value = shard_rows(value, param)
    return value.to(device=local_tensor(param).device)
