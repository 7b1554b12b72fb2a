"""Speed of quantized optimizer steps against torch's fused AdamW and other 8-bit optimizers.

First every rule and format is compared with the CPU reference, bit by bit, on random data; if one
differs, no speed is printed and the exit code is 1. Then whole calls of ``step()`` are timed
(median), on 486 million parameters: 8 matrices of 4096x4096, 4 of 14336x4096 and 2 of 4096x14336.
The GPU sleeps until ``step()`` has queued all its work, so that device events see the work alone;
the host's time until then is ``host_ms``. GB/s counts each byte of parameters, gradients and
states read once and written once.

    python benchmarks/optimizer.py --out outputs/optimizer.json
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from common import argument_parser, copy_bandwidth, needs_gpu, table, time_on_stream, write_report

from lq_lightning.optim import (
    OptimizerQuantization,
    QuantizedAdam,
    QuantizedAdamW,
    QuantizedLion,
    QuantizedMuon,
    QuantizedOptimizer,
    QuantizedSGD,
)

SHAPES = [(4096, 4096)] * 8 + [(14336, 4096)] * 4 + [(4096, 14336)] * 2
CHECKED_SHAPES = [(256, 1024), (67, 200), (3, 40, 32)]
SLEEP_S = 0.02  # of the GPU before a step; longer than any optimizer takes to queue its work
FORMATS = ("expanded_fp8", "dynamic8", "float32")


def config(name: str, **changes: Any) -> OptimizerQuantization:
    """One format for all states."""
    return OptimizerQuantization(first_moment=name, second_moment=name, min_numel=0, **changes)  # type: ignore[arg-type]


@cache  # drawn once for both devices: MKL's first `exp` may be off by 1e-4 on one of the threads
def _gradients(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    gradients = []
    for shape in CHECKED_SHAPES:
        values = torch.randn(shape, generator=generator)
        values *= torch.exp(3 * torch.randn(shape, generator=generator))
        values[0] = 0
        if step == 3:
            values.view(-1)[200], values.view(-1)[-1] = float("nan"), float("inf")
        gradients.append(values.to(dtype))
    return gradients


def _trained(
    make: Callable[[list[torch.Tensor]], QuantizedOptimizer], device: str, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Take three steps; return parameters and states on the CPU."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).to(dtype) for shape in CHECKED_SHAPES]
    params = [p.to(device).requires_grad_() for p in params]
    optimizer = make(params)
    for step in range(1, 4):
        for param, grad in zip(params, _gradients(step, dtype), strict=True):
            param.grad = grad.to(device, copy=True)
        optimizer.step()
    states = [v for p in params for k, v in sorted(optimizer.state[p].items()) if k != "step"]
    return [value.detach().cpu() for value in [*params, *states]]


def _bits(value: torch.Tensor) -> torch.Tensor:
    if value.is_floating_point():
        value = value.nan_to_num(nan=1.25)  # any NaN equals any NaN
    return value.contiguous().view(torch.uint8)


def differing() -> dict[str, int]:
    """Return by name of the case how many elements differ between GPU and CPU."""
    makers: dict[str, Callable[..., QuantizedOptimizer]] = {
        "adamw": lambda p, c: QuantizedAdamW(p, 1e-2, quantization=c),
        "adam": lambda p, c: QuantizedAdam(p, 1e-2, weight_decay=0.1, quantization=c),
        "lion": lambda p, c: QuantizedLion(p, 1e-3, weight_decay=0.1, quantization=c),
        "sgd": lambda p, c: QuantizedSGD(p, 1e-2, weight_decay=0.1, quantization=c),
        "nesterov": lambda p, c: QuantizedSGD(p, 1e-2, nesterov=True, quantization=c),
    }
    wrong = {}
    for rule, make in makers.items():
        for name in FORMATS:
            for dtype in (torch.float32, torch.bfloat16):
                if name == "float32" and dtype == torch.float32 and rule != "lion":
                    continue  # torch's own update
                chosen = config(name, stochastic_rounding=dtype == torch.bfloat16)
                results = [
                    _trained(lambda p, c=chosen, m=make: m(p, c), device, dtype)
                    for device in ("cpu", "cuda")
                ]
                count = sum(
                    int((_bits(a) != _bits(b)).sum()) for a, b in zip(*results, strict=True)
                )
                if count:
                    wrong[f"{rule} {name} {dtype}"] = count
    return wrong


def _sleep_cycles(seconds: float) -> int:
    """Return the argument with which ``torch.cuda._sleep`` takes that long."""
    probe = 20_000_000
    return int(probe * seconds / time_on_stream(lambda: torch.cuda._sleep(probe), 3))


def time_steps(optimizer: torch.optim.Optimizer, repeats: int) -> tuple[float, float | None]:
    """Return median times of ``step()`` in seconds: on the device, and on the host.

    The second is None where ``step()`` waits for the device, or takes longer than it sleeps; then
    the first includes time of the host.
    """
    cycles = _sleep_cycles(SLEEP_S)
    device_times, host_times, is_ahead = [], [], True
    for index in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        start.record()
        began = time.perf_counter()
        optimizer.step()
        host_time = time.perf_counter() - began
        still_asleep = not start.query()
        end.record()
        end.synchronize()
        if index >= 3:
            device_times.append(start.elapsed_time(end) / 1e3)
            host_times.append(host_time)
            is_ahead = is_ahead and still_asleep
    host = statistics.median(host_times) if is_ahead else None
    return statistics.median(device_times), host


def _state_nbytes(optimizer: torch.optim.Optimizer) -> int:
    total = 0
    for entry in optimizer.state.values():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and key != "step":
                # wrappers around codes, as other libraries have them, know their parts
                parts = [value]
                if hasattr(value, "__tensor_flatten__"):
                    parts = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
                total += sum(part.nbytes for part in parts)
    return total


def cases() -> dict[str, tuple[torch.dtype, Callable[[Sequence[torch.Tensor]], Any]]]:
    """Optimizers by name, with the dtype of their parameters."""
    fp32, bf16 = torch.float32, torch.bfloat16
    chosen: dict[str, tuple[torch.dtype, Callable[[Sequence[torch.Tensor]], Any]]] = {
        "torch AdamW fused": (fp32, lambda p: torch.optim.AdamW(p, fused=True)),
        "torch AdamW foreach": (fp32, lambda p: torch.optim.AdamW(p, foreach=True)),
    }
    for name in FORMATS[:2]:
        make = partial(QuantizedAdamW, quantization=config(name))
        chosen[f"QuantizedAdamW {name}"] = (fp32, make)
    expanded = config("expanded_fp8", stochastic_rounding=True)
    make = partial(QuantizedAdamW, quantization=expanded)
    chosen["QuantizedAdamW expanded_fp8 bf16 stochastic"] = (bf16, make)
    for kind in (QuantizedLion, QuantizedSGD):
        make = partial(kind, quantization=config("expanded_fp8"))
        chosen[f"{kind.__name__} expanded_fp8"] = (fp32, make)
    chosen["torch Muon"] = (fp32, torch.optim.Muon)  # products take most of its time
    chosen["QuantizedMuon expanded_fp8"] = (
        fp32,
        partial(QuantizedMuon, quantization=config("expanded_fp8")),
    )
    for module, name in (
        ("torchao.optim", "AdamWFp8"),
        ("torchao.optim", "AdamW8bit"),
        ("bitsandbytes.optim", "AdamW8bit"),
    ):
        try:
            found = getattr(importlib.import_module(module), name)
        except ImportError:
            continue
        chosen[f"{module.split('.')[0]} {name}"] = (fp32, found)
    return chosen


def measure(name: str, copy_rate: float, repeats: int) -> dict[str, Any]:
    """Time one optimizer."""
    dtype, make = cases()[name]
    params = [(0.02 * torch.randn(s, device="cuda")).to(dtype).requires_grad_() for s in SHAPES]
    for param in params:
        rows = torch.exp(torch.randn(param.shape[0], 1, device="cuda"))
        param.grad = (1e-3 * rows * torch.randn_like(param)).to(dtype)
    optimizer = make(params)
    seconds, host_seconds = time_steps(optimizer, repeats)
    numel = sum(p.numel() for p in params)
    states = _state_nbytes(optimizer)
    moved = numel * 3 * dtype.itemsize + 2 * states
    return {
        "optimizer": name,
        "numel": numel,
        "time_ms": seconds * 1e3,
        "time_includes_host": host_seconds is None,
        "host_ms": None if host_seconds is None else host_seconds * 1e3,
        "state_bytes_per_parameter": states / numel,
        "bytes_moved": moved,
        "gb_per_s": moved / seconds / 1e9,
        "share_of_copy": moved / seconds / copy_rate,
    }


def main() -> int:
    """Check, time, print and write; return the exit code."""
    parser = argument_parser(__doc__, "--out")
    parser.add_argument("--only", default="", help="time the optimizers whose name contains this")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    if needs_gpu():
        return 2
    torch.manual_seed(0)
    if wrong := differing():
        print("differs from the reference, so no speed is shown (bytes that differ):")
        print("\n".join(f"  {name}: {count}" for name, count in wrong.items()))
        return 1
    print("all rules and formats equal their reference bit for bit")
    copy_rate = copy_bandwidth()
    names = [name for name in cases() if arguments.only in name]
    results = [measure(name, copy_rate, arguments.repeats) for name in names]
    rows = [
        (
            r["optimizer"],
            f"{r['time_ms']:.2f}" + ("*" if r["time_includes_host"] else ""),
            "-" if r["host_ms"] is None else f"{r['host_ms']:.2f}",
            f"{r['state_bytes_per_parameter']:.3f}",
            f"{r['gb_per_s']:.0f}",
            f"{r['share_of_copy']:.0%}",
        )
        for r in results
    ]
    print(table(rows, ["optimizer", "ms", "host ms", "state B/param", "GB/s", "of copy"]))
    if any(r["time_includes_host"] for r in results):
        print(
            f"* step() did not return within the {SLEEP_S * 1e3:.0f} ms for which the GPU slept, "
            "most likely because it waits for the GPU; its time includes the host's"
        )
    report = {"copy_gb_per_s": copy_rate / 1e9, "cases": results}
    write_report(arguments.out, "optimizer", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
