"""What training steps do with parameters and gradients, on two ranks, against DDP.

Each program trains a small model whose embedding, head and own parameters belong to the root while
its blocks are units. A step that loses a write, a hook or a gradient ends with other weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lq_testing.lightning_models import PLAIN, SMALL, loader, run_trainer, trainer
from lq_testing.models import Block
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lq_lightning import QuantizedFSDPStrategy

VOCAB, WIDTH = 31, 8


class Net(nn.Module):
    """Logits of tokens; called anew or with hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def hidden(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(tokens))
        return logits


class Program(pl.LightningModule):
    """A student, a frozen teacher, parameters of its own, and plain SGD."""

    manual = False
    codecs = False  # something depends on weights that a codec could miss
    sharded = False  # the blocks, by hand

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = not self.manual
        self.net, self.teacher = Net(), Net()
        self.teacher.requires_grad_(False)
        self.seen: list[Any] = []

    def configure_model(self) -> None:
        for net in (self.net, self.teacher) if self.sharded else ():
            for block in net.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])

    def loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.net(tokens).flatten(0, 1), tokens.flatten())

    def distilled(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(tokens)
        return self.loss(tokens) + F.mse_loss(self.net(tokens), target)

    def pairs(self) -> Any:
        return zip(self.teacher.parameters(), self.net.parameters(), strict=True)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.3, momentum=0.5)


KINDS: dict[str, type[Program]] = {}


def kind(cls: type[Program]) -> type[Program]:
    """Add a program to the table."""
    KINDS[cls.__name__] = cls
    return cls


# --- writes in an automatic step ----------------------------------------------------------------


@kind
class TeacherFollows(Program):
    codecs = True

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in self.pairs():
            slow.mul_(0.7).add_(fast, alpha=0.3)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        self.follow()
        return self.distilled(tokens)


@kind
class TeacherIsAssigned(TeacherFollows):
    def follow(self) -> None:
        for slow, fast in self.pairs():
            slow.data = slow.data * 0.7 + fast.data * 0.3


@kind
class TeacherFollowsInLocalMemory(TeacherFollows):
    """Moved between the forwards of a step."""

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in self.pairs():
            _local(slow).mul_(0.7).add_(_local(fast), alpha=0.3)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        logits = self.net(tokens)
        with torch.no_grad():
            before = self.teacher(tokens)
            self.follow()
            after = self.teacher(tokens)
        return F.mse_loss(logits, after) + F.mse_loss(logits, before)


@kind
class TeacherFollowsInForward(TeacherFollows):
    @torch.no_grad()
    def follow(self) -> None:
        slow, fast = ([*net.parameters()] for net in (self.teacher, self.net))
        torch._foreach_mul_(slow, 0.7)
        torch._foreach_add_([p.detach() for p in slow], fast, alpha=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        self.follow()
        return self.distilled(tokens)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self(tokens)
        return loss


@kind
class WeightsAreLoadedAndClamped(Program):
    codecs = True

    def on_train_start(self) -> None:
        self.start = {k: v.clone() for k, v in self.net.state_dict().items()}

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.net.load_state_dict(self.start)
        for p in self.net.parameters():
            p.data.clamp_(-0.2, 0.2)
        return self.loss(tokens)


@kind
class StateIsRead(Program):
    """``state_dict`` frees what is gathered."""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(tokens)
        self.seen += [_full(self.net.state_dict()["head.weight"]).sum()]
        loss = loss + self.net.head.weight.square().mean() + self.loss(tokens)
        self.seen += [_full(value).sum() for value in self.state_dict().values()]
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        self.seen.append(_full(self.net.head.weight).sum())
        self.seen.append(self.net.head(torch.ones(1, WIDTH)).sum())


@kind
class FrozenOnTheWay(Program):
    """And gradients are cleared at the head of a step."""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        self.net.head.zero_grad()
        self.net.embed.weight.grad = None
        self.net.embed.requires_grad_(batch_idx != 1)
        self.net.blocks[0].requires_grad_(batch_idx != 1)
        return self.loss(tokens)


# --- direct uses ----------------------------------------------------------------------------------


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).t() @ x.flatten(0, 1)


@kind
class UsesParametersDirectly(Program):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(WIDTH))
        self.bank = nn.Parameter(torch.randn(5, WIDTH), requires_grad=False)
        self.register_buffer("slow", torch.zeros(WIDTH))

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        factor = self.scale.exp()  # before anything is gathered
        h = self.net.embed.weight[tokens] + self.shift
        for block in self.net.blocks:
            h = block(h)
        h = h * factor + torch.cat([self.shift[:4], self.shift[4:]])
        with torch.no_grad():
            self.bank.mul_(0.9)
            near = F.linear(h, F.normalize(self.bank)).amax(-1, keepdim=True)
            self.seen += [self.scale.item(), torch.pdist(self.bank).sum()]
            self.slow.lerp_(self.shift, 0.1)
        h += self.shift.type_as(h)
        h = h + self.slow + (self.shift + torch.zeros_like(self.shift)).tanh()
        logits = F.linear(h, self.net.embed.weight) + h @ self.net.head.weight.T
        logits = logits + Double.apply(h, self.net.head.weight) + self.net.head(h)
        logits = logits + checkpoint(self.again, h, use_reentrant=False) + near
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + self.penalty()

    def again(self, h: Tensor) -> Tensor:
        return F.linear(torch.tanh(h), self.net.head.weight * self.scale) + self.net.head(h)

    def penalty(self) -> Tensor:
        parameters = [self.scale, self.shift, *self.net.head.parameters()]
        return 0.01 * sum(p.pow(2).sum() for p in parameters)


@kind
class CallsInAnyOrder(Program):
    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        net = self.net
        other = {"weight": torch.ones(VOCAB, WIDTH), "bias": torch.ones(VOCAB)}
        shift = torch.func.functional_call(net.head, other, (torch.ones(1, WIDTH),))
        with torch.no_grad(), torch.device("cpu"):
            guess = net.head(net.blocks[1](net.embed(tokens))).argmax(-1)
        with (
            self.trainer.strategy.root_forward()
            if hasattr(self.trainer.strategy, "root_forward")
            else torch.enable_grad()
        ):
            h = net.hidden(tokens)
            logits = F.linear(h, net.head.weight, net.head.bias)
        params = {k: p * 0.5 for k, p in net.head.named_parameters()}
        logits = logits + torch.func.functional_call(net.head, params, (h,))
        logits = logits * shift + net.head.forward(net.blocks[0](net.embed(guess)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@kind
class CompiledParts(Program):
    """Submodules compiled in place and wrapped, and a function of no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.net.head.compile(backend="eager")
        self.wrapped = torch.compile(nn.Linear(WIDTH, VOCAB), backend="eager")
        self.mean = torch.compile(F.cross_entropy, backend="eager", fullgraph=True)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        h = self.net.hidden(tokens)
        logits = self.net.head(h) + self.wrapped(h) + h @ self.net.head.weight.mT
        loss: Tensor = self.mean(logits.flatten(0, 1), tokens.flatten())
        return loss


@kind
class WithoutUnits(Program):
    """All parameters belong to the root, so that a step may compute with each."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks = self.teacher.blocks = nn.ModuleList()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        net = self.net
        before = 0.01 * sum(p.pow(2).sum() for p in net.parameters())
        loss = self.loss(tokens)
        gradients = torch.autograd.grad(loss, [*net.parameters()], retain_graph=True)
        self.seen += [g.norm() for g in gradients]
        whole = torch.nn.utils.parameters_to_vector(net.parameters())
        return loss + before + 0.01 * whole.abs().mean()


# --- manual optimization --------------------------------------------------------------------------


class Manual(Program):
    manual = True

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]


@kind
class ClipsByHand(Manual):
    """In a closure."""

    codecs = True

    def training_step(self, tokens: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(tokens)
            self.manual_backward(loss)
            norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3)
            self.seen.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            return loss

        optimizer.step(closure=closure)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class UnseenSGD(torch.optim.Optimizer):
    """Writes into local memory as kernels do, which no version counter tells."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            _local(p.detach()).data.add_(_local(p.grad), alpha=-self.defaults["lr"])


@kind
class ClipsThroughLightning(Manual):
    codecs = True

    def training_step(self, tokens: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(tokens)
        self.zero_grad()  # behind the forward, where plain FSDP2 misses those of the root
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.3, "norm")
        with torch.no_grad():
            self.seen.append(self.net(tokens).mean())  # gathers the weights before the update
        optimizer.optimizer.step()
        self.seen.append(self.loss(tokens).detach())

    def configure_optimizers(self) -> Any:
        return UnseenSGD(self.trained(), {"lr": 0.3})


@kind
class NoiseAndNoGradient(Manual):
    def training_step(self, tokens: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(tokens))
        for p in self.trained():
            p.grad.add_(torch.ones_like(p), alpha=0.01).mul_(0.9)
        self.net.embed.weight.grad.data.clamp_(-0.1, 0.1)
        self.net.head.bias.grad = None
        optimizer.step()


@kind
class AscendsFirst(Manual):
    """Sharpness-aware minimization."""

    codecs = True

    def training_step(self, tokens: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(tokens))
        with torch.no_grad():
            steps = {p: p.grad * 0.5 for p in self.trained()}
            for p, step in steps.items():
                p.add_(step)
                p.grad = None
        self.manual_backward(self.loss(tokens))
        with torch.no_grad():
            for p, step in steps.items():
                p.sub_(step)
        optimizer.step()


@kind
class Critic(Manual):
    """Two optimizers that are toggled, weights clamped behind each step of one."""

    codecs = True

    def __init__(self) -> None:
        super().__init__()
        self.teacher.requires_grad_(True)

    def training_step(self, tokens: Tensor, batch_idx: int) -> None:
        one, two = self.optimizers()
        self.toggle_optimizer(one)
        assert not any(p.requires_grad for p in self.teacher.parameters())
        self.manual_backward(self.loss(tokens) - self.teacher(tokens).tanh().mean())
        one.step()
        one.zero_grad()
        self.untoggle_optimizer(one)
        for p in self.net.parameters():
            p.data.clamp_(-0.3, 0.3)
        self.toggle_optimizer(two)
        fake = self.net(tokens).detach()
        self.manual_backward(F.mse_loss(self.teacher(tokens), fake))
        two.step()
        two.zero_grad()
        self.untoggle_optimizer(two)
        with torch.no_grad():
            for p in self.teacher.parameters():
                p.clamp_(-0.3, 0.3)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(n.parameters(), lr=0.3) for n in (self.net, self.teacher)]


@kind
class TwoLossesOfOneGraph(Manual):
    """And hooks that are set in a step see each reduced gradient."""

    codecs = True

    def training_step(self, tokens: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        logits = self.net(tokens)
        one = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        two = logits.square().mean()
        called: list[nn.Parameter] = []
        handles = [p.register_post_accumulate_grad_hook(called.append) for p in self.trained()]
        self.manual_backward(one, retain_graph=True)
        assert {id(p) for p in called} == {id(p) for p in self.trained()}
        assert all(p.grad is not None for p in called)
        for handle in handles:
            handle.remove()
        self.manual_backward(one, retain_graph=True)
        self.manual_backward(two)
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.05)
        optimizer.step()


# --- comparison -----------------------------------------------------------------------------------


def _full(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


class Outcome(NamedTuple):
    """Where a run ended, and what it noted."""

    weights: dict[str, Tensor]
    seen: list[Tensor]

    def error_of(self, other: Outcome) -> float:
        """The largest error of another run's weight or note, relative to this one's."""
        assert self.weights.keys() == other.weights.keys()
        assert len(self.seen) == len(other.seen)
        mine, its = ([*o.weights.values(), *o.seen] for o in (self, other))
        return max(float((a - b).norm() / a.norm()) for a, b in zip(mine, its, strict=True))


def _fit(
    make: type[Program], root: str, strategy: Any, devices: int, sharded: bool = False
) -> Outcome:
    torch.manual_seed(0)
    module = make()
    module.sharded = sharded
    trainer(strategy, root, devices=devices).fit(module, loader(24))
    weights = {name: _full(p) for name, p in module.named_parameters()}
    return Outcome(weights, [_full(torch.as_tensor(value)) for value in module.seen])


def _errors(make: type[Program], root: str, ranks: int) -> dict[str, float]:
    fit = partial(_fit, make, root, devices=ranks)
    expected = fit("ddp_find_unused_parameters_true")
    # one rank is sharded only by hand
    runs = {"off": fit(QuantizedFSDPStrategy(**PLAIN), sharded=ranks == 1)}
    if make.codecs and ranks > 1:
        runs["codecs"] = fit(QuantizedFSDPStrategy(**SMALL))
    return {run: expected.error_of(outcome) for run, outcome in runs.items()}


def _steps(rank: int, ranks: int, root: str, names: list[str]) -> dict[str, dict[str, float]]:
    return {name: _errors(KINDS[name], root, ranks) for name in names}


# --- refused --------------------------------------------------------------------------------------


class WritesItself(nn.Linear):
    how = "in place"

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "assigned":
            self.weight.data = self.weight.data.clamp(min=0)
        else:
            with torch.no_grad():
                (self.weight.data if self.how == "data" else self.weight).clamp_(min=0)
        return super().forward(x)


def _writes(how: str, in_a_unit: bool) -> Program:
    program = Refused()
    if in_a_unit:
        layer = program.net.blocks[1].down = WritesItself(2 * WIDTH + 3, WIDTH)
    else:
        layer = program.net.head = WritesItself(WIDTH, VOCAB)
    layer.how = how
    return program


Step = Callable[[Program, Tensor], Any]


class Refused(Program):
    """Runs ``step``."""

    def __init__(self, step: Step = Program.loss) -> None:
        super().__init__()
        self.step = step

    def training_step(self, tokens: Tensor, batch_idx: int) -> Any:
        return self.step(self, tokens)


class CallsBackward(Manual):
    def training_step(self, tokens: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers().optimizer
        (self.net.head.weight * 2).sum().backward()
        optimizer.step()


class WritesBeforeBackward(Refused):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.net.blocks[0].up.weight.mul_(1)


def _through_a_view(program: Program, tokens: Tensor) -> Tensor:
    row = program.net.embed.weight[0]
    with torch.no_grad():
        row.zero_()
    return program.loss(tokens)


def _changes_dtype(program: Program, tokens: Tensor) -> Tensor:
    weight = program.net.head.weight
    weight.data = weight.data.double()
    return program.loss(tokens)


def _asks_for_gradients(program: Program, tokens: Tensor) -> Tensor:
    loss = program.loss(tokens)
    torch.autograd.grad(loss, [*program.net.parameters()], allow_unused=True)
    return loss


def _hooks_a_shard(program: Program, tokens: Tensor) -> Tensor:
    program.net.blocks[0].up.weight.register_hook(lambda gradient: gradient * 0.5)
    return program.loss(tokens)


def _compiles_a_direct_use(program: Program, tokens: Tensor) -> Tensor:
    project = torch.compile(F.linear, backend="eager", fullgraph=True)
    return project(program.net.hidden(tokens), program.net.head.weight).square().mean()


def _hooks_early() -> Program:
    program = Refused()
    program.net.embed.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return program


def _limits_norms() -> Program:
    program = Refused()
    program.net.embed = nn.Embedding(VOCAB, WIDTH, max_norm=1.0)
    return program


HEAD = r"`net\.head\.weight` was written while a module ran"
UNIT = r"`net\.blocks\.1\.down\.weight` was written while a module ran"
REFUSED: list[tuple[Callable[[], Program], str]] = [
    (WritesBeforeBackward, r"`net\.blocks\.0\.up\.weight` .*written between a forward and its"),
    *((partial(_writes, how, False), HEAD) for how in ("in place", "assigned")),
    (partial(_writes, "data", True), UNIT),
    (CallsBackward, r"self\.manual_backward"),
    (partial(Refused, _through_a_view), r"`net\.embed\.weight` was written .* a view"),
    (
        partial(Refused, _changes_dtype),
        r"`\.data` of the sharded parameter `net\.head\.weight`.*float64",
    ),
    (
        partial(Refused, _asks_for_gradients),
        r"the gradient of the parameter `net\.blocks\.0\.norm\.weight`",
    ),
    (
        partial(Refused, _hooks_a_shard),
        r"`net\.blocks\.0\.up\.weight` has a hook.*register_post_accumulate_grad_hook",
    ),
    (_hooks_early, r"`net\.embed\.weight` has a hook.*`on_fit_start`"),
    (_limits_norms, r"`net\.embed` has `max_norm=1\.0`.*on_train_batch_start"),
    (
        partial(Refused, _compiles_a_direct_use),
        r"root_forward\(\).*mixed torch\.Tensor and DTensor",
    ),
]


def _refuse(root: str) -> None:
    for make, message in REFUSED:
        module = make()
        before = {name: _full(p) for name, p in module.named_parameters()}
        with pytest.raises((RuntimeError, ValueError), match=f"(?s){message}"):
            trainer(QuantizedFSDPStrategy(**PLAIN), root).fit(module, loader(8))
        if isinstance(next(module.parameters()), DTensor):
            after = {name: _full(p) for name, p in module.named_parameters()}
            for name, value in before.items():
                assert torch.equal(after[name], value), f"{message}: refused after a step"


def _attack(rank: int, ranks: int, root: str) -> dict[str, dict[str, float]]:
    _refuse(root)
    return _steps(rank, ranks, root, list(KINDS))


def test_steps_do_what_they_do_in_ddp_or_are_refused(tmp_path: Path) -> None:
    for kinds in run_trainer(_attack, 2, str(tmp_path), timeout=240.0):
        assert len(kinds) == len(KINDS)
        for name, errors in kinds.items():
            for run, error in errors.items():
                assert error < (0.02 if run == "codecs" else 2e-6), (name, run, error)


def test_steps_on_one_rank_that_is_sharded_by_hand(tmp_path: Path) -> None:
    names = ["TeacherFollows", "UsesParametersDirectly", "AscendsFirst", "ClipsByHand"]
    (kinds,) = run_trainer(_steps, 1, str(tmp_path), names)
    assert all(error < 2e-6 for errors in kinds.values() for error in errors.values()), kinds
