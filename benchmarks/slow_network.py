"""Training speed of a GPT in stages on hosts with a slow network, by codec of the boundaries.

One command per host, which has one stage; all codecs and rates are measured in one launch::

    benchmarks/nodes.sh -b 128kb -n 2 -g 1 benchmarks/slow_network.py \\
        --rates 100mbit,1gbit --json slow_network.json
    torchrun --nproc-per-node 2 benchmarks/slow_network.py --tiny --steps 2 --warmup 1

``--rates`` limits the network that `nodes.sh` emulates. On a network that is slow by itself, or
limited by other means, ``--rate`` says how fast it is, which nothing else can know.

A step is compared with its limit: what the host that sends the most has to send, at the rate of the
link. A step needs a little more, since the first stage waits for the last at both ends of it. Below
some 20 Mb/s the emulated queue of 100 ms holds few packets: TCP then loses some, and hosts with two
neighbours stall (81% of the limit instead of 94% with four stages at 4 Mb/s).

``--train-steps`` also trains on text, from the same weights and on the same batches with every
codec, and compares after how many seconds a loss is reached: the mean over so many steps as the
smoothing, and as the loss the highest that a codec ends with.

On a CPU, computation takes the time that a slow network takes on GPUs; `--preset cpu` is narrow
enough to stay below it. Hidden states are fp32, on GPUs under autocast to bf16. Codecs have names;
what they are forward and backward is in ``CODECS``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import network
import torch
import torch.distributed as dist
from common import write_report
from corpus import standard_library
from gpt import GPT, GPTConfig
from job import TINY, add_group_arguments, choices, process_group
from pipeline_job import Part, StepTimes, TimedCodec, everyone, finish
from slow_network_report import compare, show, show_training
from torch import Tensor, nn

from lq_lightning.codecs import CodecSpec
from lq_lightning.pipeline.boundary import make_boundary_codec
from lq_lightning.pipeline.engine import PipelineEngine
from lq_lightning.pipeline.execution import ProcessGroupLinks

INT5 = CodecSpec(code="int5", group_size=64, symmetric=False, scale_dtype="bfloat16")
# Forward and backward. Integers have a scale and a minimum in bf16 per tile, of 64 channels
# forward and 32 backward if nothing else is said.
CODECS: dict[str, tuple[Any, Any]] = {
    "fp32": ("none", "none"),
    "bf16": ("bf16", "bf16"),
    "aq_sgd": ("aq_sgd", "int8"),
    "int4": ("int4", "int6"),
    "tah": ("tah", "int6"),
    "tah5": ("tah5", "tah5"),  # the default
    "tah-int5": ("tah", INT5),  # tiles of 64 backward
}
SCHEDULES = ("eager_1f1b", "1f1b", "gpipe")
SOCKETS = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
PRESETS = {
    # GPT2-XL: what TAH-Quant's table 1 was measured on, with micro-batches of one sequence.
    "gpt2-xl": {"layers": 48, "hidden": 1600, "heads": 25, "seq": 1024, "vocab": 50304},
    "cpu": {"layers": 4, "hidden": 128, "heads": 2, "seq": 256, "vocab": 264},
    "tiny": TINY | {"layers": 4, "vocab": 264},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Measurements of one codec at one rate.

    Attributes:
        step_ms: Median over steps of the slowest rank's time.
        steps: Number of timed steps.
        tokens_per_s: At the median.
        forward_bits: Per value of hidden states, counted from payloads of the timed steps.
        backward_bits: Likewise of gradients.
        payload_bytes: By host, bytes of the payloads that it sends in one step.
        interface_bytes: By host, bytes that its interface really sent in one step; NaN where no
            interface is known.
        link_ms: What the host that sends the most needs for its payloads at the rate of the link.
        reached: ``link_ms`` as a share of ``step_ms``; NaN without a limit.
        encode_ms: Of all payloads of a step, on the rank that takes longest.
        decode_ms: Likewise.
        coding_share: Both together as a share of ``link_ms``, where that is largest.
        loss: Of the last step.
    """

    step_ms: float
    steps: int
    tokens_per_s: float
    forward_bits: float
    backward_bits: float
    payload_bytes: list[int]
    interface_bytes: list[float]
    link_ms: float
    reached: float
    encode_ms: float
    decode_ms: float
    coding_share: float
    loss: float


@dataclass(frozen=True, slots=True)
class Batches:
    """The same text on all ranks.

    Attributes:
        tokens: ``[batches, B, T + 1]`` int64 on the CPU.
    """

    tokens: Tensor

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch of a step, and the identities of its samples; after the last the first.

        Args:
            step: From 0.
        """
        index = step % len(self.tokens)
        batch = self.tokens[index]
        return batch, torch.arange(len(batch)) + index * len(batch)


class Job:
    """The GPT on this rank, and the links that all codecs use.

    Args:
        args: Of the command line.
        config: Sizes of the model.
        device: Of this rank.
    """

    def __init__(self, args: argparse.Namespace, config: GPTConfig, device: torch.device) -> None:
        self.args, self.config, self.device = args, config, device
        self.batch_size = args.microbatches * args.micro_batch
        self.part = Part(
            lambda: GPT(config),
            self._call,
            schedule=args.schedule,
            stages_per_rank=1,
            num_microbatches=args.microbatches,
            device=device,
            compiled=args.compile,
        )
        world = dist.get_world_size()
        self.control = dist.new_group(backend="gloo")
        pairs = itertools.pairwise(range(world))
        ways = sorted(way for a, b in pairs for way in ((a, b), (b, a)))
        self.links = ProcessGroupLinks(dist.group.WORLD, device, ways)
        blocks = standard_library(config.seq, args.text).train
        count = max(args.batches, args.train_batches)
        if len(blocks) < count * self.batch_size:
            raise ValueError(
                f"{len(blocks)} blocks of text are too few for {count} batches of "
                f"{self.batch_size}: lower --train-batches or --microbatches"
            )
        chosen = torch.from_numpy(blocks[: count * self.batch_size].astype("int64"))
        self.tokens = chosen.view(count, self.batch_size, -1)

    def _call(self, model: nn.Module, block: Tensor) -> Tensor:
        kind = self.device.type
        with torch.autocast(kind, torch.bfloat16, kind == "cuda"):
            return model(block[:, :-1], block[:, 1:])

    def start(self, name: str) -> Run:
        """Return a training run with a codec, from the first weights."""
        self.part.draw_weights()
        return Run(self, name)


class Run:
    """Training with one codec.

    Args:
        job: What is trained.
        name: Of the codec.
    """

    def __init__(self, job: Job, name: str) -> None:
        self.job = job
        forward, backward = CODECS[name]
        self.codecs = (
            TimedCodec(make_boundary_codec(forward), job.device),
            TimedCodec(make_boundary_codec(backward, backward=True), job.device),
        )
        self.engine: PipelineEngine = job.part.engine(*self.codecs, job.control, job.links)
        self.optimizer = torch.optim.AdamW(job.part.module.parameters(), lr=job.args.lr, fused=True)

    def step(self, batch: Tensor, samples: Tensor) -> list[Tensor]:
        """Train one step; return the losses of the micro-batches on the last rank."""
        losses = self.job.part.step(self.engine, batch, samples)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def coding_s(self) -> tuple[float, float]:
        """Return the seconds of encoding and decoding since the last call."""
        encoding = sum(codec.encoding.take() for codec in self.codecs)
        return encoding, sum(codec.decoding.take() for codec in self.codecs)

    def finish(self) -> None:
        """Wait until all ranks have sent and received everything."""
        finish(self.job.device, self.job.control)


def measure(run: Run, rate: str) -> Result:
    """Time steps behind the warm-up; collective."""
    args, job = run.job.args, run.job
    batches = Batches(job.tokens[: args.batches])
    # Codecs that remember samples have seen all of them once when the warm-up is over.
    warmup = max(args.warmup, args.batches)
    for index in range(warmup):
        run.step(*batches.take(index))
    run.finish()
    run.coding_s()
    before, sent = run.engine.traffic.snapshot(), network.sent_bytes()
    times = StepTimes(job.device)
    losses: list[Tensor] = []
    times.mark()
    for index in range(warmup, warmup + args.steps):
        losses = run.step(*batches.take(index))
        times.mark()
    run.finish()
    after_bytes = network.sent_bytes()
    traffic = run.engine.traffic.since(before)
    encoding, decoding = run.coding_s()
    facts = everyone(
        {
            "step_s": times.median(),
            "traffic": traffic,
            "interface": (after_bytes - sent) / args.steps,
            "encode_s": encoding / args.steps,
            "decode_s": decoding / args.steps,
            "loss": float(torch.stack(losses).sum()) if losses else None,
        }
    )
    return _result(facts, args.steps, job, rate)


def _result(facts: list[dict[str, Any]], steps: int, job: Job, rate: str) -> Result:
    step_s = max(fact["step_s"] for fact in facts)
    traffic = [fact["traffic"] for fact in facts]
    payloads = [round(each.sent / steps) for each in traffic]
    link_s = 8 * max(payloads) / network.bits_per_s(rate)
    coding_s = max(fact["encode_s"] + fact["decode_s"] for fact in facts)
    return Result(
        step_ms=1e3 * step_s,
        steps=steps,
        tokens_per_s=job.batch_size * job.config.seq / step_s,
        forward_bits=_bits(traffic, "forward"),
        backward_bits=_bits(traffic, "backward"),
        payload_bytes=payloads,
        interface_bytes=[fact["interface"] for fact in facts],
        link_ms=1e3 * link_s,
        reached=link_s / step_s if link_s else float("nan"),
        encode_ms=1e3 * max(fact["encode_s"] for fact in facts),
        decode_ms=1e3 * max(fact["decode_s"] for fact in facts),
        coding_share=coding_s / link_s if link_s else float("nan"),
        loss=next(fact["loss"] for fact in facts if fact["loss"] is not None),
    )


def _bits(traffic: list[Any], way: str) -> float:
    nbytes = sum(getattr(each, f"{way}_bytes") for each in traffic)
    values = sum(getattr(each, f"{way}_values") for each in traffic)
    return 8 * nbytes / values if values else float("nan")


def train(run: Run) -> list[tuple[float, float]]:
    """Train; return seconds since the start and the loss of every step; collective."""
    args, job = run.job.args, run.job
    batches = Batches(job.tokens[: args.train_batches])
    points = []
    run.finish()
    start = time.perf_counter()
    for index in range(args.train_steps):
        losses = run.step(*batches.take(index))
        if losses:
            loss = float(torch.stack(losses).sum())  # waits for the device
            points.append((time.perf_counter() - start, loss))
    run.finish()
    found: list[tuple[float, float]] = everyone(points)[-1]
    return found


def parse() -> tuple[argparse.Namespace, GPTConfig]:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="gpt2-xl")
    parser.add_argument("--tiny", action="store_const", const="tiny", dest="preset")
    for name in asdict(GPTConfig()):
        parser.add_argument(f"--{name}", type=int, help="default: that of the preset")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--microbatches", type=int, default=32, help="micro-batches of a step")
    parser.add_argument("--schedule", choices=SCHEDULES, default=SCHEDULES[0])
    parser.add_argument("--compile", action="store_true", help="layers, each by itself")
    parser.add_argument("--codecs", default=",".join(CODECS))
    rates = parser.add_mutually_exclusive_group()
    rates.add_argument("--rates", help="comma-separated, set one after another; needs nodes.sh")
    rates.add_argument("--rate", default=os.environ.get("LQ_EMULATED_RATE", network.UNLIMITED))
    parser.add_argument("--steps", type=int, default=3, help="timed, behind the warm-up")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--batches", type=int, default=1, help="that timed steps take in turn")
    parser.add_argument("--train-steps", type=int, default=0)
    parser.add_argument("--train-batches", type=int, default=8, help="of an epoch of training")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--text", type=Path, help="folder of .py files; the standard library")
    parser.add_argument("--json", type=Path, help="write the results here")
    add_group_arguments(parser)
    args = parser.parse_args()
    args.codecs = choices(parser, "codecs", args.codecs, CODECS)
    args.rates = args.rates.split(",") if args.rates else None
    try:
        for rate in args.rates or [args.rate]:
            network.bits_per_s(rate)
    except ValueError as error:
        parser.error(str(error))
    if min(args.steps, args.batches, args.train_batches, args.microbatches) < 1:
        parser.error("--steps, --batches, --train-batches and --microbatches have to be 1 or more")
    given = {name: getattr(args, name) for name in asdict(GPTConfig())}
    given = {name: value for name, value in given.items() if value is not None}
    return args, GPTConfig(**(PRESETS[args.preset] | given))


def main() -> None:
    """Measure what the command line asks for; rank 0 prints and writes."""
    args, config = parse()
    with process_group(args) as device:
        job = Job(args, config, device)
        rows: list[dict[str, Any]] = []
        training: dict[str, Any] = {}
        setup = {
            "world_size": dist.get_world_size(),
            "model": asdict(config),
            "plan": job.part.plan.summary().splitlines(),
            **{name: getattr(args, name) for name in ("schedule", "microbatches", "micro_batch")},
            "burst": os.environ.get("LQ_NODE_BURST"),
            "nccl": {name: os.environ.get(name) for name in SOCKETS},
        }
        for rate in args.rates or [args.rate]:
            if args.rates:
                network.set_rate(rate)
            curves = {}
            for name in args.codecs:
                run = job.start(name)
                rows.append({"codec": name, "rate": rate} | asdict(measure(run, rate)))
                run.engine.close()
                if args.train_steps:
                    run = job.start(name)
                    curves[name] = train(run)
                    run.engine.close()
                if curves:
                    training[rate] = compare(curves, max(1, min(8, args.train_steps // 4)))
                if dist.get_rank() == 0:
                    print(show(rows[-1:]).splitlines()[-1], flush=True)
                    results = {"setup": setup, "rows": rows, "training": training}
                    write_report(args.json, "slow_network", results)
        if dist.get_rank() == 0:
            print(show(rows))
            for rate, each in training.items():
                print(f"{rate}:\n{show_training(each)}")


if __name__ == "__main__":
    main()
