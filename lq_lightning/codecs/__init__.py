"""Codec specifications, and encoding and decoding of rows of values."""

from .mixed import (
    WidthTable,
    decode_mixed,
    encode_and_round_mixed,
    encode_mixed,
    round_trip_mixed,
)
from .spec import (
    CodecSpec,
    FloatingCode,
    accumulate,
    decode,
    decode_reduce,
    decode_reduce_encode,
    derive_seed,
    encode,
    flatten_rows,
    named_codec,
)

__all__ = [
    "CodecSpec",
    "FloatingCode",
    "WidthTable",
    "accumulate",
    "decode",
    "decode_mixed",
    "decode_reduce",
    "decode_reduce_encode",
    "derive_seed",
    "encode",
    "encode_and_round_mixed",
    "encode_mixed",
    "flatten_rows",
    "named_codec",
    "round_trip_mixed",
]
