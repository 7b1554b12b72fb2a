"""Seeds for stochastic rounding."""

from __future__ import annotations

from functools import lru_cache

_MASK_64 = (1 << 64) - 1


def _mix(value: int) -> int:
    """Mix 64 bits (the output function of SplitMix64; Steele, Lea and Flood, OOPSLA 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK_64
    return value ^ (value >> 31)


def derive_seed(*parts: int) -> int:
    """Mix integers into one seed.

    Args:
        *parts: any integers, e.g. base seed, step, rank, index of the unit. Order matters, and so
            does their number.

    Returns:
        A seed in ``[0, 2**63)``; equal parts give equal seeds on every machine.
    """
    if not parts:
        return 0
    return _absorb(_absorb_all(len(parts), parts[:-1]), parts[-1]) >> 1


@lru_cache(maxsize=256)
def _absorb_all(state: int, parts: tuple[int, ...]) -> int:
    """Absorb what many seeds in a row have in common."""
    for part in parts:
        state = _absorb(state, part)
    return state


def _absorb(state: int, part: int) -> int:
    remaining = part
    while True:
        state = _mix((state + 0x9E3779B97F4A7C15 & _MASK_64) ^ (remaining & _MASK_64))
        remaining >>= 64
        if remaining in (0, -1):
            break
    return _mix(state ^ 0xD1B54A32D192ED03) if part < 0 else state
