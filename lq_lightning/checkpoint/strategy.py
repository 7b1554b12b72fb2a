"""Saving and restoring for FSDP2 strategies, at any world size and in both formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lq_lightning._compat.lightning import fill_wrapping_checkpoint_io
from lq_lightning.checkpoint import by_name, places, state
from lq_lightning.checkpoint.files import is_local, is_sharded_checkpoint, move_links, put_back
from lq_lightning.checkpoint.folder import (
    ShardedCheckpoint,
    check_folder,
    save_sharded_checkpoint,
)
from lq_lightning.checkpoint.ranks import RankGroup
from lq_lightning.checkpoint.single_file import AtomicCheckpointIO, load_full_checkpoint, naming
from lq_lightning.foundation.agreement import broadcast_module_states
from lq_lightning.foundation.parameters import tied_names

__all__ = ["CheckpointingStrategy"]

# Keys under which an open ShardedCheckpoint, and where anything came from, pass through Trainer.
_SOURCE, _PATH = "_sharded_checkpoint", "_checkpoint_path"
EXTRA = "lq_lightning"  # key of this package's own entry in a checkpoint
# Kinds of tensors by parameter name in that entry, of which folders say "replica" for "tensors".
EXTRA_TENSORS = {"replica": "tensors", "velocity": "velocity", "anchor": "anchor"}
TIES = "ties"  # where a folder says which weights are one tensor


class CheckpointingStrategy(ModelParallelStrategy):
    """The checkpoint half of :class:`FullyShardedStrategy`.

    On one rank every checkpoint is one file. Restoring follows the order of a single device:
    Trainer reads the checkpoint before ``setup`` (so its ``weights_only`` is honoured), the model's
    state is loaded as soon as the model is sharded, before the optimizers are made.

    Args:
        verify_checkpoints: Compare checkpoints with their checksums before anything is loaded.
        options: Those of ``ModelParallelStrategy``.
    """

    def __init__(self, verify_checkpoints: bool = True, **options: Any) -> None:
        """Keep the options."""
        super().__init__(**options)
        self._verify_checkpoints = verify_checkpoints
        self._deferred_load: Callable[[], None] | None = None
        self._is_set_up = False
        self._newest_checkpoint: Path | None = None  # that was saved to a file system

    # --- for subclasses -----------------------------------------------------------------------

    @property
    def checkpoint_ranks(self) -> RankGroup:
        """The ranks that write and read one checkpoint together."""
        return RankGroup()

    @property
    def shard_ranks(self) -> RankGroup:
        """The ranks that share the tensors of this rank's module, at most all that write.

        Others hold other parts of the model under other names, and are saved into the same
        directory.
        """
        return self.checkpoint_ranks

    @property
    def aliases(self) -> Mapping[str, str]:
        """Name of a tied parameter in this rank's part of the model -> its first in the whole one.

        Optimizer states are saved under the latter, as without parts.
        """
        return {}

    @property
    def ties(self) -> Mapping[str, str]:
        """Further names of tied parameters of the whole model -> their first ones."""
        return tied_names(self._require_module())

    def join_parts(self, part: dict[str, Any]) -> dict[str, Any]:
        """Whole tensors of all parts of the model on the first rank, any dictionary elsewhere.

        All ranks call it; ``part`` counts on the first of :attr:`shard_ranks`. Values are tensors
        or dictionaries of them, by parameter name.
        """
        return part

    def whole_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state as one process has it, on the first rank; all ranks call it."""
        return by_name.gather_optimizer(self._require_module(), optimizer, self.checkpoint_ranks)

    def load_whole_optimizer_state(self, optimizer: Optimizer, whole: Mapping[str, Any]) -> None:
        """Load what one process or :meth:`whole_optimizer_state` saved; all ranks call it."""
        module = self._require_module()
        named = by_name.state_by_name(module, optimizer, whole)
        if named is None:
            by_name.check_order(module, optimizer, self.shard_ranks)
        state.load_optimizer(module, optimizer, named or whole, strict=module.strict_loading)

    def on_weights_loaded(self) -> None:
        """Called after the weights were replaced by those of a checkpoint."""

    @property
    def copy_number(self) -> int:
        """Which copy of the model this rank trains, if some are trained alone.

        All have the weights of the first when a checkpoint is written, and optimizers of their own.
        """
        return 0

    @property
    def copy_ranks(self) -> RankGroup:
        """The ranks of that copy."""
        return self.checkpoint_ranks

    def extra_state(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Training state beyond Lightning's: plain values, and DTensors by kind and parameter."""
        return {}, {}

    @property
    def extra_kinds(self) -> tuple[str, ...]:
        """Kinds of tensors that :meth:`load_extra_state` wants, of :data:`EXTRA_TENSORS`."""
        return ("replica",)

    def load_extra_state(
        self, values: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Restore what :meth:`extra_state` returned; tensors are sharded for this world size."""

    # --- Lightning's switches -----------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """False: Trainer then passes ``weights_only`` on; the model is loaded late all the same."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True: Trainer calls :meth:`load_optimizer_state_dict`, only while fitting."""
        return True

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Writes and reads single-file checkpoints."""
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO(self._verify_checkpoints)
        make_inner = partial(AtomicCheckpointIO, self._verify_checkpoints)
        fill_wrapping_checkpoint_io(self._checkpoint_io, make_inner)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @property
    def saves_sharded(self) -> bool:
        """Whether checkpoints are directories."""
        return self._save_distributed_checkpoint and self.world_size > 1

    def check_checkpoint_io(self) -> None:
        """Refuse a ``CheckpointIO`` that would be ignored.

        Raises:
            ValueError: Checkpoints are directories, which no ``CheckpointIO`` writes.
        """
        io = self._checkpoint_io
        if self.saves_sharded and type(io) not in (
            type(None),
            TorchCheckpointIO,
            AtomicCheckpointIO,
        ):
            raise ValueError(
                f"`{type(io).__name__}` is not used for sharded checkpoints, which all ranks write "
                "together. Set `save_distributed_checkpoint=False` to save single files through "
                "it, or remove the plugin."
            )

    # --- collecting ---------------------------------------------------------------------------

    def _require_module(self) -> LightningModule:
        if self.lightning_module is None:
            raise RuntimeError(
                "the strategy has no LightningModule yet: call a Trainer method first"
            )
        return self.lightning_module

    @property
    def _is_sharded(self) -> bool:
        return isinstance(self.lightning_module, FSDPModule)

    @property
    def _holds_part(self) -> bool:
        """Whether this rank has only a part of the model or of its tensors."""
        return self._is_sharded

    def _show_shards(self) -> None:
        """Register the sharded parameters again if the last forward left gathered ones in place."""
        if isinstance(self.lightning_module, nn.Module):
            for module in self.lightning_module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state: shards, or whole tensors on rank 0 and nothing elsewhere."""
        module = self._require_module()
        if not self._holds_part:
            return module.state_dict()
        self._show_shards()
        if self.world_size > 1:
            broadcast_module_states(module, parameters=False, group=self.shard_ranks.group)
        if self.saves_sharded:
            return module.state_dict()
        return self.whole_state_dict()

    def whole_state_dict(self) -> dict[str, Any]:
        """The state of the whole model on the first rank, nothing elsewhere; all ranks call it."""
        module = self._require_module()
        if not self._holds_part:
            return module.state_dict()
        self._show_shards()
        return self.join_parts(state.full_state(module, keep=self.shard_ranks.is_first))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state: shards by parameter name, or whole tensors by position."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if not self._holds_part:
            found = Strategy.optimizer_state(self, optimizer)
            return by_name.with_names(self._require_module(), optimizer, found)
        self._show_shards()
        if not self.saves_sharded:
            return self.whole_optimizer_state(optimizer)
        own = state.optimizer_state_by_name(self._require_module(), optimizer, self.aliases)
        return state.merge_parameter_groups(own, self.copy_ranks)

    # --- saving -------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        """Write a checkpoint; it appears under its name only when it is complete.

        Raises:
            TypeError: ``storage_options`` are given for a sharded checkpoint.
            ValueError: A sharded checkpoint is to be written to a URL.
        """
        if not dist.is_initialized() and self.global_rank > 0:
            return  # before a run: processes do not know each other, and each has the whole model
        ranks = self.checkpoint_ranks
        path = ranks.broadcast(filepath)  # of the caller's type, which a custom CheckpointIO gets
        values: dict[str, Any] = {}
        tensors: dict[str, dict[str, Any]] = {}
        if "optimizer_states" in checkpoint:
            values, tensors = self.extra_state()
        if self.saves_sharded:
            check_folder(path, storage_options)
            stored = places.take_tensors(checkpoint, self.copy_number)
            stored |= {kind: found for kind, found in {**tensors, TIES: self.ties}.items() if found}
            if values:
                checkpoint[EXTRA] = values
            save_sharded_checkpoint(stored, checkpoint, Path(path), ranks)
            self._newest_checkpoint = Path(path)
            return
        if values or tensors:
            keep = self.shard_ranks.is_first
            whole = {
                EXTRA_TENSORS[kind]: self.join_parts(state.gather_tensors(found, keep))
                for kind, found in tensors.items()
            }
            checkpoint[EXTRA] = {**values, **whole}

        def write() -> None:
            if ranks.is_first:
                with naming(path):
                    self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)

        ranks.together(write)
        self._newest_checkpoint = Path(path) if is_local(path) else None

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint; links that were last made to it point to the newest one first."""
        newest = self._newest_checkpoint
        if self.is_global_zero and newest is not None and is_local(filepath):
            move_links(Path(filepath), newest)
        super().remove_checkpoint(filepath)

    # --- loading ------------------------------------------------------------------------------

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint file or directory; tensors of a directory are loaded later.

        Args:
            checkpoint_path: A full or a sharded checkpoint, written by this package or by stock
                Lightning.
            weights_only: As given to ``trainer.fit`` and its siblings. ``None`` means ``True``:
                nothing but tensors and plain values is built, whatever the checkpoint asks for.
                False loads any Python object and runs what the checkpoint says.

        Raises:
            FileNotFoundError: There is no such checkpoint.
            ValueError: It is incomplete or damaged.
            pickle.UnpicklingError: It needs ``weights_only=False``.
        """
        ranks, verify = self.checkpoint_ranks, self._verify_checkpoints
        path = ranks.broadcast(checkpoint_path)
        if is_local(path):
            ranks.together(lambda: ranks.is_first and put_back(Path(path)))
        if is_sharded_checkpoint(path):
            source = ShardedCheckpoint(Path(path), weights_only, ranks, verify)
            checkpoint = source.read_meta()
            checkpoint |= {_SOURCE: source, _PATH: str(path)}
            if "lr_schedulers" in checkpoint:  # stock Lightning drops the key of the optimizers
                checkpoint.setdefault("optimizer_states", [])
            return checkpoint
        if is_local(path) and type(self.checkpoint_io) in (TorchCheckpointIO, AtomicCheckpointIO):
            checkpoint = load_full_checkpoint(path, weights_only, ranks, verify)
        else:
            with naming(path):
                loaded = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
            checkpoint = dict(loaded)
        checkpoint[_PATH] = str(path)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model's state now, or once the model is sharded."""
        load = partial(self._load_model, checkpoint, strict)
        if self._is_set_up:
            load()
        else:
            self._deferred_load = load

    def _load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        module = self._require_module()
        self._show_shards()
        source = checkpoint.get(_SOURCE)
        if source is not None:
            state.load_sharded_model(module, source, strict)
        else:
            with naming(checkpoint.get(_PATH)):
                state.load_model(module, checkpoint["state_dict"], strict, self.checkpoint_ranks)
        self.on_weights_loaded()

    def run_deferred_load(self) -> None:
        """Load what :meth:`load_model_state_dict` was given before the model was ready."""
        self._is_set_up = True
        load, self._deferred_load = self._deferred_load, None
        if load is not None:
            load()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of all optimizers, then what this package added to the checkpoint."""
        with naming(checkpoint.get(_PATH)):
            self._load_optimizers(checkpoint)

    def _load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        module = self._require_module()
        self._show_shards()
        source = checkpoint.get(_SOURCE)
        extra = dict(checkpoint.get(EXTRA, {}))
        whole = {kind: extra.pop(key, {}) for kind, key in EXTRA_TENSORS.items()}
        if checkpoint["global_step"] == 0 and any(o.state_dict() for o in self.optimizers):
            places.check_has_optimizers(source or checkpoint["optimizer_states"])
        for index, optimizer in enumerate(self.optimizers):
            if source is not None:
                place = places.optimizer_place(source, index, self.copy_number)
                state.load_sharded_optimizer(
                    module, optimizer, source, place, module.strict_loading, self.aliases
                )
            else:
                saved = places.whole_state(checkpoint["optimizer_states"], index)
                self.load_whole_optimizer_state(optimizer, saved)
        by_name.check_schedules(self.lr_scheduler_configs, checkpoint.get("lr_schedulers", ()))
        tensors: dict[str, dict[str, Any]] = {}
        for kind in self.extra_kinds if self._is_sharded else ():
            if source is not None:
                tensors[kind] = state.load_sharded_like(module, source, kind)
            else:
                tensors[kind] = state.load_like(module, whole[kind])
        self.load_extra_state(extra, tensors)
