"""Embeddings and heads whose gradients have bits of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lq_testing import run_ranks
from lq_testing.devices import device
from lq_testing.lightning_models import TinyModule, loader, trainer
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from lq_lightning import QuantizedFSDPStrategy
from lq_lightning.codecs import CodecSpec
from lq_lightning.data_parallel import (
    GradientQuantization,
    QuantizedCommunication,
    Topology,
    quantize_communication,
    vocabulary_weights,
)
from lq_lightning.data_parallel.layout import (
    MessageLayout,
    Run,
    Segment,
    absorb_small_runs,
    segment_runs,
)
from lq_lightning.data_parallel.unit import keep_small_runs_exact
from lq_lightning.foundation.topology import Level

VOCAB, WIDTH, POSITIONS = 200, 48, 48


class Model(nn.Module):
    """An embedding of tokens and one of positions, two matrices with norms, a head."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.a = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.positions = nn.Embedding(POSITIONS, WIDTH)  # as square as the other matrices
        self.b = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.a(self.tokens(tokens) + self.positions(positions)).tanh())
        logits = self.head(self.b(x).tanh())
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(1).flatten())


def names(module: nn.Module) -> list[str]:
    found = {id(p) for p in vocabulary_weights(module)}
    return [name for name, p in module.named_parameters() if id(p) in found]


# --- which parameters -----------------------------------------------------------------------------


def test_embeddings_and_heads_are_found() -> None:
    assert names(Model()) == ["tokens.weight", "positions.weight", "head.weight"]
    assert names(Model(tied=True)) == ["tokens.weight", "positions.weight"]
    assert names(nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 4))) == ["0.weight"]


def test_a_head_may_be_of_any_class() -> None:
    model = nn.Module()
    model.table = nn.Embedding(64, 8)
    model.head = nn.Parameter(torch.zeros(64, 16))  # of another width, as in ALBERT
    model.scores = nn.Parameter(torch.zeros(64, 4, 2))
    model.bias = nn.Parameter(torch.zeros(64))
    assert names(model) == ["head", "table.weight"]


def test_a_vocabulary_as_small_as_the_model_is_wide_has_no_heads() -> None:
    model = nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 32), nn.Linear(48, 32))
    assert names(model) == ["0.weight"]
    assert names(nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4))) == []


# --- codecs and messages --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "level", "code", "of_vocabulary"),
    [
        ("TLq-HS", "intra", "int8", "int8"),
        ("TLq-HS", "inter", "int2", "int6"),
        ("TLq", "inter", "int2", "int6"),
        ("ULq", "intra", "int2", "int6"),
        ("ULq", "inter", "int2", "int6"),
        ("QuanGrad", "inter", "int8", "int8"),
    ],
)
def test_codecs(method: Any, level: Level, code: str, of_vocabulary: str) -> None:
    config = GradientQuantization(method=method, inter_bits=2, vocabulary_bits=6)
    assert config.codec(level).code == code
    assert config.codec(level, vocabulary=True).code == of_vocabulary
    assert config.separates_vocabulary([level]) == (code != of_vocabulary)
    shared = GradientQuantization(method=method, vocabulary_bits=None)
    assert not shared.separates_vocabulary(["intra", "inter"])


@pytest.mark.parametrize("bits", [1, 9, 0])
def test_bits_are_checked(bits: int) -> None:
    with pytest.raises(ValueError, match=rf"vocabulary_bits={bits}\)` is not supported.*2 to 8"):
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
    runs = absorb_small_runs(segment_runs(segments))
    assert runs == [
        Run(0, 640, True, codec=1),
        Run(640, 1, False),
        Run(641, 964, True, (Run(1281, 4, False),)),
        Run(1605, 968, True, (Run(1925, 8, False),), codec=1),
    ]
    layout = MessageLayout.of(runs, SPECS, torch.float32)
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
    assert [s.travel for s in kept] == ["quantized", "full"]


# --- reductions -----------------------------------------------------------------------------------


def build(
    config: GradientQuantization | None,
    node_size: int,
    *,
    apart: bool = False,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    min_quantized_numel: int = 256,
) -> tuple[Model, QuantizedCommunication]:
    torch.manual_seed(0)
    model = Model(tied=tied).to(device())
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    if apart:  # units of the vocabulary alone
        for child in (model.tokens, model.head):
            fully_shard(child, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    world = dist.get_world_size()
    communication = quantize_communication(
        model,
        weights=None,
        gradients=config,
        topology=Topology(world_size=world, rank=dist.get_rank(), node_size=node_size),
        min_quantized_numel=min_quantized_numel,
    )
    return model, communication


def gradients(model: Model, scale: float = 1.0) -> dict[str, Tensor]:
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


COARSE = GradientQuantization(inter_bits=2)
FINE = GradientQuantization(inter_bits=2, vocabulary_bits=8)


def _inter_nbytes(communication: QuantizedCommunication, dtype: torch.dtype) -> int:
    """What one reduction of each unit sends to one other node."""
    total = 0
    for unit in communication._units:
        assert unit.scatter is not None
        numel = sum(s.numel for s in unit.scatter.segments())
        total += unit.scatter._layouts_for(numel, dtype)[1].nbytes
    return total


def _reduces(
    rank: int, world: int, node_size: int, dtype: torch.dtype, apart: bool, tied: bool
) -> None:
    options: dict[str, Any] = {"dtype": dtype, "apart": apart, "tied": tied}
    exact = gradients(build(None, node_size, **options)[0])
    found, nbytes = {}, {}
    for config in (COARSE, FINE):
        model, communication = build(config, node_size, **options)
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


@pytest.mark.parametrize(
    ("world", "node_size", "dtype", "apart", "tied"),
    [
        (2, 1, torch.float32, False, False),
        (2, 1, torch.float32, True, False),
        (2, 1, torch.bfloat16, False, False),
        (3, 1, torch.float32, False, False),
        (4, 2, torch.float32, False, False),
        (4, 2, torch.float32, False, True),
    ],
)
def test_the_vocabulary_has_smaller_errors(
    world: int, node_size: int, dtype: torch.dtype, apart: bool, tied: bool
) -> None:
    run_ranks(_reduces, world, node_size, dtype, apart, tied)


def _is_one_codec(rank: int, world: int, node_size: int, config: GradientQuantization) -> None:
    """Where both have the same bits, messages are those without the option."""
    plain = GradientQuantization(method=config.method, inter_bits=config.inter_bits)
    expected = gradients(build(plain, node_size)[0])
    model, communication = build(config, node_size)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[name]), name
    assert communication.plan.vocabulary == ()
    assert "embeddings" not in communication.plan.summary()


@pytest.mark.parametrize(
    ("world", "node_size", "config"),
    [
        (2, 1, GradientQuantization(vocabulary_bits=4)),
        (2, 2, GradientQuantization(vocabulary_bits=6)),
        (2, 1, GradientQuantization(method="QuanGrad", vocabulary_bits=6)),
    ],
)
def test_equal_bits_change_nothing(
    world: int, node_size: int, config: GradientQuantization
) -> None:
    run_ranks(_is_one_codec, world, node_size, config)


def _one_level(rank: int, world: int) -> None:
    """ULq has the same codec on both levels, so those of the vocabulary differ on both."""
    exact = gradients(build(None, 2)[0])
    config = GradientQuantization(method="ULq", vocabulary_bits=8)
    for name, error in errors(gradients(build(config, 2)[0]), exact).items():
        if name in ("tokens.weight", "positions.weight", "head.weight"):
            assert 1e-3 < error < 0.02, (name, error)
        elif exact[name].ndim > 1:
            assert error > 0.05, (name, error)


def test_the_vocabulary_has_a_codec_on_both_levels_of_ulq() -> None:
    run_ranks(_one_level, 4)


def _feedback(rank: int, world: int, node_size: int, method: Any) -> None:
    exact = gradients(build(None, node_size)[0])
    bits = {"inter_bits": 4 if method == "ULq" else 2, "vocabulary_bits": 6}
    config = GradientQuantization(method=method, error_feedback=True, **bits)
    model, _ = build(config, node_size)
    steps = [gradients(model) for _ in range(12)]
    mean = {n: torch.stack([step[n] for step in steps]).mean(dim=0) for n in exact}
    once, sums = errors(steps[-1], exact), errors(mean, exact)
    for name in ("tokens.weight", "a.weight", "head.weight"):
        assert sums[name] < once[name] / 3 + 0.02, (name, once[name], sums[name])


@pytest.mark.parametrize(
    ("world", "node_size", "method"), [(2, 1, "TLq-HS"), (4, 2, "TLq-HS"), (2, 1, "ULq")]
)
def test_error_feedback_sends_what_both_leave_out(world: int, node_size: int, method: str) -> None:
    run_ranks(_feedback, world, node_size, method)


def _nonfinite(rank: int, world: int, node_size: int) -> None:
    for value in (float("nan"), float("inf")):
        model, _ = build(FINE, node_size)
        found = gradients(model, value if rank == world - 1 else 1.0)
        for name in ("tokens.weight", "a.weight", "head.weight"):
            assert not found[name].isfinite().all(), name


@pytest.mark.parametrize(("world", "node_size"), [(2, 1), (4, 2)])
def test_bad_gradients_arrive(world: int, node_size: int) -> None:
    run_ranks(_nonfinite, world, node_size)


# --- what users are told --------------------------------------------------------------------------


def _plan(rank: int, world: int) -> str:
    _, communication = build(FINE, 1)
    found = [t.name for t in communication.plan.vocabulary]
    assert found == ["tokens.weight", "positions.weight", "head.weight"]
    assert build(FINE, 1, min_quantized_numel=VOCAB * WIDTH + 1)[1].plan.vocabulary == ()
    return communication.plan.summary()


def test_the_plan_names_them() -> None:
    summary = run_ranks(_plan, 2)[0]
    assert "int2 between 2 nodes of one rank, int8 there for embeddings and heads" in summary
    named = "3 tensors (tokens.weight, positions.weight, head.weight)"
    assert f"gradients in vocabulary_bits: {named}" in summary


class WithoutEmbedding(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.net.embed = nn.Sequential()  # type: ignore[assignment]
        self.table = nn.Parameter(torch.randn(31, 24))
        self.net.embed.forward = lambda tokens: self.table[tokens]  # type: ignore[method-assign]


def _warns(rank: int, world: int, root: str) -> None:
    def fit(module: TinyModule, config: GradientQuantization, message: str, **options: Any) -> None:
        strategy = QuantizedFSDPStrategy(gradients=config, min_quantized_numel=64, **options)
        runner: Trainer = trainer(strategy, root)
        with pytest.warns(UserWarning, match=message) if rank == 0 and message else nullcontext():
            runner.fit(module, loader(8))

    eight = GradientQuantization(vocabulary_bits=8)
    fit(WithoutEmbedding(), eight, "vocabulary_bits=8.*no trained embedding", node_size=1)
    fit(TinyModule(), eight, "vocabulary_bits=8.*TLq-HS.*the same bits on this topology")
    fit(TinyModule(), eight, "", node_size=1)


def test_options_without_effect_are_named(tmp_path: Any) -> None:
    run_ranks(_warns, 2, str(tmp_path), backend=None, torchrun=True)


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("fn", "args"),
    [(_reduces, (1, torch.float32, False, False)), (_feedback, (1, "TLq-HS")), (_nonfinite, (1,))],
)
def test_on_two_gpus(fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    run_ranks(fn, 2, *args, backend="nccl", timeout=200)


@pytest.mark.gpu(4)
@pytest.mark.parametrize(
    ("fn", "args"),
    [(_reduces, (2, torch.float32, False, False)), (_feedback, (2, "TLq-HS")), (_nonfinite, (2,))],
)
def test_on_four_gpus(fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    run_ranks(fn, 4, *args, backend="nccl", timeout=200)
