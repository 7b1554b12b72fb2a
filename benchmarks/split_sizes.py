"""Bytes that a batch of split learning sends, by arithmetic: nothing is built, and nothing is run.

    python benchmarks/split_sizes.py                                 # table 4 of AMAQ
    python benchmarks/split_sizes.py --config FOLDER/config.json --batch 8 --tokens 512
    python benchmarks/split_sizes.py --peft prefix --bits 3

Sizes are those that the codecs of `examples/split_learning` tell before they encode. Trained widths
are taken to be all the mean that they are held at; the paper's AMAQ has 4.34 bits per value with
all that comes with them. AQ-SGD is shown without the first visit of a sample.

The paper counts adapters in one direction (27.3 MB are 13.6 million values in bf16), and does not
say how many tokens a sample has: with 380 it is right about what the two activations and their
gradients add in bf16.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import table, write_report

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from split_learning.adapters import LoRAPacking, Packing, PrefixPacking
from split_learning.settings import SplitSettings
from split_learning.sites import EMBEDDED, HIDDEN, Site, site_shapes

CODECS = ("bf16", "group", "channel", "aq_sgd", "amaq")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What sizes depend on.

    Attributes:
        hidden: channels of activations.
        layers: of the trunk.
        heads: of attention.
        kv_heads: of keys and values.
        head: channels of one.
        intermediate: channels within the MLP.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    intermediate: int

    def matrix(self, name: str) -> tuple[int, int]:
        """Return inputs and outputs of a module of each layer."""
        hidden, query, key = self.hidden, self.heads * self.head, self.kv_heads * self.head
        known = {
            "q_proj": (hidden, query),
            "k_proj": (hidden, key),
            "v_proj": (hidden, key),
            "o_proj": (query, hidden),
            "gate_proj": (hidden, self.intermediate),
            "up_proj": (hidden, self.intermediate),
            "down_proj": (self.intermediate, hidden),
        }
        if name not in known:
            raise ValueError(f"no size is known of {name}; choose among {', '.join(known)}")
        return known[name]


LLAMA3_8B = ModelShape(hidden=4096, layers=32, heads=32, kv_heads=8, head=128, intermediate=14_336)


def read_shape(path: Path) -> ModelShape:
    """Read the shape of a model from its config.json."""
    config = json.loads(path.read_text())
    heads = config["num_attention_heads"]
    return ModelShape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate=config["intermediate_size"],
    )


def packing(model: ModelShape, settings: SplitSettings) -> Packing:
    """Return how adapters cross."""
    if settings.peft == "prefix":
        channels = model.kv_heads * model.head
        shape = torch.Size((settings.virtual_tokens, model.layers * 2 * channels))
        return PrefixPacking("prefix", shape, model.layers)
    shapes = {}
    for layer in range(model.layers):
        for name in settings.targets:
            inputs, outputs = model.matrix(name)
            shapes[f"{layer}.{name}.lora_A.weight"] = torch.Size((settings.rank, inputs))
            shapes[f"{layer}.{name}.lora_B.weight"] = torch.Size((outputs, settings.rank))
    return LoRAPacking(shapes)


def batch_nbytes(
    settings: SplitSettings, model: ModelShape, batch: int, tokens: int
) -> dict[str, int]:
    """Return the bytes of all tensors of an optimizer step of one batch, by kind of message.

    Args:
        settings: of both ends.
        model: its shape.
        batch: samples.
        tokens: of each.
    """
    adapters = packing(model, settings)
    shapes = site_shapes(settings, adapters, model.hidden)
    at_target = replace(settings, codec="channel") if settings.codec == "amaq" else settings
    sites = {name: Site(name, shape, at_target) for name, shape in shapes.items()}
    found = {
        "adapters": sum(sites[name].nbytes((1, *shape)) for name, shape in adapters.shapes.items()),
        "adapter_gradients": sum(
            sites[name].gradient_nbytes(shape) for name, shape in adapters.shapes.items()
        ),
    }
    if settings.everything:
        activations = (batch, tokens, model.hidden)
        found["embedded"] = sites[EMBEDDED].nbytes(activations) + 8 * batch  # numbers of samples
        found["hidden"] = sites[HIDDEN].nbytes(activations)
        found["hidden_gradient"] = sites[HIDDEN].gradient_nbytes(activations)
        if settings.input_gradient:
            found["embedded_gradient"] = sites[EMBEDDED].gradient_nbytes(activations)
    else:
        found |= {"tokens": 4 * batch * tokens, "loss": 4}
    if settings.codec == "amaq":
        found["widths"] = sum((shape.num_lines + 1) // 2 for shape in shapes.values())
        if settings.everything:
            found["gate_sums"] = 8 * model.hidden
    return found


def paper_values(settings: SplitSettings, model: ModelShape, batch: int, tokens: int) -> int:
    """Return how many values the paper counts: adapters, two activations and their gradients."""
    adapters = sum(rows * width for rows, width in packing(model, settings).shapes.values())
    return adapters + 4 * settings.everything * batch * tokens * model.hidden


def rows(model: ModelShape, batch: int, tokens: int, **options: Any) -> list[dict[str, Any]]:
    """Return a row per deployment and codec.

    Args:
        model: its shape.
        batch: samples.
        tokens: of each.
        **options: of ``SplitSettings``. Gradients have the bits of the codec, as in the paper.
    """
    found = []
    for deployment in ("adapters", "everything"):
        for codec in CODECS:
            settings = SplitSettings(
                **options,
                deployment=deployment,
                codec=codec,
                gradients="bf16" if codec == "bf16" else f"int{options['bits']}",
                train_ends=deployment == "everything",
            )
            sizes = batch_nbytes(settings, model, batch, tokens)
            total = sum(sizes.values())
            counted = total - sizes["adapter_gradients"] - sizes.get("tokens", 0)
            values = paper_values(settings, model, batch, tokens)
            row = {"deployment": deployment, "codec": codec, "bits": 8 * counted / values}
            found.append(row | {"one_way_bytes": counted, "all_bytes": total, "kinds": sizes})
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, help="config.json of a model; default: Llama 3 8B")
    parser.add_argument("--peft", choices=("lora", "prefix"), default="lora")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--bits", type=int, choices=(4, 3), default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=380)
    parser.add_argument("--json", help="write a report")
    args = parser.parse_args()
    model = LLAMA3_8B if args.config is None else read_shape(args.config)
    found = rows(model, args.batch, args.tokens, peft=args.peft, rank=args.rank, bits=args.bits)
    shown = [
        [row["deployment"], row["codec"], f"{row['bits']:.3f}"]
        + [f"{row[key] / 1e6:.2f}" for key in ("one_way_bytes", "all_bytes")]
        for row in found
    ]
    header = [
        "client holds",
        "codec",
        "bits",
        "MB as in the paper",
        "MB with gradients of adapters",
    ]
    print(table(shown, header))
    write_report(args.json, "split_sizes", {"setup": vars(args) | {"config": None}, "rows": found})


if __name__ == "__main__":
    main()
