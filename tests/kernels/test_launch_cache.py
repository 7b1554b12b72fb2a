"""Launches that are repeated: what they may reuse, and operators called with unequal arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lq_testing.interpreter import skip_old_interpreter
from torch import Tensor

import lq_lightning
from lq_lightning.kernels import activation, float8, norm
from lq_lightning.kernels.message import (
    accumulate_,
    dequantize_out,
    launch_cache,
    operators,
    parse_format,
    quantize_out,
    requantize_out,
)

FORMAT = "int4/128/asymmetric/0/nearest/bfloat16"
E4M3 = torch.float8_e4m3fn


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says it were on a GPU, for operators in Triton's interpreter."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    operators.clear_cached_calls()
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    yield
    operators.clear_cached_calls()


class FakeKernel:
    """Stands for a function of ``triton.jit``: notes every launch and by which way it came."""

    arg_names = ("first", "second", "size", "scale", "seed", "BLOCK", "FLAG")

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        def run(*args: Any, **constants: Any) -> object:
            self.launches.append(("triton", grid, args, constants))
            return FakeCompiled(self)

        return run


class FakeCompiled:
    def __init__(self, kernel: FakeKernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.kernel.launches.append(("direct", grid, args))


def made_launch() -> tuple[launch_cache.Launch, FakeKernel]:
    kernel = FakeKernel()
    return launch_cache.Launch(
        kernel, (3,), (64, 0.5), {"FLAG": True, "BLOCK": 128, "num_warps": 4}
    ), kernel


def test_second_launch_passes_addresses_and_all_arguments_in_order() -> None:
    launch, kernel = made_launch()
    first, second = torch.zeros(64), torch.zeros(64)
    launch(first, second, words=(7,))
    launch(second, first, words=(8,))
    (_, grid, args, constants), direct = kernel.launches
    assert (grid, args[2:]) == ((3,), (64, 0.5, 7))
    assert constants == {"FLAG": True, "BLOCK": 128, "num_warps": 4}
    addresses = (second.data_ptr(), first.data_ptr())
    assert direct == ("direct", (3, 1, 1), (*addresses, 64, 0.5, 8, 128, True))


def test_a_pointer_that_is_not_used_is_the_first_one_or_null() -> None:
    launch, kernel = made_launch()
    first = torch.zeros(64)
    launch(first, None, words=(0,))
    launch(first, None, words=(0,))
    assert kernel.launches[0][2][1] is first
    assert kernel.launches[1][2][:2] == (first.data_ptr(), 0)


def test_elsewhere_than_on_nvidia_every_launch_goes_through_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch_cache, "_DIRECT", False)
    launch, kernel = made_launch()
    for _ in range(3):
        launch(torch.zeros(64), torch.zeros(64), words=(0,))
    assert [way for way, *_ in kernel.launches] == ["triton"] * 3


def test_facts_tell_apart_what_checks_and_choices_depend_on() -> None:
    base = torch.zeros(33, 48)
    tensors = [
        base[:32, :32],
        base[:32, 1:33],
        base[:32, :32].bfloat16(),
        base[:32, :32].contiguous(),
        base[:31, :32],
        base[:32, :31],
        base[:1, :32],
        base[:32, :1],
        base[:32, :32].t(),
        base.to("meta")[:32, :32].half(),
        None,
    ]
    assert len({operators.tensor_key(tensor) for tensor in tensors}) == len(tensors)
    assert operators.tensor_key(base[:32, :32]) == operators.tensor_key(
        torch.zeros(33, 48)[:32, :32]
    )
    if torch.cuda.is_available():
        assert operators.tensor_key(base) != operators.tensor_key(base.cuda())


def test_calls_that_never_come_again_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "MAX_CALLS", 3)
    for key in range(7):
        operators.cache_call(key, [], launch_cache.launch_nothing)
    assert [key for key in range(7) if operators.find_call(key)] == [6]


# A stand-in for the driver of a GPU: kernels are compiled, launches are printed. Of the package
# only kernels are imported; Lightning takes seconds.
DRIVER = (
    f"""
import sys, types
package = sys.modules["lq_lightning"] = types.ModuleType("lq_lightning")
package.__path__ = {list(lq_lightning.__path__)}
"""
    + """
import torch, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from lq_lightning.kernels.message import launch_cache

class Utils:
    load_binary = lambda self, *_: (1, 1, 32, 0, 1024)
    unload_module = lambda self, *_: None
    get_device_properties = lambda self, _: {"max_shared_mem": 232448}

class Launcher:
    def __init__(self, source, metadata):
        pass
    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *args):
        launches.append(((x, y, z), args))

class Driver:
    utils, launcher_cls = Utils(), Launcher
    get_current_device = lambda self: 0
    get_current_stream = lambda self, _: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)

@triton.jit(do_not_specialize=["scale"])
def kernel(x_ptr, y_ptr, unused_ptr, size, one, scale, BLOCK: tl.constexpr, FLAG: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if FLAG:
        tl.store(y_ptr + at, tl.load(x_ptr + at, at < size) * scale + one)

driver.set_active(Driver())
launches, entered = [], []
constants = {"FLAG": True, "BLOCK": 64, "num_warps": 1}
launch = launch_cache.Launch(kernel, (5, 2), (16, 1, 0.5), constants)
x, y = torch.zeros(64), torch.zeros(64)
launch(x, y, None)
run, kernel.run = kernel.run, None
triton.knobs.runtime.launch_enter_hook.add(entered.append)
launch(y, x, None)
kernel.run = run
first, second = launches
assert first == ((5, 2, 1), (x, y, x, 16, 1, 0.5, 64, True)), first
assert second == ((5, 2, 1), (y.data_ptr(), x.data_ptr(), 0, 16, 1, 0.5, 64, True)), second
"""
)


def test_compiled_kernels_take_what_a_repeated_launch_gives_them(tmp_path: Path) -> None:
    """If this fails, the installed Triton has changed what a repeated launch relies on."""
    path = tmp_path / "program.py"  # Triton reads the source of kernels
    path.write_text(DRIVER)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def of_rows(rows: int, numel: int, dtype: torch.dtype, offset: int, gap: int) -> Tensor:
    """``[rows, numel]`` at an offset into memory, rows ``numel + gap`` apart."""
    flat = torch.randn(offset + rows * (numel + gap)).to(dtype)
    return flat[offset:].view(rows, numel + gap)[:, :numel]


# Rows, columns, dtype, offset and gap in elements: aligned, misaligned, aligned again; one row;
# strides of 16 bytes and others; odd sizes; one value; nothing; and the first ones once more.
BFLOAT, FLOAT = torch.bfloat16, torch.float32
ALIGNED, MISALIGNED = (32, 256, BFLOAT, 0, 0), (32, 256, BFLOAT, 1, 0)
ODD = (5, 131, BFLOAT, 3, 2)
VARIANTS = [
    *(ALIGNED, MISALIGNED, ALIGNED),
    *((1, 256, BFLOAT, 0, 0), (32, 256, BFLOAT, 0, 8), (32, 256, BFLOAT, 0, 3)),
    *((17, 256, FLOAT, 0, 0), (5, 131, BFLOAT, 0, 0), ODD, (5, 128, FLOAT, 1, 0)),
    *((1, 1, FLOAT, 0, 0), (3, 1, FLOAT, 1, 1), (0, 256, BFLOAT, 0, 0)),
    *(MISALIGNED, ODD, ALIGNED),
]
Operations = Iterator[tuple[Any, tuple[Any, ...]]]


def norms(x: Tensor, other: Tensor) -> Operations:
    weight = torch.randn(x.shape[1])
    for kind, amax in (("rms", True), ("layer", False)):
        bias = weight if kind == "layer" else None
        args = (1e-5, kind, FORMAT, x.dtype, amax)
        _, rstd, message, _ = norm.norm_quantize(x, weight, bias, *args)
        yield norm.norm_quantize, (x, weight, bias, *args)
        rebuilt = (x.shape[1], kind, FORMAT)
        yield norm.norm_dequantize, (message, rstd, weight, bias, *rebuilt, x.dtype, x.dtype)
        yield norm.norm_backward, (message, rstd, x, weight, kind, FORMAT, x.dtype, amax)
        one = torch.ones(1)
        yield float8.norm_dequantize_float8, (message, rstd, None, bias, *rebuilt, one)


def activations(x: Tensor, other: Tensor) -> Operations:
    for up, amax in ((other, True), (None, False)):
        _, *messages, _ = activation.activation_quantize(x, up, "relu2", FORMAT, amax)
        yield activation.activation_quantize, (x, up, "relu2", FORMAT, amax)
        rebuilt = (*messages, *x.shape, "relu2", FORMAT)
        yield activation.activation_dequantize, (*rebuilt, x.dtype)
        yield activation.activation_backward, (*messages, x, "relu2", FORMAT, amax)
        yield float8.activation_dequantize_float8, (*rebuilt, torch.ones(1))


def casts(x: Tensor, other: Tensor) -> Operations:
    message = activation.activation_quantize(x, None, "relu", FORMAT, False)[1]
    yield float8.float8_cast, (x, torch.ones(1), True, False)
    yield float8.float8_quantize, (x, False, True)
    yield float8.float8_quantize, (x, True, True)
    yield float8.dequantize_float8, (message, *x.shape, FORMAT, torch.ones(1))


def accumulate_into(x: Tensor, format: str, seed: int, message: Tensor) -> None:
    accumulate_(message, x, format, seed)


def codecs(x: Tensor, other: Tensor) -> Operations:
    """Seeds of stochastic rounding are numbers in which equal calls may differ."""
    codes, sums = "int8/32/symmetric/0/nearest/float32", "int4/32/symmetric/0/stochastic/float32"
    numel = x.shape[1]
    message, encoded = (
        torch.zeros(len(x), parse_format(text).layout(numel).nbytes, dtype=torch.uint8)
        for text in (codes, sums)
    )
    quantize_out(x, None, codes, 0, message)
    both = message.expand(2, -1, -1).clone()
    last, sum_of = max(len(x) - 1, 0), (both, numel, codes, sums)
    for operator, args, outs, skip in (
        (quantize_out, (x, other, codes, 0), (message,), ()),
        (quantize_out, (x, None, sums, 1), (encoded,), ()),
        (quantize_out, (x, None, sums, 2), (encoded,), ()),
        (quantize_out, (x, None, sums, 2), (encoded[:last],), (0,)),
        (quantize_out, (x, None, sums, 2), (encoded[:last],), (last,)),
        (dequantize_out, (both, numel, codes, 0.5, True), (other,), ()),
        (dequantize_out, (both, numel, codes, 0.25, True), (other,), ()),
        (dequantize_out, (both, numel, codes, 0.25, False), (other,), ()),
        (requantize_out, (*sum_of, 3), (encoded,), ()),
        (requantize_out, (*sum_of, 4), (encoded,), ()),
        (requantize_out, (*sum_of, 4), (encoded[:last],), (0,)),
        (requantize_out, (*sum_of, 4), (encoded[:last],), (last,)),
        (accumulate_into, (other, codes, 0), (message,), ()),
        (accumulate_into, (x, sums, 5), (encoded,), ()),
        (accumulate_into, (x, sums, 6), (encoded,), ()),
    ):

        def written(
            *args: Any, operator: Any = operator, count: int = len(outs), skip: Any = skip
        ) -> list[Tensor]:
            made = [out.clone().as_subclass(type(out)) for out in args[-count:]]
            operator(*args[:-count], *made, *skip)
            return made

        yield written, (*args, *outs)


def on_gpu(value: Any, device: torch.device) -> Any:
    """A tensor in memory of the device, with the strides and the alignment that it had."""
    if not isinstance(value, Tensor):
        return value
    memory = value.as_strided((value.untyped_storage().nbytes() // value.itemsize,), (1,), 0)
    moved = (
        memory.clone().to(device).as_strided(value.shape, value.stride(), value.storage_offset())
    )
    return moved if moved.is_cuda else moved.as_subclass(OnGpu)


def check_operators(
    make: Callable[[Tensor, Tensor], Operations],
    variants: list[tuple[Any, ...]],
    device: torch.device,
) -> None:
    """Compare operators with the reference on one variant after the other, each twice."""
    for rows, numel, dtype, offset, gap in variants:
        x, other = (of_rows(rows, numel, dtype, start, gap) for start in (offset, 0))
        for operator, args in make(x, other):
            for _ in range(2):
                x.copy_(-x.flip(0))  # the second time by a repeated launch, of other values
                # the stand-in is on the CPU, too
                kept, operators._CALLS = operators._CALLS, {}
                expected = operator(*args)
                operators._CALLS = kept
                actual = operator(*[on_gpu(arg, device) for arg in args])
                for got, want in zip(listed(actual), listed(expected), strict=True):
                    check_equal(got.cpu().as_subclass(Tensor), want)
    assert operators._CALLS


def listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def check_equal(actual: Tensor, expected: Tensor) -> None:
    """Bits of messages; one code of FP8; values up to the order of sums over rows, rounded."""
    assert actual.dtype == expected.dtype
    if expected.dtype == torch.uint8:
        assert torch.equal(actual, expected)
    elif expected.dtype == E4M3:
        codes = [t.contiguous().view(torch.uint8).int() for t in (actual, expected)]
        torch.testing.assert_close(*codes, rtol=0, atol=1)
    else:
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


MAKERS = [norms, activations, casts, codecs]


@skip_old_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the next test does it on the GPU")
@pytest.mark.parametrize("make", MAKERS)
def test_repeated_calls_compute_what_the_reference_does(
    make: Callable[[Tensor, Tensor], Operations], device: torch.device
) -> None:
    check_operators(make, [(4, 128, BFLOAT, 0, 0), (3, 37, BFLOAT, 3, 2)], device)


@pytest.mark.gpu
@pytest.mark.parametrize("make", MAKERS)
def test_calls_with_all_kinds_of_arguments_one_after_the_other(
    make: Callable[[Tensor, Tensor], Operations], device: torch.device
) -> None:
    check_operators(make, VARIANTS, device)


@pytest.mark.gpu
def test_repeated_launches_go_to_the_stream_that_is_current_then(device: torch.device) -> None:
    x = torch.randn(4, 256, device=device)
    nbytes = parse_format(FORMAT).layout(256).nbytes
    message, expected = torch.zeros(2, 4, nbytes, dtype=torch.uint8, device=device)
    quantize_out(x, None, FORMAT, 0, message)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a launch on another stream would end the capture
        quantize_out(x, None, FORMAT, 0, message)
    x.mul_(-3)
    quantize_out(x, None, FORMAT, 0, expected)
    assert not torch.equal(message, expected)
    graph.replay()
    assert torch.equal(message, expected)


@pytest.mark.gpu(2)
def test_repeated_launches_go_to_the_device_of_their_tensors() -> None:
    x, messages = torch.randn(4, 256), []
    for index in (0, 1, 0, 1):
        on_device = x.to(f"cuda:{index}")
        nbytes = parse_format(FORMAT).layout(256).nbytes
        messages.append(on_device.new_zeros(4, nbytes, dtype=torch.uint8))
        quantize_out(on_device, None, FORMAT, 0, messages[-1])
    assert messages[0].any()
    assert all(torch.equal(message.cpu(), messages[0].cpu()) for message in messages)
