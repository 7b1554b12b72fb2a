"""Whole Llama-shaped models in a plain training loop: how `activation_limits.py` trains them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import torch
from layer_subject import free_memory, synchronize
from llama_layer import Shape, use_ours, use_torchao
from pretraining.chunked_loss import backbone_and_head, chunked_cross_entropy, compile_layers
from torch import nn

from lq_lightning.data_parallel import QuantizedGradientBuffer
from lq_lightning.optim import OptimizerQuantization, QuantizedAdamW
from lq_lightning.optim.config import embedding_weights

LOSS_CHUNK = 2048
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A way to train a model.

    Attributes:
        change: Changes the model in place before it is compiled.
        checkpointed: Each layer keeps its input alone.
        mixed: Weights are fp32 and the model runs under autocast to bf16; otherwise both are bf16.
        codes: Moments are 8-bit codes, and gradient sums between micro-batches.
    """

    change: Callable[[Any], object] = lambda model: None
    checkpointed: bool = False
    mixed: bool = False
    codes: bool = False


def _of_layers(change: Callable[[nn.Module], object], model: Any) -> None:
    """Change all but the embedding and the head."""
    change(model.model)


COAT = Variant(change=partial(use_ours, "coat"), codes=True)
VARIANTS = {
    "bf16": Variant(),
    "bf16-mixed": Variant(mixed=True),
    "bf16, full checkpointing": Variant(checkpointed=True),
    "torchao float8": Variant(change=partial(_of_layers, partial(use_torchao, "tensorwise"))),
    "coat": COAT,
    "coat, fp32 weights": replace(COAT, mixed=True),
    "agoq": Variant(change=partial(use_ours, "agoq"), codes=True),
    "fp8-4bit": Variant(change=partial(use_ours, "fp8-4bit"), codes=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A model and what of it grows.

    Attributes:
        shape: Of a layer, with sequence length and batch.
        layers: Of the model.
        vocab: Tokens that it knows.
        grown: What sizes are of; the other two are those of the task.
        sizes: The first ones, all of which are measured.
        most: Largest size; where it is more than the last of ``sizes``, the largest that fits is
            looked for.
        states: AdamW's, ``own`` as the variant says, ``codes`` of all variants; with ``none``
            weights never change.
        variants: To be measured.
    """

    shape: Shape
    layers: int
    vocab: int
    grown: Literal["batch", "seq", "layers"]
    sizes: tuple[int, ...]
    most: int
    variants: tuple[str, ...]
    states: Literal["own", "codes", "none"] = "own"

    def at(self, size: int) -> Task:
        """Return the task with a batch, a length or a depth of ``size``."""
        if self.grown == "layers":
            return replace(self, layers=size)
        return replace(self, shape=replace(self.shape, **{self.grown: size}))


@dataclass(frozen=True, slots=True)
class Point:
    """What a size needs, memory in bytes; all zero on a CPU, which does not count.

    Attributes:
        size: Of the task.
        peak: Most that was allocated in a step.
        held: Allocated between forward and backward.
        saved: The part of ``held`` that the forward pass added.
        states: Of the optimizer.
        step_s: Seconds of an optimizer step.
        loss: Of the last micro-batch.
    """

    size: int
    peak: int
    held: int
    saved: int
    states: int
    step_s: float
    loss: float


class Subject:
    """A model of a task, trained by a variant.

    Args:
        task: Its sizes.
        variant: How it is trained.
        device: Where.
        compiled: Whether its layers are.
        micro_batches: Of a step.
    """

    def __init__(
        self, task: Task, variant: Variant, device: torch.device, compiled: bool, micro_batches: int
    ) -> None:
        self.task, self.variant, self.device = task, variant, device
        self.micro_batches = micro_batches
        model = _build(task, torch.float32 if variant.mixed else torch.bfloat16, device)
        variant.change(model)
        if variant.checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if compiled:
            compile_layers(model)
        self.model = model
        codes = task.states == "codes" or task.states == "own" and variant.codes
        self.optimizer = None if task.states == "none" else _adamw(model, codes)
        several = codes and micro_batches > 1
        self.buffer = QuantizedGradientBuffer(model) if several else None

    def step(self, size: int, steps: int = 1) -> Point:
        """Train on random tokens; return what that took, per step.

        Raises:
            torch.OutOfMemoryError: The size does not fit; another may be tried then.
        """
        try:
            return self._step(size, steps)
        finally:
            self.model.zero_grad()
            if self.buffer is not None:
                self.buffer.discard()

    def _step(self, size: int, steps: int) -> Point:
        shape = self.task.at(size).shape
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            for left in reversed(range(self.micro_batches)):
                rows = (shape.batch, shape.seq + 1)
                tokens = torch.randint(self.task.vocab, rows, device=self.device)
                before = _allocated(cuda)
                with self._autocast():
                    hidden, head = backbone_and_head(self.model)
                    loss = chunked_cross_entropy(
                        head, hidden(tokens[:, :-1]), tokens[:, 1:], LOSS_CHUNK
                    )
                held = _allocated(cuda)
                buffer = self.buffer
                with nullcontext() if buffer is None else buffer.accumulating(left > 0):
                    (loss / self.micro_batches).backward()
            if self.optimizer is not None:
                self.optimizer.step()
            self.model.zero_grad()
        synchronize()
        return Point(
            size=size,
            peak=torch.cuda.max_memory_allocated() if cuda else 0,
            held=held,
            saved=held - before,
            states=self._states_nbytes(),
            step_s=(time.perf_counter() - began) / steps,
            loss=float(loss.detach()),
        )

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.variant.mixed)

    def _states_nbytes(self) -> int:
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        values = [value for state in states for value in state.values()]
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))

    def release(self) -> None:
        """Give the model's memory back."""
        del self.model, self.optimizer, self.buffer
        free_memory()


def _allocated(cuda: bool) -> int:
    return torch.cuda.memory_allocated() if cuda else 0


def _build(task: Task, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = task.shape
    config = LlamaConfig(
        vocab_size=task.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=task.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.seq,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(before)


def _adamw(model: nn.Module, codes: bool) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if not codes:
        return torch.optim.AdamW(model.parameters(), fused=True, **options)
    # Random rounding of bf16 weights replaces fp32 main weights; fp32 weights are not rounded. The
    # states of the embedding stay in fp32, as `QuantizedPrecision` leaves them.
    return QuantizedAdamW(
        model.parameters(),
        quantization=OptimizerQuantization(stochastic_rounding=True),
        full_precision=embedding_weights(model),
        **options,
    )
