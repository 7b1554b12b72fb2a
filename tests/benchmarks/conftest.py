"""Run and import benchmarks, which are scripts next to each other and no package."""

from __future__ import annotations

import importlib
import runpy
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    """Let scripts of a folder import each other, and forget them afterwards."""
    modules, paths = dict(sys.modules), list(sys.path)
    sys.path.insert(0, str(folder))
    _forget_scripts()  # transformers may have found a folder of the same name, `kernels`
    try:
        yield
    finally:
        sys.path[:] = paths
        _forget_scripts()
        sys.modules.update(modules)


def _forget_scripts() -> None:
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


@contextmanager
def suppress_success() -> Iterator[None]:
    """Let a script end by ``sys.exit(0)``."""
    try:
        yield
    except SystemExit as end:
        if end.code:
            raise


@pytest.fixture
def load() -> Iterator[Callable[[str], ModuleType]]:
    """Import a benchmark by its name."""
    with _on_path(FOLDER):
        yield importlib.import_module


@pytest.fixture(scope="session")
def table() -> ModuleType:
    """The printer of tables, imported once for the many reports."""
    with _on_path(FOLDER):
        return importlib.import_module("table")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a benchmark as the only rank of a job, in this process; return what it printed."""

    def run(script: str, *options: str) -> str:
        path = FOLDER / script
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
        for name, value in (alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}).items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr("sys.argv", [str(path), *options])
        with _on_path(path.parent), suppress_success():
            runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run
