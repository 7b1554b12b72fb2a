"""Launches that are repeated without Triton's dispatch; see ``operators``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lq_lightning.kernels.message.format import MessageFormat
from lq_lightning.kernels.message.launch import on_device

# Elsewhere Triton specializes kernels by more than the alignment of pointers.
_DIRECT = torch.version.hip is None


class Launch:
    """A launch of a kernel, complete but for its pointers.

    From the second call on it goes straight to the compiled kernel, with addresses, which Triton
    does not look at. That is right because what Triton specializes a kernel by does not change: the
    scalars are the same, dtypes and alignments have to be.

    Args:
        kernel: a function of ``triton.jit``: of pointers, then scalars, then constants. The last
            of the scalars may be words that differ by launch.
        grid: up to three numbers of programs.
        scalars: its other arguments that are no constants, in order, but for the words.
        constants: its constants and the options of the compiler, by name.
    """

    __slots__ = ("_constants", "_grid", "_kernel", "_rest", "_run", "_scalars")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        scalars: tuple[int | float, ...],
        constants: Mapping[str, object],
    ) -> None:
        self._kernel = kernel
        self._grid = grid
        self._scalars = scalars
        self._constants = constants
        self._run: Callable[..., object] | None = None
        self._rest: tuple[object, ...] = ()

    def __call__(self, first: Tensor, *others: Tensor | None, words: tuple[int, ...] = ()) -> None:
        """Launch the kernel on the device of the first tensor.

        Other pointers are None where the kernel does not use one. Only addresses and contents of
        the tensors differ between calls (see ``operators.tensor_key``). ``words`` are 32-bit
        numbers that the kernel is not specialized by, equally many at every call.
        """
        with on_device(first):
            if self._run is not None:
                addresses = [0 if tensor is None else tensor.data_ptr() for tensor in others]
                self._run(first.data_ptr(), *addresses, *self._scalars, *words, *self._rest)
                return
            tensors = [first if tensor is None else tensor for tensor in others]
            scalars = (*self._scalars, *words)
            compiled = self._kernel[self._grid](first, *tensors, *scalars, **self._constants)
            if _DIRECT and compiled is not None:  # None from Triton's interpreter
                names = self._kernel.arg_names[1 + len(others) + len(scalars) :]
                self._rest = tuple(self._constants[name] for name in names)
                self._run = compiled[(*self._grid, 1, 1)[:3]]


def launch_nothing(*tensors: Tensor | None, words: tuple[int, ...] = ()) -> None:
    """Take the place of a ``Launch`` where tensors are empty."""


def encoding_launch(
    fmt: MessageFormat, rows: int, make: Callable[[bool], Launch]
) -> Callable[..., None]:
    """Return a launch of a kernel that encodes rows, given its pointers except the last one.

    That one is ``range_ptr`` of ``encode_tile``. Formats with one scale per row take two passes;
    ``make`` returns the launch of a pass, given whether it widens the range instead of encoding.
    """
    encode = make(False)
    if fmt.group_size:
        return lambda *tensors, words: encode(*tensors, None, words=words)
    widen = make(True)

    def launch(first: Tensor, *others: Tensor | None, words: tuple[int, ...]) -> None:
        ranges = torch.full((rows, 2), -(2**31), dtype=torch.int32, device=first.device)
        widen(first, *others, ranges, words=words)
        encode(first, *others, ranges, words=words)

    return launch
