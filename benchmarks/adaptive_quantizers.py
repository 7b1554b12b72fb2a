"""What variants of ``adaptive_bits.py`` put at their sites: quantizers, and the books they keep."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from adaptive_gates import AdaptiveOptions, Gate, GateTrainer
from adaptive_variants import Variant
from coded_boundaries import Codec, CodedBoundaries
from llama_training import Training
from pipeline_ablation import identities
from qat_baselines import Shared, bits_per_value, quantizer
from torch import Tensor

from lq_lightning.adaptive import AdaptiveBitsConfig, BitGate, GateOptimizer, adaptive_quantize
from lq_lightning.pipeline.boundary import AQSGDQuantization

Quantizer = Callable[[Tensor], Tensor]
CURVE_EVERY = 10  # steps that a point of the curves is the mean of


@dataclass(kw_only=True)
class Quantization:
    """What a variant puts at its sites.

    Attributes:
        by_site: Quantizers.
        before_forward: Called with the tokens of every micro-batch.
        after_step: Called after every optimizer step.
        found: Returns fields of the outcome, in the end.
    """

    by_site: Mapping[str, Quantizer] = field(default_factory=dict)
    before_forward: Callable[[Tensor], None] = lambda tokens: None
    after_step: Callable[[], None] = lambda: None
    found: Callable[[], dict[str, Any]] = dict


def fixed(
    shared: Shared, bits: int, fitted: bool, sites: Sequence[str], training: Training
) -> Quantization:
    """Return codes of one width."""
    sizes = training.preset
    sent = bits_per_value(shared, bits, (sizes.micro_batch, sizes.seq, sizes.hidden))
    return Quantization(
        by_site=dict.fromkeys(sites, quantizer(shared, bits, fitted)),
        found=lambda: {"forward_bits": sent, "details": {"final_bits": sent}},
    )


def coded(codec: Codec, sites: Sequence[str], training: Training) -> Quantization:
    """Return a codec of stage boundaries, whose gradients are not coded."""
    sizes = training.preset
    boundaries = CodedBoundaries(codec, "none")
    numbers = itertools.count()
    remembers = isinstance(codec, AQSGDQuantization)

    def begin(tokens: Tensor) -> None:
        samples = identities(tokens) if remembers and torch.is_grad_enabled() else None
        boundaries.begin(next(numbers), samples)

    def cross(boundary: int) -> Quantizer:
        return lambda x: boundaries.cross(x, boundary)

    def found() -> dict[str, Any]:
        sent = boundaries.bits_per_value()[0]
        boundaries.close()
        # Differences to the last epoch; other codecs send alike in every step.
        values = sizes.micro_batch * sizes.seq * sizes.hidden
        final = codec.spec.bits_per_element(values) if remembers else sent
        return {"forward_bits": sent, "details": {"final_bits": final}}

    quantizers = {site: cross(index) for index, site in enumerate(sites)}
    return Quantization(by_site=quantizers, before_forward=begin, found=found)


class Books:
    """What gates went through.

    Args:
        every: Steps from one mean that is kept to the next.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._sent, self._steps = 0.0, 0
        self._reached: int | None = None
        self._means: list[float] = []

    def note(self, sent: float, mean: float, reached: bool) -> None:
        """Note a step: bits per value that it sent, mean bits after it, whether at the target."""
        self._sent += sent
        self._steps += 1
        if reached and self._reached is None:
            self._reached = self._steps
        if self._steps % self._every == 0:
            self._means.append(mean)

    def found(self, final_bits: float, gates: Mapping[str, Gate | BitGate]) -> dict[str, Any]:
        """Return fields of the outcome."""
        details = {
            "final_bits": final_bits,
            "reached": self._reached,
            "mean_bits": self._means,
            "sites": {site: site_details(gate) for site, gate in gates.items()},
        }
        return {"forward_bits": self._sent / self._steps, "details": details}


def learned(
    config: AdaptiveBitsConfig, per: Any, sites: Sequence[str], training: Training
) -> Quantization:
    """Return the library's gates and their optimizer."""
    sizes = training.preset
    lines = sizes.hidden if per == "channel" else sizes.seq
    of_line = sizes.micro_batch * sizes.seq * sizes.hidden // lines
    parts = sizes.batch // sizes.micro_batch
    gates = {site: BitGate(config, lines, per=per, name=site) for site in sites}
    optimizer = GateOptimizer(gates, config)
    books = Books(CURVE_EVERY)

    def wire_bits() -> float:
        tables = [gate.table() for gate in gates.values()]
        return sum(table.effective_bits(of_line, parts) for table in tables) / len(tables)

    def step() -> None:
        sent = wire_bits()
        optimizer.step(scale=parts)
        books.note(sent, optimizer.mean, optimizer.reached)

    return Quantization(
        by_site={site: partial(adaptive_quantize, gate=gate) for site, gate in gates.items()},
        after_step=step,
        found=lambda: books.found(wire_bits(), gates),
    )


def explored(options: AdaptiveOptions, sites: Sequence[str], training: Training) -> Quantization:
    """Return gates with more choices, and what trains them."""
    sizes = training.preset
    lines = sizes.hidden
    of_line = sizes.micro_batch * sizes.seq
    parts = sizes.batch // sizes.micro_batch
    device = training.weights.masters[0].device
    gates = {site: Gate(options, lines, device) for site in sites}
    trainer = GateTrainer(options, list(gates.values()))
    books = Books(CURVE_EVERY)

    def wire_bits() -> float:
        return sum(gate.wire_bits(of_line, parts) for gate in gates.values()) / len(gates)

    def step() -> None:
        sent = wire_bits()
        trainer.step(1 / parts)
        books.note(sent, trainer.means[-1], trainer.reached is not None)

    return Quantization(
        by_site={site: gate.quantize for site, gate in gates.items()},
        after_step=step,
        found=lambda: books.found(wire_bits(), gates),
    )


def site_details(gate: Gate | BitGate) -> dict[str, Any]:
    """Return the bits of a site: their mean, their spread, and how many lines have each width."""
    bits = gate.bits()
    counts = torch.bincount(gate.widths.long(), minlength=17).tolist()
    return {
        "mean": float(bits.mean()),
        "deviation": float(bits.std()),
        "least": float(bits.min()),
        "most": float(bits.max()),
        "widths": {width: count for width, count in enumerate(counts) if count},
    }


def quantization_of(variant: Variant, sites: Sequence[str], training: Training) -> Quantization:
    """Return what a variant puts at its sites."""
    if variant.fixed:
        return fixed(*variant.fixed, sites, training)
    if variant.codec:
        return coded(variant.codec, sites, training)
    if variant.adaptive:
        return learned(variant.adaptive, variant.per, sites, training)
    if variant.explored:
        return explored(variant.explored, sites, training)
    return Quantization()
