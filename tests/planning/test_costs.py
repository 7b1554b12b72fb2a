"""Seconds of operators and collectives, against arithmetic and the reports that they rest on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lq_lightning.planning import costs
from lq_lightning.planning.costs import (
    Slower,
    collective_costs,
    fused,
    operator_costs,
    sent_nbytes,
)
from lq_lightning.planning.machine import GPUS, Gpu, Link, Machine, make_machine
from lq_lightning.planning.trace import Allocate, Collective, Event, Mark, Operator, Storage

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
H200 = GPUS["H200"]
BF16, FP32 = torch.bfloat16, torch.float32


def operator(name: str, read: int = 0, written: int = 0, **changes: object) -> Operator:
    values = {
        "stream": 0,
        "phase": "forward",
        "flops": 0,
        "shapes": (),
        "dtype": BF16,
    }
    return Operator(name=name, read_nbytes=read, written_nbytes=written, **(values | changes))  # type: ignore[arg-type]


def product(rows: int, depth: int, columns: int, **changes: object) -> Operator:
    nbytes = 2 * (rows * depth + depth * columns), 2 * rows * columns
    shapes = ((rows, depth), (depth, columns))
    return operator(
        "aten.mm.default", *nbytes, flops=2 * rows * depth * columns, shapes=shapes, **changes
    )


def collective(kind: str, nbytes: int, ranks: int, nodes: int) -> Collective:
    return Collective(kind, nbytes, ranks, nodes, 1, "forward")  # type: ignore[arg-type]


def operator_seconds(operator: Operator, gpu: Gpu, slower: Slower | None = None) -> float:
    return (slower or Slower()).of_operator(*operator_costs(operator, gpu))


def collective_seconds(collective: Collective, machine: Machine, groups: int) -> float:
    return Slower().of_collective(*collective_costs(collective, machine, groups))


# --- operators ------------------------------------------------------------------------------------


def test_a_large_product_runs_at_the_sustained_rate_of_its_dtype() -> None:
    large = product(16384, 8192, 16384)
    expected = large.flops / (costs.SUSTAINED * H200.products["bfloat16"])
    assert operator_seconds(large, H200) == pytest.approx(expected, rel=0.02)
    eighth = product(16384, 8192, 16384, dtype=torch.float8_e4m3fn)
    ratio = H200.products["float8"] / H200.products["bfloat16"]
    assert operator_seconds(large, H200) / operator_seconds(eighth, H200) == pytest.approx(
        ratio, rel=0.01
    )


def test_fp8_products_take_a_transpose_and_are_slower_where_they_add_up_exactly() -> None:
    shapes, flops = ((8192, 4096), (2048, 4096)), 2 * 8192 * 4096 * 2048
    options = {"flops": flops, "shapes": shapes, "dtype": torch.float8_e4m3fn}
    forward = operator_seconds(operator("aten._scaled_mm.default", **options), H200)
    assert forward == pytest.approx(flops / (costs.SUSTAINED * H200.products["float8"]), rel=0.2)
    options["phase"] = "backward"
    backward = operator_seconds(operator("aten._scaled_mm.default", **options), H200)
    assert forward / backward == pytest.approx(costs.EXACT_FLOAT8, rel=0.05)


def test_a_last_wave_of_tiles_that_is_nearly_empty_costs_a_whole_one() -> None:
    full = costs.product_efficiency(1, 128 * 132, 4096, 256)
    one_more = costs.product_efficiency(1, 128 * 132 + 128, 4096, 256)
    assert full == pytest.approx(4096 / (4096 + costs.DEPTH))
    assert 0.4 < one_more / full < 0.97


def test_few_rows_are_bound_by_the_bytes_of_the_weight() -> None:
    thin = product(1, 8192, 8192)
    moved = (thin.read_nbytes + thin.written_nbytes) / H200.copy_bytes_per_s
    assert operator_seconds(thin, H200) > moved


def test_attention_takes_the_time_of_its_products() -> None:
    # `activations_long.json`: all of a compiled layer but 68 ms of products and pointwise bytes
    forward = operator("aten._scaled_dot_product_flash_attention.default", flops=8_800_000_000_000)
    backward = operator(
        "aten._scaled_dot_product_flash_attention_backward.default", flops=22_000_000_000_000
    )
    took = operator_seconds(forward, H200) + operator_seconds(backward, H200)
    assert took == pytest.approx(0.058, rel=0.05)
    assert operator_seconds(backward, H200) > 2.5 * operator_seconds(forward, H200)


def test_memory_alone_costs_nothing_and_small_operators_a_launch() -> None:
    assert operator_seconds(operator("aten.empty_like.default", 1 << 30, 1 << 30), H200) == 0
    small = operator_seconds(operator("aten.add.Tensor", 8, 8), H200)
    assert small == pytest.approx(costs.LAUNCH_S, rel=1e-3)


@pytest.mark.parametrize(
    ("measured", "name", "options"),
    [
        ("norm quantize rms_cast nf4", "norm_quantize", ("rms_cast", "nf4/32/symmetric/0/n/b")),
        ("norm quantize rms_cast int8", "norm_quantize", ("rms_cast", "int8/32/symmetric/0/n/b")),
        ("norm quantize layer int4 h128", "norm_quantize", ("layer", "int4/32/symmetric/128/n/b")),
        ("norm backward rms_cast int4 h128", "norm_backward", ("rms_cast", "int4/32/s/128/n/b")),
        ("silu quantize nf4", "activation_quantize", ("silu", "nf4/32/symmetric/0/n/b")),
        ("silu backward int8", "activation_backward", ("silu", "int8/32/symmetric/0/n/b")),
        ("gelu rebuild plain int4 h128", "activation_dequantize", ("gelu", "int4/32/s/128/n/b")),
        ("float8 rebuild swiglu int4", "activation_dequantize_float8", ("silu", "int4/32/s/0/n/b")),
    ],
)
def test_kernels_of_saved_activations_take_what_was_measured(
    measured: str, name: str, options: tuple[str, ...]
) -> None:
    report = json.loads((RESULTS / "activation_kernels_h200.json").read_text())["results"]
    case = [row for row in report["cases"] if row["op"] == measured][-1]
    kernel = operator(f"lq_lightning.{name}.default", case["bytes_moved"], options=options)
    assert 1e6 * operator_seconds(kernel, H200) == pytest.approx(case["time_us"], rel=0.08)


@pytest.mark.parametrize(
    ("measured", "name", "options"),
    [
        ("quantize int4/2048 bf16", "quantize_out", ("int4/2048/symmetric/0/nearest/fp32",)),
        ("quantize nf4 bf16", "quantize", ("nf4/128/symmetric/0/nearest/bf16",)),
        ("dequantize int8 fp32", "dequantize_out", ("int8/128/symmetric/0/nearest/fp32",)),
        ("dequantize+reduce+requantize 4x nf4", "requantize_out", ("nf4/128/s/0/n/b",)),
        ("dequantize+reduce+requantize 8x int8", "requantize_out", ("int8/128/s/0/n/b",)),
    ],
)
def test_kernels_of_messages_take_what_was_measured(
    measured: str, name: str, options: tuple[str, ...]
) -> None:
    report = json.loads((RESULTS / "kernels_h200.json").read_text())["results"]
    case = [row for row in report["cases"] if row["op"] == measured][-1]
    kernel = operator(f"lq_lightning.{name}.default", case["bytes_moved"], options=options)
    assert 1e6 * operator_seconds(kernel, H200) == pytest.approx(case["time_us"], rel=0.08)


def test_optimizers_take_what_was_measured() -> None:
    report = json.loads((RESULTS / "optimizer_h200.json").read_text())["results"]
    cases = {case["optimizer"]: case for case in report["cases"]}
    fused_adamw = operator("aten._fused_adamw_.default", cases["torch AdamW fused"]["bytes_moved"])
    assert 1e3 * operator_seconds(fused_adamw, H200) == pytest.approx(
        cases["torch AdamW fused"]["time_ms"], rel=0.05
    )
    case = cases["QuantizedAdamW expanded_fp8"]
    ours = operator("lq_lightning.optimizer_step", case["bytes_moved"])
    assert 1e3 * operator_seconds(ours, H200) == pytest.approx(case["time_ms"], rel=0.05)
    # 80 bytes per element where a fused step moves 28
    case = cases["torch AdamW foreach"]
    lists = operator("aten._foreach_addcdiv_.ScalarList", case["bytes_moved"] * 80 // 28)
    assert 1e3 * operator_seconds(lists, H200) == pytest.approx(case["time_ms"], rel=0.05)


def test_what_is_slower_takes_longer() -> None:
    large, copy = product(8192, 8192, 8192), operator("aten.add.Tensor", 1 << 30, 1 << 30)
    slower = Slower(products=1.5, memory=2.0)
    assert operator_seconds(large, H200, slower) == pytest.approx(
        1.5 * operator_seconds(large, H200), rel=0.01
    )
    assert operator_seconds(copy, H200, slower) == pytest.approx(
        2.0 * operator_seconds(copy, H200), rel=0.01
    )


# --- compiled code --------------------------------------------------------------------------------


def test_compiled_pointwise_operators_are_one_that_reads_and_writes_once() -> None:
    total, idle = operator("aten.add.Tensor", 2, 1), operator("aten.empty_like.default")
    out, last = operator("aten.gelu.default", 3, 4, dtype=FP32), product(64, 64, 64)
    made, mark = Allocate(Storage(1, 0, "forward", "", "", (), BF16)), Mark("batch", 0)
    one, *others = fused([total, made, idle, out, mark, last, out])
    assert one == replace(total, name=costs.COMPILED, written_nbytes=4)
    assert others == [made, idle, mark, last, out]


@pytest.mark.parametrize(
    "between",
    [
        product(64, 64, 64),
        operator("lq_lightning.quantize.default"),
        collective("all_gather", 8, 2, 1),
        operator("aten.add.Tensor", stream=1),
        operator("aten.add.Tensor", phase="backward"),
        operator("aten.embedding.default"),
    ],
    ids=["product", "kernel", "collective", "stream", "phase", "lookup"],
)
def test_compiled_code_ends_at_what_a_compiler_cannot_fuse(between: Event) -> None:
    gelu = operator("aten.gelu.default", 4, 4)
    assert fused([gelu, between, gelu]) == [gelu, between, gelu]


# --- collectives ----------------------------------------------------------------------------------


def test_ring_bytes_are_those_that_an_interface_counted() -> None:
    # `step_time_10gbit.json`: plain FSDP2 with 4 ranks in 2 nodes sent 8.195e9 bytes
    gathered = sent_nbytes(collective("all_gather", 100, 4, 2), 1)
    reduced = sent_nbytes(collective("reduce_scatter", 400, 4, 2), 1)
    assert gathered == reduced == (150, 300)
    assert sent_nbytes(collective("all_reduce", 400, 4, 2), 1) == (300, 600)
    assert sent_nbytes(collective("all_gather", 100, 4, 1), 1) == (300, 0)


def test_all_to_all_sends_what_belongs_to_others() -> None:
    assert sent_nbytes(collective("all_to_all", 400, 4, 2), 1) == (100, 400)
    assert sent_nbytes(collective("all_to_all", 400, 4, 1), 1) == (300, 0)


def test_groups_of_one_rank_per_node_share_its_network() -> None:
    machine = make_machine("H200", nodes=2, gpus_per_node=8, network="10gbit")
    alone = collective_seconds(collective("all_to_all", 1 << 30, 2, 2), machine, 1)
    shared = collective_seconds(collective("all_to_all", 1 << 30, 2, 2), machine, 8)
    assert shared == pytest.approx(8 * alone, rel=1e-3)
    ring = collective_seconds(collective("reduce_scatter", 1 << 30, 2, 2), machine, 1)
    assert ring / alone == pytest.approx(costs.EXCHANGED, rel=1e-2)


def test_levels_have_links_of_their_own() -> None:
    machine = make_machine("H200", nodes=2, gpus_per_node=4, network="10gbit")
    within = collective_seconds(collective("all_gather", 1 << 28, 4, 1), machine, 1)
    between = collective_seconds(collective("all_gather", 1 << 28, 8, 2), machine, 1)
    assert within == pytest.approx(3 * 2**28 / machine.within_node.bytes_per_s, rel=0.1)
    assert between == pytest.approx(7 * 2**28 / machine.between_nodes.bytes_per_s, rel=0.01)


def test_latency_grows_along_a_ring_but_only_by_the_logarithm_in_a_tree() -> None:
    link = Link(bytes_per_s=1e15, latency_s=1.0, error=0.0)
    machine = make_machine("H200", nodes=16, gpus_per_node=1, network="10gbit")
    machine = replace(machine, within_node=link, between_nodes=link)
    assert collective_seconds(collective("all_gather", 1, 16, 16), machine, 1) == pytest.approx(15)
    assert collective_seconds(collective("all_reduce", 1, 16, 16), machine, 1) == pytest.approx(8)
    assert collective_seconds(collective("send", 1, 2, 2), machine, 1) == pytest.approx(1)
