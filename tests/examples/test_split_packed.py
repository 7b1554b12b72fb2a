"""Whether adapters have to be sent again: every kind of change is noticed, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lq_testing.split_runs import client
from split_learning.adapters import LoRAPacking, PackedAdapters, Packing, PrefixPacking
from split_learning.settings import SplitSettings
from torch import Tensor, nn

LORA = {
    f"{layer}.{half}.default.weight": torch.Size(shape)
    for layer in "qv"
    for half, shape in (("lora_A", (2, 6)), ("lora_B", (6 if layer == "q" else 4, 2)))
}
PREFIX = {"prompt_encoder.default.embedding.weight": torch.Size((3, 2 * 2 * 5))}
PACKINGS: dict[str, tuple[Callable[[], Packing], dict[str, torch.Size]]] = {
    "lora": (lambda: LoRAPacking(LORA), LORA),
    "one matrix": (
        lambda: LoRAPacking({"q.lora_A.weight": LORA["q.lora_A.default.weight"]}),
        {"q.lora_A.weight": LORA["q.lora_A.default.weight"]},
    ),
    "prefix": (lambda: PrefixPacking(*next(iter(PREFIX.items())), layers=2), PREFIX),
}


def _step(**options: Any) -> Callable[[nn.Parameter], None]:
    def step(parameter: nn.Parameter) -> None:
        parameter.grad = torch.ones_like(parameter)
        torch.optim.AdamW([parameter], **options).step()

    return step


def _in_inference_mode(parameter: nn.Parameter) -> None:
    with torch.inference_mode():
        parameter[-1, -1] += 1.0


def _load(parameter: nn.Parameter) -> None:
    module = nn.Module()
    module.register_parameter("weight", parameter)
    module.load_state_dict({"weight": torch.zeros_like(parameter)})


def _swap_twice(parameter: nn.Parameter) -> None:
    """The allocator may give the second the place of the parameter's first values."""
    for value in (1.0, 2.0):
        parameter.data = torch.full(parameter.shape, value)


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "optimizer": _step(foreach=False),
    "foreach optimizer": _step(foreach=True),
    "fused optimizer": _step(fused=True),  # torch does not count its changes
    "data": lambda p: p.data[-1, -1].mul_(1.0001),  # nor these
    "numpy": lambda p: p.detach().numpy().__setitem__((-1, -1), 7.0),
    "inference mode": _in_inference_mode,
    "checkpoint": _load,
    "other memory": _swap_twice,
    "sign of zero": lambda p: p.data[0, 0].neg_(),
    "NaN": lambda p: p.data[-1].fill_(float("nan")),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", PACKINGS)
def test_every_change_is_noticed(kind: str, change: str) -> None:
    make, shapes = PACKINGS[kind]
    adapters = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    last = list(adapters)[-1]
    with torch.no_grad():
        adapters[last][0, 0] = 0.0
    packed = PackedAdapters(make())

    def refreshed() -> int:
        packed.refresh(adapters)
        with torch.no_grad():
            expected = make().pack(adapters)
        for name, value in packed.connected(adapters).items():
            assert torch.equal(value.view(torch.int32), expected[name].view(torch.int32))
        return packed.changes

    assert [refreshed(), refreshed()] == [1, 1]
    CHANGES[change](adapters[last])
    assert [refreshed(), refreshed()] == [2, 2]
    adapters[last] = nn.Parameter(adapters[last].detach() * 2 + 1)  # as ``assign=True`` does
    assert refreshed() == 3


def test_another_dtype_is_a_change() -> None:
    make, shapes = PACKINGS["lora"]
    adapters = {name: nn.Parameter(torch.randn(shape).half()) for name, shape in shapes.items()}
    packed = PackedAdapters(make())
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for value in adapters.values():  # of the same bits, where it has as many
            value.data = value.data.view(dtype) if dtype.itemsize == 2 else value.data.to(dtype)
        packed.refresh(adapters)
        assert {value.dtype for value in packed.matrices.values()} == {dtype}
    assert packed.changes == 3


@pytest.mark.parametrize("kind", PACKINGS)
def test_gradients_are_those_of_packing(kind: str) -> None:
    make, shapes = PACKINGS[kind]
    adapters = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    packed = PackedAdapters(make())
    with torch.inference_mode():  # as in a validation
        packed.refresh(adapters)
    packed.refresh(adapters)
    assert packed.changes == 1
    assert not any(value.is_inference() for value in packed.matrices.values())
    weights: dict[str, Tensor] = {k: torch.randn(v.shape) for k, v in packed.matrices.items()}
    found = []
    for matrices in (packed.connected(adapters), make().pack(adapters)):
        loss = torch.stack([(matrices[name] * weights[name]).sum() for name in weights]).sum()
        found.append(torch.autograd.grad(loss, list(adapters.values())))
    torch.testing.assert_close(found[0], found[1])


def test_what_arrives_is_the_same_for_all_batches_of_a_step() -> None:
    model = client(SplitSettings(), None)  # type: ignore[arg-type]  # which it does not ask
    adapters = model.adapters.values()
    model._packed.refresh(adapters)
    first = model.link.prepare(model._packed, learning=True)
    sent = model.link._adapters
    again = model.link.prepare(model._packed, learning=True)
    assert model.link._adapters is sent
    assert first.keys() == again.keys() == model._packed.matrices.keys()
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert 0.0 < float((value - model._packed.matrices[name]).abs().max()) < 0.01
    assert model.link.prepare(model._packed, learning=False) == {}
    assert model.gates is not None
    for gate in model.gates.gates.values():  # with other widths the same values have other codes
        gate.q.sub_(2.0)
        gate.refresh()
    narrow = model.link.prepare(model._packed, learning=True)
    assert all(not torch.equal(value, first[name]) for name, value in narrow.items())
    assert model.link._adapters is not sent
    sent = model.link._adapters
    with torch.no_grad():
        adapters[next(iter(adapters))][0, 0] += 1.0
    model._packed.refresh(adapters)
    model.link.prepare(model._packed, learning=False)
    assert model.link._adapters is not sent
