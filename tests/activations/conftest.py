"""The models whose saved activations are counted, and a block with a function to quantize it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from lq_testing.architectures import ARCHITECTURES
from lq_testing.small_block import EXACT, WIDTH, Block, Quantize
from torch import Tensor, nn

from lq_lightning.activations import ActivationPolicy, QuantizedActivations, quantize_activations


@pytest.fixture(scope="session")
def architectures() -> Mapping[str, Any]:
    """By name; a test skips those whose package is missing."""
    return ARCHITECTURES


@pytest.fixture
def block() -> Block:
    return Block()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 16, WIDTH, requires_grad=True)


@pytest.fixture
def quantize() -> Iterator[Quantize]:
    handles = []

    def quantize(model: nn.Module, recipe: str | ActivationPolicy = EXACT) -> QuantizedActivations:
        handles.append(quantize_activations(model, recipe))
        return handles[-1]

    yield quantize
    for handle in handles:
        handle.remove()
