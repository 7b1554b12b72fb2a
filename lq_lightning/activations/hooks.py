"""Saved-tensor hooks: what unrecognized and checkpointed modules save, as codes.

Which operator saved a tensor is known once the module has run and its graph can be read: until then
a tensor is kept as it is. Then tensors that bear rounding (``rounding``) become codes: floating
point, 1024 values or more, with a last dimension of 16 or more, no weights, and nothing that the
caller holds anyway (masks, rotary tables). A storage that is saved through several views is stored
once, and exactly if one of its savers needs it exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lq_lightning._compat.layouts import held_by
from lq_lightning._compat.saved_tensors import (
    Hooks,
    base_of,
    checkpoint_region,
    has_storage,
    nodes_made,
    outer_hooks,
    saves_inputs_of_region,
    storage_key,
    version_of,
)
from lq_lightning.foundation.nested import tensors_in
from lq_lightning.foundation.parameters import is_copy_of_parameter

from .policy import SiteKind
from .rounding import Normalized, Sides, Use, find_uses, watch_region
from .sources import Codes, encode_source

if TYPE_CHECKING:
    from .sites import HookSite

_MIN_NUMEL = 1024
_MIN_WIDTH = 16
_ROW = 128
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MAX_WATCHED = 4

T = TypeVar("T")
_FUNCTION = "_gradient_checkpointing_func"


class WeightStorages:
    """Tells weights of a model, and extra ones, from other saved tensors: they are held anyway."""

    def __init__(self, model: nn.Module, extra: tuple[Tensor, ...] = ()) -> None:
        tensors = (*model.parameters(), *model.buffers(), *extra)
        held = map(held_by, tensors)
        self._storages = {storage_key(t) for t in held if has_storage(t)}

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a weight, a view of one, or a cast of one.

        FSDP2 hands modules parameters whose storage it frees after forward: those are parameters,
        or views whose base is one, at other addresses than before. Autocast's copies are new
        tensors; their graph node tells.
        """
        if isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter):
            return True
        if storage_key(held_by(tensor)) in self._storages:
            return True
        return is_copy_of_parameter(tensor)


@dataclass(slots=True)
class Regions:
    """Operators of a checkpointed layer, as far as they were watched: the numbers of graph nodes of
    watched forwards, since a forward with another number has other operators, and why the input is
    kept exactly from now on, if it is.
    """

    continuous: set[int] = field(default_factory=set)
    exact: str = ""
    watch: bool = True
    watched: int = 0

    def note(self, nodes: int, found: str = "") -> str:
        """Take in a watched forward of so many graph nodes, and its first operator that may not be
        continuous; return why the input is kept exactly from now on, or "".
        """
        self.watched += 1
        self.continuous.add(nodes)
        if found:
            self.exact = f"`{found}` in them is not known to be continuous"
        elif self.watched > _MAX_WATCHED:
            self.exact = "their operators change from call to call"
        return self.exact

    def takes_codes(self, nodes: int) -> bool:
        """Return whether a forward of so many nodes was found continuous; else watch the next."""
        is_known = nodes in self.continuous and not self.exact
        self.watch = not is_known
        return is_known


def _decoded(codes: Codes, rows: int, dtype: torch.dtype, view: Any, message: Tensor) -> Tensor:
    """A view, ``(shape,)`` or ``(shape, strides, offset)``, of the values of a message."""
    flat = codes.rebuild((message,), rows, dtype).view(-1)
    return flat.view(*view) if len(view) == 1 else flat.as_strided(*view)


def _from_bits(sides: Sides, like: tuple[torch.Size, torch.dtype], message: Tensor) -> Tensor:
    """Values on the same sides of a piecewise linear function's bounds, from one bit each."""
    shape, dtype = like
    bits = (message.unsqueeze(-1) & _powers(message.device)).view(-1)
    inside = bits[: shape.numel()].view(shape) != 0
    values = torch.full(shape, sides.outside, dtype=dtype, device=message.device)
    return values.masked_fill_(inside, sides.inside)


def _powers(device: torch.device) -> Tensor:
    return torch.arange(8, device=device).exp2().to(torch.uint8)


def _bits(tensor: Tensor, sides: Sides) -> Tensor:
    values = tensor.detach().reshape(-1)
    inside = sides.contains(values).to(torch.uint8)
    inside = torch.nn.functional.pad(inside, (0, -inside.numel() % 8)).view(-1, 8)
    return (inside * _powers(inside.device)).sum(-1, dtype=torch.uint8)


class _Saved:
    """A tensor that a node saved: kept as it is until the module has run.

    Then its ``message`` is what the outer hooks packed: the tensor itself, or its code, of which
    ``decode`` makes the tensor. The outer hooks get one message per saved tensor, as without ours:
    a split backward pass releases the tensors that its node will not read again, while other nodes
    may.
    """

    __slots__ = ("decode", "message", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # Detached: an output refers to the node that owns this object, a cycle that is never freed.
        self.tensor: Tensor | None = tensor.detach()
        self.version = version_of(tensor)
        self.decode: Callable[[Tensor], Tensor] | None = None
        self.message: Any = None

    def value(self) -> Tensor:
        """The tensor itself; raises as torch would if it was changed since it was saved."""
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

    def become(self, message: Any, decode: Callable[[Tensor], Tensor] | None) -> None:
        """Replace the tensor by a message."""
        self.message, self.decode, self.tensor = message, decode, None


class _Packer:
    """Hooks of one forward of one module."""

    def __init__(self, module: nn.Module, site: HookSite, args: Any, outer: Hooks | None) -> None:
        self._site = site
        self._kind: SiteKind = "checkpoint" if site.kind == "checkpoint" else "other"
        self._weights = WeightStorages(module)
        tensors = [tensor for tensor in tensors_in(args) if has_storage(tensor)]
        self._held = {storage_key(t) for t in tensors if not t.requires_grad}
        self._inputs = {storage_key(t) for t in tensors if t.requires_grad}
        self.pending: list[_Saved] = []
        self.outer = outer

    def pack(self, tensor: Tensor) -> Any:
        # must be called here: it inspects the caller of this hook
        in_question = self._kind != "checkpoint" or saves_inputs_of_region()
        if not (in_question and self._may_take(tensor)):
            return _Saved(tensor) if self.outer is None else self.outer[0](tensor)
        saved = _Saved(tensor)
        self.pending.append(saved)
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

        ``uses`` has the saved tensors that tolerate rounding, by ``id``.
        """
        pending, self.pending = self.pending, []
        storages: dict[tuple[int, torch.dtype], list[_Saved]] = {}
        for saved in pending:
            if saved.tensor is not None and version_of(saved.tensor) == saved.version:
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

    def _keep(self, group: list[_Saved]) -> None:
        """Keep tensors as they are, or as the outer hooks do."""
        if self.outer is not None:
            for saved in group:
                saved.become(self.outer[0](saved.value()), None)

    def _encode(self, coded: list[_Saved], whole: Tensor | None) -> None:
        """Encode the tensors of one storage: all of it, or each part by itself."""
        made: dict[Any, tuple[Tensor, Callable[..., Tensor]]] = {}
        for saved in coded:
            tensor = saved.value()
            view = tensor.shape, tensor.stride(), int(tensor.storage_offset())
            key = view if whole is None else None
            if key not in made:
                made[key] = self._code(tensor if whole is None else whole, whole=whole is not None)
            message, decoded = made[key]
            decode = partial(decoded, view if whole is not None else (tensor.shape,))
            saved.become(self._outside(message), decode)

    def _encode_sides(self, saved: _Saved, sides: Sides) -> None:
        tensor = saved.value()
        like = tensor.shape, tensor.dtype
        saved.become(self._outside(_bits(tensor, sides)), partial(_from_bits, sides, like))

    def _encode_normalized(self, saved: _Saved, norm: Normalized) -> None:
        tensor = saved.value()
        with torch.no_grad():
            values = norm.forward(tensor)
        message, decoded = self._code(values, whole=True)
        view, dtype = (values.shape, values.stride(), 0), tensor.dtype

        def decode(message: Tensor) -> Tensor:
            return norm.inverse(decoded(view, message)).to(dtype)

        saved.become(self._outside(message), decode)

    def _outside(self, message: Tensor) -> Any:
        return message if self.outer is None else self.outer[0](message)

    def _code(self, tensor: Tensor, *, whole: bool) -> tuple[Tensor, Callable[..., Tensor]]:
        """A message of a tensor, or of its whole storage, and ``_decoded`` for it."""
        with torch.no_grad():
            values = tensor.detach()
            values = values.as_strided((values.numel(),), (1,), 0) if whole else values.reshape(-1)
            width = _ROW if values.numel() % _ROW == 0 else tensor.shape[-1]
            source = encode_source(values.view(-1, width), self._site.format(width), self._kind)
        message: Any = source.tensors[0]
        rows = values.numel() // width
        return message, partial(_decoded, source.codes, rows, tensor.dtype)

    def unpack(self, packed: Any) -> Tensor:
        tensor: Tensor
        if isinstance(packed, _Saved) and packed.tensor is not None:
            return packed.value()
        message = packed.message if isinstance(packed, _Saved) else packed
        tensor = message if self.outer is None else self.outer[1](message)
        if isinstance(packed, _Saved) and packed.decode is not None:
            return packed.decode(tensor)
        return tensor


def _is_whole(saved: _Saved) -> bool:
    tensor = saved.value()
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def _is_worth_it(saved: _Saved) -> bool:
    """Whether a tensor has enough values, also in a row, none of them expanded."""
    tensor = saved.value()
    wide = tensor.numel() >= _MIN_NUMEL and tensor.shape[-1] >= _MIN_WIDTH
    return wide and tensor.nbytes <= tensor.untyped_storage().nbytes()


def _as_is(value: Any) -> Any:
    return value


def run_packed(module: nn.Module, site: HookSite, run: Callable[[], T], args: Any) -> T:
    """Run a module's forward, and store what it saves as codes.

    Hooks around the call (``save_on_cpu``) get the codes, once the module has run. Within a
    checkpointed region nothing is done: what is saved there is dropped, and recomputed.
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
    if isinstance(ours, _Packer):  # enclosing packers must not pack again
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
    watches = regions.watch
    first = nodes_made()
    hooks = torch.autograd.graph.saved_tensors_hooks(packer.pack, packer.unpack)
    nothing: AbstractContextManager[list[str]] = nullcontext([])
    with hooks, watch_region(tensors) if watches else nothing as found:
        output = run()
    nodes = nodes_made() - first
    if watches and (reason := regions.note(nodes, *found[:1])):
        rank_zero_warn(
            f"The inputs of checkpointed {type(module).__name__} layers are kept exactly, not as "
            f"codes: {reason}. What is computed again from a rounded input could take another "
            "path, such as to other experts."
        )
    coded = packer.pending if regions.takes_codes(nodes) else []  # all of the input, or nothing
    packer.settle({id(saved): None for saved in coded})
    return output


class _PackingCheckpoint:
    """Calls a layer's checkpoint function and packs what that saves.

    Hugging Face's layers call it around their forward up to transformers 5.17 at least, and in
    ``forward`` in 5.23. A replaced forward runs inside of such a region, where nothing is kept.
    """

    def __init__(self, module: nn.Module, site: HookSite, original: Callable[..., Any]) -> None:
        self.module, self.site, self.original = module, site, original

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.site.enabled or not torch.is_grad_enabled():
            return self.original(function, *args, **kwargs)
        held = function.keywords if isinstance(function, partial) else {}
        return run_packed(
            self.module,
            self.site,
            lambda: self.original(function, *args, **kwargs),
            (args, held, kwargs),
        )


def pack_around_checkpoint(module: nn.Module, site: HookSite) -> None:
    """Pack what the module's checkpoint function saves, if that is called around the forward.

    Checkpointing may be switched on later, which replaces the function: call it again then.
    """
    outer: Any = module.__dict__.get(_FUNCTION)
    function = outer.args[0] if isinstance(outer, _Around) else outer
    around = type(module).__call__ is not nn.Module.__call__
    if function is not None and around and not isinstance(function, _PackingCheckpoint):
        packing = _PackingCheckpoint(module, site, function)
        inside = isinstance(outer, _Around)
        module.__dict__[_FUNCTION] = _Around(outer.func, packing) if inside else packing


def unpack_around_checkpoint(module: nn.Module) -> None:
    """Put the module's checkpoint function back."""
    function = module.__dict__.get(_FUNCTION)
    if isinstance(function, _PackingCheckpoint):
        module.__dict__[_FUNCTION] = function.original


def around_checkpoint_function(module: nn.Module, around: Callable[..., Any] | None) -> None:
    """Let ``around(function, *args, **kwargs)`` call the module's checkpoint function; None undoes.

    It is outermost: undo it before ``unpack_around_checkpoint``.
    """
    function = module.__dict__.get(_FUNCTION)
    if isinstance(function, _Around):
        function = module.__dict__[_FUNCTION] = function.args[0]
    if function is not None and around is not None:
        module.__dict__[_FUNCTION] = _Around(around, function)


class _Around(partial[Any]):
    """Marks what ``around_checkpoint_function`` has put around a function."""
