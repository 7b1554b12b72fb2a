"""Check that all ranks reduce gradients of the same parameters, unit by unit.

FSDP2 packs the gradients of a unit's parameters into one message, without their names. If ranks
have gradients for different parameters, for example of experts that only some of them call,
gradients of different parameters are added up, and nothing fails if their sizes are equal. So ranks
compare the layouts of their messages, in one max-reduction of a few bytes per unit that starts when
backward ends.

On CPUs, where waiting costs nothing, and whenever its layout is new, as in the first step, a rank
waits for the result before the optimizer step. Otherwise, on GPUs, the host would stall while the
network is busy, so the rank reads the result once it has the next step's gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lq_lightning._compat.fsdp2 import GroupParams, announce_packed_indices, fsdp_units
from lq_lightning._compat.torch import after_backward, backward_id, split_group
from lq_lightning.foundation import streams
from lq_lightning.foundation.parameters import clean_name
from lq_lightning.foundation.streams import MaxReduction

_UNIT_BYTES, _TOTAL_BYTES = 2, 8
_MAX_KNOWN = 256
_Layouts = dict[int, tuple[tuple[int, ...], ...]]  # parameters of each reduction, by unit


class _Comparison(NamedTuple):
    """One comparison in progress."""

    result: Callable[[], list[int]]  # waits for it
    packed: _Layouts
    is_known: bool  # whether this rank has packed the same before


class PackedAgreement:
    """Compares over ``group``, which shards ``root``, which gradients were reduced; see above."""

    def __init__(self, root: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        self._names = {id(p): clean_name(name) for name, p in root.named_parameters()}
        units = list(fsdp_units(root))
        self._units = [name or "root" for name, _, _ in units]
        self._groups = [group for _, _, group in units]
        self._waits = not streams.has_streams(device)
        if not self._waits:  # in a group of their own, so as not to queue behind gradients
            group = split_group(group, [list(range(group.size()))], device)
        self._group = group
        self._reduction = MaxReduction(device)
        self._packed: _Layouts = {}
        self._order: tuple[int, ...] = ()
        self._backward = -1
        self._known: dict[bytes, None] = {}  # in the order in which they were last packed
        self._pending: list[_Comparison] = []
        for index, unit in enumerate(self._groups):
            announce_packed_indices(unit, partial(self._note, index))

    def _note(self, unit: int, packed: tuple[int, ...]) -> None:
        self._packed[unit] = (*self._packed.get(unit, ()), packed)
        self._order = (*self._order, unit)
        if self._backward != backward_id() != -1:
            self._backward = backward_id()
            after_backward(self._start)

    def _start(self) -> None:
        """Start comparing the layouts packed since the last call."""
        self._backward = -1
        if not self._order:
            return
        packed, order, self._packed, self._order = self._packed, self._order, {}, ()
        digests = [_digest(packed.get(unit), _UNIT_BYTES) for unit in range(len(self._units))]
        total = _digest((order, tuple(sorted(packed.items()))), _TOTAL_BYTES)
        mine = b"".join([*digests, total])
        result = self._reduction.start([*mine, *(255 - byte for byte in mine)], self._group)
        self._pending.append(_Comparison(result, packed, total in self._known))
        self._known.pop(total, None)
        self._known[total] = None
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def check(self) -> None:
        """Make sure that all ranks have gradients of the same parameters. All of them call this.

        Raises:
            RuntimeError: They have not, now or, on GPUs, in the step before.
        """
        self._start()
        pending, self._pending = self._pending, []
        if pending and pending[-1].is_known and not self._waits:
            self._pending = [pending.pop()]
        for comparison in pending:
            self._raise_if_different(comparison)

    def finish(self) -> None:
        """Wait for comparisons that :meth:`check` left pending, at the end or before a checkpoint.

        Raises:
            RuntimeError: Ranks had gradients of different parameters.
        """
        pending, self._pending = self._pending, []
        for comparison in pending:
            self._raise_if_different(comparison)

    def forget(self) -> None:
        """Drop all state of a failed backward."""
        self._packed, self._order, self._backward, self._pending = {}, (), -1, []

    def _raise_if_different(self, comparison: _Comparison) -> None:
        result = comparison.result()
        half = len(result) // 2
        differs = [a + b != 255 for a, b in zip(result[:half], result[half:], strict=True)]
        if any(differs):
            starts = range(0, half - _TOTAL_BYTES, _UNIT_BYTES)
            units = [i for i, at in enumerate(starts) if any(differs[at : at + _UNIT_BYTES])]
            raise RuntimeError(self._message(units, comparison.packed))

    def _message(self, units: list[int], packed: _Layouts) -> str:
        advice = (
            "Let every rank use the same parameters in every step, and units in one order: call an "
            "expert without input with an empty batch, or let the `forward` that chooses experts "
            "add `0.0 * sum(p.sum() for p in expert.parameters())` to its result. Freeze "
            "(`requires_grad_`) the same ones on all ranks."
        )
        if not units:
            return (
                "ranks have reduced the gradients of units in different orders, so that gradients "
                f"of different parameters were added up. {advice}"
            )
        unit = units[0]
        params = [p.sharded_param for p in GroupParams(self._groups[unit])()]
        has = {index for call in packed.get(unit, ()) for index in call}
        named = [self._names.get(id(p), "?") for p in params]
        with_gradient = [f"`{named[i]}`" for i in sorted(has)]
        without = [
            f"`{name}`"
            for i, (name, p) in enumerate(zip(named, params, strict=True))
            if p.requires_grad and i not in has
        ]
        more = f" (and {len(units) - 1} more)" if len(units) > 1 else ""
        return (
            f"ranks have gradients of different parameters of the unit `{self._units[unit]}`{more},"
            " and FSDP2 adds up what it packs by position: gradients of one parameter would be "
            f"used for another. On rank {dist.get_rank()} there are gradients of "
            f"{_few(with_gradient)}, and of {_few(without)} there are none. {advice}"
        )


@lru_cache(maxsize=4096)
def _digest(value: object, size: int) -> bytes:
    return hashlib.blake2b(repr(value).encode(), digest_size=size).digest()


def _few(names: list[str], most: int = 4) -> str:
    if not names:
        return "no parameter"
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")
