"""What quantized optimizers share: which states are codes, one launch per step, checkpoints."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lq_lightning._compat.tensors import first_row, local_tensor
from lq_lightning.codecs import derive_seed
from lq_lightning.kernels.optimizer_step import (
    FLOAT_DTYPES,
    StateFormat,
    groups_per_row,
    optimizer_step,
    row_length,
)

from .batch import Batch, Work, local_gradient
from .config import STAMP, OptimizerQuantization, reason_for_full_precision
from .entries import EntryReader, Held, check_saved, hide_entries, is_part
from .slots import Slot, advance
from .state import STEP, decoded, is_quantized, zero_state


class ParameterPlan(NamedTuple):
    """What becomes of the states of one parameter.

    Attributes:
        name: of the parameter where the optimizer or ``quantize_optimizer`` was given names, by
            ``named_parameters`` or the module; else its position.
        shape: of the whole parameter.
        nbytes: of its states before sharding, without step counters.
        reason: why they stay in fp32, or None where they are quantized.
    """

    name: str
    shape: tuple[int, ...]
    nbytes: int
    reason: str | None


class QuantizedOptimizer(Optimizer):
    """Base of the quantized optimizers, mixed into the optimizers of torch that they replace.

    States of large matrices are codes; the others stay in fp32 and, for fp32 parameters, are
    updated by torch itself, so that they get the same bits as without quantization.

    Codes, and bf16 parameters on request, are rounded by chance. The noise depends on the seed of
    the options, the position of the parameter in the parameter groups, its step counter, which is
    part of the state, and the position of the group of elements in the whole parameter: a resumed
    run has the noise of one that went on, and a sharded one that of one process.

    A subclass says which states there are, what the scalars of its rule are, and whether torch's
    optimizer counts steps too.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    has_step: ClassVar[bool] = True
    torch_class: ClassVar[type[Optimizer] | None] = None

    quantization_config: OptimizerQuantization
    _full_precision: dict[Tensor, str]
    _names: dict[Tensor, str]
    # One per parameter, in order, from the first step on; never in pickles or copies.
    _slots: Sequence[Slot | None] = ()

    # --- for subclasses ---------------------------------------------------------------------------

    def _rule(self, group: Mapping[str, Any]) -> str:
        raise NotImplementedError

    def _scalars(self, group: Mapping[str, Any], step: int, is_first: bool) -> list[float]:
        """The eight scalars of ``kernels.optimizer_step``."""
        raise NotImplementedError

    @classmethod
    def check_group(cls, group: Mapping[str, Any]) -> None:
        """Refuse hyperparameters that are not supported.

        Raises:
            ValueError: a parameter group has one.
        """
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
        """Start to store states as codes, those that exist already too.

        Args:
            config: formats and what stays in fp32.
            full_precision: further parameters that stay in fp32, with the reason.
            names: of parameters, for the plan.

        Raises:
            ValueError: a parameter group has hyperparameters that are not supported.
        """
        for group in self.param_groups:
            self.check_group(group)
        self.quantization_config = config
        self._full_precision = dict(full_precision)
        self._names = dict(names or {})
        self._slots = ()
        self._step_supports_amp_scaling = False  # a GradScaler unscales before the step
        self.defaults[STAMP] = config.stamp
        for group in self.param_groups:
            group[STAMP] = config.stamp
        for param, entry in list(self.state.items()):
            self.state[param] = self._adopt(param, entry)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch does."""
        super().add_param_group(param_group)
        self.check_group(self.param_groups[-1])

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle or copy keeps."""
        state: dict[str, Any] = super().__getstate__()
        own = ("quantization_config", "_full_precision", "_names", "_step_supports_amp_scaling")
        return {**state, **{key: self.__dict__[key] for key in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle, or take what ``load_state_dict`` read."""
        entries = state.get("state")
        if entries is not None and any(isinstance(value, Held) for value in entries.values()):
            check_saved(state["param_groups"], entries, self.quantization_config)
            state = {**state, "state": self._adopt_all(entries)}
            for group in state["param_groups"]:
                group[STAMP] = self.quantization_config.stamp
        super().__setstate__(state)

    def reason_for_full_precision(self, param: Tensor) -> str | None:
        """Say why the states of a parameter stay in fp32, or None if they are quantized."""
        return reason_for_full_precision(param, self.quantization_config, self._full_precision)

    def quantization_plan(self) -> list[ParameterPlan]:
        """Say for every parameter whether its states are quantized, and if not, why."""
        plan: list[ParameterPlan] = []
        for group in self.param_groups:
            names = group.get("param_names")
            for index, param in enumerate(group["params"]):
                reason = self.reason_for_full_precision(param)
                per_element = 4.0 * len(self.state_names)
                if reason is None:
                    length = row_length(param.shape)
                    per_element = sum(f.nbytes_per_element(length) for f in self._formats())
                name = names[index] if names else self._names.get(param, str(len(plan)))
                nbytes = round(per_element * param.numel())
                plan.append(ParameterPlan(name, tuple(param.shape), nbytes, reason))
        return plan

    def _formats(self) -> list[StateFormat]:
        return self.quantization_config.formats(len(self.state_names))

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
            closure: evaluates the model again and returns the loss.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            RuntimeError: a gradient that is sparse, or placed otherwise than its parameter.
            TypeError: a parameter or gradient that is neither fp32 nor bf16.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = self._collect()
        if self.torch_class is not None and any(group["params"] for group in work.for_torch):
            self._step_of_torch(self.torch_class, work.for_torch)
        for batch in work.batches.values():
            self._launch(batch)
        for target, source in work.write_back:
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

    def _collect(self) -> Work:
        """Sort the parameters that have a gradient by what updates them."""
        work = Work([], {}, [])
        config, states = self.quantization_config, self.state
        count = sum(len(group["params"]) for group in self.param_groups)
        slots: list[Slot | None] = [None] * count
        if len(self._slots) == count:
            slots = list(self._slots)
        self._slots, index = slots, -1
        for number, group in enumerate(self.param_groups):
            left = []
            rule = self._rule(group)
            batch, kind, dtype = None, None, None
            for param in group["params"]:
                index += 1
                grad = param.grad
                if grad is None:
                    continue
                slot = slots[index]
                tensors = None
                if slot is not None:
                    tensors = slot.current(param, states.get(param, _NO_ENTRY), config)
                if slot is None or tensors is None:
                    slot, tensors = self._new_slot(work, param, index + 1)
                    slots[index] = slot
                else:
                    slot.is_first = False
                prepared = slot.prepared
                if prepared is None:
                    left.append(param)
                    continue
                if prepared.kind is not kind or grad.dtype is not dtype or batch is None:
                    kind, dtype = prepared.kind, grad.dtype
                    key = (rule, id(kind), dtype)  # kinds live forever
                    batch = work.batches.setdefault(key, Batch(rule, [], [], [], [], []))
                if grad.is_sparse or dtype not in FLOAT_DTYPES:
                    self._check(param)
                batch.slots.append(slot)
                batch.groups.append(number)
                batch.prepared.append(prepared)
                batch.tensors.append(tensors)
                batch.grads.append(grad if type(grad) is Tensor else local_gradient(param, grad))
            work.for_torch.append({**group, "params": left})
        return work

    def _new_slot(self, work: Work, param: Tensor, position: int) -> tuple[Slot, list[Tensor]]:
        """Decide what updates a parameter, and make its states where there are none."""
        config = self.quantization_config
        slot = Slot(ref(param), param.shape, config, position, isinstance(param, DTensor))
        quantized = self.reason_for_full_precision(param) is None
        if not quantized and self.torch_class and param.dtype == torch.float32:
            return slot, []
        self._check(param)
        formats = self._formats() if quantized else _FULL_PRECISION[: len(self.state_names)]
        entry = self.state[param]
        slot.is_first = not entry
        if slot.is_first:
            for name, fmt in zip(self.state_names, formats, strict=True):
                entry.update(zero_state(param, name, fmt))
        if not isinstance(entry.get(STEP), Tensor):
            entry[STEP] = torch.tensor(entry.get(STEP, 0.0), dtype=torch.float32, device="cpu")
        local = local_tensor(param)
        if not local.is_contiguous():
            work.write_back.append((local, local := local.contiguous()))
        slot.first_group = first_row(param) * groups_per_row(row_length(param.shape))
        return slot, slot.fill(local, entry, self.state_names, formats)

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
        config = self.quantization_config
        advance(batch.slots)
        keys = [(n, s.count, s.is_first) for n, s in zip(batch.groups, batch.slots, strict=True)]
        rows = {key: row for row, key in enumerate(dict.fromkeys(keys))}
        scalars = torch.tensor(
            [self._scalars(self.param_groups[key[0]], *key[1:]) for key in rows],
            dtype=torch.float32,
            device="cpu",
        )
        if len(rows) == 1:
            scalars = scalars.expand(len(keys), -1)
        else:
            scalars = scalars[torch.tensor([rows[key] for key in keys], device="cpu")]
        seeds = [derive_seed(config.seed, slot.count, slot.position) for slot in batch.slots]
        grads = [(grad if grad.dim() else grad.view(1)).contiguous() for grad in batch.grads]
        optimizer_step(
            batch.tensors,
            batch.prepared,
            grads,
            scalars,
            seeds,
            [slot.first_group for slot in batch.slots],
            batch.rule,
            config.stochastic_rounding,
        )

    # --- checkpoints ------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state: codes as they are, or the fp32 state of the optimizer of torch.

        Codes of the same formats are taken bit by bit, whole or sharded. fp32 states, such as those
        of :meth:`full_precision_state_dict` or of ``torch.optim.AdamW``, are quantized where the
        plan says so.

        Args:
            state_dict: what ``state_dict()`` returned, of this optimizer or the one of torch.

        Raises:
            ValueError: another or a newer quantization format, or other parameters.
        """
        # The last hook, so that those of users see the entries as they are.
        handle = self.register_load_state_dict_pre_hook(hide_entries)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def full_precision_state_dict(self) -> dict[str, Any]:
        """Return a copy of the state as torch's optimizer has it, with fp32 states for codes."""
        result = self.state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        for index, entry in list(result["state"].items()):
            plain = {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in entry.items()
                if not is_part(key) and (self.has_step or key != STEP)
            }
            for name, fmt in zip(self.state_names, self._formats(), strict=True):
                if is_quantized(entry, name):
                    plain[name] = decoded(entry, name, params[index], fmt)
            result["state"][index] = plain
        for group in result["param_groups"]:
            group.pop(STAMP, None)
        return result

    def _adopt_all(self, entries: Mapping[Any, Any]) -> defaultdict[Any, Any]:
        state: defaultdict[Any, Any] = defaultdict(dict)
        for param, value in entries.items():
            state[param] = self._adopt(param, value.entry) if isinstance(value, Held) else value
        return state

    def _adopt(self, param: Tensor, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Turn an entry of a checkpoint, or one of torch's optimizer, into one of ours."""
        quantized = self.reason_for_full_precision(param) is None
        on_device = not quantized and self._group_of(param).get("fused")
        device = local_tensor(param).device if on_device else torch.device("cpu")
        reader = EntryReader(
            optimizer=type(self).__name__,
            names=self.state_names,
            formats=self._formats(),
            has_step=self.has_step,
        )
        return reader.read(param, entry, quantized, device)

    def _group_of(self, param: Tensor) -> Mapping[str, Any]:
        return next(g for g in self.param_groups if any(p is param for p in g["params"]))


_FULL_PRECISION = OptimizerQuantization(first_moment="float32", second_moment="float32").formats(2)
_NO_ENTRY: dict[str, Any] = {}
_UNSUPPORTED = {
    "amsgrad": "its running maximum has no quantized form. Use amsgrad=False.",
    "capturable": "step counters of quantized states are on the CPU. Use capturable=False.",
    "differentiable": "codes have no gradient. Use differentiable=False.",
}


def excluded(full_precision: Iterable[Tensor]) -> dict[Tensor, str]:
    """Parameters that the user keeps in fp32."""
    return dict.fromkeys(full_precision, "asked for by `full_precision`")
