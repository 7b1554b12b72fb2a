"""Choose the modules of a model that are gathered and freed as one piece."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lq_lightning.foundation.layer_stack import has_parameters, is_block, is_silent_container

__all__ = [
    "ChosenUnits",
    "ShardingPlan",
    "UnitSelector",
    "check_selector",
    "choose_units",
    "find_units",
]

UnitSelector = Sequence[str] | Callable[[nn.Module], bool] | None
"""Classes or modules by name, or a predicate over modules, or ``None`` to find repeated blocks."""


class ChosenUnits(NamedTuple):
    """Modules of a whole model that are to be units wherever a part of it is sharded.

    Attributes:
        names: Of the modules.
        source: How they were found.
    """

    names: frozenset[str]
    source: str


class ShardingPlan(NamedTuple):
    """Which modules are gathered and freed as one piece.

    Attributes:
        units: Names of the units, innermost first; the root comes on top of them.
        source: How they were found.
        kept_in_root: ``(name, reason)`` of modules that looked like units but stay in the root.
        candidates: Classes that ``units`` could name, largest modules first, if there are no units.
    """

    units: tuple[str, ...]
    source: str
    kept_in_root: tuple[tuple[str, str], ...] = ()
    candidates: tuple[str, ...] = ()

    def summary(self) -> str:
        """A few lines for people."""
        lines = [self._found()]
        lines += [f"`{name}` stays in the root: {reason}" for name, reason in self.kept_in_root]
        return "\n".join(lines)

    def _found(self) -> str:
        if self.units:
            shown = ", ".join(self.units[:4]) + (", ..." if len(self.units) > 4 else "")
            return f"{len(self.units)} units from {self.source}: {shown}"
        advice = "no module of it could be a unit"
        if self.candidates:
            advice = f"name the classes of its large parts, such as `units={[self.candidates[0]]}`"
            if len(self.candidates) > 1:
                advice += f" (there are: {', '.join(self.candidates[:8])})"
        return (
            f"0 units from {self.source}: the whole model is gathered at once, which takes its "
            f"full size in memory and overlaps with nothing. If that is too much, {advice}."
        )


def find_units(root: nn.Module, units: UnitSelector | ChosenUnits = None) -> ShardingPlan:
    """Choose the modules of ``root`` that become FSDP2 units.

    They are the modules that already are FSDP2 units, or else those of :func:`choose_units` that
    have parameters. One that shares a parameter with something outside stays in the root.

    Args:
        root: The model, or a part of it in which modules have kept their names.
        units: How to choose, or what was chosen in the whole model, of which ``root`` may hold
            nothing.

    Raises:
        ValueError, TypeError: As :func:`choose_units`.
    """
    named = _submodules(root)
    existing = tuple(name for name, module in named.items() if isinstance(module, FSDPModule))
    if existing or isinstance(root, FSDPModule):
        return ShardingPlan(_innermost_first(existing), "`configure_model`")
    names, source = units if isinstance(units, ChosenUnits) else choose_units(root, units)
    chosen = [name for name in named if name in names]
    kept = _sharing(root, chosen)
    chosen = [name for name in chosen if name not in kept and has_parameters(named[name])]
    candidates = () if chosen else _candidates(root, named)
    return ShardingPlan(_innermost_first(chosen), source, tuple(kept.items()), candidates)


def choose_units(root: nn.Module, units: UnitSelector = None) -> ChosenUnits:
    """Choose modules of a whole model.

    In order: what ``units`` selects; the ``_no_split_modules`` of Hugging Face models inside;
    repeated blocks, which are the direct children of a ``ModuleList``, ``ModuleDict`` or
    ``Sequential`` that have parameters in submodules of their own, two or more of a class. A module
    without such submodules (a lone ``Linear``) is never found automatically, nor is one inside of
    another that was.

    Raises:
        ValueError: ``units`` selects nothing, a container without ``forward``, or the root itself.
        TypeError: ``units`` is neither a sequence of names nor a callable.
    """
    named = _submodules(root)
    if units is not None:
        return ChosenUnits(frozenset(_select(root, named, units)), "the `units` option")
    if classes := _no_split_classes(root):
        names = _outermost([n for n, m in named.items() if type(m).__name__ in classes])
        source = f"`_no_split_modules` ({', '.join(sorted(classes))})"
        if names:
            return ChosenUnits(frozenset(names), source)
    blocks = set(_repeated_blocks(root))
    return ChosenUnits(frozenset(n for n, m in named.items() if m in blocks), "repeated blocks")


def _submodules(root: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in root.named_modules() if name}


def _outermost(names: Sequence[str]) -> list[str]:
    """Leave out what is inside of another, as the mixers that Mamba lists beside its blocks."""
    return [n for n in names if not any(n.startswith(f"{other}.") for other in names)]


def _candidates(root: nn.Module, named: dict[str, nn.Module]) -> tuple[str, ...]:
    half = sum(p.numel() for p in root.parameters()) / 2
    sizes: dict[str, int] = {}
    for module in named.values():
        numel = sum(p.numel() for p in module.parameters())
        if 0 < numel <= half and not is_silent_container(module):
            name = type(module).__name__
            sizes[name] = max(sizes.get(name, 0), numel)
    return tuple(sorted(sizes, key=lambda name: -sizes[name]))


def _innermost_first(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: -name.count(".")))


def check_selector(units: UnitSelector) -> None:
    """Refuse what can select no modules.

    Raises:
        TypeError: ``units`` is neither ``None``, nor a sequence of names, nor a callable.
    """
    if units is None or callable(units):
        return
    names = isinstance(units, Sequence) and not isinstance(units, str)
    if not names or not all(isinstance(name, str) for name in units):
        raise TypeError(
            f"`units={units!r}` is not supported: give a list of class names such as ['Block'], or "
            "of names of modules, or a function of a module that returns whether it is a unit."
        )


def _select(
    root: nn.Module,
    named: dict[str, nn.Module],
    units: Sequence[str] | Callable[[nn.Module], bool],
) -> list[str]:
    check_selector(units)
    full = {name: module for name, module in named.items() if has_parameters(module)}
    present = Counter(type(m).__name__ for m in full.values())
    known = ", ".join(sorted(present))
    if callable(units):
        chosen = [name for name, module in named.items() if units(module)]
        if not chosen:
            raise ValueError(
                f"`units` selects no module of `{type(root).__name__}`. Its submodules have the "
                f"classes: {known}."
            )
    else:
        unknown = [name for name in units if name not in present and name not in full]
        if unknown:
            ends = tuple(f".{name}" for name in unknown)
            similar = [name for name in full if name.endswith(ends)][:3]
            raise ValueError(
                f"`units={list(units)}`: `{type(root).__name__}` has no submodule of class "
                f"{unknown}, nor one of that name"
                + (f" (there is {similar})" if similar else "")
                + f". Its submodules have the classes: {known}."
            )
        chosen = [n for n, m in named.items() if n in units or type(m).__name__ in units]
    for name in chosen:
        if is_silent_container(named[name]):
            raise ValueError(
                f"`units` selects `{name}`, a {type(named[name]).__name__} without `forward`, "
                "which cannot be a unit because nothing calls it. Select its children."
            )
    return chosen


def _no_split_classes(root: nn.Module) -> set[str]:
    classes: set[str] = set()
    for module in root.modules():
        names = getattr(module, "_no_split_modules", None)
        if isinstance(names, (list, tuple, set)):
            classes.update(str(name) for name in names)
    return classes


def _repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    holds = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    blocks = [child for child in module.children() if holds and is_block(child)]
    alike = Counter(type(block) for block in blocks)
    for child in module.children():
        if child in blocks and alike[type(child)] > 1:
            yield child
        else:
            yield from _repeated_blocks(child)


def _sharing(root: nn.Module, chosen: Sequence[str]) -> dict[str, str]:
    """Chosen units that share a parameter with a module outside of them, and with which.

    A second name for a whole unit is no sharing: whoever calls it calls the unit.
    """
    unit_names = {id(root.get_submodule(name)): name for name in chosen}
    modules = dict(root.named_modules(remove_duplicate=False))
    homes: dict[int, dict[str, str]] = defaultdict(dict)  # parameter -> {unit name: parameter name}
    for path, module in modules.items():
        for key, parameter in module.named_parameters(recurse=False):
            unit = _innermost_unit(path, modules, unit_names)
            homes[id(parameter)].setdefault(unit, f"{path}.{key}" if path else key)
    kept: dict[str, str] = {}
    for places in homes.values():
        for unit, name in places.items():
            other = next((n for u, n in places.items() if u != unit), None)
            if unit and other is not None:
                kept.setdefault(unit, f"`{name}` is shared with `{other}`")
    return kept


def _innermost_unit(path: str, modules: dict[str, nn.Module], unit_names: dict[int, str]) -> str:
    while path:
        if id(modules[path]) in unit_names:
            return unit_names[id(modules[path])]
        path = path.rpartition(".")[0]
    return ""
