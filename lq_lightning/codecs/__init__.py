"""How values become bytes: codec specifications, encoding and decoding of rows."""

from .functional import clear_nonfinite_, decode, decode_reduce, decode_reduce_encode, encode
from .seeds import derive_seed
from .spec import CodecSpec

__all__ = [
    "CodecSpec",
    "clear_nonfinite_",
    "decode",
    "decode_reduce",
    "decode_reduce_encode",
    "derive_seed",
    "encode",
]
