"""Damaged bytes are found before anything is loaded, and named; checksums of what is written."""

from __future__ import annotations

import io
import random
import shutil
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from lq_testing.damage import flip_bit, truncate, weight_offset

from lq_lightning.checkpoint.files import ChecksumFile
from lq_lightning.checkpoint.folder import ShardedCheckpoint
from lq_lightning.checkpoint.single_file import AtomicCheckpointIO, load_full_checkpoint


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "fullFalse.ckpt", tmp_path / "a.ckpt"))


def _flip(file: Path) -> None:
    flip_bit(file, file.stat().st_size // 2)


def _cut(file: Path) -> None:
    truncate(file, file.stat().st_size - 1)


def _lengthen(file: Path) -> None:
    with file.open("ab") as data:
        data.write(b"\0")


def _swap(file: Path) -> None:
    names = ("__0_0.distcp", "__1_0.distcp") if "distcp" in file.name else (".metadata", "meta.pt")
    one, other = (file.parent / name for name in names)
    (content, others) = one.read_bytes(), other.read_bytes()
    one.write_bytes(others)
    other.write_bytes(content)


@pytest.mark.parametrize("change", [_flip, _cut, _lengthen, _swap, Path.unlink])
@pytest.mark.parametrize("name", [".metadata", "meta.pt", "checksums.json", "__0_0.distcp"])
def test_damage_of_a_directory_is_named(
    folder: Path, name: str, change: Callable[[Path], object]
) -> None:
    if name == "checksums.json" and change in (_cut, _swap):
        return  # its last byte is a line's end; nothing has its form
    ShardedCheckpoint(folder)
    change(folder / name)
    with pytest.raises(ValueError, match=rf"a\.ckpt`.*{name}.*Resume from another checkpoint"):
        ShardedCheckpoint(folder)


def test_verification_can_be_turned_off(folder: Path) -> None:
    _flip(folder / "__0_0.distcp")
    ShardedCheckpoint(folder, verify=False)
    (folder / "checksums.json").unlink()
    ShardedCheckpoint(folder, verify=False)


def test_a_file_that_was_never_written_is_not_trusted(folder: Path) -> None:
    listed = (folder / "checksums.json").read_text().replace("__1_0", "__2_0")
    (folder / "checksums.json").write_text(listed)
    with pytest.raises(ValueError, match=r"__1_0.distcp is not listed in checksums.json"):
        ShardedCheckpoint(folder)


def test_damage_of_a_file_is_named(saved: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(saved / "fullTrue.ckpt", tmp_path / "a.ckpt"))
    expected = torch.load(file, weights_only=True)
    flip_bit(file, weight_offset(file))
    text = r"a\.ckpt` is damaged: record .*/data/\d+.*Resume from another checkpoint"
    full = partial(load_full_checkpoint, weights_only=None)
    for load in (full, AtomicCheckpointIO().load_checkpoint):
        with pytest.raises(ValueError, match=text):
            load(file)
    for loaded in (
        load_full_checkpoint(file, None, verify=False),
        AtomicCheckpointIO(verify=False).load_checkpoint(file),
    ):
        assert loaded["state_dict"].keys() == expected["state_dict"].keys()
    _cut(file)
    with pytest.raises(ValueError, match=r"a\.ckpt` .*Resume from another checkpoint"):
        load_full_checkpoint(file, None)


def test_no_flipped_bit_of_a_file_changes_what_is_loaded(tmp_path: Path) -> None:
    path, expected = tmp_path / "a.ckpt", torch.arange(100)
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"w": expected}}, path)
    content, choose, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(200):
        path.write_bytes(content)
        flip_bit(path, choose.randrange(len(content)), choose.randrange(8))
        try:
            loaded = load_full_checkpoint(path, None)["state_dict"]["w"]
        except ValueError:
            refused += 1
        else:  # between the records lies padding
            assert torch.equal(loaded, expected)
    assert refused > 50


def test_files_without_checksums_load(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"x": torch.ones(2)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert {info.CRC for info in zipfile.ZipFile(path).infolist()} == {0}
    assert torch.equal(load_full_checkpoint(path, None)["x"], torch.ones(2))


def test_checksum_file(tmp_path: Path) -> None:
    path, choose = tmp_path / "a", random.Random(0)
    with ChecksumFile(path) as file:
        for nbytes in (0, 1, 5000, (1 << 20) - 1, 1 << 20, 3 << 20, 7):
            assert file.write(choose.randbytes(nbytes)) == nbytes
            assert file.tell() == file.checksum().nbytes
        with pytest.raises(io.UnsupportedOperation):
            file.seek(0)
    content = path.read_bytes()
    assert file.checksum().nbytes == len(content)
    assert file.checksum().crc32 == zlib.crc32(content)
