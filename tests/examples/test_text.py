"""Finding, splitting and tokenizing text, and the prepared corpus on disk."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from pretraining import text
from pretraining.text import CorpusSettings


def _settings(folder: Path, **changes: object) -> CorpusSettings:
    values = {"text": str(folder), "val_fraction": 0.1, "test_fraction": 0.1}
    return CorpusSettings(**(values | changes))  # type: ignore[arg-type]


def _files(folder: Path) -> dict[str, bytes]:
    return text.read_files(_settings(folder).find_files())


def _split(files: dict[str, bytes], seed: int = 0) -> dict[text.Split, dict[str, bytes]]:
    return text.split_files(files, val_fraction=0.1, test_fraction=0.1, seed=seed)


def test_read_leaves_out_what_is_no_text(text_folder: Path) -> None:
    paths = list(_files(text_folder))
    assert paths == sorted(paths)
    assert len(paths) == 30  # one of the two equal files, none of the other extras
    assert not {"image.bin", "latin.txt", "empty.txt", ".hidden/secret.txt"} & set(paths)
    assert "copy.txt" in paths
    assert "part0/file00.txt" not in paths


def test_endings_with_and_without_dots(text_folder: Path) -> None:
    assert list(_settings(text_folder, suffixes=("bin",)).find_files()) == ["image.bin"]
    dotted, plain = (_settings(text_folder, suffixes=(end,)) for end in (".txt", "txt"))
    assert dotted.find_files() == plain.find_files()


def test_standard_library_is_the_default() -> None:
    paths = CorpusSettings().find_files()
    assert "argparse.py" in paths
    assert all(path.endswith(".py") for path in paths)
    assert not any("site-packages" in path or path.startswith("test/") for path in paths)


def test_split_is_disjoint_complete_and_by_whole_files(text_folder: Path) -> None:
    files = _files(text_folder)
    split = _split(files)
    assert split["train"] | split["val"] | split["test"] == files
    assert sum(map(len, split.values())) == len(files)
    held_out = sum(map(len, split["val"].values()))
    assert 0.1 <= held_out / sum(map(len, files.values())) < 0.15


def test_split_is_deterministic_and_stable_when_a_file_comes(text_folder: Path) -> None:
    files = _files(text_folder)
    before = _split(files)
    assert before == _split(dict(reversed(files.items())))
    assert before != _split(files, seed=1)
    after = _split({**files, "new.txt": b"new text"})
    assert len(before["val"].keys() ^ after["val"].keys()) <= 2


@pytest.mark.parametrize(
    ("suffixes", "message"),
    [([".rs"], r"holds no files ending in \['.rs'\].*--data.suffixes"), ([".bin"], "UTF-8 text")],
)
def test_folder_without_text(text_folder: Path, suffixes: list[str], message: str) -> None:
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        text.read_files(_settings(text_folder, suffixes=tuple(suffixes)).find_files())


def test_too_few_files_to_hold_any_out() -> None:
    with pytest.raises(ValueError, match="at least 3 files"):
        _split({"a": b"a", "b": b"b"})


def test_bytes_round_trip() -> None:
    tokenizer = text.ByteTokenizer()
    content = "def grüße():\n\treturn 'ß'".encode()
    ids = tokenizer.encode(content)
    assert ids.max() < tokenizer.eof_id < tokenizer.vocab_size
    assert tokenizer.decode([*ids, tokenizer.eof_id]).encode() == content


def test_bpe_errors(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="BPE needs tokenizers")
    with pytest.raises(FileNotFoundError, match="neither 'byte' nor 'bpe'"):
        text.BPETokenizer(tmp_path / "missing.json")
    path = tmp_path / "no_end.json"
    text.import_tokenizers().ByteLevelBPETokenizer().save(str(path))
    with pytest.raises(ValueError, match="none of the end-of-text tokens"):
        text.BPETokenizer(path)


def test_blocks_are_the_files(text_folder: Path, tmp_path: Path) -> None:
    prepared = text.prepare(_settings(text_folder), tmp_path / "cache")
    files = _split(_files(text_folder))
    for split in text.SPLITS:
        expected = b"".join(content + b"\0" for content in files[split].values())
        blocks = prepared.blocks(split, 32)
        assert blocks.shape == (len(expected) // 33, 33)
        tokens = blocks.ravel()
        ends = tokens == 256
        assert bytes(np.where(ends, 0, tokens).astype(np.uint8)) == expected[: len(tokens)]
    with pytest.raises(ValueError, match="train split holds .* less than one block of 100001"):
        prepared.blocks("train", 100_000)


def test_corpus_is_prepared_once_for_settings_and_files(text_folder: Path, tmp_path: Path) -> None:
    cache, settings = tmp_path / "cache", _settings(text_folder)
    first, path = text.prepare(settings, cache), settings.path(cache)
    written = path.stat().st_mtime_ns
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(text.prepare, settings, cache) for _ in range(4)]
    assert {job.result().fingerprint for job in jobs} == {first.fingerprint}
    assert path.stat().st_mtime_ns == written
    assert os.listdir(cache) == [path.name]
    assert _settings(text_folder, split_seed=1).path(cache) != path
    assert _settings(text_folder, vocab_size=512).path(cache) == path  # bytes do not depend on it
    (text_folder / "new.txt").write_text("one more file\n" * 20)
    assert settings.path(cache) != path
    assert text.prepare(settings, cache).fingerprint != first.fingerprint


def test_interrupted_preparation_leaves_nothing(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(text, "_tokenize", fail)
    with pytest.raises(KeyboardInterrupt):
        text.prepare(_settings(text_folder), tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_concurrent_preparation(text_folder: Path, tmp_path: Path) -> None:
    cache, settings = tmp_path / "cache", _settings(text_folder)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(text.prepare, settings, cache) for _ in range(4)]
    assert len({job.result().fingerprint for job in jobs}) == 1
    assert os.listdir(cache) == [settings.path(cache).name]


def test_bpe_corpus(text_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="BPE needs tokenizers")
    settings = _settings(text_folder, tokenizer="bpe", vocab_size=300)
    first, second = (text.prepare(settings, tmp_path / name) for name in ("a", "b"))
    assert first.fingerprint == second.fingerprint  # training is deterministic
    tokenizer, content = first.tokenizer, next(iter(_files(text_folder).values()))
    ids = tokenizer.encode(content)
    assert len(ids) < len(content)
    assert np.all(ids < tokenizer.vocab_size)
    assert tokenizer.vocab_size % 8 == 0
    assert tokenizer.decode([*ids, tokenizer.eof_id]).encode() == content
    # The trained tokenizer can be given back by its path.
    trained = settings.path(tmp_path / "a").with_suffix(".json")
    again = _settings(text_folder, tokenizer=str(trained))
    assert text.prepare(again, tmp_path / "a").fingerprint == first.fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"val_fraction": 0.0}, "between 0 and 0.5"),
        ({"tokenizer": "bpe", "vocab_size": 100}, "vocab_size=100.*258"),
    ],
)
def test_wrong_settings(changes: dict[str, object], message: str, text_folder: Path) -> None:
    if "tokenizer" in changes:
        pytest.importorskip("tokenizers", reason="BPE needs tokenizers")
    with pytest.raises(ValueError, match=message):
        _settings(text_folder, **changes)
