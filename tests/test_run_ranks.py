"""The harness itself: values come back, failures are named, nothing is left running."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lq_testing import RankError, run_ranks
from lq_testing.ranks import _causes_first


class Box:
    """A type of this file that travels to the ranks and back."""

    def __init__(self, value: int) -> None:
        self.value = value


def _sum_of_ranks(rank: int, world_size: int, offset: int) -> torch.Tensor:
    value = torch.tensor([float(rank + offset)])
    dist.all_reduce(value)
    return value


def _double(rank: int, world_size: int, box: Box) -> Box:
    return Box(2 * box.value + rank)


def _fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("this rank is the culprit")
    dist.barrier()


def _hang_on_one(rank: int, world_size: int, folder: str) -> None:
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))
    if rank == 1:
        time.sleep(1000)
    dist.barrier()


def _die_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _exit_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)


def _read_env(rank: int, world_size: int) -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "LOCAL_WORLD_SIZE", "EXTRA")
    return {name: os.environ.get(name, "") for name in names}


def _read_uninitialized(rank: int, world_size: int) -> tuple[bool, int]:
    return bool(torch.empty(3).isnan().all()), int(torch.empty(3, dtype=torch.uint8).min())


def test_values_come_back_in_rank_order() -> None:
    values = run_ranks(_sum_of_ranks, 3, 10)
    assert [v.item() for v in values] == [33.0, 33.0, 33.0]


def test_types_of_the_test_file_travel() -> None:
    boxes = run_ranks(_double, 2, Box(4), backend=None)
    assert [b.value for b in boxes] == [8, 9]
    assert isinstance(boxes[0], Box)


def test_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(
        RankError, match="(?s)rank 1 of 2 failed first:.*_fail_on_one.*culprit"
    ) as e:
        run_ranks(_fail_on_one, 2)
    assert e.value.rank == 1


def test_hanging_rank_is_named_with_its_stack_and_killed(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="(?s)no answer after 8 s.*rank 1 was here.*_hang_on_one"):
        run_ranks(_hang_on_one, 2, str(tmp_path), timeout=8.0)
    assert time.monotonic() - start < 30
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)


def test_dying_rank_is_named_with_its_signal() -> None:
    with pytest.raises(RankError, match="rank 1 died: killed by SIGKILL") as e:
        run_ranks(_die_on_one, 2)
    assert e.value.rank == 1


@pytest.mark.parametrize(("how", "first"), [("SIGKILL", 1), ("SIGSEGV", 1), ("SIGABRT", 0)])
def test_death_comes_before_lost_connections_unless_a_watchdog_aborted(
    how: str, first: int
) -> None:
    failures = {0: "Traceback\nConnection closed", 1: f"rank 1 died: killed by {how}"}
    assert next(iter(_causes_first(failures))) == first


def test_rank_that_exits_is_named_with_its_code() -> None:
    with pytest.raises(RankError, match="rank 1 died: exit code 7"):
        run_ranks(_exit_on_one, 2, backend=None)  # a rank that still connects would fail too


def test_torchrun_variables_describe_emulated_nodes() -> None:
    env = run_ranks(_read_env, 4, backend=None, torchrun=True, node_size=2, env={"EXTRA": "yes"})
    assert [e["RANK"] for e in env] == ["0", "1", "2", "3"]
    assert [e["LOCAL_RANK"] for e in env] == ["0", "1", "0", "1"]
    assert [e["NODE_RANK"] for e in env] == ["0", "0", "1", "1"]
    assert {e["LOCAL_WORLD_SIZE"] for e in env} == {"2"}
    assert {e["EXTRA"] for e in env} == {"yes"}


def test_environment_of_this_process_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXTRA", "from the test")
    assert run_ranks(_read_env, 1, backend=None)[0]["EXTRA"] == "from the test"


def test_memory_is_poisoned_on_the_ranks_and_here() -> None:
    assert run_ranks(_read_uninitialized, 1, backend=None) == [(True, 0xFF)]
    assert _read_uninitialized(0, 1) == (True, 0xFF)
    assert torch.empty_like(torch.zeros(2)).isnan().all()
    assert torch.zeros(2).new_empty(3).isnan().all()


@pytest.mark.uninitialized_memory_ok
def test_poison_can_be_switched_off() -> None:
    assert not hasattr(torch.empty, "__wrapped__")


def test_closures_are_refused() -> None:
    with pytest.raises(ValueError, match="module level"):
        run_ranks(lambda rank, world_size: None, 1)


def test_node_size_must_divide_world_size() -> None:
    with pytest.raises(ValueError, match="multiple of node_size"):
        run_ranks(_read_env, 4, node_size=3)
