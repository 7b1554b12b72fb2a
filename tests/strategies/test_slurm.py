"""Jobs of a real SLURM that stop before their time limit, and start again."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from lq_testing.slurm import Cluster, has_slurm, slurm_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not has_slurm(), reason="SLURM is not installed (slurmctld, slurmd, srun)"),
]

# Each start but the last takes its time, so that a signal finds it in training.
JOB = """
import os, sys, time

import torch
from lightning.pytorch.callbacks import Callback
from lq_testing.lightning_models import SMALL, TinyModule, Tokens, trainer
from torch.utils.data import DataLoader

from lq_lightning import QuantizedFSDPStrategy

folder, slow = sys.argv[1], len(sys.argv) > 2 and "SLURM_RESTART_COUNT" not in os.environ


class Record(Callback):
    def on_train_batch_end(self, trainer, module, outputs, *args):
        with open(f"{folder}/losses{trainer.global_rank}", "a") as file:
            file.write(f"{trainer.global_step} {outputs['loss'].item().hex()}\\n")
        time.sleep(0.2 if slow else 0)


torch.manual_seed(0)
torch.set_num_threads(1)
run = trainer(
    QuantizedFSDPStrategy(**SMALL), folder, 1, num_nodes=2, callbacks=[Record()],
    max_steps=400, max_epochs=-1,
)
run.fit(TinyModule(), DataLoader([Tokens()[0]] * 6400, batch_size=4))
"""


def _script(folder: Path, options: str, body: str) -> str:
    job = folder / "job.sh"
    job.write_text(f"#!/bin/bash\n{options}\nexport MASTER_ADDR=127.0.0.1\n{body}\n")
    return str(job)


def _finish(cluster: Cluster, job: str, timeout: float) -> dict[str, str]:
    """Wait for a job, which SLURM would leave alone for two minutes after it was requeued."""
    deadline, hurried = time.monotonic() + timeout, "0"
    while time.monotonic() < deadline:
        shown = cluster.run("scontrol", "--oneliner", "show", "job", job)
        fields = dict(field.split("=", 1) for field in shown.split() if "=" in field)
        if fields["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"):
            return fields
        if fields["JobState"] == "PENDING" and fields["Restarts"] != hurried:
            hurried = fields["Restarts"]
            # nodes refuse a start in the second in which they have ended the one before
            cluster.run("scontrol", "update", f"jobid={fields['JobId']}", "starttime=now+3")
        time.sleep(1.0)
    raise TimeoutError(f"{fields}\n{cluster.logs()}")


def _losses(folder: Path) -> list[list[str]]:
    return [(folder / f"losses{rank}").read_text().splitlines() for rank in range(2)]


def _folder(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    return folder


def test_a_job_goes_on_after_its_time_limit(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    with slurm_cluster(_folder(tmp_path, "cluster")) as cluster:
        paths = os.pathsep.join(path for path in sys.path if path)
        cluster.env.update(MASTER_ADDR="127.0.0.1", PYTHONPATH=paths)
        layout = ("--nodes=2", "--ntasks-per-node=1")
        whole = _folder(tmp_path, "whole")
        cluster.run("srun", *layout, sys.executable, str(script), str(whole), timeout=120.0)

        limited = _folder(tmp_path, "limited")
        # sent 20 to 50 seconds after the start: SLURM looks every 30 seconds
        options = "#SBATCH --signal=USR1@10\n#SBATCH --time=1"
        body = f"srun {sys.executable} {script} {limited} slow"
        # to all tasks, or to the shell alone, which passes it on
        shell = _folder(tmp_path, "shell")
        trap = (
            f"trap 'kill -USR1 $step' USR1\nsrun {sys.executable} {script} {shell} slow &\n"
            "step=$!\nuntil wait $step; [ $? -le 128 ]; do kill -0 $step || break; done\n"
        )
        for folder, text in (
            (limited, (options, body)),
            (shell, (options.replace("USR1@", "B:USR1@") + "\n#SBATCH --array=3", trap)),
        ):
            submit = ("sbatch", "--parsable", *layout, f"--output={folder}/out")
            job = cluster.run(*submit, _script(folder, *text)).strip()
            fields = _finish(cluster, job, 200.0)
            said = (folder / "out").read_text()
            assert fields["JobState"] == "COMPLETED", said
            assert int(fields["Restarts"]) >= 1, said
            assert _losses(folder) == _losses(whole), said
