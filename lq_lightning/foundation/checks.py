"""Checks of options, with messages that name the value, the allowed ones and the remedy."""

from __future__ import annotations

import re
from types import NoneType
from typing import TypeGuard

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def is_number(value: object) -> TypeGuard[float]:
    """Whether an option is an integer or a float, which True and False are only to Python."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether an option is an integer, which True and False are only to Python."""
    return isinstance(value, int) and not isinstance(value, bool)


def counted(number: int, noun: str) -> str:
    """Return ``number`` and ``noun``, in the plural unless it is one."""
    return f"{number} {noun}{'s' * (number != 1)}"


def check_choice(
    owner: str, field: str, value: object, allowed: tuple[object, ...], *configs: type
) -> None:
    """Refuse, with a ``ValueError``, a value outside the choices of the option ``owner.field``.

    The message also names ``configs``, classes of which an instance could be given instead.
    """
    # True is 1, False is 0 and 128.0 is 128 to Python, not to users
    mistaken = isinstance(value, (bool, float)) and type(value) not in map(type, allowed)
    if value not in allowed or mistaken:
        names = ", ".join(repr(item) for item in allowed)
        *others, last = [
            f"{'an' if config.__name__[0] in 'AEIOU' else 'a'} `{config.__name__}`"
            for config in configs
        ] or [""]
        classes = f"{', '.join(others)} or {last}" if others else last
        instead = f", or give {classes}" if classes else ""
        raise ValueError(
            f"`{owner}({field}={value!r})` is not supported: choose one of {names}{instead}."
        )


def check_count(owner: str, field: str, value: object, least: int, *others: type) -> None:
    """Refuse, with a ``ValueError``, all but whole numbers from ``least`` on and ``others``.

    The message names the option ``owner.field`` and ``others``, classes or ``NoneType``.
    """
    if not isinstance(value, others) and (not is_whole(value) or value < least):
        names = ("None" if other is NoneType else f"a `{other.__name__}`" for other in others)
        instead = "".join(f", or {name}" for name in names)
        raise ValueError(
            f"`{owner}({field}={value!r})` is not supported: give a whole number of {least} or "
            f"more{instead}."
        )


def size_in_bytes(text: str) -> int | None:
    """Read an amount such as ``"60GiB"`` (2**30 bytes each) or ``"60 GB"`` (10**9); else None."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _POWERS[match[2].lower()])
