"""Run a Trainer's ``fit`` as one rank of many, without GPUs, and record what it does.

[Note: simulation]

The user's LightningModule, our strategies, plugins and callbacks, FSDP2 and the optimizers run as
they are. Only these are replaced:

- *Tensors* have no memory (``FakeTensor``), so operators compute shapes alone. Small ones that are
  made from values of the host (rank maps, flags, counts) stay real, as does a batch: code that
  branches on them works. Values read from tensors without memory are 0, 1.0 or False: a loss of 1,
  no overflow, no drift.
- *Other ranks* hold what this one holds: collectives of tensors do nothing, of objects return
  copies (``_compat/simulation.py``).
- *Streams* record what waits for what. The device is called ``cpu``, but streams, autocast,
  ``foreach`` optimizers and NVLink are as on GPUs.

What depends on values (experts by routing, data-dependent shapes) cannot be simulated and says so.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import FunctionType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_only

from lq_lightning._compat import simulation as compat
from lq_lightning._compat.torch import any_rank, in_step, meet, read_note, set_timeouts
from lq_lightning.activations import functions, host_memory
from lq_lightning.adaptive.optimizer import GateOptimizer
from lq_lightning.callbacks import activation_quantization
from lq_lightning.data_parallel import all_gather, all_reduce
from lq_lightning.foundation import streams
from lq_lightning.kernels.checksum import checksums
from lq_lightning.kernels.optimizer_step.op import optimizer_step
from lq_lightning.pipeline.engine import PipelineEngine, batch_digest
from lq_lightning.pipeline.execution import Execution
from lq_lightning.strategies import parts, token_shares
from lq_lightning.strategies.pipelines.logs import OutcomeBroadcast
from lq_lightning.strategies.tensor_parallel import TensorRanks

from .machine import Machine
from .recorder import Recorder, SimulatedEvent, SimulatedStream, SimulationError
from .trace import Mark, Phase, Trace

_HOOKS: dict[str, tuple[str, Phase]] = {  # the mark that they set, and the phase that begins
    "on_fit_start": ("placed", "setup"),
    "on_train_batch_start": ("batch", "forward"),
    "on_before_backward": ("backward", "backward"),
    "on_after_backward": ("", "other"),
    "on_before_optimizer_step": ("optimizer", "optimizer"),
    "on_train_batch_end": ("stepped", "other"),
    "on_train_end": ("end", "other"),
}


class _Marks(Callback):
    """Marks the parts of each step."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        for hook, (name, phase) in _HOOKS.items():
            setattr(self, hook, partial(self._mark, name, phase))

    def _mark(
        self, name: str, phase: Phase, trainer: Trainer, module: LightningModule, *more: Any
    ) -> None:
        recorder, trace = self._recorder, self._recorder.trace
        recorder.phase = phase
        if name == "batch":
            gc.collect()
            recorder.begin_batch(more[0])
        if phase == "other":
            recorder.join()
        if name:
            trace.events.append(Mark(name, trainer.global_step))
        if name == "end":
            trace.steps = trainer.global_step
            recorder.name_owners(trainer, module)
            recorder.close()


TRAINING_ALONE: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "fast_dev_run": False,
    "max_time": None,
    "max_epochs": -1,
    "profiler": None,
}
"""Keywords of a Trainer that trains, and neither logs, saves nor validates."""


def _environment(machine: Machine, rank: int) -> dict[str, str]:
    """What ``torchrun`` would tell a rank."""
    node, local_rank = divmod(rank, machine.gpus_per_node)
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": machine.world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": machine.gpus_per_node,
        "GROUP_RANK": node,
        "MASTER_PORT": 1,
    }
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(n) for name, n in numbers.items()}}


Overrides = Mapping[str, Any]
UserRun = tuple[Trainer, LightningModule, Any]
Build = Callable[[Overrides], UserRun]
"""Makes Trainer, module and data (a DataLoader or a LightningDataModule) inside the simulation.

``plugins`` and ``callbacks`` of the given keywords are appended to the user's own, all others
replace them.
"""


def simulate_fit(
    build: Build, machine: Machine, rank: int = 0, *, steps: int = 3, first: Trace | None = None
) -> Trace:
    """Run ``fit`` for a few optimizer steps as one rank, without GPU, and record it.

    Args:
        build: Makes what is trained.
        machine: Where all ranks run.
        rank: The rank.
        steps: Optimizer steps. The first gathers replicas and makes states, later ones are alike.
        first: Trace of a rank of the first pipeline stage, for a rank of another one.

    Raises:
        SimulationError: The module's operators depend on values, it trains no step, or this
            process belongs to a process group.
    """
    if dist.is_initialized():
        raise SimulationError(
            "a plan simulates ranks of its own, but this process belongs to a process group "
            "already: plan before training starts, or in another process."
        )
    trace = Trace(rank, machine.world_size, machine.gpus_per_node)
    with _simulation(machine, trace, () if first is None else first.told) as recorder:
        overrides = {
            "accelerator": "cpu",
            "devices": machine.gpus_per_node,
            "num_nodes": machine.nodes,
            "plugins": [TorchElasticEnvironment()],
            "callbacks": [_Marks(recorder)],
            "max_steps": steps,
            "use_distributed_sampler": False,
            "benchmark": False,
            **TRAINING_ALONE,
        }
        trainer, module, data = build(overrides)
        compat.stay_in_process(trainer)
        trace.microbatches = trainer.accumulate_grad_batches
        trainer.fit(module, data)
        recorder.close()
    if trace.steps < steps:
        raise SimulationError(
            f"`fit` ended after {trace.steps} of {steps} optimizer steps: the data have too few "
            "batches, or a callback stopped it."
        )
    return trace


def _everywhere(replacements: Mapping[Any, Any]) -> Iterator[tuple[Any, str, Any]]:
    """Where our modules have imported functions, with what stands for them."""
    for place, module in list(sys.modules.items()):
        if place.startswith("lq_lightning.") and not place.startswith("lq_lightning.planning"):
            for name, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and value in replacements:
                    yield module, name, replacements[value]


@contextmanager
def _simulation(machine: Machine, trace: Trace, told: Sequence[Any]) -> Iterator[Recorder]:
    recorder = Recorder(trace, told)
    fp8 = machine.gpu.products.get("float8", 0) > 0
    without_float8 = None if fp8 else f"{machine.gpu.name} has no FP8 products."

    def on_stream(stream: SimulatedStream | None) -> AbstractContextManager[None]:
        return recorder.on(stream)

    def current_stream(*unused: Any) -> SimulatedStream:
        return recorder.stream

    def compiled(function: Any = None, **options: Any) -> Any:
        trace.compiled = True
        return function if function is not None else lambda f: f

    as_torch = {
        "Stream": SimulatedStream,
        "Event": SimulatedEvent,
        "stream": on_stream,
        "current_stream": current_stream,
    }
    ours: list[tuple[Any, str, Any]] = [
        (streams, "has_streams", lambda device: True),
        (streams, "new_stream", SimulatedStream),
        (streams, "current_stream", current_stream),
        (streams, "on_stream", on_stream),
        (streams, "record_use", recorder.note_use),
        (host_memory, "host_memory", recorder.pin),
        (parts, "nvlink_inside_nodes", lambda device, node_size: machine.nvlink),
        (all_gather, "all_gather_parts", recorder.gather_parts),
        (all_reduce, "_ranks_per_host", lambda: machine.gpus_per_node),
        (functions, "scaled_mm", recorder.scaled_mm),
        (activation_quantization, "float8_matmul_available", lambda device: without_float8),
        (torch, "compile", compiled),
        # both compare values of ranks
        (token_shares.Proof, "__call__", lambda *unused: None),
        (TensorRanks, "check_gradients", lambda ranks: None),
        (GateOptimizer, "step", lambda gates, taken=None, scale=1.0: None),  # learns from values
        (LightningModule, "cpu", lambda module: module),  # after training
        (Execution, "compute", recorder.compute),
        (PipelineEngine, "share", recorder.share),
        (OutcomeBroadcast, "share", recorder.share_outcome),
    ]
    ours += _everywhere(
        {
            checksums: recorder.checksums,
            optimizer_step: recorder.optimizer_step,
            batch_digest: lambda batch: b"",
            # ranks meet in the store, where all others have done what this one did
            any_rank: lambda key, flag, timeout: flag,
            in_step: lambda key, groups: True,
            meet: lambda key, timeout: True,
            read_note: lambda key, timeout: None,
            set_timeouts: lambda timeout: None,
        }
    )
    own_dtype = functions.output_dtype

    def output_dtype(layer: Any, dtype: torch.dtype, weight: Any, device: str) -> torch.dtype:
        if layer.functional and device != "meta" and torch.is_autocast_enabled(device):
            return torch.float32
        return own_dtype(layer, dtype, weight, device)

    ours.append((functions, "output_dtype", output_dtype))
    with ExitStack() as stack:
        if gc.isenabled():  # cycles of tensors are freed between batches, so that plans are equal
            stack.callback(gc.enable)
            gc.disable()
        stack.enter_context(compat.restored_generators())
        stack.enter_context(mock.patch.dict(os.environ, _environment(machine, trace.rank)))
        rank = getattr(rank_zero_only, "rank", None)  # which decides whether this process warns
        stack.enter_context(mock.patch.object(rank_zero_only, "rank", rank, create=True))
        stack.enter_context(compat.alike_ranks(trace.rank, trace.world_size))
        own = recorder.allocate, recorder.free, recorder.reducing
        stack.enter_context(compat.gpu_ways(as_torch, *own))
        for module, name, value in ours:
            stack.enter_context(mock.patch.object(module, name, value))
        stack.callback(delattr, Recorder, "active")  # with all that it has recorded
        stack.enter_context(recorder)
        yield recorder
