"""The accumulation operators: error bounds, special values, and equal bits from both kernels."""

from __future__ import annotations

import pytest
import torch
from lq_testing.codec_data import awkward_rows
from lq_testing.interpreter import skip_old_interpreter
from torch import Tensor

from lq_lightning.kernels.accumulate import (
    accumulate_,
    buffer_layout,
    read_accumulated_,
    reference,
)
from lq_lightning.kernels.accumulate.reference import GROUP_SIZE

SIZES = [1, 31, 32, 33, 512, 2047, 2048, 2049, 5001]


def new_buffer(numel: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.full((buffer_layout(numel).nbytes,), 0xFF, dtype=torch.uint8, device=device)


def accumulated(*terms: Tensor) -> Tensor:
    """The stored sum, in fp32."""
    buffer = new_buffer(terms[0].numel(), terms[0].device)
    for index, term in enumerate(terms):
        accumulate_(buffer, term, index == 0)
    out = torch.empty(terms[0].numel(), device=terms[0].device)
    read_accumulated_(buffer, out, False)
    return out


def group_maximum(x: Tensor) -> Tensor:
    """Of each element's group, ``[N]``."""
    padded = torch.nn.functional.pad(x, (0, -x.numel() % GROUP_SIZE)).view(-1, GROUP_SIZE)
    largest = padded.abs().amax(1, keepdim=True).expand_as(padded)
    return largest.reshape(-1)[: x.numel()]


def test_layout_is_one_and_an_eighth_byte_per_value() -> None:
    assert buffer_layout(1 << 20).nbytes == (1 << 20) * 9 // 8
    assert buffer_layout(0).nbytes == 0
    assert all(buffer_layout(n).nbytes % 16 == 0 for n in range(200))
    assert buffer_layout(1) == buffer_layout(32)


@pytest.mark.parametrize("numel", [0, *SIZES])
def test_error_is_bounded_by_half_a_step(numel: int) -> None:
    x = torch.randn(numel)
    # half a step, and what rounding the scale moves the largest values by
    bound = group_maximum(x) / 127 * (0.5 + 0.25) * 1.01 if numel else x
    assert bool(((accumulated(x) - x).abs() <= bound).all())


def test_small_pairs_have_half_the_step() -> None:
    x = torch.rand(3200) * 0.9 - 0.45
    x[::32] = 1.0
    small = torch.ones(3200, dtype=torch.bool)
    small[::32] = small[1::32] = False  # the pairs with the largest value
    error = (accumulated(x) - x).abs()[small]
    assert error.max() <= 0.5 / 127 / 2 * 1.01
    assert error.max() > 0.9 * 0.5 / 127 / 2


def test_sums_stay_unbiased_and_close() -> None:
    terms = [torch.randn(1 << 16) for _ in range(16)]
    exact, stored = sum(terms), accumulated(*terms)
    assert isinstance(exact, Tensor)
    assert float((stored - exact).norm() / exact.norm()) < 0.0125
    assert abs(float(stored @ exact / (exact @ exact)) - 1) < 1e-3


def test_zeros_stay_zero_and_equal_terms_scale_exactly() -> None:
    x = torch.randn(320)
    x[:32] = 0.0
    x[40:60] = -0.0
    stored = accumulated(x, x)
    assert (stored[:32] == 0).all()
    assert (stored[40:60] == 0).all()
    assert torch.equal(accumulated(torch.zeros(320), x), accumulated(x))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_survive_in_their_group(bad: float) -> None:
    terms = [torch.randn(128) for _ in range(3)]
    terms[1][40] = bad
    stored = accumulated(*terms)
    assert stored[32:64].isnan().all()
    assert stored[:32].isfinite().all()
    assert stored[64:].isfinite().all()


def test_tiny_values_become_zero_and_large_ones_stay() -> None:
    assert (accumulated(torch.full((32,), 1e-40)) == 0).all()
    largest = torch.finfo(torch.float32).max
    for value in (1e35, 2.0**127, largest):
        x = torch.full((32,), value)
        assert ((accumulated(x).double() - value).abs() < value * 2**-8).all()
    assert accumulated(x, x).isnan().all()  # their sum is infinite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reading_adds_in_fp32_and_rounds_once(dtype: torch.dtype) -> None:
    x, base = torch.randn(1001), torch.randn(1001).to(dtype)
    buffer = new_buffer(1001)
    accumulate_(buffer, x, True)
    exact = torch.empty(1001)
    read_accumulated_(buffer, exact, False)
    out = base.clone()
    read_accumulated_(buffer, out, True)
    assert torch.equal(out, (exact + base.float()).to(dtype))
    read_accumulated_(buffer, out, False)
    assert torch.equal(out, exact.to(dtype))


def test_wrong_tensors_are_refused() -> None:
    x = torch.randn(64)
    with pytest.raises(ValueError, match=r"expected one contiguous dimension"):
        accumulate_(new_buffer(32), x[::2], True)
    with pytest.raises(ValueError, match=r"64 values need uint8 \(96,\)"):
        accumulate_(new_buffer(32), x, True)
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        accumulate_(torch.zeros(104, dtype=torch.uint8)[8:], x, True)


def test_operators_are_well_formed() -> None:
    x = torch.randn(64)
    names = ("test_schema", "test_faketensor")
    torch.library.opcheck(accumulate_, (new_buffer(64), x, True), test_utils=names)
    buffer = new_buffer(64)
    accumulate_(buffer, x, True)
    torch.library.opcheck(read_accumulated_, (buffer, x, True), test_utils=names)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@skip_old_interpreter
@pytest.mark.parametrize(
    ("numel", "dtype"),
    [(numel, torch.float32) for numel in SIZES]
    + [(2049, torch.bfloat16), (33, torch.bfloat16), (5001, torch.float16), (32, torch.float16)],
)
def test_triton_produces_the_bits_of_the_reference(
    numel: int, dtype: torch.dtype, device: torch.device
) -> None:
    from lq_lightning.kernels.accumulate.triton_kernels import (
        launch_accumulate,
        launch_read_accumulated,
    )

    terms = [awkward_rows(1, numel, GROUP_SIZE * k, k)[0].to(dtype) for k in (1, 2, 3)]
    expected, actual = new_buffer(numel), new_buffer(numel, device)
    for index, term in enumerate(terms):
        reference.accumulate_(expected, term, index == 0)
        launch_accumulate(actual, term.to(device), index == 0)
        assert torch.equal(actual.cpu(), expected), f"after term {index}"
    for add in (False, True):
        out = torch.ones(numel, dtype=dtype)
        on_device = out.to(device, copy=True)
        reference.read_accumulated_(expected, out, add)
        launch_read_accumulated(actual, on_device, add)
        assert torch.equal(on_device.cpu().nan_to_num(7.0), out.nan_to_num(7.0))
