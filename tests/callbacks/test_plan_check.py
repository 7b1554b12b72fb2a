"""What a run holds, sends and takes, beside a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lq_testing.activation_models import Module
from lq_testing.lightning_models import EXACT, SMALL, TinyModule, loader, run_trainer, trainer
from torch import nn

from lq_lightning import QuantizedFSDPStrategy, QuantizedPipelineStrategy
from lq_lightning.callbacks import ActivationQuantization, PlanCheck, plan_check
from lq_lightning.callbacks.plan_check import CheckedLine, Measured, checked_table, compare
from lq_lightning.plugins import QuantizedPrecision


def plan(stages: int = 1, **step: float) -> dict[str, Any]:
    kinds = {"weights": 4000, "saved activations": 100, "temporary": 7}
    peak = {
        "allocated_nbytes": 9000,
        "allocated_interval": [8000, 10000],
        "reserved_nbytes": 12000,
        "device_nbytes": 15000,
        "low_nbytes": 14000,
        "high_nbytes": 16000,
        "kinds": kinds,
        "most": {**kinds, "optimizer states": 8000},
    }
    seconds = {"seconds": 2.0, "low_s": 1.0, "high_s": 3.0}
    sent = {"sent_within_nbytes": 0, "sent_between_nbytes": 1000}
    memory = [{"stage": stage, **peak} for stage in range(stages)]
    found = {"memory": memory, "step": seconds | sent | step, "tokens_per_step": 64}
    return found | {"machine": {"gpus_per_node": 2}}


def ranks(**changed: Any) -> list[Measured]:
    peaks = {"allocated": 9900, "reserved": 12000, "device": 17000}
    return [Measured(step_s=2.5, peaks=peaks, sent_between=600.0, **changed)] * 3


def test_lines_tell_what_is_outside_of_its_interval() -> None:
    lines = {line.name: line for line in compare(plan(), ranks())}
    assert lines["peak allocated"].is_inside
    assert lines["peak allocated"].difference == pytest.approx(0.1)
    assert lines["peak reserved"].is_inside is None, "it has no interval"
    assert lines["peak device"].is_inside is False
    assert (lines["speed"].low, lines["speed"].high) == (64 / 3, 64)
    assert lines["speed"].measured == 64 / 2.5
    assert lines["sent between nodes"].measured == 1200, "of the two ranks of node 0"
    assert "sent within nodes" not in lines, "nothing is"
    text = checked_table([*lines.values()])
    assert "outside" in next(line for line in text.splitlines() if line.startswith("peak device"))
    assert text.splitlines()[-1] == "3 of 4 intervals contain what was measured: not peak device"


def test_without_a_gpu_memory_and_time_are_no_match() -> None:
    found = [Measured(step_s=9.0, kinds={"weights": 4000, "optimizer states": 8000})]
    lines = {line.name: line for line in compare(plan(), found)}
    assert lines["peak allocated"].note == "there is no GPU"
    assert (lines["step"].measured, lines["step"].difference) == (9.0, None)
    assert lines["weights"].difference == lines["optimizer states"].difference == 0
    assert lines["sent between nodes"].note == "not all of it is counted"
    assert "intervals" not in checked_table([*lines.values()])


def test_each_stage_has_lines_of_its_own_ranks() -> None:
    found = [Measured(stage=s, kinds={"weights": 4000 + s}) for s in (0, 1, 1)]
    lines = {line.name: line.measured for line in compare(plan(stages=2), found)}
    assert (lines["weights of stage 0"], lines["weights of stage 1"]) == (4000, 4001)


def test_numbers_have_three_digits_or_more() -> None:
    line = CheckedLine("x", "GiB", 2**31, 2**20, 0, 2**41)
    assert line.cells()[:4] == ("x, GiB", "2.00", "0.0000 to 2,048", "0.0010")


class OneLayer(TinyModule):
    """Whose sizes are easy to count."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(32, channels), nn.Linear(channels, 8, bias=False))

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(tokens).square().mean()


def test_sizes_of_one_process_are_those_of_its_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(plan_check, "rank_zero_info", said.append)
    file = tmp_path / "plan.json"
    check = PlanCheck(file)
    file.write_text(json.dumps(plan()))
    trainer("auto", str(tmp_path), 1, callbacks=[check], max_steps=3).fit(OneLayer(), loader())
    (found,) = check.measured
    numel = 32 * 16 + 16 * 8
    assert found.kinds["weights"] == found.kinds["gradients"] == 4 * numel
    assert found.kinds["optimizer states"] == 8 * numel + 2 * 4  # and a count of each tensor
    tokens = next(iter(loader()))
    # the indices, the input of the linear layer and the output, which is squared
    expected = tokens.numel() * (8 + 4 * 16 + 4 * 8)
    assert found.kinds["saved activations"] == pytest.approx(expected, abs=16)
    assert found.step_s > 0
    assert found.peaks == {}
    assert "there is no GPU" in said[0]
    assert len(check.lines) > 6


def test_codes_are_smaller_than_what_they_stand_for(tmp_path: Path) -> None:
    def saved(*callbacks: Any) -> int:
        check = PlanCheck({})
        run = trainer("auto", str(tmp_path), 1, callbacks=[check, *callbacks], max_steps=1)
        run.fit(TinyModule(), loader())
        assert check.measured[0].step_s is None, "the only step is the first"
        assert check.lines == []
        return check.measured[0].kinds["saved activations"]

    assert saved(ActivationQuantization("agoq")) < saved()


def test_a_plan_that_is_not_there_is_said(tmp_path: Path) -> None:
    check = PlanCheck(tmp_path / "none.json")
    run = trainer("auto", str(tmp_path), 1, callbacks=[check], max_steps=1)
    with pytest.warns(UserWarning, match="nothing to compare with"):
        run.fit(TinyModule(), loader())
    assert check.lines == []


def _two_nodes(rank: int, world: int, root: str) -> tuple[list[Measured], int, int, int]:
    strategy = QuantizedFSDPStrategy(node_size=1, **SMALL)
    check = PlanCheck(plan(), quiet=True)
    precision = QuantizedPrecision("32-true", "none", "int8")
    run = trainer(
        strategy, root, world, callbacks=[check], plugins=[precision], accumulate_grad_batches=2
    )
    run.fit(OneLayer(512), loader(32))
    traffic = strategy.communication.traffic()
    first_refresh = traffic.weights_inter, traffic.gradients_inter
    return check.measured, len(check.lines), *map(int, first_refresh)


def test_ranks_count_what_they_send_and_hold(tmp_path: Path) -> None:
    first, second = run_trainer(_two_nodes, 2, str(tmp_path))
    measured, lines, weights, gradients = first
    assert measured == second[0], "gathered"
    assert (lines > 0, second[1]) == (True, 0), "rank 0 shows them"
    for found in measured:
        assert found.kinds["replica"] == 2 * found.kinds["weights"], "whole, in fp32"
        assert 0 < found.kinds["gradient sums"] < found.kinds["weights"] * 2
        assert found.sent_within == 0
        assert 0 < found.sent_between < (weights + gradients) / 4, "without the first refresh"


def _pipeline(rank: int, world: int, root: str) -> list[Measured]:
    check = PlanCheck(plan(stages=2), quiet=True)
    strategy = QuantizedPipelineStrategy(pipeline_size=2, num_microbatches=2, **EXACT)
    trainer(strategy, root, world, callbacks=[check], max_steps=2).fit(Module(), loader())
    return check.measured


def test_stages_measure_for_themselves(tmp_path: Path) -> None:
    measured = run_trainer(_pipeline, 2, str(tmp_path))[0]
    assert [found.stage for found in measured] == [0, 1]
    assert all(found.sent_between is None for found in measured), "boundaries are not counted"
    assert all("saved activations" not in found.kinds for found in measured)
