"""Compute precision and gradient norms of models sharded by FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import (
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lq_lightning._compat.lightning import (
    call_hooks,
    convert_floating,
    default_dtype,
    refuse_norm_clipping,
)

__all__ = ["FullyShardedPrecision", "PrecisionName", "grad_norm"]

PrecisionName = Literal["32-true", "bf16-true", "bf16-mixed"]
_NAMES = get_args(PrecisionName)
_PART = (
    "a hook calls `torch.nn.utils.clip_grad_norm_`, but it sees the gradients of this rank's "
    "pipeline stages only, or fails on those of several meshes (tensor parallelism). In "
    "`configure_gradient_clipping` call `self.clip_gradients(optimizer, gradient_clip_val=..., "
    "gradient_clip_algorithm='norm')`, or give the Trainer `gradient_clip_val`. "
    "`trainer.strategy.gradient_norm()` is the norm over all ranks."
)


def _unsupported(given: str) -> ValueError:
    allowed = ", ".join(map(repr, _NAMES))
    return ValueError(
        f"`{given}` is not supported by lq_lightning: choose one of {allowed}. Instead "
        "of fp16, 'bf16-mixed' needs no loss scaling; for fp64 or Transformer Engine use another "
        "strategy."
    )


class FullyShardedPrecision(Precision):
    """Maps Lightning's precision names to FSDP2.

    ``"32-true"`` computes and communicates in fp32. ``"bf16-true"`` keeps the whole module, so also
    the optimizer states, in bf16. ``"bf16-mixed"`` keeps fp32 main weights; on several ranks FSDP2
    casts them to bf16 before it gathers them and reduces gradients in fp32, on one rank this is
    Lightning's ordinary autocast.

    Args:
        precision: ``"32-true"``, ``"bf16-true"`` or ``"bf16-mixed"``.

    Raises:
        ValueError: ``precision`` is another string.
    """

    precision: PrecisionName = "32-true"
    # set by a strategy whose ranks have gradients of different parameters
    clip_norm: Callable[[list[nn.Parameter], float], None] | None = None
    # set by a strategy that skips steps; called before anything may change the gradients
    look_at_gradients: Callable[[Optimizer], None] | None = None
    casts_once = False  # within `casting_once`

    def __init__(self, precision: PrecisionName = "32-true") -> None:
        self.check_name(precision)
        self.precision = precision
        self.device_type = "cpu"  # set by the strategy before the first step

    @staticmethod
    def check_name(precision: str) -> None:
        """Refuse precisions without an equivalent."""
        if precision not in _NAMES:
            raise _unsupported(f"precision={precision!r}")

    @classmethod
    def from_plugin(cls, plugin: Precision) -> FullyShardedPrecision:
        """Replace one of Lightning's own plugins with its equivalent for FSDP2."""
        if isinstance(plugin, cls):
            return plugin
        if type(plugin) in (Precision, HalfPrecision, MixedPrecision, FSDPPrecision):
            if getattr(plugin, "scaler", None) is not None:
                raise _unsupported(f"precision={plugin.precision!r} with a gradient scaler")
            return cls(plugin.precision)  # type: ignore[arg-type]
        name = getattr(plugin, "precision", None)
        raise _unsupported(f"{type(plugin).__name__}(precision={name!r})")

    def policy(self, *, root: bool) -> MixedPrecisionPolicy:
        """FSDP2's policy for a unit, or for the root, whose inputs keep their dtype (targets!)."""
        if self.precision != "bf16-mixed":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=not root
        )

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast the module for ``"bf16-true"``."""
        return module.to(torch.bfloat16) if self.precision == "bf16-true" else module

    def convert_input(self, data: Any) -> Any:
        """Cast floating-point batch tensors for ``"bf16-true"``."""
        return convert_floating(data, torch.bfloat16) if self.precision == "bf16-true" else data

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Create parameters in bf16 for ``"bf16-true"``."""
        return default_dtype(torch.bfloat16) if self.precision == "bf16-true" else nullcontext()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Create parameters in bf16 for ``"bf16-true"``."""
        return self.tensor_init_context()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast for ``"bf16-mixed"``, bf16 as default dtype for ``"bf16-true"``."""
        if self.precision == "bf16-mixed":
            # a cached cast would outlive the gathered weight it was made from
            cached = self.casts_once
            return torch.autocast(self.device_type, dtype=torch.bfloat16, cache_enabled=cached)
        return self.tensor_init_context()

    @contextmanager
    def casting_once(self) -> Generator[None, None, None]:
        """Let forward passes, and backward passes between them, share casts of weights.

        Not for weights that FSDP2 gathers. After a weight has changed, call
        ``torch.clear_autocast_cache()``. Frozen weights are cast in each pass, as autocast keeps
        only casts of the others. Gradients of a weight that a pass uses several times add up in
        bf16, behind its one cast.
        """
        if self.precision != "bf16-mixed":
            yield
            return
        self.casts_once = True
        try:
            # Autocast drops its casts where a thread leaves its outermost context. Here that is
            # this one, which is switched off for the backward passes. They run in this thread,
            # since autograd's own has no outer context: checkpointing enters one there. Nor is
            # there a cache for them: recomputation in autocast may start from leaves, which
            # autocast takes for weights.
            with (
                torch.autocast(self.device_type, enabled=False, cache_enabled=False),
                torch.autograd.set_multithreading_enabled(False),
            ):
                yield
        finally:
            self.casts_once = False
            torch.clear_autocast_cache()  # the user may be within an outer one

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Call the ``on_after_backward`` hooks, in which norms of sharded gradients are plain."""
        with _PlainNorms():
            return super().post_backward(tensor, module)

    @contextmanager
    def adding_up(self, model: LightningModule) -> Generator[None, None, None]:
        """Run the backward passes of one batch, of whose gradients only the sum is wanted."""
        yield

    def collect(self) -> None:
        """Take gradients that were written past autograd's hooks, between two of these passes."""

    @contextmanager
    def handing_out(self, model: LightningModule) -> Generator[None, None, None]:
        """Reduce that sum; afterwards the gradients are complete."""
        yield

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip each element, after a look at infinite gradients that clipping hides."""
        if self.look_at_gradients is not None:
            self.look_at_gradients(optimizer)
        super().clip_grad_by_value(optimizer, clip_val)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the norm of all gradients of the model, wherever they are."""
        if self.clip_norm is None:
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            self.clip_norm(list(self.main_params(optimizer)), float(clip_val))

    def _after_closure(self, model: LightningModule, optimizer: Any) -> None:
        trainer = model.trainer
        if self.look_at_gradients is not None:
            self.look_at_gradients(optimizer)
        with nullcontext() if self.clip_norm is None else refuse_norm_clipping(_PART):
            with _PlainNorms():
                call_hooks(trainer, "on_before_optimizer_step", optimizer)
            value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
            self._clip_gradients(model, optimizer, value, gradient_clip_algorithm=algorithm)

    def run_closure(
        self, model: LightningModule, optimizer: Any, closure: Callable[[], Any]
    ) -> Any:
        """Forward, backward, hooks and clipping, without the optimizer step."""
        return self._wrap_closure(model, optimizer, closure)


_NORMS: frozenset[Callable[..., Any]] = frozenset(
    {torch.Tensor.norm, torch.norm, torch.linalg.norm, torch.linalg.vector_norm}
)


class _PlainNorms(TorchFunctionMode):
    """Makes norms of sharded tensors plain numbers, the same on every rank.

    Without it such a norm is a DTensor scalar, which ``torch.tensor([...])`` (so Lightning's
    ``grad_norm``) and metric logging do not accept. All ranks have to compute the same norms.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _NORMS and isinstance(result, DTensor):
            return result.full_tensor()
        return result


def grad_norm(
    module: nn.Module, norm_type: float | str = 2.0, group_separator: str = "/"
) -> dict[str, Tensor]:
    """Norm of every parameter's gradient and of all of them together, for any sharding.

    Works in every hook between backward and the optimizer step. Every rank must call it.

    Args:
        module: Sharded or plain.
        norm_type: The p of the p-norm, or ``"inf"``.
        group_separator: Separates the prefix from the parameter name in the keys.

    Returns:
        ``{"grad_2.0_norm/<name>": ..., "grad_2.0_norm_total": ...}``, scalar tensors, the same on
        every rank; empty if nothing has a gradient.

    Raises:
        ValueError: ``norm_type`` is not positive.
    """
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"`norm_type={norm_type!r}` is not valid: a positive number or 'inf'.")
    norms: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(parameter.grad.detach(), p)
            value = norm.full_tensor() if isinstance(norm, DTensor) else norm
            norms[f"grad_{p}_norm{group_separator}{name}"] = value
    if norms:
        norms[f"grad_{p}_norm_total"] = torch.linalg.vector_norm(
            torch.stack([n.float() for n in norms.values()]), p
        )
    return norms
