"""Cut a row of layers into stages of nearly equal cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["balance"]


def balance(
    costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """Return how many consecutive layers each stage gets.

    The largest cost of a stage is as small as it can be with one layer or more per stage; among
    such cuts, the sum of the squared costs is. Where that leaves a choice, earlier stages get fewer
    layers, since they keep the activations of more micro-batches.

    Args:
        costs: Of the layers, not negative.
        num_stages: At most as many as layers.
        first: What the first stage computes besides layers.
        last: What the last stage computes besides layers.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def cost_of(stage: int, begin: int, end: int) -> float:
        own = sums[end] - sums[begin]
        return own + first * (stage == 0) + last * (stage == num_stages - 1)

    limit = _search(len(costs), num_stages, cost_of, None)[0]
    return _search(len(costs), num_stages, cost_of, limit)[1]


def _search(
    num_layers: int, num_stages: int, cost_of: Callable[[int, int, int], float], limit: float | None
) -> tuple[float, tuple[int, ...]]:
    """The best cut: of the smallest maximum, or within a limit of the smallest sum of squares."""
    # best[end]: value and cut of the stages so far, which hold the first `end` layers
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        later = num_stages - 1 - stage
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in range(stage + 1, num_layers - later + 1):
            for begin, (value, cut) in best.items():
                if begin >= end:
                    continue
                cost = cost_of(stage, begin, end)
                if limit is not None and cost > limit:
                    continue
                total = max(value, cost) if limit is None else value + cost * cost
                if end in reached and total > reached[end][0]:
                    continue
                candidate = (total, (*cut, end - begin))
                if end not in reached or candidate < reached[end]:
                    reached[end] = candidate
        best = reached
    return best[num_layers]
