"""Stages draw the same numbers where all of them compute, and layers draw as if nothing was cut."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from lq_testing.lightning_models import EXACT, Losses, loader, run_trainer, trainer
from lq_testing.models import VOCAB, batch
from lq_testing.random_programs import (
    DRAWS,
    PROGRAMS,
    DrawingModel,
    DrawingModule,
    DrawsOnFirstStage,
    NothingToLearn,
    seed_everything,
)
from lq_testing.stages import Ranks, cut
from torch import Tensor
from torch.utils.data import DataLoader

from lq_lightning import QuantizedPipelineStrategy
from lq_lightning.pipeline.random_numbers import RandomNumbers, held_generators
from lq_lightning.strategies.pipelines.run import BatchSeeds

BATCHES = [batch(step, 0, size=3) for step in range(2)]
CONTINUOUS = len(DRAWS) - 2


# --- in one process ---------------------------------------------------------------------------


def _losses_and_gradients(ranks: Ranks) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Two micro-batches are on their way when the first one runs backward."""
    passes = [ranks.forward(index) for index in range(2)]
    for outputs, received in passes:
        ranks.backward(outputs, received)
    return [outputs[-1].detach() for outputs, _ in passes], ranks.gradients()


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("inside", [False, True], ids=["", "checkpointed"])
def test_stages_compute_what_one_stage_does(name: str, inside: bool) -> None:
    torch.manual_seed(1)
    model = DrawingModel()
    for block in model.blocks:
        block.checkpointed = inside

    def step(module: Any, tokens: Tensor) -> Tensor:
        seed_everything(int(tokens.sum()))  # as every part of a micro-batch begins
        return PROGRAMS[name](module, tokens)

    def run(num_stages: int) -> Any:
        ranks = cut(model, step, BATCHES, num_stages)
        return _losses_and_gradients(ranks)

    alone = run(1)
    for num_stages in (2, 3):
        torch.testing.assert_close(run(num_stages), alone, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["dropout", "checkpointed calls"])
def test_layers_draw_different_numbers_and_the_same_again_for_backward(name: str) -> None:
    ranks = cut(DrawingModel(), PROGRAMS[name], BATCHES, 3)
    for module in ranks.modules:
        for block in module.blocks:
            if not hasattr(block, "absent_name"):
                block.drawn.clear()
    seed_everything(0)
    _losses_and_gradients(ranks)
    blocks = [b for m in ranks.modules for b in m.blocks if not hasattr(b, "absent_name")]
    drawn = Counter(number for block in blocks for numbers in block.drawn for number in numbers)
    assert set(drawn.values()) == {2 if name == "checkpointed calls" else 1}
    assert len(drawn) == 3 * 2 * 3


def test_generators_are_where_they_were_behind_a_batch() -> None:
    model = DrawingModule()
    numbers = RandomNumbers()
    numbers.hold(held_generators(model))

    def draw() -> list[float]:
        return [each(model) for each in DRAWS.values()]

    def once(change: bool) -> tuple[list[float], list[list[float]]]:
        seed_everything(3)
        _ = draw(), draw()  # numpy has no second normal number at hand, which it would forget
        inside = []
        if change:
            with numbers.batch(7):
                for index in (0, 1, 0):
                    numbers.start(index)
                    inside.append(draw())
                    for _ in range(index):
                        draw()
        return draw(), inside

    (unchanged, _), (after, inside) = once(False), once(True)
    assert inside[0] == inside[2]
    assert not set(inside[0][:CONTINUOUS]) & set(inside[1])
    own = [name.startswith("own") for name in DRAWS]
    same = [x == y for x, y in zip(after, unchanged, strict=True)]
    assert same == [not o for o in own]  # the module's go on, as without a pipeline
    twice = []
    for _ in range(2):
        with numbers.batch(7):
            twice.append(draw())
    same = [x == y for x, y in zip(*twice, strict=True)]
    assert same == [not o for o in own]


def test_seeds_of_batches_differ_and_are_those_of_a_resumed_run() -> None:
    class Trainer:
        sanity_checking = False

        def __init__(self, epoch: int, batch_idx: int) -> None:
            self.current_epoch, self.global_step = epoch, 10 * epoch + batch_idx
            self.fit_loop = self
            self.batch_idx = batch_idx

    found = []
    for replica in range(2):
        for run in range(2):
            seeds = BatchSeeds(replica)
            seeds.of_run = run
            for epoch in range(2):
                for batch_idx in range(3):
                    at: Any = Trainer(epoch, batch_idx)
                    found.append(seeds.next(at, "training_step", True))
                    for step in ("validation_step", "test_step"):
                        found += [seeds.next(at, step, False) for _ in range(2)]
    assert len(set(found)) == len(found)
    seeds = BatchSeeds(1)
    seeds.of_run = 1
    resumed: Any = Trainer(1, 0)
    assert seeds.next(resumed, "training_step", True) == found[-15]


@pytest.mark.gpu(1)
def test_numbers_of_a_gpu_without_waiting_for_it() -> None:
    device = torch.device("cuda", 0)
    numbers = RandomNumbers(device)

    def draw() -> Tensor:
        return torch.rand(5, device=device)

    torch.cuda.manual_seed(0)
    expected = draw()
    torch.cuda.manual_seed(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with numbers.batch(7):
            first = draw(), draw()
            numbers.start(1)
            second = draw()
            numbers.start(0)
            again = [draw()]
            with numbers.layer():
                inside = draw()
            again.append(draw())
            numbers.start(0)
            passed = [draw()]
            numbers.pass_layer()
            passed.append(draw())
        after = draw()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(after, expected)
    assert torch.equal(torch.stack(again), torch.stack(first))
    assert torch.equal(torch.stack(passed), torch.stack(first))
    assert len(torch.stack([*first, second, inside]).unique()) == 20


# --- several ranks ----------------------------------------------------------------------------


def _fit(root: str, schedule: str, epochs: int, path: Any = None) -> tuple[Any, DrawingModule]:
    """A resumed run is seeded otherwise; with four stages, batches are shuffled."""
    torch.manual_seed(0)
    module = DrawingModule()
    seed_everything(99 if path else 5)
    several = 2 if schedule == "interleaved_1f1b" else 1
    run = trainer(
        QuantizedPipelineStrategy(
            schedule=schedule, stages_per_rank=several, num_microbatches=2, **EXACT
        ),
        root,
        max_epochs=epochs,
        use_distributed_sampler=False,
    )
    tokens = torch.stack([batch(step, 0, size=1)[0] for step in range(8)])
    data = DataLoader(tokens, batch_size=4, shuffle=several == 2)  # type: ignore[arg-type]
    run.fit(module, data, loader(4, batch_size=4), ckpt_path=path)
    return run, module


def _everything(rank: int, world_size: int, root: str) -> Any:
    found: dict[str, Any] = {}
    for name, schedule in (("two", "1f1b"), ("four", "interleaved_1f1b")):
        _, module = _fit(root, schedule, 2)
        outside = [torch.rand(()).item(), np.random.rand(), random.random()]
        found[name] = (module.drawn, module.in_layers(), module.shuffled, outside)
    run, _ = _fit(root, "1f1b", 1)
    run.save_checkpoint(f"{root}/one.ckpt")
    _, module = _fit(root, "1f1b", 2, f"{root}/one.ckpt")
    found["resumed"] = (module.drawn, module.in_layers())
    with pytest.raises(RuntimeError, match="state of the generator `torch_generator` is .* draw"):
        trainer(QuantizedPipelineStrategy(**EXACT), root).fit(
            DrawingModule(own_seed=rank), loader(8, batch_size=8)
        )
    run = trainer(QuantizedPipelineStrategy(**EXACT), root)
    with pytest.raises(NotImplementedError, match="step` draws other random numbers in front"):
        run.fit(DrawsOnFirstStage(), loader(8, batch_size=8))
    assert run.global_step == 0
    torch.manual_seed(0)
    module, losses = NothingToLearn(), Losses()
    run = trainer(
        QuantizedPipelineStrategy(num_microbatches=2, **EXACT),
        root,
        callbacks=[losses],
        use_distributed_sampler=False,
    )
    data = torch.randint(VOCAB, (80 * 16, 8), generator=torch.Generator().manual_seed(1))
    run.fit(module, DataLoader(data, batch_size=16))  # type: ignore[arg-type]
    return found, losses.values


def test_ranks_draw_alike_and_nothing_is_learned_of_masks(tmp_path: Any) -> None:
    (first, losses), (second, _) = run_trainer(_everything, 2, str(tmp_path))
    assert sum(losses[-20:]) / 20 > 0.98 * math.log(VOCAB)
    for name in ("two", "four"):
        drawn, others = first[name][0], second[name][0]
        common = drawn.keys() & others.keys()
        fronts = {key for key in drawn if key[0] == "in front"}
        assert len(fronts) == 2 * 2 * 2 + 2 * 2  # of training and validation
        assert fronts <= common
        assert {key[0] for key in common} >= {"in front", "behind 0"}
        assert all(drawn[key] == others[key] for key in common)
        numbers = [number for key in others for number in others[key][:CONTINUOUS]]
        assert len(set(numbers)) == len(numbers)
        assert first[name][2:] == second[name][2:]  # batches, and what comes behind the run
    # Layers draw what they draw in any other stages, and the same again for backward.
    layers = [first[name][1] + second[name][1] for name in ("two", "four")]
    counts = Counter(layers[0])
    assert counts == Counter(layers[1])
    trained = [key for key, count in counts.items() if count == 2]
    assert len(trained) == 4 * 2 * 2 * 2
    assert len(counts) == len(trained) + 4 * 2 * 2 + 2  # of validation, and of two probes
    numbers = [number for _, drawn in counts for number in drawn]
    assert len(set(numbers)) == len(numbers)
    own = [name.startswith("own") for name in DRAWS]  # checkpoints do not hold them
    for found in (first, second):
        drawn, resumed = found["two"][0], found["resumed"][0]
        for key, numbers in resumed.items():
            same = [x == y for x, y in zip(numbers, drawn[key], strict=True)]
            assert all(s or o for s, o in zip(same, own, strict=True))
        assert len(resumed) == len(drawn) // 2
        assert not Counter(found["resumed"][1]) - Counter(found["two"][1])
