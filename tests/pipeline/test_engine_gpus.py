"""Pipelines over NCCL: streams and lifetimes of payloads, on GPUs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from lq_testing import run_ranks
from lq_testing.pipeline_toys import WIDTH, Boundary, Layer, ToyStage
from torch import Tensor, nn

from lq_lightning.pipeline.boundary import make_boundary_codec
from lq_lightning.pipeline.engine import PipelineEngine
from lq_lightning.pipeline.schedules import stages_of_rank

ROWS = 4096  # a payload takes long enough to be overtaken
COUNT = 8
CASES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("eager_1f1b", 1),
    ("interleaved_1f1b", 2),
    ("zero_bubble", 2),
    ("zbv", 2),
]


class Busy(nn.Module):
    """A layer that leaves memory behind for others, waits for the device now and then."""

    def __init__(self, waits: bool) -> None:
        super().__init__()
        self.layer = Layer()
        self.waits = waits

    def forward(self, x: Tensor) -> Tensor:
        torch.full((ROWS, WIDTH), float("nan"), device=x.device)  # freed at once
        if self.waits:
            torch.cuda.synchronize()
        return self.layer(x)


def _stages(num_stages: int, device: torch.device, waits: bool) -> list[ToyStage]:
    torch.manual_seed(0)
    layers = nn.ModuleList(Busy(waits) for _ in range(num_stages)).to(device)
    data = torch.randn(COUNT, ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    return [
        ToyStage(layers[i : i + 1], i == 0, i == num_stages - 1, data)  # type: ignore[arg-type]
        for i in range(num_stages)
    ]


def _run(
    schedule: str, per_rank: int, rank: int, size: int, group: dist.ProcessGroup | None, waits: bool
) -> tuple[list[float], dict[str, Tensor]]:
    device = torch.device("cuda", torch.cuda.current_device())
    num_stages = size * per_rank
    stages = _stages(num_stages, device, waits)
    mine = stages_of_rank(schedule, rank, num_stages, size)
    engine = PipelineEngine(
        {index: stages[index] for index in mine},
        num_stages,
        group,
        None,
        device,
        schedule,
        COUNT,
        make_boundary_codec("bf16"),
        make_boundary_codec("bf16", backward=True),
    )
    boundary = Boundary((ROWS, WIDTH))
    losses: list[Tensor] = []
    for _ in range(5):
        with torch.inference_mode():
            engine.evaluate(boundary)
        losses += engine.step(boundary)
    engine.close()
    gradients = {
        f"{index}.{name}": parameter.grad.cpu()
        for index in mine
        for name, parameter in stages[index].named_parameters()
        if parameter.grad is not None
    }
    return [loss.item() for loss in losses], gradients


def _ranks(rank: int, size: int, waits: bool) -> list[tuple[list[float], dict[str, Tensor]]]:
    results = []
    for schedule, per_rank in CASES:
        group = dist.new_group(list(range(size)))
        results.append(_run(schedule, per_rank, rank, size, group, waits))
    return results


@pytest.mark.gpu(2)
def test_steps_over_nccl_are_the_same_however_ranks_wait() -> None:
    # A payload that is used before it is there, or overwritten before it is gone, changes numbers;
    # with a device that is waited for in every layer neither can happen.
    hurried = run_ranks(_ranks, 2, False, backend="nccl", timeout=240)
    waited = run_ranks(_ranks, 2, True, backend="nccl", timeout=240)
    for one, other in zip(hurried, waited, strict=True):
        for (losses, gradients), (same, expected) in zip(one, other, strict=True):
            assert losses == same
            assert gradients.keys() == expected.keys()
            for name, gradient in gradients.items():
                assert gradient.isfinite().all()
                torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)
    assert any(losses for losses, _ in (rank[0] for rank in hurried))
