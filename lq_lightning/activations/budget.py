"""Choose how activations are kept so that training fits into a given memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lq_lightning.foundation.agreement import gather_objects
from lq_lightning.foundation.checks import check_choice, is_whole

from .allocation import Allocation, allocate, least_nbytes
from .calibrate import (
    CANDIDATES,
    FULL_PRECISION,
    calibrate_activations,
    full_precision,
    measured_nbytes,
    unchanged,
)
from .calibration import ActivationCalibration
from .install import quantize_activations
from .memory import OtherMemory, other_memory
from .policy import ActivationPolicy, ActivationRule, Matmul
from .recompute import install_recomputation, remove_recomputation
from .sites import policy_kind, sites_of

__all__ = ["ActivationPlan", "MemoryBudget", "plan_activations"]

Scope = Literal["device", "activations"]

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_ROUNDS = 3


@dataclass(frozen=True, kw_only=False)  # no slots: jsonargparse reads defaults with vars()
class MemoryBudget:
    """How much memory training may take.

    What the model needs besides saved activations (weights, gradients, states of optimizers, the
    loss) is measured and taken off; activations may have the rest.

    Codes are chosen for norms, activation functions, MLPs and linear layers. What attention and
    blocks save in which not all is recognized is kept in full precision or recomputed.

    Args:
        size: Per device: ``"60GiB"`` (2**30 bytes each), ``"60 GB"`` (10**9), bytes as an ``int``,
            or a share of the device's memory as a ``float`` up to 1.0. What counts is allocated
            memory (``torch.cuda.max_memory_allocated``); leave the allocator a few percent.
        scope: ``"device"``: all of it; ``"activations"``: saved activations alone.
        time_weight: What time is worth. Choices are compared by the mean squared relative error of
            gradients plus this times the share of a step that they take longer. At 0.1, ten percent
            more time are as bad as errors of 10%; larger values prefer codes, 0 prefers
            recomputation wherever that fits.
        recompute: Whether attentions, MLPs and blocks may be recomputed.

    Raises:
        ValueError: A value that is not listed above.
    """

    size: str | int | float
    scope: Scope = "device"
    time_weight: float = 0.1
    recompute: bool = True

    def __post_init__(self) -> None:
        """Check the values."""
        check_choice("MemoryBudget", "scope", self.scope, get_args(Scope))
        check_choice("MemoryBudget", "recompute", self.recompute, (True, False))
        if not isinstance(self.time_weight, (int, float)) or not self.time_weight >= 0:
            raise ValueError(
                f"`MemoryBudget(time_weight={self.time_weight!r})` must be 0 or more: 0.1 is usual."
            )
        self.nbytes(1 << 40)

    def nbytes(self, total_nbytes: int) -> int:
        """Return the budget in bytes.

        Args:
            total_nbytes: Memory of the device, for shares of it.

        Raises:
            ValueError: ``size`` is none of what is allowed.
        """
        size = self.size
        if is_whole(size) and size > 0:
            return size
        if isinstance(size, float) and 0.0 < size <= 1.0:
            return int(size * total_nbytes)
        match = _SIZE.fullmatch(size) if isinstance(size, str) else None
        if match is None or not float(match[1]):
            raise ValueError(
                f"`MemoryBudget({size!r})` is no amount of memory: give a string such as '60GiB' "
                "or '60 GB', an int of bytes, or a float up to 1.0 for a share of the device."
            )
        base = 1024 if match[3] else 1000
        return int(float(match[1]) * base ** _POWERS[match[2].lower()])


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 26 else f"{nbytes / 2**10:.1f} KiB"


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationPlan:
    """A policy for a budget, and what it was chosen from.

    Attributes:
        policy: the choice as rules.
        allocation: the choice with its costs.
        calibration: all measurements.
        budget_nbytes: the budget.
        other: what is needed besides saved activations; zeros if the budget is for them alone.
        measured_nbytes: what one forward pass with the policy saves.
    """

    policy: ActivationPolicy
    allocation: Allocation
    calibration: ActivationCalibration
    budget_nbytes: int
    other: OtherMemory
    measured_nbytes: int

    def summary(self) -> str:
        """Return a few lines for people."""
        chosen, counts = self.allocation, dict[str, int]()
        for codec in chosen.codecs.values():
            counts[codec] = counts.get(codec, 0) + 1
        coded = ", ".join(f"{count} x {codec}" for codec, count in sorted(counts.items()))
        full = self.calibration.saved_nbytes({})[0]
        step = max(self.calibration.step_time_s, 1e-12)
        return "\n".join(
            [
                f"Saved activations: {_gib(chosen.nbytes)} at the peak instead of {_gib(full)}; "
                f"{_gib(self.other.nbytes)} for all else, of {_gib(self.budget_nbytes)}.",
                f"Sites with codes: {coded or 'none'}; recomputed modules: "
                f"{len(chosen.recomputed)}.",
                "Expected relative error of gradients: "
                f"{chosen.mean_squared_error**0.5:.4f} (root of the mean square); "
                f"time: +{100 * chosen.time_s / step:.1f}%.",
            ]
        )


def _policy(allocation: Allocation, matmul: Matmul) -> ActivationPolicy:
    rules = [ActivationRule(module=unit, recompute=True) for unit in allocation.recomputed]
    rules += [ActivationRule(module=s, codec=codec) for s, codec in allocation.codecs.items()]
    return replace(FULL_PRECISION, matmul=matmul, rules=tuple(rules))


@contextmanager
def _applied(model: nn.Module, policy: ActivationPolicy) -> Iterator[None]:
    sites = [site for module in model.modules() for site in sites_of(module)]
    if not sites:
        handle = quantize_activations(model, policy)
        try:
            yield
        finally:
            handle.remove()
        return
    before = [site.codec for site in sites]
    for site in sites:
        kind = policy_kind(site)
        site.codec = None if kind is None else policy.codec(kind, site.name)
    recomputed = install_recomputation(model, policy)
    try:
        yield
    finally:
        remove_recomputation(recomputed)
        for site, codec in zip(sites, before, strict=True):
            site.codec = codec


def _total_nbytes(model: nn.Module, budget: MemoryBudget) -> int:
    device = next(model.parameters()).device
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if isinstance(budget.size, float):
        raise ValueError(
            f"`MemoryBudget({budget.size!r})` is a share of a device's memory, but the model is on "
            f"{device.type!r}: give an amount such as '8GiB'."
        )
    return 0


def _infeasible(
    budget: MemoryBudget, calibration: ActivationCalibration, other: OtherMemory, nbytes: int
) -> RuntimeError:
    least = least_nbytes(
        calibration, recompute=budget.recompute, at_loss_nbytes=other.at_loss_nbytes
    )
    need = max(least + other.nbytes, other.after_backward_nbytes)
    return RuntimeError(
        f"`MemoryBudget({budget.size!r})` is {_gib(nbytes)}, but the least that would do is "
        f"{need} bytes ({_gib(need)}): {_gib(least)} for saved activations, "
        f"{_gib(other.nbytes)} for all else. Give more memory, a smaller batch"
        + (", 8-bit states and gradients" if other.nbytes else "")
        + ("." if budget.recompute else ", or allow `recompute=True`.")
    )


def plan_activations(
    model: nn.Module,
    run_step: Callable[[], Tensor],
    budget: MemoryBudget,
    candidates: Sequence[str] = CANDIDATES,
    *,
    optimizers: Sequence[Optimizer] = (),
    accumulates: bool = False,
    matmul: Matmul = "native",
) -> ActivationPlan:
    """Measure a model and choose how its activations are kept within a budget.

    The choice is checked by a forward pass with it, and made again with less where that saves more
    than was foreseen. With several ranks all must call; all get the same policy.

    Args:
        model: As it trains: on its device, sharded or not, quantized (by a policy without
            ``recompute`` rules) or not.
        run_step: Forward pass of one real batch; returns the loss, with its graph. Called several
            times; gradients, random numbers and buffers are left as they were.
        budget: What to fit into.
        candidates: Names of codecs to choose from.
        optimizers: Of the model; states that they have not made yet are foreseen.
        accumulates: Whether gradients of other batches are there during a step.
        matmul: Of the policy.

    Raises:
        RuntimeError: The budget cannot be met; the message says what would do.
        ValueError: An unknown codec, or a share of the memory of something that is no GPU.
    """
    nbytes = budget.nbytes(_total_nbytes(model, budget))
    calibration = calibrate_activations(model, run_step, candidates)
    other = OtherMemory()
    if budget.scope == "device":
        with unchanged(model), full_precision(model):
            other = other_memory(model, run_step, calibration, optimizers, accumulates)
        other = replace(
            other,
            nbytes=max(gather_objects(other.nbytes)),
            at_loss_nbytes=max(gather_objects(other.at_loss_nbytes)),
            after_backward_nbytes=max(gather_objects(other.after_backward_nbytes)),
        )
    margin = 0
    for _ in range(_ROUNDS):
        allocation = allocate(
            calibration,
            nbytes - other.nbytes - margin,
            time_weight=budget.time_weight,
            recompute=budget.recompute,
            at_loss_nbytes=other.at_loss_nbytes,
        )
        if allocation is None or other.after_backward_nbytes > nbytes:
            raise _infeasible(budget, calibration, other, nbytes)
        policy = _policy(allocation, matmul)
        with _applied(model, policy):
            measured = max(gather_objects(measured_nbytes(model, run_step)))
        excess = measured - allocation.kept_nbytes
        if excess <= 0 or allocation.nbytes + excess + other.nbytes <= nbytes:
            return ActivationPlan(
                policy=policy,
                allocation=allocation,
                calibration=calibration,
                budget_nbytes=nbytes,
                other=other,
                measured_nbytes=measured,
            )
        margin += excess
    raise RuntimeError(
        f"`MemoryBudget({budget.size!r})`: a forward pass saved {_gib(excess)} more than was "
        f"foreseen, {_ROUNDS} times. Does the model keep different tensors from step to step? "
        "Give a policy instead of a budget."
    )
