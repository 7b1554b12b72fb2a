"""Checks before the first step: modules, callbacks, devices and optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from lq_lightning._compat.fsdp2 import GroupParams, fsdp_units, unit_mesh, uses_hsdp
from lq_lightning._compat.modules import has_gradient_hooks
from lq_lightning._compat.tensor_parallel import DATA, TENSOR, why_not_shardable
from lq_lightning._compat.torch import copy_with
from lq_lightning.checkpoint.files import is_local, put_back
from lq_lightning.checkpoint.ranks import RankGroup
from lq_lightning.foundation.parameters import shares_memory_within
from lq_lightning.strategies.failures import is_refused_for_shards

_WRAPPERS = (FullyShardedDataParallel, DistributedDataParallel, DataParallel)

# their updates need operations that torch does not have for DTensors
_UNSUPPORTED_OPTIMIZERS = (optim.Adafactor, optim.LBFGS, optim.Rprop, optim.SparseAdam)
_UNSUPPORTED_IF_FUSED = (optim.Adagrad, optim.SGD)
# whose optimizers work on DTensors, but for those above; torchao's would be compiled by a trial
_KNOWN_PACKAGES = ("torch", "lq_lightning", "torchao")


def check_shardable(root: nn.Module, tensor: DeviceMesh | None = None) -> None:
    """Refuse modules that FSDP2 cannot shard, before anything is changed.

    Parameters may be on ``tensor``, the mesh of tensor-parallel ranks.
    """
    for name, module in root.named_modules():
        if isinstance(module, _WRAPPERS):
            raise TypeError(
                f"`{name or 'the LightningModule'}` is wrapped in `{type(module).__name__}`, which "
                "cannot be combined with FSDP2. Remove the wrapper: the strategy shards the model "
                "itself, or use `torch.distributed.fsdp.fully_shard` in `configure_model`."
            )
        looks_up = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if looks_up and module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"`{name}` has sparse gradients, and FSDP2 reduces dense ones only. Build it with "
                f"`{type(module).__name__}(sparse=False)`."
            )
        if looks_up and module.max_norm is not None and module.weight.requires_grad:
            raise ValueError(
                f"`{name}` has `max_norm={module.max_norm}`, which writes into its weight in "
                "forward. There it is a gathered copy, and the write would be lost. Leave "
                "`max_norm` out and shorten the rows in `on_train_batch_start`: `with "
                "torch.no_grad(): weight.mul_((max_norm / weight.norm(dim=1, keepdim=True))"
                ".clamp(max=1))`."
            )
    managed: set[int] = set()
    for _, _, group in fsdp_units(root):
        managed.update(id(p.sharded_param) for p in GroupParams(group)())
    for name, parameter in root.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"parameter `{name}` is lazily initialised and has no shape yet. Run the model on "
                "a small input in `configure_model`, or give the layer its input size."
            )
        if isinstance(parameter, DTensor) and id(parameter) not in managed:
            why = why_not_shardable(parameter, tensor)
            if why is not None:
                raise NotImplementedError(
                    f"parameter `{name}` {why}, where tensor parallelism has to cut it evenly or "
                    'replicate it over `self.device_mesh["tensor_parallel"]` '
                    "(`tensor_parallel_size` is the size of that axis). Change its layout, or "
                    "leave the parameter out of the plan."
                )
        if has_gradient_hooks(parameter) and not isinstance(parameter, DTensor):
            raise ValueError(
                f"parameter `{name}` has a hook for its gradient, which sharding would lose. Set "
                "it in `on_fit_start`, when parameters are shards, with `parameter."
                "register_post_accumulate_grad_hook(hook)`, which gets the parameter when its "
                "`grad` is there, averaged over the ranks."
            )
        if parameter.dim() == 0:
            raise ValueError(
                f"parameter `{name}` is a scalar, which FSDP2 cannot shard. Make it a tensor of "
                "shape (1,), for example `nn.Parameter(torch.ones(1))`."
            )
        if not isinstance(parameter, DTensor) and shares_memory_within(parameter):
            raise ValueError(
                f"parameter `{name}` of shape {tuple(parameter.shape)} and strides "
                f"{parameter.stride()} has several elements in one place of memory, as "
                "`torch.Tensor.expand` gives them. FSDP2 cannot shard that, and no optimizer can "
                "update it. Make the small tensor the parameter and expand it in `forward`, or "
                "call `.clone()` before."
            )
        if parameter.numel() == 0 and parameter.requires_grad:
            raise ValueError(
                f"parameter `{name}` of shape {tuple(parameter.shape)} has no elements, and FSDP2 "
                "cannot reduce its gradient. Leave it out, or freeze it: `requires_grad_(False)`."
            )


def check_meshes(root: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse units and DTensors of ``configure_model`` on other ranks than the strategy's own.

    Nothing would average gradients over all of them, so that ranks would train different models.

    Args:
        mesh: The strategy's, with an axis ``"data_parallel"``.
    """
    own = mesh[DATA].mesh.flatten().tolist()
    remedy = (
        "Give `fully_shard` the argument `mesh=self.device_mesh['data_parallel']`, or leave it out "
        "and let the strategy shard. To gather weights within nodes only, as HSDP does, set "
        "`replica='node'`; `node_size` says how many ranks a node has."
    )
    managed: set[int] = set()
    for name, _, group in fsdp_units(root):
        found, unit = unit_mesh(group), f"unit `{name or 'root'}` was sharded over "
        if uses_hsdp(group):
            raise NotImplementedError(
                f"{unit}{_ranks_of(found)}, as replicas (HSDP), between which FSDP2 would average "
                f"gradients past this strategy. {remedy}"
            )
        if found.mesh.flatten().tolist() != own:
            raise ValueError(
                f"{unit}{_ranks_of(found)}, but this rank shares its parameters with the ranks "
                f"{own}, in this order. {remedy}"
            )
        for _, parameter, *_ in GroupParams(group)():
            axes = parameter.device_mesh.mesh_dim_names or ()  # type: ignore[attr-defined]
            if len(axes) > 1 and TENSOR not in axes:
                raise ValueError(
                    f"{unit}{own}, but its parameters are also cut over another axis than "
                    f"`{TENSOR}`: {_ranks_of(parameter.device_mesh)}. Give "  # type: ignore[attr-defined]
                    f"`parallelize_module` the mesh `self.device_mesh['{TENSOR}']`. {remedy}"
                )
            managed.add(id(parameter))
    for name, parameter in root.named_parameters():
        if not isinstance(parameter, DTensor) or id(parameter) in managed:
            continue
        shared = set(own) & set(parameter.device_mesh.mesh.flatten().tolist())
        if len(shared) > 1:
            raise ValueError(
                f"parameter `{name}` was distributed over {_ranks_of(parameter.device_mesh)}, of "
                f"which the strategy shards parameters over {sorted(shared)} itself. Leave it a "
                "plain tensor there. For tensor parallelism set `tensor_parallel_size` and give "
                f"`parallelize_module` the mesh `self.device_mesh['{TENSOR}']`."
            )


def _ranks_of(mesh: DeviceMesh) -> str:
    axes = ", ".join(f"`{name}`" for name in mesh.mesh_dim_names or ())
    return f"the ranks {mesh.mesh.tolist()}" + (f" ({axes})" if axes else "")


def check_fully_sharded(root: nn.Module) -> None:
    """Refuse parameters that ranks would update differently, or FSDP2 could not reduce."""
    left = [n for n, p in root.named_parameters() if not isinstance(p, DTensor)]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise RuntimeError(
            f"parameter `{left[0]}`{more} was not sharded, so its values would drift apart between "
            "ranks. This happens with `fully_shard(..., ignored_params=...)` and with parameters "
            "added after sharding; create all parameters in `__init__` or `configure_model`."
        )
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    for unit, _, group in fsdp_units(root):
        trained = [p.sharded_param for p in GroupParams(group)() if p.sharded_param.requires_grad]
        by_dtype = {parameter.dtype: names[id(parameter)] for parameter in trained}
        if len(by_dtype) > 1:
            found = " and ".join(f"{dtype} (`{name}`)" for dtype, name in by_dtype.items())
            raise ValueError(
                f"unit `{unit or 'root'}` has trained parameters of {found}, and FSDP2 reduces the "
                "gradients of a unit in one dtype. Make them alike (`model.float()`, and "
                "`precision='bf16-mixed'` to compute in bf16), or shard the modules of one dtype "
                "as units of their own: `units=[...]`."
            )


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Refuse callbacks that treat parameters as whole tensors."""
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            args = "" if isinstance(callback, EMAWeightAveraging) else "decay=None"
            raise NotImplementedError(
                f"the callback `{name}` copies the whole module, and saves its copy as if it were "
                "whole, which a module that is sharded or cut into stages does not allow. Use "
                f"`lq_lightning.callbacks.EMA({args})`, which averages the shards, or one rank."
            )
        if isinstance(callback, ModelPruning):
            raise NotImplementedError(
                f"the callback `{name}` replaces parameters while the run goes on, which a sharded "
                "module does not allow. Allowed: one rank, or `torch.nn.utils.prune` in "
                "`configure_model`, which runs before sharding and keeps its masks."
            )


def check_device(strategy: ModelParallelStrategy, synchronizes_layers: bool) -> None:
    """Refuse devices that do not go with the strategy's other options."""
    devices = len(strategy.parallel_devices or ())
    if strategy.local_rank >= devices:
        raise ValueError(
            f"this is process {strategy.local_rank + 1} of its machine, but the Trainer has "
            f"`devices={devices}` there: give it as many as processes were started "
            "(`torchrun --nproc-per-node`). On CPUs `devices='auto'` is 1."
        )
    device = strategy.root_device.type
    if device not in ("cpu", "cuda"):
        raise ValueError(
            f"`accelerator={device!r}` is not supported by `{type(strategy).__name__}`: choose "
            "'cpu' or 'cuda'."
        )
    if device == "cpu" and synchronizes_layers and strategy.world_size > 1:
        raise ValueError(
            "`sync_batchnorm=True` needs GPUs, but the accelerator is 'cpu', for which torch "
            "has no synchronized batch norm: leave it out, or set `accelerator='cuda'`."
        )
    backend = strategy.process_group_backend or ""
    if device == "cpu" and "nccl" in backend:
        raise ValueError(
            f"`process_group_backend={backend!r}` needs GPUs, but the accelerator is 'cpu': "
            "leave it out (gloo is used), or set `accelerator='cuda'`."
        )


def check_start(callbacks: Sequence[Any], ranks: RankGroup) -> None:
    """Refuse to start afresh because a killed run had set aside ``OnExceptionCheckpoint``'s file.

    The file has its name again. Lightning's search finds every other one that was set aside. All
    ``ranks`` call this.
    """
    saves = [c for c in callbacks if isinstance(c, OnExceptionCheckpoint)]
    paths = [Path(callback.ckpt_path) for callback in saves if is_local(callback.ckpt_path)]

    def check() -> None:
        back = [path for path in paths if put_back(path)]
        if back:
            raise RuntimeError(
                f"a killed run was about to replace `{back[0]}`, which therefore was not found. It "
                "has its name again: start once more to go on from it."
            )

    if paths:
        ranks.together(check if ranks.is_first else lambda: None)


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose first step on sharded parameters would fail."""
    _check_mixed_meshes(optimizer)
    fused = any(group.get("fused") for group in optimizer.param_groups)
    error = None
    if isinstance(optimizer, _UNSUPPORTED_OPTIMIZERS):
        what = f"`{type(optimizer).__name__}`"
    elif isinstance(optimizer, _UNSUPPORTED_IF_FUSED) and fused:
        what = f"`{type(optimizer).__name__}(fused=True)`"
    elif (error := _failure_on_shards(optimizer)) is not None:
        what = f"`{type(optimizer).__name__}` of `{type(optimizer).__module__.split('.')[0]}`"
    else:
        return
    raise NotImplementedError(
        f"{what} does not work on parameters that are sharded over ranks: torch has no sharded "
        "version of its operations. Use AdamW, Adam, NAdam, RAdam, Adamax, Adadelta, RMSprop, ASGD "
        "or Muon, or SGD or Adagrad without `fused`; `QuantizedPrecision` makes the states of Adam "
        "and AdamW as small as a quarter. Or run on one rank."
    ) from error


def _failure_on_shards(optimizer: Optimizer) -> Exception | None:
    """Try a step on small shards, if it is not one that is known; all ranks of the mesh call it.

    Only errors that say that an operation has no sharded version count: an optimizer that cannot
    be copied, or wants parameters of certain sizes, may work on those of the model. One that holds
    others, or tensors, is not tried: its copy would step what it shares with it.
    """
    owner = next(c for c in type(optimizer).__mro__ if "step" in vars(c))
    if owner.__module__.split(".")[0] in _KNOWN_PACKAGES or _holds_others(optimizer):
        return None
    small: dict[int, list[Tensor]] = {}
    for index, group in enumerate(optimizer.param_groups):
        # one of each number of dimensions, on which it depends what many keep
        sharded = {p.dim(): p for p in group["params"] if isinstance(p, DTensor)}
        if sharded:
            small[index] = [_small_like(parameter) for parameter in sharded.values()]
    if not small:
        return None
    try:
        with isolate_rng(include_cuda=any(p.is_cuda for ps in small.values() for p in ps)):
            copy_with(optimizer, small).step()
    except (RuntimeError, TypeError) as error:
        return error if is_refused_for_shards(error) else None
    except Exception:  # says nothing about the steps of the model's own parameters
        return None
    return None


def _holds_others(optimizer: Optimizer) -> bool:
    """Whether attributes but groups and states are, or have, optimizers, modules or tensors."""
    waiting = [v for n, v in vars(optimizer).items() if n not in ("param_groups", "state")]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, (Optimizer, nn.Module, Tensor)):
            return True
        if isinstance(value, (dict, list, tuple, set)) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
        elif hasattr(value, "__dict__") and not callable(value) and id(value) not in seen:
            seen.add(id(value))
            waiting += vars(value).values()
    return False


def _small_like(parameter: DTensor) -> Tensor:
    """A sharded parameter of a few ones, with a gradient."""
    mesh = parameter.device_mesh
    local = torch.ones([4] * parameter.dim(), dtype=parameter.dtype, device=parameter.device)
    placements = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
    made = DTensor.from_local(local, mesh, placements, run_check=False)
    small = nn.Parameter(made)
    small.grad = made.clone()
    return small


def _check_mixed_meshes(optimizer: Optimizer) -> None:
    """Let ASGD work where tensor parallelism shards only some parameters, or refuse it.

    torch would put all scalars of its list operations on the mesh of the first parameter.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    meshes = {p.device_mesh for p in params if isinstance(p, DTensor)}
    for group in optimizer.param_groups:
        if len(meshes) > 1 and isinstance(optimizer, optim.ASGD):
            if group["foreach"]:
                raise NotImplementedError(
                    "`ASGD(foreach=True)` does not work where only some parameters are sharded by "
                    "tensor parallelism. Leave `foreach` out."
                )
            group["foreach"] = False  # None is True on GPUs
