"""Both halves of a backward pass together are the whole, also where weights are shared."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from lq_lightning.activations import quantize_activations
from lq_lightning.pipeline.split_backward import (
    Received,
    SavedTensors,
    SplitBackward,
    check_not_compiled,
    receive,
)


class Net(nn.Module):
    """Linear layers; ``form`` says how."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "plain":
            return self.b(torch.tanh(self.a(self.norm(x))))
        if self.form == "shared":  # one layer twice, one use behind the other
            return self.a(torch.tanh(self.a(x))) + self.b.bias
        if self.form == "tied":  # a weight in two layers, and a norm between them
            y = self.norm(torch.tanh(self.a(x)))
            return (
                self.frozen(nn.functional.linear(y, self.a.weight, self.b.bias)) * self.norm.weight
            )
        if self.form == "beside":  # weights that meet the input only at the end
            return x + self.b(torch.tanh(self.a(torch.ones(3, 6))))
        return self.b(torch.tanh(self.a(torch.ones(3, 6))))  # without the input


FORMS = ["plain", "shared", "tied", "beside", "without"]


def _whole(form: str, seed: Tensor | None) -> tuple[Tensor | None, dict[str, Tensor | None]]:
    net, x = Net(form), torch.linspace(-1, 1, 18).view(3, 6).requires_grad_()
    out = net(x) if seed is not None else net(x).square().mean()
    out.backward(seed)
    return x.grad, {name: p.grad for name, p in net.named_parameters()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scalar", [False, True])
def test_halves_are_the_whole(form: str, scalar: bool) -> None:
    seed = None if scalar else torch.linspace(-2, 1, 18).view(3, 6)
    wanted, gradients = _whole(form, seed)
    net = Net(form)
    x, received = receive(torch.linspace(-1, 1, 18).view(3, 6))
    out = net(x) if seed is not None else net(x).square().mean()
    split = SplitBackward(get_gradient_edge(out), received, net.parameters())
    split.backward_input(seed)
    assert all(p.grad is None for p in net.parameters())
    found = received.take_gradient()
    torch.testing.assert_close(found, torch.zeros(3, 6) if wanted is None else wanted)
    del out
    split.backward_weight()
    for name, parameter in net.named_parameters():
        expected = gradients[name]
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(parameter.grad, expected)


def test_an_output_of_neither_input_nor_weights_has_no_gradients() -> None:
    weight, (_, received) = nn.Parameter(torch.ones(2)), receive(torch.ones(3))
    loss = torch.zeros((), requires_grad=True)  # as of a step that returned none
    split = SplitBackward(get_gradient_edge(loss), received, [weight])
    split.backward_input(None)
    assert torch.equal(received.take_gradient(), torch.zeros(3))
    split.backward_weight()
    assert weight.grad is None


def test_each_product_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[str] = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, w: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx, g: Tensor):  # type: ignore[no-untyped-def]
            x, w = ctx.saved_tensors
            wants: Callable[[object], bool] = torch._C._will_engine_execute_node
            dx = dw = None
            if wants(ctx.next_functions[0][0]):
                products.append("x")
                dx = g @ w
            try:
                wanted = wants(ctx.next_functions[1][0])
            except RuntimeError:
                wanted = True
            if wanted:
                products.append("w")
                dw = g.t() @ x
            return dx, dw

    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
    y, received = receive(torch.randn(2, 4))
    for w in weights:
        y = torch.tanh(Product.apply(y, w))
    split = SplitBackward(get_gradient_edge(y), received, weights)
    split.backward_input(torch.ones(2, 4))
    assert products == ["x"] * 3
    split.backward_weight()
    assert sorted(products) == ["w"] * 3 + ["x"] * 3


class Scale(torch.autograd.Function):
    """A product with a weight, which tells when what it saved is freed."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x: Tensor, w: Tensor, alive: list[weakref.ref[Tensor]]
    ) -> Tensor:
        x = x.clone()
        alive.append(weakref.ref(x.untyped_storage()))
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g: Tensor):  # type: ignore[no-untyped-def]
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0), None


@pytest.mark.parametrize("form", ["ends in one", "ends in C++", "in a row", "without"])
def test_nodes_of_functions_stay_until_their_half_is_done(form: str) -> None:
    weights = [torch.full((4,), 1.0 + i, requires_grad=True) for i in range(3)]
    x, received = receive(torch.linspace(-1, 1, 8).view(2, 4))
    alive: list[weakref.ref[Tensor]] = []
    left: list[int] = []

    def run() -> Tensor:
        y = torch.ones(2, 4) if form == "without" else x * 1.0
        for w in weights:
            y = Scale.apply(y if form == "in a row" else torch.tanh(y), w, alive)
        return y.sin() if form == "ends in C++" else y

    wanted = torch.autograd.grad(run().sum(), weights)
    alive.clear()
    for w in weights:
        w.register_post_accumulate_grad_hook(
            lambda _: left.append(sum(ref() is not None for ref in alive))
        )
    split = SplitBackward(get_gradient_edge(run()), received, weights)
    # Python's objects for nodes of functions own them in some versions of torch only.
    split.backward_input(torch.ones(2, 4))
    owners = [owner for meeting in split._cut_points for owner in meeting.owners]
    assert len(owners) == (1 if form == "without" else 3)
    assert not any(isinstance(owner, BackwardCFunction) for owner in owners)
    owners.clear()
    split.backward_weight()
    torch.testing.assert_close([w.grad for w in weights], list(wanted))
    if form.startswith("ends"):  # nothing is held by what comes before it
        assert left == [3, 2, 1]
    assert all(ref() is None for ref in alive)


class Checkpointed(nn.Module):
    """Three blocks that run again; ``form`` says how."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.form == "none":
                x = block(x)
            elif self.form == "shared":  # nodes where the weight comes in lead to each other
                x = self.again(self.blocks[0], self.again(block, x))
            else:
                x = self.again(block, x)
        return x

    def again(self, block: nn.Module, x: Tensor) -> Tensor:
        run: Callable[[Tensor], Tensor] = block
        context = noop_context_fn
        if self.form == "nested":

            def run(y: Tensor) -> Tensor:
                return checkpoint(block, y, use_reentrant=False).sin()

        if self.form == "selective":
            context = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        reentrant = self.form == "reentrant"
        extra = {} if reentrant else {"context_fn": context}
        out: Tensor = checkpoint(run, x, use_reentrant=reentrant, **extra)
        return out


class Block(nn.Module):
    """Counts its runs, and remembers tensors of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.rand(6))
        self.runs = 0
        self.inputs: list[weakref.ref[Tensor]] = []
        self.others: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.begins()
        y = torch.dropout(self.a(x), 0.3, True)
        z = torch.exp(y)
        w = torch.sigmoid(z)
        self.inputs = [weakref.ref(w.untyped_storage())]
        self.others = [weakref.ref(z.untyped_storage())]
        # What the last exponential saves leads to a weight, but not to the input.
        return self.b(w) * self.scale.exp() + x

    def begins(self) -> None: ...


def _checkpointed(form: str) -> tuple[Checkpointed, SplitBackward, Received]:
    net, (x, received) = Checkpointed(form), receive(torch.linspace(-1, 1, 18).view(3, 6))
    torch.manual_seed(1)
    saved = SavedTensors()
    with saved.recorded():
        out = net(x)
    split = SplitBackward(get_gradient_edge(out), received, net.parameters(), saved)
    return net, split, received


@pytest.mark.parametrize("form", ["plain", "nested", "selective", "shared"])
def test_checkpointed_layers_run_again_once(form: str) -> None:
    whole, x = Checkpointed(form), torch.linspace(-1, 1, 18).view(3, 6).requires_grad_()
    torch.manual_seed(1)
    whole(x).backward(torch.ones(3, 6))
    net, split, received = _checkpointed(form)
    split.backward_input(torch.ones(3, 6))
    torch.testing.assert_close(received.take_gradient(), x.grad)
    split.backward_weight()
    for mine, theirs in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    for mine, theirs in zip(net.blocks, whole.blocks, strict=True):
        assert mine.runs == theirs.runs


def test_checkpointed_layers_keep_what_weights_need() -> None:
    net, split, _ = _checkpointed("plain")

    def freed(kind: str) -> list[bool]:
        return [ref() is None for block in net.blocks for ref in getattr(block, kind)]

    at_begins: list[tuple[list[bool], list[bool]]] = []
    for block in net.blocks:
        block.begins = lambda: at_begins.append((freed("inputs"), freed("others")))  # type: ignore[method-assign]
    assert all(freed("inputs") + freed("others"))
    split.backward_input(torch.ones(3, 6))
    assert at_begins == [  # the last block first
        ([True, True, True], [True, True, True]),
        ([True, True, False], [True, True, True]),
        ([True, False, False], [True, True, True]),
    ]
    assert not any(freed("inputs"))
    assert all(freed("others"))
    split.backward_weight()
    assert all(freed("inputs"))


def test_what_was_saved_goes_with_its_graph() -> None:
    """Also without a backward pass, or where all of it is read twice."""
    for form, net, half in (("plain", None, False), ("shared", None, True), ("none", None, False)):
        net, split, received = _checkpointed(form)
        if half:
            split.backward_input(torch.ones(3, 6))
            split.backward_weight()
        del split, received
        gc.collect()
        assert all(ref() is None for each in net.blocks for ref in each.inputs + each.others), form


def test_what_is_not_split_is_left_to_checkpointing() -> None:
    _checkpointed("plain")
    net = Checkpointed("plain")
    net(torch.ones(3, 6)).sum().backward()
    assert [block.runs for block in net.blocks] == [2, 2, 2]


def test_reentrant_checkpointing_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="use_reentrant=False"):
        _checkpointed("reentrant")


class Gated(nn.Module):
    """Its input's function is a factor, and what its weight is multiplied with."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(x)
        return F.linear(y, self.weight) * y


@pytest.mark.parametrize("again", [False, True])
def test_codes_are_kept_for_every_node_that_reads_them(again: bool) -> None:
    """What both factors read in one half, and the gradient of the weight in the other.

    They save one storage, which is encoded once; not where the module is computed again.
    """

    def run(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(net, x, use_reentrant=False) if again else net(x)
        return y.sin().sum()

    torch.manual_seed(0)
    net = nn.Sequential(Gated(64))
    with pytest.warns(UserWarning, match="packed by rule"):
        quantize_activations(net)
    x = torch.randn(1, 32, 64, requires_grad=True)
    run(x).backward()
    wanted = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad()
    saved = SavedTensors()
    entered, received = receive(x.detach())
    with saved.recorded():
        out = run(entered)
    split = SplitBackward(get_gradient_edge(out), received, net.parameters(), saved)
    split.backward_input(None)
    torch.testing.assert_close(received.take_gradient(), x.grad)
    split.backward_weight()
    torch.testing.assert_close({name: p.grad for name, p in net.named_parameters()}, wanted)


def test_refuses_saved_tensors_that_were_changed() -> None:
    x, received = receive(torch.ones(3))
    saved = SavedTensors()
    with saved.recorded():
        y = x * 1
        out = y.sin()
    y.add_(1)
    split = SplitBackward(get_gradient_edge(out), received, [], saved)
    with pytest.raises(RuntimeError, match=r"\[3\] that backward needs was changed in place"):
        split.backward_input(torch.ones(3))


def test_compiled_modules_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    check_not_compiled("zbv", model)
    model[1]._orig_mod = nn.Identity()  # as torch.compile's wrapper, which takes seconds to import
    check_not_compiled("interleaved_1f1b", model)
    for schedule in ("zero_bubble", "zbv"):
        with pytest.raises(NotImplementedError, match=r"`1` is compiled"):
            check_not_compiled(schedule, model)
