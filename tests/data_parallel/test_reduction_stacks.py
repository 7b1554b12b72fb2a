"""Small units of one shape that are reduced together: as if each were alone, and in fewer calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing import run_ranks
from lq_testing.cases import on_gpus, rank_tests
from lq_testing.devices import device
from lq_testing.fsdp2 import build, tokens
from lq_testing.models import OptionalBlock, TinyLM
from lq_testing.streams import Recorder, on_own_stream, recorded_streams, replaced
from torch import Tensor

from lq_lightning._compat.modules import reset_iteration
from lq_lightning.codecs import CodecSpec
from lq_lightning.data_parallel import GradientQuantization, Traffic, install
from lq_lightning.data_parallel.reduce_scatter import (
    GradientBucket,
    LevelLayouts,
    TwoLevelReduceScatter,
)
from lq_lightning.data_parallel.unit import MessageLayout, Run

BLOCKS = 4


def _gradients(model: TinyLM) -> list[Tensor]:
    found: list[Any] = [p.grad for p in model.parameters()]
    return [torch.empty(0) if g is None else g.to_local().clone() for g in found]


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise MemoryError


def _fail(model: TinyLM, go_on: Callable[[], None]) -> None:
    """A backward that ends in the middle of a stack, after which a user goes on."""
    with replaced(model.blocks[1], "forward", _Failing.apply), pytest.raises(MemoryError):
        model(tokens(0)).backward()
    go_on()
    reset_iteration(model)
    for parameter in model.parameters():
        parameter.grad = None


def _steps(model: TinyLM, communication: Any, calls: list[int]) -> tuple[dict[str, Any], Traffic]:
    """Gradients of several backward passes, how many exchanges each took, and what they sent."""
    found: dict[str, Any] = {}

    def backward(name: str, keep: bool = False) -> None:
        calls.clear()
        model(tokens(len(found))).backward()
        found[name] = (len(calls), _gradients(model))
        if not keep:
            for parameter in model.parameters():
                parameter.grad = None

    backward("all")
    backward("first of two", keep=True)
    backward("added to earlier ones")
    model.blocks[2].use_extra = False
    backward("a unit with fewer gradients")
    model.blocks[2].use_extra = True
    blocks, model.blocks = model.blocks, torch.nn.ModuleList([*model.blocks[:2], *model.blocks[3:]])
    backward("without a unit")
    ends = [p for name, p in model.named_parameters() if not name.startswith("blocks.")]
    for parameter in ends:
        parameter.requires_grad_(False)
    backward("without anything after a part of a stack")
    for parameter in ends:
        parameter.requires_grad_(True)
    model.blocks = blocks
    communication.measure_errors = True
    backward("measured")
    communication.measure_errors = False
    sent = communication.traffic()
    _fail(model, communication.join)  # which reduces what waits, outside of any backward

    def recover() -> None:
        calls.clear()
        communication.recover()
        assert not calls, "what waited is not reduced"

    _fail(model, recover)
    backward("after a failure")
    return found, sent


def _trained(
    rank: int, world: int, node_size: int, most: int
) -> tuple[dict[str, Any], list[Any], Traffic]:
    calls: list[int] = []
    exchange = dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return exchange(*args, **kwargs)

    races: list[Any] = []
    with contextlib.ExitStack() as stack:
        if device().type == "cpu" and most:  # GPUs have streams of their own
            recorder: Recorder = stack.enter_context(recorded_streams())
            own = on_own_stream(recorder, TwoLevelReduceScatter.__call__)
            stack.enter_context(replaced(TwoLevelReduceScatter, "__call__", own))
            races = recorder.races
        stack.enter_context(replaced(install, "MAX_BUCKET_NUMEL", most))
        stack.enter_context(replaced(dist, "all_to_all_single", counted))
        config = GradientQuantization(group_size=32)
        model, _, communication = build(
            gradients=config, node_size=node_size, block=OptionalBlock, layers=BLOCKS
        )
        found, sent = _steps(model, communication, calls)
        return found, races, sent


def _compare(rank: int, world: int, node_size: int, *sizes: int) -> dict[str, list[int]]:
    """Compare stacks with units alone; return the numbers of exchanges of both."""
    alone, _, sent_alone = _trained(rank, world, node_size, 0)
    for most in sizes:
        stacked, races, sent = _trained(rank, world, node_size, most)
        assert not races, races[:3]
        assert sent == sent_alone
        for name, (_, gradients) in alone.items():
            assert all(map(torch.equal, gradients, stacked[name][1])), (name, node_size)
    return {name: [alone[name][0], stacked[name][0]] for name in alone}


def _compare_nodes(rank: int, world: int, *node_sizes: int) -> list[dict[str, list[int]]]:
    two = 2 * sum(p.numel() for p in OptionalBlock().parameters())  # stacks of two units, too
    most = install.MAX_BUCKET_NUMEL
    return [_compare(rank, world, n, *((two, most) if n == 1 else (most,))) for n in node_sizes]


@pytest.mark.parametrize(("world", "node_sizes"), [(2, (1, 2)), (4, (2,))])
def test_gradients_are_those_of_units_that_are_alone(
    world: int, node_sizes: tuple[int, ...]
) -> None:
    levels = world // 2
    every, one_by_one = levels * 2, levels * (BLOCKS + 1)
    expected = {
        "all": [one_by_one, every],
        "first of two": [one_by_one, every],
        "added to earlier ones": [one_by_one, one_by_one],
        # which is alone, between others that are stacked
        "a unit with fewer gradients": [one_by_one, every + 2 * levels],
        "without a unit": [one_by_one - levels, every],
        "without anything after a part of a stack": [levels * (BLOCKS - 1), levels],
        "measured": [one_by_one, one_by_one],
        "after a failure": [one_by_one, every],
    }
    for found in run_ranks(_compare_nodes, world, *node_sizes):
        assert all(calls == expected for calls in found), found


def _on_gpus(rank: int, world: int, node_size: int) -> None:
    torch.use_deterministic_algorithms(True)  # else gradients of embeddings differ between runs
    for _ in range(3):
        alone, stacked = _compare(rank, world, node_size, install.MAX_BUCKET_NUMEL)["all"]
        assert stacked < alone


DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def test_a_stack_takes_what_is_packed_alike() -> None:
    stack, layouts, others = GradientBucket(3), _layouts(16), _layouts(32)
    cpu = torch.device("cpu")
    first = stack.row(layouts, 64, torch.float32, cpu)
    assert first is not None
    assert stack.row(others, 64, torch.float32, cpu) is not None, "it is still empty"
    first = stack.row(layouts, 64, torch.float32, cpu)
    assert first is not None
    first.fill_(1)
    output = torch.zeros(32)
    assert not stack.add(output)
    assert stack.row(others, 64, torch.float32, cpu) is None
    assert stack.row(layouts, 32, torch.float32, cpu) is None
    assert stack.row(layouts, 64, torch.bfloat16, cpu) is None
    taken = stack.take()
    assert taken[0].tolist() == [[1.0] * 64]
    assert taken[1] == [output]


def _layouts(group_size: int) -> LevelLayouts:
    spec = CodecSpec(code="int8", group_size=group_size)
    layout = MessageLayout([Run(0, 32, True)], [spec], torch.float32)
    return LevelLayouts(layout, layout)


test_on_ranks = rank_tests(
    on_gpus(_on_gpus, 2, 1, env=DETERMINISTIC), on_gpus(_on_gpus, 4, 2, env=DETERMINISTIC)
)
