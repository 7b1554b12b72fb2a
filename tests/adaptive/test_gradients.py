"""The gradient to the gates: exact, and the one that measured errors have."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from lq_lightning.adaptive import AdaptiveBitsConfig, BitGate, adaptive_quantize
from lq_lightning.adaptive import gate as gates
from lq_lightning.adaptive.gate import error_slope
from lq_lightning.codecs import WidthTable, round_trip_mixed
from lq_lightning.codecs.mixed import Ranges, split_tokens
from lq_lightning.kernels.mixed_width import mixed_round_trip, width_rows

CONFIG = AdaptiveBitsConfig()


def gate_with(widths: list[int], ranges: Ranges = "full") -> BitGate:
    gate = BitGate(CONFIG, len(widths), ranges=ranges)
    share = (torch.tensor(widths).double() - CONFIG.min_bits) / (CONFIG.max_bits - CONFIG.min_bits)
    share = share.clamp(1e-3, 1 - 1e-3)
    gate.q.copy_((share / (1 - share)).log())
    gate.refresh()
    assert gate.widths.tolist() == widths
    return gate


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(*shape, generator=generator) * torch.linspace(0.1, 5, shape[-1])).to(dtype)


WIDTHS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16]


def test_gradient_is_that_of_finite_differences_with_the_rounding_held() -> None:
    """With ``round(u) - u`` held, a quantized value is smooth in the gate: x + step(q) * held."""
    gate = gate_with(WIDTHS)
    widths, q = gate.widths.double(), gate.q.double()
    x, target = values(40, len(WIDTHS)), values(40, len(WIDTHS)).roll(1, 0).double()
    quantized = adaptive_quantize(x, gate)
    errors = (quantized.detach() - x).double()
    step = (x.amax(0) - x.amin(0)).double() / (2**widths - 1)
    codes = (x - x.amin(0)).double() / step
    errors = torch.where(widths > 8, step * (codes.round() - codes), errors)
    errors = errors.bfloat16().double()  # as backward keeps them
    assert errors.abs().amax(0).ge(step / 8).all()

    def loss(shift: float) -> Tensor:
        """At the integer width, moved as the gate moves the bits."""
        bits = 15 * (torch.sigmoid(q + shift) - torch.sigmoid(q))
        wider = (2**widths - 1) / (2 ** (widths + bits) - 1)
        return ((x + errors * wider - target) ** 3).sum(0)

    expected = (loss(1e-5) - loss(-1e-5)) / 2e-5
    quantized.backward((3 * (x + errors - target) ** 2).float())
    assert gate.grad is not None
    torch.testing.assert_close(gate.grad[:8].double(), expected[:8], rtol=1e-4, atol=0.0)
    # of the 65,536 codes of 16 bits fp32 tells the distance to the nearest to a hundredth
    torch.testing.assert_close(gate.grad[8:].double(), expected[8:], rtol=0.1, atol=0.0)


@pytest.mark.parametrize("ranges", ["full", "fitted"])
def test_slope_of_errors_is_the_one_measured_between_widths(ranges: Any) -> None:
    """Half the slope of the logarithm of the mean square error, for normal values."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(100_000, 8, generator=generator)
    logs = [
        (mixed_round_trip(x, width_rows(torch.tensor(widths)), ranges == "fitted") - x)
        .square()
        .sum(0)
        .log()  # without exact tokens, which normal values do not need
        for widths in ([1, *range(1, 8)], list(range(2, 9)) + [8])
    ]
    # means of neighbouring slopes: of width 2 between 1 and 3, up to 7 between 6 and 8
    measured = (logs[1] - logs[0])[1:7] / 4
    widths = torch.arange(2, 8)
    expected = error_slope(widths, ranges)
    torch.testing.assert_close(expected, measured, rtol=0.05 if ranges == "fitted" else 0.3, atol=0)


def test_slope_of_fitted_errors_at_the_ends() -> None:
    widths = torch.arange(1, 17)
    fitted, full = error_slope(widths, "fitted"), error_slope(widths, "full")
    assert torch.equal(fitted[8:], full[8:])  # of lines that travel as bf16
    assert fitted[0] == pytest.approx(math.log(0.11885) / 4)  # no bits: the values' own square
    assert (fitted[:8].diff() < 0).all()  # a bit more counts more and more
    assert fitted[7] == pytest.approx(-0.625, abs=0.005)
    assert (fitted.abs() <= full.abs()).all()


@pytest.mark.parametrize("width", [1, 3, 8])
def test_gradient_with_fitted_ranges(width: int) -> None:
    x = values(4000, 6)
    x[:40] *= 5  # 31 are exact; of others far values are clipped, and gradients pass all the same
    x.requires_grad_()
    gate = gate_with([width] * 6, "fitted")
    quantized = adaptive_quantize(x, gate)
    error = (quantized - x).detach()
    assert int((error.abs().amax(1) <= x.detach().abs().amax(1) * 2**-8).sum()) >= 31
    assert width == 8 or (error.abs().amax(0) > 3 * error.abs().median(0).values).all()
    quantized.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * quantized.detach(), rtol=0, atol=0)
    assert gate.grad is not None
    sigma = torch.sigmoid(gate.q)
    _, exact = split_tokens(x.detach())
    assert exact is not None
    error[exact.indices] = 0  # of which widths change nothing
    sums = (2 * quantized.detach() * error.bfloat16().float()).sum(0)
    slope = error_slope(torch.tensor([width]), "fitted")
    expected = sums * slope * 15 * sigma * (1 - sigma)
    torch.testing.assert_close(gate.grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranges", ["full", "fitted"])
def test_values_are_those_of_the_codec_and_gradients_pass(
    ranges: Ranges, dtype: torch.dtype
) -> None:
    gate = gate_with([8, 3, 1, 11, 5], ranges)
    x = values(3, 7, 5, dtype=dtype).requires_grad_()
    quantized = adaptive_quantize(x, gate)
    expected = round_trip_mixed(x.detach().reshape(-1, 5), gate.table(), ranges).view(x.shape)
    torch.testing.assert_close(quantized, expected, rtol=0, atol=0)
    assert quantized.dtype == dtype
    assert quantized.is_contiguous()
    assert quantized._base is None  # FSDP2's hooks are lost on views that change in place
    grad = values(*x.shape, dtype=dtype).flip(0)
    quantized.backward(grad)
    torch.testing.assert_close(x.grad, grad, rtol=0, atol=0)
    gate.accumulate(torch.zeros(2, 5), 0)
    assert gate.grad is not None
    assert (gate.grad != 0).all()
    with torch.no_grad():
        torch.testing.assert_close(adaptive_quantize(x, gate), expected, rtol=0, atol=0)


def _grad_of(x: Tensor, gate: BitGate, **options: Any) -> Tensor:
    (adaptive_quantize(x, gate, **options) * values(*x.shape).flip(0)).sum().backward()
    assert gate.grad is not None
    return gate.grad


def test_evaluation_computes_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "_errors", None)
    with torch.no_grad():
        adaptive_quantize(values(9, 4), gate_with([2, 3, 4, 9]))


def test_values_that_a_codec_sends_stay_and_the_gradient_is_that_of_what_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = values(3, 4, 4)
    expected = _grad_of(x, gate_with([2, 3, 4, 9]))
    arrives = round_trip_mixed(x.reshape(-1, 4), WidthTable([2, 3, 4, 9])).view(3, 4, 4)
    monkeypatch.setattr(gates, "round_trip_mixed", None)  # nothing is quantized again
    gate = gate_with([2, 3, 4, 9])
    torch.testing.assert_close(adaptive_quantize(x, gate, arrives=arrives), x, rtol=0, atol=0)
    torch.testing.assert_close(_grad_of(x, gate, arrives=arrives), expected, rtol=0, atol=0)
    with torch.no_grad():
        assert adaptive_quantize(x, gate, arrives=arrives) is x
    with pytest.raises(ValueError, match=r"\[3, 4, 4\] of which \[4, 4\] arrive"):
        adaptive_quantize(x, gate, arrives=arrives[0])


def test_frozen_values_still_give_the_gates_their_gradient() -> None:
    x = values(9, 4)
    quantized = adaptive_quantize(x, gate_with([2, 3, 4, 9]))
    assert quantized.requires_grad
    frozen = _grad_of(x, gate_with([2, 3, 4, 9]))
    trained = _grad_of(x.requires_grad_(), gate_with([2, 3, 4, 9]))
    torch.testing.assert_close(frozen, trained, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_regions_count_once(reentrant: bool) -> None:
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    grads = []
    for checkpointed in (False, True):
        gate, x = gate_with([2, 3, 4, 9]), values(9, 4).requires_grad_()

        def region(x: Tensor, gate: BitGate = gate) -> Tensor:
            return (adaptive_quantize(x @ weight, gate) @ weight).tanh()

        y = checkpoint(region, x, use_reentrant=reentrant) if checkpointed else region(x)
        y.square().sum().backward()
        taken = gate.take(torch.device("cpu"))
        assert taken[2].tolist() == [9.0] * 4
        grads.append((taken, x.grad))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_rounded_once(dtype: torch.dtype) -> None:
    x = values(64, 8).to(dtype)
    table = WidthTable([2] * 8)
    quantized = round_trip_mixed(x, table)
    expected = (quantized.double() - x.double()).float().bfloat16()  # exact in fp32
    assert torch.equal(gates._errors(x, quantized, table), expected)


@pytest.mark.parametrize("width", [4, 8, 9, 12])  # also where all lines travel as bf16
def test_a_massive_token_that_is_exact_adds_no_error(width: int) -> None:
    """The range of the other tokens has the error, as on the wire."""
    x = values(256, 6)
    x[7] = 1000.3
    table = WidthTable([width] * 6)
    errors = gates._errors(x, round_trip_mixed(x, table), table)
    assert errors[7].eq(0).all()
    others = x[torch.arange(256) != 7]
    step = (others.amax(0) - others.amin(0)) / (2**width - 1)
    assert (errors.abs().amax(0) < 0.6 * step).all()


def test_a_line_that_is_constant_or_not_finite() -> None:
    x = values(9, 5)
    x[:, 0], x[3, 1], x[4, 3], x[:, 4] = 2.5, float("nan"), float("inf"), 2.5
    gate = gate_with([3, 3, 3, 12, 12])
    quantized = adaptive_quantize(x, gate)
    assert quantized[:, [0, 4]].flatten().tolist() == [2.5] * 18
    assert quantized[:, 1].isnan().any()
    quantized.sum().backward()
    assert gate.grad is not None
    assert gate.grad[[0, 4]].tolist() == [0.0, 0.0]
    assert gate.grad.isfinite().tolist() == [True, False, True, False, True]


def test_nothing_is_counted_for_no_values() -> None:
    gate = gate_with([3, 3])
    x = torch.zeros(0, 2, requires_grad=True)
    assert adaptive_quantize(x, gate) is x
    assert gate.grad is None


@pytest.mark.parametrize(
    ("x", "match"),
    [
        (torch.zeros(3, 4, dtype=torch.float64), "not torch.float64"),
        (torch.zeros(3, 4, dtype=torch.int64), "not torch.int64"),
        (torch.zeros(3, 5), "has 4 channels, but a tensor with 5 channels.*Only 4"),
        (torch.zeros(3, 3), "has 4 channels, but a tensor with 3 channels"),
        (torch.zeros(()), "needs tensors of 1 dimension"),
    ],
)
def test_refuses_what_does_not_fit(x: Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        adaptive_quantize(x, BitGate(CONFIG, 4))
    with pytest.raises(ValueError, match="ranges"):
        BitGate(CONFIG, 4, ranges="tight")  # type: ignore[arg-type]


def test_gates_are_float32_on_the_cpu_whatever_the_defaults_are() -> None:
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"), torch.inference_mode():
            gates = [BitGate(CONFIG, 4), BitGate(CONFIG)]
            for gate in gates:
                gate.expect(4)
                assert gate.table().widths.tolist() == [8] * 4
        x = values(9, 4)
        for gate in gates:
            assert _grad_of(x, gate).dtype == torch.float32
            gate.state.add_(0.0)
    finally:
        torch.set_default_dtype(default)


def test_refuses_distributed_tensors() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = distribute_tensor(torch.zeros(3, 4), mesh, [Shard(0)])
        with pytest.raises(NotImplementedError, match=r"gate `gate` got a DTensor of \(Shard"):
            adaptive_quantize(x, BitGate(CONFIG, 4))
    finally:
        dist.destroy_process_group()


def test_compiled_code_breaks_its_graph_there() -> None:
    def double(x: Tensor) -> Tensor:
        return adaptive_quantize(x * 2, gate) * 3

    gate, x = gate_with([2, 3, 4, 9]), values(9, 4).requires_grad_()
    with pytest.raises(Exception, match="gates are summed beside autograd"):
        torch.compile(double, backend="eager", fullgraph=True)(x)
    torch.compile(double, backend="eager")(x).sum().backward()
    compiled = gate.take(torch.device("cpu"))
    double(x).sum().backward()
    torch.testing.assert_close(compiled, gate.take(torch.device("cpu")), rtol=0, atol=0)
