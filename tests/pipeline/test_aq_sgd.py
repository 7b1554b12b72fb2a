"""AQ-SGD: both ends hold the same, whatever is evicted, evaluated or announced early."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lq_lightning.pipeline.aq_sgd import AQSGDCodec, AQSGDQuantization
from lq_lightning.pipeline.boundary import make_boundary_codec
from lq_lightning.pipeline.message import Message

TOKENS, CHANNELS = 4, 64
SAMPLE_NBYTES = TOKENS * CHANNELS * 2


def coded_nbytes(samples: int) -> int:
    """INT4 codes, scales and minima of tiles of 64, each section padded to 16 bytes."""
    tiles = samples * TOKENS
    return 32 * tiles + 2 * (-(-2 * tiles // 16) * 16)


def ends(samples: int = 100, in_memory: int = 100, **options: Any) -> tuple[AQSGDCodec, AQSGDCodec]:
    config = AQSGDQuantization(
        cache_nbytes=samples * SAMPLE_NBYTES, memory_nbytes=in_memory * SAMPLE_NBYTES, **options
    )
    sender, receiver = make_boundary_codec(config), make_boundary_codec(config)
    assert isinstance(sender, AQSGDCodec)
    assert isinstance(receiver, AQSGDCodec)
    return sender, receiver


def message(samples: list[int] | None, microbatch: int = 0, **options: Any) -> Message:
    ids = None if samples is None else torch.tensor(samples, dtype=torch.int64)
    return Message(boundary=0, backward=False, microbatch=microbatch, samples=ids, **options)


def send(sender: AQSGDCodec, receiver: AQSGDCodec, x: Tensor, of: Message) -> tuple[int, Tensor]:
    """Return the size of the payload and what is received."""
    announced = receiver.nbytes(x.shape, x.dtype, of)
    payload = sender.encode(x, of)
    assert payload.shape == (announced,)
    return announced, receiver.decode(payload, x.shape, x.dtype, of)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float16", "float32"])
def test_differences_shrink_the_error(dtype: torch.dtype, cache_dtype: str) -> None:
    sender, receiver = ends(1000, cache_dtype=cache_dtype)
    x = torch.randn(3, TOKENS, CHANNELS).to(dtype)
    nbytes, received = send(sender, receiver, x, message([7, -9, 2**62]))
    assert nbytes == x.nbytes
    assert torch.equal(received, x)
    # what has not changed is there at once, up to the dtypes
    nbytes, received = send(sender, receiver, x, message([7, -9, 2**62]))
    assert nbytes == coded_nbytes(3)
    torch.testing.assert_close(received, x, rtol=2**-8, atol=1e-3)
    moved = (x.float() + 0.1 * torch.randn(x.shape)).to(dtype)
    errors = []
    for _ in range(4):
        _, received = send(sender, receiver, moved, message([7, -9, 2**62]))
        errors.append(float((received.float() - moved.float()).norm() / moved.float().norm()))
    # int4 of a tenth; then of what is left of it, down to the resolution of 16 bits
    assert 0.004 < errors[0] < 0.012
    assert errors[-1] < 0.3 * errors[0]


def test_part_of_a_message_is_new() -> None:
    sender, receiver = ends()
    x = torch.randn(4, TOKENS, CHANNELS)
    send(sender, receiver, x[:2], message([1, 2]))
    order = [3, 1, 4, 2]
    nbytes, received = send(sender, receiver, x[[2, 0, 3, 1]], message(order))
    assert nbytes == 2 * x[0].nbytes + coded_nbytes(2)
    assert torch.equal(received[[0, 2]], x[2:])
    torch.testing.assert_close(received[[1, 3]], x[:2], rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize(("capacity", "in_memory"), [(100, 100), (10, 4), (3, 0), (2, 2), (1, 1)])
def test_both_ends_hold_the_same(capacity: int, in_memory: int) -> None:
    """Over epochs, with evaluation in between and messages announced before others arrive."""
    rng = random.Random(0)
    sender, receiver = ends(capacity, in_memory)
    data = torch.randn(16, TOKENS, CHANNELS)
    seen = 0
    for _ in range(4):
        data += 0.05 * torch.randn_like(data)
        # twice in a message, and twice in a step
        steps = [[rng.randrange(16) for _ in range(2)] for _ in range(8)]
        messages = [message(ids, index, training=index != 5) for index, ids in enumerate(steps)]
        shape = (2, TOKENS, CHANNELS)
        announced = [receiver.nbytes(shape, data.dtype, of) for of in messages]
        again = [receiver.nbytes(shape, data.dtype, of) for of in messages]
        assert announced == again  # the same announcement
        for ids, of, nbytes in zip(steps, messages, announced, strict=True):
            payload = sender.encode(data[ids], of)
            assert payload.shape == (nbytes,)
            received = receiver.decode(payload, shape, data.dtype, of)
            error = float((received - data[ids]).norm() / data[ids].norm())
            assert error < 0.03
            assert error > 0 or nbytes >= data[0].nbytes
            seen += nbytes < data[ids].nbytes
    assert seen > 2 or capacity == 1
    one, other = sender._caches[0], receiver._caches[0]
    assert len(one._slots) == min(capacity, 16)
    assert list(one._slots.items()) == list(other._slots.items())
    for slot in one._slots.values():
        assert torch.equal(one._read(slot), other._read(slot))


def test_the_least_recently_used_makes_room() -> None:
    sender, receiver = ends(3)
    x = torch.randn(1, TOKENS, CHANNELS)
    for sample in (1, 2, 3, 1, 4):
        send(sender, receiver, x, message([sample]))
    assert list(sender._caches[0]._slots) == [3, 1, 4]
    sizes = [send(sender, receiver, x, message([sample]))[0] for sample in (1, 2, 3)]
    assert sizes == [coded_nbytes(1), x.nbytes, x.nbytes]


def test_evaluation_changes_nothing() -> None:
    sender, receiver = ends()
    x = torch.randn(2, TOKENS, CHANNELS)
    for ids in ([1, 2], None):
        nbytes, received = send(sender, receiver, x, message(ids, training=False))
        assert nbytes == x.nbytes
        assert torch.equal(received, x)
    assert not sender._caches
    nbytes, _ = send(sender, receiver, x, message([1, 2]))
    assert nbytes == x.nbytes


def test_what_is_not_finite_does_not_stay() -> None:
    sender, receiver = ends()
    x = torch.randn(1, TOKENS, CHANNELS)
    broken = x.clone()
    broken[0, 1, 3], broken[0, 2, 5] = float("nan"), float("inf")
    _, received = send(sender, receiver, broken, message([1]))
    assert torch.equal(received.nan_to_num(), broken.nan_to_num())
    _, received = send(sender, receiver, broken, message([1]))
    assert torch.equal(received[0, 1:3].isfinite().any(-1), torch.tensor([False, False]))
    for _ in range(3):
        _, received = send(sender, receiver, x, message([1]))
    assert float((received - x).norm() / x.norm()) < 0.02


def test_boundaries_are_apart() -> None:
    sender, receiver = ends()
    x = torch.randn(1, TOKENS, CHANNELS)
    send(sender, receiver, x, message([1]))
    other = Message(boundary=1, backward=False, microbatch=0, samples=torch.tensor([1]))
    assert send(sender, receiver, -x, other)[0] == x.nbytes
    _, received = send(sender, receiver, x, message([1]))
    torch.testing.assert_close(received, x, rtol=2**-8, atol=1e-3)


def test_the_file_has_no_name_and_goes(tmp_path: Path) -> None:
    sender, receiver = ends(4, 1, folder=tmp_path)
    x = torch.randn(4, TOKENS, CHANNELS)
    send(sender, receiver, x, message([1, 2, 3, 4]))
    assert sender._caches[0]._file is not None
    assert len(sender._caches[0]._memory) == 1
    assert not list(tmp_path.iterdir())
    nbytes, received = send(sender, receiver, x, message([1, 2, 3, 4]))
    assert nbytes == coded_nbytes(4)
    torch.testing.assert_close(received, x, rtol=2**-8, atol=1e-3)
    sender.close()
    assert not sender._caches


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, _ = ends(4, 1, folder=tmp_path)
    pwrite = os.pwrite

    def nearly_full(file: int, data: Any, start: int) -> int:
        room = min(2 * SAMPLE_NBYTES - start, 100)  # of which a write takes a part
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(file, data[:room], start)

    monkeypatch.setattr(os, "pwrite", nearly_full)
    x = torch.randn(3, TOKENS, CHANNELS)
    for _ in range(2):
        sender.encode(x, message([1, 2, 3]))
    kept = torch.stack([sender._caches[0]._read(slot) for slot in range(3)]).float()
    torch.testing.assert_close(kept.view_as(x), x, rtol=2**-8, atol=1e-3)
    match = (
        rf"in a file in `{tmp_path}`, .* grow from 1024 to 1536 bytes, and up to 1536, .*"
        r"No space left.*`folder` on a larger disk"
    )
    with pytest.raises(OSError, match=match):
        sender.encode(x[:1], message([4]))
    open_files = len(os.listdir("/proc/self/fd"))
    sender.close()
    assert len(os.listdir("/proc/self/fd")) == open_files - 1


def test_ends_may_differ_in_where_they_keep_samples_only(tmp_path: Path) -> None:
    own = {"memory_nbytes": 5, "folder": tmp_path}
    for options in ({"code": "int8"}, {"cache_nbytes": 10**6}, {"cache_dtype": "float32"}):
        codecs = [make_boundary_codec(AQSGDQuantization(**o)) for o in ({}, own, options)]
        assert codecs[0].options == codecs[1].options != codecs[2].options


def test_a_loaded_checkpoint_begins_anew() -> None:
    sender, receiver = ends()
    x = torch.randn(1, TOKENS, CHANNELS)
    send(sender, receiver, x, message([1]))
    for codec in (sender, receiver):
        codec.forget()
    assert send(sender, receiver, x, message([1]))[0] == x.nbytes


def test_errors_name_value_and_remedy() -> None:
    sender, _ = ends(1)
    with pytest.raises(ValueError, match=r"needs 1024 bytes for a sample of \(8, 64\).*Raise it"):
        sender.check((1, 8, 64), torch.float32)
    x = torch.randn(2, TOKENS, CHANNELS)
    with pytest.raises(ValueError, match="each of the 2 samples .* got none.*'tah'"):
        sender.encode(x, message(None))
    with pytest.raises(ValueError, match=r"got shape \(3,\)"):
        sender.encode(x, message([1, 2, 3]))
    sender, _ = ends(10)
    sender.encode(x, message([1, 2]))
    with pytest.raises(ValueError, match=r"samples of 256 values and was given one of \(2, 64\)"):
        sender.encode(x[:, :2], message([1, 2]))


def test_messages_that_never_came() -> None:
    sender, receiver = ends()
    shape = (1, TOKENS, CHANNELS)
    receiver.nbytes(shape, torch.float32, message([1]))
    with pytest.raises(RuntimeError, match=r"announced with the samples \(1,\) and now has \(2,\)"):
        receiver.nbytes(shape, torch.float32, message([2]))
    receiver.nbytes(shape, torch.float32, message([2], 1))
    payload = sender.encode(torch.randn(shape), message([2], 1))
    with pytest.raises(RuntimeError, match="Micro-batch 1 overtook micro-batch 0 at boundary 0"):
        receiver.decode(payload, shape, torch.float32, message([2], 1))


@pytest.mark.parametrize(
    "options",
    [
        {"code": "fp8_e4m3"},
        {"tile_size": 8},
        {"cache_dtype": "int8"},
        {"cache_nbytes": 0},
        {"cache_nbytes": 1e9},
        {"memory_nbytes": -1},
        {"folder": "/no/such/folder"},
    ],
)
def test_bad_options(options: dict[str, Any]) -> None:
    field = next(iter(options))
    with pytest.raises(ValueError, match=rf"AQSGDQuantization\({field}="):
        AQSGDQuantization(**options)
