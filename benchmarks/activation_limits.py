"""Largest batch, length and depth of whole models on one GPU: COAT's table 7, AGoQ's 3 and 14.

A row is a size of a model and what a training step there needs. Each variant trains in a process of
its own, a plain loop on random tokens (``whole_models.py``); sizes grow until memory is out, and
the largest that fits is then timed. Layers are compiled, the loss makes logits in chunks::

    python benchmarks/activation_limits.py --tables coat7 --json limits_coat7.json
    python benchmarks/activation_limits.py --tables agoq3,agoq14_32k,agoq14_64k
    python benchmarks/activation_limits.py --tables tiny --device cpu --no-compile

* ``coat7``: Llama 2 7B, 2048 tokens, the largest batch. ``coat, fp32 weights`` is COAT's own
  setting; other codes go with bf16 weights that are rounded at random. With
  ``--micro-batches 2`` gradient sums take memory too, those of codes as codes.
* ``agoq3``: the sizes of OLMo-1B, 4 sequences, as that table's GPUs had, 8-bit states everywhere.
* ``agoq14_*``: layers of Llama 3 8B, up to as many as that table has, no optimizer.

``activations_gib`` is what a forward pass adds, bf16 copies of fp32 weights included.
``largest`` marks the largest size that fits, or that was asked for; one more is out of memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from activations import versions_of_libraries
from common import table, write_report
from layer_subject import free_memory, reasons
from llama_layer import SHAPES
from turns import Turn
from whole_models import GIB, VARIANTS, Point, Subject, Task

_LLAMA3 = SHAPES["llama3_8b"]
_LAYERS = Task(
    shape=replace(_LLAMA3, seq=32768, batch=1), layers=36, vocab=128256, grown="layers",
    sizes=(4,), most=36, states="none", variants=("agoq", "bf16", "coat"),
)  # fmt: skip
TASKS = {
    "coat7": Task(
        shape=replace(SHAPES["llama2_7b"], seq=2048, batch=1), layers=32, vocab=32000,
        grown="batch", sizes=(1,), most=256,
        variants=("coat", "bf16", "agoq", "torchao float8", "fp8-4bit", "bf16-mixed",
                  "coat, fp32 weights"),
    ),
    "agoq3": Task(
        shape=replace(SHAPES["olmo_1b"], seq=24576, batch=4), layers=16, vocab=50304,
        grown="seq", sizes=(24576, 32768), most=32768, states="codes",
        variants=("coat", "agoq", "fp8-4bit", "bf16, full checkpointing", "bf16"),
    ),
    "agoq14_32k": _LAYERS,
    "agoq14_64k": replace(_LAYERS, shape=replace(_LLAMA3, seq=65536, batch=1), layers=16, most=16),
    "tiny": Task(
        shape=replace(SHAPES["tiny"], seq=32, batch=1), layers=2, vocab=256, grown="batch",
        sizes=(1,), most=3, variants=("bf16", "agoq"),
    ),
}  # fmt: skip
GROWTH = 8  # at most, from one size to the next


def grow(measure: Callable[[int], Point | None], task: Task, limit: int) -> Iterator[Point]:
    """Yield what each size that is tried needs, the largest that fits last.

    Memory is taken to grow as it did between the last two sizes, the peak or what is saved if that
    grew more: at small sizes gradients or states make the peak. A guess that is too low is followed
    by a better one, one that is too high by the size below, then by ever larger steps.

    Args:
        measure: Of a size; None where it is out of memory.
        task: First and largest size.
        limit: Bytes that may be allocated.
    """
    fits: list[Point] = []
    failed = task.most + 1
    for size in task.sizes:
        point = measure(size)
        if point is None:
            failed = size
            break
        fits.append(point)
        yield point
    below = 1
    while fits and fits[-1].size + 1 < failed and failed > task.sizes[-1]:
        size = max(fits[-1].size + 1, min(_guess(fits, limit), failed - below))
        point = measure(size)
        if point is None:
            failed, below = size, 2 * below
        else:
            fits.append(point)
            below = 1
            yield point


def _guess(fits: list[Point], limit: int) -> int:
    """Return a size above the last one that fits, by how memory grew."""
    last = fits[-1]
    per_size = (last.saved + max(0, last.peak - last.held)) / last.size
    if len(fits) > 1:
        before, more = fits[-2], last.size - fits[-2].size
        per_size = max(last.saved - before.saved, last.peak - before.peak) / more
    room = int((limit - last.peak) / per_size) if per_size else GROWTH * last.size
    return last.size + max(1, min(room, (GROWTH - 1) * last.size))


class Trial:
    """A variant on a task, at any size.

    Args:
        task: Sizes.
        name: Of the variant.
        args: Of the command line.
    """

    def __init__(self, task: Task, name: str, args: argparse.Namespace) -> None:
        self.task, self.name, self.args = task, name, args
        self.device = torch.device(args.device)
        self.parameters = 0
        self.failed: list[dict[str, Any]] = []  # rows of the sizes that did
        self._subject: Subject | None = None
        self._layers = 0

    def subject(self, size: int) -> Subject:
        """Return the model, built anew where the size is that of the model."""
        task = self.task.at(size)
        if self._subject is None or self._layers != task.layers:
            self.release()
            self._subject = Subject(
                task if self.task.grown == "layers" else self.task,
                VARIANTS[self.name], self.device, self.args.compile, self.args.micro_batches,
            )  # fmt: skip
            self._layers = task.layers
            self.parameters = sum(p.numel() for p in self._subject.model.parameters())
        return self._subject

    def release(self) -> None:
        """Free the model."""
        if self._subject is not None:
            self._subject.release()
            self._subject = None

    def measure(self, size: int, steps: int = 1) -> Point | None:
        """Return what a size needs, None where it is out of memory.

        Raises:
            Exception: Whatever else goes wrong.
        """
        try:
            subject = self.subject(size)
            if size in self.task.sizes:
                subject.step(size)  # compiles, makes states
            return subject.step(size, steps)
        except torch.OutOfMemoryError:
            self.failed.append(self.row(size) | {"failed": "out of memory"})
        if self.task.grown == "layers":
            self.release()
        free_memory()
        return None

    def row(self, size: int, point: Point | None = None, warm: bool = False) -> dict[str, Any]:
        """Return the row of a size, with times if it ran before."""
        task = self.task.at(size)
        shape = task.shape
        sizes = {"layers": task.layers, "seq": shape.seq, "batch": shape.batch}
        if point is None:
            return {"variant": self.name, **sizes}
        tokens = shape.batch * shape.seq * self.args.micro_batches
        row = {
            "variant": self.name,
            **sizes,
            "parameters": self.parameters,
            "optimizer_gib": point.states / GIB,
            "activations_gib": point.saved / GIB,
            "peak_gib": point.peak / GIB,
            "loss": point.loss,
        }
        if warm:
            row |= {"step_ms": 1e3 * point.step_s, "tokens_per_s": tokens / point.step_s}
        return row

    def run(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows so far, after each size."""
        task, steps = self.task, self.args.steps
        searches = task.most > task.sizes[-1]
        last, timed = None, 1 if searches else steps
        rows: list[dict[str, Any]] = []
        for last in grow(lambda size: self.measure(size, timed), task, self._limit()):
            rows.append(self.row(last.size, last, last.size in task.sizes))
            yield rows + self.failed
        if last is None:
            yield self.failed
        elif searches:
            rows[-1]["largest"] = True
            yield rows + self.failed
            if task.grown != "layers":
                last = self.subject(last.size).step(last.size, steps)
                rows[-1] = self.row(last.size, last, True) | {"largest": True}
                yield rows + self.failed

    def _limit(self) -> int:
        if self.device.type != "cuda":
            return 0
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()

    def compile(self) -> None:
        """Fill the compiler's caches: one layer, at two sizes if a larger one will be tried."""
        sizes = self.task.sizes
        if self.task.grown == "layers":
            sizes = (1,)
        elif len(sizes) == 1:
            sizes = (*sizes, min(self.task.most, GROWTH * sizes[0]))
        self.task = replace(self.task, layers=1, states="none")
        for size in sizes:
            self.subject(size).step(size)


# --- processes ------------------------------------------------------------------------------------


def here(args: argparse.Namespace) -> None:
    """Measure one variant of one table in this process, once its turn comes."""
    name, _, variant = args.one.partition("/")
    if args.wait and not sys.stdin.readline():
        return  # whoever was to give a sign is gone
    # Lengths are given: each gets code of its own. Batches are searched: all but 1 share theirs.
    torch._dynamo.config.automatic_dynamic_shapes = TASKS[name].grown == "batch"
    trial = Trial(TASKS[name], variant, args)
    failure: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    with reasons(failure):
        if args.compile_only:
            trial.compile()
        else:
            for rows in trial.run():
                _write(args.rows, rows)
    if failure:
        _write(args.rows, [*rows, {"variant": variant} | failure])


def _write(path: Path | None, rows: list[dict[str, Any]]) -> None:
    text = json.dumps(rows)
    if path is None:
        print(text, flush=True)
        return
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


def turn_of(job: str, folder: Path, *options: str, **variables: str) -> Turn:
    """Start the process of a job, a table and a variant with a slash between them."""
    rows = folder / f"{job.replace('/', '_')}.json"
    words = [__file__, *sys.argv[1:], "--one", job, "--rows", str(rows), *options]
    # sizes of every kind in one process would leave gaps otherwise
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | variables
    return Turn(words, rows, folder / "log.txt", variables)


def compile_ahead(jobs: list[str], folder: Path, args: argparse.Namespace) -> None:
    """Compile all models at once, on all cores; what fails will say so when it is measured."""
    few = {"TORCHINDUCTOR_COMPILE_THREADS": "2"}  # beside the other processes
    while jobs:
        now, jobs = jobs[: args.jobs], jobs[args.jobs :]
        for turn in [turn_of(job, folder, "--compile-only", **few) for job in now]:
            turn.take(min(args.limit, args.deadline - time.monotonic()))
            turn.rows.unlink(missing_ok=True)


def measure_all(jobs: list[str], folder: Path, args: argparse.Namespace) -> None:
    """Measure one after the other; the next one imports meanwhile."""
    results: dict[str, Any] = {"libraries": versions_of_libraries(), "rows": []}
    turns = [turn_of(job, folder, "--wait") for job in jobs[:1]]
    for index, job in enumerate(jobs):
        turns += [turn_of(after, folder, "--wait") for after in jobs[index + 1 : index + 2]]
        began = time.monotonic()
        failure = turns[index].take(min(args.limit, args.deadline - began))
        rows = turns[index].result()
        name, _, variant = job.partition("/")
        if failure or not rows:
            rows.append({"variant": variant, "failed": failure or "ended without a result"})
        rows = [{"table": name} | row for row in rows]
        results["rows"] += rows
        print(f"{shown(rows)}\n{job}: {time.monotonic() - began:.1f} s", flush=True)
        write_report(args.json, "activation_limits", results)
    print(shown(results["rows"]))


# --- command line ---------------------------------------------------------------------------------


def shown(rows: list[dict[str, Any]]) -> str:
    """Lay out rows."""
    keys = ("layers", "seq", "batch", "optimizer_gib", "activations_gib", "peak_gib", "step_ms")
    keys += ("tokens_per_s",)
    lines = [
        [
            *(r["table"], r["variant"], *(f"{r[k]:.5g}" if k in r else "-" for k in keys)),
            r.get("failed") or "largest" * r.get("largest", False),
        ]
        for r in rows
    ]
    return table(lines, ["table", "variant", *keys, ""])


def arguments() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", default="coat7", help=f"between commas, of {', '.join(TASKS)}")
    parser.add_argument("--variants", default="", help=f"between `;`, of {'; '.join(VARIANTS)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=2, help="to take the mean time of")
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile ahead")
    parser.add_argument("--seconds", type=float, default=600, help="start no variant after these")
    parser.add_argument("--limit", type=float, default=120, help="seconds of a variant")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--log", type=Path, help="append what the processes say to this file")
    parser.add_argument("--one", metavar="TABLE/VARIANT", help="measure this in this process")
    parser.add_argument("--rows", type=Path, help="where --one writes its rows")
    parser.add_argument("--wait", action="store_true", help="for a line before --one begins")
    parser.add_argument("--compile-only", action="store_true", help="fill caches with --one")
    return parser


def main() -> None:
    """Measure, print, write JSON after every variant."""
    parser = arguments()
    args = parser.parse_args()
    args.deadline = time.monotonic() + args.seconds
    if args.one:
        here(args)
        return
    tables = args.tables.split(",")
    chosen = [name.strip() for name in args.variants.split(";") if name.strip()]
    if wrong := [n for n in tables if n not in TASKS] + [n for n in chosen if n not in VARIANTS]:
        parser.error(f"unknown {wrong}: see --help for tables and variants")
    jobs = [f"{name}/{variant}" for name in tables for variant in chosen or TASKS[name].variants]
    with tempfile.TemporaryDirectory() as folder:
        try:
            if args.jobs and args.compile:
                compile_ahead(jobs, Path(folder), args)
                print(f"compiled after {args.seconds - args.deadline + time.monotonic():.1f} s")
            measure_all(jobs, Path(folder), args)
        finally:
            log = Path(folder, "log.txt")
            if args.log is not None and log.is_file():
                args.log.write_text(log.read_text())


if __name__ == "__main__":
    main()
