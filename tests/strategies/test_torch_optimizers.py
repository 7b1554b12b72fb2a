"""Which of torch's optimizers work on sharded parameters, only some of which are on two axes."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lq_testing import run_ranks
from lq_testing.lightning_models import Losses, TinyModule, loader, trainer
from lq_testing.models import Block
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim import Optimizer

from lq_lightning import QuantizedFSDPStrategy
from lq_lightning.strategies.checks import check_optimizer

NAMES = sorted(
    name
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
)
WITH = {
    option: [n for n in NAMES if option in inspect.signature(getattr(torch.optim, n)).parameters]
    for option in ("fused", "foreach")
}
# On GPUs, `foreach` is torch's default.
CASES = [f"{name} {option}" for option, names in WITH.items() for name in names]
CASES += ["ASGD", *(name for name in NAMES if name not in WITH["foreach"])]
REFUSED = {"Adafactor", "LBFGS", "Rprop", "SparseAdam", "Adagrad fused", "SGD fused"}
REFUSED |= {"Adafactor foreach", "Rprop foreach", "ASGD foreach"}
PLAN = {"down": ColwiseParallel(output_layouts=Replicate())}


def _steps(case: str, module: nn.Module) -> Optimizer:
    name, *options = case.split()
    parameters = [p for p in module.parameters() if name != "Muon" or p.ndim == 2]
    optimizer = getattr(torch.optim, name)(parameters, **dict.fromkeys(options, True))
    check_optimizer(optimizer)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        module(torch.randn(256, 24, generator=generator)).pow(4).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _all(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    for case in CASES:
        torch.manual_seed(0)
        sharded, whole = Block(), Block()
        whole.load_state_dict(sharded.state_dict())
        parallelize_module(sharded, mesh["tensor_parallel"], PLAN)
        fully_shard(sharded, mesh=mesh["data_parallel"])
        if case in REFUSED:
            with pytest.raises(NotImplementedError, match="does not work"):
                _steps(case, sharded)
            continue
        start = {name: p.detach().clone() for name, p in whole.named_parameters()}
        optimizer = _steps(case, sharded)
        _steps(case, whole)
        assert case != "ASGD" or optimizer.param_groups[0]["foreach"] is False
        for (name, mine), expected in zip(
            sharded.named_parameters(), whole.parameters(), strict=True
        ):
            if case == "Muon":  # orthogonalizes in bf16
                error = (mine.full_tensor() - expected).norm()
                assert error <= 0.05 * (expected - start[name]).norm()
            else:
                torch.testing.assert_close(mine.full_tensor(), expected, msg=case)


def test_those_that_are_not_refused_step_like_on_one_device() -> None:
    run_ranks(_all, 4)


class Factored(Optimizer):
    """Keeps a plain tensor for the rows of matrices, which is mixed with sharded ones."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.stepped = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.stepped += 1
        for parameter in [p for group in self.param_groups for p in group["params"]]:
            if parameter.grad is not None:
                self.update(parameter, parameter.grad.detach())

    def update(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        if grad.dim() > 1:
            state = self.state[parameter].setdefault("row", torch.zeros(grad.shape[:-1]))
            state.add_(grad.square().mean(-1))


class Sharded(Factored):
    """Works on shards, needs a closure, and draws random numbers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.register_step_post_hook(lambda *unused: pytest.fail("a trial is no step"))

    def update(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        parameter.detach().add_(grad, alpha=-float(torch.rand(())))


class Blocked(Factored):
    """Works on shards of whole blocks alone, which small ones are not."""

    def update(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        raise ValueError("blocks of 128 expected")


class Metered(Sharded):
    """Counts its steps in an object."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.meter = SimpleNamespace(steps=0)

    def update(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        super().update(parameter, grad)
        self.meter.steps += 1


class Wrapping(Sharded):
    """Steps another optimizer, of the model's own parameters."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.inner = {"base": torch.optim.SGD(params, lr=1.0)}

    def update(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        pytest.fail("its copy shares the other optimizer")


def _foreign(rank: int, world_size: int) -> None:
    module = Block()
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    before, drawn = [p.full_tensor().clone() for p in module.parameters()], torch.get_rng_state()
    with pytest.raises(NotImplementedError, match=r"`Factored` of `.*Use AdamW"):
        check_optimizer(Factored(module.parameters()))
    for make in (Sharded, Blocked, Metered, Wrapping):
        optimizer = make(module.parameters())
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # wraps `step`
        check_optimizer(optimizer)
        assert optimizer.stepped == 0
        assert not isinstance(optimizer, Metered) or optimizer.meter.steps == 0
        assert not optimizer.state
    assert torch.equal(drawn, torch.get_rng_state())
    for parameter, whole in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter.full_tensor(), whole)


def test_others_optimizers_are_tried_on_small_shards() -> None:
    run_ranks(_foreign, 2)


class WithOptimizer(TinyModule):
    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self.make = optimizer

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def _refused(rank: int, world_size: int, root: str) -> None:
    losses = Losses()
    run = trainer(QuantizedFSDPStrategy(), root, devices=world_size, callbacks=[losses])
    module = WithOptimizer(torch.optim.Adafactor)
    if world_size == 1:
        run.fit(module, loader())
        return
    with pytest.raises(NotImplementedError, match=r"`Adafactor` .*Use AdamW.*on one rank"):
        run.fit(module, loader())
    assert not losses.values


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_refusal_comes_before_the_first_step_and_only_where_parameters_are_sharded(
    tmp_path: Any, world_size: int
) -> None:
    run_ranks(_refused, world_size, str(tmp_path), backend=None, torchrun=True)
