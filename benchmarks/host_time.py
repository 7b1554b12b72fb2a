"""Host time of training steps, and of one unit's exchanges in them, without a GPU or a network.

A GPT with the layers of a real one, but so narrow that its values cost no time, takes training
steps on one rank of a world whose other ranks do not exist (torch's "fake" backend). CPU tensors go
the way of CUDA tensors: through the operators to the launchers of the Triton kernels, compiled for
Hopper, whose launches end in front of the driver; streams do nothing. So Python, Triton and torch
are timed, without the driver. `FSDP2` is measured in the same run, as the floor.

Times are thread time, the least of many steps; times of parts are sums over a step, per unit. A
loop around one call is faster: in a step every call finds the processor's caches filled by others.

    python benchmarks/host_time.py --nodes 2 --gpus 1 --json benchmarks/results/host_time.json
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

if os.environ.get("TRITON_INTERPRET") != "1":  # as in tests, where launches are left out
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

import torch
import torch.distributed as dist
from common import argument_parser, table, write_report
from gpt import GPT, GPTConfig
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from lq_lightning.codecs import spec as codecs
from lq_lightning.data_parallel import (
    GradientQuantization,
    Topology,
    WeightQuantization,
    quantize_communication,
    replica,
)
from lq_lightning.data_parallel.communication import ExchangeSchedule
from lq_lightning.data_parallel.reduce_scatter import TwoLevelReduceScatter
from lq_lightning.foundation import streams
from lq_lightning.kernels.message import operators

PARTS: dict[str, tuple[type, str]] = {
    "reductions": (TwoLevelReduceScatter, "__call__"),
    "exchanges": (ExchangeSchedule, "run"),
}
KERNELS = ("quantize", "dequantize", "requantize")


def launched(name: str, key: Hashable, out: Tensor, *arguments: Any) -> None:
    """Do for a CPU tensor what an operator does for a CUDA tensor."""
    kernels = import_module("lq_lightning.kernels.message.triton_kernels")
    operators.cache_call(key, (), getattr(kernels, f"launch_{name}")(*arguments))


class Launcher:
    """Replaces Triton's launcher of compiled kernels: counts launches, and launches nothing."""

    count = 0

    def __init__(self, source: Any, metadata: Any) -> None: ...

    def __call__(self, *arguments: Any) -> None:
        """Count a launch."""
        Launcher.count += 1


def hopper() -> Any:
    """Return a driver of Triton that compiles for Hopper (sm_90) and has no device."""
    properties = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}
    utilities = SimpleNamespace(
        load_binary=lambda *_: (1, 1, 32, 0, 1024),  # module, function, registers, spills, threads
        unload_module=lambda *_: None,
        get_device_properties=lambda device: properties,
    )
    return SimpleNamespace(
        launcher_cls=Launcher,
        utils=utilities,
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_active_torch_device=lambda: torch.device("cpu"),
        get_device_capability=lambda device=0: (9, 0),
        map_python_to_cpp_type=lambda name: name,
        allocate_default_profile_scratch=lambda *_: None,
    )


def no_stream() -> Any:
    """Return a stand-in for all CUDA streams and their events, which never waits."""
    stream = SimpleNamespace(**dict.fromkeys(("wait_event", "wait_stream"), lambda _: None))
    stream.synchronize = lambda: None
    stream.record_event = lambda event=None: stream
    return stream


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Let codecs take CPU tensors the way of CUDA tensors; without launches in the interpreter."""
    with ExitStack() as stack:
        if os.environ.get("TRITON_INTERPRET") == "1":
            nothing = dict.fromkeys((f"{name}_out" for name in KERNELS), lambda *_: None)
            stack.enter_context(mock.patch.multiple(codecs, **nothing))
            sums: Callable[..., Tensor] = lambda tensors: torch.zeros(len(tensors)).long()  # noqa: E731
        else:
            driver.set_active(hopper())
            stack.enter_context(mock.patch.object(operators, "_compute", launched))
            plain = lambda tensor: type(tensor) is Tensor  # noqa: E731
            stack.enter_context(mock.patch.object(codecs, "_may_relaunch", plain))
            sums = import_module("lq_lightning.kernels.checksum.triton_kernels").launch_checksums
        stack.enter_context(mock.patch.object(replica, "checksums", sums))
        nowhere = no_stream()
        for name, value in {
            "has_streams": lambda device: True,
            "current_stream": lambda: nowhere,
            "new_stream": lambda: nowhere,
            "on_stream": lambda stream: nullcontext(),
            "record_use": lambda tensor: None,
        }.items():
            stack.enter_context(mock.patch.object(streams, name, value))
        yield


@contextmanager
def timed_parts(spent: dict[str, float]) -> Iterator[None]:
    """Add up the time of each part while this is entered."""

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*arguments, **options)
            finally:
                spent[name] = spent.get(name, 0.0) + time.thread_time() - start

        return wrapper

    with ExitStack() as stack:
        for name, (owner, method) in PARTS.items():
            wrapper = timed(name, getattr(owner, method))
            stack.enter_context(mock.patch.object(owner, method, wrapper))
        yield


class Steps:
    """Training steps of one variant.

    Args:
        config: Sizes of the model.
        nodes: In the world.
        gpus: Ranks of a node.
        quantized: Whether collectives are quantized.
    """

    def __init__(self, config: GPTConfig, nodes: int, gpus: int, quantized: bool) -> None:
        torch.manual_seed(0)
        self.model = GPT(config)
        mesh = init_device_mesh("cpu", (nodes * gpus,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.units = len(self.model.blocks) + 1
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        if quantized:
            communication = quantize_communication(
                self.model,
                weights=WeightQuantization(),
                gradients=GradientQuantization(),
                topology=Topology.of(mesh, node_size=gpus),
            )
            communication.register_optimizer(self.optimizer)
        self.tokens = torch.zeros(1, config.seq, dtype=torch.int64)

    def take(self) -> tuple[float, float, float]:
        """Take one step; return the seconds of forward, backward and update."""
        times = [time.thread_time()]
        loss = self.model(self.tokens)
        times.append(time.thread_time())
        loss.backward()
        times.append(time.thread_time())
        self.optimizer.step()
        times.append(time.thread_time())
        self.optimizer.zero_grad()
        forward, backward, update = (b - a for a, b in zip(times, times[1:], strict=False))
        return forward, backward, update


def measure(steps: Steps, repeats: int) -> dict[str, Any]:
    """Take steps, and return the least time of each phase and part."""
    for _ in range(3):
        steps.take()
    best, parts, launches = [float("inf")] * 4, {}, Launcher.count
    for _ in range(repeats):
        times = steps.take()
        best = [min(pair) for pair in zip(best, (*times, sum(times)), strict=True)]
    launches = Launcher.count - launches
    for _ in range(repeats):
        spent: dict[str, float] = {}
        with timed_parts(spent):
            steps.take()
        for part, seconds in spent.items():
            parts[part] = min(parts.get(part, float("inf")), 1e6 * seconds / steps.units)
    names = ("forward_ms", "backward_ms", "update_ms", "step_ms")
    found: dict[str, Any] = {n: 1e3 * seconds for n, seconds in zip(names, best, strict=True)}
    return found | {"launches": launches / repeats, "us_per_unit": parts}


def main() -> None:
    """Measure FSDP2 and quantized communication."""
    parser = argument_parser(__doc__)
    sizes = {"nodes": 2, "gpus": 1, "layers": 12, "hidden": 64, "repeats": 60}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = GPTConfig(layers=args.layers, hidden=args.hidden, heads=1, seq=2, vocab=256)
    world = args.nodes * args.gpus
    dist.init_process_group("fake", store=FakeStore(), rank=world // 2, world_size=world)
    rows = []
    with pretended_gpu():
        for name in ("fsdp2", "quantized"):
            steps = Steps(config, args.nodes, args.gpus, name == "quantized")
            rows.append({"variant": name} | measure(steps, args.repeats))
    dist.destroy_process_group()
    header = ["variant", "forward ms", "backward ms", "update ms", "step ms", "launches"]
    header += [f"{part} us/unit" for part in PARTS]
    lines = []
    for row in rows:
        times = [f"{row[f'{name}_ms']:.2f}" for name in ("forward", "backward", "update", "step")]
        parts = [f"{row['us_per_unit'][p]:.0f}" if row["us_per_unit"] else "-" for p in PARTS]
        lines.append([row["variant"], *times, f"{row['launches']:.0f}", *parts])
    print(table(lines, header))
    write_report(args.json, "host_time", {"rows": rows})


if __name__ == "__main__":
    main()
