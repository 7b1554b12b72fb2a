"""Means over targets in a pipeline are those of the batch, however it is padded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lq_testing.lightning_models import EXACT, Losses, TinyModule, Tokens, run_trainer, trainer
from lq_testing.models import VOCAB
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from lq_lightning import QuantizedPipelineStrategy
from lq_lightning.strategies.pipelines.targets import BatchMeans

Loss = Callable[[Tensor, dict[str, Tensor]], Tensor]  # of logits [B, T, V]


# --- one step of several micro-batches, without a pipeline ----------------------------------------


def _shifted(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """As transformers does, with another loss beside it."""
    labels = F.pad(batch["labels"], (0, 1), value=-100)[..., 1:].contiguous().to(logits.device)
    loss = F.cross_entropy(logits.float().view(-1, VOCAB), labels.view(-1), ignore_index=-100)
    return loss + logits.square().mean()


def _sliced(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].reshape(-1))


def _made_in_place(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Two losses, of labels that the step makes."""
    labels = batch["tokens"].clone()
    labels[torch.arange(labels.shape[1]) >= batch["lengths"][:, None]] = 1
    first = torch.nn.CrossEntropyLoss(ignore_index=1)(logits.transpose(1, 2), labels)
    return first + F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) / 3


def _weighted(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    weight = torch.linspace(0.5, 2, VOCAB)
    flat, labels = logits.flatten(0, 1), batch["labels"].flatten()
    smooth = F.cross_entropy(flat, labels, weight, label_smoothing=0.1)
    return smooth + F.nll_loss(flat.log_softmax(1), labels, weight=weight)


def _masked(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Only what counts reaches the loss, also where nothing does."""
    keep = batch["labels"] != -100
    if not bool(keep.any()):
        return logits.sum() * 0
    return F.cross_entropy(logits[keep], batch["labels"][keep])


def _batch(counts: list[int], length: int = 6) -> dict[str, Tensor]:
    """A sample of each length, of which the first labels count."""
    generator = torch.Generator().manual_seed(len(counts))
    tokens = torch.randint(2, VOCAB, (len(counts), length), generator=generator)
    lengths = torch.tensor(counts)
    labels = tokens.masked_fill(torch.arange(length) >= lengths[:, None], -100)
    return {"tokens": tokens, "labels": labels, "lengths": lengths}


def _parts(batch: dict[str, Tensor], count: int) -> list[tuple[dict[str, Tensor]]]:
    chunks = {name: tensor.chunk(count) for name, tensor in batch.items()}
    return [({name: own[index] for name, own in chunks.items()},) for index in range(count)]


def _run(loss: Loss, counts: list[int], parts: int, corrected: bool = True) -> Any:
    """Loss and gradient of micro-batches, and what the means could not take into account."""
    batch = _batch(counts)
    logits = torch.randn(
        len(counts), 6, VOCAB, generator=torch.Generator().manual_seed(1), requires_grad=True
    )
    own = _parts(batch, parts)
    means, total = BatchMeans(own), torch.zeros(())
    for index, (part,) in enumerate(own):
        hidden = logits.chunk(parts)[index]
        if corrected:
            with means.watching(index):
                value = loss(hidden, part)
        else:
            value = loss(hidden, part)
        (value / parts).backward()
        total += value.detach() / parts
    return total, logits.grad, means.left_out()


@pytest.mark.parametrize("loss", [_shifted, _sliced, _made_in_place, _weighted, _masked])
@pytest.mark.parametrize("counts", [[6, 2, 3, 4], [6, 5, 0, 0, 1, 6, 3, 3]])
def test_means_are_those_of_the_batch(loss: Loss, counts: list[int]) -> None:
    expected = _run(loss, counts, 1, corrected=False)
    loss_of_parts, gradient, left_out = _run(loss, counts, len(counts) // 2)
    torch.testing.assert_close(loss_of_parts, expected[0])
    torch.testing.assert_close(gradient, expected[1])
    assert left_out is None
    if loss is not _weighted:  # a mean over classes
        same = [4] * 4
        plain, ours = (_run(loss, same, 2, corrected=given) for given in (False, True))
        assert torch.equal(ours[0], plain[0])
        assert torch.equal(ours[1], plain[1])


def test_a_batch_without_targets_is_nan() -> None:
    loss, gradient, _ = _run(_sliced, [0, 0, 0, 0], 2)
    assert loss.isnan()
    assert torch.equal(gradient, torch.zeros_like(gradient))


def _each_sample(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    losses = [F.cross_entropy(logits[i], batch["labels"][i]) for i in range(len(logits))]
    return torch.stack(losses).mean()


def test_means_over_parts_of_a_micro_batch_stay_as_they_are() -> None:
    counts = [6, 5, 1, 2]
    expected = _run(_each_sample, counts, 1, corrected=False)
    loss, gradient, left_out = _run(_each_sample, counts, 2)
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(gradient, expected[1])
    assert left_out == [6, 1]


def _perplexity(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return torch.exp((_sliced(logits, batch).float() / 2).clamp(max=20))


def _focal(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return torch.exp(-_sliced(logits, batch)).pow(2)


def _changed_in_place(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    loss = _each_sample(logits, batch) + _sliced(logits, batch).detach() * 0
    loss += 1
    return loss.exp()


@pytest.mark.parametrize("loss", [_perplexity, _focal, _changed_in_place])
def test_what_is_not_linear_in_a_mean_takes_that_of_the_micro_batch(loss: Loss) -> None:
    counts = [6, 5, 2, 3]
    expected, same, _ = _run(loss, counts, 2, corrected=False)
    ours, gradient, _ = _run(loss, counts, 2)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(gradient, same)


def _at_random(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["labels"].masked_fill(torch.rand(batch["labels"].shape) < 0, 5)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _trimmed(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    length = int(batch["lengths"].max())
    return F.cross_entropy(logits[:, :length].flatten(0, 1), batch["labels"][:, :length].flatten())


def _view_changed(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["labels"].clone()
    labels[:, 1:].masked_fill_(torch.ones(5, dtype=torch.bool), -100)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _of_hidden(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    labels = logits.argmax(-1).where(batch["labels"] != -100, -100)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _own_mean(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return losses.sum() / (batch["labels"] != -100).sum()


def _checkpointed(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return checkpoint(_sliced, logits, batch, use_reentrant=False)


@pytest.mark.parametrize(
    "loss", [_at_random, _trimmed, _of_hidden, _own_mean, _checkpointed, _view_changed]
)
def test_what_cannot_be_counted_before_stays_as_it_is(loss: Loss) -> None:
    counts = [6, 2, 1, 3]
    expected, same, _ = _run(loss, counts, 2, corrected=False)
    ours, gradient, left_out = _run(loss, counts, 2)
    assert torch.equal(ours, expected)
    assert torch.equal(gradient, same)
    numbers = {_checkpointed: [6, 2], _view_changed: None}.get(loss, [8, 4])
    assert left_out == numbers


def test_targets_made_in_another_way_are_refused() -> None:
    def changing(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["labels"] if bool(batch["lengths"][0] == 6) else batch["tokens"]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    with pytest.raises(RuntimeError, match="otherwise in one micro-batch.*`count_targets`"):
        _run(changing, [6, 2, 1, 3], 2)


def test_counts_are_checked() -> None:
    with pytest.raises(ValueError, match=r"count_targets=5\)` is not supported: give a function"):
        QuantizedPipelineStrategy(count_targets=5)  # type: ignore[arg-type]
    options = QuantizedPipelineStrategy(count_targets=lambda batch: batch)._pipeline_options
    assert options.shares([1, torch.tensor(3)]) == [0.5, 1.5]
    assert options.shares([0, 0]) == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"returned \[1.0, -1.0\] for the micro-batches"):
        options.shares([1, -1])


# --- through the Trainer --------------------------------------------------------------------------


class Padded(Dataset[dict[str, Tensor]]):
    """Sequences of random lengths; of 8 samples the first two have no labels."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens, length = Tokens()[index], 0 if index % 8 < 2 else 1 + 5 * index % 8
        return {"tokens": tokens, "labels": tokens.where(torch.arange(8) < length, -100)}


class Module(TinyModule):
    def __init__(self, own_mean: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__(layers=4)
        self.own_mean = own_mean

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.net.embed(batch["tokens"])
        for block in self.net.blocks:
            x = block(x)
        loss = (_own_mean if self.own_mean else _sliced)(self.net.head(x * self.net.tiny), batch)
        self.log("logged", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))


class Norms(pl.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if getattr(trainer.strategy, "pipeline", None) is not None:
            self.values.append(trainer.strategy.gradient_norm().item())
        else:
            gradients = [p.grad for p in module.parameters()]
            self.values.append(torch.nn.utils.get_total_norm(gradients).item())


def _labels(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"] != -100).sum()


def _fit(rank: int, world_size: int, root: str) -> Any:
    found = []
    for schedule, own_mean in (("1f1b", False), ("zero_bubble", False), ("1f1b", True)):
        strategy: Any = "auto"
        if world_size > 1:
            count = _labels if own_mean else None
            strategy = QuantizedPipelineStrategy(schedule=schedule, count_targets=count, **EXACT)
        losses, norms = Losses(), Norms()
        options = {"use_distributed_sampler": False, "callbacks": [losses, norms]}
        run = trainer(strategy, root, world_size, accumulate_grad_batches=2, **options)
        data = DataLoader(Padded(), batch_size=8)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="the micro-batches of a batch have")
            run.fit(Module(own_mean), data, data)
        metrics = {name: value.item() for name, value in run.callback_metrics.items()}
        found.append((losses.values, norms.values, metrics))
    if world_size > 1:
        run = trainer(QuantizedPipelineStrategy(**EXACT), root, 2, use_distributed_sampler=False)
        match = r"\[0, .*\] targets and losses of \[nan, .*`count_targets`"
        with pytest.warns(UserWarning, match=match) if rank else warnings.catch_warnings():
            run.fit(Module(own_mean=True), data)
    return found


def test_padding_changes_nothing(tmp_path: Any) -> None:
    """Losses, norms of gradients and what is logged, with a micro-batch that has no label."""
    (alone,) = run_trainer(_fit, 1, str(tmp_path))
    for together in run_trainer(_fit, 2, str(tmp_path)):
        for ours, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
