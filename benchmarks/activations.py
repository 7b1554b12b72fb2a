"""Time and saved bytes of a Llama decoder layer: bf16, checkpointing, FP8, and this library.

One process measures all variants of a shape in turn, on the same fresh random inputs, so that heat
and clocks meet all of them alike. Per variant:

* ``ms``: of a forward and backward, median over rounds; gradients of weights are new each time.
* ``saved_units``: what is held between forward and backward, in U, the bytes of the layer's input
  in bf16: growth of the allocated memory over a forward, the input included where it is kept, the
  output not, since the next layer's input is that. ``peak_units`` is the largest growth over
  forward and backward, gradients of weights included.
* ``*_error``: relative L2 distance to plain bf16 of the output, of the input's gradient and of the
  largest over weights. Rounding alone gives plain bf16, compiled, about what its row shows.

A variant that fails becomes a row with its reason. Examples::

    python benchmarks/activations.py --preset table --json activations.json
    python benchmarks/activations.py --cases llama3_8b:32768x1 --variants 'bf16,bf16; compiled'
    python benchmarks/activations.py --preset tiny --device cpu
    python benchmarks/research/draw_activations.py activations.json --picture activations.png

``--preset coat`` is COAT's table 6. The paper says batch 4, its script measures 8, and only 8 gives
the megabytes of the table: so 8 it is here.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from common import table, write_report
from layer_subject import (
    Data,
    Subject,
    errors,
    free_memory,
    memory_units,
    prepare,
    reasons,
    results_of,
    synchronize,
    time_in_turn,
)
from llama_layer import BASE, COMPILED, VARIANTS, parse_case
from torch import Tensor

PRESETS = {
    "table": "llama3_8b:4096x2,llama2_7b:2048x4",
    "long": "llama3_8b:32768x1",
    "coat": "coat_2048:2048x8,coat_2048:4096x8,llama2_7b:2048x8,llama2_7b:4096x8",
    "tiny": "tiny:32x2",
}
COAT_VARIANTS = [BASE, COMPILED, "coat", "coat, compiled", "fp8-4bit, compiled"]
LIBRARIES = ("transformers", "torchao", "liger-kernel")


class Case:
    """One shape and what is measured on it.

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


def choose(text: str, preset: str) -> list[str]:
    """Return the variants to measure.

    Raises:
        ValueError: A name is unknown.
    """
    if not text:
        return COAT_VARIANTS if preset == "coat" else list(VARIANTS)
    if text in ("ours", "baselines"):
        wanted = text == "ours"
        return [n for n, v in VARIANTS.items() if v.ours == wanted or n in (BASE, COMPILED)]
    names = [name.strip() for name in text.split(";")]
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ValueError(f"unknown variants {unknown}: choose among {'; '.join(VARIANTS)}")
    return names


def arguments() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="table")
    parser.add_argument("--cases", default="", help="such as llama3_8b:4096x2,llama2_7b:2048x4")
    parser.add_argument(
        "--variants", default="", help="names between `;`, or `ours`, or `baselines`"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=15, help="to take the median of")
    parser.add_argument("--burst", type=int, default=3, help="inputs, and steps of a round")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile ahead")
    parser.add_argument("--seconds", type=float, default=600, help="start no variant after these")
    parser.add_argument("--json", type=Path, help="write the results here")
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
    try:
        names = choose(args.variants, "" if args.cases else args.preset)
        for case in cases:
            parse_case(case)
    except ValueError as error:
        parser.error(str(error))
    compile_ahead(cases, names, args)
    results: dict[str, Any] = {"libraries": versions_of_libraries()}
    results["rows"] = []
    for case in cases:
        print(case, flush=True)
        results["rows"] += Case(case, args).measure(names)
        write_report(args.json, "activations", results)
        print(shown([row for row in results["rows"] if row["case"] == case]), flush=True)
        torch.compiler.reset()
        free_memory()


def versions_of_libraries() -> dict[str, str | None]:
    """Return the versions of what is measured beside this library, None where it is missing."""
    found: dict[str, str | None] = dict.fromkeys(LIBRARIES)
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


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
