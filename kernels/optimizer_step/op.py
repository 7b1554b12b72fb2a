"""One optimizer step on many tensors: a plain function, since nothing traces an optimizer step.

An operator of torch would convert its lists of tensors at every call, which takes longer than all
else that is done here for a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from lq_lightning.kernels.message.operators import count_write
from lq_lightning.kernels.optimizer_step import reference as cpu
from lq_lightning.kernels.optimizer_step.formats import (
    NUM_SCALARS,
    RULES,
    StateFormat,
    groups_per_row,
    row_length,
)
from lq_lightning.kernels.optimizer_step.reference import State

FLOAT_DTYPES = (torch.float32, torch.bfloat16)
ALIGNMENT = 16  # bytes, of the wide loads of tensors whose rows are whole groups
# Pointers of the kernel's table: parameter, gradient, and codes, scale and exponent twice.
NUM_POINTERS, _FIRST_CODES, _SECOND_CODES = 8, 2, 5


class Kind(NamedTuple):
    """Device, dtype of parameters and formats of states that the tensors of one call share.

    Equal kinds are the same object.
    """

    device: torch.device
    dtype: torch.dtype
    formats: tuple[StateFormat, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedTensor:
    """Facts about a parameter and its states, checked; see :func:`prepare`.

    It does not hold the tensors. They have to stay where they are as long as it is used: whoever
    keeps it from one step to the next asks ``is_in_place`` before each.

    Attributes:
        kind: tensors of one kind share a launch.
        shape: shape of the parameter, ``[D, ...]``.
        addresses: pointers to the parameter, then to codes, scale and exponent of each state, as
            far as its format has them.
        pointers: columns of the kernel's table: addresses of parameter, gradient (0) and codes,
            scale and exponent of two states, 0 where there is none.
        length: elements of a row.
        row_groups: groups of a row.
        aligned: rows are whole groups, and parameter and codes begin at multiples of 16 bytes.
    """

    kind: Kind
    shape: torch.Size
    addresses: list[int]
    pointers: tuple[int, ...]
    length: int
    row_groups: int
    aligned: bool

    def is_in_place(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the tensors that were prepared, in the same order, are where they were."""
        param = tensors[0]
        return (
            list(map(Tensor.data_ptr, tensors)) == self.addresses
            and param.shape == self.shape
            and param.dtype is self.kind.dtype
            and param.is_contiguous()
        )


@cache
def _kind(device: torch.device, dtype: torch.dtype, formats: tuple[StateFormat, ...]) -> Kind:
    return Kind(device, dtype, formats)


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raise ``ValueError`` for a tensor that the kernels would misread."""
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}; "
            f"expected a contiguous tensor of {' or '.join(map(str, dtypes))} {shape}."
        )


def prepare(tensors: Sequence[Tensor], formats: Sequence[StateFormat]) -> PreparedTensor:
    """Check a parameter and its states for ``optimizer_step``.

    Args:
        tensors: the parameter ``[D, ...]``, fp32 or bf16; then for each state its codes, uint8 in
            the shape of the parameter; its scale, ``[D, groups_per_row]`` bf16; and for
            ``expanded_fp8`` its exponent, the same in uint8. A state of the format ``float32`` is
            one fp32 tensor in the shape of the parameter. All are contiguous and on one device.
        formats: formats of the one or two states, of the same size of groups.

    Raises:
        ValueError: shapes, dtypes, strides, numbers of tensors or formats other than above.
    """
    param = tensors[0]
    if param.dim() == 0:
        raise ValueError("a parameter has no dimensions; pass a view of shape (1,).")
    check_tensor("param", param, tuple(param.shape), FLOAT_DTYPES)
    length, sizes = row_length(param.shape), {fmt.group_size for fmt in formats}
    if len(sizes) > 1:
        raise ValueError(
            f"states in {' and '.join(fmt.name for fmt in formats)} have groups of "
            "different sizes; choose 'int8' only where there is one state."
        )
    size = formats[0].group_size
    constants = (param.shape[0], groups_per_row(length, size))
    wanted = []
    for name, fmt in zip(("first", "second"), formats, strict=False):
        codes = torch.uint8 if fmt.quantized else torch.float32
        wanted.append((name, True, tuple(param.shape), codes))
        wanted.append((f"{name}_scale", fmt.quantized, constants, torch.bfloat16))
        wanted.append((f"{name}_exponent", fmt.expanded, constants, torch.uint8))
    needed = [name for name, is_needed, _, _ in wanted if is_needed]
    if len(tensors) != 1 + len(needed) or len(wanted) != 3 * len(formats):
        raise ValueError(
            f"{len(tensors) - 1} tensors for states of the formats "
            f"{', '.join(fmt.name for fmt in formats)}; expected {', '.join(needed)}."
        )
    rest = iter(tensors[1:])
    pointers = [param.data_ptr(), 0]
    for name, is_needed, shape, dtype in wanted:
        if is_needed:
            tensor = next(rest)
            check_tensor(name, tensor, shape, (dtype,))
            if tensor.device != param.device:
                raise ValueError(
                    f"{name} is on {tensor.device}, its parameter on {param.device}; move one of "
                    "them."
                )
            pointers.append(tensor.data_ptr())
        else:
            pointers.append(0)
    pointers += [0] * (NUM_POINTERS - len(pointers))
    wide = (pointers[0], pointers[_FIRST_CODES], pointers[_SECOND_CODES])
    return PreparedTensor(
        kind=_kind(param.device, param.dtype, tuple(formats)),
        shape=param.shape,
        addresses=[tensor.data_ptr() for tensor in tensors],
        pointers=tuple(pointers),
        length=length,
        row_groups=constants[1],
        aligned=length % size == 0 and all(address % ALIGNMENT == 0 for address in wide),
    )


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
        prepared: results of ``prepare`` for each of them, all of one kind. The tensors must
            still be where they were then, which is not checked: see ``PreparedTensor.is_in_place``.
        grads: in the shapes of the parameters and on their device, all fp32 or all bf16,
            contiguous.
        scalars: ``[N, 8]`` fp32 on the CPU, the s0..s7 above.
        seeds: seeds of the noise that rounds codes and bf16 parameters, one per tensor, never the
            same for two tensors or steps. Neither these nor the next are needed where all states
            are fp32 and ``stochastic`` rounds nothing.
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
        from lq_lightning.kernels.optimizer_step.triton_kernels import launch_optimizer_step

        launch_optimizer_step(prepared, grads, scalars, seeds, first_groups, rule, stochastic)
    else:
        for index, (values, parts) in enumerate(zip(scalars.tolist(), tensors, strict=True)):
            rest = iter(parts[1:])
            states = [
                State(
                    next(rest),
                    next(rest) if fmt.quantized else None,
                    next(rest) if fmt.expanded else None,
                )
                for fmt in kind.formats
            ]
            noise = (seeds[index], first_groups[index]) if seeds else (0, 0)
            cpu.step(
                *(parts[0], grads[index], states, values, *noise),
                *(rule, kind.formats, stochastic),
            )
    count_write(*chain.from_iterable(tensors))
