"""Files of this package that one training step enters, counted on two CPU ranks.

A profile hook counts functions of ours that ran, by file, and calls from one file to another, in a
step that is not the first one. ``weight`` (optimizer step to the end of the next forward pass),
``gradient`` (backward) and ``activation`` run without the Trainer; ``pipeline`` runs under it::

    python benchmarks/ways.py --files --json ways.json
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from common import table, write_report
from gpt import GPT, GPTConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import lq_lightning as lq

PACKAGE = Path(lq.__file__).resolve().parent
ROOTS = (PACKAGE, PACKAGE.parent / "kernels")
CONFIG = GPTConfig(layers=2, hidden=64, heads=2, seq=16, vocab=128)
WORLD = 2


@dataclass(slots=True)
class Way:
    """Number of functions that ran, by file, and of calls from one of the files to another."""

    functions: dict[str, int] = field(default_factory=dict)
    crossings: int = 0


def own_file(name: str, known: dict[str, str]) -> str:
    """Return the path in the package of a source file of ours; empty for all others."""
    if name not in known:
        path = Path(name).resolve()
        ours = any(root in path.parents for root in ROOTS)
        known[name] = str(path.relative_to(PACKAGE.parent)) if ours else ""
    return known[name]


@contextmanager
def counted(way: Way) -> Iterator[None]:
    """Count the calls of this thread within the context."""
    known: dict[str, str] = {}
    seen = set()

    def hook(frame: Any, event: str, _: object) -> None:
        if event != "call" or not (file := own_file(frame.f_code.co_filename, known)):
            return
        if frame.f_code not in seen:
            seen.add(frame.f_code)
            way.functions[file] = way.functions.get(file, 0) + 1
        caller, origin = frame.f_back, ""
        while caller is not None and not origin:  # frames of torch in between do not count
            origin = own_file(caller.f_code.co_filename, known)
            caller = caller.f_back
        way.crossings += origin not in ("", file)

    sys.setprofile(hook)
    try:
        yield
    finally:
        sys.setprofile(None)


def collectives(found: dict[str, Way]) -> None:
    """Count the ways of weights and of gradients under FSDP2 with torch's AdamW."""
    mesh, model = init_device_mesh("cpu", (WORLD,)), GPT(CONFIG)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh)
    topology, weights = lq.Topology.of(mesh, node_size=1), lq.WeightQuantization()
    communication = lq.data_parallel.quantize_communication(
        model, weights=weights, gradients=lq.GradientQuantization(), topology=topology
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    communication.register_optimizer(optimizer)
    tokens = torch.randint(CONFIG.vocab, (2, CONFIG.seq))
    loss = model(tokens)
    for _ in range(3):
        found |= {"weight": Way(), "gradient": Way()}
        with counted(found["gradient"]):
            loss.backward()
        with counted(found["weight"]):
            optimizer.step()
            loss = model(tokens)
        optimizer.zero_grad()


class _GatedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.RMSNorm(64), nn.SiLU()
        self.gate, self.up, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(self.act(self.gate(h)) * self.up(h))


def activations(found: dict[str, Way]) -> None:
    """Count the way of saved activations: forward and backward of two layers."""
    model = nn.Sequential(_GatedLayer(), _GatedLayer()).bfloat16()
    lq.quantize_activations(model, lq.ActivationPolicy())
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        found["activation"] = Way()
        with counted(found["activation"]):
            model(x).float().square().mean().backward()


class _Chain(pl.LightningModule):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(*(_GatedLayer() for _ in range(4))), nn.Linear(64, 1)
        self.counter = counted(way)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return F.mse_loss(self.head(self.layers(batch)), batch[..., :1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        if index == 1:
            self.counter.__enter__()

    def on_train_batch_end(self, outputs: object, batch: Tensor, index: int) -> None:
        if index == 1:
            self.counter.__exit__(None, None, None)


def pipeline(found: dict[str, Way]) -> None:
    """Count a training step of a pipeline, including our hooks that the Trainer calls."""
    found["pipeline"] = Way()
    strategy = lq.QuantizedPipelineStrategy(num_microbatches=2)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False}
    quiet |= {"enable_checkpointing": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", devices=WORLD, strategy=strategy, max_steps=2, **quiet)
    trainer.fit(_Chain(found["pipeline"]), torch.randn(4, 8, 16, 64))  # batches


def run_rank(rank: int, port: int, path: str) -> None:
    """Count everything on one of the ranks; the first one writes the result to ``path``."""
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    # as torchrun does, so that the Trainer takes these processes for its ranks
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0"}
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) | {"TORCHELASTIC_RUN_ID": "ways"}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(WORLD))
    found: dict[str, Way] = {}
    store = dist.FileStore(f"{path}.store", WORLD)  # the port is for the Trainer's process group
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    collectives(found)
    dist.destroy_process_group()
    activations(found)
    pipeline(found)
    if rank == 0:
        torch.save({name: asdict(way) for name, way in found.items()}, path)


def main() -> None:
    """Print a table of the ways, and with ``--files`` the files of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="report to write")
    parser.add_argument("--files", action="store_true", help="also list the files of each way")
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (port, f"{folder}/ways"), nprocs=WORLD)
        ways: dict[str, Any] = torch.load(f"{folder}/ways")
    files = {name: way["functions"] for name, way in ways.items()}
    rows = [[n, len(f), sum(f.values()), ways[n]["crossings"]] for n, f in files.items()]
    print(table(rows, ["way", "files", "functions", "calls between files"]))
    for name, functions in files.items() if args.files else ():
        print(f"\n{table(sorted(functions.items()), [name, 'functions'])}")
    write_report(args.json, "ways", ways)


if __name__ == "__main__":
    main()
