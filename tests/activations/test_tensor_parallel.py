"""Blocks on two tensor-parallel ranks compute what they do in one process with the same codes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing import run_ranks
from lq_testing.tensor_parallel_blocks import WIDTH, GPTBlock, LlamaBlock, plan
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from lq_lightning.activations import ActivationPolicy, quantize_activations
from lq_lightning.activations import parallel as shards
from lq_lightning.activations.calibrate import FULL_PRECISION
from lq_lightning.activations.measure import SavedTensors
from lq_lightning.activations.policy import CODECS

_GROUPS = replace(CODECS["int8"], group_size=32)  # that end where the shards of a row do
INT8 = ActivationPolicy(norm="int8", activation=_GROUPS, linear=_GROUPS)
Recipe = str | ActivationPolicy | None


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _own(x: Tensor, rank: int, tokens: bool) -> Tensor:
    return (x.chunk(2, 1)[rank] if tokens else x).detach().clone().requires_grad_()


def _gradients(model: nn.Module, x: Tensor, call: Callable[..., Tensor] | None = None) -> Any:
    """Output, gradient of the input, and whole gradients of the parameters by name."""
    y = (model if call is None else call)(x)
    y.square().sum().backward()
    made = {n: _whole(p.grad) for n, p in model.named_parameters()}  # type: ignore[arg-type]
    # of a key's bias there is none, but for rounding
    return {"y": y, "x": x.grad, **{n: g for n, g in made.items() if "k_proj.bias" not in n}}


def _distance(found: Any, expected: Any) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[n].detach() - e).norm() / e.norm()) for n, e in expected.items())


def _part(found: Any, rank: int, tokens: bool) -> Any:
    return {n: _own(g, rank, tokens and n in ("x", "y")) for n, g in found.items()}


class _Case:
    """A block, quantized or not, on two ranks and in one process."""

    def __init__(
        self, rank: int, mesh: DeviceMesh, kind: type[nn.Module], way: str, shape: Any = (2, 8)
    ) -> None:
        torch.manual_seed(0)
        self.rank, self.mesh, self.block, self.way = rank, mesh, kind(), way
        for name, p in self.block.named_parameters():
            if "norm" in name or "bias" in name:
                p.data += 0.5 * torch.randn_like(p)
        self.x = torch.randn(*shape, WIDTH)
        self.tokens = way not in ("whole", "odd")

    def alone(self, recipe: Recipe) -> Any:
        block = copy.deepcopy(self.block)
        if recipe is not None:
            quantize_activations(block, recipe)
        return _part(_gradients(block, self.x.clone().requires_grad_()), self.rank, self.tokens)

    def parallel(self, recipe: Recipe, styles: dict[str, ParallelStyle] | None = None) -> nn.Module:
        block = copy.deepcopy(self.block)
        parallelize_module(block, self.mesh, styles or plan(block, self.way))
        if recipe is not None:
            handle = quantize_activations(block, recipe)
            assert not handle.native_shards()
        return block

    def input(self) -> Tensor:
        return _own(self.x, self.rank, self.tokens)


def _count_gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    gather = shards.gather_bytes

    def counted(x: Tensor, group: str, size: int) -> Tensor:
        sizes.append(x.numel())
        return gather(x, group, size)

    monkeypatch.setattr(shards, "gather_bytes", counted)
    return sizes


def _all_blocks(rank: int, mesh: DeviceMesh, gathers: list[int]) -> None:
    ways = ("whole", "tokens", "local", "each")
    for kind, way in itertools.product((LlamaBlock, GPTBlock), ways):
        case, where = _Case(rank, mesh, kind, way), f"{kind.__name__} {way}"
        native = _gradients(case.parallel(None), case.input())
        assert _distance(native, case.alone(None)) < 1e-5, where
        for recipe in ("agoq", "coat", "fp8-4bit", INT8, FULL_PRECISION):
            gathers.clear()
            found = _gradients(case.parallel(recipe), case.input())
            # codes of tokens are the same wherever they lie, scales of FP8 weights are not
            bound = 0.15 if recipe in ("coat", "fp8-4bit") else 1e-5
            assert _distance(found, case.alone(recipe)) < bound, (where, recipe)
            if recipe == FULL_PRECISION:
                assert _distance(found, native) < 1e-6, where
            assert len(gathers) == (0 if way == "whole" or recipe == FULL_PRECISION else 2)
            for name, gradient in found.items():
                if name not in ("x", "y") or not case.tokens:
                    every = [torch.empty_like(gradient) for _ in range(2)]
                    dist.all_gather(every, gradient.detach().contiguous())
                    assert every[0].equal(every[1]), (where, recipe, name)


def _ranks(rank: int, world: int) -> None:
    mesh = dist.init_device_mesh("cpu", (world,), mesh_dim_names=("tensor_parallel",))
    with pytest.MonkeyPatch.context() as monkeypatch:
        gathers = _count_gathers(monkeypatch)
        _all_blocks(rank, mesh, gathers)


def test_two_ranks() -> None:
    run_ranks(_ranks, 2, timeout=240)
