"""Fixtures that every test gets: a clean environment, no leftover process groups, loud memory."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator

import hypothesis
import pytest
import torch
import torch.distributed as dist
from lq_testing import SHARED_GPUS, poison_uninitialized_memory

# Triton decides when it is first imported whether kernels run in its interpreter. Files of folders
# below, whose `conftest.py` imports it, may be named on the command line.
if torch.cuda.device_count() == 0:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples on every run, and no limit on one example's time: machines are busy.
hypothesis.settings.register_profile("lq", deadline=None, derandomize=True, database=None)


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("lq")
    gc.disable()  # until all modules are imported
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Keep modules out of garbage collections, of which models and tests make many."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else extensions report at exit what they think has leaked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there are too few devices (asked without initialising CUDA).

    With ``LQ_SHARE_GPUS=1`` ranks share those there are, but for tests of the links between them.
    """
    available = torch.cuda.device_count()
    share = bool(os.environ.get("LQ_SHARE_GPUS")) and available > 0
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        needed = marker.args[0] if marker.args else marker.kwargs.get("count", 1)
        if available >= needed:
            continue
        if share and not item.get_closest_marker("own_gpus"):
            item.fixturenames.append("_shared_gpus")  # type: ignore[attr-defined]
        else:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, found {available}"))


@pytest.fixture
def _shared_gpus(_clean_environment: None) -> None:
    os.environ[SHARED_GPUS] = "1"


@pytest.fixture(autouse=True)
def _clean_environment() -> Iterator[None]:
    """Give each test the same seeds; undo what it did to the process."""
    environ = dict(os.environ)
    default_dtype = torch.get_default_dtype()
    random.seed(0)
    torch.manual_seed(0)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_default_dtype(default_dtype)
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environ)


@pytest.fixture(autouse=True)
def _poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make reads of uninitialised memory visible; opt out with a marker."""
    if request.node.get_closest_marker("uninitialized_memory_ok"):
        yield
        return
    with poison_uninitialized_memory():
        yield
