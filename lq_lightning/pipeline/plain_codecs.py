"""Codecs of stage boundaries that code every value by itself or every group alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lq_lightning.codecs import CodecSpec, decode, encode, flatten_rows

from .message import (
    GROUP_TILES,
    Message,
    StatelessCodec,
    check_channels,
    check_floats,
    check_payload,
)


class CastCodec(StatelessCodec):
    """The values as they are, or rounded to a dtype.

    Args:
        name: of the codec.
        dtype: what travels; None for the dtype of the tensor.
    """

    def __init__(self, name: str, dtype: torch.dtype | None) -> None:
        self.name = name
        self._dtype = dtype

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Refuse to round what is not a floating-point number."""
        if self._dtype is not None and not dtype.is_floating_point:
            raise ValueError(
                f"The codec {self.name!r} rounds floating-point numbers and was given {dtype}. "
                "Choose the codec 'none'."
            )

    def size(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes of a payload."""
        return math.prod(shape) * (self._dtype or dtype).itemsize

    def encode(self, x: Tensor, message: Message) -> Tensor:
        """Return the bytes of the values; see the base class."""
        self.check(x.shape, x.dtype)
        values = torch.empty(x.shape, dtype=self._dtype or x.dtype, device=x.device)
        return values.copy_(x.detach()).view(-1).view(torch.uint8)

    def decode(
        self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, message: Message
    ) -> Tensor:
        """Return the values; see the base class."""
        check_payload(self.name, payload, self.size(shape, dtype))
        values = payload.view(self._dtype or dtype).view(tuple(shape))
        return values.to(dtype, copy=True)


class GroupCodec(StatelessCodec):
    """Groups of neighbouring channels that share a scale, as one encoded row.

    Args:
        name: of the codec.
        spec: of the groups; they must not cross tokens.
    """

    def __init__(self, name: str, spec: CodecSpec) -> None:
        if spec.group_size == "row" or spec.rounding == "stochastic":
            raise ValueError(
                f"A stage boundary cannot be coded with group_size={spec.group_size!r}, "
                f"rounding={spec.rounding!r}: every token needs scales of its own, and nothing "
                "seeds the noise. Use a group_size of 16 to 4096 and rounding='nearest'."
            )
        self.name = name
        self.spec = spec

    @property
    def options(self) -> str:
        """The specification."""
        return repr(self.spec)

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Refuse groups that would cross tokens, and dtypes that kernels do not take."""
        check_floats(self.name, dtype)
        check_channels(
            self.name, shape, int(self.spec.group_size), GROUP_TILES, "CodecSpec.group_size"
        )

    def size(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes of a payload."""
        return self.spec.nbytes(math.prod(shape))

    def encode(self, x: Tensor, message: Message) -> Tensor:
        """Return scales and codes; see the base class."""
        self.check(x.shape, x.dtype)
        rows = x.detach().contiguous().view(-1, x.shape[-1])
        return encode(self.spec, flatten_rows(self.spec, rows)).view(-1)

    def decode(
        self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, message: Message
    ) -> Tensor:
        """Return the values; see the base class."""
        check_payload(self.name, payload, self.size(shape, dtype))
        numel = math.prod(shape)
        return decode(self.spec, payload.view(1, -1), numel, dtype=dtype).view(tuple(shape))
