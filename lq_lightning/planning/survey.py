"""What a rank finds out about its host, its GPU and its links to other ranks.

Nothing here judges: `doctor.py` reads the reports of all ranks.
"""

from __future__ import annotations

import math
import os
import platform
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lq_lightning._compat.float8 import float8_matmul_available, scaled_mm
from lq_lightning._compat.modes import OperatorMode, OpOverload
from lq_lightning.foundation.agreement import gather_objects
from lq_lightning.foundation.topology import Level, Topology
from lq_lightning.kernels.int8.op import int8_matmul, int8_quantize

_MIB = 2**20
_SYSTEM = Path("/sys")
_OF_A_HOST = ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")  # differ with good reason
_LONG_ENOUGH_S = 0.05  # of an exchange whose rate is to be told


class Measured(NamedTuple):
    """A number and its relative standard error."""

    value: float
    error: float


class Exchange(NamedTuple):
    """All ranks of a level send to the one that is ``distance`` ranks or nodes further."""

    level: Level
    distance: int

    def peers(self, at: Topology) -> tuple[int, int]:
        """Return the rank to which this one sends, and that from which it receives."""
        if self.level == "inter":
            step, first, size = self.distance * at.node_size, 0, at.world_size
        else:
            step, first, size = self.distance, at.node * at.node_size, at.node_size
        place = at.rank - first
        return first + (place + step) % size, first + (place - step) % size


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkTime:
    """How fast one rank received from another one while it sent as much, the slower of both.

    The rate is of large messages, the latency of small ones; ``exchange`` is what other ranks did
    at the same time.
    """

    exchange: Exchange
    source: int
    target: int
    bytes_per_s: float
    latency_s: float


@dataclass(kw_only=True, slots=True)
class Report:
    """What one rank found.

    ``versions`` are of programs, with values of NCCL's environment variables. ``limits`` has
    ``"open files"``, and bytes of ``"locked memory"``, ``"shared memory"`` and ``"free disk"``;
    ``interfaces`` the Gb/s of network interfaces that are up (0 where the system does not say).
    ``rdma_gbit`` is that of the fastest active InfiniBand or RoCE port, 0 without one. The host
    issues an operator in ``operator`` seconds. ``gpu`` has name, uuid and state; ``rates`` the
    bytes per second of a ``"copy"``, and operations per second of products by dtype. ``failures``
    say what could not be measured.

    The host's clock is ``offset_s`` ahead of rank 0's. ``links`` are what this rank received; what
    this node sent to others was carried by the interface ``carrier``, empty if none did.
    """

    rank: int
    host: str
    node_size: int
    versions: dict[str, str]
    limits: Mapping[str, float]
    interfaces: Mapping[str, float]
    rdma_gbit: float = 0.0
    operator: Measured = Measured(0.0, 0.0)
    gpu: Mapping[str, Any] | None = None
    rates: dict[str, Measured] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    offset_s: float = 0.0
    offset_error_s: float = 0.0
    links: list[LinkTime] = field(default_factory=list)
    carrier: str = ""

    def __str__(self) -> str:
        """Return ``rank 3 (host b)``."""
        return f"rank {self.rank} (host {self.host})"


# --- the host -------------------------------------------------------------------------------------


def host_report(rank: int, node_size: int, root_dir: Path, system: Path = _SYSTEM) -> Report:
    """Return what is known of this rank without measuring."""
    packages = {name: _version(name) for name in ("lightning", "triton", "lq-lightning")}
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else ()  # type: ignore[no-untyped-call]
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda),
        **({"NCCL": ".".join(map(str, nccl))} if nccl else {}),
        **packages,
        **{
            name: value
            for name, value in os.environ.items()
            if name.startswith("NCCL_") and name not in _OF_A_HOST
        },
    }
    ports = (system / "class" / "infiniband").glob("*/ports/*")
    active = [port for port in ports if "ACTIVE" in _read(port / "state")]
    interfaces = {
        path.name: max(float(_read(path / "speed") or 0), 0.0) / 1000
        for path in sorted((system / "class" / "net").glob("*"))
        if _read(path / "operstate") in ("up", "unknown")
    }
    where = root_dir.resolve()
    existing = next(path for path in (where, *where.parents) if path.exists())
    shm = Path("/dev/shm")
    return Report(
        rank=rank,
        host=socket.gethostname(),
        node_size=node_size,
        versions=versions,
        limits={
            "open files": _limit(resource.RLIMIT_NOFILE),
            "locked memory": _limit(resource.RLIMIT_MEMLOCK),
            "shared memory": shutil.disk_usage(shm).total if shm.exists() else 0.0,
            "free disk": shutil.disk_usage(existing).free,
        },
        interfaces=interfaces,
        rdma_gbit=max((float(_read(port / "rate").split()[0]) for port in active), default=0.0),
    )


def _limit(kind: int) -> float:
    soft = resource.getrlimit(kind)[0]
    return float("inf") if soft == resource.RLIM_INFINITY else soft


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # an interface that is down has no speed
        return ""


def _time(work: Callable[[], object], seconds: float) -> Measured:
    from torch.utils.benchmark import Timer  # takes seconds to import

    found = Timer(stmt="work()", globals={"work": work}).blocked_autorange(min_run_time=seconds)
    return Measured(found.median, found.iqr / 1.35 / found.median)  # of a normal distribution


class _Counter(OperatorMode):
    """Counts operators that a plan counts: those that are no views."""

    number = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))


def operator_time(device: torch.device, seconds: float = 1.0) -> Measured:
    """Return the host's seconds per operator, in forward and backward of a model of tiny layers."""
    layers = [[nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()] for _ in range(12)]
    model = nn.Sequential(*(layer for block in layers for layer in block)).to(device)
    x = torch.ones(8, 64, device=device)

    def step() -> None:
        model(x).sum().backward()

    step()
    with _Counter() as counter:
        step()
    found = _time(step, seconds)
    return Measured(found.value / counter.number, found.error)


def gpu_works(
    device: torch.device, side: int = 8192, nbytes: int = 512 * _MIB
) -> Iterator[tuple[str, float, Callable[[], object]]]:
    """Yield what to measure on a device: a name, bytes or operations, and the work.

    Copies of ``nbytes``, and products of square matrices of ``side`` rows.
    """
    source, target = torch.empty(2, nbytes, dtype=torch.uint8, device=device)
    yield "copy", 2 * source.nbytes, partial(target.copy_, source)
    one = torch.ones(1, device=device)
    a, b = torch.randn(2, side, side, device=device)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        a, b = a.to(dtype), b.to(dtype)
        yield str(dtype).removeprefix("torch."), 2 * side**3, partial(torch.mm, a, b)
    if float8_matmul_available(device) is None:
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        float8 = partial(scaled_mm, a8, b8, one, one, torch.bfloat16, fast_accumulation=True)
        yield "float8", 2 * side**3, float8
    if device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0):
        q, scale, second, _ = int8_quantize(a, 1, False, 0)
        yield "int8", 2 * side**3, partial(int8_matmul, q, scale, q, scale, second, 0, a.dtype)


def measure_gpu(report: Report, device: torch.device) -> None:
    """Add the state of the GPU and its rates; nothing of its settings is changed.

    Raises:
        RuntimeError: It has too little memory, fails, or refuses a kernel.
    """
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    gpu: dict[str, Any] = {"name": properties.name, "uuid": str(properties.uuid)}
    gpu |= {"memory_nbytes": total, "used_nbytes": total - free}
    report.gpu = gpu
    for name, amount, work in gpu_works(device):
        found = _time(work, 0.4)
        report.rates[name] = Measured(amount / found.value, found.error)
        if name == "bfloat16":
            for _ in range(int(0.8 / found.value)):  # keeps it busy while it is asked
                work()
            gpu["state"] = _busy_state(gpu["uuid"])
            report.versions["driver"] = gpu["state"].get("driver", "unknown")
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    gpu["context_nbytes"] = total - free - torch.cuda.memory_reserved(device)


_REASONS = {
    "clocks_throttle_reasons.hw_slowdown": "heat or the power supply slows it down",
    "clocks_throttle_reasons.sw_thermal_slowdown": "heat slows it down",
    "clocks_throttle_reasons.applications_clocks_setting": "someone has set its clocks lower",
}


def _busy_state(uuid: str) -> dict[str, Any]:
    """Ask the driver, by `nvidia-smi`, how the GPU runs right now; empty if it does not answer."""
    from torch.utils import collect_env

    fields = ["driver_version", "pcie.link.width.current", "pcie.link.width.max", *_REASONS]
    program: str = collect_env.get_nvidia_smi()  # type: ignore[no-untyped-call]
    command = [program, f"--id=GPU-{uuid.removeprefix('GPU-')}"]
    command += [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        driver, width, full_width, *active = done.stdout.strip().split(", ")
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    reasons = [
        text for text, now in zip(_REASONS.values(), active, strict=False) if now == "Active"
    ]
    return {"driver": driver, "width": width, "full_width": full_width, "reasons": reasons}


# --- links ----------------------------------------------------------------------------------------


def exchanges(topology: Topology) -> list[Exchange]:
    """Return the exchanges of a survey, in an order that is the same on all ranks.

    Every link in both directions, or those at the distances 1, 2, 4 and 8 where there are more than
    eight ranks in a node, or more than five nodes.
    """

    def distances(size: int, most: int) -> list[int]:
        return [d for d in range(1, size) if size <= most or d in (1, 2, 4, 8)]

    found = [Exchange("intra", distance) for distance in distances(topology.node_size, 8)]
    return found + [Exchange("inter", distance) for distance in distances(topology.num_nodes, 5)]


def measure_links(
    report: Report,
    topology: Topology,
    device: torch.device,
    control: dist.ProcessGroup | None,
    clock: Callable[[], float] = time.perf_counter,
    system: Path = _SYSTEM,
) -> None:
    """Add the links over which this rank receives, and the interface; all ranks call this.

    Memory of ``device`` is sent; ``control`` is a group of all ranks for tensors on the CPU. Linux
    shows interfaces in ``system``.
    """
    vote = torch.ones(1, device=device)
    dist.all_reduce(vote)  # connects all ranks, which NCCL needs before messages between two
    within = None
    if device.type == "cuda" and 1 < topology.node_size < topology.world_size:
        # Messages in a group of several nodes get few channels, as few as those between nodes.
        within, _ = dist.new_subgroups(topology.node_size)  # type: ignore[no-untyped-call]
        dist.all_reduce(vote, group=within)
    sizes = [_MIB * 4**power for power in range(4 if device.type == "cpu" else 5)]
    sent = torch.zeros(sizes[-1], dtype=torch.uint8, device=device)
    received = torch.zeros_like(sent)
    before, crossed = _sent_nbytes(report, system), 0

    def send(each: Exchange, nbytes: int) -> None:
        peers = each.peers(topology)
        group = within if each.level == "intra" else None
        ways = ((dist.isend, sent, peers[0]), (dist.irecv, received, peers[1]))
        works = [dist.P2POp(way, data[:nbytes], peer, group) for way, data, peer in ways]
        for work in dist.batch_isend_irecv(works):
            work.wait()

    def exchange(each: Exchange, nbytes: int, repeats: int) -> float:
        """Return seconds of one, after one more that lets ranks begin at once."""
        vote = torch.zeros(1)
        dist.all_reduce(vote, group=control)
        times = [clock()]
        for _ in range(repeats + 1):
            send(each, nbytes)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(clock())
        return median(end - start for start, end in pairwise(times[1:]))

    for each in exchanges(topology):
        latency_s = exchange(each, 8, 10)
        for nbytes in sizes:
            taken_s = exchange(each, nbytes, 3)
            crossed += 4 * nbytes if each.level == "inter" else 0
            slowest = torch.tensor([taken_s], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=control)
            if slowest.item() >= _LONG_ENOUGH_S:
                break
        report.links.append(
            LinkTime(
                exchange=each,
                source=each.peers(topology)[1],
                target=topology.rank,
                bytes_per_s=nbytes / max(taken_s - latency_s, taken_s / 2),
                latency_s=min(latency_s, _queued_s(partial(send, each, 8), device)),
            )
        )
    grown = {name: n - before[name] for name, n in _sent_nbytes(report, system).items()}
    most = max(grown, key=grown.__getitem__, default="")
    report.carrier = most if crossed and grown.get(most, 0) > crossed / 2 else ""


def _queued_s(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Return seconds of each on a GPU that is busy until all are issued; infinity without one.

    So the host's time does not count, which plans add by themselves.
    """
    if device.type != "cuda":
        return math.inf
    a = torch.ones(4096, 4096, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(10):
        torch.mm(a, a)  # 3 ms
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end)) / 1e3 / repeats


def _sent_nbytes(report: Report, system: Path) -> dict[str, int]:
    folder = system / "class" / "net"
    counters = {name: folder / name / "statistics" / "tx_bytes" for name in report.interfaces}
    return {name: int(_read(path) or 0) for name, path in counters.items()}


def measure_clock(
    report: Report, control: dist.ProcessGroup, clock: Callable[[], float] = time.time
) -> None:
    """Add how far this host's clock is ahead of rank 0's; all ranks call this.

    Between two barriers of rank 0, every rank reads its clock.
    """
    found = []
    for _ in range(5):
        times = []
        for _ in range(3):
            times.append(clock())
            dist.barrier(control)
        start, _, end = gather_objects(times, control)[0]
        found.append(((end - start) / 2, times[1] - (start + end) / 2))
    report.offset_error_s, report.offset_s = min(found)
