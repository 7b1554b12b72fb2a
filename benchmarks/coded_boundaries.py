"""Stage boundaries of a pipeline in a model of one process: same codecs, same numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lq_lightning.codecs import CodecSpec
from lq_lightning.pipeline.boundary import (
    AQSGDQuantization,
    Message,
    TAHQuantization,
    make_boundary_codec,
)

Codec = str | CodecSpec | TAHQuantization | AQSGDQuantization


class CodedBoundaries:
    """Encodes and decodes hidden states and their gradients between layers, as a pipeline does.

    Both ends have codecs of their own, as on two machines, for codecs with a memory.
    ``begin`` comes before every forward pass.

    Args:
        forward: Codec of hidden states.
        backward: Codec of their gradients.
    """

    def __init__(self, forward: Codec, backward: Codec) -> None:
        self._senders, self._receivers = (
            (make_boundary_codec(forward), make_boundary_codec(backward, backward=True))
            for _ in range(2)
        )
        self._nbytes, self._values = [0, 0], [0, 0]  # forward and backward, in training
        self._microbatch = 0
        self._samples: Tensor | None = None

    def begin(self, microbatch: int, samples: Tensor | None = None) -> None:
        """Name the micro-batch of the next forward and backward pass.

        Args:
            microbatch: Index within the step.
            samples: ``[B]`` int64 on the CPU, identities of its samples.
        """
        self._microbatch, self._samples = microbatch, samples

    def cross(self, hidden: Tensor, boundary: int) -> Tensor:
        """Return the hidden state behind a boundary; its gradient is coded as well."""
        message = Message(
            boundary=boundary,
            backward=False,
            microbatch=self._microbatch,
            training=torch.is_grad_enabled(),
            samples=self._samples,
        )
        received: Tensor = _Crossing.apply(hidden, self, message)
        return received

    def send(self, tensor: Tensor, message: Message) -> Tensor:
        """Return the tensor that the other end decodes."""
        sender, receiver = (ends[message.backward] for ends in (self._senders, self._receivers))
        nbytes = receiver.nbytes(tensor.shape, tensor.dtype, message)
        payload = sender.encode(tensor, message)
        if payload.numel() != nbytes:
            raise AssertionError(f"{sender.name} announced {nbytes} bytes, not {payload.numel()}")
        if message.training:
            self._nbytes[message.backward] += nbytes
            self._values[message.backward] += tensor.numel()
        return receiver.decode(payload, tensor.shape, tensor.dtype, message)

    def bits_per_value(self) -> tuple[float, float]:
        """Return the bits per value that training has sent so far, forward and backward."""
        forward, backward = (
            8 * nbytes / max(1, values)
            for nbytes, values in zip(self._nbytes, self._values, strict=True)
        )
        return forward, backward


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, boundaries: CodedBoundaries, message: Message) -> Tensor:
        ctx.boundaries, ctx.message = boundaries, message
        return boundaries.send(hidden, message)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.boundaries.send(grad, replace(ctx.message, backward=True)), None, None


def layers_before_boundaries(num_layers: int, num_stages: int) -> list[int]:
    """Return the index of the last layer of every stage but the last, for stages of equal size."""
    if num_stages > num_layers:
        raise ValueError(f"{num_layers} layers do not make {num_stages} stages: give fewer stages")
    return [stage * num_layers // num_stages - 1 for stage in range(1, num_stages)]
