"""What is refused, and what the plan says."""

from __future__ import annotations

from typing import Any

import pytest
from lq_testing.fsdp2 import QWD, TLQ_HS, build, pretend_ranks, units
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lq_lightning import data_parallel
from lq_lightning.data_parallel import (
    CommunicationPlan,
    TensorPlan,
    Topology,
    install,
    quantize_communication,
)


def test_refuses_what_it_cannot_do() -> None:
    pretend_ranks(2)
    topology = Topology.of(node_size=1)
    options: dict[str, Any] = {"weights": QWD, "gradients": None}
    with pytest.raises(ValueError, match="no module sharded by FSDP2"):
        quantize_communication(nn.Linear(2, 2), **options, topology=topology)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    hybrid = fully_shard(nn.Linear(4, 4), mesh=mesh)
    with pytest.raises(NotImplementedError, match="HSDP"):
        quantize_communication(hybrid, **options, topology=topology)
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match="min_quantized_numel=0"):
        quantize_communication(model, **options, topology=topology, min_quantized_numel=0)
    wrong = Topology(world_size=4, rank=0, node_size=1)
    with pytest.raises(ValueError, match=r"world_size=4.*number 0 of 2 ranks"):
        quantize_communication(model, **options, topology=wrong)


@pytest.mark.parametrize("weights", [QWD, None])
def test_only_differences_need_votes(monkeypatch: pytest.MonkeyPatch, weights: Any) -> None:
    """A process group takes memory on a GPU, and watching passes is a change to FSDP2."""
    pretend_ranks(2)
    made: list[Any] = []

    def split(use: str, group: Any, rows: Any, device: Any) -> Any:
        made.append(rows)
        return group

    monkeypatch.setattr(install, "shared_split", split)
    model, _, communication = build(weights=weights, gradients=TLQ_HS)
    watched = ["_root_pre_forward" in vars(unit._get_fsdp_state()) for unit in units(model)]
    assert set(watched) == {weights is not None}
    assert made == ([] if weights is None else [[[0, 1]]])
    assert communication.external_weight_updates == {}
    assert communication.replica_state_dict() == {}


def test_plan_names_what_is_not_quantized_and_why() -> None:
    pretend_ranks(2)
    _, _, communication = build(weights=QWD, gradients=TLQ_HS)
    with pytest.warns(DeprecationWarning, match="called `external_weight_updates`"):
        assert communication.outside_writes == {}
    with pytest.warns(DeprecationWarning, match="called `embedding_params`"):
        assert data_parallel.vocabulary_weights is data_parallel.embedding_params
    plan = {t.name: t for t in communication.plan.tensors}
    assert plan["blocks.0.up.weight"][2:5] == ("quantized", "quantized", "")
    assert plan["blocks.0.norm.weight"].reason == "1-D"
    assert plan["tiny"].weights == "full"
    assert len(plan) == len(communication.plan.tensors) == 13
    summary = communication.plan.summary()
    assert "4-bit differences (nf4), groups of 64" in summary
    assert "int8 within the one node, nearest rounding, groups of" in summary
    assert "in full precision, 1-D: 7 tensors" in summary


def tensor(name: str, numel: int, *, trained: bool = True, reason: str = "") -> TensorPlan:
    weights = "full" if reason else "quantized" if trained else "skipped"
    reason = reason or ("" if trained else "frozen")
    return TensorPlan(name, numel, weights, weights if trained else "none", reason)


def test_the_summary_is_about_what_is_trained() -> None:
    tensors = (
        *(tensor(f"0.{i}.up", 10_000, trained=False) for i in range(3)),
        *(tensor(f"base{i}", 10_000, trained=False) for i in range(4)),
        tensor("lora", 940),
        tensor("bias", 60, reason="1-D"),
    )
    plan = CommunicationPlan(tensors, "qWD", "TLq-HS")
    assert [t.name for t in plan.full_precision] == ["bias"]
    assert plan.summary().splitlines() == [
        "weights: qWD",
        "gradients: TLq-HS",
        "94% of trained elements are sent quantized: 1 of 2 tensors, 940 of 1,000 elements",
        "frozen, sent once: 7 tensors, 70,000 elements (3x *.*.up, base0, base1, ...)",
        "in full precision, 1-D: 1 tensor, 60 elements (bias)",
    ]
    assert "100% of trained elements" in plan._replace(tensors=tensors[:-1]).summary()
    nearly = (tensor("most", 10**6), tensor("bias", 1, reason="1-D"))
    assert "99% of trained elements" in plan._replace(tensors=nearly).summary()
    assert plan.leaves_out_much
    assert not plan._replace(tensors=nearly).leaves_out_much


def test_the_summary_says_what_to_do_where_nothing_is_quantized() -> None:
    tensors = tuple(tensor(f"t{i}", 5, reason=f"{i + 5} elements < 4096") for i in range(8))
    lines = CommunicationPlan(tensors, "qWD", "TLq-HS").summary().splitlines()
    assert lines[2].startswith("0% of trained elements")
    assert lines[-2].startswith("and for 2 more reasons: `plan.tensors`")
    assert "smaller `min_quantized_numel`" in lines[-1]
    frozen = CommunicationPlan((tensor("a", 9, trained=False),), "qWD", "TLq-HS").summary()
    assert frozen.splitlines()[2:] == ["frozen, sent once: 1 tensor, 9 elements (a)"]
