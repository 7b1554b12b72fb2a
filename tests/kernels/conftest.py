"""Kernel tests run the Triton code: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from lq_testing.interpreter import quick_interpreter


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> Iterator[None]:
    from triton import knobs

    with pytest.MonkeyPatch.context() as context:
        if knobs.runtime.interpret:
            quick_interpreter(context)
        yield


@pytest.fixture
def device() -> torch.device:
    """Where the Triton kernels of a test run; the reference always runs on the CPU."""
    from triton import knobs

    if torch.cuda.is_available():
        return torch.device("cuda")
    if not knobs.runtime.interpret:
        pytest.fail("without a GPU these tests need TRITON_INTERPRET=1 before triton is imported")
    return torch.device("cpu")
