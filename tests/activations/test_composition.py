"""Quantized activations among what else a training does with modules and graphs."""

from __future__ import annotations

import copy
import io
import types
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from lq_testing.small_block import (
    EXACT,
    WIDTH,
    Block,
    Quantize,
    assert_close,
    gradients,
    saved_by,
    saved_nbytes,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from lq_lightning.activations import ActivationPolicy, ActivationRule
from lq_lightning.activations.measure import SavedTensors
from lq_lightning.activations.policy import RECIPES
from lq_lightning.activations.sites import sites_of
from lq_lightning.activations.sources import source_of


def test_graph_is_kept_for_a_second_backward(block: Block, x: Tensor, quantize: Quantize) -> None:
    quantize(block)
    loss = block(x).square().sum()
    first = torch.autograd.grad(loss, list(block.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(block.parameters()))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference"])
def test_without_gradients_nothing_changes_and_nothing_issaved_by(
    block: Block, x: Tensor, quantize: Quantize, mode: str
) -> None:
    expected = block(x)
    quantize(block)
    if mode == "eval":
        block.eval().requires_grad_(False)
        assert saved_nbytes(block, x.detach()) == 0
        output = block(x.detach())
    else:
        with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
            output = block(x)
    torch.testing.assert_close(output, expected, rtol=0, atol=0)


def test_second_derivative_is_refused(block: Block, x: Tensor, quantize: Quantize) -> None:
    handle = quantize(block)
    with pytest.raises(RuntimeError, match="create_graph=True.*have no derivative"):
        torch.autograd.grad(block(x).sum(), x, create_graph=True)
    handle.remove()
    torch.autograd.grad(block(x).square().sum(), x, create_graph=True)


def test_double_installation_is_refused_and_changes_nothing(
    block: Block, quantize: Quantize
) -> None:
    handle = quantize(block)
    with pytest.raises(RuntimeError, match="`norm` are quantized already"):
        quantize(block)
    handle.remove()
    handle.remove()
    assert not any("forward" in vars(module) for module in block.modules())


@pytest.mark.parametrize("recipe", ["agoq", "coat"])
def test_outputs_are_no_views(x: Tensor, quantize: Quantize, recipe: str) -> None:
    """FSDP2 loses its hook on an output that is a view, if that is changed in place."""
    model = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU())
    quantize(model, recipe)
    for part in model:
        x = part(x)
        assert x._base is None


@pytest.mark.parametrize(
    "rules", [(), (ActivationRule(module="mlp", recompute=True),)], ids=["codes", "recomputation"]
)
def test_copy_of_a_recomputed_or_coded_model_computes_alone(
    block: Block, x: Tensor, quantize: Quantize, rules: tuple[ActivationRule, ...]
) -> None:
    exact = gradients(block, x)
    handle = quantize(block, replace(EXACT, rules=rules))
    copied = copy.deepcopy(block)
    sites = [site for module in copied.modules() for site in sites_of(module)]
    own = {id(site) for module in block.modules() for site in sites_of(module)}
    assert sites
    assert not own & {id(site) for site in sites}
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
    coded = gradients(copied, x)
    assert_close(coded, exact)
    handle.remove()
    torch.testing.assert_close(gradients(copied, x), coded, rtol=0, atol=0)


def test_pickling_is_refused_while_quantized(block: Block, x: Tensor, quantize: Quantize) -> None:
    """A file would name forwards that no class has: it could be written, but not loaded."""
    function = nn.TransformerEncoderLayer(WIDTH, 2, 32)  # its activation is no module
    recomputed = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh())])
    rule = ActivationRule(module="0", recompute=True)
    models = (block, EXACT), (function, EXACT), (recomputed, ActivationPolicy(rules=(rule,)))
    for model, policy in models:
        handle = quantize(model, policy)
        with pytest.raises(RuntimeError, match=r"Call `remove\(\)`.*or save `model.state_dict"):
            torch.save(model, io.BytesIO())
        handle.remove()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert loaded.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("name", ["norm", "mlp", "out"])
def test_forward_of_an_instance_is_put_back(
    block: Block, x: Tensor, quantize: Quantize, name: str
) -> None:
    """Liger's kernels are bound to instances. A norm is recognized by what its class computes."""
    module = block.get_submodule(name)
    own = module.forward
    module.forward = own  # type: ignore[method-assign]
    handle = quantize(block)
    assert module.forward is not own
    block(x)
    handle.remove()
    assert vars(module)["forward"] is own


@pytest.mark.parametrize("name", ["norm", "mlp", "mlp.up_proj", "out"])
@pytest.mark.parametrize("bound", [True, False])
def test_other_forward_of_an_instance_is_not_lost(
    block: Block, x: Tensor, quantize: Quantize, name: str, bound: bool
) -> None:
    module = block.get_submodule(name)
    own = module.forward
    twice = lambda *args: 2 * own(args[-1])  # noqa: E731
    module.forward = types.MethodType(twice, module) if bound else twice  # type: ignore[method-assign]
    exact = gradients(block, x)
    quantize(block)
    assert_close(gradients(block, x), exact)


def test_hooks_of_modules_run(block: Block, x: Tensor, quantize: Quantize) -> None:
    seen: list[str] = []
    for name in ("norm", "mlp", "mlp.down_proj", "out"):
        block.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    quantize(block)
    block(x)
    assert seen == ["norm", "mlp.down_proj", "mlp", "out"]


class Several(nn.Module):
    """A norm that is used twice, a tied weight, and an output that is changed in place."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.change == "in place":
            y.mul_(2)
        elif self.change == "view":
            y = y.flatten(0, 1).view_as(y)
        elif self.change == "rows":
            y = y.transpose(0, 1)[..., :]
        z = self.norm(self.first(y))
        return self.second(z) + self.first(y).mul_(3)


@pytest.mark.parametrize(("change", "kept"), [("", 0), ("view", 0), ("in place", 1), ("rows", 2)])
def test_source_follows_the_values(x: Tensor, quantize: Quantize, change: str, kept: int) -> None:
    model = Several(change)
    exact = gradients(model, x)
    quantize(model)
    assert_close(gradients(model, x), exact, 0.02)
    with SavedTensors(model) as saved:
        output = model(x)
    del output
    full = [s for s in saved.storages if s.nbytes == x.numel() * 4]
    assert len(full) == kept


@pytest.mark.parametrize("recipe", ["agoq", "coat"])
@pytest.mark.parametrize("kind", ["norm", "activation", "linear", "checkpoint"])
def test_a_write_that_autograd_does_not_see_is_refused_in_the_first_batch(
    x: Tensor, quantize: Quantize, recipe: str, kind: str
) -> None:
    """Layers behind it would read what the tensor was before."""
    maker = {"activation": nn.GELU(), "linear": nn.Tanh()}.get(kind, nn.LayerNorm(WIDTH))
    layers = nn.ModuleList([maker, *(nn.Linear(WIDTH, WIDTH) for _ in range(2))])
    policy = RECIPES[recipe]
    quantize(layers, replace(policy, linear="int8") if kind == "linear" else policy)
    factor = torch.tensor(2.0)

    def forward(x: Tensor) -> Tensor:
        h = layers[0](x)
        y = layers[1](h)
        h.data.mul_(factor)
        return (y + layers[2](h.flatten(0, 1)).view_as(y)).sum()

    def run() -> Tensor:
        return checkpoint(forward, x, use_reentrant=False) if kind == "checkpoint" else forward(x)

    name = {"linear": "1"}.get(kind, "0")
    with pytest.raises(RuntimeError, match=f"the code of `{name}` was changed .*does not see"):
        run()
    run()  # nothing is compared after the first call
    factor.fill_(1.0)
    for module in layers:
        for site in sites_of(module):
            site.watched = False
    run().backward()  # nor is anything wrong


class Reads(nn.Module):
    """Linear layers that read a tensor and its transpose, or a tensor kept over steps, by name."""

    def __init__(self, kind: str, kept: Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kind, self.kept = kind, nn.Parameter(kept) if "parameter" in kind else kept

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "transposed":
            x = x * 1
            return self.first(x.transpose(0, 1)).transpose(0, 1) + self.second(x)
        kept = self.kept.unsqueeze(0) if self.kind == "view of a parameter" else self.kept
        return self.first(kept) + self.second(kept) + x


@pytest.mark.parametrize("kind", ["transposed", "batch", "parameter", "view of a parameter"])
def test_codes_are_of_what_is_read(quantize: Quantize, kind: str) -> None:
    """A step may refill a tensor unseen, as NumPy, FSDP2 and receives into buffers do."""
    x = torch.randn(3, 40, WIDTH, requires_grad=True)
    model = Reads(kind, torch.randn(40, WIDTH))
    quantize(model, ActivationPolicy(norm=None, activation=None, linear="int8"))
    for _ in range(3):
        coded = gradients(model, x)
        for site in (site for module in model.modules() for site in sites_of(module)):
            site.enabled = False
        assert_close(coded, gradients(model, x), 0.02)
        for site in (site for module in model.modules() for site in sites_of(module)):
            site.enabled = True
        model.kept.data.mul_(-1.5)


@pytest.mark.parametrize("view", [False, True])
def test_compiled_layers_read_what_was_written_through_data(quantize: Quantize, view: bool) -> None:
    layers = nn.ModuleList([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(x: Tensor) -> Tensor:
        h = layers[0](x)
        y = layers[1](h)
        (h.flatten(0, 1) if view else h).data.mul_(2)
        return y + layers[2](h)

    def gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
        layers.zero_grad()
        run(x).square().sum().backward()
        return layers[2].weight.grad.clone()

    x = torch.randn(3, 40, WIDTH)
    exact = gradient(forward)
    quantize(layers)
    coded = gradient(torch.compile(forward, backend="aot_eager"))
    torch.testing.assert_close(coded, exact, rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean")
def test_bits_are_read_neither_in_a_trace_nor_to_trace(x: Tensor, quantize: Quantize) -> None:
    counter = CompileCounter()
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    quantize(model)
    torch.jit.trace(model, x, check_trace=False)
    torch.compile(model, backend=counter)(x)
    assert not any(site.watched for module in model for site in sites_of(module))
    model(x)
    assert sites_of(model[0])[0].watched
    torch.compile(model, backend=counter)(x)
    assert counter.frame_count == 1, "the first call in eager code compiles nothing again"


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_between_activation_and_projection(x: Tensor, quantize: Quantize, p: float) -> None:
    """Behind dropout the projection's input is coded by itself: nobody else keeps it."""
    layers = (nn.Linear(WIDTH, 256), nn.GELU(), nn.Dropout(p), nn.Linear(256, WIDTH))
    model = nn.Sequential(nn.LayerNorm(WIDTH), *layers)

    def run() -> Tensor:
        torch.manual_seed(3)
        return gradients(model, x)

    exact = run()
    quantize(model)
    assert_close(run(), exact)
    quantized = [s for s in saved_by(model, x).storages if s.dtype == torch.uint8 and s.nbytes]
    assert len(quantized) == (3 if p else 2)
    assert len([s for s in saved_by(model, x).storages if s.nbytes == 32 * 256 * 4]) == (p > 0)


@pytest.mark.parametrize("recipe", [EXACT, "coat"])
def test_autocast_holds_no_copies_of_weights(
    block: Block, x: Tensor, quantize: Quantize, recipe: str | ActivationPolicy
) -> None:
    def run() -> tuple[Tensor, SavedTensors]:
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(block, x), saved_by(block, x)

    exact, before = run()
    quantize(block, recipe)
    coded, after = run()
    assert_close(coded, exact, 0.02 if recipe is EXACT else 0.12)
    assert after.nbytes < 0.5 * before.nbytes
    weights = {p.numel() for p in block.parameters()} - {WIDTH}
    assert not any(torch.Size(s.shape).numel() in weights for s in after.storages)


def test_frozen_weights_save_what_backward_needs(
    block: Block, x: Tensor, quantize: Quantize
) -> None:
    block.requires_grad_(False)
    block.mlp.down_proj.requires_grad_(True)
    exact = gradients(block, x)
    quantize(block)
    assert_close(gradients(block, x), exact)
    block.mlp.down_proj.requires_grad_(False)
    codes = [s for s in saved_by(block, x).storages if s.dtype == torch.uint8]
    assert len(codes) == 4, "two norms, gate and up: no linear layer"
    assert not [s for s in saved_by(block, x.detach()).storages if s.nbytes], "no gradient wanted"


@pytest.mark.parametrize("recipe", ["agoq", "coat"])
def test_nothing_rebuilt_is_held_for_frozen_weights(
    x: Tensor, quantize: Quantize, recipe: str
) -> None:
    """As long as the graph lives; a frozen layer reads nothing of what others rebuild."""
    norm, layers = nn.LayerNorm(WIDTH), [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    layers[0].requires_grad_(False)
    quantize(nn.ModuleList([norm, *layers]), recipe)
    normed = norm(x)
    source = source_of(normed)
    sum(layer(normed) for layer in layers).sum().backward(retain_graph=True)
    assert source is not None
    assert source.shared is not None
    assert source.shared._value is None


def test_nan_reaches_the_gradients(block: Block, x: Tensor, quantize: Quantize) -> None:
    quantize(block)
    with torch.no_grad():
        x[0, 3, 5] = float("nan")
    assert gradients(block, x).isnan().any()


@pytest.mark.parametrize("recipe", ["agoq", "coat", "fp8-4bit"])
def test_split_backward_computes_each_product_once(
    x: Tensor, quantize: Quantize, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """Zero-bubble schedules ask for gradients of inputs first, and of weights later."""
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))
    quantize(model, recipe)
    norm, linear = model[0], model[1]
    normed = norm(x)
    loss = linear(normed).square().sum()
    rebuilds: list[object] = []
    for name in ("rebuild", "rebuild_float8"):
        kind = type(normed._lq_source.codes)
        function = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *a, f=function: (rebuilds.append(1), f(*a))[1])
    (dx,) = torch.autograd.grad(loss, normed, retain_graph=True)
    assert not rebuilds, "the weight's gradient was not asked for"
    (dweight,) = torch.autograd.grad(loss, linear.weight)
    assert len(rebuilds) == 1
    assert dx.isfinite().all()
    assert dweight.norm() > 0
