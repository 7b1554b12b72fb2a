"""Payloads of stage boundaries: the interface of codecs, and codecs without a memory.

Each end of a boundary has its own codec. Both ends know shape, dtype and the ``Message``, so
payloads carry none of these and their size is known before a byte is sent.

Shape legend: B samples of a micro-batch, S tokens, N channels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from lq_lightning.codecs import CodecSpec, decode, derive_seed, encode, flatten_rows
from lq_lightning.codecs.spec import GROUP_SIZES
from lq_lightning.foundation.checks import check_choice, is_number
from lq_lightning.kernels.tah import TAHFormat, tah_dequantize, tah_quantize

# Channels that share a scale, in codecs that work on groups of a ``CodecSpec``.
GROUP_TILES = tuple(size for size in GROUP_SIZES if isinstance(size, int))
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_TAH_TILES = (8, 16, 32, 64, 128, 256)
_TAH_BITS = (None, 2, 3, 4, 5, 6, 7, 8)
_INT4_SHARE = 0.8  # of the tokens; section 4 of TAH-Quant


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryMeta:
    """Hidden states at the boundaries, for micro-batches of one shape. Plain data.

    For layers that return a tuple, ``extras`` says which entries behind the hidden state are
    tensors; None for layers that return the hidden state itself.
    """

    # Behind a layer; of the tokens tensor-parallel ranks may each have their share.
    shape: tuple[int, ...]
    dtype: torch.dtype
    embedded_shape: tuple[int, ...]  # in front of the first layer
    embedded_dtype: torch.dtype
    extras: tuple[bool, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Message:
    """Facts about a payload that both ends know before it is sent."""

    boundary: int  # its index, which is that of the stage before it
    backward: bool  # True for a gradient, False for a hidden state
    microbatch: int  # index within the step
    training: bool = True  # False in evaluation, which leaves no trace in codecs with a memory
    seed: int | None = None  # of the step, for codecs with noise
    samples: Tensor | None = None  # identities, [B] int64 on the CPU; None without any


_ANY = Message(boundary=0, backward=False, microbatch=0)  # for sizes equal in all messages


class BoundaryCodec(ABC):
    """Turns the tensors of a boundary into payloads and back.

    For every message the receiver calls ``nbytes`` once and then ``decode``; the sender calls
    ``encode``. Both ends see the messages of one boundary and direction in the same order. Several
    may be announced by ``nbytes`` before the first is decoded: sizes can depend on messages that
    were announced earlier, never on decoded values.

    Attributes:
        name: name in options and reports.
        options: options that both ends must share, besides the name.
    """

    name: str
    options = ""

    @abstractmethod
    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Raise ``ValueError``, before training, for a shape or dtype that cannot be encoded."""

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

        ``payload`` is ``[nbytes]`` uint8, contiguous and aligned to 16 bytes.

        Raises:
            ValueError: a payload of another size.
        """

    def bits_per_value(self, shape: Sequence[int], dtype: torch.dtype) -> float:
        """Return the bits per value of a coded training message, all metadata counted."""
        return 8 * self.nbytes(shape, dtype, _ANY) / max(1, math.prod(shape))

    def forget(self) -> None:  # noqa: B027 (few codecs remember anything)
        """Forget earlier messages; both ends call it when other weights are loaded."""

    def close(self) -> None:  # noqa: B027 (few codecs hold anything)
        """Release files and memory; the codec is not used after."""


def check_floats(name: str, dtype: torch.dtype) -> None:
    """Raise ``ValueError`` unless kernels take the dtype."""
    if dtype not in _FLOATS:
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
            f"The codec {name!r} works on tiles of {tile} channels, but hidden states have "
            f"{channels} (their last dimension), which is not divisible. Choose {remedy}."
        )


def check_payload(name: str, payload: Tensor, nbytes: int) -> None:
    """Raise ``ValueError`` unless the payload has the size that shape and dtype imply."""
    if payload.dtype != torch.uint8 or tuple(payload.shape) != (nbytes,):
        raise ValueError(
            f"The codec {name!r} was given a payload of {payload.dtype} {tuple(payload.shape)}; "
            f"expected uint8 ({nbytes},). Decode with the shape, dtype and codec of the sender."
        )


class CastCodec(BoundaryCodec):
    """Sends values as they are, or cast to ``dtype``."""

    def __init__(self, name: str, dtype: torch.dtype | None) -> None:
        self.name = name
        self._dtype = dtype

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Refuse to cast values that are not floating-point numbers."""
        if self._dtype is not None and not dtype.is_floating_point:
            raise ValueError(
                f"The codec {self.name!r} rounds floating-point numbers and was given {dtype}. "
                "Choose the codec 'none'."
            )

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype, message: Message) -> int:
        """Return the bytes of the values."""
        return math.prod(shape) * (self._dtype or dtype).itemsize

    def encode(self, x: Tensor, message: Message) -> Tensor:
        """Copy or cast."""
        self.check(x.shape, x.dtype)
        values = torch.empty(x.shape, dtype=self._dtype or x.dtype, device=x.device)
        return values.copy_(x.detach()).view(-1).view(torch.uint8)

    def decode(
        self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, message: Message
    ) -> Tensor:
        """Copy or cast back."""
        check_payload(self.name, payload, self.nbytes(shape, dtype, message))
        return payload.view(self._dtype or dtype).view(tuple(shape)).to(dtype, copy=True)


class GroupCodec(BoundaryCodec):
    """Encodes groups of neighboring channels that share a scale; groups must not cross tokens.

    Stochastic rounding needs the seed of a message, from which each boundary, direction and
    micro-batch has noise of its own.
    """

    def __init__(self, name: str, spec: CodecSpec) -> None:
        if spec.group_size == "row":
            raise ValueError(
                "A stage boundary cannot be coded with group_size='row': every token needs scales "
                "of its own. Use a group_size of 16 to 4096."
            )
        self.name, self.options = name, repr(spec)
        self.spec = spec

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Refuse groups that would cross tokens, and dtypes that kernels do not take."""
        check_floats(self.name, dtype)
        check_channels(
            self.name, shape, int(self.spec.group_size), GROUP_TILES, "CodecSpec.group_size"
        )

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype, message: Message) -> int:
        """Return the bytes of one row of ``spec``."""
        return self.spec.nbytes(math.prod(shape))

    def encode(self, x: Tensor, message: Message) -> Tensor:
        """Encode all tokens as one row of ``spec``."""
        self.check(x.shape, x.dtype)
        rows = x.detach().contiguous().view(-1, x.shape[-1])
        seed = message.seed
        if seed is not None:
            seed = derive_seed(seed, message.boundary, message.backward, message.microbatch)
        return encode(self.spec, flatten_rows(self.spec, rows), seed=seed).view(-1)

    def decode(
        self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, message: Message
    ) -> Tensor:
        """Decode the row."""
        check_payload(self.name, payload, self.nbytes(shape, dtype, message))
        values = decode(self.spec, payload.view(1, -1), math.prod(shape), dtype=dtype)
        return values.view(tuple(shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class TAHQuantization:
    """Tile-wise adaptive Hadamard quantization of stage boundaries (TAH-Quant, section 3).

    A tile is a run of neighboring channels of a token, with a scale and a minimum. Where its
    largest magnitude is more than twice the second largest, that value is swapped to the front and
    the tile transformed: the outlier becomes a constant offset, which the minimum absorbs.

    Attributes:
        tile_size: channels of a tile: 8, 16, 32, 64, 128 or 256; must divide the hidden size.
        bits: bits of every code, 2 to 8. None for the paper's mix of INT3 and INT4.
        int4_share: share of the tokens of each sequence in INT4; the others, with the lowest
            entropy of magnitudes, are INT3 in all tiles (version 1 of the paper). Their number is
            rounded down. 0 and 1 are ``bits=3`` and ``bits=4``. None for the paper's 0.8, and
            with ``bits``.
        hadamard: whether to swap and transform tiles with an outlier.

    Raises:
        ValueError: a value that is not listed above, or ``int4_share`` with ``bits``.
    """

    tile_size: int = 64
    bits: int | None = None
    int4_share: float | None = None
    hadamard: bool = True

    def __post_init__(self) -> None:
        """Check every field and their combination."""
        owner = type(self).__name__
        check_choice(owner, "tile_size", self.tile_size, _TAH_TILES)
        if not isinstance(self.hadamard, bool):
            raise ValueError(
                f"`{owner}(hadamard={self.hadamard!r})` is not supported: choose True or False."
            )
        bits, share = self.bits, self.int4_share
        check_choice(owner, "bits", bits, _TAH_BITS)
        if bits is not None and share is not None:
            raise ValueError(
                f"`{owner}(bits={bits}, int4_share={share!r})` is not supported: the share mixes "
                "INT3 and INT4. Set bits alone, or leave bits=None."
            )
        if share is not None and not (is_number(share) and 0 <= share <= 1):
            raise ValueError(
                f"`{owner}(int4_share={share!r})` is not supported: choose a number from 0 (all "
                "INT3) to 1 (all INT4), or None."
            )

    @property
    def kernel_format(self) -> TAHFormat:
        """The same options as kernels take them."""
        share = _INT4_SHARE if self.int4_share is None else self.int4_share
        int3_share = 1 - Fraction(repr(share))  # exact: 1 - 0.8 is not 0.2 in floats
        bits = self.bits or (3 if int3_share == 1 else 4)
        return TAHFormat(
            tile=self.tile_size,
            bits=bits,
            int3_share=Fraction(0) if self.bits or int3_share == 1 else int3_share,
            hadamard=self.hadamard,
        )


class TAHCodec(BoundaryCodec):
    """The codec of ``TAHQuantization``."""

    def __init__(self, name: str, config: TAHQuantization) -> None:
        self.name, self.options = name, repr(config)
        self.config = config
        self._format = config.kernel_format
        self._text = str(self._format)

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Refuse tiles that would cross tokens, and dtypes that kernels do not take."""
        check_floats(self.name, dtype)
        if self._format.int3_share and len(shape) < 2:
            raise ValueError(
                f"The codec {self.name!r} ranks the tokens of a sequence and was given hidden "
                f"states of shape {tuple(shape)}; expected [..., tokens, channels]. Choose the "
                "codec 'tah5'."
            )
        check_channels(
            self.name, shape, self.config.tile_size, _TAH_TILES, "TAHQuantization.tile_size"
        )

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype, message: Message) -> int:
        """Return the bytes of a payload."""
        return self._format.layout(*_sequences_tokens_channels(shape)).nbytes

    def encode(self, x: Tensor, message: Message) -> Tensor:
        """Encode sequence by sequence."""
        self.check(x.shape, x.dtype)
        tokens = x.detach().contiguous().view(_sequences_tokens_channels(x.shape))
        payload: Tensor = tah_quantize(tokens, self._text)
        return payload

    def decode(
        self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, message: Message
    ) -> Tensor:
        """Decode sequence by sequence."""
        check_payload(self.name, payload, self.nbytes(shape, dtype, message))
        sizes = _sequences_tokens_channels(shape)
        values: Tensor = tah_dequantize(payload, *sizes, self._text, dtype)
        return values.view(tuple(shape))


def _sequences_tokens_channels(shape: Sequence[int]) -> tuple[int, int, int]:
    return math.prod(shape[:-2]), math.prod(shape[-2:-1]), shape[-1]


class CenteredCodec(BoundaryCodec):
    """Sends the mean of a message's tokens in bf16, and what is left of each token as codes.

    Hidden states of a model share a direction that is often several times as large as what tells
    tokens apart. Its part of a tile sets the scale, and the error, of all values in it. In the mean
    a token counts by the inverse of its norm: the first token of a pretrained model, a hundred
    times as large as the others, would pull the mean away from them. The mean is no part of
    TAH-Quant.
    """

    def __init__(self, codes: BoundaryCodec) -> None:
        self.name, self.options = codes.name, f"centered {codes.options}"
        self.codes = codes

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Refuse what the codes cannot encode."""
        self.codes.check(shape, dtype)

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype, message: Message) -> int:
        """Return the bytes of the mean and the codes."""
        return 2 * shape[-1] + self.codes.nbytes(shape, torch.float32, message)

    def encode(self, x: Tensor, message: Message) -> Tensor:
        """Encode the differences to the mean, in which tokens that are not finite do not count."""
        self.check(x.shape, x.dtype)
        tokens = x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1]).float()
        norms = tokens.norm(dim=1, keepdim=True)
        weights = norms.reciprocal().nan_to_num_(0.0, 0.0, 0.0)
        sums = (tokens * weights).nansum(0)  # Inf times 0 is NaN
        mean = (sums / weights.sum()).to(torch.bfloat16).nan_to_num_(0.0, 0.0, 0.0)
        codes = self.codes.encode((tokens - mean).view(x.shape), message)
        return torch.cat([mean.view(torch.uint8), codes])

    def decode(
        self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, message: Message
    ) -> Tensor:
        """Add the mean in fp32, and keep what is rounded beyond fp16 at its largest value."""
        check_payload(self.name, payload, self.nbytes(shape, dtype, message))
        mean, codes = payload[: 2 * shape[-1]], payload[2 * shape[-1] :]
        values = self.codes.decode(codes, shape, torch.float32, message)
        values.add_(mean.view(torch.bfloat16))
        if dtype == torch.float16:
            largest = torch.finfo(dtype).max
            values.clamp_(-largest, largest)  # what was not finite is NaN, and stays
        return values.to(dtype)
