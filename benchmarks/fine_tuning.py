"""Fine-tune a pretrained model with each quantization, paired by seed with bf16.

    python benchmarks/fine_tuning.py --model SmolLM2-135M-Instruct.Q4_1.gguf --jobs 8 \\
        --time-budget 300 --json fine_tuning.json                            # all GPUs
    python benchmarks/fine_tuning.py --model DIR --rows "bf16;agoq" --seeds 1 --steps 20
    python benchmarks/fine_tuning.py --show fine_tuning.json

Full fine-tuning, and LoRA, on half text and half tasks that a program scores
(``fine_tuning_data.py``), for three epochs, which ``aq_sgd`` needs. ``--model`` is as in
``pretrained.py``. A seed has the same data in the same order in all rows; what two rows of a seed
differ by is compared with what another start does ("bf16, other start"). Losses are those of text
that was not trained on, accuracies those of new tasks: "alone" of the weights that are saved, in
bf16 without codes, and "with codes" where layers pass each other coded hidden states in evaluation
too (``aq_sgd``: not there). ``quantized_fsdp`` is two nodes, emulated in one process bit for bit.

Every process runs one pair of row and seed after the other; rows begin in the order of importance.
The report is written after every run. Where the file exists, its runs are kept and not repeated.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from common import table, write_report
from fine_tuning_data import Data, load_data
from fine_tuning_runs import BASELINE, LORA, ROWS, Settings, train
from pretrained import load

Run = dict[str, Any]
Task = tuple[str, int]

POLL_S = 5.0
HEADER = ("row", "seeds", "text +nats", "±", "text +%", "±", "accuracy", "±")
HEADER += ("coded +nats", "±", "coded acc.", "±", "bits", "s")


# --- runs -----------------------------------------------------------------------------------------


def work(device: str, prepared: Path, settings: Settings, tasks: Any, results: Any) -> None:
    """Train what comes, until None comes, and send back what was measured, or what went wrong."""
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(device)
    base, data = None, None
    while (task := tasks.get()) is not None:
        if base is None:  # it is there by now; imports took as long as it took to prepare
            base, data = torch.load(prepared, weights_only=False)
            base, data = base.to(device), data.to(torch.device(device))
        name, seed = task
        run: Run = {"row": name, "seed": seed}
        try:
            run |= train(base, data, ROWS[name], seed, settings)
        except Exception:  # the others go on; the report and the exit code tell of it
            run["error"] = traceback.format_exc()
        gc.collect()  # patched modules refer to themselves
        if device != "cpu":  # other processes need what this one has cached
            run["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.empty_cache()
        results.put(run)


def prepare(args: argparse.Namespace, path: Path) -> None:
    """Write model and data, which every process reads."""
    model, tokenizer = load(args.model)
    count = args.train or args.settings.steps * args.settings.batch // 6  # three epochs
    data: Data = load_data(tokenizer, args.seq, count, args.val)
    torch.save((model, data), path)


def run_all(args: argparse.Namespace, tasks: Sequence[Task], report: list[Run]) -> None:
    """Run pairs of row and seed on all devices, and write the report after each."""
    start = time.perf_counter()
    devices = ["cpu"]
    if torch.cuda.device_count() and not args.cpu:
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared.pt"
        options = (prepared, args.settings, inbox, outbox)
        workers = [
            context.Process(target=work, args=(device, *options), daemon=True)
            for device in (devices * args.jobs)[: len(tasks)]
        ]
        for worker in workers:
            worker.start()
        prepare(args, prepared)
        print(f"prepared after {time.perf_counter() - start:.1f} s", flush=True)
        waiting, running = list(tasks), 0
        while waiting and running < len(workers):
            inbox.put(waiting.pop(0))
            running += 1
        while running:
            run = _next(outbox, workers)
            running -= 1
            report.append(run)
            write(args, report)
            elapsed = time.perf_counter() - start
            shown = "failed" if "error" in run else f"{run['alone']['text_loss']:.4f}"
            print(f"{elapsed:6.1f} s  {run['row']}:{run['seed']} {shown}", flush=True)
            if waiting and not (args.time_budget and elapsed > args.time_budget):
                inbox.put(waiting.pop(0))
                running += 1
        for worker in workers:
            inbox.put(None)
        for worker in workers:
            worker.join()
    if waiting:
        print(f"no time for {len(waiting)} runs, from {waiting[0][0]}:{waiting[0][1]} on")


def _next(outbox: Any, workers: Iterable[Any]) -> Run:
    """Wait for a result while all processes live."""
    while True:
        try:
            run: Run = outbox.get(timeout=POLL_S)
            return run
        except queue.Empty:
            dead = [worker for worker in workers if not worker.is_alive()]
            if dead:
                raise RuntimeError(f"a process ended by itself: exit code {dead[0].exitcode}")


# --- reports --------------------------------------------------------------------------------------


def write(args: argparse.Namespace, runs: list[Run]) -> None:
    """Write the report of the runs so far."""
    if args.json:
        results = {"settings": settings_of(args), "runs": runs}
        write_report(args.json.with_suffix(".part"), "fine_tuning", results)
        args.json.with_suffix(".part").replace(args.json)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return what all runs of a report share."""
    own = {"model": args.model.name, "seq": args.seq, "train": args.train, "val": args.val}
    return own | asdict(args.settings)


def compare(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return for each row the paired differences to bf16: mean and standard error."""
    by_row: dict[str, dict[int, Run]] = {}
    for run in runs:
        if "error" not in run:
            by_row.setdefault(run["row"], {})[run["seed"]] = run
    rows = []
    for name in [name for name in ROWS if name in by_row]:
        exact = by_row.get(LORA + BASELINE if name.startswith(LORA) else BASELINE, {})
        own = by_row[name]
        pairs = [(own[seed], exact[seed]) for seed in sorted(own) if seed in exact]
        if not pairs:
            continue
        row: dict[str, Any] = {"row": name, "seeds": len(pairs)}
        row["text_nats"] = _mean([_loss(a) - _loss(b) for a, b in pairs])
        row["text_percent"] = _mean([100 * (_loss(a) / _loss(b) - 1) for a, b in pairs])
        row["accuracy"] = _mean([_accuracy(a) - _accuracy(b) for a, b in pairs])
        if "with_codes" in pairs[0][0]:
            row["coded_nats"] = _mean([_loss(a, "with_codes") - _loss(b) for a, b in pairs])
            row["coded_accuracy"] = _mean(
                [_accuracy(a, "with_codes") - _accuracy(b) for a, b in pairs]
            )
            row["bits"] = statistics.mean(a["bits"] for a, _ in pairs)
        row["seconds"] = statistics.mean(a["seconds"] for a, _ in pairs)
        row["absolute"] = [
            statistics.mean(_loss(a) for a, _ in pairs),
            statistics.mean(_accuracy(a) for a, _ in pairs),
        ]
        rows.append(row)
    return rows


def _loss(run: Run, how: str = "alone") -> float:
    return float(run[how]["text_loss"])


def _accuracy(run: Run, how: str = "alone") -> float:
    return float(run[how]["task"]["accuracy"])


def _mean(values: Sequence[float]) -> tuple[float, float | None]:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return statistics.mean(values), error


def summary(runs: Sequence[Run]) -> str:
    """Lay out the comparison for a terminal."""
    rows = compare(runs)
    lines = [
        f"{row['row']}: loss {row['absolute'][0]:.4f}, {row['absolute'][1]:.1f}% right"
        for row in rows
        if row["row"] in (BASELINE, LORA + BASELINE)
    ]
    lines.append(table([_cells(row) for row in rows], HEADER))
    failed = [f"failed: {run['row']}:{run['seed']}" for run in runs if "error" in run]
    return "\n".join(lines + failed)


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [row["row"], str(row["seeds"])]
    for key, digits in (
        ("text_nats", 4),
        ("text_percent", 2),
        ("accuracy", 1),
        ("coded_nats", 4),
        ("coded_accuracy", 1),
    ):
        mean, error = row.get(key, (None, None))
        cells.append("-" if mean is None else f"{mean:+.{digits}f}")
        cells.append("-" if error is None else f"{error:.{digits}f}")
    bits = row.get("bits")
    return [*cells, "-" if bits is None else f"{bits:.2f}", f"{row['seconds']:.1f}"]


def main() -> int:
    """Run what is asked for and print the comparison; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="wheel, GGUF file or folder")
    parser.add_argument("--rows", default=";".join(ROWS), help="separated by `;`")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each row")
    for field in fields(Settings):
        kind = type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    parser.add_argument("--seq", type=int, default=256, help="tokens of a sequence")
    parser.add_argument(
        "--train", type=int, help="sequences of text, and of tasks (default: for three epochs)"
    )
    parser.add_argument("--val", type=int, default=128, help="likewise, to validate on")
    parser.add_argument("--jobs", type=int, default=1, help="processes of each GPU")
    parser.add_argument("--time-budget", type=float, help="seconds after which no run starts")
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    parser.add_argument("--json", type=Path, help="the report")
    parser.add_argument("--show", type=Path, help="print a report; no run")
    args = parser.parse_args()
    if args.show:
        print(summary(json.loads(args.show.read_text())["results"]["runs"]))
        return 0
    if args.model is None:
        parser.error("--model or --show is needed")
    names = args.rows.split(";")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"unknown rows {unknown}: choose among {'; '.join(ROWS)}")
    args.settings = Settings(**{f.name: getattr(args, f.name) for f in fields(Settings)})
    runs: list[Run] = []
    if args.json and args.json.exists():
        results = json.loads(args.json.read_text())["results"]
        if results["settings"] != settings_of(args):
            parser.error(f"{args.json} has runs with {results['settings']}: name another file")
        runs = [run for run in results["runs"] if "error" not in run]
    done = {(run["row"], run["seed"]) for run in runs}
    pairs = [(name, seed) for name in names for seed in range(args.seeds)]
    run_all(args, [pair for pair in pairs if pair not in done], runs)
    print(summary(runs))
    for run in runs:
        if "error" in run:
            print(f"{run['row']}:{run['seed']}\n{run['error']}", file=sys.stderr)
    return int(any("error" in run for run in runs))


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.exit(main())
