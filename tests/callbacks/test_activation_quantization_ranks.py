"""Saved activations as codes on two ranks: DDP, sharded, compiled and tensor-parallel models."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from lq_testing import run_ranks
from lq_testing.activation_models import INT8, Inside, Module, backward, close, codes, fit, snapshot
from lq_testing.lightning_models import loader
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lq_lightning import QuantizationMonitor, QuantizedFSDPStrategy, QuantizedPrecision
from lq_lightning.activations import quantize_activations
from lq_lightning.activations.sources import source_of

PLAIN = {"weights": "none", "gradients": "none"}


class Sharded(Module):
    """Makes and shards its layers in one call, as users of ModelParallelStrategy do."""

    def configure_model(self) -> None:
        if isinstance(self.net, FSDPModule):
            return
        for block in self.net.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class TensorParallel(Module):
    def configure_model(self) -> None:
        if self.where == "done":
            return
        self.where = "done"
        plan = {
            "gate_proj": ColwiseParallel(),
            "up_proj": ColwiseParallel(),
            "down_proj": RowwiseParallel(),
        }
        mesh = self.device_mesh["tensor_parallel"]
        parallelize_module(self.net.blocks[0].mlp, mesh, plan)


def _two_ranks(rank: int, world: int, root: str) -> None:
    results = {}
    for name, strategy, kind in (
        ("ddp", "ddp", Module),
        ("fsdp", lambda: QuantizedFSDPStrategy(**PLAIN), Module),
        ("stock", lambda: ModelParallelStrategy(2, 1), Sharded),
    ):
        for recipe in (None, INT8):
            module, inside = kind(), Inside()
            before = snapshot(module) if name == "ddp" else None
            strategy_now = strategy() if callable(strategy) else strategy
            run, losses = fit(module, root, recipe, strategy_now, world, callbacks=[inside])
            total = torch.tensor(losses)
            dist.all_reduce(total)
            results[name, recipe] = (total / world).tolist()
            assert (inside.codes > 0) == (recipe is not None), name
            assert codes(lambda module=module: backward(module)) == 0, name
            assert before is None or snapshot(module) == before
            run.test(module, loader(8), verbose=False)
        assert close(results[name, INT8], results[name, None])
        assert close(results[name, INT8], results["ddp", INT8], tolerance=1e-5)


def _more_on_two_ranks(rank: int, world: int, root: str) -> None:
    torch.compile = functools.partial(torch.compile, backend="eager")
    module, inside = Module(), Inside()
    monitor = QuantizationMonitor(every_n_steps=1)
    run, _ = fit(
        module,
        root,
        "agoq",
        QuantizedFSDPStrategy(compile_units=True, node_size=1, min_quantized_numel=64),
        world,
        callbacks=[inside, monitor],
        plugins=[QuantizedPrecision("bf16-mixed")],
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
    )
    assert inside.codes > 0
    assert "quant/gradients_error" in run.callback_metrics
    assert codes(lambda: backward(module)) == 0
    curves = []
    for recipe in (None, INT8):
        inside = Inside()
        strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
        _, losses = fit(TensorParallel(), root, recipe, strategy, world, callbacks=[inside])
        curves.append(losses)
    assert close(*curves)
    kept = [f"net.blocks.{name}" for name in ("0.norm", "0.mlp", "1.norm", "1.mlp")]
    assert inside.names == kept


def _units_of_their_own(rank: int, world: int) -> None:
    """The parameters of the norm are freed when the backward of the linear layer needs them."""

    def gradients(quantized: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
        if quantized:
            quantize_activations(model, INT8)
        for module in (*model, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        model(torch.randn(16, 64)).square().sum().backward()
        return torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])

    norm = nn.LayerNorm(64)
    quantize_activations(norm, INT8)
    source = source_of(norm(torch.randn(2, 64)))
    assert source is not None
    kept = [t.data_ptr() for t in source.tensors[2:]]  # type: ignore[union-attr]
    assert kept == [norm.weight.data_ptr(), norm.bias.data_ptr()], "nobody frees them"
    mesh = dist.init_device_mesh("cpu", (world,))
    exact, coded = gradients(False), gradients(True)
    assert 0 < float((coded - exact).norm() / exact.norm()) < 0.02


def _all(rank: int, world: int, root: str) -> None:
    _two_ranks(rank, world, root)
    _more_on_two_ranks(rank, world, root)
    _units_of_their_own(rank, world)


def test_two_ranks(tmp_path: Path) -> None:
    run_ranks(_all, 2, str(tmp_path), backend=None, torchrun=True, timeout=240)
