"""What ``ablation.py`` found: outcomes joined from several reports, as a table and a figure."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ablation_data import Data
from common import table, write_report

BASELINE = "full precision"
PERTURBED = "full precision perturbed"

_CURVES = ("curve", "grad_norms")

# Scale of the figure: linear near zero, logarithmic beyond.
_LINEAR_PERCENT = 0.2
_TICKS = (-10, -5, -2, -1, -0.5, -0.2, -0.1, 0, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of a variant.

    Attributes:
        seed: Of initialisation, data order and rounding.
        val_loss: After the last step, in nats per token.
        train_s: Seconds of training, compilation included.
        curve: Pairs of a step and the mean training loss since the pair before, in nats per token.
        grad_norms: Likewise, of the gradient before clipping.
        tokens_per_s: Of training, without compilation; None where it was not measured.
        peak_gib: Memory that tensors took on the GPU; None where it was not measured.
        exact_val_loss: As ``val_loss``, with nothing quantized; None where it was not measured.
        forward_bits: Sent per value of hidden states in training; None without stage boundaries.
        backward_bits: Likewise, of gradients.
        details: What else a study finds.
    """

    seed: int
    val_loss: float
    train_s: float
    curve: tuple[tuple[int, float], ...] = ()
    grad_norms: tuple[tuple[int, float], ...] = ()
    tokens_per_s: float | None = None
    peak_gib: float | None = None
    exact_val_loss: float | None = None
    forward_bits: float | None = None
    backward_bits: float | None = None
    details: dict[str, Any] | None = None


Outcomes = dict[str, list[Outcome]]


def write_outcomes(
    path: Path | None,
    benchmark: str,
    preset: Any,
    data: Data,
    train_tokens: int,
    outcomes: Outcomes,
    settings: dict[str, Any],
) -> None:
    """Write a report with everything needed to repeat it; a file that exists is replaced.

    Args:
        path: Of the report; None to write none.
        benchmark: Its name.
        preset: Sizes of the runs, a dataclass.
        data: That they read.
        train_tokens: That each of them saw.
        outcomes: So far.
        settings: What else the runs depended on.
    """
    if path is None:
        return
    results = {
        "preset": asdict(preset),
        **settings,
        "vocab": data.vocab,
        "corpus_tokens": data.num_tokens,
        "train_tokens": train_tokens,
        "train_passes": round(train_tokens / (data.train.shape[0] * preset.seq), 3),
        "val_tokens": min(preset.val_blocks, len(data.val)) * preset.seq,
        "variants": to_json(outcomes),
    }
    scratch = path.with_suffix(".part")
    write_report(scratch, benchmark, results)
    scratch.replace(path)


def merged(paths: list[Path]) -> dict[str, Any]:
    """Join the results of several reports; runs of one seed that were repeated all count.

    Raises:
        ValueError: the reports are of different presets, worlds or texts.
    """
    same = (
        *("preset", "world_size", "node_size", "stop_after", "corpus_tokens", "trunk_steps"),
        *("tuning", "stages", "sites", "train", "rank", "alpha", "vocabulary_code"),
    )
    joined: dict[str, Any] = {}
    variants: dict[str, list[Any]] = {}
    for path in paths:
        results = json.loads(path.read_text())["results"]
        joined = joined or results
        for key in same:
            if results.get(key) != joined.get(key):
                raise ValueError(
                    f"`{key}` is {results.get(key)} in {path} but {joined.get(key)} in {paths[0]}: "
                    "only reports of equal runs can be joined"
                )
        for name, runs in results["variants"].items():
            known = variants.setdefault(name, [])
            known += [run for run in runs if run not in known]
    by_seed = {n: sorted(runs, key=lambda run: run["seed"]) for n, runs in variants.items()}
    return joined | {"variants": by_seed}


def write_merged(paths: list[Path], benchmark: str, results: dict[str, Any], out: Path) -> None:
    """Write the results of several reports as one, with the environments of all."""
    reports = [json.loads(path.read_text()) for path in paths]
    environments = [e for r in reports for e in r.get("environments") or [r["environment"]]]
    joined = {"benchmark": benchmark, "environments": environments, "results": results}
    out.write_text(json.dumps(joined, indent=2) + "\n")


def to_outcomes(results: dict[str, Any], order: list[str]) -> Outcomes:
    """Read the outcomes of a report, variants in the given order, others after them."""
    variants = results["variants"]
    names = [name for name in order if name in variants]
    names += [name for name in variants if name not in order]
    return {
        name: [
            Outcome(**run | {key: tuple(map(tuple, run.get(key, ()))) for key in _CURVES})
            for run in variants[name]
        ]
        for name in names
    }


def to_json(outcomes: Outcomes) -> dict[str, list[dict[str, Any]]]:
    """Turn outcomes into what JSON can hold."""
    return {name: [asdict(outcome) for outcome in runs] for name, runs in outcomes.items()}


def counterparts(outcomes: Outcomes, name: str) -> dict[int, list[Outcome]]:
    """Return the runs of full precision that a variant is compared with, by seed.

    With those from perturbed weights, where there are any: a single run has luck of its own, which
    all differences to it share. Full precision itself, of both kinds, is compared with the others.
    """
    exact = [*outcomes.get(BASELINE, [])]
    if name not in (BASELINE, PERTURBED):
        exact += outcomes.get(PERTURBED, [])
    by_seed: dict[int, list[Outcome]] = {}
    for outcome in exact:
        by_seed.setdefault(outcome.seed, []).append(outcome)
    return by_seed


def changes(outcomes: Outcomes, name: str) -> list[float]:
    """Return the changes of validation loss against full precision with the same seed, in percent.

    Runs without counterparts are left out; of several the mean counts.
    """
    exact = {
        seed: statistics.mean(o.val_loss for o in runs)
        for seed, runs in counterparts(outcomes, name).items()
    }
    return [100 * (o.val_loss / exact[o.seed] - 1) for o in outcomes[name] if o.seed in exact]


def training_changes(outcomes: Outcomes, name: str, *, last: float = 0.5) -> list[float]:
    """Return the mean change of training loss over the last part of each run, as above.

    All variants see the same batches, so this shows smaller differences than the last loss does.

    Args:
        outcomes: With full precision among them.
        name: Of the variant.
        last: How much of the run, at its end.
    """
    curves = _curves_of_changes(outcomes, name)
    ends = [curve[int(len(curve) * (1 - last)) :] for curve in curves]
    return [statistics.mean(change for _, change in end) for end in ends]


def _curves_of_changes(outcomes: Outcomes, name: str) -> list[list[tuple[int, float]]]:
    """Return steps and changes of training loss, in percent, of each run with a counterpart."""
    exact = counterparts(outcomes, name)
    curves = []
    for outcome in outcomes[name]:
        others = [dict(o.curve) for o in exact.get(outcome.seed, [])]
        means = {
            step: statistics.mean(other[step] for other in others)
            for step, _ in outcome.curve
            if others and all(step in other for other in others)
        }
        curves.append([(s, 100 * (loss / means[s] - 1)) for s, loss in outcome.curve if s in means])
    return [curve for curve in curves if curve]


def seed_noise(outcomes: Outcomes) -> float:
    """Return the standard deviation of full precision over seeds, in percent; NaN for one seed."""
    losses = [o.val_loss for o in outcomes.get(BASELINE, [])]
    if len(losses) < 2:
        return float("nan")
    return 100 * statistics.stdev(losses) / statistics.mean(losses)


def std_error(outcomes: Outcomes, name: str) -> float:
    """Return the standard error of the mean change of validation loss; NaN for one seed.

    For full precision it is the deviation of a single seed.
    """
    if name == BASELINE:
        return seed_noise(outcomes)
    paired = changes(outcomes, name)
    return statistics.stdev(paired) / len(paired) ** 0.5 if len(paired) > 1 else float("nan")


def mean_percent(values: list[float]) -> str:
    """Return the mean of changes as text, ``-`` if there are none."""
    return f"{statistics.mean(values):+.3f}%" if values else "-"


LOSS_HEADER = (
    *("variant", "seeds", "validation loss", "against full precision", "std error"),
    *("training, second half", "last quarter"),
)


def loss_rows(outcomes: Outcomes) -> list[list[str]]:
    """Return the rows below :data:`LOSS_HEADER`; differences are to the same seeds.

    ``training`` is the mean difference of the training loss over the second half of the run.
    ``std error`` is that of the mean difference of the validation loss over seeds; for full
    precision, the spread of one seed (standard deviation).

    Args:
        outcomes: Of all variants that were run.
    """
    rows = []
    for name, runs in outcomes.items():
        loss = f"{statistics.mean(run.val_loss for run in runs):.4f}"
        change = training = late = "-"
        if name != BASELINE:
            change = mean_percent(changes(outcomes, name))
            training = mean_percent(training_changes(outcomes, name))
            late = mean_percent(training_changes(outcomes, name, last=0.25))
        error = std_error(outcomes, name)
        spread = "-" if math.isnan(error) else f"{error:.3f}%"
        rows.append([name, str(len(runs)), loss, change, spread, training, late])
    return rows


def summary(outcomes: Outcomes) -> str:
    """Lay out the losses for a terminal."""
    return table(loss_rows(outcomes), LOSS_HEADER)


def draw(outcomes: Outcomes, path: Path) -> None:
    """Draw the changes of the validation loss, and of the training loss over time.

    Args:
        outcomes: With full precision among them.
        path: Image to write; its ending chooses the format.

    Raises:
        ValueError: there is no full-precision run to compare with.
    """
    if BASELINE not in outcomes:
        raise ValueError(f"the figure compares with {BASELINE!r}, of which there is no run")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in outcomes if name != BASELINE and changes(outcomes, name)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    shades = plt.get_cmap("tab20").colors  # each full shade, those of `tab10`, before its light one
    shades = [*shades[::2], *shades[1::2]]
    colors = dict(zip(names, itertools.cycle(shades), strict=False))
    for row, name in enumerate(names):
        values = changes(outcomes, name)
        left.plot(values, [row] * len(values), "o", color=colors[name])
        left.annotate(
            f"{statistics.mean(values):+.3f}%",
            (max(values), row),
            xytext=(8, -3),
            textcoords="offset points",
            fontsize=8,
        )
        for curve in _curves_of_changes(outcomes, name):
            right.plot(*zip(*curve, strict=True), color=colors[name], linewidth=1.2)
    noise = seed_noise(outcomes)
    if noise == noise:
        left.axvspan(-noise, noise, color="0.88", zorder=0)
        left.set_title("shaded: one standard deviation of full precision over seeds", fontsize=9)
    left.axvline(0, color="0.4", linewidth=0.8)
    left.set_xscale("symlog", linthresh=_LINEAR_PERCENT)
    left.margins(x=0.25)
    shown = left.get_xlim()
    left.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS], fontsize=8)
    left.set_xlim(shown)
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set_xlabel("validation loss against full precision, same seed (%)")
    right.axhline(0, color="0.4", linewidth=0.8)
    right.set_yscale("symlog", linthresh=_LINEAR_PERCENT)
    shown = right.get_ylim()
    right.set_yticks(_TICKS, [f"{tick:g}" for tick in _TICKS], fontsize=8)
    right.set_ylim(shown)
    right.set_title("means over the steps since the point before; colors as left", fontsize=9)
    right.set_xlabel("optimizer step")
    right.set_ylabel("training loss against full precision (%)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
