"""The operator ``lq_lightning::optimizer_step``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lq_lightning.kernels.message.operators import count_write, define_operator

from . import reference as cpu
from .formats import (
    FORMATS,
    NUM_SCALARS,
    RULES,
    StateFormat,
    groups_per_row,
    row_length,
    state_format,
)
from .reference import State

_SCHEMA = (
    "optimizer_step(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] first, "
    "Tensor(c!)[] first_scale, "
    "Tensor(d!)[] first_exponent, Tensor(e!)[] second, Tensor(f!)[] second_scale, "
    "Tensor(g!)[] second_exponent, Tensor scalars, int[] seeds, int[] offsets, str rule, "
    "str first_format, str second_format, bool stochastic) -> ()"
)


def _has_two_states(rule: str) -> bool:
    return rule in ("adamw", "adam")


def _formats(rule: str, first_format: str, second_format: str) -> list[StateFormat]:
    if rule not in RULES:
        raise ValueError(f"rule={rule!r} is not known; allowed: {', '.join(RULES)}.")
    first = state_format(first_format, signed=True)
    if not _has_two_states(rule):
        return [first]
    return [first, state_format(second_format, signed=False)]


def _check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}; "
            f"expected a contiguous tensor of {' or '.join(map(str, dtypes))} {shape}."
        )


def _states(
    params: Sequence[Tensor],
    lists: Sequence[Sequence[Tensor]],
    names: Sequence[str],
    fmt: StateFormat,
) -> list[State]:
    """Check the tensors of one state of all parameters and put them together."""
    wanted = (True, fmt.quantized, fmt.expanded)
    for name, tensors, needed in zip(names, lists, wanted, strict=True):
        if len(tensors) != (len(params) if needed else 0):
            raise ValueError(
                f"{name} has {len(tensors)} tensors for {len(params)} parameters; format "
                f"{fmt.name!r} needs {'one each' if needed else 'none'}."
            )
    states = []
    for index, param in enumerate(params):
        constants = (param.shape[0], groups_per_row(row_length(param.shape)))
        codes_dtype = torch.uint8 if fmt.quantized else torch.float32
        _check_tensor(names[0], lists[0][index], tuple(param.shape), (codes_dtype,))
        scale = exponent = None
        if fmt.quantized:
            scale = lists[1][index]
            _check_tensor(names[1], scale, constants, (torch.bfloat16,))
        if fmt.expanded:
            exponent = lists[2][index]
            _check_tensor(names[2], exponent, constants, (torch.uint8,))
        states.append(State(lists[0][index], scale, exponent))
    return states


def _checked(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    lists: Sequence[Sequence[Tensor]],
    scalars: Tensor,
    formats: Sequence[StateFormat],
) -> list[list[State]]:
    """Check everything; return the states of every parameter."""
    if len(grads) != len(params):
        raise ValueError(f"{len(grads)} gradients for {len(params)} parameters.")
    _check_tensor("scalars", scalars, (len(params), NUM_SCALARS), (torch.float32,))
    float_dtypes = (torch.float32, torch.bfloat16)
    for param, grad in zip(params, grads, strict=True):
        if param.dim() == 0:
            raise ValueError("a parameter has no dimensions; pass a view of shape (1,).")
        _check_tensor("params", param, tuple(param.shape), float_dtypes)
        _check_tensor("grads", grad, tuple(param.shape), float_dtypes)
    names = ("first", "first_scale", "first_exponent")
    columns = [_states(params, lists[:3], names, formats[0])]
    if len(formats) == 2:
        names = ("second", "second_scale", "second_exponent")
        columns.append(_states(params, lists[3:], names, formats[1]))
    return [list(states) for states in zip(*columns, strict=True)]


def _optimizer_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    first: Sequence[Tensor],
    first_scale: Sequence[Tensor],
    first_exponent: Sequence[Tensor],
    second: Sequence[Tensor],
    second_scale: Sequence[Tensor],
    second_exponent: Sequence[Tensor],
    scalars: Tensor,
    seeds: Sequence[int],
    offsets: Sequence[int],
    rule: str,
    first_format: str,
    second_format: str,
    stochastic: bool,
) -> None:
    """Update parameters and their states in place, N tensors in one launch.

    In all rules ``g`` is the gradient in fp32, ``sign`` is -1 to maximize, else 1:

    * ``adamw``: ``m = s0 m + s1 g``; ``v = s2 v + s3 g**2``; ``p = s6 p - s7 m / (sqrt(v) + s4)``,
      with s1 = sign (1 - beta1), s4 = eps * r, s6 = 1 - lr * decay, s7 = lr * r / (1 - beta1**t),
      where r = sqrt(1 - beta2**t). A v below 2**-100 counts as 2**-100 under the root, an infinite
      one as NaN.
    * ``adam``: the same with ``g + s6 p`` for ``g`` (s6 = sign * decay) and no other decay.
    * ``lion``: ``p = s6 p - s7 sign(s0 m + s1 g)``; ``m = s2 m + s3 g``.
    * ``sgd``: ``g = g + s6 p``; ``m = s0 m + s1 g``; ``p = p - s7 m``; ``nesterov``:
      ``p = p - s7 (s2 g + s0 m)``.

    The parameter is updated with the new states before these are quantized.

    Args:
        params: ``[D, ...]`` each, fp32 or bf16, contiguous, updated.
        grads: like the parameters, fp32 or bf16.
        first: codes of the first state, uint8, or its fp32 values for format ``float32``; updated.
        first_scale: ``[D, groups_per_row]`` bf16 each; empty for format ``float32``.
        first_exponent: the same in uint8; empty unless the format is ``expanded_fp8``.
        second: as ``first`` for the second state; empty for rules with one state.
        second_scale: as ``first_scale``.
        second_exponent: as ``first_exponent``.
        scalars: ``[N, 8]`` fp32 on the CPU, the s0..s7 above.
        seeds: for stochastic rounding, one per tensor.
        offsets: position of each tensor's first element in the whole parameter.
        rule: a name of ``RULES``.
        first_format: a name of ``FORMATS``.
        second_format: a name of ``FORMATS``; ignored for rules with one state.
        stochastic: round bf16 parameters stochastically.

    Raises:
        ValueError: shapes, dtypes or strides other than above.

    Determinism: the same bits on CPU and CUDA.
    """
    formats = _formats(rule, first_format, second_format)
    lists = (first, first_scale, first_exponent, second, second_scale, second_exponent)
    states = _checked(params, grads, lists, scalars, formats)
    if params and params[0].is_cuda:
        from .launch import launch_optimizer_step

        launch_optimizer_step(
            params, grads, states, scalars, seeds, offsets, rule, formats, stochastic
        )
    else:
        values = scalars.tolist()
        for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
            cpu.step(
                param,
                grad,
                states[index],
                values[index],
                seeds[index],
                offsets[index],
                rule,
                formats,
                stochastic,
            )
    for tensors in (params, *lists):
        count_write(*tensors)


def _fake_optimizer_step(*arguments: object) -> None:
    return None


optimizer_step = define_operator(_SCHEMA, _optimizer_step, _fake_optimizer_step)

__all__ = ["FORMATS", "optimizer_step"]
