"""Same batches and random numbers on ranks that compute one forward together."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import Tensor
from torch.utils.data import DataLoader

from lq_lightning._compat.tensors import local_tensor
from lq_lightning.foundation.agreement import check_same_entries, describe
from lq_lightning.foundation.groups import shared_split
from lq_lightning.foundation.nested import leaves
from lq_lightning.foundation.streams import MaxReduction, has_streams

_COLUMNS = 1021  # prime, so that no flip or shift of lines leaves the sums of columns alike
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def draw_alike(loader: object, groups: Sequence[dist.ProcessGroup], replica: int) -> None:
    """Let ranks that need the same batches shuffle alike where no ``DistributedSampler`` does.

    torch shuffles with the default random generator, which these ranks may use differently (dropout
    in other layers), and with ``seed_everything(..., workers=True)`` Lightning seeds workers by
    their rank. Only a ``DataLoader`` that draws from the default generator is changed. All of the
    ranks call this in one order.

    Args:
        groups: Groups of these ranks, one for each axis of a mesh along which they lie.
        replica: Number of this rank's batches among those of other ranks.
    """
    if not isinstance(loader, DataLoader):
        return
    seed = [int(torch.empty((), dtype=torch.int64, device="cpu").random_())]
    for group in groups:
        if group.size() > 1:
            dist.broadcast_object_list(seed, group=group, group_src=0)
    generator = torch.Generator().manual_seed(seed[0])
    if loader.generator is None:
        loader.generator = generator  # draws the seeds of workers
    if loader.worker_init_fn is None and int(os.environ.get("PL_SEED_WORKERS", "0")):
        loader.worker_init_fn = partial(pl_worker_init_function, rank=replica)
    sampler: Any = loader.sampler
    if getattr(sampler, "generator", loader) is None:
        sampler.generator = generator


def _default_generators(device: torch.device) -> list[torch.Generator]:
    found = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        found.append(torch.cuda.default_generators[index])
    return found


def align_random_numbers(group: dist.ProcessGroup, device: torch.device) -> None:
    """Give all ranks of a group the state of its first rank's random generators; all call it.

    These are the global ones of Python and numpy, and those of torch on the CPU and on ``device``.
    """
    generators = _default_generators(device)
    states: list[Any] = [
        random.getstate(),
        np.random.get_state(),
        *(g.get_state() for g in generators),
    ]
    dist.broadcast_object_list(states, group=group, group_src=0)
    python, numpy, *torchs = states
    random.setstate(python)
    np.random.set_state(numpy)
    for generator, state in zip(generators, torchs, strict=True):
        generator.set_state(state)


class _Contents(NamedTuple):
    """A comparison in progress of what the tensors of a batch hold."""

    maxima: Callable[[], list[int]]  # waits for it
    names: list[str]
    sums: Tensor


class BatchCheck:
    """Checks that ranks of a tensor-parallel group compute the same step.

    Such ranks compute with parts of the weights, on whole batches: from different ones the results
    would belong to none. They also drop out elements of tensors that all of them hold, so that
    their generators have to be in the same state. All ranks of the group call the methods in one
    order; errors are raised on all of them.

    Before the step they compare what hosts know: structure, shapes, numbers and strings of the
    batch, and the states of torch's generators. Checksums of tensors on a GPU are computed there
    and read before the next batch, so that a host waits for others, and for no step but the one
    before the last.

    Generators also differ after local draws for uneven parts of the tokens. That is no false alarm:
    the next draw for a tensor that all ranks hold would differ.

    Args:
        group: The ranks that need the same batches.
        device: Of these batches and of the group.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._device = device
        self._waits = not has_streams(device)
        if not self._waits:  # in a group of their own, so as not to queue behind activations
            group = shared_split("batches", group, [list(range(group.size()))], device)
        self._group = group
        self._reduction = MaxReduction(device)
        self._pending: _Contents | None = None

    def __call__(self, batch: object) -> None:
        """Compare this batch, which is about to be used, and the contents of the one before.

        Raises:
            ValueError: On all ranks: batches or generators differ.
        """
        facts, names, tensors = {}, [], []
        for name, leaf in sorted(leaves(batch, "batch"), key=itemgetter(0)):
            facts[name] = _describe(leaf)
            if isinstance(leaf, Tensor) and _has_bits(leaf):
                checksum = _checksum(local_tensor(leaf.detach()))
                if self._waits or leaf.device.type != self._device.type:
                    facts[name] += f" with checksum {int(checksum):x}"
                else:
                    names.append(name)
                    tensors.append(checksum)
        generators = {
            f"the generator of torch on {g.device.type}": _digest(g.get_state().numpy().tobytes())
            for g in _default_generators(self._device)
        }
        mine = bytes.fromhex(_digest(repr((facts, generators)).encode()))
        maxima = self._reduction.start([*mine, *(255 - byte for byte in mine)], self._group)
        self.finish()
        if _differ(maxima()):
            self._refuse_batches(facts)
            check_same_entries(
                generators,
                self._group,
                self._device,
                differ="tensor-parallel ranks have drawn different random numbers, so that they "
                "would drop out different elements",
                advice="Let all of them draw as many: put code that only some ranks run, such as "
                "logging on the first one, in `with lightning.pytorch.utilities.seed.isolate_rng()`"
                ", and give sequences a length that `tensor_parallel_size` divides.",
            )
        if tensors:
            sums = torch.stack(tensors)
            bits = sums.view(torch.uint8)
            maxima = self._reduction.start((), self._group, torch.cat([bits, 255 - bits]))
            self._pending = _Contents(maxima, names, sums)

    def finish(self) -> None:
        """Wait for the comparison that is under way: after the last batch, before a checkpoint.

        Raises:
            ValueError: On all ranks: the last batches differed.
        """
        pending, self._pending = self._pending, None
        if pending is not None and _differ(pending.maxima()):
            sums = pending.sums.tolist()
            self._refuse_batches(dict(zip(pending.names, (f"{s:x}" for s in sums), strict=True)))

    def forget(self) -> None:
        """Drop the comparison that is under way, after a step that failed."""
        self._pending = None

    def _refuse_batches(self, facts: dict[str, str]) -> None:
        check_same_entries(
            facts,
            self._group,
            self._device,
            differ="tensor-parallel ranks got different batches",
            advice="They compute one forward together and need the same one. Leave the Trainer's "
            "`use_distributed_sampler=True`, or give samplers and iterable data sets the numbers "
            "in `self.trainer.strategy.distributed_sampler_kwargs`, which tell data-parallel ranks "
            "apart and no others. Data sets that draw at random must draw alike: from global "
            "generators after `seed_everything`, or from one that they seed by the sample, not "
            "from `np.random.default_rng()`.",
        )


def _differ(maxima: list[int]) -> bool:
    """Whether bytes differ between ranks, of which these are the maxima and those of 255 - byte."""
    half = len(maxima) // 2
    return any(a + b != 255 for a, b in zip(maxima[:half], maxima[half:], strict=True))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _describe(leaf: object) -> str:
    if isinstance(leaf, Tensor):
        return describe(leaf)
    known = isinstance(leaf, (str, bytes, bool, int, float, complex, type(None)))
    return repr(leaf) if known else type(leaf).__name__


def _has_bits(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized


@cache
def _factors(device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    factors = torch.randint(1, 1 << 62, (_COLUMNS,), generator=generator, device="cpu")
    return (factors | 1).to(device)


def _checksum(tensor: Tensor) -> Tensor:
    """Return a number for the bits of a tensor, int64, without waiting for its device.

    The kernel of ``checksums`` copies a table of addresses to the device, which batches change.

    Bits of elements, as integers, are added up in columns, and those with factors, modulo 2^64.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.contiguous().view(-1).view(_INTEGERS[tensor.itemsize])
    rows = bits.numel() // _COLUMNS
    sums = bits[: rows * _COLUMNS].view(rows, _COLUMNS).sum(0, dtype=torch.int64)
    rest = bits[rows * _COLUMNS :]
    sums[: rest.numel()] += rest
    return (sums * _factors(bits.device)).sum()
