"""Kernel tests run the Triton code: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Where the Triton kernels of a test run; the reference always runs on the CPU."""
    from triton import knobs

    if torch.cuda.is_available():
        return torch.device("cuda")
    if not knobs.runtime.interpret:
        pytest.fail("without a GPU these tests need TRITON_INTERPRET=1 before triton is imported")
    return torch.device("cpu")
