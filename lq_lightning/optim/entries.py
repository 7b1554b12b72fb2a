"""Entries of saved optimizer states: codes as they are, or fp32 states of torch's optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lq_lightning.kernels.optimizer_step import StateFormat

from .config import STAMP, OptimizerQuantization, check_stamp
from .state import (
    CODES,
    EXPONENT,
    SCALE,
    STEP,
    adopted,
    decoded,
    encoded,
    is_quantized,
    part_shape,
)


class Held:
    """Hides a parameter's entry from the casts of ``Optimizer.load_state_dict``."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.entry = entry


def hide_entries(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Hide all entries of a state dict: a hook of ``load_state_dict``."""
    held = {key: Held(entry) for key, entry in state_dict["state"].items()}
    return {**state_dict, "state": held}


def is_part(key: str) -> bool:
    """Whether a key of an entry is that of codes, a scale or an exponent."""
    return key.endswith((CODES, SCALE, EXPONENT))


def check_saved(
    groups: Sequence[Mapping[str, Any]],
    entries: Mapping[Any, Held],
    config: OptimizerQuantization,
) -> None:
    """Make sure that saved codes can be read.

    Raises:
        ValueError: they are of another version or format, or nothing says of which.
    """
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


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryReader:
    """Turns entries of checkpoints, or of torch's optimizers, into those of a quantized one.

    Attributes:
        optimizer: its class, for messages.
        names: of the states.
        formats: of the states.
        has_step: whether torch's optimizer counts steps.
    """

    optimizer: str
    names: tuple[str, ...]
    formats: list[StateFormat]
    has_step: bool

    def read(
        self, param: Tensor, entry: Mapping[str, Any], quantized: bool, step_device: torch.device
    ) -> dict[str, Any]:
        """Return the entry of ``param``.

        Args:
            param: where the states belong; they are placed like it.
            entry: that was saved, or made by torch.
            quantized: whether the states of the parameter are codes.
            step_device: where the step counter belongs.

        Raises:
            ValueError: something is missing, unknown, or of another shape or dtype.
        """
        result: dict[str, Any] = {}
        known = {STEP}
        if STEP in entry:
            step = torch.as_tensor(entry[STEP], dtype=torch.float32).clone()
            result[STEP] = step.to(step_device)
        for name, fmt in zip(self.names, self.formats, strict=True):
            known |= {name, name + CODES, name + SCALE, name + EXPONENT}
            result.update(self._state(param, entry, name, fmt, quantized))
        missing = self._missing(entry)
        if missing:
            raise ValueError(
                f"the optimizer state of a parameter of shape {tuple(param.shape)} lacks "
                f"{', '.join(missing)}. Load a whole `state_dict()`."
            )
        unknown = [key for key, value in entry.items() if key not in known and value is not None]
        if unknown:
            raise ValueError(
                f"the optimizer state has {', '.join(map(repr, unknown))}, which "
                f"{self.optimizer} does not know; allowed: {', '.join(sorted(known))}."
            )
        return result

    @staticmethod
    def _state(
        param: Tensor, entry: Mapping[str, Any], name: str, fmt: StateFormat, quantized: bool
    ) -> dict[str, Tensor]:
        if is_quantized(entry, name):
            dtypes = {CODES: torch.uint8, SCALE: torch.bfloat16, EXPONENT: torch.uint8}
            codes = {
                name + part: adopted(entry[name + part], param, dtype, part_shape(param, part))
                for part, dtype in dtypes.items()
                if name + part in entry
            }
            return codes if quantized else {name: decoded(codes, name, param, fmt)}
        if entry.get(name) is None:
            return {}
        if quantized:
            return encoded(entry[name], name, param, fmt)
        return {name: adopted(entry[name], param, torch.float32, param.shape)}

    def _missing(self, entry: Mapping[str, Any]) -> list[str]:
        """Keys without which the others of an entry are of no use."""
        coded = {name for name in self.names if is_quantized(entry, name)}
        present = coded | {name for name in self.names if entry.get(name) is not None}
        if not present:
            return []
        missing = [name for name in self.names if name not in present]
        if self.has_step and STEP not in entry:
            missing.append(STEP)
        for name, fmt in zip(self.names, self.formats, strict=True):
            if name in coded:
                parts = [name + SCALE, *([name + EXPONENT] if fmt.expanded else [])]
                missing += [part for part in parts if part not in entry]
        return missing
