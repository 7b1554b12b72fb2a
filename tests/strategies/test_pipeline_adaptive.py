"""Pipelines whose boundaries travel in learned widths."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lq_testing.lightning_models import PLAIN, Losses, TinyModule, loader, run_trainer, trainer
from lq_testing.models import WIDTH
from torch import Tensor

from lq_lightning import AdaptiveBits, QuantizationMonitor, QuantizedPipelineStrategy
from lq_lightning.adaptive import BitGate
from lq_lightning.codecs.mixed import WidthTable

AMAQ: dict[str, Any] = {"forward_codec": "amaq", "backward_codec": "none", "num_microbatches": 4}
FAST: dict[str, Any] = {"learning_rate": 0.2, "beta": 0.1, "histogram_every_n_steps": 0}
SITE = "net.blocks.1.output"


@dataclass
class Seen:
    """Widths of the boundaries of this rank in every training batch, and the last metrics."""

    steps: list[dict[int, WidthTable]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class Tables(pl.Callback):
    def __init__(self) -> None:
        self.seen = Seen()

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.seen.steps.append(dict(trainer.strategy._run.codecs[0].tables))

    def on_train_end(self, trainer: Any, *args: Any) -> None:
        self.seen.metrics = {
            name: value.item()
            for name, value in trainer.callback_metrics.items()
            if name.startswith(("adaptive_bits/", "quant/bytes_boundary_t"))
        }


def _fit(
    root: str,
    devices: int,
    bits: Any,
    epochs: int = 1,
    path: str | None = None,
    callbacks: Any = (),
    module: Any = None,
    trainer_options: Any = None,
    **options: Any,
) -> Any:
    torch.manual_seed(0)
    losses, tables = Losses(), Tables()
    run = trainer(
        QuantizedPipelineStrategy(**{**AMAQ, **options}),
        root,
        devices=devices,
        callbacks=[losses, tables, *([] if bits is None else [bits]), *callbacks],
        max_epochs=epochs,
        **{"use_distributed_sampler": False, **(trainer_options or {})},
    )
    module = TinyModule(layers=4) if module is None else module
    run.fit(module, loader(48, batch_size=8), loader(8, batch_size=8), ckpt_path=path)
    return run, module, losses.values, tables.seen


# --- training -----------------------------------------------------------------------------------


def _trains(rank: int, world_size: int, root: str) -> Any:
    bits = AdaptiveBits(**FAST)
    monitor = QuantizationMonitor(every_n_steps=6)
    options = {"backward_codec": "bf16"}
    run, module, losses, tables = _fit(root, world_size, bits, 3, callbacks=[monitor], **options)
    traffic = run.strategy._run.engine.traffic
    seen = traffic.snapshot()
    run.validate(module, loader(8, batch_size=8), verbose=False)
    evaluated = traffic.since(seen).evaluation_bytes
    last = dict(run.strategy._run.codecs[0].tables)
    report = run.strategy.quantization_report()
    return losses, tables, last, evaluated, report, seen, bits.state_dict()


def _on_two_ranks(rank: int, world_size: int, root: str) -> dict[str, Any]:
    runs = (_trains, _frozen, _goes_on, _refused)
    return {run.__name__: run(rank, world_size, root) for run in runs}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each of these returned, by rank."""
    ranks = run_trainer(_on_two_ranks, 2, str(tmp_path_factory.mktemp("two")))
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def test_gates_train_and_both_ends_follow(runs: Any) -> None:
    ranks = runs["_trains"]
    (losses, tables, last, evaluated, report, seen, state), other = ranks
    assert losses == other[0]
    assert losses[-1] < 0.5 * losses[0]
    assert other[1].steps[1:] == tables.steps[1:]  # before the first step nothing was set
    assert other[2] == last
    assert tables.steps[0] == {}
    # sizes are those of the tables: 4 micro-batches of 2 samples of 8 tokens, 18 steps
    widths = [WidthTable([8] * WIDTH), *(step[0] for step in tables.steps[1:])]
    assert len(widths) == 18
    sizes = [4 * table.nbytes(16) for table in widths]
    assert report.counts["bytes_boundary_forward"] == sum(sizes)
    assert report.counts["bytes_boundary_tables"] == 18 * WIDTH // 2
    assert report.counts.keys() == other[4].counts.keys()
    values = 18 * 8 * 8 * WIDTH
    assert other[4].counts["bytes_boundary_backward"] == 2 * values
    sent = 8 * (sum(sizes) + 18 * WIDTH // 2)
    assert report.ratios["bits_per_hidden_value"] == (sent, values)
    assert seen.sent == sum(sizes) + 18 * WIDTH // 2 + seen.evaluation_bytes
    assert evaluated == 4 * last[0].nbytes(16)  # in the widths of the last step
    # the mean has come down, is held, and is that of the widths; their spread survives
    metrics = tables.metrics
    assert metrics.pop("quant/bytes_boundary_tables") == WIDTH // 2 / 2  # mean over ranks
    other[1].metrics.pop("quant/bytes_boundary_tables")
    assert metrics == other[1].metrics
    assert metrics.keys() == {f"adaptive_bits/{n}" for n in ("mean", "effective", SITE)}
    assert abs(metrics["adaptive_bits/mean"] - 4.0) <= 0.1 + 1e-3
    assert abs(metrics[f"adaptive_bits/{SITE}"] - metrics["adaptive_bits/mean"]) < 1e-5
    assert abs(last[0].mean - metrics["adaptive_bits/mean"]) <= 0.5 / WIDTH
    assert last[0].widths.unique().numel() > 1
    assert state["gates"]["net.blocks.1:output"]["state"].unique().numel() > 2
    assert metrics["adaptive_bits/effective"] > metrics["adaptive_bits/mean"]
    assert list(state["gates"]) == ["net.blocks.1:output"]
    assert state["reached"]
    assert other[6]["gates"].keys() == state["gates"].keys()


def _several(rank: int, world_size: int, root: str) -> Any:
    """Two pipelines of two ranks with several boundaries; other data in each."""
    found = []
    for schedule in ("zbv", "interleaved_1f1b"):
        bits = AdaptiveBits(**FAST)
        options: dict[str, Any] = {"schedule": schedule, "stages_per_rank": 2, "pipeline_size": 2}
        sampled = {"use_distributed_sampler": True, "accumulate_grad_batches": 2}
        run, _, losses, tables = _fit(
            root, world_size, bits, 2, trainer_options=sampled, **options, **PLAIN
        )
        found.append((losses, tables, bits.state_dict()))
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    return bool(one == other)


def test_replicas_and_several_boundaries(tmp_path: Path) -> None:
    ranks = run_trainer(_several, 4, str(tmp_path))
    expected = [["net.blocks.0:output", "net.blocks.2:output"]]
    expected.append(["net.blocks.0:output", "net.blocks.1:output", "net.blocks.2:output"])
    for run, names in enumerate(expected):
        found = [rank[run] for rank in ranks]
        losses = [each[0] for each in found]
        assert losses[0] == losses[2] != losses[1] == losses[3]  # pipelines see other data
        for _, tables, state in found[1:]:
            assert tables.steps == found[0][1].steps
            assert tables.metrics == found[0][1].metrics
            assert _same(state, found[0][2])
        assert list(found[0][2]["gates"]) == names
        means = [found[0][1].metrics[f"adaptive_bits/{name.replace(':', '.')}"] for name in names]
        mean = found[0][1].metrics["adaptive_bits/mean"]
        assert mean < 8.0
        assert abs(sum(means) / len(means) - mean) < 1e-5
        assert len(set(means)) > 1  # boundaries share bits


def _frozen(rank: int, world_size: int, root: str) -> list[float]:
    still = AdaptiveBits(target=8.0, beta=0.0, learning_rate=1e-9, histogram_every_n_steps=0)
    losses: list[float] = _fit(root, world_size, still, backward_codec="none")[2]
    return losses


def _int8_per_channel(module: Any, args: Any, x: Tensor) -> Tensor:
    lines = x.detach().view(4, 16, WIDTH)  # micro-batches, their tokens, channels
    low, high = lines.aminmax(dim=1, keepdim=True)
    step = (high - low) / 255
    rounded = low + step * ((lines - low) / step).round()
    return x + (rounded.view_as(x) - x.detach())


def test_eight_bits_that_stay_are_int8_per_channel(runs: Any, tmp_path: Path) -> None:
    found = runs["_frozen"][0]
    expected = []
    for quantized in (True, False):
        torch.manual_seed(0)
        module, losses = TinyModule(layers=4), Losses()
        if quantized:
            module.net.blocks[1].register_forward_hook(_int8_per_channel)
        run = trainer("auto", str(tmp_path), devices=1, callbacks=[losses])
        run.fit(module, loader(48, batch_size=8))
        expected.append(losses.values)
    int8, exact = expected
    torch.testing.assert_close(found, int8, rtol=2e-3, atol=0)
    assert found != int8 != exact


class _Stops(pl.Callback):
    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, i: int
    ) -> None:
        if i == 2:
            raise KeyError("a user's error")


def _goes_on(rank: int, world_size: int, root: str) -> Any:
    """Bits after an error, in an evaluation after it, and at the end of another fit."""
    bits, module = AdaptiveBits(**FAST), TinyModule(layers=4)
    with pytest.raises(KeyError):
        _fit(root, world_size, bits, module=module, callbacks=[_Stops()])
    run, *_ = _fit(root, world_size, bits, 0, module=module)
    run.validate(module, loader(8, batch_size=8), verbose=False)
    kept = dict(run.strategy._run.codecs[0].tables)
    seen = _fit(root, world_size, bits, module=module)[3]
    return kept, seen.steps[0], list(bits.gates)


def test_another_fit_goes_on_where_an_error_was(runs: Any) -> None:
    for kept, first, gates in runs["_goes_on"]:
        assert kept == first == runs["_goes_on"][0][0]
        assert kept[0].mean < 7.5
        assert gates == [SITE.replace(".output", ":output")]  # on both ranks, after the run


# --- checkpoints --------------------------------------------------------------------------------


def _names(state: dict[str, Any]) -> list[str]:
    return list(state["gates"])


def _resumes(rank: int, world_size: int, root: str) -> Any:
    """A run that is resumed goes on as the one that was not interrupted, gates and all."""
    whole = AdaptiveBits(**FAST)
    _, _, losses, tables = _fit(root, world_size, whole, 2)
    for full in (False, True):
        options = {"save_distributed_checkpoint": not full}
        first = AdaptiveBits(**FAST)
        run, *_ = _fit(root, world_size, first, 1, **options)
        run.save_checkpoint(f"{root}/full{full}.ckpt")
        second = AdaptiveBits(**FAST)
        _, _, again, after = _fit(root, world_size, second, 2, f"{root}/full{full}.ckpt", **options)
        assert again == losses[6:]
        assert after.steps == tables.steps[6:]
        assert _same(second.state_dict(), whole.state_dict())
    return _names(whole.state_dict()), _restarts(rank, world_size, root)


def _restarts(rank: int, world_size: int, root: str) -> Any:
    """What runs with other stages begin with, and what they say."""
    found = []
    for options in ({"schedule": "interleaved_1f1b", "stages_per_rank": 2}, {"split": [3, 1]}):
        bits = AdaptiveBits(**FAST)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _, _, losses, seen = _fit(root, world_size, bits, 2, f"{root}/fullTrue.ckpt", **options)
        heard = [str(w.message) for w in caught if "AdaptiveBits: widths" in str(w.message)]
        found.append((losses, seen.steps[0], bits.state_dict(), heard))
    return found


def test_checkpoints(tmp_path: Path) -> None:
    root = str(tmp_path)
    (names, (first, moved)), (_, (other, _)) = run_trainer(_resumes, 2, root)
    assert names == ["net.blocks.1:output"]
    saved = torch.load(f"{root}/fullTrue.ckpt", weights_only=True)["callbacks"]
    (state,) = [each for each in saved.values() if "gates" in each]
    kept, mean = state["gates"]["net.blocks.1:output"]["state"], state["mean"]
    losses, steps, after, heard = first  # four stages
    assert losses == other[0]
    assert _names(after) == [f"net.blocks.{index}:output" for index in range(3)]
    assert steps == other[1]
    config = AdaptiveBits(**FAST).config
    gate = BitGate(config, WIDTH)
    gate.state = kept
    assert steps[1] == gate.table()  # where it was before
    for new in (0, 2):
        assert abs(steps[new].mean - mean) <= 0.5 / WIDTH
        assert steps[new].widths.unique().numel() <= 2
    (message,) = heard
    assert "widths of 'net.blocks.0:output', 'net.blocks.2:output', where no boundary" in message
    assert f"{mean:.2f} bits" in message
    # and three of four layers on the first stage
    _, steps, after, heard = moved
    assert _names(after) == ["net.blocks.2:output"]
    assert any("'net.blocks.1:output' are dropped" in message for message in heard)


# --- what is refused ----------------------------------------------------------------------------


def _refused(rank: int, world_size: int, root: str) -> list[str]:
    heard = []
    cases: list[tuple[Any, dict[str, Any]]] = [
        (None, {}),
        (AdaptiveBits(), {"forward_codec": "tah5"}),
        (AdaptiveBits(sites="layers"), {}),
        (AdaptiveBits(target=4.0 - rank), {}),
    ]
    for bits, options in cases:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            _fit(root, world_size, bits, **options)
        heard.append(str(caught.value))
    bits = AdaptiveBits(**FAST)
    run, *_ = _fit(root, world_size, bits, save_distributed_checkpoint=False)
    run.save_checkpoint(f"{root}/saved.ckpt")
    saved = torch.load(f"{root}/saved.ckpt", weights_only=True)
    (state,) = [each for each in saved["callbacks"].values() if "gates" in each]
    entry = state["gates"]["net.blocks.1:output"]
    entry["state"] = entry["state"][:, :16]
    torch.save(saved, f"{root}/narrow{rank}.ckpt")
    for path, options in ((f"narrow{rank}", {}), ("saved", {"max_bits": 12.0})):
        bits = AdaptiveBits(**{**FAST, **options})
        with pytest.raises(ValueError, match="boundary 0|max_bits") as refused:
            _fit(root, world_size, bits, 2, f"{root}/{path}.ckpt")
        heard.append(str(refused.value))
    return heard


def test_what_is_refused(runs: Any) -> None:
    for heard in runs["_refused"]:
        missing, other, sites, target, hidden, most = heard
        assert '`QuantizedPipelineStrategy(forward_codec="amaq")` sends' in missing
        assert "add `lq_lightning.AdaptiveBits()` to its callbacks" in missing
        assert "`AdaptiveBits` learns" in other
        assert "(forward_codec='tah5')` sends that otherwise: set forward_codec=\"amaq\"" in other
        assert "`AdaptiveBits(sites=['layers'])`: in a pipeline" in sites
        assert "`AdaptiveBits` is AdaptiveBitsConfig(target=4.0" in target
        assert "on rank 0, AdaptiveBitsConfig(target=3.0" in target
        assert "boundary 0 are those of 16 channels, but hidden states have 24" in hidden
        assert "the saved gates have `max_bits=16.0`" in most
