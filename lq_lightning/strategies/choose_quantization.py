"""What to quantize where the user leaves it to the machine: ``"auto"``."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lq_lightning._compat.torch import all_linked_by_nvlink
from lq_lightning.data_parallel import GradientQuantization, Topology, WeightQuantization

__all__ = ["Choice", "WeightOption", "choose_quantization", "nvlink_inside_nodes"]

Auto = Literal["auto"]


class WeightOption(NamedTuple):
    """A weight method by name, whose replica mode may still be open."""

    method: Literal["auto", "qWD", "qW"]
    replica: Literal["auto", "full", "node"]


class Choice(NamedTuple):
    """What a run quantizes.

    Attributes:
        weights: Codec of the weights; None for FSDP2's own gather.
        gradients: Codec of the gradients; None for FSDP2's own reduction.
        reason: What was chosen and why; empty if nothing was left open.
    """

    weights: WeightQuantization | None
    gradients: GradientQuantization | None
    reason: str


def nvlink_inside_nodes(device: torch.device, node_size: int) -> bool:
    """Whether every rank sees that NVLink connects all GPUs of its node. All ranks must call it."""
    linked = False
    if device.type == "cuda":
        try:
            linked = all_linked_by_nvlink(node_size)
        except RuntimeError as error:  # the other ranks wait for this one's answer
            rank_zero_warn(
                f"cannot tell whether NVLink connects the GPUs, so assuming not: {error}"
            )
    flag = torch.tensor(int(linked), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def choose_quantization(
    weights: WeightOption | WeightQuantization | None,
    gradients: Auto | GradientQuantization | None,
    topology: Topology,
    nvlink: bool,
) -> Choice:
    """Fill in what the user left open.

    On one node of GPUs linked by NVLink nothing is quantized: FSDP2's collectives hide behind the
    computation there, and quantized ones can at best be as fast. Anywhere else weights travel as
    ``"qWD"`` and gradients as ``"TLq-HS"``. The replica is shared by a node if NVLink makes reading
    it cheap, since that takes less memory, and full on every rank otherwise.

    Args:
        weights: Given by the user.
        gradients: Given by the user.
        topology: Ranks and nodes.
        nvlink: Whether NVLink connects all GPUs of every node.
    """
    fast = topology.num_nodes == 1 and nvlink
    notes = []
    if gradients == "auto":
        gradients = None if fast else GradientQuantization()
        notes.append(f"gradients={'none' if fast else GradientQuantization().method!r}")
    if isinstance(weights, WeightOption):
        method, replica = weights
        if method == "auto":
            method = "qWD"
            notes.append(f"weights={'none' if fast else method!r}")
            if fast:
                return Choice(None, gradients, _reason(notes, topology, nvlink))
        if replica == "auto":
            shared = nvlink and topology.num_nodes > 1 and topology.node_size > 1
            replica = "node" if shared else "full"
            if method == "qWD":
                notes.append(f"replica={replica!r}")
        weights = WeightQuantization(method=method, replica=replica)
    return Choice(weights, gradients, _reason(notes, topology, nvlink))


def _reason(notes: list[str], topology: Topology, nvlink: bool) -> str:
    if not notes:
        return ""
    link = "with NVLink inside" if nvlink else "where no NVLink between all of them was found"
    nodes = "1 node" if topology.num_nodes == 1 else f"{topology.num_nodes} nodes"
    ranks = "1 rank" if topology.node_size == 1 else f"{topology.node_size} ranks"
    return f"chose {', '.join(notes)} for {nodes} of {ranks} {link}"
