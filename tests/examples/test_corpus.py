"""Preparing tokens on disk: caching and atomicity."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from pretraining import corpus, text
from pretraining.corpus import CorpusSettings


def _settings(folder: Path, **changes: object) -> CorpusSettings:
    values = {"text": str(folder), "block_size": 32, "val_fraction": 0.1, "test_fraction": 0.1}
    return CorpusSettings(**(values | changes))  # type: ignore[arg-type]


def test_blocks_are_the_files(text_folder: Path, tmp_path: Path) -> None:
    settings = _settings(text_folder)
    prepared = corpus.prepare(settings, tmp_path / "cache")
    files = text.split_files(
        text.read_files(text.find_files(text_folder)),
        val_fraction=settings.val_fraction,
        test_fraction=settings.test_fraction,
        seed=settings.split_seed,
    )
    for split in text.SPLITS:
        expected = b"".join(file.content + b"\0" for file in files[split])
        blocks = prepared.blocks(split)
        assert blocks.shape == (len(expected) // 33, 33)
        tokens = blocks.ravel()
        ends = tokens == 256
        assert bytes(np.where(ends, 0, tokens).astype(np.uint8)) == expected[: len(tokens)]
        assert prepared.num_bytes[split] == sum(len(file.content) for file in files[split])
        assert prepared.num_files[split] == len(files[split])


def test_second_run_reuses(text_folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = corpus.prepare(_settings(text_folder), cache)
    written = first.path.stat().st_mtime_ns
    assert corpus.prepare(_settings(text_folder), cache).fingerprint == first.fingerprint
    assert first.path.stat().st_mtime_ns == written
    assert os.listdir(cache) == [first.path.name]


def test_key_follows_settings_and_files(text_folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = corpus.prepare(_settings(text_folder), cache)
    assert corpus.prepare(_settings(text_folder, split_seed=1), cache).path != first.path
    for unread in ({"block_size": 64}, {"vocab_size": 512}):  # tokens do not depend on these
        assert corpus.prepare(_settings(text_folder, **unread), cache).path == first.path
    (text_folder / "new.txt").write_text("one more file\n" * 20)
    changed = corpus.prepare(_settings(text_folder), cache)
    assert changed.path != first.path
    assert changed.fingerprint != first.fingerprint


def test_interrupted_preparation_leaves_nothing(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "_tokenize", fail)
        with pytest.raises(KeyboardInterrupt):
            corpus.prepare(_settings(text_folder), cache)
    assert os.listdir(cache) == []
    with pytest.raises(FileNotFoundError, match="No prepared text"):
        corpus.load(_settings(text_folder), cache)


def test_concurrent_preparation(text_folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(corpus.prepare, _settings(text_folder), cache) for _ in range(4)]
        results = [job.result() for job in jobs]
    assert len({result.fingerprint for result in results}) == 1
    assert os.listdir(cache) == [results[0].path.name]


def test_bpe_corpus(text_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="BPE needs tokenizers")
    settings = _settings(text_folder, tokenizer="bpe", vocab_size=300)
    prepared = corpus.prepare(settings, tmp_path / "cache")
    assert len(prepared.tokens["train"]) < prepared.num_bytes["train"]
    decoded = prepared.tokenizer().decode(prepared.blocks("train")[0].tolist())
    assert "word" in decoded
    # The trained tokenizer can be given back by its path.
    again = _settings(text_folder, tokenizer=str(prepared.path.with_suffix(".json")))
    assert corpus.prepare(again, tmp_path / "cache").fingerprint == prepared.fingerprint


def test_too_little_text(text_folder: Path, tmp_path: Path) -> None:
    prepared = corpus.prepare(_settings(text_folder, block_size=100_000), tmp_path / "cache")
    with pytest.raises(ValueError, match="train split holds .* less than one block of 100001"):
        prepared.blocks("train")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size=1"),
        ({"val_fraction": 0.0}, "between 0 and 0.5"),
        ({"tokenizer": "bpe", "vocab_size": 100}, "vocab_size=100.*258"),
    ],
)
def test_wrong_settings(changes: dict[str, object], message: str, text_folder: Path) -> None:
    if "tokenizer" in changes:
        pytest.importorskip("tokenizers", reason="BPE needs tokenizers")
    with pytest.raises(ValueError, match=message):
        _settings(text_folder, **changes)
