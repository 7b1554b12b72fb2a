"""The callback gives the activation callback this rank's bits, whatever their order."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lq_testing.activation_models import Module
from lq_testing.lightning_models import loader, trainer

from lq_lightning import (
    ActivationPolicy,
    ActivationQuantization,
    ActivationRule,
    QuantizedFSDPStrategy,
)
from lq_lightning.activations.policy import CODECS
from lq_lightning.callbacks import StageBitCompensation

FOUR_BITS = ActivationPolicy(norm="int4_hadamard", activation="int4")


class Strategy(SingleDeviceStrategy):
    """A single device that says it is a rank of a pipeline."""

    def __init__(self, rank: int = 2, schedule: str = "interleaved_1f1b") -> None:
        super().__init__(device=torch.device("cpu"))
        self.pipeline = SimpleNamespace(
            schedule=schedule,
            pipeline_size=4,
            num_microbatches=16,
            stages_per_rank=2,
            rank=rank,
        )


class Widths(pl.Callback):
    """The codes of sites while training runs."""

    def on_train_batch_start(self, run: pl.Trainer, *args: Any) -> None:
        (quantization,) = (c for c in run.callbacks if isinstance(c, ActivationQuantization))  # type: ignore[attr-defined]
        assert quantization.handle is not None
        self.codes = {s.codec.code for s in quantization.handle.sites if s.codec is not None}
        self.transforms = {
            s.codec.hadamard_size for s in quantization.handle.sites if s.codec is not None
        }


def _fit(path: Path, strategy: Any, callbacks: list[pl.Callback]) -> Widths:
    widths = Widths()
    options = {"max_steps": 1, "max_epochs": -1, "devices": 1}
    run = trainer(strategy, str(path), callbacks=[*callbacks, widths], **options)
    run.fit(Module(), loader())
    return widths


@pytest.mark.parametrize(("rank", "first"), [(0, True), (2, False), (3, True)])
def test_bits_of_the_rank(rank: int, first: bool, tmp_path: Path) -> None:
    compensation, quantization = StageBitCompensation(bits=4), ActivationQuantization(FOUR_BITS)
    callbacks = [compensation, quantization] if first else [quantization, compensation]
    widths = _fit(tmp_path, Strategy(rank), callbacks)
    assert compensation.stage_bits == (4, 4, 6, 8)
    assert compensation.counts == (11, 9, 7, 5)
    bits = compensation.stage_bits[rank]
    assert widths.codes == {f"int{bits}"}
    assert len(widths.transforms) == 2  # with and without, as in the recipe
    lines = compensation.summary().splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        ["0", "11", "4"], ["1", "9", "4"], ["2", "7", "6"], ["3", "5", "8"],
    ]  # fmt: skip
    assert "44 (100%)" in lines[1]
    assert "36 (82%)" in lines[2]
    # Without it, the next fit is as if there had been none.
    assert _fit(tmp_path, Strategy(rank), [quantization]).codes == {"int4"}


def test_the_recipe_and_the_default_have_the_same_bits(tmp_path: Path) -> None:
    compensation = StageBitCompensation()
    widths = _fit(tmp_path, Strategy(2), [compensation, ActivationQuantization("agoq")])
    assert compensation.stage_bits == (5, 6, 7, 8)
    assert widths.codes == {"int7"}
    assert _fit(tmp_path, Strategy(2), [ActivationQuantization("agoq")]).codes == {"int5"}


def test_nearest_and_other_first_bits(tmp_path: Path) -> None:
    compensation = StageBitCompensation(bits=3, rounding="nearest", cap=5)
    policy = ActivationPolicy(norm="int4", activation="int2")
    widths = _fit(tmp_path, Strategy(2), [compensation, ActivationQuantization(policy)])
    assert compensation.stage_bits == (3, 4, 5, 5)
    assert widths.codes == {"int5"}
    widths = _fit(tmp_path, Strategy(0), [compensation, ActivationQuantization(policy)])
    assert widths.codes == {"int4", "int3"}  # wider codes stay


def test_with_bits_changes_codes_and_nothing_else() -> None:
    policy = ActivationPolicy(
        norm="int4_hadamard",
        activation="int4",
        linear=CODECS["int2"],
        rules=(ActivationRule(module="a", codec="int3"), ActivationRule(module="b")),
        matmul="float8",
    )
    changed = policy.with_bits(4, 6)
    assert changed.norm == CODECS["int6_hadamard"]
    assert changed.activation == changed.linear == CODECS["int6"]
    assert changed.checkpoint == changed.other == CODECS["int8"]
    assert [rule.codec for rule in changed.rules] == [CODECS["int6"], None]
    assert changed.matmul == "float8"
    assert changed.attention is None
    assert policy.norm == "int4_hadamard"


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (lambda: [], "there is none in the Trainer"),
        (lambda: [ActivationQuantization(budget="1GiB")], "budget='1GiB'.*remove"),
        *(
            (lambda options=options: [ActivationQuantization(ActivationPolicy(**options))], message)
            for options, message in (
                ({"norm": "fp8_e4m3"}, "norm='fp8_e4m3'.*no integer code"),
                ({"rules": (ActivationRule(module="*", codec="nf4"),)}, "rules='nf4'"),
                (dict.fromkeys(("norm", "activation", "checkpoint", "other")), "nothing as codes"),
            )
        ),
    ],
    ids=["none", "budget", "fp8", "rule", "no codes"],
)
@pytest.mark.parametrize("first", [True, False])
def test_refuses_what_has_no_bits(
    callbacks: Any, message: str, first: bool, tmp_path: Path
) -> None:
    others = callbacks()
    mine = [StageBitCompensation()]
    with pytest.raises(ValueError, match=message):
        _fit(tmp_path, Strategy(), [*mine, *others] if first else [*others, *mine])


def test_needs_a_pipeline(tmp_path: Path) -> None:
    callbacks = [StageBitCompensation(), ActivationQuantization()]
    with pytest.raises(ValueError, match="needs a pipeline, which `SingleDeviceStrategy`"):
        _fit(tmp_path, "auto", callbacks)
    assert not hasattr(QuantizedFSDPStrategy, "pipeline")


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
def test_refuses_schedules_that_split_backward_passes(schedule: str, tmp_path: Path) -> None:
    callbacks = [StageBitCompensation(), ActivationQuantization()]
    with pytest.raises(ValueError, match=f"schedule='{schedule}'.*remove the callback, or use"):
        _fit(tmp_path, Strategy(schedule=schedule), callbacks)


@pytest.mark.parametrize("options", [{"bits": 9}, {"rounding": "ceil"}, {"bits": 6, "cap": 4}])
def test_refuses_options_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(reversed(options))}="):
        StageBitCompensation(**options)
