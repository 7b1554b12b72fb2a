"""Adapters of peft, and the matrices in which they cross.

A line shares a scale, a minimum and a trained width. The lines of LoRA are its rank-one parts:
row k of A and column k of B, as rows of one matrix per length, since modules of the same width are
alike. Prefix tuning has two matrices, the keys and the values of all layers, whose lines are
channels: two gates shared by all layers (AMAQ, appendix A.3).

Shape legend: L lines of D values; V virtual tokens of K layers with C channels each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .settings import OptionError, SplitSettings
from .wire import require

_NAME = "default"  # peft's, of the only adapter
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size of an element


def add_adapters(model: nn.Module, settings: SplitSettings) -> Any:
    """Return the model of peft around a frozen model; its adapters' values are never used."""
    require("peft")
    import peft

    if settings.peft == "prefix":
        config: peft.PeftConfig = peft.PrefixTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=settings.virtual_tokens
        )
        return peft.get_peft_model(model, config).eval()
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=list(settings.targets),
    )
    targets = f"`--targets {','.join(settings.targets)}`"
    trunk = getattr(model, model.base_model_prefix)
    linear = sorted({n.rpartition(".")[2] for n, m in trunk.named_modules() if _is_linear(m)})
    try:
        adapted = peft.get_peft_model(model, config, low_cpu_mem_usage=True)
    except ValueError as error:
        raise OptionError(
            f"{targets} names nothing that LoRA can adapt. This model has {', '.join(linear)}."
        ) from error
    # peft is content with one name that it finds.
    found = {name.partition(".lora_")[0] for name in adapter_shapes(adapted)}
    if idle := [t for t in settings.targets if not any(f".{n}".endswith(f".{t}") for n in found)]:
        raise OptionError(
            f"{targets}: LoRA finds no '{idle[0]}'. This model has {', '.join(linear)}."
        )
    prefix = f"base_model.model.{model.base_model_prefix}."
    if outside := sorted(name for name in found if not name.startswith(prefix)):
        raise OptionError(
            f"{targets} adapts {outside[0]}, which is not part of the trunk. Name modules of its "
            "layers, such as q_proj."
        )
    return adapted.eval()


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and not isinstance(module, nn.Embedding)


def _trained(adapted: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: parameter
        for name, parameter in adapted.named_parameters()
        if ".lora_" in name or name.startswith("prompt_encoder.")
    }


def adapter_shapes(adapted: nn.Module) -> dict[str, torch.Size]:
    """Return the names, as in peft, and shapes of the trained parameters."""
    return {name: parameter.shape for name, parameter in _trained(adapted).items()}


def initial_adapters(adapted: Any) -> dict[str, Tensor]:
    """Return the adapters as peft begins with them, float32, drawn by torch's generator."""
    for module in adapted.modules():
        if hasattr(module, "reset_lora_parameters"):
            module.lora_A[_NAME].to_empty(device="cpu")
            module.lora_B[_NAME].to_empty(device="cpu")
            module.reset_lora_parameters(_NAME, True)
    encoder = getattr(adapted, "prompt_encoder", None)
    if encoder is not None:
        encoder.to_empty(device="cpu")
        encoder[_NAME].embedding.reset_parameters()
    return {name: value.detach().float().clone() for name, value in _trained(adapted).items()}


class NamedParameters(nn.Module):
    """Parameters under dotted names, as in the state dict of another module."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = tuple(values)
        for name, value in values.items():
            *path, last = name.split(".")
            parent: nn.Module = self
            for part in path:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.register_parameter(last, nn.Parameter(value))

    def __iter__(self) -> Iterator[str]:
        """Go through the names."""
        return iter(self._names)

    def values(self) -> dict[str, Tensor]:
        """Return the parameters by name."""
        return {name: self.get_parameter(name) for name in self._names}


class LoRAPacking:
    """LoRA as one matrix ``[L, D]`` per length D of its lines.

    Args:
        shapes: Shapes of the adapters by their names; A is ``[rank, D]``, B is ``[D, rank]``.
    """

    lines_are_rows = True

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self._parts: dict[str, list[tuple[str, bool, int]]] = {}
        self.shapes: dict[str, tuple[int, int]] = {}
        for name, shape in shapes.items():
            transposed = ".lora_B." in name
            lines, length = reversed(shape) if transposed else shape
            key = f"lora_{length}"
            self._parts.setdefault(key, []).append((name, transposed, lines))
            self.shapes[key] = (self.shapes.get(key, (0, 0))[0] + lines, length)

    def pack(self, adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the matrices, in memory of their own; gradients flow back."""
        return {
            key: torch.cat([adapters[n].t() if turned else adapters[n] for n, turned, _ in parts])
            for key, parts in self._parts.items()
        }

    def unpack(self, matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the adapters; gradients flow back."""
        adapters = {}
        for key, parts in self._parts.items():
            pieces = matrices[key].split([lines for *_, lines in parts])
            for (name, turned, _), piece in zip(parts, pieces, strict=True):
                adapters[name] = piece.t() if turned else piece
        return adapters


class PrefixPacking:
    """A prefix ``[V, K * 2 * C]`` as two matrices ``[V * K, C]``: keys and values."""

    lines_are_rows = False

    def __init__(self, name: str, shape: torch.Size, layers: int) -> None:
        self._name = name
        self._view = (shape[0], layers, 2, shape[1] // (2 * layers))
        rows = (shape[0] * layers, self._view[3])
        self.shapes = {"keys": rows, "values": rows}

    def pack(self, adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the matrices, in memory of their own; gradients flow back."""
        parts = adapters[self._name].view(self._view).unbind(2)
        return {
            key: part.clone(memory_format=torch.contiguous_format).view(self.shapes[key])
            for key, part in zip(self.shapes, parts, strict=True)
        }

    def unpack(self, matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the adapters; gradients flow back."""
        tokens, layers, _, channels = self._view
        parts = [matrices[key].view(tokens, layers, channels) for key in self.shapes]
        return {self._name: torch.stack(parts, dim=2).flatten(1)}


Packing = LoRAPacking | PrefixPacking


def packing_of(adapted: Any) -> Packing:
    """Return how the adapters of a model cross."""
    shapes = adapter_shapes(adapted)
    if not hasattr(adapted, "prompt_encoder"):
        return LoRAPacking(shapes)
    (name,) = shapes
    return PrefixPacking(name, shapes[name], adapted.peft_config[_NAME].num_layers)


class PackedAdapters:
    """Adapters packed into matrices, and packed anew when a bit of an adapter has changed.

    All values are compared: nothing else tells whether they have changed. torch counts changes in
    place (``Tensor._version``), but not those of fused optimizers, through ``.data`` (as those of
    Lightning's ``WeightAveraging`` around a validation) or through numpy. It costs little: the
    comparison ends at the first difference, which after most steps is at the beginning, and where
    there is none, nothing has to be packed.
    """

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        self.changes = 0  # how often matrices were made
        self.matrices: dict[str, Tensor] = {}

    def refresh(self, adapters: Mapping[str, Tensor]) -> None:
        """Take over the adapters, if they have changed."""
        before = self.packing.unpack(self.matrices) if self.matrices else None
        if before and all(_same(value, before[name]) for name, value in adapters.items()):
            return
        before, self.matrices = None, {}  # freed first
        # The first batch to see a change may be one of a validation, the next one of training.
        with torch.inference_mode(False), torch.no_grad():
            self.matrices = self.packing.pack(adapters)
        self.changes += 1

    def connected(self, adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the matrices with a graph, so that their gradients become those of adapters.

        ``adapters`` are those of the last ``refresh``.
        """
        matrices: tuple[Tensor, ...] = _Connect.apply(self, tuple(adapters), *adapters.values())  # type: ignore[no-untyped-call]
        return dict(zip(self.matrices, matrices, strict=True))


class _Connect(torch.autograd.Function):
    """The matrices as they are, as a function of the adapters."""

    @staticmethod
    def forward(
        ctx: Any, packed: PackedAdapters, names: tuple[str, ...], *adapters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.packing, ctx.names, ctx.keys = packed.packing, names, tuple(packed.matrices)
        return tuple(value.detach() for value in packed.matrices.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gradients = ctx.packing.unpack(dict(zip(ctx.keys, grads, strict=True)))
        return (None, None, *(gradients[name] for name in ctx.names))


def _same(value: Tensor, before: Tensor) -> bool:
    """Whether two tensors have the same bits: zeros of both signs differ, and NaN is itself."""
    if (value.dtype, value.device) != (before.dtype, before.device):
        return False
    integers = _INTEGERS[value.element_size()]
    return torch.equal(value.detach().view(integers), before.view(integers))
