"""Small models of the architectures whose saved activations are counted, with real ratios.

Hidden size 512 in heads of 128 (64 where a model has them), so that what depends on the number of
heads weighs as in the large model. Each is a function of its number of layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN = 512
VOCAB = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A model to build at any depth.

    Attributes:
        build: makes the model with a number of layers, fp32, in training mode.
        inputs: what it takes, from batch size and sequence length.
        needs: package without which it cannot be built.
    """

    build: Callable[[int], nn.Module]
    inputs: Callable[[int, int], dict[str, Any]]
    needs: str | None = None

    def loss(self, model: nn.Module, batch: int, length: int) -> Tensor:
        """Run the model on fixed random inputs; a scalar that depends on all of its output."""
        torch.manual_seed(1)
        dtype = next(model.parameters()).dtype
        inputs = {
            name: value.to(dtype)
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
            for name, value in self.inputs(batch, length).items()
        }
        output = model(**inputs)
        for name in ("logits", "last_hidden_state"):
            output = getattr(output, name, output)
        return output.float().logsumexp(-1).sum() / 64


def _tokens(batch: int, length: int) -> dict[str, Any]:
    return {"input_ids": torch.randint(VOCAB, (batch, length)), "use_cache": False}


def _hugging_face(name: str, **values: Any) -> Architecture:
    def build(layers: int) -> nn.Module:
        import transformers

        common = {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "attn_implementation": "sdpa",
        }
        config = getattr(transformers, f"{name}Config")(**(common | values))
        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
        return model.train()

    return Architecture(build=build, inputs=_tokens, needs="transformers")


def _gpt2(layers: int) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        n_embd=HIDDEN, n_layer=layers, n_head=8, vocab_size=VOCAB, n_positions=512,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


class VisionTransformerBlock(nn.Module):
    """A block with the structure of timm's: fused q, k and v, ``fc1``, ``act`` and ``fc2``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.fc1 = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.drop1 = nn.Dropout(0.0)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's two updates."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.fc2(self.drop1(self.act(self.fc1(self.norm2(x)))))


class HandWrittenBlock(nn.Module):
    """A block as many repositories write it: functional GELU, names of their own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = HandWrittenMLP(width)

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's two updates."""
        parts = self.attention(self.ln_1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class HandWrittenMLP(nn.Module):
    """Two projections around a functional GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token by itself."""
        return self.shrink(F.gelu(self.expand(x)))


def _stack(block: Callable[[], nn.Module]) -> Architecture:
    def build(layers: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(16, HIDDEN), *(block() for _ in range(layers)), nn.LayerNorm(HIDDEN)
        )

    return Architecture(
        build=build, inputs=lambda batch, length: {"input": torch.randn(batch, length, 16)}
    )


def _encoder_layer(**values: Any) -> Architecture:
    return _stack(
        lambda: nn.TransformerEncoderLayer(
            HIDDEN, 8, dim_feedforward=4 * HIDDEN, dropout=0.0, batch_first=True, **values
        )
    )


def _litgpt(**values: Any) -> Architecture:
    def build(layers: int) -> nn.Module:
        from litgpt import GPT, Config

        common = {
            "n_layer": layers, "n_embd": HIDDEN, "n_head": 4, "padded_vocab_size": VOCAB,
            "block_size": 512, "bias": False, "rotary_percentage": 1.0,
        }  # fmt: skip
        model: nn.Module = GPT(Config(**(common | values)))
        return model

    return Architecture(
        build=build,
        inputs=lambda batch, length: {"idx": torch.randint(VOCAB, (batch, length))},
        needs="litgpt",
    )


def _timm(layers: int) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    model: nn.Module = VisionTransformer(
        img_size=32, patch_size=4, embed_dim=HIDDEN, depth=layers, num_heads=8, num_classes=VOCAB
    )
    return model


def _example(layers: int) -> nn.Module:
    examples = str(Path(__file__).resolve().parents[3] / "examples")
    if examples not in sys.path:
        sys.path.insert(0, examples)
    from pretraining.model import Decoder, DecoderConfig

    config = DecoderConfig(num_layers=layers, hidden_size=HIDDEN, num_heads=4, num_kv_heads=2)
    return Decoder(config, VOCAB)


def _lora(layers: int) -> nn.Module:
    import peft

    model = ARCHITECTURES["mistral"].build(layers)
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    adapted: nn.Module = peft.get_peft_model(model, config)
    adapted.enable_input_require_grads()
    return adapted.train()


_MHA = {"num_key_value_heads": 4, "intermediate_size": 2048}

ARCHITECTURES: dict[str, Architecture] = {
    "llama-3-8b": _hugging_face("Llama", num_key_value_heads=1, intermediate_size=1792),
    "llama-2-7b": _hugging_face("Llama", num_key_value_heads=4, intermediate_size=1376),
    "mistral": _hugging_face("Mistral", **_MHA, head_dim=128),
    "qwen2": _hugging_face("Qwen2", **_MHA),
    "qwen3": _hugging_face("Qwen3", **_MHA, head_dim=128),
    "gemma": _hugging_face("Gemma", **_MHA, head_dim=128),
    "phi": _hugging_face("Phi", **_MHA),
    "phi-3": _hugging_face("Phi3", **_MHA),
    "gpt2": Architecture(build=_gpt2, inputs=_tokens, needs="transformers"),
    "vit-structure": _stack(lambda: VisionTransformerBlock(HIDDEN, 8)),
    "timm-vit": Architecture(
        build=_timm,
        inputs=lambda batch, length: {"x": torch.randn(batch, 3, 32, 32)},
        needs="torchvision",
    ),
    "encoder-relu": _encoder_layer(norm_first=True),
    "encoder-gelu": _encoder_layer(activation="gelu"),
    "litgpt-llama": _litgpt(
        n_query_groups=1, intermediate_size=1792,
        norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
    ),
    "litgpt-neox": _litgpt(intermediate_size=2048, mlp_class_name="GptNeoxMLP", bias=True),
    "hand-written": _stack(lambda: HandWrittenBlock(HIDDEN, 8)),
    "example": Architecture(
        build=_example,
        inputs=lambda batch, length: {"tokens_BT": torch.randint(VOCAB, (batch, length))},
    ),
    "mistral-lora": Architecture(build=_lora, inputs=_tokens, needs="peft"),
}  # fmt: skip
