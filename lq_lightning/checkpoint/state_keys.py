"""Where the states of optimizers lie in a checkpoint folder.

Nodes that train alone have a copy of the model each, whose optimizers have states of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lq_lightning.checkpoint.folder import ShardedCheckpoint

__all__ = [
    "check_has_optimizers",
    "copy_key",
    "is_copy_key",
    "optimizer_key",
    "optimizer_place",
    "take_tensors",
    "whole_state",
]


def optimizer_key(index: int) -> str:
    """Where the state of an optimizer lies in a folder."""
    return f"optimizer_{index}"


def copy_key(number: int) -> str:
    """Where the optimizers of a copy of the model lie, if it is not the first one."""
    return f"node_{number}"


def is_copy_key(key: object) -> bool:
    """Whether :func:`copy_key` makes it."""
    return str(key).startswith("node_")


def optimizer_place(checkpoint: ShardedCheckpoint, index: int, copy: int) -> tuple[str, ...]:
    """Where the state of an optimizer lies for a copy of the model.

    Of N saved copies, number n continues with the state of number n % N.
    """
    others = {path[0] for path in checkpoint.paths.values() if is_copy_key(path[0])}
    number = copy % (1 + len(others))
    return (copy_key(number), optimizer_key(index)) if number else (optimizer_key(index),)


def take_tensors(checkpoint: dict[str, Any], copy: int) -> dict[str, Any]:
    """Take out of Lightning's checkpoint what the data files of a folder hold, by its place."""
    stored = {"state_dict": checkpoint.pop("state_dict")}
    if "optimizer_states" in checkpoint:
        states = checkpoint["optimizer_states"]
        own = {optimizer_key(i): optimizer for i, optimizer in enumerate(states)}
        stored |= {copy_key(copy): own} if copy else own
        checkpoint["optimizer_states"] = []  # the key says that there is training state
    return stored


def whole_state(states: Sequence[Any], index: int) -> Any:
    """The state of an optimizer in a file.

    Raises:
        ValueError: There is none.
    """
    if index < len(states):
        return states[index]
    raise ValueError(
        f"there is no state for optimizer {index}: it was saved with {len(states)} optimizer(s). "
        "Configure as many as in the run that saved it, or load only the weights."
    )


def check_has_optimizers(saved: ShardedCheckpoint | Sequence[object]) -> None:
    """Tell a checkpoint of the time before optimizers are made; call it for one of step 0.

    Args:
        saved: A folder, or the optimizer states of a file.

    Raises:
        ValueError: It has none.
    """
    if not (saved.keys_under(optimizer_key(0)) if isinstance(saved, ShardedCheckpoint) else saved):
        raise ValueError(
            "the checkpoint was saved before training began, as by a run that failed at its start, "
            "and holds no state of an optimizer. There is nothing to continue from: delete it, and "
            "start without `ckpt_path`."
        )
