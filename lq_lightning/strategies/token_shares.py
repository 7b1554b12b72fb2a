"""Shares of the tokens between the layers of a model that tensor-parallel ranks split.

The first layer's input is cut along tokens, norms run on shares, attention and MLP gather their
input and scatter their output, and the last norm's output is gathered, so that what lies outside of
the layers (masks, positions, head) sees all tokens. Gradients of the norms, which are partial sums
then, are DTensors that say so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.func import functional_call

from lq_lightning._compat.tensor_parallel import skeleton
from lq_lightning._compat.torch import backward_id

# Hugging Face's names of styles for linear layers: what is split, and what stays whole.
COLUMNS, ROWS = "colwise", "rowwise"
COLUMNS_GATHERED = ("colwise_gather_output", "colwise_rep")
ROWS_OF_WHOLE = ("rowwise_split_input", "rowwise_rep")
LAYER_NUMBER = re.compile(r"(?:(.*?)\.)?\d+\.")  # of the list's name and the number


class SplitLayers(NamedTuple):
    """Where the layers of a model lie, for work on shares of the tokens."""

    base: nn.Module
    cut: bool  # layers are missing: on other stages of a pipeline
    first: nn.Module | None
    norms: list[nn.Module]
    last_norm: nn.Module | None
    regions: list[tuple[nn.Module, bool]]  # attention and MLP; whether split layers alone read


def _is_norm(module: nn.Module) -> bool:
    own = list(module.parameters())
    small = all(p.dim() == 1 for p in own) and not list(module.children())
    return "norm" in type(module).__name__.lower() and small


def find_layers(model: nn.Module, styles: Mapping[str, object]) -> SplitLayers | str:
    """Find where tokens can be split, or say why they cannot."""
    found = map(LAYER_NUMBER.match, styles)
    prefixes = {match.group(1) for match in found if match}
    if len(prefixes) != 1 or None in prefixes:
        return "its layers are not in one list"
    prefix = prefixes.pop()
    container, base = model.get_submodule(prefix), model.get_submodule(prefix.rpartition(".")[0])
    layers = {n: m for n, m in container.named_children() if next(m.parameters(), None) is not None}
    norms: list[nn.Module] = []
    regions: list[tuple[nn.Module, bool]] = []
    for number, layer in layers.items():
        if list(layer.parameters(recurse=False)):
            return f"`{type(layer).__name__}` has parameters of its own"
        for name, child in layer.named_children():
            path = f"{prefix}.{number}.{name}"
            inside = {n: s for n, s in styles.items() if n.startswith(f"{path}.")}
            if styles.get(path) in (COLUMNS, *COLUMNS_GATHERED):
                regions.append((child, True))
            elif styles.get(path) in (ROWS, *ROWS_OF_WHOLE):
                pass
            elif _is_norm(child):
                norms.append(child)
            elif set(inside.values()) & {ROWS, *ROWS_OF_WHOLE}:
                known = {id(p) for n in inside for p in model.get_submodule(n).parameters()}
                split = all(id(p) in known for p in child.parameters())
                gathered = set(inside.values()) & set(COLUMNS_GATHERED)
                regions.append((child, split and not gathered))
            elif next(child.parameters(), None) is not None:
                return f"`{path}` is not in the plan"
    last = [m for m in base.children() if _is_norm(m)]
    absent = len(layers) < len(list(container.children()))
    if len(last) != 1 and not (absent and not last):
        return f"`{type(base).__name__}` has {len(last)} norms beside its layers, not one"
    last_norm = last[0] if last else None
    return SplitLayers(base, absent, layers.get("0"), norms, last_norm, regions)


def whole(output: DTensor) -> Tensor:
    """Give all of a module's output to every rank."""
    return output.redistribute(placements=[Replicate()]).to_local()


class Proof:
    """Compares a layer's output with that of the whole layer, until its update is not too small.

    Forwards that count on the whole's sizes (``self.num_heads``), and plans that forget a layer,
    often fit the parts all the same and compute something else.
    """

    def __init__(self, layer: nn.Module, mesh: DeviceMesh) -> None:
        self._whole, self._mesh = skeleton(layer).eval(), mesh
        self._done, self._calls = False, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Proof:
        """Serve copies of the model as well: its mesh cannot be copied."""
        return self

    @torch.no_grad()
    def __call__(
        self,
        layer: nn.Module,
        args: Any,
        kwargs: Any,
        share: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Run both, without dropout; ``share`` cuts tokens where the layer works on its own."""
        if self._done or torch.compiler.is_compiling():
            return
        self._calls += 1
        if self._calls & (self._calls - 1):  # 1, 2, 4, 8, ...: layers may begin as the identity
            return
        args = tuple(map(_stateless, args))  # caches of keys would grow
        kwargs = {name: _stateless(value) for name, value in kwargs.items()}
        key, x = _hidden(args, kwargs)
        expected = _first(functional_call(self._whole, _whole_tensors(layer), args, kwargs))
        training = [m for m in layer.modules() if m.training]
        try:
            layer.eval()
            given, named = _with_hidden(args, kwargs, key, share(x) if share else x)
            found = _first(type(layer).forward(layer, *given, **named))
        finally:
            for module in training:
                module.training = True
        if share and found.shape != expected.shape:
            expected = share(expected)
        x = share(x) if share and found.shape != x.shape else x
        alike = found.shape == expected.shape
        update = expected - x if expected.shape == x.shape else expected
        wrong = found - expected if alike else update
        sums = torch.stack([part.float().square().sum() for part in (wrong, update, x)])
        dist.all_reduce(sums, group=self._mesh.get_group())  # all raise, or none
        error, size, before = sums.sqrt().tolist()
        eps = torch.finfo(found.dtype).eps
        limit = 0.03 if eps > 1e-4 or torch.is_autocast_enabled(x.device.type) else 0.005
        if any("forward" in vars(m) for m in layer.modules() if m is not layer):
            limit = 0.15  # of another's, perhaps with products in FP8
        if error > limit * size + eps / 4 * before:
            raise NotImplementedError(
                f"`{type(layer).__name__}` computes something else when it is split by the plan: "
                f"its update of the hidden states differs by {error / (size or error):.0%}. Either "
                "the plan lacks a linear layer beside one that it names, or `forward` counts on "
                "sizes of the whole (write `view(B, T, -1, head_size)`, not "
                "`view(B, T, num_heads, -1)`), or it mixes tokens outside of attention and MLP. "
                "Change these, or call "
                "`parallelize_module` in `configure_model` and leave `tensor_parallel` out."
            )
        self._done = limit * size > eps / 4 * before


def _whole_tensors(layer: nn.Module) -> dict[str, Tensor]:
    parameters = layer.named_parameters(remove_duplicate=False)
    named = (*parameters, *layer.named_buffers(remove_duplicate=False))
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in named}


def _first(output: Any) -> Tensor:
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first


class TokenShares:
    """Splits the tokens of one model between its layers, in calls where the ranks divide them.

    Attributes:
        split: Whether the current forward works on shares. Always, if the model lacks its first
            layer or others (a pipeline), as other stages cannot know.
    """

    def __init__(self, mesh: DeviceMesh, layers: SplitLayers) -> None:
        self._mesh = mesh
        self._proof = layers.first and Proof(layers.first, mesh)
        self._cut = layers.cut or layers.first is None or layers.last_norm is None
        self._all_asked = False
        self._layers_ran = layers.first is None  # which the last norm follows
        self.split = self._cut
        # By number of tokens in a layer: whether they were shares, in forwards before a backward
        self._past: dict[int, set[bool]] = {}
        self._backward_began = False

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenShares:
        """Serve copies of the model, too."""
        return self

    def install(self, found: SplitLayers) -> None:
        """Register the hooks; those of ``SequenceParallel`` run between two of ours."""
        if found.last_norm is not None:
            found.last_norm.register_forward_pre_hook(self._check_order)
        for norm in (*found.norms, *filter(None, (found.last_norm,))):
            norm.register_forward_pre_hook(self._to_norm)
            parallelize_module(norm, self._mesh, SequenceParallel(), src_data_rank=None)
            norm.register_forward_hook(
                self._out_of_norm if norm is not found.last_norm else self._last
            )
        for region, split_only in found.regions:
            region.register_forward_pre_hook(
                self._gather if split_only else self._gather_plain, prepend=True, with_kwargs=True
            )
        if found.first is not None:
            found.first.register_forward_pre_hook(self._scatter, with_kwargs=True)
        found.base.register_forward_pre_hook(self._note_outputs, with_kwargs=True)

    @property
    def _placement(self) -> Placement:
        return Shard(1) if self.split else Replicate()

    def rows(self, output: DTensor) -> Tensor:
        """Sum the parts of a row-wise layer's output, for this rank's tokens."""
        return output.redistribute(placements=[self._placement]).to_local()

    def _check_order(self, norm: nn.Module, args: Any) -> None:
        """Refuse a norm in front of the layers: behind them nothing would gather the tokens."""
        if not self._layers_ran:
            raise NotImplementedError(
                f"`{type(norm).__name__}`, the only norm beside the layers, runs in front of them. "
                '`tensor_parallel="auto"` splits the tokens between layers and gathers them in a '
                "norm behind the last one. Add one there, or call `parallelize_module` in "
                "`configure_model` and leave `tensor_parallel` out."
            )

    def _to_norm(self, norm: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """Tell ``SequenceParallel``, which then cuts whole tokens, what this rank has."""
        self._recall(norm, args[0])
        x = DTensor.from_local(args[0], self._mesh, [self._placement], run_check=False)
        return (x, *args[1:])

    def _out_of_norm(self, norm: nn.Module, args: Any, output: DTensor) -> Tensor:
        return output.redistribute(placements=[self._placement]).to_local()

    def _last(self, norm: nn.Module, args: Any, output: DTensor) -> Tensor:
        return whole(output)

    def _gather(self, region: nn.Module, args: Any, kwargs: Any) -> Any:
        """Give all tokens as a DTensor, so that layers that read it share a reduce-scatter."""
        key, x = _hidden(args, kwargs)
        self._recall(region, x)
        if not self.split:
            return None
        x = DTensor.from_local(x, self._mesh, [Shard(1)], run_check=False)
        return _with_hidden(args, kwargs, key, x.redistribute(placements=[Replicate()]))

    def _gather_plain(self, region: nn.Module, args: Any, kwargs: Any) -> Any:
        """Give all tokens to code that computes with them itself, alike on all ranks."""
        gathered = self._gather(region, args, kwargs)
        if gathered is None:
            return None
        args, kwargs = gathered
        key, x = _hidden(args, kwargs)
        return _with_hidden(args, kwargs, key, x.to_local())  # type: ignore[attr-defined]

    def _scatter(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Decide for this forward, and cut the tokens."""
        self._layers_ran = True
        key, x = _hidden(args, kwargs)
        ranks = self._mesh.size()
        self.split = x.dim() == 3 and x.shape[1] % ranks == 0 and not self._all_asked
        if not self.split and self._cut:
            raise ValueError(
                f"a pipeline whose stages split tokens over {ranks} tensor-parallel ranks got "
                f"hidden states of shape {tuple(x.shape)}. Pad batches so that the number of "
                f"tokens is a multiple of {ranks}, and ask for no `output_hidden_states`."
            )
        if self._proof:
            self._proof(layer, args, kwargs, self._share if self.split else None)
        return _with_hidden(args, kwargs, key, self._share(x)) if self.split else None

    def _recall(self, module: nn.Module, x: Tensor) -> None:
        """Split in a checkpoint as in its forward, which may not have been the last one."""
        if self._cut or torch.compiler.is_compiling():
            return
        tokens = x.shape[-2]
        if backward_id() < 0:
            if self._backward_began:
                self._past, self._backward_began = {}, False
            self._past.setdefault(tokens, set()).add(self.split)
            return
        self._backward_began = True
        kinds = self._past.get(tokens, {self.split})
        if len(kinds) > 1:
            raise NotImplementedError(
                f"one backward calls `{type(module).__name__}` again for {tokens} tokens that are "
                f"all and for {tokens} that are a share: pad batches of a checkpointed model so "
                f"that their tokens are a multiple of {self._mesh.size()}."
            )
        (self.split,) = kinds

    def _share(self, x: Tensor) -> Tensor:
        every = DTensor.from_local(x, self._mesh, [Replicate()], run_check=False)
        return every.redistribute(placements=[Shard(1)]).to_local()

    def _note_outputs(self, base: nn.Module, args: Any, kwargs: Any) -> None:
        """Leave tokens whole where hidden states of layers are asked for."""
        config = getattr(base, "config", None)
        asked = {}
        for name in ("output_hidden_states", "output_attentions"):
            value = kwargs.get(name)
            asked[name] = getattr(config, name, False) if value is None else value
        self._all_asked = bool(asked["output_hidden_states"])
        if asked["output_attentions"]:
            raise NotImplementedError(
                "`output_attentions` would give this rank's heads only with tensor parallelism."
            )


def _stateless(value: Any) -> Any:
    kept = (Tensor, bool, int, float, str, tuple, list, dict)
    return value if isinstance(value, kept) else None


def _hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Tensor]:
    """Place and value of the hidden states: by their usual name, or the first of real numbers."""
    if "hidden_states" in kwargs:
        return "hidden_states", kwargs["hidden_states"]
    for key, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Tensor) and value.is_floating_point():
            return key, value
    raise TypeError("a layer was called without a floating-point tensor to split")


def _with_hidden(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], key: Any, x: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(key, int):
        return (*args[:key], x, *args[key + 1 :]), dict(kwargs)
    return args, {**kwargs, key: x}
