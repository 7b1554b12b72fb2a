"""A GPU of one rank without GPU or other ranks: fake tensors, streams and process group.

Tensors are ``FakeTensor``s on the CPU, since a build of torch without CUDA cannot run backward on
fake CUDA tensors. Where torch treats the two devices differently, the GPU's way is set inside.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

aten: Any = torch.ops.aten


# --- values -------------------------------------------------------------------------------------


def new_fake_mode() -> AbstractContextManager[Any]:
    """A mode that makes tensors without memory, and takes real ones as operands."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has no memory."""
    return isinstance(tensor, FakeTensor)


@contextlib.contextmanager
def restored_generators() -> Iterator[None]:
    """Give the global generators their states back, also after an error."""
    from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states

    states = _collect_rng_states()
    try:
        yield
    finally:
        _set_rng_states(states)


# --- other ranks --------------------------------------------------------------------------------


def _same_everywhere(found: list[Any], value: Any, *unused: Any, **options: Any) -> None:
    found[:] = [value] * len(found)


@contextlib.contextmanager
def alike_ranks(rank: int, world_size: int) -> Iterator[None]:
    """A default process group whose other ranks hold what this one does; nothing is sent."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers "fake"

    def keep(*unused: Any, **options: Any) -> None:
        """The value of the source is the one of this rank."""

    own_new_group = dist.new_group

    def new_group(*args: Any, **options: Any) -> Any:
        return own_new_group(*args, **{**options, "backend": "fake"})

    replaced = {
        "all_gather_object": _same_everywhere,
        "broadcast_object_list": keep,
        "new_group": new_group,
    }
    with ExitStack() as stack:
        # Operators on DTensors return cached meshes that are equal: with the groups of another
        # rank, which was simulated before, or of this one in a training that follows.
        _forget_meshes()
        stack.callback(_forget_meshes)
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
        stack.callback(dist.destroy_process_group)
        for name, function in replaced.items():
            stack.enter_context(mock.patch.object(dist, name, function))
        yield


def _forget_meshes() -> None:
    """Clear the caches of DTensor's operators, which hold the meshes of their results."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    if hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"):  # of the dispatch in C++
        torch._C._clear_DTensor_sharding_propagator_cache()


def stay_in_process(trainer: Trainer) -> None:
    """Let ``fit`` run here, where a strategy would start a process per rank."""
    trainer.strategy._launcher = None


def ranks_of(args: Sequence[Any]) -> list[int]:
    """Global ranks of the process group among the arguments of a collective's operator."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            with contextlib.suppress(RuntimeError, TypeError):
                group = dist.ProcessGroup.unbox(value)
                return dist.get_process_group_ranks(group)
    names = [value for value in args if isinstance(value, str)]
    if names:
        resolve: Any = c10d._resolve_process_group  # type: ignore[attr-defined]
        group = resolve(names[-1])
        return dist.get_process_group_ranks(group)
    return dist.get_process_group_ranks(dist.group.WORLD)


def operands_of_fake_group(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Operands of a collective that the fake group, which copies what a rank sends, takes, too."""
    if name == "c10d.alltoall_base_.default" and not args[1].numel():
        output, _, group, arriving, _, *rest = args
        return (output, torch.empty_like(output), group, arriving, arriving, *rest)
    return args


def with_values(operator: Any, result: Any) -> Any:
    """What a collective returned, with its tensors as the value of its future.

    The fake group's futures have none, and DDP and hooks on its gradients take them from there.
    """
    if operator.namespace != "c10d" or not isinstance(result, (tuple, list)):
        return result
    tensors, work = result
    if not isinstance(work, torch.ScriptObject):
        return result
    future: Any = torch.futures.Future()
    future.set_result([tensors] if isinstance(tensors, Tensor) else tensors)
    return tensors, _create_work_from_future(future).boxed()


# --- the GPU's ways -----------------------------------------------------------------------------


class _Chunks:
    """The pieces of a tensor, made when asked for: of a thousand ranks' one is used."""

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._dim, self._step = tensor, dim, -(-tensor.size(dim) // count)

    def __getitem__(self, index: int) -> Tensor:
        size = self._tensor.size(self._dim)
        start = min(size, index * self._step)
        piece = self._tensor.narrow(self._dim, start, min(self._step, size - start))
        return piece if piece.numel() else self._tensor.new_empty(0)


class _CudaAutocast(TorchFunctionMode):
    """Runs in fp32 what autocast runs in fp32 on a GPU, and on a CPU in bf16."""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return func(*map(_to_fp32, args), **{k: _to_fp32(v) for k, v in kwargs.items()})
        return func(*args, **kwargs)


def _to_fp32(value: Any) -> Any:
    low = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value


_OPTIMIZER = sys.modules["torch.optim.optimizer"]
_FOREACH_TYPES = [
    (place, "_foreach_supported_types") for place in (_OPTIMIZER, torch.utils._foreach_utils)
]

# torch's list for CUDA, as far as the layers of language models meet it
_IN_FP32 = {
    *(nn.functional.layer_norm, nn.functional.group_norm, nn.functional.softmax),
    *(nn.functional.log_softmax, nn.functional.cross_entropy, nn.functional.nll_loss),
    *(nn.functional.mse_loss, nn.functional.l1_loss, nn.functional.softplus),
    *(torch.softmax, torch.log_softmax, torch.layer_norm, torch.exp, torch.log, torch.pow),
    *(torch.rsqrt, torch.cumsum, torch.prod, torch.sum, torch.norm, torch.cosine_similarity),
    *(Tensor.softmax, Tensor.log_softmax, Tensor.exp, Tensor.log, Tensor.pow, Tensor.__pow__),
    *(Tensor.rsqrt, Tensor.cumsum, Tensor.prod, Tensor.sum, Tensor.norm),
}


@contextlib.contextmanager
def gpu_ways(
    streams: dict[str, Any],
    allocate: Callable[[Tensor], None],
    free: Callable[[Tensor], None],
    reducing: Callable[[Tensor, bool], AbstractContextManager[None]],
) -> Iterator[None]:
    """Let DDP, FSDP2, optimizers and autocast do with CPU tensors what they do with a GPU's.

    Args:
        streams: ``Stream``, ``Event``, ``stream`` and ``current_stream`` in place of torch's for
            the CPU, which do nothing.
        allocate: Called where FSDP2 gives a tensor that it had freed its memory again.
        free: Called where FSDP2 frees a tensor's memory.
        reducing: Around each reduction of a bucket of DDP: lets it run beside backward. Is given
            the bucket, and whether a hook of Python reduces it.
    """

    def foreach(*unused: Any) -> list[str]:
        return ["cpu", "cuda"]

    with ExitStack() as stack:
        for name, value in streams.items():
            stack.enter_context(mock.patch.object(torch.cpu, name, value))
        replaced: list[tuple[Any, str, Any]] = [
            (_OPTIMIZER, "_get_foreach_kernels_supported_devices", foreach),
            (_fsdp_param, "_chunk_with_empty", _Chunks),
            (_fsdp_param, "alloc_storage", allocate),
            (_fsdp_param_group, "alloc_storage", allocate),
            (_fsdp_param, "free_storage", free),
            (nn.Module, "_apply", _convert),
            *_ddp_ways(reducing),
            (ShardingPropagator, _SHAPES, _unseen(getattr(ShardingPropagator, _SHAPES))),
        ]
        for place, name, value in replaced:
            if hasattr(place, name):
                stack.enter_context(mock.patch.object(place, name, value))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        for types in _FOREACH_TYPES:
            stack.enter_context(mock.patch.object(*types, [*getattr(*types), FakeTensor]))
        for name in ("torch._subclasses.fake_tensor", "lightning.pytorch", "lightning.fabric"):
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        stack.enter_context(_CudaAutocast())
        yield


def _ddp_ways(
    reducing: Callable[[Tensor, bool], AbstractContextManager[None]],
) -> list[tuple[Any, str, Any]]:
    """What stands for methods of DDP and of its strategy, which leaves hooks out on CPUs."""
    from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
    from lightning.pytorch.strategies import DDPStrategy

    own_register, own_init = DistributedDataParallel.register_comm_hook, _LAZY_INIT

    def register(model: Any, state: object, hook: Any, by_python: bool = True) -> None:
        # DDP compares annotations with classes: the hook has none
        def run(state, bucket):  # type: ignore[no-untyped-def]
            with reducing(bucket.buffer(), by_python):
                return hook(state, bucket)

        own_register(model, state, run)

    def lazy_init(model: Any) -> None:
        if not model._comm_hooks:  # it reduces by itself, which nobody sees
            register(model, model.process_group, _all_reduced, by_python=False)
        own_init(model)

    def register_ddp_hooks(strategy: Any) -> None:
        names = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper")
        given = {name: getattr(strategy, f"_{name}") for name in names}
        _register_ddp_comm_hook(model=strategy.model, **given)

    return [
        (DistributedDataParallel, "register_comm_hook", register),
        (DistributedDataParallel, "_lazy_init", lazy_init),
        (DDPStrategy, "_register_ddp_hooks", register_ddp_hooks),
    ]


def _all_reduced(group: Any, bucket: Any) -> Any:
    future: Any = torch.futures.Future()
    dist.all_reduce(bucket.buffer(), group=group)
    future.set_result(bucket.buffer())
    return future


_LAZY_INIT: Any = DistributedDataParallel._lazy_init
_SHAPES = "_propagate_tensor_meta_non_cached"


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function below no mode: DTensor derives shapes from operators that no device runs."""

    def run(*args: Any) -> Any:
        with _disable_current_modes():
            return function(*args)

    return run


def _convert(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Stands for ``nn.Module._apply``, which cannot exchange parameters without memory.

    New ones take their places, ties kept; those that do not change stay what they are.
    """
    made: dict[int, Tensor] = {}
    for part in module.modules() if recurse else [module]:
        for entries in (part._parameters, part._buffers):
            for name, tensor in entries.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _converted(tensor, convert)
                entries[name] = made[id(tensor)]  # type: ignore[assignment]
    return module


def _converted(tensor: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        new = convert(tensor)
    if (new.dtype, new.device, new.shape) == (tensor.dtype, tensor.device, tensor.shape):
        return tensor
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


# --- operators ----------------------------------------------------------------------------------

# Place of the queries among the operands, and products of forward (q k, p v) or backward.
_ATTENTION = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": (0, 1, 1),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": (1, 3, 2),
}


def flops_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Operations of a product or of attention, of which causal attention needs half; else 0."""
    name = str(operator)
    if name in _ATTENTION:
        # Not by torch's formula, whose 2.11 knows no groups of heads that share keys and values.
        place, with_keys, with_values = _ATTENTION[name]
        (*heads, queries, channels), (*_, keys, _), (*_, wide) = (
            tensor.shape for tensor in args[place : place + 3]
        )
        count: int = 2 * math.prod(heads) * queries * keys
        count *= with_keys * channels + with_values * wide
    elif operator._overloadpacket in flop_registry:
        count = int(flop_registry[operator._overloadpacket](*args, **kwargs, out_val=result))
    else:
        return 0
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "is_causal":
            value = args[place] if place < len(args) else kwargs.get("is_causal", False)
            return count // 2 if value else count
    return count
