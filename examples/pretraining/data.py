"""Text, or tokens that litdata prepared, as a LightningDataModule that can be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pretraining.corpus import BlockLoader, Corpus, CorpusSettings, load, prepare
from pretraining.text import Split, Tokenizer, round_up

DEFAULT_PROMPTS = ("def ", "import os\n\nclass ", "    for i in range(")


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
        block_size: Tokens the model sees at once.
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
        batch_size: int = 8,
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
        self.settings = CorpusSettings(
            text=text,
            suffixes=None if suffixes is None else tuple(suffixes),
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            block_size=block_size,
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
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.shuffle_seed = shuffle_seed
        self.restart = restart
        self.cache_dir = Path(cache_dir)
        self.prompts = DEFAULT_PROMPTS if prompts is None else prompts
        self._corpus: Corpus | None = None

    @property
    def corpus(self) -> Corpus:
        """The prepared text.

        Raises:
            RuntimeError: called before ``setup``, or with ``tokens``.
        """
        if self._corpus is None:
            raise RuntimeError("`TextDataModule.corpus` exists after `setup` of a text folder.")
        return self._corpus

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; one that is trained exists after ``setup``."""
        return self.corpus.tokenizer() if self._tokenizer is None else self._tokenizer

    @property
    def model_vocab_size(self) -> int:
        """Vocabulary size for the model, known before any text is read."""
        if self._tokenizer is None:
            return round_up(self.settings.vocab_size)
        return self._tokenizer.vocab_size

    def prepare_data(self) -> None:
        """Prepare the text, on one rank of every node."""
        if self.tokens is None:
            prepare(self.settings, self.cache_dir)

    def setup(self, stage: str) -> None:
        """Open the prepared text and check that all ranks have the same.

        Raises:
            RuntimeError: nodes hold different text.
        """
        if self.tokens is not None:
            return
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
            self.corpus.blocks(split),
            batch_size=self.batch_size,
            rank=shares["rank"],
            world_size=shares["num_replicas"],
            seed=self.shuffle_seed if shuffle else None,
            identity={
                "text": self.corpus.fingerprint,
                "block_size": self.settings.block_size,
                "shuffle_seed": self.shuffle_seed,
            },
        )

    def _stream_tokens(self, split: Split, shuffle: bool) -> Any:
        litdata = _import_litdata()
        dataset = litdata.StreamingDataset(
            f"{str(self.tokens).rstrip('/')}/{split}",
            item_loader=litdata.TokensLoader(block_size=self.settings.block_size + 1),
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
                f"`--data.block_size={self.settings.block_size}`. Lower one of them."
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
