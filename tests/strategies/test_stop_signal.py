"""SIGTERM on one rank stops all of them at the same batch."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lq_testing.lightning_models import Losses, TinyModule, Tokens, loader, run_trainer, trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lq_lightning import QuantizedFSDPStrategy
from lq_lightning.strategies.failures import StopSignal

OPTIONS = {"min_quantized_numel": 64}


class Same(Tokens):
    """One sequence over and over: a resumed loader starts from its beginning."""

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(0)


class Signal(Callback):
    """Sends SIGTERM to one rank while it trains or validates."""

    def __init__(self, where: str, rank: int) -> None:
        self.where, self.rank = where, rank

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if (self.where, trainer.global_step) in (("training", 2), ("last batch", 3)):
            self._send(trainer)

    def on_validation_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if (self.where, trainer.global_step) in (("validation", 2), ("last validation", 4)):
            self._send(trainer)

    def on_test_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._send(trainer)

    def _send(self, trainer: pl.Trainer) -> None:
        if trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)


def _fit(root: str, gpu: bool, *callbacks: Callback, **options: Any) -> Losses:
    torch.manual_seed(0)
    losses = Losses()
    resume = {"ckpt_path": options.pop("ckpt_path", None)}
    run = trainer(
        QuantizedFSDPStrategy(**OPTIONS),
        root,
        accelerator="gpu" if gpu else "cpu",
        callbacks=[losses, *callbacks],
        **options,
    )
    try:
        run.fit(TinyModule(), DataLoader(Same(40), batch_size=4), loader(8), **resume)
    except SIGTERMException:
        assert run.received_sigterm
    return losses


def _stops(rank: int, world_size: int, root: str, where: str, gpu: bool) -> None:
    options: dict[str, Any] = {"val_check_interval": 2} if where == "validation" else {}
    whole = _fit(root, gpu, **options).values
    handler = signal.getsignal(signal.SIGTERM)
    save = OnExceptionCheckpoint(root, filename=where)
    said: list[str] = []
    with mock.patch("lq_lightning.strategies.failures.rank_zero_info", said.append):
        first = _fit(
            root, gpu, Signal(where, rank=1), save, enable_checkpointing=True, **options
        ).values
    told = f"Received SIGTERM (rank 1 of 2): all ranks stop after optimizer step {len(first)}"
    assert said == [told]
    assert signal.getsignal(signal.SIGTERM) is handler
    # the batch of the signal, if there is one, is trained; on GPUs up to two more
    expected = 2 if where == "validation" else 3
    assert len(first) in ((expected + 1, expected + 2) if gpu else (expected,))
    lengths = [torch.zeros(1, device="cuda" if gpu else "cpu") for _ in range(world_size)]
    torch.distributed.all_gather(lengths, torch.full_like(lengths[0], len(first)))
    assert {int(n) for n in lengths} == {len(first)}
    rest = _fit(root, gpu, ckpt_path=f"{root}/{where}.ckpt", **options).values
    assert first + rest == whole, (first, rest, whole)


def _stops_at_the_end(rank: int, world_size: int, root: str, where: str, gpu: bool) -> None:
    losses = Losses()
    run = trainer(
        QuantizedFSDPStrategy(**OPTIONS),
        root,
        accelerator="gpu" if gpu else "cpu",
        callbacks=[losses, Signal(where, rank=1)],
    )
    with pytest.raises(SIGTERMException):
        run.fit(TinyModule(), loader(), loader(8))
    assert run.received_sigterm
    assert len(losses.values) == 4


def _tests(root: str, rank: int) -> None:
    run = trainer(QuantizedFSDPStrategy(**OPTIONS), root, callbacks=[Signal("test", rank)])
    with pytest.raises(SIGTERMException):
        run.test(TinyModule(), loader())


def _on_cpu(rank: int, world_size: int, root: str) -> None:
    for where in ("training", "validation"):
        _stops(rank, world_size, root, where, False)
    for where in ("last batch", "last validation"):
        _stops_at_the_end(rank, world_size, root, where, False)
    _tests(root, rank)  # outside of training each rank stops for itself, as with Lightning


def test_all_ranks_stop_together_and_can_resume(tmp_path: Path) -> None:
    run_trainer(_on_cpu, 2, str(tmp_path), timeout=120.0)


def test_a_reduction_is_read_one_batch_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where reading it at once would wait for the device."""
    stop = StopSignal(pl.Trainer(logger=False, accelerator="cpu"), torch.device("cpu"))
    assert stop._in_use, "Lightning has other names now"
    events: list[str] = []

    def start() -> Any:
        call = f"{sum(event.startswith('start') for event in events)}"
        events.append(f"start {call}")
        return lambda: events.append(f"read {call}") or call == "1"

    stop._stream = object()  # type: ignore[assignment]
    monkeypatch.setattr(stop, "_start", start)
    assert [stop._agreed() for _ in range(3)] == [False, False, True]
    assert events == ["start 0", "start 1", "read 0", "start 2", "read 1"]


class NoSynchronization(Callback):
    """Forbids waiting for the device, from the third batch to the sixth."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx in (2, 5):
            torch.cuda.set_sync_debug_mode("error" if batch_idx == 2 else "default")


def _never_waits(rank: int, world_size: int, root: str) -> None:
    torch.manual_seed(0)
    run = trainer(
        QuantizedFSDPStrategy(**OPTIONS, weights="qWD", gradients="TLq-HS"),
        root,
        accelerator="gpu",
        callbacks=[NoSynchronization()],
        use_distributed_sampler=False,
    )
    module = TinyModule()
    batches = [batch.cuda() for batch in loader()]
    run.fit(module, DataLoader(batches, batch_size=None))
    assert run.global_step == len(batches)


def _on_gpus(rank: int, world_size: int, root: str) -> None:
    _never_waits(rank, world_size, root)
    _stops(rank, world_size, root, "training", True)
    for where in ("last batch", "last validation"):
        _stops_at_the_end(rank, world_size, root, where, True)


@pytest.mark.gpu(2)
def test_gpus_never_wait_and_stop_together(tmp_path: Path) -> None:
    run_trainer(_on_gpus, 2, str(tmp_path), timeout=300.0)
