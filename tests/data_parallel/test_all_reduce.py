"""The 8-bit all-reduce, alone and as a communication hook of DDP."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from lightning.pytorch.strategies import DDPStrategy
from lq_testing import run_ranks
from lq_testing.cases import on_gpus, on_ranks, rank_tests
from lq_testing.lightning_models import trainer
from lq_testing.models import TinyLM, batch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lq_lightning.codecs import CodecSpec
from lq_lightning.data_parallel import QuantizedAllReduce, quantized_all_reduce_hook

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 127, 128, 129, 512, 513, 1025, 40_000]


def on_all_ranks(tensor: Tensor) -> list[Tensor]:
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor)
    return every


def check_average(reduce: QuantizedAllReduce, x: Tensor, largest_error: float) -> None:
    every = torch.stack([t.float() for t in on_all_ranks(x)])
    exact = every.mean(0)
    out = x.clone()
    reduce.average_(out)
    assert all(torch.equal(out, other) for other in on_all_ranks(out)), "ranks differ"
    error = float((out.float() - exact).norm() / exact.norm())
    assert error < largest_error, (x.numel(), x.dtype, error)
    if reduce.is_quantized(x):
        assert error > 0 or x.numel() == 1


def _averages(rank: int, world: int, node_size: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    codec = CodecSpec(code="int8", group_size=16, scale_dtype="bfloat16")
    reduce = QuantizedAllReduce(codec=codec, min_nbytes=0, node_size=node_size)
    default = QuantizedAllReduce(min_nbytes=0, node_size=node_size)
    for dtype in DTYPES:
        for numel in SIZES:
            x = torch.randn(numel, generator=generator).to(dtype)
            check_average(reduce, x, 0.03)
        check_average(default, torch.randn(40_000, generator=generator).to(dtype), 0.015)
        check_average(default, torch.randn(30, 50, generator=generator).to(dtype), 0.015)


def _special(rank: int, world: int) -> None:
    reduce = QuantizedAllReduce(min_nbytes=0, node_size=2)
    # constants and zeros are exact: a group of equal values decodes to itself
    x = torch.full((2000,), float(rank + 1))
    x[256:512] = 0.0
    reduce.average_(x)
    assert torch.allclose(x[:256], torch.tensor(2.5), rtol=0.01)
    assert (x[256:512] == 0).all()
    # one rank's NaN reaches every rank, and only its group
    for bad in (float("nan"), float("inf")):
        x = torch.ones(2000)
        if rank == 3:
            x[700] = bad
        reduce.average_(x)
        assert x[640:768].isnan().all()
        assert x[:640].isfinite().all()
        assert x[768:].isfinite().all()
    # fp16 sums beyond the range of fp16 have a mean inside of it
    x = torch.full((2000,), 60000.0, dtype=torch.float16)
    reduce.average_(x)
    assert torch.allclose(x.float(), torch.tensor(60000.0), rtol=0.01)
    with pytest.raises(ValueError, match=r"Pass tensor.contiguous"):
        reduce.average_(torch.ones(20, 20).t())


def _stochastic(rank: int, world: int) -> None:
    codec = CodecSpec(code="int8", group_size=128, rounding="stochastic")
    x = torch.randn(4096, generator=torch.Generator().manual_seed(rank))
    exact = torch.stack(on_all_ranks(x)).mean(0)
    results = []
    for seed in (0, 0, 1):
        reduce = QuantizedAllReduce(codec=codec, min_nbytes=0, seed=seed)
        runs = []
        for _ in range(50):
            out = x.clone()
            reduce.average_(out)
            runs.append(out)
        results.append(torch.stack(runs))
    assert torch.equal(results[0], results[1]), "the same seed gives the same bits"
    assert not torch.equal(results[0], results[2])
    assert not torch.equal(results[0][0], results[0][1]), "every call rounds differently"
    single = float((results[0][0] - exact).norm() / exact.norm())
    mean = float((results[0].mean(0) - exact).norm() / exact.norm())
    assert mean < single / 4, "not unbiased"


def _small(rank: int, world: int) -> None:
    reduce = QuantizedAllReduce(min_nbytes=4000)
    small, large = torch.randn(999), torch.randn(1000)
    assert not reduce.is_quantized(small)
    assert reduce.is_quantized(large)
    exact = torch.stack(on_all_ranks(small)).mean(0)
    reduce.average_(small)
    assert torch.allclose(small, exact, rtol=1e-6)
    half = torch.full((100,), 60000.0, dtype=torch.float16)
    reduce.average_(half)
    assert (half == 60000).all(), "the sum left the range of fp16"
    # codes of a few values would be larger than the values
    assert not QuantizedAllReduce(min_nbytes=0).is_quantized(torch.ones(2))


def _finds_hosts(rank: int, world: int) -> None:
    from lq_lightning.data_parallel import all_reduce

    cases = {"aabb": 2, "aaaa": 4, "abcd": 1, "aaab": 4, "abab": 4, "abba": 4}
    for hosts, expected in cases.items():
        all_reduce.os.environ["NCCL_HOSTID"] = hosts[rank]
        assert all_reduce._ranks_per_host() == expected, hosts


def _buckets(rank: int, world: int) -> None:
    """Gradients of very different magnitudes beside each other, as weights and biases are."""
    generator = torch.Generator().manual_seed(rank)
    shapes = [torch.Size(s) for s in [(64, 100), (99,), (50, 101), (7, 3), (4, 8, 128), (128,)]]
    scales = [1.0, 1e-4, 1e-3, 1e-4, 1.0, 1e-5]
    reduce = QuantizedAllReduce(min_nbytes=1000)
    for chosen in ([0, 1, 2, 3, 4, 5], [4], [4, 5], [1, 3, 5]):
        grads = [scales[i] * torch.randn(shapes[i], generator=generator) for i in chosen]
        bucket = torch.cat([grad.flatten() for grad in grads])
        exact = torch.stack(on_all_ranks(bucket)).mean(0)
        result = reduce.average_async(bucket, [shapes[i] for i in chosen]).wait()
        assert result is bucket
        assert all(torch.equal(bucket, other) for other in on_all_ranks(bucket)), "ranks differ"
        sizes = [grad.numel() for grad in grads]
        for index, found, wanted in zip(
            chosen, bucket.split(sizes), exact.split(sizes), strict=True
        ):
            error = float((found - wanted).norm() / wanted.norm())
            if index in (0, 2, 4):
                assert 1e-4 < error < 0.015, index
            else:
                assert error < 1e-6, index
    # what is not finite stays where it is: in a group, or as it is in a small gradient
    bucket = torch.ones(6400 + 99)
    bucket[6400 + 5 * rank] = float("inf")
    bucket[128] = float("nan") if rank else 1.0
    reduce.average_bucket_(bucket, shapes[:2])
    broken = torch.zeros(6400 + 99, dtype=torch.bool)
    broken[128:256] = broken[6400] = broken[6405] = True
    assert torch.equal(~bucket.isfinite(), broken)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs, where Lightning takes it")
def test_that_lightning_takes_no_hook_on_a_cpu_is_said() -> None:
    with pytest.warns(UserWarning, match=r"register it in `on_fit_start` by `trainer.model.regis"):
        QuantizedAllReduce()


@pytest.mark.parametrize(
    ("option", "value"), [("min_nbytes", -1), ("node_size", 0), ("min_quantized_numel", 0)]
)
def test_bad_options_are_refused(option: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"`QuantizedAllReduce\({option}={value}\)`"):
        QuantizedAllReduce(**{option: value})  # type: ignore[arg-type]


def test_one_scale_for_parameters_of_any_magnitude_is_refused() -> None:
    with pytest.raises(ValueError, match=r"group_size='row'\)\)` is not supported"):
        QuantizedAllReduce(codec=CodecSpec(code="int8", group_size="row"))


# --- DDP ----------------------------------------------------------------------------------------


def _ddp(rank: int, world: int) -> None:
    losses = []
    # between them these have buckets before and after DDP rebuilds them, of small ones alone too
    options = {"gradient_as_bucket_view": world == 2, "find_unused_parameters": world == 4}
    for quantized in (True, False):
        torch.manual_seed(0)
        model = DistributedDataParallel(TinyLM(), bucket_cap_mb=0.01, **options)
        if quantized:
            state = QuantizedAllReduce(min_nbytes=1000, min_quantized_numel=256, node_size=2)
            # as DDPStrategy does, which leaves the hook out on a CPU
            _register_ddp_comm_hook(model, state, quantized_all_reduce_hook)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(10):
            loss = model(batch(step, rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert all(torch.equal(weights, other) for other in on_all_ranks(weights))
    assert losses[:10] != losses[10:]
    assert max(abs(a - b) for a, b in zip(losses[:10], losses[10:], strict=True)) < 0.02
    assert losses[9] < losses[0] - 0.1, "the model does not learn, so the test shows nothing"


class RegistersHook(L.LightningModule):
    """What the docstring says for CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyLM()
        self.losses: list[float] = []

    def on_fit_start(self) -> None:
        self.state = QuantizedAllReduce(min_nbytes=1000, min_quantized_numel=256)
        self.trainer.model.register_comm_hook(  # type: ignore[operator, union-attr]
            self.state, quantized_all_reduce_hook
        )

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(tokens)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _fit_on_cpus(rank: int, world: int) -> None:
    L.seed_everything(0, verbose=False)
    run = trainer("ddp", ".", world, max_steps=8)
    module = RegistersHook()
    data = torch.cat([batch(step, 0) for step in range(16)])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*on_fit_start")  # it is done already
        run.fit(module, DataLoader(data, batch_size=4))
    assert module.state._calls > 0
    assert module.losses[-1] < module.losses[0] - 0.1
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert all(torch.equal(weights, other) for other in on_all_ranks(weights))


# --- the reduce-scatter half, for FSDP2 -----------------------------------------------------------


def _gpu(rank: int, world: int) -> None:
    for numel in (1 << 22, (1 << 22) + 12_345):
        x = torch.randn(numel, device="cuda")
        for node_size in (1, 2):
            reduce = QuantizedAllReduce(node_size=node_size)
            exact = torch.stack(on_all_ranks(x)).mean(0)
            futures = []
            for _ in range(3):  # each waits for what the stream before it wrote
                y = x * 2
                futures.append(reduce.average_async(y.mul_(0.5)))
            for future in futures:
                out = future.wait()
                assert all(torch.equal(out, other) for other in on_all_ranks(out))
                assert float((out - exact).norm() / exact.norm()) < 0.013


class LightningLM(RegistersHook):
    def on_fit_start(self) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)  # linear in the gradients


def _fit(rank: int, world: int, root: str, quantized: bool) -> list[Tensor]:
    L.seed_everything(0, verbose=False)
    options: dict[str, Any] = {}
    if quantized:
        options["ddp_comm_state"] = QuantizedAllReduce(min_nbytes=1000, min_quantized_numel=256)
        options["ddp_comm_hook"] = quantized_all_reduce_hook
    run = trainer(DDPStrategy(**options), root, world, accelerator="gpu", max_steps=4)
    data = torch.cat([batch(step, 0) for step in range(8)])
    model = LightningLM()
    run.fit(model, DataLoader(data, batch_size=4))
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.gpu(2)
def test_stock_ddp_strategy_takes_the_hook(tmp_path: Path) -> None:
    runs = [
        run_ranks(_fit, 2, str(tmp_path), quantized, backend=None, torchrun=True)
        for quantized in (True, False)
    ]
    L.seed_everything(0, verbose=False)
    start = [p.detach() for p in LightningLM().parameters()]
    for first, second, plain, before in zip(*runs[0], runs[1][0], start, strict=True):
        assert torch.equal(first, second)
        assert (first - plain).norm() < 0.03 * (plain - before).norm()
    assert not all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))


test_on_ranks = rank_tests(
    on_ranks(_averages, 2, 2),
    on_ranks(_averages, 2, 1),
    on_ranks(_averages, 3, 3),
    on_ranks(_averages, 4, 2),
    on_ranks(_special, 4),
    on_ranks(_stochastic, 2),
    on_ranks(_small, 2),
    on_ranks(_finds_hosts, 4),
    on_ranks(_buckets, 2),
    on_ranks(_ddp, 2),
    on_ranks(_ddp, 4),
    on_ranks(_fit_on_cpus, 2, backend=None, torchrun=True),
    on_gpus(_gpu, 2),
)
