"""Sites below torch's tensor parallelism: what they compute of shards, and codes that ranks share.

DTensors lie on a mesh of one axis here. A site computes with the local tensors of a layer's
operands, in one of the ways whose placements, of the output and of all gradients, are known to be
right; any other stays with torch. The input of a layer whose weight is sharded by columns is the
same on all ranks. Each keeps the code of its own tokens only, and backward gathers the codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from typing_extensions import override

from lq_lightning._compat.layouts import (
    LayoutHook,
    gather_tensors,
    layout_hooks,
    local_of,
    replace_hook,
    restore_hooks,
)
from lq_lightning.kernels.float8 import float8_cast

from .functions import linear
from .policy import Matmul
from .sources import (
    ALONE,
    MARK,
    ORIGIN,
    PART,
    Codes,
    Shared,
    Source,
    Tensors,
    as_matrix,
    encode_source,
    observers,
    relay,
    source_of,
)


class Layout(NamedTuple):
    """Placements of what local tensors make: the output, and gradients that lie otherwise than
    their tensors.
    """

    output: Placement
    x: Placement | None = None
    weight: Placement | None = None
    bias: Placement | None = None
    adds_bias_once: bool = False

    @property
    def shares_input(self) -> bool:
        """Whether all ranks have the same input, and other parts of the weight."""
        return self.x is not None


_COLUMNS = Layout(Shard(-1), x=Partial())
_ROWS = Layout(Partial(), adds_bias_once=True)
_WHOLE = Layout(Replicate())


def _placement(x: Tensor) -> Placement | None:
    """Placement of a DTensor on a mesh of one axis that divides what it shards; else None."""
    if not isinstance(x, DTensor) or x.device_mesh.ndim != 1:
        return None
    placement = x.placements[0]
    if placement == Replicate():
        return placement
    for dim in range(x.dim()):
        if placement == Shard(dim):
            return placement if x.shape[dim] % x.device_mesh.size() == 0 else None
    return None


def _on_one_mesh(x: Any, *others: Tensor | None) -> bool:
    return all(o is None or getattr(o, "device_mesh", None) == x.device_mesh for o in others)


def _by_tokens(placement: Placement, x: Tensor) -> Layout | None:
    """Layout where each rank computes with whole parameters on its own tokens."""
    if placement == Shard(x.dim() - 1):
        return None
    return Layout(placement, weight=Partial(), bias=Partial())


def product_layout(x: Any, weight: Any, bias: Any, transposed: bool) -> Layout | None:
    """Layout of a linear layer of DTensors, None if unknown; ``weight`` may be transposed."""
    placed, wanted = _placement(x), _placement(weight)
    if placed is None or wanted is None or not _on_one_mesh(x, weight, bias):
        return None
    of_bias = Replicate() if bias is None else _placement(bias)
    whole = bias is None or of_bias == Replicate()
    columns = Shard(1 if transposed else 0)
    if wanted == Replicate() and whole:
        return _WHOLE if placed == wanted else _by_tokens(placed, x)
    if wanted == columns:
        fits = bias is None or of_bias == Shard(0)
        return _COLUMNS if fits and placed == Replicate() else None
    return _ROWS if whole and placed == Shard(x.dim() - 1) else None


def norm_layout(x: Any, weight: Any, bias: Any) -> Layout | None:
    """Layout of a normalization of the last dimension of a DTensor; None if unknown."""
    placed = _placement(x)
    parameters = [p for p in (weight, bias) if p is not None]
    if placed is None or not _on_one_mesh(x, *parameters):
        return None
    if any(_placement(p) != Replicate() for p in parameters):
        return None
    return _WHOLE if placed == Replicate() else _by_tokens(placed, x)


def has_layout(layer: str, tensors: dict[str, tuple[Tensor, DeviceMesh, list[Placement]]]) -> bool:
    """Return whether a site computes with parameters, by name, that lie so while they are used.

    ``layer`` is ``"norm"``, ``"linear"``, or ``"transposed"`` if the weight is ``[K, O]``.
    """
    shards = []
    for p, mesh, placements in tensors.values():
        dim = _dim(placements[0], p)
        if mesh.ndim != 1 or (dim is None and placements[0] != Replicate()):
            return False
        if dim is not None and p.shape[dim] % mesh.size():
            return False
        shards.append(dim)
    if layer == "norm":
        return shards in ([None], [None, None])
    columns = 1 if layer == "transposed" else 0
    weight, *bias = shards if "weight" in tensors else [None, 0]
    return bias in ([], [0 if weight == columns else None])


def local(x: Any, gradient: Placement | None = None) -> Any:
    """The local tensor of a DTensor, whose gradient is placed as ``gradient`` or as ``x`` is."""
    return local_of(x, gradient) if isinstance(x, DTensor) else x


def as_placed(y: Tensor, x: DTensor, placement: Placement) -> Tensor:
    """The DTensor of local results, on the mesh of ``x``."""
    made = DTensor.from_local(y, x.device_mesh, (placement,), run_check=False)
    if source_of(y) is not None:
        carry(y, made, x.device_mesh, placement, None)
    return made


def linear_of_shards(
    x: DTensor,
    weight: Any,
    bias: Any,
    transposed: bool,
    layout: Layout,
    source: Source | None,
    matmul: Matmul,
) -> Tensor:
    """Apply a linear layer to DTensors; ``source`` is that of the local input."""
    values, added = local(weight, layout.weight), local(bias, layout.bias)
    if added is not None and layout.adds_bias_once and x.device_mesh.get_local_rank() > 0:
        added = added - added.detach()  # zeros, with the gradient that all ranks have
    values = values.t() if transposed else values
    y = linear(local(x, layout.x), values, added, source, matmul)
    if source is not None:
        for each in observers():
            each.reader(x, y, 1 if layout.weight or layout == _WHOLE else x.device_mesh.size())
    return as_placed(y, x, layout.output)


def replicated(x: Tensor) -> Any:
    """A DTensor of whole values on all ranks; any other tensor itself."""
    if not isinstance(x, DTensor):
        return x
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)


def pointwise(function: Callable[..., Any], *tensors: Any) -> Tensor | None:
    """Apply a function of single values to the local tensors of DTensors; None if unknown."""
    x = tensors[0]
    placed = [_placement(t) for t in tensors]
    if not _on_one_mesh(x, *tensors) or placed[0] is None or any(p != placed[0] for p in placed):
        return None
    return as_placed(function(*(local(t) for t in tensors)), x, placed[0])


def output_placements(y: Tensor) -> list[Placement] | None:
    """How the gradient of a DTensor has to lie, None for any other tensor."""
    if not isinstance(y, DTensor):
        return None
    return [Replicate() if p.is_partial() else p for p in y.placements]


def local_gradient(gradient: Tensor, placed: list[Placement] | None) -> Tensor:
    """The local tensor of a gradient, summed over ranks where each has a part of it; collective."""
    if not isinstance(gradient, DTensor):
        return gradient
    whole: Tensor = gradient.redistribute(placements=placed).to_local()
    return whole


# --- codes of tokens that lie on several ranks --------------------------------------------------


@dataclass(frozen=True)
class GatheredCodes(Codes):
    """A tensor whose rows lie on the ranks of a group; tensors: those of the own rows."""

    own: Codes  # of each rank's rows
    group: str  # name of the process group, in whose order the rows lie
    size: int  # number of its ranks
    dim: int  # of the tensor, that is sharded; -1: its rows, the last of which may be padding
    outer: int = 1  # product of the sizes before `dim`

    @override
    def of(self, shape: torch.Size) -> Codes:
        outer = math.prod(shape[: max(self.dim, 0)])
        return GatheredCodes(
            self.numel, self.format, self.own, self.group, self.size, self.dim, outer
        )

    def _parts(self, tensors: Tensors) -> Iterator[Tensors]:
        """Tensors of each rank's code; one collective."""
        count = self.own.per_row
        own = [t for t in tensors[:count] if t is not None]
        every = gather_tensors(own, self.group, self.size)
        for rank in range(self.size):
            yield (*(t[rank] for t in every), *tensors[count:])

    @override
    def rebuild(self, tensors: Tensors, rows: int, dtype: torch.dtype) -> Tensor:
        each = -(-rows // self.size)
        parts = [self.own.rebuild(part, each, dtype) for part in self._parts(tensors)]
        parts = [part.view(self.outer, -1, self.numel) for part in parts]
        return torch.cat(parts, dim=1).view(-1, self.numel)[:rows]

    @override
    def rebuild_float8(self, tensors: Tensors, rows: int, scale: Tensor) -> Tensor:
        each = -(-rows // self.size)
        parts = [self.own.rebuild_float8(p, each, scale) for p in self._parts(tensors)]
        made = [p.view(torch.uint8)[:, :each].reshape(self.numel, self.outer, -1) for p in parts]
        columns = torch.cat(made, dim=2).view(self.numel, -1)[:, :rows]
        columns = F.pad(columns, (0, -rows % 16))
        return columns.contiguous().view(torch.float8_e4m3fn)


@dataclass(frozen=True)
class Values(Codes):
    """A tensor that is kept as it is."""

    @override
    def rebuild(self, tensors: Tensors, rows: int, dtype: torch.dtype) -> Tensor:
        x: Any = tensors[0]
        value: Tensor = x.to(dtype)
        return value

    @override
    def rebuild_float8(self, tensors: Tensors, rows: int, scale: Tensor) -> Tensor:
        x: Any = tensors[0]
        columns: Tensor = float8_cast(x, scale * 448.0, False, True)[1]
        return columns


def gathered(source: Source, mesh: DeviceMesh, dim: int) -> Source:
    """The source of a whole tensor of whose shards along ``dim`` each rank has one; made once."""
    codes, group = source.codes, mesh.get_group().group_name
    whole = GatheredCodes(codes.numel, codes.format, codes, group, mesh.size(), dim)
    if source.gathered is None or source.gathered.codes != whole:
        source.gathered = Source(
            whole,
            source.tensors,
            source.amax.new_empty(0),  # the largest value may lie on another rank
            shared=None if source.shared is None else Shared(),
            region=source.region,
        )
    return source.gathered


def own_rows(x: Any) -> Tensor:
    """This rank's part of the rows of a replicated tensor ``[..., N]``, padded with zeros."""
    mesh = x.device_mesh
    rows = as_matrix(local(x).detach())
    each = -(-rows.shape[0] // mesh.size())
    part = rows[mesh.get_local_rank() * each :][:each]
    return F.pad(part, (0, 0, 0, each - part.shape[0]))


def replicated_source(x: Any, format: str | None) -> Source:
    """A source for a replicated tensor: each rank keeps a code of a part of its rows, or with no
    format the part itself.
    """
    part = own_rows(x)
    if format is None:
        source = Source(Values(part.shape[1], ""), (part.clone(),), part.new_empty(0))
    else:
        source = encode_source(part, format)
    return gathered(source, x.device_mesh, -1)


# --- sources through the hooks of torch's styles ------------------------------------------------


def _dim(placement: Placement, x: Tensor) -> int | None:
    """The dimension that a placement shards, None if it shards none."""
    for dim in range(x.dim()):
        if placement == Shard(dim) or placement == Shard(dim - x.dim()):
            return dim
    return None


def carry(
    before: Any, after: Any, mesh: DeviceMesh, placed: Placement | None, wanted: Placement | None
) -> None:
    """Give what a hook made of a tensor, by wrapping or redistributing it, the tensor's source."""
    if after is before or not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return
    if isinstance(before, DTensor):
        placed = before.placements[0]
    if isinstance(after, DTensor):
        wanted = after.placements[0]
    elif wanted is None:
        wanted = placed
    if placed is None or wanted is None or mesh.ndim != 1:
        return
    dim, stays = _dim(placed, before), _dim(placed, before) == _dim(wanted, before)
    stays = stays and (dim is not None or placed == wanted == Replicate())
    if not stays and (wanted != Replicate() or dim is None or dim == before.dim() - 1):
        return
    for name in (ALONE, MARK, PART):
        if (mark := getattr(before, name, None)) is not None:
            setattr(after, name, mark)
    if not stays and dim is not None:
        setattr(after, PART, (dim, mesh.get_local_rank(), mesh.size()))
    source = source_of(before)
    if source is not None:
        relay(after, source if stays or dim is None else gathered(source, mesh, dim))
    elif stays:
        setattr(after, ORIGIN, before)


def _carrying(each: LayoutHook) -> Callable[..., Any]:
    hook, mesh, moves = each.hook, each.mesh, each.moves

    def before(module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        made = hook(module, args) if kwargs is None else hook(module, args, kwargs)
        values, named = (made, {}) if kwargs is None or made is None else made
        values = values if isinstance(values, tuple) else (values,)
        for key, (placed, wanted) in moves.items():
            if isinstance(key, str):
                carry((kwargs or {}).get(key), named.get(key), mesh, placed, wanted)
            elif key < min(len(args), len(values)):
                carry(args[key], values[key], mesh, placed, wanted)
        return made

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        made = hook(module, args, output)
        values = [v if isinstance(v, tuple) else (v,) for v in (output, made)]
        for key, (placed, wanted) in moves.items():
            if isinstance(key, int) and key < min(map(len, values)):
                carry(values[0][key], values[1][key], mesh, placed, wanted)
        return made

    return before if each.before else after


def carry_sources(model: nn.Module) -> None:
    """Let sources pass the hooks of torch's tensor-parallel styles; idempotent."""
    for module in model.modules():
        for each in layout_hooks(module):
            replace_hook(each, _carrying(each))


def stop_carrying(model: nn.Module) -> None:
    """Put back the hooks as they were; idempotent."""
    for module in model.modules():
        restore_hooks(module)
