"""Many short trainings in lockstep on one device, each on emulated ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from corpus import Corpus
from emulated_nodes import EmulatedNodes
from emulated_ranks import EmulatedRanks, Plan, Tensors, Unit
from emulated_stages import EmulatedStages, Stages
from loss_variants import Preset
from stacked_models import initial, losses, shapes, units, vocabulary
from torch import Tensor

from lq_lightning.data_parallel import LocalSteps
from lq_lightning.optim import QuantizedMuon

CLIP = 1.0  # largest norm of gradients
PERTURBATION = 1e-3  # relative deviation of normal noise on the weights that a start adds

Losses = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Lane:
    """One training.

    Attributes:
        seed: Seed of the weights and of the order of the data.
        start: 0 starts from the drawn weights; any other number from weights that are 0.1% off,
            each in its own way.
    """

    seed: int
    start: int = 0

    def perturb(self, row: int, stacked: Tensors, device: torch.device | None = None) -> None:
        """Move the weights of this lane, a row of the stacked ones, if it does not start at 0."""
        if self.start:
            generator = torch.Generator(device or "cpu")
            generator.manual_seed(1_000_003 * self.start + self.seed)
            for weight in stacked.values():
                noise = torch.empty_like(weight[row]).normal_(generator=generator)
                weight[row].mul_(1 + PERTURBATION * noise)


def learning_rate_factor(preset: Preset, step: int) -> float:
    """Return the factor of the peak learning rate at a step."""
    rise = preset.warmup or max(1, preset.steps // 10)
    if preset.decay == "linear":
        left = min(1.0, max(0.0, (preset.steps - step) / max(1, preset.steps - rise)))
    else:
        left = 0.5 * (1 + math.cos(math.pi * min(1.0, step / preset.steps)))
    return min(1.0, (step + 1) / rise) * (preset.floor + (1 - preset.floor) * left)


def order_of(blocks: int, preset: Preset, seed: int, world_size: int) -> Tensor:
    """Return which blocks each rank reads in each step, ``[steps, W, batch]``.

    Each block once in each of the preset's passes.
    """
    needed = preset.steps * world_size * preset.batch
    if needed > blocks // world_size * world_size * preset.passes:
        raise ValueError(
            f"{preset.steps} steps of {world_size} ranks read {needed} blocks, but there are "
            f"{blocks}: give more text, fewer steps or more passes"
        )
    generator = torch.Generator().manual_seed(seed)
    passes = [torch.randperm(blocks, generator=generator) for _ in range(preset.passes)]
    order = torch.cat(passes)[:needed]
    return order.view(preset.steps, preset.batch, world_size).transpose(1, 2)


@lru_cache(maxsize=2)
def start_weights(preset: Preset, vocab: int, lanes: tuple[Lane, ...]) -> Tensors:
    """Draw the fp32 weights that lanes start from, ``[S, ...]`` on the CPU; not to be written."""
    drawn = initial(preset, vocab, [lane.seed for lane in lanes])
    for row, lane in enumerate(lanes):
        lane.perturb(row, drawn)
    return drawn


def inputs_and_targets(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens that a model reads and the ones that follow, both int64."""
    rows = rows.long()
    return rows[..., :-1].contiguous(), rows[..., 1:].contiguous()


class StackedTraining:
    """S trainings of one architecture with one plan, in lockstep.

    Args:
        corpus: Text to read.
        device: Where to train.
        preset: Sizes.
        lanes: The trainings.
        nodes: Emulated nodes of each.
        node_size: Ranks of a node.
        forward: ``stacked_models.losses``, or a compiled version.
        trunk: A training of the same seeds to continue, with its weights, moments and step; lanes
            that do not start at 0 take its weights 0.1% off. Without it weights are drawn.
        optimizer: As of ``Plan``. Muon takes over a trunk's moments of AdamW, but no momentum.
        local: Let nodes train alone: S is then the number of trainings times that of their nodes,
            except in what methods return.
        stages: Send hidden states and gradients between blocks through codecs.

    Attributes:
        masters: fp32 weights ``[S, ...]``, which the optimizer updates.
        ranks: The emulated ranks, which hold the weights of forward.
        stages: The emulated pipeline, if any.
        step: Steps taken.
        norms: Gradient norms before clipping, ``[S]`` for each step that was taken here.
    """

    def __init__(
        self,
        corpus: Corpus,
        device: torch.device,
        preset: Preset,
        lanes: Sequence[Lane],
        nodes: int,
        node_size: int,
        forward: Losses = losses,
        trunk: StackedTraining | None = None,
        optimizer: str = "adamw",
        local: LocalSteps | None = None,
        stages: Stages | None = None,
    ) -> None:
        every, alone = nodes * node_size, nodes if local is not None else 1
        world = every // alone
        self.preset, self.lanes, self.step = preset, tuple(lanes), 0
        self.world_size, self._forward, self._alone = world, forward, alone
        self.stages = EmulatedStages(stages, preset.layers) if stages else None
        self._between: dict[str, Any] = {"after": self.stages.after} if self.stages else {}
        self._rows = tuple(lane for lane in lanes for _ in range(alone))
        self.train, self.val = corpus.on(device) if trunk is None else (trunk.train, trunk.val)
        shape_of = shapes(preset, corpus.vocab)
        words = vocabulary(list(shape_of))
        parts = {
            unit: Unit({name: shape_of[name] for name in names}, world, words)
            for unit, names in units(list(shape_of)).items()
        }
        self.ranks = EmulatedRanks(parts, nodes // alone, node_size, getattr(torch, preset.dtype))
        if trunk:
            drawn = trunk.branch(self.lanes)
        else:
            drawn = start_weights(preset, corpus.vocab, self.lanes)
        drawn = {name: weight.repeat_interleave(alone, dim=0) for name, weight in drawn.items()}
        self.masters = {n: w.to(device, copy=True).requires_grad_() for n, w in drawn.items()}
        self.norms: list[Tensor] = []
        self._matrices: dict[str, list[Tensor]] = {}  # of Muon, by lane
        if optimizer != "adamw":
            self._matrices = {
                name: [matrix.detach().requires_grad_() for matrix in master]
                for name, master in self.masters.items()
                if master.dim() == 3 and name not in words
            }
        self.optimizers = self._make_optimizers(optimizer)
        if trunk is not None:
            self.step = trunk.step
            self._take_moments(trunk)
        orders = [order_of(len(self.train), preset, lane.seed, every) for lane in self.lanes]
        by_node = torch.stack(orders, dim=1).unflatten(2, (alone, world))
        self._order = by_node.flatten(1, 2).to(device)  # [steps, S, W, batch]
        self.ranks.publish(self.masters, Plan())
        self.nodes: EmulatedNodes | None = None
        if local is not None:
            self.nodes = EmulatedNodes(local, nodes, self.masters, units(list(shape_of)))

    def _take_moments(self, trunk: StackedTraining) -> None:
        """Copy the moments of the parameters that AdamW updates."""
        taken = self.optimizers[0]
        own = {id(master): trunk.masters[name] for name, master in self.masters.items()}
        params = [param for group in taken.param_groups for param in group["params"]]
        entries = {
            index: {
                key: value.repeat_interleave(self._alone, dim=0) if value.dim() else value
                for key, value in trunk.optimizers[0].state[own[id(param)]].items()
            }
            for index, param in enumerate(params)
            if id(param) in own
        }
        taken.load_state_dict({**taken.state_dict(), "state": deepcopy(entries)})

    def _make_optimizers(self, kind: str) -> list[torch.optim.Optimizer]:
        """AdamW first, also where Muon has a part of it."""
        options: dict[str, Any] = {"lr": self.preset.lr, "weight_decay": 0.1}
        rest = [master for name, master in self.masters.items() if name not in self._matrices]
        matrices = [matrix for lanes in self._matrices.values() for matrix in lanes]
        muon = {**options, "adjust_lr_fn": "match_rms_adamw"}
        if kind == "muon8":
            adam = {"params": rest, "muon": False, "betas": (0.9, 0.95)}
            kept = [self.masters[n] for n in self.masters if "tokens" in n or "positions" in n]
            return [QuantizedMuon([{"params": matrices}, adam], **muon, full_precision=kept)]
        fused = self.train.device.type == "cuda"
        adamw = torch.optim.AdamW(rest, **options, betas=(0.9, 0.95), fused=fused)
        return [adamw, torch.optim.Muon(matrices, **muon)] if matrices else [adamw]

    def branch(self, lanes: Sequence[Lane]) -> Tensors:
        """Return the weights with which lanes of the same seeds go on, ``[S, ...]``."""
        if [lane.seed for lane in lanes] != [lane.seed for lane in self.lanes]:
            raise ValueError(f"a trunk of {self.lanes} has no weights for {tuple(lanes)}")
        found = {name: master.detach().clone() for name, master in self.masters.items()}
        for row, lane in enumerate(lanes):
            lane.perturb(row, found, self.train.device)
        return found

    def backward(self) -> tuple[Tensor, Tensors]:
        """Return mean losses ``[S]`` and the gradients ``[S, W, ...]`` of the next batches."""
        lanes, world = len(self._rows), self.world_size
        rows = self._order[self.step].flatten(0, 1)  # [S * W, batch]
        tokens, targets = inputs_and_targets(self.train[rows])
        weights = {
            name: value[:, None].expand(-1, world, *value.shape[1:]).flatten(0, 1).requires_grad_()
            for name, value in self.ranks.weights().items()
        }
        found = self._forward(self.preset, weights, tokens, targets, **self._between)
        found.sum().backward()
        grads = {name: w.grad.unflatten(0, (lanes, world)) for name, w in weights.items()}  # type: ignore[union-attr]
        return found.detach().view(lanes, world).mean(dim=1), grads

    def take_step(self, plan: Plan) -> Tensor:
        """Train on the next batches; return the mean loss of each training, ``[S]``."""
        found, sent = self.backward()
        gradients = self.ranks.reduce(sent, plan)
        squares = [gradients[name].flatten(1).square().sum(dim=1) for name in self.masters]
        norms = torch.stack(squares).sum(dim=0).sqrt()
        self.norms.append(self._mean_of_nodes(norms))
        clip = (CLIP / (norms + 1e-6)).clamp(max=1.0)
        for name, master in self.masters.items():
            master.grad = gradients[name] * clip.view(-1, *[1] * (master.dim() - 1))
        for name, matrices in self._matrices.items():
            for matrix, gradient in zip(matrices, self.masters[name].grad, strict=True):  # type: ignore[arg-type]
                matrix.grad = gradient
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.preset.lr * learning_rate_factor(self.preset, self.step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for name in self._matrices:
            self.masters[name].grad = None
        if self.nodes is not None:
            self.nodes.after_step(self.masters)
        self.ranks.publish(self.masters, plan)
        self.step += 1
        return self._mean_of_nodes(found)

    def _mean_of_nodes(self, values: Tensor) -> Tensor:
        return values.view(-1, self._alone).mean(dim=1)

    def meet(self) -> None:
        """Bring nodes together that train alone."""
        if self.nodes is not None:
            self.nodes.meet(self.masters)
            self.ranks.publish(self.masters, Plan())

    @torch.no_grad()
    def validate(self, weights: Tensors | None = None, in_stages: bool = False) -> Tensor:
        """Return the mean loss of each training over the first validation blocks, ``[S]`` fp64.

        Args:
            weights: ``[S, ...]``; by default the weights that ranks compute with.
            in_stages: Send hidden states through the codecs of stages.
        """
        size = self.preset.batch * self.world_size
        count = min(self.preset.val_blocks, len(self.val)) // size * size
        if count == 0:
            raise ValueError(
                f"{len(self.val)} validation blocks do not fill a batch of {size}: give more text"
            )
        weights, lanes = self.ranks.weights() if weights is None else weights, len(self.lanes)
        weights = {name: w[:: self._alone].to(self.ranks.dtype) for name, w in weights.items()}
        total = torch.zeros(lanes, device=self.val.device, dtype=torch.float64)
        world, between = (self.world_size, self._between) if in_stages else (1, {})
        weights = {name: w.repeat_interleave(world, dim=0) for name, w in weights.items()}
        for rows in self.val[:count].split(size):
            rows = rows.view(world, size // world, -1).repeat(lanes, 1, 1)
            found = losses(self.preset, weights, *inputs_and_targets(rows), **between)
            total += found.view(lanes, world).mean(dim=1).double() * size
        return total / count
