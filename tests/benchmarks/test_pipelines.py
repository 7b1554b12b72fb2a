"""Benchmarks run on several ranks: bytes, times, errors and losses are consistent."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lq_testing import run_ranks

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"

Load = Callable[[str], ModuleType]


def _script(rank: int, size: int, name: str, *options: str) -> None:
    sys.path.insert(0, str(FOLDER))
    sys.argv = [name, *options]
    runpy.run_path(str(FOLDER / name), run_name="__main__")


def _report(
    tmp_path: Path, name: str, *options: str, size: int = 2, cpu: bool = True
) -> dict[str, Any]:
    path = tmp_path / f"{name}{size}.json"
    named = (*options, *["--cpu"] * cpu, "--json", str(path))
    run_ranks(_script, size, name, *named, backend=None, torchrun=True, timeout=600)
    results: dict[str, Any] = json.loads(path.read_text())["results"]
    return results


def test_slow_network_counts_bytes_and_compares_losses(tmp_path: Path) -> None:
    options = ["slow_network.py", "--tiny", "--text", str(FOLDER), "--seq", "16"]
    options += ["--microbatches", "4", "--micro-batch", "2", "--steps", "2", "--rate", "1mbit"]
    two = _report(tmp_path, *options, "--codecs", "fp32,aq_sgd,tah,tah5")
    (alone,) = _report(tmp_path, *options, "--codecs", "fp32", size=1)["rows"]
    values = 4 * 2 * 16 * 64
    rows = {row["codec"]: row for row in two["rows"]}
    exact = rows["fp32"]
    assert exact["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    assert alone["payload_bytes"] == [0]
    assert exact["payload_bytes"] == [4 * values, 4 * values]
    assert exact["link_ms"] == pytest.approx(8e3 * 4 * values / 1e6)
    assert exact["reached"] == pytest.approx(exact["link_ms"] / exact["step_ms"])
    assert exact["tokens_per_s"] == pytest.approx(4 * 2 * 16 / exact["step_ms"] * 1e3)
    # Differences in 4 bits, with scale and minimum per tile: all samples were seen in the warm-up.
    assert rows["aq_sgd"]["forward_bits"] == pytest.approx(4.5, abs=0.01)
    assert [rows[n]["backward_bits"] for n in ("tah", "tah5")] == pytest.approx([4.5, 5.5])
    assert 4.5 < rows["tah"]["forward_bits"] < 5.1  # 32 tokens have a mean
    sent = rows["tah"]["payload_bytes"]
    bits = [rows["tah"][f"{way}_bits"] for way in ("forward", "backward")]
    assert sent == [round(values * each / 8) for each in bits]
    assert rows["tah"]["coding_share"] > 0
    assert rows["tah"]["loss"] != exact["loss"] == pytest.approx(rows["aq_sgd"]["loss"], rel=0.01)


def test_rates_are_read(load: Load) -> None:
    bits_per_s = load("network").bits_per_s
    rates = {"100mbit": 1e8, "1gbit": 1e9, "2.5Mbit": 2.5e6, "none": float("inf")}
    assert {rate: bits_per_s(rate) for rate in rates} == rates
    for rate in ("fast", "100", "0mbit", "100mb"):
        with pytest.raises(ValueError, match=f"rate '{rate}': give a number of kbit, mbit or gbit"):
            bits_per_s(rate)


@pytest.mark.slow
def test_split_learning_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    options = ("--steps", "2", "--warmup", "1", "--layers", "1", "--hidden", "64")
    cases = ("--cases", "adapters:bf16,everything:aq_sgd")
    rows = _report(tmp_path, "split_link.py", *cases, *options, cpu=False)["rows"]
    assert [row["codec"] for row in rows] == ["bf16", "aq_sgd"]
    assert rows[1]["latency"] == 1.0
    assert rows[0]["sent_bytes"] > rows[0]["kinds"]["adapters"] > 0
    assert all(row["batch_ms"] > 0 and row["memory_bytes"] > 0 for row in rows)


def test_bytes_between_nodes_of_tensor_parallel_ranks_are_those_of_the_formula(
    tmp_path: Path,
) -> None:
    sizes = ["--tiny", "--hidden", "256", "--heads", "4", "--steps", "2", "--warmup", "1"]
    options = [*sizes, "--node-size", "2", "--tensor-parallel", "2"]
    options += ["--variants", "fsdp2,quantized,weights-only,gradients-only"]
    variants = _report(tmp_path, "step_time.py", *options, size=4)["variants"]
    for name, row in variants.items():
        assert row["sent_inter_bytes"] == pytest.approx(row["formula_inter_bytes"], rel=0.01), name
        assert row["last_loss"] == pytest.approx(variants["fsdp2"]["last_loss"], rel=1e-3)
    # (4.125 + 4.25) bits, and some more for embedding and head, instead of 2 * 16 + 32
    sent = {name: row["sent_inter_bytes"] for name, row in variants.items()}
    assert 7 < sent["fsdp2"] / sent["quantized"] < 7.7


def test_reductions_are_compared_on_equal_terms(tmp_path: Path) -> None:
    options = ["--sizes", "64K", "--scatter", "256K", "--seconds", "0.01", "--node-size", "2"]
    row, scatter = _report(tmp_path, "all_reduce.py", *options, size=4)["rows"]
    assert [row["kind"], scatter["kind"]] == ["all-reduce", "reduce-scatter"]
    assert all(ms > 0 for ms in row["parts_ms"].values())
    errors = scatter["relative_error"]
    assert errors["TLq-HS, transform apart"] == pytest.approx(errors["TLq-HS"], rel=1e-3)
    assert errors["QuanGrad"] < errors["TLq-HS"] < errors["TLq"] < errors["ULq"] < 0.5
