"""Sites: modules whose saved activations are codes, why they may be, and their forwards.

A site's forward is bound to the module's instance as a method, and finds the site in the module's
dictionary: copies of the module (``copy.deepcopy``) get a site and a method of their own. Classes
stay as they are.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lq_lightning._compat.layouts import held_by
from lq_lightning._compat.modules import has_global_hooks, is_sharded
from lq_lightning._compat.saved_tensors import has_storage
from lq_lightning.codecs import CodecSpec

from .binding import Attached, bind_forward, unbind_forward
from .functions import NormLayer, linear, quantized_activation, quantized_norm, self_attention
from .hooks import Regions, pack_around_checkpoint, run_packed
from .parallel import (
    Layout,
    as_placed,
    linear_of_shards,
    local,
    norm_layout,
    own_rows,
    pointwise,
    product_layout,
    replicated,
    replicated_source,
)
from .policy import Matmul, SiteKind, fit_codec, is_worth_a_code
from .sources import (
    ALONE,
    ORIGIN,
    Source,
    attach,
    encode_source,
    observers,
    remember_bits,
    source_of,
)

DIMS = (2, 3, 4, 5)  # numbers of dimensions for which recognition proves a site
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SITE = "_lq_site"
_FUNCTION = "_lq_function"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_VALUES = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, type, range, slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

Path = tuple[str, ...]  # names of submodules from a recognized module to the owner of an attribute
Reads = dict[tuple[Path, str], Any]  # attributes that code reads, with their values


class MISSING(enum.Enum):
    """Value of an attribute that an instance does not have."""

    VALUE = 0


@dataclass(frozen=True, slots=True, eq=False)
class Inherited:
    """Value that a class gives for an attribute that the instance does not have."""

    value: Any

    @classmethod
    def of(cls, kind: type, name: str) -> Inherited:
        """Look it up in a class; methods of the class count as their functions."""
        found = getattr(kind, name, MISSING.VALUE)
        return cls(found.__func__ if isinstance(found, types.MethodType) else found)


def is_function_without_state(value: Any, depth: int = 0) -> bool:
    """Return whether a function depends on nothing but its arguments and globals."""
    if isinstance(value, types.BuiltinFunctionType):  # but not, say, a list's method
        return isinstance(value.__self__, (type, types.ModuleType, type(None)))
    if isinstance(value, type):
        return True
    if isinstance(value, functools.partial):
        return all(map(is_constant, (value.func, *value.args, *value.keywords.values())))
    if not isinstance(value, types.FunctionType) or depth > 4:
        return False
    try:
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
    except ValueError:  # an empty cell
        return False
    defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    inside = all(
        isinstance(each, type) or is_function_without_state(each, depth + 1) for each in cells
    )
    return inside and all(map(is_constant, defaults))


def is_constant(value: Any) -> bool:
    """Return whether a value cannot change, and is neither tensor nor module."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_constant, value))
    return isinstance(value, _VALUES) or is_function_without_state(value)


def is_settings(value: Any) -> bool:
    """Return whether an object only holds settings, such as the configuration of a model."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (Tensor, nn.Module, types.ModuleType, dict, list, set))
        and not callable(value)
        and not any(isinstance(each, Tensor) for each in vars(value).values())
    )


def _nested_settings(value: Any, depth: int = 0) -> Iterator[Any]:
    if depth < 3 and is_settings(value):
        yield value
        for each in vars(value).values():
            if not is_constant(each):
                yield from _nested_settings(each, depth + 1)


def _equal(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if isinstance(value, functools.partial) and isinstance(other, functools.partial):
        same = value.func is other.func and len(value.args) == len(other.args)
        return (
            same
            and all(map(_equal, value.args, other.args))
            and value.keywords.keys() == other.keywords.keys()
            and all(_equal(v, other.keywords[k]) for k, v in value.keywords.items())
        )
    return type(value) is type(other) and is_constant(value) and bool(value == other)


def _unbound(value: Any, owner: Any) -> Any:
    """The function of a method of the module itself; bound methods differ between modules."""
    own = isinstance(value, types.MethodType) and (owner is None or value.__self__ is owner)
    return value.__func__ if own else value


def has_value(module: nn.Module, name: str, value: Any) -> bool:
    """Return whether an attribute, neither parameter nor submodule, has a value read earlier."""
    found = module.__dict__.get(name, MISSING.VALUE)
    if isinstance(value, Inherited):
        inherited = Inherited.of(type(module), name).value
        return found is MISSING.VALUE and _equal(inherited, value.value)
    return found is value or _equal(_unbound(found, module), _unbound(value, None))


def module_at(module: nn.Module, path: Path) -> nn.Module | None:
    """Return a submodule, None if it does not exist; reads no attribute of the module's class."""
    found: nn.Module | None = module
    for name in path:
        found = None if found is None else vars(found)["_modules"].get(name)
    return found


@dataclass(slots=True)
class _Kept:
    """Attributes that were read from a module."""

    module: nn.Module
    forward: Callable[..., Any]  # of its class
    values: tuple[tuple[str, Any], ...]  # by name
    modules: tuple[tuple[str, Any], ...]  # inside, that do not run and do not have to be called
    settings: tuple[tuple[Any, dict[str, Any]], ...]  # objects and their attributes
    replaced: bool  # whether its forward is not run, so that it must have no hooks

    @classmethod
    def of(cls, top: nn.Module, path: Path, names: list[str], projections: Any) -> _Kept:
        module = module_at(top, path)
        if module is None:
            raise AssertionError(f"{'.'.join(path)} was read")
        own, kind = vars(module), type(module)
        parameters, children = own["_parameters"], own["_modules"]
        plain = [n for n in names if n not in children and parameters.get(n) is None]
        values = {n: own[n] if n in own else Inherited.of(kind, n) for n in plain}
        found = [v.value if isinstance(v, Inherited) else v for v in values.values()]
        settings = [each for v in found if not is_constant(v) for each in _nested_settings(v)]
        inside = [n for n in names if n in children and (path or n not in projections)]
        return cls(
            module=module,
            forward=kind.forward,
            values=tuple(values.items()),
            modules=tuple((name, children[name]) for name in inside),
            settings=tuple((each, dict(vars(each))) for each in settings),
            replaced=bool(path),
        )

    def holds(self) -> bool:
        module, own = self.module, self.module.__dict__
        for name, value in self.values:
            if not has_value(module, name, value):
                return False
        children = own["_modules"]
        for name, child in self.modules:
            if children.get(name) is not child:
                return False
        for settings, before in self.settings:
            now = vars(settings)
            if now.keys() != before.keys() or any(v is not before[k] for k, v in now.items()):
                return False
        if type(module).forward is not self.forward:
            return False
        return not (self.replaced and any(own[name] for name in HOOKS))


@dataclass(slots=True)
class Proof(Attached):
    """Why a site computes what its module does, as long as the module stays as it was."""

    kept: tuple[_Kept, ...] = ()  # read from the module and from its submodules that do not run

    @classmethod
    def of(cls, module: nn.Module, reads: Reads, projections: Any = ()) -> Proof:
        """Return the proof for a module; its site calls ``projections``, too."""
        parts: dict[Path, list[str]] = {(): []}
        for path, name in reads:
            if not (path and path[0] in projections) and (path, name) != ((), "forward"):
                parts.setdefault(path, []).append(name)
        return cls(tuple(_Kept.of(module, *part, projections) for part in parts.items()))

    @property
    def leaves_out_modules(self) -> bool:
        """Whether submodules exist that do not run."""
        return len(self.kept) > 1

    def holds(self) -> bool:
        """Return whether nothing has changed."""
        return all(part.holds() for part in self.kept)


def _only(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument of a call with one argument, also by name; None if it has more."""
    values = (*args, *kwargs.values())
    return values[0] if len(values) == 1 else None


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in _FLOATS and has_storage(held_by(x))


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


@dataclass(kw_only=True, slots=True)
class Site(Attached):
    """A module and how it keeps its activations.

    ``codec`` is not fitted to a row yet; None for no code of its own. May be exchanged between
    steps.
    """

    name: str  # of the module in the model
    codec: CodecSpec | None
    # by codec and length of a row
    formats: dict[tuple[CodecSpec, int], str] = field(default_factory=dict)
    previous: Callable[..., Any] | None = None  # the instance's own forward, to be put back
    enabled: bool = True  # False lets the module compute as without the site
    removed: bool = False  # disabled for good, while something may still call its forward
    proof: Proof | None = None  # None if it runs the module's own forward
    doubted: bool = False  # whether a warning said that the proof no longer holds
    watched: bool = False  # whether an output's bits were, for writes that autograd misses

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute what the module does, keeping codes where that is wanted and possible."""
        raise NotImplementedError

    def original(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward as it would be without the site."""
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    def format(self, numel: int) -> str:
        """Return the format of a code of rows of ``numel`` values."""
        if self.codec is None:
            raise AssertionError(f"{self.name} keeps no code of its own")
        if torch.compiler.is_compiling():
            return str(fit_codec(self.codec, numel).message_format)
        key = (self.codec, numel)
        if key not in self.formats:
            self.formats[key] = str(fit_codec(self.codec, numel).message_format)
        return self.formats[key]

    def stands(self, module: nn.Module) -> bool:
        """Return whether the site still computes what its module would; warns if not.

        A compiled graph does not check: later changes require a new compilation anyway.
        """
        if torch.compiler.is_compiling() or self.proof is None:
            return True
        if self.proof.holds() and not (self.proof.leaves_out_modules and has_global_hooks()):
            return True
        if not self.doubted:
            self.doubted = True
            rank_zero_warn(
                f"`{self.name}` ({type(module).__name__}) was changed since its saved activations "
                "were quantized: an attribute, a submodule or a hook. It runs its own forward now, "
                "without codes. Change modules before `quantize_activations`, or call "
                "`remove()` of the handle and quantize again."
            )
        return False

    def leave(self, module: nn.Module) -> None:
        """Warn once that the module runs as it is: how its tensors are placed is not known."""
        if not torch.compiler.is_compiling() and not self.doubted:
            self.doubted = True
            rank_zero_warn(
                f"`{self.name}` ({type(module).__name__}) is tensor-parallel in a way that is not "
                "known, or in parts of several sizes. It runs its own forward, without codes."
            )

    def takes(self, x: Any) -> bool:
        """Return whether the site is to keep codes of an input."""
        return self.enabled and self.codec is not None and _is_plain(x) and x.dim() in DIMS

    def encodes(self, x: Any) -> bool:
        """Return whether the site is to keep a code of the input itself."""
        codec = self.codec
        if codec is None or not self.takes(x):
            return False
        known = not torch.compiler.is_compiling() and (codec, x.shape[-1]) in self.formats
        return known or is_worth_a_code(codec, x.shape[-1])

    def note(self, output: Tensor, ranks: int = 1, **tensors: Tensor | None) -> None:
        """Show observers what the site encodes and returns; watch the bits of its first output."""
        for each in observers():
            each.call(self, output, tensors, ranks)
        self.watch(output)

    def watch(self, tensor: Tensor) -> None:
        """In the site's first call, let readers of a tensor with a source compare its bits."""
        if not torch.compiler.is_compiling() and not self.watched:  # a trace would guard the flag
            self.watched = remember_bits(tensor, self.name)


@dataclass(kw_only=True, slots=True)
class NormSite(Site):
    """A normalization layer."""

    layer: NormLayer
    size: int  # values in a row
    weight: str | None  # names, None if it has none
    bias: str | None
    amax: bool  # whether FP8 products follow

    @override
    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x = given = _only(args, kwargs)
        weight, bias = (None if n is None else getattr(module, n) for n in (self.weight, self.bias))
        known = self.encodes(x) and x.shape[-1] == self.size
        if not known or not _needs_gradient(x, weight, bias) or not self.stands(module):
            return self.original(module, *args, **kwargs)
        layout, ranks = None, 1
        if any(isinstance(t, DTensor) for t in (x, weight, bias)):
            layout = norm_layout(x, weight, bias)
            if layout is None:
                self.leave(module)
                return self.original(module, *args, **kwargs)
            x, weight = local(x), local(weight, layout.weight)
            bias, ranks = local(bias, layout.bias), given.device_mesh.size()
            if (origin := getattr(given, ORIGIN, None)) is not None:
                setattr(x, ORIGIN, origin)  # has the gradient of all its readers
        format = self.format(x.shape[-1])
        # FSDP2 frees the parameters of a norm before the backward of a linear layer in another unit
        copies = is_sharded(module)
        y = quantized_norm(x, weight, bias, self.layer, format, amax=self.amax, copies=copies)
        self.note(y, ranks if layout and layout.weight else 1, x=x, weight=weight, bias=bias)
        return y if layout is None else as_placed(y, given, layout.output)


@dataclass(kw_only=True, slots=True)
class ActivationSite(Site):
    """A module that is an activation function."""

    activation: str
    amax: bool

    @override
    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x = _only(args, kwargs)
        wanted = self.encodes(x) and _needs_gradient(x) and self.stands(module)
        y = self.activated(x) if wanted else None
        return self.original(module, *args, **kwargs) if y is None else y

    def activated(self, x: Tensor) -> Tensor | None:
        """Return the function's value, keeping a code of ``x``; None where that is not known."""
        if isinstance(x, DTensor):
            return pointwise(self.activated, x)
        format = self.format(x.shape[-1])
        y = quantized_activation(x, None, self.activation, format, amax=self.amax)
        self.note(y, x=x)
        return y


@dataclass(kw_only=True, slots=True)
class FunctionSite(ActivationSite):
    """A module with an activation function as an attribute that is not a module."""

    attribute: str  # its name; `previous` is its value

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Take the place of the function."""
        x = _only(args, kwargs)
        y = self.activated(x) if self.encodes(x) and _needs_gradient(x) else None
        if y is not None:
            return y
        previous: Any = self.previous
        return previous(*args, **kwargs)


@dataclass(kw_only=True, slots=True)
class MLPSite(Site):
    """An MLP: ``down(act(up(x)))``, or gated: ``down(act(gate(x)) * up(x))``.

    If ``up`` is ``gate``, that one makes both factors, as halves of its last dimension, the gate
    first.
    """

    activation: str
    gate: str  # submodule whose output the function takes
    up: str | None  # submodule that makes the other factor, None if there is none
    down: str  # output projection
    amax: bool  # whether FP8 products follow

    @override
    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x = _only(args, kwargs)
        wanted = self.takes(x)  # codes are of the wider inner tensors
        saves = wanted and (_needs_gradient(x) or _needs_gradient(*module.parameters()))
        if not saves or not self.stands(module):
            return self.original(module, *args, **kwargs)
        up: Tensor | None = None
        gate = getattr(module, self.gate)(x)
        if self.gate == self.up:
            gate, up = gate.chunk(2, dim=-1)
        elif self.up is not None:
            up = getattr(module, self.up)(x)
            if (up.dtype, up.shape) != (gate.dtype, gate.shape):  # by hooks or adapters
                dtype = torch.promote_types(gate.dtype, up.dtype)
                shape = torch.broadcast_shapes(gate.shape, up.shape)  # type: ignore[no-untyped-call]
                gate, up = gate.to(dtype).expand(shape), up.to(dtype).expand(shape)
        factors = (gate,) if up is None else (gate, up)
        if isinstance(gate, DTensor):
            inner = pointwise(self.activated, *factors)
            if inner is None:
                inner = pointwise(self.activated, *map(replicated, factors))
        else:
            inner = self.activated(*factors)
        return getattr(module, self.down)(inner)

    def activated(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """Return the input of the last projection, keeping codes of its factors."""
        format = self.format(gate.shape[-1])
        inner = quantized_activation(gate, up, self.activation, format, amax=self.amax)
        self.note(inner, gate=gate, up=up)
        return inner


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, source: Source | None, matmul: Matmul
) -> Tensor:
    y = linear(x, weight, bias, source, matmul)
    if source is not None:  # otherwise the weight has no gradient, or no site made x
        for each in observers():
            each.reader(x, y)
    return y


@dataclass(kw_only=True, slots=True)
class LinearSite(Site):
    """A linear layer."""

    transposed: bool  # whether its weight is [K, O] (`Conv1D` of GPT-2)
    matmul: Matmul  # precision of its products
    native: str  # why they are not in FP8 though the policy asks for it; empty if they are

    @override
    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x = _only(args, kwargs)
        weight: Tensor = module.weight  # type: ignore[assignment]
        bias: Tensor | None = module.bias  # type: ignore[assignment]
        float8 = self.matmul != "native" and (torch.is_grad_enabled() or module.training)
        plain, layout = self.enabled and _is_plain(x), None
        if plain and any(isinstance(t, DTensor) for t in (x, weight)):
            layout = product_layout(x, weight, bias, self.transposed)
            plain = layout is not None
            if not plain and (float8 or self.codec is not None or source_of(x) is not None):
                self.leave(module)
        source = self.source(x, layout, float8) if plain and _needs_gradient(weight) else None
        if not plain or (source is None and not float8):
            return self.original(module, *args, **kwargs)
        matmul: Matmul = self.matmul if float8 else "native"
        if layout is not None:
            return linear_of_shards(x, weight, bias, self.transposed, layout, source, matmul)
        return _linear(x, weight.t() if self.transposed else weight, bias, source, matmul)

    def encoded(self, module: Any, x: Tensor) -> Tensor:
        """The values that a code for this layer alone would be of."""
        layout = product_layout(x, module.weight, module.bias, self.transposed)
        return own_rows(x) if layout is not None and layout.shares_input else held_by(x)

    def source(self, x: Tensor, layout: Layout | None, float8: bool) -> Source | None:
        """Source of the input, made now if a code for this layer alone saves memory.

        FP8 products save an input that is the same on all ranks in parts, if it has no code.
        """
        source = source_of(x)
        if source is not None:
            return source
        format: str | None = getattr(x, ALONE, None)
        if format is None and self.codec is not None:
            format = self.format(local(x).shape[-1])
        if layout is not None and layout.shares_input and (format is not None or float8):
            source = replicated_source(x, format)
        elif format is not None:
            source = encode_source(local(x), format)
        else:
            return None
        attach(x, source)  # for other layers that read it
        self.watch(x)
        return source


@dataclass(kw_only=True, slots=True)
class DropoutSite(Site):
    """Dropout; its output has no source, and nobody else saves it."""

    @override
    def forward(self, module: nn.Dropout, *args: Any, **kwargs: Any) -> Any:
        x = _only(args, kwargs)
        source = source_of(x) if self.enabled and _is_plain(x) else None
        if source is not None and (module.p == 0 or not module.training):
            return x  # the original's result would have no source in a trace
        result = self.original(module, *args, **kwargs)
        if source is not None:
            setattr(result, ALONE, source.codes.format)
        return result


@dataclass(kw_only=True, slots=True)
class HookSite(Site):
    """A module whose saved tensors are packed by hooks.

    ``kind`` is ``"attention"``, never with a codec: shields what it saves from the hooks of modules
    around it; ``"checkpoint"``: its inputs, while it is checkpointed; ``"other"``: every saved
    tensor that bears rounding.
    """

    kind: Literal["attention", "checkpoint", "other"]
    regions: Regions = field(default_factory=Regions)  # operators of a checkpointed layer

    @override
    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = self.enabled and torch.is_grad_enabled()
        if self.kind == "checkpoint":
            wanted = wanted and module.training and is_checkpointed(module)
            if wanted:  # if checkpointing was switched on late: from the next call on
                pack_around_checkpoint(module, self)
        if not wanted or (self.codec is None and torch.compiler.is_compiling()):
            return self.original(module, *args, **kwargs)
        return _hooked(module, self, *args, **kwargs)


@torch.compiler.disable(reason="saved-tensor hooks of quantized activations")  # type: ignore[no-untyped-call, untyped-decorator]
def _hooked(module: nn.Module, site: HookSite, *args: Any, **kwargs: Any) -> Any:
    return run_packed(module, site, lambda: site.original(module, *args, **kwargs), (args, kwargs))


@dataclass(kw_only=True, slots=True)
class MultiheadSite(HookSite):
    """``nn.MultiheadAttention``, whose query, key and value projection is not a module."""

    matmul: Matmul  # precision of the products of that projection

    @override
    def forward(
        self,
        module: nn.MultiheadAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        weight = module.in_proj_weight
        itself = query is key and key is value and not args and _is_plain_linear(module.out_proj)
        saves = self.enabled and itself and _needs_gradient(weight)
        source = source_of(query) if saves and _is_plain(query) else None
        if source is None or isinstance(weight, DTensor) or not _takes(module, kwargs):
            return HookSite.forward(self, module, query, key, value, *args, **kwargs)
        projected = _linear(query, weight, module.in_proj_bias, source, self.matmul)
        return self_attention(module, projected, **kwargs), None


def _is_plain_linear(module: nn.Module) -> bool:
    """Whether attention may read a projection's weight without running its forward."""
    replaced = "forward" in module.__dict__ and not isinstance(site_of(module), LinearSite)
    return type(module).forward is nn.Linear.forward and not replaced


_ATTENTION_OPTIONS = {
    "key_padding_mask",
    "need_weights",
    "attn_mask",
    "average_attn_weights",
    "is_causal",
}


def _takes(module: nn.MultiheadAttention, options: Mapping[str, Any]) -> bool:
    """Whether ``self_attention`` computes what the module would with these options."""
    return (
        not options.get("need_weights", True)
        and module.in_proj_weight is not None
        and module.bias_k is None
        and not module.add_zero_attn
        and options.keys() <= _ATTENTION_OPTIONS
    )


def site_of(module: nn.Module) -> Site | None:
    """Return the site of a module, None if it has none."""
    site: Site | None = module.__dict__.get(_SITE)
    if site is None or site.removed:
        site = module.__dict__.get(_FUNCTION)
    return site


def sites_of(module: nn.Module) -> list[Site]:
    """Return all sites of a module: its own, and one for a function that it holds."""
    found = (module.__dict__.get(key) for key in (_SITE, _FUNCTION))
    return [site for site in found if site is not None]


def policy_kind(site: Site) -> SiteKind | None:
    """Return the policy field that a site's codec comes from, None if it never has one."""
    if isinstance(site, HookSite):
        return None if site.kind == "attention" else site.kind
    if isinstance(site, NormSite):
        return "norm"
    if isinstance(site, (ActivationSite, MLPSite)):
        return "activation"
    return "linear" if isinstance(site, LinearSite) else None


def is_checkpointed(module: nn.Module) -> bool:
    """Return whether a layer that may be checkpointed is: some say so, wrappers always are."""
    return bool(getattr(module, "gradient_checkpointing", True))


def quantizes(site: Site) -> bool:
    """Return whether a site keeps codes, or has FP8 products."""
    return site.codec is not None or isinstance(site, LinearSite) and site.matmul != "native"


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module.__dict__[_SITE].forward(module, *args, **kwargs)


def install_site(module: nn.Module, site: Site) -> None:
    """Give a module a site; raise ``RuntimeError`` if it has one already."""
    key = _FUNCTION if isinstance(site, FunctionSite) else _SITE
    earlier: Site | None = module.__dict__.get(key)
    if earlier is not None and not earlier.removed:
        raise RuntimeError(
            f"The saved activations of `{site.name}` are quantized already. Call `remove()` of the "
            "handle that `quantize_activations` returned first, or use one "
            "`ActivationQuantization` per Trainer."
        )
    module.__dict__[key] = site
    if isinstance(site, FunctionSite):
        site.previous = module.__dict__[site.attribute]
        module.__dict__[site.attribute] = site.call
    elif earlier is not None:
        site.previous = earlier.previous  # its wrapped forward finds the new site
    else:
        site.previous = module.__dict__.get("forward")
        bind_forward(module, _forward, key)


def remove_site(module: nn.Module, site: Site) -> None:
    """Take a site from a module and restore its forward; does nothing if the site is not its own.

    Wrappers that were put around the site's forward since, as ``module.forward =
    torch.compile(module.forward)`` does, stay and find the original behind it.
    """
    key = _FUNCTION if isinstance(site, FunctionSite) else _SITE
    if module.__dict__.get(key) is not site or site.removed:
        return
    if isinstance(site, FunctionSite):
        present = module.__dict__.get(site.attribute)
        if getattr(present, "__self__", None) is site:  # otherwise it was set since
            module.__dict__[site.attribute] = site.previous
    elif not isinstance(module.__dict__.get("forward"), types.MethodType):
        site.enabled, site.removed = False, True
        return
    else:
        unbind_forward(module, site.previous, key)
    del module.__dict__[key]
