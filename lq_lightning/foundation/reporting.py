"""What quantized parts of a run tell a monitor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

__all__ = ["QuantizationReport", "ReportsQuantization"]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationReport:
    """Numbers of one rank, by name. A name stands for one thing in all reports of a run.

    What is counted runs on from the start of the run, so that any number of readers can take
    differences.

    Attributes:
        counts: Amounts so far, such as bytes; of interest per optimizer step.
        ratios: A numerator and a denominator so far; of interest is the quotient of what was added
            to them.
        totals: Numbers that are of interest as they are.
        errors: Sums behind a relative L2 error since the last report: of squared errors, and of
            squared exact values. Zeros where nothing was measured.
    """

    counts: Mapping[str, float] = field(default_factory=dict)
    ratios: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    totals: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of everything in the report."""
        return (*self.counts, *self.ratios, *self.errors, *self.totals)


@runtime_checkable
class ReportsQuantization(Protocol):
    """A strategy, plugin or callback that quantizes something and can say what that does."""

    def quantization_report(self) -> QuantizationReport | None:
        """Report; None if nothing is quantized in this run. All ranks report the same names."""

    def measure_quantization_errors(self, measure: bool) -> None:
        """Measure errors from now on, or no longer. It may cost time and memory."""
