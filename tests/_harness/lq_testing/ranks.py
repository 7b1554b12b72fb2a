"""Run a function on several ranks, each in its own process, and bring back what they return."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# Loaded once by the fork server, so that a rank starts in milliseconds instead of seconds; what
# test files import takes as long as what most of their ranks do. What reads the environment on
# import (`TRITON_INTERPRET`) must be the same for all ranks.
_PRELOAD = [
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.testing._internal.distributed.fake_pg",
    "lightning.pytorch",
    "lightning.pytorch.cli",
    "lq_lightning",
    "pytest",
    "hypothesis",
]
# These ask for GPUs on import where there are some, after which no child may use one.
_PRELOAD_WITHOUT_GPUS = [
    "torch._functorch.aot_autograd",  # what `wait_before_compiled` imports
    "torch.distributed.pipelining.schedules",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
]
# Set for tests whose ranks share GPUs: NCCL, which refuses two ranks of one host on one GPU, then
# takes each for a host of its own.
SHARED_GPUS = "LQ_RANKS_SHARE_GPUS"
# After a rank has failed the others usually follow (connection reset); wait this long to hear why.
_GRACE_S = 2.0
_STACK_WAIT_S = 0.5
_DIED = " died: "


class RankError(RuntimeError):
    """A rank raised, died or did not finish in time.

    ``rank`` is the first rank that failed (the lowest unfinished one after a timeout), ``failures``
    has what each failed rank reported, in the order in which they failed.
    """

    def __init__(self, message: str, rank: int, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.rank = rank
        self.failures = failures


@dataclass(frozen=True, kw_only=True)
class _Job:
    """Work of a child; only builtins, so that it unpickles before anything is imported."""

    module: str
    file: str
    qualname: str
    payload: bytes
    rank: int
    world_size: int
    backend: str | None
    store: str
    stack_file: str
    timeout_s: float
    env: dict[str, str]
    poison: bool


@dataclass(kw_only=True)
class _Rank:
    rank: int
    process: BaseProcess
    connection: Connection
    stack_file: str
    done: bool = False
    value: Any = None


def free_port() -> int:
    """Return a TCP port on localhost that was free a moment ago.

    None of those that Linux gives to connections (32768 and above), as NCCL opens many meanwhile.
    """
    while True:
        port = secrets.randbelow(12_000) + 20_000
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("", port))
            return port


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str | None = "gloo",
    timeout: float = 90.0,
    env: Mapping[str, str] | None = None,
    node_size: int | None = None,
    torchrun: bool = False,
    poison: bool = True,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on ``world_size`` processes; return values by rank.

    Args:
        fn: Module-level function (of a test file, say); closures and lambdas cannot travel.
        world_size: Number of processes.
        args: Picklable arguments; CPU tensors are fine.
        backend: ``"gloo"`` or ``"nccl"`` (device = local rank): the default process group is made
            over a file store before ``fn`` and destroyed after it. ``None``: no process group (for
            code that makes its own, such as a Trainer).
        timeout: Seconds for everything; also the process group's timeout.
        env: Variables on top of this process's environment (same on all ranks).
        node_size: Ranks per emulated node, for ``torchrun``'s variables; None = all on one node.
        torchrun: Set the variables that torchrun sets, which makes Lightning use its torchelastic
            environment. Usually together with ``backend=None``.
        poison: Fill uninitialised memory on the ranks too.

    Raises:
        RankError: with the first failing rank's traceback, the signal that killed it, or, after
            ``timeout`` seconds, the stacks of the ranks that were still running. All ranks are
            gone when this returns or raises.
        ValueError: ``fn`` cannot be found by name in a new process, or ``node_size`` does not
            divide ``world_size``.
    """
    import torch

    _check_arguments(fn, world_size, node_size)
    shares_gpus = SHARED_GPUS in os.environ
    if shares_gpus:
        node_size = 1
    context: Any = multiprocessing.get_context("forkserver")
    gpus = torch.cuda.is_available()
    context.set_forkserver_preload([*_PRELOAD, *([] if gpus else _PRELOAD_WITHOUT_GPUS)])
    port = free_port() if torchrun else 0
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="lq_ranks_") as scratch:
        try:
            for rank in range(world_size):
                rank_env = {**os.environ, **(env or {})}
                if shares_gpus:
                    rank_env |= _shared_gpu_env(rank)
                if torchrun:
                    rank_env |= _torchrun_env(rank, world_size, node_size or world_size, port)
                job = _Job(
                    module=fn.__module__,
                    file=os.path.abspath(fn.__code__.co_filename),
                    qualname=fn.__qualname__,
                    payload=pickle.dumps(args),
                    rank=rank,
                    world_size=world_size,
                    backend=backend,
                    store=str(Path(scratch, "store")),
                    stack_file=str(Path(scratch, f"stack{rank}")),
                    timeout_s=timeout,
                    env=rank_env,
                    poison=poison,
                )
                ranks.append(_start(context, job))
            return _collect(ranks, timeout)
        finally:
            _kill(ranks)


def _check_arguments(fn: Callable[..., Any], world_size: int, node_size: int | None) -> None:
    if "<" in fn.__qualname__ or not isinstance(fn, types.FunctionType):
        raise ValueError(
            f"run_ranks needs a function defined at module level, got {fn!r}; "
            "move it out of the test and pass what it needs as arguments"
        )
    if world_size < 1 or (node_size is not None and world_size % node_size):
        raise ValueError(
            "world_size must be positive and a multiple of node_size, "
            f"got world_size={world_size}, node_size={node_size}"
        )


def _torchrun_env(rank: int, world_size: int, node_size: int, port: int) -> dict[str, str]:
    node = str(rank // node_size)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % node_size),
        "LOCAL_WORLD_SIZE": str(node_size),
        "GROUP_RANK": node,
        "NODE_RANK": node,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "run_ranks",
    }


def _shared_gpu_env(rank: int) -> dict[str, str]:
    import torch

    return {
        "CUDA_VISIBLE_DEVICES": str(rank % torch.cuda.device_count()),
        "LOCAL_RANK": "0",
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
    }


# ---------------------------------------------------------------------------------------- parent


def _start(context: Any, job: _Job) -> _Rank:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(job, sender), daemon=True, name=f"rank{job.rank}")
    process.start()
    sender.close()  # so that a dead child reads as end of file
    return _Rank(rank=job.rank, process=process, connection=receiver, stack_file=job.stack_file)


def _collect(ranks: list[_Rank], timeout: float) -> list[Any]:
    deadline, failures = time.monotonic() + timeout, dict[int, str]()
    while pending := [r for r in ranks if not r.done]:
        remaining = deadline - time.monotonic()
        ready = set(wait([r.connection for r in pending], max(remaining, 0.0)))
        if not ready:
            break
        first_failure = not failures
        messages = sorted(_receive_all(pending, ready), key=lambda message: message[0])
        failures |= {rank: failure for _, rank, failure in messages if failure is not None}
        if failures and first_failure:
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    if failures:
        raise _failure_error(_causes_first(failures), len(ranks))
    if pending:
        raise _timeout_error(pending, len(ranks), timeout)
    return [r.value for r in ranks]


def _receive_all(pending: list[_Rank], ready: set[Any]) -> list[tuple[float, int, str | None]]:
    """Read each ready rank's message; a dead rank sorts first, since it cannot tell its time."""
    messages: list[tuple[float, int, str | None]] = []
    for r in pending:
        if r.connection not in ready:
            continue
        r.done = True
        try:
            ok, when, content = pickle.loads(r.connection.recv_bytes())
        except EOFError:
            r.process.join(5.0)
            messages.append((0.0, r.rank, f"rank {r.rank}{_DIED}{_exit(r.process.exitcode)}"))
            continue
        r.value = pickle.loads(content) if ok else None
        messages.append((when, r.rank, None if ok else content))
    return messages


def _causes_first(failures: dict[int, str]) -> dict[int, str]:
    """Put ranks that died in front: their peers may notice the lost connection sooner than we do.

    Not those that aborted: a collective's watchdog does that when another rank is to blame.
    """
    died = {rank for rank, text in failures.items() if _DIED in text.splitlines()[0]}
    died -= {rank for rank in died if "SIGABRT" in failures[rank]}
    return {rank: failures[rank] for rank in sorted(failures, key=lambda rank: rank not in died)}


def _exit(code: int | None) -> str:
    if code is None:
        return "still exiting"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}, without returning"


def _failure_error(failures: dict[int, str], world_size: int) -> RankError:
    first = next(iter(failures))
    lines = [f"rank {first} of {world_size} failed first:", "", failures[first].rstrip()]
    for rank, text in failures.items():
        if rank != first:
            lines += ["", f"then rank {rank}: {text.rstrip().splitlines()[-1]}"]
    return RankError("\n".join(lines), first, failures)


def _timeout_error(pending: list[_Rank], world_size: int, timeout: float) -> RankError:
    for r in pending:
        with contextlib.suppress(ProcessLookupError):
            os.kill(r.process.pid or 0, signal.SIGUSR1)
    time.sleep(_STACK_WAIT_S)
    stacks = {}
    for r in pending:
        path = Path(r.stack_file)
        stack = path.read_text() if path.exists() else ""
        stacks[r.rank] = stack or "no stack: it had not started, or is stuck outside Python"
    names = ", ".join(str(r.rank) for r in pending)
    text = [f"no answer after {timeout:g} s from rank {names} of {world_size}"]
    text += [f"\nrank {rank} was here:\n{stack.rstrip()}" for rank, stack in stacks.items()]
    return RankError("\n".join(text), pending[0].rank, stacks)


def _kill(ranks: list[_Rank]) -> None:
    for r in ranks:
        if r.done:
            r.process.join(1.0)  # it has answered and is about to leave by itself
        if r.process.is_alive():
            r.process.kill()
    for r in ranks:
        r.process.join()
        r.connection.close()


# ----------------------------------------------------------------------------------------- child


def _main(job: _Job, sender: Connection) -> None:
    """Entry point of a rank: run, send one message, leave without running exit handlers."""
    gc.freeze()  # one collection of what the fork server loaded takes longer than most tests
    gc.set_threshold(10_000)  # by default a rank spends 3 to 9% of its time on collections
    os.environ.clear()
    os.environ.update(job.env)
    if job.backend == "gloo":  # FSDP2 without a mesh would take a GPU that it sees
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with open(job.stack_file, "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
        try:
            message = (True, time.monotonic(), pickle.dumps(_run(job)))
        except BaseException:
            message = (False, time.monotonic(), traceback.format_exc())
        sender.send_bytes(pickle.dumps(message))
        sender.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if message[0] else 1)


def _run(job: _Job) -> Any:
    import torch
    import torch.distributed as dist

    from lq_testing.poison import poison_uninitialized_memory

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank_zero = sys.modules.get("lightning_utilities.core.rank_zero")
    if rank_zero is not None and "RANK" in job.env:
        # Lightning reads RANK when it is imported, which the fork server did without one.
        rank_zero.rank_zero_only.rank = int(job.env["RANK"])
    fn = _load(job)
    args = pickle.loads(job.payload)
    with contextlib.ExitStack() as stack:
        if job.poison:
            stack.enter_context(poison_uninitialized_memory())
        if job.backend is not None:
            if job.backend == "nccl":
                torch.cuda.set_device(int(job.env.get("LOCAL_RANK", job.rank)))
            store = dist.FileStore(job.store, job.world_size)
            dist.init_process_group(
                job.backend,
                store=store,
                rank=job.rank,
                world_size=job.world_size,
                # after the harness, which shows where each rank is
                timeout=timedelta(seconds=job.timeout_s + 10),
            )
        value = fn(job.rank, job.world_size, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        return value


def _load(job: _Job) -> Callable[..., Any]:
    """Find the function, from the very file it was defined in, under its module's name.

    pytest's importlib mode gives test files names that are not always importable.
    """
    module: types.ModuleType | None = None
    with contextlib.suppress(ModuleNotFoundError):
        module = importlib.import_module(job.module)
    if module is None or os.path.abspath(module.__file__ or "") != job.file:
        spec = importlib.util.spec_from_file_location(job.module, job.file)
        if spec is None or spec.loader is None:
            raise RuntimeError(f"cannot load {job.module} from {job.file}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[job.module] = module
        spec.loader.exec_module(module)
    target: Any = module
    for part in job.qualname.split("."):
        target = getattr(target, part)
    return target  # type: ignore[no-any-return]
