"""What the host does per unit is the same for any number of nodes (`benchmarks/many_nodes.py`)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from lq_lightning.data_parallel import GradientQuantization, WeightQuantization

Load = Callable[[str], ModuleType]
EXCHANGE = {"exchange": 2, "gather": 1}  # one that is in no pass reads all shards


@pytest.mark.parametrize(
    ("gpus", "rounding", "kernels"),
    [
        (8, "nearest", {**EXCHANGE, "reduction": 4, "DDP's bucket": 4}),
        (1, "stochastic", {**EXCHANGE, "reduction": 2, "DDP's bucket": 3}),
    ],
)
def test_counts_are_those_of_two_nodes(
    load: Load, gpus: int, rounding: str, kernels: dict[str, int]
) -> None:
    many_nodes = load("many_nodes")
    gradients = GradientQuantization(rounding=rounding)  # type: ignore[arg-type]
    variant = many_nodes.Variant("quantized", WeightQuantization(replica="full"), gradients)
    found = []
    for nodes, rank in ((2, 0), (32, 16 * gpus), (32, 32 * gpus - 1)):
        # at this width no rank has a multiple of 16 bytes in full precision, which saves operators
        rows = many_nodes.measure(256, nodes, gpus, rank, variant, repeats=0)
        found.append({row.part: row.counts for row in rows})
        for counts in found[-1].values():
            counts.new_bytes = 0
    two, *many = found
    assert many == [two, two]
    assert {part: two[part].kernels for part in kernels} == kernels
    of_units = many_nodes.UNITS * kernels["reduction"]
    all_at_once = kernels["exchange"] + 2  # which read the shards before forward and after the step
    assert two["step"].kernels == all_at_once + of_units, "all units in one exchange"
