"""Validation loss with coded stage boundaries against full precision, on a Llama of one device.

    python benchmarks/pipeline_ablation.py --preset llama_1m --cpu --runs "full precision:0,tah:0"
    python benchmarks/pipeline_ablation.py --preset llama_125m --tokens kernel_tokens \\
        --runs "full precision:0,tah:0" --json boundaries_0.json             # one GPU, or more of
    python benchmarks/pipeline_ablation.py --merge boundaries_*.json         # these, and then this
    python benchmarks/pipeline_ablation.py ... --trunk-steps 600 --trunk outputs \\
        --tune-blocks 1024 --tune-epochs 6                                   # fine-tuning

There is no pipeline: between the stages of equal size hidden states and their gradients pass the
codecs of ``quantized_pipeline``, so that losses are those of its engine, bit for bit. Variants that
say nothing of the backward pass have gradients of 6 bits in tiles of 32 (``int6``), as in the paper
of TAH-Quant; "validation loss" is what the pipeline measures, codes included, "without codes" that
of the trained model. ``aq_sgd`` needs sequences that come again: fine-tuning. What runs share:
``llama_study.py``; text as in ``ablation.py``. The report is written after every run.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from ablation_report import BASELINE, PERTURBED
from coded_boundaries import Codec, CodedBoundaries, layers_before_boundaries
from llama_study import Study, parser_of, read_arguments, start
from llama_study import Variant as AnyVariant
from llama_training import Training
from pipeline_report import summary
from torch import Tensor, nn

from lq_lightning.codecs import CodecSpec
from lq_lightning.codecs.spec import Code
from lq_lightning.pipeline.boundary import AQSGDQuantization, TAHQuantization


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant(AnyVariant):
    """What crosses stage boundaries.

    Attributes:
        forward: Codec of hidden states.
        backward: Codec of their gradients.
    """

    forward: Codec = "none"
    backward: Codec = "none"


def groups(code: Code, size: int, hadamard_size: int = 0) -> CodecSpec:
    """Return a codec of groups that are all alike, with scales (and minima) of 16 bits."""
    return CodecSpec(
        code=code,
        group_size=size,
        hadamard_size=hadamard_size,
        symmetric=not code.startswith("int"),
        scale_dtype="bfloat16",
    )


def hidden(codec: Codec) -> Variant:
    """Return a variant with the paper's gradients."""
    return Variant(forward=codec, backward="int6")


# Fewer bits than the paper's, and less error: few tokens of 3 bits make most of the error of tah.
LARGE_TILES = TAHQuantization(tile_size=128, int4_share=1.0)

VARIANTS = {
    BASELINE: Variant(),
    PERTURBED: Variant(perturbation=1e-3),
    "bf16": Variant(forward="bf16", backward="bf16"),
    "aq_sgd": hidden(AQSGDQuantization()),
    "int4": hidden("int4"),
    "tah": hidden("tah"),
    "tah without hadamard": hidden(TAHQuantization(hadamard=False)),
    "tah all int4": hidden(TAHQuantization(int4_share=1.0)),
    "tah all int3": hidden(TAHQuantization(int4_share=0.0)),
    "tah tile 8": hidden(TAHQuantization(tile_size=8)),
    "tah tile 32": hidden(TAHQuantization(tile_size=32)),
    "tah tile 128": hidden(TAHQuantization(tile_size=128)),
    # Forward / backward: one direction alone.
    "tah / none": Variant(forward="tah"),
    "none / int6": Variant(backward="int6"),
    # Fewer bits backward.
    "tah / int6 tile 128": Variant(forward="tah", backward=groups("int6", 128)),
    "tah / int5 tile 64": Variant(forward="tah", backward=groups("int5", 64)),
    "tah / int4 tile 64": Variant(forward="tah", backward=groups("int4", 64)),
    "tah / nf4 tile 64": Variant(forward="tah", backward=groups("nf4", 64)),
    # As many bits as tah, or fewer.
    "tah tile 128 all int4": hidden(LARGE_TILES),
    "tah tile 128 all int4 / itself": Variant(forward=LARGE_TILES, backward=LARGE_TILES),
    "int4 tile 64 hadamard 64": hidden(groups("int4", 64, 64)),
    "int4 tile 128": hidden(groups("int4", 128)),
    "int4 tile 128 hadamard 128": hidden(groups("int4", 128, 128)),
    "nf4 tile 64": hidden(groups("nf4", 64)),
    "nf4 tile 128 hadamard 128": hidden(groups("nf4", 128, 128)),
    # Fewer bits than tah and the paper's gradients have together, the same in both directions.
    "tah5 / tah5": Variant(forward="tah5", backward="tah5"),
    "int5 tile 64 / int5 tile 64": Variant(forward=groups("int5", 64), backward=groups("int5", 64)),
    "nf4 tile 64 / nf4 tile 64": Variant(forward=groups("nf4", 64), backward=groups("nf4", 64)),
}


def identities(tokens_BT: Tensor) -> Tensor:
    """Return a hash of the content of each sequence, ``[B]`` int64 on the CPU."""
    rows = tokens_BT.cpu().numpy()
    hashes = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows]
    return torch.tensor([int.from_bytes(h, "little", signed=True) for h in hashes])


@contextmanager
def coding(
    variant: Variant, training: Training, compiled: bool, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Let what crosses the boundaries of the model be coded."""
    model = training.model
    if compiled:
        model.compile_parts(fullgraph=True)
    boundaries = CodedBoundaries(variant.forward, variant.backward)
    layers = model.llama.model.layers
    boundaries.install(layers, layers_before_boundaries(len(layers), args.stages))
    remembers = isinstance(variant.forward, AQSGDQuantization)
    numbers = itertools.count()

    def begin(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        samples = identities(arguments[0]) if remembers and torch.is_grad_enabled() else None
        boundaries.begin(next(numbers), samples)

    handle = model.register_forward_pre_hook(begin)
    found: dict[str, Any] = {}
    try:
        yield found
    finally:
        found["forward_bits"], found["backward_bits"] = boundaries.bits_per_value()
        handle.remove()
        boundaries.close()


STUDY = Study(
    name="pipeline_ablation", variants=VARIANTS, applied=coding, summary=summary, val_exact=True
)


def main() -> int:
    """Run, or show what ran; return the exit code."""
    parser = parser_of(STUDY, __doc__, "llama_125m")
    parser.add_argument("--stages", type=int, default=8, help="one boundary fewer (default: 8)")
    args = read_arguments(STUDY, parser)
    args.also_reported = {"stages": args.stages}
    return start(STUDY, args)


if __name__ == "__main__":
    sys.exit(main())
