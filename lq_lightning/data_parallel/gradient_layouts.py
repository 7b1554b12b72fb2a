"""How the gradients that FSDP2 packs into a slot travel, whichever parameters have one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lq_lightning.codecs import CodecSpec
from lq_lightning.data_parallel.config import GradientQuantization
from lq_lightning.data_parallel.layout import (
    MessageLayout,
    Segment,
    merge_over_small_gaps,
    segment_runs,
)
from lq_lightning.data_parallel.unit import (
    UnitDescription,
    full_precision_reason,
    keep_small_runs_exact,
)
from lq_lightning.foundation.topology import Level

__all__ = ["GradientLayouts", "LevelLayouts"]

MAX_LAYOUTS = 64


class LevelLayouts(NamedTuple):
    """Layouts of the messages of one slot.

    Attributes:
        intra: Within the node.
        inter: Between nodes.
    """

    intra: MessageLayout
    inter: MessageLayout


class GradientLayouts:
    """The message layouts of one unit's reductions.

    FSDP2 packs only parameters that got a gradient. Where that depends on the data (experts that
    see no token) there may be as many combinations as steps, so only the last ``MAX_LAYOUTS`` that
    were used are kept.

    Args:
        config: Codecs and method.
        unit: The unit.
    """

    def __init__(self, config: GradientQuantization, unit: UnitDescription) -> None:
        self._config = config
        self._unit = unit
        separates = config.separates_vocabulary(unit.context.topology.levels)
        self._vocabulary = unit.context.vocabulary if separates else frozenset()
        self._kept: dict[tuple[int, torch.dtype, tuple[int, ...]], LevelLayouts] = {}

    def segments(self, packed: Sequence[int] | None = None, itemsize: int = 4) -> list[Segment]:
        """How the gradients of the given parameters (all trained ones by default) travel.

        Args:
            packed: Indices of the parameters in a slot.
            itemsize: Bytes of one element of the reduction dtype.
        """
        params, names = self._unit.params(), self._unit.names
        if packed is None:
            packed = [i for i, p in enumerate(params) if p.requires_grad]
        segments, start = [], 0
        for i in packed:
            param = params[i]
            reason = full_precision_reason(
                param.ndim, param.numel, torch.float32, self._unit.min_quantized_numel
            )
            travel = "full" if reason else "quantized"
            codec = int(names[i] in self._vocabulary)
            segments.append(
                Segment(names[i], start, param.padded_shard_numel, travel, reason, codec)  # type: ignore[arg-type]
            )
            start += param.padded_shard_numel
        first_level = self._unit.context.topology.levels[0]
        return keep_small_runs_exact(segments, self._specs(first_level), itemsize)

    def _specs(self, level: Level) -> list[CodecSpec]:
        """Codecs of a level: of most gradients, and of those of the vocabulary."""
        return [self._config.codec(level, vocabulary=vocabulary) for vocabulary in (False, True)]

    def of(self, packed: tuple[int, ...], numel: int, dtype: torch.dtype) -> LevelLayouts:
        """Layouts for a slot.

        Args:
            packed: Indices of the parameters in it.
            numel: Its elements.
            dtype: In which gradients are reduced.
        """
        key = (numel, dtype, packed)
        layouts = self._kept.pop(key, None) or self._make(packed, numel, dtype)
        self._kept[key] = layouts  # at the end, as the last one used
        if len(self._kept) > MAX_LAYOUTS:
            del self._kept[next(iter(self._kept))]
        return layouts

    def _make(self, packed: tuple[int, ...], numel: int, dtype: torch.dtype) -> LevelLayouts:
        segments = self.segments(packed, dtype.itemsize)
        total = sum(s.numel for s in segments)
        if total != numel:
            raise AssertionError(
                f"unit `{self._unit.name}`: FSDP2 packed {numel} elements per rank, but the "
                f"parameters with gradients hold {total}"
            )
        runs = merge_over_small_gaps(segment_runs(segments))
        intra = MessageLayout.of(runs, self._specs("intra"), dtype)
        two_levels = self._unit.context.topology.node_size > 1
        raw = torch.float32 if two_levels else dtype
        return LevelLayouts(intra, MessageLayout.of(runs, self._specs("inter"), raw))
