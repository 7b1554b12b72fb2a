"""The loss of long sequences, without the logits of all tokens in memory at once.

Logits of 32,768 tokens over Llama 3's vocabulary take 8.4 GB in bf16, and the loss makes fp32
copies of them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LossName = Literal["full", "chunked", "liger"]

# Settings by which some families change the logits after the head.
_AFTER_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def check_loss(name: str, chunk: int) -> None:
    """Check the options of the loss.

    Raises:
        ValueError: The loss is unknown, or its chunks are empty.
        ModuleNotFoundError: Liger is asked for and not installed.
    """
    if name not in ("full", "chunked", "liger"):
        raise ValueError(f"`--model.loss={name}`: choose `full`, `chunked` or `liger`.")
    if chunk < 1:
        raise ValueError(f"`--model.loss_chunk={chunk}` must be at least 1 token; 2048 is usual.")
    if name == "liger" and importlib.util.find_spec("liger_kernel") is None:
        raise ModuleNotFoundError(
            "`--model.loss=liger` needs Liger's kernels: `pip install liger-kernel`, or use "
            "`--model.loss=chunked`."
        )


def backbone_and_head(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], nn.Module]:
    """Split a language model, adapted or not, into backbone and head.

    Returns:
        A function from ``[B, T]`` tokens to the ``[B, T, D]`` last hidden states, and the module
        that makes logits of them.

    Raises:
        ValueError: The model changes its logits after the head.
    """
    if hasattr(model, "hidden_states"):
        return model.hidden_states, model.lm_head
    whole: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    for name in _AFTER_THE_HEAD:
        if getattr(whole.config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"`{type(whole).__name__}` changes its logits (`{name}`) behind the head, which "
                "the loss in chunks leaves out: use `--model.loss=full`."
            )
    backbone = whole.base_model
    return (lambda tokens: backbone(tokens).last_hidden_state), whole.get_output_embeddings()


def _sum_of_losses(head: nn.Module, x_ND: Tensor, targets_N: Tensor) -> Tensor:
    return F.cross_entropy(head(x_ND).float(), targets_N, reduction="sum")


def chunked_cross_entropy(head: nn.Module, x_BTD: Tensor, targets_BT: Tensor, chunk: int) -> Tensor:
    """Return the mean loss of last hidden states, with the logits of ``chunk`` tokens at a time.

    Backward computes them again, which costs a third more of the head's time.
    """
    parts = zip(x_BTD.flatten(0, 1).split(chunk), targets_BT.flatten().split(chunk), strict=True)
    losses = [checkpoint(_sum_of_losses, head, x, y, use_reentrant=False) for x, y in parts]
    return torch.stack(losses).sum() / targets_BT.numel()


def liger_cross_entropy(head: nn.Module, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean loss by Liger's GPU kernel, which computes gradients in forward."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)
    return loss(head.weight, x_BTD.flatten(0, 1), targets_BT.flatten(), head.bias)


def compile_layers(model: nn.Module) -> int:
    """Compile each repeated layer in place, all with one graph; return how many there are.

    Their names, and those in checkpoints, stay.
    """
    names = getattr(model, "_no_split_modules", None) or ["Block"]
    layers = [module for module in model.modules() if type(module).__name__ in names]
    for layer in layers:
        layer.compile()
    return len(layers)
