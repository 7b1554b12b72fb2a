"""The models whose saved activations are counted, shared with the benchmarks."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

_PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "activation_models.py"


@pytest.fixture(scope="session")
def architectures() -> Mapping[str, Any]:
    """By name; a test skips those whose package is missing."""
    spec = importlib.util.spec_from_file_location("activation_models", _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["activation_models"] = module
    spec.loader.exec_module(module)
    known: Mapping[str, Any] = module.ARCHITECTURES
    return known
