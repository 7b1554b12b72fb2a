"""Machines that one can rent, and what is said of a wrong one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from lq_lightning.planning.machine import GPUS, Link, Profile, find_gpu, make_machine, parse_rate

FAST = Link(bytes_per_s=2e9, latency_s=7e-6, error=0.02)
SLOW = Link(bytes_per_s=1e8, latency_s=9e-5, error=0.04)
H200 = replace(GPUS["H200"], copy_bytes_per_s=4.0e12, products={"bfloat16": 7e14})


def write(path: Path, **changes: object) -> Path:
    values = {"gpu": H200, "gpus_per_node": 2, "nodes": 2, "nvlink": True}
    values |= {"within_node": FAST, "between_nodes": SLOW} | changes
    path.write_text(Profile(**values).to_json(found=["nothing"]))  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("25gbit", 3.125e9),
        ("10Gb/s", 1.25e9),
        ("12.5GB/s", 12.5e9),
        ("100 Mbps", 12.5e6),
        ("1.6 Tbit/s", 2e11),
        ("800kbit", 1e5),
        ("400GBIT", 5e10),
        (5e9, 5e9),
        (7, 7.0),
    ],
)
def test_reads_bits_and_bytes(text: str | float, expected: float) -> None:
    assert parse_rate(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text", ["25g", "25", "fast", "0gbit", "-5gbit", "10GB/m", True, 0, -1.0, math.nan, math.inf]
)
def test_refuses_what_is_no_rate(text: str | float) -> None:
    with pytest.raises(ValueError, match="is no rate: give one such as '25gbit'"):
        make_machine("H100", nodes=2, network=text)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h100", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("h100-sxm", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("a100-sxm-80gb", "A100-80"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx3090", "RTX 3090"),
        ("NVIDIA T4", None),
        ("", None),
    ],
)
def test_finds_a_gpu_by_any_of_its_names(name: str, key: str | None) -> None:
    assert find_gpu(name) == key


def test_says_of_an_unknown_gpu_which_are_known() -> None:
    with pytest.raises(ValueError, match=r"gpu='H1OO' is not known.*mean 'H100'.*H200.*A10G"):
        make_machine("H1OO")
    with pytest.raises(ValueError, match=r"not known\. Known are"):
        make_machine("quantum")


@pytest.mark.parametrize("value", [0, -2, 1.5, True])
@pytest.mark.parametrize("name", ["nodes", "gpus_per_node"])
def test_refuses_counts_that_are_none(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}.*give a whole number of 1 or more"):
        make_machine("H100", network="10gbit", **{name: value})  # type: ignore[arg-type]


def test_several_nodes_need_a_network() -> None:
    with pytest.raises(ValueError, match="2 nodes need `network`"):
        make_machine("H100", nodes=2)
    assert make_machine("H100", nodes=1).nodes == 1
    link = make_machine("H100", nodes=2, network="10gbit").between_nodes
    # what `step_time_10gbit.json` and `step_time_25gbit.json` reached lies within two errors
    for reached in (0.9737, 0.9568):
        assert abs(link.bytes_per_s / 1.25e9 - reached) < 2 * link.error
    fast = make_machine("H100", nodes=2, network="400gbit").between_nodes
    assert fast.error > link.error
    assert fast.bytes_per_s < 50e9


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_is_possible(name: str) -> None:
    machine = make_machine(name)
    gpu = machine.gpu
    assert (machine.nodes, machine.gpus_per_node, gpu.name) == (1, 8, name)
    assert 20 * 2**30 < gpu.memory_nbytes < 200 * 2**30
    assert gpu.products["bfloat16"] > 20 * gpu.copy_bytes_per_s
    assert gpu.products["float32"] < gpu.products["bfloat16"]
    assert gpu.products.get("float8", gpu.products["bfloat16"]) >= gpu.products["bfloat16"]
    assert 0 < gpu.error < 0.3
    assert machine.nvlink == (machine.within_node.bytes_per_s > 1e11)
    assert ("float8" in gpu.products) == (not name.startswith(("A1", "RTX 3")))


def test_links_of_a_node_carry_less_than_their_data_sheet() -> None:
    two, eight = (make_machine("H200", gpus_per_node=n).within_node.bytes_per_s for n in (2, 8))
    assert two < eight < 450e9
    assert make_machine("A10G").within_node.bytes_per_s < 16e9
    assert make_machine("A10G").within_node.error > make_machine("H200").within_node.error


def test_measured_numbers_are_those_of_the_reports() -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    copy = json.loads((results / "kernels_h200.json").read_text())["results"]["copy_gb_per_s"]
    assert GPUS["H200"].copy_bytes_per_s == pytest.approx(copy * 1e9, rel=0.015)
    for name, report in (("H200", "kernels_h200.json"), ("H100", "activations_int8.json")):
        (first, *_) = json.loads((results / report).read_text())["environment"]["gpus"]
        assert find_gpu(first["name"]) == name
        assert GPUS[name].memory_nbytes == int(first["memory_gib"] * 2**30)


def test_a_profile_replaces_the_table(tmp_path: Path) -> None:
    machine = make_machine(profile=write(tmp_path / "profile.json"))
    assert (machine.nodes, machine.gpus_per_node, machine.nvlink) == (2, 2, True)
    assert (machine.within_node, machine.between_nodes) == (FAST, SLOW)
    assert machine.gpu.copy_bytes_per_s == 4.0e12
    assert machine.gpu.products["bfloat16"] == 7e14
    assert machine.gpu.products["float8"] == GPUS["H200"].products["float8"]  # not measured
    assert "profile.json" in machine.source


def test_arguments_go_before_the_profile(tmp_path: Path) -> None:
    path = write(tmp_path / "profile.json")
    machine = make_machine("NVIDIA H200", 16, 8, "10gbit", path)
    assert (machine.nodes, machine.gpus_per_node) == (16, 8)
    assert machine.between_nodes == make_machine("H200", 2, network="10gbit").between_nodes
    assert machine.within_node == FAST
    with pytest.raises(ValueError, match=r"gpu='H100' is not what .*profile.json measured, H200"):
        make_machine("H100", profile=path)


def test_a_profile_need_not_have_everything(tmp_path: Path) -> None:
    links = {"within_node": None, "between_nodes": None, "nvlink": False}
    alone = write(tmp_path / "alone.json", nodes=1, gpus_per_node=1, **links)
    machine = make_machine(gpus_per_node=8, profile=alone)
    assert machine.within_node == make_machine("H200").within_node
    assert machine.nvlink
    with pytest.raises(ValueError, match="2 nodes need"):
        make_machine(nodes=2, profile=alone)
    cpu = write(tmp_path / "cpu.json", gpu=None)
    with pytest.raises(ValueError, match="of a machine without GPU: give `gpu` too"):
        make_machine(profile=cpu)
    assert make_machine("A10G", profile=cpu).between_nodes == SLOW


def test_a_gpu_that_only_the_profile_knows(tmp_path: Path) -> None:
    other = replace(H200, name="NVIDIA T4")
    path = write(tmp_path / "t4.json", gpu=other)
    assert make_machine(profile=path).gpu == other
    assert make_machine("NVIDIA T4", profile=path).gpu == other
    alone = write(tmp_path / "alone.json", gpu=other, within_node=None)
    assert make_machine(gpus_per_node=1, profile=alone).gpu == other
    with pytest.raises(ValueError, match="how NVIDIA T4 are linked in a node of 2"):
        make_machine(profile=alone)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other", "machine": {}}'])
def test_says_of_a_file_that_it_is_no_profile(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"profile .*profile.json' cannot be read.*doctor"):
        make_machine(profile=path)
    with pytest.raises(ValueError, match="cannot be read: FileNotFoundError"):
        make_machine(profile=tmp_path / "none.json")
