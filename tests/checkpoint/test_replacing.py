"""Checkpoints that replace others: by a run that is killed at any point, or by two runs at once."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lq_testing.checkpoints import fit, module, strategy

from lq_lightning.checkpoint import files
from lq_lightning.checkpoint.folder import save_sharded_checkpoint
from lq_lightning.checkpoint.ranks import ALONE
from lq_lightning.checkpoint.single_file import AtomicCheckpointIO

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.symlink")  # audit events of the file system


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _in_child(work: Callable[[], object]) -> int | None:
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    return child.exitcode


def _dying_at(number: int, work: Callable[[], object]) -> Callable[[], object]:
    """``work``, killed before its change of that number to the file system."""

    def run() -> None:
        count = 0

        def die(event: str, *_: Any) -> None:
            nonlocal count
            if event in CHANGES:
                count += 1
                if count > number:
                    _die()

        exchange = files._exchange

        def counted(*names: Path) -> bool:
            die(CHANGES[0])
            return exchange(*names)

        files._exchange = counted
        sys.addaudithook(die)
        work()

    return run


def _make(path: Path, kind: str, content: str) -> None:
    if kind == "folder":
        path.mkdir()
        for name in ("a", "b", "c"):
            (path / name).write_text(content)
    elif kind == "link":
        target = path.parent / f"epoch{content}.ckpt"
        target.mkdir()
        (target / "a").write_text(content)
        path.symlink_to(target.name)
    elif kind == "file":
        path.write_text(content)


def _content(path: Path) -> set[str]:
    """Of all files that belong to a complete checkpoint."""
    if path.is_dir():
        names = {p.name for p in path.iterdir()}
        assert names == ({"a"} if "epoch" in path.resolve().name else {"a", "b", "c"})
        return {p.read_text() for p in path.iterdir()}
    return {path.read_text()}


def _last(folder: Path) -> Path:
    """What Lightning takes for ``ckpt_path="last"``, by its own search."""
    saves = ModelCheckpoint(folder)
    trainer = Trainer(callbacks=[saves], logger=False, accelerator="cpu", devices=1)
    found = trainer._checkpoint_connector._parse_ckpt_path(
        TrainerFn.FITTING, "last", model_provided=True, model_connected=False
    )
    assert found is not None, "the next start would begin at step 0"
    return Path(found)


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize(
    "kinds", ["folder folder", "folder file", "file folder", "link folder", "folder link"]
)
def test_a_process_killed_at_any_point_of_a_replacement_leaves_a_checkpoint(
    tmp_path: Path, kinds: str, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = kinds.split()
    if not exchanges:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    killed, found = 0, set()
    while True:
        folder = tmp_path / str(killed)
        folder.mkdir()
        path, finished = folder / "last.ckpt", folder / ".incomplete"
        _make(path, old, "1")
        _make(finished, new, "2")
        code = _in_child(_dying_at(killed, lambda: files.move_into_place(finished, path)))  # noqa: B023
        found |= _content(_last(folder))
        files.put_back(path)  # as every start with this path does
        assert _content(path) in ({"1"}, {"2"})
        if code == 0:
            break
        assert code == -signal.SIGKILL
        killed += 1
        _make(again := folder / ".again", "folder", "3")
        files.move_into_place(again, path)  # and the next save works
        assert _content(_last(folder)) == _content(path) == {"3"}
        assert not list(folder.glob("*replaced*"))
    assert killed >= 2
    assert found == {"1", "2"}


def test_a_process_killed_while_it_saves_a_file_leaves_the_previous_one_and_no_lock(
    tmp_path: Path,
) -> None:
    io, path = AtomicCheckpointIO(), tmp_path / "last.ckpt"
    io.save_checkpoint({"step": 4}, path)

    def killed() -> None:
        files.move_into_place = lambda *_: _die()  # type: ignore[assignment]
        io.save_checkpoint({"step": 8}, path)

    assert _in_child(killed) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 3  # and two hidden leftovers, used by the next save
    assert io.load_checkpoint(path) == {"step": 4}
    io.save_checkpoint({"step": 9}, path)
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_what_was_removed_does_not_come_back(tmp_path: Path) -> None:
    for number in range(11):  # the leftover's removal takes five changes, as does its own
        path = tmp_path / f"{number}.ckpt"
        _make(path, "folder", "1")
        shutil.copytree(path, tmp_path / f"{number}.replaced.ckpt")  # left by a killed run
        io = AtomicCheckpointIO()
        code = _in_child(_dying_at(number, lambda: io.remove_checkpoint(path)))  # noqa: B023
        files.put_back(path)
        assert path.exists() == (number <= 5)
        if path.exists():
            assert _content(path) == {"1"}
    assert code == 0


def test_links_to_the_last_checkpoint_point_to_one_at_any_time(tmp_path: Path) -> None:
    for number in range(9):
        folder = tmp_path / str(number)
        folder.mkdir()
        _make(link := folder / "last.ckpt", "link", "1")
        previous, newest = folder / "epoch1.ckpt", folder / "epoch2.ckpt"
        shutil.copytree(previous, newest)
        use = strategy()
        use._checkpointer._newest = newest

        def replace() -> None:
            use.remove_checkpoint(str(previous))  # noqa: B023
            files.replace_link(link, newest)  # noqa: B023

        code = _in_child(_dying_at(number, replace))
        assert _content(link) == {"1"}
    assert code == 0
    assert not previous.exists()


# --- a run that is killed -----------------------------------------------------------------------


@pytest.mark.parametrize("by_path", [False, True])
def test_a_run_killed_between_two_renames_goes_on(
    saved: Path, tmp_path: Path, by_path: bool
) -> None:
    shutil.copytree(saved / "fullFalse.ckpt", tmp_path / "last.replaced.ckpt")
    saves = ModelCheckpoint(tmp_path, save_last=True, every_n_epochs=1)
    options = {"callbacks": [saves], "enable_checkpointing": True, "max_epochs": 2, "devices": 1}
    path = str(tmp_path / "last.ckpt") if by_path else "last"
    run, losses = fit(str(tmp_path), module(), strategy(), ckpt_path=path, **options)
    assert (run.global_step, len(losses)) == (12, 8)
    names = {p.name for p in tmp_path.iterdir()}
    assert {"epoch=1-step=12.ckpt", "last.ckpt"} <= names
    assert "last.replaced.ckpt" not in names


def test_a_checkpoint_of_an_exception_that_was_set_aside_is_not_passed_over(
    tmp_path: Path,
) -> None:
    root, saves = str(tmp_path), OnExceptionCheckpoint(tmp_path)
    run, _ = fit(root, module(), strategy(), devices=1, max_steps=2, limit_train_batches=2)
    run.save_checkpoint(tmp_path / "on_exception.replaced.ckpt")  # as on killing in between
    options: Any = {"callbacks": [saves], "devices": 1, "max_steps": 3, "max_epochs": None}
    options["enable_checkpointing"] = True
    with pytest.raises(RuntimeError, match=r"on_exception.ckpt`.*start once more"):
        fit(root, module(), strategy(), **options)
    run, losses = fit(root, module(), strategy(), **options)
    assert (run.global_step, len(losses)) == (3, 1)


# --- two runs ------------------------------------------------------------------------------------


def _save(path: Path, folder: bool) -> None:
    if folder:
        save_sharded_checkpoint({"state_dict": {}}, {}, path, ALONE)
    else:
        AtomicCheckpointIO().save_checkpoint({"x": 1}, path)


def test_two_runs_that_write_one_checkpoint_at_once_are_told(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    with files.sole_writer(path):
        for folder in (False, True):
            with pytest.raises(RuntimeError) as refused:  # the lock holds against its owner, too
                _save(path, folder)
            text = str(refused.value)
            assert f"another process (process {os.getpid()} on" in text
            assert f"is writing `{path}` at this moment" in text
            assert "`ModelCheckpoint(dirpath=...)`" in text
    assert not list(tmp_path.iterdir())
    lock = files._sibling(path, "writing")
    lock.write_text("left by a killed process")
    AtomicCheckpointIO().save_checkpoint({"x": 1}, path)
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_checkpoint_is_not_taken_from_who_replaces_it(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    _make(tmp_path / "last.replaced.ckpt", "folder", "1")
    with files.sole_writer(path), pytest.raises(RuntimeError, match="at this moment"):
        files.put_back(path)
    assert files.put_back(path)
    assert _content(path) == {"1"}


def test_a_replacement_that_fails_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, finished = tmp_path / "last.ckpt", tmp_path / ".incomplete"
    _make(path, "folder", "1")
    _make(finished, "folder", "2")
    monkeypatch.setattr(files, "_exchange", lambda *_: False)
    rename = os.replace

    def fail(*names: Path) -> None:
        monkeypatch.setattr(os, "replace", rename)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        files.move_into_place(finished, path)
    assert _content(path) == {"1"}


@pytest.mark.parametrize("folder", [True, False])
def test_two_runs_that_replace_each_others_checkpoint_are_told(
    tmp_path: Path, folder: bool
) -> None:
    path = tmp_path / "last.ckpt"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _save(path, folder)
        _save(path, folder)
    for _ in range(2):  # another run, which has not saved there before
        assert _in_child(lambda: _save(path, folder)) == 0
    with pytest.warns(UserWarning, match="last.ckpt` was replaced since this run has saved it"):
        _save(path, folder)
