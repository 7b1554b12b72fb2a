"""Gradient accumulation in 8-bit codes (AGoQ §5).

Between the micro-batches of one optimizer step a gradient sum is held as codes and scales: 1.125
bytes per parameter instead of 4. Each new gradient is added in fp32 to the decoded sum, which is
encoded again; the last one is added to the decoded sum without encoding it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lq_lightning._compat.fsdp2 import (
    GroupParams,
    fsdp_units,
    keep_unreduced_gradients,
    unit_mesh,
)
from lq_lightning._compat.tensors import (
    empty_like_sharded,
    is_shard,
    layout,
    local_tensor,
    placed,
    placed_like,
    waited,
)
from lq_lightning._compat.torch import after_backward, backward_id
from lq_lightning.codecs import CodecSpec, accumulate, decode, derive_seed, encode
from lq_lightning.data_parallel.unit import full_precision_reason
from lq_lightning.foundation.checks import check_count

__all__ = ["KeptGradient", "QuantizedGradientBuffer"]

# 1.125 bytes per parameter. With bf16 scales, which are rounded up, in groups of 16, the largest
# value of a group would grow by 1.3% in 64 additions.
INT8 = CodecSpec(code="int8", group_size=32, scale_dtype="float32")


class KeptGradient(NamedTuple):
    """Storage of one parameter's gradient sum between micro-batches."""

    name: str  # fully qualified
    numel: int  # elements of the whole parameter
    reason: str  # why it is kept in full precision; empty if it is quantized


@dataclass(slots=True)
class _Windows:
    """Counts accumulation windows, for the seeds of stochastic rounding."""

    number: int = 0  # of the window in progress, or of the last one
    is_over: bool = False  # whether a sum was read or cleared since one was last added to

    def current(self) -> int:
        if self.is_over:
            self.number, self.is_over = self.number + 1, False
        return self.number


class _Sum:
    """A gradient sum of ``[N]`` values as codes.

    ``rank`` numbers the ranks that round differently, as they add up other values.
    """

    def __init__(self, codec: CodecSpec, rank: int, index: int, windows: _Windows) -> None:
        self._codec, self.rank, self._index, self._windows = codec, rank, index, windows
        self._codes: Tensor | None = None
        self._added = 0

    @property
    def empty(self) -> bool:
        return self._codes is None

    @property
    def nbytes(self) -> int:
        return 0 if self._codes is None else self._codes.numel()

    def add(self, values: Tensor) -> None:
        """Add ``values``, any shape; the shape must stay the same until :meth:`clear`."""
        flat = values.reshape(1, -1)
        self._added += 1
        seed, window = None, self._windows.current()
        if self._codec.rounding == "stochastic":
            seed = derive_seed(self.rank, window, self._index, self._added)
        if self._codes is None:
            self._codes = encode(self._codec, flat, seed=seed)
        else:
            accumulate(self._codec, self._codes, flat, seed=seed)

    def read(self, out: Tensor, *, add: bool) -> None:
        """Write or add the sum to contiguous ``out``."""
        if self._codes is None:
            raise AssertionError("an empty gradient sum was read")
        decode(self._codec, self._codes, out.numel(), out=out.view(1, -1), add=add)

    def clear(self) -> None:
        self._windows.is_over |= self._added > 0
        self._codes = None
        self._added = 0


class _UnitKeeper:
    """Keeps the whole gradients of one FSDP2 unit while its reduction is deferred."""

    def __init__(self, sums: list[_Sum | None]) -> None:
        self.sums = sums

    def store(self, index: int, gradient: Tensor, like: Tensor) -> bool:
        kept = self.sums[index]
        if kept is None:
            return False
        kept.add(waited(local_tensor(placed_like(gradient, like))))
        return True

    def restore(
        self, index: int, gradient: Tensor | None, like: Tensor, dtype: torch.dtype
    ) -> Tensor | None:
        kept = self.sums[index]
        if kept is None or kept.empty:
            return None
        if gradient is None:
            total = torch.empty_like(local_tensor(like), dtype=dtype)
        else:
            own = waited(local_tensor(placed_like(gradient, like)))
            total = own.to(dtype).contiguous()
        kept.read(total, add=gradient is not None)
        kept.clear()
        return placed(total, like, layout(like))

    def discard(self) -> None:
        for kept in self.sums:
            if kept is not None:
                kept.clear()


class QuantizedGradientBuffer:
    """Keeps the gradient sums of a module in 8 bits between micro-batches.

    Works on a plain module, on one inside ``DistributedDataParallel``, and on one sharded by FSDP2,
    whether that reduces once per window or in every micro-batch. Create it after ``fully_shard``,
    ``quantize_communication`` and ``to(device)``::

        buffer = QuantizedGradientBuffer(model)
        for micro_batch in micro_batches[:-1]:
            with buffer.accumulating():          # and ddp.no_sync(), if there is one
                model(micro_batch).backward()
        model(micro_batches[-1]).backward()      # gradients are complete now
        optimizer.step()

    With FSDP2 and ``set_requires_gradient_sync(False)`` the buffer recognizes the last backward and
    holds the unsharded gradients that FSDP2 would hold in full precision. Inside ``accumulating``
    the ``grad`` of quantized parameters is ``None`` after backward. A non-finite gradient makes its
    group of 32 values NaN in the sum.

    Groups are of the values that a rank has: with tensor parallelism, of its shard. What is partial
    there, as gradients of replicated parameters under sequence parallelism, is added up over these
    ranks before it is rounded, alike on all of them.

    Relative L2 error of the sum of 16 micro-batches with the default code: 1.2% on the gradients of
    a small GPT, 1.6% on Gaussian ones (``benchmarks/gradient_buffer.py``); AGoQ's FP8 E4M3 has 6.3%
    and 7.6%.

    Args:
        module: The module whose parameters are trained.
        codec: Codec of the sums; ``None`` is ``CodecSpec(code="int8", group_size=32)``, 1.125 bytes
            per parameter. AGoQ's is ``CodecSpec(code="fp8_e4m3", group_size=128)``. Keep scales in
            float32: others are rounded up at every addition, so that long sums grow.
        min_quantized_numel: Parameters with fewer elements, and 1-D ones, are left alone.

    Raises:
        ValueError: ``codec`` is no ``CodecSpec``, ``min_quantized_numel`` is not positive, or
            nothing would be quantized.
        NotImplementedError: At backward: a gradient is sparse.
    """

    def __init__(
        self, module: nn.Module, *, codec: CodecSpec | None = None, min_quantized_numel: int = 4096
    ) -> None:
        check_count(type(self).__name__, "min_quantized_numel", min_quantized_numel, 1)
        if not isinstance(codec, CodecSpec | None):
            raise ValueError(
                f"`codec={codec!r}` is not valid: give a `CodecSpec`, or None for INT8 codes in "
                "groups of 32."
            )
        self._codec = codec or INT8
        self._accumulating = False
        self._flush_queued = False
        self._windows = _Windows()
        self._sums: dict[nn.Parameter, _Sum] = {}
        self._keepers: list[_UnitKeeper] = []
        self._undo: list[Callable[[], None]] = []
        self.plan = tuple(
            KeptGradient(name, p.numel(), _reason(p, min_quantized_numel))
            for name, p in module.named_parameters()
        )
        reasons = {kept.name: kept.reason for kept in self.plan}
        units = [group for _, _, group in fsdp_units(module)]
        own = {p.sharded_param: unit_mesh(group) for group in units for p in GroupParams(group)()}
        axes = {p: _axes_beside(p, own.get(p)) for p in module.parameters()}
        # of ranks that hold the same values, the first one's number
        rank = dist.get_rank() if dist.is_initialized() else 0
        groups = {p.device_mesh.get_group(i) for p, found in axes.items() for i in found}  # type: ignore[attr-defined]
        first = min([rank, *(min(dist.get_process_group_ranks(group)) for group in groups)])
        # FSDP2 may go on with backward before it has reduced a gradient that no hook reads
        hook: Any = lambda parameter: self.after_accumulation(parameter)  # noqa: E731
        hook.reads_gradient = self.reads_gradient
        for name, parameter in module.named_parameters():
            if not reasons[name]:
                placements = getattr(parameter, "placements", ())
                sharded = any(is_shard(placements[i]) for i in axes[parameter])
                self._sums[parameter] = self._new_sum(rank if sharded else first)
                handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._undo.append(handle.remove)
        if not self._sums:
            raise ValueError(
                f"no gradient of `{type(module).__name__}` would be quantized: it has no trained "
                f"parameter of two or more dimensions and at least {min_quantized_numel} elements. "
                "Lower `min_quantized_numel`, or do without the buffer."
            )
        for group in units:
            sums = [
                self._new_sum(kept.rank) if (kept := self._sums.get(p.sharded_param)) else None
                for p in GroupParams(group)()
            ]
            self._keepers.append(_UnitKeeper(sums))
            self._undo.append(keep_unreduced_gradients(group, self._keepers[-1]))

    def _new_sum(self, rank: int) -> _Sum:
        count = len(self._sums) + sum(len(keeper.sums) for keeper in self._keepers)
        return _Sum(self._codec, rank, count, self._windows)

    def _all_sums(self) -> list[_Sum]:
        kept = [s for keeper in self._keepers for s in keeper.sums if s is not None]
        return [*self._sums.values(), *kept]

    @property
    def window(self) -> int:
        """Number of the accumulation window in progress, or of the last one; from 0 on.

        The seeds of a codec's stochastic rounding depend on it, on the rank, the parameter and the
        micro-batch. For the same bits after a resume, set it at the start of a window, for example
        to the number of the optimizer step, as ``QuantizedPrecision`` does.
        """
        return self._windows.number

    @window.setter
    def window(self, number: int) -> None:
        self._windows.number, self._windows.is_over = number, False

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales held at this moment; 0 between optimizer steps."""
        return sum(kept.nbytes for kept in self._all_sums())

    @contextmanager
    def accumulating(self, enabled: bool = True) -> Generator[None, None, None]:
        """Store the gradients of the backward passes inside; all but the last of a window.

        Args:
            enabled: ``False`` makes it the last one, for loops that write one ``with``.
        """
        before, self._accumulating = self._accumulating, enabled
        self._flush_queued = False  # of a backward that an exception ended
        try:
            yield
        finally:
            self._accumulating = before

    def discard(self) -> None:
        """Drop all stored sums, as ``zero_grad`` drops gradients."""
        for kept in self._all_sums():
            kept.clear()

    def remove(self) -> None:
        """Drop all sums and restore the module; do not use the buffer again."""
        self.discard()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    @torch.no_grad()
    def flush(self) -> None:
        """Add remaining sums, of parameters that the last backward did not use, to ``grad``.

        Runs automatically at the end of the last backward if that computed any gradient.
        """
        self._flush_queued = False
        for parameter, kept in self._sums.items():
            if kept.empty:
                continue
            if parameter.grad is None:
                parameter.grad = _zeros_like(parameter)
            self._add_to(parameter.grad, kept)

    @torch.no_grad()
    def collect(self) -> None:
        """Within ``accumulating``, store gradients that were assigned, which calls no hook.

        Schedules that compute gradients of weights separately (zero bubble) assign them.
        """
        for parameter in self._sums if self._accumulating else ():
            self.after_accumulation(parameter)

    def reads_gradient(self, parameter: nn.Parameter) -> bool:
        """Whether the hook reads the gradient of ``parameter`` as soon as it is reduced.

        If not, its reduction may overlap with the rest of backward.
        """
        return self._accumulating or not self._sums[parameter].empty

    @torch.no_grad()
    def after_accumulation(self, parameter: nn.Parameter) -> None:
        """Add a gradient to the stored sum, or the sum to the last gradient of a window."""
        kept, gradient = self._sums[parameter], parameter.grad
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            raise NotImplementedError(
                f"a gradient of shape {tuple(gradient.shape)} is {gradient.layout}; the gradient "
                "buffer takes dense ones. Build the embedding with `sparse=False`."
            )
        gradient = placed_like(gradient, parameter)
        if gradient is not parameter.grad:  # partial sums, which FSDP2 does not leave
            parameter.grad = gradient
        local = local_tensor(gradient)
        if local.device.type == "cpu" and torch.cuda.is_available() and local.is_pinned():
            torch.cuda.synchronize()  # FSDP2 of torch < 2.13 is still copying it from the GPU
        if self._accumulating:
            kept.add(local)
            parameter.grad = None
            return
        if not kept.empty:
            self._add_to(gradient, kept)
        # Outside of a backward pass, where nothing can be queued, whoever reduces flushes.
        waiting = backward_id() >= 0 and any(not s.empty for s in self._sums.values())
        if waiting and not self._flush_queued:
            self._flush_queued = True
            after_backward(self.flush)

    @staticmethod
    def _add_to(gradient: Tensor, kept: _Sum) -> None:
        local = local_tensor(gradient)
        total = local.contiguous()
        kept.read(total, add=True)
        if total is not local:
            local.copy_(total)
        kept.clear()


def _axes_beside(parameter: nn.Parameter, fsdp: DeviceMesh | None) -> list[int]:
    """Axes of a parameter's mesh, beside FSDP2's, along which ranks compute one gradient."""
    if not isinstance(parameter, DTensor):
        return []
    mesh, known = parameter.device_mesh, fsdp and fsdp.mesh_dim_names
    names = mesh.mesh_dim_names or range(mesh.ndim)
    return [axis for axis, name in enumerate(names) if name not in (known or ())]


def _reason(parameter: nn.Parameter, min_quantized_numel: int) -> str:
    if not parameter.requires_grad:
        return "frozen: has no gradient"
    return full_precision_reason(
        parameter.ndim, parameter.numel(), parameter.dtype, min_quantized_numel
    )


def _zeros_like(parameter: nn.Parameter) -> Tensor:
    if not isinstance(parameter, DTensor):
        return torch.zeros_like(parameter)
    zeros = empty_like_sharded(parameter, parameter.dtype)
    local_tensor(zeros).zero_()
    return zeros
