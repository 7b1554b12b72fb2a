"""Tables of ``docs/accuracy.md``: changes of the loss by study, and the prices of options.

A test recomputes every number from its report.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, get_args

from lq_lightning.planning.losses import LOSSES, STUDIES, Kind, Loss, show
from lq_lightning.planning.prices import mean_of

_NF4_SHORT = "gradients, NF4, groups of 64, short scales"
_PERTURBED = "full precision perturbed"
# What no option does.
COMPARED = (
    Loss("gpt_1m", "gradients, vocabulary groups of 32", 128, +0.022, 0.006),
    Loss("gpt_1m", "gradients, groups of 32", 128, +0.025, 0.005),
    Loss("gpt_1m", _NF4_SHORT, 128, +0.027, 0.005),
    Loss("gpt_1m", "gradients, NF4, short scales, vocabulary 6", 128, +0.004, 0.004),
    Loss("gpt_1m", "gradients, larger transform", 64, +0.047, 0.005),
    Loss("gpt_1m", "both from 40", 64, +0.051, 0.001),
    Loss("gpt_1m", "noise", 64, +0.066, 0.006),
    Loss("gpt_1m", "gradients, fitted normal", 64, +1.286, 0.124),
    Loss("llama_1m", _NF4_SHORT, 192, +0.028, 0.015),
    Loss("llama_1m", "gradients, NF4, short scales, vocabulary 6", 192, +0.022, 0.014),
    Loss("llama_1m", "gradients, larger transform", 64, +0.057, 0.032),
    Loss("llama_1m", "noise", 64, +0.061, 0.029),
    Loss("llama_1m", "gradients, fitted normal", 64, +0.051, 0.028),
    Loss("llama", _PERTURBED, 8, -0.011, 0.007),
    Loss("gpt", _PERTURBED, 4, -0.004, 0.012),
    Loss("gpt_again", "both, vocabulary exact", 8, +0.040, 0.015),
    Loss("gpt_again", _NF4_SHORT, 8, +0.043, 0.016),
    Loss("gpt_fast_again", _PERTURBED, 8, +0.018, 0.075),
    Loss("gpt_long", _PERTURBED, 3, +0.110, 0.102),
    Loss("gpt_long", "qW", 1, +2.139, 0.156),
    Loss("gpt_long", "SDP4Bit stochastic", 1, +0.148, 0.156),
    Loss("gpt_long", "SDP4Bit 2 bits vocabulary 8", 1, +2.591, 0.156),
)


class Table(NamedTuple):
    """Variants of several studies, one per column, in rows."""

    title: str
    columns: dict[str, str]  # heading by study
    rows: tuple[tuple[str, tuple[str, ...]], ...]  # label, and variant in each column: "" has none


def _alike(*rows: tuple[str, str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((label, (variant, variant)) for label, variant in rows)


TABLES = (
    Table(
        "gradients between nodes; differences are INT4 in groups of 2048",
        {"gpt_1m": "GPT", "llama_1m": "Llama"},
        _alike(
            ("4 bits, embeddings and heads in 6, as by default", "gradients, vocabulary 6"),
            ("embeddings and heads in 8", "gradients, vocabulary 8"),
            ("embeddings and heads in 5", "gradients, vocabulary 5"),
            ("embeddings and heads in 4, in groups of 32", "gradients, vocabulary groups of 32"),
            ("4 bits throughout, the default until these runs", "both"),
            ("4 bits throughout in groups of 32", "gradients, groups of 32"),
            ("NF4 throughout in groups of 64 with scales of 16 bits", _NF4_SHORT),
            (
                "NF4 in groups of 64 with scales of 16 bits, embeddings and heads in 6",
                "gradients, NF4, short scales, vocabulary 6",
            ),
            ("Hadamard transform of 128 instead of 32", "gradients, larger transform"),
            ("full precision: differences alone", "differences"),
            ("4 bits throughout after 40 steps in full precision", "both from 40"),
            ("normal noise as large as the errors of 4 bits throughout", "noise"),
            ("scales of least error instead of the largest magnitude", "gradients, fitted normal"),
        ),
    ),
    Table(
        "110M parameters",
        {
            "llama": "Llama, tied embeddings, 8 seeds",
            "llama_again": "again, 4 seeds",
            "gpt": "GPT, 4 seeds",
            "gpt_again": "again, 8 seeds",
        },
        (
            (
                "**the default**: NF4 differences in groups of 128",
                ("", "differences, NF4, short groups", "", "both"),
            ),
            ("INT4 differences in groups of 2048, the default before", ("both",) * 3 + ("",)),
            ("gradients alone", ("gradients", "", "", "gradients")),
            ("NF4 differences alone", ("", "", "", "differences")),
            ("the default, embeddings and head exact", ("", "", "", "both, vocabulary exact")),
            ("the default, NF4 in groups of 64 for gradients too", ("", "", "", _NF4_SHORT)),
            ("full precision, start perturbed by a thousandth", (_PERTURBED, "", _PERTURBED, "")),
        ),
    ),
    Table(
        "variant",
        {"gpt_long": "change"},
        (
            ("full precision, start perturbed by a thousandth", (_PERTURBED,)),
            ("`quantized_fsdp`, the default but for INT4 differences", ("SDP4Bit vocabulary 6",)),
            ("`quantized_fsdp`, 4 bits throughout", ("SDP4Bit",)),
            ("weights alone (`qWD`)", ("qWD",)),
            ("gradients alone (`TLq-HS`)", ("TLq-HS",)),
            ("stochastic rounding", ("SDP4Bit stochastic",)),
            ("vocabulary in 8 bits", ("SDP4Bit vocabulary 8",)),
            ("gradients of 2 bits", ("SDP4Bit 2 bits",)),
            ("gradients of 2 bits, vocabulary in 8", ("SDP4Bit 2 bits vocabulary 8",)),
            ("4-bit weights instead of differences (the paper's `qW`)", ("qW",)),
        ),
    ),
)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = ()) -> str:
    """A Markdown table: numbers to the right, the first column and ``left`` to the left."""
    aligned = ["---" if index in (0, *left) else "---:" for index in range(len(header))]
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, aligned, *rows))


def print_table(table: Table) -> str:
    """One of :data:`TABLES`, in percent, as ``docs/accuracy.md`` has it."""
    known = {(loss.study, loss.variant): loss for loss in (*LOSSES, *COMPARED)}
    rows = []
    for label, variants in table.rows:
        found = [known.get(key) for key in zip(table.columns, variants, strict=True)]
        cells = [show(loss.percent, loss.error_percent) if loss else "-" for loss in found]
        seeds = [str(loss.seeds) for loss in found if loss][: len(table.columns) == 1]
        rows.append([label, *seeds, *cells])
    seeds = ["seeds"] if len(table.columns) == 1 else []
    return markdown([table.title, *seeds, *table.columns.values()], rows)


# Options of which nobody has measured what they cost in loss.
_NOT_MEASURED = (
    "gradient sums int8",
    "bf16 weights, stochastic",
    "bf16 weights and states",
    "gradients rounded in every micro-batch",
    "gradients TLq-HS int8/128 within a node",
    "all-reduce in 8 bits",
)


def print_prices() -> str:
    """The table of all prices, in percent, as ``docs/accuracy.md`` has it."""
    every = dict.fromkeys(loss.quantized for loss in LOSSES)
    rows = []
    for quantized in [*every, *((part,) for part in _NOT_MEASURED)]:
        cells = [" + ".join(quantized)]
        for kind in get_args(Kind):
            cells += _cells(quantized, kind)
        rows.append(cells)
    header = ("what is coded", "pretraining", "measured with", "fine-tuning", "measured with")
    return markdown(header, rows, left=(2, 4))


def _cells(quantized: tuple[str, ...], kind: Kind) -> list[str]:
    losses = [loss for loss in LOSSES if loss.quantized == quantized]
    losses = [loss for loss in losses if STUDIES[loss.study].kind == kind]
    if not losses:
        return ["not measured", "-"]
    cost = mean_of(losses)
    models = dict.fromkeys(
        STUDIES[x.study].model + (f", {x.note}" if x.note else "") for x in cost.losses
    )
    return [show(cost.percent, cost.error_percent), "; ".join(models)]
