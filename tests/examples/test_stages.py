"""The example's models in the stages of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lq_testing.stages import check_equal
from pretraining.lightning_module import CausalLM
from pretraining.model import DecoderConfig
from torch import Tensor

from lq_lightning.pipeline.plan import plan_stages


@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_training_steps_in_parts(loss: Any) -> None:
    sizes = DecoderConfig(num_layers=4, hidden_size=16, num_heads=2, num_kv_heads=1)
    module = CausalLM(sizes, loss=loss, loss_chunk=5, vocab_size=40, compile_layers=False)
    module.configure_model()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]

    def step(module: CausalLM, block: Tensor) -> Tensor:
        return module.training_step(block, 0)

    batches = [torch.randint(40, (2, 9)) for _ in range(2)]
    check_equal(module, step, batches, 2)
    check_equal(module, step, batches, 4, 2)
    plan = plan_stages(module, 2)
    assert plan.layers == tuple(f"model.blocks.{i}" for i in range(4))
    assert (plan.before, plan.after) == (("model.embedding",), ("model.norm", "model.lm_head"))
