"""Agreement between ranks: on tensors that they exchange, and on modules."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lq_lightning.foundation.streams import MaxReduction

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of a group (``None``: the world, or this process alone)."""
    values = [value] * (dist.get_world_size(group) if dist.is_initialized() else 1)
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def first_other(value: T, group: dist.ProcessGroup | None = None) -> tuple[T, T, int] | None:
    """Find the first rank of a group (``None``: the world) whose value differs from the first's.

    All ranks call it. Only hashes of the picklable values' ``repr`` are sent, unless they differ.
    Returns the two values and that rank's number in the group; None if all ranks have the same.
    """
    digest = hashlib.blake2b(repr(value).encode()).digest()
    if len(set(gather_objects(digest, group))) == 1:
        return None
    first, *others = gather_objects(value, group)
    return next((first, other, rank) for rank, other in enumerate(others, 1) if other != first)


def describe(tensor: Tensor) -> str:
    """Dtype and shape of a tensor; for a DTensor, its global shape."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def begin_check(
    entries: Mapping[str, str],
    group: dist.ProcessGroup | None,
    reduction: MaxReduction,
    *,
    differ: str,
    advice: str,
    votes: Sequence[int] = (),
    more: Tensor | None = None,
) -> Callable[[], list[int]]:
    """Begin a :func:`check_same_entries`, and return a function that ends it.

    All ranks of the group call both. The second returns the maxima over ranks of ``votes`` and
    ``more``, which is on the device and not waited for. ``reduction`` reduces int64.
    """
    text = repr(sorted(entries.items())).encode()
    own = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)
    read = reduction.start([own, ~own, *votes], group, more)  # min(x) == ~max(~x)

    def finish() -> list[int]:
        most, least, *rest = read()
        if most != ~least:
            raise ValueError(f"{differ}: {_first_difference(entries, group)}. {advice}")
        return rest

    return finish


def check_same_entries(
    entries: Mapping[str, str],
    group: dist.ProcessGroup | None,
    device: torch.device,
    *,
    differ: str,
    advice: str,
) -> None:
    """Check that ranks are about to exchange the same tensors, in one small all-reduce.

    Only hashes are sent, unless they differ. All ranks of the group (``None``: the world) call it.

    Args:
        entries: Description of each tensor by its name, in any order.
        group: Process group.
        device: Device from which the group sends.
        differ: Beginning of the error, such as "ranks have different buffers".
        advice: End of the error: what to do about it.

    Raises:
        ValueError: On all ranks: entries differ; names the first one.
    """
    reduction = MaxReduction(device, torch.int64)
    begin_check(entries, group, reduction, differ=differ, advice=advice)()


def _first_difference(entries: Mapping[str, str], group: dist.ProcessGroup | None) -> str:
    every = gather_objects(dict(entries), group)
    ranks = dist.get_process_group_ranks(group)
    other = next(index for index, found in enumerate(every) if found != every[0])
    name = min(n for n in {*every[0], *every[other]} if every[0].get(n) != every[other].get(n))
    here, there = (every[index].get(name, "missing") for index in (0, other))
    return f"`{name}` is {here} on rank {ranks[0]} and {there} on rank {ranks[other]}"


def check_alike(root: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Check that ranks (``None``: the world) have the same parameters and buffers, in one order.

    All ranks call this. Values are sent and gradients reduced by position: a difference would mix
    them up, or hang.

    Raises:
        ValueError: On all ranks: they differ in a name, shape, dtype, in what is trained, or in
            what is on the meta device.
    """
    named = (*root.named_parameters(), *root.named_buffers())
    mine = [
        f"`{name}` of shape {tuple(tensor.shape)}, {tensor.dtype}, "
        f"{'trained' if tensor.requires_grad else 'not trained'}"
        f"{' and on the meta device' if tensor.is_meta else ''}"
        for name, tensor in named
    ]
    found = first_other(mine, group)
    if found is None:
        return
    *both, rank = found
    pairs = zip_longest(*both, fillvalue="nothing more")
    place, (first, other) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    raise ValueError(
        f"ranks have built different modules: number {place + 1} of the parameters and buffers of "
        f"`{type(root).__name__}` is {first} on the first rank, but {other} on rank {rank} of "
        f"{dist.get_world_size(group)}. Ranks send values and add up gradients by position. Build "
        "the same module on all of them, with its parts in the same order and the same ones frozen."
    )


def broadcast_module_states(
    root: nn.Module,
    *,
    parameters: bool,
    group: dist.ProcessGroup | None = None,
    skip: Collection[str] = (),
) -> None:
    """Copy buffers, and with ``parameters`` also unsharded parameters, from rank 0 to all ranks.

    As in DDP, so that ranks that initialized the model differently train one model. Tensors on the
    meta device, DTensors and those named in ``skip`` are left alone. ``group`` has the ranks that
    hold this module; ``None`` is the world.
    """
    device = "cuda" if dist.get_backend(group) == "nccl" else None
    named = [*sorted(root.named_buffers()), *sorted(root.named_parameters() if parameters else ())]
    for name, tensor in named:  # by name, whatever the order of modules
        if name in skip or tensor.is_meta or isinstance(tensor, DTensor):
            continue
        staged = tensor.detach().to(device) if device else tensor.detach()
        staged = staged.contiguous()
        flat = staged.view(-1).view(torch.uint8)  # gloo knows no float8
        dist.broadcast(flat, group=group, group_src=0)
        if staged.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(staged)


def buffers_of_numbers(root: nn.Module, number: int, group: dist.ProcessGroup | None) -> set[str]:
    """Names of buffers that differ between ranks of other numbers, and not of the same number.

    Code that has looked at this number made them, as it does for this rank's heads under tensor
    parallelism. All ranks of the group call it.
    """
    digests = {
        name: hashlib.blake2b(local.cpu().view(-1).view(torch.uint8).numpy().tobytes()).digest()
        for name, buffer in root.named_buffers()
        if not buffer.is_meta and not isinstance(buffer, DTensor)
        for local in [buffer.detach().contiguous()]
    }
    every = gather_objects((number, digests), group)
    kinds = {name: {(other, found.get(name)) for other, found in every} for name in digests}
    numbers = len({other for other, _ in every})
    return {n for n, k in kinds.items() if len(k) == numbers and len({d for _, d in k}) > 1}
