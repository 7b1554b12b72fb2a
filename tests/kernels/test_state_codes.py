"""Predicted codes of optimizer states equal those that the reference searches for."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from lq_testing.interpreter import skip_old_interpreter
from torch import Tensor

from lq_lightning.kernels.optimizer_step import FORMATS, StateFormat, reference, state_format
from lq_lightning.kernels.optimizer_step.formats import GROUP_SIZE, codebook, exponent_table
from lq_lightning.kernels.optimizer_step.triton_kernels import encode_group

QUANTIZED = [name for name in FORMATS if name != "float32"]


@triton.jit
def encode_kernel(
    x_ptr, codes_ptr, scale_ptr, exponent_ptr, thresholds_ptr, table_ptr, FORMAT: tl.constexpr
):
    group = tl.program_id(0)
    offsets = group * 128 + tl.arange(0, 128)
    x = tl.load(x_ptr + offsets)
    codes, scale, exponent = encode_group(x, thresholds_ptr, table_ptr, FORMAT)
    tl.store(codes_ptr + offsets, codes)
    tl.store(scale_ptr + group, scale)
    if FORMAT.expanded:
        tl.store(exponent_ptr + group, exponent)


def encode(x: Tensor, fmt: StateFormat) -> tuple[Tensor, Tensor, Tensor | None]:
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(len(x), dtype=torch.bfloat16, device=x.device)
    exponent = torch.empty(len(x), dtype=torch.uint8, device=x.device) if fmt.expanded else None
    thresholds = codebook(fmt, x.device)[1]
    encode_kernel[(len(x),)](
        x,
        codes,
        scale.view(torch.uint16),
        exponent,
        thresholds,
        exponent_table(x.device),
        FORMAT=fmt,
        num_warps=1,
    )
    return codes, scale, exponent


def near_thresholds(fmt: StateFormat, groups: int, device: torch.device) -> Tensor:
    """``[groups, 128]``: in turn values a few roundings from thresholds, and of any magnitude.

    Groups have many scales. Values include zeros, subnormal ones and the largest of each group.
    """
    generator = torch.Generator(device).manual_seed(0)
    shape = (groups, GROUP_SIZE)

    def draw() -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    thresholds = codebook(fmt, device)[1]
    finite = thresholds[:, : fmt.num_levels - 1].clamp(max=1.0)
    used = finite[finite[:, -1] > 0]  # rows of small exponents are empty
    row = used[(draw()[:, :1] * len(used)).long(), (draw() * finite.shape[1]).long()]
    scale = torch.exp2(200 * draw()[:, :1] - 100).bfloat16().float()
    near = (row * scale).view(torch.int32) + (7 * draw()).int() - 3
    near = near.clamp(min=0).view(torch.float32)
    wide = scale * 10 ** (-9 * draw())
    x = torch.where((torch.arange(groups, device=device) % 2 == 0)[:, None], near, wide)
    x[:, 1] = scale[:, 0]
    x[:, 2:5] = torch.tensor([0.0, 1e-39, 2.0**-126], device=device)
    return torch.where(draw() < 0.5, -x, x) if fmt.signed else x


def check(name: str, signed: bool, groups: int, device: torch.device) -> None:
    fmt = state_format(name, signed)
    x = near_thresholds(fmt, groups, device)
    x[5, 7], x[6, 7], x[7] = float("nan"), float("inf"), 0.0
    actual, expected = encode(x, fmt), reference.encode_groups(x, fmt)
    wrong = (actual[0] != expected[0]).nonzero()
    assert len(wrong) == 0, (len(wrong), wrong[0], x[tuple(wrong[0])].item())
    assert torch.equal(actual[1].isnan(), expected[1].isnan())
    assert torch.equal(actual[1].nan_to_num(), expected[1].nan_to_num())
    if fmt.expanded:
        assert torch.equal(actual[2], expected[2])
    else:  # every level is tried
        magnitudes = expected[0] & 0x7F if signed else expected[0]
        assert len(magnitudes.unique()) >= (127 if fmt.spacing == "floating" else fmt.num_levels)


@skip_old_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", QUANTIZED)
def test_codes_near_thresholds(name: str, signed: bool, device: torch.device) -> None:
    check(name, signed, 64, device)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", QUANTIZED)
def test_many_codes_near_thresholds(name: str, signed: bool) -> None:
    check(name, signed, 1 << 16, torch.device("cuda"))
