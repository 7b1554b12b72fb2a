"""Finding and splitting text, and tokenizers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pretraining import text


def _files(folder: Path) -> list[text.TextFile]:
    return text.read_files(text.find_files(folder))


def _split(files: list[text.TextFile], seed: int = 0) -> dict[text.Split, list[text.TextFile]]:
    return text.split_files(files, val_fraction=0.1, test_fraction=0.1, seed=seed)


def test_read_leaves_out_what_is_no_text(text_folder: Path) -> None:
    paths = [file.path for file in _files(text_folder)]
    assert paths == sorted(paths)
    assert len(paths) == 30  # one of the two equal files, none of the other extras
    assert not {"image.bin", "latin.txt", "empty.txt", ".hidden/secret.txt"} & set(paths)
    assert "copy.txt" in paths
    assert "part0/file00.txt" not in paths


def test_endings_with_and_without_dots(text_folder: Path) -> None:
    assert list(text.find_files(text_folder, ["bin"])) == ["image.bin"]
    assert text.find_files(text_folder, [".txt"]) == text.find_files(text_folder, ["txt"])


def test_standard_library_is_the_default() -> None:
    paths = text.find_files(None)
    assert "argparse.py" in paths
    assert all(path.endswith(".py") for path in paths)
    assert not any("site-packages" in path or path.startswith("test/") for path in paths)


def test_split_is_disjoint_complete_and_by_whole_files(text_folder: Path) -> None:
    files = _files(text_folder)
    split = _split(files)
    names = {name: {file.path for file in split[name]} for name in text.SPLITS}
    assert names["train"] | names["val"] | names["test"] == {file.path for file in files}
    assert sum(len(chosen) for chosen in names.values()) == len(files)
    contents = {name: {file.content for file in split[name]} for name in text.SPLITS}
    assert not contents["train"] & (contents["val"] | contents["test"])
    total = sum(len(file.content) for file in files)
    held_out = sum(len(file.content) for file in split["val"])
    assert 0.1 <= held_out / total < 0.15


def test_split_is_deterministic_and_stable_when_a_file_comes(text_folder: Path) -> None:
    files = _files(text_folder)
    assert _split(files) == _split(list(reversed(files)))
    assert _split(files) != _split(files, seed=1)
    before = _split(files)
    after = _split([*files, text.TextFile(path="new.txt", content=b"new text")])
    moved = {f.path for f in before["val"]} ^ {f.path for f in after["val"]}
    assert len(moved) <= 2


@pytest.mark.parametrize(
    ("suffixes", "message"),
    [([".rs"], r"holds no files ending in \['.rs'\].*--data.suffixes"), ([".bin"], "UTF-8 text")],
)
def test_folder_without_text(text_folder: Path, suffixes: list[str], message: str) -> None:
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        text.read_files(text.find_files(text_folder, suffixes))


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a folder.*standard library"):
        text.find_files(tmp_path / "nothing")


def test_too_few_files_to_hold_any_out() -> None:
    with pytest.raises(ValueError, match="at least 3 files"):
        _split([text.TextFile(path="a", content=b"a"), text.TextFile(path="b", content=b"b")])


def test_bytes_round_trip() -> None:
    tokenizer = text.ByteTokenizer()
    content = "def grüße():\n\treturn 'ß'".encode()
    ids = tokenizer.encode(content)
    assert ids.max() < tokenizer.eof_id < tokenizer.vocab_size
    assert tokenizer.decode([*ids, tokenizer.eof_id]).encode() == content


def test_bpe_is_deterministic_and_round_trips(text_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="BPE needs tokenizers")
    files = _files(text_folder)
    for name in ("a.json", "b.json"):
        text.train_bpe(files, 300, tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    tokenizer = text.BPETokenizer(tmp_path / "a.json")
    ids = tokenizer.encode(files[0].content)
    assert len(ids) < len(files[0].content)
    assert np.all(ids < tokenizer.vocab_size)
    assert tokenizer.vocab_size % 8 == 0
    assert tokenizer.decode([*ids, tokenizer.eof_id]).encode() == files[0].content


def test_bpe_errors(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="BPE needs tokenizers")
    with pytest.raises(FileNotFoundError, match="neither 'byte' nor 'bpe'"):
        text.BPETokenizer(tmp_path / "missing.json")
    path = tmp_path / "no_end.json"
    text.import_tokenizers().ByteLevelBPETokenizer().save(str(path))
    with pytest.raises(ValueError, match="none of the end-of-text tokens"):
        text.BPETokenizer(path)
