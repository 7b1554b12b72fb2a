"""``tensor_parallel="auto"``: equal to one process, or refused by name."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from lq_testing.cases import on_ranks, rank_tests
from lq_testing.lightning_models import PLAIN, Losses, run_trainer, trainer
from lq_testing.tensor_models import Block, ParallelModule, batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader

from lq_lightning import QuantizedFSDPStrategy
from lq_lightning._compat.tensors import local_tensor
from lq_lightning.strategies.sharded_logits import ShardedLogits
from lq_lightning.strategies.tensor_plans import (
    TensorParallelPlan,
    draft_plans,
    parallelize_automatically,
)

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
VOCABULARY = 32
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 18,  # in the second rank's part of the vocabulary
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def split_plan(module: nn.Module, mesh: Any) -> TensorParallelPlan:
    drafts = draft_plans(module, mesh.size(), owner="S")
    return parallelize_automatically(module, mesh, drafts)


def _hugging_face(kind: str, **options: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**SIZES, **options})
    config._attn_implementation = "sdpa"
    return AutoModelForCausalLM.from_config(config)


def _decoder(**options: Any) -> nn.Module:
    from pretraining.model import Decoder, DecoderConfig

    sizes = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2}
    return Decoder(DecoderConfig(**{**sizes, **options}), VOCABULARY)


def _random(model: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.data.normal_(float(parameter.dim() == 1), 0.3)
    return model.double()


def _labels(model: Any, tokens: Tensor) -> Tensor:
    labels = tokens.masked_fill(tokens == SIZES["pad_token_id"], -100)
    loss: Tensor = model(input_ids=tokens, labels=labels).loss
    return loss


def _logits(model: Any, tokens: Tensor) -> Tensor:
    output = model(tokens)
    return output if isinstance(output, Tensor) else output.logits


def _own_loss(model: Any, tokens: Tensor) -> Tensor:
    logits = _logits(model, tokens)[..., :-1, :]
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].flatten())


def _two_lengths(model: Any, tokens: Tensor) -> Tensor:
    """The second forward cannot split its tokens; a checkpoint calls the first one's again."""
    return _own_loss(model, tokens) + _own_loss(model, tokens[:, 1:])


def _chunked(model: Any, tokens: Tensor) -> Tensor:
    from pretraining.lightning_module import chunked_cross_entropy

    x_ND = model.hidden_states(tokens).flatten(0, 1)
    return chunked_cross_entropy(model.lm_head, x_ND, tokens.roll(-1).flatten(), 5)


class Case(NamedTuple):
    """A model, its loss, and how many of its embeddings and heads are split."""

    make: Callable[[], nn.Module]
    loss: Callable[[Any, Tensor], Tensor]
    vocabulary: int = 2
    split_tokens: bool = True


class TorchStyles(nn.Module):
    """A plain model whose plan is torch's own, with untied head."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _decoder(tie_embeddings=False)

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """Split as torch's tutorials do."""
        return {
            "inner.embedding": RowwiseParallel(input_layouts=Replicate()),
            "inner.blocks.*.mlp.gate_proj": ColwiseParallel(),
            "inner.blocks.*.mlp.up_proj": ColwiseParallel(),
            "inner.blocks.*.mlp.down_proj": RowwiseParallel(),
            "inner.lm_head": ColwiseParallel(use_local_output=False),
        }

    def forward(self, tokens: Tensor) -> Any:
        """Return logits as models of Hugging Face do."""
        from transformers.modeling_outputs import CausalLMOutput

        return CausalLMOutput(logits=self.inner(tokens))


def _checkpointed() -> nn.Module:
    model: Any = _hugging_face("llama").train()
    model.gradient_checkpointing_enable()
    return model


def _case(kind: str, loss: Callable[[Any, Tensor], Tensor], n: int = 2, **options: Any) -> Case:
    return Case(lambda: _hugging_face(kind, **options), loss, n)


CASES = {
    "llama": _case("llama", _labels),
    "llama tied": _case("llama", _own_loss, tie_word_embeddings=True),
    "llama odd vocabulary": _case("llama", _labels, 0, vocab_size=VOCABULARY + 1),
    "llama checkpointed": Case(_checkpointed, _two_lengths),
    "qwen3": _case("qwen3", _labels, head_dim=4),
    "gemma3": _case("gemma3_text", _labels, head_dim=4, final_logit_softcapping=5.0),
    "gpt_neox": _case("gpt_neox", _own_loss),
    "phi3": _case("phi3", _labels),
    "olmo": _case("olmo", _labels),
    "apertus": _case("apertus", _labels),  # trained parameters of activation functions
    "example": Case(_decoder, _own_loss),
    "example chunked": Case(lambda: _decoder(tie_embeddings=False), _chunked),
    "torch styles": Case(TorchStyles, _own_loss, 0, False),
}


UNEVEN = ("llama", "example chunked")


def _full(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _equals_one_process(mesh: DeviceMesh, case: Case, length: int) -> None:
    single = _random(case.make())
    several = copy.deepcopy(single)
    plan = split_plan(several, mesh)
    assert len(plan.vocabulary) == case.vocabulary
    assert bool(plan.tokens) is case.split_tokens
    torch.manual_seed(4)
    tokens = torch.randint(VOCABULARY, (3, length))
    tokens[0, :2] = SIZES["pad_token_id"]
    losses = []
    for model in (single, several):
        with patch.object(ShardedLogits, "full_tensor", side_effect=AssertionError("gathers")):
            losses.append(case.loss(model, tokens))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
    gradients = {name: p.grad for name, p in several.named_parameters()}
    for name, parameter in single.named_parameters():
        expected = parameter.grad
        if expected is None:
            raise AssertionError(f"{name} has no gradient")
        given = _full(gradients[name])
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6, msg=lambda m: name + m)  # noqa: B023


def _mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("tensor_parallel",))


def _all_equal_one_process(mesh: DeviceMesh) -> None:
    for name, case in CASES.items():
        for length in (8, 7) if name in UNEVEN else (8,):  # 7 is no multiple of the ranks
            try:
                _equals_one_process(mesh, case, length)
            except Exception as error:
                raise AssertionError(f"{name}, {length} tokens") from error


def _split_llama(mesh: DeviceMesh) -> tuple[Any, Any, Tensor]:
    single = _random(_hugging_face("llama")).eval()
    several = copy.deepcopy(single)
    split_plan(several, mesh)
    return single, several, torch.arange(8).view(1, 8) + 3


def _answers_beside_training(mesh: DeviceMesh) -> None:
    """Generated tokens, hidden states, and an evaluation that gathers."""
    single, several, tokens = _split_llama(mesh)
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    assert torch.equal(*(m.generate(tokens, **options) for m in (single, several)))
    states = [m(tokens, output_hidden_states=True).hidden_states for m in (single, several)]
    for expected, given in zip(*states, strict=True):
        torch.testing.assert_close(given, expected)
    both = [m(tokens).logits.softmax(-1) for m in (single, several)]
    torch.testing.assert_close(both[1], both[0])
    with pytest.raises(NotImplementedError, match="output_attentions"):
        several(tokens, output_attentions=True)
    whole = copy.deepcopy(several)  # averages of weights copy models
    torch.testing.assert_close(whole(tokens).logits.full_tensor(), single(tokens).logits)


class Shifts(nn.Module):
    """A layer that looks at the token before, outside of its MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Add the MLP of each token to the token before."""
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return before + self.down(self.up(x))


class Slopes(Shifts):
    """Has a trained activation function."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.PReLU()


class ShiftingModel(nn.Module):
    """A model whose plan does not say that tokens are mixed."""

    tensor_parallel_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self, block: nn.Module, *norms: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block])
        self.norm = nn.LayerNorm(8)
        for i, norm in enumerate(norms):  # more than one: tokens are not split
            self.add_module(f"other_{i}", norm)

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks."""
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Heads(nn.Module):
    """Counts on all heads: each rank makes as many of its columns, which are half as long."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Attend with four heads."""
        q, k, v = self.up(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        output: Tensor = self.down(mixed.flatten(2))
        return output


class Residual(nn.Module):
    """A layer of attention alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Heads()

    def forward(self, x: Tensor) -> Tensor:
        """Add attention."""
        result: Tensor = x + self.inner(x)
        return result


def _heads(*norms: nn.Module) -> nn.Module:
    plan = {"blocks.*.inner.up": "colwise", "blocks.*.inner.down": "rowwise"}
    return _with(plan, ShiftingModel(Residual(), *norms))


def _forgetful() -> nn.Module:
    model: Any = _decoder()
    plan = model.tensor_parallel_plan()
    return _with({name: plan[name] for name in plan if "k_proj" not in name}, model)


WRONG: dict[str, Callable[[], nn.Module]] = {
    "mixed tokens": lambda: ShiftingModel(Shifts()),
    "sizes of the whole": _heads,
    "no shares": lambda: _heads(nn.LayerNorm(8)),
    "forgotten layer": _forgetful,
}


def _wrong_plans_are_found(mesh: DeviceMesh) -> None:
    for name, make in WRONG.items():
        model = make()
        plan = split_plan(model, mesh)
        assert bool(plan.tokens) is (name != "no shares")
        first: Any = next(iter(model.blocks))  # type: ignore[arg-type]
        for parameter in first.parameters():
            parameter.data.mul_(3)
        x = torch.arange(6)[None] if hasattr(model, "embedding") else torch.randn(1, 6, 8)
        with pytest.raises(NotImplementedError, match=f"`{type(first).__name__}` computes somet"):
            model(x)


class NormInFront(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.blocks = nn.LayerNorm(8), nn.ModuleList([Block(8), Block(8)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return x


def _a_norm_in_front_gathers_nothing(mesh: DeviceMesh) -> None:
    """A mean over the output would be one of this rank's tokens, without a word."""
    model = _with({"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}, NormInFront())
    split_plan(model, mesh)
    with pytest.raises(NotImplementedError, match="`LayerNorm`, the only norm.* in front of them"):
        model(torch.randn(1, 6, 8))


def _later_is_not_too_late(mesh: DeviceMesh) -> None:
    """A layer that starts as the identity says nothing about its plan until it has learned."""
    model: Any = _heads()
    split_plan(model, mesh)
    down = model.blocks[0].inner.down
    values = down.weight.detach().clone()
    for parameter in down.parameters():
        parameter.data.zero_()
    model(torch.randn(1, 6, 8))
    down.weight.data.copy_(values)
    with pytest.raises(NotImplementedError, match="`Residual` computes something else"):
        model(torch.randn(1, 6, 8))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    "second dimension": lambda x, y: F.cross_entropy(x.transpose(1, 2), y, reduction="none").mean(),
    "ignored": lambda x, y: F.cross_entropy(x.view(-1, 8), y.view(-1), ignore_index=3),
    "smoothed": lambda x, y: F.cross_entropy(
        x[:, 1:].permute(0, 2, 1), y[:, 1:], label_smoothing=0.2
    ),
    "weighted": lambda x, y: F.cross_entropy(
        x[0], y[0], torch.arange(8.0) + 1, label_smoothing=0.1
    ),
    "ignored weights": lambda x, y: F.cross_entropy(
        x[0].float(), y[0], torch.arange(8.0) + 1, ignore_index=5, reduction="sum"
    ),
    "one token": lambda x, y: F.cross_entropy(x[0, -1] / 2, y[0, -1]),
    "masked rows": lambda x, y: F.cross_entropy((2 * x)[y != 2].tanh(), y[y != 2]),
    "clone": lambda x, y: F.cross_entropy(
        x.detach()[..., :-1, :].reshape(-1, 8), y[:, 1:].flatten()
    ),
}
GATHERED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "probabilities": lambda x, y: F.cross_entropy(x.flatten(0, 1), torch.eye(8)[y.flatten()]),
    "log-softmax": lambda x, y: F.nll_loss(F.log_softmax(x.flatten(0, 1), -1), y.flatten()),
    "entropy": lambda x, y: -(x.softmax(-1) * x.log_softmax(-1)).sum(),
    "largest": lambda x, y: (
        (x.argmax(-1) == y).float().mean() + torch.logsumexp(x, -1).square().sum()
    ),
    "last columns": lambda x, y: x[..., 3:6].square().sum(),
    "other dimension": lambda x, y: F.cross_entropy(x.transpose(0, 1).reshape(8, -1)[:2], y[0, :2]),
    "own function": lambda x, y: _Doubles.apply(x).sum(),
}


class _Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x.exp().sum(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient.unsqueeze(-1).expand(*gradient.shape, 8) * torch.arange(8.0)


def _logits_are_whole(mesh: DeviceMesh) -> None:
    """Functions of sharded logits and their gradients are those of whole logits."""
    group, rank = mesh.get_group(), mesh.get_local_rank()
    torch.manual_seed(0)
    values, y = torch.randn(2, 5, 8), torch.tensor([[3, 1, 2, 7, 5], [0, 4, 3, 6, 2]])
    for sharded, losses in ((True, LOSSES), (False, GATHERED)):
        for name, loss in losses.items():
            x = values.clone().requires_grad_()
            local = values.chunk(2, -1)[rank].clone().requires_grad_()
            logits = ShardedLogits.wrap(local, group)
            whole = patch.object(ShardedLogits, "full_tensor", autospec=True)
            with whole as gather:
                gather.side_effect = whole.temp_original
                expected, given = loss(x, y), loss(logits, y)
                assert bool(gather.called) is not sharded, name
            torch.testing.assert_close(given, expected, msg=lambda m: f"{name}: {m}")  # noqa: B023
            if not expected.requires_grad:
                assert not given.requires_grad
                continue
            expected.backward()
            given.backward()
            torch.testing.assert_close(
                local.grad,
                x.grad.chunk(2, -1)[rank],  # type: ignore[union-attr]
                msg=lambda m: f"{name}: {m}",  # noqa: B023
            )
    logits = ShardedLogits.wrap(values.chunk(2, -1)[rank], group)
    assert torch.isnan(F.cross_entropy(logits[0], torch.full((5,), 8)))  # no such token
    assert F.cross_entropy(logits[0].bfloat16(), y[0]).dtype == torch.bfloat16
    for write in (lambda: logits.div_(2), lambda: logits.__setitem__(0, 1), logits.data_ptr):
        with pytest.raises(NotImplementedError, match="full_tensor"):
            write()


CHECKS = (
    _logits_are_whole,
    _wrong_plans_are_found,
    _a_norm_in_front_gathers_nothing,
    _later_is_not_too_late,
    _answers_beside_training,
)


def _on_two_ranks(rank: int, world: int) -> None:
    mesh = _mesh(world)
    for check in (*CHECKS, _all_equal_one_process):
        check(mesh)


test_two_ranks = rank_tests(on_ranks(_on_two_ranks, 2, timeout=240))


class AutoModule(ParallelModule):
    """The example's decoder, whose module says nothing of ranks."""

    def __init__(self) -> None:
        super().__init__(None, lr=1e-2)
        torch.manual_seed(0)
        self.net = _decoder()

    def predict_step(self, tokens: Tensor, batch_idx: int) -> dict[str, Tensor]:
        """Return logits, as models of Hugging Face do."""
        return {"logits": self.net(tokens)}


def _fit(root: str, strategy: Any, devices: int) -> tuple[list[float], dict[str, Any], Tensor]:
    module, losses = AutoModule(), Losses()
    options: dict[str, Any] = {"callbacks": [losses], "max_steps": 5, "gradient_clip_val": 1.0}
    options["use_distributed_sampler"] = False
    loader = DataLoader([batch(i, size=1)[0] for i in range(40)], batch_size=8)
    fitted = trainer(strategy, root, devices=devices, **options)
    fitted.fit(module, loader)
    shards = {name: local_tensor(p.detach()).shape for name, p in module.named_parameters()}
    predictions: Any = fitted.predict(module, loader)
    logits = predictions[0]["logits"]
    assert type(logits) is Tensor
    return losses.values, shards, logits


def _train(rank: int, world: int, root: str) -> tuple[list[float], dict[str, Any], Tensor]:
    options = {"tensor_parallel_size": 2, "tensor_parallel": "auto"}
    return _fit(root, QuantizedFSDPStrategy(**options, **PLAIN), world)


def test_trainer_splits_a_model_by_itself(tmp_path: Path) -> None:
    expected, whole, predicted = _fit(str(tmp_path), "auto", 1)
    for losses, shards, logits in run_trainer(_train, 2, str(tmp_path)):
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(logits, predicted, rtol=1e-4, atol=1e-4)
        halved = {name for name, shape in shards.items() if shape.numel() < whole[name].numel()}
        assert halved == {name for name in whole if "norm" not in name}


class Bare(nn.Module):
    """Brings no plan."""


def _with(plan: Any, model: nn.Module | None = None) -> nn.Module:
    model = model or ShiftingModel(Shifts())
    model.tensor_parallel_plan = plan
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no plan": (Bare, r"no plan in `Bare`[\s\S]*def tensor_parallel_plan\(self\)"),
    "no layers": (lambda: _hugging_face("gpt2"), "`GPT2LMHeadModel` brings no plan for its layers"),
    "experts": (
        lambda: _hugging_face("qwen3_moe", num_experts=2, moe_intermediate_size=8),
        "`model.layers.0.mlp.experts.gate_up_proj` by the style `packed_colwise`",
    ),
    "heads": (
        lambda: _hugging_face("llama", hidden_size=36, intermediate_size=36, num_attention_heads=6),
        r"2 `num_key_value_heads`.*3 tensor-parallel ranks.*`tensor_parallel_size` 1 or 2\.",
    ),
    "not linear": (
        lambda: _with({"blocks.*": "colwise"}),
        "`blocks.0`, which is a `Shifts` here and no plain",
    ),
    "no such layer": (
        lambda: _with({**ShiftingModel.tensor_parallel_plan, "blocks.*.out": "rowwise"}),
        r"`blocks\.\*\.out` of its plan names nothing",
    ),
    "forgotten parameters": (
        lambda: _with(ShiftingModel.tensor_parallel_plan, ShiftingModel(Slopes())),
        '`blocks.0.act`, which has parameters beside .*"replicate" if not',
    ),
    "mixed plan": (
        lambda: _with({"blocks.*.up": ColwiseParallel(), "blocks.*.down": "rowwise"}),
        "mixes names of styles",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals_come_before_changes(kind: str) -> None:
    make, message = REFUSED[kind]
    model: Any = make()
    before = {name: id(p) for name, p in model.named_parameters()}
    three: Any = SimpleNamespace(size=lambda: 3)
    with pytest.raises((NotImplementedError, ValueError), match=message):
        split_plan(model, three)
    assert before == {name: id(p) for name, p in model.named_parameters()}
