"""Fine-tune a pretrained model with each quantization, paired by seed with bf16.

    python benchmarks/fine_tuning.py --model SmolLM2-135M-Instruct.Q4_1.gguf --jobs 8 \\
        --time-budget 300 --json fine_tuning.json                            # all GPUs
    python benchmarks/fine_tuning.py --model DIR --rows "bf16;agoq" --seeds 1 --steps 20

Full fine-tuning, and LoRA, on half text and half tasks that a program scores
(``fine_tuning_data.py``), for three epochs, which ``aq_sgd`` needs. ``--model`` is as in
``pretrained.py``. A seed has the same data in the same order in all rows; "bf16, other start" shows
what chance alone does. Losses are of text that was not trained on, accuracies of new tasks:
"alone" for the saved weights, in bf16 without codes, and "with codes" where hidden states between
layers are coded in evaluation, too (not by ``aq_sgd``). ``quantized_fsdp`` is two nodes, emulated
in one process; "FSDP2" is the same in full precision.

Rows begin in the order of importance, the seeds of one after the other.
The report is written after every run; a report that exists is continued.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from common import argument_parser, choices, free_memory, table, write_report
from fine_tuning_data import Data, load_data
from fine_tuning_runs import NODES, ROWS, Settings, train
from pretrained import load
from table import FINE_TUNING_HEADER, Run, fine_tuning_rows
from torch import nn

Task = tuple[str, int]

POLL_S = 5.0


# --- runs -----------------------------------------------------------------------------------------


def run_one(base: nn.Module, data: Data, task: Task, settings: Settings) -> Run:
    """Train a pair of row and seed; return the measurements, or the error."""
    name, seed = task
    run: Run = {"row": name, "seed": seed}
    try:
        run |= train(base, data, ROWS[name], seed, settings)
    except Exception:  # the others go on; the report and the exit code tell of it
        run["error"] = traceback.format_exc()
    if data.text.tokens.is_cuda:
        run["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    free_memory()  # patched modules refer to themselves, and other processes need the cache
    return run


def work(device: str, prepared: Path, settings: Settings, tasks: Any, results: Any) -> None:
    """Train tasks until None comes; put the result of each into a queue."""
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(device)
    task = tasks.get()
    if task is not None:  # model and data are there by now
        base, data = torch.load(prepared, weights_only=False)
        base, data = base.to(device), data.to(torch.device(device))
    while task is not None:
        results.put(run_one(base, data, task, settings))
        task = tasks.get()


def prepare(args: argparse.Namespace) -> tuple[nn.Module, Data]:
    """Return the model and the data of all runs."""
    model, tokenizer = load(args.model)
    count = args.train or args.settings.steps * args.settings.batch // 6  # three epochs
    return model, load_data(tokenizer, args.seq, count, args.val)


def results_of(args: argparse.Namespace, tasks: Sequence[Task]) -> Iterator[Run]:
    """Run pairs of row and seed, in this process or in ``--jobs`` for each device."""
    start = time.perf_counter()
    count = 0 if args.cpu else torch.cuda.device_count()
    devices = [f"cuda:{index}" for index in range(count)] or ["cpu"]
    waiting = list(tasks)

    def may_start() -> bool:
        elapsed = time.perf_counter() - start
        return bool(waiting) and not (args.time_budget and elapsed > args.time_budget)

    if args.jobs:
        yield from _in_processes(args, devices * args.jobs, waiting, may_start)
    else:
        base, data = prepare(args)
        base, data = base.to(devices[0]), data.to(torch.device(devices[0]))
        while may_start():
            yield run_one(base, data, waiting.pop(0), args.settings)
    if waiting:
        print(f"no time for {len(waiting)} runs, from {waiting[0][0]}:{waiting[0][1]} on")


def _in_processes(
    args: argparse.Namespace,
    devices: Sequence[str],
    waiting: list[Task],
    may_start: Callable[[], bool],
) -> Iterator[Run]:
    """Run waiting pairs, each process one at a time, while more may start."""
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared.pt"
        options = (prepared, args.settings, inbox, outbox)
        workers = [
            context.Process(target=work, args=(device, *options), daemon=True)
            for device in devices[: len(waiting)]
        ]
        for worker in workers:  # they import what they need while this process prepares
            worker.start()
        torch.save(prepare(args), prepared)
        running = 0
        while running or may_start():
            while running < len(workers) and may_start():
                inbox.put(waiting.pop(0))
                running += 1
            yield _next(outbox, workers)
            running -= 1
        for _ in workers:
            inbox.put(None)
        for worker in workers:
            worker.join()


def _next(outbox: Any, workers: Sequence[Any]) -> Run:
    """Wait for a result while all processes live."""
    while True:
        try:
            run: Run = outbox.get(timeout=POLL_S)
        except queue.Empty as empty:
            dead = [worker for worker in workers if not worker.is_alive()]
            if dead:
                code = dead[0].exitcode
                raise RuntimeError(f"a process ended by itself, with exit code {code}") from empty
        else:
            return run


# --- reports --------------------------------------------------------------------------------------


def summary(runs: Sequence[Run]) -> str:
    """Lay out the comparison for a terminal, and name failed runs."""
    failed = [f"failed: {run['row']}:{run['seed']}" for run in runs if "error" in run]
    return "\n".join([table(fine_tuning_rows(runs), FINE_TUNING_HEADER), *failed])


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that all runs of a report share."""
    own = {"model": args.model.name, "seq": args.seq, "train": args.train, "val": args.val}
    return own | asdict(args.settings)


def earlier_runs(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Run]:
    """Return the runs of a report to be continued, without failed ones."""
    if not args.json or not args.json.exists():
        return []
    results = json.loads(args.json.read_text())["results"]
    if results["settings"] != settings_of(args):
        parser.error(f"{args.json} has runs with {results['settings']}: name another file")
    return [run for run in results["runs"] if "error" not in run]


def parser_of() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="wheel, GGUF file or folder")
    parser.add_argument("--rows", default=";".join(ROWS), help="separated by `;`")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each row")
    for field in fields(Settings):
        name, default = field.name.replace("_", "-"), field.default
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--seq", type=int, default=256, help="tokens of a sequence")
    parser.add_argument(
        "--train", type=int, help="sequences of text, and of tasks (default: for three epochs)"
    )
    parser.add_argument("--val", type=int, default=128, help="likewise, to validate on")
    parser.add_argument("--jobs", type=int, default=0, help="processes of each GPU; 0: this one")
    parser.add_argument("--time-budget", type=float, help="seconds after which no run starts")
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    return parser


def main() -> int:
    """Run and print the comparison; return the exit code."""
    parser = parser_of()
    args = parser.parse_args()
    if args.batch % (2 * NODES):
        parser.error(f"--batch {args.batch}: each of {NODES} nodes reads as much text as tasks")
    names = choices(parser, "rows", args.rows, ROWS, ";")
    args.settings = Settings(**{f.name: getattr(args, f.name) for f in fields(Settings)})
    runs = earlier_runs(args, parser)
    done = {(run["row"], run["seed"]) for run in runs}
    pairs = [(name, seed) for name in names for seed in range(args.seeds)]
    start = time.perf_counter()
    for run in results_of(args, [pair for pair in pairs if pair not in done]):
        runs.append(run)
        runs.sort(key=lambda run: (list(ROWS).index(run["row"]), run["seed"]))
        write_report(args.json, "fine_tuning", {"settings": settings_of(args), "runs": runs})
        shown = "failed" if "error" in run else f"{run['alone']['text_loss']:.4f}"
        print(f"{time.perf_counter() - start:6.1f} s  {run['row']}:{run['seed']} {shown}")
    print(summary(runs))
    for run in runs:
        if "error" in run:
            print(f"{run['row']}:{run['seed']}\n{run['error']}", file=sys.stderr)
    return int(any("error" in run for run in runs))


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())
