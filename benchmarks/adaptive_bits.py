"""Fine-tuning with quantized activations: learned bits per channel (AMAQ) against fixed ones.

    python benchmarks/adaptive_bits.py --preset llama_2m --cpu --trunk outputs --trunk-steps 4000 \\
        --tune-text linux/Documentation --tune-suffix .rst --tune-blocks 512 --tune-epochs 5
    python benchmarks/adaptive_bits.py --preset llama_125m --tokens kernel_tokens ...   # one GPU
    python benchmarks/adaptive_bits.py --merge adaptive_*.json --figure curves.png

A Llama is pre-trained on one text and tuned on another one, with LoRA (``--train lora``) or whole,
while what leaves the embeddings and what enters the LM head is quantized (``--sites boundaries``),
or what leaves every layer too (``layers``), in training and in evaluation. All variants of a seed
have the same start, data and learning rates. "AQ-SGD" quantizes differences to the last epoch, so
that its first epoch and its evaluation are in full precision. Bits of the reports are those on the
wire, scales, minima and widths included; lines of 9 and more bits take 16. With ``--val-every``
reports also say how far the validation loss rose on its way. What runs share: ``llama_study.py``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from adaptive_quantizers import CURVE_EVERY, quantization_of
from adaptive_report import draw_curves, summary
from adaptive_variants import VARIANTS, Variant
from llama_study import Study, parser_of, read_arguments, start
from llama_training import Training
from low_rank import add_low_rank
from torch import Tensor, nn

from lq_lightning.adaptive import attach_quantizers, find_sites


def sites_of(model: nn.Module, which: str) -> dict[str, str]:
    """Return sites of a Llama as the library names them, by the names that reports give them."""
    first, *between, last = find_sites(model, which)
    layers = {f"layer {index}": site for index, site in enumerate(between)}
    return {"input": first, **layers, "output": last}


@contextmanager
def quantizing(
    variant: Variant, training: Training, compiled: bool, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Let sites of the model be quantized, and only what is to be trained be trained."""
    model = training.model
    if args.train == "lora":
        torch.manual_seed(training.seed)
        training.train_only(add_low_rank(model.llama.model.layers, args.rank, args.alpha))
    if compiled:  # but for the sites, whose gates keep books
        model.allow_a_graph_per_layer()
        for layer in model.llama.model.layers:
            layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False)
    sites = sites_of(model, args.sites)
    quantization = quantization_of(variant, list(sites), training)
    losses: list[Tensor] = []
    validations: list[float] = []

    def begin(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        # Weights are those after the step before. Forward passes of validation come here too.
        due = args.val_every and training.step == args.val_every * len(validations)
        if due and torch.is_grad_enabled():
            validations.append(training.validate())
        quantization.before_forward(arguments[0])

    def end(_: nn.Module, arguments: tuple[Any, ...], loss: Tensor) -> None:
        if torch.is_grad_enabled():
            losses.append(loss.detach())

    handles = [
        attach_quantizers(model, {sites[name]: q for name, q in quantization.by_site.items()}),
        model.register_forward_pre_hook(begin),
        model.register_forward_hook(end),
        training.optimizer.register_step_post_hook(lambda *_: quantization.after_step()),
    ]
    found: dict[str, Any] = {}
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
    found |= quantization.found()
    parts = training.preset.batch // training.preset.micro_batch
    curve = mean_of_every(CURVE_EVERY * parts, losses)
    details = {"losses": curve, "every": CURVE_EVERY}
    if args.val_every:
        details |= {"val_losses": validations, "val_every": args.val_every}
    found["details"] = found.get("details", {}) | details


def mean_of_every(count: int, losses: list[Tensor]) -> list[float]:
    """Return means over so many losses each; those that are left over in the end are left out."""
    whole = len(losses) // count * count
    means: list[float] = (
        torch.stack(losses[:whole]).view(-1, count).mean(1).tolist() if whole else []
    )
    return means


STUDY = Study(
    name="adaptive_bits",
    variants=VARIANTS,
    applied=quantizing,
    summary=summary,
    val_exact=True,
    draw=draw_curves,
)


def main() -> int:
    """Run, or show what ran; return the exit code."""
    parser = parser_of(STUDY, __doc__, "llama_125m")
    parser.add_argument("--sites", choices=("boundaries", "layers"), default="boundaries")
    parser.add_argument("--train", choices=("lora", "full"), default="lora")
    parser.add_argument("--rank", type=int, default=16, help="of LoRA (default: 16)")
    parser.add_argument("--alpha", type=float, default=16.0, help="of LoRA (default: 16)")
    parser.add_argument(
        "--val-every", type=int, default=0, help="validate before the first of so many steps too"
    )
    args = read_arguments(STUDY, parser)
    args.also_reported = {"sites": args.sites, "train": args.train}
    if args.train == "lora":
        args.also_reported |= {"rank": args.rank, "alpha": args.alpha}
    return start(STUDY, args)


if __name__ == "__main__":
    sys.exit(main())
