"""Both strategies on two CPU workers of Ray Train, one of which dies."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lq_testing.lightning_models import EXACT, PLAIN, Losses, TinyModule, loader, quiet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Dies(Callback):
    """The second worker kills itself in the first attempt."""

    def __init__(self, marker: str, step: int) -> None:
        self.marker, self.step = Path(marker), step

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        here = trainer.global_step == self.step and trainer.global_rank == 1
        if here and not self.marker.exists():
            time.sleep(5)  # until Ray has taken note of the checkpoint of the first epoch
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(config: dict[str, Any]) -> None:
    from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback

    from lq_lightning.integrations.ray import (
        RayCheckpoints,
        RayQuantizedFSDPStrategy,
        RayQuantizedPipelineStrategy,
        newest_checkpoint,
    )

    quiet()
    torch.manual_seed(0)
    strategy = (
        RayQuantizedPipelineStrategy(num_microbatches=2, **EXACT)
        if config["pipeline"]
        else RayQuantizedFSDPStrategy(**PLAIN)
    )
    reports = RayTrainReportCallback() if config["stock"] else RayCheckpoints()
    losses, dies = Losses(), Dies(config["marker"], config["step"])
    run = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        plugins=[RayLightningEnvironment()],
        callbacks=[reports, losses, dies],
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        default_root_dir=config["root"],
    )
    run.fit(TinyModule(), loader(16), ckpt_path=newest_checkpoint())
    topology = run.strategy.topology()
    assert run.world_size == 2
    assert topology.num_nodes == 1
    Path(config["root"], f"losses{run.global_rank}").write_text(json.dumps(losses.values))


@pytest.mark.parametrize(("pipeline", "stock"), [(False, False), (True, False), (False, True)])
def test_a_run_goes_on_after_a_workers_death(pipeline: bool, stock: bool, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="needs ray[train]")
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # of the tests' helpers, too
    options: dict[str, Any] = {"include_dashboard": False, "runtime_env": {"env_vars": path}}
    ray.init(num_cpus=2, ignore_reinit_error=True, **options)
    try:
        config = {"pipeline": pipeline, "stock": stock, "root": str(tmp_path), "step": 6}
        config["marker"] = str(tmp_path / "died")
        trainer = TorchTrainer(
            train,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                name="run",
                storage_path=str(tmp_path / "storage"),
                failure_config=FailureConfig(max_failures=1),
            ),
        )
        result = trainer.fit()
    finally:
        ray.shutdown()
    assert (tmp_path / "died").exists()
    assert result.metrics["epoch"] == 2
    assert result.metrics["step"] == 12
    # epochs 1 and 2 are from the second attempt, as in a run without interruption
    torch.manual_seed(0)
    quiet()
    expected = Losses()
    run = pl.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[expected],
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )
    run.fit(TinyModule(), loader(16))
    losses = json.loads((tmp_path / "losses1").read_text())
    assert losses == pytest.approx(expected.values[4:], abs=1e-4)
