"""What else would work: a fake simulation shows what is tried, in which order, and what is told."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lq_lightning import ActivationPolicy, WeightQuantization
from lq_lightning.planning.alternatives import (
    PERCENT_OF_TIME,
    Alternatives,
    Choice,
    Outcome,
    Search,
    layers_of,
)
from lq_lightning.planning.changes import (
    FASTEST_FIRST,
    SMALLEST_FIRST,
    Model,
    all_matter,
    changes_of,
    in_turn,
    made,
)
from lq_lightning.planning.prices import Price, added_price, price_of
from lq_lightning.planning.run_options import RunOptions

GIB = 2**30


def machine(nodes: int = 2, gpus_per_node: int = 8, nvlink: bool = True, gbit: float = 25.0) -> Any:
    link = SimpleNamespace(bytes_per_s=gbit * 1.25e8)
    return SimpleNamespace(
        nodes=nodes, gpus_per_node=gpus_per_node, nvlink=nvlink, between_nodes=link
    )


TENSOR_PARALLEL = 'tensor_parallel_size=8, tensor_parallel="auto"'
MODEL = Model(layers=32, can_checkpoint=True)
OPTIONS = RunOptions(precision="bf16-mixed")


@dataclass
class Simulated:
    """A simulation by sums: GiB and ms per layer, and of the rest; each call takes some seconds."""

    calls: list[RunOptions] = field(default_factory=list)
    now: float = 0.0
    takes_s: float = 1.0

    def __call__(self, options: RunOptions) -> Outcome:
        self.calls.append(options)
        self.now += self.takes_s
        if options.tensor_parallel_size == 4:
            raise ValueError("a layout that does not divide")
        gib, ms = 1.0, 10.0
        if options.recipe:
            gib, ms = {"agoq": (0.6, 10.0), "auto": (0.55, 10.5)}.get(str(options.recipe), (0.7, 8))
        if options.checkpointing:
            gib, ms = gib - 0.5, ms + 3
        if options.precision == "bf16-true":
            gib, ms = gib - 0.3, ms - 0.25
        elif options.optimizer_state != "none":
            gib, ms = gib - 0.25, ms - 0.5
        gib = max(gib, 0.02)
        if options.replica == "full":
            gib += 0.2
        seconds = (5 + ms * 32) / 1000
        return Outcome(
            device_nbytes=int((4 + gib * 32) * GIB),
            seconds=seconds,
            tokens_per_s=1000 / seconds,
        )

    def clock(self) -> float:
        return self.now


def search_of(gib: float, simulated: Any, **changed: Any) -> Search:
    place = changed.pop("place", machine())
    place.gpu = SimpleNamespace(memory_nbytes=int(gib * GIB))
    model, options = changed.pop("model", MODEL), changed.pop("options", OPTIONS)
    known = {"time_limit_s": 1e6, "base_s": 1.0, "clock": lambda: 0.0, **changed}
    return Search(options, simulated, place, model, base=simulated(options), **known)


def found_by(
    search: Any, gib: float, simulated: Simulated | None = None, **changed: Any
) -> tuple[Alternatives, Simulated]:
    simulated = simulated or Simulated()
    found = search(search_of(gib, simulated, clock=simulated.clock, **changed))
    return found, simulated


def base_of(found: Alternatives) -> Choice:
    return next(each for each in found.fitting + found.too_large if not each.changes)


def added(choice: Choice) -> Price:
    return added_price(choice.price, price_of(OPTIONS, machine()))


# --- changes --------------------------------------------------------------------------------------


def written(options: RunOptions, place: Any, model: Model = MODEL) -> set[str]:
    return {change.label for change in changes_of(options, place, model)}


def test_changes_are_those_that_do_something() -> None:
    alone = written(OPTIONS, machine(1, 1))
    assert alone == {
        *(f'ActivationQuantization("{name}")' for name in ("agoq", "coat", "fp8-4bit")),
        "gradient_checkpointing_enable()",
        'QuantizedPrecision(optimizer_state="expanded_fp8")',
        '"bf16-true" with stochastic rounding and 8-bit states',
    }
    assert written(OPTIONS, machine(1, 1), Model()) == alone - {"gradient_checkpointing_enable()"}
    two = written(OPTIONS, machine()) - alone
    assert two == {
        'weights="none"',
        'replica="full"',
        'gradients="none"',
        *(f"QuantizedPipelineStrategy(pipeline_size={size})" for size in (2, 4, 8)),
    }
    assert 'replica="node"' in written(OPTIONS, machine(nvlink=False))
    assert "local_steps=32" in written(OPTIONS, machine(gbit=1))
    one = written(OPTIONS, machine(1, 8))  # of which NVLink leaves all exact
    assert not any("weights=" in label or "gradients=" in label for label in one)
    plain = replace(OPTIONS, weights="none", gradients="none")
    first, *_ = in_turn(changes_of(plain, machine(), MODEL), FASTEST_FIRST)
    assert (first.label, first.grows) == ('weights="qWD"', True)
    codes = [c for c in changes_of(plain, machine(), MODEL) if c.topic == "codes"]
    assert codes[0].goes_with(codes[1])
    assert not any("replica" in label or "local_steps" in label for label in one)


def test_changes_follow_what_is_set() -> None:
    options = replace(
        OPTIONS,
        recipe="coat",
        checkpointing=True,
        optimizer_state="expanded_fp8",
        precision="bf16-true",
        accumulates=True,
        reduce_every_microbatch=True,
        local_steps=32,
        weights=WeightQuantization(replica="full"),
    )
    found = {change.label: change for change in changes_of(options, machine(), MODEL)}
    assert found["no ActivationQuantization"].grows
    assert 'ActivationQuantization("coat")' not in found
    assert "gradient_checkpointing_enable()" not in found
    assert not any("optimizer_state" in label or "bf16" in label for label in found)
    assert found["reduce_every_microbatch=False"].grows
    assert not found['QuantizedPrecision(gradient_buffer="int8")'].grows
    assert "local_steps=None" in found
    assert found['replica="node"'].choices == {"weights": WeightQuantization(replica="node")}
    own = replace(OPTIONS, recipe=ActivationPolicy(norm=None))
    assert written(own, machine(1, 1)) & {"no ActivationQuantization"}
    assert not any("Quantization(" in label for label in written(own, machine(1, 1)))
    ddp = RunOptions(strategy="DDPStrategy")
    assert 'strategy="quantized_fsdp"' in written(ddp, machine())
    assert not any("weights" in label for label in written(ddp, machine()) if "bf16" not in label)


def test_layouts_divide_the_ranks() -> None:
    model = Model(layers=4, can_cut_layers=True)
    found = written(OPTIONS, machine(3, 4), model)
    assert {f'tensor_parallel_size={n}, tensor_parallel="auto"' for n in (2, 4)} <= found
    assert "tensor_parallel_size=8" not in "".join(found)
    assert "QuantizedPipelineStrategy(pipeline_size=3)" in found  # a stage per node
    assert "pipeline_size=8" not in "".join(found)  # more than layers
    pipeline = RunOptions(
        strategy="quantized_pipeline",
        pipeline_size=3,
        others={"schedule": "gpipe", "seed": 1},
        tensor_parallel_size=2,
    )
    changes = {change.label: change for change in changes_of(pipeline, machine(3, 4), model)}
    assert "QuantizedPipelineStrategy(pipeline_size=3)" not in changes
    back = replace(pipeline, **changes['strategy="quantized_fsdp"'].choices)
    assert (back.others, back.pipeline_size) == ({"seed": 1}, 1)
    assert back.change({})["strategy"].given["tensor_parallel_size"] == 2
    assert "tensor_parallel_size=1" in changes
    forth = replace(OPTIONS, others={"reshard_after_forward": False, "seed": 1}, local_steps=4)
    (to,) = (c for c in changes_of(forth, machine(), MODEL) if c.label.endswith("size=4)"))
    strategy = replace(forth, **to.choices).change({})["strategy"]
    assert strategy.given == {"pipeline_size": 4, "seed": 1}


def test_all_changes_can_be_made() -> None:
    options = replace(OPTIONS, accumulates=True, weights="qWD", others={"units": ["Block"]})
    model = replace(MODEL, can_cut_layers=True)
    for change in changes_of(options, machine(gbit=1), model):
        changed = replace(options, **change.choices)
        assert changed != options, change.label
        overrides = changed.change({})
        trainer = Trainer(accelerator="cpu", devices=1, logger=False, **overrides)
        read = RunOptions.of(trainer)
        kept = {"checkpointing": changed.checkpointing, "accumulates": changed.accumulates}
        assert replace(read, **kept) == changed, change.label


def test_topics_take_turns_and_exclude_what_is_alike() -> None:
    changes = changes_of(OPTIONS, machine(), MODEL)
    turns = in_turn(changes, FASTEST_FIRST)
    assert [change.topic for change in turns[-5:]].count("pipeline") == 3
    assert {"weights", "gradients"} < {change.topic for change in turns[-5:]}
    turns = in_turn(changes, SMALLEST_FIRST)
    assert turns[0].label == 'ActivationQuantization("agoq")'
    assert len(turns) == len(changes)
    topics = [change.topic for change in turns]
    first = len(set(topics))
    assert len(set(topics[:first])) == first
    by_label = {change.label: change for change in changes}
    agoq, coat = (by_label[f'ActivationQuantization("{name}")'] for name in ("agoq", "coat"))
    states = by_label['QuantizedPrecision(optimizer_state="expanded_fp8")']
    bf16 = by_label['"bf16-true" with stochastic rounding and 8-bit states']
    assert agoq.goes_with(states)
    assert not agoq.goes_with(coat)
    assert not states.goes_with(bf16)  # both say what states are


@pytest.mark.parametrize(
    ("first", "second", "place", "matter"),
    [
        ('weights="none"', 'replica="full"', machine(), False),  # of no quantized weights
        ('weights="none"', 'replica="node"', machine(nvlink=False), False),
        ('replica="full"', "local_steps=32", machine(gbit=1), False),  # nor within nodes by NVLink
        ('replica="node"', "local_steps=32", machine(gbit=1, nvlink=False), True),
        ('weights="none"', "local_steps=32", machine(gbit=1), False),
        ('gradients="none"', "QuantizedPipelineStrategy(pipeline_size=2)", machine(), False),
        ('weights="none"', "QuantizedPipelineStrategy(pipeline_size=4)", machine(4, 1), False),
        (
            "reduce_every_microbatch=True",
            "QuantizedPipelineStrategy(pipeline_size=2)",
            machine(),
            1,
        ),
        ("reduce_every_microbatch=True", "local_steps=32", machine(gbit=1, gpus_per_node=1), False),
        (TENSOR_PARALLEL, "QuantizedPipelineStrategy(pipeline_size=4)", machine(), False),  # 16
        ('replica="full"', TENSOR_PARALLEL, machine(), False),  # one rank of a node has a part
        ('weights="none"', TENSOR_PARALLEL, machine(), True),
        ('weights="none"', 'gradients="none"', machine(), True),
        ('ActivationQuantization("agoq")', "gradient_checkpointing_enable()", machine(), True),
    ],
)
def test_what_makes_another_change_void_goes_without_it(
    first: str, second: str, place: Any, matter: bool
) -> None:
    options = replace(OPTIONS, accumulates=True)
    model = replace(MODEL, can_cut_layers=True)
    changes = {change.label: change for change in changes_of(options, place, model)}
    pair = changes[first], changes[second]
    assert pair[0].goes_with(pair[1])
    assert all_matter(pair, options, place) == matter


def test_all_of_each_alternative_matters() -> None:
    """Each change is one more that makes a step faster, so that as many as can be are together."""
    model = replace(MODEL, layers=4, can_cut_layers=True)
    place = machine(gbit=1)
    changes = {change.label: change for change in changes_of(OPTIONS, place, model)}

    def evaluate(options: RunOptions) -> Outcome:
        own, base = (asdict(each) for each in (options, OPTIONS))
        seconds = 1 / (1 + sum(own[name] != base[name] for name in own))
        return Outcome(device_nbytes=GIB, seconds=seconds, tokens_per_s=1 / seconds)

    found = search_of(2, evaluate, model=model, place=place).ranked()
    assert max(len(each.changes) for each in found.fitting) > 3
    for each in found.fitting:
        assert all_matter([changes[label] for label in each.changes], OPTIONS, place), each.changes


def test_another_strategy_has_no_8_bit_hook() -> None:
    ddp = RunOptions(strategy="DDPStrategy", all_reduce=True)
    (change,) = (c for c in changes_of(ddp, machine(), MODEL) if c.topic == "strategy")
    assert price_of(made(ddp, [change]), machine()) == price_of(RunOptions(), machine())


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)


class Stack(LightningModule):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 4)
        self.layers = layers


def test_equal_layers_have_equal_outlines() -> None:
    blocks = [Block() for _ in range(5)]
    named = {f"b{index}": block for index, block in enumerate(blocks)}
    for layers in (nn.ModuleList(blocks), nn.Sequential(*blocks), nn.ModuleDict(named)):
        outlines = layers_of(Stack(layers))
        assert (len(outlines), len(set(outlines))) == (5, 1)
    others = [Block(), Block(5), Block().requires_grad_(False)]
    assert len(set(layers_of(Stack(nn.ModuleList(others))))) == 3
    assert layers_of(Stack(nn.Linear(2, 2))) == []


# --- what fits ------------------------------------------------------------------------------------


def test_what_fits_is_ranked_by_speed() -> None:
    found, _ = found_by(Search.ranked, 60)
    speeds = [each.tokens_per_s for each in found.fitting]
    assert speeds == sorted(speeds, reverse=True)
    assert all(each.device_nbytes <= 60 * GIB for each in found.fitting)
    assert base_of(found) in found.fitting
    best = found.fitting[0]
    assert {'QuantizedPrecision(optimizer_state="expanded_fp8")'} < set(best.changes)
    recipes = {f'ActivationQuantization("{name}")' for name in ("coat", "fp8-4bit")}
    assert recipes & set(best.changes)
    assert best.price.percent is not None
    assert best.tokens_per_s > base_of(found).tokens_per_s
    assert not found.left_out


def test_search_is_deterministic() -> None:
    first, second = (found_by(Search.ranked, 60)[1].calls for _ in range(2))
    assert first == second
    assert len(first) == len(set(map(str, first)))  # none twice


def test_what_cannot_be_made_is_passed_over_and_other_errors_raised() -> None:
    found, _ = found_by(Search.ranked, 60, model=replace(MODEL, can_cut_layers=True))
    made = {label for each in found.fitting + found.too_large for label in each.changes}
    assert 'tensor_parallel_size=2, tensor_parallel="auto"' in made
    assert 'tensor_parallel_size=4, tensor_parallel="auto"' not in made
    with pytest.raises(ValueError, match="does not divide"):
        found_by(Search.ranked, 60, options=replace(OPTIONS, tensor_parallel_size=4))

    def broken(options: RunOptions) -> Outcome:
        if options.recipe:
            raise KeyError("a defect")
        return Simulated()(options)

    with pytest.raises(KeyError):
        search_of(60, broken).ranked()


def test_time_is_limited_and_what_is_left_out_is_named() -> None:
    found, simulated = found_by(Search.ranked, 60, time_limit_s=10)
    assert simulated.now <= 1 + 10
    assert "QuantizedPipelineStrategy(pipeline_size=8)" in found.left_out
    tried = {label for each in found.fitting for label in each.changes}
    assert 'ActivationQuantization("fp8-4bit")' in tried  # what may be fastest comes first
    nothing, _ = found_by(Search.ranked, 60, time_limit_s=0.5)
    assert [each.changes for each in nothing.fitting] == [()]
    slow, simulated = found_by(Search.ranked, 60, Simulated(takes_s=3), time_limit_s=10)
    assert len(simulated.calls) == 1 + 3  # as it is, and none that would end after ten seconds


# --- what does not fit ----------------------------------------------------------------------------


def test_cheapest_changes_come_first() -> None:
    found, _ = found_by(Search.remedies, 30)
    assert base_of(found) in found.too_large
    costs = [search_of(30, Simulated()).cost(each) for each in found.fitting]
    assert costs == sorted(costs)
    cheapest = found.fitting[0]
    # as fast as "fp8-4bit", which costs more loss; agoq and states save less time
    assert cheapest.changes == ('ActivationQuantization("coat")',)
    assert all(each.device_nbytes <= 30 * GIB for each in found.fitting)
    unmeasured = [bool(added(each).unmeasured) for each in found.fitting]
    assert unmeasured == sorted(unmeasured)
    assert any(unmeasured)  # bf16 weights with stochastic rounding


def test_pairs_are_tried_where_no_change_is_enough() -> None:
    found, _ = found_by(Search.remedies, 18)
    assert found.fitting
    assert all(len(each.changes) == 2 for each in found.fitting)
    assert found.fitting[0].changes == (
        'ActivationQuantization("agoq")',
        'QuantizedPrecision(optimizer_state="expanded_fp8")',
    )


def test_pairs_are_the_best_of_their_topics_and_save_memory() -> None:
    found, _ = found_by(Search.remedies, 18)
    every = changes_of(OPTIONS, machine(), MODEL)
    topic_of = {change.label: change.topic for change in every}
    alone = {each.changes: each.device_nbytes for each in found.fitting + found.too_large}
    pairs = [changes for changes in alone if len(changes) == 2]
    topics = [frozenset(topic_of[label] for label in changes) for changes in pairs]
    assert len(topics) == len(set(topics)) > 1
    for changes in pairs:
        assert all(alone[(label,)] < base_of(found).device_nbytes for label in changes)


def test_all_is_tried_together_where_no_pair_is_enough() -> None:
    found, _ = found_by(Search.remedies, 5.0)
    assert [len(each.changes) for each in found.fitting] == [3]
    nothing, _ = found_by(Search.remedies, 4.0)
    assert not nothing.fitting
    assert len(nothing.too_large[0].changes) == 3
    sizes = [each.device_nbytes for each in nothing.too_large]
    assert sizes == sorted(sizes)


def test_what_needs_more_memory_is_not_tried_where_nothing_fits() -> None:
    _, simulated = found_by(Search.remedies, 20)
    assert not any(options.replica == "full" for options in simulated.calls)
    _, simulated = found_by(Search.ranked, 20)
    assert not any(options.replica == "full" for options in simulated.calls)


def test_cost_is_time_and_loss() -> None:
    found, _ = found_by(Search.remedies, 30)
    base = base_of(found)
    for each in found.fitting:
        unmeasured, cost = search_of(30, Simulated()).cost(each)
        slower = 100 * (each.seconds / base.seconds - 1)
        loss = max(0.0, added(each).percent or 0.0)
        assert cost == pytest.approx(slower + PERCENT_OF_TIME * loss)
        assert unmeasured == bool(added(each).unmeasured)


def test_added_price_leaves_out_what_the_run_has_anyway() -> None:
    found, _ = found_by(Search.remedies, 30)
    by_changes = {each.changes: each for each in found.fitting + found.too_large}
    agoq = by_changes[('ActivationQuantization("agoq")',)]
    assert added(agoq).percent == pytest.approx(0.09)
    assert agoq.price.percent == pytest.approx(0.09 + (base_of(found).price.percent or 0))
    exact = by_changes[("gradient_checkpointing_enable()",)]
    assert (added(exact).percent, str(added(exact))) == (0.0, "0%")
    plain = by_changes[('weights="none"',)]  # gradients alone, instead of both
    assert added(plain).percent == pytest.approx(
        (plain.price.percent or 0) - (base_of(found).price.percent or 0)
    )
    stochastic = [a for a in by_changes.values() if any("stochastic" in c for c in a.changes)]
    assert stochastic
    assert all("bf16 weights, stochastic" in added(each).unmeasured for each in stochastic)
