"""What ``"auto"`` chooses."""

from __future__ import annotations

import pytest
from lq_testing import run_ranks
from lq_testing.lightning_models import TinyModule, loader, trainer

from lq_lightning import QuantizedFSDPStrategy
from lq_lightning.data_parallel import GradientQuantization, Topology, WeightQuantization
from lq_lightning.strategies import parts
from lq_lightning.strategies.parts import WeightOption, choose_quantization

AUTO = WeightOption("auto", "auto")


def topology(num_nodes: int, node_size: int) -> Topology:
    return Topology(world_size=num_nodes * node_size, rank=0, node_size=node_size)


@pytest.mark.parametrize(
    ("nodes", "node_size", "nvlink", "replica"),
    [
        (1, 8, True, None),
        (1, 8, False, "full"),
        (4, 8, True, "node"),
        (4, 8, False, "full"),
        (4, 1, True, "full"),
    ],
)
def test_auto_follows_the_topology(
    nodes: int, node_size: int, nvlink: bool, replica: str | None
) -> None:
    weights, gradients, reason = choose_quantization(
        AUTO, "auto", topology(nodes, node_size), nvlink
    )
    if replica is None:
        assert weights is None
        assert gradients is None
        assert "weights='none'" in reason
        assert "gradients='none'" in reason
    else:
        assert weights == WeightQuantization(replica=replica)  # type: ignore[arg-type]
        assert gradients == GradientQuantization()
        assert f"replica={replica!r}" in reason
    assert f"of {node_size} rank{'s' * (node_size > 1)} w" in reason


def test_what_the_user_gives_is_kept() -> None:
    given = WeightQuantization(bits=3), GradientQuantization(method="ULq")
    assert choose_quantization(*given, topology(1, 8), True) == (*given, "")
    assert choose_quantization(None, None, topology(4, 8), True) == (None, None, "")
    weights, gradients, reason = choose_quantization(
        WeightOption("qWD", "auto"), None, topology(1, 8), True
    )
    assert weights == WeightQuantization(replica="full")
    assert gradients is None
    assert "replica" in reason
    weights, gradients, _ = choose_quantization(
        WeightOption("auto", "full"), "auto", topology(4, 8), True
    )
    assert weights == WeightQuantization(replica="full")
    assert gradients == GradientQuantization()


def _says_what_it_chose(rank: int, world: int, root: str) -> None:
    messages: list[str] = []
    parts.rank_zero_info = messages.append  # type: ignore[assignment]
    parts.rank_zero_warn = messages.append  # type: ignore[assignment]
    run = trainer(QuantizedFSDPStrategy(), root, devices=world, max_epochs=1)
    run.fit(TinyModule(), loader())
    communication = run.strategy.communication
    assert "qWD" in communication.plan.weights
    assert "TLq-HS" in communication.plan.gradients
    said = [m for m in messages if "chose gradients='TLq-HS', weights='qWD'" in m]
    assert len(said) == 1, messages
    # what is quantized and what is not is said once
    said = [m for m in messages if "elements" in m]
    assert said == [communication.plan.summary()]


def test_a_run_says_what_it_chose(tmp_path: object) -> None:
    run_ranks(_says_what_it_chose, 2, str(tmp_path), backend=None, torchrun=True)
