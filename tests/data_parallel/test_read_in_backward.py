"""Whether torch reads a reduced gradient before backward ends, against what `_compat` says.

A reduction may go on beside backward only if nothing reads its result there. `_compat.fsdp2` has to
mirror private code of FSDP2 to know. Here a reduce-scatter writes its result when backward is over:
where that gives a wrong gradient, something has read it before. If a version of torch reads in one
more place, these tests fail first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing.fsdp2 import pretend_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from lq_lightning._compat.fsdp2 import (
    PackedGradients,
    ReduceScatter,
    announce_packed_gradients,
    fsdp_units,
)
from lq_lightning._compat.torch import after_backward

LATE = 3.0


class LateReduceScatter(ReduceScatter):
    """Writes the result, and what it was called with, after backward."""

    def __init__(self) -> None:
        self.ops: list[Any] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.ops.append(op)
        after_backward(lambda: output_tensor.fill_(LATE))


class Quiet:
    """A hook that says that it does not read."""

    def __call__(self, parameter: nn.Parameter) -> None:
        pass

    def reads_gradient(self, parameter: nn.Parameter) -> bool:
        return False


@pytest.fixture
def mesh() -> Any:
    """Of two ranks, of which only this one exists."""
    pretend_ranks(2)
    return init_device_mesh("cpu", (2,))


class Run:
    """One backward of a sharded layer with the late reduce-scatter."""

    def __init__(self, mesh: Any, prepare: Callable[[nn.Linear], object], **options: Any) -> None:
        self.model: Any = nn.Linear(4, 4, bias=False)
        fully_shard(self.model, mesh=mesh, **options)
        self.comm = LateReduceScatter()
        self.model.set_custom_reduce_scatter(self.comm)
        self.announced: list[PackedGradients] = []
        ((_, _, group),) = fsdp_units(self.model)
        announce_packed_gradients(group, self.announced.append)
        prepare(self.model)
        self.model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        grad: Any = self.model.weight.grad
        self.grad: Tensor | None = None if grad is None else grad.to_local()

    @property
    def said_to_be_read(self) -> bool:
        (packed,) = self.announced
        assert packed.indices == (0,)
        return packed.read_in_backward


def _nothing(model: nn.Linear) -> None:
    pass


def _accumulate(model: Any) -> None:
    model.weight.grad = torch.ones_like(model.weight)


MIXED = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
CAST = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}


@pytest.mark.parametrize(
    ("prepare", "options", "expected", "is_read"),
    [
        (_nothing, {}, LATE, False),
        (_nothing, MIXED, LATE, False),
        (lambda model: model.weight.register_post_accumulate_grad_hook(Quiet()), {}, LATE, False),
        (_nothing, CAST, LATE, True),
        (_accumulate, {}, LATE + 1, True),
    ],
)
def test_the_gradient_is_right_unless_it_is_said_to_be_read(
    mesh: Any, prepare: Callable[[nn.Linear], object], options: Any, expected: float, is_read: bool
) -> None:
    run = Run(mesh, prepare, **options)
    assert run.comm.ops == [dist.ReduceOp.AVG]
    assert run.said_to_be_read == is_read
    assert bool((run.grad == expected).all()) != is_read


@pytest.mark.parametrize("kind", ["parameter", "all-reduce"])
def test_hooks_read(mesh: Any, kind: str) -> None:
    seen: list[float] = []

    def prepare(model: Any) -> None:
        if kind == "parameter":
            weight = model.weight
            weight.register_post_accumulate_grad_hook(
                lambda p: seen.append(p.grad.to_local().max().item())
            )
        else:
            model.set_all_reduce_hook(lambda output: seen.append(output.max().item()))

    run = Run(mesh, prepare)
    assert seen == [0.0], "the hook ran after the late write, so it need not count as a reader"
    assert run.said_to_be_read


def test_offloading_reads(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[tuple[Any, ...]] = []
    to = Tensor.to
    monkeypatch.setattr(
        Tensor, "to", lambda self, *a, **k: (copies.append(a), to(self, *a, **k))[1]
    )
    cpu = (torch.device("cpu"),)  # of the gradient: on a GPU this is a copy
    assert not Run(mesh, _nothing).said_to_be_read
    assert cpu not in copies
    assert Run(mesh, _nothing, offload_policy=CPUOffloadPolicy(pin_memory=False)).said_to_be_read
    assert cpu in copies


def test_sums_are_divided_by_torch(mesh: Any) -> None:
    """Which is why only averages are deferred."""
    run = Run(mesh, lambda model: model.set_force_sum_reduction_for_comms(True))  # type: ignore[attr-defined]
    assert run.comm.ops == [dist.ReduceOp.SUM]
    assert not run.said_to_be_read
    assert (run.grad == LATE).all(), "the late write is not divided by the number of ranks"


@pytest.mark.parametrize(
    "prepare",
    [
        lambda model: model.set_requires_gradient_sync(False),
        lambda model: model.requires_grad_(False),
    ],
)
def test_nothing_is_announced_where_nothing_is_reduced(mesh: Any, prepare: Any) -> None:
    run = Run(mesh, prepare)
    assert run.announced == run.comm.ops == []
