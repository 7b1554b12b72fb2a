"""Training speed of a GPT in stages on hosts with a slow network, by codec of the boundaries.

One command per host, which has one stage; all codecs and rates are measured in one launch::

    benchmarks/nodes.sh -b 128kb -n 2 -g 1 benchmarks/slow_network.py \\
        --rates 100mbit,1gbit --json slow_network.json
    torchrun --nproc-per-node 2 benchmarks/slow_network.py --tiny --steps 2 --warmup 1

``--rates`` limits the network that `nodes.sh` emulates; on another slow network ``--rate`` gives
its speed. A step is compared with its limit: the time that the busiest host's payloads need at the
rate of the link. A step needs a little more, since the first stage waits for the last at both ends
of it. Below some 20 Mb/s the emulated queue of 100 ms holds few packets: TCP then loses some, and
hosts with two neighbours stall (81% of the limit instead of 94% with four stages at 4 Mb/s).

On a CPU `--preset cpu` is narrow enough for the network to be the limit. Hidden states are fp32, on
GPUs under autocast to bf16. ``CODECS`` has the codecs, forward and backward.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import network
import torch
import torch.distributed as dist
from common import argument_parser, choices, synchronize, table, write_report
from corpus import standard_library
from gpt import GPT, GPTConfig
from job import TINY, Clock, add_group_arguments, process_group
from torch import Tensor, nn

from lq_lightning.pipeline.boundary import make_boundary_codec
from lq_lightning.pipeline.engine import PipelineEngine
from lq_lightning.pipeline.execution import ProcessGroupLinks
from lq_lightning.pipeline.message import BoundaryCodec, BoundaryMeta
from lq_lightning.pipeline.partition import StageModule, keep_stages
from lq_lightning.pipeline.plan import plan_stages

# Forward and backward. Integers have a scale and a minimum in bf16 per tile of 64 channels.
CODECS: dict[str, tuple[Any, Any]] = {
    "fp32": ("none", "none"),
    "bf16": ("bf16", "bf16"),
    "aq_sgd": ("aq_sgd", "int8"),
    "int4": ("int4", "int4"),
    "tah": ("tah", "int4"),
    "tah5": ("tah5", "int5"),  # the default
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
    """Measurements of one codec at one rate; NaN where something was not measured.

    Attributes:
        step_ms: Median over steps of the slowest rank's time.
        steps: Number of timed steps.
        tokens_per_s: Tokens per second, at the median.
        forward_bits: Bits per value of hidden states, counted from payloads of the timed steps.
        backward_bits: Bits per value of gradients.
        payload_bytes: Bytes of the payloads that each host sends in one step.
        interface_bytes: Bytes on each host's interface in one step.
        link_ms: Time that the payloads of the busiest host need at the rate of the link.
        reached: ``link_ms`` as a share of ``step_ms``.
        encode_ms: Encoding time of a step on the slowest rank.
        decode_ms: Decoding time of a step on the slowest rank.
        coding_share: Encoding and decoding as a share of ``link_ms``, on the slowest rank.
        loss: Loss of the last step.
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


class Job:
    """The stage of this rank, and the links that all codecs use.

    The whole model is built on the device, then all but the stage is freed.

    Args:
        args: Options of the command line.
        config: Sizes of the model.
        device: Device of this rank.
    """

    def __init__(self, args: argparse.Namespace, config: GPTConfig, device: torch.device) -> None:
        self.args, self.config, self.device = args, config, device
        self.batch_size = args.microbatches * args.micro_batch
        rank, self.num_stages = dist.get_rank(), dist.get_world_size()
        with device:
            self.model: nn.Module = GPT(config)
        self.plan = plan_stages(self.model, self.num_stages)
        keep_stages(self.model, self.plan, [rank])
        if args.compile:
            for name in self.plan.stages[rank]:
                self.model.get_submodule(name).compile(dynamic=False)
        self.stage = StageModule(self.model, rank, self._loss)
        self.boundary: BoundaryMeta | None = None
        self.micro_batches: Tensor  # of the current step
        self.control = dist.new_group(backend="gloo")
        pairs = itertools.pairwise(range(self.num_stages))
        ways = sorted(way for a, b in pairs for way in ((a, b), (b, a)))
        self.links = ProcessGroupLinks(dist.group.WORLD, device, ways)
        blocks = standard_library(config.seq, args.text).train
        if len(blocks) < args.batches * self.batch_size:
            raise ValueError(
                f"{len(blocks)} blocks of text are too few for {args.batches} batches of "
                f"{self.batch_size}: lower --batches or --microbatches"
            )
        chosen = torch.from_numpy(blocks[: args.batches * self.batch_size].astype("int64"))
        self.batches = chosen.view(args.batches, self.batch_size, -1)  # the same on all ranks

    def _loss(self, index: int) -> Tensor:
        kind, block = self.device.type, self.micro_batches[index]
        with torch.autocast(kind, torch.bfloat16, kind == "cuda"):
            return self.model(block[:, :-1], block[:, 1:]) / self.args.microbatches

    @torch.no_grad()
    def draw_weights(self) -> None:
        """Set the weights as at the start of training; each has a generator of its own."""
        for name, parameter in self.model.named_parameters():
            generator = torch.Generator(self.device)
            generator.manual_seed(zlib.crc32(f"0 {name}".encode()))
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)


class Run:
    """Training with one codec, from the first weights.

    Args:
        job: Model and links.
        name: Name of the codec.
    """

    def __init__(self, job: Job, name: str) -> None:
        self.job = job
        job.draw_weights()
        forward, backward = CODECS[name]
        codecs = make_boundary_codec(forward), make_boundary_codec(backward, backward=True)
        self.encoding = [self._clocked(codec, "encode") for codec in codecs]
        self.decoding = [self._clocked(codec, "decode") for codec in codecs]
        self.engine = PipelineEngine(
            {dist.get_rank(): job.stage},
            job.num_stages,
            dist.group.WORLD,
            job.control,
            job.device,
            job.args.schedule,
            job.args.microbatches,
            *codecs,
            job.links,
        )
        self.optimizer = torch.optim.AdamW(job.model.parameters(), lr=3e-4, fused=True)

    def _clocked(self, codec: BoundaryCodec, method: str) -> Clock:
        clock, call = Clock(self.job.device), getattr(codec, method)

        def timed(*arguments: Any) -> Tensor:
            clock.mark()
            result: Tensor = call(*arguments)
            clock.mark()
            return result

        setattr(codec, method, timed)
        return clock

    def step(self, step: int) -> list[Tensor]:
        """Train step ``step``; return the losses of the micro-batches on the last rank."""
        job, engine = self.job, self.engine
        index = step % len(job.batches)
        batch = job.batches[index]
        samples = torch.arange(len(batch)) + index * len(batch)
        engine.agree(batch, training=True, samples=samples)
        shape = (job.args.microbatches, -1, *batch.shape[1:])
        job.micro_batches = batch.to(job.device, non_blocking=True).view(shape)
        if job.boundary is None:
            job.boundary = engine.share(job.stage.probe(0) if dist.get_rank() == 0 else None)
            job.stage.set_boundary(job.boundary)
        losses = engine.step(job.boundary, samples, seed=step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def coding_s(self) -> tuple[float, float]:
        """Return the seconds of encoding and decoding since the last call."""
        # Marks come in pairs, so every second interval lies between two calls.
        encoding, decoding = (
            sum(sum(clock.take()[::2]) for clock in clocks)
            for clocks in (self.encoding, self.decoding)
        )
        return encoding, decoding

    def finish(self) -> None:
        """Wait until all ranks have sent and received everything."""
        synchronize()
        dist.barrier(self.job.control)


def measure(run: Run, rate: str) -> Result:
    """Time steps behind the warm-up; collective."""
    args, job = run.job.args, run.job
    # Codecs that remember samples have seen all of them once when the warm-up is over.
    warmup = max(args.warmup, args.batches)
    for index in range(warmup):
        run.step(index)
    run.finish()
    run.coding_s()
    before, sent = run.engine.traffic.snapshot(), network.sent_bytes()
    times = Clock(job.device)
    losses: list[Tensor] = []
    times.mark()
    for index in range(warmup, warmup + args.steps):
        losses = run.step(index)
        times.mark()
    run.finish()
    interface = (network.sent_bytes() - sent) / args.steps
    encoding, decoding = (seconds / args.steps for seconds in run.coding_s())
    loss = float(torch.stack(losses).sum()) if losses else None
    fact = (statistics.median(times.take()), interface, encoding, decoding, loss)
    facts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(facts, (*fact, run.engine.traffic.since(before)))
    step_s, on_interface, encode_s, decode_s, ends, traffic = zip(*facts, strict=True)
    payloads = [round(each.sent / args.steps) for each in traffic]
    link_s, slowest = 8 * max(payloads) / network.bits_per_s(rate), max(step_s)
    coding_s = max(a + b for a, b in zip(encode_s, decode_s, strict=True))
    return Result(
        step_ms=1e3 * slowest,
        steps=args.steps,
        tokens_per_s=job.batch_size * job.config.seq / slowest,
        forward_bits=_bits(traffic, "forward"),
        backward_bits=_bits(traffic, "backward"),
        payload_bytes=payloads,
        interface_bytes=list(on_interface),
        link_ms=1e3 * link_s,
        reached=link_s / slowest if link_s else float("nan"),
        encode_ms=1e3 * max(encode_s),
        decode_ms=1e3 * max(decode_s),
        coding_share=coding_s / link_s if link_s else float("nan"),
        loss=next(loss for loss in ends if loss is not None),
    )


def _bits(traffic: tuple[Any, ...], way: str) -> float:
    nbytes = sum(getattr(each, f"{way}_bytes") for each in traffic)
    values = sum(getattr(each, f"{way}_values") for each in traffic)
    return 8 * nbytes / values if values else float("nan")


def show(rows: list[dict[str, Any]]) -> str:
    """Lay out the rows, compared with the first codec at the same rate."""
    first = {row["rate"]: row["tokens_per_s"] for row in reversed(rows)}
    header = ["codec", "rate", "tokens/s", "times", "step ms", "link ms", "reached"]
    header += ["bits", "coding", "MB sent"]
    cells = []
    for row in rows:
        sent = [b for b in row["interface_bytes"] if b == b] or row["payload_bytes"]
        cells.append(
            [
                row["codec"],
                row["rate"],
                f"{row['tokens_per_s']:.0f}",
                f"{row['tokens_per_s'] / first[row['rate']]:.2f}",
                f"{row['step_ms']:.0f}",
                f"{row['link_ms']:.0f}",
                f"{row['reached']:.0%}",
                f"{row['forward_bits']:.2f}/{row['backward_bits']:.2f}",
                f"{row['coding_share']:.1%}",
                "/".join(f"{nbytes / 1e6:.2f}" for nbytes in sent),
            ]
        )
    return table(cells, header)


def parse() -> tuple[argparse.Namespace, GPTConfig]:
    """Read the command line."""
    parser = argument_parser(__doc__)
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
    parser.add_argument("--text", type=Path, help="folder of .py files; the standard library")
    add_group_arguments(parser)
    args = parser.parse_args()
    args.codecs = choices(parser, "codecs", args.codecs, CODECS)
    args.rates = args.rates.split(",") if args.rates else None
    try:
        for rate in args.rates or [args.rate]:
            network.bits_per_s(rate)
    except ValueError as error:
        parser.error(str(error))
    if min(args.steps, args.batches, args.microbatches) < 1:
        parser.error("--steps, --batches and --microbatches have to be 1 or more")
    given = {name: getattr(args, name) for name in asdict(GPTConfig())}
    given = {name: value for name, value in given.items() if value is not None}
    return args, GPTConfig(**(PRESETS[args.preset] | given))


def main() -> None:
    """Measure every codec at every rate; rank 0 prints and writes."""
    args, config = parse()
    with process_group(args) as device:
        job = Job(args, config, device)
        rows: list[dict[str, Any]] = []
        setup = {
            "world_size": dist.get_world_size(),
            "model": asdict(config),
            "plan": job.plan.summary().splitlines(),
            **{name: getattr(args, name) for name in ("schedule", "microbatches", "micro_batch")},
            "burst": os.environ.get("LQ_NODE_BURST"),
            "nccl": {name: os.environ.get(name) for name in SOCKETS},
        }
        for rate in args.rates or [args.rate]:
            if args.rates:
                network.set_rate(rate)
            for name in args.codecs:
                run = Run(job, name)
                rows.append({"codec": name, "rate": rate} | asdict(measure(run, rate)))
                run.engine.close()
                if dist.get_rank() == 0:
                    print(show(rows[-1:]).splitlines()[-1], flush=True)
                    write_report(args.json, "slow_network", {"setup": setup, "rows": rows})
        if dist.get_rank() == 0:
            print(show(rows))


if __name__ == "__main__":
    main()
