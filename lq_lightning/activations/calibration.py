"""Cost of each way of keeping an activation, as data: gradient errors, bytes and times."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

from lq_lightning.foundation.nested import from_plain


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecMeasurement:
    """One codec at one site.

    ``errors`` has the relative L2 error of each gradient that the code changes, given the same
    incoming gradient: ``"input"``, ``"weight"``, ``"bias"``, ``"gate"``, ``"up"``, and by name the
    weights of linear layers that read the site's output.
    """

    codec: str  # a name in `policy.CODECS`
    nbytes: int  # kept for one forward pass, statistics and scales included
    time_s: float  # seconds per step more than keeping takes; negative if it takes less
    errors: Mapping[str, float]

    @property
    def squared_error(self) -> float:
        """Sum of the squared relative errors of the gradients."""
        return math.fsum(error * error for error in self.errors.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteCalibration:
    """One module whose saved activations may become codes.

    ``codecs`` are the candidates; none if a code would change nothing, as in a module that others
    checkpoint.
    """

    name: str  # in the model
    kind: str  # field of `ActivationPolicy`
    rows: int  # of its input in one forward pass (tokens)
    numel: int  # values of a row
    kept_nbytes: int  # in full precision, that a code here alone would replace
    codecs: tuple[CodecMeasurement, ...]

    def measurement(self, codec: str) -> CodecMeasurement:
        """Return the measurement of a codec; raises ``ValueError`` if it was not a candidate."""
        for measurement in self.codecs:
            if measurement.codec == codec:
                return measurement
        names = ", ".join(each.codec for each in self.codecs) or "nothing"
        raise ValueError(f"`{self.name}` was measured with {names}, not with {codec!r}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCalibration:
    """One module that may be recomputed, and the seconds of its forward pass."""

    name: str
    time_s: float


@dataclass(frozen=True, slots=True)
class Saver:
    """One reason to keep a tensor."""

    site: str  # ends it if this site keeps a code; empty for no site
    inside: tuple[str, ...]  # ends it if one of these modules is recomputed; outermost first
    input_of: str = ""  # it exists only if this module is recomputed; empty otherwise

    def holds(self, coded: Collection[str], recomputed: Collection[str]) -> bool:
        """Return whether the reason exists with these coded sites and recomputed modules."""
        if any(unit in recomputed for unit in self.inside):
            return False
        if self.input_of:
            return self.input_of in recomputed
        return self.site not in coded


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTensors:
    """Tensors that are kept for the same reasons, any of which keeps them."""

    nbytes: int
    savers: tuple[Saver, ...]

    def kept(self, coded: Collection[str], recomputed: Collection[str]) -> bool:
        """Return whether they are kept with these coded sites and recomputed modules."""
        return any(saver.holds(coded, recomputed) for saver in self.savers)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationCalibration:
    """Cost of each way of keeping the activations of a model.

    Attributes:
        sites: modules whose activations may become codes, in the order of the model.
        units: modules that may be recomputed; a block comes before its halves.
        tensors: all tensors that one forward pass saves in full precision.
        step_time_s: seconds of a step without quantization, estimated as three forward passes.
    """

    sites: tuple[SiteCalibration, ...]
    units: tuple[UnitCalibration, ...]
    tensors: tuple[KeptTensors, ...]
    step_time_s: float

    def saved_nbytes(
        self, codecs: Mapping[str, str], recomputed: Collection[str] = ()
    ) -> tuple[int, int]:
        """Return the bytes at the end of the forward pass, and those of the largest recomputed
        module while its backward runs.

        ``codecs`` are by site; others, and those in ``recomputed`` modules, keep full precision.
        """
        inside = tuple(f"{unit}." for unit in recomputed)
        coded = {
            site: codec
            for site, codec in codecs.items()
            if not site.startswith(inside) and site not in recomputed
        }
        held = [tensors for tensors in self.tensors if tensors.kept(coded, recomputed)]
        by_name = {site.name: site for site in self.sites}
        codes = sum(by_name[s].measurement(codec).nbytes for s, codec in coded.items())
        again = dict.fromkeys(recomputed, 0)
        for tensors in self.tensors:
            if recomputed and not tensors.kept(coded, recomputed):
                for unit in {u for saver in tensors.savers for u in saver.inside if u in again}:
                    again[unit] += tensors.nbytes
        return sum(t.nbytes for t in held) + codes, max(again.values(), default=0)

    def to_dict(self) -> dict[str, Any]:
        """Return dicts, lists, strings and numbers, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ActivationCalibration:
        """Return a calibration from the result of ``to_dict``, also through JSON."""
        read: ActivationCalibration = from_plain(cls, data)
        return read

    def table(self) -> str:
        """Return a readable table: by site and codec the bytes, the time and the errors."""
        lines = [f"{'site':44} {'kept as':16} {'KiB':>10} {'us':>8}  relative gradient errors"]
        for site in self.sites:
            kept = f"{site.kept_nbytes / 1024:.1f}"
            lines.append(f"{site.name[-44:]:44} {'full precision':16} {kept:>10} {0:8.1f}")
            for each in site.codecs:
                errors = ", ".join(f"{name} {error:.4f}" for name, error in each.errors.items())
                numbers = f"{each.nbytes / 1024:10.1f} {each.time_s * 1e6:8.1f}"
                lines.append(f"{'':44} {each.codec:16} {numbers}  {errors}")
        for unit in self.units:
            lines.append(f"{unit.name[-44:]:44} {'recompute':16} {'':10} {unit.time_s * 1e6:8.1f}")
        return "\n".join(lines)


def average_ranks(ranks: Sequence[ActivationCalibration]) -> ActivationCalibration:
    """Return means of errors and times, and maxima of bytes, over ranks.

    Raises ``RuntimeError`` if the ranks measured different models.
    """
    for other in ranks[1:]:
        _check_alike(asdict(ranks[0]), asdict(other), "")
    averaged: ActivationCalibration = average_values(ranks)
    return averaged


def _check_alike(first: Any, other: Any, key: str) -> None:
    if isinstance(first, dict):
        alike = first.keys() == other.keys()
        pairs = [(name, first[name], other.get(name)) for name in first]
    elif isinstance(first, (list, tuple)):
        alike = len(first) == len(other)
        pairs = [(key, a, b) for a, b in zip(first, other, strict=False)]
    else:
        alike = not isinstance(first, str) or first == other
        pairs = []
    if not alike:
        raise RuntimeError(
            f"The ranks calibrate different models: {key!r} is {first!r} on the first rank and "
            f"{other!r} on another. Every rank must call with the same model and candidates."
        )
    for name, a, b in pairs:
        _check_alike(a, b, name)


def average_values(values: Sequence[Any]) -> Any:
    """Return means of floats, maxima of whole numbers and the first of strings over ranks, also
    inside of dataclasses, dictionaries, lists and tuples.
    """
    first = values[0]
    if is_dataclass(first):
        names = [each.name for each in fields(first)]
        means = [average_values([getattr(value, name) for value in values]) for name in names]
        kind: Any = type(first)
        return kind(**dict(zip(names, means, strict=True)))
    if isinstance(first, dict):
        return {name: average_values([value[name] for value in values]) for name in first}
    if isinstance(first, (list, tuple)):
        return type(first)(map(average_values, zip(*values, strict=True)))
    if isinstance(first, str):
        return first
    if isinstance(first, int):
        return max(values)
    return math.fsum(values) / len(values)
