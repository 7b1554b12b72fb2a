"""Embeddings and heads: how they are found, their codecs and gradients, and what users are told."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lq_testing import run_ranks
from lq_testing.cases import on_gpus, on_ranks, rank_tests
from lq_testing.devices import device
from lq_testing.fsdp2 import pretend_ranks
from lq_testing.lightning_models import TinyModule, loader, trainer
from lq_testing.vocabulary import (
    COARSE,
    FINE,
    POSITIONS,
    VOCAB,
    WIDTH,
    VocabularyModel,
    build_vocabulary,
)
from torch import Tensor, nn

from lq_lightning import QuantizedFSDPStrategy
from lq_lightning.codecs import CodecSpec
from lq_lightning.data_parallel import (
    GradientQuantization,
    QuantizedCommunication,
    WeightQuantization,
    embedding_params,
)
from lq_lightning.data_parallel.config import VOCABULARY_BITS
from lq_lightning.data_parallel.unit import (
    MessageLayout,
    Run,
    Segment,
    keep_small_runs_exact,
    merge_over_small_gaps,
    segment_runs,
)
from lq_lightning.foundation.topology import Level


def names(module: nn.Module) -> list[str]:
    found = {id(p) for p in embedding_params(module)}
    return [name for name, p in module.named_parameters() if id(p) in found]


# --- which parameters -----------------------------------------------------------------------------


def test_embeddings_and_heads_are_found() -> None:
    assert names(VocabularyModel()) == ["tokens.weight", "positions.weight", "head.weight"]
    assert names(VocabularyModel(tied=True)) == ["tokens.weight", "positions.weight"]
    assert names(nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 4))) == ["0.weight"]


def test_a_head_may_be_of_any_class() -> None:
    model = nn.Module()
    model.table = nn.Embedding(64, 8)
    model.head = nn.Parameter(torch.zeros(64, 16))  # of another width, as in ALBERT
    model.transposed = nn.Parameter(torch.zeros(8, 64))
    model.scores = nn.Parameter(torch.zeros(64, 4, 2))
    model.bias = nn.Parameter(torch.zeros(64))
    assert names(model) == ["head", "transposed", "table.weight"]


def test_adapters_of_embeddings_and_heads_are_found() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Module()
    model.words, model.inner = nn.Embedding(64, 8), nn.Linear(8, 32)
    model.scores = nn.Linear(8, 64)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["words", "inner", "scores"])
    )
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert {name.removeprefix("base_model.model.") for name in trained & set(names(adapted))} == {
        "words.lora_embedding_A.default",
        "scores.lora_B.default.weight",
    }


def test_a_vocabulary_as_small_as_the_model_is_wide_has_no_heads() -> None:
    model = nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 32), nn.Linear(48, 32))
    assert names(model) == ["0.weight"]
    assert names(nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4))) == []


# --- codecs and messages --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "level", "bits", "given", "code", "of_vocabulary"),
    [
        ("TLq-HS", "intra", 2, 6, "int8", "int8"),
        ("TLq-HS", "inter", 2, 6, "int2", "int6"),
        ("TLq", "inter", 2, 6, "int2", "int6"),
        ("ULq", "intra", 2, 6, "int2", "int6"),
        ("ULq", "inter", 2, 6, "int2", "int6"),
        ("QuanGrad", "inter", 2, 6, "int8", "int8"),
        ("TLq-HS", "inter", 4, "auto", "int4", f"int{VOCABULARY_BITS}"),
        ("TLq-HS", "inter", 8, "auto", "int8", "int8"),
        ("TLq", "inter", 2, "auto", "int2", f"int{VOCABULARY_BITS}"),
        ("ULq", "inter", 4, "auto", "int4", "int4"),
        ("QuanGrad", "inter", 4, "auto", "int8", "int8"),
        ("TLq-HS", "inter", 4, None, "int4", "int4"),
        ("TLq-HS", "inter", 8, 3, "int8", "int3"),
    ],
)
def test_codecs(
    method: Any, level: Level, bits: int, given: Any, code: str, of_vocabulary: str
) -> None:
    config = GradientQuantization(method=method, inter_bits=bits, vocabulary_bits=given)
    assert config.codec(level).code == code
    assert config.codec(level, vocabulary=True).code == of_vocabulary
    assert config.separates_vocabulary([level]) == (code != of_vocabulary)
    shared = GradientQuantization(method=method, vocabulary_bits=None)
    assert not shared.separates_vocabulary(["intra", "inter"])
    assert GradientQuantization().vocabulary_bits == "auto"


@pytest.mark.parametrize("bits", [1, 9, 0, True, 6.0, "six"])
def test_bits_are_checked(bits: Any) -> None:
    message = rf'vocabulary_bits={bits!r}\)` is not supported.*2 to 8 bits, or give "auto" or None'
    with pytest.raises(ValueError, match=message):
        GradientQuantization(vocabulary_bits=bits)


SPECS = [CodecSpec(code=code, group_size=16) for code in ("int2", "int8")]


def test_runs_have_one_codec() -> None:
    segments = [
        Segment("table", 0, 640, "quantized", codec=1),
        Segment("scale", 640, 1, "full", "1-D", codec=1),
        Segment("a", 641, 640, "quantized"),
        Segment("norm", 1281, 4, "full", "1-D"),
        Segment("b", 1285, 320, "quantized"),
        Segment("head", 1605, 320, "quantized", codec=1),
        Segment("norm", 1925, 4, "full", "1-D", codec=1),
        Segment("bias", 1929, 4, "full", "1-D"),
        Segment("heads", 1933, 640, "quantized", codec=1),
    ]
    runs = merge_over_small_gaps(segment_runs(segments))
    assert runs == [
        Run(0, 640, True, codec=1),
        Run(640, 1, False),
        Run(641, 964, True, (Run(1281, 4, False),)),
        Run(1605, 968, True, (Run(1925, 8, False),), codec=1),
    ]
    layout = MessageLayout(runs, SPECS, torch.float32)
    coarse, fine = SPECS
    assert [layout.spec_of(run) for _, run in layout.quantized] == [fine, coarse, fine]
    expected = [fine.nbytes(640), 0, coarse.nbytes(964), fine.nbytes(968)]
    assert layout.codes_nbytes == sum(expected)
    message = layout.allocate(1, device=torch.device("cpu"))
    assert [layout.part(message, index).shape[1] for index in range(4)] == expected


def test_what_codes_do_not_make_smaller_is_judged_by_its_own_codec() -> None:
    segments = [Segment("a", 0, 20, "quantized"), Segment("table", 20, 20, "quantized", codec=1)]
    kept = keep_small_runs_exact(segments, SPECS, 2)
    assert [spec.nbytes(20) for spec in SPECS] == [32, 48]
    assert [s.wire_format for s in kept] == ["quantized", "full"]


# --- what users are told --------------------------------------------------------------------------


def test_the_plan_names_them() -> None:
    pretend_ranks(2)
    plan = build_vocabulary(FINE, 1)[1].plan
    found = [t.name for t in plan.vocabulary]
    assert found == ["tokens.weight", "positions.weight", "head.weight"]
    assert "int2 between 2 nodes of one rank, int8 there for embeddings and heads" in plan.summary()
    named = "3 tensors, 21,504 elements (tokens.weight, positions.weight, head.weight)"
    assert f"or of their shape: {named}; `GradientQuantization(vocabulary_bits=None)`" in (
        plan.summary()
    )
    tied = build_vocabulary(FINE, 1, tied=True)[1].plan
    assert "(head.weight tied to tokens.weight, positions.weight);" in tied.summary()
    more = [plan.vocabulary[0]._replace(name=name) for name in "abcdefgh"]
    assert "(a, b, c, d, e, f, g, h);" in plan._replace(tensors=tuple(more)).summary()
    large = build_vocabulary(FINE, 1, min_quantized_numel=VOCAB * WIDTH + 1)[1]
    assert large.plan.vocabulary == ()
    assert "embeddings" not in large.plan.summary()  # which has no line of theirs
    default = build_vocabulary(GradientQuantization(), 1)[1].plan
    assert f"one rank, int{VOCABULARY_BITS} there for embeddings and heads" in default.summary()
    assert default.vocabulary == plan.vocabulary


@pytest.mark.parametrize(
    ("node_size", "config"),
    [
        (1, GradientQuantization(vocabulary_bits=4)),
        (2, GradientQuantization(vocabulary_bits=6)),
        (1, GradientQuantization(method="QuanGrad", vocabulary_bits=6)),
    ],
)
def test_equal_bits_change_nothing(node_size: int, config: GradientQuantization) -> None:
    """Messages are those without the option, and nobody hears of it."""
    pretend_ranks(2)
    plain = replace(config, vocabulary_bits=None)
    segments, summaries = [], []
    for each in (config, plain):
        _, communication = build_vocabulary(each, node_size)
        (unit,) = communication._units
        assert unit.scatter is not None
        segments.append(unit.scatter.segments())
        summaries.append(communication.plan.summary())
        assert communication.plan.vocabulary == ()
    assert segments[0] == segments[1]
    assert summaries[0] == summaries[1]


class WithoutEmbedding(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.net.embed = nn.Sequential()  # type: ignore[assignment]
        self.table = nn.Parameter(torch.randn(31, 24))
        self.net.embed.forward = lambda tokens: self.table[tokens]  # type: ignore[method-assign]


def _warns(rank: int, world: int, root: str) -> None:
    def fit(module: TinyModule, config: GradientQuantization, message: str, **options: Any) -> None:
        strategy = QuantizedFSDPStrategy(gradients=config, **{"min_quantized_numel": 64, **options})
        runner: Trainer = trainer(strategy, root)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runner.fit(module, loader(8))
        told = [str(w.message) for w in caught if "has no effect" in str(w.message)]
        assert len(told) == (rank == 0 and bool(message)), told
        assert all(re.search(message, text) for text in told)
        alarmed = any("of trained elements are sent" in str(w.message) for w in caught)
        assert alarmed == (rank == 0 and "min_quantized_numel" in options)

    eight = GradientQuantization(vocabulary_bits=8)
    fit(WithoutEmbedding(), eight, "vocabulary_bits=8.*no trained embedding", node_size=1)
    fit(TinyModule(), eight, "vocabulary_bits=8.*TLq-HS.*the same bits on this topology")
    fit(TinyModule(), eight, "", node_size=1)
    alone: dict[str, Any] = {"node_size": 1, "local_steps": 2, "weights": "qWD"}
    given = r"weights='qWD', gradients=GradientQuantization\(vocabulary_bits=8\)\)` has no effect"
    fit(TinyModule(), eight, f"{given}: every node is one rank", **alone)
    config = WeightQuantization(bits=3)
    for weights, why in ((config, "brings its own"), ("none", "keeps replicas")):
        message = rf"Strategy\(replica='node'\)` has no effect.*{why}"
        fit(TinyModule(), GradientQuantization(), message, weights=weights, replica="node")
    fit(WithoutEmbedding(), GradientQuantization(), "", node_size=1, min_quantized_numel=2000)


def test_options_without_effect_are_named(tmp_path: Any) -> None:
    run_ranks(_warns, 2, str(tmp_path), backend=None, torchrun=True)


def gradients(model: VocabularyModel, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(VOCAB, (8, POSITIONS), generator=generator).to(device())
    (model(tokens) * scale).backward()
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad.full_tensor().float()
    model.zero_grad()
    return found


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    return {n: float((found[n] - exact[n]).norm() / exact[n].norm()) for n in exact}


def _inter_nbytes(communication: QuantizedCommunication, dtype: torch.dtype) -> int:
    """What one reduction of each unit sends to one other node."""
    total = 0
    for unit in communication._units:
        assert unit.scatter is not None
        numel = sum(s.numel for s in unit.scatter.segments())
        packed = tuple(range(len(unit.scatter.unit.names)))
        total += unit.scatter.layouts_of(packed, numel, dtype).inter.nbytes
    return total


def _reduces(
    rank: int, world: int, node_size: int, dtype: torch.dtype, apart: bool, tied: bool
) -> None:
    options: dict[str, Any] = {"dtype": dtype, "apart": apart, "tied": tied}
    exact = gradients(build_vocabulary(None, node_size, **options)[0])
    found, nbytes = {}, {}
    for config in (COARSE, FINE):
        model, communication = build_vocabulary(config, node_size, **options)
        found[config] = errors(gradients(model), exact)
        nbytes[config] = communication.traffic().gradients_inter
        others = world // node_size - 1
        assert nbytes[config] == others * _inter_nbytes(communication, dtype)
    fine_numel = (2 - tied) * VOCAB * WIDTH + POSITIONS * WIDTH
    more = nbytes[FINE] - nbytes[COARSE]
    assert more == pytest.approx(fine_numel * 6 / 8 * others / world, rel=0.02)
    bf16 = dtype == torch.bfloat16
    for name, error in found[FINE].items():
        if exact[name].ndim < 2:
            assert error < (2e-2 if bf16 else 1e-5), (name, error)
        elif name in ("tokens.weight", "positions.weight", "head.weight"):
            assert 1e-3 < error < (0.02 if bf16 or node_size > 1 else 0.01), (name, error)
            assert found[COARSE][name] > 0.2, (name, found[COARSE])
        else:
            assert error > 0.2, (name, error)


def _one_level(rank: int, world: int) -> None:
    """ULq has the same codec on both levels, so those of the vocabulary differ on both."""
    exact = gradients(build_vocabulary(None, 2)[0])
    config = GradientQuantization(method="ULq", vocabulary_bits=8)
    for name, error in errors(gradients(build_vocabulary(config, 2)[0]), exact).items():
        if name in ("tokens.weight", "positions.weight", "head.weight"):
            assert 1e-3 < error < 0.02, (name, error)
        elif exact[name].ndim > 1:
            assert error > 0.05, (name, error)


test_on_ranks = rank_tests(
    on_ranks(_reduces, 2, 1, torch.bfloat16, True, False),
    on_ranks(_reduces, 3, 1, torch.float32, False, False),
    on_ranks(_reduces, 4, 2, torch.float32, False, True),
    on_ranks(_one_level, 4),
    on_gpus(_reduces, 2, 1, torch.float32, False, False),
    on_gpus(_reduces, 4, 2, torch.float32, False, False),
)
