"""Measure what each way of keeping the activations of a model costs."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lq_lightning._compat.modules import tensor_parallel_parameters
from lq_lightning.codecs import CodecSpec
from lq_lightning.foundation.agreement import gather_objects
from lq_lightning.foundation.checks import check_choice
from lq_lightning.foundation.nested import tensors_in
from lq_lightning.kernels.message.matrix import matrix_shape

from .calibration import (
    ActivationCalibration,
    CodecMeasurement,
    SiteCalibration,
    UnitCalibration,
    average_ranks,
)
from .gradient_errors import coded_gradients, exact_gradients, gradient_errors, run_backward
from .install import quantize_activations
from .measure import SavedByForward, SiteShape, is_measured
from .policy import CODECS, ActivationPolicy, ActivationRule, fit_codec
from .recompute import (
    find_recompute_units,
    install_recomputation,
    is_recomputed,
    remove_recomputation,
    whole_blocks,
)
from .sites import ActivationSite, LinearSite, MLPSite, NormSite, Site, policy_kind, sites_of
from .sources import encode_source

_MAX_ROWS = 16384  # longer inputs are timed in part
_REPEATS = 3
_PROBE_SHAPE = (256, 256)  # a large matrix: small or 1-D states may stay in full precision
CANDIDATES = ("int4", "int4_hadamard", "int5", "int6", "int8")
FULL_PRECISION = ActivationPolicy(norm=None, activation=None, checkpoint=None, other=None)


def _now(device: torch.device) -> float:
    """Time in seconds, once a GPU has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _forward_times(
    run: Callable[[], Tensor], units: Mapping[str, nn.Module]
) -> tuple[dict[str, float], float]:
    """Seconds of the forward pass of each module, and of all: the faster of two passes.

    ``run`` has run before, so that nothing is compiled or tuned any more.
    """
    times = dict.fromkeys(units, float("inf"))
    total, starts = float("inf"), dict.fromkeys(units, 0.0)
    device = next(
        (p.device for unit in units.values() for p in unit.parameters()), torch.device("cpu")
    )
    with ExitStack() as hooks, torch.no_grad():
        for name, unit in units.items():

            def start(*_: Any, name: str = name) -> None:
                starts[name] = _now(device)

            def stop(*_: Any, name: str = name) -> None:
                times[name] = min(times[name], _now(device) - starts[name])

            hooks.enter_context(unit.register_forward_pre_hook(start))
            hooks.enter_context(unit.register_forward_hook(stop))
        for _ in range(2):
            begin = _now(device)
            run()
            total = min(total, _now(device) - begin)
    return times, total


def _fastest(run: Callable[[], Any], device: torch.device) -> float:
    best = float("inf")
    for _ in range(_REPEATS + 1):  # the first compiles
        start = _now(device)
        run()
        best = min(best, _now(device) - start)
    return best


class _SiteTimer:
    """Times codes against keeping tensors, on random values of a site's shapes; equal sites once.

    Compared are forward and backward of the module as it is, run eagerly, and of the operators that
    replace it, with one rebuild of the output if linear layers read it.
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
                with torch.autocast(shape.device.type, enabled=False), torch.no_grad():
                    run = _step_of(module, site, x, choice, bool(shape.readers))
                    self._times[key] = 0.0 if run is None else _fastest(run, shape.device)
            times.append(self._times[key])
        return (times[1] - times[0]) * shape.rows / max(1, rows)


def _is_gated(site: Site) -> bool:
    return isinstance(site, MLPSite) and site.up is not None


def _step_of(
    module: nn.Module, site: Site, x: Tensor, codec: str | None, read: bool
) -> Callable[[], Any] | None:
    """Computation of a site in one step, with or without a code; None if there is none."""
    numel = x.shape[-1]
    format = "" if codec is None else str(fit_codec(CODECS[codec], numel).message_format)
    if isinstance(site, LinearSite):
        rows = x.numel() // numel
        if not format:
            return None
        return lambda: (s := encode_source(x, format)).codes.rebuild(s.tensors, rows, x.dtype)
    gated = {"gate": x, "up": x.clone()}
    tensors: dict[str, Tensor | None] = dict(gated if _is_gated(site) else {"x": x})
    if isinstance(site, NormSite):
        ones = {
            key: torch.ones(numel, dtype=p.dtype, device=x.device)
            for key, p in module.named_parameters(recurse=False)
        }
        if not format:
            return _own_norm(module, x, ones)
        tensors["weight"] = None if site.weight is None else ones[site.weight]
        tensors["bias"] = None if site.bias is None else ones[site.bias]
    if not format:
        return lambda: exact_gradients(site, tensors, x)
    return lambda: coded_gradients(site, tensors, x, format, rebuild=read)


def _own_norm(module: nn.Module, x: Tensor, values: dict[str, Tensor]) -> Callable[[], Any]:
    """Forward and backward of a norm's own code, with other parameters."""
    leaves = {name: nn.Parameter(value) for name, value in values.items()}
    # not `copy.copy`: FSDPModule's `__new__` makes an instance of the unsharded class
    probe: nn.Module = object.__new__(type(module))
    probe.__dict__ = {k: v for k, v in module.__dict__.items() if k != "forward"}
    probe.__dict__["_parameters"] = {**dict.fromkeys(("weight", "bias")), **leaves}
    x = x.detach().requires_grad_()

    def both() -> None:
        with torch.enable_grad():
            y = type(module).forward(probe, x)
        torch.autograd.grad(y, (x, *leaves.values()), y.detach())

    return both


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherMemory:
    """Memory of one device besides saved activations."""

    nbytes: int = 0  # beside the peak of saved activations
    at_loss_nbytes: int = 0  # in addition, beside all that is kept, while the loss is computed
    after_backward_nbytes: int = 0  # once activations are freed and all gradients exist


def _local_nbytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def _stored_nbytes(state: Any) -> int:
    return sum(_local_nbytes(t) for t in tensors_in(state))


def _expected(optimizer: Optimizer, group: dict[str, Any], like: Tensor) -> float:
    """Bytes of state per value of a parameter, from a step of the same optimizer on a probe."""
    local = like.to_local() if isinstance(like, DTensor) else like
    probe = nn.Parameter(torch.zeros(_PROBE_SHAPE, dtype=local.dtype, device=local.device))
    probe.grad = torch.zeros_like(probe)
    try:
        same = copy.copy(optimizer)
        same.state = defaultdict(dict)
        same.param_groups = [{**group, "params": [probe]}]
        same.step()
    except Exception as error:
        raise RuntimeError(
            f"The states that {type(optimizer).__name__} will make cannot be predicted: it does "
            f"not run on one parameter alone ({error}). Choose the policy after its first step, or "
            "give `MemoryBudget(..., scope='activations')`."
        ) from error
    return _stored_nbytes(list(same.state.values())) / probe.numel()


def _state_nbytes(optimizers: Sequence[Optimizer]) -> int:
    """Bytes of optimizer states that do not exist yet, on this rank."""
    total = 0.0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            per_value: dict[torch.dtype, float] = {}
            for p in group["params"]:
                if not p.requires_grad or optimizer.state.get(p):
                    continue
                if p.dtype not in per_value:
                    per_value[p.dtype] = _expected(optimizer, group, p)
                total += per_value[p.dtype] * _local_nbytes(p) / p.element_size()
    return int(total)


def _gradient_nbytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(_local_nbytes(p) for p in parameters if p.requires_grad and p.grad is None)


def _workspace_nbytes(model: nn.Module, units: Sequence[str]) -> int:
    """Gradients that exist while the first modules of the backward pass run: of parameters outside
    of blocks, such as the output projection, and of one block; FSDP2 holds them twice, whole.
    """
    blocks = whole_blocks(units)
    modules = dict(model.named_modules())
    shards = {
        name: mesh.size() if any(p.is_shard() for p in placements) else 1
        for name, (mesh, placements) in tensor_parallel_parameters(model).items()
    }
    inside = {id(p) for block in blocks for p in modules[block].parameters()}
    outside = _gradient_nbytes(p for p in model.parameters() if id(p) not in inside)
    largest = 0
    for block in blocks:
        nbytes = 0
        for name, p in modules[block].named_parameters():
            if p.requires_grad:
                copies = 2 if isinstance(p, DTensor) else 1
                ranks = shards.get(f"{block}.{name}", 1)
                nbytes += copies * p.numel() * p.element_size() // ranks
        largest = max(largest, nbytes)
    return outside + largest


def other_memory(
    model: nn.Module,
    run: Callable[[], Tensor],
    calibration: ActivationCalibration,
    optimizers: Sequence[Optimizer],
    accumulates: bool,
) -> OtherMemory:
    """Return the memory that one step needs besides saved activations.

    On a GPU one forward and backward pass with all blocks recomputed is measured; gradients and
    states that do not exist yet come on top. On a CPU, which counts nothing, weights, buffers,
    gradients and states are added up. ``model`` is in full precision.
    """
    states = _state_nbytes(optimizers)
    gradients = _gradient_nbytes(model.parameters())
    device = next(model.parameters()).device
    if device.type != "cuda":
        held = [*model.parameters(), *model.buffers()]
        nbytes = sum(map(_local_nbytes, held)) + states + gradients
        nbytes += sum(_local_nbytes(p.grad) for p in model.parameters() if p.grad is not None)
        nbytes += sum(_stored_nbytes(list(each.state.values())) for each in optimizers)
        return OtherMemory(nbytes=nbytes, after_backward_nbytes=nbytes)
    units = [unit.name for unit in calibration.units]
    blocks = whole_blocks(units)
    before = torch.cuda.memory_allocated(device)
    at_loss, later = _peaks(model, run, blocks, device)
    kept, transient = calibration.saved_nbytes({}, blocks)
    more = states + (gradients if accumulates else _workspace_nbytes(model, units))
    nbytes = max(later - kept - transient, before) + more
    return OtherMemory(
        nbytes=nbytes,
        at_loss_nbytes=max(0, at_loss - kept + more - nbytes),
        after_backward_nbytes=before + states + gradients,
    )


def _peaks(
    model: nn.Module, run: Callable[[], Tensor], blocks: Sequence[str], device: torch.device
) -> tuple[int, int]:
    """Peaks of allocated memory before and after the first block runs backwards."""
    readings: list[int] = []
    outputs: list[GradientEdge] = []

    def read(_: Tensor) -> None:
        if not readings:
            readings.append(torch.cuda.max_memory_allocated(device))
            torch.cuda.reset_peak_memory_stats(device)

    def leave(module: nn.Module, args: Any, output: Tensor) -> None:
        if torch.is_grad_enabled() and output.requires_grad:
            output.register_hook(read)  # type: ignore[no-untyped-call]
            outputs.append(get_gradient_edge(output))

    with _all_recomputed(model, blocks):
        torch.cuda.reset_peak_memory_stats(device)
        run_backward(model, run, outputs, leave)
        readings.append(torch.cuda.max_memory_allocated(device))
    return readings[0], readings[-1]


def _code_nbytes(site: Site, codec: CodecSpec, shape: SiteShape) -> int:
    """Bytes that a site keeps with a codec: messages, and an fp32 per row of a norm."""
    format = fit_codec(codec, shape.numel).message_format
    calls = max(1, shape.calls)
    count, numel = matrix_shape(format, shape.rows // calls, shape.numel)
    nbytes = calls * count * format.layout(numel).nbytes
    if isinstance(site, NormSite):
        return nbytes + 4 * shape.rows
    return 2 * nbytes if _is_gated(site) else nbytes


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
def applied(
    model: nn.Module, policy: ActivationPolicy
) -> Iterator[dict[str, tuple[nn.Module, Site]]]:
    """Keep activations by a policy meanwhile, and yield the measured sites by name."""
    modules = list(model.modules())
    handle = None if any(map(sites_of, modules)) else quantize_activations(model, policy)
    found = [(module, site) for module in modules for site in sites_of(module)]
    before = [site.codec for _, site in found]
    recomputed: list[nn.Module] = []
    try:
        if handle is None:
            for _, site in found:
                kind = policy_kind(site)
                site.codec = None if kind is None else policy.codec(kind, site.name)
            recomputed = install_recomputation(model, policy)
        yield {site.name: (module, site) for module, site in found if is_measured(site)}
    finally:
        remove_recomputation(recomputed)
        for (_, site), codec in zip(found, before, strict=True):
            site.codec = codec
        if handle is not None:
            handle.remove()


@contextmanager
def _all_recomputed(model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
    rules = tuple(ActivationRule(module=block, recompute=True) for block in blocks)
    recomputed = install_recomputation(model, ActivationPolicy(rules=rules))
    try:
        yield
    finally:
        remove_recomputation(recomputed)


def measured_nbytes(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Return the bytes that one forward pass saves as the model is now, parameters and buffers left
    out.
    """
    with unchanged(model):
        return sum(tensors.nbytes for tensors in SavedByForward(model, run, {}).tensors)


def _measured(
    sites: dict[str, tuple[nn.Module, Site]],
    saved: SavedByForward,
    errors: dict[str, dict[str, dict[str, float]]],
) -> Iterator[SiteCalibration]:
    timer = _SiteTimer()
    for name, (module, site) in sites.items():
        shape = saved.shapes.get(name)
        if shape is None:
            continue
        codecs = tuple(
            CodecMeasurement(
                codec=codec,
                nbytes=_code_nbytes(site, CODECS[codec], shape),
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
            kept_nbytes=_freed(saved, name),
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
        model: sharded (FSDP2) or not, quantized or not. Compiled modules run eagerly meanwhile:
            what the compiler recomputes by itself is not known.
        run: forward pass of one batch; returns the loss, with its graph. Called four times.
        candidates: names of codecs.
        max_rows: rows (tokens) of each module's input that errors are measured on.

    Raises:
        ValueError: an unknown codec, or none.
        RuntimeError: the loss or a gradient is not usable, ranks measured different models, or a
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
    with unchanged(model), applied(model, FULL_PRECISION) as sites:
        saved = SavedByForward(model, run, units)
        units = {name: unit for name, unit in units.items() if saved.unit_calls[name] == 1}
        times, forward = _forward_times(run, units)
        with _all_recomputed(model, whole_blocks(units)):
            named = {name: tuple(candidates) for name in saved.shapes if _freed(saved, name)}
            errors = gradient_errors(model, run, named, max_rows)
        calibration = ActivationCalibration(
            sites=tuple(_measured(sites, saved, errors)),
            units=tuple(UnitCalibration(name=n, time_s=t) for n, t in times.items()),
            tensors=saved.tensors,
            step_time_s=3.0 * forward,
        )
    return average_ranks(gather_objects(calibration))
