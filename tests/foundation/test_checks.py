"""Numbers of options: floats and booleans that equal an allowed integer are no such number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lq_lightning import (
    AdaptiveBits,
    GradientQuantization,
    LocalSteps,
    QuantizationMonitor,
    QuantizedFSDPStrategy,
    QuantizedPipelineStrategy,
)
from lq_lightning.adaptive import AdaptiveBitsConfig
from lq_lightning.codecs import CodecSpec
from lq_lightning.data_parallel import QuantizedAllReduce, QuantizedGradientBuffer
from lq_lightning.foundation.checks import check_choice, counted
from lq_lightning.optim import OptimizerQuantization
from lq_lightning.pipeline.aq_sgd import AQSGDQuantization
from lq_lightning.pipeline.message import TAHQuantization


def _buffer(**options: Any) -> Any:
    return QuantizedGradientBuffer(nn.Linear(2, 2), **options)


def _codec(**options: Any) -> Any:
    return CodecSpec(code="int4", **options)


@pytest.mark.parametrize(
    ("make", "option", "values"),
    [
        (AdaptiveBitsConfig, "reach_in_steps", (2.5, 2.0, True)),
        (AdaptiveBits, "reach_in_steps", (2.5,)),
        (AdaptiveBits, "histogram_every_n_steps", (2.5, True)),
        (QuantizationMonitor, "every_n_steps", (2.5, 2.0, True)),
        (QuantizedAllReduce, "min_quantized_numel", (2.5, True)),
        (QuantizedAllReduce, "node_size", (2.0,)),
        (_buffer, "min_quantized_numel", (2.5, True)),
        (OptimizerQuantization, "min_numel", (64.0, True)),
        (OptimizerQuantization, "seed", (False,)),
        (_codec, "group_size", (128.0,)),
        (TAHQuantization, "tile_size", (64.0,)),
        (TAHQuantization, "bits", (4.0,)),
        (AQSGDQuantization, "memory_nbytes", (1e9,)),
        (GradientQuantization, "hadamard_size", (32.0,)),
        (LocalSteps, "every", (8.0,)),
        (QuantizedFSDPStrategy, "check_replicas_every_n_steps", (2.5,)),
        (QuantizedFSDPStrategy, "seed", (1.0, True)),
        (QuantizedPipelineStrategy, "num_microbatches", (4.0,)),
    ],
)
def test_whole_numbers_are_whole(
    make: Callable[..., Any], option: str, values: tuple[object, ...]
) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"{option}={value!r}"):
            make(**{option: value})


def test_choices_have_a_type() -> None:
    check_choice("Owner", "field", 128, (64, 128))
    check_choice("Owner", "field", True, (True, False))
    check_choice("Owner", "field", 0.5, (0.5, 1.0))
    check_choice("Owner", "field", torch.float32, (torch.float32, None))
    for value in (128.0, True, "128"):
        with pytest.raises(ValueError, match="choose one of 1, 128"):
            check_choice("Owner", "field", value, (1, 128))


def test_counted() -> None:
    assert [counted(n, "layer") for n in (0, 1, 2)] == ["0 layers", "1 layer", "2 layers"]
