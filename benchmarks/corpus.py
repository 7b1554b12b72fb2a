"""Blocks of tokens to train on: the standard library of the running Python, or prepared text."""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

_BYTE_VOCAB = 264  # bytes and an end of file, a multiple of 8
_END_OF_FILE = 256
END_OF_FILE = "<|end_of_file|>"  # of tokenizers
_VAL_FRACTION = 0.03
_SKIPPED = {"__pycache__", "idlelib", "lib2to3", "site-packages", "test", "tests"}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text as numbers.

    Attributes:
        vocab: Size of the vocabulary, a multiple of 8.
        train: ``[blocks, seq + 1]`` unsigned tokens.
        val: Likewise, of other files.
    """

    vocab: int
    train: np.ndarray
    val: np.ndarray

    @property
    def num_tokens(self) -> dict[str, int]:
        """Tokens per split."""
        return {"train": self.train.size, "val": self.val.size}


def standard_library(seq: int, folder: Path | None = None, words: int = 0) -> Corpus:
    """Read Python files as bytes; whole files are held out, chosen by a hash of their name.

    Args:
        seq: Tokens that the model sees at once.
        folder: Where to look, folders of tests left out; the standard library of the running
            Python by default.
        words: Size of the vocabulary of a tokenizer that is trained on them instead (byte-level
            BPE, a multiple of 8), which takes some seconds; 0 for bytes.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    paths = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*.py")
        if not _SKIPPED & set(path.relative_to(folder).parts)
    }
    ordered = sorted(paths, key=lambda name: hashlib.sha256(name.encode()).digest())
    files = [paths[name].read_bytes() for name in ordered]
    total, held_out = sum(len(file) for file in files), 0
    parts: dict[str, list[bytes]] = {"train": [], "val": []}
    for file in files:
        split = "val" if held_out < _VAL_FRACTION * total else "train"
        held_out += len(file) if split == "val" else 0
        parts[split].append(file)
    if not parts["train"]:
        raise ValueError(f"{folder} has no two .py files to train and to validate on")
    vocab = words or _BYTE_VOCAB
    if words:
        numbered = _as_words(parts, words)
    else:
        numbered = {split: [_as_bytes(file) for file in of] for split, of in parts.items()}
    return Corpus(vocab, *(_blocks(np.concatenate(of), seq) for of in numbered.values()))


def _as_bytes(file: bytes) -> np.ndarray:
    numbers = np.frombuffer(file, dtype=np.uint8).astype(np.uint16)
    return np.append(numbers, np.uint16(_END_OF_FILE))


def _as_tokens(files: list[bytes], tokenizer: Any) -> list[np.ndarray]:
    end = np.uint16(tokenizer.token_to_id(END_OF_FILE))
    texts = [file.decode(errors="replace") for file in files]
    return [np.append(np.array(e.ids, np.uint16), end) for e in tokenizer.encode_batch(texts)]


def _as_words(parts: dict[str, list[bytes]], vocab: int) -> dict[str, list[np.ndarray]]:
    """Number the words of a tokenizer that knows the first of the parts."""
    trained = tokenizers.ByteLevelBPETokenizer()
    texts = [file.decode(errors="replace") for file in parts["train"]]
    trained.train_from_iterator(
        texts, vocab_size=vocab, special_tokens=[END_OF_FILE], show_progress=False
    )
    return {split: _as_tokens(of, trained) for split, of in parts.items()}


def read_tokens(folder: Path, seq: int) -> Corpus:
    """Open what ``research/kernel_text.py`` prepared."""
    stored = [np.load(folder / f"{split}.npy", mmap_mode="r") for split in ("train", "val")]
    vocab = _vocab(read_tokenizer(folder).get_vocab_size())
    return Corpus(vocab, *(_blocks(tokens, seq) for tokens in stored))


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Read what made the tokens of a folder."""
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def tokens_folder(text: str) -> Path:
    """Read a command-line option that names a folder of prepared tokens."""
    folder = Path(text)
    if not (folder / "corpus.json").is_file():
        raise argparse.ArgumentTypeError(
            f"{text} has no corpus.json: make it with research/kernel_text.py"
        )
    return folder


def _vocab(size: int) -> int:
    return -(-size // 8) * 8


def _blocks(tokens_N: np.ndarray, seq: int) -> np.ndarray:
    count = len(tokens_N) // (seq + 1)
    return tokens_N[: count * (seq + 1)].reshape(count, seq + 1)
