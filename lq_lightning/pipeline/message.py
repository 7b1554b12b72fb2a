"""What crosses the boundary between two stages, and what every codec of it does.

A boundary has two ends, each with a codec of its own. Both ends know the shape, the dtype and the
``Message``, so the payload carries neither: its size is settled before a byte is sent.

Shape legend: B samples of a micro-batch, S tokens, N channels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lq_lightning.codecs.spec import GROUP_SIZES

# Channels that share a scale, in codecs that work on groups of a ``CodecSpec``.
GROUP_TILES = tuple(size for size in GROUP_SIZES if isinstance(size, int))
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Message:
    """What both ends know about a payload before it is sent.

    Attributes:
        boundary: index of the boundary, that of the stage before it.
        backward: a gradient goes back, rather than a hidden state forward.
        microbatch: index within the step.
        training: False in evaluation, where nothing is learned for later messages.
        samples: ``[B]`` int64 on the CPU, identities of the samples; None where there are none.
    """

    boundary: int
    backward: bool
    microbatch: int
    training: bool = True
    samples: Tensor | None = None


class BoundaryCodec(ABC):
    """Turns the tensors of a boundary into payloads and back.

    Of every message the receiver asks for ``nbytes`` once and then calls ``decode``, the sender
    calls ``encode``. On both ends the messages of one boundary and direction come in the same
    order: several may be announced by ``nbytes`` before the first is decoded. After ``encode`` the
    size is that of the payload; do not ask again.

    Attributes:
        name: what the codec is called in options and reports.
    """

    name: str

    @property
    def options(self) -> str:
        """All that both ends must have been given alike, the name apart; mostly nothing."""
        return ""

    @abstractmethod
    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Check that tensors like this can be encoded; call it before training.

        Raises:
            ValueError: a dtype or a number of channels (the last dimension) that cannot be.
        """

    @abstractmethod
    def nbytes(self, shape: Sequence[int], dtype: torch.dtype, message: Message) -> int:
        """Return the bytes of a payload, all metadata counted; the same on both ends."""

    @abstractmethod
    def encode(self, x: Tensor, message: Message) -> Tensor:
        """Return the payload, ``[nbytes]`` uint8, new and contiguous; NaN and Inf survive.

        Args:
            x: ``[..., S, N]``, any strides.
            message: what both ends know.
        """

    @abstractmethod
    def decode(
        self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, message: Message
    ) -> Tensor:
        """Return the tensor, new: it shares no memory with the payload.

        Args:
            payload: ``[nbytes]`` uint8, contiguous, from an address that is a multiple of 16.
            shape: of the tensor.
            dtype: of the tensor.
            message: what both ends know.

        Raises:
            ValueError: a payload of another size.
        """

    @abstractmethod
    def bits_per_value(self, shape: Sequence[int], dtype: torch.dtype) -> float:
        """Return the bits of a coded training message per value, all metadata counted."""

    def state_dict(self) -> dict[str, Any]:
        """Return what has to be restored for both ends to go on as they were; mostly nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned.

        Raises:
            ValueError: a state of another kind of codec.
        """
        if state:
            raise ValueError(
                f"The codec {self.name!r} has no state, but was given {sorted(state)}. Load a "
                "checkpoint that was written with this codec."
            )

    def close(self) -> None:  # noqa: B027 (few codecs hold anything)
        """Release files and memory; the codec is not used after."""


class StatelessCodec(BoundaryCodec):
    """A codec whose payloads depend on the tensor alone."""

    @abstractmethod
    def size(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes of a payload."""

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype, message: Message) -> int:
        """Return the bytes of a payload, whatever the message."""
        return self.size(shape, dtype)

    def bits_per_value(self, shape: Sequence[int], dtype: torch.dtype) -> float:
        """Return the bits of a payload per value."""
        return 8 * self.size(shape, dtype) / max(1, math.prod(shape))


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
    """Raise ``ValueError`` unless the payload has the size that its shape and dtype say."""
    if payload.dtype != torch.uint8 or tuple(payload.shape) != (nbytes,):
        raise ValueError(
            f"The codec {name!r} was given a payload of {payload.dtype} {tuple(payload.shape)}; "
            f"expected uint8 ({nbytes},). Decode with the shape, dtype and codec of the sender."
        )
