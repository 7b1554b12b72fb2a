"""Saved tensors of a micro-batch that can be let go before its graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lq_lightning._compat.saved_tensors import Hooks, around_checkpoints, version_of
from lq_lightning.foundation.parameters import is_copy_of_parameter

__all__ = ["SavedTensors"]


class _Saved:
    """One saved tensor of one node, which alone owns it.

    Attributes:
        tensor: None before it is computed again, and once it is let go.
        version: of the tensor.
        region: in which it was saved, if it is to be computed again.
        held: what checkpointing knows it by.
    """

    __slots__ = ("__weakref__", "held", "region", "tensor", "version")

    def __init__(self, tensor: Tensor | None, region: _Region | None = None) -> None:
        # Detached: an output leads to the node that owns this, and both would live forever.
        self.tensor = None if tensor is None else tensor.detach()
        self.version = 0 if tensor is None else version_of(tensor)
        self.region = region
        self.held: Any = None


class _Region:
    """A checkpointed region: computed again once, for both halves.

    Checkpointing by itself does so in each backward pass that reads something of the region.
    """

    def __init__(self, hooks: Hooks, counted: list[ref[_Saved]] | None) -> None:
        self._pack, self._unpack = hooks
        self._saved: list[ref[_Saved]] = []
        self._counted = counted
        self.is_computed = False

    def pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(None, self)
        saved.held = self._pack(tensor)
        self._saved.append(ref(saved))
        if self._counted is not None and not is_copy_of_parameter(tensor):
            self._counted.append(ref(saved))
        return saved

    def compute(self) -> None:
        """Take over what checkpointing computes again as soon as it is asked for a tensor of it."""
        for saved in (each() for each in self._saved):
            if saved is not None:
                saved.tensor = self._unpack(saved.held)
                saved.version = version_of(saved.tensor)
                saved.held = None
        self._saved.clear()
        self.is_computed = True


class SavedTensors:
    """What nodes save in the forward pass of a stage, if its backward pass is split.

    The first half runs every node on the way to the input, and has to retain the graph for the
    second, which runs only nodes where weights come in. What the others have saved is not read
    again, but without this it would stay as long as later nodes lead to them.

    A checkpointed region is computed again when the first half comes to it. What the second half
    reads of it stays until then; the rest is let go before the next region is computed, so that
    there is never more than one whole.

    Code with saved-tensor hooks of its own keeps what it saves itself.

    Args:
        counted: Whether to know what is kept, for ``kept``.
    """

    # Nothing here may own what nodes have saved: nodes own these hooks, and so would live forever.

    def __init__(self, counted: bool = False) -> None:
        self._counted: list[ref[_Saved]] | None = [] if counted else None
        self._read: list[_Saved] = []
        self._keeping = False
        self._letting_go = False

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Around the forward pass."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with hooks, around_checkpoints(self._around):
            yield

    def kept(self) -> list[Tensor]:
        """Return what nodes keep now, of checkpointed regions what was computed.

        Weights too, but no copies of them in another dtype or layout.
        """
        saved = (each() for each in self._counted or ())
        return [each.tensor for each in saved if each is not None and each.tensor is not None]

    @contextmanager
    def first_half(self, reads_once: bool) -> Iterator[None]:
        """Around the first half.

        Args:
            reads_once: whether the second half reads only what is read there while ``keep(True)``
                is in effect, so that all else that the first half reads can be let go.
        """
        self._letting_go = reads_once
        try:
            yield
            self._let_go()
        finally:
            self._read.clear()
            self._letting_go = False

    def keep(self, keeping: bool) -> None:
        """Say whether what is read now is read in the second half, too."""
        self._keeping = keeping

    def _let_go(self) -> None:
        for saved in self._read:
            saved.tensor = None
        self._read.clear()

    def _around(self, hooks: Hooks) -> Hooks:
        return _Region(hooks, self._counted).pack, self._unpack

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        # Autocast's copies of weights are shared by micro-batches, as weights are.
        if self._counted is not None and not is_copy_of_parameter(tensor):
            self._counted.append(ref(saved))
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.region is not None and not saved.region.is_computed:
            self._let_go()
            saved.region.compute()
        tensor = saved.tensor
        if tensor is None:
            raise AssertionError("a node is run in both halves, but no weights come in there")
        if version_of(tensor) != saved.version:  # autograd checks this only without hooks
            raise RuntimeError(
                f"a tensor {list(tensor.shape)} that backward needs was changed in place after it "
                "was saved: change a copy instead."
            )
        if self._letting_go and not self._keeping:
            self._read.append(saved)
        return tensor
