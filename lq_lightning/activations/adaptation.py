"""Give more bits to sites whose codes change the gradients of the user's model too much.

While one batch trains as usual, each site that keeps a code hands in what it encodes. A few rows
of it are kept until backward, where the gradients from exact values and from codes are compared.
Nothing runs twice, and the batch computes what it would without.

Errors of different sites are independent, so that their squares add up to that of all gradients.
The square of one site has two parts:

- its own: errors of the weight gradients ``dy.T @ y`` of the linear layers that read its output;
- upstream: the error of the gradient of its input, relative to the whole gradient there, is in
  every weight gradient before it. Rounding errors of different tokens are uncorrelated, the exact
  contributions of tokens to a weight gradient are not. So the error is relative not to the exact
  gradient but to what that would be if tokens were uncorrelated: the more tokens, the smaller.

Errors are taken to pass the layers below unchanged, and one rank's batch to be the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lq_lightning.codecs import CodecSpec
from lq_lightning.codecs.spec import Code
from lq_lightning.foundation.agreement import gather_objects

from .calibration import average_values
from .gradient_errors import coded_gradients, exact_gradients, sampled_rows
from .measure import mark_output, marked_site
from .sites import ActivationSite, MLPSite, NormSite, Site
from .sources import ORIGIN, Observer, own_rows_of, part_of

MAX_ERROR = 0.08
# Models with random weights: 0.08 to 0.10 expected, 0.06 to 0.08 true. A pretrained one: 0.26 and
# 0.185 (SmolLM2-135M; benchmarks/pretrained.py).
_TOLERANCE = 1.5
_WIDTHS = (5, 6, 8)
_MAX_ROWS, _MIN_ROWS = 1024, 64


def _bits(codec: CodecSpec | None) -> int:
    """Bits of an integer code; 0 for any other code, which never changes."""
    code = "" if codec is None else codec.code
    return int(code.removeprefix("int")) if code.startswith("int") else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteError:
    """Effect of a site's code in one batch, in squared norms.

    ``weights`` and ``weight_error`` are of the weight gradients of the linear layers that read the
    output, ``by_row`` the sum over rows of each row's own contribution to ``weights``.
    ``input_error`` is relative to the gradient of the input. ``branch`` is the gradient that a norm
    passes on, relative to the whole gradient of its input, which includes a residual connection
    around the norm; 1 for others. ``values`` are encoded per row on a rank, on average; ``bits`` is
    0 for codes that are no integers.
    """

    name: str
    is_norm: bool
    bits: int
    values: float
    weights: float
    weight_error: float
    by_row: float
    input_error: float
    branch: float


def expected_errors(sites: Sequence[SiteError]) -> dict[str, float]:
    """Return by site, in forward order, the squared error of its code relative to all gradients."""
    total = math.fsum(site.weights for site in sites)
    expected: dict[str, float] = {}
    upstream = 0.0  # row gradients before a site,
    behind_norm = 0.0  # and as the norm before it sees them
    for site in sites:
        if site.is_norm:
            reached = site.branch * upstream
            behind_norm = site.by_row + reached
        else:
            reached = behind_norm
        square = site.weight_error + site.input_error * reached
        expected[site.name] = square / total if total else 0.0
        upstream += site.by_row
    return expected


def wider_codes(sites: Sequence[SiteError], max_error: float) -> dict[str, int]:
    """Choose more bits, in as few bytes as possible, to keep errors within a bound.

    One more bit halves an error. The site whose error shrinks most per byte gets the next width of
    5, 6 and 8 bits, until the bound is met or all have 8. The expected error is up to half larger
    than the true one: up to there, nothing changes. Returns new bits by site, only where they
    change.
    """
    errors, bits = expected_errors(sites), {site.name: site.bits for site in sites if site.bits}
    values = {site.name: site.values for site in sites}

    def step(name: str) -> tuple[float, str, int, float]:
        width = next(width for width in _WIDTHS if width > bits[name])
        error = errors[name] * 4.0 ** (bits[name] - width)
        gain = (errors[name] - error) / (values[name] * (width - bits[name]))
        return gain, name, width, error

    changed: dict[str, int] = {}
    if math.fsum(errors.values()) <= (_TOLERANCE * max_error) ** 2:
        return changed
    while math.fsum(errors.values()) > max_error**2:
        steps = [step(name) for name in bits if bits[name] < _WIDTHS[-1] and errors[name] > 0.0]
        if not steps:
            break
        _, name, width, error = max(steps)
        bits[name] = changed[name] = width
        errors[name] = error
    return changed


@dataclass(kw_only=True, slots=True)
class _Call:
    """One call of a site, until its backward: ``count`` sampled rows of the encoded tensors, fp32,
    and the gradients of the outputs of linear layers behind it.

    ``ranks`` have other rows of the same tensors. ``scale`` is all rows over sampled rows,
    ``passed_on`` the squared norm of the gradient that the site makes of its input, ``found`` the
    fields of ``SiteError`` once they are measured.
    """

    site: Site
    count: int
    scale: float
    ranks: int
    tensors: dict[str, Tensor | None]
    readers: list[tuple[Tensor, int]] = field(default_factory=list)  # with the weight's shards
    passed_on: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Adaptation(Observer):
    """Measures one batch, then widens codes; see ``QuantizedActivations.adapt``.

    Attributes:
        max_error: bound on the expected relative error of all gradients together.
        model_sites: sites of the model.
        sites: measurements, averaged over ranks; in the order of the forward pass.
        bits: bits of the sites that got wider codes, by name.
        unmeasured: sites with codes that took no part, or only compiled or without a gradient, or
            before which no norm has a code: their share of all gradients is not known.
        reason: why nothing could be measured; empty otherwise.
    """

    max_error: float
    model_sites: list[Site]
    sites: tuple[SiteError, ...] = ()
    bits: dict[str, int] = field(default_factory=dict)
    unmeasured: tuple[str, ...] = ()
    reason: str = ""
    _calls: dict[str, _Call] = field(default_factory=dict)
    _found: dict[str, dict[str, Any]] = field(default_factory=dict)  # the last site first
    _hooks: list[RemovableHandle] = field(default_factory=list)

    @override
    def stop(self) -> None:
        Observer.stop(self)
        while self._hooks:  # parameters and retained graphs outlive the batch
            self._hooks.pop().remove()

    @override
    def call(
        self, site: Site, output: Tensor, tensors: Mapping[str, Tensor | None], ranks: int
    ) -> None:
        rows = output.numel() // max(1, output.shape[-1])
        if site.name in self._calls or not output.requires_grad or not rows:
            return  # not marked: readers of another call have other rows
        mark_output(output, site.name)
        # samples of all sites take as much memory as two of them in full: less than a block does
        coded = sum(map(is_adaptable, self.model_sites))
        count = min(rows, _MAX_ROWS, max(_MIN_ROWS, 2 * rows // max(1, coded)))
        kept = {name: None if t is None else _kept(name, t, count) for name, t in tensors.items()}
        scale = ranks * rows / count
        call = _Call(site=site, count=count, scale=scale, ranks=ranks, tensors=kept)
        self._calls[site.name] = call
        handle = output.register_hook(partial(self._measure, call))  # type: ignore[no-untyped-call]
        self._hooks.append(handle)
        x = tensors.get("x")
        if isinstance(site, NormSite) and x is not None and x.requires_grad:

            def whole(gradient: Tensor) -> None:
                if call.passed_on and (square := _square(sampled_rows(gradient, count))):
                    call.found["branch"] = call.passed_on / square

            origin: Tensor = getattr(x, ORIGIN, x)
            self._hooks.append(origin.register_hook(whole))  # type: ignore[no-untyped-call]

    @override
    def reader(self, x: Tensor, output: Tensor, shards: int = 1) -> None:
        call = self._calls.get(marked_site(x))
        if call is None or call.found or not output.requires_grad:
            return
        part = part_of(x)

        def read(gradient: Tensor) -> None:
            call.readers.append((sampled_rows(own_rows_of(gradient, part), call.count), shards))

        self._hooks.append(output.register_hook(read))  # type: ignore[no-untyped-call]

    def _measure(self, call: _Call, gradient: Tensor) -> None:
        if call.found or not call.tensors:
            return
        with torch.autocast(gradient.device.type, enabled=False), torch.no_grad():
            dy = sampled_rows(gradient, call.count)
            exact = exact_gradients(call.site, call.tensors, dy)
            coded = coded_gradients(call.site, call.tensors, dy, call.site.format(dy.shape[-1]))
            made = [n for n in exact.made if n != "weight"]
            error = sum(_square(coded.made[n] - exact.made[n]) for n in made)
            call.passed_on = sum(_square(exact.made[n]) for n in made)
            weights = _products(call, exact.output)
            errors = _products(call, coded.output - exact.output)
        self._found[call.site.name] = call.found
        call.found.update(
            name=call.site.name,
            is_norm=isinstance(call.site, NormSite),
            bits=_bits(call.site.codec),
            values=exact.output.shape[-1] * (2 if "up" in exact.made else 1) / call.ranks,
            weights=math.fsum(whole for whole, _ in weights),
            weight_error=math.fsum(whole for whole, _ in errors),
            by_row=math.fsum(rows for _, rows in weights),
            input_error=error / call.passed_on if call.passed_on else 0.0,
            branch=1.0,
        )
        call.tensors.clear()
        call.readers.clear()

    def finish(self) -> None:
        """Stop, average over ranks, choose bits and apply them; collective."""
        self.stop()
        # gradients arrive in the reverse order of the forward pass, whatever is recomputed
        ranks = gather_objects(dict(reversed(self._found.items())))
        self._calls, self._found = {}, {}
        names = list(dict.fromkeys(name for found in ranks for name in found))
        sites = [
            SiteError(**average_values([f[name] for f in ranks if name in f])) for name in names
        ]
        first = next((i for i, site in enumerate(sites) if site.is_norm), len(sites))
        self.sites = tuple(sites[first:])
        coded = [site.name for site in self.model_sites if is_adaptable(site)]
        self.unmeasured = tuple(name for name in coded if name not in names[first:])
        if not any(site.weights for site in self.sites):
            self.reason = "no norm made a code in eager code that a weight gradient was made of"
        elif not math.isfinite(math.fsum(expected_errors(self.sites).values())):
            self.reason = "gradients are not finite"
        else:
            self.bits = wider_codes(self.sites, self.max_error)
            widen(self.model_sites, self.bits)

    @property
    def expected(self) -> float:
        """Expected relative error of all gradients together with the measured codes."""
        return math.sqrt(math.fsum(expected_errors(self.sites).values()))

    @property
    def chosen(self) -> float:
        """Expected relative error with the chosen codes."""
        errors, bits = expected_errors(self.sites), self.bits
        shrunk = (errors[s.name] * 4.0 ** (s.bits - bits.get(s.name, s.bits)) for s in self.sites)
        return math.sqrt(math.fsum(shrunk))

    def summary(self) -> str:
        """Return the measurement and the changes, one line for each site that gets another code."""
        if self.reason:
            return f"Gradient errors were not measured: {self.reason}. The recipe stays as it is."
        lines = [
            f"Expected relative error of all gradients: {self.expected:.3f} (at most "
            f"{self.max_error:g})"
        ]
        if self.bits:
            count = f"{len(self.bits)} of {len(self.sites)}"
            lines[0] += f"; {self.chosen:.3f} with more bits at {count}:"
        errors = expected_errors(self.sites)
        for site in self.sites:
            if site.name in self.bits:
                error, bits = math.sqrt(errors[site.name]), self.bits[site.name]
                lines.append(
                    f"  {site.name}: {site.bits} -> {bits} bits, error {error:.4f} -> "
                    f"{error * 2.0 ** (site.bits - bits):.4f}"
                )
        if self.unmeasured:
            lines.append(
                f"{len(self.unmeasured)} sites were not measured and stay as they are (compiled, "
                f"without a gradient, or before any norm), such as `{self.unmeasured[0]}`."
            )
        return "\n".join(lines)


def _kept(name: str, tensor: Tensor, count: int) -> Tensor:
    if name in ("weight", "bias"):  # FSDP2 frees them
        return tensor.detach().float().clone()
    return sampled_rows(tensor, count)


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())


def _products(call: _Call, y: Tensor) -> list[tuple[float, float]]:
    """``_product`` for each reader of a site's output, of all shards of its weight."""
    found = [(shards, *_product(dy, y, call.scale)) for dy, shards in call.readers]
    return [(shards * whole, shards * rows) for shards, whole, rows in found]


def _product(dy: Tensor, y: Tensor, scale: float) -> tuple[float, float]:
    """Squared norm of ``dy.T @ y`` over all rows, and the sum of the squared norms of single rows.

    The squared norm of ``A.T @ B`` is the sum of ``(A @ A.T) * (B @ B.T)``. With ``scale`` times as
    many rows there are ``scale`` times as many terms on the diagonal, and its square off it.
    """
    terms = (dy @ dy.t()).double() * (y @ y.t()).double()
    rows = float(terms.diagonal().sum())
    across = float(terms.sum()) - rows
    whole = scale * rows + scale * scale * across
    return 0.0 if whole < 0.0 else whole, scale * rows  # keeps NaN


def widen(sites: Sequence[Site], bits: Mapping[str, int]) -> None:
    """Give integer codes more bits from the next forward pass on; unknown names are ignored."""
    for site in sites:
        if site.codec is not None and 0 < _bits(site.codec) < bits.get(site.name, 0):
            site.codec = replace(site.codec, code=cast(Code, f"int{bits[site.name]}"))


def is_adaptable(site: Site) -> bool:
    """Return whether a site keeps a code that can be measured and widened."""
    return isinstance(site, (NormSite, ActivationSite, MLPSite)) and _bits(site.codec) > 0
