"""Local steps of nodes, and outer steps that average their progress (DiLoCo, arXiv:2311.08105).

Every node has a copy of the model, sharded over its ranks. Nodes communicate in outer steps only:
each rank sends the change of its shard to the ranks that hold the same shard in the other nodes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lq_lightning._compat.tensors import local_tensor, to_sharded_dtensor
from lq_lightning._compat.torch import all_gather_flat
from lq_lightning.codecs import CodecSpec, decode_reduce, decode_reduce_encode, encode
from lq_lightning.data_parallel.config import LocalSteps
from lq_lightning.data_parallel.unit import full_precision_reason
from lq_lightning.foundation.agreement import check_same_entries, describe
from lq_lightning.foundation.groups import RankGroups
from lq_lightning.foundation.topology import Topology
from lq_lightning.kernels.checksum import checksums

_BUCKET_NUMEL = 1 << 24  # an outer step takes the memory of one bucket, in fp32


class _Kept(NamedTuple):
    """State of this rank's shard of a parameter, fp32 with the shape of the shard."""

    anchor: Tensor
    velocity: Tensor


class OuterOptimizer:
    """SGD with Nesterov's momentum on the weights that nodes had in common.

    For every trained parameter a rank keeps two tensors of its shard in fp32: the *anchor*, the
    weights of all nodes after the last outer step, and the *velocity* of the outer SGD. That is
    ``8 / node_size`` bytes per parameter and rank. In each :meth:`outer_step`, with the mean ``d``
    over nodes of anchor minus weights::

        velocity = outer_momentum * velocity + d
        anchor = anchor - outer_lr * (d + outer_momentum * velocity)

    and the anchor becomes the weights. All nodes decode the same bytes, so their weights are equal
    in every bit. Weights in bf16 start from the rounded anchor, and ``d`` is the difference to it.

    Anything that writes to weights in between counts as progress of the node.

    ``names`` has the fully qualified names of the parameters of this node's copy. Parameters with
    fewer than ``min_quantized_numel`` elements are sent in fp32, as are 1-D ones.
    """

    def __init__(
        self,
        config: LocalSteps,
        topology: Topology,
        groups: RankGroups,
        *,
        names: Mapping[nn.Parameter, str],
        min_quantized_numel: int,
        device: torch.device,
    ) -> None:
        self.steps = 0  # optimizer steps that nodes have taken since the last outer step
        self.sent_nbytes = 0.0  # by this rank, to other nodes
        self._config = config
        self._topology = topology
        self._groups = groups
        # In the order of names, since modules and optimizers of other nodes may have another one.
        self._names = dict(sorted(names.items(), key=lambda item: item[1]))
        self._min_quantized_numel = min_quantized_numel
        self._device = device
        self._kept: dict[nn.Parameter, _Kept] = {}
        # Parameters trained since the last outer step: its momentum must not move frozen ones.
        self._trained: set[nn.Parameter] = set()

    # --- steps of a node --------------------------------------------------------------------

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Start to track the parameters that an optimizer is about to train for the first time.

        All ranks call it before a step of that optimizer and add one to :attr:`steps` after it,
        even on a node that then skips the step: which parameters are exchanged follows from these
        calls alone, so it is the same on all nodes.

        Raises:
            ValueError: On all ranks: nodes do not begin to train the same parameters. On this one:
                the optimizer has parameters that are not in the model.
        """
        every = {p for group in optimizer.param_groups for p in group["params"]}
        if not every <= self._names.keys():
            raise ValueError(
                f"`{type(optimizer).__name__}` trains {len(every - self._names.keys())} "
                "parameter(s) that are not in the model, so that no node would get what the others "
                "learn of them: register them in the LightningModule before `fit`."
            )
        trained = [p for p in self._names if p in every and p.requires_grad]
        self._trained.update(trained)
        new = [p for p in trained if p not in self._kept]
        if new:
            self._check("new", new)
            weights = [local_tensor(p) for p in new]
            start_alike(weights, self._groups.inter, self._device)
            for parameter, weight in zip(new, weights, strict=True):
                self._kept[parameter] = _new(weight)

    def kept(self, parameter: nn.Parameter) -> tuple[Tensor, ...]:
        """Anchor and velocity of a parameter's shard, once it is trained."""
        return self._kept.get(parameter, ())

    def forget(self) -> None:
        """Start from the present weights, which were loaded on all nodes."""
        self._kept.clear()
        self._trained.clear()
        self.steps = 0

    # --- the exchange -----------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether nodes have taken all their local steps."""
        return self.steps >= self._config.every

    @torch.no_grad()
    def outer_step(self) -> None:
        """Average the progress of all nodes and let them start from equal weights.

        All ranks call it after equally many steps. Nothing else may use the weights meanwhile.

        Raises:
            RuntimeError: On all ranks, before anything is exchanged: weights of a node are not
                finite, or nodes have taken different numbers of steps.
            ValueError: Likewise, nodes have trained different parameters.
        """
        self._check_steps()
        for codec, parameters in self._buckets():
            self._take_step(codec, parameters)
        self._trained.clear()
        self.steps = 0

    def bring_together(self) -> None:
        """Deprecated name of :meth:`outer_step`."""
        warnings.warn(
            "`bring_together` is now called `outer_step`; the old name will be removed in the next "
            "release",
            DeprecationWarning,
            stacklevel=2,
        )
        self.outer_step()

    def _check(
        self, state: str, parameters: Iterable[nn.Parameter], bad: bool = False
    ) -> list[int]:
        """Compare nodes; one in an outer step and one in ``begin_step`` meet here and differ."""
        nodes = self._topology.num_nodes
        votes = [0] * nodes
        votes[self._topology.node] = int(bad)
        return check_same_entries(
            {self._names[p]: f"{state} ({describe(p)})" for p in parameters},
            self._groups.every,
            self._device,
            differ="nodes do not train the same parameters",
            advice="With `local_steps` all nodes train the same ones, from the same step on: give "
            "optimizers the same parameters and set `requires_grad` alike on every rank (or, if "
            "nodes run out of batches at different times, give every rank equally many).",
            votes=[*votes, self.steps, -self.steps],
        )

    def _check_steps(self) -> None:
        weights = [local_tensor(p) for p in self._kept]
        largest = torch.nn.utils.get_total_norm([w for w in weights if w.numel()], float("inf"))
        trained = [p for p in self._names if p in self._trained]
        *bad, most, least = self._check("trained", trained, bool(~torch.isfinite(largest)))
        if most != -least:
            raise RuntimeError(
                f"nodes have taken {-least} to {most} optimizer steps since they were brought "
                "together, or some ran out of batches. All of them need the same number: give "
                "every rank equally many batches."
            )
        if any(bad):
            found = ", ".join(str(node) for node, flag in enumerate(bad) if flag)
            raise RuntimeError(
                f"the weights of node {found} are not finite any more after {self.steps} steps of "
                "their own. Nothing was exchanged, since all nodes would get them. Resume from the "
                "last checkpoint, with a lower learning rate, `gradient_clip_val`, or "
                "`skip_nonfinite_steps=True`, with which a node leaves out such a step."
            )

    def _buckets(self) -> Iterator[tuple[CodecSpec | None, list[nn.Parameter]]]:
        """Yield parameters that are sent together, and in which codec (None: in fp32).

        The same on all ranks with these shards, in the order of names: a sum in fp32 depends on the
        place in its bucket.
        """
        open_: dict[CodecSpec | None, list[nn.Parameter]] = {}
        room: dict[CodecSpec | None, int] = {}
        for parameter in self._names:
            numel = local_tensor(parameter).numel()
            if numel == 0 or parameter not in self._trained:
                continue
            codec = self._codec_of(parameter, numel)
            if codec in open_ and room[codec] < numel:
                yield codec, open_.pop(codec)
            if codec not in open_:
                open_[codec], room[codec] = [], _BUCKET_NUMEL
            open_[codec].append(parameter)
            room[codec] -= numel
        yield from open_.items()

    def _codec_of(self, parameter: nn.Parameter, numel: int) -> CodecSpec | None:
        codec, whole = self._config.codec(), parameter.numel()
        least = self._min_quantized_numel
        exact = full_precision_reason(parameter.ndim, whole, torch.float32, least)
        return None if codec is None or exact or codec.nbytes(numel) >= 4 * numel else codec

    def _take_step(self, codec: CodecSpec | None, parameters: list[nn.Parameter]) -> None:
        weights = [local_tensor(p) for p in parameters]
        kept = [self._kept[p] for p in parameters]
        # each parameter begins a group, and each node gets the sum of equally many groups
        multiple = 1 if codec is None else codec.block_multiple
        sizes = [_padded(w.numel(), multiple) for w in weights]
        padding = _padded(sum(sizes), multiple * self._topology.num_nodes) - sum(sizes)
        flat = torch.zeros(sum(sizes) + padding, device=self._device)
        places = [
            place[: w.numel()].view(w.shape)
            for place, w in zip(torch.split(flat, [*sizes, padding]), weights, strict=False)
        ]
        for place, weight, (anchor, _) in zip(places, weights, kept, strict=True):
            place.copy_(anchor.to(weight.dtype))
            place.sub_(weight.to(self._device))
        if codec is None:
            self._average_exactly(flat)
        else:
            self._average_coded(flat.view(self._topology.num_nodes, -1), codec)
        lr, momentum = self._config.outer_lr, self._config.outer_momentum
        for place, weight, (anchor, velocity) in zip(places, weights, kept, strict=True):
            mean = place.to(anchor.device)
            velocity.mul_(momentum).add_(mean)
            anchor.sub_(mean.add(velocity, alpha=momentum), alpha=lr)
            weight.copy_(anchor)

    def _average_exactly(self, flat: Tensor) -> None:
        nodes = self._topology.num_nodes
        dist.all_reduce(flat.div_(nodes), group=self._groups.inter)
        self.sent_nbytes += 2 * (nodes - 1) / nodes * flat.numel() * flat.itemsize

    def _average_coded(self, rows: Tensor, codec: CodecSpec) -> None:
        """Replace ``[N, n]`` by the mean over N nodes, of which each sums one row.

        Two nodes exchange everything instead: as many bytes, and nothing is rounded twice.
        """
        nodes, numel = rows.shape
        messages = encode(codec, rows)
        if nodes > 2:
            received = torch.empty_like(messages)
            dist.all_to_all_single(received, messages, group=self._groups.inter)
            self.sent_nbytes += (nodes - 1) * messages.shape[1]
            messages = decode_reduce_encode(codec, received.unsqueeze(1), numel, codec)
        every = messages.new_empty(nodes, *messages.shape)
        all_gather_flat(every.view(-1), messages.view(-1), self._groups.inter)
        self.sent_nbytes += (nodes - 1) * messages.numel()
        if nodes > 2:
            every = every.transpose(0, 1)
        decode_reduce(codec, every, numel, scale=1 / nodes, out=rows)

    # --- saved state ------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, DTensor]]:
        """Velocities and, where weights cannot hold them, anchors, sharded like the parameters.

        After an outer step anchors of fp32 weights are the weights, and all nodes are equal.

        Raises:
            RuntimeError: Nodes have taken steps since the last outer step.
        """
        if self.steps:
            raise RuntimeError(
                f"nodes have taken {self.steps} steps alone: bring them together before saving"
            )
        found: dict[str, dict[str, DTensor]] = {"velocity": {}, "anchor": {}}
        for parameter, (anchor, velocity) in self._kept.items():
            name = self._names[parameter]
            found["velocity"][name] = to_sharded_dtensor(velocity.view(-1), parameter)
            if parameter.dtype != torch.float32:
                found["anchor"][name] = to_sharded_dtensor(anchor.view(-1), parameter)
        return found

    def load_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue from the result of :meth:`state`, possibly resharded.

        Call after the weights are loaded. Parameters without a velocity start with zero.
        """
        self.forget()
        velocities, anchors = state.get("velocity", {}), state.get("anchor", {})
        for parameter, name in self._names.items():
            if name in velocities:  # frozen parameters, too: they may be trained again
                kept = self._kept[parameter] = _new(local_tensor(parameter))
                kept.velocity.copy_(local_tensor(velocities[name]))
                if name in anchors:
                    kept.anchor.copy_(local_tensor(anchors[name]))


def _new(weight: Tensor) -> _Kept:
    anchor = weight.detach().to(torch.float32, copy=True)
    return _Kept(anchor, torch.zeros_like(anchor))


def _padded(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


@torch.no_grad()
def start_alike(tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    """Broadcast tensors from the first rank of a group, unless checksums are equal already.

    Args:
        tensors: Tensors of the same shapes and dtypes on every rank.
        group: Process group, of which every rank must call this.
        device: Device from which the group sends.
    """
    some = [t for t in tensors if t.numel()]
    if not some:
        return
    sums = checksums([t.contiguous() for t in some]).to(device)
    extremes = torch.cat((sums, ~sums))  # the least of all is what ~ makes of the largest ~
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    most, least = extremes.chunk(2)
    if torch.equal(most, ~least):
        return
    for tensor in some:
        staged = tensor.to(device, copy=True, memory_format=torch.contiguous_format)
        dist.broadcast(staged.view(-1).view(torch.uint8), group=group, group_src=0)
        tensor.copy_(staged)
