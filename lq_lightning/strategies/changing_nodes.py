"""Nodes that come and go: each is a run of its own, and they meet in rounds, see [Note: rounds]."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from lq_lightning._compat.lightning import restore_from
from lq_lightning.checkpoint.checkpointer import ALL_RANKS
from lq_lightning.data_parallel.config import split_address
from lq_lightning.data_parallel.meeting import Meeting, Round, is_last
from lq_lightning.data_parallel.patient_store import PatientStore
from lq_lightning.data_parallel.rounds import Arrived, LostNodeError, RoundOptimizer
from lq_lightning.foundation.checks import counted
from lq_lightning.foundation.groups import shared_split, world_group
from lq_lightning.foundation.parameters import clean_name
from lq_lightning.foundation.served_files import ServedFolder, fetch, own_address
from lq_lightning.foundation.streams import MaxReduction
from lq_lightning.strategies.replica_groups import ReplicaGroups

T = TypeVar("T")
_REFUSED = (BatchSizeFinder, LearningRateFinder, StochasticWeightAveraging, WeightAveraging)
_SAVED = "meeting"  # key of this part's values in a checkpoint
_AGAIN = 0.1  # seconds before a node that came too late tries again


def on_first(work: Callable[[], T]) -> T:
    """Run ``work`` on the first rank of this node; all ranks return its result, or raise."""
    result = ALL_RANKS.together(lambda: work() if ALL_RANKS.is_first else None)
    return ALL_RANKS.broadcast(result)  # type: ignore[return-value]


class ChangingNodes(ReplicaGroups):
    """Nodes that come and go, as :class:`LocalSteps` with ``meet_at`` says.

    A node is the whole run of its Trainer. Its first rank agrees with the other nodes at the
    meeting point; each rank exchanges tensors with those of the same number in the other nodes.
    """

    seat = -1
    """Number of this node below ``max_nodes`` while it trains."""

    _meeting: Meeting | None = None  # on the first rank
    _folder: ServedFolder | None = None
    _rounds: RoundOptimizer | None = None
    _pending: Callable[[], list[int]] | None = None
    _starts = _is_asked = _skips = _has_ended = False
    _steps = 0  # optimizer steps of the run
    _parts = 0  # loaders of this node's parts of the data

    @property
    def max_nodes(self) -> int:
        """Number of seats."""
        return self._config.max_nodes

    @property
    def are_several(self) -> bool:
        """Never: this run has one node."""
        return False

    def check(self, module: LightningModule, synchronizes_layers: bool) -> None:
        """Refuse runs of several nodes, and callbacks that train and forget, or write weights."""
        every, owner = self._topology(), type(self._strategy).__name__
        if every.num_nodes > 1 or self._strategy.num_nodes > 1:
            raise ValueError(
                f"`{owner}(local_steps=LocalSteps(meet_at={self._config.meet_at!r}))`: every node "
                f"is a run of its own, but this run has {max(every.num_nodes, 2)} nodes or more. "
                "Start it once per node, with `Trainer(num_nodes=1)` and without `node_size`."
            )
        callbacks: list[Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks if module.trainer.state.fn == TrainerFn.FITTING else ():
            if isinstance(callback, _REFUSED):
                raise NotImplementedError(
                    f"the callback `{type(callback).__name__}` tries steps that others would take "
                    "for progress, or writes weights of its own after the last round, which "
                    f"`{owner}(local_steps=LocalSteps(meet_at=...))` does not allow. Search in a "
                    "run without `local_steps`; for averages use `lq_lightning.callbacks.EMA`."
                )

    # --- coming -----------------------------------------------------------------------------------

    def enter(self, trainer: Trainer) -> None:
        """Take a seat, and let ``fit`` start from the state of a node that trains, if any does."""
        self.leave()
        self._rounds = self._outer = None
        if trainer.state.fn != TrainerFn.FITTING or self._config.meet_at is None:
            return
        host, port = split_address(self._config.meet_at)
        self._address = own_address(host, port)
        self.seat, self._place, found = on_first(self._come)
        self._starts = found is None
        if found is not None:
            restore_from(trainer, found, self._begin_restore)
        self._skips = found is not None
        which = "starts the run" if found is None else "joins nodes that train"
        rank_zero_info(
            f"This node {which}, in seat {self.seat} of {self._config.max_nodes} at "
            f"{self._config.meet_at}"
        )

    def _come(self) -> tuple[int, str, str | None]:
        config = self._config
        if config.meet_at is None:
            raise AssertionError("`enter` has looked")
        self._folder = ServedFolder(self._address)
        self._meeting = Meeting(
            config.meet_at, self._folder.url, max_nodes=config.max_nodes, wait=config.wait
        )
        self._meeting.enter()
        options = ("every", "outer_lr", "outer_momentum", "bits", "error_feedback", "max_nodes")
        others = {
            "ranks per node": self._topology().world_size,
            "PL_GLOBAL_SEED": os.environ.get("PL_GLOBAL_SEED"),  # by which loaders divide the data
        }
        self._meeting.agree_on("options", {n: getattr(config, n) for n in options} | others)
        return self._meeting.seat, str(self._folder.path), self._find_state()

    def _find_state(self) -> str | None:
        """Fetch the state of a node that trains, and return its path; None if there is none."""
        meeting, folder = self._meeting, self._folder
        if meeting is None or folder is None:
            raise AssertionError("only the first rank looks")
        while living := meeting.start_or_find():
            failed = 0
            for donor, url in living.items():
                told = meeting.ask(donor, url)
                if told is None or not told["files"]:
                    failed += told is not None
                    continue
                began = time.monotonic()
                try:
                    for name in told["files"]:
                        fetch(url, name, folder.path / name, self._config.wait)
                except OSError as error:
                    rank_zero_info(f"the state of seat {donor.seat} did not arrive: {error}")
                    break  # it may have a newer one
                rank_zero_info(
                    f"Fetched the state after round {told['round']} from seat {donor.seat}: "
                    f"{sum(told['files'].values()) / 1e6:.1f} MB in "
                    f"{time.monotonic() - began:.1f} s"
                )
                return str(folder.path / told["path"])
            if failed == len(living):
                raise RuntimeError(
                    "no node could save its state for this one: their logs say why. Free some "
                    "space in their temporary folders, and start it again."
                )
        return None

    def leave(self) -> None:
        """Give the seat back."""
        if self._rounds is not None:
            self._rounds.drop_group()
        if self._meeting is not None:
            self._meeting.leave()
        if self._folder is not None:
            self._folder.close()
        self._meeting = self._folder = self._pending = None

    def set_up(self, trainer: Trainer, module: LightningModule) -> None:
        """Make the outer optimizer for a run of ``fit``."""
        config, device = self._config, self._strategy.root_device
        if config.meet_at is None:
            raise AssertionError("a ReplicaGroups has other configs")
        store = PatientStore(config.meet_at, config.wait)
        names = self._agree_on_parameters()
        self._rounds = self._outer = RoundOptimizer(
            config,
            world_group(),
            store.connect,
            self._address,
            names=names,
            min_quantized_numel=self._min_quantized_numel,
            device=device,
        )
        self._votes = MaxReduction(device, torch.int64)
        self._steps, self._parts, self._has_ended = 0, 0, False
        groups = {
            p: f"group {index} of {type(optimizer).__name__} {number}"
            for number, optimizer in enumerate(trainer.optimizers)
            for index, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        facts: dict[str, object] = {
            n: f"{p.dtype} in {groups.get(p, 'no optimizer')}" for p, n in names.items()
        }
        facts["min_quantized_numel"] = self._min_quantized_numel
        on_first(lambda: self._first.agree_on("model", facts))
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [c for c in callbacks if not isinstance(c, _Rounds)]
        self.insert_callback(callbacks)
        callbacks.append(_Rounds(self))

    def _agree_on_parameters(self) -> dict[nn.Parameter, str]:
        module = self._trainer.lightning_module
        names = {p: clean_name(n) for n, p in module.named_parameters()}
        shapes = {n: tuple(p.shape) for p, n in names.items()}
        on_first(lambda: self._first.agree_on("shapes", shapes))
        return names

    def _begin_restore(self, ckpt_path: object) -> None:
        if ckpt_path is not None:
            rank_zero_warn(
                "other nodes train already, so this one starts from their state and not from "
                f"`ckpt_path={str(ckpt_path)!r}`."
            )
        self._agree_on_parameters()

    @property
    def _first(self) -> Meeting:
        if self._meeting is None:
            raise AssertionError("only the first rank of a node meets others")
        return self._meeting

    @property
    def _own(self) -> RoundOptimizer:
        if self._rounds is None:
            raise AssertionError("`set_up` comes first")
        return self._rounds

    def begin(self, trainer: Trainer) -> None:
        """Catch up with the rounds since the state that this node has."""
        self._skips, self._own.is_open = False, self._starts
        for optimizer in trainer.optimizers:
            self._own.begin_step(optimizer)
        self._own.is_open = False
        if self._starts:
            self._steps = max(self._steps, trainer.global_step)
            latest = on_first(lambda: self._first.latest())
            self._own.number = 0 if latest is None else latest.number
        elif ALL_RANKS.is_first and self._folder is not None:
            self._folder.remove(*(p.name for p in self._folder.path.glob("state-*")))
        self._catch_up(announce=not self._starts)

    def skip_read_batches(self, loader: object) -> None:
        """Let a loader of this node's part of the data go on where the run is in its epoch.

        A loader with ``load_state_dict`` does so by itself. Refuses data of another length.
        """
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        done = 0 if progress.is_last_batch else progress.current.ready  # a new epoch begins
        skips = self._skips and self._trainer.training and not hasattr(loader, "load_state_dict")
        batches = loader.batch_sampler if isinstance(loader, DataLoader) else None
        part = batches.sampler if isinstance(batches, BatchSampler) else None
        grows = self._trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        if self._trainer.training and not grows and isinstance(part, DistributedSampler):
            self._parts += 1
            facts = {"samples to divide": len(part.dataset)}  # type: ignore[arg-type]
            on_first(lambda: self._first.agree_on(f"data/{self._parts}", facts))
        if skips and done and isinstance(batches, BatchSampler):
            batches.sampler = _Later(batches.sampler, done * batches.batch_size)

    # --- steps ------------------------------------------------------------------------------------

    def check_trained(self) -> None:
        """Refuse, between two batches, parameters that were frozen."""
        self._own.check_trained()

    def after_optimizer_step(self, stepped: bool) -> None:
        """Take part in a round once this node has taken enough steps, or one is called."""
        if self._outer is None:
            return
        self._outer.steps += 1
        self._steps += 1
        if self._hears_call() or self._outer.steps >= self._config.every:
            self._take_round(at_once=False)

    def _hears_call(self) -> bool:
        """Whether a round is called, alike on all ranks: they learn it a step after the first."""
        called = self._meeting is not None and self._meeting.is_called
        if ALL_RANKS.size == 1:
            return called
        world = world_group()
        group = shared_split("rounds", world, [[*range(world.size())]], self._strategy.root_device)
        previous, self._pending = self._pending, self._votes.start([int(called)], group)
        return previous is not None and previous()[0] > 0

    def outer_step(self) -> None:
        """Take part in a round, if this node has taken steps since its last one."""
        if self._outer is not None and self._outer.steps:
            self._take_round(at_once=True)

    def end_training(self) -> None:
        """Let the run end with a last round, of all that are there."""
        if self._outer is not None and (self._outer.steps or not self._has_ended):
            self._take_round(at_once=True, ends=True)

    def stop_in_time(self, trainer: Trainer) -> None:
        """End ``fit`` where the learning rates do, if others have taken more steps."""
        if trainer.global_step < trainer.max_steps <= self._steps:
            self._stop()

    def _stop(self) -> None:
        """Let ``fit`` end after this batch."""
        loop = self._trainer.fit_loop
        loop.min_epochs = loop.epoch_loop.min_steps = None
        self._trainer.should_stop = True

    def _take_round(self, *, at_once: bool, ends: bool = False) -> None:
        """Take part in a round; with ``at_once`` in the first one for which it is not too late.

        After the last one, of which all nodes have the result, further steps are given up.
        """
        outer = self._own
        while True:
            self._catch_up()
            if self._has_ended:
                self._run(outer.give_up)
                return
            outer.check()
            taken = on_first(lambda: self._gather(ends))
            if taken is None:
                if not at_once:
                    return
                time.sleep(_AGAIN)
                continue
            began, sent = time.monotonic(), outer.sent_nbytes
            name = f"round-{taken.number}-{taken.attempt}-{ALL_RANKS.rank}"
            place = Path(self._place, name)
            arrived = self._exchange(taken)
            ALL_RANKS.together(lambda: arrived is not None and outer.write(arrived, place))  # noqa: B023
            everywhere = all(ALL_RANKS.all_gather(arrived is not None))
            counts, asked = on_first(lambda: self._conclude(taken, everywhere))  # noqa: B023
            if counts and arrived is not None:
                break
            outer.drop_group()
            place.unlink(missing_ok=True)
        self._run(lambda: outer.take(arrived, place))
        self._pending, self._is_asked = None, asked or self._is_asked
        if ALL_RANKS.is_first:
            self._first.listen(outer.number)
        self._report(taken, outer.sent_nbytes - sent, time.monotonic() - began)
        self._keep_up(max(member.step for member in taken.members))
        if is_last(taken.members):
            self._has_ended = True
            self._stop()

    @property
    def _trainer(self) -> Trainer:
        module = self._strategy.lightning_module
        if module is None:
            raise AssertionError("rounds are taken while a module trains")
        return module.trainer

    def _gather(self, ends: bool) -> Round | None:
        return self._first.gather(self._own.number + 1, self._steps, self._own.steps, ends=ends)

    def _conclude(self, taken: Round, arrived: bool) -> tuple[bool, bool]:
        counts = self._first.conclude(taken, arrived)
        return counts, counts and self._first.is_asked()

    def _exchange(self, taken: Round) -> Arrived | None:
        me = next(m for m in taken.members if m.seat == self.seat)
        try:
            wait = timedelta(seconds=self._config.wait / 2)
            return self._own.send_and_receive(taken, me.name, wait)
        except LostNodeError as error:
            rank_zero_info(f"round {taken.number}, attempt {taken.attempt}: {error}")
            return None

    def _catch_up(self, *, announce: bool = False) -> None:
        """Take the outer steps of the rounds that this node has missed."""
        outer, missed = self._own, 0
        while not self._has_ended and (found := on_first(self._missed)) is not None:
            attempt, urls, last = found
            self._has_ended = last == outer.number + 1
            name = f"round-{outer.number + 1}-{attempt}-{ALL_RANKS.rank}"
            place = Path(self._place, name)
            ALL_RANKS.together(lambda: self._get(urls, name, place, last))  # noqa: B023
            self._run(lambda: outer.follow(outer.read(place), place))  # noqa: B023
            missed += 1
        if ALL_RANKS.is_first:
            if missed or announce:
                self._first.announce(outer.number + 1)
            self._first.listen(outer.number)
        if self._has_ended:
            self._stop()
        if missed:
            rank_zero_info(f"caught up with {counted(missed, 'round')}, up to {outer.number}")

    def _missed(self) -> tuple[int, list[str] | None, int] | None:
        """The attempt at the next round that counts, where its messages are, the last round or 0.

        None in place of places if nobody had taken a step, as when all have validated before.
        """
        meeting, number = self._first, self._own.number + 1
        attempt, counts = meeting.attempts(number)
        if not counts:
            return None
        latest = meeting.latest()
        members = meeting.members(number, attempt)
        known = {m.seat: m for m in (*members, *(latest.members if latest else ()))}.values()
        last = latest.number if latest is not None and is_last(latest.members) else 0
        last = number if is_last(members) else last
        if meeting.counts(number, attempt) and not any(m.taken for m in members):
            return attempt, None, last
        return attempt, [u for m in known if (u := meeting.url_of(m))], last

    def _get(self, urls: list[str] | None, name: str, place: Path, last: int) -> None:
        if urls is None:
            self._own.write(Arrived(1, 0, []), place)
            return
        errors, number = [], self._own.number + 1
        for url in urls:
            try:
                fetch(url, name, place, self._config.wait)
                return
            except OSError as error:
                errors.append(str(error))
        if last:
            raise RuntimeError(
                f"the run has ended with round {last} while this node was away, so that its "
                "weights are not the final ones. Take them from another node."
            )
        raise RuntimeError(
            f"this node was away for too long: no node has the messages of round {number} any "
            f"more ({'; '.join(errors) or 'nobody is there'}). Start it "
            "again: it then joins as a new one."
        )

    def _keep_up(self, steps: int) -> None:
        """Let learning rates follow those of the node that has taken the most steps."""
        before, self._steps = self._steps, max(steps, self._steps)
        if self._steps > before:
            self.stop_in_time(self._trainer)
        if not self._trainer.lightning_module.automatic_optimization:
            return
        for config in self._trainer.lr_scheduler_configs:
            if config.interval == "step" and not isinstance(config.scheduler, ReduceLROnPlateau):
                for _ in range(self._steps // config.frequency - before // config.frequency):
                    self._trainer.lightning_module.lr_scheduler_step(config.scheduler, None)

    def _report(self, taken: Round, nbytes: float, seconds: float) -> None:
        trainer, present = self._trainer, [member.seat for member in taken.members]
        values = {
            "nodes/members": float(len(present)),
            "nodes/waited_s": taken.waited,
            "nodes/exchange_s": seconds,
            "nodes/sent_MB": nbytes / 1e6,
            "nodes/round": float(taken.number),
        }
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
        steps = ", ".join(str(member.taken) for member in taken.members)
        rank_zero_info(
            f"round {taken.number}: seats {', '.join(map(str, present))} with {steps} steps, "
            f"waited {taken.waited:.2f} s, exchanged {nbytes / 1e6:.2f} MB in {seconds:.2f} s"
            + (f", attempt {taken.attempt + 1}" if taken.attempt else "")
        )

    # --- checkpoints ------------------------------------------------------------------------------

    def save_if_asked(self, trainer: Trainer) -> None:
        """Save this node's state for nodes that join."""
        if not self._is_asked or self._has_ended:
            return
        self._is_asked = False
        self.outer_step()  # where several optimizers step in a batch
        name = f"state-{self._own.number}.ckpt"
        try:
            trainer.save_checkpoint(Path(self._place, name), weights_only=False)
        except (OSError, RuntimeError) as error:  # a full disk, which is the other node's trouble
            rank_zero_warn(f"this node could not save its state for one that joins: {error}")
            if self._folder is not None:
                self._folder.remove(name)
        if self._folder is not None:
            states = sorted(self._folder.path.glob("state-*"), key=lambda p: p.stat().st_mtime)
            self._folder.remove(*(p.name for p in states[:-2]))  # the last one may be read
            self._first.offer(self._own.number, name, self._folder.files(name))

    def extra_state(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """The state of the outer optimizer, and the round that it is of."""
        if self._rounds is None:
            return {}, {}
        tensors = dict(self._rounds.state())
        values: dict[str, Any] = {"round": self._rounds.number, "steps": self._steps}
        if not _are_sharded(tensors):  # on one rank
            values, tensors = {**values, "tensors": tensors}, {}
        return {_SAVED: values}, tensors

    def load_extra_state(
        self, values: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Continue with the saved outer optimizer."""
        if self._rounds is None:
            return
        if not self._rounds.is_open:
            raise RuntimeError(
                "a checkpoint was loaded while this node trains with others, which do not go back "
                "with it. Give it as `ckpt_path` to the first node of a run."
            )
        saved = values.get(_SAVED, {})
        self._rounds.load_state(saved.get("tensors", tensors))
        self._rounds.number, self._steps = saved.get("round", 0), saved.get("steps", 0)


class _Later(Sampler[Any]):
    """A sampler that leaves out its first indices when it is first gone through."""

    def __init__(self, sampler: Iterable[Any], count: int) -> None:
        self._sampler, self._count = sampler, count

    def __iter__(self) -> Iterator[Any]:
        """Go on, or start anew."""
        count, self._count = self._count, 0
        yield from islice(self._sampler, count, None)

    def __len__(self) -> int:
        """Indices of a whole epoch."""
        return len(self._sampler)  # type: ignore[arg-type]


def _are_sharded(tensors: Mapping[str, Mapping[str, Tensor]]) -> bool:
    return any(isinstance(t, DTensor) for found in tensors.values() for t in found.values())


class _Rounds(Callback):
    """Lets a node catch up before its first batch, and look around between batches."""

    def __init__(self, nodes: ChangingNodes) -> None:
        self._nodes = nodes

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Catch up."""
        self._nodes.begin(trainer)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Refuse what was frozen."""
        self._nodes.check_trained()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Save if somebody has asked."""
        self._nodes.save_if_asked(trainer)
        self._nodes.stop_in_time(trainer)
