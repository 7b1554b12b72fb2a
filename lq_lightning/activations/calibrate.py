"""Measure what each way of keeping the activations of a model costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lq_lightning.codecs import CodecSpec
from lq_lightning.foundation.agreement import gather_objects
from lq_lightning.foundation.checks import check_choice
from lq_lightning.kernels.message.matrix import matrix_shape

from .accounting import SavedByForward, SiteShape, account, forward_times, is_measured
from .calibration import (
    ActivationCalibration,
    CodecMeasurement,
    SiteCalibration,
    UnitCalibration,
)
from .gradient_errors import gradient_errors
from .install import quantize_activations
from .policy import CODECS, ActivationPolicy, ActivationRule, fit_codec
from .recompute import (
    find_recompute_units,
    install_recomputation,
    is_recomputed,
    remove_recomputation,
    whole_blocks,
)
from .sites import MLPSite, NormSite, Site, policy_kind, sites_of
from .timing import SiteTimer

__all__ = [
    "CANDIDATES",
    "FULL_PRECISION",
    "calibrate_activations",
    "code_nbytes",
    "full_precision",
    "measured_nbytes",
    "unchanged",
]

CANDIDATES = ("int4", "int4_hadamard", "int5", "int6", "int8")
FULL_PRECISION = ActivationPolicy(norm=None, activation=None, checkpoint=None, other=None)


def code_nbytes(site: Site, codec: CodecSpec, shape: SiteShape) -> int:
    """Return the bytes that a site keeps with a codec: messages, and an fp32 per row of a norm."""
    format = fit_codec(codec, shape.numel).message_format
    calls = max(1, shape.calls)
    count, numel = matrix_shape(format, shape.rows // calls, shape.numel)
    nbytes = calls * count * format.layout(numel).nbytes
    if isinstance(site, NormSite):
        return nbytes + 4 * shape.rows
    return 2 * nbytes if isinstance(site, MLPSite) and site.up is not None else nbytes


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore random numbers and buffers afterwards; compiled modules run eagerly until then.

    Compiled code neither runs hooks of modules nor shows what it saves where.
    """
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


@contextmanager
def full_precision(model: nn.Module) -> Iterator[dict[str, tuple[nn.Module, Site]]]:
    """Yield the sites of a model by name, all in full precision; install them if there are none."""
    found = [(module, site) for module in model.modules() for site in sites_of(module)]
    handle = None
    if not found:
        handle = quantize_activations(model, FULL_PRECISION)
        found = [(module, site) for module in model.modules() for site in sites_of(module)]
    before = [site.codec for _, site in found]
    try:
        for _, site in found:
            site.codec = None
        yield {site.name: (module, site) for module, site in found if is_measured(site)}
    finally:
        for (_, site), codec in zip(found, before, strict=True):
            site.codec = codec
        if handle is not None:
            handle.remove()


def _recompute_all(model: nn.Module, units: Sequence[str]) -> list[nn.Module]:
    rules = tuple(ActivationRule(module=unit, recompute=True) for unit in units)
    return install_recomputation(model, ActivationPolicy(rules=rules))


def measured_nbytes(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Return the bytes that one forward pass saves as the model is now, each storage once.

    Parameters and buffers do not count. Needs the memory of a pass without gradients only.

    Args:
        model: Any.
        run: One forward pass; returns a loss.
    """
    with unchanged(model):
        return account(model, run, {}).nbytes


def _measured(
    sites: dict[str, tuple[nn.Module, Site]],
    saved: SavedByForward,
    errors: dict[str, dict[str, dict[str, float]]],
) -> Iterator[SiteCalibration]:
    timer = SiteTimer()
    for name, (module, site) in sites.items():
        shape = saved.shapes.get(name)
        if shape is None:
            continue
        freed = _freed(saved, name)
        codecs = tuple(
            CodecMeasurement(
                codec=codec,
                nbytes=code_nbytes(site, CODECS[codec], shape),
                time_s=timer.extra(module, site, shape, codec),
                errors=found,
            )
            for codec, found in errors.get(name, {}).items()
        )
        yield SiteCalibration(
            name=name,
            kind=policy_kind(site) or "",
            rows=shape.rows,
            numel=shape.numel,
            kept_nbytes=freed,
            codecs=codecs,
        )


def _freed(saved: SavedByForward, site: str) -> int:
    return sum(t.nbytes for t in saved.tensors if t.kept((), ()) and not t.kept((site,), ()))


def calibrate_activations(
    model: nn.Module,
    run: Callable[[], Tensor],
    candidates: Sequence[str] = CANDIDATES,
    *,
    max_rows: int = 1024,
) -> ActivationCalibration:
    """Measure gradient errors, bytes and times of each way of keeping a model's activations.

    Four forward passes and one backward pass, with all blocks recomputed, so that a batch that only
    just fits with full checkpointing can be measured. Gradients, random numbers and buffers are
    left as they were. With several ranks all must call; all return the same.

    The error of a gradient is the relative L2 error of AGoQ, table 13: of the gradients that a
    module makes itself, for the same incoming gradient. Errors of weights shrink with the number of
    rows that they are measured on, errors of inputs do not.

    Args:
        model: Sharded (FSDP2) or not, quantized or not. Compiled modules run eagerly meanwhile:
            what the compiler recomputes by itself is not known.
        run: Forward pass of one batch; returns the loss, with its graph. Called four times.
        candidates: Names of codecs.
        max_rows: Rows (tokens) of each module's input that errors are measured on.

    Raises:
        ValueError: An unknown codec, or none.
        RuntimeError: The loss or a gradient is not usable, ranks measured different models, or a
            module is recomputed already.
    """
    if not candidates:
        raise ValueError("`calibrate_activations(candidates=())`: name at least one codec.")
    for codec in candidates:
        check_choice("calibrate_activations", "candidates", codec, tuple(CODECS))
    units = find_recompute_units(model)
    for name, module in model.named_modules():
        if is_recomputed(module):
            raise RuntimeError(
                f"`{name}` is recomputed, so that nothing of what it keeps can be measured: apply "
                "a policy without `recompute` rules first."
            )
    with unchanged(model), full_precision(model) as sites:
        saved = account(model, run, units)
        units = {name: unit for name, unit in units.items() if saved.unit_calls[name] == 1}
        times, forward = forward_times(run, units)
        blocks = whole_blocks(units)
        recomputed = _recompute_all(model, blocks)
        try:
            named = {name: tuple(candidates) for name in saved.shapes if _freed(saved, name)}
            errors = gradient_errors(model, run, named, max_rows)
        finally:
            remove_recomputation(recomputed)
        calibration = ActivationCalibration(
            sites=tuple(_measured(sites, saved, errors)),
            units=tuple(UnitCalibration(name=n, time_s=t) for n, t in times.items()),
            tensors=saved.tensors,
            step_time_s=3.0 * forward,
        )
    ranks = gather_objects(calibration.to_dict())
    return ActivationCalibration.average([ActivationCalibration.from_dict(r) for r in ranks])
