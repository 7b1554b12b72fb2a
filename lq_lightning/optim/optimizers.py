"""Quantized AdamW, Adam, SGD, Lion and Muon, and conversion of optimizers of torch in place."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, ClassVar, Literal
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lq_lightning._compat.torch import note_optimizer_step, scale_and_add_all
from lq_lightning.foundation.checks import check_choice
from lq_lightning.foundation.parameters import embedding_params
from lq_lightning.kernels.message.operators import count_write
from lq_lightning.kernels.optimizer_step import prepare

from .base import FULL_PRECISION, Batch, ParamStepCache, QuantizedOptimizer, advance, excluded
from .config import OptimizerQuantization, embedding_weights
from .muon import Round, Views, learning_rate_ratio, plan_rounds

_LION_KEYS = {"params", "param_names", "lr", "initial_lr", "betas", "weight_decay", "maximize"}
_SCHEDULER_MARK = "_wrapped_by_lr_sched"  # on the function that a scheduler puts in place of `step`


def _adam_rule(group: Mapping[str, Any]) -> str:
    # groups of AdamW have it too, also those of states saved by older torch, which sets it then
    return "adamw" if group["decoupled_weight_decay"] else "adam"


def _adam_scalars(group: Mapping[str, Any], step: int, is_first: bool) -> list[float]:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    sign = -1.0 if group["maximize"] else 1.0
    # lr / c1 * m / (sqrt(v / c2) + eps), with c1 and c2 for the bias, without dividing each v by c2
    root = math.sqrt(1.0 - beta2**step)
    size = lr * root / (1.0 - beta1**step)
    eps = float(group["eps"]) * root
    decay = 1.0 - lr * decay if group["decoupled_weight_decay"] else sign * decay
    return [beta1, sign * (1.0 - beta1), beta2, 1.0 - beta2, eps, 0.0, decay, size]


class QuantizedAdam(QuantizedOptimizer, torch.optim.Adam):
    """Adam with quantized moments, otherwise like ``torch.optim.Adam``.

    Args:
        params: Parameters, named parameters or groups, as for ``torch.optim.Adam``.
        lr: Learning rate.
        betas: Decay of the moments.
        eps: Constant added to the root of the second moment.
        weight_decay: L2 penalty.
        maximize: Whether to ascend instead of descend.
        quantization: Formats, and the choice of states that stay in fp32.
        full_precision: Parameters whose states stay in fp32, such as embeddings.

    Raises:
        ValueError: Hyperparameters are out of range.

    Error: stochastic rounding keeps the mean of the first moment and of the logarithm of the
    second, so that neither ``beta`` near 1 nor falling gradients let them drift: updates are as
    large as fp32's within 1% after 10,000 steps (``benchmarks/optimizer_drift.py`` in commit
    ac819df). A second moment never becomes zero. Below 2**-62 of the largest of its group of 128 it
    is stored as about that, and its updates are too small rather than too large.
    Update and encoding are one pass; the update uses the moments before they are rounded.
    Source: COAT, section 4 (FP8 with a dynamic range by group of 128). Differs in: bits move
    between exponent and mantissa where COAT takes powers, stochastic rounding, constants of three
    bytes per group instead of twelve, second moments without a sign bit, small and one-dimensional
    parameters and embeddings in fp32.
    """

    state_names = ("exp_avg", "exp_avg_sq")
    _rule, _scalars = staticmethod(_adam_rule), staticmethod(_adam_scalars)
    torch_class = torch.optim.Adam

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        quantization: OptimizerQuantization | None = None,
        full_precision: Iterable[Tensor] = (),
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize)
        self.enable_quantization(quantization or OptimizerQuantization(), excluded(full_precision))


class QuantizedAdamW(QuantizedOptimizer, torch.optim.AdamW):
    """AdamW with quantized moments, otherwise like ``torch.optim.AdamW``.

    Arguments, errors and sources as for :class:`QuantizedAdam`, but ``weight_decay`` is decoupled
    and 0.01 by default.
    """

    state_names = ("exp_avg", "exp_avg_sq")
    _rule, _scalars = staticmethod(_adam_rule), staticmethod(_adam_scalars)
    torch_class = torch.optim.AdamW

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        quantization: OptimizerQuantization | None = None,
        full_precision: Iterable[Tensor] = (),
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize)
        self.enable_quantization(quantization or OptimizerQuantization(), excluded(full_precision))


class QuantizedSGD(QuantizedOptimizer, torch.optim.SGD):
    """SGD with a quantized momentum buffer, otherwise like ``torch.optim.SGD``.

    Args:
        params: Parameters, named parameters or groups.
        lr: Learning rate.
        momentum: Momentum, which must be positive: without it there is nothing to quantize.
        dampening: Dampening of the momentum.
        weight_decay: L2 penalty.
        nesterov: Whether to look ahead.
        maximize: Whether to ascend instead of descend.
        quantization: Formats, and the choice of states that stay in fp32.
        full_precision: Parameters whose states stay in fp32.

    Raises:
        ValueError: Hyperparameters are out of range, or there is no momentum.
    """

    state_names = ("momentum_buffer",)
    has_step = False
    torch_class = torch.optim.SGD

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        quantization: OptimizerQuantization | None = None,
        full_precision: Iterable[Tensor] = (),
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize)
        self.enable_quantization(quantization or OptimizerQuantization(), excluded(full_precision))

    @classmethod
    def check_group(cls, group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for SGD without momentum, too."""
        super().check_group(group)
        if not group["momentum"]:
            raise ValueError(
                f"{cls.__name__}(momentum=0) has no state to quantize. Use a positive "
                'momentum, or leave the optimizer as it is (`optimizer_state="none"`).'
            )

    def _rule(self, group: Mapping[str, Any]) -> str:
        return "nesterov" if group["nesterov"] else "sgd"

    def _scalars(self, group: Mapping[str, Any], step: int, is_first: bool) -> list[float]:
        sign = -1.0 if group["maximize"] else 1.0
        weight = 1.0 if is_first else 1.0 - float(group["dampening"])
        momentum, decay = float(group["momentum"]), float(group["weight_decay"])
        return [momentum, sign * weight, sign, 0.0, 0.0, 0.0, sign * decay, float(group["lr"])]


class QuantizedLion(QuantizedOptimizer):
    """Lion with a quantized momentum: the sign of an interpolation is the update.

    Args:
        params: Parameters, named parameters or groups.
        lr: Learning rate, usually 3 to 10 times smaller than AdamW's.
        betas: Decay in the update and in the momentum.
        weight_decay: Decoupled weight decay.
        maximize: Whether to ascend instead of descend.
        quantization: Formats (``first_moment``), and the choice of states that stay in fp32.
        full_precision: Parameters whose states stay in fp32.

    Raises:
        ValueError: Hyperparameters are out of range.

    Source: Chen et al., Symbolic Discovery of Optimization Algorithms, algorithm 2.
    """

    state_names = ("exp_avg",)
    has_step = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        quantization: OptimizerQuantization | None = None,
        full_precision: Iterable[Tensor] = (),
    ) -> None:
        if lr < 0.0 or not all(0.0 <= beta < 1.0 for beta in betas) or weight_decay < 0.0:
            raise ValueError(
                f"QuantizedLion(lr={lr}, betas={betas}, weight_decay={weight_decay}): lr and "
                "weight_decay must be at least 0, both betas at least 0 and below 1."
            )
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)
        self.enable_quantization(quantization or OptimizerQuantization(), excluded(full_precision))

    def _rule(self, group: Mapping[str, Any]) -> str:
        return "lion"

    def _scalars(self, group: Mapping[str, Any], step: int, is_first: bool) -> list[float]:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        sign = -1.0 if group.get("maximize") else 1.0
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        mixed = [beta1, sign * (1.0 - beta1), beta2, sign * (1.0 - beta2)]
        return [*mixed, 0.0, 0.0, 1.0 - lr * decay, lr]


_ADAMW: dict[str, Any] = {"betas": (0.9, 0.999), "adamw_eps": 1e-8}
_ADJUSTMENTS = ("original", "match_rms_adamw")
_FIXED = {"maximize": False, "decoupled_weight_decay": True}
_MAX_PLANS = 8  # of rounds that are kept, for batches of different parameters


def _is_muon(group: Mapping[str, Any]) -> bool:
    return bool(group.get("muon", True))  # groups of ``torch.optim.Muon`` do not say it


class QuantizedMuon(QuantizedOptimizer, torch.optim.Muon):
    """Muon with a quantized momentum for matrices, and quantized AdamW for all other parameters.

    Parameters of groups with ``"muon": True``, which is the default, are updated as by
    ``torch.optim.Muon``, those of groups with ``"muon": False`` as by ``torch.optim.AdamW``.
    :func:`muon_groups` makes the two groups of a model. Each group may have its own ``lr`` and
    ``weight_decay``.

    Each matrix that is sharded (FSDP2, tensor parallelism, also both) is orthogonalized by one of
    its ranks, to which the others send their pieces of its update in bf16. These ranks must have
    gradients of the same matrices.

    Args:
        params: Parameters, named parameters or groups.
        lr: Learning rate.
        weight_decay: Decoupled weight decay.
        momentum: Momentum.
        nesterov: Whether to look ahead.
        ns_coefficients: Coefficients of the Newton-Schulz polynomial.
        eps: Smallest norm of a matrix to divide by.
        ns_steps: Newton-Schulz iterations.
        adjust_lr_fn: Factor of the learning rate by the shape of the whole matrix: ``"original"``
            (or None) or ``"match_rms_adamw"``, which lets one learning rate serve both kinds of
            groups.
        betas: Decay of AdamW's moments.
        adamw_eps: AdamW's ``eps``.
        quantization: Formats, and the choice of states that stay in fp32. Momentum has
            ``first_moment``.
        full_precision: Parameters whose states stay in fp32, such as ``embedding_weights(model)``.

    Raises:
        ValueError: Hyperparameters are out of range, or a group for Muon has a parameter that is no
            matrix.

    Source: Jordan et al., Muon; Liu et al., Muon is Scalable for LLM Training (``adjust_lr_fn``).
    Differs in: 8-bit momentum; a matrix is gathered once, to one rank, in bf16.
    """

    state_names = ("momentum_buffer",)
    has_step = False
    round_nbytes: ClassVar[int] = 64 << 20  # of updates in bf16 that a rank computes together
    # Matrices by which rounds were planned, and the rounds; not in pickles or copies.
    _plans: Mapping[tuple[int, ...], tuple[list[ParamStepCache], list[Round]]] = MappingProxyType(
        {}
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        quantization: OptimizerQuantization | None = None,
        full_precision: Iterable[Tensor] = (),
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "adamw_eps": adamw_eps,
            "muon": True,
        }
        Optimizer.__init__(self, params, defaults)  # Muon's own refuses all but matrices
        self.enable_quantization(quantization or OptimizerQuantization(), excluded(full_precision))

    @classmethod
    def check_group(cls, group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for hyperparameters out of range and for Muon beyond matrices."""
        super().check_group(group)
        group = {**_ADAMW, **group}
        signs = ("lr", "weight_decay", "momentum", "eps", "adamw_eps")
        if any(group[name] < 0.0 for name in signs) or not 0 <= group["ns_steps"] < 100:
            raise ValueError(
                f"{cls.__name__}: {', '.join(f'{name}={group[name]}' for name in signs)} must be "
                f"at least 0, ns_steps={group['ns_steps']} from 0 to 99."
            )
        if not all(0.0 <= beta < 1.0 for beta in group["betas"]):
            raise ValueError(
                f"{cls.__name__}(betas={group['betas']}): both must be at least 0 and below 1."
            )
        check_choice(
            cls.__name__, "adjust_lr_fn", group["adjust_lr_fn"] or "original", _ADJUSTMENTS
        )
        others = [tuple(p.shape) for p in group["params"] if p.dim() != 2]
        if _is_muon(group) and others:
            raise ValueError(
                f"Muon updates matrices only, but a group has parameters of the shapes {others}. "
                'Put them into a group with `"muon": False`, as `muon_groups(model)` does.'
            )

    def _rule(self, group: Mapping[str, Any]) -> str:
        if not _is_muon(group):
            return "adamw"
        return "nesterov" if group["nesterov"] else "sgd"

    def _states_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return self.state_names if _is_muon(group) else QuantizedAdamW.state_names

    def _counts_steps(self, group: Mapping[str, Any]) -> bool:
        return not _is_muon(group)

    def _scalars(self, group: Mapping[str, Any], step: int, is_first: bool) -> list[float]:
        if not _is_muon(group):
            adamw = {**_ADAMW, **group, **_FIXED}
            return _adam_scalars({**adamw, "eps": adamw["adamw_eps"]}, step, is_first)
        # the update is added to a parameter of zeros
        momentum = float(group["momentum"])
        return [momentum, 1.0 - momentum, 1.0 - momentum, 0.0, 0.0, 0.0, 0.0, -1.0]

    def _launch(self, batch: Batch) -> None:
        if batch.rule == "adamw":
            super()._launch(batch)
            return
        advance(batch.caches)
        before: Iterator[None] = iter(())
        for matrices in self._rounds(batch):
            running = self._update(batch, matrices)
            next(running, None)  # its pieces are on their way while the last round is computed
            deque(before, maxlen=0)
            before = running
        deque(before, maxlen=0)

    def _rounds(self, batch: Batch) -> list[Round]:
        key = tuple(map(id, batch.caches))
        if key not in self._plans:
            kept = list(self._plans.items())[1 - _MAX_PLANS :]
            params = [p for cache in batch.caches if (p := cache.param()) is not None]
            plan = (batch.caches, plan_rounds(params, self.round_nbytes))
            self._plans = dict([*kept, (key, plan)])  # with caches, so that no others get their ids
        return self._plans[key][1]

    def _update(self, batch: Batch, matrices: Round) -> Generator[None, None, None]:
        """Update the matrices of a round; yield when each exchange has begun."""
        flat, updates = matrices.buffer(matrices.local, batch.tensors[0][0].device)
        self._advance_momentum(batch, matrices, updates)
        gathered = matrices.gathered(flat)
        del flat, updates
        views = yield from gathered
        shapes = [cache.shape for cache in batch.caches]
        groups = [self.param_groups[cache.group] for cache in batch.caches]
        scattered = matrices.scattered(matrices.orthogonalize(views, shapes, groups))
        del views, gathered
        self._apply(batch, (yield from scattered))

    def _advance_momentum(self, batch: Batch, matrices: Round, updates: Views) -> None:
        """Add the gradients to the momentum, and write what is to be orthogonalized."""
        states = batch.prepared
        if not states[0].kind.formats[0].quantized:
            for (number, _), update in updates.items():  # torch's operations, for its bits
                group = self.param_groups[batch.caches[number].group]
                momentum, grad = batch.tensors[number][1], batch.grads[number].float()
                momentum.lerp_(grad, 1.0 - group["momentum"])
                update.copy_(
                    grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                )
            return
        prepared = matrices.prepared
        for (number, _), update in updates.items():
            if number not in prepared or prepared[number].addresses[0] != update.data_ptr():
                prepared[number] = states[number].with_parameter(update)
        numbers = [number for number, _ in updates]
        tensors = [[update, *batch.tensors[n][1:]] for (n, _), update in updates.items()]
        self._run_kernel(batch.part(numbers, tensors), [prepared[n] for n in numbers], False)

    def _apply(self, batch: Batch, updates: Views) -> None:
        alike: dict[tuple[int, float], list[int]] = defaultdict(list)
        found = {number: update for (number, _), update in updates.items()}
        for number in found:
            cache = batch.caches[number]
            adjust = self.param_groups[cache.group]["adjust_lr_fn"]
            alike[cache.group, learning_rate_ratio(cache.shape, adjust)].append(number)
        for (index, ratio), numbers in alike.items():
            params = [batch.tensors[number][0] for number in numbers]
            changes = [found[number] for number in numbers]
            group = self.param_groups[index]
            lr, decay = float(group["lr"]), float(group["weight_decay"])
            if self.quantization_config.stochastic_rounding and params[0].dtype == torch.bfloat16:
                self._round_by_chance(
                    batch, numbers, changes, [0, 1, 1, 0, 0, 0, decay / ratio, lr * ratio]
                )
                continue
            scale_and_add_all(params, 1 - lr * decay, changes, -lr * ratio)
            count_write(*params)

    def _round_by_chance(
        self, batch: Batch, numbers: list[int], changes: list[Tensor], scalars: list[float]
    ) -> None:
        """Update bf16 parameters with the kernel for SGD, whose momentum is none."""
        tensors = [
            [param, torch.zeros_like(param, dtype=torch.float32)]
            for param in (batch.tensors[number][0] for number in numbers)
        ]
        prepared = [prepare(pair, FULL_PRECISION[:1]) for pair in tensors]
        part = batch.part(numbers, tensors)._replace(rule="sgd", grads=changes)
        self._run_kernel(part, prepared, True, lambda *unused: scalars)


def muon_groups(
    module: nn.Module, adamw: Iterable[Tensor] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sort the parameters of a model into two groups for :class:`QuantizedMuon`.

    AdamW gets embeddings and heads, as :func:`~lq_lightning.data_parallel.embedding_params` finds
    them, and all parameters that are no matrices, Muon the other matrices. ``group["params"]`` are
    pairs of a name and a parameter.

    Args:
        module: The model, after ``fully_shard``.
        adamw: Further parameters for AdamW, such as the head of a model without embeddings, or a
            matrix of positions that is no ``nn.Embedding``.

    Returns:
        The group for Muon, and the one for AdamW. Set its ``"lr"`` and other options there.
    """
    chosen = {id(param) for param in [*embedding_params(module), *adamw]}
    muon: dict[str, Any] = {"params": [], "muon": True}
    rest: dict[str, Any] = {"params": [], "muon": False}
    for name, param in module.named_parameters():
        group = rest if id(param) in chosen or param.dim() != 2 else muon
        group["params"].append((name, param))
    for group in (muon, rest):
        if not group["params"]:
            group["param_names"] = []  # torch wants names in all groups or none
    return muon, rest


# --- conversion ---------------------------------------------------------------------------------

_TWINS: dict[type[Optimizer], type[QuantizedOptimizer]] = {
    torch.optim.AdamW: QuantizedAdamW,
    torch.optim.Adam: QuantizedAdam,
    torch.optim.SGD: QuantizedSGD,
    torch.optim.Muon: QuantizedMuon,
}


def quantize_optimizer(
    optimizer: Optimizer,
    config: OptimizerQuantization | None = None,
    *,
    module: nn.Module | None = None,
    full_precision: Iterable[Tensor] = (),
) -> QuantizedOptimizer:
    """Make an optimizer store its states as codes, in place.

    Learning-rate schedulers, parameter groups, hooks and references to the optimizer continue to
    work. Existing states are quantized.

    Args:
        optimizer: ``torch.optim.AdamW``, ``Adam``, ``Muon`` or ``SGD`` with momentum, or one named
            ``Lion`` that has only its learning rate, betas and weight decay.
        config: Formats, and the choice of states that stay in fp32.
        module: Model with the names for ``quantization_plan`` and the embeddings, whose states stay
            in fp32 unless ``config`` says otherwise.
        full_precision: Further parameters whose states stay in fp32.

    Returns:
        The same object, now of a quantized class.

    Raises:
        TypeError: The optimizer is another one. Subclasses are refused, too, since they may update
            differently.
        ValueError: Hyperparameters have no quantized form, such as ``amsgrad=True``.
    """
    config = config or OptimizerQuantization()
    kept = excluded(full_precision)
    if module is not None and not config.quantize_embeddings:
        kept = {**embedding_weights(module), **kept}
    if isinstance(optimizer, QuantizedOptimizer):
        name = type(optimizer).__name__
        raise TypeError(f"the optimizer is a `{name}` already: use it as it is.")
    twin = _twin_of(optimizer)
    for group in optimizer.param_groups:
        twin.check_group(group)
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, _SCHEDULER_MARK):
        raise TypeError(
            f"`{type(optimizer).__name__}.step` was replaced on this object by {step!r}, which "
            "would skip the quantized step. Quantize the optimizer before wrapping its `step`."
        )
    optimizer.__class__ = twin
    if not isinstance(optimizer, QuantizedOptimizer):
        raise AssertionError("the class was just assigned")
    Optimizer.__setstate__(optimizer, {})  # puts the hooks around the new class's `step`
    if step is not None:
        _track_calls(optimizer)
    names: dict[Tensor, str] = {}
    if module is not None:
        names = {param: name for name, param in module.named_parameters()}
    optimizer.enable_quantization(config, kept, names)
    return optimizer


def _twin_of(optimizer: Optimizer) -> type[QuantizedOptimizer]:
    kind = type(optimizer)
    if kind in _TWINS:
        return _TWINS[kind]
    if kind.__name__ == "Lion":
        extra = {
            key
            for group in optimizer.param_groups
            for key, value in group.items()
            if key not in _LION_KEYS and value
        }
        if not extra:
            return QuantizedLion
        raise ValueError(
            f"{kind.__module__}.Lion has options without a quantized form: "
            f"{', '.join(sorted(extra))}. Switch them off."
        )
    raise TypeError(
        f"no quantized form of {kind.__module__}.{kind.__qualname__}; supported are "
        "torch.optim.AdamW, Adam, Muon and SGD themselves (no subclasses), and Lion. Use one of "
        'them, or leave the optimizer as it is (`optimizer_state="none"`).'
    )


def _track_calls(optimizer: Optimizer) -> None:
    """Note calls of ``step`` for learning-rate schedulers, which warn when there were none.

    A scheduler has bound the step of the former class to the object.
    """
    weak = ref(optimizer)
    inner = type(optimizer).step

    @wraps(inner)
    def step(*args: Any, **kwargs: Any) -> Any:
        this = weak()
        if this is None:
            raise ReferenceError("the optimizer of this step is gone")
        note_optimizer_step(this)
        return inner(this, *args, **kwargs)

    setattr(step, _SCHEDULER_MARK, True)
    optimizer.step = step  # type: ignore[method-assign]
