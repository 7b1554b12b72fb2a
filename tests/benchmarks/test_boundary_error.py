"""The measurement of codecs of stage boundaries: what it reads, and what its numbers mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

Load = Callable[[str], ModuleType]

VOCAB = 264  # of bytes
SIZES = {"SEQ": 16, "LAYERS": 3, "HIDDEN": 256, "HEADS": 2, "INTERMEDIATE": 32}


@pytest.fixture
def small(load: Load, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Build a small model of a kind."""
    models = load("research/trained_models")
    for name, value in SIZES.items():
        monkeypatch.setattr(models, name, value)
    return lambda kind: models.build(kind, VOCAB)


@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_what_crosses_is_what_the_next_block_reads(
    load: Load, small: Callable[[str], Any], kind: str
) -> None:
    script, models = load("research/boundary_error"), load("research/trained_models")
    model = small(kind)
    tokens = torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    found = script.crossings(model, inputs, targets)
    blocks = models.blocks_of(model)
    assert len(found) == len(blocks) - 1
    read: list[torch.Tensor] = []

    def replace_input(_: Any, arguments: tuple[Any, ...], keywords: Any) -> Any:
        hidden = arguments[0].detach().requires_grad_()
        read.append(hidden)
        return (hidden, *arguments[1:]), keywords

    blocks[-1].register_forward_pre_hook(replace_input, with_kwargs=True)
    models.loss_of(model, inputs, targets).backward()
    torch.testing.assert_close(found[-1][0], read[0].detach(), rtol=0, atol=0)
    torch.testing.assert_close(found[-1][1], read[0].grad)


def test_errors_follow_bits_and_outliers_cost_what_is_not_transformed(load: Load) -> None:
    script = load("research/boundary_error")
    generator = torch.Generator().manual_seed(0)
    hidden, gradient = torch.randn(2, 2, 10, 256, generator=generator)
    found = {
        name: script.errors(script.CODECS[name], [[(hidden, gradient)] * 2])
        for name in ("tah", "tah all int4", "int4 tile 64", "int5 tile 64", "int6 tile 64")
    }
    four, five, six = (found[f"int{bits} tile 64"] for bits in (4, 5, 6))
    assert [row["bits"] for row in (four, five, six)] == [4.5, 5.5, 6.5]
    for fewer, more in ((four, five), (five, six)):  # a code more halves the distance and a bit
        assert 1.9 < fewer["hidden"] / more["hidden"] < 2.2
        assert 1.9 < fewer["gradient"] / more["gradient"] < 2.2
    assert four["by depth"] == [pytest.approx(four["hidden"])] * 2
    assert found["tah all int4"]["hidden"] == pytest.approx(four["hidden"], rel=0.02)
    assert found["tah"]["hidden"] > 1.2 * four["hidden"], "20% of the tokens in 3 bits"
    for where in ("outliers", "first"):
        assert found["tah all int4"][where] < 0.12
        assert four[where] > 0.5


def test_models_are_measured_as_a_whole_and_left_as_they_were(
    load: Load, small: Callable[[str], Any]
) -> None:
    script = load("research/boundary_error")
    model = small("gpt")
    data = torch.randint(VOCAB, (4, 17)).to(torch.int32).numpy()
    before = script.losses(model, data, 2, 2)
    found = script.whole_model(model, data, ["int8 tile 64", "int4 tile 64"], 2, 2)
    exact, coarse = found["int8 tile 64"], found["int4 tile 64"]
    for which in ("hidden: all weights", "gradient: all weights", "hidden: bias"):
        assert 0 < 8 * exact[which] < coarse[which] < 0.4
    assert exact["loss %"] != 0
    assert script.losses(model, data, 2, 2) == before


def test_a_report_has_all_codecs_and_depths(
    load: Load,
    small: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    script, out = load("research/boundary_error"), tmp_path / "error.json"
    torch.save(small("gpt").state_dict(), tmp_path / "gpt_0001.pt")
    options = ["--batches", "1", "--batch", "2", "--codecs", "tah,fp8 tile 64"]
    options += ["--text", str(Path(script.__file__).parents[1]), "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["boundary_error.py", str(tmp_path / "gpt_0001.pt"), *options])
    assert script.main() == 0
    rows = json.loads(out.read_text())["results"]["rows"]
    assert [row["codec"] for row in rows] == ["tah", "fp8 tile 64"]
    assert all(len(row["by depth"]) == SIZES["LAYERS"] - 1 for row in rows)
    assert "fp8 tile 64" in load("table").show([out], ["codec", "bits", "hidden"])
