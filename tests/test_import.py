"""What `import lq_lightning` costs and does."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_IMPORT_S = 0.3
REPEATS = 3


def _python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_fast_on_top_of_lightning() -> None:
    code = (
        "import time, lightning.pytorch\n"
        "start = time.perf_counter()\n"
        "import lq_lightning\n"
        "print(time.perf_counter() - start)"
    )
    times = [float(_python(code)) for _ in range(REPEATS)]
    assert statistics.median(times) <= MAX_IMPORT_S, times


def test_import_leaves_cuda_and_process_groups_alone() -> None:
    code = (
        "import os, torch, lq_lightning\n"
        "import torch.distributed as dist\n"
        "print(torch.cuda.is_initialized(), dist.is_initialized())"
    )
    assert _python(code) == "False False"


def test_import_needs_no_optional_dependency() -> None:
    optional = "litdata transformers peft tokenizers jsonargparse matplotlib tensorboard rich"
    code = (
        "import sys\n"
        f"before = {optional.split()!r}\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in before:\n"
        "            raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import lq_lightning; print('ok')"
    )
    assert _python(code) == "ok"


def test_strategy_is_registered_once_for_lightning_pytorch() -> None:
    code = (
        "import importlib, sys, lq_lightning\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "first = StrategyRegistry.get('quantized_fsdp')\n"
        "for name in [m for m in sys.modules if m.split('.')[0] == 'lq_lightning']:\n"
        "    if 'kernels' not in name:\n"
        "        del sys.modules[name]\n"
        "import lq_lightning.strategies\n"
        "importlib.reload(lq_lightning)\n"
        "print(type(first).__name__, 'quantized_fsdp' in StrategyRegistry)"
    )
    assert _python(code) == "QuantizedFSDPStrategy True"


def test_public_names_exist_and_are_sorted() -> None:
    lq_lightning = pytest.importorskip("lq_lightning")
    names = lq_lightning.__all__
    assert all(hasattr(lq_lightning, name) for name in names)
    assert len(set(names)) == len(names)
