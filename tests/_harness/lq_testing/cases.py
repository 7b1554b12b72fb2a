"""Tables of functions to run on several ranks: one parametrized test for each file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lq_testing.ranks import run_ranks


def on_ranks(fn: Callable[..., Any], world: int, *args: Any, **options: Any) -> list[Any]:
    """Run ``fn(rank, world, *args)`` on ranks of a CPU, with options of ``run_ranks``."""
    return [pytest.param(fn, world, args, options, id=fn.__name__.strip("_"))]


def on_gpus(fn: Callable[..., Any], world: int, *args: Any, **options: Any) -> list[Any]:
    """Run ``fn(rank, world, *args)`` on as many GPUs."""
    options, marks = {"backend": "nccl", "timeout": 200, **options}, pytest.mark.gpu(world)
    name = f"{fn.__name__.strip('_')}-gpu"
    return [pytest.param(fn, world, args, options, marks=marks, id=name)]


def on_both(fn: Callable[..., Any], world: int, *args: Any, **options: Any) -> list[Any]:
    """Run it on ranks of a CPU, and where there are GPUs on those, too."""
    return [*on_ranks(fn, world, *args, **options), *on_gpus(fn, world, *args)]


def rank_tests(*cases: list[Any]) -> Callable[..., None]:
    """Return a test of all cases, to be assigned to a name that pytest collects."""
    flat = [case for some in cases for case in some]

    @pytest.mark.parametrize(("fn", "world", "args", "options"), flat)
    def test(fn: Callable[..., Any], world: int, args: Any, options: Any) -> None:
        run_ranks(fn, world, *args, **options)

    return test
