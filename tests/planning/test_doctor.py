"""The doctor: what each problem is called, what is measured, and what plans take from it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing import run_ranks
from torch import nn

from lq_lightning.foundation.topology import Topology
from lq_lightning.planning import cli, doctor, survey
from lq_lightning.planning.doctor import diagnose, make_profile
from lq_lightning.planning.machine import GPUS, make_machine
from lq_lightning.planning.survey import Exchange, LinkTime, Measured, Report, exchanges

LIMITS = {
    "open files": 65536.0,
    "locked memory": float("inf"),
    "shared memory": 64.0 * 2**30,
    "free disk": 500.0 * 2**30,
}
RATES = {"copy": Measured(4.1e12, 0.01), "bfloat16": Measured(7e14, 0.02)}
STATE = {"driver": "580.1", "width": "16", "full_width": "16", "reasons": []}


def gpu(rank: int, **changes: object) -> dict[str, Any]:
    found = {"name": "NVIDIA H200", "uuid": f"u{rank}", "memory_nbytes": 150_000_000_000}
    return {**found, "used_nbytes": 2**29, "context_nbytes": 6 * 2**27, "state": STATE, **changes}


def healthy(ranks: int = 4, node_size: int = 2) -> list[Report]:
    """Reports of GPUs on several hosts, with every link as fast as the others of its level."""
    reports = [
        Report(
            rank=rank,
            host=f"h{rank // node_size}",
            node_size=node_size,
            versions={"torch": "2.13.0", "python": "3.11.7"},
            limits=dict(LIMITS),
            interfaces={"lo": 0.0, "eth0": 10.0},
            operator=Measured(9e-6, 0.05),
            gpu=gpu(rank),
            rates=dict(RATES),
            carrier="eth0" if ranks > node_size else "",
        )
        for rank in range(ranks)
    ]
    for each in exchanges(Topology(world_size=ranks, rank=0, node_size=node_size)):
        rate = 3e11 if each.level == "intra" else 5.5e8
        for report in reports:
            at = Topology(world_size=ranks, rank=report.rank, node_size=node_size)
            report.links.append(link(each, each.peers(at)[1], report.rank, rate))
    return reports


def link(exchange: Exchange, source: int, target: int, rate: float) -> LinkTime:
    both = {"source": source, "target": target}
    return LinkTime(exchange=exchange, **both, bytes_per_s=rate, latency_s=2e-5)


def texts(reports: list[Report], **arguments: bool) -> str:
    return "\n".join(f"{p.text} {'STOPS' * p.stops}" for p in diagnose(reports, **arguments))


def test_finds_nothing_wrong_where_nothing_is() -> None:
    assert diagnose(healthy(), nvlink=True) == []
    assert diagnose(healthy(1, 1)) == []


@pytest.mark.parametrize(("name", "stops"), [("torch", True), ("NCCL_DEBUG", False)])
def test_names_versions_and_variables_that_differ(name: str, stops: bool) -> None:
    reports = healthy()
    reports[3].versions[name] = "2.11.0"
    here = reports[0].versions.get(name, "not set")
    (problem,) = diagnose(reports)
    assert problem.text.startswith(f"{name} differs: {here} on rank 0 (host h0), 2.11.0 on rank 3")
    assert problem.stops == stops
    for report in reports:
        report.versions[name] = "2.11.0"
    assert diagnose(reports) == []


def test_names_nodes_of_different_sizes() -> None:
    reports = healthy()
    reports[3].node_size = 1
    assert "2 on that of rank 2 (host h1) and 1 on that of rank 3" in texts(reports)
    assert "STOPS" in texts(reports)
    assert "3 ranks are no multiple of the 2 of a node" in texts(healthy()[:3])


def test_names_ranks_without_a_gpu_and_with_a_shared_one() -> None:
    reports = healthy()
    reports[2].gpu, reports[2].rates = None, {}
    assert "rank 2 (host h1) has no GPU, others have one" in texts(reports)
    assert diagnose(reports)[0].stops
    reports = healthy()
    reports[1].gpu = gpu(0)
    assert "rank 0 (host h0) and rank 1 use the same GPU" in texts(reports)
    assert diagnose(reports)[0].stops
    reports[1].host = "h9"  # the same number on another host is another GPU
    assert "same GPU" not in texts(reports)
    cpus = [replace(report, gpu=None, rates={}) for report in healthy()]
    assert diagnose(cpus) == []


def test_names_a_gpu_that_fails_or_is_in_use() -> None:
    reports = healthy()
    reports[1].failures.append("OutOfMemoryError: 2 GiB")
    reports[2].gpu = gpu(2, used_nbytes=30 * 2**30)
    found = diagnose(reports)
    assert found[0].stops
    assert "rank 1 (host h0) could not be measured" in found[0].text
    assert "OutOfMemoryError: 2 GiB" in found[0].text
    assert "rank 2 (host h1) is in use: 30.0 GiB belong to other processes" in found[1].text


def test_names_throttled_clocks_and_missing_lanes() -> None:
    reports = healthy()
    reports[1].gpu = gpu(1, state={**STATE, "reasons": ["heat slows it down"]})
    reports[3].gpu = gpu(3, state={**STATE, "width": "4"})
    assert "rank 1 (host h0) runs below its full clock, as heat slows it down" in texts(reports)
    assert "rank 3 (host h1) has 4 of 16 PCIe lanes" in texts(reports)


@pytest.mark.parametrize("name", ["copy", "bfloat16"])
def test_names_a_gpu_slower_than_its_peers(name: str) -> None:
    reports = healthy()
    usual = RATES[name].value
    reports[2].rates[name] = Measured(0.88 * usual, 0.01)
    assert f"rank 2 (host h1) reaches 88% of its peers' rate ({name})" in texts(reports)
    reports[2].rates[name] = Measured(0.92 * usual, 0.01)
    assert diagnose(reports) == []


def test_names_gpus_that_are_all_slower_than_their_kind() -> None:
    reports = healthy()
    for report in reports:
        report.rates["bfloat16"] = Measured(4e14, 0.01)
    assert "bfloat16: 400 T/s, where an H200 reaches 673" in texts(reports)
    for report in reports:
        report.gpu = gpu(report.rank, name="NVIDIA T4")  # in no table
    assert diagnose(reports) == []


@pytest.mark.parametrize(
    ("name", "value", "said", "stops"),
    [
        ("open files", 540, "`ulimit -n` is 540 on host h1", False),
        ("open files", 70, "`ulimit -n` is 70 on host h1", True),
        ("shared memory", 2.0**29, "/dev/shm has 512 MiB on host h1", False),
        ("shared memory", 2.0**26, "/dev/shm has 64 MiB on host h1", True),
        ("free disk", 5.0 * 2**30, "5.0 GiB are free for checkpoints on host h1", False),
        ("free disk", 2.0**29, "0.5 GiB are free for checkpoints on host h1", True),
    ],
)
def test_names_limits_that_are_too_low(name: str, value: float, said: str, stops: bool) -> None:
    reports = healthy()
    for report in reports[2:]:
        report.limits = {**LIMITS, name: value}
    (problem,) = diagnose(reports)  # once for a host
    assert said in problem.text
    assert problem.stops == stops


def test_locked_memory_matters_to_rdma_only() -> None:
    reports = healthy()
    reports[0].limits = {**LIMITS, "locked memory": 8.0 * 2**20}
    assert diagnose(reports) == []
    reports[0].rdma_gbit = 200.0
    reports[0].carrier = reports[1].carrier = ""  # RDMA carries messages past the interfaces
    (problem,) = diagnose(reports)
    assert "`ulimit -l` limits locked memory to 8 MiB on host h0" in problem.text
    assert problem.stops


def test_names_a_clock_that_is_off() -> None:
    reports = healthy()
    reports[2].offset_s, reports[2].offset_error_s = -3.2, 0.01
    assert "the clock of host h1 is 3.2 s behind rank 0's" in texts(reports)
    reports[2].offset_error_s = 3.0  # nobody can tell
    assert diagnose(reports) == []


@pytest.mark.parametrize(
    ("carrier", "changes", "said"),
    [
        ("docker0", {}, "by TCP over docker0, a virtual interface: set NCCL_SOCKET_IFNAME"),
        ("eth0", {"rdma_gbit": 200.0}, "although it has RDMA at 200 Gb/s: unset NCCL_IB_DISABLE"),
        ("eth0", {"interfaces": {"eth0": 1.0, "eth1": 100.0}}, "although eth1 has 100: set NCCL_S"),
        ("eth0", {"interfaces": {"eth0": 100.0}}, "at 8.8 of its 100 Gb/s: raise NCCL_NSOCKS"),
    ],
)
def test_names_a_link_that_falls_to_slow_tcp(
    carrier: str, changes: dict[str, Any], said: str
) -> None:
    reports = healthy()
    for report in reports[2:]:
        report.carrier = carrier
        for name, value in changes.items():
            setattr(report, name, value)
    (problem,) = diagnose(reports)
    assert problem.text.startswith(f"messages to other nodes leave host h1 by TCP over {carrier}")
    assert said in problem.text
    emulated = [replace(reports[3], rank=n, host="one", gpu=gpu(n)) for n in range(4)]
    assert diagnose(emulated) == []


@pytest.mark.parametrize(
    ("level", "words"), [("intra", "within nodes"), ("inter", "between nodes")]
)
def test_names_the_slow_link_and_not_its_neighbor(level: str, words: str) -> None:
    reports = healthy(4, 4) if level == "intra" else healthy(4, 1)
    slow = next(each for each in reports[2].links if each.exchange == Exchange(level, 1))  # type: ignore[arg-type]
    for report in (reports[1], reports[2]):  # the sender receives late as well
        report.links = [
            replace(each, bytes_per_s=each.bytes_per_s / 4)
            if each.exchange == slow.exchange
            else each
            for each in report.links
        ]
    (problem,) = [each for each in diagnose(reports) if "receives" in each.text]
    rate = slow.bytes_per_s / 4e9
    ends = f"rank 2 (host {reports[2].host}) receives {rate:.3g} GB/s from rank 1"
    assert problem.text.startswith(f"{words}, {ends}")


def test_names_nvlink_that_is_not_used() -> None:
    reports = healthy(2, 2)
    for report in reports:
        report.links = [replace(each, bytes_per_s=2e10) for each in report.links]
    assert "linked by NVLink, but exchange only 20 GB/s" in texts(reports, nvlink=True)
    assert diagnose(reports, nvlink=False) == []


def test_a_plan_takes_what_was_measured(tmp_path: Path) -> None:
    reports = healthy(8, 4)
    reports[5].rates["bfloat16"] = Measured(6.8e14, 0.02)
    path = tmp_path / "profile.json"
    path.write_text(make_profile(reports, nvlink=True).to_json(when="now"))
    machine = make_machine(profile=path)
    assert (machine.nodes, machine.gpus_per_node, machine.nvlink) == (2, 4, True)
    assert machine.within_node.bytes_per_s == 3e11
    assert machine.within_node.latency_s == 2e-5
    assert machine.between_nodes.bytes_per_s == pytest.approx(4 * 5.5e8)  # the ranks of a node
    assert machine.gpu.name == "H200"
    assert machine.gpu.memory_nbytes == 150_000_000_000
    assert machine.gpu.context_nbytes == 6 * 2**27
    assert machine.gpu.copy_bytes_per_s == 4.1e12
    assert machine.gpu.products["bfloat16"] == 7e14
    assert machine.gpu.products["float8"] == GPUS["H200"].products["float8"]
    assert machine.gpu.operator_s == 9e-6
    assert machine.gpu.error == pytest.approx(0.02)


def test_errors_are_the_spread_between_ranks() -> None:
    reports = healthy(2, 2)
    reports[1].rates["copy"] = Measured(3.1e12, 0.01)
    reports[1].links = [replace(each, bytes_per_s=2e11) for each in reports[1].links]
    profile = make_profile(reports)
    assert profile.gpu is not None
    assert profile.within_node is not None
    assert profile.gpu.error == pytest.approx(0.5 / 3.6)
    assert profile.within_node.error == pytest.approx(0.5 / 2.5)
    assert profile.between_nodes is None
    reports[0].gpu = gpu(0, used_nbytes=9 * 2**30)  # then nobody knows whose the memory is
    used = make_profile(reports).gpu
    assert used is not None
    assert used.context_nbytes == GPUS["H100"].context_nbytes


def test_every_rank_has_partners_and_every_link_is_used() -> None:
    for ranks, node_size in ((1, 1), (2, 1), (6, 2), (8, 8), (12, 3)):
        used = set()
        for each in exchanges(Topology(world_size=ranks, rank=0, node_size=node_size)):
            peers = [
                each.peers(Topology(world_size=ranks, rank=rank, node_size=node_size))
                for rank in range(ranks)
            ]
            for rank, (target, _) in enumerate(peers):
                assert peers[target][1] == rank
                assert (target // node_size == rank // node_size) == (each.level == "intra")
                used.add((rank, target))
        pairs = {(a, b) for a in range(ranks) for b in range(ranks) if a != b}
        inside = {(a, b) for a, b in pairs if a // node_size == b // node_size}
        across = {(a, b) for a, b in pairs - inside if a % node_size == b % node_size}
        assert used == inside | across
    many = exchanges(Topology(world_size=1024, rank=0, node_size=8))
    assert [each.distance for each in many if each.level == "inter"] == [1, 2, 4, 8]


# --- measuring ------------------------------------------------------------------------------------


def test_reads_interfaces_and_rdma_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    files = {
        "net/eth0/speed": "25000\n",
        "net/eth0/operstate": "up\n",
        "net/eth1/speed": "-1",
        "net/eth1/operstate": "down",
        "net/lo/operstate": "unknown",
        "infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)",
        "infiniband/mlx5_1/ports/1/state": "1: DOWN",
        "infiniband/mlx5_1/ports/1/rate": "400 Gb/sec (4X NDR)",
    }
    for name, text in files.items():
        path = tmp_path / "class" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    report = survey.host_report(3, 2, tmp_path / "not" / "yet", system=tmp_path)
    assert report.interfaces == {"eth0": 25.0, "lo": 0.0}
    assert report.rdma_gbit == 200.0
    assert report.limits["free disk"] > 0
    assert str(report) == f"rank 3 (host {report.host})"
    assert report.versions["torch"] == torch.__version__
    assert report.versions["NCCL_IB_DISABLE"] == "1"


def test_counts_the_operators_that_it_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(work: Any, seconds: float) -> Measured:
        work()
        return Measured(1.0, 0.125)

    monkeypatch.setattr(survey, "_time", timed)
    monkeypatch.setattr(nn, "GELU", nn.Identity)
    without = 1 / survey.operator_time(torch.device("cpu")).value
    monkeypatch.undo()
    monkeypatch.setattr(survey, "_time", timed)
    found = survey.operator_time(torch.device("cpu"))
    assert 1 / found.value - without == pytest.approx(2 * 12)  # forward and backward of each GELU
    assert found.error == 0.125


def test_views_are_no_operators() -> None:
    with survey._Counter() as counter:
        torch.ones(2, 3).t().view(3, 2).add(1)
    assert counter.number == 2


def test_works_that_a_gpu_is_timed_with() -> None:
    works = {
        name: (amount, work) for name, amount, work in survey.gpu_works(torch.device("cpu"), 32, 64)
    }
    assert list(works) == ["copy", "float32", "float16", "bfloat16", "float8", "int8"]
    assert works["copy"][0] == 128
    assert works["copy"][1]().shape == (64,)  # type: ignore[attr-defined]
    for name in list(works)[1:]:
        assert works[name][0] == 2 * 32**3
        product = works[name][1]()
        assert isinstance(product, torch.Tensor)
        assert product.shape == (32, 32)
        assert product.isfinite().all()


def test_times_work() -> None:
    found = survey._time(lambda: time.sleep(2e-3), 0.05)
    assert 2e-3 <= found.value < 2e-2
    assert found.error >= 0


class Clock:
    """Counts a second per look, times a factor."""

    def __init__(self, factor: float) -> None:
        self.now, self.factor = 0.0, factor

    def __call__(self) -> float:
        self.now += self.factor
        return self.now


def links_of_rank(rank: int, size: int, node_size: int, system: str) -> Report:
    report = survey.host_report(rank, node_size, Path())
    report.interfaces = {"eth0": 10.0, "eth1": 10.0}
    topology = Topology(world_size=size, rank=rank, node_size=node_size)
    clock = Clock(0.5 if rank else 0.125)
    survey.measure_links(report, topology, torch.device("cpu"), None, clock, Path(system))
    return report


@pytest.mark.parametrize("node_size", [2, 1])
def test_links_are_timed_by_the_clock_of_who_receives(node_size: int, tmp_path: Path) -> None:
    reports = run_ranks(links_of_rank, 2, node_size, str(tmp_path))
    level = "intra" if node_size == 2 else "inter"
    for rank, (report, seconds) in enumerate(zip(reports, (0.125, 0.5), strict=True)):
        (found,) = report.links
        assert found.exchange == Exchange(level, 1)  # type: ignore[arg-type]
        assert (found.source, found.target) == (1 - rank, rank)
        assert found.latency_s == seconds
        assert found.bytes_per_s == 2**20 / (seconds / 2)  # the first size was long enough
        assert report.carrier == ""  # no counter grew


def carrier_of_rank(rank: int, size: int, system: str) -> str:
    """Let eth1 send as much as the rank does: its counter is read before and after."""
    report = survey.host_report(rank, 1, Path())
    report.interfaces = {"eth0": 10.0, "eth1": 10.0}
    read = survey._sent_nbytes
    counts = iter([{"eth0": 5, "eth1": 7}, {"eth0": 9, "eth1": 7 + 4 * 2**20}])
    survey._sent_nbytes = lambda *_: next(counts)  # type: ignore[assignment]
    topology = Topology(world_size=size, rank=rank, node_size=1)
    survey.measure_links(report, topology, torch.device("cpu"), None, Clock(1.0), Path(system))
    survey._sent_nbytes = read
    return report.carrier


def test_the_interface_that_carried_messages_is_found_by_its_counter(tmp_path: Path) -> None:
    counter = tmp_path / "class" / "net" / "eth0" / "statistics" / "tx_bytes"
    counter.parent.mkdir(parents=True)
    counter.write_text("12345\n")
    report = replace(healthy(1, 1)[0], interfaces={"eth0": 1.0, "lo": 0.0})
    assert survey._sent_nbytes(report, tmp_path) == {"eth0": 12345, "lo": 0}
    assert run_ranks(carrier_of_rank, 2, str(tmp_path)) == ["eth1", "eth1"]


def clock_of_rank(rank: int, size: int) -> tuple[float, float]:
    report = survey.host_report(rank, 1, Path())
    survey.measure_clock(report, dist.group.WORLD, lambda: time.time() + 7.5 * rank)  # type: ignore[arg-type]
    return report.offset_s, report.offset_error_s


def test_clocks_are_compared_between_barriers() -> None:
    for rank, (offset_s, error_s) in enumerate(run_ranks(clock_of_rank, 2)):
        assert abs(offset_s - 7.5 * rank) <= error_s + 1e-3
        assert 0 < error_s < 1


# --- the command ----------------------------------------------------------------------------------


def test_one_rank_without_gpu_or_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    path = tmp_path / "profile.json"
    assert cli.main(["doctor", f"--profile={path}", f"--root-dir={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert "1 x 1 ranks, no GPU found" in said
    assert "us per operator" in said
    assert "nothing wrong was found" in said
    assert json.loads(path.read_text())["machine"]["gpu"] is None
    assert make_machine("H200", profile=path).gpu == GPUS["H200"]


def doctor_of_rank(rank: int, size: int, path: str, change: str) -> tuple[int, str]:
    import contextlib
    import io

    if change == "version" and rank == 1:
        os.environ["NCCL_DEBUG"] = "INFO"
        survey._version = lambda package: "9.9"
    if change == "GPU" and rank == 1:
        doctor.operator_time = fail  # type: ignore[assignment]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = doctor.examine(Path(path), Path())
    assert dist.is_initialized()  # as it was before
    return code, said.getvalue()


def fail(device: torch.device) -> Measured:
    raise RuntimeError("CUDA error: no kernel image\nand more")


@pytest.mark.parametrize("change", ["none", "version", "GPU"])
def test_two_ranks(tmp_path: Path, change: str) -> None:
    path = tmp_path / "profile.json"
    (code, said), (other, nothing) = run_ranks(doctor_of_rank, 2, str(path), change)
    assert code == other == int(change != "none")
    assert nothing == ""  # rank 0 speaks for all
    assert ("within nodes: " in said) == (change == "none")
    assert (make_machine("H100", profile=path).within_node.error != 0.05) == (change == "none")
    if change == "version":
        assert "STOPS TRAINING: lq-lightning differs:" in said
        assert "problem: NCCL_DEBUG differs: not set on rank 0" in said
    if change == "GPU":
        assert "training may fail: RuntimeError: CUDA error: no kernel image." in said


def test_says_who_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "h0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(dist, "init_process_group", unreachable)
    monkeypatch.setattr(doctor.socket, "gethostbyname", lambda name: "127.0.1.1")
    assert doctor.examine(tmp_path / "profile.json", tmp_path) == 1
    said = capsys.readouterr().out
    assert said.startswith("STOPS TRAINING: rank 1 of 2 cannot talk to the others (DistNetworkErr")
    assert "this host's name means 127.0.1.1" in said
    assert "h0:29500 is open" in said
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert doctor.examine(tmp_path / "profile.json", tmp_path) == 1
    assert "127.0.1.1" not in capsys.readouterr().out


def unreachable(*_: object, **__: object) -> None:
    raise dist.DistNetworkError("timed out after 60s\nmore")


def test_does_not_wait_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(doctor, "_TIMEOUT", timedelta(seconds=0.5))
    monkeypatch.setattr(doctor.os, "kill", lambda *arguments: ended.append(arguments))
    monkeypatch.setattr(doctor, "_examine", lambda *_: time.sleep(0.2) or 0)
    assert doctor.examine(tmp_path / "profile.json", tmp_path) == 0
    assert ended == [(os.getpid(), signal.SIGTERM)]
    assert "cannot talk to the others (TimeoutError: nothing for 0 s)" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "_TIMEOUT", timedelta(seconds=1))
    assert doctor.examine(tmp_path / "profile.json", tmp_path) == 0
    time.sleep(0.1)
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())
    assert capsys.readouterr().out == ""
