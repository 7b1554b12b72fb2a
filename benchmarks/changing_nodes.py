"""Nodes that come and go on one machine: each in a network namespace, killed, cut off and slowed.

    python benchmarks/changing_nodes.py --kills 30 --cuts 3 --slow 1 --json changing_nodes.json

Four nodes of one CPU rank train a small GPT on Python files, with ``LocalSteps(meet_at=...)``. At
random moments one is killed (SIGKILL) and started again, or its link is cut for 20 seconds; with
``--slow 1`` one takes half as many steps in the same time. Two further runs with nothing of this
give losses to compare with: one of four nodes, and one of so many that they take about as many
steps together as were taken in spite of all. The report has the members of rounds, waits, the
longest pause between two steps of a node that was not disturbed itself, the final loss, and whether
all final weights are equal. Needs root and ip (package iproute2).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import argument_parser, write_report
from corpus import standard_library
from gpt import GPT, GPTConfig
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lq_lightning import LocalSteps, QuantizedFSDPStrategy

_CONFIG = GPTConfig(layers=2, hidden=64, heads=4, seq=64, vocab=264)
_LR, _BATCH, _PORT = 3e-3, 8, 29400
_CUT_S = 20.0
_OF_NODES = ("node", "lines", "meet_at")


# --- a node ---------------------------------------------------------------------------------------


class _Model(LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.gpt, self.steps = GPT(_CONFIG), steps

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.loss(batch[0].long())

    def loss(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.gpt(tokens[:, :-1], tokens[:, 1:])
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), _LR)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class _Lines(Logger):
    """Writes what is logged as lines, so that nothing is lost with a killed process."""

    name, version = "lines", 0

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        print(
            json.dumps({"time": time.time(), "step": step, **metrics}), file=self._file, flush=True
        )

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Steps(Callback):
    """Takes a step in so many seconds, and writes when it ended."""

    def __init__(self, seconds: float, logger: _Lines) -> None:
        self._seconds, self._logger = seconds, logger

    def on_train_batch_start(self, *args: Any) -> None:
        self._due = time.monotonic() + self._seconds

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        time.sleep(max(0.0, self._due - time.monotonic()))
        self._logger.log_metrics({"ended": 1.0}, trainer.global_step)


def _train(options: argparse.Namespace) -> None:
    seed_everything(options.seed, verbose=False)
    corpus = standard_library(_CONFIG.seq)
    train, val = corpus.on(torch.device("cpu"))
    model = _Model(options.steps)
    with options.lines.open("a") as file:
        logger = _Lines(file)
        steps = LocalSteps(
            every=options.every, meet_at=options.meet_at, max_nodes=options.nodes, wait=options.wait
        )
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=options.steps,
            logger=logger,
            callbacks=[_Steps(options.step_s, logger)],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=options.lines.parent,
            strategy=QuantizedFSDPStrategy(local_steps=steps),
        )
        trainer.fit(model, DataLoader(TensorDataset(train), _BATCH, shuffle=True))
        digest = hashlib.sha256()
        for weight in model.state_dict().values():
            digest.update(weight.contiguous().numpy().tobytes())
        with torch.no_grad():
            losses = [model.loss(part.long()) for part in val[:256].split(32)]
        final = {"final_loss": float(torch.stack(losses).mean()), "weights": digest.hexdigest()}
        logger.log_metrics(final, trainer.global_step)


# --- the network and its accidents ----------------------------------------------------------------


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def _namespaces(count: int, subnet: str) -> Iterator[None]:
    """Make ``count`` hosts ``lqn0`` to ``lqn<count - 1>`` with addresses from ``<subnet>.1`` on."""
    _ip("link", "add", "lqbr", "type", "bridge")
    try:
        _ip("link", "set", "lqbr", "up")
        for host in range(count):
            _ip("netns", "add", f"lqn{host}")
            _ip("-n", f"lqn{host}", "link", "set", "lo", "up")
            peer = ("type", "veth", "peer", "name", "eth", "netns", f"lqn{host}")
            _ip("link", "add", f"lqp{host}", *peer)
            _ip("link", "set", f"lqp{host}", "master", "lqbr", "up")
            _ip("-n", f"lqn{host}", "addr", "add", f"{subnet}.{host + 1}/24", "dev", "eth")
            _ip("-n", f"lqn{host}", "link", "set", "eth", "up")
        yield
    finally:
        for host in range(count):
            subprocess.run(["ip", "netns", "del", f"lqn{host}"], check=False)
        subprocess.run(["ip", "link", "del", "lqbr"], check=False)


class _Run:
    """Nodes on hosts 1 and on, which meet at host 0."""

    def __init__(
        self, options: argparse.Namespace, folder: Path, subnet: str, count: int, slow: int
    ) -> None:
        self._options, self._folder, self._address = options, folder, f"{subnet}.1:{_PORT}"
        self._slow = slow
        self._meet = self._start(0, ["-m", "lq_lightning.planning.cli", "meet"])
        time.sleep(4.0)
        self.nodes = [self.start(node) for node in range(count)]

    def _start(self, host: int, words: list[str]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self._folder / f"host{host}.log").open("a") as log:
            command = ["ip", "netns", "exec", f"lqn{host}", sys.executable, *words]
            return subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def start(self, node: int) -> subprocess.Popen[bytes]:
        given = self._options
        step_s = given.step_s * (2 if node == self._slow else 1)
        options = {
            "lines": self._folder / f"node{node}.jsonl",
            "meet-at": self._address,
            "step-s": step_s,
            **{name: getattr(given, name) for name in ("steps", "every", "nodes", "wait", "seed")},
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        return self._start(node + 1, [__file__, "--node", *words])

    def kill(self, node: int) -> None:
        os.killpg(self.nodes[node].pid, signal.SIGKILL)
        self.nodes[node].wait()

    def finish(self) -> None:
        for node in self.nodes:
            node.wait(timeout=600)
        os.killpg(self._meet.pid, signal.SIGINT)

    def stop(self) -> None:
        for process in (*self.nodes, self._meet):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _disturb(run: _Run, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Kill and cut at random moments, until all accidents have happened."""
    choice, events = random.Random(options.seed), []
    kinds = ["kill"] * options.kills + ["cut"] * options.cuts
    choice.shuffle(kinds)
    time.sleep(options.pause_s)
    for kind in kinds:
        node = choice.randrange(options.nodes)
        event = {"kind": kind, "node": node, "time": time.time()}
        if kind == "kill":
            run.kill(node)
            time.sleep(choice.uniform(0.0, 3.0))
            run.nodes[node] = run.start(node)
        else:
            _ip("link", "set", f"lqp{node + 1}", "down")
            time.sleep(_CUT_S)
            _ip("link", "set", f"lqp{node + 1}", "up")
        events.append({**event, "until": time.time()})
        time.sleep(choice.uniform(0.5, 1.5) * options.pause_s)
    return events


def _summary(folder: Path, count: int, events: list[dict[str, Any]]) -> dict[str, Any]:
    lines = [
        [json.loads(line) for line in (folder / f"node{node}.jsonl").read_text().splitlines()]
        for node in range(count)
    ]
    pauses: list[float] = []
    for node, found in enumerate(lines):
        ends = [line["time"] for line in found if "ended" in line]
        own = [(e["time"], e["until"]) for e in events if e["node"] == node]
        for before, after in zip(ends, ends[1:], strict=False):
            if not any(start <= after and before <= until + 60 for start, until in own):
                pauses.append(after - before)
    finals = [line for found in lines for line in found if "final_loss" in line]
    rounds = [line for found in lines for line in found if "nodes/round" in line]
    present = {int(line["nodes/round"]): int(line["nodes/members"]) for line in rounds}
    counts = {n: sum(m == n for m in present.values()) for n in range(1, count + 1)}
    return {
        "events": events,
        "rounds": len(present),
        "rounds_by_members": counts,
        "longest_wait_s": max(line["nodes/waited_s"] for line in rounds),
        "mean_wait_s": sum(line["nodes/waited_s"] for line in rounds) / len(rounds),
        "longest_pause_s": max(pauses),
        "steps": sum("ended" in line for found in lines for line in found),
        "nodes_at_end": len(finals),
        "equal_weights": len({line["weights"] for line in finals}) == 1,
        "final_loss": finals[0]["final_loss"],
        "seconds": max(f[-1]["time"] for f in lines) - min(f[0]["time"] for f in lines),
    }


def _run(name: str, count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run so many nodes to their end, disturbed if that is the name."""
    subnet, disturbed = "10.113.7", name == "disturbed"
    with tempfile.TemporaryDirectory() as place, _namespaces(options.nodes + 1, subnet):
        folder = options.keep / f"{name}{count}" if options.keep else Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        run = _Run(options, folder, subnet, count, options.slow - 1 if disturbed else -1)
        try:
            events = _disturb(run, options) if disturbed else []
            run.finish()
        finally:
            run.stop()
        found = _summary(folder, count, events)
    print(name, json.dumps({k: v for k, v in found.items() if k != "events"}), flush=True)
    return found


def _study(options: argparse.Namespace) -> None:
    results = {"disturbed": _run("disturbed", options.nodes, options)}
    as_many = max(1, round(results["disturbed"]["steps"] / options.steps))
    for count in sorted({options.nodes, as_many}, reverse=True):
        results[f"undisturbed, {count} nodes"] = _run("undisturbed", count, options)
    settings = {n: v for n, v in vars(options).items() if n not in ("json", "keep", *_OF_NODES)}
    events = [event for found in results.values() for event in found.pop("events")]
    report = {"settings": settings, "events": events, "runs": results}
    write_report(options.json, "changing_nodes", report)


def main() -> None:
    """Run the study, or one of its nodes."""
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--nodes", type=int, default=4)
    add("--steps", type=int, default=4000, help="of each node (%(default)s)")
    add("--every", type=int, default=32, help="steps between rounds (%(default)s)")
    add("--step-s", type=float, default=0.1, help="seconds of a step (%(default)s)")
    add("--wait", type=float, default=10.0, help="as in LocalSteps (%(default)s)")
    add("--kills", type=int, default=30)
    add("--cuts", type=int, default=3, help="of a link, for 20 seconds")
    add("--slow", type=int, default=0, help="number of a node at half speed, from 1; 0: none")
    add("--pause-s", type=float, default=8.0, help="between accidents, on average (%(default)s)")
    add("--seed", type=int, default=0)
    add("--keep", type=Path, help="folder for what the nodes print")
    add("--node", action="store_true", help=argparse.SUPPRESS)
    add("--lines", type=Path, help=argparse.SUPPRESS)
    add("--meet-at", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node:
        _train(options)
    else:
        _study(options)


if __name__ == "__main__":
    main()
