"""Tensors that one forward pass saves, and the sites that cause it; and how long modules take.

The forward pass is a real one, but saved tensors are dropped at once: it needs only the memory of a
pass without gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from lq_lightning._compat.saved_tensors import base_of

from .calibration import KeptTensors, Saver
from .sites import ActivationSite, FunctionSite, LinearSite, MLPSite, NormSite, Site, site_of
from .sources import has_same_rows

_MARK = "_lq_calibrated_site"


@dataclass(kw_only=True, slots=True)
class SiteShape:
    """Inputs of a site in one forward pass.

    Attributes:
        calls: number of calls of its module.
        rows: rows of its input, all calls together.
        numel: values of a row.
        dtype: dtype of its input.
        device: device of its input.
        readers: linear layers that read its output and need a weight gradient.
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
        setattr(output, _MARK, name)


def marked_site(x: Any) -> str:
    """Return the site that made a tensor, or the base that it views by rows; empty if none did."""
    if not isinstance(x, Tensor):
        return ""
    base = base_of(x)
    if base is not None and not hasattr(x, _MARK) and has_same_rows(x, base):
        x = base
    return getattr(x, _MARK, "")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _reference(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


class SavedByForward:
    """What one forward pass saves; see ``account``.

    Attributes:
        shapes: inputs of the sites that took part, by name.
        unit_calls: forward passes of each recomputable module.
    """

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module]) -> None:
        self._units: list[str] = []  # running units, outermost first
        self._sites: list[str] = []  # sites that own what is saved now, innermost last
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}
        self._savers: dict[int, dict[Saver, None]] = {}
        self._constants: dict[int, StorageWeakRef] = {}
        self.shapes: dict[str, SiteShape] = {}
        self.unit_calls = dict.fromkeys(units, 0)
        self._names = {id(module): name for name, module in units.items()}
        self._down = {
            id(getattr(module, site.down)): site.name
            for module in model.modules()
            if isinstance(site := site_of(module), MLPSite)
        }

    def _constant(self, module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            reference = _reference(_local(tensor).untyped_storage())
            self._constants[reference.cdata] = reference

    def _save(self, tensor: Tensor, saver: Saver) -> None:
        storage = _local(tensor).untyped_storage()
        # A weak reference keeps a storage's address from being reused for another one.
        reference = _reference(storage)
        if isinstance(tensor, nn.Parameter) or reference.cdata in self._constants:
            return
        self._sizes.setdefault(reference.cdata, (reference, storage.nbytes()))
        self._savers.setdefault(reference.cdata, {})[saver] = None

    def _pack(self, tensor: Tensor) -> None:
        inside = tuple(self._units)
        # includes autocast's copies of weights: a linear layer with a code saves none
        self._save(tensor, Saver(self._sites[-1] if self._sites else "", inside))

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
        site = site_of(module)
        if site is None:
            raise AssertionError("hooks are on sites")
        name, x = site.name, args[0] if args and isinstance(args[0], Tensor) else None
        if x is not None and isinstance(site, LinearSite):
            name = self._down.get(id(module)) or marked_site(x) or name
            weight: Any = module.weight
            if name != site.name and weight.requires_grad:
                self._shape(name).readers.append(site.name)
        if x is not None and not isinstance(site, MLPSite) and name == site.name:
            self._shape(name).add(x)
        if x is not None and id(module) in self._down:
            self._shape(name).add(x)
        self._sites.append(name)

    def _leave_site(self, module: nn.Module, args: Any, output: Any) -> None:
        self._sites.pop()
        site = site_of(module)
        if isinstance(site, (NormSite, ActivationSite)):
            mark_output(output, site.name)

    def _shape(self, name: str) -> SiteShape:
        return self.shapes.setdefault(name, SiteShape())

    @cached_property
    def tensors(self) -> tuple[KeptTensors, ...]:
        """Everything saved except parameters and buffers."""
        sums: dict[tuple[Saver, ...], int] = {}
        for key, (_, nbytes) in self._sizes.items():
            savers = tuple(self._savers[key])
            sums[savers] = sums.get(savers, 0) + nbytes
        return tuple(KeptTensors(nbytes=n, savers=savers) for savers, n in sums.items() if n)

    @contextmanager
    def watching(self, model: nn.Module, units: Mapping[str, nn.Module]) -> Iterator[None]:
        """Count what a forward pass inside of the ``with`` block saves."""
        handles: list[RemovableHandle] = []
        for module in model.modules():
            self._constant(module)
            # FSDP2 swaps in other parameters while a module runs
            if next(module.parameters(recurse=False), None) is not None:
                handles.append(module.register_forward_pre_hook(lambda m, _: self._constant(m)))
        for unit in units.values():
            handles.append(unit.register_forward_pre_hook(self._enter_unit, with_kwargs=True))
            handles.append(unit.register_forward_hook(self._leave_unit))
        for module in filter(measured_site, model.modules()):
            handles.append(module.register_forward_pre_hook(self._enter_site))
            handles.append(module.register_forward_hook(self._leave_site))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _refuse):
                yield
        finally:
            for handle in handles:
                handle.remove()


def account(
    model: nn.Module, run: Callable[[], Tensor], units: Mapping[str, nn.Module]
) -> SavedByForward:
    """Run one forward pass with gradients, and return what it saves with the present codecs.

    ``units`` are modules that could be recomputed, by name: inputs that they would keep are listed
    under ``input_of``. None are needed to count what is saved as it is.
    """
    saved = SavedByForward(model, units)
    with saved.watching(model, units):
        run()
    return saved


def _refuse(_: Any) -> Tensor:
    raise RuntimeError(
        "Calibration runs the forward pass without a backward pass, but something asked for its "
        "saved tensors. Give `run` a function that returns the loss and calls no `backward()`."
    )


def now(device: torch.device) -> float:
    """Return the time in seconds, once a GPU has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def forward_times(
    run: Callable[[], Tensor], units: Mapping[str, nn.Module]
) -> tuple[dict[str, float], float]:
    """Return the seconds of the forward pass of each module, and of all: the faster of two passes.

    ``run`` has run before, so that nothing is compiled or tuned any more.
    """
    times = dict.fromkeys(units, float("inf"))
    total, starts = float("inf"), dict.fromkeys(units, 0.0)
    device = next(
        (p.device for unit in units.values() for p in unit.parameters()), torch.device("cpu")
    )

    handles: list[RemovableHandle] = []
    for name, unit in units.items():

        def start(*_: Any, name: str = name) -> None:
            starts[name] = now(device)

        def stop(*_: Any, name: str = name) -> None:
            times[name] = min(times[name], now(device) - starts[name])

        handles += [unit.register_forward_pre_hook(start), unit.register_forward_hook(stop)]
    try:
        for _ in range(2):
            begin = now(device)
            with torch.no_grad():
                run()
            total = min(total, now(device) - begin)
    finally:
        for handle in handles:
            handle.remove()
    return times, total
