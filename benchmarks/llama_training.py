"""Training a Llama from scratch, from where another run was saved, or from its weights alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from ablation_data import Data, batches, inputs_and_targets, learning_rate_factor
from llama import LanguageModel, MasterWeights, Preset
from torch import Tensor, nn

CURVE_STEPS = 50  # losses and gradient norms are kept as means over this many steps


def micro_batches(inputs: Tensor, targets: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut a batch into equal parts."""
    return zip(inputs.split(size), targets.split(size), strict=True)


class Training:
    """A run in progress.

    Args:
        data: What is read.
        preset: Sizes.
        seed: Of weights and of the order of the data.
    """

    def __init__(self, data: Data, preset: Preset, seed: int) -> None:
        torch.manual_seed(seed)
        with data.train.device:
            self.model = LanguageModel(preset, data.vocab)
        self.preset, self.seed, self.step, self.val = preset, seed, 0, data.val
        self._start_optimizer(list(self.model.parameters()))
        self.rows = batches(data.train, preset.batch, seed)

    def train_only(self, weights: Sequence[nn.Parameter]) -> None:
        """Freeze the model but for some of its weights, in fp32; before the first step."""
        for weight in self.model.parameters():
            weight.requires_grad_(False)
        for weight in weights:
            weight.requires_grad_(True)
        self._start_optimizer(weights)

    def validate(self) -> float:
        """Return the mean loss over the validation blocks of the preset."""
        return validate(self.model, self.val, self.preset)

    def _start_optimizer(self, weights: Sequence[nn.Parameter]) -> None:
        self.weights = MasterWeights(weights, getattr(torch, self.preset.dtype))
        self.optimizer = torch.optim.AdamW(
            self.weights.masters, lr=self.preset.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        factor = learning_rate_factor(self.preset.steps)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    def run(self, steps: int) -> tuple[list[Tensor], list[Tensor]]:
        """Take steps; return means of loss and gradient norm over every ``CURVE_STEPS`` of them."""
        sums = torch.zeros(2, device=self.weights.masters[0].device)
        means: list[Tensor] = []
        share = self.preset.micro_batch / self.preset.batch
        for _ in range(steps):
            for part in micro_batches(*next(self.rows), self.preset.micro_batch):
                loss = self.model(*part)
                loss.backward()
                self.weights.collect(share)
                sums[0] += loss.detach() * share
            sums[1] += nn.utils.clip_grad_norm_(self.weights.masters, 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.weights.publish()
            self.step += 1
            if self.step % CURVE_STEPS == 0:
                means.append(sums / CURVE_STEPS)
                sums = torch.zeros_like(sums)
        return [mean[0] for mean in means], [mean[1] for mean in means]

    def save(self, path: Path) -> None:
        """Write what ``resume`` reads."""
        state = {
            "step": self.step,
            "masters": [master.detach() for master in self.weights.masters],
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }
        torch.save(state, path)

    def resume(self, path: Path) -> None:
        """Continue where a run with the same data and seed was saved."""
        device = self.weights.masters[0].device
        state = torch.load(path, map_location=device, weights_only=True)
        self._load_weights(state)
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        for _ in range(state["step"]):
            next(self.rows)
        self.step = state["step"]

    def begin_from(self, path: Path) -> None:
        """Take the weights that were saved, and nothing else."""
        device = self.weights.masters[0].device
        self._load_weights(torch.load(path, map_location=device, weights_only=True))

    def perturb(self, deviation: float) -> None:
        """Scale every weight by ``1 + deviation * normal``."""
        with torch.no_grad():
            for master in self.weights.masters:
                master.mul_(1 + deviation * torch.randn_like(master))

    @torch.no_grad()
    def _load_weights(self, state: dict[str, Any]) -> None:
        for master, saved in zip(self.weights.masters, state["masters"], strict=True):
            master.copy_(saved)


@torch.no_grad()
def validate(model: nn.Module, blocks: Tensor, preset: Preset) -> float:
    """Return the mean loss over the first validation blocks."""
    count = min(preset.val_blocks, len(blocks)) // preset.micro_batch * preset.micro_batch
    if count == 0:
        raise ValueError(
            f"{len(blocks)} validation blocks do not fill one micro-batch of "
            f"{preset.micro_batch}: give more text or lower the preset's micro_batch"
        )
    total = torch.zeros((), device=blocks.device, dtype=torch.float64)
    for rows in blocks[:count].split(preset.micro_batch):
        total += model(*inputs_and_targets(rows)).double() * len(rows)
    return float(total) / count
