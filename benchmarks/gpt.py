"""A plain GPT for benchmarks: pre-norm blocks, SDPA attention, untied embedding and head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """Sizes of the model; the defaults give 1.41e9 parameters."""

    layers: int = 24
    hidden: int = 2048
    heads: int = 16
    seq: int = 2048
    vocab: int = 50304

    def __post_init__(self) -> None:
        """Check that heads divide the hidden size."""
        if self.hidden % self.heads:
            raise ValueError(
                f"hidden={self.hidden} is not a multiple of heads={self.heads}: "
                "choose a number of heads that divides it"
            )


class Block(nn.Module):
    """Causal self-attention and a GELU MLP, each behind a LayerNorm and a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.hidden // config.heads
        self.norm1 = nn.LayerNorm(config.hidden)
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.up = nn.Linear(config.hidden, 4 * config.hidden, bias=False)
        self.gelu = nn.GELU()
        self.down = nn.Linear(4 * config.hidden, config.hidden, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Map ``[B, T, C]`` hidden states to the next block's."""
        # by head, so that tensor-parallel ranks get whole ones: q, k and v of each
        qkv = self.qkv(self.norm1(x_BTC)).unflatten(-1, (-1, 3, self.head_size))
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.out(attended.transpose(1, 2).flatten(2))
        return x_BTC + self.down(self.gelu(self.up(self.norm2(x_BTC))))


class GPT(nn.Module):
    """Returns the mean next-token loss of ``tokens``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.seq, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Return the mean loss over ``[B, T]`` int64 tokens, a scalar.

        Args:
            tokens_BT: Input tokens.
            targets_BT: Next token at each position; by default from ``tokens_BT``, without a loss
                at the last position.
        """
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x = self.tokens(tokens_BT) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        if targets_BT is None:
            targets_BT = F.pad(tokens_BT[:, 1:], (0, 1), value=-100)
        return self.token_loss(self.head(self.norm(x)), targets_BT)

    def token_loss(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean cross-entropy, computed in float32, a scalar."""
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Shard heads, MLPs and vocabulary over a mesh, and hidden states between them by token.

        The loss has to be computed, forward and backward, within `loss_parallel`.
        """
        sequence = Shard(1)
        plan: dict[str, ParallelStyle] = {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
            "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "blocks.*.norm1": SequenceParallel(),
            "blocks.*.qkv": ColwiseParallel(input_layouts=sequence),
            "blocks.*.out": RowwiseParallel(output_layouts=sequence),
            "blocks.*.norm2": SequenceParallel(),
            "blocks.*.up": ColwiseParallel(input_layouts=sequence),
            "blocks.*.down": RowwiseParallel(output_layouts=sequence),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False
            ),
        }
        parallelize_module(self, mesh, plan)

    def compile_units(self, loss: bool = True) -> None:
        """Compile each block and the loss; FSDP2's hooks, which come later, stay outside."""
        for block in self.blocks:
            block.forward = torch.compile(block.forward)
        if loss:
            self.token_loss = torch.compile(self.token_loss)  # type: ignore[method-assign]

    @torch.no_grad()
    def reset_local_shards(self, seed: int) -> None:
        """Initialise sharded parameters in place, without communication."""
        device = next(self.parameters()).device
        generator = torch.Generator(device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if parameter.ndim > 1:
                local.normal_(0.0, 0.02, generator=generator)
            else:
                local.fill_(1.0 if name.endswith("weight") else 0.0)
