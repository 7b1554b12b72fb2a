"""What `slow_network.py` has measured, laid out and compared."""

from __future__ import annotations

import statistics
from typing import Any

from common import table


def compare(curves: dict[str, list[tuple[float, float]]], window: int) -> dict[str, Any]:
    """Return after how many seconds each codec reaches the loss that all of them reach.

    Args:
        curves: By codec, seconds and losses of the steps.
        window: Steps whose mean is the loss.
    """
    smooth = {
        name: [
            (points[end - 1][0], statistics.fmean(loss for _, loss in points[end - window : end]))
            for end in range(window, len(points) + 1)
        ]
        for name, points in curves.items()
    }
    target = max(points[-1][1] for points in smooth.values())
    return {
        "window": window,
        "target_loss": target,
        "codecs": {
            name: {
                "seconds": next(seconds for seconds, loss in points if loss <= target),
                "last_loss": points[-1][1],
                "all_seconds": points[-1][0],
                "points": curves[name],
            }
            for name, points in smooth.items()
        },
    }


def show(rows: list[dict[str, Any]]) -> str:
    """Lay out the rows, compared with the first codec at the same rate."""
    first = {row["rate"]: row["tokens_per_s"] for row in reversed(rows)}
    header = ["codec", "rate", "tokens/s", "times", "step ms", "link ms", "reached"]
    header += ["bits", "coding", "MB sent"]
    cells = []
    for row in rows:
        sent = [b for b in row["interface_bytes"] if b == b] or row["payload_bytes"]
        cells.append(
            [
                row["codec"],
                row["rate"],
                f"{row['tokens_per_s']:.0f}",
                f"{row['tokens_per_s'] / first[row['rate']]:.2f}",
                f"{row['step_ms']:.0f}",
                f"{row['link_ms']:.0f}",
                f"{row['reached']:.0%}",
                f"{row['forward_bits']:.2f}/{row['backward_bits']:.2f}",
                f"{row['coding_share']:.1%}",
                "/".join(f"{nbytes / 1e6:.2f}" for nbytes in sent),
            ]
        )
    return table(cells, header)


def show_training(training: dict[str, Any]) -> str:
    """Lay out when each codec has reached the loss."""
    cells = [
        [name, f"{of['seconds']:.1f}", f"{of['all_seconds']:.1f}", f"{of['last_loss']:.4f}"]
        for name, of in training["codecs"].items()
    ]
    header = [f"to loss {training['target_loss']:.4f}", "s", "s, all steps", "last loss"]
    return table(cells, header)
