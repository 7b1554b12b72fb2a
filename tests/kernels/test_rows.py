"""Rows of two strides, and rows of which one is left out, in one launch."""

from __future__ import annotations

import pytest
import torch
from lq_testing.codec_data import make_format
from lq_testing.interpreter import skip_old_interpreter

from lq_lightning.kernels.message import reference as reference_rows

# the interpreter computes with numpy, which warns where IEEE arithmetic is silent
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    skip_old_interpreter,
]

NUMEL = 1024 + 333  # more than a whole tile of the interpreter, and an incomplete one


@pytest.mark.parametrize("group_size", [64, 0])
def test_rows_of_two_strides(group_size: int, device: torch.device) -> None:
    """Rows ordered by node on one side of a message, by local rank on the other."""
    from lq_lightning.kernels.message.triton_kernels import launch_dequantize, launch_quantize

    fmt = make_format("int6", hadamard_size=16, stochastic=True, group_size=group_size)
    nbytes = fmt.layout(1200).nbytes
    wide = torch.randn(12, 1300)
    expected = torch.full((12, nbytes), 0xFF, dtype=torch.uint8)
    reference_rows.quantize(wide[:, 8:1208], None, fmt, 3, expected)
    x = wide.to(device).view(3, 4, 1300)[..., 8:1208]
    messages = torch.full((4, 3, nbytes), 0xFF, dtype=torch.uint8, device=device)
    launch_quantize(x, None, fmt, 3, messages.transpose(0, 1))
    assert torch.equal(messages.transpose(0, 1).reshape(12, nbytes).cpu(), expected)
    messages.fill_(0xFF)
    reference_rows.quantize(x.cpu(), None, fmt, 3, on_cpu := messages.cpu().transpose(0, 1))
    assert torch.equal(on_cpu.reshape(12, nbytes), expected)

    target = torch.full((12, 1300), 7.0)
    decoded = torch.full((4, 3, 1300), 7.0, device=device).transpose(0, 1)
    twice = expected.expand(2, -1, -1)
    reference_rows.dequantize(twice, 1200, fmt, 0.5, True, target[:, 8:1208])
    in_order = on_cpu.to(device).expand(2, -1, -1, -1)
    launch_dequantize(in_order, 1200, fmt, 0.5, True, decoded[..., 8:1208])
    assert torch.equal(decoded.reshape(12, 1300).cpu(), target)
    again = torch.full((3, 4, 1300), 7.0)
    reference_rows.dequantize(in_order.cpu(), 1200, fmt, 0.5, True, again[..., 8:1208])
    assert torch.equal(again.view(12, 1300), target)


def test_too_many_rows_of_two_strides() -> None:
    from lq_lightning.kernels.message.launch import RowSteps

    assert RowSteps.of(torch.empty(1, 70000, 16)).rows == 70000
    with pytest.raises(ValueError, match="65535"):
        RowSteps.of(torch.empty(2, 70000, 16))


@pytest.mark.parametrize("skip", [0, 3, 4])
def test_a_row_is_left_out(skip: int, device: torch.device) -> None:
    from lq_lightning.kernels.message.triton_kernels import launch_quantize, launch_requantize

    source, target = make_format("int8"), make_format(stochastic=True)
    x = torch.randn(5, NUMEL)
    kept = [row for row in range(5) if row != skip]
    messages = torch.empty(10, source.layout(NUMEL).nbytes, dtype=torch.uint8)
    reference_rows.quantize(torch.cat((x, -2 * x)), None, source, 0, messages)
    messages = messages.view(2, 5, -1)
    rows = torch.full((4, target.layout(NUMEL).nbytes), 0xFF, dtype=torch.uint8)
    for reference, launch, whole in (
        (reference_rows.quantize, launch_quantize, x),
        (reference_rows.requantize, launch_requantize, messages),
    ):
        results = []
        for run, values, place, left_out in (
            (reference, whole[..., kept, :], torch.device("cpu"), None),
            (reference, whole, torch.device("cpu"), skip),
            (launch, whole.to(device), device, skip),
        ):
            out = rows.to(place, copy=True)
            if launch is launch_quantize:
                run(values, None, target, 5, out, left_out)
            else:
                run(values, NUMEL, source, target, 5, out, left_out)
            results.append(out.cpu())
        assert torch.equal(results[1], results[0])
        assert torch.equal(results[2], results[0])
