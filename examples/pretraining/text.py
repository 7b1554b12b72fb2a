"""Text files as tokens: found, split by whole files, tokenized once and kept on disk.

Tokens depend only on the files and the settings, so machines with the same files agree.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")

_FORMAT = 4  # raise when the file of a corpus changes its meaning
_SPECIALS = ("<|end_of_file|>", "<|padding|>")
_END_TOKENS = (_SPECIALS[0], "<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
_FEWEST_BPE_TOKENS = 256 + len(_SPECIALS)
# Generated tables and test data would be a third of the standard library and teach no Python.
_STANDARD_LIBRARY_SKIPS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "lib-dynload", "pydoc_data"}
    | {"site-packages", "test", "tests"}
)


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
    """A ``tokenizer.json`` of ``tokenizers`` or Hugging Face."""

    def __init__(self, path: Path) -> None:
        tokenizers = import_tokenizers()
        if not path.is_file():
            raise FileNotFoundError(
                f"`--data.tokenizer={path}` is neither 'byte' nor 'bpe' nor an existing "
                "tokenizer.json. Use one of these three."
            )
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        ids = [self._tokenizer.token_to_id(token) for token in _END_TOKENS]
        ends = [end for end in ids if end is not None]
        if not ends:
            raise ValueError(
                f"The tokenizer '{path}' has none of the end-of-text tokens {_END_TOKENS}. "
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


Tokenizer = ByteTokenizer | BPETokenizer


def round_up(vocab_size: int) -> int:
    """Return the next multiple of 8: faster matrix products, and spare ids that never occur."""
    return -(-vocab_size // 8) * 8


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


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSettings:
    """Everything that tokens depend on; arguments as in ``TextDataModule``."""

    text: str | None = None
    suffixes: tuple[str, ...] | None = None
    tokenizer: str = "byte"
    vocab_size: int = 4096
    val_fraction: float = 0.05
    test_fraction: float = 0.05
    split_seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("val_fraction", "test_fraction"):
            if not 0 < getattr(self, name) < 0.5:
                raise ValueError(
                    f"`--data.{name}={getattr(self, name)}` must lie between 0 and 0.5, both "
                    "excluded; 0.05 is usual."
                )
        if self.tokenizer == "bpe":
            import_tokenizers()
            if self.vocab_size < _FEWEST_BPE_TOKENS:
                raise ValueError(
                    f"`--data.vocab_size={self.vocab_size}` is too small: bytes and specials need "
                    f"{_FEWEST_BPE_TOKENS}. 1024 to 32768 are usual."
                )

    def open_tokenizer(self, trained: Path | None = None) -> Tokenizer:
        """Return the tokenizer; ``trained`` is the file of the one that ``bpe`` trains."""
        if self.tokenizer == "byte":
            return ByteTokenizer()
        given = Path(self.tokenizer).expanduser()
        return BPETokenizer(trained if trained and self.tokenizer == "bpe" else given)

    def find_files(self) -> dict[str, Path]:
        """List the files of the text without reading them, hidden ones left out.

        Returns:
            Absolute paths, sorted by their relative path with forward slashes.
        """
        endings = None if self.suffixes is None else {f".{s.lstrip('.')}" for s in self.suffixes}
        skips: frozenset[str] = frozenset()
        if self.text is None:
            folder = Path(sysconfig.get_paths()["stdlib"])
            endings, skips = {".py"}, _STANDARD_LIBRARY_SKIPS
        else:
            folder = Path(self.text).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(
                f"`--data.text={folder}` is not a folder. Give a folder with text or code files, "
                "or leave the option out to train on the Python standard library."
            )
        found: dict[str, Path] = {}
        for parent, folders, names in os.walk(folder):
            folders[:] = [n for n in folders if not n.startswith(".") and n not in skips]
            for path in (Path(parent, name) for name in names if not name.startswith(".")):
                if (endings is None or path.suffix in endings) and path.is_file():
                    found[path.relative_to(folder).as_posix()] = path
        if not found:
            kind = "files" if endings is None else f"files ending in {sorted(endings)}"
            raise FileNotFoundError(
                f"'{folder}' holds no {kind}. Choose another folder with `--data.text`, or other "
                "endings with `--data.suffixes`."
            )
        return dict(sorted(found.items()))

    def path(self, cache_dir: Path) -> Path:
        """Return the file of the corpus, named after the settings and the state of the files."""
        files = self.find_files()
        folder = self.text and str(Path(self.text).expanduser().resolve())
        values = [folder, self.suffixes, self.tokenizer]
        values += [self.val_fraction, self.test_fraction, self.split_seed]
        if self.tokenizer == "bpe":
            values.append(self.vocab_size)
        elif self.tokenizer != "byte":
            files[self.tokenizer] = Path(self.tokenizer).expanduser()
        stats = {name: path.stat() for name, path in files.items()}
        states = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]
        key = json.dumps([_FORMAT, values, states])
        return cache_dir / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt"


def read_files(paths: Mapping[str, Path]) -> dict[str, bytes]:
    """Read the text files among ``paths``, in the same order.

    Empty files, files that are not UTF-8, and repeated contents (the first path wins, so that no
    text is both trained on and held out) are left out.
    """
    names: dict[bytes, str] = {}
    for name, path in paths.items():
        content = path.read_bytes()
        if content and _is_text(content):
            names.setdefault(content, name)
    if not names:
        raise ValueError(
            f"None of the {len(paths)} files is UTF-8 text. Choose another folder with "
            "`--data.text`, or convert the files to UTF-8."
        )
    return {name: content for content, name in names.items()}


def _is_text(content: bytes) -> bool:
    try:
        return "\0" not in content.decode("utf-8")
    except UnicodeDecodeError:
        return False


def split_files(
    files: Mapping[str, bytes], *, val_fraction: float, test_fraction: float, seed: int
) -> dict[Split, dict[str, bytes]]:
    """Divide whole files among training, validation and test.

    Files are ordered by a hash of seed and path, so a file keeps its place when others come and go.
    Validation, then test, take files until they hold their share of the bytes.
    """
    if len(files) < len(SPLITS):
        raise ValueError(
            f"{len(files)} text file(s) cannot be split into training, validation and test by "
            "whole files. Give a folder with at least 3 files, for example one file per chapter."
        )
    remaining = sorted(files, key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).digest())
    total_nbytes = sum(map(len, files.values()))
    chosen: dict[Split, list[str]] = {"train": remaining, "val": [], "test": []}
    # Each split that follows keeps at least one file.
    for split, fraction, fewest_left in (("val", val_fraction, 2), ("test", test_fraction, 1)):
        nbytes = 0
        while nbytes < fraction * total_nbytes and len(remaining) > fewest_left:
            chosen[split].append(remaining.pop(0))
            nbytes += len(files[chosen[split][-1]])
    return {split: {name: files[name] for name in names} for split, names in chosen.items()}


def train_bpe(files: Mapping[str, bytes], vocab_size: int, path: Path) -> None:
    """Train a byte-level BPE of ``vocab_size`` ids, specials included, and write it to ``path``.

    Give training files only, so that nothing leaks from validation.
    """
    tokenizer = import_tokenizers().ByteLevelBPETokenizer()
    texts = (content.decode("utf-8") for content in files.values())
    specials = list(_SPECIALS)
    tokenizer.train_from_iterator(
        texts, vocab_size, special_tokens=specials, show_progress=False, length=len(files)
    )
    tokenizer.save(str(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Prepared tokens.

    Attributes:
        tokenizer: Tokenizer that made the tokens.
        tokens: Tokens per split, memory-mapped, end-of-file tokens included.
        fingerprint: Hash of all tokens; equal fingerprints mean equal data, on any machine.
    """

    tokenizer: Tokenizer
    tokens: dict[str, Tensor]
    fingerprint: str

    def blocks(self, split: Split, block_size: int) -> np.ndarray:
        """Cut a split into ``[blocks, block_size + 1]`` uint16 or int32 tokens."""
        tokens_N, length = self.tokens[split].numpy(), block_size + 1
        count = len(tokens_N) // length
        if count == 0:
            raise ValueError(
                f"The {split} split holds {len(tokens_N)} tokens, less than one block of "
                f"{length}. Give more text, a larger `--data.{split}_fraction`, or a smaller "
                "`--data.block_size`."
            )
        return tokens_N[: count * length].reshape(count, length)


def prepare(settings: CorpusSettings, cache_dir: Path) -> Corpus:
    """Make a corpus in ``cache_dir``, or find it ready.

    Its file appears by a rename, after that of its tokenizer, so no other process sees half of it.
    """
    path = settings.path(cache_dir)
    if not path.is_file():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=cache_dir) as scratch:
            trained = Path(scratch, "tokenizer.json")
            torch.save(_tokenized(settings, trained), Path(scratch, "corpus.pt"))
            if trained.is_file():
                os.replace(trained, path.with_suffix(".json"))
            os.replace(Path(scratch, "corpus.pt"), path)
    stored = torch.load(path, mmap=True, weights_only=True)
    return Corpus(tokenizer=settings.open_tokenizer(path.with_suffix(".json")), **stored)


def _tokenized(settings: CorpusSettings, trained: Path) -> dict[str, Any]:
    """Return the content of a corpus file; a BPE is trained and written to ``trained``."""
    files = split_files(
        read_files(settings.find_files()),
        val_fraction=settings.val_fraction,
        test_fraction=settings.test_fraction,
        seed=settings.split_seed,
    )
    if settings.tokenizer == "bpe":
        train_bpe(files["train"], settings.vocab_size, trained)
    tokenizer = settings.open_tokenizer(trained)
    fingerprint = hashlib.sha256()
    tokens = {}
    for split in SPLITS:
        tokens_N = _tokenize(files[split].values(), tokenizer)
        fingerprint.update(f"{split}:{len(tokens_N)}:".encode() + tokens_N.tobytes())
        tokens[split] = torch.from_numpy(tokens_N)
    return {"tokens": tokens, "fingerprint": fingerprint.hexdigest()[:16]}


def _tokenize(contents: Iterable[bytes], tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens of all files, each followed by the one that ends it."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    parts = [np.append(tokenizer.encode(content), tokenizer.eof_id) for content in contents]
    return np.concatenate([part.astype(dtype) for part in parts])
