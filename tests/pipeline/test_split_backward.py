"""Both halves of a backward pass together are the whole, also where weights are shared."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from lq_testing.small_llama import Attention
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from lq_lightning.activations import ActivationPolicy, quantize_activations
from lq_lightning.pipeline.saved_tensors import SavedTensors
from lq_lightning.pipeline.split_backward import SplitBackward, check_not_compiled


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
    net, x = Net(form), torch.linspace(-1, 1, 18).view(3, 6).requires_grad_()
    out = net(x) if seed is not None else net(x).square().mean()
    split = SplitBackward(get_gradient_edge(out), x, net.parameters())
    found = split.backward_input(seed)
    assert all(p.grad is None for p in net.parameters())
    assert x.grad is None
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        torch.testing.assert_close(found, wanted)
    del out
    split.backward_weight()
    for name, parameter in net.named_parameters():
        expected = gradients[name]
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(parameter.grad, expected)


def test_an_output_of_neither_input_nor_weights_has_no_gradients() -> None:
    weight, x = nn.Parameter(torch.ones(2)), torch.ones(3, requires_grad=True)
    loss = torch.zeros((), requires_grad=True)  # as of a step that returned none
    split = SplitBackward(get_gradient_edge(loss), x, [weight])
    assert split.backward_input(None) is None
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
    x = torch.randn(2, 4, requires_grad=True)
    y = x * 1.0
    for w in weights:
        y = torch.tanh(Product.apply(y, w))
    split = SplitBackward(get_gradient_edge(y), x, weights)
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
    x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
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
    split = SplitBackward(get_gradient_edge(run()), x, weights)
    # Python's objects for nodes of functions own them in some versions of torch only.
    split.backward_input(torch.ones(2, 4))
    owners = [owner for meeting in split._meetings for owner in meeting.owners]
    assert len(owners) == (1 if form == "without" else 3)
    assert not any(isinstance(owner, BackwardCFunction) for owner in owners)
    owners.clear()
    split.backward_weight()
    torch.testing.assert_close([w.grad for w in weights], list(wanted))
    if form.startswith("ends"):  # nothing is held by what comes before it
        assert left == [3, 2, 1]
    assert all(ref() is None for ref in alive)


def test_hooks_behind_the_accumulation_see_gradients() -> None:
    net, x = Net("plain"), torch.ones(3, 6, requires_grad=True)
    seen = []
    net.a.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    split = SplitBackward(get_gradient_edge(net(x)), x, net.parameters())
    split.backward_input(torch.ones(3, 6))
    assert seen == []
    split.backward_weight()
    assert seen == [True]


class Remembers(nn.Module):
    """Tells when what its parts saved is freed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.alive: dict[str, weakref.ref[Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        y = self.a(x)
        z = torch.tanh(y)  # saves its output, which `b` saves as its input, too
        w = torch.sigmoid(z * z)  # saves z twice, and its output
        v = torch.exp(w * 3)  # saves its output
        for name, tensor in (("x", x), ("w", w), ("v", v)):
            self.alive[name] = weakref.ref(tensor.untyped_storage())
        return self.b(v - 1).sin()


def test_halves_let_go_of_what_they_have_read() -> None:
    net, x = Remembers(), torch.ones(3, 6, requires_grad=True)
    saved = SavedTensors()
    with saved.recorded():
        out = net(x)
    inputs = [out.grad_fn.next_functions[0][0]._saved_mat1]  # type: ignore[union-attr]
    split = SplitBackward(get_gradient_edge(out), x, net.parameters(), saved)
    kept = weakref.ref(inputs.pop().untyped_storage())
    del out
    split.backward_input(torch.ones(3, 6))
    names = {name for name, ref in net.alive.items() if ref() is not None}
    assert names == {"x"}  # the input of `a`, for its weight
    assert kept() is not None  # that of `b`
    split.backward_weight()
    assert all(ref() is None for ref in net.alive.values())
    assert kept() is None


def test_codes_are_kept_for_every_node_that_reads_them() -> None:
    """The attention's output is read by the attention in one half, and for `o_proj` in the other.

    Both save one storage, which is encoded once.
    """
    torch.manual_seed(0)
    net = nn.Sequential(Attention(64))
    quantize_activations(net, ActivationPolicy(attention="int8"))
    x = torch.randn(1, 32, 64, requires_grad=True)
    net(x).sin().sum().backward()
    wanted = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad()
    saved = SavedTensors()
    with saved.recorded():
        out = net(x).sin().sum()
    split = SplitBackward(get_gradient_edge(out), x, net.parameters(), saved)
    torch.testing.assert_close(split.backward_input(None), x.grad)
    split.backward_weight()
    torch.testing.assert_close({name: p.grad for name, p in net.named_parameters()}, wanted)


def test_refuses_saved_tensors_that_were_changed() -> None:
    x = torch.ones(3, requires_grad=True)
    saved = SavedTensors()
    with saved.recorded():
        y = x * 1
        out = y.sin()
    y.add_(1)
    split = SplitBackward(get_gradient_edge(out), x, [], saved)
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
