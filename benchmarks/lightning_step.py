"""Time and peak memory of Trainer steps of ``quantized_fsdp``, beside a plain training loop.

The strategy's additions to the loop of ``step_time.py`` (hooks, closures, progress) must not keep
communication and computation from overlapping::

    torchrun --nproc-per-node 4 benchmarks/lightning_step.py --node-size 2 --json lightning.json
    benchmarks/nodes.sh -r 10gbit -n 2 -g 2 benchmarks/lightning_step.py --node-size 2
    torchrun --nproc-per-node 2 benchmarks/lightning_step.py --tensor-parallel 2 --llama \\
        --layers 10 --hidden 5120 --heads 40 --seq 12288 --vocab 32000 --accumulate 2 \\
        --variants fsdp2,O,O+G,A+O+G

Model, data and optimizer are those of ``step_time.py``, but both run under the autocast of
``bf16-mixed``, which keeps normalization and the loss in fp32. ``--llama`` takes a Llama of
transformers instead, sharded by the plan that it brings; the call above is AGoQ's table 8, with its
tokens and parameters per GPU. A, O and G are saved activations, optimizer states and sums of
gradients as codes.

``--tokens`` trains on text that ``corpus.py`` prepared, with a rising learning rate and clipped
gradients, and reports the loss as means over a twentieth of the steps::

    torchrun --nproc-per-node 4 benchmarks/lightning_step.py --node-size 2 --llama --tokens TEXT \\
        --layers 32 --hidden 4096 --heads 32 --kv-heads 8 --intermediate 14336 --vocab 128256 \\
        --seq 1024 --steps 500 --variants all,fsdp2-8-bit

``--pipeline`` cuts the model into stages, with AGoQ's bits by stage where activations are codes::

    torchrun --nproc-per-node 4 benchmarks/lightning_step.py --llama --pipeline 4 --layers 32 \\
        --hidden 4096 --heads 32 --kv-heads 8 --intermediate 14336 --vocab 32000 --seq 4096 \\
        --variants 1f1b,1f1b-checkpoint,1f1b-A,zero-bubble
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import argument_parser, choices, free_memory, table, write_report
from corpus import read_tokens, tokens_folder
from gpt import GPT
from job import (
    TENSOR,
    VARIANTS,
    Clock,
    Job,
    add_model_arguments,
    model_config,
    over_ranks,
    process_group,
    random_batches,
    time_steps,
    without_nan,
)
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.data import DataLoader

from lq_lightning.callbacks import ActivationQuantization, StageBitCompensation
from lq_lightning.plugins import QuantizedPrecision
from lq_lightning.strategies import QuantizedFSDPStrategy, QuantizedPipelineStrategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What is quantized.

    Attributes:
        communication: A variant of ``job.py``.
        states: Format of optimizer states.
        sums: Code of gradient sums between micro-batches.
        recipe: Recipe of saved activations; None keeps them as they are.
        checkpointing: Of layers.
        torchao: Take torchao's 8-bit AdamW.
        schedule: Of a pipeline.
    """

    communication: str = "fsdp2"
    states: str = "none"
    sums: str = "none"
    recipe: str | None = None
    checkpointing: bool = False
    torchao: bool = False
    schedule: Any = "1f1b"


SETUPS = {
    "fsdp2": Setup(),
    "fsdp2-8-bit": Setup(checkpointing=True, torchao=True),
    "quantized": Setup(communication="quantized"),
    "quantized-node": Setup(communication="quantized-node"),
    "O": Setup(states="dynamic8"),
    "O+G": Setup(states="dynamic8", sums="int8"),
    "A": Setup(recipe="agoq"),
    "A+O+G": Setup(states="dynamic8", sums="int8", recipe="agoq"),
    "coat": Setup(states="expanded_fp8", recipe="coat"),
    "all": Setup(communication="quantized", states="dynamic8", sums="int8", recipe="agoq"),
    "1f1b": Setup(states="dynamic8"),
    "1f1b-checkpoint": Setup(states="dynamic8", checkpointing=True),
    "1f1b-A": Setup(states="dynamic8", recipe="agoq"),
    "zero-bubble": Setup(states="dynamic8", schedule="zero_bubble"),
}


class Module(LightningModule):
    """The GPT of the benchmarks or a Llama, trained on a few random batches.

    Args:
        args: Of the command line.
        device: Device of this rank.
        setup: What is quantized.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, setup: Setup) -> None:
        super().__init__()
        self._args, self._device, self._setup = args, device, setup
        self.losses: list[Tensor] = []

    def configure_model(self) -> None:
        """Build the model where the strategy wants it."""
        if hasattr(self, "model"):
            return
        if self._args.llama:
            with torch.device(self._device):
                self.model: Any = llama(self._args)
            if self._setup.checkpointing:
                self.model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.model = GPT(self._args.config)
            if self._args.tensor_parallel > 1:
                self.model.parallelize(self.device_mesh[TENSOR])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of a ``[B, T]`` batch."""
        with self._loss_context():
            if self._args.llama:
                loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
            else:
                loss = self.model(batch)
        loss = loss.to_local() if isinstance(loss, DTensor) else loss
        self.losses.append(loss.detach())
        return loss

    def _loss_context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def configure_optimizers(self) -> Any:
        """Return the optimizer of ``job.Job``, or torchao's; with text, the rate rises at first."""
        if self._setup.torchao:
            from torchao.optim import AdamW8bit

            optimizer: torch.optim.Optimizer = AdamW8bit(self.parameters(), lr=self._args.lr)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self._args.lr, fused=True)
        if self._args.tokens is None:
            return optimizer
        rise = max(1, self._args.steps // 10)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / rise))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def batches(self, count: int) -> Iterator[Tensor]:
        """Yield ``count`` batches of this rank: of text, or four random ones in turn."""
        args, size = self._args, self._args.micro_batch * self._args.microbatches
        groups = dist.get_world_size() // args.tensor_parallel // args.pipeline
        group = dist.get_rank() // args.tensor_parallel % groups
        if args.tokens is None:
            data = random_batches(args.config, size, group).to(self._device)
            return (data[index % len(data)] for index in range(count))
        blocks = read_tokens(args.tokens, args.config.seq - 1).train  # [blocks, T]
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))
        own = order[: count * groups * size].view(count, groups, size)[:, group]
        return (
            torch.from_numpy(blocks[rows.numpy()].astype("int64")).to(self._device) for rows in own
        )


class ModuleWithPlan(Module):
    """A GPT whose ranks share the vocabulary, and so the loss."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward where such a loss has one."""
        with self._loss_context():
            super().backward(loss, *args, **kwargs)

    def _loss_context(self) -> AbstractContextManager[object]:
        return loss_parallel()


def llama(args: argparse.Namespace) -> Any:
    """Return a model of transformers, with an MLP as wide as that of Llama-2-13B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=args.config.vocab,
        hidden_size=args.config.hidden,
        intermediate_size=args.intermediate or 27 * args.config.hidden // 10,
        num_hidden_layers=args.config.layers,
        num_attention_heads=args.config.heads,
        num_key_value_heads=args.kv_heads or args.config.heads,
        max_position_embeddings=args.config.seq,
    )
    return LlamaForCausalLM(config)


class Times(Callback):
    """Marks the end of each micro-batch, on the compute stream or by the clock.

    Args:
        device: Device of this rank.
        warmup: Micro-batches whose peak of memory does not count.
    """

    def __init__(self, device: torch.device, warmup: int) -> None:
        self.clock, self._device, self._warmup = Clock(device), device, warmup

    def on_train_batch_end(self, *unused: Any) -> None:
        """Mark it."""
        self.clock.mark()
        self._warmup -= 1
        if self._warmup == 0 and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()


def strategy_of(setup: Setup, args: argparse.Namespace) -> QuantizedFSDPStrategy:
    """Return the strategy of a setup."""
    variant = VARIANTS[setup.communication]
    options: dict[str, Any] = {
        "weights": variant.weights or "none",
        "gradients": variant.gradients or "none",
        "node_size": args.node_size,
        "compile_units": args.compile,
        "check_replicas_every_n_steps": 0,
    }
    if args.tensor_parallel > 1:
        options["tensor_parallel_size"] = args.tensor_parallel
        options["tensor_parallel"] = "auto" if args.llama else None
    if args.pipeline > 1:
        return QuantizedPipelineStrategy(
            args.pipeline, setup.schedule, args.microbatches, reshard_after_forward=False, **options
        )
    # as in job.py
    units = ["LlamaDecoderLayer", "model.lm_head"] if args.llama else ["Block", "model.head"]
    return QuantizedFSDPStrategy(units=units, **options)


def trainer_row(
    setup: Setup, args: argparse.Namespace, device: torch.device
) -> tuple[list[float], float, list[float]]:
    """Return the seconds of the timed steps of a Trainer, the peak in GiB, and the losses."""
    count = args.warmup + args.steps
    times = Times(device, args.warmup * args.accumulate)
    callbacks: list[Callback] = [times]
    if setup.recipe is not None:
        callbacks.append(ActivationQuantization(setup.recipe))
        if args.pipeline > 1:
            callbacks.append(StageBitCompensation())
    local = args.ranks_per_machine
    trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=local,
        num_nodes=dist.get_world_size() // local,
        strategy=strategy_of(setup, args),
        plugins=QuantizedPrecision("bf16-mixed", setup.states, setup.sums),  # type: ignore[arg-type]
        max_steps=count,
        gradient_clip_val=None if args.tokens is None else 1.0,
        accumulate_grad_batches=args.accumulate,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    torch.manual_seed(0)  # one model on all ranks
    own_plan = args.tensor_parallel > 1 and not args.llama
    module = (ModuleWithPlan if own_plan else Module)(args, device, setup)
    batches = list(module.batches(count * args.accumulate))
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    each = times.clock.take()[-args.steps * args.accumulate :]
    seconds = [sum(each[i : i + args.accumulate]) for i in range(0, len(each), args.accumulate)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    return seconds, peak, [float(loss) for loss in module.losses]


def loop_times(setup: Setup, args: argparse.Namespace, device: torch.device) -> list[float]:
    """Return the seconds of the timed steps of a plain loop; none where there is no such loop."""
    plain = setup == Setup(communication=setup.communication) and args.pipeline == 1
    if args.llama or not plain or args.accumulate > 1 or args.tokens is not None:
        return []
    job = Job(
        VARIANTS[setup.communication],
        args.config,
        micro_batch=args.micro_batch,
        node_size=args.node_size or dist.get_world_size(),
        device=device,
        tensor_parallel=args.tensor_parallel,
        compile_blocks=args.compile,
        autocast=True,
    )
    time_steps(job, args.warmup)
    return time_steps(job, args.steps)[0]


def measure(setup: Setup, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measure a setup both ways."""
    row = {"loop_ms": float("nan")}
    if times := loop_times(setup, args, device):
        row["loop_ms"] = 1e3 * statistics.median(over_ranks(times, dist.ReduceOp.MAX))
    free_memory()
    times, peak, losses = trainer_row(setup, args, device)
    row["trainer_ms"] = 1e3 * statistics.median(over_ranks(times, dist.ReduceOp.MAX))
    peaks = [peak if rank == dist.get_rank() else 0.0 for rank in range(dist.get_world_size())]
    peaks = over_ranks(peaks, dist.ReduceOp.SUM)
    row["peak_gib"] = max(peaks)
    free_memory()
    if args.pipeline > 1:  # whose last rank alone has losses
        return without_nan(row) | ({"peaks_gib": peaks} if device.type == "cuda" else {})
    mean = [total / dist.get_world_size() for total in over_ranks(losses, dist.ReduceOp.SUM)]
    row["last_loss"] = mean[-1]
    if args.tokens is None:
        return without_nan(row)
    each = max(1, len(mean) // 20)
    curve = [statistics.mean(mean[i : i + each]) for i in range(0, len(mean), each)]
    return without_nan(row | {"last_loss": curve[-1]}) | {"curve": curve}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--variants", default="fsdp2,quantized", help=", ".join(SETUPS))
    add_model_arguments(parser)
    parser.add_argument("--llama", action="store_true", help="a Llama of transformers")
    parser.add_argument("--intermediate", type=int, help="width of the Llama's MLP")
    parser.add_argument("--kv-heads", type=int, help="of the Llama (default: as many as heads)")
    parser.add_argument("--tokens", type=tokens_folder, help="text that corpus.py prepared")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--pipeline", type=int, default=1, help="ranks along a pipeline")
    parser.add_argument("--microbatches", type=int, help="of a pipeline (default: 4 per rank)")
    parser.add_argument("--compile", action="store_true", help="compile blocks")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before timing starts")
    args = parser.parse_args()
    args.variants = choices(parser, "variants", args.variants, SETUPS)
    args.config = model_config(args)
    args.micro_batch = args.micro_batch or (1 if args.llama else 2 if args.tiny else 8)
    args.microbatches = args.microbatches or (4 * args.pipeline if args.pipeline > 1 else 1)
    args.ranks_per_machine = int(os.environ["LOCAL_WORLD_SIZE"])
    return args


def main() -> None:
    """Time every variant both ways; rank 0 prints and writes."""
    args = parse_arguments()
    rate = os.environ.get("LQ_EMULATED_RATE", "not emulated")
    with process_group(args) as device:
        setup = {"world_size": dist.get_world_size(), "node_size": args.node_size}
        setup |= {"tensor_parallel": args.tensor_parallel, "accumulate": args.accumulate}
        setup |= {"pipeline": args.pipeline, "microbatches": args.microbatches}
        setup |= {"emulated_rate": rate, "steps": args.steps, "model": asdict(args.config)}
        results: dict[str, dict[str, Any]] = {}
        for name in args.variants:
            results[name] = measure(SETUPS[name], args, device)
            if dist.get_rank() == 0:
                print(f"{name}: {results[name]}", flush=True)
                write_report(args.json, "lightning_step", {"setup": setup, "variants": results})
        if dist.get_rank() == 0:
            columns = ("loop_ms", "trainer_ms", "peak_gib", "last_loss")
            rows = [
                [name, *("-" if row.get(k) is None else f"{row[k]:.2f}" for k in columns)]
                for name, row in results.items()
            ]
            header = ["variant", "loop ms/step", "Trainer ms/step", "peak GiB", "last loss"]
            print(f"network: {rate}\n{table(rows, header)}")


if __name__ == "__main__":
    main()
