"""The part of ``quantized_fsdp`` that knows nodes, and lets them train alone (``local_steps``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lq_lightning._compat.lightning import set_device_mesh
from lq_lightning._compat.tensors import local_tensor
from lq_lightning.checkpoint.ranks import RankGroup
from lq_lightning.data_parallel import (
    LocalSteps,
    OuterOptimizer,
    QuantizedCommunication,
    Topology,
    start_alike,
)
from lq_lightning.foundation.agreement import check_same_entries, describe
from lq_lightning.foundation.broadcast import broadcast_module_states
from lq_lightning.foundation.groups import RankGroups, shared_mesh
from lq_lightning.foundation.parameters import clean_name
from lq_lightning.strategies.failures import explain_lost_rank
from lq_lightning.strategies.fully_sharded import FullyShardedStrategy
from lq_lightning.strategies.options import check_count

__all__ = ["NodesStrategy"]

NODE, SHARD = "node", "data_parallel"  # axes of the mesh where nodes train alone


class NodesStrategy(FullyShardedStrategy):
    """FSDP2 over all ranks, or over those of a node where nodes train alone.

    Between nodes that train alone nothing travels in a step: gradients, their norm, and the
    decision to skip a step are those of a node. Whatever looks at the weights from outside has the
    nodes brought together first, so that it sees one model: a validation, a checkpoint, the end of
    ``fit``. So a checkpoint always lies between two cycles, and the next one starts there, in the
    run that wrote it as in one that resumes.

    Args:
        local_steps: How nodes train alone; ``None``: they do not.
        node_size: Ranks per node; ``None`` takes it from Lightning.
        min_quantized_numel: Smaller tensors travel in full precision.
        options: Those of :class:`FullyShardedStrategy`.
    """

    def __init__(
        self,
        local_steps: int | LocalSteps | None,
        node_size: int | None,
        min_quantized_numel: int,
        **options: Any,
    ) -> None:
        """Check and keep the options; nothing is started."""
        super().__init__(**options)
        owner = type(self).__name__
        for name, value in (("node_size", node_size), ("min_quantized_numel", min_quantized_numel)):
            if value is not None:
                check_count(owner, name, value, 1)
        self._node_size = node_size
        self._min_quantized_numel = min_quantized_numel
        if local_steps is not None and not isinstance(local_steps, LocalSteps):
            check_count(owner, "local_steps", local_steps, 1, LocalSteps)
            local_steps = LocalSteps(every=local_steps)
        if local_steps is not None and not self._save_distributed_checkpoint:
            raise ValueError(
                f"`{owner}(local_steps=..., save_distributed_checkpoint=False)` is not supported: "
                "each node has optimizer states of its own, which would cross the slow network to "
                "be in one file. Save folders, and make one file of a folder with "
                "`python -m lq_lightning.checkpoint.consolidate`."
            )
        self._local_steps = local_steps
        self._outer: OuterOptimizer | None = None

    # --- ranks ------------------------------------------------------------------------------------

    def topology(self) -> Topology:
        """Ranks and nodes of this run.

        Raises:
            ValueError: The node size does not divide the world size.
        """
        size = self.num_processes if self._node_size is None else self._node_size
        return Topology(world_size=self.world_size, rank=self.global_rank, node_size=size)

    @property
    def nodes_train_alone(self) -> bool:
        """Whether every node of this run has a copy of the model."""
        return self._local_steps is not None and self.topology().num_nodes > 1

    def copy_topology(self) -> Topology:
        """Ranks that share a copy of the model."""
        every = self.topology()
        if not self.nodes_train_alone:
            return every
        size = every.node_size
        return Topology(world_size=size, rank=every.local_rank, node_size=size)

    @property
    def step_group(self) -> dist.ProcessGroup | None:
        """The ranks that take or skip an optimizer step together."""
        return self.device_mesh.get_group(SHARD) if self.nodes_train_alone else None

    @property
    def meeting(self) -> Callable[[], bool] | None:
        """Nodes that train alone wait for each other when they have just been brought together."""
        if not self.nodes_train_alone:
            return None
        return lambda: self._outer is None or self._outer.steps == 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All ranks see different data, whatever they share."""
        if not self.nodes_train_alone:
            return super().distributed_sampler_kwargs
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def communication(self) -> QuantizedCommunication | None:
        """The quantized collectives in use; ``None`` on one rank, before ``setup``, or if off."""
        record = self._sharded
        communication: QuantizedCommunication | None = None if record is None else record.extra
        return communication

    def settings(self) -> dict[str, object]:
        """Options that a later Trainer of the same module has to repeat."""
        return {
            **super().settings(),
            "node_size": self.topology().node_size if self.world_size > 1 else 1,
            "local_steps": "any number" if self.nodes_train_alone else None,
            "min_quantized_numel": self._min_quantized_numel,
        }

    def setup_environment(self) -> None:
        """Check the topology, then start the process group and the mesh.

        Raises:
            ValueError: The node size does not divide the world size, or there are no nodes that
                could train alone.
        """
        if self.world_size > 1:
            self.topology()
        if self._local_steps is not None:
            self._check_local_steps(self._local_steps)
        super().setup_environment()
        mesh = self._device_mesh
        if self.nodes_train_alone and mesh is not None and NODE not in (mesh.mesh_dim_names or ()):
            every = self.topology()
            axes = {NODE: every.num_nodes, SHARD: every.node_size, "tensor_parallel": 1}
            self._device_mesh = shared_mesh(self.root_device.type, axes)
            set_device_mesh(self._require_module(), self._device_mesh)

    def _check_local_steps(self, config: LocalSteps) -> None:
        every, owner = self.topology(), type(self).__name__
        fits = self._require_module().trainer.state.fn == TrainerFn.FITTING
        if fits and every.num_nodes == 1:
            raise ValueError(
                f"`{owner}(local_steps={config.every})` lets nodes train alone, but this run has "
                f"one node of {every.node_size} rank(s), which has nobody to be brought together "
                "with. Leave it out, give the Trainer `num_nodes`, or let a smaller `node_size` "
                "emulate nodes."
            )
        if self._layer_sync is not None and every.num_nodes > 1:
            raise ValueError(
                f"`sync_batchnorm=True` does not go with `{owner}(local_steps={config.every})`: "
                "every such layer would wait for the other nodes. Leave one of them out."
            )

    # --- setup ------------------------------------------------------------------------------------

    def make_copies_alike(self, module: LightningModule) -> None:
        """Let all nodes start from the weights and buffers of the first; all ranks call it.

        Raises:
            ValueError: The user has sharded something over other ranks than those of a node. On all
                ranks: nodes have built different models.
        """
        if not self.nodes_train_alone:
            return
        own = self.device_mesh[SHARD].mesh.tolist()
        for name, parameter in module.named_parameters():
            ranks = parameter.device_mesh.mesh.tolist()  # type: ignore[attr-defined]
            if ranks != own:
                raise ValueError(
                    f"`{name}` is sharded over the ranks {ranks}, but with `local_steps` every "
                    f"node has a copy, here over {own}: give `fully_shard` the argument "
                    f'`mesh=self.device_mesh["{SHARD}"]`.'
                )
        by_name = sorted(module.named_parameters())
        check_same_entries(
            {name: describe(t) for name, t in (*by_name, *module.named_buffers())},
            None,
            self.root_device,
            differ="nodes do not have the same model",
            advice="Build it alike on all of them: names, shapes and dtypes of parameters and "
            "buffers must not depend on the node, its ranks or its data.",
        )
        weights = [local_tensor(p) for _, p in by_name]
        start_alike(weights, self.device_mesh.get_group(NODE), self.root_device)
        broadcast_module_states(module, parameters=False)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers, and what brings together nodes that train alone."""
        super().setup_optimizers(trainer)
        self._outer = None
        config = self._local_steps
        if config is None or dist.group.WORLD is None:
            return
        mesh, every = self.device_mesh, self.topology()
        self._outer = OuterOptimizer(
            config,
            every,
            RankGroups(dist.group.WORLD, mesh.get_group(SHARD), mesh.get_group(NODE)),
            names={p: clean_name(n) for n, p in self._require_module().named_parameters()},
            min_quantized_numel=self._min_quantized_numel,
            device=self.root_device,
        )
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, _BringTogether) for callback in callbacks):
            callbacks.insert(0, _BringTogether(self))
        bits = "fp32" if config.bits is None else f"{config.bits} bits"
        rank_zero_info(
            f"{every.num_nodes} nodes of {every.node_size} rank(s) train alone for {config.every} "
            f"steps each time, and exchange what they have learned in {bits}"
        )

    # --- steps ------------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Run the closure (forward and backward) and step."""
        if self._outer is not None:
            with explain_lost_rank(self.global_rank, self.world_size):
                self._outer.begin_step(optimizer)
        return super().optimizer_step(optimizer, *args, **kwargs)

    def after_optimizer_step(self) -> None:
        """Bring nodes together if it is time to."""
        self._count_step()

    def after_skipped_step(self) -> None:
        """Count the step: the other nodes may have taken it."""
        self._count_step()

    def _count_step(self) -> None:
        if self._outer is not None:
            self._outer.steps += 1
            if self._outer.is_due:
                self.bring_nodes_together()

    def bring_nodes_together(self) -> None:
        """Let nodes that train alone exchange what they have learned, and start from equal weights.

        All ranks call it, between two training batches. Nothing happens where no node has taken a
        step since the last time. It comes by itself after ``local_steps`` optimizer steps, and
        before validations, checkpoints and the end of ``fit``.

        Raises:
            RuntimeError: Weights of a node are not finite, or nodes have taken different numbers of
                steps; on all ranks, before anything is exchanged.
        """
        if self._outer is None or self._outer.steps == 0:
            return
        communication = self.communication
        if communication is not None:
            communication.join()  # exchanges within nodes still read the weights
        with explain_lost_rank(self.global_rank, self.world_size):
            self._outer.outer_step()
        if communication is not None:
            communication.invalidate()  # written by no optimizer step that differences could follow

    # --- checkpoints ------------------------------------------------------------------------------

    @property
    def copy_number(self) -> int:
        """The node, where each trains a copy."""
        return self.topology().node if self.nodes_train_alone else 0

    @property
    def copy_ranks(self) -> RankGroup:
        """The ranks of the node, where each trains a copy."""
        return RankGroup(group=self.step_group) if self.nodes_train_alone else super().copy_ranks

    def before_save(self) -> None:
        """Save one model."""
        self.bring_nodes_together()

    def on_weights_loaded(self) -> None:
        """Start the next cycle from the loaded weights."""
        if self._outer is not None:
            self._outer.forget()

    @property
    def extra_kinds(self) -> tuple[str, ...]:
        """Also the state of the outer optimizer."""
        own = () if self._outer is None else ("velocity", "anchor")
        return (*super().extra_kinds, *own)

    def extra_state(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """The state of the outer optimizer."""
        return {}, {} if self._outer is None else dict(self._outer.state())

    def load_extra_state(
        self, values: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Continue with the saved outer optimizer."""
        if self._outer is not None:
            self._outer.load_state(tensors)

    def values_of_copies(self, values: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint says of each copy: the first one's values, and a list of all."""
        if not self.nodes_train_alone:
            return values
        every = self.checkpoint_ranks.all_gather(values)[:: self.topology().node_size]
        return {**every[0], "copies": every}

    def values_of_copy(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """What :meth:`values_of_copies` was given for this copy, or for one that it continues."""
        copies = values.get("copies", [values])
        found: Mapping[str, Any] = copies[self.copy_number % len(copies)]
        return found


class _BringTogether(Callback):
    """Brings nodes together before any other callback looks at the weights."""

    def __init__(self, strategy: NodesStrategy) -> None:
        self._strategy = strategy

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate one model."""
        self._strategy.bring_nodes_together()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End with one model."""
        self._strategy.bring_nodes_together()
