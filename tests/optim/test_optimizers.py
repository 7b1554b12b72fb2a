"""Quantized optimizers in one process: against torch's, in place, checkpoints, refusals."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lq_testing.fitting import make_model, train
from torch import Tensor, nn

from lq_lightning.optim import (
    OptimizerQuantization,
    QuantizedAdam,
    QuantizedAdamW,
    QuantizedLion,
    QuantizedOptimizer,
    QuantizedSGD,
    quantize_optimizer,
)

FLOAT32 = OptimizerQuantization(first_moment="float32", second_moment="float32")
FORMATS = ["expanded_fp8", "dynamic8"]


def quantized(name: str, **changes: Any) -> OptimizerQuantization:
    return OptimizerQuantization(first_moment=name, second_moment=name, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FORMATS)
def test_trains_like_torch(name: str) -> None:
    models = make_model(), make_model()
    full = train(models[0], torch.optim.AdamW(models[0].parameters(), 3e-3), 200)
    config = quantized(name)
    coded = train(models[1], QuantizedAdamW(models[1].parameters(), 3e-3, quantization=config), 200)
    assert full < 0.2
    assert abs(coded - full) < 0.02 * full


MAKERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "adamw": (torch.optim.AdamW, QuantizedAdamW),
    "adam": (torch.optim.Adam, QuantizedAdam),
    "sgd": (torch.optim.SGD, QuantizedSGD),
}
CASES = [
    ("adamw", {"weight_decay": 0.1, "betas": (0.8, 0.95)}),
    ("adamw", {"maximize": True}),
    ("adam", {"weight_decay": 0.1}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.5}),
    ("sgd", {"momentum": 0.9, "nesterov": True, "maximize": True}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_float32_states_are_those_of_torch(name: str, options: dict[str, Any]) -> None:
    models = make_model(), make_model()
    lr = 1e-3
    pair = [
        maker(model.parameters(), lr, **options, **extra)
        for maker, model, extra in zip(
            MAKERS[name], models, ({}, {"quantization": FLOAT32}), strict=True
        )
    ]
    for model, optimizer in zip(models, pair, strict=True):
        train(model, optimizer, 5)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_decoupled_weight_decay_of_a_group_counts() -> None:
    models = make_model(), make_model()
    full = torch.optim.AdamW(models[0].parameters(), 1e-3, weight_decay=0.5)
    coded = QuantizedAdamW(models[1].parameters(), 1e-3, weight_decay=0.5, quantization=FLOAT32)
    for model, optimizer in zip(models, (full, coded), strict=True):
        optimizer.param_groups[0]["decoupled_weight_decay"] = False
        train(model, optimizer, 3)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_first_step_is_that_of_torch(name: str, options: dict[str, Any]) -> None:
    """Nothing has been rounded yet when the first update is made."""
    models = make_model(), make_model()
    for maker, model in zip(MAKERS[name], models, strict=True):
        train(model, maker(model.parameters(), 1e-3, **options), 1)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=5e-6)


def test_lion_follows_its_definition() -> None:
    weight = nn.Parameter(torch.randn(64, 128))
    optimizer = QuantizedLion([weight], 1e-2, (0.9, 0.99), 0.1, quantization=FLOAT32)
    expected, momentum = weight.detach().clone(), torch.zeros(64, 128)
    for _ in range(3):
        grad = torch.randn(64, 128)
        weight.grad = grad
        optimizer.step()
        expected = expected * (1 - 1e-3) - 1e-2 * torch.sign(0.9 * momentum + 0.1 * grad)
        momentum = 0.99 * momentum + 0.01 * grad
    torch.testing.assert_close(weight.detach(), expected)
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], momentum)


def test_plan_and_bytes() -> None:
    model = nn.Sequential(nn.Embedding(100, 64), *make_model())
    optimizer = torch.optim.AdamW(model.named_parameters(), 1e-3)
    quantize_optimizer(optimizer, module=model)
    plan = {entry.name: entry for entry in optimizer.quantization_plan()}  # type: ignore[attr-defined]
    assert plan["0.weight"].reason == "embedding"
    assert plan["1.bias"].reason == "1-D"
    assert plan["1.weight"].reason is None
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    for name, param in model.named_parameters():
        entry = optimizer.state[param]
        nbytes = sum(v.nbytes for k, v in entry.items() if k != "step")
        assert nbytes == plan[name].nbytes
        if plan[name].reason is None:
            assert nbytes <= 2.2 * param.numel()
        else:
            assert nbytes == 8 * param.numel()


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((1 << 20,), "1-D"),
        ((63, 64), "fewer than 4096 elements"),
        ((4096, 31), "rows of fewer than 32"),
        ((4096, 32), None),
        ((64, 4, 4, 4), None),
    ],
)
def test_what_is_quantized(shape: tuple[int, ...], reason: str | None) -> None:
    param = nn.Parameter(torch.empty(shape))
    (entry,) = QuantizedAdamW([param]).quantization_plan()
    assert (entry.reason or "").startswith(reason or "")
    assert (entry.reason is None) == (reason is None)
    if reason is None:
        assert entry.nbytes <= 2.2 * param.numel()
    (entry,) = QuantizedAdamW([param], full_precision=[param]).quantization_plan()
    assert entry.reason == "asked for by `full_precision`"


# --- conversion in place ----------------------------------------------------------------------


@pytest.mark.parametrize("when", [0, 3])
def test_conversion_keeps_schedulers_groups_and_hooks(when: int) -> None:
    model = make_model()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "lr": 2e-3}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    identity, param_groups = id(optimizer), optimizer.param_groups
    if when:
        train(model, optimizer, when)
    calls.clear()
    result = quantize_optimizer(optimizer)
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    assert id(result) == identity
    assert optimizer.param_groups is param_groups
    assert isinstance(optimizer, (QuantizedAdamW, torch.optim.AdamW))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            train(model, optimizer, 1, start=when + step)
            scheduler.step()
    assert calls == ["pre", "post"] * 4
    assert param_groups[0]["lr"] < 2e-3
    assert param_groups[1]["weight_decay"] == 0.0
    entry = optimizer.state[matrices[0]]
    assert entry["exp_avg_codes"].dtype == torch.uint8
    assert entry["step"] == when + 4
    assert optimizer.state[vectors[0]]["exp_avg"].dtype == torch.float32


def test_converted_states_hold_the_same_values() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    train(model, optimizer, 3)
    before = copy.deepcopy(optimizer.state_dict())
    quantized_optimizer = quantize_optimizer(optimizer)
    after = quantized_optimizer.full_precision_state_dict()
    for index, entry in before["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            error = (after["state"][index][name] - entry[name]).norm() / entry[name].norm()
            assert error < 0.04
        assert after["state"][index]["step"] == 3


def test_lion_of_others_is_recognised() -> None:
    class Lion(torch.optim.Optimizer):
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(
                params, {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0, **options}
            )

    weight = nn.Parameter(torch.randn(64, 128))
    optimizer = Lion([weight])
    quantize_optimizer(optimizer)
    assert isinstance(optimizer, QuantizedLion)
    weight.grad = torch.randn(64, 128)
    optimizer.step()
    assert "exp_avg_codes" in optimizer.state[weight]
    with pytest.raises(ValueError, match="options without a quantized form: cautious"):
        quantize_optimizer(Lion([weight], cautious=0.5))


def test_unsupported_optimizers_are_refused() -> None:
    params = [nn.Parameter(torch.randn(64, 128))]

    class Custom(torch.optim.AdamW):
        pass

    with pytest.raises(ValueError, match=r"QuantizedAdamW\(amsgrad=True\) is not supported: its"):
        quantize_optimizer(torch.optim.AdamW(params, amsgrad=True))
    with pytest.raises(ValueError, match=r"capturable=True\) is not supported"):
        quantize_optimizer(torch.optim.Adam(params, capturable=True))
    with pytest.raises(ValueError, match=r"momentum=0\) has no state to quantize"):
        quantize_optimizer(torch.optim.SGD(params))
    with pytest.raises(TypeError, match=r"no quantized form of .*Custom; supported are"):
        quantize_optimizer(Custom(params))
    with pytest.raises(TypeError, match="is a `QuantizedAdamW` already: use it"):
        quantize_optimizer(QuantizedAdamW(params))
    wrapped = torch.optim.AdamW(params)
    wrapped.step = lambda: None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError, match=r"step` was replaced on this object"):
        quantize_optimizer(wrapped)
    assert type(wrapped) is torch.optim.AdamW
    with pytest.raises(ValueError, match=r"first_moment='int4'\)` is not supported: choose"):
        OptimizerQuantization(first_moment="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"min_numel='4096'\) is not an integer"):
        OptimizerQuantization(min_numel="4096")  # type: ignore[arg-type]


# --- gradients --------------------------------------------------------------------------------


def test_parameters_without_gradient_and_zero_gradients() -> None:
    params = [nn.Parameter(torch.randn(64, 128)) for _ in range(3)]
    before = [p.detach().clone() for p in params]
    optimizer = QuantizedAdamW(params, 1e-2, weight_decay=0.0)
    params[0].grad = torch.zeros(64, 128)
    params[1].grad = torch.randn(64, 128)
    for _ in range(2):
        optimizer.step()
    assert torch.equal(params[0], before[0])
    assert not torch.equal(params[1], before[1])
    assert params[2] not in optimizer.state
    params[2].grad = torch.randn(64, 128)
    optimizer.step()
    assert optimizer.state[params[2]]["step"] == 1
    assert optimizer.state[params[1]]["step"] == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("make", [QuantizedAdamW, QuantizedLion, QuantizedSGD])
def test_bad_gradients_stay_visible(make: Callable[..., QuantizedOptimizer], value: float) -> None:
    weight = nn.Parameter(torch.randn(64, 128))
    optimizer = make([weight], 1e-3)
    weight.grad = torch.randn(64, 128)
    weight.grad[3, 5] = value
    for _ in range(2):
        optimizer.step()
        weight.grad = torch.randn(64, 128)
    assert not weight[3, 5].isfinite()
    assert weight[2].isfinite().all()


def test_other_layouts_and_dtypes() -> None:
    torch.manual_seed(1)
    conv = nn.Parameter(torch.randn(64, 8, 4, 4).to(memory_format=torch.channels_last))
    flat = nn.Parameter(conv.detach().contiguous().clone())
    scalar = nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
    optimizers = [QuantizedAdamW([param, scalar], 1e-2) for param in (conv, flat)]
    for _ in range(3):
        grad = torch.randn(64, 8, 4, 4)
        conv.grad, flat.grad = grad.to(memory_format=torch.channels_last), grad.clone()
        scalar.grad = torch.tensor(1.0, dtype=torch.bfloat16)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(conv, flat)
    assert scalar < 1
    half = nn.Parameter(torch.randn(64, 128).half())
    half.grad = torch.randn(64, 128).half()
    with pytest.raises(TypeError, match=r"float16; allowed: float32, bfloat16"):
        QuantizedAdamW([half]).step()


def test_stochastic_rounding_trains_bf16_where_nearest_stalls() -> None:
    losses = []
    for stochastic in (True, False):
        model = make_model(torch.bfloat16)
        config = OptimizerQuantization(stochastic_rounding=stochastic)
        optimizer = QuantizedAdamW(model.parameters(), 1e-5, quantization=config)
        start = sum(p.float().abs().sum() for p in model.parameters()).item()
        train(model, optimizer, 20)
        moved = abs(sum(p.float().abs().sum() for p in model.parameters()).item() - start)
        losses.append(moved)
    assert losses[0] > 2 * losses[1]


def test_closure_and_frozen_learning_rate() -> None:
    weight = nn.Parameter(torch.randn(64, 128))
    optimizer = QuantizedAdamW([weight], torch.tensor(0.0))
    before = weight.detach().clone()

    def closure() -> Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == before.square().sum()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("scheduled", [False, True])
def test_compiled_step_is_the_step(scheduled: bool) -> None:
    """It runs as it is: weights and codes have equal bits, and nothing is traced step by step."""
    torch.compiler.reset()
    results = []
    for compiled in (False, True):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if scheduled:
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        twin = quantize_optimizer(optimizer)
        step = torch.compile(twin.step, backend="eager") if compiled else twin.step
        for index in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.1) + 0.01 * parameter.detach()
            step()
            assert twin.state[model[0].weight]["step"] == index + 1
        results.append([*model.parameters(), *twin.state[model[0].weight].values()])
    for plain, other in zip(*results, strict=True):
        assert torch.equal(plain, other)

    @torch.compile(backend="eager", fullgraph=True)
    def whole(x: Tensor) -> Tensor:
        twin.step()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match="call `step` outside of functions"):
        whole(torch.ones(1))
