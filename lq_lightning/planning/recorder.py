"""Writes down what a simulated rank does; see [Note: simulation] in ``simulation.py``."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from lq_lightning._compat import simulation as compat
from lq_lightning._compat.modes import OperatorMode, operation_name, written_by
from lq_lightning._compat.saved_tensors import storage_key
from lq_lightning._compat.tensors import local_tensor
from lq_lightning.pipeline.execution import Execution
from lq_lightning.pipeline.schedules import Action
from lq_lightning.strategies.pipelines.logs import Logged, OutcomeBroadcast

from .trace import (
    HOST,
    SHARDED,
    Allocate,
    Collective,
    CollectiveKind,
    Free,
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


class SimulatedEvent:
    """A point in a stream; stands for ``torch.cuda.Event``."""

    def __init__(self, *unused: Any, **options: Any) -> None:
        self.number: int | None = None

    def record(self, stream: SimulatedStream | None = None) -> SimulatedEvent:
        """Note that the stream, by default the current one, reached this point."""
        recorder = Recorder.active
        self.number = recorder.note_event(stream or recorder.stream)
        return self

    def wait(self, stream: SimulatedStream | None = None) -> None:
        """Let the stream, by default the current one, wait."""
        (stream or Recorder.active.stream).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait."""
        if self.number is not None:
            Recorder.active.trace.events.append(Wait(HOST, self.number))

    def query(self) -> bool:
        """Whether it is over."""
        return True


class SimulatedStream:
    """A stream that records who waits for it; stands for ``torch.cuda.Stream``."""

    def __init__(self, *unused: Any, **options: Any) -> None:
        recorder = Recorder.active
        self.number = recorder.num_streams
        self.device = torch.device("cpu")
        recorder.num_streams += 1

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        """Note this point of the stream."""
        return (event or SimulatedEvent()).record(self)

    def wait_event(self, event: SimulatedEvent) -> None:
        """Wait for a point of another stream."""
        if event.number is not None:
            Recorder.active.trace.events.append(Wait(self.number, event.number))

    def wait_stream(self, other: SimulatedStream) -> None:
        """Wait for all work of another stream so far."""
        if other is not self:
            self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Let the host wait for all work so far."""
        self.record_event().synchronize()


class Recorder(OperatorMode):
    """Computes shapes, and writes down operators, memory and messages."""

    active: Recorder

    def __init__(self, trace: Trace, told: Sequence[Any]) -> None:
        super().__init__()
        self.trace, self._told = trace, list(told)
        self.phase: Phase = "setup"
        self.action: tuple[str, int, int] | None = None
        self.num_streams, self._num_events = 0, 0
        Recorder.active = self
        self.stream = SimulatedStream()
        self._reducing: SimulatedStream | None = None  # of DDP's messages
        self._reduces = False
        self._buckets: set[Storage] = set()
        self.fake_mode: Any = compat.new_fake_mode()
        self._alive: dict[int, Storage] = {}
        self._table: Any = None
        self._closed = False

    # --- operators ------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute shapes, and note the operator."""
        if any(issubclass(each, DTensor) for each in types):
            if not self._closed:
                self._note_operator(SHARDED, [], [], flops=0, dtype=torch.float32)
            return NotImplemented  # the operators on their parts follow
        if func is torch.ops.prim.device.default:
            return torch.device("cpu")
        kwargs = kwargs or {}
        tensors = [t for t in compat.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        fake = any(compat.is_fake(tensor) for tensor in tensors)
        name = str(func)
        if name == "aten.embedding.default" and self.phase == "forward":
            self._count_tokens(*args[:2])
        if fake and name in _READS:
            return self._read(name, args[0])
        operands = compat.operands_of_fake_group(name, args)
        if not fake and not self._makes_large(func, name, args, kwargs):
            return compat.with_values(func, func(*operands, **kwargs))
        try:
            with self.fake_mode:
                result = compat.with_values(func, func(*operands, **kwargs))
        except (RuntimeError, NotImplementedError) as error:
            raise SimulationError(
                f"`{name}` cannot be simulated: {str(error).splitlines()[0]}. What a module does "
                "has to depend on the shapes of its inputs, not on their values."
            ) from error
        if self._closed:
            return result
        results = [t for t in compat.tree_leaves(result) if isinstance(t, Tensor)]
        made = [t for t in results if self._allocated(t, name)]
        if func.namespace in ("c10d", "_c10d_functional"):
            self._send(func, tensors, args)
        elif not func.is_view and tensors + results:
            self._note_operator(
                name,
                tensors,
                [*made, *written_by(func, args, kwargs)],
                flops=compat.flops_of(func, args, kwargs, result),
                dtype=(tensors or results)[0].dtype,
                options=tuple(argument for argument in args if isinstance(argument, str)),
            )
        return result

    def _note_operator(
        self, name: str, read: Sequence[Tensor], written: Sequence[Tensor], **others: Any
    ) -> None:
        self.trace.events.append(
            Operator(
                name=name,
                stream=self.stream.number,
                phase=self.phase,
                read_nbytes=sum({id(t): t.nbytes for t in read}.values()),
                written_nbytes=sum({id(t): t.nbytes for t in written}.values()),
                shapes=tuple(tuple(t.shape) for t in read),
                action=self.action,
                **others,
            )
        )

    def _makes_large(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether an operator on real tensors, or on none, makes a tensor of the device."""
        device = torch.device(kwargs.get("device") or "cpu")
        if name not in _MAKERS or device.type != "cpu":  # such as the meta device
            return False
        with self.fake_mode:
            made = func(*args, **kwargs)
        is_whole = made.dtype in (torch.int64, torch.int32)
        return bool(made.nbytes >= (_REAL_WHOLE_NBYTES if is_whole else _REAL_NBYTES))

    def begin_batch(self, batch: Any) -> None:
        """Count tokens anew: those of the batch, unless its forward embeds any."""
        leaves = [t for t in compat.tree_leaves(batch) if isinstance(t, Tensor)]
        whole = [t.numel() for t in leaves if not t.is_floating_point()]
        self.trace.tokens = max(whole, default=len(leaves[0]) if leaves else 0)
        self._table = None

    def _count_tokens(self, weight: Tensor, indices: Tensor) -> None:
        """Count what the first table embeds, in all parts of a batch; others embed positions."""
        if self._table is None:
            self._table, self.trace.tokens = weight.shape, 0
        if self._table == weight.shape:
            self.trace.tokens += indices.numel()

    def _read(self, name: str, tensor: Tensor) -> Any:
        self.stream.record_event().synchronize()  # the host waits
        if name == "aten.equal.default":
            return True
        if tensor.dtype is torch.bool:
            return False
        return 1.0 if tensor.dtype.is_floating_point else 0

    def note_event(self, stream: SimulatedStream, by_python: bool = True) -> int:
        """Record an event in a stream, and return its number."""
        self._num_events += 1
        self.trace.events.append(Record(stream.number, self._num_events, by_python))
        return self._num_events

    def _send(self, func: Any, tensors: list[Tensor], args: Sequence[Any]) -> None:
        name = operation_name(func)
        kind = next(
            (k for begin, k in _COLLECTIVES.items() if name.removesuffix("_").startswith(begin)),
            None,
        )
        if kind is None or not tensors:  # waits and barriers
            return
        sent = tensors if kind in _ONE_OPERAND else _inputs(args, tensors)
        members = compat.ranks_of(args)
        share = 1.0
        if kind == "all_to_all" and name.startswith("alltoall_base") and args[4]:
            own = args[4][members.index(self.trace.rank)] / max(1, sum(args[4]))
            share = (1 - own) * len(members) / max(1, len(members) - 1)
        self._collect(kind, sent, members, share)

    def _collect(
        self,
        kind: CollectiveKind,
        sent: Sequence[Tensor],
        members: list[int],
        share: float = 1.0,
    ) -> None:
        nodes = len({rank // self.trace.gpus_per_node for rank in members})
        nbytes = round(share * sum(tensor.nbytes for tensor in sent))
        where = (self.stream.number, self.phase, self.action)
        self.trace.events.append(Collective(kind, nbytes, len(members), nodes, *where))

    def gather_parts(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: dist.ProcessGroup
    ) -> None:
        """Note one collective for all parts: the fake group has none of this kind."""
        self._collect("all_gather", list(inputs), dist.get_process_group_ranks(group))

    def scaled_mm(
        self, a_MK: Tensor, b_NK: Tensor, *scales: Any, fast_accumulation: bool
    ) -> Tensor:
        """Stands for cuBLASLt's FP8 product, which a CPU computes in fp32."""
        (M, K), N = a_MK.shape, b_NK.shape[0]
        product = a_MK.new_empty(M, N, dtype=scales[-1])
        name, flops = "aten._scaled_mm.default", 2 * M * N * K
        self.launch(name, [a_MK, b_NK], [product], flops=flops)
        return product

    # --- DDP ------------------------------------------------------------------------------------

    @contextmanager
    def reducing(self, bucket: Tensor, by_python: bool) -> Iterator[None]:
        """Give messages of gradients to a stream of their own, behind what made them."""
        if (storage := self._storage(bucket)) is not None:
            self._buckets.add(storage)
        if self._reducing is None:
            self._reducing = SimulatedStream()
        self._order(self.stream, self._reducing, by_python)
        self._reduces = True
        with self.on(self._reducing):
            yield

    def join(self) -> None:
        """Wait for DDP's messages, as it does at the end of backward."""
        if self._reduces and self._reducing is not None:
            self._order(self._reducing, self.stream, by_python=False)
        self._reduces = False

    def _order(self, first: SimulatedStream, then: SimulatedStream, by_python: bool) -> None:
        number = self.note_event(first, by_python)
        self.trace.events.append(Wait(then.number, number, by_python))

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

    def launch(
        self, name: str, read: Sequence[Tensor], written: Sequence[Tensor], flops: int = 0
    ) -> None:
        """Note a kernel that is launched without an operator of the dispatcher."""
        self._note_operator(name, read, written, flops=flops, dtype=read[0].dtype)

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
            self.launch("lq_lightning.optimizer_step.default", [*changed, *grads], changed)

    def checksums(self, tensors: Sequence[Tensor]) -> Tensor:
        """Stands for the kernel that reads tensors for their checksums, which never change."""
        if tensors:
            self.launch("lq_lightning.checksums.default", tensors, ())
        return torch.zeros(len(tensors), dtype=torch.int64)

    # --- memory ---------------------------------------------------------------------------------

    def _allocated(self, tensor: Tensor, operator: str) -> bool:
        """Note a tensor's storage; return whether it is new."""
        if not compat.is_fake(tensor) or tensor.device.type == "meta" or self._storage(tensor):
            return False
        self._note(tensor, operator)
        weakref.finalize(tensor.untyped_storage(), self._freed, storage_key(tensor))
        return True

    def _storage(self, tensor: Any) -> Storage | None:
        return self._alive.get(storage_key(tensor)) if compat.is_fake(tensor) else None

    def _note(self, tensor: Tensor, operator: str) -> None:
        storage = Storage(
            tensor.untyped_storage().nbytes(),
            self.stream.number,
            self.phase,
            operator,
            _source(sys._getframe(1)),
            tuple(tensor.shape),
            tensor.dtype,
            born=len(self.trace.events),
        )
        self.trace.events.append(Allocate(storage))
        self._alive[storage_key(tensor)] = storage

    def _freed(self, key: int) -> None:
        self._end(self._alive.pop(key, None))

    def _end(self, storage: Storage | None) -> None:
        if storage is not None and storage.died is None and not self._closed:
            storage.died = len(self.trace.events)
            self.trace.events.append(Free(storage))

    def free(self, tensor: Tensor) -> None:
        """FSDP2 frees the memory of a tensor that lives on."""
        self._end(self._storage(tensor))

    def allocate(self, tensor: Tensor) -> None:
        """FSDP2 gives such a tensor memory again."""
        storage = self._storage(tensor)
        if compat.is_fake(tensor) and (storage is None or storage.died is not None):
            self._note(tensor, "")

    def note_use(self, tensor: Tensor) -> None:
        """The current stream uses a tensor of another one."""
        if (storage := self._storage(tensor)) is not None:
            storage.used_on += (self.stream.number,)

    def pin(self, nbytes: int, *, pin: bool) -> None:
        """Count host memory, in place of ``host_memory``, which would make it."""
        self.trace.host_nbytes += nbytes

    def name_owners(self, trainer: Trainer, module: LightningModule) -> None:
        """Note which memory parameters, their gradients, buffers and optimizers hold now."""
        for parameter in module.parameters():
            self._own(parameter, "parameter")
            self._own(parameter.grad, "gradient")
        for buffer in module.buffers():
            self._own(buffer, "buffer")
        for optimizer in trainer.optimizers:
            for tensor in compat.tree_leaves(list(optimizer.state.values())):
                self._own(tensor, "optimizer state")
        for storage in self._buckets:  # gradients may be views of them
            storage.owner = storage.owner or "bucket"

    def _own(self, tensor: Any, owner: str) -> None:
        storage = self._storage(local_tensor(tensor)) if isinstance(tensor, Tensor) else None
        if storage is not None and not storage.owner:
            storage.owner = owner

    @contextmanager
    def on(self, stream: SimulatedStream | None) -> Iterator[None]:
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
_MAKERS = {
    *("aten.empty.memory_format", "aten.zeros.default", "aten.ones.default", "aten.full.default"),
    *("aten.rand.default", "aten.randn.default", "aten.empty_strided.default"),
    *("aten.randint.default", "aten.randint.low"),
    *("aten.new_empty.default", "aten.new_zeros.default", "aten.new_full.default"),
    *("aten.empty_like.default", "aten.zeros_like.default", "aten.ones_like.default"),
    *("aten.rand_like.default", "aten.randn_like.default", "aten.full_like.default"),
}


def _inputs(args: Sequence[Any], tensors: list[Tensor]) -> list[Tensor]:
    """Tensors that a collective sends: those of its second argument, if it has two of tensors."""
    groups = [[t for t in compat.tree_leaves(arg) if isinstance(t, Tensor)] for arg in args[:2]]
    return groups[1] if len(groups) == 2 and groups[1] else tensors


_TORCH = torch.__path__[0]
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
