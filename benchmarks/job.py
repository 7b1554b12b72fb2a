"""A GPT with plain or quantized communication, for the benchmarks of step time and memory.

Raw torch, no Lightning; every variant gets the same model, data and optimizer. Sharded parameters
travel in bf16 and gradients in fp32, FSDP2's usual mixed-precision policy; DDP's forward runs under
autocast to bf16.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from common import synchronize
from gpt import GPT, GPTConfig
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from lq_lightning._compat.tensor_parallel import DATA, TENSOR, tensor_shard
from lq_lightning.data_parallel import (
    GradientQuantization,
    LocalSteps,
    OuterOptimizer,
    QuantizedAllReduce,
    QuantizedCommunication,
    Topology,
    WeightQuantization,
    quantize_communication,
    quantized_all_reduce_hook,
)
from lq_lightning.foundation.groups import RankGroups
from lq_lightning.optim import (
    OptimizerQuantization,
    QuantizedMuon,
    embedding_weights,
    muon_groups,
)

POWERSGD_RANK = 32
TINY = {"layers": 2, "hidden": 64, "heads": 2, "seq": 64, "vocab": 256}


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Communication of one measured configuration.

    Attributes:
        weights: Quantization of the weights; None leaves FSDP2's all-gather.
        gradients: Quantization of the gradients; None leaves FSDP2's reduce-scatter.
        reduce_dtype: Dtype of FSDP2's gradient reduction.
        communicate: False lets each rank train its own unsharded copy.
        ddp: Hook of DDP, which keeps unsharded copies, or ``"none"`` for its all-reduce in fp32;
            None shards with FSDP2.
        every: Steps that nodes train alone, each with a model sharded over its ranks (local steps);
            0 for none.
        overlaps: Whether fragments of these nodes travel in 2 bits while they train.
        optimizer: AdamW; or, for matrices, ``torch.optim.Muon``, or ``QuantizedMuon`` with states
            in fp32 or 8 bits.
    """

    weights: WeightQuantization | None = None
    gradients: GradientQuantization | None = None
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    communicate: bool = True
    ddp: Literal["none", "bf16", "8-bit", "powersgd"] | None = None
    every: int = 0
    overlaps: bool = False
    optimizer: Literal["adamw", "muon", "muon32", "muon8"] = "adamw"

    def make_optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Return the optimizers of a model."""
        if self.optimizer == "adamw":
            return [torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)]
        groups = muon_groups(model)
        options: dict[str, Any] = {"lr": 1e-4, "adjust_lr_fn": "match_rms_adamw"}
        if self.optimizer == "muon":
            matrices, others = ([param for _, param in group["params"]] for group in groups)
            adamw = torch.optim.AdamW(others, lr=1e-4, fused=True)
            return [torch.optim.Muon(matrices, **options), adamw]
        states = OptimizerQuantization()
        if self.optimizer == "muon32":
            states = OptimizerQuantization(first_moment="float32", second_moment="float32")
        kept = embedding_weights(model)
        return [QuantizedMuon(groups, **options, quantization=states, full_precision=kept)]


def _quantized(**gradients: Any) -> Variant:
    return Variant(weights=WeightQuantization(), gradients=GradientQuantization(**gradients))


VARIANTS = {
    "fsdp2": Variant(),
    "fsdp2-bf16-reduce": Variant(reduce_dtype="bfloat16"),
    "quantized": _quantized(),
    "quantized-node": replace(_quantized(), weights=WeightQuantization(replica="node")),
    "quantized-vocabulary-4": _quantized(vocabulary_bits=None),
    "weights-only": Variant(weights=WeightQuantization()),
    "gradients-only": Variant(gradients=GradientQuantization()),
    "ddp": Variant(ddp="none"),
    "ddp-bf16": Variant(ddp="bf16"),
    "ddp-8-bit": Variant(ddp="8-bit"),
    f"ddp-powersgd-{POWERSGD_RANK}": Variant(ddp="powersgd"),
    "local-32": Variant(every=32),
    "local-48-overlapped": Variant(every=48, overlaps=True),
    "no-communication": Variant(communicate=False),
    **{f"fsdp2-{name}": Variant(optimizer=name) for name in ("muon", "muon32", "muon8")},  # type: ignore[arg-type]
    "ddp-muon": Variant(ddp="none", optimizer="muon"),
    "ddp-muon8": Variant(ddp="none", optimizer="muon8"),
    "quantized-muon8": replace(_quantized(), optimizer="muon8"),
}


def random_batches(config: GPTConfig, size: int, group: int) -> Tensor:
    """Return four batches of random tokens, ``[4, B, T]`` int64 on the CPU, by group of ranks."""
    generator = torch.Generator().manual_seed(group)
    return torch.randint(config.vocab, (4, size, config.seq), generator=generator)


class Job:
    """One variant on one rank: the sharded model, its optimizer and its data.

    Args:
        variant: Configuration to measure.
        config: Sizes of the model.
        micro_batch: Sequences per rank and step.
        node_size: Ranks of one node.
        device: Device of this rank.
        tensor_parallel: Neighbouring ranks that share each layer, with its hidden states by token.
        compile_blocks: Whether to ``torch.compile`` each block, and the loss, before sharding.
        autocast: Whether the forward runs under autocast to bf16, as under Lightning's
            ``bf16-mixed``, with normalization and loss in fp32.
    """

    def __init__(
        self,
        variant: Variant,
        config: GPTConfig,
        *,
        micro_batch: int,
        node_size: int,
        device: torch.device,
        tensor_parallel: int = 1,
        compile_blocks: bool = False,
        autocast: bool = False,
    ) -> None:
        self.device, self.autocast = device, autocast or variant.ddp is not None
        rank, self.tensor_parallel = dist.get_rank(), tensor_parallel
        world_size, node_size = (
            dist.get_world_size() // tensor_parallel,
            node_size // tensor_parallel,
        )
        self.topology = Topology(
            world_size=world_size, rank=rank // tensor_parallel, node_size=node_size
        )
        self.communication: QuantizedCommunication | None = None
        group = dist.get_rank() // tensor_parallel  # whose ranks read the same
        self.data = random_batches(config, micro_batch, group).to(device)
        self.steps = 0
        self.local: OuterOptimizer | None = None
        with torch.device("meta"):
            self.model = GPT(config)
        self.called: nn.Module = self.model
        if variant.ddp is not None:
            self._replicate(variant, compile_blocks)
            return
        shards = node_size if variant.every else world_size if variant.communicate else 1
        axes = (world_size // shards, shards, tensor_parallel)
        mesh = init_device_mesh(device.type, axes, mesh_dim_names=("node", DATA, TENSOR))
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, variant.reduce_dtype)
        )
        options: dict[str, Any] = {"mesh": mesh[DATA], "mp_policy": policy}
        if tensor_parallel > 1:
            self.model.parallelize(mesh[TENSOR])
        if compile_blocks:
            self.model.compile_units(loss=tensor_parallel == 1)
        for block in self.model.blocks:
            fully_shard(block, **options)
        # Forward uses the head last, and backward needs it again at once.
        fully_shard(self.model.head, **options, reshard_after_forward=False)
        fully_shard(self.model, **options)
        self.model.to_empty(device=device)
        self.model.reset_local_shards(seed=rank)
        self.optimizers = variant.make_optimizers(self.model)
        if variant.weights is not None or variant.gradients is not None:
            self.communication = quantize_communication(
                self.model,
                weights=variant.weights,
                gradients=variant.gradients,
                topology=self.topology,
            )
            for optimizer in self.optimizers:
                self.communication.register_optimizer(optimizer)
        if variant.every:
            self._train_alone(variant.every, variant.overlaps, mesh)

    def _train_alone(self, every: int, overlaps: bool, mesh: DeviceMesh) -> None:
        """Let nodes train alone, with an outer step every so many steps."""
        if dist.group.WORLD is None:
            raise AssertionError("a job has a default process group")
        config = LocalSteps(every=every)
        if overlaps:
            count = min(12, len(self.model.blocks))
            config = replace(config, fragments=count, delay=every // count)
            config = replace(config, bits=2, error_feedback=True)
        self.local = OuterOptimizer(
            config,
            self.topology,
            RankGroups(dist.group.WORLD, mesh.get_group(DATA), mesh.get_group("node")),
            names={p: name for name, p in self.model.named_parameters()},
            min_quantized_numel=4096,
            device=self.device,
            units=["head", *(f"blocks.{index}" for index in range(len(self.model.blocks)))],
        )

    def _replicate(self, variant: Variant, compile_blocks: bool) -> None:
        """Give every rank a copy of the model under DDP.

        Raises:
            ValueError: DDP refuses its bf16 hook on a CPU.
        """
        if self.device.type == "cpu" and variant.ddp == "bf16":
            raise ValueError("the variant ddp-bf16 needs NCCL: leave it out on a CPU")
        self.model.to_empty(device=self.device)
        self.model.reset_local_shards(seed=0)
        if compile_blocks:
            self.model.compile_units()
        self.optimizers = variant.make_optimizers(self.model)
        node_size = self.topology.node_size
        self.called = ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        if variant.ddp == "bf16":
            ddp.register_comm_hook(None, bf16_compress_hook)
        elif variant.ddp == "8-bit":
            state = QuantizedAllReduce(min_nbytes=4 << 20, node_size=node_size)
            ddp.register_comm_hook(state, quantized_all_reduce_hook)
        elif variant.ddp == "powersgd":
            # Before iteration 2 DDP rebuilds its buckets, which PowerSGD cannot follow.
            power = PowerSGDState(
                None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=2
            )
            ddp.register_comm_hook(power, powerSGD_hook)

    def forward(self) -> Tensor:
        """Return the loss of the next batch."""
        batch = self.data[self.steps % len(self.data)]
        with torch.autocast(self.device.type, torch.bfloat16, self.autocast, cache_enabled=False):
            loss: Tensor = self.called(batch)
        return loss.to_local() if isinstance(loss, DTensor) else loss

    def losses(self) -> AbstractContextManager[object]:
        """Return the context of forward and backward."""
        return loss_parallel() if self.tensor_parallel > 1 else nullcontext()

    def own_numel(self, parameter: Tensor) -> int:
        """Return the elements that the ranks with this tensor-parallel number share."""
        split = tensor_shard(parameter) is not None
        return parameter.numel() // (self.tensor_parallel if split else 1)

    def update(self) -> None:
        """Apply the gradients and free them."""
        if self.local is not None:
            self.local.begin_step(self.optimizers[0])
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1
        if self.local is not None:
            self.local.steps += 1
            if self.local.is_due:
                self.local.exchange()

    def step(self) -> Tensor:
        """Train one step; return the loss, still on the device."""
        with self.losses():
            loss = self.forward()
            loss.backward()
        self.update()
        return loss.detach()


class Clock:
    """Marks moments, on CUDA on the stream, so that the host runs ahead as in training."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Remember this moment."""
        if self._cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def take(self) -> list[float]:
        """Return and forget the seconds between marks; wait for the device."""
        synchronize()
        pairs = itertools.pairwise(self._marks)
        found = [a.elapsed_time(b) / 1e3 if self._cuda else b - a for a, b in pairs]
        self._marks = []
        return found


def time_steps(job: Job, count: int) -> tuple[list[float], list[Tensor]]:
    """Take ``count`` steps; return the seconds of each on this rank, and the losses."""
    losses, clock = [], Clock(job.device)
    synchronize()
    clock.mark()
    for _ in range(count):
        losses.append(job.step())
        clock.mark()
    return clock.take(), losses


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that size the model and its batch, and those of the process group."""
    for name, value in asdict(GPTConfig()).items():
        parser.add_argument(f"--{name}", type=int, help=f"default {value}")
    parser.add_argument("--micro-batch", type=int, help="sequences per rank and step")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can run")
    parser.add_argument("--node-size", type=int, help="ranks per node (default: all on one node)")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, help="ranks that share each layer"
    )
    add_group_arguments(parser)


def add_group_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``process_group``."""
    parser.add_argument("--cpu", action="store_true", help="gloo on the CPU even if there are GPUs")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one collective")


def model_config(args: argparse.Namespace, defaults: dict[str, int] | None = None) -> GPTConfig:
    """Return the model that the options ask for.

    Args:
        args: Parsed options of :func:`add_model_arguments`.
        defaults: Sizes where no option gives one.
    """
    given = {name: getattr(args, name) for name in asdict(GPTConfig())}
    given = {name: value for name, value in given.items() if value is not None}
    return GPTConfig(**((TINY if args.tiny else defaults or {}) | given))


@contextmanager
def process_group(args: argparse.Namespace) -> Iterator[torch.device]:
    """Open the default process group, NCCL with GPUs and gloo without; yield this rank's device."""
    cuda = torch.cuda.is_available() and not args.cpu
    if cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=args.timeout))
    yield device
    dist.destroy_process_group()  # not after an error: it would wait for the other ranks


def over_ranks(values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    """Reduce each of the values over all ranks."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op)
    return [float(value) for value in tensor]


def without_nan(values: dict[str, float]) -> dict[str, float | None]:
    """Replace NaN by None, which JSON can hold."""
    return {name: None if math.isnan(value) else value for name, value in values.items()}
