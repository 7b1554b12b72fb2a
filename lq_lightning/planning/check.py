"""``lq-lightning plan --check``: train a few real steps here, and compare them with the plan."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from lq_lightning.callbacks.plan_check import CheckedLine, PlanCheck
from lq_lightning.planning.config import OneBatch, Program, find_batch
from lq_lightning.planning.plan import Plan, plan_run

STEPS = 3


def check_run(
    run: Program, plan: Plan, machine: Mapping[str, Any], *, batch: Any = None
) -> tuple[str, list[CheckedLine]]:
    """Train a few steps of a planned run on this machine, with the same batch in each.

    Under ``torchrun`` all its ranks train, otherwise one process. Where these are other ranks than
    planned, they are planned first, with the arguments ``machine`` of ``make_machine``. Logs,
    checkpoints and validation are left out, as for the plan. The first step is not timed.

    Returns:
        A line that says why another plan than the one asked for is compared, if it is; predictions
        beside their measurements, on rank 0.

    Raises:
        ValueError: the run cannot be planned for the ranks of this machine.
    """
    # that a launcher has started; one without it
    world, local = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    note, nodes = "", max(1, world // local)
    if (plan.machine.nodes, plan.machine.gpus_per_node) != (nodes, local):
        note = (
            f"The plan is of {_count(plan.machine.nodes, plan.machine.gpus_per_node)}, and "
            f"{_count(nodes, local)} trained here: so these are planned, too.\n"
        )
        here = {**machine, "nodes": nodes, "gpus_per_node": local}
        plan = plan_run(run, here, batch=batch, alternatives=False)
    _, module, data = run.look()
    batch, _ = find_batch(module, data, run.keeps_data, batch)
    callback = PlanCheck(json.loads(plan.to_json()), quiet=True)
    overrides = {
        "accelerator": "gpu" if torch.cuda.is_available() else "cpu",
        "devices": local,
        "num_nodes": nodes,
        "max_steps": STEPS,
        "callbacks": [callback],
    }
    trainer, module, _ = run(overrides)
    trainer.fit(module, OneBatch(batch))
    return note, callback.lines


def _count(nodes: int, local: int) -> str:
    ranks = "one rank" if local == 1 else f"{local} ranks"
    return ranks if nodes == 1 else f"{nodes} nodes of {ranks}"
