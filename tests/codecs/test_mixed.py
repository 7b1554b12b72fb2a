"""Tables of widths, and messages coded with them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lq_lightning.codecs import (
    WidthTable,
    decode_mixed,
    encode_and_round_mixed,
    encode_mixed,
    round_trip_mixed,
)

widths = st.lists(st.integers(1, 16), min_size=1, max_size=70)


@given(widths)
def test_tables_travel_in_four_bits_per_line(given_widths: list[int]) -> None:
    table = WidthTable(given_widths)
    packed = table.pack()
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [
        sum((width - 1) << 4 * place for place, width in enumerate(given_widths[i : i + 2]))
        for i in range(0, len(given_widths), 2)
    ]
    read = WidthTable.unpack(packed, len(given_widths))
    assert read == table
    assert hash(read) == hash(table)
    assert read.widths.tolist() == given_widths
    if packed[-1] < 16 and len(given_widths) % 2:
        assert WidthTable.unpack(packed, len(given_widths) + 1) != table


@given(widths)
def test_what_a_table_says(given_widths: list[int]) -> None:
    table = WidthTable(torch.tensor(given_widths, dtype=torch.uint8))
    assert table.channels == len(given_widths)
    assert table.counts == tuple(given_widths.count(width) for width in range(1, 17))
    assert table.mean == pytest.approx(sum(given_widths) / len(given_widths))


@pytest.mark.parametrize(
    ("packed", "channels", "match"),
    [
        (torch.zeros(2, dtype=torch.uint8), 5, r"A table of 5 widths is uint8 \(3,\)"),
        (torch.zeros(4, dtype=torch.uint8), 5, r"got torch.uint8 \(4,\)"),
        (torch.zeros(1, 3, dtype=torch.uint8), 5, r"got torch.uint8 \(1, 3\)"),
        (torch.zeros(3, dtype=torch.int8), 5, "got torch.int8"),
        (torch.zeros(0, dtype=torch.uint8), 0, "at least one byte"),
        (torch.tensor([0, 0, 16], dtype=torch.uint8), 5, "ends with 0x10; its high 4 bits must"),
        (torch.full((3,), 255, dtype=torch.uint8), 5, "ends with 0xff"),
    ],
)
def test_tables_of_a_hostile_peer(packed: torch.Tensor, channels: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        WidthTable.unpack(packed, channels)


@given(st.binary(min_size=1, max_size=20))
def test_any_other_bytes_are_a_table(content: bytes) -> None:
    packed = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    table = WidthTable.unpack(packed, 2 * len(content))
    assert torch.equal(table.pack(), packed)


@pytest.mark.parametrize(
    ("given_widths", "match"),
    [
        ([], "expected at least one integer"),
        ([4.0], "torch.float32"),
        (torch.ones(2, 2, dtype=torch.int64), r"\(2, 2\)"),
        (torch.ones(3, dtype=torch.bool), "torch.bool"),
        ([4, 0, 17], "channel 1 has 0 bits; allowed: 1 to 16"),
        ([4, 17], "channel 1 has 17 bits"),
        ([-(2**40)], "channel 0 has -1099511627776 bits"),
    ],
)
def test_widths_that_are_none(given_widths: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        WidthTable(given_widths)


def test_tables_do_not_change() -> None:
    source = torch.tensor([3, 5])
    table = WidthTable(source)
    source[0] = 9
    table.widths[1] = 9
    assert table == WidthTable([3, 5]) != WidthTable([3, 6])
    assert table != [3, 5]
    assert copy.deepcopy(table) == table
    assert repr(table) == "WidthTable(channels=2, mean=4.000, counts={3: 1, 5: 1})"


def test_effective_bits() -> None:
    """4 of codes, 32 / 1024 of scale and minimum, 4 / 1024 of the table; 8 exact tokens of 1024."""
    table = WidthTable(torch.arange(4096) % 7 + 1)
    even = WidthTable([1, 7, 2, 6, 3, 5, 4, 4] * 512)
    assert even.mean == 4
    exact = 8 * (2 * 4096 + 4)
    assert even.nbytes(1024) == 4096 * 512 + 4 * 4096 + exact
    share = 8 * exact / (4096 * 1024)
    assert even.effective_bits(1024) == 4 + 36 / 1024 + share < 4.17
    assert even.effective_bits(1024, table_messages=4) == 4 + 33 / 1024 + share
    assert table.effective_bits(1024) < table.mean + 0.17
    assert even.nbytes(127) == 4096 * 64 + 4 * 4096  # none
    # bf16 from 9 bits on, without a scale
    assert WidthTable([9] * 64).effective_bits(8) == 16 + 4 / 8
    for tokens, messages in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            table.effective_bits(tokens, messages)
    with pytest.raises(ValueError, match="tokens=-1 must be at least 0"):
        table.nbytes(-1)
    assert table.nbytes(0) == 0


def test_both_ends() -> None:
    table = WidthTable(torch.arange(48) % 16 + 1)
    x = torch.randn(33, 48, requires_grad=True)
    payload = encode_mixed(x, table)
    assert payload.shape == (table.nbytes(33),)
    # the receiver has a table of its own, and a payload that is part of a larger buffer
    other = WidthTable.unpack(table.pack(), 48)
    buffer = torch.zeros(payload.numel() + 7, dtype=torch.uint8)
    buffer[3:-4] = payload.clone()
    decoded = decode_mixed(buffer[3:-4], other, 33, torch.float32)
    assert torch.equal(decoded, round_trip_mixed(x, table))
    assert not decoded.requires_grad
    # lines are rows
    rows = WidthTable(torch.arange(33) % 8 + 1)
    payload = encode_mixed(x.t(), rows)
    assert torch.equal(decode_mixed(payload, rows, 48, x.dtype), round_trip_mixed(x.t(), rows))
    both, rounded = encode_and_round_mixed(x.t(), rows)
    assert torch.equal(both, payload)
    assert torch.equal(rounded, round_trip_mixed(x.t(), rows))


def test_ranges_are_the_choice_of_the_sender() -> None:
    table = WidthTable([1, 3, 4, 8, 12])
    x = torch.randn(4000, 5)
    payload = encode_mixed(x, table, ranges="fitted")
    assert payload.shape == encode_mixed(x, table).shape
    decoded = decode_mixed(payload, table, 4000, x.dtype)
    assert torch.equal(decoded, round_trip_mixed(x, table, ranges="fitted"))
    errors, full = ((y - x).square().mean(0) for y in (decoded, round_trip_mixed(x, table, "full")))
    assert (errors[:3] < full[:3] * 0.9).all()
    assert errors[4] == full[4]
    for function in (encode_mixed, round_trip_mixed):
        with pytest.raises(ValueError, match="ranges='tight' is not known; allowed: 'full' and"):
            function(x, table, ranges="tight")  # type: ignore[operator]


@pytest.mark.parametrize("shape", [(3, 4), (12,), (1, 3, 3), (3, 2)])
def test_shapes_of_another_table_are_refused(shape: tuple[int, ...]) -> None:
    table = WidthTable([1, 2, 3])
    for function in (encode_mixed, round_trip_mixed):
        with pytest.raises(ValueError, match=r"expected \[T, 3\] for this table"):
            function(torch.zeros(shape), table)


def test_payloads_of_another_size_are_refused() -> None:
    table = WidthTable([1, 2, 3])
    payload = encode_mixed(torch.randn(9, 3), table)
    for wrong in (payload[:-1], torch.cat((payload, payload)), payload.view(1, -1), payload.char()):
        with pytest.raises(ValueError, match=r"9 tokens in this table are uint8 \(\d+,\)"):
            decode_mixed(wrong, table, 9, torch.float32)
    with pytest.raises(ValueError, match="dtype has dtype torch.int32"):
        decode_mixed(payload, table, 9, torch.int32)
    with pytest.raises(ValueError, match="tokens=-9"):
        decode_mixed(payload, table, -9, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranges", ["full", "fitted"])
def test_massive_tokens_are_exact_and_cost_others_nothing(dtype: torch.dtype, ranges: Any) -> None:
    """As in pretrained models: the first token of a sequence, in two channels above all."""
    x = torch.randn(2, 160, 48)
    x[..., 7] += 10
    plain, table = x.to(dtype).view(320, 48), WidthTable([4] * 48)
    x[:, 0] *= 20
    x[:, 0, 7] = 2000
    x[:, 0, 31] = -9000
    massive = x.to(dtype).view(320, 48)
    arrives = round_trip_mixed(massive, table, ranges)
    assert torch.equal(arrives[[0, 160]], massive[[0, 160]].bfloat16().to(dtype))
    others = torch.ones(320, dtype=torch.bool)
    others[[0, 160]] = False
    errors = [
        (y - z)[others].square().mean(0)
        for y, z in (
            (arrives.float(), massive.float()),
            (round_trip_mixed(plain, table, ranges).float(), plain.float()),
        )
    ]
    assert (errors[0] < 1.5 * errors[1]).all()
    payload, both = encode_and_round_mixed(massive, table, ranges)
    assert payload.numel() == table.nbytes(320)
    assert torch.equal(both, arrives)
    assert torch.equal(encode_mixed(massive, table, ranges), payload)
    assert torch.equal(decode_mixed(payload, table, 320, dtype), arrives)


def test_tokens_that_are_not_finite_are_exact_first() -> None:
    x, table = torch.randn(256, 16), WidthTable([3] * 16)
    x[3] *= 1e4
    x[200, 5], x[9, 1] = float("nan"), float("-inf")
    arrives = decode_mixed(encode_mixed(x, table), table, 256, x.dtype)
    expected = x[[9, 200]].bfloat16().float()
    torch.testing.assert_close(arrives[[9, 200]], expected, rtol=0, atol=0, equal_nan=True)
    others = torch.ones(256, dtype=torch.bool)
    others[[9, 200]] = False
    assert arrives[others].isfinite().all()
    x[100:, 5] = float("nan")  # more than are exact: the line is NaN
    assert round_trip_mixed(x, table)[:, 5].isnan().all()
    assert round_trip_mixed(x, table)[:, 6].isfinite().all()


def test_damaged_indices_stay_within_the_message() -> None:
    x, table = torch.randn(256, 16), WidthTable([3] * 16)
    payload = encode_mixed(x, table)
    payload[-16:-8].view(torch.int32)[:] = torch.tensor([-5, 1 << 30], dtype=torch.int32)
    assert decode_mixed(payload, table, 256, x.dtype).shape == x.shape
