"""Prepared text: tokens written once to a file, and read back as batches of fixed-length blocks."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretraining import text
from pretraining.text import BPETokenizer, ByteTokenizer, Split, TextFile, Tokenizer

_FORMAT = 3  # raise when the file below changes its meaning

Blocks = np.ndarray  # [blocks, block_size + 1] uint16 or int32, memory-mapped


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSettings:
    """Contents and block size of a corpus; arguments as of ``TextDataModule``."""

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
            text.import_tokenizers()
            if self.vocab_size < text.FEWEST_BPE_TOKENS:
                raise ValueError(
                    f"`--data.vocab_size={self.vocab_size}` is too small: bytes and specials need "
                    f"{text.FEWEST_BPE_TOKENS}. 1024 to 32768 are usual."
                )

    def find_files(self) -> dict[str, Path]:
        """List the files of the text."""
        folder = None if self.text is None else Path(self.text).expanduser()
        return text.find_files(folder, self.suffixes)

    def open_tokenizer(self, trained: Path | None = None) -> Tokenizer:
        """Return the tokenizer; ``trained`` is the file of the one that ``bpe`` makes."""
        if self.tokenizer == "byte":
            return ByteTokenizer()
        given = Path(self.tokenizer).expanduser()
        return BPETokenizer(trained if trained and self.tokenizer == "bpe" else given)


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """A prepared corpus.

    Attributes:
        path: Its file; a trained tokenizer lies beside it, as ``.json``.
        settings: What it was made from.
        tokens: Tokens per split, memory-mapped, end-of-file tokens included.
        fingerprint: Hash of all tokens; equal fingerprints mean equal data, on any machine.
        num_bytes: Bytes of text per split.
        num_files: Files per split.
    """

    path: Path
    settings: CorpusSettings
    tokens: dict[str, Tensor]
    fingerprint: str
    num_bytes: dict[str, int]
    num_files: dict[str, int]

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that made the tokens."""
        return self.settings.open_tokenizer(self.path.with_suffix(".json"))

    def blocks(self, split: Split) -> Blocks:
        """Cut one split into rows of ``block_size + 1`` tokens.

        Raises:
            ValueError: the split does not fill a single block.
        """
        tokens_N = self.tokens[split].numpy()
        length = self.settings.block_size + 1
        count = len(tokens_N) // length
        if count == 0:
            raise ValueError(
                f"The {split} split holds {len(tokens_N)} tokens, less than one block of "
                f"{length}. Give more text, a larger `--data.{split}_fraction`, or a smaller "
                "`--data.block_size`."
            )
        return tokens_N[: count * length].reshape(count, length)


def corpus_path(settings: CorpusSettings, cache_dir: Path) -> Path:
    """Return the file of a corpus, named after the settings and the state of the text's files."""
    files = settings.find_files()
    folder = settings.text and str(Path(settings.text).expanduser().resolve())
    values = [folder, settings.suffixes, settings.tokenizer]
    values += [settings.val_fraction, settings.test_fraction, settings.split_seed]
    if settings.tokenizer == "bpe":
        values.append(settings.vocab_size)
    elif settings.tokenizer != "byte":
        files[settings.tokenizer] = Path(settings.tokenizer).expanduser()
    stats = {name: path.stat() for name, path in files.items()}
    states = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()]
    key = json.dumps([_FORMAT, values, states])
    return cache_dir / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt"


def load(settings: CorpusSettings, cache_dir: Path) -> Corpus:
    """Open a prepared corpus.

    Raises:
        FileNotFoundError: it has not been prepared on this machine.
    """
    path = corpus_path(settings, cache_dir)
    if not path.is_file():
        raise FileNotFoundError(
            f"No prepared text at '{path}'. Call `prepare` first; under Lightning, "
            "`TextDataModule.prepare_data` does. If the text folder is being changed while the "
            "run starts, stop that and start again."
        )
    stored = torch.load(path, mmap=True, weights_only=True)
    return Corpus(path=path, settings=settings, **stored)


def prepare(settings: CorpusSettings, cache_dir: Path) -> Corpus:
    """Make a corpus in ``cache_dir``, or find it ready.

    Its file appears by a rename, after the tokenizer's, so no other process sees half of it.

    Raises:
        FileNotFoundError: the text folder is missing or empty.
        ValueError: the settings do not fit the text.
    """
    path = corpus_path(settings, cache_dir)
    if not path.is_file():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=cache_dir) as scratch:
            trained = Path(scratch, "tokenizer.json")
            torch.save(_tokenized(settings, trained), Path(scratch, "corpus.pt"))
            if trained.is_file():
                os.replace(trained, path.with_suffix(".json"))
            os.replace(Path(scratch, "corpus.pt"), path)
    return load(settings, cache_dir)


def _tokenized(settings: CorpusSettings, trained: Path) -> dict[str, Any]:
    """Return what the file of a corpus holds; a BPE is trained and written to ``trained``."""
    files = text.split_files(
        text.read_files(settings.find_files()),
        val_fraction=settings.val_fraction,
        test_fraction=settings.test_fraction,
        seed=settings.split_seed,
    )
    if settings.tokenizer == "bpe":
        text.train_bpe(files["train"], settings.vocab_size, trained)
    tokenizer = settings.open_tokenizer(trained)
    fingerprint = hashlib.sha256()
    tokens = {}
    for split in text.SPLITS:
        tokens_N = _tokenize(files[split], tokenizer)
        fingerprint.update(f"{split}:{len(tokens_N)}:".encode() + tokens_N.tobytes())
        tokens[split] = torch.from_numpy(tokens_N)
    return {
        "tokens": tokens,
        "fingerprint": fingerprint.hexdigest()[:16],
        "num_bytes": {split: sum(len(f.content) for f in files[split]) for split in text.SPLITS},
        "num_files": {split: len(files[split]) for split in text.SPLITS},
    }


def _tokenize(files: Sequence[TextFile], tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens of all files, each followed by the one that ends it."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    parts = [np.append(tokenizer.encode(file.content), tokenizer.eof_id) for file in files]
    return np.concatenate([part.astype(dtype) for part in parts])


class BlockLoader:
    """Batches of blocks in an order that can be resumed anywhere, on any number of ranks.

    The order of an epoch is one permutation of all blocks, drawn from the seed and the epoch. A
    step takes the next ``world_size * batch_size`` blocks of it, and each rank its own part.
    Iteration yields ``len()`` batches from wherever it starts, crossing into new epochs.

    Args:
        blocks: The samples.
        batch_size: Blocks per batch on this rank.
        rank: This rank.
        world_size: Number of ranks that share each step.
        seed: Seed of the order; ``None`` goes by number and begins anew each time.
        identity: What must be equal for the order to mean the same, stored with the position.

    Raises:
        ValueError: there are not enough blocks for one step.
    """

    def __init__(
        self,
        blocks: Blocks,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int | None = None,
        identity: dict[str, Any] | None = None,
    ) -> None:
        self.blocks = blocks
        self.share = slice(rank * batch_size, (rank + 1) * batch_size)
        self.step_size = world_size * batch_size
        self.seed = seed
        self.identity = identity or {}
        self.epoch = self.samples = 0  # the position behind the last batch that was handed out
        if len(blocks) < self.step_size:
            raise ValueError(
                f"{len(blocks)} blocks are not enough for one step of {world_size} ranks with "
                f"`--data.batch_size={batch_size}`. Lower the batch size or `--data.block_size`, "
                "hold out a larger share of the files, or give more text."
            )

    def __len__(self) -> int:
        """Return how many steps an epoch has."""
        return len(self.blocks) // self.step_size

    def __iter__(self) -> Iterator[Tensor]:
        """Yield ``[batch_size, block_size + 1]`` int64 tensors."""
        if self.seed is None:
            self.epoch = self.samples = 0
        order = self._order()
        for _ in range(len(self)):
            if self.samples + self.step_size > len(self.blocks):
                self.epoch, self.samples = self.epoch + 1, 0
                order = self._order()
            chosen = order[self.samples : self.samples + self.step_size][self.share]
            self.samples += self.step_size
            batch = torch.from_numpy(self.blocks[chosen].astype(np.int64))
            # A copy from pageable memory would make the host wait for the GPU.
            yield batch.pin_memory() if torch.cuda.is_available() else batch

    def _order(self) -> np.ndarray:
        if self.seed is None:
            return np.arange(len(self.blocks))
        return np.random.default_rng([self.seed, self.epoch]).permutation(len(self.blocks))

    def state_dict(self) -> dict[str, Any]:
        """Return the position; Lightning stores it in every checkpoint."""
        return {**self.identity, "epoch": self.epoch, "samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what ``state_dict`` returned on any number of ranks.

        Raises:
            ValueError: the checkpoint's position belongs to other data or another order.
        """
        stored = {name: state.get(name) for name in self.identity}
        if stored != self.identity:
            raise ValueError(
                f"The checkpoint stopped inside {stored}, but this run reads {self.identity}. "
                "Resume with the same `--data` options, or start this data from its beginning "
                "with `--data.restart=true`."
            )
        self.epoch, self.samples = state["epoch"], state["samples"]
