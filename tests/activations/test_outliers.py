"""Errors of gradients where activations have outliers, as in pretrained models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lq_testing.small_llama import VOCAB, SmallLlama
from torch import Tensor

from lq_lightning.activations import ActivationPolicy, quantize_activations
from lq_lightning.activations.policy import RECIPES

FOUR_BITS = ActivationPolicy(norm="int4_hadamard", activation="int4")
E4M3 = ActivationPolicy(norm="fp8_e4m3", activation="fp8_e4m3")


def outlier_model() -> SmallLlama:
    """A Llama whose first token is massive, with outlier channels before norms and in gates.

    Weights behind a norm undo the size of its channels, as trained ones do.
    """
    torch.manual_seed(0)
    model = SmallLlama(layers=4)
    with torch.no_grad():
        model.embedding.weight[:, 3::40] *= 30.0
        model.embedding.weight[0] *= 100.0
        for block in model.blocks:
            for norm in (block.norm1, block.norm2):
                norm.weight[3::40] /= 10.0
            block.mlp.gate_proj.weight[::50] *= 6.0
    return model


def gradients(model: SmallLlama, policy: ActivationPolicy | None) -> Tensor:
    model.zero_grad()
    handle = None if policy is None else quantize_activations(model, policy)
    tokens = torch.randint(1, VOCAB, (4, 65), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = 0
    model(tokens).backward()
    if handle is not None:
        handle.remove()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("recipe", "before", "bound"), [("agoq", FOUR_BITS, 0.035), ("coat", E4M3, 0.003)]
)
def test_recipes_bear_outliers(recipe: str, before: ActivationPolicy, bound: float) -> None:
    """Against 4 bits, and against E4M3, which takes more bytes; products are left native."""
    model = outlier_model()
    exact = gradients(model, None)

    def error(policy: ActivationPolicy) -> float:
        return float((gradients(model, policy) - exact).norm() / exact.norm())

    found = error(replace(RECIPES[recipe], matmul="native"))
    assert 0.0 < found < bound < error(before)
