"""Saved activations of a layer, per kind of module, before and after, on a CPU.

    python benchmarks/activation_units.py                                   # all that can be built
    python benchmarks/activation_units.py --models llama-3-8b,qwen3 --recipes agoq,coat
    python benchmarks/activation_units.py --json units.json && python benchmarks/table.py units.json

The unit U is batch * sequence * hidden size * 2 bytes. What two layers save more than one is that
of a layer, so embeddings, heads and losses are not in it. Storages are counted once, weights not.
Models have the ratios of real ones at hidden size 512 (`activation_models.py`). "known" is what
hooks alone, without this package, counted for the same layers as they are. Attention on the CPU
saves what flash attention saves on a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import torch
from activation_models import ARCHITECTURES, HIDDEN, Architecture
from common import table, write_report

from lq_lightning.activations import ActivationPolicy, quantize_activations
from lq_lightning.activations.measure import SavedTensors
from lq_lightning.activations.policy import RECIPES
from lq_lightning.activations.report import ActivationReport

# Of a Hugging Face layer in bf16, counted with hooks at hidden size 512, sequence 256, batch 2.
KNOWN = {
    "llama-3-8b": 24.79,
    "llama-2-7b": 23.04,
    "mistral": 28.29,
    "qwen2": 28.29,
    "qwen3": 34.35,
    "encoder-relu": 12.04,
    "vit-structure": 16.04,
    "mistral-lora": 21.32,
}
POLICIES: dict[str, ActivationPolicy] = {
    **RECIPES,
    "int8": ActivationPolicy(norm="int8", activation="int8"),
}

Kinds = dict[str, list[float]]


def count(
    architecture: Architecture, layers: int, policy: ActivationPolicy, shape: tuple[int, int]
) -> ActivationReport:
    """Report what a model of some layers saves before and after."""
    torch.manual_seed(0)
    model = architecture.build(layers).bfloat16()
    handle = quantize_activations(model, policy)
    saved: list[SavedTensors] = []
    for original in (True, False):
        with handle.measure(original=original) as found:
            loss = architecture.loss(model, *shape)
        del loss
        saved.append(found)
    return handle.report(before=saved[0], after=saved[1])


def kinds_of(report: ActivationReport) -> Kinds:
    """Bytes before and after by kind of module."""
    kinds: Kinds = {}
    for row in report.rows:
        before, after = kinds.setdefault(row.kind, [0.0, 0.0])
        kinds[row.kind] = [before + (row.before or 0.0), after + (row.after or 0.0)]
    return kinds


def measure(name: str, policy: ActivationPolicy, shape: tuple[int, int]) -> Kinds:
    """U of a layer before and after, by kind of module and in all."""
    one, two = (kinds_of(count(ARCHITECTURES[name], layers, policy, shape)) for layers in (1, 2))
    tokens = shape[0] * (64 if name == "timm-vit" else shape[1])
    unit = tokens * HIDDEN * 2
    units = {}
    for kind, more in two.items():
        less = one.get(kind, [0.0, 0.0])
        units[kind] = [(after - before) / unit for before, after in zip(less, more, strict=True)]
    units["layer"] = [sum(values) for values in zip(*units.values(), strict=True)]
    return {kind: values for kind, values in units.items() if max(values) > 1e-3}


def can_build(architecture: Architecture) -> bool:
    """Whether the package that a model comes from is installed."""
    return architecture.needs is None or importlib.util.find_spec(architecture.needs) is not None


def lay_out(results: dict[str, Any]) -> str:
    """A row per kind of module of each model, a column per recipe."""
    rows = []
    recipes = list(next(iter(results.values()))["recipes"])
    for name, result in results.items():
        first = result["recipes"][recipes[0]]
        for kind in first:
            after = [f"{result['recipes'][r].get(kind, [0, 0])[1]:.2f}" for r in recipes]
            known = result["known"] if kind == "layer" else None
            shown = "-" if known is None else f"{known:.2f}"
            rows.append([f"{name}: {kind}", f"{first[kind][0]:.2f}", shown, *after])
    return table(rows, ["U per layer", "bf16", "known", *recipes])


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", help="comma-separated; by default all whose package is there")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="comma-separated; also int8")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    buildable = [name for name, model in ARCHITECTURES.items() if can_build(model)]
    args.models = args.models.split(",") if args.models else buildable
    args.recipes = args.recipes.split(",")
    for option, known in (("models", ARCHITECTURES), ("recipes", POLICIES)):
        unknown = set(getattr(args, option)) - set(known)
        if unknown:
            parser.error(f"--{option}: {', '.join(unknown)}; there are {', '.join(known)}")
    return args


def main() -> None:
    """Count every model with every recipe."""
    args = parse_arguments()
    shape = (args.batch, args.seq)
    results = {
        name: {
            "known": KNOWN.get(name),
            "recipes": {recipe: measure(name, POLICIES[recipe], shape) for recipe in args.recipes},
        }
        for name in args.models
    }
    print(lay_out(results))
    rows = [
        {"model": f"{name}: {kind}", "bf16": values[0], "recipe": recipe, "U": values[1]}
        for name, result in results.items()
        for recipe, kinds in result["recipes"].items()
        for kind, values in kinds.items()
    ]
    write_report(args.json, "activation_units", {"shape": list(shape), "rows": rows})


if __name__ == "__main__":
    main()
