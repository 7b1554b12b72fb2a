"""What `import lq_lightning` costs and does, seen from fresh interpreters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lq_lightning

ROOT = Path(__file__).resolve().parents[1]
MAX_IMPORT_S = 0.3
OPTIONAL = {"litdata", "transformers", "peft", "tokenizers", "jsonargparse", "tensorboard", "rich"}

# Imports the package after its dependencies, then a second time as if from another copy. Seconds
# are this process's own, since a busy machine makes an import wait, and without those of compiling
# sources, which is done once where bytecode may be written, and of garbage collections, which may
# fall into any import.
_SCRIPT = """
import gc, json, sys, time
from importlib.machinery import SourceFileLoader
import lightning.pytorch, torchmetrics
from lightning.pytorch.strategies import StrategyRegistry
compiling, compile_source = [], SourceFileLoader.source_to_code
def timed(*args, **kwargs):
    start = time.process_time()
    code = compile_source(*args, **kwargs)
    compiling.append(time.process_time() - start)
    return code
SourceFileLoader.source_to_code = timed
before = set(sys.modules)
gc.disable()
start = time.process_time()
import lq_lightning
seconds = time.process_time() - start - sum(compiling)
import torch
import torch.distributed as dist
facts = {
    "seconds": seconds,
    "new": sorted({name.split(".")[0] for name in set(sys.modules) - before}),
    "cuda": torch.cuda.is_initialized(),
    "process_group": dist.is_initialized(),
    "strategy": type(StrategyRegistry.get("quantized_fsdp")).__name__,
}
for name in [m for m in sys.modules if m == "lq_lightning" or m.startswith("lq_lightning.s")]:
    del sys.modules[name]
import lq_lightning
facts["strategy_again"] = type(StrategyRegistry.get("quantized_fsdp")).__name__
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_import_is_fast_on_top_of_lightning(facts: dict[str, Any]) -> None:
    assert facts["seconds"] <= MAX_IMPORT_S


def test_import_initialises_nothing(facts: dict[str, Any]) -> None:
    assert not facts["cuda"]
    assert not facts["process_group"]


def test_import_loads_no_optional_dependency(facts: dict[str, Any]) -> None:
    assert not OPTIONAL & set(facts["new"])


def test_strategy_is_registered_and_a_second_import_is_harmless(facts: dict[str, Any]) -> None:
    assert facts["strategy"] == "QuantizedFSDPStrategy"
    assert facts["strategy_again"] == "QuantizedFSDPStrategy"


def test_public_names_exist_and_are_sorted() -> None:
    names = lq_lightning.__all__
    assert names == sorted(set(names))
    assert all(hasattr(lq_lightning, name) for name in names)
