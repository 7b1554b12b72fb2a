"""FSDP2 as a Lightning strategy: the part of ``quantized_fsdp`` that knows nothing of codecs.

What it adds to Lightning's ``ModelParallelStrategy``: it shards any LightningModule by itself,
gathers in its steps what belongs to no unit, defers gradient reduction while accumulating, maps
precisions, and writes and reads checkpoints of any world size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import LBFGS
from torchmetrics import Metric

from lq_lightning._compat.launcher import launcher_where_it_runs
from lq_lightning._compat.lightning import (
    check_precision_with,
    move_optimizers_to_device,
    replace_checkpoint_links,
    set_device_mesh,
    take_compiler,
    use_own_sampling,
)
from lq_lightning._compat.modules import initialize_root
from lq_lightning.checkpoint import state
from lq_lightning.checkpoint.by_name import check_alike
from lq_lightning.checkpoint.files import replace_link
from lq_lightning.checkpoint.ranks import RankGroup
from lq_lightning.foundation.groups import prepare_groups, shared_mesh
from lq_lightning.foundation.meta_start import initialize_meta_tensors
from lq_lightning.plugins import FullyShardedPrecision
from lq_lightning.strategies.checks import check_callbacks, check_optimizer, check_start
from lq_lightning.strategies.failures import begin_run, explain_lost_rank
from lq_lightning.strategies.gradients import DeferredReduction, FiniteGradients
from lq_lightning.strategies.options import (
    check_backend,
    check_flag,
    check_option_names,
    check_timeout,
    given_options,
)
from lq_lightning.strategies.root_forward import register_evaluation_steps
from lq_lightning.strategies.sharding import (
    Sharding,
    check_settings,
    compile_units,
    remember,
    shard,
    sharded,
)
from lq_lightning.strategies.steps import SteppingStrategy
from lq_lightning.strategies.stop_signal import StopSignal
from lq_lightning.strategies.units import (
    ChosenUnits,
    ShardingPlan,
    UnitSelector,
    check_selector,
    find_units,
)

__all__ = ["DEFAULT_TIMEOUT", "FullyShardedStrategy"]

DEFAULT_TIMEOUT = timedelta(minutes=30)


class FullyShardedStrategy(SteppingStrategy):
    """FSDP2 over all ranks for any LightningModule; a plain single-device run on one rank.

    Args:
        units: Names of modules that are gathered as one piece, or of their classes, or a predicate.
            ``None``: what ``configure_model`` sharded, else Hugging Face's ``_no_split_modules``,
            else repeated blocks.
        reshard_after_forward: Free a unit's weights between forward and backward.
        reduce_every_microbatch: With ``accumulate_grad_batches``, reduce gradients in every
            micro-batch (less memory) instead of once per optimizer step (less traffic).
        skip_nonfinite_steps: Leave out optimizer steps with infinite or NaN gradients, on all ranks
            together, and count them in ``num_skipped_steps``. Gradients are looked at before
            ``on_before_optimizer_step`` and clipping, and once more after both.
        compile_units: ``torch.compile`` the forward of each unit.
        save_distributed_checkpoint: On several ranks write checkpoint directories with one file per
            rank; otherwise, and always on one rank, single files.
        verify_checkpoints: Compare checkpoints with their checksums before anything is loaded.
        process_group_backend: ``None`` for NCCL on GPUs and gloo on CPUs.
        timeout: How long a collective waits for the other ranks before the run fails; a number is
            seconds.

    Raises:
        ValueError: An option has a value outside its choices.
        TypeError: An option does not exist, or ``units`` selects nothing that is a module.
    """

    given: dict[str, object]  # options without those that have their defaults

    def __new__(cls, *args: Any, **kwargs: Any) -> FullyShardedStrategy:
        """Name unknown options.

        Raises:
            TypeError: An option does not exist.
        """
        check_option_names(cls, kwargs)
        strategy = super().__new__(cls)
        strategy.given = given_options(cls, args, kwargs)
        return strategy

    def __init__(
        self,
        units: list[str] | Callable[[nn.Module], bool] | None = None,
        reshard_after_forward: bool = True,
        reduce_every_microbatch: bool = False,
        skip_nonfinite_steps: bool = False,
        compile_units: bool = False,
        save_distributed_checkpoint: bool = True,
        verify_checkpoints: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
    ) -> None:
        """Check and keep the options; nothing is started."""
        owner = type(self).__name__
        for name, value in (
            ("reshard_after_forward", reshard_after_forward),
            ("reduce_every_microbatch", reduce_every_microbatch),
            ("skip_nonfinite_steps", skip_nonfinite_steps),
            ("compile_units", compile_units),
            ("save_distributed_checkpoint", save_distributed_checkpoint),
            ("verify_checkpoints", verify_checkpoints),
        ):
            check_flag(owner, name, value)
        check_selector(units)
        check_backend(owner, process_group_backend)
        self._attached_module: LightningModule | None = None
        self._default_precision = FullyShardedPrecision()
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            verify_checkpoints=verify_checkpoints,
            process_group_backend=process_group_backend,
            timeout=check_timeout(owner, timeout),
        )
        self._units: UnitSelector = units
        self._reshard_after_forward = reshard_after_forward
        self._reduce_every_microbatch = reduce_every_microbatch
        self._finite_gradients = FiniteGradients() if skip_nonfinite_steps else None
        self._compile_units = compile_units

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

    def unit_selector(self) -> UnitSelector | ChosenUnits:
        """Which modules are gathered as one piece."""
        return self._units

    def place_module(self, module: LightningModule) -> None:
        """Bring the module into the form and to the device that this rank trains it in.

        Called whenever a Trainer method sets up, also for a module that was placed before.
        """
        self._shard_once(module)
        initialize_root(cast(FSDPModule, module))
        register_evaluation_steps(module)

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
        # on one rank the compiled methods need nothing from us
        if module is not None and take_compiler(module) and self.num_nodes * self.num_processes > 1:
            raise RuntimeError(
                f"`{type(self).__name__}` cannot run `torch.compile(model)` on several ranks: the "
                "compiled step would hide the model's units. Pass the uncompiled model and set "
                "`compile_units=True`, or compile submodules in `configure_model`."
            )
        self._attached_module = module

    def _configure_launcher(self) -> None:
        if self.num_nodes * self.num_processes > 1:  # one rank needs none
            super()._configure_launcher()
            self._launcher = launcher_where_it_runs(self, self._launcher)

    def _setup_distributed(self) -> None:
        # a single device does not reset the seed before training, so neither do we there
        with isolate_rng() if self.world_size == 1 else nullcontext():
            super()._setup_distributed()

    def setup_environment(self) -> None:
        """Start the process group and the device mesh, once.

        Raises:
            ValueError: Device, backend or ``CheckpointIO`` do not fit.
        """
        begin_run()
        self._is_set_up = self._training_began = False
        self._why_not_saved = None
        self._deferred_load = None
        self._check_devices()
        self.check_checkpoint_io()
        self._fsdp_precision.device_type = self.root_device.type
        finite = self._finite_gradients
        self._fsdp_precision.look_at_gradients = None if finite is None else finite.look
        with explain_lost_rank(self.global_rank, self.world_size):
            if self._device_mesh is not None and dist.is_initialized():
                Strategy.setup_environment(self)
                prepare_groups(self._timeout)
            else:
                self._setup_distributed()
                prepare_groups(self._timeout)
                axes = {"data_parallel": self.world_size, "tensor_parallel": 1}
                self._device_mesh = shared_mesh(self.root_device.type, axes)
        set_device_mesh(self._require_module(), self._device_mesh)

    def _check_devices(self) -> None:
        devices = len(self.parallel_devices or ())
        if self.local_rank >= devices:
            raise ValueError(
                f"this is process {self.local_rank + 1} of its machine, but the Trainer has "
                f"`devices={devices}` there: give it as many as processes were started "
                "(`torchrun --nproc-per-node`). On CPUs `devices='auto'` is 1."
            )
        device = self.root_device.type
        if device not in ("cpu", "cuda"):
            raise ValueError(
                f"`accelerator={device!r}` is not supported by `{type(self).__name__}`: choose "
                "'cpu' or 'cuda'."
            )
        if device == "cpu" and self._layer_sync is not None and self.world_size > 1:
            raise ValueError(
                "`sync_batchnorm=True` needs GPUs, but the accelerator is 'cpu', for which torch "
                "has no synchronized batch norm: leave it out, or set `accelerator='cuda'`."
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
        replace_checkpoint_links(trainer, replace_link)
        if trainer.state.fn == TrainerFn.FITTING:
            check_start(trainer.callbacks, self.checkpoint_ranks)  # type: ignore[attr-defined]
        shared = self.world_size > 1
        if not shared and not any(isinstance(m, FSDPModule) for m in module.modules()):
            self._setup_single(trainer, module)
            return
        if self.accelerator is None:
            raise AssertionError("the Trainer sets the accelerator before `setup`")
        self._stop_signal = None
        if shared:
            self._stop_signal = StopSignal(trainer, self.root_device, self.meeting)
        self.accelerator.setup(trainer)
        check_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
        with explain_lost_rank(self.global_rank, self.world_size):
            self.place_module(module)
            self.run_deferred_load()
        for submodule in module.modules():
            if isinstance(submodule, Metric):
                submodule.to(self.root_device)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            if self._is_sharded:
                for optimizer in self.optimizers:
                    check_optimizer(optimizer)
                ranks = RankGroup(group=self.device_mesh.get_group("data_parallel"))
                check_alike(module, self.optimizers, ranks)
            move_optimizers_to_device(self.optimizers, self.root_device)

    def _setup_single(self, trainer: Trainer, module: LightningModule) -> None:
        use_own_sampling(trainer)
        initialize_meta_tensors(module, self.root_device)
        if self._units is not None or self._compile_units:
            plan = find_units(module, self._units)
            if self._compile_units:
                compile_units(module, plan)
        Strategy.setup(self, trainer)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        self.run_deferred_load()  # only called on the single-device path
        return model

    def _shard_once(self, module: LightningModule) -> None:
        known = sharded(module)
        if known is None:
            sharding = Sharding(
                units=self.unit_selector(),
                reshard_after_forward=self._reshard_after_forward,
                compile_units=self._compile_units,
                precision=self._fsdp_precision,
                mesh=self.device_mesh["data_parallel"],
                device=self.root_device,
                layer_sync=self._layer_sync,
            )
            known = shard(module, sharding, self.settings())
            known.extra = self.on_sharded(module)
            remember(module, known)
            rank_zero_info(known.plan.summary())
        else:
            check_settings(module, known.settings, self.settings())

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
        self._deferred = DeferredReduction(self._require_module()) if self._is_sharded else None
        for index, optimizer in enumerate(self.optimizers):
            if self._finite_gradients is not None and isinstance(optimizer, LBFGS):
                raise NotImplementedError(
                    "`skip_nonfinite_steps=True` does not work with `LBFGS`, which evaluates the "
                    "loss several times in a step: set it to False or use another optimizer."
                )
            if self._is_sharded:
                state.check_optimizer(self._require_module(), optimizer, index)

    def teardown(self) -> None:
        """Finish saves; on one rank also move the model to the CPU, as a single device does."""
        module = self.lightning_module
        # what was refused before it had values cannot be moved
        on_meta = module is not None and any(p.is_meta for p in module.parameters())
        if self._is_sharded or on_meta:
            ModelParallelStrategy.teardown(self)
            self.checkpoint_io.teardown()
        else:
            ParallelStrategy.teardown(self)


check_precision_with(FullyShardedStrategy, FullyShardedPrecision.check_name)
