"""Small language models for measurements of activations: trained here, on bytes of this machine.

    python benchmarks/research/trained_models.py outputs/models     # about ten minutes on two cores

Two kinds: ``llama`` (Hugging Face's: RMSNorm, SwiGLU, rotary positions) and ``gpt`` (LayerNorm,
GELU). Weights are kept early and late in training, as ``llama_0030.pt``, ``llama_0600.pt``, ...
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import transformers
from ablation_data import learning_rate_factor
from corpus import standard_library
from gpt import GPT, GPTConfig
from torch import Tensor, nn
from torch.nn import functional as F

SEQ, BATCH, LR = 256, 8, 2e-3
LAYERS, HIDDEN, HEADS, INTERMEDIATE = 6, 256, 4, 768
KINDS = ("llama", "gpt")


def build(kind: str, vocab: int, seed: int = 0) -> nn.Module:
    """Return an untrained model of a kind."""
    torch.manual_seed(seed)
    if kind == "gpt":
        sizes = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "seq": SEQ}
        model = GPT(GPTConfig(**sizes, vocab=vocab))
        model.initialize()
        return model
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=SEQ,
        attn_implementation="sdpa",
        use_cache=False,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def loss_of(model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean next-token loss, a scalar."""
    if isinstance(model, GPT):
        return model(inputs_BT, targets_BT)
    logits = model(input_ids=inputs_BT).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), targets_BT.flatten())


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Return the transformer blocks of a model of either kind."""
    return model.blocks if isinstance(model, GPT) else model.model.layers


def batch(blocks: np.ndarray, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of some rows of a corpus."""
    chosen = torch.from_numpy(blocks[rows if isinstance(rows, slice) else rows.numpy()])
    tokens = chosen.to(torch.int64)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(kind: str, steps: int, kept: list[int], folder: Path, text: Path | None) -> None:
    """Train a model of a kind and keep its weights after some of the steps."""
    corpus = standard_library(SEQ, text)
    model = build(kind, corpus.vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor(steps))
    order = torch.randperm(len(corpus.train), generator=torch.Generator().manual_seed(0))
    for step in range(1, steps + 1):
        start = (step - 1) * BATCH % (len(order) - BATCH)
        loss = loss_of(model, *batch(corpus.train, order[start : start + BATCH]))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step in kept:
            torch.save(model.state_dict(), folder / f"{kind}_{step:04d}.pt")
        if step % 50 == 0 or step in kept:
            print(f"{kind} step {step} loss {loss.item():.3f}", flush=True)


def main() -> int:
    """Train and write; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--keep", default="30,600", help="steps after which weights are kept")
    parser.add_argument("--text", type=Path, help="folder with .py files (default: the stdlib)")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for kind in args.kinds.split(","):
        train(
            kind, args.steps, [int(step) for step in args.keep.split(",")], args.folder, args.text
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
