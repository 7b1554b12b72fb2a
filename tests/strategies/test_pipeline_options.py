"""Options of pipelines, and what is refused before the first step."""

from __future__ import annotations

import functools
import pickle
import re
import warnings
from typing import Any, cast, get_args
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.strategies import StrategyRegistry
from lq_testing.lightning_models import TinyModule, loader, run_trainer, trainer
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from lq_lightning import QuantizedFSDPStrategy, QuantizedPipelineStrategy
from lq_lightning.codecs import CodecSpec
from lq_lightning.data_parallel import GradientQuantization
from lq_lightning.pipeline import boundary
from lq_lightning.strategies.pipelines.options import PipelineOptions
from lq_lightning.strategies.pipelines.stages import SharedTensor, describe_shared, stage_topology
from lq_lightning.strategies.quantized_pipeline import BackwardName, ForwardName

NONE = {"forward_codec": "none", "backward_codec": "none"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "2f2b"}, "schedule='2f2b'"),
        ({"pipeline_size": 0}, "pipeline_size=0"),
        ({"pipeline_size": 4, "num_microbatches": 3}, "num_microbatches=3.* is too few"),
        ({"pipeline_size": 2, "stages_per_rank": 2}, "stages_per_rank=2.* with `schedule='1f1b'`"),
        ({"split": "time"}, "split='time'.*measure_times"),
        ({"forward_codec": "int9"}, "int9"),
        *(({"backward_codec": name}, f"={name!r}") for name in ("aq_sgd", "tah5", "amaq")),
        ({"backward_codec": CodecSpec(code="int4", group_size=16)}, "rounding='stochastic'"),
        ({"reshard_after_forward": True}, "reshard_after_forward=True"),
        (
            {"schedule": "zbv", "stages_per_rank": 2, "compile_units": True},
            "compiled graphs do not",
        ),
        ({"num_microbatches": True}, "num_microbatches=True"),
    ],
)
def test_values_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizedPipelineStrategy(**options)


def test_unknown_options_are_named() -> None:
    with pytest.raises(TypeError, match="has no option `stages=3`.*pipeline_size"):
        QuantizedPipelineStrategy(stages=3)
    with pytest.raises(TypeError, match=r"`forward_codec=AQSGDQuantization\(cache_nbytes=3\)`"):
        QuantizedPipelineStrategy(cache_nbytes=3)
    with pytest.raises(TypeError, match=r"no option `local_steps=4`.*pipeline_size, .*, weights"):
        QuantizedPipelineStrategy(local_steps=4)


class _Own(QuantizedPipelineStrategy):
    def __init__(self, **options: Any) -> None:
        super().__init__(pipeline_size=2, **options)


def test_unknown_options_of_subclasses_are_named() -> None:
    assert _Own(weights="none").given == {"weights": "none"}
    with pytest.raises(TypeError, match="`QuantizedPipelineStrategy` has no option `weightz=3`"):
        _Own(weightz=3)


@pytest.mark.parametrize("strategy", [QuantizedFSDPStrategy, QuantizedPipelineStrategy])
def test_can_be_pickled(strategy: type[QuantizedFSDPStrategy]) -> None:
    copied = pickle.loads(pickle.dumps(strategy(weights="none", seed=3)))
    assert copied.given == {"weights": "none", "seed": 3}


def test_registered() -> None:
    assert StrategyRegistry["quantized_pipeline"]["strategy"] is QuantizedPipelineStrategy


def test_pipeline_has_to_divide_the_world() -> None:
    run = trainer(QuantizedPipelineStrategy(pipeline_size=2), ".", devices=1)
    with pytest.raises(ValueError, match=r"pipeline_size=2.* does not divide the 1 ranks"):
        run.fit(TinyModule(), loader())


@pytest.mark.parametrize(
    ("pipeline", "tensor", "found"),
    [
        (None, 2, 4),
        (2, 2, 2),
        (3, 2, r"pipeline_size=3.* the 4 groups of 2 tensor-parallel ranks .*: \[1, 2, 4\]"),
        (2, 3, r"tensor_parallel_size=3.* does not divide the 8 ranks of the run:"),
        (8, 2, r"pipeline_size=8.* does not divide the 4 groups"),
    ],
)
def test_sizes_of_axes(pipeline: int | None, tensor: int, found: int | str) -> None:
    options = _options(pipeline_size=pipeline)
    if isinstance(found, int):
        assert options.size("Strategy", 8, tensor) == found
        return
    with pytest.raises(ValueError, match=found):
        options.size("Strategy", 8, tensor)


def test_one_rank_is_a_plain_run(tmp_path: Any) -> None:
    with (
        mock.patch("lq_lightning.strategies.quantized_pipeline.rank_zero_info") as info,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("error", message=".*has no effect")
        run = trainer(QuantizedPipelineStrategy(), str(tmp_path), devices=1)
        run.fit(TinyModule(), loader())
    assert "one rank along the pipeline the model is not cut" in info.call_args.args[0]
    assert run.strategy.pipeline is None
    assert run.strategy.quantization_report() is None


def test_one_rank_names_options_without_effect(tmp_path: Any) -> None:
    options = {"weights": "qWD", "replica": "node", "on_drift": "resync"}
    options["gradients"] = GradientQuantization(vocabulary_bits=8)
    options["tensor_parallel"] = "auto"
    pipeline = {"schedule": "gpipe", "forward_codec": "int8", "backward_codec": "none"}
    strategy = QuantizedPipelineStrategy(None, **pipeline, **options)
    with pytest.warns(UserWarning, match="has no effect") as caught:
        trainer(strategy, str(tmp_path), devices=1).fit(TinyModule(), loader(8))
    messages = [str(w.message) for w in caught if "has no effect" in str(w.message)]
    given = "weights='qWD', gradients=GradientQuantization(vocabulary_bits=8), replica='node'"
    boundaries = "schedule='gpipe', forward_codec='int8'"
    assert messages == [
        f"`QuantizedPipelineStrategy({given})` has no effect: there is one rank, which sends "
        "nothing.",
        "`QuantizedPipelineStrategy(tensor_parallel='auto')` has no effect: `tensor_parallel_size` "
        "is 1.",
        f"`QuantizedPipelineStrategy({boundaries})` has no effect: with one rank along the "
        "pipeline the model is not cut, and nothing crosses stages.",
    ]


def _options(**given: Any) -> PipelineOptions:
    defaults = {"pipeline_size": None, "schedule": "1f1b", "num_microbatches": None}
    defaults |= {"stages_per_rank": 1, "split": "parameters", "trunk": None, **NONE}
    defaults["tied_gradients"] = "auto"
    return PipelineOptions(**{**defaults, **given})


@pytest.mark.parametrize(
    ("schedule", "size", "batch", "count"),
    [
        ("1f1b", 2, 16, 8),
        ("1f1b", 2, 7, 7),
        ("1f1b", 4, 20, 10),
        ("1f1b", 2, 22, 2),
        ("gpipe", 4, 3, 3),
        ("interleaved_1f1b", 4, 24, 12),
        ("interleaved_1f1b", 4, 10, 10),
    ],
)
def test_number_of_microbatches(schedule: str, size: int, batch: int, count: int) -> None:
    several = 2 if schedule.startswith("inter") else 1
    options = _options(schedule=schedule, stages_per_rank=several)
    assert options.microbatches_of(batch, size, training=True) == count


def test_batches_that_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match=r"6 samples cannot .* `num_microbatches=4`.*\[2, 3, 6\]"):
        _options(num_microbatches=4).microbatches_of(6, 2, training=True)
    assert _options(num_microbatches=4).microbatches_of(6, 2, training=False) == 3
    with pytest.raises(ValueError, match=r"a batch of 3 samples cannot .* multiple of 4"):
        _options().microbatches_of(3, 4, training=True)
    with pytest.raises(ValueError, match="without samples"):
        _options().microbatches_of(0, 2, training=False)


@pytest.mark.parametrize(
    ("world", "pipeline", "per_node", "node_size"),
    [(16, 2, 8, 8), (16, 4, 8, 4), (32, 2, 8, 8), (24, 2, 8, 4), (6, 2, 8, 1), (8, 2, 2, 2)],
)
def test_nodes_of_a_stage(world: int, pipeline: int, per_node: int, node_size: int) -> None:
    topology = stage_topology(world, world - 1, pipeline, per_node)
    assert topology.node_size == node_size
    assert (topology.world_size, topology.rank) == (world // pipeline, world // pipeline - 1)


def _names(literal: Any) -> set[Any]:
    """Values of a `Literal`, or of a union of them."""
    return {n for each in get_args(literal) for n in (_names(each) if get_args(each) else [each])}


def test_types_have_the_names_of_all_codecs() -> None:
    assert _names(BackwardName) == set(boundary._GRADIENTS)
    assert _names(ForwardName) == set(boundary._HIDDEN_STATES)


def test_unknown_codecs_name_the_option() -> None:
    classes = "or give a `CodecSpec`"
    with pytest.raises(ValueError, match=rf"Strategy\(backward_codec='int9'\).*'int8', {classes}"):
        QuantizedPipelineStrategy(backward_codec="int9")  # type: ignore[arg-type]
    classes = "a `TAHQuantization`, an `AQSGDQuantization` or a `CodecSpec`"
    with pytest.raises(ValueError, match=rf"Strategy\(forward_codec='tah6'\).*{classes}"):
        QuantizedPipelineStrategy(forward_codec="tah6")  # type: ignore[arg-type]


# --- refused on two ranks -----------------------------------------------------------------------


class Manual(TinyModule):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False


class OwnBackward(TinyModule):
    def backward(self, loss: Tensor, *args: Any) -> None:
        loss.backward()


class Iterates(TinyModule):
    def training_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        pass


class ClipsPart(TinyModule):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class Lbfgs(TinyModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class NoLoss(TinyModule):
    def training_step(self, tokens: Tensor, batch_idx: int) -> Any:
        self.net(tokens)


class Raises(TinyModule):
    """In front of the layers, where the first stage looks for the hidden state's shape."""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Any:
        raise ValueError("no such tokens")


class Compiled(TinyModule):
    """One layer looks as after ``layer.forward = torch.compile(layer.forward)``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        layer = self.net.blocks[0]
        layer.forward = functools.partial(layer.forward)
        layer.forward._torchdynamo_orig_callable = layer.forward


class Beside(TinyModule):
    """Hands embeddings to its last layer behind the back of everyone."""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Any:
        embedded = [self.net.embed(tokens)]
        layer = self.net.blocks[-1]
        if hasattr(layer, "norm"):
            layer.norm.forward = lambda x: x + embedded[0]
        return super().training_step(tokens, batch_idx)


class OverStages(TinyModule):
    """Shards over ranks that hold other layers, which never gather with this one."""

    def configure_model(self) -> None:
        fully_shard(self.net.blocks[0])


class FrozenStage(TinyModule):
    """Trains what the last stage has."""

    def configure_optimizers(self) -> Any:
        self.net.requires_grad_(False)
        self.net.head.requires_grad_(True)
        return torch.optim.AdamW(p for p in self.parameters() if p.requires_grad)


class RaisesAnything(TinyModule):
    """As a lack of memory would."""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Any:
        raise IndexError("past the end")


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (Manual, {}, "manual optimization"),
    (OwnBackward, {}, "`OwnBackward.backward` is overridden"),
    (Iterates, {}, "dataloader_iter"),
    (Lbfgs, {}, "LBFGS"),
    (FrozenStage, {}, r"the stages of a rank have none.* all of `self.parameters\(\)`"),
    (OverStages, {}, r"over the ranks \[0, 1\], but .* the ranks \[[01]\], in this order"),
    (ClipsPart, {}, r"call `self.clip_gradients\(optimizer"),
    (TinyModule, {"layers": 1}, "has 1 layer, fewer than the 2 stages"),
    (TinyModule, {"split": [2, 0]}, "leaves stage 1 without layers"),
    (TinyModule, {"units": ["Block", "Bloc"]}, r"of class \['Bloc'\].*Block, Embedding, LayerNorm"),
    (TinyModule, {"forward_codec": "tah"}, "tiles of 64 channels.*24"),
    (TinyModule, {"num_microbatches": 3}, "batch of 8 samples cannot be cut"),
    (Compiled, {"schedule": "zero_bubble"}, r"blocks\.0` is compiled. Use '1f1b'"),
    (NoLoss, {}, "returning None in distributed training"),
    (Raises, {}, "^no such tokens$"),
    (
        RaisesAnything,
        {},
        "^past the end$|`training_step` failed on the first stage: IndexError: past",
    ),
    # before a batch, whose step would fail
    (Raises, {"forward_codec": "tah5"}, "tiles of 64 channels.* have 24 .*a tile of 8 "),
]


class Table(ModelSummary):
    """Keeps the sums below the table."""

    sums: tuple[Any, ...] = ()

    @staticmethod
    def summarize(data: Any, total: int, trained: int, size: float, *a: Any, **kw: Any) -> None:
        Table.sums = total, trained, size


def _refuse(rank: int, world_size: int, root: str) -> list[str]:
    messages = []
    for module, options, _ in REFUSED:
        torch.manual_seed(0)
        model = module(layers=options.get("layers", 2))
        given = {key: value for key, value in options.items() if key != "layers"}
        run = trainer(QuantizedPipelineStrategy(**{**NONE, **given}), root, devices=world_size)
        with pytest.raises((NotImplementedError, ValueError, RuntimeError, IndexError)) as raised:
            run.fit(model, loader(16, batch_size=8))
        messages.append(str(raised.value))
    unused = {"tied_gradients": "int4", "weights": "qWD", "gradients": "none"}
    strategy, table = QuantizedPipelineStrategy(**NONE, **unused), [Table()]
    run = trainer(strategy, root, devices=world_size, callbacks=table, enable_model_summary=True)
    info = "lq_lightning.strategies.quantized_pipeline.rank_zero_info"
    with warnings.catch_warnings(record=True) as caught, mock.patch(info) as said:
        warnings.simplefilter("always")
        run.fit(Beside(layers=2), loader(8, batch_size=8))
    numel = sum(p.numel() for p in Beside(layers=2).parameters())
    assert Table.sums == ((numel, numel, pytest.approx(numel * 4e-6)) if rank == 0 else ())
    assert rank or "summarize" not in vars(table[0]), "another Trainer would show these sums"
    for warning in (
        "`Beside.training_step` uses something made in front",
        r"Strategy\(tied_gradients='int4'\)` has no effect: no weights of .* are on several ranks",
        r"Strategy\(weights='qWD'\)` has no effect: each stage is on one rank",
    ):
        assert any(re.search(warning, str(w.message)) for w in caught) == (rank == 0), warning
    tied = describe_shared(run.strategy._shared, "int4")
    assert tied.startswith("gradients of `net.tiny` travel in full precision")
    assert mock.call(tied) in said.mock_calls
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    assert torch.nn.utils.clip_grad_norm_([weight], 1.0) == 2.0  # elsewhere it is as ever
    return messages


def test_refused_on_every_rank(tmp_path: Any) -> None:
    for messages in run_trainer(_refuse, 2, str(tmp_path)):
        for (_, _, pattern), message in zip(REFUSED, messages, strict=True):
            assert re.search(pattern, message), (pattern, message)


def test_codes_of_tied_gradients_are_named() -> None:
    codec = _options(backward_codec="int5").tied_codec()
    shared = [SharedTensor("net.embed.weight", None, cast(Any, None), codec)]
    told = "`net.embed.weight` travel in int8 between the ranks that hold it (tied_gradients='auto'"
    assert told in describe_shared(shared, "auto")
