"""Which text a run reads: finding files, splitting them, and turning them into tokens.

Nothing here knows about training or ranks. Everything is a pure function of the folder's contents
and the settings, so that two machines with the same files produce the same tokens.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")

END_OF_FILE = "<|end_of_file|>"
PADDING = "<|padding|>"

# Generated tables and test data would be a third of the standard library and teach no Python.
_STANDARD_LIBRARY_SKIPS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "lib-dynload", "pydoc_data"}
    | {"site-packages", "test", "tests"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFile:
    """One file of the corpus.

    Args:
        path: Path relative to the folder, with forward slashes.
        content: Its bytes, valid UTF-8.
    """

    path: str
    content: bytes


def standard_library() -> Path:
    """Return the folder of the running interpreter's standard library.

    Raises:
        FileNotFoundError: this interpreter has no sources on disk.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    if not (folder / "argparse.py").is_file():
        raise FileNotFoundError(
            f"This Python has no standard library sources in '{folder}' to train on. Point "
            "`--data.text` at a folder with text or code files."
        )
    return folder


def check_folder(folder: Path | None) -> Path:
    """Return the folder to read, which is cheap to call before any process is started.

    Args:
        folder: Where to look; ``None`` is the standard library of the running Python.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: it is missing.
    """
    if folder is None:
        return standard_library()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"`--data.text={folder}` is not a folder. Give a folder with text or code files, or "
            "leave the option out to train on the Python standard library."
        )
    return folder


def find_files(folder: Path | None, suffixes: Sequence[str] | None = None) -> dict[str, Path]:
    """List the files below ``folder``, sorted by path, without reading them.

    Args:
        folder: Where to look; ``None`` is the standard library of the running Python, without its
            tests and generated tables.
        suffixes: Only files with these endings, such as ``[".py", ".md"]``; ``None`` is all.

    Returns:
        Absolute paths by relative path with forward slashes. Hidden files and folders are left out.

    Raises:
        FileNotFoundError: the folder is missing or holds no such file.
    """
    skips: frozenset[str] = frozenset()
    if folder is None:
        suffixes, skips = [".py"], _STANDARD_LIBRARY_SKIPS
    folder = check_folder(folder)
    found: dict[str, Path] = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skips]
        for name in names:
            path = Path(parent, name)
            wanted = suffixes is None or path.suffix in suffixes
            if wanted and not name.startswith(".") and path.is_file():
                found[path.relative_to(folder).as_posix()] = path
    if not found:
        kind = "files" if suffixes is None else f"files ending in {list(suffixes)}"
        raise FileNotFoundError(
            f"'{folder}' holds no {kind}. Choose another folder with `--data.text`, or other "
            "endings with `--data.suffixes`."
        )
    return dict(sorted(found.items()))


def read_files(paths: Mapping[str, Path]) -> list[TextFile]:
    """Read the text files among ``paths``.

    Args:
        paths: Files by relative path.

    Returns:
        The files, in the same order. Empty files, files that are not UTF-8, and repeated contents
        (the first path wins, so that no text is both trained on and held out) are left out.

    Raises:
        ValueError: none of the files is text.
    """
    files: list[TextFile] = []
    seen: set[bytes] = set()
    for name, path in paths.items():
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if content and digest not in seen and _is_text(content):
            seen.add(digest)
            files.append(TextFile(path=name, content=content))
    if not files:
        raise ValueError(
            f"None of the {len(paths)} files is UTF-8 text. Choose another folder with "
            "`--data.text`, or convert the files to UTF-8."
        )
    return files


def _is_text(content: bytes) -> bool:
    if b"\0" in content:
        return False
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def split_files(
    files: Sequence[TextFile], *, val_fraction: float, test_fraction: float, seed: int
) -> dict[Split, list[TextFile]]:
    """Divide whole files among training, validation and test.

    Files are ordered by a hash of their path, so a file keeps its place when others come and go.
    Validation and test each take files until they hold their share of the bytes.

    Args:
        files: All files.
        val_fraction: Share of the bytes held out for validation.
        test_fraction: Share of the bytes held out for the final test.
        seed: Another seed gives another split.

    Returns:
        Files per split, in hash order.

    Raises:
        ValueError: there are fewer than three files, so that whole files cannot be held out.
    """
    if len(files) < len(SPLITS):
        raise ValueError(
            f"{len(files)} text file(s) cannot be split into training, validation and test by "
            "whole files. Give a folder with at least 3 files, for example one file per chapter."
        )

    def key(file: TextFile) -> bytes:
        return hashlib.sha256(f"{seed}:{file.path}".encode()).digest()

    total_nbytes = sum(len(file.content) for file in files)
    result: dict[Split, list[TextFile]] = {split: [] for split in SPLITS}
    targets: tuple[tuple[Split, float], ...] = (("val", val_fraction), ("test", test_fraction))
    remaining = sorted(files, key=key)
    for position, (split, fraction) in enumerate(targets):
        nbytes = 0
        still_needed = len(targets) - position
        while nbytes < fraction * total_nbytes and len(remaining) > still_needed:
            nbytes += len(remaining[0].content)
            result[split].append(remaining.pop(0))
    result["train"] = remaining
    return result


class Tokenizer(Protocol):
    """What the example needs from a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, specials included."""

    @property
    def eof_id(self) -> int:
        """Id that ends each file."""

    def encode(self, text: bytes) -> np.ndarray:
        """Return the int64 ids of ``text``, without the end-of-file id."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, leaving out specials."""


class ByteTokenizer:
    """Every byte is its own token; two specials follow; ids are padded to a multiple of 8."""

    vocab_size = 264
    eof_id = 256

    def encode(self, text: bytes) -> np.ndarray:
        """Return the bytes as ids."""
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; bytes that are no valid UTF-8 show as a replacement character."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class BPETokenizer:
    """A tokenizer from the ``tokenizers`` package, read from its JSON file.

    Args:
        path: ``tokenizer.json`` as written by ``tokenizers`` or Hugging Face.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the tokenizer has no end-of-text token.
    """

    _END_TOKENS = (END_OF_FILE, "<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")

    def __init__(self, path: Path) -> None:
        tokenizers = _import_tokenizers()
        if not path.is_file():
            raise FileNotFoundError(
                f"`--data.tokenizer={path}` is neither 'byte' nor 'bpe' nor an existing "
                "tokenizer.json. Use one of these three."
            )
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        ends = [self._tokenizer.token_to_id(token) for token in self._END_TOKENS]
        if all(end is None for end in ends):
            raise ValueError(
                f"The tokenizer '{path}' has none of the end-of-text tokens {self._END_TOKENS}. "
                "Add one, or train one here with `--data.tokenizer=bpe`."
            )
        self.eof_id: int = next(end for end in ends if end is not None)
        # Multiples of 8 keep matrix multiplications on the fast path; spare ids never occur.
        self.vocab_size: int = -(-self._tokenizer.get_vocab_size() // 8) * 8

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of ``text``."""
        ids = self._tokenizer.encode(text.decode("utf-8"), add_special_tokens=False).ids
        return np.asarray(ids, dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, leaving out specials."""
        known = self._tokenizer.get_vocab_size()
        return self._tokenizer.decode([int(i) for i in ids if i < known])


def check_tokenizer(tokenizer: str) -> None:
    """Raise an error with a remedy where a tokenizer cannot be used.

    Args:
        tokenizer: ``byte``, ``bpe``, or the path of a ``tokenizer.json``.

    Raises:
        FileNotFoundError: there is no such file.
        ModuleNotFoundError: ``tokenizers`` is needed and missing.
        ValueError: the file has no end-of-text token.
    """
    if tokenizer == "bpe":
        _import_tokenizers()
    elif tokenizer != "byte":
        BPETokenizer(Path(tokenizer).expanduser())


def train_bpe(files: Sequence[TextFile], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE on ``files`` and write it to ``path`` (deterministic).

    Args:
        files: Training files only, so that nothing leaks from validation.
        vocab_size: Number of ids to aim for, specials and the 256 bytes included.
        path: Where the JSON file goes.

    Raises:
        ValueError: ``vocab_size`` does not even hold the bytes and specials.
        ModuleNotFoundError: ``tokenizers`` is not installed.
    """
    specials = [END_OF_FILE, PADDING]
    if vocab_size < 256 + len(specials):
        raise ValueError(
            f"`--data.vocab_size={vocab_size}` is too small: 256 bytes and {len(specials)} "
            f"specials need at least {256 + len(specials)}. 1024 to 32768 are usual."
        )
    tokenizers = _import_tokenizers()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def texts() -> Iterator[str]:
        for file in files:
            yield file.content.decode("utf-8")

    tokenizer.train_from_iterator(texts(), trainer=trainer, length=len(files))
    tokenizer.save(str(path))


def _import_tokenizers():
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "BPE needs the `tokenizers` package: `pip install tokenizers`, or use "
            "`--data.tokenizer=byte`, which needs nothing."
        ) from error
    return tokenizers
