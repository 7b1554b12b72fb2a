"""The strategy on GPUs with NCCL: the same promises as on CPU ranks."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing.checkpoints import weights
from lq_testing.fsdp2 import same_on_all_ranks
from lq_testing.lightning_models import (
    PLAIN,
    SMALL,
    Losses,
    TinyModule,
    loader,
    run_trainer,
    trainer,
)
from lq_testing.tensor_models import ParallelModule, batch
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from lq_lightning import LocalSteps, QuantizedFSDPStrategy, QuantizedPrecision
from lq_lightning._compat.tensor_parallel import replicated_parameters
from lq_lightning._compat.torch import all_linked_by_nvlink
from lq_lightning.callbacks import ActivationQuantization, QuantizationMonitor


def _fit(root: str, world: int, options: dict[str, Any], **kwargs: Any) -> tuple[Any, list[float]]:
    torch.manual_seed(0)
    losses = Losses()
    ckpt_path = kwargs.pop("ckpt_path", None)
    strategy = QuantizedFSDPStrategy(**{"min_quantized_numel": 64, **options})
    callbacks = [losses, *kwargs.pop("callbacks", [])]
    run = trainer(strategy, root, devices=world, accelerator="gpu", callbacks=callbacks, **kwargs)
    run.fit(TinyModule(), loader(), loader(), ckpt_path=ckpt_path)
    return run, losses.values


def _trains_and_resumes(rank: int, world: int, root: str, node_size: int) -> None:
    for precision in ("32-true", "bf16-mixed", "bf16-true"):
        plain = {"weights": "none", "gradients": "none"}
        exact = _fit(root, world, plain, precision=precision, gradient_clip_val=1.0)[1]
        for replica in ("full", "node"):
            options = {"replica": replica, "node_size": node_size}
            fit = functools.partial(
                _fit, root, world, options, precision=precision, gradient_clip_val=1.0
            )
            run, losses = fit(max_epochs=2, callbacks=[QuantizationMonitor(every_n_steps=2)])
            local_rank = int(os.environ["LOCAL_RANK"])
            assert run.strategy.root_device == torch.device("cuda", local_rank)
            assert isinstance(run.lightning_module, FSDPModule)
            near = zip(losses, exact, strict=False)
            assert max(abs(a - b) for a, b in near) < 0.3, (precision, replica)
            assert run.strategy.communication.check_replicas("raise") == []
            assert 0 < run.callback_metrics["quant/gradients_error"] < 0.5
            short, first = fit(max_epochs=1)
            path = f"{root}/{precision}-{replica}.ckpt"
            short.save_checkpoint(path)
            resumed = fit(max_epochs=2, ckpt_path=path)[1]
            assert first + resumed == losses, (precision, replica, first, resumed, losses)


@pytest.mark.gpu(2)
def test_two_gpus_train_and_resume_bit_exactly(tmp_path: Path) -> None:
    run_trainer(_trains_and_resumes, 2, str(tmp_path), 1)


@pytest.mark.gpu(4)
def test_two_by_two_gpus_train_and_resume_bit_exactly(tmp_path: Path) -> None:
    run_trainer(_trains_and_resumes, 4, str(tmp_path), 2)


def _trains_alone(rank: int, world: int, root: str, node_size: int) -> None:
    """Nodes end together, near ranks that never part, and go on bit by bit."""
    exact = _fit(root, world, {"weights": "none", "gradients": "none"})[1]
    for bits, bytes_per_value in ((None, (4.0, 4.1)), (4, (0.5, 0.7))):
        local = LocalSteps(every=2, outer_lr=1.0, outer_momentum=0.0, bits=bits)
        options = {"local_steps": local, "node_size": node_size}
        fit = functools.partial(_fit, root, world, options)
        run, losses = fit(max_epochs=2)
        assert same_on_all_ranks(list(weights(run.lightning_module).values()))
        assert max(abs(a - b) for a, b in zip(losses, exact, strict=False)) < 0.3
        sent = run.strategy.quantization_report().counts["bytes_weights_inter"]
        numel = sum(p.to_local().numel() for p in run.lightning_module.parameters())
        exchanges = len(losses) // 2
        low, high = bytes_per_value
        assert low <= sent / numel / exchanges < high, sent / numel / exchanges
        short, first = fit(max_epochs=1)
        path = f"{root}/alone-{bits}.ckpt"
        short.save_checkpoint(path)
        assert first + fit(max_epochs=2, ckpt_path=path)[1] == losses


@pytest.mark.gpu(2)
def test_two_gpus_train_alone_and_are_brought_together(tmp_path: Path) -> None:
    run_trainer(_trains_alone, 2, str(tmp_path), 1)


@pytest.mark.gpu(4)
def test_two_nodes_of_two_gpus_train_alone(tmp_path: Path) -> None:
    run_trainer(_trains_alone, 4, str(tmp_path), 2)


def _trains_while_fragments_travel(rank: int, world: int, root: str, node_size: int) -> None:
    """Nodes end together, near ranks that never part, and do so again."""
    exact = _fit(root, world, {"weights": "none", "gradients": "none"})[1]
    local = LocalSteps(every=2, fragments=2, delay=1, outer_lr=1.0, outer_momentum=0.0, bits=4)
    local = replace(local, error_feedback=True)
    run, losses = _fit(root, world, {"local_steps": local, "node_size": node_size}, max_epochs=2)
    assert same_on_all_ranks(list(weights(run.lightning_module).values()))
    assert max(abs(a - b) for a, b in zip(losses, exact, strict=False)) < 0.3
    again = _fit(root, world, {"local_steps": local, "node_size": node_size}, max_epochs=2)[1]
    assert again == losses


@pytest.mark.gpu(2)
def test_fragments_travel_between_two_gpus(tmp_path: Path) -> None:
    run_trainer(_trains_while_fragments_travel, 2, str(tmp_path), 1)


@pytest.mark.gpu(4)
def test_fragments_travel_between_two_nodes_of_two_gpus(tmp_path: Path) -> None:
    run_trainer(_trains_while_fragments_travel, 4, str(tmp_path), 2)


def _off_and_compiled(rank: int, world: int, root: str) -> None:
    plain = {"weights": "none", "gradients": "none"}
    once = _fit(root, world, plain)[1]
    assert _fit(root, world, plain)[1] == once
    quantized = {"weights": "qWD", "gradients": "TLq-HS"}
    compiled = _fit(root, world, {**quantized, "compile_units": True})[1]
    eager = _fit(root, world, quantized)[1]
    assert max(abs(a - b) for a, b in zip(compiled, eager, strict=True)) < 0.05
    assert dist.get_backend() == "nccl"


@pytest.mark.gpu(2)
def test_compiled_units_on_two_gpus(tmp_path: Path) -> None:
    run_trainer(_off_and_compiled, 2, str(tmp_path))


def _one_node(rank: int, world: int, root: str) -> None:
    run, losses = _fit(root, world, {})
    assert all_linked_by_nvlink(world), "this machine's GPUs are not linked by NVLink"
    assert run.strategy.communication is None
    assert losses == _fit(root, world, {"weights": "none", "gradients": "none"})[1]


@pytest.mark.gpu(4)
@pytest.mark.own_gpus
def test_nothing_is_quantized_by_default_inside_one_nvlink_node(tmp_path: Path) -> None:
    run_trainer(_one_node, 4, str(tmp_path))


@pytest.mark.gpu(1)
def test_one_gpu_runs_like_a_single_device(tmp_path: Path) -> None:
    losses = _fit(str(tmp_path), 1, {}, precision="bf16-mixed")[1]
    plain = Losses()
    torch.manual_seed(0)
    run = trainer(
        "auto",
        str(tmp_path),
        devices=1,
        accelerator="gpu",
        precision="bf16-mixed",
        callbacks=[plain],
    )
    run.fit(TinyModule(), loader(), loader())
    assert losses == plain.values


class _Same(torch.utils.data.Dataset[torch.Tensor]):
    """Data-parallel ranks get the same sequence, so that every rank sees the whole batch's loss."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> torch.Tensor:
        return batch(index // 8)[index % 4]


def _tensor_parallel(rank: int, world: int, root: str) -> None:
    recipes: dict[str, list[Any]] = {
        "none": [],
        "agoq": [ActivationQuantization("agoq")],
        "coat": [ActivationQuantization("coat")],
    }
    exact: dict[bool, list[float]] = {}
    for sequence in (False, True):
        for name, callbacks in recipes.items():
            for options in (PLAIN, {"gradients": "TLq-HS", "weights": "qWD", **SMALL}):
                losses = Losses()
                precision = QuantizedPrecision("bf16-mixed" if callbacks else "32-true")
                strategy = QuantizedFSDPStrategy(tensor_parallel_size=2, **options)
                run = trainer(
                    *(strategy, root, world),
                    accelerator="gpu",
                    callbacks=[losses, *callbacks],
                    plugins=[precision] if callbacks else [],
                    max_steps=20,
                )
                module = ParallelModule(sequence, width=128, lr=1e-3)
                run.fit(module, DataLoader(_Same(), batch_size=8))
                if not callbacks and options is PLAIN:
                    exact[sequence] = losses.values
                near = zip(losses.values, exact[sequence], strict=True)
                assert max(abs(a - b) for a, b in near) < 0.3, (sequence, name, losses.values)
                replicated = replicated_parameters(module).values()
                local = [p.to_local() for p in replicated]  # type: ignore[attr-defined]
                group = module.device_mesh.get_group("tensor_parallel")  # type: ignore[union-attr]
                assert same_on_all_ranks([t.detach() for t in local], group)
    near = zip(exact[False], exact[True], strict=True)
    assert max(abs(a - b) for a, b in near) < 1e-4, exact


@pytest.mark.gpu(2)
def test_two_tensor_parallel_gpus_train(tmp_path: Path) -> None:
    run_trainer(_tensor_parallel, 2, str(tmp_path))


@pytest.mark.gpu(4)
def test_two_by_two_tensor_parallel_gpus_train(tmp_path: Path) -> None:
    run_trainer(_tensor_parallel, 4, str(tmp_path))
