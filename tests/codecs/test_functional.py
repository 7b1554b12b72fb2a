"""The functions of lq_lightning.codecs: outputs, sums, tracing, messages for bad input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lq_testing.codec_data import codec_specs

from lq_lightning.codecs import (
    CodecSpec,
    accumulate,
    decode,
    decode_reduce,
    decode_reduce_encode,
    encode,
    flatten_rows,
)
from lq_lightning.codecs import spec as codecs

PLAIN = CodecSpec(code="int4", group_size=64)
ROW = CodecSpec(code="int4", group_size="row")
ZEROS = torch.zeros(2, 4)
ROWS = torch.zeros(2, 32, dtype=torch.uint8)  # of as many bytes as their messages
SMOOTH = CodecSpec(code="int8", group_size=128, hadamard_size=32, rounding="stochastic")


@settings(max_examples=60, deadline=None)
@given(codec_specs(), st.integers(1, 4), st.integers(0, 700))
def test_reduce_is_the_sum_in_order(spec: CodecSpec, messages: int, numel: int) -> None:
    x = torch.randn(messages, 2, numel)
    buf = torch.stack([encode(spec, part, seed=index) for index, part in enumerate(x)])
    actual = decode_reduce(spec, buf, numel, scale=0.25)
    parts = torch.stack([decode(spec, rows, numel) for rows in buf])
    if spec.hadamard_size == 0:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        assert torch.equal(actual, total * 0.25)
    else:
        # |x| < 6, so sums of 128 * 4 terms err by less than 512 * 6 * 2**-24 / sqrt(128) each
        assert torch.allclose(actual, parts.sum(0) * 0.25, rtol=0, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(codec_specs(), codec_specs(), st.integers(1, 700))
def test_reduce_encode_is_both_steps(spec_in: CodecSpec, spec_out: CodecSpec, numel: int) -> None:
    buf = encode(spec_in, torch.randn(3, numel), seed=1)[:, None]
    fused = decode_reduce_encode(spec_in, buf, numel, spec_out, seed=2)
    assert fused.shape == (1, spec_out.nbytes(numel))
    if spec_in.hadamard_size == 0 or spec_in.hadamard_size != spec_out.hadamard_size:
        two_steps = encode(spec_out, decode_reduce(spec_in, buf, numel), seed=2)
        assert torch.equal(fused, two_steps)


@settings(max_examples=60, deadline=None)
@given(codec_specs(), st.integers(1, 700))
def test_accumulate_is_all_three_steps(spec: CodecSpec, numel: int) -> None:
    x, added = torch.randn(2, 2, numel)
    buf = encode(spec, x, seed=1)
    total = added.clone()
    decode(spec, buf, numel, out=total, add=True)
    assert accumulate(spec, buf, added, seed=2) is buf
    if spec.hadamard_size == 0 or spec.group_size == "row":
        assert torch.equal(buf, encode(spec, total, seed=2))
    elif numel > 256:  # rounded in the transformed domain, which it does not leave
        two_steps = decode(spec, encode(spec, total, seed=2), numel)
        error = (decode(spec, buf, numel) - total).norm()
        assert error < 2 * (two_steps - total).norm() + 1e-5 * total.norm()


def test_sums_of_many_values_stay_close_and_unbiased() -> None:
    spec = CodecSpec(code="int8", group_size=32)
    terms = torch.randn(64, 1, 1 << 14)
    buf = encode(spec, terms[0])
    for term in terms[1:]:
        accumulate(spec, buf, term)
    stored, exact = decode(spec, buf, 1 << 14), terms.sum(0)
    assert (stored - exact).norm() / exact.norm() < 0.032
    assert abs((stored * exact).sum() / exact.square().sum() - 1) < 1e-3
    terms[0, 0, 40] = float("nan")
    accumulate(spec, buf, terms[0])
    accumulate(spec, buf, terms[1])
    assert decode(spec, buf, 1 << 14).isnan().nonzero()[:, 1].tolist() == list(range(32, 64))


def test_shared_domain_error_is_that_of_one_more_encoding() -> None:
    """Staying in the transformed domain errs as much as leaving and entering it again."""
    four = CodecSpec(code="int4", group_size=128, hadamard_size=32)
    x = torch.randn(4, 1, 8192)
    buf = torch.stack([encode(SMOOTH, part, seed=index) for index, part in enumerate(x)])
    exact = decode_reduce(SMOOTH, buf, 8192)
    fused = decode(four, decode_reduce_encode(SMOOTH, buf, 8192, four), 8192)
    two_steps = decode(four, encode(four, exact), 8192)
    errors = [(value - exact).norm() for value in (fused, two_steps)]
    assert 0.95 < errors[0] / errors[1] < 1.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_add_is_one_fp32_addition(dtype: torch.dtype) -> None:
    message = encode(PLAIN, torch.randn(2, 1000))
    base = torch.randn(2, 1000).to(dtype)
    out = base.clone()
    assert decode(PLAIN, message, 1000, out=out, add=True) is out
    values = decode(PLAIN, message, 1000)
    assert torch.equal(out, (base.float() + values).to(dtype))
    decode(PLAIN, message, 1000, scale=-0.5, out=out.copy_(base), add=True)
    assert torch.equal(out, (base.float() - 0.5 * values).to(dtype))


def test_flat_rows_save_padding_and_keep_groups() -> None:
    spec = CodecSpec(
        code="int4", group_size=64, symmetric=False, hadamard_size=32, scale_dtype="bfloat16"
    )
    x = torch.randn(16, 1600)
    flat = encode(spec, flatten_rows(spec, x))
    assert 8 * flat.numel() / x.numel() == 4.5
    assert 8 * encode(spec, x).numel() / x.numel() == 4.64
    out = torch.empty_like(x)
    decode(spec, flat, x.numel(), out=flatten_rows(spec, out))
    assert torch.equal(out, decode(spec, encode(spec, x), 1600))
    per_tensor = CodecSpec(code="int8", group_size="row")
    message = encode(per_tensor, flatten_rows(per_tensor, x))
    assert message.numel() == x.numel() + 16
    with pytest.raises(ValueError, match=r"rows of 1600 values, not a multiple of 128"):
        flatten_rows(SMOOTH, x)
    with pytest.raises(ValueError, match=r"expected \[R, N\], contiguous"):
        flatten_rows(spec, x.t())


def test_difference_is_taken_in_fp32() -> None:
    x = torch.randn(1, 640)
    reference = x.bfloat16()
    expected = encode(PLAIN, x - reference.float())
    assert torch.equal(encode(PLAIN, x, reference=reference), expected)


def test_outputs_are_written_in_place() -> None:
    x = torch.randn(3, 200)
    out = torch.empty(3, PLAIN.nbytes(200), dtype=torch.uint8)
    assert encode(PLAIN, x, out=out) is out
    assert torch.equal(out, encode(PLAIN, x))
    values = torch.empty(3, 200)
    assert decode_reduce(PLAIN, out[None], 200, out=values) is values
    assert torch.equal(values, decode(PLAIN, out, 200))
    again = torch.empty_like(out)
    assert decode_reduce_encode(PLAIN, out[None], 200, PLAIN, out=again) is again


def test_blocks_of_rows_are_their_rows() -> None:
    x = torch.randn(2, 3, 100)
    out = torch.zeros(2, 3, PLAIN.nbytes(100), dtype=torch.uint8)
    assert encode(PLAIN, x, out=out) is out
    rows = encode(PLAIN, x.flatten(0, 1))
    assert torch.equal(out.flatten(0, 1), rows)
    assert torch.equal(
        decode(PLAIN, out, 100, out=torch.zeros_like(x)), decode(PLAIN, rows, 100).view_as(x)
    )


def test_gradients_stay_out() -> None:
    x = torch.randn(1, 100, requires_grad=True)
    out = decode(PLAIN, encode(PLAIN, x), 100)
    assert not out.requires_grad
    decode(PLAIN, encode(PLAIN, x), 100, out=x)
    assert torch.equal(x, out)


@pytest.mark.parametrize("dynamic", [False, True])
def test_traces_without_a_break(dynamic: bool) -> None:
    def step(x: torch.Tensor, replica: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        message = encode(PLAIN, x, reference=replica)
        decode(PLAIN, message, x.shape[1], out=replica, add=True)
        eight = encode(SMOOTH, x * 2, seed=5)
        total = decode_reduce(SMOOTH, eight[:, None], x.shape[1], scale=0.5)
        four = decode_reduce_encode(SMOOTH, eight[:, None], x.shape[1], PLAIN)
        return total + 1, four

    traced = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for numel in (300, 512):
        x = torch.randn(2, numel)
        replicas = torch.zeros(2, numel), torch.zeros(2, numel)
        expected, actual = step(x, replicas[0]), traced(x, replicas[1])
        assert all(torch.equal(*pair) for pair in zip(expected, actual, strict=True))
        assert torch.equal(*replicas)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: encode(PLAIN, ZEROS[0]), r"1 dimensions.*view\(1, -1"),
        (lambda: encode(PLAIN, ZEROS.double()), "float64; allowed"),
        (lambda: encode(PLAIN, ZEROS, reference=ZEROS[:, 1:]), r"\(2, 3\); expected \(2, 4\)"),
        (lambda: encode(PLAIN, ZEROS, out=ROWS[:, 1:]), r"\(2, 31\); expected \(2, 32\)"),
        (lambda: encode(PLAIN, ZEROS, reference=ZEROS.to("meta")), "is on meta; expected cpu"),
        (lambda: decode(PLAIN, ROWS.float(), 4), "buf_RB is torch.float32 with 2 dim"),
        (lambda: decode(PLAIN, ROWS.repeat(1, 2), 4), "rows of 64 bytes, but this format and"),
        (lambda: decode(PLAIN, ROWS, 4, add=True), "add=True needs out="),
        (lambda: decode(PLAIN, ROWS, 4, dtype=torch.int32), "dtype torch.int32; allowed"),
        (lambda: decode(PLAIN, ROWS[None], 4), r"3 dimensions; expected uint8 \[R, B\]"),
        (lambda: decode_reduce(PLAIN, ROWS[None][:0], 4), "no messages to sum"),
        (lambda: decode_reduce(PLAIN, ROWS, 4), r"expected uint8 \[K, R, B\]"),
        (lambda: encode(PLAIN, ZEROS[None]), "3 dimensions; expected 2, or 3 with `out`"),
        (lambda: encode(PLAIN, ZEROS, skip=0), "skip=0 needs `out`"),
        (lambda: encode(PLAIN, ZEROS, skip=2, out=ROWS[:1]), "one of the 2 rows"),
        (lambda: encode(PLAIN, ZEROS, skip=0, out=ROWS), r"\(2, 32\); expected \(1, 32\)"),
        (
            lambda: encode(PLAIN, ZEROS, reference=ZEROS, skip=0, out=ROWS[:1]),
            "no effect on `reference`",
        ),
        (lambda: decode_reduce_encode(PLAIN, ROWS[None], 4, PLAIN, skip=1), "skip=1 needs `out`"),
        (
            lambda: decode_reduce_encode(PLAIN, ROWS[None], 4, PLAIN, skip=-1, out=ROWS[:1]),
            "one of the 2 rows, from 0",
        ),
        (lambda: accumulate(PLAIN, ROWS, ZEROS[0]), "1 dimensions; expected 2"),
        (lambda: accumulate(PLAIN, ROWS[:1], ZEROS), r"\(1, 32\); expected \(2, 32\)"),
        (lambda: accumulate(PLAIN, ROWS, ZEROS.long()), "int64; allowed"),
        (lambda: accumulate(PLAIN, ROWS[:1].expand(2, -1), ZEROS), "must not share memory"),
        (lambda: accumulate(ROW, ROWS, ZEROS.t().contiguous().t()), "x_RN has stride 2"),
    ],
)
def test_bad_input_is_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("name", ["quantize", "dequantize", "requantize"])
def test_a_repeated_call_gets_what_the_operator_would(
    monkeypatch: pytest.MonkeyPatch, name: str, repeated: bool
) -> None:
    """On a GPU, where a call like an earlier one stands for checks and operator."""
    x, codes = torch.randn(2, 300), torch.zeros(2, SMOOTH.nbytes(300), dtype=torch.uint8)
    out = torch.full_like(x if name == "dequantize" else codes, 7)
    operator, asked = getattr(codecs, f"{name}_out"), []

    def answer(*args: object) -> bool:
        asked.append([a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args])
        return repeated

    monkeypatch.setattr(codecs, "_may_relaunch", lambda tensor: True)
    monkeypatch.setattr(codecs, f"relaunch_{name}", answer)
    monkeypatch.setattr(codecs, f"{name}_out", lambda *args: answer(*args) or operator(*args))
    result = {
        "quantize": lambda: encode(SMOOTH, x, seed=5, out=out),
        "dequantize": lambda: decode(SMOOTH, codes, 300, scale=0.5, out=out),
        "requantize": lambda: decode_reduce_encode(
            SMOOTH, codes[None], 300, SMOOTH, seed=5, out=out
        ),
    }
    assert result[name]() is out
    assert bool((out == 7).all()) == repeated
    assert asked == asked[:1] * (1 if repeated else 2)


@pytest.mark.gpu
@settings(max_examples=25, deadline=None)
@given(codec_specs(), st.integers(0, 20_000))
def test_gpu_equals_cpu(spec: CodecSpec, numel: int) -> None:
    x = torch.randn(2, numel)
    message = encode(spec, x, seed=3)
    assert torch.equal(encode(spec, x.cuda(), seed=3).cpu(), message)
    values = decode(spec, message, numel)
    assert torch.equal(decode(spec, message.cuda(), numel).cpu(), values)
