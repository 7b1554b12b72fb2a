"""Rows of papers' tables that a plan meets, from shortened models.

Layers are alike, so what 32 of them need follows from runs with two and three.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

import lq_lightning as lq
from lq_lightning.planning.config import HuggingFaceModule

LLAMA_2_7B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
LAYERS = 32


def _gigabytes(folder: Path, layers: int, gpus: int) -> dict[str, float]:
    path = folder / f"{layers}.json"
    path.write_text(json.dumps(LLAMA_2_7B | {"num_hidden_layers": layers}))
    module = functools.partial(HuggingFaceModule, str(path), seq=2048, micro_batch=2)
    trainer = {
        "strategy": lq.QuantizedFSDPStrategy(weights="none", gradients="none"),
        "precision": "bf16-mixed",
    }
    plan = lq.plan(module, trainer=trainer, gpu="H100", gpus_per_node=gpus, alternatives=False)
    peak = plan.memory[0]
    found = {"all": peak.allocated_nbytes / 1e9}
    for kind in ("optimizer states", "saved activations"):
        found[kind] = peak.most[kind] / 1e9
    return found


def test_memory_of_llama_on_four_gpus_is_that_of_coat(tmp_path: Path) -> None:
    """COAT's table 7, BF16: 13.1 GB of states, 25.8 GB of activations, 55.1 GB in all."""
    two, three = (_gigabytes(tmp_path, layers, 4) for layers in (2, 3))
    whole = {name: two[name] + (LAYERS - 2) * (three[name] - two[name]) for name in two}
    assert whole["optimizer states"] == pytest.approx(13.1, rel=0.05)
    assert whole["saved activations"] == pytest.approx(25.8, rel=0.05)
    assert whole["all"] == pytest.approx(55.1, rel=0.05)
