"""A plan as text: lines of up to 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from lq_lightning.planning.memory import KINDS
from lq_lightning.planning.plan import Plan
from lq_lightning.planning.prices import WHAT_STUDIES_CANNOT_SEE

_GIB, _GIGA = 2**30, 1e9
_WIDTH = 100


def lines_of(plan: Plan) -> Iterator[str]:
    """Lines of a plan for people."""
    machine, layout = plan.machine, plan.layout
    where = f"{plan.world_size} x {machine.gpu.name}" if plan.world_size > 1 else machine.gpu.name
    if machine.nodes > 1:
        where += f" on {machine.nodes} nodes, {_rate(machine.between_nodes.bytes_per_s)} each"
    yield f"{plan.name} on {where}"
    sizes = {
        "data parallel": layout.data_parallel,
        "tensor parallel": layout.tensor_parallel,
        "pipeline": layout.pipeline,
    }
    shared = " x ".join(f"{size} {name}" for name, size in sizes.items() if size > 1)
    batches = f"{plan.microbatches} micro-batches" if plan.microbatches > 1 else "one micro-batch"
    yield f"  {shared or 'one rank'}; {batches} and {plan.tokens_per_step:,} tokens per step"
    for text in (f"batch of a rank: {plan.batch}", machine.source):
        yield from _wrapped(f"  {text}", "    ")
    yield ""
    yield from _memory_lines(plan)
    yield ""
    yield from _step_lines(plan)
    yield ""
    yield from _choice_lines(plan)
    for note in plan.notes:
        yield from _wrapped(f"Note: {note}")


def _choice_lines(plan: Plan) -> Iterator[str]:
    yield from _wrapped(f"Loss against full precision: {plan.price}.")
    choices = plan.alternatives or plan.remedies
    if not choices:
        return
    yield ""
    title = "What fits, the fastest first" if plan.alternatives else "By what it fits, the cheapest"
    yield f"{title:<34}{'GiB':>10}{'ms':>10}{'tokens/s':>12}  loss"
    for choice in choices:
        name, *more = textwrap.wrap(", ".join(choice.changes) or "as it is", 32)
        numbers = f"{_gib(choice.device_nbytes):>10}{_ms(choice.seconds):>10}"
        loss, *rest = textwrap.wrap(str(choice.price), 30)
        yield f"  {name:<32}{numbers}{choice.tokens_per_s:>12,.0f}  {loss}"
        for left, right in zip_longest(more, rest, fillvalue=""):
            yield f"  {left:<32}{'':34}{right}".rstrip()
    yield from _wrapped(WHAT_STUDIES_CANNOT_SEE)


def _memory_lines(plan: Plan) -> Iterator[str]:
    peaks = plan.memory
    several = len(peaks) > 1
    heads = [f"stage {peak.stage}" if several else "GiB" for peak in peaks]
    title = "Memory of a GPU at its peak" + (", GiB" if several else "")
    yield _row(title, heads)
    for kind in KINDS:
        if any(peak.kinds.get(kind) for peak in peaks):
            yield _row(f"  {kind}", [_gib(peak.kinds.get(kind, 0)) for peak in peaks])
    yield _row("  together", [_gib(peak.device_nbytes) for peak in peaks])
    yield _row("  at least", [_gib(peak.low_nbytes) for peak in peaks])
    yield _row("  at most", [_gib(peak.high_nbytes) for peak in peaks])
    total = plan.machine.gpu.memory_nbytes
    verdict = "It fits" if plan.surely_fits else "It may just fit" if plan.fits else "DOES NOT FIT"
    yield f"  {verdict} in the {_gib(total)} GiB of an {plan.machine.gpu.name}."
    for peak in peaks:
        stage = f" of stage {peak.stage}" if several else ""
        yield from _wrapped(f"  Peak{stage}: {peak.when}.", "    ")


def _step_lines(plan: Plan) -> Iterator[str]:
    step = plan.step
    yield _row("A step", ["ms"])
    for name, seconds in step.parts.items():
        if seconds:
            yield _row(f"  {name}", [_ms(seconds)])
    yield _row("  together", [_ms(step.seconds)])
    yield _row("  at least", [_ms(step.low_s)])
    yield _row("  at most", [_ms(step.high_s)])
    yield f"  {plan.tokens_per_s:,.0f} tokens/s, {plan.tokens_per_s / plan.world_size:,.0f} per GPU"
    if plan.world_size > 1:
        within, between = step.sent_within_nbytes, step.sent_between_nbytes
        yield f"  {within / 1e6:,.1f} MB are sent within each node per step."
        if plan.machine.nodes > 1:
            yield f"  {between / 1e6:,.1f} MB are sent by each node to others per step."
    if plan.run_s is not None and plan.gpu_hours is not None and plan.tokens is not None:
        hours = f"{plan.gpu_hours:,.1f} GPU-hours"
        yield f"  {plan.tokens:,} tokens take {_duration(plan.run_s)}, {hours}."


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent)


def _row(name: str, cells: Sequence[str]) -> str:
    return (f"{name:<34}" + "".join(f"{cell:>10}" for cell in cells)).rstrip()


def _gib(nbytes: float) -> str:
    gib = nbytes / _GIB
    return f"{gib:,.{2 if gib >= 0.1 or not gib else 3}f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def _rate(bytes_per_s: float) -> str:
    return f"{8 * bytes_per_s / _GIGA:,.3g} Gb/s"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} seconds"
