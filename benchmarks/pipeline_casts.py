"""Memory of a pipeline's training step in mixed precision, by how often weights are cast.

One run trains the same model twice through ``Trainer`` with ``quantized_pipeline``: weights cast
once for all micro-batches of a step, as the strategy does, and for each of them, when all in flight
have copies of their own::

    torchrun --nproc-per-node 4 benchmarks/pipeline_casts.py --cpu --layers 8 \\
        --hidden 256 --heads 4 --vocab 512 --seq 64 --json pipeline_casts.json

"held" is the most that a step takes above weights and states of the optimizer; on a CPU without
what operators need while they run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import table, write_report
from gpt import GPT, GPTConfig
from held_memory import HeldMemory
from job import add_model_arguments, model_config, process_group
from lightning.pytorch import Callback, LightningModule, Trainer
from pipeline_job import everyone
from torch import Tensor
from torch.utils.data import DataLoader

from lq_lightning import QuantizedPipelineStrategy
from lq_lightning.foundation.nested import tensors_in
from lq_lightning.plugins import FullyShardedPrecision

STEPS = 2  # the optimizer has its states in the second


class CastsForEach(FullyShardedPrecision):
    """Casts weights for every micro-batch."""

    def casting_once(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing."""
        return contextlib.nullcontext()


class Module(LightningModule):
    """The GPT of the benchmarks."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.model = GPT(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of a ``[B, T]`` batch."""
        loss: Tensor = self.model(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Held(Callback):
    """Measures what a step takes up to the optimizer's.

    Attributes:
        nbytes: Of the last step.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._mode: HeldMemory | None = None
        self._before = 0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Tensor, batch_idx: int
    ) -> None:
        """Begin."""
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return
        states = [t for state in trainer.optimizers[0].state.values() for t in tensors_in(state)]
        self._mode = HeldMemory([*pl_module.parameters(), *states, batch])
        self._mode.__enter__()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """End."""
        if self._mode is None:
            self.nbytes = torch.cuda.max_memory_allocated() - self._before
            return
        self._mode.__exit__(None, None, None)
        self.nbytes, self._mode = self._mode.peak_nbytes, None


def measure(args: argparse.Namespace, config: GPTConfig, precision: FullyShardedPrecision) -> Any:
    """Train some steps; return MiB by rank: what the last one held, and one copy of the weights."""
    torch.manual_seed(0)  # the same on all ranks
    held, module = Held(), Module(config)
    size = args.microbatches * (args.micro_batch or 1)
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    tokens = torch.randint(config.vocab, (STEPS * size, config.seq))
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            strategy=QuantizedPipelineStrategy(
                schedule=args.schedule, num_microbatches=args.microbatches
            ),
            accelerator="cpu" if args.cpu else "gpu",
            devices=local,
            num_nodes=dist.get_world_size() // local,
            max_steps=STEPS,
            plugins=[precision],
            callbacks=[held],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        ).fit(module, DataLoader(tokens, batch_size=size))
    copy = 2 * sum(parameter.numel() for parameter in module.parameters())
    return everyone((held.nbytes / 2**20, copy / 2**20))


def main() -> None:
    """Measure; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the results here")
    add_model_arguments(parser)
    args = parser.parse_args()
    config = model_config(args)
    with process_group(args):
        kinds = {"each": CastsForEach("bf16-mixed"), "once": FullyShardedPrecision("bf16-mixed")}
        found = {name: measure(args, config, precision) for name, precision in kinds.items()}
        rows = [
            {"rank": rank, "copy_mib": once[1], "each_mib": each[0], "once_mib": once[0]}
            for rank, (each, once) in enumerate(zip(found["each"], found["once"], strict=True))
        ]
        if dist.get_rank() == 0:
            header = ["rank", "bf16 copy MiB", "held MiB, a copy for each", "held MiB, one copy"]
            cells = [
                [rank, *(f"{mib:.2f}" for mib in mibs)] for rank, *mibs in map(dict.values, rows)
            ]
            print(table(cells, header))
            setup = {"schedule": args.schedule, "microbatches": args.microbatches}
            write_report(args.json, "pipeline_casts", {"setup": setup, "rows": rows})


if __name__ == "__main__":
    main()
