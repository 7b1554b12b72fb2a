"""Draw step times over network speeds, the picture of the README, from `benchmarks/results`.

python benchmarks/picture.py docs/images/step_time.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parent / "results"
NETWORKS = {
    "10gbit": "10 Gb/s",
    "25gbit": "25 Gb/s",
    "100gbit": "100 Gb/s",
    "nvlink": "one NVLink node",
}
VARIANTS = {"fsdp2": ("FSDP2", "#9aa5b1"), "quantized": ("quantized_fsdp", "#2f54c8")}
HEIGHT = 0.38


def read(label: str) -> dict[str, Any]:
    """Return the results on one network."""
    results: dict[str, Any] = json.loads((RESULTS / f"step_time_{label}.json").read_text())
    return results["results"]


def draw(path: Path) -> None:
    """Draw a pair of bars per network.

    Args:
        path: Image to write; its ending chooses the format.
    """
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "step_time", "font.size": 11})
    figure = Figure(figsize=(8, 3.3), layout="constrained")
    axes = figure.subplots()
    names = []
    for row, (label, name) in enumerate(NETWORKS.items()):
        results = read(label)
        link, times = results["setup"]["link_gbit_per_s"], results["variants"]
        names.append(name + (f"\n({link:.0f} reached)" if label == "100gbit" else ""))
        for offset, (variant, (_, color)) in zip((-0.2, 0.2), VARIANTS.items(), strict=True):
            ms, base = times[variant]["step_ms"], times["fsdp2"]["step_ms"]
            axes.barh(row + offset, ms, HEIGHT, color=color)
            faster = "" if variant == "fsdp2" else f"   {base / ms:.1f}x as fast"
            faster = "   the same" if faster and label == "nvlink" else faster
            axes.text(ms + 60, row + offset, f"{ms:.0f} ms{faster}", va="center")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 7800)
    axes.set_xticks([])
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    for text, color in VARIANTS.values():
        axes.barh(0, 0, color=color, label=text)
    axes.legend(loc="lower right", frameon=False)
    setup = read("10gbit")["setup"]
    nodes = setup["world_size"] // setup["node_size"]
    axes.set_title(
        f"One step of {setup['model']['parameters'] / 1e9:.1f}B parameters on {nodes} nodes "
        f"of {setup['node_size']} H200, by their network\n"
        "4 bits for everything between nodes: vocabulary_bits=None, INT4 in groups of 2048",
        fontsize=9,
        loc="left",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, dpi=150, facecolor="white", metadata=metadata)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="image to write")
    draw(parser.parse_args().path)
