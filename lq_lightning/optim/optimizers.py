"""Quantized AdamW, Adam, SGD and Lion."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .base import QuantizedOptimizer, excluded
from .config import OptimizerQuantization


def _adam_rule(group: Mapping[str, Any]) -> str:
    # groups of AdamW have it too, also those of states saved by older torch, which sets it then
    return "adamw" if group["decoupled_weight_decay"] else "adam"


def adam_scalars(group: Mapping[str, Any], step: int, is_first: bool) -> list[float]:
    """Scalars of the rules ``adam`` and ``adamw``, as ``kernels.optimizer_step`` says."""
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
    _rule, _scalars = staticmethod(_adam_rule), staticmethod(adam_scalars)
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
    _rule, _scalars = staticmethod(_adam_rule), staticmethod(adam_scalars)
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
