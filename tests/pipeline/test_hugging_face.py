"""Decoders of transformers, and the example's, in stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lq_testing.stages import check_equal
from torch import Tensor, nn

from lq_lightning.pipeline.plan import plan_stages

transformers = pytest.importorskip("transformers")

_SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GPT2 = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32}
# What is special about each; those that differ in nothing that matters here are left out.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "gpt2": _GPT2,  # two embeddings, positional arguments, biases
    "gemma3_text": {"head_dim": 8, "sliding_window": 4},  # scaled embeddings, two kinds of masks
    "opt": {
        "ffn_dim": 24,
        "word_embed_proj_dim": 8,
        "pad_token_id": 1,
        "dropout": 0.0,
    },  # projections around
    "mixtral": {"num_local_experts": 2},
    "bloom": {"n_layer": 4, "n_head": 2},  # a norm behind the embedding; layers return tuples
    "llama4_text": {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 24},
    "mamba": {"state_size": 4},
}


def build(family: str, **settings: Any) -> nn.Module:
    settings = _SIZES | _FAMILIES[family] | settings
    config = transformers.AutoConfig.for_model(family, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def batches(count: int = 2) -> list[dict[str, Tensor]]:
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, -3:] = 0
    tokens = [torch.randint(2, 50, (2, 9)) for _ in range(count)]
    return [{"input_ids": t, "attention_mask": mask, "labels": t} for t in tokens]


def step(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


@pytest.mark.parametrize("family", _FAMILIES)
def test_families(family: str) -> None:
    model = build(family)
    check_equal(model, step, batches(), 2)
    check_equal(model, step, batches(1), 4, 2)


def test_where_parts_of_llama_and_opt_go() -> None:
    plan = plan_stages(build("llama"), 2)
    assert plan.layers == tuple(f"model.layers.{i}" for i in range(4))
    assert (plan.before, plan.after) == (("model.embed_tokens",), ("model.norm", "lm_head"))
    assert plan.shared[0].names == ("model.embed_tokens.weight", "lm_head.weight")
    plan = plan_stages(build("opt"), 2)
    names = ("embed_tokens", "embed_positions", "project_in")
    assert set(plan.before) == {f"model.decoder.{name}" for name in names}
    assert "model.decoder.final_layer_norm" in plan.after  # registered in front of the layers


def test_gradient_checkpointing_and_cache() -> None:
    model: Any = build("llama", use_cache=True)
    check_equal(model, step, batches(), 2)
    model.gradient_checkpointing_enable()
    check_equal(model, step, batches(), 2)


def test_adapters() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj", "down_proj", "embed_tokens"],
        modules_to_save=["lm_head"],
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(build("llama", tie_word_embeddings=False), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            nn.init.normal_(parameter, std=0.1)  # zeros would hide the gradients of the others
    check_equal(model, step, batches(), 2)
