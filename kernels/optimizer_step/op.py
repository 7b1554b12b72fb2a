"""One optimizer step on many tensors: a plain function, since nothing traces an optimizer step.

An operator of torch would convert its lists of tensors at every call, which takes longer than all
else that is done here for a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from lq_lightning.kernels.message.operators import count_write

from . import reference as cpu
from .formats import NUM_SCALARS, RULES
from .prepared import FLOAT_DTYPES, PreparedTensor, check_tensor, states_of


def _check(
    tensors: Sequence[Sequence[Tensor]],
    prepared: Sequence[PreparedTensor],
    grads: Sequence[Tensor],
    scalars: Tensor,
    seeds: Sequence[int],
    first_groups: Sequence[int],
    rule: str,
    stochastic: bool,
) -> None:
    if rule not in RULES:
        raise ValueError(f"rule={rule!r} is not known; allowed: {', '.join(RULES)}.")
    kind, dtype = prepared[0].kind, grads[0].dtype if grads else None
    num_states = 2 if rule in ("adamw", "adam") else 1
    if len(kind.formats) != num_states:
        raise ValueError(f"{len(kind.formats)} states were prepared; {rule!r} has {num_states}.")
    numbers = {"tensors": len(tensors), "grads": len(grads)}
    if any(fmt.quantized for fmt in kind.formats) or stochastic and kind.dtype == torch.bfloat16:
        numbers |= {"seeds": len(seeds), "first_groups": len(first_groups)}
    for name, number in numbers.items():
        if number != len(prepared):
            raise ValueError(f"{name} has {number} entries for {len(prepared)} parameters.")
    if tuple(scalars.shape) != (len(prepared), NUM_SCALARS) or scalars.dtype != torch.float32:
        raise ValueError(
            f"scalars is {scalars.dtype} {tuple(scalars.shape)}; expected torch.float32 "
            f"{(len(prepared), NUM_SCALARS)}."
        )
    for item, grad in zip(prepared, grads, strict=True):
        if item.kind is not kind or grad.dtype is not dtype:
            raise ValueError(
                f"tensors of {item.kind} with a gradient of {grad.dtype} and of {kind} with one "
                f"of {dtype} cannot share a step; call it once for each."
            )
        if grad.shape != item.shape or dtype not in FLOAT_DTYPES or not grad.is_contiguous():
            check_tensor("grads", grad, tuple(item.shape), FLOAT_DTYPES)


def optimizer_step(
    tensors: Sequence[Sequence[Tensor]],
    prepared: Sequence[PreparedTensor],
    grads: Sequence[Tensor],
    scalars: Tensor,
    seeds: Sequence[int],
    first_groups: Sequence[int],
    rule: str,
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

    The parameter is updated with the new states before these are quantized, which is by chance
    between the two nearest levels, as ``formats.py`` says.

    Args:
        tensors: each parameter with the parts of its states, as they were given to ``prepare``;
            updated.
        prepared: what ``prepare`` returned for each of them, all of one kind. The tensors must
            still be where they were then, which is not checked: see ``PreparedTensor.is_in_place``.
        grads: in the shapes of the parameters and on their device, all fp32 or all bf16,
            contiguous.
        scalars: ``[N, 8]`` fp32 on the CPU, the s0..s7 above.
        seeds: of the noise that rounds codes and bf16 parameters, one per tensor, never the same
            for two tensors or steps. Neither these nor the next are needed where all states are
            fp32 and ``stochastic`` rounds nothing.
        first_groups: number of each tensor's first group in the whole parameter.
        rule: a name of ``RULES``.
        stochastic: round bf16 parameters stochastically.

    Raises:
        ValueError: shapes, dtypes, strides or numbers of tensors other than above.

    Determinism: the same bits on CPU and CUDA.
    """
    if not prepared:
        return
    _check(tensors, prepared, grads, scalars, seeds, first_groups, rule, stochastic)
    kind = prepared[0].kind
    if kind.device.type == "cuda":
        from .launch import launch_optimizer_step

        launch_optimizer_step(prepared, grads, scalars, seeds, first_groups, rule, stochastic)
    else:
        for index, (values, parts) in enumerate(zip(scalars.tolist(), tensors, strict=True)):
            cpu.step(
                parts[0],
                grads[index],
                states_of(parts, kind.formats),
                values,
                seeds[index] if seeds else 0,
                first_groups[index] if seeds else 0,
                rule,
                kind.formats,
                stochastic,
            )
    count_write(*chain.from_iterable(tensors))
