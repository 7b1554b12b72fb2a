"""What quantized optimizers share: which states are codes, one launch per step, checkpoints."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lq_lightning._compat import first_row, local_tensor
from lq_lightning.codecs import derive_seed
from lq_lightning.kernels.optimizer_step import StateFormat, optimizer_step, row_length

from .config import OptimizerQuantization, check_stamp, reason_for_full_precision
from .state import (
    CODES,
    EXPONENT,
    SCALE,
    adopted,
    decoded,
    encoded,
    is_quantized,
    local_state,
    zero_state,
)

STAMP = "quantization"  # key in parameter groups


class ParameterPlan(NamedTuple):
    """What becomes of the states of one parameter.

    Attributes:
        name: of the parameter where the optimizer was given names, else its position.
        shape: of the whole parameter.
        nbytes: of its states before sharding, without step counters.
        reason: why they stay in fp32, or None where they are quantized.
    """

    name: str
    shape: tuple[int, ...]
    nbytes: int
    reason: str | None


class _Held:
    """Hides a parameter's entry from the casts of ``Optimizer.load_state_dict``."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.entry = entry


@dataclass
class _Batch:
    """Arguments of one call of the operator."""

    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: list[list[Tensor]] = field(default_factory=lambda: [[] for _ in range(6)])
    scalars: list[list[float]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    write_back: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class QuantizedOptimizer(Optimizer):
    """Base of the quantized optimizers, mixed into the optimizers of torch that they replace.

    States of large matrices are codes; the others stay in fp32 and, for fp32 parameters, are
    updated by torch itself, so that they get the same bits as without quantization.

    A subclass says which states there are and what the scalars of its rule are.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    has_step: ClassVar[bool] = True
    torch_class: ClassVar[type[Optimizer] | None] = None

    quantization_config: OptimizerQuantization
    _full_precision: dict[Tensor, str]

    # --- for subclasses ---------------------------------------------------------------------------

    def _rule(self, group: Mapping[str, Any]) -> str:
        raise NotImplementedError

    def _scalars(self, group: Mapping[str, Any], step: int, is_first: bool) -> list[float]:
        """The eight scalars of the operator ``optimizer_step``."""
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
        self, config: OptimizerQuantization, full_precision: Mapping[Tensor, str]
    ) -> None:
        """Start to store states as codes, those that exist already too.

        Args:
            config: formats and what stays in fp32.
            full_precision: further parameters that stay in fp32, with the reason.

        Raises:
            ValueError: a parameter group has hyperparameters that are not supported.
        """
        for group in self.param_groups:
            self.check_group(group)
        self.quantization_config = config
        self._full_precision = dict(full_precision)
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
        own = ("quantization_config", "_full_precision", "_step_supports_amp_scaling")
        return {**state, **{key: self.__dict__[key] for key in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle, or take what ``load_state_dict`` read."""
        entries = state.get("state")
        if entries is not None and any(isinstance(value, _Held) for value in entries.values()):
            self._check_saved(state["param_groups"], entries)
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
                name = str(len(plan)) if names is None else names[index]
                nbytes = round(per_element * param.numel())
                plan.append(ParameterPlan(name, tuple(param.shape), nbytes, reason))
        return plan

    def _formats(self) -> list[StateFormat]:
        return self.quantization_config.formats(len(self.state_names))

    # --- step -------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            RuntimeError: a sparse gradient.
            TypeError: a parameter or gradient that is neither fp32 nor bf16.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches: defaultdict[tuple[Any, ...], _Batch] = defaultdict(_Batch)
        for_torch = []
        position = 0
        for group in self.param_groups:
            left = []
            for param in group["params"]:
                position += 1
                if param.grad is None:
                    continue
                quantized = self.reason_for_full_precision(param) is None
                if not quantized and self.torch_class and param.dtype == torch.float32:
                    left.append(param)
                else:
                    self._add(batches, group, param, quantized, position)
            for_torch.append({**group, "params": left})
        if self.torch_class is not None and any(group["params"] for group in for_torch):
            self._step_of_torch(self.torch_class, for_torch)
        for key, batch in batches.items():
            self._launch(key, batch)
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

    def _add(
        self,
        batches: defaultdict[tuple[Any, ...], _Batch],
        group: Mapping[str, Any],
        param: Tensor,
        quantized: bool,
        position: int,
    ) -> None:
        """Advance a parameter's step and queue its update."""
        grad = param.grad
        if grad is None:
            raise AssertionError("only parameters with a gradient are updated")
        if grad.is_sparse:
            raise RuntimeError(
                f"{type(self).__name__} does not support sparse gradients. Use "
                "`nn.Embedding(sparse=False)`."
            )
        for tensor in (param, grad):
            if tensor.dtype not in (torch.float32, torch.bfloat16):
                raise TypeError(
                    f"{type(self).__name__} got a parameter or gradient of {tensor.dtype}; "
                    "allowed: float32, bfloat16. Convert the model, e.g. `model.bfloat16()`."
                )
        formats = self._formats() if quantized else _FULL_PRECISION[: len(self.state_names)]
        entry = self.state[param]
        is_first = not entry
        if is_first:
            if self.has_step:
                entry["step"] = torch.tensor(0.0)
            for name, fmt in zip(self.state_names, formats, strict=True):
                entry.update(zero_state(param, name, fmt))
        step = 0
        if self.has_step:
            entry["step"] += 1
            step = int(entry["step"])
        p, g = local_tensor(param), local_tensor(grad)
        if p.numel() == 0:
            return
        names = tuple(fmt.name for fmt in formats)
        batch = batches[(self._rule(group), p.device, p.dtype, g.dtype, names)]
        if not p.is_contiguous():
            batch.write_back.append((p, p := p.contiguous()))
        batch.params.append(p if p.dim() else p.view(1))
        batch.grads.append((g if g.dim() else g.view(1)).contiguous())
        for index, (name, fmt) in enumerate(zip(self.state_names, formats, strict=True)):
            state = local_state(entry, name, fmt)
            for offset, part in enumerate((state.codes, state.scale, state.exponent)):
                if part is not None:
                    batch.states[3 * index + offset].append(part if part.dim() else part.view(1))
        batch.scalars.append(self._scalars(group, step, is_first))
        stochastic = self.quantization_config.stochastic_rounding and p.dtype == torch.bfloat16
        seed = (self.quantization_config.seed, step, position)
        batch.seeds.append(derive_seed(*seed) if stochastic else 0)
        batch.offsets.append(first_row(param) * row_length(param.shape) if stochastic else 0)

    def _launch(self, key: tuple[Any, ...], batch: _Batch) -> None:
        rule, _, _, _, names = key
        optimizer_step(
            batch.params,
            batch.grads,
            *batch.states,
            torch.tensor(batch.scalars, dtype=torch.float32),
            batch.seeds,
            batch.offsets,
            rule,
            names[0],
            names[-1],
            self.quantization_config.stochastic_rounding,
        )
        for target, source in batch.write_back:
            target.copy_(source)

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
        handle = self.register_load_state_dict_pre_hook(_hide_entries)
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
                if not _is_part(key)
            }
            for name, fmt in zip(self.state_names, self._formats(), strict=True):
                if is_quantized(entry, name):
                    plain[name] = decoded(entry, name, params[index], fmt)
            result["state"][index] = plain
        for group in result["param_groups"]:
            group.pop(STAMP, None)
        return result

    def _check_saved(
        self, groups: Sequence[Mapping[str, Any]], entries: Mapping[Any, _Held]
    ) -> None:
        for group in groups:
            if STAMP in group:
                check_stamp(group[STAMP], self.quantization_config)
            else:
                has_codes = any(
                    any(_is_part(key) for key in entries[param].entry)
                    for param in group["params"]
                    if param in entries
                )
                if has_codes:
                    raise ValueError(
                        "the saved optimizer state has codes, but its parameter groups do not say "
                        f"of which format (no {STAMP!r}). Save it with `state_dict()`."
                    )

    def _adopt_all(self, entries: Mapping[Any, Any]) -> defaultdict[Any, Any]:
        state: defaultdict[Any, Any] = defaultdict(dict)
        for param, value in entries.items():
            state[param] = self._adopt(param, value.entry) if isinstance(value, _Held) else value
        return state

    def _adopt(self, param: Tensor, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Turn an entry of a checkpoint, or one of torch's optimizer, into one of ours."""
        quantized = self.reason_for_full_precision(param) is None
        result: dict[str, Any] = {}
        known: set[str] = {"step"} if self.has_step else set()
        if self.has_step and "step" in entry:
            step = torch.as_tensor(entry["step"], dtype=torch.float32).clone()
            on_device = not quantized and self._group_of(param).get("fused")
            result["step"] = step.to(local_tensor(param).device if on_device else "cpu")
        for name, fmt in zip(self.state_names, self._formats(), strict=True):
            known |= {name, name + CODES, name + SCALE, name + EXPONENT}
            if is_quantized(entry, name):
                dtypes = {CODES: torch.uint8, SCALE: torch.bfloat16, EXPONENT: torch.uint8}
                codes = {
                    name + part: adopted(entry[name + part], param, dtype)
                    for part, dtype in dtypes.items()
                    if name + part in entry
                }
                if quantized:
                    result.update(codes)
                else:
                    result[name] = decoded(codes, name, param, fmt)
            elif entry.get(name) is not None:
                if quantized:
                    result.update(encoded(entry[name], name, param, fmt))
                else:
                    result[name] = adopted(entry[name], param, torch.float32)
        unknown = [key for key, value in entry.items() if key not in known and value is not None]
        if unknown:
            raise ValueError(
                f"the optimizer state has {', '.join(map(repr, unknown))}, which "
                f"{type(self).__name__} does not know; allowed: {', '.join(sorted(known))}."
            )
        return result

    def _group_of(self, param: Tensor) -> Mapping[str, Any]:
        return next(g for g in self.param_groups if any(p is param for p in g["params"]))


_FULL_PRECISION = OptimizerQuantization(first_moment="float32", second_moment="float32").formats(2)
_UNSUPPORTED = {
    "amsgrad": "its running maximum has no quantized form. Use amsgrad=False.",
    "capturable": "step counters of quantized states are on the CPU. Use capturable=False.",
    "differentiable": "codes have no gradient. Use differentiable=False.",
}


def _is_part(key: str) -> bool:
    return key.endswith((CODES, SCALE, EXPONENT))


def _hide_entries(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    held = {key: _Held(entry) for key, entry in state_dict["state"].items()}
    return {**state_dict, "state": held}


def excluded(full_precision: Iterable[Tensor]) -> dict[Tensor, str]:
    """Parameters that the user keeps in fp32."""
    return dict.fromkeys(full_precision, "asked for by `full_precision`")
