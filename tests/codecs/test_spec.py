"""CodecSpec: validation, sizes, identity."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lq_testing.codec_data import codec_specs

from lq_lightning.codecs import CodecSpec, FloatingCode, named_codec
from lq_lightning.codecs.spec import Code, ScaleDtype
from lq_lightning.kernels.message import CODES, SCALE_DTYPES


def test_every_entry_of_the_table_can_be_named() -> None:
    assert get_args(Code) == tuple(CODES)
    for name, entry in CODES.items():
        assert CodecSpec(code=name, group_size=64).message_format.bits == entry.bits  # type: ignore[arg-type]
    assert get_args(ScaleDtype) == tuple(SCALE_DTYPES)
    assert {*get_args(FloatingCode)} == {name for name in CODES if name[:3] != "int"}
    assert named_codec("nf4", 64).bits_per_element(1 << 16) == 4.25


@given(codec_specs(), st.integers(0, 1 << 20))
def test_size_is_tight_up_to_section_padding(spec: CodecSpec, numel: int) -> None:
    bits = CODES[spec.code].bits
    granule = max(8, spec.hadamard_size)
    padded = -(-numel // granule) * granule
    scale_nbytes = SCALE_DTYPES[spec.scale_dtype].itemsize
    per_group = scale_nbytes * (1 if spec.symmetric else 2)
    groups = min(padded, 1) if spec.group_size == "row" else -(-padded // spec.group_size)
    content = padded // 8 * bits + groups * per_group
    sections = bin(bits).count("1") + (1 if spec.symmetric else 2)
    nbytes = spec.nbytes(numel)
    assert nbytes % 16 == 0
    assert content <= nbytes <= content + 15 * sections


@given(codec_specs(with_rows=False))
def test_no_padding_for_round_sizes(spec: CodecSpec) -> None:
    numel = 1 << 16
    bits = CODES[spec.code].bits
    scale_bits = 8 * SCALE_DTYPES[spec.scale_dtype].itemsize * (1 if spec.symmetric else 2)
    assert isinstance(spec.group_size, int)
    assert spec.bits_per_element(numel) == bits + scale_bits / spec.group_size


def test_empty_row_has_no_bytes() -> None:
    assert CodecSpec(code="int4", group_size=16).nbytes(0) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"code": "int9"}, r"code='int9'.*'int2', 'int3'"),
        ({"code": "fp8"}, r"code='fp8'.*'fp8_e4m3'"),
        ({"group_size": 8}, r"group_size=8.*16, 32"),
        ({"group_size": 100}, r"group_size=100"),
        ({"group_size": 8192}, r"group_size=8192"),
        ({"group_size": True}, r"group_size=True"),
        ({"hadamard_size": 8}, r"hadamard_size=8.*0, 16, 32, 64, 128"),
        ({"hadamard_size": True}, r"hadamard_size=True"),
        ({"group_size": 16, "hadamard_size": 32}, r"must divide the group"),
        ({"rounding": "up"}, r"rounding='up'.*'nearest', 'stochastic'"),
        ({"scale_dtype": "float64"}, r"scale_dtype='float64'.*'float32', 'bfloat16', 'float16'"),
        ({"symmetric": 1}, r"symmetric=1.*True, False"),
        ({"group_size": "tensor"}, r"group_size='tensor'.*4096, 'row'"),
        ({"code": "fp8_e4m3", "symmetric": False}, r"Use symmetric=True, or code='int8'"),
        ({"code": "nf4", "symmetric": False}, r"Use symmetric=True, or code='int4'"),
        ({"code": "nf4", "rounding": "stochastic"}, r"nf4'.*rounding='nearest', or code='int4'"),
    ],
)
def test_invalid_options_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CodecSpec(**{"code": "int4", "group_size": 64, **changes})  # type: ignore[arg-type]


def test_invalid_sizes_are_named() -> None:
    spec = CodecSpec(code="int4", group_size=64)
    with pytest.raises(ValueError, match="numel=-1"):
        spec.nbytes(-1)
    with pytest.raises(ValueError, match="numel=0 must be at least 1"):
        spec.bits_per_element(0)
