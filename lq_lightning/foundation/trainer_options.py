"""Checks of what a Trainer is given, where Lightning's own words do not help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from typing import Any

_PACKAGE = "lq_lightning."
# why a Trainer has one, and what to do with two; classes by name, as they are imported later
_ONE_EACH = {
    "EMA": "checkpoints have room for one average: keep one of them",
    "AdaptiveBits": "all sites share one mean: give one the sites of both",
    "QuantizedPrecision": "a run has one precision: give one the options of both",
}


def check_strategy_name(strategy: object, registered: Collection[str]) -> None:
    """Refuse a name that no strategy has, and a class of this package in place of a strategy.

    Raises:
        ValueError: No strategy has this name.
        TypeError: A class was given.
    """
    _check_no_class("strategy", strategy, in_list=False)
    if not isinstance(strategy, str) or strategy.lower() in ("auto", *registered):
        return
    own = [name for name in registered if name.startswith("quantized_")]
    close = get_close_matches(strategy.lower(), registered, n=1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"`strategy={strategy!r}` is no strategy's name.{meant} Those of lq_lightning are "
        f"{' and '.join(map(repr, own))}; Lightning's begin with "
        f"{', '.join(sorted({name.split('_')[0] for name in registered} - {'quantized'}))}."
    )


def check_each(option: str, given: object) -> None:
    """Refuse classes of this package in place of plugins or callbacks, and two of a kind.

    Raises:
        TypeError: A class was given.
        ValueError: There are two.
    """
    several = isinstance(given, (list, tuple))
    entries: Any = given if isinstance(given, (list, tuple)) else (given,)
    for entry in entries:
        _check_no_class(option, entry, in_list=several)
    counts = Counter(name for entry in entries for name in _own_names(type(entry)))
    for name, why in _ONE_EACH.items():
        if counts[name] > 1:
            raise ValueError(f"`{option}` has {counts[name]} `{name}`, but {why}.")


def check_precision(precision: object, plugins: object) -> None:
    """Refuse a precision beside a plugin of this package that has one.

    Raises:
        ValueError: There are both.
    """
    given: Any = plugins if isinstance(plugins, (list, tuple)) else (plugins,)
    for plugin in given:
        if precision is not None and "QuantizedPrecision" in _own_names(type(plugin)):
            name = type(plugin).__name__
            raise ValueError(
                f"`precision={precision!r}` and `plugins=[{name}(...)]` both set the precision of "
                f"the run: leave out the first, and give `{name}(precision={precision!r}, ...)`."
            )


def _check_no_class(option: str, value: object, in_list: bool) -> None:
    if isinstance(value, type) and any(_own_names(value)):
        shown = f"[{value.__name__}]" if in_list else value.__name__
        raise TypeError(
            f"`Trainer({option}={shown})` has a class in place of an instance: write "
            f"`{value.__name__}()`."
        )


def _own_names(cls: type) -> Iterator[str]:
    """Names of the class and its bases that this package has."""
    return (base.__name__ for base in cls.__mro__ if base.__module__.startswith(_PACKAGE))
