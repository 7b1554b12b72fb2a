"""Facts that a trace of ``torch.compile`` has of a tensor. Slow to import: only done in traces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._dynamo.comptime import comptime

_versions: list[int] = []


def _record_version(context: Any) -> None:
    _versions.append(context.get_local("tensor").as_fake()._version)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _recorded_version() -> int:
    return _versions.pop()


def traced_version(tensor: Tensor) -> int:
    """Count the changes in place of a tensor of the graph that is being traced; a constant.

    ``tensor._version`` would be a number that is only known when the graph runs.
    """
    comptime(_record_version)  # finds `tensor` by its name
    version: int = _recorded_version()
    return version
