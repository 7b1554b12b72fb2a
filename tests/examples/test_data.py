"""The order of batches: shared among ranks, the same everywhere, and resumable."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pretraining.data import BlockLoader, TextDataModule


def _loader(
    count: int = 50, *, batch_size: int = 4, rank: int = 0, world_size: int = 1, text: str = "a"
) -> BlockLoader:
    """Return a loader of blocks that hold their own number."""
    blocks = np.arange(count, dtype=np.uint16).repeat(3).reshape(count, 3)
    share = {"batch_size": batch_size, "rank": rank, "world_size": world_size}
    return BlockLoader(blocks, **share, seed=3, identity={"text": text})


def _take(loader: BlockLoader, count: int) -> list[list[int]]:
    """Take ``count`` batches over as many epochs as that needs."""
    taken: list[list[int]] = []
    while len(taken) < count:
        for batch in loader:
            taken.append(batch[:, 0].tolist())
            if len(taken) == count:
                break
    return taken


def test_an_epoch_is_a_permutation_and_the_next_differs() -> None:
    loader = _loader(48)
    first, second = list(loader), list(loader)
    assert len(first) == len(second) == len(loader) == 12
    numbers = torch.cat(first)[:, 0]
    assert sorted(numbers.tolist()) == list(range(48))
    assert numbers.tolist() != torch.cat(second)[:, 0].tolist()
    assert sorted(torch.cat(second)[:, 0].tolist()) == list(range(48))


@pytest.mark.parametrize("stop", [1, 5, 11, 12, 13, 30])
def test_resume_continues_anywhere(stop: int) -> None:
    whole = _take(_loader(), 40)
    first = _loader()
    start = _take(first, stop)
    second = _loader()
    second.load_state_dict(first.state_dict())
    assert start + _take(second, 40 - stop) == whole


def test_resume_on_another_number_of_ranks() -> None:
    whole = _take(_loader(96, batch_size=8), 12)
    first = _loader(96, batch_size=8)
    _take(first, 5)
    ranks = [_loader(96, batch_size=4, rank=r, world_size=2) for r in range(2)]
    for loader in ranks:
        loader.load_state_dict(first.state_dict())
    shares = [_take(loader, 7) for loader in ranks]
    assert [a + b for a, b in zip(*shares, strict=True)] == whole[5:]


def test_resume_on_other_data_is_refused() -> None:
    first = _loader()
    _take(first, 3)
    with pytest.raises(ValueError, match=r"'text': 'a'.*'text': 'b'.*--data.restart=true"):
        _loader(text="b").load_state_dict(first.state_dict())


def test_too_few_blocks() -> None:
    with pytest.raises(ValueError, match=r"7 blocks are not enough.*2 ranks.*batch_size=4"):
        BlockLoader(np.zeros((7, 3), dtype=np.uint16), batch_size=4, world_size=2)


def test_data_module(text_folder: Path, tmp_path: Path) -> None:
    data = TextDataModule(
        text=str(text_folder),
        block_size=16,
        batch_size=2,
        cache_dir=str(tmp_path / "cache"),
    )
    assert data.model_vocab_size == 264
    with pytest.raises(RuntimeError, match="after `setup`"):
        _ = data.corpus
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch.shape == (2, 17)
    assert batch.dtype == torch.int64
    held_out = [next(iter(data.val_dataloader())) for _ in range(2)]
    torch.testing.assert_close(*held_out)
    prompt = next(iter(data.predict_dataloader()))
    assert prompt["tokens"].tolist() == [list(b"def ")]
    data.restart = True
    restarted = data.train_dataloader()
    restarted.load_state_dict({"text": "other", "epoch": 0, "samples": 8})
    torch.testing.assert_close(next(iter(restarted)), batch)


def test_nodes_with_other_text_are_named(text_folder: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    data = TextDataModule(text=str(text_folder), cache_dir=cache)
    data.prepare_data()
    strategy = SimpleNamespace(broadcast=lambda own: "another")
    data.trainer = SimpleNamespace(strategy=strategy, global_rank=3)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="Rank 3 prepared other text .* than rank 0 .another"):
        data.setup("fit")


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Blocks of their own numbers, as litdata stores tokens, in chunks of 20 blocks."""
    try:
        writer = importlib.import_module("litdata.streaming.writer")
        loader = importlib.import_module("litdata").TokensLoader
    except ImportError as error:
        pytest.skip(f"litdata cannot be imported: {error}")
    for split, count in (("train", 100), ("val", 20), ("test", 4)):
        folder = tmp_path / "tokens" / split
        chunks = writer.BinaryWriter(str(folder), chunk_size=20 * 9, item_loader=loader())
        for number in range(0, count, 4):
            rows = torch.arange(number, number + 4, dtype=torch.int32).repeat_interleave(9)
            chunks.add_item(number // 4, rows)
        chunks.done()
        chunks.merge()
    return tmp_path / "tokens"


def test_tokens_of_litdata_are_read_and_resumed_by_litdata(tokens: Path) -> None:
    def module(**changes: object) -> TextDataModule:
        return TextDataModule(tokens=str(tokens), block_size=8, batch_size=4, **changes)

    data = module()
    data.prepare_data()
    data.setup("fit")
    assert data.model_vocab_size == 264
    whole = data.train_dataloader()
    batches = list(whole)
    assert batches[0].shape == (4, 9)
    assert batches[0].dtype == torch.int64
    numbers = torch.cat(batches)[:, 0].tolist()
    assert sorted(numbers) == list(range(100)) != numbers
    stopped = data.train_dataloader()
    for _ in zip(range(7), stopped):  # noqa: B905
        pass
    resumed = module().train_dataloader()
    resumed.load_state_dict(stopped.state_dict())
    torch.testing.assert_close(list(resumed), batches[7:])
    restarted = module(restart=True).train_dataloader()
    restarted.load_state_dict(stopped.state_dict())
    torch.testing.assert_close(next(iter(restarted)), batches[0])
    held_out = [torch.cat(list(data.val_dataloader()))[:, 0].tolist() for _ in range(2)]
    assert held_out == [list(range(20))] * 2
    with pytest.raises(ValueError, match=r"tokens in 'test' do not fill.*batch_size=5"):
        TextDataModule(tokens=str(tokens), block_size=8, batch_size=5).test_dataloader()


def test_litdata_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "litdata", None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps litdata"):
        TextDataModule(tokens="s3://bucket/tokens")


def test_data_module_checks_before_any_rank_starts() -> None:
    with pytest.raises(ValueError, match="block_size=1"):
        TextDataModule(block_size=1)
    with pytest.raises(FileNotFoundError, match="is not a folder.*standard library"):
        TextDataModule(text="/no/such/folder")
    with pytest.raises(FileNotFoundError, match="has no folder `train`"):
        TextDataModule(tokens="/no/such/folder")
    with pytest.raises(ValueError, match="leave `--data.text` out"):
        TextDataModule(text=".", tokens="tokens")
    with pytest.raises((FileNotFoundError, ModuleNotFoundError), match="tokenizer"):
        TextDataModule(tokenizer="/no/such.json")
