"""Device memory of plain FSDP2 and of quantized communication against a prediction, in one run.

    torchrun --nproc-per-node 4 benchmarks/memory.py --node-size 2 --json memory.json
    torchrun --nproc-per-node 2 benchmarks/memory.py --tiny

Prediction, in bytes of one rank for P parameters on N ranks, L of them in one node:

- between steps: 4 P / N fp32 weights, 8 P / N AdamW moments, and the replica of the weights: none
  without quantization, 2 P for `full`, 2 P / L for `node`;
- in the optimizer step: 4 P / N fp32 gradients more;
- peak of a step: what plain ZeRO-3 measured, which includes the activations, plus the replica; for
  ZeRO-2, plus 2 bytes for each parameter of the blocks, which stay gathered.

A peak is predicted from above: blocks that ZeRO-3 has gathered at its peak are counted twice.
Messages are transient and not predicted.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from common import argument_parser, choices, free_memory, table, write_report
from gpt import GPT, GPTConfig
from job import (
    VARIANTS,
    Job,
    Variant,
    add_model_arguments,
    model_config,
    over_ranks,
    process_group,
    without_nan,
)

MODELS = {
    "1.4B": ({}, 8),
    "7B": ({"layers": 32, "hidden": 4096, "heads": 32}, 2),
}
# Bytes that PyTorch allocated on the device: between steps, and peaks; the largest of all ranks.
FIELDS = ("at_rest", "optimizer", "peak")
Memory = dict[str, float]
MEASURED = {
    "ZeRO-3": VARIANTS["fsdp2"],
    "ZeRO-2": replace(VARIANTS["fsdp2"], keep_gathered=True),
    "quantized, full": VARIANTS["quantized"],
    "quantized, node": VARIANTS["quantized-node"],
}


def replica_bytes(variant: Variant, parameters: int, node_size: int) -> float:
    """Bytes of one rank's replica of bf16 weights."""
    if variant.weights is None:
        return 0.0
    return 2 * parameters / (node_size if variant.weights.replica == "node" else 1)


def predict(
    variant: Variant, parameters: int, in_blocks: int, node_size: int, zero3_peak: float
) -> Memory:
    """Apply the formula in the module docstring to the measured peak of ZeRO-3."""
    replica = replica_bytes(variant, parameters, node_size)
    own = parameters / dist.get_world_size()
    kept = 2 * in_blocks if variant.keep_gathered and variant.weights is None else 0
    peaks = (12 * own + replica, 16 * own + replica, zero3_peak + replica + kept)
    return dict(zip(FIELDS, peaks, strict=True))


def measure(
    variant: Variant, config: GPTConfig, micro_batch: int, node_size: int, device: torch.device
) -> Memory:
    """Train two steps of the variant, then measure a third; NaN on a CPU."""
    job = Job(variant, config, micro_batch=micro_batch, node_size=node_size, device=device)
    for _ in range(2):
        job.step()
    rest = _device_memory("memory_allocated", device)
    job.forward().backward()
    training = _device_memory("max_memory_allocated", device)
    job.update()
    optimizer = _device_memory("max_memory_allocated", device)
    peaks = [rest, optimizer, max(training, optimizer)]
    return dict(zip(FIELDS, over_ranks(peaks, dist.ReduceOp.MAX), strict=True))


def _device_memory(statistic: str, device: torch.device) -> float:
    """Return bytes by a function of torch.cuda, NaN on a CPU, and forget peaks so far."""
    if device.type != "cuda":
        return math.nan
    torch.cuda.synchronize()
    found = float(getattr(torch.cuda, statistic)())
    torch.cuda.reset_peak_memory_stats()
    return found


def measure_model(
    name: str, config: GPTConfig, micro_batch: int, node_size: int, device: torch.device
) -> dict[str, Any]:
    """Measure every variant of one model and predict it; print a table on rank 0."""
    with torch.device("meta"):
        model = GPT(config)
    parameters = sum(p.numel() for p in model.parameters())
    in_blocks = sum(p.numel() for p in model.blocks.parameters())
    variants: dict[str, Any] = {}
    zero3_peak = math.nan
    for label, variant in MEASURED.items():
        measured = measure(variant, config, micro_batch, node_size, device)
        free_memory()
        if label == "ZeRO-3":
            zero3_peak = measured["peak"]
        predicted = predict(variant, parameters, in_blocks, node_size, zero3_peak)
        over = (measured["peak"] - zero3_peak) / parameters
        variants[label] = {
            "measured": without_nan(measured),
            "predicted": without_nan(predicted),
            "replica_bytes_per_parameter": replica_bytes(variant, parameters, node_size)
            / parameters,
            "peak_over_zero3_bytes_per_parameter": None if math.isnan(over) else over,
        }
    result = {
        "model": asdict(config) | {"parameters": parameters, "in_blocks": in_blocks},
        "micro_batch": micro_batch,
        "variants": variants,
    }
    if dist.get_rank() == 0:
        print(f"{name}: {parameters / 1e9:.2f}e9 parameters\n{lay_out(variants)}", flush=True)
    return result


def lay_out(variants: dict[str, Any]) -> str:
    """Return measured and predicted GiB of every variant as a table."""
    rows = []
    for label, result in variants.items():
        row = [label]
        for field in FIELDS:
            for source in ("measured", "predicted"):
                value = result[source][field]
                row.append("-" if value is None else f"{value / 2**30:.2f}")
        over = result["peak_over_zero3_bytes_per_parameter"]
        rows.append([*row, "-" if over is None else f"{over:.2f}"])
    header = ["GiB", "at rest", "predicted", "optimizer", "predicted", "peak", "predicted"]
    return table(rows, [*header, "bytes/parameter over ZeRO-3"])


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated: 1.4B, 7B")
    add_model_arguments(parser)
    args = parser.parse_args()
    args.models = ["1.4B"] if args.tiny else choices(parser, "models", args.models, MODELS)
    return args


def main() -> None:
    """Measure the models one after the other and report on rank 0."""
    args = parse_arguments()
    with process_group(args) as device:
        node_size = args.node_size or dist.get_world_size()
        results = {}
        for name in args.models:
            sizes, micro_batch = MODELS[name]
            results["tiny" if args.tiny else name] = measure_model(
                name,
                model_config(args, sizes),
                args.micro_batch or (2 if args.tiny else micro_batch),
                node_size,
                device,
            )
        if dist.get_rank() == 0:
            setup = {"world_size": dist.get_world_size(), "node_size": node_size}
            write_report(args.json, "memory", {"setup": setup, "models": results})


if __name__ == "__main__":
    main()
