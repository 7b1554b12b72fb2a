"""Sizes of the loss study's models and runs, and what each variant quantizes, and when."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ablation_report import BASELINE, PERTURBED
from emulated_codes import (
    Code,
    FittedCode,
    LibraryCode,
    NoiseCode,
    StochasticCode,
    integer_levels,
    normal_levels,
)
from emulated_ranks import Codes, Plan
from stacked_models import Sizes

from lq_lightning.codecs import CodecSpec
from lq_lightning.data_parallel import GradientQuantization, WeightQuantization
from lq_lightning.kernels.message import CODES


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset(Sizes):
    """Sizes of the model, the batch of one rank, and the length of the run.

    Attributes:
        vocab: Words of the tokenizer that is trained on the text; 0 for bytes.
        batch: Sequences of one rank in one step.
        steps: Optimizer steps.
        lr: Peak learning rate.
        val_blocks: Sequences to validate on.
        dtype: Of the weights that ranks compute with, the name of a ``torch.dtype``.
        warmup, decay, floor: As for ``ablation_data.learning_rate_factor``.
        average: Share of the run, at its end, whose mean weights are validated as well.
    """

    vocab: int
    batch: int
    steps: int
    lr: float
    val_blocks: int
    dtype: str = "bfloat16"
    warmup: int = 0
    decay: str = "cosine"
    floor: float = 0.1
    average: float = 0.0


_SMALL: dict[str, Any] = {
    "heads": 4,
    "seq": 128,
    "vocab": 2048,
    "batch": 2,
    "steps": 200,
    "lr": 2e-3,
}
_TINY: dict[str, Any] = {
    "layers": 3,
    "hidden": 64,
    "heads": 2,
    "seq": 64,
    "vocab": 512,
    "batch": 1,
    "steps": 200,
}
# At a rate of 3e-3 chance alone moves the loss by 0.6% (one deviation); at 1e-3 by 0.01%.
_TINY |= {"lr": 1e-3, "val_blocks": 128, "dtype": "float32"}
_SMOKE: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 2, "seq": 32, "vocab": 0, "batch": 1}
_LARGE: dict[str, Any] = {"layers": 12, "hidden": 768, "heads": 12, "seq": 1024, "vocab": 16384}
_LARGE |= {"batch": 8, "steps": 500, "lr": 6e-4, "val_blocks": 512, "average": 0.1}
_LARGE |= {"warmup": 100, "decay": "linear", "floor": 0.0}
_SMOKE |= {"steps": 10, "lr": 2e-3, "val_blocks": 8}

PRESETS = {
    # Show in seconds that every variant runs; their losses say nothing.
    "gpt_smoke": Preset(arch="gpt", intermediate=128, **_SMOKE, dtype="float32"),
    "llama_smoke": Preset(arch="llama", intermediate=64, **_SMOKE, dtype="float32"),
    # For CPUs: 0.2e6 and 0.1e6 parameters, 256 tokens a step.
    "gpt_tiny": Preset(arch="gpt", intermediate=256, **_TINY),
    "llama_tiny": Preset(arch="llama", intermediate=128, **_TINY),
    # 1.3e6 parameters.
    "gpt_1m": Preset(
        arch="gpt",
        layers=4,
        hidden=128,
        intermediate=512,
        val_blocks=256,
        **_SMALL,
    ),
    # 1.1e6 parameters.
    "llama_1m": Preset(
        arch="llama",
        layers=5,
        hidden=128,
        intermediate=256,
        val_blocks=256,
        **_SMALL,
    ),
    # 3.7e6 parameters, twice the steps, four times the tokens.
    "llama_4m": Preset(
        arch="llama",
        layers=6,
        hidden=224,
        intermediate=576,
        heads=7,
        seq=256,
        vocab=2048,
        batch=2,
        steps=400,
        lr=2e-3,
        val_blocks=256,
    ),
    # 98e6 and 111e6 parameters, for two nodes of one rank; words are those of --tokens.
    "llama_110m": Preset(arch="llama", intermediate=2048, **_LARGE),
    "gpt_110m": Preset(arch="gpt", intermediate=3072, **_LARGE),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """What a run quantizes; nothing by default.

    Attributes:
        plan: Of all steps but those below.
        early: Of the first steps.
        early_steps: How many these are.
    """

    plan: Plan = Plan()
    early: Plan = Plan()
    early_steps: int = 0

    def at(self, step: int) -> Plan:
        """Return the plan of a step, counted from 0."""
        return self.early if step < self.early_steps else self.plan


# --- codes ----------------------------------------------------------------------------------------

# Shares of the largest magnitude; after the transform values of a group are nearly normal.
_FACTORS = tuple(1 - 0.06 * index for index in range(9))

# The paper's, and the library's default until NF4: what ``_weights`` changes.
_WEIGHTS = CodecSpec(code="int4", group_size=2048)
_INTRA = GradientQuantization().codec("intra")
_INTER = GradientQuantization().codec("inter")
_WORDS = GradientQuantization().codec("inter", vocabulary=True)
# What reports say of it: embeddings and heads in all variants that do not name others.
VOCABULARY_CODE = _WORDS.code


def _weights(own: Code | None = None, vocabulary: Code | None = None, **changes: Any) -> Codes:
    return Codes(inter=own or _library(_WEIGHTS, **changes), vocabulary=vocabulary)


def _gradients(own: Code | None = None, vocabulary: Code | None = None, **changes: Any) -> Codes:
    """Codes of gradients: 8 bits within nodes, with the transform of the level between them.

    Embeddings and heads have as many bits as the library gives them by default beside such a code,
    and its groups and transform; where they have none of their own they travel with the others.
    """
    inter = own or _library(_INTER, **changes)
    intra = replace(
        _INTRA, group_size=inter.spec.group_size, hadamard_size=inter.spec.hadamard_size
    )
    if vocabulary is None:
        beside = GradientQuantization(inter_bits=CODES[inter.spec.code].bits)
        vocabulary = _library(inter.spec, code=beside.codec("inter", vocabulary=True).code)
    same = vocabulary == inter
    return Codes(inter=inter, intra=LibraryCode(intra), vocabulary=None if same else vocabulary)


def _library(spec: CodecSpec, **changes: Any) -> LibraryCode:
    return LibraryCode(replace(spec, **changes))


def _largest(spec: CodecSpec) -> int:
    """Return the largest value of an integer code, which its error shrinks with."""
    return 2 ** (CODES[spec.code].bits - 1) - 1


def _fitted(spec: CodecSpec, *, levels: str = "int", cap: float = float("inf")) -> FittedCode:
    """A scale (or a range) of least error behind a transform of 128."""
    spec = replace(spec, hadamard_size=128, symmetric=levels != "asymmetric")
    found = {"int": integer_levels, "normal": normal_levels, "asymmetric": lambda _: ()}
    return FittedCode(spec, found[levels](4), _FACTORS, cap)


_LARGER: dict[str, Any] = {"hadamard_size": 128}
_ASYMMETRIC: dict[str, Any] = {"symmetric": False, "hadamard_size": 128}
_NF4: dict[str, Any] = {"code": "nf4", "hadamard_size": 128}
_SHORT: dict[str, Any] = {"group_size": 64, "scale_dtype": "bfloat16"}

DIFFERENCES = Codes(inter=_library(WeightQuantization().codec()))
LONG_GROUPS, GRADIENTS = _weights(), _gradients()
BOTH = Plan(weights=DIFFERENCES, gradients=GRADIENTS)
_CAPPED = 0.2  # of a group's norm; 4 bits lose .118 of a normal one

_VOCABULARY = r"tokens|positions|head\."
_ATTENTION = r"qkv|out\.|self_attn"
_MLP = r"up\.|down\.|mlp"
_EARLY = 40


def _both(weights: Codes = DIFFERENCES, gradients: Codes = GRADIENTS) -> Variant:
    return Variant(plan=Plan(weights=weights, gradients=gradients))


def _optimizer(what: Any) -> Variant:
    return Variant(plan=replace(BOTH, optimizer=what))


def with_bits(bits: int, of_vocabulary: int, weights: Codes = DIFFERENCES) -> Variant:
    """Return gradients in so many bits between nodes, beside default differences or others."""
    vocabulary = _library(_INTER, code=f"int{of_vocabulary}")
    return _both(weights, _gradients(code=f"int{bits}", vocabulary=vocabulary))


VARIANTS = {
    BASELINE: Variant(),
    PERTURBED: Variant(),  # of weights that are 0.1% off
    "both": Variant(plan=BOTH),  # the library's default
    "differences": Variant(plan=Plan(weights=DIFFERENCES)),
    "gradients": Variant(plan=Plan(gradients=GRADIENTS)),
}
# The same with noise of the size of the codes' errors (of normal values): what chance of that size
# does. What differs from it is due to the codes.
_NOISE = (
    _gradients(
        NoiseCode(_INTER, 0.118),
        NoiseCode(_WORDS, 0.118 * _largest(_INTER) / _largest(_WORDS)),
    ),
    _weights(NoiseCode(WeightQuantization().codec(), 0.0957)),
)
VARIANTS |= {
    "noise": _both(_NOISE[1], _NOISE[0]),
    "noise, differences": Variant(plan=Plan(weights=_NOISE[1])),
    "noise, gradients": Variant(plan=Plan(gradients=_NOISE[0])),
}
# What quantizes less: when and where the gap comes from.
VARIANTS |= {
    **{f"both from {n}": Variant(plan=BOTH, early_steps=n) for n in (10, 20, 40, 80, 100)},
    **{f"both until {n}": Variant(early=BOTH, early_steps=n) for n in (20, 40, 100)},
    "both, vocabulary exact": Variant(plan=replace(BOTH, exact=_VOCABULARY)),
    "both, attention exact": Variant(plan=replace(BOTH, exact=_ATTENTION)),
    "both, MLP exact": Variant(plan=replace(BOTH, exact=_MLP)),
}
# Which way the error takes through the optimizer: see `Plan`.
VARIANTS |= {
    "both, exact norm": _optimizer("norm"),
    "both, exact first moments": _optimizer("first"),
    "both, exact second moments": _optimizer("second"),
}
# An unbiased error in the codes' own shape.
VARIANTS["gradients, stochastic"] = _both(
    gradients=_gradients(StochasticCode(_INTER), StochasticCode(_WORDS))
)
VARIANTS["8 bits"] = _both(_weights(code="int8"), _gradients(code="int8"))
# Other codes of 4 bits, or of little more.
VARIANTS |= {
    "both, 8 bits early": Variant(
        plan=BOTH,
        early=Plan(weights=_weights(code="int8"), gradients=_gradients(code="int8")),
        early_steps=_EARLY,
    ),
    "gradients, larger transform": _both(gradients=_gradients(**_LARGER)),
    "gradients, asymmetric": _both(gradients=_gradients(**_ASYMMETRIC)),
    "gradients, NF4": _both(gradients=_gradients(**_NF4)),
    "gradients, NF4, groups of 32": _both(gradients=_gradients(code="nf4", group_size=32)),
    **{f"gradients, groups of {n}": _both(gradients=_gradients(group_size=n)) for n in (32, 64)},
    # As many bytes as groups of 128 with a scale of 32 bits.
    "gradients, groups of 64, short scales": _both(gradients=_gradients(**_SHORT)),
    "gradients, NF4, groups of 64, short scales": _both(gradients=_gradients(code="nf4", **_SHORT)),
    "gradients, fitted": _both(gradients=_gradients(_fitted(_INTER))),
    "gradients, fitted normal": _both(gradients=_gradients(_fitted(_INTER, levels="normal"))),
    "gradients, vocabulary groups of 32": _both(
        gradients=_gradients(vocabulary=_library(_INTER, group_size=32))
    ),
    # All in 4 bits was the default once.
    **{f"gradients, vocabulary {bits}": with_bits(4, bits) for bits in (4, 5, 6, 8)},
    "gradients, NF4, short scales, vocabulary 6": _both(
        gradients=_gradients(code="nf4", **_SHORT, vocabulary=_library(_INTER, code="int6"))
    ),
    # What was the default; with shorter groups; with other codes.
    "differences, INT4, groups of 2048": _both(LONG_GROUPS),
    "differences, groups of 128": _both(_weights(group_size=128)),
    "differences, transform": _both(_weights(**_LARGER)),
    "differences, asymmetric": _both(_weights(**_ASYMMETRIC)),
    "differences, NF4": _both(_weights(**_NF4)),
    # The bits of the default.
    "differences, short groups": _both(_weights(group_size=128, scale_dtype="bfloat16")),
    "differences, fitted": _both(_weights(_fitted(_WEIGHTS))),
    "differences, fitted normal": _both(_weights(_fitted(_WEIGHTS, levels="normal"))),
    "differences, vocabulary groups of 128": _both(
        _weights(vocabulary=_library(_WEIGHTS, group_size=128))
    ),
    "asymmetric": _both(_weights(**_ASYMMETRIC), _gradients(**_ASYMMETRIC)),
    "NF4": _both(_weights(**_NF4), _gradients(**_NF4)),
    "fitted": _both(_weights(_fitted(_WEIGHTS)), _gradients(_fitted(_INTER))),
    "fitted normal": _both(
        _weights(_fitted(_WEIGHTS, levels="normal")), _gradients(_fitted(_INTER, levels="normal"))
    ),
    "capped": _both(
        _weights(_fitted(_WEIGHTS, cap=_CAPPED)), _gradients(_fitted(_INTER, cap=_CAPPED))
    ),
}
VARIANTS["fitted normal from 20"] = replace(VARIANTS["fitted normal"], early_steps=20)
# How the gap follows the error: a quarter of it, half, twice as much, and more.
VARIANTS |= {
    f"{bits} bits": _both(gradients=_gradients(code=f"int{bits}")) for bits in (6, 5, 3, 2)
}

__all__ = [
    "BASELINE",
    "LONG_GROUPS",
    "PERTURBED",
    "PRESETS",
    "VARIANTS",
    "VOCABULARY_CODE",
    "Preset",
    "Variant",
    "with_bits",
]
