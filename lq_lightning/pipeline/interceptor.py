"""Follow a user's step through the layers of a model of which a stage holds only some.

[Note: a step in parts]
The user's whole step runs on every stage. Modules before the layers that a stage does not hold are
replaced by placeholders, which return NaN in the right shape. Layers of earlier stages pass their
input on, and the last of them returns the received hidden state. Where the layer behind the last
one of the stage is called, :class:`StageEnd` leaves the user's code, and the output of the last
layer goes to the next stage, which runs the code between the two. So masks and positions are
computed by the user's own code on every stage, and any loss works. Other uses of skipped modules
are refused: see [Note: values that depend on placeholders].

All this happens around ``layer(...)``, outside of every hook of the layer. The layers of the stage
run as usual: their hooks (such as FSDP2's) have run when the step is left, and checkpointing, in
or around them, recomputes from the hidden state of its own micro-batch.

[Note: tensor-parallel ranks]
Each sends its own hidden state to the rank with the same number in the next stage: its share of the
tokens with sequence parallelism, else all of it. A DTensor travels as its local part, and is given
to the next layer placed as the hidden state in front of the layers, which is therefore the same for
all layers. Placeholders keep the hooks that torch's styles put on their modules, so that they give
the parts that the modules would give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from lq_lightning._compat.modes import without_step_mode
from lq_lightning._compat.tensor_parallel import full_like
from lq_lightning._compat.tensors import layout, local_tensor, placed
from lq_lightning.foundation.layer_stack import has_parameters, hidden_name

from .message import BoundaryMeta
from .placeholder_tracking import PlaceholderTracker
from .random_numbers import RandomNumbers

_KEEP = (
    "layers of a pipeline must keep its shape, and from the first on its dtype. Let stages end "
    "elsewhere (`split`), or use `quantized_fsdp`."
)
# What transformers collects from every layer by hooks, as arguments that it hands on to the layers.
COLLECTING = ("output_hidden_states", "output_attentions", "output_router_logits")


class StageEnd(BaseException):
    """Leaves the user's step where the next stage goes on. No error.

    A ``BaseException``, so that ``except Exception`` in the user's code lets it pass.
    """

    def __init__(self, hidden: Any) -> None:
        super().__init__()
        self.hidden = hidden


class LayerInterceptor:
    """Intercepts the calls of a model's layers in a step. See [Note: a step in parts].

    Layers, placeholders and stages of a model share one on a rank. ``layers`` are the names of all
    layers of the model, in the order of their calls, ``random`` the generators of its steps,
    ``tensor_size`` the number of tensor-parallel ranks, between which the first layer may divide
    tokens.
    """

    boundary: BoundaryMeta  # set before a stage runs

    def __init__(self, layers: tuple[str, ...]) -> None:
        self._layers = layers
        self.random = RandomNumbers()
        self.tensor_size = 1
        self._tracker: PlaceholderTracker | None = None
        self._output: Tensor | None = None  # of the last layer, this rank's part
        self._form: _Form | None = None  # of that output
        self._first = self._last = self._next = 0
        self.received: Tensor | None = None  # hidden state; None where there is none
        self._embedded: _Form | None = None  # of the hidden state in front of the layers
        self._extras: tuple[bool, ...] | None = None
        self._running = self._left = self._probing = self._needs_gradient = False
        self._changed: int | None = None  # the first layer with another hidden state in front

    # --- a part ---------------------------------------------------------------------------------

    def run(
        self,
        step: Callable[[], Any],
        span: tuple[int, int],
        received: Tensor | None,
        tracker: PlaceholderTracker | None = None,
    ) -> Any:
        """Run the part of the user's step that has the layers ``span[0]`` to ``span[1]``.

        Returns the hidden state behind the last of them; on the last stage the result of ``step``.
        ``received`` is the hidden state in front of the first, None on the first stage. ``tracker``
        finds uses of modules of earlier stages.
        """
        self._first, self._last, self._next = *span, 0
        self.received, self._tracker, self._changed = received, tracker, None
        self._needs_gradient = received is not None and received.requires_grad
        self._running, self._left = True, False
        try:
            with nullcontext() if tracker is None else tracker.watching():
                try:
                    result = step()
                except StageEnd as end:
                    return end.hidden
                self._check_completed()
                self.check(result, "what the step returns")
                return result
        except Exception as error:
            if tracker is not None and tracker.refused:
                raise NotImplementedError(tracker.refused[0]) from error
            raise
        finally:
            self.received = self._tracker = self._output = self._embedded = None
            self._running = False

    def check(self, value: object, use: str) -> None:
        """Refuse a value of the step that depends on a placeholder."""
        if self._tracker is not None:
            self._tracker.check(value, use)

    def given_by_placeholder(self, tensor: Tensor, module: str) -> Tensor:
        """Mark the output of the placeholder for ``module``, and return it."""
        if self._tracker is not None:
            self._tracker.mark(tensor, module)
        return tensor

    def probe(self, step: Callable[[], Any]) -> BoundaryMeta:
        """Run ``step`` through its first layer and describe the output; errors as :meth:`run`."""
        self._probing = True
        try:
            boundary: BoundaryMeta = self.run(step, (0, 0), None)
        finally:
            self._probing = False
        return boundary

    def _check_completed(self) -> None:
        name = self._layers[min(self._next, len(self._layers) - 1)]
        if self._left:
            raise RuntimeError(
                f"the step went on at `{name}`, where this stage ends: it must not catch "
                "`BaseException`."
            )
        if self._next < len(self._layers):
            raise RuntimeError(
                f"the step ended without calling `{name}`: in a pipeline, every step runs all "
                f"{len(self._layers)} layers once."
            )

    # --- calls of layers ------------------------------------------------------------------------

    def call_layer(
        self,
        index: int,
        argument: str,
        forward: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Handle the call of layer ``index`` of the model.

        The hidden state is the first positional argument, or else ``argument``. ``forward`` calls
        the layer; None if this rank does not hold it.
        """
        name = self._layers[index]
        if not self._running and forward is not None:
            with self.random.layer():  # recomputed for backward by checkpointing
                return forward(*args, **kwargs)
        self._check_call(index, kwargs)
        hidden = args[0] if args else kwargs.get(argument)
        if not isinstance(hidden, Tensor):
            raise NotImplementedError(
                f"`{name}` is called with {_kind(hidden)} as its first argument: the layers of a "
                "pipeline take one hidden state there, as a tensor."
            )
        self._next += 1
        if index == 0:
            self.random.compare()
            self._embedded = _Form.of(hidden)
        if index < self._first:
            self.random.pass_layer()
            return self._before_part(index, hidden)
        if index > self._last:
            self._left = True
            raise StageEnd(self._end(index))
        if index == self._first and self._needs_gradient and not hidden.requires_grad:
            raise NotImplementedError(
                f"`{name}` gets a hidden state without gradient: reentrant checkpointing around "
                "calls of layers cannot be cut into stages. Use "
                "`torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`."
            )
        if index != self._first and self._changed is None and not self._fits(hidden):
            self._changed = index
        if forward is None:
            raise AssertionError(f"{name} is on another stage")
        tracker = self._tracker
        if tracker is not None:
            self._check_arguments(name, hidden, argument, args, kwargs)
        unwatched = nullcontext() if tracker is None else tracker.paused()
        with without_step_mode(), self.random.layer(), unwatched:
            output = forward(*args, **kwargs)
        if self._probing:
            self._extras = _extras(name, output)
        if index == self._last:
            hidden = output[0] if isinstance(output, tuple) and output else output
            if isinstance(hidden, Tensor):
                self._form = _Form.of(hidden)
                local = hidden.to_local() if isinstance(hidden, DTensor) else hidden
                self._output = local.clone()  # code behind the layer may change it in place
        return output

    def call_before(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a module that has placeholders elsewhere, which draw no random numbers."""
        with self.random.layer():
            return forward(*args, **kwargs)

    def passed_layers(self) -> bool:
        """Whether the running step has called layers already."""
        return self._running and self._next > 0

    def _check_call(self, index: int, kwargs: Mapping[str, Any]) -> None:
        name = self._layers[index]
        if not self._running:
            raise RuntimeError(
                f"`{name}` is called outside of a training, validation, test or predict step. This "
                "rank has only some of the layers: run the model inside of a step."
            )
        for flag in COLLECTING:
            if kwargs.get(flag):
                raise NotImplementedError(
                    f"`{flag}={kwargs[flag]!r}` collects something from every layer, but a stage "
                    "has only its own: leave it out, or use `quantized_fsdp`."
                )
        if self._next == len(self._layers):
            raise RuntimeError(
                f"`{name}` is called a second time in one step. In a pipeline, a step runs the "
                "layers once; join several inputs into one batch."
            )
        if index != self._next:
            raise RuntimeError(
                f"`{name}` is called where `{self._layers[self._next]}` was expected. In a "
                "pipeline, every step runs all layers once and in order (no layer drop, no early "
                "exit)."
            )

    def _before_part(self, index: int, hidden: Tensor) -> Any:
        """Return the output of a layer of an earlier stage; for the last one, the received state.

        So the first layer of the stage gets the state as its argument, which checkpointing of that
        call keeps.
        """
        boundary, received = self.boundary, self.received
        if received is None:
            raise AssertionError("stages behind the first receive a hidden state")
        found = tuple(local_tensor(hidden).shape)
        if index in (0, self._first - 1) and (
            found != (boundary.shape if index else boundary.embedded_shape)
            or received.shape != boundary.shape
        ):
            raise RuntimeError(
                f"the stage of `{self._layers[self._first]}` received a hidden state of shape "
                f"{tuple(received.shape)}, but from the same batch the code in front of "
                f"`{self._layers[index]}`, with placeholders for the modules that this rank lacks, "
                f"gives one of {found}. Its shape must depend on those of the batch only: use "
                "`quantized_fsdp`."
            )
        if index == self._first - 1:
            hidden = placed(received, hidden, layout(hidden))
        elif index == 0:  # not the tensor in front of it, which may be of the batch
            absent = self._nan(index, boundary.shape, hidden.device)
            hidden = placed(absent, hidden, layout(hidden))
        extras = boundary.extras
        if extras is None:
            return hidden
        nan = [self._nan(index, (), hidden.device) if extra else None for extra in extras]
        return (hidden, *nan)

    def _nan(self, index: int, shape: Sequence[int], device: torch.device) -> Tensor:
        nan = torch.full(tuple(shape), math.nan, dtype=self.boundary.dtype, device=device)
        return self.given_by_placeholder(nan, self._layers[index])

    def _check_arguments(
        self,
        name: str,
        hidden: Tensor,
        argument: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.check(hidden, f"the hidden state in front of `{name}`")
        others = {f"argument {place + 2}": value for place, value in enumerate(args[1:])}
        others |= {f"`{key}`": value for key, value in kwargs.items() if args or key != argument}
        for place, value in others.items():
            self.check(value, f"`{name}` takes {place} besides the hidden state, which")

    def _fits(self, hidden: Tensor) -> bool:
        known = self.boundary.shape, self.boundary.dtype
        return (tuple(local_tensor(hidden).shape), hidden.dtype) == known

    def _end(self, index: int) -> Any:
        hidden, form, embedded = self._output, self._form, self._embedded
        if hidden is None or form is None or embedded is None:
            raise AssertionError(f"`{self._layers[index - 1]}` has not run")
        if form.placements != embedded.placements or form.is_partial:
            raise NotImplementedError(
                f"behind `{self._layers[index - 1]}` the hidden state is placed as "
                f"{form.placements}, but in front of the layers as {embedded.placements} (None: no "
                "DTensor). Both must be the same, and no sum that is still to be taken: set the "
                "output layouts of the tensor-parallel plan."
            )
        if self._probing:
            return self._probed(form, embedded)
        if not self._fits(hidden):
            boundary, last = self.boundary, (self._changed or index) - 1
            raise NotImplementedError(
                f"behind `{self._layers[last]}` the hidden state changes: in front of "
                f"`{self._layers[index]}`, where a stage ends, it has shape {tuple(hidden.shape)} "
                f"and {hidden.dtype}, but behind the first layer it has {boundary.shape} and "
                f"{boundary.dtype}: {_KEEP}"
            )
        return hidden

    def _probed(self, hidden: _Form, embedded: _Form) -> BoundaryMeta:
        before = embedded.shape
        allowed = [before]
        if len(before) > 2 and hidden.placements is None:
            allowed.append((before[0], before[1] // self.tensor_size, *before[2:]))
        if hidden.shape not in allowed:  # before anything is sent
            raise NotImplementedError(
                f"behind `{self._layers[0]}` the hidden state has shape {hidden.shape}, but in "
                f"front of it {before}: {_KEEP}"
            )
        return BoundaryMeta(
            shape=hidden.shape,
            dtype=hidden.dtype,
            embedded_shape=before,
            embedded_dtype=embedded.dtype,
            extras=self._extras,
        )


class _Form(NamedTuple):
    """What is known of a hidden state without its values; the shape is that of this rank's part."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Placement, ...] | None  # of a DTensor

    @classmethod
    def of(cls, hidden: Tensor) -> _Form:
        shape = tuple(local_tensor(hidden).shape)
        return cls(shape, hidden.dtype, getattr(hidden, "placements", None))

    @property
    def is_partial(self) -> bool:
        return any(placement.is_partial() for placement in self.placements or ())


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a `{type(value).__name__}`"


def _extras(name: str, output: Any) -> tuple[bool, ...] | None:
    if isinstance(output, Tensor):
        return None
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        return tuple(isinstance(extra, Tensor) for extra in output[1:])
    raise NotImplementedError(
        f"`{name}` returns {_kind(output)}: the layers of a pipeline return a hidden state as a "
        "tensor, or a tuple that starts with it. Use `quantized_fsdp`."
    )


# --- placeholders -------------------------------------------------------------------------------


class _Settings:
    """Settings of a module inside a layer of another stage; models read them from layer 0."""

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
    """Stands for the module ``name`` of the whole model; it has no parameters."""

    may_draw = False  # whether the module may draw random numbers, from a seed of its own

    def __init__(self, name: str, calls: LayerInterceptor) -> None:
        super().__init__()
        self.absent_name = name
        # In a list, so that it is neither copied with nor seen as part of the module.
        self._calls = [calls]

    @property
    def calls(self) -> LayerInterceptor:
        """Return the interceptor of the model's layers."""
        return self._calls[0]

    def extra_repr(self) -> str:
        """Show the name."""
        return self.absent_name

    def __getattr__(self, name: str) -> Any:
        """Raise ``AttributeError`` with an explanation: parameters and submodules are elsewhere."""
        raise AttributeError(_missing(self.__dict__.get("absent_name", "?"), name))

    def _nan(
        self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        nan = full_like(like, shape, math.nan, dtype or self.calls.boundary.embedded_dtype)
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
        shape: Function from the shape of the input to the shape of the output.
        keeps_dtype: Whether the output has the dtype of the input, not of the hidden state.
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
        received = self.calls.received
        if received is None or self._weight is None or self.calls.passed_layers():
            raise AttributeError  # which `__getattr__` explains
        return self._nan((1, 1), received).expand(self._weight)

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
        return self._nan(self._shape(x.shape), x, x.dtype if self._keeps_dtype else None)


def placeholders(
    module: nn.Module, name: str, calls: LayerInterceptor
) -> dict[str, PlaceholderModule]:
    """Return placeholders, by name, without whose originals ``module`` has no parameters.

    ``module`` is called ``name`` in the whole model and runs before the layers. Modules whose
    parameters all lie in submodules keep their own code.

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
