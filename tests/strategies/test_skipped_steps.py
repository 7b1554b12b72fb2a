"""``skip_nonfinite_steps``: an infinite gradient counts even where something clamps it later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lq_testing.lightning_models import TinyModule, loader, trainer
from torch import Tensor, nn

from lq_lightning import QuantizedFSDPStrategy, QuantizedPrecision

BY_VALUE = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
BY_NORM = {"gradient_clip_val": 1.0}


class Bursting(TinyModule):
    """One element of one gradient is not finite after the third backward pass."""

    def __init__(self, value: float) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.value, self.passes = value, 0

    def on_after_backward(self) -> None:
        self.passes += 1
        if self.passes == 3:
            self.net.head.weight.grad[3, 3] = self.value

    def clamp(self) -> None:
        for parameter in self.parameters():
            parameter.grad.nan_to_num_(0.0, 1.0, -1.0)


class ClampsInHook(Bursting):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.clamp()


class ClampsInClipping(Bursting):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clamp()


class Breaks(Bursting):
    """A hook is the one that makes it infinite."""

    def on_after_backward(self) -> None:
        pass

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_after_backward()


class Manual(Bursting):
    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.automatic_optimization = False

    def training_step(self, tokens: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.net(tokens))
        self.clip_gradients(optimizer, **BY_VALUE)
        if self.steps(batch_idx):
            optimizer.step()
        optimizer.zero_grad()

    def steps(self, batch_idx: int) -> bool:
        return True


CASES = [
    (Bursting, float("inf"), BY_VALUE),
    (Bursting, float("nan"), BY_VALUE),
    (Bursting, float("-inf"), BY_NORM),
    (ClampsInHook, float("inf"), {}),
    (ClampsInClipping, float("nan"), {}),
    (Breaks, float("inf"), BY_VALUE),
    (Manual, float("inf"), {}),
]


@pytest.mark.parametrize(("kind", "value", "options"), CASES)
def test_what_is_clamped_is_still_skipped(
    tmp_path: Any, kind: type[Bursting], value: float, options: dict[str, Any]
) -> None:
    module = kind(value)
    before: list[Tensor] = []
    head = module.net.head.weight
    module.on_train_batch_end = lambda *_: before.append(head.detach().clone())
    strategy = QuantizedFSDPStrategy(skip_nonfinite_steps=True)
    with pytest.warns(UserWarning, match=r"skipped .* \(1 so far\)"):
        trainer(strategy, str(tmp_path), 1, **options).fit(module, loader(16))
    assert strategy.num_skipped_steps == 1
    assert torch.equal(before[1], before[2])
    assert not torch.equal(before[2], before[3])


class Coded(Bursting):
    """With a matrix whose gradient sum is kept in codes."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.wide = nn.Linear(200, 24, bias=False)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(tokens)
        return loss + self.wide.weight.square().mean()

    def on_after_backward(self) -> None:
        self.passes += 1
        if self.passes == 4:
            self.wide.weight.grad[3, 3] = self.value


def test_sums_in_codes_are_looked_at_too(tmp_path: Any) -> None:
    module = Coded(float("inf"))
    strategy = QuantizedFSDPStrategy(skip_nonfinite_steps=True)
    options = {"plugins": [QuantizedPrecision()], "accumulate_grad_batches": 2, **BY_VALUE}
    with pytest.warns(UserWarning, match=r"skipped .* \(1 so far\)"):
        trainer(strategy, str(tmp_path), 1, **options).fit(module, loader(24))
    assert strategy.num_skipped_steps == 1
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_what_an_abandoned_batch_clipped_is_forgotten(tmp_path: Any) -> None:
    class Abandons(Manual):
        def steps(self, batch_idx: int) -> bool:
            return batch_idx != 2

    strategy = QuantizedFSDPStrategy(skip_nonfinite_steps=True)
    trainer(strategy, str(tmp_path), 1).fit(Abandons(float("inf")), loader(16))
    assert strategy.num_skipped_steps == 0
