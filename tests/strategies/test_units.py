"""Which modules become units, which options are refused; no process group needed."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.strategies import ModelParallelStrategy
from lq_testing.lightning_models import trainer
from lq_testing.models import Block, TinyLM
from torch import nn

import lq_lightning
from lq_lightning import (
    FullyShardedPrecision,
    GradientQuantization,
    QuantizedFSDPStrategy,
    WeightQuantization,
)
from lq_lightning.pipeline.partition import keep_stages
from lq_lightning.pipeline.plan import plan_stages
from lq_lightning.strategies import StrategyPart
from lq_lightning.strategies.checks import check_shardable
from lq_lightning.strategies.options import FSDPOptions, UnitSelector
from lq_lightning.strategies.sharding import choose_units, find_units


def test_repeated_blocks_are_found() -> None:
    plan = find_units(TinyLM(layers=3))
    assert plan.units == ("blocks.0", "blocks.1", "blocks.2")
    assert plan.source == "repeated blocks"
    assert "3 units" in plan.summary()


def test_topmost_containers_only_and_leaves_never() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(Block(), Block())

    model = nn.Module()
    model.stages = nn.ModuleList([Stage(), Stage()])
    model.heads = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])  # leaves
    model.single = nn.ModuleList([Block()])  # one of a kind
    model.nested = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block()])])
    assert set(find_units(model).units) == {
        "stages.0",
        "stages.1",
        "nested.0.0",
        "nested.0.1",
    }


def test_multihead_attention_is_one_unit() -> None:
    """It reads the weight of its child `out_proj` without calling it."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2)])
    assert find_units(model).units == ("layers.0", "layers.1")


def test_sharing_with_the_outside_keeps_a_block_in_the_root() -> None:
    model = TinyLM(layers=3)
    model.shadow = nn.Linear(24, 51)
    model.shadow.weight = model.blocks[1].up.weight
    plan = find_units(model)
    assert plan.units == ("blocks.0", "blocks.2")
    assert plan.kept_in_root == (
        ("blocks.1", "`blocks.1.up.weight` is shared with `shadow.weight`"),
    )
    assert "stays in the root" in plan.summary()


def test_a_module_shared_by_blocks_keeps_them_in_the_root() -> None:
    model = TinyLM(layers=3)
    model.blocks[2].norm = model.blocks[0].norm
    plan = find_units(model)
    assert plan.units == ("blocks.1",)
    assert {name for name, _ in plan.kept_in_root} == {"blocks.0", "blocks.2"}


def test_a_second_name_for_a_whole_block_is_no_sharing() -> None:
    model = TinyLM(layers=2)
    model.alias = model.blocks[0]
    assert len(find_units(model).units) == 2
    named_first, listed_again = nn.Module(), nn.Module()
    named_first.alias, named_first.model = model.blocks[1], model
    assert find_units(named_first).units == ("model.blocks.0", "alias")
    listed_again.model, listed_again.lists = model, nn.ModuleDict({"again": model.blocks})
    assert find_units(listed_again).units == ("model.blocks.0", "model.blocks.1")


def test_no_split_modules_of_transformers_come_first() -> None:
    model = nn.Module()
    model.hf = TinyLM(layers=2)
    model.hf._no_split_modules = ["LayerNorm"]
    plan = find_units(model)
    assert plan.units == ("hf.blocks.0.norm", "hf.blocks.1.norm")
    assert "_no_split_modules" in plan.source
    model.hf._no_split_modules = ["Absent"]
    assert find_units(model).source == "repeated blocks"


def test_of_nested_no_split_modules_only_the_outer_ones_are_units() -> None:
    """As Mamba's, which lists its blocks and the mixers inside of them."""
    model = TinyLM(layers=2)
    model._no_split_modules = ["Block", "LayerNorm"]
    assert find_units(model).units == ("blocks.0", "blocks.1")
    assert len(find_units(model, ["Block", "LayerNorm"]).units) == 4  # asked for


def test_a_model_without_units_gets_advice() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 3), nn.Linear(4, 4))
    summary = find_units(model).summary()
    assert summary.startswith("0 units from repeated blocks: the whole model is gathered at once")
    assert summary.endswith("large parts, such as `units=['Linear']`.")  # not what is most of it
    assert "no module of it could be" in find_units(nn.Linear(4, 4)).summary()


def test_units_option() -> None:
    model = TinyLM(layers=2)
    assert find_units(model, ["Embedding", "Block"]).units == (
        "blocks.0",
        "blocks.1",
        "embed",
    )
    assert find_units(model, ["Block", "head"]).units == ("blocks.0", "blocks.1", "head")
    chosen = find_units(model, lambda module: isinstance(module, nn.Linear))
    assert set(chosen.units) >= {"head", "blocks.0.up"}
    with pytest.raises(ValueError, match=r"no submodule of class \['Bloc'\].*Block, Embedding"):
        find_units(model, ["Bloc"])
    with pytest.raises(
        ValueError, match=r"nor one of that name \(there is \['blocks.0.up', 'blocks.1."
    ):
        find_units(model, ["up"])
    with pytest.raises(ValueError, match="selects no module of `TinyLM`"):
        find_units(model, lambda module: False)
    with pytest.raises(ValueError, match="without `forward`"):
        find_units(model, ["ModuleList"])
    with pytest.raises(TypeError, match="give a list of class names"):
        find_units(model, "Block")


def test_a_stage_of_a_pipeline_has_the_units_of_the_whole_model_that_it_holds() -> None:
    def held(stage: int, units: UnitSelector) -> tuple[str, ...]:
        model = TinyLM(layers=4)
        chosen = choose_units(model, units)
        keep_stages(model, plan_stages(model, 2), [stage])
        return find_units(model, chosen).units

    units = ["Embedding", "Block", "blocks.3.up", "head"]
    assert held(0, units) == ("blocks.0", "blocks.1", "embed")
    assert held(1, units) == ("blocks.3.up", "blocks.2", "blocks.3", "head")
    for stage, expected in enumerate([("embed",), ()]):
        assert held(stage, lambda module: isinstance(module, nn.Embedding)) == expected


def test_parameters_that_cannot_be_sharded_are_named() -> None:
    model = TinyLM()
    model.temperature = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"`temperature` is a scalar.*\(1,\)"):
        check_shardable(model)
    empty = nn.ParameterList([torch.empty(3, 0)])
    with pytest.raises(ValueError, match=r"`0` of shape \(3, 0\) has no elements"):
        check_shardable(empty)
    check_shardable(empty.requires_grad_(False))
    for kind in (nn.Embedding, nn.EmbeddingBag):
        with pytest.raises(ValueError, match=r"`0` has sparse.*`Embedding.*\(sparse=False"):
            check_shardable(nn.Sequential(kind(8, 4, sparse=True)))
        check_shardable(kind(8, 4, sparse=True).requires_grad_(False))
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"`0.weight` is lazily initialised"):
        check_shardable(lazy)


# --- options and precision --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "qW"}, r"weights='qW'.*'auto', 'qWD', 'none', or give a `WeightQuantization`"),
        (
            {"gradients": "TLQ"},
            r"gradients='TLQ'.*'auto', 'TLq-HS', 'TLq', 'ULq', 'QuanGrad', 'none'",
        ),
        ({"replica": "rank"}, r"replica='rank'.*'auto', 'full', 'node'"),
        ({"on_drift": "ignore"}, r"on_drift='ignore'.*'resync', 'raise'"),
        ({"node_size": 0}, r"node_size=0.*1 or more"),
        ({"node_size": "1"}, r"node_size='1'.*whole number of 1 or more"),
        ({"node_size": True}, r"node_size=True.*whole number of 1 or more"),
        ({"min_quantized_numel": 0}, r"min_quantized_numel=0.*1 or more"),
        ({"min_quantized_numel": 2.5}, r"min_quantized_numel=2.5.*whole number of 1 or more"),
        ({"check_replicas_every_n_steps": -1}, r"check_replicas_every_n_steps=-1.*0 or more"),
        ({"seed": "x"}, r"seed='x'.*whole number of 0 or more"),
        ({"reshard_after_forward": "no"}, r"reshard_after_forward='no'.*True or False"),
        ({"verify_checkpoints": 0}, r"verify_checkpoints=0.*True or False"),
        ({"start_timeout": -1}, r"start_timeout=-1\).*positive number of seconds"),
        ({"timeout": 0}, r"timeout=0\).*positive number of seconds, a `datetime.timedelta`"),
        ({"timeout": timedelta(0)}, r"timeout=datetime.*positive number of seconds"),
        ({"timeout": "1h"}, r"timeout='1h'.*positive number of seconds"),
        ({"process_group_backend": "mpi2"}, r"backend='mpi2'.*'gloo', 'nccl'"),
        ({"process_group_backend": 3}, r"backend=3.*'gloo', 'nccl'"),
    ],
)
def test_wrong_option_values_are_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizedFSDPStrategy(**options)


def test_units_of_a_wrong_type_are_refused_at_once() -> None:
    for wrong in (3, "Block", [Block]):
        with pytest.raises(TypeError, match="give a list of class names"):
            QuantizedFSDPStrategy(units=wrong)  # type: ignore[arg-type]


def test_timeout_in_seconds() -> None:
    hour, half = timedelta(hours=1), timedelta(minutes=30)
    for given, kept in ((0.5, timedelta(seconds=0.5)), (hour, hour), (None, None)):
        assert QuantizedFSDPStrategy(start_timeout=given or 1800)._timeout == (kept or half)
    assert QuantizedFSDPStrategy(timeout=1)._timeout == half
    assert QuantizedFSDPStrategy(timeout=7200)._timeout == 4 * half
    assert QuantizedFSDPStrategy(timeout=None)._timeout is None
    started = FSDPOptions(start_timeout=60, timeout=None).timeouts("x")
    assert started == (timedelta(minutes=1), half), "steps would have that of the start"
    QuantizedFSDPStrategy(process_group_backend="cpu:gloo,cuda:nccl")


def test_hooks_of_parts_are_no_hooks_of_strategies() -> None:
    with pytest.raises(TypeError, match=r"`Own.before_save` would never be called.*StrategyPart`"):

        class Own(QuantizedFSDPStrategy):
            def before_save(self) -> None:
                pass

    class Mixin:
        def extra_kinds(self) -> None:
            pass

    with pytest.raises(TypeError, match="`Mixed.extra_kinds` would never be called"):

        class Mixed(Mixin, QuantizedFSDPStrategy):
            pass

    class IsAPart(QuantizedFSDPStrategy, StrategyPart):
        def before_save(self) -> None:
            pass


def test_unknown_options_are_named_with_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"no option `weight_bits=4`.*weights, gradients, replica"):
        QuantizedFSDPStrategy(weight_bits=4)  # type: ignore[call-arg]
    for option, remedy in (
        ("vocabulary_bits", r"Give `gradients=GradientQuantization(vocabulary_bits=6)`. Options"),
        ("bits", "`weights=WeightQuantization(bits=6)` or `local_steps=LocalSteps(bits=6)`"),
    ):
        with pytest.raises(TypeError, match=re.escape(remedy)):
            QuantizedFSDPStrategy(**{option: 6})  # type: ignore[arg-type]

    class Own(QuantizedFSDPStrategy):
        def __init__(self, weights: OnlyForTypes = "auto") -> None:  # type: ignore  # noqa: F821
            super().__init__(weights=weights)

    with pytest.raises(
        TypeError, match=r"Give `weights=WeightQuantization\(bits=6\)`. Options are"
    ):
        Own(bits=6)  # type: ignore[call-arg]


def test_configs_are_taken_as_they_are() -> None:
    strategy = QuantizedFSDPStrategy(
        weights=WeightQuantization(bits=3), gradients=GradientQuantization(inter_bits=5)
    )
    assert strategy.settings()["weights"] == WeightQuantization(bits=3)
    assert QuantizedFSDPStrategy(weights="none", gradients="none").settings()["weights"] is None
    named = QuantizedFSDPStrategy(weights="qWD", replica="node").settings()["weights"]
    assert named == WeightQuantization(replica="node")


def test_precision_plugins_are_mapped_or_refused() -> None:
    strategy = QuantizedFSDPStrategy()
    for plugin in (
        Precision(),
        HalfPrecision("bf16-true"),
        MixedPrecision("bf16-mixed", "cpu"),
        FullyShardedPrecision("bf16-mixed"),
    ):
        strategy.precision_plugin = plugin
        assert type(strategy.precision_plugin) is FullyShardedPrecision
        assert strategy.precision_plugin.precision == plugin.precision
    for plugin in (HalfPrecision("16-true"), DoublePrecision(), MixedPrecision("16-mixed", "cuda")):
        with pytest.raises(ValueError, match=r"'32-true', 'bf16-true', 'bf16-mixed'"):
            strategy.precision_plugin = plugin


def test_other_precisions_are_refused_in_the_same_words_by_name_and_object() -> None:
    plugin = FullyShardedPrecision("bf16-true")
    for strategy in ("quantized_fsdp", QuantizedFSDPStrategy()):
        for precision in ("16-mixed", 16, "16-true", "64-true", "transformer-engine"):
            with pytest.raises(ValueError, match=r"`precision='.*'32-true', 'bf16-true', 'bf16-m"):
                trainer(strategy, ".", devices=1, precision=precision)
        assert trainer(strategy, ".", devices=1, plugins=[plugin]).precision == "bf16-true"
    with pytest.raises(ValueError, match="`ModelParallelStrategy` does not support"):
        trainer(ModelParallelStrategy(), ".", devices=1, precision="64-true")


def test_policy() -> None:
    mixed = FullyShardedPrecision("bf16-mixed")
    assert mixed.policy(root=False).param_dtype == torch.bfloat16
    assert mixed.policy(root=True).reduce_dtype == torch.float32
    assert not mixed.policy(root=True).cast_forward_inputs
    assert FullyShardedPrecision("32-true").policy(root=True).param_dtype is None
    with pytest.raises(ValueError, match="precision='16-mixed'"):
        FullyShardedPrecision("16-mixed")  # type: ignore[arg-type]


def test_grad_norm_of_a_plain_module_equals_lightnings() -> None:
    from lightning.pytorch.utilities import grad_norm

    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    ours, theirs = lq_lightning.grad_norm(model, 2), grad_norm(model, 2)
    assert {k: float(v) for k, v in ours.items()} == {k: float(v) for k, v in theirs.items()}
    with pytest.raises(ValueError, match="norm_type=0"):
        lq_lightning.grad_norm(model, 0)
    assert lq_lightning.grad_norm(nn.Linear(1, 1)) == {}
