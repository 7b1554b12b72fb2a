"""Jobs of a real SLURM that stop before their time limit, and start again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lq_testing.ranks import free_port
from lq_testing.slurm import Cluster, has_slurm, slurm_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not has_slurm(), reason="SLURM is not installed (slurmctld, slurmd, srun)"),
]

# The first start takes its time, so that a signal finds it in training.
JOB = """
import os, sys, time

import torch
from lightning.pytorch.callbacks import Callback
from lq_testing.lightning_models import SMALL, TinyModule, Tokens, trainer
from torch.utils.data import DataLoader

from lq_lightning import QuantizedFSDPStrategy

folder, slow = sys.argv[1], not os.path.exists(f"{sys.argv[1]}/losses0")


class Record(Callback):
    def on_train_batch_end(self, trainer, module, outputs, *args):
        with open(f"{folder}/losses{trainer.global_rank}", "a") as file:
            file.write(f"{trainer.global_step} {outputs['loss'].item().hex()}\\n")
        time.sleep(0.3 if slow else 0)


torch.manual_seed(0)
torch.set_num_threads(1)
run = trainer(
    QuantizedFSDPStrategy(**SMALL), folder, 1, num_nodes=2, callbacks=[Record()],
    max_steps=400, max_epochs=-1,
)
run.fit(TinyModule(), DataLoader([Tokens()[0]] * 6400, batch_size=4))
"""
TASKS = "#SBATCH --nodes=1 --ntasks-per-node=1\n"
BOTH = "#SBATCH --nodes=2 --ntasks-per-node=1\n"
JOBS = {
    # sent 60 to 90 seconds after the start: SLURM looks every 30 seconds
    "limit": f"{BOTH}#SBATCH --time=2 --signal=USR1@30\nsrun $TRAIN",
    # what `--signal=B:` sends to the shell alone, which passes it on
    "shell": f"""{BOTH}#SBATCH --array=3
trap 'kill -USR1 $step' USR1
srun $TRAIN & step=$!
while wait $step; code=$?; kill -0 $step 2>/dev/null; do :; done
exit $code
""",
    "torchrun": f"""{BOTH}export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
srun bash -c 'trap "" USR1; exec torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d \\
    --rdzv-endpoint localhost:$PORT --rdzv-id $SLURM_JOB_ID ${{TRAIN#* }}'
""",
    "heterogeneous": f"{TASKS}#SBATCH hetjob\n{TASKS}srun --het-group=0,1 $TRAIN",
}


def _submit(cluster: Cluster, folder: Path, text: str, script: Path) -> str:
    options = "".join(line for line in text.splitlines(True) if line.startswith("#SBATCH"))
    job = folder / "job.sh"
    job.write_text(
        f"#!/bin/bash\n{options}export MASTER_ADDR=127.0.0.1 PORT={free_port()} "
        f"TRAIN='{sys.executable} {script} {folder}'\n{text}"
    )
    return cluster.run("sbatch", "--parsable", f"--output={folder}/out", str(job)).strip()


def _finish(cluster: Cluster, job: str, trained: Path | None, timeout: float) -> dict[str, str]:
    """Wait for a job, which SLURM would leave alone for two minutes after it was requeued.

    It gets the signal once it has written to ``trained``; None: before its time limit. Later starts
    may take longer.
    """
    deadline, hurried = time.monotonic() + timeout, "0"
    while time.monotonic() < deadline:
        shown = cluster.run("scontrol", "--oneliner", "show", "job", job)
        parts = [
            dict(field.split("=", 1) for field in line.split() if "=" in field)
            for line in shown.splitlines()
        ]
        fields = parts[0]
        if fields["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"):
            return fields
        if trained is not None and trained.exists():
            to = ["--batch"] if trained.parent.name == "shell" else []
            cluster.run("scancel", *to, "--signal=USR1", job)
            trained = None
        if fields["JobState"] == "PENDING" and fields["Restarts"] != hurried:
            hurried = fields["Restarts"]
            for part in parts:
                # nodes refuse a start in the second in which they have ended the one before
                update = ("scontrol", "update", f"jobid={part['JobId']}")
                cluster.run(*update, "starttime=now+3", "timelimit=9")
        time.sleep(1.0)
    raise TimeoutError(f"{fields}\n{cluster.logs()}")


def _losses(folder: Path) -> list[list[str]]:
    return [(folder / f"losses{rank}").read_text().splitlines() for rank in range(2)]


def _folder(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    return folder


def test_jobs_go_on_after_a_signal(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(JOB)
    with slurm_cluster(_folder(tmp_path, "cluster")) as cluster:
        paths = [path for path in (str(Path(sys.executable).parent), cluster.env["PATH"]) if path]
        cluster.env.update(
            MASTER_ADDR="127.0.0.1",
            PATH=os.pathsep.join(paths),
            PYTHONPATH=os.pathsep.join(path for path in sys.path if path),
        )
        step = ("srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, str(script))
        whole = _folder(tmp_path, "whole")
        cluster.run(*step, str(whole), timeout=200.0)
        for name, text in JOBS.items():
            folder = _folder(tmp_path, name)
            job = _submit(cluster, folder, text, script)
            trained = None if "--time" in text else folder / "losses1"
            fields = _finish(cluster, job, trained, 200.0)
            said = (folder / "out").read_text()
            assert fields["JobState"] == "COMPLETED", said
            assert int(fields["Restarts"]) >= 1, said
            assert _losses(folder) == _losses(whole), said

        # a step without a batch job cannot be requeued: it fails, and the next one continues
        alone = _folder(tmp_path, "alone")
        running = subprocess.Popen([*step, str(alone)], env=cluster.env, stderr=subprocess.PIPE)
        while not (alone / "losses1").exists():
            time.sleep(0.2)
        job = cluster.run("squeue", "--noheader", "--format=%A").strip()
        cluster.run("scancel", "--signal=USR1", job)
        _, said = running.communicate(timeout=60.0)
        assert running.returncode == 1, said
        assert f"SLURM did not requeue job {job}".encode() in said
        cluster.run(*step, str(alone), timeout=200.0)
        assert _losses(alone) == _losses(whole)
