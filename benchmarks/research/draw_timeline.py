"""Draw the timeline of a training step, one lane per CUDA stream, and print its times.

    python benchmarks/research/draw_timeline.py quantized_10gbit.json.gz --node-size 2 --pictures .

Reads the traces that `step_time.py --trace` and `lightning_step.py --trace` write.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import table, write_report
from timeline import (
    ACTIVITIES,
    ANYWHERE,
    BETWEEN,
    WITHIN,
    Span,
    Step,
    load,
    read_step,
    summarize,
    union,
)


def lanes(step: Step) -> dict[int, str]:
    """Name every stream by what runs on it, the compute stream first; each name differs."""
    seen: dict[int, Counter[str]] = defaultdict(Counter)
    for work in step.work:
        seen[work.stream].update([work.activity, work.carries])
    streams = [step.compute_stream, *sorted(set(seen) - {step.compute_stream})]
    names = {stream: _lane(seen[stream]) for stream in streams[1:]}
    names = {step.compute_stream: "compute"} | names
    for parts in (_scopes, _number):
        times = Counter(names.values())
        shared = [stream for stream, name in names.items() if times[name] > 1]
        for index, stream in enumerate(shared):
            names[stream] += parts(seen[stream], index)
    return names


def _lane(seen: Counter[str]) -> str:
    if seen["weights"] and seen["gradients"]:
        return "collectives"
    if seen["weights"]:
        return "weight exchange" if seen["quantize"] else "weight gather"
    if seen["gradients"]:
        return "gradient reduce"
    return "quantize" if seen["quantize"] else "copies"


def _scopes(seen: Counter[str], _: int) -> str:
    scopes = [scope for scope in (BETWEEN, WITHIN) if seen[scope]]
    return f"\n{' and '.join(scopes)}" if scopes else ""


def _number(_: Counter[str], index: int) -> str:
    return f" {index + 1}"


COLORS = {
    "forward": "#5b8ff9",
    "backward": "#2f54c8",
    "optimizer": "#13254f",
    BETWEEN: "#e8684a",
    WITHIN: "#f6bd16",
    ANYWHERE: "#e8684a",
    "quantize": "#7a4fc1",
    "copy": "#9aa5b1",
    "exposed": "#d43d51",
}


def draw(step: Step, path: Path, title: str, zoom: tuple[float, float] | None = None) -> None:
    """Draw the step as a timeline, one lane per stream.

    Args:
        step: What to draw.
        path: PNG to write.
        title: Shown above.
        zoom: Start and end, in milliseconds, of a second picture below.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    names = lanes(step)
    views = [(0.0, step.length / 1e3), *([zoom] if zoom else [])]
    height = 0.9 + (0.9 + 0.36 * (len(names) + 1)) * len(views)
    figure = Figure(figsize=(10, height), layout="constrained", dpi=100)
    FigureCanvasAgg(figure)
    for axes, (start, end) in zip(
        figure.subplots(len(views), 1, squeeze=False)[:, 0], views, strict=True
    ):
        _draw_lanes(axes, step, names, (end - start) / 1500)
        axes.set_xlim(start, end)
        axes.set_xlabel("ms")
    used = [a for a in ACTIVITIES if any(w.activity == a for w in step.work)] + ["exposed"]
    handles = [Patch(color=COLORS[name], label=name) for name in used]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        **{"fontsize": 9, "handlelength": 1.2, "handletextpad": 0.4, "columnspacing": 1.2},
    )
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_lanes(axes: Any, step: Step, names: dict[int, str], thinnest: float) -> None:
    """Draw bars; those closer than ``thinnest`` milliseconds are joined."""
    for row, stream in enumerate(names):
        for activity in ACTIVITIES:
            bars = _bars(step.spans(stream=stream, activity=activity), thinnest)
            axes.broken_barh(bars, (row - 0.4, 0.8), color=COLORS[activity], linewidth=0)
    idle, last = [], 0.0
    for span in [*step.compute, Span(step.length, step.length)]:
        idle.append(Span(last, span.start))
        last = span.end
    bars = _bars([s for s in idle if s.end - s.start > 50], thinnest)
    axes.broken_barh(bars, (len(names) - 0.4, 0.8), color=COLORS["exposed"], linewidth=0)
    axes.set_yticks(range(len(names) + 1), [*names.values(), "exposed"])
    axes.invert_yaxis()
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _bars(spans: list[Span], thinnest: float) -> list[tuple[float, float]]:
    widened = union(Span(s.start, max(s.end, s.start + 1e3 * thinnest)) for s in spans)
    return [(s.start / 1e3, (s.end - s.start) / 1e3) for s in widened]


def describe(name: str, times: dict[str, Any]) -> str:
    """Lay out the times of one trace."""
    rows = [
        ["step", f"{times['step_ms']:.1f}", ""],
        ["compute", f"{times['compute_ms']:.1f}", ""],
        ["exposed", f"{times['exposed_ms']:.1f}", ""],
        ["  communicating", f"{times['exposed_communicating_ms']:.1f}", ""],
        ["  nothing runs", f"{times['exposed_idle_ms']:.1f}", ""],
        ["network", f"{times['network_ms']:.1f}", f"{times['network_overlapped']:.0%}"],
    ]
    rows += [
        [f"  {kind}", f"{t['ms']:.1f}", f"{t['overlapped']:.0%}"]
        for kind, t in times["kinds"].items()
    ]
    return table(rows, [name, "ms", "overlapped"])


def _zoom(text: str) -> tuple[float, float]:
    start, _, end = text.partition(":")
    return float(start), float(end)


def main() -> None:
    """Read traces, print their times, write them and draw one picture each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, nargs="+", help="Chrome traces, .json or .json.gz")
    parser.add_argument("--node-size", type=int, help="ranks per node")
    parser.add_argument("--json", type=Path, help="write the times here")
    parser.add_argument("--pictures", type=Path, help="folder for one PNG per trace")
    parser.add_argument("--zoom", type=_zoom, help="START:END in ms, drawn below the whole step")
    args = parser.parse_args()
    results = {}
    for path in args.traces:
        trace = load(path)
        step = read_step(trace, args.node_size)
        name = path.name.removesuffix(".gz").removesuffix(".json")
        times = summarize(step)
        gpu = (trace.get("deviceProperties") or [{}])[0].get("name")
        ranks = trace.get("distributedInfo", {}).get("world_size")
        commit = trace.get("commit", "unknown")
        results[name] = {"gpu": gpu, "world_size": ranks, "commit": commit} | times
        print(describe(name, times))
        if args.pictures:
            picture = args.pictures / f"{name}.png"
            title = f"{name.replace('_', ', ')}: one step of rank 0, {times['step_ms']:.0f} ms"
            draw(step, picture, title, args.zoom)
            print(f"wrote {picture}, {picture.stat().st_size / 1e3:.0f} kB")
    if args.json:
        write_report(args.json, "trace", {"node_size": args.node_size, "traces": results})


if __name__ == "__main__":
    main()
