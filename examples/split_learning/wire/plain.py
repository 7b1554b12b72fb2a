"""Plain data as JSON, in both directions within limits.

Dictionaries with string keys, lists, strings, booleans, None, integers of 64 bits and finite
floats. NaN and infinities are no JSON: send such numbers as tensors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from .errors import MalformedFrame, TooLarge, UnsendableMessage
from .settings import Limits

_MOST_DIGITS = 20  # of a 64-bit integer, with its sign
# Strings, an unfinished last one too: this matches at every quote, so the search is linear.
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_BRACKETS = re.compile(rb"[\[\]{}]")
_OPENING = frozenset((b"[", b"{"))


def dump(data: Mapping[str, Any], limits: Limits) -> bytes:
    """Return a dictionary as JSON in UTF-8.

    Raises:
        UnsendableMessage: something that is not plain data, or a limit that is exceeded.
    """
    count = _count(dict(data), "", 1, limits)
    encoded = json.dumps(data, allow_nan=False, separators=(",", ":")).encode("ascii")
    if count > limits.items or len(encoded) > limits.header_nbytes:
        raise UnsendableMessage(
            f"A header of {count} values in {len(encoded)} bytes; allowed: {limits.items} values, "
            f"{limits.header_nbytes} bytes. Send long lists as tensors."
        )
    return encoded


def canonical(data: Any) -> str:
    """Return text that is equal for equal plain data; 1, 1.0 and True are told apart."""
    return json.dumps(data, sort_keys=True)


def load(encoded: bytes, limits: Limits) -> dict[str, Any]:
    """Return the dictionary that ``encoded`` holds.

    Raises:
        TooLarge: too deep or too many values.
        MalformedFrame: no JSON, or JSON that ``dump`` does not write.
    """
    _check_size(encoded, limits)
    try:
        data = json.loads(
            encoded.decode("utf-8"),
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_constant,
            object_pairs_hook=_object,
        )
        _check_text(data)
    except (ValueError, RecursionError) as error:
        raise MalformedFrame(f"A message's header is no plain JSON: {error}.") from error
    if not isinstance(data, dict):
        raise MalformedFrame(f"A message's header is a {type(data).__name__}, not a dictionary.")
    return data


def _check_size(encoded: bytes, limits: Limits) -> None:
    """Bound depth and number of values before anything is built from them."""
    structure = _STRINGS.sub(b"", encoded)
    items = structure.count(b",") + structure.count(b"[") + structure.count(b"{") + 1
    if items > 2 * limits.items:  # empty containers were counted twice
        raise TooLarge(
            f"A message's header has about {items} values; allowed: {limits.items}. Send less in "
            "`fields`, or raise `Limits.items` on both sides."
        )
    depth = 0
    for bracket in _BRACKETS.findall(structure):
        depth += 1 if bracket in _OPENING else -1
        if depth > limits.depth:
            raise TooLarge(
                f"A message's header has lists and dictionaries more than {limits.depth} deep; "
                "raise `Limits.depth` on both sides if that is wanted."
            )


def _integer(digits: str) -> int:
    value = int(digits) if len(digits) <= _MOST_DIGITS else None
    if value is None or not -(2**63) <= value < 2**63:
        raise ValueError("an integer of more than 64 bits")
    return value


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number too large for a float")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) != len(pairs):
        raise ValueError("a key that comes twice in one dictionary")
    return built


def _check_text(data: Any) -> None:
    """Refuse halves of surrogate pairs, which no log or file could be written with."""
    if isinstance(data, str):
        data.encode("utf-8")
    elif isinstance(data, dict):
        for key, value in data.items():
            key.encode("utf-8")
            _check_text(value)
    elif isinstance(data, list):
        for value in data:
            _check_text(value)


def _count(data: Any, where: str, depth: int, limits: Limits) -> int:
    """Return the number of values; raise where one is not plain."""
    kind = type(data)
    if kind in (list, tuple, dict) and depth > limits.depth:
        raise UnsendableMessage(
            f"`{where}` is more than {limits.depth} lists and dictionaries deep. Send it flatter."
        )
    if kind is dict:
        return 1 + sum(_count_item(k, v, where, depth, limits) for k, v in data.items())
    if kind in (list, tuple):
        counts = (_count(v, f"{where}[{i}]", depth + 1, limits) for i, v in enumerate(data))
        return 1 + sum(counts)
    if kind is str:
        _check_own_text(data, where)
    elif kind is int and -(2**63) <= data < 2**63 or kind is bool or data is None:
        pass
    elif not (kind is float and math.isfinite(data)):
        raise UnsendableMessage(
            f"`{where}` is {data!r:.100} ({kind.__name__}); allowed: dictionaries, lists, "
            "strings, booleans, None, integers of 64 bits and finite floats. Send other numbers "
            "as tensors."
        )
    return 1


def _count_item(key: Any, value: Any, where: str, depth: int, limits: Limits) -> int:
    if type(key) is not str:
        raise UnsendableMessage(f"`{where}` has the key {key!r:.100}; keys must be strings.")
    _check_own_text(key, where or "a key")
    return _count(value, f"{where}[{key!r:.100}]" if where else key, depth + 1, limits)


def _check_own_text(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnsendableMessage(f"`{where}` has text that is no Unicode: {error}.") from error
