"""Every private torch and lightning import, and every version gate, in one place.

Nothing outside this module may import a name with a leading underscore from torch or lightning.
What FSDP2 holds of unreduced gradients is taken and given back in `_compat_gradients`; sharded
tensors are taken apart and put together in `_compat_tensors`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fully_shard import (
    _unimplemented_deepcopy,
    get_cls_to_fsdp_cls,
)
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.io import CheckpointIO

__all__ = [
    "AllGather",
    "GroupParam",
    "GroupParams",
    "ReduceScatter",
    "Reduced",
    "after_backward",
    "all_gather_flat",
    "all_linked_by_nvlink",
    "backward_id",
    "begin_root_forward",
    "call_hooks",
    "convert_floating",
    "default_dtype",
    "discard_unreduced_gradients",
    "end_root_forward",
    "fill_wrapping_checkpoint_io",
    "fsdp_units",
    "inherit_timeout",
    "has_unreduced_gradients",
    "materialize_meta_tensors",
    "move_optimizers_to_device",
    "note_sigterm",
    "pack_shards",
    "prepare_fsdp_class",
    "propagate_requires_grad",
    "record_reduced_params",
    "reduce_scatter_flat",
    "replace_stop_check",
    "reset_iteration",
    "unflatten_checkpoint",
    "use_own_sampling",
    "uses_hsdp",
    "write_fingerprint",
]


# --- torch: FSDP2 -----------------------------------------------------------------------------


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


def _param_groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
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
        groups = [group for group in _param_groups(module) if group.fsdp_params]
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


@torch.no_grad()
def pack_shards(params: list[GroupParam], like: Tensor) -> Tensor:
    """Cast and pack this rank's shards into one slot, as FSDP2 does before an all-gather.

    Args:
        params: The parameters of a group, in its order.
        like: ``[n]`` in the gather dtype, or uint8 if the parameters have several; gives the shape,
            dtype and device of the result.
    """
    slot = torch.empty_like(like)
    shards = [p.fsdp_param._sharded_param_data for p in params]
    if slot.dtype == torch.uint8:
        dtypes = [p.gather_dtype for p in params]
        shards = [s.to(d).view(torch.uint8) for s, d in zip(shards, dtypes, strict=True)]
    torch._foreach_copy_(torch.split(slot, [s.numel() for s in shards]), shards, non_blocking=True)
    return slot


class Reduced(NamedTuple):
    """What the next reduce-scatter of a parameter group packs, and for whom.

    Attributes:
        fsdp_params: The parameters with a gradient, in the order of the slot.
        read_in_backward: Whether something other than the optimizer reads the result, while
            backward still runs: accumulation onto earlier gradients, a cast, a copy to the CPU, or
            a hook without a method ``reads_gradient(parameter)`` that returns False.
    """

    fsdp_params: list[Any]
    read_in_backward: bool


def record_reduced_params(group: Any, record: Callable[[Reduced], None]) -> Callable[[], None]:
    """Call ``record`` with what the next reduce-scatter of the group packs.

    FSDP2 packs only parameters that received a gradient and drops the gradients before it calls a
    custom reduce-scatter, so the layout has to be read just before its post-backward.

    Returns:
        A function that removes the hook.
    """
    original = group.post_backward

    def post_backward(*unused: Any) -> None:
        if group.reduce_grads:
            unused_too = getattr(group, "reduce_scatter_unused_params", False)  # torch >= 2.13
            # torch >= 2.15 packs parameters grouped by gradient dtype
            order = getattr(group, "_reduce_scatter_param_indices", range(len(group.fsdp_params)))
            params = [group.fsdp_params[index] for index in order]
            packed = [p for p in params if _will_be_reduced(p, unused_too)]
            read = group._all_reduce_hook is not None or any(map(_is_read_in_backward, packed))
            record(Reduced(packed, read))
        original(*unused)

    def remove() -> None:
        if group.__dict__.get("post_backward") is post_backward:
            del group.post_backward

    group.post_backward = post_backward
    return remove


def _is_read_in_backward(fsdp_param: Any) -> bool:
    sharded = fsdp_param.sharded_param
    reduce_dtype = fsdp_param.mp_policy.reduce_dtype or fsdp_param.param_dtype or sharded.dtype
    hooks = getattr(sharded, "_post_accumulate_grad_hooks", None) or {}
    return bool(
        sharded.grad is not None
        or fsdp_param.offload_to_cpu
        or reduce_dtype != sharded.dtype
        or any(getattr(h, "reads_gradient", lambda _: True)(sharded) for h in hooks.values())
    )


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that runs now ends, in its caller's thread."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def backward_id() -> int:
    """Number of the backward that runs now in this thread; -1 if none does."""
    number: int = torch._C._current_graph_task_id()
    return number


def _will_be_reduced(fsdp_param: Any, unused_too: bool) -> bool:
    if not hasattr(fsdp_param, "_unsharded_param"):
        return False
    if fsdp_param.unsharded_accumulated_grad is not None:
        return True
    unsharded = fsdp_param._unsharded_param
    return unsharded.grad is not None or (unused_too and unsharded.requires_grad)


def write_fingerprint(params: list[GroupParam]) -> tuple[tuple[int, int, int], ...]:
    """Storage address and version counters of every shard: changes whenever one is written.

    In-place operations on a DTensor count on the DTensor, those on its local tensor on that. A
    write through ``.data`` counts on neither.
    """
    prints = []
    for param in params:
        sharded = param.sharded_param
        local = sharded._local_tensor if isinstance(sharded, DTensor) else sharded
        prints.append((local.data_ptr(), _version(sharded), _version(local)))
    return tuple(prints)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def all_gather_flat(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
    """All-gather equal flat buffers: ``output`` is ``[world * input.numel()]``."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, input, group=group)


def reduce_scatter_flat(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM
) -> None:
    """Reduce-scatter a flat buffer: ``input`` is ``[world * output.numel()]``."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, input, op=op, group=group)


# --- torch: sharding, root forward, checkpoints -------------------------------------------------


def prepare_fsdp_class(cls: type[nn.Module]) -> None:
    """Make ``fully_shard`` work on classes such as ``class Model(Generic[T], LightningModule)``.

    ``fully_shard`` changes the class of a module to ``type(name, (FSDPModule, cls), ...)``. Python
    refuses that when ``cls`` inherits its instance layout through a base without ``__dict__``, as
    ``Generic`` in first place is. With the bases swapped the layouts agree; the methods that
    ``FSDPModule`` overrides are then given again, bound to the new class.
    """
    known = get_cls_to_fsdp_cls()
    if cls in known or issubclass(cls, FSDPModule) or not _layout_needs_swap(cls):
        return
    cell = types.CellType()
    namespace: dict[str, Any] = {"__deepcopy__": _unimplemented_deepcopy, "_orig_cls_mro_index": 1}
    for name, value in vars(FSDPModule).items():
        function = value.__func__ if isinstance(value, staticmethod) else value
        if not isinstance(function, types.FunctionType) or not hasattr(nn.Module, name):
            continue
        if (
            "__class__" in function.__code__.co_freevars
        ):  # uses super(): search on from the new class
            function = types.FunctionType(
                function.__code__,
                function.__globals__,
                name,
                function.__defaults__,
                tuple(cell for _ in function.__code__.co_freevars),
            )
        namespace[name] = function
    swapped = type(f"FSDP{cls.__name__}", (cls, FSDPModule), namespace)
    cell.cell_contents = swapped
    known[cls] = swapped


def _layout_needs_swap(cls: type) -> bool:
    base = cls.__base__
    while base is not None and base is not object:
        if base.__dictoffset__ == 0:
            return True
        base = base.__base__
    return False


def begin_root_forward(module: FSDPModule) -> None:
    """Gather the root's own parameters as its forward pre-hook does."""
    module._get_fsdp_state()._pre_forward(cast(nn.Module, module), (), {})


def end_root_forward(module: FSDPModule, output: Any) -> Any:
    """Finish the root's forward as its forward hook does; ``output`` starts its backward."""
    return module._get_fsdp_state()._post_forward(cast(nn.Module, module), (), output)


def reset_iteration(root: nn.Module) -> None:
    """Forget a forward or backward that an exception ended, so that the next one can start."""
    state = root._get_fsdp_state() if isinstance(root, FSDPModule) else None
    if state is not None and hasattr(state, "_reset_iter_state"):  # torch >= 2.13
        state._reset_iter_state()


def propagate_requires_grad(module: FSDPModule) -> None:
    """Copy ``requires_grad`` of the sharded parameters to the gathered ones in use now."""
    for group in _param_groups(module):
        for fsdp_param in group.fsdp_params:
            gathered = getattr(fsdp_param, "_unsharded_param", None)
            wanted = fsdp_param.sharded_param.requires_grad
            if gathered is not None and gathered.requires_grad != wanted:
                gathered.requires_grad_(wanted)


def has_unreduced_gradients(module: FSDPModule) -> bool:
    """Whether the module's own gathered parameters hold gradients that should be reduced by now."""
    return any(
        getattr(getattr(p, "_unsharded_param", None), "grad", None) is not None
        for group in _param_groups(module)
        if group.reduce_grads
        for p in group.fsdp_params
    )


def discard_unreduced_gradients(root: nn.Module) -> None:
    """Drop gradients accumulated without synchronisation, which ``zero_grad`` does not reach."""
    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in _param_groups(module):
            for fsdp_param in group.fsdp_params:
                if "unsharded_accumulated_grad" in vars(fsdp_param):  # torch < 2.15
                    fsdp_param.unsharded_accumulated_grad = None
                gathered = getattr(fsdp_param, "_unsharded_param", None)
                if gathered is not None:
                    gathered.grad = None
            keeper = getattr(group, "gradient_keeper", None)  # of `_compat_gradients`
            if keeper is not None:
                keeper.discard()


def unflatten_checkpoint(flat: dict[str, Any], paths: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Rebuild the nested dictionary whose leaves a distributed checkpoint has under flat keys."""
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict  # slow to import

    nested: dict[str, Any] = unflatten_state_dict(flat, paths)
    return nested


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


def inherit_timeout(mesh: DeviceMesh) -> None:
    """Give the process groups of a mesh the timeout of the default group.

    ``init_device_mesh`` makes groups smaller than the world with torch's own default (30 minutes on
    gloo), so that a stuck rank would be noticed only then.
    """
    device = torch.device(mesh.device_type)
    world = dist.group.WORLD
    options = None if world is None else getattr(world._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    if timeout is None:
        return
    set_timeout = getattr(dist, "set_timeout", None)  # newer torch
    if set_timeout is None:
        set_timeout = distributed_c10d._set_pg_timeout
    for dim in range(mesh.ndim):
        set_timeout(timeout, mesh.get_group(dim))


# --- lightning: imported when called, so that only strategies, plugins and callbacks need it ------


def call_hooks(trainer: Trainer, name: str, *args: Any) -> None:
    """Call a hook on all callbacks, then on the LightningModule."""
    from lightning.pytorch.trainer import call

    call._call_callback_hooks(trainer, name, *args)
    call._call_lightning_module_hook(trainer, name, *args)


def use_own_sampling(trainer: Trainer) -> None:
    """Leave the user's data loaders alone, as on a single device: no DistributedSampler."""
    trainer._accelerator_connector.use_distributed_sampler = False


def replace_stop_check(
    trainer: Trainer,
    notify: Callable[[int, types.FrameType | None], None],
    check: Callable[[], None],
) -> bool:
    """Replace Lightning's handler of SIGTERM, and what its loop does before a training batch.

    Returns:
        Whether this version of Lightning has both; otherwise nothing is replaced.
    """
    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    names = (connector, "_sigterm_notifier_fn", notify), (loop, "_broadcast_sigterm_tensor", check)
    if not all(hasattr(owner, name) for owner, name, _ in names):
        return False
    for owner, name, replacement in names:
        setattr(owner, name, replacement)
    return True


def note_sigterm(trainer: Trainer) -> None:
    """Let ``trainer.received_sigterm`` be true until the next run."""
    trainer._signal_connector.received_sigterm = True


def convert_floating(data: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in a collection."""
    from lightning.fabric.plugins.precision.utils import _convert_fp_tensor
    from lightning_utilities.core.apply_func import apply_to_collection

    return apply_to_collection(data, function=_convert_fp_tensor, dtype=Tensor, dst_type=dtype)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Create new tensors in ``dtype`` inside the context."""
    from lightning.fabric.plugins.precision.utils import _DtypeContextManager

    return cast("AbstractContextManager[None]", _DtypeContextManager(dtype))


def materialize_meta_tensors(module: nn.Module, device: torch.device) -> None:
    """Allocate a module built on the meta device and call its ``reset_parameters`` methods."""
    from lightning.fabric.utilities.init import _materialize_distributed_module

    _materialize_distributed_module(module, device)


def move_optimizers_to_device(
    optimizers: list[torch.optim.Optimizer], device: torch.device
) -> None:
    """Move the state of optimizers."""
    from lightning.fabric.utilities.optimizer import _optimizers_to_device

    _optimizers_to_device(optimizers, device)


def fill_wrapping_checkpoint_io(
    checkpoint_io: CheckpointIO, inner: Callable[[], CheckpointIO]
) -> None:
    """Give a ``CheckpointIO`` that adds something (such as a thread) one to add it to."""
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

    if isinstance(checkpoint_io, _WrappingCheckpointIO) and checkpoint_io.checkpoint_io is None:
        checkpoint_io.checkpoint_io = inner()
