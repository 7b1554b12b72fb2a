"""A rank that dies, hangs or drifts."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lq_testing import RankError
from lq_testing.lightning_models import (
    SMALL,
    Fails,
    Losses,
    TinyModule,
    loader,
    run_trainer,
    trainer,
)
from lq_testing.ranks import free_port
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from lq_lightning import QuantizedFSDPStrategy
from lq_lightning.strategies import failures
from lq_lightning.strategies.failures import LostRankError, explain_lost_rank


class Dies(Callback):
    """Rank 1 dies without a word, in a step or between the steps."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 1 and self.where == "step":
            self._die(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.where == "end":
            self._die(trainer)
            torch.distributed.barrier()

    def _die(self, trainer: pl.Trainer) -> None:
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def _dying(rank: int, world_size: int, root: str, where: str, options: dict[str, Any]) -> None:
    run = trainer(QuantizedFSDPStrategy(**options), root, callbacks=[Dies(where)])
    run.fit(TinyModule(), loader())


@pytest.mark.parametrize(
    ("where", "options"), [("step", SMALL), ("end", {"weights": "none", "gradients": "none"})]
)
def test_a_dead_rank_is_named(tmp_path: Path, where: str, options: dict[str, Any]) -> None:
    with pytest.raises(RankError) as error:
        run_trainer(_dying, 2, str(tmp_path), where, options, timeout=60.0)
    assert "SIGKILL" in error.value.failures[1]
    lost = "rank 0 of 2 lost contact with another rank, which died, got stuck or ran out of batches"
    assert f"LostRankError: {lost}" in error.value.failures[0]


def _saving(rank: int, world_size: int, root: str, where: str) -> None:
    failures._TOGETHER = timedelta(seconds=1)
    for ranks in ((0, 1), (1,)):
        saves = [OnExceptionCheckpoint(root, filename=f"{len(ranks)}{end}") for end in "ab"]
        run = trainer(
            QuantizedFSDPStrategy(**SMALL, save_distributed_checkpoint=where == "folder"),
            root,
            callbacks=[Fails(1, *ranks), *saves],
            enable_checkpointing=True,
        )
        alone = len(ranks) == 1
        why = (
            r"rank 1: .*1a.ckpt` is not saved: this rank failed \(KeyError" if rank else "has gone"
        )
        told = "of this rank" if rank in ranks else "because rank 1 failed: KeyError: of this rank"
        start = time.monotonic()
        with (
            pytest.raises(KeyError if rank in ranks else LostRankError, match=told),
            pytest.warns(UserWarning, match=why) if alone else nullcontext(),
            mock.patch.object(failures, "meet", wraps=failures.meet) as meet,
        ):
            run.fit(TinyModule(), loader())
        assert time.monotonic() - start < 30
        assert meet.call_count == (rank if alone else 2)  # no callback waits again


@pytest.mark.parametrize("where", ["folder", "file"])
def test_ranks_that_fail_alone_do_not_wait_for_a_checkpoint(tmp_path: Path, where: str) -> None:
    run_trainer(_saving, 2, str(tmp_path), where, timeout=60.0)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["2a.ckpt", "2b.ckpt"]


def _hanging(rank: int, world_size: int, root: str) -> float:
    run = trainer(QuantizedFSDPStrategy(**SMALL, timeout=timedelta(seconds=3)), root)
    module, seconds = TinyModule(), iter((5, 0, 12))  # the first batch is part of the start
    if rank == 1:
        module.on_train_batch_start = lambda *args: time.sleep(next(seconds))  # type: ignore[method-assign]
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(LostRankError, match="rank 0 of 2 lost contact"):
            run.fit(module, loader())
    else:
        with pytest.raises(RuntimeError):
            run.fit(module, loader())
    return time.monotonic() - start


def test_a_hanging_rank_stops_the_others_after_the_timeout(tmp_path: Path) -> None:
    times = run_trainer(_hanging, 2, str(tmp_path), timeout=60.0)
    assert times[0] < times[1] - 4  # seconds that it does not wait any more


def test_other_errors_pass_through() -> None:
    with pytest.raises(RuntimeError, match="^shapes differ$"), explain_lost_rank(0, 2):
        raise RuntimeError("shapes differ")
    with pytest.raises(LostRankError, match="rank 1 of 4"), explain_lost_rank(1, 4):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:525] Connection closed by peer [::1]:3")
    with pytest.raises(RuntimeError, match="^database:") as error, explain_lost_rank(1, 4):
        raise RuntimeError("database: connection refused")
    assert not isinstance(error.value, LostRankError)
    with pytest.raises(RuntimeError, match="^Connection reset") as error, explain_lost_rank(0, 1):
        raise RuntimeError("Connection reset by peer")
    assert not isinstance(error.value, LostRankError)


class Wrapped(TinyModule):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.wrap = wrap

    def configure_model(self) -> None:
        self.net.head = self.wrap(self.net.head)


class Scalar(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))


class ScalarOnMeta(Scalar):
    """What `trainer.init_module(empty_init=True)` gives: its values do not exist yet."""

    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__()


def _before_the_first_step(rank: int, world_size: int, root: str) -> None:
    fsdp1 = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    for module, error, message in (
        (Wrapped(fsdp1), TypeError, r"`net.head` is wrapped in `FullyShardedD.*fully_shard"),
        (Wrapped(DistributedDataParallel), TypeError, r"in `DistributedDataP.*Remove the wrapper"),
        (Wrapped(nn.DataParallel), TypeError, r"in `DataParallel`.*Remove the wrapper"),
        (Scalar(), ValueError, r"`temperature` is a scalar"),
        (Wrapped(nn.Module.bfloat16), ValueError, r"unit `root` .* torch.bfloat16 \(`net.head.w"),
        (ScalarOnMeta(), ValueError, r"`temperature` is a scalar"),
    ):
        losses = Losses()
        with pytest.raises(error, match=message):
            trainer(QuantizedFSDPStrategy(), root, callbacks=[losses]).fit(module, loader())
        assert not losses.values
    with pytest.raises(ValueError, match=r"no submodule of class \['Blok'\].*Block"):
        trainer(QuantizedFSDPStrategy(units=["Blok"]), root).fit(TinyModule(), loader())
    with pytest.raises(ValueError, match=r"`sync_batchnorm=True` needs GPUs"):
        trainer(QuantizedFSDPStrategy(), root, sync_batchnorm=True).fit(TinyModule(), loader())
    if rank == 1:  # the other has its device, and would wait
        with pytest.raises(ValueError, match=r"process 2 of its machine, .*`devices=1` there"):
            trainer(QuantizedFSDPStrategy(), root, devices=1).fit(TinyModule(), loader())


class Tampers(Callback):
    """Rank 1 changes its copy of the weights that differences refer to."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            for unit in trainer.strategy.communication._units:
                if unit.gather.unit.name == "net.blocks.1":
                    unit.gather.replica.values[200] += (
                        1.0  # of `up.weight`, which travels quantized
                    )


def _drifting(rank: int, world_size: int, root: str) -> None:
    for action in ("resync", "raise"):
        strategy = QuantizedFSDPStrategy(**SMALL, check_replicas_every_n_steps=3, on_drift=action)
        run = trainer(strategy, root, callbacks=[Tampers()])
        if action == "raise":
            with pytest.raises(RuntimeError, match=r"`net.blocks.1`"):
                run.fit(TinyModule(), loader())
        elif rank == 0:
            with pytest.warns(UserWarning, match=r"first: `net.blocks.1`.*refreshed"):
                run.fit(TinyModule(), loader())
        else:
            run.fit(TinyModule(), loader())
        if action == "resync":
            assert strategy.communication.check_replicas() == []


def _refused_or_repaired(rank: int, world_size: int, root: str) -> None:
    _before_the_first_step(rank, world_size, root)
    _drifting(rank, world_size, root)


def test_errors_come_before_the_first_step_and_drift_is_repaired(tmp_path: Path) -> None:
    run_trainer(_refused_or_repaired, 2, str(tmp_path))


ENDS = """
import sys
from lq_testing.lightning_models import Fails, TinyModule, loader, trainer
from lq_lightning import QuantizedFSDPStrategy
fails = Fails(2, *map(int, sys.argv[2].split(",")))
run = trainer(QuantizedFSDPStrategy(min_quantized_numel=64), sys.argv[1], callbacks=[fails])
run.fit(TinyModule(), loader())
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "0,1"])
def test_one_rank_prints_its_traceback(tmp_path: Path, ranks: str) -> None:
    port = str(free_port())
    processes = []
    for rank in range(2):
        names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "GROUP_RANK": "0"}
        names |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        names |= {"TORCHELASTIC_RUN_ID": "x", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", ENDS, str(tmp_path), ranks],
                env={**os.environ, **names},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [process.communicate(timeout=90)[1] for process in processes]
    assert all(process.returncode for process in processes)
    silent = [text for text in said if "Traceback" not in text]
    assert len(silent) == 1, said
    assert sum(text.count("Traceback") for text in said) == 1
    assert "rank" in silent[0]
    assert "KeyError: of this rank" in silent[0]


def test_an_error_with_another_ranks_cause_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = mock.Mock(world_size=2, global_rank=1, model=None)
    monkeypatch.setattr(failures, "_LET_CAUSE_PRINT", timedelta(0))
    notes: list[str] = []
    monkeypatch.setattr(failures, "leave_note", lambda key, text: [*notes, text][0])
    shown = mock.Mock()
    own, same, lost = KeyError("x"), KeyError("y"), LostRankError("rank 1 stopped because of 0\nx")
    for error, found in ((own, []), (same, ["rank 0 failed: KeyError: x"]), (lost, [])):
        monkeypatch.setattr(sys, "excepthook", shown)
        notes[:] = found
        failures.Failures(strategy).explain(error)
        error.__cause__ = OSError("of a socket")
        sys.excepthook(type(error), error, mock.sentinel.trace)
        sys.excepthook(KeyError, KeyError("of no run"), None)
        kept = getattr(sys.excepthook, "__closure__", None) or ()
        assert all(cell.cell_contents is not error for cell in kept), "with its tensors"
    traces = [call.args[2] for call in shown.call_args_list[::2]]  # hooks of others see all
    assert traces == [mock.sentinel.trace, None, None]  # its own where it is the first to fail
    assert str(lost) == "rank 1 stopped because of 0"
    assert [error.__cause__ is None for error in (own, same, lost)] == [False, True, True]
    told = "rank 1 of 2 failed as another: rank 0 failed: KeyError: x"
    assert capsys.readouterr().err.splitlines() == [told]  # before its own words
