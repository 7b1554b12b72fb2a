"""Split learning's benchmarks: sizes by arithmetic are the paper's, and those that are sent."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
Load = Callable[[str], ModuleType]

pytest.importorskip("peft")


def test_sizes_are_those_of_table_4(load: Load) -> None:
    """The paper: 27.3 and 226.5 MB in bf16, 6.8 with AQ-SGD (a scale per channel), 4.34 bits."""
    sizes = load("split_sizes")
    rows = sizes.rows(sizes.LLAMA3_8B, 16, 380, peft="lora", rank=16, bits=4)
    found = {(row["deployment"], row["codec"]): row["one_way_bytes"] / 1e6 for row in rows}
    assert found["adapters", "bf16"] == pytest.approx(27.3, abs=0.05)
    assert found["everything", "bf16"] == pytest.approx(226.5, abs=0.05)
    # 6.8, and one row of 128 in bf16
    assert found["adapters", "channel"] == pytest.approx(6.8 + 27.3 / 128, abs=0.05)
    assert found["adapters", "amaq"] < 7.4  # what the paper's AMAQ takes
    settings = sizes.SplitSettings(rank=16)
    values = sizes.paper_values(settings, sizes.LLAMA3_8B, 16, 380)
    assert values == 13_631_488
    assert values * 4.34 / 8e6 == pytest.approx(7.4, abs=0.05)


@pytest.mark.uninitialized_memory_ok  # transformers fills what it allocates later
@pytest.mark.parametrize("peft", ["lora", "prefix"])
@pytest.mark.parametrize("deployment", ["adapters", "everything"])
@pytest.mark.parametrize("codec", ["bf16", "group", "aq_sgd", "amaq"])
def test_sizes_are_those_that_cross(
    load: Load, monkeypatch: pytest.MonkeyPatch, peft: Any, deployment: Any, codec: Any
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from lq_testing import split_runs
    from split_learning.settings import SplitSettings

    sizes = load("split_sizes")
    settings = SplitSettings(peft=peft, deployment=deployment, codec=codec, gradients="int6")
    gates = {"start_bits": 4.0} if codec == "amaq" else {}
    with split_runs.serving(split_runs.load(settings)) as server:
        model = split_runs.client(settings, server, **gates)
        batch = split_runs.batches()[0]
        for _ in range(2):  # AQ-SGD sees the first sample and the first adapters in full precision
            before = _tensor_nbytes(model)
            model(input_ids=batch, labels=batch).loss.backward()
            for value in model.adapters.parameters():
                value.data.add_(0.01)
            after = _tensor_nbytes(model)
        model.close()
    shape = sizes.ModelShape(hidden=128, layers=4, heads=4, kv_heads=2, head=32, intermediate=352)
    expected = sizes.batch_nbytes(settings, shape, 2, 16)
    expected.pop("widths", None)  # as they were
    sent = {kind: after[kind] - before.get(kind, 0) for kind in expected}
    assert sent == expected
    assert sum(after.values()) - sum(before.values()) == sum(expected.values())


def _tensor_nbytes(model: Any) -> dict[str, int]:
    traffic = model.link.traffic
    counts = {**traffic.sent, **traffic.received}
    return {kind: count.tensor_nbytes for kind, count in counts.items()}


def test_shapes_are_read_from_a_config(load: Load, tmp_path: Path) -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    sizes = load("split_sizes")
    shape = sizes.read_shape(tmp_path / "config.json")
    assert (shape.kv_heads, shape.head, shape.matrix("down_proj")) == (4, 16, (96, 64))
    with pytest.raises(ValueError, match="q_proj"):
        shape.matrix("lm_head")


@pytest.mark.slow
def test_the_link_is_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "benchmarks" / "split_link.py")]
    command += ["--cases", "adapters:bf16,everything:aq_sgd", "--steps", "2", "--warmup", "1"]
    command += ["--layers", "1", "--hidden", "64"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--json", str(report)], check=True, env=environment)
    rows = json.loads(report.read_text())["results"]["rows"]
    assert [row["codec"] for row in rows] == ["bf16", "aq_sgd"]
    assert rows[1]["latency"] == 1.0
    assert rows[0]["sent_bytes"] > rows[0]["kinds"]["adapters"] > 0
    assert all(row["batch_ms"] > 0 and row["memory_bytes"] > 0 for row in rows)


def test_the_study_of_gradients_runs(run: Callable[..., str]) -> None:
    text = str(ROOT / "docs")
    short = ("--seeds", "1", "--steps", "2", "--pretrain-steps", "2", "--tokens", "16")
    shown = run("split_gradients.py", "--text", text, *short, "--gradients", "none,int4")
    assert "above full precision" in shown


@pytest.mark.uninitialized_memory_ok  # transformers fills what it allocates later
def test_a_client_is_measured_without_a_model(load: Load, tmp_path: Path) -> None:
    memory = load("split_memory")
    memory.save_config(tmp_path, memory.SMALL)
    settings = memory.SplitSettings(model=str(tmp_path))
    agreement = settings.agreement(memory.read_config(str(tmp_path)), None)
    answer = memory.Answers(settings, memory.SMALL).answer
    args = argparse.Namespace(steps=2, batch=2, tokens=8)
    given = ("127.0.0.1", 0), memory.NO_AUTHENTICATION, lambda: answer, agreement
    with memory.Server(*given) as server:
        found = memory.train(settings, f"127.0.0.1:{server.address[1]}", args)
    values = sum(
        rows * width for rows, width in memory.packing(memory.SMALL, settings).shapes.values()
    )
    assert 0.5 * values < found["adapters_bytes"] < values  # 4 bits, and what comes with them
    assert found["memory_bytes"] >= 0
