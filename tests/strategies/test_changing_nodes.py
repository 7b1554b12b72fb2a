"""Nodes that come and go, through the Trainer: each is a process with a run of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning_utilities.core.rank_zero import rank_zero_only
from lq_testing import run_ranks
from lq_testing.lightning_models import TinyModule, loader, trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lq_lightning import LocalSteps, QuantizedFSDPStrategy
from lq_lightning.data_parallel.meeting import Member
from lq_lightning.data_parallel.patient_store import PatientStore, keep_meeting_point
from lq_lightning.foundation.served_files import ServedFolder
from lq_lightning.strategies.changing_nodes import ChangingNodes

SEATS, BATCH, LR, NUMEL = 4, 2, 0.01, 6000


class Counter(pl.LightningModule):
    """Each step subtracts LR from the weights, whatever the batch is; the second rate falls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 40))
        self.tied = self.weight
        self.other = nn.Parameter(torch.zeros(3))
        self.seen: list[list[int]] = []
        self.validated: list[tuple[int, float]] = []
        self.pause = 0.0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.pause)
        self.seen.append(batch[0].tolist())
        return 0.5 * (self.weight + self.tied).sum() + 0 * self.other.sum()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validated.append((len(batch[0]), self.weight[0, 0].item()))

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.weight]}, {"params": [self.other]}]
        optimizer = torch.optim.SGD(groups, LR)
        rates = [lambda step: 1.0, lambda step: 1.0 / (1 + step)]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class At(Callback):
    """Does something before a step, and keeps where the first one was."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self.step, self.action, self.first = step, action, (-1, -1)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.first[0] < 0:
            self.first = trainer.global_step, trainer.current_epoch
        if trainer.global_step == self.step:
            self.action()


def _options(address: str, **options: Any) -> LocalSteps:
    defaults = {"every": 5, "meet_at": address, "max_nodes": SEATS, "wait": 10.0}
    return LocalSteps(**{**defaults, **options})


def _make(address: str, root: str, steps: int, *callbacks: Callback, **options: Any) -> pl.Trainer:
    exact = {
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "bits": None,
        "wait": options.pop("wait", 10.0),
    }
    return trainer(
        QuantizedFSDPStrategy(local_steps=_options(address, **exact)),
        root,
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[*callbacks],
        **options,
    )


def _data(count: int = NUMEL) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), BATCH)


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _after(key: str, address: str) -> None:
    """Wait until others have written something at the meeting point."""
    store, deadline = PatientStore(address, 5), time.monotonic() + 30
    while not store.has(key):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _fit(address: str, root: str, steps: int, **options: Any) -> dict[str, Any]:
    module, pause = Counter(), options.pop("pause", 0.03)
    module.pause = pause
    ckpt_path, callbacks = options.pop("ckpt_path", None), options.pop("callbacks", ())
    run = _make(address, root, steps, *callbacks, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module, _data(), DataLoader(TensorDataset(torch.arange(6)), 2), ckpt_path=ckpt_path)
    strategy = run.strategy
    assert isinstance(strategy, QuantizedFSDPStrategy)
    return {
        "seat": strategy.seat,
        "weight": module.weight.detach().clone(),
        "is tied": module.tied is module.weight,
        "step": run.global_step,
        "seen": module.seen,
        "validated": module.validated,
        "lr": run.optimizers[0].param_groups[1]["lr"],
        "warnings": " ".join(str(w.message) for w in caught),
    }


# --- on each node -------------------------------------------------------------------------------

STEPS = 60


def _killed_and_started_again(
    rank: int, world_size: int, address: str, root: str
) -> dict[str, Any]:
    root = f"{root}/{rank}"
    if rank == 2:
        _after("outcome/1/0", address)
        child = os.fork()
        if child == 0:
            try:
                _fit(address, root, STEPS, callbacks=[At(20, _kill_self)])
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        return _fit(address, root, STEPS, ckpt_path="never.ckpt")
    saves = ModelCheckpoint(every_n_train_steps=8, save_top_k=-1)
    options = {"enable_checkpointing": True, "val_check_interval": 12} if rank else {}
    found = _fit(address, root, STEPS, callbacks=[saves] if rank else [], **options)
    found["saved"] = len([*Path(root).rglob("*.ckpt")])
    return found


def test_killed_and_started_again(tmp_path: Path) -> None:
    """Others lose nothing, and each step counts once."""
    point = keep_meeting_point(0)
    address = f"127.0.0.1:{point.port}"
    found = run_ranks(_killed_and_started_again, 3, address, str(tmp_path), backend=None)
    first, second, again = found
    assert torch.equal(first["weight"], second["weight"])
    assert torch.equal(first["weight"], again["weight"])
    assert all(node["is tied"] for node in found)
    assert "starts from their state and not from `ckpt_path='never.ckpt'`" in again["warnings"]
    _each_step_counts_once(address, found)
    # data: each seat has its own part, and the node that came again goes on where the run was
    assert [node["seat"] for node in found] in ([0, 1, 3], [1, 0, 3])
    starts = []
    for node in found:
        part = [*DistributedSampler(range(NUMEL), SEATS, node["seat"])]
        read = sum(node["seen"], [])
        starts.append(part.index(read[0]) // BATCH)
        assert read == part[BATCH * starts[-1] :][: len(read)]
    assert 0 in starts[:2]
    assert starts[2] >= 10
    # learning rates
    assert len({node["lr"] for node in found}) == 1
    assert first["lr"] == pytest.approx(LR / (1 + STEPS))
    # validation and checkpoints
    assert {count for count, _ in second["validated"]} == {2}
    assert len(second["validated"]) >= 3 * (STEPS // 12 - 2)
    assert second["saved"] >= (STEPS - 20) // 8


def _each_step_counts_once(address: str, found: list[dict[str, Any]]) -> None:
    store, number, moved = PatientStore(address, 5), 0, 0.0
    by_name: dict[str, int] = {}
    while outcome := store.read(f"outcome/{number + 1}/0"):
        number, attempt = number + 1, 0
        while outcome != "counts":
            attempt += 1
            outcome = store.read(f"outcome/{number}/{attempt}")
        text = store.read(f"members/{number}/{attempt}")
        assert text is not None
        taken = {m.name: m.taken for m in map(Member.read, text.split(","))}
        moved += sum(taken.values()) / max(sum(t > 0 for t in taken.values()), 1)
        for name, steps in taken.items():
            by_name[name] = by_name.get(name, 0) + steps
    expected = torch.full_like(found[0]["weight"], -LR * moved)
    torch.testing.assert_close(found[0]["weight"], expected, rtol=1e-4, atol=1e-5)
    trained = sorted(len(node["seen"]) for node in found)
    assert {*trained} <= {*by_name.values()}


class LongValidation(Callback):
    """Validates for longer than others wait."""

    def on_validation_end(self, *args: Any) -> None:
        time.sleep(4.0)


def _validates_longer(rank: int, world_size: int, address: str, root: str) -> dict[str, Any]:
    if rank:
        _after("outcome/1/0", address)
    options = {"val_check_interval": 20, "num_sanity_val_steps": 0, "wait": 3.0}
    callbacks = [LongValidation()] * rank
    return _fit(address, f"{root}/{rank}", 20, pause=0.2, callbacks=callbacks, **options)


def test_a_node_may_validate_while_others_end(tmp_path: Path) -> None:
    """Nobody has taken steps since, so that it needs nothing from those who are gone."""
    point = keep_meeting_point(0)
    address = f"127.0.0.1:{point.port}"
    first, second = run_ranks(_validates_longer, 2, address, str(tmp_path), backend=None)
    assert torch.equal(first["weight"], second["weight"])
    _each_step_counts_once(address, [first, second])


def test_who_has_ended_saves_for_nobody() -> None:
    nodes = ChangingNodes.__new__(ChangingNodes)
    nodes._is_asked = nodes._has_ended = True
    nodes.save_if_asked(None)  # type: ignore[arg-type]


def test_who_trains_loads_no_checkpoint() -> None:
    nodes = ChangingNodes.__new__(ChangingNodes)
    nodes._rounds = SimpleNamespace(is_open=False)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="loaded while this node trains with others"):
        nodes.load_extra_state({}, {})


def test_who_was_away_at_the_end() -> None:
    nodes = ChangingNodes.__new__(ChangingNodes)
    nodes._rounds = SimpleNamespace(number=1)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="has ended with round 4 while this node was away"):
        nodes._get([], "round-2", Path("round-2"), 4)
    with pytest.raises(RuntimeError, match="the messages of round 2 any more"):
        nodes._get([], "round-2", Path("round-2"), 0)


def test_a_donor_that_is_lost_while_its_state_is_read() -> None:
    """Another one gives its state, and of the first one's nothing is left."""
    good, own, server = (
        *(ServedFolder("127.0.0.1") for _ in "12"),
        socket.create_server(("127.0.0.1", 0)),
    )

    def die() -> None:
        with server.accept()[0] as connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\nhalf")

    threading.Thread(target=die, daemon=True).start()
    (good.path / "new").write_bytes(b"whole")
    donors = {
        Member(0, "lost"): (f"http://127.0.0.1:{server.getsockname()[1]}/x", {"old": 9}),
        Member(1, "good"): (good.url, {"new": 5}),
    }

    def ask(donor: Member, url: str) -> dict[str, Any]:
        files = donors.pop(donor)[1]
        return {"round": 1, "path": next(iter(files)), "files": files}

    nodes = ChangingNodes.__new__(ChangingNodes)
    nodes._config, nodes._folder = _options("127.0.0.1:1"), own
    nodes._meeting = SimpleNamespace(  # type: ignore[assignment]
        ask=ask, start_or_find=lambda: {donor: url for donor, (url, _) in donors.items()}
    )
    try:
        assert nodes._find_state() == str(own.path / "new")
        assert own.files("") == {"new": 5}
    finally:
        server.close()
        good.close()
        own.close()


# --- nodes of two ranks --------------------------------------------------------------------------


def _pairs(rank: int, world_size: int, address: str, root: str, ports: list[int]) -> Any:
    """Ranks 0 and 1 are a node, and 2 and 3 join it; each epoch is one batch."""
    node = rank // 2
    os.environ |= {
        "RANK": str(rank % 2),
        "LOCAL_RANK": str(rank % 2),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports[node]),
        "TORCHELASTIC_RUN_ID": f"node-{node}",
    }
    rank_zero_only.rank = rank % 2
    if node:
        _after("outcome/1/0", address)
    module = TinyModule()
    options = _options(address, bits=2, error_feedback=True)
    strategy = QuantizedFSDPStrategy(local_steps=options, min_quantized_numel=64)
    slow = At(-1, lambda: None)
    run = trainer(strategy, f"{root}/{node}", max_steps=30, max_epochs=-1, callbacks=[slow])
    run.fit(module, loader(4 * 2 * SEATS))
    full = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in module.state_dict().items()
    }
    return full, run.global_step, slow.first


def test_nodes_of_two_ranks(tmp_path: Path) -> None:
    point, ports = keep_meeting_point(0), []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
    arguments = (f"127.0.0.1:{point.port}", str(tmp_path), ports)
    found = run_ranks(_pairs, 4, *arguments, backend=None)
    for weights, _, _ in found[1:]:
        for name, weight in found[0][0].items():
            assert torch.equal(weights[name], weight), name
    first = [first for *_, first in found]
    assert first[0] == first[1] == (0, 0)
    assert first[2] == first[3]
    assert first[2][0] == first[2][1] >= 5  # no epoch is left out
    assert PatientStore(arguments[0], 5).has("outcome/2/0")


# --- what is refused -----------------------------------------------------------------------------


def _model(group: int, optimizer: str) -> str:
    """Facts of a node that has `Counter.other` elsewhere, in JSON."""
    other = repr(f"torch.float32 in group {group} of {optimizer}")
    return json.dumps({"min_quantized_numel": "4096", "other": other})


def test_what_is_refused(tmp_path: Path) -> None:
    """Several nodes in a run, other options, another model, and a run that has ended."""
    point = keep_meeting_point(0)
    address, root = f"127.0.0.1:{point.port}", str(tmp_path)
    exact = {"outer_lr": 1.0, "outer_momentum": 0.0, "bits": None}

    def fit(local_steps: LocalSteps, **options: Any) -> pl.Trainer:
        strategy = QuantizedFSDPStrategy(local_steps=local_steps)
        run = trainer(strategy, root, devices=1, max_steps=6, max_epochs=-1, **options)
        run.fit(Counter(), _data())
        return run

    with pytest.raises(ValueError, match=r"every node is a run of its own, .* 2 nodes or more"):
        fit(_options(address), num_nodes=2)
    store = PatientStore(address, 5)
    assert not store.has("seat/0")
    for what, other, message in (
        ("shapes", '{"weight": "(2, 40)"}', r"has other \(3,\), but the nodes .* need the same"),
        ("model", "{}", "has min_quantized_numel 4096, but .* have None"),
        ("model", _model(0, "SGD 0"), r"has other .*group 1 of SGD 0.* have .*group 0 of SGD 0"),
        ("model", _model(1, "Adam 0"), r"has other .*group 1 of SGD 0.* have .*group 1 of Adam 0"),
        ("data/1", '{"samples to divide": "7"}', "has samples to divide 6000, but .* have 7: all"),
    ):
        store.write(f"facts/{what}", other)
        with pytest.raises(ValueError, match=message):
            fit(_options(address, **exact))
        store.remove(f"facts/{what}")
    for callback in (LearningRateFinder(), StochasticWeightAveraging(0.1)):
        with pytest.raises(NotImplementedError, match=f"`{type(callback).__name__}` tries steps"):
            fit(_options(address, **exact), callbacks=[callback])
    assert store.read("seat/0").split(" ")[1] == ""  # type: ignore[union-attr]

    run = trainer(
        QuantizedFSDPStrategy(local_steps=_options(address, **exact)),
        root,
        devices=1,
        max_steps=6,
        max_epochs=-1,
    )
    plain = trainer("auto", root, devices=1, max_steps=2)
    plain.fit(Counter(), _data())
    plain.save_checkpoint(saved := f"{root}/saved.ckpt")
    module = Counter()  # starts anew, after a node that was refused before its first round
    run.validate(module, _data(8))
    run.fit(module, _data(), ckpt_path=saved)
    assert run.strategy._groups._steps == 6  # type: ignore[attr-defined]
    torch.testing.assert_close(module.weight.data, torch.full((2, 40), -6 * LR))
    run.validate(module, _data(8))
    with pytest.raises(RuntimeError, match="has ended with round 6"):
        fit(_options(address, **exact))
    with pytest.raises(ValueError, match="has every 6, but the nodes that it would join have 5"):
        fit(_options(address, **exact, every=6))
    assert not [*Path(tempfile.gettempdir()).glob("lq-node-*/round*")]


@pytest.mark.gpu(1)
def test_nodes_share_a_gpu(tmp_path: Path) -> None:
    """Messages go through the host, so two processes may use one GPU."""
    point = keep_meeting_point(0)
    found = run_ranks(_on_a_gpu, 2, f"127.0.0.1:{point.port}", str(tmp_path), backend=None)
    for (name, weight), other in zip(found[0].items(), found[1].values(), strict=True):
        assert torch.equal(weight, other), name


def _on_a_gpu(rank: int, world_size: int, address: str, root: str) -> dict[str, Tensor]:
    if rank:
        _after("outcome/1/0", address)
    module = TinyModule()
    strategy = QuantizedFSDPStrategy(local_steps=_options(address), min_quantized_numel=64)
    run = trainer(
        strategy,
        f"{root}/{rank}",
        accelerator="gpu",
        devices=[0],
        max_steps=400,
        max_epochs=-1,
        precision="bf16-true",
        callbacks=[LambdaCallback(on_train_batch_end=lambda *unused: time.sleep(0.04))],
    )
    run.fit(module, loader(4000))  # for 16 s, in which the other one starts and joins
    return {name: value.cpu() for name, value in module.state_dict().items()}
