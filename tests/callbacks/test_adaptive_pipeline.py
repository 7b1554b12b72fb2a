"""Gates of pipeline boundaries: gradients, widths on both ends, what is saved and loaded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lq_testing import run_ranks
from lq_testing.pipeline_toys import (
    Boundary,
    make_boundaries,
    make_data,
    make_gated,
    make_layers,
    make_stages,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lq_lightning.adaptive import AdaptiveBitsConfig, BitGate, GateOptimizer, adaptive_quantize
from lq_lightning.callbacks.gate_placement import PipelineGates
from lq_lightning.pipeline.boundary import make_boundary_codec
from lq_lightning.pipeline.boundary_widths import MixedCodec

CONFIG = AdaptiveBitsConfig(learning_rate=0.5, start_bits=6.0)  # so that widths change at once
COUNT = 4
CASES = [("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 2), ("zbv", 2)]


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return output


def _layers(num_stages: int) -> nn.ModuleList:
    """Two of each stage; the first stage is frozen, the last layer of each is checkpointed."""
    layers = make_layers(2 * num_stages)
    layers[:2].requires_grad_(False)
    for index in range(1, len(layers), 2):
        layers[index] = Checkpointed(layers[index])
    return layers


def _train(rank: int, size: int) -> Any:
    found = []
    group = dist.new_group(list(range(size)))
    alone = [dist.new_group([each]) for each in range(size)]
    for schedule, per_rank in CASES:
        codec, num_stages = MixedCodec(), size * per_rank
        engine, boundaries = make_gated(
            *(schedule, COUNT, _layers(num_stages), num_stages),
            *((codec, make_boundary_codec("none", backward=True)), group, alone[rank]),
        )
        gates = PipelineGates(CONFIG, boundaries)
        placement = gates.placement
        losses, gradients = [], []
        for _ in range(3):
            losses.append([loss.item() for loss in engine.step(Boundary())])
            gradients.append({n: gate.grad for n, gate in gates.optimizer.gates.items()})
            gates.optimizer.step()
            placement.after_step()
        widths = {index: table.widths for index, table in codec.tables.items()}
        engine.close()
        gates.optimizer.skipped_lines = 1 + rank
        state = placement.joined(gates.optimizer.state_dict())
        again = PipelineGates(CONFIG, boundaries, state)
        assert again.optimizer.skipped_lines == (0 if rank else 3)  # counted once
        assert again.optimizer.mean == gates.optimizer.mean
        for index, table in widths.items():
            assert torch.equal(codec.tables[index].widths, table)
        found.append((losses, gradients, widths, state))
    return found


def _whole(schedule: str, size: int, per_rank: int) -> Any:
    """The same in one process: gates at the boundaries between ranks, values quantized there."""
    num_stages = size * per_rank
    stages = make_stages(_layers(num_stages), num_stages, make_data(COUNT))
    boundaries = {each.index: each.name for each in make_boundaries(schedule, size, num_stages)}
    gates = {name: BitGate(CONFIG, name=name) for name in boundaries.values()}
    optimizer = GateOptimizer(gates, CONFIG)
    losses, gradients = [], []
    for _ in range(3):
        losses.append([])
        for microbatch in range(COUNT):
            hidden: Any = None
            for index, stage in enumerate(stages):
                stage.index = microbatch
                hidden = stage() if stage.first else stage(hidden)
                if index in boundaries:
                    hidden = adaptive_quantize(hidden, gates[boundaries[index]])
            hidden.backward()
            losses[-1].append(hidden.item())
        gradients.append({name: gate.grad for name, gate in gates.items()})
        optimizer.step()
    return losses, gradients, {index: gates[name].widths for index, name in boundaries.items()}


def test_trains_as_one_process_that_quantizes() -> None:
    size = 2
    ranks = run_ranks(_train, size)
    for case, (schedule, per_rank) in enumerate(CASES):
        losses, gradients, widths = _whole(schedule, size, per_rank)
        found = [rank[case] for rank in ranks]
        assert [each for each, *_ in found if each[0]] == [losses]
        for step in range(3):
            joined = {**found[0][1][step], **found[1][1][step]}
            assert joined.keys() == gradients[step].keys()
            for name, gradient in gradients[step].items():
                torch.testing.assert_close(joined[name], gradient, rtol=1e-5, atol=1e-9)
        shared = {index for _, _, tables, _ in found for index in tables}
        assert shared == widths.keys()
        for _, _, tables, state in found:
            for index, table in tables.items():
                assert torch.equal(table, widths[index])  # on both ends
            names = [f"layer {index}" for index in sorted(widths)]
            assert list(state["gates"]) == names
        assert any(table.unique().numel() > 1 for table in widths.values())
