"""`QuantizedPrecision` in a Trainer: training, resuming, and what it refuses."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lq_testing import tensor_models
from lq_testing.lightning_models import (
    SMALL,
    Losses,
    TinyModule,
    loader,
    quiet,
    run_trainer,
    trainer,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lq_lightning import (
    QuantizedAllReduce,
    QuantizedFSDPStrategy,
    QuantizedPrecision,
    quantized_all_reduce_hook,
)
from lq_lightning._compat.tensor_parallel import replicated_parameters
from lq_lightning._compat.tensors import local_tensor
from lq_lightning.codecs import CodecSpec
from lq_lightning.optim import (
    OptimizerQuantization,
    QuantizedAdamW,
    QuantizedMuon,
    QuantizedSGD,
    muon_groups,
)

STATES = OptimizerQuantization(min_numel=256)


class Wide(TinyModule):
    """Has a matrix large enough for every default, a schedule and two parameter groups."""

    def __init__(self, optimizer: str = "adamw", lr: float = 1e-2) -> None:
        super().__init__(optimizer, lr)
        self.wide = nn.Linear(200, 24, bias=False)

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = self.net.embed(tokens)
        mixed = self.wide((hidden @ self.wide.weight).relu()).square().mean()
        return self.net(tokens) + 0.1 * mixed

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.net.parameters()}, {"params": [self.wide.weight], "lr": 3e-3}]
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(groups, lr=self.lr, momentum=0.9)
        if self.optimizer_name == "amsgrad":
            return torch.optim.AdamW(groups, lr=self.lr, amsgrad=True)
        if self.optimizer_name == "adagrad":
            return torch.optim.Adagrad(groups, lr=self.lr)
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        if self.optimizer_name == "quantized":
            return QuantizedAdamW(groups, lr=self.lr, quantization=STATES)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=40)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(
    root: str,
    strategy: Any = "auto",
    devices: int = 1,
    plugin: QuantizedPrecision | None = None,
    optimizer: str = "adamw",
    **kwargs: Any,
) -> tuple[Any, list[float]]:
    torch.manual_seed(0)
    losses = Losses()
    ckpt_path = kwargs.pop("ckpt_path", None)
    callbacks = [losses, *kwargs.pop("callbacks", [])]
    plugins = [QuantizedPrecision(optimizer_state=STATES) if plugin is None else plugin]
    run = trainer(strategy, root, devices=devices, plugins=plugins, callbacks=callbacks, **kwargs)
    run.fit(Wide(optimizer), loader(), ckpt_path=ckpt_path)
    return run, losses.values


def state_of(run: Any, suffix: str) -> list[torch.Tensor]:
    entries = run.optimizers[0].state.values()
    return [value for entry in entries for key, value in entry.items() if key.endswith(suffix)]


def test_states_are_codes_and_the_loss_follows(tmp_path: Path) -> None:
    off = QuantizedPrecision(optimizer_state="none")
    exact = fit(str(tmp_path), plugin=off, max_epochs=2)[1]
    monitor = LearningRateMonitor()
    logger = CSVLogger(tmp_path)
    with mock.patch("lq_lightning.plugins.quantized_precision.rank_zero_info") as info:
        run, losses = fit(str(tmp_path), max_epochs=2, callbacks=[monitor], logger=logger)
    assert info.call_args.args[0].endswith(
        "before sharding; in fp32: 7 (1-D), 3 (rows of fewer than 32 elements), 1 (embedding)"
    )
    assert type(run.optimizers[0]) is QuantizedAdamW
    assert all(codes.dtype == torch.uint8 for codes in state_of(run, "_codes"))
    # `wide`, and `down` of two blocks; the others have short rows, or are 1-D or an embedding
    assert len(state_of(run, "exp_avg_codes")) == 3
    plan = run.optimizers[0].quantization_plan()
    quantized = {entry.name for entry in plan if entry.reason is None}
    assert "wide.weight" in quantized
    assert {"net.embed.weight", "wide.weight"} <= {entry.name for entry in plan}
    assert len(quantized) == 3
    assert losses != exact
    assert max(abs(a - b) for a, b in zip(losses, exact, strict=True)) < 0.05
    assert exact[-1] < exact[0] - 0.3, "the model does not learn, so the test shows nothing"
    lrs = [group["lr"] for group in run.optimizers[0].param_groups]
    assert lrs[0] != 1e-2, "the schedule has no effect"
    assert len(monitor.lrs) == 2


def test_states_take_at_most_2_2_bytes_per_parameter(tmp_path: Path) -> None:
    run, _ = fit(str(tmp_path), plugin=QuantizedPrecision(), max_epochs=1, limit_train_batches=2)
    wide = run.lightning_module.wide.weight
    entry = run.optimizers[0].state[wide]
    nbytes = sum(v.numel() * v.element_size() for k, v in entry.items() if k != "step")
    assert 2 * wide.numel() < nbytes <= 2.2 * wide.numel()
    assert sum(p.reason is None for p in run.optimizers[0].quantization_plan()) == 1
    assert run.precision_plugin.gradient_buffer is None  # nothing accumulates


@pytest.mark.parametrize("buffer", ["int8", "fp8_e4m3", CodecSpec(code="int8", group_size=64)])
def test_accumulated_gradients_are_codes(tmp_path: Path, buffer: Any) -> None:
    plugin = QuantizedPrecision(optimizer_state="none", gradient_buffer="none")
    exact = fit(str(tmp_path), plugin=plugin, max_epochs=2, accumulate_grad_batches=4)
    assert exact[0].precision_plugin.gradient_buffer is None
    held: list[int] = []

    class Held(Losses):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            held.append(trainer.precision_plugin.gradient_buffer.nbytes)

    plugin = QuantizedPrecision(optimizer_state="none", gradient_buffer=buffer)
    run, losses = fit(
        str(tmp_path), plugin=plugin, max_epochs=2, accumulate_grad_batches=4, callbacks=[Held()]
    )
    assert [n > 0 for n in held] == [True, True, True, False] * 4
    assert losses != exact[1]
    assert max(abs(a - b) for a, b in zip(losses, exact[1], strict=True)) < 0.05


class Interrupted(Wide):
    """Has no loss in the last micro-batch of each window."""

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> Any:
        return None if batch_idx % 4 == 3 else super().training_step(tokens, batch_idx)


def test_windows_without_a_last_loss_are_complete(tmp_path: Path) -> None:
    finals = []
    for buffer in ("none", "int8"):
        torch.manual_seed(0)
        plugin = QuantizedPrecision(optimizer_state="none", gradient_buffer=buffer)  # type: ignore[arg-type]
        options = {"max_epochs": 2, "accumulate_grad_batches": 4}
        run = trainer("auto", str(tmp_path), devices=1, plugins=[plugin], **options)
        module = Interrupted()
        run.fit(module, loader())
        finals.append(module.wide.weight.detach().clone())
    torch.manual_seed(0)
    start = Interrupted().wide.weight
    moved = (finals[0] - start).norm()
    assert moved > 0.05
    assert (finals[0] - finals[1]).norm() < 0.1 * moved


def test_buffer_is_gone_after_fit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Wide()
    options = {"max_epochs": 1, "accumulate_grad_batches": 2}
    for _ in range(2):  # the second fit makes a new one
        plugin = QuantizedPrecision(optimizer_state="none")
        run = trainer("auto", str(tmp_path), devices=1, plugins=[plugin], **options)
        run.fit(module, loader())
        assert plugin.gradient_buffer is None
        assert not module.wide.weight._post_accumulate_grad_hooks


def test_sgd_and_single_device_resume_bit_exactly(tmp_path: Path) -> None:
    for name, kind in (("sgd", QuantizedSGD), ("adamw", QuantizedAdamW)):
        whole_run, whole = fit(str(tmp_path), optimizer=name, max_epochs=2)
        assert type(whole_run.optimizers[0]) is kind
        run, first = fit(str(tmp_path), optimizer=name, max_epochs=1)
        path = str(tmp_path / f"{name}.ckpt")
        run.save_checkpoint(path)
        resumed, second = fit(str(tmp_path), optimizer=name, max_epochs=2, ckpt_path=path)
        assert first + second == whole
        assert all(c.dtype == torch.uint8 for c in state_of(resumed, "_codes"))
        groups = [g["lr"] for r in (resumed, whole_run) for g in r.optimizers[0].param_groups]
        assert groups[:2] == groups[2:]


class Matrices(Wide):
    """Trains matrices with Muon and the rest with AdamW: one optimizer, or two by hand."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = optimizer == "one"

    def configure_optimizers(self) -> Any:
        groups = muon_groups(self)
        if self.automatic_optimization:
            options = {"adjust_lr_fn": "match_rms_adamw", "quantization": STATES}
            return QuantizedMuon(groups, self.lr, **options)  # type: ignore[arg-type]
        matrices, others = ([param for _, param in group["params"]] for group in groups)
        muon = torch.optim.Muon(matrices, self.lr, adjust_lr_fn="match_rms_adamw")
        return muon, torch.optim.AdamW(others, self.lr)

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(tokens, batch_idx)
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss


def _fit_matrices(root: str, optimizer: str, states: Any = STATES, **options: Any) -> Any:
    torch.manual_seed(0)
    losses = Losses()
    plugins = [QuantizedPrecision(optimizer_state=states)]
    path, strategy = options.pop("ckpt_path", None), options.pop("strategy", "auto")
    run = trainer(strategy, root, plugins=plugins, callbacks=[losses], **options)
    run.fit(Matrices(optimizer), loader(), ckpt_path=path)
    return run, losses.values


def test_two_optimizers_by_hand_are_both_quantized(tmp_path: Path) -> None:
    options = {"devices": 1, "max_epochs": 2}
    _, exact = _fit_matrices(str(tmp_path), "two", "none", **options)
    run, losses = _fit_matrices(str(tmp_path), "two", **options)
    assert [type(o) for o in run.optimizers] == [QuantizedMuon, QuantizedAdamW]
    plans = [{e.name for e in o.quantization_plan() if not e.reason} for o in run.optimizers]
    assert "wide.weight" in plans[0]
    assert not plans[1]  # has vectors and the embedding
    assert losses != exact
    assert max(abs(a - b) for a, b in zip(losses, exact, strict=True)) < 0.05
    assert exact[-1] < exact[0] - 0.3, "the model does not learn, so the test shows nothing"


def _muon_on_ranks(rank: int, world: int, root: str) -> None:
    def strategy() -> Any:
        return QuantizedFSDPStrategy(min_quantized_numel=64)

    options = {"devices": world, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    done, whole = _fit_matrices(root, "one", strategy=strategy(), max_epochs=2, **options)
    assert type(done.optimizers[0]) is QuantizedMuon
    assert whole[-1] < whole[0]
    short, first = _fit_matrices(root, "one", strategy=strategy(), max_epochs=1, **options)
    path = f"{root}/muon.ckpt"
    short.save_checkpoint(path)
    resume = {"ckpt_path": path, "max_epochs": 2, **options}
    assert first + _fit_matrices(root, "one", strategy=strategy(), **resume)[1] == whole


def test_muon_resumes_on_ranks(tmp_path: Path) -> None:
    run_trainer(_muon_on_ranks, 2, str(tmp_path))
    path = str(tmp_path / "muon.ckpt")  # and in one process
    options = {"devices": 1, "max_epochs": 2, "ckpt_path": path, "limit_train_batches": 2}
    run, _ = _fit_matrices(str(tmp_path), "one", strategy=QuantizedFSDPStrategy(), **options)
    assert len(state_of(run, "momentum_buffer_codes")) == 3


def _resumes_on_ranks(rank: int, world: int, root: str, strategy: str) -> None:
    def make() -> Any:
        if strategy == "ddp":
            return "ddp"
        sharded = strategy == "sharded"
        return QuantizedFSDPStrategy(min_quantized_numel=64, save_distributed_checkpoint=sharded)

    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    for compute in ("32-true", "bf16-mixed"):

        def run(compute: str = compute, **kwargs: Any) -> tuple[Any, list[float]]:
            plugin = QuantizedPrecision(compute, optimizer_state=STATES)  # type: ignore[arg-type]
            return fit(root, make(), world, plugin, **options, **kwargs)

        done, whole = run(max_epochs=2)
        assert type(done.optimizers[0]) is QuantizedAdamW
        assert whole[-1] < whole[0]
        short, first = run(max_epochs=1)
        path = f"{root}/{compute}.ckpt"
        short.save_checkpoint(path)
        assert first + run(max_epochs=2, ckpt_path=path)[1] == whole, (strategy, compute)


def _save_on_ranks(rank: int, world: int, root: str) -> None:
    for kind in ("ddp", "sharded", "full"):
        _resumes_on_ranks(rank, world, f"{root}/{kind}", kind)
    strategy = QuantizedFSDPStrategy(min_quantized_numel=64)
    run, _ = fit(root, strategy, world, max_epochs=1)
    run.save_checkpoint(f"{root}/ranks.ckpt")
    codes = [c.full_tensor() if hasattr(c, "full_tensor") else c for c in state_of(run, "_codes")]
    if rank == 0:
        torch.save(codes, f"{root}/codes.pt")


def _load_on_ranks(rank: int, world: int, root: str) -> None:
    strategy = QuantizedFSDPStrategy(min_quantized_numel=64)
    run, losses = fit(
        root, strategy, world, ckpt_path=f"{root}/ranks.ckpt", max_epochs=2, limit_train_batches=0
    )
    codes = [c.full_tensor() if hasattr(c, "full_tensor") else c for c in state_of(run, "_codes")]
    saved = torch.load(f"{root}/codes.pt")
    assert len(saved) == 6
    assert all(torch.equal(a, b) for a, b in zip(codes, saved, strict=True))


def test_ranks_resume_bit_exactly_and_on_another_number_of_ranks(tmp_path: Path) -> None:
    run_trainer(_save_on_ranks, 2, str(tmp_path))
    run_trainer(_load_on_ranks, 3, str(tmp_path))


@pytest.mark.parametrize("strategy", ["auto", "quantized_fsdp"])
def test_codes_are_not_loaded_into_other_optimizers(tmp_path: Path, strategy: str) -> None:
    run, _ = fit(str(tmp_path), strategy, max_epochs=1)
    path = str(tmp_path / "last.ckpt")
    run.save_checkpoint(path)
    plain = QuantizedPrecision(optimizer_state="none")
    message = r"state is quantized \(2/.* AdamW .*is not.*QuantizedPrecision\(optimizer"
    with pytest.raises(ValueError, match=message):
        fit(str(tmp_path), strategy, plugin=plain, max_epochs=2, ckpt_path=path)
    if strategy != "auto":  # Lightning's own would load them
        other = trainer(strategy, str(tmp_path), devices=1, max_epochs=2)
        with pytest.raises(ValueError, match=r"state is quantized \(2/.*, but AdamW is not"):
            other.fit(Wide(), loader(), ckpt_path=path)


@pytest.mark.parametrize("strategy", ["auto", "quantized_fsdp"])
def test_optimizers_that_a_module_quantizes_resume(tmp_path: Path, strategy: str) -> None:
    """``optimizer_state="none"`` leaves them alone, and they read their codes."""

    def run(**options: Any) -> Any:
        plain = QuantizedPrecision(optimizer_state="none")
        return fit(str(tmp_path), strategy, plugin=plain, optimizer="quantized", **options)[0]

    path = str(tmp_path / "last.ckpt")
    first = run(max_epochs=1)
    first.save_checkpoint(path)
    second = run(max_epochs=2, ckpt_path=path)
    assert second.global_step == 2 * first.global_step
    assert len(state_of(second, "_codes")) > 0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_without_an_optimizer_it_fits_as_without_the_plugin(
    tmp_path: Path, accumulate: int
) -> None:
    class Evaluates(Wide):
        def configure_optimizers(self) -> None:
            return None

    module, path = Evaluates(), tmp_path / "last.ckpt"
    before = module.net.head.weight.detach().clone()
    for resumed in (None, path):
        plugin = QuantizedPrecision()
        options = {"plugins": [plugin], "accumulate_grad_batches": accumulate}
        run = trainer("auto", str(tmp_path), 1, **options, max_epochs=2 if resumed else 1)
        run.fit(module, loader(16), ckpt_path=resumed)
        run.save_checkpoint(path)
        assert plugin.gradient_buffer is None
        assert run.global_step == (8 if resumed else 4) // accumulate
    assert torch.equal(module.net.head.weight, before)


def test_nothing_to_buffer_names_the_option(tmp_path: Path) -> None:
    module = TinyModule("adamw", 1e-2)  # its largest matrix has fewer than 4096 elements
    options = {"plugins": [QuantizedPrecision()], "accumulate_grad_batches": 2, "max_epochs": 1}
    run = trainer("auto", str(tmp_path), 1, **options)
    with pytest.raises(ValueError, match='no gradient is large .* give `gradient_buffer="none"`'):
        run.fit(module, loader())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "16-mixed"}, r"precision='16-mixed'.*'bf16-mixed'"),
        ({"optimizer_state": "fp4"}, r"optimizer_state='fp4'.*'expanded_fp8'"),
        ({"gradient_buffer": "int4"}, r"gradient_buffer='int4'.*'fp8_e4m3'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizedPrecision(**options)


@pytest.mark.parametrize(
    ("optimizer", "error", "message"),
    [("amsgrad", ValueError, "amsgrad"), ("adagrad", TypeError, "Adagrad")],
)
def test_optimizers_without_a_twin_are_refused(
    tmp_path: Path, optimizer: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fit(str(tmp_path), optimizer=optimizer, max_epochs=1)


def test_hooks_that_lightning_leaves_out_are_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = QuantizedAllReduce()
    strategy = DDPStrategy(ddp_comm_state=state, ddp_comm_hook=quantized_all_reduce_hook)
    run = trainer(strategy, str(tmp_path), devices=1, plugins=[QuantizedPrecision()], max_epochs=1)
    with pytest.raises(ValueError, match=r"does nothing on CPUs.*register_comm_hook"):
        run.fit(TinyModule("adamw", 1e-2), loader())


YAML = """
trainer:
  plugins:
    - class_path: lq_lightning.plugins.QuantizedPrecision
      init_args:
        precision: bf16-mixed
        optimizer_state: {first_moment: dynamic8, min_numel: 256}
        gradient_buffer: fp8_e4m3
"""


def test_in_yaml(tmp_path: Path) -> None:
    quiet()
    (tmp_path / "a.yaml").write_text(YAML)
    options = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    arguments = [f"--config={tmp_path / 'a.yaml'}", *options]
    cli = LightningCLI(Wide, run=False, args=arguments, save_config_callback=None)
    plugin = cli.trainer.precision_plugin
    assert isinstance(plugin, QuantizedPrecision)
    assert plugin.precision == "bf16-mixed"
    assert plugin._states == OptimizerQuantization(first_moment="dynamic8", min_numel=256)
    assert plugin._buffer_code == "fp8_e4m3"


# --- tensor parallelism -------------------------------------------------------------------------


class _Sequences(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return tensor_models.batch(index, size=1)[0]


def _fit_parallel(root: str, sequence: bool, **options: Any) -> tuple[Any, list[float]]:
    losses = Losses()
    strategy = QuantizedFSDPStrategy(tensor_parallel_size=2, node_size=2, **SMALL)
    options |= {"devices": 4, "callbacks": [losses], "accumulate_grad_batches": 2}
    run = trainer(strategy, root, **options)
    run.fit(
        tensor_models.ParallelModule(sequence, width=64), DataLoader(_Sequences(), batch_size=4)
    )
    return run, losses.values


def _with_tensor_parallelism(rank: int, world: int, root: str) -> list[list[float]]:
    tensor_models.VOCABULARY = 128
    noisy = CodecSpec(code="int8", group_size=32, rounding="stochastic")
    found = []
    for sequence, precision in ((False, "bf16-true"), (True, "32-true")):
        states = OptimizerQuantization(
            quantize_embeddings=True, stochastic_rounding=precision == "bf16-true"
        )
        plugin = QuantizedPrecision(precision, states, noisy)  # type: ignore[arg-type]
        _, exact = _fit_parallel(root, sequence)
        run, losses = _fit_parallel(root, sequence, plugins=[plugin])
        found += [exact, losses]
        module, optimizer = run.lightning_module, run.optimizers[0]
        plan = {p.name for p in optimizer.quantization_plan() if p.reason is None}
        layers = {f"net.blocks.{i}.mlp.{side}.weight" for i in range(2) for side in ("up", "down")}
        assert plan == layers | {"net.embedding.weight", "net.head.weight"}
        copies = replicated_parameters(module)
        assert ("net.embedding.weight" in copies) != sequence
        group = module.device_mesh.get_group("tensor_parallel")
        for name, param in copies.items():
            for value in (param, *optimizer.state[param].values()):
                own = local_tensor(value.detach()).contiguous()
                every = [torch.empty_like(own) for _ in range(2)]
                dist.all_gather(every, own, group=group)
                assert torch.equal(*every), name
    return found


def test_tensor_parallel_ranks_stay_alike(tmp_path: Path) -> None:
    for found in run_trainer(_with_tensor_parallelism, 4, str(tmp_path)):
        for exact, losses in zip(found[::2], found[1::2], strict=True):
            assert losses == pytest.approx(exact, abs=0.05)
            assert exact[-1] < exact[0] - 0.7
