"""In mixed precision the micro-batches of a step share one copy of every weight."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import ref

import lightning.pytorch as pl
import pytest
import torch
from lq_testing import pipeline_toys
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lq_lightning._compat.saved_tensors import hasten_casts
from lq_lightning.foundation.parameters import is_copy_of_parameter
from lq_lightning.pipeline.interceptor import LayerInterceptor
from lq_lightning.pipeline.schedules import rank_of_stage
from lq_lightning.plugins import FullyShardedPrecision
from lq_lightning.strategies.pipelines import run
from lq_lightning.strategies.pipelines.run import MicroBatches

COUNT = 3
LAYERS = 3


def _precision(once: bool) -> FullyShardedPrecision:
    """Mixed precision; weights are cast once for a step, or for every micro-batch."""
    precision = FullyShardedPrecision("bf16-mixed")
    if not once:
        precision.casting_once = nullcontext  # type: ignore[method-assign, assignment]
    return precision


class Net(pl.LightningModule):
    """A step that does what ``form`` says; keeps the copies of weights that autograd saves."""

    def __init__(self, form: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))
        self.copies: list[Tensor] = []

    def save(self, tensor: Tensor) -> Tensor:
        if is_copy_of_parameter(tensor) and tensor.dtype == torch.bfloat16:
            self.copies.append(tensor)
        return tensor

    def layer(self, index: int, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layers[index](x))

    def training_step(self, x: Tensor) -> Tensor:
        call: Any = self.layer
        again = partial(checkpoint, self.layer, use_reentrant=self.form == "reentrant")
        if self.form in ("checkpointed", "reentrant"):
            call = again
        if self.form == "looks first":
            with torch.no_grad():
                self.layer(0, x)
        with torch.autograd.graph.saved_tensors_hooks(self.save, lambda tensor: tensor):
            for index in range(LAYERS):
                x = (again if self.form == "one checkpointed" and index == 1 else call)(index, x)
        if self.form == "changes a weight":
            with torch.no_grad():
                self.layers[1].weight.mul_(1.5)
        return x.square().mean()


def _uncut() -> LayerInterceptor:
    return LayerInterceptor(())


def _forward(micro: MicroBatches, index: int) -> Tensor:
    loss: Tensor = micro.enter(lambda _: micro.run(index, is_last=True), None)
    return loss


def _batches(device: str = "cpu") -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, 8, generator=generator).to(device) for _ in range(COUNT)]
    return [(batch.requires_grad_(),) for batch in batches]


def _count(copies: list[Tensor]) -> int:
    return len({copy.untyped_storage().data_ptr() for copy in copies})


def _train(form: str, once: bool) -> tuple[Net, list[Tensor | None]]:
    """Run all forward passes, then all backward passes; return losses and gradients."""
    net = Net(form)
    micro, batches = MicroBatches(net, _precision(once), _uncut()), _batches()
    with micro.running("training_step", batches, 1.0):
        losses = [_forward(micro, index) for index in range(COUNT)]
        for loss in losses:
            loss.backward()
    return net, [loss.detach() for loss in losses] + [
        tensor.grad for tensor in (*net.parameters(), *(x for (x,) in batches))
    ]


@pytest.mark.parametrize(
    "form", ["plain", "checkpointed", "reentrant", "looks first", "changes a weight"]
)
def test_micro_batches_in_flight_share_copies_of_weights(form: str) -> None:
    alone, expected = _train(form, once=False)
    net, found = _train(form, once=True)
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert one.equal(other)
    counts = [_count(alone.copies), _count(net.copies)]
    if form in ("checkpointed", "reentrant"):  # not saved, but cast for each micro-batch or once
        assert counts == [0, 0]
    elif form == "changes a weight":
        assert counts == [COUNT * LAYERS] * 2
    else:
        assert counts == [COUNT * LAYERS, LAYERS]


def test_copies_go_with_the_step_and_are_not_made_of_gathered_weights() -> None:
    x = torch.randn(1, 8)
    for sharded in (False, True):
        net = Net()
        micro = MicroBatches(net, precision := _precision(once=True), _uncut())
        if sharded:
            micro._root = net  # type: ignore[assignment]
        with micro.running("training_step", [], None):
            with precision.forward_context():
                assert torch.is_autocast_cache_enabled() != sharded
                net.layers[0](x)
            with torch.no_grad():  # unseen by the cache
                net.layers[0].weight.data.zero_()
                net.layers[0].bias.data.zero_()
            with precision.forward_context():
                assert net.layers[0](x).any() != sharded
        with precision.forward_context():
            assert not torch.is_autocast_cache_enabled()
            assert not net.layers[0](x).any()


def test_copies_go_with_a_step_that_fails_within_autocast() -> None:
    layer, x, precision = nn.Linear(8, 8, bias=False), torch.randn(1, 8), _precision(once=True)
    with torch.autocast("cpu", torch.bfloat16):
        failing = pytest.raises(RuntimeError, match="shape")
        with failing, precision.casting_once(), precision.forward_context():
            layer(layer(x)[:, 1:])
        layer.weight.data.zero_()  # unseen by the cache
        assert not layer(x).any()
    assert not precision.casts_once


@pytest.mark.parametrize("name", ["32-true", "bf16-true"])
def test_only_mixed_precision_casts(name: Any) -> None:
    precision = FullyShardedPrecision(name)
    with precision.casting_once():
        assert not precision.casts_once


def test_evaluation_may_return_anything() -> None:
    micro = MicroBatches(Net(), _precision(once=True), _uncut())
    with micro.running("training_step", [], None):
        assert micro.enter(lambda _: "result", None) == "result"


def test_inputs_of_reentrant_checkpoints_go_with_the_backward_pass() -> None:
    """They are leaves, as weights are."""
    net, inputs = Net("reentrant"), list[Any]()
    micro = MicroBatches(net, _precision(once=True), _uncut())
    index = 0

    def note(_: nn.Module, args: tuple[Tensor]) -> None:
        if torch.is_grad_enabled():  # computed again
            inputs.append(ref(args[0]))

    def part(hidden: Tensor | None) -> Tensor:
        loss: Tensor = micro.run(index, is_last=True)
        return loss

    for layer in net.layers:
        layer.register_forward_pre_hook(note)
    with micro.running("training_step", _batches(), 1.0):
        for index in range(COUNT):
            micro.enter(part, None).backward()
            assert len(inputs) == (index + 1) * LAYERS
            assert all(each() is None for each in inputs)


def _casts() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_cache_enabled()


def test_gradients_of_casts_do_not_wait_for_the_end_of_a_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, order, walks = Net(), list[str](), list[Tensor]()
    monkeypatch.setattr(run, "hasten_casts", lambda x: (walks.append(x), hasten_casts(x)))
    micro, batches = MicroBatches(net, _precision(once=True), _uncut()), _batches()
    for index in (2, 1):
        hook = partial(lambda index, _: order.append(f"weight {index}"), index)
        net.layers[index].weight.register_post_accumulate_grad_hook(hook)
    for (x,) in batches:
        x.register_hook(lambda _: order.append(f"input {_casts()}"))
    index = 0

    def part(hidden: Tensor | None) -> Tensor:
        loss: Tensor = micro.run(index, is_last=True)
        return loss

    for change in (True, False):  # gradients may be accumulated over several batches
        with micro.running("training_step", batches, 1.0):
            for index in range(COUNT):
                micro.enter(part, None).backward()
                if change and index == 0:
                    with torch.no_grad():
                        net.layers[1].weight.mul_(2)  # cast again for the other micro-batches
    assert order == ["weight 2", "weight 1", "input False"] * COUNT * 2
    assert len(walks) == 3  # graphs alike are not walked through again


def test_only_casts_of_leaves_are_hastened() -> None:
    leaf = torch.randn(2, requires_grad=True)
    casts = leaf.bfloat16(), (leaf * 2).bfloat16()
    hasten_casts(casts[0] + casts[1])
    hasten_casts(torch.zeros(1))
    assert [cast.grad_fn._sequence_nr() == 2**64 - 1 for cast in casts] == [True, False]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copies_stay_where_backward_passes_enter_autocast(device: str) -> None:
    """As checkpointing does, on GPUs in a thread of autograd if it may."""
    net = Net("one checkpointed").to(device)
    precision = _precision(once=True)
    precision.device_type = device
    micro = MicroBatches(net, precision, _uncut())
    with micro.running("training_step", _batches(device), 1.0):
        loss = _forward(micro, 0)
        for index in range(1, COUNT):
            following = _forward(micro, index)
            loss.backward()
            loss = following
    assert _count(net.copies) == LAYERS - 1


class Mixed(nn.Module):
    """A layer in the precision of its rank."""

    def __init__(self, layer: nn.Module, precision: FullyShardedPrecision) -> None:
        super().__init__()
        self.layer = layer
        self.precision = precision

    def forward(self, x: Tensor) -> Tensor:
        with self.precision.forward_context():
            result: Tensor = self.layer(x)
        return result


def _toy_gradients(schedule: str, stages_per_rank: int, once: bool) -> list[Tensor | None]:
    stages = 2 * stages_per_rank
    precisions = [_precision(once) for _ in range(2)]
    layers = nn.ModuleList(
        Mixed(layer, precisions[rank_of_stage(schedule, index // 2, stages, 2)])
        for index, layer in enumerate(pipeline_toys.make_layers(2 * stages))
    )
    toy = pipeline_toys.make_toy(schedule, 2, 4, stages_per_rank, layers=layers)

    def step(engine: Any) -> None:
        with precisions[toy.engines.index(engine)].casting_once():
            engine.step(pipeline_toys.Boundary())

    try:
        toy.run(step)
    finally:
        toy.close()
    return [parameter.grad for parameter in layers.parameters()]


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 2), ("zbv", 2)],
)
def test_schedules_have_the_same_gradients(schedule: str, stages_per_rank: int) -> None:
    found = _toy_gradients(schedule, stages_per_rank, once=True)
    expected = _toy_gradients(schedule, stages_per_rank, once=False)
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert one.equal(other)
