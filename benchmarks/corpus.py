"""Blocks of tokens to train on: the standard library of the running Python, or prepared text.

The loss study reads the tokens of a larger text with ``--tokens``. This script prepares them from
all ``.py`` files below some folders, such as the standard library and installed packages::

    python benchmarks/corpus.py --megabytes 62 --val-fraction 0.08 --sample-megabytes 25 \\
        /usr/lib/python3.11 .venv/lib/python3.11/site-packages python_tokens

The same files give the same tokens. Repeated files and tables of numbers are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor

_BYTE_VOCAB = 264  # bytes and an end of file, a multiple of 8
_END_OF_FILE = 256
END_OF_FILE, PADDING = "<|end_of_file|>", "<|padding|>"
_VAL_FRACTION, _TEST_FRACTION = 0.03, 0.001
_SKIPPED = {"__pycache__", "idlelib", "lib2to3", "site-packages", "test", "tests"}
_DEFINE = re.compile(rb"^\s*#\s*define\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text as numbers.

    Attributes:
        vocab: Size of the vocabulary, a multiple of 8.
        train: ``[blocks, seq + 1]`` unsigned tokens.
        val: Blocks of other files.
    """

    vocab: int
    train: np.ndarray
    val: np.ndarray

    @property
    def num_tokens(self) -> dict[str, int]:
        """Tokens per split."""
        return {"train": self.train.size, "val": self.val.size}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return both splits on a device, in the smallest integer type that holds the tokens."""
        dtype = np.int16 if self.vocab <= 2**15 else np.int32
        train, val = (torch.from_numpy(b.astype(dtype)).to(device) for b in (self.train, self.val))
        return train, val


def load(tokens: Path | None, text: Path | None, seq: int, words: int = 0) -> Corpus:
    """Read prepared tokens if there are any, else Python files as bytes, or as so many words."""
    return read_tokens(tokens, seq) if tokens else standard_library(seq, text, words)


def standard_library(seq: int, folder: Path | None = None, words: int = 0) -> Corpus:
    """Read Python files as bytes; whole files are held out, chosen by a hash of their name.

    Args:
        seq: Tokens that the model sees at once.
        folder: Where to look, folders of tests left out; the standard library by default.
        words: Vocabulary size of a byte-level BPE that is trained on the text, a multiple of 8,
            which takes some seconds; 0 for bytes.
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
    if words:
        numbered = _as_words(parts, words)
    else:
        numbered = {split: [_as_bytes(file) for file in of] for split, of in parts.items()}
    blocks = (_blocks(np.concatenate(of), seq) for of in numbered.values())
    return Corpus(words or _BYTE_VOCAB, *blocks)


def _as_bytes(file: bytes) -> np.ndarray:
    numbers = np.frombuffer(file, dtype=np.uint8).astype(np.uint16)
    return np.append(numbers, np.uint16(_END_OF_FILE))


def _as_tokens(files: Sequence[bytes], tokenizer: Any) -> list[np.ndarray]:
    end = np.uint16(tokenizer.token_to_id(END_OF_FILE))
    texts = [file.decode(errors="replace") for file in files]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [np.append(np.array(e.ids, np.uint16), end) for e in encoded]


def _as_words(parts: dict[str, list[bytes]], vocab: int) -> dict[str, list[np.ndarray]]:
    """Number the words of a tokenizer that is trained on the first split."""
    trained = tokenizers.ByteLevelBPETokenizer()
    texts = [file.decode(errors="replace") for file in parts["train"]]
    trained.train_from_iterator(
        texts, vocab_size=vocab, special_tokens=[END_OF_FILE], show_progress=False
    )
    return {split: _as_tokens(of, trained) for split, of in parts.items()}


def _blocks(tokens_N: np.ndarray, seq: int) -> np.ndarray:
    count = len(tokens_N) // (seq + 1)
    return tokens_N[: count * (seq + 1)].reshape(count, seq + 1)


# --- prepared tokens ------------------------------------------------------------------------------


def read_tokens(folder: Path, seq: int) -> Corpus:
    """Open a folder that this script prepared."""
    stored = [np.load(folder / f"{split}.npy", mmap_mode="r") for split in ("train", "val")]
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    return Corpus(-(-words // 8) * 8, *(_blocks(tokens, seq) for tokens in stored))


def tokens_folder(text: str) -> Path:
    """Read a command-line option that names a folder of prepared tokens."""
    folder = Path(text)
    if not (folder / "corpus.json").is_file():
        raise argparse.ArgumentTypeError(
            f"{text} has no corpus.json: make it with benchmarks/corpus.py"
        )
    return folder


def choose_files(folders: Sequence[Path], max_nbytes: int) -> dict[str, bytes]:
    """Return ``.py`` files by the hash of their content, in that order, up to so many bytes."""
    found = {}
    for folder in folders:
        for path in folder.rglob("*.py"):
            content = path.read_bytes()
            if content and _is_text(content) and not _is_table(content):
                found[hashlib.sha256(content).hexdigest()] = content
    if not found:
        raise ValueError(f"there is no .py file below {[str(folder) for folder in folders]}")
    return dict(sorted(_take(found, max_nbytes).items()))


def _take(files: dict[str, bytes], max_nbytes: int) -> dict[str, bytes]:
    """Take files in the order of a hash of their name until the next would exceed a size."""
    taken, nbytes = {}, 0
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        nbytes += len(files[name])
        if nbytes > max_nbytes:
            break
        taken[name] = files[name]
    return taken


def _is_text(content: bytes) -> bool:
    try:
        return "\0" not in content.decode("utf-8")
    except UnicodeDecodeError:
        return False


def _is_table(content: bytes) -> bool:
    """Tell whether a long file is mostly definitions of registers or numbers."""
    lines = sum(1 for line in content.split(b"\n") if line.strip())
    digits = sum(content.count(digit) for digit in b"0123456789")
    mostly = len(_DEFINE.findall(content)) > 0.4 * lines or digits > 0.15 * len(content)
    return len(content) > 16384 and mostly


def prepare(
    files: dict[str, bytes], vocab_size: int, sample_nbytes: int, out: Path, val_fraction: float
) -> dict[str, Any]:
    """Train a byte-level BPE on a sample, and write the tokens of all files.

    Writes ``train.npy`` and ``val.npy`` (uint16), ``tokenizer.json`` and ``corpus.json``, whose
    numbers are returned. A thousandth of the text is set aside, as in earlier reports.
    """
    names = sorted(files, key=lambda name: hashlib.sha256(f"0:{name}".encode()).digest())
    total, splits = sum(map(len, files.values())), {}
    for split, fraction in (("val", val_fraction), ("test", _TEST_FRACTION)):
        splits[split], nbytes = [], 0
        while nbytes < fraction * total:
            nbytes += len(files[names[0]])
            splits[split].append(names.pop(0))
    splits["train"] = names
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_FILE, PADDING],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = sorted(_take({name: files[name] for name in names}, sample_nbytes).items())
    tokenizer.train_from_iterator((content.decode() for _, content in sample), trainer=trainer)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    num_tokens = {}
    for split in ("train", "val"):
        # Neighbours resemble each other: sorted by name.
        tokens = _as_tokens([files[name] for name in sorted(splits[split])], tokenizer)
        np.save(out / f"{split}.npy", np.concatenate(tokens))
        num_tokens[split] = sum(map(len, tokens))
    numbers = {"num_tokens": num_tokens, "num_files": {s: len(of) for s, of in splits.items()}}
    (out / "corpus.json").write_text(json.dumps(numbers, indent=1))
    return numbers


def main() -> None:
    """Choose the text and write its tokens."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", help="folders of .py files")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--megabytes", type=int, default=410, help="1e6 bytes of text to take")
    parser.add_argument("--val-fraction", type=float, default=_VAL_FRACTION)
    parser.add_argument("--vocab-size", type=int, default=16384)
    parser.add_argument("--sample-megabytes", type=int, default=60, help="for the tokenizer")
    args = parser.parse_args()
    files = choose_files(args.folders, args.megabytes * 10**6)
    print(f"{len(files)} files, {sum(map(len, files.values())) / 1e6:.1f} MB", flush=True)
    sample = args.sample_megabytes * 10**6
    print(json.dumps(prepare(files, args.vocab_size, sample, args.out, args.val_fraction)))


if __name__ == "__main__":
    main()
