"""Messages of matrices: one encoded row where nothing crosses a row, else one per row."""

from __future__ import annotations

import pytest
import torch
from lq_testing.codec_data import awkward_rows

from lq_lightning.kernels.message import MessageFormat, dequantize, parse_format, quantize
from lq_lightning.kernels.message.matrix import (
    check_matrix,
    decode_matrix,
    encode_matrix,
    matrix_shape,
    parse_matrix_format,
)

FOUR = parse_format("int4/64/asymmetric/32/nearest/bfloat16")
NARROW = parse_format("fp8_e4m3/16/symmetric/0/nearest/bfloat16")


@pytest.mark.parametrize(
    ("rows", "numel", "shape"),
    [(5, 1600, (1, 8000)), (5, 96, (5, 96)), (5, 197, (5, 197)), (0, 64, (1, 0)), (0, 65, (0, 65))],
)
def test_whole_groups_are_one_encoded_row(rows: int, numel: int, shape: tuple[int, int]) -> None:
    assert matrix_shape(FOUR, rows, numel) == shape
    assert matrix_shape(NARROW, 5, 96) == (1, 480)


@pytest.mark.parametrize("numel", [128, 197])
@pytest.mark.parametrize("fmt", [FOUR, NARROW], ids=str)
def test_bytes_and_values_are_those_of_the_operators(fmt: MessageFormat, numel: int) -> None:
    wide = awkward_rows(6, numel + 3, fmt.group_size)
    x = wide[::2, :numel]
    x[1, 0] = float("nan")
    shape = matrix_shape(fmt, 3, numel)
    message = encode_matrix(x, fmt)
    assert torch.equal(message, quantize(x.reshape(shape), None, str(fmt), 0))
    expected = dequantize(message[None], shape[1], str(fmt), 1.0, torch.float32)
    decoded = decode_matrix(message, 3, numel, fmt)
    torch.testing.assert_close(decoded, expected.view(3, numel), rtol=0, atol=0, equal_nan=True)
    assert decoded.isnan().any()
    assert not decoded.isnan().all()


def test_a_flat_message_has_no_padding_per_row() -> None:
    bits = 8 * encode_matrix(torch.zeros(64, 1600), FOUR).numel() / (64 * 1600)
    assert bits == 4.5


def test_wrong_formats_and_messages_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="one scale per row"):
        parse_matrix_format("int8/row/symmetric/0/nearest/float32")
    with pytest.raises(ValueError, match="have no seed"):
        parse_matrix_format("int8/64/symmetric/0/stochastic/float32")
    assert parse_matrix_format(str(FOUR)) == FOUR
    message = encode_matrix(torch.zeros(4, 128), FOUR)
    check_matrix("message", message, 4, 128, FOUR)
    with pytest.raises(ValueError, match=r"has 4 encoded rows: torch.uint8 \(4, "):
        check_matrix("message", message, 4, 100, FOUR)
    with pytest.raises(ValueError, match="this format and numel need"):
        check_matrix("message", message, 5, 128, FOUR)
