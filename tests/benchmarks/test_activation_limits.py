"""The search for the largest size of a model ends at the largest one that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest

pytest.importorskip("transformers")

LIMIT = 1000


@pytest.fixture
def bench(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("activation_limits")


@pytest.mark.parametrize(
    ("saved", "gradients", "transient"), [(9, 300, 2), (70, 0, 0), (30, 600, 11), (400, 0, 150)]
)
@pytest.mark.parametrize("most", [256, 20])
def test_search_ends_at_the_largest_size_that_fits(
    bench: ModuleType, saved: int, gradients: int, transient: int, most: int
) -> None:
    tried: list[int] = []

    def peak(size: int) -> int:
        return 100 + max(gradients, size * (saved + transient))

    def measure(size: int) -> object:
        tried.append(size)
        held = 100 + saved * size
        zeros = {"states": 0, "step_s": 1.0, "loss": 0.0}
        fits = peak(size) <= LIMIT
        point = {"size": size, "peak": peak(size), "held": held, "saved": saved * size}
        return bench.Point(**point, **zeros) if fits else None

    found = list(bench.grow(measure, replace(bench.TASKS["coat7"], most=most), LIMIT))
    largest = max(size for size in range(1, most + 1) if peak(size) <= LIMIT)
    assert found[-1].size == largest
    assert len(set(tried)) == len(tried) <= 12


def test_sizes_that_are_given_are_not_searched(bench: ModuleType) -> None:
    task = bench.TASKS["agoq3"]
    point = bench.Point(24576, 10, 8, 8, 0, 1.0, 0.0)
    found = list(bench.grow(lambda size: point if size == 24576 else None, task, LIMIT))
    assert found == [point]
    assert not list(bench.grow(lambda size: None, task, LIMIT))
