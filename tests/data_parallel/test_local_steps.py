"""Nodes that take steps alone and are brought together, against DiLoCo's outer step written out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from lq_testing import run_ranks
from lq_testing.local_steps import LR, MOMENTUM, SHAPES, Nodes, first_weights, move_of
from torch import Tensor, nn

from lq_lightning.codecs import CodecSpec, decode, encode


def _reference(name: str, steps: int, codec: CodecSpec | None, dtype: torch.dtype) -> Tensor:
    """The weights of two nodes after some steps, of whole tensors in one process."""
    anchor = first_weights(name).to(dtype).float()
    outer = torch.optim.SGD([anchor], lr=LR, momentum=MOMENTUM, nesterov=True)
    nodes = [anchor.to(dtype) for _ in range(2)]
    for step in range(steps):
        nodes = [w + move_of(name, step, node).to(dtype) for node, w in enumerate(nodes)]
        if step % 2:
            moved = [anchor.to(dtype).float() - w.float() for w in nodes]
            if codec is not None and len(SHAPES[name]) > 1:
                moved = [torch.cat([_coded(p, codec) for p in d.chunk(2)]) for d in moved]
            anchor.grad = moved[0] / 2 + moved[1] / 2
            outer.step()
            nodes = [anchor.to(dtype)] * 2
    return nodes[0]


def _coded(shard: Tensor, codec: CodecSpec) -> Tensor:
    message = encode(codec, shard.reshape(1, -1))
    return decode(codec, message, shard.numel()).view(shard.shape)


# --- on each rank -------------------------------------------------------------------------------


def _outer_steps() -> None:
    bf16 = torch.bfloat16
    for bits, dtype in ((None, torch.float32), (4, torch.float32), (None, bf16), (4, bf16)):
        nodes = Nodes(2, bits, dtype)
        codec = nodes.config.codec()
        for step in range(4):
            nodes.step(step)
            assert nodes.are_alike() == bool(step % 2)
        for name, value in nodes.weights().items():
            expected = _reference(name, 4, codec, dtype)
            exact = {"rtol": 0, "atol": 0} if bits is None else {"rtol": 1e-2, "atol": 1e-6}
            if dtype == torch.float32:
                exact["rtol"] /= 1e4
            torch.testing.assert_close(value, expected, **exact)


def _bytes() -> None:
    """Two nodes send each other all; more of them a share to each and a share of sums to all."""
    for count, slots in ((2, (640, 256)), (4, (1280, 512))):
        nodes = Nodes(count, 4)
        for step in range(2):
            nodes.step(step)
        assert nodes.are_alike()
        codec = nodes.config.codec()
        assert codec is not None
        row = -(-sum(slots) // (128 * count)) * 128  # what a node sums of a bucket
        vector = 4 * 24 * count / 4
        if count == 2:
            coded = 2 * codec.nbytes(row)
        else:
            coded = 3 * codec.nbytes(row) + 3 * codec.nbytes(row)
        assert nodes.outer.sent_nbytes == coded + 2 * (count - 1) / count * vector
        for name, value in nodes.weights().items():
            moves = [move_of(name, s, n) for s in range(2) for n in range(count)]
            mean = torch.stack(moves).sum(dim=0) / count
            error = (value - first_weights(name) - LR * (1 + MOMENTUM) * mean).norm() / mean.norm()
            assert error < (0.2 if len(SHAPES[name]) > 1 else 1e-5)


def _starts() -> None:
    """Nodes that begin with other weights get those of the first, also of what thaws later.

    What is frozen stays where it is, whatever its velocity.
    """
    nodes = Nodes(2, None, start=1.0 + 10 * (dist.get_rank() // 2), frozen="tall")
    for step in range(4):
        if step == 2:
            nodes.model["tall"].requires_grad_(True)
            nodes.model["vector"].requires_grad_(False).grad = None
        nodes.step(step)
    assert nodes.are_alike()
    first = nodes.weights()["vector"] - _reference("vector", 2, None, torch.float32)
    assert first.abs().max() < 1e-6
    moved = (nodes.weights()["tall"] - first_weights("tall")).norm()
    assert 0 < moved < 1


def _states() -> None:
    """A loaded state goes on bit by bit; bf16 weights need their anchors for it.

    Also where sums depend on places in buckets, and with what is frozen while it is loaded.
    """
    fp32, bf16 = torch.float32, torch.bfloat16
    for count, bits, dtype in ((2, 4, fp32), (2, 4, bf16), (4, None, fp32)):
        nodes = Nodes(count, bits, dtype)
        for step in range(3):
            nodes.step(step)
        with pytest.raises(RuntimeError, match="1 steps alone: bring them together"):
            nodes.outer.state()
        with pytest.warns(DeprecationWarning, match="is now called `outer_step`"):
            nodes.outer.bring_together()
        state = nodes.outer.state()
        assert set(state["velocity"]) == set(SHAPES)
        assert set(state["anchor"]) == (set(SHAPES) if dtype == torch.bfloat16 else set())
        saved = {kind: {n: t.clone() for n, t in found.items()} for kind, found in state.items()}
        weights = nodes.local_weights()
        found = []
        for resumed in (False, True):
            if resumed:
                nodes.start_again(weights)
                nodes.model["tall"].requires_grad_(False)
                nodes.outer.load_state(saved)
                nodes.model["tall"].requires_grad_(True)
            for step in (3, 4):
                nodes.step(step)
            found.append(nodes.weights())
        assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def _errors() -> None:
    nodes = Nodes(2, 4)
    nodes.step(0)
    nodes.outer.steps += nodes.node
    before = nodes.weights()
    with pytest.raises(RuntimeError, match="1 to 2 optimizer steps since.*or some ran out of"):
        nodes.outer.outer_step()
    nodes.outer.steps = 1
    if dist.get_rank() == 3:
        with torch.no_grad():
            nodes.model["tall"].to_local()[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="weights of node 1 are not finite"):
        nodes.outer.outer_step()
    if nodes.node == 0:
        assert all(torch.equal(value, before[name]) for name, value in nodes.weights().items())


def _differences() -> None:
    """Nodes that train other parameters are told so on every rank, before anything is mixed up."""
    node = dist.get_rank() // 2
    begins = r"`tall` is new \(float32 \[64, 8\]\) on rank 0 and missing on rank 2.*`requires_grad`"
    for frozen, match in ((["", "tall"][node], begins), (["", "vector"][node], "`vector` is new")):
        nodes = Nodes(2, 4, frozen=frozen)
        with pytest.raises(ValueError, match=match):
            nodes.step(0)
    later = Nodes(2, 4, frozen="tall")
    later.step(0)
    if node == 1:  # only this one goes on with it; the other comes to exchange what it has
        later.model["tall"].requires_grad_(True)
    before = later.weights()
    with pytest.raises(ValueError, match=r"`tall` is missing on rank 0 and new .* on rank 2"):
        later.step(1)
    if node == 1:
        assert all(torch.equal(value, before[name]) for name, value in later.weights().items())
    less = Nodes(2, 4)
    less.step(0)
    less.outer.outer_step()
    less.model["vector"].requires_grad_(node == 0)  # known, and trained by one node alone
    less.step(1)
    with pytest.raises(ValueError, match=r"`vector` is trained .* on rank 0 and missing on rank 2"):
        less.step(2)
    less.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match=r"1 parameter\(s\) .* not in the model"):
        less.step(3)


def _all(rank: int, world_size: int) -> None:
    for check in (_outer_steps, _bytes, _starts, _states, _errors, _differences):
        check()


def test_nodes_are_brought_together() -> None:
    run_ranks(_all, 4)
