"""What ``pipeline_ablation.py`` found, as rows of a table."""

from __future__ import annotations

from dataclasses import replace

from ablation_report import BASELINE, LOSS_HEADER, Outcomes, changes, loss_rows, mean_percent
from common import table

HEADER = (LOSS_HEADER[0], "bits forward", "bits backward", *LOSS_HEADER[1:], "without codes")


def rows(outcomes: Outcomes) -> list[list[str]]:
    """Return the rows below :data:`HEADER`.

    Bits are those sent in training per value; "without codes" is the change of the validation loss
    when trained models run without coded boundaries, all else as in ``loss_rows``.
    """
    exact = {
        name: [replace(run, val_loss=run.exact_val_loss or run.val_loss) for run in runs]
        for name, runs in outcomes.items()
    }
    found = []
    for name, *cells in loss_rows(outcomes):
        first = outcomes[name][0]
        bits = [f"{b:.3f}" if b else "-" for b in (first.forward_bits, first.backward_bits)]
        without = "-" if name == BASELINE else mean_percent(changes(exact, name))
        found.append([name, *bits, *cells, without])
    return found


def summary(outcomes: Outcomes) -> str:
    """Lay out the outcomes for a terminal."""
    return table(rows(outcomes), HEADER)
