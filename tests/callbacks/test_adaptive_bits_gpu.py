"""Trained bit widths on GPUs: the values of the CPU, loss scaling, NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing import run_ranks
from lq_testing.lightning_models import Losses, TinyModule, loader, trainer
from torch import Tensor

from lq_lightning import AdaptiveBits, QuantizedFSDPStrategy
from lq_lightning.adaptive import AdaptiveBitsConfig, BitGate, adaptive_quantize

FAST: dict[str, Any] = {"start_bits": 5.0, "learning_rate": 0.03, "beta": 1.0}


def _taken(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate = BitGate(AdaptiveBitsConfig(), 64)
    gate.q.copy_(torch.linspace(-4, 4, 64))  # 1 to 16 bits
    gate.refresh()
    quantized = adaptive_quantize(x, gate)
    quantized.backward(grad)
    return quantized.detach().cpu(), gate.take(x.device).cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(3, 40, 64, generator=generator).to(dtype) for _ in range(2))
    x.requires_grad_()
    expected = _taken(x, grad)
    found = _taken(x.detach().cuda().requires_grad_(), grad.cuda())
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_quantization_does_not_wait_for_the_device() -> None:
    x = torch.randn(2, 64, 64, device="cuda", requires_grad=True)

    def step() -> None:
        for _ in range(2):  # micro-batches
            adaptive_quantize(x, gate).backward(x.detach())
        gate.take(x.device)
        gate.refresh()  # a new table, as behind each step

    gate = BitGate(AdaptiveBitsConfig(), 64)
    gate.q.copy_(torch.linspace(-4, 4, 64))  # 1 to 16 bits
    gate.refresh()
    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_trains_on_one_gpu(precision: Any, tmp_path: Path) -> None:
    bits, losses = AdaptiveBits(**FAST), Losses()
    options: dict[str, Any] = {"accelerator": "gpu", "precision": precision, "max_epochs": 8}
    run = trainer("auto", str(tmp_path), 1, callbacks=[bits, losses], **options)
    torch.manual_seed(0)
    run.fit(TinyModule(), loader(), loader(8))
    assert losses.values[-1] < losses.values[0]
    assert bits.optimizer is not None
    assert bits.optimizer.mean < 4.2
    for gate in bits.gates.values():
        assert gate.state.device.type == "cpu"
        assert gate.state.isfinite().all()


def _two_gpus(rank: int, world: int, root: str) -> None:
    for strategy in ("ddp", QuantizedFSDPStrategy(node_size=1, min_quantized_numel=64)):
        bits, losses = AdaptiveBits(**FAST), Losses()
        run = trainer(strategy, root, callbacks=[bits, losses], accelerator="gpu", max_epochs=2)
        torch.manual_seed(0)
        run.fit(TinyModule(), loader(), loader(8))
        assert losses.values[-1] < losses.values[0]
        states = {site: gate.state for site, gate in bits.gates.items()}
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, states)
        torch.testing.assert_close(gathered[0], gathered[1], rtol=0, atol=0)


@pytest.mark.gpu(2)
def test_gates_are_equal_on_two_gpus(tmp_path: Path) -> None:
    run_ranks(_two_gpus, 2, str(tmp_path), backend=None, torchrun=True, timeout=300)
