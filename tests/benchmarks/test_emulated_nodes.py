"""Emulated nodes that train alone have the weights of real ones."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from lq_testing import run_ranks
from torch import Tensor, nn

from lq_lightning.data_parallel import LocalSteps, OuterOptimizer, Topology
from lq_lightning.foundation.groups import RankGroups

Load = Callable[[str], ModuleType]

STEPS = 11
SHAPES = {"blocks.0.a": (40, 16), "blocks.0.b": (16,), "blocks.1.a": (33, 16), "head.a": (300, 4)}
UNITS = ("blocks.0", "blocks.1", "head")
CASES: dict[str, dict[str, Any]] = {
    "plain": {"every": 4},
    "fp32": {"every": 3, "bits": None, "fragments": 3, "delay": 1},
    "fragments": {"every": 4, "fragments": 2, "delay": 2, "error_feedback": True},
    "2 bits": {"every": 2, "bits": 2, "error_feedback": True},
}


def _start() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _move(name: str, step: int, node: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * node + len(name))
    return 0.01 * torch.randn(SHAPES[name], generator=generator)


def _real(rank: int, world: int) -> dict[str, tuple[float, dict[str, Tensor], dict[str, Tensor]]]:
    """Bytes sent, and weights before and after all nodes meet."""
    found = {}
    group = dist.group.WORLD
    assert group is not None
    for case, options in CASES.items():
        model = {name: nn.Parameter(weight) for name, weight in _start().items()}
        optimizer = torch.optim.SGD(model.values(), lr=1.0)
        outer = OuterOptimizer(
            LocalSteps(**options),
            Topology(world_size=world, rank=rank, node_size=1),
            RankGroups(group, group, group),
            names={parameter: name for name, parameter in model.items()},
            min_quantized_numel=64,
            device=torch.device("cpu"),
            units=UNITS,
        )
        for step in range(STEPS):
            outer.begin_step(optimizer)
            for name, parameter in model.items():
                parameter.data.add_(_move(name, step, rank))
            outer.steps += 1
            if outer.is_due:
                outer.exchange()
        alone = {name: parameter.detach().clone() for name, parameter in model.items()}
        outer.outer_step()
        found[case] = (outer.sent_nbytes, alone, {n: p.detach() for n, p in model.items()})
    return found


def test_weights_are_those_of_two_real_nodes(load: Load) -> None:
    nodes = load("emulated_nodes")
    real = run_ranks(_real, 2)
    units = {unit: [name for name in SHAPES if name.startswith(unit)] for unit in UNITS}
    for case, options in CASES.items():
        masters = {n: torch.stack((w, w, 2 * w, 2 * w)) for n, w in _start().items()}
        emulated = nodes.EmulatedNodes(LocalSteps(**options), 2, masters, units, 64)
        for step in range(STEPS):
            for name, master in masters.items():
                for row in range(4):
                    master[row] += _move(name, step, row % 2)
            emulated.after_step(masters)
        for rank in range(2):
            for name, value in real[rank][case][1].items():
                torch.testing.assert_close(masters[name][rank], value, rtol=1e-6, atol=1e-7)
        emulated.meet(masters)
        for name, value in real[0][case][2].items():
            torch.testing.assert_close(masters[name][0], value, rtol=1e-6, atol=1e-7)
            assert torch.equal(masters[name][0], masters[name][1])


def test_what_three_nodes_do_not_send_is_sent_later(load: Load) -> None:
    """After many messages of one move little is missing, if all that was lost is kept."""
    nodes = load("emulated_nodes")
    local = LocalSteps(every=1, bits=2, outer_lr=1.0, outer_momentum=0.0, error_feedback=True)
    start = torch.zeros(96, 128)
    masters = {"blocks.0.a": torch.stack([start] * 3)}
    emulated = nodes.EmulatedNodes(local, 3, masters, {"blocks.0": ["blocks.0.a"]})
    moves = [torch.randn(start.shape, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    for _ in range(60):
        for row, move in enumerate(moves):
            masters["blocks.0.a"][row] += move
        emulated.after_step(masters)
    mean = 60 * torch.stack(moves).mean(dim=0)
    missing = float((emulated.anchors["blocks.0.a"] - mean).norm() / mean.norm())
    assert missing < 0.35
    emulated.meet(masters)
    assert torch.equal(masters["blocks.0.a"][0], masters["blocks.0.a"][2])


def test_bits_count_scales(load: Load) -> None:
    bits = load("emulated_nodes").bits_per_step
    assert bits(LocalSteps(every=10, bits=None)) == 3.2
    assert 0.41 < bits(LocalSteps(every=10)) < 0.43
