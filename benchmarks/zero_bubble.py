"""Peak memory and time of pipeline schedules on a Llama: checkpointing against 4-bit activations.

One run measures all variants of a model whose layers have the shape of Llama's, per stage::

    torchrun --nproc-per-node 2 benchmarks/zero_bubble.py --json zero_bubble.json
    torchrun --nproc-per-node 4 benchmarks/zero_bubble.py --shape tiny --layers 8 --seq 256 \\
        --micro-batch 4 --vocab 64 --stages-per-rank 2 --variants 1f1b-agoq-4bit,1f1b-agoq --cpu

Zero bubble keeps inputs of linear layers, and gradients of their outputs, until the weights' half
of a backward pass, and with checkpointing would compute every layer once more: so memory is what
decides. Codes have as many bits by rank as ``StageBitCompensation`` gives them; ``-4bit``: 4 on all
ranks. "held" is the largest memory above that between steps; on a CPU without what operators need
while they run. Weights and AdamW's states are in bf16, 8 bytes a parameter with gradients. Ranks of
one machine exchange bf16.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import table, write_report
from held_memory import HeldMemory
from job import add_group_arguments, choices, process_group
from llama_layer import SHAPES, Shape
from pipeline_job import Part, StepTimes, everyone, finish
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from lq_lightning.activations import quantize_activations
from lq_lightning.activations.policy import ActivationPolicy
from lq_lightning.foundation.nested import tensors_in
from lq_lightning.optim import QuantizedAdamW
from lq_lightning.pipeline.boundary import make_boundary_codec
from lq_lightning.pipeline.schedules import InFlight, compensated_bits, in_flight

BITS = 4
AGOQ = ActivationPolicy(norm="int4_hadamard", activation="int4")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """How one measured pipeline saves memory.

    Attributes:
        split: Whether backward passes are split, so that weights' gradients fill the bubble.
        checkpoint: Whether every layer is computed again in backward.
        policy: Of quantized activations; None leaves them as they are.
        compensated: Whether ranks that keep less have more bits of them.
        codes_of_states: Whether AdamW's states are 8-bit codes.
    """

    split: bool = False
    checkpoint: bool = False
    policy: ActivationPolicy | None = None
    compensated: bool = True
    codes_of_states: bool = False


VARIANTS = {
    "1f1b-checkpointing": Variant(checkpoint=True),
    "zero-bubble": Variant(split=True),
    "zero-bubble-agoq": Variant(split=True, policy=AGOQ),
    "zero-bubble-agoq-4bit": Variant(split=True, policy=AGOQ, compensated=False),
    "zero-bubble-agoq-8bit-states": Variant(split=True, policy=AGOQ, codes_of_states=True),
    "1f1b": Variant(),
    "1f1b-agoq": Variant(policy=AGOQ),
    "1f1b-agoq-4bit": Variant(policy=AGOQ, compensated=False),
}
DEFAULT = ["1f1b-checkpointing", "zero-bubble", "zero-bubble-agoq"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Measurements of one variant; lists are by rank.

    Attributes:
        step_ms: Median over steps of the slowest rank's time, the optimizer's included.
        tokens_per_s: At the median.
        peak_gib: Largest allocated device memory; NaN on a CPU.
        static_gib: What is allocated between steps: weights, gradients, states of the optimizer.
        held_mib: The most that a step takes besides.
        kept: Micro-batches that the schedule keeps at most.
        bits: Of the codes of saved activations; None without.
        predicted: Product of bits and micro-batches kept; None without.
        half_size: Bytes that a micro-batch keeps between backward halves, per byte before them.
        loss: Of the last step.
        schedule: That was run.
    """

    step_ms: float
    tokens_per_s: float
    peak_gib: list[float]
    static_gib: list[float]
    held_mib: list[float]
    kept: list[str]
    bits: list[int | None]
    predicted: list[float | None]
    half_size: float
    loss: float
    schedule: str


def build(shape: Shape, layers: int, vocab: int) -> nn.Module:
    """Return a Llama in bf16, on the default device."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.seq,
        attn_implementation="sdpa",
        use_cache=False,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).train()


def loss_of(model: nn.Module, block: Tensor) -> Tensor:
    """Return the mean next-token loss of ``[B, T + 1]`` tokens."""
    hidden = model.model(input_ids=block[:, :-1]).last_hidden_state
    logits = model.lm_head(hidden)
    return F.cross_entropy(logits.flatten(0, 1).float(), block[:, 1:].flatten())


def checkpoint_layers(part: Part) -> None:
    """Let every layer of this rank keep its input only, and compute the rest again."""
    for index in part.stages:
        for name in part.plan.stages[index]:
            layer = part.module.get_submodule(name)
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


class Subject:
    """One variant on this rank.

    Args:
        name: Of the variant.
        args: Of the command line.
        device: Of this rank.
        control: The ranks over gloo.
    """

    def __init__(
        self,
        name: str,
        args: argparse.Namespace,
        device: torch.device,
        control: dist.ProcessGroup,
    ) -> None:
        variant = VARIANTS[name]
        self.args, self.device = args, device
        interleaved = "interleaved_1f1b" if args.stages_per_rank > 1 else "1f1b"
        self.schedule = args.split_schedule if variant.split else interleaved
        self.part = Part(
            lambda: build(args.shape, args.layers, args.vocab),
            loss_of,
            schedule=self.schedule,
            stages_per_rank=args.stages_per_rank,
            num_microbatches=args.microbatches,
            device=device,
        )
        world = dist.get_world_size()
        self.counts: tuple[InFlight, ...] = in_flight(
            self.schedule, world, args.microbatches, args.stages_per_rank
        )
        if variant.checkpoint:
            checkpoint_layers(self.part)
        codecs = make_boundary_codec("none"), make_boundary_codec("none", backward=True)
        self.engine = self.part.engine(*codecs, control)
        parameters = self.part.module.parameters()
        self.optimizer = (
            QuantizedAdamW(parameters, lr=1e-4)
            if variant.codes_of_states
            else torch.optim.AdamW(parameters, lr=1e-4, fused=device.type == "cuda")
        )
        generator = torch.Generator().manual_seed(0)
        shape = (args.microbatches * args.micro_batch, args.shape.seq + 1)
        self.batch = torch.randint(args.vocab, shape, generator=generator)
        self.bits: list[int | None] = [None] * world
        if variant.policy is not None:
            self._quantize(variant, variant.policy)

    def _quantize(self, variant: Variant, policy: ActivationPolicy) -> None:
        handle = quantize_activations(self.part.module, policy)
        self.bits = [BITS] * len(self.bits)
        if variant.compensated:
            self.part.step(self.engine, self.batch)
            self.optimizer.zero_grad()
            bits = compensated_bits(self.counts, BITS, half_size=self.half_size())
            self.bits = list(bits)
            handle.apply(policy.with_bits(BITS, bits[dist.get_rank()]))

    def held_nbytes(self) -> int:
        """Run a step, and return the most memory that it took."""
        states = (tensors_in(state) for state in self.optimizer.state.values())
        known = (*self.part.module.parameters(), *itertools.chain(*states), self.batch)
        with HeldMemory(known) as held:
            self.step()
        return held.peak_nbytes

    def half_size(self) -> float:
        """What a micro-batch keeps between the halves of its backward pass, per byte before.

        Of all ranks, which all call this; 0 before a step, and without halves.
        """
        whole, half = (sum(kept) for kept in zip(*everyone(self.engine.kept_nbytes), strict=True))
        return half / whole if whole else 0.0

    def predicted(self) -> list[float | None]:
        """Return bits times micro-batches by rank, None without codes; all ranks call this."""
        size = self.half_size()
        pairs = zip(self.bits, self.counts, strict=True)
        return [None if bits is None else bits * count.peak(size) for bits, count in pairs]

    def step(self) -> list[Tensor]:
        """Train one step; return the losses of the micro-batches on the last stage's rank."""
        losses = self.part.step(self.engine, self.batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses


def measure(subject: Subject, control: dist.ProcessGroup) -> Result:
    """Time steps and take the peak of memory behind the warm-up; collective."""
    args, cuda = subject.args, subject.device.type == "cuda"
    for _ in range(args.warmup):
        subject.step()
    finish(subject.device, control)
    static = torch.cuda.memory_allocated() / 2**30 if cuda else float("nan")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times, losses = StepTimes(subject.device), []
    times.mark()
    for _ in range(args.steps):
        losses = subject.step()
        times.mark()
    finish(subject.device, control)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan")
    loss = float(torch.stack(losses).sum()) if losses else None
    held = 1024 * (peak - static) if cuda else subject.held_nbytes() / 2**20
    facts = everyone((1e3 * times.median(), peak, static, loss, held))
    step_ms = max(fact[0] for fact in facts)
    return Result(
        step_ms=step_ms,
        tokens_per_s=subject.batch[:, 1:].numel() / step_ms * 1e3,
        peak_gib=[fact[1] for fact in facts],
        static_gib=[fact[2] for fact in facts],
        held_mib=[fact[4] for fact in facts],
        kept=[str(count) for count in subject.counts],
        bits=subject.bits,
        predicted=subject.predicted(),
        half_size=subject.half_size(),
        loss=next(fact[3] for fact in facts if fact[3] is not None),
        schedule=subject.schedule,
    )


def show(rows: list[dict[str, Any]]) -> str:
    """Lay out the rows, a line per rank; memory against the first, time against the second."""
    header = ["variant", "rank", "kept", "bits", "predicted", "held MiB", "static GiB", "peak GiB"]
    header += ["memory", "ms", "time"]
    first, timed = rows[0], rows[min(1, len(rows) - 1)]
    cells = []
    for row in rows:
        for rank, peak in enumerate(row["peak_gib"]):
            cells.append(
                [
                    row["variant"] if rank == 0 else "",
                    rank,
                    row["kept"][rank],
                    row["bits"][rank] or "-",
                    f"{row['predicted'][rank]:.1f}" if row["bits"][rank] else "-",
                    f"{row['held_mib'][rank]:.2f}",
                    f"{row['static_gib'][rank]:.2f}",
                    f"{peak:.2f}",
                    f"{peak / max(first['peak_gib']):.3f}",
                    f"{row['step_ms']:.1f}" if rank == 0 else "",
                    f"{row['step_ms'] / timed['step_ms']:.3f}" if rank == 0 else "",
                ]
            )
    return table(cells, header)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama3_8b", help="of a layer")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--microbatches", type=int, default=8, help="micro-batches of a step")
    parser.add_argument("--stages-per-rank", type=int, default=1)
    parser.add_argument("--split-schedule", choices=("zero_bubble", "zbv"), default="zero_bubble")
    parser.add_argument("--variants", default=",".join(DEFAULT))
    parser.add_argument("--steps", type=int, default=8, help="timed, behind the warm-up")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results here")
    add_group_arguments(parser)
    args = parser.parse_args()
    args.variants = choices(parser, "variants", args.variants, VARIANTS)
    args.shape_name = args.shape
    args.shape = replace(SHAPES[args.shape], seq=args.seq, batch=args.micro_batch)
    return args


def main() -> None:
    """Measure what the command line asks for; rank 0 prints and writes."""
    args = parse()
    with process_group(args) as device:
        control = dist.new_group(backend="gloo")
        rows: list[dict[str, Any]] = []
        setup = {"world_size": dist.get_world_size(), "shape": args.shape_name}
        named = ("layers", "vocab", "seq", "micro_batch", "microbatches", "stages_per_rank")
        setup |= {name: getattr(args, name) for name in named}
        for name in args.variants:
            subject = Subject(name, args, device, control)
            rows.append({"variant": name} | asdict(measure(subject, control)))
            subject.engine.close()
            del subject
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                write_report(args.json, "zero_bubble", {"setup": setup, "rows": rows})
        if dist.get_rank() == 0:
            print(show(rows))


if __name__ == "__main__":
    main()
