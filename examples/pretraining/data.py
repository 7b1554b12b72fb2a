"""Text, or tokens that litdata prepared, as a LightningDataModule that can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from jsonargparse.typing import PositiveInt
from torch import Tensor
from torch.utils.data import DataLoader

from pretraining.text import Corpus, CorpusSettings, Split, Tokenizer, prepare, round_up

DEFAULT_PROMPTS = ("def ", "import os\n\nclass ", "    for i in range(")


class BlockLoader:
    """Batches of blocks in an order that can be resumed anywhere, on any number of ranks.

    The order of an epoch is one permutation of all blocks, drawn from the seed and the epoch. A
    step takes the next ``world_size * batch_size`` blocks of it, and each rank its own part.
    Iteration yields ``len()`` batches from wherever it starts, crossing into new epochs.

    Args:
        blocks: Samples, ``[blocks, block_size + 1]``.
        batch_size: Blocks per batch on this rank.
        rank: This rank.
        world_size: Number of ranks that share each step.
        seed: Seed of the order; ``None`` keeps the order of the blocks and starts over each time.
        identity: What must be equal for a position to mean the same; stored with the position.
    """

    def __init__(
        self,
        blocks: np.ndarray,
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
        """Continue from what ``state_dict`` returned on any number of ranks."""
        stored = {name: state.get(name) for name in self.identity}
        if stored != self.identity:
            raise ValueError(
                f"The checkpoint stopped inside {stored}, but this run reads {self.identity}. "
                "Resume with the same `--data` options, or start this data from its beginning "
                "with `--data.restart=true`."
            )
        self.epoch, self.samples = state["epoch"], state["samples"]


class TextDataModule(pl.LightningDataModule):
    """Real text for language models: a folder, or the Python standard library's own sources.

    Files are split into training, validation and test as wholes. Tokens are prepared once and
    reused by later runs with the same settings.

    Args:
        text: Folder with text or code files. Leave empty to train on the sources of the running
            Python's standard library, which needs no download.
        suffixes: Only read files with these endings, such as ``[.py, .md]``. Empty reads every
            UTF-8 file.
        tokens: In place of ``text``, a folder or URL with the parts ``train``, ``val`` and ``test``
            that ``litdata.optimize`` wrote with ``TokensLoader``. litdata streams them; a resumed
            run goes on exactly with as many ranks and workers as before, and without repeating
            anything with others.
        tokenizer: ``byte`` makes every byte a token, ``bpe`` trains a BPE on the training files,
            anything else is the path of a ``tokenizer.json``.
        vocab_size: Size of the vocabulary that ``bpe`` trains.
        block_size: Tokens the model sees at once; at least 2.
        batch_size: Blocks per rank and step.
        num_workers: Processes in which litdata reads ``tokens`` ahead; ``text`` needs none.
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
        tokens: str | None = None,
        tokenizer: str = "byte",
        vocab_size: int = 4096,
        block_size: int = 128,
        batch_size: PositiveInt = 8,
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
        if block_size < 2:
            raise ValueError(f"`--data.block_size={block_size}` must be at least 2 tokens.")
        self.settings = CorpusSettings(
            text=text,
            suffixes=None if suffixes is None else tuple(suffixes),
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            val_fraction=val_fraction,
            test_fraction=test_fraction,
            split_seed=split_seed,
        )
        # What can be checked now is: an error here comes before any other rank is started.
        self._tokenizer = None if tokenizer == "bpe" else self.settings.open_tokenizer()
        if tokens is None:
            self.settings.find_files()
        elif text is not None or tokenizer == "bpe":
            raise ValueError(
                f"`--data.tokens={tokens}` takes neither `--data.text` nor a BPE trained on it: "
                "leave `--data.text` out and give the `--data.tokenizer` that made the tokens."
            )
        elif "://" not in tokens and not Path(tokens, "train").is_dir():
            raise FileNotFoundError(
                f"`--data.tokens={tokens}` has no folder `train`: give the folder above the parts "
                "`train`, `val` and `test` that `litdata.optimize` wrote."
            )
        else:
            _import_litdata()
        self.tokens = tokens
        self.block_size = block_size
        self.batch_size = int(batch_size)
        self.num_workers = num_workers
        self.shuffle_seed = shuffle_seed
        self.restart = restart
        self.cache_dir = Path(cache_dir)
        self.prompts = DEFAULT_PROMPTS if prompts is None else prompts
        self._corpus: Corpus | None = None

    @property
    def corpus(self) -> Corpus:
        """The prepared text."""
        if self._corpus is None:
            raise RuntimeError("`TextDataModule.corpus` exists after `setup` of a text folder.")
        return self._corpus

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; one that is trained exists after ``setup``."""
        return self._tokenizer or self.corpus.tokenizer

    @property
    def model_vocab_size(self) -> int:
        """Vocabulary size for the model, known before any text is read."""
        if self._tokenizer is None:
            return round_up(self.settings.vocab_size)
        return self._tokenizer.vocab_size

    def example_batch(self) -> Tensor:
        """Return a batch of the right shape; ``lq-lightning plan`` reads no text."""
        return torch.zeros(self.batch_size, self.block_size + 1, dtype=torch.int64)

    def prepare_data(self) -> None:
        """Prepare the text, on one rank of every node."""
        if self.tokens is None:
            prepare(self.settings, self.cache_dir)

    def setup(self, stage: str) -> None:
        """Open the prepared text and check that all ranks have the same."""
        if self.tokens is not None:
            return
        self._corpus = prepare(self.settings, self.cache_dir)
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

    def train_dataloader(self) -> Any:
        """Return shuffled, resumable training batches of ``[batch_size, block_size + 1]``."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> Any:
        """Return validation batches in a fixed order."""
        return self._loader("val", shuffle=False)

    def test_dataloader(self) -> Any:
        """Return test batches in a fixed order."""
        return self._loader("test", shuffle=False)

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return the prompts, one per batch; Lightning deals them out to the ranks."""
        encoded = [torch.from_numpy(self.tokenizer.encode(text.encode())) for text in self.prompts]
        prompts = [{"index": index, "tokens": tokens} for index, tokens in enumerate(encoded)]
        return DataLoader(prompts, batch_size=1)  # type: ignore[arg-type]

    def _loader(self, split: Split, *, shuffle: bool) -> Any:
        read = self._read_text if self.tokens is None else self._stream_tokens
        loader = read(split, shuffle)
        if self.restart:  # Lightning hands the position of a checkpoint to this method
            loader.load_state_dict = lambda state: None
        return loader

    def _read_text(self, split: Split, shuffle: bool) -> BlockLoader:
        shares = {"num_replicas": 1, "rank": 0}
        if self.trainer is not None:
            shares |= getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {}
        return BlockLoader(
            self.corpus.blocks(split, self.block_size),
            batch_size=self.batch_size,
            rank=shares["rank"],
            world_size=shares["num_replicas"],
            seed=self.shuffle_seed if shuffle else None,
            identity={
                "text": self.corpus.fingerprint,
                "block_size": self.block_size,
                "shuffle_seed": self.shuffle_seed,
            },
        )

    def _stream_tokens(self, split: Split, shuffle: bool) -> Any:
        litdata = _import_litdata()
        dataset = litdata.StreamingDataset(
            f"{str(self.tokens).rstrip('/')}/{split}",
            item_loader=litdata.TokensLoader(block_size=self.block_size + 1),
            shuffle=shuffle,
            drop_last=True,
            seed=self.shuffle_seed,
        )
        loader = litdata.StreamingDataLoader(
            dataset,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            drop_last=True,
            collate_fn=_as_int64,
            pin_memory=torch.cuda.is_available(),
        )
        if len(loader) == 0:
            raise ValueError(
                f"`--data.tokens={self.tokens}`: the tokens in '{split}' do not fill a step of all "
                f"ranks with `--data.batch_size={self.batch_size}` and "
                f"`--data.block_size={self.block_size}`. Lower one of them."
            )
        return loader


def _as_int64(blocks: list[Tensor]) -> Tensor:
    return torch.stack(blocks).long()


def _import_litdata() -> Any:
    try:
        import litdata
    except ImportError as error:
        raise ModuleNotFoundError(
            f"`--data.tokens` needs litdata, which cannot be imported ({error}). Install it with "
            "`pip install --no-deps litdata` and `pip install boto3 filelock requests`: by itself "
            "it also asks for torchvision, which pip may take from another build of torch."
        ) from error
    return litdata
