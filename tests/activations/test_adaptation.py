"""A recipe that follows the model: errors are foreseen, and only sites with outliers change."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing.ranks import run_ranks
from lq_testing.small_llama import SmallLlama, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lq_lightning.activations import ActivationPolicy, quantize_activations
from lq_lightning.activations.adaptation import (
    Adaptation,
    SiteError,
    expected_errors,
    widen,
    wider_codes,
)

NORMS = ActivationPolicy(norm="int4_hadamard", activation=None)
MLPS = ActivationPolicy(norm=None, activation="int4")


def with_outliers(model: SmallLlama) -> SmallLlama:
    """One channel of each group of the second MLP is 60 times as large; outputs stay as they are.

    And the first token's hidden state is large, of which the norms make what they made before.
    """
    mlp = model.blocks[1].mlp
    with torch.no_grad():
        mlp.up_proj.weight[::128] *= 60.0
        mlp.down_proj.weight[:, ::128] /= 60.0
        model.embedding.weight[0] *= 1000.0
    return model


def build(outliers: bool = False, layers: int = 3) -> SmallLlama:
    torch.manual_seed(0)
    model = SmallLlama(layers)
    return with_outliers(model) if outliers else model


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    run().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    square = sum(float((found[n] - e).square().sum()) for n, e in exact.items())
    return math.sqrt(square / sum(float(e.square().sum()) for e in exact.values()))


@pytest.mark.parametrize("policy", ["auto", NORMS])
@pytest.mark.parametrize("outliers", [False, True])
def test_the_error_of_all_gradients_is_foreseen(policy: Any, outliers: bool) -> None:
    """Of a batch that computes what it would without, also from few of its rows."""
    model = build(outliers)
    data = tokens(length=256)
    exact = gradients(model, lambda: model(data))
    handle = quantize_activations(model, policy)
    static = gradients(model, lambda: model(data))
    with handle.adapt(9.0) as adaptation:
        found = gradients(model, lambda: model(data))
    torch.testing.assert_close(found, static, rtol=0, atol=0)
    assert not adaptation.bits
    assert not adaptation.unmeasured
    assert 0.75 < adaptation.expected / error(static, exact) < 1.5


def test_sites_with_outliers_get_more_bits_and_no_others() -> None:
    model, data = build(outliers=True), tokens()
    exact = gradients(model, lambda: model(data))
    handle = quantize_activations(model, "auto")
    before = {site.name: site.codec for site in handle.sites}
    with handle.adapt(0.12) as adaptation:
        first = gradients(model, lambda: model(data))
    assert list(adaptation.bits) == ["blocks.1.mlp"]
    assert adaptation.bits["blocks.1.mlp"] in (5, 6)
    changed = {site.name for site in handle.sites if site.codec != before[site.name]}
    assert changed == {"blocks.1.mlp"}
    later = gradients(model, lambda: model(data))
    assert error(first, exact) > 0.15
    assert error(later, exact) < 0.12
    text = adaptation.summary()
    assert "(at most 0.12)" in text
    assert f"blocks.1.mlp: 4 -> {adaptation.bits['blocks.1.mlp']} bits, error 0." in text


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_measured_once(reentrant: bool) -> None:
    expected = None
    for checkpointed in (False, True):
        model = build(outliers=True)
        handle = quantize_activations(model, "auto")
        if checkpointed:
            for block in model.blocks:
                run = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
                block.forward = run
        with handle.adapt() as adaptation:
            model(tokens()).backward()
        if expected is None:
            expected = adaptation
        assert [s.name for s in adaptation.sites] == [s.name for s in expected.sites]
        assert adaptation.expected == pytest.approx(expected.expected, rel=1e-3)
        assert adaptation.bits == expected.bits != {}


def test_what_cannot_be_measured_stays() -> None:
    model = build(outliers=True)
    handle = quantize_activations(model, "auto")
    with handle.adapt() as adaptation, torch.no_grad():
        model(tokens())
    assert "no norm made a code" in adaptation.summary()
    with handle.adapt() as adaptation:
        (model(tokens()) * math.inf).backward()
    assert "not finite" in adaptation.summary()
    with pytest.raises(KeyError), handle.adapt() as adaptation:
        raise KeyError
    model(tokens()).backward()
    assert not adaptation.sites
    assert not adaptation.bits
    assert all(site.codec is None or "int4" in site.codec.code for site in handle.sites)
    model.requires_grad_(False).embedding.requires_grad_(True)  # codes, and no weight gradient
    with handle.adapt() as adaptation:
        model(tokens()).backward()
    assert adaptation.sites
    assert "no norm made a code" in adaptation.summary()


class Block(nn.Sequential):
    def __init__(self) -> None:
        layers = (nn.LayerNorm(128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
        super().__init__(*layers)


@pytest.mark.parametrize("rows", [0, 8, 64])
def test_of_several_calls_the_first_with_rows_is_measured(rows: int) -> None:
    """Readers of the others are no readers of it, whatever their rows; an expert may get none."""
    found = []
    for calls in (1, 2):
        torch.manual_seed(0)
        block, x = Block(), torch.randn(64, 128)
        handle = quantize_activations(block, "auto")
        with handle.adapt() as adaptation:
            loss = block(x[:0]).sum() + block(x).square().sum()
            if calls == 2:
                loss = loss + block(torch.randn(rows, 128)).square().sum()
            loss.backward()
        found.append(adaptation.sites)
    assert found[0] == found[1] != ()


def test_a_parameter_that_a_norm_takes_keeps_no_hook() -> None:
    block, x = Block(), nn.Parameter(torch.randn(64, 128))
    handle = quantize_activations(block, "auto")
    with handle.adapt() as adaptation:
        block(x).square().sum().backward()
    assert adaptation.sites[0].branch != 0.0
    assert not x._backward_hooks


def test_sites_that_no_norm_is_before_stay() -> None:
    model = build(outliers=True)
    handle = quantize_activations(model, MLPS)
    with handle.adapt(1e-3) as adaptation:
        model(tokens()).backward()
    assert not adaptation.bits
    assert adaptation.unmeasured == tuple(f"blocks.{i}.mlp" for i in range(3))
    assert "no norm made a code" in adaptation.summary()


def test_codes_that_are_wider_already_stay() -> None:
    handle = quantize_activations(build(), ActivationPolicy(norm="fp8_e4m3", activation="int7"))
    before = [site.codec for site in handle.sites]
    widen(handle.sites, {site.name: 6 for site in handle.sites})
    assert [site.codec for site in handle.sites] == before


def site(name: str, **values: Any) -> SiteError:
    usual = {"is_norm": False, "bits": 4, "values": 8, "weights": 1.0, "weight_error": 0.0}
    return SiteError(
        name=name, **{**usual, "by_row": 0.5, "input_error": 0.0, "branch": 1.0, **values}
    )


def test_bits_go_where_they_save_most_per_byte() -> None:
    sites = [
        site("norm", is_norm=True, branch=0.5),
        site("wide", weight_error=0.04, values=32),
        site("small", weight_error=0.03, input_error=0.1),
        site("exact", bits=0, weight_error=0.01),
    ]
    errors = expected_errors(sites)
    assert errors["wide"] == pytest.approx(0.01)
    # the norm's own readers, and half of what the gradient brings to those before it: none
    assert errors["small"] == pytest.approx((0.03 + 0.1 * 0.5) / 4)
    assert wider_codes(sites, 0.15) == {}  # of 0.182 expected: within the tolerance
    assert wider_codes(sites, 0.12) == {"small": 6}
    assert wider_codes(sites, 0.07) == {"small": 8, "wide": 6}
    assert wider_codes(sites, 1e-3) == {"small": 8, "wide": 8}


def _ranks(rank: int, world: int) -> None:
    model = build(outliers=True)
    handle = quantize_activations(model, "auto")
    alone = Adaptation(max_error=0.08, model_sites=handle.sites)
    alone.start()
    model(tokens(rank)).backward()
    mine = {name: found["weights"] for name, found in alone._found.items()}
    alone.finish()
    both: list[Any] = [None] * world
    dist.all_gather_object(both, (mine, alone.sites, alone.bits))
    assert both[0][0] != both[1][0]
    assert both[0][1:] == both[1][1:]
    assert alone.bits
    for each in alone.sites:
        assert each.weights == pytest.approx((both[0][0][each.name] + both[1][0][each.name]) / 2)


def test_ranks_with_other_batches_choose_alike() -> None:
    run_ranks(_ranks, 2)
