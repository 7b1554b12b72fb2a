"""The specification of a codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from lq_lightning.foundation.checks import check_choice
from lq_lightning.kernels.message import CODES, MessageFormat
from lq_lightning.kernels.message.format import SCALES

# Entries of the table of codes, in its order; see `lq_lightning.kernels.message.format`.
Code = Literal[
    "int2",
    "int3",
    "int4",
    "int5",
    "int6",
    "int7",
    "int8",
    "fp4_e2m1",
    "nf4",
    "fp8_e4m3",
    "fp8_e5m2",
]
# Names that options take beside integers of so many bits: codes, and formats of `_BLOCK_FORMATS`.
FloatingCode = Literal["nf4", "fp4_e2m1", "fp8_e4m3", "fp8_e5m2", "mxfp4"]
Rounding = Literal["nearest", "stochastic"]
ScaleDtype = Literal["float32", "bfloat16", "float16", "float8_e8m0fnu"]

# Formats that fix the group size and the scales of a code.
_BLOCK_FORMATS: dict[str, dict[str, Any]] = {
    "mxfp4": {"code": "fp4_e2m1", "group_size": 32, "scale_dtype": "float8_e8m0fnu"},
}

GROUP_SIZES: tuple[int | str, ...] = (*(2**k for k in range(4, 13)), "row")
HADAMARD_SIZES: tuple[int, ...] = (0, 16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecSpec:
    """How a row of values becomes bytes; both ends of an exchange need the same spec.

    Attributes:
        code: format of one value. Integer codes are scaled to the largest magnitude of a group
            (symmetric) or to its range (asymmetric); floating-point codes (``fp4_e2m1``,
            ``fp8_e4m3``, ``fp8_e5m2``) to the largest finite value; ``nf4``, 16 levels that follow
            the normal distribution (QLoRA, appendix E), to 1.
        group_size: consecutive elements that share a scale: a power of two from 16 to 4096, or
            ``"row"`` for one scale per row, which takes a second pass over the values to encode. A
            tensor that is viewed as one row then has one scale. For all codes and transforms.
        symmetric: store no minimum. All but integer codes are always symmetric.
        hadamard_size: apply a Walsh-Hadamard transform to this many consecutive elements before
            quantization and undo it after; 0 for none, else 16, 32, 64 or 128, at most
            ``group_size``. It spreads outliers over the transform block. Its sums are fp32: finite
            for values up to ``3.4e38 / hadamard_size``, beyond which they can overflow, and the
            group then counts as not finite.
        rounding: ``"nearest"`` (ties to even) or ``"stochastic"`` (needs a seed), which is unbiased
            up to the resolution of its noise: the expectation is off by at most ``2**(b - 17)`` of
            the distance between codes for integer codes of b bits, ``2**-8`` for FP8 E4M3,
            ``2**-9`` for FP8 E5M2 and ``2**-10`` for FP4 E2M1, with a sign that depends on the
            value. ``nf4`` is rounded to nearest only.
        scale_dtype: storage of scales and minima. Scales are rounded up and minima down, so no
            value is clipped. With ``"float16"``, groups whose scale exceeds 65504 shrink.
            ``"float8_e8m0fnu"``, powers of two in a byte, is for symmetric codecs; MXFP4 is
            ``code="fp4_e2m1"`` in groups of 32 with these scales (OCP Microscaling Formats 1.0,
            which rounds them down and clips), ``"mxfp4"`` where options take the name of a code.
            Groups beyond 2.5e38 shrink by up to a quarter.

    Raises:
        ValueError: a value or a combination that is not listed above.
    """

    code: Code
    group_size: int | Literal["row"]
    symmetric: bool = True
    hadamard_size: int = 0
    rounding: Rounding = "nearest"
    scale_dtype: ScaleDtype = "float32"

    def __post_init__(self) -> None:
        """Check every field and their combination."""
        check_choice("CodecSpec", "code", self.code, get_args(Code))
        check_choice("CodecSpec", "group_size", self.group_size, GROUP_SIZES)
        check_choice("CodecSpec", "hadamard_size", self.hadamard_size, HADAMARD_SIZES)
        check_choice("CodecSpec", "rounding", self.rounding, get_args(Rounding))
        check_choice("CodecSpec", "scale_dtype", self.scale_dtype, get_args(ScaleDtype))
        if not isinstance(self.symmetric, bool):
            raise ValueError(
                f"CodecSpec(symmetric={self.symmetric!r}) is not supported; allowed: True, False."
            )
        if self.group_size != "row" and self.hadamard_size > self.group_size:
            raise ValueError(
                f"CodecSpec(hadamard_size={self.hadamard_size}, group_size={self.group_size}): "
                "the transform must divide the group. Use a hadamard_size of at most group_size."
            )
        code = CODES[self.code]
        if not self.symmetric and not SCALES[self.scale_dtype].signed:
            raise ValueError(
                f"CodecSpec(scale_dtype={self.scale_dtype!r}, symmetric=False): these scales are "
                "powers of two and cannot hold a minimum. Use symmetric=True, or "
                "scale_dtype='bfloat16'."
            )
        if not self.symmetric and code.kind != "integer":
            raise ValueError(
                f"CodecSpec(code={self.code!r}, symmetric=False): only integer codes can be "
                "asymmetric; the levels of others lie on both sides of zero. Use symmetric=True, "
                f"or code='int{code.bits}' with symmetric=False."
            )
        if self.rounding == "stochastic" and code.kind == "table":
            raise ValueError(
                f"CodecSpec(code={self.code!r}, rounding='stochastic') is not supported: the "
                "levels of a table are not equally spaced, and the nearest is taken. Use "
                "rounding='nearest', or code='fp4_e2m1'."
            )

    @property
    def name(self) -> str:
        """Name of the format for people: ``"mxfp4"`` and the like, else the code."""
        for name, fields in _BLOCK_FORMATS.items():
            if all(getattr(self, field) == value for field, value in fields.items()):
                return name
        return self.code

    @property
    def message_format(self) -> MessageFormat:
        """The same facts, as the kernels take them."""
        return MessageFormat(
            code=self.code,
            group_size=0 if self.group_size == "row" else self.group_size,
            symmetric=self.symmetric,
            hadamard_size=self.hadamard_size,
            stochastic=self.rounding == "stochastic",
            scale_dtype=self.scale_dtype,
        )

    @property
    def block_multiple(self) -> int:
        """Columns at whose multiples a row may be cut into rows that are encoded alone.

        With the same codes and scales as in one, but for stochastic rounding and for
        ``group_size="row"``, which gives every part its own scale.
        """
        return self.message_format.block_multiple

    def nbytes(self, numel: int) -> int:
        """Return the bytes of one encoded row.

        Args:
            numel: values in the row.

        Returns:
            A multiple of 16, depending on ``numel`` alone.

        Raises:
            ValueError: ``numel`` is negative.
        """
        if numel < 0:
            raise ValueError(f"numel={numel} must be at least 0. Pass the length of a row.")
        nbytes: int = self.message_format.layout(numel).nbytes
        return nbytes

    def bits_per_element(self, numel: int) -> float:
        """Return the bits on the wire per value of a row of ``numel`` values, scales included.

        Raises:
            ValueError: ``numel`` is not positive.
        """
        if numel < 1:
            raise ValueError(f"numel={numel} must be at least 1. Pass the length of a row.")
        return 8 * self.nbytes(numel) / numel


def group_size_of(name: str, group_size: int) -> int:
    """Return the group size of ``named_codec``: the format's own, or ``group_size``."""
    return int(_BLOCK_FORMATS.get(name, {}).get("group_size", group_size))


def named_codec(name: str, group_size: int, **options: Any) -> CodecSpec:
    """Return the codec of a name that options take, with bf16 scales.

    Args:
        name: a code, or a format that fixes its own group size and scales, such as ``"mxfp4"``.
        group_size: group size of codes; formats ignore it.
        options: other fields of ``CodecSpec``.

    Raises:
        ValueError: as ``CodecSpec``.
    """
    fields = {"code": name, "group_size": group_size, "scale_dtype": "bfloat16", **options}
    return CodecSpec(**{**fields, **_BLOCK_FORMATS.get(name, {})})
