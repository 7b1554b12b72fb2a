"""Time and saved bytes of a Llama decoder layer: bf16, checkpointing, FP8, and this library.

One process measures all variants of a shape in turn, on the same fresh random inputs, so that heat
and clocks meet all of them alike. Per variant:

* ``ms``: of a forward and backward, median over rounds; gradients of weights are new each time.
* ``saved_units``: memory held between forward and backward, in U, the bytes of the layer's input in
  bf16: growth of the allocated memory over a forward, the input included where it is kept, without
  the output, which is the next layer's input. ``peak_units`` is the largest growth over forward and
  backward, gradients of weights included.
* ``*_error``: relative L2 distance to plain bf16 of the output, of the input's gradient and of the
  largest over weights. The row of compiled bf16 shows the effect of rounding alone.

A variant that fails becomes a row with its reason. Examples::

    python benchmarks/activations.py --preset table --json activations.json
    python benchmarks/activations.py --cases llama3_8b:32768x1 --variants 'bf16,bf16; compiled'
    python benchmarks/activations.py --preset tiny --device cpu

``--preset coat`` is COAT's table 6. The paper says batch 4, its script measures 8, and only 8 gives
the megabytes of the table: so 8 it is here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from common import argument_parser, choices, free_memory, synchronize, table, version, write_report
from llama_layer import (
    BASE,
    COMPILED,
    VARIANTS,
    Layer,
    Shape,
    make_layer,
    parse_case,
    rotary_embedding,
)
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

PRESETS = {
    "table": "llama3_8b:4096x2,llama2_7b:2048x4",
    "long": "llama3_8b:32768x1",
    "coat": "coat_2048:2048x8,coat_2048:4096x8,llama2_7b:2048x8,llama2_7b:4096x8",
    "tiny": "tiny:32x2",
}
COAT_VARIANTS = [BASE, COMPILED, "coat", "coat, compiled", "fp8-4bit, compiled"]
LIBRARIES = ("transformers", "torchao", "liger-kernel")


# --- measurements of one variant ------------------------------------------------------------------


class _Fresh(torch.autograd.Function):
    """A layer's input, as made by the layer before: only its users keep it alive."""

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


def memory_units(subject: Subject, data: Data, shape: Shape) -> tuple[float, float | None]:
    """Return the bytes that one forward leaves allocated, and the largest growth through backward.

    On a CPU, whose allocator does not count: the distinct storages that autograd saves, without
    those of checkpoints and hooks.
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
    """Write an error into the row instead of ending the run."""
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


# --- a shape --------------------------------------------------------------------------------------


class Case:
    """One shape with the measurements of its variants.

    Args:
        case: Such as ``llama3_8b:4096x2``.
        args: Of the command line.
    """

    def __init__(self, case: str, args: argparse.Namespace) -> None:
        self.name, self.shape = parse_case(case)
        self.args = args
        self.device = torch.device(args.device)
        self.data = Data.make(self.shape, args.burst, self.device)
        self.subjects: list[Subject] = []
        self._reference: dict[str, Tensor] | None = None

    def measure(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Measure variants; return a row of each."""
        rows: list[dict[str, Any]] = []
        for name in names:
            row: dict[str, Any] = {"case": self.name, "variant": name}
            rows.append(row)
            if time.monotonic() > self.args.deadline:
                row["failed"] = f"not tried: --seconds {self.args.seconds:g} were over"
                continue
            with reasons(row):
                self._add(name, row)
            free_memory()
            print(f"  {name}: {row.get('failed') or 'ready'}", flush=True)
        self._reference = None
        time_in_turn(self.subjects, self.data, self.args.rounds)
        return [_with_ratios(row, rows) for row in rows]

    def _add(self, name: str, row: dict[str, Any]) -> None:
        """Compile a variant, compare it with plain bf16 and count its bytes."""
        began = time.monotonic()
        subject = prepare(name, self.shape, self.device)
        subject.row = row
        subject.train(self.data)
        synchronize()
        row["first_call_s"] = time.monotonic() - began
        found = results_of(subject, self.data)
        if name == BASE:
            self._reference = found
        if self._reference is not None:
            row |= errors(found, self._reference)
        del found
        row["saved_units"], row["peak_units"] = memory_units(subject, self.data, self.shape)
        row["saved_mb"] = row["saved_units"] * self.shape.unit_nbytes / 1e6
        self.subjects.append(subject)


def _with_ratios(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    for key, name in (("speedup_over_bf16", BASE), ("speedup_over_compiled", COMPILED)):
        base = next((r["ms"] for r in rows if r["variant"] == name and "ms" in r), None)
        if base is not None and "ms" in row:
            row[key] = base / row["ms"]
    return row


def compile_ahead(cases: Sequence[str], names: Sequence[str], args: argparse.Namespace) -> None:
    """Fill the compiler's caches from several processes, which share them with this one."""
    compiled = [name for name in names if VARIANTS[name].compiled]
    jobs = [(case, name) for case in cases for name in compiled]
    running = []
    for start in range(min(args.jobs, len(jobs))):
        chosen = [f"{case}/{name}" for case, name in jobs[start :: args.jobs]]
        command = [sys.executable, __file__, "--device", args.device, "--compile-only", *chosen]
        quiet = subprocess.DEVNULL
        few = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}  # beside the other processes
        running.append(subprocess.Popen(command, stdout=quiet, stderr=quiet, env=few))
    for process in running:
        left = max(1.0, args.deadline - time.monotonic())
        try:
            process.wait(left)
        except subprocess.TimeoutExpired:
            process.kill()


def compile_only(jobs: Sequence[str], device: torch.device) -> None:
    """Compile some variants; what fails will say so when it is measured."""
    for job in jobs:
        case, _, name = job.partition("/")
        with reasons({}):
            _, shape = parse_case(case)
            subject = prepare(name, shape, device)
            subject.train(Data.make(shape, 1, device))
            synchronize()
        free_memory()


def arguments() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = argument_parser(__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="table")
    parser.add_argument("--cases", default="", help="such as llama3_8b:4096x2,llama2_7b:2048x4")
    parser.add_argument("--variants", default="", help="separated by `;`: " + "; ".join(VARIANTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=15, help="to take the median of")
    parser.add_argument("--burst", type=int, default=3, help="inputs, and steps of a round")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile ahead")
    parser.add_argument("--seconds", type=float, default=600, help="start no variant after these")
    parser.add_argument("--compile-only", nargs="+", metavar="CASE/VARIANT", default=[])
    return parser


def main() -> None:
    """Measure, print, write JSON after every shape."""
    parser = arguments()
    args = parser.parse_args()
    args.deadline = time.monotonic() + args.seconds
    torch.manual_seed(0)
    if args.compile_only:
        compile_only(args.compile_only, torch.device(args.device))
        return
    cases = (args.cases or PRESETS[args.preset]).split(",")
    some = COAT_VARIANTS if args.preset == "coat" and not args.cases else VARIANTS
    names = choices(parser, "variants", args.variants or ";".join(some), VARIANTS, ";")
    try:
        for case in cases:
            parse_case(case)
    except ValueError as error:
        parser.error(str(error))
    compile_ahead(cases, names, args)
    results: dict[str, Any] = {"libraries": {name: version(name) for name in LIBRARIES}}
    results["rows"] = []
    for case in cases:
        print(case, flush=True)
        results["rows"] += Case(case, args).measure(names)
        write_report(args.json, "activations", results)
        print(shown([row for row in results["rows"] if row["case"] == case]), flush=True)
        torch.compiler.reset()
        free_memory()


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """Lay out the rows of one shape."""

    def number(row: dict[str, Any], key: str, digits: int) -> str:
        return "-" if row.get(key) is None else f"{row[key]:.{digits}f}"

    header = ["variant", "ms", "saved U", "peak U", "of bf16", "of compiled", "dx err", "dW err"]
    keys = [("ms", 2), ("saved_units", 2), ("peak_units", 1), ("speedup_over_bf16", 2)]
    keys += [("speedup_over_compiled", 2), ("input_gradient_error", 4)]
    keys += [("weight_gradient_error", 4)]
    lines = [[r["variant"], *(number(r, key, digits) for key, digits in keys)] for r in rows]
    failed = [f"{r['variant']}: {r['failed']}" for r in rows if "failed" in r]
    return "\n".join([table(lines, header), *failed])


if __name__ == "__main__":
    main()
