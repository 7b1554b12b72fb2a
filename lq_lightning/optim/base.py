"""Base of quantized optimizers: choice of coded states, one launch per step, checkpoints."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any, ClassVar, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lq_lightning._compat.tensors import (
    first_row,
    local_tensor,
    placed_like,
    row_pieces,
    waited,
)
from lq_lightning._compat.torch import add_one_to_all
from lq_lightning.codecs import derive_seed
from lq_lightning.kernels.optimizer_step.formats import StateFormat
from lq_lightning.kernels.optimizer_step.op import (
    FLOAT_DTYPES,
    PreparedTensor,
    optimizer_step,
    prepare,
)

from .config import STAMP, OptimizerQuantization, check_stamp, reason_for_full_precision
from .state import (
    STEP,
    DeferredState,
    check_saved,
    decoded,
    defer_entries,
    is_part,
    is_quantized,
    part_names,
    read_entry,
    zero_state,
)

FULL_PRECISION = OptimizerQuantization(first_moment="float32", second_moment="float32").formats(2)
_NO_ENTRY: dict[str, Any] = {}
_UNSUPPORTED = {
    "amsgrad": "its running maximum has no quantized form. Use amsgrad=False.",
    "capturable": "step counters of quantized states are on the CPU. Use capturable=False.",
    "differentiable": "codes have no gradient. Use differentiable=False.",
}


class ParameterPlan(NamedTuple):
    """Storage of the states of one parameter.

    Attributes:
        name: Name of the parameter where the optimizer or ``quantize_optimizer`` was given names,
            by ``named_parameters`` or the module; else its position.
        shape: Shape of the whole parameter.
        nbytes: Bytes of its states before sharding, without step counters.
        reason: Why they stay in fp32, or None where they are quantized.
    """

    name: str
    shape: tuple[int, ...]
    nbytes: int
    reason: str | None


@dataclass(slots=True, eq=False)
class ParamStepCache:
    """Facts about a parameter that the next step can reuse, to save host time.

    It has weak references only, is compared with the parameter and its states before every use and
    made anew where they changed, and is never saved or copied.

    Attributes:
        shape: Shape of the whole parameter, which decides whether torch updates it.
        position: Position in the parameter groups, from 1 on.
        prepared: Tensors for the kernel; None where torch updates the parameter. Then nothing below
            is set.
        find: Function from the entry to the tensors of the states, in the order of ``prepare``, and
            the step.
        found: Local tensors that it returned; the parameter's comes first.
        first_row: Number of the first local row, other than on ranks that have other rows.
        step_on_cpu: Whether the step is an fp32 number on the CPU, as torch makes them.
        group: Number of the parameter group.
        count: The step after ``_advance``.
        is_first: Whether the states were made in this step.
    """

    param: ref[Tensor]
    shape: torch.Size
    config: OptimizerQuantization
    position: int
    sharded: bool
    prepared: PreparedTensor | None = None
    find: Callable[[Mapping[str, Any]], tuple[Any, ...]] = lambda entry: ()
    found: tuple[ref[Tensor], ...] = ()
    first_row: int = 0
    step_on_cpu: bool = False
    group: int = 0
    count: int = 0
    is_first: bool = False

    def current(
        self, param: Tensor, entry: Mapping[str, Any], config: OptimizerQuantization
    ) -> list[Any] | None:
        """Return the local tensors for the kernel if they are where they were in the last step.

        No tensors where torch updates the parameter; None if the cache must be made anew.
        """
        if self.param() is not param or self.config is not config:
            return None
        prepared = self.prepared
        if prepared is None:
            same = param.shape == self.shape and param.dtype is torch.float32
            return [] if same else None
        try:
            tensors = [param, *self.find(entry)]
        except KeyError:
            return None
        if self.sharded:
            tensors = [local_tensor(tensor) for tensor in tensors]
        if not all(map(is_, tensors, [tensor() for tensor in self.found])):
            return None
        tensors.pop()
        return tensors if prepared.is_in_place(tensors) else None

    def fill(
        self,
        local: Tensor,
        entry: Mapping[str, Any],
        formats: Mapping[str, StateFormat],
    ) -> list[Tensor]:
        """Prepare the tensors for the kernel and return them; scalars become ``[1]``.

        ``local`` is the shard of the parameter, contiguous.
        """
        keys = [key for name, fmt in formats.items() for key in part_names(name, fmt)]
        tensors = [local, *[local_tensor(entry[key]) for key in keys]]
        if local.dim() == 0:
            tensors = [tensor.view(1) for tensor in tensors]
        self.prepared = prepare(tensors, list(formats.values()))
        step = entry[STEP]
        self.found = tuple(ref(tensor) for tensor in [*tensors, step])
        self.step_on_cpu = (
            type(step) is Tensor and step.is_cpu and step.dim() == 0 and step.dtype == torch.float32
        )
        self.find = itemgetter(*keys, STEP)
        return tensors


def advance(caches: Sequence[ParamStepCache]) -> None:
    """Add one to the step counters of parameters whose entries have one, and read them."""
    caches_on_cpu, on_cpu = [], []
    for cache in caches:
        step = cache.found[-1]()
        if step is None:
            raise AssertionError("the entry keeps the step alive")
        if cache.step_on_cpu:
            caches_on_cpu.append(cache)
            on_cpu.append(step)
        else:  # torch's fused optimizers have them on the GPU
            step += 1
            cache.count = int(step)
    if on_cpu:
        add_one_to_all(on_cpu)
        for cache, value in zip(caches_on_cpu, torch.stack(on_cpu).tolist(), strict=True):
            cache.count = int(value)


class Batch(NamedTuple):
    """Parameters of one launch."""

    rule: str
    caches: list[ParamStepCache]
    tensors: list[list[Tensor]]
    grads: list[Tensor]
    prepared: list[PreparedTensor]

    def part(
        self, numbers: Iterable[int], tensors: list[list[Tensor]], formats: Sequence[StateFormat]
    ) -> Batch:
        """Some of the parameters, with other tensors for the kernel."""
        caches, grads = zip(*((self.caches[n], self.grads[n]) for n in numbers), strict=True)
        prepared = [prepare(each, formats) for each in tensors]
        return Batch(self.rule, list(caches), tensors, list(grads), prepared)


class QuantizedOptimizer(Optimizer):
    """Base of the quantized optimizers, mixed into the optimizers of torch that they replace.

    States of large matrices are codes; the others stay in fp32 and, for fp32 parameters, are
    updated by torch itself, so that they get the same bits as without quantization.

    Codes (most of Muon's momentum aside), and bf16 parameters on request, are rounded
    stochastically. The noise depends on the seed
    of the options, the position of the parameter in the parameter groups, its step counter, which
    is part of the state, and the position of the group of elements in the whole parameter: resumed
    and sharded runs have the same noise as an uninterrupted one in a single process, where ranks
    have whole rows. Where tensor parallelism cuts rows, it is that of a single process with all
    first pieces as rows above all second ones. Replicas have the same noise. All statistics are of
    groups, which no rank shares with another.

    A subclass defines its states, which may differ from group to group, and its rule's scalars.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    torch_class: ClassVar[type[Optimizer] | None] = None

    quantization_config: OptimizerQuantization
    _full_precision: dict[Tensor, str]
    _names: dict[Tensor, str]
    # One per parameter, in order, from the first step on; never in pickles or copies.
    _caches: Sequence[ParamStepCache | None] = ()

    # --- for subclasses ---------------------------------------------------------------------------

    def _rule(self, group: Mapping[str, Any]) -> str:
        raise NotImplementedError

    def _states_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the states of the parameters of a group."""
        return self.state_names

    def _counts_steps(self, group: Mapping[str, Any]) -> bool:
        """Whether torch's optimizer has step counters: for the bias of two moments."""
        return len(self._states_of(group)) == 2

    def _scalars(self, group: Mapping[str, Any], step: int, is_first: bool) -> list[float]:
        """The eight scalars of ``kernels.optimizer_step``."""
        raise NotImplementedError

    @classmethod
    def check_group(cls, group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` for hyperparameters that are not supported."""
        for flag, reason in _UNSUPPORTED.items():
            if group.get(flag):
                raise ValueError(f"{cls.__name__}({flag}=True) is not supported: {reason}")

    # --- setup ------------------------------------------------------------------------------------

    def enable_quantization(
        self,
        config: OptimizerQuantization,
        full_precision: Mapping[Tensor, str],
        names: Mapping[Tensor, str] | None = None,
    ) -> None:
        """Start to store states as codes, including those that exist already.

        Args:
            config: Formats, and the choice of states that stay in fp32.
            full_precision: Further parameters whose states stay in fp32, with the reason.
            names: Names of parameters, for the plan.
        """
        for group in self.param_groups:
            self.check_group(group)
        self.quantization_config = config
        self._full_precision = dict(full_precision)
        self._names = dict(names or {})
        self._caches = ()
        self._step_supports_amp_scaling = False  # a GradScaler unscales before the step
        self.defaults[STAMP] = config.stamp
        for group in self.param_groups:
            group[STAMP] = self._stamp(group)
        for param, entry in list(self.state.items()):
            self.state[param] = self._adopt(param, entry)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch does."""
        super().add_param_group(param_group)
        try:
            self.check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()  # so that its parameters can be in another one
            raise
        if STAMP in self.defaults:
            self.param_groups[-1][STAMP] = self._stamp(self.param_groups[-1])

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle or copy keeps."""
        state: dict[str, Any] = super().__getstate__()
        own = ("quantization_config", "_full_precision", "_names", "_step_supports_amp_scaling")
        return {**state, **{key: self.__dict__[key] for key in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle, or take what ``load_state_dict`` read."""
        entries = state.get("state") or {}
        deferred = {p: value for p, value in entries.items() if isinstance(value, DeferredState)}
        if deferred:
            stamps = [self._stamp(group) for group in self.param_groups]
            check_saved(state["param_groups"], deferred, stamps)
            adopted = {param: self._adopt(param, value.entry) for param, value in deferred.items()}
            state = {**state, "state": defaultdict(dict, {**entries, **adopted})}
        super().__setstate__(state)
        for group in self.param_groups:
            own = self._stamp(group)
            if entries and not deferred:  # a pickle, maybe of another version
                check_stamp(group.get(STAMP, own), own)
            group[STAMP] = own

    def reason_for_full_precision(self, param: Tensor) -> str | None:
        """Return why the states of a parameter stay in fp32, or None if they are quantized."""
        return reason_for_full_precision(param, self.quantization_config, self._full_precision)

    def quantization_plan(self) -> list[ParameterPlan]:
        """Return for every parameter whether its states are quantized, and if not, why."""
        plan: list[ParameterPlan] = []
        for group in self.param_groups:
            names = group.get("param_names")
            for index, param in enumerate(group["params"]):
                reason = self.reason_for_full_precision(param)
                per_element = 4.0 * len(self._states_of(group))
                if reason is None:
                    length = row_pieces(param).length
                    formats = self._formats(group).values()
                    per_element = sum(fmt.nbytes_per_element(length) for fmt in formats)
                name = names[index] if names else self._names.get(param, str(len(plan)))
                nbytes = round(per_element * param.numel())
                plan.append(ParameterPlan(name, tuple(param.shape), nbytes, reason))
        return plan

    def _formats(self, group: Mapping[str, Any]) -> dict[str, StateFormat]:
        names = self._states_of(group)
        return dict(zip(names, self.quantization_config.formats(len(names)), strict=True))

    def _stamp(self, group: Mapping[str, Any]) -> str:
        """Name of the codes of a group's states in checkpoints."""
        return self.quantization_config.stamp

    # --- step -------------------------------------------------------------------------------------

    # Compiled code breaks here and goes on behind it. Traced, every new step counter would need
    # another graph, and kernels that compute codes bit by bit gain nothing from one.
    @torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
        reason="quantized optimizers update parameters in kernels of their own: call `step` "
        "outside of functions compiled with `fullgraph=True`"
    )
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: Function that evaluates the model again and returns the loss.

        Returns:
            The result of ``closure``, or None.

        Raises:
            RuntimeError: A gradient is sparse.
            TypeError: A parameter or gradient is neither fp32 nor bf16.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # non-contiguous parameters, and the contiguous copies that kernels update
        write_back: list[tuple[Tensor, Tensor]] = []
        for_torch, batches = self._collect(write_back)
        if self.torch_class is not None and any(group["params"] for group in for_torch):
            self._step_of_torch(self.torch_class, for_torch)
        for batch in batches:
            self._launch(batch)
        for target, source in write_back:
            target.copy_(source)
        return loss

    def _step_of_torch(self, torch_class: type[Optimizer], groups: list[dict[str, Any]]) -> None:
        # without the wrappers that call the hooks of a step
        step = inspect.unwrap(torch_class.step)
        kept = self.param_groups
        self.param_groups = groups
        try:
            step(self)
        finally:
            self.param_groups = kept

    def _collect(
        self, write_back: list[tuple[Tensor, Tensor]]
    ) -> tuple[list[dict[str, Any]], Iterable[Batch]]:
        """Sort the parameters that have a gradient: groups for torch's optimizer, and launches."""
        for_torch: list[dict[str, Any]] = []
        batches: dict[tuple[Any, ...], Batch] = {}  # by rule, kind of tensors, gradient dtype
        config, states = self.quantization_config, self.state
        count = sum(len(group["params"]) for group in self.param_groups)
        caches: list[ParamStepCache | None] = [None] * count
        if len(self._caches) == count:
            caches = list(self._caches)
        self._caches, index = caches, -1
        for number, group in enumerate(self.param_groups):
            left = []
            rule = self._rule(group)
            batch, kind, dtype = None, None, None
            for param in group["params"]:
                index += 1
                grad = param.grad
                if grad is None:
                    continue
                cache = caches[index]
                tensors = None
                if cache is not None:
                    tensors = cache.current(param, states.get(param, _NO_ENTRY), config)
                if cache is None or tensors is None:
                    cache, tensors = self._new_cache(write_back, param, group, index + 1)
                    caches[index] = cache
                else:
                    cache.is_first = False
                prepared = cache.prepared
                if prepared is None:
                    left.append(param)
                    continue
                if prepared.kind is not kind or grad.dtype is not dtype or batch is None:
                    kind, dtype = prepared.kind, grad.dtype
                    key = (rule, id(kind), dtype)  # kinds live forever
                    batch = batches.setdefault(key, Batch(rule, [], [], [], []))
                if grad.is_sparse or dtype not in FLOAT_DTYPES:
                    self._check(param)
                cache.group = number
                batch.caches.append(cache)
                batch.tensors.append(tensors)
                batch.prepared.append(prepared)
                batch.grads.append(grad if type(grad) is Tensor else _local_gradient(param, grad))
            for_torch.append({**group, "params": left})
        return for_torch, batches.values()

    def _new_cache(
        self,
        write_back: list[tuple[Tensor, Tensor]],
        param: Tensor,
        group: Mapping[str, Any],
        position: int,
    ) -> tuple[ParamStepCache, list[Tensor]]:
        """Decide what updates a parameter, and make its states where there are none."""
        config = self.quantization_config
        cache = ParamStepCache(
            ref(param), param.shape, config, position, isinstance(param, DTensor)
        )
        quantized = self.reason_for_full_precision(param) is None
        if not quantized and self.torch_class and param.dtype == torch.float32:
            return cache, []
        self._check(param)
        formats = self._formats(group)
        if not quantized:
            formats = dict(zip(formats, FULL_PRECISION, strict=False))
        entry = self.state[param]
        cache.is_first = not entry
        if cache.is_first:
            for name, fmt in formats.items():
                entry.update(zero_state(param, name, fmt))
        if not isinstance(entry.get(STEP), Tensor):
            entry[STEP] = torch.tensor(entry.get(STEP, 0.0), dtype=torch.float32, device="cpu")
        local = local_tensor(param)
        if not local.is_contiguous():
            write_back.append((local, local := local.contiguous()))
        cache.first_row = first_row(param)
        return cache, cache.fill(local, entry, formats)

    def _check(self, param: Tensor) -> None:
        """Refuse a parameter or gradient that has no quantized update."""
        if param.grad is not None and param.grad.is_sparse:
            raise RuntimeError(
                f"{type(self).__name__} does not support sparse gradients. Use "
                "`nn.Embedding(sparse=False)`."
            )
        for tensor in (param, param.grad):
            if tensor is not None and tensor.dtype not in FLOAT_DTYPES:
                raise TypeError(
                    f"{type(self).__name__} got a parameter or gradient of {tensor.dtype}; "
                    "allowed: float32, bfloat16. Convert the model, e.g. `model.bfloat16()`."
                )

    def _launch(self, batch: Batch) -> None:
        """Update the parameters of a batch."""
        advance(batch.caches)
        self._run_kernel(batch, self.quantization_config.stochastic_rounding)

    def _run_kernel(
        self, batch: Batch, stochastic: bool, scalars: Sequence[float] | None = None
    ) -> None:
        """Launch the kernel; step counters have advanced. ``scalars`` are those of all tensors."""
        caches = batch.caches
        keys = [(cache.group, cache.count, cache.is_first) for cache in caches]
        rows = {key: row for row, key in enumerate(dict.fromkeys(keys))}
        table = torch.tensor(
            [scalars or self._scalars(self.param_groups[key[0]], *key[1:]) for key in rows],
            dtype=torch.float32,
            device="cpu",
        )
        if len(rows) == 1:
            table = table.expand(len(keys), -1)
        else:
            table = table[torch.tensor([rows[key] for key in keys], device="cpu")]
        optimizer_step(
            batch.tensors,
            batch.prepared,
            [(grad if grad.dim() else grad.view(1)).contiguous() for grad in batch.grads],
            table,
            [
                derive_seed(self.quantization_config.seed, cache.count, cache.position)
                for cache in caches
            ],
            [
                cache.first_row * item.row_groups
                for cache, item in zip(caches, batch.prepared, strict=True)
            ],
            batch.rule,
            stochastic,
        )

    # --- checkpoints ------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state: codes as they are, or the fp32 state of the optimizer of torch.

        Codes of the same formats are taken bit by bit, whole or sharded. fp32 states, such as those
        of :meth:`full_precision_state_dict` or of ``torch.optim.AdamW``, are quantized where the
        plan says so.

        Args:
            state_dict: Result of ``state_dict()`` of this optimizer or the one of torch.

        Raises:
            ValueError: It has another or a newer quantization format, or other parameters.
        """
        # The last hook, so that users' hooks see the entries as they are.
        handle = self.register_load_state_dict_pre_hook(defer_entries)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def full_precision_state_dict(self) -> dict[str, Any]:
        """Return a copy of the state as torch's optimizer has it, with fp32 states for codes."""
        result = self.state_dict()
        params = [(param, group) for group in self.param_groups for param in group["params"]]
        for index, entry in list(result["state"].items()):
            param, group = params[index]
            plain = {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in entry.items()
                if not is_part(key) and (self._counts_steps(group) or key != STEP)
            }
            for name, fmt in self._formats(group).items():
                if is_quantized(entry, name):
                    plain[name] = decoded(entry, name, param, fmt)
            result["state"][index] = plain
        for group in result["param_groups"]:
            group.pop(STAMP, None)
        return result

    def _adopt(self, param: Tensor, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Turn an entry of a checkpoint, or one of torch's optimizer, into one of ours."""
        quantized = self.reason_for_full_precision(param) is None
        group = next(g for g in self.param_groups if any(p is param for p in g["params"]))
        on_device = not quantized and group.get("fused")  # where torch's fused optimizers keep it
        device = local_tensor(param).device if on_device else torch.device("cpu")
        return read_entry(
            param,
            entry,
            self._formats(group),
            quantized=quantized,
            has_step=self._counts_steps(group),
            step_device=device,
            optimizer=type(self).__name__,
        )


def excluded(full_precision: Iterable[Tensor]) -> dict[Tensor, str]:
    """Parameters that the user keeps in fp32."""
    return dict.fromkeys(full_precision, "asked for by `full_precision`")


def _local_gradient(param: Tensor, grad: Tensor) -> Tensor:
    """Return this rank's part of a gradient, placed like the parameter, after pending collectives.

    Tensor-parallel ranks that FSDP2 does not shard over have parts of the sum for replicas.
    """
    return waited(local_tensor(placed_like(grad, param)))
