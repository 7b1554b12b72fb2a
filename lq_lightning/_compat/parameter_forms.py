"""The two forms of FSDP2's parameters: shards, and gathered copies that are filled and freed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import unsafe_setattr_param

from lq_lightning._compat.fsdp2 import param_groups
from lq_lightning._compat.modules import begin_root_forward

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class RootParameters:
    """The parameters that belong to the root itself, as shards and gathered.

    Which of the two its modules hold does not matter to FSDP2, which holds both by itself, until it
    gathers or frees them.

    Args:
        module: The root.
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
        """Begin the root's forward, and leave the modules what they hold (`functional_call`)."""
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
    """The gathered forms of all parameters; only FSDP2 may fill, free or write them.

    Args:
        root: Root of the units.
    """

    def __init__(self, root: nn.Module) -> None:
        units = [m for m in root.modules() if isinstance(m, FSDPModule)]
        params = [p for m in units for group in param_groups(m) for p in group.fsdp_params]
        self._params = [p for p in params if not _is_written_by_torch(p)]
        self._watched = set(self._params)
        self._versions: dict[Any, int] = {}
        for param in self._params:
            self._note_when_made(param)

    def _note_when_made(self, param: Any) -> None:
        """Take the version of a gathered form from its first gather, which makes it."""
        original = param.init_unsharded_param

        def init_unsharded_param() -> None:
            original()
            del param.init_unsharded_param
            self._versions[param] = param._unsharded_param._version

        param.init_unsharded_param = init_unsharded_param

    def sums(self, unit: nn.Module) -> Tensor | None:
        """``[parameters]`` int64: sums over the bits of a unit's gathered values; None if freed."""
        values = [p._unsharded_param.detach() for p in self._of(unit)]
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
            gathered, (filled,) = param._unsharded_param, param.all_gather_outputs
            version = gathered._version
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
