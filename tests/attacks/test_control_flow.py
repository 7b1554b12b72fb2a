"""Values of earlier stages that a step hides from NaN are refused by name, others computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lq_testing.lightning_models import EXACT, TinyModule, loader, run_trainer, trainer
from lq_testing.models import batch
from lq_testing.stages import check_equal, cut
from lq_testing.step_programs import (
    ALLOWED,
    READS,
    SURVIVES,
    WEIGHTS,
    Program,
    SideModel,
    _weighted,
    compiled_weight,
)
from torch import Tensor

from lq_lightning import QuantizedPipelineStrategy

BATCHES = [batch(step, 0, size=2) for step in range(2)]


def _model() -> SideModel:
    torch.manual_seed(1)
    model = SideModel()
    model.drop.p = 0.0
    return model


def _refused(step: Program) -> str:
    """The message, of both ways of cutting the model: one layer or two behind the boundary."""
    messages = set()
    for split in ([1, 2], [2, 1]):
        with pytest.raises(NotImplementedError) as caught:
            cut(_model(), step, BATCHES, 2, split=split).forward()
        messages.add(str(caught.value))
    (message,) = messages
    assert "or use `quantized_fsdp`" in message
    return message


@pytest.mark.parametrize("name", WEIGHTS)
def test_losses_that_depend_on_an_earlier_stage(name: str) -> None:
    message = _refused(_weighted(WEIGHTS[name]))
    assert message.startswith("what the step returns depends on `embed_norm` (by ")
    assert "step_programs.py:" in message


@pytest.mark.parametrize("name", READS)
def test_python_values_and_shapes_made_of_an_earlier_stage(name: str) -> None:
    message = _refused(READS[name])
    assert message.startswith("a Python value or shape that the step takes by `")
    assert "in step_programs.py:" in message
    assert "depends on `embed_norm`" in message


@pytest.mark.parametrize("name", SURVIVES)
def test_what_survives_a_part(name: str) -> None:
    step, words = SURVIVES[name]
    # What the layer in front of the stage gives is the hidden state that is received.
    split = [2, 1] if name == "layer without embeddings" else [1, 2]
    with pytest.raises(NotImplementedError) as caught:
        cut(_model(), step, BATCHES, 2, split=split).forward()
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed(name: str) -> None:
    for split in ([1, 2], [2, 1]):
        check_equal(_model(), ALLOWED[name], BATCHES, 2, split=split)


def test_compiled_code_stays_compiled_behind_the_first_batch() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    weight = torch.compile(compiled_weight, backend=backend)

    def step(model: SideModel, tokens: Tensor) -> Tensor:
        x = model.layers(model.front(tokens))
        return model.loss(x, tokens, weight(x.detach()).mean(-1))

    def compile_last(module: SideModel) -> None:
        module.blocks[2].compile(backend=backend)

    ranks = cut(_model(), step, BATCHES, 2, split=[2, 1], prepare=compile_last)
    graphs.clear()
    ranks.forward()
    assert len(graphs) == 1  # the layer; the step's own code is watched
    ranks.forward()
    assert len(graphs) == 2


# --- several ranks ----------------------------------------------------------------------------


class _Steps(TinyModule):
    """Runs the step that `program` says."""

    program = ""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Any:
        x = embedded = self.net.embed(tokens)
        for block in self.net.blocks:
            x = block(x)
        loss = self.net.head(x * self.net.tiny).logsumexp(-1).mean()
        if self.program == "logged":
            self.log("norm", embedded.detach().norm().nan_to_num())
        if self.program == "second shape" and len(tokens) == 1:
            loss = loss * embedded.isnan().float().mean()
        return loss

    def validation_step(self, tokens: Tensor, batch_idx: int) -> Any:
        x = self.net.embed(tokens)
        return self.training_step(tokens, batch_idx) * (x == x).all()


def _all_ranks_hear_of_it(rank: int, world_size: int, root: str) -> None:
    expected = {
        "logged": "`_Steps.training_step`: what the step logs as 'norm' depends on `net.embed`",
        "second shape": "`_Steps.training_step`: what the step returns depends on `net.embed`",
        "validation": "`_Steps.validation_step`: what the step returns depends on `net.embed`",
    }
    for program, words in expected.items():
        torch.manual_seed(0)
        module = _Steps()
        module.program = program
        run = trainer(
            QuantizedPipelineStrategy(num_microbatches=2, **EXACT),
            root,
            num_sanity_val_steps=int(program == "validation"),
            use_distributed_sampler=False,
        )
        data = loader(10, batch_size=8) if program == "second shape" else loader(8, batch_size=8)
        with pytest.raises(NotImplementedError) as caught:
            run.fit(module, data, data if program == "validation" else None)
        assert words in str(caught.value), str(caught.value)
        assert run.global_step == (program == "second shape")


def test_all_ranks_refuse_before_the_step_is_taken(tmp_path: Any) -> None:
    run_trainer(_all_ranks_hear_of_it, 2, str(tmp_path))
