"""How values become bytes: codec specifications, encoding and decoding of rows."""

from .functional import (
    decode,
    decode_reduce,
    decode_reduce_encode,
    encode,
    flatten_rows,
)
from .mixed import (
    WidthTable,
    decode_mixed,
    encode_and_round_mixed,
    encode_mixed,
    round_trip_mixed,
)
from .seeds import derive_seed
from .spec import CodecSpec

__all__ = [
    "CodecSpec",
    "WidthTable",
    "decode",
    "decode_mixed",
    "decode_reduce",
    "decode_reduce_encode",
    "derive_seed",
    "encode",
    "encode_and_round_mixed",
    "encode_mixed",
    "flatten_rows",
    "round_trip_mixed",
]
