"""Nodes of one run that train a replica of the model each, and are averaged in outer steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lq_lightning._compat.tensor_parallel import DATA, TENSOR
from lq_lightning._compat.tensors import local_tensor
from lq_lightning.data_parallel import LocalSteps, OuterOptimizer, Topology, start_alike
from lq_lightning.foundation.agreement import broadcast_module_states, check_same_entries, describe
from lq_lightning.foundation.checks import counted
from lq_lightning.foundation.groups import RankGroups, shared_mesh, shared_split, world_group
from lq_lightning.foundation.parameters import clean_name
from lq_lightning.foundation.strategy_part import StrategyPart
from lq_lightning.strategies.failures import Failures
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
        self.insert_callback(trainer.callbacks)  # type: ignore[attr-defined]
        bits = "fp32" if config.bits is None else f"{config.bits} bits"
        rank_zero_info(
            f"{every.num_nodes} nodes of {counted(every.node_size, 'rank')} train alone for "
            f"{counted(config.every, 'step')} each time, and exchange what they have "
            f"learned in {bits}"
            + (f", in {config.fragments} fragments" if config.fragments > 1 else "")
            + (f", while they train for {counted(config.delay, 'step')}" if config.delay else "")
        )

    def insert_callback(self, callbacks: list[Callback]) -> None:
        """Let outer steps come before other callbacks look at the weights."""
        if not any(isinstance(callback, _OuterStepFirst) for callback in callbacks):
            callbacks.insert(0, _OuterStepFirst(self))

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

    def end_training(self) -> None:
        """Called at the end of ``fit``."""
        self.outer_step()

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

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let all validate one model."""
        self._groups.outer_step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let all end with one model."""
        self._groups.end_training()
