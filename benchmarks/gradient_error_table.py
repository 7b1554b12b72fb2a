"""Errors of gradients by kind of site on the weights of a run: AGoQ's table 13.

Each gradient is computed once from what a forward pass would have saved and once from its codes,
for the same incoming gradient: of norms and the linears behind them, of gated MLPs, and of
attention.

Shape legend: T tokens of a batch (B sequences of S), N features, H heads, D features of a head.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from ablation_data import Data, inputs_and_targets
from llama_training import LanguageModel, Training
from torch import Tensor, nn
from torch.nn import functional as F

from lq_lightning.activations.policy import CODECS, RECIPES
from lq_lightning.codecs import CodecSpec, decode, encode

BATCHES, SEQUENCES = 2, 2
# The linears behind each norm of a layer.
LINEARS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}

RoundTrip = Callable[[Tensor], Tensor]
Gradients = list[tuple[str, Tensor]]  # with the kind of each


@dataclass(frozen=True, slots=True)
class Codes:
    """Codecs of a row of the table, by name; None where nothing is measured."""

    norm: str
    activation: str
    attention: str | None


CODES = {
    "agoq": Codes(str(RECIPES["agoq"].norm), str(RECIPES["agoq"].activation), None),
    **{name: Codes(name, name, name) for name in ("int4", "fp4_e2m1", "nf4", "fp8_e4m3")},
}


@dataclass(slots=True)
class Seen:
    """Inputs and outputs of modules by name, and of attention by layer, with their gradients."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    attention: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)


@contextmanager
def watched(layers: nn.ModuleList) -> Iterator[Seen]:
    """Record what modules of all layers, and attention, read and return."""
    seen, handles = Seen(), []
    attend = F.scaled_dot_product_attention

    def record(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            seen.inputs[name], seen.outputs[name] = args[0], output
            args[0].retain_grad()
            output.retain_grad()

        return hook

    def attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = attend(q, k, v, *args, **kwargs)
        out.retain_grad()
        seen.attention.append((q, k, v, out))
        return out

    for name, module in layers.named_modules():
        if isinstance(module, nn.Linear) or name.endswith("norm"):
            handles.append(module.register_forward_hook(record(name)))
    F.scaled_dot_product_attention = attention
    try:
        yield seen
    finally:
        F.scaled_dot_product_attention = attend
        for handle in handles:
            handle.remove()


def _rows(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise AssertionError("no gradient reached a recorded tensor")
    return tensor.detach().flatten(0, -2)


def norm_gradients(
    seen: Seen, norm: nn.Module, layer: str, name: str, code: RoundTrip
) -> Gradients:
    """Gradients of an RMSNorm, whose deviations are exact, and of the linears behind it."""
    at = f"{layer}.{name}"
    x_TN, dy_TN = _rows(seen.inputs[at]), _rows(seen.outputs[at].grad)
    rstd = (x_TN.square().mean(1, keepdim=True) + norm.variance_epsilon).rsqrt()
    x_hat = code(x_TN) * rstd
    dx_hat = dy_TN * norm.weight
    dx = dx_hat - x_hat * (dx_hat * x_hat).mean(1, keepdim=True)
    dy_TM = torch.cat([_rows(seen.outputs[f"{layer}.{n}"].grad) for n in LINEARS[name]], 1)
    return [("norm", dx * rstd), ("linear weight", dy_TM.T @ (x_hat * norm.weight))]


def mlp_gradients(seen: Seen, layer: str, code: RoundTrip) -> Gradients:
    """Gradients of the factors of a gated MLP and of its down projection."""
    names = ("gate_proj", "up_proj")
    factors = [code(_rows(seen.outputs[f"{layer}.mlp.{n}"])).requires_grad_() for n in names]
    product = F.silu(factors[0]) * factors[1]
    down = f"{layer}.mlp.down_proj"
    dgate, dup = torch.autograd.grad(product, factors, _rows(seen.inputs[down].grad))
    weight = _rows(seen.outputs[down].grad).T @ product
    return [("linear weight", weight), ("activation", dgate), ("activation", dup)]


def attention_gradients(seen: Seen, layer: str, code: RoundTrip) -> Gradients:
    """Gradients of queries, keys and values; the softmax is computed anew from their codes."""
    *inputs, out_BHSD = seen.attention[int(layer)]
    coded = [code(x.detach().contiguous()).requires_grad_() for x in inputs]
    again = F.scaled_dot_product_attention(*coded, is_causal=True)
    found = torch.autograd.grad(again, coded, out_BHSD.grad)
    return [(f"attention {name}", gradient) for name, gradient in zip("qkv", found, strict=True)]


def gradients(seen: Seen, layers: nn.ModuleList, codes: Codes | None) -> Gradients:
    """Return the gradients of all sites of all layers, exact without codes."""

    def through(name: str | None) -> RoundTrip:
        return torch.clone if name is None else _round_trip(CODECS[name])

    given = codes or Codes(None, None, None)  # type: ignore[arg-type]
    found: Gradients = []
    for index, layer in enumerate(layers):
        at = str(index)
        for name in LINEARS:
            norm = layer.get_submodule(name)
            found += norm_gradients(seen, norm, at, name, through(given.norm))
        found += mlp_gradients(seen, at, through(given.activation))
        found += attention_gradients(seen, at, through(given.attention))
    return [(kind, gradient.detach()) for kind, gradient in found]


def _round_trip(spec: CodecSpec) -> RoundTrip:
    """Return a function from a tensor to what its code, taken as one flat row, decodes to."""

    def through(x: Tensor) -> Tensor:
        flat = x.reshape(1, -1)
        return decode(spec, encode(spec, flat), flat.shape[1]).view(x.shape)

    return through


def site_errors(model: nn.Module, blocks: Tensor) -> list[dict[str, Any]]:
    """Return a row per code: normalized L2 and mean absolute errors, means over layers and batches.

    Attention at 4 bits is there to compare with; ``agoq`` leaves it alone.

    Args:
        model: Hugging Face's Llama, in fp32.
        blocks: ``[BATCHES * SEQUENCES, seq + 1]`` tokens.
    """
    sums: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in CODES}
    for rows in blocks.split(SEQUENCES):
        model.zero_grad()
        tokens, targets = inputs_and_targets(rows)
        with watched(model.model.layers) as seen:
            logits = model(input_ids=tokens).logits
            F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()
        true = gradients(seen, model.model.layers, None)
        for name, codes in CODES.items():
            coded = gradients(seen, model.model.layers, codes)
            for (kind, found), (_, expected) in zip(coded, true, strict=True):
                if kind.startswith("attention") and codes.attention is None:
                    continue
                error = found - expected
                sums[name][f"{kind}, L2"].append(float(error.norm() / expected.norm()))
                sums[name][f"{kind}, MAE"].append(float(error.abs().mean()))
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
