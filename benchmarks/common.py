"""Shared by the benchmarks: command lines, reports with machine and commit, timing on a GPU."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[1]


# --- command lines --------------------------------------------------------------------------------


def argument_parser(description: str | None, report: str = "--json") -> argparse.ArgumentParser:
    """Return a parser that shows a module's docstring, with the option that names the report."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(report, type=Path, metavar="FILE", help="JSON report to write")
    return parser


def choices(
    parser: argparse.ArgumentParser, kind: str, text: str, allowed: Iterable[str], by: str = ","
) -> list[str]:
    """Split a list of names; exit with a message that names unknown ones."""
    names = [name.strip() for name in text.split(by)]
    unknown = [name for name in names if name not in allowed]
    if unknown:
        parser.error(f"unknown {kind} {unknown}: choose among {f'{by} '.join(allowed)}")
    return names


# --- reports --------------------------------------------------------------------------------------


def git_commit() -> str:
    """Return the commit of the checkout, with ``+changes`` if files differ.

    Without git: ``LQ_COMMIT`` from the environment, or ``unknown``.
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


def version(package: str) -> str | None:
    """Return the version of an installed package, None if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Describe machine and software, for the head of a report."""
    gpus = [
        {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
        }
        for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]
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
            **{name: version(name) for name in ("torch", "triton", "lightning", "numpy")},
        },
    }


def write_report(path: str | Path | None, name: str, results: Any) -> None:
    """Write ``{"benchmark", "environment", "results"}`` as JSON if a path is given.

    The file is replaced at once, so that a run that is cut off leaves the report before.
    """
    if path is None:
        return
    report = {"benchmark": name, "environment": environment(), "results": results}
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    part.write_text(json.dumps(report, indent=2) + "\n")
    part.replace(target)


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """Return an aligned text table, numbers to the right."""
    cells = [list(header), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[index]) for row in cells) for index in range(len(header))]
    lines = []
    for first, *others in cells:
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(lines)


# --- GPU ------------------------------------------------------------------------------------------


def synchronize() -> None:
    """Wait for the GPU, if one is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def free_memory() -> None:
    """Return unreferenced memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def needs_gpu() -> bool:
    """Tell whether there is no GPU, with a message."""
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU")
    return not torch.cuda.is_available()


def time_on_stream(call: Callable[[], object], repeats: int, warmup: int = 0) -> float:
    """Return the median seconds between events around a call."""
    times = []
    for _ in range(warmup + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[warmup:])


def time_cuda_calls(calls: Sequence[Callable[[], object]], repeats: int = 20) -> float:
    """Return the median device time of one call in seconds.

    The calls are captured in one CUDA graph, which keeps launch overhead out of the result. They
    should work on different buffers, so that none finds its input in the cache.

    Args:
        calls: Functions that only launch kernels.
        repeats: Replays of the graph to take the median of.
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
    return time_on_stream(graph.replay, repeats) / len(calls)


def copy_bandwidth() -> float:
    """Return the bytes per second, read plus written, of a copy of 2 GiB: the median of 20.

    Launched one by one, not from a graph: a copy node of a graph is much slower (2.75 against
    4.3 TB/s on an H200).
    """
    half = 2 << 30
    source = torch.randint(0, 255, (half,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    rate = 2 * half / time_on_stream(lambda: target.copy_(source), 20, warmup=3)
    print(f"device-to-device copy: {rate / 1e9:.0f} GB/s read+written (2 GiB copied)")
    return rate
