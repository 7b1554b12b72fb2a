"""Memory and time of gradient accumulation in fp32 and in 8 bits.

A GPT runs one window of micro-batches per variant; on several ranks FSDP2 shards it and reduces
once, at the end of the window, so that every rank holds whole gradients in between. `held` is what
`torch.cuda.memory_allocated` grew by from before the window to after its last micro-batch but one,
`peak` what `max_memory_allocated` grew by over the window. Needs a GPU. Examples::

    python benchmarks/gradient_memory.py --json gradient_memory.json
    torchrun --nproc-per-node 4 benchmarks/gradient_memory.py
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common import argument_parser, needs_gpu, table, write_report
from gpt import GPT, GPTConfig
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lq_lightning.data_parallel import QuantizedGradientBuffer


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


def measure(args: argparse.Namespace, quantized: bool) -> dict[str, float]:
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
    return {
        "held_bytes_per_parameter": (held - before) / numel,
        "peak_bytes_per_parameter": (torch.cuda.max_memory_allocated() - before) / numel,
        "window_ms": 1e3 * seconds,
        "gradient_norm": float(local),
    }


def main() -> None:
    """Measure, print, write JSON."""
    parser = argument_parser(__doc__)
    sizes = {"layers": 12, "hidden": 2048, "seq": 1024, "batch": 2, "micro-batches": 4}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args()
    if needs_gpu():
        return
    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if world > 1:
        dist.init_process_group("nccl")
    windows = {name: measure(args, name == "8-bit") for name in ("fp32", "8-bit")}
    if world == 1 or dist.get_rank() == 0:
        rows = [[name, *(f"{value:.3f}" for value in w.values())] for name, w in windows.items()]
        print(table(rows, ["window", "held B/param", "peak B/param", "ms", "norm"]))
        results = {
            "world_size": world,
            "model": {name: getattr(args, name) for name in ("layers", "hidden", "seq", "batch")},
            "micro_batches": args.micro_batches,
            "windows": windows,
        }
        write_report(args.json, "gradient_memory", results)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
