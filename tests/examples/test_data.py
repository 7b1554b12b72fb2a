"""The order of batches: shared among ranks, the same everywhere, and resumable."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pretraining.data import BlockBatches, ResumableLoader, TextDataModule


class _Numbers:
    """Blocks that hold their own number."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> np.ndarray:
        return np.full(3, index, dtype=np.int64)


def _loader(
    count: int = 50,
    *,
    batch_size: int = 4,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    restart: bool = False,
    text: str = "a",
) -> ResumableLoader:
    batches = BlockBatches(
        _Numbers(count), batch_size=batch_size, rank=rank, world_size=world_size, seed=3
    )
    return ResumableLoader(batches, num_workers=workers, identity={"text": text}, restart=restart)


def _take(loader: ResumableLoader, count: int) -> list[list[int]]:
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


def test_ranks_share_the_order_of_one_rank() -> None:
    alone = _take(_loader(batch_size=8), 20)
    ranks = [_take(_loader(batch_size=4, rank=r, world_size=2), 20) for r in range(2)]
    assert [a + b for a, b in zip(*ranks, strict=True)] == alone


def test_workers_do_not_change_the_order() -> None:
    assert _take(_loader(workers=2), 7) == _take(_loader(), 7)


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


def test_resume_on_other_data_is_refused_or_restarts() -> None:
    first = _loader()
    _take(first, 3)
    with pytest.raises(ValueError, match=r"'text': 'a'.*'text': 'b'.*--data.restart=true"):
        _loader(text="b").load_state_dict(first.state_dict())
    restarted = _loader(text="b", restart=True)
    restarted.load_state_dict(first.state_dict())
    assert _take(restarted, 3) == _take(_loader(), 3)


def test_too_few_blocks() -> None:
    with pytest.raises(ValueError, match=r"7 blocks are not enough.*2 ranks.*batch_size=4"):
        BlockBatches(_Numbers(7), batch_size=4, world_size=2)


def test_data_module(text_folder: Path, tmp_path: Path) -> None:
    data = TextDataModule(
        text=str(text_folder),
        block_size=16,
        batch_size=2,
        storage="mmap",
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


def test_nodes_with_other_text_are_named(text_folder: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    data = TextDataModule(text=str(text_folder), storage="mmap", cache_dir=cache)
    data.prepare_data()
    strategy = SimpleNamespace(broadcast=lambda own: "another")
    data.trainer = SimpleNamespace(strategy=strategy, global_rank=3)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="Rank 3 prepared other text .* than rank 0 .another"):
        data.setup("fit")


def test_data_module_checks_before_any_rank_starts() -> None:
    with pytest.raises(ValueError, match="batch_size=0"):
        TextDataModule(batch_size=0)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        TextDataModule(text="/no/such/folder")
    with pytest.raises((FileNotFoundError, ModuleNotFoundError), match="tokenizer"):
        TextDataModule(tokenizer="/no/such.json")
