"""Operators that are called again and again with equal arguments: checks and choices made once.

On the host, checks, the choice of tiles and Triton's way to a compiled kernel take many times as
long as the launch itself: of 112 us of a call of ``norm_quantize``, 10 were its launch. All that
they depend on are shapes, strides, dtypes, devices, alignments and constants, which are the key of
a call here. What was found for a key is kept and used for every call with the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lq_lightning.kernels.message.format import ALIGNMENT_NBYTES, MessageFormat
from lq_lightning.kernels.message.launch import on_device

# Of all operators together. A model has a few dozen per number of tokens.
MAX_CALLS = 4096
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

        Other pointers are None where the kernel does not use one. All but addresses and contents
        of the tensors are the same at every call (see ``facts``). ``words`` are 32-bit numbers that
        the kernel is not specialized by, as many at every call.
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


class Call(NamedTuple):
    """Results and launch that calls with one key share.

    Attributes:
        results: shape and dtype of each result.
        launch: a ``Launch``, or several in a function.
        zeroed: index of the result that is zero before the launch, if there is one.
    """

    results: tuple[tuple[torch.Size, torch.dtype], ...]
    launch: Callable[..., None]
    zeroed: int | None

    def repeat(self, first: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
        """Return the results for other tensors, which have the same ``facts``."""
        results = [first.new_empty(shape, dtype=dtype) for shape, dtype in self.results]
        if self.zeroed is not None:
            results[self.zeroed].zero_()
        self.launch(first, *others, *results)
        return tuple(results)


_CALLS: dict[Hashable, Call] = {}


def facts(tensor: Tensor | None) -> Hashable:
    """Return the part of a call's key that stands for a tensor: all but where and what it holds."""
    if tensor is None:
        return None
    misalignment = tensor.data_ptr() % ALIGNMENT_NBYTES
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device(), misalignment


def find_call(key: Hashable) -> Call | None:
    """Return what ``keep_call`` was given for an equal key, or None."""
    return _CALLS.get(key)


def keep_call(
    key: Hashable,
    results: Sequence[Tensor],
    launch: Callable[..., None],
    zeroed: int | None = None,
) -> None:
    """Keep what was found in a call that succeeded.

    Args:
        key: name of the operator, ``facts`` of its tensors, and all its other arguments.
        results: results of the call, each contiguous and in memory of its own.
        launch: function that computes them, given the tensors of the call and then its results.
        zeroed: index of the result that has to be zero before.
    """
    if len(_CALLS) >= MAX_CALLS:  # lengths of sequences that rarely come again
        _CALLS.clear()
    made = tuple((result.shape, result.dtype) for result in results)
    _CALLS[key] = Call(made, launch, zeroed)


def forget_calls() -> None:
    """Let the next call of every operator check and choose again, for benchmarks that tune."""
    _CALLS.clear()
