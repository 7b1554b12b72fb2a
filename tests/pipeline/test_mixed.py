"""The boundary codec of learned widths: payloads, sizes, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lq_lightning.codecs.mixed import Ranges, WidthTable, round_trip_mixed
from lq_lightning.pipeline.boundary import BoundaryCodec, make_boundary_codec
from lq_lightning.pipeline.message import Message
from lq_lightning.pipeline.mixed import Lines, MixedCodec

SHAPE = (2, 12, 20)


def _message(boundary: int = 0, backward: bool = False) -> Message:
    return Message(boundary=boundary, backward=backward, microbatch=0)


def _table(lines: int, seed: int = 0) -> WidthTable:
    return WidthTable(torch.randint(1, 17, (lines,), generator=torch.Generator().manual_seed(seed)))


def _start(lines: int) -> WidthTable:
    return WidthTable([5] * lines)


def _codec(per: Lines = "channel", ranges: Ranges = "fitted") -> MixedCodec:
    codec = MixedCodec()
    codec.begin(_start, per, ranges)
    return codec


def _as_lines(x: Tensor, per: Lines) -> Tensor:
    return (x if per == "channel" else x.mT).flatten(0, 1)


@pytest.mark.parametrize("per", ["channel", "position"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranges", ["full", "fitted"])
def test_values_and_sizes_are_those_of_the_table(
    per: Lines, dtype: torch.dtype, ranges: Ranges
) -> None:
    x = torch.randn(SHAPE).to(dtype)
    x[0, 3, 4] = float("nan")
    lines = 20 if per == "channel" else 12
    tables = {0: _start(lines), 1: _table(lines)}  # the first is that of the beginning
    # what is received needs no ranges; gradients are sent with full ones
    ends = _codec(per, ranges), _codec(per, "full")
    for end in ends:
        end.set_table(1, tables[1])
    for boundary, table in tables.items():
        for view, backward in ((x, False), (x.mT.contiguous().mT, False), (x, True)):
            message = _message(boundary, backward)
            nbytes = ends[1].nbytes(SHAPE, dtype, message)
            assert nbytes == table.nbytes(x.numel() // lines)
            payload = ends[0].encode(view, message)
            assert payload.shape == (nbytes,)
            decoded = ends[1].decode(payload, SHAPE, dtype, message)
            both, rounded = ends[0].encode_and_round(view, message)
            assert torch.equal(both, payload)
            torch.testing.assert_close(rounded, decoded, rtol=0, atol=0, equal_nan=True)
            payload.fill_(0xFF)
            assert decoded.dtype == dtype
            assert decoded.is_contiguous()
            expected = round_trip_mixed(_as_lines(x, per), table, "full" if backward else ranges)
            found = _as_lines(decoded, per)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            assert found.isnan().any()
    mean = (tables[1].nbytes(x.numel() // lines)) * 8 / x.numel()  # of what was set
    assert ends[0].bits_per_value(SHAPE, dtype) == mean


def test_widths_change_when_a_table_is_set() -> None:
    codec = _codec("position")
    short = (1, 7, 20)
    before = codec.nbytes(short, torch.float32, _message())
    for seed in (0, 1):  # the second in the place of the first
        table = _table(12, seed)
        codec.set_table(0, table)
        assert codec.nbytes(SHAPE, torch.float32, _message()) == table.nbytes(40)
        first = WidthTable(table.widths[:7])  # shorter sequences have the first positions
        assert codec.nbytes(short, torch.float32, _message()) == first.nbytes(20)
    assert codec.nbytes(short, torch.float32, _message(1)) == before
    codec.begin(_start, "position", "full")
    assert codec.nbytes(short, torch.float32, _message()) == before


def test_needs_a_callback() -> None:
    codec: BoundaryCodec = make_boundary_codec("amaq")
    with pytest.raises(ValueError, match="`AdaptiveBits`, which is missing"):
        codec.check(SHAPE, torch.float32)
    codec = _codec()
    codec.check(SHAPE, torch.float32)
    codec.close()
    with pytest.raises(ValueError, match="`AdaptiveBits`, which is missing"):
        codec.encode(torch.zeros(SHAPE), _message())


@pytest.mark.parametrize(
    ("per", "shape", "what"),
    [
        ("channel", (2, 12, 16), "of 20 channels, but hidden states have 16. Load a checkpoint"),
        ("channel", (2, 12, 24), "of 20 channels, but hidden states have 24"),
        (
            "position",
            (2, 24, 20),
            "of 20 positions, but hidden states have 24. Give `AdaptiveBits`",
        ),
    ],
)
def test_other_hidden_states(per: Lines, shape: tuple[int, ...], what: str) -> None:
    codec = _codec(per)
    codec.check(shape, torch.float32)
    codec.set_table(3, _table(20))
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
