"""FSDP2's parameter groups, as custom collectives see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor


class GroupParam(NamedTuple):
    """One parameter of an FSDP2 parameter group, as its collectives see it.

    Attributes:
        fsdp_param: FSDP2's own bookkeeping object (identity is what matters to callers).
        sharded_param: The DTensor parameter that the optimizer updates.
        padded_shard_numel: Elements this rank contributes to one collective slot.
        numel: Elements of the whole, unsharded parameter.
        ndim: Dimensions of the whole parameter.
        gather_dtype: Dtype of the all-gather input (the mixed-precision dtype if there is one).
    """

    fsdp_param: Any
    sharded_param: nn.Parameter
    padded_shard_numel: int
    numel: int
    ndim: int
    gather_dtype: torch.dtype

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained, which can change at any time."""
        return self.sharded_param.requires_grad


def param_groups(module: FSDPModule) -> list[Any]:
    """FSDP2's parameter groups of the module itself, without those of units inside of it."""
    return groups_of_state(module._get_fsdp_state())


def groups_of_state(state: Any) -> list[Any]:
    """The parameter groups of a module's FSDP2 state."""
    groups = getattr(state, "_fsdp_param_groups", None)  # torch >= 2.12
    if groups is None:
        group = state._fsdp_param_group
        groups = [] if group is None else [group]
    return list(groups)


def fsdp_units(root: nn.Module) -> Iterator[tuple[str, FSDPModule, Any]]:
    """Yield ``(name, module, parameter group)`` of every FSDP2 unit with parameters in ``root``.

    Raises:
        NotImplementedError: A unit has several parameter groups (per-parameter meshes), for which
            FSDP2 offers no custom collectives.
    """
    for name, module in root.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        groups = [group for group in param_groups(module) if group.fsdp_params]
        if len(groups) > 1:
            raise NotImplementedError(
                f"unit `{name or type(root).__name__}` has {len(groups)} parameter groups "
                "(per-parameter meshes through `shard_placement_fn`); quantized communication "
                "supports one per unit. Give each mesh its own `fully_shard` module."
            )
        if groups:
            yield name, module, groups[0]


def uses_hsdp(group: Any) -> bool:
    """Whether the parameter group also replicates over a second mesh axis (HSDP)."""
    return bool(type(group.mesh_info).__name__ == "HSDPMeshInfo")


def tensor_parallel_parameters(root: nn.Module) -> list[str]:
    """Names of parameters that stay DTensors where FSDP2 gathers them, or that it does not have."""
    plain: set[int] = set()
    for module in root.modules():
        for group in param_groups(module) if isinstance(module, FSDPModule) else ():
            plain.update(id(p.sharded_param) for p in group.fsdp_params if not p.is_dtensor)
    return [
        name
        for name, parameter in root.named_parameters()
        if isinstance(parameter, DTensor) and id(parameter) not in plain
    ]


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 gathers and frees the module's own parameters, as a part of some unit."""
    return getattr(module, "_is_fsdp_managed_module", False) is True


def offloads_to_cpu(root: nn.Module) -> bool:
    """Whether any unit keeps its shards on the CPU (``CPUOffloadPolicy``)."""
    return any(isinstance(g.offload_policy, CPUOffloadPolicy) for _, _, g in fsdp_units(root))


def shard_group(group: Any) -> dist.ProcessGroup:
    """The process group that the parameter group is sharded over."""
    shards: dist.ProcessGroup = group.mesh_info.shard_process_group
    return shards


class GroupParams:
    """The parameters of an FSDP2 parameter group, described anew only when they were replaced.

    Args:
        group: FSDP2's parameter group.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._key: list[tuple[int, torch.dtype]] = []
        self._params: list[GroupParam] = []

    def __call__(self) -> list[GroupParam]:
        """Describe the parameters in the order in which FSDP2 packs them."""
        found = [(p, p.sharded_param) for p in self._group.fsdp_params]
        key = [(id(sharded), sharded.dtype) for _, sharded in found]
        if key != self._key:
            self._params = [_describe(*pair) for pair in found]
            self._key = key
        return self._params


def _describe(fsdp_param: Any, sharded: nn.Parameter) -> GroupParam:
    dtype = sharded.dtype
    wanted = fsdp_param.mp_policy.param_dtype
    if wanted is not None and dtype.is_floating_point:
        dtype = wanted
    return GroupParam(
        fsdp_param=fsdp_param,
        sharded_param=sharded,
        padded_shard_numel=fsdp_param.padded_sharded_param_size.numel(),
        numel=sharded.numel(),
        ndim=sharded.ndim,
        gather_dtype=dtype,
    )


def shard_memory(params: list[GroupParam]) -> list[Tensor]:
    """This rank's shards as FSDP2 gathers them, flat and padded; of tensor subclasses nothing."""
    shards = [p.fsdp_param._sharded_param_data for p in params]
    return [shard if type(shard) is Tensor else torch.empty(0) for shard in shards]


def pack_shards(params: list[GroupParam], slots: Tensor) -> None:
    """Cast and pack this rank's shards into slots, as FSDP2 does before an all-gather.

    Args:
        params: The parameters of one or several groups, in their order.
        slots: ``[groups, n]``, contiguous, in the gather dtype, or uint8 if a group has several.
    """
    shards = [p.fsdp_param._sharded_param_data for p in params]
    if slots.dtype == torch.uint8:
        dtypes = [p.gather_dtype for p in params]
        shards = [s.to(d).view(torch.uint8) for s, d in zip(shards, dtypes, strict=True)]
    places = slots.view(-1).split_with_sizes([s.numel() for s in shards])
    torch._foreach_copy_(places, shards, non_blocking=True)


class GatheredWeights(NamedTuple):
    """Result of a unit's all-gather that is in memory already.

    Attributes:
        values: ``[world * n]``; FSDP2 copies from it on the computing stream.
        written: Event after which it is complete; None on a device without streams.
    """

    values: Tensor
    written: torch.cuda.Event | None


def bypass_all_gather(group: Any, read: Callable[[], GatheredWeights | None]) -> None:
    """Let a group's all-gathers return the result of ``read``; replaces that of an earlier call.

    FSDP2 would cast and copy this rank's shards into a new buffer on one stream and call its custom
    all-gather on another, which takes the host longer than copying out. The sizes that it copies by
    are those of the group's first gather, which is always its own, as is every one of parameters
    with hooks for gathers (``fsdp_pre_all_gather``).

    Args:
        group: FSDP2's parameter group.
        read: Called where FSDP2 would gather over all shards; if it returns None, FSDP2 does.
    """
    original = getattr(group.unshard, "by_fsdp2", group.unshard)
    known: Any = None  # FSDP2's own result, without its tensors

    def unshard(async_op: bool = False) -> None:
        nonlocal known
        if known is not None and _would_gather(group):
            found = read()
            if found is not None:
                group._all_gather_result = known._replace(
                    all_gather_output=found.values, all_gather_event=found.written
                )
                return
        original(async_op)
        result = group._all_gather_result
        if known is None and result is not None and group.is_sharded and not _has_hooks(group):
            known = result._replace(
                all_gather_output=None, all_gather_event=None, all_gather_work=None
            )

    unshard.by_fsdp2 = original  # type: ignore[attr-defined]
    group.unshard = unshard


def _would_gather(group: Any) -> bool:
    """Mirror the conditions of ``FSDPParamGroup.unshard``, for a gather over all shards."""
    in_pre_backward = group._training_state == TrainingState.PRE_BACKWARD
    return (
        group._all_gather_result is None
        and group.is_sharded
        and (group.unshard_in_backward or not in_pre_backward)
    )


def _has_hooks(group: Any) -> bool:
    return any(hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in group.fsdp_params)


class PackedGradients(NamedTuple):
    """Gradients that the next reduce-scatter of a parameter group packs.

    Attributes:
        indices: Indices of the parameters with a gradient, in the order of the slot.
        read_in_backward: Whether something other than the optimizer reads the result, while
            backward still runs: accumulation onto earlier gradients, a cast, a copy to the CPU, or
            a hook without a method ``reads_gradient(parameter)`` that returns False.
    """

    indices: tuple[int, ...]
    read_in_backward: bool


class _Listeners(NamedTuple):
    """Callbacks in front of a reduce-scatter of a parameter group."""

    of_indices: list[Callable[[tuple[int, ...]], None]]
    of_all: list[Callable[[PackedGradients], None]]


def announce_packed_gradients(
    group: Any, announce: Callable[[PackedGradients], None]
) -> Callable[[], None]:
    """Call ``announce`` in front of each reduce-scatter of the group with what it packs.

    FSDP2 packs only parameters that received a gradient and drops the gradients before it calls a
    custom reduce-scatter, so this has to be read just before its post-backward.

    Returns:
        A function that ends it.
    """
    listeners = _listeners(group).of_all
    listeners.append(announce)
    return lambda: listeners.remove(announce)


def announce_packed_indices(group: Any, announce: Callable[[tuple[int, ...]], None]) -> None:
    """As :func:`announce_packed_gradients`, with the indices alone, which costs less."""
    _listeners(group).of_indices.append(announce)


def _listeners(group: Any) -> _Listeners:
    found = getattr(group.post_backward, "listeners", None)
    if isinstance(found, _Listeners):
        return found
    original, listeners = group.post_backward, _Listeners([], [])

    def post_backward(*unused: Any) -> None:
        if group.reduce_grads:
            unused_too = getattr(group, "reduce_scatter_unused_params", False)  # torch >= 2.13
            params = group.fsdp_params
            # torch >= 2.15 packs parameters grouped by gradient dtype
            order = getattr(group, "_reduce_scatter_param_indices", range(len(params)))
            packed = tuple(i for i in order if _will_be_reduced(params[i], unused_too))
            if packed:
                for announce in listeners.of_indices:
                    announce(packed)
                if listeners.of_all:
                    found = PackedGradients(packed, _is_read_in_backward(group, packed))
                    for tell in listeners.of_all:
                        tell(found)
        original(*unused)

    post_backward.listeners = listeners  # type: ignore[attr-defined]
    group.post_backward = post_backward
    return listeners


def _is_read_in_backward(group: Any, packed: tuple[int, ...]) -> bool:
    """Mirror what FSDP2's ``foreach_reduce`` does with the result of a reduce-scatter.

    tests/data_parallel/test_read_in_backward.py runs each of these conditions against torch.
    """
    params = [group.fsdp_params[index] for index in packed]
    return group._all_reduce_hook is not None or any(map(_shard_is_read_in_backward, params))


def _shard_is_read_in_backward(fsdp_param: Any) -> bool:
    sharded = fsdp_param.sharded_param
    reduce_dtype = fsdp_param.mp_policy.reduce_dtype or fsdp_param.param_dtype or sharded.dtype
    hooks = getattr(sharded, "_post_accumulate_grad_hooks", None) or {}
    return bool(
        sharded.grad is not None
        or fsdp_param.offload_to_cpu
        or reduce_dtype != sharded.dtype
        or any(getattr(h, "reads_gradient", lambda _: True)(sharded) for h in hooks.values())
    )


def _will_be_reduced(fsdp_param: Any, unused_too: bool) -> bool:
    if not hasattr(fsdp_param, "_unsharded_param"):
        return False
    if fsdp_param.unsharded_accumulated_grad is not None:
        return True
    unsharded = fsdp_param._unsharded_param
    return unsharded.grad is not None or (unused_too and unsharded.requires_grad)


def write_fingerprint(params: list[GroupParam]) -> tuple[tuple[int, ...], ...]:
    """Addresses and version counters of every shard: changes whenever one is written or replaced.

    In-place operations on a DTensor count on the DTensor, those on its local tensor on that. A
    write through ``.data`` counts on neither.
    """
    prints = []
    for param in params:
        sharded = param.sharded_param
        local = sharded._local_tensor if isinstance(sharded, DTensor) else sharded
        outer = sharded.untyped_storage()._cdata
        prints.append((outer, local.data_ptr(), _version(sharded), _version(local)))
    return tuple(prints)


def same_addresses(a: tuple[tuple[int, ...], ...], b: tuple[tuple[int, ...], ...]) -> bool:
    """Whether two fingerprints differ in version counters at most."""
    return len(a) == len(b) and all(x[:2] == y[:2] for x, y in zip(a, b, strict=True))


class ShardIdentity(NamedTuple):
    """Tensors that a sharded parameter consists of.

    Attributes:
        local: This rank's shard.
        storage: Storage of the DTensor itself, which has no memory there; held so that no other
            gets its address.
    """

    local: Tensor
    storage: torch.UntypedStorage


def shard_identity(param: GroupParam) -> ShardIdentity:
    """Tensors that the parameter consists of now."""
    sharded = param.sharded_param
    local = sharded._local_tensor if isinstance(sharded, DTensor) else sharded
    return ShardIdentity(local, sharded.untyped_storage())


def data_was_assigned(param: GroupParam, known: ShardIdentity) -> bool:
    """Whether ``parameter.data = value`` replaced what FSDP2 does not look at.

    On a DTensor the assignment replaces the outer tensor and leaves the shard: the value is lost.
    On its local tensor it replaces the shard, while FSDP2 goes on gathering the memory of the old
    one. ``module.to(...)`` and ``load_state_dict(assign=True)`` replace both and tell FSDP2.

    Args:
        param: The parameter.
        known: An earlier result of :func:`shard_identity`.
    """
    local, storage = shard_identity(param)
    if local is known.local and storage._cdata != known.storage._cdata:
        return True
    gathered: Tensor = param.fsdp_param._sharded_param_data
    return (
        local.numel() > 0
        and local.untyped_storage().data_ptr() != gathered.untyped_storage().data_ptr()
    )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
