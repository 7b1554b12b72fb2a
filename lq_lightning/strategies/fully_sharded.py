"""FSDP2 as a Lightning strategy: the part of ``quantized_fsdp`` that knows nothing of codecs.

What it adds to Lightning's ``ModelParallelStrategy``: it shards any LightningModule by itself, runs
the step methods as forwards of the root unit, defers gradient reduction while accumulating, maps
precisions, and writes and reads checkpoints of any world size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.optim import LBFGS, Optimizer
from torchmetrics import Metric

from lq_lightning._compat.fsdp2 import fsdp_units
from lq_lightning._compat.lightning import (
    materialize_meta_tensors,
    move_optimizers_to_device,
    use_own_sampling,
)
from lq_lightning._compat.modules import (
    begin_root_forward,
    discard_unreduced_gradients,
    end_root_forward,
    reset_iteration,
)
from lq_lightning._compat.tensors import local_tensor
from lq_lightning._compat.torch import inherit_timeout
from lq_lightning.checkpoint import state
from lq_lightning.checkpoint.strategy import CheckpointingStrategy
from lq_lightning.foundation.broadcast import broadcast_module_states
from lq_lightning.plugins import FullyShardedPrecision
from lq_lightning.strategies import sharding
from lq_lightning.strategies.failures import (
    LostRankError,
    explain_lost_rank,
    is_lost_rank,
    lost_rank_error,
)
from lq_lightning.strategies.root_forward import ManualForward, register_step_methods
from lq_lightning.strategies.sharding import ShardingPlan, UnitSelector
from lq_lightning.strategies.stop_signal import StopSignal

__all__ = ["DEFAULT_TIMEOUT", "FullyShardedStrategy", "ShardedModule"]

DEFAULT_TIMEOUT = timedelta(minutes=30)


@dataclass(kw_only=True, slots=True)
class ShardedModule:
    """What is remembered about a module once it is sharded, whichever Trainer runs it next.

    Attributes:
        settings: The options that were baked in.
        plan: Its units.
        manual: Runs its ``training_step`` if that uses manual optimization.
        extra: What a subclass attached.
    """

    settings: Mapping[str, object]
    plan: ShardingPlan
    manual: ManualForward | None
    extra: Any = None


_RECORD = "_lq_sharded"  # kept in the module, so that both are freed together


def _already_configured() -> None:
    """Stand in for ``configure_model`` of a sharded module, which must not be built again."""


class FullyShardedStrategy(CheckpointingStrategy):
    """FSDP2 over all ranks for any LightningModule; a plain single-device run on one rank.

    Args:
        units: Class names of the modules that are gathered as one piece, or a predicate. ``None``:
            what ``configure_model`` sharded, else Hugging Face's ``_no_split_modules``, else
            repeated blocks.
        reshard_after_forward: Free a unit's weights between forward and backward.
        reduce_every_microbatch: With ``accumulate_grad_batches``, reduce gradients in every
            micro-batch (less memory) instead of once per optimizer step (less traffic).
        skip_nonfinite_steps: Leave out optimizer steps with infinite or NaN gradients, on all ranks
            together, and count them in ``num_skipped_steps``.
        compile_units: ``torch.compile`` the forward of each unit.
        save_distributed_checkpoint: On several ranks write checkpoint directories with one file per
            rank; otherwise, and always on one rank, single files.
        process_group_backend: ``None`` for NCCL on GPUs and gloo on CPUs.
        timeout: How long a collective waits for the other ranks before the run fails.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> FullyShardedStrategy:
        """Name unknown options.

        Raises:
            TypeError: An option does not exist.
        """
        parameters = inspect.signature(cls.__init__).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            unknown = [name for name in kwargs if name not in parameters]
            if unknown:
                allowed = ", ".join(name for name in parameters if name != "self")
                raise TypeError(
                    f"`{cls.__name__}` has no option `{unknown[0]}={kwargs[unknown[0]]!r}`. "
                    f"Options are: {allowed}."
                )
        return super().__new__(cls)

    def __init__(
        self,
        units: list[str] | Callable[[nn.Module], bool] | None = None,
        reshard_after_forward: bool = True,
        reduce_every_microbatch: bool = False,
        skip_nonfinite_steps: bool = False,
        compile_units: bool = False,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
    ) -> None:
        """Keep the options; nothing is started."""
        self._attached_module: LightningModule | None = None
        self._default_precision = FullyShardedPrecision()
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._units: UnitSelector = units
        self._reshard_after_forward = reshard_after_forward
        self._reduce_every_microbatch = reduce_every_microbatch
        self._skip_nonfinite_steps = skip_nonfinite_steps
        self._compile_units = compile_units
        self._has_unreduced = False
        self._stop_signal: StopSignal | None = None
        self.num_skipped_steps = 0

    # --- for subclasses -------------------------------------------------------------------------

    def settings(self) -> dict[str, object]:
        """Options that sharding bakes into a module and that a later Trainer cannot change."""
        return {
            "precision": self._fsdp_precision.precision,
            "reshard_after_forward": self._reshard_after_forward,
        }

    def on_sharded(self, module: LightningModule) -> Any:
        """Called once per module after it was sharded; the result is kept with the module."""
        return None

    def on_attached(self, sharded: ShardedModule) -> None:
        """Called in every stage with what is known about the sharded module."""

    def after_optimizer_step(self) -> None:
        """Called after every optimizer step that was not skipped."""

    def after_skipped_step(self) -> None:
        """Called on all ranks after an optimizer step was left out."""

    def on_step_error(self) -> None:
        """Called after an error in a step method or backward, before FSDP2's state is reset."""

    # --- environment ----------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """Always a :class:`FullyShardedPrecision`."""
        return self._fsdp_precision

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is None:
            self._precision_plugin = None
        else:
            self._precision_plugin = FullyShardedPrecision.from_plugin(precision_plugin)

    @property
    def _fsdp_precision(self) -> FullyShardedPrecision:
        # the default is kept apart: Trainer takes a stored plugin as the user's choice
        return cast(FullyShardedPrecision, self._precision_plugin or self._default_precision)

    @property
    def _lightning_module(self) -> LightningModule | None:
        return self._attached_module

    @_lightning_module.setter
    def _lightning_module(self, module: LightningModule | None) -> None:
        if module is not None and module._compiler_ctx is not None:
            if self.num_nodes * self.num_processes > 1:
                raise RuntimeError(
                    f"`{type(self).__name__}` cannot run `torch.compile(model)` on several ranks: "
                    "the compiled step would hide the model's units. Pass the uncompiled model and "
                    "set `compile_units=True`, or compile submodules in `configure_model`."
                )
            module._compiler_ctx = None  # on one rank the compiled methods need nothing from us
        self._attached_module = module

    def _configure_launcher(self) -> None:
        if self.num_nodes * self.num_processes > 1:  # one rank needs none, so notebooks work
            super()._configure_launcher()

    def _setup_distributed(self) -> None:
        # a single device does not reset the seed before training, so neither do we there
        with isolate_rng() if self.world_size == 1 else nullcontext():
            super()._setup_distributed()

    def setup_environment(self) -> None:
        """Start the process group and the device mesh, once.

        Raises:
            ValueError: Device, backend or ``CheckpointIO`` do not fit.
        """
        self._is_set_up = False
        self._deferred_load = None
        self._check_devices()
        self.check_checkpoint_io()
        self._fsdp_precision.device_type = self.root_device.type
        if self._device_mesh is not None and dist.is_initialized():
            Strategy.setup_environment(self)
            self._require_module()._device_mesh = self._device_mesh
            return
        self._data_parallel_size = self.world_size
        self._tensor_parallel_size = 1
        with explain_lost_rank(self.global_rank, self.world_size):
            super().setup_environment()
        inherit_timeout(self.device_mesh)

    def _check_devices(self) -> None:
        device = self.root_device.type
        if device not in ("cpu", "cuda"):
            raise ValueError(
                f"`accelerator={device!r}` is not supported by `{type(self).__name__}`: choose "
                "'cpu' or 'cuda'."
            )
        backend = self._process_group_backend or ""
        if device == "cpu" and "nccl" in backend:
            raise ValueError(
                f"`process_group_backend={backend!r}` needs GPUs, but the accelerator is 'cpu': "
                "leave it out (gloo is used), or set `accelerator='cuda'`."
            )

    def tensor_init_context(self, empty_init: bool | None = None) -> Any:
        """Where ``trainer.init_module`` and ``configure_model`` create tensors."""
        if self.world_size == 1:
            return Strategy.tensor_init_context(self, empty_init)
        return super().tensor_init_context(empty_init)

    # --- setup ------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Shard the module if that was not done yet, then make the optimizers."""
        module = self._require_module()
        shared = self.world_size > 1
        if not shared and not any(isinstance(m, FSDPModule) for m in module.modules()):
            self._setup_single(trainer, module)
            return
        if self.accelerator is None:
            raise AssertionError("the Trainer sets the accelerator before `setup`")
        self._stop_signal = StopSignal(trainer, self.root_device) if shared else None
        self.accelerator.setup(trainer)
        self._reject_callbacks(trainer)
        with explain_lost_rank(self.global_rank, self.world_size):
            sharded = self._shard_once(module)
            self.on_attached(sharded)
            self.run_deferred_load()
        register_step_methods(module)
        for submodule in module.modules():
            if isinstance(submodule, Metric):
                submodule.to(self.root_device)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            move_optimizers_to_device(self.optimizers, self.root_device)

    def _setup_single(self, trainer: Trainer, module: LightningModule) -> None:
        use_own_sampling(trainer)
        materialize_meta_tensors(module, self.root_device)
        if self._units is not None or self._compile_units:
            self._compile(module, sharding.find_units(module, self._units))
        Strategy.setup(self, trainer)

    def _compile(self, module: LightningModule, plan: ShardingPlan) -> None:
        units = [module.get_submodule(name) for name in plan.units] if self._compile_units else []
        for unit in units:
            if "forward" not in unit.__dict__:  # not in an earlier stage
                unit.forward = torch.compile(unit.forward)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        self.run_deferred_load()  # only called on the single-device path
        return model

    def _reject_callbacks(self, trainer: Trainer) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
                raise NotImplementedError(
                    f"the callback `{type(callback).__name__}` copies the whole module, which a "
                    "sharded module does not allow. Allowed: one rank, or a callback that averages "
                    "the shards (`module.parameters()`) after each step."
                )

    def _shard_once(self, module: LightningModule) -> ShardedModule:
        known: ShardedModule | None = module.__dict__.get(_RECORD)
        if known is None:
            plan = self._shard(module)
            manual = None if module.automatic_optimization else ManualForward(module)
            known = ShardedModule(settings=self.settings(), plan=plan, manual=manual)
            module.__dict__[_RECORD] = known
            known.extra = self.on_sharded(module)
            rank_zero_info(plan.summary())
        elif known.settings != self.settings():
            changed = {k: v for k, v in self.settings().items() if known.settings.get(k) != v}
            name, value = next(iter(changed.items()))
            raise ValueError(
                f"this `{type(module).__name__}` was already sharded with "
                f"`{name}={known.settings.get(name)!r}` and cannot change to `{name}={value!r}`. "
                "Use the same options, or make a new module and load a checkpoint."
            )
        return known

    def _shard(self, module: LightningModule) -> ShardingPlan:
        sharding.check_shardable(module)
        if self._layer_sync is not None and self.world_size > 1:
            self._layer_sync.apply(module)
        self._fsdp_precision.convert_module(module)
        if self.world_size > 1:
            broadcast_module_states(module, parameters=True)
        plan = sharding.find_units(module, self._units)
        mesh = self.device_mesh["data_parallel"]
        sharding.shard_module(module, plan, mesh, self._fsdp_precision, self._reshard_after_forward)
        with torch.random.fork_rng([], enabled=self.root_device.type == "cpu"):
            if self.root_device.type == "cpu":  # DTensor's own generator is for GPUs only
                torch.manual_seed(torch.initial_seed() + self.global_rank)
            materialize_meta_tensors(module, self.root_device)
        if self.world_size > 1:
            broadcast_module_states(module, parameters=False)
        offloads = any(
            isinstance(group.offload_policy, CPUOffloadPolicy) for _, _, group in fsdp_units(module)
        )
        if not offloads:
            module.to(self.root_device)
        sharding.check_fully_sharded(module)
        module.configure_model = _already_configured  # type: ignore[method-assign]
        self._compile(module, plan)
        return plan

    @property
    def _sharded(self) -> ShardedModule | None:
        module = self._attached_module
        return None if module is None else module.__dict__.get(_RECORD)

    @property
    def sharding_plan(self) -> ShardingPlan | None:
        """The units of the attached module; ``None`` before ``setup`` and on one rank."""
        return None if self._sharded is None else self._sharded.plan

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers and check that they update the sharded parameters.

        Raises:
            ValueError: An optimizer holds something else.
            NotImplementedError: L-BFGS with ``skip_nonfinite_steps``.
        """
        super().setup_optimizers(trainer)
        self.num_skipped_steps = 0
        self._has_unreduced = False
        discard_unreduced_gradients(self._require_module())  # of an interrupted run
        for index, optimizer in enumerate(self.optimizers):
            if self._skip_nonfinite_steps and isinstance(optimizer, LBFGS):
                raise NotImplementedError(
                    "`skip_nonfinite_steps=True` does not work with `LBFGS`, which evaluates the "
                    "loss several times in a step: set it to False or use another optimizer."
                )
            if self._is_sharded:
                state.check_optimizer(self._require_module(), optimizer, index)

    # --- steps ------------------------------------------------------------------------------------

    @property
    def _manual(self) -> ManualForward | None:
        return None if self._sharded is None else self._sharded.manual

    @contextmanager
    def _guard(self) -> Generator[None, None, None]:
        """Leave FSDP2 usable after an error (such as out of memory), explain a lost rank."""
        with explain_lost_rank(self.global_rank, self.world_size):
            try:
                yield
            except Exception as error:
                if self._is_sharded and not is_lost_rank(error):
                    self.on_step_error()
                    reset_iteration(self._require_module())
                raise

    @contextmanager
    def root_forward(self) -> Generator[None, None, None]:
        """Make the root's own parameters usable outside of the step methods; all ranks together.

        ``forward`` and the step methods need no such help. Other code that calls submodules does,
        for example ``with trainer.strategy.root_forward(): module.model.generate(...)`` in a hook.
        Without gradients, and harmless where nothing is sharded.
        """
        if not self._is_sharded:
            yield
            return
        module = cast(FSDPModule, self._attached_module)
        with torch.no_grad():
            begin_root_forward(module)
            try:
                yield
            finally:
                end_root_forward(module, None)
                module.reshard()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` as a forward of the root unit."""
        manual = self._manual
        with self._guard(), nullcontext() if manual is None else manual.step():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``validation_step`` as a forward of the root unit."""
        with self._guard():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``test_step`` as a forward of the root unit."""
        with self._guard():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``predict_step`` as a forward of the root unit."""
        with self._guard():
            return super().predict_step(*args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """End the forward in front of a ``manual_backward``."""
        if self._manual is not None:
            self._manual.before_backward(closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Gather again for what follows a ``manual_backward``."""
        if self._manual is not None:
            self._manual.after_backward()

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Backward, with an explanation if another rank is lost."""
        with self._guard():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients of the backward passes inside without reducing them.

        Lightning enters it for all but the last micro-batch of ``accumulate_grad_batches``. With
        manual optimization write ``with self.trainer.strategy.block_backward_sync():`` around
        ``self.manual_backward(loss)`` in all but the last micro-batch.
        """
        if not self._is_sharded or self._reduce_every_microbatch:
            yield
            return
        module = cast(FSDPModule, self._attached_module)
        module.set_requires_gradient_sync(False)
        self._has_unreduced = True
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Drop what an interrupted accumulation left, as ``zero_grad`` does without sharding."""
        module = self._require_module()
        starts_window = batch_idx % module.trainer.accumulate_grad_batches == 0
        if self._has_unreduced and module.automatic_optimization and starts_window:
            discard_unreduced_gradients(module)
            self._has_unreduced = False

    def on_train_end(self) -> None:
        """Stop all ranks after a signal that no batch followed."""
        if self._stop_signal is not None:
            self._stop_signal.finish()

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the closure (forward and backward) and step, unless gradients are not finite."""
        manual = self._manual
        run = closure if manual is None else _then(closure, manual.before_update)
        with explain_lost_rank(self.global_rank, self.world_size):
            if self._skip_nonfinite_steps:
                result, stepped = self._step_if_finite(optimizer, run, **kwargs)
            else:
                result, stepped = super().optimizer_step(optimizer, run, model, **kwargs), True
            self._has_unreduced = False
            if stepped:
                self.after_optimizer_step()
            if manual is not None:
                manual.after_update()
        return result

    def _step_if_finite(
        self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any
    ) -> tuple[Any, bool]:
        result = self._fsdp_precision.run_closure(self._require_module(), optimizer, closure)
        if self._gradients_finite(optimizer):
            optimizer.step(**kwargs)
            return result, True
        self.num_skipped_steps += 1
        optimizer.zero_grad()
        self.after_skipped_step()
        rank_zero_warn(
            "optimizer step skipped because of infinite or NaN gradients "
            f"({self.num_skipped_steps} so far); disable with `skip_nonfinite_steps=False`"
        )
        return result, False

    def _gradients_finite(self, optimizer: Optimizer) -> bool:
        gradients = [p.grad for g in optimizer.param_groups for p in g["params"]]
        local = [local_tensor(g) for g in gradients if g is not None]
        largest = torch.nn.utils.get_total_norm([g for g in local if g.numel()], float("inf"))
        bad = (~torch.isfinite(largest)).to(self.root_device, torch.int32)
        if self.world_size > 1:
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        return not bad.item()

    # --- evaluation, end, errors -----------------------------------------------------------------

    def _share_buffers(self) -> None:
        if self._is_sharded and self.world_size > 1:
            broadcast_module_states(self._require_module(), parameters=False)

    def on_validation_start(self) -> None:
        """Evaluate with the same buffers (such as running statistics) on all ranks."""
        self._share_buffers()

    def on_test_start(self) -> None:
        """Evaluate with the same buffers on all ranks."""
        self._share_buffers()

    def on_predict_start(self) -> None:
        """Predict with the same buffers on all ranks."""
        self._share_buffers()

    def on_validation_end(self) -> None:
        """Register shards again, which evaluation leaves gathered in the root."""
        self._show_shards()

    def on_test_end(self) -> None:
        """Register shards again."""
        self._show_shards()

    def on_predict_end(self) -> None:
        """Register shards again."""
        self._show_shards()

    def on_exception(self, exception: BaseException) -> None:
        """Say which rank failed, and whether another one is the cause.

        Raises:
            LostRankError: A collective outside of the steps lost its peer.
        """
        explained = isinstance(exception, LostRankError)
        if self.world_size > 1 and is_lost_rank(exception) and not explained:
            raise lost_rank_error(exception, self.global_rank, self.world_size) from exception

    def teardown(self) -> None:
        """Finish saves; on one rank also move the model to the CPU, as a single device does."""
        if self._is_sharded:
            ModelParallelStrategy.teardown(self)
            self.checkpoint_io.teardown()
        else:
            ParallelStrategy.teardown(self)


def _then(first: Callable[[], Any], second: Callable[[], None]) -> Callable[[], Any]:
    def both() -> Any:
        result = first()
        second()
        return result

    return both
