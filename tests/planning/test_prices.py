"""The table of prices is that of the reports, its page is printed from it, and nothing is free."""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lq_testing.accuracy_page import COMPARED, TABLES, print_prices, print_table
from torch import nn

from lq_lightning import (
    ActivationPolicy,
    ActivationQuantization,
    AdaptiveBits,
    CodecSpec,
    GradientQuantization,
    LocalSteps,
    OptimizerQuantization,
    QuantizedFSDPStrategy,
    QuantizedPipelineStrategy,
    QuantizedPrecision,
    WeightQuantization,
)
from lq_lightning.activations.policy import RECIPES
from lq_lightning.planning import prices
from lq_lightning.planning.losses import LOSSES, STUDIES, Loss
from lq_lightning.planning.prices import price, price_of, quantized_parts
from lq_lightning.planning.run_options import EnableCheckpointing, RunOptions

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "benchmarks/results"
TWO_NODES = SimpleNamespace(nodes=2, gpus_per_node=8, nvlink=True)
ONE_NODE = SimpleNamespace(nodes=1, gpus_per_node=8, nvlink=True)
FOUR_PLAIN = SimpleNamespace(nodes=4, gpus_per_node=1, nvlink=False)
DEFAULT = ("differences nf4/128", "gradients TLq-HS int4/128, vocabulary int6")


# --- from the reports -----------------------------------------------------------------------------


@cache
def results(report: str, commit: str) -> dict[str, Any]:
    if not commit:
        return dict(json.loads((ROOT / RESULTS / report).read_text())["results"])
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("no history")
    command = [git, "show", f"{commit}:{RESULTS}/{report}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("only the end of the history, or another user's")
    return dict(json.loads(done.stdout)["results"])


@cache
def printer() -> ModuleType:
    """The module that prints reports; nothing else finds the modules beside it."""
    import importlib
    import sys

    with pytest.MonkeyPatch.context() as context:
        context.syspath_prepend(str(ROOT / "benchmarks"))
        table = importlib.import_module("table")
    for path in (ROOT / "benchmarks").glob("*.py"):
        sys.modules.pop(path.stem, None)
    return table


def deviation(runs: dict[str, Any]) -> float:
    """Deviation in percent of full-precision runs of one seed which start a thousandth apart."""
    by_seed: dict[int, list[float]] = {}
    for name in (printer().BASELINE, printer().PERTURBED):
        for run in runs.get(name, ()):
            by_seed.setdefault(run["seed"], []).append(run["val_loss"])
    squares, freedom = [], 0
    for losses in by_seed.values():
        mean = statistics.mean(losses)
        squares += [(100 * (loss / mean - 1)) ** 2 for loss in losses]
        freedom += len(losses) - 1
    return math.sqrt(sum(squares) / freedom) if freedom else math.nan


def measured(loss: Loss) -> tuple[int, float, float]:
    """Seeds, change and error of a row, from its report."""
    study = STUDIES[loss.study]
    found, table = results(study.report, study.commit), printer()
    if "runs" in found:  # fine-tuning: with codes between stages where there are any
        runs = {name: {} for name in ("bf16", loss.variant)}
        for run in found["runs"]:
            if run["row"] in runs:
                with_codes = run.get("with_codes") or run["alone"]
                runs[run["row"]][run["seed"]] = with_codes["text_loss"]
        changes = [100 * (own / runs["bf16"][s] - 1) for s, own in runs[loss.variant].items()]
        return (len(changes), *table.mean_and_error(changes))
    if "losses" in found:  # slow networks
        ends = {name: run["points"][-1][1] for name, run in found["losses"].items()}
        return 1, 100 * (ends[loss.variant] / ends["ddp-bf16"] - 1), math.nan
    runs = found["variants"]
    by_seed = table.changes(runs, loss.variant)
    mean, error = table.over_seeds(by_seed)
    if len(by_seed) == 1:
        (seed,) = by_seed
        compared = len(table.counterparts(runs, loss.variant)[seed])
        error = deviation(runs) * math.sqrt(1 + 1 / compared)
    return len(by_seed), mean, error


@pytest.mark.parametrize("study", STUDIES)
def test_losses_are_those_of_the_reports(study: str) -> None:
    wrong = []
    for loss in (*LOSSES, *COMPARED):
        if loss.study != study:
            continue
        seeds, mean, error = measured(loss)
        shown = None if math.isnan(error) else round(error, 3)
        if (seeds, round(mean, 3), shown) != (loss.seeds, loss.percent, loss.error_percent):
            wrong.append((loss, seeds, mean, error))
    assert not wrong
    assert any(loss.study == study for loss in LOSSES)


def test_page_has_the_tables() -> None:
    page = (ROOT / "docs" / "accuracy.md").read_text()
    for shown in [*map(print_table, TABLES), print_prices()]:
        assert shown in page, f"docs/accuracy.md has to contain\n{shown}"
    assert prices.WHAT_STUDIES_CANNOT_SEE in page
    # nor other tables of losses
    assert len(re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)) == len(TABLES) + 1


def test_studies_say_no_more_than_they_saw() -> None:
    largest = max(study.parameters for study in STUDIES.values())
    smallest = min(study.parameters for study in STUDIES.values())
    assert f"{smallest / 1e6:g} to {largest / 1e6:g} million" in prices.WHAT_STUDIES_CANNOT_SEE
    tokens = [
        results(study.report, study.commit).get("train_tokens", 0) for study in STUDIES.values()
    ]
    assert f"{max(tokens) // 10**6} million tokens" in prices.WHAT_STUDIES_CANNOT_SEE


# --- prices ---------------------------------------------------------------------------------------


def test_default_has_the_price_that_was_measured_together() -> None:
    found = price_of(RunOptions(precision="bf16-mixed"), TWO_NODES)
    assert quantized_parts(RunOptions(), TWO_NODES) == DEFAULT
    assert [cost.quantized for cost in found.costs] == [DEFAULT]
    assert str(found) == "+0.05 ± 0.01%"
    assert not found.unmeasured
    studies = {loss.study for cost in found.costs for loss in cost.losses}
    assert "gpt_again" in studies
    assert not studies & {"gpt_1m", "llama_1m"}  # larger models count


def test_mean_is_weighted_and_widens_where_studies_disagree() -> None:
    (cost,) = price(DEFAULT).costs
    weights = [loss.error_percent**-2 for loss in cost.losses if loss.error_percent]
    percents = [loss.percent for loss in cost.losses]
    mean = sum(w * p for w, p in zip(weights, percents, strict=True)) / sum(weights)
    misfit = sum(w * (p - mean) ** 2 for w, p in zip(weights, percents, strict=True))
    assert len(percents) == 4
    assert misfit > 3
    assert cost.percent == pytest.approx(mean)
    assert cost.error_percent == pytest.approx((misfit / 3 / sum(weights)) ** 0.5)


def test_other_prices_are_added_and_errors_in_quadrature() -> None:
    both = price((*DEFAULT, "activations agoq"))
    alone = [price(DEFAULT), price(("activations agoq",))]
    assert both.percent == pytest.approx(sum(each.percent or 0 for each in alone))
    assert both.error_percent == pytest.approx(math.hypot(*(e.error_percent or 0 for e in alone)))


def test_fine_tuning_counts_where_pretraining_was_not_measured() -> None:
    (cost,) = price(("activations coat, INT8 forward",)).costs
    assert [loss.study for loss in cost.losses] == ["tuning"]
    (cost,) = price(("activations agoq",)).costs
    assert "tuning" not in [loss.study for loss in cost.losses]


def test_what_was_not_measured_is_never_zero() -> None:
    nothing = price(("gradient sums int8",))
    assert (nothing.percent, nothing.error_percent) == (None, None)
    assert str(nothing) == "not measured"
    some = price((*DEFAULT, "gradient sums int8"))
    assert some.unmeasured == ("gradient sums int8",)
    assert str(some).endswith("%; not measured: gradient sums int8")
    one_run = price(("local steps 32 in 4 bits",))
    assert (one_run.percent, one_run.error_percent) == (pytest.approx(5.669), None)
    assert str(one_run) == "+5.67%, error not known"
    assert price((*DEFAULT, "local steps 32 in 4 bits")).error_percent is None
    exact = price(())
    assert (exact.percent, str(exact)) == (0.0, "0%")


SIX_BITS = CodecSpec(code="int6", group_size=32)
PLAIN: dict[str, Any] = {"weights": "none", "gradients": "none"}
LONG_GROUPS = WeightQuantization(code="int", group_size=2048)
PIPELINE: dict[str, Any] = {"strategy": "quantized_pipeline", "pipeline_size": 4}


@pytest.mark.parametrize(
    ("options", "cluster", "parts"),
    [
        (PLAIN, TWO_NODES, ()),
        ({}, ONE_NODE, ()),  # NVLink
        ({"strategy": "DDPStrategy"}, TWO_NODES, ()),
        ({"strategy": "DDPStrategy", "all_reduce": True}, TWO_NODES, ("all-reduce in 8 bits",)),
        ({**PLAIN, "gradients": "TLq-HS"}, TWO_NODES, (DEFAULT[1],)),
        ({**PLAIN, "weights": LONG_GROUPS}, TWO_NODES, ("differences int4/2048",)),
        (
            {**PLAIN, "gradients": "TLq-HS"},
            ONE_NODE,
            ("gradients TLq-HS int8/128 within a node",),
        ),
        (
            {
                **PLAIN,
                "gradients": GradientQuantization(
                    intra_bits=6, vocabulary_bits=None, hadamard_size=64, rounding="stochastic"
                ),
            },
            TWO_NODES,
            ("gradients TLq-HS int4/128, 6 bits within nodes, transform of 64, stochastic",),
        ),
        ({**PLAIN, "gradients": "QuanGrad"}, TWO_NODES, ("gradients QuanGrad int8/128",)),
        (
            {**PLAIN, "gradients": "TLq-HS", "reduce_every_microbatch": True, "accumulates": True},
            TWO_NODES,
            (DEFAULT[1], "gradients rounded in every micro-batch"),
        ),
        ({**PLAIN, "reduce_every_microbatch": True, "accumulates": True}, TWO_NODES, ()),
        ({"local_steps": 32}, TWO_NODES, ("local steps 32 in 4 bits",)),
        (
            {"local_steps": LocalSteps(every=8, outer_lr=0.5, bits=None)},
            TWO_NODES,
            ("local steps 8 in fp32, outer 0.5 and 0.6",),
        ),
        (
            {
                **PLAIN,
                "local_steps": LocalSteps(bits=2, fragments=4, delay=8, error_feedback=True),
            },
            TWO_NODES,
            ("local steps 32 in 2 bits, 4 fragments, merged after 8, errors fed back",),
        ),
        ({**PLAIN, "local_steps": 32}, ONE_NODE, ()),
        ({**PLAIN, "recipe": "agoq"}, TWO_NODES, ("activations agoq",)),
        ({**PLAIN, "recipe": "auto", "adapt": True}, TWO_NODES, ("activations auto",)),
        ({**PLAIN, "recipe": "agoq", "adapt": 0.1}, TWO_NODES, ("activations agoq, adapt=0.1",)),
        ({**PLAIN, "recipe": RECIPES["coat"]}, TWO_NODES, ("activations coat",)),
        (
            {**PLAIN, "recipe": ActivationPolicy(matmul="int8_forward")},
            TWO_NODES,
            ("activations agoq, INT8 forward",),
        ),
        (
            {**PLAIN, "recipe": ActivationPolicy(norm="int2")},
            TWO_NODES,
            ("activations by an ActivationPolicy",),
        ),
        ({**PLAIN, "recipe": "agoq", "budget": "9GiB"}, TWO_NODES, ("activations within 9GiB",)),
        ({**PLAIN, "optimizer_state": "expanded_fp8"}, TWO_NODES, ("states expanded_fp8",)),
        (
            {
                **PLAIN,
                "precision": "bf16-true",
                "optimizer_state": OptimizerQuantization(
                    second_moment="float32", stochastic_rounding=True, quantize_embeddings=True
                ),
            },
            TWO_NODES,
            ("bf16 weights, stochastic", "states expanded_fp8/float32, embeddings too"),
        ),
        (
            {
                **PLAIN,
                "optimizer_state": OptimizerQuantization(
                    first_moment="float32", second_moment="float32"
                ),
            },
            TWO_NODES,
            (),
        ),
        ({**PLAIN, "precision": "bf16-true"}, TWO_NODES, ("bf16 weights and states",)),
        (
            {**PLAIN, "gradient_buffer": "int8", "accumulates": True},
            TWO_NODES,
            ("gradient sums int8",),
        ),
        ({**PLAIN, "gradient_buffer": "int8"}, TWO_NODES, ()),
        (
            {**PLAIN, "gradient_buffer": SIX_BITS, "accumulates": True},
            TWO_NODES,
            ("gradient sums int6",),
        ),
        ({**PLAIN, **PIPELINE}, FOUR_PLAIN, ("boundaries tah5/int5, 4 stages",)),
        ({**PIPELINE}, FOUR_PLAIN, ("boundaries tah5/int5, 4 stages",)),  # a rank per stage
        (
            {**PLAIN, **PIPELINE, "others": {"stages_per_rank": 2}},
            FOUR_PLAIN,
            ("boundaries tah5/int5, 8 stages",),
        ),
        (
            {**PLAIN, **PIPELINE, "others": {"stages_per_rank": 3}},
            FOUR_PLAIN,
            ("boundaries tah5/int5, 12 stages",),
        ),
        (
            {**PLAIN, **PIPELINE, "pipeline_size": None, "forward_codec": "none"},
            SimpleNamespace(nodes=3, gpus_per_node=1, nvlink=False),
            ("boundaries none/int5, 4 stages",),
        ),
        (
            {**PLAIN, **PIPELINE, "forward_codec": "none", "backward_codec": "none"},
            FOUR_PLAIN,
            (),
        ),
        ({**PLAIN, "learned_bits": True}, TWO_NODES, ("learned bits",)),
    ],
)
def test_all_that_is_rounded_has_a_name(
    options: dict[str, Any], cluster: Any, parts: tuple[str, ...]
) -> None:
    assert quantized_parts(RunOptions(**options), cluster) == parts


def test_layouts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(
        ValueError, match="pipeline_size=3 and tensor_parallel_size=1 do not divide"
    ):
        quantized_parts(RunOptions(strategy="quantized_pipeline", pipeline_size=3), TWO_NODES)
    with pytest.raises(ValueError, match="tensor_parallel_size=16"):
        quantized_parts(RunOptions(tensor_parallel_size=16), TWO_NODES)


# --- options of a Trainer -------------------------------------------------------------------------


class Other(Callback):
    """A callback of the user's."""


class Checkpointed(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(2, 2)
        self.model.gradient_checkpointing = False  # type: ignore[assignment]
        self.model.gradient_checkpointing_enable = self.enable  # type: ignore[assignment]

    def enable(self) -> None:
        self.model.gradient_checkpointing = True  # type: ignore[assignment]


def make_trainer(**arguments: Any) -> Trainer:
    return Trainer(accelerator="cpu", devices=1, logger=False, **arguments)


def test_options_are_read_and_written() -> None:
    first = RunOptions(
        weights=LONG_GROUPS,
        gradients="none",
        replica="node",
        local_steps=8,
        tensor_parallel_size=2,
        recipe="auto",
        adapt=False,
        precision="bf16-mixed",
        optimizer_state="expanded_fp8",
        accumulates=True,
        others={"units": ["Block"], "seed": 3},
    )
    other = Other()
    arguments: dict[str, Any] = {"accumulate_grad_batches": 2, "precision": "32-true"}
    arguments |= {"plugins": MixedPrecision("bf16-mixed", "cpu"), "callbacks": [other]}
    for _ in range(2):
        arguments = first.change(arguments)
        assert arguments["precision"] is None
        assert arguments["callbacks"][0] is other
        assert [type(each) for each in arguments["plugins"]] == [QuantizedPrecision]
        assert len(arguments["callbacks"]) == 2
        trainer = make_trainer(**arguments)
        assert RunOptions.of(trainer) == first
        arguments["callbacks"] = trainer.callbacks  # type: ignore[attr-defined]
        arguments["callbacks"] = [
            each
            for each in arguments["callbacks"]
            if isinstance(each, (Other, ActivationQuantization))
        ]


def test_a_pipeline_is_read_and_written() -> None:
    strategy = QuantizedPipelineStrategy(pipeline_size=2, schedule="gpipe", backward_codec="int6")
    adaptive = AdaptiveBits(3)
    found = RunOptions.of(make_trainer(strategy=strategy, callbacks=[adaptive]))
    expected = RunOptions(
        strategy="quantized_pipeline",
        pipeline_size=2,
        backward_codec="int6",
        accumulates=True,
        learned_bits=True,
        others={"schedule": "gpipe"},
    )
    assert found == expected
    again = found.change({})["strategy"]
    assert isinstance(again, QuantizedPipelineStrategy)
    assert again is not strategy
    assert again.given == strategy.given
    sharded = replace(found, strategy="quantized_fsdp", pipeline_size=1, others={})
    assert isinstance(sharded.change({})["strategy"], QuantizedFSDPStrategy)


def test_other_strategies_stay() -> None:
    trainer = make_trainer(strategy="ddp", precision="bf16-true")
    found = RunOptions.of(trainer)
    assert (found.strategy, found.is_ours, found.precision) == ("DDPStrategy", False, "bf16-true")
    changed = replace(found, recipe="agoq").change({"strategy": "ddp"})
    assert (changed["strategy"], changed["precision"]) == ("ddp", "bf16-true")
    assert changed["plugins"] == []


def test_checkpointing_is_the_model_s_own() -> None:
    module = Checkpointed()
    options = RunOptions(checkpointing=True, recipe="agoq", strategy="other")
    first, second = options.change({})["callbacks"]
    assert isinstance(first, EnableCheckpointing)
    assert isinstance(second, ActivationQuantization)
    trainer = make_trainer()
    assert not RunOptions.of(trainer, module).checkpointing
    first.setup(trainer, module, "validate")
    module.configure_model()
    assert not module.model.gradient_checkpointing
    first.setup(trainer, module, "fit")
    module.configure_model()
    assert RunOptions.of(trainer, module).checkpointing
    first.setup(trainer, LightningModule(), "validate")
    plain = LightningModule()
    plain.gradient_checkpointing = True  # by means of its own
    assert RunOptions.of(trainer, plain).checkpointing
    first.setup(trainer, plain, "fit")
    plain.configure_model()


def test_nodes_that_come_and_go_are_not_planned() -> None:
    with pytest.raises(ValueError, match="cannot be planned.*leave out `meet_at`"):
        RunOptions(local_steps=LocalSteps(meet_at="10.0.0.1"))
