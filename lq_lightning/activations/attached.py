"""What is attached to modules while they are quantized: copied with them, never pickled."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any, NoReturn

from typing_extensions import Self

__all__ = ["Attached"]


class Attached:
    """Base of dataclasses that are in the dictionaries of modules.

    ``pickle`` would write the forward next to it as a name that the class of the module does not
    have: a file that no process can load. ``copy.deepcopy`` gives copies of a module one of their
    own.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            "A module was to be pickled, as by `torch.save(model)`, whose saved activations are "
            "quantized; no process could load the file. Call `remove()` of the handle that "
            "`quantize_activations` returned first, or save `model.state_dict()`. Of a "
            "LightningModule, `save_hyperparameters(ignore=[...])` leaves out arguments that are "
            "modules."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy with all fields, of which modules and methods become those of the copied module."""
        made = object.__new__(type(self))
        memo[id(self)] = made
        for each in fields(self):  # type: ignore[arg-type]
            setattr(made, each.name, copy.deepcopy(getattr(self, each.name), memo))
        return made
