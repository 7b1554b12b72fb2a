"""``QuantizedMuon`` computes what ``torch.optim.Muon`` does, on any shards; codes; checkpoints."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lq_testing import run_ranks
from lq_testing.cases import on_gpus, rank_tests
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lq_lightning.codecs import CodecSpec
from lq_lightning.foundation.parameters import mark_embedding_params
from lq_lightning.optim import (
    OptimizerQuantization,
    QuantizedAdamW,
    QuantizedMuon,
    embedding_weights,
    muon_groups,
    quantize_optimizer,
)
from lq_lightning.optim.orthogonalization import learning_rate_ratio, orthogonalize, plan_rounds

EXACT = OptimizerQuantization(first_moment="float32", second_moment="float32")
INT8 = CodecSpec(code="int8", group_size=128)
CODES = OptimizerQuantization(min_numel=64)
# Names tell how tensor-parallel ranks cut a matrix: by rows, by columns, not at all.
SHAPES = {
    "rows": (10, 96),
    "rows_tall": (131, 40),
    "columns": (5, 512),
    "columns_uneven": (40, 67),
    "whole": (64, 64),
    "whole_again": (64, 64),
    "whole_one_row": (1, 80),
    "unused": (8, 40),
}


def weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}


def gradient(name: str, step: int, dtype: torch.dtype) -> Tensor:
    seed = 100 * step + list(SHAPES).index(name)
    values = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))
    return (values * values.abs().exp()).to(dtype)


def take_steps(
    params: dict[str, Tensor], optimizer: torch.optim.Optimizer, first: int, last: int
) -> None:
    for step in range(first, last):
        for name, param in params.items():
            if name == "unused" and step != 1:
                param.grad = None
                continue
            grad = gradient(name, step, param.dtype)
            if isinstance(param, DTensor):
                mesh, placements = param.device_mesh, param.placements
                grad = distribute_tensor(grad, mesh, placements, src_data_rank=None)
            param.grad = grad
        optimizer.step()


def trained(kind: type[torch.optim.Optimizer], steps: int = 3, **options: Any) -> dict[str, Tensor]:
    params = {n: w.requires_grad_() for n, w in weights().items()}
    optimizer = kind(params.values(), lr=0.1, **options)
    take_steps(params, optimizer, 0, steps)
    return params


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(whole(found[name]), value), name


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


# --- one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "weight_decay": 0.0, "ns_steps": 3},
        {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.5, "eps": 1e3},
        {"adjust_lr_fn": "original", "ns_coefficients": (2.0, -1.5, 0.5)},
    ],
    ids=str,
)
def test_fp32_states_give_the_bits_of_torch(options: Any) -> None:
    expected = trained(torch.optim.Muon, **options)
    assert_equal(trained(QuantizedMuon, quantization=EXACT, **options), expected)


def test_rounds_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(QuantizedMuon, quantization=CODES)
    monkeypatch.setattr(QuantizedMuon, "round_nbytes", 1)
    params = list(weights().values())
    assert [len(r.owned) for r in plan_rounds(params, 1)] == [1] * len(params)
    assert len(plan_rounds(params, 1 << 20)) == 1
    assert_equal(trained(QuantizedMuon, quantization=CODES), expected)


@pytest.mark.parametrize("code", ["expanded_fp8", "dynamic8"])
def test_codes_stay_near_fp32(code: Any) -> None:
    """Singular values of a matrix of noise are moved a lot, so that the error grows with them."""
    weight, exact = (torch.zeros(64, 128).requires_grad_() for _ in range(2))
    config = OptimizerQuantization(first_moment=code, min_numel=0)
    optimizers = QuantizedMuon([weight], quantization=config), torch.optim.Muon([exact])
    for step in range(10):
        weight.grad = torch.randn(64, 128, generator=torch.Generator().manual_seed(step))
        exact.grad = weight.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert (weight - exact).norm() < 0.016 * exact.norm()
    assert optimizers[0].state[weight]["momentum_buffer_codes"].dtype == torch.uint8
    assert "momentum_buffer_exponent" not in optimizers[0].state[weight]  # of expanded formats


def test_strided_and_transposed_weights() -> None:
    for layout in (lambda w: w.t(), lambda w: w[:, ::2], lambda w: w[1:]):
        pairs = []
        for kind in (QuantizedMuon, torch.optim.Muon):
            base = torch.randn(48, 40, generator=torch.Generator().manual_seed(0))
            param = nn.Parameter(layout(base))
            options = {"quantization": EXACT} if kind is QuantizedMuon else {}
            optimizer = kind([param], lr=0.1, **options)
            for step in range(2):
                generator = torch.Generator().manual_seed(step)
                param.grad = layout(torch.randn(48, 40, generator=generator))
                optimizer.step()
            pairs.append(param.detach())
        assert torch.equal(*pairs)


@pytest.mark.parametrize("config", [EXACT, CODES], ids=["fp32", "codes"])
def test_other_groups_are_adamw(config: OptimizerQuantization) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(40, 64), (64,), (8, 4, 3, 3), ()]
    starts = [torch.randn(shape, generator=generator) for shape in shapes]
    ours, theirs = ([w.clone().requires_grad_() for w in starts] for _ in range(2))
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.2}
    group = {"params": ours, "muon": False, "eps": 1e-3, **options}
    muon = QuantizedMuon([group], quantization=config)
    adamw = torch.optim.AdamW(theirs, eps=1e-3, **options)
    if config is CODES:
        adamw = QuantizedAdamW(theirs, eps=1e-3, quantization=config, **options)
    for step in range(3):
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            generator = torch.Generator().manual_seed(10 * step + index)
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        muon.step()
        adamw.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    if config is CODES:
        key = "exp_avg_sq_codes"
        assert torch.equal(muon.state[ours[0]][key], adamw.state[theirs[0]][key])


def test_nonfinite_gradients_pass_through() -> None:
    for value in (float("nan"), float("inf")):
        for config in (EXACT, CODES):
            params = [torch.randn(40, 64).requires_grad_() for _ in range(2)]
            optimizer = QuantizedMuon(params, quantization=config)
            for param in params:
                param.grad = torch.ones_like(param)
            params[0].grad[3, 5] = value  # type: ignore[index]
            optimizer.step()
            assert params[0].isnan().all()
            assert params[1].isfinite().all()


def test_bf16_weights_rounded_by_chance_keep_the_mean() -> None:
    start = torch.full((64, 128), 1.0)
    for chance in (True, False):
        config = OptimizerQuantization(min_numel=0, stochastic_rounding=chance)
        weight = start.bfloat16().requires_grad_()
        optimizer = QuantizedMuon([weight], lr=2e-3, weight_decay=0.1, quantization=config)
        exact = start.clone().requires_grad_()
        reference = torch.optim.Muon([exact], lr=2e-3, weight_decay=0.1)
        for step in range(20):
            generator = torch.Generator().manual_seed(step)
            exact.grad = torch.randn(64, 128, generator=generator) + 1
            weight.grad = exact.grad.bfloat16()
            optimizer.step()
            reference.step()
        moved, wanted = (weight.float() - 1).mean().item(), (exact - 1).mean().item()
        assert abs(moved - wanted) < (0.03 if chance else 10) * abs(wanted), (moved, wanted)
        assert chance or moved != wanted


def test_weights_change_visibly() -> None:
    """Replicas of weights look at version counters."""
    for dtype, chance in ((torch.float32, False), (torch.bfloat16, True)):
        weight = torch.ones(40, 64, dtype=dtype).requires_grad_()
        config = OptimizerQuantization(min_numel=0, stochastic_rounding=chance)
        optimizer = QuantizedMuon([weight], quantization=config)
        weight.grad = torch.randn(40, 64).to(dtype)
        before = weight._version
        optimizer.step()
        assert weight._version > before


def test_refusals() -> None:
    matrix, kernel = torch.zeros(4, 40).requires_grad_(), torch.zeros(4, 2, 3).requires_grad_()
    with pytest.raises(ValueError, match=r"matrices only.*\(4, 2, 3\).*muon_groups"):
        QuantizedMuon([matrix, kernel])
    with pytest.raises(ValueError, match="adjust_lr_fn"):
        QuantizedMuon([matrix], adjust_lr_fn="other")  # type: ignore[arg-type]
    for options in ({"lr": -1.0}, {"ns_steps": 100}, {"eps": -1.0}):
        with pytest.raises(ValueError, match="must be"):
            QuantizedMuon([matrix], **options)  # type: ignore[arg-type]
    optimizer = QuantizedMuon([matrix])
    for group in ({"params": [kernel]}, {"params": [kernel], "muon": False, "maximize": True}):
        with pytest.raises(ValueError, match="matrices only|maximize"):
            optimizer.add_param_group(group)
    optimizer.add_param_group({"params": [kernel], "muon": False})  # no other group has it
    half = torch.zeros(4, 40, dtype=torch.float16).requires_grad_()
    half.grad = torch.ones_like(half)
    with pytest.raises(TypeError, match="float16"):
        QuantizedMuon([half]).step()


# --- groups ---------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        self.positions = nn.Embedding(16, 32)
        self.conv = nn.Conv1d(32, 32, 3, padding=1)
        self.up = nn.Linear(32, 131)
        self.down = nn.Linear(131, 32, bias=False)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 50, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        x = x + self.conv(x.mT).mT
        return self.head(self.norm(x + self.down(self.up(x).relu())))


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_heads_and_vectors_go_to_adamw(tied: bool) -> None:
    model = Model(tied)
    muon, adamw = muon_groups(model)
    assert [name for name, _ in muon["params"]] == ["up.weight", "down.weight"]
    names = {name for name, _ in adamw["params"]}
    assert names == {name for name, _ in model.named_parameters()} - {"up.weight", "down.weight"}
    muon, adamw = muon_groups(model, adamw=[model.up.weight])
    assert [name for name, _ in muon["params"]] == ["down.weight"]
    optimizer = QuantizedMuon([muon, adamw], full_precision=embedding_weights(model))
    reasons = {plan.name: plan.reason for plan in optimizer.quantization_plan()}
    assert reasons["tokens.weight"] == "asked for by `full_precision`"
    assert reasons["down.weight"] is None


def test_stages_know_words_from_positions() -> None:
    model = Model()
    model.as_long_as_positions = nn.Linear(8, 16, bias=False)
    mark_embedding_params(model)
    del model.tokens
    muon, adamw = ([name for name, _ in group["params"]] for group in muon_groups(model))
    assert muon == ["up.weight", "down.weight", "as_long_as_positions.weight"]
    assert {"head.weight", "positions.weight"} <= set(adamw)


def test_a_group_may_be_empty() -> None:
    for module in (nn.Linear(40, 64, bias=False), nn.LayerNorm(4)):
        optimizer = QuantizedMuon(muon_groups(module))
        assert len(optimizer.quantization_plan()) == len(list(module.parameters()))


def loss_of(model: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(50, (8, 16), generator=torch.Generator().manual_seed(step % 4))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def test_codes_train_like_fp32() -> None:
    losses = []
    for config in (EXACT, OptimizerQuantization(min_numel=64)):
        torch.manual_seed(0)
        model = Model()
        muon, adamw = muon_groups(model)
        optimizer = QuantizedMuon(
            [muon, adamw], 5e-3, adjust_lr_fn="match_rms_adamw", quantization=config
        )
        for step in range(60):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(sum(loss_of(model, step).item() for step in range(4)) / 4)
    assert losses[0] < 1.0
    assert abs(losses[1] - losses[0]) < 0.1 * losses[0], losses


# --- conversion and checkpoints -------------------------------------------------------------------


def test_a_converted_optimizer_goes_on() -> None:
    params, exact = ({n: w.requires_grad_() for n, w in weights().items()} for _ in range(2))
    theirs = torch.optim.Muon(exact.values(), lr=0.1)
    optimizer = torch.optim.Muon(params.values(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for each, own in ((params, optimizer), (exact, theirs)):
        take_steps(each, own, 0, 2)
    assert type(quantize_optimizer(optimizer, EXACT)) is QuantizedMuon
    scheduler.step()
    for each, own in ((params, optimizer), (exact, theirs)):
        take_steps(each, own, 2, 4)
    assert_equal(params, exact)
    extra = torch.zeros(3).requires_grad_()
    optimizer.add_param_group({"params": [extra], "muon": False, "lr": 1.0})
    extra.grad = torch.ones(3)
    take_steps(params, optimizer, 4, 5)
    assert extra.allclose(torch.tensor(-1.0))


def test_states_are_exchanged_with_torch() -> None:
    params, exact = ({n: w.requires_grad_() for n, w in weights().items()} for _ in range(2))
    theirs = torch.optim.Muon(exact.values(), lr=0.1)
    take_steps(exact, theirs, 0, 2)
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(exact[name])
    ours = QuantizedMuon(params.values(), quantization=EXACT)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for each, own in ((params, ours), (exact, theirs)):
        take_steps(each, own, 2, 4)
    assert_equal(params, exact)
    theirs.load_state_dict(ours.full_precision_state_dict())
    for each, own in ((params, ours), (exact, theirs)):
        take_steps(each, own, 4, 5)
    assert_equal(params, exact)


def test_groups_stay_what_they_are() -> None:
    """States of torch's optimizers do not say which groups are Muon's."""
    theirs, ours, matrix = (torch.ones(4, 40).requires_grad_() for _ in range(3))
    adamw = torch.optim.AdamW([theirs], lr=0.1, betas=(0.5, 0.6), eps=1e-2)
    theirs.grad = ours.grad = torch.linspace(0, 1, 160).view(4, 40)
    adamw.step()
    optimizer = QuantizedMuon([{"params": [ours], "muon": False}])
    optimizer.load_state_dict(copy.deepcopy(adamw.state_dict()))
    ours.data.copy_(theirs)
    for own in (adamw, optimizer):
        own.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    optimizer.load_state_dict(torch.optim.Muon([matrix], lr=0.2).state_dict())  # took no step
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert optimizer.param_groups[0]["muon"] is False
    with pytest.raises(ValueError, match='"muon": False, other than here'):
        QuantizedMuon([matrix]).load_state_dict(optimizer.state_dict())
    ascending = torch.optim.AdamW([matrix], maximize=True)
    with pytest.raises(ValueError, match="maximize"):
        optimizer.load_state_dict(ascending.state_dict())


def test_schedules_of_momentum() -> None:
    """They cycle it where the optimizer has no ``betas`` by default, as torch's Muon."""
    momentum = []
    for kind in (torch.optim.Muon, QuantizedMuon):
        optimizer = kind([torch.zeros(4, 40).requires_grad_()])
        torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=10, base_momentum=0.8
        )
        momentum.append(optimizer.param_groups[0]["momentum"])
    assert momentum[0] == momentum[1]
    assert "betas" not in optimizer.defaults


def test_saved_copied_and_pickled() -> None:
    params = {n: w.requires_grad_() for n, w in weights().items()}
    optimizer = QuantizedMuon(params.values(), 0.1, quantization=CODES)
    take_steps(params, optimizer, 0, 2)
    others = []
    for duplicate in (copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))):
        other = duplicate(optimizer)
        others.append((dict(zip(SHAPES, other.param_groups[0]["params"], strict=True)), other))
    restored = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
    resumed = QuantizedMuon(restored.values(), 0.5, quantization=CODES)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take_steps(params, optimizer, 2, 4)
    for each, own in (*others, (restored, resumed)):
        take_steps(each, own, 2, 4)
        assert_equal(each, params)
    with pytest.raises(ValueError, match="quantization format"):
        QuantizedMuon(restored.values(), quantization=EXACT).load_state_dict(optimizer.state_dict())


def test_other_codes_of_a_momentum_are_refused() -> None:
    """Groups say their own codes, also later ones and those of a state without entries."""
    params = {n: w.requires_grad_() for n, w in weights().items()}
    optimizer = QuantizedMuon(params.values(), quantization=CODES)
    fresh = copy.deepcopy(optimizer.state_dict())
    take_steps(params, optimizer, 0, 1)
    optimizer.add_param_group({"params": [torch.ones(8, 128).requires_grad_()]})
    optimizer.add_param_group({"params": [torch.ones(8).requires_grad_()], "muon": False})
    stamps = [group["quantization"] for group in optimizer.param_groups]
    assert stamps == ["2/int8/32", "2/int8/32", "2/expanded_fp8/expanded_fp8"]
    old = copy.deepcopy(optimizer.state_dict())
    old["param_groups"][0]["quantization"] = stamps[2]
    with pytest.raises(ValueError, match=r"'2/expanded_fp8/expanded_fp8'; .*version that saved it"):
        optimizer.load_state_dict(old)
    other = copy.deepcopy(optimizer)
    other.param_groups[0]["quantization"] = stamps[2]
    with pytest.raises(ValueError, match="version that saved it"):
        pickle.loads(pickle.dumps(other))
    empty = QuantizedMuon(weights().values(), quantization=CODES)
    fresh["param_groups"][0]["quantization"] = stamps[2]
    empty.load_state_dict(fresh)
    assert empty.param_groups[0]["quantization"] == "2/int8/32"


# --- ranks ----------------------------------------------------------------------------------------


class Holder(nn.Module):
    """Parameters without a forward, sharded as the axes of a mesh say."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        axes = mesh.mesh_dim_names or ()
        for name, value in weights().items():
            if "tensor" in axes:
                dim = {"rows": 0, "columns": 1}.get(name.split("_")[0])
                place = Replicate() if dim is None else Shard(dim)
                value = distribute_tensor(value, mesh["tensor"], [place])
            self.register_parameter(name, nn.Parameter(value))
        data = tuple(axis for axis in axes if axis != "tensor")
        if data:
            fully_shard(self, mesh=mesh[data])


MESHES: list[tuple[int, dict[str, int]]] = [
    (4, {"data": 4}),
    (4, {"data": 2, "tensor": 2}),
    (4, {"replicas": 2, "data": 2}),
    (4, {"tensor": 4}),
    (4, {"data": 4, "tensor": 1}),
]


def as_torch_in_one_process(rank: int, world: int, path: str) -> None:
    expected = trained(torch.optim.Muon)
    for number, (_, axes) in enumerate(MESHES):
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        for nbytes in (1 << 20, 8000):
            QuantizedMuon.round_nbytes = nbytes
            params = dict(Holder(mesh).named_parameters())
            optimizer = QuantizedMuon(params.values(), lr=0.1, quantization=EXACT)
            take_steps(params, optimizer, 0, 3)
            assert_equal(params, expected)
        if len(axes) == 1:  # a plan knows no pieces that others exchange
            for matrices in plan_rounds(list(params.values()), 1 << 20):
                assert all(n in matrices.owned or at == (rank,) for n, at in matrices.index)
        params = dict(Holder(mesh).named_parameters())
        coded = QuantizedMuon(params.values(), lr=0.1, quantization=EXACT, update_codec=INT8)
        take_steps(params, coded, 0, 3)
        for name, value in weights().items():
            moved = expected[name].detach() - value
            error = (whole(params[name].detach()) - expected[name].detach()).norm() / moved.norm()
            is_whole = (
                name.startswith(("whole", "unused")) and "data" not in axes
            )  # on each rank, never sent
            assert (error == 0) == is_whole, (axes, name, error)
            assert error < 0.05, (axes, name, error)
        module = Holder(mesh)
        optimizer = QuantizedMuon(module.parameters(), lr=0.1, quantization=CODES)
        take_steps(dict(module.named_parameters()), optimizer, 0, 3)
        if "tensor" not in axes:  # which has noise of its own, and other parameters in codes
            expected_codes = trained(QuantizedMuon, quantization=CODES)
            assert_equal(dict(module.named_parameters()), expected_codes)
            save_and_resume(module, optimizer, f"{path}/{number}")


def save_and_resume(module: nn.Module, optimizer: QuantizedMuon, path: str) -> None:
    """At another world size's shards, which are those of another mesh here."""
    dcp.save({"optimizer": get_optimizer_state_dict(module, optimizer)}, checkpoint_id=path)
    other = Holder(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "data")))
    resumed = QuantizedMuon(other.parameters(), lr=0.1, quantization=CODES)
    state = get_optimizer_state_dict(other, resumed)
    dcp.load({"optimizer": state}, checkpoint_id=path)
    set_optimizer_state_dict(other, resumed, state)
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[one].items():
            assert torch.equal(whole(value), whole(resumed.state[two][key])), key


def test_ranks_compute_what_one_process_does(tmp_path: Path) -> None:
    run_ranks(as_torch_in_one_process, 4, str(tmp_path))


def on_gpus_as_on_a_cpu(rank: int, world: int, *axes: str) -> None:
    """Momentum to the bit; products of matrices differ."""
    shape = (2,) * (len(axes) - 1) + (world // 2 ** (len(axes) - 1),)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=axes)
    QuantizedMuon.round_nbytes = 8000  # in some rounds a rank owns none
    for codec in (None, INT8):
        params = dict(Holder(mesh).named_parameters())
        assert all(param.is_cuda for param in params.values())
        optimizer = QuantizedMuon(params.values(), 0.1, quantization=CODES, update_codec=codec)
        take_steps(params, optimizer, 0, 3)
        single = {n: w.requires_grad_() for n, w in weights().items()}
        reference = QuantizedMuon(single.values(), 0.1, quantization=CODES)
        take_steps(single, reference, 0, 3)
        for name, start in weights().items():
            for key, value in reference.state[single[name]].items():
                if "tensor" not in axes:
                    assert torch.equal(whole(optimizer.state[params[name]][key]).cpu(), value), key
            moved = single[name].detach() - start
            error = whole(params[name].detach()).cpu() - single[name].detach()
            assert error.norm() < 0.05 * moved.norm(), (name, codec)


test_gpus = rank_tests(
    on_gpus(on_gpus_as_on_a_cpu, 2, "data"),
    on_gpus(on_gpus_as_on_a_cpu, 2, "tensor"),
    on_gpus(on_gpus_as_on_a_cpu, 4, "data", "tensor"),
)


def trains_with_fsdp2(rank: int, world: int) -> None:
    """Through autograd, with clipping, and empty shards; embeddings and vectors by AdamW."""
    results = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = Model(tied=True)
        model.down.weight.requires_grad_(False)
        if sharded:
            mesh = init_device_mesh("cpu", (world,))
            fully_shard(model.up, mesh=mesh)
            fully_shard(model, mesh=mesh)
        groups = muon_groups(model)
        optimizer = QuantizedMuon(groups, 1e-2, quantization=EXACT)
        for step in range(3):
            loss_of(model, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
            optimizer.zero_grad()
        results.append({n: whole(p.detach()) for n, p in model.named_parameters()})
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=2e-3, atol=2e-4, msg=name)


def test_fsdp2_trains() -> None:
    run_ranks(trains_with_fsdp2, 3)


def test_ratios_and_shapes_of_iterations() -> None:
    assert learning_rate_ratio((40, 10), None) == 2.0
    assert learning_rate_ratio((10, 40), "original") == 1.0
    assert learning_rate_ratio((10, 100), "match_rms_adamw") == 2.0
    zeros = torch.zeros(2, 8, 4, dtype=torch.bfloat16)
    assert torch.equal(orthogonalize(zeros, (3.0, -4.0, 2.0), 5, 1e-7), zeros)
