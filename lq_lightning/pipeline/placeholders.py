"""Placeholders for modules that another stage of a pipeline holds. They have no parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lq_lightning.foundation.layer_stack import has_parameters, hidden_name

from .interceptor import LayerInterceptor

__all__ = [
    "PlaceholderAfter",
    "PlaceholderLayer",
    "PlaceholderModule",
    "check_replaceable",
    "placeholders",
]


class _Settings:
    """Settings of a module inside an absent layer: models read them from their first layer."""

    def __init__(self, values: dict[str, Any], name: str) -> None:
        self.__dict__ |= values | {"absent_name": name}

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(_missing(self.__dict__.get("absent_name", "?"), name))


def _settings(module: nn.Module, name: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for cls in [each for each in reversed(type(module).__mro__) if each not in nn.Module.__mro__]:
        values |= {key: value for key, value in vars(cls).items() if key[:1] != "_"}
    values |= vars(module)
    plain = {k: v for k, v in values.items() if isinstance(v, (bool, int, float, str))}
    inner = {key: (child, f"{name}.{key}") for key, child in module.named_children()}
    return plain | {key: _Settings(_settings(*child), child[1]) for key, child in inner.items()}


def _missing(absent: str, name: str) -> str:
    return (
        f"`{absent}.{name}`: `{absent}` is on another stage of the pipeline, so that here it can "
        "only be called in a step. A head that reads the weight of an embedding can be a module of "
        "its own that shares it: `self.head.weight = self.embedding.weight`."
    )


class PlaceholderModule(nn.Module):
    """Stands for the module ``name`` of the whole model; the base of the placeholders.

    Attributes:
        may_draw: Whether the module may draw random numbers, for which it has a seed of its own.
    """

    may_draw = False

    def __init__(self, name: str, calls: LayerInterceptor) -> None:
        super().__init__()
        self.absent_name = name
        # In a list, so that it is neither copied with nor seen as part of the module.
        self._calls = [calls]

    @property
    def calls(self) -> LayerInterceptor:
        """The interceptor of the model's layers."""
        return self._calls[0]

    def extra_repr(self) -> str:
        """Show the name."""
        return self.absent_name

    def __getattr__(self, name: str) -> Any:
        """Raise ``AttributeError`` with an explanation: parameters and submodules are elsewhere."""
        raise AttributeError(_missing(self.__dict__.get("absent_name", "?"), name))

    def _nan(
        self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype | None = None
    ) -> Tensor:
        dtype = dtype or self.calls.embedded_dtype()
        nan = torch.full(shape, float("nan"), dtype=dtype, device=device)
        return self.calls.given_by_placeholder(nan, self.absent_name)


class PlaceholderLayer(PlaceholderModule):
    """Passes its input on, in the form in which layers return it.

    Settings of the layer that it replaces, such as ``attention_type``, are kept, also those of
    modules inside it.
    """

    def __init__(self, name: str, calls: LayerInterceptor, index: int, layer: nn.Module) -> None:
        super().__init__(name, calls)
        self._index, self._argument = index, hidden_name(layer)
        self.__dict__ |= _settings(layer, name) | self.__dict__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden state that came in."""
        return self.calls.call_layer(self._index, self._argument, None, args, kwargs)


class PlaceholderAfter(PlaceholderModule):
    """Stands for a module after the layers, which a step does not reach here."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ``RuntimeError``: the call is at the wrong place."""
        if self.calls.passed_layers():
            raise RuntimeError(
                f"`{self.absent_name}` is used before all layers have run: in a pipeline, every "
                "step runs all layers (no early exit)."
            )
        raise RuntimeError(
            f"`{self.absent_name}` is used in front of the layers, but was taken for a part behind "
            "them, which only the last stage holds. Register it in front of the layers."
        )


class PlaceholderBefore(PlaceholderModule):
    """Stands for a module before the layers: returns NaN in the shape of the module's output.

    Args:
        name: Name of the module.
        calls: Interceptor of the model's layers.
        shape: From the shape of the input to that of the output.
        keeps_dtype: Whether the output has the dtype of the input, rather than that of the hidden
            state.
        weight: Shape of the attribute ``weight``, if models ask it for dtype and device.
    """

    def __init__(
        self,
        name: str,
        calls: LayerInterceptor,
        shape: Callable[[torch.Size], tuple[int, ...]],
        keeps_dtype: bool = False,
        weight: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(name, calls)
        self._shape, self._keeps_dtype, self._weight = shape, keeps_dtype, weight

    @property
    def weight(self) -> Tensor:
        """NaN of the table's shape, for embeddings: models ask it for dtype and device."""
        device = self.calls.device()
        if device is None or self._weight is None or self.calls.passed_layers():
            raise AttributeError  # which `__getattr__` explains
        return self._nan((1, 1), device).expand(self._weight)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return NaN."""
        if self.may_draw:
            self.calls.random.pass_layer()
        if self.calls.passed_layers():
            raise RuntimeError(
                f"`{self.absent_name}` is used behind the layers, but was taken for a part in "
                "front of them, which only the first stage holds. Register it behind the layers; "
                "steps that run the model several times, as `generate`, need `quantized_fsdp`."
            )
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        return self._nan(self._shape(x.shape), x.device, x.dtype if self._keeps_dtype else None)


def placeholders(
    module: nn.Module, name: str, calls: LayerInterceptor
) -> dict[str, PlaceholderModule]:
    """Return what must replace modules so that ``module`` has no parameters, by their names.

    Modules whose parameters all lie in submodules keep their own code.

    Args:
        module: A module before the layers.
        name: Its name in the whole model.
        calls: Interceptor of the model's layers.

    Raises:
        NotImplementedError: there is no placeholder for a module.
    """
    if not has_parameters(module):
        return {}
    if isinstance(module, nn.Embedding):
        table = module.num_embeddings, module.embedding_dim
        return {name: PlaceholderBefore(name, calls, lambda s: (*s, table[1]), weight=table)}
    if isinstance(module, nn.Linear):
        size = module.out_features
        return {name: PlaceholderBefore(name, calls, lambda s: (*s[:-1], size))}
    base = getattr(module, "base_layer", None)  # of an adapter (peft)
    if isinstance(base, nn.Module):
        return {name: next(iter(placeholders(base, name, calls).values()))}
    own = dict(module.named_parameters(recurse=False))
    is_leaf = not any(has_parameters(child) for child in module.children())
    is_norm = is_leaf and "norm" in type(module).__name__.lower()
    if is_norm and all(p.ndim < 2 for p in own.values()):
        return {name: PlaceholderBefore(name, calls, tuple, keeps_dtype=True)}
    if own:
        raise NotImplementedError(
            f"`{name}` ({type(module).__name__}) runs in front of the layers and has parameters of "
            f"its own ({', '.join(own)}), so that other stages have nothing to put in its place. "
            "Build it of `nn.Embedding`, `nn.Linear` and norms, or use `quantized_fsdp`."
        )
    replaced: dict[str, PlaceholderModule] = {}
    for key, child in module.named_children():
        replaced |= placeholders(child, f"{name}.{key}", calls)
    return replaced


def check_replaceable(root: nn.Module, name: str) -> None:
    """Raise ``NotImplementedError`` for a module before the layers without a placeholder."""
    placeholders(root.get_submodule(name), name, LayerInterceptor(()))
