"""What the benchmarks share: a report with hardware, versions and commit, and timing on a GPU."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[1]


def git_commit() -> str:
    """Return the commit of the checkout, with ``+changes`` if files differ.

    Where there is no git, ``LQ_COMMIT`` from the environment, or ``unknown``.
    """
    if "LQ_COMMIT" in os.environ:
        return os.environ["LQ_COMMIT"]
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("+changes" if _git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    result = subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    return result.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Describe machine and software, for the head of a report."""
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "host": {"machine": platform.machine(), "system": platform.platform()},
        "gpus": gpus,
        "ranks_per_gpu": int(os.environ.get("LQ_RANKS_PER_GPU", 1)),
        "versions": {
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            **{name: _version(name) for name in ("torch", "triton", "lightning", "numpy")},
        },
    }


def write_report(path: str | Path | None, name: str, results: Any) -> dict[str, Any]:
    """Return ``{"benchmark", "environment", "results"}`` and write it as JSON if a path is given.

    Args:
        path: file to write, or None.
        name: of the benchmark.
        results: anything that JSON can hold.
    """
    report = {"benchmark": name, "environment": environment(), "results": results}
    if path is not None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(report, indent=2) + "\n")
    return report


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """Return an aligned text table; numbers to the right."""
    cells = [list(header), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[index]) for row in cells) for index in range(len(header))]
    lines = []
    for row in cells:
        padded = [
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def time_cuda_calls(calls: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Return the median device time of one call in seconds.

    The calls, which should work on different buffers so that none of them finds its input in the
    cache, are captured in one CUDA graph: launch overhead stays out of the result.

    Args:
        calls: functions that only launch kernels.
        repeats: replays of the graph to take the median of.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times) / len(calls)


def kernel_speeds(
    sets: Sequence[dict[str, tuple[Callable[[], object], int]]], copy_rate: float
) -> list[dict[str, Any]]:
    """Time kernels, each in turn on the buffers of all sets; return a row of a report for each.

    Args:
        sets: Of buffers: by name of a kernel the call, and the bytes that it has to move.
        copy_rate: Bytes per second of a copy, see ``copy_bandwidth``.
    """
    rows = []
    for name, (_, moved) in sets[0].items():
        seconds = time_cuda_calls([calls[name][0] for calls in sets], repeats=15)
        rows.append(
            {
                "op": name,
                "bytes_moved": moved,
                "time_us": seconds * 1e6,
                "gb_per_s": moved / seconds / 1e9,
                "share_of_copy": moved / seconds / copy_rate,
            }
        )
    return rows


def speed_table(rows: Sequence[dict[str, Any]], case: Sequence[str]) -> str:
    """Lay out rows of ``kernel_speeds`` behind the fields that say of which case they are."""
    cells = [
        [
            row["op"],
            *(row[name] for name in case),
            f"{row['time_us']:.1f}",
            f"{row['gb_per_s']:.0f}",
            f"{row['share_of_copy']:.2f}",
        ]
        for row in rows
    ]
    return table(cells, ["op", *case, "us", "GB/s", "of copy"])


def by_x(sizes: Sequence[int]) -> str:
    """Write sizes as ``dimensions`` reads them."""
    return "x".join(map(str, sizes))


def dimensions(text: str) -> tuple[int, ...]:
    """Read ``4096x1024`` of a command line."""
    return tuple(map(int, text.split("x")))


def copy_bandwidth() -> float:
    """Return the bytes per second, read plus written, of a copy of 2 GiB: the median of 20.

    Launched one by one, not from a graph: a copy node of a graph is much slower (2.75 against
    4.3 TB/s on an H200).
    """
    half = 2 << 30
    source = torch.randint(0, 255, (half,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(3 + 20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * half / statistics.median(times[3:])
