"""What users write outside of the step methods, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelPruning
from lq_testing.lightning_models import PLAIN, Losses, TinyModule, loader, run_trainer, trainer
from lq_testing.models import TinyLM
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lq_lightning import QuantizedFSDPStrategy

TOKENS = torch.arange(16).view(2, 8)


def _fit(
    root: str, module: pl.LightningModule, *callbacks: Callback, **options: Any
) -> list[float]:
    losses = Losses()
    strategy = QuantizedFSDPStrategy(**options.pop("strategy", PLAIN))
    run = trainer(strategy, root, callbacks=[losses, *callbacks], **options)
    run.fit(module, loader(), loader(8))
    return losses.values


def _kinds(module: nn.Module) -> set[bool]:
    return {isinstance(p, DTensor) for p in module.parameters()}


def _whole(module: TinyModule) -> TinyLM:
    """A copy of the net on this rank alone."""
    copy = TinyLM()
    copy.load_state_dict({k: v.full_tensor() for k, v in module.net.state_dict().items()})
    return copy


class Caller(TinyModule):
    """Calls submodules in hooks, units and modules of the root, from the first hook on."""

    def __init__(self) -> None:
        super().__init__()
        self.checked: list[str] = []

    def on_train_start(self) -> None:
        self.net.blocks[1](torch.ones(1, 8, 24))  # a unit, before the root ever ran
        self._compare("train start")

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        with torch.no_grad():
            self._compare("batch start")

    def on_before_backward(self, loss: Tensor) -> None:
        self.net(TOKENS)

    def on_validation_epoch_end(self) -> None:
        self._compare("validation end")

    def on_train_epoch_end(self) -> None:
        with pytest.raises(IndexError):
            self.net(torch.full((2, 8), 1000))
        self._compare("epoch end")
        self._compare_gradients()

    def _compare(self, where: str) -> None:
        assert _kinds(self) == {True}, where
        whole = _whole(self)
        torch.testing.assert_close(self.net(TOKENS), whole(TOKENS))
        x = torch.ones(1, 24)
        torch.testing.assert_close(self.net.head(x), whole.head(x))
        assert _kinds(self) == {True}, where
        self.checked.append(where)

    def _compare_gradients(self) -> None:
        whole = _whole(self)
        self.zero_grad()
        for net in (self.net, whole):
            net(TOKENS).backward()
        for mine, expected in zip(self.net.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), expected.grad)


class ReadsWeights(TinyModule):
    def on_train_epoch_end(self) -> None:
        nn.functional.linear(torch.ones(1, 24), self.net.head.weight)


def _calls(rank: int, world_size: int, root: str) -> None:
    torch.manual_seed(0)
    expected = _fit(root, TinyModule())
    torch.manual_seed(0)
    module = Caller()
    assert _fit(root, module) == expected
    assert set(module.checked) == {"train start", "batch start", "validation end", "epoch end"}
    # in the dtypes of the steps, and with codecs
    torch.manual_seed(0)
    mixed = CallsInBf16()
    _fit(root, mixed, precision="bf16-mixed", strategy={"min_quantized_numel": 64})
    assert mixed.dtypes == {torch.bfloat16}
    with pytest.raises(RuntimeError, match=r"call modules .*root_forward.*torch says: aten"):
        _fit(root, ReadsWeights())


class CallsInBf16(TinyModule):
    """A float input to a layer of the root, whose weights are bf16 while they are gathered."""

    def on_train_epoch_end(self) -> None:
        x = torch.ones(1, 24, device=self.device)
        self.dtypes = {self.net.head(x).dtype}
        with self.trainer.strategy.root_forward():
            assert self.net.head.weight.shape == (31, 24)
            assert not isinstance(self.net.head.weight, DTensor)


def _calls_on_gpus(rank: int, world_size: int, root: str) -> None:
    module = CallsInBf16()
    options = {"accelerator": "gpu", "precision": "bf16-mixed"}
    _fit(root, module, strategy={"min_quantized_numel": 64}, **options)
    assert module.dtypes == {torch.bfloat16}


@pytest.mark.gpu(2)
def test_submodules_can_be_called_in_hooks_on_two_gpus(tmp_path: Path) -> None:
    run_trainer(_calls_on_gpus, 2, str(tmp_path))


# --- penalties on weights -----------------------------------------------------------------------


class Penalized(TinyModule):
    """A term over all parameters in the loss, before or after the forward."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        penalty = self._penalty() if self.first else None
        loss: Tensor = self.net(tokens)
        return loss + 1e-2 * (self._penalty() if penalty is None else penalty)

    def _penalty(self) -> Any:
        return sum(p.pow(2).sum() for p in self.parameters())


class PenalizedThroughGradients(TinyModule):
    """What the message says to do instead."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.add_(p.detach(), alpha=2 * 1e-2)


def _penalties(rank: int, world_size: int, root: str) -> None:
    for first in (False, True):
        with pytest.raises(RuntimeError, match=r"loss is a DTensor.*weight_decay.*p\.grad\.add_"):
            _fit(root, Penalized(first))
    torch.manual_seed(0)
    module = PenalizedThroughGradients("sgd", lr=0.5)
    _fit(root, module)
    torch.manual_seed(0)
    reference = Penalized(False)
    reference.optimizer_name, reference.lr = "sgd", 0.5
    trainer("ddp", root).fit(reference, loader())
    for mine, expected in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match=r"`ModelPruning` replaces.*`configure_model`"):
        _fit(root, TinyModule(), ModelPruning("l1_unstructured"))
    pruned = Pruned()
    _fit(root, pruned)
    assert (pruned.net.head.weight_mask == 0).sum() == 31 * 24 // 2


class Pruned(TinyModule):
    """What the message says to do instead."""

    def configure_model(self) -> None:
        nn.utils.prune.l1_unstructured(self.net.head, "weight", amount=0.5)
        nn.utils.prune.l1_unstructured(self.net.blocks[0].up, "weight", amount=0.5)


def _all(rank: int, world_size: int, root: str) -> None:
    _calls(rank, world_size, root)
    _penalties(rank, world_size, root)


def test_hooks_on_two_ranks(tmp_path: Path) -> None:
    run_trainer(_all, 2, str(tmp_path))
