"""The callback with ``offload``: trains bit for bit as without, with all strategies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lq_testing import run_ranks
from lq_testing.lightning_models import EXACT, PLAIN, Losses, trainer
from lq_testing.small_llama import VOCAB, SmallLlama
from lq_testing.streams import replaced
from torch import Tensor
from torch.utils.data import DataLoader

from lq_lightning import ActivationQuantization, QuantizedFSDPStrategy, QuantizedPipelineStrategy
from lq_lightning.activations import MemoryBudget, budget
from lq_lightning.activations.offload import Offload
from lq_lightning.callbacks import activation_quantization

SMALL = partial(Offload, min_nbytes=1024, slab_nbytes=1 << 20)


class Module(pl.LightningModule):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = SmallLlama(layers)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _data(length: int = 16) -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(torch.randint(VOCAB, (16, length), generator=generator), batch_size=4)


class Moved(pl.Callback):
    """What has moved when the last batch is done."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *unused: Any) -> None:
        (quantization,) = (c for c in trainer.callbacks if isinstance(c, ActivationQuantization))  # type: ignore[attr-defined]
        offload = quantization._offload
        self.moved, self.seen = (offload.moved_nbytes, offload.seen_nbytes) if offload else (0, 0)
        report = quantization.quantization_report()
        self.counts = report.counts if report is not None else {}
        self.pool = offload.pool if offload else None

    def on_train_end(self, *unused: Any) -> None:
        assert (
            self.pool is None or not self.pool.nbytes
        )  # before Lightning moves weights and states to the host


def fit(
    root: Any, strategy: Any = "auto", devices: int = 1, layers: int = 4, **options: Any
) -> tuple[list[float], Moved]:
    """Losses of a run, with ``ActivationQuantization`` of these options."""
    more = {
        n: options.pop(n) for n in ("accumulate_grad_batches", "limit_val_batches") if n in options
    }
    moved, losses = Moved(), Losses()
    callbacks = [ActivationQuantization(**options), moved, losses]
    run = trainer(strategy, str(root), devices, callbacks=callbacks, **more)
    with replaced(activation_quantization, "Offload", SMALL):
        run.fit(module := Module(layers), _data(), _data())
    assert all("_compiled_call_impl" not in m.__dict__ for m in module.modules())
    return losses.values, moved


@pytest.mark.parametrize("recipe", ["agoq", "auto"])
def test_trains_bit_for_bit_as_without(recipe: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"recipe": recipe, "accumulate_grad_batches": 2}
    expected, _ = fit(tmp_path, **options)
    for offload in ("auto", 0.5, "1GiB") if recipe == "agoq" else (1,):
        losses, moved = fit(tmp_path, **options, offload=offload)
        assert losses == expected
        assert 0 < moved.moved == moved.counts["bytes_offloaded"] <= moved.seen
        assert (moved.moved < 0.7 * moved.seen) == (offload == 0.5)


def _on_ranks(rank: int, world: int, root: str) -> None:
    def pipeline() -> Any:
        return QuantizedPipelineStrategy(
            **EXACT, pipeline_size=2, num_microbatches=4, schedule="1f1b", **PLAIN
        )

    torch.compile = partial(torch.compile, backend="eager")
    ways: dict[str, Callable[[], Any]] = {
        "fsdp": lambda: QuantizedFSDPStrategy(**PLAIN),
        "ddp": lambda: "ddp",
        "compiled": lambda: QuantizedFSDPStrategy(compile_units=True, **PLAIN),
        "replica": lambda: QuantizedFSDPStrategy(node_size=1, min_quantized_numel=64),
        "pipeline": pipeline,
    }
    seen, expected = {}, list[float]()
    for name, strategy in ways.items():
        layers = 2 if name == "pipeline" else 3  # one block per stage
        if name not in ("ddp", "compiled"):  # which compute what the one before them does
            expected, _ = fit(root, strategy(), world, layers, recipe="agoq")
        losses, moved = fit(root, strategy(), world, layers, recipe="agoq", offload=1.0)
        assert losses == expected, name
        assert moved.moved == moved.seen > 0, name
        seen[name] = moved.seen
    assert seen["compiled"] <= seen["replica"] == seen["fsdp"] == seen["ddp"]  # no weights


def test_strategies(tmp_path: Path) -> None:
    run_ranks(_on_ranks, 2, str(tmp_path), backend=None, torchrun=True, timeout=240.0)


def test_a_budget_moves_what_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without recomputation codes of 4 bits would be needed, and losses would not be the same."""
    monkeypatch.setattr(budget, "hidden_nbytes", lambda *_: 1 << 40)
    size = {"size": "2MiB", "scope": "activations", "recompute": False}
    exact, _ = fit(tmp_path, layers=5, budget=MemoryBudget(**size | {"size": "1GiB"}))
    coded, none = fit(tmp_path, layers=5, budget=MemoryBudget(**size))
    losses, moved = fit(tmp_path, layers=5, budget=MemoryBudget(**size, offload=True))
    assert not none.moved
    assert moved.moved
    assert losses == exact != coded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": 0}, r"`offload=0` is not supported: give 'auto'"),
        ({"offload": "much"}, r"'40GiB'"),
        ({"offload": 1.0, "budget": "1GiB"}, r"give `budget=MemoryBudget\('1GiB', offload=True\)`"),
    ],
)
def test_values_are_refused_at_once(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActivationQuantization(**options)


def test_a_run_that_moves_nothing_is_refused_before_its_first_update(tmp_path: Path) -> None:
    run = trainer("auto", str(tmp_path), 1, callbacks=[ActivationQuantization(offload=1.0)])
    module = Module(2)
    before = [p.clone() for p in module.parameters()]
    with pytest.raises(RuntimeError, match="moved nothing .* save nothing of 64.0 KiB or more"):
        run.fit(module, _data(4))
    assert all(map(torch.equal, before, module.parameters()))
    assert all("_compiled_call_impl" not in m.__dict__ for m in module.modules())


class Writing(Module):
    """Writes to what an attention has saved, past version counters, in its third pass."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.automatic_optimization = way, not way.startswith("own")
        attention, held, passes = self.net.blocks[0].attention, list[Tensor](), iter(range(4))

        def write(*_: Any) -> None:
            held.pop().data.mul_(1 + (next(passes) == 2))

        attention.v_proj.register_forward_hook(lambda m, args, y: held.append(y))
        attention.register_forward_hook(write)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 2:
            self.before = [p.detach().clone() for p in self.parameters()]

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            loss.backward()
        if self.way == "own steps of an optimizer":
            self.optimizers(use_pl_optimizer=False).step()  # type: ignore[union-attr]
        return loss


@pytest.mark.parametrize(
    "way", ["automatic", "accumulated", "own steps of an optimizer", "own steps"]
)
def test_writes_that_torch_does_not_see_reach_no_step(way: str, tmp_path: Path) -> None:
    callbacks = [ActivationQuantization(offload=1.0)]
    batches = 2 if way == "accumulated" else 1
    run = trainer("auto", str(tmp_path), 1, callbacks=callbacks, accumulate_grad_batches=batches)
    module = Writing(way)
    with (
        replaced(activation_quantization, "Offload", SMALL),
        pytest.raises(RuntimeError, match="`net.blocks.0` saved for backward was written to"),
    ):
        run.fit(module, _data())
    assert all(map(torch.equal, module.before, module.parameters()))
