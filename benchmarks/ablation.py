"""Validation loss of full precision against each quantized collective, on one small model.

The ablation of SDP4Bit (table 1 and figure 5) in one command and one table::

    python benchmarks/ablation.py                          # 4 CPU ranks as 2 nodes of 2
    python benchmarks/ablation.py --preset small --json ablation.json     # on 4 GPUs

With the same seed every variant sees the same model, data, order and learning rates; several seeds
show how much of a difference is noise. Text: the standard library of the running Python, as bytes.
Keep a run below one pass over it: on repeated text quantization noise acts as regularization. The
losses are those of the weights that the ranks compute with.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from common import table, write_report
from gpt import GPT, GPTConfig
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lq_lightning.data_parallel import (
    GradientQuantization,
    QuantizedCommunication,
    Topology,
    WeightQuantization,
    quantize_communication,
)

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from pretraining.corpus import Blocks, CorpusSettings, prepare  # noqa: E402

VOCAB = 264  # 256 bytes and room for the tokenizer's special tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Sizes of one ablation: the model, the batch of one rank, and the length of the run."""

    layers: int
    hidden: int
    heads: int
    seq: int
    batch: int
    steps: int
    lr: float
    val_blocks: int


PRESETS = {
    "tiny": Preset(
        layers=2, hidden=128, heads=4, seq=128, batch=8, steps=300, lr=2e-3, val_blocks=64
    ),
    "small": Preset(
        layers=6, hidden=384, heads=6, seq=256, batch=8, steps=800, lr=1e-3, val_blocks=512
    ),
}

VARIANTS: dict[str, tuple[WeightQuantization | None, GradientQuantization | None]] = {
    "full precision": (None, None),
    "qW": (WeightQuantization(method="qW"), None),
    "qWD": (WeightQuantization(), None),
    "ULq": (None, GradientQuantization(method="ULq")),
    "TLq": (None, GradientQuantization(method="TLq")),
    "TLq-HS": (None, GradientQuantization()),
    "SDP4Bit": (WeightQuantization(), GradientQuantization()),
    "qWD stochastic": (WeightQuantization(rounding="stochastic"), None),
    "TLq-HS nearest": (None, GradientQuantization(rounding="nearest")),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of a variant.

    Attributes:
        seed: Of initialisation, data order and rounding.
        val_loss: After the last step, in nats per byte.
        train_s: Seconds of training.
    """

    seed: int
    val_loss: float
    train_s: float


def batches(blocks: Blocks, preset: Preset, seed: int, device: torch.device) -> Iterator[Tensor]:
    """Yield this rank's batches: a shuffled pass over all blocks, then another."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(blocks), generator=generator)[rank::world]
        for start in range(0, len(order) - preset.batch, preset.batch):
            rows = [torch.as_tensor(blocks[int(i)]) for i in order[start : start + preset.batch]]
            yield torch.stack(rows).long().to(device)


def build(
    preset: Preset,
    weights: WeightQuantization | None,
    gradients: GradientQuantization | None,
    seed: int,
    node_size: int,
    device: torch.device,
) -> tuple[nn.Module, QuantizedCommunication]:
    """Make the sharded model with the given collectives."""
    torch.manual_seed(seed)
    config = GPTConfig(
        layers=preset.layers,
        hidden=preset.hidden,
        heads=preset.heads,
        seq=preset.seq + 1,
        vocab=VOCAB,
    )
    model = GPT(config).to(device)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            scale = 0.02 / math.sqrt(2 * preset.layers) if "out" in name or "down" in name else 0.02
            nn.init.normal_(parameter, 0.0, scale)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    topology = Topology(world_size=dist.get_world_size(), rank=dist.get_rank(), node_size=node_size)
    communication = quantize_communication(
        model, weights=weights, gradients=gradients, topology=topology, seed=seed
    )
    return model, communication


def train(
    variant: tuple[WeightQuantization | None, GradientQuantization | None],
    train_blocks: Blocks,
    val_blocks: Blocks,
    args: argparse.Namespace,
    seed: int,
    device: torch.device,
) -> Outcome:
    """Train one variant from scratch and validate it."""
    preset: Preset = args.sizes
    model, communication = build(preset, *variant, seed, args.node_size, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=preset.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    communication.register_optimizer(optimizer)
    warmup = max(1, preset.steps // 20)

    def factor(step: int) -> float:
        decay = 0.5 * (1 + math.cos(math.pi * min(1.0, step / preset.steps)))
        return min(1.0, (step + 1) / warmup) * (0.1 + 0.9 * decay)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    data = batches(train_blocks, preset, seed, device)
    start = time.perf_counter()
    for _ in range(preset.steps):
        model(next(data)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    loss = validate(model, val_blocks, preset, device)
    return Outcome(seed, loss, time.perf_counter() - start)


@torch.no_grad()
def validate(model: nn.Module, blocks: Blocks, preset: Preset, device: torch.device) -> float:
    """Return the mean loss over the first validation blocks, split over the ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    count = min(preset.val_blocks, len(blocks)) // (world * preset.batch) * (world * preset.batch)
    if count == 0:
        raise ValueError(
            f"{len(blocks)} validation blocks do not fill one batch on each of {world} ranks: "
            "lower the preset's batch or use fewer ranks"
        )
    total = torch.zeros((), device=device, dtype=torch.float64)
    mine = range(rank, count, world)
    for start in range(0, len(mine), preset.batch):
        rows = [torch.as_tensor(blocks[i]) for i in mine[start : start + preset.batch]]
        total += model(torch.stack(rows).long().to(device)).double() * len(rows)
    dist.all_reduce(total)
    return float(total) / count


def summary(outcomes: dict[str, list[Outcome]]) -> str:
    """Lay out the losses; differences are to full precision with the same seed.

    ``std error`` is that of the mean difference over seeds; for full precision, the spread of one
    seed (standard deviation).
    """
    exact = {o.seed: o.val_loss for o in outcomes.get("full precision", [])}
    rows = []
    for name, results in outcomes.items():
        changes = [100 * (o.val_loss / exact.get(o.seed, float("nan")) - 1) for o in results]
        deviations = changes
        if name == "full precision":
            mean = statistics.mean(exact.values())
            deviations = [100 * (loss / mean - 1) for loss in exact.values()]
        error = statistics.stdev(deviations) if len(results) > 1 else float("nan")
        if name != "full precision":
            error /= len(results) ** 0.5
        loss = statistics.mean(o.val_loss for o in results)
        seconds = statistics.mean(o.train_s for o in results)
        change = f"{statistics.mean(changes):+.3f}%"
        rows.append([name, len(results), f"{loss:.5f}", change, f"{error:.3f}%", f"{seconds:.1f}"])
    header = ["variant", "seeds", "val loss", "vs full", "std error", "seconds"]
    return table(rows, header)


def merged(paths: list[Path]) -> dict[str, list[Outcome]]:
    """Join the outcomes of several reports, variants in their usual order."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in VARIANTS}
    for path in paths:
        for name, results in json.loads(path.read_text())["results"]["variants"].items():
            outcomes[name] += [Outcome(**result) for result in results]
    return {name: results for name, results in outcomes.items() if results}


def run(args: argparse.Namespace) -> None:
    """Train every variant on the ranks of this process group and report on rank 0."""
    cuda = torch.cuda.is_available() and not args.cpu
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    text = None if args.text is None else str(args.text)
    settings = CorpusSettings(block_size=args.sizes.seq, text=text, suffixes=(".py",))
    if local_rank == 0:
        prepare(settings, args.cache)
    dist.barrier()
    corpus = prepare(settings, args.cache)
    train_blocks, val_blocks = corpus.blocks("train"), corpus.blocks("val")
    outcomes: dict[str, list[Outcome]] = {}
    for name in args.variants:
        outcomes[name] = [
            train(VARIANTS[name], train_blocks, val_blocks, args, seed, device)
            for seed in args.seeds
        ]
        if dist.get_rank() == 0:
            print(name, [round(o.val_loss, 5) for o in outcomes[name]], flush=True)
    if dist.get_rank() == 0:
        print(summary(outcomes))
        if args.json:
            write(args, outcomes, corpus.num_tokens)
    dist.destroy_process_group()


def write(
    args: argparse.Namespace, outcomes: dict[str, list[Outcome]], num_tokens: dict[str, int]
) -> None:
    """Write the report with everything needed to repeat it."""
    results = {
        "preset": asdict(args.sizes),
        "world_size": dist.get_world_size(),
        "node_size": args.node_size,
        "corpus_tokens": num_tokens,
        "variants": {name: [asdict(o) for o in runs] for name, runs in outcomes.items()},
    }
    write_report(args.json, "ablation", results)
    print(f"wrote {args.json}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--steps", type=int, help="optimizer steps, instead of the preset's")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--node-size", type=int, default=2, help="ranks per emulated node")
    parser.add_argument("--seeds", default="0,1", help="seeds of every variant (default: 0,1)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated names")
    parser.add_argument("--text", type=Path, help="folder with .py files (default: the stdlib)")
    parser.add_argument("--merge", type=Path, nargs="+", help="show these reports as one; no run")
    parser.add_argument("--cpu", action="store_true", help="use gloo even where there are GPUs")
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "data")
    parser.add_argument("--json", type=Path, help="where to write the report")
    args = parser.parse_args()
    sizes = asdict(PRESETS[args.preset])
    args.sizes = Preset(**(sizes | ({"steps": args.steps} if args.steps else {})))
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    args.variants = args.variants.split(",")
    unknown = [name for name in args.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"unknown variants {unknown}: choose among {', '.join(VARIANTS)}")
    return args


def main() -> None:
    """Start the ranks, or be one."""
    args = parse_arguments()
    if args.merge:
        print(summary(merged(args.merge)))
        return
    if "RANK" in os.environ:
        run(args)
        return
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", str(args.ranks), __file__, *sys.argv[1:]]
    raise SystemExit(subprocess.run(launch, check=False).returncode)


if __name__ == "__main__":
    main()
