"""Measurements of `activations.py`: times, bytes held, distance to plain bf16."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from llama_layer import VARIANTS, Layer, Shape, make_layer, rotary_embedding
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class _Fresh(torch.autograd.Function):
    """A layer's input as the layer before would make it: nothing but its users keep it alive."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, data: Tensor) -> Tensor:
        return data.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


@dataclass(slots=True)
class Data:
    """Inputs and gradients of outputs, shared by the variants of a shape.

    Attributes:
        x: ``[n, B, S, H]`` bf16; a call takes the ``i``-th of ``n``.
        grad: Gradients of outputs, shaped as ``x``.
        rotary: Cosine and sine.
    """

    x: Tensor
    grad: Tensor
    rotary: tuple[Tensor, Tensor]

    @classmethod
    def make(cls, shape: Shape, count: int, device: torch.device) -> Data:
        """Draw ``count`` inputs and gradients."""
        size = (count, shape.batch, shape.seq, shape.hidden)
        x, grad = (torch.empty(size, dtype=torch.bfloat16, device=device) for _ in range(2))
        data = cls(x, grad, rotary_embedding(shape, device))
        data.refill()
        return data

    def refill(self) -> None:
        """Draw everything anew."""
        self.x.normal_()
        self.grad.normal_(0.0, 1e-3)


@dataclass(slots=True)
class Subject:
    """A variant under measurement.

    Attributes:
        name: Name of the variant.
        layer: Its own layer.
        call: Function that is trained.
        row: Measurements so far.
        times: Milliseconds of its rounds.
    """

    name: str
    layer: nn.Module
    call: Layer
    row: dict[str, Any]
    times: list[float] = field(default_factory=list)

    def train(self, data: Data, index: int = 0) -> tuple[Tensor, Tensor]:
        """Run forward and backward; return the output and the gradient of the input."""
        with VARIANTS[self.name].context():
            x = data.x[index].detach().requires_grad_()
            out = self.call(x, *data.rotary)
            out.backward(data.grad[index])
        if x.grad is None:
            raise RuntimeError("the input got no gradient")
        return out.detach(), x.grad

    def clear(self) -> None:
        """Drop the gradients of the weights."""
        for parameter in self.layer.parameters():
            parameter.grad = None


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_memory() -> None:
    """Return what nothing refers to."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def memory_units(subject: Subject, data: Data, shape: Shape) -> tuple[float, float | None]:
    """Return what one forward leaves allocated, and the largest growth until backward is done.

    On the CPU, whose allocator does not count, the distinct storages that autograd saves; what a
    checkpoint or the hooks of a variant keep elsewhere is missing there.
    """
    if data.x.device.type == "cpu":
        return _saved_storages(subject, data) / shape.unit_nbytes, None
    anchor = torch.zeros((), device=data.x.device, requires_grad=True)
    subject.clear()
    with VARIANTS[subject.name].context():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        x = _Fresh.apply(anchor, data.x[0])
        out = subject.call(x, *data.rotary)
        del x
        saved = torch.cuda.memory_allocated() - before - out.nbytes
        out.backward(data.grad[0])
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    subject.clear()
    return saved / shape.unit_nbytes, peak / shape.unit_nbytes


def _saved_storages(subject: Subject, data: Data) -> int:
    outside = [*subject.layer.parameters(), *data.rotary]
    known = {tensor.untyped_storage().data_ptr() for tensor in outside}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        subject.train(data)
    subject.clear()
    return sum(kept.values())


def distance(value: Tensor, reference: Tensor) -> float:
    """Return the relative L2 distance of two tensors; NaN where one has a NaN."""
    difference = torch.linalg.vector_norm(value.float() - reference.float())
    return float(difference / torch.linalg.vector_norm(reference.float()))


def results_of(subject: Subject, data: Data) -> dict[str, Tensor]:
    """Return output, gradient of the input, and gradients of the weights by name."""
    subject.clear()
    out, grad = subject.train(data)
    weights = {
        f"weight {name}": p.grad for name, p in subject.layer.named_parameters() if p.ndim > 1
    }
    missing = [name for name, value in weights.items() if value is None]
    if missing:
        raise RuntimeError(f"no gradient of {', '.join(missing)}")
    found = {"output": out, "input": grad, **weights}
    subject.clear()
    return found


def errors(found: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """Compare with plain bf16."""
    distances = {name: distance(found[name], value) for name, value in reference.items()}
    weights = [value for name, value in distances.items() if name.startswith("weight ")]
    return {
        "output_error": distances["output"],
        "input_gradient_error": distances["input"],
        "weight_gradient_error": max(weights),
    }


@contextmanager
def reasons(row: dict[str, Any]) -> Iterator[None]:
    """Note what went wrong in the row instead of ending the run."""
    try:
        yield
    except torch.OutOfMemoryError:
        row["failed"] = "out of memory"
    except Exception as error:  # of any library: it is this row's result
        lines = [line for line in str(error).splitlines() if line.strip()]
        row["failed"] = f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def prepare(name: str, shape: Shape, device: torch.device) -> Subject:
    """Make a variant's layer; the first call compiles it."""
    layer = make_layer(shape, device)
    return Subject(name, layer, VARIANTS[name].build(layer, name), {"variant": name})


def time_round(subject: Subject, data: Data) -> float:
    """Return the milliseconds of one forward and backward, from one of each input."""
    count = data.x.shape[0]
    data.refill()  # on the GPU also work behind which the first launches hide
    if data.x.device.type == "cpu":
        began = time.perf_counter()
        for index in range(count):
            subject.train(data, index)
            subject.clear()
        return (time.perf_counter() - began) * 1e3 / count
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for index in range(count):
        subject.train(data, index)
        subject.clear()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count


def time_in_turn(subjects: Sequence[Subject], data: Data, rounds: int) -> None:
    """Time all variants, one round of each after the other."""
    for index in range(rounds):
        for subject in subjects if index % 2 == 0 else subjects[::-1]:
            if "failed" not in subject.row:
                with reasons(subject.row):
                    subject.times.append(time_round(subject, data))
    for subject in subjects:
        if subject.times and "failed" not in subject.row:
            subject.row["ms"] = statistics.median(subject.times)
            subject.row["ms_spread"] = max(subject.times) - min(subject.times)
