"""What stages do with the hidden state that they receive."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lq_lightning.activations import ActivationPolicy, quantize_activations
from lq_lightning.pipeline.execution import Stage

WIDTH = 64


class Boundary:
    shape = (32, WIDTH)
    dtype = torch.float32


def _hidden() -> Tensor:
    return torch.randn(Boundary.shape, generator=torch.Generator().manual_seed(0))


class Changes(nn.Module):
    """Changes its input in place, then uses it; ``how`` says how."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.how = nn.Linear(WIDTH, WIDTH), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "add":
            x += 1
        elif self.how == "weight":
            x.mul_(self.linear.bias)
        elif self.how == "view":
            x.view(-1)[:5] = 0
        elif self.how == "relu":
            x = nn.functional.relu(x, inplace=True)
        return self.linear(x)


@pytest.mark.parametrize("how", ["add", "weight", "view", "relu", "not"])
@pytest.mark.parametrize("split", [False, True])
def test_layers_may_change_it_in_place(how: str, split: bool) -> None:
    whole, x = Changes(how), _hidden().requires_grad_()
    out = whole(x * 1)
    seed = out.detach().cos()
    out.backward(seed)
    stage = Stage(Changes(how), 1, 3)
    hidden = _hidden()
    for _ in range(2):  # each micro-batch has a graph of its own
        stage.module.zero_grad()
        hidden.copy_(_hidden())
        result = stage.forward(0, hidden, Boundary, split)
        torch.testing.assert_close(result, out)
        assert not result.requires_grad
        if split:
            gradient = stage.backward_input(0, seed)
            stage.backward_weight(0)
        else:
            gradient = stage.backward(0, seed)
        torch.testing.assert_close(gradient, x.grad)
        for mine, theirs in zip(stage.module.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert not hidden.requires_grad
    assert hidden.grad is None


def _codes() -> nn.Module:
    net = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    quantize_activations(net, ActivationPolicy())
    return net


class Scales(nn.Module):
    """Saves nothing of its input, and needs its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + 1


@pytest.mark.parametrize(
    ("make", "kept"),
    [(_codes, False), (Scales, False), (lambda: nn.Linear(WIDTH, WIDTH), True)],
    ids=["codes", "nothing", "values"],
)
@pytest.mark.parametrize("split", [False, True])
def test_it_is_kept_only_by_what_saves_it(
    make: Callable[[], nn.Module], kept: bool, split: bool
) -> None:
    stage = Stage(make(), 1, 3)
    hidden = _hidden()
    alive = weakref.ref(hidden.untyped_storage())
    stage.forward(0, hidden, Boundary, split)
    del hidden
    assert (alive() is not None) == kept
    seed = torch.ones(Boundary.shape)
    gradient = stage.backward_input(0, seed) if split else stage.backward(0, seed)
    assert gradient is not None
    assert gradient.shape == Boundary.shape
    if split:
        assert (alive() is not None) == kept  # for the gradient of the weight
        stage.backward_weight(0)
    assert alive() is None


class Sums(nn.Module):
    """Gives its input a gradient without strides; ``uses`` it or not."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.weight, self.uses = nn.Parameter(torch.ones(3)), uses

    def forward(self, x: Tensor) -> Tensor:
        return (x.sum() if self.uses else self.weight.square().mean()).view(1)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("uses", [False, True])
def test_its_gradient_is_contiguous_and_zero_where_it_is_not_used(uses: bool, split: bool) -> None:
    stage = Stage(Sums(uses), 1, 2)
    assert stage.forward(0, _hidden(), Boundary, split).shape == ()  # a loss of any shape
    gradient = (stage.backward_input if split else stage.backward)(0, None)
    assert gradient is not None
    assert gradient.is_contiguous()
    assert torch.equal(gradient, torch.full(Boundary.shape, float(uses)))
    if split:
        stage.backward_weight(0)
    assert uses == (stage.module.weight.grad is None)
