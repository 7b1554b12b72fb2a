"""Facts that a trace of ``torch.compile`` has of a tensor. Slow to import: only done in traces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._dynamo.comptime import comptime

from lq_lightning._compat.layouts import held_by
from lq_lightning._compat.saved_tensors import has_storage, storage_key, version_now

_versions: list[int] = []


def _record_version(context: Any) -> None:
    variable = context.get_local("tensor")
    wrapped = variable.as_fake()
    fake = held_by(wrapped)
    # what is written through `.data` has a version of its own: any use of it counts as a change
    used = [
        node.args[0].meta.get("example_value")
        for node in variable.as_proxy().node.graph.nodes
        if node.target is torch._C._autograd._get_data_attr  # type: ignore[attr-defined]
    ]
    known = [each for each in used if isinstance(each, Tensor) and has_storage(each)]
    uses = sum(storage_key(each) == storage_key(fake) for each in known)
    _versions.append(version_now(wrapped) + uses)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _recorded_version() -> int:
    return _versions.pop()


def traced_version(tensor: Tensor) -> int:
    """Count the changes in place of a tensor of the graph that is being traced, and the uses of
    ``.data`` of its storage; a constant.

    ``tensor._version`` would be a number that is only known when the graph runs.
    """
    comptime(_record_version)  # finds `tensor` by its name
    version: int = _recorded_version()
    return version
