"""Muon with a quantized momentum, and AdamW for what is no matrix, in one optimizer."""

from __future__ import annotations

import inspect
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lq_lightning._compat.torch import scale_and_add_all
from lq_lightning.codecs import CodecSpec
from lq_lightning.foundation.checks import check_choice
from lq_lightning.foundation.parameters import embedding_params
from lq_lightning.kernels.message.operators import count_write
from lq_lightning.kernels.optimizer_step.formats import StateFormat, state_format

from .base import FULL_PRECISION, Batch, ParamStepCache, QuantizedOptimizer, advance, excluded
from .config import MOMENTUM_STAMP, OptimizerQuantization
from .optimizers import QuantizedAdamW, adam_scalars
from .orthogonalization import Round, learning_rate_ratio, plan_rounds

_OF_ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8}  # defaults of groups for AdamW
_OPTIONS = inspect.signature(torch.optim.Muon).parameters.keys() - {"params"}
_FIXED = {"maximize": False, "decoupled_weight_decay": True}
_MAX_PLANS = 8  # of rounds that are kept, for batches of different parameters


def _is_muon(group: Mapping[str, Any]) -> bool:
    return bool(group.get("muon", True))  # groups of ``torch.optim.Muon`` do not say it


class QuantizedMuon(QuantizedOptimizer, torch.optim.Muon):
    """Muon with a quantized momentum for matrices, and quantized AdamW for all other parameters.

    Parameters of groups with ``"muon": True``, which is the default, are updated as by
    ``torch.optim.Muon``, those of groups with ``"muon": False`` as by ``torch.optim.AdamW``.
    :func:`muon_groups` makes the two groups of a model. Groups may set their own options; for AdamW
    these are ``lr``, ``weight_decay``, ``betas`` and ``eps`` (torch's defaults for the last two).

    Each matrix that is sharded (FSDP2, tensor parallelism, also both) is orthogonalized by one of
    its ranks, to which the others send their pieces of its update. These ranks must have gradients
    of the same matrices, in the same order of parameters.

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
        update_codec: Codec of the pieces of updates that ranks exchange, the same on all ranks;
            None sends bf16. ``CodecSpec(code="int8", group_size=128)`` halves these bytes.
        quantization: Formats, and the choice of states that stay in fp32. Momentum of matrices is
            in ``"int8"``, even levels in groups of 32, unless ``first_moment="float32"``.
        full_precision: Parameters whose states stay in fp32, such as ``embedding_weights(model)``.

    Raises:
        ValueError: Hyperparameters are out of range, or a group for Muon has a parameter that is no
            matrix.

    Source: Jordan et al., Muon; Liu et al., Muon is Scalable for LLM Training (``adjust_lr_fn``).
    Differs in: 8-bit momentum; a matrix is gathered once, to one rank.
    """

    state_names = ("momentum_buffer",)
    update_codec: CodecSpec | None = None
    round_nbytes: ClassVar[int] = 64 << 20  # of updates in bf16 that a rank computes together
    # Matrices by which rounds were planned, and the rounds; not in pickles or copies.
    _plans: Mapping[tuple[Any, ...], tuple[list[ParamStepCache], list[Round]]] = MappingProxyType(
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
        update_codec: CodecSpec | None = None,
        quantization: OptimizerQuantization | None = None,
        full_precision: Iterable[Tensor] = (),
    ) -> None:
        defaults = {name: value for name, value in locals().items() if name in _OPTIONS}
        self.update_codec = update_codec
        Optimizer.__init__(self, params, defaults)  # Muon's own refuses all but matrices
        self.enable_quantization(quantization or OptimizerQuantization(), excluded(full_precision))

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle or copy keeps."""
        return {**super().__getstate__(), "update_codec": self.update_codec}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle, or take what ``load_state_dict`` read, of torch's optimizers too."""
        groups = getattr(self, "param_groups", ()), state.get("param_groups", ())
        pairs = list(zip(*groups, strict=False))
        for own, saved in pairs:
            self.check_group({**own, **saved, "capturable": False})
            if _is_muon(own) != _is_muon({**own, **saved}):
                raise ValueError(
                    f'a saved parameter group has "muon": {not _is_muon(own)}, other than here.'
                )
        super().__setstate__(state)
        for own, saved in pairs:  # AdamW of torch has no options of Muon, nor the other way round
            saved.update({key: value for key, value in own.items() if key not in saved})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, with AdamW's defaults if it is for AdamW."""
        if not _is_muon(param_group):
            param_group = {**_OF_ADAMW, **param_group}
        super().add_param_group(param_group)

    @classmethod
    def check_group(cls, group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for hyperparameters out of range and for Muon beyond matrices."""
        super().check_group(group)
        values = {name: group[name] for name in ("lr", "weight_decay", "momentum", "eps")}
        betas = group.get("betas", _OF_ADAMW["betas"])
        if not (
            all(value >= 0.0 for value in values.values())
            and all(0.0 <= beta < 1.0 for beta in betas)
            and 0 <= group["ns_steps"] < 100
            and len(group["ns_coefficients"]) == 3
        ):
            raise ValueError(
                f"{cls.__name__}: {values} must be at least 0, betas={betas} too, and below 1, "
                f"ns_steps={group['ns_steps']} from 0 to 99, ns_coefficients="
                f"{group['ns_coefficients']} three numbers."
            )
        adjust = group["adjust_lr_fn"] or "original"
        check_choice(cls.__name__, "adjust_lr_fn", adjust, ("original", "match_rms_adamw"))
        if group.get("maximize"):
            raise ValueError(f"{cls.__name__}(maximize=True) is not supported: negate the loss.")
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

    def _formats(self, group: Mapping[str, Any]) -> dict[str, StateFormat]:
        formats = super()._formats(group)
        if not _is_muon(group) or not formats["momentum_buffer"].quantized:
            return formats
        # Newton-Schulz iterations amplify small singular values, and rounding errors with them:
        # those of even levels are the smallest that a byte allows.
        return {"momentum_buffer": state_format("int8", signed=True)}

    def _stamp(self, group: Mapping[str, Any]) -> str:
        quantized = _is_muon(group) and self.quantization_config.first_moment != "float32"
        return MOMENTUM_STAMP if quantized else super()._stamp(group)

    def _scalars(self, group: Mapping[str, Any], step: int, is_first: bool) -> list[float]:
        if not _is_muon(group):
            return adam_scalars({**group, **_FIXED}, step, is_first)
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
        key = (self.update_codec, *map(id, batch.caches))
        if key not in self._plans:
            kept = list(self._plans.items())[1 - _MAX_PLANS :]
            params = [p for cache in batch.caches if (p := cache.param()) is not None]
            plan = (batch.caches, plan_rounds(params, self.round_nbytes, self.update_codec))
            self._plans = dict([*kept, (key, plan)])  # with caches, so that no others get their ids
        return self._plans[key][1]

    def _update(self, batch: Batch, matrices: Round) -> Generator[None, None, None]:
        """Update the matrices of a round; yield when each exchange has begun."""
        flat, views = matrices.local.buffer(batch.tensors[0][0].device)
        self._advance_momentum(batch, {number: view for (number, _), view in views.items()})
        options = [
            (tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"])
            for group in self.param_groups
        ]
        kinds = [(cache.shape, options[cache.group]) for cache in batch.caches]
        running = matrices.updated(flat, kinds)
        del flat, views
        updates = yield from running
        self._apply(batch, {number: view for (number, _), view in updates.items()})

    def _advance_momentum(self, batch: Batch, updates: Mapping[int, Tensor]) -> None:
        """Add the gradients to the momentum, and write what is to be orthogonalized."""
        formats = batch.prepared[0].kind.formats
        if formats[0].quantized:
            tensors = [[update, *batch.tensors[n][1:]] for n, update in updates.items()]
            self._run_kernel(batch.part(updates, tensors, formats), False)
            return
        for number, update in updates.items():  # torch's operations, for its bits
            group = self.param_groups[batch.caches[number].group]
            momentum, grad = batch.tensors[number][1], batch.grads[number].float()
            momentum.lerp_(grad, 1.0 - group["momentum"])
            update.copy_(grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum)

    def _apply(self, batch: Batch, updates: Mapping[int, Tensor]) -> None:
        alike: dict[tuple[int, float], list[int]] = defaultdict(list)
        for number in updates:
            cache = batch.caches[number]
            adjust = self.param_groups[cache.group]["adjust_lr_fn"]
            alike[cache.group, learning_rate_ratio(cache.shape, adjust)].append(number)
        for (index, ratio), numbers in alike.items():
            params = [batch.tensors[number][0] for number in numbers]
            changes = [updates[number] for number in numbers]
            group = self.param_groups[index]
            lr, decay = float(group["lr"]), float(group["weight_decay"])
            if self.quantization_config.stochastic_rounding and params[0].dtype == torch.bfloat16:
                # the kernel for SGD, whose momentum is none
                scalars = [0, 1, 1, 0, 0, 0, decay / ratio, lr * ratio]
                tensors = [[p, torch.zeros_like(p, dtype=torch.float32)] for p in params]
                part = batch.part(numbers, tensors, FULL_PRECISION[:1])
                self._run_kernel(part._replace(rule="sgd", grads=changes), True, scalars)
                continue
            scale_and_add_all(params, 1 - lr * decay, changes, -lr * ratio)
            count_write(*params)


def muon_groups(
    module: nn.Module, adamw: Iterable[Tensor] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sort the parameters of a model into two groups for :class:`QuantizedMuon`.

    AdamW gets embeddings and heads, as :func:`~lq_lightning.data_parallel.embedding_params` finds
    them, and all parameters that are no matrices, Muon the other matrices. ``group["params"]`` are
    pairs of a name and a parameter.

    Args:
        module: The model, after ``fully_shard``.
        adamw: Further parameters for AdamW, such as the head of a model without embeddings.

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
