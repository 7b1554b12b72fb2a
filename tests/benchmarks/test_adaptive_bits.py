"""Learned bits and their baselines, as the study of fine-tuning has them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

Load = Callable[[str], ModuleType]
Run = Callable[..., str]

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
B, S, N = 2, 6, 8


def _values(seed: int = 0) -> torch.Tensor:
    x = torch.randn(B, S, N, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-2, 2, N)


@pytest.mark.parametrize(
    ("shared", "dims"), [("tensor", (0, 1, 2)), ("channel", (0, 1)), ("token", (2,)), (4, (3,))]
)
@pytest.mark.parametrize("bits", [1, 3, 4])
def test_codes_are_of_those_who_share_a_scale(
    load: Load, shared: Any, dims: tuple[int, ...], bits: int
) -> None:
    baselines = load("qat_baselines")
    x = _values().requires_grad_()
    x_hat = baselines.quantizer(shared, bits)(x)
    x_hat.backward(_values(1))
    assert torch.equal(x.grad, _values(1))  # straight through

    shape = (B, S, -1, shared) if shared == 4 else (B, S, N)
    error = (x_hat - x).detach().view(shape).abs().amax(dims)
    values = x.detach().view(shape)
    step = (values.amax(dims) - values.amin(dims)) / (2**bits - 1)
    rounded = values.abs().amax(dims) / 2**7  # minimum and scale are of bf16
    assert (error <= 0.5 * step + rounded).all()
    rest = [dim for dim in range(len(shape)) if dim not in dims]
    lines = x_hat.detach().view(shape).permute(*rest, *dims).flatten(len(rest))
    assert all(len(line.unique()) <= 2**bits for line in lines.view(-1, lines.shape[-1]))


@pytest.mark.parametrize(
    ("shared", "expected"),
    [("tensor", 4 + 32 / 96), ("channel", 4 + 32 / 12), ("token", 8.0), (4, 12.0)],
)
def test_sizes_hold_scales_and_minima(load: Load, shared: Any, expected: float) -> None:
    found = load("qat_baselines").bits_per_value(shared, 4, (B, S, N))
    assert found == pytest.approx(expected)


def test_bf16_is_rounded_away(load: Load) -> None:
    beyond = load("qat_baselines").bf16_beyond
    x = torch.tensor([1.0, 1.001, -1.001, 0.0])
    assert beyond(x, up=True).tolist() == [1.0, 1.0078125, -1.0, 0.0]
    assert beyond(x, up=False).tolist() == [1.0, 1.0, -1.0078125, 0.0]


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_fitted_ranges_have_the_least_error_for_normal_values(load: Load, bits: int) -> None:
    baselines = load("qat_baselines")
    x = torch.randn(8, 4096, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([1, 9.0])
    error = (baselines.quantizer("channel", bits, fitted=True)(x) - x).square().mean((0, 1))
    found = error / x.var((0, 1))
    torch.testing.assert_close(
        found, found.new_full((2,), baselines.NORMAL_ERRORS[bits]), rtol=0.03, atol=0
    )


def test_fitted_ranges_are_within_the_values(load: Load) -> None:
    x = torch.tensor([0.0, 0.0, 0.0, 3.0]).view(1, 4, 1)  # 1.5 deviations reach further below
    assert load("qat_baselines").quantizer("channel", 2, fitted=True)(x).min() == 0


def test_widths_keep_the_sum_of_bits(load: Load) -> None:
    widths_of = load("adaptive_gates").widths_of
    bits = torch.tensor([3.4, 3.4, 3.4, 5.8])  # 16 in all
    assert widths_of(bits, "remainder").tolist() == [4.0, 3.0, 3.0, 6.0]
    assert widths_of(bits, "nearest").tolist() == [3.0, 3.0, 3.0, 6.0]
    assert widths_of(torch.full((5,), 3.5), "remainder").sum() == 18  # 17.5, to even


def test_gradient_of_bits_is_that_of_the_step(load: Load) -> None:
    """Codes stay as they are while the step changes with the bits: autograd's own gradient."""
    gates = load("adaptive_gates")
    gate = gates.Gate(gates.AdaptiveOptions(start=3.0), N, torch.device("cpu"))
    scales = torch.exp2(torch.arange(N))  # of which nothing is lost in bf16
    x = torch.rand(B, S, N, generator=torch.Generator().manual_seed(0)) * 7 * scales
    x[0, 0], x[0, 1] = 0, 7 * scales
    upstream = _values(1)
    gate.quantize(x).backward(upstream)

    bits = torch.full((N,), 3.0, dtype=torch.double, requires_grad=True)
    step = 7 * scales / (2**bits - 1)
    u = x / step
    (u + (u.round() - u).detach()).mul(step).backward(upstream.double())
    torch.testing.assert_close(gate.grad, bits.grad.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("norm", "asked"), [("l1", 0.0), ("l2", 7.8e-5)])
def test_regulariser_reaches_the_target_and_is_held(load: Load, norm: str, asked: float) -> None:
    gates = load("adaptive_gates")
    options = gates.AdaptiveOptions(norm=norm, learning_rate=0.05)
    sites = [gates.Gate(options, lines, torch.device("cpu")) for lines in (3, 5)]
    optimizer = gates.GateTrainer(options, sites)
    for _ in range(60):
        sites[1].grad.fill_(-asked)  # what the regulariser's gradient is at 4.5 bits
        optimizer.step(1.0)
    assert optimizer.reached is not None
    assert optimizer.means[-1] == pytest.approx(4.0, abs=0.1 + 1e-4)
    spread = float(sites[1].bits().mean() - sites[0].bits().mean())
    assert (spread > 0.3) == (asked > 0)


def test_scheduled_bits_follow_a_line_and_keep_what_gradients_share_apart(load: Load) -> None:
    gates = load("adaptive_gates")
    options = gates.AdaptiveOptions(
        descent=10, projected=True, later=1.0, learning_rate=0.05, tolerance=1e-3
    )
    alike, apart = (gates.Gate(options, 4, torch.device("cpu")) for _ in range(2))
    trainers = [gates.GateTrainer(options, [gate]) for gate in (alike, apart)]
    for _ in range(15):
        alike.grad.fill_(-1e-3)
        apart.grad.copy_(torch.tensor([-3e-3, -1e-3, -1e-3, -1e-3]))
        for trainer in trainers:
            trainer.step(1.0)
    expected = [8 - 0.4 * step for step in range(1, 11)] + 5 * [4.0]
    for trainer in trainers:
        assert trainer.means == pytest.approx(expected, abs=2e-3)
        assert trainer.reached == 10
    assert alike.bits().std() < 1e-3
    assert apart.bits()[0] > 4.5 > 4 > apart.bits()[1]


def test_solution_fills_in_reverse(load: Load) -> None:
    """Half a bit more for each factor of two in the Fisher information, at equal ranges."""
    gates = load("adaptive_gates")
    options = gates.AdaptiveOptions(solved=4, tolerance=1e-3)
    gate = gates.Gate(options, 4, torch.device("cpu"))
    gate.energy.copy_(torch.tensor([1.0, 4.0, 16.0, 64.0]))
    gates.GateTrainer(options, [gate]).step(1.0)
    torch.testing.assert_close(gate.bits(), torch.tensor([2.5, 3.5, 4.5, 5.5]), rtol=0, atol=2e-3)


def test_low_rank_starts_at_zero_and_trains_alone(load: Load) -> None:
    low_rank = load("low_rank")
    block = torch.nn.ModuleList(
        [torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 4, bias=False)]
    )
    x = torch.randn(3, 4)
    before = block[0](x)
    weights = low_rank.add_low_rank(block, rank=2, alpha=4.0)
    assert [tuple(w.shape) for w in weights] == [(2, 4), (6, 2), (2, 6), (4, 2)]
    assert torch.equal(block[0](x), before)
    with torch.no_grad():
        weights[1].fill_(1.0)
    torch.testing.assert_close(block[0](x), before + 2 * (x @ weights[0].T).sum(1, keepdim=True))


def test_differences_are_of_equal_seeds(load: Load) -> None:
    load("ablation_report")
    report = load("adaptive_report")
    outcome = load("ablation_report").Outcome
    outcomes = {
        "full precision": [outcome(0, 1.0, 0.0), outcome(1, 2.0, 0.0)],
        "qat group 3": [outcome(1, 2.5, 0.0)],
        "amaq 3 L1": [outcome(0, 1.25, 0.0), outcome(1, 2.25, 0.0), outcome(2, 9.0, 0.0)],
    }
    assert report.group_baseline("amaq 3 L1") == "qat group 3"
    assert report.group_baseline("tah5") is None
    assert report.differences(outcomes, "amaq 3 L1", "full precision") == [0.25, 0.25]
    assert report.differences(outcomes, "amaq 3 L1", "qat group 3") == [-0.25]
    assert report.mean_and_error([0.1, 0.3]) == ("+200.0", "100.0")
    curves = [[9.0, 9.0, 1.0, 2.0], [0.0, 0.0, 1.5, 4.0]]
    pair = [outcome(0, 1.0, 0.0, details={"losses": curve}) for curve in curves]
    of_two = {"full precision": pair[:1], "tah": pair[1:]}
    assert report.training_excess(of_two, "tah", max) == [2.0]
    assert report.training_excess(of_two, "tah", sum) == [2.5]
    validated = {"val_losses": [3.0, 2.0, 2.5], "val_every": 8}
    curves = {"qat group 3": [outcome(0, 2.25, 0.0, details=validated), outcome(1, 9.0, 0.0)]}
    assert report.stability_rows(curves) == (
        [["qat group 3", "1", "3.0000", "2.0000", "2.2500", "+500.0", "-", "+500.0"]]
    )
    assert report.rise([3.0, 2.0]) == 0
    with pytest.raises(ValueError, match="compares with 'full precision'"):
        report.draw_curves(curves, Path("none.png"))
    row = dict(zip(report.HEADER, report.rows(outcomes)[1], strict=True))
    assert row["perplexity"] == f"{math.exp(2.5):.4f}"
    assert row["gap"] == "+500.0"


def test_all_ways_of_quantizing_run(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    shown = run(
        *("adaptive_bits.py", "--cpu", "--no-compile", "--preset", "smoke"),
        *("--text", str(BENCHMARKS), "--trunk-steps", "50", "--trunk", str(tmp_path)),
        *("--tune-text", str(BENCHMARKS.parent / "docs"), "--tune-suffix", ".md"),
        *("--tune-blocks", "8", "--tune-epochs", "10", "--seeds", "0", "--sites", "layers"),
        *("--trunk-seed", "3", "--runs", "full precision,qat group 4,aq_sgd 4,amaq 4 rate 0.1,tah"),
        *("--val-every", "8"),
        *("--json", str(report)),
    )
    assert "steps to target" in shown
    assert [path.name for path in tmp_path.glob("*.pt")] == ["trunk_smoke_tune_3_50.pt"]
    results = json.loads(report.read_text())["results"]
    assert results["tuning"] == {"blocks": 8, "epochs": 10, "files": ".md", "trunk_seed": 3}
    found = {name: runs[0] for name, runs in results["variants"].items()}
    assert found["qat group 4"]["forward_bits"] == 4.5
    assert found["aq_sgd 4"]["forward_bits"] == pytest.approx((16 + 9 * 4.5) / 10)
    assert len(found["full precision"]["details"]["losses"]) == 2
    validations = [run["details"]["val_losses"] for run in found.values()]
    assert [len(curve) for curve in validations] == 5 * [3]  # before the steps 1, 9 and 17 of 20
    assert validations[0][0] == validations[2][0] != validations[1][0]  # AQ-SGD is validated raw
    assert len(set(map(tuple, validations))) == 5
    adaptive = found["amaq 4 rate 0.1"]["details"]
    assert list(adaptive["sites"]) == ["input", "layer 0", "layer 1", "output"]
    assert len(adaptive["mean_bits"]) == 2
    assert adaptive["mean_bits"][-1] != 8
    assert sum(adaptive["sites"]["input"]["widths"].values()) == 64
    assert "amaq 4 rate 0.1" in run("table.py", str(report))
    trunk, signals = tmp_path / "trunk_smoke_tune_3_50.pt", tmp_path / "signals.json"
    run(
        *("research/bit_signal.py", str(trunk), "--preset", "smoke", "--cpu", "--steps", "3"),
        *("--most", "3", "--text", str(BENCHMARKS), "--json", str(signals)),
    )
    rows = json.loads(signals.read_text())["results"]["signals"]
    assert [row["site"] for row in rows[:4]] == ["input", "layer 0", "layer 1", "output"]
    assert "alone" in run("table.py", str(signals))
    figure = tmp_path / "curves.png"
    run("adaptive_bits.py", "--merge", str(report), "--figure", str(figure))
    assert figure.stat().st_size > 0
