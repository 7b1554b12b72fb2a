"""Seeds for stochastic rounding."""

from __future__ import annotations

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
    state = len(parts)
    for part in parts:
        remaining = part
        while True:
            state = _mix((state + 0x9E3779B97F4A7C15 & _MASK_64) ^ (remaining & _MASK_64))
            remaining >>= 64
            if remaining in (0, -1):
                break
        if part < 0:
            state = _mix(state ^ 0xD1B54A32D192ED03)
    return state >> 1
