"""The half of ``quantized_pipeline`` that runs a module whose layers lie on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lq_lightning._compat.lightning import accumulation_window
from lq_lightning.checkpoint import state
from lq_lightning.checkpoint.by_name import by_name, by_position
from lq_lightning.checkpoint.ranks import RankGroup
from lq_lightning.foundation.groups import distrust_groups
from lq_lightning.foundation.parameters import clean_name
from lq_lightning.strategies.pipelines.checkpoints import (
    gather_parts,
    in_order,
    name_positions,
    whole_groups,
)
from lq_lightning.strategies.pipelines.data import draw_alike
from lq_lightning.strategies.pipelines.gradients import PipelineGradients, SharedTensor
from lq_lightning.strategies.pipelines.options import (
    PipelineOptions,
    check_stage_optimizer,
    make_stage_optimizer,
)
from lq_lightning.strategies.pipelines.ranks import PipelineRanks
from lq_lightning.strategies.pipelines.run import PipelineRun
from lq_lightning.strategies.pipelines.stages import CutModule, cut_of
from lq_lightning.strategies.quantized_fsdp import QuantizedFSDPStrategy

__all__ = ["PipelinedStrategy"]


class PipelinedStrategy(QuantizedFSDPStrategy):
    """The half of :class:`QuantizedPipelineStrategy` that runs; the other sets what it declares.

    Without ``_ranks`` there is no pipeline, and everything is as in the parent class.
    """

    _ranks: PipelineRanks | None = None
    _run: PipelineRun | None = None
    _shared: tuple[SharedTensor, ...] = ()
    _gradients_of_stage: PipelineGradients | None = None

    @property
    def _cut(self) -> CutModule | None:
        return cut_of(self._attached_module)

    # --- checkpoints ------------------------------------------------------------------------------

    @property
    def shard_ranks(self) -> RankGroup:
        """The ranks of this rank's stage."""
        return RankGroup(group=None if self._ranks is None else self._ranks.stage_group)

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names of tied parameters here -> their first names in the whole model."""
        return {} if self._cut is None else self._cut.aliases

    @property
    def ties(self) -> Mapping[str, str]:
        """Further names of tied parameters of the whole model -> their first ones."""
        return super().ties if self._cut is None else self._cut.ties

    @property
    def _holds_part(self) -> bool:
        return self._is_sharded or self._cut is not None

    def join_parts(self, part: dict[str, Any]) -> dict[str, Any]:
        """Collect all stages on the first rank, in the order of the whole model."""
        if self._ranks is None or self._cut is None:
            return part
        if not self.shard_ranks.is_first:
            return {}
        joined = gather_parts(part, self._ranks.control_group)
        for name, first in self._cut.ties.items():
            if name in joined and first in joined:
                joined[name] = joined[first]  # one tensor, in the file too
        order = self._cut.order
        names = sorted(joined, key=lambda name: order.get(clean_name(name), len(order)))
        return {name: joined[name] for name in names}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As without stages; groups have their parameters in the order of the whole model."""
        found = super().optimizer_state(optimizer)
        if self._cut is not None and self.saves_sharded and found:
            found["param_groups"] = in_order(found["param_groups"], self._cut.order)
        return found

    def whole_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Collect the states of all stages on the first rank, keyed as in one process."""
        if self._ranks is None or self._cut is None:
            return super().whole_optimizer_state(optimizer)
        own = state.optimizer_state_by_name(self._require_module(), optimizer, self.aliases)
        if not own:
            return {}
        groups = whole_groups(own, self.checkpoint_ranks, self._cut.order)
        keep = self.shard_ranks.is_first
        states = state.gather_tensors(own["state"], keep)
        if not keep:
            return {}
        states = gather_parts(states, self._ranks.control_group)
        return by_position(states, groups) if self.checkpoint_ranks.is_first else {}

    def load_whole_optimizer_state(self, optimizer: Optimizer, whole: Mapping[str, Any]) -> None:
        """Load this stage's part of what one process or all stages saved."""
        module = self._require_module()
        own = state.optimizer_state_by_name(module, optimizer, self.aliases)
        if self._cut is None or not own:
            super().load_whole_optimizer_state(optimizer, whole)
            return
        named = by_name(whole, self._cut.order)
        if named is None:
            groups = whole_groups(own, self.checkpoint_ranks, self._cut.order)
            named = name_positions(whole, groups, optimizer)
        state.load_optimizer(module, optimizer, named, self.aliases, module.strict_loading)

    def on_weights_loaded(self) -> None:
        """Nothing that was sent before is referred to."""
        super().on_weights_loaded()
        if self._run is not None:
            self._run.forget()

    def extra_state(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """And the seed of the run, from which steps get their random numbers."""
        values, tensors = super().extra_state()
        if self._run is not None:
            values["seed_of_steps"] = self._run.seeds.of_run
        return values, tensors

    def load_extra_state(
        self, values: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Continue with what is saved; samples that codecs remember are not."""
        super().load_extra_state(values, tensors)
        if self._run is not None:
            self._run.seeds.of_run = int(values.get("seed_of_steps", self._run.seeds.of_run))
        if self._run is not None and self._run.remembers:
            rank_zero_warn(
                "Checkpoints do not hold the hidden states that the codec 'aq_sgd' keeps of "
                "samples: each sample travels in full precision once again, so that the first "
                "epoch is slower, and the run does not continue bit for bit."
            )

    def on_exception(self, exception: BaseException) -> None:
        """Let no later run receive what this one has sent."""
        if self._run is not None and self._run.engine.has_failed:
            distrust_groups()
        super().on_exception(exception)

    def teardown(self) -> None:
        """Free what codecs keep of samples, too."""
        if self._run is not None:
            self._run.forget()
        super().teardown()

    # --- data -------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Let the ranks of a pipeline draw the same batches."""
        dataloader = super().process_dataloader(dataloader)
        if self._ranks is not None:
            draw_alike(dataloader, self._ranks)
        return dataloader

    def vocabulary(self, module: LightningModule) -> list[nn.Parameter] | None:
        """Embeddings and heads of the whole model that this rank has a part of."""
        if self._cut is None:
            return super().vocabulary(module)
        return self._cut.parameters_of(module, self._cut.vocabulary)

    def full_precision_states(self, quantize_embeddings: bool) -> list[nn.Parameter]:
        """Parameters whose optimizer states must not be rounded.

        Those that other stages hold, too, have to be updated alike there; and what is an embedding
        in the whole model may be a mere matrix in this part of it.
        """
        if self._cut is None:
            return []
        names = frozenset(name for shared in self._cut.plan.shared for name in shared.names)
        if not quantize_embeddings:
            names |= self._cut.embeddings
        return self._cut.parameters_of(self._require_module(), names)

    # --- gradients --------------------------------------------------------------------------------

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizer of this rank's stages.

        Raises:
            NotImplementedError: It cannot run in parts.
            ValueError: On all ranks: one has nothing to give to it.
        """
        make = partial(super().setup_optimizers, trainer)
        if self._ranks is None:
            make()
        else:
            self.checkpoint_ranks.together(partial(make_stage_optimizer, make))
        self._fsdp_precision.clip_norm = self._gradients_of_stage = None
        if self._ranks is None:
            self._say_that_nothing_is_cut()
            return
        if all(shared.codec is None for shared in self._shared):
            why = "no weights of `min_quantized_numel` elements are on several ranks"
            self._warn_without_effect(("tied_gradients",), why)
        self._deferred = None  # a schedule always defers
        for optimizer in self.optimizers:
            check_stage_optimizer(type(self).__name__, optimizer)
        if self.optimizers:
            module, shared = self._require_module(), self._shared
            self._gradients_of_stage = PipelineGradients(module, self.optimizers[0], shared)
            self._fsdp_precision.clip_norm = self._gradients_of_stage.clip

    @property
    def why_nothing_travels(self) -> str:
        """Why no other rank shares what this one trains, if none does."""
        if self._ranks is None:
            return super().why_nothing_travels
        return "each stage is on one rank, so that its weights and gradients do not travel"

    def _say_that_nothing_is_cut(self) -> None:
        why = "with one rank along the pipeline the model is not cut, and nothing crosses stages"
        names = [field.name for field in fields(PipelineOptions) if field.name != "pipeline_size"]
        self._warn_without_effect(names, why)
        if "pipeline_size" not in self.given:
            rank_zero_info(f"{type(self).__name__}: {why}")

    def gradient_norm(self) -> Tensor:
        """The L2 norm of all gradients of the model, tied ones counted once.

        For hooks between backward and the optimizer step, on all ranks of the run together.

        Returns:
            A float32 scalar, the same on every rank.

        Raises:
            RuntimeError: There is no pipeline, or no optimizer.
        """
        if self._gradients_of_stage is None:
            raise RuntimeError(
                "`gradient_norm` is for the hooks of `fit` with several pipeline stages. Elsewhere "
                "use `lq_lightning.grad_norm(module)`."
            )
        return self._gradients_of_stage.total_norm()

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Hand out the gradients, which the schedule computed within ``training_step``."""
        gradients, module = self._gradients_of_stage, self._require_module()
        if gradients is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        precision = self._fsdp_precision
        last = accumulation_window(module.trainer).last
        self.pre_backward(closure_loss)
        loss = precision.pre_backward(closure_loss, module)
        with self._guard():
            with precision.handing_out(module):
                gradients.give_back(reduce=last or self._reduce_every_microbatch)
            if last:
                gradients.sum_shared()
        loss = precision.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    # --- steps ------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward passes of all micro-batches; return their mean loss."""
        gradients, run = self._gradients_of_stage, self._run
        if gradients is None or run is None:
            return super().training_step(*args, **kwargs)
        module = self._require_module()
        trainer = module.trainer
        with self._guard():
            count = run.prepare("training_step", args, training=True)
            gradients.start(accumulation_window(trainer).first)
            scale = 1.0 / (count * trainer.accumulate_grad_batches)
            with self._fsdp_precision.adding_up(module):
                result = run.train(scale)
            gradients.hold()
        return result

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = self._run
        if run is None:
            return super()._evaluate(step, *args, **kwargs)
        with self._guard():
            run.prepare(step.__name__, args, training=False)
            result = run.evaluate(everywhere=step.__name__ == "predict_step")
        if self._is_sharded:
            self._show_shards()
        return result
