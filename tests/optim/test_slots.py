"""What optimizers remember between steps: every change of parameters and states is noticed.

The optimizer under test remembers; its twin forgets before every step. Addresses are compared.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from lq_testing.cases import on_ranks, rank_tests
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lq_lightning.kernels.optimizer_step.op import PreparedTensor, optimizer_step
from lq_lightning.optim import OptimizerQuantization, QuantizedAdamW, QuantizedSGD, base
from lq_lightning.optim.base import QuantizedOptimizer

CONFIG = OptimizerQuantization(min_numel=0)
SHAPE = (2, 128)
CODES = "exp_avg_codes"


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def step_where_it_was_prepared(
    tensors: list[list[Tensor]], prepared: list[PreparedTensor], *arguments: Any
) -> None:
    for item, parts in zip(prepared, tensors, strict=True):
        assert item.addresses == [part.data_ptr() for part in parts]
    optimizer_step(tensors, prepared, *arguments)


@pytest.fixture(autouse=True)
def _addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "optimizer_step", step_where_it_was_prepared)


def build(device: torch.device, **options: Any) -> QuantizedAdamW:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(SHAPE, device=device)) for _ in range(2)]
    return QuantizedAdamW(params, 1e-2, **{"quantization": CONFIG, **options})


def parameters(optimizer: QuantizedOptimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def take_step(optimizer: QuantizedOptimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for param in parameters(optimizer):
        grad = torch.randn(param.shape, generator=generator)
        param.grad = grad.to(param.device, param.dtype)
    optimizer.step()


def snapshot(optimizer: QuantizedOptimizer) -> list[Tensor]:
    found = []
    for param in parameters(optimizer):
        found += [param, *[value for _, value in sorted(optimizer.state[param].items())]]
    return [tensor.detach().cpu().clone() for tensor in found]


def assert_same(one: QuantizedOptimizer, other: QuantizedOptimizer) -> None:
    assert all(map(torch.equal, snapshot(one), snapshot(other)))


def first_entry(optimizer: QuantizedOptimizer) -> dict[str, Any]:
    entry: dict[str, Any] = optimizer.state[parameters(optimizer)[0]]
    return entry


KEPT: list[Any] = []  # what a change replaced: memory that is free could be used again


def replace(tensors: dict[str, Tensor], key: str, value: Tensor) -> None:
    KEPT.append(tensors[key])
    tensors[key] = value


def move(tensor: Tensor) -> None:
    KEPT.append(tensor.data)
    tensor.data = tensor.data.clone()


def replace_parameter(optimizer: QuantizedOptimizer) -> None:
    params = optimizer.param_groups[0]["params"]
    KEPT.append(params[0])
    other = nn.Parameter(params[0].detach().clone())
    optimizer.state[other] = {k: v.clone() for k, v in optimizer.state[params[0]].items()}
    params[0] = other


def replace_entry(optimizer: QuantizedOptimizer) -> None:
    param = parameters(optimizer)[0]
    KEPT.append(optimizer.state[param])
    optimizer.state[param] = {k: v.clone() for k, v in optimizer.state[param].items()}


def clear(optimizer: QuantizedOptimizer) -> None:
    KEPT.extend(list(optimizer.state.values()))
    optimizer.state.clear()


def clear_one(optimizer: QuantizedOptimizer) -> None:
    KEPT.append(dict(first_entry(optimizer)))
    first_entry(optimizer).clear()


def load(optimizer: QuantizedOptimizer) -> None:
    KEPT.extend(list(optimizer.state.values()))
    other = build(parameters(optimizer)[0].device)
    take_step(other, 7)
    optimizer.load_state_dict(other.state_dict())


def add_group(optimizer: QuantizedOptimizer) -> None:
    device = parameters(optimizer)[0].device
    param = nn.Parameter(torch.ones(SHAPE, device=device))
    optimizer.add_param_group({"params": [param], "lr": 0.5})


def set_group(key: str, value: Any) -> Callable[[QuantizedOptimizer], None]:
    def change(optimizer: QuantizedOptimizer) -> None:
        optimizer.param_groups[0][key] = value

    return change


def reverse(optimizer: QuantizedOptimizer) -> None:
    optimizer.param_groups[0]["params"].reverse()


CHANGES: dict[str, Callable[[QuantizedOptimizer], Any]] = {
    "nothing": lambda o: None,
    "parameter.data": lambda o: move(parameters(o)[0]),
    "parameter in its group": replace_parameter,
    "order of parameters": reverse,
    "codes.data": lambda o: move(first_entry(o)[CODES]),
    "scale.data": lambda o: move(first_entry(o)["exp_avg_sq_scale"]),
    "codes": lambda o: replace(first_entry(o), CODES, first_entry(o)[CODES].clone()),
    "step": lambda o: replace(first_entry(o), "step", torch.tensor(9.0)),
    "step of another shape": lambda o: replace(first_entry(o), "step", torch.tensor([9.0])),
    "step as a number": lambda o: replace(first_entry(o), "step", 9),  # type: ignore[arg-type]
    "value of step": lambda o: first_entry(o)["step"].fill_(9),
    "step.data": lambda o: setattr(first_entry(o)["step"], "data", torch.tensor(9.0)),
    "entry": replace_entry,
    "cleared entry": clear_one,
    "cleared state": clear,
    "load_state_dict": load,
    "group": add_group,
    "lr": set_group("lr", 0.5),
    "lr as a tensor": set_group("lr", torch.tensor(0.5)),
    "betas": set_group("betas", (0.5, 0.5)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed(name: str, device: torch.device) -> None:
    optimizers = build(device), build(device)
    for optimizer, remembers in zip(optimizers, (True, False), strict=True):
        for number in range(1, 3):
            take_step(optimizer, number)
        CHANGES[name](optimizer)
        for number in range(3, 5):
            if not remembers:
                optimizer._caches = ()
            take_step(optimizer, number)
    assert_same(*optimizers)
    assert all(type(o.state[p]["step"]) is Tensor for o in optimizers for p in parameters(o))


def test_slots_are_used(device: torch.device) -> None:
    optimizer = build(device)
    take_step(optimizer, 1)
    slots = list(optimizer._caches)
    take_step(optimizer, 2)
    assert all(a is b for a, b in zip(optimizer._caches, slots, strict=True))
    parameters(optimizer)[1].grad = None
    optimizer.step()
    take_step(optimizer, 3)
    assert all(a is b for a, b in zip(optimizer._caches, slots, strict=True))
    move(parameters(optimizer)[0])
    take_step(optimizer, 4)
    assert [a is b for a, b in zip(optimizer._caches, slots, strict=True)] == [False, True]


def test_changes_in_place_are_refused(device: torch.device) -> None:
    """They keep the address, and for states even the shape."""
    optimizer = build(device)
    take_step(optimizer, 1)
    entry = first_entry(optimizer)
    codes = entry[CODES]
    entry[CODES] = codes.view(torch.int8)
    with pytest.raises(ValueError, match="first is torch.int8"):
        take_step(optimizer, 2)
    entry[CODES] = codes
    take_step(optimizer, 3)
    param = parameters(optimizer)[0]
    param.data = param.data.view(4, 64)
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=r"first is .* expected .* \(4, 64\)"):
        optimizer.step()


def test_transposed_and_converted_parameters(device: torch.device) -> None:
    options = {"quantization": OptimizerQuantization(min_numel=0, stochastic_rounding=True)}
    optimizers = build(device, **options), build(device, **options)
    for optimizer in optimizers:
        params = [nn.Parameter(torch.randn(32, 32).to(device)) for _ in range(2)]
        torch.manual_seed(1)
        for param in params:
            param.data.normal_(generator=torch.Generator(device).manual_seed(1))
        optimizer.param_groups[0]["params"] = params
        take_step(optimizer, 1)
        params[0].data = params[0].data.t()
        params[1].data = params[1].data.bfloat16()
        if optimizer is optimizers[1]:
            optimizer._caches = ()
        take_step(optimizer, 2)
    assert_same(*optimizers)


def test_parameters_change_between_torch_and_kernel(device: torch.device) -> None:
    config = OptimizerQuantization(min_numel=300)  # more than SHAPE has
    optimizer = build(device, quantization=config)
    take_step(optimizer, 1)
    assert "exp_avg" in first_entry(optimizer)

    def step_anew() -> dict[str, Any]:
        optimizer.state.clear()
        take_step(optimizer, 2)
        return first_entry(optimizer)

    optimizer.quantization_config = CONFIG
    assert CODES in step_anew()
    optimizer.quantization_config = config
    assert "exp_avg" in step_anew()
    first, second = parameters(optimizer)
    first.data, first.grad = torch.ones(4, 128, device=device), None
    assert CODES in step_anew()
    reverse(optimizer)
    assert "exp_avg" in step_anew()
    reverse(optimizer)
    optimizer.enable_quantization(config, {first: "asked for"})
    assert "exp_avg" in step_anew()
    optimizer.enable_quantization(config, {})
    assert CODES in step_anew()
    optimizer.param_groups[0]["params"].reverse()
    take_step(optimizer, 3)
    optimizer.state.clear()
    second.data = second.data.bfloat16()
    second.grad = None
    assert step_anew()["exp_avg"].dtype == torch.float32


def test_other_dtype_at_the_same_address(device: torch.device) -> None:
    optimizers = build(device), build(device)
    for optimizer in optimizers:
        take_step(optimizer, 1)
        param = parameters(optimizer)[0]
        KEPT.append(param.data)
        narrow = param.data.to(torch.bfloat16)
        flat = param.data.view(torch.bfloat16).view(-1)[: narrow.numel()]
        param.data = flat.view_as(narrow).copy_(narrow)
        if optimizer is optimizers[1]:
            optimizer._caches = ()
        take_step(optimizer, 2)
    assert_same(*optimizers)


def test_dampening_begins_after_the_first_step(device: torch.device) -> None:
    def train(remembers: bool) -> list[Tensor]:
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(SHAPE, device=device))
        optimizer = QuantizedSGD([param], 0.1, dampening=0.5, quantization=CONFIG)
        for number in range(1, 4):
            if not remembers:
                optimizer._caches = ()
            take_step(optimizer, number)
        return snapshot(optimizer)

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


def test_large_step_counts_stay_those_of_fp32(device: torch.device) -> None:
    optimizer = build(device)
    take_step(optimizer, 1)
    first_entry(optimizer)["step"].fill_(2**24)
    take_step(optimizer, 2)
    assert first_entry(optimizer)["step"] == 2**24


# --- what a slot must not do ------------------------------------------------------------------


def test_nothing_is_kept_alive(device: torch.device) -> None:
    optimizer = build(device)
    take_step(optimizer, 1)
    take_step(optimizer, 2)
    states = [ref(value) for value in first_entry(optimizer).values()]
    optimizer.state.clear()
    gc.collect()
    assert all(state() is None for state in states)
    take_step(optimizer, 3)
    params = [ref(param) for param in parameters(optimizer)]
    states = [ref(value) for value in first_entry(optimizer).values()]
    optimizer.state.clear()
    optimizer.param_groups.clear()
    gc.collect()
    assert all(tensor() is None for tensor in [*params, *states])


def test_copies_and_pickles_begin_without_slots(device: torch.device) -> None:
    optimizer = build(device)
    take_step(optimizer, 1)
    buffer = io.BytesIO()
    torch.save(optimizer.__getstate__(), buffer)
    others = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    for other in others:
        assert len(other._caches) == 0
        assert "_caches" not in vars(other)
    for each in (optimizer, *others):
        take_step(each, 2)
    for other in others:
        assert_same(other, optimizer)
    assert first_entry(optimizer)["step"] == 2


# --- shards -----------------------------------------------------------------------------------


def replace_shard(tensor: DTensor) -> None:
    KEPT.append(tensor._local_tensor)
    tensor._local_tensor = tensor._local_tensor.clone()


def change_shards(rank: int, world: int) -> None:
    base.optimizer_step = step_where_it_was_prepared
    mesh = init_device_mesh("cpu", (world,))
    changes: list[Callable[[DTensor, dict[str, Any]], None]] = [
        lambda param, entry: None,
        lambda param, entry: replace_shard(param),  # as FSDP2 does after loading
        lambda param, entry: replace_shard(entry[CODES]),
        lambda param, entry: move(param._local_tensor),
        lambda param, entry: move(entry[CODES]._local_tensor),
        lambda param, entry: replace(entry, CODES, entry[CODES].clone()),
    ]
    for change in changes:
        results = []
        for remembers in (True, False):
            torch.manual_seed(0)
            param = nn.Parameter(distribute_tensor(torch.randn(3, 128), mesh, [Shard(0)]))
            optimizer = QuantizedAdamW([param], 1e-2, quantization=CONFIG)
            for number in range(1, 4):
                full = torch.randn(3, 128, generator=torch.Generator().manual_seed(number))
                param.grad = distribute_tensor(full, mesh, [Shard(0)])
                if not remembers:
                    optimizer._caches = ()
                optimizer.step()
                if number == 2:
                    change(param, optimizer.state[param])  # type: ignore[arg-type]
            entry = optimizer.state[param]
            results.append([t.to_local() for t in (param, entry[CODES], entry["exp_avg_scale"])])
            assert entry["step"] == 3
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def step_on_gradients_in_flight(rank: int, world: int) -> None:
    """Until then they have no address, or are parts of a sum."""
    base.optimizer_step = step_where_it_was_prepared
    mesh = init_device_mesh("cpu", (world,))
    part = DTensor.from_local(torch.full(SHAPE, rank - 0.25), mesh, [Partial()], run_check=False)
    for grad in (part, part.redistribute(placements=[Replicate()], async_op=True)):
        param = nn.Parameter(distribute_tensor(torch.ones(SHAPE), mesh, [Replicate()]))
        optimizer = QuantizedAdamW([param], 1e-2, weight_decay=0.0, quantization=CONFIG)
        param.grad = grad
        optimizer.step()
        assert torch.allclose(param.to_local(), torch.tensor(0.99))


test_on_ranks = rank_tests(
    on_ranks(change_shards, 2),
    on_ranks(step_on_gradients_in_flight, 2),
)
