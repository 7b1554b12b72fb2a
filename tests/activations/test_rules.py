"""Rules of a policy: what they are for, and what is refused or said before anything trains."""

from __future__ import annotations

import warnings

import pytest
from lq_testing.small_block import Block, Quantize
from torch import nn

from lq_lightning.activations import ActivationPolicy, ActivationRule, quantize_activations
from lq_lightning.codecs import CodecSpec


@pytest.mark.parametrize("recipe", ["agoq", ActivationPolicy(rules=(ActivationRule(module="*"),))])
def test_finding_nothing_is_said(recipe: str | ActivationPolicy) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with pytest.warns(UserWarning, match="finds nothing to quantize in `Sequential`"):
        quantize_activations(model, recipe).remove()
    rule = ActivationRule(module="0", recompute=True)
    for wanted in (
        "coat",
        ActivationPolicy(linear="int8"),
        ActivationPolicy(rules=(rule,)),
        ActivationPolicy(norm=None, activation=None, checkpoint=None, other=None),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "Saved activations of")
            quantize_activations(model, wanted).remove()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (ActivationRule(module="mlpp", codec="int8"), "matches no module of `Block`.*`mlp`"),
        (ActivationRule(module="norms.*", recompute=True), "matches no module of `Block`"),
        (ActivationRule(module="0", matmul="float8"), "no module.*such as `norm`"),
        (ActivationRule(module="act"), "no effect: `act` .Sequential.* remove the rule"),
        (
            ActivationRule(module="a*t"),
            r"no effect: `act` .*name what is in it .`act.0`.*'a\*t.\*'",
        ),
        (
            ActivationRule(module="nor*", kind="linear", codec="int8"),
            "kind='linear'.* no effect.*`norm` is of kind='norm'",
        ),
    ],
)
def test_rules_without_effect_are_refused(block: Block, rule: ActivationRule, message: str) -> None:
    block.act = nn.Sequential(nn.SiLU() if rule.module == "a*t" else nn.Identity())
    policy = ActivationPolicy(rules=[ActivationRule(module="*", codec="int8"), rule])
    with pytest.raises(ValueError, match=message):
        quantize_activations(block, policy)
    assert not any("forward" in vars(module) for module in block.modules())


def test_rule_of_a_kind_is_for_that_kind_alone(block: Block, quantize: Quantize) -> None:
    """Without a kind it turns on codes that the policy leaves off."""

    def codes(*rules: ActivationRule) -> dict[str, str | None]:
        handle = quantize(block, ActivationPolicy(norm="int6", activation="int4", rules=rules))
        handle.remove()
        found = ((site.name, site.codec) for site in handle.sites)
        return {name: None if codec is None else codec.code for name, codec in found}

    plain, norm = codes(), ActivationRule(module="*", kind="norm", codec="int8")
    assert (plain["norm"], plain["mlp"], plain["out"]) == ("int6", "int4", None)
    assert codes(norm) == plain | {"norm": "int8", "second": "int8"}
    assert codes(ActivationRule(module="*", codec="int8"))["out"] == "int8"
    assert codes(ActivationRule(module="*", kind="activation")) == plain | {"mlp": None}
    recompute = ActivationRule(module="mlp", recompute=True)
    assert codes(recompute, norm)["mlp"] is None, "only a rule for all kinds takes it back"


def test_rules_of_layers_that_are_checkpointed_need_checkpointing() -> None:
    class GradientCheckpointingLayer(Block):
        gradient_checkpointing = False

    model = nn.Sequential(GradientCheckpointingLayer())
    policy = ActivationPolicy(rules=[ActivationRule(module="0", codec="int4")])
    with pytest.raises(ValueError, match=r"name what is in it .`0.norm`"):
        quantize_activations(model, policy)
    model[0].gradient_checkpointing = True
    quantize_activations(model, policy).remove()


def test_recipes_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="recipe='agog'.*agoq"):
        quantize_activations(nn.Linear(4, 4), "agog")
    with pytest.raises(ValueError, match="other='int9'"):
        ActivationPolicy(other="int9")
    for spec in (
        CodecSpec(code="int4", group_size=128, rounding="stochastic"),
        CodecSpec(code="int4", group_size="row"),
    ):
        with pytest.raises(ValueError, match="norm=CodecSpec.*nearest, with a scale per group"):
            ActivationPolicy(norm=spec)
    for wrong in (
        lambda: ActivationPolicy(attention="int8"),
        lambda: ActivationRule(module="*", kind="attention", codec="int8"),
    ):
        with pytest.raises(ValueError, match=r"attention.* has no code.*recompute=True"):
            wrong()
    with pytest.raises(ValueError, match="norm=4.*give the name of a codec"):
        ActivationPolicy(norm=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind='norms'.*'norm'"):
        ActivationRule(module="*", kind="norms")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind='norm', recompute=True.*leave out `kind`"):
        ActivationRule(module="*", kind="norm", recompute=True)
    rule = ActivationRule(module="*")
    with pytest.raises(ValueError, match="give a list of rules"):
        ActivationPolicy(rules=rule)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"give `ActivationRule\(module=..., codec=...\)`"):
        ActivationPolicy(rules=[{"module": "*"}])  # type: ignore[list-item]
