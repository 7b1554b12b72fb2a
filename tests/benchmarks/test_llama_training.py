"""Runs of an ablation on a Llama: micro-batches, fp32 weights and a shared start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

Load = Callable[[str], ModuleType]


@pytest.fixture
def start(load: Load) -> Callable[..., Any]:
    """Start a run on tokens that are drawn."""
    training = load("llama_training")
    blocks = torch.randint(24, (16, 9), generator=torch.Generator().manual_seed(2))
    data = load("ablation_data").Data(blocks, blocks, 24, {})
    sizes = {"hidden": 16, "intermediate": 16, "seq": 8, "steps": 6, "lr": 1e-2}

    def make(**changes: int) -> Any:
        preset = replace(training.PRESETS["smoke"], **sizes | changes)
        return training.Training(data, preset, seed=0)

    return make


def _weights(training: Any) -> list[torch.Tensor]:
    return [master.detach().clone() for master in training.weights.masters]


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    whole, first, second = start(), start(), start()
    whole.run(5)
    first.run(2)
    first.save(tmp_path / "trunk.pt")
    second.resume(tmp_path / "trunk.pt")
    second.weights.publish()
    second.run(3)
    assert second.step == 5
    for expected, found in zip(_weights(whole), _weights(second), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_micro_batches_sum_to_the_gradient_of_the_batch(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.zeros(()))
    steps = [start(micro_batch=size) for size in (4, 1)]
    before = _weights(steps[0])
    for training in steps:
        training.optimizer.step = lambda: None
        training.optimizer.zero_grad = lambda: None
        training.schedule.step = lambda: None
        training.run(1)
    whole, parts = (
        torch.cat([m.grad.flatten() for m in training.weights.masters]) for training in steps
    )
    assert (whole - parts).norm() < 0.05 * whole.norm()
    for training in steps:  # no step was taken, and the model has the weights in bf16
        for weight, master in zip(training.model.parameters(), before, strict=True):
            torch.testing.assert_close(weight, master.bfloat16(), rtol=0, atol=0)


def test_small_updates_are_kept_in_fp32(start: Callable[..., Any]) -> None:
    training = start()
    weight, master = next(training.model.parameters()), training.weights.masters[0]
    with torch.no_grad():
        master.fill_(1.0)
        for _ in range(256):  # each too small for bf16
            master.add_(2.0**-12)
            training.weights.publish()
    torch.testing.assert_close(weight, torch.full_like(weight, 1.0625), rtol=0, atol=0)
