"""A training step enters few files of ours (`benchmarks/ways.py`), and the script counts them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from lq_testing import run_ranks

from lq_lightning.data_parallel import WeightQuantization

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
LIMITS = {"weight": 12, "gradient": 10, "activation": 14}


def _ways() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    return importlib.import_module("ways")


def _count(rank: int, world: int) -> dict[str, list[str]]:
    ways, found = _ways(), {}
    ways.collectives(found)
    ways.activations(found)
    return {name: sorted(way.functions) for name, way in found.items()}


def test_a_step_enters_few_files() -> None:
    files, _ = run_ranks(_count, 2)
    for name, limit in LIMITS.items():
        assert 0 < len(files[name]) <= limit, files[name]


def test_calls_between_files_are_counted() -> None:
    config, ways = WeightQuantization(), _ways()
    way = ways.Way()
    with ways.counted(way):
        config.codec()
    assert way.functions["lq_lightning/data_parallel/config.py"] == 1
    assert way.functions["lq_lightning/codecs/spec.py"] > 0
    assert way.crossings > 0
    sys.path.remove(str(BENCHMARKS))
