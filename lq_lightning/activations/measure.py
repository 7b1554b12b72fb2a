"""Count what autograd saves in a forward: by module, by the sites that cause it, and codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from lq_lightning._compat.layouts import held_by
from lq_lightning._compat.saved_tensors import (
    base_of,
    running_modules,
    storage_key,
    storage_reference,
)

from .calibration import KeptTensors, Saver
from .hooks import WeightStorages
from .policy import SiteKind
from .sites import ActivationSite, FunctionSite, LinearSite, MLPSite, NormSite, Site, site_of
from .sources import MARK, MatrixCodes, Observer, has_same_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """A storage that autograd keeps as long as one view of it is saved, with dtype and shape of the
    first.

    ``module`` is the module whose forward saved it, ``""`` for the root; None outside of all.
    """

    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    module: str | None


@dataclass
class SavedTensors:
    """Counts what is saved for backward inside of a ``with`` block, weights excluded.

    Run the forward in the block and keep its output until the end: memory that is freed earlier may
    be counted. Recomputation and checkpoints keep their own accounts, as they keep their own hooks.
    """

    model: nn.Module  # whose modules the tensors are attributed to
    extra: tuple[Tensor, ...] = ()  # weights that the model does not hold itself
    storages: list[SavedTensor] = field(default_factory=list)  # in order

    def __post_init__(self) -> None:
        """Look up the model's modules and weights."""
        self._names = {id(module): name for name, module in self.model.named_modules()}
        self._weights = WeightStorages(self.model, self.extra)
        self._seen: dict[int, Tensor] = {}
        self._hooks: Any = None

    @property
    def nbytes(self) -> int:
        """Total bytes."""
        return sum(saved.nbytes for saved in self.storages)

    def __enter__(self) -> SavedTensors:
        """Start counting."""
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop counting."""
        self._hooks.__exit__(*error)
        self._seen.clear()

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:  # sparse tensors have no storage to identify
            return tensor
        held = held_by(tensor)
        key = storage_key(held)
        if key not in self._seen and not self._weights.holds(tensor):
            self._seen[key] = held.detach()  # keeps a later storage from reusing the address
            names = (self._names.get(id(module)) for module in running_modules())
            self.storages.append(
                SavedTensor(
                    nbytes=held.untyped_storage().nbytes(),
                    dtype=held.dtype,
                    shape=tuple(held.shape),
                    module=next((name for name in names if name is not None), None),
                )
            )
        return tensor


@dataclass(slots=True)
class CodeMeter(Observer):
    """Counts the codes that this process keeps, and the values that they represent.

    ``measure`` makes it decode each code again and sum up its errors, too.
    """

    nbytes: int = 0
    values: int = 0
    measure: bool = False
    # sums of squared errors and squared values, fp64 on the device that computed them
    _sums: dict[SiteKind, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @override
    @torch.no_grad()
    def code(
        self,
        kind: SiteKind,
        x: Tensor,
        message: Tensor,
        format: str,
        *,
        positive: bool = False,
        centred: bool = False,
    ) -> None:
        self.nbytes += message.numel()
        self.values += x.numel()
        if self.measure:
            exact = x.detach().reshape(-1, x.shape[-1]).float()
            codes = MatrixCodes(exact.shape[1], format)
            decoded = codes.rebuild((message,), exact.shape[0], torch.float32)
            if centred:
                exact = exact - exact.mean(-1, keepdim=True)
            if positive:
                exact, decoded = exact.relu(), decoded.relu()
            error = (decoded - exact).square().sum(dtype=torch.float64)
            norm = exact.square().sum(dtype=torch.float64)
            if kind in self._sums:
                error, norm = self._sums[kind][0] + error, self._sums[kind][1] + norm
            self._sums[kind] = error, norm

    def take_errors(self, kind: SiteKind) -> tuple[float, float]:
        """Return the sums of squared errors and squared values since the last call."""
        error, norm = self._sums.pop(kind, (0.0, 0.0))
        return float(error), float(norm)


def is_measured(site: Site | None) -> bool:
    """Return whether calibration measures a site: its input and output are a module's.

    Functions that are attributes, dropout and what saved-tensor hooks pack stay as they are.
    """
    known = (NormSite, ActivationSite, MLPSite, LinearSite)
    return isinstance(site, known) and not isinstance(site, FunctionSite)


def measured_site(module: nn.Module) -> Site | None:
    """Return the site of a module if calibration measures it."""
    site = site_of(module)
    return site if is_measured(site) else None


def mark_output(output: Any, name: str) -> None:
    """Remember which site made a tensor."""
    if isinstance(output, Tensor):
        setattr(output, MARK, name)


def marked_site(x: Any) -> str:
    """Return the site that made a tensor, or the base that it views by rows; empty if none did."""
    if not isinstance(x, Tensor):
        return ""
    base = base_of(x)
    if base is not None and not hasattr(x, MARK) and has_same_rows(x, base):
        x = base
    return getattr(x, MARK, "")


@dataclass(kw_only=True, slots=True)
class SiteShape:
    """Inputs of a site in one forward pass: number of calls, and rows of all calls together.

    ``readers`` are the linear layers that read its output and need a weight gradient.
    """

    calls: int = 0
    rows: int = 0
    numel: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    readers: list[str] = field(default_factory=list)

    def add(self, x: Tensor) -> None:
        """Count one call."""
        self.calls += 1
        self.rows += x.numel() // max(1, x.shape[-1])
        self.numel, self.dtype, self.device = x.shape[-1], x.dtype, x.device


class SavedByForward:
    """Tensors that one forward pass with gradients saves under the current codecs, with reasons.

    The forward pass is a real one, but saved tensors are dropped at once: it needs only the memory
    of a pass without gradients. ``units`` are modules that could be recomputed, by name: inputs
    that they would keep are listed under ``input_of``. ``tensors`` are all but parameters and
    buffers.
    """

    def __init__(
        self, model: nn.Module, run: Callable[[], Tensor], units: Mapping[str, nn.Module]
    ) -> None:
        self._units: list[str] = []  # running units, outermost first
        self._sites: list[str] = []  # sites that own what is saved now, innermost last
        # Weak references keep a storage's address from being reused for another one.
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}
        self._savers: dict[int, dict[Saver, None]] = {}
        self._constants: dict[int, StorageWeakRef] = {}
        self.shapes: dict[str, SiteShape] = {}  # of the sites that took part, by name
        self.unit_calls = dict.fromkeys(units, 0)  # forward passes
        self._names = {id(module): name for name, module in units.items()}
        self._down = {
            id(getattr(module, site.down)): site.name
            for module in model.modules()
            if isinstance(site := site_of(module), MLPSite)
        }
        self._run(model, run, units)
        sums: dict[tuple[Saver, ...], int] = {}
        for key, (_, nbytes) in self._sizes.items():
            savers = tuple(self._savers[key])
            sums[savers] = sums.get(savers, 0) + nbytes
        self.tensors = tuple(KeptTensors(nbytes=n, savers=s) for s, n in sums.items() if n)

    def _run(
        self, model: nn.Module, run: Callable[[], Tensor], units: Mapping[str, nn.Module]
    ) -> None:
        with ExitStack() as hooks:
            add = hooks.enter_context
            for module in model.modules():
                self._constant(module)
                # FSDP2 swaps in other parameters while a module runs
                if next(module.parameters(recurse=False), None) is not None:
                    add(module.register_forward_pre_hook(lambda m, _: self._constant(m)))
            for unit in units.values():
                add(unit.register_forward_pre_hook(self._enter_unit, with_kwargs=True))
                add(unit.register_forward_hook(self._leave_unit))
            for module in filter(measured_site, model.modules()):
                add(module.register_forward_pre_hook(self._enter_site))
                # before hooks that place the output
                add(module.register_forward_hook(self._leave_site, prepend=True))
            add(torch.autograd.graph.saved_tensors_hooks(self._pack, _refuse))
            run()

    def _constant(self, module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            reference = storage_reference(held_by(tensor))
            self._constants[reference.cdata] = reference

    def _save(self, tensor: Tensor, saver: Saver) -> None:
        local = held_by(tensor)
        reference = storage_reference(local)
        if isinstance(tensor, nn.Parameter) or reference.cdata in self._constants:
            return
        self._sizes.setdefault(reference.cdata, (reference, local.untyped_storage().nbytes()))
        self._savers.setdefault(reference.cdata, {})[saver] = None

    def _pack(self, tensor: Tensor) -> None:
        # includes autocast's copies of weights: a linear layer with a code saves none
        self._save(tensor, Saver(self._sites[-1] if self._sites else "", tuple(self._units)))

    def _enter_unit(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self._names[id(module)]
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                self._save(value, Saver("", tuple(self._units), name))
        self._units.append(name)
        self.unit_calls[name] += 1

    def _leave_unit(self, module: nn.Module, args: Any, output: Any) -> None:
        self._units.pop()

    def _enter_site(self, module: nn.Module, args: Any) -> None:
        site: Any = site_of(module)  # hooks are on sites
        name, x = site.name, args[0] if args and isinstance(args[0], Tensor) else None
        if x is not None and isinstance(site, LinearSite):
            name = self._down.get(id(module)) or marked_site(x) or name
            weight: Any = module.weight
            if name != site.name and weight.requires_grad:
                self._shape(name).readers.append(site.name)
        if x is not None and not isinstance(site, MLPSite) and name == site.name:
            own = site.encoded(module, x) if isinstance(site, LinearSite) else held_by(x)
            self._shape(name).add(own)
        if x is not None and id(module) in self._down:
            self._shape(name).add(held_by(x))
        self._sites.append(name)

    def _leave_site(self, module: nn.Module, args: Any, output: Any) -> None:
        self._sites.pop()
        site = site_of(module)
        if isinstance(site, (NormSite, ActivationSite)):
            mark_output(output, site.name)

    def _shape(self, name: str) -> SiteShape:
        return self.shapes.setdefault(name, SiteShape())


def _refuse(_: Any) -> Tensor:
    raise RuntimeError(
        "Calibration runs the forward pass without a backward pass, but something asked for its "
        "saved tensors. Give `run` a function that returns the loss and calls no `backward()`."
    )
