"""Blocks on two tensor-parallel ranks compute what they do in one process with the same codes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lq_testing import run_ranks
from lq_testing.small_block import Conv1D
from lq_testing.tensor_parallel_blocks import WIDTH, GPTBlock, HuggingFaceBlock, LlamaBlock, plan
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from lq_lightning.activations import ActivationPolicy, quantize_activations
from lq_lightning.activations import parallel as shards
from lq_lightning.activations.calibrate import FULL_PRECISION, calibrate_activations
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
        self.x[0, 0, 3] = 50.0  # the largest value behind norms lies on one rank
        self.tokens = way != "whole"

    def alone(self, recipe: Recipe) -> Any:
        block = copy.deepcopy(self.block)
        if recipe is not None:
            quantize_activations(block, recipe)
        return _part(_gradients(block, self.x.clone().requires_grad_()), self.rank, self.tokens)

    def parallel(self, recipe: Recipe) -> nn.Module:
        block = copy.deepcopy(self.block)
        parallelize_module(block, self.mesh, plan(block, self.way))
        if recipe is not None:
            handle = quantize_activations(block, recipe)
            assert not handle.native_shards()
        return block

    def input(self) -> Tensor:
        return _own(self.x, self.rank, self.tokens)


def _count_gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    gather = shards.gather_tensors

    def counted(tensors: list[Tensor], group: str, size: int) -> list[Tensor]:
        sizes.append(sum(t.nbytes for t in tensors))
        return gather(tensors, group, size)

    monkeypatch.setattr(shards, "gather_tensors", counted)
    return sizes


# Pairs of what matters: (block, way of its plan, recipe).
_CASES: tuple[tuple[type[nn.Module], str, Recipe], ...] = (
    (LlamaBlock, "whole", "agoq"),
    (LlamaBlock, "tokens", "agoq"),
    (LlamaBlock, "tokens", "coat"),
    (LlamaBlock, "local", INT8),
    (LlamaBlock, "each", "agoq"),
    (LlamaBlock, "tokens", FULL_PRECISION),
    (GPTBlock, "whole", INT8),
    (GPTBlock, "tokens", INT8),
    (GPTBlock, "local", "fp8-4bit"),
    (GPTBlock, "each", "agoq"),
    (GPTBlock, "whole", FULL_PRECISION),
    (HuggingFaceBlock, "tokens", "agoq"),
)


def _blocks(rank: int, mesh: DeviceMesh, gathers: list[int]) -> None:
    for kind, way, recipe in _CASES:
        case, where = _Case(rank, mesh, kind, way), (kind.__name__, way, recipe)
        gathers.clear()
        found = _gradients(case.parallel(recipe), case.input())
        # codes of tokens are the same wherever they lie, scales of FP8 weights are not
        bound = 0.15 if recipe in ("coat", "fp8-4bit") else 1e-5
        assert _distance(found, case.alone(recipe)) < bound, where
        off = recipe is FULL_PRECISION
        if off:
            assert _distance(found, _gradients(case.parallel(None), case.input())) < 1e-6, where
        assert len(gathers) == (2 if case.tokens and not off else 0), where  # of q, k, v; gate, up
        _check_same([g for n, g in found.items() if n not in ("x", "y")], where)


def _check_same(values: Iterable[Tensor], where: Any) -> None:
    """Ranks have the same bits."""
    for value in values:
        every = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(every, value.detach().contiguous())
        assert every[0].equal(every[1]), where


def _saved(model: nn.Module, x: Tensor) -> dict[str, int]:
    with SavedTensors(model) as saved:
        output = model(x)
    names = dict.fromkeys(each.module or "" for each in saved.storages)
    del output
    return {n: sum(s.nbytes for s in saved.storages if s.module == n) for n in names}


def _bytes(rank: int, mesh: DeviceMesh) -> None:
    """A block of 2 x 8 tokens in fp32: norms and MLP in 5 bits, attention as torch keeps it.

    ========= ===== =================== ==========================
    module    alone tokens on all ranks tokens and parts of layers
    ========= ===== =================== ==========================
    norm        768                 768                        384
    attention 16640                8320                       8320
    MLP        2816                1408                       1408
    ========= ===== =================== ==========================
    """
    table = {}
    for way in ("alone", "whole", "tokens"):
        case = _Case(rank, mesh, LlamaBlock, way)
        if way == "alone":
            case.tokens, model = False, copy.deepcopy(case.block)
            quantize_activations(model, "agoq")
        else:
            model = case.parallel("agoq")
        table[way] = _saved(model, case.input())
    expected = {
        "alone": {"norm1": 768, "attention": 16640, "norm2": 768, "mlp": 2816},
        "whole": {"norm1": 768, "attention": 8320, "norm2": 768, "mlp": 1408},
        "tokens": {"norm1": 384, "attention": 8320, "norm2": 384, "mlp": 1408},
    }
    assert table == expected
    assert 2 * sum(table["tokens"].values()) == sum(table["alone"].values())


def _graphs(rank: int, mesh: DeviceMesh, gathers: list[int]) -> None:
    case = _Case(rank, mesh, LlamaBlock, "tokens")
    expected = case.alone("agoq")
    model, x = case.parallel("agoq"), case.input()
    found = _gradients(model, x, lambda x: checkpoint(model, x, use_reentrant=False))
    assert _distance(found, expected) < 1e-5
    leaves = list(model.parameters())
    loss = model(x).square().sum()
    gathers.clear()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert len(gathers) == 4
    for one, other in zip(first, second, strict=True):
        assert _whole(one).equal(_whole(other))
    with pytest.raises(RuntimeError, match="no derivative"):
        torch.autograd.grad(loss, leaves, create_graph=True)
    with torch.no_grad():
        assert model(x).equal(case.parallel(None)(x))


def _changes(rank: int, mesh: DeviceMesh) -> None:
    """A source does not outlive a change; hooks are put back."""
    case, found = _Case(rank, mesh, LlamaBlock, "tokens"), []
    for recipe in (None, "agoq"):
        model = case.parallel(recipe)
        attention: Any = model.attention
        attention.register_forward_pre_hook(lambda _, args: (args[0].mul_(2),), prepend=True)
        found.append(_gradients(model, case.input()))
    assert 0.0 < _distance(*found) < 0.1
    model = case.parallel(None)
    before = [dict(m._forward_pre_hooks) for m in model.modules()]
    handle = quantize_activations(model)
    assert before != [dict(m._forward_pre_hooks) for m in model.modules()]
    handle.remove()
    assert before == [dict(m._forward_pre_hooks) for m in model.modules()]


def _sharded(rank: int, mesh: DeviceMesh) -> None:
    """FSDP2 frees the local tensors of DTensors, and reduces their gradients."""
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor_parallel"))
    for kind, recipe in ((LlamaBlock, "agoq"), (GPTBlock, INT8)):
        case = _Case(rank, mesh["tensor_parallel"], kind, "tokens")
        model = case.parallel(recipe)
        for module in (model.norm1, model.norm2, model):
            fully_shard(module, mesh=mesh["data"], reshard_after_forward=True)
        assert _distance(_gradients(model, case.input()), case.alone(recipe)) < 1e-5


def _compiled(rank: int, mesh: DeviceMesh) -> None:
    """One graph for any number of tokens."""
    case = _Case(rank, mesh, LlamaBlock, "tokens")
    model, x = case.parallel("agoq"), case.input()
    torch._dynamo.mark_dynamic(x, 1)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    with SavedTensors(model) as saved:
        output = call(x)
    del output
    assert saved.nbytes <= 11000  # eager: 10496
    for shape in ((2, 8), (2, 16)):
        case = _Case(rank, mesh, LlamaBlock, "tokens", shape)
        expected = case.alone("agoq")
        model.zero_grad()
        with torch.compiler.set_stance("fail_on_recompile"):
            found = _gradients(model, case.input(), call)
        assert _distance(found, expected) < 1e-5


def _uneven(rank: int, mesh: DeviceMesh, gathers: list[int]) -> None:
    """Ranks keep parts of 15 tokens that all of them have."""
    policy = ActivationPolicy(norm=None, activation=_GROUPS, linear=_GROUPS)
    for recipe, bound in ((policy, 1e-5), (replace(FULL_PRECISION, matmul="float8"), 0.15)):
        case = _Case(rank, mesh, LlamaBlock, "whole", (3, 5))
        gathers.clear()
        found = _gradients(case.parallel(recipe), case.input())
        assert _distance(found, case.alone(recipe)) < bound
        assert len(gathers) == 2
        assert max(gathers) < 15 * WIDTH * 4


_PLACEMENTS = (  # input, weight, bias
    (Replicate(), Shard(0), Shard(0)),
    (Shard(2), Shard(1), Replicate()),
    (Shard(1), Replicate(), Replicate()),
    (Replicate(), Replicate(), Replicate()),
)


def _layouts(rank: int, mesh: DeviceMesh) -> None:
    """Gradients of each placement that is known; others are left to torch."""
    torch.manual_seed(0)
    x, linear = torch.randn(2, 8, WIDTH), nn.Linear(WIDTH, 48)
    for turned in (False, True):
        for placed, *own in _PLACEMENTS:
            results = []
            for recipe in (None, ActivationPolicy(linear="int8")):
                layer = Conv1D(WIDTH, 48) if turned else nn.Linear(WIDTH, 48)
                values = (linear.weight.t() if turned else linear.weight, linear.bias)
                for name, value, where in zip(("weight", "bias"), values, own, strict=True):
                    if turned and name == "weight" and where.is_shard():
                        where = Shard(1 - where.dim)
                    value = distribute_tensor(value.detach().contiguous(), mesh, [where])
                    layer.register_parameter(name, nn.Parameter(value))
                if recipe is not None:
                    assert not quantize_activations(layer, recipe).native_shards()
                given = distribute_tensor(x, mesh, [placed]).requires_grad_()
                y = (
                    F.linear(given, layer.weight.t(), layer.bias)
                    if turned and recipe is None
                    else layer(given)
                )
                dy = distribute_tensor(x[..., :48].contiguous(), mesh, [Replicate()])
                y.backward(dy)
                made = {"x": given.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
                results.append({"y": y.full_tensor()} | {n: _whole(g) for n, g in made.items()})
            error = _distance(results[1], results[0])
            assert 1e-6 < error < 0.02, (turned, placed)


def _measured(rank: int, mesh: DeviceMesh) -> None:
    """Errors and bytes are those of one process, or of one of two shards."""
    found = []
    for way in ("alone", "whole", "tokens"):
        case = _Case(rank, mesh, LlamaBlock, way, (2, 32))
        case.x[0, 0, 3] = 0.0  # tokens of one kind: ranks measure on samples
        model = copy.deepcopy(case.block)
        case.tokens = way == "tokens"
        if way != "alone":
            model = case.parallel(None)
        handle = quantize_activations(model, "auto")
        with handle.adapt(0.01) as adaptation:
            model(case.input()).square().sum().backward()
        calibration = calibrate_activations(
            model, lambda m=model, c=case: m(c.input()).square().sum(), ("int4",)
        )
        found.append((adaptation, calibration))
    (alone, costs), *others = found
    for adaptation, calibration in others:
        pairs: Any = zip(adaptation.sites, alone.sites, strict=True)
        for site, expected in pairs:
            assert site.name == expected.name
            assert site.weights == pytest.approx(expected.weights, rel=0.02), site.name
            assert site.branch == pytest.approx(expected.branch, rel=0.05), site.name
        _check_same([torch.tensor(list(adaptation.bits.values()))], "bits")
        assert adaptation.expected == pytest.approx(alone.expected, rel=0.15)
        pairs = zip(calibration.sites, costs.sites, strict=True)
        for site, expected in pairs:
            assert site.name == expected.name
            for codec, whole in zip(site.codecs, expected.codecs, strict=True):
                for name, error in whole.errors.items():  # that of a norm's weight is of fewer rows
                    known = pytest.approx(error, rel=0.7 if name == "weight" else 0.2)
                    assert codec.errors[name] == known, (site.name, name)
    kept = [
        {s.name: (s.rows, s.kept_nbytes, *(c.nbytes for c in s.codecs)) for s in each.sites}
        for each in (costs, others[1][1])
    ]
    norm, half = (64, 49408, 2560), (32, 32896, 1280)  # the gathered output is freed whole
    attention = {"attention.o_proj": (64, 0)}
    assert kept[0] == {"norm1": norm, **attention, "norm2": norm, "mlp": (64, 131072, 8704)}
    assert kept[1] == {"norm1": half, **attention, "norm2": half, "mlp": (64, 65536, 4608)}


def _freed(rank: int, mesh: DeviceMesh) -> None:
    """No tensor waits for the garbage collector, which on a GPU may come gigabytes later."""
    block = _Case(rank, mesh, LlamaBlock, "tokens").parallel("agoq")
    states = distribute_tensor(torch.randn(2, 8, WIDTH, requires_grad=True), mesh, [Shard(1)])
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    block.norm1(states * 2).sum().backward()  # a DTensor that was none before, as between layers
    gc.collect()
    gc.set_debug(0)
    waited = [tuple(x.shape) for x in gc.garbage if isinstance(x, Tensor)]
    gc.garbage.clear()
    assert not waited


def _ranks(rank: int, world: int) -> None:
    mesh = dist.init_device_mesh("cpu", (world,), mesh_dim_names=("tensor_parallel",))
    with pytest.MonkeyPatch.context() as monkeypatch:
        gathers = _count_gathers(monkeypatch)
        for check in (_blocks, _graphs, _uneven):
            check(rank, mesh, gathers)
    for part in (_bytes, _changes, _sharded, _compiled, _layouts, _measured, _freed):
        part(rank, mesh)


def test_two_ranks() -> None:
    run_ranks(_ranks, 2, timeout=240)
