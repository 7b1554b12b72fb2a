"""SLURM's signal before the time limit: all ranks stop and save, and the job is requeued."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lq_testing.lightning_models import SMALL, Losses, TinyModule, Tokens, run_trainer, trainer
from torch.utils.data import DataLoader

from lq_lightning import QuantizedFSDPStrategy
from lq_lightning.strategies import failures, restarts

VALIDATION, SANITY = -1, -2  # in place of a batch
ARRAY = {"SLURM_ARRAY_JOB_ID": "1070", "SLURM_ARRAY_TASK_ID": "4"}
SCONTROL = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
if [ -e "$(dirname "$0")/refuses" ]; then echo "Job is not a batch job" >&2; exit 1; fi
"""


class Signal(Callback):
    """Sends a signal to one rank in or after a batch, and more to all ranks while they save."""

    def __init__(self, signum: signal.Signals, batch: int = 2, rank: int = 0) -> None:
        self.signum, self.batch, self.rank = signum, batch, rank

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == self.rank and args[-1] == self.batch:
            os.kill(os.getpid(), self.signum)

    def on_validation_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.batch < 0 and trainer.sanity_checking == (self.batch == SANITY):
            os.kill(os.getpid(), self.signum)

    def on_save_checkpoint(self, trainer: pl.Trainer, *args: Any) -> None:
        for signum in (self.signum, signal.SIGTERM) if trainer.interrupted else ():
            os.kill(os.getpid(), signum)


def _slurm(rank: int, world_size: int, root: str, **more: str) -> None:
    """Take this process for a task that `srun` has started."""
    os.environ.pop("TORCHELASTIC_RUN_ID", None)  # Lightning would take torchrun for the launcher
    os.environ |= {
        "SLURM_JOB_ID": "1077",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": str(world_size),
        "SLURM_NTASKS_PER_NODE": str(world_size),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "PATH": f"{root}{os.pathsep}{os.environ['PATH']}",
        **more,
    }


def _fit(root: str, *callbacks: Callback, **options: Any) -> tuple[list[float], int | None]:
    """Train, as the script of a job would; returns losses and the exit code of a stop."""
    torch.manual_seed(0)
    losses, code = Losses(), None
    ckpt_path = options.pop("ckpt_path", None)
    run = trainer(
        QuantizedFSDPStrategy(**SMALL),
        root,
        int(os.environ["SLURM_NTASKS"]),
        callbacks=[losses, *callbacks],
        **{"enable_checkpointing": True, "max_steps": 6, **options},
    )
    if not any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        run.callbacks = [c for c in run.callbacks if not isinstance(c, ModelCheckpoint)]  # type: ignore[attr-defined]
    # a resumed loader starts from its beginning
    data = DataLoader([Tokens()[0]] * 80, batch_size=4)
    try:
        run.fit(TinyModule(), data, DataLoader(Tokens(4)), ckpt_path=ckpt_path)
    except SIGTERMException as stop:
        code = int(stop.code or 0)
    return losses.values, code


def _calls(root: str) -> list[str]:
    """What `scontrol` was asked since this was called the last time."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    path = Path(root, "calls")
    found = path.read_text().splitlines() if path.exists() else []
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    path.unlink(missing_ok=True)
    return found


def _saved(root: str) -> list[str]:
    return sorted(path.name for path in Path(root).glob("hpc*"))


def _alone(rank: int, world_size: int, root: str) -> None:
    """When a run stops, and which checkpoints there are, is the same on one rank."""
    _slurm(rank, world_size, root)
    options: dict[str, Any] = {
        "accumulate_grad_batches": 2,
        "val_check_interval": 4,
        "num_sanity_val_steps": 1,
    }
    whole, _ = _fit(f"{root}/whole", **options)
    # amid a step, after one, in the validation after the fourth batch, before the first batch
    for batch, stops in ((2, 4), (3, 4), (VALIDATION, 4), (SANITY, 0)):
        folder = f"{root}/{batch}"
        first, code = _fit(folder, Signal(signal.SIGUSR1, batch), **options)
        assert (len(first), code, _calls(root)) == (stops, 0, ["requeue 1077"])
        rest, code = _fit(folder, **options)
        assert (first + rest, code) == (whole, None)
    # a run that has reached its end
    first, code = _fit(f"{root}/end", Signal(signal.SIGUSR1, 10), **options)
    assert (first, code, _calls(root)) == (whole, None, [])

    # the second stop replaces the checkpoint of the first, however it saves
    folder = f"{root}/2"
    _fit(folder, Signal(signal.SIGUSR1, 4), **options)
    assert _saved(folder) == ["hpc_ckpt_2.ckpt"]
    _fit(folder, Signal(signal.SIGUSR1, 6), OnExceptionCheckpoint(folder), **options)
    assert _saved(folder) == []

    # another job in the same folder
    _fit(f"{root}/3", Signal(signal.SIGUSR1, 0))
    os.environ |= {"SLURM_JOB_ID": "1078"}
    assert len(_fit(f"{root}/3")[0]) < 6  # submitted again
    for more in ({"SLURM_RESTART_COUNT": "1"}, ARRAY):
        with mock.patch.dict(os.environ, more), pytest.raises(ValueError, match="job 1077, and "):
            _fit(f"{root}/3")

    # a handler of the user stays
    received: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *args: received.append(1))
    with pytest.warns(UserWarning, match="has a handler of SIGUSR1 already"):
        assert _fit(f"{root}/own", Signal(signal.SIGUSR1))[1] is None
    assert received


def _requeues(rank: int, root: str, whole: list[float]) -> None:
    """Without a callback that saves: a start without ``ckpt_path`` goes on, as with Lightning."""
    said: list[str] = []
    with mock.patch.object(failures, "rank_zero_info", said.append):
        first, code = _fit(root, Signal(signal.SIGUSR1, rank=1))
    assert (len(first), code) == (3, 0)
    assert _calls(root) == ["requeue 1077"]
    assert _saved(root) == ["hpc_ckpt_1.ckpt"]
    assert said[0] == (
        "Received SIGUSR1 (rank 1 of 2): all ranks stop after optimizer step 3, save, and the "
        "job is requeued"
    )
    rest, code = _fit(root)
    assert (first + rest, code) == (whole, None)


def _finds_last(rank: int, root: str, whole: list[float]) -> None:
    """``ckpt_path="last"`` finds the state of the stop, and later a newer one."""

    def saves() -> ModelCheckpoint:
        return ModelCheckpoint(f"{root}/last", save_last=True, every_n_train_steps=2)

    options: dict[str, Any] = {
        "plugins": SLURMEnvironment(requeue_signal=int(signal.SIGUSR2)),  # type: ignore[arg-type]
        "ckpt_path": "last",
    }
    with mock.patch.dict(os.environ, ARRAY):
        first, _ = _fit(root, Signal(signal.SIGUSR2), saves(), **options)
        assert len(first) == 3
        assert _calls(root) == ["requeue 1070_4"]
        rest, _ = _fit(root, saves(), **options)
        assert first + rest == whole
        more, _ = _fit(root, saves(), **options, max_steps=7)
        assert len(more) == 1


def _is_refused(rank: int, root: str, whole: list[float]) -> None:
    """A job that SLURM does not requeue ends as failed, with its checkpoint."""
    Path(root, "refuses").touch()
    warned: list[str] = []
    save = OnExceptionCheckpoint(f"{root}/refused")
    with mock.patch.object(failures, "rank_zero_warn", warned.append):
        first, code = _fit(f"{root}/refused", Signal(signal.SIGUSR1), save)
    assert code == (1 if rank == 0 else 0)
    assert [text.split(". ")[0] for text in warned] == (
        ["SLURM did not requeue job 1077: Job is not a batch job"] if rank == 0 else []
    )
    assert len(_calls(root)) == 1
    assert not _saved(f"{root}/refused")


def _under_torchrun(rank: int, root: str, whole: list[float]) -> None:
    """torchrun has to ignore the signal, and its ranks inherit that."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with mock.patch.dict(os.environ, {"TORCHELASTIC_RUN_ID": "1"}):
        first, _ = _fit(f"{root}/torchrun", Signal(signal.SIGUSR1))
    assert len(first) == 3
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    assert _calls(root) == ["requeue 1077"]


def _together(rank: int, world_size: int, root: str) -> None:
    _slurm(rank, world_size, root)
    whole, _ = _fit(f"{root}/whole")
    for check in (_requeues, _finds_last, _is_refused, _under_torchrun):
        check(rank, root, whole)
    os.environ["PATH"] = ""
    assert "scontrol" in (restarts.requeue("1") or "")


@pytest.mark.parametrize(("check", "world_size"), [(_alone, 1), (_together, 2)])
def test_ranks_stop_save_and_requeue_once(
    tmp_path: Path, check: Callable[..., None], world_size: int
) -> None:
    script = tmp_path / "scontrol"
    script.write_text(SCONTROL)
    script.chmod(0o755)
    run_trainer(check, world_size, str(tmp_path))
