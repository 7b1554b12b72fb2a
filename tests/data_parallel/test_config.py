from __future__ import annotations

from typing import Any

import pytest
import torch

from lq_lightning.codecs import decode, encode
from lq_lightning.data_parallel import (
    GradientQuantization,
    LocalSteps,
    Topology,
    WeightQuantization,
)
from lq_lightning.data_parallel.plan import describe_gradients, describe_weights

# by class: options, and what the error says
REFUSED: dict[type, list[tuple[dict[str, object], str]]] = {
    WeightQuantization: [
        ({"bits": 1}, "bits=1.*2 to 8"),
        ({"bits": 9}, "bits=9.*2 to 8"),
        ({"replica": "rank"}, r"replica='rank'.*'full', 'node'"),
        ({"bits": 4.0}, "bits=4.0.*2 to 8"),
        ({"group_size": 100}, r"WeightQuantization\(group_size=100\).*from 16 to 4096"),
        ({"group_size": "row"}, r"WeightQuantization\(group_size='row'\).*from 16 to 4096"),
        ({"group_size": 64.0}, r"group_size=64.0.*power of two"),
        ({"code": "fp4"}, r"code='fp4'.*'auto', 'int', 'nf4'"),
        ({"code": "nf4", "bits": 3}, r"code='nf4', bits=3.*has 4 bits. Give `bits=4`, or `code"),
        ({"code": "fp8_e4m3"}, r"code='fp8_e4m3', bits=4.*has 8 bits. Give `bits=8`, or `code"),
    ],
    GradientQuantization: [
        ({"method": "TLqHS"}, r"method='TLqHS'.*'TLq-HS', 'TLq', 'ULq'"),
        ({"intra_bits": 16}, "intra_bits=16"),
        ({"inter_bits": 0}, "inter_bits=0"),
        ({"rounding": "Nearest"}, r"GradientQuantization\(rounding='Nearest'\).*'nearest'"),
        ({"hadamard_size": 24}, "hadamard_size=24.*16, 32, 64, 128"),
        ({"group_size": 16}, r"GradientQuantization\(hadamard_size=32, group_size=16\).*at most"),
        ({"group_size": 8192}, r"GradientQuantization\(group_size=8192\).*from 16 to 4096"),
        ({"group_size": "row"}, r"GradientQuantization\(group_size='row'\).*from 16 to 4096"),
    ],
    LocalSteps: [
        ({"every": 0}, r"every=0\)` is not supported: give 1 step or more"),
        ({"every": True}, "every=True"),
        ({"outer_lr": 0.0}, r"outer_lr=0.0\)` is not supported: give a number above 0"),
        ({"outer_lr": "0.7"}, "outer_lr='0.7'"),
        ({"outer_lr": True}, "outer_lr=True"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0"),
        ({"bits": 9}, "bits=9"),
        ({"fragments": 0}, r"fragments=0\)` is not supported: give 1 or more"),
        ({"delay": -1}, r"delay=-1\)` is not supported: give 0 steps or more"),
        ({"delay": True}, "delay=True"),
        ({"error_feedback": 1}, r"error_feedback=1\)` is not supported: give True or False"),
        ({"every": 2, "fragments": 3}, r"every=2, fragments=3.*at most one fragment is sent"),
        ({"every": 9, "fragments": 2, "delay": 5}, r"fragments=2, delay=5.*`delay` of at most 4"),
        ({"bits": None, "error_feedback": True}, r"bits=None, error_feedback=True.*loses nothing"),
    ],
}


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [(config, *case) for config, cases in REFUSED.items() for case in cases],
)
def test_errors_name_the_value(config: type, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_unknown_option_is_an_error() -> None:
    with pytest.raises(TypeError, match="group"):
        WeightQuantization(group=128)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("kwargs", "code", "bits", "error"),
    [
        ({}, "nf4", 4.125, 0.096),
        ({"code": "nf4", "group_size": 64}, "nf4", 4.25, 0.092),
        ({"code": "int"}, "int4", 4.125, 0.118),
        ({"code": "int", "group_size": 2048}, "int4", 4.0078125, 0.151),  # the paper's
        ({"bits": 8}, "int8", 8.125, 0.0065),
        ({"code": "fp8_e4m3", "bits": 8}, "fp8_e4m3", 8.125, 0.0257),
    ],
)
def test_codes_of_weights(kwargs: Any, code: str, bits: float, error: float) -> None:
    codec = WeightQuantization(**kwargs).codec()
    assert (codec.code, codec.bits_per_element(1 << 20)) == (code, bits)
    values = torch.randn(1, 1 << 17, generator=torch.Generator().manual_seed(0))
    arrived = decode(codec, encode(codec, values), values.shape[1], dtype=values.dtype)
    assert (arrived - values).norm() / values.norm() == pytest.approx(error, rel=0.01)


def test_ablation_codecs() -> None:
    full = GradientQuantization()
    assert full.codec("inter").rounding == "nearest"
    assert (full.codec("intra").code, full.codec("inter").code) == ("int8", "int4")
    assert full.codec("intra").hadamard_size == 32
    assert full.codec("inter", vocabulary=True).code == "int6"
    flat = GradientQuantization(method="ULq")
    assert (flat.codec("intra").code, flat.codec("inter").code) == ("int4", "int4")
    assert flat.codec("inter").hadamard_size == 0
    assert GradientQuantization(method="TLq", group_size=16).codec("intra").hadamard_size == 0
    eight = GradientQuantization(method="QuanGrad", inter_bits=4, intra_bits=5)
    assert eight.codec("intra").code == eight.codec("inter").code == "int8"
    assert eight.codec("inter").hadamard_size == 0


def test_descriptions_name_codes_and_groups() -> None:
    weights = describe_weights(WeightQuantization(group_size=64))
    assert weights == "qWD: 4-bit differences (nf4), groups of 64, replica=full"
    topology = Topology(world_size=4, rank=0, node_size=2)
    gradients = describe_gradients(GradientQuantization(), topology, vocabulary=True)
    assert "int8 within nodes of 2, int4 between 2 nodes, int6 there" in gradients


@pytest.mark.parametrize("node_size", [0, 3, 5, -1])
def test_topology_names_the_divisors(node_size: int) -> None:
    with pytest.raises(ValueError, match=rf"node_size={node_size}.*\[1, 2, 4\]"):
        Topology(world_size=4, rank=0, node_size=node_size)


@pytest.mark.parametrize("node_size", ["1", 2.0, True])
def test_topology_takes_whole_numbers(node_size: Any) -> None:
    with pytest.raises(ValueError, match=rf"Topology\(node_size={node_size!r}\).*whole number"):
        Topology(world_size=4, rank=0, node_size=node_size)


def test_topology_positions() -> None:
    topology = Topology(world_size=6, rank=5, node_size=2)
    assert (topology.num_nodes, topology.node, topology.local_rank) == (3, 2, 1)
    with pytest.raises(ValueError, match="rank"):
        Topology(world_size=2, rank=2, node_size=1)


def test_few_bits_of_local_steps_span_the_range_of_a_group() -> None:
    four, two = LocalSteps().codec(), LocalSteps(bits=2).codec()
    assert four == GradientQuantization().codec("inter")
    assert two is not None
    plain = GradientQuantization(inter_bits=2).codec("inter")
    assert two.nbytes(1 << 16) == plain.nbytes(1 << 16)
    x = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0))
    errors = [float((decode(c, encode(c, x), 4096) - x).norm() / x.norm()) for c in (two, plain)]
    assert errors[0] < 0.55 < 0.7 < errors[1]
