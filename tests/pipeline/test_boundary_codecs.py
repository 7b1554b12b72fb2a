"""Codecs of stage boundaries: names, sizes, round trips and errors that come before training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lq_lightning.codecs import CodecSpec
from lq_lightning.pipeline.aq_sgd import AQSGDQuantization
from lq_lightning.pipeline.boundary import make_boundary_codec
from lq_lightning.pipeline.message import BoundaryCodec, Message, TAHQuantization

FORWARD = Message(boundary=0, backward=False, microbatch=0, training=False, seed=0)
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
# Relative error of normal values, at most.
ERRORS = {
    "none": 0.0,
    "bf16": 0.002,
    "fp8": 0.026,
    "int2": 0.46,
    "int3": 0.2,
    "int4": 0.092,
    "int5": 0.045,
    "int6": 0.022,
    "int7": 0.011,
    "int8": 0.006,
    "tah": 0.12,
    "tah5": 0.045,
    "aq_sgd": 0.0,  # in evaluation
}
NAMES = tuple(ERRORS)  # all but "amaq", which has widths: test_boundary_widths.py
OF_GRADIENTS = tuple(name for name in NAMES if name not in ("tah", "tah5", "aq_sgd"))


def round_trip(codec: BoundaryCodec, x: Tensor, message: Message = FORWARD) -> Tensor:
    codec.check(x.shape, x.dtype)
    payload = codec.encode(x, message)
    assert payload.dtype == torch.uint8
    assert payload.shape == (codec.nbytes(x.shape, x.dtype, message),)
    assert payload.is_contiguous()
    decoded = codec.decode(payload, x.shape, x.dtype, message)
    assert decoded.shape == x.shape
    assert decoded.dtype == x.dtype
    kept = decoded.clone()
    payload.fill_(0xFF)
    assert torch.equal(decoded.isnan(), kept.isnan())  # not a view of the payload
    return decoded


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_round_trip(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 20, 192).to(dtype)
    decoded = round_trip(make_boundary_codec(name), x)
    error = float((decoded.float() - x.float()).norm() / x.float().norm())
    assert error <= ERRORS[name] + 0.001
    assert error >= ERRORS[name] / 2 or name == "bf16"
    # neither the input nor its strides matter
    before = x.clone()
    for view in (x.mT.contiguous().mT, x.expand(2, 20, 192)[:, :, :], x.clone().requires_grad_()):
        again = round_trip(make_boundary_codec(name), view)
        assert torch.equal(again, decoded)
        assert not again.requires_grad
    assert torch.equal(x, before)


@given(
    st.sampled_from(NAMES),
    st.booleans(),
    st.integers(0, 3),
    st.integers(0, 9),
    st.integers(1, 4),
    st.sampled_from(FLOATS),
)
def test_sizes(
    name: str, backward: bool, batch: int, tokens: int, tiles: int, dtype: torch.dtype
) -> None:
    codec = make_boundary_codec(name, backward=backward and name in OF_GRADIENTS)
    x = torch.randn(batch, tokens, 64 * tiles).to(dtype)
    decoded = round_trip(codec, x)
    if name == "none":
        assert torch.equal(decoded, x)
    bits = codec.bits_per_value(x.shape, dtype) if x.numel() else 0
    if x.numel() and name != "aq_sgd":
        assert bits == 8 * codec.nbytes(x.shape, dtype, FORWARD) / x.numel()


@pytest.mark.parametrize(
    ("name", "backward", "bits"),
    [
        ("none", False, 32.0),
        ("bf16", False, 16.0),
        # 1/64 for the mean of 1024 tokens
        ("fp8", False, 8.265625),
        ("int4", False, 4.515625),
        ("int5", True, 5.5),
        ("int5", False, 5.515625),
        ("tah", False, 4.42640625),
        ("tah5", False, 5.625),
        ("aq_sgd", False, 4.5),
    ],
)
def test_bits_with_1600_channels(name: str, backward: bool, bits: float) -> None:
    codec = make_boundary_codec(name, backward)
    assert codec.bits_per_value((1, 1024, 1600), torch.float32) == bits


@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_gradients_far_below_half_precision(name: str) -> None:
    x = torch.randn(1, 10, 64) * 1e-12
    decoded = round_trip(make_boundary_codec(name, backward=True), x)
    assert float((decoded - x).norm() / x.norm()) < 1.5 * ERRORS[name] + 0.01


@pytest.mark.parametrize("code", ["int2", "int4", "fp8"])
def test_gradients_are_right_on_average(code: str) -> None:
    """Values below half a step, with larger ones in each tile, are all lost to nearest rounding.

    Noise differs by seed, boundary and micro-batch.
    """
    small = 1e-6 if code == "fp8" else 1e-3
    x = torch.full((1, 4, 128), small)
    x[..., ::64], x[..., 1::64] = -1.0, 1.0
    codec = make_boundary_codec(code, backward=True)
    seen = [
        round_trip(codec, x, Message(boundary=b, backward=True, microbatch=m, seed=s))
        for b in range(2)
        for m in range(2)
        for s in range(300)
    ]
    changes = (torch.stack(seen) - x)[:, x == small]
    assert float(changes.mean()) == pytest.approx(0, abs=4 * float(changes.std()) / 545)
    assert float(changes.std()) > small
    changed = [not torch.equal(seen[0], seen[n]) for n in (1, 300, 600)]
    assert all(changed)
    same = Message(boundary=0, backward=True, microbatch=0, seed=0)
    assert torch.equal(round_trip(codec, x, same), seen[0])


@pytest.mark.parametrize("name", ["fp8", "int2", "int4", "tah", "tah5"])
def test_what_all_tokens_share_adds_no_error(name: str) -> None:
    spread = torch.randn(2, 50, 192)
    shared = torch.randn(192) * 30
    codec = make_boundary_codec(name)
    broken = spread + shared
    broken[1, 49] = float("nan")  # nor does a token that is not finite
    error = (round_trip(codec, broken) - spread - shared)[:, :49].norm() / spread.norm()
    assert float(error) < ERRORS[name] + 0.02
    one = round_trip(codec, shared.view(1, 1, 192)).flatten()
    assert float((one - shared).norm() / shared.norm()) < 0.002


@pytest.mark.parametrize("name", ["fp8", "int4", "tah", "tah5"])
def test_a_massive_token_adds_no_error_to_others(name: str) -> None:
    x = torch.randn(1, 16, 192)
    x[0, 0, ::25] = 1000.0
    x[0, 1] = 0.0
    others = (round_trip(make_boundary_codec(name), x) - x)[0, 2:]
    assert float(others.norm() / x[0, 2:].norm()) < ERRORS[name] + 0.02


@pytest.mark.parametrize("name", ["fp8", "int4", "tah", "tah5"])
def test_large_values_of_half_precision_stay_finite(name: str) -> None:
    x = torch.randn(1, 16, 192).half()
    x[0, 3, 5], x[0, 4, 7] = 65504.0, -65504.0
    x[0, 5, 70] = float("inf")
    decoded = round_trip(make_boundary_codec(name), x)
    assert decoded[0, 3:5].isfinite().all()
    assert not decoded[0, 5, 64:128].isfinite().any()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_survives(name: str) -> None:
    x = torch.randn(1, 10, 192)
    x[0, 3, 70] = float("nan")
    x[0, 5, 0] = float("inf")
    decoded = round_trip(make_boundary_codec(name), x)
    assert not decoded[0, 3, 64:128].isfinite().all()
    assert not decoded[0, 5, :64].isfinite().all()
    others = torch.ones(10, 3, dtype=torch.bool)
    others[3, 1] = others[5, 0] = False
    assert decoded.view(10, 3, 64)[others].isfinite().all()


def test_specifications() -> None:
    x = torch.randn(1, 10, 64)
    spec = CodecSpec(code="int4", group_size=16, hadamard_size=16)
    codec = make_boundary_codec(spec)
    assert codec.name == "int4"
    assert codec.nbytes(x.shape, x.dtype, FORWARD) == spec.nbytes(640)
    config = TAHQuantization(tile_size=16, int4_share=1.0)
    bits = make_boundary_codec(config).bits_per_value(x.shape, x.dtype)
    assert bits == 8 * (320 + 80 + 80 + 16 + 32) / 640
    assert not torch.equal(round_trip(codec, x), round_trip(make_boundary_codec(config), x))
    noisy = CodecSpec(code="int4", group_size=16, rounding="stochastic")
    for backward in (False, True):
        assert make_boundary_codec(noisy, backward).options == repr(noisy)


@pytest.mark.parametrize("share", [0.8, 0.7, 0.9, 1 / 3])
def test_shares_are_exact(share: float) -> None:
    """1 - 0.8 is 0.19999999999999996 in floats, and 10 tokens would have one INT3 token."""
    fraction = TAHQuantization(int4_share=share).kernel_format.int3_share
    assert abs(float(fraction) - (1 - share)) < 1e-12
    low = TAHQuantization(int4_share=share).kernel_format.layout(1, 10, 64).low_tokens
    assert low == {0.8: 2, 0.7: 3, 0.9: 1, 1 / 3: 6}[share]


def test_uniform_bits_of_tah() -> None:
    x = torch.randn(1, 10, 192)
    for bits, share in ((3, 0), (4, 1), (4, 1.0)):
        uniform = TAHQuantization(bits=bits).kernel_format
        assert TAHQuantization(int4_share=share).kernel_format == uniform
    assert TAHQuantization().kernel_format == TAHQuantization(int4_share=0.8).kernel_format
    uniform = TAHQuantization(bits=5)
    whole = round_trip(make_boundary_codec(uniform), x)
    # nothing is ranked, so nothing needs tokens
    flat = round_trip(make_boundary_codec(uniform), x[0, 3])
    assert torch.equal(flat, whole[0, 3])
    assert make_boundary_codec("tah5").options == f"centered {uniform!r}"
    with pytest.raises(ValueError, match=r"bits=5, int4_share=0.8.*mixes INT3 and INT4.*bits=None"):
        TAHQuantization(bits=5, int4_share=0.8)


@pytest.mark.parametrize("name", ["fp8", "int4", "tah", "tah5", "aq_sgd"])
def test_checks_before_training(name: str) -> None:
    codec = make_boundary_codec(name)
    smallest = "8 or 16" if name.startswith("tah") else "16"
    message = rf"tiles of 64 channels.*have 96 .*a tile of {smallest} or 32 \(`\w+\.\w+`\)"
    with pytest.raises(ValueError, match=message):
        codec.check((1, 4, 96), torch.float32)
    with pytest.raises(ValueError, match=r"have 97 .*not divisible. Choose the codec 'bf16'"):
        codec.check((1, 4, 97), torch.float32)
    with pytest.raises(ValueError, match=r"cannot encode torch.float64; allowed: float32"):
        codec.check((1, 4, 64), torch.float64)
    with pytest.raises(ValueError, match=r"cannot encode torch.int64"):
        codec.encode(torch.zeros(1, 4, 64, dtype=torch.int64), FORWARD)


def test_other_checks() -> None:
    with pytest.raises(ValueError, match=r"'bf16' rounds floating-point numbers.*int64"):
        make_boundary_codec("bf16").check((3,), torch.int64)
    make_boundary_codec("none").check((3,), torch.int64)
    assert round_trip(make_boundary_codec("none"), torch.arange(3)).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"ranks the tokens of a sequence.*\(64,\)"):
        make_boundary_codec("tah").check((64,), torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_payloads_of_another_size_are_refused(name: str) -> None:
    codec = make_boundary_codec(name)
    payload = codec.encode(torch.randn(1, 10, 64), FORWARD)
    with pytest.raises(ValueError, match=r"was given a payload of torch.uint8 \(\d+,\); expected"):
        codec.decode(payload, (1, 11, 64), torch.float32, FORWARD)
    with pytest.raises(ValueError, match=r"was given a payload of torch.int8"):
        codec.decode(payload.view(torch.int8), (1, 10, 64), torch.float32, FORWARD)


@pytest.mark.parametrize("codec", ["int9", "TAH", 4, None, CodecSpec, True])
def test_unknown_codecs(codec: Any) -> None:
    with pytest.raises(ValueError, match=r"make_boundary_codec\(codec=.*'tah'"):
        make_boundary_codec(codec)


def test_codecs_that_do_not_suit_boundaries() -> None:
    unseeded = Message(boundary=0, backward=True, microbatch=0)
    with pytest.raises(ValueError, match="seed=None with rounding='stochastic'"):
        make_boundary_codec("int4", backward=True).encode(torch.zeros(1, 64), unseeded)
    with pytest.raises(ValueError, match="needs scales of its own"):
        make_boundary_codec(CodecSpec(code="int4", group_size="row"))
    with pytest.raises(ValueError, match="same direction.*Choose rounding='stochastic', and"):
        make_boundary_codec(CodecSpec(code="int4", group_size=64), backward=True)
    for codec in ("aq_sgd", AQSGDQuantization(), "tah5", TAHQuantization(), "amaq"):
        with pytest.raises(ValueError, match="choose one of 'none', .* or give a `CodecSpec`"):
            make_boundary_codec(codec, backward=True)


@pytest.mark.parametrize(
    "options",
    [
        {"tile_size": 48},
        {"tile_size": 4},
        {"bits": 1},
        {"bits": 9},
        {"bits": True},
        {"int4_share": 1.5},
        {"int4_share": float("nan")},
        {"int4_share": True},
        {"hadamard": 1},
    ],
)
def test_bad_options_of_tah(options: dict[str, Any]) -> None:
    field = next(iter(options))
    with pytest.raises(ValueError, match=rf"TAHQuantization\({field}="):
        TAHQuantization(**options)
