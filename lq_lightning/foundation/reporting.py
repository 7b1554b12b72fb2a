"""Interface between quantized parts of a run and a monitor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationReport:
    """Numbers of one rank, by names that mean the same in all reports of a run.

    Counts run on from the start of the run, so that any number of readers can take differences.
    """

    # amounts so far, such as bytes; to be shown per optimizer step
    counts: Mapping[str, float] = field(default_factory=dict)
    # numerators and denominators so far; to be shown as quotients of their increases
    ratios: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    # numbers to be shown as they are
    totals: Mapping[str, float] = field(default_factory=dict)
    # sums of squared errors and of squared exact values since the last report, for a relative L2
    # error; zeros where nothing was measured
    errors: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of everything in the report."""
        return (*self.counts, *self.ratios, *self.errors, *self.totals)


@runtime_checkable
class ReportsQuantization(Protocol):
    """A strategy, plugin or callback that quantizes something and reports the effect."""

    def quantization_report(self) -> QuantizationReport | None:
        """Return the report, with the same names on all ranks; None if nothing is quantized."""

    def measure_quantization_errors(self, measure: bool) -> None:
        """Start or stop measuring errors, which may cost time and memory."""
