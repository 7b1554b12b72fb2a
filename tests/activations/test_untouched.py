"""What recognition leaves as it was, and copies of modules whose activations are codes."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lq_testing import run_ranks
from lq_testing.look_alike_mlps import MLP_ROWS
from lq_testing.look_alikes import ROWS
from lq_testing.small_block import EXACT, MLP, WIDTH, Block, Quantize, assert_close, gradients
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import weight_norm

from lq_lightning.activations import ActivationPolicy, ActivationRule, quantize_activations
from lq_lightning.activations.sites import LinearSite, MLPSite, site_of


def _state(model: nn.Module) -> dict[str, Any]:
    """Everything that modules hold, lists and dictionaries with what is in them."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers"):
                value = {k: None if t is None else (id(t), t._version) for k, t in value.items()}
            elif isinstance(value, (list, dict)):
                value = copy.copy(value)
            elif isinstance(value, Tensor):  # of the weight norm that is made of hooks
                value = (id(value), value._version)
            found[f"{name}.{key}"] = value
    return found


@pytest.mark.parametrize("mode", [True, False])
def test_nothing_is_changed(mode: bool) -> None:
    """Neither modules nor random generators, though look-alikes draw, count and cache."""
    rows = {name: row for name, row in {**ROWS, **MLP_ROWS}.items() if "later" not in name}
    parts = {name.replace(".", ""): row.build() for name, row in rows.items()}
    parts["conv"] = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.ReLU())
    model = nn.ModuleDict(parts).train(mode)
    before = _state(model)
    generators = random.getstate(), torch.get_rng_state(), np.random.get_state()
    with warnings.catch_warnings(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("ignore")
        quantize_activations(model, EXACT).remove()
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled()
    assert random.getstate() == generators[0]
    assert torch.equal(torch.get_rng_state(), generators[1])
    pairs = zip(np.random.get_state(), generators[2], strict=True)
    assert all(np.array_equal(now, then) for now, then in pairs)
    after = _state(model)
    assert after.keys() == before.keys()
    changed = [
        name
        for name, value in before.items()
        if type(after[name]) is not type(value) or after[name] != value
    ]
    assert not changed


@pytest.mark.parametrize("normed", ["hook", "parametrization"])
def test_weight_norm(x: Tensor, quantize: Quantize, normed: str) -> None:
    """Its linear layers compute weights of their own, and are left as they are."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(WIDTH), MLP(), nn.Linear(WIDTH, WIDTH))
        norm = weight_norm if normed == "hook" else torch.nn.utils.parametrizations.weight_norm
        norm(model[1].up_proj)
        norm(model[2])
        return model

    exact = gradients(build(), x)
    coded = build()
    handle = quantize(coded)
    assert isinstance(site_of(coded[1]), MLPSite)  # type: ignore[index]
    assert not isinstance(site_of(coded[2]), LinearSite)  # type: ignore[index]
    assert_close(gradients(coded, x), exact, 0.02)
    handle.remove()
    torch.testing.assert_close(gradients(coded, x), exact)


def test_a_parametrization_runs_as_often_as_it_did(x: Tensor, quantize: Quantize) -> None:
    """Spectral norm iterates at each access of the weight, in training."""
    results = []
    for coded in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        model = nn.Sequential(nn.LayerNorm(WIDTH), layer)
        if coded:
            quantize(model)
        results.append([model(x) for _ in range(3)][-1])
    torch.testing.assert_close(*results)


def _shallow(module: nn.Module) -> nn.Module:
    made = copy.copy(module)
    made.__dict__["_parameters"] = dict(vars(module)["_parameters"])
    return made


def _replica(module: nn.Module) -> nn.Module:
    made = module._replicate_for_data_parallel()
    for name, value in vars(module)["_parameters"].items():
        setattr(made, name, value * 1.0)  # as `nn.DataParallel` does with copies on other devices
    return made


@pytest.mark.parametrize("duplicate", [_shallow, _replica])
@pytest.mark.parametrize("recompute", [False, True])
def test_copies_compute_with_their_own_weights(
    x: Tensor, quantize: Quantize, duplicate: Callable[[nn.Module], nn.Module], recompute: bool
) -> None:
    norm = nn.Sequential(nn.LayerNorm(WIDTH))
    rules = (ActivationRule(module="0", recompute=True),) if recompute else ()
    handle = quantize(norm, ActivationPolicy(norm="int8", linear="int8", rules=rules))
    made = duplicate(norm[0])
    with torch.no_grad():
        weight = 3 * norm[0].weight + 1  # type: ignore[operator]
    made.weight = nn.Parameter(weight) if duplicate is _shallow else weight
    bias = norm[0].bias
    torch.testing.assert_close(made(x), F.layer_norm(x, (WIDTH,), weight, bias))  # type: ignore[arg-type]
    handle.remove()
    torch.testing.assert_close(norm[0](x), F.layer_norm(x, (WIDTH,)))
    torch.testing.assert_close(made(x), F.layer_norm(x, (WIDTH,), weight, bias))  # type: ignore[arg-type]
    assert not [key for key in vars(norm[0]) if key.startswith(("_lq", "__"))]


def test_a_deep_copy_of_a_copy_keeps_codes(block: Block, x: Tensor, quantize: Quantize) -> None:
    exact = gradients(block, x)
    quantize(block)
    copied = copy.deepcopy(copy.deepcopy(block))
    assert_close(gradients(copied, x), exact)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
    assert_close(gradients(copied, x), exact)
    shallow = copy.copy(copied.norm)
    assert shallow.forward.__func__ is nn.RMSNorm.forward
    copied.mlp.register_buffer("unused", torch.zeros(1))
    assert_close(gradients(copied, x), exact)


def test_changes_are_said_once(block: Block, x: Tensor, quantize: Quantize) -> None:
    quantize(block)
    block.norm.eps = 0.5
    with pytest.warns(UserWarning, match=r"`norm` \(RMSNorm\) was changed since") as said:
        _ = [block(x) for _ in range(2)]
    assert len(said) == 1
    block.norm.eps = None  # as it was
    coded = gradients(block, x)
    block.norm.eps = 0.5
    assert not torch.equal(coded, gradients(block, x))


class Sized(nn.Module):
    """A block whose class takes arguments."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), MLP()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def _sharded(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Sized(WIDTH), Sized(WIDTH)), torch.randn(2, 16, WIDTH)
    model(x).square().sum().backward()
    exact = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    mesh = init_device_mesh("cpu", (1,))
    for part in [part for block in model for part in (block.norm, block.mlp, block)]:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    handle = quantize_activations(model, EXACT)
    assert [type(site).__name__ for site in handle.sites].count("NormSite") == 2
    assert [type(site).__name__ for site in handle.sites].count("MLPSite") == 2
    model(x).square().sum().backward()
    for parameter, expected in zip(model.parameters(), exact, strict=True):
        found = parameter.grad.full_tensor()
        assert 0 < float((found - expected).norm() / expected.norm()) < 0.02


def test_blocks_that_are_sharded_already() -> None:
    run_ranks(_sharded, 1)
