"""What ``adaptive_bits.py`` compares, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ablation_report import BASELINE, PERTURBED
from adaptive_gates import AdaptiveOptions
from coded_boundaries import Codec
from llama_study import Variant as AnyVariant
from qat_baselines import Shared

from lq_lightning.adaptive import AdaptiveBitsConfig
from lq_lightning.pipeline.boundary import AQSGDQuantization, TAHQuantization


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant(AnyVariant):
    """How sites are quantized: in one of these ways, or not at all.

    Attributes:
        fixed: What shares a scale, the bits of every code, and whether ranges are fitted.
        codec: Of a stage boundary.
        adaptive: How bits are learned, by ``lq_lightning.adaptive``.
        per: What they are of, then.
        explored: How bits are learned, by ``adaptive_gates.py``, which has more choices.
    """

    fixed: tuple[Shared, int, bool] | None = None
    codec: Codec | None = None
    adaptive: AdaptiveBitsConfig | None = None
    per: Literal["channel", "position"] = "channel"
    explored: AdaptiveOptions | None = None


GROUP = 64  # channels of one token
BETAS = (0.003, 0.01, 0.03, 0.1, 0.3)
RATES = (0.003, 0.01, 0.03, 0.1)
# The paper's runs have thousands of steps; this reaches the target within a hundred.
FAST: dict[str, Any] = {"beta": 1.0, "learning_rate": 0.05}
SCHEDULED: dict[str, Any] = {"descent": 60, "projected": True, "later": 1.0, "tolerance": 1e-3}
SOLVED: dict[str, Any] = {"descent": 60, "solved": 30, "tolerance": 1e-3}
# What is not of the library: other readings of the paper, and other ways.
CHOICES: Mapping[str, dict[str, Any]] = {
    " reference": {},
    " rounded to nearest": {"rounding": "nearest"},
    " without clip": {"clip": "none"},
    " each clipped": {"clip": "each"},
    " scheduled fitted": SCHEDULED | {"fitted": True},
    " shared": {"shared": True},
    " scheduled fitted shared": SCHEDULED | {"shared": True, "fitted": True},
    " scheduled fitted fisher shared": SCHEDULED
    | {"shared": True, "signal": "fisher", "fitted": True},
    " scheduled fitted fisher shared apart": SCHEDULED
    | {"shared": True, "signal": "fisher", "fitted": True, "apart": True},
    " solved fitted": SOLVED | {"fitted": True},
    " measured fitted": SOLVED | {"measured": True, "fitted": True},
}


def fixed_widths(bits: int) -> dict[str, Variant]:
    """Return baselines of some bits, by name."""
    return {
        f"qat {shared} {bits}{' fitted' * fitted}": Variant(
            fixed=(GROUP if shared == "group" else shared, bits, fitted)
        )
        for fitted in (False, True)
        for shared in ("tensor", "channel", "token", "group")
    }


def learned_widths(bits: int) -> dict[str, Variant]:
    """Return what learns widths whose mean is some bits, by name."""
    preset = AdaptiveBitsConfig.preset(bits, ranges="full")
    options = AdaptiveOptions(
        target=preset.target, low=preset.min_bits, high=preset.max_bits, start=preset.start_bits
    )
    library = {
        "": {},
        " L1": FAST | {"regularizer": "l1"},
        " from the target": FAST | {"start_bits": preset.target},
        **{f" beta {beta:g}": {"beta": beta} for beta in BETAS},
        **{f" rate {rate:g}": {"learning_rate": rate} for rate in RATES},
        " fast": FAST,
        " fitted": FAST | {"ranges": "fitted"},
        " fitted in time": FAST | {"ranges": "fitted", "reach_in_steps": 60},
    }
    found = {
        f"amaq {bits}{name}": Variant(adaptive=replace(preset, **of))
        for name, of in library.items()
    }
    found[f"amaq {bits} by position"] = Variant(adaptive=replace(preset, **FAST), per="position")
    for name, changes in CHOICES.items():
        found[f"amaq {bits}{name}"] = Variant(explored=replace(options, **FAST | changes))
    return found


VARIANTS = {
    BASELINE: Variant(),
    PERTURBED: Variant(perturbation=1e-3),
    **fixed_widths(4),
    **learned_widths(4),
    **fixed_widths(3),
    **learned_widths(3),
    **{f"aq_sgd {b}": Variant(codec=AQSGDQuantization(code=f"int{b}")) for b in (4, 3)},
    "tah": Variant(codec=TAHQuantization()),
    "tah5": Variant(codec="tah5"),
}
