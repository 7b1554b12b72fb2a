"""Sizes of the ablation's models and runs, and what each variant quantizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ablation_report import BASELINE, PERTURBED

from lq_lightning.data_parallel import GradientQuantization, WeightQuantization
from lq_lightning.optim import OptimizerQuantization
from lq_lightning.optim.config import StateCode


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Sizes of one ablation: the model, the batch of one rank, and the length of the run.

    Attributes:
        layers: Transformer blocks.
        hidden: Width.
        heads: Attention heads.
        seq: Tokens that the model sees at once.
        batch: Sequences of one rank in one step.
        steps: Optimizer steps.
        lr: Peak learning rate, after a tenth of the steps; a cosine then ends at a tenth of it.
        val_blocks: Sequences to validate on.
        compile: Whether blocks and loss are compiled where there are GPUs.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    batch: int
    steps: int
    lr: float
    val_blocks: int
    compile: bool = False


PRESETS = {
    # Shows in seconds that every variant runs; its losses say nothing.
    "smoke": Preset(
        layers=1, hidden=32, heads=2, seq=32, batch=4, steps=50, lr=2e-3, val_blocks=64
    ),
    "tiny": Preset(
        layers=2, hidden=128, heads=4, seq=128, batch=8, steps=300, lr=2e-3, val_blocks=64
    ),
    "small": Preset(
        layers=6, hidden=384, heads=6, seq=256, batch=8, steps=800, lr=1e-3, val_blocks=512
    ),
    # The smallest model of SDP4Bit (tables 7 and 9) on shorter sequences: 131072 tokens a step on 4
    # ranks, 301e6 in all.
    "gpt_125m": Preset(
        layers=12,
        hidden=768,
        heads=12,
        seq=1024,
        batch=32,
        steps=2300,
        lr=6e-4,
        val_blocks=4096,
        compile=True,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Quantization of one run; none by default.

    Attributes:
        weights: All-gathers of weights.
        gradients: Reductions of gradients.
        states: States of the optimizer, except those of embeddings.
        perturbation: Relative deviation of normal noise on the weights that training starts from.
    """

    weights: WeightQuantization | None = None
    gradients: GradientQuantization | None = None
    states: OptimizerQuantization | None = None
    perturbation: float = 0.0


def _states(name: StateCode) -> OptimizerQuantization:
    return OptimizerQuantization(first_moment=name, second_moment=name)


# The paper's: integers in groups of 2048, and embeddings and heads as all others.
DIFFERENCES = WeightQuantization(code="int", group_size=2048)
PAPER = GradientQuantization(vocabulary_bits=None)
STOCHASTIC = replace(PAPER, rounding="stochastic")
DEFAULT = "default"  # of the library

VARIANTS = {
    BASELINE: Variant(),
    # How far two runs end apart that should end alike: the chance in every other difference.
    PERTURBED: Variant(perturbation=1e-3),
    "qW": Variant(weights=replace(DIFFERENCES, method="qW")),
    "qWD": Variant(weights=DIFFERENCES),
    "ULq": Variant(gradients=replace(PAPER, method="ULq")),
    "TLq": Variant(gradients=replace(PAPER, method="TLq")),
    "TLq-HS": Variant(gradients=PAPER),
    "SDP4Bit": Variant(weights=DIFFERENCES, gradients=PAPER),
    DEFAULT: Variant(weights=WeightQuantization(), gradients=GradientQuantization()),
    "qWD stochastic": Variant(weights=replace(DIFFERENCES, rounding="stochastic")),
    "ULq stochastic": Variant(gradients=replace(STOCHASTIC, method="ULq")),
    "TLq stochastic": Variant(gradients=replace(STOCHASTIC, method="TLq")),
    "TLq-HS stochastic": Variant(gradients=STOCHASTIC),
    "SDP4Bit stochastic": Variant(weights=DIFFERENCES, gradients=STOCHASTIC),
    **{
        f"SDP4Bit {bits} bits": Variant(
            weights=DIFFERENCES, gradients=replace(PAPER, inter_bits=bits)
        )
        for bits in (6, 3, 2)
    },
    # Embeddings and heads in more bits than all other gradients.
    **{
        f"SDP4Bit vocabulary {bits}": Variant(
            weights=DIFFERENCES, gradients=replace(PAPER, vocabulary_bits=bits)
        )
        for bits in (5, 6, 8)
    },
    **{
        f"SDP4Bit {bits} bits vocabulary 8": Variant(
            weights=DIFFERENCES,
            gradients=replace(PAPER, inter_bits=bits, vocabulary_bits=8),
        )
        for bits in (3, 2)
    },
    "AdamW expanded_fp8": Variant(states=_states("expanded_fp8")),
    "AdamW dynamic8": Variant(states=_states("dynamic8")),
    "AdamW fp8": Variant(states=_states("fp8")),
    "AdamW int8": Variant(states=_states("int8")),
}
VARIANTS |= {
    f"{name} + AdamW expanded_fp8": replace(VARIANTS[name], states=_states("expanded_fp8"))
    for name in ("SDP4Bit", DEFAULT)
}
