"""Hugging Face's Llama for benchmarks: sizes, loss, compilation, fp32 copies of rounded weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Sizes of the model and of a run.

    Attributes:
        layers: Transformer blocks.
        hidden: Width.
        intermediate: Width of the MLP.
        heads: Attention heads.
        seq: Tokens that the model sees at once.
        batch: Sequences of one step.
        micro_batch: Sequences of one forward and backward; divides the batch.
        steps: Optimizer steps.
        lr: Peak learning rate, after a tenth of the steps; a cosine then ends at a tenth of it.
        val_blocks: Sequences to validate on.
        dtype: Of the weights that the model computes with, the name of a ``torch.dtype``.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    seq: int
    batch: int
    micro_batch: int
    steps: int
    lr: float
    val_blocks: int
    dtype: str = "bfloat16"


PRESETS = {
    # Shows in seconds that every variant runs; its losses say nothing.
    "smoke": Preset(
        layers=2,
        hidden=64,
        intermediate=128,
        heads=2,
        seq=32,
        batch=4,
        micro_batch=2,
        steps=50,
        lr=2e-3,
        val_blocks=64,
    ),
    # 1.4e6 parameters, for CPUs: eight stages of a layer.
    "llama_1m": Preset(
        layers=8,
        hidden=128,
        intermediate=256,
        heads=4,
        seq=128,
        batch=8,
        micro_batch=4,
        steps=200,
        lr=2e-3,
        val_blocks=128,
        dtype="float32",
    ),
    # 1.9e6 parameters with bytes as tokens, for CPUs: 0.1 s a step.
    "llama_2m": Preset(
        layers=4,
        hidden=192,
        intermediate=512,
        heads=6,
        seq=128,
        batch=8,
        micro_batch=8,
        steps=200,
        lr=2e-3,
        val_blocks=256,
        dtype="float32",
    ),
    # With 16384 tokens of vocabulary 110e6 parameters; 131072 tokens a step, 301e6 in all.
    "llama_125m": Preset(
        layers=12,
        hidden=768,
        intermediate=2048,
        heads=12,
        seq=1024,
        batch=128,
        micro_batch=64,
        steps=2300,
        lr=6e-4,
        val_blocks=4096,
    ),
    # Likewise 361e6 parameters, and 301e6 tokens.
    "llama_350m": Preset(
        layers=24,
        hidden=1024,
        intermediate=3072,
        heads=16,
        seq=1024,
        batch=128,
        micro_batch=64,
        steps=2300,
        lr=4e-4,
        val_blocks=4096,
    ),
}


class LanguageModel(nn.Module):
    """Hugging Face's Llama; returns the mean next-token loss.

    Args:
        preset: Sizes.
        vocab: Size of the vocabulary.
    """

    def __init__(self, preset: Preset, vocab: int) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=vocab,
            hidden_size=preset.hidden,
            intermediate_size=preset.intermediate,
            num_hidden_layers=preset.layers,
            num_attention_heads=preset.heads,
            num_key_value_heads=preset.heads,
            max_position_embeddings=preset.seq,
            attn_implementation="sdpa",
            use_cache=False,
            tie_word_embeddings=False,
        )
        self.llama = transformers.LlamaForCausalLM(config)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean loss over ``[B, T]`` int64 tokens, a scalar."""
        hidden_BTC = self.llama.model(input_ids=tokens_BT).last_hidden_state
        return self.head_loss(hidden_BTC, targets_BT)

    def head_loss(self, hidden_BTC: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean loss of normalized hidden states, a scalar."""
        logits = self.llama.lm_head(hidden_BTC)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets_BT.flatten())

    def allow_a_graph_per_layer(self) -> None:
        """Let every layer be compiled for itself."""
        torch._dynamo.config.recompile_limit = 2 * len(self.llama.model.layers) + 8

    def compile_parts(self, fullgraph: bool) -> None:
        """Compile each layer and the loss."""
        self.allow_a_graph_per_layer()
        for layer in self.llama.model.layers:
            layer.compile(fullgraph=fullgraph, dynamic=False)
        self.head_loss = torch.compile(self.head_loss, fullgraph=True, dynamic=False)  # type: ignore[method-assign]


class MasterWeights:
    """fp32 copies of parameters of a model, which are rounded.

    Args:
        weights: Of the model, in fp32.
        dtype: That they become.
    """

    def __init__(
        self, weights: Iterable[nn.Parameter], dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self._weights = list(weights)
        self.masters = [nn.Parameter(weight.detach().clone()) for weight in self._weights]
        for weight in self._weights:
            weight.data = weight.data.to(dtype)

    def collect(self, scale: float) -> None:
        """Add the gradients of a micro-batch, times a scale, to those of the copies."""
        for weight, master in zip(self._weights, self.masters, strict=True):
            grad = weight.grad.float() * scale
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            weight.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the copies to the model's weights."""
        for weight, master in zip(self._weights, self.masters, strict=True):
            weight.copy_(master)
