"""Programs as people write them: Hugging Face, wrapped submodules, default Trainer, scripts."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.loggers import CSVLogger
from lq_testing.lightning_models import (
    SMALL,
    Losses,
    TinyModule,
    loader,
    quiet,
    run_trainer,
    trainer,
)
from lq_testing.models import TinyLM
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _to_kwargs
from torchmetrics import MeanMetric

from lq_lightning import QuantizedFSDPStrategy
from lq_lightning._compat.modules import _reset_root, begin_root_forward
from lq_lightning.checkpoint.consolidate import consolidate_checkpoint
from lq_lightning.strategies import StrategyPart

ROOT = Path(__file__).resolve().parents[2]


# --- Hugging Face -------------------------------------------------------------------------------


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


class HuggingFace(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = _llama()
        self.samples: list[Tensor] = []

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def predict_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        out: Tensor = self.model.generate(tokens[:1, :4], max_new_tokens=4, do_sample=False)
        return out

    def on_train_end(self) -> None:
        prompt = torch.ones(1, 4, dtype=torch.long)
        self.samples.append(self.predict_step(prompt, 0))
        with self.trainer.strategy.root_forward():  # gathers once instead of once for every token
            self.samples.append(self.predict_step(prompt, 0))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _hugging_face(rank: int, world_size: int, root: str) -> None:
    torch.manual_seed(0)
    module = HuggingFace()
    strategy = QuantizedFSDPStrategy(**SMALL)
    run = trainer(strategy, root, precision="bf16-mixed", max_epochs=2)
    run.fit(module, loader())
    assert strategy.sharding_plan.source == "`_no_split_modules` (LlamaDecoderLayer)"
    assert strategy.sharding_plan.units == ("model.model.layers.0", "model.model.layers.1")
    assert module.model.lm_head.weight is module.model.model.embed_tokens.weight
    assert all(isinstance(p, DTensor) for p in module.parameters())
    predictions = run.predict(module, loader(2, batch_size=1))
    assert predictions[0].shape[1] > 4
    assert torch.equal(*module.samples)
    assert module.samples[0].shape[1] > 4
    run.save_checkpoint(f"{root}/hf.ckpt")
    restored = HuggingFace()
    run = trainer(QuantizedFSDPStrategy(**SMALL), root, precision="bf16-mixed", max_epochs=3)
    run.fit(restored, loader(), ckpt_path=f"{root}/hf.ckpt")
    assert run.global_step == 12


def test_hugging_face_model_trains_generates_and_exports(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    load_file = pytest.importorskip("safetensors.torch").load_file
    run_trainer(_hugging_face, 2, str(tmp_path))
    folder = tmp_path / "model"
    folder.mkdir()
    _llama().config.save_pretrained(folder)
    consolidate_checkpoint(
        tmp_path / "hf.ckpt", folder / "model.safetensors", "safetensors", prefix="model."
    )
    saved = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in saved  # tied: once
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    consolidate_checkpoint(tmp_path / "hf.ckpt", tmp_path / "one.ckpt")
    state = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, state[f"model.{name}"]), name


# --- frozen on the way --------------------------------------------------------------------------


class Backbone(TinyModule):
    @property
    def backbone(self) -> torch.nn.Module:
        return self.net.blocks


def _fine_tunes(rank: int, world_size: int, root: str) -> None:
    """Blocks are frozen for one epoch, wholly; the optimizer has all parameters all the time."""

    def fit(epochs: int, ckpt_path: str | None = None) -> tuple[pl.Trainer, Losses]:
        torch.manual_seed(0)
        losses = Losses()
        callbacks = [losses, BackboneFinetuning(unfreeze_backbone_at_epoch=2)]
        strategy = QuantizedFSDPStrategy(**SMALL)
        run = trainer(strategy, root, max_epochs=epochs, callbacks=callbacks)
        run.fit(Backbone(), loader(), ckpt_path=ckpt_path)
        return run, losses

    whole = fit(3)[1].values
    run, first = fit(1)
    assert run.strategy.communication.traffic().exchanges == 4, "frozen blocks were exchanged"
    run.save_checkpoint(f"{root}/frozen.ckpt")
    run, second = fit(3, f"{root}/frozen.ckpt")
    assert first.values + second.values == whole
    assert run.strategy.communication.check_replicas("raise") == []


# --- wrapped submodules, offload, metrics -------------------------------------------------------


class Wrapped(TinyModule):
    """Activation checkpointing around blocks, a compiled head, a metric, an extra buffer."""

    def __init__(self, compiled: bool = True) -> None:
        super().__init__()
        apply_activation_checkpointing(
            self.net, check_fn=lambda m: m in (self.net.blocks[0], self.net.blocks[1])
        )
        if compiled:
            self.net.head = torch.compile(self.net.head, backend="eager")
        self.mean = MeanMetric()
        self.register_buffer("seen", torch.zeros(1))

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        self.seen += 1
        loss: Tensor = self.net(tokens)
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.net.head(torch.ones(1, 24))  # of the root, compiled or not


def _wrapped(rank: int, world_size: int, root: str) -> None:
    for full in (False, True):
        torch.manual_seed(0)
        module = Wrapped()
        strategy = QuantizedFSDPStrategy(**SMALL, save_distributed_checkpoint=not full)
        run = trainer(strategy, root)
        run.fit(module, loader())
        assert len(strategy.sharding_plan.units) == 2
        run.save_checkpoint(f"{root}/{full}.ckpt")
        saved = {n: p.full_tensor() for n, p in module.named_parameters()}
        for compiled in (True, False):  # names match whether or not a submodule is compiled
            other = Wrapped(compiled)
            run = trainer(
                QuantizedFSDPStrategy(**SMALL, save_distributed_checkpoint=not full),
                root,
                max_epochs=2,
                limit_train_batches=0,
            )
            run.fit(other, loader(), ckpt_path=f"{root}/{full}.ckpt")
            for (name, value), parameter in zip(saved.items(), other.parameters(), strict=True):
                assert torch.equal(value, parameter.full_tensor()), name
            assert other.seen.item() == 4


class Offloading(TinyModule):
    def configure_model(self) -> None:
        for block in self.net.blocks:
            fully_shard(block, offload_policy=CPUOffloadPolicy(pin_memory=False))


def _offload(rank: int, world_size: int, root: str) -> None:
    module = Offloading()
    trainer(QuantizedFSDPStrategy(**SMALL), root).fit(module, loader())
    assert {p.device.type for p in module.parameters()} == {"cpu"}


# --- errors, memory -----------------------------------------------------------------------------


class Fails(TinyModule):
    """Raises once on all ranks, in the middle of a forward or backward."""

    failing = ""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        if batch_idx < 2 or not self.failing:
            loss: Tensor = self.net(tokens)
            return loss
        failing, self.failing = self.failing, ""
        if failing == "forward":
            self.net.blocks[1](torch.ones(1))  # wrong shape
        embedded = self.net.embed(tokens)
        embedded.register_hook(_fail)
        return self.net.head(self.net.blocks[1](self.net.blocks[0](embedded))).sum()


def _fail(gradient: Tensor) -> None:
    raise RuntimeError("in backward")


def _after_an_error(rank: int, world_size: int, root: str) -> None:
    _recover(root)
    if hasattr(FSDPState, "_reset_iter_state"):  # torch < 2.13 has none
        del FSDPState._reset_iter_state
        _recover(root)


class CountsErrors(StrategyPart):
    num_errors = 0

    def on_step_error(self) -> None:
        self.num_errors += 1


def _recover(root: str) -> None:
    module = Fails()
    for failing in ("forward", "backward"):
        strategy, counts = QuantizedFSDPStrategy(weights="none", gradients="none"), CountsErrors()
        strategy.parts.append(counts)
        module.failing = failing
        with pytest.raises(RuntimeError, match=r"normalized_shape|in backward"):
            trainer(strategy, root, accumulate_grad_batches=4).fit(module, loader(64))
        assert counts.num_errors, "what is on its way was not waited for"
    before = {n: p.full_tensor().clone() for n, p in module.named_parameters()}
    module.lr = 0.0  # stale gradients of the interrupted window would show in the norm below
    reference = TinyModule(lr=0.0)
    norms = []
    for model in (module, reference):
        if model is reference:
            reference.load_state_dict(before)

        class Norm(pl.Callback):
            def on_before_optimizer_step(self, trainer: Any, pl_module: Any, *args: Any) -> None:
                squares = [p.grad.full_tensor().square().sum() for p in pl_module.parameters()]
                norms.append(sum(squares).item())

        strategy = QuantizedFSDPStrategy(weights="none", gradients="none")
        run = trainer(strategy, root, accumulate_grad_batches=4, callbacks=[Norm()])
        run.fit(model, loader(64))
    assert norms[:2] == norms[2:]
    # nothing keeps a module alive that nobody uses
    alive = weakref.ref(reference)
    del reference, model, run, strategy
    gc.collect()
    assert alive() is None


class LeavesAnEpoch(TinyModule):
    """Ends its first epoch in the middle of a window."""

    def __init__(self, leaves: bool) -> None:
        super().__init__(lr=0.0)
        self.leaves = leaves
        self.norms: list[float] = []

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
        return -1 if self.leaves and self.current_epoch == 0 and batch_idx == 2 else None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(sum(p.grad.full_tensor().norm().item() for p in self.parameters()))


def _left(rank: int, world_size: int, root: str) -> None:
    norms = []
    for leaves in (False, True):
        torch.manual_seed(0)
        module = LeavesAnEpoch(leaves)
        strategy = QuantizedFSDPStrategy(weights="none", gradients="none")
        run = trainer(strategy, root, accumulate_grad_batches=4, max_epochs=2)
        run.fit(module, loader(32))
        norms.append(module.norms)
    assert norms[0] == pytest.approx(2 * norms[1]), "a window got gradients of the one before"


def test_old_torch_can_move_what_the_root_begins_with_to_a_gpu() -> None:
    """Its FSDP2 does so to the arguments of every root, on GPUs alone."""
    moved: list[Any] = []

    def pre_forward(module: Any, args: Any, kwargs: Any) -> None:
        each_args, each_kwargs = _to_kwargs(args, kwargs, torch.device("cpu"), False)
        moved.append((each_args[0], each_kwargs[0]))

    root: Any = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_pre_forward=pre_forward))
    begin_root_forward(root)
    assert len(moved) == 1


@pytest.mark.parametrize("several", [False, True], ids=["torch 2.11", "torch 2.12"])
def test_the_reset_of_old_torch_waits_for_what_is_on_its_way(several: bool) -> None:
    """It has none of its own; the attributes are those of its FSDP2."""
    waited: list[str] = []
    stream = SimpleNamespace(wait_event=waited.append)
    pending = {name: SimpleNamespace(event=name) for name in ("gather", "scatter", "all-reduce")}
    group = SimpleNamespace(
        _all_gather_result=SimpleNamespace(all_gather_event="group", all_gather_work=None),
        _post_reduce_event="post reduce",
        _all_reduce_state=pending["all-reduce"],
        _partial_reduce_output=1,
        _reshard_after_forward_event="reshard",
        _wait_all_gather_streams_on_event=waited.append,
        _post_forward_indices=[1],
        _to_sharded=lambda: waited.append("sharded"),
    )
    comm = SimpleNamespace(all_gather_state=pending["gather"], post_forward_order=[group])
    if several:
        comm.reduce_scatter_states = [pending["scatter"]]
    else:
        comm.reduce_scatter_state = pending["scatter"]
    context = SimpleNamespace(post_backward_final_callback_queued=True)
    state = SimpleNamespace(
        _is_root=True,
        _comm_ctx=comm,
        _device_handle=SimpleNamespace(current_stream=lambda: stream),
        _state_ctx=context,
        _modules_to_run_forward={1},
        _fsdp_param_group=group,
    )
    context.all_states = [state]
    _reset_root(state)
    expected = ["gather", "scatter", "group", "post reduce", "all-reduce", "reshard", "sharded"]
    assert waited == expected
    left = [comm.all_gather_state, group._all_gather_result, group._post_reduce_event]
    assert left + [group._all_reduce_state, group._reshard_after_forward_event] == [None] * 5
    assert not (comm.reduce_scatter_states if several else comm.reduce_scatter_state)
    lists = [comm.post_forward_order, group._post_forward_indices, state._modules_to_run_forward]
    assert not any(lists)
    assert not context.post_backward_final_callback_queued


def _everything_on(rank: int, world_size: int, root: str) -> None:
    quiet()
    os.chdir(root)
    module = TinyModule()
    run = pl.Trainer(
        strategy="quantized_fsdp",
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        precision="bf16-mixed",
        logger=CSVLogger(root),
        gradient_clip_val=1.0,
        gradient_clip_algorithm="value",
        log_every_n_steps=1,
        val_check_interval=2,
    )
    run.fit(module, loader(), loader(8))
    assert run.test(ckpt_path="best", dataloaders=loader(8))
    run.validate(module, loader(8))
    assert "val" in run.callback_metrics
    total = sum(p.numel() for p in TinyLM().parameters())
    assert sum(p.numel() for p in module.parameters()) == total


def _all(rank: int, world_size: int, root: str) -> None:
    for check in (_fine_tunes, _wrapped, _offload, _left, _everything_on, _after_an_error):
        check(rank, world_size, root)


def test_programs_on_two_ranks(tmp_path: Path) -> None:
    run_trainer(_all, 2, str(tmp_path), timeout=240.0)


SCRIPT = """
    import sys
    import lightning.pytorch as pl
    import torch
    from torch import nn
    import lq_lightning

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)
        def training_step(self, batch, batch_idx):
            if "die" in sys.argv and batch_idx == 1 and self.global_rank == 1:
                sys.exit(3)
            return self.layer(batch).square().mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    if __name__ == "__main__":
        data = torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2)
        run = pl.Trainer(strategy="quantized_fsdp", accelerator="cpu", devices=2, max_epochs=1,
                         logger=False, enable_checkpointing=False, enable_progress_bar=False)
        run.fit(Model(), data)
        print(f"rank {run.global_rank} took {run.global_step} steps")
"""


def _launch(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_script_started_by_lightning(tmp_path: Path) -> None:
    done = _launch(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 0 took 4 steps" in done.stdout
    assert "rank 1 took 4 steps" in done.stdout


@pytest.mark.slow
def test_script_whose_second_rank_exits(tmp_path: Path) -> None:
    done = _launch(tmp_path, "die")
    assert done.returncode != 0
    told = ("rank 1 failed: SystemExit: 3", "lost contact with another rank", "Child process")
    assert any(text in done.stderr for text in told)
