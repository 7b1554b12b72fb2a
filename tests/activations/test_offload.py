"""Saved activations that leave the device: gradients, windows, races, lifetimes, refusals."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lq_testing.small_llama import SmallLlama, tokens
from lq_testing.streams import Stream, recorded_streams, replaced
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lq_lightning.activations import (
    ActivationPolicy,
    ActivationRule,
    QuantizedActivations,
    host_memory,
    offload,
    quantize_activations,
)
from lq_lightning.activations.host_memory import HostPool
from lq_lightning.activations.offload import Offload

PAGE = 1 << 14
SMALL: dict[str, Any] = {"min_nbytes": 256, "slab_nbytes": 1 << 20}


@pytest.fixture
def start() -> Iterator[Callable[..., Offload]]:
    """Make offloads that are removed in the end, and have found no writes unless removed before."""
    made: list[Offload] = []

    def start(model: nn.Module, amount: str | float = 1.0, **options: Any) -> Offload:
        made.append(Offload(model, amount, **SMALL | options))
        return made[-1]

    yield start
    for each in made:
        try:
            if each.enabled:
                each.check_writes()
                assert not each._compared
        finally:
            each.remove()
        assert not each.pool.used_nbytes


def gradients(model: nn.Module, *args: Any) -> list[Tensor]:
    torch.manual_seed(3)
    return _after(lambda model: model(*(args or (tokens(),))).backward(), model)


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


class Checkpointed(nn.Module):
    """As checkpoint wrappers are: a block that is a region."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def _wrapped(model: SmallLlama) -> None:
    model.blocks = nn.ModuleList(map(Checkpointed, model.blocks))


def _compiled(model: SmallLlama) -> None:
    for block in model.blocks:
        block.compile(backend="inductor" if torch.cuda.is_available() else "aot_eager")


def _compiled_forward(model: SmallLlama) -> None:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")


RECOMPUTED = ActivationPolicy(rules=[ActivationRule(module="blocks.?", recompute=True)])
WAYS: dict[str, tuple[Any, Callable[[SmallLlama], None]]] = {
    "eager": (None, lambda model: None),
    "agoq": ("agoq", lambda model: None),
    "agoq, compiled": ("agoq", _compiled),
    "compiled forwards": (None, _compiled_forward),
    "recomputed": (RECOMPUTED, lambda model: None),
    "wrapped": (None, _wrapped),
}


def made(way: str, layers: int = 3) -> tuple[SmallLlama, QuantizedActivations | None]:
    torch.manual_seed(0)
    model, (recipe, change) = SmallLlama(layers, dropout=0.1), WAYS[way]
    handle = quantize_activations(model, recipe) if recipe else None
    change(model)
    return model, handle


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_bit_identical(way: str, start: Callable[..., Offload]) -> None:
    model, _ = made(way)
    torch._dynamo.reset()
    expected = gradients(model)
    moving = start(model)
    torch.compiler.set_stance("fail_on_recompile")  # compiled blocks stay as they are
    try:
        for _ in range(2):
            assert equal(gradients(model), expected)
    finally:
        torch.compiler.set_stance("default")
    assert moving.moved_nbytes == moving.seen_nbytes > 0
    moving.check()
    moving.remove()
    assert equal(gradients(model), expected)


@pytest.mark.parametrize(
    ("way", "amount", "share"),
    [("eager", 0.5, 0.5), ("eager", 0.05, 0.05), ("wrapped", 0.4, 0.4), ("eager", "200 KB", None)],
)
def test_a_share_or_an_amount_moves(
    way: str, amount: Any, share: float | None, start: Callable[..., Offload]
) -> None:
    model, _ = made(way)
    expected = gradients(model)
    moving = start(model, amount, slab_nbytes=1 << 16)
    assert equal(gradients(model), expected)
    if share is None:
        assert 0 < moving.pool.nbytes < 280_000
    else:
        assert 0.6 * share < moving.moved_nbytes / moving.seen_nbytes <= share


class Watched(Offload):
    """Counts the blocks that are resident whenever something is saved or read."""

    most = 0
    groups: set[Any] = set()

    def _count(self, result: Any) -> Any:
        self.groups = {g for g in self.groups | {self._last} if g is not None and g() is not None}
        records = [g().records.values() for g in self.groups]
        on_device = [any(r.source is not None or r.value is not None for r in g) for g in records]
        self.most = max(self.most, sum(on_device))
        return result

    def _pack(self, tensor: Tensor) -> Any:
        return self._count(super()._pack(tensor))

    def _unpack(self, packed: Any) -> Tensor:
        return self._count(super()._unpack(packed))


@pytest.mark.parametrize(("way", "window"), [("agoq", 1), ("recomputed", 2), ("eager", 3)])
def test_no_more_than_a_window_of_blocks_is_resident(way: str, window: int) -> None:
    model, _ = made(way, layers=5)
    moving = Watched(model, 1.0, **SMALL, window=window)
    for _ in range(2):
        model(tokens()).backward()
    assert moving.most == window
    losses = [model(tokens(i)) for i in range(3)]
    for index in (1, 2, 0):  # what one forward leaves behind, and what another backward fetches
        losses[index].backward(retain_graph=True)
        losses[index].backward()
    assert moving.most <= 2 * window
    moving.remove()


def test_what_has_left_is_freed(start: Callable[..., Offload]) -> None:
    model = nn.Sequential(*(Wide(nn.Tanh()) for _ in range(6)))
    start(model)
    held: list[Any] = []
    for block in model:
        block.register_forward_hook(lambda m, a, y: held.append(y.untyped_storage()._weak_ref()))
    y = model(torch.randn(64, 32, requires_grad=True))
    assert [torch.UntypedStorage._expired(w) for w in held] == [True] * 4 + [False] * 2
    y.sum().backward()


class Wide(nn.Module):
    """A linear layer, and a function or module behind it."""

    def __init__(self, then: Callable[[Tensor], Tensor], width: int = 32) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.linear(x))


# --- streams --------------------------------------------------------------------------------------


def _after(run: Callable[[Any], None], model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    run(model)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _races(run: Callable[[Any], None], model: nn.Module) -> list[Any]:
    model.eval()
    expected = _after(run, model)
    with replaced(host_memory, "_ALIGNMENT", PAGE), recorded_streams() as recorder:
        moving = Offload(model, 1.0, min_nbytes=256, slab_nbytes=PAGE)
        for _ in range(2):
            assert equal(_after(run, model), expected)
            moving.check()
        moving.settle()
        assert not moving.pool.used_nbytes
        moving.remove()
        torch.ones(8)
    return recorder.races


def _micro_batches(model: SmallLlama) -> None:
    losses = [model(tokens(i)) for i in range(3)]
    for index in (1, 2, 0):
        losses[index].backward()


def _twice(model: SmallLlama) -> None:
    loss = model(tokens())
    loss.backward(retain_graph=True)
    loss.backward()


def _dropped(model: SmallLlama) -> None:
    model(tokens())


def _partly(model: SmallLlama) -> None:
    loss = model(tokens())
    (model.blocks[2].mlp.up_proj.weight.grad,) = torch.autograd.grad(
        loss, model.blocks[2].mlp.up_proj.weight
    )


@pytest.mark.parametrize(
    ("run", "way"),
    [(_micro_batches, "agoq"), (_twice, "eager"), (_dropped, "agoq"), (_partly, "eager")],
)
def test_nothing_races(run: Callable[[SmallLlama], None], way: str) -> None:
    assert _races(run, made(way)[0]) == []


def test_no_race_where_no_copy_follows_the_last_comparison() -> None:
    model = nn.Sequential(*(Wide(torch.tanh) for _ in range(3)), Wide(lambda x: x), Sum())
    assert _races(lambda model: model(torch.ones(64, 32)).backward(), model) == []


@pytest.mark.parametrize(
    ("deaf", "found"), [(1, "freed too early"), (2, "read-write"), (3, "read-write")]
)
def test_races_would_be_found(deaf: int, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream waits for nothing: the computing one, that of copies out, of copies in."""
    wait = Stream.wait_event

    def wait_event(self: Stream, event: Any) -> None:
        if self.number != deaf:
            wait(self, event)

    monkeypatch.setattr(Stream, "wait_event", wait_event)
    kinds = {race.kind for race in _races(_twice, made("agoq")[0])}
    assert found in kinds


# --- graphs, errors, lifetimes --------------------------------------------------------------------


def test_failed_steps_leave_nothing_behind(start: Callable[..., Offload]) -> None:
    model, batch = nn.Sequential(*(Wide(torch.tanh) for _ in range(4)), Sum()), torch.randn(16, 32)
    expected = gradients(model, batch)
    moving = start(model)
    gradients(model, batch)
    fails = iter(["forward", "backward"] * 50)

    def hook(where: str) -> Callable[..., None]:
        def fail(*_: Any) -> None:
            if now == where:
                raise OSError(where)

        return fail

    model[2].linear.register_forward_hook(hook("forward"))
    model[1].linear.weight.register_hook(hook("backward"))
    sizes = set()
    for now in fails:
        with pytest.raises(OSError, match=now):
            gradients(model, batch)
        sizes.add(moving.pool.nbytes)
    now = ""
    assert len(sizes) == 1
    assert equal(gradients(model, batch), expected)
    moving.settle()
    assert not moving.pool.used_nbytes
    assert not moving._records


def test_graphs_are_freed_without_the_garbage_collector(start: Callable[..., Offload]) -> None:
    moving = start(model := nn.Sequential(Wide(torch.exp), Wide(torch.sigmoid)), min_nbytes=4096)
    gc.collect()  # what other tests left
    gc.disable()
    try:
        for _ in range(3):
            model(torch.randn(64, 32))  # outputs that move
            model(torch.randn(2, 32))  # outputs that stay
        moving.settle()
        assert not moving.pool.used_nbytes
        nodes = [o for o in gc.get_objects() if isinstance(o, (offload._Kept, offload._Moved))]
        assert not nodes
    finally:
        gc.enable()


def test_evaluation_and_others_hooks_move_nothing(start: Callable[..., Offload]) -> None:
    model, _ = made("eager")
    moving = start(model)
    with torch.no_grad():
        model(tokens())
    with save_on_cpu():
        model(tokens()).backward()
    block, x = model.blocks[0], torch.randn(2, 32, 128)
    torch.func.grad(lambda x: block(x).sum())(x)
    assert not moving.seen_nbytes
    with pytest.raises(RuntimeError, match="other hooks of saved tensors are in effect"):
        moving.check()
    model(tokens()).backward()
    moving.check()


# --- what could compute something else ------------------------------------------------------------


class Rows(torch.autograd.Function):
    """Saves a view of its input under other strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.t()[3:], x[1:, ::2])
        return x * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        a, b = ctx.saved_tensors
        dx = dy.clone()
        dx[:, 3:] *= a.t()
        dx[1:, ::2] += b
        return dx


class Formats(torch.autograd.Function):
    """Saves what is no plain tensor of floats."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        quantized = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
        small = x.to(torch.float8_e4m3fn), x > 0, x.half()[:, 1:31:3], x.new_empty(0, 3), x.sum()
        ctx.save_for_backward(x.to_sparse(), quantized, *small)
        return x * 1

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        sparse, quantized, eight, positive, half, _, total = ctx.saved_tensors
        dx = dy * sparse.to_dense() + quantized.dequantize() + eight.float() * positive + total
        dx[:, 1:31:3] += half
        return dx


def _dual(x: Tensor) -> Tensor:
    with forward_ad.dual_level():  # tangents of constants have no memory
        y, dy = forward_ad.unpack_dual(forward_ad.make_dual(x, torch.ones_like(x)).exp() * x)
        return y + dy


def _imaginary(x: Tensor) -> Tensor:
    z = torch.complex(x, x * x).conj()
    return (z * z).imag


def _negated(x: Tensor) -> Tensor:
    z = torch.complex(x, x * x).conj().imag  # has the negative bit
    return z * z


def _chunks(x: Tensor) -> Tensor:
    a, b = x.tanh().chunk(2, dim=-1)
    return torch.cat([a * b, b * a], dim=-1)


def _expanded(x: Tensor) -> Tensor:
    return x * x[:, :1].exp().expand_as(x)


def _in_place_first(x: Tensor) -> Tensor:
    y = x * 2
    y.add_(1).sigmoid_()
    return y * y


def _half_written(x: Tensor) -> Tensor:
    y = x.exp()
    z = y.clone()
    z[::2] = 0
    return y + z.tanh()


def _replaced(x: Tensor) -> Tensor:
    y = (x * 1).detach()
    a = x * y  # the version of one tensor
    y = y.clone()
    y.mul_(3)
    return a + x * y


def _pooled(x: Tensor) -> Tensor:
    return F.pad(F.max_pool1d(x[None], 2, 1)[0], (0, 1))  # saves indices


@pytest.mark.parametrize(
    "then",
    [
        Rows.apply,
        Formats.apply,
        _dual,
        _imaginary,
        _negated,
        _chunks,
        _expanded,
        _in_place_first,
        _half_written,
    ]
    + [_replaced, _pooled, nn.BatchNorm1d(32), nn.Dropout(0.5)],
)
def test_views_and_writes(then: Callable[[Tensor], Tensor], start: Callable[..., Offload]) -> None:
    module = nn.Sequential(nn.Tanh(), then) if isinstance(then, nn.Module) else None
    blocks = [Wide(module or (lambda x: then(x.tanh()))) for _ in range(4)]
    loss = nn.Sequential(*blocks, Sum())
    x = torch.randn(64, 32)
    expected = gradients(loss, x)
    moving = start(loss, min_nbytes=64)
    assert equal(gradients(loss, x), expected)
    assert moving.moved_nbytes
    moving.check()


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum()


class Changing(nn.Module):
    """Changes what the product before it has saved."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(32, 32), change

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * 1
        z = y * y
        self.change(y)
        return z


def test_a_change_after_saving_is_an_error_as_in_torch(start: Callable[..., Offload]) -> None:
    model = nn.Sequential(Changing(lambda y: y.add_(1)), Changing(lambda y: y.add_(1)), Sum())
    x = torch.randn(64, 32)
    for moving in (None, lambda: start(model), lambda: start(model, min_nbytes=1 << 20)):
        if moving is not None:
            moving()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(x).backward()

    model = nn.Sequential(Wide(torch.exp), Wide(torch.exp))
    for moves in (False, True):
        if moves:
            start(model)
        y = model(x)
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


class InPlace(torch.autograd.Function):
    """Overwrites what it saved in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x * 2)
        return x * 1

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return ctx.saved_tensors[0].mul_(dy)


def test_a_change_in_backward_is_an_error_in_the_next(start: Callable[..., Offload]) -> None:
    model = nn.Sequential(*(Wide(InPlace.apply) for _ in range(2)), Sum())
    for moves in (False, True):
        if moves:
            start(model)
        loss = model(torch.randn(64, 32))
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def _on_passes(passes: set[int], change: Callable[[Tensor], Any]) -> Callable[[Tensor], None]:
    calls = iter(range(1, 100))
    return lambda y: change(y) if next(calls) in passes else None


def _double(y: Tensor) -> None:
    y.data.mul_(2)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("passes", "change", "accumulated"),
    [
        ({1}, _double, 1),
        ({2}, _double, 1),
        ({5}, lambda y: y.data[3, :2].neg_(), 1),  # a view of it
        ({2}, lambda y: y.data.copy_(y.data.flip(0)), 1),  # the same values
        ({2}, _double, 3),  # passes without writes follow before the step
    ],
)
def test_a_write_that_torch_does_not_see_reaches_no_step(
    passes: set[int],
    change: Callable[[Tensor], Any],
    accumulated: int,
    device: str,
    start: Callable[..., Offload],
) -> None:
    blocks = [Changing(lambda y: None) for _ in range(5)]
    blocks[1].change = _on_passes(passes, change)
    model, x = nn.Sequential(*blocks, Sum()).to(device), torch.randn(64, 32, device=device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    moving = start(model)
    for number in range(1, max(passes) + accumulated):
        model(x).backward()
        if number % accumulated == 0 and number < max(passes):
            optimizer.step()
            optimizer.zero_grad()
    before = [p.clone() for p in model.parameters()]
    for step in (optimizer.step, moving.check, optimizer.step):
        with pytest.raises(RuntimeError, match="A tensor that `1` saved for backward was written"):
            step()
    assert equal([*model.parameters()], before)
    moving.remove()
    optimizer.step()


def test_a_write_by_the_next_block_is_refused(start: Callable[..., Offload]) -> None:
    class Overwriting(Wide):
        def forward(self, x: Tensor) -> Tensor:
            x.data.mul_(0.5)
            return super().forward(x)

    blocks = [(Overwriting if n == 2 else Wide)(torch.tanh) for n in range(5)]
    moving = start(model := nn.Sequential(*blocks, Sum()))
    model(torch.randn(64, 32)).backward()
    with pytest.raises(RuntimeError, match="`1` saved .* by it or a block behind it"):
        moving.check()
    moving.remove()


def test_only_copies_that_are_read_must_equal_their_sources(start: Callable[..., Offload]) -> None:
    model, x = nn.Sequential(*(Changing(_double) for _ in range(2)), Sum()), torch.randn(64, 32)
    expected = gradients(model, x)
    moving = start(model)
    model.zero_grad()
    loss = model(x)
    loss.backward(retain_graph=True)  # of what is on the device still
    assert equal([p.grad for p in model.parameters() if p.grad is not None], expected)
    for _ in range(3):
        unread = model(x)
    moving.check()
    loss.backward()
    with pytest.raises(RuntimeError, match="`1` saved"):
        moving.check()
    moving.remove()
    del unread


class Overwritten(InPlace):
    """The same, unseen."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        ctx.saved_tensors[0].data.mul_(dy)
        return dy


@pytest.mark.parametrize("function", [InPlace, Overwritten])
def test_backward_may_overwrite_what_a_kept_graph_does_not_read_again(
    function: Any, start: Callable[..., Offload]
) -> None:
    model, x = nn.Sequential(*(Wide(function.apply) for _ in range(2)), Sum()), torch.randn(64, 32)
    moving, kept = start(model), list[Tensor]()
    for _ in range(3):
        kept = [*kept[-1:], model(x)]
        kept[-1].backward(retain_graph=True)
        moving.check()


def test_a_change_of_what_is_not_read_is_none(start: Callable[..., Offload]) -> None:
    """Copies of the first block come back, but no gradient of it is wanted."""
    changes: list[Any] = [lambda y: y.add_(1), *[lambda y: None] * 3]
    blocks = map(Changing, changes)
    moving = start(model := nn.Sequential(*blocks, Sum()))
    torch.autograd.grad(model(torch.randn(64, 32)), [*model[1:].parameters()])
    moving.check()


def test_a_storage_saved_again_after_a_change_is_another(start: Callable[..., Offload]) -> None:
    """Tensors of one storage with counters of their own."""

    def twice(x: Tensor) -> Tensor:
        held = x.detach() * 1
        with torch.enable_grad():
            unused = x * held
        other = held.data  # a counter of its own, at the same version
        held.mul_(2)
        return x * other + 0 * unused.detach()

    model = nn.Sequential(*(Wide(twice) for _ in range(4)), Sum())
    x = torch.randn(64, 32)
    expected = gradients(model, x)
    start(model)
    assert equal(gradients(model, x), expected)


class Shared(nn.Module):
    """One block called many times, and a constant that all calls read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([WithTable(), WithTable()])
        self.register_buffer("table", torch.randn(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.cos(self.table)
        for index in (0, 1, 0, 0, 1):
            x = self.blocks[index](x, made, scale=self.table)
        return x.square().mean()


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("own", torch.randn(64, 32))

    def forward(self, x: Tensor, table: Tensor, *, scale: Tensor) -> Tensor:
        return self.linear(x * table * scale * self.own).tanh()


def test_a_block_called_twice_and_what_outlives_it(start: Callable[..., Offload]) -> None:
    model, x = Shared(), torch.randn(64, 32)
    expected = gradients(model, x)
    moving = start(model, min_nbytes=64 * 32 * 4)
    assert equal(gradients(model, x), expected)
    # per call: the layer's input and tanh's output; in the first, products of an input without grad
    assert moving.seen_nbytes == 10 * 64 * 32 * 4


def test_what_outlives_its_block_moves_once(start: Callable[..., Offload]) -> None:
    """Constants that torch does not know of."""
    hidden = [torch.randn(64, 32) for _ in range(4)]
    model = nn.Sequential(*(Wide(h.mul) for h in hidden), Sum())
    x = torch.randn(64, 32)
    expected = gradients(model, x)
    moving, sizes = start(model, min_nbytes=64 * 32 * 4), list[int]()
    for _ in range(3):
        before = moving.seen_nbytes
        assert equal(gradients(model, x), expected)
        sizes.append((moving.seen_nbytes - before) // (64 * 32 * 4))
    assert sizes == [7, 3, 3]  # inputs of layers, but for that of the first


@pytest.mark.parametrize("failing", [7, 180])
def test_a_copy_that_fails(
    failing: int, start: Callable[..., Offload], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out in forward, or back in backward, which may be repeated."""
    model, _ = made("eager")
    model.eval()
    expected = gradients(model)
    moving = start(model)
    copy, count = offload._copy, iter(range(1000))

    def fails(*args: Any) -> None:
        if next(count) == failing:
            raise OSError("of the device")
        copy(*args)

    monkeypatch.setattr(offload, "_copy", fails)
    losses: list[Tensor] = []

    def steps() -> None:
        for _ in range(3):
            losses.append(model(tokens()))
        for loss in losses:
            loss.backward(retain_graph=True)

    with pytest.raises(OSError, match="of the device"):
        steps()
    for loss in losses:
        model.zero_grad()
        loss.backward()
        assert equal([p.grad for p in model.parameters() if p.grad is not None], expected)
    losses.clear()
    loss = None
    moving.settle()
    assert equal(gradients(model), expected)


def test_what_two_blocks_read_comes_back_once(start: Callable[..., Offload]) -> None:
    model, copies = nn.Sequential(*(Wide(torch.tanh) for _ in range(6)), Sum()), list[int]()
    start(model)
    with replaced(offload, "_copy", lambda *_: copies.append(1)):
        loss = model(torch.randn(64, 32))
        assert len(copies) == 6
        loss.backward()
    assert len(copies) == 6 + 4  # two were on the device still


class Region(Wide):
    """Calls its checkpoint function around its forward, as Hugging Face's layers do."""

    def __init__(self) -> None:
        super().__init__(torch.tanh)
        self._gradient_checkpointing_func = checkpoint

    def __call__(self, x: Tensor) -> Tensor:
        return self._gradient_checkpointing_func(super().__call__, x, use_reentrant=False)


Region.__name__ = "GradientCheckpointingLayer"


@pytest.mark.parametrize("codes", [False, True])
def test_inputs_of_regions_around_forwards_move(codes: bool, start: Callable[..., Offload]) -> None:
    model, x = nn.Sequential(*(Region() for _ in range(4)), Sum()), torch.randn(64, 32)
    x.requires_grad_()
    handle = quantize_activations(model, ActivationPolicy(checkpoint="int8" if codes else None))
    functions = [region._gradient_checkpointing_func for region in model[:4]]
    expected = gradients(model, x)
    moving = start(model)
    for _ in range(3):
        before = moving.moved_nbytes
        assert equal(gradients(model, x), expected)
        assert moving.moved_nbytes > before
    moving.remove()
    assert [region._gradient_checkpointing_func for region in model[:4]] == functions
    handle.remove()
    assert model[0]._gradient_checkpointing_func is checkpoint


def test_weights_never_move(start: Callable[..., Offload]) -> None:
    model = nn.Sequential(*(Wide(torch.relu, 128) for _ in range(3)), Sum())
    moving = start(model, min_nbytes=128 * 128 * 4)
    for casts in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            model(torch.randn(16, 128)).backward()
    assert not moving.seen_nbytes


def test_a_second_derivative(start: Callable[..., Offload]) -> None:
    model = nn.Sequential(*(Wide(torch.tanh) for _ in range(3)), Sum())
    x = torch.randn(64, 32, requires_grad=True)

    def penalty() -> list[Tensor]:
        (dx,) = torch.autograd.grad(model(x), x, create_graph=True)
        return list(torch.autograd.grad(dx.square().sum(), [*model.parameters()][:-1]))

    expected = penalty()
    start(model)
    assert equal(penalty(), expected)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("amount", [0, -1.0, float("nan"), float("inf"), True, "all", "0GiB", None])
def test_amounts_that_are_none(amount: Any) -> None:
    with pytest.raises(ValueError, match=r"`offload=.*give 'auto', a share .* or host memory"):
        Offload(SmallLlama(2), amount)


def test_models_that_are_refused() -> None:
    with pytest.raises(ValueError, match="has none"):
        Offload(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), 1.0)
    with pytest.raises(ValueError, match="does not work in `nn.DataParallel`"):
        Offload(nn.Sequential(nn.DataParallel(SmallLlama(2))), 1.0)


def test_host_memory_is_counted_before_the_first_step(
    start: Callable[..., Offload], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, counted = host_memory.free_host_memory(1)
    assert 0 < host_memory.free_host_memory(4)[0] < 0.3 * one
    assert "less a tenth, for 1 rank(s) on this node" in counted
    model, _ = made("eager")
    share = [700_000, "0.7 MB in a test"]
    monkeypatch.setattr(offload, "free_host_memory", lambda ranks: share)
    with pytest.raises(RuntimeError, match=r"`offload=20.5`: it needs 20.50 GiB .* 683.6 KiB"):
        start(model, 20.5)
    start(model, slab_nbytes=1 << 18)
    with pytest.raises(RuntimeError, match=r"3 blocks like `blocks.0` save .* KiB of host memory"):
        model(tokens())


def test_whole_compiled_models_are_refused(start: Callable[..., Offload]) -> None:
    moving = start(model := SmallLlama(2))
    torch.compile(model, backend="aot_eager")(tokens()).backward()
    with pytest.raises(RuntimeError, match="compile the blocks, not the whole model"):
        moving.check()


# --- the pool -------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6000)), max_size=60))
def test_buffers_are_apart_and_memory_is_used_again(steps: list[tuple[bool, int]]) -> None:
    pool, held = (
        HostPool(pin=False, may_grow=lambda n: None, slab_nbytes=4096),
        list[tuple[Any, int, int]](),
    )
    most = 0
    for index, (takes, nbytes) in enumerate(steps):
        if takes or not held:
            extents = pool.take(nbytes, lambda event: None)
            parts = pool.parts(extents, nbytes)
            assert sum(part.numel() for part in parts) == nbytes
            for part in parts:
                part.fill_(index)
            held.append((extents, nbytes, index))
        else:
            extents, nbytes, value = held.pop(nbytes % len(held))
            assert all(bool((p == value).all()) for p in pool.parts(extents, nbytes))
            pool.give(extents, None)
        most = max(most, pool.used_nbytes)
    assert pool.nbytes <= -(-most // 4096) * 4096
    for extents, _, _ in held:
        pool.give(extents, None)
    assert not pool.used_nbytes


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.fixture
def exact_attention() -> Iterator[None]:
    """Other kernels' gradients differ in their last bits from run to run."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_attention")
@pytest.mark.parametrize("way", ["eager", "agoq", "agoq, compiled", "recomputed", "wrapped"])
def test_on_a_gpu_gradients_are_bit_identical(way: str, start: Callable[..., Offload]) -> None:
    model, _ = made(way, layers=6)
    model.cuda()
    batch = tokens(length=512).cuda()
    expected = gradients(model, batch)
    assert equal(gradients(model, batch), expected), "not a test of what moves"
    for amount in (1.0, 0.4):
        moving = start(model, amount)
        for _ in range(20):
            assert equal(gradients(model, batch), expected)
        assert moving.moved_nbytes
        moving.remove()


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_attention")
@pytest.mark.parametrize("run", [_micro_batches, _twice, _partly])
def test_on_a_gpu_graphs_in_any_order(run: Callable[..., None], start: Any) -> None:
    model, _ = made("agoq", layers=6)
    model.cuda().eval()
    call = model.forward
    model.forward = lambda batch: call(batch.repeat(1, 16).cuda())  # type: ignore[method-assign]
    expected = _after(run, model)
    start(model)
    for _ in range(20):
        assert equal(_after(run, model), expected)


def _large(layers: int = 12, length: int = 1 << 16) -> tuple[SmallLlama, Tensor]:
    """Per layer about 0.3 GiB of codes and others."""
    torch.manual_seed(0)
    model = SmallLlama(layers, width=256).cuda().bfloat16()
    quantize_activations(model, "agoq")
    return model, tokens(length=length).cuda()


def _peak(model: nn.Module, batch: Tensor) -> int:
    gradients(model, batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    gradients(model, batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.gpu
def test_on_a_gpu_the_peak_falls_by_what_moves(start: Callable[..., Offload]) -> None:
    model, batch = _large()
    before = _peak(model, batch)
    moving = start(model, slab_nbytes=1 << 28)
    after = _peak(model, batch)
    per_pass = moving.moved_nbytes // 2
    # of twelve blocks, two stay, and what one of them reads lives a little longer
    assert before - after > 0.65 * per_pass, (before, after, per_pass)


@pytest.mark.gpu
def test_on_a_gpu_transfers_are_hidden(start: Callable[..., Offload]) -> None:
    model, batch = _large(8, length=1 << 17)  # attention takes longer than to move what it saves

    def seconds() -> float:
        start_, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        gradients(model, batch)
        start_.record()
        for _ in range(2):
            gradients(model, batch)
        end.record()
        end.synchronize()
        return start_.elapsed_time(end)

    without = seconds()
    start(model, slab_nbytes=1 << 28)
    gradients(model, batch)  # pins memory
    moving = seconds()
    assert moving < 1.1 * without, (moving, without)


@pytest.mark.gpu
def test_on_a_gpu_auto_decides(start: Callable[..., Offload]) -> None:
    model, batch = _large(6)
    moving = start(model, "auto", slab_nbytes=1 << 28)
    for _ in range(4):
        gradients(model, batch)
    said = moving.share.decide(batch.device)
    assert "of saved activations move to the host" in said
    assert 0 < moving.share.fraction <= 1
    assert moving.share.decide(batch.device) == ""
