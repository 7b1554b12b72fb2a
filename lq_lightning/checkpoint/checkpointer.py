"""Saving and restoring for FSDP2 strategies, at any world size, as folders or single files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lq_lightning._compat.lightning import fill_wrapping_checkpoint_io
from lq_lightning.checkpoint import state
from lq_lightning.checkpoint.files import is_local, is_sharded_checkpoint, move_links, put_back
from lq_lightning.checkpoint.folder import (
    ShardedCheckpoint,
    check_folder,
    save_sharded_checkpoint,
)
from lq_lightning.checkpoint.ranks import RankGroup
from lq_lightning.checkpoint.single_file import AtomicCheckpointIO, load_full_checkpoint, naming
from lq_lightning.foundation.agreement import broadcast_module_states
from lq_lightning.foundation.checks import counted
from lq_lightning.foundation.parameters import tied_names

ALL_RANKS = RankGroup()  # write and read one checkpoint together
# Keys under which an open ShardedCheckpoint, and the path it came from, pass through Trainer.
_SOURCE, _PATH = "_sharded_checkpoint", "_checkpoint_path"
EXTRA = "lq_lightning"  # key of this package's own entry in a checkpoint
# Kinds of tensors by parameter name in that entry; folders call "tensors" "replica".
AVERAGE = "average"  # kind of tensors that replace weights in evaluations
EXTRA_TENSORS = {
    "replica": "tensors",
    "velocity": "velocity",
    "anchor": "anchor",
    AVERAGE: AVERAGE,
}
_BEFORE_TRAINING = (
    "the checkpoint was saved before training began, as by a run that failed at its start, and "
    "holds no state of an optimizer. There is nothing to continue from: delete it, and start "
    "without `ckpt_path`."
)
TIES = "ties"  # key under which a folder lists the tied weights


def show_shards(module: nn.Module | None) -> None:
    """Reshard modules in which the last forward has left gathered parameters."""
    for submodule in () if module is None else module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """Division of the model: the part on this rank, and the ranks that hold the rest.

    Here all ranks of ``shard_ranks`` share every tensor of the model, or each has all of it.

    Attributes:
        shard_ranks: Ranks that share the tensors of ``module``. Others hold other parts of the
            model under other names, and are saved into the same directory.
        replica_group: Number of this rank's replica group. All groups have the weights of the first
            when a checkpoint is written, and optimizers of their own.
        replica_ranks: Ranks of that group.
    """

    module: LightningModule
    shard_ranks: RankGroup = ALL_RANKS
    replica_group: int = 0
    replica_ranks: RankGroup = ALL_RANKS

    @property
    def is_part(self) -> bool:
        """Whether this rank has only a part of the model or of its tensors."""
        return isinstance(self.module, FSDPModule)

    @property
    def aliases(self) -> Mapping[str, str]:
        """First name in the whole model, used for optimizer states, by name of a tied parameter."""
        return {}

    @property
    def ties(self) -> Mapping[str, str]:
        """First name by further name of tied parameters of the whole model."""
        return tied_names(self.module)

    def join_parts(self, part: dict[str, Any]) -> dict[str, Any]:
        """Join the whole tensors of all parts of the model on the first rank; all ranks call it.

        ``part`` counts on the first of ``shard_ranks``: tensors or dictionaries of them, by
        parameter name.
        """
        return part

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state by parameter name, with this rank's shards; all ranks call it."""
        own = state.optimizer_state_by_name(self.module, optimizer, self.aliases)
        return state.merge_parameter_groups(own, self.replica_ranks)

    def whole_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state as one process has it, on the first rank; all ranks call it."""
        return state.gather_optimizer(self.module, optimizer, ALL_RANKS)

    def load_whole_optimizer_state(self, optimizer: Optimizer, whole: Mapping[str, Any]) -> None:
        """Load the state of one process or of :meth:`whole_optimizer_state`; all ranks call it."""
        named = state.state_by_name(self.module, optimizer, whole)
        if named is None:
            state.check_order(self.module, optimizer, self.shard_ranks)
        strict = self.module.strict_loading
        state.load_optimizer(self.module, optimizer, named or whole, strict=strict)


class _Part(Protocol):
    """Hooks of a strategy's parts that saving and loading call, on all ranks."""

    @property
    def tensor_kinds(self) -> tuple[str, ...]: ...
    @property
    def weight_kinds(self) -> tuple[str, ...]: ...
    def on_weights_loaded(self) -> None: ...
    def load_weights(self, tensors: Mapping[str, Mapping[str, Any]]) -> None: ...
    def extra_state(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]: ...
    def load_extra_state(
        self, values: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]
    ) -> None: ...


class Checkpointer:
    """Writes and reads the checkpoints of a strategy.

    On one rank every checkpoint is one file. Restoring follows the order of a single device: the
    Trainer reads the checkpoint before ``setup`` (so its ``weights_only`` is honoured), and the
    model's state is loaded once the model is sharded, before the optimizers are made.

    Args:
        strategy: Gives ranks, optimizers and the ``CheckpointIO`` of single files.
        layout: Returns how the attached module is spread over the ranks.
        parts: Parts of the strategy, some with state of their own.
        distributed: Write directories on several ranks, not single files.
        verify: Compare checkpoints with their checksums before anything is loaded.
    """

    def __init__(
        self,
        strategy: ModelParallelStrategy,
        layout: Callable[[], ModelLayout],
        parts: Iterable[_Part],
        *,
        distributed: bool,
        verify: bool,
    ) -> None:
        self._strategy, self._layout, self._parts = strategy, layout, parts
        self._distributed, self._verify = distributed, verify
        self._deferred_load: Callable[[], None] | None = None
        self._model_is_ready = False
        self._newest: Path | None = None  # the last local checkpoint

    def begin_run(self) -> None:
        """Forget the run before; refuse a ``CheckpointIO`` where checkpoints are directories."""
        self._model_is_ready, self._deferred_load = False, None
        io = self._strategy.checkpoint_io
        if self.saves_sharded and type(io) not in (TorchCheckpointIO, AtomicCheckpointIO):
            raise ValueError(
                f"`{type(io).__name__}` is not used for sharded checkpoints, which all ranks write "
                "together. Set `save_distributed_checkpoint=False` to save single files through "
                "it, or remove the plugin."
            )

    def complete_io(self, io: CheckpointIO | None) -> CheckpointIO:
        """The ``CheckpointIO`` of the user, or the one that replaces files atomically."""
        make_inner = partial(AtomicCheckpointIO, self._verify)
        io = io or make_inner()
        fill_wrapping_checkpoint_io(io, make_inner)
        return io

    @property
    def saves_sharded(self) -> bool:
        """Whether checkpoints are directories."""
        return self._distributed and self._strategy.world_size > 1

    # --- collecting ---------------------------------------------------------------------------

    def module_state(self) -> dict[str, Any]:
        """The model's state: shards, or whole tensors on rank 0 and nothing elsewhere."""
        layout = self._layout()
        if layout.is_part and self._strategy.world_size > 1:
            show_shards(layout.module)
            group = layout.shard_ranks.group
            broadcast_module_states(layout.module, parameters=False, group=group)
            if self._distributed:
                return layout.module.state_dict()
        return self.whole_module_state()

    def whole_module_state(self) -> dict[str, Any]:
        """The state of the whole model on the first rank, nothing elsewhere; all ranks call it."""
        layout = self._layout()
        if not layout.is_part:
            return layout.module.state_dict()
        show_shards(layout.module)
        return layout.join_parts(state.full_state(layout.module, keep=layout.shard_ranks.is_first))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state: shards by parameter name, or whole tensors by position."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        layout = self._layout()
        if not layout.is_part:
            found = Strategy.optimizer_state(self._strategy, optimizer)
            return state.with_names(layout.module, optimizer, found)
        show_shards(layout.module)
        if self.saves_sharded:
            return layout.sharded_optimizer_state(optimizer)
        return layout.whole_optimizer_state(optimizer)

    def _extra_state(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        values: dict[str, Any] = {}
        tensors: dict[str, dict[str, Any]] = {}
        for part in self._parts:
            own, own_tensors = part.extra_state()
            values |= own
            tensors |= own_tensors
        layout = self._layout()
        if layout.replica_ranks == ALL_RANKS:
            return values, tensors
        # values of the first replica group at the top, and a list of those of all groups
        every = ALL_RANKS.all_gather(values)[:: layout.replica_ranks.size]
        return {**every[0], "copies": every}, tensors

    # --- saving -------------------------------------------------------------------------------

    def save(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None
    ) -> None:
        """Write a checkpoint; it appears under its name only when it is complete."""
        if not dist.is_initialized() and self._strategy.global_rank > 0:
            return  # before a run: processes do not know each other, and each has the whole model
        path = ALL_RANKS.broadcast(filepath)  # keep its type for a custom CheckpointIO
        layout = self._layout()
        values, tensors = self._extra_state() if "optimizer_states" in checkpoint else ({}, {})
        if self.saves_sharded:
            check_folder(path, storage_options)
            stored = _take_tensors(checkpoint, layout.replica_group)
            stored |= {k: found for k, found in {**tensors, TIES: layout.ties}.items() if found}
            if values:
                checkpoint[EXTRA] = values
            save_sharded_checkpoint(stored, checkpoint, Path(path), ALL_RANKS)
            self._newest = Path(path)
            return
        if values or tensors:
            keep = layout.shard_ranks.is_first
            whole = {
                EXTRA_TENSORS[kind]: layout.join_parts(state.gather_tensors(found, keep))
                for kind, found in tensors.items()
            }
            checkpoint[EXTRA] = {**values, **whole}

        def write() -> None:
            if ALL_RANKS.is_first:
                with naming(path):
                    self._strategy.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)

        ALL_RANKS.together(write)
        self._newest = Path(path) if is_local(path) else None

    def move_links(self, removed: str | Path) -> None:
        """Point links to a checkpoint that is about to be removed to the newest one."""
        if self._strategy.is_global_zero and self._newest is not None and is_local(removed):
            move_links(Path(removed), self._newest)

    # --- loading ------------------------------------------------------------------------------

    def load(self, checkpoint_path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint file or directory; tensors of a directory are loaded later.

        Args:
            checkpoint_path: A full or a sharded checkpoint, of this package or stock Lightning.
            weights_only: As given to ``trainer.fit`` and its siblings. ``None`` means ``True``:
                only tensors and plain values are built, whatever the checkpoint asks for. False
                loads any Python object, and runs any code in the checkpoint.
        """
        path = ALL_RANKS.broadcast(checkpoint_path)  # all ranks read the first one's path
        if is_local(path):
            ALL_RANKS.together(lambda: ALL_RANKS.is_first and put_back(Path(path)))
        if is_sharded_checkpoint(path):
            source = ShardedCheckpoint(Path(path), weights_only, ALL_RANKS, self._verify)
            checkpoint = source.read_meta()
            checkpoint |= {_SOURCE: source, _PATH: str(path)}
            if "lr_schedulers" in checkpoint:  # stock Lightning drops the key of the optimizers
                checkpoint.setdefault("optimizer_states", [])
            return checkpoint
        io = self._strategy.checkpoint_io
        if is_local(path) and type(io) in (TorchCheckpointIO, AtomicCheckpointIO):
            checkpoint = load_full_checkpoint(path, weights_only, ALL_RANKS, self._verify)
        else:
            with naming(path):
                checkpoint = dict(io.load_checkpoint(path, weights_only=weights_only))
        checkpoint[_PATH] = str(path)
        return checkpoint

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load the model's state now, or once the model is sharded."""
        load = partial(self._load_model, checkpoint, strict)
        if self._model_is_ready:
            load()
        else:
            self._deferred_load = load

    def run_deferred_load(self) -> None:
        """Load the state that :meth:`load_model` was given before the model was ready."""
        self._model_is_ready = True
        load, self._deferred_load = self._deferred_load, None
        if load is not None:
            load()

    def _load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        module = self._layout().module
        show_shards(module)
        source = checkpoint.get(_SOURCE)
        if source is not None:
            state.load_sharded_model(module, source, strict)
        else:
            with naming(checkpoint.get(_PATH)):
                state.load_model(module, checkpoint["state_dict"], strict, ALL_RANKS)
        for part in self._parts:
            part.on_weights_loaded()
            part.load_weights(_read_kinds(module, checkpoint, part.weight_kinds))

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of all optimizers, then this package's own entry."""
        with naming(checkpoint.get(_PATH)):
            self._load_optimizers(checkpoint)

    def _load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        layout, strategy = self._layout(), self._strategy
        module = layout.module
        show_shards(module)
        source = checkpoint.get(_SOURCE)
        saved_extra = checkpoint.get(EXTRA, {})
        extra = {k: v for k, v in saved_extra.items() if k not in EXTRA_TENSORS.values()}
        kept = source.keys_under("optimizer_0") if source else checkpoint["optimizer_states"]
        needed = checkpoint["global_step"] == 0 and any(o.state_dict() for o in strategy.optimizers)
        if needed and not kept:
            raise ValueError(_BEFORE_TRAINING)
        for index, optimizer in enumerate(strategy.optimizers):
            if source is not None:
                place = _optimizer_path(source, index, layout.replica_group)
                state.load_sharded_optimizer(
                    module, optimizer, source, place, module.strict_loading, layout.aliases
                )
            else:
                saved = _whole_state(checkpoint["optimizer_states"], index)
                layout.load_whole_optimizer_state(optimizer, saved)
        saved_schedules = checkpoint.get("lr_schedulers", ())
        state.check_schedules(strategy.lr_scheduler_configs, saved_schedules)
        copies = extra.get("copies", [extra])
        values = copies[layout.replica_group % len(copies)]
        for part in self._parts:
            kinds = part.tensor_kinds if isinstance(module, FSDPModule) else ()
            part.load_extra_state(values, _read_kinds(module, checkpoint, kinds))


def _read_kinds(
    module: nn.Module, checkpoint: Mapping[str, Any], kinds: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Read kinds of tensors, sharded like the parameters; all ranks call it.

    Each kind is loaded by a collective, so in one order on all ranks.
    """
    source, whole = checkpoint.get(_SOURCE), checkpoint.get(EXTRA, {})
    return {
        kind: state.load_like(module, whole.get(EXTRA_TENSORS[kind], {}))
        if source is None
        else state.load_sharded_like(module, source, kind)
        for kind in kinds
    }


def is_replica_key(key: object) -> bool:
    """Whether a folder has optimizers of a replica group other than the first under this key."""
    return str(key).startswith("node_")


def _optimizer_path(checkpoint: ShardedCheckpoint, index: int, group: int) -> tuple[str, ...]:
    """Path of an optimizer's state in a folder, for a replica group.

    With N saved replica groups, group n continues with the state of group n % N.
    """
    others = {path[0] for path in checkpoint.paths.values() if is_replica_key(path[0])}
    number = group % (1 + len(others))
    own = f"optimizer_{index}"
    return (f"node_{number}", own) if number else (own,)


def _take_tensors(checkpoint: dict[str, Any], group: int) -> dict[str, Any]:
    """Move the tensors of Lightning's checkpoint into a dictionary for the data files."""
    stored = {"state_dict": checkpoint.pop("state_dict")}
    if "optimizer_states" in checkpoint:
        own = {f"optimizer_{i}": found for i, found in enumerate(checkpoint["optimizer_states"])}
        stored |= {f"node_{group}": own} if group else own
        checkpoint["optimizer_states"] = []  # the key says that there is training state
    return stored


def _whole_state(states: Sequence[Any], index: int) -> Any:
    if index < len(states):
        return states[index]
    raise ValueError(
        f"there is no state for optimizer {index}: it was saved with "
        f"{counted(len(states), 'optimizer')}. Configure as many as in the run that saved it, or "
        "load only the weights."
    )
