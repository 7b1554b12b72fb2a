"""Validation loss with saved activations as codes against bf16, on a Llama of one GPU.

    python benchmarks/activation_ablation.py --preset smoke --cpu --no-compile
    python benchmarks/activation_ablation.py --preset llama_125m --tokens kernel_tokens \\
        --runs "full precision:0,agoq:0" --json activations_0.json          # one GPU, or more of
    python benchmarks/activation_ablation.py --merge activations_*.json     # these, and then this

Hugging Face's Llama (RMSNorm, SwiGLU) with bf16 weights and fp32 copies of them in AdamW; each
layer and the loss are compiled on a GPU. ``full precision perturbed`` quantizes nothing and starts
from weights that are 0.1% off. ``agoq in 4 bits`` has the codes that ``agoq`` had before, and
``uniform 4 bits`` also 4 bits for the inputs of all other linear layers and for queries, keys and
values. ``agoq as in 1f1b`` has 4 bits too, and the
bits that ``StageBitCompensation`` gives to each of four stages: layers are where such a pipeline
would have them, and losses what it would have, since boundaries in full precision change nothing;
AGoQ's table 12 compares the interleaved schedule. With codes of 2 bits the difference shows in runs
of minutes. What runs share, and how to fine-tune:
``llama_study.py``. Text as in ``ablation.py``. The report, with gradient norms as in
AGoQ's table 15, is written after every run. With ``--gradient-errors`` its table 13 follows: the
errors of gradients by kind of site on the weights of ``full precision``, for the codes of ``agoq``
and others (``gradient_error_table.py``), a few seconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from ablation_data import Data
from ablation_report import BASELINE, PERTURBED
from activation_report import summary
from coded_attention import coded_attention
from gradient_error_table import errors_of_run
from layer_subject import reasons
from llama_study import Study, parser_of, read_arguments, start
from llama_study import Variant as AnyVariant
from llama_training import Training

from lq_lightning.activations import ActivationPolicy, ActivationRule, quantize_activations
from lq_lightning.activations.policy import CODECS, RECIPES
from lq_lightning.pipeline.schedules import compensated_bits, in_flight, rank_of_stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant(AnyVariant):
    """What one run keeps as codes; nothing by default.

    Attributes:
        policy: Of norms, activation functions and linear layers.
        schedule: With the bits that stages of a pipeline would have: name, ranks, micro-batches,
            and stages on each rank.
        bits: Of codes that stages have in more.
        attention: Name of the codec of queries, keys and values.
    """

    policy: ActivationPolicy | None = None
    schedule: tuple[str, int, int, int] | None = None
    bits: int = 4
    attention: str | None = None


FOUR_BITS = ActivationPolicy(norm="int4_hadamard", activation="int4")
VARIANTS = {
    BASELINE: Variant(),
    PERTURBED: Variant(perturbation=1e-3),
    **{name: Variant(policy=policy) for name, policy in RECIPES.items()},
    "agoq as in 1f1b": Variant(policy=FOUR_BITS, schedule=("1f1b", 4, 16, 1)),
    "agoq as in interleaved 1f1b": Variant(
        policy=FOUR_BITS, schedule=("interleaved_1f1b", 4, 16, 2)
    ),
    "agoq in 4 bits": Variant(policy=FOUR_BITS),
    "agoq in 2 bits": Variant(policy=FOUR_BITS.with_bits(4, 2)),
    "agoq in 2 bits as in 1f1b": Variant(
        policy=FOUR_BITS.with_bits(4, 2), schedule=("1f1b", 4, 16, 1), bits=2
    ),
    # FP8 products without codes, and the codes of the paper.
    "float8": Variant(policy=ActivationPolicy(norm=None, activation=None, matmul="float8")),
    "agoq fp4_e2m1": Variant(policy=ActivationPolicy(norm="fp4_e2m1", activation="fp4_e2m1")),
    "uniform 4 bits": Variant(policy=replace(FOUR_BITS, linear="int4"), attention="int4"),
}


def by_stage(
    policy: ActivationPolicy, schedule: tuple[str, int, int, int], layers: int, least: int
) -> ActivationPolicy:
    """Return a policy whose codes have ``least`` bits, with rules for layers that have more."""
    name, size, _, stages_per_rank = schedule
    bits = compensated_bits(in_flight(*schedule), least)
    num_stages = size * stages_per_rank
    modules = [f"llama.model.layers.{index}.*" for index in range(layers)]
    rules = []
    for index, module in enumerate([*modules, "llama.model.norm"]):
        stage = min(index, layers - 1) * num_stages // layers
        rank = rank_of_stage(name, stage, num_stages, size)
        wide = policy.with_bits(least, bits[rank])
        rules.append(ActivationRule(module=module, kind="norm", codec=wide.norm))
        if index < layers:
            codec = wide.activation
            rules.append(ActivationRule(module=module, kind="activation", codec=codec))
    return replace(policy, rules=tuple(rules))


@contextmanager
def keeping(
    variant: Variant, training: Training, compiled: bool, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Let the model keep codes of what the variant says."""
    if (policy := variant.policy) is not None:
        if variant.schedule is not None:
            layers = len(training.model.llama.model.layers)
            policy = by_stage(policy, variant.schedule, layers, variant.bits)
        quantize_activations(training.model, policy)
    if compiled:
        training.model.compile_parts(fullgraph=variant.attention is None)
    with coded_attention(CODECS[variant.attention]) if variant.attention else nullcontext():
        yield {}


def gradient_errors(
    variant: Variant, training: Training, data: Data, args: argparse.Namespace
) -> dict[str, Any] | None:
    """Return the errors of gradients on the weights of a run in full precision, if asked for."""
    if not args.gradient_errors or variant is not VARIANTS[BASELINE]:
        return None
    found: dict[str, Any] = {}
    with reasons(found):  # the run counts also if this fails
        found |= errors_of_run(training, data)
    return {"gradient_errors": found}


STUDY = Study(
    name="activation_ablation",
    variants=VARIANTS,
    applied=keeping,
    summary=summary,
    afterwards=gradient_errors,
)


def main() -> int:
    """Run, or show what ran; return the exit code."""
    parser = parser_of(STUDY, __doc__, "llama_125m")
    parser.add_argument(
        "--gradient-errors", action="store_true", help="AGoQ's table 13, after full precision"
    )
    return start(STUDY, read_arguments(STUDY, parser))


if __name__ == "__main__":
    sys.exit(main())
