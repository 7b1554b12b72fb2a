"""What runs leave behind in their process: as much after five as after one."""

from __future__ import annotations

import gc
import multiprocessing
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lq_testing import free_port
from lq_testing.checkpoints import module
from lq_testing.lightning_models import SMALL, Tokens, loader, run_trainer, trainer
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader

PIPELINE = {"forward_codec": "none", "backward_codec": "none"}


def _strategy(kind: str) -> Any:
    from lq_lightning import QuantizedFSDPStrategy, QuantizedPipelineStrategy

    if kind == "pipeline":
        return QuantizedPipelineStrategy(**SMALL, **PIPELINE)
    options: dict[str, Any] = {"local steps": {"node_size": 1, "local_steps": 2}}.get(kind, {})
    return QuantizedFSDPStrategy(**SMALL, weights="qWD", **options)


def _left() -> tuple[int, int, int]:
    """Threads, open files and process groups of this process."""
    threads, files = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))
    return threads, files, len(distributed_c10d._world.pg_map)


class _Collecting(Tokens):
    """Collects the garbage of its process first."""

    def __getitem__(self, index: int) -> Tensor:
        if index == 0:
            gc.collect()
        return super().__getitem__(index)


class _Fails(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise KeyError("of a callback, on all ranks")


def _fit(kind: str, root: str, data: Any = None, **options: Any) -> pl.Trainer:
    run = trainer(_strategy(kind), root, max_steps=1, **options)
    run.fit(module(), loader() if data is None else data)
    return run


def _several_fits(rank: int, world_size: int, root: str) -> None:
    for kind in ("default", "local steps", "pipeline"):
        _fit(kind, root)
        left = _left()
        _fit(kind, root)
        with pytest.raises(KeyError, match="of a callback"):
            _fit(kind, root, callbacks=[_Fails()])
        _fit(kind, root)
        assert _left() == left, kind


def _workers_after_destroyed_groups(
    rank: int, world_size: int, root: str, ports: list[int]
) -> None:
    gc.disable()  # what is left of a run stays until a worker of the next one collects it
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    workers = {"num_workers": 1, "multiprocessing_context": "fork", "timeout": 30}
    for kind, port in zip(("default", "local steps", "pipeline"), ports, strict=True):
        _fit(kind, root)
        dist.destroy_process_group()  # as a sweep does between its runs
        os.environ["MASTER_PORT"] = str(port)
        data: DataLoader[Tensor] = DataLoader(_Collecting(8), batch_size=4, **workers)
        _fit(kind, root, data)


def test_further_fits_leave_no_more_groups_threads_and_files(tmp_path: Path) -> None:
    run_trainer(_several_fits, 2, str(tmp_path))


def test_workers_do_not_destroy_groups_of_their_parent(tmp_path: Path) -> None:
    ports = [free_port() for _ in range(3)]
    run_trainer(_workers_after_destroyed_groups, 2, str(tmp_path), ports)
