"""Damaged bytes are found before anything is loaded, and named; checksums of what is written."""

from __future__ import annotations

import io
import random
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lq_testing.damage import flip_bit, truncate, weight_offset, zero_page
from torch.distributed.checkpoint import FileSystemReader

from lq_lightning.checkpoint.files import ChecksumFile
from lq_lightning.checkpoint.folder import ShardedCheckpoint
from lq_lightning.checkpoint.single_file import AtomicCheckpointIO, load_full_checkpoint


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "fullFalse.ckpt", tmp_path / "a.ckpt"))


@pytest.fixture
def file(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(saved / "fullTrue.ckpt", tmp_path / "a.ckpt"))


def _leaf(folder: Path, start: str) -> tuple[Path, int]:
    """Return the data file with the largest leaf whose name starts so, and the leaf's middle."""
    stored = FileSystemReader(folder).read_metadata().storage_data
    found = [info for index, info in stored.items() if index.fqn.startswith(start)]
    largest = max(found, key=lambda info: info.length)
    return folder / largest.relative_path, largest.offset + largest.length // 2


def _flip_leaf(start: str) -> Callable[[Path], str]:
    def flip(folder: Path) -> str:
        path, offset = _leaf(folder, start)
        flip_bit(path, offset)
        return path.name

    return flip


def _flip_file(name: str) -> Callable[[Path], str]:
    def flip(folder: Path) -> str:
        flip_bit(folder / name, (folder / name).stat().st_size // 2)
        return name

    return flip


def _zero_page(folder: Path) -> str:
    path, offset = _leaf(folder, "state_dict.")
    zero_page(path, offset)
    return path.name


def _truncate(name: str) -> Callable[[Path], str]:
    def cut(folder: Path) -> str:
        truncate(folder / name, (folder / name).stat().st_size - 1)
        return name

    return cut


def _swap(first: str, second: str) -> Callable[[Path], str]:
    def swap(folder: Path) -> str:
        (folder / first).rename(folder / "aside")
        (folder / second).rename(folder / first)
        (folder / "aside").rename(folder / second)
        return first

    return swap


def _delete(name: str) -> Callable[[Path], str]:
    def delete(folder: Path) -> str:
        (folder / name).unlink()
        return name

    return delete


def _append(folder: Path) -> str:
    with (folder / "__0_0.distcp").open("ab") as data:
        data.write(b"\0")
    return "__0_0.distcp"


DAMAGE = {
    "a bit of a weight": _flip_leaf("state_dict."),
    "a bit of a moment": _flip_leaf("optimizer_0.state."),
    "a bit of a replica": _flip_leaf("replica."),
    "a page of a weight": _zero_page,
    "data too long": _append,
    "data swapped": _swap("__0_0.distcp", "__1_0.distcp"),
    "other files swapped": _swap("meta.pt", ".metadata"),
    **{f"a bit of {name}": _flip_file(name) for name in (".metadata", "meta.pt", "checksums.json")},
    **{
        f"{name} {kind.__name__}": kind(name)
        for name in (".metadata", "meta.pt", "checksums.json", "__1_0.distcp")
        for kind in (_truncate, _delete)
        if (name, kind) != ("checksums.json", _truncate)  # its last byte is a line's end
    },
}


@pytest.mark.parametrize("kind", list(DAMAGE))
def test_damage_of_a_directory_is_named(folder: Path, kind: str) -> None:
    ShardedCheckpoint(folder)
    name = DAMAGE[kind](folder)
    with pytest.raises(ValueError, match=rf"a\.ckpt`.*{name}.*Resume from another checkpoint"):
        ShardedCheckpoint(folder)


def test_verification_can_be_turned_off(folder: Path) -> None:
    DAMAGE["a bit of a replica"](folder)
    ShardedCheckpoint(folder, verify=False)
    (folder / "checksums.json").unlink()
    ShardedCheckpoint(folder, verify=False)


def test_a_file_that_was_never_written_is_not_trusted(folder: Path) -> None:
    listed = (folder / "checksums.json").read_text().replace("__1_0", "__2_0")
    (folder / "checksums.json").write_text(listed)
    with pytest.raises(ValueError, match=r"__1_0.distcp is not listed in checksums.json"):
        ShardedCheckpoint(folder)


@pytest.mark.parametrize("kind", ["bit", "page", "cut"])
def test_damage_of_a_file_is_named(file: Path, kind: str) -> None:
    expected = torch.load(file, weights_only=True)
    damage: dict[str, Callable[[], None]] = {
        "bit": lambda: flip_bit(file, weight_offset(file)),
        "page": lambda: zero_page(file, weight_offset(file)),
        "cut": lambda: truncate(file, file.stat().st_size - 1),
    }
    damage[kind]()
    with pytest.raises(ValueError, match=r"a\.ckpt` .*Resume from another checkpoint"):
        load_full_checkpoint(file, None)
    if kind == "bit":
        with pytest.raises(ValueError, match=r"a\.ckpt` is damaged: record .*/data/\d+"):
            AtomicCheckpointIO().load_checkpoint(file)
        for loaded in (
            load_full_checkpoint(file, None, verify=False),
            AtomicCheckpointIO(verify=False).load_checkpoint(file),
        ):
            assert loaded["state_dict"].keys() == expected["state_dict"].keys()


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
