"""Memory and time of gradient accumulation in fp32 and in 8 bits.

A GPT runs one window of micro-batches per variant; on several ranks FSDP2 shards it and reduces
once, at the end of the window, so that every rank holds whole gradients in between. `held` is what
`torch.cuda.memory_allocated` grew by from before the window to after its last micro-batch but one,
`peak` what `max_memory_allocated` did over the window. Needs a GPU. Examples::

    python benchmarks/gradient_memory.py --json gradient_memory.json
    torchrun --nproc-per-node 4 benchmarks/gradient_memory.py
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from common import table, write_report
from gpt import GPT, GPTConfig
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lq_lightning.data_parallel import QuantizedGradientBuffer


@dataclass(frozen=True, slots=True)
class Window:
    """One window of micro-batches.

    Attributes:
        held_bytes_per_parameter: Growth from before the window to before its last backward.
        peak_bytes_per_parameter: Largest growth during the window, activations included.
        window_ms: Time of the whole window, the second of two.
        gradient_norm: Norm of the accumulated gradients of this rank.
    """

    held_bytes_per_parameter: float
    peak_bytes_per_parameter: float
    window_ms: float
    gradient_norm: float


def build(args: argparse.Namespace) -> tuple[nn.Module, int]:
    """Make the model and count its parameters."""
    config = GPTConfig(
        layers=args.layers, hidden=args.hidden, heads=args.hidden // 128, seq=args.seq
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(config)
    numel = sum(p.numel() for p in model.parameters())
    if dist.is_initialized():
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    model.reset_local_shards(0)
    return model, numel


def run_window(
    model: nn.Module, buffer: QuantizedGradientBuffer | None, tokens: Tensor, count: int
) -> int:
    """Run one window; return the bytes that were allocated before its last backward."""
    held = 0
    for index in range(count):
        last = index == count - 1
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        if last:
            held = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens)
        with nullcontext() if buffer is None else buffer.accumulating(not last):
            loss.backward()
        del loss
    return held


def measure(args: argparse.Namespace, quantized: bool) -> Window:
    """Run two windows of one variant and measure the second."""
    model, numel = build(args)
    buffer = QuantizedGradientBuffer(model) if quantized else None
    tokens = torch.randint(0, 50304, (args.batch, args.seq), device="cuda")
    run_window(model, buffer, tokens, args.micro_batches)
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    held = run_window(model, buffer, tokens, args.micro_batches)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    local = norm.to_local() if hasattr(norm, "to_local") else norm
    return Window(
        (held - before) / numel,
        (torch.cuda.max_memory_allocated() - before) / numel,
        1e3 * seconds,
        float(local),
    )


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a window")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if world > 1:
        dist.init_process_group("nccl")
    windows = {name: measure(args, name == "8-bit") for name in ("fp32", "8-bit")}
    if world == 1 or dist.get_rank() == 0:
        rows = [
            [name, *(f"{value:.3f}" for value in asdict(w).values())] for name, w in windows.items()
        ]
        print(table(rows, ["window", "held B/param", "peak B/param", "ms", "norm"]))
        results = {
            "world_size": world,
            "model": {name: getattr(args, name) for name in ("layers", "hidden", "seq", "batch")},
            "micro_batches": args.micro_batches,
            "windows": {name: asdict(w) for name, w in windows.items()},
        }
        write_report(args.json, "gradient_memory", results)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
