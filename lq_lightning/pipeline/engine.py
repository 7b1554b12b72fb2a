"""The pipeline of one rank: its stages, its links to other ranks, and their agreement."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lq_lightning.foundation.agreement import gather_objects
from lq_lightning.foundation.nested import leaves

from .execution import (
    BoundaryTraffic,
    Endpoint,
    Execution,
    Links,
    Listener,
    Outbox,
    ProcessGroupLinks,
    Stage,
)
from .message import BoundaryCodec, BoundaryMeta
from .schedules import (
    Program,
    check_schedule,
    evaluation_program,
    rank_of_stage,
    stages_of_rank,
    training_program,
)

T = TypeVar("T")

_DIGESTED_FIRST = 3  # steps whose batches are compared by content,
_DIGESTED_EVERY = 100  # and then one of so many


def agree_on(facts: Mapping[str, str], remedy: str, group: dist.ProcessGroup) -> None:
    """Raise ``RuntimeError`` on every rank of a pipeline (a gloo group) if facts differ.

    The message has the values and the remedy. Ranks exchange 8 bytes each. Messages carry neither
    shape nor dtype: a rank with another batch would get a payload of another size, which gloo
    truncates silently, or train on samples of which the last stage has other labels.
    """
    text = repr(sorted(facts.items())).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)
    mine = torch.tensor([digest], dtype=torch.int64)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    if all(torch.equal(each, mine) for each in gathered):
        return
    # All ranks were given the same digests, so that all of them come here.
    everyone = gather_objects(dict(facts), group)
    raise RuntimeError(f"{_differences(everyone)} {remedy}")


def batch_signature(batch: object) -> str:
    """Return the structure of a batch with shapes and dtypes; other leaves count by their type."""
    return "; ".join(
        f"{path}: {str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if isinstance(leaf, Tensor)
        else f"{path}: {type(leaf).__name__}"
        for path, leaf in leaves(batch, "batch")
    )


def batch_digest(batch: object) -> str:
    """Return a digest of the tensors, strings and numbers of a batch; the host waits for GPUs."""
    digest = hashlib.sha256()
    for _, leaf in leaves(batch, "batch"):
        if isinstance(leaf, Tensor):
            content = leaf.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(content.numpy().tobytes())
        elif isinstance(leaf, (str, bytes, bool, int, float, complex)):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()[:12]


def _differences(everyone: list[dict[str, str]]) -> str:
    found = []
    for name in sorted({name for facts in everyone for name in facts}):
        ranks: dict[str | None, list[str]] = {}
        for rank, facts in enumerate(everyone):
            ranks.setdefault(facts.get(name), []).append(str(rank))
        if len(ranks) > 1:
            values = ", ".join(
                f"{value} on rank{'s' if len(who) > 1 else ''} {', '.join(who)}"
                for value, who in ranks.items()
            )
            found.append(f"{name} is {values}")
    return f"ranks of one pipeline differ: {'; '.join(found)}."


class PipelineEngine:
    """The stages of one rank, run by a schedule, with coded boundaries.

    It takes from torch's pipeline schedules which computations run in which order, and runs them so
    that only the rank that needs a payload waits for it: payloads are sent as soon as they are
    made, while the next micro-batch computes; receives are posted ahead, in the order in which the
    peer sends; and the two directions between two ranks do not wait for each other. (torch's
    runtimes wait for sends in 1F1B, post receives behind computations, keep receive buffers in full
    precision for all micro-batches, and share one NCCL stream between both directions.)

    Gradients are added to ``.grad`` of the parameters; nothing is scaled.

    Args:
        stages: modules of this rank's stages, by index; see ``Stage``.
        num_stages: stages of the pipeline.
        group: ranks of the pipeline, in the order of their first stages; None with ``links``.
        control_group: the same ranks over gloo, for agreement; None without.
        device: device of hidden states.
        schedule: one of ``SCHEDULES``.
        num_microbatches: micro-batches of a training step.
        forward_codec: codec of hidden states, used by this rank alone.
        backward_codec: codec of gradients.
        links: transport of payloads; by default ``group``.

    Attributes:
        listener: encodes hidden states in training, in place of the codec; mostly None.
        traffic: counters of payloads that this rank has sent since the start.
        failed: error that ended a step, so that messages may never arrive; mostly None.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        num_stages: int,
        group: dist.ProcessGroup | None,
        control_group: dist.ProcessGroup | None,
        device: torch.device,
        schedule: str,
        num_microbatches: int,
        forward_codec: BoundaryCodec,
        backward_codec: BoundaryCodec,
        links: Links | None = None,
    ) -> None:
        if links is None and group is None:
            raise ValueError("`group=None` needs `links`.")
        size = links.size if links is not None else dist.get_world_size(group)
        rank = links.rank if links is not None else dist.get_rank(group)
        check_schedule(schedule, size, num_microbatches, num_stages // size)
        mine = stages_of_rank(schedule, rank, num_stages, size)
        if tuple(sorted(stages)) != mine:
            raise AssertionError(f"rank {rank} has the stages {mine}, not {sorted(stages)}")
        self._schedule, self._size, self._num_stages = schedule, size, num_stages
        self._num_microbatches = num_microbatches
        self._control_group = control_group
        if control_group is not None:
            facts = {
                "schedule": schedule,
                "num_stages": str(num_stages),
                "num_microbatches": str(num_microbatches),
                "forward_codec": forward_codec.name,
                "backward_codec": backward_codec.name,
                "options of forward_codec": forward_codec.options,
                "options of backward_codec": backward_codec.options,
            }
            agree_on(facts, "Give all ranks the same options.", control_group)
        if links is None:
            ranks = [self._rank_of(stage) for stage in range(num_stages)]
            # Pairs of ranks that send to each other, in one order for all ranks.
            pairs = {pair for pair in zip(ranks, ranks[1:], strict=False) if pair[0] != pair[1]}
            ways = sorted(pairs | {(b, a) for a, b in pairs})
            links = ProcessGroupLinks(cast(dist.ProcessGroup, group), device, ways)
        self._stages = {index: Stage(stages[index], index, num_stages) for index in mine}
        self.traffic = BoundaryTraffic()
        self._endpoint = Endpoint(
            links=links,
            outbox=Outbox(links),
            forward_codec=forward_codec,
            backward_codec=backward_codec,
            traffic=self.traffic,
            device=device,
        )
        self.listener: Listener | None = None
        self._agreed = 0
        self.failed: str | None = None

    def agree(
        self,
        batch: object,
        training: bool,
        num_microbatches: int | None = None,
        samples: Tensor | None = None,
    ) -> None:
        """Compare the next step with the other ranks; every rank must call it.

        Shapes, dtypes and ``samples`` are compared in each step, contents of the batch (before it
        is split) in the first steps and then now and then. Differences raise on every rank.
        """
        if self._control_group is None:
            return
        facts = {
            "the step": "training" if training else "evaluation",
            "the number of micro-batches": str(num_microbatches or self._num_microbatches),
            "the batch": batch_signature(batch),
        }
        if samples is not None:
            facts["the digest of the samples' identities"] = batch_digest(samples)
        if self._agreed < _DIGESTED_FIRST or self._agreed % _DIGESTED_EVERY == 0:
            facts["the digest of the batch"] = batch_digest(batch)
        self._agreed += 1
        agree_on(
            facts,
            "All stages of a pipeline need the same batch: let the sampler tell ranks apart by "
            "their data-parallel rank only, and shuffle with the same seed. What a data set draws "
            "at random is the same if every rank calls `seed_everything` with one seed before data "
            "are loaded, and the data set draws from torch's, numpy's or Python's global generator "
            "alone; or from a generator that it seeds by the index of the sample: "
            "`torch.Generator().manual_seed(seed + index)`. One that is seeded by nothing "
            "(`np.random.default_rng()`), by the rank or a `worker_init_fn` of its own differs.",
            self._control_group,
        )

    def share(self, value: T | None) -> T:
        """Return the picklable value of the rank with stage 0 on all ranks, which all call it."""
        box: list[Any] = [value]
        if self._control_group is not None:
            dist.broadcast_object_list(box, group=self._control_group, group_src=self._rank_of(0))
        result: T = box[0]
        return result

    def step(
        self,
        boundary: BoundaryMeta,
        samples: Tensor | None = None,
        num_microbatches: int | None = None,
        seed: int | None = None,
    ) -> list[Tensor]:
        """Run forward and backward passes of all micro-batches; arguments are equal on all ranks.

        Args:
            boundary: shape and dtype of hidden states between stages.
            samples: int64 identities of the samples of the batch, in order, for codecs that
                remember them.
            num_microbatches: micro-batches of this step, if not as usual.
            seed: for codecs that round stochastically; another one for each step and replica.

        Returns:
            On the rank of the last stage the losses by micro-batch, without graphs; else nothing.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("`step` needs gradients, which are switched off: call `evaluate`.")
        program = training_program(*self._program_arguments(num_microbatches))
        return self._run(program, boundary, samples, training=True, seed=seed)

    def evaluate(
        self,
        boundary: BoundaryMeta,
        samples: Tensor | None = None,
        num_microbatches: int | None = None,
        seed: int | None = None,
    ) -> list[Any]:
        """Run forward passes of all micro-batches; any number of them suits any schedule.

        Returns the outputs by micro-batch on the rank of the last stage, else nothing.
        """
        program = evaluation_program(*self._program_arguments(num_microbatches))
        with torch.no_grad():
            return self._run(program, boundary, samples, training=False, seed=seed)

    def close(self) -> None:
        """Wait for payloads on their way, and close the codecs."""
        if self.failed is None:
            self._endpoint.outbox.finish()
        self._endpoint.forward_codec.close()
        self._endpoint.backward_codec.close()

    def _run(
        self,
        program: Program,
        boundary: BoundaryMeta,
        samples: Tensor | None,
        training: bool,
        seed: int | None,
    ) -> list[Any]:
        if self.failed is not None:
            raise RuntimeError(
                f"an earlier step of this pipeline failed ({self.failed}), and messages may be "
                "missing on any rank: start again from a checkpoint."
            )
        if self._size > 1:  # on all ranks, before anything is sent
            self._endpoint.forward_codec.check(boundary.shape, boundary.dtype)
            self._endpoint.backward_codec.check(boundary.shape, boundary.dtype)
        listener = self.listener if training else None
        if listener is not None:
            listener.starts(boundary)
        parts: tuple[Tensor | None, ...] = (None,) * program.num_microbatches
        if samples is not None:
            parts = tuple(samples.cpu().view(len(parts), -1))
        execution = Execution(
            program=program,
            stages=self._stages,
            endpoint=self._endpoint,
            boundary=boundary,
            samples=parts,
            training=training,
            seed=seed,
            listener=listener,
        )
        try:
            # Payloads of the step before may still be on their way, behind the optimizer's step;
            # no more than one step's are ever kept.
            self._endpoint.outbox.finish()
            return execution.run()
        except BaseException as error:
            # Transfers under way are left alone: their peers will not come, so that waiting for
            # them would keep this rank from raising.
            self.failed = f"{type(error).__name__}: {error}"  # its frames hold graphs
            for stage in self._stages.values():
                stage.clear()
            raise

    def _program_arguments(self, num_microbatches: int | None) -> tuple[str, int, int, int]:
        count = num_microbatches or self._num_microbatches
        return self._schedule, self._size, count, self._num_stages // self._size

    def _rank_of(self, stage: int) -> int:
        return rank_of_stage(self._schedule, stage, self._num_stages, self._size)
