"""Split learning over a slow link: bytes, seconds and the client's memory of a batch, by codec.

Two hosts, of which the first serves and the second trains, with the programs of
`examples/split_learning`; every case is a server and a client of its own::

    benchmarks/nodes.sh -n 2 -g 1 benchmarks/split_link.py --rates 10mbit,100mbit \\
        --json split_link.json
    torchrun --nproc-per-node 2 benchmarks/split_link.py --steps 4 --warmup 1 --cases \\
        adapters:bf16,adapters:amaq                                # one machine, no limit

A case is ``deployment:codec``, or ``deployment:codec:gradients``. By default gradients have the
bits of the codec, as in table 4 of AMAQ: bf16 with bf16, else int4. The model is a Llama of random
weights whose shape is given here. Every batch has the same samples, so that AQ-SGD sends changes
from the second on, and AMAQ starts at its target: bytes are those of a run that has settled.

Latency is relative to AQ-SGD. Memory is the client's peak beyond that after imports.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import network
import torch
import torch.distributed as dist
from common import argument_parser, table, write_report

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "split_learning"
CASES = tuple(
    f"{deployment}:{codec}"
    for deployment in ("adapters", "everything")
    for codec in ("bf16", "aq_sgd", "channel", "amaq")
)
# Bytes that a host may send at once after a pause: few on a slow link, where they would be most of
# a message.
BURSTS = ((20e6, "16kb"), (200e6, "64kb"), (float("inf"), "256kb"))
_START_S = 180


def options_of(case: str, args: argparse.Namespace) -> list[str]:
    """Return the options that both programs take."""
    deployment, codec, *rest = case.split(":")
    gradients = rest[0] if rest else "bf16" if codec == "bf16" else f"int{args.bits}"
    given = {"deployment": deployment, "codec": codec, "gradients": gradients, "bits": args.bits}
    given |= {"peft": args.peft, "rank": args.rank, "model": args.model}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    # All four tensors cross with every codec, as in the paper.
    return words + ["--train-ends"] * (deployment == "everything")


def build_model(folder: Path, args: argparse.Namespace) -> None:
    """Save a Llama with random weights, the same on both hosts, that reads bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(1, args.hidden // 256),
        vocab_size=264,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@contextlib.contextmanager
def server(case: str, address: str, args: argparse.Namespace) -> Iterator[None]:
    """Run a server until the client has trained."""
    command = [sys.executable, str(EXAMPLE / "server.py"), "--listen", address]
    command += ["--no-authentication", *options_of(case, args)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if process.stdout is None or "served" not in process.stdout.readline():
            raise RuntimeError(f"the server of {case} has not started")
        yield
    finally:
        process.terminate()
        process.wait(_START_S)


def write_text(folder: Path, nbytes: int) -> Path:
    """Write text of one batch, so that AQ-SGD has seen all samples after the first."""
    folder.mkdir()
    letters = random.Random(0).choices(string.ascii_lowercase + " ", k=nbytes)
    for name in ("train", "val", "test"):  # the one that is trained on is chosen by a hash
        (folder / name).write_text("".join(letters) + name)
    return folder


def train(case: str, address: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run a client and return its report."""
    report, steps = folder / "report.json", args.warmup + args.steps
    given: dict[str, Any] = {"connect": address, "run": folder / "run", "report": report}
    given |= {"steps": steps, "batch-size": args.batch, "sequence": args.tokens}
    given |= {"tokenizer": "byte", "validation-batches": 0, "save-every": steps}
    given |= {"start-bits": args.bits, "accelerator": args.accelerator}
    given["text"] = write_text(folder / "text", args.batch * args.tokens)
    command = [sys.executable, str(EXAMPLE / "client.py"), "--no-authentication"]
    command += [word for name, value in given.items() for word in (f"--{name}", str(value))]
    command += options_of(case, args)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the client of {case} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def summarize(case: str, rate: str, report: dict[str, Any], warmup: int) -> dict[str, Any]:
    """Return a row of the table: medians over batches."""
    batches = report["batches"][warmup:]
    kinds = {
        kind: statistics.median(batch[way].get(kind, 0) for batch in batches)
        for way in ("sent", "received")
        for kind in batches[-1][way]
    }
    memory = report["memory"]
    on_gpu = memory["peak_gpu_nbytes"]
    deployment, codec, *_ = case.split(":")
    return {
        "rate": rate,
        "deployment": deployment,
        "codec": codec,
        "gradients": report["settings"]["gradients"],
        "batch_ms": 1e3 * statistics.median(batch["seconds"] for batch in batches),
        "sent_bytes": sum(kinds.get(kind, 0) for kind in batches[-1]["sent"]),
        "received_bytes": sum(kinds.get(kind, 0) for kind in batches[-1]["received"]),
        "memory_bytes": on_gpu or memory["peak_nbytes"] - memory["imported_nbytes"],
        "kinds": kinds,
    }


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run all cases at all rates; rows are those of the client's host."""
    rank, rows = dist.get_rank(), []
    for rate in args.rates:
        if network.interface() is not None:
            limit = network.bits_per_s(rate)
            os.environ["LQ_NODE_BURST"] = next(size for most, size in BURSTS if limit <= most)
            network.set_rate(rate)
        for case in args.cases:
            address = [f"{os.environ['MASTER_ADDR']}:{_free_port()}"]
            dist.broadcast_object_list(address, src=0)
            if rank == 0:
                with server(case, address[0], args):
                    dist.barrier()
                    dist.barrier()
                continue
            dist.barrier()
            with tempfile.TemporaryDirectory(dir=folder) as own:
                row = summarize(case, rate, train(case, address[0], Path(own), args), args.warmup)
            dist.barrier()
            rows.append(row)
            print(f"{rate} {case}: {row['batch_ms']:.0f} ms", flush=True)
    base = {(r["rate"], r["deployment"]): r["batch_ms"] for r in rows if r["codec"] == "aq_sgd"}
    for row in rows:
        like = base.get((row["rate"], row["deployment"]))
        row["latency"] = like and row["batch_ms"] / like
    return rows


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
        return port


def show(rows: list[dict[str, Any]]) -> str:
    """Lay out the rows."""
    header = ["link", "client holds", "codec", "gradients", "ms", "latency", "MB up", "MB down"]
    lines = [
        [row["rate"], row["deployment"], row["codec"], row["gradients"], f"{row['batch_ms']:.0f}"]
        + [f"{row['latency']:.2f}" if row["latency"] else "-"]
        + [f"{row[key] / 1e6:.3f}" for key in ("sent_bytes", "received_bytes", "memory_bytes")]
        for row in rows
    ]
    return table(lines, [*header, "memory, MB"])


def main() -> None:
    """Measure, and print the table on the client's host."""
    parser = argument_parser(__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--rates", default="none", help="of the link, such as 10mbit,100mbit")
    parser.add_argument("--peft", choices=("lora", "prefix"), default="lora")
    sizes = {"rank": 16, "bits": 4, "layers": 4, "hidden": 256, "batch": 8, "tokens": 128}
    for name, size in (sizes | {"steps": 12, "warmup": 3}).items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--accelerator", default="cpu", help="of the client")
    args = parser.parse_args()
    args.cases, args.rates = args.cases.split(","), args.rates.split(",")
    with tempfile.TemporaryDirectory() as folder:
        args.model = str(Path(folder) / "model")
        build_model(Path(args.model), args)  # which transformers would leave to the first rank
        dist.init_process_group("gloo", timeout=timedelta(hours=2))
        if dist.get_world_size() != 2:
            parser.error(f"{dist.get_world_size()} hosts: a server and a client are two")
        rows = measure(args, Path(folder))
    if dist.get_rank() == 1:
        print(show(rows))
        setup = {key: value for key, value in vars(args).items() if key not in ("json", "model")}
        write_report(args.json, "split_link", {"setup": setup, "rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
