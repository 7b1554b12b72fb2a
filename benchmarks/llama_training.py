"""Training Hugging Face's Llama from scratch, or from where another run was saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from ablation_data import Data, batches, inputs_and_targets, learning_rate_factor
from torch import Tensor, nn
from torch.nn import functional as F

CURVE_STEPS = 50  # losses and gradient norms are kept as means over this many steps


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
        dtype: Dtype of the weights that the model computes with, the name of a ``torch.dtype``.
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

    def compile_parts(self, fullgraph: bool) -> None:
        """Compile each layer and the loss."""
        torch._dynamo.config.recompile_limit = 2 * len(self.llama.model.layers) + 8
        for layer in self.llama.model.layers:
            layer.compile(fullgraph=fullgraph, dynamic=False)
        self.head_loss = torch.compile(self.head_loss, fullgraph=True, dynamic=False)  # type: ignore[method-assign]


class MasterWeights:
    """fp32 copies of parameters of a model, which are rounded.

    Args:
        weights: Parameters of the model, in fp32.
        dtype: Dtype they are rounded to.
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


def micro_batches(inputs: Tensor, targets: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut a batch into equal parts."""
    return zip(inputs.split(size), targets.split(size), strict=True)


class Training:
    """A run in progress.

    Args:
        data: Training and validation tokens.
        preset: Sizes.
        seed: Seed of weights and of the order of the data.
    """

    def __init__(self, data: Data, preset: Preset, seed: int) -> None:
        torch.manual_seed(seed)
        with data.train.device:
            self.model = LanguageModel(preset, data.vocab)
        self.preset, self.seed, self.step, self.val = preset, seed, 0, data.val
        self.weights = MasterWeights(self.model.parameters(), getattr(torch, preset.dtype))
        self.optimizer = torch.optim.AdamW(
            self.weights.masters, lr=preset.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        factor = learning_rate_factor(preset.steps)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self.rows = batches(data.train, preset.batch, seed)

    def validate(self) -> float:
        """Return the mean loss over the validation blocks of the preset."""
        return validate(self.model, self.val, self.preset)

    def run(self, steps: int) -> tuple[list[Tensor], list[Tensor]]:
        """Take steps; return means of loss and gradient norm over every ``CURVE_STEPS`` of them."""
        sums = torch.zeros(2, device=self.weights.masters[0].device)
        means: list[Tensor] = []
        share = self.preset.micro_batch / self.preset.batch
        for _ in range(steps):
            for part in micro_batches(*next(self.rows), self.preset.micro_batch):
                loss = self.model(*part)
                loss.backward()
                self.weights.collect(share)
                sums[0] += loss.detach() * share
            sums[1] += nn.utils.clip_grad_norm_(self.weights.masters, 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.weights.publish()
            self.step += 1
            if self.step % CURVE_STEPS == 0:
                means.append(sums / CURVE_STEPS)
                sums = torch.zeros_like(sums)
        return [mean[0] for mean in means], [mean[1] for mean in means]

    def save(self, path: Path) -> None:
        """Write what ``resume`` reads."""
        state = {
            "step": self.step,
            "masters": [master.detach() for master in self.weights.masters],
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }
        torch.save(state, path)

    def resume(self, path: Path) -> None:
        """Continue where a run with the same data and seed was saved."""
        device = self.weights.masters[0].device
        state = torch.load(path, map_location=device, weights_only=True)
        with torch.no_grad():
            for master, saved in zip(self.weights.masters, state["masters"], strict=True):
                master.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        for _ in range(state["step"]):
            next(self.rows)
        self.step = state["step"]

    def perturb(self, deviation: float) -> None:
        """Scale every weight by ``1 + deviation * normal``."""
        with torch.no_grad():
            for master in self.weights.masters:
                master.mul_(1 + deviation * torch.randn_like(master))


@torch.no_grad()
def validate(model: nn.Module, blocks: Tensor, preset: Preset) -> float:
    """Return the mean loss over the first validation blocks."""
    count = min(preset.val_blocks, len(blocks)) // preset.micro_batch * preset.micro_batch
    if count == 0:
        raise ValueError(
            f"{len(blocks)} validation blocks do not fill one micro-batch of "
            f"{preset.micro_batch}: give more text or lower the preset's micro_batch"
        )
    total = torch.zeros((), device=blocks.device, dtype=torch.float64)
    for rows in blocks[:count].split(preset.micro_batch):
        total += model(*inputs_and_targets(rows)).double() * len(rows)
    return float(total) / count
