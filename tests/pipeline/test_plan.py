"""Which modules go to which stage, and which models are refused."""

from __future__ import annotations

import itertools
import time
import types
from typing import Any

import pytest
import torch
from lq_testing.models import WIDTH, Block, TinyLM, batch
from torch import Tensor, nn

from lq_lightning.pipeline.measure import measure_times
from lq_lightning.pipeline.plan import SharedParameter, balance, hidden_size, plan_stages


def test_stages_hold_layers_in_order_and_what_lies_around_at_the_ends() -> None:
    plan = plan_stages(TinyLM(layers=4, tied=True), 4)
    assert plan.stages == tuple((f"blocks.{i}",) for i in range(4)) == tuple(zip(plan.layers))
    assert (plan.before, plan.after) == (("embed",), ("head",))
    assert plan.modules_of(0) == ("embed", "blocks.0")
    assert plan.modules_of(3) == ("blocks.3", "head")
    assert plan.stages_of("blocks.2.up.weight") == (2,)
    assert plan.stages_of("embed.weight") == (0,)
    assert plan.stages_of("head.weight") == (3,)
    assert plan.stages_of("tiny") == (0, 1, 2, 3)
    assert plan.shared == (
        SharedParameter(names=("tiny",), stages=(0, 1, 2, 3)),
        SharedParameter(names=("embed.weight", "head.weight"), stages=(0, 3)),
    )
    summary = plan.summary()
    assert "4 layers in 4 stages" in summary
    assert "0: embed, blocks.0 (1): " in summary
    assert "`embed.weight` is on the stages 0, 3, which add up its gradients" in summary


def test_ten_layers_are_not_taken_for_the_first() -> None:
    plan = plan_stages(TinyLM(layers=11), 2)
    assert plan.stages_of("blocks.1.up.weight") == (0,)
    assert plan.stages_of("blocks.10.up.weight") == (1,)
    assert plan_stages(TinyLM(layers=2), 1).shared == ()


def test_a_second_name_of_a_module_is_on_its_stage_only() -> None:
    model = TinyLM(layers=2)
    model.tokens = model.embed
    model.loss = nn.Module()
    model.loss.head = model.head
    plan = plan_stages(model, 2)
    assert plan.stages_of("tokens.weight") == (0,)
    assert plan.stages_of("loss.head.weight") == (1,)
    assert plan.shared == plan_stages(TinyLM(layers=2), 2).shared  # others have none to add up


@pytest.mark.parametrize("first", [0.0, 3.5])
@pytest.mark.parametrize("last", [0.0, 7.0])
def test_balance_is_the_best_of_all_cuts(first: float, last: float) -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(10):
        costs = torch.randint(1, 9, (8,), generator=generator).tolist()
        for stages in (1, 3, 8):
            best = balance(costs, stages, first=first, last=last)
            assert sum(best) == len(costs)

            def key(cut: tuple[int, ...], costs: list[int] = costs) -> Any:
                ends = [0, *itertools.accumulate(cut)]
                sums = [float(sum(costs[a:b])) for a, b in itertools.pairwise(ends)]
                sums[0] += first
                sums[-1] += last
                return max(sums), sum(s * s for s in sums), cut

            cuts = itertools.product(range(1, 9), repeat=stages)
            if stages == 8:
                cuts = iter([(1,) * 8])
            assert best == min((cut for cut in cuts if sum(cut) == len(costs)), key=key)


def test_earlier_stages_get_fewer_layers() -> None:
    assert balance([1.0] * 5, 2) == (2, 3)
    assert balance([0.1] * 6, 3) == (2, 2, 2)  # sums of which are not exact


def test_embedding_and_head_count() -> None:
    model = TinyLM(layers=6)
    model.head = nn.Linear(WIDTH, 200)
    plan = plan_stages(model, 2)
    assert [len(names) for names in plan.stages] == [4, 2]
    held = [[model.get_submodule(name) for name in plan.modules_of(s)] for s in range(2)]
    sizes = [sum(p.numel() for module in modules for p in module.parameters()) for modules in held]
    assert plan.costs == pytest.approx([size / sum(sizes) for size in sizes])


def test_given_layers_and_costs() -> None:
    model = TinyLM(layers=4)
    assert [len(s) for s in plan_stages(model, 2, [3, 1]).stages] == [3, 1]
    costs = {f"blocks.{i}": 1.0 for i in range(4)}
    assert [len(s) for s in plan_stages(model, 2, costs | {"head": 2.0}).stages] == [3, 1]
    assert [len(s) for s in plan_stages(model, 2, costs | {"embed": 2.0}).stages] == [1, 3]


def test_measured_times_balance_slow_layers() -> None:
    class Slow(Block):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.02)
            return super().forward(x)

    model = TinyLM(layers=4)
    model.blocks[0] = Slow()
    times = measure_times(model, lambda: model(batch(0, 0)))
    assert set(times) == {"embed", "head", *(f"blocks.{i}" for i in range(4))}
    assert 0.02 <= times["blocks.0"] < 1
    assert [len(s) for s in plan_stages(model, 2, times).stages] == [1, 3]
    with pytest.raises(RuntimeError, match="did not call `blocks.0`"):
        measure_times(model, lambda: None)
    assert not model.blocks[0]._forward_hooks


def test_order_of_use_decides_where_modules_run() -> None:
    """As in OPT, which registers its last norm in front of its layers; arguments come first."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(3, WIDTH)
            self.scale, self.last = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
            self.layers = nn.Sequential(Block(), Block())
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            assert len(self.layers) > 1  # no call: what is registered in front stays there
            return self.head(self.last(self.hidden(self.embed(tokens))))

        def hidden(self, x: Tensor) -> Tensor:
            return self.scale(self.layers(x))

        def reset(self) -> None:
            """Other methods do not count."""
            for module in (self.head, self.layers, self.embed):
                module.requires_grad_(False)

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.probe, self.model = nn.Linear(3, 3), Model()

        def training_step(self, tokens: Tensor) -> Tensor:
            return self.probe(self(tokens))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.model(tokens)

    plan = plan_stages(Step(), 2)
    after = {"probe", "model.scale", "model.last", "model.head"}
    assert (set(plan.before), set(plan.after)) == ({"model.embed"}, after)


def test_several_lists_of_blocks() -> None:
    model = nn.Module()
    model.vision, model.text = TinyLM(layers=2), TinyLM(layers=3)
    with pytest.raises(NotImplementedError, match=r"`vision.blocks` \(2 blocks\).*'text.blocks'"):
        plan_stages(model, 2)
    with pytest.raises(NotImplementedError, match=r"`vision` .*parameters of its own \(tiny\)"):
        plan_stages(model, 2, trunk="text.blocks")
    del model.vision.tiny
    assert plan_stages(model, 2, trunk="text.blocks").before == ("text.embed", "vision")
    times = measure_times(model, lambda: model.text(batch(0, 0)), trunk="text.blocks", repeats=1)
    assert set(times) == {
        f"text.{name}" for name in ("embed", *(f"blocks.{i}" for i in range(3)), "head")
    }
    with pytest.raises(ValueError, match="`trunk='blocks'` names no list .*vision.blocks, text"):
        plan_stages(model, 2, trunk="blocks")


def test_encoder_decoder_models_are_refused() -> None:
    model = nn.Module()
    model.encoder, model.decoder = TinyLM(), TinyLM()
    with pytest.raises(NotImplementedError, match="encoder-decoder .* `quantized_fsdp`"):
        plan_stages(model, 2)
    model = TinyLM()
    model.config = types.SimpleNamespace(is_encoder_decoder=True)
    with pytest.raises(NotImplementedError, match="encoder-decoder"):
        plan_stages(model, 2)


def _twice() -> nn.Module:
    model = TinyLM(layers=3)
    model.blocks[2] = model.blocks[0]
    return model


def _second_name() -> nn.Module:
    model = TinyLM(layers=2)
    model.first = model.blocks[0]
    return model


def _with_config(**values: bool) -> nn.Module:
    model = nn.Module()
    model.model = TinyLM(layers=2)
    model.model.config = types.SimpleNamespace(**values)
    return model


def _compiled(whole: bool) -> nn.Module:
    model = TinyLM(layers=2)
    if whole:
        model.compile()
    else:
        model.blocks[1] = torch.compile(model.blocks[1])
    return model


class NormedPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(8, WIDTH))


def _odd_embedding() -> nn.Module:
    model = TinyLM(layers=2)
    model.embed = nn.Sequential(model.embed, NormedPositions())
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_twice(), "`blocks.2` and `blocks.0` are one module"),
        (_second_name(), "`first` holds a module of `blocks.0`"),
        (_with_config(output_hidden_states=True), "output_hidden_states=True` of `model` collects"),
        (_with_config(output_router_logits=True), "output_router_logits=True"),
        (_compiled(whole=True), "`TinyLM` is compiled as a whole"),
        (_compiled(whole=False), "`blocks.1` is wrapped by `torch.compile"),
        (
            _odd_embedding(),
            r"`embed.1` \(NormedPositions\) runs .*\(table\).*nn.Embedding",
        ),
    ],
)
def test_models_that_cannot_be_cut(model: nn.Module, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        plan_stages(model, 2)


@pytest.mark.parametrize(
    ("layers", "stages", "split", "message"),
    [
        (2, 3, "parameters", "`TinyLM` has 2 layers, fewer than the 3 stages"),
        (3, 2, [3, 0], r"`split=\[3, 0\]` leaves stage 1 without layers"),
        (3, 2, [1, 1], "2 layers to 2 stages, but .* 2 stages and the model 3 layers"),
        (3, 2, [1, 1, 1], "3 layers to 3 stages, but"),
        (3, 2, [1.5, 1.5], "whole numbers"),
        (2, 2, {"blocks.0": 1.0}, r"needs costs of \['blocks.1'\].*embed, head"),
        (1, 1, {"blocks.0": 1.0, "x": 1.0}, r"has no module \['x'\]"),
        (1, 1, {"blocks.0": -1.0}, "finite and not negative"),
    ],
)
def test_bad_splits(layers: int, stages: int, split: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_stages(TinyLM(layers=layers), stages, split)


def test_a_model_without_blocks() -> None:
    with pytest.raises(ValueError, match="`Sequential` has no list of repeated blocks"):
        plan_stages(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), 2)


class Widened(nn.Module):
    """Layers of another width than the embedding, which is widened in one of three ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 24)
        self.widen = nn.Linear(24, 48) if how == "linear" else nn.Identity()
        self.other = nn.Embedding(7, 12 if how == "another" else 24)
        norm = nn.LayerNorm(24 if how == "normed" else 48)
        self.blocks = nn.ModuleList(nn.Sequential(norm, nn.Linear(48, 48)) for _ in range(2))


def test_the_hidden_size_is_known_before_a_forward_only_where_nothing_may_change_it() -> None:
    for tied in (False, True):
        model = TinyLM(layers=2, tied=tied)
        assert hidden_size(model, plan_stages(model, 2)) == WIDTH
    for how in ("linear", "another", "both"):
        model = Widened(how)
        assert hidden_size(model, plan_stages(model, 2)) is None, how
    model = Widened("normed")
    assert hidden_size(model, plan_stages(model, 2)) == 24
    model.blocks = nn.ModuleList(nn.TransformerEncoderLayer(24, 2) for _ in range(2))
    assert hidden_size(model, plan_stages(model, 2)) == 24
