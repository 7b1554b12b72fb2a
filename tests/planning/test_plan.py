"""Plans of small runs: their numbers, their JSON and their text."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lq_lightning
from lq_lightning import (
    ActivationQuantization,
    AdaptiveBits,
    QuantizedFSDPStrategy,
    QuantizedPipelineStrategy,
    QuantizedPrecision,
    StageBitCompensation,
)
from lq_lightning.planning import plan as planning
from lq_lightning.planning.config import python_program
from lq_lightning.planning.machine import make_machine
from lq_lightning.planning.memory import KINDS
from lq_lightning.planning.plan import Choice, Layout, Plan, Simulations, equal_between_ends
from lq_lightning.planning.prices import price
from lq_lightning.planning.trace import Operator
from lq_lightning.strategies.quantized_pipeline import PipelineLayout


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(LightningModule):
    def __init__(self, layers: int = 2, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 32)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embedding(batch)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@pytest.fixture(scope="module")
def small() -> Plan:
    trainer = {
        "strategy": QuantizedFSDPStrategy(units=["Block"], min_quantized_numel=64),
        "plugins": [QuantizedPrecision("bf16-mixed", gradient_buffer="int8")],
        "accumulate_grad_batches": 2,
        "max_steps": 10,
        "devices": 2,
        "num_nodes": 2,
    }
    return lq_lightning.plan(
        Net(), trainer=trainer, batch="int64[4,8]", network="1gbit", alternatives=False
    )


def test_numbers_belong_to_all_ranks(small: Plan) -> None:
    assert small.world_size == small.layout.data_parallel == 4
    assert (small.machine.nodes, small.machine.gpus_per_node) == (2, 2)
    assert small.microbatches == 2
    assert small.tokens_per_step == 4 * 8 * 2 * 4
    assert small.tokens == 10 * small.tokens_per_step
    assert small.run_s == pytest.approx(10 * small.step.seconds)
    assert small.gpu_hours == pytest.approx(4 * 10 * small.step.seconds / 3600)
    assert small.tokens_per_s == pytest.approx(small.tokens_per_step / small.step.seconds)
    (peak,) = small.memory
    assert sum(peak.kinds.values()) == peak.device_nbytes
    assert peak.kinds["optimizer states"] > 0
    assert set(peak.kinds) <= set(KINDS)
    assert sum(small.step.parts.values()) == pytest.approx(small.step.seconds, rel=1e-3)
    assert small.step.sent_between_nbytes > 0
    assert small.fits
    assert small.price.percent is not None


def test_json_keeps_everything(small: Plan) -> None:
    choice = Choice(
        changes=("a=1",),
        device_nbytes=3,
        seconds=0.5,
        tokens_per_s=6.0,
        price=price(("states dynamic8", "learned bits")),
    )
    plan = replace(small, alternatives=(choice,), notes=("x",))
    assert Plan.from_json(plan.to_json()) == plan


def test_the_text_names_what_does_not_fit(small: Plan) -> None:
    assert "It fits in the" in str(small)
    little = replace(small.machine, gpu=replace(small.machine.gpu, memory_nbytes=2**20))
    changes = ("gradient_checkpointing_enable()", 'QuantizedPrecision(optimizer_state="dynamic8")')
    choice = Choice(
        changes=changes,
        device_nbytes=2**30,
        seconds=0.25,
        tokens_per_s=1e6,
        price=price(("states dynamic8",)),
    )
    shown = str(replace(small, machine=little, remedies=(choice,), notes=("y " * 80,)))
    assert "DOES NOT FIT" in shown
    row = next(line for line in shown.splitlines() if "gradient_checkpointing" in line)
    assert row.split()[1:] == ["1.00", "250.0", "1,000,000", "+0.08", "±", "0.16%"]
    assert max(map(len, shown.splitlines())) <= 100


def test_the_fullest_machine_decides_between_fitting_surely_and_perhaps(small: Plan) -> None:
    peak = small.memory[0]
    between = (peak.device_nbytes + peak.high_nbytes) // 2
    close = replace(small.machine, gpu=replace(small.machine.gpu, memory_nbytes=between))
    plan = replace(small, machine=close)
    assert plan.fits
    assert not plan.surely_fits
    assert "It may just fit" in str(plan)


def _pipeline(size: int, wide: int | None = None, **options: Any) -> Any:
    def net() -> Net:
        found = Net(layers=size)
        if wide is not None:
            found.layers[wide] = nn.Sequential(nn.Linear(64, 8192), nn.Linear(8192, 64))
        return found

    strategy = QuantizedPipelineStrategy(
        pipeline_size=size,
        num_microbatches=size,
        forward_codec="none",
        backward_codec="none",
        split=[1] * size,
    )
    run = python_program(net, {"strategy": strategy, **options})
    machine = make_machine("H100", nodes=size, gpus_per_node=1, network="1gbit")
    batch = torch.zeros(size, 4, dtype=torch.int64)
    return Simulations(run=run, batch=batch, origin="here", machine=machine)(), machine


def test_ranks_in_the_middle_of_a_pipeline_are_alike() -> None:
    simulated, machine = _pipeline(6)
    assert tuple(trace.rank for trace in simulated.traces) == simulated.places == (0, 3, 5)
    assert simulated.microbatches == 6
    assert simulated.layout.pipeline == 6
    assert simulated.tokens_per_step == 6 * 4
    assert simulated.step_time(machine).parts["bubble"] > 0
    events = simulated.trace_at(4).events
    stages = {e.action[1] for e in events if isinstance(e, Operator) and e.action}
    assert stages == {4}
    assert len(simulated.memory(machine)) == 3


def test_ranks_in_the_middle_that_differ_are_simulated() -> None:
    simulated, machine = _pipeline(5, wide=3)
    assert [trace.rank for trace in simulated.traces] == [*range(5)]
    peaks = [peak.device_nbytes for peak in simulated.memory(machine)]
    wide = 2 * 64 * 8192  # weights, with gradients and two moments in fp32
    assert peaks[3] - max(peaks[:3] + peaks[4:]) > 16 * wide
    kept = [ActivationQuantization("agoq"), StageBitCompensation()]
    assert len(_pipeline(5, callbacks=kept)[0].traces) == 5


class SplitNet(Net):
    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def test_stages_of_tensor_parallel_ranks_are_planned_one_after_another() -> None:
    """Each has groups of its own, though torch takes their meshes for equal."""
    strategy = QuantizedPipelineStrategy(
        2, num_microbatches=2, tensor_parallel_size=2, tensor_parallel="auto"
    )
    run = python_program(SplitNet, {"strategy": strategy})
    machine = make_machine("H100", nodes=2, gpus_per_node=4, network="1gbit")
    batch = torch.zeros(2, 4, dtype=torch.int64)
    simulated = Simulations(run=run, batch=batch, origin="here", machine=machine)()
    assert simulated.layout == Layout(data_parallel=2, tensor_parallel=2, pipeline=2)
    assert [trace.rank for trace in simulated.traces] == [0, 4]


@pytest.mark.parametrize(
    ("schedule", "numels", "equal"),
    [
        ("1f1b", (9, 2, 2, 2, 7), True),
        ("1f1b", (9, 2, 4, 2, 7), False),
        ("interleaved_1f1b", (9, 2, 2, 2, 2, 3, 3, 3, 3, 7), True),  # two stages a rank
        ("interleaved_1f1b", (9, 2, 2, 2, 2, 3, 3, 4, 3, 7), False),
    ],
)
def test_stages_between_the_ends_are_compared(
    schedule: str, numels: tuple[int, ...], equal: bool
) -> None:
    line = PipelineLayout(
        schedule=schedule,
        pipeline_size=5,
        num_microbatches=10,
        stages_per_rank=len(numels) // 5,
        rank=0,
        stages=(0,),
        numels=numels,
    )
    assert equal_between_ends(line) == equal


def test_other_options_are_simulated_in_place_of_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = make_machine("H100", nodes=2, gpus_per_node=2, network="1gbit")
    run = python_program(Net, {"strategy": "quantized_fsdp", "precision": "bf16-mixed"})
    batch = torch.zeros(4, 8, dtype=torch.int64)
    simulations = Simulations(run=run, batch=batch, origin="here", machine=machine)
    simulated = simulations()
    assert simulated.options.strategy == "quantized_fsdp"
    assert simulated.model.layers == 2
    plain = replace(simulated.options, weights="none", gradients="none", recipe="agoq")
    outcome = simulations.evaluate(plain)
    assert outcome.tokens_per_s == pytest.approx(simulated.tokens_per_step / outcome.seconds)


def test_two_steps_of_one_rank_say_what_three_do(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = make_machine("H100", nodes=1, gpus_per_node=1)
    run = python_program(Net, {"precision": "bf16-mixed", "accumulate_grad_batches": 2})
    batch = torch.zeros(4, 8, dtype=torch.int64)
    simulations = Simulations(run=run, batch=batch, origin="here", machine=machine)
    options = replace(simulations().options, gradient_buffer="int8", recipe="agoq")
    found = simulations.evaluate(options)
    simulate = planning.simulate_fit

    def three(*args: Any, steps: int, **more: Any) -> Any:
        assert steps == 2
        return simulate(*args, steps=3, **more)

    monkeypatch.setattr(planning, "simulate_fit", three)
    longer = simulations.evaluate(options)
    assert longer.device_nbytes == found.device_nbytes
    assert longer.seconds == pytest.approx(found.seconds, rel=1e-4)


def test_what_cannot_be_simulated_is_said() -> None:
    class Branches(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx)[torch.nonzero(self.head.bias)].sum()

    for module, said in ((Branches, "cannot be simulated"), (nn.Identity, "not")):
        with pytest.raises(ValueError, match=said):
            lq_lightning.plan(
                module,  # type: ignore[arg-type]
                trainer={"devices": 1},
                batch="int64[2,4]",
                alternatives=False,
            )


def test_only_an_error_of_the_training_step_is_said_to_be_of_the_batch() -> None:
    class Fails(Net):
        def on_after_backward(self) -> None:
            raise RuntimeError("no such file")

    with pytest.raises(ValueError, match="cannot be simulated: its fit raises Run.*file.$"):
        lq_lightning.plan(Fails, trainer={"devices": 1}, batch="int64[2,4]", alternatives=False)
    with pytest.raises(ValueError, match="its training step raises.*taken from `batch`: x:int64"):
        lq_lightning.plan(Net, trainer={"devices": 1}, batch="x:int64[2,4]", alternatives=False)


def test_bits_that_are_learned_are_planned_as_they_start() -> None:
    plan = lq_lightning.plan(
        Net(),
        trainer={"devices": 1, "callbacks": [AdaptiveBits(4, sites="layers")]},
        batch="int64[2,4]",
        alternatives=False,
    )
    assert plan.notes == ("`AdaptiveBits` is planned with the bits that it starts with.",)


def test_strategies_that_need_a_gpu_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'fsdp' cannot be planned.*Plan QuantizedFSDPStrategy"):
        lq_lightning.plan(Net, trainer={"strategy": FSDPStrategy()}, batch="int64[2,4]")


def test_recipes_with_fp8_are_refused_for_gpus_without() -> None:
    for gpu in ("H100", "A100"):
        refused = pytest.raises(ValueError, match="A100-80 has no FP8 products.*agoq")
        with nullcontext() if gpu == "H100" else refused:
            lq_lightning.plan(
                Net(),
                trainer={"devices": 1, "callbacks": [ActivationQuantization("coat")]},
                batch="int64[2,4]",
                gpu=gpu,
                alternatives=False,
            )


def test_training_after_a_plan_is_that_without_one() -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(32, (32, 4), generator=generator)
    loader = DataLoader(tokens, batch_size=2, shuffle=True, generator=generator)  # type: ignore[arg-type]
    module = Net()
    states = generator.get_state(), torch.get_rng_state()
    lq_lightning.plan(module, trainer={"devices": 1}, data=loader, alternatives=False)
    assert torch.equal(generator.get_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])
