"""Blocks of tokens to train on: the standard library of the running Python, or prepared text."""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_BYTE_VOCAB = 264  # bytes and an end of file, a multiple of 8
_END_OF_FILE = 256
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


def standard_library(seq: int, folder: Path | None = None) -> Corpus:
    """Read Python files as bytes; whole files are held out, chosen by a hash of their name.

    Args:
        seq: Tokens that the model sees at once.
        folder: Where to look; the standard library by default, without its tests.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    paths = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*.py")
        if not _SKIPPED & set(path.relative_to(folder).parts)
    }
    ordered = sorted(paths, key=lambda name: hashlib.sha256(name.encode()).digest())
    files = [np.frombuffer(paths[name].read_bytes(), dtype=np.uint8) for name in ordered]
    total, held_out = sum(len(file) for file in files), 0
    parts: dict[str, list[np.ndarray]] = {"train": [], "val": []}
    for file in files:
        split = "val" if held_out < _VAL_FRACTION * total else "train"
        held_out += len(file) if split == "val" else 0
        parts[split].append(np.append(file.astype(np.uint16), np.uint16(_END_OF_FILE)))
    if not parts["train"]:
        raise ValueError(f"{folder} has no two .py files to train and to validate on")
    return Corpus(_BYTE_VOCAB, *(_blocks(np.concatenate(of), seq) for of in parts.values()))


def read_tokens(folder: Path, seq: int) -> Corpus:
    """Open what ``research/kernel_text.py`` prepared."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    known = {*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer["added_tokens"])}
    stored = [np.load(folder / f"{split}.npy", mmap_mode="r") for split in ("train", "val")]
    return Corpus(-(-len(known) // 8) * 8, *(_blocks(tokens, seq) for tokens in stored))


def tokens_folder(text: str) -> Path:
    """Read a command-line option that names a folder of prepared tokens."""
    folder = Path(text)
    if not (folder / "corpus.json").is_file():
        raise argparse.ArgumentTypeError(
            f"{text} has no corpus.json: make it with research/kernel_text.py"
        )
    return folder


def _blocks(tokens_N: np.ndarray, seq: int) -> np.ndarray:
    count = len(tokens_N) // (seq + 1)
    return tokens_N[: count * (seq + 1)].reshape(count, seq + 1)
