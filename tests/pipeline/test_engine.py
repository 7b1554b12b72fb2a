"""Steps of pipelines whose ranks are threads: results, payloads, overlap, what is kept, errors."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lq_testing.pipeline_toys import (
    BATCH,
    WIDTH,
    Boundary,
    ThreadLinks,
    ThreadWork,
    Toy,
    make_data,
    make_layers,
    make_stages,
    make_toy,
)
from torch import Tensor, nn

from lq_lightning.pipeline.aq_sgd import AQSGDQuantization
from lq_lightning.pipeline.boundary import make_boundary_codec
from lq_lightning.pipeline.engine import PipelineEngine
from lq_lightning.pipeline.execution import Inbox, Stage
from lq_lightning.pipeline.message import BoundaryCodec, Message
from lq_lightning.pipeline.schedules import Key, in_flight

CASES = [
    ("gpipe", 2, 3, 1),
    ("1f1b", 4, 6, 1),
    ("eager_1f1b", 3, 5, 1),
    ("interleaved_1f1b", 4, 8, 2),
    ("zero_bubble", 2, 4, 1),
    ("zero_bubble", 4, 8, 2),
    ("zbv", 4, 8, 2),
    ("interleaved_1f1b", 1, 2, 3),
]


def _single(num_layers: int, count: int) -> tuple[nn.ModuleList, list[Tensor]]:
    layers = make_layers(num_layers)
    (whole,) = make_stages(layers, 1, make_data(count))
    losses = []
    for index in range(count):
        whole.index = index
        loss = whole()
        loss.backward()
        losses.append(loss.detach())
    return layers, losses


def _last(toy: Toy, results: list[list[Any]]) -> list[Any]:
    found = [result for result in results if result]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_process(case: tuple[str, int, int, int]) -> None:
    schedule, size, count, per_rank = case
    expected, losses = _single(2 * size * per_rank, count)
    toy = make_toy(schedule, size, count, per_rank)

    def each(engine: PipelineEngine) -> list[list[Any]]:
        with torch.inference_mode():
            first = engine.evaluate(Boundary())
        step = engine.step(Boundary())
        with torch.inference_mode():
            again = engine.evaluate(Boundary(), num_microbatches=2)
        return [first, step, again, engine.step(Boundary())]

    results = toy.run(each)
    first, step, again, second = (_last(toy, [r[i] for r in results]) for i in range(4))
    assert torch.equal(torch.stack(step), torch.stack(losses))
    assert torch.equal(torch.stack(second), torch.stack(losses))
    assert not any(loss.requires_grad for loss in step)
    for outputs, number in ((first, count), (again, 2)):
        assert [output["index"] for output in outputs] == list(range(number))
        assert all(torch.equal(o["loss"], x) for o, x in zip(outputs, losses, strict=False))
    for mine, theirs in zip(toy.layers.parameters(), expected.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, 2 * theirs.grad, rtol=1e-5, atol=1e-7)
    toy.close()


def test_hidden_states_that_no_codec_takes_are_refused_before_anything_is_sent() -> None:
    codecs = (make_boundary_codec("int4"), make_boundary_codec("none", True))
    toy = make_toy("1f1b", 2, 2, codecs=lambda: codecs)
    for engine in toy.engines:
        for run in (engine.step, engine.evaluate, engine.step):
            with pytest.raises(ValueError, match="tiles of 64 channels"):
                run(Boundary())
    assert not toy.ways[0, 1].sizes
    toy.close()


class Rounding(BoundaryCodec):
    """Sends what is exact in bf16 as bf16, and counts."""

    name = "rounding"

    def __init__(self) -> None:
        self.encoded: list[Message] = []
        self.decoded: list[Message] = []
        self.asked: list[Message] = []

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None: ...

    def bits_per_value(self, shape: Sequence[int], dtype: torch.dtype) -> float:
        return 16

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype, message: Message) -> int:
        self.asked.append(message)
        return 2 * torch.Size(shape).numel() + message.microbatch  # sizes of their own

    def encode(self, x: Tensor, message: Message) -> Tensor:
        assert not x.requires_grad
        self.encoded.append(message)
        payload = x.to(torch.bfloat16).contiguous().view(torch.uint8).flatten()
        return torch.cat([payload, torch.zeros(message.microbatch, dtype=torch.uint8)])

    def decode(
        self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, message: Message
    ) -> Tensor:
        self.decoded.append(message)
        values = payload[: payload.numel() - message.microbatch].clone()
        return values.view(torch.bfloat16).view(tuple(shape)).to(dtype)


@pytest.mark.parametrize("case", [("1f1b", 2, 4, 1), ("zbv", 2, 4, 2)], ids=str)
def test_payloads_are_those_of_the_codec(case: tuple[str, int, int, int]) -> None:
    schedule, size, count, per_rank = case
    toy = make_toy(schedule, size, count, per_rank, codecs=lambda: (Rounding(), Rounding()))
    samples = torch.arange(count * BATCH)
    toy.run(lambda engine: engine.step(Boundary(), samples))
    sizes = [2 * BATCH * WIDTH + index for index in range(count)]
    assert sorted(toy.ways[0, 1].sizes + toy.ways[1, 0].sizes) == sorted(sizes * 2 * per_rank)
    for rank, engine in enumerate(toy.engines):
        sent = toy.ways[rank, 1 - rank].sizes
        assert engine.traffic.sent == sum(sent)
        values = engine.traffic.forward_values + engine.traffic.backward_values
        assert values == len(sent) * BATCH * WIDTH
    sender, receiver = (engine._endpoint for engine in toy.engines)
    assert isinstance(sender.forward_codec, Rounding)
    assert isinstance(receiver.forward_codec, Rounding)
    sent, decoded = sender.forward_codec.encoded, receiver.forward_codec.decoded
    assert [m.microbatch for m in sent] == [m.microbatch for m in decoded] != []
    for message in decoded:
        assert message.samples is not None
        assert message.samples.tolist() == [BATCH * message.microbatch + i for i in range(BATCH)]
        assert (message.training, message.backward) == (True, False)
    assert all(m.backward for m in receiver.backward_codec.encoded)  # type: ignore[attr-defined]
    asked = [(m.boundary, m.microbatch) for m in receiver.forward_codec.asked]
    assert sorted(asked) == sorted((m.boundary, m.microbatch) for m in decoded)
    toy.close()


@pytest.mark.parametrize("capacity", [1, 5, 100])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_sizes_of_repeated_samples_are_known_before_they_arrive(
    schedule: str, capacity: int
) -> None:
    """Receives are posted ahead, some of samples whose first message has not yet arrived."""
    count, channels = 12, 16
    config = AQSGDQuantization(tile_size=channels, cache_nbytes=2 * channels * capacity)

    def codecs() -> tuple[BoundaryCodec, BoundaryCodec]:
        return make_boundary_codec(config), make_boundary_codec("none", backward=True)

    layers = nn.ModuleList([nn.Linear(WIDTH, channels), nn.Linear(channels, WIDTH)])
    toy = make_toy(schedule, 2, count, layers=layers, codecs=codecs)
    (sender, _), (receiver, _), data = codecs(), codecs(), make_data(count)
    boundary = Boundary((BATCH, channels))
    for step in range(3):
        samples = torch.randint(7, (count, BATCH), generator=torch.Generator().manual_seed(step))
        expected = []
        for index in range(count):  # nothing ahead
            of = Message(boundary=0, backward=False, microbatch=index, samples=samples[index])
            payload = sender.encode(layers[0](data[index]), of)
            hidden = receiver.decode(payload, boundary.shape, boundary.dtype, of)
            expected.append((layers[1](hidden) - data[index].flip(-1)).square().mean())
        flat = samples.view(-1)
        losses = toy.run(lambda engine, samples=flat: engine.step(boundary, samples))[1]
        assert torch.equal(torch.stack(losses), torch.stack(expected))
        toy.run(lambda engine: engine.evaluate(boundary))
    assert len(set(toy.ways[0, 1].sizes)) > 2 or capacity == 1
    toy.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_keeps_what_is_counted(
    case: tuple[str, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[int, list[int]] = {}
    toy = make_toy(*case)
    owner = {
        id(stage): rank
        for rank, engine in enumerate(toy.engines)
        for stage in engine._stages.values()
    }

    def count(compute: Callable[..., Any]) -> Callable[..., Any]:
        def counted(self: Stage, *args: Any) -> Any:
            output = compute(self, *args)
            rank = owner[id(self)]
            stages = toy.engines[rank]._stages.values()
            kept.setdefault(rank, []).append(sum(len(stage._kept) for stage in stages))
            return output

        return counted

    for name in ("forward", "backward_input"):
        monkeypatch.setattr(Stage, name, count(getattr(Stage, name)))
    toy.run(lambda engine: engine.step(Boundary()))
    for rank, expected in enumerate(in_flight(*case)):
        assert max(kept[rank]) == expected
        assert all(not s._kept and not s._halves for s in toy.engines[rank]._stages.values())
    toy.close()


class Takes(torch.autograd.Function):
    """Computes for a while, each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, links: ThreadLinks, seconds: float) -> Tensor:
        ctx.links, ctx.seconds = links, seconds
        links.clock += seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.links.clock += ctx.seconds
        return g, None, None


class Slow(nn.Module):
    links: ThreadLinks

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Takes.apply(x * self.scale, self.links, 1.0)


def _link_layers(toy: Toy) -> None:
    for engine in toy.engines:
        for stage in engine._stages.values():
            for layer in stage.module.layers:  # type: ignore[union-attr]
                layer.links = engine._endpoint.links


@pytest.mark.parametrize(
    ("schedule", "transfer", "in_turn", "expected"),
    [
        # Two ranks, 16 micro-batches, a unit of time each for forward and backward. Computation
        # alone takes 32, links 16 * transfer each way: one after another 32 + 32 * transfer. These
        # are what the orders allow: no transfer waits for a computation that it does not need.
        ("gpipe", 1.0, False, 32 + 4),
        ("gpipe", 4.0, False, 2 * 16 * 4 + 4),  # each way in its half of the step
        ("1f1b", 0.25, False, 16 * (4 + 2 * 0.25) / 2 + 2),  # two round trips at a time
        ("1f1b", 4.0, False, 16 * (4 + 2 * 4) / 2 + 4),
        ("eager_1f1b", 1.0, False, 32 + 4),  # hidden behind computation
        ("eager_1f1b", 2.0, False, 32 + 6),  # links and ranks are always busy
        ("eager_1f1b", 4.0, False, 16 * 4 + 8),  # both ways are always busy
        ("zero_bubble", 0.25, False, 16 * (4 + 2 * 0.25) / 2 + 2),
        # Where receives are posted in turn a few transfers wait.
        ("eager_1f1b", 1.0, True, 32 + 4),
        ("eager_1f1b", 2.0, True, 32 + 8),
        ("1f1b", 0.25, True, 16 * (4 + 2 * 0.25) / 2 + 2.25),
    ],
)
def test_transfers_overlap_computation(
    schedule: str, transfer: float, in_turn: bool, expected: float
) -> None:
    layers = nn.ModuleList(Slow() for _ in range(2))
    speed = BATCH * WIDTH * 4 / transfer
    toy = make_toy(schedule, 2, 16, layers=layers, bytes_per_s=speed)
    _link_layers(toy)
    for engine in toy.engines:
        engine._endpoint.links.occupy_device = in_turn
    toy.run(lambda engine: engine.step(Boundary()))
    toy.close()
    clocks = [engine._endpoint.links.clock for engine in toy.engines]  # type: ignore[attr-defined]
    assert max(clocks) == expected


class Sync(torch.autograd.Function):
    """Waits for the whole device, each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, links: ThreadLinks) -> Tensor:
        ctx.links = links
        links.synchronize()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.links.synchronize()
        return g, None


class Synchronizes(nn.Module):
    links: ThreadLinks

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Sync.apply(self.linear(x), self.links)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stages_may_wait_for_all_transfers(case: tuple[str, int, int, int]) -> None:
    # As autotuners and allocators do. No rank may wait for what comes after the computation that it
    # is in, or two could wait for each other.
    _, size, _, per_rank = case
    layers = nn.ModuleList(Synchronizes() for _ in range(size * per_rank))
    toy = make_toy(*case, layers=layers)
    _link_layers(toy)
    for engine in toy.engines:
        engine._endpoint.links.occupy_device = True
    toy.run(lambda engine: engine.step(Boundary()))
    toy.run(lambda engine: engine.evaluate(Boundary()))
    toy.close()


def test_an_error_in_a_stage_is_raised_and_ends_the_pipeline() -> None:
    toy = make_toy("1f1b", 2, 2)

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("mask")

    toy.layers[3] = Broken()
    toy.engines[1]._stages[1].module.layers[1] = Broken()  # type: ignore[index, operator]
    payload = torch.zeros(BATCH * WIDTH * 4, dtype=torch.uint8)
    toy.ways[0, 1].sends.put((payload, ThreadWork(toy.engines[0]._endpoint.links)))  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        toy.engines[1].step(Boundary())
    with pytest.raises(RuntimeError, match="earlier step.*KeyError: 'mask'"):
        toy.engines[1].step(Boundary())
    toy.close()


class FailsOnce(nn.Module):
    """Raises in the second micro-batch, in one of the directions; remembers what it saved."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.backward = backward
        self.saved: list[weakref.ref[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(x)
        self.saved.append(weakref.ref(y.untyped_storage()))
        out = y * self.weight
        if len(self.saved) == 2:
            self.fail() if not self.backward else out.register_hook(self.fail)
        return out

    def fail(self, *_: Tensor) -> None:
        raise MemoryError("enough")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
def test_a_step_that_failed_keeps_nothing(schedule: str, backward: bool) -> None:
    layer = FailsOnce(backward)
    layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), layer])
    toy = make_toy(schedule, 1, 3, 2, layers=layers)
    (engine,) = toy.engines
    with contextlib.suppress(MemoryError):
        engine.step(Boundary())
    assert len(layer.saved) >= 2
    gc.collect()
    assert all(ref() is None for ref in layer.saved)
    with pytest.raises(RuntimeError, match="MemoryError: enough"):
        engine.step(Boundary())
    toy.close()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (torch.zeros(3, WIDTH), r"stage 0 returned \(\(3, 8\), torch.float32\)"),
        (torch.zeros(BATCH, WIDTH, dtype=torch.bfloat16), "torch.bfloat16"),
        ([1], "returned list"),
    ],
    ids=["shape", "dtype", "type"],
)
@pytest.mark.parametrize("training", [True, False])
def test_refuses_other_hidden_states(output: Any, message: str, training: bool) -> None:
    stage = Stage(_Returns(output), 0, 2)
    with pytest.raises(RuntimeError, match=message):
        (stage.forward if training else stage.evaluate)(0, None, Boundary())


def test_refuses_a_loss_of_many_values() -> None:
    with pytest.raises(RuntimeError, match=r"one value, not \(2, 8\)"):
        Stage(_Returns(torch.zeros(BATCH, WIDTH)), 1, 2).forward(0, torch.zeros(1), Boundary())


class _Returns(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, hidden: Tensor | None = None) -> Any:
        return self.output


def test_a_stage_without_gradients_takes_part() -> None:
    toy = make_toy("1f1b", 3, 3)
    for layer in toy.layers[:2]:
        layer.requires_grad_(False)  # all of the first stage
    toy.run(lambda engine: engine.step(Boundary()))
    expected, _ = _single(6, 3)
    for index, layer in enumerate(toy.layers):
        for mine, theirs in zip(layer.parameters(), expected[index].parameters(), strict=True):
            assert (mine.grad is None) == (index < 2)
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)
    toy.close()


def test_refuses_training_without_gradients() -> None:
    toy = make_toy("1f1b", 2, 2)
    with torch.no_grad(), pytest.raises(RuntimeError, match="call `evaluate`"):
        toy.engines[0].step(Boundary())
    toy.close()


def test_a_message_behind_many_others_is_received() -> None:
    posted: list[int] = []
    links: Any = SimpleNamespace(
        occupy_device=False,
        receive=lambda payload, peer: (
            posted.append(len(payload)) or SimpleNamespace(wait=lambda: None)
        ),
    )
    keys = [Key("F", 1, index) for index in range(8)]
    expected = ((key, 0, index) for index, key in enumerate(keys))
    inbox = Inbox(links, {0: expected}, torch.device("cpu"))
    inbox.advance(0)
    assert len(posted) == 4
    assert len(inbox.take(keys[6], 0)) == 6
    assert posted == [0, 1, 2, 3, 4, 5, 6]
