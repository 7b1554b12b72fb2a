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
from lq_lightning.strategies import failures

SCONTROL = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
if [ -e "$(dirname "$0")/refuses" ]; then echo "Job is not a batch job" >&2; exit 1; fi
"""


class Signal(Callback):
    """Sends a signal to one rank in its third batch, and more to all ranks while they save."""

    def __init__(self, signum: signal.Signals, rank: int) -> None:
        self.signum, self.rank = signum, rank

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.signum)

    def on_save_checkpoint(self, trainer: pl.Trainer, *args: Any) -> None:
        for signum in (self.signum, signal.SIGTERM) if trainer.interrupted else ():
            os.kill(os.getpid(), signum)


def _slurm(rank: int, world_size: int, root: str, **more: str) -> None:
    """Take this process for a task that `srun` has started."""
    del os.environ["TORCHELASTIC_RUN_ID"]  # Lightning would take torchrun for the launcher
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
    world_size = int(os.environ["SLURM_NTASKS"])
    run = trainer(
        QuantizedFSDPStrategy(**SMALL),
        root,
        world_size,
        callbacks=[losses, *callbacks],
        **{"enable_checkpointing": True, "max_steps": 10, **options},
    )
    if not any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        run.callbacks = [c for c in run.callbacks if not isinstance(c, ModelCheckpoint)]  # type: ignore[attr-defined]
    # a resumed loader starts from its beginning
    data = DataLoader([Tokens()[0]] * 160, batch_size=4)
    try:
        run.fit(TinyModule(), data, ckpt_path=ckpt_path)
    except SIGTERMException as stop:
        code = int(stop.code or 0)
    return losses.values, code


def _calls(root: str) -> list[str]:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    path = Path(root, "calls")
    return path.read_text().splitlines() if path.exists() else []


def _requeues(rank: int, world_size: int, root: str) -> None:
    """Without a callback that saves: a start without ``ckpt_path`` goes on, as with Lightning."""
    _slurm(rank, world_size, root)
    whole, _ = _fit(f"{root}/whole")
    said: list[str] = []
    with mock.patch.object(failures, "rank_zero_info", said.append):
        first, code = _fit(root, Signal(signal.SIGUSR1, world_size - 1))
    assert (len(first), code) == (3, 0)
    assert _calls(root) == ["requeue 1077"]
    assert [path.name for path in Path(root).glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    if world_size > 1:
        assert said[0] == (
            "Received SIGUSR1 (rank 1 of 2): all ranks stop after optimizer step 3, save, and the "
            "job is requeued"
        )
    rest, code = _fit(root)
    assert (first + rest, code) == (whole, None)


def _finds_last(rank: int, world_size: int, root: str) -> None:
    """``ckpt_path="last"`` finds the state of the stop, and later a newer one."""
    _slurm(rank, world_size, root, SLURM_ARRAY_JOB_ID="1070", SLURM_ARRAY_TASK_ID="4")

    def saves() -> ModelCheckpoint:
        return ModelCheckpoint(f"{root}/saved", save_last=True, every_n_train_steps=2)

    whole, _ = _fit(f"{root}/whole")
    plugins = SLURMEnvironment(requeue_signal=signal.SIGUSR2)
    first, _ = _fit(root, Signal(signal.SIGUSR2, 0), saves(), plugins=plugins, ckpt_path="last")
    assert len(first) == 3
    assert _calls(root) == ["requeue 1070_4"]
    rest, _ = _fit(root, saves(), plugins=plugins, ckpt_path="last")
    assert first + rest == whole
    more, _ = _fit(root, saves(), plugins=plugins, ckpt_path="last", max_steps=12)
    assert len(more) == 2


def _is_refused(rank: int, world_size: int, root: str) -> None:
    """A job that SLURM does not requeue ends as failed, with its checkpoint."""
    _slurm(rank, world_size, root)
    Path(root, "refuses").touch()
    warned: list[str] = []
    with mock.patch.object(failures, "rank_zero_warn", warned.append):
        first, code = _fit(root, Signal(signal.SIGUSR1, 0), OnExceptionCheckpoint(f"{root}/saved"))
    assert code == (1 if rank == 0 else 0)
    assert [text.split(". ")[0] for text in warned] == (
        ["SLURM did not requeue job 1077: Job is not a batch job"] if rank == 0 else []
    )
    assert not list(Path(root).glob("*.ckpt"))
    rest, _ = _fit(root, OnExceptionCheckpoint(f"{root}/saved"), ckpt_path="last")
    assert len(first + rest) == 10
    assert len(_calls(root)) == 1
    os.environ["PATH"] = ""
    refusal = failures._requeue("1")
    assert refusal is not None
    assert "scontrol" in refusal


@pytest.mark.parametrize(
    ("check", "world_size"), [(_requeues, 2), (_requeues, 1), (_finds_last, 2), (_is_refused, 2)]
)
def test_all_ranks_stop_save_and_requeue_once(
    tmp_path: Path, check: Callable[..., None], world_size: int
) -> None:
    script = tmp_path / "scontrol"
    script.write_text(SCONTROL)
    script.chmod(0o755)
    run_trainer(check, world_size, str(tmp_path))
