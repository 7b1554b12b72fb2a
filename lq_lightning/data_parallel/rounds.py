"""Outer steps of nodes that come and go: the tensors of a round, see [Note: rounds]."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store

from lq_lightning._compat.tensors import local_tensor
from lq_lightning._compat.torch import gloo_group
from lq_lightning.data_parallel.config import LocalSteps
from lq_lightning.data_parallel.local_steps import Bucket, OuterOptimizer
from lq_lightning.data_parallel.meeting import Round
from lq_lightning.data_parallel.node_mean import NodeMean, read_mean
from lq_lightning.foundation.groups import RankGroups
from lq_lightning.foundation.topology import Topology

# On disk, per element of a shard. A node that is further behind would fetch more than a new one,
# to which weights, outer state and optimizer states of about so many bytes are sent.
_KEPT_NBYTES = 16


class Arrived(NamedTuple):
    """What a rank has got in a round, of which the mean can be read.

    Attributes:
        num_nodes: Nodes that sent it.
        learned: Those that have taken steps; with 0 there is nothing.
        messages: By bucket.
    """

    num_nodes: int
    learned: int
    messages: list[Tensor]


class LostNodeError(RuntimeError):
    """Messages of a round did not arrive."""


class RoundOptimizer(OuterOptimizer):
    """An :class:`OuterOptimizer` of nodes that come and go, each of which is a run of its own.

    In a round it sends and receives (:meth:`send_and_receive`), and once the round counts it takes
    the outer step (:meth:`take`). Messages travel through the host, with gloo: there a lost node is
    an error, after a time that can be chosen, and the process goes on. What error feedback has kept
    is dropped when members change.

    Args:
        config: Has ``meet_at``.
        group: All ranks of this node.
        connect: Makes a connection to the meeting point.
        address: Of this machine.
        names: Fully qualified names of the parameters.
        min_quantized_numel: Smaller tensors travel in fp32.
        device: Where the shards are.

    Attributes:
        number: Last round whose result the weights have.
        is_open: Whether parameters may begin to be trained.
    """

    def __init__(
        self,
        config: LocalSteps,
        group: dist.ProcessGroup,
        connect: Callable[[], Store],
        address: str,
        *,
        names: Mapping[nn.Parameter, str],
        min_quantized_numel: int,
        device: torch.device,
    ) -> None:
        size = group.size()
        node = Topology(world_size=size, rank=group.rank(), node_size=size)
        super().__init__(
            config,
            node,
            RankGroups(group, group, group),
            names=names,
            min_quantized_numel=min_quantized_numel,
            device=device,
        )
        self.number, self.is_open = 0, True
        self._connect, self._address = connect, address
        self._present: list[str] = []
        self._group: dist.ProcessGroup | None = None
        self._files: list[tuple[Path, int]] = []

    def _start_alike(self, weights: Sequence[Tensor]) -> None:
        """Nothing: a node starts a run, or from the state of one that trains.

        Raises:
            NotImplementedError: Other nodes train without these parameters.
        """
        if not self.is_open:
            raise NotImplementedError(
                f"an optimizer begins to train {len(weights)} parameter(s) that it did not train "
                "at first, or that other nodes do not train. With `LocalSteps(meet_at=...)` nodes "
                "that come and go have to train the same ones from the start: unfreeze nothing "
                "later, or leave out `meet_at`."
            )

    def check_trained(self) -> None:
        """Refuse, between two batches, parameters that are trained no longer.

        Raises:
            NotImplementedError: Some were frozen.
        """
        frozen = [self._names[p] for p in self._kept if not p.requires_grad]
        if frozen:
            raise NotImplementedError(
                f"`{frozen[0]}` was frozen after it was trained. With `LocalSteps(meet_at=...)` "
                "nodes that come and go have to train the same parameters to the end: freeze it "
                "from the start, or leave out `meet_at`."
            )

    def check(self) -> None:
        """Raise, on all ranks of this node, if its weights are not finite.

        Raises:
            RuntimeError: They are not.
        """
        self._begin_check("trained", self._parameters, self._kept)()

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [p for p in self._names if p in self._kept]

    # --- a round --------------------------------------------------------------------------------

    @torch.no_grad()
    def send_and_receive(self, taken: Round, name: str, wait: timedelta) -> Arrived:
        """Send the progress of this rank's shards, and receive everybody's.

        Args:
            taken: The round, of which this node is a member.
            name: Of this node.
            wait: Time after which a message is lost.

        Raises:
            LostNodeError: A node is gone, or its messages do not come.
        """
        names = [member.name for member in taken.members]
        if not taken.learned:
            return Arrived(len(names), 0, [])
        with _losing_nodes():
            if names != self._present:
                self.drop_group()
                store = PrefixStore(
                    f"group/{taken.number}/{taken.attempt}/{self._topology.rank}", self._connect()
                )
                self._group = gloo_group(store, names.index(name), len(names), self._address, wait)
                self._present = names
                self._begin_mean(self._group)
            self._mean.count = taken.learned
            messages = []
            for bucket in self._buckets(self._parameters):
                flat = self._difference(bucket)
                messages.append(self._mean.begin(flat, bucket.codec, bucket).finish())
        return Arrived(len(names), taken.learned, messages)

    def drop_group(self) -> None:
        """Let go of the connections, so that others notice."""
        self._begin_mean(self._groups.inter)  # the last reference to a group closes it
        if self._group is not None:
            self._group.abort()
        self._group, self._present = None, []

    def _begin_mean(self, group: dist.ProcessGroup) -> None:
        sent = self.sent_nbytes
        self._mean = NodeMean(group.size(), group, feedback=self._config.error_feedback)
        self._mean.sent_nbytes = sent

    @torch.no_grad()
    def take(self, arrived: Arrived, place: Path) -> Collection[nn.Parameter]:
        """Take the outer step of the next round, in which this node was.

        ``place`` has what :meth:`write` has written of it. Returns the written parameters.
        """
        self._apply_all(arrived, place, keep_progress=False)
        self.steps = 0
        self._trained.clear()
        return self._parameters

    @torch.no_grad()
    def follow(self, arrived: Arrived, place: Path) -> Collection[nn.Parameter]:
        """Take the outer step of the next round, in which this node was not.

        Its progress since its last round is added on top, and is part of its next difference.
        """
        self.drop_group()  # the others have another one, whoever is in the next round
        self._apply_all(arrived, place, keep_progress=True)
        return self._parameters

    @torch.no_grad()
    def give_up(self) -> Collection[nn.Parameter]:
        """Forget the progress since the last round. Returns the written parameters."""
        for parameter, kept in self._kept.items():
            local_tensor(parameter).copy_(kept.anchor)
        self.steps = 0
        return self._parameters

    def _apply_all(self, arrived: Arrived, place: Path, *, keep_progress: bool) -> None:
        self.number += 1
        self._keep(place)
        if not arrived.learned:
            return
        parameters = self._parameters
        for bucket, message in zip(self._buckets(parameters), arrived.messages, strict=True):
            flat = torch.empty(bucket.numel(arrived.num_nodes), device=self._device)
            on_device = message.to(self._device)
            read_mean(on_device, bucket.codec, flat, arrived.num_nodes, arrived.learned)
            self._apply(bucket, flat, parameters, self._anchors(bucket) if keep_progress else ())

    def _anchors(self, bucket: Bucket) -> list[Tensor]:
        kept = ((self._kept[p].anchor, local_tensor(p).dtype) for p in bucket.parameters)
        return [anchor.to(dtype, copy=True) for anchor, dtype in kept]

    # --- what has arrived, on disk --------------------------------------------------------------

    def _keep(self, place: Path) -> None:
        """Keep a file for nodes that were away, and remove those that are too old."""
        self._files.append((place, place.stat().st_size))
        most = _KEPT_NBYTES * sum(local_tensor(p).numel() for p in self._parameters)
        while sum(size for _, size in self._files) > most and len(self._files) > 1:
            self._files.pop(0)[0].unlink(missing_ok=True)

    @staticmethod
    def write(arrived: Arrived, place: Path) -> None:
        """Write what has arrived, for :meth:`read` on this rank of another node.

        Raises:
            OSError: The disk is full, for example.
        """
        content = [arrived.num_nodes, arrived.learned, [m.cpu() for m in arrived.messages]]
        try:
            torch.save(content, place)
        except RuntimeError as error:
            free = shutil.disk_usage(place.parent).free
            raise OSError(
                f"{place} could not be written, with {free} bytes free there: give a folder with "
                "more space in `TMPDIR`"
            ) from error

    @staticmethod
    def read(place: Path) -> Arrived:
        """Read what :meth:`write` has written."""
        return Arrived(*torch.load(place, weights_only=True))


@contextmanager
def _losing_nodes() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        if isinstance(error, (dist.DistError, OSError)) or "gloo" in str(error).lower():
            raise LostNodeError(str(error).splitlines()[0]) from error
        raise
