"""What starts a run again: SLURM's requeueing of jobs, and torchrun."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

_SCONTROL_S = 60  # it tries again for some seconds while the controller is busy
_PR_SET_PDEATHSIG = 1  # of Linux' prctl.h
_JOB = "slurm_job"  # key of a checkpoint


def slurm_job() -> str:
    """What `scontrol` calls this job; one task of an array is a job of its own."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID", "")


def requeue(job: str) -> str | None:
    """Let SLURM stop a job and start it again later; returns why it refused, if it did."""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SCONTROL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = (done.stderr or done.stdout).strip()
    return (said or f"scontrol exited with {done.returncode}") if done.returncode else None


def is_requeue_name(name: str) -> bool:
    """Whether it is what Lightning looks for under SLURM."""
    return re.fullmatch(r"hpc_ckpt_\d+\.ckpt", name) is not None


def sign(checkpoint: dict[str, Any]) -> None:
    """Note in a checkpoint which SLURM job saves it."""
    if job := slurm_job():
        checkpoint[_JOB] = job


def check_signature(path: str | Path, checkpoint: Mapping[str, Any]) -> None:
    """Refuse what Lightning finds in ``default_root_dir`` if another job saved it there.

    A job that is submitted again continues from the one before. A requeued one has its own.

    Raises:
        ValueError: Two jobs, or two tasks of an array, save in one folder.
    """
    job, saved = slurm_job(), checkpoint.get(_JOB)
    if not job or saved in (None, job) or not is_requeue_name(os.path.basename(path)):
        return
    if "SLURM_RESTART_COUNT" in os.environ or saved.partition("_")[2] != job.partition("_")[2]:
        raise ValueError(
            f"`{path}` was saved by SLURM job {saved}, and this is job {job}: both save in the "
            "same `default_root_dir`. Give each a folder of its own."
        )


def prepare_for_restarts() -> None:
    """End with torchrun, and warn where its ranks may not start again."""
    _end_with_torchrun()
    _warn_of_stale_store()


def _end_with_torchrun() -> None:
    """Send this process SIGTERM when the torchrun that started it dies.

    Otherwise its ranks train on, and save beside those of a new start.
    """
    if dist.is_torchelastic_launched() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _warn_of_stale_store() -> None:
    """Warn where ranks that torchrun restarts would meet what the killed ones left in the store.

    torchrun keeps one store for all starts (torch 2.13), whose keys are the same in each. A rank
    may read the address of a killed one, and waits for it or fails.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        rank_zero_warn(
            "after a restart by torchrun (`--max-restarts`) ranks may find addresses of killed "
            "ones in its store, and hang or fail: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the "
            "environment of torchrun."
        )
