"""Count what is kept as codes while a model trains, and measure what rounding to them loses."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .policy import SiteKind
from .sources import MatrixCodes

__all__ = ["CodeMeter", "note_code"]


@dataclass(slots=True)
class _Sums:
    """Of squared errors and squared values, fp64 on the device that computed them."""

    error: Tensor | float = 0.0
    norm: Tensor | float = 0.0


@dataclass(slots=True)
class CodeMeter:
    """Numbers of what this process keeps as codes, between ``start`` and ``stop``.

    Only code that runs eagerly is seen: nothing of this is in compiled graphs.

    Attributes:
        nbytes: of all codes so far.
        values: that these codes stand for.
        measure: whether to decode each code again and sum up its errors, too.
    """

    nbytes: int = 0
    values: int = 0
    measure: bool = False
    _sums: dict[SiteKind, _Sums] = field(default_factory=dict)

    def start(self) -> None:
        """Count from now on, in place of a meter before."""
        global _active
        _active = self

    def stop(self) -> None:
        """Count no longer; does nothing if another meter counts."""
        global _active
        if _active is self:
            _active = None

    def note(
        self,
        kind: SiteKind,
        x: Tensor,
        message: Tensor,
        format: str,
        *,
        positive: bool,
        centred: bool,
    ) -> None:
        """Count one code, and its error if errors are measured; see ``note_code``."""
        self.nbytes += message.numel()
        self.values += x.numel()
        if self.measure:
            exact = x.detach().reshape(-1, x.shape[-1]).float()
            codes = MatrixCodes(exact.shape[1], format)
            decoded = codes.rebuild((message,), exact.shape[0], torch.float32)
            if centred:
                exact = exact - exact.mean(-1, keepdim=True)
            if positive:
                exact, decoded = exact.relu(), decoded.relu()
            error = decoded - exact
            sums = self._sums.setdefault(kind, _Sums())
            sums.error = sums.error + error.square().sum(dtype=torch.float64)
            sums.norm = sums.norm + exact.square().sum(dtype=torch.float64)

    def take_errors(self, kind: SiteKind) -> tuple[float, float]:
        """Return the sums of squared errors and squared values since the last time."""
        sums = self._sums.pop(kind, _Sums())
        return float(sums.error), float(sums.norm)


_active: CodeMeter | None = None


def note_code(
    kind: SiteKind,
    x: Tensor,
    message: Tensor,
    format: str,
    *,
    positive: bool = False,
    centred: bool = False,
) -> None:
    """Tell the meter that counts, if there is one, of a code.

    Args:
        kind: Of the site that keeps it.
        x: ``[..., N]``, what was encoded.
        message: Its codes.
        format: Of the message, a ``MessageFormat`` as a string.
        positive: Only positive values matter.
        centred: The code is of ``x`` less the mean of each row.
    """
    if not torch.compiler.is_compiling() and _active is not None:
        with torch.no_grad():
            _active.note(kind, x, message, format, positive=positive, centred=centred)
