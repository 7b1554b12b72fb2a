"""Prepared text on disk: tokens written once, read back as fixed-length blocks.

``prepare`` tokenizes a folder into ``cache_dir/<key>``, where the key is a hash of the settings and
of every file's path, size and time of change. It writes next to that folder and renames at the
end, so that an interrupted or concurrent preparation never leaves half a corpus behind.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pretraining.text import (
    FEWEST_BPE_TOKENS,
    SPLITS,
    BPETokenizer,
    ByteTokenizer,
    Split,
    TextFile,
    Tokenizer,
    find_files,
    import_tokenizers,
    read_files,
    split_files,
    train_bpe,
)

_FORMAT = 2  # raise when the files below change their meaning

Blocks = np.ndarray  # [blocks, block_size + 1] uint16 or int32, memory-mapped


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSettings:
    """Which tokens a corpus holds and how they are cut: arguments as of ``TextDataModule``."""

    text: str | None = None
    suffixes: tuple[str, ...] | None = None
    tokenizer: str = "byte"
    vocab_size: int = 4096
    block_size: int = 128
    val_fraction: float = 0.05
    test_fraction: float = 0.05
    split_seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        if self.block_size < 2:
            raise ValueError(f"`--data.block_size={self.block_size}` must be at least 2 tokens.")
        for name in ("val_fraction", "test_fraction"):
            if not 0 < getattr(self, name) < 0.5:
                raise ValueError(
                    f"`--data.{name}={getattr(self, name)}` must lie between 0 and 0.5, both "
                    "excluded; 0.05 is usual."
                )
        if self.tokenizer == "bpe":
            import_tokenizers()
            if self.vocab_size < FEWEST_BPE_TOKENS:
                raise ValueError(
                    f"`--data.vocab_size={self.vocab_size}` is too small: bytes and specials need "
                    f"{FEWEST_BPE_TOKENS}. 1024 to 32768 are usual."
                )

    def open_tokenizer(self, folder: Path | None = None) -> Tokenizer:
        """Return the tokenizer; the one that ``bpe`` trains lies in the corpus' ``folder``."""
        if self.tokenizer == "byte":
            return ByteTokenizer()
        return BPETokenizer(
            Path(self.tokenizer).expanduser() if folder is None else folder / "tokenizer.json"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """A prepared corpus.

    Args:
        path: Its folder.
        settings: What it was made from.
        fingerprint: Hash of all tokens; equal fingerprints mean equal data, on any machine.
        num_tokens: Tokens per split, end-of-file tokens included.
        num_bytes: Bytes of text per split.
        num_files: Files per split.
    """

    path: Path
    settings: CorpusSettings
    fingerprint: str
    num_tokens: dict[str, int]
    num_bytes: dict[str, int]
    num_files: dict[str, int]

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that made the tokens."""
        return self.settings.open_tokenizer(self.path)

    def blocks(self, split: Split) -> Blocks:
        """Open one split, cut into rows of ``block_size + 1`` tokens; reads happen on access.

        Raises:
            ValueError: the split does not fill a single block.
        """
        length = self.settings.block_size + 1
        count = self.num_tokens[split] // length
        if count == 0:
            raise ValueError(
                f"The {split} split holds {self.num_tokens[split]} tokens, less than one block of "
                f"{length}. Give more text, a larger `--data.{split}_fraction`, or a smaller "
                "`--data.block_size`."
            )
        tokens_N = np.load(self.path / f"{split}.npy", mmap_mode="r")
        return tokens_N[: count * length].reshape(count, length)


def corpus_path(settings: CorpusSettings, cache_dir: Path) -> Path:
    """Return the folder of a corpus, named after the settings and the state of the files."""
    folder = None if settings.text is None else Path(settings.text).expanduser()
    files = find_files(folder, settings.suffixes)
    values = [str(folder and folder.resolve()), settings.suffixes, settings.tokenizer]
    values += [settings.val_fraction, settings.test_fraction, settings.split_seed]
    if settings.tokenizer == "bpe":
        values.append(settings.vocab_size)
    elif settings.tokenizer != "byte":
        files[settings.tokenizer] = Path(settings.tokenizer).expanduser()
    stats = {name: path.stat() for name, path in files.items()}
    states = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]
    key = json.dumps([_FORMAT, values, states])
    return cache_dir / hashlib.sha256(key.encode()).hexdigest()[:16]


def load(settings: CorpusSettings, cache_dir: Path) -> Corpus:
    """Open a prepared corpus.

    Raises:
        FileNotFoundError: it has not been prepared on this machine.
    """
    path = corpus_path(settings, cache_dir)
    if not (path / "corpus.json").is_file():
        raise FileNotFoundError(
            f"No prepared text at '{path}'. Call `prepare` first; under Lightning, "
            "`TextDataModule.prepare_data` does. If the text folder is being changed while the "
            "run starts, stop that and start again."
        )
    stored = json.loads((path / "corpus.json").read_text())
    return Corpus(path=path, settings=settings, **stored)


def prepare(settings: CorpusSettings, cache_dir: Path) -> Corpus:
    """Make a corpus, or find it ready.

    Args:
        settings: What to make it from.
        cache_dir: Where corpora are kept; created when missing.

    Raises:
        FileNotFoundError: the text folder is missing or empty.
        ValueError: the settings do not fit the text.
    """
    path = corpus_path(settings, cache_dir)
    if not (path / "corpus.json").is_file():
        scratch = cache_dir / f".{path.name}-{uuid.uuid4().hex}"
        scratch.mkdir(parents=True)
        try:
            _write(settings, scratch)
            try:
                os.rename(scratch, path)
            except OSError:
                # Another process finished the same corpus first; its folder is as good.
                if not (path / "corpus.json").is_file():
                    raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return load(settings, cache_dir)


def _write(settings: CorpusSettings, folder: Path) -> None:
    text = None if settings.text is None else Path(settings.text).expanduser()
    files = split_files(
        read_files(find_files(text, settings.suffixes)),
        val_fraction=settings.val_fraction,
        test_fraction=settings.test_fraction,
        seed=settings.split_seed,
    )
    if settings.tokenizer == "bpe":
        train_bpe(files["train"], settings.vocab_size, folder / "tokenizer.json")
    elif settings.tokenizer != "byte":
        shutil.copyfile(Path(settings.tokenizer).expanduser(), folder / "tokenizer.json")
    tokenizer = settings.open_tokenizer(folder)
    fingerprint = hashlib.sha256()
    num_tokens = {}
    for split in SPLITS:
        tokens_N = _tokenize(files[split], tokenizer)
        np.save(folder / f"{split}.npy", tokens_N)
        num_tokens[split] = len(tokens_N)
        fingerprint.update(f"{split}:{len(tokens_N)}:".encode() + tokens_N.tobytes())
    stored = {
        "fingerprint": fingerprint.hexdigest()[:16],
        "num_tokens": num_tokens,
        "num_bytes": {split: sum(len(f.content) for f in files[split]) for split in SPLITS},
        "num_files": {split: len(files[split]) for split in SPLITS},
    }
    (folder / "corpus.json").write_text(json.dumps(stored, indent=1))


def _tokenize(files: Sequence[TextFile], tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens of all files, each followed by the one that ends it."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    parts = [np.append(tokenizer.encode(file.content), tokenizer.eof_id) for file in files]
    return np.concatenate([part.astype(dtype) for part in parts])
