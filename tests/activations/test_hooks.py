"""Saved-tensor hooks: unknown modules, and checkpointed layers."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lq_testing.small_block import WIDTH, assert_close, run, saved_by
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lq_lightning.activations import ActivationPolicy, quantize_activations
from lq_lightning.activations.measure import SavedTensors

HEADS = 2


class Mixer(nn.Module):
    """A block with a convolution and a function that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = F.mish(self.mix(x.transpose(1, 2)).transpose(1, 2))
        if scale is not None:
            y = y * scale
        return x + self.out(y)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, block: type[nn.Module], layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(layers))

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, *args)
        return x


class Checkpointed(nn.Module):
    """As Hugging Face's layers are: the class decides what is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mixer()
        self.gradient_checkpointing = True

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        return checkpoint(self.inner, x, *args, use_reentrant=False)


class CheckpointedCall(nn.Module):
    """As Hugging Face's layers of transformers 5.17 are: around the call, hooks and all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mixer()
        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def __call__(self, x: Tensor, *args: Tensor) -> Tensor:
        return self._gradient_checkpointing_func(partial(super().__call__), x, *args)

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        return self.inner(x, *args)


class Checkpointable(Mixer):
    """A layer of Hugging Face that is not checkpointed."""

    gradient_checkpointing = False


for layer in (Checkpointed, CheckpointedCall, Checkpointable):
    layer.__name__ = "GradientCheckpointingLayer"


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 40, WIDTH, requires_grad=True)


def floats(saved: SavedTensors) -> list[int]:
    return [s.nbytes for s in saved.storages if s.dtype.is_floating_point and s.nbytes]


@pytest.mark.parametrize("block", [Mixer, Checkpointable])
def test_unknown_blocks_are_packed_by_rule(x: Tensor, block: type[nn.Module]) -> None:
    model, name = Model(block), block.__name__
    exact, before = run(model, x)
    with pytest.warns(UserWarning, match=f"2 x {name}: .*Conv1d in them.* packed by rule as int8"):
        handle = quantize_activations(model)
    coded, after = run(model, x)
    assert_close(coded, exact)
    assert after.nbytes < 0.3 * before.nbytes
    assert not floats(after)
    (left,) = handle.unsupported
    assert (left.modules, left.count) == ((name,), 2)
    with pytest.deprecated_call():
        assert handle.left == [left]
    assert "Conv1d" in left.reason
    assert "int8" in left.reason
    handle.remove()
    torch.testing.assert_close(run(model, x)[0], exact, rtol=0, atol=0)


def test_unknown_modules_beside_the_blocks_are_packed() -> None:
    body = nn.ModuleDict({"stem": nn.Conv1d(WIDTH, WIDTH, 1), "layers": nn.ModuleList([Mixer()])})
    handle = quantize_activations(nn.ModuleDict({"body": body}))
    packed = [site.name for site in handle.sites if site.codec is not None]
    assert sorted(packed) == ["body.layers.0", "body.stem"]


def test_unknown_blocks_can_be_left(x: Tensor) -> None:
    model = Model(Mixer)
    _, before = run(model, x)
    handle = quantize_activations(model, ActivationPolicy(other=None))
    assert run(model, x)[1].nbytes == before.nbytes
    assert "left as they are" in handle.unsupported[0].reason


def test_what_the_caller_holds_is_not_packed(x: Tensor) -> None:
    """Rotary tables and masks are kept for all layers at once: a code for each would add to it."""
    model, table = Model(Mixer), torch.randn(2, 40, WIDTH)
    exact, before = run(model, x, table)
    quantize_activations(model)
    coded, after = run(model, x, table)
    assert_close(coded, exact)
    assert floats(after) == [table.numel() * 4]
    assert after.nbytes < before.nbytes


def test_hooks_of_others_get_the_codes(x: Tensor) -> None:
    model = Model(Mixer)
    exact, _ = run(model, x)
    quantize_activations(model)
    with torch.autograd.graph.save_on_cpu():
        output = model(x)
    found = torch.autograd.grad(output.square().sum(), [x, *model.parameters()])
    assert_close(torch.cat([g.double().flatten() for g in found]), exact)


def test_checkpoints_of_users_keep_their_own_hooks(x: Tensor) -> None:
    model = Mixer()
    exact, _ = run(model, x)
    quantize_activations(model)
    ran = []
    model.mix.register_forward_hook(lambda *_: ran.append(1))
    with SavedTensors(model) as saved:
        output = checkpoint(model, x, use_reentrant=False)
    assert floats(saved) == [x.numel() * 4], "the input, once"
    assert saved.nbytes == x.numel() * 4
    found = torch.autograd.grad(output.square().sum(), [x, *model.parameters()])
    gradients = torch.cat([g.double().flatten() for g in found])
    torch.testing.assert_close(gradients, exact, rtol=0, atol=0)
    assert len(ran) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_between_norm_and_linear(x: Tensor, reentrant: bool) -> None:
    """The region's second run does not see the code of its input, so the first must not either."""
    model = nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "out": nn.Linear(WIDTH, WIDTH)})

    def run() -> Tensor:
        output = checkpoint(model["out"], model["norm"](x), use_reentrant=reentrant)
        model.zero_grad()
        x.grad = None
        output.square().sum().backward()
        return torch.cat([g.grad.double().flatten() for g in (x, *model.parameters())])

    exact = run()
    quantize_activations(model)
    assert_close(run(), exact, 0.1)


class Wrapped(nn.Module):
    """Attention between what is unknown."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.mixer = Mixer()

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x + self.attention(x))


def test_attention_is_shielded_from_the_hooks_around_it(x: Tensor) -> None:
    """Left alone by the policy, it is left alone in unknown blocks too."""
    model = Model(Wrapped, 1)
    quantize_activations(model)
    _, saved = run(model, x)
    kept = [s for s in saved.storages if s.module == "blocks.0.attention"]
    assert [s.dtype for s in kept] == [torch.float32] * len(kept)
    assert kept
    assert any(s.dtype == torch.uint8 for s in saved.storages)


def codes(saved: SavedTensors) -> list[int]:
    return [s.nbytes for s in saved.storages if s.dtype == torch.uint8]


def test_weights_are_never_packed() -> None:
    model = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3), nn.Conv1d(WIDTH, WIDTH, 3)).bfloat16()
    quantize_activations(model)
    saved = saved_by(model, torch.randn(2, WIDTH, 32, dtype=torch.bfloat16))
    assert len(codes(saved)) == 1, "the first's input is held by the caller"


def test_casts_of_autocast_are_weights(x: Tensor) -> None:
    model = Model(Mixer, 1)
    with torch.autocast("cpu", torch.bfloat16):
        _, before = run(model, x)
        quantize_activations(model)
        _, after = run(model, x)
    assert 0 < len(codes(after)) <= len(before.storages)


@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.parametrize("layer", [Checkpointed, CheckpointedCall])
def test_checkpointed_layers_keep_codes_and_compute_again(
    x: Tensor, codec: str | None, layer: type[nn.Module]
) -> None:
    model, table = Model(layer), torch.randn(2, 40, WIDTH)
    exact, before = run(model, x, table)
    ran = []
    model.blocks[0].inner.mix.register_forward_hook(lambda *_: ran.append(1))
    handle = quantize_activations(model, ActivationPolicy(checkpoint=codec))
    assert not handle.unsupported
    coded, after = run(model, x, table)
    assert len(ran) == 2
    assert sum(floats(before)) == 3 * x.numel() * 4, "two inputs, and the table"
    if codec is None:
        torch.testing.assert_close(coded, exact, rtol=0, atol=0)
        assert after.nbytes == before.nbytes
    else:
        assert_close(coded, exact)
        assert floats(after) == [table.numel() * 4]


def test_checkpointing_may_be_switched_on_late(x: Tensor) -> None:
    model = Model(CheckpointedCall, 1)
    (layer,) = model.blocks
    handle = quantize_activations(model, ActivationPolicy(checkpoint="int8", other=None))
    layer._gradient_checkpointing_func = function = partial(checkpoint, use_reentrant=False)
    _, first = run(model, x)
    _, second = run(model, x)
    assert floats(first) == [x.numel() * 4]
    assert floats(second) == []
    handle.remove()
    assert layer._gradient_checkpointing_func is function


class Graph(nn.Module):
    """A layer of a graph network."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64))
        self.register_buffer("own", torch.eye(64).to_sparse())

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return torch.sparse.mm(edges, torch.sparse.mm(self.own, x @ self.weight)).sin()


def test_sparse_tensors_are_left_alone() -> None:
    layers, x = nn.ModuleList([Graph()]), torch.randn(64, 64, requires_grad=True)
    handle = quantize_activations(layers)
    assert handle.unsupported
    layers[0](x, torch.eye(64).to_sparse()).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, x.detach().cos(), atol=0.02, rtol=0.02)


class Changed(Mixer):
    """Changes what was saved for backward, as no module may."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.mix(x.transpose(1, 2)).transpose(1, 2)
        z = self.out(y if scale is None else y * scale) + F.mish(y).exp()
        y.add_(1)
        return x + z


class Written(nn.Module):
    """Writes into its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = F.mish(x) @ self.weight
        with torch.no_grad():
            self.weight.mul_(2)
        return y


@pytest.mark.parametrize(
    ("block", "offloaded"), [(Changed, False), (Changed, True), (Written, False)]
)
def test_saved_tensors_that_were_changed_are_refused(
    x: Tensor, block: type[nn.Module], offloaded: bool
) -> None:
    model = Model(block, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x).sum().backward()
    quantize_activations(model)
    offload = torch.autograd.graph.save_on_cpu() if offloaded else nullcontext()
    with offload:
        output = model(x)
    with pytest.raises(RuntimeError, match="modified by an in-place operation.*packed as codes"):
        output.sum().backward()


class Watched(Mixer):
    """Saves its function's result."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.mix(x.transpose(1, 2)).sigmoid()
        self.result = weakref.ref(y)
        return x + self.out(y.transpose(1, 2))


def test_a_graph_that_is_dropped_leaves_nothing(x: Tensor) -> None:
    model = Model(Watched, 1)
    quantize_activations(model)
    output = model(x)
    del output
    assert model.blocks[0].result() is None
