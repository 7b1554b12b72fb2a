"""Cut batches into micro-batches, and join the outputs of their steps."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)


def batch_size(batch: Any) -> int:
    """Return the common size of dim 0 of the tensors in a batch; see :func:`split_batch`.

    Raises:
        ValueError: no tensor in it has a dim 0, or they differ.
        TypeError: an object in it that is no collection, tensor or plain value.
    """
    shapes = [tuple(tensor.shape) for tensor in _tensors(batch) if tensor.dim()]
    sizes = sorted({shape[0] for shape in shapes})
    if len(sizes) == 1:
        return sizes[0]
    if not shapes:
        raise ValueError(
            "the batch has no tensor with a batch dimension, so that it cannot be cut into "
            "micro-batches. Return tensors whose dim 0 is the batch."
        )
    raise ValueError(
        f"the tensors of a batch have shapes {sorted(set(shapes))}, whose dim 0 are {sizes}: a "
        "batch is cut into micro-batches along dim 0 of all its tensors. Give all of them the "
        "batch there (`expand` what is the same for all samples)."
    )


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Cut a batch into equal micro-batches along dim 0 of its tensors, without copies.

    A batch is a tensor, or a mapping (such as ``BatchEncoding``), tuple, named tuple, list or
    dataclass of such. Strings in a list or tuple as long as the batch, which is how ``DataLoader``
    joins them, are cut like a tensor, as are lists of numbers. Scalar tensors, numbers, strings and
    None go into every micro-batch.

    Raises:
        ValueError: the batch is not divisible, or sizes differ.
        TypeError: an object in it that is no collection, tensor or plain value.
    """
    size = batch_size(batch)
    step, rest = divmod(size, num_microbatches)
    if rest:
        raise AssertionError(f"{size} samples cannot be cut into {num_microbatches} equal parts")

    def part(value: Any, index: int) -> Any:
        if isinstance(value, Tensor):
            return value.narrow(0, index * step, step) if value.dim() else value
        if _is_column(value) and len(value) == size:
            return value[index * step : (index + 1) * step]
        if isinstance(value, _PLAIN):
            return value
        return _rebuild(value, {key: part(child, index) for key, child in _children(value)})

    return [part(batch, index) for index in range(num_microbatches)]


def concatenate(outputs: Sequence[Any]) -> Any:
    """Join the outputs of a step for the micro-batches of a batch, in their order.

    Tensors are joined along dim 0, scalar tensors and numbers become one entry each of a tensor or
    list, lists are joined end to end, tuples, mappings and dataclasses entry by entry. Strings and
    None stay if they are the same for all micro-batches, otherwise they become a list.

    Raises:
        ValueError: outputs have different structures.
        TypeError: an object that cannot be joined.
    """
    first = outputs[0]
    if any(type(output) is not type(first) for output in outputs):
        names = sorted({type(output).__name__ for output in outputs})
        raise ValueError(
            f"the step returned different types for micro-batches: {names}. Return one for all."
        )
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.dim() else torch.stack(list(outputs))
    if isinstance(first, list):
        return [item for output in outputs for item in output]
    if isinstance(first, _PLAIN):
        number = isinstance(first, (int, float, complex)) and not isinstance(first, bool)
        same = not number and all(output == first for output in outputs)
        return first if same else list(outputs)
    children = [dict(_children(output)) for output in outputs]
    if any(child.keys() != children[0].keys() for child in children):
        raise ValueError(
            "the step returned different entries for micro-batches: "
            f"{sorted({str(list(child)) for child in children})}. Return the same for all."
        )
    joined = {key: concatenate([child[key] for child in children]) for key in children[0]}
    return _rebuild(first, joined)


# --- identities of samples ----------------------------------------------------------------------


def sample_ids(batch: Any) -> Tensor:
    """Return a hash of the contents of each sample of a batch.

    Equal samples have equal hashes on every rank and device, wherever they stand in a batch of any
    size; samples that differ in any bit have different ones, but for one pair in 2**63. Mappings
    are read in the order of their keys.

    Returns:
        ``[B]`` int64, on the device of the first tensor.
    """
    size = batch_size(batch)
    tensors = [tensor for tensor in _tensors(batch) if tensor.dim()]
    hashes = [_row_hashes(t.detach().reshape(size, -1)).to(tensors[0].device) for t in tensors]
    # Mixing only the hash so far makes the order of tensors count.
    return reduce(lambda result, own: _mix(_mix(result) + own), hashes)


def _row_hashes(rows: Tensor) -> Tensor:
    """``[B, N]`` of any dtype to ``[B]`` int64."""
    if rows.is_complex():
        rows = torch.view_as_real(rows).flatten(1)
    if rows.is_floating_point():
        by_size = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
        rows = rows.contiguous().view(by_size[rows.element_size()])
    words = rows.to(torch.int64)
    places = _mix(torch.arange(1, words.shape[1] + 1, device=words.device))
    # A sum of mixed words has no order that devices could compute differently.
    return _mix(_mix(words + places).sum(1) + words.shape[1])


def _mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele et al., OOPSLA 2014), on int64 that wraps around."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right with zeros coming in; torch's shift of int64 repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


# --- structures ---------------------------------------------------------------------------------


def _is_column(value: Any) -> bool:
    """Whether a value may have an entry for each sample; a tuple of numbers is rather a size."""
    if type(value) is list:
        return all(isinstance(entry, _PLAIN) for entry in value)
    return type(value) is tuple and all(isinstance(entry, str) for entry in value)


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (tuple, list)):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    else:
        raise TypeError(
            f"a batch or step output holds a `{type(value).__name__}`, which cannot be cut into "
            "micro-batches: use tensors, mappings, tuples, lists, dataclasses, numbers or strings."
        )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif not isinstance(value, _PLAIN):
        children = list(_children(value))
        if isinstance(value, Mapping):
            children.sort(key=lambda item: str(item[0]))
        for _, child in children:
            yield from _tensors(child)


def _rebuild(value: Any, children: dict[Any, Any]) -> Any:
    """Return a collection like ``value`` with other entries under the same keys."""
    if isinstance(value, MutableMapping):
        new = copy.copy(value)
        new.update(children)
        return new
    if isinstance(value, Mapping):
        return type(value)(children)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*children.values())
    if isinstance(value, (tuple, list)):
        return type(value)(children.values())
    new = copy.copy(value)
    for key, child in children.items():
        object.__setattr__(new, key, child)  # also of frozen dataclasses
    return new
