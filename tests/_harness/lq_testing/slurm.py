"""A SLURM cluster of two nodes on this machine, run by the user who tests.

Needs the daemons of Debian's ``slurmctld``, ``slurmd`` and ``slurm-client``, installed or unpacked
(``dpkg -x``) into the folder that ``LQ_SLURM_ROOT`` names. Nothing else is read or written outside
of the given folder, and no munge runs: all daemons trust this user.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lq_testing.ranks import free_port

_NODES = ("n1", "n2")
_START_S = 30.0


@dataclass(frozen=True)
class Cluster:
    """``env`` lets commands such as ``sbatch`` find this cluster; the others are for errors."""

    folder: Path
    env: dict[str, str]

    def run(self, *command: str, timeout: float = 60.0) -> str:
        """What a command prints."""
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=timeout, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}\n{self.logs()}")
        return done.stdout

    def logs(self) -> str:
        """The end of each daemon's log."""
        ends = (
            "\n".join([str(path), *path.read_text().splitlines()[-15:]])
            for path in sorted(self.folder.glob("*.log"))
        )
        return "\n".join(ends)


def _programs() -> tuple[dict[str, str], dict[str, str], str] | None:
    """Paths of the daemons, what they add to the environment, and the folder of plugins."""
    root = os.environ.get("LQ_SLURM_ROOT", "")
    path = os.pathsep.join([f"{root}/usr/bin", f"{root}/usr/sbin", os.environ["PATH"]])
    found = {
        name: shutil.which(name, path=path) or shutil.which(f"{name}-wlm", path=path)
        for name in ("slurmctld", "slurmd", "slurmstepd", "srun")
    }
    plugins = [
        folder
        for folder in Path(f"{root}/usr/lib").glob("*/slurm-wlm")
        if (folder / "auth_none.so").is_file()
    ]
    programs = {name: path for name, path in found.items() if path}
    if len(programs) < len(found) or not plugins:
        return None
    env = {"PATH": path}
    if root:
        env["LD_LIBRARY_PATH"] = f"{plugins[0].parent}:{plugins[0]}"
    return programs, env, str(plugins[0])


def has_slurm() -> bool:
    """Whether a cluster can be started here."""
    return _programs() is not None


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Start a controller and two nodes; all processes of jobs are gone afterwards."""
    found = _programs()
    if found is None:
        raise RuntimeError("SLURM is not installed")
    programs, more, plugins = found
    config = folder / "slurm.conf"
    config.write_text(_config(folder, plugins))
    (folder / "state").mkdir()
    cluster = Cluster(folder, {**os.environ, **more, "SLURM_CONF": str(config)})
    commands = [[programs["slurmctld"], "-D"]]
    for node in _NODES:
        (folder / node).mkdir()
        commands.append([programs["slurmd"], "-D", "-N", node, "-d", programs["slurmstepd"]])
    with contextlib.ExitStack() as stack:
        for command in commands:
            daemon = subprocess.Popen(
                command, env=cluster.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(_end, daemon)
        _wait_for_nodes(cluster)
        try:
            yield cluster
        finally:
            cluster.run("scancel", "--user", getpass.getuser())
            _wait_until_idle(cluster)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(10.0)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _config(folder: Path, plugins: str) -> str:
    host, user = socket.gethostname().split(".")[0], getpass.getuser()
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1"
        for node in _NODES
    )
    return f"""\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=5,bf_interval=5
SelectType=select/linear
ReturnToService=2
KillWait=5
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _wait_for_nodes(cluster: Cluster) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(RuntimeError):
            states = cluster.run("sinfo", "--noheader", "--format=%t %D").split()
            if states == ["idle", str(len(_NODES))]:
                return
        if time.monotonic() > deadline:
            raise RuntimeError(f"no SLURM after {_START_S:.0f} s\n{cluster.logs()}")
        time.sleep(0.3)


def _wait_until_idle(cluster: Cluster) -> None:
    deadline = time.monotonic() + _START_S
    while cluster.run("squeue", "--noheader").strip() and time.monotonic() < deadline:
        time.sleep(0.3)
