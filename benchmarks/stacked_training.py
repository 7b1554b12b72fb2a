"""Many short trainings in lockstep on one device, each on emulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from ablation_data import Data, inputs_and_targets, learning_rate_factor
from emulated_ranks import EmulatedRanks, Plan, Tensors, Unit
from loss_variants import Preset
from stacked_models import initial, losses, shapes, units, vocabulary
from torch import Tensor

AVERAGE_EVERY = 5  # steps between weights that are averaged
CLIP = 1.0  # largest norm of gradients
PERTURBATION = 1e-3  # relative deviation of normal noise on the weights that a start adds

Losses = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Lane:
    """One training.

    Attributes:
        seed: Of weights and of the order of the data.
        start: 0 starts from the drawn weights; any other number from weights that are 0.1% off,
            each in its own way.
    """

    seed: int
    start: int = 0


def order_of(blocks: int, preset: Preset, seed: int, world_size: int) -> Tensor:
    """Return which blocks each rank reads in each step, ``[steps, W, batch]``.

    Those that ``ablation_data.batches`` yields, on the first pass.
    """
    needed = preset.steps * world_size * preset.batch
    if needed > blocks // world_size * world_size:
        raise ValueError(
            f"{preset.steps} steps of {world_size} ranks read {needed} blocks, but there are "
            f"{blocks}: give more text or fewer steps"
        )
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed))[:needed]
    return order.view(preset.steps, preset.batch, world_size).transpose(1, 2)


@lru_cache(maxsize=2)
def start_weights(preset: Preset, vocab: int, lanes: tuple[Lane, ...]) -> Tensors:
    """Draw the fp32 weights that lanes start from, ``[S, ...]`` on the CPU; not to be written."""
    drawn = initial(preset, vocab, [lane.seed for lane in lanes])
    for row, lane in enumerate(lanes):
        if lane.start:
            generator = torch.Generator().manual_seed(1_000_003 * lane.start + lane.seed)
            for stacked in drawn.values():
                noise = torch.randn(stacked.shape[1:], generator=generator)
                stacked[row].mul_(1 + PERTURBATION * noise)
    return drawn


class StackedTraining:
    """S trainings of one architecture and one plan per step, in lockstep.

    Args:
        data: What is read, on the device.
        preset: Sizes.
        lanes: The trainings.
        nodes: Emulated nodes of each.
        node_size: Ranks of a node.
        forward: ``stacked_models.losses``, or that compiled.
        trunk: A training of the same seeds to go on from, with its weights, moments and step;
            lanes that do not start at 0 take its weights 0.1% off. Drawn weights without it.

    Attributes:
        masters: fp32 weights ``[S, ...]``, which the optimizer updates.
        ranks: What the ranks compute with.
        step: Steps taken.
        norms: Of the gradients of each step that was taken here, before clipping, ``[S]``.
        average: Mean of the main weights over the end of the run; None before it.
    """

    def __init__(
        self,
        data: Data,
        preset: Preset,
        lanes: Sequence[Lane],
        nodes: int,
        node_size: int,
        forward: Losses = losses,
        trunk: StackedTraining | None = None,
    ) -> None:
        device, world = data.train.device, nodes * node_size
        self.data, self.preset, self.lanes, self.step = data, preset, tuple(lanes), 0
        self.world_size, self._forward = world, forward
        shape_of = shapes(preset, data.vocab)
        words = vocabulary(list(shape_of))
        parts = {
            unit: Unit({name: shape_of[name] for name in names}, world, words)
            for unit, names in units(list(shape_of)).items()
        }
        self.ranks = EmulatedRanks(parts, nodes, node_size, getattr(torch, preset.dtype))
        drawn = trunk.branch(self.lanes) if trunk else start_weights(preset, data.vocab, self.lanes)
        self.masters = {n: w.to(device, copy=True).requires_grad_() for n, w in drawn.items()}
        self.norms: list[Tensor] = []
        self.average: Tensors | None = None
        self._averaged = 0
        self.optimizer = torch.optim.AdamW(
            self.masters.values(),
            lr=preset.lr,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=device.type == "cuda",
        )
        if trunk is not None:
            self.step = trunk.step
            for name, master in self.masters.items():
                moments = trunk.optimizer.state[trunk.masters[name]]
                self.optimizer.state[master] = {k: v.clone() for k, v in moments.items()}
        self._factor = learning_rate_factor(preset.steps, preset.warmup, preset.decay, preset.floor)
        self._order = self.read_order(len(data.train)).to(device)
        self.ranks.publish(self.masters, Plan())

    def branch(self, lanes: Sequence[Lane]) -> Tensors:
        """Return the weights that lanes of the same seeds go on from, ``[S, ...]``."""
        if [lane.seed for lane in lanes] != [lane.seed for lane in self.lanes]:
            raise ValueError(f"a trunk of {self.lanes} has no weights for {tuple(lanes)}")
        found = {name: master.detach().clone() for name, master in self.masters.items()}
        for row, lane in enumerate(lanes):
            if lane.start:
                generator = torch.Generator(self.data.train.device)
                generator.manual_seed(1_000_003 * lane.start + lane.seed)
                for stacked in found.values():
                    noise = torch.empty_like(stacked[row]).normal_(generator=generator)
                    stacked[row].mul_(1 + PERTURBATION * noise)
        return found

    def read_order(self, blocks: int) -> Tensor:
        """Return which of so many blocks each rank reads when, ``[steps, S, W, batch]``."""
        orders = [order_of(blocks, self.preset, x.seed, self.world_size) for x in self.lanes]
        return torch.stack(orders, dim=1)

    def backward(self) -> tuple[Tensor, Tensors]:
        """Return mean losses ``[S]`` and the gradients ``[S, W, ...]`` of the next batches."""
        lanes, world = len(self.lanes), self.world_size
        rows = self._order[self.step].flatten(0, 1)  # [S * W, batch]
        tokens, targets = inputs_and_targets(self.data.train[rows.flatten()])
        shape = (*rows.shape, -1)
        weights = {
            name: value[:, None].expand(-1, world, *value.shape[1:]).flatten(0, 1).requires_grad_()
            for name, value in self.ranks.weights().items()
        }
        found = self._forward(self.preset, weights, tokens.view(shape), targets.view(shape))
        found.sum().backward()
        grads = {name: w.grad.unflatten(0, (lanes, world)) for name, w in weights.items()}  # type: ignore[union-attr]
        return found.detach().view(lanes, world).mean(dim=1), grads

    def update(self, gradients: Tensors, plan: Plan, exact: Tensors | None = None) -> None:
        """Take a step with reduced gradients ``[S, ...]`` and bring the weights to the ranks.

        Args:
            gradients: What the optimizer gets.
            plan: Of this step.
            exact: The same without quantization, for ``plan.optimizer``.
        """
        norms = self._norms(exact if exact and plan.optimizer == "norm" else gradients)
        self.norms.append(norms)
        clip = (CLIP / (norms + 1e-6)).clamp(max=1.0)
        for name, master in self.masters.items():
            scale = clip.view(-1, *[1] * (master.dim() - 1))
            master.grad = gradients[name] * scale
            if exact and plan.optimizer in ("first", "second"):
                self._mix_moments(master, exact[name] * scale, plan.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = self.preset.lr * self._factor(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.ranks.publish(self.masters, plan)
        self.step += 1
        self._average()

    def _norms(self, gradients: Tensors) -> Tensor:
        squares = [gradients[name].flatten(1).square().sum(dim=1) for name in self.masters]
        return torch.stack(squares).sum(dim=0).sqrt()

    @torch.no_grad()
    def _mix_moments(self, master: Tensor, exact: Tensor, which: str) -> None:
        """Let AdamW's next step compute one moment from exact gradients, the other from given ones.

        The step sees the gradients of the second moment. The first, which is linear in them, is
        changed beforehand by what the step will add wrongly.
        """
        given, beta = master.grad, self.optimizer.param_groups[0]["betas"][0]
        first, second = (exact, given) if which == "first" else (given, exact)
        state = self.optimizer.state[master]
        if state:  # the first step of all has no moments
            state["exp_avg"].add_(first - second, alpha=(1 - beta) / beta)
        master.grad = second

    @torch.no_grad()
    def _average(self) -> None:
        """Add the main weights to their mean over the end of the run, at some of its steps."""
        left = self.preset.steps - self.step
        if left >= self.preset.average * self.preset.steps or left % AVERAGE_EVERY:
            return
        self._averaged += 1
        if self.average is None:
            self.average = {name: master.detach().clone() for name, master in self.masters.items()}
        else:
            means = list(self.average.values())
            torch._foreach_lerp_(means, list(self.masters.values()), 1 / self._averaged)

    def take_step(self, plan: Plan) -> Tensor:
        """Train on the next batches; return the mean loss of each training, ``[S]``."""
        found, gradients = self.backward()
        exact = self.ranks.reduce(gradients, Plan()) if plan.optimizer else None
        self.update(self.ranks.reduce(gradients, plan), plan, exact)
        return found

    @torch.no_grad()
    def validate(self, weights: Tensors | None = None) -> Tensor:
        """Mean loss of each training over the first validation blocks, ``[S]`` fp64.

        Args:
            weights: To validate, ``[S, ...]``; by default those that the ranks compute with.
        """
        size = self.preset.batch * self.world_size
        blocks = self.data.val
        count = min(self.preset.val_blocks, len(blocks)) // size * size
        if count == 0:
            raise ValueError(
                f"{len(blocks)} validation blocks do not fill a batch of {size}: give more text"
            )
        weights, lanes = self.ranks.weights() if weights is None else weights, len(self.lanes)
        weights = {name: w.to(self.ranks.dtype) for name, w in weights.items()}
        total = torch.zeros(lanes, device=blocks.device, dtype=torch.float64)
        for rows in blocks[:count].split(size):
            tokens, targets = (x.expand(lanes, -1, -1) for x in inputs_and_targets(rows))
            total += losses(self.preset, weights, tokens, targets).double() * size
        return total / count
