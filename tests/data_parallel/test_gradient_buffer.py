"""Gradient sums kept in 8 bits between micro-batches: plain, DDP and FSDP2."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.distributed as dist
from lq_testing.cases import on_ranks, rank_tests
from lq_testing.models import OptionalBlock, TinyLM, batch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lq_lightning._compat.fsdp2 import PackedGradients, announce_packed_gradients, fsdp_units
from lq_lightning._compat.modules import discard_unreduced_gradients
from lq_lightning.codecs import CodecSpec
from lq_lightning.data_parallel import (
    GradientQuantization,
    QuantizedGradientBuffer,
    Topology,
    quantize_communication,
)

MICRO_BATCHES = 4
AGOQ = CodecSpec(code="fp8_e4m3", group_size=128)
STOCHASTIC = CodecSpec(code="int8", group_size=128, rounding="stochastic")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return full.detach().clone()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        n.removeprefix("module."): whole(p.grad)
        for n, p in model.named_parameters()
        if p.grad is not None
    }


def relative_errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == exact.keys()
    return {n: float((found[n] - e).norm() / e.norm()) for n, e in exact.items()}


def exact_sum(world: int, micro_batches: int = MICRO_BATCHES) -> dict[str, Tensor]:
    """Mean over ranks of the gradient sums of an unsharded model."""
    model = make_model()
    for rank in range(world):
        for index in range(micro_batches):
            (model(batch(index, rank)) / world).backward()
    return gradients(model)


def make_model() -> TinyLM:
    torch.manual_seed(0)
    return TinyLM()


def check(
    model: nn.Module,
    buffer: QuantizedGradientBuffer,
    exact: dict[str, Tensor],
    *,
    largest: float = 0.015,
) -> None:
    """Gradients are close to the exact sum, and were really quantized."""
    assert buffer.nbytes == 0, "something is left in the buffer"
    quantized = {k.name.removeprefix("module.") for k in buffer.plan if not k.reason}
    assert quantized
    for name, error in relative_errors(gradients(model), exact).items():
        if name in quantized:
            assert 1e-5 < error < largest, name
        else:
            assert error < 1e-5, name


@pytest.mark.parametrize(("codec", "largest"), [(None, 0.012), (AGOQ, 0.08), (STOCHASTIC, 0.03)])
def test_sums_of_a_plain_module(codec: CodecSpec | None, largest: float) -> None:
    model = make_model()
    buffer = QuantizedGradientBuffer(model, codec=codec, min_quantized_numel=256)
    for index in range(MICRO_BATCHES):
        with buffer.accumulating(index < MICRO_BATCHES - 1):
            model(batch(index, 0)).backward()
        if index < MICRO_BATCHES - 1:
            kept = [k for k in buffer.plan if not k.reason]
            assert buffer.nbytes <= sum(1.14 * k.numel + 64 for k in kept)
            grads = dict(model.named_parameters())
            assert all(grads[k.name].grad is None for k in kept), "held in full precision too"
    check(model, buffer, exact_sum(1), largest=largest)


def test_plan_names_what_is_left_alone() -> None:
    model = make_model()
    model.embed.weight.requires_grad_(False)
    buffer = QuantizedGradientBuffer(model, min_quantized_numel=1000)
    reasons = {k.name: k.reason for k in buffer.plan}
    assert reasons["embed.weight"] == "frozen: has no gradient"
    assert reasons["head.weight"] == "744 elements < min_quantized_numel=1000"
    assert reasons["blocks.0.norm.weight"] == "1-D"
    assert reasons["blocks.0.up.weight"] == ""


def test_parameters_unused_by_the_last_backward_keep_their_sum() -> None:
    torch.manual_seed(0)
    model = TinyLM(block=OptionalBlock)
    buffer = QuantizedGradientBuffer(model, min_quantized_numel=256)
    for block in model.blocks:
        block.use_extra = True
    with buffer.accumulating():
        model(batch(0, 0)).backward()
    for block in model.blocks:
        block.use_extra = False
    model(batch(1, 0)).backward()
    torch.manual_seed(0)
    plain = TinyLM(block=OptionalBlock)
    plain(batch(0, 0)).backward()
    for block, exact in zip(model.blocks, plain.blocks, strict=True):
        error = whole(block.extra.weight.grad) - whole(exact.extra.weight.grad)
        assert 0 < float(error.norm() / whole(exact.extra.weight.grad).norm()) < 0.01
    assert buffer.nbytes == 0


def test_every_window_has_its_own_noise() -> None:
    """So that errors average out; with the same noise the mean error stayed that of one window."""
    layer = nn.Linear(64, 64, bias=False)
    x = torch.randn(16, 64)
    layer(x).square().sum().backward()
    exact = 3 * whole(layer.weight.grad)

    def sums(windows: list[int | None]) -> Tensor:
        buffer = QuantizedGradientBuffer(layer, codec=STOCHASTIC, min_quantized_numel=1)
        found = []
        for window in windows:
            if window is not None:
                buffer.window = window
            layer.zero_grad()
            for index in range(3):
                with buffer.accumulating(index < 2):
                    layer(x).square().sum().backward()
            found.append(whole(layer.weight.grad))
        assert window is None or buffer.window == window
        buffer.remove()
        return torch.stack(found)

    several = sums([None] * 64)
    single = (several[0] - exact).norm()
    assert (several.mean(0) - exact).norm() < single / 5  # 1/8 of it, if independent
    assert torch.equal(sums([0, 5, 5, 63]), several[[0, 5, 5, 63]])


def test_every_gradient_and_rank_has_its_own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
    x, y = torch.randn(16, 64), torch.randn(16, 64)

    def sums() -> list[Tensor]:
        buffer = QuantizedGradientBuffer(layers, codec=STOCHASTIC, min_quantized_numel=1)
        layers.zero_grad()
        for accumulating in (True, False):
            with buffer.accumulating(accumulating):
                for layer in layers:  # whose gradients are equal
                    (layer(x) * y).sum().backward()
        buffer.remove()
        return [whole(layer.weight.grad) for layer in layers]

    first = sums()
    assert all(map(torch.equal, first, sums()))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    for other in (first[1], sums()[0]):
        assert (first[0] != other).float().mean() > 0.05


def test_discarded_sums_do_not_come_back() -> None:
    model = make_model()
    buffer = QuantizedGradientBuffer(model, min_quantized_numel=256)
    with buffer.accumulating():
        model(batch(5, 0)).backward()
    buffer.discard()
    model.zero_grad()
    model(batch(0, 0)).backward()  # the only backward of a window, which is exact
    assert max(relative_errors(gradients(model), exact_sum(1, 1)).values()) == 0
    assert buffer.nbytes == 0


def test_non_finite_gradients_reach_the_optimizer() -> None:
    model = make_model()
    buffer = QuantizedGradientBuffer(model, min_quantized_numel=256)
    with buffer.accumulating():
        (model(batch(0, 0)) * float("nan")).backward()
    model(batch(1, 0)).backward()
    assert all(g.isnan().any() for g in gradients(model).values())


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="give a whole number of 1 or more"):
        QuantizedGradientBuffer(make_model(), min_quantized_numel=0)
    with pytest.raises(ValueError, match=r"no gradient of `TinyLM` would be quantized"):
        QuantizedGradientBuffer(make_model(), min_quantized_numel=10**6)
    with pytest.raises(ValueError, match="`codec='int8'` is not valid: give a `CodecSpec`"):
        QuantizedGradientBuffer(make_model(), codec="int8")  # type: ignore[arg-type]


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(64, 64, sparse=True)
    buffer = QuantizedGradientBuffer(model, min_quantized_numel=256)
    with buffer.accumulating(), pytest.raises(NotImplementedError, match="`sparse=False`"):
        model(torch.arange(4)).sum().backward()


# --- ranks --------------------------------------------------------------------------------------


def _ddp(rank: int, world: int, bucket_view: bool) -> None:
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=bucket_view)
    buffer = QuantizedGradientBuffer(model, min_quantized_numel=256)
    for _ in range(2):  # the second window starts with DDP's own gradients in place
        model.zero_grad()
        for index in range(MICRO_BATCHES):
            last = index == MICRO_BATCHES - 1
            with nullcontext() if last else model.no_sync(), buffer.accumulating(not last):
                model(batch(index, rank)).backward()
        check(model, buffer, exact_sum(world))


def shard(model: TinyLM, policy: MixedPrecisionPolicy | None) -> TinyLM:
    policy = policy or MixedPrecisionPolicy()
    for child in model.blocks:
        fully_shard(child, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def _fsdp(rank: int, world: int) -> None:
    for deferred, mixed, quantized in itertools.product((True, False), repeat=3):
        _fsdp_reduces_the_restored_sums(rank, world, deferred, mixed, quantized)


def _fsdp_reduces_the_restored_sums(
    rank: int, world: int, deferred: bool, mixed: bool, quantized: bool
) -> None:
    exact = exact_sum(world)
    if mixed:
        plain = shard(make_model(), BF16)
        for index in range(MICRO_BATCHES):
            plain(batch(index, rank)).backward()
        exact = gradients(plain)
    model = shard(make_model(), BF16 if mixed else None)
    if quantized:
        topology = Topology(world_size=world, rank=rank, node_size=world)
        config = GradientQuantization(method="TLq", rounding="nearest", group_size=16)
        quantize_communication(
            model, weights=None, gradients=config, topology=topology, min_quantized_numel=256
        )
    buffer = QuantizedGradientBuffer(model, min_quantized_numel=256)
    shards = 1 if deferred else world
    for _ in range(2):
        model.zero_grad()
        for index in range(MICRO_BATCHES):
            last = index == MICRO_BATCHES - 1
            keep: AbstractContextManager[None] = nullcontext()
            if deferred:
                model.set_requires_gradient_sync(last)
            else:
                keep = buffer.accumulating(not last)
            with keep:
                model(batch(index, rank)).backward()
            if not last:
                kept = [k.numel for k in buffer.plan if not k.reason]
                assert (
                    sum(kept) / shards < buffer.nbytes <= sum(1.3 * n / shards for n in kept) + 500
                )
        check(model, buffer, exact, largest=0.02)


def _who_reads(rank: int, world: int) -> None:
    """A reduction may go on beside backward unless the buffer reads its result in backward."""
    model = shard(make_model(), None)
    records: list[PackedGradients] = []
    for _, _, group in fsdp_units(model):
        announce_packed_gradients(group, records.append)
    buffer = QuantizedGradientBuffer(model, min_quantized_numel=256)

    def reads() -> set[bool]:
        records.clear()
        model(batch(0, rank)).backward()
        return {record.read_in_backward for record in records}

    assert reads() == {False}
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    assert reads() == set()
    model.set_requires_gradient_sync(True)
    assert reads() == {False}  # the sum was added before the reduction
    model.zero_grad()
    with buffer.accumulating():
        assert reads() == {True}
    model.zero_grad()  # of what is not quantized: FSDP2 would add to it
    assert buffer.nbytes > 0
    assert reads() == {True}
    model.zero_grad()
    assert reads() == {False}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda parameter: None)
    model.zero_grad()
    assert reads() == {True}
    dist.barrier()


def _interrupted(rank: int, world: int) -> None:
    model = shard(make_model(), None)
    buffer = QuantizedGradientBuffer(model, min_quantized_numel=256)
    model.set_requires_gradient_sync(False)
    model(batch(7, rank)).backward()
    assert buffer.nbytes > 0
    discard_unreduced_gradients(model)
    assert buffer.nbytes == 0
    model.set_requires_gradient_sync(True)
    model(batch(0, rank)).backward()
    assert max(relative_errors(gradients(model), exact_sum(world, 1)).values()) < 1e-6
    dist.barrier()


@pytest.mark.gpu
def test_memory_between_micro_batches_on_a_gpu() -> None:
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(8))).cuda()
    numel = sum(p.numel() for p in model.parameters())
    buffer = QuantizedGradientBuffer(model)
    x = torch.randn(8, 4096, device="cuda")
    model(x).sum().backward()  # workspaces of the matrix library
    model.zero_grad()
    peaks = []
    for quantized in (True, False):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            with buffer.accumulating(quantized):
                model(x).sum().backward()
        held = torch.cuda.memory_allocated() - before
        peaks.append((torch.cuda.max_memory_allocated() - before) / numel)
        assert held <= (1.14 if quantized else 4.1) * numel
        buffer.discard()
        model.zero_grad()
    # two gradients at a time are in flight: of 8 layers, 4 bytes times 2/8
    assert peaks[0] < 1.14 + 1.1
    assert peaks[1] > 4


test_on_ranks = rank_tests(
    on_ranks(_fsdp, 2),
    on_ranks(_ddp, 2, False),
    on_ranks(_ddp, 2, True),
    on_ranks(_who_reads, 2),
    on_ranks(_interrupted, 2),
)
