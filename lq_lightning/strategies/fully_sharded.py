"""FSDP2 as a Lightning strategy: the base class of all strategies of this package.

Beyond Lightning's ``ModelParallelStrategy`` it shards any LightningModule by itself, gathers the
root's parameters in steps, quantizes collectives, defers gradient reduction in accumulation, maps
precisions, and writes and reads checkpoints of any world size. Each of these is a part, which
Lightning's hooks are passed on to.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lq_lightning._compat.lightning import (
    check_precision_with,
    launcher_where_it_runs,
    move_optimizers_to_device,
    replace_checkpoint_links,
    set_device_mesh,
    take_compiler,
    use_own_sampling,
)
from lq_lightning._compat.modules import initialize_root, reset_iteration
from lq_lightning._compat.tensor_parallel import DATA, TENSOR
from lq_lightning.checkpoint import state
from lq_lightning.checkpoint.checkpointer import (
    ALL_RANKS,
    Checkpointer,
    ModelLayout,
    show_shards,
)
from lq_lightning.checkpoint.files import replace_link
from lq_lightning.checkpoint.ranks import RankGroup
from lq_lightning.data_parallel import PackedAgreement, QuantizedCommunication, Topology
from lq_lightning.foundation.agreement import broadcast_module_states
from lq_lightning.foundation.groups import prepare_groups, shared_mesh
from lq_lightning.foundation.meta_start import check_values, initialize_meta_tensors
from lq_lightning.foundation.reporting import QuantizationReport
from lq_lightning.foundation.strategy_part import StrategyPart
from lq_lightning.plugins import FullyShardedPrecision
from lq_lightning.strategies.checks import (
    check_callbacks,
    check_device,
    check_meshes,
    check_optimizer,
    check_start,
)
from lq_lightning.strategies.failures import Failures, Timeouts, is_lost_rank
from lq_lightning.strategies.gradient_norm import GradientNorm
from lq_lightning.strategies.options import (
    FSDPOptions,
    UnitSelector,
    check_option_names,
    given_options,
    shown_options,
)
from lq_lightning.strategies.parts import (
    OptimizerSteps,
    OptionsOfRun,
    QuantizedCollectives,
    remember,
    sharded,
)
from lq_lightning.strategies.restarts import check_signature, prepare_for_restarts, sign
from lq_lightning.strategies.root_forward import RootForward, check_loss, register_evaluation_steps
from lq_lightning.strategies.same_batches import draw_alike
from lq_lightning.strategies.sharded_logits import ShardedLogits
from lq_lightning.strategies.sharding import (
    ChosenUnits,
    ShardedModule,
    ShardingPlan,
    check_settings,
    compile_units,
    find_units,
    shard,
)
from lq_lightning.strategies.tensor_parallel import (
    TensorRanks,
    data_topology,
    gather_over_data_ranks,
    keeps_parameters,
)
from lq_lightning.strategies.tensor_plans import Draft, draft_plans, parallelize_automatically


class FullyShardedStrategy(ModelParallelStrategy):
    """FSDP2 over all ranks for any LightningModule; a plain single-device run on one rank.

    Subclasses take options as keywords, and add parts of their own to ``parts``.

    Args:
        options: The options that all strategies share.

    Attributes:
        parts: Receivers of the hooks of steps and checkpoints, in this order.
        step_group: Ranks that take or skip an optimizer step together; None are all.
        meeting: Whether all ranks wait for each other before the next batch; None: always.
        shares_data: Whether a run of one rank reads a part of the data.
        why_alone: Reason for warnings where this rank shares its module with no other.

    Raises:
        ValueError: An option has a value outside its choices.
        TypeError: An option does not exist, or ``units`` selects nothing that is a module.
    """

    given: dict[str, object]  # options that differ from their defaults
    step_group: dist.ProcessGroup | None = None
    shares_data = False
    meeting: Callable[[], bool] | None = None
    why_alone = "there is one rank, which sends nothing"
    _norm: GradientNorm | None = None  # where torch's own cannot be used

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse hooks that strategies had before their parts did: nothing calls them."""
        super().__init_subclass__(**kwargs)
        moved = (*vars(StrategyPart), "after_skipped_step", "extra_kinds")
        # also from a mixin, but not of a class that is a part itself, nor what Lightning calls
        found = [n for n in moved if hasattr(cls, n) and not hasattr(FullyShardedStrategy, n)]
        if found and not issubclass(cls, StrategyPart):
            raise TypeError(
                f"`{cls.__name__}.{found[0]}` would never be called: it is a hook of a "
                "`lq_lightning.strategies.StrategyPart`. Override it there, and append an instance "
                "to `self.parts` in `__init__`."
            )

    def __new__(cls, *args: Any, **kwargs: Any) -> FullyShardedStrategy:
        """Refuse unknown options, and note the given ones."""
        check_option_names(cls, kwargs)
        strategy = super().__new__(cls)
        strategy.given = given_options(cls, args, kwargs)
        return strategy

    def __init__(self, options: FSDPOptions) -> None:
        owner = type(self).__name__
        options.check(owner)
        self._attached_module: LightningModule | None = None
        self._default_precision = FullyShardedPrecision()
        self._timeouts = Timeouts(*options.timeouts(owner))
        super().__init__(
            save_distributed_checkpoint=options.save_distributed_checkpoint,
            process_group_backend=options.process_group_backend,
            timeout=self._timeouts.start,
        )
        self._options = options
        self._failures = Failures(self)
        self._steps = OptimizerSteps(options.skip_nonfinite_steps, options.reduce_every_microbatch)
        self._collectives = QuantizedCollectives(self, options, self.given)
        self._tensor = TensorRanks(owner, options, self._collectives)
        known = OptionsOfRun(owner, shown_options(type(self), self.given))
        self.parts: list[StrategyPart] = [known, self._steps, self._collectives, self._tensor]
        self._checkpointer = Checkpointer(
            self,
            self.model_layout,
            self.parts,
            distributed=options.save_distributed_checkpoint,
            verify=options.verify_checkpoints,
        )

    # --- for subclasses -------------------------------------------------------------------------

    def settings(self) -> dict[str, object]:
        """Options that sharding bakes into a module and that a later Trainer cannot change."""
        return {
            "precision": self._fsdp_precision.precision,
            "reshard_after_forward": self._options.reshard_after_forward,
            "node_size": self.topology().node_size if self.world_size > 1 else 1,
            "tensor_parallel_size": self._tensor.size,
            "local_steps": None,
            "min_quantized_numel": self._options.min_quantized_numel,
            "weights": self._collectives.weights,
            "gradients": self._collectives.gradients,
            "seed": self._options.seed,
        }

    def on_sharded(self, module: LightningModule) -> Any:
        """Called once per module after it was sharded; the result stays with the module."""
        return self._collectives.install(module, self.replica_topology(), None)

    def unit_selector(self) -> UnitSelector | ChosenUnits:
        """Selection of the modules that are gathered as one piece."""
        return self._options.units

    def place_module(self, module: LightningModule) -> None:
        """Shard the module and move it; called by each Trainer method, also for a placed module."""
        self._parallelize(module, self._draft_plans(module))
        self._shard_once(module)
        initialize_root(cast(FSDPModule, module))
        register_evaluation_steps(module)

    def topology(self) -> Topology:
        """Ranks and nodes of this run that hold the same tensor-parallel shards."""
        size = self._options.node_size or self.num_processes
        ranks = Topology(world_size=self.world_size, rank=self.global_rank, node_size=size)
        return data_topology(type(self).__name__, ranks, self._tensor.size)

    def model_group(self) -> dist.ProcessGroup | None:
        """Ranks that share the tensors of a module, over all axes of their mesh; None are all."""
        return None

    def data_group(self) -> dist.ProcessGroup:
        """Ranks with other data and the same parameters."""
        return self.device_mesh.get_group(DATA)

    def same_batch_groups(self) -> list[dist.ProcessGroup]:
        """Groups of ranks with the same data, one for each axis of a mesh; empty if all differ."""
        return [self.device_mesh.get_group(TENSOR)] if self._tensor.size > 1 else []

    def replica_topology(self) -> Topology:
        """Ranks and nodes that share the shards of a module."""
        return self.topology()

    def model_layout(self) -> ModelLayout:
        """How the attached module is spread over the ranks."""
        return ModelLayout(module=self._require_module())

    # --- public state ---------------------------------------------------------------------------

    @property
    def communication(self) -> QuantizedCommunication | None:
        """The quantized collectives in use; ``None`` on one rank, before ``setup``, or if off."""
        return self._collectives.communication

    @property
    def sharding_plan(self) -> ShardingPlan | None:
        """The units of the attached module; ``None`` before ``setup`` and on one rank."""
        return None if self._sharded is None else self._sharded.plan

    @property
    def num_skipped_steps(self) -> int:
        """Optimizer steps that ``skip_nonfinite_steps`` left out."""
        return self._steps.num_skipped

    def quantization_report(self) -> QuantizationReport | None:
        """Report bytes and errors of the quantized collectives, and the skipped steps."""
        if self.communication is None:
            return None
        report = self.communication.quantization_report()
        return replace(report, totals={"skipped_steps": self.num_skipped_steps, **report.totals})

    def measure_quantization_errors(self, measure: bool) -> None:
        """Measure the errors of the quantized collectives, or no longer."""
        if self.communication is not None:
            self.communication.measure_quantization_errors(measure)

    def _require_module(self) -> LightningModule:
        if self.lightning_module is None:
            raise RuntimeError(
                "the strategy has no LightningModule yet: call a Trainer method first"
            )
        return self.lightning_module

    @property
    def _is_sharded(self) -> bool:
        return isinstance(self._attached_module, FSDPModule)

    @property
    def _sharded(self) -> ShardedModule | None:
        return sharded(self._attached_module)

    @property
    def _manual(self) -> RootForward | None:
        """The forward of a module whose ``training_step`` runs backward and optimizers itself."""
        module, record = self._attached_module, self._sharded
        automatic = module is None or module.automatic_optimization
        return None if automatic or record is None else record.forward

    @property
    def _agreement(self) -> PackedAgreement | None:
        return None if self._sharded is None else self._sharded.agreement

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
        prepare_for_restarts()
        # a single device does not reset the seed before training, so neither does one rank
        with isolate_rng() if self.world_size == 1 else nullcontext():
            super()._setup_distributed()

    def setup_environment(self) -> None:
        """Start the process group and the device mesh, once."""
        if self.world_size > 1 or self._tensor.size > 1:
            self.topology()
            # before they copy the whole model
            check_callbacks(self._require_module().trainer.callbacks)  # type: ignore[attr-defined]
        self._failures.begin_run()
        self._timeouts.begin_run()
        check_device(self, synchronizes_layers=self._layer_sync is not None)
        self._checkpointer.begin_run()
        self._fsdp_precision.device_type = self.root_device.type
        self._fsdp_precision.look_at_gradients = self._steps.examine if self._steps.skips else None
        with self._failures.explained():
            if self._device_mesh is not None and dist.is_initialized():
                Strategy.setup_environment(self)
                prepare_groups(self._timeout)
            else:
                self._setup_distributed()
                prepare_groups(self._timeout)
                size = self._tensor.size
                axes = {DATA: self.world_size // size, TENSOR: size}
                self._device_mesh = shared_mesh(self.root_device.type, axes)
        set_device_mesh(self._require_module(), self._device_mesh)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Context in which ``trainer.init_module`` and ``configure_model`` create tensors."""
        module = self._attached_module if self._tensor.size > 1 else None
        with (
            keeps_parameters(module),
            super().tensor_init_context(empty_init)
            if self.world_size > 1
            else Strategy.tensor_init_context(self, empty_init),
        ):
            yield

    # --- setup ----------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Shard the module if that was not done yet, then make the optimizers."""
        module, fits = self._require_module(), trainer.state.fn == TrainerFn.FITTING
        replace_checkpoint_links(trainer, replace_link)
        if fits:
            check_start(trainer.callbacks, ALL_RANKS)  # type: ignore[attr-defined]
        shared = self.world_size > 1
        if not shared and not any(isinstance(m, FSDPModule) for m in module.modules()):
            self._setup_single(trainer, module)
            return
        if self.accelerator is None:
            raise AssertionError("the Trainer sets the accelerator before `setup`")
        self._failures.heed_stop_signal(trainer, self.meeting)
        self.accelerator.setup(trainer)
        check_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
        with self._failures.explained():
            self.place_module(module)
            self._checkpointer.run_deferred_load()  # before optimizers are made, as on one device
            self._tensor.begin_run(module, self.device_mesh, self.model_group(), self.root_device)
        for submodule in module.modules():
            if isinstance(submodule, Metric):
                submodule.to(self.root_device)
        self._gather_metrics()
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fits:
            if self._is_sharded:
                for optimizer in self.optimizers:
                    check_optimizer(optimizer)
                ranks = RankGroup(group=self.model_group())
                state.check_alike(module, self.optimizers, ranks)
            move_optimizers_to_device(self.optimizers, self.root_device)

    def _gather_metrics(self) -> None:
        """Let metrics, also those that hooks have made, count each batch once."""
        if self._tensor.size > 1:
            gather_over_data_ranks(self._require_module(), self.data_group())

    def _setup_single(self, trainer: Trainer, module: LightningModule) -> None:
        self._failures.heed_stop_signal(trainer, None)
        if not self.shares_data:
            use_own_sampling(trainer)
        initialize_meta_tensors(module, self.root_device)
        if self._options.units is not None or self._options.compile_units:
            plan = find_units(module, self._options.units)
            if self._options.compile_units:
                compile_units(module, plan)
        Strategy.setup(self, trainer)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        self._checkpointer.run_deferred_load()  # only called on the single-device path
        return model

    def _draft_plans(self, module: LightningModule) -> tuple[Draft, ...]:
        """What of a whole module is split for tensor-parallel ranks, as the option says."""
        wanted = self._options.tensor_parallel and self._tensor.size > 1 and not sharded(module)
        return draft_plans(module, self._tensor.size, owner=type(self).__name__) if wanted else ()

    def _parallelize(self, module: LightningModule, drafts: Sequence[Draft]) -> None:
        if drafts:
            plan = parallelize_automatically(module, self.device_mesh[TENSOR], drafts)
            rank_zero_info(plan.summary())

    def _shard_once(self, module: LightningModule) -> None:
        known = sharded(module)
        if known is not None:
            check_settings(module, known.settings, self.settings())
            return
        check_meshes(module, self.device_mesh)
        known = shard(
            module,
            self.unit_selector(),
            self._options,
            self._fsdp_precision,
            self.device_mesh[DATA, TENSOR],
            self.model_group(),
            self.root_device,
            self._layer_sync,
        )
        self._tensor.share_values(module, self.device_mesh)
        known.settings, known.extra = self.settings(), self.on_sharded(module)
        remember(module, known)
        rank_zero_info(known.plan.summary())

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers and check that they update the sharded parameters."""
        super().setup_optimizers(trainer)
        module = self._require_module()
        self._steps.set_up(module, self.optimizers)
        self._tensor.set_up(self.optimizers)
        # `fully_shard` without `mesh` makes one of its own
        meshes = {p.device_mesh for p in module.parameters() if isinstance(p, DTensor)}
        if self._tensor.size > 1 or len(meshes) > 1:
            self._norm = self.make_norm()
            self._fsdp_precision.clip_norm = self._norm.clip
        if self._is_sharded:
            for index, optimizer in enumerate(self.optimizers):
                state.check_optimizer(module, optimizer, index)
        if self.replica_topology().world_size == 1:
            names = ("weights", "gradients", "replica")
            self._collectives.warn_without_effect(names, self.why_alone)
        if self._tensor.size == 1:
            why = "`tensor_parallel_size` is 1"
            self._collectives.warn_without_effect(("tensor_parallel",), why)
        self._collectives.follow(self.optimizers)

    def teardown(self) -> None:
        """Finish saves; on one rank also move the model to the CPU, as a single device does."""
        module = self.lightning_module
        # a module that was refused on the meta device has no values to move
        on_meta = module is not None and any(p.is_meta for p in module.parameters())
        if self._is_sharded or on_meta:
            ModelParallelStrategy.teardown(self)
            self.checkpoint_io.teardown()
        else:
            ParallelStrategy.teardown(self)
        self._failures.requeue()

    def process_dataloader(self, dataloader: object) -> object:
        """Let ranks that need the same batches draw the same."""
        dataloader = super().process_dataloader(dataloader)
        if groups := self.same_batch_groups():
            draw_alike(dataloader, groups, self.distributed_sampler_kwargs["rank"])
        return dataloader

    # --- forward --------------------------------------------------------------------------------

    @contextmanager
    def _guard(self, *arguments: Any) -> Generator[None, None, None]:
        """Leave FSDP2 usable after an error (such as out of memory), explain a lost rank.

        ``arguments`` are those of a step: the batch comes first.
        """
        check_values(self._require_module())
        with self._failures.explained():
            try:
                if arguments:
                    self._tensor.check_batch(arguments[0])
                yield
            except Exception as error:
                if not is_lost_rank(error):
                    # the others wait in a collective, and will find the note when it fails
                    self._failures.tell_others(error)
                    if self._sharded is not None:
                        self._drop_step(self._sharded)
                raise

    def _drop_step(self, record: ShardedModule) -> None:
        for part in self.parts:  # first: FSDP2's reset frees memory that reductions write to
            part.on_step_error()
        if record.agreement is not None:
            record.agreement.forget()
        reset_iteration(self._require_module())

    @contextmanager
    def root_forward(self) -> Generator[None, None, None]:
        """Keep the root's own parameters gathered, and in their modules, for several calls.

        A hook may call submodules without it, as in ``self.net(x)``; each call then gathers by
        itself. This gathers once for all of them, for example around ``self.model.generate(...)``,
        and for code that reads parameters of the root without a call. All ranks together; without
        gradients, except in ``training_step``. Harmless where nothing is sharded.
        """
        record = self._sharded
        with nullcontext() if record is None else record.forward.gathered():
            yield

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._guard(*args):
            result = step(*args, **kwargs)
        if self._is_sharded:
            # hooks see shards, as in training; FSDP2 would keep the root gathered
            show_shards(self._attached_module)
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step``, whose calls of submodules are in a forward of the root unit."""
        record = self._sharded
        with self._guard(*args):
            if record is None:
                return super().training_step(*args, **kwargs)
            with record.forward.step() as finish:
                return finish(super().training_step(*args, **kwargs))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``validation_step`` as a forward of the root unit."""
        return self._evaluate(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``test_step`` as a forward of the root unit."""
        return self._evaluate(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``predict_step`` as a forward of the root unit; predictions have whole logits."""
        result = self._evaluate(super().predict_step, *args, **kwargs)
        return apply_to_collection(result, ShardedLogits, ShardedLogits.full_tensor)

    # --- backward -------------------------------------------------------------------------------

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Check the loss; end the forward before a ``manual_backward``."""
        if self._is_sharded:
            check_loss(closure_loss)
        if self._manual is not None:
            self._manual.before_backward(closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Show shards with their gradients to the code after a ``manual_backward``."""
        if self._manual is not None:
            self._manual.after_backward()

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Backward, with an explanation if another rank is lost."""
        with self._guard():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Accumulate gradients of the backward passes inside without reducing them.

        Lightning enters it for all but the last micro-batch of ``accumulate_grad_batches``. With
        manual optimization write ``with self.trainer.strategy.block_backward_sync():`` around
        ``self.manual_backward(loss)`` in all but the last micro-batch.
        """
        return self._steps.without_reduction()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Drop the gradients of an interrupted accumulation; no longer wait as at the start."""
        self._timeouts.start_batch()
        self._steps.start_batch()

    # --- optimizer ------------------------------------------------------------------------------

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the closure (forward and backward) and step, unless gradients are not finite."""
        for part in self.parts:
            part.before_optimizer_step(optimizer)
        manual, agreement = self._manual, self._agreement

        def run() -> Any:
            result = closure()
            if manual is not None:
                manual.before_update()
            if agreement is not None:
                agreement.check()  # raises on all ranks, before a wrong update
            self._tensor.check_gradients()
            return result

        with self._failures.explained():
            if self._steps.skips:
                finish = partial(
                    self._fsdp_precision.run_closure, self._require_module(), optimizer, run
                )
                result, stepped = self._steps.step_if_finite(
                    optimizer, finish, self.root_device, self.step_group, **kwargs
                )
            else:
                result, stepped = super().optimizer_step(optimizer, run, model, **kwargs), True
            for part in self.parts:
                part.after_optimizer_step(stepped)
            if manual is not None:
                manual.after_update()
        return result

    # --- checkpoints ----------------------------------------------------------------------------

    # the Trainer passes `weights_only` on only then; the model is loaded after setup all the same
    restore_checkpoint_after_setup = False
    lightning_restore_optimizer = True  # by `load_optimizer_state_dict`, only while fitting

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Writes and reads single-file checkpoints."""
        self._checkpoint_io = self._checkpointer.complete_io(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def whole_state_dict(self) -> dict[str, Any]:
        """The state of the whole model on the first rank, nothing elsewhere; all ranks call it."""
        return self._checkpointer.whole_module_state()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state, with which a save begins; empty if no save can follow."""
        if not self._failures.can_save(self._require_module()):
            return {}
        for part in self.parts:  # may start collectives: all ranks are here
            part.before_save()
        return self._checkpointer.module_state()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state; empty if no save can follow."""
        if self._failures.why_not_saved is not None:
            return {}
        return self._checkpointer.optimizer_state(optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; where a failed ``fit`` leaves none, warn why."""
        if self._failures.why_not_saved is not None:
            self._failures.warn_not_saved(filepath)
            return
        if self._agreement is not None:
            self._agreement.finish()  # gradients of other parameters must not get into a file
        sign(checkpoint)
        self._checkpointer.save(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint, unless its replacement is not saved."""
        if self._failures.why_not_saved is None:
            self._checkpointer.move_links(filepath)
            super().remove_checkpoint(filepath)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks, but not after a save that did not take place."""
        if self._failures.why_not_saved is None:
            super().barrier(name)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide with all ranks, but alone after a save that did not take place."""
        if self._failures.why_not_saved is not None:
            return decision
        return super().reduce_boolean_decision(decision, all)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint file or directory, see :meth:`Checkpointer.load`."""
        checkpoint = self._checkpointer.load(checkpoint_path, weights_only)
        check_signature(checkpoint_path, checkpoint)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model's state now, or once the model is sharded."""
        self._checkpointer.load_model(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of all optimizers, then this package's own entry."""
        self._checkpointer.load_optimizers(checkpoint)

    # --- gradients ------------------------------------------------------------------------------

    def make_norm(self) -> GradientNorm:
        """Norm of the gradients of all optimizers."""

        def parameters() -> Iterator[nn.Parameter]:
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    yield from group["params"]

        return GradientNorm(parameters, self.device_mesh, self.step_group)

    def gradient_norm(self) -> Tensor:
        """The L2 norm of all gradients of the model, each element counted once.

        For hooks between backward and the optimizer step, on all ranks of the run together.

        Returns:
            A float32 scalar, the same on every rank.

        Raises:
            RuntimeError: There is no pipeline and no tensor parallelism, or no optimizer.
        """
        if self._norm is None:
            raise RuntimeError(
                "`gradient_norm` is for the hooks of `fit` with several pipeline stages or "
                "tensor-parallel ranks. Elsewhere use `lq_lightning.grad_norm(module)`."
            )
        return self._norm.total()

    def reduce(
        self,
        tensor: Tensor | Any,
        group: Any | None = None,
        reduce_op: dist.ReduceOp | str | None = "mean",
    ) -> Tensor:
        """Reduce over data-parallel ranks by default; tensor-parallel ranks have equal values."""
        if group is None and self._tensor.size > 1:
            group = self.data_group()
        return super().reduce(tensor, group, reduce_op)

    # --- begin, end, errors ---------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Note that there is something to continue from here on."""
        self._failures.training_begins()
        self._gather_metrics()

    def on_train_end(self) -> None:
        """Check the last gradients; stop all ranks after a signal that no batch followed."""
        if self._agreement is not None:
            self._agreement.finish()
        self._tensor.check_last_batch()
        self._failures.training_ends()

    def on_validation_end(self) -> None:
        """Check the last batch."""
        self._tensor.check_last_batch()

    on_test_end = on_predict_end = on_validation_end

    def _begin_evaluation(self) -> None:
        """Let all ranks evaluate with the same buffers, such as running statistics."""
        self._gather_metrics()
        if self._is_sharded and self.world_size > 1:
            broadcast_module_states(
                self._require_module(), parameters=False, group=self.data_group()
            )

    on_validation_start = on_test_start = on_predict_start = _begin_evaluation

    def on_exception(self, exception: BaseException) -> None:
        """Say which rank failed and whether another is the cause, or explain a use of shards."""
        self._failures.explain(exception)


check_precision_with(FullyShardedStrategy, FullyShardedPrecision.check_name)
