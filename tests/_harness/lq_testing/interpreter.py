"""When kernels can run in Triton's interpreter."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch
from packaging.version import Version

__all__ = ["skip_old_interpreter"]

# Of Triton 3.6 and 3.7 only the interpreter is at fault: what they compile for an H200 is right.
_OLD = Version(metadata.version("triton")) < Version("3.9")
skip_old_interpreter = pytest.mark.skipif(
    _OLD and not torch.cuda.is_available(),
    reason="the interpreter of Triton < 3.9 fails or computes other bits; run on a GPU",
)
