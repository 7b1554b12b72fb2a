"""Text files on disk: finding, splitting and tokenizing them.

Everything is a pure function of the folder's contents and the settings, so two machines with the
same files produce the same tokens.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")

SPECIALS = ("<|end_of_file|>", "<|padding|>")
FEWEST_BPE_TOKENS = 256 + len(SPECIALS)

# Generated tables and test data would be a third of the standard library and teach no Python.
_STANDARD_LIBRARY_SKIPS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "lib-dynload", "pydoc_data"}
    | {"site-packages", "test", "tests"}
)


class TextFile(NamedTuple):
    """A path relative to the folder, with forward slashes, and its contents in UTF-8."""

    path: str
    content: bytes


def find_files(folder: Path | None, suffixes: Sequence[str] | None = None) -> dict[str, Path]:
    """List the files below a folder, hidden ones left out, without reading them.

    Args:
        folder: Where to look; ``None`` is the standard library of the running Python, without its
            tests and generated tables.
        suffixes: Accepted endings, such as ``[".py", "md"]``; ``None`` accepts all.

    Returns:
        Absolute paths, sorted by their relative path with forward slashes.

    Raises:
        FileNotFoundError: the folder is missing or holds no such file.
    """
    skips: frozenset[str] = frozenset()
    if folder is None:
        suffixes, skips = [".py"], _STANDARD_LIBRARY_SKIPS
        folder = Path(sysconfig.get_paths()["stdlib"])
    if not folder.is_dir():
        raise FileNotFoundError(
            f"`--data.text={folder}` is not a folder. Give a folder with text or code files, or "
            "leave the option out to train on the Python standard library."
        )
    endings = None if suffixes is None else {f".{suffix.lstrip('.')}" for suffix in suffixes}
    found: dict[str, Path] = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skips]
        for name in names:
            path = Path(parent, name)
            wanted = endings is None or path.suffix in endings
            if wanted and not name.startswith(".") and path.is_file():
                found[path.relative_to(folder).as_posix()] = path
    if not found:
        kind = "files" if endings is None else f"files ending in {sorted(endings)}"
        raise FileNotFoundError(
            f"'{folder}' holds no {kind}. Choose another folder with `--data.text`, or other "
            "endings with `--data.suffixes`."
        )
    return dict(sorted(found.items()))


def read_files(paths: Mapping[str, Path]) -> list[TextFile]:
    """Read the text files among ``paths``, in the same order.

    Empty files, files that are not UTF-8, and repeated contents (the first path wins, so that no
    text is both trained on and held out) are left out.

    Raises:
        ValueError: none of the files is text.
    """
    files: dict[bytes, TextFile] = {}
    for name, path in paths.items():
        content = path.read_bytes()
        if content and _is_text(content):
            files.setdefault(hashlib.sha256(content).digest(), TextFile(name, content))
    if not files:
        raise ValueError(
            f"None of the {len(paths)} files is UTF-8 text. Choose another folder with "
            "`--data.text`, or convert the files to UTF-8."
        )
    return list(files.values())


def _is_text(content: bytes) -> bool:
    try:
        return "\0" not in content.decode("utf-8")
    except UnicodeDecodeError:
        return False


def split_files(
    files: Sequence[TextFile], *, val_fraction: float, test_fraction: float, seed: int
) -> dict[Split, list[TextFile]]:
    """Divide whole files among training, validation and test.

    Files are ordered by a hash of seed and path, so a file keeps its place when others come and go.
    Validation, then test, take files until they hold their share of the bytes.

    Raises:
        ValueError: there are fewer than three files, so whole files cannot be held out.
    """
    if len(files) < len(SPLITS):
        raise ValueError(
            f"{len(files)} text file(s) cannot be split into training, validation and test by "
            "whole files. Give a folder with at least 3 files, for example one file per chapter."
        )
    remaining = sorted(
        files, key=lambda file: hashlib.sha256(f"{seed}:{file.path}".encode()).digest()
    )
    total_nbytes = sum(len(file.content) for file in files)
    held_out: list[list[TextFile]] = []
    for fraction in (val_fraction, test_fraction):
        nbytes, chosen = 0, []
        fewest_left = 2 - len(held_out)  # one file for each split that follows
        while nbytes < fraction * total_nbytes and len(remaining) > fewest_left:
            nbytes += len(remaining[0].content)
            chosen.append(remaining.pop(0))
        held_out.append(chosen)
    return {"train": remaining, "val": held_out[0], "test": held_out[1]}


class ByteTokenizer:
    """Every byte is its own token; specials follow."""

    vocab_size = 264
    eof_id = 256

    def encode(self, text: bytes) -> np.ndarray:
        """Return the bytes as ``[N]`` int64 ids."""
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; bytes that are not valid UTF-8 show as a replacement character."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class BPETokenizer:
    """A ``tokenizer.json`` of ``tokenizers`` or Hugging Face.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the tokenizer has no end-of-text token.
    """

    _END_TOKENS = (SPECIALS[0], "<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")

    def __init__(self, path: Path) -> None:
        tokenizers = import_tokenizers()
        if not path.is_file():
            raise FileNotFoundError(
                f"`--data.tokenizer={path}` is neither 'byte' nor 'bpe' nor an existing "
                "tokenizer.json. Use one of these three."
            )
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        ids = [self._tokenizer.token_to_id(token) for token in self._END_TOKENS]
        ends = [end for end in ids if end is not None]
        if not ends:
            raise ValueError(
                f"The tokenizer '{path}' has none of the end-of-text tokens {self._END_TOKENS}. "
                "Add one, or train one here with `--data.tokenizer=bpe`."
            )
        self.eof_id: int = ends[0]
        self.vocab_size: int = round_up(self._tokenizer.get_vocab_size())

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ``[N]`` int64 ids of ``text``."""
        ids = self._tokenizer.encode(text.decode("utf-8"), add_special_tokens=False).ids
        return np.asarray(ids, dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, leaving out specials."""
        known = self._tokenizer.get_vocab_size()
        return self._tokenizer.decode([int(i) for i in ids if i < known])


def round_up(vocab_size: int) -> int:
    """Return the next multiple of 8: faster matrix products, and spare ids that never occur."""
    return -(-vocab_size // 8) * 8


Tokenizer = ByteTokenizer | BPETokenizer


def train_bpe(files: Sequence[TextFile], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE of ``vocab_size`` ids, specials included, and write it to ``path``.

    Give training files only, so that nothing leaks from validation.
    """
    tokenizer = import_tokenizers().ByteLevelBPETokenizer()
    texts = (file.content.decode("utf-8") for file in files)
    tokenizer.train_from_iterator(
        texts, vocab_size, special_tokens=list(SPECIALS), show_progress=False, length=len(files)
    )
    tokenizer.save(str(path))


def import_tokenizers() -> Any:
    """Return the ``tokenizers`` package, or raise a ModuleNotFoundError with the remedy."""
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "BPE needs the `tokenizers` package: `pip install tokenizers`, or use "
            "`--data.tokenizer=byte`, which needs nothing."
        ) from error
    return tokenizers
