"""Losses of quantized trainings against full precision, as measured.

A test prints ``docs/accuracy.md`` from here, and recomputes every number from its report.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["pretraining", "fine-tuning"]


class Study(NamedTuple):
    """Runs that are compared with full precision of the same seed.

    ``file`` is a report of ``benchmarks/results``; ``commit`` has it if they no longer do.
    """

    model: str
    parameters: float
    steps: int
    file: str
    commit: str = ""
    kind: Kind = "pretraining"

    @property
    def report(self) -> str:
        """Name of the report."""
        return f"{self.file}.json"


class Loss(NamedTuple):
    """Change of the validation loss in percent, with its standard error, by what was quantized.

    One run has the error that runs of full precision show which start a thousandth apart; None
    where the study has none of those. ``note`` says how it differs from what it stands for.
    """

    study: str
    variant: str
    seeds: int
    percent: float
    error_percent: float | None
    quantized: tuple[str, ...] = ()
    note: str = ""


STUDIES = {
    "gpt_1m": Study("GPT of 1.3M", 1.3e6, 200, "loss_study_gpt_1m"),
    "llama_1m": Study("Llama of 1.1M", 1.1e6, 200, "loss_study_llama_1m"),
    "llama": Study("Llama of 98M", 98e6, 500, "loss_study_llama_110m"),
    "llama_again": Study("Llama of 98M", 98e6, 500, "loss_study_llama_110m_nf4"),
    "gpt": Study("GPT of 111M", 111e6, 500, "loss_study_gpt_110m"),
    "gpt_again": Study("GPT of 111M", 111e6, 500, "loss_study_gpt_110m_nf4"),
    "gpt_fast": Study("GPT of 111M, twice the rate", 111e6, 500, "loss_study_gpt_110m_lr"),
    "gpt_fast_again": Study(
        "GPT of 111M, twice the rate", 111e6, 500, "loss_study_gpt_110m_lr_chance"
    ),
    "gpt_long": Study("GPT of 125M", 125e6, 2300, "ablation_gpt_125m_2x1", "ac819df"),
    "gpt_beta2": Study("GPT of 125M", 125e6, 2300, "ablation_gpt_125m_beta2_999", "ac819df"),
    "recipes": Study("Llama of 110M", 110e6, 2300, "activation_ablation_llama_125m", "ac819df"),
    "recipes_361m": Study("Llama of 361M", 361e6, 720, "activation_ablation_llama_350m", "ac819df"),
    "stages_gpt": Study("GPT of 111M", 111e6, 1860, "loss_study_gpt_110m_boundaries"),
    "local_gpt": Study("GPT of 0.2M", 0.2e6, 512, "fewer_bytes_gpt_tiny", "5b07bc7"),
    "local_llama": Study("Llama of 0.1M", 0.1e6, 512, "fewer_bytes_llama_tiny", "5b07bc7"),
    "local_125m": Study("GPT of 125M", 125e6, 640, "alternatives_125m", "ac819df"),
    "tuning": Study("SmolLM2-135M", 135e6, 150, "fine_tuning", kind="fine-tuning"),
}

_INT4, _NF4 = "differences int4/2048", "differences nf4/128"
_G4, _G5, _G6, _G8 = (
    "gradients TLq-HS int4/128",
    *(f"gradients TLq-HS int4/128, vocabulary int{bits}" for bits in (5, 6, 8)),
)
_AGOQ, _AUTO, _COAT, _MIXED = (f"activations {n}" for n in ("agoq", "auto", "coat", "fp8-4bit"))
_STATES = "states expanded_fp8"
_EARLIER = {_AGOQ: "4-bit codes", _MIXED: "4-bit codes", _COAT: "codes in E4M3"}
_NOT_ADAPTED = "bits are not adapted"
_NEAREST = "rounded to nearest"


def _recipes(study: str, *rows: tuple[str, str, float, float | None]) -> list[Loss]:
    """Codes that recipes had before; those of ``"agoq"`` are what ``"auto"`` starts with."""
    found = [
        Loss(study, variant, 1, percent, error, (part,), f"with the {_EARLIER[part]} it had before")
        for variant, part, percent, error in rows
    ]
    first = found[0]
    return [*found, first._replace(quantized=(_AUTO,), note=_NOT_ADAPTED)]


def _stages(number: int, *rows: tuple[str, int, float, float]) -> list[Loss]:
    """Boundaries by the variant of the study; some are of hidden states that keep their mean."""
    return [
        Loss(
            *("stages_gpt", f"{number} stages, {variant}", seeds, percent, error),
            (f"boundaries {variant.split()[0]}/{variant.split()[-1]}, {number} stages",),
            "with codes of hidden states as they are" if "uncentered" in variant else "",
        )
        for variant, seeds, percent, error in rows
    ]


LOSSES: tuple[Loss, ...] = (
    Loss("gpt_1m", "gradients, vocabulary 6", 128, -0.005, 0.005, (_INT4, _G6)),
    Loss("gpt_1m", "gradients, vocabulary 8", 128, -0.004, 0.005, (_INT4, _G8)),
    Loss("gpt_1m", "gradients, vocabulary 5", 128, +0.006, 0.005, (_INT4, _G5)),
    Loss("gpt_1m", "both", 128, +0.057, 0.005, (_INT4, _G4)),
    Loss("gpt_1m", "differences", 64, +0.001, 0.004, (_INT4,)),
    Loss("llama_1m", "gradients, vocabulary 6", 192, +0.012, 0.015, (_INT4, _G6)),
    Loss("llama_1m", "gradients, vocabulary 8", 192, +0.022, 0.013, (_INT4, _G8)),
    Loss("llama_1m", "both", 192, +0.046, 0.016, (_INT4, _G4)),
    Loss("llama_1m", "differences", 64, +0.019, 0.023, (_INT4,)),
    Loss("llama", "both", 8, +0.081, 0.016, (_INT4, _G6)),
    Loss("llama", "gradients", 8, +0.031, 0.006, (_G6,)),
    Loss("llama_again", "differences, NF4, short groups", 4, +0.037, 0.011, (_NF4, _G6)),
    Loss("llama_again", "both", 4, +0.065, 0.007, (_INT4, _G6)),
    Loss("gpt", "both", 4, +0.075, 0.017, (_INT4, _G6)),
    Loss("gpt_again", "both", 8, +0.046, 0.017, (_NF4, _G6)),
    Loss("gpt_again", "gradients", 8, +0.019, 0.015, (_G6,)),
    Loss("gpt_again", "differences", 8, +0.044, 0.010, (_NF4,)),
    Loss("gpt_fast", "both", 8, +0.129, 0.041, (_NF4, _G6)),
    Loss("gpt_fast_again", "both", 8, +0.097, 0.064, (_NF4, _G6)),
    Loss("gpt_fast_again", "gradients", 8, +0.043, 0.081, (_G6,)),
    Loss("gpt_long", "SDP4Bit vocabulary 6", 3, +0.185, 0.086, (_INT4, _G6)),
    Loss("gpt_long", "SDP4Bit", 3, +0.153, 0.074, (_INT4, _G4)),
    Loss("gpt_long", "qWD", 1, +0.162, 0.156, (_INT4,)),
    Loss("gpt_long", "TLq-HS", 1, +0.203, 0.156, (_G4,)),
    Loss("gpt_long", "SDP4Bit vocabulary 8", 1, +0.012, 0.156, (_INT4, _G8)),
    Loss("gpt_long", "SDP4Bit 2 bits", 1, +3.730, 0.156, (_INT4, "gradients TLq-HS int2/128")),
    Loss("gpt_long", "AdamW expanded_fp8", 1, +0.017, 0.156, (_STATES,), _NEAREST),
    Loss("gpt_long", "AdamW dynamic8", 1, +0.079, 0.156, ("states dynamic8",), _NEAREST),
    Loss("gpt_beta2", "AdamW expanded_fp8", 1, -0.108, None, (_STATES,)),
    *_recipes(
        "recipes",
        ("agoq", _AGOQ, +0.090, 0.040),
        ("coat", _COAT, +0.177, 0.040),
        ("fp8-4bit", _MIXED, +0.308, 0.040),
    ),
    *_recipes(
        "recipes_361m",
        ("agoq", _AGOQ, -0.041, None),
        ("coat", _COAT, +0.192, None),
        ("fp8-4bit", _MIXED, +0.229, None),
    ),
    *_stages(2, ("tah5 uncentered / int5", 2, +0.240, 0.286)),
    *_stages(4, ("tah5 / int5", 1, +0.131, 0.261)),
    *_stages(
        8,
        ("tah5 / int5", 4, +0.507, 0.037),
        ("tah5 uncentered / int4", 2, +1.012, 0.180),
        ("int4 / int4", 4, +2.476, 0.202),
        ("tah uncentered / int4", 1, +6.022, 0.226),
        ("none / int4", 2, -0.087, 0.160),
    ),
    Loss("local_gpt", "4 bits every 8", 8, +3.419, 1.233, ("local steps 8 in 4 bits",)),
    Loss("local_gpt", "4 bits every 32", 8, +2.197, 0.239, ("local steps 32 in 4 bits",)),
    Loss("local_gpt", "4 bits every 64", 8, +2.774, 0.252, ("local steps 64 in 4 bits",)),
    Loss("local_gpt", "fp32 every 32", 8, +2.048, 0.220, ("local steps 32 in fp32",)),
    Loss("local_llama", "4 bits every 32", 4, +0.629, 0.129, ("local steps 32 in 4 bits",)),
    Loss("local_125m", "local-32", 1, +5.669, None, ("local steps 32 in 4 bits",)),
    Loss("tuning", "quantized_fsdp", 5, +0.031, 0.027, (_NF4, _G6)),
    Loss("tuning", "agoq", 5, +0.002, 0.026, (_AGOQ,)),
    Loss("tuning", "4-bit codes", 5, -0.010, 0.044, (_AUTO,), _NOT_ADAPTED),
    Loss("tuning", "coat", 5, -0.102, 0.047, (_COAT,)),
    Loss("tuning", "coat, INT8 forward", 5, -0.056, 0.027, (f"{_COAT}, INT8 forward",)),
    Loss("tuning", "fp8-4bit", 5, -0.085, 0.040, (_MIXED,)),
    Loss("tuning", "expanded_fp8", 5, +0.038, 0.023, (_STATES,)),
)


def show(percent: float, error_percent: float | None, digits: int = 3) -> str:
    """A change of the loss with its error, without a unit."""
    error = "" if error_percent is None else f" ± {error_percent:.{digits}f}"
    return f"{percent:+.{digits}f}{error}"
