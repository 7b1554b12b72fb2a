"""AQ-SGD: sends how the hidden states of a sample changed since it was last seen.

The first time, a sample is sent in full precision and both ends keep it as m. Later the sender
encodes the difference to m, and both ends add the decoded difference to m: the receiver goes on
with m, and the next difference carries the error of this one (Wang et al., 2022, section 3).
Evaluation is sent in full precision and changes nothing.

Shape legend: B samples, S tokens, N channels.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lq_lightning.codecs import CodecSpec, decode, encode
from lq_lightning.foundation.checks import check_choice, is_whole
from lq_lightning.kernels.message import SCALE_DTYPES

from .message import (
    GROUP_TILES,
    BoundaryCodec,
    Message,
    check_channels,
    check_floats,
    check_payload,
)

DifferenceCode = Literal["int2", "int3", "int4", "int5", "int6", "int7", "int8"]
CacheDtype = Literal["bfloat16", "float16", "float32"]


class Visit(NamedTuple):
    """Effect of a message on the cache."""

    samples: tuple[int, ...]  # identities, in the order of the message
    slots: list[int]  # of the samples, in the cache
    known_at: list[int]  # indices within the message of samples that were cached before it
    new_at: list[int]  # those of the other samples, which are sent in full precision


class SampleCache:
    """An LRU cache of hidden states with the same content on both ends of a boundary.

    Which samples are cached is decided when a message is announced, from the identities alone;
    values are read and written when it is encoded or decoded. Both ends see messages in one order
    and so decide alike, however many are announced before the first arrives.

    Slots are in memory up to ``memory_nbytes``, the others in an unnamed file in ``folder``, which
    vanishes with the process. A sample has ``numel`` values.
    """

    def __init__(self, numel: int, config: AQSGDQuantization) -> None:
        self.numel = numel
        self._dtype = SCALE_DTYPES[config.cache_dtype]
        self._nbytes = numel * self._dtype.itemsize
        self._capacity = config.cache_nbytes // self._nbytes
        self._in_memory = config.memory_nbytes // self._nbytes
        self._folder = Path(config.folder or tempfile.gettempdir())
        self._slots: OrderedDict[int, int] = OrderedDict()  # least recently used first
        self._memory: dict[int, Tensor] = {}
        self._file: IO[bytes] | None = None

    def visit(self, samples: Sequence[int]) -> Visit:
        """Decide the effect of the next message; called once for each message, in their order."""
        visit = Visit(tuple(samples), [], [], [])
        new: set[int] = set()  # their values only exist once the message has been coded
        for index, sample in enumerate(samples):
            known = sample in self._slots and sample not in new
            (visit.known_at if known else visit.new_at).append(index)
            if sample in self._slots:
                self._slots.move_to_end(sample)
            else:
                full = len(self._slots) == self._capacity
                slot = self._slots.popitem(last=False)[1] if full else len(self._slots)
                self._slots[sample] = slot
                new.add(sample)
            visit.slots.append(self._slots[sample])
        return visit

    def load(self, visit: Visit, device: torch.device) -> Tensor | None:
        """Return the values of the known samples, ``[known, numel]``, new and on the device."""
        rows = [self._read(visit.slots[index]) for index in visit.known_at]
        return torch.stack(rows).to(device) if rows else None

    def store(self, visit: Visit, new: Tensor, known: Tensor | None) -> None:
        """Keep the values of new and known samples, ``[samples, numel]``; of equal slots the last.

        Values that are not finite become 0, or the sample would never be finite again.

        Raises:
            OSError: the disk is full.
        """
        # A known sample may have made room for a new one, which has its slot: known ones go first.
        if known is not None:
            self._store([visit.slots[index] for index in visit.known_at], known)
        if visit.new_at:
            self._store([visit.slots[index] for index in visit.new_at], new)

    def _store(self, slots: Sequence[int], values: Tensor) -> None:
        kept = values.to(self._dtype).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        kept = kept.cpu()  # one transfer for all of them, as in `load`
        for slot, row in zip(slots, kept, strict=True):
            if slot < self._in_memory:
                self._memory[slot] = row.clone()  # not a view, which would keep all of `kept`
            else:
                self._write(slot, row)

    def close(self) -> None:
        """Delete the file."""
        if self._file is not None:
            self._file.close()

    def _place(self, slot: int) -> tuple[int, int]:
        """Return the file, and where the slot begins in it."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="lq_lightning_", dir=self._folder)  # noqa: SIM115
        return self._file.fileno(), (slot - self._in_memory) * self._nbytes

    def _read(self, slot: int) -> Tensor:
        if slot < self._in_memory:
            return self._memory[slot]
        file, start = self._place(slot)
        return torch.frombuffer(bytearray(os.pread(file, self._nbytes, start)), dtype=self._dtype)

    def _write(self, slot: int, row: Tensor) -> None:
        file, start = self._place(slot)
        data = row.contiguous().view(torch.uint8).numpy().tobytes()
        written = 0
        try:
            while written < self._nbytes:  # a nearly full disk takes a part
                written += os.pwrite(file, data[written:], start + written)
        except OSError as error:
            free = shutil.disk_usage(self._folder).free
            raise OSError(
                error.errno,
                f"`AQSGDQuantization` keeps hidden states of samples in a file in "
                f"`{self._folder}`, which has to grow from {start} to {start + self._nbytes} "
                f"bytes, and up to {(self._capacity - self._in_memory) * self._nbytes}, but there "
                f"are {free} bytes free ({os.strerror(error.errno or 0)}). Free some, give a "
                "`folder` on a larger disk or more `memory_nbytes`, or hold fewer samples, by a "
                "smaller `cache_nbytes`, on all ranks.",
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class AQSGDQuantization:
    """Quantized differences of hidden states to the same sample in the last epoch.

    Needs more than one epoch of samples whose contents do not change. Every sample takes S * N
    values per boundary, on both ends.

    Attributes:
        code: code of the differences, which are asymmetric with a bf16 scale and minimum per tile.
        tile_size: channels of a tile, a power of two from 16 to 4096.
        cache_dtype: dtype of cached samples.
        cache_nbytes: most bytes of the cache of one boundary on one end. Beyond them the least
            recently used sample makes room, and is sent in full precision when it comes again.
        memory_nbytes: bytes of the cache in memory; the rest is in a file.
        folder: folder of the file, which has no name; None for the system's temporary folder.

    Raises:
        ValueError: a value that is not listed above.
    """

    code: DifferenceCode = "int4"
    tile_size: int = 64
    cache_dtype: CacheDtype = "bfloat16"
    cache_nbytes: int = 64 << 30
    memory_nbytes: int = 2 << 30
    folder: str | Path | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        owner = type(self).__name__
        check_choice(owner, "code", self.code, get_args(DifferenceCode))
        check_choice(owner, "tile_size", self.tile_size, GROUP_TILES)
        check_choice(owner, "cache_dtype", self.cache_dtype, get_args(CacheDtype))
        for field, least in (("cache_nbytes", 1), ("memory_nbytes", 0)):
            value = getattr(self, field)
            if not is_whole(value) or value < least:
                raise ValueError(
                    f"`{owner}({field}={value!r})` is not supported: choose a number of bytes, at "
                    f"least {least}."
                )
        if self.folder is not None and not Path(self.folder).is_dir():
            raise ValueError(
                f"`{owner}(folder={str(self.folder)!r})` is no folder here. Create it on every "
                "machine, or use folder=None."
            )

    @property
    def spec(self) -> CodecSpec:
        """Format of the differences."""
        return CodecSpec(
            code=self.code, group_size=self.tile_size, symmetric=False, scale_dtype="bfloat16"
        )


class AQSGDCodec(BoundaryCodec):
    """The codec of ``AQSGDQuantization``, for hidden states.

    A payload is ``[samples in full precision | differences]``, both from a multiple of 16 bytes.
    A sample that a message has twice counts as unseen twice, or is added to twice the same m; the
    last is kept.
    """

    def __init__(self, name: str, config: AQSGDQuantization) -> None:
        self.name = name
        self.config = config
        self.options = repr(replace(config, memory_nbytes=0, folder=None))  # those are of one end
        self._spec = config.spec
        self._caches: dict[int, SampleCache] = {}
        # Messages that were announced and not yet coded, by boundary and micro-batch.
        self._visits: OrderedDict[tuple[int, int], Visit] = OrderedDict()

    def check(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Refuse tiles that would cross tokens, and a cache that does not hold one sample."""
        check_floats(self.name, dtype)
        check_channels(
            self.name, shape, self.config.tile_size, GROUP_TILES, "AQSGDQuantization.tile_size"
        )
        needed = math.prod(shape[1:]) * SCALE_DTYPES[self.config.cache_dtype].itemsize
        if needed > self.config.cache_nbytes:
            raise ValueError(
                f"The codec {self.name!r} needs {needed} bytes for a sample of {tuple(shape[1:])} "
                f"values, but cache_nbytes={self.config.cache_nbytes}. Raise it to hold the "
                "samples of an epoch."
            )

    def bits_per_value(self, shape: Sequence[int], dtype: torch.dtype) -> float:
        """Return the bits per value of a message whose samples have all been seen."""
        return self._spec.bits_per_element(math.prod(shape))

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype, message: Message) -> int:
        """Announce a message and return its size."""
        if not message.training:
            return math.prod(shape) * dtype.itemsize
        return self._sections(self._announced(shape, message), shape, dtype)[1]

    def encode(self, x: Tensor, message: Message) -> Tensor:
        """Return the samples in full precision and the differences."""
        self.check(x.shape, x.dtype)
        x = x.detach()
        if not message.training:
            return x.contiguous().clone().view(-1).view(torch.uint8)
        visit, cache = self._arrived(x.shape, message)
        rows = x.reshape(x.shape[0], -1)
        start, nbytes = self._sections(visit, x.shape, x.dtype)
        payload = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
        new, known = visit.new_at, visit.known_at
        references = cache.load(visit, x.device)
        if new:
            payload[:start] = rows[new].view(-1).view(torch.uint8)
        if references is not None:
            section, reference = payload[start:].view(1, -1), references.view(1, -1)
            encode(self._spec, rows[known].view(1, -1), reference=reference, out=section)
            decode(self._spec, section, reference.numel(), out=reference, add=True)
        cache.store(visit, rows[new], references)
        return payload

    def decode(
        self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, message: Message
    ) -> Tensor:
        """Return the samples in full precision and the sums."""
        if not message.training:
            check_payload(self.name, payload, self.nbytes(shape, dtype, message))
            return payload.clone().view(dtype).view(tuple(shape))
        visit, cache = self._arrived(shape, message)
        start, nbytes = self._sections(visit, shape, dtype)
        check_payload(self.name, payload, nbytes)
        rows = torch.empty(shape[0], cache.numel, dtype=dtype, device=payload.device)
        received = payload[:start].view(dtype).view(-1, cache.numel)
        references = cache.load(visit, payload.device)
        if visit.new_at:
            rows[visit.new_at] = received
        if references is not None:
            section, reference = payload[start:].view(1, -1), references.view(1, -1)
            decode(self._spec, section, reference.numel(), out=reference, add=True)
            rows[visit.known_at] = references.to(dtype)
        cache.store(visit, received, references)
        return rows.view(tuple(shape))

    def forget(self) -> None:
        """Forget all samples: checkpoints hold none, so both ends start over with one."""
        for cache in self._caches.values():
            cache.close()
        self._caches.clear()
        self._visits.clear()

    close = forget

    def _sections(self, visit: Visit, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, int]:
        """Return where the differences begin and where they end."""
        numel = math.prod(shape[1:])
        start = len(visit.new_at) * numel * dtype.itemsize  # a multiple of 16, since tiles are
        known = len(visit.known_at) * numel
        return start, start + (self._spec.nbytes(known) if known else 0)

    def _announced(self, shape: Sequence[int], message: Message) -> Visit:
        """Return the visit of a message, decided at the first call."""
        key = message.boundary, message.microbatch
        samples = _identities(self.name, shape, message)
        visit = self._visits.get(key)
        if visit is None:
            visit = self._visits[key] = self._cache(shape, message).visit(samples)
        elif visit.samples != samples:
            raise RuntimeError(
                f"Boundary {key[0]}, micro-batch {key[1]} was announced with the samples "
                f"{visit.samples} and now has {samples}: a message was announced and never came, "
                "so both ends may hold different samples. Start again from a checkpoint."
            )
        return visit

    def _arrived(self, shape: Sequence[int], message: Message) -> tuple[Visit, SampleCache]:
        """Return the visit of a message and its cache, and forget the announcement."""
        visit = self._announced(shape, message)
        first = next(key for key in self._visits if key[0] == message.boundary)
        if first != (message.boundary, message.microbatch):
            raise RuntimeError(
                f"Micro-batch {message.microbatch} overtook micro-batch {first[1]} at boundary "
                f"{first[0]}. Encode and decode the messages of a boundary in the order of nbytes."
            )
        del self._visits[first]
        return visit, self._caches[message.boundary]

    def _cache(self, shape: Sequence[int], message: Message) -> SampleCache:
        numel = math.prod(shape[1:])
        cache = self._caches.get(message.boundary)
        if cache is None:
            cache = self._caches[message.boundary] = SampleCache(numel, self.config)
        if cache.numel != numel:
            raise ValueError(
                f"The codec {self.name!r} keeps samples of {cache.numel} values and was given one "
                f"of {tuple(shape[1:])}. Pad all samples to one length, or choose the codec 'tah'."
            )
        return cache


def _identities(name: str, shape: Sequence[int], message: Message) -> tuple[int, ...]:
    samples = message.samples
    if samples is None or tuple(samples.shape) != (shape[0],):
        found = "none" if samples is None else f"shape {tuple(samples.shape)}"
        raise ValueError(
            f"The codec {name!r} needs an identity of each of the {shape[0]} samples of a training "
            f"message and got {found}. Give batches whose samples can be told apart, or choose the "
            "codec 'tah'."
        )
    return tuple(samples.tolist())
