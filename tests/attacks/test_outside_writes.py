"""Every way of writing to weights refreshes the replica of them or is refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from lq_testing import run_ranks
from lq_testing.fsdp2 import QWD, build, tokens, train
from lq_testing.models import TinyLM
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.tensor import DTensor

Way = Callable[[nn.Module, str, nn.Parameter], object]


def _local(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter._local_tensor


def _optimizer_of_others(make: Callable[..., torch.optim.Optimizer], **options: bool) -> Way:
    def write(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
        stand_in = nn.Parameter(parameter.detach())  # shares its memory
        stand_in.grad = torch.ones_like(stand_in)
        make([stand_in], lr=0.1, **options).step()

    return write


def _memmove(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """As a kernel of another library, which knows addresses only."""
    source = _local(parameter) * 0.5
    ctypes.memmove(_local(parameter).data_ptr(), source.data_ptr(), source.nbytes)


def _assign(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    state[name] *= 0.5
    model.load_state_dict(state, assign=True)


def _load(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    set_model_state_dict(model, {**model.state_dict(), name: parameter.detach() * 0.5})


REFRESHED: dict[str, Way] = {
    "in place": lambda m, n, p: p.mul_(0.5),
    "of a part": lambda m, n, p: p[0].mul_(0.5),
    "copy_": lambda m, n, p: p.copy_(p * 0.5),
    "foreach_mul": lambda m, n, p: torch._foreach_mul_([p], 0.5),
    "foreach detached": lambda m, n, p: torch._foreach_mul_([p.detach()], 0.5),
    "to_local": lambda m, n, p: p.to_local().mul_(0.5),  # type: ignore[attr-defined]
    "local.data": lambda m, n, p: _local(p).data.mul_(0.5),
    "data": lambda m, n, p: p.data.mul_(0.5),
    "NumPy": lambda m, n, p: _local(p).numpy().__imul__(0.5),
    "memmove": _memmove,
    "inference mode": lambda m, n, p: torch.inference_mode()(p.mul_)(0.5),
    "sign of two": lambda m, n, p: _local(p).data[0, :2].neg_(),
    "order": lambda m, n, p: _local(p).data.copy_(_local(p).flip(0, 1)),
    "SGD foreach": _optimizer_of_others(torch.optim.SGD, foreach=True),
    "AdamW fused": _optimizer_of_others(torch.optim.AdamW, fused=True),
    "load_state_dict(assign)": _assign,
    "distributed checkpoint": _load,
}
REFUSED: dict[str, Way] = {
    "data =": lambda m, n, p: setattr(p, "data", p.detach() * 0.5),
    "local.data =": lambda m, n, p: setattr(_local(p), "data", _local(p) * 0.5),
    "local.set_": lambda m, n, p: _local(p).set_(_local(p) * 0.5),  # type: ignore[call-overload]
    "swap_tensors": lambda m, n, p: torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 0.5)),
}


def _freeze_first(model: TinyLM) -> None:
    model.blocks[0].requires_grad_(False)


def _used(model: TinyLM, name: str) -> Tensor:
    """The parameter that a forward pass computes with."""
    seen = []
    path, _, own = name.rpartition(".")
    handle = model.get_submodule(path).register_forward_hook(
        lambda module, *unused: seen.append(module.get_parameter(own).detach().clone())
    )
    with torch.no_grad():
        model(tokens(0))
    handle.remove()
    return seen[0]


def _write(model: TinyLM, name: str, way: Way) -> Tensor:
    """Write, and return what is then there on all ranks together."""
    with torch.no_grad():
        way(model, name, model.get_parameter(name))
    parameter = model.get_parameter(name)
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor().detach()


FROZEN, TRAINED = "blocks.0.up.weight", "blocks.1.up.weight"


def _every_way(rank: int, world: int) -> None:
    model, optimizer, communication = build(weights=QWD, prepare=_freeze_first)
    train(model, optimizer, 2)
    assert communication.external_weight_updates == {}
    for name in (FROZEN, TRAINED):
        for way, write in REFRESHED.items():
            before = dict(communication.external_weight_updates)
            written = _write(model, name, write)
            assert torch.equal(_used(model, name), written), f"{way} of {name}"
            unit, found = name[:8], communication.external_weight_updates
            assert found[unit] == before.get(unit, 0) + 1, f"{way} of {name}"
            _used(model, name)
            assert communication.external_weight_updates == found
    for name in (FROZEN, TRAINED):
        for write in REFUSED.values():
            model, optimizer, communication = build(weights=QWD, prepare=_freeze_first)
            train(model, optimizer, 2)
            _write(model, name, write)
            with pytest.raises(RuntimeError, match=f"`{name}` was assigned"):
                _used(model, name)


def _at_any_time(rank: int, world: int) -> None:
    """As of a teacher that follows, a critic whose weights are clamped, averages swapped in."""
    hidden, seen = REFRESHED["foreach_mul"], REFRESHED["in place"]
    model, optimizer, communication = build(weights=QWD, prepare=_freeze_first)
    train(model, optimizer, 2)
    counts = communication.external_weight_updates
    for number, way in enumerate((hidden, seen), 1):
        # between backward and the step: a trained one is in the difference
        model(tokens(1)).backward()
        frozen = _write(model, FROZEN, way)
        _write(model, TRAINED, hidden)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(_used(model, FROZEN), frozen)
        assert counts == ({"blocks.0": 1} if number == 1 else {"blocks.0": 3, "blocks.1": 1})
        # after the step
        frozen, trained = _write(model, FROZEN, way), _write(model, TRAINED, way)
        assert torch.equal(_used(model, FROZEN), frozen)
        assert torch.equal(_used(model, TRAINED), trained)
        assert counts == {"blocks.0": 2 * number, "blocks.1": number}
    # by one rank alone: a pass later; at a checkpoint at once
    frozen = _write(model, FROZEN, hidden if rank else lambda *unused: None)
    assert not torch.equal(_used(model, FROZEN), frozen)
    assert torch.equal(_used(model, FROZEN), frozen)
    _write(model, FROZEN, hidden if rank else lambda *unused: None)
    saved = communication.replica_state_dict()
    assert (FROZEN in saved, TRAINED in saved) == (False, True)
    # what is restored is known
    state = communication.state_dict()
    _used(model, FROZEN)
    saved = communication.replica_state_dict()
    found = dict(counts)
    communication.load_state_dict(state, saved)
    _used(model, FROZEN)
    assert counts == found


def _without_waiting(rank: int, world: int) -> None:
    """As on a GPU, where the host does not always wait for what the device has found."""
    hidden, seen = REFRESHED["foreach_mul"], REFRESHED["in place"]
    model, optimizer, communication = build(weights=QWD, prepare=_freeze_first)
    votes = communication._consensus
    assert votes is not None
    votes._waits = False
    train(model, optimizer, 1)
    frozen = _write(model, FROZEN, hidden)
    assert torch.equal(_used(model, FROZEN), frozen), "in the first steps it is at once"
    assert votes._waits, "and from then on always"
    votes._waits = False
    train(model, optimizer, 4)
    frozen = _write(model, FROZEN, seen)
    assert torch.equal(_used(model, FROZEN), frozen)
    assert not votes._waits, "what counters see needs no waiting"
    model.eval()
    frozen = _write(model, FROZEN, hidden)
    assert torch.equal(_used(model, FROZEN), frozen), "where evaluation begins it is at once"
    votes._waits = False
    found = dict(communication.external_weight_updates)
    for writers in ((0, 1), (1,)):
        frozen = _write(model, FROZEN, hidden if rank in writers else lambda *unused: None)
        assert not torch.equal(_used(model, FROZEN), frozen)
        assert torch.equal(_used(model, FROZEN), frozen), "a pass late"
        assert votes._waits, "on all ranks"
        votes._waits = False
    _used(model, FROZEN)
    assert communication.external_weight_updates == {"blocks.0": found["blocks.0"] + 2}


@pytest.mark.parametrize("check", [_every_way, _at_any_time, _without_waiting])
def test_writes_are_seen_or_refused(check: Callable[[int, int], None]) -> None:
    run_ranks(check, 2)
