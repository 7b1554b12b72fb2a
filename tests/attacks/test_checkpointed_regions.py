"""Attacks on the codes of what checkpointed regions keep: regions whose values decide on a path."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from lq_lightning.activations import ActivationPolicy, quantize_activations
from lq_lightning.activations.measure import SavedTensors

WIDTH, EXPERTS, CHOSEN = 64, 8, 2


class Experts(nn.Module):
    """Each token goes through the experts that a router chooses, one expert after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(CHOSEN)
        y = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            token, place = (chosen == index).nonzero(as_tuple=True)
            update = F.silu(expert(rows[token])) * weights[token, place, None]
            y = y.index_add(0, token, update)
        return x + y.view_as(x)


class Region(nn.Module):
    def __init__(self, compute: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.compute(self.a(x)))


class CopiedOutside(torch.autograd.Function):
    """A copy by a library that torch does not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.zeros(x.shape)
        ctypes.memmove(y.data_ptr(), x.contiguous().data_ptr(), x.nbytes)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def copied_inside(x: Tensor) -> Tensor:
    """A copy into memory that a library allocated: its address is never asked for."""
    y = torch.empty_like(x)
    with DisableTorchFunction(), _disable_current_modes():
        y.copy_(x.detach())
    return y + (x - x.detach())


def branch(read: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    return lambda h: h.relu() if read(h.mean()) else h.sin()


DISCONTINUOUS: dict[str, Callable[[], nn.Module]] = {
    "experts": Experts,
    "branch on item": lambda: Region(branch(lambda mean: mean.item() > 0)),
    "branch on an array": lambda: Region(branch(lambda mean: mean.detach().numpy() > 0)),
    "comparison": lambda: Region(lambda h: h * (h > 0.1)),
    "integers": lambda: Region(lambda h: h + (8 * h).int()),
    "divided to integers": lambda: Region(lambda h: h + h.div(0.1, rounding_mode="floor")),
    "copied outside": lambda: Region(lambda h: h * (CopiedOutside.apply(h) > 0.1)),
    "copied inside": lambda: Region(lambda h: h * (copied_inside(h).detach() > 0.1)),
    "sampled": lambda: Region(lambda h: h * torch.bernoulli(h.sigmoid())),
}
CONTINUOUS: dict[str, Callable[[], nn.Module]] = {
    "plain": Region,
    "normed": lambda: Region(lambda h: F.layer_norm(h, (WIDTH,)).clone().mul_(2)),
    "dropout": lambda: Region(lambda h: F.dropout(h, 0.1)),
    "masked by position": lambda: Region(
        lambda h: h.masked_fill(torch.arange(WIDTH) > 9, 0) * (torch.rand_like(h) < 0.9)
    ),
    "attention": lambda: Region(lambda h: F.scaled_dot_product_attention(h, h, h, is_causal=True)),
}


class Layer(nn.Module):
    """As Hugging Face's layers: its class says that it checkpoints."""

    def __init__(self, region: nn.Module, reentrant: bool = False) -> None:
        super().__init__()
        self.inner, self.gradient_checkpointing = region, True
        self.checkpoint = partial(checkpoint, use_reentrant=reentrant)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.checkpoint(self.inner, x)
        return y


Layer.__name__ = "GradientCheckpointingLayer"


class Stem(nn.Module):
    """Packed by rule, with a checkpointed region in it."""

    def __init__(self, region: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 1)
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.region, F.mish(self.conv(x.mT).mT), use_reentrant=False)
        return y


def model_of(region: Callable[[], nn.Module], how: str) -> nn.Module:
    torch.manual_seed(0)
    first: nn.Module
    if how in ("reentrant", "not reentrant"):
        wrap: Callable[[nn.Module], nn.Module] = partial(Layer, reentrant=how == "reentrant")
    elif how == "wrapper":
        wrap = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    else:
        wrap = Stem
    first = nn.Linear(WIDTH, WIDTH)
    return nn.ModuleDict({"first": first, "layers": nn.ModuleList([wrap(region())])})


def gradients(model: nn.Module, steps: int = 1) -> tuple[dict[str, Tensor], int]:
    """Gradients, and bytes of floats that are kept."""
    for _ in range(steps):
        torch.manual_seed(3)
        x = torch.randn(8, 64, WIDTH)
        model.zero_grad()
        with SavedTensors(model) as saved:
            y = model["layers"][0](model["first"](x))
        y.square().mean().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    floats = [s.nbytes for s in saved.storages if s.dtype == x.dtype and s.module != "first"]
    return found, sum(floats)


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    assert found.keys() == exact.keys()
    return max(float((found[n] - g).norm() / (g.norm() + 1e-12)) for n, g in exact.items())


def ways(*names: str) -> list[tuple[str, str]]:
    """Every region in both ways; the wrapper, which calls one of them, with one region."""
    return [*product(names, ("reentrant", "not reentrant")), (names[0], "wrapper")]


@pytest.mark.parametrize(("name", "how"), ways(*DISCONTINUOUS))
def test_what_decides_on_a_path_is_kept_exactly(name: str, how: str) -> None:
    model = model_of(DISCONTINUOUS[name], how)
    exact, floats = gradients(model)
    quantize_activations(model, ActivationPolicy(norm=None, activation=None))
    with pytest.warns(UserWarning, match="kept exactly, not as codes: `.*` in them"):
        first, kept = gradients(model)
    later, kept_later = gradients(model)
    assert error(first, exact) == 0.0
    assert error(later, exact) == 0.0
    assert kept == kept_later == floats


@pytest.mark.parametrize(("name", "how"), ways(*CONTINUOUS))
def test_inputs_of_continuous_regions_are_codes(name: str, how: str) -> None:
    model = model_of(CONTINUOUS[name], how)
    exact, floats = gradients(model)
    quantize_activations(model, ActivationPolicy(norm=None, activation=None))
    for _ in range(2):
        coded, kept = gradients(model)
        assert 0 < error(coded, exact) < 0.02
        assert kept == 0 < floats


def test_regions_in_packed_blocks_see_their_input_exactly() -> None:
    """What the convolution and the function save is rounded; the region's input is not."""
    model = model_of(Experts, "packed")
    exact, _ = gradients(model)
    with pytest.warns(UserWarning, match="packed by rule"):
        quantize_activations(model, ActivationPolicy(norm=None, activation=None))
    coded, _ = gradients(model)
    assert (
        error(
            {n: g for n, g in coded.items() if "region" in n},
            {n: g for n, g in exact.items() if "region" in n},
        )
        == 0.0
    )
    assert 0 < error(coded, exact) < 0.02


class Turning(nn.Module):
    """Routes from the third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.experts, self.calls = Region(), Experts(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.experts(x) if self.calls >= 5 else self.plain(x)
        return y


def test_a_forward_of_other_operators_is_looked_at_again() -> None:
    """Each step calls a region twice: once more in backward."""
    model = model_of(Turning, "not reentrant")
    region = model["layers"][0].inner
    quantize_activations(model, ActivationPolicy(norm=None, activation=None))
    assert gradients(model, steps=2)[1] == 0
    region.calls = 10
    with pytest.warns(UserWarning, match="kept exactly"):
        found, kept = gradients(model, steps=2)
    assert kept > 0
    plain = model_of(Turning, "not reentrant")
    plain["layers"][0].inner.calls = 10
    assert error(found, gradients(plain)[0]) == 0.0


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_mixtures_of_experts_train_with_checkpointing(experts: str) -> None:
    """Layers and norms are coded as always; what routers get for a gradient is not off by more."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts_per_tok=2,
        num_local_experts=8,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation=experts
    ).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(64, (4, 32))
    (router,) = (p for name, p in model.named_parameters() if ".gate." in name)

    def gradient() -> Tensor:
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        return router.grad.clone()

    exact = gradient()
    quantize_activations(model, ActivationPolicy(norm="int8", activation="int8"))
    with pytest.warns(UserWarning, match="DecoderLayer layers are kept exactly"):
        first = gradient()
    for found in (first, gradient()):
        assert float((found - exact).norm() / exact.norm()) < 0.01
