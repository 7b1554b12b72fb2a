"""``lq-lightning doctor``: measure the machines of a run in half a minute, and name what is wrong.

Alone or under torchrun. Each rank surveys its host, its GPU and its links (`survey.py`), and
:func:`diagnose` reads the reports of all ranks and nothing else.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from statistics import fmean, median, median_high, pstdev
from typing import NamedTuple

import torch
import torch.distributed as dist

from lq_lightning._compat.torch import all_linked_by_nvlink
from lq_lightning.foundation.agreement import gather_objects
from lq_lightning.foundation.topology import Level, Topology
from lq_lightning.planning.machine import GPUS, Gpu, Link, Profile, find_gpu
from lq_lightning.planning.survey import (
    Exchange,
    LinkTime,
    Measured,
    Report,
    host_report,
    measure_clock,
    measure_gpu,
    measure_links,
    operator_time,
)

_MIB, _GIB = 2**20, 2**30
_TIMEOUT = timedelta(seconds=60)
_MUST_AGREE = ("torch", "CUDA", "NCCL", "lq-lightning", "lightning")
_INSIDE_A_HOST = ("lo", "docker", "virbr", "br-", "cni", "flannel")
_WORDS: dict[Level, str] = {"intra": "within nodes", "inter": "between nodes"}


class Problem(NamedTuple):
    """What is wrong and what to do, in a sentence, and whether training cannot go on so."""

    text: str
    stops: bool = False


# --- judging --------------------------------------------------------------------------------------


def diagnose(reports: Sequence[Report], nvlink: bool = False) -> list[Problem]:
    """Return what is wrong, from the reports of all ranks in their order."""
    checks = (_layout, _versions, _gpus, _slow_gpus, _limits, _clocks, _interfaces)
    found = [problem for check in checks for problem in check(reports)]
    return sorted([*found, *_slow_links(reports, nvlink)], key=lambda problem: not problem.stops)


def _layout(reports: Sequence[Report]) -> Iterator[Problem]:
    sizes = {report.node_size: report for report in reports}
    if len(sizes) > 1:
        ranks = " and ".join(f"{size} on that of {report}" for size, report in sizes.items())
        yield Problem(
            f"nodes have different numbers of ranks, {ranks}: start as many on each.", True
        )
    elif len(reports) % reports[0].node_size:
        yield Problem(
            f"{len(reports)} ranks are no multiple of the {reports[0].node_size} of a node: start "
            "equally many on each.",
            stops=True,
        )


def _versions(reports: Sequence[Report]) -> Iterator[Problem]:
    first = reports[0]
    for name in sorted({name for report in reports for name in report.versions}):
        here = first.versions.get(name, "not set")
        other = next((r for r in reports if r.versions.get(name, "not set") != here), None)
        if other is not None:
            there = other.versions.get(name, "not set")
            yield Problem(
                f"{name} differs: {here} on {first}, {there} on {other}; make it the same "
                "everywhere.",
                stops=name in _MUST_AGREE,
            )


def _gpus(reports: Sequence[Report]) -> Iterator[Problem]:
    owners: dict[object, Report] = {}
    some = any(report.gpu for report in reports)
    for report in reports:
        for failure in report.failures:
            yield Problem(f"{report} could not be measured, so training may fail: {failure}.", True)
        gpu = report.gpu
        if gpu is None:
            if some:
                yield Problem(
                    f"{report} has no GPU, others have one: start as many ranks per node as it has "
                    "GPUs, and check `nvidia-smi` there.",
                    stops=True,
                )
            continue
        other = owners.setdefault((report.host, gpu["uuid"]), report)
        if other is not report:
            yield Problem(
                f"{other} and rank {report.rank} use the same GPU, which NCCL refuses: start one "
                "rank per GPU, and set CUDA_VISIBLE_DEVICES alike on all of them.",
                stops=True,
            )
        if gpu["used_nbytes"] > 2 * _GIB:
            yield Problem(
                f"the GPU of {report} is in use: {gpu['used_nbytes'] / _GIB:.1f} GiB belong to "
                "other processes; end them (`nvidia-smi` lists them)."
            )
        state = gpu.get("state", {})
        for reason in state.get("reasons", ()):
            yield Problem(
                f"the GPU of {report} runs below its full clock, as {reason}: see `nvidia-smi -q`."
            )
        width, full = state.get("width"), state.get("full_width")
        if width != full:
            yield Problem(
                f"the GPU of {report} has {width} of {full} PCIe lanes: reseat it, or take another "
                "host."
            )


def _slow_gpus(reports: Sequence[Report]) -> Iterator[Problem]:
    key = find_gpu(str((reports[0].gpu or {}).get("name", "")))
    known = {"copy": GPUS[key].copy_bytes_per_s, **GPUS[key].products} if key else {}
    for name in sorted({name for report in reports for name in report.rates}):
        rates = [(report, report.rates[name].value) for report in reports if name in report.rates]
        usual, expected = median_high(rate for _, rate in rates), known.get(name, 0.0)
        for report, rate in rates:
            if rate < 0.9 * usual:
                yield Problem(
                    f"the GPU of {report} reaches {rate / usual:.0%} of its peers' rate ({name}), "
                    "and all of them wait for it: look for throttling and other processes, or take "
                    "another."
                )
        if usual < 0.75 * expected:
            yield Problem(
                f"{name}: {usual / 1e12:.3g} T/s, where an {key} reaches {expected / 1e12:.3g}: "
                "look for power limits, throttling and other users."
            )


def _one_per_host(reports: Sequence[Report]) -> Collection[Report]:
    return {report.host: report for report in reversed(reports)}.values()


def _limits(reports: Sequence[Report]) -> Iterator[Problem]:
    for report in _one_per_host(reports):
        limits, host = report.limits, f"on host {report.host}"
        files = 512 + 8 * len(reports)
        if limits["open files"] < files:
            yield Problem(
                f"`ulimit -n` is {limits['open files']:.0f} {host}, too few for the connections of "
                f"{len(reports)} ranks: raise it to {2 * files} or more.",
                stops=limits["open files"] < 64 + 4 * len(reports),
            )
        if report.rdma_gbit and limits["locked memory"] < 2**40:
            yield Problem(
                f"`ulimit -l` limits locked memory to {limits['locked memory'] / _MIB:.0f} MiB "
                f"{host}, and RDMA fails beyond: make it unlimited.",
                stops=True,
            )
        if limits["shared memory"] < _GIB:
            yield Problem(
                f"/dev/shm has {limits['shared memory'] / _MIB:.0f} MiB {host}, which NCCL and the "
                "workers of data loaders fill: start the container with `--shm-size=16g`.",
                stops=report.node_size > 1 and limits["shared memory"] < 256 * _MIB,
            )
        if limits["free disk"] < 10 * _GIB:
            yield Problem(
                f"{limits['free disk'] / _GIB:.1f} GiB are free for checkpoints {host}: free more, "
                "or give another `--root-dir`.",
                stops=limits["free disk"] < _GIB,
            )


def _clocks(reports: Sequence[Report]) -> Iterator[Problem]:
    for report in _one_per_host(reports):
        if abs(report.offset_s) - report.offset_error_s > 0.5:
            way = "ahead of" if report.offset_s > 0 else "behind"
            yield Problem(
                f"the clock of host {report.host} is {abs(report.offset_s):.1f} s {way} rank 0's, "
                "which confuses logs and the ages of files: start NTP or chrony there."
            )


def _interfaces(reports: Sequence[Report]) -> Iterator[Problem]:
    if len({report.host for report in reports}) == 1:
        return  # nodes that are emulated on one host
    between = make_profile(reports).between_nodes
    reached = between.bytes_per_s * 8e-9 if between is not None else 0.0
    for report in _one_per_host([report for report in reports if report.carrier]):
        name, speed = report.carrier, report.interfaces.get(report.carrier, 0.0)
        best = max(report.interfaces, key=report.interfaces.__getitem__)
        used = f"messages to other nodes leave host {report.host} by TCP over {name}"
        remedy = "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        if name.startswith(_INSIDE_A_HOST):
            yield Problem(f"{used}, a virtual interface: set {remedy} to the network card.")
        elif report.rdma_gbit > max(speed, 1.0):
            yield Problem(
                f"{used}, although it has RDMA at {report.rdma_gbit:g} Gb/s: unset "
                "NCCL_IB_DISABLE, install libibverbs in the container, and check NCCL_IB_HCA."
            )
        elif report.interfaces[best] > speed > 0:
            yield Problem(
                f"{used} with {speed:g} Gb/s, although {best} has {report.interfaces[best]:g}: set "
                f"{remedy} to {best}."
            )
        elif reached < 0.4 * speed:
            yield Problem(
                f"{used} at {reached:.3g} of its {speed:g} Gb/s: raise NCCL_NSOCKS_PERTHREAD and "
                "NCCL_SOCKET_NTHREADS, use jumbo frames, and ask who else uses the network."
            )


def _slow_links(reports: Sequence[Report], nvlink: bool) -> Iterator[Problem]:
    links = [link for report in reports for link in report.links]
    # A slow link also slows what its sender receives at the same time: the better one of both
    # sides' times is the link's.
    seen = {(link.exchange, link.target): link.bytes_per_s for link in links}
    rates: dict[Level, dict[tuple[int, int], float]] = defaultdict(dict)
    for link in links:
        rate = max(link.bytes_per_s, seen.get((link.exchange, link.source), 0.0))
        rates[link.exchange.level][link.source, link.target] = rate
    for level, of_level in rates.items():
        usual = median_high(of_level.values())
        for (source, target), rate in of_level.items():
            if rate < 0.5 * usual:
                yield Problem(
                    f"{_WORDS[level]}, {reports[target]} receives {rate / 1e9:.3g} GB/s from "
                    f"{reports[source]}, where links usually carry {usual / 1e9:.3g}: check "
                    "cables, switch and topology (`nvidia-smi topo -m`) between them."
                )
        if level == "intra" and nvlink and usual < 50e9:
            yield Problem(
                f"GPUs of a node are linked by NVLink, but exchange only {usual / 1e9:.3g} GB/s: "
                "unset NCCL_P2P_DISABLE, and look at `nvidia-smi nvlink --status`."
            )


# --- numbers for plans ----------------------------------------------------------------------------


def make_profile(reports: Sequence[Report], nvlink: bool = False) -> Profile:
    """Return what plans take from the reports of all ranks: medians, with their spread as error."""
    links = [link for report in reports for link in report.links]
    node_size = reports[0].node_size
    nodes: dict[tuple[Exchange, int], list[LinkTime]] = defaultdict(list)
    for link in links:
        if link.exchange.level == "inter":
            nodes[link.exchange, link.target // node_size].append(link)
    return Profile(
        gpu=_gpu_of([report for report in reports if report.gpu]),
        gpus_per_node=node_size,
        nodes=len(reports) // node_size,
        within_node=_link_of([[link] for link in links if link.exchange.level == "intra"]),
        between_nodes=_link_of(list(nodes.values())),
        nvlink=nvlink,
    )


def _link_of(groups: list[list[LinkTime]]) -> Link | None:
    """Return the usual link, each being the links of a group together."""
    if not groups:
        return None
    rates = [sum(link.bytes_per_s for link in group) for group in groups]
    latencies = [link.latency_s for group in groups for link in group]
    error = max(pstdev(rates) / fmean(rates), 0.02)
    return Link(bytes_per_s=median(rates), latency_s=median(latencies), error=error)


def _usual(values: Sequence[Measured]) -> Measured:
    numbers = [each.value for each in values]
    spread = pstdev(numbers) / fmean(numbers)
    return Measured(median(numbers), max(spread, *(each.error for each in values), 0.01))


def _gpu_of(reports: Sequence[Report]) -> Gpu | None:
    reports = [r for r in reports if {"copy", "bfloat16"} <= r.rates.keys() and r.operator.value]
    if not reports:
        return None
    states = [report.gpu or {} for report in reports]
    names = [name for name in reports[0].rates if all(name in r.rates for r in reports)]
    rates = {name: _usual([report.rates[name] for report in reports]) for name in names}
    operator = _usual([report.operator for report in reports])
    copy, context = rates["copy"], median(state["context_nbytes"] for state in states)
    used = any(state["used_nbytes"] > 2 * _GIB for state in states)  # by others as well
    device = str(states[0]["name"])
    return Gpu(
        name=find_gpu(device) or device,
        memory_nbytes=min(state["memory_nbytes"] for state in states),
        copy_bytes_per_s=copy.value,
        products={name: rate.value for name, rate in rates.items() if name != "copy"},
        operator_s=operator.value,
        context_nbytes=GPUS["H100"].context_nbytes if used else int(context),
        error=max(rate.error for rate in rates.values()),
        operator_error=max(operator.error, 0.1),
    )


def describe(reports: Sequence[Report], profile: Profile, problems: Sequence[Problem]) -> str:
    """Return what was found, a number to a line, and the problems."""
    kind = "no GPU found" if profile.gpu is None else profile.gpu.name
    lines = [f"{profile.nodes} x {profile.gpus_per_node} ranks, {kind}"]
    gpu = profile.gpu
    if gpu is not None:
        lines.append(f"copy: {gpu.copy_bytes_per_s / 1e9:.0f} GB/s")
        products = [f"{name} {rate / 1e12:.0f}" for name, rate in gpu.products.items()]
        lines.append(f"products, TFLOP/s: {', '.join(products)} (+- {gpu.error:.1%})")
    operators = [report.operator for report in reports if report.operator.value]
    if operators:
        lines.append(f"host: {_usual(operators).value * 1e6:.1f} us per operator")
    for name, link in (("within", profile.within_node), ("between", profile.between_nodes)):
        if link is not None:
            whose = "per rank" if name == "within" else "per node"
            lines.append(
                f"{name} nodes: {link.bytes_per_s / 1e9:.3g} GB/s ({link.bytes_per_s / 1.25e8:.3g} "
                f"Gb/s) {whose} and direction, {link.latency_s * 1e6:.0f} us (+- {link.error:.1%})"
            )
    if carriers := sorted({report.carrier for report in reports} - {""}):
        lines.append(f"network: TCP over {', '.join(carriers)}")
    offset = max(abs(report.offset_s) for report in reports)
    lines += [f"clocks of hosts: at most {offset * 1e3:.1f} ms apart"] if profile.nodes > 1 else []
    versions = reports[0].versions.items()
    lines.append("versions: " + ", ".join(f"{name} {value}" for name, value in versions))
    for problem in problems:
        lines.append(f"{'STOPS TRAINING' if problem.stops else 'problem'}: {problem.text}")
    return "\n".join([*lines, *([] if problems else ["nothing wrong was found"]), ""])


# --- command --------------------------------------------------------------------------------------


def examine(profile: Path, root_dir: Path) -> int:
    """Examine the machines of all ranks; return 1 if something is wrong that stops training.

    Args:
        profile: File for what plans take.
        root_dir: Where checkpoints will be written, whose free space is checked.
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    try:
        with _deadline(size), _joined(size) as control:
            return _examine(profile, root_dir, control)
    except (RuntimeError, ValueError) as error:  # of a store, gloo or NCCL
        _say_cannot_talk(size, error)
        return 1


@contextmanager
def _deadline(size: int) -> Iterator[None]:
    """End the process, with a word, if it takes long: NCCL may wait forever for a connection."""

    def end() -> None:
        _say_cannot_talk(size, TimeoutError(f"nothing for {_TIMEOUT.seconds * 2} s"))
        os.kill(os.getpid(), signal.SIGTERM)  # also where the main thread is inside of NCCL

    timer = threading.Timer(_TIMEOUT.seconds * 2, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say_cannot_talk(size: int, error: Exception) -> None:
    get = os.environ.get
    address = ""
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    local = f"this host's name means {address}, where gloo listens for others, so " * (
        address.startswith("127.") and not get("GLOO_SOCKET_IFNAME")
    )
    sys.stdout.write(
        f"STOPS TRAINING: rank {get('RANK', 0)} of {size} cannot talk to the others "
        f"({type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}): {local}set "
        "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface between the hosts, check that "
        f"{get('MASTER_ADDR')}:{get('MASTER_PORT')} is open there, and see what NCCL_DEBUG=INFO "
        "says.\n"
    )
    sys.stdout.flush()


@contextmanager
def _joined(size: int) -> Iterator[dist.ProcessGroup | None]:
    """Have a default group, and give a group for tensors on the CPU; None for a rank alone."""
    ours = size > 1 and not dist.is_initialized()
    if ours:
        cuda = torch.cuda.is_available()
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=_TIMEOUT)
    control = dist.new_group(backend="gloo", timeout=_TIMEOUT) if dist.is_initialized() else None
    try:
        yield control
    finally:
        if control is not None:
            dist.destroy_process_group(None if ours else control)


def _examine(path: Path, root_dir: Path, control: dist.ProcessGroup | None) -> int:
    rank, size = (dist.get_rank(), dist.get_world_size()) if control else (0, 1)
    node_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    local_rank = int(os.environ.get("LOCAL_RANK", rank % node_size))
    device = torch.device("cpu")
    report = host_report(rank, node_size, root_dir)
    try:
        if local_rank < torch.cuda.device_count():
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
            measure_gpu(report, device)
        report.operator = operator_time(device)
    except RuntimeError as error:
        report.failures.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    reports = gather_objects(report, control)
    problems = diagnose(reports)
    nvlink = device.type == "cuda" and node_size > 1 and all_linked_by_nvlink(node_size)
    if control is not None and not any(problem.stops for problem in problems):
        topology = Topology(world_size=size, rank=rank, node_size=node_size)
        measure_clock(report, control)
        measure_links(report, topology, device, control)
        reports = gather_objects(report, control)
        problems = diagnose(reports, nvlink)
    if rank == 0:
        profile = make_profile(reports, nvlink)
        sys.stdout.write(describe(reports, profile, problems))
        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
        found = {"when": when, "problems": [problem.text for problem in problems]}
        path.write_text(profile.to_json(**found, versions=reports[0].versions))
        sys.stdout.write(f"profile: {path}\n")
    return int(any(problem.stops for problem in problems))
