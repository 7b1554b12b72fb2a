"""The built-in decoder and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from pretraining.lightning_module import (
    CausalLM,
    OptimizerConfig,
    compile_layers,
    learning_rate_factor,
)
from pretraining.model import Decoder, DecoderConfig


def _decoder(**changes: object) -> Decoder:
    values = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}
    torch.manual_seed(0)
    return Decoder(DecoderConfig(**(values | changes)), vocab_size=40)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_and_dtype(dtype: torch.dtype) -> None:
    logits = _decoder().to(dtype)(torch.randint(0, 40, (3, 7)))
    assert logits.shape == (3, 7, 40)
    assert logits.dtype == dtype


def test_starts_at_the_loss_of_guessing() -> None:
    logits = _decoder()(torch.randint(0, 40, (8, 16)))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(0, 40, (8 * 16,)))
    assert abs(loss.item() - math.log(40)) < 0.1


def test_tied_embeddings_share_one_parameter() -> None:
    tied, untied = _decoder(), _decoder(tie_embeddings=False)
    assert tied.lm_head.weight is tied.embedding.weight
    numbers = [sum(p.numel() for p in model.parameters()) for model in (tied, untied)]
    assert numbers[1] - numbers[0] == 40 * 32


def test_equals_hugging_face_llama() -> None:
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    model = _decoder(tie_embeddings=False)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=model.config.mlp_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=model.config.norm_eps,
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    theirs = transformers.LlamaForCausalLM(config)
    names = {
        "embedding": "model.embed_tokens",
        "blocks": "model.layers",
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "attention": "self_attn",
        "norm": "model.norm",
    }
    state = {}
    for name, value in model.state_dict().items():
        parts = name.split(".")
        state[".".join(names.get(part, part) for part in parts)] = value
    theirs.load_state_dict(state)
    tokens = torch.randint(0, 40, (2, 9))
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 30}, "hidden_size=30.*multiple of 8"),
        ({"num_kv_heads": 3}, "num_kv_heads=3"),
    ],
)
def test_wrong_shapes(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _decoder(**changes)


def test_learning_rate_warms_up_and_decays() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=10, min_lr_ratio=0.1)
    factors = [learning_rate_factor(step, config, 100) for step in range(120)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == factors[10] == pytest.approx(1.0)
    assert all(a >= b for a, b in zip(factors[10:], factors[11:], strict=False))
    assert factors[100:] == pytest.approx([0.1] * 20)


def test_generation_adds_tokens_and_repeats_with_its_seed() -> None:
    model = CausalLM(decoder=DecoderConfig(num_layers=1, hidden_size=16, num_heads=2), block_size=8)
    with pytest.raises(RuntimeError, match="configure_model"):
        model(torch.zeros(1, 2, dtype=torch.int64))
    model.configure_model()
    built = model.model
    model.configure_model()
    assert model.model is built
    prompt = torch.tensor([1, 2, 3])
    first, second = (model.generate(prompt, 12, temperature=1.0, seed=5) for _ in range(2))
    assert first.tolist() == second.tolist()
    assert first[:3].tolist() == [1, 2, 3]
    assert len(first) == 15
    assert model.generate(prompt, 2, temperature=0.0).shape == (5,)


def _hugging_face(**settings: object) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, use_cache=False
    )
    for name, value in (("num_attention_heads", 4), ("num_key_value_heads", 2), *settings.items()):
        setattr(config, name, value)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("make", [_decoder, _hugging_face])
def test_loss_in_chunks_is_the_loss(make: Callable[[], torch.nn.Module]) -> None:
    block = torch.randint(0, 40, (3, 12))
    results = []
    for loss in ("full", "chunked"):
        module = CausalLM(loss=loss, loss_chunk=7)  # 33 tokens: the last chunk is smaller
        module.model = make()
        value = module._loss(block)
        value.backward()
        results.append([value, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(results[1], results[0])


def test_loss_in_chunks_never_makes_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    module = CausalLM(loss="chunked", loss_chunk=8)
    module.model = _decoder()
    rows: list[int] = []
    module.model.lm_head.register_forward_hook(lambda m, args, out: rows.append(out.shape[0]))
    module._loss(torch.randint(0, 40, (2, 17))).backward()
    assert rows == [8] * 8  # 32 tokens, twice


def test_loss_in_chunks_of_changed_logits_is_refused() -> None:
    module = CausalLM(loss="chunked")
    module.model = _hugging_face(final_logit_softcapping=30.0)
    with pytest.raises(ValueError, match="`final_logit_softcapping`.*loss=full"):
        module._loss(torch.randint(0, 40, (2, 17)))


@pytest.mark.parametrize("make", [_decoder, _hugging_face])
def test_all_layers_are_compiled_in_place(
    make: Callable[[], torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self: compiled.append(type(self).__name__)
    )
    model = make()
    names = list(model.state_dict())
    compile_layers(model)
    assert len(compiled) == 2
    assert set(compiled) <= {"Block", "LlamaDecoderLayer"}
    assert list(model.state_dict()) == names
