"""A simulated rank does what a real one does, and leaves nothing behind."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_only
from lq_testing.lightning_models import run_trainer
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
)
from torch.utils.data import DataLoader

import lq_lightning as lq
from lq_lightning._compat.simulation import flops_of
from lq_lightning.foundation import streams
from lq_lightning.pipeline.schedules import training_program
from lq_lightning.planning.machine import make_machine
from lq_lightning.planning.memory import peak_memory
from lq_lightning.planning.recorder import SimulationError
from lq_lightning.planning.simulation import simulate_fit
from lq_lightning.planning.trace import (
    COMPUTING,
    Allocate,
    Collective,
    Mark,
    Operator,
    Storage,
    Trace,
    Wait,
)

WIDTH, VOCABULARY, STEPS = 128, 256, 3


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class _Model(LightningModule):
    vocabulary = VOCABULARY
    reads: Any = staticmethod(lambda loss: None)

    def configure_model(self) -> None:
        if hasattr(self, "layers"):
            return
        self.embedding = nn.Embedding(self.vocabulary, WIDTH)
        self.layers = nn.ModuleList(_Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, self.vocabulary, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embedding(batch[:, :-1])
        for layer in self.layers:
            x = layer(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        self.reads(loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class _MuonModel(_Model):
    vocabulary = 4 * WIDTH  # as long as no other matrix

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return lq.QuantizedMuon(lq.muon_groups(self))


class _Traffic(Callback):
    def __init__(self) -> None:
        self.sent: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *unused: Any) -> None:
        communication = trainer.strategy.communication
        self.sent.append(0.0 if communication is None else communication.traffic().sent)


def _trainer(overrides: dict[str, Any], **options: Any) -> tuple[Trainer, LightningModule, Any]:
    options = {"strategy": lq.QuantizedFSDPStrategy(), "plugins": [], "callbacks": []} | options
    for name in ("plugins", "callbacks"):
        overrides[name] = [*options.pop(name), *overrides[name]]
    data = DataLoader(torch.ones(64, 33, dtype=torch.int64), batch_size=4)
    module = options.pop("module", _Model)
    return Trainer(**options, **overrides), module(), data


def _simulated(rank: int = 0, ranks: int = 1, per_node: int = 1, **options: Any) -> Trace:
    first = options.pop("first", None)
    place = make_machine("H100", -(-ranks // per_node), min(ranks, per_node), network="10gbit")
    return simulate_fit(
        lambda overrides: _trainer(overrides, **options), place, rank, steps=STEPS, first=first
    )


def _codes() -> dict[str, Any]:
    return {
        "strategy": lq.QuantizedFSDPStrategy(weights="qWD", gradients="TLq-HS", node_size=1),
        "plugins": [lq.QuantizedPrecision("bf16-mixed")],
        "callbacks": [lq.ActivationQuantization()],
    }


def _real(rank: int, world: int, *unused: Any) -> tuple[float, dict[str, int]]:
    traffic = _Traffic()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "use_distributed_sampler": False}
    overrides: dict[str, Any] = {"accelerator": "cpu", "devices": world, "max_steps": STEPS}
    overrides |= {"plugins": [], "callbacks": [traffic], **quiet}
    options = _codes()
    trainer, module, data = _trainer(overrides, **options)
    trainer.fit(module, data)
    held = {
        "parameter": [p.to_local() for p in module.parameters()],
        "optimizer state": [
            getattr(value, "_local_tensor", value)
            for state in trainer.optimizers[0].state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ],
    }
    nbytes = {n: sum(t.nbytes for t in ts if t.nbytes >= 4096) for n, ts in held.items()}
    return traffic.sent[-1] - traffic.sent[-2], nbytes


def _sent(trace: Trace) -> float:
    total = 0.0
    for event in trace.last_steps():
        if isinstance(event, Collective):
            peers = event.ranks - 1
            total += event.nbytes * (peers if event.kind == "all_gather" else peers / event.ranks)
    return total


def _storages(trace: Trace) -> list[Storage]:
    return [event.storage for event in trace.events if isinstance(event, Allocate)]


def test_a_simulated_rank_sends_and_holds_what_a_real_one_does() -> None:
    sent, held = run_trainer(_real, 2)[1]
    trace = _simulated(1, 2, **_codes())
    assert _sent(trace) == pytest.approx(sent, rel=1e-6)
    for owner, nbytes in held.items():
        alive = [s for s in _storages(trace) if s.owner == owner and s.died is None]
        assert sum(s.nbytes for s in alive) == pytest.approx(nbytes, rel=1e-6), owner


@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (12, 16)])
def test_muon_gathers_each_matrix_once(rank: int, ranks: int) -> None:
    trace = _simulated(rank, ranks, 8, module=_MuonModel)
    events = [e for e in trace.last_steps() if getattr(e, "phase", "") == "optimizer"]
    exchanges = [e for e in events if getattr(e, "kind", "") == "all_to_all"]
    assert [e.ranks for e in exchanges] == [ranks] * 2
    matrices = 8 * 2 * WIDTH * WIDTH  # elements
    # it sends the pieces of others' matrices, and returns theirs to the others
    pieces = 2 * matrices / ranks
    assert exchanges[0].nbytes == pytest.approx(pieces, rel=0.1)
    owned = rank < 8
    assert bool(exchanges[1].nbytes) == owned
    products = sum(e.flops for e in events if isinstance(e, Operator))
    short, long = WIDTH, 2 * WIDTH
    of_one = 5 * 2 * short * short * (2 * long + short)
    assert products == (of_one * (8 // min(ranks, 8)) if owned else 0)
    held = [s for s in _storages(trace) if s.owner == "optimizer state" and s.died is None]
    codes = [s.shape for s in held if s.dtype == torch.uint8]
    assert codes.count((WIDTH // ranks, 2 * WIDTH)) == (4 if rank == 0 else 0)  # others are small


def test_a_thousand_ranks_are_one() -> None:
    trace = _simulated(700, 1024, 8, **(_codes() | {"strategy": lq.QuantizedFSDPStrategy()}))
    kinds = {(e.ranks, e.nodes) for e in trace.last_steps() if isinstance(e, Collective)}
    assert {(8, 1), (128, 128)} <= kinds  # within a node, between all of them
    assert trace.steps == STEPS
    assert trace.tokens == 4 * 32  # that the embedding sees, of 33 in each row


def test_nodes_that_train_alone_are_simulated() -> None:
    strategy = lq.QuantizedFSDPStrategy(local_steps=2)
    assert _simulated(0, 4, 2, strategy=strategy).steps == STEPS  # an outer step among them


@pytest.mark.parametrize(
    ("options", "nbytes"),
    [
        ({}, 4),
        ({"start_method": "spawn"}, 4),
        ({"ddp_comm_hook": fp16_compress_hook}, 2),
        ({"ddp_comm_hook": allreduce_hook, "ddp_comm_wrapper": bf16_compress_wrapper}, 2),
    ],
)
def test_ddp_reduces_beside_backward(options: dict[str, Any], nbytes: int) -> None:
    trace = _simulated(1, 4, 2, strategy=DDPStrategy(**options))
    step = trace.last_steps()
    reduced = [e for e in step if isinstance(e, Collective) and e.ranks > 1]
    parameters = [s for s in _storages(trace) if s.owner == "parameter"]
    sizes = sum(s.nbytes for s in parameters) / 4
    assert sum(e.nbytes for e in reduced) == pytest.approx(nbytes * sizes, rel=0.02)  # small ones
    assert {(e.kind, e.ranks, e.nodes) for e in reduced} == {("all_reduce", 4, 2)}
    assert {e.stream for e in reduced}.isdisjoint({COMPUTING})
    (behind,) = (e for e in step if isinstance(e, Wait) and e.stream == COMPUTING)
    assert max(map(step.index, reduced)) < step.index(behind)
    kinds = peak_memory(trace, make_machine("H100", network="1gbit")).kinds
    assert kinds["gather buffers"] == pytest.approx(4 * sizes, rel=0.02)


def test_ddp_reduces_in_8_bits_on_two_levels() -> None:
    state: Any = lq.QuantizedAllReduce(min_nbytes=1)
    strategy = DDPStrategy(
        ddp_comm_state=state,
        ddp_comm_hook=lq.quantized_all_reduce_hook,
        gradient_as_bucket_view=True,
    )
    trace = _simulated(1, 4, 2, strategy=strategy)
    kinds = {(e.kind, e.ranks, e.nodes) for e in trace.last_steps() if isinstance(e, Collective)}
    levels = {(kind, 2, n) for kind in ("all_to_all", "all_gather") for n in (1, 2)}
    assert kinds == levels | {("all_reduce", 4, 2)}  # of biases
    parameters = sum(s.nbytes for s in _storages(trace) if s.owner == "parameter")
    most = peak_memory(trace, make_machine("H100", network="1gbit")).most
    assert most["gradients"] == pytest.approx(parameters, rel=0.02)


def test_each_pipeline_rank_runs_its_actions_in_their_order() -> None:
    strategy: Any = lambda: lq.QuantizedPipelineStrategy(num_microbatches=4)  # noqa: E731
    with pytest.raises(SimulationError, match="first"):
        _simulated(1, 2, 2, strategy=strategy())
    traces = [_simulated(0, 2, 2, strategy=strategy())]
    traces.append(_simulated(1, 2, 2, strategy=strategy(), first=traces[0]))
    program = training_program("1f1b", 2, 4, 1)
    for rank, trace in enumerate(traces):
        ran = [e.action for e in trace.last_steps() if isinstance(e, Operator) and e.action]
        expected = [(a.kind, a.stage, a.microbatch) for a in program.orders[rank]]
        assert list(dict.fromkeys(ran)) == expected
        assert any(isinstance(e, Collective) and e.kind == "send" for e in trace.last_steps())


def test_matrix_products_of_a_step_are_counted() -> None:
    trace = _simulated(strategy="auto")
    tokens, weights = 4 * 32, 4 * 2 * 2 * WIDTH * WIDTH + VOCABULARY * WIDTH
    flops = sum(e.flops for e in trace.last_steps() if isinstance(e, Operator))
    assert flops == 6 * tokens * weights
    names = [event.name for event in trace.events if isinstance(event, Mark)]
    assert names[1:] == ["batch", "backward", "optimizer", "stepped"] * STEPS + ["end"]


def test_attention_of_heads_that_share_keys_is_counted() -> None:
    q, k, v = torch.empty(2, 8, 32, 16), torch.empty(2, 2, 48, 16), torch.empty(2, 2, 48, 16)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    product = 2 * (2 * 8) * 32 * 48 * 16
    assert flops_of(forward, (q, k, v), {}, None) == 2 * product
    assert flops_of(backward, (q, q, k, v, q, q, 0.0, True), {}, None) == 5 * product // 2


@pytest.mark.parametrize("value", ["item", "nonzero"])
def test_values_are_made_up_only_where_no_shape_depends_on_them(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(
        _Model, "reads", staticmethod(lambda loss: found.append(_read(loss, value)))
    )
    if value == "item":
        _simulated(strategy="auto")
        assert found == [1.0] * STEPS
    else:
        with pytest.raises(SimulationError, match="nonzero"):
            _simulated(strategy="auto")


def _read(loss: Tensor, value: str) -> Any:
    return getattr(loss, value)()


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_zero_only.rank = 0
    before = (torch.compile, streams.new_stream, nn.Module._apply, dict(os.environ))
    random = torch.get_rng_state()
    monkeypatch.setattr(_Model, "reads", staticmethod(lambda loss: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        _simulated(1, 2, **_codes())
    after = (torch.compile, streams.new_stream, nn.Module._apply, dict(os.environ))
    assert after == before
    assert torch.equal(random, torch.get_rng_state())
    assert not dist.is_initialized()
    assert rank_zero_only.rank == 0  # which later runs warn by
    assert torch.ones(2000).sum() == 2000  # tensors have memory again


def test_a_process_in_a_group_plans_nothing() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="process group"):
            _simulated(strategy="auto")
    finally:
        dist.destroy_process_group()


def test_a_run_that_ends_early_is_no_plan() -> None:
    with pytest.raises(SimulationError, match="0 of 3 optimizer steps"):
        _simulated(strategy="auto", limit_train_batches=0)
