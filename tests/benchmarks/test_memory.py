"""Memory of training: the prediction, and a run of the benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def memory(load_benchmark: Any) -> ModuleType:
    return load_benchmark("memory")


@pytest.mark.parametrize(
    ("variant", "at_rest", "peak"),
    [
        ("ZeRO-3", 3_000, 50_000),
        ("ZeRO-2", 3_000, 51_600),
        ("quantized, full", 5_000, 52_000),
        ("quantized, node", 4_000, 51_000),
    ],
)
def test_prediction(memory: ModuleType, variant: str, at_rest: int, peak: int) -> None:
    predicted = memory.predict(
        memory.MEASURED[variant],
        parameters=1_000,
        in_blocks=800,
        world_size=4,
        node_size=2,
        zero3_peak=50_000,
    )
    assert (predicted.at_rest, predicted.peak) == (at_rest, peak)
    assert predicted.optimizer == at_rest + 1_000


def test_messages_of_one_level_only(memory: ModuleType) -> None:
    assert memory.message_bytes(1_000, world_size=4, node_size=4) == pytest.approx(2_200)
    assert memory.message_bytes(1_000, world_size=4, node_size=2) == pytest.approx(2_750)


@pytest.mark.slow
def test_every_variant_runs(tmp_path: Path) -> None:
    report = tmp_path / "memory.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = [str(ROOT / "benchmarks" / "memory.py"), "--tiny", "--cpu", "--json", str(report)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", *script],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    model = json.loads(report.read_text())["results"]["models"]["tiny"]
    assert list(model["variants"]) == ["ZeRO-3", "ZeRO-2", "quantized, full", "quantized, node"]
    parameters = model["model"]["parameters"]
    predicted = model["variants"]["quantized, full"]["predicted"]["at_rest"]
    assert predicted == 12 * parameters / 2 + 2 * parameters
