"""Errors of gradients that codes of activations cause, measured while a backward pass runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lq_lightning.codecs import CodecSpec
from lq_lightning.kernels.activation import (
    activation_backward,
    activation_dequantize,
    activation_quantize,
)
from lq_lightning.kernels.norm import norm_backward, norm_dequantize, norm_quantize

from .accounting import mark_output, marked_site, measured_site
from .backward import backward_to
from .functions import NormLayer, as_matrix, encode_source
from .patterns import ACTIVATIONS
from .policy import CODECS, fit_codec
from .sites import ActivationSite, LinearSite, MLPSite, NormSite, Site

__all__ = ["SiteGradients", "gradient_errors", "sampled_rows", "site_gradients"]

_FACTORS = ("x", "gate", "up")
_GOLDEN = 0.6180339887498949

Errors = dict[str, dict[str, float]]  # by codec, by gradient


@dataclass(kw_only=True, slots=True)
class _Record:
    """What one call of a site leaves for its backward.

    Attributes:
        site: whose call it is.
        codecs: to be measured.
        wanted: the input, and the weight, have gradients.
        tensors: sampled rows of ``x``, or ``gate`` and ``up``; weight and bias of a norm.
        readers: by name of a linear layer, sampled rows of the gradient of its output.
        heard: names of these layers, known since the forward pass.
    """

    site: Site
    codecs: tuple[str, ...]
    wanted: tuple[bool, bool] = (True, False)
    tensors: dict[str, Tensor | None] = field(default_factory=dict)
    readers: dict[str, Tensor] = field(default_factory=dict)
    heard: set[str] = field(default_factory=set)

    def get(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        if tensor is None:
            raise AssertionError(f"{self.site.name} recorded no {name}")
        return tensor


def sampled_rows(x: Tensor, max_rows: int) -> Tensor:
    """Return up to ``max_rows`` rows of ``x`` as fp32, one of each of as many equal parts.

    Which one differs from part to part (multiples of the golden ratio): at equal distances all
    first tokens of sequences, which often are outliers, would be among them, or none.
    """
    rows = as_matrix(x.detach())
    count = min(rows.shape[0], max_rows)
    parts = torch.arange(count, device=x.device, dtype=torch.float64)
    index = (parts + (parts * _GOLDEN).frac()) * rows.shape[0] / max(1, count)
    index = index.long() if count < rows.shape[0] else torch.arange(count, device=x.device)
    return rows[index].float()


def _relative(difference: Tensor, exact: Tensor) -> float:
    norm = float(exact.double().norm())
    error = float(difference.double().norm())
    return error / norm if norm else 0.0 if error == 0.0 else math.inf


def _weight_errors(record: _Record, exact: Tensor, rebuilt: Tensor) -> Iterator[tuple[str, float]]:
    """Errors of the weight gradients ``dy.T @ x`` of the linear layers that read the output.

    The norm of a product ``A.T @ B`` is that of ``(A @ A.T) * (B @ B.T)``, summed: matrices of few
    sampled rows instead of a gradient.
    """
    difference = rebuilt - exact
    gram, gram_exact = difference @ difference.t(), exact @ exact.t()
    for name, dy in record.readers.items():
        outer = (dy @ dy.t()).double()
        square = max(0.0, float((outer * gram.double()).sum()))
        whole = max(0.0, float((outer * gram_exact.double()).sum()))
        yield name, math.sqrt(square / whole) if whole else 0.0


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: NormLayer) -> Tensor:
    if layer.kind == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, layer.eps)
    y = F.rms_norm(x, x.shape[-1:], None, layer.eps)
    if weight is None:
        return y
    return y * (1.0 + weight if layer.kind == "rms_offset" else weight)


@dataclass(frozen=True, slots=True)
class SiteGradients:
    """What a site's backward makes of ``dy``, in fp32.

    Attributes:
        made: gradients by name, ``"input"`` and ``"weight"`` of a norm, ``"gate"`` and ``"up"``.
        output: ``[R, N]``, what the linear layers behind the site multiply ``dy`` with.
    """

    made: dict[str, Tensor]
    output: Tensor


def site_gradients(
    site: Site, tensors: Mapping[str, Tensor | None], dy: Tensor, codec: CodecSpec | None
) -> SiteGradients:
    """Return the gradients that a norm, an activation function or an MLP makes.

    Args:
        site: Which.
        tensors: fp32: ``x``, ``weight`` and ``bias`` of a norm, ``x`` of an activation function,
            ``gate`` and ``up`` of an MLP; rows ``[R, N]``.
        dy: ``[R, N]`` fp32, the gradient of the output.
        codec: Of what is kept; None for exact gradients.
    """
    given = {name: None if t is None else t.detach() for name, t in tensors.items()}
    if isinstance(site, NormSite):
        return _norm_gradients(site.layer, given, dy, codec)
    if not isinstance(site, (ActivationSite, MLPSite)):
        raise AssertionError(f"{site.name} is neither a norm nor an activation function")
    return _activation_gradients(site.activation, given, dy, codec)


def _norm_gradients(
    layer: NormLayer, given: dict[str, Tensor | None], dy: Tensor, codec: CodecSpec | None
) -> SiteGradients:
    x, weight, bias = given["x"], given["weight"], given["bias"]
    if x is None:
        raise AssertionError("a norm has an input")
    if codec is None:
        leaves = [t.requires_grad_() for t in (x, weight) if t is not None]
        with torch.enable_grad():
            y = _norm(x, weight, bias, layer)
        made = torch.autograd.grad(y, leaves, dy)
        return SiteGradients(dict(zip(("input", "weight"), made, strict=False)), y.detach())
    format = str(fit_codec(codec, x.shape[-1]).message_format)
    _, rstd, message, _ = norm_quantize(
        x, weight, bias, layer.eps, layer.kind, format, torch.float32, False
    )
    dx, dweight, _ = norm_backward(
        message, rstd, dy, weight, layer.kind, format, torch.float32, weight is not None
    )
    rebuilt = norm_dequantize(
        *(message, rstd, weight, bias, x.shape[-1], layer.kind, format),
        *(torch.float32, torch.float32),
    )
    return SiteGradients(
        {"input": dx} if weight is None else {"input": dx, "weight": dweight}, rebuilt
    )


def _activation_gradients(
    activation: str, given: dict[str, Tensor | None], dy: Tensor, codec: CodecSpec | None
) -> SiteGradients:
    inputs = {name: t for name, t in given.items() if t is not None and name in _FACTORS}
    x, up = inputs.get("gate", inputs.get("x")), inputs.get("up")
    if x is None:
        raise AssertionError("an activation function has an input")
    names = ("input",) if "x" in inputs else ("gate", "up")
    if codec is None:
        leaves = [t.requires_grad_() for t in (x, up) if t is not None]
        with torch.enable_grad():
            y = ACTIVATIONS[activation](x)
            y = y if up is None else y * up
        made = torch.autograd.grad(y, leaves, dy)
        return SiteGradients(dict(zip(names, made, strict=False)), y.detach())
    format = str(fit_codec(codec, x.shape[-1]).message_format)
    _, message, up_message, _ = activation_quantize(x, up, activation, format, False)
    changed = activation_backward(message, up_message, dy, activation, format, False)
    rebuilt = activation_dequantize(
        message, up_message, *x.shape, activation, format, torch.float32
    )
    count = 1 if up is None else 2
    return SiteGradients(dict(zip(names, changed[:count], strict=False)), rebuilt)


def _site_errors(record: _Record, dy: Tensor) -> Errors:
    exact = site_gradients(record.site, record.tensors, dy, None)
    is_norm = isinstance(record.site, NormSite)
    wanted = dict(zip(("input", "weight"), record.wanted, strict=True)) if is_norm else {}
    errors: Errors = {}
    for codec in record.codecs:
        coded = site_gradients(record.site, record.tensors, dy, CODECS[codec])
        found = errors[codec] = {
            name: _relative(coded.made[name] - made, made)
            for name, made in exact.made.items()
            if wanted.get(name, True)
        }
        found.update(_weight_errors(record, exact.output, coded.output))
    return errors


def _linear_errors(record: _Record, dy: Tensor) -> Errors:
    x = record.get("x")
    record.readers = {"weight": dy}
    errors: Errors = {}
    for codec in record.codecs:
        source = encode_source(x, str(fit_codec(CODECS[codec], x.shape[-1]).message_format))
        rebuilt = source.codes.rebuild(source.tensors, x.shape[0], torch.float32)
        errors[codec] = dict(_weight_errors(record, x, rebuilt))
    return errors


class _Recorder:
    def __init__(
        self, model: nn.Module, candidates: Mapping[str, tuple[str, ...]], max_rows: int
    ) -> None:
        self.candidates = candidates
        self.max_rows = max_rows
        self.records: dict[str, _Record] = {}
        self.outputs: list[GradientEdge] = []
        self.errors: dict[str, Errors] = {}
        self.listening = True
        self.parts: dict[int, tuple[str, str]] = {}  # of gated MLPs: site and role, by projection
        for module in model.modules():
            if isinstance(site := measured_site(module), MLPSite):
                for role in ("gate", "up", "down"):
                    child = getattr(module, getattr(site, role) or "", None)
                    if child is not None:
                        self.parts.setdefault(id(child), (site.name, role))

    def sample(self, x: Tensor) -> Tensor:
        return sampled_rows(x, self.max_rows)

    def record(self, site: Site) -> _Record | None:
        if site.name not in self.candidates or site.name in self.records:
            return None
        record = _Record(site=site, codecs=self.candidates[site.name])
        self.records[site.name] = record
        return record

    def watch(self, record: _Record, output: Tensor) -> None:
        """Measure once the gradient of a site's output is there: those of its readers are then."""
        if output.requires_grad:
            output.register_hook(partial(self.measure, record))  # type: ignore[no-untyped-call]
            self.outputs.append(get_gradient_edge(output))

    def measure(self, record: _Record, gradient: Tensor) -> None:
        measures: dict[type[Site], Callable[[_Record, Tensor], Errors]] = {
            NormSite: _site_errors,
            ActivationSite: _site_errors,
            MLPSite: _site_errors,
            LinearSite: _linear_errors,
        }
        with torch.autocast(gradient.device.type, enabled=False), torch.no_grad():
            dy = self.sample(gradient)
            self.errors[record.site.name] = measures[type(record.site)](record, dy)
        record.tensors.clear()
        record.readers.clear()

    def enter(self, module: nn.Module, args: Any) -> None:
        site = measured_site(module)
        if not self.listening or site is None or not args:  # a recomputation is no new call
            return
        x: Tensor = args[0]
        part = self.parts.get(id(module))
        if part is not None and part[1] == "down":
            if (record := self.records.get(part[0])) is not None and "y" not in record.tensors:
                record.tensors["y"] = None
                self.watch(record, x)
        elif isinstance(site, MLPSite):
            self.record(site)
        elif isinstance(site, LinearSite):
            if not marked_site(x) and (record := self.record(site)) is not None:
                record.tensors["x"] = self.sample(x)
        elif (record := self.record(site)) is not None:
            record.tensors["x"] = self.sample(x)
            weight = None
            for name in ("weight", "bias") if isinstance(site, NormSite) else ():
                key = getattr(site, name)
                p = None if key is None else getattr(module, key)
                weight = p if name == "weight" else weight
                record.tensors[name] = None if p is None else p.detach().clone().float()
            record.wanted = (x.requires_grad, weight is not None and weight.requires_grad)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        site = measured_site(module)
        if not self.listening or site is None or not isinstance(output, Tensor):
            return
        if isinstance(site, (NormSite, ActivationSite)):
            mark_output(output, site.name)
        own = self.records.get(site.name)
        if own is not None and not isinstance(site, MLPSite) and "y" not in own.tensors:
            own.tensors["y"] = None
            self.watch(own, output)
        if isinstance(site, LinearSite):
            self.leave_linear(module, site, args[0], output)

    def leave_linear(self, module: nn.Module, site: LinearSite, x: Any, output: Tensor) -> None:
        owner, role = self.parts.get(id(module), ("", ""))
        record = self.records.get(owner)
        if record is not None and role == "gate" and "gate" not in record.tensors:
            made = self.sample(output)
            if isinstance(record.site, MLPSite) and record.site.gate == record.site.up:
                record.tensors["gate"], record.tensors["up"] = made.chunk(2, dim=-1)
            else:
                record.tensors["gate"] = made
        elif record is not None and role == "up" and "up" not in record.tensors:
            record.tensors["up"] = self.sample(output)
        reader = self.records.get(owner if role == "down" else marked_site(x))
        weight: Any = module.weight
        wanted = output.requires_grad and weight.requires_grad
        if reader is not None and wanted and site.name not in reader.heard:
            reader.heard.add(site.name)

            def read(gradient: Tensor) -> None:
                reader.readers[site.name] = self.sample(gradient)

            output.register_hook(read)  # type: ignore[no-untyped-call]


@contextmanager
def _listening(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    handles: list[RemovableHandle] = []
    try:
        for module in model.modules():
            if measured_site(module) is not None:
                handles.append(module.register_forward_pre_hook(recorder.enter))
                handles.append(module.register_forward_hook(recorder.leave))
        yield
    finally:
        for handle in handles:
            handle.remove()


def gradient_errors(
    model: nn.Module,
    run: Callable[[], Tensor],
    candidates: Mapping[str, tuple[str, ...]],
    max_rows: int,
) -> dict[str, Errors]:
    """Run forward and backward once and measure what codes would do to gradients.

    Gradients flow to the outputs of the first sites and no further: parameters get none, and what
    hooks into their accumulation notices nothing. All arithmetic behind the errors is fp32.

    Args:
        model: whose sites keep full precision now.
        run: returns a loss.
        candidates: codecs by name of the site.
        max_rows: rows of a call that errors are measured on, see ``sampled_rows``.

    Returns:
        By site, by codec, by gradient the relative L2 error. Sites that the loss does not depend on
        are missing.

    Raises:
        RuntimeError: A gradient is not finite, or the loss needs none.
    """
    recorder = _Recorder(model, candidates, max_rows)
    try:
        with _listening(model, recorder):
            loss = run()
            recorder.listening = False
            backward_to(loss, recorder.outputs)
    finally:
        recorder.outputs.clear()  # the graph has hooks that refer to the recorder
    for name, errors in recorder.errors.items():
        for codec, found in errors.items():
            if not all(math.isfinite(error) for error in found.values()):
                raise RuntimeError(
                    f"The gradients of `{name}` with {codec} are not finite ({found}): calibrate "
                    "with a batch whose loss and gradients are."
                )
    return recorder.errors
