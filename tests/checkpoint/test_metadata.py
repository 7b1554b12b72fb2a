"""Crafted and broken checkpoints: nothing runs, and errors name the file and the remedy."""

from __future__ import annotations

import builtins
import collections
import contextlib
import copyreg
import functools
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.state_dict_saver import save

from lq_lightning.checkpoint.consolidate import consolidate_checkpoint, main
from lq_lightning.checkpoint.folder import ShardedCheckpoint, read_metadata
from lq_lightning.checkpoint.single_file import load_archive, load_full_checkpoint

SHARED = (Metadata, StorageMeta, *_MEM_FORMAT_ENCODING)  # by all of the process
STATE = {
    "state_dict": {"w": torch.arange(6.0), "h": torch.ones(4, dtype=torch.bfloat16)},
    "optimizer_0": {"state": {"w": {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]},
}


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.parts = (function, args)

    def __reduce__(self) -> Any:
        return self.parts


def _text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def _reaches_through(module: str, name: str, argument: str) -> bytes:
    """Name what a module has imported: `module.os.system(argument)`."""
    return b"\x80\x04" + _text(module) + _text(name) + b"\x93" + _text(argument) + b"\x85R."


def _name(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + b"\x93"


def _sets(*attributes: tuple[bytes, str, bytes]) -> bytes:
    """`setattr(owner, attribute, value)` for each of them."""
    parts = [o + b"N}" + _text(a) + v + b"s\x86b" for o, a, v in attributes]
    return b"\x80\x04" + b"0".join(parts) + b"."


def _crafted(command: str) -> dict[str, bytes]:
    run = Call(os.system, command)
    nested = Metadata(state_dict_metadata={}, planner_data=[run])
    metadata = "torch.distributed.checkpoint.metadata"
    described = _name(metadata, "Metadata")
    encoding = _name(metadata, "_MEM_FORMAT_ENCODING")
    return {
        "os.system": pickle.dumps(run),
        "protocol 0": pickle.dumps(run, protocol=0),
        "eval": pickle.dumps(Call(builtins.eval, f"__import__('os').system({command!r})")),
        "nested": pickle.dumps(nested),
        "copyreg": pickle.dumps(Call(copyreg._reconstructor, Call, object, None)),  # type: ignore[attr-defined]
        "partial": pickle.dumps(Call(functools.partial, os.system, command)),
        "getattr": pickle.dumps(Call(getattr, Path, "cwd")),
        "torch.load": pickle.dumps(Call(torch.load, command)),
        "attribute of a module": _reaches_through(metadata, "os.system", command),
        "function of torch": _reaches_through("torch", "load", command),
        "attribute of torch": _reaches_through("torch", "os.system", command),
        "hidden in torch": _reaches_through("torch.serialization", "os.system", command),
        # what follows would hold for the whole process
        "class": _sets((described, "__str__", _name("collections", "OrderedDict"))),
        "two classes": _sets((_name(metadata, "StorageMeta"), "a", b"N"), (described, "a", b"N")),
        "name of a class": _sets((described, "__qualname__", _text("Other"))),
        "member of an enum": _sets((encoding + b"K\x00\x85R", "_value_", b"K\x09")),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory without checksums, as torch.distributed.checkpoint writes it."""
    path = tmp_path / "a.ckpt"
    save(STATE, checkpoint_id=path, no_dist=True)
    torch.save({"global_step": 3}, path / "meta.pt")
    return path


@pytest.mark.parametrize("kind", list(_crafted("")))
def test_crafted_metadata_runs_nothing(folder: Path, kind: str) -> None:
    ran = folder.parent / "ran"
    (folder / ".metadata").write_bytes(_crafted(f"touch {ran}")[kind])
    before = [(str(shared), dict(vars(shared))) for shared in SHARED]
    message = r"a.ckpt/.metadata` asks for (.|\n)*weights_only=False"
    with pytest.raises(pickle.UnpicklingError, match=message):
        ShardedCheckpoint(folder)
    assert not ran.exists()
    assert [(str(shared), dict(vars(shared))) for shared in SHARED] == before


def test_crafted_metadata_does_not_reach_the_layouts_of_torch(folder: Path) -> None:
    cached = b"}" + _text("torch.strided") + b"K\x09s"
    layout = _name("torch.serialization", "_get_layout")
    (folder / ".metadata").write_bytes(_sets((layout, "cache", cached)))
    with pytest.raises(ValueError, match=r"a.ckpt/.metadata` is cut off or damaged"):
        ShardedCheckpoint(folder)
    assert pickle.loads(pickle.dumps(torch.strided)) is torch.strided


def test_crafted_metadata_runs_nothing_on_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = folder.parent / "ran"
    (folder / ".metadata").write_bytes(_crafted(f"touch {ran}")["nested"])
    with pytest.raises(SystemExit):
        main([str(folder), str(folder.parent / "out.ckpt")])
    assert "--no-weights-only" in capsys.readouterr().err
    assert not ran.exists()
    with pytest.raises(ValueError, match="was not written by"):
        ShardedCheckpoint(folder, weights_only=False)
    assert ran.exists()  # as asked for


def _put_into_leaf(folder: Path, evil: Call) -> None:
    shutil.rmtree(folder)
    save({**STATE, "note": evil}, checkpoint_id=folder, no_dist=True)
    torch.save({}, folder / "meta.pt")


def _put_into_tensor(folder: Path, evil: Call) -> None:
    metadata = FileSystemReader(folder).read_metadata()
    data = folder / "__0_0.distcp"
    for info in metadata.storage_data.values():
        info.offset = data.stat().st_size
    with data.open("ab") as file:
        torch.save(evil, file)
    for info in metadata.storage_data.values():
        info.length = data.stat().st_size - info.offset
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _put_into_meta(folder: Path, evil: Call) -> None:
    torch.save({"note": evil}, folder / "meta.pt")


@pytest.mark.parametrize("put", [_put_into_leaf, _put_into_tensor, _put_into_meta])
def test_other_crafted_files_run_nothing(folder: Path, put: Callable[[Path, Call], None]) -> None:
    ran = folder.parent / "ran"
    put(folder, Call(os.system, f"touch {ran}"))
    with pytest.raises(pickle.UnpicklingError, match=r"a\.ckpt(.|\n)*weights_only=False"):
        _read_all(folder)
    assert not ran.exists()
    alone = folder.parent / "one.ckpt"
    torch.save({"state_dict": {}, "note": Call(os.system, f"touch {ran}")}, alone)
    with pytest.raises(pickle.UnpicklingError, match=r"one.ckpt(.|\n)*weights_only=False"):
        load_full_checkpoint(alone, None)
    assert not ran.exists()


def _read_all(folder: Path) -> None:
    consolidate_checkpoint(folder, folder.parent / "out.ckpt")


def test_real_metadata_loads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("lq_lightning.checkpoint.folder.rank_zero_info", said.append)
    checkpoint = ShardedCheckpoint(folder)
    assert [text for text in said if "a.ckpt` has no checksums.json" in text] == said
    assert len(said) == 1
    expected = FileSystemReader(folder).read_metadata()
    assert checkpoint.entries == expected.state_dict_metadata
    assert checkpoint.paths == expected.planner_data
    flat: dict[str, Any] = {"state_dict.w": torch.zeros(6), "state_dict.h": torch.zeros(4)}
    checkpoint.load(flat)
    assert torch.equal(flat["state_dict.w"], torch.arange(6.0))
    assert torch.equal(flat["state_dict.h"], torch.ones(4))


def test_everything_that_metadata_may_hold_loads(folder: Path) -> None:
    metadata = FileSystemReader(folder).read_metadata()
    entry = metadata.state_dict_metadata["state_dict.w"]
    dtypes = [v for v in vars(torch).values() if isinstance(v, torch.dtype)]
    assert torch.float8_e4m3fn in dtypes
    formats = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
    properties = [TensorProperties(dtype=dtype) for dtype in dtypes]
    properties += [TensorProperties(memory_format=value) for value in formats]
    properties += [TensorProperties(layout=torch.sparse_coo)]
    metadata.planner_data = collections.OrderedDict(properties=properties, entry=entry)
    metadata.storage_meta.checkpoint_id = Path("/somewhere/else")
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=protocol))
        read = read_metadata(folder, weights_only=True)
        assert read.planner_data == metadata.planner_data
        assert read.storage_data == metadata.storage_data
        assert str(read.storage_meta.checkpoint_id) == "/somewhere/else"
    # Python 3.13 wrote this module's name
    renamed = pickle.dumps(metadata, protocol=2).replace(b"cpathlib\n", b"cpathlib._local\n")
    (folder / ".metadata").write_bytes(renamed)
    assert read_metadata(folder, weights_only=True).storage_data == metadata.storage_data


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _random(content: bytes) -> bytes:
    return random.Random(0).randbytes(len(content))


@pytest.mark.parametrize("change", [lambda content: b"", _cut, _random])
@pytest.mark.parametrize("name", [".metadata", "meta.pt"])
def test_broken_files_are_named(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    file = folder / name
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=rf"a.ckpt/{name}` is .*Resume from another"):
        _read_all(folder)
    file.unlink()
    with pytest.raises(ValueError, match=rf"a.ckpt` is no complete .*: {name} missing.*Resume"):
        _read_all(folder)


def test_metadata_of_another_form_is_refused(folder: Path) -> None:
    path, real = folder / ".metadata", FileSystemReader(folder).read_metadata()
    for content, message in (
        ({"a": 1}, "holds a dict instead"),
        (Metadata(state_dict_metadata=None), "was not written by"),  # type: ignore[arg-type]
        (Metadata(state_dict_metadata={}, storage_data={1: 2}), "was not written by"),
        (Metadata(state_dict_metadata={}, planner_data=[1]), "was not written by"),
    ):
        path.write_bytes(pickle.dumps(content))
        with pytest.raises(ValueError, match=rf"a.ckpt/.metadata` .*{message}.*Resume"):
            ShardedCheckpoint(folder)
    for info in real.storage_data.values():
        info.relative_path = "../other.distcp"
    path.write_bytes(pickle.dumps(real))
    with pytest.raises(ValueError, match=r"refers to `../other.distcp`"):
        ShardedCheckpoint(folder)


def test_no_change_of_a_byte_escapes_as_another_error(folder: Path) -> None:
    path = folder / ".metadata"
    content, choose = path.read_bytes(), random.Random(0)
    for _ in range(200):
        changed = bytearray(content)
        changed[choose.randrange(len(content))] = choose.randrange(256)
        path.write_bytes(changed)
        with contextlib.suppress(ValueError, pickle.UnpicklingError):
            ShardedCheckpoint(folder)


def test_legacy_files_of_torch_load(tmp_path: Path) -> None:
    path = tmp_path / "old.ckpt"
    torch.save({"x": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    loaded: Tensor = load_full_checkpoint(path, None)["x"]
    assert torch.equal(loaded, torch.ones(2))
    torch.save(torch.ones(2), path)
    with pytest.raises(ValueError, match="holds a Tensor, not a checkpoint"):
        load_archive(path, weights_only=True)
