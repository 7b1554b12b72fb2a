"""The choices of a run that memory, time and loss depend on: read from a Trainer, and exchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from lq_lightning._compat.lightning import ddp_hook_of
from lq_lightning.activations import ActivationPolicy, MemoryBudget
from lq_lightning.callbacks import ActivationQuantization, AdaptiveBits
from lq_lightning.callbacks.model_setup import AfterConfigureModel
from lq_lightning.codecs import CodecSpec
from lq_lightning.data_parallel import (
    GradientQuantization,
    LocalSteps,
    Topology,
    WeightQuantization,
    quantized_all_reduce_hook,
)
from lq_lightning.optim import OptimizerQuantization
from lq_lightning.planning.config import as_list
from lq_lightning.planning.machine import Machine
from lq_lightning.plugins import QuantizedPrecision
from lq_lightning.strategies import QuantizedFSDPStrategy, QuantizedPipelineStrategy
from lq_lightning.strategies.parts import choose_quantization, read_options
from lq_lightning.strategies.pipelines.stages import stage_topology
from lq_lightning.strategies.tensor_parallel import data_topology


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Choices of a run; names are those of the options that they are given to.

    Attributes:
        strategy: ``"quantized_fsdp"``, ``"quantized_pipeline"``, or the class of another one, which
            is left as it is.
        weights: As in ``QuantizedFSDPStrategy``, and so up to ``backward_codec``.
        pipeline_size: Ranks along the pipeline; None are all.
        recipe: Of ``ActivationQuantization``; None without one.
        budget: Of ``ActivationQuantization``.
        adapt: Of ``ActivationQuantization``.
        offload: Of ``ActivationQuantization``.
        checkpointing: Whether the model recomputes its layers in backward
            (``gradient_checkpointing_enable()``).
        precision: Of the Trainer or of ``QuantizedPrecision``.
        optimizer_state: Of ``QuantizedPrecision``; ``"none"`` without one.
        gradient_buffer: Of ``QuantizedPrecision``.
        accumulates: Whether a step has several micro-batches.
        all_reduce: Whether DDP reduces gradients in 8 bits.
        learned_bits: Whether ``AdaptiveBits`` trains widths.
        others: All other given options of the strategy.
    """

    strategy: str = "quantized_fsdp"
    weights: str | WeightQuantization = "auto"
    gradients: str | GradientQuantization = "auto"
    replica: str = "auto"
    local_steps: int | LocalSteps | None = None
    reduce_every_microbatch: bool = False
    tensor_parallel_size: int = 1
    tensor_parallel: str | None = None
    pipeline_size: int | None = 1
    forward_codec: Any = "tah5"
    backward_codec: Any = "int5"
    recipe: str | ActivationPolicy | None = None
    budget: MemoryBudget | int | float | str | None = None
    adapt: bool | float | None = None
    offload: float | str | None = None
    checkpointing: bool = False
    precision: str = "32-true"
    optimizer_state: str | OptimizerQuantization = "none"
    gradient_buffer: str | CodecSpec = "none"
    accumulates: bool = False
    all_reduce: bool = False
    learned_bits: bool = False
    others: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, trainer: Trainer, module: LightningModule | None = None) -> RunOptions:
        """Read the choices of a Trainer that has not run yet, and of its module."""
        strategy, plugin = trainer.strategy, trainer.precision_plugin
        given = dict(getattr(strategy, "given", {}))
        own = {name: given.pop(name) for name in _OF_STRATEGY if name in given}
        pipeline = isinstance(strategy, QuantizedPipelineStrategy)
        name = getattr(strategy, "strategy_name", None)
        if not isinstance(strategy, (QuantizedFSDPStrategy, QuantizedPipelineStrategy)):
            name, own, given = type(strategy).__name__, {}, {}
        own["pipeline_size"] = own.get("pipeline_size") if pipeline else 1
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        kept = next((c for c in callbacks if isinstance(c, ActivationQuantization)), None)
        codes: dict[str, Any] = {} if kept is None else kept.given
        own |= {name: codes.get(name) for name in _OF_ACTIVATIONS}
        states = plugin.given if isinstance(plugin, QuantizedPrecision) else {}
        passes = getattr(strategy, "backwards_per_batch", 1) if not pipeline else 2
        return cls(
            strategy=str(name),
            **own,
            checkpointing=any(
                getattr(each, "gradient_checkpointing", False) is True
                for each in (() if module is None else module.modules())
            ),
            precision=str(plugin.precision),
            optimizer_state=states.get("optimizer_state", "none"),
            gradient_buffer=states.get("gradient_buffer", "none"),
            accumulates=passes * trainer.accumulate_grad_batches > 1,
            all_reduce=ddp_hook_of(strategy) is quantized_all_reduce_hook,
            learned_bits=any(isinstance(c, AdaptiveBits) for c in callbacks),
            others=given,
        )

    @property
    def is_ours(self) -> bool:
        """Whether the strategy is one of this package."""
        return self.strategy in ("quantized_fsdp", "quantized_pipeline")

    @property
    def stochastic_rounding(self) -> bool:
        """Whether bf16 weights are rounded stochastically."""
        states = self.optimizer_state
        return isinstance(states, OptimizerQuantization) and states.stochastic_rounding

    # --- where it runs ----------------------------------------------------------------------------

    def stages(self, cluster: Machine) -> int:
        """Ranks along the pipeline."""
        ranks = cluster.nodes * cluster.gpus_per_node
        return self.pipeline_size or max(1, ranks // self.tensor_parallel_size)

    def __post_init__(self) -> None:
        """Refuse nodes that come and go.

        Raises:
            ValueError: ``local_steps`` has ``meet_at``.
        """
        if getattr(self.local_steps, "meet_at", None) is not None:
            raise ValueError(
                "`LocalSteps(meet_at=...)` cannot be planned, since nodes come and go: leave out "
                "`meet_at`, and give --nodes as many as take part most of the time."
            )

    def topology(self, cluster: Machine) -> Topology:
        """Ranks that share the shards of a module.

        Raises:
            ValueError: ``tensor_parallel_size`` or ``pipeline_size`` does not divide them.
        """
        per_node, size = cluster.gpus_per_node, self.stages(cluster)
        world = cluster.nodes * per_node
        if world % (size * self.tensor_parallel_size):
            raise ValueError(
                f"pipeline_size={size} and tensor_parallel_size={self.tensor_parallel_size} do not "
                f"divide the {world} ranks of {cluster.nodes} x {per_node} GPUs."
            )
        if self.local_steps is not None and cluster.nodes > 1:
            ranks = Topology(world_size=per_node, rank=0, node_size=per_node)
        else:
            ranks = stage_topology(world, 0, size, self.others.get("node_size") or per_node)
        return data_topology(self.strategy, ranks, self.tensor_parallel_size)

    def collectives(
        self, cluster: Machine
    ) -> tuple[WeightQuantization | None, GradientQuantization | None]:
        """What ``"auto"`` stands for there; None: full precision."""
        topology = self.topology(cluster)
        if topology.world_size == 1 or not self.is_ours:
            return None, None
        asked = read_options(self.weights, self.gradients, self.replica)
        return choose_quantization(*asked, topology, cluster.nvlink)[:2]

    def in_force(self, cluster: Machine) -> RunOptions:
        """The same by what it does there: what ``"auto"`` stands for, and nothing without effect.

        Raises:
            ValueError: as :meth:`topology`.
        """
        topology, (weights, gradients) = self.topology(cluster), self.collectives(cluster)
        if weights is not None and topology.node_size == 1:
            weights = replace(weights, replica="full")
        nodes_alone = cluster.nodes > 1 and self.strategy == "quantized_fsdp"
        reduces = self.accumulates and self.is_ours and topology.world_size > 1
        return replace(
            self,
            weights=weights or "none",
            gradients=gradients or "none",
            replica="auto",
            local_steps=self.local_steps if nodes_alone else None,
            reduce_every_microbatch=reduces and self.reduce_every_microbatch,
            gradient_buffer=self.gradient_buffer if self.accumulates else "none",
        )

    # --- another run ------------------------------------------------------------------------------

    def change(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments of a Trainer with these choices; other callbacks and plugins stay.

        Strategy, precision, callbacks and plugins of this package are made anew: no two Trainers
        can share one.
        """
        plugins = [p for p in as_list(arguments.get("plugins")) if not isinstance(p, Precision)]
        callbacks = [
            c for c in as_list(arguments.get("callbacks")) if not isinstance(c, _OWN_CALLBACKS)
        ]
        if self.checkpointing:
            callbacks.append(EnableCheckpointing())  # before codes of what it keeps
        if self.recipe is not None:
            codes: dict[str, Any] = {name: getattr(self, name) for name in _OF_ACTIVATIONS}
            callbacks.append(ActivationQuantization(**codes))
        changed = {**arguments, "callbacks": callbacks, "precision": self.precision}
        if self.optimizer_state != "none" or self.gradient_buffer != "none":
            states = (self.precision, self.optimizer_state, self.gradient_buffer)
            plugins.append(QuantizedPrecision(*states))  # type: ignore[arg-type]
            changed["precision"] = None
        changed["plugins"] = plugins
        if self.is_ours:
            pipeline = self.strategy == "quantized_pipeline"
            unknown = ("local_steps",) if pipeline else _OF_PIPELINE
            own = {name: getattr(self, name) for name in _OF_STRATEGY if name not in unknown}
            make = QuantizedPipelineStrategy if pipeline else QuantizedFSDPStrategy
            changed["strategy"] = make(**own, **self.others)
        return changed


_OF_PIPELINE = ("pipeline_size", "forward_codec", "backward_codec")
_OF_ACTIVATIONS = ("recipe", "budget", "adapt", "offload")
_OF_STRATEGY = (
    *("weights", "gradients", "replica", "local_steps", "reduce_every_microbatch"),
    *("tensor_parallel_size", "tensor_parallel", *_OF_PIPELINE),
)


class EnableCheckpointing(Callback):
    """Lets a model recompute its layers in backward, by its own ``gradient_checkpointing_enable``.

    A model that recomputes them without that method is left as it is.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Wait for the model to be complete."""
        if stage == "fit":
            AfterConfigureModel(pl_module, self._enable)

    @staticmethod
    def _enable(module: nn.Module) -> None:
        enable = checkpointing_of(module)
        if enable is not None:
            enable()


def checkpointing_of(module: nn.Module) -> Callable[[], None] | None:
    """Return the method with which a model starts to recompute its layers, if it has one."""
    for each in module.modules():
        method = getattr(each, "gradient_checkpointing_enable", None)
        if callable(method):
            return method  # type: ignore[no-any-return]
    return None


_OWN_CALLBACKS = (ActivationQuantization, EnableCheckpointing)
