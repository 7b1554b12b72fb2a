"""Memory and values for modules that were built on the meta device, and a check that all got some.

``to_empty`` gives a tensor whatever the memory held before, and a class whose ``reset_parameters``
does not fill it trains on that. So new memory is marked, and a tensor that still has the mark at
the first step was given no value: by ``reset_parameters``, a checkpoint, or a hook of the user's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lq_lightning._compat.tensors import local_tensor, materialize

_RECORD = "_lq_marked"  # names of marked tensors, kept in the module
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def initialize_meta_tensors(root: nn.Module, device: torch.device) -> None:
    """Allocate meta tensors on ``device``, and call ``reset_parameters`` of their modules.

    Tensors with values keep them. :func:`check_values` finds those that got none. ``root`` may be
    sharded.
    """
    marked = {name for name, tensor in _named(root).items() if tensor.is_meta}
    if not marked:
        return
    owners = [m for m in root.modules() if any(t.is_meta for t in _named(m, False).values())]
    materialize(root, device)
    tensors = _named(root)
    for name in marked:
        bits = _bits(_local(tensors[name]))
        bits.fill_(_mark(tensors[name], bits))
    new = {id(tensors[name]) for name in marked}
    root.__dict__[_RECORD] = marked
    # Functions of instances, which `load_pretrained` sets, come last: another module that has the
    # same tensor (tied weights) must not initialize it again. All are looked up before any is
    # called: each works once, and a module's own may call those of its children.
    owners.sort(key=lambda owner: "reset_parameters" in owner.__dict__)
    resets = [getattr(module, "reset_parameters", None) for module in owners]
    unloaded = {module for module in owners if "reset_parameters" not in module.__dict__}
    has_values = [_local(t) for m in owners for t in _named(m, False).values() if id(t) not in new]
    values = [tensor.clone() for tensor in has_values]
    for reset in resets:
        if callable(reset):
            reset()
    for tensor, value in zip(has_values, values, strict=True):
        tensor.copy_(value)
    _reset_adapters(root, unloaded)


def _reset_adapters(root: nn.Module, new: set[nn.Module]) -> None:
    """Initialize new LoRA layers of peft: B is zero, unlike a linear's.

    peft raises ``ValueError`` if the initialization needs weights of the base model.
    """
    tuners = [m for m in root.modules() if isinstance(m.__dict__.get("peft_config"), dict)]
    for tuner in tuners:
        layers: list[Any] = [m for m in tuner.modules() if hasattr(m, "reset_lora_parameters")]
        for layer in layers:
            for adapter, config in tuner.__dict__["peft_config"].items():
                linear = adapter in layer.lora_A
                if (layer.lora_A[adapter] if linear else layer.lora_embedding_A) not in new:
                    continue
                layer.reset_lora_parameters(adapter, config.init_lora_weights)


def check_values(root: nn.Module) -> None:
    """Raise ``RuntimeError`` if a tensor from the meta device has no value. Free after success."""
    marked = root.__dict__.pop(_RECORD, None)
    if marked is None:
        return
    tensors = _named(root)
    left = sorted(name for name in marked if name in tensors and _is_marked(_local(tensors[name])))
    if not left:
        return
    root.__dict__[_RECORD] = marked  # the next step is refused, too
    path = left[0].rpartition(".")[0]
    owner = root.get_submodule(path)
    kind = "parameter" if isinstance(tensors[left[0]], nn.Parameter) else "buffer"
    more = f" (and {len(left) - 1} more: {', '.join(left[1:4])})" if len(left) > 1 else ""
    raise RuntimeError(
        f"the {kind} `{left[0]}`{more} was made on the meta device, and nothing has given it all "
        f"of its values. Let `{type(owner).__name__}.reset_parameters()` do it, which is called "
        "once there is memory; or make it outside of `torch.device('meta')`: "
        "`with torch.device('cpu'): ...`; or load a checkpoint that has it, which buffers with "
        "`persistent=False` are in none; or fill it in `on_fit_start`."
    )


def _named(root: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    every = (root.named_parameters, root.named_buffers)
    return {
        name: tensor
        for named in every
        for name, tensor in named(recurse=recurse, remove_duplicate=False)
    }


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor.detach())


def _bits(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor as a row of integers."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    row = torch.as_strided(values, (values.numel(),), (1,))
    return row.view(_INTEGERS[values.itemsize])


def _mark(tensor: Tensor, bits: Tensor) -> int:
    """Return the mark of a number: a NaN that no operator makes, or an unusual integer."""
    byte = b"\xff" if tensor.is_floating_point() or tensor.is_complex() else b"\xa5"
    return int.from_bytes(byte * bits.itemsize, "little", signed=bits.dtype != torch.uint8)


def _is_marked(tensor: Tensor) -> bool:
    """Whether some of the numbers are marked, or all of the integers."""
    bits = _bits(tensor)
    found = bits == _mark(tensor, bits)
    integers = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return bool(found.numel() and found.all() if integers else found.any())
