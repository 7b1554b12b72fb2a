"""Killed ranks that torchrun restarts go on from the newest complete checkpoint."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from lq_testing.ranks import _PRELOAD
from lq_testing.restarts import train
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lq_lightning.strategies.failures import warn_of_stale_store


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


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_ranks_change_nothing(
    tmp_path: Path, kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # see `warn_of_stale_store`
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    steps = 4 * kills
    _launch(2, whole, steps)
    _launch(2, killed, steps, kills, seed=35)
    for rank in range(2):
        expected, found = _losses(whole, rank), _losses(killed, rank)
        assert len(expected) == steps
        assert sorted(set(found), key=expected.index) == expected  # no step has two losses
    # with another number of ranks
    assert _launch(1, killed, steps + 1) == {0: steps}


def test_a_store_that_outlives_ranks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    warn_of_stale_store()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.warns(UserWarning, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        warn_of_stale_store()
