"""Choose the schedules of the norm kernels by measurement and write them to their table.

For every operator and block, all candidates are timed with and without a transform and a bias; the
fastest in the sum is kept. Run it on the GPU that the table is for, then check and measure with
``activation_kernels.py``:

    python benchmarks/tune_norm.py --write --out outputs/norm_schedules.json
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.activation_kernels import Case, norm_case, rotating_calls
from benchmarks.common import REPOSITORY, time_cuda_calls, write_report
from lq_lightning.kernels.message.operators import clear_cached_calls
from lq_lightning.kernels.norm import triton_backward, triton_forward
from lq_lightning.kernels.norm.tiles import SCHEDULES, Schedule

TABLE = REPOSITORY / "kernels" / "norm" / "tiles.py"
OPERATORS = {"forward": "quantize", "rebuild": "rebuild", "backward": "backward"}
VARIANTS = (("rms_cast", "int4"), ("rms_cast", "int4 h128"), ("layer", "int4 h128"))
NUMEL = 1 << 25
MULTIPROCESSORS = 132


def candidates(operator: str, block: int) -> list[Schedule]:
    """Return the schedules to try."""
    chosen = []
    if operator == "rebuild":
        for per_thread in (16, 32, 64):
            warps = block // (32 * per_thread)
            for programs in (2112, 8448, 33792) if warps else ():
                chosen += [Schedule(per_thread, warps, programs, stages) for stages in (1, 2)]
        return chosen
    backward = operator == "backward"
    for per_thread in (8, 16, 32) if backward else (16, 32, 64):
        warps = block // (32 * per_thread)
        for registers in (64, 96, 128, 168) if 1 <= warps <= 32 else ():
            resident = min(65536 // (registers * 32 * warps), 32)
            # 64 registers for the widest tiles, whose threads have no more
            if resident == 0 or (registers < 3 * per_thread + 16 * (1 + backward) and warps < 32):
                continue
            programs = resident * MULTIPROCESSORS
            for stages in (1, 2) if backward else (1, 2, 3):
                chosen.append(Schedule(per_thread, warps, programs, stages, registers))
            if not backward:
                chosen.append(Schedule(per_thread, warps, 4 * programs, 1, registers))
    return chosen


def cases(operator: str) -> list[Case]:
    """Return what a schedule is timed on."""
    return [norm_case(OPERATORS[operator], *variant) for variant in VARIANTS]


def force(schedule: Schedule) -> None:
    """Make every launch use ``schedule``."""
    clear_cached_calls()
    for module in (triton_forward, triton_backward):
        module.choose_schedule = lambda *_: schedule  # type: ignore[attr-defined]


def compile_schedule(operator: str, block: int, schedule: Schedule) -> None:
    """Compile into the cache on disk, from where the measuring process loads it."""
    for case in cases(operator):
        made = case.buffers(64, block)
        force(schedule)
        case.run(made)
    torch.cuda.synchronize()


def tune(operator: str, block: int) -> list[dict[str, Any]]:
    """Return the times of all candidates in microseconds, the fastest first."""
    times: dict[Schedule, list[float]] = {schedule: [] for schedule in candidates(operator, block)}
    for case in cases(operator):
        calls, _ = rotating_calls(case, NUMEL // block, block)
        for schedule, found in times.items():
            force(schedule)
            found.append(time_cuda_calls(calls, repeats=9) * 1e6)
    order = sorted(times, key=lambda schedule: sum(times[schedule]))
    return [
        {"operator": operator, "block": block, "schedule": schedule, "us": times[schedule]}
        for schedule in order
    ]


def write_table(best: dict[str, dict[int, Schedule]]) -> None:
    """Replace the table in the source."""
    source = TABLE.read_text()
    head, rest = source.split("SCHEDULES: dict", 1)
    tail = rest[rest.index("\n}\n") + 3 :]
    lines = ["SCHEDULES: dict[str, dict[int, Schedule]] = {"]
    for operator in sorted(best):
        lines.append(f'    "{operator}": {{')
        for block, schedule in sorted(best[operator].items()):
            lines.append(f"        {block}: Schedule({', '.join(map(str, schedule))}),")
        lines.append("    },")
    TABLE.write_text(head + "\n".join(lines) + "\n}\n" + tail)


def main() -> int:
    """Compile, time, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON report of all times")
    parser.add_argument("--write", action="store_true", help=f"update {TABLE.name}")
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=list(OPERATORS))
    parser.add_argument("--blocks", type=int, nargs="+", help="only these; others stay")
    parser.add_argument("--processes", type=int, default=8, help="compile in so many processes")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU")
        return 2
    chosen = [
        (operator, block)
        for operator in arguments.operators
        for block in SCHEDULES[operator]
        if arguments.blocks is None or block in arguments.blocks
    ]
    best = {operator: dict(table) for operator, table in SCHEDULES.items()}
    context = get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
        # what differs in the number of programs alone is one kernel
        shapes = {
            (*pair, schedule._replace(programs=64))
            for pair in chosen
            for schedule in candidates(*pair)
        }
        list(pool.map(compile_schedule, *zip(*sorted(shapes), strict=True)))
    report = []
    for operator, block in chosen:
        rows = tune(operator, block)
        best[operator][block] = rows[0]["schedule"]
        report += rows
        for row in rows[:3]:
            shown = ", ".join(f"{us:.1f}" for us in row["us"])
            print(f"{operator} {block}: {tuple(row['schedule'])} {shown} us", flush=True)
    if arguments.write:
        write_table(best)
    write_report(arguments.out, "tune_norm", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
