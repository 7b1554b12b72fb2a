"""Gradients of the sites of a model, from what a forward would have saved or from codes of it.

Sites: norms keep their input (LayerNorms less the mean of each row), rebuild their output for the
linears behind them, and have exact deviations; gated and plain activation functions keep their
inputs and rebuild their product for the linear behind them; attention runs again from coded
queries, keys and values, and the projection behind it reads a coded output; a block runs again from
its coded input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from activation_capture import AttentionSite, Layer, MLPSite, NormSite
from torch import Tensor
from torch.nn import functional as F

RoundTrip = Callable[[Tensor], Tensor]
Gradients = dict[str, Tensor]

# What each alternative to rebuilding from codes of the inputs, with all else exact, changes.
ALTERNATIVES = {
    "recomputed": "statistics of norms come from the codes",
    "stored": "linears read codes of their own input (silu has one too), the softmax is exact",
    "gate": "of a gated MLP only the gate is coded",
    "up": "of a gated MLP only the other factor is coded",
}
GATED = ("gate", "up")


def exact(x: Tensor) -> Tensor:
    """Keep a tensor as it is."""
    return x


def normalized(x_TN: Tensor, like_TN: Tensor, site: NormSite) -> tuple[Tensor, Tensor]:
    """Return ``x_TN`` normalized with the statistics of ``like_TN``, and the factors ``[T, 1]``."""
    centred = site.bias_N is not None
    mean = like_TN.mean(1, keepdim=True) if centred else torch.zeros(())
    rstd = ((like_TN - mean).square().mean(1, keepdim=True) + site.eps).rsqrt()
    return (x_TN - mean) * rstd, rstd


def norm_gradients(site: NormSite, code: RoundTrip, how: str = "rebuilt") -> Gradients:
    """Return the gradients of a norm and of the linears behind it.

    Args:
        site: The norm.
        code: Of the saved input.
        how: ``rebuilt``, from codes of the input with exact statistics; ``recomputed``, with
            statistics of the codes; ``stored``, the linears' input has codes of its own.
    """
    kept = site.x_TN if site.bias_N is None else site.x_TN - site.x_TN.mean(1, keepdim=True)
    x = code(kept)
    x_hat, rstd = normalized(x, x if how == "recomputed" else kept, site)
    bias = 0 if site.bias_N is None else site.bias_N
    y = x_hat * site.weight_N + bias
    if how == "stored":
        y = code(normalized(site.x_TN, site.x_TN, site)[0] * site.weight_N + bias)
    dx_hat = site.dy_TN * site.weight_N
    dx = dx_hat - x_hat * (dx_hat * x_hat).mean(1, keepdim=True)
    if site.bias_N is not None:
        dx = dx - dx_hat.mean(1, keepdim=True)
    return {
        "norm dx": dx * rstd,
        "norm dweight": (site.dy_TN * x_hat).sum(0),
        "norm linears": site.dout_TM.T @ y,
    }


def mlp_gradients(site: MLPSite, code: RoundTrip, how: str = "rebuilt") -> Gradients:
    """Return the gradients of an activation function and of the linear behind it.

    Args:
        site: The activation function.
        code: Of what is saved.
        how: ``rebuilt``, all from codes of gate and up; ``stored``, the activation's output and the
            linear's input have codes of their own, as in COAT; ``gate`` or ``up``, codes of one.
    """
    gate = (exact if how == "up" else code)(site.gate_TN).detach().requires_grad_()
    act = F.gelu if site.up_TN is None else F.silu
    value = act(gate)
    kind = "gelu" if site.up_TN is None else "silu"
    if site.up_TN is None:
        product = value
        (dgate,) = torch.autograd.grad(product, gate, site.dh_TN)
        found = {"gelu dx": dgate}
        original = act(site.gate_TN)
    else:
        up = (exact if how == "gate" else code)(site.up_TN).detach().requires_grad_()
        product = value * up
        dgate, dup = torch.autograd.grad(product, (gate, up), site.dh_TN)
        if how == "stored":
            dup = site.dh_TN * code(act(site.gate_TN))
        found = {"silu dgate": dgate, "silu dup": dup}
        original = act(site.gate_TN) * site.up_TN
    read = code(original) if how == "stored" else product.detach()
    return found | {f"{kind} down": site.dout_TM.T @ read}


def attention_gradients(site: AttentionSite, code: RoundTrip, how: str = "rebuilt") -> Gradients:
    """Return the gradients of attention and of the projection behind it.

    Args:
        site: The attention.
        code: Of queries, keys and values (``rebuilt``: the softmax is computed from them anew),
            also of the output (``stored``: the softmax has its exact normalizer, as in flash
            attention), and of the projection's input.
        how: As above.
    """
    q, k, v = (code(x) for x in (site.q_BHSD, site.k_BHSD, site.v_BHSD))
    scale = q.shape[-1] ** -0.5
    mask = torch.full((q.shape[2],) * 2, -torch.inf, device=q.device).triu(1)
    scores = q @ k.mT * scale + mask
    sources = (site.q_BHSD, site.k_BHSD, site.v_BHSD)
    true_scores = sources[0] @ sources[1].mT * scale + mask
    out = true_scores.softmax(-1) @ sources[2]
    lse = true_scores if how == "stored" else scores
    p = (scores - lse.logsumexp(-1, keepdim=True)).exp()
    kept = code(out) if how == "stored" else p @ v
    dp = site.dout_BHSD @ v.mT
    ds = p * (dp - (site.dout_BHSD * kept).sum(-1, keepdim=True)) * scale
    return {
        "attention dq": ds @ k,
        "attention dk": ds.mT @ q,
        "attention dv": p.mT @ site.dout_BHSD,
        "attention o_proj": site.dproj_TM.T @ code(out).transpose(1, 2).flatten(2).flatten(0, 1),
    }


def block_gradients(layer: Layer, code: RoundTrip) -> Gradients:
    """Return the gradients of a block that runs again from its coded input."""
    x = code(layer.x_BSN).requires_grad_()
    dx, *rest = torch.autograd.grad(layer.rerun(x), [x, *layer.parameters], layer.dout_BSN)
    return {"block dx": dx, "block weights": torch.cat([g.flatten() for g in rest])}


def layer_gradients(layer: Layer, code: RoundTrip, how: str) -> Gradients:
    """Return the gradients of all sites of a layer; both norms' under one name."""
    if how in GATED:
        return mlp_gradients(layer.mlp, code, how)
    found: Gradients = {}
    for place, norm in zip(("attention", "mlp"), layer.norms, strict=True):
        of_norm = norm_gradients(norm, code, how)
        found |= {f"{name} ({place})": value for name, value in of_norm.items()}
    if how != "recomputed":
        found |= mlp_gradients(layer.mlp, code, how)
        found |= attention_gradients(layer.attention, code, how)
    if how == "rebuilt":
        found |= block_gradients(layer, code)
    return found
