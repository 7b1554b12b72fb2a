"""Errors of gradients by kind of site on the weights of a run: AGoQ's table 13."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "research"))

import torch
from ablation_data import Data, inputs_and_targets
from activation_capture import Layer, capture
from activation_error import relative, round_trip
from activation_gradients import (
    Gradients,
    attention_gradients,
    exact,
    mlp_gradients,
    norm_gradients,
)
from llama import LanguageModel
from llama_training import Training
from torch import nn

from lq_lightning.activations.policy import CODECS, RECIPES

# What is measured of a site, by the name of the gradient.
KINDS = {
    "norm dx": "norm",
    "norm linears": "linear weight",
    "silu down": "linear weight",
    "silu dgate": "activation",
    "silu dup": "activation",
    "attention dq": "attention q",
    "attention dk": "attention k",
    "attention dv": "attention v",
}
BATCHES, SEQUENCES = 2, 2


@dataclass(frozen=True, slots=True)
class Codes:
    """Codecs of a row of the table, by name; None where nothing is measured."""

    norm: str
    activation: str
    attention: str | None


def _codes() -> dict[str, Codes]:
    agoq = RECIPES["agoq"]
    everywhere = ("int4", "fp4_e2m1", "nf4", "fp8_e4m3")
    found = {"agoq": Codes(str(agoq.norm), str(agoq.activation), None)}
    return found | {name: Codes(name, name, name) for name in everywhere}


CODES = _codes()


def _gradients(layer: Layer, codes: Codes | None) -> list[Gradients]:
    """Return the gradients of all sites of a layer, exact without codes."""

    def through(name: str | None) -> Any:
        return exact if codes is None or name is None else round_trip(CODECS[name])

    norm, activation, attention = (
        through(getattr(codes, field, None)) for field in ("norm", "activation", "attention")
    )
    found = [norm_gradients(site, norm) for site in layer.norms]
    found.append(mlp_gradients(layer.mlp, activation))
    if codes is None or codes.attention is not None:
        found.append(attention_gradients(layer.attention, attention))
    return found


def site_errors(model: nn.Module, blocks: torch.Tensor) -> list[dict[str, Any]]:
    """Return a row per code: normalized L2 and mean absolute errors, means over layers and batches.

    Each gradient is computed from what a forward pass would have saved and from its codes, for the
    same incoming gradient. Attention at 4 bits is there to compare with; ``agoq`` leaves it alone.

    Args:
        model: Hugging Face's Llama, in fp32.
        blocks: ``[BATCHES * SEQUENCES, seq + 1]`` tokens.
    """
    sums: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in CODES}
    for rows in blocks.split(SEQUENCES):
        for layer in capture(model, *inputs_and_targets(rows)):
            true = _gradients(layer, None)
            for name, codes in CODES.items():
                for of_site, of_exact in zip(_gradients(layer, codes), true, strict=False):
                    for gradient, kind in KINDS.items():
                        if gradient not in of_site:
                            continue
                        found, expected = of_site[gradient].detach(), of_exact[gradient].detach()
                        sums[name][f"{kind}, L2"].append(relative(found, expected))
                        error = float((found - expected).abs().mean())
                        sums[name][f"{kind}, MAE"].append(error)
    return [
        {"code": name} | {key: sum(values) / len(values) for key, values in of.items()}
        for name, of in sums.items()
    ]


def errors_of_run(training: Training, data: Data) -> dict[str, Any]:
    """Measure the fp32 weights of a run on a few validation batches; the run is left as it is."""
    began = time.perf_counter()
    with data.val.device:
        model = LanguageModel(training.preset, data.vocab)
    with torch.no_grad():
        for weight, master in zip(model.parameters(), training.weights.masters, strict=True):
            weight.copy_(master)
    rows = site_errors(model.llama, data.val[: BATCHES * SEQUENCES])
    return {"rows": rows, "seconds": time.perf_counter() - began}
