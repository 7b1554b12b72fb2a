"""Checks of options, with messages that name the value, what is allowed and what to do."""

from __future__ import annotations

from typing import TypeGuard

__all__ = ["check_choice", "is_number"]


def is_number(value: object) -> TypeGuard[float]:
    """Whether an option is an integer or a float, which True and False are only to Python."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_choice(
    owner: str, field: str, value: object, allowed: tuple[object, ...], config: type | None = None
) -> None:
    """Refuse a value outside the choices of an option.

    Args:
        owner: Class that has the option.
        field: The option.
        value: Given by the user.
        allowed: The choices.
        config: Class of which an instance could be given instead.

    Raises:
        ValueError: ``value`` is not among ``allowed``.
    """
    # True is 1 and False is 0 to Python, not to users
    mistaken = isinstance(value, bool) and bool not in map(type, allowed)
    if value not in allowed or mistaken:
        names = ", ".join(repr(item) for item in allowed)
        instead = ""
        if config is not None:
            article = "an" if config.__name__[0] in "AEIOU" else "a"
            instead = f", or give {article} `{config.__name__}`"
        raise ValueError(
            f"`{owner}({field}={value!r})` is not supported: choose one of {names}{instead}."
        )
