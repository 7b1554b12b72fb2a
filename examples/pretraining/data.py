"""Batches of tokens in an order that can be resumed anywhere, as a LightningDataModule.

The order of an epoch is one permutation of all blocks, drawn from the seed and the epoch. A step
takes the next ``world_size * batch_size`` blocks of it and each rank its own part, so the samples
of a step do not depend on how many ranks share them, on the number of workers, or on the storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from pretraining.corpus import (
    Blocks,
    Corpus,
    CorpusSettings,
    Storage,
    litdata_installed,
    load,
    prepare,
)
from pretraining.text import (
    BPETokenizer,
    ByteTokenizer,
    Tokenizer,
    check_folder,
    check_tokenizer,
)

DEFAULT_PROMPTS = ("def ", "import os\n\nclass ", "    for i in range(")


class BlockBatches(IterableDataset[Tensor]):
    """Whole batches of blocks in a fixed order, starting anywhere in it.

    Iteration starts at ``epoch`` and ``samples`` and gives ``len()`` batches, crossing into the
    next epoch where this one ends. The loader moves the start on.

    Args:
        blocks: The samples.
        batch_size: Blocks per batch on this rank.
        rank: This rank.
        world_size: Number of ranks that share each step.
        seed: Seed of the order.
        shuffle: Draw a new order in each epoch, instead of going by number.

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
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.blocks = blocks
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.samples = 0
        if len(blocks) < self.step_size:
            raise ValueError(
                f"{len(blocks)} blocks are not enough for one step of {world_size} ranks with "
                f"`--data.batch_size={batch_size}`. Lower the batch size or `--data.block_size`, "
                "hold out a larger share of the files, or give more text."
            )

    @property
    def step_size(self) -> int:
        """Blocks that one step takes over all ranks."""
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.blocks) // self.step_size

    def advance(self) -> None:
        """Move the start behind one step."""
        if self.samples + self.step_size > len(self.blocks):
            self.epoch, self.samples = self.epoch + 1, 0
        self.samples += self.step_size

    def __iter__(self) -> Iterator[Tensor]:
        """Yield ``[batch_size, block_size + 1]`` int64 tensors; workers take turns."""
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        epoch, samples = self.epoch, self.samples
        order = self._order(epoch)
        for step in range(len(self)):
            if samples + self.step_size > len(order):
                epoch, samples = epoch + 1, 0
                order = self._order(epoch)
            if step % stride == first:
                start = samples + self.rank * self.batch_size
                chosen = order[start : start + self.batch_size]
                yield torch.from_numpy(np.stack([self.blocks[int(i)] for i in chosen]))
            samples += self.step_size

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.blocks))
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.blocks))


class ResumableLoader(DataLoader[Tensor]):
    """A DataLoader that knows how far training got and continues there.

    Lightning stores ``state_dict()`` in every checkpoint by itself.

    Args:
        batches: The training batches.
        num_workers: Processes that read ahead.
        identity: What must be equal for the order to mean the same, stored with the position.
        restart: Start at the beginning of the data whatever a checkpoint says.
    """

    def __init__(
        self, batches: BlockBatches, *, num_workers: int, identity: dict[str, Any], restart: bool
    ) -> None:
        super().__init__(batches, batch_size=None, num_workers=num_workers, pin_memory=_pins())
        self._batches = batches
        self._identity = identity
        self._restart = restart

    def __iter__(self) -> Iterator[Tensor]:
        """Yield batches and count each as soon as it is handed out."""
        for batch in super().__iter__():
            self._batches.advance()
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch that was handed out."""
        position = {"epoch": self._batches.epoch, "samples": self._batches.samples}
        return {**self._identity, **position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``.

        Args:
            state: What ``state_dict`` returned, on any number of ranks.

        Raises:
            ValueError: the checkpoint's position belongs to other data or another order.
        """
        if self._restart:
            return
        stored = {name: state.get(name) for name in self._identity}
        if stored != self._identity:
            raise ValueError(
                f"The checkpoint stopped inside {stored}, but this run reads {self._identity}. "
                "Resume with the same `--data` options, or start this data from its beginning "
                "with `--data.restart=true`."
            )
        self._batches.epoch, self._batches.samples = state["epoch"], state["samples"]


class Prompts(Dataset[dict[str, Tensor]]):
    """Prompts for ``predict``, one per batch.

    Args:
        prompts: Texts to continue.
        tokenizer: Turns them into tokens.
    """

    def __init__(self, prompts: Sequence[str], tokenizer: Tokenizer) -> None:
        self._tokens = [torch.from_numpy(tokenizer.encode(text.encode())) for text in prompts]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one by number."""
        return {"index": torch.tensor(index), "tokens": self._tokens[index]}


class TextDataModule(pl.LightningDataModule):
    """Real text for language models: a folder, or the Python standard library's own sources.

    Files are split into training, validation and test as wholes. Tokens are prepared once and
    reused by later runs with the same settings.

    Args:
        text: Folder with text or code files. Leave empty to train on the sources of the running
            Python's standard library, which needs no download.
        suffixes: Only read files with these endings, such as ``[.py, .md]``. Empty reads every
            UTF-8 file.
        tokenizer: ``byte`` makes every byte a token, ``bpe`` trains a BPE on the training files,
            anything else is the path of a ``tokenizer.json``.
        vocab_size: Size of the vocabulary that ``bpe`` trains.
        block_size: Tokens the model sees at once.
        batch_size: Blocks per rank and step.
        storage: ``mmap`` is one memory-mapped file, ``litdata`` are optimized chunks read through
            ``litdata.StreamingDataset``; both give the same samples in the same order. ``auto`` is
            ``litdata`` where it is installed and ``mmap`` elsewhere.
        num_workers: Processes that read ahead; 0 reads in the training process.
        val_fraction: Share of the text held out for validation, in whole files.
        test_fraction: Share of the text held out for ``test``, in whole files.
        split_seed: Another seed holds out other files.
        shuffle_seed: Another seed gives another order of training blocks.
        restart: When resuming, start the data at its beginning instead of where the checkpoint
            stopped; needed when other data than before is given.
        cache_dir: Where prepared text is kept.
        prompts: Texts that ``predict`` continues.
    """

    def __init__(
        self,
        text: str | None = None,
        suffixes: list[str] | None = None,
        tokenizer: str = "byte",
        vocab_size: int = 4096,
        block_size: int = 128,
        batch_size: int = 8,
        storage: Literal["auto", "mmap", "litdata"] = "auto",
        num_workers: int = 0,
        val_fraction: float = 0.05,
        test_fraction: float = 0.05,
        split_seed: int = 0,
        shuffle_seed: int = 0,
        restart: bool = False,
        cache_dir: str = "runs/data",
        prompts: list[str] | None = None,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"`--data.batch_size={batch_size}` must be at least 1.")
        chosen: Storage = storage if storage != "auto" else _default_storage()
        self.settings = CorpusSettings(
            text=text,
            suffixes=None if suffixes is None else tuple(suffixes),
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            block_size=block_size,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            split_seed=split_seed,
            storage=chosen,
        )
        # What can be checked now is: an error here comes before any other rank is started.
        check_folder(self.settings.folder)
        check_tokenizer(tokenizer)
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.shuffle_seed = shuffle_seed
        self.restart = restart
        self.cache_dir = Path(cache_dir)
        self.prompts = list(DEFAULT_PROMPTS) if prompts is None else prompts
        self._corpus: Corpus | None = None

    @property
    def corpus(self) -> Corpus:
        """The prepared corpus.

        Raises:
            RuntimeError: called before ``setup``.
        """
        if self._corpus is None:
            raise RuntimeError("`TextDataModule.corpus` exists after `setup`; let Trainer call it.")
        return self._corpus

    @property
    def model_vocab_size(self) -> int:
        """Vocabulary size for the model, known before any text is read where that is possible."""
        if self.settings.tokenizer == "bpe":
            return -(-self.settings.vocab_size // 8) * 8
        if self.settings.tokenizer == "byte":
            return ByteTokenizer.vocab_size
        return BPETokenizer(Path(self.settings.tokenizer).expanduser()).vocab_size

    def prepare_data(self) -> None:
        """Prepare the text, on one rank of every node."""
        prepare(self.settings, self.cache_dir)

    def setup(self, stage: str) -> None:
        """Open the prepared text and check that all ranks have the same.

        Args:
            stage: Lightning's stage; all are treated alike.

        Raises:
            RuntimeError: nodes hold different text.
        """
        del stage
        self._corpus = load(self.settings, self.cache_dir)
        if self.trainer is None:
            return
        own = self._corpus.fingerprint
        first = self.trainer.strategy.broadcast(own)
        if own != first:
            raise RuntimeError(
                f"Rank {self.trainer.global_rank} prepared other text ({own}) than rank 0 "
                f"({first}). Nodes need the same files, and the same Python version for the "
                "default text; or give all of them one folder with `--data.text`."
            )

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return shuffled, resumable training batches."""
        identity = {
            "text": self.corpus.fingerprint,
            "block_size": self.settings.block_size,
            "shuffle_seed": self.shuffle_seed,
        }
        return ResumableLoader(
            self._batches("train", shuffle=True),
            num_workers=self.num_workers,
            identity=identity,
            restart=self.restart,
        )

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Return validation batches in a fixed order."""
        return self._fixed("val")

    def test_dataloader(self) -> DataLoader[Tensor]:
        """Return test batches in a fixed order."""
        return self._fixed("test")

    def predict_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the prompts, one per batch; Lightning deals them out to the ranks."""
        return DataLoader(Prompts(self.prompts, self.corpus.tokenizer()), batch_size=1)

    def _fixed(self, split: Literal["val", "test"]) -> DataLoader[Tensor]:
        batches = self._batches(split, shuffle=False)
        return DataLoader(batches, batch_size=None, num_workers=self.num_workers)

    def _batches(self, split: Literal["train", "val", "test"], *, shuffle: bool) -> BlockBatches:
        ranks = {"num_replicas": 1, "rank": 0}
        if self.trainer is not None:
            ranks |= getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {}
        return BlockBatches(
            self.corpus.blocks(split),
            batch_size=self.batch_size,
            rank=ranks["rank"],
            world_size=ranks["num_replicas"],
            seed=self.shuffle_seed,
            shuffle=shuffle,
        )


def _default_storage() -> Storage:
    return "litdata" if litdata_installed() else "mmap"


def _pins() -> bool:
    return torch.cuda.is_available()
