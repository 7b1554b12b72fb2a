"""Training of gates: how fast bits come down, what holds the mean, what is left alone."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lq_lightning.adaptive import (
    AdaptiveBitsConfig,
    BitGate,
    GateOptimizer,
    adaptive_quantize,
)
from lq_lightning.adaptive.gate import level_errors, round_jointly


def make(
    lines: dict[str, int], config: AdaptiveBitsConfig, **options: Any
) -> tuple[GateOptimizer, list[BitGate]]:
    gates = {name: BitGate(config, n, name=name) for name, n in lines.items()}
    return GateOptimizer(gates, config, **options), list(gates.values())


def push(gate: BitGate, grad: Tensor | float, values: int = 10) -> None:
    """Let a gate have a gradient."""
    wanted = torch.as_tensor(grad, dtype=torch.float32).expand(gate.q.shape)
    sums = wanted / gate.slope()
    gate.accumulate(torch.stack([sums, torch.zeros_like(sums)]), values)


# --- speed ----------------------------------------------------------------------------------------


def test_the_penalty_alone_takes_8_to_4_bits_with_gradients_as_small_as_torchs_eps() -> None:
    optimizer, (gate,) = make({"a": 65536}, AdaptiveBitsConfig(beta=0.01, learning_rate=3e-2))
    steps = 0
    while not optimizer.reached:
        push(gate, 0.0)
        optimizer.step()
        steps += 1
    assert abs(steps - 50) <= 2
    assert float(gate.bits().mean()) == pytest.approx(4.0, abs=0.1)


def test_steps_are_those_of_torchs_adam_on_the_penalized_loss() -> None:
    config = AdaptiveBitsConfig(beta=0.5, start_bits=6)
    optimizer, (gate,) = make({"a": 5}, config)
    parameter = gate.q.clone().requires_grad_()
    adam = torch.optim.Adam([parameter], lr=1e-2, eps=1e-16)
    generator = torch.Generator().manual_seed(0)
    for _ in range(25):
        grad = torch.randn(5, generator=generator) * 0.05
        adam.zero_grad()
        (0.5 * torch.sigmoid(parameter).square().mean() + parameter @ grad).backward()
        adam.step()
        push(gate, grad)
        optimizer.step()
        torch.testing.assert_close(gate.q, parameter.detach(), rtol=1e-4, atol=1e-5)


# --- the mean -------------------------------------------------------------------------------------


def test_the_mean_is_held_and_what_sites_and_channels_differ_by_survives() -> None:
    """Sites of other sizes and values; one wants bits, one gives them away."""
    config = AdaptiveBitsConfig(start_bits=4.2, learning_rate=0.2, beta=0.1)
    optimizer, (hungry, modest) = make({"hungry": 6, "modest": 30}, config)
    pull = torch.linspace(0.5, 1.5, 6)
    for _ in range(300):
        push(hungry, -pull, values=50)
        push(modest, 0.05, values=20)
        optimizer.step()
        if optimizer.reached:
            bits = torch.cat([hungry.bits(), modest.bits()]).double()
            values = torch.tensor([50.0] * 6 + [20.0] * 30).double()
            mean = float(bits @ values / values.sum())
            assert mean == pytest.approx(optimizer.mean, abs=1e-5)
            assert abs(mean - 4.0) <= 0.1 + 2e-4
    assert optimizer.reached
    assert float(hungry.bits().mean()) > 7.0
    assert float(modest.bits().mean()) < 3.0


def test_one_common_shift_keeps_differences_of_gates() -> None:
    config = AdaptiveBitsConfig(start_bits=4.0)
    optimizer, gates = make({"a": 7, "b": 3}, config)
    for gate, seed in zip(gates, (0, 1), strict=True):
        gate.q.copy_(torch.randn(7, generator=torch.Generator().manual_seed(seed))[: gate.channels])
        gate.refresh()
    before = torch.cat([gate.q.clone() for gate in gates])
    for gate in gates:
        push(gate, float("nan"))  # so that Adam leaves them alone
    optimizer.step()
    after = torch.cat([gate.q for gate in gates])
    shifts = after - before
    assert float(shifts[0]) < -0.5
    torch.testing.assert_close(shifts, shifts[:1].expand(10), rtol=0, atol=1e-6)
    assert optimizer.mean == pytest.approx(4.1, abs=2e-4)


@pytest.mark.parametrize("far", [-9.0, 9.0])
def test_the_mean_comes_back_from_far_away(far: float) -> None:
    config = AdaptiveBitsConfig(start_bits=4.0)
    optimizer, (gate,) = make({"a": 50}, config)
    gate.q.copy_(far + torch.linspace(-8, 8, 50))
    push(gate, float("nan"))
    optimizer.step()
    assert abs(optimizer.mean - 4.0) == pytest.approx(0.1, abs=2e-4)
    assert abs(float(gate.bits().mean()) - optimizer.mean) < 1e-5


def test_before_the_target_nothing_is_clipped_and_afterwards_all_slows_down() -> None:
    config = AdaptiveBitsConfig(start_bits=4.3, learning_rate=2.5e-2)
    optimizer, (gate,) = make({"a": 8}, config)
    assert (optimizer.learning_rate, optimizer.beta) == (2.5e-2, 0.02)
    for _ in range(5):
        push(gate, -1.0)
        optimizer.step()
    assert optimizer.mean > 4.4
    for _ in range(60):
        push(gate, 1.0)
        optimizer.step()
    assert optimizer.reached
    assert optimizer.learning_rate == pytest.approx(2.5e-3)
    for _ in range(200):
        push(gate, -1.0)
        optimizer.step()
    assert optimizer.mean == pytest.approx(4.1, abs=2e-4)
    assert optimizer.beta == pytest.approx(0.002)
    for _ in range(400):
        push(gate, 1.0)
        optimizer.step()
    assert optimizer.mean == pytest.approx(3.9, abs=2e-4)
    assert optimizer.beta == 0.0  # the penalty ends at the target


@pytest.mark.parametrize("grad", [-1.0, 0.0])
def test_the_target_is_reached_in_time_although_the_loss_wants_bits(grad: float) -> None:
    config = AdaptiveBitsConfig(reach_in_steps=40)
    optimizer, gates = make({"a": 8, "b": 8}, config)
    for step in range(1, 60):
        push(gates[0], grad)
        push(gates[1], grad / 2)
        optimizer.step()
        line = 8.0 - 4.0 * min(1.0, step / 40)
        assert optimizer.mean <= line + 0.1 * (step > 40) + 2e-4
        assert optimizer.reached == (step >= 40)
        if grad:
            assert optimizer.mean >= line - 2e-4
    state = optimizer.state_dict()
    lower, _ = make({"a": 8, "b": 8}, replace(config, target=3.0))
    lower.load_state_dict(state)
    push(lower.gates["a"], -1.0)
    push(lower.gates["b"], -1.0)
    lower.step()
    assert lower.mean == pytest.approx(state["mean"] + (3.0 - state["mean"]) / 40, abs=2e-4)


# --- widths ---------------------------------------------------------------------------------------


def test_widths_are_rounded_together() -> None:
    assert round_jointly(torch.full((6,), 3.5).double()).tolist() == [4, 4, 4, 3, 3, 3]
    bits = torch.tensor([2.3, 2.4, 2.35, 8.0, 2.95], dtype=torch.float64)
    assert round_jointly(bits).tolist() == [2, 3, 2, 8, 3]
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        bits = 1 + 15 * torch.rand(37, generator=generator, dtype=torch.float64)
        widths = round_jointly(bits)
        assert int(widths.sum()) == round(float(bits.sum()))
        assert (widths - bits).abs().max() < 1
        assert widths.min() >= 1
        assert widths.max() <= 16
    bits, widths = bits.sort()[0], round_jointly(bits.sort()[0])
    assert ((widths[1:] >= widths[:-1]) | ((bits[1:] - bits[:-1]) < 1)).all()


def test_start_is_exact_and_widths_change_in_steps_only() -> None:
    for target, start, most in ((4.0, 8, 16), (3.0, 6, 8)):
        config = AdaptiveBitsConfig.preset(target)
        assert (config.max_bits, config.start_bits) == (most, start)
        gate = BitGate(config, 4096)
        assert gate.widths.unique().tolist() == [start]
    optimizer, (gate,) = make({"a": 4}, AdaptiveBitsConfig(learning_rate=1.0))
    widths, table = gate.widths, gate.table()
    push(gate, torch.tensor([1.0, -1.0, 1.0, -1.0]))
    assert gate.table() is table
    optimizer.step()
    assert gate.widths.tolist() != widths.tolist()
    assert gate.table().widths.tolist() == gate.widths.tolist()


# --- lines that are left alone --------------------------------------------------------------------


def test_gradients_that_are_not_finite_leave_their_lines_alone() -> None:
    optimizer, (gate, other) = make({"a": 3, "b": 2}, AdaptiveBitsConfig())
    clean, (gate2, other2) = make({"a": 3, "b": 2}, AdaptiveBitsConfig())
    grad = torch.tensor([1.0, 2.0, -1.0])
    for bad in (float("nan"), float("inf"), None):
        push(gate, grad if bad is None else torch.tensor([1.0, bad, -1.0]))
        push(other, 1.0)
        optimizer.step()
        push(gate2, grad)
        push(other2, 1.0)
        clean.step()
    assert optimizer.skipped_lines == 2
    assert gate.state.isfinite().all()
    torch.testing.assert_close(gate.q[[0, 2]], gate2.q[[0, 2]], rtol=0, atol=0)
    torch.testing.assert_close(other.state, other2.state, rtol=0, atol=0)
    assert gate.state[3].tolist() == [3.0, 1.0, 3.0]  # Adam's steps


def test_what_no_backward_reached_stays() -> None:
    optimizer, (gate, other) = make({"a": 3, "b": 2}, AdaptiveBitsConfig())
    push(gate, 1.0)
    before = other.state.clone()
    optimizer.step()
    torch.testing.assert_close(other.state, before, rtol=0, atol=0)
    unseen = BitGate(AdaptiveBitsConfig(), name="late")
    lost = GateOptimizer({"late": unseen}, AdaptiveBitsConfig())
    with pytest.raises(RuntimeError, match="nothing has passed the site `late`"):
        lost.step()


def test_scaled_losses_and_gradients_taken_before() -> None:
    states = []
    for scale in (1.0, 1024.0):
        optimizer, (gate,) = make({"a": 3}, AdaptiveBitsConfig())
        push(gate, torch.tensor([1e-3, -2e-3, 3e-4]) * scale)
        taken = optimizer.take()
        assert gate.grad is None
        optimizer.step(taken, scale=scale)
        states.append(gate.state.clone())
    torch.testing.assert_close(*states, rtol=1e-6, atol=0)


# --- the start ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [3.0, 4.5, 8.0])
def test_the_first_step_levels_the_errors_of_lines(bits: float) -> None:
    """A channel 64 times as large gets 6 bits more, at the same mean; later steps do not level."""
    config = AdaptiveBitsConfig(start_bits=bits, target=bits, beta=0.0, learning_rate=1e-6)
    x = torch.randn(64, 40)
    x[:, 3] *= 64
    x[:, 9] = 1.5  # has no error
    gate = BitGate(config, 40)
    optimizer = GateOptimizer({"a": gate}, config)
    for _ in range(2):
        adaptive_quantize(x.clone().requires_grad_(), gate).square().sum().backward()
        optimizer.step()
        others = torch.ones(40, dtype=torch.bool)
        others[[3, 9]] = False
        common = gate.bits()[others]
        assert float(common.max() - common.min()) < 1.5
        assert gate.bits()[9] == pytest.approx(config.min_bits + 0.25, abs=1e-3)
        assert float(gate.bits()[3] - common.mean()) == pytest.approx(6.0, abs=0.8)
        assert float(gate.bits().mean()) == pytest.approx(bits, abs=1e-3)
        x = x.flip(1)  # other large lines change nothing any more


def test_levels() -> None:
    widths, errors = torch.tensor([4, 4, 5, 4]), torch.tensor([1.0, 4.0, 1.0, 0.0])
    # one bit more for four times the error, at the width that caused it
    expected = torch.tensor([4.5, 5.5, 5.5, 1.5])
    torch.testing.assert_close(level_errors(widths, errors, 1.5, 16.0), expected)
    far = level_errors(widths[:2], torch.tensor([1.0, 1e30]), 1.5, 6.0)
    torch.testing.assert_close(far, torch.tensor([2.0, 6.0]))


def test_lines_whose_error_says_nothing_begin_where_they_were() -> None:
    config = AdaptiveBitsConfig(start_bits=4.5, beta=0.0, learning_rate=1e-6)
    optimizer, (gate, other) = make({"a": 4, "b": 3}, config)
    first = gate.q.clone()
    sums = torch.zeros(2, 4)
    sums[1] = torch.tensor([1.0, 64.0, float("inf"), float("nan")])
    gate.accumulate(sums, 1)
    push(other, 0.0)  # without any error
    optimizer.step()
    assert gate.bits()[1] - gate.bits()[0] == pytest.approx(3.0, abs=1.1)
    torch.testing.assert_close(gate.q[2:], first[2:], rtol=0, atol=1e-5)
    torch.testing.assert_close(other.q, first[:3], rtol=0, atol=1e-5)


def test_a_first_step_that_is_not_finite_leaves_the_levelling_to_the_next() -> None:
    config = AdaptiveBitsConfig(start_bits=4.5, beta=0.0, learning_rate=1e-6)
    optimizer, (gate,) = make({"a": 2}, config)
    for sums in (torch.full((2, 2), torch.nan), torch.tensor([[0.0, 0.0], [1.0, 64.0]])):
        gate.accumulate(sums, 1)
        optimizer.step()
    assert gate.bits()[1] - gate.bits()[0] == pytest.approx(3.0, abs=1.1)


# --- other ranks ----------------------------------------------------------------------------------


def test_two_stages_share_one_mean_and_replicas_one_gradient() -> None:
    """Played by one process: what the other stage adds to sums is known."""
    config = AdaptiveBitsConfig(start_bits=4.0, beta=0.0)
    whole, (a, b) = make({"a": 3, "b": 2}, config)
    parts: list[Any] = []

    def total(sums: Tensor) -> Tensor:
        parts.append(sums)
        return sums + others[len(parts) - 1]

    push(a, -1.0)
    push(b, -1.0, values=4)
    others: list[Tensor] = []
    recorder = GateOptimizer({"b": copy.deepcopy(b)}, config, total=lambda s: others.append(s) or s)  # type: ignore[func-returns-value]
    recorder.gates["b"].accumulate(torch.stack([-1.0 / b.slope(), 0 * b.slope()]), 4)
    recorder.step()
    half = GateOptimizer({"a": copy.deepcopy(a)}, config, total=total)
    half.step()
    whole.step()
    assert half.mean == pytest.approx(whole.mean, abs=1e-6)
    torch.testing.assert_close(half.gates["a"].q, a.q)
    doubled, (gate,) = make({"a": 3}, config, average=lambda taken: taken * 0.5)
    push(gate, torch.tensor([1.0, 2.0, 3.0]), values=8)
    doubled.step()
    assert gate.values.tolist() == [4.0] * 3
    empty = GateOptimizer({}, config, total=lambda sums: sums + torch.tensor([40.0, 1, 10, 10]))
    empty.step()
    assert empty.mean == pytest.approx(4.0)


# --- saving ---------------------------------------------------------------------------------------


def test_saved_and_loaded_to_the_bit() -> None:
    config = AdaptiveBitsConfig(start_bits=4.2)
    optimizer, gates = make({"a": 9, "b": 4}, config)
    resumed: GateOptimizer | None = None
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        if step in (10, 45):  # before the target and after it
            assert optimizer.reached == (step == 45)
            fresh = {name: BitGate(config, name=name) for name in "ab"}  # lines unknown
            resumed = GateOptimizer(fresh, config)
            if optimizer.reached:  # what backward passes had left is dropped
                fresh["a"].expect(9)
                push(fresh["a"], 5.0)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for gate in gates:
            grad = torch.randn(gate.q.shape, generator=generator) + 0.3
            push(gate, grad)
            if resumed is not None:
                push(resumed.gates[gate.name], grad)
        optimizer.step()
        if resumed is not None:
            resumed.step()
            assert resumed.mean == optimizer.mean
            assert resumed.reached == optimizer.reached
            for gate in gates:
                torch.testing.assert_close(
                    resumed.gates[gate.name].state, gate.state, rtol=0, atol=0
                )
                assert resumed.gates[gate.name].widths.tolist() == gate.widths.tolist()


def test_a_state_of_before_the_first_tensor_brings_back_the_start() -> None:
    gates = {"a": BitGate(AdaptiveBitsConfig())}
    optimizer = GateOptimizer(gates, AdaptiveBitsConfig())
    state = optimizer.state_dict()
    gates["a"].expect(6)
    push(gates["a"], 1.0)
    optimizer.step()
    push(gates["a"], 1.0)
    optimizer.load_state_dict(state)
    assert (gates["a"].channels, gates["a"].grad, optimizer.mean) == (None, None, 8.0)
    gates["a"].expect(4)
    assert gates["a"].widths.tolist() == [8] * 4


def test_refuses_states_of_others() -> None:
    optimizer, _ = make({"a": 9, "b": 4}, AdaptiveBitsConfig())
    state = optimizer.state_dict()
    for lines, config, match in (
        (
            {"a": 9},
            AdaptiveBitsConfig(),
            r"saved gates are `a` \(per channel\), `b`.*there are `a`",
        ),
        ({"a": 9, "b": 5}, AdaptiveBitsConfig(), "gate `b` has 5 channels, but .* has 4"),
        ({"a": 9, "b": 4}, AdaptiveBitsConfig(max_bits=12), r"max_bits=16.*max_bits=12"),
    ):
        other, _ = make(lines, config)
        with pytest.raises(ValueError, match=match):
            other.load_state_dict(state)
    # of earlier versions, whose options are gone
    other, _ = make({"a": 9, "b": 4}, AdaptiveBitsConfig())
    before = {**state["config"], "alpha": 1.0, "ranges": "full"}
    with pytest.warns(UserWarning, match="ranges='full'.*ranges='fitted'.*from here on"):
        other.load_state_dict({**state, "config": before})
    assert torch.equal(other.gates["a"].state, state["gates"]["a"]["state"])
    with pytest.raises(ValueError, match=r"alpha=2.*alpha=1.*removed option: start from"):
        other.load_state_dict({**state, "config": {**state["config"], "alpha": 2.0}})
    gates = {name: {**entry, "per": "position"} for name, entry in state["gates"].items()}
    with pytest.raises(ValueError, match=r"`a` \(per position\)"):
        other.load_state_dict({**state, "gates": gates})


def test_another_target_is_gone_down_to() -> None:
    optimizer, (gate,) = make({"a": 9}, AdaptiveBitsConfig(start_bits=4.0, learning_rate=0.1))
    push(gate, 0.0)
    optimizer.step()
    lower, (gate,) = make({"a": 9}, AdaptiveBitsConfig(target=3.0, learning_rate=0.1))
    lower.load_state_dict(optimizer.state_dict())
    assert not lower.reached
    assert lower.mean == pytest.approx(4.0, abs=0.1)
    for _ in range(40):
        push(gate, 0.0)
        lower.step()
    assert lower.reached
    back, _ = make({"a": 9}, AdaptiveBitsConfig())
    with pytest.raises(ValueError, match="bits on average, which is below the new target of 4"):
        back.load_state_dict(lower.state_dict())


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"target": 1}, r"target=1\)` must be a number above `min_bits=1` and below `max_bits=16`"),
        ({"target": 16}, r"target=16\)"),
        ({"start_bits": 16}, r"start_bits=16\)"),
        ({"start_bits": 3.0}, r"start_bits=3, target=4\).*brought down"),
        ({"min_bits": 0.5}, r"min_bits=0.5\)` must be 1 or more, and at most 16"),
        ({"max_bits": 17}, r"max_bits=17\)`"),
        ({"min_bits": 6, "max_bits": 5}, "leaves nothing to choose"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"beta": -0.1}, "beta=-0.1.*0 or more"),
        ({"beta": float("inf")}, "beta=inf.*finite"),
        ({"reach_in_steps": 0}, "reach_in_steps=0.*1 or more"),
    ],
)
def test_refuses_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        AdaptiveBitsConfig(**options)


def test_refuses_gates_that_do_not_belong_together() -> None:
    config = AdaptiveBitsConfig()
    with pytest.raises(ValueError, match="at least one gate"):
        GateOptimizer({}, config)
    with pytest.raises(ValueError, match="gate `a` has another configuration"):
        GateOptimizer({"a": BitGate(AdaptiveBitsConfig(beta=1.0), 2)}, config)
    with pytest.raises(ValueError, match="channels=0"):
        BitGate(config, 0)
    with pytest.warns(DeprecationWarning, match="is called `channels` now"):
        assert BitGate(config, lines=3).channels == 3
    with pytest.raises(RuntimeError, match="has not seen a tensor yet"):
        BitGate(config).widths  # noqa: B018
    with pytest.raises(ValueError, match=r"float32 of shape \[5, channels\]"):
        BitGate(config, 3).state = torch.zeros(4, 3)
