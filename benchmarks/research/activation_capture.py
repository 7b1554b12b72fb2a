"""Saved activations of a model and the gradients that reach them, from one forward and backward.

Shape legend: T tokens of a batch (B sequences of S), N features, H heads, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from gpt import GPT
from torch import Tensor, nn
from torch.nn import functional as F
from trained_models import blocks_of, loss_of


@dataclass(kw_only=True, slots=True)
class NormSite:
    """A norm and the linears behind it.

    Attributes:
        x_TN: Input.
        weight_N: Of the norm.
        bias_N: Of a LayerNorm.
        eps: Of the norm.
        dy_TN: Gradient of the output.
        dout_TM: Gradients of the outputs of all linears that read the norm, side by side.
    """

    x_TN: Tensor
    weight_N: Tensor
    bias_N: Tensor | None
    eps: float
    dy_TN: Tensor
    dout_TM: Tensor


@dataclass(kw_only=True, slots=True)
class MLPSite:
    """An activation function, gated by ``up_TN`` or not, and the linear behind it.

    Attributes:
        gate_TN: Input of the activation function.
        up_TN: What its output is multiplied with, or None.
        dh_TN: Gradient of the product, which the linear reads.
        dout_TM: Gradient of the linear's output.
    """

    gate_TN: Tensor
    up_TN: Tensor | None
    dh_TN: Tensor
    dout_TM: Tensor


@dataclass(kw_only=True, slots=True)
class AttentionSite:
    """Causal attention and the projection behind it; ``dproj_TM`` is the gradient of its output."""

    q_BHSD: Tensor
    k_BHSD: Tensor
    v_BHSD: Tensor
    dout_BHSD: Tensor
    dproj_TM: Tensor


@dataclass(kw_only=True, slots=True)
class Layer:
    """All sites of one transformer block.

    Attributes:
        norms: Before attention and before the MLP.
        mlp: Activation function and what follows.
        attention: Queries, keys, values and output.
        x_BSN: Input of the block.
        dout_BSN: Gradient of its output.
        rerun: Compute the block again from another input.
        parameters: Of the block.
    """

    norms: list[NormSite]
    mlp: MLPSite
    attention: AttentionSite
    x_BSN: Tensor
    dout_BSN: Tensor
    rerun: Callable[[Tensor], Tensor]
    parameters: list[Tensor]


@dataclass(slots=True)
class _Seen:
    """Inputs and outputs of modules by name, and of attention, in the order of the forward."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    keywords: dict[str, dict[str, Any]] = field(default_factory=dict)
    attention: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)


# Names of norms with their linears, the MLP's gate, up and down, and the projection of attention.
_LLAMA = (
    {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    },
    ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "self_attn.o_proj",
)
_GPT = ({"norm1": ("qkv",), "norm2": ("up",)}, ("up", None, "down"), "out")


@contextmanager
def _watched(model: nn.Module) -> Iterator[_Seen]:
    """Record what modules of all blocks, and attention, read and return."""
    seen, handles = _Seen(), []
    attend = F.scaled_dot_product_attention

    def record(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            seen.inputs[name] = args[0] if args else kwargs["hidden_states"]
            seen.outputs[name] = output
            seen.keywords[name] = {k: v for k, v in kwargs.items() if k != "hidden_states"}
            seen.inputs[name].retain_grad()
            output.retain_grad()

        return hook

    def attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = attend(q, k, v, *args, **kwargs)
        out.retain_grad()
        seen.attention.append((q, k, v, out))
        return out

    for index, block in enumerate(blocks_of(model)):
        for name, module in block.named_modules():
            if name == "" or isinstance(module, (nn.Linear, nn.LayerNorm)) or "norm" in name:
                hook = record(f"{index}.{name}")
                handles.append(module.register_forward_hook(hook, with_kwargs=True))
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
    return tensor.detach().flatten(0, -2).contiguous()


def capture(model: nn.Module, inputs_BS: Tensor, targets_BS: Tensor) -> list[Layer]:
    """Run a batch forward and backward and return the sites of every block, all in fp32."""
    model.zero_grad()
    with _watched(model) as seen:
        loss_of(model, inputs_BS, targets_BS).backward()
    norms, (gate, up, down), project = _GPT if isinstance(model, GPT) else _LLAMA
    layers = []
    for index, block in enumerate(blocks_of(model)):
        at = f"{index}."
        found = []
        for name, linears in norms.items():
            norm = block.get_submodule(name)
            found.append(
                NormSite(
                    x_TN=_rows(seen.inputs[at + name]),
                    weight_N=norm.weight.detach(),
                    bias_N=norm.bias.detach() if hasattr(norm, "bias") else None,
                    eps=norm.eps if hasattr(norm, "eps") else norm.variance_epsilon,
                    dy_TN=_rows(seen.outputs[at + name].grad),
                    dout_TM=torch.cat([_rows(seen.outputs[at + n].grad) for n in linears], 1),
                )
            )
        mlp = MLPSite(
            gate_TN=_rows(seen.outputs[at + gate]),
            up_TN=_rows(seen.outputs[at + up]) if up else None,
            dh_TN=_rows(seen.inputs[at + down].grad),
            dout_TM=_rows(seen.outputs[at + down].grad),
        )
        q, k, v, out = seen.attention[index]
        attention = AttentionSite(
            q_BHSD=q.detach().contiguous(),
            k_BHSD=k.detach().contiguous(),
            v_BHSD=v.detach().contiguous(),
            dout_BHSD=_rows(out.grad).view(out.shape),
            dproj_TM=_rows(seen.outputs[at + project].grad),
        )

        def rerun(x_BSN: Tensor, block: nn.Module = block, name: str = at) -> Tensor:
            return block(x_BSN, **seen.keywords[name])

        output = seen.outputs[at]
        layers.append(
            Layer(
                norms=found,
                mlp=mlp,
                attention=attention,
                x_BSN=seen.inputs[at].detach(),
                dout_BSN=_rows(output.grad).view(output.shape),
                rerun=rerun,
                parameters=list(block.parameters()),
            )
        )
    return layers
