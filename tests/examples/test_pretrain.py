"""The program: its configuration files, a small run, resuming, predicting, and wrong options."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pretrain
import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from pretraining import report
from pretraining.hugging_face import HuggingFaceConfig, resolve_config

from lq_lightning.callbacks import activation_quantization, adaptive_bits


class StopAt(Callback):
    """Stops a run behind a step.

    Args:
        step: Optimizer steps to do.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args) -> None:
        trainer.should_stop = trainer.global_step >= self.step


@pytest.fixture(autouse=True)
def _no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide pytest's own arguments from LightningCLI."""
    monkeypatch.setattr("sys.argv", ["pretrain.py"])


@pytest.fixture
def options(text_folder: Path, tmp_path: Path) -> list[str]:
    """Options of a run that takes a second in one process."""
    values = {
        "trainer.accelerator": "cpu",
        "trainer.devices": 1,
        "trainer.strategy": "auto",
        "trainer.logger": "false",
        "trainer.max_steps": 6,
        "trainer.val_check_interval": 3,
        "trainer.check_val_every_n_epoch": "null",
        "trainer.limit_val_batches": 2,
        "trainer.num_sanity_val_steps": 0,
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
        "trainer.log_every_n_steps": 1,
        "trainer.default_root_dir": tmp_path / "run",
        "model.decoder.num_layers": 1,
        "model.decoder.hidden_size": 16,
        "model.decoder.num_heads": 2,
        "model.max_new_tokens": 4,
        "data.text": text_folder,
        "data.block_size": 16,
        "data.batch_size": 2,
        "data.cache_dir": tmp_path / "data",
        "report.plot": "false",
        "sample.max_new_tokens": 5,
    }
    return [f"--{name}={value}" for name, value in values.items()]


def _printed_config(*args: str) -> dict[str, object]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as stop:
        pretrain.main([*args, "--print_config"])
    assert stop.value.code in (0, None)
    return yaml.safe_load(out.getvalue())


def _error(capsys: pytest.CaptureFixture[str], args: list[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        pretrain.main(args)
    assert stop.value.code == 2
    return capsys.readouterr().err


CONFIGS = (
    "quantized_fsdp",
    "full_precision",
    "quantized_precision",
    "gpt_125m",
    "llama_hf",
    "lora",
    "everything",
    "pipeline",
    "tensor_parallel",
    "pipeline_tensor_parallel",
    "llama_tensor_parallel",
)


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_parse_and_take_overrides(name: str, examples: Path) -> None:
    config = _printed_config(
        "fit",
        f"--config={examples}/configs/{name}.yaml",
        "--trainer.strategy.gradients=TLq",
        "--trainer.max_steps=7",
    )
    strategy = config["trainer"]["strategy"]
    kind = "Pipeline" if name.startswith("pipeline") else "FSDP"
    assert strategy["class_path"] == f"lq_lightning.strategies.Quantized{kind}Strategy"
    assert strategy["init_args"]["gradients"] == "TLq"
    assert config["trainer"]["max_steps"] == 7
    assert config["seed_everything"] == 42


def test_llama3_8b_has_its_published_size(examples: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config: Any = _printed_config("fit", f"--config={examples}/configs/llama3_8b_32k.yaml")
    source = HuggingFaceConfig(config="llama", overrides=config["model"]["hf_overrides"])
    shape = resolve_config(source, 264, config["data"]["block_size"])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_030_261_248
    assert shape.max_position_embeddings == 32768


def test_activations_of_one_device(
    examples: Path,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A policy with rules in the configuration file, and a recipe on the command line."""
    config = f"--config={examples}/configs/activations.yaml"
    callback = _printed_config("fit", config)["trainer"]["callbacks"][0]
    policy = callback["init_args"]["recipe"]
    assert [rule["codec"] for rule in policy["rules"]] == ["int8", "int8", None]
    changed = _printed_config("fit", config, "--trainer.callbacks.recipe=fp8-4bit")
    assert changed["trainer"]["callbacks"][0]["init_args"]["recipe"] == "fp8-4bit"
    messages: list[str] = []
    monkeypatch.setattr(activation_quantization, "rank_zero_info", messages.append)
    pretrain.main(["fit", config, *options])
    assert len(messages) == 1
    assert messages[0].startswith("ActivationQuantization")
    assert "MLP" in messages[0]
    result = report.read(tmp_path / "run" / "report.json")
    assert result.steps == 6
    assert all(loss < 6 for _, loss in result.validation)


def test_trained_bit_widths(
    examples: Path,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Options on the command line keep the rest of the configuration file."""
    config = f"--config={examples}/configs/adaptive_bits.yaml"
    changed = _printed_config("fit", config, "--trainer.callbacks.target=3")
    callback = changed["trainer"]["callbacks"][0]
    assert callback["class_path"] == "lq_lightning.AdaptiveBits"
    assert (callback["init_args"]["target"], callback["init_args"]["beta"]) == (3.0, 0.02)
    listed = _printed_config("fit", config, "--trainer.callbacks.sites=[layers,boundaries]")
    assert listed["trainer"]["callbacks"][0]["init_args"]["sites"] == ["layers", "boundaries"]
    messages: list[str] = []
    monkeypatch.setattr(adaptive_bits, "rank_zero_info", messages.append)
    fast = ["--trainer.callbacks.start_bits=4.1", "--trainer.callbacks.learning_rate=0.1"]
    pretrain.main(["fit", config, *options, *fast, "--trainer.callbacks.histogram_every_n_steps=0"])
    assert messages == [
        "AdaptiveBits: 2 sites, bits per channel from 1 to 16, mean 4.10 to 4: "
        "`model.blocks.0:input`, `model.lm_head:input`"
    ]
    result = report.read(tmp_path / "run" / "report.json")
    assert result.steps == 6
    assert all(loss < 6 for _, loss in result.validation)


def test_the_compared_runs_differ_in_the_codecs_only(examples: Path) -> None:
    quantized, full = (
        yaml.safe_load((examples / "configs" / f"{name}.yaml").read_text())
        for name in ("quantized_fsdp", "full_precision")
    )
    for config in (quantized, full):
        del config["report"], config["trainer"]["default_root_dir"]
    assert quantized["trainer"]["strategy"]["init_args"].pop("weights") == "qWD"
    assert quantized["trainer"]["strategy"]["init_args"].pop("gradients") == "TLq-HS"
    assert full["trainer"]["strategy"]["init_args"].pop("weights") == "none"
    assert full["trainer"]["strategy"]["init_args"].pop("gradients") == "none"
    assert quantized == full


def test_help_explains_every_option_of_the_example() -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        pretrain.main(["fit", "--help"])
    sections = re.split(r"\n  (?=--)", out.getvalue())
    for section in sections:
        name = section.split()[0]
        ours = name.startswith(("--model.", "--data.", "--report.", "--sample."))
        if ours and not name.endswith(".help"):
            explained = re.sub(r"\(type:.*", "", section, flags=re.DOTALL).split()[2:]
            assert len(explained) >= 3 or "Path to a configuration" in section, section


def test_fit_writes_everything(options: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws the plot")
    root = tmp_path / "run"
    reference = report.Report(name="full precision", validation=[[3, 5.6], [6, 5.5]])
    reference.write(tmp_path / "reference.json")
    pretrain.main(
        [
            "fit",
            *options,
            "--trainer.logger=true",
            "--report.plot=true",
            f"--report.reference={tmp_path}/reference.json",
        ]
    )
    result = report.read(root / "report.json")
    assert [step for step, _ in result.validation] == [3, 6]
    assert result.steps == 6
    assert result.wire is None
    assert result.tokens_per_s is not None
    assert result.parameters > 0
    assert (root / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (root / "sample.txt").read_text(encoding="utf-8").startswith("def ")
    assert (root / "checkpoints" / "last.ckpt").exists()
    header = (root / "logs" / "version_0" / "metrics.csv").read_text().splitlines()[0]
    assert {"train_loss", "val_loss", "progress/tokens_per_s"} <= set(header.split(","))


def _weights(root: Path) -> dict[str, torch.Tensor]:
    state = torch.load(root / "checkpoints" / "last.ckpt", weights_only=True)
    return state["state_dict"]


def test_resuming_inside_an_epoch_gives_the_same_run(options: list[str], tmp_path: Path) -> None:
    fit = ["fit", *options, "--model.optimizer.warmup_steps=2"]
    checkpoint = tmp_path / "half" / "checkpoints" / "last.ckpt"
    pretrain.main([*fit, f"--trainer.default_root_dir={tmp_path}/whole"])
    # Stops after three steps of a schedule for six, as a run that was killed does.
    pretrain.main(
        [
            *fit,
            f"--trainer.default_root_dir={tmp_path}/half",
            "--trainer.logger=true",  # adds callbacks of its own to these
            "--trainer.callbacks+=StopAt",
            "--trainer.callbacks.step=3",
        ]
    )
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 3
    pretrain.main(
        [*fit, f"--trainer.default_root_dir={tmp_path}/half", f"--ckpt_path={checkpoint}"]
    )
    whole, resumed = _weights(tmp_path / "whole"), _weights(tmp_path / "half")
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=0)
    curves = [report.read(tmp_path / run / "report.json") for run in ("whole", "half")]
    assert curves[0].validation == curves[1].validation


def test_validate_test_and_predict_from_a_checkpoint(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrain.main(["fit", *options])
    common = [*options, f"--ckpt_path={tmp_path}/run/checkpoints/last.ckpt"]
    capsys.readouterr()
    pretrain.main(["validate", *common])
    assert "val_loss" in capsys.readouterr().out
    pretrain.main(["test", *common])
    assert "test_loss" in capsys.readouterr().out
    pretrain.main(["predict", *common, '--data.prompts=["word1 ", "word2 "]'])


def test_hugging_face_with_adapters(options: list[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    peft = pytest.importorskip("peft", reason="needs peft")
    shape = '{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, '
    shape += '"num_attention_heads": 2, "num_key_value_heads": 1}'
    fit = ["fit", *options, f"--model.hf_overrides={shape}"]
    base = tmp_path / "base"
    pretrain.main([*fit, "--model.hf_config=llama", f"--model.hf_save_to={base}"])
    assert (base / "model.safetensors").is_file()
    pretrain.main(
        [
            *fit,
            f"--model.hf_config={base}",
            "--model.hf_load_weights=true",
            "--model.lora.rank=2",
            f"--model.hf_save_to={tmp_path}/adapters",
        ]
    )
    assert peft.PeftConfig.from_pretrained(str(tmp_path / "adapters")).r == 2


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--data.text=/no/such/folder", "is not a folder"),
        ("--data.batch_size=5000", "not enough for one step"),
        ("--data.block_size=100000", "less than one block"),
        ("--model.hf_config=nonsense", "neither a model type.*Nothing is downloaded"),
        ('--model.hf_config={"model_type": "nonsense"}', "unknown to the installed transformers"),
        ("--model.lora.rank=2", "works on Hugging Face models only"),
        ("--model.hf_save_to=out", "need `--model.hf_config`"),
        ("--model.optimizer.lr=-1", "lr=-1.0. must be positive"),
        ("--model.optimizer.min_lr_ratio=2", "min_lr_ratio.*ClosedUnitInterval"),
        ("--model.loss_chunk=0", "loss_chunk.*PositiveInt"),
        ("--model.decoder.num_layers=0", "num_layers=0. must be at least 1"),
        ("--data.batch_size=0", "batch_size.*PositiveInt"),
        ("--model.decoder.num_heads=3", "does not split"),
        ("--data.tokenizer=/no/such.json", "neither 'byte' nor 'bpe'"),
    ],
)
def test_wrong_values_say_what_to_do(
    option: str, message: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if "hf_config" in option:
        pytest.importorskip("transformers", reason="needs transformers")
    with pytest.raises((ValueError, OSError, SystemExit)) as raised:
        pretrain.main(["fit", *options, option])
    shown = str(raised.value) + capsys.readouterr().err
    assert re.search(message, shown, re.DOTALL), shown


def test_fit_without_an_end_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--trainer.max_steps=500" in _error(capsys, ["fit"])


def test_misspelled_option_is_named(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shown = _error(capsys, ["fit", *options, "--data.blocksize=3"])
    assert "data.blocksize" in shown
    assert len(shown.splitlines()) < 12
