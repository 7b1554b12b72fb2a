"""Sites: tensors that cross between client and server, and the codecs of each.

A site has the same name and shape at both ends, so a message holds payloads alone. The end that
sends a tensor encodes it with ``encode`` and reads its gradient with ``decode_gradient``; the other
end does the reverse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lq_lightning.codecs import CodecSpec
from lq_lightning.codecs.mixed import Ranges, WidthTable
from lq_lightning.pipeline.aq_sgd import AQSGDCodec, AQSGDQuantization
from lq_lightning.pipeline.boundary_widths import MixedCodec
from lq_lightning.pipeline.message import BoundaryCodec, CastCodec, GroupCodec, Message

from .adapters import Packing
from .settings import OptionError, SplitSettings

EMBEDDED = "embedded"  # the input of the trunk
HIDDEN = "hidden"  # its output
_TILES = (64, 32, 16)
_CACHE_NBYTES = 4 << 30  # of AQ-SGD, per client and at either end


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteShape:
    """The part of a site that both ends know beforehand.

    Attributes:
        by_row: A row of the last two dimensions shares a width, rather than a channel.
        num_lines: Number of such rows or channels.
        channels: Size of the last dimension.
        dtype: Dtype of the values.
        ranges: Ranges of the lines.
    """

    by_row: bool = False
    num_lines: int
    channels: int
    dtype: torch.dtype
    ranges: Ranges


def site_shapes(settings: SplitSettings, packing: Packing, hidden: int) -> dict[str, SiteShape]:
    """Return the sites of a deployment: adapters first, then activations of ``hidden`` channels."""
    by_row = packing.lines_are_rows
    sites = {
        name: SiteShape(
            by_row=by_row,
            num_lines=rows if by_row else width,
            channels=width,
            dtype=torch.float32,
            ranges="full",
        )
        for name, (rows, width) in packing.shapes.items()
    }
    if settings.everything:
        dtype = getattr(torch, settings.dtype)
        shape = SiteShape(num_lines=hidden, channels=hidden, dtype=dtype, ranges=settings.ranges)
        sites |= {EMBEDDED: shape, HIDDEN: shape}
    return sites


class Site:
    """A tensor that crosses, at one end. Payloads are ``[N]`` uint8, on the CPU if encoded here."""

    def __init__(self, name: str, shape: SiteShape, settings: SplitSettings) -> None:
        self._dtype = shape.dtype
        self._forward = _forward_codec(name, shape, settings)
        self._backward = _plain_codec(name, shape, settings.gradients, "--gradients bf16")
        # Widths are those of channels: rows that have them are encoded as columns.
        self._turned = shape.by_row and isinstance(self._forward, MixedCodec)

    def encode(self, x: Tensor, *, training: bool = True, samples: Tensor | None = None) -> Tensor:
        """Return the payload of ``[..., channels]`` values.

        AQ-SGD needs ``samples``, the ``[len(x)]`` int64 numbers of samples, and keeps nothing of
        an evaluation.
        """
        values = self._turn(x.detach().to(self._dtype))
        return self._forward.encode(values, _message(training, samples)).cpu()

    def encode_and_round(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the payload, and the tensor that the other end decodes; AMAQ only."""
        values = self._turn(x.detach().to(self._dtype))
        payload, arrives = self._mixed.encode_and_round(values, _message())
        return payload.cpu(), self._turn(arrives)

    def decode(
        self,
        payload: Tensor,
        shape: Sequence[int],
        *,
        training: bool = True,
        samples: Tensor | None = None,
    ) -> Tensor:
        """Return the tensor, on the device of the payload."""
        message = _message(training, samples)
        if self._turned:
            shape = (*shape[:-2], shape[-1], shape[-2])
        self._forward.nbytes(shape, self._dtype, message)
        decoded = self._forward.decode(payload, shape, self._dtype, message)
        return self._turn(decoded).contiguous()

    def encode_gradient(self, gradient: Tensor) -> Tensor:
        """Return the payload of the gradient with respect to the decoded tensor."""
        return self._backward.encode(gradient.detach().to(self._dtype), _message()).cpu()

    def decode_gradient(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the gradient, on the device of the payload."""
        return self._backward.decode(payload, shape, self._dtype, _message())

    def set_widths(self, table: WidthTable) -> None:
        """Use these widths from now on; both ends, between two batches."""
        self._mixed.set_table(0, table)

    @property
    def _mixed(self) -> MixedCodec:
        if not isinstance(self._forward, MixedCodec):
            raise ValueError(f"The codec {self._forward.name!r} has no widths.")
        return self._forward

    def _turn(self, x: Tensor) -> Tensor:
        return x.mT if self._turned else x


def open_sites(shapes: Mapping[str, SiteShape], settings: SplitSettings) -> dict[str, Site]:
    """Return the sites of one session, which remember nothing of others."""
    return {name: Site(name, shape, settings) for name, shape in shapes.items()}


def _message(training: bool = True, samples: Tensor | None = None) -> Message:
    return Message(boundary=0, backward=False, microbatch=0, training=training, samples=samples)


def _forward_codec(name: str, shape: SiteShape, settings: SplitSettings) -> BoundaryCodec:
    codec, code, instead = settings.codec, f"int{settings.bits}", "--codec channel"
    if codec in ("none", "bf16", "group"):
        return _plain_codec(name, shape, code if codec == "group" else codec, instead)
    if codec == "aq_sgd":
        config = AQSGDQuantization(
            code=code,  # type: ignore[arg-type]
            tile_size=_tile(name, shape, instead),
            cache_nbytes=_CACHE_NBYTES,
        )
        return AQSGDCodec(codec, config)
    mixed = MixedCodec()  # AMAQ sets its widths before the first tensor
    mixed.begin(lambda lines: WidthTable(torch.full((lines,), settings.bits)), shape.ranges)
    return mixed


def _plain_codec(name: str, shape: SiteShape, code: str, instead: str) -> BoundaryCodec:
    if code in ("none", "bf16"):
        return CastCodec(code, torch.bfloat16 if code == "bf16" else None)
    spec = CodecSpec(
        code=code,  # type: ignore[arg-type]
        group_size=_tile(name, shape, instead),
        symmetric=False,
        scale_dtype="bfloat16",
    )
    return GroupCodec(code, spec)


def _tile(name: str, shape: SiteShape, instead: str) -> int:
    """Return the number of neighbours that share a scale."""
    found = next((tile for tile in _TILES if shape.channels % tile == 0), None)
    if found is None:
        raise OptionError(
            f"The rows of {name!r} have {shape.channels} values, which cannot be cut into groups "
            f"of {', '.join(map(str, _TILES))}. Use `{instead}` at both ends."
        )
    return found
