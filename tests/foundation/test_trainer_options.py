"""What a Trainer is given in a wrong form is refused in words of this package."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Timer

from lq_lightning import (
    AdaptiveBits,
    QuantizationMonitor,
    QuantizedFSDPStrategy,
    QuantizedPrecision,
)


class Own(AdaptiveBits):
    """A user's."""


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("strategy", "quantised_fsdp", "Did you mean 'quantized_fsdp'.*'quantized_pipeline'"),
        ("strategy", "Quantized_pipline", "Did you mean 'quantized_pipeline'"),
        ("strategy", "zero", "no strategy's name. Those of lq_lightning are 'quantized_fsdp' and"),
        ("strategy", QuantizedFSDPStrategy, r"write `QuantizedFSDPStrategy\(\)`"),
        (
            "plugins",
            QuantizedPrecision,
            r"plugins=QuantizedPrecision\).*QuantizedPrecision\(\)",
        ),
        (
            "plugins",
            [QuantizedPrecision(), QuantizedPrecision()],
            "2 `QuantizedPrecision`, but",
        ),
        (
            "callbacks",
            [QuantizationMonitor],
            r"=\[QuantizationMonitor\].*Monitor\(\)`",
        ),
        ("callbacks", Own, r"write `Own\(\)`"),
        ("callbacks", [AdaptiveBits(), Own()], "has 2 `AdaptiveBits`, but all sites share one"),
    ],
)
def test_refused(option: str, value: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        pl.Trainer(accelerator="cpu", logger=False, **{option: value})


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "DDP"},
        {"strategy": "auto", "plugins": QuantizedPrecision()},
        {"callbacks": Timer()},
        {"callbacks": [AdaptiveBits(), QuantizationMonitor()]},
        {},
    ],
)
def test_accepted(options: dict[str, Any]) -> None:
    pl.Trainer(accelerator="cpu", devices=1, logger=False, **options)


def test_two_sources_of_precision_are_refused() -> None:
    with pytest.raises(ValueError, match=r"give `QuantizedPrecision\(precision='bf16-mixed', "):
        pl.Trainer(accelerator="cpu", precision="bf16-mixed", plugins=[QuantizedPrecision()])
