"""What ``lq-lightning plan`` predicts beside what short runs measure: memory, time, intervals.

Each configuration is trained for a few steps by processes of its own and planned by another one,
which sees no GPU. Two nodes are emulated (`nodes.sh`), with one GPU each::

    python benchmarks/plan_accuracy.py --only-measure --json accuracy.json  # two GPUs, ip, tc
    python benchmarks/plan_accuracy.py --only-plan --json accuracy.json     # anywhere
    python benchmarks/plan_accuracy.py --tiny --only "GPT-125M;pipeline" --json tiny.json

The report is written after each configuration, and a call goes on with what it lacks. Runs on one
GPU are measured two at a time where there are two GPUs. ``--tiny`` trains small models on the CPU,
with two ranks of one machine in place of two nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import network
import torch
import torch.distributed as dist
from common import argument_parser, choices, table, write_report
from planned_runs import Run, tiny

HERE = Path(__file__).resolve().parent
CODES = {"weights": "qWD", "gradients": "TLq-HS"}
PLAIN = {"weights": "none", "gradients": "none"}
RUNS = {
    "GPT-125M": Run(model="GPT-125M", seq=1024, batch=16),
    "GPT-125M, compiled, agoq": Run(
        model="GPT-125M", seq=1024, batch=16, compile=True, recipe="agoq"
    ),
    "Llama-1B, agoq": Run(model="Llama-1B", batch=4, recipe="agoq"),
    "Llama-1B, coat, 8-bit states": Run(
        model="Llama-1B", batch=4, recipe="coat", states="expanded_fp8"
    ),
    "Llama-1B, fp8-4bit, compiled": Run(
        model="Llama-1B", batch=4, recipe="fp8-4bit", compile=True
    ),
    "Llama-8B/8, bf16, accumulated": Run(
        model="Llama-3-8B", layers=8, precision="bf16-true", states="dynamic8", microbatches=4
    ),
    "GPT-1.3B, NVLink": Run(model="GPT-1.3B", gpus=2, batch=4, options=PLAIN),
    "Llama-8B/8, NVLink, coat": Run(
        model="Llama-3-8B", layers=8, gpus=2, recipe="coat", states="dynamic8", options=PLAIN
    ),
    "GPT-2.7B, NVLink, accumulated": Run(
        model="GPT-2.7B", gpus=2, microbatches=4, states="dynamic8", sums="int8", options=PLAIN
    ),
    "Llama-8B/8, TP 2": Run(model="Llama-3-8B", layers=8, gpus=2, tensor_parallel=2, batch=2),
    "Llama-8B/8, TP 2, agoq": Run(
        model="Llama-3-8B", layers=8, gpus=2, tensor_parallel=2, batch=2, recipe="agoq"
    ),
    "pipeline": Run(
        model="Llama-1B", gpus=2, stages=2, microbatches=8, options={"forward_codec": "tah5"}
    ),
    "GPT-1.3B, 2 nodes": Run(model="GPT-1.3B", gpus=2, nodes=2, batch=4, options=CODES),
    "GPT-1.3B, 2 nodes, 25gbit": Run(
        model="GPT-1.3B", gpus=2, nodes=2, batch=4, rate="25gbit", options=CODES
    ),
    "GPT-1.3B, 2 nodes, 10gbit": Run(
        model="GPT-1.3B", gpus=2, nodes=2, batch=4, rate="10gbit", options=CODES
    ),
    "GPT-1.3B, 2 nodes, 10gbit, plain": Run(
        model="GPT-1.3B", gpus=2, nodes=2, batch=4, rate="10gbit", options=PLAIN
    ),
    "GPT-125M, 2 nodes, 25gbit, compiled": Run(
        model="GPT-125M", seq=1024, gpus=2, nodes=2, batch=8, rate="25gbit", options=CODES,
        compile=True,
    ),
    "pipeline, 2 nodes, 10gbit": Run(
        model="Llama-1B", gpus=2, nodes=2, rate="10gbit", stages=2, microbatches=8,
        options={"forward_codec": "tah5"},
    ),
    "pipeline, 2 nodes, 25gbit, bf16": Run(
        model="Llama-3-8B", layers=8, gpus=2, nodes=2, rate="25gbit", stages=2, microbatches=4,
        precision="bf16-true", options={"forward_codec": "none", "backward_codec": "none"},
    ),
}  # fmt: skip
SHOWN = "peak allocated", "peak device", "step"


# --- processes of one configuration ---------------------------------------------------------------


def measure(run: Run, args: argparse.Namespace) -> None:
    """Train a few steps as a rank; rank 0 writes what all ranks measured."""
    from lightning.pytorch import Trainer

    from lq_lightning.callbacks import PlanCheck

    world, local = (int(os.environ.get(n, 1)) for n in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    check = PlanCheck({})
    arguments = run.trainer(nodes=world // local, steps=args.steps)
    arguments["callbacks"].append(check)
    trainer = Trainer(accelerator="cpu" if args.tiny else "gpu", **arguments)
    trainer.fit(run.module(), run.data(args.steps))
    link = None
    if run.nodes > 1 and network.interface() is not None:
        device = trainer.strategy.root_device
        link = network.link_gbit_per_s(network.peers(1, device), device, 64 << 20)
    if trainer.is_global_zero:
        found = {"ranks": [asdict(m) for m in check.measured], "link_gbit_per_s": link}
        found["gpu"] = None if args.tiny else torch.cuda.get_device_name()
        args.json.write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


def predict(run: Run, args: argparse.Namespace) -> None:
    """Write the plan of a configuration."""
    machine = {"gpu": args.gpu, "gpus_per_node": run.gpus // run.nodes, "profile": args.profile}
    if run.nodes > 1:
        machine["network"] = args.network
    plan = run.plan(**machine)
    args.json.write_text(plan.to_json())


# --- the driver -----------------------------------------------------------------------------------


def command(name: str, run: Run, action: str, args: argparse.Namespace) -> list[str]:
    """Return the words that start the processes of an action."""
    script = [str(HERE / "plan_accuracy.py"), action, name, "--steps", str(args.steps)]
    script += ["--tiny"] if args.tiny else []
    if action == "--plan" or run.gpus == 1:
        return [sys.executable, *script]
    if run.nodes > 1 and not args.tiny:
        nodes = [str(HERE / "nodes.sh"), "-p", sys.executable, "-r", run.rate]
        return [*nodes, "-n", str(run.nodes), "-g", str(run.gpus // run.nodes), *script]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launch, "--nproc-per-node", str(run.gpus), *script]


def call(words: list[str], seconds: float, **variables: str) -> dict[str, Any]:
    """Run a command that writes JSON; return that, or the error."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        env = os.environ | variables | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        began = time.perf_counter()
        try:
            done = subprocess.run(
                [*words, "--json", str(out)],
                env=env, capture_output=True, text=True, timeout=seconds, check=False,
            )  # fmt: skip
            said = done.stderr
        except subprocess.TimeoutExpired as late:
            said = f"not done after {seconds:.0f} s\n{late.stderr or ''}"
        if not out.exists():
            return {"error": said[-2000:]}
        found: dict[str, Any] = json.loads(out.read_text())
        return found | {"took_s": round(time.perf_counter() - began, 1)}


def batches_of(names: list[str], runs: dict[str, Run], gpus: int) -> Iterator[list[str]]:
    """Yield configurations to measure at once: as many on one GPU as there are GPUs."""
    alone = [name for name in names if runs[name].gpus == 1]
    for first in range(0, len(alone), max(1, gpus)):
        yield alone[first : first + max(1, gpus)]
    yield from ([name] for name in names if runs[name].gpus > 1)


def measure_all(rows: dict[str, Any], runs: dict[str, Run], args: argparse.Namespace) -> None:
    """Measure what has no measurement, and write after each."""
    missing = [n for n in args.only if "ranks" not in rows.setdefault(n, {}).get("measured", {})]
    gpus = 0 if args.tiny else torch.cuda.device_count()
    for names in batches_of(missing, runs, gpus):
        with ThreadPoolExecutor(len(names)) as pool:
            waiting = {}
            for place, name in enumerate(names):
                own = {"CUDA_VISIBLE_DEVICES": str(place)} if len(names) > 1 else {}
                words = command(name, runs[name], "--measure", args)
                waiting[name] = pool.submit(call, words, args.seconds, **own)
            for name, result in waiting.items():
                rows[name]["measured"] = result.result()
                print(name, rows[name]["measured"], flush=True)
        write(rows, runs, args)


def plan_all(rows: dict[str, Any], runs: dict[str, Run], args: argparse.Namespace) -> None:
    """Plan what is measured and has no plan."""
    for name in args.only:
        row = rows.setdefault(name, {})
        if "error" not in row.get("plan", {"error": ""}):
            continue
        words = command(name, runs[name], "--plan", args)
        words += ["--gpu", args.gpu] + (["--profile", args.profile] if args.profile else [])
        link = row.get("measured", {}).get("link_gbit_per_s")
        rate = f"{link:.2f}gbit" if link and runs[name].rate == "none" else runs[name].rate
        words += ["--network", "100gbit" if rate == "none" else rate]
        row["plan"] = call(words, args.seconds, CUDA_VISIBLE_DEVICES="")
        print(f"{name}: {row['plan'].get('error') or 'planned'}", flush=True)
        write(rows, runs, args)


def compared(row: dict[str, Any]) -> list[Any]:
    """Return the lines of a configuration that was planned and measured."""
    from lq_lightning.callbacks.plan_check import Measured, compare

    ranks = row.get("measured", {}).get("ranks")
    if not ranks or "error" in row.get("plan", {"error": ""}):
        return []
    return compare(row["plan"], [Measured(**each) for each in ranks])


def write(rows: dict[str, Any], runs: dict[str, Run], args: argparse.Namespace) -> None:
    """Write the report: rows, and how often and how far plans are off."""
    lines = {name: compared(row) for name, row in rows.items()}
    for name, found in lines.items():
        rows[name]["run"] = asdict(runs[name]) if name in runs else rows[name].get("run")
        rows[name]["lines"] = [
            asdict(line) | {"difference": line.difference, "inside": line.is_inside}
            for line in found
        ]
    results = {"summary": summary([line for found in lines.values() for line in found])}
    write_report(args.json, "plan_accuracy", results | {"shown": shown(rows), "rows": rows})


def summary(lines: list[Any]) -> dict[str, Any]:
    """Return the share of intervals that contain the measurement, and relative deviations."""
    known = [line.is_inside for line in lines if line.is_inside is not None]
    found: dict[str, Any] = {"intervals": len(known), "inside": sum(known)}
    for key in SHOWN:
        off = [abs(x.difference) for x in lines if x.name.startswith(key) and x.difference]
        if off:
            found[key] = {"median": statistics.median(off), "worst": max(off), "of": len(off)}
    return found


def shown(rows: dict[str, Any]) -> list[dict[str, str]]:
    """Return memory and time of the configurations that are planned and measured."""
    keys = "predicted", "interval", "measured", "difference", "remark"
    return [
        {"line": f"{name}: {line.cells()[0]}"} | dict(zip(keys, line.cells()[1:], strict=True))
        for name, row in rows.items()
        for line in compared(row)
        if line.name.startswith(SHOWN) and line.measured is not None
    ]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--only", default=";".join(RUNS), help="configurations, by ;")
    parser.add_argument("--only-measure", action="store_true", help="plan nothing")
    parser.add_argument("--only-plan", action="store_true", help="measure nothing")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of each")
    parser.add_argument("--seconds", type=float, default=100, help="limit of one")
    parser.add_argument("--gpu", default="H100", help="as `lq-lightning plan` names it")
    parser.add_argument("--profile", help="written by `lq-lightning doctor`")
    parser.add_argument("--network", default="100gbit", help="rate between nodes, of one plan")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--measure", metavar="NAME", help="be a rank of one")
    parser.add_argument("--plan", metavar="NAME", help="plan one")
    args = parser.parse_args()
    args.only = choices(parser, "configurations", args.only, RUNS, by=";")
    return args


def main() -> None:
    """Measure and plan all configurations, or be a process of one."""
    args = parse_arguments()
    runs = {name: tiny(run) if args.tiny else run for name, run in RUNS.items()}
    if args.measure:
        measure(runs[args.measure], args)
        return
    if args.plan:
        predict(runs[args.plan], args)
        return
    rows: dict[str, Any] = {}
    if args.json and args.json.exists():
        rows = json.loads(args.json.read_text())["results"]["rows"]
    if not args.only_plan:
        measure_all(rows, runs, args)
    if not args.only_measure:
        plan_all(rows, runs, args)
    lines = [[*line.values()] for line in shown(rows)]
    print(table(lines, ["", "predicted", "interval", "measured", "difference", ""]))
    print(summary([line for row in rows.values() for line in compared(row)]))


if __name__ == "__main__":
    main()
