"""Random numbers of a step that runs in parts.

[Note: random numbers of a step in parts]
Code outside of the layers runs on several stages, which have to draw the same numbers there: the
stage that masks tokens is not the one that computes the loss of masked tokens. So each micro-batch
starts with a seed of its own, the same on all stages of a pipeline, for every generator that a step
may use: torch's, numpy's, Python's, and generators that the module keeps.

Layers run on one stage only, as do modules in front of them that have placeholders elsewhere. They
draw from generators that are seeded for each call, and leave the step's as they were. The
seed is drawn from the step's generator, also where a placeholder is called. So dropout in a layer
does not depend on how the model is cut, and a layer that is recomputed for backward, where
checkpointing has restored torch's generator, finds its seed again.

By the first layer all stages must have drawn the same: they compare in the first batch of a shape.

After a batch the generators are where they were before it, so that all ranks shuffle and augment
alike.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

_numpy: Any = np.random  # its types leave out two of its functions


def mixed_seed(*parts: object) -> int:
    """Return a seed of 63 bits that depends on the ``repr`` of all parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class _Source(NamedTuple):
    """Functions that save, restore and seed the state of a generator."""

    save: Callable[[], Any]
    restore: Callable[[Any], object]
    seed: Callable[[int], object]


def _numpy_global() -> _Source:
    """Return numpy's global generator. It is swapped: its state takes 60 us to copy, each way."""
    spare = np.random.MT19937(0), np.random.MT19937(0)

    def seed(value: int) -> None:
        taken = _numpy.get_bit_generator() is spare[0]
        _numpy.set_bit_generator(spare[taken])
        np.random.seed(value & 0xFFFFFFFF)

    return _Source(_numpy.get_bit_generator, _numpy.set_bit_generator, seed)


def _source_of(generator: object) -> _Source | None:
    if isinstance(generator, torch.Generator):
        return _Source(generator.get_state, generator.set_state, generator.manual_seed)
    if isinstance(generator, random.Random):
        return _Source(generator.getstate, generator.setstate, generator.seed)
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator

        def restore(state: Any) -> None:
            bits.state = state

        return _Source(lambda: bits.state, restore, lambda seed: restore(type(bits)(seed).state))
    if isinstance(generator, np.random.RandomState):
        return _Source(
            generator.get_state,
            generator.set_state,
            lambda seed: generator.seed(seed & 0xFFFFFFFF),
        )
    return None


def held_generators(module: nn.Module) -> dict[str, object]:
    """Return the generators that a module and its submodules keep as attributes, by name."""
    return {
        f"{path}.{name}" if path else name: value
        for path, owner in module.named_modules()
        for name, value in vars(owner).items()
        if value is not torch.default_generator and _source_of(value) is not None
    }


class RandomNumbers:
    """Generators of a step on a device. See [Note: random numbers of a step in parts]."""

    def __init__(self, device: torch.device | None = None) -> None:
        generators = [torch.default_generator]
        if device is not None and device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            generators.append(torch.cuda.default_generators[index])
        self._own = [
            *(_Source(each.get_state, each.set_state, each.manual_seed) for each in generators),
            _Source(random.getstate, random.setstate, random.seed),
            _numpy_global(),
        ]
        self._held: dict[str, _Source] = {}
        # digests of the generators at the first layer, by micro-batch; None unless to be compared
        self.compared: dict[int, set[int]] | None = None
        self._seed = self._microbatch = 0
        self._held_seeds: dict[str, int] = {}

    def hold(self, generators: Mapping[str, object]) -> None:
        """Set which other generators the step may use, by name."""
        sources = {name: _source_of(each) for name, each in generators.items()}
        self._held = {name: source for name, source in sources.items() if source is not None}

    def held_states(self) -> dict[str, str]:
        """Return a digest of the state of each generator given to :meth:`hold`."""
        return {name: f"{_digest(each.save()):x}" for name, each in self._held.items()}

    @contextmanager
    def batch(self, seed: int, advance: bool = True) -> Iterator[None]:
        """Around the parts of one batch, which each begin with :meth:`start`.

        ``seed`` is the same on all stages, and differs between batches and replicas. ``advance``
        moves on the generators of :meth:`hold`, from whose states micro-batches get theirs.
        """
        own = [each.save() for each in self._own]
        held = {name: source.save() for name, source in self._held.items()}
        self._seed = seed
        self._held_seeds = {name: _digest(state) for name, state in held.items()}
        try:
            self.start(0)
            yield
        finally:
            for source, state in zip(self._own, own, strict=True):
                source.restore(state)
            for name, state in held.items():
                if advance:
                    self._held[name].seed(mixed_seed(self._held_seeds[name], "next batch"))
                else:
                    self._held[name].restore(state)

    def start(self, microbatch: int) -> None:
        """Seed all generators for a part of a step on a micro-batch."""
        self._microbatch = microbatch
        seed = mixed_seed(self._seed, microbatch)
        for source in self._own:
            source.seed(seed)
        for name, source in self._held.items():
            source.seed(mixed_seed(self._held_seeds[name], microbatch))

    def compare(self) -> None:
        """Record the states of the generators, for a comparison between stages."""
        if self.compared is not None:
            sources = [*self._own, *self._held.values()]
            states = [getattr(state := each.save(), "state", state) for each in sources]
            found = self.compared.setdefault(self._microbatch, set())
            found.add(mixed_seed(*map(_digest, states)))

    @contextmanager
    def layer(self) -> Iterator[None]:
        """Around a layer, which draws numbers of its own."""
        seed = _draw()
        sources = [*self._own, *self._held.values()]
        states = [source.save() for source in sources]
        try:
            for source in sources:
                source.seed(seed)
            yield
        finally:
            for source, state in zip(sources, states, strict=True):
                source.restore(state)

    def pass_layer(self) -> None:
        """Advance the generators of the step as :meth:`layer` does."""
        _draw()
        # As any swap, this drops the second of two normal numbers that numpy has at hand.
        _numpy.set_bit_generator(_numpy.get_bit_generator())


def _draw() -> int:
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def _digest(state: object) -> int:
    if isinstance(state, torch.Tensor):
        state = state.numpy()
    return mixed_seed(pickle.dumps(state))
