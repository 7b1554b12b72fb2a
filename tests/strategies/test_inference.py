"""Evaluation before training, under the inference mode that Lightning uses with NCCL."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from lq_testing.lightning_models import Losses, TinyModule, loader, run_trainer, trainer
from torch import Tensor

from lq_lightning import QuantizedFSDPStrategy


class Evaluated(TinyModule):
    """Sharded outside of inference mode, gathered for the first time inside of it, as with NCCL."""

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        self.net(tokens)  # what Lightning logs is written outside of inference mode

    def on_validation_batch_start(self, *args: Any) -> None:
        self.inference = torch.inference_mode()
        self.inference.__enter__()

    def on_validation_batch_end(self, *args: Any) -> None:
        self.inference.__exit__(None, None, None)


def _evaluates_first(rank: int, world_size: int, root: str, accelerator: str) -> None:
    # Lightning replaces inference mode by `no_grad` with gloo, but not a mode that it finds
    inference = contextlib.nullcontext if accelerator == "gpu" else torch.inference_mode
    quantized = {"weights": "qWD", "gradients": "TLq-HS"}
    kinds: list[dict[str, Any]] = [{"weights": "none", "gradients": "none"}]
    for options in [*kinds, *({**quantized, "replica": replica} for replica in ("full", "node"))]:

        def run(options: dict[str, Any] = options, **kwargs: Any) -> Any:
            strategy = QuantizedFSDPStrategy(min_quantized_numel=64, **options)
            return trainer(strategy, root, accelerator=accelerator, **kwargs)

        trained = []
        for evaluates in (False, True):
            torch.manual_seed(0)
            losses, module = Losses(), Evaluated()
            if evaluates:
                run().validate(module, loader(4, batch_size=1), verbose=False)
                with inference():
                    run().validate(module, loader(), verbose=False)
                    run().test(module, loader(), verbose=False)
            run(callbacks=[losses], num_sanity_val_steps=2).fit(module, loader(), loader())
            trained.append(losses.values)
        assert trained[0] == trained[1]
        # a user's own mode, which holds for everything that the test makes, then a prediction
        module = TinyModule()
        with torch.inference_mode():
            run().test(module, loader(), verbose=False)
        assert len(run().predict(module, loader())) > 0


def test_evaluation_comes_before_training(tmp_path: Path) -> None:
    run_trainer(_evaluates_first, 2, str(tmp_path), "cpu")


@pytest.mark.gpu(2)
def test_evaluation_comes_before_training_on_two_gpus(tmp_path: Path) -> None:
    run_trainer(_evaluates_first, 2, str(tmp_path), "gpu")
