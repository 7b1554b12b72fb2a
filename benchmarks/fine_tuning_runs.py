"""The rows of ``fine_tuning.py`` by name, and one run of a row."""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from coded_boundaries import Codec, CodedBoundaries, layers_before_boundaries
from emulated_ranks import EmulatedRanks, Plan, Unit
from fine_tuning_data import Data, evaluate, losses
from loss_variants import BOTH, with_vocabulary
from table import BF16, LORA
from torch import Tensor, nn
from torch.nn import functional as F

from lq_lightning import ActivationPolicy, quantize_activations
from lq_lightning.activations.policy import RECIPES
from lq_lightning.adaptive import (
    AdaptiveBitsConfig,
    BitGate,
    GateOptimizer,
    adaptive_quantize,
    attach_quantizers,
    find_sites,
)
from lq_lightning.optim import quantize_optimizer
from lq_lightning.pipeline.boundary import AQSGDQuantization

NODES = 2  # emulated, of one rank each, that share every batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """How to fine-tune; by default in bf16-mixed without quantization.

    Attributes:
        lora: Whether to train low-rank sums beside frozen weights.
        perturbation: Relative deviation of normal noise on the first weights.
        plan: Codes between emulated ranks; None trains on one rank.
        recipe: Recipe of saved activations.
        states: Whether optimizer states are coded, in ``expanded_fp8``.
        codecs: Codecs of hidden states at stage boundaries, and of their gradients.
        stages: Number of stages of equal size.
        bits: Target of AdaptiveBits.
        sites: Sites of AdaptiveBits; ``"stages"`` for the stage boundaries.
    """

    lora: bool = False
    perturbation: float = 0.0
    plan: Plan | None = None
    recipe: str | ActivationPolicy | None = None
    states: bool = False
    codecs: tuple[Codec, Codec] | None = None
    stages: int = 1
    bits: float | None = None
    sites: str = "boundaries"


_TAH5 = ("tah5", "tah5")
_CUT = "model.layers.1:output"  # a client with two blocks


def _pipelines() -> dict[str, Row]:
    codecs: dict[str, tuple[Codec, Codec]] = {
        "tah5": _TAH5,
        "tah": ("tah", "int6"),
        "int4": ("int4", "int6"),
        "aq_sgd": (AQSGDQuantization(), "int6"),
    }
    return {
        f"{name}, {stages} stages": Row(codecs=codec, stages=stages)
        for stages in (8, 2, 4)
        for name, codec in codecs.items()
    }


# The most important first: a run that ends early leaves out the last.
ROWS: dict[str, Row] = {
    BF16: Row(),
    "bf16, other start": Row(perturbation=1e-3),
    "FSDP2": Row(plan=Plan()),
    "quantized_fsdp": Row(plan=BOTH),
    "agoq": Row(recipe="agoq"),
    "4-bit codes": Row(recipe=RECIPES["auto"]),  # not adapted
    "coat": Row(recipe="coat"),
    "coat, INT8 forward": Row(recipe=replace(RECIPES["coat"], matmul="int8_forward")),
    "fp8-4bit": Row(recipe="fp8-4bit"),
    "all together": Row(plan=BOTH, recipe="agoq", states=True, codecs=_TAH5, stages=4),
    "tah5, 8 stages": Row(codecs=_TAH5, stages=8),
    "expanded_fp8": Row(states=True),
    "quantized_fsdp, 4 bits": Row(plan=with_vocabulary(4)),
    "AdaptiveBits 4": Row(bits=4),
    "AdaptiveBits 3": Row(bits=3),
    LORA + BF16: Row(lora=True),
    LORA + "agoq": Row(lora=True, recipe="agoq"),
    LORA + "tah5, 2 stages": Row(lora=True, codecs=_TAH5, stages=2),
    LORA + "AdaptiveBits 4": Row(lora=True, bits=4),
    LORA + "AdaptiveBits 3": Row(lora=True, bits=3),
    "split learning, 4 bits": Row(bits=4, sites=_CUT),
    "split learning, 3 bits": Row(bits=3, sites=_CUT),
    **_pipelines(),
    **{f"AdaptiveBits {n}, 8 stages": Row(bits=n, sites="stages", stages=8) for n in (4, 3)},
    LORA + "bf16, other start": Row(lora=True, perturbation=1e-3),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of all runs.

    Attributes:
        steps: Optimizer steps.
        batch: Sequences of a step, half of them text.
        lr: Peak rate of full fine-tuning, after a tenth of the steps; a cosine ends at zero.
        lora_lr: Peak rate with LoRA.
        rank: Rank of LoRA, whose sums are multiplied by 2.
    """

    steps: int = 150
    batch: int = 8
    lr: float = 1e-4
    lora_lr: float = 1e-3
    rank: int = 16


# --- parts of a run -------------------------------------------------------------------------------


class LowRank(nn.Module):
    """A frozen linear layer plus twice the product of two matrices, the second 0 (Hu et al., 2021).

    Args:
        linear: Layer without bias.
        rank: Rank of the product.
    """

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear, device = linear, linear.weight.device
        self.down = nn.Parameter(torch.empty(rank, linear.in_features, device=device))
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank, device=device))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both."""
        return self.linear(x).add(F.linear(F.linear(x, self.down), self.up), alpha=2.0)  # type: ignore[no-any-return]


def add_low_rank(layers: nn.Module, rank: int) -> None:
    """Put a low-rank sum beside every linear layer below a frozen module."""
    for module in list(layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(module, LowRank):
                setattr(module, name, LowRank(child, rank))


class Nodes:
    """Emulated nodes that train one model, whose parameters become the weights of forward.

    These are bf16, as FSDP2's in ``bf16-mixed``; so hidden states are, too, which are fp32 without
    nodes.

    Args:
        model: Its parameters are overwritten.
        plan: Codes of the messages.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._parameters, self._plan = dict(model.named_parameters()), plan
        self.masters = {name: p.detach().clone() for name, p in self._parameters.items()}
        for p in self._parameters.values():
            p.data = p.data.bfloat16()
        embedding = model.get_input_embeddings().weight  # type: ignore[operator, union-attr]
        self.words = [name for name, p in self._parameters.items() if p is embedding]
        parts: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, p in self._parameters.items():
            block = re.match(r".*\.layers\.\d+\.", name)
            parts.setdefault(block[0] if block else "root", {})[name] = tuple(p.shape)
        units = {unit: Unit(shapes, NODES, self.words) for unit, shapes in parts.items()}
        self._ranks = EmulatedRanks(units, NODES, 1, torch.bfloat16)
        self._gradients: list[dict[str, Tensor]] = []
        self._publish(Plan())  # the first weights travel in full precision

    def collect(self) -> None:
        """Take the gradients of one node's share of the batch."""
        self._gradients.append({n: p.grad for n, p in self._parameters.items()})  # type: ignore[misc]
        for p in self._parameters.values():
            p.grad = None

    def reduce(self) -> None:
        """Give the mean of the gradients to the master weights."""
        stacked = {n: torch.stack([g[n] for g in self._gradients])[None] for n in self.masters}
        self._gradients.clear()
        for name, mean in self._ranks.reduce(stacked, self._plan).items():
            self.masters[name].grad = mean[0]

    def exchange(self) -> None:
        """Send the differences between the master weights and the replica."""
        self._publish(self._plan)

    def load_masters(self) -> None:
        """Put the master weights into the model, as in a checkpoint."""
        for name, p in self._parameters.items():
            p.data = self.masters[name].detach()

    @torch.no_grad()
    def _publish(self, plan: Plan) -> None:
        self._ranks.publish({n: master[None] for n, master in self.masters.items()}, plan)
        for name, weight in self._ranks.weights().items():
            self._parameters[name].copy_(weight[0])


@dataclass(kw_only=True)
class Sites:
    """Quantizers between layers.

    Attributes:
        before_forward: Called with the micro-batch's number and the identities of its sequences.
        after_step: Called after every optimizer step.
        bits: Returns bits per value, sent so far or learned.
        quantizers: By site; without any nothing is quantized.
    """

    before_forward: Callable[[int, Tensor], None] = lambda number, samples: None
    after_step: Callable[[], None] = lambda: None
    bits: Callable[[], float | None] = lambda: None
    quantizers: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)


def sites_of(row: Row, model: nn.Module, steps: int) -> Sites:
    """Return the quantizers of a row."""
    blocks = len(model.model.layers)  # type: ignore[arg-type, union-attr]
    after = [f"model.layers.{i}:output" for i in layers_before_boundaries(blocks, row.stages)]
    if row.codecs:
        boundaries = CodedBoundaries(*row.codecs)
        return Sites(
            before_forward=boundaries.begin,
            bits=lambda: boundaries.bits_per_value()[0],
            quantizers={
                site: partial(boundaries.cross, boundary=index) for index, site in enumerate(after)
            },
        )
    if row.bits is None:
        return Sites()
    # As fast as a run of this length needs; the paper's runs have thousands of steps.
    config = AdaptiveBitsConfig.preset(
        row.bits, beta=1.0, learning_rate=0.05, reach_in_steps=max(1, steps // 3)
    )
    names = after if row.sites == "stages" else find_sites(model, row.sites)
    gates = {name: BitGate(config, name=name) for name in names}
    optimizer = GateOptimizer(gates, config)
    return Sites(
        after_step=optimizer.step,
        bits=lambda: optimizer.mean,
        quantizers={site: partial(adaptive_quantize, gate=gate) for site, gate in gates.items()},
    )


@contextmanager
def quantized(model: nn.Module, row: Row, sites: Sites) -> Iterator[None]:
    """Quantize a row's saved activations and boundaries inside."""
    with ExitStack() as stack:
        if row.recipe:
            stack.callback(quantize_activations(model, row.recipe).remove)
        if sites.quantizers:
            stack.callback(attach_quantizers(model, sites.quantizers).remove)
        yield


def order_of(data: Data, settings: Settings, seed: int) -> Tensor:
    """Return which sequences of text, and of tasks, each step reads, ``[steps, batch / 2]``."""
    half, count = settings.batch // 2, len(data.text.tokens)
    generator = torch.Generator().manual_seed(seed)
    epochs = math.ceil(settings.steps * half / count)
    drawn = torch.cat([torch.randperm(count, generator=generator) for _ in range(epochs)])
    return drawn[: settings.steps * half].view(settings.steps, half)


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the share of the peak: linear over a tenth of the steps, then a cosine to zero."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / (warm + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


# --- a run ----------------------------------------------------------------------------------------


def train(base: nn.Module, data: Data, row: Row, seed: int, settings: Settings) -> dict[str, Any]:
    """Fine-tune a copy of a model; return the measurements.

    The loss of a step is the mean over its sequences of the mean over their tokens.
    """
    torch.manual_seed(seed)
    model = copy.deepcopy(base)
    device = data.text.tokens.device
    if row.lora:
        model.requires_grad_(False)
        add_low_rank(model.model.layers, settings.rank)  # type: ignore[arg-type, union-attr]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for p in trained.values() if row.perturbation else ():
            p.mul_(1 + row.perturbation * torch.randn_like(p))
    nodes = Nodes(model, row.plan) if row.plan else None
    masters = nodes.masters if nodes else trained
    lr = settings.lora_lr if row.lora else settings.lr
    optimizer = torch.optim.AdamW(
        masters.values(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"
    )
    if row.states:
        words = [masters[name] for name in nodes.words] if nodes else []
        quantize_optimizer(optimizer, module=model, full_precision=words)
    sites = sites_of(row, model, settings.steps)
    order = order_of(data, settings, seed)
    began = time.perf_counter()
    curve = []
    with quantized(model, row, sites):
        for step, rows in enumerate(order):
            for group in optimizer.param_groups:
                group["lr"] = lr * learning_rate_factor(step, settings.steps)
            curve.append(_step(model, data, rows, nodes, sites))
            nn.utils.clip_grad_norm_(masters.values(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            sites.after_step()
            if nodes:
                nodes.exchange()
        found = {"train_loss": torch.stack(curve)[-10:].mean().item()}
        found |= {"seconds": time.perf_counter() - began}
        if sites.quantizers:  # as the pipeline measures it, and as a client and a server would run
            found["with_codes"] = validate(model, data, settings)
            found["bits"] = sites.bits()
    if nodes:
        nodes.load_masters()
    return found | {"alone": validate(model, data, settings)}


def _step(model: nn.Module, data: Data, rows: Tensor, nodes: Nodes | None, sites: Sites) -> Tensor:
    """Compute the gradients of one batch, of which each node has its share; return the loss."""
    total = torch.zeros((), device=data.text.tokens.device)
    parts = rows.chunk(NODES if nodes else 1)
    for number, part in enumerate(parts):
        both = [part, part + len(data.text.tokens)]
        sites.before_forward(number, torch.cat(both))
        tokens = torch.cat([data.text.tokens[part], data.task.tokens[part]])
        targets = torch.cat([data.text.targets[part], data.task.targets[part]])
        with torch.autocast(tokens.device.type, torch.bfloat16):
            logits = model(input_ids=tokens, use_cache=False).logits
        loss = losses(logits, targets).mean()
        loss.backward()
        if nodes:
            nodes.collect()
        total += loss.detach() / len(parts)
    if nodes:
        nodes.reduce()
    return total


def validate(model: nn.Module, data: Data, settings: Settings) -> dict[str, Any]:
    """Return the loss of text, and the loss and percent of right answers of tasks."""
    text = evaluate(model, data.val_text, settings.batch)
    return {"text_loss": text["loss"], "task": evaluate(model, data.val_task, settings.batch)}
