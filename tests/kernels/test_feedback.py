"""Encoding with a residual: the bits of the reference, and nothing is lost between two calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lq_testing.codec_data import awkward_rows
from lq_testing.interpreter import skip_old_interpreter

from lq_lightning.codecs import CodecSpec, decode, decode_reduce, encode, encode_with_residual
from lq_lightning.kernels.feedback import feedback_out
from lq_lightning.kernels.feedback import reference as feedback_reference

pytestmark = [
    # the interpreter computes with numpy, which warns where IEEE arithmetic is silent
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    skip_old_interpreter,
]

STORED = CodecSpec(code="int8", group_size=64)
TARGET = CodecSpec(code="int4", group_size=64)


def residual_rows(spec: CodecSpec, rows: int, numel: int) -> torch.Tensor:
    return encode(spec, 0.1 * torch.randn(rows, numel))


def check(
    values: torch.Tensor,
    numel: int,
    stored: CodecSpec,
    target: CodecSpec,
    residual: torch.Tensor,
    device: torch.device,
    seed: int = 5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare the kernel with the reference; return message and residual."""
    from lq_lightning.kernels.feedback.triton_kernels import launch_feedback

    formats = stored.message_format, target.message_format
    out = torch.full((residual.shape[0], target.nbytes(numel)), 0xFF, dtype=torch.uint8)
    on_device = [tensor.to(device, copy=True) for tensor in (values, residual, out)]
    expected = residual.clone()
    feedback_reference.feedback(values, numel, *formats, seed, expected, out)
    launch_feedback(on_device[0], numel, *formats, seed, on_device[1], on_device[2])
    assert torch.equal(on_device[2].cpu(), out)
    assert torch.equal(on_device[1].cpu(), expected)
    return out, expected


@pytest.mark.parametrize(
    ("numel", "hadamard_size", "rounding"),
    [(1357, 0, "stochastic"), (1357, 32, "nearest"), (1, 32, "stochastic"), (1024, 0, "nearest")],
)
def test_kernel_matches_reference(
    numel: int, hadamard_size: int, rounding: str, device: torch.device
) -> None:
    changes = {"hadamard_size": hadamard_size, "scale_dtype": "bfloat16"}
    stored, target = (replace(spec, **changes) for spec in (STORED, TARGET))
    target = replace(target, rounding=rounding)
    residual = residual_rows(stored, 3, numel)
    _, residual = check(torch.randn(3, numel), numel, stored, target, residual, device)
    check(torch.randn(3, numel).bfloat16(), numel, stored, target, residual, device, seed=6)


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7, 8])
def test_every_code(bits: int, device: torch.device) -> None:
    rounding = "stochastic" if bits in (2, 5, 7) else "nearest"
    target = replace(TARGET, code=f"int{bits}", rounding=rounding)
    x = awkward_rows(2, 700, 64)
    check(x, 700, STORED, target, residual_rows(STORED, 2, 700), device)


@pytest.mark.parametrize(("num_messages", "hadamard_size"), [(1, 0), (2, 32), (9, 0)])
def test_messages_are_summed(num_messages: int, hadamard_size: int, device: torch.device) -> None:
    stored = replace(STORED, hadamard_size=hadamard_size)
    target = replace(TARGET, hadamard_size=hadamard_size)
    x = torch.randn(num_messages * 2, 1001)
    messages = encode(stored, x).view(num_messages, 2, -1)
    residual = residual_rows(stored, 2, 1001)
    total = decode_reduce(stored, messages, 1001) + decode(stored, residual, 1001)
    out, residual = check(messages, 1001, stored, target, residual, device)
    both = decode(target, out, 1001) + decode(stored, residual, 1001)
    bound = total.abs().max() * (1 / 7 / 2 / 127)
    assert (both - total).abs().max() < 6 * bound
    if num_messages == 2:  # as for some of the nodes: gaps between messages, not between rows
        wide = encode(stored, torch.randn(num_messages * 3, 1001)).view(num_messages, 3, -1)
        check(wide[:, 1:], 1001, stored, target, residual, device)


@pytest.mark.parametrize("hadamard_size", [0, 32])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_what_is_left_out_arrives_later(hadamard_size: int, rounding: str) -> None:
    stored = replace(STORED, hadamard_size=hadamard_size)
    target = replace(TARGET, hadamard_size=hadamard_size, rounding=rounding)
    rows = torch.randn(20, 1, 3000)
    residual = torch.zeros(1, stored.nbytes(3000), dtype=torch.uint8)
    out = torch.empty(1, target.nbytes(3000), dtype=torch.uint8)
    arrived, alone = torch.zeros(1, 3000), torch.zeros(1, 3000)
    for step, row in enumerate(rows):
        encode_with_residual(target, row, 3000, stored, residual, seed=step, out=out)
        arrived += decode(target, out, 3000)
        alone += decode(target, encode(target, row, seed=step), 3000)
    exact = rows.sum(0)
    error = (arrived - exact).norm() / exact.norm()
    assert error < 0.4 * (alone - exact).norm() / exact.norm()
    missing = decode(stored, residual, 3000)
    torch.testing.assert_close(arrived + missing, exact, rtol=0, atol=0.03)


@pytest.mark.parametrize("code", ["int3"])
def test_residuals_of_few_bits(code: str, device: torch.device) -> None:
    stored = replace(STORED, code=code)
    residual = residual_rows(stored, 2, 700)
    out, kept = check(torch.randn(2, 700), 700, stored, TARGET, residual, device)
    assert decode(stored, kept, 700).abs().max() < 0.55 * decode(TARGET, out, 700).abs().max() / 7


def test_the_operator_passes_the_seed_and_rounds_the_residual_to_nearest() -> None:
    target = replace(TARGET, rounding="stochastic")
    x = torch.randn(2, 300)
    kept = []
    for rounding in ("nearest", "stochastic"):  # as in the config, for both levels
        stored = replace(STORED, rounding=rounding)
        residual = torch.zeros(2, stored.nbytes(300), dtype=torch.uint8)
        out = torch.empty(2, target.nbytes(300), dtype=torch.uint8)
        version = residual._version
        encode_with_residual(target, x, 300, stored, residual, seed=7, out=out)
        assert residual._version > version
        assert torch.equal(out, encode(target, x, seed=7))  # nothing was kept before
        kept.append(residual)
    assert torch.equal(*kept)


def test_groups_that_are_not_finite_leave_nothing(device: torch.device) -> None:
    x = torch.randn(2, 256)
    x[0, 70], x[1, 200] = float("nan"), float("-inf")
    out, residual = check(x, 256, STORED, TARGET, residual_rows(STORED, 2, 256), device)
    sent, kept = decode(TARGET, out, 256), decode(STORED, residual, 256)
    broken = torch.zeros(2, 4, 64, dtype=torch.bool)
    broken[0, 1] = broken[1, 3] = True
    broken = broken.view(2, 256)
    assert sent[broken].isnan().all()
    assert (kept[broken] == 0).all()
    assert sent[~broken].isfinite().all()
    assert (kept[~broken] != 0).any()


@pytest.mark.parametrize(
    ("stored", "target", "message"),
    [
        (STORED, replace(TARGET, group_size=128), "group_size is 64 of the residual and 128"),
        (replace(STORED, hadamard_size=32), TARGET, "hadamard_size is 32 of the residual and 0"),
        (STORED, replace(TARGET, symmetric=False), "not a symmetric integer format"),
        (replace(STORED, code="fp8_e4m3"), TARGET, "not a symmetric integer format"),
        (STORED, replace(TARGET, code="nf4"), "not a symmetric integer format"),
        (*[replace(s, group_size="row") for s in (STORED, TARGET)], "one scale per row"),
    ],
)
def test_formats_that_do_not_fit_are_refused(
    stored: CodecSpec, target: CodecSpec, message: str
) -> None:
    residual = torch.zeros(2, stored.nbytes(100), dtype=torch.uint8)
    out = torch.zeros(2, target.nbytes(100), dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        encode_with_residual(target, torch.randn(2, 100), 100, stored, residual, out=out)


def test_shapes_that_do_not_fit_are_refused() -> None:
    residual = torch.zeros(2, STORED.nbytes(100), dtype=torch.uint8)
    out = torch.zeros(2, TARGET.nbytes(100), dtype=torch.uint8)
    with pytest.raises(ValueError, match="residual_RB has shape"):
        encode_with_residual(TARGET, torch.randn(2, 100), 100, STORED, residual[:1], out=out)
    with pytest.raises(ValueError, match="values has shape"):
        encode_with_residual(TARGET, torch.randn(2, 99), 100, STORED, residual, out=out)
    with pytest.raises(ValueError, match=r"values has 1 dimensions.*view\(1, -1\)"):
        encode_with_residual(TARGET, torch.randn(100), 100, STORED, residual, out=out)
    with pytest.raises(ValueError, match="values is .* with 2 dimensions"):
        encode_with_residual(TARGET, residual, 100, STORED, residual, out=out)


@pytest.mark.parametrize("device_name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_operator(device_name: str) -> None:
    x = torch.randn(2, 100, device=device_name)
    residual = torch.zeros(2, STORED.nbytes(100), dtype=torch.uint8, device=device_name)
    out = torch.zeros(2, TARGET.nbytes(100), dtype=torch.uint8, device=device_name)
    formats = str(STORED.message_format), str(TARGET.message_format)
    torch.library.opcheck(feedback_out, (x, 100, *formats, 0, residual, out))
