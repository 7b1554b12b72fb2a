"""``Trainer(plugins=[QuantizedPrecision(...)])``: optimizer states and gradient sums in 8 bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal, get_args

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lq_lightning._compat.lightning import (
    Window,
    accumulation_window,
    ddp_hook_of,
    is_no_optimizer,
)
from lq_lightning.codecs import CodecSpec
from lq_lightning.data_parallel import QuantizedGradientBuffer, quantized_all_reduce_hook
from lq_lightning.foundation.checks import check_choice
from lq_lightning.optim import (
    OptimizerQuantization,
    QuantizedOptimizer,
    quantize_optimizer,
    refuse_codes,
)
from lq_lightning.optim.config import STAMP
from lq_lightning.plugins.precision import FullyShardedPrecision, PrecisionName

__all__ = ["QuantizedPrecision"]

StateName = Literal["expanded_fp8", "dynamic8", "none"]
BufferName = Literal["int8", "fp8_e4m3", "none"]


class QuantizedPrecision(FullyShardedPrecision):
    """Keeps optimizer states and gradient sums in 8 bits; ``configure_optimizers`` stays as it is.

    The optimizers that the module configures (``torch.optim.AdamW``, ``Adam``, ``Muon``, ``SGD``
    with momentum, or a Lion) become their quantized twins in place, so that learning-rate
    schedulers, parameter groups and hooks go on working. With ``accumulate_grad_batches`` the
    gradient sums between micro-batches are codes too. Small and 1-D tensors and embeddings stay in
    full precision (``lq_lightning.optim.OptimizerQuantization``).

    Works with ``strategy="quantized_fsdp"``, ``"ddp"``, ``ModelParallelStrategy`` and on a single
    device.

    Args:
        precision: ``"32-true"``, ``"bf16-true"`` or ``"bf16-mixed"``, in place of the Trainer's
            ``precision``, which cannot be given beside a plugin.
        optimizer_state: ``"expanded_fp8"`` is FP8 with dynamic range expansion (COAT §4), at most
            2.2 bytes per parameter; ``"dynamic8"`` the 8-bit dynamic map; ``"none"`` leaves
            the optimizers alone. The second moment has the same format. Or a full
            ``OptimizerQuantization``. Muon's momentum is in ``"int8"`` with either.
        gradient_buffer: ``"int8"`` has a scale per 32 values, 1.125 bytes per parameter;
            ``"fp8_e4m3"`` is the code of AGoQ §5; ``"none"`` accumulates in full precision. Or a
            ``CodecSpec``. Only used with automatic optimization and gradient accumulation.

    Attributes:
        given: The arguments, with which another one can be made.
        gradient_buffer: In use; ``None`` before ``fit``, or where no gradients are accumulated.

    Raises:
        ValueError: An option has a value outside its choices; or, before training starts, the
            strategy or an optimizer's options are not supported.
        TypeError: Before training starts: an optimizer has no quantized twin.
    """

    def __init__(
        self,
        precision: PrecisionName = "32-true",
        optimizer_state: StateName | OptimizerQuantization = "expanded_fp8",
        gradient_buffer: BufferName | CodecSpec = "int8",
    ) -> None:
        super().__init__(precision)
        self.given: dict[str, Any] = {
            "precision": precision,
            "optimizer_state": optimizer_state,
            "gradient_buffer": gradient_buffer,
        }
        owner, config = "QuantizedPrecision", OptimizerQuantization
        self._states: OptimizerQuantization | None = None
        if isinstance(optimizer_state, OptimizerQuantization):
            self._states = optimizer_state
        else:
            names = get_args(StateName)
            check_choice(owner, "optimizer_state", optimizer_state, names, config)
            if optimizer_state != "none":
                self._states = config(first_moment=optimizer_state, second_moment=optimizer_state)
        if not isinstance(gradient_buffer, CodecSpec):
            names = get_args(BufferName)
            check_choice(owner, "gradient_buffer", gradient_buffer, names, CodecSpec)
        self._buffer_code = gradient_buffer
        self.gradient_buffer: QuantizedGradientBuffer | None = None
        self._plain: list[str | None] = []  # classes of optimizers that cannot read codes

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Quantize the optimizers, and the gradient sums if there will be any."""
        module = model if isinstance(model, LightningModule) else model.module
        if not isinstance(module, LightningModule):
            raise AssertionError("strategies wrap the LightningModule itself")
        self._check_strategy(module)
        self.device_type = module.trainer.strategy.root_device.type
        stepping = [optimizer for optimizer in optimizers if not is_no_optimizer(optimizer)]
        if self._states is not None:
            for optimizer in stepping:
                self._quantize(optimizer, self._states, module)
        self._plain = [
            None if isinstance(optimizer, QuantizedOptimizer) else type(optimizer).__name__
            for optimizer in stepping
        ]
        if stepping and self._accumulates(module):
            if getattr(model, "find_unused_parameters", False) and self._buffer_code != "none":
                raise ValueError(
                    "`QuantizedPrecision(gradient_buffer=...)` does not work with "
                    "`find_unused_parameters=True`, where DDP reduces gradients that this rank has "
                    'not computed. Give `gradient_buffer="none"`, or use `strategy="ddp"`.'
                )
            self._make_buffer(module)
        return super().connect(model, optimizers, lr_schedulers)

    @staticmethod
    def _check_strategy(module: LightningModule) -> None:
        strategy = module.trainer.strategy
        if not isinstance(strategy, (ModelParallelStrategy, DDPStrategy, SingleDeviceStrategy)):
            raise ValueError(
                f"`QuantizedPrecision` does not work with `{type(strategy).__name__}`: use "
                'strategy="quantized_fsdp", "ddp", `ModelParallelStrategy` or a single device.'
            )
        on_cpu = strategy.root_device.type == "cpu"
        if on_cpu and ddp_hook_of(strategy) is quantized_all_reduce_hook:
            raise ValueError(
                "`DDPStrategy(ddp_comm_hook=quantized_all_reduce_hook)` does nothing on CPUs, "
                "where Lightning leaves hooks out. Do without, or register it in `on_fit_start`: "
                "`trainer.model.register_comm_hook(QuantizedAllReduce(), "
                "quantized_all_reduce_hook)`."
            )

    @staticmethod
    def _quantize(
        optimizer: Optimizer, config: OptimizerQuantization, module: LightningModule
    ) -> None:
        if isinstance(optimizer, QuantizedOptimizer):
            return  # the module made it so
        kept = getattr(module.trainer.strategy, "full_precision_states", None)
        exact = [] if kept is None else kept(config.quantize_embeddings)  # known to a pipeline
        twin = quantize_optimizer(optimizer, config, module=module, full_precision=exact)
        plan = twin.quantization_plan()
        kept = [entry for entry in plan if entry.reason]
        nbytes = sum(entry.nbytes for entry in plan)
        counts = Counter(entry.reason for entry in kept)
        reasons = ", ".join(f"{count} ({reason})" for reason, count in counts.most_common())
        codes = " and ".join({group[STAMP].partition("/")[2]: None for group in twin.param_groups})
        rank_zero_info(
            f"{type(twin).__name__}: states of {len(plan) - len(kept)} of {len(plan)} tensors are "
            f"{codes} codes, {nbytes / 2**20:.1f} MiB before sharding"
            + (f"; in fp32: {reasons}" if kept else "")
        )

    @staticmethod
    def _accumulates(module: LightningModule) -> bool:
        trainer = module.trainer
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        scheduled = any(isinstance(c, GradientAccumulationScheduler) for c in callbacks)
        per_batch = getattr(trainer.strategy, "backwards_per_batch", 1)
        passes = per_batch * trainer.accumulate_grad_batches
        return module.automatic_optimization and (scheduled or passes > 1)

    def _make_buffer(self, module: LightningModule) -> None:
        if self._buffer_code == "none":
            return
        codec = self._buffer_code if isinstance(self._buffer_code, CodecSpec) else None
        if self._buffer_code == "fp8_e4m3":
            codec = CodecSpec(code="fp8_e4m3", group_size=128)
        try:
            self.gradient_buffer = QuantizedGradientBuffer(module, codec=codec)
        except ValueError as error:
            raise ValueError(
                "no gradient is large enough for `QuantizedPrecision(gradient_buffer=...)`: give "
                '`gradient_buffer="none"`.'
            ) from error
        plan = self.gradient_buffer.plan
        coded = sum(not entry.reason for entry in plan)
        rank_zero_info(
            f"gradient sums of {coded} of {len(plan)} tensors are kept in 8 bits between "
            "micro-batches"
        )

    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: LightningModule,
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Run backward; gradients of all but the last micro-batch of a window go to the buffer."""
        if self.gradient_buffer is None:
            super().backward(tensor, model, optimizer, *args, **kwargs)
            return
        window = self._start_batch(self.gradient_buffer, model)
        with self.gradient_buffer.accumulating(not window.last):
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @staticmethod
    def _start_batch(buffer: QuantizedGradientBuffer, model: LightningModule) -> Window:
        window = accumulation_window(model.trainer)
        if window.first:
            buffer.discard()  # of a window that was not completed
            buffer.window = model.trainer.global_step  # the same after a resume
        return window

    @contextmanager
    def adding_up(self, model: LightningModule) -> Generator[None, None, None]:
        """Add gradients of all backward passes of the batch to the buffer."""
        if self.gradient_buffer is None:
            yield
            return
        self._start_batch(self.gradient_buffer, model)
        with self.gradient_buffer.accumulating():
            yield
            self.gradient_buffer.collect()

    def collect(self) -> None:
        """Move gradients that no hook has seen into the buffer."""
        if self.gradient_buffer is not None:
            self.gradient_buffer.collect()

    @contextmanager
    def handing_out(self, model: LightningModule) -> Generator[None, None, None]:
        """Give the last batch of a window the sums of all of them."""
        if self.gradient_buffer is None:
            yield
            return
        last = accumulation_window(model.trainer).last
        with self.gradient_buffer.accumulating(not last):
            yield
        if last:
            self.gradient_buffer.flush()

    def _after_closure(self, model: LightningModule, optimizer: Any) -> None:
        if self.gradient_buffer is not None:
            self.gradient_buffer.flush()  # if the last micro-batch had no loss
        super()._after_closure(model, optimizer)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse codes that optimizers in full precision could not read."""
        states = checkpoint.get("optimizer_states", ())
        for name, state in zip(self._plain, states, strict=False):  # as Lightning loads them
            if name is not None:
                refuse_codes(state, f'{name} (`optimizer_state="none"`)')

    def teardown(self) -> None:
        """Remove the buffer from the module."""
        if self.gradient_buffer is not None:
            self.gradient_buffer.remove()
            self.gradient_buffer = None
        super().teardown()
