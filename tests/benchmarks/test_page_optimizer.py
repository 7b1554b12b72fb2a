"""The sections of the page on optimizer and gradients, from small made-up reports."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def page(load_benchmark: Any) -> ModuleType:
    return load_benchmark("page_optimizer")


@pytest.fixture
def folder(page: ModuleType, tmp_path: Path) -> Any:
    return page.Folder(tmp_path, tmp_path / "page.md")


def write(tmp_path: Path, name: str, results: Any) -> None:
    environment = {"commit": "abc", "date": "2026-01-02T03:04:05", "versions": {"torch": "2.11"}}
    report = {"environment": environment, "results": results}
    (tmp_path / f"{name}.json").write_text(json.dumps(report))


def test_speed_shows_host_times_where_they_were_measured(
    page: ModuleType, folder: Any, tmp_path: Path
) -> None:
    case = {
        "optimizer": "torch AdamW fused",
        "numel": 486_000_000,
        "time_ms": 3.912,
        "state_bytes_per_parameter": 8.0,
        "bytes_moved": 1,
        "gb_per_s": 3456.7,
        "share_of_copy": 0.875,
    }
    write(tmp_path, "optimizer_h200", {"copy_gb_per_s": 4200.4, "cases": [case]})
    shown = page.optimizer_speed(folder)
    assert "486 million parameters; a device-to-device copy moves 4200 GB/s." in shown
    assert "| torch AdamW fused | 3.91 | 8.000 | 3457 | 88% |" in shown
    assert "host" not in shown
    cases = [case | {"host_ms": 0.25}, case | {"optimizer": "other"}]
    write(tmp_path, "optimizer_h200", {"copy_gb_per_s": 4200.4, "cases": cases})
    shown = page.optimizer_speed(folder)
    assert "| optimizer | ms on the device | ms of the host | state bytes" in shown
    assert "| torch AdamW fused | 3.91 | 0.25 | 8.000 | 3457 | 88% |" in shown
    assert "| other | 3.91 | - | 8.000 | 3457 | 88% |" in shown
    write(tmp_path, "optimizer_h200_older", {"copy_gb_per_s": 4100.0, "cases": [case]})
    shown = page.optimizer_speed(folder)
    assert shown.index("4200 GB/s") < shown.index("4100 GB/s"), "one table after the other"


def errors(*names: str) -> list[dict[str, Any]]:
    pairs = [(first, second) for second in names for first in names]
    return [
        {"first": first, "second": second, "mse": 10.0**-index, "lost": 1e-5 * (second == "b")}
        for index, (first, second) in enumerate(pairs)
    ]


def test_errors_have_first_moments_in_rows(page: ModuleType, folder: Any, tmp_path: Path) -> None:
    drawn = {"checkpoint": None, "steps": 60, "betas": [0.9, 0.95], "matrices": 1, "numel": 100}
    saved = {"checkpoint": "moments.pt", "matrices": 4, "numel": 1000}
    both = {"library": errors("a", "b"), "coat": errors("E4M3", "b")}
    write(tmp_path, "optimizer_error", both | {"moments": drawn})
    write(tmp_path, "optimizer_error_gpt", both | {"moments": saved})
    shown = page.optimizer_error(folder)
    assert "Moments of 60 steps of drawn gradients, 100 elements." in shown
    assert "Moments of 4 matrices of a run (`moments.pt`), 1000 elements." in shown
    assert "| m \\ v | a | b |" in shown
    assert "| a | 1 | 0.01 |\n| b | 0.1 | 0.001 |\n" in shown
    assert "| second moments lost | 0% | 0.001% |" in shown
    assert "| m \\ v | E4M3 | b |" in shown
    assert shown.count("\nFrom [") == 2


def test_runs_of_optimizer_states_are_told_from_the_others(
    page: ModuleType, load_benchmark: Any, folder: Any, tmp_path: Path
) -> None:
    def runs(loss: float) -> list[dict[str, float]]:
        return [{"seed": 0, "val_loss": loss, "train_s": 1.0}]

    sizes = {"layers": 12, "hidden": 768, "steps": 10, "batch": 2, "seq": 4}
    results = {"preset": sizes, "world_size": 4, "node_size": 2}
    mixed = {"qWD": 2.02, "AdamW fp8": 2.04, "full precision": 2.0, "SDP4Bit + AdamW fp8": 2.2}
    states = {"AdamW int8": 3.0, "full precision": 2.0}
    twice = {"full precision": 4.0, "full precision perturbed": 4.4, "AdamW fp8": 4.62}
    for name, losses in (("mixed", mixed), ("states", states), ("twice", twice)):
        variants = {variant: runs(loss) for variant, loss in losses.items()}
        write(tmp_path, f"ablation_{name}", results | {"variants": variants})
    fidelity = page.optimizer_fidelity(folder)
    assert (
        "| full precision | 1 | 2.0000 | - | - | - | - |\n| AdamW fp8 | 1 | 2.0400 | +2.000% |"
        in fidelity
    )
    assert "| AdamW int8 | 1 | 3.0000 | +50.000% | - | - |" in fidelity
    assert "| AdamW fp8 | 1 | 4.6200 | +10.000% | - | - |" in fidelity  # of both runs without a row
    assert "perturbed" not in fidelity
    assert "qWD" not in fidelity
    assert "SDP4Bit" not in fidelity
    others = load_benchmark("page_performance").ablation(folder)
    assert "| qWD | 1 | 2.0200 | +1.000% | - | - |" in others
    assert "| SDP4Bit + AdamW fp8 | 1 | 2.2000 | +10.000% | - | - |" in others
    assert "| AdamW" not in others
    assert "ablation_states" not in others


def test_joined_reports_name_all_that_made_them(load_benchmark: Any) -> None:
    made = [
        {"commit": commit, "date": "2026-01-02T03:04:05", "versions": {"torch": "2.11"}}
        for commit in ("abc", "def", "abc")
    ]
    shown = load_benchmark("page_parts").sources([{"name": "x", "environments": made}])
    assert "(abc, 2026-01-02, CPU, torch 2.11; def, 2026-01-02, CPU, torch 2.11)" in shown


def test_gradient_buffer_shows_chosen_codes(page: ModuleType, folder: Any, tmp_path: Path) -> None:
    result = {"stored": [0.004, 0.009], "delivered": [0.0, 0.0], "slope": [1.0, 1.0]}
    names = ("int8-g32-half-steps", "fp8-e4m3-g128", "int8-g64")
    results = {
        "microbatches": [1, 16],
        "nbytes_per_parameter": dict.fromkeys(names, 1.125),
        "errors": {"gpt": dict.fromkeys(names, result)},
    }
    write(tmp_path, "gradient_buffer", results)
    shown = page.gradient_buffer(folder)
    assert "| code | bytes per parameter | 1 micro-batch, % | 16 micro-batches, % |" in shown
    assert "| INT8, scale per 32, half steps" in shown
    assert shown.count("| 1.125 | 0.40 | 0.90 |") == 2


def test_gradient_memory(page: ModuleType, folder: Any, tmp_path: Path) -> None:
    window = {
        "held_bytes_per_parameter": 4.0,
        "peak_bytes_per_parameter": 9.5,
        "window_ms": 300.4,
        "gradient_norm": 1.0,
    }
    kernel = {"kernel": "accumulate", "numel": 1 << 20, "us": 3.21, "share_of_copy": 0.5}
    results = {
        "world_size": 1,
        "model": {"layers": 12, "hidden": 2048, "seq": 1024, "batch": 2},
        "micro_batches": 4,
        "kernels": [kernel],
        "windows": {"fp32": window, "8-bit": window | {"held_bytes_per_parameter": 1.125}},
    }
    write(tmp_path, "gradient_memory", results)
    shown = page.gradient_memory(folder)
    assert "micro-batch 2, 4 micro-batches, 1 rank:" in shown
    assert "| gradients in fp32 | 4.000 | 9.500 | 300 |" in shown
    assert "| gradients in 8-bit codes | 1.125 | 9.500 | 300 |" in shown
    assert "| accumulate | 1 | 3.2 | 50% |" in shown


def test_all_reduce(page: ModuleType, folder: Any, tmp_path: Path) -> None:
    row = {
        "nbytes": 1 << 20,
        "ms": {"fp32": 8.0, "bf16": 4.0, "quantized": 2.0},
        "ms_min": {},
        "calls": {},
        "relative_error": 0.011,
        "speedup": 4.0,
    }
    results = {
        "world_size": 4,
        "node_size": 2,
        "rate": "10gbit",
        "backend": "nccl",
        "codec": {},
        "bits_per_element": 8.125,
        "crossover_nbytes": 1 << 20,
        "rows": [row],
    }
    write(tmp_path, "all_reduce_10gbit", results)
    shown = page.all_reduce(folder)
    assert "4 ranks in nodes of 2, 10 Gb/s between nodes (8.125 bits per element):" in shown
    assert "| 1 MiB | 8.00 | 4.00 | 2.00 | **4.00x** | 2.00x | 1.10% |" in shown
    assert "From 1 MiB on it is never slower than fp32." in shown
    assert "unlimited virtual link between nodes: not measured yet." in shown
    write(tmp_path, "all_reduce_unlimited", results | {"crossover_nbytes": None})
    shown = page.all_reduce(folder)
    assert "The largest size is not faster than fp32." in shown
    assert "not measured yet" not in shown
