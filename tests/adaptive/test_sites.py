"""Where hidden states are found in a model, and what hooks there do to it."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from lq_testing.models import WIDTH, TinyLM, batch
from torch import Tensor, nn
from torch.nn import functional as F

from lq_lightning.adaptive import (
    AdaptiveBitsConfig,
    BitGate,
    adaptive_quantize,
    attach,
    find_sites,
    sites,
)

CONFIG = AdaptiveBitsConfig(start_bits=5)


@pytest.fixture
def attach_functions(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``attach`` with functions in place of gates, so that what reaches a site shows."""
    monkeypatch.setattr(sites, "adaptive_quantize", lambda x, gate: gate(x))
    return attach


def test_groups_of_a_plain_model() -> None:
    model = nn.ModuleDict({"net": TinyLM()})
    assert find_sites(model) == ("net.blocks.0:input", "net.head:input")
    assert find_sites(model, "layers") == (
        "net.blocks.0:input",
        "net.blocks.0:output",
        "net.blocks.1:output",
        "net.head:input",
    )


class Around(nn.Module):
    """A model with a head inside, or of its own, and something that is trained beside it."""

    def __init__(self, own_head: bool) -> None:
        super().__init__()
        self.net, self.teacher = TinyLM(), nn.Linear(3, 3)
        if own_head:
            self.net.head = nn.LayerNorm(WIDTH)  # type: ignore[assignment]
            self.head = nn.Linear(WIDTH, 31)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.net(tokens) + self.teacher(tokens)
        return self.head(loss)


def test_the_head_is_that_of_the_innermost_model() -> None:
    assert find_sites(Around(False))[-1] == "net.head:input"
    assert find_sites(Around(True))[-1] == "head:input"
    assert find_sites(nn.Sequential(*TinyLM().blocks)) == ("0:input", "1:output")


def test_groups_of_hugging_faces_models(attach_functions: Any) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    llama = transformers.LlamaConfig(intermediate_size=32, num_key_value_heads=2, **sizes)
    model = transformers.LlamaForCausalLM(llama)
    assert find_sites(model) == ("model.layers.0:input", "lm_head:input")
    gpt = transformers.GPT2Config(vocab_size=40, n_layer=2, n_embd=16, n_head=2, n_positions=32)
    assert find_sites(transformers.GPT2LMHeadModel(gpt)) == (
        "transformer.h.0:input",
        "lm_head:input",
    )
    opt = transformers.OPTConfig(word_embed_proj_dim=8, ffn_dim=16, **sizes)
    assert find_sites(transformers.OPTForCausalLM(opt))[-1] == "lm_head:input"
    # without a head, behind the last norm
    assert find_sites(transformers.LlamaModel(llama)) == ("layers.0:input", "norm:output")
    seen: list[Any] = []

    def quantizer(x: Tensor) -> Tensor:
        seen.append(tuple(x.shape))
        return x.round()

    found = find_sites(model, "layers")
    tokens = torch.arange(12).view(2, 6)
    before, names = model(tokens).logits, list(model.state_dict())
    attached = attach_functions(model, dict.fromkeys(found, quantizer))
    assert not torch.equal(model(tokens).logits, before)
    assert seen == [(2, 6, 16)] * 4
    assert list(model.state_dict()) == names
    attached.remove()
    attached.remove()
    torch.testing.assert_close(model(tokens).logits, before, rtol=0, atol=0)


def test_names_and_patterns() -> None:
    model = TinyLM()
    assert find_sites(model, "embed") == ("embed:output",)
    assert find_sites(model, ["blocks.*:output", "boundaries", "blocks.1:output"]) == (
        "blocks.0:output",
        "blocks.1:output",
        "blocks.0:input",
        "head:input",
    )
    assert find_sites(model, "blocks.?.norm:input") == (
        "blocks.0.norm:input",
        "blocks.1.norm:input",
    )


@pytest.mark.parametrize(
    ("sites", "match"),
    [
        ([], "`sites` is empty: give one of 'boundaries', 'layers'"),
        ("block.0:output", r"`TinyLM` has no module of that name.*boundaries, layers.*`blocks.0`"),
        ("blocks.*.*.*", "has no module of that name"),
        ("blocks:output", "`TinyLM` never calls `blocks`, which is a list of modules.*`blocks.0`"),
        ("", "has no module of that name"),
        (":output", "has no module of that name"),
        ("head:middle", "ends in `:middle`.*`:output` and `:input`"),
    ],
)
def test_unknown_names_are_refused(sites: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        find_sites(TinyLM(), sites)


def test_models_without_blocks_are_told_to_name_sites() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"one list of repeated blocks, .*sites=\['0:output'\]"):
        find_sites(model)
    assert find_sites(model, "0:output") == ("0:output",)
    two = nn.ModuleDict({"stem": nn.Linear(4, 4), "tower": nn.ModuleList([nn.Linear(4, 4)])})
    with pytest.raises(ValueError, match=r"one list of repeated blocks, .*\['tower.0:output'\]"):
        find_sites(two)


Pair = namedtuple("Pair", ["hidden", "rest"])


class Layer(nn.Module):
    """Returns its hidden state in several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, scale: float = 2.0) -> Any:
        y = x * scale
        kinds = {
            "tensor": y,
            "tuple": (y, "rest"),
            "list": [y, "rest"],
            "named": Pair(y, "rest"),
            "dict": {"hidden": y},
            "integers": y.long(),
            "empty": (),
        }
        return kinds[self.kind]


@pytest.mark.parametrize("kind", ["tensor", "tuple", "list", "named"])
def test_outputs_keep_their_form(kind: str, attach_functions: Any) -> None:
    layer, x = Layer(kind), torch.rand(5, 3)
    before = layer(x)
    with_quantizer = attach_functions(layer, {":output": lambda h: h + 1})
    after = layer(x)
    assert type(after) is type(before)
    hidden = after if kind == "tensor" else after[0]
    torch.testing.assert_close(hidden, x * 2 + 1)
    if kind != "tensor":
        assert after[1] == "rest"
    with_quantizer.remove()
    assert not layer._forward_hooks


@pytest.mark.parametrize(
    ("kind", "got"),
    [("dict", "`dict`"), ("integers", "a tensor of torch.int64"), ("empty", "`tuple`")],
)
def test_sites_without_hidden_states_are_named(kind: str, got: str) -> None:
    layer = Layer(kind)
    attach(layer, {":output": BitGate(CONFIG)})
    with pytest.raises(ValueError, match=f"site `:output` has {got} where hidden states"):
        layer(torch.rand(5, 3))


def test_inputs_by_place_and_by_name(attach_functions: Any) -> None:
    layer, x = Layer("tensor"), torch.rand(5, 3)
    attach_functions(layer, {":input": lambda h: h + 1})
    torch.testing.assert_close(layer(x, 3.0), (x + 1) * 3)
    torch.testing.assert_close(layer(x=x, scale=3.0), (x + 1) * 3)

    class Keywords(nn.Module):
        def forward(self, *, mask: Tensor, hidden_states: Tensor, ids: Tensor) -> Tensor:
            return hidden_states * mask

    keywords = Keywords()
    attach_functions(keywords, {":input": lambda h: h + 1})
    ones = torch.ones(5, 3)
    given = keywords(mask=ones * 2, hidden_states=x, ids=ones.long())
    torch.testing.assert_close(given, (x + 1) * 2)
    with pytest.raises(ValueError, match="site `:input` has `dict`"):
        layer(scale=2.0)
    with pytest.raises(ValueError, match="site `:input` has a tensor of torch.int64"):
        layer(torch.arange(3))


def test_attaching_refuses_other_names() -> None:
    for site in ("blocks.7:output", "blocks.0", "blocks.*:output"):
        with pytest.raises(ValueError, match="is no site of `TinyLM`: give what `find_sites`"):
            attach(TinyLM(), {site: BitGate(CONFIG)})
        model = TinyLM()
        with pytest.raises(ValueError, match="is no site"):
            attach(model, {"head:input": BitGate(CONFIG), site: BitGate(CONFIG)})
        assert not model.head._forward_pre_hooks


def test_gates_at_sites_quantize_as_by_hand() -> None:
    """Loss and gradients of a model with gates are those of one written with them."""
    torch.manual_seed(0)
    model = TinyLM()
    by_hand = {site: BitGate(CONFIG, WIDTH) for site in find_sites(model)}
    first, last = by_hand.values()
    tokens = batch(0, 0)
    x = adaptive_quantize(model.embed(tokens), first)
    for block in model.blocks:
        x = block(x)
    logits = F.linear(adaptive_quantize(x * model.tiny, last), model.head.weight)
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    model.zero_grad()
    gates = {site: BitGate(CONFIG) for site in by_hand}
    attach(model, gates)
    model(tokens).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for site, gate in gates.items():
        torch.testing.assert_close(gate.grad, by_hand[site].grad, rtol=0, atol=0)
