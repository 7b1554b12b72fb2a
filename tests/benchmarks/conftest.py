"""Import benchmarks, which are scripts next to each other and no package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def load_benchmark() -> Callable[[str], ModuleType]:
    """Return a function that imports a benchmark by name, without leaving its imports behind."""

    def load(name: str) -> ModuleType:
        before = dict(sys.modules)
        sys.path.insert(0, str(FOLDER))
        try:
            spec = importlib.util.spec_from_file_location(f"lq_{name}", FOLDER / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses look their module up
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(FOLDER))
            for other in FOLDER.glob("*.py"):
                sys.modules.pop(other.stem, None)
            sys.modules.update(before)
        return module

    return load
