"""Pictures of bit widths for loggers."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_bits", "show_bits"]

_MOST_CURVES = 12
_PERCENTILES = (5, 25, 50, 75, 95)


def show_bits(trainer: pl.Trainer, bits: Mapping[str, Tensor], max_bits: float) -> None:
    """Give loggers a histogram of the bits, or, where they take no figures, percentiles.

    A logger takes figures if its ``experiment`` has TensorBoard's ``add_figure``; drawing needs
    matplotlib.

    Args:
        trainer: Whose loggers are meant. Does nothing but on rank 0.
        bits: By site, ``[lines]``.
        max_bits: Right end of the histogram.
    """
    if not trainer.is_global_zero or not bits:
        return
    step = trainer.global_step
    for logger in trainer.loggers:
        add_figure: Any = getattr(getattr(logger, "experiment", None), "add_figure", None)
        if add_figure is not None and importlib.util.find_spec("matplotlib") is not None:
            add_figure("adaptive_bits/histogram", draw_bits(bits, max_bits), global_step=step)
        else:
            values = torch.cat([each.double() for each in bits.values()])
            shares = torch.tensor(_PERCENTILES).double() / 100
            found = zip(_PERCENTILES, values.quantile(shares).tolist(), strict=True)
            logger.log_metrics({f"adaptive_bits/p{share:02d}": bit for share, bit in found}, step)


def draw_bits(bits: Mapping[str, Tensor], max_bits: float) -> Figure:
    """Draw how many lines of each site have how many bits.

    Args:
        bits: By site, ``[lines]``.
        max_bits: Right end.

    Returns:
        A matplotlib figure that belongs to no window.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    names = list(bits)
    if len(names) > _MOST_CURVES:  # as many as can be told apart, evenly spread
        last = len(names) - 1
        names = [names[round(i * last / (_MOST_CURVES - 1))] for i in range(_MOST_CURVES)]
    for name in names:
        values = bits[name].double()
        counts = torch.histc(values, bins=int(4 * max_bits), min=0.0, max=max_bits)
        edges = torch.linspace(0.0, max_bits, counts.numel() + 1)
        shares = 100.0 * counts / values.numel()
        label = f"{name} (mean {values.mean():.2f})"
        axes.stairs(shares.numpy(), edges.numpy(), label=label)
    axes.set_xlabel("bits")
    axes.set_ylabel("lines, %")
    axes.legend(fontsize="small")
    return figure
