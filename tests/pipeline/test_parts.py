"""A step in parts computes what the whole step computes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lq_testing.models import VOCAB, WIDTH, Block, LoRABlock, TinyLM, batch
from lq_testing.stages import Step, check_equal, cut
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lq_lightning.pipeline.partition import keep_stages, kept_stages
from lq_lightning.pipeline.plan import plan_stages

BATCHES = [batch(step, 0, size=2) for step in range(2)]


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def whole(model: Any, tokens: Tensor) -> Tensor:
    """For models that return the loss."""
    return model(tokens)


def predicting(model: Any, tokens: Tensor) -> Tensor:
    """For models that return logits."""
    return loss_of(model(tokens), tokens)


class Embeddings(nn.Module):
    """Tokens and positions in a module of its own, with a projection and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, 8), nn.Embedding(16, 8)
        self.project, self.norm = nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        x = self.tokens(tokens)
        x += self.places(places)
        return self.norm(self.project(x))


class NanoGPT(nn.Module):
    """Everything in a dictionary, with the blocks beside the rest; positions as a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)  # in front of the layers, used behind them
        self.positions = nn.Parameter(torch.randn(16, WIDTH))
        self.transformer = nn.ModuleDict(
            {
                "embeddings": Embeddings(),
                "h": nn.ModuleDict({f"layer_{i}": Block() for i in range(4)}),
                "norm": nn.LayerNorm(WIDTH),
            }
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.transformer["embeddings"](tokens) + self.positions[: tokens.shape[1]]
        for block in self.transformer["h"].values():
            x = block(x)
        x = self.transformer["norm"](x)
        return self.head(x)


class TupleBlock(Block):
    """As older models have them: keywords, and a tuple with more than the hidden state."""

    kind = "full"

    def __init__(self) -> None:
        super().__init__()
        self.attention_type = "full"

    def forward(self, hidden_states: Tensor, scale: Tensor | None = None) -> Any:
        x = super().forward(hidden_states)
        return (x if scale is None else x * scale), None, x.mean()


class Loose(nn.Module):
    """Calls its layers by keyword, on what `use` says."""

    def __init__(self, use: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(TupleBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.use = use

    def forward(self, tokens: Tensor) -> Tensor:
        if self.use == "early head":
            self.get_submodule("head")(torch.zeros(WIDTH))  # unseen by who reads the source
        x = embedded = self.embed(tokens)
        scale = torch.ones(tokens.shape[1], 1)
        extras = []
        for layer in self.layers[1:] if self.use == "skip" else self.layers:
            assert layer.kind == "full"
            assert layer.attention_type == "full"  # a setting that placeholders keep
            scaled = embedded if self.use == "embedded" else scale
            x, _, extra = layer(hidden_states=x, scale=scaled)
            extras.append(extra)
            if self.use == "exit":
                break
        if self.use == "twice":
            for layer in self.layers:
                x, _, _ = layer(x)
        logits = self.head(x)
        if self.use == "extras":
            logits = logits + torch.stack(extras).sum()
        if self.use == "head of embedding":
            logits = logits + F.linear(x, self.embed.weight)
        if self.use == "late embedding":
            logits = logits + self.embed(tokens).sum()
        return logits


class TorchEncoder(nn.Module):
    """torch's own container, which reads settings inside of its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(self.embed(tokens), mask, is_causal=True))


def sequential() -> nn.Module:
    layers = [Block() for _ in range(3)]
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *layers, nn.Linear(WIDTH, VOCAB))


@pytest.mark.parametrize(
    ("build", "step"),
    [
        (lambda: TinyLM(layers=4), whole),
        (lambda: TinyLM(layers=4, tied=True), whole),
        (lambda: TinyLM(LoRABlock, layers=4), whole),
        (NanoGPT, predicting),
        (Loose, predicting),
        (TorchEncoder, predicting),
        (sequential, predicting),
    ],
    ids=["plain", "tied", "frozen", "dictionaries", "tuples", "torch", "sequential"],
)
def test_stages_compute_what_the_whole_model_does(
    build: Callable[[], nn.Module], step: Step
) -> None:
    torch.manual_seed(1)
    model = build()
    check_equal(model, step, BATCHES, 2)
    layers = len(plan_stages(model, 1).layers)
    check_equal(model, step, BATCHES, layers - layers % 2, 2)  # stages in turn on fewer ranks


def test_parameters_of_a_stage_have_the_names_of_the_whole_model() -> None:
    ranks = cut(TinyLM(layers=4), whole, BATCHES, 4, 2)
    names = [[name for name, _ in stage.named_parameters()] for stage in ranks.stages]
    block = [f"blocks.0.{name}" for name, _ in Block().named_parameters()]
    assert set(names[0]) == {"tiny", "embed.weight", *block}
    assert set(names[3]) == {"tiny", "head.weight", *(n.replace("0", "3", 1) for n in block)}
    assert not set(names[1]) & set(names[2]) - {"tiny"}
    assert {id(p) for p in ranks.stages[2].parameters()} < {
        id(p) for p in ranks.modules[0].parameters()
    }
    assert not list(ranks.stages[0].state_dict())


def test_a_weight_that_stages_of_a_rank_share_is_a_parameter_of_each() -> None:
    model = TinyLM(layers=4, tied=True)
    model.blocks[2].up.weight = model.blocks[1].up.weight = model.blocks[0].up.weight
    stages = cut(model, whole, BATCHES, 2, 2, split=[2, 2]).stages
    once = [{name for name, _ in stage.named_parameters()} for stage in stages]
    assert "blocks.0.up.weight" in once[0]
    assert "blocks.1.up.weight" not in once[0]
    assert "blocks.1.up.weight" in dict(stages[0].named_parameters(remove_duplicate=False))
    assert {"blocks.2.up.weight", "head.weight"} <= once[1]


def test_modules_that_stay_are_the_same_objects_on_the_meta_device_too() -> None:
    with torch.device("meta"):
        model = TinyLM(layers=4)
    blocks, parameters = list(model.blocks), dict(model.named_parameters())
    plan = plan_stages(model, 4)
    record = keep_stages(model, plan, [1, 3])
    assert record is kept_stages(model)
    assert record.absent == ("blocks.0", "blocks.2", "embed")
    assert model.blocks[1] is blocks[1]
    assert type(model.blocks[1]).__name__ == "Block"
    assert isinstance(model.blocks[1], Block)
    left = dict(model.named_parameters())
    assert all(parameters[name] is parameter for name, parameter in left.items())
    assert len(left) == 2 * len(list(Block().parameters())) + 2


def test_a_model_that_starts_from_meta_keeps_second_names() -> None:
    model = TinyLM(layers=2)
    model.embedding = model.embed
    keep_stages(model, plan_stages(model, 2), [1])
    assert model.embedding is model.embed
    assert "embed.weight" not in model.state_dict()


@pytest.mark.parametrize("compiled", [False, True])
def test_sharded_layers_run_their_hooks_before_the_stage_ends(compiled: bool) -> None:
    """The root gathers around the part; each layer frees its weights although the step is left."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    states = []

    def shard(module: Any) -> Callable[..., Any]:
        for layer in module.blocks:
            if isinstance(layer, Block):
                if compiled:
                    layer.compile(backend="eager")
                fully_shard(layer, mesh=mesh)
                layer.register_forward_hook(lambda *args: states.append("after"))
        fully_shard(module, mesh=mesh)
        module.run_part = lambda part, hidden: part(hidden)
        register_fsdp_forward_method(module, "run_part")
        return lambda part, hidden: module.run_part(part, hidden)

    model = TinyLM(layers=4, tied=True)
    check_equal(model, whole, BATCHES, 2, prepare=shard)
    ranks = check_equal(model, whole, BATCHES, 4, 2, prepare=shard)
    assert len(states) == 2 * (1 + 4 * len(BATCHES))
    assert all("FSDP" in type(module).__name__ for module in ranks.modules)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("around", [False, True])
def test_checkpointed_layers_compute_again_with_their_own_hidden_state(
    around: bool, reentrant: bool
) -> None:
    """Two micro-batches are on their way when the first one runs backward."""

    class Checkpointed(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    def step(model: Any, tokens: Tensor) -> Tensor:
        x = model.embed(tokens)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant) if around else block(x)
        return loss_of(model.head(x), tokens)

    model = TinyLM(Block if around else Checkpointed, layers=6)
    ranks = cut(model, step, BATCHES, 3)
    if around and reentrant:
        with pytest.raises(NotImplementedError, match="`blocks.2` .*use_reentrant=False"):
            ranks.forward()
        return
    passes = [ranks.forward(index) for index in range(2)]
    for outputs, received in passes:
        ranks.backward(outputs, received)
    torch.stack([step(model, tokens) for tokens in BATCHES]).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(ranks.gradients(), expected)


def test_half_precision_embeddings_are_replaced_in_their_dtype() -> None:
    seen = []

    class Mask(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    def step(model: Any, tokens: Tensor) -> Tensor:
        x = model.embed(tokens)
        seen.append(x.dtype)
        for block in model.blocks:
            x = block(x)
        return loss_of(model.head(x), tokens)

    ranks = cut(TinyLM(Mask).to(torch.bfloat16), step, BATCHES, 2)
    ranks.forward()
    assert set(seen) == {torch.bfloat16}
    # no memory for what nobody reads
    with pytest.raises(AttributeError, match="`embed.weight`: `embed` is on another stage"):
        _ = ranks.modules[1].embed.weight


def test_a_probe_leaves_random_numbers_and_buffers_and_needs_no_gradients() -> None:
    modes = []

    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
            return super().forward(x)

    def step(model: Any, tokens: Tensor) -> Tensor:
        modes.append(torch.is_grad_enabled())
        x = F.dropout(model.embed(tokens), 0.5, model.training)
        for block in model.blocks:
            x = block(x)
        return loss_of(model.head(x), tokens)

    ranks = cut(TinyLM(Counting, layers=2), step, BATCHES, 2)
    outputs = []
    for probe in (False, True):
        torch.manual_seed(3)
        if probe:
            ranks.stages[0].probe(0)
        outputs.append(ranks.stages[0]())
    assert torch.equal(*outputs)
    assert modes == [False, True, False, True]
    before = {name: buffer.clone() for name, buffer in ranks.modules[0].named_buffers()}
    ranks.stages[0].probe(0)
    after = dict(ranks.modules[0].named_buffers())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_step_that_was_left_holds_no_memory() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def step(model: Any, tokens: Tensor) -> Tensor:
        own = torch.ones(3)
        alive.append(weakref.ref(own))
        return model(tokens) + own.sum()

    gc.disable()
    try:
        ranks = cut(TinyLM(layers=2), step, BATCHES, 2)
        ranks.stages[0]()
    finally:
        gc.enable()
    assert len(alive) == 2
    assert not any(reference() is not None for reference in alive)


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        ("skip", RuntimeError, "`layers.1` is called where `layers.0` was expected"),
        ("exit", RuntimeError, "`head` is used before all layers have run"),
        ("twice", RuntimeError, "`layers.0` is called a second time in one step"),
        ("embedded", NotImplementedError, "takes `scale` besides the hidden state"),
        ("early head", RuntimeError, "`head` is used in front of the layers"),
        ("head of embedding", AttributeError, "`embed` is on another stage.*self.head.weight ="),
        ("late embedding", RuntimeError, "`embed` is used behind the layers"),
    ],
)
def test_steps_that_cannot_run_in_parts(use: str, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        cut(Loose(use), predicting, BATCHES, 3).forward()


def test_what_earlier_stages_gave_besides_the_hidden_state_is_nan_and_refused() -> None:
    ranks = cut(Loose("extras"), predicting, BATCHES, 3)
    with pytest.raises(NotImplementedError, match="step returns depends on `layers.0`"):
        ranks.forward()
    outputs, _ = ranks.forward()  # only the first part is watched
    assert outputs[-1].isnan()


def test_steps_around_the_layers_that_cannot_run_in_parts() -> None:
    def fail(step: Callable[[Any, Tensor], Any], message: str, error: type = RuntimeError) -> None:
        with pytest.raises(error, match=message):
            cut(TinyLM(layers=2), step, BATCHES, 2).forward()

    def swallowing(model: Any, tokens: Tensor) -> Any:
        try:
            return model(tokens)
        except BaseException:
            return None

    fail(swallowing, "must not catch `BaseException`")
    fail(lambda model, tokens: tokens, "ended without calling `blocks.0`: .* all 2 layers")
    for flag in ("output_hidden_states", "output_router_logits"):

        def collecting(model: Any, tokens: Tensor, flag: str = flag) -> Any:
            return model.blocks[0](model.embed(tokens), **{flag: True})

        fail(collecting, f"`{flag}=True` collects", NotImplementedError)
    ranks = cut(TinyLM(layers=2), whole, BATCHES, 2)
    with pytest.raises(RuntimeError, match="`blocks.1` is called outside of a training"):
        ranks.modules[0](BATCHES[0])
    with pytest.raises(RuntimeError, match="shape .4, 8, 24., but .* one of .2, 8, 24"):
        ranks.stages[1](torch.zeros(4, 8, WIDTH))


@pytest.mark.parametrize(
    ("odd", "result", "message"),
    [
        (0, lambda x: {"x": x}, "`blocks.0` returns a `dict`"),
        (0, lambda x: x[:, :3], "behind `blocks.0` .* shape .2, 3, 24., but in .* .2, 8, 24."),
        (1, lambda x: x.double(), "behind `blocks.1` .*float64, but .*float32"),
        (1, lambda x: x[:, :3], "behind `blocks.1` .* `blocks.2`.* .2, 3, 24. .* .2, 8, 24."),
        (1, lambda x: (x,), "`blocks.2` is called with a `tuple`"),
    ],
)
def test_layers_that_cannot_be_cut(odd: int, result: Callable[[Tensor], Any], message: str) -> None:
    class Odd(Block):
        def forward(self, x: Tensor) -> Any:
            return result(super().forward(x)) if self.odd else super().forward(x.float())

    model = TinyLM(Odd, layers=3)
    for index, block in enumerate(model.blocks):
        block.odd = index == odd
    with pytest.raises(NotImplementedError, match=message):
        cut(model, whole, BATCHES, 3).forward()


def test_the_layer_that_changes_the_shape_is_named() -> None:
    class Halves(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, ::2] if self.halves else x)

    for odd, split in ((1, [4, 1]), (2, [1, 3, 1])):
        model = TinyLM(Halves, layers=5)
        for index, block in enumerate(model.blocks):
            block.halves = index == odd
        message = rf"behind `blocks.{odd}` the .* `blocks.4`, where .* \(2, 4, 24\)"
        with pytest.raises(NotImplementedError, match=message):
            cut(model, whole, BATCHES, len(split), split=split).forward()


def test_shapes_may_change_within_a_stage() -> None:
    class There(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x[:, ::2] if self.place == 1 else x
            return super().forward(torch.cat([x, x], 1) if self.place == 2 else x)

    model = TinyLM(There, layers=4)
    for index, block in enumerate(model.blocks):
        block.place = index
    check_equal(model, whole, BATCHES, 2, split=[3, 1])
