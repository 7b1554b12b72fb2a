"""Logits of a tensor-parallel head, which stay sharded along the vocabulary until something asks.

The user's step and the losses inside of models are written for whole logits. ``ShardedLogits`` has
their shape. It keeps reshapes, casts and ``cross_entropy`` on each rank's part of the vocabulary,
and gathers the whole for any other function: right, with more memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Answered by a tensor of the whole shape, which needs no values.
_PROPERTIES = frozenset(
    (
        *("shape", "dtype", "device", "ndim", "layout", "itemsize", "nbytes", "names"),
        *("requires_grad", "is_leaf", "grad_fn", "output_nr", "is_cuda", "is_cpu", "is_meta"),
        *("is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "is_xla"),
        *("_version", "_is_view", "_backward_hooks", "_base"),
    )
)
_QUESTIONS = frozenset(
    (
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point"),
        *("is_complex", "get_device", "__len__", "__hash__", "is_inference", "is_same_size"),
    )
)
_MEMORY = frozenset(
    (
        *("data_ptr", "storage", "untyped_storage", "retain_grad", "__dlpack__", "set_"),
        *("__cuda_array_interface__", "_typed_storage"),
    )
)
_ELEMENTWISE = frozenset(
    (
        *("float", "half", "bfloat16", "double", "to", "type", "contiguous", "clone", "detach"),
        *("mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "true_divide", "divide"),
        *("add", "__add__", "__radd__", "sub", "__sub__", "neg", "__neg__", "tanh"),
    )
)
_RESHAPING = frozenset(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"))
_PERMUTING = frozenset(("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis"))


class ShardedLogits(Tensor):
    """Whole logits for all who ask; their values are in ``local``.

    The tensor itself has one NaN for all of its elements, so code that goes around torch's Python
    functions cannot take it for logits.

    Attributes:
        local: This rank's part, with the graph that leads to it.
        vocabulary_dim: Dimension along which ``local`` is a part.
        group: The tensor-parallel ranks, in the order of their parts, which are equally long.
    """

    local: Tensor
    vocabulary_dim: int
    group: dist.ProcessGroup

    @classmethod
    def wrap(cls, local: Tensor, group: dist.ProcessGroup, dim: int = -1) -> ShardedLogits:
        """Make logits of every rank's ``local``, sharded along ``dim``."""
        dim %= local.dim()
        empty: Tensor = _Whole.apply(local, group, dim)  # type: ignore[no-untyped-call]
        logits = empty.as_subclass(cls)
        logits.local, logits.vocabulary_dim, logits.group = local, dim, group
        return logits

    def full_tensor(self) -> Tensor:
        """Gather a plain tensor of the whole vocabulary; all ranks of the group together."""
        parts = self.local, self.group, self.vocabulary_dim
        full: Tensor = _Gathered.apply(*parts)  # type: ignore[no-untyped-call]
        return full

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Say what it is without a collective, since one rank alone may print."""
        return f"ShardedLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch on the parts, or on whole logits."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _QUESTIONS or (name == "__get__" and attribute in _PROPERTIES):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if name in _MEMORY or attribute in _MEMORY:
            raise _refused(f"`{attribute or name}` of logits", "has no memory of its own")
        if _writes(name, kwargs):
            raise _refused(f"`{name}`, which writes into logits,", "has no memory of its own")
        if func is F.cross_entropy and isinstance(args[0] if args else None, ShardedLogits):
            done = _cross_entropy(*args, **kwargs)
        else:
            logits = args[0] if args and isinstance(args[0], ShardedLogits) else None
            done = None if logits is None else _on_part(logits, func, name, args[1:], kwargs)
        if done is not None:
            return done
        return func(*_full(args), **_full(kwargs))


def _full(value: Any) -> Any:
    if isinstance(value, ShardedLogits):
        return value.full_tensor()
    if type(value) in (list, tuple):
        return type(value)(_full(item) for item in value)
    if type(value) is dict:
        return {key: _full(item) for key, item in value.items()}
    return value


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    if kwargs.get("out") is not None or name in ("__setitem__", "__set__"):
        return True
    if name.endswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__int__", "__index__")
    return name.endswith("_") and name != "requires_grad_"


def _refused(what: str, why: str) -> NotImplementedError:
    return NotImplementedError(
        f"{what} cannot work on logits that are sharded over tensor-parallel ranks: the tensor "
        f"{why}. Take `logits = logits.full_tensor()` on all ranks first."
    )


def _on_part(
    logits: ShardedLogits,
    func: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a function on this rank's part; None if it needs the whole."""
    if name == "register_hook":
        return _hook(logits, args[0])
    local, dim, group = logits.local, logits.vocabulary_dim, logits.group
    if name in ("stride", "is_contiguous"):
        return func(_shape_only(logits), *args, **kwargs)
    if name == "__getitem__":
        index = _rows(logits, args[0])
        return None if index is None else ShardedLogits.wrap(local[index], group)
    if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        return None
    if name in _ELEMENTWISE:
        result = func(local, *args, **kwargs)
        same = isinstance(result, Tensor) and result.device == local.device
        return ShardedLogits.wrap(result, group, dim) if same else None
    if name in _PERMUTING:  # strides of this tensor tell its dimensions apart
        probe = torch.empty((2,) * local.dim(), device="meta")
        moved = func(probe, *args, **kwargs).stride().index(probe.stride(dim))
        return ShardedLogits.wrap(func(local, *args, **kwargs), group, moved)
    if name in _RESHAPING and dim == local.dim() - 1:
        shape = func(_shape_only(logits), *args, **kwargs)
        if shape.dtype == logits.dtype and shape.dim() and shape.shape[-1] == logits.shape[-1]:
            return ShardedLogits.wrap(local.reshape(*shape.shape[:-1], local.shape[-1]), group)
    return None


def _shape_only(logits: ShardedLogits) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device="meta")


def _hook(logits: ShardedLogits, hook: Callable[[Tensor], Tensor | None]) -> Any:
    group, dim = logits.group, logits.vocabulary_dim

    def on_part(gradient: Tensor) -> Tensor | None:
        changed = hook(ShardedLogits.wrap(gradient, group, dim))
        if changed is None:
            return None
        return changed.local if isinstance(changed, ShardedLogits) else _part(changed, group, dim)

    return logits.local.register_hook(on_part)  # type: ignore[no-untyped-call]


def _rows(logits: ShardedLogits, index: Any) -> tuple[Any, ...] | None:
    """An index that takes whole rows of the vocabulary, for a part; None for any other."""
    items = index if isinstance(index, tuple) else (index,)
    taken = 0
    for item in items:
        if isinstance(item, Tensor):
            if isinstance(item, ShardedLogits) or not item.dim():
                return None
            taken += item.dim() if item.dtype in (torch.bool, torch.uint8) else 1
        elif isinstance(item, slice) or type(item) is int:
            taken += 1
        elif item is not None and item is not Ellipsis:
            return None
    places = [place for place, item in enumerate(items) if item is Ellipsis]
    at = places[0] if places else len(items)
    left = (slice(None),) * (logits.dim() - taken)
    whole = (*items[:at], *left, *items[at + 1 :])
    last = logits.vocabulary_dim == logits.dim() - 1
    return whole if last and isinstance(whole[-1], slice) and whole[-1] == slice(None) else None


def _part(full: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    return full.chunk(group.size(), dim)[group.rank()]


class _Whole(torch.autograd.Function):
    """A tensor of the whole shape; a gradient of whole logits, equal on all ranks, comes back."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        shape = list(local.shape)
        shape[dim] *= group.size()
        nan = torch.full((), float("nan"), dtype=local.dtype, device=local.device)
        return nan.expand(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _part(gradient, ctx.group, ctx.dim), None, None


class _Gathered(torch.autograd.Function):
    """All parts, in order; all ranks compute the same with them."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        parts = [
            torch.empty_like(local, memory_format=torch.contiguous_format)
            for _ in range(group.size())
        ]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _part(gradient, ctx.group, ctx.dim), None, None


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """``F.cross_entropy`` of sharded logits; None for what only torch's own can do."""
    logits: Any = input
    legacy = size_average is not None or reduce is not None or reduction not in _REDUCTIONS
    shape = [size for dim, size in enumerate(logits.shape) if dim != logits.vocabulary_dim]
    classes_last = logits.vocabulary_dim == (1 if logits.dim() > 1 else 0)
    others = (target, weight)
    if (
        legacy
        or not classes_last
        or list(target.shape) != shape
        or target.is_floating_point()
        or not 0 <= label_smoothing <= 1
        or any(isinstance(other, ShardedLogits) for other in others)
        or (weight is not None and (weight.requires_grad or weight.numel() != logits.shape[1]))
    ):
        return None
    local = logits.local.movedim(logits.vocabulary_dim, -1)
    autocast = torch.is_autocast_enabled(local.device.type)
    dtype = torch.float32 if autocast and local.dtype.itemsize < 4 else local.dtype
    losses: Tensor = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        local, target, weight, ignore_index, label_smoothing, logits.group
    ).to(dtype)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    counted = target != ignore_index
    if weight is None:
        return losses.sum() / counted.sum()
    return losses.sum() / (weight[target.where(counted, 0)] * counted).sum()


_REDUCTIONS = ("none", "sum", "mean")


class _TokenLosses(torch.autograd.Function):
    """Loss of each token from every rank's part of its logits, in fp32 or fp64.

    With ``p`` the probabilities, ``w`` the weights and ``e`` the smoothing of target ``t``, the
    loss is ``(1 - e) w[t] (-log p[t]) + e / V sum_c w[c] (-log p[c])``. Two all-reduces of one
    and up to three numbers per token; backward needs none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        size = local.shape[-1]
        x = local if local.dtype == torch.float64 else local.float()
        counted = target != ignore_index
        offset = target - group.rank() * size
        own = counted & (offset >= 0) & (offset < size)
        offset = offset.where(own, 0)
        most = x.amax(-1)
        dist.all_reduce(most, dist.ReduceOp.MAX, group)
        chosen = x.gather(-1, offset.unsqueeze(-1)).squeeze(-1)
        sums = torch.stack((torch.exp(x - most.unsqueeze(-1)).sum(-1), chosen.where(own, 0)))
        weights = None if weight is None else weight.to(x.dtype)
        part = None if weights is None else _part(weights, group, 0)
        if smoothing:
            spread = x.sum(-1) if part is None else (x * part).sum(-1)
            sums = torch.cat((sums, spread.unsqueeze(0)))
        dist.all_reduce(sums, group=group)
        logsumexp = sums[0].log() + most
        losses = logsumexp - sums[1]
        scale = None if weights is None else weights[target.where(counted, 0)]
        total = size * group.size() if weights is None else weights.sum()
        if scale is not None:
            losses = losses * scale
        if smoothing:
            smooth = (total * logsumexp - sums[2]) / (size * group.size())
            losses = (1 - smoothing) * losses + smoothing * smooth
        known = (target >= 0) & (target < size * group.size())
        losses = losses.where(known, float("nan")).where(counted, 0)
        ctx.save_for_backward(local, logsumexp, offset, own, counted, scale, part)
        ctx.smoothing, ctx.total, ctx.vocabulary = smoothing, total, size * group.size()
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        local, logsumexp, offset, own, counted, scale, part = ctx.saved_tensors
        x = local if local.dtype == torch.float64 else local.float()
        gradient = gradient.where(counted, 0)
        hit = gradient * (1 - ctx.smoothing)
        hit = hit if scale is None else hit * scale
        shared = hit
        smooth = ctx.smoothing / ctx.vocabulary
        if ctx.smoothing:
            shared = hit + gradient * smooth * ctx.total
        result = torch.exp(x - logsumexp.unsqueeze(-1)).mul_(shared.unsqueeze(-1))
        result.scatter_add_(-1, offset.unsqueeze(-1), -hit.where(own, 0).unsqueeze(-1))
        if ctx.smoothing:
            each = (gradient * smooth).unsqueeze(-1)
            result -= each if part is None else each * part
        return result.to(local.dtype), None, None, None, None, None
