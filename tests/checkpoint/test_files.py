"""Names that appear only when a checkpoint is complete; what a killed run leaves."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lq_testing import RankError
from lq_testing.checkpoints import fit, module, strategy
from lq_testing.lightning_models import PLAIN, loader, run_trainer

from lq_lightning.checkpoint import folder
from lq_lightning.checkpoint.folder import ShardedCheckpoint
from lq_lightning.checkpoint.single_file import AtomicCheckpointIO, load_full_checkpoint


def _killed_while_saving(rank: int, world_size: int, root: str) -> None:
    run, _ = fit(root, module(), strategy(**PLAIN))
    run.save_checkpoint(f"{root}/last.ckpt")
    dist.barrier()
    if rank == 0:  # right before the name is given

        def die(*args: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        folder.move_into_place = die  # type: ignore[assignment]
    run.fit_loop.max_epochs = 2
    run.fit(run.lightning_module, loader())
    run.save_checkpoint(f"{root}/last.ckpt")


def test_a_run_killed_while_saving_leaves_the_previous_directory(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="SIGKILL"):
        run_trainer(_killed_while_saving, 2, str(tmp_path))
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == ["last.ckpt"]
    assert ShardedCheckpoint(tmp_path / "last.ckpt").read_meta()["global_step"] == 4
    assert len(list(tmp_path.iterdir())) == 3  # and two hidden leftovers, used by the next save


def test_incomplete_directories_are_refused_without_checksums_too(
    saved: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(saved / "fullFalse.ckpt", tmp_path / "a.ckpt"))
    shard = path / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"__1_0.distcp is 100 of at least \d+ bytes long"):
        ShardedCheckpoint(path, verify=False)
    shard.unlink()
    with pytest.raises(ValueError, match="__1_0.distcp is missing"):
        ShardedCheckpoint(path, verify=False)
    with pytest.raises(FileNotFoundError, match="absent"):
        ShardedCheckpoint(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="absent"):
        load_full_checkpoint(tmp_path / "absent", None)


def test_atomic_checkpoint_io(tmp_path: Path) -> None:
    io, path = AtomicCheckpointIO(), tmp_path / "sub" / "a.ckpt"
    io.save_checkpoint({"x": 1}, path)
    assert io.load_checkpoint(path) == {"x": 1}
    path.unlink()
    path.mkdir()  # a directory of that name is replaced
    (path / "old").touch()
    io.save_checkpoint({"x": 2}, path)
    assert io.load_checkpoint(path) == {"x": 2}
    link = tmp_path / "sub" / "last.ckpt"
    link.symlink_to("a.ckpt")
    io.save_checkpoint({"x": 3}, link)  # the link is replaced, not what it points to
    assert io.load_checkpoint(path) == {"x": 2}
    folder = tmp_path / "sub" / "dir.ckpt"
    folder.mkdir()
    (folder / "shard").touch()
    io.remove_checkpoint(folder)
    io.remove_checkpoint(link)
    assert [p.name for p in (tmp_path / "sub").iterdir()] == ["a.ckpt"]

    class Unpicklable:
        def __reduce__(self) -> Any:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        io.save_checkpoint({"x": Unpicklable()}, path)
    assert io.load_checkpoint(path) == {"x": 2}
    assert [p.name for p in path.parent.iterdir()] == ["a.ckpt"]  # the disk may be full of the rest
