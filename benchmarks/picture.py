"""Draw the pictures of README and docs from `benchmarks/results`.

    python benchmarks/picture.py docs/images/step_time.svg
    python benchmarks/picture.py docs/images/activation_memory.svg
    python benchmarks/picture.py docs/images/offload_timeline.svg

The name chooses the picture. ``step_time``: step times over network speeds. ``activation_memory``:
memory of an 8B model on 32k tokens, at the end of the second micro-batch's forward pass, when most
is held. Saved activations are a layer's in ``activations_int8.json`` times layers and tokens;
weights, gradient sums and optimizer states are bytes of their formats times parameters. The rest
up to the measured peak of ``long_context*.json`` is the loss, a layer that is computed again and
tensors of the ends of the model. ``offload_timeline``: kernels and copies of a micro-batch there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parent / "results"


def read(name: str) -> Any:
    """Return the results of a report."""
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]


# --- step times -----------------------------------------------------------------------------------

NETWORKS = {
    "10gbit": "10 Gb/s",
    "25gbit": "25 Gb/s",
    "unlimited": "no limit",
    "nvlink": "one NVLink node",
}
VARIANTS = {"fsdp2": ("FSDP2", "#9aa5b1"), "quantized": ("quantized_fsdp", "#2f54c8")}


def draw_step_time(figure: Figure, axes: Axes) -> None:
    """Draw a pair of bars per network."""
    names = []
    for row, (label, name) in enumerate(NETWORKS.items()):
        results = read(f"step_time_{label}")
        link, times = results["setup"]["link_gbit_per_s"], results["variants"]
        names.append(name + (f"\n({link:.0f} reached)" if label == "unlimited" else ""))
        for offset, (variant, (_, color)) in zip((-0.2, 0.2), VARIANTS.items(), strict=True):
            ms, base = times[variant]["step_ms"], times["fsdp2"]["step_ms"]
            axes.barh(row + offset, ms, 0.38, color=color)
            faster = "" if variant == "fsdp2" else f"   {base / ms:.1f}x as fast"
            faster = "   the same" if faster and label == "nvlink" else faster
            axes.text(ms + 60, row + offset, f"{ms:.0f} ms{faster}", va="center")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, 7800)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    for text, color in VARIANTS.values():
        axes.barh(0, 0, color=color, label=text)
    axes.legend(loc="lower right", frameon=False)
    setup = read("step_time_10gbit")["setup"]
    nodes = setup["world_size"] // setup["node_size"]
    axes.set_title(
        f"One step of {setup['model']['parameters'] / 1e9:.1f}B parameters on {nodes} nodes "
        f"of {setup['node_size']} H200s, by network",
        fontsize=9,
        loc="left",
    )


# --- memory ---------------------------------------------------------------------------------------

LAYERS, TOKENS, CASE_TOKENS = 32, 32768, 8192
PARAMETERS, EMBEDDING = 8030261248, 128256 * 4096
COLORS = {
    "weights": "#13254f",
    "gradient sums": "#2f54c8",
    "optimizer states": "#5b8ff9",
    "saved activations of layers": "#d43d51",
    "rest of the measured peak": "#c5ccd6",
}
EIGHT_BIT = 2 * (1 + 4 / 256)
_OURS = (1.13, 2.05, 8.0)
# Variant of activations_int8.json (None: a layer keeps its input) and layers that keep it on the
# GPU; report and variant (None: does not fit); bytes per parameter of gradient sums, of both
# moments, and of both moments of the embedding.
WAYS: dict[str, tuple[str | None, int, tuple[str, str] | None, tuple[float, float, float]]] = {
    "bf16 and torch's AdamW,\ncompiled": ("bf16, compiled", LAYERS, None, (2.0, 4.0, 4.0)),
    "8-bit AdamW (bitsandbytes),\nfull checkpointing, compiled": (
        *(None, LAYERS, ("long_context_h100", "bitsandbytes")),
        (2.0, EIGHT_BIT, EIGHT_BIT),
    ),
    "QuantizedPrecision,\nActivationQuantization(agoq)": (
        *("agoq, compiled", LAYERS, ("long_context", "ours"), _OURS),
    ),
    "the same, offload=1.0": ("agoq, compiled", 2, ("long_context_h100", "offload"), _OURS),
}


def memory_of(way: str) -> tuple[dict[str, float], dict[str, Any] | None]:
    """Return GiB by category, and the measured run."""
    layer, resident, measured, (sums, states, of_embedding) = WAYS[way]
    rows = read("activations_int8")["rows"]
    saved = {None: CASE_TOKENS * 4096 * 2 / 1e6} | {r["variant"]: r["saved_mb"] for r in rows}
    nbytes = {
        "weights": 2.0 * PARAMETERS,
        "gradient sums": sums * PARAMETERS,
        "optimizer states": states * (PARAMETERS - EMBEDDING) + of_embedding * EMBEDDING,
        "saved activations of layers": 1e6 * saved[layer] * resident * TOKENS / CASE_TOKENS,
    }
    parts = {category: value / 2**30 for category, value in nbytes.items()}
    if measured is None:
        return parts, None
    report, name = measured
    (run,) = (r for r in read(report)["rows"] if (r["variant"], r["seq"]) == (name, TOKENS))
    return parts | {"rest of the measured peak": run["peak_gib"] - sum(parts.values())}, run


def draw_activation_memory(figure: Figure, axes: Axes) -> None:
    """Draw a bar per way to train."""
    for row, way in enumerate(WAYS):
        parts, run = memory_of(way)
        left = 0.0
        for name, value in parts.items():
            label = name if row == len(WAYS) - 1 else None
            axes.barh(row, value, 0.6, left=left, color=COLORS[name], label=label)
            left += value
        text = f"{left:.0f} GiB: does not fit" if run is None else f"{left:.0f} GiB"
        text += "" if run is None else f", {run['tokens_per_s']:.0f} tokens/s"
        axes.text(left + 2, row, text, va="center")
    for name, gib in {"H100": 79.2, "H200": 139.8}.items():
        axes.axvline(gib, color="#9aa5b1", linestyle="--", linewidth=1)
        axes.text(gib + 1, -0.52, name, color="#9aa5b1", fontsize=8)
    axes.set_yticks(range(len(WAYS)), list(WAYS))
    axes.set_xlim(0, 270)
    axes.set_xlabel("GiB on one GPU")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)


# --- transfers ------------------------------------------------------------------------------------

LANES = {"kernels": "#2f54c8", "to the host": "#d43d51", "from the host": "#2e9e83"}


def draw_offload_timeline(figure: Figure, axes: Axes) -> None:
    """Draw when the GPU computes and when it copies, in one micro-batch."""
    rows = read("offload_timeline")["rows"]
    for row, (name, color) in enumerate(LANES.items()):
        own = [(r["start_ms"] / 1e3, r["stop_ms"] / 1e3) for r in rows if r["lane"] == name]
        spans = [(start, stop - start) for start, stop in own]
        axes.broken_barh(spans, (row - 0.35, 0.7), color=color)
    axes.set_yticks(range(len(LANES)), list(LANES))
    axes.set_xlabel("seconds")
    axes.set_xlim(0, max(r["stop_ms"] for r in rows) / 1e3)


PICTURES = {
    "step_time": (draw_step_time, (8, 3.3), 11),
    "activation_memory": (draw_activation_memory, (8.6, 3.8), 10),
    "offload_timeline": (draw_offload_timeline, (8.6, 1.9), 10),
}


def draw(path: Path) -> None:
    """Draw the picture that a file's name chooses; its ending chooses the format."""
    make, size, font = PICTURES[path.stem]
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": path.stem, "font.size": font})
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    make(figure, axes)
    axes.invert_yaxis()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, dpi=150, facecolor="white", metadata=metadata)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="image to write")
    draw(parser.parse_args().path)
