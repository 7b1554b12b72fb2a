"""Prepared text on disk: tokens written once, read back as fixed-length blocks.

``prepare`` tokenizes a folder into ``cache_dir/<key>``, where the key is a hash of the settings and
of every file's path, size and time of change. It writes next to that folder and renames at the
end, so that an interrupted or concurrent preparation never leaves half a corpus behind.

Two storages hold the same blocks under the same numbers: a memory-mapped file, or litdata chunks.
Block ``i`` of a split is always its tokens ``i * length .. (i + 1) * length``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from pretraining.text import (
    SPLITS,
    BPETokenizer,
    ByteTokenizer,
    Split,
    TextFile,
    Tokenizer,
    find_files,
    read_files,
    split_files,
    train_bpe,
)

Storage = Literal["mmap", "litdata"]

_FORMAT = 1  # raise when the files below change their meaning
_LITDATA_CHUNK_NBYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSettings:
    """Everything that decides which tokens a corpus holds.

    Args:
        text: Folder with text or code; empty is the standard library of the running Python.
        suffixes: Only files with these endings.
        tokenizer: ``byte``, ``bpe``, or the path of a ``tokenizer.json``.
        vocab_size: Size of the BPE vocabulary.
        block_size: Tokens a model sees at once; a stored block has one more, for the targets.
        val_fraction: Share of the bytes held out for validation, in whole files.
        test_fraction: Share of the bytes held out for testing, in whole files.
        split_seed: Another seed holds out other files.
        storage: ``mmap`` or ``litdata``.
    """

    text: str | None = None
    suffixes: tuple[str, ...] | None = None
    tokenizer: str = "byte"
    vocab_size: int = 4096
    block_size: int = 128
    val_fraction: float = 0.05
    test_fraction: float = 0.05
    split_seed: int = 0
    storage: Storage = "mmap"

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

    @property
    def folder(self) -> Path | None:
        """The text folder, or ``None`` for the standard library."""
        return None if self.text is None else Path(self.text).expanduser()


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
        if self.settings.tokenizer == "byte":
            return ByteTokenizer()
        return BPETokenizer(self.path / "tokenizer.json")

    def blocks(self, split: Split) -> Blocks:
        """Open one split as blocks of ``block_size + 1`` tokens.

        Args:
            split: Which one.

        Returns:
            The blocks; reads happen on access.

        Raises:
            ValueError: the split does not fill a single block.
        """
        length = self.settings.block_size + 1
        if self.num_tokens[split] < length:
            raise ValueError(
                f"The {split} split holds {self.num_tokens[split]} tokens, less than one block of "
                f"{length}. Give more text, a larger `--data.{split}_fraction`, or a smaller "
                "`--data.block_size`."
            )
        if self.settings.storage == "litdata":
            return LitdataBlocks(self.path / split, length)
        return MemmapBlocks(self.path / f"{split}.npy", length)


class Blocks(Protocol):
    """Numbered token blocks of equal length."""

    def __len__(self) -> int:
        """Return how many blocks there are."""

    def __getitem__(self, index: int) -> np.ndarray:
        """Return block ``index`` as ``[length]`` int64 tokens."""


class MemmapBlocks:
    """Blocks of a memory-mapped array of tokens.

    Args:
        path: A one-dimensional ``.npy`` file.
        length: Tokens per block; a shorter rest at the end is left out.
    """

    def __init__(self, path: Path, length: int) -> None:
        self._tokens_N = np.load(path, mmap_mode="r")
        self._length = length

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._tokens_N) // self._length

    def __getitem__(self, index: int) -> np.ndarray:
        """Return one by number."""
        start = index * self._length
        return self._tokens_N[start : start + self._length].astype(np.int64)


class LitdataBlocks:
    """Blocks of a folder written by ``litdata.optimize``.

    The order of samples is decided by ``pretraining.data``, which asks for blocks by number, so
    that it does not depend on the storage, on litdata's version or on the number of workers.

    Args:
        path: The folder.
        length: Tokens per block.
    """

    def __init__(self, path: Path, length: int) -> None:
        litdata = _import_litdata()
        loader = litdata.TokensLoader(block_size=length)
        self._dataset = litdata.StreamingDataset(str(path), item_loader=loader, shuffle=False)
        index = json.loads((path / "index.json").read_text())
        self._length = sum(chunk["dim"] // length for chunk in index["chunks"])

    def __len__(self) -> int:
        """Return how many there are."""
        return self._length

    def __getitem__(self, index: int) -> np.ndarray:
        """Return one by number."""
        return np.asarray(self._dataset[int(index)], dtype=np.int64)


def litdata_installed() -> bool:
    """Tell whether litdata is there, without importing it."""
    return importlib.util.find_spec("litdata") is not None


def corpus_path(settings: CorpusSettings, cache_dir: Path) -> Path:
    """Return the folder of a corpus, prepared or not.

    Args:
        settings: What the corpus is made from.
        cache_dir: Where corpora are kept.

    Returns:
        A folder named after the settings and the state of the files on this machine.
    """
    files = find_files(settings.folder, settings.suffixes)
    if settings.tokenizer not in ("byte", "bpe"):
        files[settings.tokenizer] = Path(settings.tokenizer)
    listing = [
        (name, stat.st_size, stat.st_mtime_ns)
        for name, stat in ((name, path.stat()) for name, path in files.items() if path.exists())
    ]
    key = {"format": _FORMAT, "settings": _stored(settings), "files": listing}
    return cache_dir / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def load(settings: CorpusSettings, cache_dir: Path) -> Corpus:
    """Open a prepared corpus.

    Args:
        settings: The settings that it was prepared with.
        cache_dir: Where corpora are kept.

    Returns:
        The corpus.

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

    Returns:
        The corpus.

    Raises:
        FileNotFoundError: the text folder is missing or empty.
        ModuleNotFoundError: the storage or tokenizer needs a package that is not installed.
        ValueError: the settings do not fit the text.
    """
    path = corpus_path(settings, cache_dir)
    if not (path / "corpus.json").is_file():
        cache_dir.mkdir(parents=True, exist_ok=True)
        scratch = cache_dir / f".{path.name}-{uuid.uuid4().hex}"
        scratch.mkdir()
        try:
            _write(settings, scratch)
            _move_into_place(scratch, path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return load(settings, cache_dir)


def _move_into_place(scratch: Path, path: Path) -> None:
    try:
        os.rename(scratch, path)
    except OSError:
        # Another process finished the same corpus first; its folder is as good as this one.
        if not (path / "corpus.json").is_file():
            raise


def _stored(settings: CorpusSettings) -> dict[str, Any]:
    """Return the settings that change the files of a corpus."""
    values = asdict(settings)
    values["text"] = None if settings.folder is None else str(settings.folder.resolve())
    if settings.tokenizer != "bpe":
        values.pop("vocab_size")
    if settings.storage == "mmap":
        values.pop("block_size")
    return values


def _write(settings: CorpusSettings, folder: Path) -> None:
    files = split_files(
        read_files(find_files(settings.folder, settings.suffixes)),
        val_fraction=settings.val_fraction,
        test_fraction=settings.test_fraction,
        seed=settings.split_seed,
    )
    tokenizer = _make_tokenizer(settings, files["train"], folder)
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    fingerprint = hashlib.sha256()
    num_tokens = {}
    for split in SPLITS:
        tokens_N = _tokenize(files[split], tokenizer, dtype)
        num_tokens[split] = len(tokens_N)
        fingerprint.update(f"{split}:{len(tokens_N)}:".encode() + tokens_N.tobytes())
        if settings.storage == "litdata":
            _write_litdata(tokens_N, settings.block_size + 1, folder / split)
        else:
            np.save(folder / f"{split}.npy", tokens_N)
    paths = {split: [file.path for file in files[split]] for split in SPLITS}
    (folder / "files.json").write_text(json.dumps(paths, indent=1))
    stored = {
        "fingerprint": fingerprint.hexdigest()[:16],
        "num_tokens": num_tokens,
        "num_bytes": {split: sum(len(f.content) for f in files[split]) for split in SPLITS},
        "num_files": {split: len(files[split]) for split in SPLITS},
    }
    (folder / "corpus.json").write_text(json.dumps(stored, indent=1))


def _make_tokenizer(settings: CorpusSettings, files: Sequence[TextFile], folder: Path) -> Tokenizer:
    if settings.tokenizer == "byte":
        return ByteTokenizer()
    path = folder / "tokenizer.json"
    if settings.tokenizer == "bpe":
        train_bpe(files, settings.vocab_size, path)
    else:
        source = Path(settings.tokenizer).expanduser()
        BPETokenizer(source)  # explains what is wrong with it before anything is copied
        shutil.copyfile(source, path)
    return BPETokenizer(path)


def _tokenize(
    files: Sequence[TextFile], tokenizer: Tokenizer, dtype: type[np.integer[Any]]
) -> np.ndarray:
    end = np.asarray([tokenizer.eof_id], dtype=dtype)
    parts = [part for f in files for part in (tokenizer.encode(f.content).astype(dtype), end)]
    return np.concatenate(parts)


def _write_litdata(tokens_N: np.ndarray, length: int, folder: Path) -> None:
    """Write blocks with ``litdata.optimize``, in order, in chunks of whole blocks.

    Raises:
        ModuleNotFoundError: litdata is not installed.
    """
    litdata = _import_litdata()
    num_blocks = len(tokens_N) // length
    if num_blocks == 0:
        return
    # Each input becomes one stored item of whole blocks, which keeps every chunk aligned to them.
    per_item = max(1, _LITDATA_CHUNK_NBYTES // (4 * length * tokens_N.itemsize))
    source = folder.with_suffix(".npy")
    np.save(source, tokens_N)
    spans = [
        (str(source), start * length, min(start + per_item, num_blocks) * length)
        for start in range(0, num_blocks, per_item)
    ]
    with _litdata_process():
        litdata.optimize(
            fn=_litdata_item,
            inputs=spans,
            output_dir=str(folder),
            chunk_bytes=_LITDATA_CHUNK_NBYTES,
            item_loader=litdata.TokensLoader(block_size=length),
            num_workers=1,
            reorder_files=False,
            keep_data_ordered=True,
            start_method="spawn",
            verbose=False,
        )
    source.unlink()


@contextmanager
def _litdata_process() -> Iterator[None]:
    """Give ``litdata.optimize`` a folder of its own, and undo what it changes in this process.

    It sets the start method of all later processes, such as those of data loaders.
    """
    variable = "DATA_OPTIMIZER_CACHE_FOLDER"
    folder_before = os.environ.get(variable)
    method_before = multiprocessing.get_start_method(allow_none=True)
    with tempfile.TemporaryDirectory(prefix="litdata-") as scratch:
        os.environ[variable] = scratch
        try:
            yield
        finally:
            multiprocessing.set_start_method(method_before, force=True)
            if folder_before is None:
                del os.environ[variable]
            else:
                os.environ[variable] = folder_before


def _litdata_item(span: tuple[str, int, int]) -> Iterator[np.ndarray]:
    path, start, stop = span
    yield np.load(path, mmap_mode="r")[start:stop].copy()


def _import_litdata():
    try:
        import litdata
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"`--data.storage=litdata` cannot import litdata ({error}). Install it with "
            "`pip install lq-lightning[data]`, or use `--data.storage=mmap`, which gives the same "
            "samples."
        ) from error
    return litdata
