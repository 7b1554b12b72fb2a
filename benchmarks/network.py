"""The emulated network of `nodes.sh`, seen from a rank: its rate, and bytes sent."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import synchronize
from torch.distributed.device_mesh import init_device_mesh

UNLIMITED = "none"
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def interface() -> str | None:
    """Return the name of this node's interface; None outside `nodes.sh`."""
    return os.environ.get("LQ_NODE_INTERFACE")


def sent_bytes() -> float:
    """Return the bytes that this node's interface has sent so far.

    Outside `nodes.sh`: of the interface in ``GLOO_SOCKET_IFNAME``, NaN without one.
    """
    name = interface() or os.environ.get("GLOO_SOCKET_IFNAME")
    path = Path(f"/sys/class/net/{name}/statistics/tx_bytes")
    return float(path.read_text()) if name and path.exists() else float("nan")


def file_label(rate: str) -> str:
    """Return the name of a rate for the name of a file."""
    return "unlimited" if rate == UNLIMITED else rate


def bits_per_s(rate: str) -> float:
    """Read a rate such as ``100mbit``; infinite if there is no limit.

    Raises:
        ValueError: Not a number of bit, kbit, mbit, gbit or tbit.
    """
    if rate == UNLIMITED:
        return float("inf")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)bit", rate.lower())
    if found is None or float(found[1]) == 0:
        raise ValueError(f"rate {rate!r}: give a number of kbit, mbit or gbit, or {UNLIMITED}")
    return float(found[1]) * _UNITS[found[2]]


def burst_nbytes(rate: str) -> int:
    """Return the size of a bucket: 3.2 ms of traffic, 4 MB at 10 Gb/s, but at least 128 KiB."""
    return max(128 << 10, round(bits_per_s(rate) / 8 * 3.2e-3))


def set_rate(rate: str) -> None:
    """Limit what every node sends; collective over all ranks.

    Args:
        rate: In `tc`'s units, such as ``10gbit``, or ``none``.

    Raises:
        RuntimeError: Not started by `nodes.sh`, or `tc` refuses the rate.
    """
    name = interface()
    if name is None:
        raise RuntimeError(
            f"the rate {rate!r} needs a network to limit: start the job with benchmarks/nodes.sh"
        )
    dist.barrier()
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        limited = "tbf" in _tc("show", name)
        if rate != UNLIMITED:  # the same bucket as in nodes.sh
            burst = os.environ.get("LQ_NODE_BURST", "4mb")
            if burst == "auto":
                burst = str(burst_nbytes(rate))
            bucket = ["rate", rate, "burst", burst, "latency", "100ms"]
            _tc("replace", name, "root", "tbf", *bucket)
        elif limited:
            _tc("del", name, "root")
    dist.barrier()


def _tc(action: str, name: str, *arguments: str) -> str:
    command = ["tc", "qdisc", action, "dev", name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def peers(node_size: int, device: torch.device) -> dist.ProcessGroup:
    """Return the group of this rank and those with its local rank on the other nodes."""
    nodes = dist.get_world_size() // node_size
    mesh = init_device_mesh(device.type, (nodes, node_size), mesh_dim_names=("node", "local"))
    return mesh.get_group("node")


def link_gbit_per_s(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> float:
    """Return the Gb/s of a node's interface while every rank exchanges with its peers.

    Collective over all ranks. Protocol overhead counts. NaN outside `nodes.sh`.

    Args:
        group: Group of :func:`peers`.
        device: Device of this rank.
        nbytes: Bytes from each rank to each peer in each of three exchanges; more than the bucket
            lets through at once, which the first exchange uses up.
    """
    sent = torch.zeros(group.size() * nbytes, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)  # connects, and empties the bucket
    synchronize()
    dist.barrier()
    before, start = sent_bytes(), time.perf_counter()
    for _ in range(3):
        dist.all_to_all_single(received, sent, group=group)
    synchronize()
    dist.barrier()
    return 8e-9 * (sent_bytes() - before) / (time.perf_counter() - start)
