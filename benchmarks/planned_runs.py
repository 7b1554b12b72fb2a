"""Runs that are planned and measured: models, options, and the arguments of their Trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from gpt import GPT, GPTConfig
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lq_lightning.callbacks import ActivationQuantization
from lq_lightning.plugins import QuantizedPrecision
from lq_lightning.strategies import QuantizedFSDPStrategy, QuantizedPipelineStrategy

Family = Literal["gpt", "llama"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of the GPT of ``gpt.py``, or of a Llama of transformers.

    A Llama has ``wide`` channels within its MLPs and ``groups`` heads of keys and values; with
    ``tied`` its head has the weights of the embedding.
    """

    family: Family = "llama"
    layers: int
    hidden: int
    heads: int
    vocab: int
    wide: int = 0
    groups: int = 0
    tied: bool = False


SHAPES = {
    "GPT-125M": Shape(family="gpt", layers=12, hidden=768, heads=12, vocab=50304),
    "GPT-1.3B": Shape(family="gpt", layers=24, hidden=2048, heads=16, vocab=50304),
    "GPT-2.7B": Shape(family="gpt", layers=32, hidden=2560, heads=32, vocab=50304),
    "Llama-1B": Shape(
        layers=16, hidden=2048, heads=32, wide=8192, groups=8, vocab=128256, tied=True
    ),
    "Llama-3-8B": Shape(layers=32, hidden=4096, heads=32, wide=14336, groups=8, vocab=128256),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One configuration.

    Attributes:
        model: Key of :data:`SHAPES`.
        layers: Its layers; 0 for all.
        seq: Tokens of a sequence.
        batch: Sequences of a micro-batch.
        gpus: GPUs.
        nodes: Nodes that share them evenly.
        rate: What each node sends at most, in units of `tc`; ``"none"`` for no limit.
        microbatches: Micro-batches of a step.
        stages: Stages of a pipeline; 1 for none.
        tensor_parallel: Ranks that share each layer.
        options: Further options of the strategy.
        precision: As the Trainer takes it.
        states: Format of optimizer states.
        sums: Code of gradient sums.
        recipe: Recipe of saved activations; None keeps them.
        compile: Whether units are compiled.
    """

    model: str
    layers: int = 0
    seq: int = 2048
    batch: int = 1
    gpus: int = 1
    nodes: int = 1
    rate: str = "none"
    microbatches: int = 1
    stages: int = 1
    tensor_parallel: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    precision: str = "bf16-mixed"
    states: str = "none"
    sums: str = "none"
    recipe: str | None = None
    compile: bool = False

    @property
    def shape(self) -> Shape:
        """Sizes of the model."""
        shape = SHAPES[self.model]
        return replace(shape, layers=self.layers or shape.layers)

    def module(self) -> LightningModule:
        """Return the module, whose model comes with `configure_model`."""
        return Module(self)

    def data(self, steps: int) -> Any:
        """Return random tokens: the batches of so many steps."""
        pipeline = self.stages > 1
        size = self.batch * (self.microbatches if pipeline else 1)
        count = steps * (1 if pipeline else self.microbatches)
        generator = torch.Generator().manual_seed(0)
        shape = size, self.seq
        batches = [torch.randint(self.shape.vocab, shape, generator=generator) for _ in range(2)]
        return DataLoader([batches[i % 2] for i in range(count)], batch_size=None)  # type: ignore

    def trainer(self, nodes: int | None = None, steps: int = 3) -> dict[str, Any]:
        """Return the arguments of the Trainer.

        Args:
            nodes: Launches that the ranks come from, if that is not one for each node.
            steps: Optimizer steps.
        """
        nodes = nodes or self.nodes
        options = dict(self.options)
        options |= {"node_size": self.gpus // self.nodes, "compile_units": self.compile}
        options |= {"tensor_parallel_size": self.tensor_parallel, "check_replicas_every_n_steps": 0}
        if self.tensor_parallel > 1:
            options["tensor_parallel"] = "auto"
        kind: Callable[..., Any] = QuantizedFSDPStrategy
        if self.stages > 1:
            kind = QuantizedPipelineStrategy
            options |= {"pipeline_size": self.stages, "num_microbatches": self.microbatches}
        elif self.gpus > 1:
            options["units"] = (
                ["LlamaDecoderLayer"] if self.shape.family == "llama" else ["Block", "model.head"]
            )
        callbacks = [] if self.recipe is None else [ActivationQuantization(self.recipe)]  # type: ignore
        return {
            "devices": self.gpus // nodes,
            "num_nodes": nodes,
            "strategy": kind(**options),
            "plugins": QuantizedPrecision(self.precision, self.states, self.sums),  # type: ignore
            "accumulate_grad_batches": 1 if self.stages > 1 else self.microbatches,
            "callbacks": callbacks,
            "max_steps": steps,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
        }

    def plan(self, **machine: Any) -> Any:
        """Plan the run on a machine."""
        from lq_lightning.planning.plan import plan

        return plan(
            self.module,
            trainer=self.trainer(),
            data=self.data(1),
            nodes=self.nodes,
            alternatives=False,
            **machine,
        )


class Module(LightningModule):
    """A language model of a run, trained on tokens.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.model: Any = None

    def configure_model(self) -> None:
        """Build the model on the device."""
        if self.model is None:
            with torch.device(self.trainer.strategy.root_device):
                self.model = make_model(self.run)

    def training_step(self, tokens_BT: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of ``[B, T]`` int64 tokens."""
        if self.run.shape.family == "gpt":
            loss: Tensor = self.model(tokens_BT)
        else:
            loss = self.model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def make_model(run: Run) -> Any:
    """Return a model with random weights."""
    shape = run.shape
    if shape.family == "gpt":
        sizes = {"layers": shape.layers, "hidden": shape.hidden, "heads": shape.heads}
        return GPT(GPTConfig(**sizes, seq=run.seq, vocab=shape.vocab))
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.wide,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        max_position_embeddings=run.seq,
        tie_word_embeddings=shape.tied,
    )
    return LlamaForCausalLM(config).train()


def tiny(run: Run) -> Run:
    """Return a run of a tiny model with the same options."""
    name = "tiny-" + run.model
    shape = SHAPES[run.model]
    SHAPES[name] = replace(
        shape, layers=2, hidden=64, heads=2, vocab=320, wide=160 * bool(shape.wide), groups=2
    )
    return replace(run, model=name, layers=0, seq=64, batch=2, compile=False)
