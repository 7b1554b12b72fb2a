"""Saved-tensor hooks: what modules save that are not recognized, as codes.

Which operator saved a tensor is known once the module has run and its graph can be read: until then
a tensor is kept as it is. Codes are made of those that bear rounding (``saved_slots``): floating
point, 1024 values or more, with a last dimension of 16 or more, no weights, and nothing that the
caller holds anyway (masks, rotary tables). A storage that is saved through several views is stored
once, and exactly if one of those who saved it needs it exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lq_lightning._compat.saved_tensors import (
    Hooks,
    checkpoint_region,
    has_storage,
    nodes_made,
    outer_hooks,
    saves_inputs_of_region,
    storage_key,
    version_of,
)
from lq_lightning.foundation.nested import tensors_in

from .functions import encode_source
from .policy import SiteKind
from .regions import RegionWatch
from .saved_slots import Normalized, Sides, Use, find_uses
from .sites import HookSite, Regions
from .sources import Codes
from .weights import WeightStorages

__all__ = ["run_packed"]

_MIN_NUMEL = 1024
_MIN_WIDTH = 16
_ROW = 128
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_View = tuple[torch.Size, tuple[int, ...], int]  # shape, strides and offset

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Code:
    """How a storage, or a part of one, was encoded.

    Attributes:
        codes: how to decode it.
        rows: of the matrix that was encoded.
        dtype: of the tensor.
    """

    codes: Codes
    rows: int
    dtype: torch.dtype

    def decode(self, message: Tensor, view: _View) -> Tensor:
        return self.codes.rebuild((message,), self.rows, self.dtype).view(-1).as_strided(*view)


@dataclass(frozen=True, slots=True)
class _NormalizedCode:
    """How a norm's input was encoded: its normalized values."""

    code: _Code
    norm: Normalized
    dtype: torch.dtype

    def decode(self, message: Tensor, view: _View) -> Tensor:
        return self.norm.inverse(self.code.decode(message, view)).to(self.dtype)


@dataclass(frozen=True, slots=True)
class _Bits:
    """How the sides that a tensor's values are on were encoded: eight to a byte."""

    sides: Sides
    numel: int
    dtype: torch.dtype

    def decode(self, message: Tensor, view: _View) -> Tensor:
        powers = _powers(message.device)
        inside = (message.unsqueeze(-1) & powers).view(-1)[: self.numel] != 0
        values = torch.full(
            (self.numel,), self.sides.outside, dtype=self.dtype, device=inside.device
        )
        return values.masked_fill_(inside, self.sides.inside).as_strided(*view)


def _powers(device: torch.device) -> Tensor:
    return torch.arange(8, device=device).exp2().to(torch.uint8)


def _bits(tensor: Tensor, sides: Sides) -> Tensor:
    values = tensor.detach().reshape(-1)
    inside = sides.contains(values).to(torch.uint8)
    inside = torch.nn.functional.pad(inside, (0, -inside.numel() % 8)).view(-1, 8)
    return (inside * _powers(inside.device)).sum(-1, dtype=torch.uint8)


class _Saved:
    """A tensor that a node saved: kept as it is until the module has run.

    Then its ``message`` is what the hooks around ours packed: of the tensor itself, or of its code.
    They are given one for each saved tensor, as without ours: those of a split backward pass let go
    of what its node will not read again, and other nodes may.

    Attributes:
        tensor: None once a message stands for it.
        version: the tensor's version when it was saved.
        code: the code of its storage; None if it is kept exactly.
        view: how it views the decoded storage.
    """

    __slots__ = ("code", "message", "tensor", "version", "view")

    def __init__(self, tensor: Tensor) -> None:
        # Detached: an output leads to the node that owns this, and both would live forever.
        self.tensor: Tensor | None = tensor.detach()
        self.version = version_of(tensor)
        self.code: _Code | _NormalizedCode | _Bits | None = None
        self.message: Any = None
        self.view: _View | None = None

    def value(self) -> Tensor:
        """The tensor, which nothing stands for.

        Raises:
            RuntimeError: It was changed since it was saved, as torch would say.
        """
        if self.tensor is None:
            raise AssertionError("a saved tensor that a message stands for")
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                "One of the tensors needed for gradient computation has been modified by an "
                f"in-place operation: {self.tensor.dtype} {list(self.tensor.shape)} is at "
                f"version {version_of(self.tensor)}; expected version {self.version} instead. "
                "It was saved in a module whose saved tensors are packed as codes (`other` or "
                "`checkpoint` of `ActivationPolicy`)."
            )
        return self.tensor

    def is_unchanged(self) -> bool:
        return self.tensor is not None and version_of(self.tensor) == self.version

    def become(self, code: _Code | _NormalizedCode | _Bits, message: Any, view: _View) -> None:
        """Let a code stand for the tensor."""
        self.code, self.message, self.view, self.tensor = code, message, view, None


class _Packer:
    """The hooks of one forward of one module."""

    def __init__(self, module: nn.Module, site: HookSite, args: Any, outer: Hooks | None) -> None:
        self._site = site
        self._kind: SiteKind = "checkpoint" if site.kind == "checkpoint" else "other"
        self._weights = WeightStorages(module)
        tensors = [tensor for tensor in tensors_in(args) if has_storage(tensor)]
        self._held = {storage_key(t) for t in tensors if not t.requires_grad}
        self._inputs = {storage_key(t) for t in tensors if t.requires_grad}
        self._pending: list[_Saved] = []
        self.outer = outer

    def pack(self, tensor: Tensor) -> Any:
        # called here: it looks at what called this hook
        in_question = self._kind != "checkpoint" or saves_inputs_of_region()
        if not (in_question and self._may_take(tensor)):
            return _Saved(tensor) if self.outer is None else self.outer[0](tensor)
        saved = _Saved(tensor)
        self._pending.append(saved)
        return saved

    def _may_take(self, tensor: Tensor) -> bool:
        """Whether a tensor may be encoded, as far as one can tell when it is saved."""
        if not has_storage(tensor) or tensor.dtype not in _FLOATS:
            return False
        storage = storage_key(tensor)
        if self._kind == "checkpoint" and storage not in self._inputs:
            return False
        return storage not in self._held and not self._weights.holds(tensor)

    def settle(self, uses: dict[int, Use]) -> None:
        """After the module has run: encode where allowed, and pass everything to the outer hooks.

        Args:
            uses: of the saved tensors that bear rounding, by their ``id``.
        """
        pending, self._pending = self._pending, []
        storages: dict[tuple[int, torch.dtype], list[_Saved]] = {}
        for saved in pending:
            if saved.tensor is not None and saved.is_unchanged():
                key = storage_key(saved.tensor), saved.tensor.dtype
                storages.setdefault(key, []).append(saved)
        for group in storages.values():
            bears = all(id(saved) in uses for saved in group)
            coded = [saved for saved in group if bears and uses[id(saved)] is None]
            whole = next((s for s in coded if _is_whole(s) and _is_worth_it(s)), None)
            parts = [whole] if whole is not None else coded or group
            if not bears or not all(map(_is_worth_it, parts)):
                self._keep(group)
                continue
            self._encode(coded, None if whole is None else whole.value())
            for saved in group:
                use = uses[id(saved)]
                if isinstance(use, Sides):
                    self._encode_sides(saved, use)
                elif isinstance(use, Normalized):
                    self._encode_normalized(saved, use)

    def settle_inputs(self, *, coded: bool) -> None:
        """After the checkpointed layer has run: encode its saved inputs, or keep them exactly."""
        self.settle({id(saved): None for saved in self._pending} if coded else {})

    def _keep(self, group: list[_Saved]) -> None:
        """Keep tensors as they are, or as the hooks around ours do."""
        if self.outer is not None:
            for saved in group:
                saved.message, saved.tensor = self.outer[0](saved.value()), None

    def _encode(self, coded: list[_Saved], whole: Tensor | None) -> None:
        """Encode the tensors of one storage: all of it, or each part by itself."""
        made: dict[_View | None, tuple[_Code, Tensor]] = {}
        for saved in coded:
            tensor = saved.value()
            view = tensor.shape, tensor.stride(), int(tensor.storage_offset())
            key = view if whole is None else None
            if key not in made:
                made[key] = self._code(tensor if whole is None else whole, whole=whole is not None)
            code, message = made[key]
            if whole is None:
                view = _contiguous(tensor.shape)
            saved.become(code, self._outside(message), view)

    def _encode_sides(self, saved: _Saved, sides: Sides) -> None:
        tensor = saved.value()
        code = _Bits(sides, tensor.numel(), tensor.dtype)
        message = self._outside(_bits(tensor, sides))
        saved.become(code, message, _contiguous(tensor.shape))

    def _encode_normalized(self, saved: _Saved, norm: Normalized) -> None:
        tensor = saved.value()
        with torch.no_grad():
            values = norm.forward(tensor)
        code, message = self._code(values, whole=True)
        view = values.shape, values.stride(), 0
        saved.become(_NormalizedCode(code, norm, tensor.dtype), self._outside(message), view)

    def _outside(self, message: Tensor) -> Any:
        return message if self.outer is None else self.outer[0](message)

    def _code(self, tensor: Tensor, *, whole: bool) -> tuple[_Code, Tensor]:
        with torch.no_grad():
            values = tensor.detach()
            values = values.as_strided((values.numel(),), (1,), 0) if whole else values.reshape(-1)
            width = _ROW if values.numel() % _ROW == 0 else tensor.shape[-1]
            source = encode_source(values.view(-1, width), self._site.format(width), self._kind)
        (message,) = source.tensors
        if message is None:
            raise AssertionError("a matrix is rebuilt from its message")
        return _Code(source.codes, values.numel() // width, tensor.dtype), message

    def unpack(self, packed: Any) -> Tensor:
        tensor: Tensor
        if not isinstance(packed, _Saved):
            tensor = packed if self.outer is None else self.outer[1](packed)
            return tensor
        if packed.tensor is not None:
            return packed.value()
        message = packed.message if self.outer is None else self.outer[1](packed.message)
        if packed.code is None or packed.view is None:
            tensor = message
            return tensor
        return packed.code.decode(message, packed.view)


def _is_whole(saved: _Saved) -> bool:
    tensor = saved.value()
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def _is_worth_it(saved: _Saved) -> bool:
    """Whether a tensor has enough values, in its rows too, and each of its own."""
    tensor = saved.value()
    wide = tensor.numel() >= _MIN_NUMEL and tensor.shape[-1] >= _MIN_WIDTH
    return wide and tensor.nbytes <= tensor.untyped_storage().nbytes()


def _contiguous(shape: torch.Size) -> _View:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return shape, tuple(reversed(strides)), 0


def _as_is(value: Any) -> Any:
    return value


def run_packed(module: nn.Module, site: HookSite, run: Callable[[], T], args: Any) -> T:
    """Run a module's forward, and store what it saves as codes.

    Hooks of others around the call (``save_on_cpu``) get the codes, once the module has run. Within
    a checkpointed region nothing is done: what is saved there is dropped, and computed again.

    Args:
        module: The module; its weights are never packed.
        site: What to pack, and how.
        run: The forward.
        args: Of the forward, positional and by name.

    Returns:
        What the forward returned.
    """
    outer = outer_hooks()
    ours = None if outer is None else getattr(outer[0], "__self__", None)
    if checkpoint_region() is not None:
        return run()
    if site.codec is None:
        if not isinstance(ours, _Packer):
            return run()
        with torch.autograd.graph.saved_tensors_hooks(*(ours.outer or (_as_is, _as_is))):
            return run()
    if isinstance(ours, _Packer):  # what this module packs is not packed again by those around it
        outer = ours.outer
    packer = _Packer(module, site, args, outer)
    if site.kind == "checkpoint":
        return _run_region(module, site.regions, run, packer, args)
    first = nodes_made()
    with torch.autograd.graph.saved_tensors_hooks(packer.pack, packer.unpack):
        output = run()
    packer.settle({id(saved): sides for saved, sides in find_uses(output, first)})
    return output


def _run_region(
    module: nn.Module, regions: Regions, run: Callable[[], T], packer: _Packer, args: Any
) -> T:
    """Run a checkpointed layer, whose input becomes a code if its second run bears that."""
    if regions.exact:
        return run()
    tensors = [tensor for tensor in tensors_in(args) if tensor.requires_grad]
    watch = RegionWatch(tensors) if regions.watch else None
    first = nodes_made()
    hooks = torch.autograd.graph.saved_tensors_hooks(packer.pack, packer.unpack)
    with hooks, watch or nullcontext():
        output = run()
    nodes = nodes_made() - first
    if watch is not None and (reason := regions.note(nodes, watch.found)):
        rank_zero_warn(
            f"The inputs of checkpointed {type(module).__name__} layers are kept exactly, not as "
            f"codes: {reason}. What is computed again from a rounded input could take another "
            "path, such as to other experts."
        )
    packer.settle_inputs(coded=regions.takes_codes(nodes))
    return output
