"""Pictures of a plan as SVG: memory by kind over a step, and what a pipeline's ranks do when."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby

_WIDTH, _LEFT, _RIGHT, _PLOT = 900, 64, 190, 300
_ROW, _GAP = 26, 4
_COLORS = {
    "weights": "#2f6fc8",
    "master weights": "#1c4587",
    "replica": "#6fa3e8",
    "optimizer states": "#7e57c2",
    "gradient sums": "#b08fd8",
    "gradients": "#d39b1f",
    "saved activations": "#d4543d",
    "logits and loss": "#e88fa0",
    "gather buffers": "#2e9e83",
    "pipeline buffers": "#7fc9a9",
    "temporary": "#8a94a3",
}
_ACTIONS = {"F": "#2f6fc8", "B": "#d4543d", "I": "#d4543d", "W": "#d39b1f"}
_OTHER = "#8a94a3"
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1f2328}.h{font-weight:600}.s{font-size:11px}"
    ".m{text-anchor:middle}.e{text-anchor:end}.w{fill:#fff}.bg{fill:#fff}.l{stroke:#8884}"
    ".p{stroke:#1f2328;stroke-dasharray:4 3}.i{fill:#8882}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.w{fill:#fff}.bg{fill:#0d1117}"
    ".p{stroke:#e6edf3}}"
)

MemoryTimeline = Sequence[tuple[str, Mapping[str, int]]]
PipelineTimeline = Sequence[tuple[int, str, float, float]]


def draw(memory: MemoryTimeline = (), pipeline: PipelineTimeline = (), title: str = "") -> str:
    """Return an SVG of one step, readable on light and dark backgrounds.

    Args:
        memory: Part of the step and bytes by kind, as in ``MemoryPeak.timeline``.
        pipeline: Row, label, start and end in seconds of each action, as in ``StepTime.timeline``;
            a label starts with F, B, I or W for forward, backward, and backward of inputs or
            weights alone.
        title: Of the picture.
    """
    parts: list[str] = []
    height = 16
    if title:
        parts.append(_text(_LEFT, height + 10, title, "h"))
        height += 26
    if memory:
        parts += _memory(memory, height)
        height += _PLOT + 66
    if pipeline:
        parts += _pipeline(pipeline, height)
        height += len({row for row, *_ in pipeline}) * _ROW + 66
    name = escape(title or "Memory and time of a step")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'width="{_WIDTH}" height="{height}"><title>{name}</title><style>{_STYLE}</style>'
        f'<rect class="bg" width="{_WIDTH}" height="{height}"/>{"".join(parts)}</svg>\n'
    )


def _memory(timeline: MemoryTimeline, top: int) -> Iterator[str]:
    """Draw stacked areas with a mark at the peak."""
    sums = [sum(kinds.values()) for _, kinds in timeline]
    peak = max(max(sums), 1)
    bottom, right = top + 22 + _PLOT, _WIDTH - _RIGHT
    width = (right - _LEFT) / len(timeline)

    def height_of(nbytes: float) -> float:
        return bottom - _PLOT * nbytes / (1.06 * peak)

    yield _text(_LEFT, top + 10, "Allocated memory over one step, GiB", "h")
    for tick in _ticks(peak / 2**30):
        y = height_of(tick * 2**30)
        yield _line(_LEFT, y, right, y, "l") + _text(_LEFT - 6, y + 4, f"{tick:g}", "e s")
    below = [0] * len(timeline)
    used = [kind for kind in _COLORS if any(kinds.get(kind) for _, kinds in timeline)]
    for place, kind in enumerate(used):
        above = [low + kinds.get(kind, 0) for low, (_, kinds) in zip(below, timeline, strict=True)]
        points = [*enumerate(above), *reversed([*enumerate(below)])]
        corners = " ".join(f"{_LEFT + (x + 0.5) * width:.1f},{height_of(y):.1f}" for x, y in points)
        yield f'<polygon points="{corners}" fill="{_COLORS[kind]}"><title>{kind}</title></polygon>'
        y = bottom - 8 - 19 * place
        yield f'<rect x="{right + 14}" y="{y - 10}" width="12" height="12" fill="{_COLORS[kind]}"/>'
        most = max(kinds.get(kind, 0) for _, kinds in timeline)
        yield _text(right + 32, y, f"{kind}, {most / 2**30:.3g}", "s")
        below = above
    x, y = _LEFT + (sums.index(peak) + 0.5) * width if peak in sums else _LEFT, height_of(peak)
    yield _line(x, y - 6, x, bottom, "p") + _line(_LEFT, y, right, y, "p")
    yield _text(right + 14, y + 4, f"peak {peak / 2**30:.2f} GiB", "h")
    start = 0.0
    for label, run in groupby(label for label, _ in timeline):
        length = width * len(list(run))
        yield _line(_LEFT + start, bottom, _LEFT + start, bottom + 5, "l")
        if length > 6.5 * len(label):
            yield _text(_LEFT + start + length / 2, bottom + 17, label, "m s")
        start += length
    yield _text(right, bottom + 34, "in the order of the operators", "e s")


def _pipeline(timeline: PipelineTimeline, top: int) -> Iterator[str]:
    """Draw a row per rank with a box per action; what stays grey is the bubble."""
    rows = sorted({row for row, *_ in timeline})
    first, last = min(entry[2] for entry in timeline), max(entry[3] for entry in timeline)
    span = max(last - first, 1e-12)
    top, right = top + 22, _WIDTH - _RIGHT
    scale = (right - _LEFT) / span
    busy = sum(end - start for _, _, start, end in timeline)
    share = 1 - busy / (span * len(rows))
    yield _text(_LEFT, top - 12, f"One step of the pipeline, ms; {share:.1%} idle", "h")
    for place, row in enumerate(rows):
        y = top + place * _ROW
        size = f'width="{right - _LEFT}" height="{_ROW - _GAP}"'
        yield f'<rect class="i" x="{_LEFT}" y="{y}" {size}/>'
        yield _text(_LEFT - 6, y + 15, f"rank {row}", "e s")
    for row, label, start, end in timeline:
        x, width = _LEFT + (start - first) * scale, (end - start) * scale
        y = top + rows.index(row) * _ROW
        color = _ACTIONS.get(label[:1], _OTHER)
        yield (
            f'<rect x="{x:.2f}" y="{y}" width="{max(width - 0.5, 0.3):.2f}" '
            f'height="{_ROW - _GAP}" fill="{color}"><title>{escape(label)}: '
            f"{1e3 * (end - start):.3g} ms</title></rect>"
        )
        if width > 7 * len(label) + 2:
            yield _text(x + width / 2, y + 15, label, "m s w")
    bottom = top + len(rows) * _ROW
    for tick in _ticks(1e3 * span):
        x = _LEFT + tick / 1e3 * scale
        yield _line(x, bottom, x, bottom + 5, "l") + _text(x, bottom + 18, f"{tick:g}", "m s")
    names = {"F": "forward", "B": "backward", "W": "backward of weights"}
    seen = {label[:1] for _, label, *_ in timeline}
    for place, letter in enumerate(letter for letter in names if letter in seen):
        y = top + 2 + 19 * place
        yield f'<rect x="{right + 14}" y="{y}" width="12" height="12" fill="{_ACTIONS[letter]}"/>'
        yield _text(right + 32, y + 10, f"{letter}: {names[letter]}", "s")


def _ticks(largest: float) -> list[float]:
    """Return up to eight round numbers from 0 to ``largest``."""
    rough = largest / 7
    unit = 10.0 ** math.floor(math.log10(rough))
    step = unit * next(factor for factor in (1, 2, 5, 10) if factor * unit >= rough)
    return [round(step * index, 12) for index in range(int(largest / step) + 1)]


def _text(x: float, y: float, words: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}">{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>'
