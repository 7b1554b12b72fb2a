"""Hidden states and gradients between emulated stages are coded in as many bits as is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

Load = Callable[[str], ModuleType]

TEXT = Path(__file__).resolve().parents[2] / "benchmarks"
STEPS = 17


@pytest.fixture
def train(load: Load, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Train two GPTs for some steps with a plan."""
    monkeypatch.setattr(load("emulated_stages"), "EXACT", 5)
    training = load("stacked_training")
    preset = replace(load("loss_variants").PRESETS["gpt_smoke"], steps=STEPS, batch=4)
    corpus = load("corpus").load(None, TEXT, preset.seq)
    lanes = [training.Lane(seed) for seed in (0, 1)]

    def train(plan: Any) -> Any:
        sizes = (preset, lanes, 1, 1)
        run = training.StackedTraining(corpus, torch.device("cpu"), *sizes, stages=plan.stages)
        for _ in range(STEPS):
            run.take_step(plan)
        return run

    return train


def test_more_bits_change_the_loss_less(load: Load, train: Callable[[Any], Any]) -> None:
    plan, stages = load("emulated_ranks").Plan, load("emulated_stages").Stages
    exact = train(plan()).validate()
    found = []
    for bits in (8, 2, 1):
        run = train(plan(stages=stages(8, bits, bits)))
        assert len(run.stages.boundaries) == run.preset.layers - 1
        for row in (0, 1):
            details = run.stages.details(row, 0.0)
            for sent in details["boundary_bits"]:
                assert sent == pytest.approx([bits, bits], abs=1 / run.preset.hidden)
            errors = torch.tensor(details["boundary_errors"]).flatten()
            assert len(errors) == 2 * len(run.stages.boundaries)
            losses = torch.stack([run.validate(), run.validate(in_stages=True)])[:, row]
            found.append([*(losses / exact[row] - 1).abs().tolist(), *errors.tolist()])
    eight, two, one = torch.tensor(found).view(3, 2, -1).mean(dim=1)
    assert (2 * eight < two).all()
    assert (1.2 * two < one).all()
    assert eight[:2].max() < 1e-3
    assert eight[2:].max() < 0.1


def test_variants_differ_in_their_boundaries(load: Load, train: Callable[[Any], Any]) -> None:
    losses = {}
    for name, plan in load("loss_variants").STAGES.items():
        if plan.stages.number < 8:
            continue
        run = train(plan)
        losses[name] = run.validate().mean().item()
        assert len(run.stages.boundaries) == 2  # there are 3 layers
        (bits, *_) = run.stages.details(0, 0.0)["boundary_bits"]
        named = {"tah5": 5.625, "tah": 4.425, "none": 32.0}
        named.update({f"int{width}": width + 0.5 for width in range(2, 6)})
        codecs = [str(k).partition(" ")[0] for k in (plan.stages.forward, plan.stages.backward)]
        expected = [named[codec] if codec in named else float(codec) for codec in codecs]
        assert bits == pytest.approx(expected, abs=0.1), name
    assert len(set(losses.values())) == len(losses)
    stages = load("emulated_stages")
    cuts = {n: [*stages.EmulatedStages(stages.Stages(n, 2, 2), 12).boundaries] for n in (2, 8)}
    assert cuts == {2: [5], 8: [0, 2, 3, 5, 6, 8, 9]}


def test_decoded_values_fit_the_bits_that_are_counted(load: Load) -> None:
    stages = load("emulated_stages")
    models, tokens, width = 2, 512, 16
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(width, width, generator=generator) * torch.logspace(0, -2, width)[:, None]

    def message() -> torch.Tensor:
        return torch.randn(models, tokens, width, generator=generator) @ mixed + 1

    codec = stages.Transform(3)
    for _ in range(stages.EXACT):
        x = message()
        assert torch.equal(codec.send(x, True), x)
    x = message()
    decoded = codec.send(x, False)
    assert ((decoded - x).norm() / (x - x.mean(1, keepdim=True)).norm()) < 0.1  # all alike: 0.19
    mean, (basis, deviations, table) = codec._mean.bfloat16().float(), codec._shared
    scales = (x - mean).square().mean(-1, keepdim=True).sqrt().bfloat16().float()
    levels = (decoded - mean) / scales @ torch.linalg.inv(basis.mT) / deviations
    bits = table[:, 0] // stages._CELLS
    counts = torch.tensor([[len(c.round(decimals=2).unique()) for c in m.T] for m in levels])
    assert (counts <= 2**bits).all()
    assert bits.max() > bits.min()
    beside = 16 * (tokens + width) + 16 * width * (width + 1) / stages.REFRESH
    counted = (bits.sum(1) * tokens + beside) / (tokens * width)
    assert codec.bits == pytest.approx(counted.tolist()[0]) == pytest.approx(counted.tolist()[1])
    assert 3 - 1 / width < codec.bits <= 3
    x[1, 5, 3], x[1, 6, 3] = torch.nan, torch.inf
    broken = codec.send(x, True)
    assert broken[1, 5].isnan().all()
    assert not broken[1, 6].isfinite().any()
    broken[1, 5:7] = 0
    assert broken.isfinite().all()
    for _ in range(stages.EXACT + 1):  # past the next basis
        assert codec.send(message(), True).isfinite().all()


def test_bits_go_where_they_lower_the_error_most(load: Load) -> None:
    stages = load("emulated_stages")
    # Max's table of 1960: errors of 1 to 3 bits, and the levels of 2.
    errors = [stages.lloyd_max(bits)[1] for bits in range(4)]
    assert errors == pytest.approx([1, 0.3634, 0.1175, 0.03454], rel=2e-3)
    assert stages.lloyd_max(2)[0].tolist() == pytest.approx(
        [-1.51, -0.4528, 0.4528, 1.51], abs=2e-3
    )
    variances = torch.tensor([[16.0, 1.0, 1.0, 1e-9]])
    assert stages.share_bits(variances, 3).tolist() == [[3, 0, 0, 0]]
    assert stages.share_bits(variances, 7).tolist() == [[4, 2, 1, 0]]
    with pytest.raises(ValueError, match="leave 1 to 32, or larger batches"):
        stages.share_bits(variances, 0)
