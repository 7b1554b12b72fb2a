"""Local steps of nodes, and outer steps that average their progress (DiLoCo, arXiv:2311.08105).

Every node has a copy of the model, sharded over its ranks. Nodes communicate in outer steps only:
each rank sends the change of its shard to the ranks that hold the same shard in the other nodes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lq_lightning._compat.tensors import local_tensor, to_sharded_dtensor
from lq_lightning.codecs import CodecSpec
from lq_lightning.data_parallel.config import LocalSteps
from lq_lightning.data_parallel.node_mean import NodeMean, Transfer
from lq_lightning.data_parallel.unit import full_precision_reason
from lq_lightning.foundation import streams
from lq_lightning.foundation.agreement import begin_check, describe
from lq_lightning.foundation.groups import RankGroups, distrust_groups
from lq_lightning.foundation.streams import MaxReduction, StreamStage
from lq_lightning.foundation.topology import Topology
from lq_lightning.kernels.checksum import checksums

_BUCKET_NUMEL = 1 << 24  # an outer step takes the memory of one bucket, in fp32


class _Kept(NamedTuple):
    """State of this rank's shard of a parameter, fp32 with the shape of the shard."""

    anchor: Tensor
    velocity: Tensor


class Bucket(NamedTuple):
    """Parameters that are sent together, and in which codec (None: in fp32)."""

    codec: CodecSpec | None
    parameters: tuple[nn.Parameter, ...]

    @property
    def sizes(self) -> list[int]:
        """Elements of each: with codes, every parameter begins a group."""
        multiple = 1 if self.codec is None else self.codec.block_multiple
        return [_padded(local_tensor(p).numel(), multiple) for p in self.parameters]

    def numel(self, num_nodes: int) -> int:
        """Elements of all, of which each node gets the sum of equally many groups."""
        multiple = 1 if self.codec is None else self.codec.block_multiple
        return _padded(sum(self.sizes), multiple * num_nodes)

    def places(self, flat: Tensor) -> Iterator[tuple[Tensor, nn.Parameter, Tensor]]:
        """Yield each place in a flat tensor with its parameter and this rank's shard of it."""
        start = 0
        for parameter, size in zip(self.parameters, self.sizes, strict=True):
            weight = local_tensor(parameter)
            yield flat[start : start + weight.numel()].view(weight.shape), parameter, weight
            start += size


class _Flight(NamedTuple):
    """A fragment under way."""

    check: Callable[[], None]  # raises on all ranks if nodes do not match
    halfway: int  # step at which what has arrived is passed on
    landing: int  # step at which the mean is merged
    parts: list[tuple[Bucket, Transfer, list[Tensor]]]  # with the weights that were sent
    trained: list[nn.Parameter]  # its parameters that are merged


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

    With fragments, each has its own cycle of ``every`` steps, and its exchange is an outer step of
    its parameters alone. With a delay, ``d`` is the difference when a fragment is sent, and the
    node's progress since then is kept (arXiv:2501.18512, where the weights become a weighted mean
    of the node's own and the anchor)::

        weights = anchor + (weights - weights when they were sent)

    so that each step of a node is in one ``d``. Only an :meth:`outer_step` makes nodes equal then.

    ``names`` has the fully qualified names of the parameters of this node's copy, ``units`` those
    of modules that are not divided between fragments; too few for them are refused. Parameters
    with fewer than ``min_quantized_numel`` elements are sent in fp32, as are 1-D ones.
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
        units: Iterable[str] = (),
    ) -> None:
        self.steps = 0  # optimizer steps that nodes have taken since the last outer step of all
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
        # Of which nodes know of each other that they train them: what flights have on board.
        self._agreed: set[nn.Parameter] = set()
        self._mean = NodeMean(topology.num_nodes, groups.inter, feedback=config.error_feedback)
        self._fragments = deal_out(self._names, units, config.fragments)
        self._flight: _Flight | None = None
        self._stage = StreamStage() if streams.has_streams(device) else None
        self._votes = MaxReduction(device, torch.int64)

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
            self._begin_check("new", new)()
            self._start_alike([local_tensor(p) for p in new])
            for parameter in new:
                self._kept[parameter] = _new(local_tensor(parameter))
            self._agreed.update(new)

    def _start_alike(self, weights: Sequence[Tensor]) -> None:
        start_alike(weights, self._groups.inter, self._device)

    def kept(self, parameter: nn.Parameter) -> tuple[Tensor, ...]:
        """Anchor and velocity of a parameter's shard, once it is trained."""
        return self._kept.get(parameter, ())

    @property
    def sent_nbytes(self) -> float:
        """Bytes that this rank has sent to other nodes."""
        return self._mean.sent_nbytes

    def forget(self) -> None:
        """Start from the present weights, which were loaded on all nodes."""
        self._kept.clear()
        self._trained.clear()
        self._agreed.clear()
        self._mean.forget_errors()
        self._flight = None
        self.steps = 0

    # --- the exchange -----------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether :meth:`exchange` has something to do after this step."""
        flight = self._flight
        if flight is not None and self.steps in (flight.halfway, flight.landing):
            return True
        return self._due_fragment() is not None

    def _due_fragment(self) -> int | None:
        """Number of the fragment to send after this step: after the last one, every cycle ends."""
        every, count = self._config.every, self._config.fragments
        sends = {every * (index + 1) // count % every: index for index in range(count)}
        return sends.get(self.steps % every) if self.steps else None

    @torch.no_grad()
    def exchange(self) -> Collection[nn.Parameter]:
        """Send and merge what is due after this step; all ranks call it if :attr:`is_due`.

        Returns the parameters that were written. Errors are those of :meth:`outer_step`, which it
        takes where there are neither fragments nor a delay.
        """
        if self._config.fragments == 1 and self._config.delay == 0:
            return self.outer_step()
        written: list[nn.Parameter] = []
        flight, fragment = self._flight, self._due_fragment()
        if flight is not None and self.steps == flight.landing:
            written += self._land()
        elif flight is not None and self.steps == flight.halfway:
            for part in flight.parts:
                part[1].advance()
        if fragment is not None and self._config.delay:
            self._send(self._fragments[fragment])
        elif fragment is not None:
            parameters = [p for p in self._fragments[fragment] if p in self._trained]
            self._begin_check("trained", parameters, self._kept)()
            self._average(parameters)
            written += parameters
        return written

    @torch.no_grad()
    def outer_step(self) -> Collection[nn.Parameter]:
        """Average the progress of all nodes and let them start from equal weights.

        A fragment under way is merged first. All ranks call it after equally many steps. Nothing
        else may use the weights meanwhile. Returns the parameters that were written.

        Raises:
            RuntimeError: On all ranks, before anything is exchanged: weights of a node are not
                finite, or nodes have taken different numbers of steps.
            ValueError: Likewise, nodes have trained different parameters.
        """
        written = self._land()
        parameters = [p for p in self._names if p in self._trained]
        self._begin_check("trained", parameters, self._kept)()
        for fragment in self._fragments:  # by itself, as errors of rounding are kept
            self._average([p for p in fragment if p in self._trained])
        self.steps = 0
        return {*written, *parameters}

    def bring_together(self) -> None:
        """Deprecated name of :meth:`outer_step`."""
        warnings.warn(
            "`bring_together` is now called `outer_step`; the old name will be removed in the next "
            "release",
            DeprecationWarning,
            stacklevel=2,
        )
        self.outer_step()

    def _begin_check(
        self, state: str, parameters: Iterable[nn.Parameter], finite: Iterable[nn.Parameter] = ()
    ) -> Callable[[], None]:
        """Begin to compare what nodes train, and whether some weights are finite.

        Returns a function that ends it, and raises on all ranks if nodes do not match. One in an
        outer step and one in ``begin_step`` meet here and differ.
        """
        bad = torch.zeros(self._topology.num_nodes, dtype=torch.int64, device=self._device)
        if weights := [w for p in finite if (w := local_tensor(p)).numel()]:
            largest = torch.nn.utils.get_total_norm(weights, float("inf"))
            bad[self._topology.node].copy_(~torch.isfinite(largest))
        steps = self.steps
        finish = begin_check(
            {self._names[p]: f"{state} ({describe(p)})" for p in parameters},
            self._groups.every,
            self._votes,
            differ="nodes do not train the same parameters",
            advice="With `local_steps` all nodes train the same ones, from the same step on: give "
            "optimizers the same parameters and set `requires_grad` alike on every rank (or, if "
            "nodes run out of batches at different times, give every rank equally many).",
            votes=[steps, -steps],
            more=bad,
        )

        def end() -> None:
            most, least, *bad = finish()
            if most != -least:
                raise RuntimeError(
                    f"nodes have taken {-least} to {most} optimizer steps since they were brought "
                    "together, or some ran out of batches. All of them need the same number: give "
                    "every rank equally many batches."
                )
            if any(bad):
                found = ", ".join(str(node) for node, flag in enumerate(bad) if flag)
                raise RuntimeError(
                    f"the weights of node {found} are not finite any more after {steps} steps of "
                    "their own. Nothing was merged, since all nodes would get them. Resume from "
                    "the last checkpoint, with a lower learning rate, `gradient_clip_val`, or "
                    "`skip_nonfinite_steps=True`, with which a node leaves out such a step."
                )

        return end

    def _buckets(self, parameters: Iterable[nn.Parameter]) -> Iterator[Bucket]:
        """Yield the buckets of parameters, which are in the order of names.

        The same on all ranks with these shards: a sum in fp32 depends on the place in its bucket.
        """
        open_: dict[CodecSpec | None, list[nn.Parameter]] = {}
        room: dict[CodecSpec | None, int] = {}
        for parameter in parameters:
            numel = local_tensor(parameter).numel()
            if numel == 0:
                continue
            codec = self._codec_of(parameter, numel)
            if codec in open_ and room[codec] < numel:
                yield Bucket(codec, tuple(open_.pop(codec)))
            if codec not in open_:
                open_[codec], room[codec] = [], _BUCKET_NUMEL
            open_[codec].append(parameter)
            room[codec] -= numel
        for codec, rest in open_.items():
            yield Bucket(codec, tuple(rest))

    def _codec_of(self, parameter: nn.Parameter, numel: int) -> CodecSpec | None:
        codec, whole = self._config.codec(), parameter.numel()
        least = self._min_quantized_numel
        exact = full_precision_reason(parameter.ndim, whole, torch.float32, least)
        return None if codec is None or exact or codec.nbytes(numel) >= 4 * numel else codec

    def _average(self, parameters: list[nn.Parameter]) -> None:
        """Take an outer step of these parameters, one bucket after the other."""
        for bucket in self._buckets(parameters):
            flat = self._difference(bucket)
            self._mean.read(self._mean.begin(flat, bucket.codec, bucket), bucket.codec, flat)
            self._apply(bucket, flat, parameters)
        self._trained.difference_update(parameters)

    def _send(self, fragment: list[nn.Parameter]) -> None:
        """Let a fragment take off.

        Messages leave before nodes have compared what they train, and gloo ends processes whose
        messages differ in size. So the last comparison says what is on board: what is trained again
        is sent a cycle later, and what is not trained any more goes along once, and is not merged.
        """
        trained = [p for p in fragment if p in self._trained]
        check, parts = self._begin_check("trained", trained, self._kept), []
        on_board = [p for p in fragment if p in self._agreed]
        for bucket in self._buckets(on_board):
            flat = self._difference(bucket)
            sent = [local_tensor(p).detach().clone() for p in bucket.parameters]
            transfer = self._mean.begin(flat, bucket.codec, bucket, self._stage)
            parts.append((bucket, transfer, sent))
        merged = [p for p in on_board if p in self._trained]
        self._trained.difference_update(on_board)
        self._agreed.difference_update(on_board)
        self._agreed.update(trained)
        landing = self.steps + self._config.delay
        halfway = self.steps + self._config.delay // 2
        self._flight = _Flight(check, halfway, landing, parts, merged)

    def _land(self) -> list[nn.Parameter]:
        """Merge the fragment under way, if there is one."""
        flight = self._flight
        if flight is None:
            return []
        try:
            flight.check()
        except Exception:
            distrust_groups()  # messages may be missing, or have other sizes
            raise
        if self._stage is not None:
            self._stage.join()
        for bucket, transfer, sent in flight.parts:
            flat = torch.empty(bucket.numel(self._mean.num_nodes), device=self._device)
            self._mean.read(transfer, bucket.codec, flat)
            self._apply(bucket, flat, flight.trained, sent)
        self._flight = None
        return flight.trained

    def _difference(self, bucket: Bucket) -> Tensor:
        flat = torch.zeros(bucket.numel(self._mean.num_nodes), device=self._device)
        for place, parameter, weight in bucket.places(flat):
            place.copy_(self._kept[parameter].anchor.to(weight.dtype))
            place.sub_(weight.to(self._device))
        return flat

    def _apply(
        self,
        bucket: Bucket,
        flat: Tensor,
        trained: Collection[nn.Parameter],
        sent: Sequence[Tensor] = (),
    ) -> None:
        """Step against the mean; ``sent`` are weights on which nodes have trained since."""
        lr, momentum, chosen = self._config.outer_lr, self._config.outer_momentum, set(trained)
        for index, (place, parameter, weight) in enumerate(bucket.places(flat)):
            if parameter not in chosen:
                continue
            anchor, velocity = self._kept[parameter]
            mean = place.to(anchor.device)
            velocity.mul_(momentum).add_(mean)
            anchor.sub_(mean.add(velocity, alpha=momentum), alpha=lr)
            weight.copy_((weight.float() - sent[index]).add_(anchor) if sent else anchor)

    # --- saved state ------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Velocities and, where weights cannot hold them, anchors, sharded like the parameters.

        After an outer step anchors of fp32 weights are the weights, and all nodes are equal. What
        rounding has taken from messages is not saved, and so forgotten here, too.

        Raises:
            RuntimeError: Nodes have taken steps since the last outer step.
        """
        if self.steps:
            raise RuntimeError(
                f"nodes have taken {self.steps} steps alone: bring them together before saving"
            )
        self._mean.forget_errors()
        self._agreed.update(self._kept)
        found: dict[str, dict[str, Tensor]] = {"velocity": {}, "anchor": {}}
        for parameter, (anchor, velocity) in self._kept.items():
            name = self._names[parameter]
            found["velocity"][name] = _like(parameter, velocity)
            if parameter.dtype != torch.float32:
                found["anchor"][name] = _like(parameter, anchor)
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
        self._agreed.update(self._kept)


def _new(weight: Tensor) -> _Kept:
    anchor = weight.detach().to(torch.float32, copy=True)
    return _Kept(anchor, torch.zeros_like(anchor))


def _like(parameter: nn.Parameter, kept: Tensor) -> Tensor:
    sharded = isinstance(parameter, DTensor)
    return to_sharded_dtensor(kept.view(-1), parameter) if sharded else kept


def _padded(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def deal_out(
    names: Mapping[nn.Parameter, str], units: Iterable[str], count: int
) -> list[list[nn.Parameter]]:
    """Deal out units, the largest first, each to the fragment with the fewest elements.

    So equal blocks are strided over depth. Parameters in no unit are dealt out one by one. It
    depends on names and sizes, alike on all nodes.
    """
    owners = sorted(units, key=len, reverse=True)
    members: dict[str, list[nn.Parameter]] = {}
    for parameter, name in names.items():
        unit = next((unit for unit in owners if name.startswith(f"{unit}.")), name)
        members.setdefault(unit, []).append(parameter)
    if count > max(1, len(members)):
        raise ValueError(
            f"`LocalSteps(fragments={count})` is not supported: the model has {len(members)} units "
            "and other parameters, which are sent as a whole. Give at most as many `fragments`, or "
            "name smaller `units`."
        )
    sizes = {unit: sum(p.numel() for p in found) for unit, found in members.items()}
    loads, dealt = [0] * count, {}
    for unit in sorted(members, key=lambda unit: (-sizes[unit], len(unit), unit)):
        dealt[unit] = fragment = loads.index(min(loads))
        loads[fragment] += sizes[unit]
    fragment_of = {p: dealt[unit] for unit, found in members.items() for p in found}
    return [[p for p in names if fragment_of[p] == index] for index in range(count)]


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
