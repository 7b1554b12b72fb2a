"""``Trainer(strategy="quantized_fsdp")``: FSDP2 with quantized communication."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lq_lightning._compat.lightning import set_device_mesh
from lq_lightning._compat.tensor_parallel import DATA, TENSOR
from lq_lightning._compat.tensors import local_tensor
from lq_lightning.checkpoint.checkpointer import ModelLayout
from lq_lightning.checkpoint.ranks import RankGroup
from lq_lightning.data_parallel import (
    GradientQuantization,
    LocalSteps,
    OuterOptimizer,
    Topology,
    WeightQuantization,
    start_alike,
)
from lq_lightning.foundation.agreement import broadcast_module_states, check_same_entries, describe
from lq_lightning.foundation.checks import counted
from lq_lightning.foundation.groups import RankGroups, shared_mesh, shared_split, world_group
from lq_lightning.foundation.parameters import clean_name
from lq_lightning.foundation.reporting import QuantizationReport
from lq_lightning.foundation.strategy_part import StrategyPart
from lq_lightning.strategies.failures import Failures
from lq_lightning.strategies.fully_sharded import FullyShardedStrategy
from lq_lightning.strategies.options import DEFAULT_TIMEOUT, FSDPOptions, check_count
from lq_lightning.strategies.parts import QuantizedCollectives

NODE, SHARD = "node", DATA  # axes of the mesh where nodes train alone


class ReplicaGroups(StrategyPart):
    """Nodes that train a replica of the model each, and average their progress in outer steps.

    Between nodes nothing travels in an inner step: gradients, their norm, and the decision to skip
    a step are a node's own. An outer step comes before anything that has to see one model: a
    validation, a checkpoint, the end of ``fit``. So a checkpoint always lies between two cycles,
    and the next one starts there, in the run that wrote it as in one that resumes. A fragment that
    is under way then is merged first. After an error it is dropped, unless a callback saves.

    Args:
        strategy: Gives devices and the mesh.
        config: Options of outer steps.
        topology: Returns all ranks and nodes of the run.
        collectives: Exchanges within nodes.
        failures: Explains lost ranks.
        min_quantized_numel: Smaller tensors travel in full precision.
    """

    def __init__(
        self,
        strategy: ModelParallelStrategy,
        config: LocalSteps,
        topology: Callable[[], Topology],
        collectives: QuantizedCollectives,
        failures: Failures,
        min_quantized_numel: int,
    ) -> None:
        self._strategy, self._config, self._topology = strategy, config, topology
        self._collectives, self._failures = collectives, failures
        self._min_quantized_numel = min_quantized_numel
        self._outer: OuterOptimizer | None = None

    @property
    def are_several(self) -> bool:
        """Whether this run has several nodes."""
        return self._topology().num_nodes > 1

    def own_topology(self) -> Topology:
        """Ranks of this node."""
        every = self._topology()
        size = every.node_size
        return Topology(world_size=size, rank=every.local_rank, node_size=size)

    @property
    def own_group(self) -> dist.ProcessGroup:
        """Ranks of this node, which take or skip optimizer steps together."""
        mesh = self._strategy.device_mesh
        if mesh[TENSOR].size() == 1:
            return mesh.get_group(SHARD)
        nodes = mesh.mesh.flatten(1).tolist()
        return shared_split("model", world_group(), nodes, self._strategy.root_device)

    @property
    def column(self) -> dist.ProcessGroup:
        """Ranks of all nodes with this rank's tensor-parallel shards."""
        mesh = self._strategy.device_mesh
        if mesh[TENSOR].size() == 1:
            return world_group()
        columns = mesh.mesh.flatten(0, 1).T.tolist()
        return shared_split("column", world_group(), columns, self._strategy.root_device)

    def all_meet(self) -> bool:
        """Whether all ranks may wait for each other here, once in a cycle."""
        return self._outer is None or self._outer.steps % self._config.every == 0

    @property
    def sent_nbytes(self) -> float | None:
        """Bytes that this rank has sent to other nodes; None without an outer optimizer."""
        return None if self._outer is None else self._outer.sent_nbytes

    # --- setup ------------------------------------------------------------------------------------

    def check(self, module: LightningModule, synchronizes_layers: bool) -> None:
        """Refuse runs on one node, and synchronized batch norm."""
        every, every_steps = self._topology(), self._config.every
        owner = type(self._strategy).__name__
        if module.trainer.state.fn == TrainerFn.FITTING and every.num_nodes == 1:
            raise ValueError(
                f"`{owner}(local_steps={every_steps})` lets nodes train alone, but this run has "
                f"one node of {counted(every.node_size, 'rank')}, which has nobody to be "
                "brought together with. Leave it out, give the Trainer `num_nodes`, or let a "
                "smaller `node_size` emulate nodes."
            )
        if synchronizes_layers and every.num_nodes > 1:
            raise ValueError(
                f"`sync_batchnorm=True` does not go with `{owner}(local_steps={every_steps})`: "
                "every such layer would wait for the other nodes. Leave one of them out."
            )

    def make_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return ``mesh``, or a new one if it has no axis of nodes."""
        if NODE in (mesh.mesh_dim_names or ()):
            return mesh
        every = self._topology()
        axes = {NODE: every.num_nodes, SHARD: every.node_size, TENSOR: mesh[TENSOR].size()}
        return shared_mesh(self._strategy.root_device.type, axes)

    def make_alike(self, module: LightningModule) -> None:
        """Let all nodes start from the weights and buffers of the first; all ranks call it.

        Refuses, on all ranks, models that differ between nodes.
        """
        mesh, device = self._strategy.device_mesh, self._strategy.root_device
        by_name = sorted(module.named_parameters())
        check_same_entries(
            {name: describe(t) for name, t in (*by_name, *module.named_buffers())},
            None,
            device,
            differ="nodes do not have the same model",
            advice="Build it alike on all of them: names, shapes and dtypes of parameters and "
            "buffers must not depend on the node, its ranks or its data.",
        )
        start_alike([local_tensor(p) for _, p in by_name], mesh.get_group(NODE), device)
        broadcast_module_states(module, parameters=False, group=self.column)

    def set_up(self, trainer: Trainer, module: LightningModule) -> None:
        """Make the outer optimizer for a run of ``fit``."""
        self._outer = None
        if not dist.is_initialized():
            return
        mesh, every, config = self._strategy.device_mesh, self._topology(), self._config
        self._outer = OuterOptimizer(
            config,
            every,
            RankGroups(self.column, mesh.get_group(SHARD), mesh.get_group(NODE)),
            names={p: clean_name(n) for n, p in module.named_parameters()},
            min_quantized_numel=self._min_quantized_numel,
            device=self._strategy.root_device,
            units=[clean_name(n) for n, m in module.named_modules() if isinstance(m, FSDPModule)],
        )
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, _OuterStepFirst) for callback in callbacks):
            callbacks.insert(0, _OuterStepFirst(self))
        bits = "fp32" if config.bits is None else f"{config.bits} bits"
        rank_zero_info(
            f"{every.num_nodes} nodes of {counted(every.node_size, 'rank')} train alone for "
            f"{counted(config.every, 'step')} each time, and exchange what they have "
            f"learned in {bits}"
            + (f", in {config.fragments} fragments" if config.fragments > 1 else "")
            + (f", while they train for {counted(config.delay, 'step')}" if config.delay else "")
        )

    # --- steps ------------------------------------------------------------------------------------

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Keep the weights that a cycle starts from."""
        if self._outer is not None:
            with self._failures.explained():
                self._outer.begin_step(optimizer)

    def after_optimizer_step(self, stepped: bool) -> None:
        """Exchange what is due; other nodes may have taken a step skipped here."""
        if self._outer is not None:
            self._outer.steps += 1
            if self._outer.is_due:
                self._run(self._outer.exchange)

    def outer_step(self) -> None:
        """Average the nodes' progress since the last outer step; all ranks call it."""
        if self._outer is not None and self._outer.steps:
            self._run(self._outer.outer_step)

    def _run(self, exchange: Callable[[], Collection[nn.Parameter]]) -> None:
        communication = self._collectives.communication
        if communication is not None:
            communication.join()  # exchanges within nodes still read the weights
        with self._failures.explained():
            written = exchange()
        if communication is not None and written:
            # written by no optimizer step that differences could follow
            communication.invalidate(written)

    # --- checkpoints ------------------------------------------------------------------------------

    def before_save(self) -> None:
        """Take an outer step, so that one model is saved."""
        self.outer_step()

    def on_weights_loaded(self) -> None:
        """Start the next cycle from the loaded weights."""
        if self._outer is not None:
            self._outer.forget()

    @property
    def tensor_kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        """Kinds of tensors that the outer optimizer keeps."""
        return () if self._outer is None else ("velocity", "anchor")

    def kept(self, parameter: nn.Parameter) -> Iterable[Tensor]:
        """What the outer optimizer keeps for a parameter."""
        return () if self._outer is None else self._outer.kept(parameter)

    def extra_state(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """The state of the outer optimizer."""
        return {}, {} if self._outer is None else dict(self._outer.state())

    def load_extra_state(
        self, values: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Continue with the saved outer optimizer."""
        if self._outer is not None:
            self._outer.load_state(tensors)


class _OuterStepFirst(Callback):
    """Takes an outer step before any other callback looks at the weights."""

    def __init__(self, groups: ReplicaGroups) -> None:
        self._groups = groups

    def _step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._groups.outer_step()

    on_validation_start = on_train_end = _step


class QuantizedFSDPStrategy(FullyShardedStrategy):
    """FSDP2 for any LightningModule, sending 4-bit weights and 8/4-bit gradients (SDP4Bit).

    All ranks shard the model and see different data. On one rank nothing is sharded or quantized
    and the run is an ordinary single-device run.

    Args:
        weights: Weight all-gather: ``"qWD"`` sends 4-bit differences from the weights that every
            rank already holds, once per optimizer step; ``"qW"`` sends 4-bit weights in every
            all-gather (loses accuracy, for comparison); ``"none"`` is FSDP2's own. ``"auto"`` is
            ``"none"`` on one node whose GPUs are all linked by NVLink, ``"qWD"`` anywhere else. Or
            a full ``WeightQuantization``.
        gradients: Gradient reduce-scatter: ``"TLq-HS"`` uses 8 bits within a node and 4 bits
            between nodes (more for embeddings and heads) after a Hadamard transform; ``"TLq"``
            omits the transform; ``"ULq"`` uses 4 bits everywhere; ``"QuanGrad"`` 8 bits everywhere
            (AGoQ); ``"none"`` is FSDP2's own. ``"auto"`` is ``"none"`` on one node whose GPUs are
            all linked by NVLink, ``"TLq-HS"`` anywhere else. Or a full ``GradientQuantization``.
        replica: Placement of the reference weights of ``weights="qWD"``: ``"full"`` on every rank
            (2 bytes per parameter, no other weight traffic) or ``"node"``, sharded over the ranks
            of a node (2/node_size bytes, all-gathered within the node when used). ``"auto"`` is
            ``"node"`` on several nodes with NVLink inside, else ``"full"``. A
            ``WeightQuantization`` brings its own.
        node_size: Ranks per node; ``None`` takes it from Lightning. A smaller number emulates
            nodes.
        local_steps: Let nodes train alone and bring them together every so many optimizer steps
            (DiLoCo), for slow networks between nodes: a number, or a full ``LocalSteps``. The model
            is then sharded within each node, where all other options apply. Outer steps take
            another 8/node_size bytes per parameter.
        tensor_parallel_size: Neighbouring ranks of a node that share every layer's computation, on
            the same data. The axis ``"tensor_parallel"`` of ``self.device_mesh``, as in Lightning's
            ``ModelParallelStrategy``; all else here applies to each of its shards.
        tensor_parallel: ``"auto"`` cuts the model by the plan of its Hugging Face class, or of its
            method ``tensor_parallel_plan``. ``None`` leaves it to ``configure_model``.
        min_quantized_numel: Smaller tensors travel in full precision.
        units: Names of modules that are gathered as one piece, or of their classes, or a function
            that says so of a module. ``None`` finds them: units of ``configure_model``, else
            Hugging Face's ``_no_split_modules``, else repeated blocks.
        reshard_after_forward: Free a unit's weights between forward and backward.
        reduce_every_microbatch: With ``accumulate_grad_batches``, reduce gradients in every
            micro-batch (less memory) instead of once per optimizer step (less traffic).
        skip_nonfinite_steps: Leave out optimizer steps with infinite or NaN gradients, on all ranks
            together, and count them in ``num_skipped_steps``.
        check_replicas_every_n_steps: Compare checksums of the weight replicas of all ranks every
            that many optimizer steps; 0 never does.
        on_drift: Reaction to replicas that differ: ``"resync"`` refreshes the unit in full
            precision and warns, ``"raise"`` stops.
        compile_units: ``torch.compile`` the forward of each unit.
        save_distributed_checkpoint: On several ranks write checkpoint directories with one file per
            rank; otherwise, and always on one rank, single files.
        verify_checkpoints: Compare checkpoints with their checksums before anything is loaded.
        process_group_backend: ``None`` for NCCL on GPUs and gloo on CPUs.
        timeout: Time that a collective waits for other ranks before the run fails; a number is
            seconds.
        start_timeout: The same until the first training batch is done, while ranks start, read data
            and compile, and in runs that do not train. None: ``timeout``, but at least 30 minutes.
        seed: Base of the seeds of stochastic rounding.

    Raises:
        ValueError: An option has a value outside its choices.
        TypeError: An option does not exist.
    """

    strategy_name = "quantized_fsdp"

    def __init__(
        self,
        weights: Literal["auto", "qWD", "qW", "none"] | WeightQuantization = "auto",
        gradients: Literal["auto", "TLq-HS", "TLq", "ULq", "QuanGrad", "none"]
        | GradientQuantization = "auto",
        replica: Literal["auto", "full", "node"] = "auto",
        node_size: int | None = None,
        local_steps: int | LocalSteps | None = None,
        tensor_parallel_size: int = 1,
        tensor_parallel: Literal["auto"] | None = None,
        min_quantized_numel: int = 4096,
        units: list[str] | Callable[[nn.Module], bool] | None = None,
        reshard_after_forward: bool = True,
        reduce_every_microbatch: bool = False,
        skip_nonfinite_steps: bool = False,
        check_replicas_every_n_steps: int = 100,
        on_drift: Literal["resync", "raise"] = "resync",
        compile_units: bool = False,
        save_distributed_checkpoint: bool = True,
        verify_checkpoints: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
        start_timeout: timedelta | float | None = None,
        seed: int = 0,
    ) -> None:
        given = locals()
        options = FSDPOptions(**{field.name: given[field.name] for field in fields(FSDPOptions)})
        super().__init__(options)
        self._groups: ReplicaGroups | None = None
        if local_steps is not None:
            self._groups = self._replica_groups(local_steps)
            self.parts.append(self._groups)
            self._tensor.kept = self._groups.kept

    def _replica_groups(self, local_steps: int | LocalSteps) -> ReplicaGroups:
        owner, options = type(self).__name__, self._options
        if not isinstance(local_steps, LocalSteps):
            check_count(owner, "local_steps", local_steps, 1, LocalSteps)
            local_steps = LocalSteps(every=local_steps)
        if not options.save_distributed_checkpoint:
            raise ValueError(
                f"`{owner}(local_steps=..., save_distributed_checkpoint=False)` is not supported: "
                "each node has optimizer states of its own, which would cross the slow network to "
                "be in one file. Save folders, and make one file of a folder with "
                "`python -m lq_lightning.checkpoint.consolidate`."
            )
        return ReplicaGroups(
            self,
            local_steps,
            self.topology,
            self._collectives,
            self._failures,
            options.min_quantized_numel,
        )

    # --- replica groups ---------------------------------------------------------------------------

    @property
    def _alone(self) -> ReplicaGroups | None:
        """The replica groups, if this run has several."""
        return self._groups if self._groups is not None and self._groups.are_several else None

    @property
    def nodes_train_alone(self) -> bool:
        """Whether every node of this run has a copy of the model."""
        return self._alone is not None

    def bring_nodes_together(self) -> None:
        """Take an outer step: nodes average their progress and go on from equal weights.

        All ranks call it, between two training batches. Nothing happens where no node has taken a
        step since the last one. Outer steps come by themselves after ``local_steps`` optimizer
        steps, and before validations, checkpoints and the end of ``fit``.

        Raises:
            RuntimeError: Weights of a node are not finite, or nodes have taken different numbers of
                steps; on all ranks, before anything is exchanged.
        """
        if self._groups is not None:
            self._groups.outer_step()

    def model_group(self) -> dist.ProcessGroup | None:
        """Ranks of this node where nodes train alone."""
        return self.step_group

    def data_group(self) -> dist.ProcessGroup:
        """Ranks of all nodes with this rank's tensor-parallel shards."""
        return super().data_group() if self._alone is None else self._alone.column

    def replica_topology(self) -> Topology:
        """Ranks that share the shards of a module: of one node where nodes train alone."""
        return self.topology() if self._alone is None else self._alone.own_topology()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Different data on all ranks, including those that share a module."""
        if self._alone is None:
            return super().distributed_sampler_kwargs
        every = self.topology()
        return {"num_replicas": every.world_size, "rank": every.rank}

    def model_layout(self) -> ModelLayout:
        """How the attached module is spread over the ranks."""
        if self._alone is None:
            return super().model_layout()
        return ModelLayout(
            module=self._require_module(),
            replica_group=self.topology().node,
            replica_ranks=RankGroup(group=self.step_group),
        )

    def settings(self) -> dict[str, object]:
        """Options that a later Trainer of the same module has to repeat."""
        return {
            **super().settings(),
            "local_steps": None if self._alone is None else "any number",
        }

    def setup_environment(self) -> None:
        """Start the process group and the mesh."""
        if self._groups is not None:
            self._groups.check(self._require_module(), self._layer_sync is not None)
        super().setup_environment()
        if self._alone is not None:
            self._device_mesh = self._alone.make_mesh(self.device_mesh)
            set_device_mesh(self._require_module(), self._device_mesh)
            self.step_group, self.meeting = self._alone.own_group, self._alone.all_meet
            self._collectives.step_group = self.step_group
            self.why_alone = (
                "every node is one rank, and all that nodes exchange that train alone is what "
                "`local_steps` says (`LocalSteps(bits=...)`)"
            )

    def on_sharded(self, module: LightningModule) -> Any:
        """Install the quantized collectives."""
        if self._alone is not None:
            self._alone.make_alike(module)
        return super().on_sharded(module)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers, and the outer one of nodes that train alone."""
        super().setup_optimizers(trainer)
        if self._groups is not None:
            self._groups.set_up(trainer, self._require_module())

    def quantization_report(self) -> QuantizationReport | None:
        """Report also the bytes that outer steps have sent."""
        report = super().quantization_report()
        sent = None if self._groups is None else self._groups.sent_nbytes
        if sent is None:
            return report
        if report is None:
            report = QuantizationReport(totals={"skipped_steps": self.num_skipped_steps})
        # nothing but the outer steps leaves a node
        return replace(report, counts={**report.counts, "bytes_weights_inter": sent})
