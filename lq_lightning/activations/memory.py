"""What training needs besides saved activations."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lq_lightning.foundation.nested import tensors_in

from .backward import run_backward
from .calibration import ActivationCalibration
from .policy import ActivationPolicy, ActivationRule
from .recompute import install_recomputation, remove_recomputation, whole_blocks

__all__ = ["OtherMemory", "other_memory", "state_nbytes"]

_PROBE_SHAPE = (256, 256)  # a matrix, and large: what is small or 1-D may not be quantized


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherMemory:
    """Memory of one device.

    Attributes:
        nbytes: needed beside the peak of saved activations.
        at_loss_nbytes: more, beside all that is kept, while the loss is computed.
        after_backward_nbytes: needed once activations are gone and all gradients are there.
    """

    nbytes: int = 0
    at_loss_nbytes: int = 0
    after_backward_nbytes: int = 0


def _local_nbytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def _stored_nbytes(state: Any) -> int:
    return sum(_local_nbytes(t) for t in tensors_in(state))


def _expected(optimizer: Optimizer, group: dict[str, Any], like: Tensor) -> float:
    """Bytes of state per value of a parameter, of an optimizer of the same class and options."""
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
            f"The states that {type(optimizer).__name__} will make cannot be foreseen: it does not "
            f"run on one parameter alone ({error}). Choose the policy after its first step, or "
            "give `MemoryBudget(..., scope='activations')`."
        ) from error
    return _stored_nbytes(list(same.state.values())) / probe.numel()


def state_nbytes(optimizers: Sequence[Optimizer]) -> int:
    """Return the bytes of states that optimizers have not made yet, on this rank.

    Raises:
        RuntimeError: An optimizer cannot be asked.
    """
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
    """Gradients that are there while the first modules of the backward pass run.

    Those of parameters outside of blocks, such as the output projection, and those of one block;
    FSDP2 holds them twice, whole.
    """
    blocks = whole_blocks(units)
    modules = dict(model.named_modules())
    inside = {id(p) for block in blocks for p in modules[block].parameters()}
    outside = _gradient_nbytes(p for p in model.parameters() if id(p) not in inside)
    largest = 0
    for block in blocks:
        nbytes = 0
        for p in modules[block].parameters():
            if p.requires_grad:
                copies = 2 if isinstance(p, DTensor) else 1
                nbytes += copies * p.numel() * p.element_size()
        largest = max(largest, nbytes)
    return outside + largest


def other_memory(
    model: nn.Module,
    run: Callable[[], Tensor],
    calibration: ActivationCalibration,
    optimizers: Sequence[Optimizer],
    accumulates: bool,
) -> OtherMemory:
    """Return what one step needs besides saved activations.

    On a GPU one forward and backward pass with all blocks recomputed is measured; gradients and
    states that are not there yet come on top. On a CPU, which counts nothing, weights, buffers,
    gradients and states are added up.

    Args:
        model: in full precision, with its sites or without.
        run: returns a loss.
        calibration: of the same model and batch.
        optimizers: of the model.
        accumulates: whether gradients of other batches are there during a step.
    """
    states = state_nbytes(optimizers)
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
    """Peaks of allocated memory until the first block runs backwards, and from there on."""
    readings: list[int] = []

    def read(_: Tensor) -> None:
        if not readings:
            readings.append(torch.cuda.max_memory_allocated(device))
            torch.cuda.reset_peak_memory_stats(device)

    rules = tuple(ActivationRule(module=block, recompute=True) for block in blocks)
    recomputed = install_recomputation(model, ActivationPolicy(rules=rules))
    try:
        torch.cuda.reset_peak_memory_stats(device)
        run_backward(model, run, read)
        readings.append(torch.cuda.max_memory_allocated(device))
    finally:
        remove_recomputation(recomputed)
    return readings[0], readings[-1]
