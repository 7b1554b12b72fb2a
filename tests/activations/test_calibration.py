"""Calibration: gradient errors, bytes and times of each way of keeping an activation."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
from lq_testing.ranks import run_ranks
from lq_testing.small_llama import SmallLlama, tokens
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lq_lightning.activations import (
    ActivationCalibration,
    ActivationPolicy,
    ActivationRule,
    calibrate_activations,
    quantize_activations,
)
from lq_lightning.activations.gradient_errors import run_backward
from lq_lightning.activations.sites import Site


def build(dtype: torch.dtype = torch.float32, **options: float) -> tuple[SmallLlama, Callable]:
    torch.manual_seed(0)
    model = SmallLlama(**options).to(dtype)
    return model, lambda: model(tokens())


@pytest.fixture(scope="module")
def calibrated() -> ActivationCalibration:
    return calibrate_activations(*build(), ("int4", "int8"))


def gradients(model: nn.Module, run: Callable[[], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    run().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_more_bits_mean_smaller_errors_and_more_bytes(calibrated: ActivationCalibration) -> None:
    names = [site.name for site in calibrated.sites if site.codecs]
    for name in ("blocks.0.norm1", "blocks.0.norm2", "blocks.1.mlp", "norm"):
        assert name in names
    for site in calibrated.sites:
        if site.codecs:
            four, eight = site.measurement("int4"), site.measurement("int8")
            assert four.nbytes < eight.nbytes < site.kept_nbytes
            assert four.errors.keys() == eight.errors.keys()
            for gradient, error in eight.errors.items():
                assert 0.0 < error < 0.02
                assert 5 * error < four.errors[gradient] < 0.5


@pytest.mark.parametrize(
    ("site", "weights"),
    [
        ("norm", {"weight": "norm.weight", "head": "head.weight"}),
        ("blocks.1.mlp", {"blocks.1.mlp.down_proj": "blocks.1.mlp.down_proj.weight"}),
        (
            "blocks.1.norm2",
            {
                "weight": "blocks.1.norm2.weight",
                "blocks.1.mlp.up_proj": "blocks.1.mlp.up_proj.weight",
            },
        ),
    ],
)
def test_errors_are_those_of_a_model_with_that_code(
    calibrated: ActivationCalibration, site: str, weights: dict[str, str]
) -> None:
    model, run = build()
    exact = gradients(model, run)
    policy = ActivationPolicy(
        **{"norm": None, "activation": None, "other": None},
        rules=(ActivationRule(module=site, codec="int4"),),
    )
    handle = quantize_activations(model, policy)
    coded = gradients(model, run)
    handle.remove()
    measured = next(s for s in calibrated.sites if s.name == site).measurement("int4").errors
    for gradient, name in weights.items():
        error = float((coded[name] - exact[name]).norm() / exact[name].norm())
        assert measured[gradient] == pytest.approx(error, rel=1e-3)


def test_errors_of_the_input_reach_the_weights_before_it(calibrated: ActivationCalibration) -> None:
    model, run = build()
    exact = gradients(model, run)["blocks.1.mlp.gate_proj.weight"]
    rule = ActivationRule(module="blocks.1.mlp", codec="int4")
    handle = quantize_activations(
        model, ActivationPolicy(norm=None, activation=None, other=None, rules=(rule,))
    )
    coded = gradients(model, run)["blocks.1.mlp.gate_proj.weight"]
    handle.remove()
    error = float((coded - exact).norm() / exact.norm())
    site = next(s for s in calibrated.sites if s.name == "blocks.1.mlp")
    gate = site.measurement("int4").errors["gate"]
    assert error / 2 < gate < error * 2


def test_errors_are_measured_on_rows_all_over_a_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(128), nn.Linear(128, 8))
    x = (torch.randn(8, 128) * torch.arange(1, 9)[:, None] ** 3).repeat_interleave(2, dim=0)

    def measured(max_rows: int) -> dict[str, float]:
        calibration = calibrate_activations(
            model, lambda: model(x).square().mean(), ("int4",), max_rows=max_rows
        )
        return dict(calibration.sites[0].codecs[0].errors)

    assert measured(8) == pytest.approx(measured(16))
    assert measured(2) != pytest.approx(measured(16), rel=0.01)


def test_bf16_measures_the_code_and_not_the_rounding_of_bf16() -> None:
    calibration = calibrate_activations(*build(torch.bfloat16), ("int8",))
    for site in calibration.sites:
        for measured in site.codecs:
            assert max(measured.errors.values()) < 0.02


def test_nothing_changes(recwarn: pytest.WarningsRecorder) -> None:
    model, run = build(dropout=0.1)
    run().backward()
    before = {name: p.grad for name, p in model.named_parameters()}
    values = {name: grad.clone() for name, grad in before.items()}
    calls, random = model.calls.clone(), torch.get_rng_state()
    calibrate_activations(model, run, ("int4",))
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(model.calls, calls)
    for name, p in model.named_parameters():
        assert p.grad is before[name]
        assert torch.equal(p.grad, values[name])
    for module in model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_only_what_blocks_keep_is_held_meanwhile() -> None:
    model, forward = build()
    inside = [m for block in model.blocks for m in block.modules() if m is not block]
    made: list[weakref.ref] = []
    alive = []

    def run() -> Tensor:
        made.clear()
        loss = forward()
        if torch.is_grad_enabled():
            alive.append(sum(ref() is not None for ref in made))
        return loss

    for module in inside:
        module.register_forward_hook(lambda _, __, output: made.append(weakref.ref(output)))
    gc.collect()
    gc.disable()  # cycles would keep what is freed late as well
    try:
        calibrate_activations(model, run, ("int4",))
        assert alive[-1] == 0, "blocks are recomputed"
        outputs: list[GradientEdge] = []
        run_backward(model, run, outputs, lambda *args: outputs.append(get_gradient_edge(args[2])))
        assert not any(ref() is not None for ref in made)
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["quantized", "compiled"])
def test_quantized_and_compiled_models_are_measured_as_others(
    calibrated: ActivationCalibration, how: str
) -> None:
    model, run = build()
    sites: list[Site] = []
    if how == "quantized":
        sites = quantize_activations(model, "agoq").sites
    else:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    before = [site.codec for site in sites]
    found = calibrate_activations(model, run, ("int4", "int8"))
    assert [site.codec for site in sites] == before
    assert found.tensors == calibrated.tensors
    for site, expected in zip(found.sites, calibrated.sites, strict=True):
        assert [c.errors for c in site.codecs] == [c.errors for c in expected.codecs]


def test_frozen_weights_have_no_errors() -> None:
    model, run = build()
    for name, p in model.named_parameters():
        p.requires_grad_("mlp" not in name and "norm" not in name)
    sites = {site.name: site for site in calibrate_activations(model, run, ("int4",)).sites}
    assert set(sites["blocks.1.mlp"].codecs[0].errors) == {"gate", "up"}
    assert set(sites["blocks.1.norm2"].codecs[0].errors) == {"input"}
    assert "weight" not in sites["blocks.1.norm1"].codecs[0].errors


def test_calibration_is_data(calibrated: ActivationCalibration) -> None:
    text = json.dumps(calibrated.to_dict())
    assert ActivationCalibration.from_dict(json.loads(text)) == calibrated
    table = calibrated.table()
    assert "blocks.1.mlp" in table
    assert "blocks.1.mlp.down_proj 0." in table


def test_what_cannot_be_measured_is_refused() -> None:
    model, run = build()
    with pytest.raises(ValueError, match="candidates='int9'"):
        calibrate_activations(model, run, ("int9",))
    with pytest.raises(ValueError, match="at least one"):
        calibrate_activations(model, run, ())
    with pytest.raises(RuntimeError, match="needs no gradient"):
        calibrate_activations(model, lambda: run().detach(), ("int4",))

    def nan() -> Tensor:
        return run() * float("nan")

    with pytest.raises(RuntimeError, match="not finite"):
        calibrate_activations(model, nan, ("int4",))

    def whole_step() -> Tensor:
        loss = run()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="calls no `backward"):
        calibrate_activations(model, whole_step, ("int4",))
    rule = ActivationRule(module="blocks.0", recompute=True)
    handle = quantize_activations(model, ActivationPolicy(rules=(rule,)))
    with pytest.raises(RuntimeError, match="`blocks.0` is recomputed"):
        calibrate_activations(model, run, ("int4",))
    handle.remove()


def _calibrate_sharded(rank: int, world_size: int) -> tuple[dict, str, int, list[bool]]:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from lq_lightning.activations import MemoryBudget, plan_activations

    model, _ = build()
    handle = quantize_activations(model, "agoq")
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

    def run() -> Tensor:
        return model(tokens(rank))

    full = calibrate_activations(model, run, ("int4", "int8"))
    half = full.saved_nbytes({})[0] // 2
    budget = MemoryBudget(half, scope="activations", recompute=False)
    plan = plan_activations(model, run, budget, ("int4", "int8"))
    handle.apply(plan.policy)
    run().backward()
    finite = [bool(p.grad.to_local().isfinite().all()) for p in model.parameters()]
    errors: list[dict] = [{} for _ in range(world_size)]
    dist.all_gather_object(errors, asdict(full)["sites"])
    return asdict(full), repr(plan.policy), half - plan.measured_nbytes, finite


def test_sharded_ranks_decide_the_same() -> None:
    (first, policy, left, finite), (second, other, _, _) = run_ranks(_calibrate_sharded, 2)
    assert first == second
    assert policy == other
    assert "int8" in policy
    assert left >= 0
    assert all(finite)
    alone = calibrate_activations(*build(), ("int4", "int8"))
    sites = {site["name"]: site for site in first["sites"]}
    for site in alone.sites:
        for measured, codec in zip(sites[site.name]["codecs"], site.codecs, strict=True):
            for gradient, error in codec.errors.items():
                assert measured["errors"][gradient] == pytest.approx(error, rel=0.5)
                # an average over other tokens: close, but not the same
                assert measured["errors"][gradient] != error
