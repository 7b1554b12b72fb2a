"""Training on two ranks.

Item numbers are those of a list of what Lightning's own FSDP2 strategy (ModelParallelStrategy)
lacks: 2 shards nothing by default, 3 root hook never fires, 4 ``Generic`` modules, 5 leftovers
diverge, 6 reduces every micro-batch, 7 ``weights_only`` dropped, 8 testing weights-only
checkpoints, 9 SGD, 10 ``strict_loading``, 11 consolidation, 12 ``grad_norm``, averaging, LR finder,
compile, async IO, 13 ``configure_model`` in every stage, 14 CPU offload, 15 mixed precision without
FSDP2's policy.
"""

from __future__ import annotations

import functools
from collections import Counter
from datetime import timedelta
from typing import Any, Generic, TypeVar

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities import grad_norm
from lq_testing.lightning_models import (
    PLAIN,
    SMALL,
    Losses,
    TinyModule,
    Tokens,
    loader,
    run_trainer,
    trainer,
)
from lq_testing.models import LoRABlock, TinyLM
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

import lq_lightning
from lq_lightning import QuantizedFSDPStrategy

T = TypeVar("T")


def _fit(
    root: str,
    module: pl.LightningModule | None = None,
    strategy: Any = None,
    batches: int = 4,
    **options: Any,
) -> tuple[pl.Trainer, list[float]]:
    if module is None:
        module = TinyModule()  # before the Trainer, which draws random numbers
    losses = Losses()
    callbacks = [losses, *options.pop("callbacks", [])]
    run = trainer(strategy or QuantizedFSDPStrategy(**PLAIN), root, callbacks=callbacks, **options)
    run.fit(module, loader(8 * batches))
    return run, losses.values


# --- plain FSDP2 by hand ------------------------------------------------------------------------


def _by_hand(rank: int, steps: int, clip: float | None, accumulate: int) -> list[float]:
    torch.manual_seed(0)
    model = TinyLM()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Tokens(8 * steps * accumulate)
    sampler = DistributedSampler(data, num_replicas=2, rank=rank)  # Lightning shuffles, seed 0
    losses = []
    for index, tokens in enumerate(DataLoader(data, batch_size=4, sampler=sampler)):
        last = (index + 1) % accumulate == 0
        model.set_requires_gradient_sync(last)
        loss = model(tokens)
        losses.append((loss / accumulate).item())
        (loss / accumulate).backward()
        if last:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _bit_identity(rank: int, world_size: int, root: str) -> None:
    torch.manual_seed(0)
    run, losses = _fit(root, batches=20)
    assert losses == _by_hand(rank, 20, None, 1)
    assert run.strategy.communication is None
    torch.manual_seed(0)
    _, losses = _fit(root, batches=6, gradient_clip_val=0.5, accumulate_grad_batches=2)
    assert losses == _by_hand(rank, 3, 0.5, 2)


# --- what the strategy adds ---------------------------------------------------------------------


def _counted(counts: Counter[str], name: str) -> None:
    original = getattr(dist, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return original(*args, **kwargs)

    setattr(dist, name, counting)


class PerBatch(Callback):
    def __init__(self, counts: Counter[str]) -> None:
        self.counts, self.rows = counts, []

    def on_train_batch_start(self, *args: Any) -> None:
        self.counts.clear()

    def on_train_batch_end(self, *args: Any) -> None:
        self.rows.append(dict(self.counts))


def _collectives(rank: int, world_size: int, root: str) -> None:
    counts: Counter[str] = Counter()
    old = not hasattr(dist, "all_gather_single")
    gather = "all_gather_into_tensor" if old else "all_gather_single"
    scatter = "reduce_scatter_tensor" if old else "reduce_scatter_single"
    _counted(counts, gather)
    _counted(counts, scatter)
    seen = PerBatch(counts)
    # all ranks shard; the root hook fires: blocks are gathered twice, the root once
    run, _ = _fit(root, callbacks=[seen])
    assert seen.rows[1][gather] == 2 * 2 + 1
    assert seen.rows[1][scatter] == 3
    assert run.strategy.device_mesh["data_parallel"].size() == 2
    assert run.strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": rank}
    # two steps of four micro-batches reduce twice, or every time by option
    seen.rows.clear()
    _fit(root, batches=8, callbacks=[seen], accumulate_grad_batches=4)
    assert [row.get(scatter, 0) for row in seen.rows] == [0, 0, 0, 3, 0, 0, 0, 3]
    seen.rows.clear()
    every = QuantizedFSDPStrategy(**PLAIN, reduce_every_microbatch=True)
    _fit(root, strategy=every, batches=4, callbacks=[seen], accumulate_grad_batches=4)
    assert [row.get(scatter, 0) for row in seen.rows] == [3, 3, 3, 3]
    # the last, incomplete window of an epoch reduces and steps too
    seen.rows.clear()
    run, _ = _fit(root, batches=6, callbacks=[seen], accumulate_grad_batches=4)
    assert [row.get(scatter, 0) for row in seen.rows] == [0, 0, 0, 3, 0, 3]
    assert run.global_step == 2


class GenericModule(Generic[T], TinyModule):
    """Python refuses to give it torch's FSDP class."""


class RootParameters(TinyModule):
    """Parameters on the LightningModule itself, used in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(tokens, batch_idx) * self.scale.mean()
        return loss

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        assert not isinstance(self.scale, DTensor)
        self.log("val", self.net(tokens) * self.scale.mean(), sync_dist=True)


def _root_and_generic(rank: int, world_size: int, root: str) -> None:
    # Generic in first place, and later stages of the same Trainer
    torch.manual_seed(0)
    _, expected = _fit(root)
    torch.manual_seed(0)
    module = GenericModule[int]()
    run, losses = _fit(root, module)
    assert losses == expected
    assert isinstance(module, FSDPModule)
    assert isinstance(module, GenericModule)
    with pytest.raises(AssertionError, match="deepcopy"):
        __import__("copy").deepcopy(module)
    module.to(torch.float32)
    # a parameter of the root
    rooted = RootParameters()
    run, losses = _fit(root, rooted)
    assert losses[-1] < losses[0]
    for stage in (run.validate, run.test):
        stage(rooted, loader(8), verbose=False)
    assert all(isinstance(p, DTensor) for p in rooted.parameters())
    predictions = run.predict(rooted, loader(8))
    assert predictions is not None
    run.fit_loop.max_epochs = 2
    run.fit(rooted, loader(), loader(8))
    assert run.global_step == 8


class Configured(TinyModule):
    """Builds and shards in `configure_model` without any guard."""

    def __init__(self, shard: bool) -> None:
        super().__init__()
        self.shard, self.calls = shard, 0
        del self.net

    def configure_model(self) -> None:
        self.calls += 1
        torch.manual_seed(0)
        self.net = TinyLM()
        if self.shard:
            for block in self.net.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])


class Ignoring(Configured):
    def configure_model(self) -> None:
        super().configure_model()
        fully_shard(self, ignored_params={self.net.tiny})


class OwnMesh(Configured):
    def configure_model(self) -> None:
        super().configure_model()
        fully_shard(self.net.blocks[0])


class TwoDimensional(Configured):
    def configure_model(self) -> None:
        super().configure_model()
        fully_shard(self.net.blocks[0], mesh=self.device_mesh)


class Stale(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.early = list(self.parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.early, lr=0.1)


def _configure_model(rank: int, world_size: int, root: str) -> None:
    torch.manual_seed(0)
    _, expected = _fit(root)
    for shard in (False, True):  # once for all stages, with and without fully_shard
        module = Configured(shard)
        run, losses = _fit(root, module)
        assert losses == expected
        source = "`configure_model`" if shard else "repeated blocks"
        assert run.strategy.sharding_plan.source == source
        before = module.net.head.weight.full_tensor()
        run.validate(module, loader(8), verbose=False)
        trainer(QuantizedFSDPStrategy(**PLAIN), root).test(module, loader(8), verbose=False)
        assert module.calls == 1
        assert torch.equal(before, module.net.head.weight.full_tensor())
    with pytest.raises(ValueError, match=r"already sharded with `precision='32-true'`"):
        trainer(QuantizedFSDPStrategy(**PLAIN), root, precision="bf16-mixed").test(
            module, loader(8)
        )
    clips: dict[str, Any] = {"gradient_clip_val": 0.1}  # also over two meshes of the same ranks
    torch.manual_seed(0)
    expected = _fit(root, **clips)[1]
    assert _fit(root, OwnMesh(False), **clips)[1] == pytest.approx(expected, abs=1e-6)
    # nothing unsharded that could diverge
    with pytest.raises(RuntimeError, match=r"`net.tiny` was not sharded"):
        _fit(root, Ignoring(False))
    with pytest.raises(NotImplementedError, match=r"`net.blocks.0` .*HSDP.*replica='node'"):
        _fit(root, TwoDimensional(False))
    with pytest.raises(ValueError, match=r"optimizer 0 \(SGD\).*`configure_optimizers`"):
        _fit(root, Stale())


class Norms(Callback):
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        stock, ours = grad_norm(pl_module, 2), lq_lightning.grad_norm(pl_module, 2)
        assert set(stock) == set(ours)
        for name, value in stock.items():
            assert not isinstance(value, DTensor)
            torch.testing.assert_close(torch.as_tensor(value), ours[name])
        squares = [p.grad.full_tensor().square().sum() for p in pl_module.parameters()]
        torch.testing.assert_close(ours["grad_2.0_norm_total"], sum(squares).sqrt())
        pl_module.log_dict(stock)


def _hooks_and_refusals(rank: int, world_size: int, root: str) -> None:
    _fit(root, callbacks=[Norms()], gradient_clip_val=1e9)
    for callback in (WeightAveraging(), StochasticWeightAveraging(swa_lrs=1e-2)):
        with pytest.raises(NotImplementedError, match=f"`{type(callback).__name__}` copies.*EMA"):
            _fit(root, callbacks=[callback])
    with pytest.raises(RuntimeError, match="compile_units=True"):
        _fit(root, torch.compile(TinyModule()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"AsyncCheckpointIO.*save_distributed_checkpoint=False"):
        _fit(root, plugins=[AsyncCheckpointIO()])
    compiled = functools.partial(torch.compile, backend="eager")
    torch.manual_seed(0)
    _, expected = _fit(root)
    original, torch.compile = torch.compile, compiled  # no C++ compiler needed
    try:
        torch.manual_seed(0)
        module = TinyModule()
        _, losses = _fit(root, module, QuantizedFSDPStrategy(**PLAIN, compile_units=True))
    finally:
        torch.compile = original
    assert losses == expected
    assert not any("_orig_mod" in name for name, _ in module.named_parameters())


# --- manual optimization ------------------------------------------------------------------------


class Adversarial(pl.LightningModule):
    """Two nets, two optimizers, manual optimization, both in the root unit or as units."""

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.accumulate = accumulate
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.offset = nn.Parameter(torch.zeros(4))
        self.history: list[float] = []

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z) + self.offset

    def training_step(self, tokens: Tensor, batch_idx: int) -> None:
        z = tokens[:, :4].float() / 30
        real = tokens[:, 4:8].float() / 30
        one, two = self.optimizers()
        last = (batch_idx + 1) % self.accumulate == 0
        self.toggle_optimizer(one)
        loss = (self.discriminator(self(z)) - 1).square().mean()
        self._backward(loss, last)
        if last:
            one.step()
            one.zero_grad()
        self.untoggle_optimizer(one)
        self.toggle_optimizer(two)
        fake = self.discriminator(self(z).detach()).square().mean()
        loss_two = fake + (self.discriminator(real) - 1).square().mean()
        self._backward(loss_two, last)
        if last:
            two.step()
            two.zero_grad()
        self.untoggle_optimizer(two)
        self.history += [loss.item(), loss_two.item()]

    def _backward(self, loss: Tensor, last: bool) -> None:
        if last:
            self.manual_backward(loss / self.accumulate)
        else:
            with self.trainer.strategy.block_backward_sync():
                self.manual_backward(loss / self.accumulate)

    def configure_optimizers(self) -> Any:
        generator = [*self.generator.parameters(), self.offset]
        return [
            torch.optim.Adam(generator, lr=1e-2),
            torch.optim.Adam(self.discriminator.parameters(), lr=1e-2),
        ]


class Forgetful(Adversarial):
    def _backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()


def _manual(rank: int, world_size: int, root: str, accelerator: str) -> None:
    run = functools.partial(trainer, root=root, accelerator=accelerator)
    for accumulate in (1, 2):
        torch.manual_seed(0)
        reference = Adversarial(accumulate)
        run("ddp_find_unused_parameters_true").fit(reference, loader(32))
        for units in (None, ["Sequential"]):
            torch.manual_seed(0)
            module = Adversarial(accumulate)
            strategy = QuantizedFSDPStrategy(**PLAIN, units=units)
            run(strategy).fit(module, loader(32))
            torch.testing.assert_close(
                torch.tensor(module.history), torch.tensor(reference.history)
            )
    with pytest.raises(RuntimeError, match="self.manual_backward"):
        run(QuantizedFSDPStrategy(**PLAIN)).fit(Forgetful(), loader())


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu(2))])
def test_manual_optimization_with_two_optimizers_equals_ddp(
    tmp_path: Any, accelerator: str
) -> None:
    run_trainer(_manual, 2, str(tmp_path), accelerator)


# --- precision, buffers, non-finite gradients ---------------------------------------------------


class Targets(pl.LightningModule):
    """Float targets, a buffer that changes, LayerNorm on fp32 input in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.bn = nn.BatchNorm1d(4)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)))
        self.dtypes: set[Any] = set()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        x = tokens[:, :4] / 30  # in the default dtype
        target = x + 1.0 / 3
        self.dtypes = {p.dtype for p in self.blocks.parameters()}
        out = self.blocks(self.bn(self.norm(x)))
        return nn.functional.mse_loss(out.float(), target.float())

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        self.log("mean", self.bn.running_mean.sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _precisions(rank: int, world_size: int, root: str) -> None:
    for precision, main, gathered in (
        ("32-true", torch.float32, torch.float32),
        ("bf16-mixed", torch.float32, torch.bfloat16),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
    ):
        for strategy in ("quantized_fsdp", QuantizedFSDPStrategy()):
            module = Targets()
            run = trainer(strategy, root, precision=precision)
            run.fit(module, loader(16), loader(8))
            assert run.precision == precision
            assert {p.dtype for p in module.parameters()} == {main}
            fsdp = module.blocks[0]._get_fsdp_state()._fsdp_param_group.fsdp_params[0]
            assert fsdp.unsharded_param.dtype == gathered


class Bursting(TinyModule):
    """One rank's loss is infinite in the second step."""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(tokens)
        if batch_idx == 1 and self.global_rank == 1:
            loss = loss * float("inf")
        return loss


class BurstingElement(TinyModule):
    """One element of a gradient is infinite in the second step, on one rank."""

    def on_after_backward(self) -> None:
        if self.global_step == 1 and self.global_rank == 1:
            self.net.head.weight.grad.to_local()[0, 0] = float("inf")


class SeesNan(Callback):
    def __init__(self) -> None:
        self.finite: list[bool] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        norm = lq_lightning.grad_norm(pl_module)["grad_2.0_norm_total"]
        self.finite.append(bool(torch.isfinite(norm)))


def _nonfinite(rank: int, world_size: int, root: str) -> None:
    for options in (PLAIN, SMALL):
        seen = SeesNan()
        torch.manual_seed(0)
        module = Bursting()
        run, losses = _fit(root, module, QuantizedFSDPStrategy(**options), callbacks=[seen])
        assert seen.finite[:2] == [True, False]  # on this rank too
        assert not all(torch.isfinite(p.full_tensor()).all() for p in module.parameters())
        torch.manual_seed(0)
        for kind, algorithm in ((Bursting, "norm"), (BurstingElement, "value")):
            module = kind()
            strategy = QuantizedFSDPStrategy(**options, skip_nonfinite_steps=True)
            clipping = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": algorithm}
            run, losses = _fit(root, module, strategy, **clipping)
            assert strategy.num_skipped_steps == 1
            assert all(torch.isfinite(p.full_tensor()).all() for p in module.parameters())
            assert run.global_step == 4
            if strategy.communication is not None:
                assert strategy.communication.step == 3


class DifferentInit(TinyModule):
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.register_buffer("table", torch.rand(3))


def _initial_state(rank: int, world_size: int, root: str) -> None:
    module = DifferentInit(rank)
    _fit(root, module, batches=1)
    tables = [torch.empty(3) for _ in range(2)]
    dist.all_gather(tables, module.table)
    assert torch.equal(tables[0], tables[1])
    reference = DifferentInit(0)
    run = trainer("ddp", root)
    run.fit(reference, loader(8))
    for name, parameter in reference.named_parameters():
        mine = module.get_parameter(name).full_tensor()
        torch.testing.assert_close(mine, parameter, rtol=1e-4, atol=1e-5)


# --- with codecs --------------------------------------------------------------------------------


def _quantized(rank: int, world_size: int, root: str) -> None:
    torch.manual_seed(0)
    _, expected = _fit(root, batches=10)
    for options in (
        SMALL,
        {**SMALL, "replica": "node", "node_size": 1},
        {**SMALL, "gradients": "ULq"},
    ):
        torch.manual_seed(0)
        strategy = QuantizedFSDPStrategy(**options, check_replicas_every_n_steps=5)
        module = TinyModule()
        run, losses = _fit(root, module, strategy, batches=10)
        assert strategy.communication is not None
        assert strategy.communication.step == 10
        assert losses[-1] < 0.3 * losses[0]
        assert losses != expected
    torch.manual_seed(0)
    lora = TinyModule(block=LoRABlock, tied=True)
    frozen = lora.net.blocks[0].up.weight.clone()
    run, losses = _fit(root, lora, QuantizedFSDPStrategy(**SMALL), accumulate_grad_batches=2)
    assert torch.equal(lora.net.blocks[0].up.weight.full_tensor(), frozen)
    assert lora.net.head.weight is lora.net.embed.weight
    with pytest.raises(ValueError, match=r"node_size=3.*divide.*\[1, 2\]"):
        _fit(root, strategy=QuantizedFSDPStrategy(node_size=3))


CHECKS = (
    *(_bit_identity, _root_and_generic, _configure_model, _hooks_and_refusals, _precisions),
    *(_nonfinite, _initial_state, _quantized, _collectives),
)


def _all(rank: int, world_size: int, root: str) -> None:
    for check in CHECKS:
        check(rank, world_size, root)


def test_training_on_two_ranks(tmp_path: Any) -> None:
    run_trainer(_all, 2, str(tmp_path), timeout=240.0)


def test_quantized_training_on_two_emulated_nodes(tmp_path: Any) -> None:
    values = run_trainer(_two_nodes, 4, str(tmp_path))
    assert len({repr(v) for v in values}) == 1


def _two_nodes(rank: int, world_size: int, root: str) -> list[float]:
    torch.manual_seed(0)
    limit = timedelta(seconds=77)
    strategy = QuantizedFSDPStrategy(**SMALL, node_size=2, timeout=limit)
    module = TinyModule()
    _fit(root, module, strategy, batches=3, devices=4)
    assert strategy.topology().num_nodes == 2
    context = strategy.communication._context  # groups of the node and between nodes wait as long
    for group in (context.groups.intra, context.groups.inter):
        assert group._get_backend(torch.device("cpu")).options._timeout == limit
    return [p.full_tensor().sum().item() for p in module.parameters()]
