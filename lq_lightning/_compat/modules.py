"""Sharded modules: classes, the root's forward, interrupted steps, shards and gathered copies."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import unsafe_setattr_param
from torch.distributed.fsdp._fully_shard._fully_shard import (
    _unimplemented_deepcopy,
    get_cls_to_fsdp_cls,
)
from torch.distributed.tensor import Placement
from torch.nn.modules import module as _module

from lq_lightning._compat.fsdp2 import groups_of_state, param_groups
from lq_lightning._compat.tensors import local_tensor

_CALL = "_compiled_call_impl"
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        # a function that uses super() has to search on from the new class
        if "__class__" in function.__code__.co_freevars:
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


def initialize_root(module: FSDPModule) -> None:
    """Make ``module`` the root of all units inside of it, as its first forward would; idempotent.

    Otherwise a unit that runs before the root becomes a root of its own for good.
    """
    module._get_fsdp_state()._lazy_init()


def begin_root_forward(module: FSDPModule) -> None:
    """Gather the root's own parameters as its forward pre-hook does."""
    # FSDP2 of torch 2.11, which moves arguments to a GPU, needs one.
    module._get_fsdp_state()._pre_forward(cast(nn.Module, module), (None,), {})


def end_root_forward(module: FSDPModule, output: Any) -> Any:
    """Finish the root's forward as its forward hook does; ``output`` starts its backward."""
    return module._get_fsdp_state()._post_forward(cast(nn.Module, module), (), output)


def start_backward_at(module: FSDPModule, loss: Tensor) -> None:
    """Let the backward of ``loss``, of a forward that has ended, gather the root's parameters."""
    module._get_fsdp_state()._register_pre_backward_hook(loss)


def is_root_idle(module: FSDPModule) -> bool:
    """Whether the root is neither in its forward nor in its backward."""
    idle: bool = module._get_fsdp_state()._training_state == TrainingState.IDLE
    return idle


def is_gathered(module: FSDPModule) -> bool:
    """Whether the module's own parameters are whole at the moment."""
    return any(group.is_unsharded for group in param_groups(module))


def tensor_parallel_parameters(root: nn.Module) -> dict[str, tuple[DeviceMesh, list[Placement]]]:
    """By name, where parameters lie while they are used: those that stay DTensors where FSDP2
    gathers them, or that it does not have.
    """
    gathered: dict[int, Any] = {}
    for module in root.modules():
        for group in param_groups(module) if isinstance(module, FSDPModule) else ():
            for p in group.fsdp_params:
                spec = getattr(p, "_unsharded_dtensor_spec", None)  # torch >= 2.13
                gathered[id(p.sharded_param)] = spec or getattr(p, "_tp_spec", None)
    found = {}
    for name, parameter in root.named_parameters():
        spec = gathered.get(id(parameter), getattr(parameter, "_spec", None))
        if spec is not None:
            found[name] = spec.mesh, list(spec.placements)
    return found


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 gathers and frees the module's own parameters, as a part of some unit."""
    return getattr(module, "_is_fsdp_managed_module", False) is True


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks, such as FSDP2's, run around the forward of the module or of one inside."""
    return any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())


def has_global_hooks() -> bool:
    """Whether ``register_module_forward_hook`` or a function like it has registered anything."""
    return bool(
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether something waits for the parameter's gradient."""
    tensor = cast(Any, parameter)
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def replicate_for_data_parallel(module: nn.Module) -> nn.Module:
    """Copy a module as ``nn.DataParallel`` does before it gives the copy parameters."""
    made: nn.Module = cast(Any, type(module))._replicate_for_data_parallel(module)
    return made


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether ``torch.compile(inner)`` made the module, so that only its own hooks run eagerly."""
    return hasattr(module, "_orig_mod")


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called on it, which traces its hooks."""
    return module._compiled_call_impl is not None


def watch_compiled_calls(
    module: nn.Module,
    before: Callable[..., tuple[Any, Any] | None],
    after: Callable[[nn.Module, Any, Any], Any],
) -> None:
    """Run hooks around a module that was compiled in place, which would trace registered ones.

    ``before`` is a forward pre-hook with keyword arguments, ``after`` a hook that is always called.
    """
    compiled = cast(Callable[..., Any], module._compiled_call_impl)

    def call(*args: Any, **kwargs: Any) -> Any:
        output = None
        try:
            args, kwargs = before(module, args, kwargs) or (args, kwargs)
            output = compiled(*args, **kwargs)
        finally:
            replaced = after(module, args, output)
        return output if replaced is None else replaced

    module._compiled_call_impl = call


def has_compiled_forward(module: nn.Module) -> bool:
    """Whether ``module.forward = torch.compile(module.forward)`` was run, as for units."""
    return hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")


def reset_iteration(root: nn.Module) -> None:
    """Forget a forward or backward that an exception ended, so that the next one can start.

    Waits for collectives on their way, frees gathered parameters and drops gradients that were not
    reduced yet.
    """
    state = root._get_fsdp_state() if isinstance(root, FSDPModule) else None
    if state is None or state._is_root is None:
        return  # nothing of it has run
    if hasattr(state, "_reset_iter_state"):  # torch >= 2.13
        state._reset_iter_state()
    else:
        _reset_root(state)


def _reset_root(state: Any) -> None:
    """Reset as torch >= 2.13 does by itself, with the attributes of 2.11 and 2.12."""
    comm = state._comm_ctx
    stream = state._device_handle.current_stream()
    reducing = getattr(comm, "reduce_scatter_states", None)  # torch >= 2.12
    if reducing is None:
        reducing = [comm.reduce_scatter_state]
        comm.reduce_scatter_state = None
    for pending in (comm.all_gather_state, *reducing):
        _wait(stream, getattr(pending, "event", None))
    comm.all_gather_state = None
    reducing.clear()
    comm.post_forward_order.clear()
    for inner in state._state_ctx.all_states:
        inner._modules_to_run_forward.clear()
        inner._training_state = TrainingState.IDLE
        for group in groups_of_state(inner):
            _reset_group(group, stream)
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def _reset_group(group: Any, stream: Any) -> None:
    gathering = group._all_gather_result
    if gathering is not None:
        _wait(stream, gathering.all_gather_event)
        if isinstance(gathering.all_gather_work, dist.Work):
            gathering.all_gather_work.wait()
        group._all_gather_result = None
    _wait(stream, group._post_reduce_event)
    _wait(stream, getattr(group._all_reduce_state, "event", None))
    group._post_reduce_event = group._all_reduce_state = group._partial_reduce_output = None
    if group._reshard_after_forward_event is not None:
        group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)
        group._reshard_after_forward_event = None
    group._post_forward_indices.clear()
    group._training_state = TrainingState.IDLE
    group._to_sharded()


def _wait(stream: Any, event: Any) -> None:
    if event is not None:
        stream.wait_event(event)


def has_unreduced_gradients(module: FSDPModule) -> bool:
    """Whether the module's own gathered parameters hold gradients that should be reduced by now."""
    return any(
        getattr(getattr(p, "_unsharded_param", None), "grad", None) is not None
        for group in param_groups(module)
        if group.reduce_grads
        for p in group.fsdp_params
    )


def reduce_gradients(root: FSDPModule) -> None:
    """Reduce what several backward passes without synchronisation have left, and free the weights.

    For a root whose last backward pass cannot be known beforehand, as under a pipeline schedule.
    """
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    root.set_requires_gradient_sync(True)
    state = root._get_fsdp_state()
    for inner in state._state_ctx.all_states:
        for group in groups_of_state(inner):
            group.post_backward()
    # Waits for the reductions, and ends the iteration as after a backward.
    state._root_post_backward_final_callback()


def discard_unreduced_gradients(root: nn.Module) -> None:
    """Drop gradients accumulated without synchronisation, which ``zero_grad`` does not reach."""
    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in param_groups(module):
            for fsdp_param in group.fsdp_params:
                if "unsharded_accumulated_grad" in vars(fsdp_param):  # torch < 2.15
                    fsdp_param.unsharded_accumulated_grad = None
                gathered = getattr(fsdp_param, "_unsharded_param", None)
                if gathered is not None:
                    gathered.grad = None
            keeper = getattr(group, "gradient_keeper", None)
            if keeper is not None:
                keeper.discard()


def hugging_face_initializers(root: nn.Module) -> dict[nn.Module, Callable[[], object]]:
    """Initializers of the modules of transformers' models, as ``from_pretrained`` uses them.

    It gives values to parameters and to buffers that are in no file. Before version 5 it left out
    the latter, so there are none then.
    """
    if "transformers.initialization" not in sys.modules:
        return {}
    models = [
        m for m in root.modules() if isinstance(m, sys.modules["transformers"].PreTrainedModel)
    ]
    # the innermost model of a module comes last
    return {
        m: functools.partial(model._init_weights, m) for model in models for m in model.modules()
    }


# --- the two forms of parameters ----------------------------------------------------------------


class RootParameters:
    """The parameters that belong to the root itself, as shards and gathered.

    Which of the two its modules hold does not matter to FSDP2, which holds both by itself, until it
    gathers or frees them.
    """

    def __init__(self, module: FSDPModule) -> None:
        self._module = module
        self._params = [p for group in param_groups(module) for p in group.fsdp_params]

    def __len__(self) -> int:
        """Number of parameters."""
        return len(self._params)

    def find(self, shard: Tensor) -> Any | None:
        """FSDP2's record of a shard that is one of them; None for any other tensor."""
        return next((p for p in self._params if p.sharded_param is shard), None)

    def gather(self) -> None:
        """Begin the root's forward; modules keep the parameters that they hold."""
        held = [(m, n, m._parameters.get(n)) for p in self._params for m, n in _places(p)]
        begin_root_forward(self._module)
        for module, name, parameter in held:
            if parameter is not None and module._parameters[name] is not parameter:
                unsafe_setattr_param(module, name, parameter)

    def show(self, gathered: bool) -> None:
        """Let modules hold the gathered parameters in place of the shards, or the other way."""
        for param in self._params:
            if not hasattr(param, "_unsharded_param"):
                continue
            source, target = param.sharded_param, gathered_values(param)
            if not gathered:
                source, target = target, source
            for module, name in _places(param):
                if module._parameters.get(name) is source:
                    unsafe_setattr_param(module, name, target)

    def versions(self) -> list[tuple[int, int]]:
        """Change when the shards are written, by operations on them or on their local memory."""
        shards = [p.sharded_param for p in self._params]
        return [(s._version, cast(Any, s)._local_tensor._version) for s in shards]


class GatheredCopies:
    """The gathered forms of all parameters; only FSDP2 may fill, free or write them."""

    def __init__(self, root: nn.Module) -> None:
        units = [m for m in root.modules() if isinstance(m, FSDPModule)]
        params = [p for m in units for group in param_groups(m) for p in group.fsdp_params]
        self._params = [p for p in params if not _is_written_by_torch(p)]
        self._watched = set(self._params)
        self._versions: dict[Any, tuple[int, int]] = {}
        for param in self._params:
            self._note_when_made(param)

    def _note_when_made(self, param: Any) -> None:
        """Take the version of a gathered form from its first gather, which makes it."""
        original = param.init_unsharded_param

        def init_unsharded_param() -> None:
            original()
            del param.init_unsharded_param
            self._versions[param] = self._version(param)

        param.init_unsharded_param = init_unsharded_param

    @staticmethod
    def _version(param: Any) -> tuple[int, int]:
        gathered = param._unsharded_param  # a DTensor counts apart from its local tensor
        return gathered._version, local_tensor(gathered)._version

    def sums(self, unit: nn.Module) -> Tensor | None:
        """``[parameters]`` int64: sums over the bits of a unit's gathered values; None if freed."""
        values = [local_tensor(p._unsharded_param.detach()) for p in self._of(unit)]
        if any(v.untyped_storage().size() == 0 for v in values):
            return None  # by a backward or `state_dict` in between
        sums = [v.view(_INTEGERS.get(v.itemsize, torch.uint8)).sum() for v in values]
        return torch.stack([s.to(torch.int64) for s in sums])

    def names(self, unit: nn.Module) -> list[str]:
        """Names in the order of :meth:`sums`."""
        return [str(p._param_fqn) for p in self._of(unit)]

    def _of(self, unit: nn.Module) -> list[Any]:
        groups = param_groups(cast(FSDPModule, unit))
        return [p for group in groups for p in group.fsdp_params if p in self._watched]

    def find_hooked(self) -> str | None:
        """The name of a parameter whose shard waits for a gradient, which never comes there."""
        hooked = (p for p in self._params if p.sharded_param._backward_hooks)
        return next((str(p._param_fqn) for p in hooked), None)

    def find_written(self) -> str | None:
        """The name of a parameter whose gathered form was written since the last call, or None."""
        written = None
        for param, known in self._versions.items():
            gathered, (filled,) = local_tensor(param._unsharded_param), param.all_gather_outputs
            version = self._version(param)
            moved = gathered.untyped_storage()._cdata != filled.untyped_storage()._cdata
            if moved or version != known:
                written = str(param._param_fqn)
            self._versions[param] = version
        return written


def _is_written_by_torch(fsdp_param: Any) -> bool:
    """Whether its gathered form is written in forward, or filled by something else."""
    module = fsdp_param._module_info.module
    looks_up = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return (looks_up and module.max_norm is not None) or hasattr(
        fsdp_param._sharded_local_tensor, "fsdp_post_all_gather"
    )


def gathered_values(fsdp_param: Any) -> nn.Parameter:
    """The gathered form of a parameter, trained if its shard is."""
    gathered: nn.Parameter = fsdp_param._unsharded_param
    if gathered.requires_grad != fsdp_param.sharded_param.requires_grad:
        gathered.requires_grad_(fsdp_param.sharded_param.requires_grad)
    return gathered


def _places(fsdp_param: Any) -> Iterator[tuple[nn.Module, str]]:
    info = fsdp_param._module_info
    yield info.module, info.param_name
    yield from zip(info.shared_modules, info.shared_param_names, strict=True)


def wrap_call(module: nn.Module, around: Callable[..., Any]) -> None:
    """Let ``around(run, *args, **kwargs)`` run in place of a module's call, outside of all of it.

    That is where ``Module.compile`` puts compiled calls: hooks and compiled code are inside. Copies
    and pickles of the module leave it out.
    """
    inner = module.__dict__.get(_CALL)

    def call(*args: Any, **kwargs: Any) -> Any:
        return around(module._call_impl if inner is None else inner, *args, **kwargs)

    call._lq_inner = inner  # type: ignore[attr-defined]
    module.__dict__[_CALL] = call


def unwrap_call(module: nn.Module) -> None:
    """Undo ``wrap_call``, unless something else has been put there since; idempotent."""
    call: Any = module.__dict__.get(_CALL)
    if hasattr(call, "_lq_inner"):
        module.__dict__[_CALL] = call._lq_inner
        if call._lq_inner is None:
            del module.__dict__[_CALL]
