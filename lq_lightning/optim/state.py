"""Tensors that store one optimizer state of one parameter, and entries of saved states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lq_lightning._compat.tensors import like_rows, local_tensor, shard_rows
from lq_lightning.kernels.optimizer_step import StateFormat, groups_per_row, row_length
from lq_lightning.kernels.optimizer_step.formats import MOST_MANTISSA_BITS
from lq_lightning.kernels.optimizer_step.reference import State, decode_state, encode_state

from .config import STAMP, OptimizerQuantization, check_stamp

CODES, SCALE, EXPONENT = "_codes", "_scale", "_exponent"
_PART_DTYPES = {CODES: torch.uint8, SCALE: torch.bfloat16, EXPONENT: torch.uint8}
STEP = "step"


def zero_state(param: Tensor, name: str, fmt: StateFormat) -> dict[str, Tensor]:
    """Allocate a state of zeros, placed like the parameter ``[D, ...]``.

    ``{name}_codes`` uint8 with the shape of the parameter, ``{name}_scale`` bf16 and, for
    ``expanded_fp8``, ``{name}_exponent`` uint8 with shape ``[D, groups of a row]``; for ``float32``
    just ``{name}``.
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


def is_part(key: str) -> bool:
    """Whether a key of an entry stands for codes, a scale or an exponent."""
    return key.endswith((CODES, SCALE, EXPONENT))


def _local_state(entry: Mapping[str, Any], name: str, fmt: StateFormat) -> State:
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
    return _placed(decode_state(_local_state(entry, name, fmt), fmt), param)


def encoded(values: Tensor, name: str, param: Tensor, fmt: StateFormat) -> dict[str, Tensor]:
    """The state that holds ``values``, which are placed like the parameter, or whole."""
    entry = zero_state(param, name, fmt)
    placed = _adopted(values, param, torch.float32, param.shape)
    encode_state(local_tensor(placed).contiguous(), _local_state(entry, name, fmt), fmt)
    return entry


def _adopted(value: Tensor, param: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Move a tensor of a checkpoint, whole or placed like the parameter, to device and sharding.

    It must have ``shape`` before sharding, and ``dtype`` unless both are floating-point.
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


# --- checkpoints --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DeferredState:
    """Hides a parameter's entry from the casts of ``Optimizer.load_state_dict``."""

    entry: Mapping[str, Any]


def defer_entries(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Hide all entries of a state dict: a hook of ``load_state_dict``."""
    deferred = {key: DeferredState(entry) for key, entry in state_dict["state"].items()}
    return {**state_dict, "state": deferred}


def check_saved(
    groups: Sequence[Mapping[str, Any]],
    entries: Mapping[Any, DeferredState],
    config: OptimizerQuantization,
) -> None:
    """Raise ``ValueError`` for saved codes of another version or format, or an unnamed one."""
    for group in groups:
        if STAMP in group:
            check_stamp(group[STAMP], config)
            continue
        saved = [entries[param].entry for param in group["params"] if param in entries]
        if any(is_part(key) for entry in saved for key in entry):
            raise ValueError(
                "the saved optimizer state has codes, but its parameter groups do not say "
                f"of which format (no {STAMP!r}). Save it with `state_dict()`."
            )


def read_entry(
    param: Tensor,
    entry: Mapping[str, Any],
    formats: Mapping[str, StateFormat],
    *,
    quantized: bool,
    has_step: bool,
    step_device: torch.device,
    optimizer: str,
) -> dict[str, Any]:
    """Turn an entry of a checkpoint, or of torch's optimizer, into one of a quantized optimizer.

    Args:
        param: Parameter of the entry; states are placed like it.
        entry: Entry that was saved, or made by torch.
        formats: Formats of the states, by name.
        quantized: Whether the states of the parameter are codes.
        has_step: Whether torch's optimizer counts steps.
        step_device: Device of the step counter.
        optimizer: Class of the optimizer, for messages.

    Raises:
        ValueError: Something is missing, unknown, or has another shape or dtype.
    """
    result: dict[str, Any] = {}
    known = {STEP}
    if STEP in entry:
        step = torch.as_tensor(entry[STEP], dtype=torch.float32).clone()
        result[STEP] = step.to(step_device)
    for name, fmt in formats.items():
        known |= {name, *(name + part for part in _PART_DTYPES)}
        result.update(_read_state(param, entry, name, fmt, quantized))
    missing = _missing_keys(entry, formats, has_step)
    if missing:
        raise ValueError(
            f"the optimizer state of a parameter of shape {tuple(param.shape)} lacks "
            f"{', '.join(missing)}. Load a whole `state_dict()`."
        )
    unknown = [key for key, value in entry.items() if key not in known and value is not None]
    if unknown:
        raise ValueError(
            f"the optimizer state has {', '.join(map(repr, unknown))}, which "
            f"{optimizer} does not know; allowed: {', '.join(sorted(known))}."
        )
    return result


def _read_state(
    param: Tensor, entry: Mapping[str, Any], name: str, fmt: StateFormat, quantized: bool
) -> dict[str, Tensor]:
    if is_quantized(entry, name):
        codes = {}
        for part, dtype in _PART_DTYPES.items():
            if name + part in entry:
                shape = param.shape
                if part != CODES:
                    shape = torch.Size((shape[0], groups_per_row(row_length(shape))))
                codes[name + part] = _adopted(entry[name + part], param, dtype, shape)
        return codes if quantized else {name: decoded(codes, name, param, fmt)}
    if entry.get(name) is None:
        return {}
    if quantized:
        return encoded(entry[name], name, param, fmt)
    return {name: _adopted(entry[name], param, torch.float32, param.shape)}


def _missing_keys(
    entry: Mapping[str, Any], formats: Mapping[str, StateFormat], has_step: bool
) -> list[str]:
    """Keys without which the others of an entry are of no use."""
    coded = [name for name in formats if is_quantized(entry, name)]
    present = {*coded} | {name for name in formats if entry.get(name) is not None}
    if not present:
        return []
    missing = [name for name in formats if name not in present]
    if has_step and STEP not in entry:
        missing.append(STEP)
    for name in coded:
        parts = (SCALE, EXPONENT) if formats[name].expanded else (SCALE,)
        missing += [name + part for part in parts if name + part not in entry]
    return missing
