"""Time Trainer steps of ``quantized_fsdp`` beside the same steps of a plain training loop.

The strategy's additions to the loop of ``step_time.py`` (hooks, closures, progress) must not keep
communication and computation from overlapping::

    torchrun --nproc-per-node 4 benchmarks/lightning_step.py --node-size 2 --json lightning.json
    benchmarks/nodes.sh -r 10gbit -n 2 -g 2 benchmarks/lightning_step.py --node-size 2

Model, data and optimizer are those of ``step_time.py``, but both run under the autocast of
``bf16-mixed``, which keeps normalization and the loss in fp32.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

import torch
import torch.distributed as dist
from common import argument_parser, choices, free_memory, table, write_report
from gpt import GPT, GPTConfig
from job import (
    VARIANTS,
    Clock,
    Job,
    add_model_arguments,
    model_config,
    over_ranks,
    process_group,
    random_batches,
    time_steps,
)
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lq_lightning.strategies import QuantizedFSDPStrategy

STRATEGY_VARIANTS = ("fsdp2", "quantized", "quantized-node")


class Module(LightningModule):
    """The GPT of the benchmarks, trained on a few random batches.

    Args:
        config: Sizes of the model.
        micro_batch: Sequences per rank and step.
    """

    def __init__(self, config: GPTConfig, micro_batch: int) -> None:
        super().__init__()
        self._config, self._micro_batch = config, micro_batch

    def configure_model(self) -> None:
        """Build the model where the strategy wants it."""
        if not hasattr(self, "model"):
            self.model = GPT(self._config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of a ``[B, T]`` batch."""
        loss: Tensor = self.model(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of ``job.Job``."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    def batches(self, count: int) -> list[Tensor]:
        """Return ``count`` batches, four different ones in turn, on this rank's device."""
        data = random_batches(self._config, self._micro_batch)
        if torch.cuda.is_available():
            data = data.cuda()
        return [data[index % len(data)] for index in range(count)]


class Times(Callback):
    """Marks the end of each step, on the compute stream or by the clock."""

    def __init__(self, device: torch.device) -> None:
        self.clock = Clock(device)

    def on_train_batch_end(self, *unused: Any) -> None:
        """Mark it."""
        self.clock.mark()


def trainer_times(name: str, args: argparse.Namespace, device: torch.device) -> list[float]:
    """Return the seconds of the timed steps of a Trainer."""
    times = Times(device)
    count = args.warmup + args.steps
    local = args.ranks_per_machine
    trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=local,
        num_nodes=dist.get_world_size() // local,
        strategy=QuantizedFSDPStrategy(
            weights=VARIANTS[name].weights or "none",
            gradients=VARIANTS[name].gradients or "none",
            node_size=args.node_size,
            units=["Block", "model.head"],  # as in job.py
            check_replicas_every_n_steps=0,
        ),
        precision="bf16-mixed",
        max_steps=count,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = Module(args.config, args.micro_batch)
    trainer.fit(module, DataLoader(module.batches(count), batch_size=None))  # type: ignore[arg-type]
    return times.clock.take()[-args.steps :]


def loop_times(name: str, args: argparse.Namespace, device: torch.device) -> list[float]:
    """Return the seconds of the timed steps of a plain loop."""
    node_size = args.node_size or dist.get_world_size()
    job = Job(
        VARIANTS[name],
        args.config,
        micro_batch=args.micro_batch,
        node_size=node_size,
        device=device,
        autocast=True,
    )
    time_steps(job, args.warmup)
    return time_steps(job, args.steps)[0]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--variants", default="fsdp2,quantized", help=", ".join(STRATEGY_VARIANTS))
    add_model_arguments(parser)
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before timing starts")
    args = parser.parse_args()
    args.variants = choices(parser, "variants", args.variants, STRATEGY_VARIANTS)
    args.config = model_config(args)
    args.micro_batch = args.micro_batch or (2 if args.tiny else 8)
    args.ranks_per_machine = int(os.environ["LOCAL_WORLD_SIZE"])
    return args


def main() -> None:
    """Time every variant both ways; rank 0 prints and writes."""
    args = parse_arguments()
    with process_group(args) as device:
        results: dict[str, dict[str, float]] = {}
        for name in args.variants:
            results[name] = {}
            for kind, measure in (("loop", loop_times), ("trainer", trainer_times)):
                slowest = over_ranks(measure(name, args, device), dist.ReduceOp.MAX)
                results[name][f"{kind}_ms"] = 1e3 * statistics.median(slowest)
                free_memory()
        if dist.get_rank() == 0:
            rows = [
                [name, f"{r['loop_ms']:.1f}", f"{r['trainer_ms']:.1f}"]
                for name, r in results.items()
            ]
            rate = os.environ.get("LQ_EMULATED_RATE", "not emulated")
            print(f"network: {rate}\n{table(rows, ['variant', 'loop ms/step', 'Trainer ms/step'])}")
            setup = {"world_size": dist.get_world_size(), "node_size": args.node_size}
            setup |= {"emulated_rate": rate, "steps": args.steps}
            write_report(args.json, "lightning_step", {"setup": setup, "variants": results})


if __name__ == "__main__":
    main()
