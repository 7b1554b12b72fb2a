"""The stages of a pipeline in one process: hidden states and their gradients passed by hand."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lq_lightning.pipeline.partition import StageModule, keep_stages
from lq_lightning.pipeline.plan import PipelinePlan, Split, plan_stages

Step = Callable[[Any, Any], Tensor]


@dataclass
class Ranks:
    """The copies of a model that ranks would hold, and their stages in order."""

    plan: PipelinePlan
    modules: list[nn.Module]
    stages: list[StageModule]

    def forward(self, index: int = 0) -> tuple[list[Any], list[Tensor]]:
        """Return outputs of all stages for a micro-batch, and inputs of all but the first."""
        outputs: list[Any] = []
        received: list[Tensor] = []
        for stage in self.stages:
            stage.index = index
            # No leaves, which could not be changed in place: neither are what an engine receives.
            outputs.append(stage(*(leaf.clone() for leaf in received[-1:])))
            if stage is not self.stages[-1]:
                received.append(outputs[-1].detach().requires_grad_(torch.is_grad_enabled()))
        return outputs, received

    def backward(self, outputs: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        gradient = None
        for stage in reversed(range(len(outputs))):
            outputs[stage].backward(gradient)
            gradient = received[stage - 1].grad if stage else None

    def gradients(self) -> dict[str, Tensor]:
        """Sums over the ranks that hold a parameter, by its first name in the whole model."""
        first = {name: shared.names[0] for shared in self.plan.shared for name in shared.names}
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for module in self.modules:
            for name, parameter in module.named_parameters():
                gradient = parameter.grad
                if isinstance(gradient, DTensor):
                    gradient = gradient.full_tensor()
                if gradient is not None:
                    parts[first.get(name, name)].append(gradient)
        return {name: torch.stack(found).sum(0) for name, found in parts.items()}


def cut(
    model: nn.Module,
    step: Step,
    batches: Sequence[Any],
    num_stages: int,
    stages_per_rank: int = 1,
    *,
    split: Split = "parameters",
    prepare: Callable[[nn.Module], Callable[..., Any] | None] = lambda module: None,
) -> Ranks:
    """Copies of ``model`` on ranks that hold the stages in turn.

    ``prepare`` may shard each copy; what it returns goes around its parts.
    """
    plan = plan_stages(model, num_stages, split)
    ranks = num_stages // stages_per_rank
    modules = [copy.deepcopy(model) for _ in range(ranks)]
    stages: list[StageModule] = []
    around = []
    for rank, module in enumerate(modules):
        keep_stages(module, plan, range(rank, num_stages, ranks))
        around.append(prepare(module))
    for index in range(num_stages):
        module, enter = modules[index % ranks], around[index % ranks]

        def run(microbatch: int, module: nn.Module = module) -> Tensor:
            return step(module, batches[microbatch])

        extra = {} if enter is None else {"enter": enter}
        stages.append(StageModule(module, index, run, **extra))
    boundary = stages[0].probe(0)
    for stage in stages:
        stage.set_boundary(boundary)
    return Ranks(plan=plan, modules=modules, stages=stages)


def check_equal(
    model: nn.Module, step: Step, batches: Sequence[Any], *args: Any, **kwargs: Any
) -> Ranks:
    """Losses and gradients of the stages are those of the whole model, and so are the names."""
    model.zero_grad()
    expected = [step(model, batch) for batch in batches]
    torch.stack(expected).sum().backward()
    ranks = cut(model, step, batches, *args, **kwargs)
    losses = []
    for index in range(len(batches)):
        outputs, received = ranks.forward(index)
        ranks.backward(outputs, received)
        losses.append(outputs[-1].detach())
    torch.testing.assert_close(losses, [loss.detach() for loss in expected])
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(ranks.gradients(), gradients)
    names = [name for module in ranks.modules for name in module.state_dict()]
    assert set(names) == set(model.state_dict())
    return ranks
