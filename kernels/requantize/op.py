"""The operators ``lq_lightning::requantize`` and ``lq_lightning::requantize_out``."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from lq_lightning.kernels.message import parse_format
from lq_lightning.kernels.message.calls import facts, find_call, keep_call
from lq_lightning.kernels.message.checks import check_message
from lq_lightning.kernels.message.noise import seed_words
from lq_lightning.kernels.message.operators import count_write, define_operator

from . import reference as cpu


def repeat_requantize(
    message: Tensor,
    numel: int,
    source: str,
    target: str,
    seed: int,
    out: Tensor,
    skip: int | None,
) -> bool:
    """Do again what ``requantize_out`` did for tensors with the same ``facts``; False if never."""
    call = find_call(_key(message, numel, source, target, out, skip))
    if call is None:
        return False
    call.launch(message, out, words=seed_words(seed))
    count_write(out)
    return True


def _key(
    message: Tensor, numel: int, source: str, target: str, out: Tensor, skip: int | None
) -> Hashable:
    return "requantize", facts(message), numel, source, target, facts(out), skip


def _requantize_out(
    message: Tensor,
    numel: int,
    source: str,
    target: str,
    seed: int,
    out: Tensor,
    skip: int | None = None,
) -> None:
    """Sum messages of format ``source`` and encode the sum in format ``target``.

    Args:
        message: ``[K, R, nbytes]`` uint8.
        numel: values in a row.
        source: format of ``message``, a ``MessageFormat`` as a string.
        target: format of ``out``.
        seed: for stochastic rounding in ``target``.
        out: ``[R, nbytes]`` uint8.
        skip: row of ``message``, then ``[K, R + 1, nbytes]``, to leave out.
    """
    if repeat_requantize(message, numel, source, target, seed, out, skip):
        return
    source_format, target_format = parse_format(source), parse_format(target)
    check_message("message", message, source_format.layout(numel).nbytes)
    check_message("out", out, target_format.layout(numel).nbytes)
    if message.is_cuda:
        from .triton_kernels import launch_requantize

        launch = launch_requantize(message, numel, source_format, target_format, seed, out, skip)
        keep_call(_key(message, numel, source, target, out, skip), (), launch)
    else:
        cpu.requantize(message, numel, source_format, target_format, seed, out, skip)
    count_write(out)


def _requantize(message: Tensor, numel: int, source: str, target: str, seed: int) -> Tensor:
    """Sum and encode into new rows; arguments as for ``requantize_out``."""
    out = _fake_requantize(message, numel, source, target, seed)
    _requantize_out(message, numel, source, target, seed, out)
    return out


def _fake_requantize_out(
    message: Tensor,
    numel: int,
    source: str,
    target: str,
    seed: int,
    out: Tensor,
    skip: int | None = None,
) -> None:
    return None


def _fake_requantize(message: Tensor, numel: int, source: str, target: str, seed: int) -> Tensor:
    nbytes = parse_format(target).layout(numel).nbytes
    return torch.empty(message.shape[1], nbytes, dtype=torch.uint8, device=message.device)


requantize_out = define_operator(
    "requantize_out(Tensor message, int numel, str source, str target, int seed, Tensor(a!) out, "
    "int? skip=None) -> ()",
    _requantize_out,
    _fake_requantize_out,
)
requantize = define_operator(
    "requantize(Tensor message, int numel, str source, str target, int seed) -> Tensor",
    _requantize,
    _fake_requantize,
)
