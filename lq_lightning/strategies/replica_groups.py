"""Replica groups: nodes that train alone and meet every so many steps (``local_steps``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lq_lightning._compat.tensors import local_tensor
from lq_lightning.data_parallel import LocalSteps, OuterOptimizer, Topology, start_alike
from lq_lightning.foundation.agreement import check_same_entries, describe
from lq_lightning.foundation.broadcast import broadcast_module_states
from lq_lightning.foundation.groups import RankGroups, shared_mesh
from lq_lightning.foundation.parameters import clean_name
from lq_lightning.strategies.collectives import QuantizedCollectives
from lq_lightning.strategies.failures import Failures
from lq_lightning.strategies.optimizer_steps import StrategyPart

__all__ = ["ReplicaGroups"]

NODE, SHARD = "node", "data_parallel"  # axes of the mesh where nodes train alone


class ReplicaGroups(StrategyPart):
    """The nodes of a run, each of which trains a replica of the model alone.

    Between nodes nothing travels in a step: gradients, their norm, and the decision to skip a step
    are a node's own. Whatever looks at the weights from outside has an outer step taken first, so
    that it sees one model: a validation, a checkpoint, the end of ``fit``. So a checkpoint always
    lies between two cycles, and the next one starts there, in the run that wrote it as in one that
    resumes.

    Args:
        strategy: Gives devices and the mesh.
        config: How nodes train alone.
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
        """The ranks of this node."""
        every = self._topology()
        size = every.node_size
        return Topology(world_size=size, rank=every.local_rank, node_size=size)

    @property
    def own_group(self) -> dist.ProcessGroup:
        """The ranks of this node, which take or skip optimizer steps together."""
        return self._strategy.device_mesh.get_group(SHARD)

    def all_meet(self) -> bool:
        """Whether all ranks wait for each other here anyway, as they do behind an outer step."""
        return self._outer is None or self._outer.steps == 0

    @property
    def sent_nbytes(self) -> float | None:
        """Bytes that this rank has sent to other nodes; None without an outer optimizer."""
        return None if self._outer is None else self._outer.sent_nbytes

    # --- setup ------------------------------------------------------------------------------------

    def check(self, module: LightningModule, synchronizes_layers: bool) -> None:
        """Refuse runs in which nodes cannot train alone.

        Raises:
            ValueError: There is one node, or batch norm is to be synchronized.
        """
        every, every_steps = self._topology(), self._config.every
        owner = type(self._strategy).__name__
        if module.trainer.state.fn == TrainerFn.FITTING and every.num_nodes == 1:
            raise ValueError(
                f"`{owner}(local_steps={every_steps})` lets nodes train alone, but this run has "
                f"one node of {every.node_size} rank(s), which has nobody to be brought together "
                "with. Leave it out, give the Trainer `num_nodes`, or let a smaller `node_size` "
                "emulate nodes."
            )
        if synchronizes_layers and every.num_nodes > 1:
            raise ValueError(
                f"`sync_batchnorm=True` does not go with `{owner}(local_steps={every_steps})`: "
                "every such layer would wait for the other nodes. Leave one of them out."
            )

    def make_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return a mesh with an axis of nodes: the given one if it has that."""
        if NODE in (mesh.mesh_dim_names or ()):
            return mesh
        every = self._topology()
        axes = {NODE: every.num_nodes, SHARD: every.node_size, "tensor_parallel": 1}
        return shared_mesh(self._strategy.root_device.type, axes)

    def make_alike(self, module: LightningModule) -> None:
        """Let all nodes start from the weights and buffers of the first; all ranks call it.

        Raises:
            ValueError: The user has sharded something over other ranks than those of a node. On all
                ranks: nodes have built different models.
        """
        mesh, device = self._strategy.device_mesh, self._strategy.root_device
        own = mesh[SHARD].mesh.tolist()
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
            device,
            differ="nodes do not have the same model",
            advice="Build it alike on all of them: names, shapes and dtypes of parameters and "
            "buffers must not depend on the node, its ranks or its data.",
        )
        start_alike([local_tensor(p) for _, p in by_name], mesh.get_group(NODE), device)
        broadcast_module_states(module, parameters=False)

    def set_up(self, trainer: Trainer, module: LightningModule) -> None:
        """Make the outer optimizer, for a run of ``fit``."""
        self._outer = None
        if dist.group.WORLD is None:
            return
        mesh, every, config = self._strategy.device_mesh, self._topology(), self._config
        self._outer = OuterOptimizer(
            config,
            every,
            RankGroups(dist.group.WORLD, mesh.get_group(SHARD), mesh.get_group(NODE)),
            names={p: clean_name(n) for n, p in module.named_parameters()},
            min_quantized_numel=self._min_quantized_numel,
            device=self._strategy.root_device,
        )
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, _OuterStepFirst) for callback in callbacks):
            callbacks.insert(0, _OuterStepFirst(self))
        bits = "fp32" if config.bits is None else f"{config.bits} bits"
        rank_zero_info(
            f"{every.num_nodes} nodes of {every.node_size} rank(s) train alone for {config.every} "
            f"steps each time, and exchange what they have learned in {bits}"
        )

    # --- steps ------------------------------------------------------------------------------------

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Keep the weights from which a cycle starts."""
        if self._outer is not None:
            with self._failures.explained():
                self._outer.begin_step(optimizer)

    def after_optimizer_step(self, stepped: bool) -> None:
        """Take an outer step if it is time to; other nodes may have taken a step skipped here."""
        if self._outer is not None:
            self._outer.steps += 1
            if self._outer.is_due:
                self.outer_step()

    def outer_step(self) -> None:
        """Exchange what nodes have learned since the last time; all then have equal weights.

        Nothing happens where no node has taken a step since. All ranks call it.

        Raises:
            RuntimeError: Weights of a node are not finite, or nodes have taken different numbers of
                steps; on all ranks, before anything is exchanged.
        """
        if self._outer is None or self._outer.steps == 0:
            return
        communication = self._collectives.communication
        if communication is not None:
            communication.join()  # exchanges within nodes still read the weights
        with self._failures.explained():
            self._outer.bring_together()
        if communication is not None:
            communication.invalidate()  # written by no optimizer step that differences could follow

    # --- checkpoints ------------------------------------------------------------------------------

    def before_save(self) -> None:
        """Save one model."""
        self.outer_step()

    def on_weights_loaded(self) -> None:
        """Start the next cycle from the loaded weights."""
        if self._outer is not None:
            self._outer.forget()

    @property
    def tensor_kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        """The state of the outer optimizer."""
        return () if self._outer is None else ("velocity", "anchor")

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

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate one model."""
        self._groups.outer_step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End with one model."""
        self._groups.outer_step()
