"""Tensors that store one optimizer state of one parameter, and entries of saved states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lq_lightning._compat.tensors import (
    Layout,
    layout,
    local_tensor,
    placed,
    row_pieces,
    rows_layout,
    shard,
    stacked_layout,
    whole_tensor,
)
from lq_lightning.kernels.optimizer_step.formats import (
    MOST_MANTISSA_BITS,
    StateFormat,
    groups_per_row,
    row_length,
)
from lq_lightning.kernels.optimizer_step.reference import State, decode_state, encode_state

from .config import STAMP, check_stamp

CODES, SCALE, EXPONENT = "_codes", "_scale", "_exponent"
_PART_DTYPES = {CODES: torch.uint8, SCALE: torch.bfloat16, EXPONENT: torch.uint8}
STEP = "step"


def zero_state(param: Tensor, name: str, fmt: StateFormat) -> dict[str, Tensor]:
    """Allocate a state of zeros, placed like the parameter ``[D, ...]``.

    ``{name}_codes`` uint8 with the shape of the parameter, ``{name}_scale`` bf16 and, for
    ``expanded_fp8``, ``{name}_exponent`` uint8 in the layout of :func:`constants_layout`; for
    ``float32`` just ``{name}``.
    """
    local = local_tensor(param)
    if not fmt.quantized:
        values = torch.zeros(local.shape, dtype=torch.float32, device=local.device)
        return {name: _placed(values, param)}
    shape = (local.shape[0], groups_per_row(row_pieces(param).length, fmt.group_size))
    codes = torch.zeros(local.shape, dtype=torch.uint8, device=local.device)
    constants = {name + SCALE: torch.zeros(shape, dtype=torch.bfloat16, device=local.device)}
    if fmt.expanded:
        constants[name + EXPONENT] = torch.full(
            shape, MOST_MANTISSA_BITS, dtype=torch.uint8, device=local.device
        )
    wanted = constants_layout(param, fmt)
    entry = {key: placed(value, param, wanted) for key, value in constants.items()}
    return {name + CODES: _placed(codes, param), **entry}


def constants_layout(param: Tensor, fmt: StateFormat) -> Layout:
    """Layout of scales and exponents of a parameter ``[D, ...]`` whose rows may be cut in T pieces.

    Groups never cross ranks. Where the pieces are whole groups it is ``[D, groups of a row]``,
    placed like the parameter: the codes mean the same for any T. Otherwise it is
    ``[T * D, groups of a piece]``, all first pieces before all second ones, which no other T has.
    """
    pieces = row_pieces(param)
    arrange = stacked_layout if pieces.length % fmt.group_size else rows_layout
    return arrange(param, groups_per_row(pieces.length, fmt.group_size))


def _placed(local: Tensor, param: Tensor) -> Tensor:
    return placed(local, param, layout(param))


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
    """The state that holds ``values``, which are whole or sharded."""
    entry = zero_state(param, name, fmt)
    own = _adopted(values, param, torch.float32, layout(param))
    encode_state(local_tensor(own).contiguous(), _local_state(entry, name, fmt), fmt)
    return entry


def _whole(value: Tensor) -> Tensor:
    return whole_tensor(value) if isinstance(value, DTensor) else value


def _decoded_pieces(
    entry: Mapping[str, Any], name: str, param: Tensor, fmt: StateFormat
) -> Tensor | None:
    """The whole values, in fp32, of codes of rows in another number of pieces than here.

    None if it is no such number.
    """
    keys = part_names(name, fmt)
    shapes = {entry[key].shape if key in entry else None for key in keys[1:]}
    rows, length = param.shape[0], row_length(param.shape)
    number = entry[keys[1]].shape[0] // max(rows, 1) if keys[1] in entry else 0
    wanted = (number * rows, groups_per_row(length // max(number, 1), fmt.group_size))
    if not number or length % number or shapes != {wanted} or entry[keys[0]].shape != param.shape:
        return None
    codes, *constants = (_whole(entry[key]) for key in keys)
    codes = codes.reshape(rows, number, -1).transpose(0, 1)  # `[pieces, D, length of a piece]`
    exponent = constants[1] if fmt.expanded else None
    values = decode_state(State(codes.flatten(0, 1), constants[0], exponent), fmt)
    return values.view(codes.shape).transpose(0, 1).reshape(param.shape)


def _adopted(value: Tensor, param: Tensor, dtype: torch.dtype, wanted: Layout) -> Tensor:
    """Move a tensor of a checkpoint, whole or sharded, to the parameter's device and a layout.

    It must have the shape of the layout, and ``dtype`` unless both are floating-point.
    """
    if value.shape != wanted.shape:
        raise ValueError(
            f"a saved optimizer state of shape {tuple(value.shape)} does not fit a parameter of "
            f"shape {tuple(param.shape)}, which takes {tuple(wanted.shape)}. Load it into the "
            "model that it was saved from."
        )
    both_floating = value.dtype.is_floating_point and dtype.is_floating_point
    if value.dtype != dtype and not both_floating:
        raise ValueError(
            f"a saved optimizer state is {value.dtype}, expected {dtype}: it was cast on the way. "
            "Load it with the `load_state_dict` of the quantized optimizer."
        )
    value = value.to(dtype=dtype)
    if not _is_placed(value, param, wanted):
        value = shard(_whole(value), param, wanted)
    return value.to(device=local_tensor(param).device)


def _is_placed(value: Tensor, param: Tensor, wanted: Layout) -> bool:
    if not isinstance(value, DTensor) or not isinstance(param, DTensor):
        return not isinstance(value, DTensor) and not isinstance(param, DTensor)
    same_mesh = torch.equal(value.device_mesh.mesh, param.device_mesh.mesh)
    return same_mesh and value.placements == wanted.placements


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
    stamps: Sequence[str],
) -> None:
    """Raise ``ValueError`` for saved codes of another version or format, or an unnamed one.

    ``stamps`` are those of the optimizer's own groups.
    """
    for group, own in zip(groups, stamps, strict=True):
        if STAMP in group:
            check_stamp(group[STAMP], own)
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

    States are placed like the parameter; ``quantized`` says whether they are codes here.
    ``has_step`` says whether torch's optimizer counts steps.

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
    values = entry.get(name)
    if is_quantized(entry, name):
        constants = constants_layout(param, fmt)
        if any(entry[k].shape != constants.shape for k in part_names(name, fmt)[1:] if k in entry):
            values = _decoded_pieces(entry, name, param, fmt)
        if values is None:
            codes = {}
            for part, dtype in _PART_DTYPES.items():
                if name + part in entry:
                    wanted = layout(param) if part == CODES else constants
                    codes[name + part] = _adopted(entry[name + part], param, dtype, wanted)
            return codes if quantized else {name: decoded(codes, name, param, fmt)}
    if values is None:
        return {}
    if quantized:
        return encoded(values, name, param, fmt)
    return {name: _adopted(values, param, torch.float32, layout(param))}


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
