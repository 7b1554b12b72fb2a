"""The boundary codec of learned widths: payloads, sizes, and refusals."""

from __future__ import annotations

import pytest
import torch

from lq_lightning.codecs.mixed import Ranges, WidthTable, round_trip_mixed
from lq_lightning.pipeline.boundary import make_boundary_codec
from lq_lightning.pipeline.boundary_widths import MixedCodec
from lq_lightning.pipeline.message import BoundaryCodec, Message

SHAPE = (2, 12, 20)


def _message(boundary: int = 0, backward: bool = False) -> Message:
    return Message(boundary=boundary, backward=backward, microbatch=0)


def _table(lines: int, seed: int = 0) -> WidthTable:
    return WidthTable(torch.randint(1, 17, (lines,), generator=torch.Generator().manual_seed(seed)))


def _start(lines: int) -> WidthTable:
    return WidthTable([5] * lines)


def _codec(ranges: Ranges = "fitted") -> MixedCodec:
    codec = MixedCodec()
    codec.begin(_start, ranges)
    return codec


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranges", ["full", "fitted"])
def test_values_and_sizes_are_those_of_the_table(dtype: torch.dtype, ranges: Ranges) -> None:
    x = torch.randn(SHAPE).to(dtype)
    x[0, 3, 4] = float("nan")
    tables = {0: _start(20), 1: _table(20)}  # the first is that of the beginning
    # what is received needs no ranges
    ends = _codec(ranges), _codec("full")
    for end in ends:
        end.set_table(1, tables[1])
    for boundary, table in tables.items():
        for view in (x, x.mT.contiguous().mT):
            message = _message(boundary)
            nbytes = ends[1].nbytes(SHAPE, dtype, message)
            assert nbytes == table.nbytes(24)
            payload = ends[0].encode(view, message)
            assert payload.shape == (nbytes,)
            decoded = ends[1].decode(payload, SHAPE, dtype, message)
            both, rounded = ends[0].encode_and_round(view, message)
            assert torch.equal(both, payload)
            torch.testing.assert_close(rounded, decoded, rtol=0, atol=0, equal_nan=True)
            payload.fill_(0xFF)
            assert decoded.dtype == dtype
            assert decoded.is_contiguous()
            expected = round_trip_mixed(x.flatten(0, 1), table, ranges)
            found = decoded.flatten(0, 1)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            assert found.isnan().any()
    mean = tables[1].nbytes(24) * 8 / x.numel()  # of what was set
    assert ends[0].bits_per_value(SHAPE, dtype) == mean


def test_widths_change_when_a_table_is_set() -> None:
    codec = _codec()
    before = codec.nbytes(SHAPE, torch.float32, _message())
    for seed in (0, 1):  # the second in the place of the first
        table = _table(20, seed)
        codec.set_table(0, table)
        assert codec.nbytes(SHAPE, torch.float32, _message()) == table.nbytes(24)
    assert codec.nbytes(SHAPE, torch.float32, _message(1)) == before
    codec.begin(_start, "full")
    assert codec.nbytes(SHAPE, torch.float32, _message()) == before


def test_needs_a_callback() -> None:
    codec: BoundaryCodec = make_boundary_codec("amaq")
    with pytest.raises(ValueError, match="`AdaptiveBits`, which is missing"):
        codec.check(SHAPE, torch.float32)
    codec = _codec()
    codec.check(SHAPE, torch.float32)
    codec.close()
    with pytest.raises(ValueError, match="`AdaptiveBits`, which is missing"):
        codec.encode(torch.zeros(SHAPE), _message())


@pytest.mark.parametrize("channels", [16, 24])
def test_other_hidden_states(channels: int) -> None:
    codec, shape = _codec(), (2, 12, channels)
    codec.check(shape, torch.float32)
    codec.set_table(3, _table(20))
    what = f"of 20 channels, but hidden states have {channels}. Load a checkpoint"
    with pytest.raises(ValueError, match=f"boundary 3 are those {what}"):
        codec.check(shape, torch.float32)
    assert codec.nbytes(shape, torch.float32, _message()) > 0  # of another boundary


def test_other_tensors() -> None:
    codec = _codec()
    with pytest.raises(ValueError, match="cannot encode torch.float64"):
        codec.check(SHAPE, torch.float64)
    with pytest.raises(ValueError, match=r"shape \(8,\); expected \[..., tokens, channels\]"):
        codec.check((8,), torch.float32)
    with pytest.raises(ValueError, match="was given a payload"):
        codec.decode(torch.zeros(16, dtype=torch.uint8), SHAPE, torch.float32, _message())
