"""Micro-batches, joined outputs, and identities of samples."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lq_lightning.pipeline.batches import concatenate, sample_ids, split_batch


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass(frozen=True)
class Record:
    x: Tensor
    name: str


class Encoding(collections.UserDict[str, Any]):
    """As ``BatchEncoding`` of transformers."""


def _batch() -> dict[str, Any]:
    x = torch.arange(12).view(6, 2)
    return {
        "x": x,
        "pair": Pair(x.float(), x[:, 0]),
        "list": [x, (x,)],
        "record": Record(x, "name"),
        "encoding": Encoding(x=x),
        "texts": [f"text {i}" for i in range(6)],
        "names": tuple("abcdef"),  # as DataLoader joins strings of tuples
        "lengths": [5, 4, 3, 2, 1, 0],
        "shape": (1, 2, 3, 4, 5, 6),
        "labels": ["a", "b"],
        "scale": torch.tensor(2.0),
        "none": None,
        "number": 3,
    }


def test_every_kind_of_batch_is_cut_along_dim_0() -> None:
    batch = _batch()
    parts = split_batch(batch, 3)
    assert len(parts) == 3
    for index, part in enumerate(parts):
        assert list(part) == list(batch)
        rows = batch["x"][2 * index : 2 * index + 2]
        assert part["x"].data_ptr() == rows.data_ptr()  # no copy
        assert isinstance(part["pair"], Pair)
        assert torch.equal(part["pair"].x, rows.float())
        assert torch.equal(part["pair"].y, rows[:, 0])
        assert torch.equal(part["list"][1][0], rows)
        assert isinstance(part["record"], Record)
        assert torch.equal(part["record"].x, rows)
        assert part["record"].name == "name"
        assert isinstance(part["encoding"], Encoding)
        assert torch.equal(part["encoding"]["x"], rows)
        assert part["texts"] == batch["texts"][2 * index : 2 * index + 2]
        assert part["names"] == batch["names"][2 * index : 2 * index + 2]
        assert part["lengths"] == batch["lengths"][2 * index : 2 * index + 2]
        assert part["shape"] == batch["shape"]
        assert part["labels"] == ["a", "b"]
        assert part["scale"] is batch["scale"]
        assert (part["none"], part["number"]) == (None, 3)
    assert batch["encoding"]["x"].shape == (6, 2)  # left as it was
    assert torch.equal(split_batch(batch["x"], 2)[1], batch["x"][3:])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(6, 1), torch.zeros(1, 3)), r"shapes .*\(1, 3\), \(6, 1\).*are \[1, 6\]"),
        ({"a": torch.tensor(1.0), "b": "text"}, "no tensor with a batch dimension"),
    ],
)
def test_batches_that_cannot_be_cut(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_batch(batch, 2)


def test_objects_of_unknown_kind_are_named() -> None:
    with pytest.raises(TypeError, match="holds a `object`"):
        split_batch([torch.zeros(2), object()], 2)


def test_outputs_are_joined() -> None:
    parts = split_batch(_batch() | {"labels": None}, 3)
    joined = concatenate(parts)
    batch = _batch()
    assert torch.equal(joined["x"], batch["x"])
    assert isinstance(joined["pair"], Pair)
    assert torch.equal(joined["pair"].x, batch["pair"].x)
    assert torch.equal(joined["record"].x, batch["x"])
    assert torch.equal(joined["encoding"]["x"], batch["x"])
    assert joined["texts"] == batch["texts"]
    assert torch.equal(joined["scale"], torch.full((3,), 2.0))
    assert (joined["none"], joined["number"]) == (None, [3, 3, 3])
    assert concatenate([{"a": "x"}, {"a": "y"}]) == {"a": ["x", "y"]}
    assert concatenate([None, None]) is None
    ragged = [[torch.zeros(1)], [torch.zeros(2), torch.zeros(3)]]
    assert [len(item) for item in concatenate(ragged)] == [1, 2, 3]


def test_outputs_of_other_structure_are_refused() -> None:
    with pytest.raises(ValueError, match="different types for micro-batches: .*Tensor.*tuple"):
        concatenate([torch.zeros(1), (torch.zeros(1),)])
    with pytest.raises(ValueError, match="different entries"):
        concatenate([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}])


def test_ids_belong_to_contents_not_to_places() -> None:
    tokens = torch.randint(50_000, (64, 33))
    mask = torch.ones(64, 33)
    batch = {"tokens": tokens, "mask": mask}
    ids = sample_ids(batch)
    assert (ids.dtype, ids.shape) == (torch.int64, (64,))
    assert len(set(ids.tolist())) == 64
    order = torch.randperm(64)
    moved = {"mask": mask[order], "tokens": tokens[order]}
    assert torch.equal(sample_ids(moved), ids[order])
    assert torch.equal(sample_ids(split_batch(batch, 4)[2]), ids[32:48])
    strided = tokens.t().contiguous().t()
    assert torch.equal(sample_ids({"tokens": strided, "mask": mask}), ids)


def test_ids_see_every_bit() -> None:
    x = torch.randn(1, 7)
    changed = [x.clone() for _ in range(5)]
    changed[1].view(torch.int32)[0, 6] ^= 1
    changed[2][0, 3] *= -1
    changed[3] = x.flip(1)
    changed[4] = torch.cat([x, torch.zeros(1, 1)], 1)
    ids = {sample_ids(value).item() for value in changed}
    assert len(ids) == 5
    pairs = [(x, -x), (-x, x), (x, x), (-x, -x)]
    assert len({sample_ids(pair).item() for pair in pairs}) == 4
    for dtype in (torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.complex64):
        values = torch.tensor([[1, 0], [0, 1], [1, 0]]).to(dtype)
        first, second, third = sample_ids(values).tolist()
        assert first == third != second


def test_ids_are_the_same_everywhere() -> None:
    """Ranks and versions must agree on them: they name entries of caches."""
    tokens = torch.tensor([[1, 2, 3], [3, 2, 1]])
    assert sample_ids(tokens).tolist() == [-2263866118087131396, 542498099295158356]
