"""Interface of the codecs of stage boundaries.

Each end of a boundary has its own codec. Both ends know shape, dtype and the ``Message``, so
payloads carry none of these and their size is known before a byte is sent.

Shape legend: B samples of a micro-batch, S tokens, N channels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lq_lightning.codecs.spec import GROUP_SIZES

# Channels that share a scale, in codecs that work on groups of a ``CodecSpec``.
GROUP_TILES = tuple(size for size in GROUP_SIZES if isinstance(size, int))
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryMeta:
    """What crosses the boundaries of stages, for micro-batches of one shape. Plain data.

    Attributes:
        shape: Shape of the hidden state.
        dtype: Dtype of the hidden state behind a layer.
        embedded_dtype: Dtype of the hidden state in front of the first layer.
        extras: For layers that return a tuple, which entries behind the hidden state are tensors;
            None for those that return the hidden state itself.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    embedded_dtype: torch.dtype
    extras: tuple[bool, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Message:
    """Facts about a payload that both ends know before it is sent.

    Attributes:
        boundary: index of the boundary, which is that of the stage before it.
        backward: True for a gradient on its way back, False for a hidden state.
        microbatch: index within the step.
        training: False in evaluation, which leaves no trace in codecs with a memory.
        samples: ``[B]`` int64 on the CPU, identities of the samples; None without any.
    """

    boundary: int
    backward: bool
    microbatch: int
    training: bool = True
    samples: Tensor | None = None


class BoundaryCodec(ABC):
    """Turns the tensors of a boundary into payloads and back.

    For every message the receiver calls ``nbytes`` once and then ``decode``; the sender calls
    ``encode``. Both ends see the messages of one boundary and direction in the same order. Several
    may be announced by ``nbytes`` before the first is decoded.

    Attributes:
        name: name in options and reports.
    """

    name: str

    @property
    def options(self) -> str:
        """Options that both ends must share, besides the name."""
        return ""

    @abstractmethod
    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Check before training that such tensors can be encoded.

        Raises:
            ValueError: unsupported dtype, or number of channels (the last dimension).
        """

    @abstractmethod
    def nbytes(self, shape: Sequence[int], dtype: torch.dtype, message: Message) -> int:
        """Return the bytes of a payload, all metadata counted; the same on both ends."""

    @abstractmethod
    def encode(self, x: Tensor, message: Message) -> Tensor:
        """Encode ``[..., S, N]`` of any strides; NaN and Inf survive.

        Returns:
            ``[nbytes]`` uint8, new and contiguous.
        """

    @abstractmethod
    def decode(
        self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, message: Message
    ) -> Tensor:
        """Return a new tensor of this shape and dtype, which shares no memory with the payload.

        Args:
            payload: ``[nbytes]`` uint8, contiguous, aligned to 16 bytes.
            shape: shape of the tensor.
            dtype: dtype of the tensor.
            message: as for ``encode``.

        Raises:
            ValueError: a payload of another size.
        """

    @abstractmethod
    def bits_per_value(self, shape: Sequence[int], dtype: torch.dtype) -> float:
        """Return the bits per value of a coded training message, all metadata counted."""

    def forget(self) -> None:  # noqa: B027 (few codecs remember anything)
        """Drop what was learned from messages; both ends call it when other weights are loaded."""

    def close(self) -> None:  # noqa: B027 (few codecs hold anything)
        """Release files and memory; the codec is not used after."""


class StatelessCodec(BoundaryCodec):
    """Base of codecs whose payloads depend on the tensor alone."""

    @abstractmethod
    def size(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes of a payload."""

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype, message: Message) -> int:
        """Return the bytes of a payload, whatever the message."""
        return self.size(shape, dtype)

    def bits_per_value(self, shape: Sequence[int], dtype: torch.dtype) -> float:
        """Return the bits of a payload per value."""
        return 8 * self.size(shape, dtype) / max(1, math.prod(shape))

    def encode(self, x: Tensor, message: Message) -> Tensor:
        """Return the payload; see the base class."""
        self.check(x.shape, x.dtype)
        return self._encode(x.detach())

    def decode(
        self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, message: Message
    ) -> Tensor:
        """Return the values; see the base class."""
        check_payload(self.name, payload, self.size(shape, dtype))
        return self._decode(payload, tuple(shape), dtype)

    @abstractmethod
    def _encode(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _decode(self, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...


def check_floats(name: str, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` unless kernels take the dtype."""
    if dtype not in FLOATS:
        raise ValueError(
            f"The codec {name!r} cannot encode {dtype}; allowed: float32, bfloat16, float16. Let "
            "the layers at the boundary return one of them, or choose the codec 'none'."
        )


def check_channels(
    name: str, shape: Sequence[int], tile: int, sizes: Sequence[int], option: str
) -> None:
    """Raise ``ValueError`` unless channels are whole tiles; ``option`` can be one of ``sizes``."""
    if not shape or shape[-1] % tile:
        channels = shape[-1] if shape else "no"
        divisors = [size for size in sizes if shape and not shape[-1] % size]
        remedy = "the codec 'bf16'"
        if divisors:
            remedy = f"a tile of {' or '.join(map(str, divisors))} (`{option}`)"
        raise ValueError(
            f"The codec {name!r} works on tiles of {tile} channels, but hidden states of shape "
            f"{tuple(shape)} have {channels}, which is not divisible. Choose {remedy}."
        )


def check_payload(name: str, payload: Tensor, nbytes: int) -> None:
    """Raise ``ValueError`` unless the payload has the size that shape and dtype imply."""
    if payload.dtype != torch.uint8 or tuple(payload.shape) != (nbytes,):
        raise ValueError(
            f"The codec {name!r} was given a payload of {payload.dtype} {tuple(payload.shape)}; "
            f"expected uint8 ({nbytes},). Decode with the shape, dtype and codec of the sender."
        )
