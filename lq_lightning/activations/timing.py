"""Time of keeping a code instead of a tensor, on random values of the shape that a site saw."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from lq_lightning.kernels.activation import (
    activation_backward,
    activation_dequantize,
    activation_quantize,
)
from lq_lightning.kernels.norm import norm_backward, norm_dequantize, norm_quantize

from .accounting import SiteShape
from .functions import encode_source
from .patterns import ACTIVATIONS
from .policy import CODECS, fit_codec
from .sites import ActivationSite, LinearSite, MLPSite, NormSite, Site

__all__ = ["SiteTimer"]

_MAX_ROWS = 16384  # longer inputs are timed on a part
_REPEATS = 3


def _fastest(run: Callable[[], Any], device: torch.device) -> float:
    best = float("inf")
    for _ in range(_REPEATS + 1):  # the first compiles
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


class SiteTimer:
    """Times sites; equal ones once.

    What is compared: forward and backward of the module as it is, run eagerly, and of the operators
    that replace it, with one rebuild of the output if linear layers read it.
    """

    def __init__(self) -> None:
        self._times: dict[Hashable, float] = {}

    def extra(self, module: nn.Module, site: Site, shape: SiteShape, codec: str) -> float:
        """Return the seconds per step that a code takes more than full precision."""
        rows = min(shape.rows, _MAX_ROWS)
        facts: tuple[Hashable, ...] = ()
        facts += (type(site), rows, shape.numel, shape.dtype, shape.device, bool(shape.readers))
        if isinstance(site, NormSite):
            facts += (type(module), site.layer)
        elif isinstance(site, (ActivationSite, MLPSite)):
            facts += (site.activation, _is_gated(site))
        times = []
        for choice in (None, codec):
            key = (*facts, choice)
            if key not in self._times:
                x = torch.randn(rows, shape.numel, dtype=shape.dtype, device=shape.device)
                with torch.autocast(shape.device.type, enabled=False):
                    run = self._run(module, site, x, choice, bool(shape.readers))
                    self._times[key] = 0.0 if run is None else _fastest(run, shape.device)
            times.append(self._times[key])
        return (times[1] - times[0]) * shape.rows / max(1, rows)

    @staticmethod
    def _run(
        module: nn.Module, site: Site, x: Tensor, codec: str | None, read: bool
    ) -> Callable[[], Any] | None:
        format = ""
        if codec is not None:
            format = str(fit_codec(CODECS[codec], x.shape[-1]).message_format)
        if isinstance(site, NormSite):
            return _norm_run(module, site, x, format, read)
        if isinstance(site, (ActivationSite, MLPSite)):
            return _activation_run(site, x, format, read)
        if isinstance(site, LinearSite) and format:
            rows = x.numel() // x.shape[-1]
            return lambda: (s := encode_source(x, format)).codes.rebuild(s.tensors, rows, x.dtype)
        return None


def _forward_backward(run: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Any]:
    def both() -> None:
        with torch.enable_grad():
            y = run(*inputs)
        torch.autograd.grad(y, inputs, y.detach())

    return both


def _norm_run(
    module: nn.Module, site: NormSite, x: Tensor, format: str, read: bool
) -> Callable[[], Any]:
    values = {
        key: nn.Parameter(torch.ones(x.shape[-1:], dtype=p.dtype, device=x.device))
        for key, p in module.named_parameters(recurse=False)
    }
    if not format:
        probe: nn.Module = object.__new__(type(module))  # of FSDP2, `copy.copy` makes a new one
        probe.__dict__ = {k: v for k, v in module.__dict__.items() if k != "forward"}
        probe.__dict__["_parameters"] = {**dict.fromkeys(("weight", "bias")), **values}
        return _forward_backward(
            lambda x, *_: type(module).forward(probe, x), x.requires_grad_(), *values.values()
        )
    weight, bias = (None if key is None else values[key] for key in (site.weight, site.bias))
    kind = site.layer.kind

    def both() -> None:
        y, rstd, message, _ = norm_quantize(
            x, weight, bias, site.layer.eps, kind, format, x.dtype, site.amax
        )
        if read:
            norm_dequantize(
                message, rstd, weight, bias, x.shape[-1], kind, format, x.dtype, x.dtype
            )
        norm_backward(message, rstd, y, weight, kind, format, x.dtype, weight is not None)

    return torch.no_grad()(both)


def _is_gated(site: Site) -> bool:
    return isinstance(site, MLPSite) and site.up is not None


def _activation_run(
    site: ActivationSite | MLPSite, x: Tensor, format: str, read: bool
) -> Callable[[], Any]:
    name, up = site.activation, x.clone() if _is_gated(site) else None
    if not format:
        if up is None:
            return _forward_backward(ACTIVATIONS[name], x.requires_grad_())
        return _forward_backward(
            lambda gate, up: ACTIVATIONS[name](gate) * up, x.requires_grad_(), up.requires_grad_()
        )

    def both() -> None:
        y, message, up_message, _ = activation_quantize(x, up, name, format, site.amax)
        if read:
            activation_dequantize(message, up_message, *x.shape, name, format, x.dtype)
        activation_backward(message, up_message, y, name, format, False)

    return torch.no_grad()(both)
