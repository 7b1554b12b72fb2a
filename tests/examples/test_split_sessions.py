"""Split learning when something goes wrong: kills, restarts, other options, hostile clients."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lq_testing.split_runs import batches, certificates, client, dial, load, serving, train
from split_learning import client as fine_tune
from split_learning import models, protocol
from split_learning.callbacks import SplitLearning, WireReport
from split_learning.client import FineTuning
from split_learning.model import SplitModel
from split_learning.settings import SplitSettings
from split_learning.wire.common import PeerFailed, PeerLost, Refused
from split_learning.wire.messages import Message
from torch.utils.data import DataLoader

pytest.importorskip("peft")
pytestmark = pytest.mark.uninitialized_memory_ok  # transformers fills what it allocates later

PLAIN: dict[str, Any] = {"codec": "none", "gradients": "none"}


# --- clients that go and come back ----------------------------------------------------------------


@pytest.fixture
def options(text_folder: Path) -> list[str]:
    """Of a client, but for its address, its folder and its steps."""
    given = {"batch-size": 2, "sequence": 16, "save-every": 2, "validation-batches": 0}
    given |= {"deployment": "everything", "text": text_folder, "gate-learning-rate": 0.1}
    given |= {"accelerator": "cpu", "certificate": certificates() / "alice.pem"}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def fine_tune_quietly(*words: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        fine_tune.main(list(words))


def test_a_killed_client_goes_on_as_if_it_had_not_been(
    options: list[str], examples: Path, tmp_path: Path
) -> None:
    with serving(load(SplitSettings(deployment="everything"))) as server:
        words = [*options, "--connect", f"127.0.0.1:{server.address[1]}"]
        killed, whole = tmp_path / "killed", tmp_path / "whole"
        command = [sys.executable, str(examples / "split_learning" / "client.py"), *words]
        process = subprocess.Popen([*command, "--run", str(killed), "--steps", "100000"])
        try:
            until = time.monotonic() + 120
            while not (killed / "last.ckpt").exists():
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.01)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        done = torch.load(killed / "last.ckpt", weights_only=False)["global_step"]
        steps = ["--steps", str(done + 5)]
        fine_tune_quietly(*words, *steps, "--run", str(killed))
        fine_tune_quietly(*words, *steps, "--run", str(whole))
    first, second = (
        torch.load(folder / "last.ckpt", weights_only=False) for folder in (killed, whole)
    )
    assert first["global_step"] == second["global_step"] == done + 5
    for part in ("state_dict", "optimizer_states", "callbacks"):
        one, other = _tensors(first[part]), _tensors(second[part])
        assert len(one) == len(other) > 0
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list, tuple)):
        return []
    return [tensor for part in parts for tensor in _tensors(part)]


@pytest.mark.parametrize("deployment", ["adapters", "everything"])
def test_a_server_that_is_started_again_is_asked_again(deployment: Any) -> None:
    settings = SplitSettings(deployment=deployment)
    frozen = load(settings)
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        server = first.enter_context(serving(frozen))
        whole, model = client(settings, server), client(settings, server)
        expected = train(whole, 5)
        whole.close()

        def restart(step: int) -> None:
            """With everything on the client this loses a forward pass, too."""
            if step == 2:
                first.close()
                second.enter_context(serving(frozen, server.address[1]))

        assert train(model, 5, before_backward=restart) == expected
        assert model.link.reconnections == 1
        model.close()


def test_what_aq_sgd_keeps_is_not_made_up_after_a_restart() -> None:
    settings = SplitSettings(codec="aq_sgd")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(load(settings)))
        model = client(settings, server)
        with pytest.raises(PeerLost, match="AQ-SGD has lost what both ends kept"):
            train(model, 3, before_backward=lambda step: stack.close())
        model.close()


def test_attempts_to_connect_are_not_multiplied() -> None:
    calls = []

    def dial(agreement: object) -> Any:
        calls.append(agreement)
        raise PeerLost("after all of its attempts")

    model = SplitModel(SplitSettings(**PLAIN), dial)
    with pytest.raises(PeerLost, match="after all"):
        train(model, 1)
    assert len(calls) == 1


# --- clients that do not fit ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bits": 3}, "`bits`: server 4, client 3"),
        ({"deployment": "everything"}, "`deployment`: server 'adapters', client 'everything'"),
        ({"targets": ("q_proj",)}, "`targets`: server 'q_proj, k_proj, v_proj, o_proj', client"),
        ({"gradients": "int8"}, "`gradients`: server 'int4', client 'int8'"),
    ],
)
def test_other_settings_are_refused(change: dict[str, Any], reason: str) -> None:
    with serving(load(SplitSettings())) as server:
        model = client(SplitSettings(**change), server)
        with pytest.raises(Refused, match=reason):
            train(model, 1)
        fits = client(SplitSettings(), server)
        train(fits, 1)
        fits.close()


def test_another_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SplitSettings(deployment="everything")
    with serving(load(settings)) as server:
        random = models._random
        monkeypatch.setattr(models, "_random", lambda name, like: random(f"other {name}", like))
        with pytest.raises(Refused, match="`ends`: server '[0-9a-f]{16}', client '"):
            train(client(settings, server), 1)
        monkeypatch.setitem(models._SMALL, "rope_theta", 1234.0)
        with pytest.raises(Refused, match="`model_config`: server '[0-9a-f]{16}', client '"):
            train(client(settings, server), 1)


IDS = torch.zeros(1, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("deployment", "kind", "fields", "tensors", "reason"),
    [
        ("adapters", "tokens", {"training": False}, {"ids": IDS}, "before any adapters"),
        ("adapters", "tokens", {"training": 1}, {"ids": IDS}, "field 'training'"),
        ("adapters", "tokens", {"training": True}, {"ids": IDS + 264}, "from 264 to 264"),
        ("adapters", "tokens", {"training": True}, {"ids": IDS - 1}, "from -1 to -1"),
        (
            "adapters",
            "tokens",
            {"training": True},
            {"ids": IDS, "labels": IDS - 101},
            "from -101 to -101",
        ),
        ("adapters", "tokens", {"training": True}, {"ids": IDS.repeat(1, 5000)}, "1 x 20000"),
        ("adapters", "tokens", {"training": True}, {"ids": IDS[0]}, "int32"),
        ("adapters", "adapters", {}, {}, "no tensor 'lora_128'"),
        ("adapters", "adapters", {}, {"lora_128": torch.zeros(3, dtype=torch.uint8)}, "payload"),
        ("adapters", "embedded", {}, {}, "'embedded'"),
        ("everything", "hidden_gradient", {}, {}, "no forward pass"),
        ("everything", "tokens", {}, {"ids": IDS}, "'tokens'"),
        (
            "everything",
            "embedded",
            {"training": True, "tokens": 1 << 60},
            {"samples": torch.zeros(4, dtype=torch.int64)},
            "Send smaller batches",
        ),
        (
            "everything",
            "embedded",
            {"training": True, "tokens": 4},
            {
                "samples": torch.zeros(1, dtype=torch.int64),
                "embedded": torch.zeros(9, dtype=torch.uint8),
            },
            "payload",
        ),
        (
            "everything",
            "widths",
            {},
            {"lora_128": torch.zeros(1, dtype=torch.uint8)},
            "table of 384 widths",
        ),
    ],
)
def test_hostile_messages_end_their_client_alone(
    deployment: Any, kind: str, fields: dict[str, Any], tensors: dict[str, Any], reason: str
) -> None:
    settings = SplitSettings(deployment=deployment)
    frozen = load(settings)
    with serving(frozen) as server:
        honest = client(settings, server)
        train(honest, 1)
        hostile = dial(server, frozen.agreement())
        hostile.send(Message(kind, fields, tensors))
        with pytest.raises(PeerFailed, match=reason):
            hostile.receive()
        hostile.close()
        train(honest, 1)
        assert honest.link.reconnections == 0
        honest.close()


# --- the programs ---------------------------------------------------------------------------------


def test_the_report_says_what_crossed(options: list[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with serving(load(SplitSettings(deployment="everything"))) as server:
        words = [*options, "--connect", f"127.0.0.1:{server.address[1]}", "--steps", "3"]
        words += ["--run", str(tmp_path / "run"), "--report", str(report), "--accumulate", "2"]
        fine_tune_quietly(*words)
    found = json.loads(report.read_text())
    batches = found["batches"]
    assert [batch["step"] for batch in batches] == [0, 1, 1, 2, 2, 3]
    assert [protocol.ADAPTERS in batch["sent"] for batch in batches] == [True, False] * 3
    assert all(batch["seconds"] > 0 for batch in batches)
    assert {"embedded", "hidden_gradient"} <= set(batches[1]["sent"])
    assert batches[5]["mean_bits"] < batches[0]["mean_bits"] == 8.0
    assert found["memory"]["peak_nbytes"] >= found["memory"]["imported_nbytes"] > 0
    assert found["settings"]["codec"] == "amaq"


def test_a_trainer_that_would_go_wrong_is_refused() -> None:
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainer = Trainer(**options, max_steps=1, callbacks=[SplitLearning()])
    data = DataLoader(batches())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs one `SplitModel`, but has 0"):
        trainer.fit(FineTuning(torch.nn.Linear(1, 1)), data)

    class TwoOptimizers(FineTuning):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [super().configure_optimizers(), super().configure_optimizers()]

    with serving(load(SplitSettings())) as server:
        model = client(SplitSettings(), server)
        with pytest.raises(NotImplementedError, match="2 optimizers"):
            trainer.fit(TwoOptimizers(model), data)


def test_manual_optimization_trains_gates_too(tmp_path: Path) -> None:
    class Manual(FineTuning):
        automatic_optimization = False

        def training_step(self, tokens: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
            self.optimizers().zero_grad()
            self.manual_backward(self.model(input_ids=tokens, labels=tokens).loss)
            self.optimizers().step()

    report = WireReport(tmp_path / "report.json")
    trainer = Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        logger=False,
        max_steps=3,
        callbacks=[SplitLearning(), report],
    )
    with serving(load(SplitSettings())) as server:
        trainer.fit(
            Manual(client(SplitSettings(), server)),
            DataLoader(batches(), batch_size=None),  # type: ignore[arg-type]
        )
    means = [batch["mean_bits"] for batch in json.loads(report.path.read_text())["batches"]]
    assert 8.0 > means[0] > means[1] > means[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "`--bits 5` is not supported; allowed: 4, 3"),
        ({"codec": "zip"}, "`--codec zip`"),
        ({"rank": 0}, "`--rank 0` must be at least 1"),
        ({"train_ends": True}, "--deployment everything"),
    ],
)
def test_wrong_settings_say_what_is_right(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SplitSettings(**change)
