"""Backward passes, collectives, stores, bulk operations and pipeline schedules of torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

TorchSchedule = Literal["interleaved_1f1b", "zero_bubble", "zbv"]
_ONE = torch.tensor(1.0, dtype=torch.float32, device="cpu")


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that runs now ends, in its caller's thread."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def backward_id() -> int:
    """Number of the backward that runs now in this thread; -1 if none does."""
    number: int = torch._C._current_graph_task_id()
    return number


def copy_with(
    optimizer: torch.optim.Optimizer, params: Mapping[int, list[Tensor]]
) -> torch.optim.Optimizer:
    """Copy an optimizer, without states and hooks, to one of other parameters: ``params``, by index
    of the group whose options they get.
    """
    twin = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name != "step" and not name.startswith("_optimizer_"):  # schedulers wrap `step`
            vars(twin)[name] = value if name in ("state", "param_groups") else deepcopy(value)
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**optimizer.param_groups[index], "params": given} for index, given in params.items()
    ]
    torch.optim.Optimizer.__setstate__(twin, {})  # gives it hooks of its own
    return twin


def any_rank(key: str, flag: bool, timeout: timedelta | None) -> bool:
    """Whether ``flag`` is true on any rank; returns when all ranks have called this with the key.

    Ranks meet in the store, so that this works whatever state their process groups are in. The key
    was not used before in this run. ``timeout=None`` waits as long as the store does.
    """
    store = distributed_c10d._get_default_store()
    store.add(f"{key}/flags", int(flag))
    if store.add(f"{key}/ranks", 1) == dist.get_world_size():
        store.set(f"{key}/all", "here")
    keys = [f"{key}/all"]
    store.wait(keys) if timeout is None else store.wait(keys, timeout)
    raised: int = store.add(f"{key}/flags", 0)
    return raised > 0


def in_step(key: str, groups: Sequence[dist.ProcessGroup]) -> bool:
    """Whether this rank has started as many operations in each group as the group's first rank.

    All ranks of the groups call this with one key, which was not used before.
    """
    store, same = distributed_c10d._get_default_store(), True
    for group in groups:
        name = f"{key}/{group.group_name}"
        started = str(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
        if group.rank() == 0:
            store.set(name, started)
        else:
            same &= store.get(name).decode() == started
    return same


def all_gather_flat(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """All-gather equal flat buffers: ``output`` is ``[world * input.numel()]``."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(output, input, group=group, async_op=async_op)
    return work


def serves(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a group has collectives for tensors on a device."""
    return any(known.type == device.type for known in group._device_types)


def gloo_group(
    store: Store, rank: int, size: int, address: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Make a gloo group that the default group knows nothing of, for tensors on CPUs.

    Args:
        store: Where the ranks find each other, under keys that no other group has.
        address: Of this machine, where the others reach it.
        timeout: Of making it, and of each collective.
    """
    gloo, kinds = dist.ProcessGroupGloo, dist.ProcessGroup.BackendType
    options = gloo._Options()  # type: ignore[attr-defined]
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timeout
    backend = gloo(store, rank, size, options)
    group = dist.ProcessGroup(PrefixStore("group", store), rank, size)
    group._set_default_backend(kinds.GLOO)
    group._register_backend(torch.device("cpu"), kinds.GLOO, backend)
    return group


def all_gather_parts(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: dist.ProcessGroup
) -> None:
    """All-gather several flat contiguous buffers of one dtype in one collective."""
    device = inputs[0].device
    if device.type != "cpu" and group._get_backend(device).name() == "gloo":
        for output, input in zip(outputs, inputs, strict=True):  # it joins CPU tensors only
            all_gather_flat(output, input, group)
        return
    with distributed_c10d._coalescing_manager(group):
        for output, input in zip(outputs, inputs, strict=True):
            all_gather_flat(output, input, group)


def reduce_scatter_flat(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
    """Sum a flat buffer over ranks and scatter it: ``input`` is ``[world * output.numel()]``."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, input, op=dist.ReduceOp.SUM, group=group)


def note_optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    """Let learning-rate schedulers know that the optimizer stepped; they warn if it did not."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def meet(key: str, timeout: timedelta) -> bool:
    """Whether all ranks call this with the same key in time.

    They find out from the store, not by a collective, which may be occupied or never end.
    """
    store = distributed_c10d._get_default_store()
    try:
        store.set(f"{key}/{dist.get_rank()}", "here")
        store.wait([f"{key}/{rank}" for rank in range(dist.get_world_size())], timeout)
    except RuntimeError:  # too late, or there is no store any more
        return False
    return True


def leave_note(key: str, text: str) -> str:
    """Leave a text for the other ranks in the store, if there is one; return the first one left."""
    try:
        return bytes(distributed_c10d._get_default_store().compare_set(key, "", text)).decode()
    except (RuntimeError, ValueError):  # there is no store, or none any more
        return text


def read_note(key: str, timeout: timedelta) -> str | None:
    """Return the text that a rank left under a key, or None if there is none in time."""
    try:
        store = distributed_c10d._get_default_store()
        store.wait([key], timeout)
        return bytes(store.get(key)).decode()
    except (RuntimeError, ValueError):
        return None


def store_has_ended() -> bool:
    """Whether the process that keeps the store of the ranks is gone: rank 0, or torchrun's."""
    try:
        distributed_c10d._get_default_store().num_keys()
    except (NotImplementedError, ValueError):  # a store of another kind, or no run is under way
        return False
    except RuntimeError:
        return True
    return False


def group_timeout(group: dist.ProcessGroup | None, device: torch.device) -> timedelta | None:
    """Timeout of the collectives of a group on a device; None if its backend does not say."""
    options = None if group is None else getattr(group._get_backend(device), "options", None)
    timeout: timedelta | None = getattr(options, "_timeout", None)
    return timeout


def inherit_timeout(mesh: DeviceMesh) -> None:
    """Give the process groups of a mesh the timeout of the default group.

    ``init_device_mesh`` makes groups smaller than the world with torch's own default (30 minutes on
    gloo), so that a stuck rank would be noticed only then.
    """
    timeout = group_timeout(dist.group.WORLD, torch.device(mesh.device_type))
    if timeout is None:
        return
    for dim in range(mesh.ndim):
        _set_timeout(timeout, mesh.get_group(dim))


def set_timeouts(timeout: timedelta) -> None:
    """Change the timeout of all process groups, and of those that are made like them later."""
    for group in list(distributed_c10d._world.pg_map):
        _set_timeout(timeout, group)


def _set_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    newer = getattr(dist, "set_timeout", None)
    (newer or distributed_c10d._set_pg_timeout)(timeout, group)


def split_group(
    parent: dist.ProcessGroup, rows: list[list[int]], device: torch.device
) -> dist.ProcessGroup:
    """Make a group of those ranks of ``parent`` that are in one row with this one.

    It has the backend and timeout of ``parent``, for tensors on ``device``; its collectives keep an
    order of their own. Every rank of ``parent`` must call this, and no other rank needs to, unlike
    ``init_device_mesh`` and ``new_group`` by default. All of ``parent`` must have made equally many
    groups before.
    """
    timeout = group_timeout(parent, device)
    world = dist.group.WORLD
    bound = getattr(world, "bound_device_id", None) is not None
    if bound and getattr(parent._get_backend(device), "supports_splitting", False):
        # such communicators are split from an existing one, by all of its ranks: not from the world
        made = dist.split_group(parent, rows, timeout=timeout)
    else:
        ranks = dist.get_process_group_ranks(parent)
        mine = next(row for row in rows if parent.rank() in row)
        made = dist.new_group(
            [ranks[index] for index in mine],
            timeout=timeout,
            backend=dist.get_backend(parent),
            use_local_synchronization=True,
        )
    if made is None:
        raise AssertionError(f"rank {parent.rank()} is in none of {rows}")
    return made


def all_linked_by_nvlink(num_gpus: int) -> bool:
    """Whether every two GPUs that this process sees are linked by NVLink, and are that many.

    A process that sees only its own GPU (``CUDA_VISIBLE_DEVICES``) cannot tell: False.
    """
    if torch.cuda.device_count() < num_gpus:
        return False
    from torch._C import _distributed_c10d as c10d
    from torch._C._autograd import DeviceType

    matrix = c10d._detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix  # type: ignore[attr-defined]
    return all(n > 0 for i, row in enumerate(matrix) for j, n in enumerate(row) if i != j)


def release_host_memory() -> None:
    """Give pinned memory that nothing uses back to the system; torch's allocator keeps it."""
    if torch.cuda.is_available():
        older = getattr(torch._C, "_host_emptyCache", None)  # until torch 2.12
        (older or torch.accelerator.empty_host_cache)()


def recompile_limit(at_least: int) -> AbstractContextManager[None]:
    """Let ``torch.compile`` make so many variants of a function before it gives up on it.

    Blocks of a class share one function, and with it the limit; past it they run eagerly.
    """
    import torch._dynamo.config as config

    limit = max(at_least, config.recompile_limit)
    patched: AbstractContextManager[None] = config.patch(recompile_limit=limit)
    return patched


def scale_and_add_all(
    tensors: list[Tensor], factor: float, changes: list[Tensor], alpha: float
) -> None:
    """Compute ``factor * tensor``, and then ``tensor + alpha * change``, in place."""
    torch._foreach_mul_(tensors, factor)
    torch._foreach_add_(tensors, changes, alpha=alpha)


def add_one_to_all(tensors: list[Tensor]) -> None:
    """Add one to fp32 tensors on the CPU, as torch's optimizers do with their steps."""
    # a tensor and `alpha`, since a number would be made a tensor anew for each of them
    torch._foreach_add_(tensors, _ONE, alpha=1.0)


def copy_all(targets: tuple[Tensor, ...], sources: tuple[Tensor, ...]) -> None:
    """Copy each source, in one call, to the target of the same place, which has its shape."""
    if targets:
        torch._foreach_copy_(targets, sources)


def zero_all(tensors: list[Tensor]) -> None:
    """Write zeros to all tensors in one call."""
    torch._foreach_zero_(tensors)


def schedule_actions(
    schedule: TorchSchedule, pipeline_size: int, num_microbatches: int, stages_per_rank: int
) -> list[list[tuple[str, int, int]]]:
    """Return what each rank of a pipeline computes, in order, without a process group.

    Only these lists are taken from torch: they are the same in torch 2.11 to 2.15, where stages,
    runtimes and their private attributes differ.

    Returns:
        By rank, tuples of ``"F"`` (forward), ``"B"`` (backward), ``"I"`` (backward for inputs
        only) or ``"W"`` (backward for weights only), the stage, and the micro-batch.
    """
    # Imported here: it imports torch's compiler, which takes seconds.
    from torch.distributed.pipelining import schedules

    classes: dict[TorchSchedule, Any] = {
        "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
        "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
        "zbv": schedules.ScheduleZBVZeroBubble,
    }
    # The attributes of stages that constructors read before they have made the lists.
    stages = [
        SimpleNamespace(
            num_stages=pipeline_size * stages_per_rank,
            group_size=pipeline_size,
            group_rank=0,
            stage_index=chunk * pipeline_size,
            is_first=chunk == 0,
            is_last=False,
            submod=torch.nn.Identity(),
        )
        for chunk in range(stages_per_rank)
    ]
    made = classes[schedule](stages, num_microbatches, scale_grads=False)
    return [
        [
            (action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in made.pipeline_order[rank]
            if action is not None
        ]
        for rank in range(pipeline_size)
    ]
