"""What a compiler makes one kernel of: runs of pointwise operators, and the bytes they move."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .costs import BROADCAST, COMPILED, NORM, SPECIAL, is_view, short_name
from .trace import Allocate, Collective, Event, Free, Operator


def fused(events: Sequence[Event]) -> dict[int, Operator | None]:
    """Return the operators that a compiler would run together, by index among the events.

    Consecutive pointwise operators and norms of one stream and phase are one, at the first index;
    None stands at the others. What they make and free again is never written, and what one of them
    has made is not read from memory.
    """
    merged: dict[int, Operator | None] = {}
    run: list[int] = []
    own: dict[int, int] = {}
    freed = 0

    def close() -> None:
        nonlocal freed
        parts = [event for i in run if isinstance(event := events[i], Operator)]
        if len(parts) > 1:
            moved = [_moved(part, parts) for part in parts]
            written = [each[1] for each in moved]
            read = sum(each[0] for each in moved) - sum(written[:-1])
            merged.update(dict.fromkeys(run))
            merged[run[0]] = Operator(
                name=COMPILED,
                stream=parts[0].stream,
                phase=parts[0].phase,
                source=parts[0].source,
                flops=0,
                read_nbytes=max(read, *(each[0] for each in moved)),
                written_nbytes=max(written[-1], sum(written) - freed),
                dtype=parts[0].dtype,
                shapes=parts[0].shapes,
                action=parts[0].action,
            )
        run.clear()
        own.clear()
        freed = 0

    for index, event in enumerate(events):
        if isinstance(event, Allocate) and run:
            own[id(event.storage)] = event.storage.nbytes
        elif isinstance(event, Free) and run:
            freed += own.pop(id(event.storage), 0)
        elif isinstance(event, Operator) and not is_view(event):
            first = events[run[0]] if run else event
            if not (
                is_fusible(event)
                and isinstance(first, Operator)
                and (first.stream, first.phase) == (event.stream, event.phase)
            ):
                close()
            if is_fusible(event):
                run.append(index)
        elif isinstance(event, Collective):
            close()
    close()
    return merged


def _moved(operator: Operator, run: Sequence[Operator]) -> tuple[int, int]:
    """Return the bytes that an operator reads and writes in a run.

    Where the run casts to float32 and back, values in between stay in registers, also those that
    backward needs: it computes them again.
    """
    if any(short_name(part) == "_to_copy" for part in run):
        if short_name(operator) == "_to_copy":
            wide = operator.read_nbytes > operator.written_nbytes
            return (0, operator.written_nbytes) if wide else (operator.read_nbytes, 0)
        if operator.dtype == torch.float32:
            return 0, 0
    return operator.read_nbytes, operator.written_nbytes


def is_fusible(operator: Operator) -> bool:
    """Tell whether a compiler would run an operator together with its neighbours."""
    name = short_name(operator)
    return (
        not operator.flops
        and operator.phase in ("forward", "backward")
        and operator.name.startswith("aten.")
        and SPECIAL.get(name) in (None, NORM, BROADCAST)
        and not name.startswith("_foreach")
    )
