"""Gradients of embeddings and heads in bits of their own, on gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing.cases import on_gpus, on_ranks, rank_tests
from lq_testing.devices import device
from lq_testing.vocabulary import (
    COARSE,
    FINE,
    POSITIONS,
    VOCAB,
    WIDTH,
    VocabularyModel,
    build_vocabulary,
)
from torch import Tensor

from lq_lightning.data_parallel import GradientQuantization, QuantizedCommunication


def gradients(model: VocabularyModel, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(VOCAB, (8, POSITIONS), generator=generator).to(device())
    (model(tokens) * scale).backward()
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad.full_tensor().float()
    model.zero_grad()
    return found


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {n: float((found[n] - exact[n]).norm() / exact[n].norm()) for n in exact}


def _inter_nbytes(communication: QuantizedCommunication, dtype: torch.dtype) -> int:
    """What one reduction of each unit sends to one other node."""
    total = 0
    for unit in communication._units:
        assert unit.scatter is not None
        numel = sum(s.numel for s in unit.scatter.segments())
        packed = tuple(range(len(unit.scatter.unit.names)))
        total += unit.scatter.layouts_of(packed, numel, dtype).inter.nbytes
    return total


def _reduces(
    rank: int, world: int, node_size: int, dtype: torch.dtype, apart: bool, tied: bool
) -> None:
    options: dict[str, Any] = {"dtype": dtype, "apart": apart, "tied": tied}
    exact = gradients(build_vocabulary(None, node_size, **options)[0])
    found, nbytes = {}, {}
    for config in (COARSE, FINE):
        model, communication = build_vocabulary(config, node_size, **options)
        found[config] = errors(gradients(model), exact)
        nbytes[config] = communication.traffic().gradients_inter
        others = world // node_size - 1
        assert nbytes[config] == others * _inter_nbytes(communication, dtype)
    fine_numel = (2 - tied) * VOCAB * WIDTH + POSITIONS * WIDTH
    more = nbytes[FINE] - nbytes[COARSE]
    assert more == pytest.approx(fine_numel * 6 / 8 * others / world, rel=0.02)
    bf16 = dtype == torch.bfloat16
    for name, error in found[FINE].items():
        if exact[name].ndim < 2:
            assert error < (2e-2 if bf16 else 1e-5), (name, error)
        elif name in ("tokens.weight", "positions.weight", "head.weight"):
            assert 1e-3 < error < (0.02 if bf16 or node_size > 1 else 0.01), (name, error)
            assert found[COARSE][name] > 0.2, (name, found[COARSE])
        else:
            assert error > 0.2, (name, error)


def _one_level(rank: int, world: int) -> None:
    """ULq has the same codec on both levels, so those of the vocabulary differ on both."""
    exact = gradients(build_vocabulary(None, 2)[0])
    config = GradientQuantization(method="ULq", vocabulary_bits=8)
    for name, error in errors(gradients(build_vocabulary(config, 2)[0]), exact).items():
        if name in ("tokens.weight", "positions.weight", "head.weight"):
            assert 1e-3 < error < 0.02, (name, error)
        elif exact[name].ndim > 1:
            assert error > 0.05, (name, error)


test_on_ranks = rank_tests(
    on_ranks(_reduces, 2, 1, torch.bfloat16, True, False),
    on_ranks(_reduces, 3, 1, torch.float32, False, False),
    on_ranks(_reduces, 4, 2, torch.float32, False, True),
    on_ranks(_one_level, 4),
    on_gpus(_reduces, 2, 1, torch.float32, False, False),
    on_gpus(_reduces, 4, 2, torch.float32, False, False),
)
