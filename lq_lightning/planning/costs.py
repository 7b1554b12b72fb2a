"""Seconds of one operator on a GPU and of one collective on its link.

Everything rests on the few constants below, each measured in a report of ``benchmarks/results``,
on an H200. Rates and bandwidths are those of the machine, so constants are shares of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .machine import Gpu, Machine
from .trace import SHARDED, Collective, Event, Operator

# Parts of a step.
COMPUTE, CODECS, OPTIMIZER, HOST_LATE = "compute", "codecs", "optimizer", "host"
WITHIN, BETWEEN, BUBBLE = "exposed within nodes", "exposed between nodes", "bubble"
PARTS = COMPUTE, CODECS, WITHIN, BETWEEN, BUBBLE, OPTIMIZER, HOST_LATE

COMPILED = "compiled.pointwise"
MULTIPROCESSORS = 132  # of H100 and H200
# Rows and columns of a result that a multiprocessor computes at a time, and how fast.
TILES = (
    *((128, 256, 1.0), (256, 128, 1.0), (128, 192, 0.97), (192, 128, 0.97), (128, 128, 0.93)),
    *((64, 128, 0.7), (128, 64, 0.7), (64, 64, 0.5)),
)

# Shares of a rate of the machine, with the reports of ``benchmarks/results`` that they were
# measured or fitted in.
LAUNCH_S = 2.5e-6  # `kernels_h200.json`
"""Seconds of an operator beyond its bytes: from 64 and 256 MB of each codec."""
DEPTH = 32.0  # `activations_table.json`
"""Elements of the summed dimension of a product that filling its pipeline takes the time of."""
SUSTAINED = 1.05  # `plan_accuracy.json`
"""Rate of large products in training, of that alone on random numbers, which draw more power."""
EXACT_FLOAT8 = 0.45  # `plan_accuracy.json`
"""What remains of the rate of FP8 products that add up in fp32, as ours do in backward."""
EXCHANGED = 0.85  # `plan_accuracy.json`
"""What remains of a link between nodes in an all-to-all, which waits for the slowest of peers."""
ATTENTION_FORWARD = 0.84  # `activations_long.json`
ATTENTION_BACKWARD = 0.72  # `activations_long.json`
"""Shares of the rate of large products that attention reaches; more than 64 channels per head."""
FOREACH = 0.89  # `optimizer_h200.json`
"""Share of copy of lists of tensors: .31 for 28 bytes per element, of which it moves 80."""
FUSED_OPTIMIZER = 0.84  # `optimizer_h200.json`
SHARED = 0.7  # `step_time_nvlink.json`
"""Part of the time of another stream's operators by which computation beside them gets longer."""

POINTWISE = 0.85  # `activations_table.json`
BROADCAST = 0.35  # `activations_table.json`
NORM = 0.60  # `activations_table.json`
GATHERED = 0.40  # `step_time_nvlink.json`
"""Rows picked by an index, and their gradient."""
_NORMS = "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward"
_GATHERS = "embedding", "embedding_dense_backward", "index", "index_put_", "gather"
_STRIDED = "cat neg slice_backward mean sum"
SPECIAL = (
    dict.fromkeys(_NORMS.split(), NORM)
    | dict.fromkeys(_GATHERS, GATHERED)
    | dict.fromkeys(_STRIDED.split(), BROADCAST)
    | dict.fromkeys(("_fused_adamw_", "_fused_adam_", "_fused_sgd_"), FUSED_OPTIMIZER)
)

HADAMARD = "hadamard"
# From `activation_kernels_h200.json`, then `kernels_h200.json` and `tah_kernels_h200.json`.
KERNELS: Sequence[tuple[str, tuple[str, ...], float]] = (
    ("norm_quantize", ("layer",), 0.44),
    ("norm_quantize", ("nf4",), 0.44),
    ("norm_quantize", (HADAMARD,), 0.66),
    ("norm_quantize", (), 0.82),
    ("norm_dequantize_float8", (HADAMARD,), 0.36),
    ("norm_dequantize_float8", (), 0.60),
    ("norm_dequantize", ("layer",), 0.56),
    ("norm_dequantize", (HADAMARD,), 0.67),
    ("norm_dequantize", (), 0.84),
    ("norm_backward", ("layer",), 0.52),
    ("norm_backward", (HADAMARD,), 0.68),
    ("norm_backward", (), 0.80),
    ("activation_quantize", ("nf4",), 0.385),
    ("activation_quantize", ("gelu", HADAMARD), 0.44),
    ("activation_quantize", (HADAMARD,), 0.66),
    ("activation_quantize", (), 0.95),
    ("activation_dequantize_float8", (HADAMARD,), 0.08),
    ("activation_dequantize_float8", (), 0.55),
    ("activation_dequantize", ("gelu", HADAMARD), 0.32),
    ("activation_dequantize", (HADAMARD,), 0.48),
    ("activation_dequantize", (), 0.85),
    ("activation_backward", ("gelu", HADAMARD), 0.49),
    ("activation_backward", (HADAMARD,), 0.67),
    ("activation_backward", (), 0.92),
    ("dequantize_float8", (HADAMARD,), 0.46),
    ("dequantize_float8", (), 0.70),
    ("float8_", (), 0.86),
    ("requantize", ("nf4",), 0.46),
    ("requantize", (), 0.86),
    ("quantize", ("nf4",), 0.82),
    ("quantize", (), 0.96),
    ("dequantize", (), 0.93),
    ("accumulate_", (), 0.86),
    ("tah_quantize", (), 0.20),
    ("tah_dequantize", (), 0.55),
    ("optimizer_step", (), 0.88),  # `optimizer_h200.json`
    ("", (), 0.40),
)
"""Shares of copy of this package's kernels: beginning of the name, words among its options."""

# What only allocates, or tells the host something. Views are no operators of a trace.
_IDLE = frozenset(
    (
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"),
        *("set_", "_unsafe_view", "record_stream", "is_same_size"),
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slower:
    """Factors by which things take longer than predicted, to see what an error amounts to."""

    products: float = 1.0
    memory: float = 1.0
    host: float = 1.0
    within_node: float = 1.0
    between_nodes: float = 1.0

    def of_operator(self, launch: float, moving: float, computing: float) -> float:
        """Return the seconds of an operator with these costs."""
        return launch + max(self.memory * moving, self.products * computing)

    def of_collective(self, waiting: float, within: float, between: float) -> float:
        """Return the seconds of a collective with these costs."""
        return waiting + max(self.within_node * within, self.between_nodes * between)


ERRORS = Slower(products=0.04, memory=0.10, host=0.35, within_node=0.15, between_nodes=0.05)
"""Standard relative errors of predictions, from ``tests/planning`` and the reports compared there.

Where the link of a machine was measured less exactly, its own error counts.
"""


# --- operators ------------------------------------------------------------------------------------


def short_name(operator: Operator) -> str:
    """Return ``"mm"`` for ``"aten.mm.default"``."""
    return operator.name.split(".")[1] if "." in operator.name else operator.name


def is_codec(operator: Operator) -> bool:
    """Tell whether an operator is a kernel of this package, optimizers' apart."""
    return operator.name.startswith("lq_lightning.") and "optimizer" not in operator.name


def is_idle(operator: Operator) -> bool:
    """Tell whether an operator does nothing on the device."""
    return operator.name == SHARDED or short_name(operator) in _IDLE


def operator_costs(operator: Operator, gpu: Gpu) -> tuple[float, float, float]:
    """Return the seconds of an operator's launch, of moving its bytes, and of computing."""
    if is_idle(operator):
        return 0.0, 0.0, 0.0
    nbytes = operator.read_nbytes + operator.written_nbytes
    moving = nbytes / (_share(operator) * gpu.copy_bytes_per_s)
    return LAUNCH_S, moving, _computing(operator, gpu)


def _share(operator: Operator) -> float:
    """Return the share of copy that an operator reaches."""
    name = short_name(operator)
    if operator.name.startswith("lq_lightning."):
        words = _words(operator.options)
        return next(
            share
            for start, needed, share in KERNELS
            if name.startswith(start) and words.issuperset(needed)
        )
    if name.startswith("_foreach"):
        return FOREACH
    shapes = {shape for shape in operator.shapes if shape}
    default = BROADCAST if len(shapes) > 1 and operator.name != COMPILED else POINTWISE
    return SPECIAL.get(name, default)


def _words(options: Sequence[str]) -> set[str]:
    """Return what an operator's options say, with :data:`HADAMARD` if its code transforms."""
    words = set(options)
    for option in options:
        code, *rest = option.split("/")  # group, symmetry, Hadamard size, rounding, scale
        words.add(code)
        if len(rest) == 5 and rest[2] != "0":
            words.add(HADAMARD)
    return words


def _computing(operator: Operator, gpu: Gpu) -> float:
    """Return the seconds of the floating point operations of a product or of attention."""
    name, dtype = short_name(operator), operator.dtype
    key = str(dtype).removeprefix("torch.")
    key = "float8" if key.startswith("float8") else key
    rate = SUSTAINED * gpu.products.get(key, gpu.products["bfloat16"])
    if key == "float8" and operator.phase == "backward":
        rate *= EXACT_FLOAT8
    if "attention" in name:
        part = ATTENTION_BACKWARD if "backward" in name else ATTENTION_FORWARD
        return operator.flops / (rate * part)
    product = _product(operator)
    if product is None:
        return operator.flops / rate
    return 2 * math.prod(product) / (rate * product_efficiency(*product))


def product_efficiency(batch: int, rows: int, depth: int, columns: int) -> float:
    """Return the share of a large product's rate that one of this shape reaches.

    Results are computed in tiles, as many at a time as there are multiprocessors: the last ones
    may be few. Before a tile's first and after its last product there is other work.
    """
    best = 0.0
    for height, width, efficiency in TILES:
        tiles = batch * math.ceil(rows / height) * math.ceil(columns / width)
        slots = math.ceil(tiles / MULTIPROCESSORS) * MULTIPROCESSORS
        best = max(best, efficiency * batch * rows * columns / (slots * height * width))
    return best * depth / (depth + DEPTH)


def _product(operator: Operator) -> tuple[int, int, int, int] | None:
    """Return batch, rows, depth and columns of a product; None if it is none."""
    matrices = [shape for shape in operator.shapes if len(shape) > 1]
    if short_name(operator) == "int8_matmul":  # [M, K], scales, [N, K], ...
        (rows, depth), columns = operator.shapes[0], operator.shapes[2][0]
        return 1, rows, depth, columns
    if not operator.flops or len(matrices) < 2:
        return None
    *batch, rows, depth = matrices[-2]
    # Not the second operand's: `_scaled_mm` takes its transpose.
    columns = operator.flops // (2 * math.prod(batch) * rows * depth)
    return math.prod(batch), rows, depth, max(1, columns)


# --- compiled code --------------------------------------------------------------------------------


def fused(events: Sequence[Event]) -> list[Event]:
    """Return events in which those operators are one that a compiler would run together.

    These are consecutive pointwise operators and norms of one stream and phase, which together read
    what the first of them reads, and write what the last one writes.
    """
    found: list[Event] = []
    place = -1  # of the operator that the next one may join; -1 for none
    for event in events:
        if isinstance(event, Operator) and not is_idle(event) and is_fusible(event):
            first = found[place] if place >= 0 else None
            where = event.stream, event.phase
            if isinstance(first, Operator) and (first.stream, first.phase) == where:
                written = event.written_nbytes
                found[place] = replace(first, name=COMPILED, written_nbytes=written, options=())
                continue
            place = len(found)
        elif isinstance(event, Collective) or isinstance(event, Operator) and not is_idle(event):
            place = -1
        found.append(event)
    return found


def is_fusible(operator: Operator) -> bool:
    """Tell whether a compiler would run an operator together with its neighbours."""
    name = short_name(operator)
    return (
        not operator.flops
        and operator.phase in ("forward", "backward")
        and operator.name.startswith("aten.")
        and name not in _GATHERS
        and not name.startswith("_foreach")
    )


# --- collectives ----------------------------------------------------------------------------------


def sent_nbytes(collective: Collective, groups: int) -> tuple[float, float]:
    """Return the bytes that a GPU sends within its node, and a node to others.

    Args:
        collective: Message of one rank.
        groups: Groups of ranks that do the same at this time through the network of one node.
    """
    ranks, nodes, nbytes = collective.ranks, collective.nodes, collective.nbytes
    if ranks < 2:
        return 0.0, 0.0
    local = max(1, ranks // nodes)
    if collective.kind == "all_to_all":
        to_each = nbytes / ranks
        return to_each * (local - 1), groups * local * to_each * (ranks - local)
    through = {
        "all_gather": (ranks - 1) * nbytes,
        "reduce_scatter": (ranks - 1) / ranks * nbytes,
        "all_reduce": 2 * (ranks - 1) / ranks * nbytes,
        "recv": 0,
    }.get(collective.kind, nbytes)  # what passes each rank of a ring
    within = through * (local - 1) / local if nodes > 1 else through
    return within, groups * through * (nodes > 1)


def collective_costs(
    collective: Collective, machine: Machine, groups: int
) -> tuple[float, float, float]:
    """Return the seconds of a collective's latency, and of its bytes on both levels.

    Arguments are those of :func:`sent_nbytes`.
    """
    within, between = sent_nbytes(collective, groups)
    ranks, nodes = collective.ranks, collective.nodes
    local = max(1, ranks // nodes)
    ring = collective.kind in ("all_gather", "reduce_scatter", "broadcast")
    hops_between = (nodes - 1 if ring else math.ceil(math.log2(nodes))) if nodes > 1 else 0
    hops_within = max(1, local - 1 if ring else math.ceil(math.log2(local))) if local > 1 else 0
    rounds = 2 if collective.kind == "all_reduce" else 1
    waiting = rounds * (
        hops_within * machine.within_node.latency_s + hops_between * machine.between_nodes.latency_s
    )
    within_s = within / machine.within_node.bytes_per_s
    if collective.kind == "all_to_all":
        between /= EXCHANGED
    return waiting, within_s, between / machine.between_nodes.bytes_per_s
