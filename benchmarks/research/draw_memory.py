"""Draw what takes memory while an 8B model trains on 32k tokens: weights, states, activations.

    python benchmarks/research/draw_memory.py docs/images/activation_memory.svg

At the end of the second micro-batch's forward pass, when most is held. Saved activations are those
of a layer in ``activations_table.json`` times layers and tokens, weights, gradient sums and
optimizer states bytes of their formats times parameters. The rest is the measured peak of
``long_context.json`` without them, where there is one: the loss, a layer that is computed again,
what ends of the model save.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
LAYERS, TOKENS, CASE, CASE_TOKENS = 32, 32768, "llama3_8b:4096x2", 8192
PARAMETERS, EMBEDDING = 8030261248, 128256 * 4096
COLORS = {
    "weights": "#13254f",
    "gradient sums": "#2f54c8",
    "optimizer states": "#5b8ff9",
    "saved activations of layers": "#d43d51",
    "rest of the measured peak": "#c5ccd6",
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to train, with bytes per parameter.

    Attributes:
        name: shown.
        layer: variant of ``activations_table.json``.
        run: variant of ``long_context.json``, None if it does not fit.
        sums: of gradients.
        states: of both moments.
        embedding_states: the same for the embedding.
    """

    name: str
    layer: str
    run: str | None
    sums: float
    states: float
    embedding_states: float


VARIANTS = (
    Variant(
        name="bf16 and torch's AdamW,\ncompiled",
        layer="bf16, compiled",
        run=None,
        sums=2.0,
        states=4.0,
        embedding_states=4.0,
    ),
    Variant(
        name="8-bit AdamW (bitsandbytes),\nfull checkpointing, compiled",
        layer="bf16, compiled, full checkpointing",
        run="bitsandbytes, compiled",
        sums=2.0,
        states=2 * (1 + 4 / 256),
        embedding_states=2 * (1 + 4 / 256),
    ),
    *(
        Variant(
            name=f"QuantizedPrecision,\nActivationQuantization({recipe})",
            layer=f"{recipe}, compiled",
            run=run,
            sums=1.13,
            states=2.05,
            embedding_states=8.0,
        )
        for recipe, run in (("agoq", "ours"), ("fp8-4bit", "ours fp8-4bit"))
    ),
)


def _rows(name: str) -> list[dict[str, Any]]:
    report = json.loads((RESULTS / name).read_text())
    rows: list[dict[str, Any]] = report["results"]["rows"]
    return rows


def parts_of(variant: Variant) -> tuple[dict[str, float], dict[str, Any] | None]:
    """Return GiB by category, and the measured run."""
    saved = {
        r["variant"]: r["saved_mb"] for r in _rows("activations_table.json") if r["case"] == CASE
    }
    runs = {row["variant"]: row for row in _rows("long_context.json") if row["seq"] == TOKENS}
    matrices = PARAMETERS - EMBEDDING
    nbytes = {
        "weights": 2.0 * PARAMETERS,
        "gradient sums": variant.sums * PARAMETERS,
        "optimizer states": variant.states * matrices + variant.embedding_states * EMBEDDING,
        "saved activations of layers": 1e6 * saved[variant.layer] * LAYERS * TOKENS / CASE_TOKENS,
    }
    parts = {name: value / 2**30 for name, value in nbytes.items()}
    run = None if variant.run is None else runs[variant.run]
    if run is not None:
        parts["rest of the measured peak"] = run["peak_gib"] - sum(parts.values())
    return parts, run


def draw(path: Path) -> None:
    """Draw a bar per variant.

    Args:
        path: Image to write; its ending chooses the format.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "memory", "font.size": 10})
    figure = Figure(figsize=(8.6, 3.8), layout="constrained")
    axes = figure.subplots()
    for row, variant in enumerate(VARIANTS):
        parts, run = parts_of(variant)
        left = 0.0
        for name, value in parts.items():
            label = name if row == len(VARIANTS) - 1 else None
            axes.barh(row, value, 0.6, left=left, color=COLORS[name], label=label)
            left += value
        text = f"{left:.0f} GiB: does not fit" if run is None else f"{left:.0f} GiB"
        text += "" if run is None else f", {run['tokens_per_s']:.0f} tokens/s"
        axes.text(left + 2, row, text, va="center")
    axes.axvline(139.8, color="#9aa5b1", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(VARIANTS)), [variant.name for variant in VARIANTS])
    axes.invert_yaxis()
    axes.set_xlim(0, 270)
    axes.set_xlabel("GiB on one H200 (dashed: what it has)")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Print and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path, nargs="?", help="image to write")
    args = parser.parse_args()
    for variant in VARIANTS:
        parts, _ = parts_of(variant)
        print(variant.name.replace("\n", " "))
        for name, value in parts.items():
            print(f"  {name}: {value:.1f} GiB")
    if args.picture:
        draw(args.picture)


if __name__ == "__main__":
    main()
