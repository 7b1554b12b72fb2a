"""``Trainer(strategy="quantized_fsdp")``: FSDP2 with quantized communication."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lq_lightning._compat.lightning import set_device_mesh
from lq_lightning.checkpoint.checkpointer import ModelLayout
from lq_lightning.checkpoint.ranks import RankGroup
from lq_lightning.data_parallel import (
    GradientQuantization,
    LocalSteps,
    Topology,
    WeightQuantization,
)
from lq_lightning.foundation.checks import check_count
from lq_lightning.foundation.reporting import QuantizationReport
from lq_lightning.strategies.changing_nodes import ChangingNodes
from lq_lightning.strategies.fully_sharded import FullyShardedStrategy
from lq_lightning.strategies.options import DEFAULT_TIMEOUT, FSDPOptions
from lq_lightning.strategies.replica_groups import ReplicaGroups


class QuantizedFSDPStrategy(FullyShardedStrategy):
    """FSDP2 for any LightningModule, sending 4-bit weights and 8/4-bit gradients (SDP4Bit).

    All ranks shard the model and see different data. On one rank nothing is sharded or quantized
    and the run is an ordinary single-device run.

    Args:
        weights: Weight all-gather: ``"qWD"`` sends 4-bit differences from the weights that every
            rank already holds, once per optimizer step; ``"none"`` is FSDP2's own.
            ``"auto"`` is ``"none"`` on one node whose GPUs are all linked by NVLink, ``"qWD"``
            anywhere else. Or a full ``WeightQuantization``.
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
        weights: Literal["auto", "qWD", "none"] | WeightQuantization = "auto",
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
            self.shares_data = self._changing is not None
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
        kind = ReplicaGroups if local_steps.meet_at is None else ChangingNodes
        return kind(
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
    def _changing(self) -> ChangingNodes | None:
        """This node among others that come and go, if ``local_steps`` says so."""
        return self._groups if isinstance(self._groups, ChangingNodes) else None

    @property
    def seat(self) -> int | None:
        """Number below ``max_nodes`` of this node among those that come and go, while it trains."""
        return None if self._changing is None else self._changing.seat

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
        """Different data on all ranks, including those that share a module.

        Nodes that come and go read the part of their seat, and validate alone.
        """
        changing = self._changing
        if changing is not None and self._require_module().trainer.training:
            size, most = self.world_size, changing.max_nodes
            return {"num_replicas": most * size, "rank": changing.seat * size + self.global_rank}
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
        if self._changing is not None:
            self._changing.enter(self._require_module().trainer)
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

    def process_dataloader(self, dataloader: object) -> object:
        """Let a node that joins go on with its part of the data."""
        dataloader = super().process_dataloader(dataloader)
        if self._changing is not None:
            self._changing.skip_read_batches(dataloader)
        return dataloader

    def teardown(self) -> None:
        """Leave the other nodes."""
        if self._changing is not None:
            self._changing.leave()
        super().teardown()

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
