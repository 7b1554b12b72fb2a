"""The user's run is made as the user makes it, with other arguments of the Trainer."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lq_lightning.planning.config import (
    HuggingFaceModule,
    OneBatch,
    find_batch,
    find_program,
    hugging_face_program,
    parse_batch,
    python_program,
    trainer_arguments,
)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CPU = {"accelerator": "cpu", "devices": 1, "num_nodes": 1}

MODULES = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader

class Model(LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.net = torch.nn.Linear(width, width)
    def training_step(self, batch, batch_idx):
        return self.net(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
    def on_fit_end(self):
        open("saved", "w")

class Data(LightningDataModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.width = width
    def train_dataloader(self):
        return DataLoader(torch.zeros(16, self.width), batch_size=2)
"""
CLASS_PATHS = """
trainer: {devices: 3, max_steps: 7, strategy: {class_path: lq_lightning.QuantizedFSDPStrategy}}
model: {class_path: mine_to_plan.Model, init_args: {width: 8}}
data: {class_path: mine_to_plan.Data, init_args: {width: 8}}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.1}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_to_plan.py").write_text(MODULES)
    (tmp_path / "run.yaml").write_text(CLASS_PATHS)
    return tmp_path


@pytest.mark.parametrize("name", ["everything", "llama_hf", "pipeline_tensor_parallel"])
def test_examples_are_made_by_their_own_program(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = find_program(EXAMPLES / "configs" / f"{name}.yaml", None, ["--data.batch_size=32"])
    own, module, data = run.look()
    assert own["max_steps"] in (300, 500)
    assert own["strategy"].strategy_name.startswith("quantized_")
    batch, origin = find_batch(module, data)
    assert batch.shape == (32, 129)
    assert "example_batch" in origin
    assert module.vocab_size == data.model_vocab_size  # as the program links them
    assert not list(tmp_path.iterdir())


def test_class_paths_need_no_program(folder: Path) -> None:
    run = find_program(Path("run.yaml"), None, ["--trainer.accumulate_grad_batches=4"])
    own, module, data = run.look()
    assert (own["devices"], own["max_steps"], own["accumulate_grad_batches"]) == (3, 7, 4)
    batch, _ = find_batch(module, data)
    assert batch.shape == (2, 8)
    trainer, module, data = run({**CPU, "max_steps": 2})
    assert trainer.max_steps == 2
    assert isinstance(module.configure_optimizers(), torch.optim.AdamW)
    (folder / "run.yaml").write_text("fit:" + CLASS_PATHS.replace("\n", "\n  "))
    assert find_program(Path("run.yaml"), None, []).look()[0]["max_steps"] == 7


def test_any_script_that_calls_fit_can_be_planned(folder: Path) -> None:
    (folder / "train.py").write_text(
        "import sys, mine_to_plan\nfrom lightning.pytorch import Trainer\n"
        "model = mine_to_plan.Model(int(sys.argv[1]))\n"
        "try:\n    Trainer(max_epochs=3).fit(model, mine_to_plan.Data(6))\n"
        "except Exception:\n    pass\nopen('after', 'w')\n"
    )
    run = find_program(Path("train.py"), None, ["6"])
    own, module, data = run.look()
    assert own == {"max_epochs": 3}
    trainer, module, data = run({**CPU, "max_steps": 1})
    trainer.fit(module, data)
    assert not {"after", "saved"} & {path.name for path in folder.iterdir()}


def test_runs_that_cannot_be_made_are_refused(folder: Path) -> None:
    def refused(match: str, name: str = "run.yaml", program: Path | None = None) -> None:
        with pytest.raises(ValueError, match=match):
            find_program(Path(name), program, []).look()

    refused("There is no file 'none.yaml'", "none.yaml")
    refused("--program is the script", program=Path("none.py"))
    run = folder / "run.yaml"
    run.write_text("trainer: [")
    refused("is no YAML")
    run.write_text("4")
    refused("holds no options")
    run.write_text(CLASS_PATHS.replace("devices", "devises"))
    refused(r"run.yaml is not accepted: .*devises")
    run.write_text(CLASS_PATHS.replace("width: 8", "width: wide"))
    refused(r"run.yaml is not accepted: .*width")
    run.write_text("model: {width: 4}\n")
    refused("names no `class_path` .* no program was found beside it. Give --program")
    for name in ("one.py", "two.py"):
        (folder / name).write_text("# LightningCLI\n")
    refused(r"several programs could \('one.py', 'two.py'\)")
    refused("ended without calling `Trainer.fit`", "one.py")
    (folder / "one.py").write_text("raise KeyError('layers')\n")
    refused("one.py stopped before `Trainer.fit`: KeyError: 'layers'", "one.py")


def test_nothing_is_downloaded(folder: Path) -> None:
    (folder / "load.py").write_text(
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9/weights')\n"
    )
    with pytest.raises(ValueError, match="a plan downloads nothing, but 127.0.0.1 is called"):
        find_program(folder / "load.py", None, []).look()
    with pytest.raises(OSError, match="refused"):  # after it as always
        urllib.request.urlopen("http://127.0.0.1:9/weights")
    assert socket.socket.connect.__qualname__ != "refuse"


class Own(Callback):
    pass


def test_only_what_a_step_does_is_left_of_a_trainer() -> None:
    own = Own()
    callbacks = [LearningRateMonitor(), own, ModelCheckpoint()]
    given = {"callbacks": callbacks, "plugins": "p", "max_epochs": 2, "gradient_clip_val": 1.0}
    known = trainer_arguments(given, {"plugins": ["q"], "callbacks": ["mark"], "max_steps": 3})
    assert known["callbacks"] == [own, "mark"]
    assert known["plugins"] == ["p", "q"]
    assert (known["max_steps"], known["max_epochs"], known["gradient_clip_val"]) == (3, -1, 1.0)
    assert known["logger"] is False
    assert len(callbacks) == 3


class Tied(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.register_buffer("table", torch.ones(3))
        self.a.bias.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.b(self.a(batch)).sum()


def test_objects_are_copied_for_each_simulation() -> None:
    module = Tied()
    before = module.a.weight.clone()
    run = python_program(module, {"callbacks": Own(), "max_steps": 9})
    trainer, copied, _ = run({**CPU, "max_steps": 1})
    assert isinstance(trainer, Trainer)
    assert isinstance(copied, Tied)
    assert copied.a.weight is copied.b.weight is not module.a.weight
    assert not copied.a.bias.requires_grad
    assert torch.equal(module.a.weight, before)
    assert isinstance(python_program(Tied, {}).look()[1], Tied)
    with pytest.raises(ValueError, match="the model cannot be built: TypeError"):
        python_program(lambda: nn.Linear(-1, "a"), {}).look()  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("int64[4,1025]", (4, 1025)),
        ("int64[2, 8] float32[2]", [(2, 8), (2,)]),
        ("input_ids:int64[2,8], labels:int64[2,8]", {"input_ids": (2, 8), "labels": (2, 8)}),
        ("x:bool[]", {"x": ()}),
    ],
)
def test_batches_can_be_written_down(spec: str, shapes: Any) -> None:
    batch = parse_batch(spec)
    if isinstance(batch, Tensor):
        assert tuple(batch.shape) == shapes
        assert batch.dtype == torch.int64
    elif isinstance(batch, dict):
        assert {name: tuple(each.shape) for name, each in batch.items()} == shapes
    else:
        assert [tuple(each.shape) for each in batch] == shapes


@pytest.mark.parametrize("spec", ["", "int64", "int64[2] x", "a:int64[2] int64[2]", "int64[a]"])
def test_other_batches_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="is not understood"):
        parse_batch(spec)
    with pytest.raises(ValueError, match="`int128` is no dtype"):
        parse_batch("int128[2]")


class NeedsFiles(LightningDataModule):
    def setup(self, stage: str) -> None:
        raise FileNotFoundError("no tokens.bin")


def test_batches_are_found_without_files() -> None:
    module = Tied()
    with pytest.raises(ValueError, match=r"FileNotFoundError: no tokens.bin\. Say .* with --batch"):
        find_batch(module, NeedsFiles())
    module.example_input_array = torch.zeros(2, 4)
    assert find_batch(module, NeedsFiles())[1] == "example_input_array of the model"
    batch, origin = find_batch(module, [torch.zeros(5), torch.zeros(6)])
    assert (len(batch), origin) == (5, "the first batch of the training data")
    module.example_batch = lambda: torch.zeros(7)  # type: ignore[operator, assignment]
    assert len(find_batch(module, None)[0]) == 7
    repeated = iter(OneBatch(batch))
    next(repeated).add_(1)
    assert not next(repeated).any()


class Stream(IterableDataset[Tensor]):
    def __init__(self, source: Any = None) -> None:
        self.read, self.source = 0, source

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.read += 1
            yield torch.tensor([self.read])


def test_streams_lose_no_batch_to_a_plan() -> None:
    stream = Stream()
    loader = DataLoader(stream, batch_size=2)
    assert find_batch(Tied(), loader, keeps=True)[0].tolist() == [[1], [2]]
    assert next(iter(loader)).tolist() == [[1], [2]]
    numbers = iter([torch.ones(1)])
    assert len(find_batch(Tied(), numbers, keeps=True)[0]) == len(next(numbers))
    once = (number for number in [torch.ones(1)])
    for data, name in ((once, "generator"), (DataLoader(Stream(once)), "Stream")):
        with pytest.raises(ValueError, match=f"`{name}` is a stream that cannot be copied"):
            find_batch(Tied(), data, keeps=True)
    assert len(find_batch(Tied(), once)[0]) == 1  # of a program, which makes another one


LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
}


def test_configs_of_hugging_face_make_models(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    with pytest.raises(ValueError, match="no such file, and nothing is downloaded"):
        hugging_face_program(str(tmp_path), 8, 2, None, [])
    file.write_text(json.dumps({**LLAMA, "model_type": "no_such_model"}))
    with pytest.raises(ValueError, match="is no config that transformers knows"):
        hugging_face_program(str(file), 8, 2, None, [])
    file.write_text(json.dumps(LLAMA))
    run = hugging_face_program(str(tmp_path), 8, 2, None, ["--trainer.devices=2"])
    own, module, data = run.look()
    assert isinstance(module, HuggingFaceModule)
    assert (own["precision"], own["strategy"], own["devices"]) == (
        "bf16-mixed",
        "quantized_fsdp",
        "2",
    )
    assert find_batch(module, data)[0].shape == (2, 8)
    module.configure_model()
    assert module.training_step(module.example_batch(), 0).isfinite()
    own, *_ = hugging_face_program(str(file), 8, 2, None, ["--trainer.precision=32-true"]).look()
    assert own["precision"] == "32-true"
