"""Killed ranks that torchrun restarts go on from the newest complete checkpoint."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lq_testing.lightning_models import run_trainer
from lq_testing.ranks import _PRELOAD
from lq_testing.restarts import train
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lq_lightning.strategies.restarts import prepare_for_restarts


def _launch(ranks: int, folder: Path, steps: int, kills: int = 0, seed: int = 0) -> dict[int, int]:
    """Run ``train`` under torch's elastic agent; returns the step at which its last start began."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        max_restarts=kills,
        monitor_interval=0.05,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="forkserver",
    )
    folder.mkdir(exist_ok=True)
    return elastic_launch(config, train)(str(folder), steps, kills, seed)


def _losses(folder: Path, rank: int) -> list[str]:
    return (folder / f"losses{rank}").read_text().splitlines()


def _unharmed(rank: int, world_size: int, folder: str, steps: int) -> None:
    train(folder, steps, kills=0, seed=0)


@pytest.mark.parametrize(("kills", "seed"), [(1, 33), pytest.param(10, 35, marks=pytest.mark.slow)])
def test_killed_ranks_change_nothing(
    tmp_path: Path, kills: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # see `restarts.py`
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    steps = 4 * kills
    run_trainer(_unharmed, 2, str(whole), steps, env={"TORCHELASTIC_RESTART_COUNT": "0"})
    _launch(2, killed, steps, kills, seed)
    for rank in range(2):
        expected, found = _losses(whole, rank), _losses(killed, rank)
        assert len(expected) == steps
        assert sorted(set(found), key=expected.index) == expected  # no step has two losses
    if kills > 1:  # with another number of ranks
        assert _launch(1, killed, steps + 1) == {0: steps}


def test_a_store_that_outlives_ranks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    prepare_for_restarts()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.warns(UserWarning, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        prepare_for_restarts()


ORPHANS = """
import os, sys, time

from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lq_testing.lightning_models import SMALL, TinyModule, loader, trainer

from lq_lightning import QuantizedFSDPStrategy


class Slow(Callback):
    def on_train_batch_end(self, trainer, *args):
        with open(f"{sys.argv[1]}/pid{trainer.global_rank}", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(0.2)


run = trainer(
    QuantizedFSDPStrategy(**SMALL), sys.argv[1], max_epochs=-1,
    callbacks=[Slow(), OnExceptionCheckpoint(sys.argv[1])], enable_checkpointing=True,
)
run.fit(TinyModule(), loader())
"""


def _wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90.0
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def _is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.slow
def test_ranks_stop_and_save_when_torchrun_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # else it dies with torchrun
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    script, log = tmp_path / "train.py", tmp_path / "log"
    script.write_text(ORPHANS)
    run = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with log.open("w") as out:
        torchrun = subprocess.Popen([*run, str(script), str(tmp_path)], stdout=out, stderr=out)
    try:
        files = [tmp_path / f"pid{rank}" for rank in range(2)]
        _wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    finally:
        torchrun.kill()
        torchrun.wait()
    pids = [int(file.read_text()) for file in files]
    _wait_until(lambda: not any(_is_running(pid) for pid in pids))
    assert (tmp_path / "on_exception.ckpt").is_dir(), log.read_text()
