"""How the error of quantization changes with a bit: what the training of widths rests on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lq_lightning.codecs.mixed import Ranges

__all__ = ["error_slope", "level_errors"]

# Mean square error of uniform codes of 0 to 9 bits for normal values of deviation 1, with the range
# that makes it least (Max, "Quantizing for minimum distortion", 1960).
NORMAL_ERRORS = (
    *(1.0, 0.36338, 0.11885, 0.03744, 0.011543),
    *(3.4952e-3, 1.04e-3, 3.0433e-4, 8.7686e-5, 2.4919e-5),
)
_BISECTIONS = 50
_LOGS = [math.log(error) for error in NORMAL_ERRORS]
# Of 1 to 8 bits, from the widths below and above.
_FITTED_SLOPES = [(more - less) / 4 for less, more in zip(_LOGS, _LOGS[2:], strict=False)]


def error_slope(widths: Tensor, ranges: Ranges) -> Tensor:
    """Return the change of an error of quantization with its width, over that error.

    Errors of a line scale as the root of D, their mean square, so that this is half of the slope of
    ln D. For full ranges D ~ (2^b - 1)^-2, which gives -ln 2 * 2^b / (2^b - 1). For fitted ones D
    is that of normal values, where a bit also widens the range and what lies outside comes closer.

    Args:
        widths: ``[n]`` integers from 1 on. Those above 8, which travel as bf16, are taken as codes
            of full range.
        ranges: Of the codes.

    Returns:
        ``[n]`` float32, negative.
    """
    steps = torch.exp2(widths.float())
    slopes = -math.log(2.0) * steps / (steps - 1.0)
    if ranges == "full":
        return slopes
    coded = len(_FITTED_SLOPES)
    fitted = torch.tensor(_FITTED_SLOPES, dtype=torch.float32)[widths.clamp(max=coded).long() - 1]
    return torch.where(widths <= coded, fitted, slopes)


def level_errors(widths: Tensor, errors: Tensor, low: float, high: float) -> Tensor:
    """Return bits of the same mean at which all lines expect the same error.

    A bit divides the mean square error by 4, so that a line gets half the binary logarithm of its
    error on top of the width that caused it, and all lines the same number less (reverse
    water-filling).

    Args:
        widths: ``[n]`` bits that lines had.
        errors: ``[n]`` their mean square errors, finite, not all 0. Lines with 0 get ``low``.
        low: Fewest bits.
        high: Most bits.

    Returns:
        ``[n]`` float32.
    """
    wanted = widths.double() + errors.double().log2() / 2.0
    goal = float(widths.double().mean())
    below = low - float(wanted.max())  # where no line has more than `low`
    above = high - float(wanted[errors > 0].min())  # where none that counts has less than `high`
    for _ in range(_BISECTIONS):
        level = (below + above) / 2.0
        mean = float((wanted + level).clamp(low, high).mean())
        below, above = (below, level) if mean > goal else (level, above)
    return (wanted + below).clamp(low, high).float()
