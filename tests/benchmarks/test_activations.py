"""The benchmark of saved activations counts bytes, and names variants that fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

Load = Callable[[str], ModuleType]


def test_rows_of_a_tiny_layer(run: Callable[..., str], load: Load, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    names = "bf16;bf16, full checkpointing;bf16, Liger"
    shown = run(
        "activations.py",
        *("--preset", "tiny", "--device", "cpu", "--rounds", "1", "--burst", "1"),
        *("--variants", names, "--json", str(report)),
    )
    rows = json.loads(report.read_text())["results"]["rows"]
    assert [row["variant"] for row in rows] == names.split(";")
    # In U: twice an fp32 input, a bf16 one and a reciprocal norm (6.0625); the inputs of q/k/v and
    # of gate/up (2); q, k, v, the attention's output and a sum per head (3.0625); gate, silu, up
    # and their product (14).
    assert rows[0]["saved_units"] == pytest.approx(25.125)
    assert rows[1]["saved_units"] == pytest.approx(1)
    assert rows[1]["weight_gradient_error"] == 0
    assert rows[1]["speedup_over_bf16"] == pytest.approx(rows[0]["ms"] / rows[1]["ms"])
    assert "ms" not in rows[2]  # its kernels need a GPU
    assert rows[2]["failed"].split(":")[0].endswith("Error")
    assert "bf16, full checkpointing" in load("table").show([report])
    assert rows[2]["failed"] in shown


def test_compiled_variants_share_no_graph(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = load("llama_layer")
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda call, **options: compiled.append(call) or call)
    _, shape = layers.parse_case("tiny:8x1")
    names = [name for name, variant in layers.VARIANTS.items() if variant.compiled]
    x = torch.randn(1, 8, shape.hidden, dtype=torch.bfloat16)
    rotary = layers.rotary_embedding(shape, torch.device("cpu"))
    outputs = []
    for name in [n for n in names if n.startswith("bf16")]:
        layer = layers.make_layer(shape, torch.device("cpu"))
        outputs.append(layers.VARIANTS[name].build(layer, name)(x, *rotary))
    assert len({call.__code__ for call in compiled}) == len(compiled) == len(outputs) > 2
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=0, atol=0)


def test_offloading_leaves_weights_on_the_gpu(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = load("llama_layer")
    _, shape = layers.parse_case("tiny:8x1")
    layer = layers.make_layer(shape, torch.device("cpu"))
    offloaded: list[int] = []
    real = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: offloaded.append(t.data_ptr()) or real(t))
    call = layers.VARIANTS["bf16, save_on_cpu"].build(layer, "offloaded")
    call(
        torch.randn(1, 8, shape.hidden, dtype=torch.bfloat16, requires_grad=True),
        *layers.rotary_embedding(shape, torch.device("cpu")),
    ).sum().backward()
    assert offloaded
    assert not {p.data_ptr() for p in layer.parameters()} & set(offloaded)


def test_inputs_are_independent_of_weights(load: Load) -> None:
    layers, subject = load("llama_layer"), load("activations")
    _, shape = layers.parse_case("tiny:64x1")
    torch.manual_seed(0)  # as the script does
    x = subject.Data.make(shape, 1, torch.device("cpu")).x[0, 0].float()
    layer = layers.make_layer(shape, torch.device("cpu"))
    weight = layer.self_attn.q_proj.weight.detach().float()
    correlation = torch.corrcoef(torch.stack([x.flatten(), weight.flatten()]))[0, 1]
    assert abs(correlation) < 0.1  # of 4096 values: 1.6% by chance


def test_wrong_cases(load: Load) -> None:
    for case in ("llama3_8b", "llama4:8x1", "tiny:8", "tiny:8xb"):
        with pytest.raises(ValueError, match="SHAPE:SEQxBATCH"):
            load("llama_layer").parse_case(case)
