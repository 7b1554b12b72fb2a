"""The benchmark of long sequences counts tokens of whole steps, and rows say what went wrong."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

pytest.importorskip("transformers")
pytest.importorskip("jsonargparse")

CONFIG = Path(__file__).resolve().parents[2] / "examples/configs/llama3_8b_32k.yaml"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The example's configuration with plain activations and small data."""
    settings = yaml.safe_load(CONFIG.read_text())
    del settings["trainer"]["callbacks"]
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.mark.parametrize("variant", ["ours", "checkpointing"])
def test_row_of_a_tiny_model(
    run: Callable[..., str], tmp_path: Path, config: Path, variant: str
) -> None:
    row_path = tmp_path / "row.json"
    run(
        "long_context.py",
        *("--one", variant, "--row", str(row_path), "--tiny", "--seq", "32", "--steps", "2"),
        *("--config", str(config), "--work", str(tmp_path)),
        *(["--", "--model.compile_layers=false"] if variant == "ours" else []),
    )
    row = json.loads(row_path.read_text())
    assert "failed" not in row
    assert row["tokens_per_s"] * row["step_s"] == pytest.approx(2 * 32)  # of two micro-batches
    assert row["first_loss"] == pytest.approx(6.25, abs=0.5)  # ln 512
    assert row["parameters"] > 2 * 512 * 64


def test_checkpointed_model_recomputes_its_layers(
    load: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    bench = load("long_context")
    module = bench.CheckpointedLM(
        hf_config="llama", hf_overrides=bench.TINY, vocab_size=512, block_size=16
    )
    module.configure_model()
    calls: list[int] = []
    for layer in module.model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda mlp, args: calls.append(id(mlp)))
    module._loss(torch.randint(0, 512, (1, 17))).backward()
    assert len(calls) == 2 * len(set(calls)) == 4


def test_out_of_memory_is_a_result(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench = load("long_context")

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0")

    monkeypatch.setattr(bench, "run", fail)
    args = argparse.Namespace(warmup=1, steps=1, config=CONFIG, work=tmp_path, seq=32)
    args.tiny, args.verbose, args.options = True, False, []
    assert bench.train("plain", args)["failed"] == "out of memory"


def test_configuration_has_the_shape_of_llama_3_8b(load: Callable[[str], ModuleType]) -> None:
    load("long_context")  # puts the examples on the path
    from pretraining.hugging_face import HuggingFaceConfig, resolve_config

    settings = yaml.safe_load(CONFIG.read_text())
    source = HuggingFaceConfig(config="llama", overrides=settings["model"]["hf_overrides"])
    c = resolve_config(source, 256, settings["data"]["block_size"])
    attention = 2 * c.hidden_size * c.head_dim * (c.num_attention_heads + c.num_key_value_heads)
    layer = attention + 3 * c.hidden_size * c.intermediate_size + 2 * c.hidden_size
    rest = 2 * c.vocab_size * c.hidden_size + c.hidden_size
    assert c.num_hidden_layers * layer + rest == 8_030_261_248  # as published
    assert not c.tie_word_embeddings
    assert c.max_position_embeddings == 32768
