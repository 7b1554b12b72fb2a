"""An ordinary LightningModule: nothing in it knows that its model is split."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn


class FineTuning(pl.LightningModule):
    """A causal language model, trained on blocks of tokens.

    Args:
        model: called as one of transformers.
        learning_rate: of AdamW.
        weight_decay: of AdamW.
    """

    def __init__(
        self, model: nn.Module, learning_rate: float = 1e-3, weight_decay: float = 0.0
    ) -> None:
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of ``[B, T]`` tokens."""
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        """Log the loss of ``[B, T]`` tokens."""
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.log("val_loss", loss, prog_bar=True, batch_size=len(tokens))

    def configure_optimizers(self) -> Any:
        """Return AdamW over all trained parameters."""
        trained = [value for value in self.parameters() if value.requires_grad]
        return torch.optim.AdamW(trained, self.learning_rate, weight_decay=self.weight_decay)
