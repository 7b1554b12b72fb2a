"""What checksums of checkpoints cost: seconds per GB of writing and of opening, with and without.

One rank writes a directory, as each rank does for its own part, and a single file::

    python benchmarks/checkpoints.py --gib 1 --folder /scratch --json checkpoints.json

Every operation runs ``--repeats`` times, those to be compared in turn; the table has medians, the
report all times. Files are dropped from the page cache before they are opened, which only disks of
this machine obey; what verifying has read is in the cache when loading reads it again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import table, write_report
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from lq_lightning.checkpoint.dcp import ChecksumWriter
from lq_lightning.checkpoint.folder import ShardedCheckpoint, save_sharded_checkpoint
from lq_lightning.checkpoint.ranks import ALONE
from lq_lightning.checkpoint.single_file import AtomicCheckpointIO, load_full_checkpoint

TENSOR_NBYTES = 64 << 20


def _forget(path: Path) -> None:
    """Drop a file, or those in a directory, from the page cache."""
    for file in path.iterdir() if path.is_dir() else (path,):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _load_directory(path: Path, verify: bool) -> None:
    checkpoint = ShardedCheckpoint(path, verify=verify)
    flat = {}
    for key in checkpoint.paths:
        size = checkpoint.size(key)
        flat[key] = None if size is None else torch.empty(size, dtype=checkpoint.dtype(key))
    checkpoint.load(flat)


def _load_file(path: Path, verify: bool) -> None:
    loaded = load_full_checkpoint(path, None, verify=verify)["state_dict"]
    for tensor in loaded.values():  # memory-mapped: read when used
        tensor.clone()


def operations(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Callable[[], object]]:
    """What is timed, by name, in the order in which it can run."""
    state = {"state_dict": tensors}
    directory, file = folder / "directory.ckpt", folder / "file.ckpt"

    def write(kind: type[FileSystemWriter], name: str) -> None:
        save(state, storage_writer=kind(folder / name), no_dist=True)

    def prepare() -> None:
        save_sharded_checkpoint(state, {}, directory, ALONE)
        AtomicCheckpointIO().save_checkpoint(state, file)

    prepare()
    return {
        "directory, write, without": lambda: write(FileSystemWriter, "plain"),
        "directory, write, with": lambda: write(ChecksumWriter, "checksums"),
        "directory, load, without": lambda: _load_directory(directory, verify=False),
        "directory, load, with": lambda: _load_directory(directory, verify=True),
        "file, load, without": lambda: _load_file(file, verify=False),
        "file, load, with": lambda: _load_file(file, verify=True),
    }


def measure(folder: Path, nbytes: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds, and seconds of all threads on a core, of every operation, ``repeats`` times."""
    count = max(1, nbytes // TENSOR_NBYTES)
    tensors = {f"w{index}": torch.randn(nbytes // count // 4) for index in range(count)}
    timed = operations(folder, tensors)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in timed}
    for _ in range(repeats):
        for name, run in timed.items():
            for path in folder.glob("*.ckpt"):
                _forget(path)
            start, start_cpu = time.perf_counter(), time.process_time()
            run()
            passed = time.perf_counter() - start, time.process_time() - start_cpu
            seconds[name].append(passed)
    return seconds


def summary(
    seconds: dict[str, list[tuple[float, float]]], gigabytes: float
) -> list[dict[str, Any]]:
    """Median seconds per GB of every operation."""
    rows = []
    for operation in ("directory, write", "directory, load", "file, load"):
        row: dict[str, Any] = {"operation": operation}
        for index, clock in enumerate(("s_per_gb", "cpu_s_per_gb")):
            for checksums in ("without", "with"):
                times = [run[index] for run in seconds[f"{operation}, {checksums}"]]
                row[f"{checksums}_{clock}"] = statistics.median(times) / gigabytes
        rows.append(row)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size (default: %(default)s)")
    parser.add_argument("--folder", help="where to write (default: the system's temporary folder)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="write a report to this file")
    options = parser.parse_args()
    nbytes = int(options.gib * 2**30)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        seconds = measure(Path(folder), nbytes, options.repeats)
    rows = summary(seconds, nbytes / 1e9)
    header = ["s/GB", "without checksums", "with", "CPU without", "CPU with"]
    print(
        table(
            [[row["operation"], *(f"{x:.2f}" for x in list(row.values())[1:])] for row in rows],
            header,
        )
    )
    write_report(options.json, "checkpoints", {"nbytes": nbytes, "rows": rows, "seconds": seconds})


if __name__ == "__main__":
    main()
