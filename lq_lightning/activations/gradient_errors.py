"""Errors of gradients that codes of activations cause, measured in a backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
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
from .functions import NormLayer, as_matrix, encode_source
from .policy import CODECS, fit_codec
from .recognize import ACTIVATIONS
from .sites import ActivationSite, LinearSite, MLPSite, NormSite, Site

_FACTORS = ("x", "gate", "up")
_GOLDEN = 0.6180339887498949
Errors = dict[str, dict[str, float]]  # by codec, by gradient


def _roots(loss: Tensor, outputs: list[GradientEdge]) -> list[GradientEdge]:
    """Outputs that depend on no other: a gradient for them runs all backwards in between."""
    wanted = {output.node for output in outputs}
    below: dict[Any, bool] = {}  # whether one of them is below a node
    stack = [loss.grad_fn]
    while stack:
        node = stack[-1]
        if node is None or node in below:
            stack.pop()
            continue
        children = [child for child, _ in node.next_functions if child is not None]
        open_ = [child for child in children if child not in below]
        if open_:
            stack.extend(open_)
            continue
        below[node] = any(child in wanted or below[child] for child in children)
        stack.pop()
    return [output for output in outputs if below.get(output.node) is False]


def backward_to(loss: Tensor, outputs: list[GradientEdge]) -> None:
    """Run the backward pass of a loss down to the first of some tensors, calling hooks on them.

    Parameters get no gradients, and hooks on their accumulation notice nothing. Tensors are given
    as edges: they themselves would stay in memory, and with them the recomputed blocks that they
    are made in.

    Raises:
        RuntimeError: the loss needs no gradient.
    """
    if not loss.requires_grad:
        raise RuntimeError(
            "The loss that `run` returned needs no gradient: return the loss of a training step, "
            "not detached, with parameters that require gradients."
        )
    roots = _roots(loss, outputs)
    if roots:
        torch.autograd.grad(loss, roots, allow_unused=True)


def run_backward(
    model: nn.Module, run: Callable[[], Tensor], reached: Callable[[Tensor], None]
) -> None:
    """Run forward and backward once, down to the outputs of the first sites.

    ``reached`` is called with the gradient of each site's output.
    """
    outputs: list[GradientEdge] = []

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        forward = torch.is_grad_enabled() and listening
        if forward and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(reached)  # type: ignore[no-untyped-call]
            outputs.append(get_gradient_edge(output))

    listening = True
    handles = [m.register_forward_hook(leave) for m in filter(measured_site, model.modules())]
    try:
        loss = run()
        listening = False
        backward_to(loss, outputs)
    finally:
        for handle in handles:
            handle.remove()
        outputs.clear()  # breaks a cycle: the graph's hooks refer to this list


@dataclass(kw_only=True, slots=True)
class _Record:
    """One call of a site, until its backward.

    Attributes:
        site: the called site.
        codecs: codecs to measure.
        wanted: whether the input, and the weight, have gradients.
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

    The squared norm of ``A.T @ B`` is the sum of ``(A @ A.T) * (B @ B.T)``: matrices of few sampled
    rows instead of a gradient.
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
    """Result of a site's backward, in fp32.

    Attributes:
        made: gradients by name, ``"input"`` and ``"weight"`` of a norm, ``"gate"`` and ``"up"``.
        output: ``[R, N]``, by which the linear layers behind the site multiply ``dy``.
    """

    made: dict[str, Tensor]
    output: Tensor


def site_gradients(
    site: Site, tensors: Mapping[str, Tensor | None], dy: Tensor, codec: CodecSpec | None
) -> SiteGradients:
    """Return the gradients that a norm, an activation function or an MLP makes.

    Args:
        site: the site.
        tensors: fp32 rows ``[R, N]``: ``x`` of a norm, with its ``weight`` and ``bias``, or of an
            activation function; ``gate`` and ``up`` of an MLP.
        dy: ``[R, N]`` fp32, the gradient of the output.
        codec: codec of what is kept; None for exact gradients.
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
    x = record.tensors["x"]
    if x is None:
        raise AssertionError(f"{record.site.name} recorded no input")
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
        self.parts: dict[int, tuple[str, str]] = {}  # site and role by projection of an MLP
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
        measure = _linear_errors if isinstance(record.site, LinearSite) else _site_errors
        with torch.autocast(gradient.device.type, enabled=False), torch.no_grad():
            dy = self.sample(gradient)
            self.errors[record.site.name] = measure(record, dy)
        record.tensors.clear()
        record.readers.clear()

    def enter(self, module: nn.Module, args: Any) -> None:
        site = measured_site(module)
        if not self.listening or site is None or not args:  # a recomputation is not a new call
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


def gradient_errors(
    model: nn.Module,
    run: Callable[[], Tensor],
    candidates: Mapping[str, tuple[str, ...]],
    max_rows: int,
) -> dict[str, Errors]:
    """Run forward and backward once and measure the relative L2 error of gradients with codes.

    By site, codec and gradient; in fp32, on up to ``max_rows`` rows of a call (``sampled_rows``).
    Sites keep full precision; gradients flow to the outputs of the first ones (``backward_to``).
    Sites that the loss does not depend on are missing.

    Raises:
        RuntimeError: a gradient is not finite, or the loss needs none.
    """
    recorder = _Recorder(model, candidates, max_rows)
    handles: list[RemovableHandle] = []
    try:
        for module in filter(measured_site, model.modules()):
            handles.append(module.register_forward_pre_hook(recorder.enter))
            handles.append(module.register_forward_hook(recorder.leave))
        loss = run()
        recorder.listening = False
        backward_to(loss, recorder.outputs)
    finally:
        for handle in handles:
            handle.remove()
        recorder.outputs.clear()  # breaks a cycle: the graph's hooks refer to the recorder
    for name, errors in recorder.errors.items():
        for codec, found in errors.items():
            if not all(math.isfinite(error) for error in found.values()):
                raise RuntimeError(
                    f"The gradients of `{name}` with {codec} are not finite ({found}): calibrate "
                    "with a batch whose loss and gradients are."
                )
    return recorder.errors
