"""Memory by kind, on traces written by hand."""

from types import SimpleNamespace

import pytest
import torch

from lq_lightning.planning.allocator import MIB
from lq_lightning.planning.memory import KINDS, peak_memory
from lq_lightning.planning.trace import (
    SHARDED,
    Allocate,
    Collective,
    Free,
    Mark,
    Operator,
    Storage,
    Trace,
)

MACHINE = SimpleNamespace(
    gpu=SimpleNamespace(context_nbytes=500 * MIB, memory_nbytes=80 << 30), nvlink=True
)
FSDP = "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py"
WORKSPACE = 32 * MIB


class Recorder:
    """Writes a trace."""

    def __init__(self):
        self.trace = Trace(rank=0, world_size=2, gpus_per_node=2)
        self.phase = "setup"

    def allocate(self, mib, shape=(7,), dtype=torch.bfloat16, **options):
        options = {"operator": "aten.empty.default", "source": "", **options}
        storage = Storage(int(mib * MIB), 0, self.phase, shape=shape, dtype=dtype, **options)
        storage.born = len(self.trace.events)
        self.trace.events.append(Allocate(storage))
        return storage

    def free(self, *storages):
        for storage in storages:
            storage.died = len(self.trace.events)
            self.trace.events.append(Free(storage))

    def operator(self, name, *shapes, flops=0, dtype=torch.bfloat16):
        self.trace.events.append(Operator(name, 0, self.phase, flops, 1, 1, dtype, shapes))

    def mark(self, name, step, phase):
        self.phase = phase
        self.trace.events.append(Mark(name, step))


def _train(recorder, steps=2, micro_batches=2):
    """A layer of 64 MiB and a head of 16 x 50, in micro-batches of 4 x 8 tokens."""
    float32 = {"dtype": torch.float32}
    recorder.allocate(128, owner="parameter", **float32)
    recorder.allocate(20, owner="buffer")
    gradient = state = None
    for step in range(steps):
        for batch in range(micro_batches):
            recorder.mark("batch", step, "forward")
            gathered = recorder.allocate(64, source=FSDP)
            saved = recorder.allocate(100, (4, 8, 16), operator="aten.mm.default")
            recorder.operator("aten.mm.default", (32, 16), (16, 64), flops=9)
            temporary = recorder.allocate(50, (4, 8, 64), operator="aten.add.Tensor")
            logits = recorder.allocate(40, (32, 50), operator="aten.mm.default")
            recorder.free(temporary)
            recorder.operator("aten._log_softmax.default", (32, 50))
            log = recorder.allocate(80, (32, 50), operator="aten._log_softmax.default", **float32)
            if batch == 0 and gradient is not None:
                recorder.free(gradient)
            recorder.mark("backward", step, "backward")
            logits_gradient = recorder.allocate(80, (32, 50), operator="aten.mul.Tensor", **float32)
            recorder.free(log, logits)
            whole = recorder.allocate(128, (64, 16), operator="aten.mm.default", **float32)
            recorder.operator("aten.mm.default", (64, 32), (32, 16), flops=9)
            recorder.free(saved, logits_gradient, gathered)
            sent = recorder.allocate(256, source=FSDP, **float32)
            recorder.trace.events.append(
                Collective("reduce_scatter", 256 * MIB, 2, 1, 0, "backward")
            )
            if batch == 0:
                gradient = recorder.allocate(128, source=FSDP, **float32)
            recorder.free(whole, sent)
        recorder.mark("optimizer", step, "optimizer")
        if state is None:
            state = recorder.allocate(256, owner="optimizer state", **float32)
        recorder.free(recorder.allocate(10, operator="aten.mul.Tensor"))
        recorder.mark("stepped", step, "other")
    recorder.mark("end", steps, "other")
    recorder.trace.steps, recorder.trace.microbatches = steps, micro_batches
    return recorder.trace


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_kinds_add_up(micro_batches):
    peak = peak_memory(_train(Recorder(), micro_batches=micro_batches), MACHINE)
    assert list(peak.kinds) == list(KINDS)
    outside = peak.kinds["CUDA and NCCL"] + peak.kinds["fragmentation"]
    assert sum(peak.kinds.values()) == peak.device_nbytes
    assert sum(peak.kinds.values()) - outside == peak.allocated_nbytes
    assert peak.reserved_nbytes == peak.allocated_nbytes + peak.kinds["fragmentation"]
    assert peak.low_nbytes < peak.device_nbytes < peak.high_nbytes
    assert peak.allocated_interval[0] < peak.allocated_nbytes < peak.allocated_interval[1]
    sums = "gradients" if micro_batches == 1 else "gradient sums"
    kinds = {kind: nbytes // MIB for kind, nbytes in peak.kinds.items() if nbytes >= MIB}
    del kinds["CUDA and NCCL"], kinds["fragmentation"]
    # where the input of the reduction and its result are there beside the states
    expected = {"master weights": 128, "weights": 20, "optimizer states": 256, "temporary": 64}
    expected["gradients"] = 128 + 256
    expected[sums] = expected.get(sums, 0) + 128
    assert kinds == expected
    when = "backward of micro-batch 1 in step 2, while `aten.empty` ran"
    assert peak.when == when


def test_peak_in_the_loss():
    recorder = Recorder()
    recorder.mark("batch", 0, "forward")
    recorder.operator("aten.embedding.default", (50, 16), (4, 8))
    recorder.allocate(30, (4, 8, 50), operator="aten._to_copy.default", dtype=torch.float32)
    peak = peak_memory(recorder.trace, MACHINE)
    assert peak.kinds["logits and loss"] == 30 * MIB
    assert peak.when == "forward of micro-batch 1 in step 1, in the loss"
    assert peak.kinds["CUDA and NCCL"] == (500 + 615) * MIB


def test_logits_are_no_weights_where_there_are_as_many_tokens_as_channels():
    recorder = Recorder()
    recorder.mark("batch", 0, "forward")
    recorder.operator("aten.mm.default", (16, 16), (16, 50), flops=9)
    recorder.operator("aten._log_softmax.default", (16, 50))
    recorder.allocate(30, (16, 50), operator="aten._to_copy.default", dtype=torch.float32)
    recorder.allocate(10, (50, 16), operator="aten._to_copy.default")
    recorder.mark("backward", 0, "backward")
    recorder.allocate(40, (16, 50), operator="aten.mul.Tensor", dtype=torch.float32)
    kinds = peak_memory(recorder.trace, MACHINE).kinds
    assert kinds["logits and loss"] == 70 * MIB
    assert kinds["weights"] == 10 * MIB
    assert kinds["gradients"] == 0


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_most_is_of_the_last_step_and_gradients_are_those_of_the_optimizer(micro_batches):
    recorder = Recorder()
    recorder.free(recorder.allocate(500, owner="buffer"))
    most = peak_memory(_train(recorder, micro_batches=micro_batches), MACHINE).most
    assert (most["optimizer states"], most["saved activations"]) == (256 * MIB, 100 * MIB)
    assert most["weights"] == 20 * MIB
    sums = {1: "gradients", 2: "gradient sums"}[micro_batches]
    assert most[sums] == 128 * MIB
    assert most["gradients"] == (128 * MIB if micro_batches == 1 else 0)


def test_nccl_counts_groups_and_peers():
    trace = _train(Recorder())
    before = peak_memory(trace, MACHINE)
    trace.events.append(Collective("all_to_all", 1, 16, 2, 0, "backward"))
    after = peak_memory(trace, MACHINE)
    ring, peers, network = 484, 7 * 384, 460
    added = after.kinds["CUDA and NCCL"] - before.kinds["CUDA and NCCL"]
    assert added == (ring + peers + network) * MIB
    assert after.high_nbytes - after.device_nbytes > before.high_nbytes - before.device_nbytes


def test_pipelines_and_tensor_parallelism_have_communicators_of_their_own():
    def outside(*events):
        trace = Trace(rank=0, world_size=2, gpus_per_node=1, events=list(events))
        return peak_memory(trace, MACHINE).kinds["CUDA and NCCL"] // MIB

    layer, update = (
        Operator(SHARDED, 0, phase, 0, 0, 0, torch.float32, ())
        for phase in ("forward", "optimizer")
    )
    assert outside() == outside(update) == 500 + 615
    assert outside(layer) == 500 + 615 + 484
    assert outside(Collective("send", 1, 2, 2, 0, "forward")) == 500 + 615 + 230 + 930


def test_empty_trace():
    peak = peak_memory(Trace(rank=0, world_size=1, gpus_per_node=1), MACHINE)
    assert (peak.allocated_nbytes, peak.most) == (0, {})
