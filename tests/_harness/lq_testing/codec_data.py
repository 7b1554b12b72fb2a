"""Specifications and inputs that exercise every branch of a codec."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from lq_lightning.codecs import CodecSpec
from lq_lightning.kernels.message import CODES, SCALE_DTYPES, MessageFormat

FP32_MAX = torch.finfo(torch.float32).max


def make_format(code: str = "int4", **changes: object) -> MessageFormat:
    """Symmetric groups of 64 with fp32 scales, rounded to nearest, but for the changes."""
    fields: dict[str, object] = {
        "code": code,
        "group_size": 64,
        "symmetric": True,
        "hadamard_size": 0,
        "stochastic": False,
        "scale_dtype": "float32",
    }
    return MessageFormat(**{**fields, **changes})  # type: ignore[arg-type]


def codec_specs(with_rows: bool = True) -> st.SearchStrategy[CodecSpec]:
    """Every valid combination of options; ``with_rows`` includes one scale per row."""

    def build(
        code: str, log_group: int, hadamard: int, symmetric: bool, rounding: str, scale: str
    ) -> CodecSpec:
        group_size = 2**log_group if log_group <= 12 else 4096
        kind = CODES[code].kind
        symmetric = symmetric or kind != "integer"
        return CodecSpec(
            code=code,  # type: ignore[arg-type]
            group_size=group_size if log_group <= 12 else "row",
            symmetric=symmetric,
            hadamard_size=min(hadamard, group_size, 128),
            rounding="nearest" if kind == "table" else rounding,  # type: ignore[arg-type]
            scale_dtype=scale,  # type: ignore[arg-type]
        )

    return st.builds(
        build,
        st.sampled_from(list(CODES)),
        st.integers(4, 13 if with_rows else 12),
        st.sampled_from([0, 16, 32, 64, 128]),
        st.booleans(),
        st.sampled_from(["nearest", "stochastic"]),
        st.sampled_from(list(SCALE_DTYPES)),
    )


def awkward_rows(
    rows: int, numel: int, group_size: int, seed: int = 0, huge: bool = False
) -> torch.Tensor:
    """Return ``[rows, numel]`` fp32 whose groups take turns in being difficult.

    Kinds, by group: ordinary, zeros (of both signs), large offset, one outlier, subnormal, large,
    NaN inside, infinity inside, constant, tiny. ``huge`` makes large ones as large as fp32 goes.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, numel, generator=generator)
    for start in range(0, numel, group_size):
        part = x[:, start : start + group_size]
        kind = (start // group_size) % 10
        if kind == 1:
            part.zero_()
            part[:, ::3] = -0.0
        elif kind == 2:
            part.add_(100.0)
        elif kind == 3:
            part[:, part.shape[1] // 2] = -1000.0
        elif kind == 4:
            part.mul_(1e-41)
        elif kind == 5:
            part.mul_(1e38 if huge else 1e37).clamp_(-FP32_MAX, FP32_MAX)
        elif kind == 6:
            part[0, -1] = float("nan")
        elif kind == 7:
            part[-1, 0] = float("-inf")
        elif kind == 8:
            part.fill_(-FP32_MAX if huge else -0.7)
        elif kind == 9:
            part.mul_(1e-7)
    return x
