"""Errors of gradients that codes of activations cause, measured in a backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lq_lightning._compat.layouts import held_by
from lq_lightning.kernels.activation import (
    activation_backward,
    activation_dequantize,
    activation_quantize,
)
from lq_lightning.kernels.norm import norm_backward, norm_dequantize, norm_quantize

from .measure import mark_output, marked_site, measured_site
from .parallel import local_gradient, output_placements
from .policy import CODECS, fit_codec
from .recognize import ACTIVATIONS
from .sites import ActivationSite, LinearSite, MLPSite, NormSite, Site
from .sources import as_matrix, encode_source, own_rows_of, part_of

_GOLDEN = 0.6180339887498949
Errors = dict[str, dict[str, float]]  # by codec, by gradient
SiteTensors = Mapping[str, Tensor | None]


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


def run_backward(
    model: nn.Module,
    run: Callable[[], Tensor],
    outputs: list[GradientEdge],
    leave: Callable[[nn.Module, Any, Tensor], None],
    enter: Callable[[nn.Module, Any], None] | None = None,
) -> None:
    """Run forward, and backward down to the first of some outputs of measured sites.

    Parameters get no gradients, and hooks on their accumulation notice nothing. ``enter`` and
    ``leave`` are hooks of measured sites in the forward pass, not in recomputations; ``leave`` adds
    ``outputs`` where the backward pass ends. Those are edges: tensors would stay in memory, and
    with them the recomputed blocks that they are made in.
    """
    listening = True

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if listening and isinstance(output, Tensor):
            leave(module, args, output)

    def before(module: nn.Module, args: Any) -> None:
        if listening and enter is not None and args:
            enter(module, args)

    with ExitStack() as stack:
        stack.callback(outputs.clear)  # breaks a cycle: the graph's hooks may refer to this list
        for module in filter(measured_site, model.modules()):
            stack.enter_context(module.register_forward_pre_hook(before))
            # before hooks that place the output: gradients are those of whole tensors or of shards
            stack.enter_context(module.register_forward_hook(after, prepend=True))
        loss = run()
        listening = False
        if not loss.requires_grad:
            raise RuntimeError(
                "The loss that `run` returned needs no gradient: return the loss of a training "
                "step, not detached, with parameters that require gradients."
            )
        roots = _roots(loss, outputs)
        if roots:
            torch.autograd.grad(loss, roots, allow_unused=True)


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


@dataclass(frozen=True, slots=True)
class SiteGradients:
    """Gradients by name, ``"input"`` and ``"weight"`` of a norm, ``"gate"`` and ``"up"`` of an MLP,
    and the output ``[R, N]``, by which the linear layers behind the site multiply ``dy``.
    """

    made: dict[str, Tensor]
    output: Tensor


def _output(site: Site, tensors: SiteTensors) -> Tensor:
    x: Any = tensors["gate"] if "gate" in tensors else tensors["x"]
    if not isinstance(site, NormSite):
        y: Tensor = ACTIVATIONS[site.activation](x)  # type: ignore[attr-defined]
        up = tensors.get("up")
        return y if up is None else y * up
    layer, weight = site.layer, tensors["weight"]
    if layer.kind == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, tensors["bias"], layer.eps)
    y = F.rms_norm(x, x.shape[-1:], None, layer.eps)
    if weight is None:
        return y
    return y * (1.0 + weight if layer.kind == "rms_offset" else weight)


def exact_gradients(site: Site, tensors: SiteTensors, dy: Tensor) -> SiteGradients:
    """Return the gradients that a norm, an activation function or an MLP makes without codes.

    ``tensors`` are rows ``[R, N]``: ``x`` of a norm, with its ``weight`` and ``bias``, or of an
    activation function; ``gate`` and ``up`` of an MLP. ``dy`` is the gradient of the output.
    """
    leaves = {
        name: t.detach().requires_grad_()
        for name, t in tensors.items()
        if t is not None and name != "bias"
    }
    with torch.enable_grad():
        y = _output(site, {**tensors, **leaves})
    made = torch.autograd.grad(y, list(leaves.values()), dy)
    names = ("input" if name == "x" else name for name in leaves)
    return SiteGradients(dict(zip(names, made, strict=True)), y.detach())


def coded_gradients(
    site: Site, tensors: SiteTensors, dy: Tensor, format: str, *, rebuild: bool = True
) -> SiteGradients:
    """Return what ``exact_gradients`` does, from codes of a format; ``output`` if ``rebuild``."""
    x: Any = tensors["gate"] if "gate" in tensors else tensors["x"]
    output = x
    if isinstance(site, NormSite):
        weight, bias = tensors["weight"], tensors["bias"]
        kind, dtype = site.layer.kind, x.dtype
        _, rstd, message, _ = norm_quantize(
            x, weight, bias, site.layer.eps, kind, format, dtype, site.amax
        )
        if rebuild:
            output = norm_dequantize(
                message, rstd, weight, bias, x.shape[-1], kind, format, dtype, dtype
            )
        dx, dweight, _ = norm_backward(
            message, rstd, dy, weight, kind, format, dtype, weight is not None
        )
        return SiteGradients(
            {"input": dx} if weight is None else {"input": dx, "weight": dweight}, output
        )
    if not isinstance(site, (ActivationSite, MLPSite)):
        raise AssertionError(f"{site.name} is neither a norm nor an activation function")
    name, up = site.activation, tensors.get("up")
    _, message, up_message, _ = activation_quantize(x, up, name, format, site.amax)
    if rebuild:
        output = activation_dequantize(message, up_message, *x.shape, name, format, x.dtype)
    made = activation_backward(message, up_message, dy, name, format, False)
    names = ["gate" if "gate" in tensors else "input", *(["up"] if up is not None else [])]
    return SiteGradients(dict(zip(names, made, strict=False)), output)


@dataclass(kw_only=True, slots=True)
class _Record:
    """One call of a site, until its backward: codecs to measure, sampled rows of its inputs, and by
    name of a linear layer behind it sampled rows of the gradient of that layer's output.

    ``unwanted`` are gradients of a norm that nothing asks for, ``heard`` layers known since
    forward.
    """

    site: Site
    codecs: tuple[str, ...]
    unwanted: set[str] = field(default_factory=set)
    tensors: dict[str, Tensor | None] = field(default_factory=dict)
    is_watched: bool = False
    readers: dict[str, Tensor] = field(default_factory=dict)
    heard: set[str] = field(default_factory=set)

    def errors(self, dy: Tensor) -> Errors:
        """Return the errors by codec and gradient, from rows of the gradient of the output."""
        is_linear = isinstance(self.site, LinearSite)
        if is_linear:
            self.readers = {"weight": dy}
        exact = None if is_linear else exact_gradients(self.site, self.tensors, dy)
        x: Any = self.tensors.get("gate", self.tensors.get("x"))
        errors: Errors = {}
        for codec in self.codecs:
            format = str(fit_codec(CODECS[codec], x.shape[-1]).message_format)
            found: dict[str, float] = {}
            errors[codec] = found
            if exact is None:
                source = encode_source(x, format)
                rebuilt = source.codes.rebuild(source.tensors, x.shape[0], torch.float32)
                found.update(self._weight_errors(x, rebuilt))
                continue
            coded = coded_gradients(self.site, self.tensors, dy, format)
            for name, made in exact.made.items():
                if name not in self.unwanted:
                    found[name] = _relative(coded.made[name] - made, made)
            found.update(self._weight_errors(exact.output, coded.output))
        return errors

    def _weight_errors(self, exact: Tensor, rebuilt: Tensor) -> Iterator[tuple[str, float]]:
        """Errors of the weight gradients ``dy.T @ x`` of the linear layers that read the output.

        The squared norm of ``A.T @ B`` is the sum of ``(A @ A.T) * (B @ B.T)``: matrices of few
        sampled rows instead of a gradient.
        """
        difference = rebuilt - exact
        gram, gram_exact = difference @ difference.t(), exact @ exact.t()
        for name, dy in self.readers.items():
            outer = (dy @ dy.t()).double()
            square = max(0.0, float((outer * gram.double()).sum()))
            whole = max(0.0, float((outer * gram_exact.double()).sum()))
            yield name, math.sqrt(square / whole) if whole else 0.0


def _relative(difference: Tensor, exact: Tensor) -> float:
    norm = float(exact.double().norm())
    error = float(difference.double().norm())
    return error / norm if norm else 0.0 if error == 0.0 else math.inf


class _Recorder:
    def __init__(
        self, model: nn.Module, candidates: Mapping[str, tuple[str, ...]], max_rows: int
    ) -> None:
        self.candidates = candidates
        self.max_rows = max_rows
        self.records: dict[str, _Record] = {}
        self.outputs: list[GradientEdge] = []
        self.errors: dict[str, Errors] = {}
        self.parts: dict[int, tuple[str, str]] = {}  # site and role by projection of an MLP
        for module in model.modules():
            if isinstance(site := measured_site(module), MLPSite):
                for role in ("gate", "up", "down"):
                    child = getattr(module, getattr(site, role) or "", None)
                    if child is not None:
                        self.parts.setdefault(id(child), (site.name, role))

    def sample(self, x: Tensor) -> Tensor:
        return sampled_rows(held_by(x), self.max_rows)

    def record(self, site: Site) -> _Record | None:
        if site.name not in self.candidates or site.name in self.records:
            return None
        record = _Record(site=site, codecs=self.candidates[site.name])
        self.records[site.name] = record
        return record

    def watch(self, record: _Record | None, output: Tensor) -> None:
        """Measure once a site's output has its gradient: by then its readers have theirs."""
        if record is None or record.is_watched:
            return
        record.is_watched = True
        if output.requires_grad:
            measure = partial(self.measure, record, output_placements(output))
            output.register_hook(measure)  # type: ignore[no-untyped-call]
            self.outputs.append(get_gradient_edge(output))

    def measure(self, record: _Record, placed: Any, gradient: Tensor) -> None:
        gradient = local_gradient(gradient, placed)
        with torch.autocast(gradient.device.type, enabled=False), torch.no_grad():
            self.errors[record.site.name] = record.errors(self.sample(gradient))
        record.tensors.clear()
        record.readers.clear()

    def enter(self, module: nn.Module, args: Any) -> None:
        site, x = measured_site(module), args[0]
        owner, role = self.parts.get(id(module), ("", ""))
        if site is None:
            return
        if role == "down":
            self.watch(self.records.get(owner), x)
        elif isinstance(site, MLPSite):
            self.record(site)
        elif isinstance(site, LinearSite):
            if not marked_site(x) and (record := self.record(site)) is not None:
                record.tensors["x"] = self.sample(x)
        elif (record := self.record(site)) is not None:
            record.tensors["x"] = self.sample(x)
            if isinstance(site, NormSite):
                for name, key in (("weight", site.weight), ("bias", site.bias)):
                    p = None if key is None else getattr(module, key)
                    values = None if p is None else held_by(p).detach()
                    record.tensors[name] = None if values is None else values.clone().float()
                    if p is None or not p.requires_grad:
                        record.unwanted.add(name)
                if not x.requires_grad:
                    record.unwanted.add("input")

    def leave(self, module: nn.Module, args: Any, output: Tensor) -> None:
        site = measured_site(module)
        if site is None:
            return
        if isinstance(site, (NormSite, ActivationSite)):
            mark_output(output, site.name)
        if not isinstance(site, MLPSite):
            self.watch(self.records.get(site.name), output)
        if isinstance(site, LinearSite):
            self.leave_linear(module, site, args[0], output)

    def leave_linear(self, module: nn.Module, site: LinearSite, x: Any, output: Tensor) -> None:
        owner, role = self.parts.get(id(module), ("", ""))
        record = self.records.get(owner)
        if record is not None and role in ("gate", "up") and role not in record.tensors:
            made = self.sample(output)
            record.tensors[role] = made
            if isinstance(record.site, MLPSite) and record.site.gate == record.site.up:
                record.tensors["gate"], record.tensors["up"] = made.chunk(2, dim=-1)
        reader = self.records.get(owner if role == "down" else marked_site(x))
        weight: Any = module.weight
        wanted = output.requires_grad and weight.requires_grad
        if reader is not None and wanted and site.name not in reader.heard:
            reader.heard.add(site.name)
            placed, part = output_placements(output), part_of(x)

            def read(gradient: Tensor) -> None:
                gradient = own_rows_of(local_gradient(gradient, placed), part)
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
    Sites keep full precision; gradients flow to the outputs of the first ones (``run_backward``).
    Sites that the loss does not depend on are missing.

    Raises:
        RuntimeError: a gradient is not finite, or the loss needs none.
    """
    recorder = _Recorder(model, candidates, max_rows)
    run_backward(model, run, recorder.outputs, recorder.leave, recorder.enter)
    for name, errors in recorder.errors.items():
        for codec, found in errors.items():
            if not all(math.isfinite(error) for error in found.values()):
                raise RuntimeError(
                    f"The gradients of `{name}` with {codec} are not finite ({found}): calibrate "
                    "with a batch whose loss and gradients are."
                )
    return recorder.errors
