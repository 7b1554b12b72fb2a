"""The operator ``lq_lightning::feedback_out``."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from lq_lightning.kernels.message import MessageFormat, parse_format
from lq_lightning.kernels.message.calls import facts, find_call, keep_call
from lq_lightning.kernels.message.checks import check_message, check_rows
from lq_lightning.kernels.message.noise import seed_words
from lq_lightning.kernels.message.operators import count_write, define_operator

from . import reference as cpu


@lru_cache(maxsize=256)
def _formats(stored: str, target: str) -> tuple[MessageFormat, MessageFormat]:
    """Return the format of a residual, rounded to nearest, and that of a message.

    Raises:
        ValueError: the residual cannot be kept for such messages.
    """
    formats = replace(parse_format(stored), stochastic=False), parse_format(target)
    for name in ("group_size", "hadamard_size"):
        values = [getattr(fmt, name) for fmt in formats]
        if values[0] != values[1]:
            raise ValueError(
                f"{name} is {values[0]} of the residual and {values[1]} of the message; the "
                "residual is kept in the groups and the domain of the message. Make them equal."
            )
    for fmt in formats:
        if not fmt.group_size:
            raise ValueError(
                f"{fmt} has one scale per row, which a residual cannot be kept for: it would need "
                "three passes. Use a group_size from 16 to 4096."
            )
        if not fmt.symmetric or fmt.kind != "integer":
            raise ValueError(
                f"{fmt} is not a symmetric integer format, which a residual needs. Use an integer "
                "code with symmetric=True."
            )
    return formats


def _feedback_out(
    x: Tensor,
    numel: int,
    stored: str,
    target: str,
    seed: int,
    residual: Tensor,
    out: Tensor,
    skip: int | None = None,
) -> None:
    """Encode ``x`` plus ``residual`` into ``out``, and what that leaves out into ``residual``.

    Args:
        x: ``[R, N]`` fp32, bf16 or fp16, or ``[K, R, nbytes]`` uint8 of format ``stored``.
        numel: values in a row.
        stored: format of ``residual``, a ``MessageFormat`` as a string; rounded to nearest.
        target: format of ``out``.
        seed: for stochastic rounding in ``target``.
        residual: ``[R, nbytes]`` uint8.
        out: ``[R, nbytes]`` uint8.
        skip: row of ``x``, then of ``R + 1``, to leave out.
    """
    key = ("feedback", facts(x), numel, stored, target, facts(residual), facts(out), skip)
    call = find_call(key)
    if call is not None:
        call.launch(x, residual, out, words=seed_words(seed))
        count_write(residual, out)
        return
    formats = stored_format, target_format = _formats(stored, target)
    if x.dtype == torch.uint8:
        check_message("x", x, stored_format.layout(numel).nbytes)
    else:
        check_rows("x", x)
    check_message("residual", residual, stored_format.layout(numel).nbytes)
    check_message("out", out, target_format.layout(numel).nbytes)
    if x.is_cuda:
        from .triton_kernels import launch_feedback

        keep_call(key, (), launch_feedback(x, numel, *formats, seed, residual, out, skip))
    else:
        cpu.feedback(x, numel, *formats, seed, residual, out, skip)
    count_write(residual, out)


def _fake_feedback_out(
    x: Tensor,
    numel: int,
    stored: str,
    target: str,
    seed: int,
    residual: Tensor,
    out: Tensor,
    skip: int | None = None,
) -> None:
    return None


feedback_out = define_operator(
    "feedback_out(Tensor x, int numel, str stored, str target, int seed, Tensor(a!) residual, "
    "Tensor(b!) out, int? skip=None) -> ()",
    _feedback_out,
    _fake_feedback_out,
)
