"""Compiled modules under tensor parallelism, whose inputs may be collectives under way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lq_testing.lightning_models import PLAIN, run_trainer, trainer
from lq_testing.tensor_models import ParallelModule, batch, plan
from torch import Tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader

from lq_lightning import QuantizedFSDPStrategy

KINDS = ("units", "units, streams of DTensors", "in place", "wrapped", "parts")


class Inputs:
    """A backend that notes the types of tensors that compiled code is given."""

    def __init__(self) -> None:
        self.types: set[str] = set()

    def __call__(self, graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        tensors += [x._local_tensor for x in tensors if hasattr(x, "_local_tensor")]
        self.types.update(type(x).__name__ for x in tensors)
        compiled: Callable[..., Any] = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
        return compiled


class Model(ParallelModule):
    def __init__(self, kind: str | None, compiled: functools.partial[Any]) -> None:
        super().__init__(sequence=True)
        self.kind, self.compiled = kind, compiled

    def configure_model(self) -> None:
        blocks, styles = self.net.blocks, plan(self.depth, True)
        if self.kind == "in place":
            blocks[0].compile(backend=self.compiled.keywords["backend"])
        if self.kind == "units, streams of DTensors":
            for name in ("embedding", "blocks.0.mlp.down", "blocks.1.mlp.down"):
                styles[name].use_local_output = False
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], styles)  # type: ignore[index]
        if self.kind == "wrapped":
            blocks[0] = self.compiled(blocks[0])
        if self.kind == "parts":  # a function, and what follows something that is not traced
            scale = self.compiled(lambda x: x * 1.0)
            self.net.embedding.register_forward_hook(lambda module, args, x: scale(x))
            for block in blocks:
                block.mlp.forward = torch.compiler.disable(block.mlp.forward)
                block.forward = self.compiled(block.forward)


class Gradients(Callback):
    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        for name, parameter in module.named_parameters():
            self.found[name.replace("_orig_mod.", "")] = parameter.grad.full_tensor()


def _gradients(root: str, kind: str | None, backend: Inputs) -> dict[str, Tensor]:
    compiled, found = functools.partial(torch.compile, backend=backend), Gradients()
    original, torch.compile = torch.compile, compiled  # type: ignore[assignment]
    try:
        units = kind is not None and kind.startswith("units")
        strategy = QuantizedFSDPStrategy(tensor_parallel_size=2, compile_units=units, **PLAIN)
        run = trainer(strategy, root, callbacks=[found], max_steps=1)
        run.fit(Model(kind, compiled), DataLoader([batch(0)[0]] * 4, batch_size=4))
    finally:
        torch.compile = original
    return found.found


def _compare(rank: int, world: int, root: str) -> None:
    expected = _gradients(root, None, Inputs())
    for kind in KINDS:
        torch._dynamo.reset()
        seen = Inputs()
        found = _gradients(root, kind, seen)
        torch.testing.assert_close(found, expected, msg=lambda text, kind=kind: f"{kind}: {text}")
        assert seen.types, kind
        # what is no module cannot be made to wait
        assert kind == "parts" or "AsyncCollectiveTensor" not in seen.types, kind


def test_compiled_modules_have_the_gradients_of_eager_ones(tmp_path: Any) -> None:
    run_trainer(_compare, 2, str(tmp_path))
