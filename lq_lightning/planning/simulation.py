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

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import ClusterEnvironment
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lq_lightning._compat import simulation as compat
from lq_lightning._compat.modes import OperatorMode, written_by
from lq_lightning.activations import functions
from lq_lightning.data_parallel import all_gather
from lq_lightning.foundation import streams
from lq_lightning.kernels.checksum import checksums
from lq_lightning.kernels.optimizer_step import optimizer_step
from lq_lightning.pipeline.engine import PipelineEngine, batch_digest
from lq_lightning.pipeline.execution import Execution
from lq_lightning.pipeline.schedules import Action
from lq_lightning.strategies import parts
from lq_lightning.strategies.pipelines.logs import Logged, OutcomeBroadcast

from .trace import (
    COMPUTING,
    HOST,
    Allocate,
    Collective,
    CollectiveKind,
    Free,
    Mark,
    Operator,
    Phase,
    Record,
    Storage,
    Trace,
    Wait,
)

# Tensors of fewer bytes that are made from no other tensor may be the host's own: they stay real.
_REAL_NBYTES = 4096
_REAL_WHOLE_NBYTES = 2**24  # whole numbers: tokens, positions
_COLLECTIVES: dict[str, CollectiveKind] = {
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "recv",
}
_ONE_OPERAND = ("all_reduce", "broadcast", "send", "recv")  # kinds without an output of their own


class SimulationError(RuntimeError):
    """The module does something that cannot be done without values."""


class _Event:
    """A point in a stream; stands for ``torch.cuda.Event``."""

    def __init__(self, *unused: Any, **options: Any) -> None:
        self.number: int | None = None

    def record(self, stream: _Stream | None = None) -> _Event:
        recorder = _Recorder.active
        recorder.note_event(self, (stream or recorder.stream).number)
        return self

    def wait(self, stream: _Stream | None = None) -> None:
        (stream or _Recorder.active.stream).wait_event(self)

    def synchronize(self) -> None:
        if self.number is not None:
            _Recorder.active.trace.events.append(Wait(HOST, self.number))

    def query(self) -> bool:
        return True


class _Stream:
    """A stream that records who waits for it; stands for ``torch.cuda.Stream``."""

    def __init__(self, *unused: Any, **options: Any) -> None:
        recorder = _Recorder.active
        self.number = recorder.num_streams
        self.device = torch.device("cpu")
        recorder.num_streams += 1

    def record_event(self, event: _Event | None = None) -> _Event:
        return (event or _Event()).record(self)

    def wait_event(self, event: _Event) -> None:
        if event.number is not None:
            _Recorder.active.trace.events.append(Wait(self.number, event.number))

    def wait_stream(self, other: _Stream) -> None:
        if other is not self:
            self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


class _Recorder(OperatorMode):
    """Computes shapes, and writes down operators, memory and messages."""

    active: _Recorder

    def __init__(self, trace: Trace, told: Sequence[Any]) -> None:
        super().__init__()
        self.trace, self._told = trace, list(told)
        self.phase: Phase = "setup"
        self.action: tuple[str, int, int] | None = None
        self.num_streams, self._num_events = 0, 0
        _Recorder.active = self
        self.stream = _Stream()
        self.fake_mode: Any = compat.new_fake_mode()
        self._alive: dict[int, tuple[Storage, Any]] = {}
        self._closed = False

    # --- operators ------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        device = compat.device_of(func)
        if device is not None:
            return device
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        fake = any(compat.is_fake(tensor) for tensor in tensors)
        name = str(func)
        if fake and name in _READS:
            return self._read(name, args[0])
        if not fake and not self._makes_large(func, args, kwargs):
            return func(*args, **kwargs)
        try:
            with self.fake_mode:
                result = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise SimulationError(
                f"`{name}` cannot be simulated: {str(error).splitlines()[0]}. What a module does "
                "has to depend on the shapes of its inputs, not on their values."
            ) from error
        if self._closed:
            return result
        results = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        source = _source(sys._getframe(1))
        made = [t for t in results if self._allocated(t, name, source)]
        if func.namespace in ("c10d", "_c10d_functional"):
            self._send(func, tensors, args, source)
        elif not compat.is_view(func) and tensors + results:
            changed = [*made, *written_by(func, args, kwargs)]
            self.trace.events.append(
                Operator(
                    name=name,
                    stream=self.stream.number,
                    phase=self.phase,
                    source=source,
                    flops=compat.flops_of(func, args, kwargs, result),
                    read_nbytes=sum({id(t): _nbytes(t) for t in tensors}.values()),
                    written_nbytes=sum({id(t): _nbytes(t) for t in changed}.values()),
                    dtype=(tensors or results)[0].dtype,
                    shapes=tuple(tuple(t.shape) for t in tensors),
                    action=self.action,
                )
            )
        return result

    def _makes_large(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether an operator on real tensors, or on none, makes a tensor of the device."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            return False  # such as the meta device
        name = str(func)
        if name in _MADE_OF_SIZES:
            numel = 1
            for size in next((a for a in args if isinstance(a, (list, tuple))), ()):
                numel *= int(size)
        elif name in _MADE_LIKE:
            numel = args[0].numel()
        else:
            return False
        dtype = kwargs.get("dtype") or torch.float32
        limit = _REAL_WHOLE_NBYTES if dtype in (torch.int64, torch.int32) else _REAL_NBYTES
        return numel * dtype.itemsize >= limit

    def _read(self, name: str, tensor: Tensor) -> Any:
        self._host_waits()
        if name == "aten.equal.default":
            return True
        if tensor.dtype is torch.bool:
            return False
        return 1.0 if tensor.dtype.is_floating_point else 0

    def _host_waits(self) -> None:
        self.stream.record_event().synchronize()

    def note_event(self, event: _Event, stream: int) -> None:
        """Record an event in a stream."""
        event.number = self._num_events
        self._num_events += 1
        self.trace.events.append(Record(stream, event.number))

    def _send(self, func: Any, tensors: list[Tensor], args: Sequence[Any], source: str) -> None:
        name = func._schema.name.rpartition("::")[2]
        kind = next(
            (k for begin, k in _COLLECTIVES.items() if name.removesuffix("_").startswith(begin)),
            None,
        )
        if kind is None or not tensors:  # waits and barriers
            return
        sent = tensors if kind in _ONE_OPERAND else _inputs(args, tensors)
        self._collect(kind, sent, compat.ranks_of(args), source)

    def _collect(
        self, kind: CollectiveKind, sent: Sequence[Tensor], members: list[int], source: str
    ) -> None:
        nodes = len({rank // self.trace.gpus_per_node for rank in members})
        nbytes = sum(map(_nbytes, sent))
        where = (self.stream.number, self.phase, source, self.action)
        self.trace.events.append(Collective(kind, nbytes, len(members), nodes, *where))

    def gather_parts(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: dist.ProcessGroup
    ) -> None:
        """Note one collective for all parts: the fake group has none of this kind."""
        self._collect("all_gather", list(inputs), dist.get_process_group_ranks(group), _GATHER)

    # --- pipelines ------------------------------------------------------------------------------

    @property
    def compute(self) -> Callable[[Execution, Action], None]:
        """Stands for the method that computes one action, and notes which one it is."""
        own = Execution.compute

        def compute(execution: Execution, action: Action) -> None:
            self.action = (action.kind, action.stage, action.microbatch)
            self.phase = "forward" if action.kind == "F" else "backward"
            try:
                own(execution, action)
            finally:
                self.action = None

        return compute

    def share(self, value: Any) -> Any:
        """What the rank of the first stage tells the others; other ranks' traces follow its own."""
        if value is not None:
            self.trace.told.append(value)
            return value
        told = self._told
        if not told:
            raise SimulationError(
                "a rank behind the first pipeline stage is simulated after the trace of a rank of "
                "the first stage, which tells it the shapes of hidden states: give `first`."
            )
        return told.pop(0)

    @property
    def share_outcome(self) -> Any:
        """Stands for the broadcast of the last stage's loss, which other ranks take to be 1."""
        own = OutcomeBroadcast.share

        def share(outcome: Any, step: str, losses: list[Any], logged: Any) -> Any:
            if outcome.is_source:
                return own(outcome, step, losses, logged)
            return torch.ones(()), Logged(calls=(), values=torch.zeros(0, dtype=torch.float64))

        return share

    def launch(self, name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Note a kernel that is launched without an operator of the dispatcher."""
        self.trace.events.append(
            Operator(
                name=f"lq_lightning.{name}.default",
                stream=self.stream.number,
                phase=self.phase,
                source=_source(sys._getframe(1)),
                flops=0,
                read_nbytes=sum(map(_nbytes, read)),
                written_nbytes=sum(map(_nbytes, written)),
                dtype=read[0].dtype,
                shapes=tuple(tuple(t.shape) for t in read),
                action=self.action,
            )
        )

    def optimizer_step(
        self,
        tensors: Sequence[Sequence[Tensor]],
        prepared: Sequence[Any],
        grads: Sequence[Tensor],
        *unused: Any,
    ) -> None:
        """Stands for the kernel of the quantized optimizers."""
        changed = [part for parts in tensors for part in parts]
        if changed:
            self.launch("optimizer_step", [*changed, *grads], changed)

    def checksums(self, tensors: Sequence[Tensor]) -> Tensor:
        """Stands for the kernel that reads tensors for their checksums, which never change."""
        if tensors:
            self.launch("checksums", tensors, ())
        return torch.zeros(len(tensors), dtype=torch.int64)

    # --- memory ---------------------------------------------------------------------------------

    def _allocated(self, tensor: Tensor, operator: str, source: str) -> bool:
        """Note a tensor's storage; return whether it is new."""
        if not compat.is_fake(tensor):
            return False
        key = compat.storage_id(tensor)
        if key in self._alive:
            return False
        held = tensor.untyped_storage()
        self._note(key, held.nbytes(), tensor, operator, source)
        self._alive[key] = (self._alive[key][0], weakref.finalize(held, self._freed, key))
        return True

    def _note(self, key: int, nbytes: int, tensor: Tensor, operator: str, source: str) -> None:
        storage = Storage(
            nbytes,
            self.stream.number,
            self.phase,
            operator,
            source,
            tuple(tensor.shape),
            tensor.dtype,
        )
        storage.born = len(self.trace.events)
        self.trace.events.append(Allocate(storage))
        self._alive[key] = (storage, self._alive.get(key, (None, None))[1])

    def _freed(self, key: int) -> None:
        storage, _ = self._alive.pop(key, (None, None))
        self._end(storage)

    def _end(self, storage: Storage | None) -> None:
        if storage is None or storage.died is not None or self._closed:
            return
        storage.died = len(self.trace.events)
        self.trace.events.append(Free(storage))

    def free(self, tensor: Tensor) -> None:
        """FSDP2 frees the memory of a tensor that lives on."""
        if compat.is_fake(tensor):
            storage, _ = self._alive.get(compat.storage_id(tensor), (None, None))
            self._end(storage)

    def allocate(self, tensor: Tensor) -> None:
        """FSDP2 gives such a tensor memory again."""
        if not compat.is_fake(tensor):
            return
        key = compat.storage_id(tensor)
        storage, _ = self._alive.get(key, (None, None))
        if storage is None or storage.died is not None:
            nbytes = tensor.untyped_storage().nbytes()
            self._note(key, nbytes, tensor, "", _source(sys._getframe(1)))

    def name_owners(self, trainer: Trainer, module: LightningModule) -> None:
        """Note which memory parameters, their gradients, buffers and optimizers hold now."""
        for parameter in module.parameters():
            self._own(parameter, "parameter")
            self._own(parameter.grad, "gradient")
        for buffer in module.buffers():
            self._own(buffer, "buffer")
        for optimizer in trainer.optimizers:
            for tensor in tree_leaves(list(optimizer.state.values())):
                self._own(tensor, "optimizer state")

    def _own(self, tensor: Any, owner: str) -> None:
        local = getattr(tensor, "_local_tensor", tensor)
        if compat.is_fake(local):
            storage, _ = self._alive.get(compat.storage_id(local), (None, None))
            if storage is not None and not storage.owner:
                storage.owner = owner

    @contextmanager
    def on(self, stream: _Stream | None) -> Iterator[None]:
        """Give work to a stream."""
        before, self.stream = self.stream, stream or self.stream
        try:
            yield
        finally:
            self.stream = before

    def close(self) -> None:
        """Record nothing more: what is freed now lives as long as the run."""
        self._closed = True


_READS = {"aten._local_scalar_dense.default", "aten.equal.default", "aten.is_nonzero.default"}
_MADE_OF_SIZES = {
    *("aten.empty.memory_format", "aten.zeros.default", "aten.ones.default", "aten.full.default"),
    *("aten.rand.default", "aten.randn.default", "aten.empty_strided.default"),
    *("aten.randint.default", "aten.randint.low", "aten.randperm.default"),
    *("aten.new_empty.default", "aten.new_zeros.default", "aten.new_full.default"),
}
_MADE_LIKE = {
    *("aten.empty_like.default", "aten.zeros_like.default", "aten.ones_like.default"),
    *("aten.rand_like.default", "aten.randn_like.default", "aten.full_like.default"),
}


_GATHER = "lq_lightning/data_parallel/all_gather.py"


def _everywhere(function: Any, replacement: Any) -> Iterator[tuple[Any, str, Any]]:
    """Where our modules have imported a function, with what stands for it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("lq_lightning.") and not name.startswith("lq_lightning.planning"):
            found = [n for n, value in vars(module).items() if value is function]
            yield from ((module, each, replacement) for each in found)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _inputs(args: Sequence[Any], tensors: list[Tensor]) -> list[Tensor]:
    """Tensors that a collective sends: those of its second argument, if it has two of tensors."""
    groups = [[t for t in tree_leaves(arg) if isinstance(t, Tensor)] for arg in args[:2]]
    return groups[1] if len(groups) == 2 and groups[1] else tensors


_TORCH = compat.torch_folder()
_OURS = __file__.rpartition("/planning/")[0]
_ENGINE = f"{_TORCH}/autograd/graph.py"
_FSDP2 = f"{_TORCH}/distributed/fsdp/"
_PASSING_ON = ("/planning", "/_compat", "/kernels", "/strategies", "/plugins", "/codecs")
_CALLERS = (f"{_TORCH}/optim/", f"{_TORCH}/nn/utils/")


def _source(frame: Any) -> str:
    """File of ours, of FSDP2 or of an optimizer that called an operator; empty if none did."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OURS):
            inside = file[len(_OURS) :]
            if not inside.startswith(_PASSING_ON):
                return f"lq_lightning{inside}"
        elif file.startswith(_FSDP2) or file.startswith(_CALLERS):
            return f"torch{file[len(_TORCH) :]}"
        elif file == _ENGINE or not file.startswith(_TORCH) or "/nn/modules/" in file:
            return ""
        frame = frame.f_back
    return ""


# --- the Trainer --------------------------------------------------------------------------------


class SimulatedCluster(ClusterEnvironment):
    """Places this process as one rank among many.

    Args:
        rank: Number of the rank.
        world_size: Ranks of the run.
        gpus_per_node: Ranks of a node.
    """

    def __init__(self, rank: int, world_size: int, gpus_per_node: int) -> None:
        super().__init__()
        self._rank, self._world_size, self._per_node = rank, world_size, gpus_per_node

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    @override
    def main_port(self) -> int:
        return 1

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return self._world_size

    @override
    def set_world_size(self, size: int) -> None:
        """It is given."""

    @override
    def global_rank(self) -> int:
        return self._rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """It is given."""

    @override
    def local_rank(self) -> int:
        return self._rank % self._per_node

    @override
    def node_rank(self) -> int:
        return self._rank // self._per_node


class _Marks(Callback):
    """Marks the parts of each step."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    def _mark(self, name: str, phase: Phase, trainer: Trainer) -> None:
        self._recorder.trace.events.append(Mark(name, trainer.global_step))
        self._recorder.phase = phase

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        trace = self._recorder.trace
        leaves = [t for t in tree_leaves(batch) if isinstance(t, Tensor)]
        whole = [t for t in leaves if not t.is_floating_point()]
        trace.tokens = max((t.numel() for t in whole), default=len(leaves[0]) if leaves else 0)
        self._mark("batch", "forward", trainer)

    @override
    def on_before_backward(self, trainer: Trainer, *unused: Any) -> None:
        self._mark("backward", "backward", trainer)

    @override
    def on_after_backward(self, trainer: Trainer, *unused: Any) -> None:
        self._recorder.phase = "other"

    @override
    def on_before_optimizer_step(self, trainer: Trainer, *unused: Any) -> None:
        self._mark("optimizer", "optimizer", trainer)

    @override
    def on_train_batch_end(self, trainer: Trainer, *unused: Any) -> None:
        self._mark("stepped", "other", trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark("end", "other", trainer)
        self._recorder.trace.steps = trainer.global_step
        self._recorder.name_owners(trainer, pl_module)
        self._recorder.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedRank:
    """Which rank to simulate, of how many.

    Attributes:
        rank: Number of the rank.
        world_size: Ranks of the run.
        gpus_per_node: Ranks of a node.
        nvlink: Whether NVLink joins the GPUs of a node.
    """

    rank: int = 0
    world_size: int = 1
    gpus_per_node: int = 1
    nvlink: bool = True

    def trainer_overrides(self, steps: int, marks: Callback) -> dict[str, Any]:
        """Keywords that replace the user's own for a Trainer."""
        return {
            "accelerator": "cpu",
            "devices": min(self.gpus_per_node, self.world_size),
            "num_nodes": max(1, self.world_size // self.gpus_per_node),
            "plugins": [SimulatedCluster(self.rank, self.world_size, self.gpus_per_node)],
            "callbacks": [marks],
            "max_steps": steps,
            "max_epochs": -1,
            "max_time": None,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            "use_distributed_sampler": False,
            "benchmark": False,
            "profiler": None,
            "fast_dev_run": False,
        }


Build = Callable[[dict[str, Any]], tuple[Trainer, LightningModule, Any]]
"""Makes Trainer, module and data (a DataLoader or a LightningDataModule) inside the simulation.

``plugins`` and ``callbacks`` of the given keywords are appended to the user's own, all others
replace them.
"""


def simulate_fit(
    build: Build, place: SimulatedRank, *, steps: int = 3, first: Trace | None = None
) -> Trace:
    """Run ``fit`` for a few optimizer steps as one rank, without GPU, and record it.

    Args:
        build: Makes what is trained.
        place: The rank.
        steps: Optimizer steps. The first gathers replicas and makes states, later ones are alike.
        first: Trace of a rank of the first pipeline stage, for a rank of another one.

    Raises:
        SimulationError: The module's operators depend on values, or it trains no step.
        RuntimeError: This process belongs to a process group.
    """
    trace = Trace(place.rank, place.world_size, place.gpus_per_node)
    with _simulation(place, trace, () if first is None else first.told) as recorder:
        overrides = place.trainer_overrides(steps, _Marks(recorder))
        trainer, module, data = build(overrides)
        trace.microbatches = trainer.accumulate_grad_batches
        trainer.fit(module, data)
        recorder.close()
    if trace.steps < steps:
        raise SimulationError(
            f"`fit` ended after {trace.steps} of {steps} optimizer steps: the data have too few "
            "batches, or a callback stopped it."
        )
    return trace


@contextmanager
def _simulation(place: SimulatedRank, trace: Trace, told: Sequence[Any]) -> Iterator[_Recorder]:
    recorder = _Recorder(trace, told)

    def on_stream(stream: _Stream | None) -> AbstractContextManager[None]:
        return recorder.on(stream)

    def current_stream(*unused: Any) -> _Stream:
        return recorder.stream

    def compiled(function: Any = None, **options: Any) -> Any:
        trace.compiled = True
        return function if function is not None else lambda f: f

    as_torch = {
        "Stream": _Stream,
        "Event": _Event,
        "stream": on_stream,
        "current_stream": current_stream,
    }
    ours: list[tuple[Any, str, Any]] = [
        (streams, "has_streams", lambda device: True),
        (streams, "new_stream", _Stream),
        (streams, "current_stream", current_stream),
        (streams, "on_stream", on_stream),
        (streams, "record_use", lambda tensor: None),
        (parts, "nvlink_inside_nodes", lambda device, node_size: place.nvlink),
        (all_gather, "all_gather_parts", recorder.gather_parts),
        (torch, "compile", compiled),
        (LightningModule, "cpu", lambda module: module),  # after training
    ]
    ours += [
        (Execution, "compute", recorder.compute),
        (PipelineEngine, "share", recorder.share),
        (OutcomeBroadcast, "share", recorder.share_outcome),
    ]
    ours += [*_everywhere(checksums, recorder.checksums)]
    ours += [*_everywhere(batch_digest, lambda batch: b"")]
    ours += [*_everywhere(optimizer_step, recorder.optimizer_step)]
    own_dtype = functions.output_dtype

    def output_dtype(layer: Any, dtype: torch.dtype, weight: Any, device: str) -> torch.dtype:
        if layer.functional and device != "meta" and torch.is_autocast_enabled(device):
            return torch.float32
        return own_dtype(layer, dtype, weight, device)

    ours.append((functions, "output_dtype", output_dtype))
    with ExitStack() as stack:
        stack.enter_context(compat.alike_ranks(place.rank, place.world_size))
        stack.enter_context(compat.gpu_ways(as_torch, recorder.allocate, recorder.free))
        for module, name, value in ours:
            stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(recorder)
        yield recorder


def without_memory(module: LightningModule) -> LightningModule:
    """Copy a module that was made outside of the simulation; for use inside."""
    copy: Any = compat.fake_copy(module, _Recorder.active.fake_mode)
    return copy  # type: ignore[no-any-return]
