"""Optimizers whose parameters have another order on another rank, or in the run that loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lq_testing.checkpoints import strategy
from lq_testing.lightning_models import PLAIN, TinyModule, loader, run_trainer, trainer
from torch import Tensor
from torch.distributed.tensor import DTensor

from lq_lightning import OptimizerQuantization, QuantizedPrecision
from lq_lightning.checkpoint import state as states
from lq_lightning.checkpoint.consolidate import consolidate_checkpoint
from lq_lightning.checkpoint.single_file import AtomicCheckpointIO
from lq_lightning.checkpoint.state import load_optimizer
from lq_lightning.foundation.parameters import clean_name


class Ordered(TinyModule):
    """Two groups, of matrices and others, whose parameters are given in some order."""

    def __init__(self, reverse: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.reverse, self.options = reverse, options

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        names = sorted(named, reverse=self.reverse)
        leave_out = self.options.get("leave_out")
        groups: list[dict[str, Any]] = [
            {"params": [named[n] for n in names if named[n].ndim > 1], "weight_decay": 0.1},
            {"params": [named[n] for n in names if named[n].ndim < 2 and n != leave_out]},
        ]
        groups[1]["lr"] = 1e-3
        if self.options.get("swap_groups"):
            groups.reverse()
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class _Start(Callback):
    """Keeps the states that a run starts from, whole, by parameter and key."""

    def __init__(self) -> None:
        self.states: dict[str, Tensor] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.states = _states(trainer, pl_module)


def _states(run: pl.Trainer, module: pl.LightningModule) -> dict[str, Tensor]:
    found = {}
    for name, parameter in module.named_parameters():
        for key, value in sorted(run.optimizers[0].state[parameter].items()):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{clean_name(name)} {key}"] = torch.as_tensor(whole).clone()
    return found


def _fit(
    root: str, model: Ordered, use: Any, path: str | None = None, devices: int = 2, **options: Any
) -> tuple[pl.Trainer, dict[str, Tensor]]:
    start = _Start()
    run = trainer(
        *(use, root, devices),
        callbacks=[start],
        max_epochs=1 if path is None else 2,
        limit_train_batches=2,
        **options,
    )
    run.fit(model, loader(), ckpt_path=path)
    return run, start.states


def _equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    wrong = [key for key, value in expected.items() if not torch.equal(found[key], value)]
    assert not wrong, f"{len(wrong)} of {len(expected)} states are mixtures: {wrong[:3]}"


def _orders(rank: int, world_size: int, root: str) -> dict[str, dict[str, Tensor]]:
    """Save and load where ranks have other orders; return what the checkpoints have to hold."""
    expected = {}
    coded = QuantizedPrecision("32-true", OptimizerQuantization(min_numel=64))
    cases: Any = (("fp32True", True, []), ("fp32False", False, []), ("8 bits", True, [coded]))
    for name, full, plugins in cases:
        model, path = Ordered(reverse=rank == 1), f"{root}/{name}.ckpt"
        run, _ = _fit(root, model, strategy(full, **PLAIN), plugins=plugins)
        run.save_checkpoint(path)
        expected[path] = _states(run, model)
        other = Ordered(reverse=rank == 0)
        _, found = _fit(root, other, strategy(full, **PLAIN), path, plugins=plugins)
        _equal(found, expected[path])
    _positions_only(rank, root)
    _differences(rank, root)
    return expected


def _positions_only(rank: int, root: str) -> None:
    """A file without names is loaded where all ranks mean the same by a position."""
    path = f"{root}/positions.ckpt"
    if rank == 0:
        saved = torch.load(f"{root}/fp32True.ckpt", weights_only=True)
        del saved["optimizer_states"][0]["parameter_names"]
        AtomicCheckpointIO().save_checkpoint(saved, path)
    dist.barrier()
    with pytest.raises(
        ValueError, match="number 0 is `net.blocks.0.down.weight` on rank 0, but `net.head"
    ) as e:
        _fit(root, Ordered(reverse=rank == 1), strategy(True, **PLAIN), path)
    assert path in str(e.value)
    _fit(root, Ordered(), strategy(True, **PLAIN), path)


def _differences(rank: int, root: str) -> None:
    """What cannot be right is refused before the first step, on all ranks."""
    fewer = Ordered(leave_out="net.tiny" if rank == 1 else None)
    text = "AdamW. has `net.tiny` in parameter group 1 on rank 0, but not on rank 1"
    with pytest.raises(ValueError, match=text):
        _fit(root, fewer, strategy(True, **PLAIN))
    for name in ("fp32True", "fp32False"):
        with pytest.raises(ValueError, match=r"base rates \[0.01, 0.001\] in the checkpoint") as e:
            _fit(root, Ordered(swap_groups=True), strategy(**PLAIN), f"{root}/{name}.ckpt")
        assert name in str(e.value)


def test_states_belong_to_names_whatever_their_order(tmp_path: Path) -> None:
    root = str(tmp_path)
    expected, _ = run_trainer(_orders, 2, root)
    one = f"{root}/fp32one.ckpt"
    consolidate_checkpoint(f"{root}/fp32False.ckpt", one)
    for path, source in ((f"{root}/fp32True.ckpt", "fp32True"), (one, "fp32False")):
        for reverse in (False, True):
            _, found = _fit(root, Ordered(reverse), strategy(), path, devices=1)
            _equal(found, expected[f"{root}/{source}.ckpt"])


def test_one_process_finds_its_states_in_another_order(tmp_path: Path) -> None:
    root, path = str(tmp_path), str(tmp_path / "a.ckpt")
    model = Ordered()
    run, _ = _fit(root, model, strategy(), devices=1)
    run.save_checkpoint(path)
    _, found = _fit(root, Ordered(reverse=True), strategy(), path, devices=1)
    _equal(found, _states(run, model))
    saved = torch.load(path, weights_only=True)
    del saved["optimizer_states"][0]["parameter_names"]
    plain = AtomicCheckpointIO()
    plain.save_checkpoint(saved, path)
    _, found = _fit(root, Ordered(), strategy(), path, devices=1)  # as plain Lightning's
    _equal(found, _states(run, model))


def test_names_that_torch_keeps_are_used_and_foreign_parameters_are_left_alone() -> None:
    model = torch.nn.ModuleDict({"b": torch.nn.Linear(2, 2), "a": torch.nn.Linear(2, 2)})
    named = list(model.named_parameters())
    saving = torch.optim.SGD(named[::-1], lr=1.0, momentum=0.9)
    model["a"](model["b"](torch.ones(1, 2))).sum().backward()
    saving.step()
    loading = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    state = states.state_by_name(model, loading, saving.state_dict())
    assert state is not None
    load_optimizer(model, loading, state)
    for name, parameter in named:
        buffer = saving.state[parameter]["momentum_buffer"]
        assert torch.equal(loading.state[parameter]["momentum_buffer"], buffer), name
    part = torch.optim.SGD(model["a"].named_parameters(), lr=1.0)  # names of the part alone
    assert states.state_by_name(model, loading, part.state_dict()) is None
    foreign = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    assert states.with_names(model, foreign, saved := foreign.state_dict()) is saved
    assert states.state_by_name(model, foreign, {**saved, states.NAMES: ["a.bias"]}) is None


def test_errors_of_a_single_file_name_it(tmp_path: Path) -> None:
    def states(checkpoint: Any) -> Any:
        return checkpoint["optimizer_states"][0]

    changes: tuple[tuple[Callable[[Any], object], type[Exception], str], ...] = (
        (lambda c: c["state_dict"].popitem(), RuntimeError, "Missing key"),
        (lambda c: c["optimizer_states"].clear(), ValueError, "no state for optimizer 0"),
        (
            lambda c: states(c)["parameter_names"].__setitem__(0, "other"),
            *(ValueError, "no optimizer state for parameter `net."),
        ),
        (
            lambda c: (states(c).pop("parameter_names"), states(c)["param_groups"].pop()),
            *(ValueError, "different number of parameter groups"),
        ),
    )
    root, path = str(tmp_path), str(tmp_path / "a.ckpt")
    run, _ = _fit(root, Ordered(), strategy(), devices=1)
    run.save_checkpoint(path)
    content = Path(path).read_bytes()
    for change, kind, text in changes:
        Path(path).write_bytes(content)
        saved = torch.load(path, weights_only=True)
        change(saved)
        torch.save(saved, path)
        with pytest.raises(kind, match=text) as error:
            _fit(root, Ordered(), strategy(), path, devices=1)
        assert f"checkpoint `{path}`" in str(error.value)


def test_errors_of_writing_name_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    for value, kind in ((lambda: 0, (AttributeError, Exception)), (_NoSpace(), OSError)):
        with pytest.raises(kind) as error:
            AtomicCheckpointIO().save_checkpoint({"x": value}, path)
        assert f"checkpoint `{path}`" in str(error.value)
    assert error.value.errno == 28
    assert not list(tmp_path.iterdir())


class _NoSpace:
    def __reduce__(self) -> Any:
        raise OSError(28, "No space left on device")
