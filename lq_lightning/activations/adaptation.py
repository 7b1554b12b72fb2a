"""Give sites more bits whose codes change the gradients of the user's model too much.

While one batch trains as always, each site that keeps a code hands in what it encodes. A few rows
of it are kept until backward, where the gradients that exact values and codes make are compared.
Nothing runs twice, nothing that the batch computes changes.

Errors of different sites are independent, so that their squares add up to that of all gradients.
The square of one site has two parts:

- its own: errors of the weight gradients ``dy.T @ y`` of the linear layers that read its output;
- upstream: the error of the gradient of its input, against the whole gradient there, is in every
  weight gradient before it. Rounding errors of different tokens are uncorrelated, the exact
  contributions of tokens to a weight gradient are not. So the error is a share not of the exact
  gradient but of what that would be if tokens were uncorrelated, the smaller the more tokens.

Errors are taken to pass the layers below unchanged, and one rank's batch to be all there is.
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

from lq_lightning.codecs import CodecSpec
from lq_lightning.codecs.spec import Code
from lq_lightning.foundation.agreement import gather_objects

from .accounting import mark_output, marked_site
from .calibration import average_values
from .gradient_errors import sampled_rows, site_gradients
from .sites import ActivationSite, MLPSite, NormSite, Site

__all__ = [
    "Adaptation",
    "SiteError",
    "expected_errors",
    "note_call",
    "note_reader",
    "is_adaptable",
    "widen",
    "wider_codes",
]

MAX_ERROR = 0.08
# Of models from random weights 0.08 to 0.10 is expected, 0.06 to 0.08 is true. Of a pretrained one
# 0.26 and 0.185 (SmolLM2-135M; benchmarks/pretrained.py).
_TOLERANCE = 1.5
_WIDTHS = (5, 6, 8)
_MAX_ROWS, _MIN_ROWS = 1024, 64


def _bits(codec: CodecSpec | None) -> int:
    """Of an integer code; 0 of any other, which is never changed."""
    code = "" if codec is None else codec.code
    return int(code.removeprefix("int")) if code.startswith("int") else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteError:
    """What a site's code did in one batch; squared norms.

    Attributes:
        name: of the site.
        is_norm: whether it is a normalization layer.
        bits: of its code, 0 if that is no integer.
        values: of a row that are codes.
        weights: weight gradients of the linear layers that read its output.
        weight_error: errors of these.
        by_row: sum of what each row of the batch contributes to ``weights`` by itself.
        input_error: error of the gradient of the input, relative to that gradient.
        branch: gradient that a norm passes on, relative to all of the gradient of its input, which
            has a residual connection around the norm in it; 1 for others.
    """

    name: str
    is_norm: bool
    bits: int
    values: int
    weights: float
    weight_error: float
    by_row: float
    input_error: float
    branch: float


def expected_errors(sites: Sequence[SiteError]) -> dict[str, float]:
    """Return by site the squared error that its code causes, relative to all gradients.

    Args:
        sites: In the order of their forward passes.
    """
    total = math.fsum(site.weights for site in sites)
    expected: dict[str, float] = {}
    upstream, behind_norm = 0.0, 0.0  # gradients by row: before a site; as the norm before sees it
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
    """Choose more bits for as few bytes as possible, so that errors stay within a bound.

    A bit more halves an error. The site whose error shrinks most per byte gets the next width of 5,
    6 and 8 bits, until the bound is met or all have 8. What is expected is up to half more than is
    true: up to there, nothing changes.

    Args:
        sites: In the order of their forward passes.
        max_error: Of all gradients together, relative.

    Returns:
        Bits by site, of those that change.
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
    """What one call of a site leaves for its backward.

    Attributes:
        site: whose call it is.
        count: of sampled rows.
        scale: how many times as many there are.
        tensors: what the site encodes, ``[count, N]`` fp32, and a norm's weight and bias.
        readers: gradients of the outputs of linear layers behind it, ``[count, O]``.
        passed_on: squared norm of the gradient that the site makes of its input.
        found: fields of ``SiteError``, once they are measured.
    """

    site: Site
    count: int
    scale: float
    tensors: dict[str, Tensor | None]
    readers: list[Tensor] = field(default_factory=list)
    passed_on: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Adaptation:
    """Measures one batch, then widens codes; see ``QuantizedActivations.adapt``.

    Attributes:
        max_error: bound on the expected relative error of all gradients together.
        model_sites: of the model.
        sites: what was measured, on average over ranks; in the order of the forward pass.
        bits: of sites that got wider codes, by name.
        unmeasured: sites with codes that took no part, or only compiled or without a gradient, or
            before which no norm has a code: what share of all gradients theirs are is not known.
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

    def start(self) -> None:
        """Let sites hand in what they encode from now on."""
        global _active
        _active = self

    def stop(self) -> None:
        """Take no more."""
        global _active
        if _active is self:
            _active = None
        while self._hooks:  # parameters, and graphs that are kept, live on
            self._hooks.pop().remove()

    def call(self, site: Site, output: Tensor, tensors: Mapping[str, Tensor | None]) -> None:
        """Keep rows of a call until the gradient of its output is there."""
        rows = output.numel() // max(1, output.shape[-1])
        if site.name in self._calls or not output.requires_grad or not rows:
            return  # unmarked: readers of another call have other rows
        mark_output(output, site.name)
        # samples of all sites take as much memory as two of them in full: less than a block does
        coded = sum(map(is_adaptable, self.model_sites))
        count = min(rows, _MAX_ROWS, max(_MIN_ROWS, 2 * rows // max(1, coded)))
        kept = {name: None if t is None else _kept(name, t, count) for name, t in tensors.items()}
        call = _Call(site=site, count=count, scale=rows / count, tensors=kept)
        self._calls[site.name] = call
        handle = output.register_hook(partial(self._measure, call))  # type: ignore[no-untyped-call]
        self._hooks.append(handle)
        x = tensors.get("x")
        if isinstance(site, NormSite) and x is not None and x.requires_grad:

            def whole(gradient: Tensor) -> None:
                if call.passed_on and (square := _square(sampled_rows(gradient, count))):
                    call.found["branch"] = call.passed_on / square

            self._hooks.append(x.register_hook(whole))  # type: ignore[no-untyped-call]

    def reader(self, x: Tensor, output: Tensor) -> None:
        """Keep rows of the gradient of a linear layer that reads a site's output."""
        call = self._calls.get(marked_site(x))
        if call is None or call.found or not output.requires_grad:
            return

        def read(gradient: Tensor) -> None:
            call.readers.append(sampled_rows(gradient, call.count))

        self._hooks.append(output.register_hook(read))  # type: ignore[no-untyped-call]

    def _measure(self, call: _Call, gradient: Tensor) -> None:
        if call.found or not call.tensors:
            return
        with torch.autocast(gradient.device.type, enabled=False), torch.no_grad():
            dy = sampled_rows(gradient, call.count)
            exact = site_gradients(call.site, call.tensors, dy, None)
            coded = site_gradients(call.site, call.tensors, dy, call.site.codec)
            made = [n for n in exact.made if n != "weight"]
            error = sum(_square(coded.made[n] - exact.made[n]) for n in made)
            call.passed_on = sum(_square(exact.made[n]) for n in made)
            weights = [_product(each, exact.output, call.scale) for each in call.readers]
            difference = coded.output - exact.output
            errors = [_product(each, difference, call.scale)[0] for each in call.readers]
        self._found[call.site.name] = call.found
        call.found.update(
            name=call.site.name,
            is_norm=isinstance(call.site, NormSite),
            bits=_bits(call.site.codec),
            values=exact.output.shape[-1] * (2 if "up" in exact.made else 1),
            weights=math.fsum(whole for whole, _ in weights),
            weight_error=math.fsum(errors),
            by_row=math.fsum(rows for _, rows in weights),
            input_error=error / call.passed_on if call.passed_on else 0.0,
            branch=1.0,
        )
        call.tensors.clear()
        call.readers.clear()

    def finish(self) -> None:
        """Stop, average over ranks, choose bits and apply them; all ranks have to call."""
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
        """Relative error of all gradients together with the codes that were measured."""
        return self._expected({})

    @property
    def chosen(self) -> float:
        """The same with the codes that were chosen."""
        return self._expected(self.bits)

    def _expected(self, bits: Mapping[str, int]) -> float:
        errors = expected_errors(self.sites)
        shrunk = (errors[s.name] * 4.0 ** (s.bits - bits.get(s.name, s.bits)) for s in self.sites)
        return math.sqrt(math.fsum(shrunk))

    def summary(self) -> str:
        """Return what was measured and changed, a line for each site that gets other codes."""
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


def _product(dy: Tensor, y: Tensor, scale: float) -> tuple[float, float]:
    """Squared norm of ``dy.T @ y`` over all rows, and the sum of those of single rows.

    That of a product ``A.T @ B`` is ``(A @ A.T) * (B @ B.T)``, summed. Of ``scale`` times as many
    rows there are ``scale`` times as many terms on the diagonal, and its square off it.
    """
    terms = (dy @ dy.t()).double() * (y @ y.t()).double()
    rows = float(terms.diagonal().sum())
    across = float(terms.sum()) - rows
    whole = scale * rows + scale * scale * across
    return 0.0 if whole < 0.0 else whole, scale * rows  # NaN stays


def widen(sites: Sequence[Site], bits: Mapping[str, int]) -> None:
    """Give integer codes of sites more bits, from the next forward pass on.

    Args:
        sites: Of a model.
        bits: By name of the site; names that are not there, as of other stages, are left out.
    """
    for site in sites:
        if site.codec is not None and 0 < _bits(site.codec) < bits.get(site.name, 0):
            site.codec = replace(site.codec, code=cast(Code, f"int{bits[site.name]}"))


_active: Adaptation | None = None


def note_call(site: Site, output: Tensor, **tensors: Tensor | None) -> None:
    """Tell the batch that is measured, if one is, what a site encodes and returns.

    Args:
        site: A norm, an activation function or an MLP.
        output: ``[..., N]``, what linear layers read.
        tensors: ``x``, ``weight`` and ``bias``, or ``gate`` and ``up``.
    """
    if not torch.compiler.is_compiling() and _active is not None:
        _active.call(site, output, tensors)


def note_reader(x: Tensor, output: Tensor) -> None:
    """Tell the batch that is measured, if one is, of a linear layer with a weight gradient."""
    if not torch.compiler.is_compiling() and _active is not None:
        _active.reader(x, output)


def is_adaptable(site: Site) -> bool:
    """Return whether a site keeps a code that can be measured and widened."""
    return isinstance(site, (NormSite, ActivationSite, MLPSite)) and _bits(site.codec) > 0
