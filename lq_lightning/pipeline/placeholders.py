"""Placeholders for modules that another stage of a pipeline holds. They have no parameters."""

from __future__ import annotations

from collections.abc import Iterator
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
    """Settings of a module inside of an absent layer: models read them from their first layer."""

    def __init__(self, values: dict[str, Any], name: str) -> None:
        self.__dict__ |= values | {"absent_name": name}

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(_missing(self.__dict__.get("absent_name", "?"), name))


def _settings(module: nn.Module, name: str) -> dict[str, Any]:
    children = module.named_children()
    inner = {key: (child, f"{name}.{key}") for key, child in children}
    values: dict[str, Any] = {}
    for cls in [each for each in reversed(type(module).__mro__) if each not in nn.Module.__mro__]:
        values |= {key: value for key, value in vars(cls).items() if key[:1] != "_"}
    values |= vars(module)
    plain = {k: v for k, v in values.items() if isinstance(v, (bool, int, float, str))}
    return plain | {key: _Settings(_settings(*child), child[1]) for key, child in inner.items()}


def _missing(absent: str, name: str) -> str:
    return (
        f"`{absent}.{name}`: `{absent}` is on another stage of the pipeline, so that here it can "
        "only be called in a step. A head that reads the weight of an embedding can be a module of "
        "its own that shares it: `self.head.weight = self.embedding.weight`."
    )


class PlaceholderModule(nn.Module):
    """Base of the placeholders.

    Args:
        name: Of the module in the whole model.
        calls: Of the model.

    Attributes:
        may_draw: Whether what it replaces may draw random numbers, for which it has a seed then.
    """

    may_draw = False

    def __init__(self, name: str, calls: LayerInterceptor) -> None:
        super().__init__()
        self.absent_name = name
        # In a list, so that it is neither copied with nor seen as part of the module.
        self._calls = [calls]

    @property
    def calls(self) -> LayerInterceptor:
        """The calls of the model's layers."""
        return self._calls[0]

    def extra_repr(self) -> str:
        """Say what is missing."""
        return self.absent_name

    def __getattr__(self, name: str) -> Any:
        """Explain what is not there.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(_missing(self.__dict__.get("absent_name", "?"), name))

    def _nan(
        self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype | None = None
    ) -> Tensor:
        dtype = dtype or self.calls.embedded_dtype()
        nan = torch.full(shape, float("nan"), dtype=dtype, device=device)
        return self.calls.given_by_placeholder(nan, self.absent_name)

    def _begin_call(self) -> None:
        if self.may_draw:
            self.calls.random.pass_layer()
        if self.calls.passed_layers():
            raise RuntimeError(
                f"`{self.absent_name}` is used behind the layers, but was taken for a part in "
                "front of them, which only the first stage holds. Register it behind the layers; "
                "steps that run the model several times, as `generate`, need `quantized_fsdp`."
            )


class PlaceholderLayer(PlaceholderModule):
    """In place of a layer: passes its input on, in the form in which layers return it.

    Args:
        name: Of the layer.
        calls: Of the model.
        index: Of the layer.
        layer: What it replaces; settings such as ``attention_type``, also those of modules inside
            of it, are kept.
    """

    def __init__(self, name: str, calls: LayerInterceptor, index: int, layer: nn.Module) -> None:
        super().__init__(name, calls)
        self._index, self._argument = index, hidden_name(layer)
        self.__dict__ |= _settings(layer, name) | self.__dict__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden state that came in."""
        return self.calls.call_layer(self._index, self._argument, None, args, kwargs)


class PlaceholderAfter(PlaceholderModule):
    """In place of what runs behind the layers, which a step does not reach here."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse the call.

        Raises:
            RuntimeError: always.
        """
        if self.calls.passed_layers():
            raise RuntimeError(
                f"`{self.absent_name}` is used before all layers have run: in a pipeline, every "
                "step runs all layers (no early exit)."
            )
        raise RuntimeError(
            f"`{self.absent_name}` is used in front of the layers, but was taken for a part behind "
            "them, which only the last stage holds. Register it in front of the layers."
        )


class PlaceholderEmbedding(PlaceholderModule):
    """In place of an embedding: NaN of shape ``[*input.shape, size]``.

    Args:
        name: Of the embedding.
        calls: Of the model.
        shape: ``(entries, size)``.
    """

    def __init__(self, name: str, calls: LayerInterceptor, shape: tuple[int, int]) -> None:
        super().__init__(name, calls)
        self._shape = shape

    @property
    def weight(self) -> Tensor:
        """NaN of the table's shape: models ask it for dtype and device."""
        device = self.calls.device()
        if device is None or self.calls.passed_layers():
            raise AttributeError  # which `__getattr__` explains
        return self._nan((1, 1), device).expand(self._shape)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return NaN for each index."""
        self._begin_call()
        indices = next(_tensors(args, kwargs))
        return self._nan((*indices.shape, self._shape[1]), indices.device)


class PlaceholderLinear(PlaceholderModule):
    """In place of a projection: NaN of shape ``[*input.shape[:-1], size]``.

    Args:
        name: Of the projection.
        calls: Of the model.
        size: Features of its output.
    """

    def __init__(self, name: str, calls: LayerInterceptor, size: int) -> None:
        super().__init__(name, calls)
        self._size = size

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return NaN for each row."""
        self._begin_call()
        x = next(_tensors(args, kwargs))
        return self._nan((*x.shape[:-1], self._size), x.device)


class PlaceholderNorm(PlaceholderModule):
    """In place of a norm: NaN of its input's shape."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return NaN for each element."""
        self._begin_call()
        x = next(_tensors(args, kwargs))
        return self._nan(tuple(x.shape), x.device, x.dtype)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    return (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


# --- which placeholder for which module ----------------------------------------------------------


def placeholders(
    module: nn.Module, name: str, calls: LayerInterceptor
) -> dict[str, PlaceholderModule]:
    """Return what must replace modules so that ``module`` has no parameters, by their names.

    Modules whose parameters all lie in submodules keep their own code.

    Args:
        module: Runs in front of the layers.
        name: Of it in the whole model.
        calls: Of the model.

    Raises:
        NotImplementedError: there is no placeholder for a module.
    """
    if not has_parameters(module):
        return {}
    if isinstance(module, nn.Embedding):
        return {
            name: PlaceholderEmbedding(name, calls, (module.num_embeddings, module.embedding_dim))
        }
    if isinstance(module, nn.Linear):
        return {name: PlaceholderLinear(name, calls, module.out_features)}
    base = getattr(module, "base_layer", None)  # of an adapter (peft)
    if isinstance(base, nn.Module):
        return {name: next(iter(placeholders(base, name, calls).values()))}
    own = dict(module.named_parameters(recurse=False))
    is_leaf = not any(has_parameters(child) for child in module.children())
    if (
        is_leaf
        and "norm" in type(module).__name__.lower()
        and all(p.ndim < 2 for p in own.values())
    ):
        return {name: PlaceholderNorm(name, calls)}
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
    """Refuse a module in front of the layers that no placeholder can replace.

    Raises:
        NotImplementedError: there is no placeholder for it or for a module inside of it.
    """
    placeholders(root.get_submodule(name), name, LayerInterceptor(()))
