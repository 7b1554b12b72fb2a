"""States of quantized optimizers, saved and loaded: bit by bit, from torch's, what is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lq_testing.fitting import make_model, train
from torch import nn

from lq_lightning.optim import (
    OptimizerQuantization,
    QuantizedAdam,
    QuantizedAdamW,
    QuantizedSGD,
)

FORMATS = ["expanded_fp8", "dynamic8"]
MAKERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "adamw": (torch.optim.AdamW, QuantizedAdamW),
    "adam": (torch.optim.Adam, QuantizedAdam),
    "sgd": (torch.optim.SGD, QuantizedSGD),
}


def quantized(name: str, **changes: Any) -> OptimizerQuantization:
    return OptimizerQuantization(first_moment=name, second_moment=name, **changes)  # type: ignore[arg-type]


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Through a file, with ``weights_only``."""
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    state: dict[str, Any] = torch.load(buffer, weights_only=True)
    return state


def assert_same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    left, right = one.state_dict(), other.state_dict()
    assert left["param_groups"] == right["param_groups"]
    assert left["state"].keys() == right["state"].keys()
    for index, entry in left["state"].items():
        assert entry.keys() == right["state"][index].keys()
        for key, value in entry.items():
            assert value.dtype == right["state"][index][key].dtype
            assert torch.equal(value, right["state"][index][key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_resume_is_exact(name: str, dtype: torch.dtype) -> None:
    config = quantized(name, stochastic_rounding=True)
    model = make_model(dtype)
    optimizer = QuantizedAdamW(model.parameters(), 1e-3, quantization=config)
    train(model, optimizer, 3)
    other = copy.deepcopy(model)
    resumed = QuantizedAdamW(other.parameters(), 1e-4, quantization=config)
    resumed.load_state_dict(saved(optimizer))
    assert_same_state(resumed, optimizer)
    train(model, optimizer, 2, start=3)
    train(other, resumed, 2, start=3)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_hooks_of_users_see_plain_entries() -> None:
    model = make_model()
    optimizer = QuantizedAdamW(model.parameters())
    train(model, optimizer, 1)
    seen = []

    def look(_: Any, state_dict: dict[str, Any]) -> None:
        seen.append(state_dict["state"][0]["exp_avg_codes"].dtype)

    optimizer.register_load_state_dict_pre_hook(look)
    optimizer.load_state_dict(saved(optimizer))
    optimizer.load_state_dict(saved(optimizer))
    assert seen == [torch.uint8] * 2


def test_copies_and_pickles_keep_their_plan() -> None:
    model = make_model()
    first = next(model.parameters())
    optimizer = QuantizedAdamW(model.parameters(), full_precision=[first])
    train(model, optimizer, 1)
    clone = copy.deepcopy(optimizer)
    assert clone.quantization_plan() == optimizer.quantization_plan()
    assert clone.quantization_config == optimizer.quantization_config
    assert_same_state(clone, optimizer)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_export_and_import(name: str) -> None:
    plain, coded = MAKERS[name]
    options = {"momentum": 0.9} if name == "sgd" else {}
    model = make_model()
    optimizer = coded(model.parameters(), 1e-3, **options)
    train(model, optimizer, 3)
    exported = optimizer.full_precision_state_dict()
    target = plain(model.parameters(), 1e-3, **options)
    target.load_state_dict(exported)
    for index, entry in exported["state"].items():
        for key, value in entry.items():
            assert torch.equal(target.state_dict()["state"][index][key], value)
    imported = coded(model.parameters(), 1e-3, **options)
    imported.load_state_dict(saved(target))
    for index, entry in imported.full_precision_state_dict()["state"].items():
        for key, value in entry.items():
            error = value - exported["state"][index][key]
            assert error.norm() <= 0.01 * value.norm()
    train(model, imported, 1)


def test_states_move_between_plans() -> None:
    model = make_model()
    optimizer = QuantizedAdamW(model.parameters())
    train(model, optimizer, 2)
    weight = next(model.parameters())
    full = QuantizedAdamW(model.parameters(), full_precision=[weight])
    full.load_state_dict(saved(optimizer))
    values = optimizer.full_precision_state_dict()["state"][0]["exp_avg"]
    assert torch.equal(full.state[weight]["exp_avg"], values)


def test_other_formats_say_so() -> None:
    model = make_model()
    optimizer = QuantizedAdamW(model.parameters())
    train(model, optimizer, 1)
    other = QuantizedAdamW(model.parameters(), quantization=quantized("dynamic8"))
    with pytest.raises(ValueError, match=r"'2/expanded_fp8/expanded_fp8', but the optimizer uses"):
        other.load_state_dict(saved(optimizer))
    for stamp in ("3/unheard_of", "1/expanded_fp8/expanded_fp8", "2/expanded_fp8/int4"):
        foreign = saved(optimizer)
        foreign["param_groups"][0]["quantization"] = stamp
        told = f"format '{stamp}'; .* reads version 2 of expanded_fp8, dynamic8, float32. Load it"
        with pytest.raises(ValueError, match=told):
            optimizer.load_state_dict(foreign)
    cast = saved(optimizer)
    codes = cast["state"][0]["exp_avg_codes"]
    for dtype in (torch.float32, torch.int64):
        cast["state"][0]["exp_avg_codes"] = codes.to(dtype)
        with pytest.raises(ValueError, match=f"{dtype}, expected torch.uint8: it was cast on the"):
            optimizer.load_state_dict(cast)
    wide = [nn.Parameter(torch.zeros(*p.shape[:-1], 2 * p.shape[-1])) for p in model.parameters()]
    with pytest.raises(ValueError, match=r"shape \(.*\) does not fit a parameter of shape"):
        QuantizedAdamW(wide).load_state_dict(saved(optimizer))
    for key in ("exp_avg_scale", "exp_avg_exponent", "exp_avg_sq_codes", "step"):
        incomplete = saved(optimizer)
        del incomplete["state"][0][key]
        name = "exp_avg_sq" if key.startswith("exp_avg_sq") else key
        with pytest.raises(ValueError, match=rf"of shape \(256, 64\) lacks {name}\."):
            optimizer.load_state_dict(incomplete)
    unmarked = saved(optimizer)
    del unmarked["param_groups"][0]["quantization"]
    with pytest.raises(ValueError, match="has codes, but its parameter groups do not say"):
        optimizer.load_state_dict(unmarked)
    amsgrad = torch.optim.AdamW(model.parameters(), amsgrad=True)
    train(model, amsgrad, 1)
    with pytest.raises(ValueError, match="'max_exp_avg_sq', which QuantizedAdamW does not know"):
        optimizer.load_state_dict(saved(amsgrad))
