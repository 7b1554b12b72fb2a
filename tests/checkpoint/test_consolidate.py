"""`python -m lq_lightning.checkpoint.consolidate` and the function behind it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from lq_testing.checkpoints import fit
from lq_testing.lightning_models import TinyModule, quiet

from lq_lightning.checkpoint.consolidate import consolidate_checkpoint, main


def test_consolidated_files_hold_the_same(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(tmp_path)
    sharded = saved / "fullFalse.ckpt"
    weights, _ = torch.load(saved / "expectedFalse.pt")
    one = tmp_path / "one.ckpt"
    main([str(sharded), str(one)])
    assert capsys.readouterr().out == f"Wrote {one} ({one.stat().st_size / 1e6:.2f} MB).\n"
    loaded = TinyModule.load_from_checkpoint(one)
    assert all(torch.equal(p, weights[n]) for n, p in loaded.named_parameters())
    checkpoint = torch.load(one, weights_only=True)
    direct = torch.load(saved / "fullTrue.ckpt", weights_only=True)
    assert checkpoint["optimizer_states"][0].keys() == direct["optimizer_states"][0].keys()
    assert checkpoint["lq_lightning"]["tensors"].keys() == weights.keys()
    quiet()
    run, _ = fit(root, TinyModule(), "auto", devices=1, ckpt_path=str(one), max_epochs=2)
    assert run.global_step == 12

    load_file = pytest.importorskip("safetensors.torch").load_file
    out = tmp_path / "model.safetensors"
    main([str(sharded), str(out), "--format", "safetensors", "--prefix", "net."])
    assert all(torch.equal(t, weights[f"net.{n}"]) for n, t in load_file(out).items())
    assert f"Wrote {out} (" in capsys.readouterr().out
    loaded.net.load_state_dict(load_file(out))
    consolidate_checkpoint(one, tmp_path / "b.safetensors", "safetensors")
    assert load_file(tmp_path / "b.safetensors").keys() == weights.keys()
    for arguments, message in (
        (["absent", "x"], "Checkpoint file not found: "),
        ([str(sharded), str(sharded)], "choose another name"),
        ([str(sharded), str(sharded / "meta.pt")], "choose another name"),
        ([str(one), str(one)], "choose another name"),
        ([str(sharded), root], "is a directory: give the name of a file in it"),
        ([str(sharded), "/dev/null/x"], "`/dev/null/x` could not be written"),
        ([str(sharded), "x", "--prefix", "net."], "format='safetensors'` only"),
        ([str(sharded), "x", "--format", "safetensors", "--prefix", "m."], r"start with ['net.']"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="format='zip'"):
        consolidate_checkpoint(one, "x", "zip")  # type: ignore[arg-type]


def test_a_consolidated_file_may_be_read_by_whom_the_umask_says(tmp_path: Path) -> None:
    pytest.importorskip("safetensors.torch")
    torch.save({"state_dict": {"weight": torch.ones(2, 3)}}, tmp_path / "whole.ckpt")
    for umask, expected in ((0o022, 0o644), (0o027, 0o640)):
        before = os.umask(umask)
        try:
            for format in ("lightning", "safetensors"):
                consolidate_checkpoint(tmp_path / "whole.ckpt", tmp_path / "out", format)
                assert (tmp_path / "out").stat().st_mode & 0o777 == expected, format
        finally:
            os.umask(before)


def test_tied_weights_of_a_file_are_written_once_and_equal_ones_as_they_are(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    one, rows = torch.ones(2, 3), torch.arange(12.0).view(4, 3)
    state = {"m.a": one, "m.equal": one.clone(), "m.tied": one, "m.row": rows[1:2], "m.t": rows.T}
    state["m.rows"] = rows
    torch.save({"state_dict": state}, tmp_path / "a.ckpt")
    consolidate_checkpoint(tmp_path / "a.ckpt", tmp_path / "a", "safetensors", prefix="m.")
    found = load_file(tmp_path / "a")
    assert found.keys() == {"a", "equal", "row", "rows", "t"}
    assert all(torch.equal(tensor, state[f"m.{name}"]) for name, tensor in found.items())
    consolidate_checkpoint(tmp_path / "a.ckpt", tmp_path / "b", "safetensors", prefix="m.t")
    assert load_file(tmp_path / "b").keys() == {"ied", ""}  # its other name was not asked for


def test_a_full_disk_is_an_error(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match=r"one.ckpt` could not be written .*No space left"):
        consolidate_checkpoint(saved / "fullFalse.ckpt", tmp_path / "one.ckpt")
    assert not list(tmp_path.iterdir())


def test_safetensors_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    torch.save({"state_dict": {"a": torch.ones(1)}}, tmp_path / "a.ckpt")
    with pytest.raises(ModuleNotFoundError, match="pip install safetensors"):
        consolidate_checkpoint(tmp_path / "a.ckpt", tmp_path / "b", "safetensors")
