"""Nodes that train alone for some steps and are brought together, through the Trainer.

Four CPU ranks play two nodes of two.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.cli import LightningCLI
from lq_testing.checkpoints import StateAtStart, module, moments, weights
from lq_testing.fsdp2 import same_on_all_ranks
from lq_testing.lightning_models import (
    SMALL,
    Fails,
    Losses,
    TinyModule,
    loader,
    quiet,
    run_trainer,
    trainer,
)
from lq_testing.models import WIDTH
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from lq_lightning import LocalSteps, QuantizedFSDPStrategy, QuantizedPrecision
from lq_lightning._compat.tensors import local_tensor
from lq_lightning.checkpoint.consolidate import consolidate_checkpoint
from lq_lightning.optim import OptimizerQuantization, QuantizedMuon, muon_groups
from lq_lightning.strategies import failures
from lq_lightning.strategies.failures import LostRankError, StopSignal

NODES = {**SMALL, "node_size": 2}
BATCHES = 3  # of an epoch
YAML = """
trainer:
  accelerator: cpu
  devices: 4
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: lq_lightning.QuantizedFSDPStrategy
    init_args:
      weights: none
      gradients: none
      node_size: 2
      min_quantized_numel: 64
      local_steps: %s
"""


EIGHT_BITS = OptimizerQuantization(min_numel=64)
AVERAGES = "{every: 1, outer_lr: 1.0, outer_momentum: 0.0, bits: null}"


def _trainer(folder: str, local_steps: str) -> pl.Trainer:
    """Of a YAML file with this option."""
    quiet()
    Path(folder, "a.yaml").write_text(YAML % local_steps)
    args = [f"--config={folder}/a.yaml"]
    return LightningCLI(TinyModule, run=False, args=args, save_config_callback=None).trainer


class Together(Callback):
    """Whether all nodes have equal weights, after batches and whenever they are looked at."""

    def __init__(self) -> None:
        self.after_batches: list[bool] = []
        self.seen: list[bool] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        self.after_batches.append(_alike(list(weights(module).values())))
        meeting: Any = trainer.strategy.meeting  # type: ignore[attr-defined]
        assert meeting() is self.after_batches[-1]

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.seen.append(_alike(list(weights(module).values())))

    on_train_end = on_validation_start


def _alike(tensors: list[Tensor]) -> bool:
    return same_on_all_ranks([t.float() for t in tensors])


def _fit(root: str, strategy: Any, model: TinyModule | None = None, **options: Any) -> Any:
    model = model or module()
    losses, path = Losses(), options.pop("ckpt_path", None)
    validation = loader(16) if options.pop("validates", False) else None
    batches = options.pop("batches", BATCHES)
    callbacks = [losses, *options.pop("callbacks", [])]
    run = trainer(strategy, root, 4, callbacks=callbacks, **options)
    run.fit(model, loader(16 * batches), validation, ckpt_path=path)
    return run, losses.values


# --- on each rank -------------------------------------------------------------------------------


def _averages(rank: int, root: str) -> None:
    """One step alone, then the mean of the weights, is one step of all with SGD."""
    plain = QuantizedFSDPStrategy("none", "none", **NODES)
    run, same = _fit(root, plain, module(optimizer="sgd", lr=0.5))
    expected = weights(run.lightning_module)
    folder = Path(root, str(rank))
    folder.mkdir()
    run, losses = _trainer(str(folder), AVERAGES), Losses()
    run.callbacks.append(losses)
    run.fit(module(optimizer="sgd", lr=0.5), loader(16 * BATCHES))
    ours = weights(run.lightning_module)
    assert losses.values == pytest.approx(same, rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


def _together(rank: int, root: str) -> None:
    """Nodes differ within a cycle, and never where somebody looks; one of them skips some."""

    class SkipsSome(TinyModule):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.trainer.global_step in (0, 4) and rank == 3:
                self.net.head.weight.grad.mul_(float("nan"))

    torch.manual_seed(rank)  # nodes start alike all the same
    seen = Together()
    strategy = QuantizedFSDPStrategy(local_steps=2, skip_nonfinite_steps=True, **NODES)
    with pytest.warns() if rank == 2 else pytest.MonkeyPatch.context():
        options = {"callbacks": [seen], "max_epochs": 2, "num_sanity_val_steps": 1}
        run, _ = _fit(root, strategy, SkipsSome(), validates=True, **options)
    assert seen.after_batches == [False, True, False, False, True, False]
    assert seen.seen == [True] * 4  # also before the first step
    assert strategy.communication is not None
    assert strategy.communication.external_weight_updates == {}
    assert strategy.num_skipped_steps == rank // 2 * 2
    report = strategy.quantization_report()
    assert report is not None
    numel = sum(p.to_local().numel() for p in run.lightning_module.parameters())
    exchanges = 4
    assert 4 < 8 * report.counts["bytes_weights_inter"] / numel / exchanges < 8
    assert report.counts["bytes_gradients_inter"] == 0
    assert report.counts["bytes_gradients_intra"] > 0


def _raises(rank: int, root: str) -> None:
    class Overflows(TinyModule):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if rank == 3:
                self.net.head.weight.grad.mul_(float("nan"))

    strategy = QuantizedFSDPStrategy(local_steps=2, **NODES)
    with pytest.raises(RuntimeError, match="weights of node 1 are not finite"):
        _fit(root, strategy, Overflows())


def _refuses_other_shards(rank: int, root: str) -> None:
    """Peers of nodes would take different shards for the same one."""

    class OverAllRanks(TinyModule):
        def configure_model(self) -> None:
            fully_shard(self.net.head)

    strategy = QuantizedFSDPStrategy(local_steps=2, **NODES)
    match = rf"head` was sharded over the ranks \[0, 1, 2, 3\].* \[{rank // 2 * 2}, .*mesh="
    with pytest.raises(ValueError, match=match):
        _fit(root, strategy, OverAllRanks())


def _refuses_other_models(rank: int, root: str) -> None:
    """Shapes and optimizers that depend on the node are named before anything is exchanged."""

    class OtherShape(TinyModule):
        def configure_model(self) -> None:
            self.net.blocks[1].up = torch.nn.Linear(WIDTH, 4 * WIDTH + rank // 2)

    class OtherBlocks(TinyModule):
        def configure_optimizers(self) -> Any:
            self.net.blocks[rank // 2].requires_grad_(False)
            return torch.optim.AdamW(p for p in self.parameters() if p.requires_grad)

    for model, match in (
        (OtherShape(), r"same model: `net.blocks.1.up.bias` is float32 .* on rank 2\. Build it"),
        (OtherBlocks(), r"`net.blocks.0.down.weight` is missing on rank 0 and new .* on rank 2"),
    ):
        strategy = QuantizedFSDPStrategy(local_steps=2, **NODES)
        with pytest.raises(ValueError, match=match):
            _fit(root, strategy, model)


class AnyOrder(TinyModule):
    """Modules, parameters and buffers in another order on each node."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        node = int(os.environ["RANK"]) // 2
        layers = {name: torch.nn.BatchNorm1d(WIDTH) for name in ("ab", "ba")}
        for name in sorted(layers, key=lambda name: name[node]):
            layers[name].running_mean.fill_(1.0 if name == "ab" else 2.0)
            layers[name].weight.data.fill_(3.0 if name == "ab" else 4.0)
            self.add_module(name, layers[name])

    def configure_optimizers(self) -> Any:
        node = int(os.environ["RANK"]) // 2
        named = sorted(self.named_parameters(), key=lambda item: item[0], reverse=node == 1)
        return torch.optim.SGD((p for _, p in named), lr=0.1)


def _exchanges_by_name(rank: int, root: str) -> None:
    run, _ = _fit(root, QuantizedFSDPStrategy(local_steps=2, **NODES), AnyOrder())
    model: Any = run.lightning_module
    found = weights(model)
    for name, mean, weight in (("ab", 1.0, 3.0), ("ba", 2.0, 4.0)):
        assert (getattr(model, name).running_mean == mean).all()
        assert (found[f"{name}.weight"] == weight).all()  # not used, and so without a gradient
    assert _alike([found[name] for name in sorted(found)])
    start = dict(module().named_parameters())
    moved = {n: (found[n] - p).norm() / p.norm() for n, p in start.items() if p.ndim > 1}
    assert all(distance < 0.5 for distance in moved.values())


def _saves_if_all_fail(rank: int, root: str) -> None:
    """Whether all ranks save is asked before nodes, which may be anywhere, are brought together."""
    failures._TOGETHER = timedelta(seconds=2)
    for failing in (range(4), (3,)):
        folder = f"{root}/failed{len(failing)}"
        saves = [
            OnExceptionCheckpoint(folder, filename="own"),
            ModelCheckpoint(folder, save_on_exception=True, save_last=True),
        ]
        strategy = QuantizedFSDPStrategy(local_steps=3, **NODES)
        callbacks = [Fails(1, *failing), *saves]
        run = trainer(strategy, root, 4, callbacks=callbacks, enable_checkpointing=True)
        why = "is not saved: .*KeyError" if rank in failing else "another rank has gone"
        # rank 0 has the store in which it says so, for as long as it lives
        told = "rank 3 failed: KeyError: of this rank" if (rank, len(failing)) == (0, 1) else ""
        with (
            pytest.raises(KeyError if rank in failing else LostRankError, match=told),
            pytest.warns(UserWarning, match=why) if len(failing) == 1 else nullcontext(),
        ):
            run.fit(module(), loader(16 * BATCHES))
        if len(failing) > 1:
            dist.barrier()
            assert {path.name for path in Path(folder).iterdir()} >= {"own.ckpt", "last.ckpt"}
    assert not Path(folder).exists() or not list(Path(folder).iterdir())


def _resumes(rank: int, root: str) -> None:
    """A run saved within a cycle goes on bit by bit, in bf16 rounded by chance and in 8 bits."""

    def options() -> dict[str, Any]:
        states = OptimizerQuantization(stochastic_rounding=True, min_numel=64)
        return {
            "strategy": QuantizedFSDPStrategy(local_steps=LocalSteps(every=2), **NODES),
            "plugins": [QuantizedPrecision("bf16-true", states)],
            "max_epochs": 2,
            "accumulate_grad_batches": 1,
        }

    saves = ModelCheckpoint(f"{root}/saved", every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    seen = Together()
    run, losses = _fit(root, callbacks=[saves, seen], enable_checkpointing=True, **options())
    assert seen.after_batches == [False, True, False, False, True, False]
    path = f"{root}/saved/epoch=0.ckpt"
    resumed, rest = _fit(root, model=TinyModule(lr=0.5), ckpt_path=path, **options())
    assert rest == losses[BATCHES:]
    (first, states), (second, same) = _outcome(run), _outcome(resumed)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert all(torch.equal(value, same[key]) for key, value in states.items())
    assert not _alike(moments(run))  # nodes keep moments of their own


class WithMuon(TinyModule):
    """Matrices have Muon."""

    def configure_optimizers(self) -> Any:
        return QuantizedMuon(muon_groups(self), lr=self.lr, quantization=EIGHT_BITS)


class Flights(Callback):
    """Whether a fragment is under way after batches, and nodes are alike when they end."""

    def __init__(self) -> None:
        self.under_way: list[bool] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        outer = trainer.strategy._groups._outer  # type: ignore[attr-defined]
        self.under_way.append(outer._flight is not None)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        assert not self.under_way or _alike(list(weights(module).values()))


def _resumes_in_flight(rank: int, root: str) -> None:
    """A checkpoint ends the flight of a fragment; with Muon, 2 bits and accumulated gradients."""
    steps = LocalSteps(every=4, fragments=2, delay=2, bits=2, error_feedback=True)

    def options() -> dict[str, Any]:
        strategy = QuantizedFSDPStrategy(local_steps=steps, **NODES)
        return {"strategy": strategy, "max_epochs": 2, "accumulate_grad_batches": 2, "batches": 6}

    saves = ModelCheckpoint(f"{root}/flown", every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    seen, model = Flights(), WithMuon()
    callbacks = [seen, saves]
    run, losses = _fit(
        root, model=model, callbacks=callbacks, enable_checkpointing=True, **options()
    )
    # of three steps an epoch, the second one sends a fragment, which the third does not merge
    assert seen.under_way == [False, False, False, True, True, True] * 2
    path = f"{root}/flown/epoch=0.ckpt"
    resumed, rest = _fit(root, model=WithMuon(lr=0.5), ckpt_path=path, **options())
    assert rest == losses[6:]
    (first, states), (second, same) = _outcome(run), _outcome(resumed)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert all(torch.equal(value, same[key]) for key, value in states.items())


def _refuses_few_units(rank: int, root: str) -> None:
    strategy = QuantizedFSDPStrategy(local_steps=LocalSteps(fragments=32), **NODES)
    with pytest.raises(ValueError, match=r"fragments=32\)` is not supported: the model has \d+ un"):
        _fit(root, strategy)


def _outcome(run: pl.Trainer) -> tuple[dict[str, Tensor], dict[tuple[int, str], Tensor]]:
    """Weights, and this rank's moments by number and name."""
    states = run.optimizers[0].state_dict()["state"].items()
    own = {(i, key): local_tensor(value) for i, state in states for key, value in state.items()}
    return weights(run.lightning_module), own


def _continues_elsewhere(rank: int, root: str) -> None:
    """Nodes of a smaller run take up the states in turn; without local steps it is the first's."""
    strategy = QuantizedFSDPStrategy(local_steps=2, **NODES)
    run, _ = _fit(root, strategy)
    path = f"{root}/elsewhere.ckpt"
    run.save_checkpoint(path)
    expected, own = weights(run.lightning_module), moments(run)
    first, second = list(own), list(own)
    for tensors, source in ((first, 0), (second, 2)):
        tensors[:] = [t.clone() for t in tensors]
        for tensor in tensors:
            dist.broadcast(tensor, source)
    for local, size in ((2, 1), (None, 4)):
        seen = StateAtStart()
        other = QuantizedFSDPStrategy(local_steps=local, **{**NODES, "node_size": size})
        _fit(root, other, TinyModule(), callbacks=[seen], ckpt_path=path, max_epochs=2)
        assert all(torch.equal(seen.weights[name], value) for name, value in expected.items())
        saved = second if local and rank % 2 else first
        assert all(torch.equal(a, b) for a, b in zip(seen.moments, saved, strict=True))
    if rank == 0:
        torch.save((expected, first), f"{root}/expected.pt")


def _all(rank: int, world_size: int, root: str) -> None:
    for check in (_averages, _together, _resumes, _continues_elsewhere, _resumes_in_flight):
        check(rank, root)
    _refuses_few_units(rank, root)
    _raises(rank, root)
    _refuses_other_shards(rank, root)
    _refuses_other_models(rank, root)
    _exchanges_by_name(rank, root)
    _saves_if_all_fail(rank, root)


def test_nodes_train_alone(tmp_path: Path) -> None:
    root = str(tmp_path)
    run_trainer(_all, 4, root)
    consolidate_checkpoint(f"{root}/elsewhere.ckpt", f"{root}/one.ckpt")
    expected, states = torch.load(f"{root}/expected.pt")
    seen = StateAtStart()
    options = {"devices": 1, "callbacks": [seen], "max_epochs": 5}
    run = trainer("auto", root, **options)
    run.fit(TinyModule(), loader(), ckpt_path=f"{root}/one.ckpt")
    assert all(torch.equal(seen.weights[name], value) for name, value in expected.items())
    assert all(torch.equal(a, b) for a, b in zip(seen.moments, states, strict=True))


# --- without other ranks ------------------------------------------------------------------------


def test_yaml_takes_a_number_or_a_config(tmp_path: Path) -> None:
    for text, expected in (
        ("16", LocalSteps(every=16)),
        ("{every: 8, outer_lr: 0.5}", LocalSteps(every=8, outer_lr=0.5)),
        ("null", None),
    ):
        strategy: Any = _trainer(str(tmp_path), text).strategy
        groups = strategy._groups
        assert (groups and groups._config) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_steps": 0}, r"local_steps=0\)` is not supported: give a whole number of 1"),
        ({"local_steps": True}, "local_steps=True"),
        ({"local_steps": {"every": 8}}, "number of 1 or more, or a `LocalSteps`"),
        (
            {"local_steps": 8, "save_distributed_checkpoint": False},
            r"each node has optimizer states of its own.*consolidate",
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizedFSDPStrategy(**options)


@pytest.mark.parametrize(
    ("options", "trainer_options", "message"),
    [
        ({"node_size": 4}, {}, r"one node of 4 ranks.*`node_size` emulate nodes"),
        ({"node_size": 2}, {"sync_batchnorm": True}, "sync_batchnorm=True` does not go with"),
    ],
)
def test_runs_that_cannot_train_alone_are_refused(
    tmp_path: Path, options: dict[str, Any], trainer_options: dict[str, Any], message: str
) -> None:
    strategy = QuantizedFSDPStrategy(local_steps=8, **options)
    run = trainer(strategy, str(tmp_path), 4, **trainer_options)
    strategy._launcher = None
    with pytest.raises(ValueError, match=message):
        run.fit(TinyModule(), loader())


def test_signals_are_heeded_where_nodes_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    meets = iter((False, True, False))
    device = torch.device("cpu")
    stop = StopSignal(pl.Trainer(logger=False, accelerator="cpu"), device, lambda: next(meets))
    started: list[bool] = []
    monkeypatch.setattr(stop, "_start", lambda: lambda: started.append(True) or 0)
    stop._stream = object()  # type: ignore[assignment]
    for _ in range(3):
        stop._check()
    assert started == [True]


def test_a_requeue_waits_until_nodes_meet_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    run = pl.Trainer(logger=False, accelerator="cpu", accumulate_grad_batches=2)
    meets = iter((True, False, True))
    stop = StopSignal(run, torch.device("cpu"), lambda: next(meets))
    stop._notify_requeue(0, None)
    stopped: list[int] = []
    monkeypatch.setattr(stop, "_stop", lambda: stopped.append(ready))
    for ready in (1, 2, 4):
        run.fit_loop.epoch_loop.batch_progress.current.ready = ready
        stop._check()
    assert stopped == [4]
