"""Alternatives to ``quantized_fsdp``: their emulation, their prototypes, and what is reported."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from lq_testing import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

Load = Callable[[str], ModuleType]
Run = Callable[..., str]

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TEXT = ("--cpu", "--text", str(FOLDER))
RANK, STEPS, START = 4, 6, 2
SHAPE = (128, 64)


def _batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return list(torch.randn(STEPS, 16, SHAPE[1], generator=generator))


def _gradients(rank: int, hook: tuple[Any, Any] | None = None) -> list[dict[str, Tensor]]:
    """Gradients of every step, with equal weights; averaged if there is a hook."""
    torch.manual_seed(0)
    model = nn.Linear(*SHAPE[::-1])
    called: nn.Module = model
    if hook is not None:
        called = DistributedDataParallel(model)
        called.register_comm_hook(*hook)
    found = []
    for values in _batches(rank):
        model.zero_grad()
        called(values).tanh().square().mean().backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return found


def _real(rank: int, world: int) -> dict[str, list[dict[str, Tensor]]]:
    """Averaged gradients by hook."""
    sys.path.insert(0, str(FOLDER))
    from coded_low_rank import CodedLowRank, coded_low_rank_hook

    theirs = PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=START)
    return {
        "torch": _gradients(rank, (theirs, powerSGD_hook)),
        "coded": _gradients(rank, (CodedLowRank(RANK, START, 1), coded_low_rank_hook)),
    }


@pytest.fixture(scope="module")
def real() -> list[Any]:
    """What two ranks have found."""
    return run_ranks(_real, 2)


def test_emulated_thin_matrices_are_those_of_the_hooks(load: Load, real: list[Any]) -> None:
    made = load("emulated_alternatives")
    own = [_gradients(rank) for rank in range(2)]
    for kind, factors in (("torch", None), ("coded", load("fewer_bytes")._code(8))):
        reducer = made.Reducer(made.Reduction(rank=RANK, factors=factors, start=START), 2)
        if kind == "torch":  # which draws by a seed of its own
            torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
            reducer.factors["weight"] = torch.randn(1, SHAPE[1], RANK)
        for step in range(STEPS):
            each = {n: torch.stack([o[step][n] for o in own]) for n in ("weight", "bias")}
            found = reducer.reduce({n: g[None] for n, g in each.items()})
            for name, gradient in each.items():
                ours, theirs = found[name][0], real[0][kind][step][name]
                assert torch.equal(theirs, real[1][kind][step][name])
                # The emulated codes add what they left out, those of the hook, of 8 bits, do not.
                bound = 1e-5 if kind == "torch" else 0.05
                assert (ours - theirs).norm() < bound * gradient.mean(dim=0).norm()
                thin = step >= START and name == "weight"
                assert ((theirs - gradient.mean(dim=0)).norm() > 0.1 * theirs.norm()) == thin


# --- emulated -------------------------------------------------------------------------------------


def test_nodes_train_alone_between_two_exchanges(load: Load) -> None:
    made, training = load("emulated_alternatives"), load("stacked_training")
    variants = load("loss_variants")
    data = load("ablation_data").load(None, FOLDER, 32, torch.device("cpu"))
    preset = replace(variants.PRESETS["gpt_smoke"], steps=2, val_blocks=4)
    lanes, plan = [training.Lane(3), training.Lane(5)], variants.VARIANTS["full precision"].plan
    local = made.LocalSteps(every=2, lr=1.0, momentum=0.0)
    run = made.LocalTraining(local, data, preset, lanes, 2, 2)
    # The four ranks of two nodes read what those of one job do.
    whole = training.StackedTraining(data, preset, lanes, 2, 2)
    assert torch.equal(run._order.unflatten(1, (2, 2)).flatten(2, 3), whole._order)
    first = run.take_step(plan)
    torch.testing.assert_close(first, whole.take_step(plan))
    assert not torch.equal(*run.masters["head.weight"][:2])
    run.take_step(plan)
    ended = run.masters["head.weight"].detach().clone()
    assert torch.equal(ended[0], ended[1])
    assert not torch.equal(ended[0], ended[2])
    assert run.validate().shape == (2,)
    late = made.LocalTraining(replace(local, late=1), data, preset, lanes, 2, 2)
    late.take_step(plan)
    late.take_step(plan)
    assert not torch.equal(*late.masters["head.weight"][:2])
    assert torch.equal(late.validate(), run.validate())
    assert torch.equal(late.masters["head.weight"], ended)
    with pytest.raises(ValueError, match="give a multiple"):
        made.LocalTraining(replace(local, every=3), data, preset, lanes, 2, 2)


def test_what_codes_lack_comes_later(load: Load) -> None:
    """The mean over steps tends to that of gradients."""
    made, code = load("emulated_alternatives"), load("fewer_bytes")._code(2)
    generator = torch.Generator().manual_seed(0)
    gradients = {"w": torch.randn(1, 2, 128, 64, generator=generator)}
    mean = gradients["w"].mean(dim=1)
    cases = {
        made.Reduction(code=code): 0.15,
        made.Reduction(rank=2, code=code, turns=3): 0.15,
        made.Reduction(rank=16, factors=load("fewer_bytes")._code(4)): 0.06,  # else 0.073
        made.Reduction(rank=1, factors=load("fewer_bytes")._code(8), code=code): 0.15,
    }
    for reduction, bound in cases.items():
        reducer, total = made.Reducer(reduction, 2), torch.zeros_like(mean)
        errors = []
        for step in range(1, 61):
            total += reducer.reduce(gradients)["w"]
            errors.append(float((total / step - mean).norm() / mean.norm()))
        assert errors[0] > 0.3
        assert errors[-1] < bound, reduction


def test_bits_are_those_of_messages(load: Load) -> None:
    made, gpt = load("emulated_alternatives"), load("gpt")
    with torch.device("meta"):
        model = gpt.GPT(gpt.GPTConfig(**load("alternatives").SIZES["125m"]))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    numel = sum(p.numel() for p in model.parameters())
    megabytes = [made.Reduction(rank=r).bits(shapes, 2) * numel / 8e6 for r in (8, 32)]
    assert megabytes == pytest.approx([8.2, 32.3], rel=0.01)  # an H200's interface sent 8.5 and 33
    assert made.LocalSteps(every=4).bits(shapes, 2) == pytest.approx(8)
    assert made.Reduction().bits(shapes, 4) == pytest.approx(48)


def test_few_bytes_are_compared(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    names = "full precision;both;PowerSGD 2 in 8 bits;4 bits every 4"
    options = ("--preset", "gpt_smoke", "--steps", "4", "--seeds", "0,1", "--starts", "1")
    shown = run("fewer_bytes.py", *TEXT, *options, "--variants", names, "--json", str(report))
    assert "PowerSGD 2 in 8 bits" in shown
    assert "4 bits every 4" in run("table.py", str(report))


# --- the report -----------------------------------------------------------------------------------


def test_alternatives_are_measured(run: Run, tmp_path: Path) -> None:
    reports = [str(tmp_path / f"{part}.json") for part in "abc"]
    rows = "tiny:quantized,tiny:local-8,tiny:ddp-powersgd-8,loss:ddp-powersgd-8,loss:local-8"
    short = ("--tiny", "--steps", "1", "--loss-steps", "8", "--points", "2")
    shown = run("alternatives.py", *TEXT, *short, "--rows", rows, "--json", reports[0])
    assert "ddp-powersgd-8" in shown
    run("alternatives.py", *TEXT, *short, "--rows", "tiny:ddp,loss:ddp", "--json", reports[1])
    merged = run("alternatives.py", "--merge", *reports[:2], "--json", reports[2])
    again = run("alternatives.py", "--merge", reports[2], "--json", reports[2])
    assert again == merged
    results = json.loads(Path(reports[2]).read_text())["results"]
    assert [row["method"] for row in results["rows"]][-1] == "ddp"
    assert set(results["losses"]) == {"ddp-powersgd-8", "local-8", "ddp"}
    assert "s, all steps" in merged
    assert "local-8" in run("table.py", reports[2])


def test_losses_are_read_at_equal_time(load: Load) -> None:
    report = load("alternatives_report")

    def row(method: str, *step_ms: float | None) -> dict[str, Any]:
        cells = {
            rate: {"step_ms": ms, "arithmetic_ms": 500.0}
            for rate, ms in zip(("none", "1gbit"), step_ms, strict=True)
        }
        return {"size": "125m", "method": method, "cells": cells}

    def run(method: str, *losses: float, **more: Any) -> dict[str, Any]:
        points = [(10 * (index + 1), loss) for index, loss in enumerate(losses)]
        return {"method": method, "points": points, "start": 0, "first": None} | more

    results = {
        "setup": {"rates": ["none", "1gbit"], "parameters": {"125m": 1}, "losses": {"steps": 30}},
        "rows": [row("ddp", 100, 1000), row("thin", 200, 300), row("slow", 100, None)],
        "losses": {
            "ddp": run("ddp", 5.0, 4.0, 3.0),
            "thin@10": run("thin", 5.0, 4.2, 3.4, start=10, first="ddp"),
            "slow": run("slow", 5.0, 4.0, 3.0),
            "unknown": run("unknown", 5.0, 4.0, 3.0),
        },
    }
    curves = report.timed(results, "1gbit")
    assert [t for t, _ in curves["ddp"]] == [10, 20, 30]
    assert [t for t, _ in curves["thin@10"]] == [10, 13, 16]  # ten steps of another
    assert [t for t, _ in curves["slow"]] == [5, 10, 15]  # by arithmetic
    assert "unknown" not in curves
    assert report.loss_at(curves["ddp"], 25) == pytest.approx(3.5)
    assert report.loss_at(curves["ddp"], 9) != report.loss_at(curves["ddp"], 9)
    assert report.seconds_to(curves["thin@10"], 3.8) == pytest.approx(14.5)
    assert report.seconds_to(curves["thin@10"], 3.0) != report.seconds_to(curves["thin@10"], 3.0)
    assert report.arithmetic_ms(125e6, 50, "1gbit") == pytest.approx(1050)
    other = results | {"setup": results["setup"] | {"rates": ["none"]}}
    with pytest.raises(ValueError, match="only reports of equal runs"):
        report.joined([results, other])
