"""FSDP2's parameter groups as collectives see them, and its forward and backward passes."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

# Types that hold no tensor of a forward pass, or only others than its results.
_LEAVES = (
    *(type(None), str, bytes, int, float, complex, type, nn.Module),
    *(torch.dtype, torch.device, torch.Generator, types.FunctionType, types.ModuleType),
)
_MAX_SEEN = 1000


class GroupParam(NamedTuple):
    """One parameter of an FSDP2 parameter group, as its collectives see it."""

    fsdp_param: Any  # FSDP2's own bookkeeping object
    sharded_param: nn.Parameter  # the DTensor that the optimizer updates
    padded_shard_numel: int  # elements this rank contributes to one collective slot
    numel: int  # of the whole, unsharded parameter, as is `ndim`
    ndim: int
    gather_dtype: torch.dtype  # of the all-gather input: the mixed-precision dtype if there is one

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained, which can change at any time."""
        return self.sharded_param.requires_grad


def param_groups(module: FSDPModule) -> list[Any]:
    """FSDP2's parameter groups of the module itself, without its inner units'."""
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
    """Whether the parameter group replicates over a mesh axis: beside another one (HSDP) or not."""
    return bool(type(group.mesh_info).__name__ != "FSDPMeshInfo")


def unit_mesh(group: Any) -> DeviceMesh:
    """The data-parallel mesh that ``fully_shard`` was given: 1-D, or 2-D for HSDP."""
    mesh: DeviceMesh = group.mesh_info.mesh
    return mesh


def offloads_to_cpu(root: nn.Module) -> bool:
    """Whether any unit keeps its shards on the CPU (``CPUOffloadPolicy``)."""
    return any(isinstance(g.offload_policy, CPUOffloadPolicy) for _, _, g in fsdp_units(root))


def shard_group(group: Any) -> dist.ProcessGroup:
    """The process group that the parameter group is sharded over."""
    shards: dist.ProcessGroup = group.mesh_info.shard_process_group
    return shards


class GroupParams:
    """The parameters of an FSDP2 parameter group, described anew only when they were replaced."""

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

    ``slots`` are ``[groups, n]``, contiguous, in the gather dtype, or uint8 if a group has several.
    """
    shards = [p.fsdp_param._sharded_param_data for p in params]
    if slots.dtype == torch.uint8:
        dtypes = [p.gather_dtype for p in params]
        shards = [s.to(d).view(torch.uint8) for s, d in zip(shards, dtypes, strict=True)]
    places = slots.view(-1).split_with_sizes([s.numel() for s in shards])
    torch._foreach_copy_(places, shards, non_blocking=True)


class GatheredWeights(NamedTuple):
    """Result of a unit's all-gather that is in memory already."""

    values: Tensor  # [world * n]; FSDP2 copies from it on the computing stream
    written: torch.cuda.Event | None  # after which it is complete; None on a device without streams


def bypass_all_gather(group: Any, read: Callable[[], GatheredWeights | None]) -> None:
    """Let a group's all-gathers return the result of ``read``; replaces an earlier one.

    FSDP2 would cast and copy this rank's shards into a new buffer on one stream and call its custom
    all-gather on another, which takes the host longer than copying out. FSDP2 gathers itself where
    ``read`` returns None, the first time, from which the sizes to copy are known, and always with
    parameters that have hooks for gathers (``fsdp_pre_all_gather``).
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

    Something other than the optimizer may read the result while backward still runs: accumulation
    onto earlier gradients, a cast, a copy to the CPU, or a hook without a method
    ``reads_gradient(parameter)`` that returns False.
    """

    indices: tuple[int, ...]  # of the parameters with a gradient, in the order of the slot
    read_in_backward: bool


class _Listeners(NamedTuple):
    """Callbacks before a reduce-scatter of a parameter group."""

    of_indices: list[Callable[[tuple[int, ...]], None]]
    of_all: list[Callable[[PackedGradients], None]]


def announce_packed_gradients(group: Any, announce: Callable[[PackedGradients], None]) -> None:
    """Call ``announce`` before each reduce-scatter of the group with the gradients it packs.

    FSDP2 packs only parameters that received a gradient and drops the gradients before it calls a
    custom reduce-scatter, so this has to be read just before its post-backward.
    """
    _listeners(group).of_all.append(announce)


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
    """Tensors that a sharded parameter consists of."""

    local: Tensor
    # of the DTensor itself, without memory; held so that no other gets its address
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


# --- gradients that stay unreduced between backward passes --------------------------------------


class GradientKeeper(Protocol):
    """Keeps unreduced gradients of a parameter group between backward passes."""

    def store(self, index: int, gradient: Tensor, like: Tensor) -> bool:
        """Add the gradient of parameter ``index``, which is ``like``; False leaves it."""

    def restore(
        self, index: int, gradient: Tensor | None, like: Tensor, dtype: torch.dtype
    ) -> Tensor | None:
        """Return what was stored plus ``gradient``, shaped as ``like``; None if there is none."""

    def discard(self) -> None:
        """Forget everything."""


def keep_unreduced_gradients(group: Any, keeper: GradientKeeper) -> Callable[[], None]:
    """Hand the group's unreduced gradients to ``keeper`` until the backward that reduces them.

    While ``set_requires_gradient_sync(False)`` holds, FSDP2 accumulates whole gradients, in the
    reduction dtype. The keeper gets them before that cast. Call it after
    :func:`announce_packed_gradients`, which sees what is given back.

    Returns:
        A function that undoes it.
    """
    original = group.post_backward

    def post_backward(*unused: Any) -> None:
        for index, fsdp_param in enumerate(group.fsdp_params):
            unsharded = getattr(fsdp_param, "_unsharded_param", None)
            if unsharded is None:
                continue
            gradient = _unreduced_gradient(fsdp_param)
            if group.reduce_grads:
                dtype = fsdp_param.mp_policy.reduce_dtype or unsharded.dtype
                total = keeper.restore(index, gradient, unsharded, dtype)
                if total is not None:
                    _set_unreduced_gradient(fsdp_param, total)
            elif gradient is not None and keeper.store(index, gradient, unsharded):
                _set_unreduced_gradient(fsdp_param, None)
        original(*unused)

    def remove() -> None:
        if group.__dict__.get("post_backward") is post_backward:
            group.post_backward, group.gradient_keeper = original, None

    group.post_backward, group.gradient_keeper = post_backward, keeper
    return remove


def _unreduced_gradient(fsdp_param: Any) -> Tensor | None:
    accumulated: Tensor | None = vars(fsdp_param).get("unsharded_accumulated_grad")  # torch < 2.15
    return fsdp_param._unsharded_param.grad if accumulated is None else accumulated


def _set_unreduced_gradient(fsdp_param: Any, gradient: Tensor | None) -> None:
    gathered = fsdp_param._unsharded_param
    if "unsharded_accumulated_grad" in vars(fsdp_param):  # torch < 2.15
        fsdp_param.unsharded_accumulated_grad, gradient = gradient, None
    if gradient is not None and gradient.dtype != gathered.dtype:
        gathered.grad_dtype = None  # any
    gathered.grad = gradient


# --- forward and backward passes ----------------------------------------------------------------


class ForwardCounter:
    """Numbers the forward passes of a model sharded by FSDP2, the same on every rank.

    A pass is a call of the outermost sharded module: the root, or a submodule called by itself.
    """

    def __init__(self, root: nn.Module) -> None:
        self._number = 0
        modules = (m for m in root.modules() if isinstance(m, FSDPModule))
        self._states: list[Any] = [m._get_fsdp_state() for m in modules]
        for state in self._states:
            state._root_pre_forward = self._counting(state, state._root_pre_forward)

    def __call__(self) -> int | None:
        """Return the number of the pass that runs now; None outside of any."""
        running = any(s._state_ctx.iter_forward_root is not None for s in self._states)
        return self._number if running else None

    def _counting(self, state: Any, root_pre_forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(root_pre_forward)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if state._state_ctx.iter_forward_root is None:
                self._number += 1
            return root_pre_forward(*args, **kwargs)

        return counted


def gather_normal_tensors(group: Any) -> None:
    """Let a unit's gathers make normal tensors under ``torch.inference_mode``, too. Idempotent.

    FSDP2 allocates the gathered parameters once, at the first gather. Made in inference mode, they
    could not be written by a gather outside of it, nor used by a forward that is differentiated.
    """
    for name in ("unshard", "wait_for_unshard"):
        if name not in vars(group):
            setattr(group, name, _outside_inference_mode(getattr(group, name)))


def _outside_inference_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return outside


def refuse_second_derivatives(group: Any, name: str) -> None:
    """Refuse a backward with ``create_graph=True`` where it enters a unit. Idempotent.

    The graph of such a backward saves the gathered weights, which FSDP2 frees when it is over: the
    next backward would read memory that is gone. Nor would FSDP2 reduce the gradients of that one,
    as its hooks are on outputs of the forward.
    """
    if "pre_backward" in vars(group):
        return
    original = group.pre_backward

    def pre_backward(*args: Any) -> None:
        if torch.is_grad_enabled():  # within a backward, iff it was called with create_graph=True
            raise RuntimeError(
                f"a gradient through the unit `{name}` was asked for with `create_graph=True`, to "
                "be differentiated once more (as for a gradient penalty). FSDP2 frees the weights "
                "of a unit after the first backward, and reduces no gradients of a second one. "
                "Allowed are: first derivatives, of inputs too; finite differences in place of the "
                "second ones; `create_graph=True` in `training_step` through modules that belong "
                "to no unit, which `units=[...]` decides; and strategies that do not shard, such "
                "as 'ddp'."
            )
        original(*args)

    group.pre_backward = pre_backward


def refuse_writes_before_backward(group: Any, name: str) -> None:
    """Refuse a backward that would gather other weights than its forward has used. Idempotent.

    torch refuses a write between the two by version counters. FSDP2 frees the weights after forward
    and gathers the shards again for backward, past these counters.
    """
    if "post_forward" in vars(group):
        return
    after_forward, before_backward = group.post_forward, group.pre_backward
    known: list[tuple[int, int]] = []

    def versions() -> list[tuple[int, int]]:
        shards = [p.sharded_param for p in group.fsdp_params]
        return [(s._version, s._local_tensor._version) for s in shards]

    def post_forward(*args: Any) -> Any:
        if torch.is_grad_enabled():
            known[:] = versions()
        return after_forward(*args)

    def pre_backward(*args: Any) -> None:
        if known and not group.is_unsharded and (now := versions()) != known:
            params = zip(group.fsdp_params, known, now, strict=True)
            written = next(str(p._param_fqn) for p, a, b in params if a != b)
            raise RuntimeError(
                f"the parameter `{written}` of the unit `{name}` was written between a forward "
                "and its backward, which would use the new weights for the gradients of the old "
                "ones. Write before the forward or after the backward: `on_before_zero_grad` "
                "runs between them, `on_train_batch_start` and `on_train_batch_end` do not."
            )
        before_backward(*args)

    group.post_forward, group.pre_backward = post_forward, pre_backward


def hook_hidden_outputs(module: FSDPModule) -> None:
    """Let backward gather a unit's weights also where its output hides tensors. Idempotent.

    FSDP2 gathers when a gradient arrives at a tensor of the output. It looks for tensors in the
    containers that it knows, not in objects of other classes: backward through these would use
    freed weights.
    """
    state = module._get_fsdp_state()
    if "_register_pre_backward_hook" in vars(state):
        return
    original = state._register_pre_backward_hook

    def register(output: Any) -> Any:
        result = original(output)
        if not isinstance(result, Tensor) and torch.is_grad_enabled():
            for tensor in _tensors_within(result):
                if tensor.requires_grad and not _has_pre_backward_hook(tensor):
                    tensor.register_hook(state._pre_backward)  # type: ignore[no-untyped-call]
        return result

    state._register_pre_backward_hook = register  # type: ignore[method-assign]


def _has_pre_backward_hook(tensor: Tensor) -> bool:
    """Whether FSDP2 has seen it, in the output of this unit or of one inside."""
    hooks = (tensor._backward_hooks or {}).values()
    return any(getattr(hook, "__name__", "") == "_pre_backward" for hook in hooks)


def _tensors_within(value: Any) -> Iterator[Tensor]:
    """Yield tensors that can be reached from a value through containers and attributes.

    The nearest come first, up to a number of objects: a result may lead to a whole dataset.
    """
    queue = deque([value])
    seen: set[int] = set()
    while queue and len(seen) < _MAX_SEEN:
        value = queue.popleft()
        if isinstance(value, Tensor):
            yield value
        if isinstance(value, (Tensor, *_LEAVES)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            queue += value.values()
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            queue += value
        queue += getattr(value, "__dict__", {}).values()
        slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
        names = [n for s in slots for n in ((s,) if isinstance(s, str) else s)]
        queue += [getattr(value, name, None) for name in names if not name.startswith("__")]
