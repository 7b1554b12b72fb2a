"""Sizes of the loss study's models and runs, and the codes of each variant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from emulated_ranks import Codes, Plan
from emulated_stages import Stages
from stacked_models import Sizes
from table import BASELINE, PERTURBED

from lq_lightning.codecs import CodecSpec
from lq_lightning.data_parallel import GradientQuantization, LocalSteps, WeightQuantization
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
        dtype: Name of the dtype of the weights that ranks compute with.
        warmup: Steps of the linear rise of the learning rate; 0 for a tenth of the run.
        decay: ``"cosine"`` falls from the first step, ``"linear"`` from the end of the rise.
        floor: Share of the peak at the end.
        passes: How often the text may be read.
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
    passes: int = 1


_SMOKE: dict[str, Any] = {"layers": 3, "hidden": 64, "heads": 2, "seq": 32, "vocab": 0}
_SMOKE |= {"batch": 1, "steps": 10, "lr": 2e-3, "val_blocks": 8, "dtype": "float32"}
# At a rate of 3e-3 chance alone moves the loss by 0.6% (one deviation); at 1e-3 by 0.01%.
_TINY: dict[str, Any] = {"layers": 3, "hidden": 64, "heads": 2, "seq": 64, "vocab": 512}
_TINY |= {"batch": 1, "steps": 200, "lr": 1e-3, "val_blocks": 128, "dtype": "float32"}
_SMALL: dict[str, Any] = {"hidden": 128, "heads": 4, "seq": 128, "vocab": 2048}
_SMALL |= {"batch": 2, "steps": 200, "lr": 2e-3, "val_blocks": 256}
_LARGE: dict[str, Any] = {"layers": 12, "hidden": 768, "heads": 12, "seq": 1024, "vocab": 16384}
_LARGE |= {"batch": 8, "steps": 500, "lr": 6e-4, "val_blocks": 512}
_LARGE |= {"warmup": 100, "decay": "linear", "floor": 0.0}

PRESETS = {
    # Show in seconds that every variant runs; their losses say nothing.
    "gpt_smoke": Preset(arch="gpt", intermediate=128, **_SMOKE),
    "llama_smoke": Preset(arch="llama", intermediate=64, **_SMOKE),
    # For CPUs: 0.2e6 and 0.1e6 parameters, 256 tokens a step.
    "gpt_tiny": Preset(arch="gpt", intermediate=256, **_TINY),
    "llama_tiny": Preset(arch="llama", intermediate=128, **_TINY),
    # 1.3e6 and 1.1e6 parameters.
    "gpt_1m": Preset(arch="gpt", layers=4, intermediate=512, **_SMALL),
    "llama_1m": Preset(arch="llama", layers=5, intermediate=256, **_SMALL),
    # 111e6 and 98e6 parameters, for two nodes of one rank; the vocabulary is that of --tokens.
    "gpt_110m": Preset(arch="gpt", intermediate=3072, **_LARGE),
    # The same width in short sequences and few words, for a look on a CPU.
    "gpt_wide": Preset(
        arch="gpt",
        intermediate=3072,
        **{**_LARGE, "seq": 256, "vocab": 2048, "batch": 2, "steps": 140, "warmup": 50},
    ),
    "llama_110m": Preset(arch="llama", intermediate=2048, **_LARGE),
}


# --- codes ----------------------------------------------------------------------------------------

_INTRA = GradientQuantization().codec("intra")
_INTER = GradientQuantization().codec("inter")
# Written into reports: embeddings and heads in all variants that do not name another code.
VOCABULARY_CODE = GradientQuantization().codec("inter", vocabulary=True).code

DIFFERENCES = Codes(inter=WeightQuantization().codec())
_LONG_GROUPS = CodecSpec(code="int4", group_size=2048)  # the paper's, and the default until NF4
_VOCABULARY = r"tokens|positions|head\."


def _gradients(vocabulary: CodecSpec | None = None, **changes: Any) -> Codes:
    """Return codes of gradients: 8 bits within nodes, with the transform of the level between them.

    By default embeddings and heads have as many bits as the library gives them beside such a code.
    """
    inter = replace(_INTER, **changes)
    intra = replace(_INTRA, group_size=inter.group_size, hadamard_size=inter.hadamard_size)
    if vocabulary is None:
        beside = GradientQuantization(inter_bits=CODES[inter.code].bits)  # type: ignore[arg-type]
        vocabulary = replace(inter, code=beside.codec("inter", vocabulary=True).code)
    return Codes(inter=inter, intra=intra, vocabulary=None if vocabulary == inter else vocabulary)


GRADIENTS = _gradients()
BOTH = Plan(weights=DIFFERENCES, gradients=GRADIENTS)


def _both(weights: Codes = DIFFERENCES, gradients: Codes = GRADIENTS) -> Plan:
    return Plan(weights=weights, gradients=gradients)


def _differences(**changes: Any) -> Plan:
    return _both(Codes(inter=replace(_LONG_GROUPS, **changes)))


def with_vocabulary(bits: int) -> Plan:
    """Return 4-bit gradients with embeddings and heads in so many bits."""
    return _both(gradients=_gradients(replace(_INTER, code=f"int{bits}")))  # type: ignore[arg-type]


_SHORT: dict[str, Any] = {"group_size": 64, "scale_dtype": "bfloat16"}


def _local(optimizer: Literal["adamw", "muon8"] = "adamw", every: int = 32, **options: Any) -> Plan:
    return Plan(optimizer=optimizer, local=LocalSteps(every=every, **options))


_TWO: dict[str, Any] = {"bits": 2, "error_feedback": True}
_SLOW: dict[str, Any] = {"every": 48, "fragments": 12, "delay": 4, **_TWO}
LOCAL: dict[str, Plan] = {
    "local": _local(),  # the library's default
    "local, 2 bits, feedback": _local(**_TWO),
    "local 48, 12 fragments, delay 4, 2 bits, feedback": _local(**_SLOW),
    "local, mean": _local(outer_lr=1.0, outer_momentum=0.0),  # of weights: no outer momentum
    "local, momentum 0.9": _local(outer_momentum=0.9),
    # To be compared with "muon8".
    "muon8, local": _local("muon8"),
    "muon8, local, 2 bits, feedback": _local("muon8", **_TWO),
    "muon8, local 48, 12 fragments, delay 4, 2 bits, feedback": _local("muon8", **_SLOW),
}


def _stages(number: int, forward: str | float, backward: str) -> tuple[str, Plan]:
    name = forward if isinstance(forward, str) else f"klt {forward}"
    plan = Plan(stages=Stages(number, forward, backward))
    return f"{number} stages, {name} / {backward}", plan


_BOUNDARIES: tuple[tuple[str | float, str], ...] = (
    ("tah5", "int5"),
    *((forward, "int4") for forward in ("tah5", "tah", "int4", "int3", "none")),
    *(("tah5 uncentered", f"int{bits}") for bits in (5, 4, 3, 2)),
    *((2, f"int{bits}") for bits in (4, 3)),
    ("tah5 uncentered", "int5 nearest"),
    *(("tah uncentered", f"int{bits}") for bits in (4, 3)),
    ("int5 stochastic", "int5"),
    ("int4 stochastic", "int4"),
    *(("int4 nearest", f"int{bits}") for bits in (4, 3)),
    ("int3 nearest", "int4"),
)
STAGES: dict[str, Plan] = dict(
    [
        *(_stages(number, *codecs) for number in (2, 8) for codecs in _BOUNDARIES),
        *(_stages(4, forward, "int5") for forward in ("tah5", "tah5 uncentered")),
    ]
)

VARIANTS: dict[str, Plan] = {
    BASELINE: Plan(),
    PERTURBED: Plan(),  # from weights that are 0.1% off
    # Both to be compared with each other, and from a trunk of AdamW without momentum.
    "muon": Plan(optimizer="muon"),
    "muon8": Plan(optimizer="muon8"),
    "both": BOTH,  # the library's default
    "differences": Plan(weights=DIFFERENCES),
    "gradients": Plan(gradients=GRADIENTS),
    "both, vocabulary exact": replace(BOTH, exact=_VOCABULARY),
    **{f"{bits} bits": _both(gradients=_gradients(code=f"int{bits}")) for bits in (6, 2)},
    # All in 4 bits was the default once.
    **{f"gradients, vocabulary {bits}": with_vocabulary(bits) for bits in (4, 5, 6, 8)},
    "gradients, vocabulary groups of 32": _both(
        gradients=_gradients(replace(_INTER, group_size=32))
    ),
    "gradients, larger transform": _both(gradients=_gradients(hadamard_size=128)),
    "gradients, groups of 32": _both(gradients=_gradients(group_size=32)),
    # As many bytes as groups of 128 with a scale of 32 bits.
    "gradients, groups of 64, short scales": _both(gradients=_gradients(**_SHORT)),
    # The default before NF4, and codes between the two.
    "differences, INT4, groups of 2048": _differences(),
    "differences, short groups": _differences(group_size=128, scale_dtype="bfloat16"),
    **LOCAL,
    **STAGES,
}
