"""``lq-lightning plan --check``: train a few real steps here, and compare them with the plan."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lq_lightning.callbacks.plan_check import CheckedLine, Measured, PlanCheck, checked_table
from lq_lightning.planning.config import OneBatch, Program, find_batch, parse_batch
from lq_lightning.planning.plan import Plan, plan_run

STEPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What was planned, and each prediction beside what a few real steps measured.

    ``lines`` are empty on all ranks but the first; ``measured`` is of each rank. ``note`` says why
    the plan, of the ranks that trained, is another one than asked for.
    """

    plan: Plan
    lines: tuple[CheckedLine, ...]
    measured: tuple[Measured, ...]
    note: str = ""

    def __str__(self) -> str:
        """Return a table, with the lines outside of their intervals below."""
        return "\n".join(filter(None, [self.note, checked_table(self.lines)]))


def check_run(
    run: Program,
    plan: Plan,
    machine: Mapping[str, Any],
    *,
    batch: Any = None,
) -> Check:
    """Train a few steps of a planned run on this machine, with the same batch in each.

    Under ``torchrun`` all its ranks train, otherwise one process. Where these are other ranks than
    planned, they are planned first, with the arguments ``machine`` of ``make_machine``. Logs,
    checkpoints and validation are left out, as for the plan. The first step is not timed.

    Raises:
        ValueError: the run cannot be planned for the ranks of this machine.
    """
    nodes, local = _ranks_here()
    note = ""
    if (plan.machine.nodes, plan.machine.gpus_per_node) != (nodes, local):
        note = (
            f"The plan is of {_count(plan.machine.nodes, plan.machine.gpus_per_node)}, and "
            f"{_count(nodes, local)} trained here: so these are planned, too."
        )
        here = {**machine, "nodes": nodes, "gpus_per_node": local}
        plan = plan_run(run, here, batch=batch, alternatives=False)
    if batch is None:
        _, module, data = run.look()
        batch, _ = find_batch(module, data, run.keeps_data)
    elif isinstance(batch, str):
        batch = parse_batch(batch)
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
    lines, measured = tuple(callback.lines), tuple(callback.measured)
    return Check(plan=plan, lines=lines, measured=measured, note=note)


def _ranks_here() -> tuple[int, int]:
    """Nodes, and ranks of each, that a launcher has started; one of one without it."""
    world, local = (int(os.environ.get(n, 1)) for n in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return max(1, world // local), local


def _count(nodes: int, local: int) -> str:
    ranks = "one rank" if local == 1 else f"{local} ranks"
    return ranks if nodes == 1 else f"{nodes} nodes of {ranks}"
