"""Checkpoints before any run, and paths where there is none: as with Lightning's own strategies."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lq_testing import run_ranks
from lq_testing.lightning_models import TinyModule, loader, trainer

from lq_lightning import QuantizedFSDPStrategy, QuantizedPipelineStrategy

KINDS = {
    "fsdp": QuantizedFSDPStrategy,
    "file": functools.partial(QuantizedFSDPStrategy, save_distributed_checkpoint=False),
    "pipeline": functools.partial(
        QuantizedPipelineStrategy, forward_codec="bf16", backward_codec="bf16"
    ),
}


def _connected(strategy: Any, root: Any, devices: int = 1) -> tuple[Any, TinyModule]:
    module = TinyModule()
    run = trainer(strategy, str(root), devices)
    run.strategy.connect(module)
    return run, module


@pytest.mark.parametrize("kind", KINDS)
def test_connected_model_is_saved_as_lightning_does(tmp_path: Path, kind: str) -> None:
    run, module = _connected(KINDS[kind](), tmp_path)
    stock, _ = _connected("auto", tmp_path)
    for weights_only in (False, True):
        made = run._checkpoint_connector.dump_checkpoint(weights_only)
        assert made.keys() == stock._checkpoint_connector.dump_checkpoint(weights_only).keys()
    run.save_checkpoint(tmp_path / "last.ckpt")
    loaded = TinyModule.load_from_checkpoint(tmp_path / "last.ckpt")
    for name, parameter in module.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)


@pytest.mark.parametrize("way", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("strategy", ["auto", *KINDS])
def test_missing_path_is_told_in_lightnings_words(tmp_path: Path, strategy: str, way: str) -> None:
    run = trainer(KINDS.get(strategy, lambda: "auto")(), str(tmp_path), 1)
    path = f"{tmp_path}/./missing.ckpt"
    with pytest.raises(FileNotFoundError) as caught:
        getattr(run, way)(TinyModule(), loader(), ckpt_path=path)
    assert str(caught.value) == f"Checkpoint file not found: {path}"


def _two_ranks(rank: int, world_size: int, root: str) -> None:
    saved = {}
    for kind in ("fsdp", "file"):
        torch.manual_seed(rank)
        run, module = _connected(KINDS[kind](), root, world_size)
        run.save_checkpoint(f"{root}/{kind}.ckpt")
        saved[kind] = module.state_dict()
    first = trainer(QuantizedFSDPStrategy(), root)
    first.validate(TinyModule(), loader(4), verbose=False)  # behind it both have saved
    for kind, state in saved.items():
        assert os.path.isdir(f"{root}/{kind}.ckpt") == (kind != "file")
        run, module = trainer(KINDS[kind](), root), TinyModule()
        run.validate(module, loader(4), ckpt_path=f"{root}/{kind}.ckpt", verbose=False)
        whole = run.strategy.whole_state_dict()
        if rank == 0:  # whose model it is
            for name, value in whole.items():
                assert torch.equal(value, state[name])
        with pytest.raises(FileNotFoundError, match=f"Checkpoint file not found: {root}/none"):
            trainer(KINDS[kind](), root).fit(module, loader(4), ckpt_path=f"{root}/none")


def test_ranks_before_a_run_save_the_first_ones_model(tmp_path: Path) -> None:
    run_ranks(_two_ranks, 2, str(tmp_path), backend=None, torchrun=True, timeout=120.0)
