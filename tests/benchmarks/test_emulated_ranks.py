"""Emulated ranks compute what real ones do, and stacked models what modules do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from lq_testing import run_ranks
from lq_testing.fsdp2 import BF16, QWD, TLQ_HS, build, replicas, train
from lq_testing.models import WIDTH, Block, TinyLM, batch
from torch import Tensor, nn
from torch.func import functional_call

from lq_lightning.data_parallel import GradientQuantization, embedding_params

Load = Callable[[str], ModuleType]

STEPS = 3
VOCABULARY = replace(TLQ_HS, vocabulary_bits=8)
# By number of ranks: those of a node, quantization of weights and gradients, dtype of the weights.
# At most four values are summed without codes: torch sums more in an order of its own.
CASES: dict[int, dict[str, tuple[int, Any, Any, torch.dtype]]] = {
    4: {
        "nodes of one rank": (1, QWD, TLQ_HS, torch.float32),
        "one node": (4, QWD, GradientQuantization(group_size=32), torch.float32),
    },
    6: {
        "three nodes": (2, QWD, TLQ_HS, torch.float32),
        "bf16": (3, QWD, TLQ_HS, torch.bfloat16),
        "vocabulary": (2, None, VOCABULARY, torch.float32),
    },
}


class Gapped(Block):
    """A block with a norm between its matrices, which travel as one run."""

    def __init__(self) -> None:
        super().__init__()
        del self.down
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.between = nn.RMSNorm(WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.between(super().forward(x))


def _real(rank: int, world: int) -> dict[str, tuple[list[float], list[Tensor]]]:
    found = {}
    for name, (node_size, weights, gradients, dtype) in CASES[world].items():
        policy = BF16 if dtype == torch.bfloat16 else None
        model, optimizer, _ = build(
            weights=weights,
            gradients=gradients,
            node_size=node_size,
            policy=policy,
            block=Gapped,
        )
        found[name] = (train(model, optimizer, STEPS), replicas(model))
    return found


def _emulated(load: Load, world: int, name: str) -> tuple[list[float], list[Tensor]]:
    """Two trainings side by side, of which the first is that of the ranks."""
    ranks, models = load("emulated_ranks"), load("stacked_models")
    node_size, weights, gradients, dtype = CASES[world][name]
    torch.manual_seed(0)
    model = TinyLM(block=Gapped)
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    masters = {n: torch.stack((p, 2 * p)).requires_grad_() for n, p in parameters.items()}
    words = ("embed.weight", "head.weight")
    parts = {
        unit: ranks.Unit({n: tuple(parameters[n].shape) for n in names}, world, words, 256)
        for unit, names in models.units(list(parameters)).items()
    }
    emulated = ranks.EmulatedRanks(parts, world // node_size, node_size, dtype)
    plan = ranks.Plan(
        weights=weights and ranks.Codes(inter=weights.codec()),
        gradients=gradients
        and ranks.Codes(
            inter=gradients.codec("inter"),
            intra=gradients.codec("intra"),
            vocabulary=gradients.codec("inter", vocabulary=True),
        ),
    )
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2)
    emulated.publish(masters, ranks.Plan())
    losses = []
    for step in range(STEPS):
        found = []
        for rank in range(world):
            found.append([_gradients(model, emulated, lane, batch(step, rank)) for lane in (0, 1)])
        losses.append(sum(found[rank][0][0] for rank in range(world)) / world)
        each = {
            n: torch.stack([torch.stack([f[lane][1][n] for f in found]) for lane in (0, 1)])
            for n in parameters
        }
        for n, gradient in emulated.reduce(each, plan).items():
            masters[n].grad = gradient
        optimizer.step()
        emulated.publish(masters, plan)
    ended = emulated.weights()
    return losses, [ended[n][0] for n in parameters]


def _gradients(
    model: TinyLM, emulated: Any, lane: int, tokens: Tensor
) -> tuple[float, dict[str, Tensor]]:
    weights = {n: w[lane].clone().requires_grad_() for n, w in emulated.weights().items()}
    loss = functional_call(model, weights, (tokens,))
    loss.backward()
    return loss.item(), {n: w.grad for n, w in weights.items() if w.grad is not None}


@pytest.mark.parametrize("world", CASES)
def test_weights_and_losses_are_those_of_real_ranks(load: Load, world: int) -> None:
    every = run_ranks(_real, world)[0]
    for name, (losses, weights) in every.items():
        emulated_losses, emulated_weights = _emulated(load, world, name)
        assert emulated_losses == pytest.approx(losses, abs=1e-6), name
        for real, emulated in zip(weights, emulated_weights, strict=True):
            assert torch.equal(real, emulated), name


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["gpt", "llama"])
def test_models_are_those_of_the_modules(load: Load, arch: str) -> None:
    models, vocab = load("stacked_models"), 40
    sizes = models.Sizes(arch=arch, layers=2, hidden=32, intermediate=128, heads=2, seq=12)
    stacked = models.initial(sizes, vocab, [0, 1])
    generator = torch.Generator().manual_seed(2)
    for value in stacked.values():
        value += 0.05 * torch.randn(value.shape, generator=generator)
        value.requires_grad_()
    tokens = torch.randint(vocab, (2, 3, 13), generator=generator)
    inputs, targets = tokens[..., :-1], tokens[..., 1:]
    found = models.losses(sizes, stacked, inputs, targets)
    found.sum().backward()
    module = _module(load, sizes, vocab)
    assert [n for n, _ in module.named_parameters()] == list(stacked)
    words = {id(p) for p in embedding_params(module)}
    found_words = [n for n, p in module.named_parameters() if id(p) in words]
    assert models.vocabulary(list(stacked)) == found_words
    for row in range(2):
        own = {n: w[row].detach().requires_grad_() for n, w in stacked.items()}
        if arch == "gpt":
            loss = functional_call(module, own, (inputs[row], targets[row]))
        else:
            own |= {"lm_head.weight": own["model.embed_tokens.weight"]}
            logits = functional_call(module, own, (inputs[row],)).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets[row].flatten())
        loss.backward()
        torch.testing.assert_close(found[row], loss)
        for name, weight in stacked.items():
            assert weight.grad is not None
            torch.testing.assert_close(weight.grad[row], own[name].grad, rtol=1e-4, atol=1e-6)


def _module(load: Load, sizes: Any, vocab: int) -> nn.Module:
    if sizes.arch == "gpt":
        gpt = load("gpt")
        config = {"layers": 2, "hidden": 32, "heads": 2, "seq": 12, "vocab": vocab}
        module: nn.Module = gpt.GPT(gpt.GPTConfig(**config))
        return module
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=12,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def test_random_rounding_is_refused(load: Load) -> None:
    spec = GradientQuantization(rounding="stochastic").codec("inter")
    with pytest.raises(ValueError, match="round to nearest only"):
        load("emulated_ranks").Codes(inter=spec)
