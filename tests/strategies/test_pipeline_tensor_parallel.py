"""Pipelines of tensor-parallel ranks against one process, with every form of the hidden state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lq_testing.lightning_models import EXACT, PLAIN, SMALL, Losses, run_trainer, trainer
from lq_testing.tensor_models import Feeds, Norms, ParallelLM, ParallelModule, plan, unlike
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from lq_lightning import (
    GradientQuantization,
    QuantizedPipelineStrategy,
    TAHQuantization,
)
from lq_lightning.codecs import CodecSpec

STEPS, CODED_STEPS = 3, 8


class OfAllTokens(SequenceParallel):
    """A norm of tokens that all ranks have."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence_sharding = (Replicate(),)


class Planned(ParallelLM):
    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}


class WithVocabulary(Planned):
    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"embedding": "embedding_rowwise", **super().tensor_parallel_plan()}


class Module(ParallelModule):
    """Hidden states between layers by ``form``, which is None in one process.

    ``"replicated"``, ``"sequence"``: plain tensors. ``"DTensor"``: placed as replicated.
    ``"DTensor shares"``: placed along tokens. ``"auto"``: the first layer cuts the tokens.
    ``bare``: without a last norm no layer can cut them, and the plan names the embedding but not
    the head, which is tied to it.
    """

    def __init__(
        self, form: str | None, tied: bool = False, dropout: float = 0.0, bare: bool = False
    ) -> None:
        super().__init__(None if form is None else form not in ("replicated", "DTensor"))
        self.form, self.tied = form, tied
        self.net.__class__ = WithVocabulary if bare else Planned
        if bare:
            self.net.norm = nn.Identity()  # type: ignore[assignment]
        for block in self.net.blocks:
            block.mlp = nn.Sequential(block.mlp, nn.Dropout(dropout)) if dropout else block.mlp
        self._tie()

    def _tie(self) -> None:
        if self.tied:
            self.net.head.weight = self.net.embedding.weight

    def configure_model(self) -> None:
        if self.form is None or self.form.startswith("auto"):
            return
        styles = plan(self.depth, bool(self.sequence))
        if any(isinstance(block.mlp, nn.Sequential) for block in self.net.blocks):
            styles = {n.replace(".mlp.", ".mlp.0."): s for n, s in styles.items()}
        rows: Any = Shard(1) if self.sequence else Replicate()
        if self.form.startswith("DTensor"):
            placed: dict[str, Any] = {"output_layouts": rows, "use_local_output": False}
            styles["embedding"] = RowwiseParallel(input_layouts=Replicate(), **placed)
            for i in range(self.depth):
                styles[f"blocks.{i}.mlp.down"] = RowwiseParallel(**placed)
                styles[f"blocks.{i}.norm"] = SequenceParallel() if self.sequence else OfAllTokens()
            styles["norm"] = SequenceParallel() if self.sequence else OfAllTokens()
            styles["head"] = ColwiseParallel(  # for `loss_parallel`
                input_layouts=rows, output_layouts=Shard(-1), use_local_output=False
            )
        elif self.tied:
            styles["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=rows)
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], styles)  # type: ignore[index]
        self._tie()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        logits = self.net(tokens)
        if isinstance(logits, DTensor):
            with loss_parallel():
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        else:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss)
        tokens_seen = float(tokens.numel())
        self.log("tokens", tokens_seen, reduce_fx="sum", sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        self.log("val", self.net(tokens).square().mean(), sync_dist=True)


def _fit(root: str, module: Module, strategy: Any, devices: int, steps: int) -> dict[str, Any]:
    losses, norms = Losses(), Norms()
    feeds = Feeds(8 * steps)
    run = trainer(
        strategy,
        root,
        devices=devices,
        callbacks=[losses, norms],
        gradient_clip_val=1.0,
        limit_val_batches=1,
    )
    run.fit(module, feeds)
    found = {name: value.item() for name, value in run.callback_metrics.items()}
    return {"losses": losses.values, "norms": norms.values, **found}


def _alone(root: str, steps: int, **options: Any) -> dict[str, Any]:
    return _fit(root, Module(None, **options), "auto", 1, steps)


def _strategy(**options: Any) -> QuantizedPipelineStrategy:
    return QuantizedPipelineStrategy(
        pipeline_size=2, tensor_parallel_size=2, num_microbatches=2, **options
    )


def _ranks_of(module: Module, axis: str, tensor: Tensor) -> bool:
    """Whether all ranks of an axis have the same values."""
    group = module.device_mesh.get_group(axis)  # type: ignore[union-attr]
    every = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(every, tensor.contiguous(), group=group)
    return all(torch.equal(each, tensor) for each in every)


# --- two pipelines ------------------------------------------------------------------------------


def _eight(rank: int, world: int, root: str) -> dict[str, Any]:
    found = {}
    for form in ("replicated", "sequence"):
        torch.manual_seed(0 if rank % 4 == 0 else 5)  # the first rank of a stage counts
        module = Module(form)
        found[form] = _fit(root, module, _strategy(node_size=4, **PLAIN, **EXACT), world, STEPS)
        found[form]["unlike"] = unlike(module)
    torch.manual_seed(0)
    module = Module("replicated", tied=True, dropout=0.1)
    noisy = CodecSpec(code="int5", group_size=16, rounding="stochastic")
    strategy = _strategy(
        node_size=4,
        weights="qWD",
        gradients=GradientQuantization(rounding="stochastic"),
        forward_codec=TAHQuantization(tile_size=16, bits=5),
        backward_codec=noisy,
        tied_gradients="int8",
        **SMALL,
    )
    found["codes"] = _fit(root, module, strategy, world, CODED_STEPS)
    tied = module.net.embedding.weight if strategy.pipeline.rank == 0 else module.net.head.weight
    found["codes"]["unlike"] = unlike(module)
    found["codes"]["tied"] = _ranks_of(module, "pipeline", tied.to_local().detach())
    found["codes"]["bytes"] = strategy.quantization_report().counts["bytes_tied_gradients"]
    found["numel"] = strategy.num_parameters
    return found


def test_2x2x2_ranks_train_as_one_process_does(tmp_path: Any) -> None:
    exact = _alone(str(tmp_path), STEPS)
    tied = _alone(str(tmp_path), CODED_STEPS, tied=True, dropout=0.1)
    ranks = run_trainer(_eight, 8, str(tmp_path))
    others = ranks[2]["codes"]
    for found in ranks:
        for form in ("replicated", "sequence"):
            # the loss of a pipeline is that of its half of the batch
            both = torch.tensor([ranks[0][form]["losses"], ranks[2][form]["losses"]])
            expected = torch.tensor(exact["losses"])
            torch.testing.assert_close(both.mean(0), expected, rtol=1e-6, atol=1e-6)
            norms = torch.tensor(found[form]["norms"])
            torch.testing.assert_close(norms, torch.tensor(exact["norms"]), rtol=1e-6, atol=1e-6)
            assert found[form]["val"] == pytest.approx(exact["val"], rel=1e-5)
            assert found[form]["tokens"] == exact["tokens"]
        assert found["codes"]["losses"] in (ranks[0]["codes"]["losses"], others["losses"])
        mean = (ranks[0]["codes"]["losses"][-1] + others["losses"][-1]) / 2
        assert mean == pytest.approx(tied["losses"][-1], rel=0.2)
        assert found["codes"]["tied"]
        assert found["codes"]["bytes"] > 0
        for name in ("replicated", "sequence", "codes"):
            assert found[name]["unlike"] == []
        assert found["numel"] == sum(p.numel() for p in Module(None, tied=True).parameters())


# --- one pipeline -------------------------------------------------------------------------------

FORMS = {
    "DTensor": ({"schedule": "zero_bubble"}, {"tied": True}),
    "DTensor shares": ({}, {}),
    "auto": ({"tensor_parallel": "auto", "schedule": "zero_bubble"}, {"tied": True}),
    "auto, bare": ({"tensor_parallel": "auto"}, {"tied": True, "bare": True}),
}


def _four(rank: int, world: int, root: str) -> dict[str, Any]:
    found = {}
    for form, (options, model) in FORMS.items():
        torch.manual_seed(0)
        module = Module(form, **model)
        strategy = _strategy(**options, **EXACT)
        found[form] = _fit(root, module, strategy, world, 5)
        found[form]["unlike"] = unlike(module)
        counts = strategy.quantization_report().counts
        found[form]["bytes"] = counts["bytes_boundary_forward"] + counts["bytes_boundary_backward"]
    return found


def test_hidden_states_of_all_forms_cross_boundaries(tmp_path: Any) -> None:
    alone = {form: _alone(str(tmp_path), 5, **model) for form, (_, model) in FORMS.items()}
    for found in run_trainer(_four, 4, str(tmp_path)):
        for form, expected in alone.items():
            for name in ("losses", "norms", "val", "tokens"):
                given = torch.tensor(found[form][name])
                wanted = torch.tensor(expected[name])
                torch.testing.assert_close(given, wanted, rtol=2e-6, atol=1e-6)
            assert found[form]["unlike"] == []
        # ranks with shares of the tokens send half as much each
        assert found["DTensor"]["bytes"] == 2 * found["DTensor shares"]["bytes"]
        assert found["auto"]["bytes"] == found["DTensor shares"]["bytes"]
        assert found["auto, bare"]["bytes"] == found["DTensor"]["bytes"]
