"""What users ask of checkpoints: options of loading, weights only, custom writers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.tuner import Tuner
from lq_testing.checkpoints import fit, module, strategy, weights
from lq_testing.damage import flip_bit, weight_offset
from lq_testing.lightning_models import TinyModule, loader, run_trainer, trainer
from lq_testing.models import LoRABlock

from lq_lightning import GradientQuantization, QuantizedFSDPStrategy, QuantizedPipelineStrategy
from lq_lightning.strategies.options import shown_options


class _Note:
    """Something that `weights_only=True` refuses."""


class _WithNote(TinyModule):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = _Note()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert type(checkpoint["note"]).__name__ == "_Note"


class _AdapterOnly(TinyModule):
    """Saves and loads only what is trained, the usual way for adapters."""

    def __init__(self) -> None:
        super().__init__(block=LoRABlock)
        self.strict_loading = False

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if "lora" in name}


def _loading(rank: int, world_size: int, root: str) -> None:
    for full in (False, True):
        folder = f"{root}/{full}"
        # weights_only of the user arrives, the default explains itself
        run, _ = fit(root, _WithNote(), strategy(full))
        run.save_checkpoint(f"{folder}/note.ckpt")
        path = f"{folder}/note.ckpt"
        with pytest.raises(pickle.UnpicklingError, match=r"`weights_only=False` to `trainer.fit`"):
            fit(root, _WithNote(), strategy(full), ckpt_path=path, max_epochs=2)
        run, _ = fit(
            root, _WithNote(), strategy(full), ckpt_path=path, weights_only=False, max_epochs=2
        )
        assert run.global_step == 8
        # test and validate a weights-only checkpoint after fit
        model = module()
        saves = ModelCheckpoint(folder, save_weights_only=True, filename="weights")
        run, _ = fit(root, model, strategy(full), callbacks=[saves], enable_checkpointing=True)
        trained = weights(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert run.test(ckpt_path="best", dataloaders=loader(8), verbose=False)[0]["val"] < 3.0
        assert all(torch.equal(trained[n], w) for n, w in weights(model).items())
        with pytest.raises(KeyError, match="contains only the model"):
            fit(root, module(), strategy(full), ckpt_path=f"{folder}/weights.ckpt")
        # before training
        run = trainer(strategy(full), root)
        run.validate(module(), loader(8), verbose=False)
        run.save_checkpoint(f"{folder}/early.ckpt")
        with pytest.raises(ValueError, match="saved before training began.*delete it"):
            fit(root, module(), strategy(full), ckpt_path=f"{folder}/early.ckpt")
        # an optimizer without state
        run, _ = fit(root, module(optimizer="sgd"), strategy(full))
        run.save_checkpoint(f"{folder}/sgd.ckpt")
        if rank == 0:  # as a run leaves it that is killed while it replaces a checkpoint
            Path(f"{folder}/sgd.ckpt").rename(f"{folder}/sgd.replaced.ckpt")
        options = {"ckpt_path": f"{folder}/sgd.ckpt", "max_epochs": 2}
        run, losses = fit(root, TinyModule(optimizer="sgd"), strategy(full), **options)
        assert run.global_step == 8
        # strict_loading=False; strict errors name the keys
        adapters = _AdapterOnly()
        run, _ = fit(root, adapters, strategy(full))
        run.save_checkpoint(f"{folder}/adapters.ckpt")
        trained = weights(adapters)
        other = _AdapterOnly()
        run.test(other, loader(8), ckpt_path=f"{folder}/adapters.ckpt", verbose=False)
        loaded = weights(other)
        assert all(torch.equal(loaded[n], w) for n, w in trained.items() if "lora" in n)
        assert not torch.equal(loaded["net.embed.weight"], trained["net.embed.weight"])
        with pytest.raises(RuntimeError, match=r"(?s)net.embed.weight"):
            run.test(TinyModule(block=LoRABlock), loader(8), ckpt_path=f"{folder}/adapters.ckpt")
        with pytest.raises(RuntimeError, match="blocks.2"):
            run.test(TinyModule(layers=3), loader(8), ckpt_path=f"{folder}/sgd.ckpt")


# --- CheckpointIO, LR finder --------------------------------------------------------------------


class _CountingIO(TorchCheckpointIO):
    def __init__(self) -> None:
        self.saved: list[Any] = []
        self.loaded = 0

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, *args: Any, **kw: Any) -> None:
        self.saved.append(path)
        super().save_checkpoint(checkpoint, path, *args, **kw)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        self.loaded += 1
        return super().load_checkpoint(*args, **kwargs)


def _checkpoint_io(rank: int, world_size: int, root: str) -> None:
    custom = _CountingIO()
    run, _ = fit(root, module(), strategy(full=True), plugins=[custom])
    path = Path(root, "custom.ckpt")  # arrives as what the caller gave
    run.save_checkpoint(path)
    assert custom.saved == ([path] if rank == 0 else [])
    run.test(module(), loader(8), ckpt_path=f"{root}/custom.ckpt", verbose=False)
    assert custom.loaded == 1
    with pytest.raises(ValueError, match="`_CountingIO` is not used for sharded checkpoints"):
        fit(root, module(), strategy(), plugins=[_CountingIO()])
    saves = ModelCheckpoint(f"{root}/async", save_last=True)
    fit(
        root,
        module(),
        strategy(full=True),
        plugins=[AsyncCheckpointIO()],
        callbacks=[saves],
        enable_checkpointing=True,
    )
    dist.barrier()  # `teardown` on rank 0 has waited for the thread
    assert torch.load(f"{root}/async/last.ckpt", weights_only=True)["global_step"] == 4
    run, _ = fit(root, module(), strategy())
    with pytest.raises(ValueError, match="file system that all ranks see"):
        run.save_checkpoint("memory://x.ckpt")
    with pytest.raises(RuntimeError, match="rank 0 could not write"):
        run.save_checkpoint("/dev/null/impossible.ckpt")
    # the learning rate finder
    model = module()
    before = weights(model)
    run = trainer(strategy(), root)
    found = Tuner(run).lr_find(model, loader(64), num_training=5, update_attr=False)
    assert len(found.results["lr"]) >= 5
    assert all(torch.equal(before[n], w) for n, w in weights(model).items())


# --- damage -------------------------------------------------------------------------------------


def _damaged(rank: int, world_size: int, root: str) -> None:
    """Every rank refuses what one of them finds, before the model is touched."""
    for full in (False, True):
        path = f"{root}/damaged{full}.ckpt"
        run, _ = fit(root, module(), strategy(full))
        run.save_checkpoint(path)
        dist.barrier()
        file = path if full else f"{path}/__1_0.distcp"
        if rank == 0:
            flip_bit(Path(file), weight_offset(Path(file)))
        dist.barrier()
        model, start = module(), module()
        names = r"damagedTrue.ckpt.*record" if full else r"damagedFalse.ckpt.*__1_0.distcp"
        with pytest.raises(ValueError, match=names + ".*verify_checkpoints=False"):
            run.test(model, loader(8), ckpt_path=path, verbose=False)
        assert all(torch.equal(p, start.state_dict()[n]) for n, p in weights(model).items())
        unchecked = trainer(strategy(full, verify_checkpoints=False), root)
        unchecked.test(model, loader(8), ckpt_path=path, verbose=False)
        assert not all(torch.equal(p, start.state_dict()[n]) for n, p in weights(model).items())


def _all(rank: int, world_size: int, root: str) -> None:
    for index, check in enumerate((_loading, _checkpoint_io, _damaged)):
        check(rank, world_size, f"{root}/{index}")


def test_options_of_saving_and_loading(tmp_path: Path) -> None:
    run_trainer(_all, 2, str(tmp_path))


def test_a_resumed_run_says_which_options_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("lq_lightning.strategies.parts.rank_zero_info", said.append)
    path = tmp_path / "a.ckpt"

    def start(use: Any, ckpt_path: Path | None, epochs: int) -> Any:
        run = trainer(use, str(tmp_path), devices=1, max_epochs=epochs)
        run.fit(TinyModule(), loader(8), ckpt_path=ckpt_path)
        return run

    start(QuantizedFSDPStrategy(units=["Block"]), None, 1).save_checkpoint(path)
    start(QuantizedFSDPStrategy(units=["Block"]), path, 2)
    assert not said
    changed = GradientQuantization(method="ULq")
    start(QuantizedPipelineStrategy(seed=1, units=["Block"], gradients=changed), path, 2)
    assert said == [
        "This run continues one with other options of the strategy: `strategy`: "
        "QuantizedFSDPStrategy -> QuantizedPipelineStrategy, `gradients`: 'auto' -> "
        "GradientQuantization(method='ULq'), `reshard_after_forward`: True -> False, `seed`: 0 -> 1"
    ]


def test_options_of_users_are_not_saved() -> None:
    class Own(QuantizedFSDPStrategy):
        def __init__(self, token: str, **options: Any) -> None:
            super().__init__(**options)

    shown = shown_options(Own, {"token": "secret", "seed": 1, "units": object()})
    assert shown == {"seed": "1", "units": "<object object>"}
