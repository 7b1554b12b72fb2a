"""What `import lq_lightning` costs and does, seen from fresh interpreters."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lq_lightning
from lq_lightning._compat.requirements import MINIMUM_VERSIONS, unmet_requirements

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
for name in [m for m in sys.modules if m.split(".")[0] == "lq_lightning"]:
    del sys.modules[name]
lightning.__version__, sys.modules["triton"] = "2.5.5", None
try:
    import lq_lightning
except ImportError as error:
    facts["refused"] = str(error)
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


def test_import_initialises_nothing_and_loads_no_optional_dependency(
    facts: dict[str, Any],
) -> None:
    assert not facts["cuda"]
    assert not facts["process_group"]
    assert not OPTIONAL & set(facts["new"])


def test_strategy_is_registered_and_a_second_import_is_harmless(facts: dict[str, Any]) -> None:
    assert facts["strategy"] == "QuantizedFSDPStrategy"
    assert facts["strategy_again"] == "QuantizedFSDPStrategy"


def test_old_versions_are_named_before_anything_they_lack(facts: dict[str, Any]) -> None:
    assert facts["refused"].startswith(
        "lq_lightning needs lightning >= 2.6.4, found 2.5.5 and triton >= 3.6, found none: "
        "pip install -U lightning triton"
    )


def test_minimum_versions_are_those_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    listed = project.partition("\ndependencies = [\n")[2].partition("\n]\n")[0]
    assert dict(re.findall(r'"(\w+)>=([\d.]+)', listed)) == MINIMUM_VERSIONS
    assert len(listed.splitlines()) == len(MINIMUM_VERSIONS)


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        *(("2.11.0", True), ("2.13.0+cpu", True), ("2.12.0a0+git1f", True), ("3.0", True)),
        *(("2.9.1", False), ("2.10.0+cu130", False), ("1.13", False), ("unknown", True)),
    ],
)
def test_numbers_of_releases_are_compared(
    found: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", found)
    said = f"lq_lightning needs torch >= 2.11, found {found}: pip install -U torch"
    assert unmet_requirements() == (None if fits else said)


def test_other_platforms_are_told_that_triton_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert "released for Linux only, and this is Darwin" in str(unmet_requirements())


def test_public_names_exist_and_are_sorted() -> None:
    names = lq_lightning.__all__
    assert names == sorted(set(names))
    assert all(hasattr(lq_lightning, name) for name in names)
